//! The forward pass on Hopper: its launch, and arrays as the copy engine takes them.

use super::arguments::{Arguments, HOPPER_KEYS, HOPPER_QUERIES, HOPPER_THREADS, HOPPER_WIDE_KEYS};
use super::{Attention, Step};
use crate::driver::Driver;
use crate::{Device, Result};

/// The columns of a box, which are 128 bytes.
const BOX: u32 = 64;

/// Tiles of keys and of values that are there at a time.
const STAGES: usize = 2;

/// The multiprocessors of a device for whose copy engine and warpgroups the forward pass has a kernel.
pub(super) fn multiprocessors(device: &Device) -> Option<u32> {
    (device.capability() == (9, 0)).then_some(device.limits().multiprocessors)
}

impl Attention {
    pub(super) fn step_on_hopper(&self, multiprocessors: u32, has_segments: bool) -> Step {
        let columns = self.padded_columns();
        // There is room for the next block's queries beside all but wide ones.
        let blocks = if columns == 256 { 1 } else { 2 };
        let rows = blocks * HOPPER_QUERIES + 2 * STAGES * self.keys_on_hopper();
        let mut ctas = self.blocks_of_queries(HOPPER_QUERIES);
        if self.blocks_of_cta(has_segments).is_some() {
            ctas = ctas.map(|blocks| blocks.min(multiprocessors as usize));
        }
        Step {
            name: format!("flash_attention_forward_hopper_{columns}_{}", self.dtype),
            ctas,
            threads: HOPPER_THREADS,
            shared_bytes: u32::try_from(rows * columns * 2).expect("fits a CTA"),
        }
    }

    /// The blocks that a CTA walks over of heads that share an order, about, or none where it has one
    /// block. By measurement: walking hides the beginnings of blocks, above all of short ones as of packed
    /// text, and the hardware shares out blocks more evenly.
    fn blocks_of_cta(&self, has_segments: bool) -> Option<usize> {
        match self.padded_columns() {
            64 => Some(8),
            128 if has_segments || self.options.softcap.is_some() => Some(4),
            _ => None,
        }
    }

    /// The heads that share an order of blocks.
    fn span(&self, multiprocessors: u32, has_segments: bool) -> u32 {
        let blocks = self.shape.queries.div_ceil(HOPPER_QUERIES);
        let heads = self
            .blocks_of_cta(has_segments)
            .map_or(1, |of_cta| (of_cta * multiprocessors as usize).div_ceil(blocks));
        heads.min(self.shape.heads * self.shape.group) as u32
    }

    fn keys_on_hopper(&self) -> usize {
        if self.padded_columns() == 256 { HOPPER_WIDE_KEYS } else { HOPPER_KEYS }
    }

    /// The same arguments, with what the kernel takes beside them.
    pub(super) fn with_maps(
        &self,
        arguments: Arguments,
        multiprocessors: u32,
    ) -> Result<Arguments> {
        let shape = self.shape;
        let driver = Driver::get()?;
        let Arguments { q, k, v, q_group, q_head, k_head, .. } = arguments;
        let extent = |number: i32| usize::try_from(number).expect("was made of one");
        let (inner, q_row, k_row) =
            (extent(arguments.inner), extent(arguments.q_row), extent(arguments.k_row));
        let [q_group, q_head, k_head] =
            [q_group, q_head, k_head].map(|rows| usize::try_from(rows).expect("was made of one"));
        let outer = shape.heads / inner;
        let queries = {
            let outer_rows = inner * shape.group * shape.queries;
            let strides = [q_row, q_group, q_head, outer_rows].map(|rows| rows * shape.width);
            driver.tensor_map_of(
                self.dtype,
                q,
                [shape.width, shape.queries, shape.group, inner, outer],
                [1, strides[0], strides[1], strides[2], strides[3]],
                [BOX, HOPPER_QUERIES as u32, 1, 1, 1],
            )?
        };
        // Where there are no keys, nothing is read, but a map must have an address and extents.
        let keys = shape.keys.max(1);
        let of_keys = |at, columns| {
            let strides = [k_row, k_head, inner * keys].map(|rows| rows * columns);
            driver.tensor_map_of(
                self.dtype,
                if shape.keys == 0 { q } else { at },
                [columns, keys, inner, outer],
                [1, strides[0], strides[1], strides[2]],
                [BOX, self.keys_on_hopper() as u32, 1, 1],
            )
        };
        Ok(Arguments {
            span: self.span(multiprocessors, !arguments.q_segments.is_null()),
            q_map: queries,
            k_map: of_keys(k, shape.width)?,
            v_map: of_keys(v, shape.value_width)?,
            ..arguments
        })
    }
}

#[cfg(test)]
mod tests {
    use xentile::DType;
    use xentile::flash_attention::{AttentionShape, FlashAttention};

    use super::super::{Attention, Has, Pass};

    const SHAPE: AttentionShape =
        AttentionShape { heads: 6, group: 4, queries: 130, keys: 65, width: 128, value_width: 64 };

    #[test]
    fn blocks_are_walked_over_on_hopper() {
        let of = |shape: AttentionShape, segments| {
            let attention =
                Attention::new(FlashAttention::new(shape.width), shape, DType::F16).unwrap();
            let steps = attention.steps(Pass::Forward, Has { sinks: true, segments }, Some(132));
            assert_eq!(steps.len(), 1);
            assert!(steps[0].name.starts_with("flash_attention_forward_hopper_"), "{steps:?}");
            // Beside what is dynamic there are barriers and segments.
            assert!(steps[0].shared_bytes <= 224 << 10);
            (steps[0].ctas.unwrap(), attention.span(132, segments))
        };
        let long = AttentionShape { queries: 8192, ..SHAPE };
        assert_eq!(of(long, false), (64 * 24, 1));
        assert_eq!(of(long, true), (132, 9));
        assert_eq!(of(AttentionShape { width: 64, ..long }, false), (132, 17));
        assert_eq!(of(AttentionShape { width: 136, ..long }, true), (64 * 24, 1));
        // Fewer blocks than multiprocessors, and fewer heads than might share an order.
        assert_eq!(of(SHAPE, true), (48, 24));
    }
}

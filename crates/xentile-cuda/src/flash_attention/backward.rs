//! The backward pass on Hopper: its launches, and arrays as the copy engine takes them.

use super::arguments::{
    Arguments, BACKWARD_ROWS, BACKWARD_THREADS, BackwardArguments, KEYS_BYTES_64, KEYS_BYTES_128,
    KEYS_BYTES_256, QUERIES_BYTES_64, QUERIES_BYTES_128, QUERIES_BYTES_256, VALUES_BYTES_256,
};
use super::{Attention, Step};
use crate::driver::Driver;
use crate::{Device, Result};

/// Columns and rows of a box.
const BOX: u32 = 64;

/// Whether this device has the kernels.
pub(super) fn is_for(device: &Device) -> bool {
    device.capability() == (9, 0)
}

impl Attention {
    /// The kernels after those of notes and sinks, in their order. Where logits are more than products times
    /// a factor above 0 they have code of their own.
    pub(super) fn backward_steps(&self) -> Vec<Step> {
        let xentile::flash_attention::AttentionShape {
            heads,
            group,
            queries,
            keys,
            width,
            value_width,
        } = self.shape;
        let of_keys = heads.checked_mul(keys.div_ceil(BACKWARD_ROWS));
        let of_queries = heads
            .checked_mul(group)
            .and_then(|heads| heads.checked_mul(queries.div_ceil(BACKWARD_ROWS)));
        let is_bent = self.options.softcap.is_some() || self.options.scale as f32 <= 0.0;
        let bent = if is_bent { "_bent" } else { "" };
        let step = |name: &str, ctas, shared_bytes| Step {
            name: format!("flash_attention_{name}_hopper{bent}_{}", self.dtype),
            ctas,
            threads: BACKWARD_THREADS,
            shared_bytes,
        };
        match width.max(value_width) {
            ..=64 => vec![
                step("keys_64", of_keys, KEYS_BYTES_64),
                step("queries_64", of_queries, QUERIES_BYTES_64),
            ],
            65..=128 => vec![
                step("keys_128", of_keys, KEYS_BYTES_128),
                step("queries_128", of_queries, QUERIES_BYTES_128),
            ],
            _ => vec![
                step("keys_256", of_keys, KEYS_BYTES_256),
                step("values_256", of_keys, VALUES_BYTES_256),
                step("queries_256", of_queries, QUERIES_BYTES_256),
            ],
        }
    }

    /// The same arguments, with what the copy engine needs.
    pub(super) fn with_backward_maps(&self, of: Arguments) -> Result<BackwardArguments> {
        let shape = self.shape;
        let driver = Driver::get()?;
        let extent = |number: i32| usize::try_from(number).expect("was made of one");
        let rows = |number: i64| usize::try_from(number).expect("was made of one");
        let (inner, q_row, k_row) = (extent(of.inner), extent(of.q_row), extent(of.k_row));
        let (q_group, q_head, k_head) = (rows(of.q_group), rows(of.q_head), rows(of.k_head));
        let outer = shape.heads / inner;
        // Of arrays without rows nothing is read, but a map must have an address and extents.
        let (queries, keys) = (shape.queries.max(1), shape.keys.max(1));
        let some = |count: usize, at, other| if count == 0 { other } else { at };
        let of_queries = |at, columns: usize| {
            let outer_rows = inner * shape.group * queries;
            let [row, group, head, all] =
                [q_row, q_group.max(1), q_head.max(1), outer_rows].map(|rows| rows * columns);
            driver.tensor_map_of(
                self.dtype,
                some(shape.queries, at, of.k),
                [columns, queries, shape.group, inner, outer],
                [1, row, group, head, all],
                [BOX, BOX, 1, 1, 1],
            )
        };
        let of_keys = |at, columns: usize| {
            let [row, head, all] = [k_row, k_head.max(1), inner * keys].map(|rows| rows * columns);
            driver.tensor_map_of(
                self.dtype,
                some(shape.keys, at, of.q),
                [columns, keys, inner, outer],
                [1, row, head, all],
                [BOX, BOX, 1, 1],
            )
        };
        Ok(BackwardArguments {
            q: of_queries(of.q, shape.width)?,
            dout: of_queries(of.dout, shape.value_width)?,
            k: of_keys(of.k, shape.width)?,
            v: of_keys(of.v, shape.value_width)?,
            of,
        })
    }
}

//! Both passes on Hopper: their launches, and arrays as the copy engine takes them.

use std::ffi::{c_uint, c_void};

use xentile::DType;

use super::arguments::{
    Arguments, BACKWARD_ROWS, BACKWARD_THREADS, BLOCK, BackwardArguments, FORWARD_KEYS,
    FORWARD_QUERIES, FORWARD_THREADS, FORWARD_WIDE_KEYS, ForwardArguments, GRADIENTS_BYTES_64,
    GRADIENTS_BYTES_128, GradientArguments, KEYS_BYTES_64, KEYS_BYTES_128, KEYS_BYTES_192,
    KEYS_BYTES_256, QUERIES_BYTES_64, QUERIES_BYTES_128, QUERIES_BYTES_192, QUERIES_BYTES_256,
    THREADS, VALUES_BYTES_192, VALUES_BYTES_256,
};
use super::{Attention, Scratch, Step};
use crate::driver::{Driver, TensorMap};
use crate::{Device, Result};

/// The columns of a box, which are 128 bytes, and its rows in the backward pass.
const BOX: c_uint = 64;

/// What heads of queries are padded to a multiple of in the scratch, and words of each such block that are not
/// sums of dq: rows, ranges, segments, notes, counters.
const PADDED: usize = 128;
const SMALL_WORDS: usize = 768;

/// The largest cap of a forward pass without running maxima.
const MOST_CAPPED: f32 = 55.0;

/// The multiprocessors of a device that has these kernels.
pub(super) fn multiprocessors(device: &Device) -> Option<u32> {
    (device.capability() == (9, 0)).then_some(device.limits().multiprocessors)
}

impl Attention {
    /// The columns that kernels have for those of q and k, and of v.
    fn hopper_columns(&self) -> (usize, usize) {
        let of = self.padded_columns();
        let (width, value_width) = (self.shape.width, self.shape.value_width);
        if of == 256 && width <= 192 && value_width <= 128 { (192, 128) } else { (of, of) }
    }

    pub(super) fn forward_on_hopper(&self, multiprocessors: u32) -> Step {
        let (columns, value_columns) = self.hopper_columns();
        // There is room for the next block's queries beside all but wide ones.
        let blocks = if columns > 128 { 1 } else { 2 };
        // Tiles of keys and of values at a time.
        let stages = if columns == 64 { 4 } else { 2 };
        let tiles = stages * self.keys_of_tile() * (columns + value_columns);
        let elements = blocks * FORWARD_QUERIES * columns + tiles;
        let walk = self.blocks_of_cta(multiprocessors);
        let ctas = self.blocks_of_queries(FORWARD_QUERIES * walk);
        Step {
            name: format!(
                "flash_attention_forward_{columns}_hopper{}_{}",
                if self.is_capped() { "_capped" } else { self.bent_suffix() },
                self.dtype
            ),
            ctas,
            threads: FORWARD_THREADS,
            shared_bytes: u32::try_from(elements * 2).expect("fits a CTA"),
        }
    }

    /// The kernels after those of notes and sinks, in their order. Where logits are more than products times
    /// a factor above 0 they have code of their own.
    pub(super) fn gradients_on_hopper(&self) -> Vec<Step> {
        let of_keys = self.shape.heads.checked_mul(self.shape.keys.div_ceil(BACKWARD_ROWS));
        let of_queries = self.blocks_of_queries(BACKWARD_ROWS);
        let bent = self.bent_suffix();
        let step = |name: &str, ctas, shared_bytes| Step {
            name: format!("flash_attention_{name}_hopper{bent}_{}", self.dtype),
            ctas,
            threads: BACKWARD_THREADS,
            shared_bytes,
        };
        match self.hopper_columns().0 {
            64 => vec![
                step("keys_64", of_keys, KEYS_BYTES_64),
                step("queries_64", of_queries, QUERIES_BYTES_64),
            ],
            128 => vec![
                step("keys_128", of_keys, KEYS_BYTES_128),
                step("queries_128", of_queries, QUERIES_BYTES_128),
            ],
            192 => vec![
                step("keys_192", of_keys, KEYS_BYTES_192),
                step("values_192", of_keys, VALUES_BYTES_192),
                step("queries_192", of_queries, QUERIES_BYTES_192),
            ],
            _ => vec![
                step("keys_256", of_keys, KEYS_BYTES_256),
                step("values_256", of_keys, VALUES_BYTES_256),
                step("queries_256", of_queries, QUERIES_BYTES_256),
            ],
        }
    }

    /// The words of f32 of scratch that the backward pass in five GEMMs takes for every 128 queries of a head, the
    /// last perhaps fewer; None for arrays that have no such kernel.
    #[must_use]
    pub fn scratch_words(&self) -> Option<usize> {
        let columns = self.padded_columns();
        (self.dtype != DType::F32 && columns <= 128).then(|| PADDED * columns + SMALL_WORDS)
    }

    /// The kernels of the backward pass in five GEMMs but that of sinks: what comes before that, and after.
    pub(super) fn gradients_in_one(&self, multiprocessors: u32) -> (Step, Vec<Step>) {
        let columns = self.padded_columns();
        let bent = self.bent_suffix();
        let step = |name: &str, ctas, threads, shared_bytes| Step {
            name: format!("flash_attention_{name}_{}", self.dtype),
            ctas,
            threads,
            shared_bytes,
        };
        let blocks = self.blocks_of_queries(PADDED).and_then(|all| all.checked_mul(PADDED / BLOCK));
        let of_keys = self.shape.heads.checked_mul(self.shape.keys.div_ceil(BACKWARD_ROWS));
        // A CTA takes one block of keys after another.
        let ctas = of_keys.map(|all| all.min(multiprocessors as usize));
        let shared = if columns == 64 { GRADIENTS_BYTES_64 } else { GRADIENTS_BYTES_128 };
        let all = format!("gradients_{columns}_hopper{bent}");
        let round = format!("round_{columns}");
        let rounded_bytes = u32::try_from(BLOCK * columns * 2).expect("fits a CTA");
        (
            step("rows", blocks, THREADS, 0),
            vec![
                step(&all, ctas, BACKWARD_THREADS, shared),
                step(&round, self.blocks_of_queries(BLOCK), THREADS, rounded_bytes),
            ],
        )
    }

    /// What these take. There are heads, queries and keys.
    pub(super) fn gradient_arguments(
        &self,
        of: Arguments,
        scratch: Scratch,
        multiprocessors: u32,
    ) -> Result<GradientArguments> {
        let BackwardArguments { q, dout, k, v, of } = self.backward_arguments(of)?;
        let heads = self.shape.heads;
        let blocks = self.shape.keys.div_ceil(BACKWARD_ROWS);
        // By measurement. Half of the blocks of so many heads fill the GPU, or with a factor of 4 a quarter: blocks
        // then wait less for their turn, but more heads share the L2 cache, which groups fill.
        let halves = if self.shape.group == 1 { 4 } else { 2 };
        let most = (halves * multiprocessors as usize / blocks).max(1);
        let heads_at_a_time = heads.div_ceil(heads.div_ceil(most));
        // The scratch's parts, each of so many words for every 128 queries of a head of queries, or of keys.
        let of_keys = heads * self.shape.queries.div_ceil(PADDED);
        let of_queries = of_keys * self.shape.group;
        let mut words = 0;
        let mut part = |count: usize| {
            let begins = words;
            words += count;
            scratch.at.wrapping_add(begins)
        };
        let sums = part(of_queries * PADDED * self.padded_columns());
        let rows = part(of_queries * PADDED * 2);
        let ranges = part(of_keys * PADDED * 2);
        let segments = part(of_keys * PADDED);
        let notes = part(of_keys * (PADDED / BLOCK) * 4);
        let terms = part(of_queries * (PADDED / BLOCK) * 2);
        let tickets = part(1);
        debug_assert!(words <= of_queries * self.scratch_words().unwrap_or_default());
        Ok(GradientArguments {
            q,
            dout,
            k,
            v,
            of,
            rows: rows.cast(),
            ranges: ranges.cast(),
            segments: segments.cast(),
            notes: notes.cast(),
            sums,
            terms: terms.cast(),
            tickets: tickets.cast(),
            heads_at_a_time: heads_at_a_time as i32,
            has_order: i32::from(scratch.has_order),
        })
    }

    /// What names of kernels have where logits are more than products times a factor above 0.
    fn bent_suffix(&self) -> &'static str {
        let is_bent = self.options.softcap.is_some() || self.options.scale as f32 <= 0.0;
        if is_bent { "_bent" } else { "" }
    }

    /// Whether the cap alone keeps sums of exponentials in range, with bf16 probabilities.
    fn is_capped(&self) -> bool {
        let softcap = self.options.softcap.unwrap_or(0.0) as f32;
        self.dtype == DType::Bf16 && 0.0 < softcap && softcap <= MOST_CAPPED
    }

    /// The most blocks of a head that a CTA of the forward pass has. By measurement: walking hides the beginnings
    /// of blocks, above all of short ones as of packed text. An even number of blocks is as much work for every
    /// CTA where masks are causal.
    fn blocks_of_cta(&self, multiprocessors: u32) -> usize {
        let most = match self.padded_columns() {
            64 => 16,
            128 => 8,
            _ => 1,
        };
        let heads = self.shape.heads.saturating_mul(self.shape.group);
        let blocks = self.shape.queries.div_ceil(FORWARD_QUERIES);
        // A CTA takes about as long to begin as a block.
        let time = |walk: &usize| {
            let ctas = heads.saturating_mul(blocks.div_ceil(*walk));
            ctas.div_ceil(multiprocessors as usize) * (walk + 1)
        };
        [1, 2, 4, 8, 16].into_iter().filter(|&walk| walk <= most).min_by_key(time).unwrap_or(1)
    }

    fn keys_of_tile(&self) -> usize {
        if self.hopper_columns().0 == 256 { FORWARD_WIDE_KEYS } else { FORWARD_KEYS }
    }

    /// What the forward pass takes. There are heads and queries.
    pub(super) fn forward_arguments(
        &self,
        of: Arguments,
        multiprocessors: u32,
    ) -> Result<ForwardArguments> {
        let (width, value_width) = (self.shape.width, self.shape.value_width);
        let keys = self.keys_of_tile() as c_uint;
        Ok(ForwardArguments {
            q: self.map_of_queries(&of, of.q, width, FORWARD_QUERIES as c_uint)?,
            k: self.map_of_keys(&of, of.k, width, keys)?,
            v: self.map_of_keys(&of, of.v, value_width, keys)?,
            walk: self.blocks_of_cta(multiprocessors) as u32,
            of,
        })
    }

    /// What the backward pass takes. There are heads.
    pub(super) fn backward_arguments(&self, of: Arguments) -> Result<BackwardArguments> {
        let (width, value_width) = (self.shape.width, self.shape.value_width);
        Ok(BackwardArguments {
            q: self.map_of_queries(&of, of.q, width, BOX)?,
            dout: self.map_of_queries(&of, of.dout, value_width, BOX)?,
            k: self.map_of_keys(&of, of.k, width, BOX)?,
            v: self.map_of_keys(&of, of.v, value_width, BOX)?,
            of,
        })
    }

    /// Boxes of `rows` queries of an array like q. Of arrays without rows nothing is read, but a map must have
    /// an address and extents.
    fn map_of_queries(
        &self,
        of: &Arguments,
        at: *const c_void,
        columns: usize,
        rows: c_uint,
    ) -> Result<TensorMap> {
        let (inner, group) = (count(of.inner), self.shape.group);
        let queries = self.shape.queries.max(1);
        let strides =
            [count(of.q_row), count(of.q_group), count(of.q_head), inner * group * queries];
        let [row, head, of_keys, all] = strides.map(|rows| rows.max(1) * columns);
        Driver::get()?.tensor_map_of(
            self.dtype,
            if self.shape.queries == 0 { of.k } else { at },
            [columns, queries, group, inner, self.shape.heads / inner],
            [1, row, head, of_keys, all],
            [BOX, rows, 1, 1, 1],
        )
    }

    /// The same of an array like k.
    fn map_of_keys(
        &self,
        of: &Arguments,
        at: *const c_void,
        columns: usize,
        rows: c_uint,
    ) -> Result<TensorMap> {
        let (inner, keys) = (count(of.inner), self.shape.keys.max(1));
        let strides = [count(of.k_row), count(of.k_head), inner * keys];
        let [row, head, all] = strides.map(|rows| rows.max(1) * columns);
        Driver::get()?.tensor_map_of(
            self.dtype,
            if self.shape.keys == 0 { of.q } else { at },
            [columns, keys, inner, self.shape.heads / inner],
            [1, row, head, all],
            [BOX, rows, 1, 1],
        )
    }
}

/// A number of rows, as the host had it.
fn count(rows: impl TryInto<usize>) -> usize {
    rows.try_into().ok().expect("was made of one")
}

#[cfg(test)]
mod tests {
    use xentile::DType;
    use xentile::flash_attention::{AttentionShape, FlashAttention};

    use super::super::{Attention, Pass, Step};

    const SHAPE: AttentionShape =
        AttentionShape { heads: 6, group: 4, queries: 130, keys: 65, width: 128, value_width: 64 };

    #[test]
    fn blocks_are_walked_over() {
        let of = |shape: AttentionShape| {
            let attention =
                Attention::new(FlashAttention::new(shape.width), shape, DType::F16).unwrap();
            let step = attention.forward_on_hopper(132);
            // Beside what is dynamic there are barriers and segments.
            assert!(step.shared_bytes <= 224 << 10);
            (step.ctas.unwrap(), attention.blocks_of_cta(132))
        };
        let long = AttentionShape { queries: 8192, ..SHAPE };
        assert_eq!(of(long), (16 * 24, 4));
        assert_eq!(of(AttentionShape { width: 64, ..long }), (16 * 24, 4));
        // There is no room for the next block's queries.
        for width in [136, 200] {
            assert_eq!(of(AttentionShape { width, ..long }), (64 * 24, 1));
        }
        // All blocks run at a time.
        assert_eq!(of(SHAPE), (48, 1));
        assert_eq!(of(AttentionShape { heads: 32, queries: 4096, ..SHAPE }), (512, 8));
    }

    #[test]
    fn backward_launches_and_scratch() {
        let attention = Attention::new(FlashAttention::new(72), SHAPE, DType::F16).unwrap();
        assert_eq!(attention.scratch_words(), Some(128 * 128 + 768));
        let (before, after) = attention.gradients_in_one(4);
        let short = |step: Step| (step.name, step.ctas.unwrap(), step.threads, step.shared_bytes);
        let named = |name: &str, ctas, threads, bytes| {
            (format!("flash_attention_{name}_f16"), ctas, threads, bytes)
        };
        assert_eq!(short(before), named("rows", 96, 128, 0));
        let expected = [
            named("gradients_128_hopper", 4, 384, 208 << 10),
            named("round_128", 72, 128, 16 << 10),
        ];
        assert_eq!(after.into_iter().map(short).collect::<Vec<_>>(), expected);
        let wide = AttentionShape { width: 136, ..SHAPE };
        let wide = Attention::new(FlashAttention::new(136), wide, DType::F16).unwrap();
        assert_eq!(wide.scratch_words(), None);
    }

    #[test]
    fn small_caps_have_a_forward_kernel_without_maxima() {
        let name = |softcap, dtype| {
            let options = FlashAttention { softcap: Some(softcap), ..FlashAttention::new(72) };
            let attention = Attention::new(options, SHAPE, dtype).unwrap();
            attention.forward_on_hopper(132).name
        };
        for (softcap, dtype, expected) in [
            (55.0, DType::Bf16, "capped_bf16"),
            (55.1, DType::Bf16, "bent_bf16"),
            (30.0, DType::F16, "bent_f16"),
        ] {
            let expected = format!("flash_attention_forward_128_hopper_{expected}");
            assert_eq!(name(softcap, dtype), expected);
        }
    }

    #[test]
    fn every_pass_has_kernels_of_its_own() {
        let of = |width, scale: f64, pass| {
            let shape = AttentionShape { width, ..SHAPE };
            let options = FlashAttention { scale, ..FlashAttention::new(width) };
            let attention = Attention::new(options, shape, DType::Bf16).unwrap();
            let steps = attention.all_steps(pass, Some(132)).into_iter();
            steps
                .map(|step| (step.name, step.ctas.unwrap(), step.threads, step.shared_bytes >> 10))
                .collect::<Vec<_>>()
        };
        let named = |name: &str, ctas: usize, threads: u32, kib: u32| {
            (format!("flash_attention_{name}_bf16"), ctas, threads, kib)
        };
        assert_eq!(of(72, 0.1, Pass::Forward), [named("forward_128_hopper", 48, 384, 192)]);
        let before = [named("notes", 72, 128, 0), named("sinks", 24, 256, 0)];
        let expected =
            [named("keys_128_hopper", 6, 384, 192), named("queries_128_hopper", 48, 384, 192)];
        assert_eq!(of(72, 0.1, Pass::Backward), [before.to_vec(), expected.to_vec()].concat());
        assert_eq!(of(192, 0.1, Pass::Forward), [named("forward_192_hopper", 48, 384, 208)]);
        assert_eq!(of(192, 0.0, Pass::Forward), [named("forward_192_hopper_bent", 48, 384, 208)]);
        let expected = [
            named("keys_192_hopper", 6, 384, 208),
            named("values_192_hopper", 6, 384, 208),
            named("queries_192_hopper", 48, 384, 200),
        ];
        assert_eq!(of(192, 0.1, Pass::Backward), [before.to_vec(), expected.to_vec()].concat());
        let expected = [
            named("keys_256_hopper_bent", 6, 384, 224),
            named("values_256_hopper_bent", 6, 384, 192),
            named("queries_256_hopper_bent", 48, 384, 224),
        ];
        assert_eq!(of(256, -0.1, Pass::Backward), [before.to_vec(), expected.to_vec()].concat());
    }
}

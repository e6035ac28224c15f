//! How a problem is tiled, and where the parts of the scratch lie.

use xentile::DType;
pub(super) use xentile::linear_cross_entropy::plan::cuda::{ALIGNMENT, own_rows};
use xentile::linear_cross_entropy::plan::cuda::{row_stride, slot_offset};

use super::Linear;
use crate::cross_entropy::Pass;
use crate::fused_product::{FusedProduct, rescale_bytes};

/// Bytes of a row's sums between chunks.
pub(super) const CARRIED_BYTES: usize = 16;
/// Columns that even chunks are a multiple of.
const STEP: usize = 128;

/// Tokens and columns of a chunk of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    /// Tokens.
    pub tokens: usize,
    /// Columns.
    pub columns: usize,
}

/// The columns whose logits are saved in the memory of dweight until dlogits are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedColumns {
    /// Columns, the first of the vocabulary.
    pub columns: usize,
    /// Columns of a slot, which one GEMM computes.
    pub slot: usize,
}

/// Some tokens, or some columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) first: usize,
    pub(super) count: usize,
}

impl Chunk {
    /// So many of the first, and the others.
    pub(super) fn split_at(self, count: usize) -> [Self; 2] {
        let count = count.min(self.count);
        let rest = Self { first: self.first + count, count: self.count - count };
        [Self { count, ..self }, rest]
    }

    /// The chunks of it evenly, but for steps, and have no more than `most`.
    pub(super) fn evenly(self, most: usize) -> impl Iterator<Item = Self> + Clone {
        let most = most.max(1);
        let even = self.count.div_ceil(self.count.div_ceil(most).max(1)).next_multiple_of(STEP);
        self.chunks(even.min(most))
    }

    /// The chunks of it, as [`chunks`] does.
    pub(super) fn chunks(self, chunk: usize) -> impl Iterator<Item = Self> + Clone {
        chunks(self.count, chunk)
            .map(move |chunk| Self { first: self.first + chunk.first, ..chunk })
    }
}

/// The chunks of `total`, the last of which may be smaller.
pub(super) fn chunks(total: usize, chunk: usize) -> impl Iterator<Item = Chunk> + Clone {
    (0..total)
        .step_by(chunk.max(1))
        .map(move |first| Chunk { first, count: chunk.max(1).min(total - first) })
}

/// A sweep over all chunks of logits, and the gradients that it makes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sweep {
    pub(super) chunk: Extents,
    pub(super) makes_hidden: bool,
    pub(super) makes_weight: bool,
    /// Whether it is the [single pass](Linear::single_pass) over the first columns.
    pub(super) single_pass: bool,
}

impl Sweep {
    /// A sweep that makes both gradients.
    pub(super) fn of(chunk: Extents) -> Self {
        Self { chunk, makes_hidden: true, makes_weight: true, single_pass: false }
    }
}

/// The parts of the scratch, in their order; those that a pass does not have are empty. What one
/// sweep leaves to the next comes first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) hidden_sums: usize,
    pub(super) carried: usize,
    pub(super) token_scalars: usize,
    pub(super) workspace: usize,
    pub(super) logits: usize,
    /// Logits in f32, of operands of 16 bits.
    pub(super) f32_logits: usize,
    /// Hidden states of a chunk, scaled, where sums are in the place of their gradient.
    pub(super) scaled: usize,
    /// Shifts of a chunk's unnormalised softmax.
    pub(super) rescales: usize,
    pub(super) weight_sums: usize,
    pub(super) bytes: usize,
}

/// The columns of a fused pass over chunks of columns: those whose unnormalised softmax (with float32
/// operands, logits) is saved, and those whose logits are recomputed.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    /// Saved in the memory of dweight.
    pub(super) saved_columns: Vec<Chunk>,
    /// Saved in the scratch: after `saved_columns`, or with float32 operands after all others.
    pub(super) last: Chunk,
    /// Computed twice, in the scratch.
    pub(super) recomputed: Chunk,
}

impl Linear {
    /// The scratch that `pass` needs, in bytes.
    #[must_use]
    pub fn scratch_bytes(&self, pass: Pass) -> usize {
        // Of two sweeps each has all of it.
        self.sweeps(pass).map(|sweep| self.layout(pass, sweep).bytes).max().unwrap_or(0)
    }

    /// The sweeps over all chunks that `pass` makes, in their order.
    pub(super) fn sweeps(&self, pass: Pass) -> impl Iterator<Item = Sweep> {
        let of_all = Sweep::of(self.chunk);
        let sweeps = match (pass, self.dweight_chunk, self.single_pass) {
            (Pass::Backward, Some(chunk), _) => {
                let for_weight = Sweep { chunk, makes_hidden: false, ..of_all };
                [Some(Sweep { makes_weight: false, ..of_all }), Some(for_weight)]
            }
            (Pass::Fused, _, Some(single_pass)) => self.sweeps_of_both(single_pass).map(Some),
            (Pass::Forward, ..) => {
                [Some(Sweep { makes_hidden: false, makes_weight: false, ..of_all }), None]
            }
            _ => [Some(of_all), None],
        };
        sweeps.into_iter().flatten()
    }

    /// The single pass over the first columns, and the sweep over the others.
    pub(super) fn sweeps_of_both(&self, single_pass: Extents) -> [Sweep; 2] {
        // Never all columns, whose dhidden would have no sums.
        let columns = self.chunk.columns.min(self.vocab.saturating_sub(single_pass.columns));
        let first = Sweep { single_pass: true, ..Sweep::of(single_pass) };
        [first, Sweep::of(Extents { columns, ..self.chunk })]
    }

    pub(super) fn layout(&self, pass: Pass, sweep: Sweep) -> Layout {
        let mut bytes = 0;
        let mut take = |wanted: usize| {
            let at = bytes;
            bytes += wanted.next_multiple_of(ALIGNMENT);
            at
        };
        let only = |condition: bool, wanted: usize| if condition { wanted } else { 0 };
        let Extents { tokens, columns } = sweep.chunk;
        let chunks_columns = columns < self.vocab;
        // Gradients in f32 are their own sums, as those that one product gives are.
        let has_sums = |gradient: DType| gradient != DType::F32 && pass != Pass::Forward;
        let has_hidden = has_sums(self.hidden_gradient) && sweep.makes_hidden && chunks_columns;
        let has_weight =
            has_sums(self.weight_gradient) && sweep.makes_weight && tokens < self.tokens;
        let [rows, row] = self.weight_sums(sweep);
        // A few rows of a gradient pass through this place too.
        let passing = only(has_weight, row).max(only(has_hidden, self.width));
        let rounded = (8 * 2 * passing).saturating_sub(self.workspace_bytes);
        let logits = tokens * self.stride(columns) * self.dtype.size_bytes();
        let f32_logits = 4 * tokens * columns;
        let carried = self.has_f32_logits() && pass != Pass::Backward && chunks_columns;
        let has_tokens = pass != Pass::Forward && self.dtype != DType::F32;
        let all = FusedProduct::bytes_of_tokens(self.tokens, self.vocab);
        let [hidden_rows, hidden_row] = self.hidden_sums(sweep);
        let scaled = tokens * self.width * self.dtype.size_bytes();
        let hidden_sums = take(only(has_hidden, 4 * hidden_rows * hidden_row));
        let carried = take(only(carried, CARRIED_BYTES * tokens));
        let token_scalars = take(only(has_tokens, all));
        let workspace = take(self.workspace_bytes);
        let logits = take(logits.max(rounded));
        let f32_logits = take(only(self.f32_logits, f32_logits));
        let has_scaled = pass == Pass::Fused && self.keeps_scaled() && !self.f32_logits;
        let scaled = take(only(sweep.single_pass || has_scaled, scaled));
        let rescales =
            take(only(pass == Pass::Fused && !self.f32_logits, self.rescale_bytes(sweep)));
        let weight_sums = take(only(has_weight, 4 * rows * row));
        Layout {
            hidden_sums,
            carried,
            token_scalars,
            workspace,
            logits,
            f32_logits,
            scaled,
            rescales,
            weight_sums,
            bytes,
        }
    }

    /// Bytes of the shifts of the unnormalised softmax that a sweep of the fused pass makes.
    fn rescale_bytes(&self, sweep: Sweep) -> usize {
        let Extents { tokens, columns } = sweep.chunk;
        if self.dtype == DType::F32 || (self.single_pass.is_some() && !sweep.single_pass) {
            return 0;
        }
        let saved_columns = self.columns().saved_columns.into_iter().map(|saved| saved.count);
        rescale_bytes(tokens, saved_columns.chain([columns]))
    }

    /// Whether scaled hidden states are in the scratch, as dhidden has another dtype.
    pub(super) fn keeps_scaled(&self) -> bool {
        self.hidden_gradient != self.dtype
    }

    /// Whether something else may be in the memory of the weight's gradient until that is written.
    fn lends_weight(&self) -> bool {
        self.weight_gradient == self.dtype && !self.adds_to_weight
    }

    /// Whether logits are in memory in f32.
    pub(super) fn has_f32_logits(&self) -> bool {
        self.f32_logits || self.dtype == DType::F32
    }

    /// Elements from one row to the next of logits of so many columns.
    pub(super) fn stride(&self, columns: usize) -> usize {
        row_stride(columns, self.dtype.size_bytes())
    }

    /// Rows of the hidden states' sums that are in the scratch, and elements of each.
    pub(super) fn hidden_sums(&self, sweep: Sweep) -> [usize; 2] {
        let rows = if sweep.makes_weight { self.tokens } else { sweep.chunk.tokens };
        [rows - if self.shares_hidden(sweep) { own_rows(rows) } else { 0 }, self.width]
    }

    /// Whether half of the sums of the hidden states' gradient are where it goes: where tokens are
    /// split, in a sweep or the one before it, for else every product with them would be two of half
    /// the size.
    pub(super) fn shares_hidden(&self, sweep: Sweep) -> bool {
        sweep.makes_weight && (self.single_pass.is_some() || sweep.chunk.tokens < self.tokens)
    }

    /// Rows of the weight's sums over a chunk of a sweep's columns that are in the scratch, and
    /// elements of each.
    pub(super) fn weight_sums(&self, sweep: Sweep) -> [usize; 2] {
        let columns = sweep.chunk.columns;
        let [rows, row] =
            if self.vocab_is_last { [self.width, columns] } else { [columns, self.width] };
        let own = match sweep {
            // Nothing else of the gradient is written yet.
            Sweep { single_pass: true, .. } => rows.min(self.vocab / 2),
            _ if self.is_without_gaps(columns) => own_rows(rows),
            _ => 0,
        };
        [rows - own, row]
    }

    /// Whether so many columns' part of the weight's gradient has no gaps.
    pub(super) fn is_without_gaps(&self, columns: usize) -> bool {
        !self.vocab_is_last || columns == self.vocab
    }

    /// Whether a single pass can take so many first columns: its sums of dweight lie over rows that the
    /// sweep over the other columns writes later.
    pub(super) fn allows_single_pass(&self, Extents { tokens, columns }: Extents) -> bool {
        let some = tokens > 0 && (1..self.vocab).contains(&columns);
        some && !self.vocab_is_last && self.saved_columns.is_none() && self.lends_weight()
    }

    /// The columns of a fused pass over chunks of columns.
    pub(super) fn columns(&self) -> Columns {
        let SavedColumns { columns: saved, slot } =
            self.saved_columns.unwrap_or(SavedColumns { columns: 0, slot: 1 });
        let last = self.chunk.columns.min(self.vocab);
        let recomputed = self.vocab.saturating_sub(saved + last);
        // Logits' sums are whole when the last columns' are in them; gradients of the unnormalised
        // softmax wait for nothing.
        let is_at_end = self.dtype == DType::F32;
        let [last_first, recomputed_first] =
            if is_at_end { [saved + recomputed, saved] } else { [saved, saved + last] };
        Columns {
            saved_columns: chunks(saved, slot).collect(),
            last: Chunk { first: last_first, count: last },
            recomputed: Chunk { first: recomputed_first, count: recomputed },
        }
    }

    /// The element of dweight, `[V, D]`, where logits of the columns from `first` on are saved, in slots
    /// of `slot` columns.
    pub(super) fn saved_logits_at(&self, first: usize, slot: usize) -> usize {
        slot_offset([self.tokens, self.width], first, slot, self.stride(slot))
    }

    /// Whether the memory of dweight has room for the logits to be saved there.
    #[must_use]
    pub fn has_room(&self, SavedColumns { columns, slot }: SavedColumns) -> bool {
        let Some(last) = columns.checked_sub(1) else { return true };
        let end = self.saved_logits_at(last, slot.max(1)) + self.tokens * self.stride(slot);
        slot > 0
            && self.lends_weight()
            && !self.vocab_is_last
            && self.chunk.tokens >= self.tokens
            && columns + self.chunk.columns <= self.vocab
            && end <= self.vocab * self.width
    }
}

#[cfg(test)]
mod tests {
    use xentile::linear_cross_entropy::plan::{Problem, cuda as plan};

    use super::*;

    const WORKSPACE_BYTES: usize = 4 << 20;
    const LINEAR: Linear = Linear {
        tokens: 1000,
        width: 64,
        vocab: 5000,
        vocab_is_last: false,
        dtype: DType::Bf16,
        hidden_gradient: DType::Bf16,
        weight_gradient: DType::Bf16,
        adds_to_weight: false,
        leaves_hidden: false,
        chunk: Extents { tokens: 1000, columns: 5000 },
        dweight_chunk: None,
        saved_columns: None,
        single_pass: None,
        f32_logits: false,
        workspace_bytes: WORKSPACE_BYTES,
        time_block: None,
        block_size: None,
    };

    fn tiled(tokens: usize, columns: usize) -> Linear {
        Linear { chunk: Extents { tokens, columns }, ..LINEAR }
    }

    #[test]
    fn chunks_hold_all_and_the_last_may_be_smaller() {
        let chunked =
            |total, chunk| chunks(total, chunk).map(|c| (c.first, c.count)).collect::<Vec<_>>();
        assert_eq!(chunked(10, 4), [(0, 4), (4, 4), (8, 2)]);
        assert_eq!(chunked(8, 4), [(0, 4), (4, 4)]);
        assert_eq!(chunked(3, 8), [(0, 3)]);
        assert_eq!(chunked(0, 8), []);
    }

    #[test]
    fn scratch_is_logits_and_the_sums_that_chunks_need() {
        let whole = WORKSPACE_BYTES + 1000 * 5056 * 2;
        // Of 5000 columns 157 words.
        let token_scalars: usize = 256 + (16_usize * 1000).next_multiple_of(256) + 768;
        // Of 20 tiles.
        let rescales: usize = (2_usize * 20 * 1000).next_multiple_of(256);
        assert_eq!(LINEAR.scratch_bytes(Pass::Fused), whole + token_scalars + rescales);
        assert_eq!(LINEAR.scratch_bytes(Pass::Backward), whole + token_scalars);
        let part = tiled(1000, 1024);
        let logits = WORKSPACE_BYTES + 1000 * 1024 * 2;
        let round = |bytes: usize| bytes.next_multiple_of(256);
        assert_eq!(part.scratch_bytes(Pass::Forward), logits);
        assert_eq!(part.scratch_bytes(Pass::Backward), logits + token_scalars + 4 * 1000 * 64);
        let fused = logits + round(2 * 4 * 1000) + token_scalars + 4 * 1000 * 64;
        assert_eq!(part.scratch_bytes(Pass::Fused), fused);
        let both = tiled(500, 1024);
        // The other half of sums is where their gradient goes.
        let hidden = 4 * (1000 - 448) * 64;
        let (logits, weight) = (WORKSPACE_BYTES + 500 * 1024 * 2, 4 * 512 * 64);
        assert_eq!(both.scratch_bytes(Pass::Backward), logits + token_scalars + hidden + weight);
        // Two sweeps never keep both sums, and each has all of the scratch.
        let separate =
            Linear { dweight_chunk: Some(Extents { tokens: 250, columns: 2048 }), ..both };
        let second = WORKSPACE_BYTES + 250 * 2048 * 2 + 4 * 1024 * 64;
        assert_eq!(
            separate.scratch_bytes(Pass::Backward),
            token_scalars + second.max(logits + 4 * 500 * 64)
        );
        assert_eq!(separate.scratch_bytes(Pass::Forward), logits);
        let tokens = tiled(500, 5000);
        let logits = WORKSPACE_BYTES + 500 * 5056 * 2;
        let sums = 4 * (5000 - 2496) * 64;
        let rescales = round(2 * 20 * 500);
        assert_eq!(tokens.scratch_bytes(Pass::Fused), logits + token_scalars + rescales + sums);
        // A part of columns of [D, V] has gaps, and no memory of its own.
        let last = Linear { vocab_is_last: true, ..both };
        let logits = WORKSPACE_BYTES + 500 * 1024 * 2;
        let weight = 4 * 64 * 1024;
        assert_eq!(last.scratch_bytes(Pass::Backward), logits + token_scalars + hidden + weight);
        // Sums of the single pass are in the memory of dweight, but for columns beyond half of the
        // vocabulary, and dhidden's are shared by both sweeps, of which the larger counts.
        let single_pass = Extents { tokens: 250, columns: 3000 };
        let logits = WORKSPACE_BYTES + round(250 * 3008 * 2);
        let (scaled, weight) = (2 * 250 * 64, 4 * 500 * 64);
        let rescales = round(2 * 12 * 250);
        assert_eq!(
            Linear { single_pass: Some(single_pass), ..tiled(1000, 512) }
                .scratch_bytes(Pass::Fused),
            logits + rescales + token_scalars + hidden + round(scaled) + weight
        );
        // Logits in f32 lie beside what is made of them, without gaps.
        let in_f32 = Linear { f32_logits: true, ..tiled(500, 5000) };
        let logits = WORKSPACE_BYTES + 500 * 5056 * 2 + 4 * 500 * 5000;
        assert_eq!(
            in_f32.scratch_bytes(Pass::Fused),
            logits.next_multiple_of(256) + token_scalars + sums
        );
        // A gradient in f32 is its own sum; scaled hidden states go elsewhere then.
        let master = Linear { weight_gradient: DType::F32, ..tokens };
        assert_eq!(master.scratch_bytes(Pass::Fused), tokens.scratch_bytes(Pass::Fused) - sums);
        let f32_hidden = Linear { hidden_gradient: DType::F32, ..tokens };
        let scaled = 2 * 500 * 64;
        assert_eq!(
            f32_hidden.scratch_bytes(Pass::Fused),
            tokens.scratch_bytes(Pass::Fused) + scaled
        );
        let f32 = [DType::F32; 3];
        let [dtype, hidden_gradient, weight_gradient] = f32;
        let f32 = Linear { dtype, hidden_gradient, weight_gradient, ..both };
        assert_eq!(f32.scratch_bytes(Pass::Backward), WORKSPACE_BYTES + 500 * 1024 * 4);
    }

    #[test]
    fn logits_are_saved_or_recomputed() {
        for saved_columns in [None, Some(SavedColumns { columns: 300, slot: 128 })] {
            for last in [700, 1024, 4700, 5000] {
                if saved_columns.is_some() && last == 5000 {
                    continue;
                }
                let linear = Linear { saved_columns, ..tiled(1000, last) };
                let Columns { saved_columns, last, recomputed } = linear.columns();
                let all = saved_columns.iter().chain([&last, &recomputed]);
                let chunked: usize = recomputed.evenly(1024).map(|chunk| chunk.count).sum();
                assert_eq!(chunked, recomputed.count);
                let end = all.fold(0, |end, chunk| {
                    assert_eq!(chunk.first, end);
                    end + chunk.count
                });
                assert_eq!(end, 5000);
            }
        }
    }

    #[test]
    fn slots_are_reused_after_they_are_read() {
        for (tokens, width) in [(1000, 64), (64, 1000), (300, 300), (1, 8), (8, 1)] {
            let linear = Linear { tokens, width, ..tiled(tokens, 128) };
            let slot = 128;
            let mut all = (0..40).rev().map(|slots| SavedColumns { columns: slots * slot, slot });
            let most = all.find(|&saved| linear.has_room(saved)).unwrap();
            for Chunk { first, count } in chunks(most.columns, slot) {
                let logits = linear.saved_logits_at(first, slot);
                assert!((first + count) * width <= logits, "{tokens} x {width}, {first}");
                assert!(logits + tokens * linear.stride(slot) <= 5000 * width);
                assert!(logits.is_multiple_of(ALIGNMENT));
            }
        }
        let saved = SavedColumns { columns: 256, slot: 128 };
        assert!(Linear { tokens: 64, width: 64, ..tiled(64, 128) }.has_room(saved));
        assert!(!Linear { tokens: 64, vocab_is_last: true, ..tiled(64, 128) }.has_room(saved));
        assert!(!Linear { tokens: 64, ..tiled(32, 128) }.has_room(saved));
        assert!(!tiled(1000, 4900).has_room(saved));
        assert!(!tiled(1000, 128).has_room(SavedColumns { columns: 256, slot: 0 }));
    }

    #[test]
    fn scratch_of_a_plan_is_enough_for_every_pass() {
        let extents = |[tokens, columns]: [usize; 2]| Extents { tokens, columns };
        let mut plans = 0;
        for (tokens, hidden, vocab) in [
            (8192, 2048, 128_256),
            (1, 8, 33),
            (600, 200, 5003),
            (32768, 1024, 151_936),
            (4096, 64, 2),
        ] {
            for (hidden_bytes, weight_bytes) in [(2, 2), (4, 4), (2, 4), (4, 2)] {
                for flags in 0..8 {
                    let [reduced, vocab_is_last, bias] = [1, 2, 4].map(|flag| flags & flag != 0);
                    let problem = Problem {
                        tokens,
                        hidden,
                        vocab,
                        hidden_bytes,
                        weight_bytes,
                        bias,
                        reduced,
                        vocab_is_last,
                        running: false,
                    };
                    for mib in [1, 32, 256, 4096] {
                        let limits = plan::Limits { scratch_bytes: mib << 20, tiling: None };
                        let Some(found) = plan::plan(&problem, &limits) else { continue };
                        let call = plan::plan_call(&problem, &found, "fused");
                        let dtype = |bytes| if bytes == 2 { DType::Bf16 } else { DType::F32 };
                        let linear = Linear {
                            tokens,
                            width: hidden,
                            vocab,
                            vocab_is_last,
                            dtype: dtype(problem.operand_bytes()),
                            hidden_gradient: dtype(hidden_bytes),
                            weight_gradient: dtype(weight_bytes),
                            chunk: extents([found.tokens, found.columns]),
                            dweight_chunk: found.dweight_chunk.map(extents),
                            saved_columns: found
                                .saved_columns
                                .map(|[columns, slot]| SavedColumns { columns, slot }),
                            single_pass: found.single_pass.map(extents),
                            f32_logits: found.f32_logits,
                            workspace_bytes: call.attributes[3].1,
                            ..LINEAR
                        };
                        let passes = match found.products < 4.0 {
                            true => &[Pass::Fused][..],
                            false => &[Pass::Forward, Pass::Backward],
                        };
                        for &pass in passes {
                            let needed = linear.scratch_bytes(pass);
                            let held = call.scratch_bytes;
                            assert!(needed <= held, "{problem:?}, {found:?}: {needed} of {held}");
                        }
                        assert!(
                            linear.saved_columns.is_none_or(|saved| linear.has_room(saved)),
                            "{found:?}"
                        );
                        plans += 1;
                    }
                }
            }
        }
        assert!(plans > 200, "{plans}");
    }
}

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

/// Logits that lie in the memory of the weight's gradient until their gradient is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Columns, the first of the vocabulary.
    pub columns: usize,
    /// Columns of a product.
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
    pub(super) of_hidden: bool,
    pub(super) of_weight: bool,
    /// Whether it is of the columns whose logits are made [once](Linear::once).
    pub(super) once: bool,
}

/// The parts of the scratch, in their order; those that a pass does not have are empty. What one
/// sweep leaves to the next comes first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) of_hidden: usize,
    pub(super) carried: usize,
    pub(super) of_tokens: usize,
    pub(super) workspace: usize,
    pub(super) logits: usize,
    /// Logits in f32, of operands of 16 bits.
    pub(super) wide: usize,
    /// Hidden states of a chunk, scaled, where sums are in the place of their gradient.
    pub(super) scaled: usize,
    /// Shifts of a chunk's unnormalised softmax.
    pub(super) rescales: usize,
    pub(super) of_weight: usize,
    pub(super) bytes: usize,
}

/// The chunks of a pass that makes both gradients of all tokens, a chunk of columns at a time: those
/// whose unnormalised softmax, or logits of f32, stay where they were made until they are wanted again,
/// and the others.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    /// In the memory of the weight's gradient.
    pub(super) kept: Vec<Chunk>,
    /// In the scratch: after those, or logits of f32 after all others.
    pub(super) last: Chunk,
    /// Made twice, in the scratch.
    pub(super) again: Chunk,
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
        let of_all = Sweep { chunk: self.chunk, of_hidden: true, of_weight: true, once: false };
        let sweeps = match (pass, self.apart, self.once) {
            (Pass::Backward, Some(chunk), _) => {
                let of_weight = Sweep { chunk, of_hidden: false, ..of_all };
                [Some(Sweep { of_weight: false, ..of_all }), Some(of_weight)]
            }
            (Pass::Fused, _, Some(once)) => self.sweeps_of_both(once).map(Some),
            (Pass::Forward, ..) => {
                [Some(Sweep { of_hidden: false, of_weight: false, ..of_all }), None]
            }
            _ => [Some(of_all), None],
        };
        sweeps.into_iter().flatten()
    }

    /// The sweep over columns that are made once, so many, and the one over the others.
    pub(super) fn sweeps_of_both(&self, once: Extents) -> [Sweep; 2] {
        let sweep = |chunk, once| Sweep { chunk, of_hidden: true, of_weight: true, once };
        // Never all columns, whose dhidden would have no sums.
        let columns = self.chunk.columns.min(self.vocab.saturating_sub(once.columns));
        [sweep(once, true), sweep(Extents { columns, ..self.chunk }, false)]
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
        let of_hidden = has_sums(self.hidden_gradient) && sweep.of_hidden && chunks_columns;
        let of_weight = has_sums(self.weight_gradient) && sweep.of_weight && tokens < self.tokens;
        let [rows, row] = self.weight_sums(sweep);
        // A few rows of a gradient pass through this place too.
        let passing = only(of_weight, row).max(only(of_hidden, self.width));
        let rounded = (8 * 2 * passing).saturating_sub(self.workspace_bytes);
        let logits = tokens * self.stride(columns) * self.dtype.size_bytes();
        let wide = 4 * tokens * columns;
        let carried = self.has_f32_logits() && pass != Pass::Backward && chunks_columns;
        let of_tokens = pass != Pass::Forward && self.dtype != DType::F32;
        let all = FusedProduct::bytes_of_tokens(self.tokens, self.vocab);
        let [hidden_rows, hidden_row] = self.hidden_sums(sweep);
        let scaled = tokens * self.width * self.dtype.size_bytes();
        let of_hidden = take(only(of_hidden, 4 * hidden_rows * hidden_row));
        let carried = take(only(carried, CARRIED_BYTES * tokens));
        let of_tokens = take(only(of_tokens, all));
        let workspace = take(self.workspace_bytes);
        let logits = take(logits.max(rounded));
        let wide = take(only(self.wide, wide));
        let has_scaled = pass == Pass::Fused && self.keeps_scaled() && !self.wide;
        let scaled = take(only(sweep.once || has_scaled, scaled));
        let rescales = take(only(pass == Pass::Fused && !self.wide, self.rescale_bytes(sweep)));
        let of_weight = take(only(of_weight, 4 * rows * row));
        Layout {
            of_hidden,
            carried,
            of_tokens,
            workspace,
            logits,
            wide,
            scaled,
            rescales,
            of_weight,
            bytes,
        }
    }

    /// Bytes of the shifts of the unnormalised softmax that a sweep of the fused pass makes.
    fn rescale_bytes(&self, sweep: Sweep) -> usize {
        let Extents { tokens, columns } = sweep.chunk;
        if self.dtype == DType::F32 || (self.once.is_some() && !sweep.once) {
            return 0;
        }
        let kept = self.columns().kept.into_iter().map(|kept| kept.count);
        rescale_bytes(tokens, kept.chain([columns]))
    }

    /// Whether scaled hidden states are kept apart from the gradient, which is not of their dtype.
    pub(super) fn keeps_scaled(&self) -> bool {
        self.hidden_gradient != self.dtype
    }

    /// Whether something else may be in the memory of the weight's gradient until that is written.
    fn lends_weight(&self) -> bool {
        self.weight_gradient == self.dtype && !self.adds_to_weight
    }

    /// Whether logits are in memory in f32.
    pub(super) fn has_f32_logits(&self) -> bool {
        self.wide || self.dtype == DType::F32
    }

    /// Elements from one row to the next of logits of so many columns.
    pub(super) fn stride(&self, columns: usize) -> usize {
        row_stride(columns, self.dtype.size_bytes())
    }

    /// Rows of the hidden states' sums that are in the scratch, and elements of each.
    pub(super) fn hidden_sums(&self, sweep: Sweep) -> [usize; 2] {
        let rows = if sweep.of_weight { self.tokens } else { sweep.chunk.tokens };
        [rows - if self.shares_hidden(sweep) { own_rows(rows) } else { 0 }, self.width]
    }

    /// Whether half of the sums of the hidden states' gradient are where it goes: where tokens are
    /// split, in a sweep or the one before it, for else every product with them would be two of half
    /// the size.
    pub(super) fn shares_hidden(&self, sweep: Sweep) -> bool {
        sweep.of_weight && (self.once.is_some() || sweep.chunk.tokens < self.tokens)
    }

    /// Rows of the weight's sums over a chunk of a sweep's columns that are in the scratch, and
    /// elements of each.
    pub(super) fn weight_sums(&self, sweep: Sweep) -> [usize; 2] {
        let columns = sweep.chunk.columns;
        let [rows, row] =
            if self.vocab_is_last { [self.width, columns] } else { [columns, self.width] };
        let own = match sweep {
            // Nothing else of the gradient is written yet.
            Sweep { once: true, .. } => rows.min(self.vocab / 2),
            _ if self.is_without_gaps(columns) => own_rows(rows),
            _ => 0,
        };
        [rows - own, row]
    }

    /// Whether so many columns' part of the weight's gradient has no gaps.
    pub(super) fn is_without_gaps(&self, columns: usize) -> bool {
        !self.vocab_is_last || columns == self.vocab
    }

    /// Whether some columns' logits can be made once and the others' again: the former's sums of
    /// dweight lie over rows that the latter have not written yet.
    pub(super) fn has_once(&self, Extents { tokens, columns }: Extents) -> bool {
        let some = tokens > 0 && (1..self.vocab).contains(&columns);
        some && !self.vocab_is_last && self.kept.is_none() && self.lends_weight()
    }

    /// The chunks of columns of a pass that keeps what logits it can.
    pub(super) fn columns(&self) -> Columns {
        let Kept { columns: kept, slot } = self.kept.unwrap_or(Kept { columns: 0, slot: 1 });
        let last = self.chunk.columns.min(self.vocab);
        let again = self.vocab.saturating_sub(kept + last);
        // Logits' sums are whole when the last columns' are in them; gradients of the unnormalised
        // softmax wait for nothing.
        let is_at_end = self.dtype == DType::F32;
        let [last_first, again_first] =
            if is_at_end { [kept + again, kept] } else { [kept, kept + last] };
        Columns {
            kept: chunks(kept, slot).collect(),
            last: Chunk { first: last_first, count: last },
            again: Chunk { first: again_first, count: again },
        }
    }

    /// The element of the weight's gradient, `[V, D]`, where logits of the columns from `first` on are
    /// kept in slots of so many.
    pub(super) fn kept_at(&self, first: usize, slot: usize) -> usize {
        slot_offset([self.tokens, self.width], first, slot, self.stride(slot))
    }

    /// Whether the weight's gradient has room for what is to be kept in it.
    #[must_use]
    pub fn has_room(&self, Kept { columns, slot }: Kept) -> bool {
        let Some(last) = columns.checked_sub(1) else { return true };
        let end = self.kept_at(last, slot.max(1)) + self.tokens * self.stride(slot);
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
        apart: None,
        kept: None,
        once: None,
        wide: false,
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
        let of_tokens: usize = 256 + (16_usize * 1000).next_multiple_of(256) + 768;
        // Of 20 tiles.
        let rescales: usize = (2_usize * 20 * 1000).next_multiple_of(256);
        assert_eq!(LINEAR.scratch_bytes(Pass::Fused), whole + of_tokens + rescales);
        assert_eq!(LINEAR.scratch_bytes(Pass::Backward), whole + of_tokens);
        let part = tiled(1000, 1024);
        let logits = WORKSPACE_BYTES + 1000 * 1024 * 2;
        let round = |bytes: usize| bytes.next_multiple_of(256);
        assert_eq!(part.scratch_bytes(Pass::Forward), logits);
        assert_eq!(part.scratch_bytes(Pass::Backward), logits + of_tokens + 4 * 1000 * 64);
        let fused = logits + round(2 * 4 * 1000) + of_tokens + 4 * 1000 * 64;
        assert_eq!(part.scratch_bytes(Pass::Fused), fused);
        let both = tiled(500, 1024);
        // The other half of sums is where their gradient goes.
        let hidden = 4 * (1000 - 448) * 64;
        let (logits, weight) = (WORKSPACE_BYTES + 500 * 1024 * 2, 4 * 512 * 64);
        assert_eq!(both.scratch_bytes(Pass::Backward), logits + of_tokens + hidden + weight);
        // Two sweeps never keep both sums, and each has all of the scratch.
        let apart = Linear { apart: Some(Extents { tokens: 250, columns: 2048 }), ..both };
        let second = WORKSPACE_BYTES + 250 * 2048 * 2 + 4 * 1024 * 64;
        assert_eq!(
            apart.scratch_bytes(Pass::Backward),
            of_tokens + second.max(logits + 4 * 500 * 64)
        );
        assert_eq!(apart.scratch_bytes(Pass::Forward), logits);
        let tokens = tiled(500, 5000);
        let logits = WORKSPACE_BYTES + 500 * 5056 * 2;
        let sums = 4 * (5000 - 2496) * 64;
        let rescales = round(2 * 20 * 500);
        assert_eq!(tokens.scratch_bytes(Pass::Fused), logits + of_tokens + rescales + sums);
        // A part of columns of [D, V] has gaps, and no memory of its own.
        let last = Linear { vocab_is_last: true, ..both };
        let logits = WORKSPACE_BYTES + 500 * 1024 * 2;
        let weight = 4 * 64 * 1024;
        assert_eq!(last.scratch_bytes(Pass::Backward), logits + of_tokens + hidden + weight);
        // Sums of the columns that are made once are in the place of dweight, but for what is more
        // than half, and dhidden's are shared by both sweeps, of which the larger counts.
        let once = Extents { tokens: 250, columns: 3000 };
        let logits = WORKSPACE_BYTES + round(250 * 3008 * 2);
        let (scaled, weight) = (2 * 250 * 64, 4 * 500 * 64);
        let rescales = round(2 * 12 * 250);
        assert_eq!(
            Linear { once: Some(once), ..tiled(1000, 512) }.scratch_bytes(Pass::Fused),
            logits + rescales + of_tokens + hidden + round(scaled) + weight
        );
        // Logits in f32 lie beside what is made of them, without gaps.
        let wide = Linear { wide: true, ..tiled(500, 5000) };
        let logits = WORKSPACE_BYTES + 500 * 5056 * 2 + 4 * 500 * 5000;
        assert_eq!(
            wide.scratch_bytes(Pass::Fused),
            logits.next_multiple_of(256) + of_tokens + sums
        );
        // A gradient in f32 is its own sum; scaled hidden states go elsewhere then.
        let master = Linear { weight_gradient: DType::F32, ..tokens };
        assert_eq!(master.scratch_bytes(Pass::Fused), tokens.scratch_bytes(Pass::Fused) - sums);
        let of_hidden = Linear { hidden_gradient: DType::F32, ..tokens };
        let scaled = 2 * 500 * 64;
        assert_eq!(
            of_hidden.scratch_bytes(Pass::Fused),
            tokens.scratch_bytes(Pass::Fused) + scaled
        );
        let f32 = [DType::F32; 3];
        let [dtype, hidden_gradient, weight_gradient] = f32;
        let f32 = Linear { dtype, hidden_gradient, weight_gradient, ..both };
        assert_eq!(f32.scratch_bytes(Pass::Backward), WORKSPACE_BYTES + 500 * 1024 * 4);
    }

    #[test]
    fn columns_are_computed_once_if_kept_else_twice() {
        for kept in [None, Some(Kept { columns: 300, slot: 128 })] {
            for last in [700, 1024, 4700, 5000] {
                if kept.is_some() && last == 5000 {
                    continue;
                }
                let linear = Linear { kept, ..tiled(1000, last) };
                let Columns { kept, last, again } = linear.columns();
                let all = kept.iter().chain([&last, &again]);
                let chunked: usize = again.evenly(1024).map(|chunk| chunk.count).sum();
                assert_eq!(chunked, again.count);
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
            let mut kept = (0..40).rev().map(|slots| Kept { columns: slots * slot, slot });
            let most = kept.find(|&kept| linear.has_room(kept)).unwrap();
            for Chunk { first, count } in chunks(most.columns, slot) {
                let logits = linear.kept_at(first, slot);
                assert!((first + count) * width <= logits, "{tokens} x {width}, {first}");
                assert!(logits + tokens * linear.stride(slot) <= 5000 * width);
                assert!(logits.is_multiple_of(ALIGNMENT));
            }
        }
        let kept = Kept { columns: 256, slot: 128 };
        assert!(Linear { tokens: 64, width: 64, ..tiled(64, 128) }.has_room(kept));
        assert!(!Linear { tokens: 64, vocab_is_last: true, ..tiled(64, 128) }.has_room(kept));
        assert!(!Linear { tokens: 64, ..tiled(32, 128) }.has_room(kept));
        assert!(!tiled(1000, 4900).has_room(kept));
        assert!(!tiled(1000, 128).has_room(Kept { columns: 256, slot: 0 }));
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
                            apart: found.apart.map(extents),
                            kept: found.kept.map(|[columns, slot]| Kept { columns, slot }),
                            once: found.once.map(extents),
                            wide: found.wide,
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
                        assert!(linear.kept.is_none_or(|kept| linear.has_room(kept)), "{found:?}");
                        plans += 1;
                    }
                }
            }
        }
        assert!(plans > 200, "{plans}");
    }
}

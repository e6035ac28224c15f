//! Cross-entropy of hidden states against an output matrix, in as much scratch as is allowed.
//!
//! Logits are float32 sums, with a bias, and are never rounded. On Hopper, GEMMs with the
//! cross-entropy as their epilogue ([`fused_product`](crate::fused_product)) write the unnormalised
//! softmax, or dlogits, of a chunk, which two more GEMMs read. Elsewhere a GEMM of cuBLASLt writes
//! logits, a block of a chunk at a time with 16-bit operands, for the kernels of
//! [`cross_entropy`](crate::cross_entropy). Sums over chunks are in float32 and rounded once. Every
//! order is fixed, so that results are the same from run to run.
//!
//! Until dweight is written, its memory is scratch as well: it holds half of dweight's float32 sums, or
//! saved logits.

mod run;
mod tiling;
mod total;

use std::ffi::c_void;
use std::ptr::null;

use xentile::DType;
use xentile::cross_entropy::CrossEntropy;

use crate::cross_entropy::{Cotangents, DistributionOutputs, Pass, SavedLse, TokenOutputs};
pub use crate::operands::{Operands, Scratch};
use crate::{Error, Result};
use run::{Block, Run};
use tiling::{Chunk, Columns, Sweep, chunks};
pub use tiling::{Extents, SavedColumns};

/// The problem, and how it is tiled.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// N.
    pub tokens: usize,
    /// D, the width of a hidden state.
    pub width: usize,
    /// V.
    pub vocab: usize,
    /// Whether the weight is `[D, V]` rather than `[V, D]`.
    pub vocab_is_last: bool,
    /// Of hidden and weight.
    pub dtype: DType,
    /// Of the gradient of hidden: as hidden, or f32, whose sums are stored as they are.
    pub hidden_gradient: DType,
    /// Of the gradient of the weight, likewise.
    pub weight_gradient: DType,
    /// Whether the fused pass adds to a gradient of the weight that is there, in f32.
    pub adds_to_weight: bool,
    /// Whether the fused pass leaves the gradient of hidden to [`hidden`](Self::hidden), which may run
    /// while devices add up that of the weight.
    pub leaves_hidden: bool,
    /// The chunks that logits are computed in. In the fused pass a chunk has all tokens or all columns,
    /// unless there is a `single_pass`.
    pub chunk: Extents,
    /// Where the backward pass has separate sweeps for dhidden and dweight, so that only one of them has
    /// float32 sums, for one GEMM more: the chunks of the sweep for dweight.
    pub dweight_chunk: Option<Extents>,
    /// Where the fused pass takes chunks of columns: the columns whose logits it saves in the memory of
    /// dweight, besides those of its last chunk. For a weight `[V, D]`.
    pub saved_columns: Option<SavedColumns>,
    /// In the place of both: the first columns of the vocabulary, whose logits and gradients the fused
    /// pass computes in chunks of so many tokens, before it computes the other columns in chunks of any
    /// extents. For a weight `[V, D]`.
    pub single_pass: Option<Extents>,
    /// Whether logits of 16-bit operands are written to memory in float32: for few logits, whose long
    /// sums cuBLASLt splits among all multiprocessors, and where no GEMM has the cross-entropy as its
    /// epilogue, for three GEMMs.
    pub f32_logits: bool,
    /// Bytes that products have to work in, for sums that are split among more multiprocessors. With
    /// operands of 16 bits, logits that no product of Hopper's makes are there in f32: some MiB are
    /// right then, and 256 bytes are the least.
    pub workspace_bytes: usize,
    /// The tile of the kernels over logits, where it is not the planned one.
    pub time_block: Option<usize>,
    /// As above.
    pub block_size: Option<usize>,
}

/// Where gradients go on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// As hidden.
    pub hidden: *mut c_void,
    /// As the weight.
    pub weight: *mut c_void,
    /// `[V]`; not looked at where there is no bias.
    pub bias: *mut f32,
}

impl Linear {
    /// Has `stream` fill what `outputs` asks for.
    ///
    /// # Errors
    /// An option outside its range, scratch that is too little, no driver, GPU or cuBLASLt that will do,
    /// or a failure of one of them.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context; pointers lead to arrays of the
    /// documented shapes on its device, which nothing else touches until it has run what was
    /// launched here.
    pub unsafe fn forward(
        &self,
        options: CrossEntropy,
        stream: *mut c_void,
        operands: Operands,
        outputs: TokenOutputs,
        scratch: Scratch,
    ) -> Result<()> {
        let pass = Pass::Forward;
        let sweep = Sweep { makes_hidden: false, makes_weight: false, ..Sweep::of(self.chunk) };
        let run = Run::new(self, options, pass, sweep, stream, operands, scratch)?;
        // SAFETY: passed on from this function's contract.
        unsafe { run.forward_outputs(self.all_columns(), outputs) }
    }

    /// Has `stream` write the gradients for `cotangents`.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    #[expect(clippy::too_many_arguments, reason = "they are the call's")]
    pub unsafe fn backward(
        &self,
        options: CrossEntropy,
        stream: *mut c_void,
        operands: Operands,
        saved: SavedLse,
        cotangents: Cotangents,
        gradients: Gradients,
        scratch: Scratch,
    ) -> Result<()> {
        for sweep in self.sweeps(Pass::Backward) {
            let run = Run::new(self, options, Pass::Backward, sweep, stream, operands, scratch)?;
            // SAFETY: passed on from this function's contract.
            unsafe { self.sweep(&run, self.all_columns(), saved, cotangents, gradients) }?;
        }
        Ok(())
    }

    /// Goes over all tokens of `columns`, which are the vocabulary's last, a chunk at a time, and
    /// makes the gradients that the sweep is for; what dhidden adds up to in the columns before is
    /// there.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn sweep(
        &self,
        run: &Run,
        columns: Chunk,
        saved: SavedLse,
        cotangents: Cotangents,
        gradients: Gradients,
    ) -> Result<()> {
        let (sweep, stream) = (run.sweep, run.stream);
        let (hidden_total, weight_total) = (run.plan_hidden(gradients), run.plan_weight(gradients));
        let all_columns = || columns.evenly(sweep.chunk.columns);
        // SAFETY: passed on from this function's contract.
        unsafe { run.prepare(saved, cotangents) }?;
        let chunk = |tokens: Chunk, columns: Chunk| -> Result<()> {
            let block = run.block(tokens, columns);
            // SAFETY: passed on from this function's contract.
            unsafe {
                run.dlogits(&block, saved, cotangents)?;
                if sweep.makes_weight {
                    run.add_to_bias(gradients, &block, tokens.first == 0)?;
                }
                if sweep.makes_hidden {
                    run.add_to_hidden(hidden_total, &block, columns.first == 0)?;
                }
                if sweep.makes_weight {
                    run.add_to_weight(weight_total, &block, tokens.first == 0)?;
                }
            }
            Ok(())
        };
        if !sweep.makes_weight {
            for tokens in chunks(self.tokens, sweep.chunk.tokens) {
                all_columns().try_for_each(|columns| chunk(tokens, columns))?;
                // SAFETY: as above.
                unsafe { hidden_total.end(stream, tokens, run.spare()) }?;
            }
            return Ok(());
        }
        for columns in all_columns() {
            for tokens in chunks(self.tokens, sweep.chunk.tokens) {
                chunk(tokens, columns)?;
            }
            // SAFETY: as above.
            unsafe { weight_total.end(stream, columns, run.spare()) }?;
        }
        if sweep.makes_hidden {
            // SAFETY: as above.
            unsafe { hidden_total.end(stream, self.all_tokens(), run.spare()) }?;
        }
        Ok(())
    }

    /// Has `stream` fill what `outputs` asks for, `lse` and `lse_low` at least, and write the gradients
    /// for cotangents `dloss` `[N]` of the losses.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward); chunks that have neither all tokens nor all
    /// columns, columns that cannot have a single pass, more saved logits than there is room for.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    #[expect(clippy::too_many_arguments, reason = "they are the call's")]
    pub unsafe fn fused(
        &self,
        options: CrossEntropy,
        stream: *mut c_void,
        operands: Operands,
        dloss: *const f32,
        outputs: TokenOutputs,
        gradients: Gradients,
        scratch: Scratch,
    ) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe {
            self.fused_with(None, options, stream, operands, dloss, outputs, gradients, scratch)
        }
    }

    /// Has `stream` write `gradient`, of hidden, from what [`fused`](Self::fused) of the same problem with
    /// `leaves_hidden` left in `scratch`; nothing where that pass has written it. Where that scratch has 4 N D
    /// bytes more, rounded up to a multiple of 256, they hold float32 sums, and tiles are shorter.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward); of `operands` only the weight is read.
    pub unsafe fn hidden(
        &self,
        options: CrossEntropy,
        stream: *mut c_void,
        operands: Operands,
        gradient: *mut c_void,
        scratch: Scratch,
    ) -> Result<()> {
        if !self.is_one_chunk() {
            return Ok(());
        }
        let sweep = Sweep::of(self.chunk);
        let run = Run::new(self, options, Pass::Fused, sweep, stream, operands, scratch)?;
        // SAFETY: passed on from this function's contract.
        if run.leaves_hidden()? { unsafe { run.times_weight(gradient) } } else { Ok(()) }
    }

    /// As [`fused`](Self::fused), and fills `distribution` but for its `highest`. Where `argmax` is not
    /// the label it may be any other column, or -1. For the same split of rows that takes 12 bytes of
    /// workspace more for each token and part.
    ///
    /// # Errors
    /// As those of [`fused`](Self::fused), and less scratch than one row of logits in f32 takes where
    /// no product says something of the distribution.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    #[expect(clippy::too_many_arguments, reason = "they are the call's")]
    pub unsafe fn distribution_fused(
        &self,
        options: CrossEntropy,
        stream: *mut c_void,
        operands: Operands,
        dloss: *const f32,
        outputs: TokenOutputs,
        distribution: DistributionOutputs,
        gradients: Gradients,
        scratch: Scratch,
    ) -> Result<()> {
        let aux = Some(distribution);
        // SAFETY: passed on from this function's contract.
        unsafe {
            self.fused_with(aux, options, stream, operands, dloss, outputs, gradients, scratch)
        }
    }

    /// # Safety
    /// As for [`forward`](Self::forward).
    #[expect(clippy::too_many_arguments, reason = "they are the call's")]
    unsafe fn fused_with(
        &self,
        distribution: Option<DistributionOutputs>,
        options: CrossEntropy,
        stream: *mut c_void,
        operands: Operands,
        dloss: *const f32,
        outputs: TokenOutputs,
        gradients: Gradients,
        scratch: Scratch,
    ) -> Result<()> {
        let Extents { tokens, columns } = self.chunk;
        if let Some(single_pass) = self.single_pass {
            if !self.allows_single_pass(single_pass) {
                let Extents { tokens, columns } = single_pass;
                return Err(Error::SinglePass { tokens, columns });
            }
            let new = |sweep| {
                Run::new(self, options, Pass::Fused, sweep, stream, operands, scratch)
                    .map(|run| run.saying(distribution))
            };
            let [first, second] = self.sweeps_of_both(single_pass).map(new);
            // SAFETY: passed on from this function's contract.
            return unsafe { self.fused_by_both([&first?, &second?], dloss, outputs, gradients) };
        }
        if columns < self.vocab && tokens < self.tokens {
            return Err(Error::FusedChunk { tokens, columns });
        }
        if self.adds_to_weight && self.weight_gradient != DType::F32 {
            return Err(Error::RunningSums { dtype: self.weight_gradient });
        }
        if let Some(saved) = self.saved_columns.filter(|&saved| !self.has_room(saved)) {
            return Err(Error::SavedColumns { columns: saved.columns, slot: saved.slot });
        }
        let sweep = Sweep::of(self.chunk);
        let run = Run::new(self, options, Pass::Fused, sweep, stream, operands, scratch)?;
        let run = run.saying(distribution);
        // SAFETY: passed on from this function's contract.
        unsafe {
            if columns < self.vocab {
                self.fused_by_columns(&run, dloss, outputs, gradients)
            } else {
                self.fused_by_tokens(&run, dloss, outputs, gradients)
            }
        }
    }

    /// The fused pass over chunks of tokens: whole rows of logits, none of them recomputed.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn fused_by_tokens(
        &self,
        run: &Run,
        dloss: *const f32,
        outputs: TokenOutputs,
        gradients: Gradients,
    ) -> Result<()> {
        let (hidden_total, weight_total) = (run.plan_hidden(gradients), run.plan_weight(gradients));
        let columns = self.all_columns();
        let first = Chunk { first: 0, count: self.chunk.tokens.min(self.tokens) };
        let has_unnormalised = run.has_unnormalised(first, 1);
        if !has_unnormalised && !self.has_f32_logits() {
            // SAFETY: passed on from this function's contract.
            return unsafe { self.by_lse(run, columns, dloss, outputs, gradients) };
        }
        for tokens in chunks(self.tokens, self.chunk.tokens) {
            let block = run.block(tokens, columns);
            // SAFETY: passed on from this function's contract.
            unsafe {
                if has_unnormalised {
                    run.by_unnormalised(&[block], dloss, outputs, gradients)?;
                    continue;
                }
                run.fused(&block, dloss, outputs)?;
                run.add_to_bias(gradients, &block, tokens.first == 0)?;
                run.add_to_hidden(hidden_total, &block, true)?;
                run.add_to_weight(weight_total, &block, tokens.first == 0)?;
            }
        }
        // SAFETY: as above.
        unsafe { weight_total.end(run.stream, columns, run.spare()) }
    }

    /// Fills `outputs`, and makes gradients of what is in them: two products for each logit.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn by_lse(
        &self,
        run: &Run,
        columns: Chunk,
        dloss: *const f32,
        outputs: TokenOutputs,
        gradients: Gradients,
    ) -> Result<()> {
        let (saved, cotangents) = split_outputs(dloss, outputs);
        // SAFETY: passed on from this function's contract.
        unsafe {
            run.forward_outputs(columns, outputs)?;
            self.sweep(run, columns, saved, cotangents, gradients)
        }
    }

    /// The fused pass over chunks of columns. It saves the unnormalised softmax of some columns, in the
    /// scratch or in the memory of dweight, and recomputes the logits of the others for gradients.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn fused_by_columns(
        &self,
        run: &Run,
        dloss: *const f32,
        outputs: TokenOutputs,
        gradients: Gradients,
    ) -> Result<()> {
        if self.dtype == DType::F32 && !run.has_distribution() {
            // SAFETY: passed on from this function's contract.
            return unsafe { self.fused_by_columns_of_f32(run, dloss, outputs, gradients) };
        }
        let Columns { saved_columns, last, recomputed } = self.columns();
        let blocks = self.saved_blocks(run, &saved_columns, last, gradients);
        if !run.has_unnormalised(self.all_tokens(), blocks.len()) {
            // SAFETY: passed on from this function's contract.
            return unsafe { self.by_lse(run, self.all_columns(), dloss, outputs, gradients) };
        }
        let (saved, cotangents) = split_outputs(dloss, outputs);
        // SAFETY: passed on from this function's contract. A saved unnormalised softmax lies
        // where nothing is written before its last read: see `saved_logits_at`.
        unsafe {
            run.by_unnormalised(&blocks, dloss, outputs, gradients)?;
            if recomputed.count == 0 {
                return Ok(());
            }
            self.sweep(run, recomputed, saved, cotangents, gradients)
        }
    }

    /// The columns whose logits are not recomputed: those saved in dweight, and the last in the scratch.
    fn saved_blocks(
        &self,
        run: &Run,
        saved_columns: &[Chunk],
        last: Chunk,
        gradients: Gradients,
    ) -> Vec<Block> {
        let slot = self.saved_columns.map_or(1, |saved| saved.slot);
        let saved_columns =
            saved_columns.iter().map(|&columns| run.saved_block(columns, slot, gradients));
        saved_columns.chain([run.block(self.all_tokens(), last)]).collect()
    }

    /// The same with float32 operands, whose logits are saved.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn fused_by_columns_of_f32(
        &self,
        run: &Run,
        dloss: *const f32,
        outputs: TokenOutputs,
        gradients: Gradients,
    ) -> Result<()> {
        let Columns { saved_columns, last, recomputed } = self.columns();
        let (hidden_total, weight_total) = (run.plan_hidden(gradients), run.plan_weight(gradients));
        let blocks = self.saved_blocks(run, &saved_columns, last, gradients);
        let (saved, cotangents) = split_outputs(dloss, outputs);
        // SAFETY: passed on from this function's contract. Saved logits lie where nothing is
        // written before their last read: see `saved_logits_at`.
        unsafe {
            let Some((last, saved_columns)) = blocks.split_last() else { return Ok(()) };
            for block in saved_columns {
                run.forward(block, outputs)?;
            }
            run.forward_outputs(recomputed, outputs)?;
            run.fused(last, dloss, outputs)?;
            run.prepare(saved, cotangents)?;
            let add = |block: &Block, first| -> Result<()> {
                run.add_to_bias(gradients, block, true)?;
                run.add_to_hidden(hidden_total, block, first)?;
                run.add_to_weight(weight_total, block, true)
            };
            for (index, block) in saved_columns.iter().enumerate() {
                run.backward(block, saved, cotangents)?;
                add(block, index == 0)?;
            }
            add(last, saved_columns.is_empty())?;
            for columns in recomputed.evenly(self.chunk.columns) {
                let block = run.block(self.all_tokens(), columns);
                run.dlogits(&block, saved, cotangents)?;
                add(&block, false)?;
            }
            hidden_total.end(run.stream, self.all_tokens(), run.spare())
        }
    }

    /// The single pass over the first columns by chunks of tokens, which computes lse of all columns;
    /// then a sweep over the other columns for gradients. Without an unnormalised softmax the sweep is
    /// over all columns.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn fused_by_both(
        &self,
        [single, recomputed]: [&Run; 2],
        dloss: *const f32,
        outputs: TokenOutputs,
        gradients: Gradients,
    ) -> Result<()> {
        let Extents { tokens, columns } = single.sweep.chunk;
        let all = self.all_columns();
        let [columns, rest] = all.split_at(columns);
        let first = Chunk { first: 0, count: tokens.min(self.tokens) };
        if !single.has_unnormalised(first, 1) {
            // SAFETY: passed on from this function's contract.
            return unsafe { self.by_lse(recomputed, all, dloss, outputs, gradients) };
        }
        let (saved, cotangents) = split_outputs(dloss, outputs);
        // SAFETY: passed on from this function's contract.
        unsafe {
            for tokens in chunks(self.tokens, tokens) {
                let block = single.block(tokens, columns);
                single.by_some_unnormalised(&block, dloss, outputs, gradients)?;
            }
            single.plan_weight(gradients).end(single.stream, columns, single.spare())?;
            self.sweep(recomputed, rest, saved, cotangents, gradients)
        }
    }

    /// Whether one chunk has all logits of the fused pass.
    fn is_one_chunk(&self) -> bool {
        let Extents { tokens, columns } = self.chunk;
        self.single_pass.is_none() && tokens >= self.tokens && columns >= self.vocab
    }

    fn all_tokens(&self) -> Chunk {
        Chunk { first: 0, count: self.tokens }
    }

    fn all_columns(&self) -> Chunk {
        Chunk { first: 0, count: self.vocab }
    }
}

/// What a backward pass takes of a fused one's outputs, for cotangents of the losses.
fn split_outputs(dloss: *const f32, outputs: TokenOutputs) -> (SavedLse, Cotangents) {
    let saved = SavedLse { lse: outputs.lse, lse_low: outputs.lse_low };
    (saved, Cotangents { loss: dloss, logps: null(), lse: null() })
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use super::*;
    use crate::cross_entropy::Labels;

    #[test]
    fn chunks_without_a_fused_pass_are_refused_first() {
        let (none, nothing) = (null_mut::<c_void>(), null_mut::<f32>());
        let linear = Linear {
            tokens: 4,
            width: 8,
            vocab: 1000,
            vocab_is_last: false,
            dtype: DType::Bf16,
            hidden_gradient: DType::Bf16,
            weight_gradient: DType::Bf16,
            adds_to_weight: false,
            leaves_hidden: false,
            chunk: Extents { tokens: 2, columns: 500 },
            dweight_chunk: None,
            saved_columns: None,
            single_pass: None,
            f32_logits: false,
            workspace_bytes: 0,
            time_block: None,
            block_size: None,
        };
        let refused = |linear: Linear| {
            let operands =
                Operands { hidden: none, weight: none, labels: Labels::I32(null()), bias: null() };
            let (loss, logps, lse, lse_low) = (nothing, nothing, nothing, nothing);
            let outputs = TokenOutputs { loss, logps, lse, lse_low, zero_masked: false };
            let gradients = Gradients { hidden: none, weight: none, bias: nothing };
            let scratch = Scratch { at: none, bytes: 0 };
            let options = CrossEntropy::default();
            // SAFETY: nothing is read or launched before the tiling was checked.
            let result = unsafe {
                linear.fused(options, none, operands, null(), outputs, gradients, scratch)
            };
            result.unwrap_err().to_string()
        };
        assert_eq!(
            refused(linear),
            "chunks of 2 tokens x 500 columns; where gradients come with the loss, they must have \
             all tokens or all columns"
        );
        let chunk = Extents { tokens: 4, columns: 500 };
        let saved_columns = Some(SavedColumns { columns: 501, slot: 64 });
        assert_eq!(
            refused(Linear { chunk, saved_columns, ..linear }),
            "logits of 501 columns, in slots of 64, cannot be saved in the memory of dweight; save \
             fewer, of a weight [V, D] and with all tokens in a chunk"
        );
        let single_pass = Some(Extents { tokens: 2, columns: 1000 });
        assert_eq!(
            refused(Linear { single_pass, ..linear }),
            "1000 columns cannot have a single pass, 2 tokens at a time; it takes some of the columns of \
             a weight [V, D] whose gradient has its dtype, and no saved logits"
        );
    }
}

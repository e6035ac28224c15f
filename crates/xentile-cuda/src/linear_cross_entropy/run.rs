//! A sweep over chunks of logits, and the steps on a chunk.

mod column_blocks;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use xentile::cross_entropy::CrossEntropy;
use xentile::{DType, LogitsShape};

use super::tiling::{ALIGNMENT, Chunk, Extents, Layout, Sweep, chunks};
use super::total::{Sums, Total};
use super::{Gradients, Linear, Operands, Scratch};
use crate::bias::{sum_columns, write_rows};
use crate::blas::{Blas, Matrix, Operand, Workspace};
use crate::cross_entropy::{
    Cotangents, DistributionOutputs, Kernel, Labels, Part, Pass, SavedLse, TokenOutputs,
};
use crate::driver::RawStream;
use crate::fused_product::{self, Columns, DLogits, FusedProduct, Sum, There, Unnormalised};
use crate::round::round;
use crate::{Device, Error, Result, check_alignment};

/// The share of the scratch that is a workspace of GEMMs where the scratch holds logits of whole rows.
const PRODUCTS_SHARE: usize = 8;
/// The GEMMs that dhidden is summed by beside a collective: tiles of one GEMM are so long that those
/// which found no multiprocessor would end two turns late.
const HIDDEN_PARTS: usize = 4;

/// A sweep over chunks of logits.
pub(super) struct Run<'a> {
    linear: &'a Linear,
    pub(super) sweep: Sweep,
    options: CrossEntropy,
    blas: &'static Blas,
    pub(super) stream: RawStream,
    hidden: Matrix,
    weight: Matrix,
    labels: Labels,
    /// Null for none.
    bias: *const f32,
    scratch: Scratch,
    layout: Layout,
    /// Whether GEMMs have a cross-entropy epilogue.
    has_fused_product: bool,
    /// Where entropy and argmax go, if they are requested.
    distribution: Option<DistributionOutputs>,
}

/// A chunk of logits: dlogits or the unnormalised softmax, or float32 logits that dlogits overwrite.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    tokens: Chunk,
    columns: Chunk,
    at: *mut c_void,
    /// Elements from one row to the next.
    stride: usize,
}

impl Block {
    fn place(&self) -> DLogits {
        let Self { columns, at, stride, .. } = *self;
        DLogits { at, stride, first_column: columns.first, columns: columns.count }
    }
}

impl<'a> Run<'a> {
    pub(super) fn new(
        linear: &'a Linear,
        options: CrossEntropy,
        pass: Pass,
        sweep: Sweep,
        stream: RawStream,
        operands: Operands,
        scratch: Scratch,
    ) -> Result<Self> {
        let layout = linear.layout(pass, sweep);
        if scratch.bytes < layout.bytes {
            return Err(Error::Scratch { bytes: scratch.bytes, needed: layout.bytes });
        }
        check_alignment("hidden", operands.hidden)?;
        check_alignment("weight", operands.weight)?;
        check_alignment("scratch", scratch.at)?;
        let Linear { tokens, width, vocab, dtype, .. } = *linear;
        let [rows, columns] = if linear.vocab_is_last { [width, vocab] } else { [vocab, width] };
        let has_fused_product = !linear.f32_logits
            && fused_product::supports(Device::current()?, dtype, width, columns);
        let run = Self {
            linear,
            sweep,
            options,
            blas: Blas::get()?,
            stream,
            hidden: Matrix::new(operands.hidden.cast_mut(), dtype, tokens, width),
            weight: Matrix::new(operands.weight.cast_mut(), dtype, rows, columns),
            labels: operands.labels,
            bias: operands.bias,
            scratch,
            layout,
            has_fused_product,
            distribution: None,
        };
        run.check_workspace()?;
        Ok(run)
    }

    /// Adds outputs for each token's entropy and argmax, if they are requested.
    pub(super) fn saying(self, distribution: Option<DistributionOutputs>) -> Self {
        Self { distribution, ..self }
    }

    pub(super) fn has_distribution(&self) -> bool {
        self.distribution.is_some()
    }

    fn at(&self, offset: usize) -> *mut c_void {
        self.scratch.at.wrapping_byte_add(offset)
    }

    /// The block of logits in the scratch.
    pub(super) fn block(&self, tokens: Chunk, columns: Chunk) -> Block {
        let stride = self.linear.stride(columns.count.max(self.sweep.chunk.columns));
        Block { tokens, columns, at: self.at(self.layout.logits), stride }
    }

    /// The block of saved logits of all tokens in the memory of dweight, in slots of `slot` columns.
    pub(super) fn saved_block(&self, columns: Chunk, slot: usize, gradients: Gradients) -> Block {
        let element = self.linear.saved_logits_at(columns.first, slot);
        let at = gradients.weight.wrapping_byte_add(element * self.linear.dtype.size_bytes());
        let tokens = Chunk { first: 0, count: self.linear.tokens };
        Block { tokens, columns, at, stride: self.linear.stride(slot) }
    }

    /// The scratch that is free once no logits are needed, for [`Total::end`].
    pub(super) fn spare(&self) -> Scratch {
        let at = self.layout.workspace;
        Scratch { at: self.at(at), bytes: self.layout.scaled - at }
    }

    /// Where dhidden and its sums go.
    pub(super) fn plan_hidden(&self, gradients: Gradients) -> Total {
        let (linear, chunk) = (self.linear, self.sweep.chunk);
        let sums = linear.hidden_gradient != DType::F32 && chunk.columns < linear.vocab;
        let is_one_chunk = !self.sweep.makes_weight;
        let [rows, _] = linear.hidden_sums(self.sweep);
        let shares = linear.shares_hidden(self.sweep);
        let at = self.at(self.layout.hidden_sums);
        Total {
            gradient: Matrix { at: gradients.hidden, dtype: linear.hidden_gradient, ..self.hidden },
            sums: sums.then_some(Sums { at, rows, is_one_chunk, shares }),
            by_columns: false,
        }
    }

    /// Where dweight and its sums go.
    pub(super) fn plan_weight(&self, gradients: Gradients) -> Total {
        let (linear, chunk) = (self.linear, self.sweep.chunk);
        let sums = linear.weight_gradient != DType::F32 && chunk.tokens < linear.tokens;
        let [rows, _] = linear.weight_sums(self.sweep);
        let at = self.at(self.layout.weight_sums);
        let shares = linear.is_without_gaps(chunk.columns);
        Total {
            gradient: Matrix { at: gradients.weight, dtype: linear.weight_gradient, ..self.weight },
            sums: sums.then_some(Sums { at, rows, is_one_chunk: true, shares }),
            by_columns: linear.vocab_is_last,
        }
    }

    /// The workspace of GEMMs, which other kernels use between them.
    pub(super) fn workspace(&self) -> Scratch {
        Scratch { at: self.at(self.layout.workspace), bytes: self.linear.workspace_bytes }
    }

    /// The logits' GEMM of some tokens, with its cross-entropy epilogue, and the operands.
    fn fused_product(&self, tokens: Chunk) -> (FusedProduct, Operands) {
        let Linear { width, vocab, vocab_is_last, dtype, .. } = *self.linear;
        let (tokens_here, options) = (tokens.count, self.options);
        let product =
            FusedProduct { tokens: tokens_here, width, vocab, vocab_is_last, dtype, options };
        let operands = Operands {
            hidden: self.hidden.rows(tokens.first, tokens.count).at,
            weight: self.weight.at,
            labels: self.labels.from(tokens.first),
            bias: self.bias,
        };
        (product, operands)
    }

    /// Computes the outputs of all tokens from `columns`, or partial sums of rows that have more columns.
    /// The logits are not saved.
    ///
    /// # Safety
    /// As for [`Linear::forward`]; the logits in the scratch are overwritten.
    pub(super) unsafe fn forward_outputs(
        &self,
        columns: Chunk,
        outputs: TokenOutputs,
    ) -> Result<()> {
        let Extents { tokens, columns: most } = self.sweep.chunk;
        let all = Chunk { first: 0, count: self.linear.tokens };
        if let Some(distribution) = self.distribution {
            // SAFETY: passed on from this function's contract.
            return unsafe { self.forward_distribution(all, outputs, distribution) };
        }
        if self.has_fused_product {
            for tokens in all.chunks(self.most_added_up()) {
                // SAFETY: passed on from this function's contract.
                unsafe { self.add_up(tokens, columns, outputs) }?;
            }
            return Ok(());
        }
        if !self.linear.has_f32_logits() {
            // SAFETY: passed on from this function's contract.
            return unsafe { self.add_up_blocks(columns, outputs) };
        }
        for tokens in chunks(all.count, tokens) {
            for chunk in columns.chunks(most) {
                // SAFETY: passed on from this function's contract.
                unsafe { self.forward(&self.block(tokens, chunk), outputs) }?;
            }
        }
        Ok(())
    }

    /// Computes the outputs of tokens, with entropy and argmax, from whole rows of float32 logits, as many
    /// rows at a time as fit the scratch.
    ///
    /// # Safety
    /// As for [`forward_outputs`](Self::forward_outputs).
    unsafe fn forward_distribution(
        &self,
        tokens: Chunk,
        outputs: TokenOutputs,
        distribution: DistributionOutputs,
    ) -> Result<()> {
        let Linear { vocab, time_block, block_size, .. } = *self.linear;
        let Scratch { at, bytes } = self.spare();
        let row_bytes = (4 * vocab).next_multiple_of(ALIGNMENT);
        // The workspace of GEMMs gets a share of the scratch; the rest is rows.
        let rows = (bytes - bytes / PRODUCTS_SHARE).saturating_sub(ALIGNMENT) / row_bytes;
        if rows == 0 {
            let needed = (row_bytes + ALIGNMENT) * PRODUCTS_SHARE / (PRODUCTS_SHARE - 1) + 1;
            return Err(Error::Scratch { bytes, needed });
        }
        for tokens in tokens.chunks(rows.min(tokens.count)) {
            let whole = Matrix::new(at, DType::F32, tokens.count, row_bytes / 4);
            let taken = row_bytes * tokens.count;
            let workspace = Workspace { at: at.wrapping_byte_add(taken), bytes: bytes - taken };
            let columns = Chunk { first: 0, count: vocab };
            let part = Part { vocab, first_column: 0, stride: whole.stride, carried: null_mut() };
            let shape = LogitsShape::new(tokens.count, vocab)?;
            let kernel = Kernel::new(self.options, shape, DType::F32)?;
            let kernel = kernel.with_tile(time_block, block_size)?.with_part(part);
            let labels = self.labels.from(tokens.first);
            let (outputs, of) = (outputs.from(tokens.first), distribution.from(tokens.first));
            // SAFETY: passed on from this function's contract.
            unsafe {
                self.sums(whole.columns(0, vocab), tokens, columns, workspace)?;
                kernel.distribution(self.stream, at, labels, outputs, of)?;
            }
        }
        Ok(())
    }

    /// Computes the scalars of all tokens that [`dlogits`](Self::dlogits) needs.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    pub(super) unsafe fn prepare(&self, saved: SavedLse, cotangents: Cotangents) -> Result<()> {
        if !self.has_fused_product {
            return Ok(());
        }
        let (product, operands) = self.fused_product(Chunk { first: 0, count: self.linear.tokens });
        let token_scalars = self.at(self.layout.token_scalars);
        // SAFETY: passed on from this function's contract.
        unsafe { product.prepare(self.stream, operands.labels, saved, cotangents, token_scalars) }
    }

    /// Recomputes logits and makes dlogits, after [`prepare`](Self::prepare).
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    pub(super) unsafe fn dlogits(
        &self,
        block: &Block,
        saved: SavedLse,
        cotangents: Cotangents,
    ) -> Result<()> {
        let tokens = block.tokens;
        let (product, operands) = self.fused_product(tokens);
        // SAFETY: passed on from this function's contract.
        unsafe {
            if self.has_fused_product {
                let first = tokens.first;
                let to = block.place();
                let (saved, cotangents) = (saved.from(first), cotangents.from(first));
                let token_scalars = (self.at(self.layout.token_scalars), first);
                product.backward(self.stream, operands, saved, cotangents, token_scalars, to)
            } else if self.linear.has_f32_logits() {
                self.logits(block)?;
                self.backward(block, saved, cotangents)
            } else {
                self.dlogits_by_blocks(block, saved, cotangents)
            }
        }
    }

    /// The most tokens whose rows a GEMM's epilogue reduces in the spare scratch.
    fn most_added_up(&self) -> usize {
        let fits = |&count: &usize| {
            let (product, _) = self.fused_product(Chunk { first: 0, count });
            product.least_scratch_bytes() <= self.spare().bytes
        };
        let halved = |&count: &usize| (count > 1).then_some(count.div_ceil(2));
        std::iter::successors(Some(self.linear.tokens), halved).find(fits).unwrap_or(1)
    }

    /// As [`forward_outputs`](Self::forward_outputs) for some tokens, by a GEMM whose epilogue reduces rows.
    ///
    /// # Safety
    /// As for [`forward_outputs`](Self::forward_outputs); `columns` are all.
    unsafe fn add_up(&self, tokens: Chunk, columns: Chunk, outputs: TokenOutputs) -> Result<()> {
        let (product, operands) = self.fused_product(tokens);
        let Chunk { first, count } = columns;
        let columns = Columns { first, count, carried: null_mut() };
        let outputs = outputs.from(tokens.first);
        // SAFETY: passed on from this function's contract.
        unsafe { product.forward(self.stream, operands, columns, outputs, self.spare()) }
    }

    /// Makes float32 logits, and fills `outputs` or keeps the rows' partial sums.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    pub(super) unsafe fn forward(&self, block: &Block, outputs: TokenOutputs) -> Result<()> {
        let outputs = outputs.from(block.tokens.first);
        // SAFETY: passed on from this function's contract.
        unsafe {
            self.logits(block)?;
            let place = self.f32_logits(block).at;
            self.kernel(block, true)?.forward(self.stream, place, self.labels(block), outputs)
        }
    }

    /// Makes float32 logits of the last columns, overwrites them with dlogits, and fills `outputs`.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    pub(super) unsafe fn fused(
        &self,
        block: &Block,
        dloss: *const f32,
        outputs: TokenOutputs,
    ) -> Result<()> {
        let (outputs, first) = (outputs.from(block.tokens.first), block.tokens.first);
        let at = self.f32_logits(block).at;
        let (place, dloss) = ((at.cast_const(), at), dloss.wrapping_add(first));
        // SAFETY: passed on from this function's contract.
        unsafe {
            self.logits(block)?;
            let kernel = self.kernel(block, true)?;
            let labels = self.labels(block);
            match self.distribution.map(|of| of.from(first)) {
                None => kernel.fused(self.stream, place, labels, dloss, outputs)?,
                Some(of) => {
                    kernel.distribution_fused(self.stream, place, labels, dloss, outputs, of)?;
                }
            }
            self.round_dlogits(block)
        }
    }

    /// Overwrites float32 logits with dlogits.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    pub(super) unsafe fn backward(
        &self,
        block: &Block,
        saved: SavedLse,
        cotangents: Cotangents,
    ) -> Result<()> {
        let first = block.tokens.first;
        let (saved, cotangents) = (saved.from(first), cotangents.from(first));
        let at = self.f32_logits(block).at;
        let (place, labels) = ((at.cast_const(), at), self.labels(block));
        // SAFETY: passed on from this function's contract.
        unsafe {
            let kernel = self.kernel(block, false)?;
            kernel.backward(self.stream, place, labels, saved, cotangents)?;
            self.round_dlogits(block)
        }
    }

    /// The float32 logits of a block; with 16-bit operands they lie beside the block, without gaps.
    fn f32_logits(&self, block: &Block) -> Matrix {
        if self.linear.dtype == DType::F32 {
            return self.matrix(block);
        }
        let at = self.at(self.layout.f32_logits);
        Matrix::new(at, DType::F32, block.tokens.count, block.columns.count)
    }

    /// Rounds float32 dlogits to the dtype of GEMM operands, unless that is float32.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn round_dlogits(&self, block: &Block) -> Result<()> {
        if self.linear.dtype == DType::F32 {
            return Ok(());
        }
        // SAFETY: passed on from this function's contract.
        unsafe { round(self.stream, self.f32_logits(block), self.matrix(block)) }
    }

    /// Whether the unnormalised softmax replaces dlogits, in `places` blocks of memory. A weight `[D, V]`
    /// needs all columns in one chunk, since the gradient of fewer columns has gaps.
    pub(super) fn has_unnormalised(&self, tokens: Chunk, places: usize) -> bool {
        let (product, _) = self.fused_product(tokens);
        let has_distribution = self.has_distribution();
        let has_gaps = self.linear.vocab_is_last && self.sweep.chunk.columns < self.linear.vocab;
        self.has_fused_product
            && !has_gaps
            && fused_product::unnormalised_support(self.linear.dtype, tokens.count, &self.options)
            && self.workspace().bytes
                >= product.unnormalised_scratch_bytes(places, has_distribution)
    }

    /// Whether the library's own GEMM makes dhidden from the unnormalised softmax. Otherwise a cuBLASLt GEMM
    /// leaves sums in the workspace, which must fit there.
    fn multiplies_unnormalised(&self, tokens: Chunk) -> Result<bool> {
        let (product, _) = self.fused_product(tokens);
        Ok(self.hidden_sums_bytes(tokens) > self.workspace().bytes
            || product.times_weight_keeps_busy(Device::current()?.limits().multiprocessors))
    }

    /// Whether the fused pass leaves dhidden to [`Linear::hidden`]: one GEMM of the unnormalised softmax of
    /// all tokens and columns.
    pub(super) fn leaves_hidden(&self) -> Result<bool> {
        let (linear, all) = (self.linear, Chunk { first: 0, count: self.linear.tokens });
        Ok(linear.leaves_hidden
            && linear.is_one_chunk()
            && !linear.keeps_scaled()
            && self.has_unnormalised(all, 1)
            && self.multiplies_unnormalised(all)?)
    }

    /// Makes dhidden from the unnormalised softmax of all tokens and columns: by several GEMMs that
    /// add up where the scratch has room for float32 sums past its layout, by one elsewhere.
    ///
    /// # Safety
    /// As for [`Linear::forward`]; [`leaves_hidden`](Self::leaves_hidden).
    pub(super) unsafe fn times_weight(&self, dhidden: *mut c_void) -> Result<()> {
        let tokens = Chunk { first: 0, count: self.linear.tokens };
        let columns = Chunk { first: 0, count: self.linear.vocab };
        let block = self.block(tokens, columns);
        let token_scalars = self.at(self.layout.token_scalars);
        let (product, _) = self.fused_product(tokens);
        let first = self.layout.bytes.next_multiple_of(ALIGNMENT);
        if first + self.hidden_sums_bytes(tokens) > self.scratch.bytes {
            let from = (block.place(), token_scalars);
            // SAFETY: passed on from this function's contract.
            return unsafe { product.times_weight(self.stream, self.weight.at, from, dhidden) };
        }
        let out = Matrix::new(self.at(first), DType::F32, tokens.count, self.linear.width);
        let mut there = There::Nothing;
        let part = columns.count.div_ceil(HIDDEN_PARTS).next_multiple_of(ALIGNMENT);
        for columns in columns.chunks(part) {
            let left = self.matrix(&block).columns(columns.first, columns.count).plain();
            let sum = Sum { out, left, right: self.weight_of_hidden(columns) };
            // SAFETY: passed on from this function's contract.
            unsafe { sum.run_tiles(self.stream, there) }?;
            there = There::All;
        }
        let from = (out.at.cast_const().cast(), self.weight.at.cast_const());
        // SAFETY: passed on from this function's contract.
        unsafe { product.scale_sums(self.stream, from, token_scalars, dhidden) }
    }

    /// Bytes of float32 sums of some tokens' dhidden.
    fn hidden_sums_bytes(&self, tokens: Chunk) -> usize {
        (4 * tokens.count * self.linear.width).next_multiple_of(ALIGNMENT)
    }

    /// Makes the unnormalised softmax of the rows of `blocks` and the gradients, and fills `outputs`. Blocks
    /// are freed one after the other. If they lack some columns, dhidden stays in its sums, to which the
    /// other columns add.
    ///
    /// # Safety
    /// As for [`Linear::forward`]; [`has_unnormalised`](Self::has_unnormalised).
    pub(super) unsafe fn by_unnormalised(
        &self,
        blocks: &[Block],
        dloss: *const f32,
        outputs: TokenOutputs,
        gradients: Gradients,
    ) -> Result<()> {
        let Some(&Block { tokens, .. }) = blocks.first() else { return Ok(()) };
        let [hidden_total, weight_total] =
            [self.plan_hidden(gradients), self.plan_weight(gradients)];
        let (product, _) = self.fused_product(tokens);
        let dhidden = hidden_total.gradient.rows(tokens.first, tokens.count);
        let token_scalars = self.at(self.layout.token_scalars);
        let columns: usize = blocks.iter().map(|block| block.columns.count).sum();
        // Scaled hidden states lie in the memory of dhidden, if dhidden has their dtype.
        let scaled = match self.linear.keeps_scaled() {
            true => self.scaled(tokens),
            false => dhidden,
        };
        // SAFETY: passed on from this function's contract.
        unsafe {
            self.unnormalised(blocks, dloss, outputs, scaled)?;
            if let [block] = blocks
                && columns == self.linear.vocab
            {
                self.add_unnormalised_to_bias(gradients, block, tokens.first == 0)?;
                self.add_scaled_to_weight(weight_total, block, scaled, gradients.bias)?;
                if self.leaves_hidden()? {
                    return Ok(());
                }
                if self.linear.keeps_scaled() {
                    self.add_to_hidden(hidden_total, block, true)?;
                    return self.scale_sums(hidden_total, tokens);
                }
                if self.multiplies_unnormalised(tokens)? {
                    let from = (block.place(), token_scalars);
                    return product.times_weight(self.stream, self.weight.at, from, dhidden.at);
                }
                let Scratch { at, bytes } = self.workspace();
                let taken = self.hidden_sums_bytes(tokens);
                let rest = Workspace { at: at.wrapping_byte_add(taken), bytes: bytes - taken };
                let sums = Matrix::new(at, DType::F32, tokens.count, self.linear.width);
                let factors = (self.matrix(block).plain(), self.weight_of_hidden(block.columns));
                self.blas.product(self.stream, sums, factors, false, rest)?;
                let from = (at.cast_const().cast(), self.weight.at.cast_const());
                return product.scale_sums(self.stream, from, token_scalars, dhidden.at);
            }
            for (index, block) in blocks.iter().enumerate() {
                self.add_to_hidden(hidden_total, block, index == 0)?;
                self.add_unnormalised_to_bias(gradients, block, true)?;
                self.add_scaled_to_weight(weight_total, block, scaled, gradients.bias)?;
            }
            if columns < self.linear.vocab || self.linear.keeps_scaled() {
                return self.scale_sums(hidden_total, tokens);
            }
            let from =
                (self.at(self.layout.hidden_sums).cast_const().cast(), self.weight.at.cast_const());
            product.scale_sums(self.stream, from, token_scalars, dhidden.at)
        }
    }

    /// The scaled hidden states in the scratch.
    fn scaled(&self, tokens: Chunk) -> Matrix {
        let Linear { dtype, width, .. } = *self.linear;
        Matrix::new(self.at(self.layout.scaled), dtype, tokens.count, width)
    }

    /// Makes the unnormalised softmax of the first columns, in `blocks`, and hidden states scaled for it;
    /// fills `outputs`.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn unnormalised(
        &self,
        blocks: &[Block],
        dloss: *const f32,
        outputs: TokenOutputs,
        scaled: Matrix,
    ) -> Result<()> {
        let Some(&Block { tokens, .. }) = blocks.first() else { return Ok(()) };
        let (product, operands) = self.fused_product(tokens);
        let (dloss, outputs) = (dloss.wrapping_add(tokens.first), outputs.from(tokens.first));
        let places: Vec<_> = blocks.iter().map(Block::place).collect();
        let to = Unnormalised {
            places: &places,
            scaled: scaled.at,
            token_scalars: self.at(self.layout.token_scalars),
            rescales: self.at(self.layout.rescales),
            distribution: self.distribution.map(|of| of.from(tokens.first)),
        };
        // SAFETY: passed on from this function's contract.
        unsafe { product.unnormalised(self.stream, operands, dloss, outputs, to, self.workspace()) }
    }

    /// Multiplies the sums of some tokens' dhidden by each row's factor, in place.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn scale_sums(&self, hidden_total: Total, tokens: Chunk) -> Result<()> {
        let (product, _) = self.fused_product(tokens);
        let token_scalars = self.at(self.layout.token_scalars);
        hidden_total.parts(tokens).try_for_each(|(rows, sums)| {
            let rows = (rows.first, rows.count);
            // SAFETY: passed on from this function's contract.
            unsafe {
                product.scale_in_place(self.stream, self.weight.at, token_scalars, rows, sums.at)
            }
        })
    }

    /// Makes the unnormalised softmax of the first columns, in `block`, and adds its dweight and scaled
    /// dhidden to their sums; fills `outputs`.
    ///
    /// # Safety
    /// As for [`Linear::forward`]; [`has_unnormalised`](Self::has_unnormalised).
    pub(super) unsafe fn by_some_unnormalised(
        &self,
        block: &Block,
        dloss: *const f32,
        outputs: TokenOutputs,
        gradients: Gradients,
    ) -> Result<()> {
        let Block { tokens, .. } = *block;
        let [hidden_total, weight_total] =
            [self.plan_hidden(gradients), self.plan_weight(gradients)];
        let scaled = self.scaled(tokens);
        // SAFETY: passed on from this function's contract.
        unsafe {
            self.unnormalised(std::slice::from_ref(block), dloss, outputs, scaled)?;
            self.add_unnormalised_to_bias(gradients, block, tokens.first == 0)?;
            self.add_scaled_to_weight(weight_total, block, scaled, gradients.bias)?;
            self.add_to_hidden(hidden_total, block, true)?;
            self.scale_sums(hidden_total, tokens)
        }
    }

    /// Adds the GEMM of the unnormalised softmax and scaled hidden states to the weight's gradient, and
    /// the term of the label (-1 at the label's column) to the gradients of weight and bias.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn add_scaled_to_weight(
        &self,
        total: Total,
        block: &Block,
        scaled: Matrix,
        dbias: *mut f32,
    ) -> Result<()> {
        let Block { tokens, columns, .. } = *block;
        let (product, operands) = self.fused_product(tokens);
        let token_scalars = self.at(self.layout.token_scalars);
        let by_columns = self.linear.vocab_is_last;
        let first = if by_columns { 0 } else { columns.first };
        let label_term = |rows: Chunk, place: Matrix, writes: bool| {
            let (from, part) = ((block.place(), token_scalars), (first + rows.first, place));
            // Only one part of D adds to the bias.
            let adds_to_bias = !self.bias.is_null() && (!by_columns || rows.first == 0);
            let dbias = if adds_to_bias { dbias } else { null_mut() };
            // SAFETY: passed on from this function's contract.
            unsafe { product.add_label_term(self.stream, operands, from, part, dbias, writes) }
        };
        // Sums take the label's term after the GEMM. A 16-bit gradient takes the term first: the GEMM
        // adds to the term in f32 and rounds once.
        if total.sums.is_some() || total.gradient.dtype == DType::F32 {
            // SAFETY: passed on from this function's contract.
            unsafe { self.add_product_to_weight(total, block, scaled, tokens.first == 0) }?;
            let parts = || total.parts(columns);
            return parts().try_for_each(|(rows, place)| label_term(rows, place, false));
        }
        for (rows, out) in total.parts(columns) {
            let [left, right] = self.factors_of_weight(block, scaled);
            let sum = Sum { out, left: left.transposed(), right: right.plain() };
            // SAFETY: passed on from this function's contract.
            unsafe {
                label_term(rows, out, true)?;
                let there = if by_columns {
                    There::All
                } else {
                    There::Some(product.labelled(token_scalars), first)
                };
                sum.run(self.stream, there)?;
            }
        }
        Ok(())
    }

    fn matrix(&self, block: &Block) -> Matrix {
        let Block { tokens, columns, at, stride } = *block;
        Matrix::new(at, self.linear.dtype, tokens.count, stride).columns(0, columns.count)
    }

    fn labels(&self, block: &Block) -> Labels {
        self.labels.from(block.tokens.first)
    }

    fn kernel(&self, block: &Block, carries: bool) -> Result<Kernel> {
        let shape = LogitsShape::new(block.tokens.count, block.columns.count)?;
        let part = Part {
            vocab: self.linear.vocab,
            first_column: block.columns.first,
            stride: self.f32_logits(block).stride,
            carried: if carries { self.carried(block.columns.count) } else { null_mut() },
        };
        let Linear { time_block, block_size, .. } = *self.linear;
        let kernel = Kernel::new(self.options, shape, DType::F32)?;
        Ok(kernel.with_tile(time_block, block_size)?.with_part(part))
    }

    /// The rows' partial sums between a chunk of columns and the next.
    fn carried(&self, columns: usize) -> *mut c_void {
        if columns < self.linear.vocab { self.at(self.layout.carried) } else { null_mut() }
    }

    fn weight_of(&self, columns: Chunk) -> Matrix {
        if self.linear.vocab_is_last {
            self.weight.columns(columns.first, columns.count)
        } else {
            self.weight.rows(columns.first, columns.count)
        }
    }

    /// Makes float32 logits.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn logits(&self, block: &Block) -> Result<()> {
        let Scratch { at, bytes } = self.workspace();
        let (to, workspace) = (self.f32_logits(block), Workspace { at, bytes });
        // SAFETY: passed on from this function's contract.
        unsafe { self.sums(to, block.tokens, block.columns, workspace) }
    }

    /// Makes float32 logits of some tokens and columns; a bias is written to the rows first.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn sums(
        &self,
        to: Matrix,
        tokens: Chunk,
        columns: Chunk,
        workspace: Workspace,
    ) -> Result<()> {
        let factors = self.factors(tokens, columns);
        // SAFETY: passed on from this function's contract.
        unsafe {
            if !self.bias.is_null() {
                write_rows(self.stream, self.bias.wrapping_add(columns.first), to)?;
            }
            self.blas.product(self.stream, to, factors, !self.bias.is_null(), workspace)
        }
    }

    /// Adds the sums of dlogits to dbias, if there is one; the first dlogits overwrite it.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    pub(super) unsafe fn add_to_bias(
        &self,
        gradients: Gradients,
        block: &Block,
        first: bool,
    ) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.add_rows_to_bias(gradients, block, null(), first) }
    }

    /// Adds the unnormalised softmax, times each row's factor, to dbias.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn add_unnormalised_to_bias(
        &self,
        gradients: Gradients,
        block: &Block,
        first: bool,
    ) -> Result<()> {
        let factors = FusedProduct::gradient_of(self.at(self.layout.token_scalars), 0);
        // SAFETY: passed on from this function's contract.
        unsafe { self.add_rows_to_bias(gradients, block, factors, first) }
    }

    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn add_rows_to_bias(
        &self,
        gradients: Gradients,
        block: &Block,
        factors: *const c_void,
        first: bool,
    ) -> Result<()> {
        if self.bias.is_null() {
            return Ok(());
        }
        let to = gradients.bias.wrapping_add(block.columns.first);
        let workspace = Workspace { at: self.workspace().at, bytes: self.workspace().bytes };
        // SAFETY: passed on from this function's contract.
        unsafe { sum_columns(self.stream, (self.matrix(block), factors), to, !first, workspace) }
    }

    /// The operands of the logits' GEMM.
    fn factors(&self, tokens: Chunk, columns: Chunk) -> (Operand, Operand) {
        let hidden = self.hidden.rows(tokens.first, tokens.count).plain();
        let weight = self.weight_of(columns);
        let weight = if self.linear.vocab_is_last { weight.plain() } else { weight.transposed() };
        (hidden, weight)
    }

    /// The weight of some columns as the right operand of dhidden's GEMM.
    fn weight_of_hidden(&self, columns: Chunk) -> Operand {
        let weight = self.weight_of(columns);
        if self.linear.vocab_is_last { weight.transposed() } else { weight.plain() }
    }

    /// Adds dlogits @ weight to dhidden; the first dlogits overwrite it.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    pub(super) unsafe fn add_to_hidden(
        &self,
        total: Total,
        block: &Block,
        first: bool,
    ) -> Result<()> {
        let weight = self.weight_of_hidden(block.columns);
        for (rows, place) in total.parts(block.tokens) {
            let dlogits = self.matrix(block).rows(rows.first, rows.count).plain();
            // SAFETY: passed on from this function's contract.
            unsafe { self.product(place, (dlogits, weight), !first) }?;
        }
        Ok(())
    }

    /// Adds dlogits^T @ hidden to dweight; the first dlogits overwrite it.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    pub(super) unsafe fn add_to_weight(
        &self,
        total: Total,
        block: &Block,
        first: bool,
    ) -> Result<()> {
        let hidden = self.hidden.rows(block.tokens.first, block.tokens.count);
        // SAFETY: passed on from this function's contract.
        unsafe { self.add_product_to_weight(total, block, hidden, first) }
    }

    /// Adds block^T @ `hidden` to dweight; the first block overwrites it.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn add_product_to_weight(
        &self,
        total: Total,
        block: &Block,
        hidden: Matrix,
        first: bool,
    ) -> Result<()> {
        let [left, right] = self.factors_of_weight(block, hidden);
        let first = first && !self.linear.adds_to_weight;
        for (rows, place) in total.parts(block.columns) {
            let left = left.columns(rows.first, rows.count).transposed();
            // SAFETY: passed on from this function's contract.
            unsafe { self.product(place, (left, right.plain()), !first) }?;
        }
        Ok(())
    }

    /// The operands A and B of dweight's GEMM A^T @ B, from a block and `hidden` of its tokens.
    fn factors_of_weight(&self, block: &Block, hidden: Matrix) -> [Matrix; 2] {
        let dlogits = self.matrix(block);
        if self.linear.vocab_is_last { [hidden, dlogits] } else { [dlogits, hidden] }
    }

    /// # Safety
    /// As for [`Blas::product`].
    unsafe fn product(
        &self,
        out: Matrix,
        factors: (Operand, Operand),
        accumulate: bool,
    ) -> Result<()> {
        let sum = Sum { out, left: factors.0, right: factors.1 };
        let there = if accumulate { There::All } else { There::Nothing };
        if sum.is_for(Device::current()?, there) {
            // SAFETY: passed on from this function's contract.
            return unsafe { sum.run(self.stream, there) };
        }
        let Scratch { at, bytes } = self.workspace();
        let workspace = Workspace { at, bytes };
        // SAFETY: passed on from this function's contract.
        unsafe { self.blas.product(self.stream, out, factors, accumulate, workspace) }
    }
}

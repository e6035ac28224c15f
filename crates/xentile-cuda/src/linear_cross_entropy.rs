//! Cross-entropy of hidden states against an output matrix, in as much scratch as is allowed.
//!
//! Logits are made a chunk at a time by a product of cuBLASLt, the kernels of
//! [`cross_entropy`](crate::cross_entropy) turn them into sums or, in place, into their gradient, and
//! two more products take that from there. Sums over chunks are in f32 and rounded once. Every order
//! is fixed, so that results are the same from run to run.

use std::ffi::c_void;
use std::ptr::null_mut;

use xentile::cross_entropy::CrossEntropy;
use xentile::{DType, LogitsShape};

use crate::blas::{Blas, Matrix, WORKSPACE_BYTES};
use crate::cross_entropy::{Cotangents, Kernel, Labels, Part, Pass, SavedLse, TokenOutputs};
use crate::driver::RawStream;
use crate::round::round;
use crate::{Error, Result, check_alignment};

/// Where parts of the scratch begin: lines of memory, and what products like best.
const ALIGNMENT: usize = 256;
/// Bytes that rows of logits are a multiple of.
const LINE_BYTES: usize = 128;
/// Bytes of a row's sums between chunks.
const CARRIED_BYTES: usize = 16;

/// The problem, and how it is cut.
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
    /// Tokens of a chunk of logits.
    pub chunk_tokens: usize,
    /// Columns of a chunk of logits; V for the fused pass.
    pub chunk_columns: usize,
    /// Whether the backward pass sweeps for dhidden and for dweight one after the other, so that
    /// sums of one chunk are all it keeps, for one product more.
    pub apart: bool,
    /// The tile of the kernels over logits, where it is not the planned one.
    pub time_block: Option<usize>,
    /// As above.
    pub block_size: Option<usize>,
}

/// Operands on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// `[N, D]`.
    pub hidden: *const c_void,
    /// `[V, D]` or `[D, V]`.
    pub weight: *const c_void,
    /// `[N]`.
    pub labels: Labels,
}

/// Where gradients go on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// As hidden.
    pub hidden: *mut c_void,
    /// As the weight.
    pub weight: *mut c_void,
}

/// Memory that a call may use.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// Where it begins, at a multiple of 256.
    pub at: *mut c_void,
    /// Its size.
    pub bytes: usize,
}

/// The parts of the scratch; those that a pass does not have are empty.
#[derive(Clone, Copy, Debug)]
struct Layout {
    workspace: usize,
    logits: usize,
    carried: usize,
    of_hidden: usize,
    of_weight: usize,
    bytes: usize,
}

impl Linear {
    /// The scratch that `pass` needs, in bytes.
    #[must_use]
    pub fn scratch_bytes(&self, pass: Pass) -> usize {
        self.layout(pass).bytes
    }

    fn layout(&self, pass: Pass) -> Layout {
        let mut bytes = 0;
        let mut take = |wanted: usize| {
            let at = bytes;
            bytes += wanted.next_multiple_of(ALIGNMENT);
            at
        };
        let only = |condition: bool, wanted: usize| if condition { wanted } else { 0 };
        let sums = self.dtype != DType::F32;
        let cut_tokens = self.chunk_tokens < self.tokens;
        let cut_columns = self.chunk_columns < self.vocab;
        let kept_tokens = if self.apart { self.chunk_tokens } else { self.tokens };
        let backward = pass == Pass::Backward;
        let workspace = take(WORKSPACE_BYTES);
        let logits = take(self.chunk_tokens * self.stride() * self.dtype.size_bytes());
        let carried = pass == Pass::Forward && cut_columns;
        let carried = take(only(carried, CARRIED_BYTES * self.chunk_tokens));
        let of_hidden = backward && cut_columns && sums;
        let of_hidden = take(only(of_hidden, 4 * kept_tokens * self.width));
        let of_weight = pass != Pass::Forward && cut_tokens && sums;
        let of_weight = take(only(of_weight, 4 * self.chunk_columns * self.width));
        Layout { workspace, logits, carried, of_hidden, of_weight, bytes }
    }

    /// Elements from one row of a chunk of logits to the next.
    fn stride(&self) -> usize {
        self.chunk_columns.next_multiple_of(LINE_BYTES / self.dtype.size_bytes())
    }

    /// Has `stream` fill what `outputs` asks for.
    ///
    /// # Errors
    /// An option outside its range, scratch that is too little, no driver, GPU or cuBLASLt that will do,
    /// or a failure of one of them.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context; pointers lead to arrays of the
    /// shapes that are said on its device, which nothing else touches until it has run what was
    /// launched here.
    pub unsafe fn forward(
        &self,
        options: CrossEntropy,
        stream: *mut c_void,
        operands: Operands,
        outputs: TokenOutputs,
        scratch: Scratch,
    ) -> Result<()> {
        let run = Run::new(self, options, Pass::Forward, stream, operands, scratch)?;
        for tokens in chunks(self.tokens, self.chunk_tokens) {
            for columns in chunks(self.vocab, self.chunk_columns) {
                let outputs = outputs.from(tokens.first);
                // SAFETY: passed on from this function's contract.
                unsafe {
                    run.logits(tokens, columns)?;
                    let kernel = run.kernel(tokens, columns)?;
                    kernel.forward(stream, run.chunk(), run.labels(tokens), outputs)?;
                }
            }
        }
        Ok(())
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
        let run = Run::new(self, options, Pass::Backward, stream, operands, scratch)?;
        let (of_hidden, of_weight) = (run.of_hidden(gradients), run.of_weight(gradients));
        let dlogits = |tokens: Chunk, columns: Chunk| -> Result<()> {
            let (saved, cotangents) = (saved.from(tokens.first), cotangents.from(tokens.first));
            let place = (run.chunk(), run.chunk().cast_mut());
            // SAFETY: passed on from this function's contract.
            unsafe {
                run.logits(tokens, columns)?;
                let kernel = run.kernel(tokens, columns)?;
                kernel.backward(stream, place, run.labels(tokens), saved, cotangents)
            }
        };
        if self.apart {
            for tokens in chunks(self.tokens, self.chunk_tokens) {
                for columns in chunks(self.vocab, self.chunk_columns) {
                    dlogits(tokens, columns)?;
                    // SAFETY: passed on from this function's contract.
                    unsafe { run.add_to_hidden(of_hidden, tokens, columns) }?;
                }
                // SAFETY: as above.
                unsafe { of_hidden.end(stream, tokens) }?;
            }
        }
        for columns in chunks(self.vocab, self.chunk_columns) {
            for tokens in chunks(self.tokens, self.chunk_tokens) {
                dlogits(tokens, columns)?;
                // SAFETY: passed on from this function's contract.
                unsafe {
                    if !self.apart {
                        run.add_to_hidden(of_hidden, tokens, columns)?;
                    }
                    run.add_to_weight(of_weight, tokens, columns)?;
                }
            }
            // SAFETY: as above.
            unsafe { of_weight.end(stream, columns) }?;
        }
        if self.apart {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { of_hidden.end(stream, Chunk { first: 0, count: self.tokens }) }
    }

    /// Has `stream` fill what `outputs` asks for, and write the gradients for cotangents `dloss` `[N]`
    /// of the losses, from whole rows of logits.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward).
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
        let run = Run::new(self, options, Pass::Fused, stream, operands, scratch)?;
        let (of_hidden, of_weight) = (run.of_hidden(gradients), run.of_weight(gradients));
        let columns = Chunk { first: 0, count: self.vocab };
        for tokens in chunks(self.tokens, self.chunk_tokens) {
            let place = (run.chunk(), run.chunk().cast_mut());
            let dloss = dloss.wrapping_add(tokens.first);
            // SAFETY: passed on from this function's contract.
            unsafe {
                run.logits(tokens, columns)?;
                let kernel = run.kernel(tokens, columns)?;
                let outputs = outputs.from(tokens.first);
                kernel.fused(stream, place, run.labels(tokens), dloss, outputs)?;
                run.add_to_hidden(of_hidden, tokens, columns)?;
                run.add_to_weight(of_weight, tokens, columns)?;
            }
        }
        // SAFETY: as above.
        unsafe { of_weight.end(stream, columns) }
    }
}

/// Some tokens, or some columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    first: usize,
    count: usize,
}

/// The chunks that cut `total`, the last of which may be smaller.
fn chunks(total: usize, chunk: usize) -> impl Iterator<Item = Chunk> {
    (0..total)
        .step_by(chunk.max(1))
        .map(move |first| Chunk { first, count: chunk.max(1).min(total - first) })
}

/// Where a gradient goes, and where its sums are until it is whole.
#[derive(Clone, Copy, Debug)]
struct Total {
    gradient: Matrix,
    /// None where a gradient is its own sum: it is in f32, or one product gives it.
    sums: Option<Matrix>,
    /// Whether the sums are of one chunk only, not of all.
    of_one_chunk: bool,
    /// Whether chunks are columns of the matrix, rather than rows.
    by_columns: bool,
}

impl Total {
    fn part(&self, matrix: Matrix, first: usize, count: usize) -> Matrix {
        if self.by_columns { matrix.columns(first, count) } else { matrix.rows(first, count) }
    }

    /// Where products for a chunk go.
    fn place(&self, chunk: Chunk) -> Matrix {
        match self.sums {
            Some(sums) if self.of_one_chunk => self.sums_of_one(sums, chunk.count),
            Some(sums) => self.part(sums, chunk.first, chunk.count),
            None => self.part(self.gradient, chunk.first, chunk.count),
        }
    }

    /// Sums of a chunk that may be smaller than the others, without gaps.
    fn sums_of_one(&self, sums: Matrix, count: usize) -> Matrix {
        if self.by_columns {
            Matrix::new(sums.at, sums.dtype, sums.rows, count)
        } else {
            sums.rows(0, count)
        }
    }

    /// Rounds the sums of a chunk to their gradient.
    ///
    /// # Safety
    /// As for [`round`].
    unsafe fn end(&self, stream: RawStream, chunk: Chunk) -> Result<()> {
        if self.sums.is_none() {
            return Ok(());
        }
        let gradient = self.part(self.gradient, chunk.first, chunk.count);
        // SAFETY: passed on from this function's contract.
        unsafe { round(stream, self.place(chunk), gradient) }
    }
}

/// A call: what all its chunks have in common.
struct Run<'a> {
    linear: &'a Linear,
    options: CrossEntropy,
    blas: &'static Blas,
    stream: RawStream,
    hidden: Matrix,
    weight: Matrix,
    labels: Labels,
    scratch: *mut c_void,
    layout: Layout,
    pass: Pass,
}

impl<'a> Run<'a> {
    fn new(
        linear: &'a Linear,
        options: CrossEntropy,
        pass: Pass,
        stream: RawStream,
        operands: Operands,
        scratch: Scratch,
    ) -> Result<Self> {
        let layout = linear.layout(pass);
        if scratch.bytes < layout.bytes {
            return Err(Error::Scratch { bytes: scratch.bytes, needed: layout.bytes });
        }
        check_alignment("hidden", operands.hidden)?;
        check_alignment("weight", operands.weight)?;
        check_alignment("scratch", scratch.at)?;
        let Linear { tokens, width, vocab, dtype, .. } = *linear;
        let [rows, columns] = if linear.vocab_is_last { [width, vocab] } else { [vocab, width] };
        Ok(Self {
            linear,
            options,
            blas: Blas::get()?,
            stream,
            hidden: Matrix::new(operands.hidden.cast_mut(), dtype, tokens, width),
            weight: Matrix::new(operands.weight.cast_mut(), dtype, rows, columns),
            labels: operands.labels,
            scratch: scratch.at,
            layout,
            pass,
        })
    }

    fn at(&self, offset: usize) -> *mut c_void {
        self.scratch.wrapping_byte_add(offset)
    }

    /// Where chunks of logits and of their gradients are.
    fn chunk(&self) -> *const c_void {
        self.at(self.layout.logits).cast_const()
    }

    fn chunk_matrix(&self, tokens: Chunk, columns: Chunk) -> Matrix {
        let whole = Matrix::new(
            self.at(self.layout.logits),
            self.linear.dtype,
            tokens.count,
            self.linear.stride(),
        );
        whole.columns(0, columns.count)
    }

    fn labels(&self, tokens: Chunk) -> Labels {
        self.labels.from(tokens.first)
    }

    fn kernel(&self, tokens: Chunk, columns: Chunk) -> Result<Kernel> {
        let shape = LogitsShape::new(tokens.count, columns.count)?;
        let carries = self.pass == Pass::Forward && self.linear.chunk_columns < self.linear.vocab;
        let part = Part {
            vocab: self.linear.vocab,
            first_column: columns.first,
            stride: self.linear.stride(),
            carried: if carries { self.at(self.layout.carried) } else { null_mut() },
        };
        let Linear { dtype, time_block, block_size, .. } = *self.linear;
        let kernel = Kernel::new(self.options, shape, dtype)?.with_tile(time_block, block_size)?;
        Ok(kernel.of_part(part))
    }

    fn weight_of(&self, columns: Chunk) -> Matrix {
        if self.linear.vocab_is_last {
            self.weight.columns(columns.first, columns.count)
        } else {
            self.weight.rows(columns.first, columns.count)
        }
    }

    fn of_hidden(&self, gradients: Gradients) -> Total {
        let linear = self.linear;
        let sums = self.pass == Pass::Backward
            && linear.chunk_columns < linear.vocab
            && linear.dtype != DType::F32;
        let rows = if linear.apart { linear.chunk_tokens } else { linear.tokens };
        let at = self.at(self.layout.of_hidden);
        Total {
            gradient: Matrix { at: gradients.hidden, ..self.hidden },
            sums: sums.then(|| Matrix::new(at, DType::F32, rows, linear.width)),
            of_one_chunk: linear.apart,
            by_columns: false,
        }
    }

    fn of_weight(&self, gradients: Gradients) -> Total {
        let linear = self.linear;
        let sums = linear.chunk_tokens < linear.tokens && linear.dtype != DType::F32;
        let [rows, columns] = if linear.vocab_is_last {
            [linear.width, linear.chunk_columns]
        } else {
            [linear.chunk_columns, linear.width]
        };
        let at = self.at(self.layout.of_weight);
        Total {
            gradient: Matrix { at: gradients.weight, ..self.weight },
            sums: sums.then(|| Matrix::new(at, DType::F32, rows, columns)),
            of_one_chunk: true,
            by_columns: linear.vocab_is_last,
        }
    }

    /// Makes a chunk of logits.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn logits(&self, tokens: Chunk, columns: Chunk) -> Result<()> {
        let hidden = self.hidden.rows(tokens.first, tokens.count).plain();
        let weight = self.weight_of(columns);
        let weight = if self.linear.vocab_is_last { weight.plain() } else { weight.transposed() };
        let out = self.chunk_matrix(tokens, columns);
        // SAFETY: passed on from this function's contract.
        unsafe { self.product(out, (hidden, weight), false) }
    }

    /// Adds what a chunk of dlogits gives hidden.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn add_to_hidden(&self, total: Total, tokens: Chunk, columns: Chunk) -> Result<()> {
        let dlogits = self.chunk_matrix(tokens, columns).plain();
        let weight = self.weight_of(columns);
        let weight = if self.linear.vocab_is_last { weight.transposed() } else { weight.plain() };
        // SAFETY: passed on from this function's contract.
        unsafe { self.product(total.place(tokens), (dlogits, weight), columns.first > 0) }
    }

    /// Adds what a chunk of dlogits gives the weight.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn add_to_weight(&self, total: Total, tokens: Chunk, columns: Chunk) -> Result<()> {
        let dlogits = self.chunk_matrix(tokens, columns);
        let hidden = self.hidden.rows(tokens.first, tokens.count);
        let factors = if self.linear.vocab_is_last {
            (hidden.transposed(), dlogits.plain())
        } else {
            (dlogits.transposed(), hidden.plain())
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.product(total.place(columns), factors, tokens.first > 0) }
    }

    /// # Safety
    /// As for [`Blas::product`].
    unsafe fn product(
        &self,
        out: Matrix,
        factors: (crate::blas::Operand, crate::blas::Operand),
        accumulate: bool,
    ) -> Result<()> {
        let workspace = self.at(self.layout.workspace);
        // SAFETY: passed on from this function's contract.
        unsafe { self.blas.product(self.stream, out, factors, accumulate, workspace) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINEAR: Linear = Linear {
        tokens: 1000,
        width: 64,
        vocab: 5000,
        vocab_is_last: false,
        dtype: DType::Bf16,
        chunk_tokens: 1000,
        chunk_columns: 5000,
        apart: false,
        time_block: None,
        block_size: None,
    };

    #[test]
    fn chunks_cut_all_and_the_last_may_be_smaller() {
        let cut =
            |total, chunk| chunks(total, chunk).map(|c| (c.first, c.count)).collect::<Vec<_>>();
        assert_eq!(cut(10, 4), [(0, 4), (4, 4), (8, 2)]);
        assert_eq!(cut(8, 4), [(0, 4), (4, 4)]);
        assert_eq!(cut(3, 8), [(0, 3)]);
        assert_eq!(cut(0, 8), []);
    }

    #[test]
    fn scratch_is_logits_and_the_sums_that_a_cut_needs() {
        let whole = WORKSPACE_BYTES + 1000 * 5056 * 2;
        assert_eq!(LINEAR.scratch_bytes(Pass::Fused), whole);
        assert_eq!(LINEAR.scratch_bytes(Pass::Backward), whole);
        let part = Linear { chunk_columns: 1024, ..LINEAR };
        let logits = WORKSPACE_BYTES + 1000 * 1024 * 2;
        let round = |bytes: usize| bytes.next_multiple_of(256);
        assert_eq!(part.scratch_bytes(Pass::Forward), logits + round(1000 * 16));
        assert_eq!(part.scratch_bytes(Pass::Backward), logits + 4 * 1000 * 64);
        let both = Linear { chunk_tokens: 500, ..part };
        let (logits, weight) = (WORKSPACE_BYTES + 500 * 1024 * 2, 4 * 1024 * 64);
        assert_eq!(both.scratch_bytes(Pass::Backward), logits + 4 * 1000 * 64 + weight);
        let apart = Linear { apart: true, ..both };
        assert_eq!(apart.scratch_bytes(Pass::Backward), logits + 4 * 500 * 64 + weight);
        let tokens = Linear { chunk_tokens: 500, ..LINEAR };
        let logits = WORKSPACE_BYTES + 500 * 5056 * 2;
        assert_eq!(tokens.scratch_bytes(Pass::Fused), logits + 4 * 5000 * 64);
        let f32 = Linear { dtype: DType::F32, ..both };
        assert_eq!(f32.scratch_bytes(Pass::Backward), WORKSPACE_BYTES + 500 * 1024 * 4);
    }
}

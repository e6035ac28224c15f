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

use crate::blas::{Blas, Matrix, Operand, Workspace};
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
    /// The chunks that logits are made in, of all columns for the fused pass.
    pub chunk: Extents,
    /// Where the backward pass sweeps for dhidden and for dweight one after the other, so that sums of
    /// one chunk are all it keeps, for one product more: the chunks of the second sweep.
    pub apart: Option<Extents>,
    /// Bytes that products have to work in, for sums that are cut among more multiprocessors.
    pub workspace_bytes: usize,
    /// The tile of the kernels over logits, where it is not the planned one.
    pub time_block: Option<usize>,
    /// As above.
    pub block_size: Option<usize>,
}

/// Tokens and columns of a chunk of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    /// Tokens.
    pub tokens: usize,
    /// Columns.
    pub columns: usize,
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

/// A sweep over all chunks of logits, and the gradients that it makes.
#[derive(Clone, Copy, Debug)]
struct Sweep {
    chunk: Extents,
    of_hidden: bool,
    of_weight: bool,
}

impl Linear {
    /// The scratch that `pass` needs, in bytes.
    #[must_use]
    pub fn scratch_bytes(&self, pass: Pass) -> usize {
        // Of two sweeps each has all of it.
        self.sweeps(pass).map(|sweep| self.layout(pass, sweep).bytes).max().unwrap_or(0)
    }

    /// The sweeps over all chunks that `pass` makes, in their order.
    fn sweeps(&self, pass: Pass) -> impl Iterator<Item = Sweep> {
        let (chunk, backward) = (self.chunk, pass == Pass::Backward);
        let apart = self.apart.filter(|_| backward);
        let first = Sweep { chunk, of_hidden: pass != Pass::Forward, of_weight: apart.is_none() };
        let second = apart.map(|chunk| Sweep { chunk, of_hidden: false, of_weight: true });
        [Some(first), second].into_iter().flatten()
    }

    fn layout(&self, pass: Pass, sweep: Sweep) -> Layout {
        let mut bytes = 0;
        let mut take = |wanted: usize| {
            let at = bytes;
            bytes += wanted.next_multiple_of(ALIGNMENT);
            at
        };
        let only = |condition: bool, wanted: usize| if condition { wanted } else { 0 };
        let Extents { tokens, columns } = sweep.chunk;
        let cut_columns = columns < self.vocab;
        // Of f32 gradients are their own sums, as those that one product gives are.
        let sums = self.dtype != DType::F32 && pass != Pass::Forward;
        let kept_tokens = if sweep.of_weight { self.tokens } else { tokens };
        let workspace = take(self.workspace_bytes);
        let logits = take(tokens * self.stride(sweep.chunk) * self.dtype.size_bytes());
        let carried = pass == Pass::Forward && cut_columns;
        let carried = take(only(carried, CARRIED_BYTES * tokens));
        let of_hidden = sums && sweep.of_hidden && cut_columns;
        let of_hidden = take(only(of_hidden, 4 * kept_tokens * self.width));
        let of_weight = sums && sweep.of_weight && tokens < self.tokens;
        let of_weight = take(only(of_weight, 4 * columns * self.width));
        Layout { workspace, logits, carried, of_hidden, of_weight, bytes }
    }

    /// Elements from one row of a chunk of logits to the next.
    fn stride(&self, chunk: Extents) -> usize {
        chunk.columns.next_multiple_of(LINE_BYTES / self.dtype.size_bytes())
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
        let pass = Pass::Forward;
        let sweep = Sweep { chunk: self.chunk, of_hidden: false, of_weight: false };
        let run = Run::new(self, options, pass, sweep, stream, operands, scratch)?;
        for tokens in chunks(self.tokens, self.chunk.tokens) {
            for columns in chunks(self.vocab, self.chunk.columns) {
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
        for sweep in self.sweeps(Pass::Backward) {
            let run = Run::new(self, options, Pass::Backward, sweep, stream, operands, scratch)?;
            let (of_hidden, of_weight) = (run.of_hidden(gradients), run.of_weight(gradients));
            let chunk = |tokens: Chunk, columns: Chunk| -> Result<()> {
                let (saved, cotangents) = (saved.from(tokens.first), cotangents.from(tokens.first));
                let place = (run.chunk(), run.chunk().cast_mut());
                // SAFETY: passed on from this function's contract.
                unsafe {
                    run.logits(tokens, columns)?;
                    let kernel = run.kernel(tokens, columns)?;
                    kernel.backward(stream, place, run.labels(tokens), saved, cotangents)?;
                    if sweep.of_hidden {
                        run.add_to_hidden(of_hidden, tokens, columns)?;
                    }
                    if sweep.of_weight {
                        run.add_to_weight(of_weight, tokens, columns)?;
                    }
                }
                Ok(())
            };
            if !sweep.of_weight {
                for tokens in chunks(self.tokens, sweep.chunk.tokens) {
                    for columns in chunks(self.vocab, sweep.chunk.columns) {
                        chunk(tokens, columns)?;
                    }
                    // SAFETY: as above.
                    unsafe { of_hidden.end(stream, tokens) }?;
                }
                continue;
            }
            for columns in chunks(self.vocab, sweep.chunk.columns) {
                for tokens in chunks(self.tokens, sweep.chunk.tokens) {
                    chunk(tokens, columns)?;
                }
                // SAFETY: as above.
                unsafe { of_weight.end(stream, columns) }?;
            }
            if sweep.of_hidden {
                // SAFETY: as above.
                unsafe { of_hidden.end(stream, Chunk { first: 0, count: self.tokens }) }?;
            }
        }
        Ok(())
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
        let pass = Pass::Fused;
        let sweep = Sweep { chunk: self.chunk, of_hidden: true, of_weight: true };
        let run = Run::new(self, options, pass, sweep, stream, operands, scratch)?;
        let (of_hidden, of_weight) = (run.of_hidden(gradients), run.of_weight(gradients));
        let columns = Chunk { first: 0, count: self.vocab };
        for tokens in chunks(self.tokens, self.chunk.tokens) {
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

/// A sweep: what all its chunks have in common.
struct Run<'a> {
    linear: &'a Linear,
    sweep: Sweep,
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
        Ok(Self {
            linear,
            sweep,
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
            self.linear.stride(self.sweep.chunk),
        );
        whole.columns(0, columns.count)
    }

    fn labels(&self, tokens: Chunk) -> Labels {
        self.labels.from(tokens.first)
    }

    fn kernel(&self, tokens: Chunk, columns: Chunk) -> Result<Kernel> {
        let shape = LogitsShape::new(tokens.count, columns.count)?;
        let carries = self.pass == Pass::Forward && self.sweep.chunk.columns < self.linear.vocab;
        let part = Part {
            vocab: self.linear.vocab,
            first_column: columns.first,
            stride: self.linear.stride(self.sweep.chunk),
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
        let (linear, chunk) = (self.linear, self.sweep.chunk);
        let sums = linear.dtype != DType::F32 && chunk.columns < linear.vocab;
        let of_one_chunk = !self.sweep.of_weight;
        let rows = if of_one_chunk { chunk.tokens } else { linear.tokens };
        let at = self.at(self.layout.of_hidden);
        Total {
            gradient: Matrix { at: gradients.hidden, ..self.hidden },
            sums: sums.then(|| Matrix::new(at, DType::F32, rows, linear.width)),
            of_one_chunk,
            by_columns: false,
        }
    }

    fn of_weight(&self, gradients: Gradients) -> Total {
        let (linear, chunk) = (self.linear, self.sweep.chunk);
        let sums = linear.dtype != DType::F32 && chunk.tokens < linear.tokens;
        let by_columns = linear.vocab_is_last;
        let [rows, columns] =
            if by_columns { [linear.width, chunk.columns] } else { [chunk.columns, linear.width] };
        let at = self.at(self.layout.of_weight);
        Total {
            gradient: Matrix { at: gradients.weight, ..self.weight },
            sums: sums.then(|| Matrix::new(at, DType::F32, rows, columns)),
            of_one_chunk: true,
            by_columns,
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
        factors: (Operand, Operand),
        accumulate: bool,
    ) -> Result<()> {
        let workspace =
            Workspace { at: self.at(self.layout.workspace), bytes: self.linear.workspace_bytes };
        // SAFETY: passed on from this function's contract.
        unsafe { self.blas.product(self.stream, out, factors, accumulate, workspace) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKSPACE_BYTES: usize = 4 << 20;
    const LINEAR: Linear = Linear {
        tokens: 1000,
        width: 64,
        vocab: 5000,
        vocab_is_last: false,
        dtype: DType::Bf16,
        chunk: Extents { tokens: 1000, columns: 5000 },
        apart: None,
        workspace_bytes: WORKSPACE_BYTES,
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
        let cut = |tokens, columns| Linear { chunk: Extents { tokens, columns }, ..LINEAR };
        let part = cut(1000, 1024);
        let logits = WORKSPACE_BYTES + 1000 * 1024 * 2;
        let round = |bytes: usize| bytes.next_multiple_of(256);
        assert_eq!(part.scratch_bytes(Pass::Forward), logits + round(1000 * 16));
        assert_eq!(part.scratch_bytes(Pass::Backward), logits + 4 * 1000 * 64);
        let both = cut(500, 1024);
        let (logits, weight) = (WORKSPACE_BYTES + 500 * 1024 * 2, 4 * 1024 * 64);
        assert_eq!(both.scratch_bytes(Pass::Backward), logits + 4 * 1000 * 64 + weight);
        // Two sweeps never keep both sums, and each has all of the scratch.
        let apart = Linear { apart: Some(Extents { tokens: 250, columns: 2048 }), ..both };
        let second = WORKSPACE_BYTES + 250 * 2048 * 2 + 4 * 2048 * 64;
        assert_eq!(apart.scratch_bytes(Pass::Backward), second.max(logits + 4 * 500 * 64));
        assert_eq!(apart.scratch_bytes(Pass::Forward), logits + round(500 * 16));
        let tokens = cut(500, 5000);
        let logits = WORKSPACE_BYTES + 500 * 5056 * 2;
        assert_eq!(tokens.scratch_bytes(Pass::Fused), logits + 4 * 5000 * 64);
        let f32 = Linear { dtype: DType::F32, ..both };
        assert_eq!(f32.scratch_bytes(Pass::Backward), WORKSPACE_BYTES + 500 * 1024 * 4);
    }
}

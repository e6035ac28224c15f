//! Products whose sums stay in f32 and may be added to others, by the kernels of Hopper: memory adds
//! them, while the next tile is multiplied, where cuBLASLt waits to read what it adds to. And those
//! that are added to what has 16 bits, and rounded once, where cuBLASLt's newer kernels round the
//! product before they add it.

use std::ptr::{null, null_mut};

use xentile::cross_entropy::CrossEntropy;
use xentile::{DType, LogitsShape};

use super::{Arguments, Epilogue, FusedProduct, Ready, VECTOR, arguments, count};
use crate::blas::{Matrix, Operand};
use crate::cross_entropy::Arguments as Row;
use crate::cross_entropy::{Kernel, Labels, Part, Variant};
use crate::driver::{Driver, RawStream, TensorMap};
use crate::{Device, Result};

/// Tiles of a block of rows that run one beside the other, so that what they share of the left factor
/// is read from memory once. Of more, tiles of several blocks do, to share the right one's too.
const MOST_SIDE_BY_SIDE: usize = 4;

/// Terms of a short sum, at most: a tile's writing takes a large part of its time.
const MOST_OF_SHORT: usize = 256;

/// The product of two factors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum {
    /// Where it goes, `[M, N]`: in f32, or in bf16 if it is added to what is there.
    pub(crate) out: Matrix,
    /// `[M, K]`, or `[K, M]` transposed.
    pub(crate) left: Operand,
    /// `[K, N]`, or `[N, K]` transposed.
    pub(crate) right: Operand,
}

/// What a product finds where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum There {
    /// Nothing that counts: it is written.
    Nothing,
    /// What it is added to.
    All,
    /// In some rows what it is added to, in others nothing: a bit for each of the vocabulary's rows
    /// on a GPU, of which the first here is that of the row so many on.
    Some(*const u32, usize),
}

impl Sum {
    /// How the factors lie, as kernels are named; none where no kernel has them.
    fn factors(&self) -> Option<&'static str> {
        match (self.left.transposed, self.right.transposed) {
            (false, true) => Some("vd"),
            (false, false) => Some("dv"),
            (true, false) => Some("transposed"),
            (true, true) => None,
        }
    }

    /// As a product of hidden states and a weight.
    fn product(&self) -> FusedProduct {
        let (tokens, width) = self.left.extents();
        let (options, dtype) = (CrossEntropy::default(), self.left.matrix.dtype);
        FusedProduct {
            tokens,
            width,
            vocab: self.out.columns,
            vocab_is_last: false,
            dtype,
            options,
        }
    }

    /// Whether there is a kernel that writes it, or adds it to what is there: in f32 one that keeps a
    /// GPU busy.
    pub(crate) fn is_for(&self, device: &Device, there: There) -> bool {
        let is_placed = |matrix: Matrix| {
            let step = if matrix.dtype == DType::F32 { VECTOR / 2 } else { VECTOR };
            matrix.at.addr().is_multiple_of(16) && matrix.stride.is_multiple_of(step)
        };
        device.capability() == (9, 0)
            && device.limits().clusters
            && self.factors().is_some()
            && match self.out.dtype {
                DType::F32 => self.product().keeps_busy(device.limits().multiprocessors),
                DType::Bf16 => there != There::Nothing && self.left.transposed,
                DType::F16 => false,
            }
            && self.left.matrix.dtype != DType::F32
            && [self.out, self.left.matrix, self.right.matrix].into_iter().all(is_placed)
    }

    /// Has `stream` write it, or add it to what is there.
    ///
    /// # Errors
    /// No GPU or driver that will do, or a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and matrices are on its
    /// device, where nothing else touches them until it has run what was launched here;
    /// [`is_for`](Self::is_for) that.
    pub(crate) unsafe fn run(&self, stream: RawStream, there: There) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(stream, there, Ready::launch_product) }
    }

    /// As [`run`](Self::run), where a collective takes multiprocessors meanwhile.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    pub(crate) unsafe fn run_tiles(&self, stream: RawStream, there: There) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(stream, there, Ready::launch_tiles) }
    }

    /// # Safety
    /// As for [`run`](Self::run).
    unsafe fn launch(
        &self,
        stream: RawStream,
        there: There,
        launch: unsafe fn(&Ready, RawStream, &Arguments) -> Result<()>,
    ) -> Result<()> {
        let product = self.product();
        let FusedProduct { tokens, width, vocab, dtype, options, .. } = product;
        if tokens * width * vocab == 0 {
            return Ok(());
        }
        let factors = self.factors().unwrap_or_default();
        let (labelled, first) = match there {
            There::Some(labelled, first) => (labelled, first),
            There::Nothing | There::All => (null(), 0),
        };
        let (epilogue, columns_of_store) = match self.out.dtype {
            DType::F32 => (Epilogue::Sum, arguments::COLUMNS_OF_SUM),
            _ if width <= MOST_OF_SHORT => (Epilogue::AddedLater, arguments::BLOCK),
            _ => (Epilogue::Added, arguments::BLOCK),
        };
        let driver = Driver::get()?;
        let parts = product.tiles(vocab);
        let block = arguments::BLOCK;
        let map = |matrix: Matrix, boxed: (u32, u32)| -> Result<TensorMap> {
            let Matrix { at, dtype, rows, columns, stride } = matrix;
            driver.tensor_map(dtype, at, (rows, columns), stride, boxed)
        };
        let rows_of = |operand: Operand, summed_first: bool, rows: u32| {
            map(operand.matrix, (block, if summed_first { block } else { rows }))
        };
        let part = Part { vocab, first_column: 0, stride: self.out.stride, carried: null_mut() };
        let shape = LogitsShape::new(tokens, vocab)?;
        let row = Kernel::new(options, shape, self.out.dtype)?.with_part(part);
        let row = row.arguments(null(), Labels::I32(null()));
        let arguments = Arguments {
            hidden: rows_of(self.left, self.left.transposed, arguments::ROWS_OF_A)?,
            weight: rows_of(self.right, !self.right.transposed, arguments::ROWS_OF_B)?,
            dlogits: map(self.out, (columns_of_store, arguments::ROWS_OF_STORE))?,
            blocks: count(width.div_ceil(block as usize)),
            tiles: count(parts),
            // Nothing goes from tile to tile.
            parts: count(parts),
            token_blocks: count(product.token_blocks()),
            group: count(if parts <= MOST_SIDE_BY_SIDE { 1 } else { product.group() }),
            adds: (there != There::Nothing).into(),
            labelled: labelled.cast_mut(),
            part_first: first as i64,
            ..Arguments::with_row(Row { dlogits: self.out.at, ..row })
        };
        // SAFETY: passed on from this function's contract.
        unsafe {
            let ready = Ready::get(epilogue, dtype, Variant::Basic, factors, stream)?;
            launch(&ready, stream, &arguments)
        }
    }
}

//! Logits in f32 of few tokens and columns at a time, where operands have 16 bits and no product has the
//! cross-entropy in it: a product of cuBLASLt writes them to the workspace, and the kernels over logits
//! read them there, once for lse and once more for their gradient, which is rounded where it goes.

use std::ffi::c_void;
use std::ptr::null_mut;

use xentile::{DType, LogitsShape};

use super::super::tiling::{CARRIED_BYTES, Chunk};
use super::super::{Linear, Scratch};
use super::{Block, Run};
use crate::blas::{Matrix, Workspace};
use crate::cross_entropy::{Cotangents, Kernel, Part, SavedLse, TokenOutputs};
use crate::round::round;
use crate::{Error, Result};

/// Columns of a block, at most.
const COLUMNS: usize = 1024;
/// What operands of 16 bits need room for, whichever way rows are added up.
const LEAST_BYTES: usize = 1024;

/// Some tokens and columns of a chunk, and their logits.
struct ColumnBlock {
    tokens: Chunk,
    columns: Chunk,
    logits: Matrix,
    /// Where sums of rows are kept between some columns and the next.
    carried: *mut c_void,
}

impl Run<'_> {
    /// Checks that there is room for rows' sums.
    pub(super) fn check_workspace(&self) -> Result<()> {
        let (bytes, needed) = (self.workspace().bytes, LEAST_BYTES);
        if self.linear.dtype != DType::F32 && bytes < needed {
            return Err(Error::Workspace { bytes, needed });
        }
        Ok(())
    }

    /// Has `outputs` filled, from blocks of `columns`, which are all.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    pub(super) unsafe fn add_up_blocks(&self, columns: Chunk, outputs: TokenOutputs) -> Result<()> {
        let all = Chunk { first: 0, count: self.linear.tokens };
        let add = |piece: &ColumnBlock| -> Result<()> {
            let labels = self.labels.from(piece.tokens.first);
            let outputs = outputs.from(piece.tokens.first);
            // SAFETY: passed on from this function's contract.
            unsafe { self.kernel_of(piece)?.forward(self.stream, piece.logits.at, labels, outputs) }
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.column_blocks(all, columns, add) }
    }

    /// Makes dlogits of logits that are not there.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    pub(super) unsafe fn dlogits_by_blocks(
        &self,
        block: &Block,
        saved: SavedLse,
        cotangents: Cotangents,
    ) -> Result<()> {
        let to = self.matrix(block);
        let write = |piece: &ColumnBlock| -> Result<()> {
            let ColumnBlock { tokens, columns, logits, .. } = *piece;
            let (saved, cotangents) = (saved.from(tokens.first), cotangents.from(tokens.first));
            let (place, labels) =
                ((logits.at.cast_const(), logits.at), self.labels.from(tokens.first));
            let rows = to.rows(tokens.first - block.tokens.first, tokens.count);
            let to = rows.columns(columns.first - block.columns.first, columns.count);
            // SAFETY: passed on from this function's contract.
            unsafe {
                self.kernel_of(piece)?.backward(self.stream, place, labels, saved, cotangents)?;
                round(self.stream, logits, to)
            }
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.column_blocks(block.tokens, block.columns, write) }
    }

    /// Makes the blocks of some tokens and columns, one after the other, each for `work`: those of the
    /// same tokens follow one another.
    ///
    /// # Safety
    /// As for [`Linear::forward`].
    unsafe fn column_blocks(
        &self,
        tokens: Chunk,
        columns: Chunk,
        work: impl Fn(&ColumnBlock) -> Result<()>,
    ) -> Result<()> {
        let Scratch { at, bytes } = self.workspace();
        // No more than a quarter of the room is a row.
        let width = columns.count.min(COLUMNS).min(bytes / 16);
        let rows = bytes / (4 * width + CARRIED_BYTES);
        for tokens in tokens.chunks(rows) {
            let place = at.wrapping_byte_add(CARRIED_BYTES * tokens.count);
            for columns in columns.chunks(width) {
                let logits = Matrix::new(place, DType::F32, tokens.count, columns.count);
                let none = Workspace { at: null_mut(), bytes: 0 };
                // SAFETY: passed on from this function's contract.
                unsafe { self.sums(logits, tokens, columns, none) }?;
                work(&ColumnBlock { tokens, columns, logits, carried: at })?;
            }
        }
        Ok(())
    }

    fn kernel_of(&self, piece: &ColumnBlock) -> Result<Kernel> {
        let ColumnBlock { tokens, columns, logits, carried } = *piece;
        let Linear { vocab, time_block, block_size, .. } = *self.linear;
        let shape = LogitsShape::new(tokens.count, columns.count)?;
        let carried = if columns.count < vocab { carried } else { null_mut() };
        let part = Part { vocab, first_column: columns.first, stride: logits.stride, carried };
        let kernel = Kernel::new(self.options, shape, DType::F32)?;
        Ok(kernel.with_tile(time_block, block_size)?.with_part(part))
    }
}

//! What a bias adds: it is in logits before they are rounded, and its gradient is sums of theirs.

use xentile::DType;

use super::super::Gradients;
use super::super::cut::{Chunk, chunks};
use super::{Block, Run};
use crate::bias::{sum_columns, write_rows};
use crate::blas::{Matrix, Workspace};
use crate::fused_product::DLogits;
use crate::round::round;
use crate::{Error, Result};

/// Columns of logits that are made in f32 at a time.
const COLUMNS: usize = 1024;
/// What these need room for.
const LEAST_BYTES: usize = 256;

impl Run<'_> {
    /// Checks that logits that pass through f32 have room for that.
    pub(super) fn check_bias(&self) -> Result<()> {
        let (bytes, needed) = (self.workspace().bytes, LEAST_BYTES);
        if !self.bias.is_null() && self.passes_through_f32() && bytes < needed {
            return Err(Error::Workspace { bytes, needed });
        }
        Ok(())
    }

    /// Whether no product adds a bias in f32 and then rounds: cuBLASLt's add what is of the dtype of
    /// the logits, in its epilogue too, where a vector would have to begin at a multiple of 16.
    fn passes_through_f32(&self) -> bool {
        self.linear.dtype != DType::F32 && !self.has_fused_product
    }

    /// Makes logits.
    ///
    /// # Safety
    /// As for [`Linear::forward`](crate::linear_cross_entropy::Linear::forward); there is a bias.
    pub(super) unsafe fn logits_with_bias(&self, block: &Block) -> Result<()> {
        let Block { tokens, columns, at, stride } = *block;
        let workspace = Workspace { at: self.workspace().at, bytes: self.workspace().bytes };
        if self.has_fused_product {
            let (product, operands) = self.fused_product(tokens);
            let to = DLogits { at, stride, first_column: columns.first, columns: columns.count };
            // SAFETY: passed on from this function's contract.
            return unsafe { product.logits(self.stream, operands, to) };
        }
        let whole = self.matrix(block);
        if !self.passes_through_f32() {
            // SAFETY: as above.
            return unsafe { self.sums_with_bias(whole, tokens, columns, workspace) };
        }
        let room = workspace.bytes / 4;
        let width = columns.count.min(COLUMNS).min(room);
        for part in chunks(columns.count, width) {
            for rows in chunks(tokens.count, room / width.max(1)) {
                let sums = Matrix::new(workspace.at, DType::F32, rows.count, part.count);
                let of =
                    |whole: Chunk, part: Chunk| Chunk { first: whole.first + part.first, ..part };
                let to = whole.rows(rows.first, rows.count).columns(part.first, part.count);
                let none = Workspace { bytes: 0, ..workspace };
                // SAFETY: as above.
                unsafe {
                    self.sums_with_bias(sums, of(tokens, rows), of(columns, part), none)?;
                    round(self.stream, sums, to)?;
                }
            }
        }
        Ok(())
    }

    /// Makes logits in f32, in the place of rows of the bias.
    ///
    /// # Safety
    /// As for [`Linear::forward`](crate::linear_cross_entropy::Linear::forward); there is a bias.
    unsafe fn sums_with_bias(
        &self,
        to: Matrix,
        tokens: Chunk,
        columns: Chunk,
        workspace: Workspace,
    ) -> Result<()> {
        let (factors, bias) =
            (self.factors(tokens, columns), self.bias.wrapping_add(columns.first));
        // SAFETY: passed on from this function's contract.
        unsafe {
            write_rows(self.stream, bias, to)?;
            self.blas.product(self.stream, to, factors, true, workspace)
        }
    }

    /// Adds what dlogits give the bias, if there is one, or writes it where they are the first.
    ///
    /// # Safety
    /// As for [`Linear::forward`](crate::linear_cross_entropy::Linear::forward).
    pub(in super::super) unsafe fn add_to_bias(
        &self,
        gradients: Gradients,
        block: &Block,
        first: bool,
    ) -> Result<()> {
        if self.bias.is_null() {
            return Ok(());
        }
        let to = gradients.bias.wrapping_add(block.columns.first);
        let workspace = Workspace { at: self.workspace().at, bytes: self.workspace().bytes };
        // SAFETY: passed on from this function's contract.
        unsafe { sum_columns(self.stream, self.matrix(block), to, !first, workspace) }
    }
}

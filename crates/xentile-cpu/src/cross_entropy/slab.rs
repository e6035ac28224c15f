//! Passes over some columns of some tokens, for an operation that makes its logits a slab at a time.

use std::ops::Range;

use xentile::{LogitsShape, Result};

use super::gradient::{Gradient, RowGradient};
use super::matrix::Matrix;
use super::statistics::{Label, RowStatistics, Statistics};
use super::{Kernel, SavedLse};
use crate::InOut;
use crate::compiled::Passes;

/// No column of a slab.
const NO_COLUMN: usize = usize::MAX;

impl Kernel<'_> {
    /// Adds `columns` of the tokens from `first` to `rows`, which are of these tokens. `logits` are
    /// those columns, row after row. Columns come in order, from the first of the vocabulary.
    ///
    /// # Errors
    /// Logits of another length.
    pub(crate) fn add_columns(
        &self,
        logits: &[f32],
        first: usize,
        columns: &Range<usize>,
        rows: &mut [RowStatistics],
    ) -> Result<()> {
        let matrix = Matrix::read_only(logits, LogitsShape::new(rows.len(), columns.len())?)?;
        for (row, (token, logits)) in
            rows.iter_mut().zip((first..).zip(logits.chunks_exact(columns.len())))
        {
            if row.wanted()
                && let Some(column) = self.column(token).filter(|column| columns.contains(column))
            {
                row.set_label(self.label_of(column, logits[column - columns.start]));
            }
        }
        let pass = Statistics {
            matrix: &matrix,
            first: 0,
            first_column: columns.start,
            rows,
            block_size: columns.len(),
            softcap: self.options.softcap,
            mean: self.options.label_smoothing != 0.0,
            ahead: None,
        };
        (Passes::get().statistics)(self.launch.isa, pass);
        Ok(())
    }

    /// Puts the gradient in the place of `logits`, which are `columns` of the tokens from `first`,
    /// for what `saved` has of all tokens and each token's cotangents of loss, logps and lse.
    ///
    /// # Errors
    /// Logits that are no whole rows.
    pub(crate) fn columns_gradient(
        &self,
        logits: &mut [f32],
        first: usize,
        columns: &Range<usize>,
        saved: SavedLse<'_>,
        cotangents: impl Fn(usize) -> [f64; 3],
    ) -> Result<()> {
        let rows: Vec<_> = (first..)
            .zip(logits.chunks_exact(columns.len()))
            .map(|(token, logits)| {
                let lse = saved.exact(token);
                self.slab_row(token, columns, logits, lse, cotangents(token))
            })
            .collect();
        let shape = LogitsShape::new(rows.len(), columns.len())?;
        let pass = Gradient {
            matrix: &Matrix::new(InOut::InPlace(logits), shape)?,
            first: 0,
            rows: &rows,
            block_size: columns.len(),
            softcap: self.options.softcap,
            ahead: None,
        };
        (Passes::get().gradient)(self.launch.isa, pass);
        Ok(())
    }

    /// [`Self::row_gradient`] over `columns`, of which these are the logits.
    fn slab_row(
        &self,
        token: usize,
        columns: &Range<usize>,
        logits: &[f32],
        lse: f64,
        cotangents: [f64; 3],
    ) -> RowGradient {
        if cotangents == [0.0; 3] {
            return RowGradient::Fill(0.0);
        }
        let Some(column) = self.column(token) else {
            return RowGradient::Fill(self.without_label(token));
        };
        let label = if columns.contains(&column) {
            let column = column - columns.start;
            self.label_of(column, logits[column])
        } else {
            // Whatever its logit, no column here is the label's.
            Label { column: NO_COLUMN, logit: f64::NEG_INFINITY }
        };
        self.formula(lse, cotangents, label)
    }
}

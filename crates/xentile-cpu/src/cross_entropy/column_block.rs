//! Passes over some columns of some tokens, for an operation that makes its logits a block of columns
//! at a time.

use std::ops::Range;

use xentile::{LogitsShape, Result};

use super::gradient::{Gradient, RowGradient};
use super::matrix::Matrix;
use super::passes::Passes;
use super::statistics::{Label, RowStatistics, Statistics};
use super::{Kernel, Near, SavedLse, shift_near, to_f32};
use crate::InOut;
use crate::math::EXP_SCALE;

/// No column of a block.
const NO_COLUMN: usize = usize::MAX;

/// The label of a row that has none in a column block, whatever its logit.
const ELSEWHERE: Label = Label { column: NO_COLUMN, logit: f64::NEG_INFINITY };

/// The gradient of some columns of a row, of their unnormalised softmax.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scaled {
    /// The same value everywhere.
    Fill(f32),
    /// `at_label` in column `label`, if it is one of them, elsewhere the unnormalised softmax times
    /// `factor`, and `constant`.
    Times { factor: f32, constant: f32, label: Option<usize>, at_label: f32 },
}

/// What [`Scaled::by_unit`] leaves of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByUnit {
    pub(crate) unit: f32,
    /// The label's column, and the gradient of its logit in that unit.
    pub(crate) left_out: Option<(usize, f32)>,
}

impl Scaled {
    /// The same by a `unit` in [1, 2) such that the factor becomes a power of two, which rounds nothing
    /// that has been rounded, and with 0 for the label's.
    pub(crate) fn by_unit(self) -> (Self, ByUnit) {
        match self {
            Self::Times { factor, constant, label, at_label } => {
                let bits_of_mantissa = (1 << (f32::MANTISSA_DIGITS - 1)) - 1;
                let unit = match factor.is_normal() {
                    true => f32::from_bits(factor.to_bits() & bits_of_mantissa | 1_f32.to_bits()),
                    false => 1.0,
                };
                let left_out = label.map(|label| (label, at_label / unit));
                let (factor, constant, at_label) = (factor / unit, constant / unit, 0.0);
                (Self::Times { factor, constant, label, at_label }, ByUnit { unit, left_out })
            }
            Self::Fill(_) => (self, ByUnit { unit: 1.0, left_out: None }),
        }
    }
}

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
            blocks: 0..1,
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
                self.block_row(token, columns, logits, lse, cotangents(token))
            })
            .collect();
        self.write_rows(logits, &rows, columns.len())
    }

    /// Puts `exp(z - shift)` in the place of some logits z of a row, times the derivative of softcap
    /// where there is one. (Then z is capped, and so is what `shift` is near.)
    pub(crate) fn row_softmax(&self, logits: &mut [f32], shift: f64) {
        let (shift, factor) = shift_near(shift);
        let row = RowGradient::Formula {
            shift,
            probability: to_f32(factor) / EXP_SCALE,
            constant: 0.0,
            label: NO_COLUMN,
            at_label: 0.0,
        };
        let columns = logits.len();
        self.write_rows(logits, &[row], columns).expect("a whole row");
    }

    fn write_rows(&self, logits: &mut [f32], rows: &[RowGradient], columns: usize) -> Result<()> {
        let shape = LogitsShape::new(rows.len(), columns)?;
        let pass = Gradient {
            matrix: &Matrix::new(InOut::InPlace(logits), shape)?,
            first: 0,
            rows,
            block_size: columns,
            blocks: 0..1,
            softcap: self.options.softcap,
            ahead: None,
        };
        (Passes::get().gradient)(self.launch.isa, pass);
        Ok(())
    }

    /// The gradient of `columns` of `token`, of [`Self::row_softmax`] with `shift`. `label_logit` is
    /// the label's logit, if the label is one of them.
    pub(crate) fn scaled(
        &self,
        token: usize,
        columns: &Range<usize>,
        shift: f64,
        label_logit: f32,
        lse: f64,
        cotangents: [f64; 3],
    ) -> Scaled {
        if cotangents == [0.0; 3] {
            return Scaled::Fill(0.0);
        }
        let Some(column) = self.column(token) else {
            return Scaled::Fill(self.without_label(token));
        };
        let label = columns.contains(&column).then(|| self.label_of(column, label_logit));
        let of_label = label.unwrap_or(ELSEWHERE);
        let p_less_one = (of_label.logit - lse).exp_m1();
        match self.coefficients(lse, cotangents, of_label, p_less_one) {
            None => Scaled::Fill(f32::NAN),
            Some(of) => Scaled::Times {
                factor: to_f32(of.probability * (shift - lse).exp()),
                constant: to_f32(of.constant),
                label: label.map(|label| label.column - columns.start),
                at_label: to_f32(of.at_label),
            },
        }
    }

    /// Whether `token` counts, and has a labelled column.
    pub(crate) fn has_label(&self, token: usize) -> bool {
        self.column(token).is_some()
    }

    /// The label of `token`, where it is one of `columns`, counted from the first of these.
    pub(crate) fn label_within(&self, token: usize, columns: &Range<usize>) -> Option<usize> {
        let column = self.column(token).filter(|column| columns.contains(column))?;
        Some(column - columns.start)
    }

    /// A logit after softcap, if there is one.
    pub(crate) fn cap(&self, logit: f32) -> f64 {
        self.options.cap(logit.into())
    }

    /// Whether gradients have a constant in each column.
    pub(crate) fn smooths(&self) -> bool {
        self.options.label_smoothing != 0.0
    }

    /// Whether gradients are a factor of the row times [`Self::row_softmax`], with a constant at
    /// most: not where the constant has a softcap's derivative.
    pub(crate) fn scales(&self) -> bool {
        !(self.smooths() && self.options.softcap.is_some())
    }

    /// [`Self::row_gradient`] over `columns`, of which these are the logits.
    fn block_row(
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
            ELSEWHERE
        };
        self.formula(lse, cotangents, label, Near::new(lse, label))
    }
}

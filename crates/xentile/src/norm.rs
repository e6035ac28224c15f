//! What [RMSNorm](crate::rms_norm) and [LayerNorm](crate::layer_norm) share: shapes of rows, how they
//! are cut into blocks, and the root that both divide by.

#[cfg(feature = "operation")]
pub mod operation;

use crate::error::check_length;
use crate::shape::is_addressable;
use crate::{Error, Result};

/// Checks what is added to a mean of squares.
pub(crate) fn check_eps(eps: f64) -> Result<()> {
    if eps >= 0.0 && eps.is_finite() {
        return Ok(());
    }
    Err(Error::Option { name: "eps", value: eps, requirement: "finite and at least 0" })
}

/// `1 / sqrt(mean_of_squares + eps)`: infinite where f32 holds no such number.
#[must_use]
pub fn rstd(mean_of_squares: f64, eps: f64) -> f64 {
    let rstd = 1.0 / (mean_of_squares + eps).sqrt();
    if rstd > f64::from(f32::MAX) { f64::INFINITY } else { rstd }
}

/// The shape `[T, D]` of what is normalised: rows (all leading axes, flattened) by columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormShape {
    rows: usize,
    columns: usize,
}

impl NormShape {
    /// A shape of `rows` of `columns`. No row at all is a valid (empty) problem.
    ///
    /// # Errors
    /// No column, or more elements than memory can address.
    pub fn new(rows: usize, columns: usize) -> Result<Self> {
        let wrong = |requirement| Err(Error::Shape { tokens: rows, vocab: columns, requirement });
        if columns == 0 {
            return wrong("a row must have at least 1 column");
        }
        // Four bytes is the widest element.
        if !is_addressable([rows, columns, 4]) {
            return wrong("rows x columns must fit the address space");
        }
        Ok(Self { rows, columns })
    }

    /// T, the number of rows.
    #[must_use]
    pub fn rows(self) -> usize {
        self.rows
    }

    /// D, the number of columns.
    #[must_use]
    pub fn columns(self) -> usize {
        self.columns
    }

    /// T x D.
    #[must_use]
    pub fn elements(self) -> usize {
        self.rows * self.columns
    }

    /// Checks the length of a `[T, D]` buffer called `name`.
    ///
    /// # Errors
    /// The length is not T x D.
    pub fn check_matrix(self, name: &'static str, length: usize) -> Result<()> {
        check_length(name, length, "[T, D]", self.elements())
    }

    /// Checks the length of a `[T]` buffer called `name`.
    ///
    /// # Errors
    /// The length is not T.
    pub fn check_rows(self, name: &'static str, length: usize) -> Result<()> {
        check_length(name, length, "[T]", self.rows)
    }

    /// The number of weights `[D]` that a buffer called `name` of `length` elements holds, each for as
    /// many rows.
    ///
    /// # Errors
    /// It holds no whole number of weights, or one that does not divide T.
    pub fn weights(self, name: &'static str, length: usize) -> Result<usize> {
        let count = length / self.columns;
        let divides = if count == 0 { self.rows == 0 } else { self.rows.is_multiple_of(count) };
        let expected = if divides { count * self.columns } else { self.columns };
        check_length(name, length, "[D] (or [G, D], where G divides T,)", expected)?;
        Ok(count)
    }
}

/// The rows of each of `blocks` blocks that `rows` are cut into for partial sums: all but
/// the last ones have so many, and these fewer or none.
///
/// # Panics
/// There are rows and no block.
#[must_use]
pub fn block_rows(rows: usize, blocks: usize) -> usize {
    if rows == 0 { 0 } else { rows.div_ceil(blocks) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_no_kernel_takes_are_refused() {
        let message = NormShape::new(3, 0).unwrap_err().to_string();
        assert_eq!(message, "shape [3, 0]: a row must have at least 1 column");
        assert!(NormShape::new(usize::MAX / 8, 3).is_err());
        let shape = NormShape::new(4, 3).unwrap();
        assert_eq!(
            (shape.weights("weight", 3), shape.weights("weight", 6), shape.weights("weight", 12)),
            (Ok(1), Ok(2), Ok(4))
        );
        for wrong in [0, 2, 4, 9, 15] {
            let message = shape.weights("weight", wrong).unwrap_err().to_string();
            let says =
                format!("weight holds {wrong} elements; [D] (or [G, D], where G divides T,)");
            assert!(message.starts_with(&says), "{message}");
        }
        let empty = NormShape::new(0, 3).unwrap();
        assert_eq!(
            (empty.weights("weight", 0), empty.weights("weight", 3), empty.weights("weight", 6)),
            (Ok(0), Ok(1), Ok(2))
        );
    }

    #[test]
    fn blocks_cover_every_row() {
        for (rows, blocks, each) in [(0, 0, 0), (0, 3, 0), (1, 4, 1), (7, 3, 3), (8, 2, 4)] {
            assert_eq!(block_rows(rows, blocks), each);
            assert!(each * blocks >= rows);
        }
    }
}

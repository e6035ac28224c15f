//! RMSNorm and LayerNorm: every row divided by a root, times a weight. The contract of every backend;
//! [`Kind`] says which of the two.
//!
//! RMSNorm is that of Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, and LayerNorm that
//! of Ba, Kiros and Hinton, "Layer Normalization", 2016, which subtracts the mean first and adds a bias.
//!
//! For a row `x` `[D]` of dtype E (f32, bf16 or f16), a weight `w` `[D]` of its own dtype and, for LayerNorm,
//! a bias `b` `[D]` of the weight's dtype:
//!
//! | | RMSNorm | LayerNorm |
//! | --- | --- | --- |
//! | mean | `m = 0` | `m = mean(x)`, returned in f32 |
//! | `rstd`, returned in f32 | `r = 1 / sqrt(mean(x^2) + eps)` | `r = 1 / sqrt(mean((x - m)^2) + eps)` |
//! | factor `f` | `w`, or `1 + w` if the weight is [`zero_centred`](Norm::zero_centred) | `w` |
//! | `y`, in E | `x r f` | `(x - m) r f + b`, with `b` 0 if there is none |
//!
//! LayerNorm's variance is the mean of `(x - m)^2`, never a difference of two means, so that a row whose
//! mean is many times its deviation keeps all its digits.
//!
//! RMSNorm may have a residual. The normalised row is then `h = x + residual`: added in f32, rounded to E
//! at once, a tie to even, and returned as a second output. Statistics and `y` are those of the rounded
//! `h`, so that the backward pass, which reads `h`, sees the same values as the forward pass.
//!
//! The backward pass, from statistics in f32, with `g = dy f` and `xhat = (x - m) r`:
//!
//! - `dx = r (g - xhat mean(g xhat))` for RMSNorm, plus the cotangent of `h` if there is one, before the
//!   one rounding to E; it is the gradient of both terms of the sum;
//! - `dx = r (g - mean(g) - xhat mean(g xhat))` for LayerNorm, rounded once to E;
//! - `dweight = sum over rows of dy xhat`, and `dbias = sum over rows of dy` for LayerNorm, in f32, as
//!   *partial sums* over blocks of rows, whose number is the caller's choice. Which rows a block has, and
//!   the order of its sum, depend on the shape, and on GPUs on the device, so that neither the number of
//!   threads nor timing changes a bit: on CPUs consecutive rows, in order ([`block_rows`]); on NVIDIA GPUs
//!   blocks take turns at rows, since they run side by side there, and distant rows would conflict in the
//!   same memory banks.
//!
//! # Error bounds
//!
//! In units of `u = 2^-24`, half the spacing of f32 after 1; [`reference`](mod@reference) computes them.
//!
//! RMSNorm: a square is in at most 34 additions in f32 before its sum goes to f64, whatever D, so that the
//! sum, whose terms have one sign, is within `36 u` of itself and `rstd` within 20. Offsets cost nothing:
//! nothing is subtracted. `1 + w` and the two products of `y` round once each: `y` is within 24 of itself
//! before it is rounded to E. In the backward pass, which reads `rstd` in f32, `mean(g xhat)` is within
//! `64 u` of `mean |g xhat|`, and `dx` before its rounding within 112 of `r (|g| + |xhat| mean |g xhat|)`,
//! plus `u |dx|` for the added cotangent. A partial sum of `n` rows is within `n + 24` of `sum |dy xhat|`.
//!
//! LayerNorm: a first sum over a row, in f32 and so within `37 u mean |x|`, gives the mean that the second
//! pass subtracts; the remainder, whose mean `d` is small, is summed and squared there, and `d` corrects
//! both: the mean, and `mean((x - m)^2)`, which is the mean of squares less `d^2`. With `s = |m| r`, the
//! mean in deviations, and `a = mean |x - m|`:
//!
//! - the mean is within `u |m|`, its rounding, and 40 of `a`;
//! - `rstd` is within `24 (1 + 40 u s)^2` of itself: the last factor, which is 1 unless the mean is ten
//!   thousand deviations or more, is for squares that `d` is a part of;
//! - `xhat` is within `e = 32 (1 + 40 u s)^2 |xhat| + 2 s + 40 a r`, since the mean is rounded to f32: the
//!   same as if each `x` were off by half a unit in its last place;
//! - `y`, before it is rounded to E, is within `|w| e + |b| + |y|`;
//! - `dx`, before its rounding, is within 160 of `r (|g| + mean |g| + |xhat| mean |g xhat|)`, and the
//!   effect of errors of `xhat` ([`reference::Row::dx_bound`]);
//! - a partial sum of `n` rows is within `n + 8` of `sum |dy xhat|`, and `sum |dy| e` for dweight; within
//!   `n + 8` of `sum |dy|` for dbias.
//!
//! This holds where `x - m` and the products stay in f32's normal range: below it `2^-126` a product may
//! be lost. Sums over a row are exempt, and right wherever `x - m` is finite. RMSNorm's root is not right
//! above `2^126`, since `rstd` is then subnormal in f32.
//!
//! # Special rows
//!
//! Rows are independent, except in dweight and dbias, which sum over them.
//!
//! - **NaN** anywhere in a row: `rstd`, and all of `y`, `dx` and dweight are NaN; LayerNorm's mean is not
//!   finite, and dbias, a sum of dy alone, is not affected;
//! - **infinity**: LayerNorm's results are those of NaN. RMSNorm's `rstd` is 0, `y` is NaN there and 0
//!   elsewhere; `dx` is NaN, and so is dweight there;
//! - **zeros**, for RMSNorm: `y` is 0, `rstd` is `1 / sqrt(eps)`. With `eps` 0 that is infinite, and `y`,
//!   `dx` and dweight are NaN: a row without a direction has no norm. The same holds, except for
//!   infinities in place of some NaN, where `rstd` exceeds f32: `mean(x^2) + eps` below `2^-256`;
//! - **a constant row**, for LayerNorm: `y` is the bias, `rstd` is `1 / sqrt(eps)`. With `eps` 0 that is
//!   infinite, and `y`, `dx` and dweight are NaN.

#[cfg(feature = "operation")]
pub mod operation;
pub mod reference;

use crate::error::check_length;
use crate::shape::is_addressable;
use crate::{Error, Result};

/// Which norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// RMSNorm.
    Rms,
    /// LayerNorm, which subtracts the mean and adds a bias.
    Layer,
}

/// The options of a norm, the same for every backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Which norm.
    pub kind: Kind,
    /// Added to the mean of squares, or to the variance; at least 0.
    pub eps: f64,
    /// Whether columns are scaled by `1 + weight`, as in Gemma; RMSNorm alone has it.
    pub zero_centred: bool,
}

impl Norm {
    /// RMSNorm with its default options.
    pub const RMS: Self = Self { kind: Kind::Rms, eps: 1e-6, zero_centred: false };
    /// LayerNorm with its default options.
    pub const LAYER: Self = Self { kind: Kind::Layer, eps: 1e-5, zero_centred: false };

    /// Checks the range of every option.
    ///
    /// # Errors
    /// `eps` is negative, infinite or NaN, or LayerNorm is zero-centred.
    pub fn validate(&self) -> Result<()> {
        if !(self.eps >= 0.0 && self.eps.is_finite()) {
            let requirement = "finite and at least 0";
            return Err(Error::Option { name: "eps", value: self.eps, requirement });
        }
        if self.zero_centred && self.kind == Kind::Layer {
            return Err(Error::Invalid(
                "zero_centred is true; LayerNorm has no such option".into(),
            ));
        }
        Ok(())
    }

    /// `1 / sqrt(mean_of_squares + eps)`: infinite if f32 holds no such number.
    #[must_use]
    pub fn rstd(&self, mean_of_squares: f64) -> f64 {
        let rstd = 1.0 / (mean_of_squares + self.eps).sqrt();
        if rstd > f64::from(f32::MAX) { f64::INFINITY } else { rstd }
    }

    /// The factor of a column with this weight.
    #[must_use]
    pub fn factor(&self, weight: f64) -> f64 {
        if self.zero_centred { 1.0 + weight } else { weight }
    }
}

/// The shape `[T, D]` of the normalised array: rows (all leading axes, flattened) by columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormShape {
    rows: usize,
    columns: usize,
}

impl NormShape {
    /// A shape of `rows` by `columns`. Zero rows are a valid (empty) problem.
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

    /// The number of weights `[D]` in a buffer called `name` of `length` elements, each for an equal
    /// number of rows.
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

/// The rows of each of `blocks` blocks of `rows` for partial sums; the last blocks have fewer or none.
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
    fn an_eps_outside_its_range_is_named() {
        for norm in [Norm::LAYER, Norm { zero_centred: true, ..Norm::RMS }] {
            let refuse = |eps| Norm { eps, ..norm }.validate().unwrap_err().to_string();
            for eps in [0.0, 1e-300, 1e-6, 3.0] {
                assert_eq!(Norm { eps, ..norm }.validate(), Ok(()));
            }
            assert_eq!(refuse(-1e-6), "eps is -0.000001; it must be finite and at least 0");
            assert!(refuse(f64::NAN).starts_with("eps is NaN;"));
            assert!(refuse(f64::INFINITY).starts_with("eps is inf;"));
        }
        assert!(Norm { zero_centred: true, ..Norm::LAYER }.validate().is_err());
    }

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

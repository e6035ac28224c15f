//! LayerNorm: every row less its mean, over its standard deviation, times a weight and plus a bias (Ba,
//! Kiros and Hinton, "Layer Normalization", 2016). The contract of every backend.
//!
//! Of a row `x` `[D]`, of one dtype E (f32, bf16 or f16), a weight `w` `[D]` and a bias `b` `[D]`, which
//! have a dtype of their own, the same for both:
//!
//! - `m = mean(x)`, given in f32;
//! - `r = 1 / sqrt(mean((x - m)^2) + eps)`, the row's `rstd`, given in f32;
//! - `y = (x - m) r w + b`, in E, with `b` 0 where there is none.
//!
//! The variance is that of what is left once the mean is taken off, never a difference of two means, so
//! that a row whose mean is many times its deviation keeps all the digits that it has.
//!
//! The backward pass, from `m` and `r` in f32, with `g = dy w` and `xhat = (x - m) r`:
//!
//! - `dx = r (g - mean(g) - xhat mean(g xhat))`, rounded once to E;
//! - `dweight = sum over rows of dy xhat` and `dbias = sum over rows of dy`, in f32, as *partial sums*
//!   over blocks of rows, cut and added up as those of [RMSNorm](crate::rms_norm) are.
//!
//! # Error bounds
//!
//! In units of `u = 2^-24`, half the spacing of f32 after 1. A first sum over a row, in f32 and so within
//! `37 u mean |x|`, gives what is taken off in the second; what that leaves, whose mean `d` is small, is
//! summed and squared there, and `d` corrects both: the mean, and `mean((x - m)^2)`, which is the mean of
//! squares less `d^2`. With `s = |m| r`, the mean in deviations, and `a = mean |x - m|`:
//!
//! - the mean is within `u |m|`, its rounding, and [`MEAN_ROUNDINGS`] of `a`;
//! - `rstd` is within [`RSTD_ROUNDINGS`] `(1 + 40 u s)^2` of itself: the last factor, which is 1 but for a
//!   mean of ten thousand deviations and more, is for squares that `d` is a part of;
//! - `xhat` is within `e = ` [`XHAT_ROUNDINGS`] `(1 + 40 u s)^2 |xhat| + 2 s + 40 a r`, since the mean is
//!   rounded to f32: the same as were each `x` off by half a unit in its last place;
//! - `y`, before it is rounded to E, is within `|w| e + |b| + |y|`;
//! - `dx`, before its rounding, is within [`reference::dx_bound`]: [`DX_ROUNDINGS`] of
//!   `r (|g| + mean |g| + |xhat| mean |g xhat|)`, and what errors of `xhat` come to;
//! - a partial sum of `n` rows is within `n` + [`SUM_ROUNDINGS`] of `sum |dy xhat|`, and `sum |dy| e` for
//!   dweight; within as many of `sum |dy|` for dbias.
//!
//! This holds where `x - m` and the products stay in f32's normal range: what falls below it may be lost,
//! `2^-126` a product. Sums over a row are exempt, and right wherever `x - m` is finite.
//!
//! # Special rows
//!
//! Rows never touch one another, but in dweight and dbias, which sum over them.
//!
//! - **NaN or infinity** anywhere in a row: its mean is not finite, and `rstd`, `y`, `dx` and dweight are
//!   NaN; dbias, which is of dy alone, is not touched;
//! - **a row of one number**: `y` is the bias, `rstd` is `1 / sqrt(eps)`. With `eps` 0 that is infinite,
//!   and `y`, `dx` and dweight are NaN.

#[cfg(feature = "operation")]
pub mod operation;
pub mod reference;

use crate::Result;
pub use crate::norm::{NormShape, block_rows};

/// How far the mean may be off beside its rounding, in units of 2^-24 of `mean |x - m|`.
pub const MEAN_ROUNDINGS: f64 = 40.0;
/// The same of `rstd`, of itself.
pub const RSTD_ROUNDINGS: f64 = 24.0;
/// The same of `(x - m) r`, of itself, beside what the mean is off by.
pub const XHAT_ROUNDINGS: f64 = 32.0;
/// The same of `dx`, of `r (|g| + mean |g| + |xhat| mean |g xhat|)`.
pub const DX_ROUNDINGS: f64 = 160.0;
/// The same of a partial sum, beside its number of rows, of the sum of magnitudes.
pub const SUM_ROUNDINGS: f64 = 8.0;

/// The options of LayerNorm, the same for every backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNorm {
    /// What is added to the variance, at least 0.
    pub eps: f64,
}

impl Default for LayerNorm {
    fn default() -> Self {
        Self { eps: 1e-5 }
    }
}

impl LayerNorm {
    /// Checks the range of every option.
    ///
    /// # Errors
    /// `eps` is negative, infinite or NaN.
    pub fn validate(&self) -> Result<()> {
        crate::norm::check_eps(self.eps)
    }

    /// `rstd` of a row with this variance: infinite where f32 holds no such number.
    #[must_use]
    pub fn rstd(&self, variance: f64) -> f64 {
        crate::norm::rstd(variance, self.eps)
    }
}

//! RMSNorm: every row over its root mean square, times a weight (Zhang and Sennrich, "Root Mean
//! Square Layer Normalization", 2019). The contract of every backend.
//!
//! Of a row `x` `[D]`, of one dtype E (f32, bf16 or f16), and a weight `w` `[D]` of a dtype of its own:
//!
//! - `r = 1 / sqrt(mean(x^2) + eps)`, the row's `rstd`, given in f32;
//! - `y = x r w`, or `x r (1 + w)` where the weight is [`zero_centred`](RmsNorm::zero_centred), in E.
//!
//! With a residual the row that is normalised is `h`, the sum of the two: added in f32, rounded to E
//! at once, a tie to even, and given as a second output. Statistics and `y` are of `h` as it was
//! rounded, so that the backward pass, which reads `h`, sees what the forward pass saw.
//!
//! The backward pass, with `g = dy w` (or `dy (1 + w)`) and `xhat = x r`:
//!
//! - `dx = r (g - xhat mean(g xhat))`, plus the cotangent of `h`, where there is one, before the one
//!   rounding to E. With a residual it is the gradient of both terms of the sum;
//! - `dweight = sum over rows of dy xhat`, in f32, as *partial sums* over blocks of rows, whose number is
//!   the caller's choice. Which rows a block has, and in which order they are added, follows from the
//!   shape, and on GPUs from the device, so that no number of threads and no timing changes a bit: on
//!   CPUs rows that follow one another, in order ([`block_rows`]); on NVIDIA GPUs blocks take turns at
//!   rows, since they run side by side there, and rows far apart would meet in the same banks of memory.
//!
//! # Error bounds
//!
//! In units of `u = 2^-24`, half the spacing of f32 after 1. A square is in at most 34 additions in f32
//! before its sum goes to f64, whatever D, so that the sum, whose terms have one sign, is within
//! `36 u` of itself and `rstd` within [`RSTD_ROUNDINGS`]. Offsets cost nothing: nothing is
//! subtracted. `1 + w` and the two products of `y` round once each: `y` is within [`Y_ROUNDINGS`] of
//! itself before it is rounded to E. In the backward pass, which reads `rstd` in f32, `mean(g xhat)` is
//! within `64 u` of `mean |g xhat|`, and `dx` before its rounding within [`DX_ROUNDINGS`] of
//! [`reference::dx_scale`], `r (|g| + |xhat| mean |g xhat|)`, plus `u |dx|` for the cotangent that is
//! added. A partial sum of `n` rows is within `n` + [`DWEIGHT_ROUNDINGS`] of `sum |dy xhat|`.
//!
//! This holds where products stay in f32's normal range: what falls below it may be lost, `2^-126` a
//! product. The sum of squares is exempt, and right for every finite row; its root is not where it lies
//! above `2^126`, since `rstd` is then subnormal in f32.
//!
//! # Special rows
//!
//! Rows never touch one another, but in dweight, which sums over them.
//!
//! - **NaN** anywhere in a row: `rstd`, and all of `y`, `dx` and dweight are NaN;
//! - **infinity**: `rstd` is 0, `y` is NaN there and 0 elsewhere; `dx` is NaN, and so is dweight there;
//! - **zeros**: `y` is 0, `rstd` is `1 / sqrt(eps)`. With `eps` 0 that is infinite, and `y`, `dx` and
//!   dweight are NaN: a row without a direction has no norm. The same holds, but for infinities in
//!   the place of some NaN, where `rstd` is more than f32 holds: `mean(x^2) + eps` below `2^-256`.

#[cfg(feature = "operation")]
pub mod operation;
pub mod reference;

use crate::Result;
pub use crate::norm::{NormShape, block_rows};

/// How far `rstd` may be off, in units of 2^-24 of itself: half of what the sum is, and a rounding.
pub const RSTD_ROUNDINGS: f64 = 20.0;
/// The same of `y`, before it is rounded to its dtype.
pub const Y_ROUNDINGS: f64 = 24.0;
/// The same of `dx`, of [`reference::dx_scale`].
pub const DX_ROUNDINGS: f64 = 112.0;
/// The same of a partial sum of dweight, beside its number of rows, of `sum |dy xhat|`.
pub const DWEIGHT_ROUNDINGS: f64 = 24.0;

/// The options of RMSNorm, the same for every backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// What is added to the mean of squares, at least 0.
    pub eps: f64,
    /// Whether the weight is what a factor is above 1, as Gemma's is.
    pub zero_centred: bool,
}

impl Default for RmsNorm {
    fn default() -> Self {
        Self { eps: 1e-6, zero_centred: false }
    }
}

impl RmsNorm {
    /// Checks the range of every option.
    ///
    /// # Errors
    /// `eps` is negative, infinite or NaN.
    pub fn validate(&self) -> Result<()> {
        crate::norm::check_eps(self.eps)
    }

    /// `rstd` of a row with this mean of squares: infinite where f32 holds no such number.
    #[must_use]
    pub fn rstd(&self, mean_of_squares: f64) -> f64 {
        crate::norm::rstd(mean_of_squares, self.eps)
    }

    /// The factor that an entry of the weight stands for.
    #[must_use]
    pub fn factor(&self, weight: f64) -> f64 {
        if self.zero_centred { 1.0 + weight } else { weight }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eps_outside_its_range_is_named() {
        let refuse = |eps| RmsNorm { eps, zero_centred: true }.validate().unwrap_err().to_string();
        for eps in [0.0, 1e-300, 1e-6, 3.0] {
            assert_eq!(RmsNorm { eps, zero_centred: false }.validate(), Ok(()));
        }
        assert_eq!(refuse(-1e-6), "eps is -0.000001; it must be finite and at least 0");
        assert!(refuse(f64::NAN).starts_with("eps is NaN;"));
        assert!(refuse(f64::INFINITY).starts_with("eps is inf;"));
    }
}

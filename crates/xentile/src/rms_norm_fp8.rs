//! RMSNorm, quantised to FP8. The contract of every backend.
//!
//! Values and scales are those that [`fp8_quantize`](crate::fp8_quantize) makes of y, where y is what
//! [RMSNorm](crate::norm) makes of x, and of a residual if there is one, rounded to the dtype E of x.
//! The sum with a residual is a result too. Whether a kernel writes y down or not changes no bit: what is
//! quantised is y in E, special entries included.
//!
//! # Error bounds
//!
//! Those of [`swiglu_fp8`](crate::swiglu_fp8), where y is within the bounds of RMSNorm before it is rounded to
//! E.

#[cfg(feature = "operation")]
pub mod operation;

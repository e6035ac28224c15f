//! SwiGLU, quantised to FP8. The contract of every backend.
//!
//! Values and scales are those that [`fp8_quantize`](crate::fp8_quantize) makes of y, where y is what
//! [`activation`](crate::activation) makes of gate and up with SiLU, rounded to the dtype E of x. Whether a
//! kernel writes y down or not changes no bit: what is quantised is y in E, special entries included, so
//! that an infinite y becomes the largest number of the format, and a NaN stays one.
//!
//! # Error bounds
//!
//! y is within the bounds of an activation before it is rounded to E, so that beside a tie of E it may be
//! either of two neighbours. Where that is the largest entry of a block, it moves the block's scale; in
//! its own place, it moves a value by as much as E does. All that follows is exact to the bounds of
//! quantisation.

#[cfg(feature = "operation")]
pub mod operation;

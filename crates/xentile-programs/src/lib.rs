//! StableHLO programs of xentile's operations, as text for any runtime that compiles it: the dense
//! reference, and the kernels as custom calls of `libxentile_xla`.
//!
//! An operation is a module ([`cross_entropy`]); [`stablehlo`] writes the text and knows nothing of
//! operations.

pub mod cross_entropy;
pub mod stablehlo;

pub use stablehlo::{ElementType, Program, TensorType};

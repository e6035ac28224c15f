//! StableHLO programs of xentile's operations, for any runtime that compiles them: the dense
//! reference and the kernels as custom calls of `libxentile_xla`, as text, and programs that JAX
//! exported, as bytecode.
//!
//! An operation is a module ([`cross_entropy`]); [`stablehlo`] writes the text and [`exported`] reads
//! what JAX wrote, and neither knows of operations.

pub mod cross_entropy;
pub mod exported;
pub mod stablehlo;

pub use exported::Exported;
pub use stablehlo::{ElementType, Program, TensorType};

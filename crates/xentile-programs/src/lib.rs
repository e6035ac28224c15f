//! StableHLO programs of xentile's operations, for any runtime that compiles them: the dense
//! reference and the kernels as custom calls of `libxentile_xla`, as text, and programs that JAX
//! exported, as bytecode.
//!
//! An operation is a module ([`cross_entropy`]); [`stablehlo`] writes the text and [`exported`] reads
//! what JAX wrote, and neither knows of operations. With the feature `operation`, tools find programs
//! by an operation's name.

pub mod cross_entropy;
pub mod exported;
mod implementation;
#[cfg(feature = "operation")]
mod operations;
pub mod stablehlo;

pub use exported::Exported;
pub use implementation::Implementation;
#[cfg(feature = "operation")]
pub use operations::{WriteProgram, programs};
pub use stablehlo::{ElementType, Program, TensorType};

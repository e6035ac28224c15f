//! What an operation of xentile *is*, for every backend: problem shapes, the [`Tile`], options and
//! their validation, typed errors, and the float64 references of cross-entropy over
//! [logits](cross_entropy::reference) and over [hidden states](linear_cross_entropy::reference), of
//! [RMSNorm and LayerNorm](norm::reference), of [activations](activation::reference), of
//! [rotary position embedding](rope::reference), of [attention](flash_attention::reference), of
//! [linear attention](linear_attention), and of
//! [FP8 quantisation](fp8_quantize::reference).
//!
//! Nothing here is tiled or clever. Kernels live in the backend crates (`xentile-cpu`, …); they answer
//! to the contract written in each operation's module.

pub mod activation;
pub mod causal_conv1d;
pub mod cross_entropy;
mod dtype;
mod error;
pub mod flash_attention;
pub mod fp8;
pub mod fp8_quantize;
mod labels;
pub mod linear_attention;
pub mod linear_cross_entropy;
pub mod norm;
#[cfg(feature = "operation")]
pub mod operation;
#[cfg(feature = "operation")]
mod operations;
pub mod optimizers;
pub mod rms_norm_fp8;
pub mod rope;
mod shape;
pub mod swiglu_fp8;
mod tile;
mod tuned;

#[doc(hidden)]
pub use half;

pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use labels::Labels;
#[cfg(feature = "operation")]
pub use operations::{operation, operations};
pub use shape::LogitsShape;
pub use tile::Tile;
pub use tuned::{
    Implementation, TunedImplementation, TunedTile, tuned_implementation, tuned_implementations,
    tuned_tile, tuned_tiles,
};

//! The table of what there is to register with XLA.

use std::sync::LazyLock;

use crate::declaration::Declaration;
use crate::target::Target;
use crate::{
    activation, causal_conv1d, cross_entropy, flash_attention, fp8_quantize, linear_cross_entropy,
    norm, rope, scale,
};

/// Rises when the layout of [`Target`], or what some target takes or gives, changes.
pub const TABLE_VERSION: u32 = 3;

/// The lists, one for each operation and platform.
const LISTS: &[&[Target]] = &[
    activation::cpu::TARGETS,
    causal_conv1d::cpu::TARGETS,
    cross_entropy::cpu::TARGETS,
    scale::cpu::TARGETS,
    linear_cross_entropy::cpu::TARGETS,
    norm::cpu::TARGETS,
    rope::cpu::TARGETS,
    flash_attention::cpu::TARGETS,
    fp8_quantize::cpu::TARGETS,
    #[cfg(feature = "cuda")]
    activation::cuda::TARGETS,
    #[cfg(feature = "cuda")]
    cross_entropy::cuda::TARGETS,
    #[cfg(feature = "cuda")]
    scale::cuda::TARGETS,
    #[cfg(feature = "cuda")]
    linear_cross_entropy::cuda::TARGETS,
    #[cfg(feature = "cuda")]
    norm::cuda::TARGETS,
    #[cfg(feature = "cuda")]
    rope::cuda::TARGETS,
    #[cfg(feature = "cuda")]
    rope::qk_norm::TARGETS,
    #[cfg(feature = "cuda")]
    flash_attention::cuda::TARGETS,
    #[cfg(feature = "cuda")]
    fp8_quantize::cuda::TARGETS,
];

/// Every target.
#[must_use]
pub fn targets() -> &'static [Target] {
    static TABLE: LazyLock<Vec<Target>> = LazyLock::new(|| LISTS.concat());
    &TABLE
}

/// The declarations of every operation's targets, whatever this library was built with.
const DECLARATIONS: &[&[Declaration]] = &[
    activation::DECLARATIONS,
    causal_conv1d::DECLARATIONS,
    cross_entropy::DECLARATIONS,
    flash_attention::DECLARATIONS,
    fp8_quantize::DECLARATIONS,
    norm::LAYER_DECLARATIONS,
    linear_cross_entropy::DECLARATIONS,
    norm::RMS_DECLARATIONS,
    rope::DECLARATIONS,
    scale::DECLARATIONS,
];

/// Every declaration, those of targets that this library has no handler for too.
pub fn declarations() -> impl Iterator<Item = &'static Declaration> {
    DECLARATIONS.iter().copied().flatten()
}

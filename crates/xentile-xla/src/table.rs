//! The table of what there is to register with XLA.

use std::sync::LazyLock;

use crate::target::Target;
use crate::{cross_entropy, linear_cross_entropy, rms_norm, scale};

/// Rises when the layout of [`Target`], or what some target takes or gives, changes.
pub const TABLE_VERSION: u32 = 2;

/// The lists, one for each operation and platform.
const LISTS: &[&[Target]] = &[
    cross_entropy::cpu::TARGETS,
    scale::cpu::TARGETS,
    linear_cross_entropy::cpu::TARGETS,
    rms_norm::cpu::TARGETS,
    #[cfg(feature = "cuda")]
    cross_entropy::cuda::TARGETS,
    #[cfg(feature = "cuda")]
    scale::cuda::TARGETS,
    #[cfg(feature = "cuda")]
    linear_cross_entropy::cuda::TARGETS,
];

/// Every target.
#[must_use]
pub fn targets() -> &'static [Target] {
    static TABLE: LazyLock<Vec<Target>> = LazyLock::new(|| LISTS.concat());
    &TABLE
}

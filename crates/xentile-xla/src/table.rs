//! The table of what there is to register with XLA.

use std::sync::LazyLock;

use crate::declaration::Declaration;
use crate::target::Target;

/// Rises when the layout of [`Target`], or what some target takes or gives, changes.
pub const TABLE_VERSION: u32 = 3;

/// The lists of each operation with a file `cpu.rs`, and of each with a file `cuda.rs`; build.rs makes them.
const HOST: &[&[Target]] = include!(concat!(env!("OUT_DIR"), "/host_targets.rs"));
#[cfg(feature = "cuda")]
const CUDA: &[&[Target]] = include!(concat!(env!("OUT_DIR"), "/cuda_targets.rs"));
/// Those of a function beside an operation.
#[cfg(feature = "cuda")]
const BESIDE: &[&[Target]] = &[crate::rope::qk_norm::TARGETS];
#[cfg(not(feature = "cuda"))]
const CUDA: &[&[Target]] = &[];
#[cfg(not(feature = "cuda"))]
const BESIDE: &[&[Target]] = &[];

/// Every target.
#[must_use]
pub fn targets() -> &'static [Target] {
    static TABLE: LazyLock<Vec<Target>> = LazyLock::new(|| [HOST, CUDA, BESIDE].concat().concat());
    &TABLE
}

/// The declarations of every operation's targets, whatever this library was built with.
const DECLARATIONS: &[&[Declaration]] = include!(concat!(env!("OUT_DIR"), "/declarations.rs"));

/// Every declaration, those of targets that this library has no handler for too.
pub fn declarations() -> impl Iterator<Item = &'static Declaration> {
    DECLARATIONS.iter().copied().flatten()
}

//! Kernels by an operation's name.

use crate::operation::Kernels;

/// The kernels of each module with a file `operation.rs`; build.rs makes the list.
const LISTS: &[&[&dyn Kernels]] = include!(concat!(env!("OUT_DIR"), "/operations.rs"));

/// The kernels of the operation called `name`.
#[must_use]
pub fn kernels(name: &str) -> Option<&'static dyn Kernels> {
    LISTS.iter().copied().flatten().copied().find(|kernels| kernels.name() == name)
}

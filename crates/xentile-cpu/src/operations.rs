//! Kernels by an operation's name, a line each.

use crate::cross_entropy;
use crate::operation::Kernels;

/// The kernels of each operation that has any here.
const KERNELS: &[&dyn Kernels] = &[&cross_entropy::operation::KERNELS];

/// The kernels of the operation called `name`.
#[must_use]
pub fn kernels(name: &str) -> Option<&'static dyn Kernels> {
    KERNELS.iter().copied().find(|kernels| kernels.name() == name)
}

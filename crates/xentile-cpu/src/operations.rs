//! Kernels by an operation's name, a line each.

use crate::operation::Kernels;
use crate::{activation, cross_entropy, flash_attention, fp8_quantize, norm, rope};

/// The kernels of each operation that has any here.
const KERNELS: &[&dyn Kernels] = &[
    &cross_entropy::operation::KERNELS,
    &norm::operation::RMS_KERNELS,
    &norm::operation::LAYER_KERNELS,
    &activation::operation::KERNELS,
    &rope::operation::KERNELS,
    &flash_attention::operation::KERNELS,
    &fp8_quantize::operation::KERNELS,
    &fp8_quantize::operation::SWIGLU,
    &fp8_quantize::operation::RMS_NORM,
];

/// The kernels of the operation called `name`.
#[must_use]
pub fn kernels(name: &str) -> Option<&'static dyn Kernels> {
    KERNELS.iter().copied().find(|kernels| kernels.name() == name)
}

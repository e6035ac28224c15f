//! What kernels of norms share as tools run them.

use half::{bf16, f16};
use xentile::Element;
use xentile::operation::{Array, Arrays};

use super::Weight;

/// Blocks of rows whose sums are added up here, whatever the number of threads.
pub(crate) const BLOCKS: usize = 64;

impl<'a> Weight<'a> {
    /// The array called `name`, if there is one.
    pub(crate) fn of(inputs: &'a Arrays<'_>, name: &str) -> Option<Self> {
        Some(match inputs.get(name)? {
            Array::Bf16(_) => Self::Bf16(inputs.expect::<bf16>(name)),
            Array::F16(_) => Self::F16(inputs.expect::<f16>(name)),
            _ => Self::F32(inputs.expect(name)),
        })
    }
}

/// Adds blocks of `partial` `[P, D]` up in their order, and rounds once.
pub(crate) fn add_up(partial: &[f32], columns: usize, to: Option<&mut Array<'_>>) {
    fn rounded<W: Element>(partial: &[f32], columns: usize, to: &mut [W]) {
        for (column, to) in to.iter_mut().enumerate() {
            *to = W::from_f32(partial[column..].iter().step_by(columns).sum());
        }
    }
    match to {
        Some(Array::F32(to)) => rounded(partial, columns, to.to_mut()),
        Some(Array::Bf16(to)) => rounded(partial, columns, to.to_mut()),
        Some(Array::F16(to)) => rounded(partial, columns, to.to_mut()),
        _ => (),
    }
}

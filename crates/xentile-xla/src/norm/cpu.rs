//! The same on the CPU: where arrays lie.

use xentile::Element;
use xentile_cpu::rms_norm::{Gradient, Weight};
use xla_ffi::{ANY_RANK, Aliased, AnyBuffer, Buffer, BufferMut, DType, MayAlias, Result};

use crate::cpu::ask_for_huge_pages;
use crate::dtype;

/// Where dx lies.
pub(crate) fn places<'a, E: Element + xla_ffi::Element>(
    x: MayAlias<Buffer<'a, E>>,
    dy: MayAlias<Buffer<'a, E>>,
    dx: BufferMut<'a, E>,
) -> Result<Gradient<'a, E>> {
    if x.is_shared() {
        let dy = dy.apart()?.as_slice();
        return Ok(match x.with(dx)? {
            Aliased::InPlace(x) => Gradient::InPlaceOfX { x, dy },
            Aliased::Apart { argument: x, result: dx } => Gradient::Apart { x, dy, dx },
        });
    }
    let x = x.apart()?.as_slice();
    Ok(match dy.with(dx)? {
        Aliased::InPlace(dy) => Gradient::InPlaceOfDy { x, dy },
        Aliased::Apart { argument: dy, result: dx } => {
            ask_for_huge_pages(dx);
            Gradient::Apart { x, dy, dx }
        }
    })
}

/// The weight or bias `name`, of any dtype.
pub(crate) fn columns<'a>(name: &str, array: AnyBuffer<'a>) -> Result<Weight<'a>> {
    Ok(match array.dtype() {
        DType::F32 => Weight::F32(array.typed::<_, ANY_RANK>()?.as_slice()),
        DType::Bf16 => Weight::Bf16(array.typed::<_, ANY_RANK>()?.as_slice()),
        DType::F16 => Weight::F16(array.typed::<_, ANY_RANK>()?.as_slice()),
        other => return Err(dtype::wrong(name, other, dtype::ELEMENTS)),
    })
}

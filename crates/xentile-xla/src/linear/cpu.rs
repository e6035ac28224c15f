//! Products of tokens and a layer's matrix on the CPU.

use xentile_cpu::linear::{Extents, linear};
use xentile_cpu::{Isa, Launch};
use xla_ffi::{ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, Result, ThreadPool};

use super::check;
use crate::arguments::invalid;
use crate::cpu::Pool;
use crate::dtype::with_element;
use crate::target::target_list;

target_list! {
    HOST;

    super::LINEAR: fn xentile_linear_host = multiply(x, weight, layer, y, pool);
}

fn multiply(
    x: AnyBuffer,
    weight: AnyBuffer,
    layer: Buffer<i32, 0>,
    y: AnyBufferMut,
    pool: ThreadPool,
) -> Result {
    let (layer, [tokens, rows, terms]) =
        check(x.dims(), weight.dims(), layer.as_slice()[0], y.dims())?;
    let pool = Pool(pool);
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let extents = Extents { tokens, rows, terms };
    with_element!(x.dtype(), "x", E => {
        let (x, weight) = (x.typed::<E, ANY_RANK>()?, weight.typed::<E, ANY_RANK>()?);
        let each = rows * terms;
        let weight = &weight.as_slice()[layer * each..][..each];
        with_element!(y.dtype(), "y", Y => {
            let y = y.typed::<Y, ANY_RANK>()?.into_slice();
            linear(launch, extents, x.as_slice(), weight, y).map_err(invalid)
        })
    })
}

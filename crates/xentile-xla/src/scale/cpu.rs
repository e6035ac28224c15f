//! `x * factor` on the CPU.

use xentile_cpu::{Isa, scale::scale};
use xla_ffi::{ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, Error, MayAlias, Result, ThreadPool};

use super::check;
use crate::cpu::{Pool, in_out};
use crate::dtype::with_element;
use crate::target::target_list;

target_list! {
    HOST;

    super::SCALE: fn xentile_scale_host = times(x, factor, scaled, pool);
}

fn times(
    x: MayAlias<AnyBuffer>,
    factor: Buffer<f32>,
    scaled: AnyBufferMut,
    pool: ThreadPool,
) -> Result {
    check(x.dims(), factor.dims(), scaled.dims())?;
    with_element!(x.dtype(), "x", E => {
        let x = in_out(x.typed::<E, ANY_RANK>()?.with(scaled.typed::<E, ANY_RANK>()?)?);
        scale(Isa::detect(), &Pool(pool), x, &factor)
            .map_err(|error| Error::invalid_argument(error.to_string()))
    })
}

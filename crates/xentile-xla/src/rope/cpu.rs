//! Rotary position embedding on the CPU.

use xentile_cpu::Isa;
use xentile_cpu::rope::{Kernel, Launch};
use xla_ffi::{ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, MayAlias, Result, ThreadPool};

use super::{Options, shape};
use crate::arguments::invalid;
use crate::cpu::{Pool, in_out};
use crate::dtype::with_element;
use crate::target::target_list;

target_list! {
    HOST;

    super::ROPE: fn xentile_rope_host = rotate(x, indices, cos, sin, y, options, pool);
}

fn rotate(
    x: MayAlias<AnyBuffer>,
    indices: Buffer<i32>,
    cos: Buffer<f32>,
    sin: Buffer<f32>,
    y: AnyBufferMut,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let shape = shape([x.dims(), y.dims(), indices.dims(), cos.dims(), sin.dims()])?;
    let pool = Pool(pool);
    let kernel = Kernel::new(options.0, shape, Launch { isa: Isa::detect(), pool: &pool });
    with_element!(x.dtype(), "x", E => {
        let x = in_out(x.typed::<E, ANY_RANK>()?.with(y.typed::<E, ANY_RANK>()?)?);
        kernel.run(x, indices.as_slice(), [cos.as_slice(), sin.as_slice()]).map_err(invalid)
    })
}

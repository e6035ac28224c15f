//! Activations on the CPU.

use xentile_cpu::Isa;
use xentile_cpu::activation::{Kernel, Launch};
use xla_ffi::{ANY_RANK, AnyBuffer, AnyBufferMut, Result, ThreadPool};

use super::{Options, check_y, shape};
use crate::arguments::invalid;
use crate::cpu::{Pool, ask_for_huge_pages};
use crate::dtype::with_element;
use crate::target::target_list;

target_list! {
    HOST;

    super::FORWARD: fn xentile_activation_forward_host = forward(x, y, options, pool);
    super::BACKWARD: fn xentile_activation_backward_host = backward(x, dy, dx, options, pool);
    super::BACKWARD_WITH_Y: fn xentile_activation_backward_with_y_host = backward_with_y(
        x, dy, dx, y, options, pool,
    );
}

fn forward(x: AnyBuffer, y: AnyBufferMut, options: Options, pool: ThreadPool) -> Result {
    let shape = shape(&options.0, ("y", y.dims()), &[("x", x.dims())])?;
    let pool = Pool(pool);
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let kernel = Kernel::new(options.0, shape, launch).map_err(invalid)?;
    with_element!(x.dtype(), "x", E => {
        let (x, y) = (x.typed::<E, ANY_RANK>()?, y.typed::<E, ANY_RANK>()?.into_slice());
        ask_for_huge_pages(y);
        kernel.forward(x.as_slice(), y).map_err(invalid)
    })
}

fn backward(
    x: AnyBuffer,
    dy: AnyBuffer,
    dx: AnyBufferMut,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let shape = shape(&options.0, ("dy", dy.dims()), &[("x", x.dims()), ("dx", dx.dims())])?;
    let pool = Pool(pool);
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let kernel = Kernel::new(options.0, shape, launch).map_err(invalid)?;
    with_element!(x.dtype(), "x", E => {
        let (x, dy) = (x.typed::<E, ANY_RANK>()?, dy.typed::<E, ANY_RANK>()?);
        let dx = dx.typed::<E, ANY_RANK>()?.into_slice();
        ask_for_huge_pages(dx);
        kernel.backward(x.as_slice(), dy.as_slice(), dx).map_err(invalid)
    })
}

fn backward_with_y(
    x: AnyBuffer,
    dy: AnyBuffer,
    dx: AnyBufferMut,
    y: AnyBufferMut,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let shape = shape(&options.0, ("dy", dy.dims()), &[("x", x.dims()), ("dx", dx.dims())])?;
    check_y(y.dims(), dy.dims())?;
    let pool = Pool(pool);
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let kernel = Kernel::new(options.0, shape, launch).map_err(invalid)?;
    with_element!(x.dtype(), "x", E => {
        let (x, dy) = (x.typed::<E, ANY_RANK>()?, dy.typed::<E, ANY_RANK>()?);
        let dx = dx.typed::<E, ANY_RANK>()?.into_slice();
        let y = y.typed::<E, ANY_RANK>()?.into_slice();
        ask_for_huge_pages(dx);
        ask_for_huge_pages(y);
        kernel.backward_with_y(x.as_slice(), dy.as_slice(), dx, y).map_err(invalid)
    })
}

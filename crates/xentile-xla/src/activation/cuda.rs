//! Activations on NVIDIA GPUs.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use xentile::activation::ActivationShape;
use xentile_cuda::activation::Pass;
use xla_ffi::{Context, DType, Result, Stage};

use super::{Options, check_y, shape};
use crate::cuda::{Any, AnyMut, failed, to_dtype};
use crate::dtype;
use crate::target::target_list;

target_list! {
    CUDA;

    super::FORWARD: fn xentile_activation_forward_cuda,
        initialize xentile_activation_forward_cuda_initialize = forward(
        x, y, options, context,
    );
    super::BACKWARD: fn xentile_activation_backward_cuda,
        initialize xentile_activation_backward_cuda_initialize = backward(
        x, dy, dx, options, context,
    );
    super::BACKWARD_WITH_Y: fn xentile_activation_backward_with_y_cuda,
        initialize xentile_activation_backward_with_y_cuda_initialize = backward_with_y(
        x, dy, dx, y, options, context,
    );
}

fn forward(x: Any, y: AnyMut, options: Options, context: Context) -> Result {
    let shape = shape(&options.0, ("y", y.dims()), &[("x", x.dims())])?;
    let dtype = to_dtype("x", x.dtype())?;
    check("y", y.dtype(), x.dtype())?;
    let pass = Pass::forward(options.0, shape, dtype).map_err(failed)?;
    let read = [x.as_ptr().cast_const(), null()];
    launch(&pass, shape, &context, read, [y.as_ptr(), null_mut()])
}

fn backward(x: Any, dy: Any, dx: AnyMut, options: Options, context: Context) -> Result {
    let shape = shape(&options.0, ("dy", dy.dims()), &[("x", x.dims()), ("dx", dx.dims())])?;
    let dtype = to_dtype("x", x.dtype())?;
    check("dy", dy.dtype(), x.dtype())?;
    check("dx", dx.dtype(), x.dtype())?;
    let pass = Pass::backward(options.0, shape, dtype).map_err(failed)?;
    let read = [x.as_ptr().cast_const(), dy.as_ptr().cast_const()];
    launch(&pass, shape, &context, read, [dx.as_ptr(), null_mut()])
}

fn backward_with_y(
    x: Any,
    dy: Any,
    dx: AnyMut,
    y: AnyMut,
    options: Options,
    context: Context,
) -> Result {
    let shape = shape(&options.0, ("dy", dy.dims()), &[("x", x.dims()), ("dx", dx.dims())])?;
    check_y(y.dims(), dy.dims())?;
    let dtype = to_dtype("x", x.dtype())?;
    for (name, found) in [("dy", dy.dtype()), ("dx", dx.dtype()), ("y", y.dtype())] {
        check(name, found, x.dtype())?;
    }
    let pass = Pass::backward_with_y(options.0, shape, dtype).map_err(failed)?;
    let read = [x.as_ptr().cast_const(), dy.as_ptr().cast_const()];
    launch(&pass, shape, &context, read, [dx.as_ptr(), y.as_ptr()])
}

/// Checks that `name` has the dtype of x.
fn check(name: &str, actual: DType, of_x: DType) -> Result {
    if actual == of_x { Ok(()) } else { Err(dtype::wrong(name, actual, &of_x.to_string())) }
}

fn launch(
    pass: &Pass,
    shape: ActivationShape,
    context: &Context,
    [x, dy]: [*const c_void; 2],
    [result, y]: [*mut c_void; 2],
) -> Result {
    if shape.elements() == 0 {
        return Ok(());
    }
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => pass.load(stream),
            _ => pass.run(stream, x, dy, result, y),
        }
    };
    outcome.map_err(failed)
}

//! Rotary position embedding on NVIDIA GPUs.

use xentile_cuda::rope::{Operands, Rotation};
use xla_ffi::{Buffer, Context, OnDevice, Result, Stage};

use super::{Options, shape};
use crate::cuda::{Any, AnyMut, Floats, check_result, failed, to_dtype};
use crate::target::target_list;

target_list! {
    CUDA;

    super::ROPE: fn xentile_rope_cuda,
        initialize xentile_rope_cuda_initialize = rotate(
        x, indices, cos, sin, y, options, context,
    );
}

fn rotate(
    x: Any,
    indices: OnDevice<Buffer<i32>>,
    cos: Floats,
    sin: Floats,
    y: AnyMut,
    options: Options,
    context: Context,
) -> Result {
    let shape = shape([x.dims(), y.dims(), indices.dims(), cos.dims(), sin.dims()])?;
    let dtype = to_dtype("x", x.dtype())?;
    check_result(("x", x), ("y", &y))?;
    if shape.elements() == 0 {
        return Ok(());
    }
    let rotation = Rotation::new(options.0, shape, dtype);
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let operands = Operands {
        x: x.as_ptr().cast_const(),
        indices: indices.as_ptr().cast_const().cast(),
        cos: cos.as_ptr().cast_const().cast(),
        sin: sin.as_ptr().cast_const().cast(),
        y: y.as_ptr(),
    };
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => rotation.load(stream),
            _ => rotation.run(stream, operands),
        }
    };
    outcome.map_err(failed)
}

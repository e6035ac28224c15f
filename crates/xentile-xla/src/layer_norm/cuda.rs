//! LayerNorm on NVIDIA GPUs.

use xentile_cuda::layer_norm::{Backward, Forward, Norm, PartialSums, Pass, Weight};
use xla_ffi::{Context, Result};

use super::Options;
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, check_result, failed, to_dtype};
use crate::norm::cuda::{check_dtype, run};
use crate::norm::{check_alike, check_columns, check_like, check_rows, partial_sums, shape};
use crate::target::target_list;

target_list! {
    CUDA;

    super::FORWARD: fn xentile_layer_norm_forward_cuda,
        initialize xentile_layer_norm_forward_cuda_initialize = forward(
        x, weight, bias, y, mean, rstd, options, context,
    );
    super::BACKWARD: fn xentile_layer_norm_backward_cuda,
        initialize xentile_layer_norm_backward_cuda_initialize = backward(
        x, weight, mean, rstd, dy, dx, dweight, dbias, options, context,
    );
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn forward(
    x: Any,
    weight: Any,
    bias: Any,
    y: AnyMut,
    mean: FloatsMut,
    rstd: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    let norm = prepare(x, weight, [mean.dims(), rstd.dims()], options)?;
    check_columns(x.dims(), "bias", bias.dims())?;
    if bias.dtype() != weight.dtype() {
        return Err(crate::dtype::wrong("bias", bias.dtype(), &weight.dtype().to_string()));
    }
    check_like(x.dims(), &[("y", y.dims())])?;
    check_result(("x", x), ("y", &y))?;
    if x.elements() == 0 {
        return Ok(());
    }
    let arrays = Forward {
        x: x.as_ptr(),
        weight: weight.as_ptr(),
        bias: (bias.as_ptr(), bias.elements()),
        y: y.as_ptr(),
        mean: mean.as_ptr().cast(),
        rstd: rstd.as_ptr().cast(),
    };
    run(
        context,
        // SAFETY: XLA's stream.
        |stream| unsafe { norm.load(Pass::Forward, stream) },
        // SAFETY: the same, and XLA's buffers, whose shapes were checked.
        |stream| unsafe { norm.forward(stream, arrays) },
    )
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    x: Any,
    weight: Any,
    mean: Floats,
    rstd: Floats,
    dy: Any,
    dx: AnyMut,
    dweight: FloatsMut,
    dbias: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    let norm = prepare(x, weight, [mean.dims(), rstd.dims()], options)?;
    check_like(x.dims(), &[("dy", dy.dims()), ("dx", dx.dims())])?;
    check_dtype(("dy", dy), x)?;
    check_result(("x", x), ("dx", &dx))?;
    let [groups, blocks] = partial_sums(x.dims(), "dweight", dweight.dims())?;
    check_alike(("dbias", dbias.dims()), ("dweight", dweight.dims()))?;
    let sums = PartialSums { groups, blocks };
    if dweight.elements() == 0 {
        return Ok(());
    }
    let arrays = Backward {
        x: x.as_ptr(),
        weight: weight.as_ptr(),
        mean: mean.as_ptr().cast(),
        rstd: rstd.as_ptr().cast(),
        dy: dy.as_ptr(),
        dx: dx.as_ptr(),
        dweight: dweight.as_ptr().cast(),
        dbias: dbias.as_ptr().cast(),
    };
    run(
        context,
        // SAFETY: XLA's stream.
        |stream| unsafe { norm.load(Pass::Backward(sums), stream) },
        // SAFETY: the same, and XLA's buffers, whose shapes were checked.
        |stream| unsafe { norm.backward(stream, sums, arrays) },
    )
}

/// Checks what every pass has.
fn prepare(x: Any, weight: Any, [mean, rstd]: [&[usize]; 2], options: Options) -> Result<Norm> {
    let shape = shape(x.dims())?;
    check_columns(x.dims(), "weight", weight.dims())?;
    check_rows(x.dims(), "mean", mean)?;
    check_rows(x.dims(), "rstd", rstd)?;
    let dtype = to_dtype("x", x.dtype())?;
    let weight = Weight { dtype: to_dtype("weight", weight.dtype())?, length: weight.elements() };
    Norm::new(options.0, shape, dtype, weight).map_err(failed)
}

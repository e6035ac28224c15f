//! RMSNorm on NVIDIA GPUs.

use xentile_cuda::rms_norm::{Backward, Forward, Norm, PartialSums, Pass, Weight};
use xla_ffi::{Context, Result};

use super::Options;
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, check_result, failed, to_dtype};
use crate::norm::cuda::{check_dtype, run};
use crate::norm::{check_columns, check_like, check_rows, partial_sums, shape};
use crate::target::target_list;

target_list! {
    CUDA;

    super::FORWARD: fn xentile_rms_norm_forward_cuda,
        initialize xentile_rms_norm_forward_cuda_initialize = forward(
        x, weight, y, rstd, options, context,
    );
    super::ADD_FORWARD: fn xentile_rms_norm_add_forward_cuda,
        initialize xentile_rms_norm_add_forward_cuda_initialize = add_forward(
        x, residual, weight, y, sum, rstd, options, context,
    );
    super::BACKWARD: fn xentile_rms_norm_backward_cuda,
        initialize xentile_rms_norm_backward_cuda_initialize = backward(
        x, weight, rstd, dy, dx, dweight, options, context,
    );
    super::ADD_BACKWARD: fn xentile_rms_norm_add_backward_cuda,
        initialize xentile_rms_norm_add_backward_cuda_initialize = add_backward(
        x, weight, rstd, dy, dsum, dx, dweight, options, context,
    );
}

fn forward(
    x: Any,
    weight: Any,
    y: AnyMut,
    rstd: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    check_like(x.dims(), &[("y", y.dims())])?;
    norm(x, None, weight, y, rstd, options, context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn add_forward(
    x: Any,
    residual: Any,
    weight: Any,
    y: AnyMut,
    sum: AnyMut,
    rstd: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    let like = [("residual", residual.dims()), ("y", y.dims()), ("sum", sum.dims())];
    check_like(x.dims(), &like)?;
    norm(x, Some((residual, sum)), weight, y, rstd, options, context)
}

fn norm(
    x: Any,
    residual: Option<(Any, AnyMut)>,
    weight: Any,
    y: AnyMut,
    rstd: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    let norm = prepare(x, weight, residual.is_some(), rstd.dims(), options)?;
    check_result(("x", x), ("y", &y))?;
    if let Some((residual, sum)) = &residual {
        check_dtype(("residual", *residual), x)?;
        check_result(("residual", *residual), ("sum", sum))?;
    }
    if x.elements() == 0 {
        return Ok(());
    }
    let arrays = Forward {
        x: x.as_ptr(),
        residual: residual.map(|(residual, sum)| (residual.as_ptr().cast_const(), sum.as_ptr())),
        weight: weight.as_ptr(),
        y: y.as_ptr(),
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
    rstd: Floats,
    dy: Any,
    dx: AnyMut,
    dweight: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    gradients(x, weight, rstd, dy, None, dx, dweight, options, context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn add_backward(
    x: Any,
    weight: Any,
    rstd: Floats,
    dy: Any,
    dsum: Any,
    dx: AnyMut,
    dweight: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    gradients(x, weight, rstd, dy, Some(dsum), dx, dweight, options, context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn gradients(
    x: Any,
    weight: Any,
    rstd: Floats,
    dy: Any,
    dsum: Option<Any>,
    dx: AnyMut,
    dweight: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    let norm = prepare(x, weight, dsum.is_some(), rstd.dims(), options)?;
    check_like(x.dims(), &[("dy", dy.dims()), ("dx", dx.dims())])?;
    check_dtype(("dy", dy), x)?;
    check_result(("x", x), ("dx", &dx))?;
    if let Some(dsum) = dsum {
        check_like(x.dims(), &[("dsum", dsum.dims())])?;
        check_dtype(("dsum", dsum), x)?;
    }
    let [groups, blocks] = partial_sums(x.dims(), "dweight", dweight.dims())?;
    let sums = PartialSums { groups, blocks };
    if dweight.elements() == 0 {
        return Ok(());
    }
    let arrays = Backward {
        x: x.as_ptr(),
        weight: weight.as_ptr(),
        rstd: rstd.as_ptr().cast(),
        dy: dy.as_ptr(),
        dsum: dsum.map(|dsum| dsum.as_ptr().cast_const()),
        dx: dx.as_ptr(),
        dweight: dweight.as_ptr().cast(),
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
fn prepare(x: Any, weight: Any, adds: bool, rstd: &[usize], options: Options) -> Result<Norm> {
    let shape = shape(x.dims())?;
    check_columns(x.dims(), "weight", weight.dims())?;
    check_rows(x.dims(), "rstd", rstd)?;
    let dtype = to_dtype("x", x.dtype())?;
    let weight = Weight { dtype: to_dtype("weight", weight.dtype())?, length: weight.elements() };
    Norm::new(options.0, shape, dtype, weight, adds).map_err(failed)
}

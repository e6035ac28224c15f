//! RMSNorm and LayerNorm on NVIDIA GPUs.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use xentile::norm::Norm as Options;
use xentile_cuda::norm::{Backward, Forward, Norm, PartialSums, Pass, Weight};
use xla_ffi::{Context, Result, Stage};

use super::{
    LayerOptions, RmsOptions, check_alike, check_columns, check_like, check_rows, partial_sums,
    shape,
};
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, check_result, failed, to_dtype};
use crate::target::target_list;

target_list! {
    CUDA;

    super::RMS_FORWARD: fn xentile_rms_norm_forward_cuda,
        initialize xentile_rms_norm_forward_cuda_initialize = forward(
        x, weight, y, rstd, options, context,
    );
    super::RMS_ADD_FORWARD: fn xentile_rms_norm_add_forward_cuda,
        initialize xentile_rms_norm_add_forward_cuda_initialize = add_forward(
        x, residual, weight, y, sum, rstd, options, context,
    );
    super::RMS_BACKWARD: fn xentile_rms_norm_backward_cuda,
        initialize xentile_rms_norm_backward_cuda_initialize = backward(
        x, weight, rstd, dy, dx, dweight, options, context,
    );
    super::RMS_ADD_BACKWARD: fn xentile_rms_norm_add_backward_cuda,
        initialize xentile_rms_norm_add_backward_cuda_initialize = add_backward(
        x, weight, rstd, dy, dsum, dx, dweight, options, context,
    );
    super::LAYER_FORWARD: fn xentile_layer_norm_forward_cuda,
        initialize xentile_layer_norm_forward_cuda_initialize = layer_forward(
        x, weight, bias, y, mean, rstd, options, context,
    );
    super::LAYER_BACKWARD: fn xentile_layer_norm_backward_cuda,
        initialize xentile_layer_norm_backward_cuda_initialize = layer_backward(
        x, weight, mean, rstd, dy, dx, dweight, dbias, options, context,
    );
}

fn forward(
    x: Any,
    weight: Any,
    y: AnyMut,
    rstd: FloatsMut,
    options: RmsOptions,
    context: Context,
) -> Result {
    let arrays = ForwardArrays { x, residual: None, weight, bias: None, y, mean: None, rstd };
    arrays.run(options.0, context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn add_forward(
    x: Any,
    residual: Any,
    weight: Any,
    y: AnyMut,
    sum: AnyMut,
    rstd: FloatsMut,
    options: RmsOptions,
    context: Context,
) -> Result {
    let residual = Some((residual, sum));
    ForwardArrays { x, residual, weight, bias: None, y, mean: None, rstd }.run(options.0, context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn layer_forward(
    x: Any,
    weight: Any,
    bias: Any,
    y: AnyMut,
    mean: FloatsMut,
    rstd: FloatsMut,
    options: LayerOptions,
    context: Context,
) -> Result {
    let (bias, mean) = (Some(bias), Some(mean));
    ForwardArrays { x, residual: None, weight, bias, y, mean, rstd }.run(options.0, context)
}

/// The arrays of a forward pass.
struct ForwardArrays<'a> {
    x: Any<'a>,
    /// The residual, and the output for its sum with x.
    residual: Option<(Any<'a>, AnyMut<'a>)>,
    weight: Any<'a>,
    bias: Option<Any<'a>>,
    y: AnyMut<'a>,
    mean: Option<FloatsMut<'a>>,
    rstd: FloatsMut<'a>,
}

impl ForwardArrays<'_> {
    fn run(self, options: Options, context: Context) -> Result {
        let Self { x, residual, weight, bias, y, mean, rstd } = self;
        let statistics = [mean.as_ref().map(FloatsMut::dims), Some(rstd.dims())];
        let norm = prepare(x, weight, residual.is_some(), statistics, options)?;
        check_like(x.dims(), &[("y", y.dims())])?;
        if let Some((residual, sum)) = &residual {
            check_like(x.dims(), &[("residual", residual.dims()), ("sum", sum.dims())])?;
        }
        if let Some(bias) = bias {
            check_columns(x.dims(), "bias", bias.dims())?;
            check_dtype(("bias", bias), weight)?;
        }
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
            residual: residual
                .map(|(residual, sum)| (residual.as_ptr().cast_const(), sum.as_ptr())),
            weight: weight.as_ptr(),
            bias: bias.map(|bias| (bias.as_ptr().cast_const(), bias.elements())),
            y: y.as_ptr(),
            mean: mean.map_or(null_mut(), |mean| mean.as_ptr().cast()),
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
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    x: Any,
    weight: Any,
    rstd: Floats,
    dy: Any,
    dx: AnyMut,
    dweight: FloatsMut,
    options: RmsOptions,
    context: Context,
) -> Result {
    let (mean, dsum, dbias) = (None, None, None);
    BackwardArrays { x, weight, mean, rstd, dy, dsum, dx, dweight, dbias }.run(options.0, context)
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
    options: RmsOptions,
    context: Context,
) -> Result {
    let (mean, dsum, dbias) = (None, Some(dsum), None);
    BackwardArrays { x, weight, mean, rstd, dy, dsum, dx, dweight, dbias }.run(options.0, context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn layer_backward(
    x: Any,
    weight: Any,
    mean: Floats,
    rstd: Floats,
    dy: Any,
    dx: AnyMut,
    dweight: FloatsMut,
    dbias: FloatsMut,
    options: LayerOptions,
    context: Context,
) -> Result {
    let (mean, dsum, dbias) = (Some(mean), None, Some(dbias));
    BackwardArrays { x, weight, mean, rstd, dy, dsum, dx, dweight, dbias }.run(options.0, context)
}

/// The arrays of a backward pass.
struct BackwardArrays<'a> {
    x: Any<'a>,
    weight: Any<'a>,
    mean: Option<Floats<'a>>,
    rstd: Floats<'a>,
    dy: Any<'a>,
    dsum: Option<Any<'a>>,
    dx: AnyMut<'a>,
    dweight: FloatsMut<'a>,
    dbias: Option<FloatsMut<'a>>,
}

impl BackwardArrays<'_> {
    fn run(self, options: Options, context: Context) -> Result {
        let Self { x, weight, mean, rstd, dy, dsum, dx, dweight, dbias } = self;
        let statistics = [mean.as_ref().map(Floats::dims), Some(rstd.dims())];
        let norm = prepare(x, weight, dsum.is_some(), statistics, options)?;
        check_like(x.dims(), &[("dy", dy.dims()), ("dx", dx.dims())])?;
        check_dtype(("dy", dy), x)?;
        check_result(("x", x), ("dx", &dx))?;
        if let Some(dsum) = dsum {
            check_like(x.dims(), &[("dsum", dsum.dims())])?;
            check_dtype(("dsum", dsum), x)?;
        }
        let [groups, blocks] = partial_sums(x.dims(), "dweight", dweight.dims())?;
        if let Some(dbias) = &dbias {
            check_alike(("dbias", dbias.dims()), ("dweight", dweight.dims()))?;
        }
        let sums = PartialSums { groups, blocks };
        if dweight.elements() == 0 {
            return Ok(());
        }
        let arrays = Backward {
            x: x.as_ptr(),
            weight: weight.as_ptr(),
            mean: mean.map_or(null(), |mean| mean.as_ptr().cast_const().cast()),
            rstd: rstd.as_ptr().cast(),
            dy: dy.as_ptr(),
            dsum: dsum.map(|dsum| dsum.as_ptr().cast_const()),
            dx: dx.as_ptr(),
            dweight: dweight.as_ptr().cast(),
            dbias: dbias.map_or(null_mut(), |dbias| dbias.as_ptr().cast()),
        };
        run(
            context,
            // SAFETY: XLA's stream.
            |stream| unsafe { norm.load(Pass::Backward(sums), stream) },
            // SAFETY: the same, and XLA's buffers, whose shapes were checked.
            |stream| unsafe { norm.backward(stream, sums, arrays) },
        )
    }
}

/// Checks x, the weight, and the dims of mean and rstd.
fn prepare(
    x: Any,
    weight: Any,
    adds: bool,
    statistics: [Option<&[usize]>; 2],
    options: Options,
) -> Result<Norm> {
    let shape = shape(x.dims())?;
    check_columns(x.dims(), "weight", weight.dims())?;
    for (name, dims) in ["mean", "rstd"].into_iter().zip(statistics) {
        dims.map_or(Ok(()), |dims| check_rows(x.dims(), name, dims))?;
    }
    let dtype = to_dtype("x", x.dtype())?;
    let weight = Weight { dtype: to_dtype("weight", weight.dtype())?, length: weight.elements() };
    Norm::new(options, shape, dtype, weight, adds).map_err(failed)
}

/// Checks that an argument, with its name, has the dtype of `like`.
pub(crate) fn check_dtype((name, argument): (&str, Any), like: Any) -> Result {
    if argument.dtype() == like.dtype() {
        return Ok(());
    }
    Err(crate::dtype::wrong(name, argument.dtype(), &like.dtype().to_string()))
}

/// Calls `load` when XLA prepares a program and `launch` when it executes one, each with XLA's stream.
pub(crate) fn run(
    context: Context,
    load: impl FnOnce(*mut c_void) -> xentile_cuda::Result<()>,
    launch: impl FnOnce(*mut c_void) -> xentile_cuda::Result<()>,
) -> Result {
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    match context.stage() {
        Stage::Initialize => load(stream),
        _ => launch(stream),
    }
    .map_err(failed)
}

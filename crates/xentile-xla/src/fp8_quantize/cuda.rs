//! FP8 quantisation on NVIDIA GPUs.

use xentile::activation::{Activation, Kind, Layout};
use xentile::fp8_quantize::{Blocks, Fp8Quantize};
use xentile::norm::Norm;
use xentile_cuda::fp8_quantize::{
    Empty, Gated, NormOperands, Normed, Operands, Packing, Quantization,
};
use xentile_cuda::norm::Weight;
use xla_ffi::{Context, Decoder, Parameter, Result, Stage};

use super::{Options, check, check_format, check_scale, format, shape, shape_scales, transposed};
use crate::arguments::invalid;
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, check_result, failed, to_dtype};
use crate::norm::cuda::{check_dtype, run};
use crate::norm::{check_like, check_rows};
use crate::target::target_list;

target_list! {
    CUDA;

    super::QUANTIZE: fn xentile_fp8_quantize_cuda,
        initialize xentile_fp8_quantize_cuda_initialize = quantize(
        x, values, scales, options, context,
    );
    super::QUANTIZE_TRANSPOSED: fn xentile_fp8_quantize_transposed_cuda,
        initialize xentile_fp8_quantize_transposed_cuda_initialize = quantize_transposed(
        x, values, scales, values_t, scales_t, options, context,
    );
    super::SWIGLU: fn xentile_fp8_quantize_swiglu_cuda,
        initialize xentile_fp8_quantize_swiglu_cuda_initialize = swiglu(
        x, up, values, scales, gate, context,
    );
    super::SWIGLU_TRANSPOSED: fn xentile_fp8_quantize_swiglu_transposed_cuda,
        initialize xentile_fp8_quantize_swiglu_transposed_cuda_initialize = swiglu_transposed(
        x, up, values, scales, values_t, scales_t, gate, context,
    );
    super::RMS_NORM: fn xentile_fp8_quantize_rms_norm_cuda,
        initialize xentile_fp8_quantize_rms_norm_cuda_initialize = rms_norm(
        x, weight, values, scales, rstd, norm, context,
    );
    super::RMS_NORM_ADD: fn xentile_fp8_quantize_rms_norm_add_cuda,
        initialize xentile_fp8_quantize_rms_norm_add_cuda_initialize = rms_norm_add(
        x, residual, weight, values, scales, sum, rstd, norm, context,
    );
    super::RMS_NORM_TRANSPOSED: fn xentile_fp8_quantize_rms_norm_transposed_cuda,
        initialize xentile_fp8_quantize_rms_norm_transposed_cuda_initialize = rms_norm_transposed(
        x, weight, values, scales, values_t, scales_t, rstd, norm, context,
    );
    super::RMS_NORM_ADD_TRANSPOSED: fn xentile_fp8_quantize_rms_norm_add_transposed_cuda,
        initialize xentile_fp8_quantize_rms_norm_add_transposed_cuda_initialize =
        rms_norm_add_transposed(
        x, residual, weight, values, scales, values_t, scales_t, sum, rstd, norm, context,
    );
    super::SCALED: fn xentile_fp8_quantize_scaled_cuda,
        initialize xentile_fp8_quantize_scaled_cuda_initialize = scaled(
        x, scale, values, amax, context,
    );
    super::SCALED_TRANSPOSED: fn xentile_fp8_quantize_scaled_transposed_cuda,
        initialize xentile_fp8_quantize_scaled_transposed_cuda_initialize = scaled_transposed(
        x, scale, values, amax, values_t, context,
    );
    super::AMAX: fn xentile_fp8_quantize_amax_cuda,
        initialize xentile_fp8_quantize_amax_cuda_initialize = amax(
        x, amax, context,
    );
}

fn quantize(
    x: Any,
    values: AnyMut,
    scales: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    let Options { blocks, power_of_two } = options;
    let shape = shape(x.dims(), if blocks.rows == 1 { 1 } else { 2 })?;
    let dtype = to_dtype("x", x.dtype())?;
    check("values", values.dims(), x.dims(), x.dims())?;
    check("scales", scales.dims(), &shape_scales(x.dims(), blocks), x.dims())?;
    let format = format("values", values.dtype())?;
    let Some(shape) = shape else {
        return fill(Empty::Scale, &[&scales], &context);
    };
    let options = Fp8Quantize { format, power_of_two };
    let pass = Quantization::new(options, shape, dtype, blocks, false).map_err(failed)?;
    let operands = Operands {
        values: values.as_ptr().cast(),
        numbers: scales.as_ptr().cast(),
        ..Operands::of(x.as_ptr())
    };
    launch(&pass, operands, &context)
}

fn quantize_transposed(
    x: Any,
    values: AnyMut,
    scales: FloatsMut,
    values_t: AnyMut,
    scales_t: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    let Options { blocks, power_of_two } = options;
    let shape = shape(x.dims(), 2)?;
    let dtype = to_dtype("x", x.dtype())?;
    let transposed = transposed(x.dims());
    check("values", values.dims(), x.dims(), x.dims())?;
    check("scales", scales.dims(), &shape_scales(x.dims(), blocks), x.dims())?;
    check("values_t", values_t.dims(), &transposed, x.dims())?;
    check("scales_t", scales_t.dims(), &shape_scales(&transposed, blocks), x.dims())?;
    let format = format("values", values.dtype())?;
    check_format("values_t", values_t.dtype(), format)?;
    let Some(shape) = shape else {
        return fill(Empty::Scale, &[&scales, &scales_t], &context);
    };
    let options = Fp8Quantize { format, power_of_two };
    let pass = Quantization::new(options, shape, dtype, blocks, true).map_err(failed)?;
    let operands = Operands {
        values: values.as_ptr().cast(),
        numbers: scales.as_ptr().cast(),
        values_t: values_t.as_ptr().cast(),
        scales_t: scales_t.as_ptr().cast(),
        ..Operands::of(x.as_ptr())
    };
    launch(&pass, operands, &context)
}

/// The attributes of SwiGLU in FP8.
#[derive(Clone, Copy, Debug)]
struct GateOptions {
    activation: Activation,
    packing: Packing,
    power_of_two: bool,
}

impl<'a> Parameter<'a> for GateOptions {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let packing = match decoder.parameter::<&str>("packing")? {
            "apart" => Packing::Apart,
            "halves" => Packing::Halves,
            "interleaved" => Packing::Interleaved,
            other => {
                return Err(invalid(format_args!(
                    "attribute packing is `{other}`; it must be one of apart, halves, interleaved"
                )));
            }
        };
        let activation = Activation {
            kind: Kind::Silu,
            layout: Layout::Halves,
            alpha: decoder.parameter("alpha")?,
            limit: decoder.parameter("limit")?,
            up_offset: decoder.parameter("up_offset")?,
        };
        Ok(Self { activation, packing, power_of_two: decoder.parameter("power_of_two")? })
    }
}

fn swiglu(
    x: Any,
    up: Any,
    values: AnyMut,
    scales: FloatsMut,
    gate: GateOptions,
    context: Context,
) -> Result {
    gated(x, up, (&values, &scales), None, gate, &context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn swiglu_transposed(
    x: Any,
    up: Any,
    values: AnyMut,
    scales: FloatsMut,
    values_t: AnyMut,
    scales_t: FloatsMut,
    gate: GateOptions,
    context: Context,
) -> Result {
    gated(x, up, (&values, &scales), Some((&values_t, &scales_t)), gate, &context)
}

/// `up` is `x` where that packs both.
fn gated(
    x: Any,
    up: Any,
    (values, scales): (&AnyMut, &FloatsMut),
    transposed: Option<(&AnyMut, &FloatsMut)>,
    gate: GateOptions,
    context: &Context,
) -> Result {
    let y = values.dims();
    let shape = shape(y, if transposed.is_some() { 2 } else { 1 })?;
    let (leading, columns) = y.split_at(y.len() - 1);
    let right = match gate.packing {
        Packing::Apart => y.to_vec(),
        Packing::Halves => [leading, &[2], columns].concat(),
        Packing::Interleaved => [leading, columns, &[2]].concat(),
    };
    let dtype = to_dtype("x", x.dtype())?;
    for (name, one) in [("x", x), ("up", up)] {
        if one.dims() != right {
            return Err(invalid(format_args!(
                "`{name}` has shape {:?}; it must be {right:?}, as `values` has shape {y:?}",
                one.dims()
            )));
        }
    }
    if up.dtype() != x.dtype() {
        return Err(crate::dtype::wrong("up", up.dtype(), &x.dtype().to_string()));
    }
    let blocks = Blocks { rows: 1, columns: Some(Gated::BLOCK) };
    check("scales", scales.dims(), &shape_scales(y, blocks), y)?;
    let format = format("values", values.dtype())?;
    let mut operands = Operands {
        values: values.as_ptr().cast(),
        numbers: scales.as_ptr().cast(),
        ..Operands::of(x.as_ptr())
    };
    if let Some((values_t, scales_t)) = transposed {
        let transposed = super::transposed(y);
        check("values_t", values_t.dims(), &transposed, y)?;
        check("scales_t", scales_t.dims(), &shape_scales(&transposed, blocks), y)?;
        check_format("values_t", values_t.dtype(), format)?;
        operands.values_t = values_t.as_ptr().cast();
        operands.scales_t = scales_t.as_ptr().cast();
    }
    let Some(shape) = shape else {
        return match transposed {
            Some((_, scales_t)) => fill(Empty::Scale, &[scales, scales_t], context),
            None => fill(Empty::Scale, &[scales], context),
        };
    };
    let options = Fp8Quantize { format, power_of_two: gate.power_of_two };
    let pass =
        Gated::new(gate.activation, gate.packing, options, shape, dtype, transposed.is_some())
            .map_err(failed)?;
    run(
        *context,
        // SAFETY: XLA's stream.
        |stream| unsafe { pass.load(stream) },
        // SAFETY: the same, and XLA's buffers, whose shapes were checked.
        |stream| unsafe { pass.run(stream, operands, up.as_ptr()) },
    )
}

/// The attributes of RMSNorm in FP8.
#[derive(Clone, Copy, Debug)]
struct NormOptions {
    norm: Norm,
    power_of_two: bool,
}

impl<'a> Parameter<'a> for NormOptions {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        let norm = crate::norm::RmsOptions::decode(decoder, name)?.0;
        Ok(Self { norm, power_of_two: decoder.parameter("power_of_two")? })
    }
}

/// What RMSNorm in FP8 takes and gives.
struct NormArrays<'a> {
    x: Any<'a>,
    residual: Option<(Any<'a>, AnyMut<'a>)>,
    weight: Any<'a>,
    values: AnyMut<'a>,
    scales: FloatsMut<'a>,
    transposed: Option<(AnyMut<'a>, FloatsMut<'a>)>,
    rstd: FloatsMut<'a>,
}

fn rms_norm(
    x: Any,
    weight: Any,
    values: AnyMut,
    scales: FloatsMut,
    rstd: FloatsMut,
    norm: NormOptions,
    context: Context,
) -> Result {
    let (residual, transposed) = (None, None);
    normed(NormArrays { x, residual, weight, values, scales, transposed, rstd }, norm, &context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn rms_norm_add(
    x: Any,
    residual: Any,
    weight: Any,
    values: AnyMut,
    scales: FloatsMut,
    sum: AnyMut,
    rstd: FloatsMut,
    norm: NormOptions,
    context: Context,
) -> Result {
    let (residual, transposed) = (Some((residual, sum)), None);
    normed(NormArrays { x, residual, weight, values, scales, transposed, rstd }, norm, &context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn rms_norm_transposed(
    x: Any,
    weight: Any,
    values: AnyMut,
    scales: FloatsMut,
    values_t: AnyMut,
    scales_t: FloatsMut,
    rstd: FloatsMut,
    norm: NormOptions,
    context: Context,
) -> Result {
    let (residual, transposed) = (None, Some((values_t, scales_t)));
    normed(NormArrays { x, residual, weight, values, scales, transposed, rstd }, norm, &context)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn rms_norm_add_transposed(
    x: Any,
    residual: Any,
    weight: Any,
    values: AnyMut,
    scales: FloatsMut,
    values_t: AnyMut,
    scales_t: FloatsMut,
    sum: AnyMut,
    rstd: FloatsMut,
    norm: NormOptions,
    context: Context,
) -> Result {
    let (residual, transposed) = (Some((residual, sum)), Some((values_t, scales_t)));
    normed(NormArrays { x, residual, weight, values, scales, transposed, rstd }, norm, &context)
}

fn normed(arrays: NormArrays, norm: NormOptions, context: &Context) -> Result {
    let NormArrays { x, residual, weight, values, scales, transposed, rstd } = arrays;
    let shape = shape(x.dims(), if transposed.is_some() { 2 } else { 1 })?;
    let dtype = to_dtype("x", x.dtype())?;
    let columns = &x.dims()[x.dims().len() - 1..];
    let blocks = Blocks { rows: 1, columns: Some(Gated::BLOCK) };
    check("weight", weight.dims(), columns, x.dims())?;
    check_like(x.dims(), &[("values", values.dims())])?;
    check("scales", scales.dims(), &shape_scales(x.dims(), blocks), x.dims())?;
    check_rows(x.dims(), "rstd", rstd.dims())?;
    if let Some((residual, sum)) = &residual {
        check_like(x.dims(), &[("residual", residual.dims()), ("sum", sum.dims())])?;
        check_dtype(("residual", *residual), x)?;
        check_result(("residual", *residual), ("sum", sum))?;
    }
    let format = format("values", values.dtype())?;
    let mut operands = Operands {
        values: values.as_ptr().cast(),
        numbers: scales.as_ptr().cast(),
        ..Operands::of(x.as_ptr())
    };
    if let Some((values_t, scales_t)) = &transposed {
        let transposed = super::transposed(x.dims());
        check("values_t", values_t.dims(), &transposed, x.dims())?;
        check("scales_t", scales_t.dims(), &shape_scales(&transposed, blocks), x.dims())?;
        check_format("values_t", values_t.dtype(), format)?;
        operands.values_t = values_t.as_ptr().cast();
        operands.scales_t = scales_t.as_ptr().cast();
    }
    let Some(shape) = shape else {
        return match &transposed {
            Some((_, scales_t)) => fill(Empty::Scale, &[&scales, scales_t], context),
            None => fill(Empty::Scale, &[&scales], context),
        };
    };
    let of_weight =
        Weight { dtype: to_dtype("weight", weight.dtype())?, length: weight.elements() };
    let to = Fp8Quantize { format, power_of_two: norm.power_of_two };
    let (adds, is_transposed) = (residual.is_some(), transposed.is_some());
    let pass = Normed::new(norm.norm, to, shape, dtype, of_weight, adds, is_transposed);
    let pass = pass.map_err(failed)?;
    let of_norm = NormOperands {
        residual: residual.map(|(residual, sum)| (residual.as_ptr().cast_const(), sum.as_ptr())),
        weight: weight.as_ptr(),
        rstd: rstd.as_ptr().cast(),
    };
    run(
        *context,
        // SAFETY: XLA's stream.
        |stream| unsafe { pass.load(stream) },
        // SAFETY: the same, and XLA's buffers, whose shapes were checked.
        |stream| unsafe { pass.run(stream, operands, of_norm) },
    )
}

fn scaled(x: Any, scale: Floats, values: AnyMut, amax: FloatsMut, context: Context) -> Result {
    let shape = shape(x.dims(), 1)?;
    let dtype = to_dtype("x", x.dtype())?;
    let leading = &x.dims()[..x.dims().len() - 1];
    check_scale(scale.dims(), leading)?;
    check("values", values.dims(), x.dims(), x.dims())?;
    check("amax", amax.dims(), leading, x.dims())?;
    let format = format("values", values.dtype())?;
    let Some(shape) = shape else {
        return fill(Empty::Amax, &[&amax], &context);
    };
    let pass =
        Quantization::scaled(format, shape, dtype, scale.elements(), false).map_err(failed)?;
    let operands = Operands {
        scale: scale.as_ptr().cast_const().cast(),
        values: values.as_ptr().cast(),
        numbers: amax.as_ptr().cast(),
        ..Operands::of(x.as_ptr())
    };
    launch(&pass, operands, &context)
}

fn scaled_transposed(
    x: Any,
    scale: Floats,
    values: AnyMut,
    amax: FloatsMut,
    values_t: AnyMut,
    context: Context,
) -> Result {
    let shape = shape(x.dims(), 2)?;
    let dtype = to_dtype("x", x.dtype())?;
    let leading = &x.dims()[..x.dims().len() - 1];
    check_scale(scale.dims(), &leading[..leading.len() - 1])?;
    check("values", values.dims(), x.dims(), x.dims())?;
    check("amax", amax.dims(), leading, x.dims())?;
    check("values_t", values_t.dims(), &transposed(x.dims()), x.dims())?;
    let format = format("values", values.dtype())?;
    check_format("values_t", values_t.dtype(), format)?;
    let Some(shape) = shape else {
        return fill(Empty::Amax, &[&amax], &context);
    };
    let pass =
        Quantization::scaled(format, shape, dtype, scale.elements(), true).map_err(failed)?;
    let operands = Operands {
        scale: scale.as_ptr().cast_const().cast(),
        values: values.as_ptr().cast(),
        numbers: amax.as_ptr().cast(),
        values_t: values_t.as_ptr().cast(),
        ..Operands::of(x.as_ptr())
    };
    launch(&pass, operands, &context)
}

fn amax(x: Any, amax: FloatsMut, context: Context) -> Result {
    let shape = shape(x.dims(), 1)?;
    let dtype = to_dtype("x", x.dtype())?;
    check("amax", amax.dims(), &x.dims()[..x.dims().len() - 1], x.dims())?;
    let Some(shape) = shape else {
        return fill(Empty::Amax, &[&amax], &context);
    };
    let pass = Quantization::amax(shape, dtype).map_err(failed)?;
    launch(&pass, Operands { numbers: amax.as_ptr().cast(), ..Operands::of(x.as_ptr()) }, &context)
}

fn launch(pass: &Quantization, operands: Operands, context: &Context) -> Result {
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => pass.load(stream),
            _ => pass.run(stream, operands),
        }
    };
    outcome.map_err(failed)
}

/// Writes numbers of blocks that have no entries.
fn fill(with: Empty, numbers: &[&FloatsMut], context: &Context) -> Result {
    if numbers.iter().all(|numbers| numbers.elements() == 0) {
        return Ok(());
    }
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    for numbers in numbers {
        // SAFETY: XLA's stream and buffers.
        let outcome = unsafe {
            match context.stage() {
                Stage::Initialize => with.load(stream),
                _ => with.fill(stream, numbers.as_ptr().cast(), numbers.elements()),
            }
        };
        outcome.map_err(failed)?;
    }
    Ok(())
}

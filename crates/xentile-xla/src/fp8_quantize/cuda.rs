//! FP8 quantisation on NVIDIA GPUs.

use xentile::fp8_quantize::Fp8Quantize;
use xentile_cuda::fp8_quantize::{Empty, Operands, Quantization};
use xla_ffi::{Context, Result, Stage};

use super::{Options, check, check_format, check_scale, format, of_scales, shape, turned};
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, TRAITS, failed, to_dtype};
use crate::target::{CUDA, target_list};

target_list! {
    CUDA;

    /// Loads what quantises.
    "xentile_fp8_quantize", Initialize: fn xentile_fp8_quantize_cuda_initialize = quantize(
        x, values, scales, options, context,
    ), traits = TRAITS;

    /// Values, and a scale of each block.
    "xentile_fp8_quantize", Execute: fn xentile_fp8_quantize_cuda = quantize(
        x, values, scales, options, context,
    ), traits = TRAITS;

    /// Loads what gives the transposed copy too.
    "xentile_fp8_quantize_transposed", Initialize:
        fn xentile_fp8_quantize_transposed_cuda_initialize = quantize_transposed(
            x, values, scales, values_t, scales_t, options, context,
        ), traits = TRAITS;

    /// The same, and the transposed copy with its own scales.
    "xentile_fp8_quantize_transposed", Execute: fn xentile_fp8_quantize_transposed_cuda =
        quantize_transposed(x, values, scales, values_t, scales_t, options, context),
        traits = TRAITS;

    /// Loads what takes a scale.
    "xentile_fp8_quantize_scaled", Initialize: fn xentile_fp8_quantize_scaled_cuda_initialize =
        scaled(x, scale, values, amax, context), traits = TRAITS;

    /// Values by a given scale, and amax of each row.
    "xentile_fp8_quantize_scaled", Execute: fn xentile_fp8_quantize_scaled_cuda = scaled(
        x, scale, values, amax, context,
    ), traits = TRAITS;

    /// Loads what takes a scale and gives the transposed copy too.
    "xentile_fp8_quantize_scaled_transposed", Initialize:
        fn xentile_fp8_quantize_scaled_transposed_cuda_initialize = scaled_transposed(
            x, scale, values, amax, values_t, context,
        ), traits = TRAITS;

    /// The same, and the transposed copy.
    "xentile_fp8_quantize_scaled_transposed", Execute:
        fn xentile_fp8_quantize_scaled_transposed_cuda = scaled_transposed(
            x, scale, values, amax, values_t, context,
        ), traits = TRAITS;

    /// Loads what finds amax.
    "xentile_fp8_quantize_amax", Initialize: fn xentile_fp8_quantize_amax_cuda_initialize = amax(
        x, amax, context,
    ), traits = TRAITS;

    /// amax of each row.
    "xentile_fp8_quantize_amax", Execute: fn xentile_fp8_quantize_amax_cuda = amax(
        x, amax, context,
    ), traits = TRAITS;
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
    check("scales", scales.dims(), &of_scales(x.dims(), blocks), x.dims())?;
    let format = format(values.dtype())?;
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
    let turned = turned(x.dims());
    check("values", values.dims(), x.dims(), x.dims())?;
    check("scales", scales.dims(), &of_scales(x.dims(), blocks), x.dims())?;
    check("values_t", values_t.dims(), &turned, x.dims())?;
    check("scales_t", scales_t.dims(), &of_scales(&turned, blocks), x.dims())?;
    let format = format(values.dtype())?;
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

fn scaled(x: Any, scale: Floats, values: AnyMut, amax: FloatsMut, context: Context) -> Result {
    let shape = shape(x.dims(), 1)?;
    let dtype = to_dtype("x", x.dtype())?;
    let leading = &x.dims()[..x.dims().len() - 1];
    check_scale(scale.dims(), leading)?;
    check("values", values.dims(), x.dims(), x.dims())?;
    check("amax", amax.dims(), leading, x.dims())?;
    let format = format(values.dtype())?;
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
    check("values_t", values_t.dims(), &turned(x.dims()), x.dims())?;
    let format = format(values.dtype())?;
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

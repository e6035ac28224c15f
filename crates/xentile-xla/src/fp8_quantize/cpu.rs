//! FP8 quantisation on the CPU.

use xentile::fp8_quantize::{Format, Fp8Quantize, QuantizeShape};
use xentile_cpu::Isa;
use xentile_cpu::fp8_quantize::{Kernel, Launch, Quantized};
use xla_ffi::{
    ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, BufferMut, F8E4M3FN, F8E5M2, Result, ThreadPool,
};

use super::{
    Options, check, check_format, check_scale, format, given, shape, shape_scales, transposed,
};
use crate::arguments::invalid;
use crate::cpu::{Pool, ask_for_huge_pages};
use crate::dtype::with_element;
use crate::target::target_list;

target_list! {
    HOST;

    super::QUANTIZE: fn xentile_fp8_quantize_host = quantize(x, values, scales, options, pool);
    super::QUANTIZE_TRANSPOSED: fn xentile_fp8_quantize_transposed_host = quantize_transposed(
        x, values, scales, values_t, scales_t, options, pool,
    );
    super::SCALED: fn xentile_fp8_quantize_scaled_host = scaled(x, scale, values, amax, pool);
    super::SCALED_TRANSPOSED: fn xentile_fp8_quantize_scaled_transposed_host = scaled_transposed(
        x, scale, values, amax, values_t, pool,
    );
    super::AMAX: fn xentile_fp8_quantize_amax_host = amax(x, amax, pool);
}

/// The bits of values, to be written.
fn bits<'a>(name: &str, values: AnyBufferMut<'a>, of: Format) -> Result<&'a mut [u8]> {
    check_format(name, values.dtype(), of)?;
    let bits = match of {
        Format::E4M3Fn => F8E4M3FN::bits_mut(values.typed::<_, ANY_RANK>()?.into_slice()),
        Format::E5M2 => F8E5M2::bits_mut(values.typed::<_, ANY_RANK>()?.into_slice()),
    };
    ask_for_huge_pages(bits);
    Ok(bits)
}

fn kernel<'a>(options: Fp8Quantize, shape: QuantizeShape, pool: &'a Pool<'a>) -> Kernel<'a> {
    Kernel::new(options, shape, Launch { isa: Isa::detect(), pool })
}

fn quantize(
    x: AnyBuffer,
    values: AnyBufferMut,
    scales: BufferMut<f32>,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let Options { blocks, power_of_two } = options;
    let shape = shape(x.dims(), if blocks.rows == 1 { 1 } else { 2 })?;
    check("values", values.dims(), x.dims(), x.dims())?;
    check("scales", scales.dims(), &shape_scales(x.dims(), blocks), x.dims())?;
    let format = format("values", values.dtype())?;
    let (values, scales) = (bits("values", values, format)?, scales.into_slice());
    let Some(shape) = shape else {
        scales.fill(1.0);
        return Ok(());
    };
    let pool = Pool(pool);
    let kernel = kernel(Fp8Quantize { format, power_of_two }, shape, &pool);
    with_element!(x.dtype(), "x", E => {
        let x = x.typed::<E, ANY_RANK>()?;
        kernel.quantize(blocks, x.as_slice(), Quantized { values, scales }).map_err(invalid)
    })
}

fn quantize_transposed(
    x: AnyBuffer,
    values: AnyBufferMut,
    scales: BufferMut<f32>,
    values_t: AnyBufferMut,
    scales_t: BufferMut<f32>,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let Options { blocks, power_of_two } = options;
    let shape = shape(x.dims(), 2)?;
    let transposed = transposed(x.dims());
    check("values", values.dims(), x.dims(), x.dims())?;
    check("scales", scales.dims(), &shape_scales(x.dims(), blocks), x.dims())?;
    check("values_t", values_t.dims(), &transposed, x.dims())?;
    check("scales_t", scales_t.dims(), &shape_scales(&transposed, blocks), x.dims())?;
    let format = format("values", values.dtype())?;
    let (values, scales) = (bits("values", values, format)?, scales.into_slice());
    let (values_t, scales_t) = (bits("values_t", values_t, format)?, scales_t.into_slice());
    let Some(shape) = shape else {
        scales.fill(1.0);
        scales_t.fill(1.0);
        return Ok(());
    };
    let pool = Pool(pool);
    let kernel = kernel(Fp8Quantize { format, power_of_two }, shape, &pool);
    with_element!(x.dtype(), "x", E => {
        let x = x.typed::<E, ANY_RANK>()?;
        let straight = Quantized { values, scales };
        let transposed = Quantized { values: values_t, scales: scales_t };
        kernel.quantize_transposed(blocks, x.as_slice(), straight, transposed).map_err(invalid)
    })
}

fn scaled(
    x: AnyBuffer,
    scale: Buffer<f32>,
    values: AnyBufferMut,
    amax: BufferMut<f32>,
    pool: ThreadPool,
) -> Result {
    let shape = shape(x.dims(), 1)?;
    let leading = &x.dims()[..x.dims().len() - 1];
    check_scale(scale.dims(), leading)?;
    check("values", values.dims(), x.dims(), x.dims())?;
    check("amax", amax.dims(), leading, x.dims())?;
    let format = format("values", values.dtype())?;
    let (values, amax) = (bits("values", values, format)?, amax.into_slice());
    let Some(shape) = shape else {
        amax.fill(0.0);
        return Ok(());
    };
    let pool = Pool(pool);
    let kernel = kernel(given(format), shape, &pool);
    with_element!(x.dtype(), "x", E => {
        let x = x.typed::<E, ANY_RANK>()?;
        kernel.scaled(x.as_slice(), &scale, values, amax).map_err(invalid)
    })
}

fn scaled_transposed(
    x: AnyBuffer,
    scale: Buffer<f32>,
    values: AnyBufferMut,
    amax: BufferMut<f32>,
    values_t: AnyBufferMut,
    pool: ThreadPool,
) -> Result {
    let shape = shape(x.dims(), 2)?;
    let leading = &x.dims()[..x.dims().len() - 1];
    check_scale(scale.dims(), &leading[..leading.len() - 1])?;
    check("values", values.dims(), x.dims(), x.dims())?;
    check("amax", amax.dims(), leading, x.dims())?;
    check("values_t", values_t.dims(), &transposed(x.dims()), x.dims())?;
    let format = format("values", values.dtype())?;
    let (values, amax) = (bits("values", values, format)?, amax.into_slice());
    let values_t = bits("values_t", values_t, format)?;
    let Some(shape) = shape else {
        amax.fill(0.0);
        return Ok(());
    };
    let pool = Pool(pool);
    let kernel = kernel(given(format), shape, &pool);
    with_element!(x.dtype(), "x", E => {
        let x = x.typed::<E, ANY_RANK>()?;
        kernel.scaled_transposed(x.as_slice(), &scale, values, amax, values_t).map_err(invalid)
    })
}

fn amax(x: AnyBuffer, amax: BufferMut<f32>, pool: ThreadPool) -> Result {
    let shape = shape(x.dims(), 1)?;
    check("amax", amax.dims(), &x.dims()[..x.dims().len() - 1], x.dims())?;
    let amax = amax.into_slice();
    let Some(shape) = shape else {
        amax.fill(0.0);
        return Ok(());
    };
    let pool = Pool(pool);
    let kernel = kernel(given(Format::E4M3Fn), shape, &pool);
    with_element!(x.dtype(), "x", E => {
        kernel.amax(x.typed::<E, ANY_RANK>()?.as_slice(), amax).map_err(invalid)
    })
}

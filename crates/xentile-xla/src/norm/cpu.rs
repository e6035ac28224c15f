//! RMSNorm and LayerNorm on the CPU.

use xentile::Element;
use xentile::norm::{Norm, NormShape};
use xentile_cpu::Isa;
use xentile_cpu::norm::{Gradient, Kernel, Launch, PartialSums, Statistics, Weight};
use xla_ffi::{
    ANY_RANK, Aliased, AnyBuffer, AnyBufferMut, Buffer, BufferMut, DType, MayAlias, Result,
    ThreadPool,
};

use super::{
    LayerOptions, RmsOptions, check_alike, check_columns, check_like, check_rows, partial_sums,
    shape,
};
use crate::arguments::invalid;
use crate::cpu::{Pool, ask_for_huge_pages, in_out};
use crate::dtype::{self, with_element};
use crate::target::target_list;

target_list! {
    HOST;

    super::RMS_FORWARD: fn xentile_rms_norm_forward_host = forward(
        x, weight, y, rstd, options, pool,
    );
    super::RMS_ADD_FORWARD: fn xentile_rms_norm_add_forward_host = add_forward(
        x, residual, weight, y, sum, rstd, options, pool,
    );
    super::RMS_BACKWARD: fn xentile_rms_norm_backward_host = backward(
        x, weight, rstd, dy, dx, dweight, options, pool,
    );
    super::RMS_ADD_BACKWARD: fn xentile_rms_norm_add_backward_host = add_backward(
        x, weight, rstd, dy, dsum, dx, dweight, options, pool,
    );
    super::LAYER_FORWARD: fn xentile_layer_norm_forward_host = layer_forward(
        x, weight, bias, y, mean, rstd, options, pool,
    );
    super::LAYER_BACKWARD: fn xentile_layer_norm_backward_host = layer_backward(
        x, weight, mean, rstd, dy, dx, dweight, dbias, options, pool,
    );
}

fn forward(
    x: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    y: AnyBufferMut,
    rstd: BufferMut<f32>,
    options: RmsOptions,
    pool: ThreadPool,
) -> Result {
    let forward = Forward { x, residual: None, weight, bias: None, y, mean: None, rstd };
    forward.run(options.0, pool)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn add_forward(
    x: MayAlias<AnyBuffer>,
    residual: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    y: AnyBufferMut,
    sum: AnyBufferMut,
    rstd: BufferMut<f32>,
    options: RmsOptions,
    pool: ThreadPool,
) -> Result {
    let residual = Some((residual, sum));
    Forward { x, residual, weight, bias: None, y, mean: None, rstd }.run(options.0, pool)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn layer_forward(
    x: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    bias: AnyBuffer,
    y: AnyBufferMut,
    mean: BufferMut<f32>,
    rstd: BufferMut<f32>,
    options: LayerOptions,
    pool: ThreadPool,
) -> Result {
    let (bias, mean) = (Some(bias), Some(mean));
    Forward { x, residual: None, weight, bias, y, mean, rstd }.run(options.0, pool)
}

/// The arrays of a forward pass.
struct Forward<'a> {
    x: MayAlias<AnyBuffer<'a>>,
    /// The residual, and the output for its sum with x.
    residual: Option<(MayAlias<AnyBuffer<'a>>, AnyBufferMut<'a>)>,
    weight: AnyBuffer<'a>,
    bias: Option<AnyBuffer<'a>>,
    y: AnyBufferMut<'a>,
    mean: Option<BufferMut<'a, f32>>,
    rstd: BufferMut<'a, f32>,
}

impl Forward<'_> {
    fn run(self, norm: Norm, pool: ThreadPool) -> Result {
        let Self { x, residual, weight, bias, y, mean, rstd } = self;
        let shape = shape(x.dims())?;
        check_columns(x.dims(), "weight", weight.dims())?;
        check_like(x.dims(), &[("y", y.dims())])?;
        if let Some((residual, sum)) = &residual {
            check_like(x.dims(), &[("residual", residual.dims()), ("sum", sum.dims())])?;
        }
        if let Some(bias) = &bias {
            check_columns(x.dims(), "bias", bias.dims())?;
        }
        let statistics = [("mean", mean.as_ref()), ("rstd", Some(&rstd))];
        for (name, statistic) in statistics {
            statistic.map_or(Ok(()), |all| check_rows(x.dims(), name, all.dims()))?;
        }
        let pool = Pool(pool);
        let kernel = kernel(norm, shape, weight, &pool)?;
        let bias = match bias {
            Some(bias) if bias.dtype() != weight.dtype() => {
                return Err(dtype::wrong("bias", bias.dtype(), &weight.dtype().to_string()));
            }
            bias => bias.map(|bias| columns("bias", bias)).transpose()?,
        };
        with_element!(x.dtype(), "x", E => {
            let x = in_out(x.typed::<E, ANY_RANK>()?.with(y.typed::<E, ANY_RANK>()?)?);
            let residual = match residual {
                Some((residual, sum)) => {
                    let sum = sum.typed::<E, ANY_RANK>()?;
                    Some(in_out(residual.typed::<E, ANY_RANK>()?.with(sum)?))
                }
                None => None,
            };
            let mean = mean.map(BufferMut::into_slice).unwrap_or_default();
            let statistics = Statistics { mean, rstd: rstd.into_slice() };
            kernel.forward(x, residual, bias, statistics).map_err(invalid)
        })
    }
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    x: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    rstd: Buffer<f32>,
    dy: MayAlias<AnyBuffer>,
    dx: AnyBufferMut,
    dweight: BufferMut<f32>,
    options: RmsOptions,
    pool: ThreadPool,
) -> Result {
    let (mean, dsum, dbias) = (None, None, None);
    Backward { x, weight, mean, rstd, dy, dsum, dx, dweight, dbias }.run(options.0, pool)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn add_backward(
    x: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    rstd: Buffer<f32>,
    dy: MayAlias<AnyBuffer>,
    dsum: AnyBuffer,
    dx: AnyBufferMut,
    dweight: BufferMut<f32>,
    options: RmsOptions,
    pool: ThreadPool,
) -> Result {
    let (mean, dsum, dbias) = (None, Some(dsum), None);
    Backward { x, weight, mean, rstd, dy, dsum, dx, dweight, dbias }.run(options.0, pool)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn layer_backward(
    x: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    mean: Buffer<f32>,
    rstd: Buffer<f32>,
    dy: MayAlias<AnyBuffer>,
    dx: AnyBufferMut,
    dweight: BufferMut<f32>,
    dbias: BufferMut<f32>,
    options: LayerOptions,
    pool: ThreadPool,
) -> Result {
    let (mean, dsum, dbias) = (Some(mean), None, Some(dbias));
    Backward { x, weight, mean, rstd, dy, dsum, dx, dweight, dbias }.run(options.0, pool)
}

/// The arrays of a backward pass.
struct Backward<'a> {
    x: MayAlias<AnyBuffer<'a>>,
    weight: AnyBuffer<'a>,
    mean: Option<Buffer<'a, f32>>,
    rstd: Buffer<'a, f32>,
    dy: MayAlias<AnyBuffer<'a>>,
    dsum: Option<AnyBuffer<'a>>,
    dx: AnyBufferMut<'a>,
    dweight: BufferMut<'a, f32>,
    dbias: Option<BufferMut<'a, f32>>,
}

impl Backward<'_> {
    fn run(self, norm: Norm, pool: ThreadPool) -> Result {
        let Self { x, weight, mean, rstd, dy, dsum, dx, dweight, dbias } = self;
        let shape = shape(x.dims())?;
        check_columns(x.dims(), "weight", weight.dims())?;
        for (name, statistic) in [("mean", mean.as_ref()), ("rstd", Some(&rstd))] {
            statistic.map_or(Ok(()), |all| check_rows(x.dims(), name, all.dims()))?;
        }
        check_like(x.dims(), &[("dy", dy.dims()), ("dx", dx.dims())])?;
        if let Some(dsum) = &dsum {
            check_like(x.dims(), &[("dsum", dsum.dims())])?;
        }
        let [groups, blocks] = partial_sums(x.dims(), "dweight", dweight.dims())?;
        if let Some(dbias) = &dbias {
            check_alike(("dbias", dbias.dims()), ("dweight", dweight.dims()))?;
        }
        let pool = Pool(pool);
        let kernel = kernel(norm, shape, weight, &pool)?;
        with_element!(x.dtype(), "x", E => {
            let dsum = dsum.map(AnyBuffer::typed::<E, ANY_RANK>).transpose()?;
            let (x, dy) = (x.typed::<E, ANY_RANK>()?, dy.typed::<E, ANY_RANK>()?);
            let gradient = places(x, dy, dx.typed::<E, ANY_RANK>()?)?;
            let sums = dweight.into_slice();
            let dbias = dbias.map(BufferMut::into_slice).unwrap_or_default();
            ask_for_huge_pages(sums);
            ask_for_huge_pages(dbias);
            let mean = mean.as_ref().map(Buffer::as_slice).unwrap_or_default();
            let statistics = Statistics { mean, rstd: rstd.as_slice() };
            let dsum = dsum.as_ref().map(Buffer::as_slice);
            let partial = PartialSums { sums, groups, blocks };
            kernel.backward(gradient, statistics, dsum, partial, dbias).map_err(invalid)
        })
    }
}

fn kernel<'a>(
    norm: Norm,
    shape: NormShape,
    weight: AnyBuffer<'a>,
    pool: &'a Pool<'a>,
) -> Result<Kernel<'a>> {
    let weight = columns("weight", weight)?;
    Kernel::new(norm, shape, weight, Launch { isa: Isa::detect(), pool }).map_err(invalid)
}

/// The memory of x, dy and dx.
pub(crate) fn places<'a, E: Element + xla_ffi::Element>(
    x: MayAlias<Buffer<'a, E>>,
    dy: MayAlias<Buffer<'a, E>>,
    dx: BufferMut<'a, E>,
) -> Result<Gradient<'a, E>> {
    if x.is_shared() {
        let dy = dy.apart()?.as_slice();
        return Ok(match x.with(dx)? {
            Aliased::InPlace(x) => Gradient::InPlaceOfX { x, dy },
            Aliased::Apart { argument: x, result: dx } => Gradient::Apart { x, dy, dx },
        });
    }
    let x = x.apart()?.as_slice();
    Ok(match dy.with(dx)? {
        Aliased::InPlace(dy) => Gradient::InPlaceOfDy { x, dy },
        Aliased::Apart { argument: dy, result: dx } => {
            ask_for_huge_pages(dx);
            Gradient::Apart { x, dy, dx }
        }
    })
}

/// The weight or bias `name`, of any dtype.
pub(crate) fn columns<'a>(name: &str, array: AnyBuffer<'a>) -> Result<Weight<'a>> {
    Ok(match array.dtype() {
        DType::F32 => Weight::F32(array.typed::<_, ANY_RANK>()?.as_slice()),
        DType::Bf16 => Weight::Bf16(array.typed::<_, ANY_RANK>()?.as_slice()),
        DType::F16 => Weight::F16(array.typed::<_, ANY_RANK>()?.as_slice()),
        other => return Err(dtype::wrong(name, other, dtype::ELEMENTS)),
    })
}

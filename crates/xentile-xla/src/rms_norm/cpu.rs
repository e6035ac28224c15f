//! RMSNorm on the CPU.

use xentile::Element;
use xentile::rms_norm::NormShape;
use xentile_cpu::Isa;
use xentile_cpu::rms_norm::{Gradient, Kernel, Launch, PartialSums, Weight};
use xla_ffi::{
    ANY_RANK, Aliased, AnyBuffer, AnyBufferMut, Buffer, BufferMut, DType, MayAlias, Result,
    ThreadPool,
};

use super::{Options, check_like, check_rstd, check_weight, invalid, partial_sums, shape};
use crate::cpu::{Pool, ask_for_huge_pages, in_out};
use crate::dtype::{self, with_element};
use crate::table::{HOST, target_list};

target_list! {
    HOST;

    /// The norm of each row, and its rstd.
    "xentile_rms_norm_forward", Execute: fn xentile_rms_norm_forward_host = forward(
        x, weight, y, rstd, options, pool,
    );

    /// The same of a sum with a residual, which is a result too.
    "xentile_rms_norm_add_forward", Execute: fn xentile_rms_norm_add_forward_host = add_forward(
        x, residual, weight, y, sum, rstd, options, pool,
    );

    /// dx and partial sums of dweight, from the rstd that forward gave.
    "xentile_rms_norm_backward", Execute: fn xentile_rms_norm_backward_host = backward(
        x, weight, rstd, dy, dx, dweight, options, pool,
    );

    /// The same for a sum with a residual, whose cotangent is added.
    "xentile_rms_norm_add_backward", Execute: fn xentile_rms_norm_add_backward_host = add_backward(
        x, weight, rstd, dy, dsum, dx, dweight, options, pool,
    );
}

fn forward(
    x: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    y: AnyBufferMut,
    rstd: BufferMut<f32>,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let shape = shape(x.dims())?;
    check_weight(x.dims(), weight.dims())?;
    check_like(x.dims(), &[("y", y.dims())])?;
    check_rstd(x.dims(), rstd.dims())?;
    let pool = Pool(pool);
    let kernel = kernel(options, shape, weight, &pool)?;
    with_element!(x.dtype(), "x", E => {
        let x = in_out(x.typed::<E, ANY_RANK>()?.with(y.typed::<E, ANY_RANK>()?)?);
        kernel.forward(x, rstd.into_slice()).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn add_forward(
    x: MayAlias<AnyBuffer>,
    residual: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    y: AnyBufferMut,
    sum: AnyBufferMut,
    rstd: BufferMut<f32>,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let shape = shape(x.dims())?;
    let like = [("residual", residual.dims()), ("y", y.dims()), ("sum", sum.dims())];
    check_like(x.dims(), &like)?;
    check_weight(x.dims(), weight.dims())?;
    check_rstd(x.dims(), rstd.dims())?;
    let pool = Pool(pool);
    let kernel = kernel(options, shape, weight, &pool)?;
    with_element!(x.dtype(), "x", E => {
        let x = in_out(x.typed::<E, ANY_RANK>()?.with(y.typed::<E, ANY_RANK>()?)?);
        let sum = sum.typed::<E, ANY_RANK>()?;
        let residual = in_out(residual.typed::<E, ANY_RANK>()?.with(sum)?);
        kernel.add_forward(x, residual, rstd.into_slice()).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    x: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    rstd: Buffer<f32>,
    dy: MayAlias<AnyBuffer>,
    dx: AnyBufferMut,
    dweight: BufferMut<f32>,
    options: Options,
    pool: ThreadPool,
) -> Result {
    gradients(x, weight, rstd, dy, None, dx, dweight, options, pool)
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
    options: Options,
    pool: ThreadPool,
) -> Result {
    gradients(x, weight, rstd, dy, Some(dsum), dx, dweight, options, pool)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn gradients(
    x: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    rstd: Buffer<f32>,
    dy: MayAlias<AnyBuffer>,
    dsum: Option<AnyBuffer>,
    dx: AnyBufferMut,
    dweight: BufferMut<f32>,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let shape = shape(x.dims())?;
    check_weight(x.dims(), weight.dims())?;
    check_rstd(x.dims(), rstd.dims())?;
    check_like(x.dims(), &[("dy", dy.dims()), ("dx", dx.dims())])?;
    if let Some(dsum) = &dsum {
        check_like(x.dims(), &[("dsum", dsum.dims())])?;
    }
    let [groups, blocks] = partial_sums(x.dims(), dweight.dims())?;
    let pool = Pool(pool);
    let kernel = kernel(options, shape, weight, &pool)?;
    with_element!(x.dtype(), "x", E => {
        let dsum = dsum.map(AnyBuffer::typed::<E, ANY_RANK>).transpose()?;
        let (x, dy) = (x.typed::<E, ANY_RANK>()?, dy.typed::<E, ANY_RANK>()?);
        let gradient = places(x, dy, dx.typed::<E, ANY_RANK>()?)?;
        let sums = dweight.into_slice();
        ask_for_huge_pages(sums);
        let dsum = dsum.as_ref().map(Buffer::as_slice);
        let partial = PartialSums { sums, groups, blocks };
        kernel.backward(gradient, &rstd, dsum, partial).map_err(invalid)
    })
}

/// Where dx lies.
fn places<'a, E: Element + xla_ffi::Element>(
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

fn kernel<'a>(
    options: Options,
    shape: NormShape,
    weight: AnyBuffer<'a>,
    pool: &'a Pool<'a>,
) -> Result<Kernel<'a>> {
    let weight = match weight.dtype() {
        DType::F32 => Weight::F32(weight.typed::<_, ANY_RANK>()?.as_slice()),
        DType::Bf16 => Weight::Bf16(weight.typed::<_, ANY_RANK>()?.as_slice()),
        DType::F16 => Weight::F16(weight.typed::<_, ANY_RANK>()?.as_slice()),
        other => return Err(dtype::wrong("weight", other, dtype::ELEMENTS)),
    };
    Kernel::new(options.0, shape, weight, Launch { isa: Isa::detect(), pool }).map_err(invalid)
}

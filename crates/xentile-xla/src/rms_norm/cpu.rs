//! RMSNorm on the CPU.

use xentile::rms_norm::NormShape;
use xentile_cpu::Isa;
use xentile_cpu::rms_norm::{Kernel, Launch, PartialSums};
use xla_ffi::{ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, BufferMut, MayAlias, Result, ThreadPool};

use super::Options;
use crate::cpu::{Pool, ask_for_huge_pages, in_out};
use crate::dtype::with_element;
use crate::norm::cpu::{columns, places};
use crate::norm::{check_columns, check_like, check_rows, invalid, partial_sums, shape};
use crate::target::target_list;

target_list! {
    HOST;

    super::FORWARD: fn xentile_rms_norm_forward_host = forward(x, weight, y, rstd, options, pool);
    super::ADD_FORWARD: fn xentile_rms_norm_add_forward_host = add_forward(
        x, residual, weight, y, sum, rstd, options, pool,
    );
    super::BACKWARD: fn xentile_rms_norm_backward_host = backward(
        x, weight, rstd, dy, dx, dweight, options, pool,
    );
    super::ADD_BACKWARD: fn xentile_rms_norm_add_backward_host = add_backward(
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
    check_columns(x.dims(), "weight", weight.dims())?;
    check_like(x.dims(), &[("y", y.dims())])?;
    check_rows(x.dims(), "rstd", rstd.dims())?;
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
    check_columns(x.dims(), "weight", weight.dims())?;
    check_rows(x.dims(), "rstd", rstd.dims())?;
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
    check_columns(x.dims(), "weight", weight.dims())?;
    check_rows(x.dims(), "rstd", rstd.dims())?;
    check_like(x.dims(), &[("dy", dy.dims()), ("dx", dx.dims())])?;
    if let Some(dsum) = &dsum {
        check_like(x.dims(), &[("dsum", dsum.dims())])?;
    }
    let [groups, blocks] = partial_sums(x.dims(), "dweight", dweight.dims())?;
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

fn kernel<'a>(
    options: Options,
    shape: NormShape,
    weight: AnyBuffer<'a>,
    pool: &'a Pool<'a>,
) -> Result<Kernel<'a>> {
    let weight = columns("weight", weight)?;
    Kernel::new(options.0, shape, weight, Launch { isa: Isa::detect(), pool }).map_err(invalid)
}

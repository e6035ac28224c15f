//! LayerNorm on the CPU.

use xentile::layer_norm::NormShape;
use xentile_cpu::Isa;
use xentile_cpu::layer_norm::{Kernel, Launch, PartialSums, Statistics};
use xla_ffi::{ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, BufferMut, MayAlias, Result, ThreadPool};

use super::Options;
use crate::cpu::{Pool, ask_for_huge_pages, in_out};
use crate::dtype::{self, with_element};
use crate::norm::cpu::{columns, places};
use crate::norm::{
    check_alike, check_columns, check_like, check_rows, invalid, partial_sums, shape,
};
use crate::target::target_list;

target_list! {
    HOST;

    super::FORWARD: fn xentile_layer_norm_forward_host = forward(
        x, weight, bias, y, mean, rstd, options, pool,
    );
    super::BACKWARD: fn xentile_layer_norm_backward_host = backward(
        x, weight, mean, rstd, dy, dx, dweight, dbias, options, pool,
    );
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn forward(
    x: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    bias: AnyBuffer,
    y: AnyBufferMut,
    mean: BufferMut<f32>,
    rstd: BufferMut<f32>,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let shape = shape(x.dims())?;
    check_columns(x.dims(), "weight", weight.dims())?;
    check_columns(x.dims(), "bias", bias.dims())?;
    check_like(x.dims(), &[("y", y.dims())])?;
    check_rows(x.dims(), "mean", mean.dims())?;
    check_rows(x.dims(), "rstd", rstd.dims())?;
    let pool = Pool(pool);
    let kernel = kernel(options, shape, weight, &pool)?;
    if bias.dtype() != weight.dtype() {
        return Err(dtype::wrong("bias", bias.dtype(), &weight.dtype().to_string()));
    }
    let bias = columns("bias", bias)?;
    with_element!(x.dtype(), "x", E => {
        let x = in_out(x.typed::<E, ANY_RANK>()?.with(y.typed::<E, ANY_RANK>()?)?);
        let into = Statistics { mean: mean.into_slice(), rstd: rstd.into_slice() };
        kernel.forward(x, Some(bias), into).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    x: MayAlias<AnyBuffer>,
    weight: AnyBuffer,
    mean: Buffer<f32>,
    rstd: Buffer<f32>,
    dy: MayAlias<AnyBuffer>,
    dx: AnyBufferMut,
    dweight: BufferMut<f32>,
    dbias: BufferMut<f32>,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let shape = shape(x.dims())?;
    check_columns(x.dims(), "weight", weight.dims())?;
    check_rows(x.dims(), "mean", mean.dims())?;
    check_rows(x.dims(), "rstd", rstd.dims())?;
    check_like(x.dims(), &[("dy", dy.dims()), ("dx", dx.dims())])?;
    let [groups, blocks] = partial_sums(x.dims(), "dweight", dweight.dims())?;
    check_alike(("dbias", dbias.dims()), ("dweight", dweight.dims()))?;
    let pool = Pool(pool);
    let kernel = kernel(options, shape, weight, &pool)?;
    with_element!(x.dtype(), "x", E => {
        let (x, dy) = (x.typed::<E, ANY_RANK>()?, dy.typed::<E, ANY_RANK>()?);
        let gradient = places(x, dy, dx.typed::<E, ANY_RANK>()?)?;
        let (sums, of_bias) = (dweight.into_slice(), dbias.into_slice());
        ask_for_huge_pages(sums);
        ask_for_huge_pages(of_bias);
        let of_rows = Statistics { mean: &mean[..], rstd: &rstd[..] };
        kernel
            .backward(gradient, of_rows, PartialSums { sums, groups, blocks }, of_bias)
            .map_err(invalid)
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

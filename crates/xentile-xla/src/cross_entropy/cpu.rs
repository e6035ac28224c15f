//! Cross-entropy on the CPU.

use xentile::{Element, Labels, LogitsShape};
use xentile_cpu::Isa;
use xentile_cpu::cross_entropy::{
    Cotangents, DistributionOutputs, EntropyCotangents, Kernel, Launch, SavedLse, TokenOutputs,
    default_tile,
};
use xla_ffi::{
    ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, BufferMut, DType, MayAlias, Result, ThreadPool,
};

use super::{Options, Requested, shape_of, wrong_labels};
use crate::arguments::invalid;
use crate::cpu::{Pool, in_out};
use crate::dtype::with_element;
use crate::target::target_list;

target_list! {
    HOST;

    super::FORWARD: fn xentile_cross_entropy_forward_host = forward(
        logits, labels, loss, logps, lse, lse_low, options, every_token, pool,
    );
    super::BACKWARD: fn xentile_cross_entropy_backward_host = backward(
        logits, labels, lse, lse_low, dloss, dlogps, dlse, dlogits, options, pool,
    );
    super::FUSED: fn xentile_cross_entropy_fused_host = fused(
        logits, labels, dloss, loss, lse, lse_low, dlogits, options, every_token, pool,
    );
    super::DISTRIBUTION: fn xentile_cross_entropy_distribution_host = distribution(
        logits, labels, loss, logps, lse, lse_low, entropy, highest, argmax, options, every_token,
        requested, pool,
    );
    super::DISTRIBUTION_FUSED: fn xentile_cross_entropy_distribution_fused_host =
        distribution_fused(
        logits, labels, dloss, loss, lse, lse_low, entropy, highest, argmax, dlogits, options,
        every_token, requested, pool,
    );
    super::DISTRIBUTION_BACKWARD: fn xentile_cross_entropy_distribution_backward_host =
        distribution_backward(
        logits, labels, lse, lse_low, entropy, dloss, dlogps, dlse, dentropy, dlogits, options,
        pool,
    );
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn forward(
    logits: AnyBuffer,
    labels: AnyBuffer,
    loss: BufferMut<f32>,
    logps: BufferMut<f32>,
    lse: BufferMut<f32>,
    lse_low: BufferMut<f32>,
    options: Options,
    every_token: bool,
    pool: ThreadPool,
) -> Result {
    let shape = shape_of!(FORWARD: logits, labels, loss, logps, lse, lse_low)?;
    let labels = to_labels(labels)?;
    let outputs = TokenOutputs {
        loss: Some(loss.into_slice()),
        logps: Some(logps.into_slice()),
        lse: Some(lse.into_slice()),
        lse_low: Some(lse_low.into_slice()),
        zero_masked: !every_token,
    };
    let pool = Pool(pool);
    with_element!(logits.dtype(), "logits", E => {
        let logits = logits.typed::<E, ANY_RANK>()?;
        kernel::<E>(&options, shape, labels, &pool)?.forward(&logits, outputs).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    logits: MayAlias<AnyBuffer>,
    labels: AnyBuffer,
    lse: Buffer<f32>,
    lse_low: Buffer<f32>,
    dloss: Buffer<f32>,
    dlogps: Buffer<f32>,
    dlse: Buffer<f32>,
    dlogits: AnyBufferMut,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let shape = shape_of!(BACKWARD: logits, labels, lse, lse_low, dloss, dlogps, dlse, dlogits)?;
    let labels = to_labels(labels)?;
    let saved = SavedLse { lse: &lse, lse_low: Some(&lse_low) };
    let cotangents = Cotangents { loss: Some(&dloss), logps: Some(&dlogps), lse: Some(&dlse) };
    let pool = Pool(pool);
    with_element!(logits.dtype(), "logits", E => {
        let dlogits = dlogits.typed::<E, ANY_RANK>()?;
        let logits = in_out(logits.typed::<E, ANY_RANK>()?.with(dlogits)?);
        let kernel = kernel::<E>(&options, shape, labels, &pool)?;
        kernel.backward(logits, saved, cotangents).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn fused(
    logits: MayAlias<AnyBuffer>,
    labels: AnyBuffer,
    dloss: Buffer<f32>,
    loss: BufferMut<f32>,
    lse: BufferMut<f32>,
    lse_low: BufferMut<f32>,
    dlogits: AnyBufferMut,
    options: Options,
    every_token: bool,
    pool: ThreadPool,
) -> Result {
    let shape = shape_of!(FUSED: logits, labels, dloss, loss, lse, lse_low, dlogits)?;
    let labels = to_labels(labels)?;
    let outputs = TokenOutputs {
        loss: Some(loss.into_slice()),
        logps: None,
        lse: Some(lse.into_slice()),
        lse_low: Some(lse_low.into_slice()),
        zero_masked: !every_token,
    };
    let pool = Pool(pool);
    with_element!(logits.dtype(), "logits", E => {
        let dlogits = dlogits.typed::<E, ANY_RANK>()?;
        let logits = in_out(logits.typed::<E, ANY_RANK>()?.with(dlogits)?);
        let kernel = kernel::<E>(&options, shape, labels, &pool)?;
        kernel.fused(logits, &dloss, outputs).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn distribution(
    logits: AnyBuffer,
    labels: AnyBuffer,
    loss: BufferMut<f32>,
    logps: BufferMut<f32>,
    lse: BufferMut<f32>,
    lse_low: BufferMut<f32>,
    entropy: BufferMut<f32>,
    highest: BufferMut<f32>,
    argmax: BufferMut<i32>,
    options: Options,
    every_token: bool,
    _: Requested,
    pool: ThreadPool,
) -> Result {
    let shape = shape_of!(
        DISTRIBUTION: logits, labels, loss, logps, lse, lse_low, entropy, highest, argmax
    )?;
    let labels = to_labels(labels)?;
    let outputs = TokenOutputs {
        loss: Some(loss.into_slice()),
        logps: Some(logps.into_slice()),
        lse: Some(lse.into_slice()),
        lse_low: Some(lse_low.into_slice()),
        zero_masked: !every_token,
    };
    let of = distribution_outputs(entropy, highest, argmax);
    let pool = Pool(pool);
    with_element!(logits.dtype(), "logits", E => {
        let logits = logits.typed::<E, ANY_RANK>()?;
        let kernel = kernel::<E>(&options, shape, labels, &pool)?;
        kernel.distribution(&logits, outputs, of).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn distribution_fused(
    logits: MayAlias<AnyBuffer>,
    labels: AnyBuffer,
    dloss: Buffer<f32>,
    loss: BufferMut<f32>,
    lse: BufferMut<f32>,
    lse_low: BufferMut<f32>,
    entropy: BufferMut<f32>,
    highest: BufferMut<f32>,
    argmax: BufferMut<i32>,
    dlogits: AnyBufferMut,
    options: Options,
    every_token: bool,
    _: Requested,
    pool: ThreadPool,
) -> Result {
    let shape = shape_of!(
        DISTRIBUTION_FUSED:
        logits, labels, dloss, loss, lse, lse_low, entropy, highest, argmax, dlogits
    )?;
    let labels = to_labels(labels)?;
    let outputs = TokenOutputs {
        loss: Some(loss.into_slice()),
        logps: None,
        lse: Some(lse.into_slice()),
        lse_low: Some(lse_low.into_slice()),
        zero_masked: !every_token,
    };
    let of = distribution_outputs(entropy, highest, argmax);
    let pool = Pool(pool);
    with_element!(logits.dtype(), "logits", E => {
        let dlogits = dlogits.typed::<E, ANY_RANK>()?;
        let logits = in_out(logits.typed::<E, ANY_RANK>()?.with(dlogits)?);
        let kernel = kernel::<E>(&options, shape, labels, &pool)?;
        kernel.distribution_fused(logits, &dloss, outputs, of).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn distribution_backward(
    logits: MayAlias<AnyBuffer>,
    labels: AnyBuffer,
    lse: Buffer<f32>,
    lse_low: Buffer<f32>,
    entropy: Buffer<f32>,
    dloss: Buffer<f32>,
    dlogps: Buffer<f32>,
    dlse: Buffer<f32>,
    dentropy: Buffer<f32>,
    dlogits: AnyBufferMut,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let shape = shape_of!(
        DISTRIBUTION_BACKWARD:
        logits, labels, lse, lse_low, entropy, dloss, dlogps, dlse, dentropy, dlogits
    )?;
    let labels = to_labels(labels)?;
    let saved = SavedLse { lse: &lse, lse_low: Some(&lse_low) };
    let cotangents = Cotangents { loss: Some(&dloss), logps: Some(&dlogps), lse: Some(&dlse) };
    let of_entropy = EntropyCotangents { entropy: &entropy, dentropy: &dentropy };
    let pool = Pool(pool);
    with_element!(logits.dtype(), "logits", E => {
        let dlogits = dlogits.typed::<E, ANY_RANK>()?;
        let logits = in_out(logits.typed::<E, ANY_RANK>()?.with(dlogits)?);
        let kernel = kernel::<E>(&options, shape, labels, &pool)?;
        kernel.distribution_backward(logits, saved, cotangents, of_entropy).map_err(invalid)
    })
}

/// The outputs about each token's distribution.
fn distribution_outputs<'a>(
    entropy: BufferMut<'a, f32>,
    highest: BufferMut<'a, f32>,
    argmax: BufferMut<'a, i32>,
) -> DistributionOutputs<'a> {
    let (entropy, highest) = (entropy.into_slice(), highest.into_slice());
    DistributionOutputs { entropy, highest, argmax: argmax.into_slice() }
}

/// The kernel for logits of `E`. A label out of range makes its token NaN, since a program cannot
/// fail over what it computed.
fn kernel<'a, E: Element>(
    options: &Options,
    shape: LogitsShape,
    labels: Labels<'a>,
    pool: &'a Pool<'a>,
) -> Result<Kernel<'a>> {
    let tile = options.tile(default_tile::<E>(shape.vocab()))?;
    let launch = Launch { isa: Isa::detect(), tile: Some(tile), pool };
    Kernel::with_unchecked_labels(options.contract, shape, labels, launch).map_err(invalid)
}

pub(crate) fn to_labels(labels: AnyBuffer<'_>) -> Result<Labels<'_>> {
    match labels.dtype() {
        DType::S32 => Ok(Labels::I32(labels.typed::<i32, ANY_RANK>()?.as_slice())),
        DType::S64 => Ok(Labels::I64(labels.typed::<i64, ANY_RANK>()?.as_slice())),
        other => Err(wrong_labels(other)),
    }
}

//! Cross-entropy on NVIDIA GPUs.

use std::ptr::null_mut;

use xentile::LogitsShape;
use xentile_cuda::cross_entropy::{
    Cotangents, DistributionOutputs, EntropyCotangents, Kernel, Labels, Pass, SavedLse,
    TokenOutputs,
};
use xla_ffi::{BufferMut, Context, DType, OnDevice, Result, Stage};

use super::{Options, Requested, shape_of, wrong_labels};
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, check_result, failed, to_dtype};
use crate::target::target_list;

target_list! {
    CUDA;

    super::FORWARD: fn xentile_cross_entropy_forward_cuda,
        initialize xentile_cross_entropy_forward_cuda_initialize = forward(
        logits, labels, loss, logps, lse, lse_low, options, every_token, context,
    );
    super::BACKWARD: fn xentile_cross_entropy_backward_cuda,
        initialize xentile_cross_entropy_backward_cuda_initialize = backward(
        logits, labels, lse, lse_low, dloss, dlogps, dlse, dlogits, options, context,
    );
    super::FUSED: fn xentile_cross_entropy_fused_cuda,
        initialize xentile_cross_entropy_fused_cuda_initialize = fused(
        logits, labels, dloss, loss, lse, lse_low, dlogits, options, every_token, context,
    );
    super::DISTRIBUTION: fn xentile_cross_entropy_distribution_cuda,
        initialize xentile_cross_entropy_distribution_cuda_initialize = distribution(
        logits, labels, loss, logps, lse, lse_low, entropy, highest, argmax, options, every_token,
        requested, context,
    );
    super::DISTRIBUTION_FUSED: fn xentile_cross_entropy_distribution_fused_cuda,
        initialize xentile_cross_entropy_distribution_fused_cuda_initialize = distribution_fused(
        logits, labels, dloss, loss, lse, lse_low, entropy, highest, argmax, dlogits, options,
        every_token, requested, context,
    );
    super::DISTRIBUTION_BACKWARD: fn xentile_cross_entropy_distribution_backward_cuda,
        initialize xentile_cross_entropy_distribution_backward_cuda_initialize =
        distribution_backward(
        logits, labels, lse, lse_low, entropy, dloss, dlogps, dlse, dentropy, dlogits, options,
        context,
    );
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn forward(
    logits: Any,
    labels: Any,
    loss: FloatsMut,
    logps: FloatsMut,
    lse: FloatsMut,
    lse_low: FloatsMut,
    options: Options,
    every_token: bool,
    context: Context,
) -> Result {
    let shape = shape_of!(FORWARD: logits, labels, loss, logps, lse, lse_low)?;
    let call = Call::new(&options, shape, logits, labels, context)?;
    let outputs = TokenOutputs {
        loss: loss.as_ptr().cast(),
        logps: logps.as_ptr().cast(),
        lse: lse.as_ptr().cast(),
        lse_low: lse_low.as_ptr().cast(),
        zero_masked: !every_token,
    };
    call.run(Pass::Forward, |kernel, stream| {
        // SAFETY: XLA's stream and buffers, whose shapes were checked.
        unsafe { kernel.forward(stream, logits.as_ptr(), call.labels, outputs) }
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    logits: Any,
    labels: Any,
    lse: Floats,
    lse_low: Floats,
    dloss: Floats,
    dlogps: Floats,
    dlse: Floats,
    dlogits: AnyMut,
    options: Options,
    context: Context,
) -> Result {
    let shape = shape_of!(BACKWARD: logits, labels, lse, lse_low, dloss, dlogps, dlse, dlogits)?;
    let call = Call::new(&options, shape, logits, labels, context)?;
    check_result(("logits", logits), ("dlogits", &dlogits))?;
    let saved = SavedLse { lse: lse.as_ptr().cast(), lse_low: lse_low.as_ptr().cast() };
    let cotangents = Cotangents {
        loss: dloss.as_ptr().cast(),
        logps: dlogps.as_ptr().cast(),
        lse: dlse.as_ptr().cast(),
    };
    let matrices = (logits.as_ptr().cast_const(), dlogits.as_ptr());
    call.run(Pass::Backward, |kernel, stream| {
        // SAFETY: XLA's stream and buffers, whose shapes were checked.
        unsafe { kernel.backward(stream, matrices, call.labels, saved, cotangents) }
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn fused(
    logits: Any,
    labels: Any,
    dloss: Floats,
    loss: FloatsMut,
    lse: FloatsMut,
    lse_low: FloatsMut,
    dlogits: AnyMut,
    options: Options,
    every_token: bool,
    context: Context,
) -> Result {
    let shape = shape_of!(FUSED: logits, labels, dloss, loss, lse, lse_low, dlogits)?;
    let call = Call::new(&options, shape, logits, labels, context)?;
    check_result(("logits", logits), ("dlogits", &dlogits))?;
    let outputs = TokenOutputs {
        loss: loss.as_ptr().cast(),
        logps: null_mut(),
        lse: lse.as_ptr().cast(),
        lse_low: lse_low.as_ptr().cast(),
        zero_masked: !every_token,
    };
    let (matrices, dloss) = ((logits.as_ptr().cast_const(), dlogits.as_ptr()), dloss.as_ptr());
    call.run(Pass::Fused, |kernel, stream| {
        // SAFETY: XLA's stream and buffers, whose shapes were checked.
        unsafe { kernel.fused(stream, matrices, call.labels, dloss.cast(), outputs) }
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn distribution(
    logits: Any,
    labels: Any,
    loss: FloatsMut,
    logps: FloatsMut,
    lse: FloatsMut,
    lse_low: FloatsMut,
    entropy: FloatsMut,
    highest: FloatsMut,
    argmax: OnDevice<BufferMut<i32>>,
    options: Options,
    every_token: bool,
    requested: Requested,
    context: Context,
) -> Result {
    let shape = shape_of!(
        DISTRIBUTION: logits, labels, loss, logps, lse, lse_low, entropy, highest, argmax
    )?;
    let call = Call::new(&options, shape, logits, labels, context)?;
    let outputs = TokenOutputs {
        loss: loss.as_ptr().cast(),
        logps: logps.as_ptr().cast(),
        lse: lse.as_ptr().cast(),
        lse_low: lse_low.as_ptr().cast(),
        zero_masked: !every_token,
    };
    let of = requested.of(distribution_outputs(entropy, Some(highest), argmax));
    call.run_with(
        // SAFETY: XLA's stream.
        |kernel, stream| unsafe { kernel.load_distribution(Pass::Forward, stream) },
        |kernel, stream| {
            // SAFETY: XLA's stream and buffers, whose shapes were checked.
            unsafe { kernel.distribution(stream, logits.as_ptr(), call.labels, outputs, of) }
        },
    )
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn distribution_fused(
    logits: Any,
    labels: Any,
    dloss: Floats,
    loss: FloatsMut,
    lse: FloatsMut,
    lse_low: FloatsMut,
    entropy: FloatsMut,
    highest: FloatsMut,
    argmax: OnDevice<BufferMut<i32>>,
    dlogits: AnyMut,
    options: Options,
    every_token: bool,
    requested: Requested,
    context: Context,
) -> Result {
    let shape = shape_of!(
        DISTRIBUTION_FUSED:
        logits, labels, dloss, loss, lse, lse_low, entropy, highest, argmax, dlogits
    )?;
    let call = Call::new(&options, shape, logits, labels, context)?;
    check_result(("logits", logits), ("dlogits", &dlogits))?;
    let outputs = TokenOutputs {
        loss: loss.as_ptr().cast(),
        logps: null_mut(),
        lse: lse.as_ptr().cast(),
        lse_low: lse_low.as_ptr().cast(),
        zero_masked: !every_token,
    };
    let of = requested.of(distribution_outputs(entropy, Some(highest), argmax));
    let (matrices, dloss) = ((logits.as_ptr().cast_const(), dlogits.as_ptr()), dloss.as_ptr());
    call.run_with(
        // SAFETY: XLA's stream.
        |kernel, stream| unsafe { kernel.load_distribution(Pass::Fused, stream) },
        |kernel, stream| {
            // SAFETY: XLA's stream and buffers, whose shapes were checked.
            unsafe {
                let (labels, dloss) = (call.labels, dloss.cast());
                kernel.distribution_fused(stream, matrices, labels, dloss, outputs, of)
            }
        },
    )
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn distribution_backward(
    logits: Any,
    labels: Any,
    lse: Floats,
    lse_low: Floats,
    entropy: Floats,
    dloss: Floats,
    dlogps: Floats,
    dlse: Floats,
    dentropy: Floats,
    dlogits: AnyMut,
    options: Options,
    context: Context,
) -> Result {
    let shape = shape_of!(
        DISTRIBUTION_BACKWARD:
        logits, labels, lse, lse_low, entropy, dloss, dlogps, dlse, dentropy, dlogits
    )?;
    let call = Call::new(&options, shape, logits, labels, context)?;
    check_result(("logits", logits), ("dlogits", &dlogits))?;
    let saved = SavedLse { lse: lse.as_ptr().cast(), lse_low: lse_low.as_ptr().cast() };
    let cotangents = Cotangents {
        loss: dloss.as_ptr().cast(),
        logps: dlogps.as_ptr().cast(),
        lse: dlse.as_ptr().cast(),
    };
    let of_entropy =
        EntropyCotangents { entropy: entropy.as_ptr().cast(), dentropy: dentropy.as_ptr().cast() };
    let matrices = (logits.as_ptr().cast_const(), dlogits.as_ptr());
    call.run_with(
        // SAFETY: XLA's stream.
        |kernel, stream| unsafe { kernel.load_distribution(Pass::Backward, stream) },
        |kernel, stream| {
            // SAFETY: XLA's stream and buffers, whose shapes were checked.
            unsafe {
                kernel.distribution_backward(
                    stream,
                    matrices,
                    call.labels,
                    saved,
                    cotangents,
                    of_entropy,
                )
            }
        },
    )
}

/// The outputs about each token's distribution.
pub(crate) fn distribution_outputs(
    entropy: FloatsMut,
    highest: Option<FloatsMut>,
    argmax: OnDevice<BufferMut<i32>>,
) -> DistributionOutputs {
    DistributionOutputs {
        entropy: entropy.as_ptr().cast(),
        highest: highest.map_or(null_mut(), |highest| highest.as_ptr().cast()),
        argmax: argmax.as_ptr().cast(),
    }
}

impl Requested {
    /// Returns the outputs that are requested, and null for others.
    pub(crate) fn of(self, outputs: DistributionOutputs) -> DistributionOutputs {
        let DistributionOutputs { entropy, highest, argmax } = outputs;
        let entropy = if self.entropy { entropy } else { null_mut() };
        let (highest, argmax) =
            if self.argmax { (highest, argmax) } else { (null_mut(), null_mut()) };
        DistributionOutputs { entropy, highest, argmax }
    }
}

/// Labels of either width.
pub(crate) fn to_labels(labels: Any) -> Result<Labels> {
    match labels.dtype() {
        DType::S32 => Ok(Labels::I32(labels.as_ptr().cast())),
        DType::S64 => Ok(Labels::I64(labels.as_ptr().cast())),
        other => Err(wrong_labels(other)),
    }
}

/// What every pass has.
struct Call<'a> {
    kernel: Kernel,
    labels: Labels,
    tokens: usize,
    context: Context<'a>,
}

impl<'a> Call<'a> {
    fn new(
        options: &Options,
        shape: LogitsShape,
        logits: Any,
        labels: Any,
        context: Context<'a>,
    ) -> Result<Self> {
        let dtype = to_dtype("logits", logits.dtype())?;
        let labels = to_labels(labels)?;
        let [time_block, block_size] = options.extents();
        let kernel = Kernel::new(options.contract, shape, dtype)
            .and_then(|kernel| kernel.with_tile(time_block, block_size))
            .map_err(failed)?;
        Ok(Self { kernel, labels, tokens: shape.tokens(), context })
    }

    /// Loads `pass` or calls `launch` for it, with XLA's stream.
    fn run(
        &self,
        pass: Pass,
        launch: impl FnOnce(&Kernel, *mut std::ffi::c_void) -> xentile_cuda::Result<()>,
    ) -> Result {
        // SAFETY: XLA's stream.
        self.run_with(|kernel, stream| unsafe { kernel.load(pass, stream) }, launch)
    }

    /// Calls `load` or `launch`, with XLA's stream.
    fn run_with(
        &self,
        load: impl FnOnce(&Kernel, *mut std::ffi::c_void) -> xentile_cuda::Result<()>,
        launch: impl FnOnce(&Kernel, *mut std::ffi::c_void) -> xentile_cuda::Result<()>,
    ) -> Result {
        if self.tokens == 0 {
            return Ok(());
        }
        xentile_cuda::available().map_err(failed)?;
        let stream = self.context.stream()?.as_ptr();
        match self.context.stage() {
            Stage::Initialize => load(&self.kernel, stream),
            _ => launch(&self.kernel, stream),
        }
        .map_err(failed)
    }
}

//! A token of each row of logits on NVIDIA GPUs.

use xentile_cuda::sample::{Arrays, Sample};
use xla_ffi::{Buffer, BufferMut, Context, Error, OnDevice, Result, Stage};

use crate::cuda::{Floats, FloatsMut, failed};
use crate::target::target_list;

target_list! {
    CUDA;

    super::SAMPLE: fn xentile_sample_cuda, initialize xentile_sample_cuda_initialize = sample(
        logits, key, step, options, token, logp, context,
    );
}

type Integers<'a> = OnDevice<Buffer<'a, i32>>;

fn sample(
    logits: Floats,
    key: Integers,
    step: Integers,
    options: Floats,
    token: OnDevice<BufferMut<i32>>,
    logp: FloatsMut,
    context: Context,
) -> Result {
    let &[rows, vocab] = logits.dims() else {
        return Err(Error::invalid_argument(format!(
            "`logits` has shape {:?}; it must be [B, V]",
            logits.dims()
        )));
    };
    for (name, dims, right) in [
        ("key", key.dims(), &[rows, 2][..]),
        ("step", step.dims(), &[rows]),
        ("options", options.dims(), &[4]),
        ("token", token.dims(), &[rows]),
        ("logp", logp.dims(), &[rows]),
    ] {
        if dims != right {
            return Err(Error::invalid_argument(format!(
                "`{name}` has shape {dims:?}; it must be {right:?}"
            )));
        }
    }
    let sample = Sample::new(rows, vocab).map_err(failed)?;
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let arrays = Arrays {
        logits: logits.as_ptr().cast_const().cast(),
        keys: key.as_ptr().cast_const().cast(),
        steps: step.as_ptr().cast_const().cast(),
        options: options.as_ptr().cast_const().cast(),
        tokens: token.as_ptr().cast(),
        logps: logp.as_ptr().cast(),
    };
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => sample.load(stream),
            _ => sample.run(stream, arrays),
        }
    };
    outcome.map_err(failed)
}

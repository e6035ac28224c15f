//! A token of each row of logits on NVIDIA GPUs.

use xentile_cuda::sample::{Arrays, Sample};
use xla_ffi::{Buffer, BufferMut, Context, Decoder, OnDevice, Parameter, Result, Stage};

use crate::arguments::{check_shape, given, invalid};
use crate::cuda::{Floats, FloatsMut, failed};
use crate::target::target_list;

target_list! {
    CUDA;

    super::SAMPLE: fn xentile_sample_cuda, initialize xentile_sample_cuda_initialize = sample(
        logits, key, step, start, options, results, context,
    );
}

const _: () = match usize::from_str_radix(super::SAMPLE.bounds[0].2, 10) {
    Ok(most) => assert!(most == Sample::LARGEST_VOCAB, "the declared bound is not the kernel's"),
    Err(_) => panic!("the declared bound is no number"),
};

struct Results<'a> {
    token: OnDevice<BufferMut<'a, i32>>,
    logp: FloatsMut<'a>,
    /// Scratch for the noise of a kernel of many CTAs.
    bounds: Option<FloatsMut<'a>>,
}

impl<'a> Parameter<'a> for Results<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self {
            token: decoder.parameter("token")?,
            logp: decoder.parameter("logp")?,
            bounds: given(decoder, "has_bounds", "bounds")?,
        })
    }
}

type Integers<'a> = OnDevice<Buffer<'a, i32>>;

fn sample(
    logits: Floats,
    key: Integers,
    step: Integers,
    start: Integers,
    options: Floats,
    results: Results,
    context: Context,
) -> Result {
    let Results { token, logp, bounds } = results;
    let &[rows, vocab] = logits.dims() else {
        let dims = logits.dims();
        return Err(invalid(format_args!("`logits` has shape {dims:?}; it must be [B, V]")));
    };
    for (name, dims, right) in [
        ("key", key.dims(), &[rows, 2][..]),
        ("step", step.dims(), &[rows]),
        ("start", start.dims(), &[rows]),
        ("options", options.dims(), &[4]),
        ("token", token.dims(), &[rows]),
        ("logp", logp.dims(), &[rows]),
    ] {
        check_shape(name, dims, right)?;
    }
    if let Some(bounds) = &bounds {
        check_shape("bounds", bounds.dims(), &[rows, vocab])?;
    }
    let sample = Sample::new(rows, vocab).map_err(failed)?;
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let arrays = Arrays {
        logits: logits.as_ptr().cast_const().cast(),
        keys: key.as_ptr().cast_const().cast(),
        steps: step.as_ptr().cast_const().cast(),
        starts: start.as_ptr().cast_const().cast(),
        options: options.as_ptr().cast_const().cast(),
        tokens: token.as_ptr().cast(),
        logps: logp.as_ptr().cast(),
        bounds: bounds.map_or(std::ptr::null_mut(), |bounds| bounds.as_ptr().cast()),
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

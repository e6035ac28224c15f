//! Attention on NVIDIA GPUs.

use std::ptr::{null, null_mut};

use xentile_cuda::flash_attention::decode::{Decode, Partials};
use xentile_cuda::flash_attention::{Attention, Gradients, Layout, Operands, Pass, Saved, Scratch};
use xla_ffi::{Buffer, BufferMut, Context, DType, Decoder, OnDevice, Parameter, Result, Stage};

use super::{Call, Options, Seen, invalid};
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, failed, to_dtype};
use crate::dtype;
use crate::target::target_list;

target_list! {
    CUDA;

    super::FORWARD: fn xentile_flash_attention_forward_cuda,
        initialize xentile_flash_attention_forward_cuda_initialize = forward(
        q, k, v, seen, o, lse, options, context,
    );
    super::BACKWARD: fn xentile_flash_attention_backward_cuda,
        initialize xentile_flash_attention_backward_cuda_initialize = backward(
        q, k, v, seen, o, lse, dout, dlse, dq, dk, dv, others, options, context,
    );
    super::DECODE: fn xentile_flash_attention_decode_cuda,
        initialize xentile_flash_attention_decode_cuda_initialize = decode(
        q, k, v, seen, o, lse, partials, partial_lse, options, chunk_keys, context,
    );
}

/// Results of the backward pass that attributes say that there are.
struct Others<'a> {
    dsinks: Option<OnDevice<BufferMut<'a, f32>>>,
    scratch: Option<FloatsMut<'a>>,
    deterministic: bool,
}

impl<'a> Parameter<'a> for Others<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let has_scratch = decoder.parameter::<Option<i64>>("scratch_columns")?.is_some();
        let dsinks = match has_scratch && !decoder.parameter::<bool>("sinks")? {
            true => None,
            false => decoder.parameter("dsinks")?,
        };
        Ok(Self {
            dsinks,
            scratch: if has_scratch { Some(decoder.parameter("scratch")?) } else { None },
            deterministic: decoder.parameter::<Option<bool>>("deterministic")?.unwrap_or(true),
        })
    }
}

type Integers<'a> = OnDevice<Buffer<'a, i32>>;

/// [`Seen`] without segments.
struct SeenByAll<'a>(Seen<Integers<'a>, Floats<'a>>);

impl<'a> Parameter<'a> for SeenByAll<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let ranges = decoder.parameter("ranges")?;
        let sinks = match decoder.parameter("sinks")? {
            false => None,
            true => Some(decoder.parameter("sinks")?),
        };
        Ok(Self(Seen { ranges, segments: None, sinks }))
    }
}

/// A call that was checked, of arrays of one dtype.
struct Checked<'a> {
    call: Call<'a>,
    attention: Attention,
    operands: Operands,
}

fn checked<'a>(
    [q, k, v]: &'a [Any; 3],
    seen: &Seen<Integers, Floats>,
    options: Options,
) -> Result<Checked<'a>> {
    let call = Call::new(
        [q.dims(), k.dims(), v.dims()],
        seen,
        (|array| array.dims(), |array| array.dims()),
    )?;
    check_dtypes(q.dtype(), [("k", k.dtype()), ("v", v.dtype())])?;
    let layout = match call.leading {
        [.., inner] if options.tokens_first => Layout::TokensFirst { inner: *inner },
        _ => Layout::HeadsFirst,
    };
    let attention = Attention::new(options.attention, call.shape, to_dtype("q", q.dtype())?)
        .and_then(|attention| attention.with_layout(layout))
        .map_err(failed)?;
    let integers = |array: &Integers| array.as_ptr().cast_const().cast::<i32>();
    let segments =
        |index: usize| seen.segments.as_ref().map_or(null(), |all| integers(&all[index]));
    let operands = Operands {
        q: q.as_ptr().cast_const(),
        k: k.as_ptr().cast_const(),
        v: v.as_ptr().cast_const(),
        ranges: integers(&seen.ranges),
        q_segments: segments(0),
        kv_segments: segments(1),
        sinks: seen.sinks.as_ref().map_or(null(), |sinks| sinks.as_ptr().cast_const().cast()),
    };
    Ok(Checked { call, attention, operands })
}

/// Checks that all have the dtype of q.
fn check_dtypes<const N: usize>(q: DType, all: [(&'static str, DType); N]) -> Result {
    match all.into_iter().find(|(_, dtype)| *dtype != q) {
        Some((name, other)) => Err(dtype::wrong(name, other, &q.to_string())),
        None => Ok(()),
    }
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn forward(
    q: Any,
    k: Any,
    v: Any,
    seen: Seen<Integers, Floats>,
    o: AnyMut,
    lse: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    let of = [q, k, v];
    let Checked { call, attention, operands } = checked(&of, &seen, options)?;
    call.check_forward(o.dims(), lse.dims())?;
    check_dtypes(q.dtype(), [("o", o.dtype())])?;
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => attention.load(Pass::Forward, stream),
            _ => attention.forward(stream, operands, o.as_ptr(), lse.as_ptr().cast()),
        }
    };
    outcome.map_err(failed)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn decode(
    q: Any,
    k: Any,
    v: Any,
    seen: SeenByAll,
    o: AnyMut,
    lse: FloatsMut,
    partials: FloatsMut,
    partial_lse: FloatsMut,
    options: Options,
    chunk_keys: i64,
    context: Context,
) -> Result {
    let of = [q, k, v];
    let Checked { call, attention, operands } = checked(&of, &seen.0, options)?;
    call.check_forward(o.dims(), lse.dims())?;
    check_dtypes(q.dtype(), [("o", o.dtype())])?;
    let chunk = usize::try_from(chunk_keys).ok().filter(|&chunk| chunk > 0);
    let chunk = chunk.ok_or_else(|| {
        invalid(format_args!("chunk_keys is {chunk_keys}; it must be at least 1"))
    })?;
    call.check_partials(partials.dims(), partial_lse.dims(), chunk)?;
    let decode = Decode::new(attention, chunk, None).map_err(failed)?;
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let partials = Partials { o: partials.as_ptr().cast(), lse: partial_lse.as_ptr().cast() };
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => decode.load(stream),
            _ => decode.run(stream, operands, o.as_ptr(), lse.as_ptr().cast(), partials),
        }
    };
    outcome.map_err(failed)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    q: Any,
    k: Any,
    v: Any,
    seen: Seen<Integers, Floats>,
    o: Any,
    lse: Floats,
    dout: Any,
    dlse: Floats,
    dq: AnyMut,
    dk: AnyMut,
    dv: AnyMut,
    others: Others,
    options: Options,
    context: Context,
) -> Result {
    let of = [q, k, v];
    let Checked { call, attention, operands } = checked(&of, &seen, options)?;
    call.check_backward(
        [o.dims(), lse.dims(), dout.dims(), dlse.dims()],
        [dq.dims(), dk.dims(), dv.dims()],
        (others.dsinks.as_ref().map(OnDevice::dims), seen.sinks.is_some()),
    )?;
    let scratch = match &others.scratch {
        Some(scratch) => {
            call.check_scratch(scratch.dims(), attention.scratch_words().unwrap_or(0))?;
            Some(Scratch { at: scratch.as_ptr().cast(), has_order: others.deterministic })
        }
        None => None,
    };
    let of_results = [("dq", dq.dtype()), ("dk", dk.dtype()), ("dv", dv.dtype())];
    check_dtypes(q.dtype(), [("o", o.dtype()), ("dout", dout.dtype())])?;
    check_dtypes(q.dtype(), of_results)?;
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let saved = Saved {
        o: o.as_ptr().cast_const(),
        lse: lse.as_ptr().cast_const().cast(),
        dout: dout.as_ptr().cast_const(),
        dlse: dlse.as_ptr().cast_const().cast(),
    };
    let gradients = Gradients {
        q: dq.as_ptr(),
        k: dk.as_ptr(),
        v: dv.as_ptr(),
        sinks: others.dsinks.map_or(null_mut(), |array| array.as_ptr().cast()),
    };
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => attention.load(Pass::Backward, stream),
            _ => attention.backward(stream, operands, saved, gradients, scratch),
        }
    };
    outcome.map_err(failed)
}

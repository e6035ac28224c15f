//! Attention on NVIDIA GPUs.

use std::ptr::{null, null_mut};

use xentile::flash_attention::AttentionShape;
use xentile_cuda::flash_attention::decode::{Decode, Pages, Partials};
use xentile_cuda::flash_attention::{Attention, Gradients, Layout, Operands, Pass, Saved, Scratch};
use xla_ffi::{Buffer, BufferMut, Context, DType, Decoder, OnDevice, Parameter, Result, Stage};

use super::{Call, Options, Seen, check};
use crate::arguments::invalid;
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
    super::PAGED: fn xentile_flash_attention_paged_cuda,
        initialize xentile_flash_attention_paged_cuda_initialize = paged(
        q, k_pages, v_pages, block_tables, seen, o, lse, partials, partial_lse, options, chunk_pages, context,
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
    let chunk = extent("chunk_keys", chunk_keys)?;
    call.check_partials(partials.dims(), partial_lse.dims(), chunk)?;
    let decode = Decode::new(attention, chunk, None).map_err(failed)?;
    run(&decode, operands, &o, &lse, [&partials, &partial_lse], &context)
}

/// Loads kernels, or launches them, for arrays of which the shapes were checked.
fn run(
    decode: &Decode,
    operands: Operands,
    o: &AnyMut,
    lse: &FloatsMut,
    [partials, partial_lse]: [&FloatsMut; 2],
    context: &Context,
) -> Result {
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let partials = Partials { o: partials.as_ptr().cast(), lse: partial_lse.as_ptr().cast() };
    // SAFETY: XLA's stream and buffers.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => decode.load(stream),
            _ => decode.run(stream, operands, o.as_ptr(), lse.as_ptr().cast(), partials),
        }
    };
    outcome.map_err(failed)
}

/// An attribute that is at least 1.
fn extent(name: &str, value: i64) -> Result<usize> {
    let found = usize::try_from(value).ok().filter(|&value| value > 0);
    found.ok_or_else(|| invalid(format_args!("{name} is {value}; it must be at least 1")))
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_tables: Integers,
    seen: SeenByAll,
    o: AnyMut,
    lse: FloatsMut,
    partials: FloatsMut,
    partial_lse: FloatsMut,
    options: Options,
    chunk_pages: i64,
    context: Context,
) -> Result {
    let SeenByAll(seen) = seen;
    // Axes before that of heads are units, which partitioning may put there.
    let (
        Some((leading @ [units @ .., heads], &[texts, group, queries, width])),
        Some((_, &[pool, page_size, _])),
        &[.., value_width],
        &[_, pages],
    ) = (
        q.dims().split_last_chunk(),
        k_pages.dims().split_last_chunk(),
        v_pages.dims(),
        block_tables.dims(),
    )
    else {
        return Err(invalid(format_args!(
            "`q` has shape {:?}, `k_pages` {:?}, `v_pages` {:?} and `block_tables` {:?}; they must be \
             [H, B, G, S, D], [H, P, T, D], [H, P, T, E] and [B, N]",
            q.dims(),
            k_pages.dims(),
            v_pages.dims(),
            block_tables.dims()
        )));
    };
    if units.iter().any(|&unit| unit != 1) {
        return Err(invalid(format_args!(
            "`q` has shape {:?}; axes before [H, B, G, S, D] must be 1",
            q.dims()
        )));
    }
    let heads = *heads;
    check("k_pages", k_pages.dims(), leading, &[pool, page_size, width])?;
    check("v_pages", v_pages.dims(), leading, &[pool, page_size, value_width])?;
    check("block_tables", block_tables.dims(), &[texts], &[pages])?;
    check("ranges", seen.ranges.dims(), &[texts], &[queries, 2])?;
    if let Some(sinks) = &seen.sinks {
        check("sinks", sinks.dims(), leading, &[group])?;
    }
    let rows = [texts, group, queries];
    check("o", o.dims(), leading, &[&rows[..], &[value_width]].concat())?;
    check("lse", lse.dims(), leading, &rows)?;
    let chunk = extent("chunk_pages", chunk_pages)?;
    let of_chunks = [&[pages.div_ceil(chunk)], &rows[..]].concat();
    let partial_o = [&of_chunks[..], &[value_width]].concat();
    check("partials", partials.dims(), leading, &partial_o)?;
    check("partial_lse", partial_lse.dims(), leading, &of_chunks)?;
    check_dtypes(q.dtype(), [("k_pages", k_pages.dtype()), ("v_pages", v_pages.dtype())])?;
    check_dtypes(q.dtype(), [("o", o.dtype())])?;
    if !options.tokens_first {
        return Err(invalid(
            "attribute `tokens_first` is false; heads of keys must lie behind B, P and S",
        ));
    }
    if pool.checked_mul(page_size).is_none_or(|rows| i32::try_from(rows).is_err()) {
        return Err(invalid(format_args!(
            "`k_pages` has {pool} pages of {page_size}; there must be fewer than 2^31 positions"
        )));
    }
    let shape = AttentionShape {
        heads: heads * texts,
        group,
        queries,
        keys: pages.saturating_mul(page_size),
        width,
        value_width,
    };
    shape.validate().map_err(invalid)?;
    let attention = Attention::new(options.attention, shape, to_dtype("q", q.dtype())?)
        .and_then(|attention| attention.with_layout(Layout::TokensFirst { inner: heads }))
        .map_err(failed)?;
    let block_tables = block_tables.as_ptr().cast_const().cast();
    let pages = Pages { block_tables, pages, page_size };
    let chunk = chunk.saturating_mul(page_size);
    let decode = Decode::new(attention, chunk, Some(pages)).map_err(failed)?;
    let operands = Operands {
        q: q.as_ptr().cast_const(),
        k: k_pages.as_ptr().cast_const(),
        v: v_pages.as_ptr().cast_const(),
        ranges: seen.ranges.as_ptr().cast_const().cast(),
        q_segments: null(),
        kv_segments: null(),
        sinks: seen.sinks.as_ref().map_or(null(), |sinks| sinks.as_ptr().cast_const().cast()),
    };
    run(&decode, operands, &o, &lse, [&partials, &partial_lse], &context)
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

//! A token of a decoder on NVIDIA GPUs.

use xentile_cuda::decode_step::{Arrays, DecodeStep, Dims, Extents};
use xla_ffi::{AnyBuffer, Buffer, BufferMut, Context, DType, Error, OnDevice, Result, Stage};

use crate::cuda::{Any, AnyMut, Floats, FloatsMut, failed};
use crate::dtype;
use crate::target::target_list;

target_list! {
    CUDA;

    super::DECODE_STEP: fn xentile_decode_step_cuda,
        initialize xentile_decode_step_cuda_initialize = decode_step(
        packed, embedding, attention_norm, qkv_bias, q_norm, k_norm, mlp_norm, norm, cosines, sines, token, position,
        keys, values, state, logits, next_token, next_logp, new_keys, new_values, new_state, heads, mlp_size, qk_norm,
        has_bias, eps, context,
    );
}

type Integers<'a> = OnDevice<Buffer<'a, i32>>;
type IntegersMut<'a> = OnDevice<BufferMut<'a, i32>>;

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn decode_step(
    packed: Any,
    embedding: Any,
    attention_norm: Any,
    qkv_bias: Any,
    q_norm: Any,
    k_norm: Any,
    mlp_norm: Any,
    norm: Any,
    cosines: Floats,
    sines: Floats,
    token: Integers,
    position: Integers,
    keys: Any,
    values: Any,
    state: Integers,
    logits: FloatsMut,
    next_token: IntegersMut,
    next_logp: FloatsMut,
    new_keys: AnyMut,
    new_values: AnyMut,
    new_state: IntegersMut,
    heads: i64,
    mlp_size: i64,
    qk_norm: bool,
    has_bias: bool,
    eps: f64,
    context: Context,
) -> Result {
    let (&[vocab, hidden_size], &[layers, batch, length, kv_heads, head_dim]) =
        (embedding.dims(), keys.dims())
    else {
        return Err(Error::invalid_argument(format!(
            "`embedding` has shape {:?} and `keys` {:?}; they must be [V, D] and [L, B, S, K, H]",
            embedding.dims(),
            keys.dims()
        )));
    };
    if !(eps > 0.0 && (eps as f32).is_finite()) {
        return Err(Error::invalid_argument(format!(
            "attribute `eps` is {eps}; it must be above 0 and finite in f32"
        )));
    }
    let [heads, mlp_size] = [("heads", heads), ("mlp_size", mlp_size)].map(|(name, value)| {
        usize::try_from(value).map_err(|_| {
            Error::invalid_argument(format!("attribute `{name}` is {value}; it must be at least 1"))
        })
    });
    let (heads, mlp_size) = (heads?, mlp_size?);
    let dims =
        Dims { hidden_size, heads, kv_heads, head_dim, mlp_size, qk_norm, qkv_bias: has_bias };
    let extents = Extents { layers, batch, vocab, length };
    let step = DecodeStep::new(dims, extents, eps as f32).map_err(failed)?;
    let cache = keys.dims();
    for (name, dims, right) in [
        ("packed", packed.dims(), &[step.packed_rows(), DecodeStep::STAGE_ELEMENTS][..]),
        ("attention_norm", attention_norm.dims(), &[layers, hidden_size]),
        ("qkv_bias", qkv_bias.dims(), &[layers, (heads + 2 * kv_heads) * head_dim]),
        ("q_norm", q_norm.dims(), &[layers, head_dim]),
        ("k_norm", k_norm.dims(), &[layers, head_dim]),
        ("mlp_norm", mlp_norm.dims(), &[layers, hidden_size]),
        ("norm", norm.dims(), &[hidden_size]),
        ("cosines", cosines.dims(), &[length, head_dim / 2]),
        ("sines", sines.dims(), &[length, head_dim / 2]),
        ("token", token.dims(), &[batch]),
        ("position", position.dims(), &[batch]),
        ("values", values.dims(), cache),
        ("state", state.dims(), &[step.state_words()]),
        ("logits", logits.dims(), &[batch, vocab]),
        ("next_token", next_token.dims(), &[batch]),
        ("next_logp", next_logp.dims(), &[batch]),
        ("new_keys", new_keys.dims(), cache),
        ("new_values", new_values.dims(), cache),
        ("new_state", new_state.dims(), &[step.state_words()]),
    ] {
        if dims != right {
            return Err(Error::invalid_argument(format!(
                "`{name}` has shape {dims:?}; it must be {right:?}"
            )));
        }
    }
    for (name, array) in [
        ("packed", packed),
        ("embedding", embedding),
        ("attention_norm", attention_norm),
        ("qkv_bias", qkv_bias),
        ("q_norm", q_norm),
        ("k_norm", k_norm),
        ("mlp_norm", mlp_norm),
        ("norm", norm),
        ("keys", keys),
        ("values", values),
    ] {
        check_dtype(name, array.dtype())?;
    }
    check_dtype("new_keys", new_keys.dtype())?;
    check_dtype("new_values", new_values.dtype())?;
    for (name, operand, result) in [
        ("keys", keys.as_ptr().addr(), new_keys.as_ptr().addr()),
        ("values", values.as_ptr().addr(), new_values.as_ptr().addr()),
        ("state", state.as_ptr().addr(), new_state.as_ptr().addr()),
    ] {
        if operand != result {
            return Err(Error::invalid_argument(format!(
                "`new_{name}` does not lie in the place of `{name}`; alias them"
            )));
        }
    }
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let of = |array: OnDevice<AnyBuffer>| array.as_ptr().cast_const();
    let arrays = Arrays {
        packed: of(packed),
        embedding: of(embedding),
        attention_norm: of(attention_norm),
        qkv_bias: of(qkv_bias),
        q_norm: of(q_norm),
        k_norm: of(k_norm),
        mlp_norm: of(mlp_norm),
        norm: of(norm),
        cosines: cosines.as_ptr().cast_const().cast(),
        sines: sines.as_ptr().cast_const().cast(),
        token: token.as_ptr().cast_const().cast(),
        position: position.as_ptr().cast_const().cast(),
        keys: new_keys.as_ptr(),
        values: new_values.as_ptr(),
        state: new_state.as_ptr(),
        logits: logits.as_ptr().cast(),
        best: next_token.as_ptr().cast(),
        best_logp: next_logp.as_ptr().cast(),
    };
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => step.load(stream),
            _ => step.run(stream, arrays),
        }
    };
    outcome.map_err(failed)
}

fn check_dtype(name: &str, dtype: DType) -> Result {
    match dtype {
        DType::Bf16 => Ok(()),
        other => Err(dtype::wrong(name, other, "bf16")),
    }
}

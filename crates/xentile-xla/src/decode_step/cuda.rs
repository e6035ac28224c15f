//! A token of a decoder on NVIDIA GPUs.

use xentile_cuda::decode_step::{Arrays, DecodeStep, Extents};
use xla_ffi::{AnyBuffer, Buffer, BufferMut, Context, DType, Error, OnDevice, Result, Stage};

use crate::cuda::{Any, AnyMut, Floats, FloatsMut, failed};
use crate::dtype;
use crate::target::target_list;

target_list! {
    CUDA;

    super::DECODE_STEP: fn xentile_decode_step_cuda,
        initialize xentile_decode_step_cuda_initialize = decode_step(
        packed, embedding, attention_norm, q_norm, k_norm, mlp_norm, norm, cosines, sines, token, position, keys,
        values, state, logits, next_token, next_logp, new_keys, new_values, new_state, eps, context,
    );
}

type Integers<'a> = OnDevice<Buffer<'a, i32>>;
type IntegersMut<'a> = OnDevice<BufferMut<'a, i32>>;

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn decode_step(
    packed: Any,
    embedding: Any,
    attention_norm: Any,
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
    eps: f64,
    context: Context,
) -> Result {
    let (&[vocab, hidden_size], &[layers, 1, length, kv_heads, 128]) =
        (embedding.dims(), keys.dims())
    else {
        return Err(Error::invalid_argument(format!(
            "`embedding` has shape {:?} and `keys` {:?}; they must be [V, D] and [L, 1, S, K, 128]",
            embedding.dims(),
            keys.dims()
        )));
    };
    if !(eps > 0.0 && (eps as f32).is_finite()) {
        return Err(Error::invalid_argument(format!(
            "attribute `eps` is {eps}; it must be above 0 and finite in f32"
        )));
    }
    let extents = Extents { layers, hidden_size, kv_heads, vocab, length };
    let step = DecodeStep::new(extents, eps as f32).map_err(failed)?;
    let cache = keys.dims();
    for (name, dims, right) in [
        ("packed", packed.dims(), &[step.packed_rows(), DecodeStep::STAGE_ELEMENTS][..]),
        ("attention_norm", attention_norm.dims(), &[layers, hidden_size]),
        ("q_norm", q_norm.dims(), &[layers, 128]),
        ("k_norm", k_norm.dims(), &[layers, 128]),
        ("mlp_norm", mlp_norm.dims(), &[layers, hidden_size]),
        ("norm", norm.dims(), &[hidden_size]),
        ("cosines", cosines.dims(), &[length, 64]),
        ("sines", sines.dims(), &[length, 64]),
        ("token", token.dims(), &[1]),
        ("position", position.dims(), &[1]),
        ("values", values.dims(), cache),
        ("state", state.dims(), &[DecodeStep::STATE_WORDS]),
        ("logits", logits.dims(), &[1, vocab]),
        ("next_token", next_token.dims(), &[1]),
        ("next_logp", next_logp.dims(), &[1]),
        ("new_keys", new_keys.dims(), cache),
        ("new_values", new_values.dims(), cache),
        ("new_state", new_state.dims(), &[DecodeStep::STATE_WORDS]),
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

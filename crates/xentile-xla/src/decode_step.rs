//! A token of a decoder: the shapes of its target, for GPUs alone.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xla_ffi::DType;

use crate::declaration::{
    Alias, ArrayDecl, Declaration, Dtype, F32, Range, S32, Stages, attribute, input, output,
};

const BF16: Dtype = Dtype::OneOf(&[DType::Bf16]);
const CACHE: &str = "L B S K H";

pub(crate) const DECLARATIONS: &[Declaration] = &[DECODE_STEP];

const fn weights(name: &'static str, dims: &'static str) -> ArrayDecl {
    input(name, dims, BF16)
}

pub(crate) const DECODE_STEP: Declaration = Declaration {
    name: c"xentile_decode_step",
    summary: "Logits after one token of each sequence of a decoder, the most probable next token and its \
              log-probability. The cache is updated in place. `state` is zeros before the first call.",
    host: Stages::None,
    operands: &[
        weights("packed", "T 8192"),
        weights("embedding", "V D"),
        weights("attention_norm", "L D"),
        weights("qkv_bias", "L E"),
        weights("q_norm", "L H"),
        weights("k_norm", "L H"),
        weights("mlp_norm", "L D"),
        weights("norm", "D"),
        input("cosines", "S H/2", F32),
        input("sines", "S H/2", F32),
        input("token", "B", S32),
        input("position", "B", S32),
        input("keys", CACHE, BF16),
        input("values", CACHE, BF16),
        input("state", "W", S32),
    ],
    results: &[
        output("logits", "B V", F32),
        output("next_token", "B", S32),
        output("next_logp", "B", F32),
        output("new_keys", CACHE, BF16),
        output("new_values", CACHE, BF16),
        output("new_state", "W", S32),
    ],
    attributes: &[&[
        attribute("heads", Range::Extent),
        attribute("mlp_size", Range::Extent),
        attribute("qk_norm", Range::Bool),
        attribute("has_bias", Range::Bool),
        attribute("eps", Range::Positive),
    ]],
    maps_shared: false,
    aliases: &[
        Alias { operand: "keys", result: "new_keys", always: true },
        Alias { operand: "values", result: "new_values", always: true },
        Alias { operand: "state", result: "new_state", always: true },
    ],
    ..Declaration::BASE
};

//! A token of a decoder at batch 1: the shapes of its target, for GPUs alone.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xla_ffi::DType;

use crate::declaration::{
    Alias, ArrayDecl, Declaration, Dtype, F32, Range, S32, Stages, attribute, input, output,
};

const BF16: Dtype = Dtype::OneOf(&[DType::Bf16]);
const CACHE: &str = "L 1 S K 128";

pub(crate) const DECLARATIONS: &[Declaration] = &[DECODE_STEP];

const fn weights(name: &'static str, dims: &'static str) -> ArrayDecl {
    input(name, dims, BF16)
}

pub(crate) const DECODE_STEP: Declaration = Declaration {
    name: c"xentile_decode_step",
    summary: "Logits after one token of a decoder at batch 1, the most probable next token and its \
              log-probability. The cache is updated in place. `state` is zeros before the first call.",
    host: Stages::None,
    operands: &[
        weights("packed", "T 8192"),
        weights("embedding", "V D"),
        weights("attention_norm", "L D"),
        weights("q_norm", "L 128"),
        weights("k_norm", "L 128"),
        weights("mlp_norm", "L D"),
        weights("norm", "D"),
        input("cosines", "S 64", F32),
        input("sines", "S 64", F32),
        input("token", "1", S32),
        input("position", "1", S32),
        input("keys", CACHE, BF16),
        input("values", CACHE, BF16),
        input("state", "W", S32),
    ],
    results: &[
        output("logits", "1 V", F32),
        output("next_token", "1", S32),
        output("next_logp", "1", F32),
        output("new_keys", CACHE, BF16),
        output("new_values", CACHE, BF16),
        output("new_state", "W", S32),
    ],
    attributes: &[&[attribute("eps", Range::Positive)]],
    maps_shared: false,
    aliases: &[
        Alias { operand: "keys", result: "new_keys", always: true },
        Alias { operand: "values", result: "new_values", always: true },
        Alias { operand: "state", result: "new_state", always: true },
    ],
    ..Declaration::BASE
};

//! A token of each row of logits: the shapes of its target, for GPUs alone.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use crate::declaration::{
    Declaration, F32, Given, Range, S32, Stages, attribute, input, output, scratch,
};

pub(crate) const DECLARATIONS: &[Declaration] = &[SAMPLE];

pub(crate) const SAMPLE: Declaration = Declaration {
    name: c"xentile_sample",
    summary: "Tokens drawn from logits by `options`: temperature, top_k (infinite for none), top_p (1 for none) and \
              min_p (0 for none); and their log-probabilities at the temperature. `key` has the bits of a key of \
              threefry2x32, of which each step + start has its own noise.",
    host: Stages::None,
    operands: &[
        input("logits", "B V", F32),
        input("key", "B 2", S32),
        input("step", "B", S32),
        input("start", "B", S32),
        input("options", "4", F32),
    ],
    results: &[
        output("token", "B", S32),
        output("logp", "B", F32),
        scratch("bounds", "B V", F32).given(Given::Where("has_bounds")),
    ],
    // Not for rows that fill a GPU, nor where few columns get noise.
    attributes: &[&[attribute("has_bounds", Range::Bool)]],
    bounds: &[("V", 1, "262144")],
    maps_shared: false,
    ..Declaration::BASE
};

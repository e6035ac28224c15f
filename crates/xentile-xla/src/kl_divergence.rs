//! KL divergence of rows of logits from a teacher's: the shapes of its target, for GPUs alone.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use crate::declaration::{
    Alias, Declaration, Dtype, F32, FLOATS, Range, S32, Stages, attribute, gradient, input, output,
};

pub(crate) const DECLARATIONS: &[Declaration] = &[KL_DIVERGENCE];

pub(crate) const KL_DIVERGENCE: Declaration = Declaration {
    name: c"xentile_kl_divergence",
    summary: "Each row's divergence of softmax(student / temperature) from softmax(teacher / temperature), and in rows \
              of dlogits from `first` on the gradient of factor * loss for student; 0 where the factor is 0.",
    host: Stages::None,
    operands: &[
        input("student", "B V", F32),
        input("teacher", "B V", F32),
        input("factor", "B", F32),
        input("first", "1", S32),
        input("dlogits_so_far", "N V", FLOATS),
    ],
    results: &[output("loss", "B", F32), gradient("dlogits", "N V", Dtype::Like("dlogits_so_far"))],
    attributes: &[&[attribute("temperature", Range::Positive)]],
    bounds: &[("B", 1, "N"), ("V", 1, "327680")],
    maps_shared: false,
    aliases: &[Alias { operand: "dlogits_so_far", result: "dlogits", always: true }],
    ..Declaration::BASE
};

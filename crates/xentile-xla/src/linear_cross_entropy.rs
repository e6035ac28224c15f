//! Linear cross-entropy: the shapes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod plan;

use xentile::linear_cross_entropy::{LinearShape, VocabAxis};
use xla_ffi::{Decoder, Result};

use crate::arguments::invalid;
use crate::cross_entropy::{EVERY_TOKEN, OPTIONS};
use crate::declaration::{
    Alias, ArrayDecl, AttributeDecl, Declaration, Dims, Dtype, F32, FLOATS, Given, LABELS, Range,
    S32, Stages, attribute, cotangent, gradient, input, may_alias, output, residual, scratch,
};

const WEIGHT_DIMS: Dims = Dims::By("vocab_axis", &[("0", "V D"), ("1", "D V")]);
const HIDDEN: ArrayDecl = input("hidden", "N D", FLOATS);
const WEIGHT: ArrayDecl = input("weight", "", Dtype::Like("hidden")).by(WEIGHT_DIMS);
const OF_LABELS: ArrayDecl = input("labels", "N", LABELS);
const BIAS: ArrayDecl = input("bias", "V", F32).given(Given::Optional);
const LOSS: ArrayDecl = output("loss", "N", F32);
const LOGPS: ArrayDecl = output("logps", "N", F32);
const LSE: ArrayDecl = residual("lse", "N", F32);
const LSE_LOW: ArrayDecl = residual("lse_low", "N", F32);
const DLOSS: ArrayDecl = cotangent("dloss", "N", F32);
const DLOGPS: ArrayDecl = cotangent("dlogps", "N", F32);
const DLSE: ArrayDecl = cotangent("dlse", "N", F32);
const DHIDDEN: ArrayDecl = gradient("dhidden", "N D", Dtype::LikeOrF32("hidden"));
const DWEIGHT: ArrayDecl = gradient("dweight", "", Dtype::LikeOrF32("weight")).by(WEIGHT_DIMS);
const DBIAS: ArrayDecl = gradient("dbias", "V", F32).given(Given::With("bias"));
/// So many bytes as a plan says.
const SCRATCH: ArrayDecl = scratch("scratch", "B", Dtype::Bytes);
/// The scratch that one call leaves to another.
const HELD: ArrayDecl = residual("held", "B", Dtype::Bytes);
/// Logits that one call leaves to another.
const KEPT: ArrayDecl = residual("kept", "", Dtype::Like("hidden")).by(WEIGHT_DIMS);

/// How the problem is cut.
const CUT: &[AttributeDecl] = &[
    attribute("vocab_axis", Range::OneOf(&[0, 1])),
    attribute("chunk_columns", Range::Extent),
    attribute("chunk_tokens", Range::Extent).cuda_only(),
    attribute("apart_tokens", Range::Extent).absent("one sweep").cuda_only(),
    attribute("apart_columns", Range::Extent).absent("one sweep").cuda_only(),
    attribute("kept_columns", Range::Extent).absent("no logits kept").cuda_only(),
    attribute("kept_slot", Range::Extent).absent("no logits kept").cuda_only(),
    attribute("once_tokens", Range::Extent).absent("all columns in chunks").cuda_only(),
    attribute("once_columns", Range::Extent).absent("all columns in chunks").cuda_only(),
    attribute("wide", Range::Bool).absent("false").cuda_only(),
    attribute("workspace_bytes", Range::Extent).cuda_only(),
];
pub(crate) const DECLARATIONS: &[Declaration] =
    &[FORWARD, BACKWARD, FUSED, HIDDEN_GRADIENT, DISTRIBUTION_FUSED, ADD, KEEP, RESUME];

pub(crate) const FORWARD: Declaration = Declaration {
    name: c"xentile_linear_cross_entropy_forward",
    summary: "loss, logps, lse and lse_low of each token.",
    cuda: Stages::Execute,
    operands: &[HIDDEN, WEIGHT, OF_LABELS, BIAS],
    results: &[LOSS, LOGPS, LSE, LSE_LOW, SCRATCH],
    attributes: &[OPTIONS, CUT, &[EVERY_TOKEN]],
    maps_shared: false,
    ..Declaration::BASE
};

pub(crate) const BACKWARD: Declaration = Declaration {
    name: c"xentile_linear_cross_entropy_backward",
    summary: "dhidden, dweight and dbias, from the lse that forward gave and the cotangents of what it gave.",
    operands: &[HIDDEN, WEIGHT, OF_LABELS, LSE, LSE_LOW, DLOSS, DLOGPS, DLSE, BIAS],
    results: &[DHIDDEN, DWEIGHT, SCRATCH, DBIAS],
    attributes: &[OPTIONS, CUT],
    ..FORWARD
};

pub(crate) const FUSED: Declaration = Declaration {
    name: c"xentile_linear_cross_entropy_fused",
    summary: "loss, lse, lse_low, dhidden, dweight and dbias, from the cotangents of the loss.",
    operands: &[HIDDEN, WEIGHT, OF_LABELS, DLOSS, BIAS],
    results: &[LOSS, LSE, LSE_LOW, DHIDDEN, DWEIGHT, SCRATCH, DBIAS],
    attributes: &[
        OPTIONS,
        CUT,
        &[EVERY_TOKEN, attribute("leaves_hidden", Range::Bool).absent("false").cuda_only()],
    ],
    ..FORWARD
};

pub(crate) const HIDDEN_GRADIENT: Declaration = Declaration {
    name: c"xentile_linear_cross_entropy_hidden",
    summary: "dhidden, from what fused with leaves_hidden left in its dhidden, which is hidden here, and in \
              its scratch, held.",
    host: Stages::None,
    operands: &[HIDDEN, WEIGHT, OF_LABELS, HELD],
    results: &[gradient("dhidden", "N D", Dtype::Like("hidden"))],
    attributes: &[OPTIONS, CUT],
    aliases: &[Alias { operand: "hidden", result: "dhidden", always: true }],
    ..FORWARD
};

pub(crate) const DISTRIBUTION_FUSED: Declaration = Declaration {
    name: c"xentile_linear_cross_entropy_distribution_fused",
    summary: "What fused gives, and entropy and argmax of each token: argmax equals the label where the label \
              has the largest logit, and is any other number elsewhere.",
    host: Stages::None,
    operands: &[HIDDEN, WEIGHT, OF_LABELS, DLOSS, BIAS],
    results: &[
        LOSS,
        LSE,
        LSE_LOW,
        output("entropy", "N", F32),
        output("argmax", "N", S32),
        DHIDDEN,
        DWEIGHT,
        SCRATCH,
        DBIAS,
    ],
    attributes: &[OPTIONS, CUT, &[EVERY_TOKEN, attribute("correct", Range::Bool)]],
    ..FORWARD
};

pub(crate) const ADD: Declaration = Declaration {
    name: c"xentile_linear_cross_entropy_add",
    summary: "What fused gives, with dweight in f32 added to sums, in whose place it lies.",
    host: Stages::None,
    operands: &[HIDDEN, WEIGHT, OF_LABELS, DLOSS, input("sums", "", F32).by(WEIGHT_DIMS), BIAS],
    results: &[
        LOSS,
        LSE,
        LSE_LOW,
        DHIDDEN,
        gradient("dweight", "", F32).by(WEIGHT_DIMS),
        SCRATCH,
        DBIAS,
    ],
    attributes: &[OPTIONS, CUT, &[EVERY_TOKEN]],
    aliases: &[Alias { operand: "sums", result: "dweight", always: true }],
    ..FORWARD
};

pub(crate) const KEEP: Declaration = Declaration {
    name: c"xentile_linear_cross_entropy_keep",
    summary: "What forward gives, and logits, in kept and in the scratch.",
    cuda: Stages::None,
    operands: &[HIDDEN, WEIGHT, OF_LABELS, BIAS],
    results: &[LOSS, LOGPS, LSE, LSE_LOW, KEPT, SCRATCH],
    attributes: &[OPTIONS, CUT, &[EVERY_TOKEN]],
    ..FORWARD
};

pub(crate) const RESUME: Declaration = Declaration {
    name: c"xentile_linear_cross_entropy_resume",
    summary: "What backward gives, from the logits that keep left in kept and in its scratch, held.",
    cuda: Stages::None,
    operands: &[HIDDEN, WEIGHT, OF_LABELS, LSE, LSE_LOW, DLOSS, DLOGPS, DLSE, KEPT, HELD, BIAS],
    results: &[DHIDDEN, DWEIGHT, SCRATCH, DBIAS],
    attributes: &[OPTIONS, CUT],
    aliases: &[may_alias("kept", "dweight"), may_alias("held", "scratch")],
    ..FORWARD
};

/// The attribute `vocab_axis`.
fn vocab_axis(decoder: &mut Decoder) -> Result<VocabAxis> {
    match decoder.parameter("vocab_axis")? {
        0_i64 => Ok(VocabAxis::First),
        1 => Ok(VocabAxis::Last),
        other => Err(invalid(format_args!("attribute vocab_axis is {other}; it must be 0 or 1"))),
    }
}

/// The shape of `hidden` `[N, D]`, `weight` and `labels` `[N]` of these extents.
fn shape(
    hidden: &[usize],
    weight: &[usize],
    labels: &[usize],
    vocab_axis: VocabAxis,
) -> Result<LinearShape> {
    let &[tokens, width] = hidden else {
        return Err(invalid(format_args!("`hidden` has shape {hidden:?}; it must be [N, D]")));
    };
    let axis = 1 - vocab_axis.index();
    let weight = match *weight {
        [rows, columns] if [rows, columns][axis] == width => [rows, columns],
        _ => {
            return Err(invalid(format_args!(
                "`weight` has shape {weight:?}; it must have the {width} columns of `hidden` on axis \
                 {axis}"
            )));
        }
    };
    if hidden.contains(&0) || weight.contains(&0) {
        return Err(invalid(format_args!(
            "`hidden` has shape {hidden:?} and `weight` {weight:?}; no extent may be 0"
        )));
    }
    if labels != [tokens] {
        return Err(invalid(format_args!(
            "`labels` has shape {labels:?}; it must be [{tokens}], one for each row of `hidden`"
        )));
    }
    LinearShape::new([tokens, width], weight, Some(vocab_axis)).map_err(invalid)
}

/// Checks that each array, with its name, has a number for each label.
fn check_tokens(labels: &[usize], arrays: &[(&str, &[usize])]) -> Result {
    match arrays.iter().find(|(_, dims)| *dims != labels) {
        None => Ok(()),
        Some((name, dims)) => Err(invalid(format_args!(
            "`{name}` has shape {dims:?}; it must be {labels:?}, that of `labels`"
        ))),
    }
}

//! Linear attention and the gated delta rule: the attributes and shapes of their targets.
//!
//! GPUs have kernels for bf16, K and V of 64 or 128, and groups of whole chunks of 64 tokens.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xla_ffi::{Decoder, Parameter, Result};

use crate::arguments::{given, invalid};
use crate::declaration::{
    ArrayDecl, AttributeDecl, Declaration, Dtype, F32, FLOATS, Given, Range, attribute, cotangent,
    gradient, input, output, residual, scratch,
};

const LIKE_Q: Dtype = Dtype::Like("q");
const DELTA: Given = Given::Where("delta");
const PLAIN: Given = Given::Unless("delta");
const SHARED: Given = Given::Where("shared");

const Q: ArrayDecl = input("q", "*batch T H K", FLOATS);
const K: ArrayDecl = input("k", "*batch T H K", LIKE_Q);
const V: ArrayDecl = input("v", "*batch T G V", LIKE_Q);
const LOG_DECAY: ArrayDecl = input("g", "*batch T G", F32);
const B: ArrayDecl = input("b", "*batch T G", F32).given(DELTA);
const INITIAL_STATE: ArrayDecl = input("initial_state", "*batch G K V", F32);
/// The state after each group of chunks; the last is the final state.
const STATES: &str = "*batch G T/group_tokens K V";

/// On GPUs, sums of g and b in chunks; with b, what a group of chunks needs: its inverses, the values that enter its states
/// and its states before chunks, which have a high and a low part in the backward pass; without, the gradients of states
/// before groups, and terms of dg. CPUs take all scratch and touch none.
const DECAYS: ArrayDecl = scratch("decays", "*batch G T/64 192", F32);
const INVERSE: ArrayDecl =
    scratch("inverse", "*batch G T/groups_times_chunk 8192", LIKE_Q).given(DELTA);
/// [64, V] and [K, V] in two parts.
const SOLVED: &str = "*batch G T/groups_times_chunk 2 64 V";
const SPLIT_STATES: &str = "*batch G T/groups_times_chunk 2 K V";

/// A group has `group_tokens`, a multiple of 64. `groups_times_chunk` is 64 times the number of groups:
/// T / groups_times_chunk, rounded up, is the number of chunks of a group.
const ATTRIBUTES: &[AttributeDecl] = &[
    attribute("delta", Range::Bool),
    attribute("scale", Range::Finite),
    attribute("group_tokens", Range::Extent),
    attribute("groups_times_chunk", Range::Extent),
];

pub(crate) const DECLARATIONS: &[Declaration] = &[FORWARD, BACKWARD];

pub(crate) const FORWARD: Declaration = Declaration {
    name: c"xentile_linear_attention_forward",
    summary: "Linear attention, or with b the gated delta rule, and the state after each group of chunks.",
    operands: &[Q, K, V, LOG_DECAY, B, INITIAL_STATE],
    results: &[
        output("o", "*batch T G V", LIKE_Q),
        output("states", STATES, F32),
        DECAYS,
        INVERSE,
        scratch("values", "*batch G T/groups_times_chunk 64 V", LIKE_Q).given(DELTA),
        scratch("chunk_states", "*batch G T/groups_times_chunk K V", LIKE_Q).given(DELTA),
    ],
    attributes: &[ATTRIBUTES],
    multiples: &[("G", "H")],
    ..Declaration::BASE
};

pub(crate) const BACKWARD: Declaration = Declaration {
    name: c"xentile_linear_attention_backward",
    summary: "The gradients of all arguments, from the states that forward gave and the cotangents of o and of \
              the final state.",
    operands: &[
        Q,
        K,
        V,
        LOG_DECAY,
        B,
        INITIAL_STATE,
        residual("states", STATES, F32),
        cotangent("do", "*batch T G V", LIKE_Q),
        cotangent("dfinal_state", "*batch G K V", F32),
    ],
    results: &[
        gradient("dq", "*batch T H K", LIKE_Q),
        gradient("dk", "*batch T H K", LIKE_Q),
        gradient("dv", "*batch T G V", LIKE_Q),
        gradient("dg", "*batch T G", F32),
        gradient("db", "*batch T G", F32).given(DELTA),
        gradient("dinitial_state", "*batch G K V", F32),
        DECAYS,
        INVERSE,
        scratch("values", SOLVED, LIKE_Q).given(DELTA),
        scratch("chunk_states", SPLIT_STATES, LIKE_Q).given(DELTA),
        scratch("chunk_dstates", SPLIT_STATES, LIKE_Q).given(DELTA),
        scratch("dvalues_local", "*batch G T/groups_times_chunk 64 V", F32).given(DELTA),
        scratch("dsolved", SOLVED, LIKE_Q).given(DELTA),
        scratch("group_dstates", STATES, F32).given(PLAIN),
        scratch("exponents", "*batch G T/64 256", F32).given(PLAIN),
        scratch("dq_parts", "*batch G T/groups_times_chunk 64 K", F32).given(SHARED),
        scratch("dk_parts", "*batch G T/groups_times_chunk 64 K", F32).given(SHARED),
    ],
    attributes: &[ATTRIBUTES, &[attribute("shared", Range::Bool)]],
    ..FORWARD
};

/// What both passes take, in buffers of any dtype and of f32.
pub(crate) struct Operands<A, F> {
    pub(crate) delta: bool,
    pub(crate) scale: f64,
    pub(crate) group_tokens: i64,
    pub(crate) groups_times_chunk: i64,
    pub(crate) q: A,
    pub(crate) k: A,
    pub(crate) v: A,
    pub(crate) g: F,
    pub(crate) b: Option<F>,
    pub(crate) initial_state: F,
}

/// What the backward pass takes besides.
pub(crate) struct Cotangents<A, F> {
    pub(crate) states: F,
    pub(crate) o: A,
    pub(crate) final_state: F,
}

/// The gradients, in buffers of any dtype and of f32.
pub(crate) struct Gradients<A, F> {
    pub(crate) q: A,
    pub(crate) k: A,
    pub(crate) v: A,
    pub(crate) g: F,
    pub(crate) b: Option<F>,
    pub(crate) initial_state: F,
}

impl<'a, A: Parameter<'a>, F: Parameter<'a>> Parameter<'a> for Operands<A, F> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self {
            delta: decoder.parameter("delta")?,
            scale: decoder.parameter("scale")?,
            group_tokens: decoder.parameter("group_tokens")?,
            groups_times_chunk: decoder.parameter("groups_times_chunk")?,
            q: decoder.parameter("q")?,
            k: decoder.parameter("k")?,
            v: decoder.parameter("v")?,
            g: decoder.parameter("g")?,
            b: given(decoder, "delta", "b")?,
            initial_state: decoder.parameter("initial_state")?,
        })
    }
}

impl<'a, A: Parameter<'a>, F: Parameter<'a>> Parameter<'a> for Cotangents<A, F> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self {
            states: decoder.parameter("states")?,
            o: decoder.parameter("do")?,
            final_state: decoder.parameter("dfinal_state")?,
        })
    }
}

impl<'a, A: Parameter<'a>, F: Parameter<'a>> Parameter<'a> for Gradients<A, F> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self {
            q: decoder.parameter("dq")?,
            k: decoder.parameter("dk")?,
            v: decoder.parameter("dv")?,
            g: decoder.parameter("dg")?,
            b: given(decoder, "delta", "db")?,
            initial_state: decoder.parameter("dinitial_state")?,
        })
    }
}

/// The attribute `scale` in f32.
fn finite(scale: f64) -> Result<f32> {
    let narrow = scale as f32;
    if narrow.is_finite() {
        return Ok(narrow);
    }
    Err(invalid(format_args!("attribute `scale` is {scale}; it must be finite in f32")))
}

//! Causal depthwise convolution: the attributes and shapes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::causal_conv1d::CausalConv1d;
use xla_ffi::{Decoder, Parameter, Result};

use crate::arguments::{check_shape, given, invalid};
use crate::declaration::{
    ArrayDecl, AttributeDecl, Declaration, Dims, Dtype, F32, FLOATS, Given, Range, S32, attribute,
    cotangent, gradient, input, output,
};

/// `*batch`, then the W - 1 tokens before the first.
const STATE: Dims =
    Dims::By("width", &[("2", "*batch 1 C"), ("3", "*batch 2 C"), ("*", "*batch 3 C")]);
const WEIGHT: Dims = Dims::By("width", &[("2", "C 2"), ("3", "C 3"), ("*", "C 4")]);
/// A partial sum for each block of 128 tokens.
const WEIGHT_SUMS: Dims = Dims::By(
    "width",
    &[("2", "*batch T/128 C 2"), ("3", "*batch T/128 C 3"), ("*", "*batch T/128 C 4")],
);

const X: ArrayDecl = input("x", "*batch T C", FLOATS);
const W: ArrayDecl = input("weight", "", FLOATS).by(WEIGHT);
const BIAS: ArrayDecl = input("bias", "C", Dtype::Like("weight")).given(Given::Where("bias"));
const INITIAL_STATE: ArrayDecl =
    input("initial_state", "", Dtype::Like("x")).by(STATE).given(Given::Where("initial_state"));
const SEGMENT_IDS: ArrayDecl =
    input("segment_ids", "*batch T", S32).given(Given::Where("segments"));

const ATTRIBUTES: &[AttributeDecl] = &[
    attribute("width", Range::OneOf(&[2, 3, 4])),
    attribute("silu", Range::Bool),
    attribute("bias", Range::Bool),
    attribute("initial_state", Range::Bool),
    attribute("segments", Range::Bool),
];

pub(crate) const DECLARATIONS: &[Declaration] = &[FORWARD, BACKWARD];

pub(crate) const FORWARD: Declaration = Declaration {
    name: c"xentile_causal_conv1d_forward",
    summary: "The causal depthwise convolution of sequences along T, and SiLU of it on request.",
    operands: &[X, W, BIAS, INITIAL_STATE, SEGMENT_IDS],
    results: &[output("y", "*batch T C", Dtype::Like("x"))],
    attributes: &[ATTRIBUTES],
    ..Declaration::BASE
};

pub(crate) const BACKWARD: Declaration = Declaration {
    name: c"xentile_causal_conv1d_backward",
    summary: "dx, the gradient of the initial state, and sums over blocks of tokens of dweight and dbias.",
    operands: &[
        X,
        W,
        BIAS,
        INITIAL_STATE,
        SEGMENT_IDS,
        cotangent("dy", "*batch T C", Dtype::Like("x")),
    ],
    results: &[
        gradient("dx", "*batch T C", Dtype::Like("x")),
        gradient("dweight", "", F32).by(WEIGHT_SUMS),
        gradient("dbias", "*batch T/128 C", F32).given(Given::Where("bias")),
        gradient("dinitial_state", "", Dtype::Like("x"))
            .by(STATE)
            .given(Given::Where("initial_state")),
    ],
    attributes: &[ATTRIBUTES],
    ..Declaration::BASE
};

/// What both passes take: the attributes, and arrays in buffers of any dtype and of s32.
pub(crate) struct Operands<A, I> {
    width: usize,
    silu: bool,
    pub(crate) x: A,
    pub(crate) weight: A,
    pub(crate) bias: Option<A>,
    pub(crate) state: Option<A>,
    pub(crate) segments: Option<I>,
}

/// The gradients, in buffers of any dtype and of f32.
pub(crate) struct Gradients<A, F> {
    pub(crate) x: A,
    pub(crate) weight: F,
    pub(crate) bias: Option<F>,
    pub(crate) state: Option<A>,
}

impl<'a, A: Parameter<'a>, I: Parameter<'a>> Parameter<'a> for Operands<A, I> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let width: i64 = decoder.parameter("width")?;
        if !(2..=4).contains(&width) {
            return Err(invalid(format_args!("attribute width is {width}; it must be 2, 3 or 4")));
        }
        Ok(Self {
            width: width as usize,
            silu: decoder.parameter("silu")?,
            x: decoder.parameter("x")?,
            weight: decoder.parameter("weight")?,
            bias: given(decoder, "bias", "bias")?,
            state: given(decoder, "initial_state", "initial_state")?,
            segments: given(decoder, "segments", "segment_ids")?,
        })
    }
}

impl<'a, A: Parameter<'a>, F: Parameter<'a>> Parameter<'a> for Gradients<A, F> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self {
            x: decoder.parameter("dx")?,
            weight: decoder.parameter("dweight")?,
            bias: given(decoder, "bias", "dbias")?,
            state: given(decoder, "initial_state", "dinitial_state")?,
        })
    }
}

/// Tells the shape of a kind of buffer.
type DimsOf<B> = fn(&B) -> &[usize];

impl<A, I> Operands<A, I> {
    /// Checks all shapes, which the functions tell of a buffer.
    fn conv(&self, dims: DimsOf<A>, dims_of_integers: DimsOf<I>) -> Result<CausalConv1d> {
        let x = dims(&self.x);
        let [leading @ .., tokens, channels] = x else {
            return Err(invalid(format_args!("`x` has shape {x:?}; it must be [.., T, C]")));
        };
        let conv = CausalConv1d {
            width: self.width,
            silu: self.silu,
            batch: product(leading),
            tokens: *tokens,
            channels: *channels,
        };
        conv.validate().map_err(invalid)?;
        check_shared("weight", dims(&self.weight), leading, &[*channels, self.width])?;
        if let Some(bias) = &self.bias {
            check_shared("bias", dims(bias), leading, &[*channels])?;
        }
        if let Some(state) = &self.state {
            check("initial_state", dims(state), leading, &[self.width - 1, *channels])?;
        }
        if let Some(segments) = &self.segments {
            check("segment_ids", dims_of_integers(segments), leading, &[*tokens])?;
        }
        Ok(conv)
    }
}

impl<A, F> Gradients<A, F> {
    /// Checks all shapes for those of `x`, and of `dy`.
    fn check(
        &self,
        conv: &CausalConv1d,
        [x, dy]: [&[usize]; 2],
        dims: DimsOf<A>,
        dims_of_floats: DimsOf<F>,
    ) -> Result {
        let leading = &x[..x.len() - 2];
        let CausalConv1d { width, tokens, channels, .. } = *conv;
        check("dy", dy, leading, &[tokens, channels])?;
        check("dx", dims(&self.x), leading, &[tokens, channels])?;
        let blocks = conv.blocks();
        check("dweight", dims_of_floats(&self.weight), leading, &[blocks, channels, width])?;
        if let Some(bias) = &self.bias {
            check("dbias", dims_of_floats(bias), leading, &[blocks, channels])?;
        }
        self.state.as_ref().map_or(Ok(()), |state| {
            check("dinitial_state", dims(state), leading, &[width - 1, channels])
        })
    }
}

/// Checks that an array, with its name, is `leading` and then `last`.
fn check(name: &str, dims: &[usize], leading: &[usize], last: &[usize]) -> Result {
    check_shape(name, dims, &[leading, last].concat())
}

/// Checks that an array, with its name, is none or some of the first of `leading` and then `last`.
fn check_shared(name: &str, dims: &[usize], leading: &[usize], last: &[usize]) -> Result {
    match dims.strip_suffix(last) {
        Some(groups) if leading.starts_with(groups) => Ok(()),
        _ => Err(invalid(format_args!(
            "`{name}` has shape {dims:?}; it must be {last:?}, after none or some of the first axes \
             of `x`"
        ))),
    }
}

/// The product of `axes`: an empty one first, because the others alone may multiply to more than fits.
fn product(axes: &[usize]) -> usize {
    if axes.contains(&0) { 0 } else { axes.iter().product() }
}

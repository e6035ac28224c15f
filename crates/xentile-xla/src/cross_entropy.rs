//! Cross-entropy over logits: the attributes and the shapes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::cross_entropy::CrossEntropy;
use xentile::{LogitsShape, Tile};
use xla_ffi::{Attribute, DType, Decoder, Error, FromAttribute, Parameter, Result};

use crate::arguments::invalid;
use crate::declaration::{
    ArrayDecl, AttributeDecl, Declaration, Dtype, F32, FLOATS, LABELS, Range, S32, attribute,
    cotangent, gradient, input, may_alias, output, residual,
};
use crate::{dtype, shapes};

const LOGITS: ArrayDecl = input("logits", "*batch V", FLOATS);
const OF_LABELS: ArrayDecl = input("labels", "*batch", LABELS);
const LOSS: ArrayDecl = output("loss", "*batch", F32);
const LOGPS: ArrayDecl = output("logps", "*batch", F32);
const LSE: ArrayDecl = residual("lse", "*batch", F32);
/// What rounding lse to f32 lost.
const LSE_LOW: ArrayDecl = residual("lse_low", "*batch", F32);
const ENTROPY: ArrayDecl = output("entropy", "*batch", F32);
/// The largest logit.
const HIGHEST: ArrayDecl = output("highest", "*batch", F32);
const ARGMAX: ArrayDecl = output("argmax", "*batch", S32);
const DLOSS: ArrayDecl = cotangent("dloss", "*batch", F32);
const DLOGPS: ArrayDecl = cotangent("dlogps", "*batch", F32);
const DLSE: ArrayDecl = cotangent("dlse", "*batch", F32);
const DLOGITS: ArrayDecl = gradient("dlogits", "*batch V", Dtype::Like("logits"));

/// The attributes of every pass over logits, of cross-entropy and of linear cross-entropy.
pub(crate) const OPTIONS: &[AttributeDecl] = &[
    attribute("ignore_index", Range::Integer),
    attribute("label_smoothing", Range::Between(0.0, 1.0)),
    attribute("z_loss", Range::Between(0.0, f64::INFINITY)),
    attribute("softcap", Range::Positive).absent("none"),
    // From 2^-40 to 2^40.
    attribute("temperature", Range::Between(9.094947017729282e-13, 1099511627776.0)).absent("1"),
    attribute("block_size", Range::Extent).absent("that of the tuned tile"),
    attribute("time_block", Range::Extent).absent("that of the tuned tile"),
];
pub(crate) const EVERY_TOKEN: AttributeDecl = attribute("every_token", Range::Bool);
const FOR_DISTRIBUTION: &[AttributeDecl] = &[
    EVERY_TOKEN,
    attribute("entropy", Range::Bool).absent("true"),
    attribute("argmax", Range::Bool).absent("true"),
];

pub(crate) const DECLARATIONS: &[Declaration] =
    &[FORWARD, BACKWARD, FUSED, DISTRIBUTION, DISTRIBUTION_FUSED, DISTRIBUTION_BACKWARD];

pub(crate) const FORWARD: Declaration = Declaration {
    name: c"xentile_cross_entropy_forward",
    summary: "loss, logps, lse and lse_low of each token.",
    operands: &[LOGITS, OF_LABELS],
    results: &[LOSS, LOGPS, LSE, LSE_LOW],
    attributes: &[OPTIONS, &[EVERY_TOKEN]],
    ..Declaration::BASE
};

pub(crate) const BACKWARD: Declaration = Declaration {
    name: c"xentile_cross_entropy_backward",
    summary: "dlogits, from the lse that forward gave and the cotangents of what it gave.",
    operands: &[LOGITS, OF_LABELS, LSE, LSE_LOW, DLOSS, DLOGPS, DLSE],
    results: &[DLOGITS],
    attributes: &[OPTIONS],
    aliases: &[may_alias("logits", "dlogits")],
    ..Declaration::BASE
};

pub(crate) const FUSED: Declaration = Declaration {
    name: c"xentile_cross_entropy_fused",
    summary: "loss, lse, lse_low and dlogits, from the cotangents of the loss.",
    operands: &[LOGITS, OF_LABELS, DLOSS],
    results: &[LOSS, LSE, LSE_LOW, DLOGITS],
    attributes: &[OPTIONS, &[EVERY_TOKEN]],
    aliases: &[may_alias("logits", "dlogits")],
    ..Declaration::BASE
};

pub(crate) const DISTRIBUTION: Declaration = Declaration {
    name: c"xentile_cross_entropy_distribution",
    summary: "What forward gives, and entropy, highest and argmax of each token.",
    operands: &[LOGITS, OF_LABELS],
    results: &[LOSS, LOGPS, LSE, LSE_LOW, ENTROPY, HIGHEST, ARGMAX],
    attributes: &[OPTIONS, FOR_DISTRIBUTION],
    ..Declaration::BASE
};

pub(crate) const DISTRIBUTION_FUSED: Declaration = Declaration {
    name: c"xentile_cross_entropy_distribution_fused",
    summary: "What distribution gives but logps, and dlogits, from the cotangents of the loss.",
    operands: &[LOGITS, OF_LABELS, DLOSS],
    results: &[LOSS, LSE, LSE_LOW, ENTROPY, HIGHEST, ARGMAX, DLOGITS],
    attributes: &[OPTIONS, FOR_DISTRIBUTION],
    aliases: &[may_alias("logits", "dlogits")],
    ..Declaration::BASE
};

pub(crate) const DISTRIBUTION_BACKWARD: Declaration = Declaration {
    name: c"xentile_cross_entropy_distribution_backward",
    summary: "dlogits, from lse and entropy of distribution and the cotangents of what it gave.",
    operands: &[
        LOGITS,
        OF_LABELS,
        LSE,
        LSE_LOW,
        residual("entropy", "*batch", F32),
        DLOSS,
        DLOGPS,
        DLSE,
        cotangent("dentropy", "*batch", F32),
    ],
    results: &[DLOGITS],
    attributes: &[OPTIONS],
    aliases: &[may_alias("logits", "dlogits")],
    ..Declaration::BASE
};

/// The attributes of every target of cross-entropy, each within its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) contract: CrossEntropy,
    time_block: Option<Extent>,
    block_size: Option<Extent>,
}

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let contract = CrossEntropy {
            ignore_index: decoder.parameter("ignore_index")?,
            label_smoothing: decoder.parameter("label_smoothing")?,
            z_loss: decoder.parameter("z_loss")?,
            softcap: decoder.parameter("softcap")?,
            temperature: decoder.parameter::<Option<f64>>("temperature")?.unwrap_or(1.0),
        };
        contract.validate().map_err(|error| invalid(format_args!("attribute {error}")))?;
        Ok(Self {
            contract,
            time_block: decoder.parameter("time_block")?,
            block_size: decoder.parameter("block_size")?,
        })
    }
}

impl Options {
    /// The tile to work in, where `tuned` is the one for the dtype and the vocabulary.
    pub(crate) fn tile(&self, tuned: Tile) -> Result<Tile> {
        let [time_block, block_size] = self.extents();
        tuned.with(time_block, block_size).map_err(invalid)
    }

    /// `time_block` and `block_size`, where they are given.
    pub(crate) fn extents(&self) -> [Option<usize>; 2] {
        [self.time_block, self.block_size].map(|extent| extent.map(|Extent(extent)| extent))
    }
}

/// Which outputs about a token's distribution a call requests, by default all. It need not write the
/// others.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "CPUs make both"))]
pub(crate) struct Requested {
    pub(crate) entropy: bool,
    /// And the largest logit.
    pub(crate) argmax: bool,
}

impl<'a> Parameter<'a> for Requested {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let entropy: Option<bool> = decoder.parameter("entropy")?;
        let argmax: Option<bool> = decoder.parameter("argmax")?;
        Ok(Self { entropy: entropy.unwrap_or(true), argmax: argmax.unwrap_or(true) })
    }
}

/// An extent, of a tile or a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent(pub(crate) usize);

impl<'a> FromAttribute<'a> for Extent {
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
        let value = i64::from_attribute(attribute)?;
        match usize::try_from(value) {
            Ok(extent @ 1..) => Ok(Self(extent)),
            _ => Err(invalid(format_args!("is {value}; it must be at least 1"))),
        }
    }
}

/// The shape of the first of a call's arrays, `[.., V]`, flattened, if all are as the declaration says.
macro_rules! shape_of {
    ($declaration:ident: $($array:ident),*) => {
        $crate::cross_entropy::shape(&super::$declaration, &[$($array.dims()),*])
    };
}
pub(crate) use shape_of;

/// The shape of `logits`, the first of `arrays`, if the others have the shapes that are declared.
pub(crate) fn shape(declaration: &Declaration, arrays: &[&[usize]]) -> Result<LogitsShape> {
    let logits = arrays[0];
    let Some((&vocab, leading)) = logits.split_last() else {
        return Err(invalid(
            "`logits` has shape []; it must have an axis at least, the vocabulary",
        ));
    };
    if vocab == 0 {
        return Err(invalid(format_args!(
            "`logits` has shape {logits:?}; its last axis, the vocabulary, must be at least 1"
        )));
    }
    shapes::check(declaration, arrays)?;
    // An empty axis first, because the others alone may multiply to more than fits.
    let tokens = if leading.contains(&0) { 0 } else { leading.iter().product() };
    LogitsShape::new(tokens, vocab).map_err(|error| invalid(format_args!("`logits` has {error}")))
}

/// The error for labels of another type than those of the two widths.
pub(crate) fn wrong_labels(dtype: DType) -> Error {
    dtype::wrong("labels", dtype, "s32 or s64")
}

//! Activations: the attributes and the shapes of their targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::activation::{Activation, ActivationShape, Kind, Layout};
use xla_ffi::{Attribute, Decoder, FromAttribute, Parameter, Result};

use crate::arguments::invalid;
use crate::declaration::{
    ArrayDecl, AttributeDecl, Declaration, Dims, Dtype, FLOATS, Range, attribute, cotangent,
    gradient, input, output,
};

/// What x packs.
const PACKED: Dims = Dims::By(
    "layout",
    &[("single", "*batch F"), ("halves", "*batch 2.F"), ("interleaved", "*batch F.2")],
);
const X: ArrayDecl = input("x", "", FLOATS).by(PACKED);

const ATTRIBUTES: &[AttributeDecl] = &[
    attribute("kind", Range::Word(&["silu", "gelu_tanh", "gelu_erf", "relu", "squared_relu"])),
    attribute("layout", Range::Word(&["single", "halves", "interleaved"])),
    attribute("alpha", Range::Positive),
    attribute("up_offset", Range::Finite),
    attribute("limit", Range::Positive).absent("none"),
];

pub(crate) const DECLARATIONS: &[Declaration] = &[FORWARD, BACKWARD, BACKWARD_WITH_Y];

pub(crate) const FORWARD: Declaration = Declaration {
    name: c"xentile_activation_forward",
    summary: "y of x, which packs gate and up where the layout is not single.",
    operands: &[X],
    results: &[output("y", "*batch F", Dtype::Like("x"))],
    attributes: &[ATTRIBUTES],
    ..Declaration::BASE
};

pub(crate) const BACKWARD: Declaration = Declaration {
    name: c"xentile_activation_backward",
    summary: "dx, from x and the cotangent of y.",
    operands: &[X, cotangent("dy", "*batch F", Dtype::Like("x"))],
    results: &[gradient("dx", "", Dtype::Like("x")).by(PACKED)],
    attributes: &[ATTRIBUTES],
    ..Declaration::BASE
};

pub(crate) const BACKWARD_WITH_Y: Declaration = Declaration {
    name: c"xentile_activation_backward_with_y",
    summary: "dx, and y as forward gives it, for a product's gradient that reads y: y need not be kept.",
    results: &[
        gradient("dx", "", Dtype::Like("x")).by(PACKED),
        output("y", "*batch F", Dtype::Like("x")),
    ],
    ..BACKWARD
};

/// The attributes of every target of activations, each within its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options(pub(crate) Activation);

/// A word that names one of a few things.
struct Word<T>(T);

impl<'a, T: std::str::FromStr<Err = xentile::Error>> FromAttribute<'a> for Word<T> {
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
        <&str>::from_attribute(attribute)?.parse().map(Self).map_err(|error| match error {
            xentile::Error::Unknown { value, choices, .. } => {
                invalid(format_args!("is `{value}`; it must be one of {choices}"))
            }
            other => invalid(other),
        })
    }
}

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let options = Activation {
            kind: decoder.parameter::<Word<Kind>>("kind")?.0,
            layout: decoder.parameter::<Word<Layout>>("layout")?.0,
            alpha: decoder.parameter("alpha")?,
            limit: decoder.parameter("limit")?,
            up_offset: decoder.parameter("up_offset")?,
        };
        options.validate().map_err(|error| invalid(format_args!("attribute {error}")))?;
        Ok(Self(options))
    }
}

/// The shape of y, if `of_y` `[.., F]` goes with each of `packed`, `[.., F]`, `[.., 2, F]` of halves or
/// `[.., F, 2]` interleaved; all with their names.
pub(crate) fn shape(
    options: &Activation,
    of_y: (&str, &[usize]),
    packed: &[(&str, &[usize])],
) -> Result<ActivationShape> {
    let (of, dims) = of_y;
    let Some((&columns, leading)) = dims.split_last() else {
        return Err(invalid(format_args!(
            "`{of}` has shape []; it must have an axis at least, the columns"
        )));
    };
    let last: &[usize] = match options.layout {
        Layout::Single => &[columns],
        Layout::Halves => &[2, columns],
        Layout::Interleaved => &[columns, 2],
    };
    let right = [leading, last].concat();
    for (name, found) in packed {
        if *found != right {
            return Err(invalid(format_args!(
                "`{name}` has shape {found:?}; it must be {right:?}, as `{of}` has shape {dims:?} and \
                 the layout is {}",
                options.layout
            )));
        }
    }
    // An empty axis first, because the others alone may multiply to more than fits.
    let rows = if dims.contains(&0) { 0 } else { leading.iter().product() };
    ActivationShape::new(rows, columns).map_err(|error| invalid(format_args!("`{of}` has {error}")))
}

/// Checks that y `[.., F]` has the shape of dy.
pub(crate) fn check_y(dims: &[usize], of_dy: &[usize]) -> Result<()> {
    if dims == of_dy {
        return Ok(());
    }
    Err(invalid(format_args!("`y` has shape {dims:?}; it must be {of_dy:?}, as `dy`")))
}

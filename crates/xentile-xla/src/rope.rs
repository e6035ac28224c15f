//! Rotary position embedding: the attributes and the shapes of its target, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "cuda")]
pub(crate) mod qk_norm;

use xentile::rope::{Layout, Rope, RopeShape};
use xla_ffi::{Decoder, Parameter, Result};

use crate::arguments::invalid;
use crate::declaration::{
    AttributeDecl, Declaration, Dtype, F32, FLOATS, Range, S32, Stages, attribute, cotangent,
    gradient, input, may_alias, output, residual,
};

const INTERLEAVED: AttributeDecl = attribute("interleaved", Range::Bool);

pub(crate) const DECLARATIONS: &[Declaration] = &[ROPE, QK_NORM_FORWARD, QK_NORM_BACKWARD];

pub(crate) const ROPE: Declaration = Declaration {
    name: c"xentile_rope",
    summary: "Rows of x, rotated by the rows of the tables that the indices name; NaN where there is no such row.",
    operands: &[
        input("x", "*batch S H D", FLOATS),
        input("indices", "*batch S H", S32),
        input("cos", "P R", F32),
        input("sin", "P R", F32),
    ],
    results: &[output("y", "*batch S H D", Dtype::Like("x"))],
    attributes: &[&[INTERLEAVED, attribute("inverse", Range::Bool)]],
    sharded: &["S", "H"],
    bounds: &[("R", 2, "D")],
    aliases: &[may_alias("x", "y")],
    ..Declaration::BASE
};

const QK_NORM_ATTRIBUTES: &[AttributeDecl] =
    &[crate::norm::EPS, crate::norm::ZERO_CENTRED, INTERLEAVED];

pub(crate) const QK_NORM_FORWARD: Declaration = Declaration {
    name: c"xentile_qk_norm_rope_forward",
    summary: "Heads of q and k, normalised and rotated, and the rstd of each.",
    host: Stages::None,
    operands: &[
        input("q", "*batch H D", FLOATS),
        input("k", "*batch K D", Dtype::Like("q")),
        input("q_weight", "D", FLOATS),
        input("k_weight", "D", FLOATS),
        input("indices", "*batch", S32),
        input("cos", "P R", F32),
        input("sin", "P R", F32),
    ],
    results: &[
        output("q_rotated", "*batch H D", Dtype::Like("q")),
        output("k_rotated", "*batch K D", Dtype::Like("k")),
        residual("q_rstd", "*batch H", F32),
        residual("k_rstd", "*batch K", F32),
    ],
    attributes: &[QK_NORM_ATTRIBUTES],
    bounds: &[("R", 2, "D")],
    maps_shared: false,
    aliases: &[may_alias("q", "q_rotated"), may_alias("k", "k_rotated")],
    ..Declaration::BASE
};

pub(crate) const QK_NORM_BACKWARD: Declaration = Declaration {
    name: c"xentile_qk_norm_rope_backward",
    summary: "dq, dk and the gradients of the weights, from the rstd that forward gave.",
    host: Stages::None,
    operands: &[
        input("q", "*batch H D", FLOATS),
        input("k", "*batch K D", Dtype::Like("q")),
        input("q_weight", "D", FLOATS),
        input("k_weight", "D", FLOATS),
        residual("q_rstd", "*batch H", F32),
        residual("k_rstd", "*batch K", F32),
        input("indices", "*batch", S32),
        input("cos", "P R", F32),
        input("sin", "P R", F32),
        cotangent("q_cotangent", "*batch H D", Dtype::Like("q")),
        cotangent("k_cotangent", "*batch K D", Dtype::Like("k")),
    ],
    results: &[
        gradient("dq", "*batch H D", Dtype::Like("q")),
        gradient("dk", "*batch K D", Dtype::Like("k")),
        gradient("dq_weight", "D", F32),
        gradient("dk_weight", "D", F32),
    ],
    attributes: &[QK_NORM_ATTRIBUTES],
    bounds: &[("R", 2, "D")],
    maps_shared: false,
    aliases: &[may_alias("q", "dq"), may_alias("k", "dk")],
    ..Declaration::BASE
};

/// The attributes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options(pub(crate) Rope);

impl Options {
    /// The layout of pairs.
    fn layout(decoder: &mut Decoder<'_>) -> Result<Layout> {
        let interleaved = decoder.parameter("interleaved")?;
        Ok(if interleaved { Layout::Interleaved } else { Layout::Halves })
    }
}

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let layout = Self::layout(decoder)?;
        Ok(Self(Rope { layout, inverse: decoder.parameter("inverse")? }))
    }
}

/// The shape of `x` and `y` `[.., D]`, `indices` `[..]`, and the tables `cos` and `sin` `[.., P, R / 2]`, after
/// none or some of the first axes of `x`; in this order.
pub(crate) fn shape([x, y, indices, cos, sin]: [&[usize]; 5]) -> Result<RopeShape> {
    let Some((&columns, leading)) = x.split_last() else {
        return Err(invalid("`x` has shape []; it must have an axis at least, the columns"));
    };
    for (name, dims, right) in [("y", y, x), ("indices", indices, leading), ("sin", sin, cos)] {
        if dims != right {
            let of = if name == "sin" { "cos" } else { "x" };
            return Err(invalid(format_args!(
                "`{name}` has shape {dims:?}; it must be {right:?}, as `{of}` is"
            )));
        }
    }
    match cos {
        [batch @ .., positions, pairs] if leading.starts_with(batch) && *pairs <= columns / 2 => {
            RopeShape::new(product(leading), columns, *pairs, *positions)
                .and_then(|shape| shape.with_groups(product(batch)))
                .map_err(|error| invalid(format_args!("`x` has shape {x:?}: {error}")))
        }
        _ => Err(invalid(format_args!(
            "`cos` has shape {cos:?}; it must be positions by pairs, at most half the columns of `x`, \
             {x:?}, after none or some of its first axes"
        ))),
    }
}

/// The product of `axes`: an empty one first, because the others alone may multiply to more than fits.
fn product(axes: &[usize]) -> usize {
    if axes.contains(&0) { 0 } else { axes.iter().product() }
}

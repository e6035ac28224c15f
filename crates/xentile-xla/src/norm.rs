//! RMSNorm and LayerNorm: the attributes and shapes of their targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::norm::{Norm, NormShape};
use xla_ffi::{Decoder, Parameter, Result};

use crate::arguments::invalid;
use crate::declaration::{
    AttributeDecl, Declaration, Dtype, F32, FLOATS, Range, attribute, cotangent, gradient, input,
    may_alias, output, residual,
};

pub(crate) const EPS: AttributeDecl = attribute("eps", Range::Between(0.0, f64::INFINITY));
pub(crate) const ZERO_CENTRED: AttributeDecl = attribute("zero_centred", Range::Bool);
const RMS_ATTRIBUTES: &[AttributeDecl] = &[EPS, ZERO_CENTRED];

pub(crate) const DECLARATIONS: &[Declaration] =
    &[LAYER_FORWARD, LAYER_BACKWARD, RMS_FORWARD, RMS_ADD_FORWARD, RMS_BACKWARD, RMS_ADD_BACKWARD];

pub(crate) const RMS_FORWARD: Declaration = Declaration {
    name: c"xentile_rms_norm_forward",
    summary: "The norm of each row, and its rstd.",
    operands: &[input("x", "*batch D", FLOATS), input("weight", "D", FLOATS)],
    results: &[output("y", "*batch D", Dtype::Like("x")), residual("rstd", "*batch", F32)],
    attributes: &[RMS_ATTRIBUTES],
    aliases: &[may_alias("x", "y")],
    ..Declaration::BASE
};

pub(crate) const RMS_ADD_FORWARD: Declaration = Declaration {
    name: c"xentile_rms_norm_add_forward",
    summary: "The norm of each row of x + residual, that sum, and the rstd of its rows.",
    operands: &[
        input("x", "*batch D", FLOATS),
        input("residual", "*batch D", Dtype::Like("x")),
        input("weight", "D", FLOATS),
    ],
    results: &[
        output("y", "*batch D", Dtype::Like("x")),
        output("sum", "*batch D", Dtype::Like("x")),
        residual("rstd", "*batch", F32),
    ],
    attributes: &[RMS_ATTRIBUTES],
    aliases: &[may_alias("x", "y"), may_alias("residual", "sum")],
    ..Declaration::BASE
};

pub(crate) const RMS_BACKWARD: Declaration = Declaration {
    name: c"xentile_rms_norm_backward",
    summary: "dx and dweight, from the rstd that forward gave.",
    operands: &[
        input("x", "*batch D", FLOATS),
        input("weight", "D", FLOATS),
        residual("rstd", "*batch", F32),
        cotangent("dy", "*batch D", Dtype::Like("x")),
    ],
    results: &[gradient("dx", "*batch D", Dtype::Like("x")), gradient("dweight", "D", F32)],
    attributes: &[RMS_ATTRIBUTES],
    aliases: &[may_alias("x", "dx"), may_alias("dy", "dx")],
    ..Declaration::BASE
};

pub(crate) const RMS_ADD_BACKWARD: Declaration = Declaration {
    name: c"xentile_rms_norm_add_backward",
    summary: "dx and dweight of a sum x, whose own cotangent is dsum.",
    operands: &[
        input("x", "*batch D", FLOATS),
        input("weight", "D", FLOATS),
        residual("rstd", "*batch", F32),
        cotangent("dy", "*batch D", Dtype::Like("x")),
        cotangent("dsum", "*batch D", Dtype::Like("x")),
    ],
    ..RMS_BACKWARD
};

pub(crate) const LAYER_FORWARD: Declaration = Declaration {
    name: c"xentile_layer_norm_forward",
    summary: "The norm of each row, its mean and its rstd.",
    operands: &[
        input("x", "*batch D", FLOATS),
        input("weight", "D", FLOATS),
        input("bias", "D", Dtype::Like("weight")),
    ],
    results: &[
        output("y", "*batch D", Dtype::Like("x")),
        residual("mean", "*batch", F32),
        residual("rstd", "*batch", F32),
    ],
    attributes: &[&[EPS]],
    aliases: &[may_alias("x", "y")],
    ..Declaration::BASE
};

pub(crate) const LAYER_BACKWARD: Declaration = Declaration {
    name: c"xentile_layer_norm_backward",
    summary: "dx, dweight and dbias, from the statistics that forward gave.",
    operands: &[
        input("x", "*batch D", FLOATS),
        input("weight", "D", FLOATS),
        residual("mean", "*batch", F32),
        residual("rstd", "*batch", F32),
        cotangent("dy", "*batch D", Dtype::Like("x")),
    ],
    results: &[
        gradient("dx", "*batch D", Dtype::Like("x")),
        gradient("dweight", "D", F32),
        gradient("dbias", "D", F32),
    ],
    attributes: &[&[EPS]],
    aliases: &[may_alias("x", "dx"), may_alias("dy", "dx")],
    ..Declaration::BASE
};

/// The attributes of every target of RMSNorm, each within its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RmsOptions(pub(crate) Norm);

/// The attribute of every target of LayerNorm, within its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerOptions(pub(crate) Norm);

impl<'a> Parameter<'a> for RmsOptions {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let eps = decoder.parameter("eps")?;
        let zero_centred = decoder.parameter("zero_centred")?;
        validated(Norm { eps, zero_centred, ..Norm::RMS }).map(Self)
    }
}

impl<'a> Parameter<'a> for LayerOptions {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        validated(Norm { eps: decoder.parameter("eps")?, ..Norm::LAYER }).map(Self)
    }
}

fn validated(norm: Norm) -> Result<Norm> {
    norm.validate().map_err(|error| invalid(format_args!("attribute {error}")))?;
    Ok(norm)
}

/// The shape of `x` `[.., D]`, flattened.
pub(crate) fn shape(x: &[usize]) -> Result<NormShape> {
    let Some((&columns, leading)) = x.split_last() else {
        return Err(invalid("`x` has shape []; it must have an axis at least, the columns"));
    };
    if columns == 0 {
        return Err(invalid(format_args!(
            "`x` has shape {x:?}; its last axis, the columns, must be at least 1"
        )));
    }
    NormShape::new(product(leading), columns)
        .map_err(|error| invalid(format_args!("`x` has {error}")))
}

/// Checks that each of `others`, with its name, has the shape of `x`.
pub(crate) fn check_like(x: &[usize], others: &[(&str, &[usize])]) -> Result {
    for (name, dims) in others {
        if *dims != x {
            return Err(invalid(format_args!(
                "`{name}` has shape {dims:?}; it must be {x:?}, that of `x`"
            )));
        }
    }
    Ok(())
}

/// Checks that the result `name` has the shape of another one.
pub(crate) fn check_alike(
    (name, dims): (&str, &[usize]),
    (other, like): (&str, &[usize]),
) -> Result {
    if dims == like {
        return Ok(());
    }
    Err(invalid(format_args!(
        "`{name}` has shape {dims:?}; it must be {like:?}, that of `{other}`"
    )))
}

/// Checks that the weight or bias `name` is the last axis of `x`, after any number of its leading ones.
pub(crate) fn check_columns(x: &[usize], name: &str, dims: &[usize]) -> Result {
    match (dims.split_last(), x.split_last()) {
        (Some((d, batch)), Some((columns, leading)))
            if d == columns && leading.starts_with(batch) =>
        {
            Ok(())
        }
        _ => Err(invalid(format_args!(
            "`{name}` has shape {dims:?}; it must be the last axis of `x`, {x:?}, after none or \
             some of its first axes"
        ))),
    }
}

/// Checks that the statistics `name` have the leading axes of `x`.
pub(crate) fn check_rows(x: &[usize], name: &str, dims: &[usize]) -> Result {
    let leading = &x[..x.len() - 1];
    if dims == leading {
        return Ok(());
    }
    Err(invalid(format_args!(
        "`{name}` has shape {dims:?}; it must be {leading:?}, the leading axes of `x`"
    )))
}

/// Groups of rows and blocks of a group in the partial sums `name` `[.., P, D]`, whose leading axes are some of
/// the first of `x`.
pub(crate) fn partial_sums(x: &[usize], name: &str, sums: &[usize]) -> Result<[usize; 2]> {
    let (&columns, leading) = x.split_last().expect("`x` has columns");
    match sums {
        [batch @ .., blocks, d] if *blocks > 0 && *d == columns && leading.starts_with(batch) => {
            Ok([product(batch), *blocks])
        }
        _ => Err(invalid(format_args!(
            "`{name}` has shape {sums:?}; it must be blocks, at least 1, by the last axis of `x`, \
             {x:?}, after none or some of its first axes"
        ))),
    }
}

/// The product of `axes`: an empty one first, because the others alone may multiply to more than fits.
fn product(axes: &[usize]) -> usize {
    if axes.contains(&0) { 0 } else { axes.iter().product() }
}

//! RMSNorm: the attributes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::rms_norm::RmsNorm;
use xla_ffi::{Decoder, Parameter, Result};

use crate::declaration::{
    AttributeDecl, Declaration, Dtype, F32, FLOATS, Range, attribute, cotangent, gradient, input,
    may_alias, output, residual,
};
use crate::norm::invalid;

pub(crate) const EPS: AttributeDecl = attribute("eps", Range::Between(0.0, f64::INFINITY));
pub(crate) const ZERO_CENTRED: AttributeDecl = attribute("zero_centred", Range::Bool);
const ATTRIBUTES: &[AttributeDecl] = &[EPS, ZERO_CENTRED];

pub(crate) const DECLARATIONS: &[Declaration] = &[FORWARD, ADD_FORWARD, BACKWARD, ADD_BACKWARD];

pub(crate) const FORWARD: Declaration = Declaration {
    name: c"xentile_rms_norm_forward",
    summary: "The norm of each row, and its rstd.",
    operands: &[input("x", "*batch D", FLOATS), input("weight", "D", FLOATS)],
    results: &[output("y", "*batch D", Dtype::Like("x")), residual("rstd", "*batch", F32)],
    attributes: &[ATTRIBUTES],
    aliases: &[may_alias("x", "y")],
    ..Declaration::BASE
};

pub(crate) const ADD_FORWARD: Declaration = Declaration {
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
    attributes: &[ATTRIBUTES],
    aliases: &[may_alias("x", "y"), may_alias("residual", "sum")],
    ..Declaration::BASE
};

pub(crate) const BACKWARD: Declaration = Declaration {
    name: c"xentile_rms_norm_backward",
    summary: "dx and dweight, from the rstd that forward gave.",
    operands: &[
        input("x", "*batch D", FLOATS),
        input("weight", "D", FLOATS),
        residual("rstd", "*batch", F32),
        cotangent("dy", "*batch D", Dtype::Like("x")),
    ],
    results: &[gradient("dx", "*batch D", Dtype::Like("x")), gradient("dweight", "D", F32)],
    attributes: &[ATTRIBUTES],
    aliases: &[may_alias("x", "dx"), may_alias("dy", "dx")],
    ..Declaration::BASE
};

pub(crate) const ADD_BACKWARD: Declaration = Declaration {
    name: c"xentile_rms_norm_add_backward",
    summary: "dx and dweight of a sum x, whose own cotangent is dsum.",
    operands: &[
        input("x", "*batch D", FLOATS),
        input("weight", "D", FLOATS),
        residual("rstd", "*batch", F32),
        cotangent("dy", "*batch D", Dtype::Like("x")),
        cotangent("dsum", "*batch D", Dtype::Like("x")),
    ],
    ..BACKWARD
};

/// The attributes of every target of RMSNorm, each within its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options(pub(crate) RmsNorm);

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let options = RmsNorm {
            eps: decoder.parameter("eps")?,
            zero_centred: decoder.parameter("zero_centred")?,
        };
        options.validate().map_err(|error| invalid(format_args!("attribute {error}")))?;
        Ok(Self(options))
    }
}

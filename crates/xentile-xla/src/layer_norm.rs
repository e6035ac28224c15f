//! LayerNorm: the attribute of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::layer_norm::LayerNorm;
use xla_ffi::{Decoder, Parameter, Result};

use crate::declaration::{
    Declaration, Dtype, F32, FLOATS, cotangent, gradient, input, may_alias, output, residual,
};
use crate::norm::invalid;
use crate::rms_norm::EPS;

pub(crate) const DECLARATIONS: &[Declaration] = &[FORWARD, BACKWARD];

pub(crate) const FORWARD: Declaration = Declaration {
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

pub(crate) const BACKWARD: Declaration = Declaration {
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

/// The attribute of every target of LayerNorm, within its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options(pub(crate) LayerNorm);

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let options = LayerNorm { eps: decoder.parameter("eps")? };
        options.validate().map_err(|error| invalid(format_args!("attribute {error}")))?;
        Ok(Self(options))
    }
}

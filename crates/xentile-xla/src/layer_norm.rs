//! LayerNorm: the attribute of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::layer_norm::LayerNorm;
use xla_ffi::{Decoder, Parameter, Result};

use crate::norm::invalid;

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

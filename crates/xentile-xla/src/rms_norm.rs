//! RMSNorm: the attributes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::rms_norm::RmsNorm;
use xla_ffi::{Decoder, Parameter, Result};

use crate::norm::invalid;

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

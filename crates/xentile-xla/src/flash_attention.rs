//! Attention: the attributes and the shapes of its targets, on any platform.

pub(crate) mod cpu;

use xentile::flash_attention::{AttentionShape, FlashAttention};
use xla_ffi::{Decoder, Error, Parameter, Result};

/// The attributes of every target of attention, each within its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options(pub(crate) FlashAttention);

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let options = FlashAttention {
            scale: decoder.parameter("scale")?,
            softcap: decoder.parameter("softcap")?,
        };
        options.validate().map_err(|error| invalid(format_args!("attribute {error}")))?;
        Ok(Self(options))
    }
}

/// The shape of `q` `[.., G, S, D]`, `k` `[.., K, D]` and `v` `[.., K, E]`.
pub(crate) fn shape(q: &[usize], k: &[usize], v: &[usize]) -> Result<AttentionShape> {
    let (
        [leading @ .., group, queries, width],
        [of_k @ .., keys, k_width],
        [of_v @ .., v_keys, value_width],
    ) = (q, k, v)
    else {
        return Err(invalid(format_args!(
            "`q` has shape {q:?}, `k` {k:?} and `v` {v:?}; they must be [.., G, S, D], [.., K, D] and \
             [.., K, E]"
        )));
    };
    if (of_k, k_width) != (leading, width) {
        return Err(invalid(format_args!(
            "`k` has shape {k:?}; it must be {leading:?}, K and {width}, as `q` has shape {q:?}"
        )));
    }
    if (of_v, v_keys) != (leading, keys) {
        return Err(invalid(format_args!(
            "`v` has shape {v:?}; it must be {leading:?}, {keys} and E, as `k` has shape {k:?}"
        )));
    }
    // An empty axis first, because the others alone may multiply to more than fits.
    let heads = if leading.contains(&0) { 0 } else { leading.iter().product() };
    let shape = AttentionShape {
        heads,
        group: *group,
        queries: *queries,
        keys: *keys,
        width: *width,
        value_width: *value_width,
    };
    shape.validate().map_err(invalid)?;
    Ok(shape)
}

/// Checks that an array, with its name, is `leading` and then `last`.
pub(crate) fn check(name: &str, dims: &[usize], leading: &[usize], last: &[usize]) -> Result {
    let right = [leading, last].concat();
    if dims == right {
        return Ok(());
    }
    Err(invalid(format_args!("`{name}` has shape {dims:?}; it must be {right:?}")))
}

pub(crate) fn invalid(message: impl std::fmt::Display) -> Error {
    Error::invalid_argument(message.to_string())
}

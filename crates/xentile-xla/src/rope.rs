//! Rotary position embedding: the attributes and the shapes of its target, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "cuda")]
pub(crate) mod qk_norm;

use xentile::rope::{Layout, Rope, RopeShape};
use xla_ffi::{Decoder, Error, Parameter, Result};

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

pub(crate) fn invalid(message: impl std::fmt::Display) -> Error {
    Error::invalid_argument(message.to_string())
}

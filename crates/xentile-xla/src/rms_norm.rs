//! RMSNorm: the attributes and the shapes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::rms_norm::{NormShape, RmsNorm};
use xla_ffi::{Decoder, Error, Parameter, Result};

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

/// Checks that `weight` is the last axis of `x`, after any number of its leading ones.
pub(crate) fn check_weight(x: &[usize], weight: &[usize]) -> Result {
    match (weight.split_last(), x.split_last()) {
        (Some((d, batch)), Some((columns, leading)))
            if d == columns && leading.starts_with(batch) =>
        {
            Ok(())
        }
        _ => Err(invalid(format_args!(
            "`weight` has shape {weight:?}; it must be the last axis of `x`, {x:?}, after none or \
             some of its first axes"
        ))),
    }
}

/// Checks that `rstd` has the leading axes of `x`.
pub(crate) fn check_rstd(x: &[usize], rstd: &[usize]) -> Result {
    let leading = &x[..x.len() - 1];
    if rstd == leading {
        return Ok(());
    }
    Err(invalid(format_args!(
        "`rstd` has shape {rstd:?}; it must be {leading:?}, the leading axes of `x`"
    )))
}

/// Groups of rows and blocks of a group in partial sums `[.., P, D]`, whose leading axes are some of
/// the first of `x`.
pub(crate) fn partial_sums(x: &[usize], dweight: &[usize]) -> Result<[usize; 2]> {
    let (&columns, leading) = x.split_last().expect("`x` has columns");
    match dweight {
        [batch @ .., blocks, d] if *blocks > 0 && *d == columns && leading.starts_with(batch) => {
            Ok([product(batch), *blocks])
        }
        _ => Err(invalid(format_args!(
            "`dweight` has shape {dweight:?}; it must be blocks, at least 1, by the last axis of `x`, \
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

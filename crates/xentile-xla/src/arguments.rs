//! What handlers of several operations ask of a call's arguments.

use xla_ffi::{Decoder, Error, Parameter, Result};

/// The error for an argument or attribute that is wrong.
pub(crate) fn invalid(message: impl std::fmt::Display) -> Error {
    Error::invalid_argument(message.to_string())
}

/// The parameter `name` if the attribute `flag` is true.
pub(crate) fn given<'a, P: Parameter<'a>>(
    decoder: &mut Decoder<'a>,
    flag: &'static str,
    name: &'static str,
) -> Result<Option<P>> {
    let is_given = decoder.parameter(flag)?;
    if is_given { decoder.parameter(name).map(Some) } else { Ok(None) }
}

/// As `given`, where the attribute `flag` is false.
pub(crate) fn given_unless<'a, P: Parameter<'a>>(
    decoder: &mut Decoder<'a>,
    flag: &'static str,
    name: &'static str,
) -> Result<Option<P>> {
    let is_absent: bool = decoder.parameter(flag)?;
    if is_absent { Ok(None) } else { decoder.parameter(name).map(Some) }
}

/// Checks the shape of an array, by its name.
pub(crate) fn check_shape(name: &str, dims: &[usize], right: &[usize]) -> Result {
    if dims == right {
        return Ok(());
    }
    Err(invalid(format_args!("`{name}` has shape {dims:?}; it must be {right:?}")))
}

/// The index of `layer` among so many.
pub(crate) fn check_layer(layer: i32, layers: usize) -> Result<usize> {
    usize::try_from(layer).ok().filter(|layer| *layer < layers).ok_or_else(|| {
        invalid(format_args!("`layer` is {layer}; it must be below {layers}, and at least 0"))
    })
}

//! Linear cross-entropy: the shapes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::linear_cross_entropy::{LinearShape, VocabAxis};
use xla_ffi::{Decoder, Error, Result};

/// The attribute `vocab_axis`.
fn vocab_axis(decoder: &mut Decoder) -> Result<VocabAxis> {
    match decoder.parameter("vocab_axis")? {
        0_i64 => Ok(VocabAxis::First),
        1 => Ok(VocabAxis::Last),
        other => Err(invalid(format_args!("attribute vocab_axis is {other}; it must be 0 or 1"))),
    }
}

/// The shape of `hidden` `[N, D]`, `weight` and `labels` `[N]` of these extents.
fn shape(
    hidden: &[usize],
    weight: &[usize],
    labels: &[usize],
    vocab_axis: VocabAxis,
) -> Result<LinearShape> {
    let &[tokens, width] = hidden else {
        return Err(invalid(format_args!("`hidden` has shape {hidden:?}; it must be [N, D]")));
    };
    let axis = 1 - vocab_axis.index();
    let weight = match *weight {
        [rows, columns] if [rows, columns][axis] == width => [rows, columns],
        _ => {
            return Err(invalid(format_args!(
                "`weight` has shape {weight:?}; it must have the {width} columns of `hidden` on axis \
                 {axis}"
            )));
        }
    };
    if hidden.contains(&0) || weight.contains(&0) {
        return Err(invalid(format_args!(
            "`hidden` has shape {hidden:?} and `weight` {weight:?}; no extent may be 0"
        )));
    }
    if labels != [tokens] {
        return Err(invalid(format_args!(
            "`labels` has shape {labels:?}; it must be [{tokens}], one for each row of `hidden`"
        )));
    }
    LinearShape::new([tokens, width], weight, Some(vocab_axis)).map_err(invalid)
}

/// Checks that each array, with its name, has a number for each label.
fn check_tokens(labels: &[usize], arrays: &[(&str, &[usize])]) -> Result {
    match arrays.iter().find(|(_, dims)| *dims != labels) {
        None => Ok(()),
        Some((name, dims)) => Err(invalid(format_args!(
            "`{name}` has shape {dims:?}; it must be {labels:?}, that of `labels`"
        ))),
    }
}

/// Checks the shape of an array, by its name.
fn check_shape(name: &str, dims: &[usize], expected: &[usize]) -> Result {
    if dims == expected {
        return Ok(());
    }
    Err(invalid(format_args!("`{name}` has shape {dims:?}; it must be {expected:?}")))
}

fn invalid(message: impl std::fmt::Display) -> Error {
    Error::invalid_argument(message.to_string())
}

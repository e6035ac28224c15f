//! Products of tokens and a layer's matrix: the shapes of the target, for CPUs alone.

pub(crate) mod cpu;

use xla_ffi::{Error, Result};

use crate::declaration::{Declaration, Dtype, FLOATS, S32, Stages, input, output};

pub(crate) const DECLARATIONS: &[Declaration] = &[LINEAR];

pub(crate) const LINEAR: Declaration = Declaration {
    name: c"xentile_linear",
    summary: "The products of tokens x and the rows of one layer's weight, summed in f32 and rounded once.",
    cuda: Stages::None,
    operands: &[
        input("x", "*batch I", FLOATS),
        input("weight", "L O I", Dtype::Like("x")),
        input("layer", "", S32),
    ],
    results: &[output("y", "*batch O", FLOATS)],
    maps_shared: false,
    ..Declaration::BASE
};

/// Checks all shapes and the layer; returns the layer's index, and B, O and I.
pub(crate) fn check(
    x: &[usize],
    weight: &[usize],
    layer: i32,
    y: &[usize],
) -> Result<(usize, [usize; 3])> {
    let invalid = |message| Err(Error::invalid_argument(message));
    let (&[layers, rows, terms], Some((last, leading))) = (weight, x.split_last()) else {
        return invalid(format!(
            "`weight` has shape {weight:?} and `x` {x:?}; they must be [L, O, I] and [.., I]"
        ));
    };
    if *last != terms {
        return invalid(format!(
            "`x` has shape {x:?}; its last axis must be {terms}, that of `weight`"
        ));
    }
    let right = [leading, &[rows]].concat();
    if y != right {
        return invalid(format!("`y` has shape {y:?}; it must be {right:?}"));
    }
    match usize::try_from(layer).ok().filter(|layer| *layer < layers) {
        Some(layer) => Ok((layer, [leading.iter().product(), rows, terms])),
        None => invalid(format!("`layer` is {layer}; it must be below {layers}, and at least 0")),
    }
}

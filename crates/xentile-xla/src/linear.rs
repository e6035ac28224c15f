//! Products of tokens and a layer's matrix: the shapes of the target, for CPUs alone.

pub(crate) mod cpu;

use xla_ffi::Result;

use crate::arguments::{check_layer, check_shape, invalid};
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
    let (&[layers, rows, terms], Some((last, leading))) = (weight, x.split_last()) else {
        return Err(invalid(format_args!(
            "`weight` has shape {weight:?} and `x` {x:?}; they must be [L, O, I] and [.., I]"
        )));
    };
    if *last != terms {
        return Err(invalid(format_args!(
            "`x` has shape {x:?}; its last axis must be {terms}, that of `weight`"
        )));
    }
    check_shape("y", y, &[leading, &[rows]].concat())?;
    Ok((check_layer(layer, layers)?, [leading.iter().product(), rows, terms]))
}

//! `x * factor`: the shapes of its target, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xla_ffi::{Error, Result};

use crate::declaration::{Alias, Declaration, Dtype, F32, FLOATS, input, output};

pub(crate) const DECLARATIONS: &[Declaration] = &[SCALE];

pub(crate) const SCALE: Declaration = Declaration {
    name: c"xentile_scale",
    summary: "x times the factor of each token; nothing is touched in place where every factor is 1.",
    operands: &[input("x", "*batch N", FLOATS), input("factor", "*batch", F32)],
    results: &[output("scaled", "*batch N", Dtype::Like("x"))],
    aliases: &[Alias { operand: "x", result: "scaled", always: true }],
    ..Declaration::BASE
};

/// Checks that `factor` has leading axes of `x`, and `scaled` all of them.
pub(crate) fn check(x: &[usize], factor: &[usize], scaled: &[usize]) -> Result {
    if !x.starts_with(factor) {
        return Err(Error::invalid_argument(format!(
            "`factor` has shape {factor:?}; it must be some of the leading axes of `x`, {x:?}"
        )));
    }
    if scaled != x {
        return Err(Error::invalid_argument(format!(
            "`scaled` has shape {scaled:?}; it must be {x:?}, that of `x`"
        )));
    }
    Ok(())
}

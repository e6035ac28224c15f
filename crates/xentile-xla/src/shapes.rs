//! The check of a call's shapes by its declaration, for targets whose first array has all axes of tokens.

use xla_ffi::{Error, Result};

use crate::declaration::{ArrayDecl, Declaration, Dims};

/// Checks the shapes of a call's arguments and results, in this order, against the first, which has an axis at
/// least and its own last axis right.
///
/// An array declared as the first is has its shape; one of `*batch` its leading axes; another argument is the
/// last axis after none or some of the first; another result, a sum over tokens, has blocks before that.
///
/// # Errors
/// An array has another shape.
pub(crate) fn check(declaration: &Declaration, shapes: &[&[usize]]) -> Result {
    let Declaration { operands, results, .. } = declaration;
    debug_assert_eq!(operands.len() + results.len(), shapes.len(), "{}", declaration.name());
    let (first, x) = (&operands[0], shapes[0]);
    let mut sums = None;
    for (index, &dims) in shapes.iter().enumerate().skip(1) {
        let is_result = index >= operands.len();
        let array = if is_result { &results[index - operands.len()] } else { &operands[index] };
        match text(array) {
            one if one == text(first) => require(array, dims, x, "that of", first)?,
            "*batch" => require(array, dims, &x[..x.len() - 1], "the leading axes of", first)?,
            _ if !is_result => check_shared(array, dims, first, x)?,
            _ => match sums {
                None => {
                    check_sums(array, dims, first, x)?;
                    sums = Some((array, dims));
                }
                Some((other, right)) => require(array, dims, right, "that of", other)?,
            },
        }
    }
    Ok(())
}

#[inline]
fn text(array: &ArrayDecl) -> &'static str {
    match array.dims {
        Dims::Fixed(text) => text,
        Dims::By(attribute, _) => panic!("`{}` is declared by `{attribute}`", array.name),
    }
}

#[inline]
fn require(
    array: &ArrayDecl,
    dims: &[usize],
    right: &[usize],
    what: &str,
    of: &ArrayDecl,
) -> Result {
    if dims == right {
        return Ok(());
    }
    Err(wrong(array, dims, format_args!("{right:?}, {what} `{}`", of.name)))
}

fn check_shared(array: &ArrayDecl, dims: &[usize], first: &ArrayDecl, x: &[usize]) -> Result {
    match dims {
        [batch @ .., last] if x.ends_with(&[*last]) && x[..x.len() - 1].starts_with(batch) => {
            Ok(())
        }
        _ => Err(wrong(
            array,
            dims,
            format_args!(
                "the last axis of `{}`, {x:?}, after none or some of its first axes",
                first.name
            ),
        )),
    }
}

fn check_sums(array: &ArrayDecl, dims: &[usize], first: &ArrayDecl, x: &[usize]) -> Result {
    match dims {
        [batch @ .., blocks, last]
            if *blocks > 0 && x.ends_with(&[*last]) && x[..x.len() - 1].starts_with(batch) =>
        {
            Ok(())
        }
        _ => Err(wrong(
            array,
            dims,
            format_args!(
                "blocks, at least 1, by the last axis of `{}`, {x:?}, after none or some of its \
                 first axes",
                first.name
            ),
        )),
    }
}

#[cold]
fn wrong(array: &ArrayDecl, dims: &[usize], right: std::fmt::Arguments<'_>) -> Error {
    let name = array.name;
    Error::invalid_argument(format!("`{name}` has shape {dims:?}; it must be {right}"))
}

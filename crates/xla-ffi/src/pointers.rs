//! Reading what a caller's pointers lead to: each is checked for null, alignment and size first.

use std::fmt;

use crate::{Error, Result};

/// A reference to a struct that begins with its own size.
///
/// # Safety
/// `pointer` is null, misaligned, or leads to a struct alive for `'a`, as long as it says it is.
/// `T` begins with its `struct_size: usize`, and every field takes any bits.
pub(crate) unsafe fn sized<'a, T>(pointer: *const T, what: &dyn fmt::Display) -> Result<&'a T> {
    // SAFETY: passed on from this function's contract.
    let size = *unsafe { reference(pointer.cast::<usize>(), what) }?;
    if size < size_of::<T>() {
        return Err(Error::invalid_argument(format!(
            "{what} has struct_size {size}; it must be at least {}",
            size_of::<T>()
        )));
    }
    // SAFETY: as long as a `T`.
    unsafe { reference(pointer, what) }
}

/// A reference to what `pointer` leads to.
///
/// # Safety
/// `pointer` is null, misaligned, or leads to a `T` alive for `'a`.
pub(crate) unsafe fn reference<'a, T>(pointer: *const T, what: &dyn fmt::Display) -> Result<&'a T> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Error::invalid_argument(format!("{what} is at {pointer:p}, {WRONG}")));
    }
    // SAFETY: neither null nor misaligned.
    Ok(unsafe { &*pointer })
}

/// The `count` values from `pointer`, which matters only if there are any.
///
/// # Safety
/// `pointer` is null, misaligned, or leads to `count` values alive for `'a`.
pub(crate) unsafe fn list<'a, T>(
    pointer: *const T,
    count: i64,
    what: impl fmt::Display,
) -> Result<&'a [T]> {
    let length = usize::try_from(count)
        .ok()
        .filter(|&length| length <= isize::MAX as usize / size_of::<T>().max(1))
        .ok_or_else(|| {
            Error::invalid_argument(format!("the number of {what} is {count}, which cannot be"))
        })?;
    if length == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Error::invalid_argument(format!("the {what} are at {pointer:p}, {WRONG}")));
    }
    // SAFETY: neither null nor misaligned, and no larger than memory may be.
    Ok(unsafe { std::slice::from_raw_parts(pointer, length) })
}

/// What is wrong with a pointer.
const WRONG: &str = "which is null or misaligned";

/// Names in an error.
pub(crate) struct Names<'a>(pub(crate) &'a [&'a str]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (index, name) in self.0.iter().enumerate() {
            write!(f, "{}`{name}`", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

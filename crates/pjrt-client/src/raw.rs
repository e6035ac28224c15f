//! What the plug-in points to.

use std::ffi::c_char;

/// `len` values, for which null and none are the same.
///
/// # Safety
/// They are there for `'a`.
pub(crate) unsafe fn slice<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if data.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: passed on from this function's contract.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// The bytes of a text, with what is no UTF-8 replaced.
///
/// # Safety
/// They are there.
pub(crate) unsafe fn text(data: *const c_char, len: usize) -> String {
    // SAFETY: passed on from this function's contract.
    String::from_utf8_lossy(unsafe { slice(data.cast::<u8>(), len) }).into_owned()
}

//! Chunks that a row's end cuts short, by way of a buffer of whole ones.

use xentile::Element;

use crate::simd::{MAX_CHUNK, Simd};

/// Reads `count` elements as a chunk, zeros after them; with `WHOLE` a chunk of them.
///
/// # Safety
/// `from` is valid for reads of `count` elements, at most a chunk.
#[inline(always)]
pub(super) unsafe fn load<S: Simd, E: Element, const WHOLE: bool>(
    s: S,
    from: *const E,
    count: usize,
) -> [S::Vector; 2] {
    if WHOLE {
        // SAFETY: passed on from this function's contract.
        return unsafe { s.load(from) };
    }
    // SAFETY: as above.
    unsafe { filled(s, from, count, E::from_f32(0.0)) }
}

/// The same with the first element, of which there must be one, in the place of zeros.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
pub(super) unsafe fn load_repeating<S: Simd, E: Element, const WHOLE: bool>(
    s: S,
    from: *const E,
    count: usize,
) -> [S::Vector; 2] {
    // SAFETY: passed on from this function's contract.
    unsafe { if WHOLE { s.load(from) } else { filled(s, from, count, *from) } }
}

/// # Safety
/// As for [`load`].
#[inline(always)]
unsafe fn filled<S: Simd, E: Element>(
    s: S,
    from: *const E,
    count: usize,
    filling: E,
) -> [S::Vector; 2] {
    let mut buffer = [filling; MAX_CHUNK];
    // SAFETY: the buffer holds the largest chunk there is.
    unsafe {
        from.copy_to_nonoverlapping(buffer.as_mut_ptr(), count);
        s.load(buffer.as_ptr())
    }
}

/// Writes the first `count` elements of a chunk.
///
/// # Safety
/// `to` is valid for writes of `count` elements, at most a chunk.
#[inline(always)]
pub(super) unsafe fn store<S: Simd, E: Element>(
    s: S,
    chunk: [S::Vector; 2],
    to: *mut E,
    count: usize,
) {
    let mut buffer = [E::from_f32(0.0); MAX_CHUNK];
    // SAFETY: the buffer holds the largest chunk there is.
    unsafe {
        s.store(chunk, buffer.as_mut_ptr());
        buffer.as_ptr().copy_to_nonoverlapping(to, count);
    }
}

//! Entries that lie side by side: their amax, and their values by a scale.

use xentile::Element;

use crate::simd::{LINE_BYTES, MAX_CHUNK, STREAM_BYTES, Simd};

/// Below this scale the quotient of a subnormal entry would not round to 0.
const SCALE_OF_TINY: f32 = 1e-30;

/// amax of the finite entries of `rows` rows, each of `count` entries and with a stride of `step`.
///
/// # Safety
/// `x` points to so many entries.
#[inline(always)]
pub(super) unsafe fn amax<S: Simd, E: Element>(
    s: S,
    x: *const E,
    [rows, step]: [usize; 2],
    count: usize,
) -> f32 {
    let zero = s.splat(0.0);
    let mut most = [zero; 4];
    for row in 0..rows {
        // SAFETY: chunks lie within the entries.
        unsafe {
            let x = x.add(row * step);
            let mut index = 0;
            while index + 2 * S::CHUNK <= count {
                let [a, b] = s.load(x.add(index));
                let [c, d] = s.load(x.add(index + S::CHUNK));
                // NaN is left aside.
                most[0] = s.max(s.abs(a), most[0]);
                most[1] = s.max(s.abs(b), most[1]);
                most[2] = s.max(s.abs(c), most[2]);
                most[3] = s.max(s.abs(d), most[3]);
                index += 2 * S::CHUNK;
            }
            while index < count {
                let part = S::CHUNK.min(count - index);
                let [a, b] = s.load_part(x.add(index), part, E::from_f32(0.0));
                most[0] = s.max(s.abs(a), most[0]);
                most[1] = s.max(s.abs(b), most[1]);
                index += part;
            }
        }
    }
    let found = s.largest(s.max(s.max(most[0], most[1]), s.max(most[2], most[3])));
    if found == f32::INFINITY {
        // SAFETY: the caller's.
        let entry = |at: usize| unsafe { *x.add(at / count * step + at % count) };
        return finite_amax((0..rows * count).map(entry));
    }
    normal(found)
}

/// amax of the finite entries; a slow path for arrays with an infinity.
#[inline(never)]
pub(super) fn finite_amax<E: Element>(entries: impl Iterator<Item = E>) -> f32 {
    let magnitudes = entries.map(|x| x.to_f32().abs()).filter(|x| x.is_finite());
    normal(magnitudes.fold(0.0, f32::max))
}

/// Whether so many values are written by non-temporal stores.
#[inline(always)]
pub(super) fn streams<S: Simd>(values: usize) -> bool {
    S::STREAMS && values >= STREAM_BYTES
}

/// Returns amax, or 0 if it is subnormal.
#[inline(always)]
pub(super) fn normal(amax: f32) -> f32 {
    if amax < f32::MIN_POSITIVE { 0.0 } else { amax }
}

/// Writes the values of `count` entries to `to`. If it `streams`, stores are non-temporal, and a fence
/// must follow.
///
/// # Safety
/// `x` and `to` point to so many entries and values.
#[inline(always)]
pub(super) unsafe fn quantize<S: Simd, E: Element, const E5M2: bool>(
    s: S,
    x: *const E,
    count: usize,
    scale: f32,
    to: *mut u8,
    streams: bool,
) {
    let reciprocal = s.splat(1.0 / scale);
    // SAFETY: the caller's.
    unsafe {
        if scale < SCALE_OF_TINY {
            each::<S, E, E5M2, true>(s, x, count, reciprocal, to, streams);
        } else {
            each::<S, E, E5M2, false>(s, x, count, reciprocal, to, streams);
        }
    }
}

/// Returns `x`, with 0 of its sign if it is subnormal.
#[inline(always)]
fn without_tiny<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    let is_tiny = s.less(s.abs(x), s.splat(f32::MIN_POSITIVE));
    s.select(is_tiny, s.copysign(s.splat(0.0), x), x)
}

/// Returns `x / scale` of a chunk, by reciprocals; with `TINY`, subnormal `x` counts as 0.
#[inline(always)]
pub(super) fn quotients<S: Simd, const TINY: bool>(
    s: S,
    [a, b]: [S::Vector; 2],
    [by_a, by_b]: [S::Vector; 2],
) -> [S::Vector; 2] {
    if TINY {
        [s.mul(without_tiny(s, a), by_a), s.mul(without_tiny(s, b), by_b)]
    } else {
        [s.mul(a, by_a), s.mul(b, by_b)]
    }
}

/// Writes values of `count` entries.
///
/// # Safety
/// As for [`quantize`].
#[inline(always)]
unsafe fn each<S: Simd, E: Element, const E5M2: bool, const TINY: bool>(
    s: S,
    x: *const E,
    count: usize,
    reciprocal: S::Vector,
    to: *mut u8,
    streams: bool,
) {
    let by = [reciprocal; 2];
    let mut index = 0;
    // SAFETY: chunks lie within the entries, and those that are streamed on lines.
    unsafe {
        if streams {
            let head = to.align_offset(LINE_BYTES).min(count);
            while index < head {
                let part = S::CHUNK.min(head - index);
                let chunk = s.load_part(x.add(index), part, E::from_f32(0.0));
                let chunk = quotients::<S, TINY>(s, chunk, by);
                store_part::<S, E, E5M2>(s, chunk, to.add(index), part);
                index += part;
            }
            while index + 2 * S::CHUNK <= count {
                let first = quotients::<S, TINY>(s, s.load(x.add(index)), by);
                let second = quotients::<S, TINY>(s, s.load(x.add(index + S::CHUNK)), by);
                s.stream_fp8::<E, E5M2>([first, second], to.add(index));
                index += 2 * S::CHUNK;
            }
        }
        while index + S::CHUNK <= count {
            let chunk = quotients::<S, TINY>(s, s.load(x.add(index)), by);
            s.store_fp8::<E, E5M2>(chunk, to.add(index));
            index += S::CHUNK;
        }
        if index < count {
            let chunk = s.load_part(x.add(index), count - index, E::from_f32(0.0));
            let chunk = quotients::<S, TINY>(s, chunk, by);
            store_part::<S, E, E5M2>(s, chunk, to.add(index), count - index);
        }
    }
}

/// Writes the first `count` values of a chunk.
///
/// # Safety
/// `to` points to so many values, at most a chunk.
#[inline(always)]
pub(super) unsafe fn store_part<S: Simd, E: Element, const E5M2: bool>(
    s: S,
    chunk: [S::Vector; 2],
    to: *mut u8,
    count: usize,
) {
    let mut buffer = [0; MAX_CHUNK];
    // SAFETY: the caller's, and the buffer holds the largest chunk there is.
    unsafe {
        s.store_fp8::<E, E5M2>(chunk, buffer.as_mut_ptr());
        buffer.as_ptr().copy_to_nonoverlapping(to, count);
    }
}

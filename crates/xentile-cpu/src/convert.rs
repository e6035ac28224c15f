//! Conversions between operand dtypes and float32, a row at a time.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use xentile::{DType, Element};

use crate::{Isa, Job, Simd};

/// Elements in the buffer of a conversion in place.
const PIECE: usize = 256;

/// `to = from`.
pub(crate) fn widen<E: Element>(isa: Isa, from: &[E], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    match E::DTYPE {
        DType::F32 => to.copy_from_slice(cast(from)),
        DType::Bf16 => isa.run(Widen { from: cast(from), to }),
        DType::F16 => cast::<E, f16>(from).convert_to_f32_slice(to),
    }
}

/// `to = from`, each number rounded to nearest, ties to even.
pub(crate) fn narrow<E: Element>(isa: Isa, from: &[f32], to: &mut [E]) {
    assert_eq!(from.len(), to.len());
    match E::DTYPE {
        DType::F32 => cast_mut(to).copy_from_slice(from),
        DType::Bf16 => isa.run(Narrow { from, to: cast_mut(to) }),
        DType::F16 => cast_mut::<E, f16>(to).convert_from_f32_slice(from),
    }
}

/// Rounds each row of `columns` numbers, ties to even, to elements at the beginning of the row's memory.
pub(crate) fn narrow_rows<E: Element>(isa: Isa, columns: usize, numbers: &mut [f32]) {
    if E::DTYPE == DType::F32 {
        return;
    }
    let mut piece = [E::from_f32(0.0); PIECE];
    for row in numbers.chunks_exact_mut(columns) {
        for start in (0..columns).step_by(PIECE) {
            let from = &row[start..columns.min(start + PIECE)];
            let piece = &mut piece[..from.len()];
            narrow(isa, from, piece);
            // Takes no more memory than what has been read.
            elements_mut(row)[start..][..piece.len()].copy_from_slice(piece);
        }
    }
}

/// `to = from * factor + constant`, rounded if `Z` is bf16 (then `E` is bf16 too). Unless `constant` is 0,
/// `to` is 0 where the sign of `from` is negative.
pub(crate) fn scale<E: Element, Z: Element>(
    isa: Isa,
    from: &[E],
    [factor, constant]: [f32; 2],
    to: &mut [Z],
) {
    match Z::DTYPE {
        DType::F32 => {
            let to = cast_mut(to);
            widen(isa, from, to);
            isa.run(Scale { numbers: to, factor, constant });
        }
        _ => isa.run(Rescale { from: cast(from), to: cast_mut(to), factor, constant }),
    }
}

/// Multiplies numbers with a factor.
pub(crate) fn multiply_by(isa: Isa, factor: f32, numbers: &mut [f32]) {
    isa.run(Scale { numbers, factor, constant: 0.0 });
}

/// The memory of f32 as elements.
pub(crate) fn elements<E: Element>(numbers: &[f32]) -> &[E] {
    let length = size_of_val(numbers) / size_of::<E>();
    // SAFETY: f32, bf16 and f16 take any bits, and none is aligned to more than f32.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), length) }
}

/// As [`elements`].
pub(crate) fn elements_mut<E: Element>(numbers: &mut [f32]) -> &mut [E] {
    let length = size_of_val(numbers) / size_of::<E>();
    // SAFETY: as for `elements`.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), length) }
}

/// The largest number, NaN left aside; -inf of none.
pub(crate) fn largest(isa: Isa, numbers: &[f32]) -> f32 {
    isa.run(Largest { numbers })
}

/// The sum of a few numbers, in f32.
pub(crate) fn sum(isa: Isa, numbers: &[f32]) -> f64 {
    isa.run(Sum { numbers })
}

/// Packs pairs of consecutive bf16 into 32-bit words, the first of each in the lower half. An odd last
/// element is paired with 0.
pub(crate) fn pairs<E: Element>(isa: Isa, from: &[E], to: &mut [f32]) {
    assert_eq!(from.len().div_ceil(2), to.len());
    isa.run(Pairs { from: cast(from), to });
}

/// Packs `low[i]` and `high[i]` into word `i`; an empty `high` stands for zeros.
pub(crate) fn pair<E: Element>(isa: Isa, [low, high]: [&[E]; 2], to: &mut [f32]) {
    assert!(low.len() == to.len() && (high.len() == to.len() || high.is_empty()));
    isa.run(Pair { low: cast(low), high: cast(high), to });
}

/// Casts elements of `E` to `F`, which is the same type.
fn cast<E: Element, F: Element>(elements: &[E]) -> &[F] {
    assert_eq!(E::DTYPE, F::DTYPE);
    // SAFETY: each dtype is of one type.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), elements.len()) }
}

/// As [`cast`].
fn cast_mut<E: Element, F: Element>(elements: &mut [E]) -> &mut [F] {
    assert_eq!(E::DTYPE, F::DTYPE);
    // SAFETY: each dtype is of one type.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), elements.len()) }
}

/// Returns elements as f32 if that is their type.
pub(crate) fn as_f32_mut<E: Element>(elements: &mut [E]) -> Option<&mut [f32]> {
    (E::DTYPE == DType::F32).then(|| cast_mut(elements))
}

/// Returns bits whose upper half is the nearest bf16, a NaN for NaN. Without branches, so that the
/// compiler vectorises it.
#[inline(always)]
fn rounded(x: f32) -> u32 {
    let bits = x.to_bits();
    let even = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    if x.is_nan() { bits | 0x40_0000 } else { even }
}

struct Widen<'a> {
    from: &'a [bf16],
    to: &'a mut [f32],
}

impl Job for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }
}

struct Pairs<'a> {
    from: &'a [bf16],
    to: &'a mut [f32],
}

impl Job for Pairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (two, one) = self.from.as_chunks::<2>();
        for (to, &[low, high]) in self.to.iter_mut().zip(two) {
            *to = both(low, high);
        }
        if let (&[low], Some(to)) = (one, self.to.last_mut()) {
            *to = both(low, bf16::ZERO);
        }
    }
}

struct Pair<'a> {
    low: &'a [bf16],
    high: &'a [bf16],
    to: &'a mut [f32],
}

impl Job for Pair<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        if self.high.is_empty() {
            for (to, &low) in self.to.iter_mut().zip(self.low) {
                *to = both(low, bf16::ZERO);
            }
            return;
        }
        for ((to, &low), &high) in self.to.iter_mut().zip(self.low).zip(self.high) {
            *to = both(low, high);
        }
    }
}

/// The bits of two bf16 in one f32.
#[inline(always)]
fn both(low: bf16, high: bf16) -> f32 {
    f32::from_bits(u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16)
}

struct Narrow<'a> {
    from: &'a [f32],
    to: &'a mut [bf16],
}

impl Job for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (to, &from) in self.to.iter_mut().zip(self.from) {
            *to = bf16::from_bits((rounded(from) >> 16) as u16);
        }
    }
}

/// Independent accumulators of a sum or a maximum.
const LANES: usize = 32;

struct Largest<'a> {
    numbers: &'a [f32],
}

impl Job for Largest<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f32 {
        let larger = |a: f32, b: f32| if b > a { b } else { a };
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (all, rest) = self.numbers.as_chunks::<LANES>();
        for numbers in all {
            for (lane, &x) in lanes.iter_mut().zip(numbers) {
                *lane = larger(*lane, x);
            }
        }
        lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
    }
}

struct Sum<'a> {
    numbers: &'a [f32],
}

impl Job for Sum<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f64 {
        let mut lanes = [0.0; LANES];
        let (all, rest) = self.numbers.as_chunks::<LANES>();
        for numbers in all {
            for (lane, &x) in lanes.iter_mut().zip(numbers) {
                *lane += x;
            }
        }
        lanes.iter().chain(rest).map(|&x| f64::from(x)).sum()
    }
}

struct Scale<'a> {
    numbers: &'a mut [f32],
    factor: f32,
    constant: f32,
}

impl Job for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { numbers, factor, constant } = self;
        if constant == 0.0 {
            return numbers.iter_mut().for_each(|x| *x *= factor);
        }
        for x in numbers {
            *x = scaled_with(*x, factor, constant);
        }
    }
}

struct Rescale<'a> {
    from: &'a [bf16],
    to: &'a mut [bf16],
    factor: f32,
    constant: f32,
}

impl Job for Rescale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { from, to, factor, constant } = self;
        let widened = |x: bf16| f32::from_bits(u32::from(x.to_bits()) << 16);
        let narrowed = |x: f32| bf16::from_bits((rounded(x) >> 16) as u16);
        if constant == 0.0 {
            for (to, &from) in to.iter_mut().zip(from) {
                *to = narrowed(widened(from) * factor);
            }
            return;
        }
        for (to, &from) in to.iter_mut().zip(from) {
            *to = narrowed(scaled_with(widened(from), factor, constant));
        }
    }
}

#[inline(always)]
fn scaled_with(x: f32, factor: f32, constant: f32) -> f32 {
    let scaled = x * factor + constant;
    if x.is_sign_negative() { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<E: Element>(isa: Isa) {
        let numbers: Vec<f32> = (0..=u16::MAX)
            .step_by(crate::ONE_IN)
            .flat_map(|bits| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| (bits, low)))
            .map(|(bits, low)| f32::from_bits(u32::from(bits) << 16 | low))
            .collect();
        let mut narrowed = vec![E::from_f32(0.0); numbers.len()];
        narrow(isa, &numbers, &mut narrowed);
        let mut widened = vec![0.0; numbers.len()];
        widen(isa, &narrowed, &mut widened);
        for (i, &x) in numbers.iter().enumerate() {
            let expected = E::from_f32(x).to_f32();
            for found in [narrowed[i].to_f32(), widened[i]] {
                let same = found.to_bits() == expected.to_bits();
                assert!(same || found.is_nan() && x.is_nan(), "{isa}: {x:e} became {found:e}");
            }
        }
    }

    #[test]
    fn sums_maxima_and_multiples() {
        for isa in Isa::available() {
            assert_eq!(largest(isa, &[]), f32::NEG_INFINITY);
            for count in [1, 31, 32, 100] {
                let mut numbers: Vec<_> = (0..count).map(|i| (i * 37 % 101) as f32).collect();
                let expected: f32 = numbers.iter().sum();
                assert_eq!(sum(isa, &numbers), f64::from(expected));
                let expected = numbers.iter().copied().fold(0.0, f32::max);
                numbers.insert(count / 2, f32::NAN);
                assert_eq!(largest(isa, &numbers), expected);
            }
            let numbers = [2.0, 0.0, -0.0].map(bf16::from_f32);
            let mut scaled = ([f32::NAN; 3], [bf16::NAN; 3]);
            scale(isa, &numbers, [3.0, -1.0], &mut scaled.0);
            scale(isa, &numbers, [3.0, -1.0], &mut scaled.1);
            assert_eq!((scaled.0, scaled.1.map(f32::from)), ([5.0, -1.0, 0.0], scaled.0));
            scale(isa, &numbers, [3.0, 0.0], &mut scaled.1);
            assert_eq!(scaled.1.map(f32::from), [6.0, 0.0, 0.0]);
        }
    }

    #[test]
    fn rounds_to_nearest_even() {
        for isa in Isa::available() {
            check::<f32>(isa);
            check::<bf16>(isa);
            check::<f16>(isa);
        }
    }
}

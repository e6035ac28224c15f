//! Between the dtype of operands and f32, a row at a time.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use xentile::{DType, Element};

use crate::{Isa, Job, Simd};

/// Numbers that are converted at a time where that takes room.
const PIECE: usize = 256;

/// `to = from`.
pub(super) fn widen<E: Element>(isa: Isa, from: &[E], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    match E::DTYPE {
        DType::F32 => to.copy_from_slice(cast(from)),
        DType::Bf16 => isa.run(Widen { from: cast(from), to }),
        DType::F16 => cast::<E, f16>(from).convert_to_f32_slice(to),
    }
}

/// `to = from`, each number rounded to nearest, ties to even.
pub(super) fn narrow<E: Element>(isa: Isa, from: &[f32], to: &mut [E]) {
    assert_eq!(from.len(), to.len());
    match E::DTYPE {
        DType::F32 => cast_mut(to).copy_from_slice(from),
        DType::Bf16 => isa.run(Narrow { from, to: cast_mut(to) }),
        DType::F16 => cast_mut::<E, f16>(to).convert_from_f32_slice(from),
    }
}

/// Rounds each number to one of `E`.
pub(super) fn round<E: Element>(isa: Isa, numbers: &mut [f32]) {
    match E::DTYPE {
        DType::F32 => {}
        DType::Bf16 => isa.run(Round { numbers }),
        DType::F16 => {
            let mut piece = [f16::ZERO; PIECE];
            for numbers in numbers.chunks_mut(PIECE) {
                let piece = &mut piece[..numbers.len()];
                piece.convert_from_f32_slice(numbers);
                piece.convert_to_f32_slice(numbers);
            }
        }
    }
}

/// Elements of `E` by their other name `F`.
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

/// Elements as f32, where they are.
pub(super) fn as_f32_mut<E: Element>(elements: &mut [E]) -> Option<&mut [f32]> {
    (E::DTYPE == DType::F32).then(|| cast_mut(elements))
}

/// The bits of the nearest bf16 in the upper half; of NaN, a NaN. Without branches, so that the
/// compiler makes vectors of it.
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

struct Round<'a> {
    numbers: &'a mut [f32],
}

impl Job for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for number in self.numbers {
            *number = f32::from_bits(rounded(*number) & 0xffff_0000);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<E: Element>(isa: Isa) {
        let numbers: Vec<f32> = (0..=u16::MAX)
            .flat_map(|bits| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| (bits, low)))
            .map(|(bits, low)| f32::from_bits(u32::from(bits) << 16 | low))
            .collect();
        let mut narrowed = vec![E::from_f32(0.0); numbers.len()];
        narrow(isa, &numbers, &mut narrowed);
        let mut widened = vec![0.0; numbers.len()];
        widen(isa, &narrowed, &mut widened);
        let mut in_place = numbers.clone();
        round::<E>(isa, &mut in_place);
        for (i, &x) in numbers.iter().enumerate() {
            let expected = E::from_f32(x).to_f32();
            for found in [narrowed[i].to_f32(), widened[i], in_place[i]] {
                let same = found.to_bits() == expected.to_bits();
                assert!(same || found.is_nan() && x.is_nan(), "{isa}: {x:e} became {found:e}");
            }
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

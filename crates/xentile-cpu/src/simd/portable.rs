//! Plain Rust for processors that no other file knows; the compiler may vectorise it.

use xentile::{DType, Element};

use super::powers::table_of_powers;
use super::{MAX_LANES, Simd};

// Of the narrowest vectors that a compiler may find, SSE2's.
const LANES: usize = 4;

/// The baseline of every target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

#[inline(always)]
fn map(x: [f32; LANES], f: impl Fn(f32) -> f32) -> [f32; LANES] {
    x.map(f)
}

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

/// The nearest element; as in the other instruction sets, a tie of bf16 goes away from 0.
#[inline(always)]
fn narrow<E: Element>(x: f32) -> E {
    match E::DTYPE {
        // Cutting a value of bf16's precision loses nothing, so its own rounding has no part.
        DType::Bf16 => E::from_f32(f32::from_bits(x.to_bits().wrapping_add(0x8000) & 0xffff_0000)),
        DType::F32 | DType::F16 => E::from_f32(x),
    }
}

impl Simd for Portable {
    type Vector = [f32; LANES];
    type Mask = [bool; LANES];

    const LANES: usize = LANES;
    const REGISTERS: usize = 16;
    const FUSED: bool = false;
    const TABLE_BITS: u32 = 0;
    const STREAMS: bool = false;
    const SPLITS_BF16: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Vector {
        [x; LANES]
    }

    #[inline(always)]
    fn to_array(self, x: Self::Vector) -> [f32; MAX_LANES] {
        let mut array = [0.0; MAX_LANES];
        array[..LANES].copy_from_slice(&x);
        array
    }

    #[inline(always)]
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        zip(a, b, |a, b| a / b)
    }

    /// Two roundings: `f32::mul_add` is a library call on targets without the instruction.
    #[inline(always)]
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }

    #[inline(always)]
    fn max(self, x: Self::Vector, bound: Self::Vector) -> Self::Vector {
        zip(x, bound, |x, bound| if x > bound { x } else { bound })
    }

    #[inline(always)]
    fn power_of_two(self, shifted: Self::Vector) -> Self::Vector {
        const ONE: u32 = table_of_powers::<1>()[0];
        map(shifted, |n| f32::from_bits((n.to_bits() << 23).wrapping_add(ONE)))
    }

    #[inline(always)]
    fn zero_below(self, value: Self::Vector, x: Self::Vector, low: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| if x[lane] < low[lane] { 0.0 } else { value[lane] })
    }

    #[inline(always)]
    fn abs(self, x: Self::Vector) -> Self::Vector {
        map(x, f32::abs)
    }

    #[inline(always)]
    fn copysign(self, magnitude: Self::Vector, sign: Self::Vector) -> Self::Vector {
        zip(magnitude, sign, f32::copysign)
    }

    #[inline(always)]
    fn less(self, a: Self::Vector, b: Self::Vector) -> Self::Mask {
        std::array::from_fn(|lane| a[lane] < b[lane])
    }

    #[inline(always)]
    fn all(self, mask: Self::Mask) -> bool {
        mask == [true; LANES]
    }

    #[inline(always)]
    fn select(self, mask: Self::Mask, yes: Self::Vector, no: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| if mask[lane] { yes[lane] } else { no[lane] })
    }

    #[inline(always)]
    fn swap_pairs(self, x: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| x[lane ^ 1])
    }

    #[inline(always)]
    unsafe fn load<E: Element>(self, from: *const E) -> [Self::Vector; 2] {
        // SAFETY: the caller vouches for a chunk of elements at `from`.
        let chunk = unsafe { from.cast::<[[E; LANES]; 2]>().read_unaligned() };
        chunk.map(|half| half.map(E::to_f32))
    }

    #[inline(always)]
    unsafe fn store<E: Element>(self, chunk: [Self::Vector; 2], to: *mut E) {
        let chunk = chunk.map(|half| half.map(narrow::<E>));
        // SAFETY: the caller vouches for room for a chunk of elements at `to`.
        unsafe { to.cast::<[[E; LANES]; 2]>().write_unaligned(chunk) };
    }

    #[inline(always)]
    unsafe fn stream<E: Element>(self, chunk: [Self::Vector; 2], to: *mut E) {
        // SAFETY: the same contract.
        unsafe { self.store(chunk, to) };
    }

    #[inline(always)]
    fn to_bf16(self, x: Self::Vector) -> Self::Vector {
        map(x, |x| {
            let bits = x.to_bits();
            f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
        })
    }

    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}

    #[inline(always)]
    fn fence(self) {}
}

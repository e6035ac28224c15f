//! NEON: 4 lanes. Every aarch64 processor that runs std has it.

use std::arch::aarch64::*;

use half::slice::HalfFloatSliceExt;
use xentile::{DType, Element};

use super::powers::table_of_powers;
use super::{MAX_LANES, Simd};

/// Proof that the processor has NEON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    pub(crate) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

/// Wraps a register-only intrinsic.
macro_rules! register {
    ($call:expr) => {
        // SAFETY: NEON is part of the target's baseline, and `detect` found it besides.
        #[allow(unused_unsafe)] // compilers differ on whether baseline intrinsics need it
        unsafe {
            $call
        }
    };
}

/// The upper 16 bits of each lane after rounding to nearest, left in the upper half. A NaN never has
/// all of its payload set here, so the addition cannot carry into the sign.
#[inline(always)]
fn round_to_bf16(x: float32x4_t) -> uint32x4_t {
    register!(vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x8000)))
}

impl Simd for Neon {
    type Vector = float32x4_t;
    type Mask = uint32x4_t;

    const LANES: usize = 4;
    const REGISTERS: usize = 32;
    const FUSED: bool = true;
    const TABLE_BITS: u32 = 0;

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        register!(vdupq_n_f32(x))
    }

    #[inline(always)]
    fn to_array(self, x: float32x4_t) -> [f32; MAX_LANES] {
        let mut array = [0.0; MAX_LANES];
        // SAFETY: as for `register!`; the array has more than 4 elements.
        unsafe { vst1q_f32(array.as_mut_ptr(), x) };
        array
    }

    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        register!(vaddq_f32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        register!(vsubq_f32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        register!(vmulq_f32(a, b))
    }

    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        register!(vdivq_f32(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        register!(vfmaq_f32(c, a, b))
    }

    /// `fmaxnm` returns the number where one of the two is NaN.
    #[inline(always)]
    fn max(self, x: float32x4_t, bound: float32x4_t) -> float32x4_t {
        register!(vmaxnmq_f32(x, bound))
    }

    #[inline(always)]
    fn power_of_two(self, shifted: float32x4_t) -> float32x4_t {
        const ONE: u32 = table_of_powers::<1>()[0];
        register!({
            let n = vreinterpretq_u32_f32(shifted);
            vreinterpretq_f32_u32(vaddq_u32(vshlq_n_u32::<23>(n), vdupq_n_u32(ONE)))
        })
    }

    #[inline(always)]
    fn zero_below(self, value: float32x4_t, x: float32x4_t, low: float32x4_t) -> float32x4_t {
        register!(vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, low))))
    }

    #[inline(always)]
    fn abs(self, x: float32x4_t) -> float32x4_t {
        register!(vabsq_f32(x))
    }

    #[inline(always)]
    fn copysign(self, magnitude: float32x4_t, sign: float32x4_t) -> float32x4_t {
        register!(vbslq_f32(vdupq_n_u32(0x8000_0000), sign, magnitude))
    }

    #[inline(always)]
    fn less(self, a: float32x4_t, b: float32x4_t) -> uint32x4_t {
        register!(vcltq_f32(a, b))
    }

    #[inline(always)]
    fn all(self, mask: uint32x4_t) -> bool {
        register!(vminvq_u32(mask) != 0)
    }

    #[inline(always)]
    fn select(self, mask: uint32x4_t, yes: float32x4_t, no: float32x4_t) -> float32x4_t {
        register!(vbslq_f32(mask, yes, no))
    }

    #[inline(always)]
    fn swap_pairs(self, x: float32x4_t) -> float32x4_t {
        register!(vrev64q_f32(x))
    }

    #[inline(always)]
    unsafe fn load<E: Element>(self, from: *const E) -> [float32x4_t; 2] {
        // SAFETY: NEON as for `register!`; the caller vouches for 8 elements at `from`.
        unsafe {
            match E::DTYPE {
                DType::F32 => {
                    let from = from.cast::<f32>();
                    [vld1q_f32(from), vld1q_f32(from.add(4))]
                }
                DType::Bf16 => {
                    let both = vreinterpretq_u32_u16(vld1q_u16(from.cast()));
                    let odd = vandq_u32(both, vdupq_n_u32(0xffff_0000));
                    [vreinterpretq_f32_u32(vshlq_n_u32::<16>(both)), vreinterpretq_f32_u32(odd)]
                }
                // Through `half`, which uses the conversion instruction: its intrinsics are newer
                // than the oldest compiler supported.
                DType::F16 => {
                    let halves = from.cast::<[half::f16; 8]>().read_unaligned();
                    let mut wide = [0.0; 8];
                    halves.convert_to_f32_slice(&mut wide);
                    [vld1q_f32(wide.as_ptr()), vld1q_f32(wide.as_ptr().add(4))]
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store<E: Element>(self, chunk: [float32x4_t; 2], to: *mut E) {
        // SAFETY: NEON as for `register!`; the caller vouches for 8 elements at `to`.
        unsafe {
            match E::DTYPE {
                DType::F32 => {
                    vst1q_f32(to.cast(), chunk[0]);
                    vst1q_f32(to.cast::<f32>().add(4), chunk[1]);
                }
                DType::Bf16 => {
                    let low = vshrq_n_u32::<16>(round_to_bf16(chunk[0]));
                    let upper = vdupq_n_u32(0xffff_0000);
                    let both = vbslq_u32(upper, round_to_bf16(chunk[1]), low);
                    vst1q_u16(to.cast(), vreinterpretq_u16_u32(both));
                }
                DType::F16 => {
                    let mut wide = [0.0; 8];
                    vst1q_f32(wide.as_mut_ptr(), chunk[0]);
                    vst1q_f32(wide.as_mut_ptr().add(4), chunk[1]);
                    let mut halves = [half::f16::ZERO; 8];
                    halves.convert_from_f32_slice(&wide);
                    to.cast::<[half::f16; 8]>().write_unaligned(halves);
                }
            }
        }
    }

    /// An ordinary store: aarch64 cores recognise whole lines being written.
    #[inline(always)]
    unsafe fn stream<E: Element>(self, chunk: [float32x4_t; 2], to: *mut E) {
        // SAFETY: the same contract.
        unsafe { self.store(chunk, to) };
    }

    #[inline(always)]
    fn to_bf16(self, x: float32x4_t) -> float32x4_t {
        register!({
            let bits = vreinterpretq_u32_f32(x);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            vreinterpretq_f32_u32(vandq_u32(rounded, vdupq_n_u32(0xffff_0000)))
        })
    }

    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}

    #[inline(always)]
    fn fence(self) {}
}

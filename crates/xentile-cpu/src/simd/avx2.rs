//! AVX2 with FMA and F16C: 8 lanes.

use std::arch::asm;
use std::arch::x86_64::*;

use xentile::{DType, Element};

use super::powers::table_of_powers;
use super::{Fp8, Job, MAX_LANES, Simd};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

/// Wraps a register-only intrinsic.
macro_rules! register {
    ($call:expr) => {
        // SAFETY: an `Avx2` exists only where `detect` found every feature that is needed here.
        unsafe { $call }
    };
}

/// The upper 16 bits of each lane after rounding to nearest, left in the upper half. A NaN never has
/// all of its payload set here, so the addition cannot carry into the sign.
#[inline(always)]
fn round_to_bf16(x: __m256) -> __m256i {
    register!(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000)))
}

/// Both vectors as one register of 16 two-byte elements: for bf16 even elements come from the
/// first and odd from the second, for f16 the first vector is the first half.
#[inline(always)]
fn narrow<E: Element>([first, second]: [__m256; 2]) -> __m256i {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
    register!(match E::DTYPE {
        DType::Bf16 => {
            let low = _mm256_srli_epi32::<16>(round_to_bf16(first));
            _mm256_blend_epi16::<0xaa>(low, round_to_bf16(second))
        }
        DType::F16 =>
            _mm256_set_m128i(_mm256_cvtps_ph::<NEAREST>(second), _mm256_cvtps_ph::<NEAREST>(first)),
        DType::F32 => unreachable!("f32 is not narrowed"),
    })
}

/// `a * b + c`, in assembly, since the compiler loads constants into registers before a loop and,
/// having too few, then keeps the loop's own state in memory: beyond its latency, a store between
/// non-temporal ones of half a line makes them several times slower.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn mul_add_by(mut a: __m256, b: &__m256, c: __m256) -> __m256 {
    // SAFETY: the features are there, and `b` is 32 bytes to read.
    unsafe {
        asm!("vfmadd132ps {a}, {c}, ymmword ptr [{b}]", a = inout(ymm_reg) a, b = in(reg) b,
            c = in(ymm_reg) c, options(pure, readonly, nostack, preserves_flags));
    }
    a
}

/// As [`mul_add_by`], but for the operand in memory.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn mul_add_to(mut a: __m256, b: __m256, c: &__m256) -> __m256 {
    // SAFETY: the features are there, and `c` is 32 bytes to read.
    unsafe {
        asm!("vfmadd213ps {a}, {b}, ymmword ptr [{c}]", a = inout(ymm_reg) a, c = in(reg) c,
            b = in(ymm_reg) b, options(pure, readonly, nostack, preserves_flags));
    }
    a
}

/// `bits` in every lane.
#[inline(always)]
fn splat(bits: u32) -> __m256i {
    register!(_mm256_set1_epi32(bits as i32))
}

/// The bits of each lane without those of the mantissa that a format of 8 bits drops.
#[inline(always)]
fn without_dropped<const E5M2: bool>(x: __m256i) -> __m256i {
    if E5M2 { register!(_mm256_srli_epi32::<21>(x)) } else { register!(_mm256_srli_epi32::<20>(x)) }
}

/// The bits of each lane in 8, in its lowest byte: the others are 0.
#[inline(always)]
fn round_to_fp8<const E5M2: bool>(x: __m256) -> __m256i {
    let bits = register!(_mm256_castps_si256(x));
    register!({
        let magnitude = _mm256_and_si256(bits, splat(0x7fff_ffff));
        let cut = _mm256_min_epu32(magnitude, splat(Fp8::<E5M2>::LARGEST));
        let odd = _mm256_and_si256(without_dropped::<E5M2>(cut), splat(1));
        let sum = _mm256_add_epi32(_mm256_add_epi32(cut, splat(Fp8::<E5M2>::ROUNDED)), odd);
        let normal = without_dropped::<E5M2>(sum);
        let aligned = splat(Fp8::<E5M2>::ALIGNED);
        let sum = _mm256_add_ps(_mm256_castsi256_ps(cut), _mm256_castsi256_ps(aligned));
        let small = _mm256_sub_epi32(_mm256_castps_si256(sum), aligned);
        let is_small = _mm256_cmpgt_epi32(splat(Fp8::<E5M2>::LEAST_NORMAL), cut);
        let found = _mm256_blendv_epi8(normal, small, is_small);
        let is_nan = _mm256_cmpgt_epi32(magnitude, splat(0x7f80_0000));
        let found = _mm256_blendv_epi8(found, splat(Fp8::<E5M2>::NAN), is_nan);
        _mm256_or_si256(found, _mm256_and_si256(_mm256_srli_epi32::<24>(bits), splat(0x80)))
    })
}

/// A chunk in 8 bits, in the order of elements.
#[inline(always)]
fn packed_fp8<E: Element, const E5M2: bool>(chunk: [__m256; 2]) -> __m128i {
    let (first, second) = (round_to_fp8::<E5M2>(chunk[0]), round_to_fp8::<E5M2>(chunk[1]));
    register!({
        // Each half of a register packs its own.
        let halves = if E::DTYPE == DType::Bf16 {
            // Even and odd elements, in pairs.
            let pairs = _mm256_or_si256(first, _mm256_slli_epi32::<8>(second));
            _mm256_packus_epi32(pairs, pairs)
        } else {
            let words = _mm256_packus_epi32(first, second);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            _mm256_packus_epi16(words, words)
        };
        _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b10_00>(halves))
    })
}

impl Simd for Avx2 {
    type Vector = __m256;
    type Mask = __m256;

    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    const FUSED: bool = true;
    const TABLE_BITS: u32 = 2;
    const HALVES: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        register!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    fn to_array(self, x: __m256) -> [f32; MAX_LANES] {
        let mut array = [0.0; MAX_LANES];
        // SAFETY: as for `register!`; the array has more than 8 elements.
        unsafe { _mm256_storeu_ps(array.as_mut_ptr(), x) };
        array
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        register!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        register!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        register!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        register!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        register!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn mul_add_by(self, a: __m256, b: &__m256, c: __m256) -> __m256 {
        register!(mul_add_by(a, b, c))
    }

    #[inline(always)]
    fn mul_add_to(self, a: __m256, b: __m256, c: &__m256) -> __m256 {
        register!(mul_add_to(a, b, c))
    }

    #[inline(always)]
    fn max(self, x: __m256, bound: __m256) -> __m256 {
        register!(_mm256_max_ps(x, bound))
    }

    #[inline(always)]
    fn power_of_two(self, shifted: __m256) -> __m256 {
        // Four entries, since a permutation within 128 bits is one operation; one across them
        // takes the place of four on AMD's Zen 3.
        const TABLE: [u32; 4] = table_of_powers();
        // SAFETY: as for `register!`; the table has 4 entries.
        unsafe {
            let n = _mm256_castps_si256(shifted);
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(TABLE.as_ptr().cast()));
            let fraction = _mm256_permutevar_ps(_mm256_castsi256_ps(table), n);
            let exponent = _mm256_slli_epi32::<21>(n);
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(fraction), exponent))
        }
    }

    #[inline(always)]
    fn zero_below(self, value: __m256, x: __m256, low: __m256) -> __m256 {
        register!(_mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, low), value))
    }

    #[inline(always)]
    fn abs(self, x: __m256) -> __m256 {
        register!(_mm256_andnot_ps(self.splat(-0.0), x))
    }

    #[inline(always)]
    fn copysign(self, magnitude: __m256, sign: __m256) -> __m256 {
        let mask = self.splat(-0.0);
        register!(_mm256_or_ps(_mm256_andnot_ps(mask, magnitude), _mm256_and_ps(mask, sign)))
    }

    #[inline(always)]
    fn less(self, a: __m256, b: __m256) -> __m256 {
        register!(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }

    #[inline(always)]
    fn all(self, mask: __m256) -> bool {
        register!(_mm256_movemask_ps(mask) == 0xff)
    }

    #[inline(always)]
    fn select(self, mask: __m256, yes: __m256, no: __m256) -> __m256 {
        register!(_mm256_blendv_ps(no, yes, mask))
    }

    #[inline(always)]
    fn swap_pairs(self, x: __m256) -> __m256 {
        register!(_mm256_permute_ps::<0b10_11_00_01>(x))
    }

    #[inline(always)]
    unsafe fn load<E: Element>(self, from: *const E) -> [__m256; 2] {
        // SAFETY: features as for `register!`; the caller vouches for 16 elements at `from`.
        unsafe {
            match E::DTYPE {
                DType::F32 => {
                    let from = from.cast::<f32>();
                    [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))]
                }
                DType::Bf16 => {
                    let both = _mm256_loadu_si256(from.cast());
                    let odd = _mm256_and_si256(both, _mm256_set1_epi32(0xffff_0000_u32 as i32));
                    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(both)), _mm256_castsi256_ps(odd)]
                }
                DType::F16 => {
                    let from = from.cast::<__m128i>();
                    [
                        _mm256_cvtph_ps(_mm_loadu_si128(from)),
                        _mm256_cvtph_ps(_mm_loadu_si128(from.add(1))),
                    ]
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store<E: Element>(self, chunk: [__m256; 2], to: *mut E) {
        // SAFETY: features as for `register!`; the caller vouches for 16 elements at `to`.
        unsafe {
            if E::DTYPE == DType::F32 {
                _mm256_storeu_ps(to.cast(), chunk[0]);
                _mm256_storeu_ps(to.cast::<f32>().add(8), chunk[1]);
            } else {
                _mm256_storeu_si256(to.cast(), narrow::<E>(chunk));
            }
        }
    }

    #[inline(always)]
    unsafe fn stream<E: Element>(self, chunk: [__m256; 2], to: *mut E) {
        // SAFETY: as for `store`, and the caller vouches for alignment to 32 bytes at least.
        unsafe {
            if E::DTYPE == DType::F32 {
                _mm256_stream_ps(to.cast(), chunk[0]);
                _mm256_stream_ps(to.cast::<f32>().add(8), chunk[1]);
            } else {
                _mm256_stream_si256(to.cast(), narrow::<E>(chunk));
            }
        }
    }

    #[inline(always)]
    unsafe fn store_fp8<E: Element, const E5M2: bool>(self, chunk: [__m256; 2], to: *mut u8) {
        // SAFETY: features as for `register!`; the caller vouches for 16 bytes at `to`.
        unsafe { _mm_storeu_si128(to.cast(), packed_fp8::<E, E5M2>(chunk)) };
    }

    #[inline(always)]
    unsafe fn stream_fp8<E: Element, const E5M2: bool>(
        self,
        chunks: [[__m256; 2]; 2],
        to: *mut u8,
    ) {
        let low = packed_fp8::<E, E5M2>(chunks[0]);
        let high = packed_fp8::<E, E5M2>(chunks[1]);
        // SAFETY: features as for `register!`; the caller vouches for 32 bytes at `to`, aligned.
        unsafe { _mm256_stream_si256(to.cast(), _mm256_set_m128i(high, low)) };
    }

    #[inline(always)]
    fn to_bf16(self, x: __m256) -> __m256 {
        register!({
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            _mm256_castsi256_ps(_mm256_and_si256(rounded, upper))
        })
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        register!(_mm_prefetch::<_MM_HINT_T1>(at.cast()));
    }

    #[inline(always)]
    fn fence(self) {
        register!(_mm_sfence());
    }

    #[inline(always)]
    fn outline<J: Job>(self, job: J) -> J::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        fn run<J: Job>(job: J, simd: Avx2) -> J::Output {
            job.run(simd)
        }
        register!(run(job, self))
    }
}

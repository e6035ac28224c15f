//! AVX-512 (F, BW, VL, DQ): 16 lanes, and rounding and scaling as single instructions.

use std::arch::x86_64::*;
use std::mem::transmute;

use xentile::{DType, Element};

use super::powers::table_of_powers;
use super::{Fp8, MAX_LANES, MulAdd, Simd};

/// Proof that the processor has AVX-512 F, BW, VL and DQ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

/// Proof that the processor has AVX-512 BF16 besides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairsOfBf16(Avx512);

impl PairsOfBf16 {
    pub(crate) fn detect() -> Option<Self> {
        Avx512::detect().filter(|_| is_x86_feature_detected!("avx512bf16")).map(Self)
    }

    /// What else the processor has.
    pub(crate) fn avx512(self) -> Avx512 {
        self.0
    }
}

/// Words are pairs of bf16, both of whose products are added, the second first. Numbers below the
/// normal range count as 0.
impl MulAdd<Avx512> for PairsOfBf16 {
    #[inline(always)]
    fn mul_add(self, _: Avx512, left: __m512, right: __m512, sum: __m512) -> __m512 {
        let bf16 = |words| {
            // SAFETY: any bits are vectors of both types.
            unsafe { transmute::<__m512, __m512bh>(words) }
        };
        // SAFETY: a `PairsOfBf16` exists only where `detect` found the feature.
        unsafe { _mm512_dpbf16_ps(sum, bf16(left), bf16(right)) }
    }
}

/// Wraps a register-only intrinsic.
macro_rules! register {
    ($call:expr) => {
        // SAFETY: an `Avx512` exists only where `detect` found every feature that is needed here.
        unsafe { $call }
    };
}

/// The upper 16 bits of each lane after rounding to nearest, left in the upper half. A NaN never has
/// all of its payload set here, so the addition cannot carry into the sign.
#[inline(always)]
fn round_to_bf16(x: __m512) -> __m512i {
    register!(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)))
}

/// Both vectors as one register of 32 bf16: even elements come from the first, odd from the second.
#[inline(always)]
fn interleave_bf16([even, odd]: [__m512; 2]) -> __m512i {
    register!({
        let low = _mm512_srli_epi32::<16>(round_to_bf16(even));
        _mm512_mask_blend_epi16(0xaaaa_aaaa, low, round_to_bf16(odd))
    })
}

#[inline(always)]
fn to_f16(x: __m512) -> __m256i {
    register!(_mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
}

/// `bits` in every lane.
#[inline(always)]
fn splat(bits: u32) -> __m512i {
    register!(_mm512_set1_epi32(bits as i32))
}

/// The bits of each lane without those of the mantissa that a format of 8 bits drops.
#[inline(always)]
fn without_dropped<const E5M2: bool>(x: __m512i) -> __m512i {
    if E5M2 { register!(_mm512_srli_epi32::<21>(x)) } else { register!(_mm512_srli_epi32::<20>(x)) }
}

/// The bits of each lane in 8, in its lowest byte: the others are 0.
#[inline(always)]
fn round_to_fp8<const E5M2: bool>(x: __m512) -> __m512i {
    let bits = register!(_mm512_castps_si512(x));
    register!({
        let magnitude = _mm512_and_si512(bits, splat(0x7fff_ffff));
        let cut = _mm512_min_epu32(magnitude, splat(Fp8::<E5M2>::LARGEST));
        let odd = _mm512_and_si512(without_dropped::<E5M2>(cut), splat(1));
        let sum = _mm512_add_epi32(_mm512_add_epi32(cut, splat(Fp8::<E5M2>::ROUNDED)), odd);
        let normal = without_dropped::<E5M2>(sum);
        let aligned = splat(Fp8::<E5M2>::ALIGNED);
        let sum = _mm512_add_ps(_mm512_castsi512_ps(cut), _mm512_castsi512_ps(aligned));
        let is_small = _mm512_cmplt_epu32_mask(cut, splat(Fp8::<E5M2>::LEAST_NORMAL));
        let found = _mm512_mask_sub_epi32(normal, is_small, _mm512_castps_si512(sum), aligned);
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let found = _mm512_mask_mov_epi32(found, is_nan, splat(Fp8::<E5M2>::NAN));
        // (bits >> 24 & 0x80) | found
        _mm512_ternarylogic_epi32::<0xf8>(found, _mm512_srli_epi32::<24>(bits), splat(0x80))
    })
}

/// A chunk in 8 bits, in the order of elements.
#[inline(always)]
fn packed_fp8<E: Element, const E5M2: bool>(chunk: [__m512; 2]) -> __m256i {
    let (first, second) = (round_to_fp8::<E5M2>(chunk[0]), round_to_fp8::<E5M2>(chunk[1]));
    register!({
        if E::DTYPE == DType::Bf16 {
            // Even and odd elements.
            return _mm512_cvtepi32_epi16(_mm512_or_si512(first, _mm512_slli_epi32::<8>(second)));
        }
        let low = _mm256_castsi128_si256(_mm512_cvtepi32_epi8(first));
        _mm256_inserti128_si256::<1>(low, _mm512_cvtepi32_epi8(second))
    })
}

/// The transposed of each of 16 blocks of 4 by 4 numbers, where they are.
#[inline(always)]
fn turn_blocks(rows: [__m512; 16]) -> [__m512; 16] {
    let pairs: [__m512; 16] = std::array::from_fn(|i| {
        let (first, second) = (rows[i & !3 | i >> 1 & 1], rows[i & !3 | i >> 1 & 1 | 2]);
        // Rows 0 and 2, or 1 and 3, of four.
        match i & 1 {
            0 => register!(_mm512_unpacklo_ps(first, second)),
            _ => register!(_mm512_unpackhi_ps(first, second)),
        }
    });
    std::array::from_fn(|i| {
        let (even, odd) = (pairs[i & !3 | i >> 1 & 1], pairs[i & !3 | i >> 1 & 1 | 2]);
        match i & 1 {
            0 => register!(_mm512_unpacklo_ps(even, odd)),
            _ => register!(_mm512_unpackhi_ps(even, odd)),
        }
    })
}

/// The transposed of 4 by 4 blocks, as they are.
#[inline(always)]
fn turn_order(rows: [__m512; 16]) -> [__m512; 16] {
    let halves: [__m512; 16] = std::array::from_fn(|i| {
        // Of rows a block apart, their even blocks or their odd ones.
        let (first, second) = (rows[i & 3 | i & 8], rows[i & 3 | i & 8 | 4]);
        match i >> 2 & 1 {
            0 => register!(_mm512_shuffle_f32x4::<0b10_00_10_00>(first, second)),
            _ => register!(_mm512_shuffle_f32x4::<0b11_01_11_01>(first, second)),
        }
    });
    std::array::from_fn(|i| {
        let (first, second) = (halves[i & 7], halves[i & 7 | 8]);
        match i >> 3 {
            0 => register!(_mm512_shuffle_f32x4::<0b10_00_10_00>(first, second)),
            _ => register!(_mm512_shuffle_f32x4::<0b11_01_11_01>(first, second)),
        }
    })
}

impl Simd for Avx512 {
    type Vector = __m512;
    type Mask = __mmask16;

    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    const FUSED: bool = true;
    const TABLE_BITS: u32 = 5;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        register!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn to_array(self, x: __m512) -> [f32; MAX_LANES] {
        let mut array = [0.0; MAX_LANES];
        // SAFETY: as for `register!`; the array has 16 elements.
        unsafe { _mm512_storeu_ps(array.as_mut_ptr(), x) };
        array
    }

    #[inline(always)]
    fn turn(self, from: &[f32], from_step: usize, to: &mut [f32], to_step: usize) {
        assert!((MAX_LANES - 1) * from_step + MAX_LANES <= from.len());
        assert!((MAX_LANES - 1) * to_step + MAX_LANES <= to.len());
        let rows = std::array::from_fn(|row| {
            // SAFETY: as for `register!`; the assertion says that the row is there.
            unsafe { _mm512_loadu_ps(from.as_ptr().add(row * from_step)) }
        });
        for (row, lanes) in turn_order(turn_blocks(rows)).into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr().add(row * to_step), lanes) };
        }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        register!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        register!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        register!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        register!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        register!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, x: __m512, bound: __m512) -> __m512 {
        register!(_mm512_max_ps(x, bound))
    }

    #[inline(always)]
    fn power_of_two(self, shifted: __m512) -> __m512 {
        const TABLE: [u32; 32] = table_of_powers();
        // SAFETY: as for `register!`; the table has 32 entries.
        unsafe {
            let n = _mm512_castps_si512(shifted);
            let low = _mm512_loadu_si512(TABLE.as_ptr().cast());
            let high = _mm512_loadu_si512(TABLE.as_ptr().add(16).cast());
            let fraction = _mm512_permutex2var_epi32(low, n, high);
            _mm512_castsi512_ps(_mm512_add_epi32(fraction, _mm512_slli_epi32::<18>(n)))
        }
    }

    #[inline(always)]
    fn zero_below(self, value: __m512, x: __m512, low: __m512) -> __m512 {
        register!(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, low), value))
    }

    #[inline(always)]
    fn abs(self, x: __m512) -> __m512 {
        register!(_mm512_abs_ps(x))
    }

    #[inline(always)]
    fn copysign(self, magnitude: __m512, sign: __m512) -> __m512 {
        let mask = self.splat(-0.0);
        register!(_mm512_or_ps(_mm512_andnot_ps(mask, magnitude), _mm512_and_ps(mask, sign)))
    }

    #[inline(always)]
    fn less(self, a: __m512, b: __m512) -> __mmask16 {
        register!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }

    #[inline(always)]
    fn all(self, mask: __mmask16) -> bool {
        mask == !0
    }

    #[inline(always)]
    fn select(self, mask: __mmask16, yes: __m512, no: __m512) -> __m512 {
        register!(_mm512_mask_blend_ps(mask, no, yes))
    }

    #[inline(always)]
    fn swap_pairs(self, x: __m512) -> __m512 {
        register!(_mm512_permute_ps::<0b10_11_00_01>(x))
    }

    #[inline(always)]
    fn sum(self, x: __m512) -> f64 {
        register!({
            let low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
            let high = _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(x));
            _mm512_reduce_add_pd(_mm512_add_pd(low, high))
        })
    }

    #[inline(always)]
    fn largest(self, x: __m512) -> f32 {
        // In this order NaN is left aside.
        register!(_mm512_reduce_max_ps(_mm512_max_ps(x, self.splat(f32::NEG_INFINITY))))
    }

    #[inline(always)]
    unsafe fn load_part<E: Element>(self, from: *const E, count: usize, rest: E) -> [__m512; 2] {
        let mask = ((1_u64 << count) - 1) as u32;
        // SAFETY: features as for `register!`; masked elements are not read.
        unsafe {
            if E::DTYPE == DType::F32 {
                let (from, rest) = (from.cast::<f32>(), self.splat(rest.to_f32()));
                return [
                    _mm512_mask_loadu_ps(rest, mask as u16, from),
                    _mm512_mask_loadu_ps(rest, (mask >> 16) as u16, from.wrapping_add(16)),
                ];
            }
            let mut buffer = [rest; 32];
            let padded = _mm512_loadu_si512(buffer.as_ptr().cast());
            let all = _mm512_mask_loadu_epi16(padded, mask, from.cast());
            _mm512_storeu_si512(buffer.as_mut_ptr().cast(), all);
            self.load(buffer.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn store_part<E: Element>(self, chunk: [__m512; 2], to: *mut E, count: usize) {
        let mask = ((1_u64 << count) - 1) as u32;
        // SAFETY: features as for `register!`; masked elements are not written.
        unsafe {
            if E::DTYPE == DType::F32 {
                let to = to.cast::<f32>();
                _mm512_mask_storeu_ps(to, mask as u16, chunk[0]);
                _mm512_mask_storeu_ps(to.wrapping_add(16), (mask >> 16) as u16, chunk[1]);
                return;
            }
            let mut buffer = [E::from_f32(0.0); 32];
            self.store(chunk, buffer.as_mut_ptr());
            let all = _mm512_loadu_si512(buffer.as_ptr().cast());
            _mm512_mask_storeu_epi16(to.cast(), mask, all);
        }
    }

    #[inline(always)]
    unsafe fn load<E: Element>(self, from: *const E) -> [__m512; 2] {
        // SAFETY: features as for `register!`; the caller vouches for 32 elements at `from`.
        unsafe {
            match E::DTYPE {
                DType::F32 => {
                    let from = from.cast::<f32>();
                    [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))]
                }
                DType::Bf16 => {
                    let both = _mm512_loadu_si512(from.cast());
                    let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(odd)]
                }
                DType::F16 => {
                    let from = from.cast::<__m256i>();
                    [
                        _mm512_cvtph_ps(_mm256_loadu_si256(from)),
                        _mm512_cvtph_ps(_mm256_loadu_si256(from.add(1))),
                    ]
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store<E: Element>(self, chunk: [__m512; 2], to: *mut E) {
        // SAFETY: features as for `register!`; the caller vouches for 32 elements at `to`.
        unsafe {
            match E::DTYPE {
                DType::F32 => {
                    _mm512_storeu_ps(to.cast(), chunk[0]);
                    _mm512_storeu_ps(to.cast::<f32>().add(16), chunk[1]);
                }
                DType::Bf16 => _mm512_storeu_si512(to.cast(), interleave_bf16(chunk)),
                DType::F16 => {
                    _mm256_storeu_si256(to.cast(), to_f16(chunk[0]));
                    _mm256_storeu_si256(to.cast::<__m256i>().add(1), to_f16(chunk[1]));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn stream<E: Element>(self, chunk: [__m512; 2], to: *mut E) {
        // SAFETY: as for `store`, and the caller vouches for alignment to 64 bytes.
        unsafe {
            match E::DTYPE {
                DType::F32 => {
                    _mm512_stream_ps(to.cast(), chunk[0]);
                    _mm512_stream_ps(to.cast::<f32>().add(16), chunk[1]);
                }
                DType::Bf16 => _mm512_stream_si512(to.cast(), interleave_bf16(chunk)),
                DType::F16 => {
                    let low = _mm512_castsi256_si512(to_f16(chunk[0]));
                    let both = _mm512_inserti64x4::<1>(low, to_f16(chunk[1]));
                    _mm512_stream_si512(to.cast(), both);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store_fp8<E: Element, const E5M2: bool>(self, chunk: [__m512; 2], to: *mut u8) {
        // SAFETY: features as for `register!`; the caller vouches for 32 bytes at `to`.
        unsafe { _mm256_storeu_si256(to.cast(), packed_fp8::<E, E5M2>(chunk)) };
    }

    #[inline(always)]
    unsafe fn stream_fp8<E: Element, const E5M2: bool>(
        self,
        chunks: [[__m512; 2]; 2],
        to: *mut u8,
    ) {
        let low = packed_fp8::<E, E5M2>(chunks[0]);
        let high = packed_fp8::<E, E5M2>(chunks[1]);
        // SAFETY: features as for `register!`; the caller vouches for 64 bytes at `to`, on a line.
        unsafe {
            let line = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            _mm512_stream_si512(to.cast(), line);
        }
    }

    #[inline(always)]
    fn to_bf16(self, x: __m512) -> __m512 {
        register!({
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            _mm512_castsi512_ps(_mm512_and_si512(rounded, upper))
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
}

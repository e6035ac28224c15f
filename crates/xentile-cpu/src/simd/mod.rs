//! What kernels ask of an instruction set: vectors of f32, and pairs of vectors read from and
//! written to memory in any [`Element`].
//!
//! A value of an implementing type is proof that the processor has the instructions, so arithmetic
//! is safe; only memory access is not.

// Elsewhere only tests have tiles.
#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod powers;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use amx::Amx;
pub(crate) use amx::{BLOCK, Factors, Sums, TILE, Tiles};
#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Avx512, PairsOfBf16};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;
pub use powers::EXP_SCALE;

use xentile::{DType, Element};

/// Proof that the processor multiplies pairs of bf16. Of these instruction sets none does.
#[cfg(not(target_arch = "x86_64"))]
#[derive(Clone, Copy, Debug)]
pub(crate) enum PairsOfBf16 {}

/// The most lanes that a vector of any instruction set has.
pub(crate) const MAX_LANES: usize = 16;

/// The most elements that a chunk of any instruction set has.
pub(crate) const MAX_CHUNK: usize = 2 * MAX_LANES;

/// What memory moves at a time.
pub(crate) const LINE_BYTES: usize = 64;

/// Outputs of at least this many bytes are written past the caches, since they cannot stay there;
/// smaller ones are left for their reader to find.
pub(crate) const STREAM_BYTES: usize = 8 << 20;

/// Vectors of f32 in one instruction set.
///
/// Memory is read and written in *chunks* of two vectors. A chunk keeps no promise about which
/// lane holds which element, only that [`store`](Self::store) undoes what [`load`](Self::load) did:
/// splitting bf16 into even and odd elements is cheaper than keeping them in order.
pub trait Simd: Copy + Send + Sync + 'static {
    /// A vector of f32.
    type Vector: Copy;
    /// The outcome of a comparison in each lane.
    type Mask: Copy;

    /// Lanes of a vector.
    const LANES: usize;
    /// Vector registers: with 32, kernels work on two chunks at a time.
    const REGISTERS: usize;
    /// Whether [`mul_add`](Self::mul_add) rounds once.
    const FUSED: bool;
    /// Bits of the index into the table of powers of two that fits in registers.
    const TABLE_BITS: u32;
    /// Whether kernels take exponentials in two halves and as products, by `math::Halves`: for few
    /// registers and a short window of out-of-order execution.
    const HALVES: bool = false;
    /// Whether [`stream`](Self::stream) is another thing than [`store`](Self::store).
    const STREAMS: bool = true;
    /// Whether a chunk of bf16 has even elements in one vector and odd ones in the other.
    const SPLITS_BF16: bool = true;
    /// Elements of a chunk.
    const CHUNK: usize = 2 * Self::LANES;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::Vector;
    /// The lanes of `x`, then zeros.
    fn to_array(self, x: Self::Vector) -> [f32; MAX_LANES];
    /// `a + b`.
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a - b`.
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b`.
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a / b`.
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`, in one rounding where the instruction set can.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// [`mul_add`](Self::mul_add) with `b` read from memory, sparing a register.
    #[inline(always)]
    fn mul_add_by(self, a: Self::Vector, b: &Self::Vector, c: Self::Vector) -> Self::Vector {
        self.mul_add(a, *b, c)
    }
    /// [`mul_add`](Self::mul_add) with `c` read from memory, sparing a register.
    #[inline(always)]
    fn mul_add_to(self, a: Self::Vector, b: Self::Vector, c: &Self::Vector) -> Self::Vector {
        self.mul_add(a, b, *c)
    }
    /// The larger of `x` and `bound`; `bound` where `x` is NaN.
    fn max(self, x: Self::Vector, bound: Self::Vector) -> Self::Vector;
    /// Of `shifted = 1.5 * 2^(23 - b) + n / 2^b`, with `b` = [`TABLE_BITS`](Self::TABLE_BITS):
    /// `2^(n / 2^b)` times [`EXP_SCALE`](crate::math::EXP_SCALE), for results in the normal range.
    fn power_of_two(self, shifted: Self::Vector) -> Self::Vector;
    /// 0 where `x < low`, elsewhere (also where `x` is NaN) `value`.
    fn zero_below(self, value: Self::Vector, x: Self::Vector, low: Self::Vector) -> Self::Vector;
    /// `|x|`.
    fn abs(self, x: Self::Vector) -> Self::Vector;
    /// `|magnitude|` with the sign of `sign`.
    fn copysign(self, magnitude: Self::Vector, sign: Self::Vector) -> Self::Vector;
    /// `a < b`; false where either is NaN.
    fn less(self, a: Self::Vector, b: Self::Vector) -> Self::Mask;
    /// Whether `mask` holds in every lane.
    fn all(self, mask: Self::Mask) -> bool;
    /// `yes` where `mask` holds, else `no`.
    fn select(self, mask: Self::Mask, yes: Self::Vector, no: Self::Vector) -> Self::Vector;
    /// Each lane with an even number in the place of the next, and that in its own.
    fn swap_pairs(self, x: Self::Vector) -> Self::Vector;

    /// Reads a chunk.
    ///
    /// # Safety
    /// `from` is valid for reads of [`CHUNK`](Self::CHUNK) elements.
    unsafe fn load<E: Element>(self, from: *const E) -> [Self::Vector; 2];

    /// Writes a chunk, rounding to nearest. A tie goes to even, in bf16 away from 0: deciding it
    /// takes three more instructions, and what a kernel rounds is an approximation whose true value
    /// lies on either side of the tie.
    ///
    /// # Safety
    /// `to` is valid for writes of [`CHUNK`](Self::CHUNK) elements.
    unsafe fn store<E: Element>(self, chunk: [Self::Vector; 2], to: *mut E);

    /// Reads the first `count` elements of a chunk, with `rest` for those after them.
    ///
    /// # Safety
    /// `from` is valid for reads of `count` elements, which are at most a chunk.
    #[inline(always)]
    unsafe fn load_part<E: Element>(
        self,
        from: *const E,
        count: usize,
        rest: E,
    ) -> [Self::Vector; 2] {
        let mut buffer = [rest; MAX_CHUNK];
        // SAFETY: the caller's, and the buffer holds the largest chunk there is.
        unsafe {
            from.copy_to_nonoverlapping(buffer.as_mut_ptr(), count);
            self.load(buffer.as_ptr())
        }
    }

    /// Writes the first `count` elements of a chunk, as [`store`](Self::store) does.
    ///
    /// # Safety
    /// `to` is valid for writes of `count` elements, which are at most a chunk.
    #[inline(always)]
    unsafe fn store_part<E: Element>(self, chunk: [Self::Vector; 2], to: *mut E, count: usize) {
        let mut buffer = [E::from_f32(0.0); MAX_CHUNK];
        // SAFETY: as for `load_part`.
        unsafe {
            self.store(chunk, buffer.as_mut_ptr());
            buffer.as_ptr().copy_to_nonoverlapping(to, count);
        }
    }

    /// Where a chunk of `E` has its element `index`: in lane `place % LANES` of vector `place / LANES`.
    #[inline(always)]
    fn place<E: Element>(index: usize) -> usize {
        if Self::SPLITS_BF16 && E::DTYPE == DType::Bf16 {
            index % 2 * Self::LANES + index / 2
        } else {
            index
        }
    }

    /// Writes a chunk as [`store`](Self::store) does, past the caches where the instruction set
    /// can: nothing is read from memory to make room for it. A [`fence`](Self::fence) must follow
    /// before another thread reads.
    ///
    /// # Safety
    /// As for [`store`](Self::store), and `to` lies on a multiple of 64 bytes or of the chunk's
    /// bytes, whichever is smaller.
    unsafe fn stream<E: Element>(self, chunk: [Self::Vector; 2], to: *mut E);

    /// Writes a chunk by [`stream`](Self::stream) or by [`store`](Self::store).
    ///
    /// # Safety
    /// As for [`stream`](Self::stream).
    #[inline(always)]
    unsafe fn put<E: Element, const STREAM: bool>(self, chunk: [Self::Vector; 2], to: *mut E) {
        // SAFETY: the same contract.
        unsafe { if STREAM { self.stream(chunk, to) } else { self.store(chunk, to) } };
    }

    /// The nearest number of bf16, a tie going to even; a NaN stays one that has any of its upper bits
    /// of payload set.
    fn to_bf16(self, x: Self::Vector) -> Self::Vector;

    /// Writes a chunk that was read as `E` in 8 bits an element, in order: with 5 bits of exponent and 2
    /// of mantissa, or with 4 and 3. Numbers are rounded to nearest, a tie to even, and those past the
    /// largest finite one are that. A NaN stays NaN, of its sign.
    ///
    /// # Safety
    /// `to` is valid for writes of [`CHUNK`](Self::CHUNK) bytes.
    #[inline(always)]
    unsafe fn store_fp8<E: Element, const E5M2: bool>(self, chunk: [Self::Vector; 2], to: *mut u8) {
        let halves = [self.to_array(chunk[0]), self.to_array(chunk[1])];
        for index in 0..Self::CHUNK {
            let place = Self::place::<E>(index);
            let x = halves[place / Self::LANES][place % Self::LANES];
            // SAFETY: the caller's, as there are no more than a chunk.
            unsafe { *to.add(index) = to_fp8::<E5M2>(x) };
        }
    }

    /// Writes two chunks as [`store_fp8`](Self::store_fp8) does, past the caches where the instruction set
    /// can, as [`stream`](Self::stream) does.
    ///
    /// # Safety
    /// `to` is valid for writes of twice [`CHUNK`](Self::CHUNK) bytes, and lies on a multiple of 64.
    #[inline(always)]
    unsafe fn stream_fp8<E: Element, const E5M2: bool>(
        self,
        chunks: [[Self::Vector; 2]; 2],
        to: *mut u8,
    ) {
        // SAFETY: the caller's.
        unsafe {
            self.store_fp8::<E, E5M2>(chunks[0], to);
            self.store_fp8::<E, E5M2>(chunks[1], to.add(Self::CHUNK));
        }
    }

    /// Asks for the cache line of `at`, which need not be readable, in the second-level cache.
    fn prefetch(self, at: *const u8);

    /// Orders what [`stream`](Self::stream) wrote before whatever this thread writes next.
    fn fence(self);

    /// Runs a hot loop, where registers are few in a function of its own: within a larger one the
    /// compiler keeps the loop's state in memory.
    #[inline(always)]
    fn outline<J: Job>(self, job: J) -> J::Output {
        job.run(self)
    }

    /// Writes `MAX_LANES` rows of as many numbers, which begin `from_step` apart, as columns: to rows
    /// that begin `to_step` apart.
    #[inline(always)]
    fn turn(self, from: &[f32], from_step: usize, to: &mut [f32], to_step: usize) {
        assert!((MAX_LANES - 1) * to_step + MAX_LANES <= to.len());
        let from: [&[f32]; MAX_LANES] =
            std::array::from_fn(|row| &from[row * from_step..][..MAX_LANES]);
        for column in 0..MAX_LANES {
            for (to, from) in to[column * to_step..].iter_mut().zip(&from) {
                *to = from[column];
            }
        }
    }

    /// Sums the lanes in float64, in an order of the instruction set's.
    #[inline(always)]
    fn sum(self, x: Self::Vector) -> f64 {
        self.to_array(x)[..Self::LANES].iter().map(|&lane| f64::from(lane)).sum()
    }

    /// The largest lane, starting from -inf.
    #[inline(always)]
    fn largest(self, x: Self::Vector) -> f32 {
        self.to_array(x)[..Self::LANES].iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }
}

/// Work that is compiled once for every instruction set.
pub trait Job {
    /// What the work returns.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`, and so is all that they call with
    /// `simd`, so that the instruction set's features hold in every line.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// What rounding to 8 bits needs to know of a format with 5 bits of exponent, or with 4.
pub(crate) struct Fp8<const E5M2: bool>;

impl<const E5M2: bool> Fp8<E5M2> {
    /// Bits of f32's mantissa that are dropped.
    pub(crate) const DROPPED: u32 = if E5M2 { 21 } else { 20 };
    /// What is added to the bits of a normal number, beside the last one that is kept, before others are
    /// dropped: for rounding to nearest, and from f32's bias of the exponent to the format's.
    pub(crate) const ROUNDED: u32 = ((1 << (Self::DROPPED - 1)) - 1_u32).wrapping_sub(if E5M2 {
        (127 - 15) << 23
    } else {
        (127 - 7) << 23
    });
    /// The bits of the largest number in f32.
    pub(crate) const LARGEST: u32 = if E5M2 { 57344_f32.to_bits() } else { 448_f32.to_bits() };
    /// The bits of the least normal number in f32.
    pub(crate) const LEAST_NORMAL: u32 = (127 - if E5M2 { 14 } else { 6 }) << 23;
    /// The bits of the power of two whose sum with what is less than a normal number is rounded to the
    /// format.
    pub(crate) const ALIGNED: u32 = Self::LEAST_NORMAL + (Self::DROPPED << 23);
    /// The bits of NaN.
    pub(crate) const NAN: u32 = if E5M2 { 0x7e } else { 0x7f };
}

/// The bits of `x` in 8: see [`Simd::store_fp8`].
#[inline(always)]
fn to_fp8<const E5M2: bool>(x: f32) -> u8 {
    type Of<const E5M2: bool> = Fp8<E5M2>;
    let magnitude = x.to_bits() & 0x7fff_ffff;
    let cut = magnitude.min(Of::<E5M2>::LARGEST);
    let odd = cut >> Of::<E5M2>::DROPPED & 1;
    let normal = cut.wrapping_add(Of::<E5M2>::ROUNDED + odd) >> Of::<E5M2>::DROPPED;
    let sum = f32::from_bits(cut) + f32::from_bits(Of::<E5M2>::ALIGNED);
    let small = sum.to_bits().wrapping_sub(Of::<E5M2>::ALIGNED);
    let bits = if cut < Of::<E5M2>::LEAST_NORMAL { small } else { normal };
    let bits = if magnitude > 0x7f80_0000 { Of::<E5M2>::NAN } else { bits };
    (x.to_bits() >> 24 & 0x80 | bits) as u8
}

/// What a product adds to a sum in each lane, of words of 32 bits.
pub(crate) trait MulAdd<S: Simd>: Copy {
    /// `sum` and the product of the words `left` and `right`.
    fn mul_add(self, simd: S, left: S::Vector, right: S::Vector, sum: S::Vector) -> S::Vector;
}

/// Words are numbers in f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers;

impl<S: Simd> MulAdd<S> for Numbers {
    #[inline(always)]
    fn mul_add(self, simd: S, left: S::Vector, right: S::Vector, sum: S::Vector) -> S::Vector {
        simd.mul_add(left, right, sum)
    }
}

#[cfg(test)]
mod tests;

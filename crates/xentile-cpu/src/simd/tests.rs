//! Every instruction set of this processor against plain Rust, element by element.

use half::{bf16, f16};

use super::*;
use crate::{Isa, Job};

/// All values of a 16-bit format, or a spread of f32 with every exponent; a part of them under Miri.
fn every<E: Element>() -> Vec<E> {
    let wide = |bits: u32| match E::DTYPE {
        DType::F32 => f32::from_bits(bits << 16 | bits.wrapping_mul(40_503) & 0xffff),
        DType::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        DType::F16 => f16::from_bits(bits as u16).to_f32(),
    };
    (0..=0xffff).step_by(crate::ONE_IN).map(wide).filter(|x| !x.is_nan()).map(E::from_f32).collect()
}

/// Loads and stores (both ways) every element through vectors.
struct RoundTrip<'a, E>(&'a [E], &'a mut [E], bool);

impl<E: Element> Job for RoundTrip<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (from, to) in self.0.chunks_exact(S::CHUNK).zip(self.1.chunks_exact_mut(S::CHUNK)) {
            // SAFETY: both chunks have CHUNK elements.
            let chunk = unsafe { s.load(from.as_ptr()) };
            if self.2 && to.as_ptr().addr().is_multiple_of(64) {
                // SAFETY: as above, and aligned.
                unsafe { s.stream(chunk, to.as_mut_ptr()) };
            } else {
                // SAFETY: as above.
                unsafe { s.store(chunk, to.as_mut_ptr()) };
            }
        }
        s.fence();
    }
}

fn loads_and_stores_keep_every_value<E: Element>() {
    let mut values = every::<E>();
    values.truncate(values.len() / MAX_CHUNK * MAX_CHUNK);
    for isa in Isa::available() {
        for stream in [false, true] {
            let mut copy = vec![E::from_f32(7.0); values.len()];
            isa.run(RoundTrip(&values, &mut copy, stream));
            assert!(values == copy, "{} {} through {isa}, stream {stream}", E::DTYPE, values.len());
        }
    }
}

#[test]
fn loads_and_stores_keep_every_f32() {
    loads_and_stores_keep_every_value::<f32>();
}

#[test]
fn loads_and_stores_keep_every_bf16() {
    loads_and_stores_keep_every_value::<bf16>();
}

#[test]
fn loads_and_stores_keep_every_f16() {
    loads_and_stores_keep_every_value::<f16>();
}

/// Adds f32 chunks to zero and stores them as `E`: rounding, in every lane.
struct Narrow<'a, E>(&'a [f32], &'a mut [E]);

impl<E: Element> Job for Narrow<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (from, to) in self.0.iter().zip(self.1.chunks_exact_mut(S::CHUNK)) {
            // SAFETY: the chunk has CHUNK elements.
            unsafe { s.store([s.splat(*from); 2], to.as_mut_ptr()) };
        }
    }
}

fn stores_round_to_nearest<E: Element>() {
    let values: Vec<f32> = every::<f32>();
    for isa in Isa::available() {
        let mut stored = vec![E::from_f32(7.0); values.len() * MAX_CHUNK];
        isa.run(Narrow(&values, &mut stored));
        struct Chunk;
        impl Job for Chunk {
            type Output = usize;
            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> usize {
                S::CHUNK
            }
        }
        for (chunk, &x) in stored.chunks_exact(isa.run(Chunk)).zip(&values) {
            let mut expected = E::from_f32(x);
            if E::DTYPE == DType::Bf16 && x.to_bits() & 0xffff == 0x8000 {
                // A tie, away from 0.
                expected = E::from_f32(f32::from_bits(x.to_bits() + 1));
            }
            assert!(chunk.iter().all(|&y| y == expected), "{x} as {} on {isa}", E::DTYPE);
        }
    }
}

#[test]
fn stores_round_to_nearest_bf16() {
    stores_round_to_nearest::<bf16>();
}

#[test]
fn stores_round_to_nearest_f16() {
    stores_round_to_nearest::<f16>();
}

/// Rounds a number in every lane to bf16.
struct ToBf16(f32);

impl Job for ToBf16 {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let lanes = s.to_array(s.to_bf16(s.splat(self.0)));
        let same = |lane: &f32| lane.to_bits() == lanes[0].to_bits();
        assert!(lanes[..S::LANES].iter().all(same));
        lanes[0]
    }
}

#[test]
fn to_bf16_rounds_ties_to_even() {
    for isa in Isa::available() {
        for x in every::<f32>().into_iter().chain([f32::MAX, f32::INFINITY]) {
            for x in [x, f32::from_bits(x.to_bits() & 0xffff_0000 | 0x8000)] {
                if x.is_nan() {
                    continue;
                }
                let (found, expected) = (isa.run(ToBf16(x)), bf16::from_f32(x).to_f32());
                assert_eq!(found.to_bits(), expected.to_bits(), "{x:e} on {isa}");
            }
        }
        assert!(isa.run(ToBf16(f32::NAN)).is_nan() && isa.run(ToBf16(-f32::NAN)).is_nan());
    }
}

/// Comparison, selection and bounds, in every lane and with NaN.
struct Bounds(f32, f32);

impl Job for Bounds {
    type Output = [f32; 5];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [f32; 5] {
        let (a, b) = (s.splat(self.0), s.splat(self.1));
        let results = [
            s.max(a, b),
            s.zero_below(s.splat(7.0), a, b),
            s.select(s.less(a, b), s.splat(1.0), s.splat(0.0)),
            s.copysign(a, b),
            s.abs(a),
        ];
        results.map(|result| {
            let lanes = s.to_array(result);
            let same = |lane: &f32| lane.to_bits() == lanes[0].to_bits();
            assert!(
                lanes[..S::LANES].iter().all(same) && lanes[S::LANES..].iter().all(|&x| x == 0.0)
            );
            lanes[0]
        })
    }
}

#[test]
fn comparisons_follow_their_contract() {
    let nan = f32::NAN;
    let inf = f32::INFINITY;
    for isa in Isa::available() {
        let [max, zeroed, less, sign, abs] = isa.run(Bounds(-2.5, 1.0));
        assert_eq!([max, zeroed, less, sign, abs], [1.0, 0.0, 1.0, 2.5, 2.5], "{isa}");
        let [max, kept, less, ..] = isa.run(Bounds(nan, 1.0));
        assert_eq!([max, kept, less], [1.0, 7.0, 0.0], "{isa}");
        let [max, kept, less, sign, abs] = isa.run(Bounds(inf, -inf));
        assert_eq!([max, kept, less, sign, abs], [inf, 7.0, 0.0, -inf, inf], "{isa}");
    }
}

/// The lanes of a vector that are swapped.
struct Swap;

impl Job for Swap {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<f32> {
        let lanes: [f32; 2 * MAX_LANES] = std::array::from_fn(|lane| lane as f32);
        // SAFETY: a chunk is at most as long.
        let [first, _] = unsafe { s.load(lanes.as_ptr()) };
        s.to_array(s.swap_pairs(first))[..S::LANES].to_vec()
    }
}

#[test]
fn neighbours_are_swapped() {
    for isa in Isa::available() {
        let lanes = isa.run(Swap);
        let right: Vec<_> = (0..lanes.len()).map(|lane| (lane ^ 1) as f32).collect();
        assert_eq!(lanes, right, "{isa}");
    }
}

/// Turns a block, of rows 19 apart, to rows 23 apart.
struct Turn<'a>(&'a [f32], &'a mut [f32]);

impl Job for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        s.turn(self.0, 19, self.1, 23);
    }
}

#[test]
fn turns_rows_to_columns() {
    let from: Vec<f32> = (0..15 * 19 + MAX_LANES).map(|i| i as f32).collect();
    for isa in Isa::available() {
        let mut to = vec![-1.0; 15 * 23 + MAX_LANES];
        isa.run(Turn(&from, &mut to));
        for (i, &found) in to.iter().enumerate() {
            let [row, column] = [i / 23, i % 23];
            let expected = if column < MAX_LANES { (column * 19 + row) as f32 } else { -1.0 };
            assert_eq!(found, expected, "{isa} {row} {column}");
        }
    }
}

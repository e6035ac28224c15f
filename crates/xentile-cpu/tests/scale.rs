//! `scale` against float64, in every dtype and on every instruction set.

use std::fmt::Display;

use half::{bf16, f16};
use rand::RngExt;
use xentile::{DType, Element};
use xentile_cpu::scale::scale;
use xentile_cpu::{InOut, Isa, Threads};

mod common;

const POISON: f32 = 7.25e3;

/// Holds `actual` to the rounded product of `x` and `factor`. f32 is exact; the 16-bit types round
/// twice, so they may miss by what rounding to f32 first can add to half a unit.
fn check<E: Element>(what: impl Display, actual: E, x: E, factor: f32) {
    let exact = x.to_f64() * f64::from(factor);
    let rounded = E::from_f64(exact);
    if actual == rounded || actual.to_f32().is_nan() && exact.is_nan() {
        return;
    }
    let error = (actual.to_f64() - exact).abs();
    let bound = E::DTYPE.ulp(exact) * (0.5 + 2f64.powi(-12));
    assert!(
        E::DTYPE != DType::F32 && error <= bound,
        "{what}: {x:?} * {factor} is {actual:?}, not {rounded:?}"
    );
}

/// Of every NaN the same, since which of two a product keeps is the order that the compiler gives
/// them: it may be another where vectors are cut off.
fn bits<E: Element>(x: &[E]) -> Vec<u32> {
    let canonical = |x: f32| if x.is_nan() { f32::NAN } else { x };
    x.iter().map(|x| canonical(x.to_f32()).to_bits()).collect()
}

/// Runs `body` for every dtype.
macro_rules! for_each_dtype {
    ($body:ident) => {
        $body::<f32>();
        $body::<bf16>();
        $body::<f16>();
    };
}

/// Apart and in place, from any offset of the two arrays, with the elements around them untouched.
fn run<E: Element>(isa: Isa, x: &[E], factors: &[f32], [from, to]: [usize; 2]) {
    let pool = Threads::new(2).unwrap();
    let poison = E::from_f32(POISON);
    let padded = |start: usize| [vec![poison; start], x.to_vec(), vec![poison; 3]].concat();
    let (input, mut output) = (padded(from), padded(to));
    output.fill(poison);
    let (read, written) = (from..from + x.len(), to..to + x.len());
    let place = InOut::apart(&input[read], &mut output[written.clone()]);
    scale(isa, &pool, place, factors).unwrap();

    let mut in_place = padded(to);
    scale(isa, &pool, InOut::InPlace(&mut in_place[written.clone()]), factors).unwrap();
    assert!(bits(&in_place) == bits(&output), "{isa}: in place differs");
    for (index, &element) in output.iter().enumerate() {
        if !written.contains(&index) {
            assert!(element == poison, "{isa}: wrote element {index}, outside {written:?}");
        }
    }
    let run = x.len().checked_div(factors.len()).unwrap_or(0);
    for (index, (&actual, &x)) in output[written].iter().zip(x).enumerate() {
        let what = format_args!("{isa} {} element {index} of {factors:?}", E::DTYPE);
        check(what, actual, x, factors[index / run]);
    }
}

#[test]
fn odd_lengths_and_unaligned_starts() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("scale");
        for isa in Isa::available() {
            for (groups, run) in
                [(0, 5), (5, 0), (1, 1), (7, 1), (1, 31), (3, 33), (2, 257), (1, 4099), (4, 1000)]
            {
                for starts in [[0, 0], [1, 0], [0, 1], [3, 7], [13, 2]] {
                    let x: Vec<_> = (0..groups * run)
                        .map(|_| E::from_f64(rng.random_range(-8.0..8.0)))
                        .collect();
                    let factors: Vec<f32> =
                        (0..groups).map(|_| rng.random_range(-2.0..2.0)).collect();
                    run_both(isa, &x, &factors, starts);
                }
            }
        }
    }
    /// With the factors as they are, and with every other one 1.
    fn run_both<E: Element>(isa: Isa, x: &[E], factors: &[f32], starts: [usize; 2]) {
        run(isa, x, factors, starts);
        let mut factors = factors.to_vec();
        factors.iter_mut().step_by(2).for_each(|factor| *factor = 1.0);
        run(isa, x, &factors, starts);
    }
    for_each_dtype!(body);
}

/// Every 16-bit value, and f32 at the ends of its range.
#[test]
fn every_value() {
    fn every<E: Element>(from_bits: fn(u16) -> E) {
        let x: Vec<_> = (0..=u16::MAX).map(from_bits).collect();
        for isa in Isa::available() {
            for factor in [
                0.0,
                -0.0,
                -1.0,
                1.0 / 3.0,
                1e-3,
                1e4,
                f32::MIN_POSITIVE,
                f32::INFINITY,
                f32::NAN,
                f32::from_bits(0x7fff_ffff),
                f32::from_bits(0xffff_ffff),
            ] {
                run(isa, &x, &[factor], [0, 1]);
            }
        }
    }
    every(bf16::from_bits);
    every(f16::from_bits);
    let extremes = [0.0, -0.0, 1e-45, -1e-40, f32::MIN_POSITIVE, 3e38, f32::INFINITY, f32::NAN];
    for isa in Isa::available() {
        for factor in extremes.into_iter().chain([0.5, -3.0]) {
            run(isa, &extremes, &[factor], [0, 0]);
        }
    }
}

/// Runs large enough to be streamed, cut by tasks and not on their boundaries.
#[test]
fn large() {
    fn body<E: Element>() {
        let x: Vec<_> =
            (0..3 * 1_500_001).map(|i| E::from_f32((i % 1000) as f32 / 8.0 - 60.0)).collect();
        for isa in Isa::available() {
            run(isa, &x, &[0.3, 1.0, -7.0], [1, 5]);
        }
    }
    for_each_dtype!(body);
}

#[test]
fn a_factor_of_one_copies_every_bit() {
    fn body<E: Element>(x: &[E], same: impl Fn(&E, &E) -> bool) {
        let pool = Threads::new(1).unwrap();
        for isa in Isa::available() {
            let mut output = vec![E::from_f32(POISON); x.len()];
            scale(isa, &pool, InOut::apart(x, &mut output), &[1.0]).unwrap();
            assert!(output.iter().zip(x).all(|(a, b)| same(a, b)), "{isa} {}", E::DTYPE);
        }
    }
    // Widening may make a signalling NaN quiet.
    let all: Vec<_> = (0..=u16::MAX).map(bf16::from_bits).collect();
    body(&all, |a, b| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
    let all: Vec<_> = (0..=u16::MAX).map(f16::from_bits).collect();
    body(&all, |a, b| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
    let floats: Vec<_> = (0..1 << 16).map(|i| f32::from_bits(i * 0x1_0001)).collect();
    body(&floats, |a, b| a.to_bits() == b.to_bits());
}

#[test]
fn wrong_lengths_are_named() {
    let pool = Threads::new(1).unwrap();
    let refuse = |place: InOut<'_, f32>, factors: &[f32]| {
        scale(Isa::detect(), &pool, place, factors).unwrap_err().to_string()
    };
    let (x, mut y) = ([0.0; 7], [0.0; 6]);
    assert_eq!(
        refuse(InOut::apart(&x, &mut y), &[1.0; 3]),
        "input holds 7 elements; [G, N] needs 6"
    );
    assert_eq!(refuse(InOut::apart(&x, &mut y), &[1.0]), "output holds 6 elements; [G, N] needs 7");
    assert_eq!(refuse(InOut::InPlace(&mut y), &[]), "input holds 6 elements; [G, N] needs 0");
}

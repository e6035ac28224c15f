//! Error bounds of the elementary functions, on every instruction set of this processor.

use rand::RngExt;
use xentile::DType;
use xentile_cpu::math::{EXP_SCALE, capped_with_derivative, exp};
use xentile_cpu::{Isa, Job, Simd};

mod common;

/// One function over a slice, element by element.
struct Map<'a> {
    function: Function,
    values: &'a mut [f32],
}

#[derive(Clone, Copy)]
enum Function {
    Exp,
    Tanh,
    TanhDerivative,
}

impl Job for Map<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for chunk in self.values.chunks_exact_mut(S::CHUNK) {
            // SAFETY: the chunk has CHUNK elements.
            let x = unsafe { s.load(chunk.as_ptr()) };
            let y = match self.function {
                Function::Exp => exp(s, x),
                Function::Tanh => capped_with_derivative(s, x, [s.splat(1.0); 2])[0],
                Function::TanhDerivative => capped_with_derivative(s, x, [s.splat(1.0); 2])[1],
            };
            // SAFETY: as above.
            unsafe { s.store(y, chunk.as_mut_ptr()) };
        }
    }
}

/// One of how many f32 values is tried; `XENTILE_TEST_STRIDE` where a program runs slowly.
fn stride() -> u32 {
    std::env::var("XENTILE_TEST_STRIDE")
        .map_or(127, |stride| stride.parse().expect("XENTILE_TEST_STRIDE is a whole number"))
}

/// The largest error in units in the last place on each instruction set over every [`stride`]-th f32
/// from `low` to `high` (both of one sign, by magnitude), from a random start, and where it is.
fn worst(
    function: Function,
    [low, high]: [f32; 2],
    exact: fn(f64) -> f64,
) -> Vec<(Isa, (f64, f32))> {
    let stride = stride();
    let start = common::fresh_rng("worst").random_range(0..stride);
    let mut worst: Vec<_> = Isa::available().into_iter().map(|isa| (isa, (0.0, 0.0))).collect();
    let mut bits = low.to_bits() + start;
    while bits <= high.to_bits() {
        let inputs: Vec<f32> = (0..4096_u32)
            .map(|i| f32::from_bits((bits + i * stride).min(high.to_bits())))
            .collect();
        // Once for all instruction sets, as this takes most of the time.
        let expected = inputs.iter().map(|&x| exact(f64::from(x)));
        let expected: Vec<_> = expected.map(|y| (y, DType::F32.ulp(y))).collect();
        for (isa, worst) in &mut worst {
            let mut values = inputs.clone();
            isa.run(Map { function, values: &mut values });
            for ((&x, &y), (expected, unit)) in inputs.iter().zip(&values).zip(&expected) {
                let error = (f64::from(y) - expected).abs() / unit;
                if error > worst.0 || error.is_nan() {
                    *worst = (error, x);
                }
            }
        }
        bits += 4096 * stride;
    }
    worst
}

fn check(function: Function, name: &str, range: [f32; 2], bound: f64, exact: fn(f64) -> f64) {
    for (isa, (error, at)) in worst(function, range, exact) {
        println!("{name} on {isa} over {range:?}: {error:.3} ulp at {at:e}");
        assert!(error <= bound, "{name} on {isa}: {error} ulp at {at:e}, bound {bound}");
    }
}

#[test]
fn exp_keeps_its_bound_over_its_whole_range() {
    let exact = |x: f64| x.exp() * f64::from(EXP_SCALE);
    check(Function::Exp, "exp", [-0.0, -20.0], 3.0, exact);
    check(Function::Exp, "exp", [-20.0, -106.0], 8.0, exact);
    check(Function::Exp, "exp", [0.0, 20.0], 3.0, exact);
    check(Function::Exp, "exp", [20.0, 60.0], 8.0, exact);
}

#[test]
fn tanh_and_its_derivative_keep_their_bounds() {
    for sign in [1.0, -1.0] {
        let range = [1e-30 * sign, 40.0 * sign];
        check(Function::Tanh, "tanh", range, 8.0, f64::tanh);
        let derivative = |x: f64| x.cosh().powi(-2);
        check(Function::TanhDerivative, "tanh'", range, 8.0, derivative);
    }
}

#[test]
fn special_values() {
    let inf = f32::INFINITY;
    for isa in Isa::available() {
        let of = |function, x| {
            let mut values = [x; 32];
            isa.run(Map { function, values: &mut values });
            values[0]
        };
        for below in [-106.1, -1e4, -1e30, f32::MIN, -inf] {
            assert_eq!(of(Function::Exp, below), 0.0, "exp {below} on {isa}");
        }
        assert_eq!(of(Function::Exp, 0.0), EXP_SCALE, "{isa}");
        assert!(of(Function::Exp, f32::NAN).is_nan(), "{isa}");
        assert_eq!(of(Function::Tanh, inf), 1.0, "{isa}");
        assert_eq!(of(Function::Tanh, -inf), -1.0, "{isa}");
        assert_eq!(of(Function::TanhDerivative, inf), 0.0, "{isa}");
        assert_eq!(of(Function::Tanh, 0.0), 0.0, "{isa}");
        assert!(of(Function::Tanh, f32::NAN).is_nan(), "{isa}");
    }
}

//! The same mathematics written plainly in float64, an entry or a row at a time, with how far kernels may
//! be off.

use std::f64::consts::{FRAC_1_SQRT_2, PI, SQRT_2};

use super::{Activation, Kind, SLOPE_ROUNDINGS, VALUE_ROUNDINGS};

/// Half the spacing of f32 after 1.
const U: f64 = 1.0 / (1 << 24) as f64;

/// `f` and `f'` at one number, and what each may be wrong in proportion to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct At {
    /// `f(x)`.
    pub value: f64,
    /// `f'(x)`.
    pub slope: f64,
    /// What `f` may be wrong in proportion to.
    pub value_scale: f64,
    /// The same of `f'`.
    pub slope_scale: f64,
    /// What multiplies a number that falls below f32's normal range, in either.
    pub lost: f64,
}

/// What an entry should be, and by how much it may be off before it is rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bound {
    /// What is expected.
    pub expected: f64,
    /// What roundings of f32 may make of it.
    pub rounding: f64,
    /// What may be lost below f32's normal range.
    pub lost: f64,
}

impl Bound {
    fn new(expected: f64, rounding: f64, lost: f64) -> Self {
        // A few products, of which each may lose what is below the range.
        Self { expected, rounding: U * rounding, lost: 4.0 * f64::from(f32::MIN_POSITIVE) * lost }
    }

    /// By how much it may be off.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.rounding + self.lost
    }
}

/// `erfc(x) / 2` to the last digits of f64.
#[must_use]
pub fn half_erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 1.0 - half_erfc(-x);
    }
    let density = (-x * x).exp() / PI.sqrt();
    if x < 2.5 {
        // A series of positive terms (Abramowitz and Stegun, 7.1.6).
        let (mut term, mut sum, mut n) = (x, 0.0, 0.0);
        while term > sum * 1e-17 {
            sum += term;
            n += 1.0;
            term *= 2.0 * x * x / (2.0 * n + 1.0);
        }
        return 0.5 - density * sum;
    }
    // A continued fraction (7.1.14), from behind.
    let rest = (1..=120).rev().fold(x, |rest, k| x + f64::from(k) / 2.0 / rest);
    density / rest / 2.0
}

/// `f` and `f'` at `x`, which was clamped.
#[must_use]
pub fn at(options: &Activation, x: f64) -> At {
    match options.kind {
        Kind::Silu => {
            let alpha = f64::from(options.alpha as f32);
            by_sigmoid(x, alpha * x, alpha)
        }
        Kind::GeluTanh => {
            let factor = 2.0 * (2.0 / PI).sqrt();
            let z = factor * (x + 0.044_715 * x * x * x);
            by_sigmoid(x, z, factor * (1.0 + 3.0 * 0.044_715 * x * x))
        }
        Kind::GeluErf => {
            let below = half_erfc(-x * FRAC_1_SQRT_2);
            let density = (-x * x / 2.0).exp() / PI.sqrt() / SQRT_2;
            // The exponent's rounding is in both, and in the tail above 0 in what is taken off 1.
            let (tail, exponent) = (half_erfc(x.abs() * FRAC_1_SQRT_2), x * x / 2.0);
            let of_tail = below + finite(tail * exponent);
            At {
                value: x * below,
                slope: below + x * density,
                value_scale: x.abs() * of_tail,
                slope_scale: of_tail + finite(x.abs() * density * (1.0 + exponent)),
                lost: 1.0 + x.abs(),
            }
        }
        Kind::Relu | Kind::SquaredRelu => {
            let above = if x < 0.0 { 0.0 } else { x };
            let slope = if x > 0.0 { 1.0 } else { above * 0.0 };
            let (value, slope) = match options.kind {
                Kind::Relu => (above, slope),
                _ => (above * above, 2.0 * above),
            };
            let slope = if x.is_nan() { x } else { slope };
            let lost = 1.0 + above;
            At { value, slope, value_scale: value, slope_scale: slope, lost }
        }
    }
}

/// `x s(z)`, where `z` has the derivative `dz`.
fn by_sigmoid(x: f64, z: f64, dz: f64) -> At {
    let sigmoid =
        |z: f64| if z < 0.0 { z.exp() / (1.0 + z.exp()) } else { 1.0 / (1.0 + (-z).exp()) };
    let (s, rest) = (sigmoid(z), sigmoid(-z));
    // What an exponent of this size is off by matters as far as the sigmoid moves with it.
    let of_s = s * (1.0 + finite(rest * z.abs()));
    let inner = x * dz;
    At {
        value: x * s,
        slope: s + inner * s * rest,
        value_scale: x.abs() * of_s,
        slope_scale: of_s * (1.0 + inner.abs()),
        lost: 1.0 + x.abs() + inner.abs(),
    }
}

/// 0 in the place of 0 times infinity.
fn finite(x: f64) -> f64 {
    if x.is_nan() { 0.0 } else { x }
}

/// Gate and up, and which of them are within the limit.
fn clamped(options: &Activation, gate: f64, up: f64) -> ([f64; 2], [bool; 2]) {
    let limit = f64::from(options.bound());
    let (gate_above, up_above) = (gate > limit, up.abs() > limit);
    let gate = if gate_above { limit } else { gate };
    let up = if up_above { limit.copysign(up) } else { up };
    ([gate, up + f64::from(options.up_offset as f32)], [!gate_above, !up_above])
}

/// Writes what each entry of y should be for the row `x` to `y` `[F]`.
///
/// # Panics
/// `x` is not as long as the layout says.
pub fn forward(options: &Activation, x: &[f64], y: &mut [Bound]) {
    let columns = y.len();
    assert_eq!(x.len(), columns * options.layout.packs());
    for (column, y) in y.iter_mut().enumerate() {
        let [gate, up] = options.layout.places(column, columns).map(|place| x[place]);
        *y = if options.layout.packs() == 1 {
            let at = at(options, gate);
            Bound::new(at.value, VALUE_ROUNDINGS * at.value_scale, at.lost)
        } else {
            let ([gate, up], _) = clamped(options, gate, up);
            let at = at(options, gate);
            let rounding = VALUE_ROUNDINGS * at.value_scale * up.abs();
            Bound::new(at.value * up, rounding, at.lost * (1.0 + up.abs()))
        };
    }
}

/// Writes what each entry of dx should be for the row `x` and `dy` `[F]` to `dx`, which has the layout
/// of `x`.
///
/// # Panics
/// `x` and `dx` are not as long as the layout says.
pub fn backward(options: &Activation, x: &[f64], dy: &[f64], dx: &mut [Bound]) {
    let columns = dy.len();
    assert!([x.len(), dx.len()] == [columns * options.layout.packs(); 2]);
    for (column, &dy) in dy.iter().enumerate() {
        let places = options.layout.places(column, columns);
        let [gate, up] = places.map(|place| x[place]);
        if options.layout.packs() == 1 {
            let at = at(options, gate);
            let rounding = SLOPE_ROUNDINGS * at.slope_scale * dy.abs();
            dx[column] = Bound::new(dy * at.slope, rounding, at.lost * (1.0 + dy.abs()));
            continue;
        }
        let ([gate, up], [of_gate, of_up]) = clamped(options, gate, up);
        let at = at(options, gate);
        let lost = at.lost * (1.0 + dy.abs()) * (1.0 + up.abs());
        dx[places[0]] = if of_gate {
            let rounding = SLOPE_ROUNDINGS * at.slope_scale * (dy * up).abs();
            Bound::new(dy * up * at.slope, rounding, lost)
        } else {
            Bound::default()
        };
        dx[places[1]] = if of_up {
            Bound::new(dy * at.value, VALUE_ROUNDINGS * at.value_scale * dy.abs(), lost)
        } else {
            Bound::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::Layout;

    /// Every kind, without and with all that a gate may have.
    fn all_options() -> impl Iterator<Item = Activation> {
        Kind::ALL.into_iter().flat_map(|kind| {
            let alpha = if kind == Kind::Silu { 1.702 } else { 1.0 };
            let bare = Layout::ALL.map(|layout| Activation::new(kind, layout));
            let full = [Layout::Halves, Layout::Interleaved].map(|layout| Activation {
                alpha,
                limit: Some(1.5),
                up_offset: 1.0,
                ..Activation::new(kind, layout)
            });
            bare.into_iter().chain(full)
        })
    }

    fn values(options: &Activation, x: &[f64]) -> Vec<f64> {
        let mut y = vec![Bound::default(); x.len() / options.layout.packs()];
        forward(options, x, &mut y);
        y.iter().map(|y| y.expected).collect()
    }

    /// Known to 16 digits (DLMF 7.23, and twice the tail of the normal distribution).
    #[test]
    fn half_erfc_at_known_points() {
        for (x, erfc) in [
            (0.0, 1.0),
            (0.5, 0.479_500_122_186_953_5),
            (1.0, 0.157_299_207_050_285_13),
            (2.0, 4.677_734_981_047_266e-3),
            (3.0, 2.209_049_699_858_544e-5),
            (5.0, 1.537_459_794_428_034_8e-12),
            (10.0, 2.088_487_583_762_545e-45),
            (-1.0, 1.842_700_792_949_715),
        ] {
            let found = 2.0 * half_erfc(x);
            assert!((found / erfc - 1.0).abs() < 1e-12, "{x}: {found}, {erfc}");
        }
        // Where one way of computing it ends and the other begins.
        let slope = (half_erfc(2.5) - half_erfc(2.5 - 1e-9)) * 1e9;
        assert!((slope + (-6.25_f64).exp() / PI.sqrt()).abs() < 1e-5, "{slope}");
    }

    /// Values of the papers' formulas, worked out by hand from s(1) and so on.
    #[test]
    fn known_values() {
        let of = |kind, x| at(&Activation::new(kind, Layout::Single), x).value;
        for (kind, x, expected) in [
            (Kind::Silu, 1.0, 0.731_058_578_630_004_9),
            (Kind::Silu, -1.0, -0.268_941_421_369_995_1),
            (Kind::GeluErf, 1.0, 0.841_344_746_068_542_9),
            (Kind::GeluErf, -2.0, -0.045_500_263_896_358_4),
            (Kind::GeluTanh, 1.0, 0.841_191_990_608_306_4),
            (Kind::Relu, -2.0, 0.0),
            (Kind::SquaredRelu, 3.0, 9.0),
        ] {
            assert!((of(kind, x) - expected).abs() < 1e-9, "{kind} {x}: {}", of(kind, x));
        }
        // gpt-oss: x s(1.702 x) (up + 1), the gate at most 7 and up within 7.
        let options = Activation {
            alpha: 1.702,
            limit: Some(7.0),
            up_offset: 1.0,
            ..Activation::new(Kind::Silu, Layout::Interleaved)
        };
        let y = values(&options, &[1.0, 2.0, 9.0, -8.0, -9.0, 9.0]);
        assert!((y[0] - 3.0 / (1.0 + (-1.702_f64).exp())).abs() < 1e-7, "{y:?}");
        assert!((y[1] + 42.0 / (1.0 + (-1.702 * 7.0_f64).exp())).abs() < 1e-5, "{y:?}");
        assert!((y[2] + 72.0 / (1.0 + (1.702 * 9.0_f64).exp())).abs() < 1e-9, "{y:?}");
    }

    /// dx must be the derivative of `sum(dy y)`.
    #[test]
    fn gradients_are_derivatives_of_forward() {
        let x = [0.3, -1.2, 2.5, 1.1, -0.7, 0.9, -2.2, 0.4];
        for options in all_options() {
            let dy = &[0.4, 1.3, -0.6, 0.9, -0.2, 0.8, 1.7, -1.1][..8 / options.layout.packs()];
            let objective =
                |x: &[f64]| values(&options, x).iter().zip(dy).map(|(y, dy)| y * dy).sum::<f64>();
            let mut dx = [Bound::default(); 8];
            backward(&options, &x, dy, &mut dx);
            for place in 0..8 {
                let [mut up, mut down] = [x; 2];
                up[place] += 1e-5;
                down[place] -= 1e-5;
                let slope = (objective(&up) - objective(&down)) / 2e-5;
                let found = dx[place].expected;
                assert!((slope - found).abs() < 1e-8, "{options:?} {place}: {slope}, {found}");
            }
        }
    }

    #[test]
    fn an_entry_at_the_limit_is_within() {
        let bare = Activation::new(Kind::SquaredRelu, Layout::Halves);
        let options = Activation { limit: Some(2.0), ..bare };
        let mut dx = [Bound::default(); 4];
        backward(&options, &[2.0, 2.5, -2.0, 2.5], &[1.0, 1.0], &mut dx);
        assert_eq!(dx.map(|dx| dx.expected), [-8.0, 0.0, 4.0, 0.0]);
        assert_eq!(dx[1], Bound::default());
        let relu = Activation::new(Kind::Relu, Layout::Single);
        assert_eq!([-1.0, 0.0, 1e-300].map(|x| at(&relu, x).slope), [0.0, 0.0, 1.0]);
    }

    #[test]
    fn special_numbers_keep_the_contract() {
        for kind in Kind::ALL {
            let options = Activation::new(kind, Layout::Single);
            let [nan, above, below] =
                [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(|x| at(&options, x));
            assert!(nan.value.is_nan() && nan.slope.is_nan() && above.value == f64::INFINITY);
            if matches!(kind, Kind::Relu | Kind::SquaredRelu) {
                assert_eq!((below.value, below.slope), (0.0, 0.0));
            } else {
                assert!(below.value.is_nan() && below.slope.is_nan() && above.slope.is_nan());
            }
            let limited = Activation { limit: Some(3.0), layout: Layout::Halves, ..options };
            let y = values(&limited, &[f64::INFINITY, f64::NAN, f64::NEG_INFINITY, 1.0]);
            assert!((y[0] + 3.0 * at(&options, 3.0).value).abs() < 1e-12 && y[1].is_nan());
        }
    }

    /// Scales are never below what they are of, and finite wherever that is.
    #[test]
    fn scales_hold_their_values() {
        for options in all_options() {
            for x in [-1e30, -40.0, -7.0, -0.75, -1e-20, 0.0, 1e-9, 0.5, 3.0, 88.0, 1e18] {
                let at = at(&options, x);
                assert!(at.value_scale >= at.value.abs() && at.value_scale.is_finite(), "{at:?}");
                assert!(at.slope_scale * 1.001 >= at.slope.abs(), "{options:?} {x} {at:?}");
                assert!(at.slope_scale.is_finite() || at.slope.is_nan(), "{options:?} {x} {at:?}");
            }
        }
    }
}

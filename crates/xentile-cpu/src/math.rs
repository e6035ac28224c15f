//! Elementary functions over vectors, with the error bounds that `tests/math.rs` holds them to.
//!
//! The polynomials are this project's own minimax fits (Remez exchange in 60 digits).

pub use crate::simd::EXP_SCALE;
use crate::simd::Simd;

/// Below this, [`exp`] is 0. `EXP_SCALE * e^x` is still a normal number here, and e^x a sixteenth
/// of the least subnormal.
const EXP_UNDERFLOW: f32 = -106.0;

/// `EXP_SCALE * e^x` for `x <= 60`, within 3 units in the last place for `|x| <= 20` and 8 beyond
/// (2 throughout where the instruction set cannot fuse multiplication and addition); 0 for
/// `x < -106`, -inf included; NaN for NaN. Above 60 the result is unspecified.
///
/// `x = y ln 2 + r`, with `y` a multiple of `2^-b` and `b` the bits of the instruction set's table
/// of powers (Tang, "Table-driven implementation of the exponential function", 1989). Adding a
/// large constant rounds to `y` and leaves `y * 2^b` in the low bits, ready to index the table and
/// to be shifted into the exponent.
///
/// `N` vectors are taken step by step together, since the processor's window is too short to overlap
/// as many of them when each comes whole after the other.
#[inline(always)]
pub fn exp<S: Simd, const N: usize>(simd: S, x: [S::Vector; N]) -> [S::Vector; N] {
    let s = simd;
    // 1.5 x 2^23 has no fraction bits left; divided by 2^b it has b of them.
    let shifter = s.splat(12_582_912.0 / (1 << S::TABLE_BITS) as f32);
    let mut shifted = x;
    for i in 0..N {
        shifted[i] = s.mul_add(x[i], s.splat(std::f32::consts::LOG2_E), shifter);
    }
    let mut r = x;
    for i in 0..N {
        let y = s.sub(shifted[i], shifter);
        r[i] = if S::FUSED {
            // One constant: what it lacks of ln 2 is 2e-9 |y| in r, hence the two bounds.
            s.mul_add(y, s.splat(-std::f32::consts::LN_2), x[i])
        } else {
            // Cody and Waite (1980): the product with 355/512 is exact.
            const HIGH: f32 = 355.0 / 512.0;
            const LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;
            s.mul_add(y, s.splat(-LOW), s.mul_add(y, s.splat(-HIGH), x[i]))
        };
    }
    // (e^r - 1) / r on |r| <= ln(2) / 2^(b + 1), highest power first.
    let coefficients: &[f32] = match S::TABLE_BITS {
        0 => &[1.381_455e-3, 8.368_745e-3, 4.166_839e-2, 0.166_665_2, 0.499_999_93, 1.0],
        2 => &[0.041_676, 0.166_721_1, 0.5, 1.0],
        _ => &[0.5, 1.0000147],
    };
    let mut q = [s.splat(coefficients[0]); N];
    for &coefficient in &coefficients[1..] {
        for i in 0..N {
            q[i] = s.mul_add(q[i], r[i], s.splat(coefficient));
        }
    }
    for i in 0..N {
        let power = s.power_of_two(shifted[i]);
        q[i] = s.mul_add(s.mul(q[i], r[i]), power, power);
    }
    for i in 0..N {
        q[i] = s.zero_below(q[i], x[i], s.splat(EXP_UNDERFLOW));
    }
    q
}

/// Here the power of two of [`Halves`] is +0.0 by its bits: `EXP_SCALE` has exponent 32, and f32's
/// bias is 127.
const POWER_UNDERFLOW: f32 = -159.0 * std::f32::consts::LN_2;

/// What [`Halves`] needs in registers or in memory: `EXP_SCALE * e^x * factor` for any factor.
#[derive(Clone, Copy)]
pub(crate) struct Exponential<V> {
    low: V,
    log2_e: V,
    shifter: V,
    minus_ln_2: V,
    /// `factor * e^r` on `|r| <= ln(2) / 8`, highest power first.
    polynomial: [V; 5],
}

impl<V: Copy> Exponential<V> {
    #[inline(always)]
    pub(crate) fn new<S: Simd<Vector = V>>(s: S, factor: f32) -> Self {
        // An infinite or NaN factor stays what it is.
        let finite = if factor.is_finite() { factor } else { 0.0 };
        Self {
            low: hidden(s, POWER_UNDERFLOW),
            log2_e: hidden(s, std::f32::consts::LOG2_E),
            shifter: hidden(s, 12_582_912.0 / (1 << S::TABLE_BITS) as f32),
            minus_ln_2: hidden(s, -std::f32::consts::LN_2),
            polynomial: [
                hidden(s, 0.041_676 * finite),
                hidden(s, 0.166_721_1 * finite),
                hidden(s, 0.5 * finite),
                hidden(s, finite),
                hidden(s, factor),
            ],
        }
    }
}

/// `x` in every lane, unknown to the compiler: vectors that it knows it makes anew from scalars in
/// every step of a loop, having too few registers; others are operands in memory, at no cost.
#[inline(always)]
fn hidden<S: Simd>(s: S, x: f32) -> S::Vector {
    // Elsewhere nothing may be left of this.
    s.splat(if S::HALVES { std::hint::black_box(x) } else { x })
}

/// Exponentials halfway, for instruction sets with [`Simd::HALVES`]: as [`exp`], but
///
/// - the result is two factors, which a kernel multiplies as it adds or scales;
/// - underflow is an argument clamped to where one factor is 0, at -110;
/// - between the halves of one vector a kernel puts those of others: one exponential is a chain of
///   dependent instructions too long for out-of-order execution to look past.
#[derive(Clone, Copy)]
pub(crate) struct Halves<V> {
    shifted: V,
    r: V,
}

impl<V: Copy> Halves<V> {
    /// The first half of `EXP_SCALE * e^x * factor`; `x` is as for [`exp`].
    #[inline(always)]
    pub(crate) fn new<S: Simd<Vector = V>>(s: S, e: &Exponential<V>, x: V) -> Self {
        // In this order NaN remains.
        let x = s.max(e.low, x);
        let shifted = s.mul_add_by(x, &e.log2_e, e.shifter);
        let y = s.sub(shifted, e.shifter);
        Self { shifted, r: s.mul_add_by(y, &e.minus_ln_2, x) }
    }

    /// The result.
    #[inline(always)]
    pub(crate) fn result<S: Simd<Vector = V>>(self, s: S, e: &Exponential<V>) -> V {
        s.mul(self.polynomial(s, e), s.power_of_two(self.shifted))
    }

    /// The result and `sum` added up.
    #[inline(always)]
    pub(crate) fn add_to<S: Simd<Vector = V>>(self, s: S, e: &Exponential<V>, sum: V) -> V {
        s.mul_add(self.polynomial(s, e), s.power_of_two(self.shifted), sum)
    }

    #[inline(always)]
    fn polynomial<S: Simd<Vector = V>>(self, s: S, e: &Exponential<V>) -> V {
        let [fourth, third, rest @ ..] = &e.polynomial;
        let mut p = s.mul_add_by(self.r, fourth, *third);
        for coefficient in rest {
            p = s.mul_add_to(p, self.r, coefficient);
        }
        p
    }
}

/// Up to here tanh in [`capped_with_derivative`] is a polynomial: most logits under a softcap are.
const NEAR: f32 = 1.25;

/// `c tanh(z / c)` and its derivative `1 - tanh^2(z / c)`, for every `z`; of the infinities they are
/// ±c and 0, of NaN NaN. Each is within 8 units in the last place where `1 / c` is exact. (A derivative
/// below 1e-37 counts as 0.) `cap` is c and 1 / c.
///
/// Where all `N` vectors are near 0 nothing but a polynomial is computed. Elsewhere both are, with
/// `u = e^(-2|x|)`: the derivative `4u / (1 + u)^2` does not cancel where tanh saturates. A lane has
/// the same bits whatever its neighbours are.
#[inline(always)]
pub fn capped_with_derivative<S: Simd, const N: usize>(
    simd: S,
    z: [S::Vector; N],
    [cap, inverse]: [S::Vector; 2],
) -> [[S::Vector; N]; 2] {
    let s = simd;
    let mut x = z;
    for x in &mut x {
        *x = s.mul(*x, inverse);
    }
    let (one, bound) = (s.splat(1.0), s.splat(NEAR));
    // tanh x = x + x^3 q(x^2), relative error below 2^-26.
    const Q: [f32; 8] = [
        5.814_198e-5,
        -5.479_942e-4,
        2.522_002_4e-3,
        -8.040_812e-3,
        2.147_802_3e-2,
        -5.386_147e-2,
        0.133_318_93,
        -0.333_332_66,
    ];
    let mut square = x;
    for i in 0..N {
        square[i] = s.mul(x[i], x[i]);
    }
    let mut q = [s.splat(Q[0]); N];
    for coefficient in &Q[1..] {
        for i in 0..N {
            q[i] = s.mul_add(q[i], square[i], s.splat(*coefficient));
        }
    }
    let (mut capped, mut slope, mut largest) = (x, x, s.abs(x[0]));
    for i in 0..N {
        // Of z itself, so that its quotient's rounding only matters as far as tanh bends.
        let bend = s.mul(q[i], square[i]);
        capped[i] = s.mul_add(bend, z[i], z[i]);
        let tanh = s.mul_add(bend, x[i], x[i]);
        slope[i] = s.sub(one, s.mul(tanh, tanh));
        // In this order a NaN hides no other lane.
        largest = s.max(s.abs(x[i]), largest);
    }
    if s.all(s.less(largest, bound)) {
        return [capped, slope];
    }
    let mut u = x;
    for i in 0..N {
        u[i] = s.mul(s.abs(x[i]), s.splat(-2.0));
    }
    let u = exp(s, u);
    for i in 0..N {
        let is_near = s.less(s.abs(x[i]), bound);
        let u = s.mul(u[i], s.splat(1.0 / EXP_SCALE));
        let root = s.div(s.splat(2.0), s.add(one, u));
        // 1 - 2u / (1 + u)
        let far = s.sub(one, s.mul(u, root));
        let far = s.copysign(s.mul(far, cap), x[i]);
        capped[i] = s.select(is_near, capped[i], far);
        slope[i] = s.select(is_near, slope[i], s.mul(s.mul(root, root), u));
    }
    [capped, slope]
}

/// `a * b + c` in float64, in one rounding where the instruction set can.
#[inline(always)]
fn multiply_add<S: Simd>(a: f64, b: f64, c: f64) -> f64 {
    // Elsewhere the former is a call.
    if S::FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// `e^x` and `e^x - 1` in float64, each within 4 units in the last place, for `x` from -708 to 708;
/// what they are at the nearest of these for others, and NaN for NaN. Without branches, so that a loop
/// over numbers becomes one over vectors.
///
/// `x = k ln 2 + r`, and `e^x - 1 = 2^k (e^r - 1) + (2^k - 1)`, with the series of `e^r - 1`.
#[inline(always)]
pub(crate) fn exponential<S: Simd>(x: f64) -> [f64; 2] {
    const SHIFTER: f64 = 6_755_399_441_055_744.0; // 1.5 x 2^52
    // ln 2: its first 33 bits, and the rest.
    const HIGH: f64 = 0.693_147_180_485_539_1;
    const LOW: f64 = 7.440_617_110_012_397e-11;
    // 1 / n!, from n = 14
    const SERIES: [f64; 13] = {
        let (mut series, mut n, mut term) = ([0.0; 13], 2, 1.0);
        while n <= 14 {
            term /= n as f64;
            series[14 - n] = term;
            n += 1;
        }
        series
    };
    let x = if x < -708.0 { -708.0 } else { x };
    let x = if x > 708.0 { 708.0 } else { x };
    let shifted = multiply_add::<S>(x, std::f64::consts::LOG2_E, SHIFTER);
    let k = shifted - SHIFTER;
    let r = multiply_add::<S>(k, -LOW, multiply_add::<S>(k, -HIGH, x));
    let mut q = SERIES[0];
    for coefficient in &SERIES[1..] {
        q = multiply_add::<S>(q, r, *coefficient);
    }
    let series = multiply_add::<S>(q * r, r, r);
    let power = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1.0_f64.to_bits()));
    [multiply_add::<S>(series, power, power), multiply_add::<S>(series, power, power - 1.0)]
}

/// The natural logarithm in float64, within 4 units in the last place or of 1, of a normal number
/// above 0; of infinity and NaN it is NaN. Without branches, as [`exponential`].
///
/// `x = 2^k m` with `m` around 1, and `ln m = 2 artanh((m - 1) / (m + 1))` by its series.
#[inline(always)]
pub(crate) fn logarithm<S: Simd>(x: f64) -> f64 {
    const ROOT: u64 = std::f64::consts::FRAC_1_SQRT_2.to_bits();
    const FRACTION: u64 = (1 << 52) - 1;
    // 2^52, whose last bit counts 1.
    const WHOLE: f64 = 4_503_599_627_370_496.0;
    let bits = x.to_bits().wrapping_add(1.0_f64.to_bits() - ROOT);
    let k = f64::from_bits((bits >> 52) | WHOLE.to_bits()) - (WHOLE + 1023.0);
    let m = f64::from_bits((bits & FRACTION) + ROOT);
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut q = 1.0 / 23.0;
    for n in [21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0] {
        q = multiply_add::<S>(q, square, 1.0 / n);
    }
    let of_m = multiply_add::<S>(2.0 * s * square, q, 2.0 * s);
    // The product is NaN where x is not finite.
    multiply_add::<S>(k, std::f64::consts::LN_2, of_m) + x * 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Both(f64);

    impl crate::Job for Both {
        type Output = [f64; 3];

        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> [f64; 3] {
            let [exp, less_one] = exponential::<S>(self.0);
            [exp, less_one, logarithm::<S>(self.0.abs())]
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri rounds exponentials of the standard library at random")]
    fn functions_in_float64_keep_their_bounds() {
        for isa in crate::Isa::available() {
            let near = |of: &str, x: f64, found: f64, expected: f64, unit: f64| {
                let error = (found - expected).abs() / (unit * f64::EPSILON);
                assert!(error <= 4.0, "{of} {x:e} on {isa}: {found:e}, not {expected:e}: {error}");
            };
            for i in 0..200_000 {
                // From 1e-8 to 600, of either sign.
                let x = 1e-8 * (f64::from(i) * 1.242e-4).exp() * f64::from(1 - i % 2 * 2);
                let [exp, less_one, log] = isa.run(Both(x));
                near("exp", x, exp, x.exp(), x.exp());
                near("exp - 1", x, less_one, x.exp_m1(), x.exp_m1().abs());
                near("log", x, log, x.abs().ln(), x.abs().ln().abs().max(1.0));
                let above = 1.0 + x.abs() * 1e-3;
                let [.., log] = isa.run(Both(above));
                near("log", above, log, above.ln(), above.ln());
            }
            assert_eq!(isa.run(Both(f64::NEG_INFINITY))[1], -1.0);
            assert!(isa.run(Both(f64::NAN)).iter().all(|x| x.is_nan()));
            assert!(isa.run(Both(f64::INFINITY))[2].is_nan());
        }
    }
}

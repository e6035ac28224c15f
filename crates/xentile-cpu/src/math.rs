//! Elementary functions over vectors, with the error bounds that `tests/math.rs` holds them to.
//!
//! The polynomials are this project's own minimax fits (Remez exchange in 60 digits).

use crate::simd::Simd;

/// [`exp`] returns e^x times this, 2^32: far enough above 1 that no result within reach of f32's
/// subnormals is itself subnormal, so that multiplying by `a / EXP_SCALE` rounds `a * e^x` once.
pub const EXP_SCALE: f32 = 4_294_967_296.0;

/// `2^(k / 32)`.
#[allow(clippy::approx_constant)] // one of them is the square root of 2
const POWERS: [f32; 32] = [
    1.0, 1.0218972, 1.0442737, 1.0671405, 1.0905077, 1.1143868, 1.1387886, 1.1637249, 1.1892071,
    1.2152474, 1.2418578, 1.269051, 1.2968396, 1.3252367, 1.3542556, 1.38391, 1.4142135, 1.4451808,
    1.4768262, 1.5091645, 1.5422108, 1.5759809, 1.6104903, 1.6457555, 1.6817929, 1.7186193,
    1.7562522, 1.7947091, 1.8340081, 1.8741677, 1.9152066, 1.9571441,
];

/// The bits of `EXP_SCALE * 2^(k / N)`, less `k` shifted to where [`exp`] will add it back.
pub(crate) const fn table_of_powers<const N: usize>() -> [u32; N] {
    let mut table = [0; N];
    let mut k = 0;
    while k < N {
        let scaled = POWERS[k * (POWERS.len() / N)] * EXP_SCALE;
        table[k] = scaled.to_bits() - ((k as u32) << (23 - N.trailing_zeros()));
        k += 1;
    }
    table
}

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

/// `tanh x` and its derivative `1 - tanh^2 x`, each within 8 units in the last place, for every
/// `x`; of the infinities they are ±1 and 0, of NaN NaN. (A derivative below 1e-37 counts as 0.)
///
/// The derivative is computed as `4u / (1 + u)^2` with `u = e^(-2|x|)`, which does not cancel where
/// tanh saturates.
#[inline(always)]
pub fn tanh_with_derivative<S: Simd>(simd: S, x: S::Vector) -> [S::Vector; 2] {
    let s = simd;
    let (one, size) = (s.splat(1.0), s.abs(x));
    let [u] = exp(s, [s.mul(size, s.splat(-2.0))]);
    let u = s.mul(u, s.splat(1.0 / EXP_SCALE));
    let denominator = s.add(one, u);

    // 1 - u cancels near 0; there tanh x = x + x^3 q(x^2), relative error below 2^-27.
    let square = s.mul(size, size);
    let mut q = s.splat(-5.704_986e-3);
    for coefficient in [2.063_908_6e-2, -5.373_971_4e-2, 0.133_314_42, -0.333_332_8] {
        q = s.mul_add(q, square, s.splat(coefficient));
    }
    let near = s.mul_add(s.mul(q, square), size, size);
    let far = s.div(s.sub(one, u), denominator);
    let tanh = s.select(s.less(size, s.splat(0.625)), near, far);

    let root = s.div(s.splat(2.0), denominator);
    [s.copysign(tanh, x), s.mul(s.mul(root, root), u)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_correctly_rounded() {
        for (k, power) in POWERS.into_iter().enumerate() {
            assert_eq!(power, 2f64.powf(k as f64 / 32.0) as f32);
        }
    }
}

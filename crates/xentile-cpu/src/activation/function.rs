//! Functions of activations and their slopes, over chunks.

use xentile::activation::{Activation, Kind};

use crate::math::{EXP_SCALE, exp};
use crate::simd::Simd;

/// Two vectors.
pub(super) type Chunk<S> = [<S as Simd>::Vector; 2];

pub(super) const SILU: u8 = 0;
pub(super) const GELU_TANH: u8 = 1;
pub(super) const GELU_ERF: u8 = 2;
pub(super) const RELU: u8 = 3;
pub(super) const SQUARED_RELU: u8 = 4;

/// The number of a kind.
pub(super) fn number(kind: Kind) -> u8 {
    match kind {
        Kind::Silu => SILU,
        Kind::GeluTanh => GELU_TANH,
        Kind::GeluErf => GELU_ERF,
        Kind::Relu => RELU,
        Kind::SquaredRelu => SQUARED_RELU,
    }
}

/// With `w = 1 / (1 + ERFC_SCALE |x|)`, `e^(-x^2 / 2)` times the polynomial, highest power first, is
/// `erfc(|x| / sqrt(2)) / 2`: this project's own minimax fit of the relative error, 2^-24.7.
const ERFC_SCALE: f32 = 0.296_225_7;
const ERFC: [f32; 9] = [
    0.039_359_067,
    -0.180_690_72,
    0.261_786_2,
    -0.108_041_97,
    0.160_919_8,
    0.087_050_88,
    0.121_775_75,
    0.117_826_395,
    1.464_454_4e-5,
];

/// What an activation of the kind `KIND` needs.
#[derive(Clone, Copy)]
pub(super) struct Function<S: Simd, const KIND: u8> {
    simd: S,
    alpha: S::Vector,
    limit: S::Vector,
    up_offset: S::Vector,
    is_limited: bool,
}

impl<S: Simd, const KIND: u8> Function<S, KIND> {
    #[inline(always)]
    pub(super) fn new(simd: S, options: &Activation) -> Self {
        Self {
            simd,
            alpha: simd.splat(options.alpha as f32),
            limit: simd.splat(options.bound()),
            up_offset: simd.splat(options.up_offset as f32),
            is_limited: options.limit.is_some(),
        }
    }

    #[inline(always)]
    pub(super) fn value(&self, x: Chunk<S>) -> Chunk<S> {
        self.at(x)[0]
    }

    #[inline(always)]
    pub(super) fn gradient(&self, x: Chunk<S>, dy: Chunk<S>) -> Chunk<S> {
        self.times(self.at(x)[1], dy)
    }

    #[inline(always)]
    pub(super) fn gated(&self, gate: Chunk<S>, up: Chunk<S>) -> Chunk<S> {
        let [gate, up] = [self.gate(gate), self.up(up)];
        self.times(self.value(gate), up)
    }

    /// Of gate and up.
    #[inline(always)]
    pub(super) fn gated_gradient(
        &self,
        gate: Chunk<S>,
        up: Chunk<S>,
        dy: Chunk<S>,
    ) -> [Chunk<S>; 2] {
        let s = self.simd;
        let [value, slope] = self.at(self.gate(gate));
        let mut of_gate = self.times(self.times(dy, self.up(up)), slope);
        let mut of_up = self.times(dy, value);
        if self.is_limited {
            for i in 0..2 {
                let zero = s.splat(0.0);
                of_gate[i] = s.select(s.less(self.limit, gate[i]), zero, of_gate[i]);
                of_up[i] = s.select(s.less(self.limit, s.abs(up[i])), zero, of_up[i]);
            }
        }
        [of_gate, of_up]
    }

    #[inline(always)]
    fn gate(&self, mut gate: Chunk<S>) -> Chunk<S> {
        if self.is_limited {
            for x in &mut gate {
                // NaN stays.
                *x = self.simd.select(self.simd.less(self.limit, *x), self.limit, *x);
            }
        }
        gate
    }

    #[inline(always)]
    fn up(&self, mut up: Chunk<S>) -> Chunk<S> {
        let s = self.simd;
        for x in &mut up {
            if self.is_limited {
                let end = s.copysign(self.limit, *x);
                *x = s.select(s.less(self.limit, s.abs(*x)), end, *x);
            }
            *x = s.add(*x, self.up_offset);
        }
        up
    }

    #[inline(always)]
    fn times(&self, [a, b]: Chunk<S>, [c, d]: Chunk<S>) -> Chunk<S> {
        [self.simd.mul(a, c), self.simd.mul(b, d)]
    }

    /// f and its slope, which costs nothing where it is not used.
    #[inline(always)]
    fn at(&self, x: Chunk<S>) -> [Chunk<S>; 2] {
        let s = self.simd;
        match KIND {
            SILU => {
                let z = self.times(x, [self.alpha; 2]);
                self.by_sigmoid(x, z, [self.alpha; 2])
            }
            GELU_TANH => {
                const FIRST: f32 = 1.595_769; // 2 sqrt(2 / pi)
                const THIRD: f32 = FIRST * 0.044_715;
                let (mut z, mut dz) = (x, x);
                for i in 0..2 {
                    // Beyond, the sigmoid is 0 or 1, and its slope would be infinity times 0.
                    let (square, most) = (s.mul(x[i], x[i]), s.splat(400.0));
                    let square = s.select(s.less(square, most), square, most);
                    let first = s.splat(FIRST);
                    z[i] = s.mul(x[i], s.mul_add(square, s.splat(THIRD), first));
                    dz[i] = s.mul_add(square, s.splat(3.0 * THIRD), first);
                }
                self.by_sigmoid(x, z, dz)
            }
            GELU_ERF => self.by_erf(x),
            _ => {
                let (mut value, mut slope) = (x, x);
                for i in 0..2 {
                    let zero = s.splat(0.0);
                    let above = s.select(s.less(x[i], zero), zero, x[i]);
                    if KIND == SQUARED_RELU {
                        value[i] = s.mul(above, above);
                        slope[i] = s.add(above, above);
                    } else {
                        value[i] = above;
                        // NaN stays.
                        let rest = s.mul(above, zero);
                        slope[i] = s.select(s.less(zero, x[i]), s.splat(1.0), rest);
                    }
                }
                [value, slope]
            }
        }
    }

    /// `x s(z)`, where `z` has the derivative `dz`.
    #[inline(always)]
    fn by_sigmoid(&self, x: Chunk<S>, z: Chunk<S>, dz: Chunk<S>) -> [Chunk<S>; 2] {
        let s = self.simd;
        let minus = s.splat(-1.0);
        let powers = exp(s, [s.mul(s.abs(z[0]), minus), s.mul(s.abs(z[1]), minus)]);
        let (mut value, mut slope) = (x, x);
        for i in 0..2 {
            let power = s.mul(powers[i], s.splat(1.0 / EXP_SCALE));
            let large = s.div(s.splat(1.0), s.add(s.splat(1.0), power));
            let small = s.mul(power, large);
            let is_below = s.less(z[i], s.splat(0.0));
            let sigmoid = s.select(is_below, small, large);
            value[i] = s.mul(x[i], sigmoid);
            let rest = s.select(is_below, large, small);
            slope[i] = s.mul_add(s.mul(value[i], dz[i]), rest, sigmoid);
        }
        [value, slope]
    }

    #[inline(always)]
    fn by_erf(&self, x: Chunk<S>) -> [Chunk<S>; 2] {
        let s = self.simd;
        let half = s.splat(-0.5);
        let exponents = [s.mul(s.mul(x[0], x[0]), half), s.mul(s.mul(x[1], x[1]), half)];
        let powers = exp(s, exponents);
        let (mut value, mut slope) = (x, x);
        for i in 0..2 {
            let one = s.splat(1.0);
            let w = s.div(one, s.mul_add(s.abs(x[i]), s.splat(ERFC_SCALE), one));
            let mut polynomial = s.splat(ERFC[0]);
            for coefficient in &ERFC[1..] {
                polynomial = s.mul_add(polynomial, w, s.splat(*coefficient));
            }
            let power = s.mul(powers[i], s.splat(1.0 / EXP_SCALE));
            let tail = s.mul(polynomial, power);
            let below = s.select(s.less(s.splat(0.0), x[i]), s.sub(one, tail), tail);
            value[i] = s.mul(x[i], below);
            let density = s.mul(power, s.splat(0.398_942_3));
            slope[i] = s.mul_add(x[i], density, below);
        }
        [value, slope]
    }
}

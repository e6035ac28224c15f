//! Passes over one row at a time, with every option, also those that the other passes do not take: a
//! temperature, entropy and argmax.
//!
//! A row is read in blocks that stay in the first-level cache. A block's logits are widened, capped and
//! multiplied by the reciprocal of the temperature, then added to an online softmax, which is rescaled
//! where a block has a larger maximum (Milakov and Gimelshein, 2018).

use xentile::Element;

use super::matrix::Matrix;
use super::statistics::Label;
use crate::Job;
use crate::math::{EXP_SCALE, capped_with_derivative, exp};
use crate::simd::Simd;

/// Columns of a block: whole chunks of every instruction set.
const BLOCK: usize = 1024;

/// Nothing is left of an exponential below this, whose product with -inf would be NaN.
const LEAST: f32 = -128.0;

/// Of a logit `x`, `scale * cap(x)` is what goes into the softmax.
#[derive(Clone, Copy, Debug)]
pub(super) struct Map {
    pub(super) softcap: Option<f32>,
    /// The reciprocal of the temperature.
    pub(super) scale: f32,
}

impl Map {
    /// Capped logits and the derivatives of that.
    #[inline(always)]
    fn capped<S: Simd>(self, s: S, x: [S::Vector; 2]) -> [[S::Vector; 2]; 2] {
        match self.softcap {
            Some(cap) => capped_with_derivative(s, x, [s.splat(cap), s.splat(1.0 / cap)]),
            None => [x, [s.splat(1.0); 2]],
        }
    }
}

/// What is found of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    /// Near the largest number; -inf while there is none above that.
    shift: f32,
    /// Sum of `EXP_SCALE * exp(z - shift)`.
    sum: f64,
    /// Sum of `EXP_SCALE * exp(z - shift) * (z - shift)`.
    weighted: f64,
    /// Sum of z, where it is asked for.
    total: f64,
    /// The largest logit as it was given, and its first column.
    pub(super) highest: f32,
    pub(super) argmax: usize,
}

impl Found {
    pub(super) const NOTHING: Self = Self {
        shift: f32::NEG_INFINITY,
        sum: 0.0,
        weighted: 0.0,
        total: 0.0,
        highest: f32::NEG_INFINITY,
        argmax: 0,
    };

    /// `ln` of the sum of `exp(z - shift)`.
    fn log(&self) -> f64 {
        (self.sum / f64::from(EXP_SCALE)).ln()
    }

    /// NaN where there is no finite sum.
    pub(super) fn lse(&self) -> f64 {
        let lse = f64::from(self.shift) + self.log();
        if lse.is_finite() { lse } else { f64::NAN }
    }

    /// lse less the mean of z by its probabilities.
    pub(super) fn entropy(&self) -> f64 {
        (self.log() - self.weighted / self.sum).max(0.0)
    }

    pub(super) fn mean(&self, vocab: usize) -> f64 {
        self.total / vocab as f64
    }

    /// Puts sums in terms of a larger shift.
    fn raise(&mut self, shift: f32) {
        if self.sum != 0.0 {
            let change = f64::from(self.shift) - f64::from(shift);
            let factor = change.exp();
            self.weighted = (self.weighted + self.sum * change) * factor;
            self.sum *= factor;
            if factor == 0.0 {
                self.weighted = 0.0;
            }
        }
        self.shift = shift;
    }
}

/// The sums of a row.
pub(super) struct WholeSums<'a, E> {
    pub(super) matrix: &'a Matrix<'a, E>,
    pub(super) token: usize,
    pub(super) map: Map,
    pub(super) label: Option<Label>,
    /// Whether the mean is wanted.
    pub(super) mean: bool,
    pub(super) found: &'a mut Found,
}

impl<E: Element> Job for WholeSums<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let vocab = self.matrix.shape().vocab();
        let logits = self.matrix.logits(self.token);
        let scale = s.splat(self.map.scale);
        let mut block = [0.0_f32; BLOCK];
        for start in (0..vocab).step_by(BLOCK) {
            let columns = BLOCK.min(vocab - start);
            // SAFETY: columns of the row.
            let from = unsafe { logits.add(start) };
            let mut highest = [s.splat(f32::NEG_INFINITY); 2];
            let mut largest = highest;
            for column in (0..columns).step_by(S::CHUNK) {
                // SAFETY: the chunk begins in the row, and what is beyond it is not read; the block
                // holds whole chunks.
                unsafe {
                    let at = from.add(column);
                    let x = match columns - column {
                        count if count < S::CHUNK => {
                            s.load_part(at, count, E::from_f32(f32::NEG_INFINITY))
                        }
                        _ => s.load(at),
                    };
                    let [z, _] = self.map.capped(s, x);
                    for i in 0..2 {
                        highest[i] = s.max(x[i], highest[i]);
                        largest[i] = s.max(z[i], largest[i]);
                    }
                    // Lanes in whichever order the chunk has them.
                    s.store(z, block.as_mut_ptr().add(column));
                }
            }
            let padded = columns.next_multiple_of(S::CHUNK);
            // Under a cap what fills the last chunk is not -inf any more.
            for index in columns..padded {
                let place = S::place::<E>(index % S::CHUNK);
                block[index - index % S::CHUNK + place] = f32::NEG_INFINITY;
            }
            if self.mean {
                let real = (0..columns).map(|index| {
                    let place = S::place::<E>(index % S::CHUNK);
                    f64::from(block[index - index % S::CHUNK + place])
                });
                self.found.total += real.sum::<f64>() * f64::from(self.map.scale);
            }
            let highest = s.largest(s.max(highest[0], highest[1]));
            if highest > self.found.highest {
                self.found.highest = highest;
                // SAFETY: columns of the row.
                let mut all = (0..columns).map(|column| unsafe { *from.add(column) }.to_f32());
                self.found.argmax = start + all.position(|x| x == highest).unwrap_or(0);
            }
            // A number in f32, the product of which rounds as that of the others.
            let largest = s.largest(s.max(largest[0], largest[1])) * self.map.scale;
            if largest > self.found.shift {
                self.found.raise(largest);
            }
            let shift = match self.found.shift {
                f32::NEG_INFINITY => 0.0,
                shift => shift,
            };
            if let Some(label) = self.label
                && let Some(index) = label.column.checked_sub(start).filter(|&it| it < columns)
            {
                // Its exponential is added in float64.
                let place = S::place::<E>(index % S::CHUNK);
                block[index - index % S::CHUNK + place] = f32::NEG_INFINITY;
                let distance = label.logit - f64::from(shift);
                let exponential = distance.exp() * f64::from(EXP_SCALE);
                self.found.sum += exponential;
                if exponential != 0.0 {
                    self.found.weighted += exponential * distance;
                }
            }
            let (mut sum, mut weighted) = ([s.splat(0.0); 2], [s.splat(0.0); 2]);
            let minus_shift = s.splat(-shift);
            for column in (0..padded).step_by(S::CHUNK) {
                // SAFETY: the chunk lies in the block.
                let z = unsafe { s.load(block.as_ptr().add(column)) };
                let distance = z.map(|z| s.mul_add(z, scale, minus_shift));
                let exps = exp(s, distance);
                for i in 0..2 {
                    sum[i] = s.add(sum[i], exps[i]);
                    let bounded = s.max(distance[i], s.splat(LEAST));
                    weighted[i] = s.mul_add(exps[i], bounded, weighted[i]);
                }
            }
            self.found.sum += s.sum(s.add(sum[0], sum[1]));
            self.found.weighted += s.sum(s.add(weighted[0], weighted[1]));
        }
    }
}

/// The gradient of a row.
#[derive(Clone, Copy, Debug)]
pub(super) enum WholeRow {
    /// The same value everywhere; logits are not read.
    Fill(f32),
    /// `at_label` in column `label`, elsewhere with `d = z - shift`
    /// `EXP_SCALE * exp(d) * (probability + slope * d) + constant`, times the derivative of softcap where
    /// there is one, and 0 where the logit is -inf.
    Formula { shift: f32, probability: f32, slope: f32, constant: f32, label: usize, at_label: f64 },
}

/// The pass that writes it.
pub(super) struct WholeGradient<'a, E> {
    pub(super) matrix: &'a Matrix<'a, E>,
    pub(super) token: usize,
    pub(super) map: Map,
    pub(super) row: WholeRow,
}

impl<E: Element> Job for WholeGradient<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let vocab = self.matrix.shape().vocab();
        let (from, to) = (self.matrix.logits(self.token), self.matrix.dlogits(self.token));
        let WholeRow::Formula { shift, probability, slope, constant, label, at_label } = self.row
        else {
            let WholeRow::Fill(value) = self.row else { unreachable!() };
            for column in 0..vocab {
                // SAFETY: a column of the row.
                unsafe { to.add(column).write(E::from_f32(value)) };
            }
            return;
        };
        let (scale, minus_shift) = (s.splat(self.map.scale), s.splat(-shift));
        let [probability, slope, constant] = [probability, slope, constant].map(|x| s.splat(x));
        for column in (0..vocab).step_by(S::CHUNK) {
            let count = S::CHUNK.min(vocab - column);
            // SAFETY: columns of the row, which may be read and written by this task alone.
            unsafe {
                let (at, to) = (from.add(column), to.add(column));
                let x = match count {
                    count if count < S::CHUNK => s.load_part(at, count, E::from_f32(0.0)),
                    _ => s.load(at),
                };
                let [z, derivative] = self.map.capped(s, x);
                let distance = z.map(|z| s.mul_add(z, scale, minus_shift));
                let mut dz = exp(s, distance);
                for i in 0..2 {
                    let bounded = s.max(distance[i], s.splat(LEAST));
                    let factor = s.mul_add(slope, bounded, probability);
                    dz[i] = s.mul_add(dz[i], factor, constant);
                    dz[i] = s.mul(dz[i], derivative[i]);
                    // The exponential is 0 at -inf, but the constant is not.
                    dz[i] = s.zero_below(dz[i], z[i], s.splat(f32::MIN));
                }
                match count {
                    count if count < S::CHUNK => s.store_part(dz, to, count),
                    _ => s.store(dz, to),
                }
            }
        }
        // SAFETY: the label is a column of the row.
        unsafe { to.add(label).write(E::from_f64(at_label)) };
    }
}

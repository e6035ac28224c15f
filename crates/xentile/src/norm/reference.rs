//! Norms and their error bounds in float64, one row at a time, so that no caller ever holds `[T, D]` in
//! float64.

use super::{Kind, Norm};
use crate::Element;

/// Half the spacing of f32 after 1, the unit of bounds.
pub const U: f64 = 1.0 / (1 << 24) as f64;
/// The bound of the mean beside its rounding, in units of `mean |x - m|`.
const MEAN_ROUNDINGS: f64 = 40.0;
/// The bound of LayerNorm's `xhat`, of itself, beside the error of the mean.
const XHAT_ROUNDINGS: f64 = 32.0;
/// The bound of RMSNorm's `y`, of itself, before it is rounded to its dtype.
pub(super) const RMS_Y_ROUNDINGS: f64 = 24.0;

impl Kind {
    /// The bound of `rstd`, of itself.
    fn rstd_roundings(self) -> f64 {
        match self {
            Self::Rms => 20.0,
            Self::Layer => 24.0,
        }
    }

    /// The bound of `dx`, of `r (|g| + |xhat| mean |g xhat|)`, plus `r mean |g|` for LayerNorm.
    fn dx_roundings(self) -> f64 {
        match self {
            Self::Rms => 112.0,
            Self::Layer => 160.0,
        }
    }

    /// The bound of a partial sum beside its number of rows, of the sum of its terms' magnitudes.
    #[must_use]
    pub fn sum_roundings(self) -> f64 {
        match self {
            Self::Rms => 24.0,
            Self::Layer => 8.0,
        }
    }
}

/// The sum of a row and its residual, each of `E`: added in f32 and rounded to `E`, a tie to even.
///
/// # Panics
/// The rows differ in length.
pub fn add<E: Element>(x: &[E], residual: &[E], sum: &mut [E]) {
    assert!(x.len() == residual.len() && x.len() == sum.len());
    for ((sum, x), residual) in sum.iter_mut().zip(x).zip(residual) {
        *sum = E::from_f32(x.to_f32() + residual.to_f32());
    }
}

/// A row `x` `[D]` with its weight `[D]` and its statistics. The methods panic if arrays differ from it in
/// length.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    norm: &'a Norm,
    x: &'a [f64],
    weight: &'a [f64],
    /// The mean; 0 for RMSNorm.
    pub mean: f64,
    /// One over the root.
    pub rstd: f64,
    /// `mean |x - m|`.
    pub spread: f64,
    /// Roundings that bounds allow a sum over the row beside those of the contract.
    pub extra_roundings: f64,
}

/// Sums over rows `[D]` of the magnitudes that bound dweight and dbias.
#[derive(Clone, Debug)]
pub struct Magnitudes {
    /// Of the terms of dweight.
    pub dweight: Vec<f64>,
    /// Of the terms of dbias.
    pub dbias: Vec<f64>,
    /// Of the effect on dweight of errors of LayerNorm's `xhat`.
    pub xhat_errors: Vec<f64>,
}

impl Magnitudes {
    /// Zeros for so many columns.
    #[must_use]
    pub fn zeros(columns: usize) -> Self {
        let [dweight, dbias, xhat_errors] = [(); 3].map(|()| vec![0.0; columns]);
        Self { dweight, dbias, xhat_errors }
    }
}

impl<'a> Row<'a> {
    /// The row `x` with a `weight`.
    ///
    /// # Panics
    /// They differ in length.
    #[must_use]
    pub fn new(norm: &'a Norm, x: &'a [f64], weight: &'a [f64]) -> Self {
        assert_eq!(x.len(), weight.len());
        let average = |sum: f64| sum / x.len() as f64;
        let mean = match norm.kind {
            Kind::Rms => 0.0,
            Kind::Layer => average(x.iter().sum()),
        };
        let variance = average(x.iter().map(|x| (x - mean).powi(2)).sum());
        let spread = average(x.iter().map(|x| (x - mean).abs()).sum());
        let rstd = norm.rstd(variance);
        Self { norm, x, weight, mean, rstd, spread, extra_roundings: 0.0 }
    }

    /// Entry `v` of the normalised row, before weight and bias.
    #[must_use]
    pub fn xhat(&self, v: usize) -> f64 {
        (self.x[v] - self.mean) * self.rstd
    }

    /// Writes the norm to `y` `[D]`, with a `bias` `[D]`, if any.
    pub fn forward(&self, bias: Option<&[f64]>, y: &mut [f64]) {
        assert_eq!(y.len(), self.x.len());
        for (v, y) in y.iter_mut().enumerate() {
            let bias = bias.map_or(0.0, |bias| bias[v]);
            *y = self.xhat(v) * self.norm.factor(self.weight[v]) + bias;
        }
    }

    /// Writes the gradient of the row to `dx` `[D]`, for a cotangent `dy` `[D]` of its norm and, if the row
    /// is a sum that is an output too, `dsum` `[D]` of that. Adds the row's terms to `dweight` and `dbias`,
    /// each `[D]`.
    pub fn backward(
        &self,
        dy: &[f64],
        dsum: Option<&[f64]>,
        dx: &mut [f64],
        [dweight, dbias]: [&mut [f64]; 2],
    ) {
        assert!([dy.len(), dx.len(), dweight.len(), dbias.len()] == [self.x.len(); 4]);
        let mean_g = match self.norm.kind {
            Kind::Rms => 0.0,
            Kind::Layer => self.average(|v| self.g(dy, v)),
        };
        let along = self.average(|v| self.g(dy, v) * self.xhat(v));
        for v in 0..self.x.len() {
            dx[v] = self.rstd * (self.g(dy, v) - mean_g - self.xhat(v) * along);
            dx[v] += dsum.map_or(0.0, |dsum| dsum[v]);
            dweight[v] += dy[v] * self.xhat(v);
            dbias[v] += dy[v];
        }
    }

    /// The bound of the mean.
    #[must_use]
    pub fn mean_bound(&self) -> f64 {
        self.relaxed(U * (self.mean.abs() + MEAN_ROUNDINGS * self.spread))
    }

    /// The bound of `rstd`.
    #[must_use]
    pub fn rstd_bound(&self) -> f64 {
        let roundings = self.norm.kind.rstd_roundings();
        match self.norm.kind {
            Kind::Rms => U * (roundings + self.extra_roundings) * self.rstd,
            Kind::Layer => self.relaxed(U * roundings * self.offset() * self.rstd),
        }
    }

    /// Writes the bound of each entry of `y`, before it is rounded, to `bound` `[D]`.
    pub fn y_bound(&self, bias: Option<&[f64]>, bound: &mut [f64]) {
        self.forward(bias, bound);
        for (v, bound) in bound.iter_mut().enumerate() {
            let y = bound.abs();
            *bound = match self.norm.kind {
                Kind::Rms => U * (RMS_Y_ROUNDINGS + self.extra_roundings) * y,
                Kind::Layer => {
                    let terms = bias.map_or(0.0, |bias| bias[v].abs()) + y;
                    self.relaxed(self.weight[v].abs() * self.xhat_bound(v) + U * terms)
                }
            };
        }
    }

    /// Writes the bound of each entry of `dx` `[D]`, before it is rounded, to `bound` `[D]`; adds the
    /// magnitudes of the row's terms to `magnitudes`.
    pub fn dx_bound(&self, dy: &[f64], dx: &[f64], bound: &mut [f64], magnitudes: &mut Magnitudes) {
        assert!([dy.len(), dx.len(), bound.len()] == [self.x.len(); 3]);
        let along = self.average(|v| self.g(dy, v) * self.xhat(v)).abs();
        let along_size = self.average(|v| (self.g(dy, v) * self.xhat(v)).abs());
        let along_error = self.average(|v| self.g(dy, v).abs() * self.xhat_bound(v));
        let g_size = self.average(|v| self.g(dy, v).abs());
        let roundings = self.norm.kind.dx_roundings();
        for v in 0..self.x.len() {
            let (xhat, error) = (self.xhat(v).abs(), self.xhat_bound(v));
            let size = self.g(dy, v).abs() + xhat * along_size;
            bound[v] = match self.norm.kind {
                Kind::Rms => {
                    U * ((roundings + self.extra_roundings) * self.rstd * size + dx[v].abs())
                }
                Kind::Layer => {
                    let sums = U * roundings * self.offset() * (size + g_size);
                    self.relaxed(self.rstd * (sums + xhat * along_error + error * along))
                }
            };
            magnitudes.dweight[v] += dy[v].abs() * xhat;
            magnitudes.dbias[v] += dy[v].abs();
            magnitudes.xhat_errors[v] += dy[v].abs() * error;
        }
    }

    /// `dy` times the factor of the column.
    fn g(&self, dy: &[f64], v: usize) -> f64 {
        dy[v] * self.norm.factor(self.weight[v])
    }

    /// The mean over columns.
    fn average(&self, term: impl Fn(usize) -> f64) -> f64 {
        (0..self.x.len()).map(term).sum::<f64>() / self.x.len() as f64
    }

    /// LayerNorm's bound with extra roundings.
    fn relaxed(&self, bound: f64) -> f64 {
        (1.0 + self.extra_roundings) * bound
    }

    /// The bound of entry `v` of LayerNorm's `xhat`; RMSNorm has it in those of its results.
    fn xhat_bound(&self, v: usize) -> f64 {
        if self.norm.kind == Kind::Rms {
            return 0.0;
        }
        let mean_error = 2.0 * self.mean.abs() + MEAN_ROUNDINGS * self.spread;
        U * (XHAT_ROUNDINGS * self.offset() * self.xhat(v).abs() + mean_error * self.rstd)
    }

    /// `(1 + 40 u s)^2`, the cost of a mean of many deviations.
    fn offset(&self) -> f64 {
        (1.0 + MEAN_ROUNDINGS * U * self.mean.abs() * self.rstd).powi(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    const X: [f64; 5] = [0.3, -1.2, 2.5, 0.0, 1.1];
    const WEIGHT: [f64; 5] = [1.0, -0.5, 0.25, 2.0, 0.7];
    const BIAS: [f64; 5] = [0.1, 0.0, -3.0, 0.5, 1.0];
    const DY: [f64; 5] = [0.4, 1.3, -0.6, 0.9, -0.2];
    const DSUM: [f64; 5] = [-0.3, 0.2, 0.5, -1.0, 0.1];

    /// The row with the weights of its columns, and y with the biases of LayerNorm's.
    fn forward<'a>(norm: &'a Norm, x: &'a [f64]) -> (Row<'a>, Vec<f64>) {
        let (row, mut y) = (Row::new(norm, x, &WEIGHT[..x.len()]), vec![f64::NAN; x.len()]);
        row.forward((norm.kind == Kind::Layer).then_some(&BIAS[..x.len()]), &mut y);
        (row, y)
    }

    fn y_of(norm: &Norm, x: &[f64], weight: &[f64]) -> Vec<f64> {
        let mut y = vec![f64::NAN; x.len()];
        Row::new(norm, x, weight).forward(None, &mut y);
        y
    }

    /// dx, dweight and dbias.
    fn gradients(norm: &Norm, x: &[f64], dsum: Option<&[f64]>) -> [Vec<f64>; 3] {
        let n = x.len();
        let [mut dx, mut dweight, mut dbias] = [vec![f64::NAN; n], vec![0.0; n], vec![0.0; n]];
        let sums = [&mut dweight[..], &mut dbias];
        Row::new(norm, x, &WEIGHT[..n]).backward(&DY[..n], dsum, &mut dx, sums);
        [dx, dweight, dbias]
    }

    /// The gradients must be derivatives of `sum(dy y) + sum(dsum h)`.
    #[test]
    fn gradients_are_derivatives_of_forward() {
        let cases = [
            (Norm { eps: 0.1, ..Norm::RMS }, [0.0, 1e4]),
            (Norm { eps: 0.1, zero_centred: true, ..Norm::RMS }, [0.0, 1e4]),
            (Norm { eps: 0.1, ..Norm::LAYER }, [0.0, 1e3]),
        ];
        for (norm, offsets) in cases {
            let is_layer = norm.kind == Kind::Layer;
            let dsum = (!is_layer).then_some(&DSUM[..]);
            for offset in offsets {
                let x = X.map(|x| x + offset);
                let objective = |x: &[f64], weight: &[f64], bias: &[f64]| {
                    let mut y = [f64::NAN; 5];
                    Row::new(&norm, x, weight).forward(is_layer.then_some(bias), &mut y);
                    let dot =
                        |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                    dot(&y, &DY) + dsum.map_or(0.0, |dsum| dot(x, dsum))
                };
                let [dx, dweight, dbias] = gradients(&norm, &x, dsum);
                let slope = |row: &[f64; 5], v: usize, step: f64, at: &dyn Fn(&[f64]) -> f64| {
                    let (mut up, mut down) = (*row, *row);
                    up[v] += step;
                    down[v] -= step;
                    (at(&up) - at(&down)) / (2.0 * step)
                };
                let (steps, most) = match is_layer {
                    true => ([1e-4; 2], [1e-7; 2]),
                    false => ([1e-5 * (1.0 + offset), 1e-3], [1e-8, 1e-8 * (1.0 + offset)]),
                };
                for v in 0..5 {
                    let numeric_dx = slope(&x, v, steps[0], &|x| objective(x, &WEIGHT, &BIAS));
                    let numeric_dweight = slope(&WEIGHT, v, steps[1], &|w| objective(&x, w, &BIAS));
                    let mut found = vec![
                        ("dx", dx[v], numeric_dx, most[0]),
                        ("dweight", dweight[v], numeric_dweight, most[1]),
                    ];
                    if is_layer {
                        let numeric = slope(&BIAS, v, 1e-4, &|b| objective(&x, &WEIGHT, b));
                        found.push(("dbias", dbias[v], numeric, 1e-7));
                    }
                    for (name, found, wanted, most) in found {
                        assert!((found - wanted).abs() < most, "{name} {v}: {found}, {wanted}");
                    }
                }
            }
        }
    }

    /// Values worked out by hand: a mean of squares of 24, and 25 with eps.
    #[test]
    fn a_row_of_rms_norm_by_hand() {
        let norm = Norm { eps: 1.0, ..Norm::RMS };
        let x = [4.0, -4.0, 8.0, 0.0];
        let y = y_of(&norm, &x, &[1.0, 0.5, 2.0, 9.0]);
        assert_eq!(Row::new(&norm, &x, &WEIGHT[..4]).rstd, 0.2);
        assert_eq!(
            y.iter().map(|y| (y * 1e9).round() / 1e9).collect::<Vec<_>>(),
            [0.8, -0.4, 3.2, 0.0]
        );
        let zero_centred = Norm { zero_centred: true, ..norm };
        assert_eq!(y_of(&zero_centred, &x, &[0.0, -0.5, 1.0, 8.0]), y);
        // One column: y is the sign but for eps, and dx = dy w r^3 eps.
        assert_eq!(y_of(&Norm { eps: 0.0, ..norm }, &[-3.0], &[2.0]), [-2.0]);
        let norm = Norm { eps: 16.0, ..norm };
        let [dx, dweight, _] = gradients(&norm, &[3.0], None);
        assert!((dx[0] - 0.4 * 16.0 / 125.0).abs() < 1e-15, "{dx:?}");
        assert!((dweight[0] - 0.4 * 0.6).abs() < 1e-15, "{dweight:?}");
    }

    /// Values worked out by hand: a mean of 3 and a variance of 8, and 9 with eps.
    #[test]
    fn a_row_of_layer_norm_by_hand() {
        let norm = Norm { eps: 1.0, ..Norm::LAYER };
        let (x, weight) = ([3.0, 7.0, -1.0, 3.0], [5.0, 3.0, 1.5, 2.0]);
        let row = Row::new(&norm, &x, &weight);
        assert_eq!((row.mean, row.rstd, row.spread), (3.0, 1.0 / 3.0, 2.0));
        let y = y_of(&norm, &x, &weight);
        assert_eq!(
            y.iter().map(|y| (y * 1e9).round() / 1e9).collect::<Vec<_>>(),
            [0.0, 4.0, -2.0, 0.0]
        );
        // One column is its own mean.
        let (row, y) = forward(&norm, &[7.0]);
        assert_eq!((row.mean, row.rstd, y[0]), (7.0, 1.0, BIAS[0]));
        let [dx, dweight, dbias] = gradients(&norm, &[7.0], None);
        assert_eq!((dx[0], dweight[0], dbias[0]), (0.0, 0.0, DY[0]));
    }

    #[test]
    fn sums_are_added_to() {
        for norm in [Norm::RMS, Norm::LAYER] {
            let [_, dweight, dbias] = gradients(&norm, &X, None);
            let (mut dx, mut twice) = ([0.0; 5], [dweight.clone(), dbias.clone()]);
            let [first, second] = &mut twice;
            Row::new(&norm, &X, &WEIGHT).backward(&DY, None, &mut dx, [first, second]);
            let double = |row: Vec<f64>| row.iter().map(|x| 2.0 * x).collect::<Vec<_>>();
            assert_eq!(twice, [double(dweight), double(dbias)]);
        }
    }

    #[test]
    fn a_sum_is_rounded_once_and_a_tie_goes_to_even() {
        let sum_of = |x: f32, residual: f32| {
            let mut sum = [bf16::NAN];
            add(&[bf16::from_f32(x)], &[bf16::from_f32(residual)], &mut sum);
            sum[0].to_f32()
        };
        // 8 bits: the spacing after 256 is 2.
        assert_eq!(
            [sum_of(256.0, 1.0), sum_of(258.0, 1.0), sum_of(256.0, 1.0078125)],
            [256.0, 260.0, 258.0]
        );
        let mut sum = [f16::NAN; 2];
        add(&[f16::from_f32(2048.0), f16::MAX], &[f16::from_f32(3.0), f16::MAX], &mut sum);
        assert_eq!(sum, [f16::from_f32(2052.0), f16::INFINITY]);
    }

    #[test]
    fn special_rows_of_rms_norm_keep_the_contract() {
        let norm = Norm::RMS;
        for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let x = [1.0, poison, 0.0];
            let (row, y) = forward(&norm, &x);
            let [dx, dweight, _] = gradients(&norm, &x, None);
            assert!(dx.iter().all(|dx| dx.is_nan()) && y[1].is_nan() && dweight[1].is_nan());
            if poison.is_nan() {
                assert!(row.rstd.is_nan() && y.iter().chain(&dweight).all(|y| y.is_nan()));
            } else {
                let zeros = (row.rstd, y[0], y[2], dweight[0], dweight[2]);
                assert_eq!(zeros, (0.0, 0.0, 0.0, 0.0, 0.0));
            }
        }
        let (row, y) = forward(&norm, &[0.0; 3]);
        assert!((row.rstd - 1e3).abs() < 1e-9 && y == [0.0; 3]);
        let [dx, dweight, _] = gradients(&norm, &[0.0; 3], None);
        assert!(dweight == [0.0; 3] && (dx[0] - 0.4 * 1e3).abs() < 1e-9, "{dx:?}");
        let exact = Norm { eps: 0.0, ..norm };
        let (row, y) = forward(&exact, &[0.0; 3]);
        assert!(row.rstd == f64::INFINITY && y.iter().all(|y| y.is_nan()));
        let [dx, dweight, _] = gradients(&exact, &[0.0; 3], None);
        assert!(dx.iter().chain(&dweight).all(|d| d.is_nan()));
        // More than f32 holds.
        assert_eq!(forward(&exact, &[1e-40; 2]).0.rstd, f64::INFINITY);
        let (row, y) = forward(&exact, &[1e-20, -1e-20]);
        assert!((row.rstd - 1e20).abs() < 1e8 && (y[0] - 1.0).abs() < 1e-14, "{row:?} {y:?}");
    }

    #[test]
    fn special_rows_of_layer_norm_keep_the_contract() {
        let norm = Norm::LAYER;
        for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let x = [1.0, poison, 0.0];
            let (row, y) = forward(&norm, &x);
            assert!(!row.mean.is_finite() && row.rstd.is_nan());
            let [dx, dweight, dbias] = gradients(&norm, &x, None);
            assert!(y.iter().chain(&dx).chain(&dweight).all(|x| x.is_nan()));
            assert_eq!(dbias, DY[..3]);
        }
        let (row, y) = forward(&norm, &[2.5; 3]);
        assert!((row.rstd - 1e5_f64.sqrt()).abs() < 1e-9 && y == BIAS[..3]);
        let exact = Norm { eps: 0.0, ..norm };
        let (row, y) = forward(&exact, &[2.5; 3]);
        assert!(row.rstd == f64::INFINITY && y.iter().all(|y| y.is_nan()));
        let [dx, dweight, _] = gradients(&exact, &[2.5; 3], None);
        assert!(dx.iter().chain(&dweight).all(|d| d.is_nan()));
    }

    /// RMSNorm offset by 1e4: a row is nearly its weight, and its gradient a small difference.
    #[test]
    fn an_offset_row_of_rms_norm() {
        let norm = Norm { eps: 0.0, ..Norm::RMS };
        let x = X.map(|x| x + 1e4);
        let y = y_of(&norm, &x, &[1.0; 5]);
        assert!(y.iter().all(|y| (y - 1.0).abs() < 3e-4), "{y:?}");
        let [dx, ..] = gradients(&norm, &x, None);
        let along: f64 = dx.iter().zip(x).map(|(dx, x)| dx * x).sum();
        assert!(along.abs() < 1e-12, "a gradient across x: {along}");
        let (mut bound, mut magnitudes) = ([0.0; 5], Magnitudes::zeros(5));
        Row::new(&norm, &x, &WEIGHT).dx_bound(&DY, &dx, &mut bound, &mut magnitudes);
        let scales = bound.iter().zip(&dx).map(|(bound, dx)| (bound / U - dx.abs()) / 112.0);
        assert!(scales.zip(&dx).all(|(scale, dx)| scale >= dx.abs()));
    }

    /// LayerNorm: a number added to all of a row changes the mean and nothing else.
    #[test]
    fn layer_norm_subtracts_an_offset() {
        let norm = Norm::LAYER;
        let ((near, y), gradient) = (forward(&norm, &X), gradients(&norm, &X, None));
        let x = X.map(|x| x + 1000.0);
        let ((far, far_y), far_gradient) = (forward(&norm, &x), gradients(&norm, &x, None));
        assert!((far.mean - near.mean - 1000.0).abs() < 1e-12);
        let pairs = y.iter().zip(&far_y);
        for (a, b) in pairs.chain(gradient.iter().flatten().zip(far_gradient.iter().flatten())) {
            assert!((a - b).abs() < 1e-10, "{a} {b}");
        }
        // And dx has no part along a row of ones.
        assert!(gradient[0].iter().sum::<f64>().abs() < 1e-12);
    }

    /// Bounds are those of the contract, for LayerNorm of a row with a mean of a thousand deviations.
    #[test]
    fn bounds_of_an_offset_row() {
        let norm = Norm { eps: 0.0, ..Norm::LAYER };
        let (x, ones) = ([999.0, 1001.0, 1001.0, 999.0], [1.0; 4]);
        let row = Row::new(&norm, &x, &ones);
        let s = 1000.0;
        assert_eq!(row.mean_bound(), U * (s + 40.0));
        assert!((row.rstd_bound() / U - 24.0 * (1.0 + 40.0 * U * s).powi(2)).abs() < 1e-9);
        let xhat = row.xhat_bound(1) / U;
        assert!((xhat - 2040.0 - 32.0 * (1.0 + 40.0 * U * s).powi(2)).abs() < 1e-9, "{xhat}");
        let mut bound = [0.0; 4];
        Row::new(&norm, &x, &[2.0; 4]).y_bound(Some(&ones), &mut bound);
        assert!((bound[1] / U - 2.0 * xhat - 1.0 - 3.0).abs() < 1e-9, "{bound:?}");
        let mut sums = Magnitudes::zeros(4);
        row.dx_bound(&[1.0, 0.0, 0.0, 0.0], &ones, &mut bound, &mut sums);
        // mean |g| and mean |g xhat| are a quarter.
        let terms = 160.0 * (1.0 + 40.0 * U * s).powi(2) * 1.5;
        assert!((bound[0] / U - terms - xhat / 2.0).abs() < 1e-6, "{bound:?}");
        let Magnitudes { dweight, dbias, xhat_errors } = sums;
        assert_eq!((dweight[0], dbias[0], dweight[1], dbias[1]), (1.0, 1.0, 0.0, 0.0));
        assert!((xhat_errors[0] / U - xhat).abs() < 1e-9);
    }
}

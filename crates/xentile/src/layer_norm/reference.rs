//! The same mathematics written plainly in float64, one row at a time, so that no caller ever holds
//! `[T, D]` in float64.

use super::{DX_ROUNDINGS, LayerNorm, MEAN_ROUNDINGS, RSTD_ROUNDINGS, XHAT_ROUNDINGS};

/// Half the spacing of f32 after 1.
pub const U: f64 = 1.0 / (1 << 24) as f64;

/// What a row is normalised by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statistics {
    /// The mean.
    pub mean: f64,
    /// One over the standard deviation.
    pub rstd: f64,
    /// `mean |x - m|`.
    pub spread: f64,
}

impl Statistics {
    /// Those of the row `x` `[D]`.
    #[must_use]
    pub fn of(options: &LayerNorm, x: &[f64]) -> Self {
        let columns = x.len() as f64;
        let mean = x.iter().sum::<f64>() / columns;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / columns;
        let spread = x.iter().map(|x| (x - mean).abs()).sum::<f64>() / columns;
        Self { mean, rstd: options.rstd(variance), spread }
    }

    /// An entry of the row as it is normalised.
    #[must_use]
    pub fn xhat(&self, x: f64) -> f64 {
        (x - self.mean) * self.rstd
    }

    /// How far the mean may be off.
    #[must_use]
    pub fn mean_bound(&self) -> f64 {
        U * (self.mean.abs() + MEAN_ROUNDINGS * self.spread)
    }

    /// How far `rstd` may be off.
    #[must_use]
    pub fn rstd_bound(&self) -> f64 {
        U * RSTD_ROUNDINGS * self.offset() * self.rstd
    }

    /// How far an entry `xhat` may be off.
    #[must_use]
    pub fn xhat_bound(&self, xhat: f64) -> f64 {
        let of_mean = 2.0 * self.mean.abs() + MEAN_ROUNDINGS * self.spread;
        U * (XHAT_ROUNDINGS * self.offset() * xhat.abs() + of_mean * self.rstd)
    }

    /// What a mean of many deviations costs: `(1 + 40 u s)^2`.
    fn offset(&self) -> f64 {
        (1.0 + MEAN_ROUNDINGS * U * self.mean.abs() * self.rstd).powi(2)
    }
}

/// Writes the norm of the row `x` `[D]` to `y` `[D]`, for a `weight` `[D]` and a `bias` `[D]`, if any, and
/// returns what it was normalised by.
///
/// # Panics
/// The rows differ in length.
pub fn forward(
    options: &LayerNorm,
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    y: &mut [f64],
) -> Statistics {
    assert!([weight.len(), y.len(), bias.map_or(x.len(), <[f64]>::len)] == [x.len(); 3]);
    let of_row = Statistics::of(options, x);
    for v in 0..x.len() {
        y[v] = of_row.xhat(x[v]) * weight[v] + bias.map_or(0.0, |bias| bias[v]);
    }
    of_row
}

/// Writes how far each entry of [`forward`]'s `y` may be off, before it is rounded, to `bound` `[D]`.
///
/// # Panics
/// The rows differ in length.
pub fn y_bound(
    options: &LayerNorm,
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    bound: &mut [f64],
) {
    let of_row = forward(options, x, weight, bias, bound);
    for v in 0..x.len() {
        let of_sum = bias.map_or(0.0, |bias| bias[v].abs()) + bound[v].abs();
        bound[v] = weight[v].abs() * of_row.xhat_bound(of_row.xhat(x[v])) + U * of_sum;
    }
}

/// Writes the gradient of the row `x` `[D]` to `dx` `[D]`, for a cotangent `dy` `[D]` of its norm. Adds
/// the row's part to `dweight` and `dbias`, each `[D]`.
///
/// # Panics
/// The rows differ in length.
pub fn backward(
    options: &LayerNorm,
    x: &[f64],
    weight: &[f64],
    dy: &[f64],
    dx: &mut [f64],
    [dweight, dbias]: [&mut [f64]; 2],
) {
    let columns = x.len();
    let lengths = [weight.len(), dy.len(), dx.len(), dweight.len(), dbias.len()];
    assert!(lengths == [columns; 5]);
    let of_row = Statistics::of(options, x);
    let g = |v: usize| dy[v] * weight[v];
    let xhat = |v: usize| of_row.xhat(x[v]);
    let mean = (0..columns).map(g).sum::<f64>() / columns as f64;
    let along = (0..columns).map(|v| g(v) * xhat(v)).sum::<f64>() / columns as f64;
    for v in 0..columns {
        dx[v] = of_row.rstd * (g(v) - mean - xhat(v) * along);
        dweight[v] += dy[v] * xhat(v);
        dbias[v] += dy[v];
    }
}

/// Writes how far each entry of `dx` may be off, before it is rounded, to `bound` `[D]`; adds what the
/// row's parts of dweight and of dbias are in magnitude, and how far errors of `xhat` may put that of
/// dweight off, to `sizes`, each `[D]`.
///
/// # Panics
/// The rows differ in length.
pub fn dx_bound(
    options: &LayerNorm,
    x: &[f64],
    weight: &[f64],
    dy: &[f64],
    bound: &mut [f64],
    [of_weight, of_bias, of_xhat]: [&mut [f64]; 3],
) {
    let columns = x.len();
    assert!([weight.len(), dy.len(), bound.len(), of_xhat.len()] == [columns; 4]);
    assert!([of_weight.len(), of_bias.len()] == [columns; 2]);
    let of_row = Statistics::of(options, x);
    let g = |v: usize| dy[v] * weight[v];
    let xhat = |v: usize| of_row.xhat(x[v]);
    let error = |v: usize| of_row.xhat_bound(xhat(v));
    let mean = |of: &dyn Fn(usize) -> f64| (0..columns).map(of).sum::<f64>() / columns as f64;
    let of_g = mean(&|v| g(v).abs());
    let along = mean(&|v| g(v) * xhat(v)).abs();
    let of_along = mean(&|v| (g(v) * xhat(v)).abs());
    let along_error = mean(&|v| g(v).abs() * error(v));
    for v in 0..columns {
        let size = g(v).abs() + of_g + xhat(v).abs() * of_along;
        let of_sums = U * DX_ROUNDINGS * of_row.offset() * size;
        bound[v] = of_row.rstd * (of_sums + xhat(v).abs() * along_error + error(v) * along);
        of_weight[v] += (dy[v] * xhat(v)).abs();
        of_bias[v] += dy[v].abs();
        of_xhat[v] += dy[v].abs() * error(v);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: [f64; 5] = [0.3, -1.2, 2.5, 0.0, 1.1];
    const WEIGHT: [f64; 5] = [1.0, -0.5, 0.25, 2.0, 0.7];
    const BIAS: [f64; 5] = [0.1, 0.0, -3.0, 0.5, 1.0];
    const DY: [f64; 5] = [0.4, 1.3, -0.6, 0.9, -0.2];

    fn of(options: &LayerNorm, x: &[f64]) -> (Statistics, Vec<f64>) {
        let mut y = vec![f64::NAN; x.len()];
        let bias = Some(&BIAS[..x.len()]);
        (forward(options, x, &WEIGHT[..x.len()], bias, &mut y), y)
    }

    /// dx, dweight and dbias.
    fn gradients(options: &LayerNorm, x: &[f64]) -> [Vec<f64>; 3] {
        let n = x.len();
        let [mut dx, mut dweight, mut dbias] = [vec![f64::NAN; n], vec![0.0; n], vec![0.0; n]];
        backward(options, x, &WEIGHT[..n], &DY[..n], &mut dx, [&mut dweight, &mut dbias]);
        [dx, dweight, dbias]
    }

    /// All must be derivatives of `sum(dy y)`.
    #[test]
    fn gradients_are_derivatives_of_forward() {
        let options = LayerNorm { eps: 0.1 };
        for offset in [0.0, 1e3] {
            let x = X.map(|x| x + offset);
            let objective = |x: &[f64], weight: &[f64], bias: &[f64]| {
                let mut y = [f64::NAN; 5];
                forward(&options, x, weight, Some(bias), &mut y);
                y.iter().zip(&DY).map(|(y, dy)| y * dy).sum::<f64>()
            };
            let [dx, dweight, dbias] = gradients(&options, &x);
            let slope = |row: &[f64; 5], v: usize, at: &dyn Fn(&[f64]) -> f64| {
                let (mut up, mut down) = (*row, *row);
                up[v] += 1e-4;
                down[v] -= 1e-4;
                (at(&up) - at(&down)) / 2e-4
            };
            for v in 0..5 {
                for (name, found, wanted) in [
                    ("dx", dx[v], slope(&x, v, &|x| objective(x, &WEIGHT, &BIAS))),
                    ("dweight", dweight[v], slope(&WEIGHT, v, &|w| objective(&x, w, &BIAS))),
                    ("dbias", dbias[v], slope(&BIAS, v, &|b| objective(&x, &WEIGHT, b))),
                ] {
                    assert!((found - wanted).abs() < 1e-7, "{name} {v}: {found}, {wanted}");
                }
            }
        }
    }

    /// Values worked out by hand: a mean of 3 and a variance of 8, and 9 with eps.
    #[test]
    fn a_row_by_hand() {
        let options = LayerNorm { eps: 1.0 };
        let mut y = [f64::NAN; 4];
        let x = [3.0, 7.0, -1.0, 3.0];
        let of_row = forward(&options, &x, &[5.0, 3.0, 1.5, 2.0], None, &mut y);
        assert_eq!((of_row.mean, of_row.rstd, of_row.spread), (3.0, 1.0 / 3.0, 2.0));
        assert_eq!(y.map(|y| (y * 1e9).round() / 1e9), [0.0, 4.0, -2.0, 0.0]);
        // One column is its own mean.
        let (of_row, y) = of(&options, &[7.0]);
        assert_eq!((of_row.mean, of_row.rstd, y[0]), (7.0, 1.0, BIAS[0]));
        let [dx, dweight, dbias] = gradients(&options, &[7.0]);
        assert_eq!((dx[0], dweight[0], dbias[0]), (0.0, 0.0, DY[0]));
    }

    /// A number that is added to all of a row changes the mean and nothing else.
    #[test]
    fn an_offset_is_taken_off() {
        let options = LayerNorm::default();
        let ((near, y), gradient) = (of(&options, &X), gradients(&options, &X));
        let x = X.map(|x| x + 1000.0);
        let ((far, far_y), far_gradient) = (of(&options, &x), gradients(&options, &x));
        assert!((far.mean - near.mean - 1000.0).abs() < 1e-12);
        let pairs = y.iter().zip(&far_y);
        for (a, b) in pairs.chain(gradient.iter().flatten().zip(far_gradient.iter().flatten())) {
            assert!((a - b).abs() < 1e-10, "{a} {b}");
        }
        // And dx has no part along a row of ones.
        assert!(gradient[0].iter().sum::<f64>().abs() < 1e-12);
    }

    #[test]
    fn sums_are_added_to() {
        let options = LayerNorm::default();
        let [_, dweight, dbias] = gradients(&options, &X);
        let (mut dx, mut twice) = ([0.0; 5], [dweight.clone(), dbias.clone()]);
        let [first, second] = &mut twice;
        backward(&options, &X, &WEIGHT, &DY, &mut dx, [first, second]);
        let double = |row: Vec<f64>| row.iter().map(|x| 2.0 * x).collect::<Vec<_>>();
        assert_eq!(twice, [double(dweight), double(dbias)]);
    }

    #[test]
    fn special_rows_keep_the_contract() {
        let options = LayerNorm::default();
        for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let x = [1.0, poison, 0.0];
            let (of_row, y) = of(&options, &x);
            assert!(!of_row.mean.is_finite() && of_row.rstd.is_nan());
            let [dx, dweight, dbias] = gradients(&options, &x);
            assert!(y.iter().chain(&dx).chain(&dweight).all(|x| x.is_nan()));
            assert_eq!(dbias, DY[..3]);
        }
        let (of_row, y) = of(&options, &[2.5; 3]);
        assert!((of_row.rstd - 1e5_f64.sqrt()).abs() < 1e-9 && y == BIAS[..3]);
        let exact = LayerNorm { eps: 0.0 };
        let (of_row, y) = of(&exact, &[2.5; 3]);
        assert!(of_row.rstd == f64::INFINITY && y.iter().all(|y| y.is_nan()));
        let [dx, dweight, _] = gradients(&exact, &[2.5; 3]);
        assert!(dx.iter().chain(&dweight).all(|d| d.is_nan()));
    }

    /// Bounds are those of the contract, of a row with a mean of a thousand deviations.
    #[test]
    fn bounds_of_an_offset_row() {
        let options = LayerNorm { eps: 0.0 };
        let x = [999.0, 1001.0, 1001.0, 999.0];
        let of_row = Statistics::of(&options, &x);
        let s = 1000.0;
        assert_eq!(of_row.mean_bound(), U * (s + 40.0));
        assert!((of_row.rstd_bound() / U - 24.0 * (1.0 + 40.0 * U * s).powi(2)).abs() < 1e-9);
        let xhat = of_row.xhat_bound(1.0) / U;
        assert!((xhat - 2040.0 - 32.0 * (1.0 + 40.0 * U * s).powi(2)).abs() < 1e-9, "{xhat}");
        let (mut bound, ones) = ([0.0; 4], [1.0; 4]);
        y_bound(&options, &x, &[2.0; 4], Some(&ones), &mut bound);
        assert!((bound[1] / U - 2.0 * xhat - 1.0 - 3.0).abs() < 1e-9, "{bound:?}");
        let mut sizes = [[0.0; 4]; 3];
        let [a, b, c] = &mut sizes;
        dx_bound(&options, &x, &ones, &[1.0, 0.0, 0.0, 0.0], &mut bound, [a, b, c]);
        // mean |g| and mean |g xhat| are a quarter.
        let sums = 160.0 * (1.0 + 40.0 * U * s).powi(2) * 1.5;
        assert!((bound[0] / U - sums - xhat / 2.0).abs() < 1e-6, "{bound:?}");
        assert_eq!((a[0], b[0], a[1], b[1]), (1.0, 1.0, 0.0, 0.0));
        assert!((c[0] / U - xhat).abs() < 1e-9);
    }
}

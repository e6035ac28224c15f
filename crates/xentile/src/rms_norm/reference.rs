//! The same mathematics written plainly in float64, one row at a time, so that no caller ever holds
//! `[T, D]` in float64.

use super::RmsNorm;
use crate::Element;

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

/// Writes the norm of the row `x` `[D]` to `y` `[D]`, for a `weight` `[D]`, and returns `rstd`.
///
/// # Panics
/// The rows differ in length.
pub fn forward(options: &RmsNorm, x: &[f64], weight: &[f64], y: &mut [f64]) -> f64 {
    assert!(x.len() == weight.len() && x.len() == y.len());
    let rstd = rstd(options, x);
    for ((y, x), &weight) in y.iter_mut().zip(x).zip(weight) {
        *y = x * rstd * options.factor(weight);
    }
    rstd
}

/// Writes the gradient of the row `x` `[D]` to `dx` `[D]`, for a cotangent `dy` `[D]` of its norm and,
/// where it is a sum that is an output too, `dsum` `[D]` of that. Adds the row's part to `dweight`
/// `[D]`.
///
/// # Panics
/// The rows differ in length.
pub fn backward(
    options: &RmsNorm,
    x: &[f64],
    weight: &[f64],
    dy: &[f64],
    dsum: Option<&[f64]>,
    dx: &mut [f64],
    dweight: &mut [f64],
) {
    let columns = x.len();
    assert!([weight.len(), dy.len(), dx.len(), dweight.len()] == [columns; 4]);
    assert!(dsum.is_none_or(|dsum| dsum.len() == columns));
    let rstd = rstd(options, x);
    let g = |v: usize| dy[v] * options.factor(weight[v]);
    let xhat = |v: usize| x[v] * rstd;
    let mean = (0..columns).map(|v| g(v) * xhat(v)).sum::<f64>() / columns as f64;
    for v in 0..columns {
        dx[v] = rstd * (g(v) - xhat(v) * mean) + dsum.map_or(0.0, |dsum| dsum[v]);
        dweight[v] += dy[v] * xhat(v);
    }
}

/// Writes what an entry of `dx` may be wrong in proportion to, `r (|g| + |xhat| mean |g xhat|)`, to
/// `scale` `[D]`.
///
/// # Panics
/// The rows differ in length.
pub fn dx_scale(options: &RmsNorm, x: &[f64], weight: &[f64], dy: &[f64], scale: &mut [f64]) {
    let columns = x.len();
    assert!([weight.len(), dy.len(), scale.len()] == [columns; 3]);
    let rstd = rstd(options, x);
    let g = |v: usize| (dy[v] * options.factor(weight[v])).abs();
    let xhat = |v: usize| (x[v] * rstd).abs();
    let mean = (0..columns).map(|v| g(v) * xhat(v)).sum::<f64>() / columns as f64;
    for (v, scale) in scale.iter_mut().enumerate() {
        *scale = rstd * (g(v) + xhat(v) * mean);
    }
}

fn rstd(options: &RmsNorm, x: &[f64]) -> f64 {
    options.rstd(x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    const X: [f64; 5] = [0.3, -1.2, 2.5, 0.0, 1.1];
    const WEIGHT: [f64; 5] = [1.0, -0.5, 0.25, 2.0, 0.7];
    const DY: [f64; 5] = [0.4, 1.3, -0.6, 0.9, -0.2];
    const DSUM: [f64; 5] = [-0.3, 0.2, 0.5, -1.0, 0.1];

    fn of(options: &RmsNorm, x: &[f64], weight: &[f64]) -> (f64, Vec<f64>) {
        let mut y = vec![f64::NAN; x.len()];
        (forward(options, x, weight, &mut y), y)
    }

    /// dx and dweight.
    fn gradients(options: &RmsNorm, x: &[f64], dsum: Option<&[f64]>) -> [Vec<f64>; 2] {
        let (mut dx, mut dweight) = (vec![f64::NAN; x.len()], vec![0.0; x.len()]);
        let (weight, dy) = (&WEIGHT[..x.len()], &DY[..x.len()]);
        backward(options, x, weight, dy, dsum, &mut dx, &mut dweight);
        [dx, dweight]
    }

    /// Both gradients must be derivatives of `sum(dy y) + sum(dsum h)`.
    #[test]
    fn gradients_are_derivatives_of_forward() {
        for zero_centred in [false, true] {
            for offset in [0.0, 1e4] {
                let options = RmsNorm { eps: 0.1, zero_centred };
                let x = X.map(|x| x + offset);
                let objective = |x: &[f64], weight: &[f64]| {
                    let (_, y) = of(&options, x, weight);
                    let dot =
                        |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                    dot(&y, &DY) + dot(x, &DSUM)
                };
                let [dx, dweight] = gradients(&options, &x, Some(&DSUM));
                let step = 1e-5 * (1.0 + offset);
                for v in 0..x.len() {
                    let slope = |row: &[f64; 5], step: f64, at: &dyn Fn(&[f64]) -> f64| {
                        let (mut up, mut down) = (*row, *row);
                        up[v] += step;
                        down[v] -= step;
                        (at(&up) - at(&down)) / (2.0 * step)
                    };
                    let of_x = slope(&x, step, &|x| objective(x, &WEIGHT));
                    assert!((of_x - dx[v]).abs() < 1e-8, "dx {v}: {of_x}, {}", dx[v]);
                    let of_weight = slope(&WEIGHT, 1e-3, &|weight| objective(&x, weight));
                    let error = (of_weight - dweight[v]).abs();
                    assert!(
                        error < 1e-8 * (1.0 + offset),
                        "dweight {v}: {of_weight}, {}",
                        dweight[v]
                    );
                }
            }
        }
    }

    /// Values worked out by hand: a mean of squares of 24, and 25 with eps.
    #[test]
    fn a_row_by_hand() {
        let options = RmsNorm { eps: 1.0, zero_centred: false };
        let (rstd, y) = of(&options, &[4.0, -4.0, 8.0, 0.0], &[1.0, 0.5, 2.0, 9.0]);
        assert_eq!(rstd, 0.2);
        assert_eq!(
            y.iter().map(|y| (y * 1e9).round() / 1e9).collect::<Vec<_>>(),
            [0.8, -0.4, 3.2, 0.0]
        );
        let centred = RmsNorm { zero_centred: true, ..options };
        let (_, same) = of(&centred, &[4.0, -4.0, 8.0, 0.0], &[0.0, -0.5, 1.0, 8.0]);
        assert_eq!(same, y);
        // One column: y is the sign but for eps, and dx = dy w r^3 eps.
        let (_, y) = of(&RmsNorm { eps: 0.0, zero_centred: false }, &[-3.0], &[2.0]);
        assert_eq!(y, [-2.0]);
        let options = RmsNorm { eps: 16.0, zero_centred: false };
        let [dx, dweight] = gradients(&options, &[3.0], None);
        assert!((dx[0] - 0.4 * 16.0 / 125.0).abs() < 1e-15, "{dx:?}");
        assert!((dweight[0] - 0.4 * 0.6).abs() < 1e-15, "{dweight:?}");
    }

    #[test]
    fn dweight_is_added_to() {
        let options = RmsNorm::default();
        let [_, once] = gradients(&options, &X, None);
        let (mut dx, mut twice) = ([0.0; 5], once.clone());
        backward(&options, &X, &WEIGHT, &DY, None, &mut dx, &mut twice);
        assert_eq!(twice, once.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
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
    fn special_rows_keep_the_contract() {
        let options = RmsNorm::default();
        for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let x = [1.0, poison, 0.0];
            let (rstd, y) = of(&options, &x, &WEIGHT[..3]);
            let [dx, dweight] = gradients(&options, &x, None);
            assert!(dx.iter().all(|dx| dx.is_nan()) && y[1].is_nan() && dweight[1].is_nan());
            if poison.is_nan() {
                assert!(rstd.is_nan() && y.iter().chain(&dweight).all(|y| y.is_nan()));
            } else {
                assert_eq!((rstd, y[0], y[2], dweight[0], dweight[2]), (0.0, 0.0, 0.0, 0.0, 0.0));
            }
        }
        let (rstd, y) = of(&options, &[0.0; 3], &WEIGHT[..3]);
        assert!((rstd - 1e3).abs() < 1e-9 && y == [0.0; 3]);
        let [dx, dweight] = gradients(&options, &[0.0; 3], None);
        assert!(dweight == [0.0; 3] && (dx[0] - 0.4 * 1e3).abs() < 1e-9, "{dx:?}");
        let exact = RmsNorm { eps: 0.0, ..options };
        let (rstd, y) = of(&exact, &[0.0; 3], &WEIGHT[..3]);
        assert!(rstd == f64::INFINITY && y.iter().all(|y| y.is_nan()));
        assert!(gradients(&exact, &[0.0; 3], None).concat().iter().all(|d| d.is_nan()));
        // More than f32 holds.
        assert_eq!(of(&exact, &[1e-40; 2], &[1.0; 2]).0, f64::INFINITY);
        let (rstd, y) = of(&exact, &[1e-20, -1e-20], &[1.0; 2]);
        assert!((rstd - 1e20).abs() < 1e8 && (y[0] - 1.0).abs() < 1e-14, "{rstd} {y:?}");
    }

    /// Offset by 1e4 a row is nearly its weight, and its gradient what is left of a difference.
    #[test]
    fn an_offset_row() {
        let options = RmsNorm { eps: 0.0, zero_centred: false };
        let x = X.map(|x| x + 1e4);
        let (_, y) = of(&options, &x, &[1.0; 5]);
        assert!(y.iter().all(|y| (y - 1.0).abs() < 3e-4), "{y:?}");
        let [dx, _] = gradients(&options, &x, None);
        let along: f64 = dx.iter().zip(x).map(|(dx, x)| dx * x).sum();
        assert!(along.abs() < 1e-12, "a gradient across x: {along}");
        let mut scale = [0.0; 5];
        dx_scale(&options, &x, &WEIGHT, &DY, &mut scale);
        assert!(scale.iter().zip(&dx).all(|(scale, dx)| *scale >= dx.abs()));
    }
}

//! The same mathematics written plainly in float64, a row at a time, with how far kernels may be off.

use super::{ROUNDINGS, Rope};

/// Half the spacing of f32 after 1.
const U: f64 = 1.0 / (1 << 24) as f64;

/// What products that fall below f32's normal range may lose.
const LOST: f64 = 4.0 * f32::MIN_POSITIVE as f64;

/// Writes what a row `x` `[D]` becomes with `cos` and `sin` `[R / 2]` to `y`, and to `bound` by how much
/// each entry may be off before it is rounded to its dtype.
///
/// # Panics
/// Lengths disagree.
pub fn rotate(options: Rope, x: &[f64], tables: [&[f64]; 2], y: &mut [f64], bound: &mut [f64]) {
    let [cos, sin] = tables;
    assert!(y.len() == x.len() && bound.len() == x.len());
    assert!(cos.len() == sin.len() && 2 * cos.len() <= x.len());
    y.copy_from_slice(x);
    bound.fill(0.0);
    for (index, (cos, sin)) in cos.iter().zip(sin).enumerate() {
        let [first, second] = options.layout.columns(index, tables[0].len());
        let (a, b) = (x[first], x[second]);
        let sin = if options.inverse { -sin } else { *sin };
        y[first] = a * cos - b * sin;
        y[second] = b * cos + a * sin;
        bound[first] = ROUNDINGS * U * ((a * cos).abs() + (b * sin).abs()) + LOST;
        bound[second] = ROUNDINGS * U * ((b * cos).abs() + (a * sin).abs()) + LOST;
    }
}

/// Adds to `bound` what cosines and sines that are off by so many `roundings` of f32 make of a row.
pub fn table_bound(options: Rope, x: &[f64], pairs: usize, roundings: f64, bound: &mut [f64]) {
    for index in 0..pairs {
        let columns = options.layout.columns(index, pairs);
        let size = columns.map(|column| x[column].abs()).iter().sum::<f64>();
        for column in columns {
            bound[column] += roundings * U * size;
        }
    }
}

/// Angles per position of so many `pairs`: `base^(-i / pairs)` of the pair `i`.
#[must_use]
pub fn frequencies(base: f64, pairs: usize) -> Vec<f64> {
    (0..pairs).map(|index| base.powf(-(index as f64) / pairs as f64)).collect()
}

/// Cosines and sines `[P, R / 2]` of the angles of `positions` `[P]`.
#[must_use]
pub fn tables(frequencies: &[f64], positions: &[i64]) -> [Vec<f64>; 2] {
    let angles = || {
        let of_position =
            |&position: &i64| frequencies.iter().map(move |frequency| position as f64 * frequency);
        positions.iter().flat_map(of_position)
    };
    [angles().map(f64::cos).collect(), angles().map(f64::sin).collect()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rope::Layout;

    fn rotated(options: Rope, x: &[f64], tables: [&[f64]; 2]) -> Vec<f64> {
        let (mut y, mut bound) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        rotate(options, x, tables, &mut y, &mut bound);
        y
    }

    #[test]
    fn quarters_turn_as_worked_out_by_hand() {
        // The first pair turns by a quarter, the second by a half; the last column is in none.
        let tables: [&[f64]; 2] = [&[0.0, -1.0], &[1.0, 0.0]];
        let x = [1.0, 2.0, 3.0, 4.0, 5.0];
        let halves = Rope { layout: Layout::Halves, inverse: false };
        assert_eq!(rotated(halves, &x, tables), [-3.0, -2.0, 1.0, -4.0, 5.0]);
        let interleaved = Rope { layout: Layout::Interleaved, inverse: false };
        assert_eq!(rotated(interleaved, &x, tables), [-2.0, 1.0, -3.0, -4.0, 5.0]);
        let back = Rope { inverse: true, ..halves };
        assert_eq!(rotated(back, &x, tables), [3.0, -2.0, -1.0, -4.0, 5.0]);
    }

    /// The map is linear, so that differences of any step are its derivative: `<dy, R x>` is
    /// `<R' dy, x>`.
    #[test]
    fn the_inverse_is_the_transposed_map() {
        let angles = [0.3, 2.0, -1.2];
        // Scaled, as some models do it: the inverse is not that of a matrix then.
        let [cos, sin] = [angles.map(|a: f64| 1.2 * a.cos()), angles.map(|a: f64| 1.2 * a.sin())];
        let x: Vec<f64> = (0..8).map(|i| (f64::from(i) * 1.7).sin()).collect();
        let dy: Vec<f64> = (0..8).map(|i| (f64::from(i) * 2.3).cos()).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for layout in Layout::ALL {
            let y = rotated(Rope { layout, inverse: false }, &x, [&cos, &sin]);
            let dx = rotated(Rope { layout, inverse: true }, &dy, [&cos, &sin]);
            assert!((dot(&dy, &y) - dot(&dx, &x)).abs() < 1e-14, "{layout}");
            let again = rotated(Rope { layout, inverse: true }, &y, [&cos, &sin]);
            for (index, (again, x)) in again.iter().zip(&x).enumerate() {
                let scale = if index < 6 { 1.44 } else { 1.0 };
                assert!((again - scale * x).abs() < 1e-14, "{layout} {index}");
            }
        }
    }
    /// Cosine and sine of 999999 were worked out with 50 digits.
    #[test]
    fn angles_of_far_positions_are_right() {
        let frequencies = frequencies(10_000.0, 4);
        for (found, right) in frequencies.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((found - right).abs() < 1e-16);
        }
        let [cos, sin] = tables(&frequencies, &[0, 999_999]);
        assert_eq!((&cos[..4], &sin[..4]), (&[1.0; 4][..], &[0.0; 4][..]));
        assert!((cos[4].hypot(sin[4]) - 1.0).abs() < 1e-15);
        assert!(
            (cos[4] - 0.21161995758460127).abs() < 1e-10
                && (sin[4] - -0.9773520315382229).abs() < 1e-10
        );
    }

    #[test]
    fn an_error_of_a_table_bounds_both_of_a_pair() {
        let options = Rope { layout: Layout::Interleaved, inverse: false };
        let mut bound = [0.0; 3];
        table_bound(options, &[3.0, -4.0, 9.0], 1, 2.0, &mut bound);
        assert_eq!(bound, [14.0 * U, 14.0 * U, 0.0]);
    }
}

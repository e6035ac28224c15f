//! RMSNorm against the f64 reference, on fresh random input, with outputs poisoned first.

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::rms_norm::{
    DWEIGHT_ROUNDINGS, DX_ROUNDINGS, NormShape, RSTD_ROUNDINGS, RmsNorm, Y_ROUNDINGS, block_rows,
    reference,
};
use xentile::{DType, Element};
use xentile_cpu::rms_norm::{Gradient, Kernel, Launch, PartialSums};
use xentile_cpu::{InOut, Isa, Threads};

mod common;
#[path = "common/norms.rs"]
mod norms;

use norms::{AsWeight, LOST, POISON, Padded, U, for_each_dtype, normal, same, wide, within};

const OPTIONS: [RmsNorm; 3] = [
    RmsNorm { eps: 1e-6, zero_centred: false },
    RmsNorm { eps: 0.0, zero_centred: true },
    RmsNorm { eps: 0.25, zero_centred: true },
];

/// Where the entries of a row come from.
#[derive(Clone, Copy, Debug)]
enum Distribution {
    Normal,
    Offset,
    Outlier,
    Tiny,
    Huge,
}

const DISTRIBUTIONS: [Distribution; 5] = [
    Distribution::Normal,
    Distribution::Offset,
    Distribution::Outlier,
    Distribution::Tiny,
    Distribution::Huge,
];

impl Distribution {
    fn row(self, rng: &mut ChaCha8Rng, columns: usize) -> Vec<f64> {
        let mut row: Vec<_> = (0..columns).map(|_| normal(rng)).collect();
        match self {
            Self::Normal => {}
            Self::Offset => row.iter_mut().for_each(|x| *x += 1e4),
            Self::Outlier => row[rng.random_range(0..columns)] = -3e4,
            // Squares that f32 does not hold.
            Self::Tiny => row.iter_mut().for_each(|x| *x *= 1e-20),
            Self::Huge => row.iter_mut().for_each(|x| *x *= 1e25),
        }
        row
    }
}

/// One problem with its inputs.
struct Case<E, W> {
    options: RmsNorm,
    shape: NormShape,
    isa: Isa,
    x: Vec<E>,
    residual: Vec<E>,
    dy: Vec<E>,
    dsum: Vec<E>,
    /// One, or several.
    weight: Vec<W>,
    /// Groups and blocks of partial sums.
    partial: [usize; 2],
    /// Elements before every array of `E`, which unalign it.
    skip: usize,
}

/// What the kernels make of a [`Case`].
struct Results<E> {
    y: Vec<E>,
    sum: Vec<E>,
    /// Of x, and of the sum.
    rstd: [Vec<f32>; 2],
    added_y: Vec<E>,
    dx: Vec<E>,
    dweight: Vec<f32>,
    added_dx: Vec<E>,
    added_dweight: Vec<f32>,
}

impl<E: Element, W: AsWeight> Case<E, W> {
    fn new(rng: &mut ChaCha8Rng, rows: usize, columns: usize, kind: Distribution) -> Self {
        let mut matrix = |kind: Distribution| -> Vec<E> {
            (0..rows).flat_map(|_| kind.row(rng, columns)).map(E::from_f64).collect()
        };
        let (x, residual) = (matrix(kind), matrix(kind));
        let (dy, dsum) = (matrix(Distribution::Normal), matrix(Distribution::Normal));
        Self {
            options: OPTIONS[rng.random_range(0..OPTIONS.len())],
            shape: NormShape::new(rows, columns).unwrap(),
            isa: Isa::detect(),
            x,
            residual,
            dy,
            dsum,
            weight: (0..columns).map(|_| W::from_f64(normal(rng))).collect(),
            partial: [1, 2],
            skip: 0,
        }
    }

    fn kernel<'a>(&'a self, pool: &'a Threads) -> Kernel<'a> {
        let launch = Launch { isa: self.isa, pool };
        Kernel::new(self.options, self.shape, W::weight(&self.weight), launch).unwrap()
    }

    fn run(&self, threads: usize) -> Results<E> {
        let pool = Threads::new(threads).unwrap();
        let kernel = self.kernel(&pool);
        let (rows, elements) = (self.shape.rows(), self.shape.elements());
        let input = |values: &[E]| Padded::of(values, self.skip);
        let output = || Padded::<E>::poisoned(elements, self.skip / 2);
        let (x, residual) = (input(&self.x), input(&self.residual));
        let mut rstd = [vec![POISON; rows], vec![POISON; rows]];

        let mut y = output();
        kernel.forward(InOut::apart(x.get(), y.get_mut()), &mut rstd[0]).unwrap();
        let [mut added_y, mut sum] = [output(), output()];
        let place = InOut::apart(residual.get(), sum.get_mut());
        let into = InOut::apart(x.get(), added_y.get_mut());
        kernel.add_forward(into, place, &mut rstd[1]).unwrap();

        let mut again = vec![POISON; rows];
        let mut in_place = input(&self.x);
        kernel.forward(InOut::InPlace(in_place.get_mut()), &mut again).unwrap();
        same("forward in place", in_place.get(), y.get());
        same("rstd in place", &again, &rstd[0]);
        for both in [false, true] {
            let [mut in_place, mut sum_in_place] = [input(&self.x), input(&self.residual)];
            let mut sum_apart = output();
            let into = InOut::InPlace(in_place.get_mut());
            let place = match both {
                true => InOut::InPlace(sum_in_place.get_mut()),
                false => InOut::apart(residual.get(), sum_apart.get_mut()),
            };
            kernel.add_forward(into, place, &mut again).unwrap();
            same("added y in place", in_place.get(), added_y.get());
            same("sum", if both { sum_in_place.get() } else { sum_apart.get() }, sum.get());
            same("added rstd", &again, &rstd[1]);
        }

        let sum = sum.take();
        let (dx, dweight) = self.backward(&kernel, &self.x, &rstd[0], false);
        let (added_dx, added_dweight) = self.backward(&kernel, &sum, &rstd[1], true);
        let (y, added_y) = (y.take(), added_y.take());
        Results { y, sum, rstd, added_y, dx, dweight, added_dx, added_dweight }
    }

    /// In every place that dx may have.
    fn backward(
        &self,
        kernel: &Kernel<'_>,
        x: &[E],
        rstd: &[f32],
        add: bool,
    ) -> (Vec<E>, Vec<f32>) {
        let input = |values: &[E]| Padded::of(values, self.skip);
        let dsum = input(&self.dsum);
        let run = |gradient: Gradient<'_, E>| {
            let [groups, blocks] = self.partial;
            let mut sums = vec![POISON; groups * blocks * self.shape.columns()];
            let partial = PartialSums { sums: &mut sums, groups, blocks };
            kernel.backward(gradient, rstd, add.then_some(dsum.get()), partial).unwrap();
            sums
        };
        let (x, dy) = (input(x), input(&self.dy));
        let mut dx = Padded::poisoned(self.shape.elements(), self.skip / 2);
        let dweight = run(Gradient::Apart { x: x.get(), dy: dy.get(), dx: dx.get_mut() });
        let dx = dx.take();
        let mut of_x = input(x.get());
        let again = run(Gradient::InPlaceOfX { x: of_x.get_mut(), dy: dy.get() });
        same("dx in the place of x", &of_x.take(), &dx);
        same("dweight", &again, &dweight);
        let mut of_dy = input(dy.get());
        let again = run(Gradient::InPlaceOfDy { x: x.get(), dy: of_dy.get_mut() });
        same("dx in the place of dy", &of_dy.take(), &dx);
        same("dweight", &again, &dweight);
        (dx, dweight)
    }

    fn row<'a, T>(&self, matrix: &'a [T], row: usize) -> &'a [T] {
        &matrix[row * self.shape.columns()..][..self.shape.columns()]
    }

    fn weight_of(&self, row: usize) -> Vec<f64> {
        let count = self.weight.len() / self.shape.columns();
        wide(self.row(&self.weight, row / (self.shape.rows() / count)))
    }

    /// Holds everything to the contract.
    fn check(&self, what: &str) {
        let what = format!(
            "{what} {} weight {} {} {:?} {:?}",
            E::DTYPE,
            W::DTYPE,
            self.isa,
            self.shape,
            self.options
        );
        let results = self.run(2);
        let mut sum = vec![E::from_f32(POISON); self.shape.elements()];
        reference::add(&self.x, &self.residual, &mut sum);
        same(&format!("{what} sum"), &results.sum, &sum);
        self.check_forward(&what, &self.x, &results.y, &results.rstd[0]);
        self.check_forward(&format!("{what} sum"), &sum, &results.added_y, &results.rstd[1]);
        self.check_backward(&what, &self.x, None, &results.dx, &results.dweight);
        let (dx, dweight) = (&results.added_dx, &results.added_dweight);
        self.check_backward(&format!("{what} sum"), &sum, Some(&self.dsum), dx, dweight);
    }

    fn check_forward(&self, what: &str, x: &[E], y: &[E], rstd: &[f32]) {
        let columns = self.shape.columns();
        for (row, &actual) in rstd.iter().enumerate() {
            let mut expected = vec![f64::NAN; columns];
            let (x, weight) = (wide(self.row(x, row)), self.weight_of(row));
            let r = reference::forward(&self.options, &x, &weight, &mut expected);
            within(&format!("{what} rstd {row}"), actual, r, r * RSTD_ROUNDINGS * U);
            for (column, &actual) in self.row(y, row).iter().enumerate() {
                let expected = expected[column];
                let bound = expected.abs() * Y_ROUNDINGS * U + LOST;
                within(&format!("{what} y {row} {column}"), actual, expected, bound);
            }
        }
    }

    fn check_backward(
        &self,
        what: &str,
        x: &[E],
        dsum: Option<&Vec<E>>,
        dx: &[E],
        dweight: &[f32],
    ) {
        let columns = self.shape.columns();
        let [groups, blocks] = self.partial;
        let rows = self.shape.rows() / groups;
        let each = block_rows(rows, blocks);
        assert_eq!(dweight.len(), groups * blocks * columns);
        for (index, sums) in dweight.chunks_exact(columns).enumerate() {
            let block = index % blocks;
            let first = index / blocks * rows;
            let range = first + rows.min(block * each)..first + rows.min((block + 1) * each);
            let (mut expected, mut sizes) = (vec![0.0; columns], vec![0.0; columns]);
            let mut lost = LOST;
            for row in range.clone() {
                let (x, dy) = (wide(self.row(x, row)), wide(self.row(&self.dy, row)));
                let (weight, dsum) =
                    (self.weight_of(row), dsum.map(|dsum| wide(self.row(dsum, row))));
                let mut of_row = vec![f64::NAN; columns];
                let options = &self.options;
                let dsum = dsum.as_deref();
                reference::backward(options, &x, &weight, &dy, dsum, &mut of_row, &mut expected);
                let (mut scale, mut unused) = (vec![f64::NAN; columns], vec![f64::NAN; columns]);
                reference::dx_scale(options, &x, &weight, &dy, &mut scale);
                let r = reference::forward(options, &x, &weight, &mut unused);
                let [x, dy] = [x, dy].map(|row| row.iter().map(|x| x.abs()).collect::<Vec<_>>());
                reference::backward(options, &x, &weight, &dy, None, &mut unused, &mut sizes);
                lost += LOST;
                for (column, &actual) in self.row(dx, row).iter().enumerate() {
                    let expected = of_row[column];
                    let bound = (scale[column] * DX_ROUNDINGS + expected.abs()) * U;
                    let bound = bound + LOST * (1.0 + r);
                    within(&format!("{what} dx {row} {column}"), actual, expected, bound);
                }
            }
            for (column, &actual) in sums.iter().enumerate() {
                let bound = sizes[column] * (range.len() as f64 + DWEIGHT_ROUNDINGS) * U + lost;
                within(
                    &format!("{what} dweight {index} {column}"),
                    actual,
                    expected[column],
                    bound,
                );
            }
        }
    }
}

#[test]
fn every_distribution_and_width() {
    fn body<E: Element, W: AsWeight>() {
        let mut rng = common::fresh_rng("rms_norm");
        for isa in Isa::available() {
            for kind in common::some_where_slow(&mut rng, &DISTRIBUTIONS, 3) {
                // Three of these, one of each kind of row, which the seed chooses.
                for widths in [&[1, 3, 17][..], &[64, 131], &[896, 4099]] {
                    let columns = widths[rng.random_range(0..widths.len())];
                    let rows = if columns > 500 { 3 } else { 5 };
                    let mut case = Case::<E, W>::new(&mut rng, rows, columns, kind);
                    case.isa = isa;
                    case.skip = rng.random_range(0..5);
                    case.check(&format!("{kind:?}"));
                }
            }
        }
    }
    for_each_dtype!(body);
}

/// The bounds know no D.
#[test]
fn wide_rows() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("rms_norm");
        for isa in Isa::available() {
            // One of these, which the seed chooses.
            let kinds = [Distribution::Normal, Distribution::Offset, Distribution::Outlier];
            let kind = kinds[rng.random_range(0..kinds.len())];
            let mut case = Case::<E, f32>::new(&mut rng, 1, 65_535, kind);
            case.isa = isa;
            case.check(&format!("wide {kind:?}"));
        }
    }
    body::<f32>();
    body::<bf16>();
    body::<f16>();
}

/// Weights of their own for groups of rows, and blocks of every number, some of which are empty.
#[test]
fn groups_and_blocks() {
    fn body<E: Element, W: AsWeight>() {
        let mut rng = common::fresh_rng("rms_norm");
        for (weights, partial) in
            [(1, [1, 1]), (2, [1, 12]), (3, [2, 3]), (12, [12, 1]), (6, [3, 4]), (4, [1, 50])]
        {
            for columns in [5, 70] {
                let mut case = Case::<E, W>::new(&mut rng, 12, columns, Distribution::Normal);
                case.weight =
                    (0..weights * columns).map(|_| W::from_f64(normal(&mut rng))).collect();
                case.partial = partial;
                case.check(&format!("{weights} weights, sums {partial:?}"));
            }
        }
    }
    for_each_dtype!(body);
}

#[test]
fn threads_change_no_bit() {
    fn body<E: Element, W: AsWeight>() {
        let mut rng = common::fresh_rng("rms_norm");
        let mut case = Case::<E, W>::new(&mut rng, 400, 1000, Distribution::Normal);
        case.partial = [2, 7];
        let [one, two] = [1, 2].map(|threads| case.run(threads));
        same("y", &one.y, &two.y);
        same("sum", &one.sum, &two.sum);
        same("added y", &one.added_y, &two.added_y);
        same("rstd", &one.rstd.concat(), &two.rstd.concat());
        same("dx", &one.dx, &two.dx);
        same("dweight", &one.dweight, &two.dweight);
        same("added dx", &one.added_dx, &two.added_dx);
        same("added dweight", &one.added_dweight, &two.added_dweight);
    }
    for_each_dtype!(body);
}

/// Outputs that go past the caches, where they lie on lines: those in place, which do not, are held
/// against them.
#[test]
fn large() {
    /// Room for an array that begins on a line, wherever the allocator puts it.
    fn room<E: Element>(length: usize) -> Vec<E> {
        vec![E::from_f32(POISON); length + 64]
    }
    fn on_a_line<E>(room: &mut [E], length: usize) -> &mut [E] {
        let start = room.as_ptr().align_offset(64);
        &mut room[start..start + length]
    }
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        let columns = 2048;
        let rows = (8 << 20) / (columns * size_of::<E>()) + 3;
        let (pool, n) = (Threads::new(2).unwrap(), rows * columns);
        let mut case = Case::<E, f32>::new(rng, rows, columns, Distribution::Normal);
        let (mut first, mut second) = (room(n), room(n));
        let [y, sum] = [&mut first, &mut second].map(|room| on_a_line::<E>(room, n));
        for isa in Isa::available() {
            case.isa = isa;
            let kernel = case.kernel(&pool);
            let [mut rstd, mut again] = [(); 2].map(|()| vec![POISON; rows]);
            let [mut in_place, mut sum_in_place] = [case.x.clone(), case.residual.clone()];
            kernel.forward(InOut::apart(&case.x, y), &mut rstd).unwrap();
            kernel.forward(InOut::InPlace(&mut in_place), &mut again).unwrap();
            same("y", y, &in_place);
            same("rstd", &rstd, &again);
            in_place.copy_from_slice(&case.x);
            let apart = InOut::apart(&case.residual, sum);
            kernel.add_forward(InOut::apart(&case.x, y), apart, &mut rstd).unwrap();
            let both = InOut::InPlace(&mut sum_in_place);
            kernel.add_forward(InOut::InPlace(&mut in_place), both, &mut again).unwrap();
            same("y of a sum", y, &in_place);
            same("sum", sum, &sum_in_place);
            for dsum in [None, Some(&case.dsum[..])] {
                let mut sums = [(); 2].map(|()| vec![POISON; 4 * columns]);
                let [partial, partial_again] =
                    sums.each_mut().map(|sums| PartialSums { sums, groups: 1, blocks: 4 });
                in_place.copy_from_slice(&case.dy);
                let apart = Gradient::Apart { x: &case.x, dy: &case.dy, dx: y };
                kernel.backward(apart, &rstd, dsum, partial).unwrap();
                let gradient = Gradient::InPlaceOfDy { x: &case.x, dy: &mut in_place };
                kernel.backward(gradient, &rstd, dsum, partial_again).unwrap();
                same("dx", y, &in_place);
                same("dweight", &sums[0], &sums[1]);
            }
        }
    }
    // Non-temporal stores are of whole lines, whatever the dtype: the seed chooses one.
    let mut rng = common::fresh_rng("rms_norm");
    [body::<f32>, body::<bf16>, body::<f16>][rng.random_range(0..3)](&mut rng);
}

#[test]
fn no_rows() {
    fn body<E: Element, W: AsWeight>() {
        let mut rng = common::fresh_rng("rms_norm");
        let mut case = Case::<E, W>::new(&mut rng, 0, 7, Distribution::Normal);
        for partial in [[1, 3], [2, 1], [0, 4]] {
            case.partial = partial;
            let results = case.run(2);
            assert!(results.y.is_empty() && results.added_dx.is_empty());
            assert_eq!(results.dweight.len(), partial[0] * partial[1] * 7);
            for sums in [results.dweight, results.added_dweight] {
                assert!(sums.iter().all(|&sum| sum == 0.0), "sums of nothing: {sums:?}");
            }
        }
    }
    for_each_dtype!(body);
}

/// A poisoned row, or one of zeros, among others stays where it is, but in dweight.
#[test]
fn special_rows() {
    fn body<E: Element, W: AsWeight>() {
        let mut rng = common::fresh_rng("rms_norm");
        for isa in Isa::available() {
            for columns in [1, 19, 200] {
                let mut case = Case::<E, W>::new(&mut rng, 4, columns, Distribution::Normal);
                (case.isa, case.partial) = (isa, [1, 2]);
                case.options.eps = 1e-6;
                let right = case.run(1);
                let at = columns + rng.random_range(0..columns);
                for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let kept = std::mem::replace(&mut case.x[at], E::from_f32(poison));
                    let results = case.run(1);
                    case.x[at] = kept;
                    for row in [0, 2, 3] {
                        same("y", case.row(&results.y, row), case.row(&right.y, row));
                        same("dx", case.row(&results.dx, row), case.row(&right.dx, row));
                        assert_eq!(results.rstd[0][row], right.rstd[0][row]);
                    }
                    let (y, dx) = (case.row(&results.y, 1), case.row(&results.dx, 1));
                    let nan = |row: &[E]| row.iter().filter(|y| y.to_f32().is_nan()).count();
                    let sums = &results.dweight;
                    let nans = sums.iter().filter(|sum| sum.is_nan()).count();
                    if poison.is_nan() {
                        assert!(results.rstd[0][1].is_nan());
                        assert_eq!([nan(y), nans], [columns; 2], "{isa}");
                    } else {
                        assert_eq!(results.rstd[0][1], 0.0);
                        assert!(nan(y) == 1 && y[at - columns].to_f32().is_nan(), "{isa} {y:?}");
                        assert!(nans == 1 && sums[at - columns].is_nan(), "{isa}");
                    }
                    assert_eq!(nan(dx), columns, "{isa} {poison}");
                    // The second block has no part in it.
                    same("dweight", &sums[columns..], &right.dweight[columns..]);
                }
                for eps in [0.0, 1e-6] {
                    case.options.eps = eps;
                    case.x[columns..2 * columns].fill(E::from_f32(0.0));
                    case.residual[columns..2 * columns].fill(E::from_f32(0.0));
                    case.check("a row of zeros");
                    let results = case.run(1);
                    let y = case.row(&results.y, 1);
                    assert!(
                        y.iter().all(|y| y.to_f32() == 0.0 || eps == 0.0 && y.to_f32().is_nan())
                    );
                    assert_eq!(results.rstd[0][1].is_infinite(), eps == 0.0);
                }
            }
        }
    }
    for_each_dtype!(body);
}

/// Rows whose squares leave f32's range in part or in full, at every boundary.
#[test]
fn every_magnitude() {
    let mut rng = common::fresh_rng("rms_norm");
    for isa in Isa::available() {
        for exponent in (-37..38).step_by(2) {
            for eps in [0.0, 1e-6, 1e-32] {
                let mut case = Case::<f32, f32>::new(&mut rng, 2, 37, Distribution::Normal);
                let size = 10f32.powi(exponent);
                (case.isa, case.options) = (isa, RmsNorm { eps, zero_centred: false });
                case.x.iter_mut().chain(&mut case.residual).for_each(|x| *x *= size);
                let results = case.run(1);
                case.check_forward("magnitudes", &case.x, &results.y, &results.rstd[0]);
            }
        }
    }
}

/// Ties of a sum go to even on every instruction set, as the reference has it, wherever they are.
#[test]
fn ties_of_a_sum() {
    fn body<E: Element>(bits: u32) {
        for isa in Isa::available() {
            let x: Vec<_> = (0..600).map(|i| E::from_f32((bits + i % 40) as f32)).collect();
            let residual: Vec<_> = (0..600).map(|i| E::from_f32((i % 7) as f32 * 0.5)).collect();
            let (mut sum, mut y, mut rstd) = (x.clone(), x.clone(), [0.0; 2]);
            let pool = Threads::new(1).unwrap();
            let shape = NormShape::new(2, 300).unwrap();
            let weight = [1.0_f32; 300];
            let launch = Launch { isa, pool: &pool };
            let kernel = Kernel::new(RmsNorm::default(), shape, &weight[..], launch).unwrap();
            let place = InOut::apart(&residual, &mut sum);
            kernel.add_forward(InOut::apart(&x, &mut y), place, &mut rstd).unwrap();
            let mut expected = x.clone();
            reference::add(&x, &residual, &mut expected);
            same(&format!("{isa}"), &sum, &expected);
        }
    }
    // The last numbers whose spacing is 1.
    body::<bf16>(240);
    body::<f16>(2040);
    body::<f32>((1 << 24) - 20);
    assert_eq!(DType::Bf16.ulp(255.0), 1.0);
}

#[test]
fn wrong_arguments_are_named() {
    let pool = Threads::new(1).unwrap();
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let shape = NormShape::new(4, 3).unwrap();
    let new = |options, weight: &[f32]| Kernel::new(options, shape, weight, launch).map(|_| ());
    let options = RmsNorm { eps: -1.0, zero_centred: false };
    let message = new(options, &[1.0; 3]).unwrap_err().to_string();
    assert_eq!(message, "eps is -1; it must be finite and at least 0");
    let message = new(RmsNorm::default(), &[1.0; 4]).unwrap_err().to_string();
    assert!(message.starts_with("weight holds 4 elements;"), "{message}");

    let weight = [1.0_f32; 3];
    let kernel = Kernel::new(RmsNorm::default(), shape, &weight[..], launch).unwrap();
    let (x, mut y, mut rstd) = ([1.0_f32; 12], [0.0; 11], [0.0; 4]);
    let message = kernel.forward(InOut::apart(&x, &mut y), &mut rstd).unwrap_err().to_string();
    assert_eq!(message, "y holds 11 elements; [T, D] needs 12");
    let mut y = [0.0; 12];
    let message = kernel.forward(InOut::apart(&x, &mut y), &mut [0.0; 3]).unwrap_err().to_string();
    assert_eq!(message, "rstd holds 3 elements; [T] needs 4");
    let mut sum = [0.0; 12];
    let place = InOut::apart(&x[..9], &mut sum);
    let into = InOut::apart(&x, &mut y);
    let message = kernel.add_forward(into, place, &mut rstd).unwrap_err().to_string();
    assert_eq!(message, "residual holds 9 elements; [T, D] needs 12");
    let mut refuse = |length: usize, groups, blocks, dsum: Option<&[f32]>| {
        let mut sums = vec![0.0; length];
        let partial = PartialSums { sums: &mut sums, groups, blocks };
        let gradient = Gradient::Apart { x: &x, dy: &x, dx: &mut y };
        kernel.backward(gradient, &rstd, dsum, partial).unwrap_err().to_string()
    };
    assert_eq!(refuse(12, 2, 3, None), "dweight holds 12 elements; [G, P, D] needs 18");
    assert_eq!(refuse(0, 1, 0, None), "blocks is 0; it must be at least 1");
    assert_eq!(refuse(9, 3, 1, None), "groups is 3; it must be a divisor of the number of rows");
    assert_eq!(refuse(3, 1, 1, Some(&[0.0])), "dsum holds 1 elements; [T, D] needs 12");
}

//! LayerNorm against the f64 reference, on fresh random input, with outputs poisoned first.

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::Element;
use xentile::layer_norm::{LayerNorm, NormShape, SUM_ROUNDINGS, block_rows, reference};
use xentile_cpu::layer_norm::{Gradient, Kernel, Launch, PartialSums, Statistics};
use xentile_cpu::{InOut, Isa, Threads};

mod common;
#[path = "common/norms.rs"]
mod norms;

use norms::{AsWeight, LOST, POISON, Padded, U, for_each_dtype, normal, same, wide, within};

/// Where the entries of a row come from.
#[derive(Clone, Copy, Debug)]
enum Distribution {
    Normal,
    /// With a mean of a thousand deviations, and of a million.
    Offset,
    Far,
    Outlier,
    Constant,
    Tiny,
    Huge,
}

const DISTRIBUTIONS: [Distribution; 7] = [
    Distribution::Normal,
    Distribution::Offset,
    Distribution::Far,
    Distribution::Outlier,
    Distribution::Constant,
    Distribution::Tiny,
    Distribution::Huge,
];

impl Distribution {
    fn row(self, rng: &mut ChaCha8Rng, columns: usize) -> Vec<f64> {
        let mut row: Vec<_> = (0..columns).map(|_| normal(rng)).collect();
        match self {
            Self::Normal => {}
            Self::Offset => row.iter_mut().for_each(|x| *x += 1e3),
            Self::Far => row.iter_mut().for_each(|x| *x = 0.01 * *x - 1e4),
            Self::Outlier => row[rng.random_range(0..columns)] = -3e4,
            Self::Constant => row.fill(12.34 * normal(rng)),
            // Squares that f32 does not hold.
            Self::Tiny => row.iter_mut().for_each(|x| *x *= 1e-20),
            // Nor their sum.
            Self::Huge => row.iter_mut().for_each(|x| *x = 1e37 * (*x).clamp(-3.0, 3.0) + 1e38),
        }
        row
    }
}

/// One problem with its inputs.
struct Case<E, W> {
    options: LayerNorm,
    shape: NormShape,
    isa: Isa,
    x: Vec<E>,
    dy: Vec<E>,
    /// One, or several.
    weight: Vec<W>,
    /// The same, and maybe of another number.
    bias: Option<Vec<W>>,
    /// Groups and blocks of partial sums.
    partial: [usize; 2],
    /// Elements before every array of `E`, which unalign it.
    skip: usize,
}

/// What the kernels make of a [`Case`].
struct Results<E> {
    y: Vec<E>,
    of_rows: Statistics<Vec<f32>>,
    dx: Vec<E>,
    dweight: Vec<f32>,
    dbias: Vec<f32>,
}

fn views(of_rows: &Statistics<Vec<f32>>) -> Statistics<&[f32]> {
    Statistics { mean: &of_rows.mean, rstd: &of_rows.rstd }
}

impl<E: Element, W: AsWeight> Case<E, W> {
    fn new(rng: &mut ChaCha8Rng, rows: usize, columns: usize, kind: Distribution) -> Self {
        let mut matrix = |kind: Distribution| -> Vec<E> {
            (0..rows).flat_map(|_| kind.row(rng, columns)).map(E::from_f64).collect()
        };
        let (x, dy) = (matrix(kind), matrix(Distribution::Normal));
        let columns_of = |rng: &mut ChaCha8Rng| -> Vec<W> {
            (0..columns).map(|_| W::from_f64(normal(rng))).collect()
        };
        Self {
            options: LayerNorm { eps: [1e-5, 0.0, 0.25][rng.random_range(0..3)] },
            shape: NormShape::new(rows, columns).unwrap(),
            isa: Isa::detect(),
            x,
            dy,
            weight: columns_of(rng),
            bias: rng.random::<bool>().then(|| columns_of(rng)),
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
        let rows = self.shape.rows();
        let input = |values: &[E]| Padded::of(values, self.skip);
        let output = || Padded::<E>::poisoned(self.shape.elements(), self.skip / 2);
        let statistics = || Statistics { mean: vec![POISON; rows], rstd: vec![POISON; rows] };
        let forward = |x: InOut<'_, E>| {
            let mut of_rows = statistics();
            let Statistics { mean, rstd } = &mut of_rows;
            let bias = self.bias.as_ref().map(|bias| W::weight(bias));
            kernel.forward(x, bias, Statistics { mean, rstd }).unwrap();
            of_rows
        };
        let (x, mut y) = (input(&self.x), output());
        let of_rows = forward(InOut::apart(x.get(), y.get_mut()));
        let mut in_place = input(&self.x);
        let again = forward(InOut::InPlace(in_place.get_mut()));
        let y = y.take();
        same("forward in place", &in_place.take(), &y);
        same("mean in place", &again.mean, &of_rows.mean);
        same("rstd in place", &again.rstd, &of_rows.rstd);

        let [groups, blocks] = self.partial;
        let backward = |gradient: Gradient<'_, E>| {
            let mut sums = [(); 2].map(|()| vec![POISON; groups * blocks * self.shape.columns()]);
            let [dweight, dbias] = &mut sums;
            let partial = PartialSums { sums: dweight, groups, blocks };
            kernel.backward(gradient, views(&of_rows), partial, dbias).unwrap();
            sums
        };
        let (dy, mut dx) = (input(&self.dy), output());
        let gradient = Gradient::Apart { x: x.get(), dy: dy.get(), dx: dx.get_mut() };
        let [dweight, dbias] = backward(gradient);
        let dx = dx.take();
        let mut of_x = input(&self.x);
        let again = backward(Gradient::InPlaceOfX { x: of_x.get_mut(), dy: dy.get() });
        same("dx in the place of x", &of_x.take(), &dx);
        same("dweight", &again[0], &dweight);
        let mut of_dy = input(&self.dy);
        let again = backward(Gradient::InPlaceOfDy { x: x.get(), dy: of_dy.get_mut() });
        same("dx in the place of dy", &of_dy.take(), &dx);
        same("dbias", &again[1], &dbias);
        Results { y, of_rows, dx, dweight, dbias }
    }

    fn row<'a, T>(&self, matrix: &'a [T], row: usize) -> &'a [T] {
        &matrix[row * self.shape.columns()..][..self.shape.columns()]
    }

    /// The weight or bias of a row.
    fn columns_of(&self, all: &[W], row: usize) -> Vec<f64> {
        let count = all.len() / self.shape.columns();
        wide(self.row(all, row / (self.shape.rows() / count)))
    }

    /// Holds everything to the contract.
    fn check(&self, what: &str) {
        let (dtypes, isa) = ((E::DTYPE, W::DTYPE), self.isa);
        let what = format!("{what} {dtypes:?} {isa} {:?} {:?}", self.shape, self.options);
        let results = self.run(2);
        self.check_forward(&what, &results);
        self.check_backward(&what, &results);
    }

    fn check_forward(&self, what: &str, Results { y, of_rows, .. }: &Results<E>) {
        for row in 0..self.shape.rows() {
            let [mut expected, mut bounds] = [(); 2].map(|()| vec![f64::NAN; self.shape.columns()]);
            let (x, weight) = (wide(self.row(&self.x, row)), self.columns_of(&self.weight, row));
            let bias = self.bias.as_ref().map(|bias| self.columns_of(bias, row));
            let (options, bias) = (&self.options, bias.as_deref());
            let of_row = reference::forward(options, &x, &weight, bias, &mut expected);
            reference::y_bound(options, &x, &weight, bias, &mut bounds);
            let mean = (of_rows.mean[row], of_row.mean, of_row.mean_bound() + LOST);
            within(&format!("{what} mean {row}"), mean.0, mean.1, mean.2);
            let rstd = (of_rows.rstd[row], of_row.rstd, of_row.rstd_bound());
            within(&format!("{what} rstd {row}"), rstd.0, rstd.1, rstd.2);
            for (column, &actual) in self.row(y, row).iter().enumerate() {
                let bound = bounds[column] + LOST * (1.0 + of_row.rstd);
                within(&format!("{what} y {row} {column}"), actual, expected[column], bound);
            }
        }
    }

    fn check_backward(&self, what: &str, results: &Results<E>) {
        let columns = self.shape.columns();
        let [groups, blocks] = self.partial;
        let rows = self.shape.rows() / groups;
        let each = block_rows(rows, blocks);
        for index in 0..groups * blocks {
            let (first, block) = (index / blocks * rows, index % blocks);
            let range = first + rows.min(block * each)..first + rows.min((block + 1) * each);
            let [mut dweight, mut dbias] = [(); 2].map(|()| vec![0.0; columns]);
            let mut sizes = [(); 3].map(|()| vec![0.0; columns]);
            let mut lost = LOST;
            for row in range.clone() {
                let (x, dy) = (wide(self.row(&self.x, row)), wide(self.row(&self.dy, row)));
                let (options, weight) = (&self.options, self.columns_of(&self.weight, row));
                let [mut dx, mut bounds] = [(); 2].map(|()| vec![f64::NAN; columns]);
                let sums = [&mut dweight[..], &mut dbias];
                reference::backward(options, &x, &weight, &dy, &mut dx, sums);
                let [of_weight, of_bias, of_xhat] = &mut sizes;
                let sums = [&mut of_weight[..], of_bias, of_xhat];
                reference::dx_bound(options, &x, &weight, &dy, &mut bounds, sums);
                lost += LOST;
                let lost_of_row = LOST * (1.0 + reference::Statistics::of(options, &x).rstd);
                for (column, &actual) in self.row(&results.dx, row).iter().enumerate() {
                    let (expected, bound) = (dx[column], bounds[column] + lost_of_row);
                    within(&format!("{what} dx {row} {column}"), actual, expected, bound);
                }
            }
            let of_sum = (range.len() as f64 + SUM_ROUNDINGS) * U;
            for column in 0..columns {
                let at = format!("{index} {column}");
                let [of_weight, of_bias, of_xhat] = sizes.each_ref().map(|all| all[column]);
                let bound = of_sum * of_weight + of_xhat + lost;
                let actual = self.row(&results.dweight, index)[column];
                within(&format!("{what} dweight {at}"), actual, dweight[column], bound);
                let actual = self.row(&results.dbias, index)[column];
                within(&format!("{what} dbias {at}"), actual, dbias[column], of_sum * of_bias);
            }
        }
    }
}

#[test]
fn every_distribution_and_width() {
    fn body<E: Element, W: AsWeight>() {
        let mut rng = common::fresh_rng("layer_norm");
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

/// A mean of a thousand deviations costs what rounding it costs, and no more: the bounds are not what
/// lets this pass.
#[test]
fn offset_rows_are_right() {
    let mut rng = common::fresh_rng("layer_norm");
    for isa in Isa::available() {
        for columns in [100, 4096, 65_535] {
            let mut case = Case::<f32, f32>::new(&mut rng, 4, columns, Distribution::Offset);
            (case.isa, case.options.eps, case.bias) = (isa, 0.0, None);
            case.weight.fill(1.0);
            let results = case.run(1);
            for row in 0..4 {
                let x = wide(case.row(&case.x, row));
                let of_row = reference::Statistics::of(&case.options, &x);
                let off = f64::from(results.of_rows.rstd[row]) / of_row.rstd - 1.0;
                assert!(off.abs() < 2e-6, "{isa} {columns}: rstd is off by {off}");
                for (&y, &x) in case.row(&results.y, row).iter().zip(&x) {
                    let off = f64::from(y) - of_row.xhat(x);
                    assert!(off.abs() < 1e-4, "{isa} {columns}: y is off by {off}");
                }
            }
        }
    }
}

/// The bounds know no D.
#[test]
fn wide_rows() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("layer_norm");
        for isa in Isa::available() {
            let kind = DISTRIBUTIONS[rng.random_range(0..4)];
            let mut case = Case::<E, f32>::new(&mut rng, 1, 65_535, kind);
            case.isa = isa;
            case.check(&format!("wide {kind:?}"));
        }
    }
    body::<f32>();
    body::<bf16>();
    body::<f16>();
}

/// Weights and biases of their own for groups of rows, and blocks of every number, some of which are
/// empty.
#[test]
fn groups_and_blocks() {
    fn body<E: Element, W: AsWeight>() {
        let mut rng = common::fresh_rng("layer_norm");
        for (weights, biases, partial) in [
            (1, 1, [1, 1]),
            (2, 1, [1, 12]),
            (3, 2, [2, 3]),
            (12, 12, [12, 1]),
            (1, 6, [3, 4]),
            (4, 3, [1, 50]),
        ] {
            for columns in [5, 70] {
                let mut case = Case::<E, W>::new(&mut rng, 12, columns, Distribution::Normal);
                let [weight, bias] = [weights, biases].map(|count| -> Vec<W> {
                    (0..count * columns).map(|_| W::from_f64(normal(&mut rng))).collect()
                });
                (case.weight, case.bias, case.partial) = (weight, Some(bias), partial);
                case.check(&format!("{weights} weights, {biases} biases, sums {partial:?}"));
            }
        }
    }
    for_each_dtype!(body);
}

#[test]
fn threads_change_no_bit() {
    fn body<E: Element, W: AsWeight>() {
        let mut rng = common::fresh_rng("layer_norm");
        let mut case = Case::<E, W>::new(&mut rng, 400, 1000, Distribution::Normal);
        case.partial = [2, 7];
        let [one, two] = [1, 2].map(|threads| case.run(threads));
        same("y", &one.y, &two.y);
        same("mean", &one.of_rows.mean, &two.of_rows.mean);
        same("rstd", &one.of_rows.rstd, &two.of_rows.rstd);
        same("dx", &one.dx, &two.dx);
        same("dweight", &one.dweight, &two.dweight);
        same("dbias", &one.dbias, &two.dbias);
    }
    for_each_dtype!(body);
}

/// Outputs that go past the caches, where they lie on lines: those in place, which do not, are held
/// against them.
#[test]
fn large() {
    let mut rng = common::fresh_rng("layer_norm");
    let (columns, rows) = (2048, 2051);
    let mut case = Case::<bf16, f32>::new(&mut rng, rows, columns, Distribution::Normal);
    case.x.reserve(64);
    for isa in Isa::available() {
        case.isa = isa;
        // Rows alone are in tasks of their own, and their results too small to go past the caches.
        let whole = case.run(2);
        let last = (rows - 1) * columns;
        let alone = Case::<bf16, f32> {
            shape: NormShape::new(1, columns).unwrap(),
            x: case.x[last..].to_vec(),
            dy: case.dy[last..].to_vec(),
            weight: case.weight.clone(),
            bias: case.bias.clone(),
            ..case
        };
        let results = alone.run(1);
        same("y", &whole.y[last..], &results.y);
        same("dx", &whole.dx[last..], &results.dx);
    }
}

#[test]
fn no_rows() {
    let mut rng = common::fresh_rng("layer_norm");
    let mut case = Case::<bf16, f16>::new(&mut rng, 0, 7, Distribution::Normal);
    for partial in [[1, 3], [2, 1], [0, 4]] {
        case.partial = partial;
        let results = case.run(2);
        assert!(results.y.is_empty() && results.dx.is_empty());
        for sums in [results.dweight, results.dbias] {
            assert_eq!(sums.len(), partial[0] * partial[1] * 7);
            assert!(sums.iter().all(|&sum| sum == 0.0), "sums of nothing: {sums:?}");
        }
    }
}

/// A poisoned row, or one of a single number, among others stays where it is, but in dweight.
#[test]
fn special_rows() {
    fn body<E: Element, W: AsWeight>() {
        let mut rng = common::fresh_rng("layer_norm");
        for isa in Isa::available() {
            for columns in [2, 19, 200] {
                let mut case = Case::<E, W>::new(&mut rng, 4, columns, Distribution::Normal);
                (case.isa, case.options.eps) = (isa, 1e-5);
                let right = case.run(1);
                let at = columns + rng.random_range(0..columns);
                for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let kept = std::mem::replace(&mut case.x[at], E::from_f32(poison));
                    let results = case.run(1);
                    case.x[at] = kept;
                    for row in [0, 2, 3] {
                        same("y", case.row(&results.y, row), case.row(&right.y, row));
                        same("dx", case.row(&results.dx, row), case.row(&right.dx, row));
                    }
                    let Statistics { mean, rstd } = &results.of_rows;
                    assert!(!mean[1].is_finite() && rstd[1].is_nan(), "{isa} {poison}");
                    for row in [case.row(&results.y, 1), case.row(&results.dx, 1)] {
                        assert!(row.iter().all(|x| x.to_f32().is_nan()), "{isa} {poison}");
                    }
                    let (first, second) = results.dweight.split_at(columns);
                    assert!(first.iter().all(|sum| sum.is_nan()), "{isa} {poison}");
                    same("dweight", second, &right.dweight[columns..]);
                    same("dbias", &results.dbias, &right.dbias);
                }
                for eps in [0.0, 1e-5] {
                    case.options.eps = eps;
                    case.x[columns..2 * columns].fill(E::from_f32(0.1));
                    case.check("a row of one number");
                    let results = case.run(1);
                    let nothing = vec![W::from_f32(0.0); columns];
                    let bias = case.bias.as_ref().unwrap_or(&nothing);
                    for (&y, bias) in case.row(&results.y, 1).iter().zip(bias) {
                        // Of a tie either neighbour will do.
                        let expected = if eps == 0.0 { f64::NAN } else { bias.to_f64() };
                        within(&format!("{isa} {columns} the bias"), y, expected, 0.0);
                    }
                    assert_eq!(results.of_rows.rstd[1].is_infinite(), eps == 0.0);
                }
            }
        }
    }
    for_each_dtype!(body);
}

/// Rows whose squares leave f32's range in part or in full, at every boundary.
#[test]
fn every_magnitude() {
    let mut rng = common::fresh_rng("layer_norm");
    for isa in Isa::available() {
        for exponent in (-36..38).step_by(2) {
            for eps in [0.0, 1e-5, 1e-32] {
                let mut case = Case::<f32, f32>::new(&mut rng, 2, 37, Distribution::Normal);
                let size = 10f32.powi(exponent);
                (case.isa, case.options.eps) = (isa, eps);
                case.x.iter_mut().for_each(|x| *x *= size);
                case.check_forward("magnitudes", &case.run(1));
            }
        }
    }
}

#[test]
fn wrong_arguments_are_named() {
    let pool = Threads::new(1).unwrap();
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let shape = NormShape::new(4, 3).unwrap();
    let refused = |eps, weight: &[f32]| {
        let kernel = Kernel::new(LayerNorm { eps }, shape, weight, launch);
        kernel.map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(refused(-1.0, &[1.0; 3]), "eps is -1; it must be finite and at least 0");
    assert!(refused(0.0, &[1.0; 4]).starts_with("weight holds 4 elements;"));

    let weight = [1.0_f32; 3];
    let kernel = Kernel::new(LayerNorm::default(), shape, &weight[..], launch).unwrap();
    let x = [1.0_f32; 12];
    let forward = |y: usize, bias: &[f32], [means, rstds]: [usize; 2]| {
        let (mut y, mut mean, mut rstd) = (vec![0.0; y], vec![0.0; means], vec![0.0; rstds]);
        let into = Statistics { mean: &mut mean[..], rstd: &mut rstd[..] };
        kernel.forward(InOut::apart(&x, &mut y), Some(bias.into()), into).unwrap_err().to_string()
    };
    assert_eq!(forward(11, &weight, [4, 4]), "y holds 11 elements; [T, D] needs 12");
    assert!(forward(12, &[1.0; 2], [4, 4]).starts_with("bias holds 2 elements;"));
    assert_eq!(forward(12, &weight, [3, 4]), "mean holds 3 elements; [T] needs 4");
    assert_eq!(forward(12, &weight, [4, 5]), "rstd holds 5 elements; [T] needs 4");
    let backward = |lengths: [usize; 2], groups, blocks, means: usize| {
        let mut y = [0.0; 12];
        let [mut dweight, mut dbias] = lengths.map(|length| vec![0.0; length]);
        let partial = PartialSums { sums: &mut dweight, groups, blocks };
        let of_rows = Statistics { mean: &vec![0.0; means][..], rstd: &[0.0; 4] };
        let gradient = Gradient::Apart { x: &x, dy: &x, dx: &mut y };
        kernel.backward(gradient, of_rows, partial, &mut dbias).unwrap_err().to_string()
    };
    assert_eq!(backward([12, 6], 1, 2, 4), "dweight holds 12 elements; [G, P, D] needs 6");
    assert_eq!(backward([6, 3], 1, 2, 4), "dbias holds 3 elements; [G, P, D] needs 6");
    assert_eq!(backward([6, 6], 1, 2, 3), "mean holds 3 elements; [T] needs 4");
    assert_eq!(
        backward([9, 9], 3, 1, 4),
        "groups is 3; it must be a divisor of the number of rows"
    );
}

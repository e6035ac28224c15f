//! RMSNorm and LayerNorm against the float64 reference, on fresh random input, with outputs poisoned first.

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::norm::reference::{self, Magnitudes, Row, U};
use xentile::norm::{Kind, Norm, NormShape, block_rows};
use xentile::{DType, Element};
use xentile_cpu::norm::{Gradient, Kernel, Launch, PartialSums, Statistics, Weight};
use xentile_cpu::{InOut, Isa, Threads};

mod common;

const POISON: f32 = 7.25e3;
/// The loss of products below f32's normal range, with slack for their factors.
const LOST: f64 = 1e-35;

const NORMS: [[Norm; 3]; 2] = [
    [
        Norm::RMS,
        Norm { eps: 0.0, zero_centred: true, ..Norm::RMS },
        Norm { eps: 0.25, zero_centred: true, ..Norm::RMS },
    ],
    [Norm::LAYER, Norm { eps: 0.0, ..Norm::LAYER }, Norm { eps: 0.25, ..Norm::LAYER }],
];

/// Runs `body` for both kinds, every dtype of rows and of weights.
macro_rules! for_each_dtype {
    ($body:ident) => {
        for kind in [Kind::Rms, Kind::Layer] {
            for_each_dtype!($body, kind, f32);
            for_each_dtype!($body, kind, bf16);
            for_each_dtype!($body, kind, f16);
        }
    };
    ($body:ident, $kind:ident, $E:ty) => {
        $body::<$E, f32>($kind);
        $body::<$E, bf16>($kind);
        $body::<$E, f16>($kind);
    };
}

fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// A dtype of weights.
trait AsWeight: Element {
    fn weight(weight: &[Self]) -> Weight<'_>;
}

macro_rules! as_weight {
    ($($W:ty),*) => {$(
        impl AsWeight for $W {
            fn weight(weight: &[Self]) -> Weight<'_> {
                weight.into()
            }
        }
    )*};
}

as_weight!(f32, bf16, f16);

/// An array between poisoned elements.
struct Padded<E> {
    all: Vec<E>,
    skip: usize,
}

impl<E: Element> Padded<E> {
    fn of(values: &[E], skip: usize) -> Self {
        let poison = |count| vec![E::from_f32(POISON); count];
        Self { all: [poison(skip), values.to_vec(), poison(3)].concat(), skip }
    }

    fn poisoned(length: usize, skip: usize) -> Self {
        Self::of(&vec![E::from_f32(POISON); length], skip)
    }

    fn get(&self) -> &[E] {
        &self.all[self.skip..self.all.len() - 3]
    }

    fn get_mut(&mut self) -> &mut [E] {
        let end = self.all.len() - 3;
        &mut self.all[self.skip..end]
    }

    /// The array, if nothing around it was written.
    fn take(self) -> Vec<E> {
        let (before, after) = (&self.all[..self.skip], &self.all[self.all.len() - 3..]);
        let poison = E::from_f32(POISON);
        assert!(before.iter().chain(after).all(|&x| x == poison), "wrote beside an array");
        self.get().to_vec()
    }
}

fn float64<E: Element>(row: &[E]) -> Vec<f64> {
    row.iter().map(|x| x.to_f64()).collect()
}

/// Compares bits; all NaNs are equal, since the compiler's order of operands decides which of two an
/// operation returns.
fn same<E: Element>(what: &str, a: &[E], b: &[E]) {
    let canonical = |x: f32| if x.is_nan() { f32::NAN } else { x };
    let bits = |x: &E| canonical(x.to_f32()).to_bits();
    assert_eq!(a.len(), b.len(), "{what}");
    if let Some(index) = a.iter().zip(b).position(|(a, b)| bits(a) != bits(b)) {
        panic!("{what}: element {index} is {:?} and {:?}", a[index], b[index]);
    }
}

/// Checks that `actual` is the rounding of a value within `bound` of `expected`. If that is infinite or
/// NaN, `actual` must be one of the two.
fn within<E: Element>(what: &str, actual: E, expected: f64, bound: f64) {
    let value = actual.to_f64();
    if !expected.is_finite() || !bound.is_finite() {
        assert!(!value.is_finite(), "{what}: {actual:?}, expected {expected}");
        return;
    }
    // A tie, which may be rounded either way, lies within.
    let bound = bound * 1.001 + expected.abs() * 1e-15;
    let [low, high] = [expected - bound, expected + bound].map(|x| E::from_f64(x).to_f64());
    assert!(low <= value && value <= high, "{what}: {actual:?}, expected {expected} +- {bound:e}");
}

/// The distribution of the entries of a row.
#[derive(Clone, Copy, Debug)]
enum Distribution {
    Normal,
    /// RMSNorm: a mean of ten thousand deviations; LayerNorm: of a thousand.
    Offset,
    /// A mean of a million deviations.
    Far,
    Outlier,
    Constant,
    Tiny,
    Huge,
}

impl Distribution {
    /// Those of a kind; normal, offset and outlier rows are among the first four.
    fn of(kind: Kind) -> &'static [Self] {
        match kind {
            Kind::Rms => &[Self::Normal, Self::Offset, Self::Outlier, Self::Tiny, Self::Huge],
            Kind::Layer => &[
                Self::Normal,
                Self::Offset,
                Self::Far,
                Self::Outlier,
                Self::Constant,
                Self::Tiny,
                Self::Huge,
            ],
        }
    }

    fn row(self, kind: Kind, rng: &mut ChaCha8Rng, columns: usize) -> Vec<f64> {
        let mut row: Vec<_> = (0..columns).map(|_| normal(rng)).collect();
        match (self, kind) {
            (Self::Normal, _) => {}
            (Self::Offset, Kind::Rms) => row.iter_mut().for_each(|x| *x += 1e4),
            (Self::Offset, Kind::Layer) => row.iter_mut().for_each(|x| *x += 1e3),
            (Self::Far, _) => row.iter_mut().for_each(|x| *x = 0.01 * *x - 1e4),
            (Self::Outlier, _) => row[rng.random_range(0..columns)] = -3e4,
            (Self::Constant, _) => row.fill(12.34 * normal(rng)),
            // f32 does not hold the squares,
            (Self::Tiny, _) => row.iter_mut().for_each(|x| *x *= 1e-20),
            (Self::Huge, Kind::Rms) => row.iter_mut().for_each(|x| *x *= 1e25),
            // nor the sum.
            (Self::Huge, Kind::Layer) => {
                row.iter_mut().for_each(|x| *x = 1e37 * (*x).clamp(-3.0, 3.0) + 1e38);
            }
        }
        row
    }
}

/// One problem with its inputs.
#[derive(Clone)]
struct Case<E, W> {
    norm: Norm,
    shape: NormShape,
    isa: Isa,
    x: Vec<E>,
    residual: Vec<E>,
    dy: Vec<E>,
    dsum: Vec<E>,
    /// One, or several.
    weight: Vec<W>,
    /// LayerNorm's: one, or several, perhaps not as many as weights.
    bias: Option<Vec<W>>,
    /// Groups and blocks of partial sums.
    partial: [usize; 2],
    /// Elements before every array of `E`, which unalign it.
    skip: usize,
}

/// The results of a [`Case`] for the rows of x, or for their sums with the residual.
struct Results<E> {
    y: Vec<E>,
    sum: Option<Vec<E>>,
    statistics: Statistics<Vec<f32>>,
    dx: Vec<E>,
    dweight: Vec<f32>,
    dbias: Vec<f32>,
}

fn views(statistics: &Statistics<Vec<f32>>) -> Statistics<&[f32]> {
    Statistics { mean: &statistics.mean, rstd: &statistics.rstd }
}

impl<E: Element, W: AsWeight> Case<E, W> {
    fn new(
        kind: Kind,
        rng: &mut ChaCha8Rng,
        rows: usize,
        columns: usize,
        distribution: Distribution,
    ) -> Self {
        let mut matrix = |distribution: Distribution| -> Vec<E> {
            let rows = (0..rows).flat_map(|_| distribution.row(kind, rng, columns));
            rows.map(E::from_f64).collect()
        };
        let (x, residual) = (matrix(distribution), matrix(distribution));
        let (dy, dsum) = (matrix(Distribution::Normal), matrix(Distribution::Normal));
        let has_bias = kind == Kind::Layer && rng.random();
        Self {
            norm: NORMS[kind as usize][rng.random_range(0..3)],
            shape: NormShape::new(rows, columns).unwrap(),
            isa: Isa::detect(),
            x,
            residual,
            dy,
            dsum,
            weight: Self::columns(rng, columns),
            bias: has_bias.then(|| Self::columns(rng, columns)),
            partial: [1, 2],
            skip: 0,
        }
    }

    fn columns(rng: &mut ChaCha8Rng, count: usize) -> Vec<W> {
        (0..count).map(|_| W::from_f64(normal(rng))).collect()
    }

    fn is_layer(&self) -> bool {
        self.norm.kind == Kind::Layer
    }

    fn kernel<'a>(&'a self, pool: &'a Threads) -> Kernel<'a> {
        let launch = Launch { isa: self.isa, pool };
        Kernel::new(self.norm, self.shape, W::weight(&self.weight), launch).unwrap()
    }

    /// The forward pass, with statistics poisoned first.
    fn forward(
        &self,
        kernel: &Kernel<'_>,
        x: InOut<'_, E>,
        residual: Option<InOut<'_, E>>,
    ) -> Statistics<Vec<f32>> {
        let poison = vec![POISON; self.shape.rows()];
        let mean = if self.is_layer() { poison.clone() } else { Vec::new() };
        let mut statistics = Statistics { mean, rstd: poison };
        let Statistics { mean, rstd } = &mut statistics;
        let bias = self.bias.as_ref().map(|bias| W::weight(bias));
        kernel.forward(x, residual, bias, Statistics { mean, rstd }).unwrap();
        statistics
    }

    /// The backward pass, with sums of dweight and dbias poisoned first.
    fn backward(
        &self,
        kernel: &Kernel<'_>,
        gradient: Gradient<'_, E>,
        statistics: &Statistics<Vec<f32>>,
        dsum: Option<&[E]>,
    ) -> [Vec<f32>; 2] {
        let [groups, blocks] = self.partial;
        let length = groups * blocks * self.shape.columns();
        let mut dweight = vec![POISON; length];
        let mut dbias = vec![POISON; if self.is_layer() { length } else { 0 }];
        let partial = PartialSums { sums: &mut dweight, groups, blocks };
        kernel.backward(gradient, views(statistics), dsum, partial, &mut dbias).unwrap();
        [dweight, dbias]
    }

    /// Runs the case wherever outputs may lie: without the residual and, for RMSNorm, with it.
    fn run(&self, threads: usize) -> Vec<Results<E>> {
        let pool = Threads::new(threads).unwrap();
        let kernel = self.kernel(&pool);
        let input = |values: &[E]| Padded::of(values, self.skip);
        let output = || Padded::<E>::poisoned(self.shape.elements(), self.skip / 2);
        let (x, residual) = (input(&self.x), input(&self.residual));

        let mut y = output();
        let statistics = self.forward(&kernel, InOut::apart(x.get(), y.get_mut()), None);
        let mut in_place = input(&self.x);
        let again = self.forward(&kernel, InOut::InPlace(in_place.get_mut()), None);
        let y = y.take();
        same("forward in place", &in_place.take(), &y);
        same("mean in place", &again.mean, &statistics.mean);
        same("rstd in place", &again.rstd, &statistics.rstd);
        let mut results = vec![self.with_gradients(&kernel, y, None, statistics)];
        if self.is_layer() {
            return results;
        }

        let [mut y, mut sum] = [output(), output()];
        let place = InOut::apart(residual.get(), sum.get_mut());
        let into = InOut::apart(x.get(), y.get_mut());
        let statistics = self.forward(&kernel, into, Some(place));
        for both in [false, true] {
            let [mut in_place, mut sum_in_place] = [input(&self.x), input(&self.residual)];
            let mut sum_apart = output();
            let into = InOut::InPlace(in_place.get_mut());
            let place = match both {
                true => InOut::InPlace(sum_in_place.get_mut()),
                false => InOut::apart(residual.get(), sum_apart.get_mut()),
            };
            let again = self.forward(&kernel, into, Some(place));
            same("added y in place", in_place.get(), y.get());
            same("sum", if both { sum_in_place.get() } else { sum_apart.get() }, sum.get());
            same("added rstd", &again.rstd, &statistics.rstd);
        }
        results.push(self.with_gradients(&kernel, y.take(), Some(sum.take()), statistics));
        results
    }

    /// Results with gradients, for every place that dx may have.
    fn with_gradients(
        &self,
        kernel: &Kernel<'_>,
        y: Vec<E>,
        sum: Option<Vec<E>>,
        statistics: Statistics<Vec<f32>>,
    ) -> Results<E> {
        let input = |values: &[E]| Padded::of(values, self.skip);
        let dsum = sum.as_ref().map(|_| input(&self.dsum));
        let run = |gradient: Gradient<'_, E>| {
            self.backward(kernel, gradient, &statistics, dsum.as_ref().map(Padded::get))
        };
        let (x, dy) = (input(sum.as_ref().unwrap_or(&self.x)), input(&self.dy));
        let mut dx = Padded::poisoned(self.shape.elements(), self.skip / 2);
        let [dweight, dbias] = run(Gradient::Apart { x: x.get(), dy: dy.get(), dx: dx.get_mut() });
        let dx = dx.take();
        let mut over_x = input(x.get());
        let again = run(Gradient::InPlaceOfX { x: over_x.get_mut(), dy: dy.get() });
        same("dx in the place of x", &over_x.take(), &dx);
        same("dweight", &again[0], &dweight);
        same("dbias", &again[1], &dbias);
        let mut over_dy = input(dy.get());
        let again = run(Gradient::InPlaceOfDy { x: x.get(), dy: over_dy.get_mut() });
        same("dx in the place of dy", &over_dy.take(), &dx);
        same("dweight", &again[0], &dweight);
        same("dbias", &again[1], &dbias);
        Results { y, sum, statistics, dx, dweight, dbias }
    }

    fn row<'a, T>(&self, matrix: &'a [T], row: usize) -> &'a [T] {
        &matrix[row * self.shape.columns()..][..self.shape.columns()]
    }

    /// The weight or bias of a row.
    fn columns_of(&self, all: &[W], row: usize) -> Vec<f64> {
        let count = all.len() / self.shape.columns();
        float64(self.row(all, row / (self.shape.rows() / count)))
    }

    /// Holds all results to the contract.
    fn check(&self, what: &str) {
        let (dtypes, isa) = ((E::DTYPE, W::DTYPE), self.isa);
        let what = format!("{what} {dtypes:?} {isa} {:?} {:?}", self.shape, self.norm);
        for results in self.run(2) {
            if let Some(actual) = &results.sum {
                let mut sum = vec![E::from_f32(POISON); self.shape.elements()];
                reference::add(&self.x, &self.residual, &mut sum);
                same(&format!("{what} sum"), actual, &sum);
            }
            self.check_forward(&what, &results);
            self.check_backward(&what, &results);
        }
    }

    fn check_forward(&self, what: &str, results: &Results<E>) {
        let Results { y, sum, statistics, .. } = results;
        for row in 0..self.shape.rows() {
            let [mut expected, mut bounds] = [(); 2].map(|()| vec![f64::NAN; self.shape.columns()]);
            let x = float64(self.row(sum.as_ref().unwrap_or(&self.x), row));
            let weight = self.columns_of(&self.weight, row);
            let bias = self.bias.as_ref().map(|bias| self.columns_of(bias, row));
            let reference = Row::new(&self.norm, &x, &weight);
            reference.forward(bias.as_deref(), &mut expected);
            reference.y_bound(bias.as_deref(), &mut bounds);
            if self.is_layer() {
                let bound = reference.mean_bound() + LOST;
                within(&format!("{what} mean {row}"), statistics.mean[row], reference.mean, bound);
            }
            let (rstd, bound) = (reference.rstd, reference.rstd_bound());
            within(&format!("{what} rstd {row}"), statistics.rstd[row], rstd, bound);
            let lost = if self.is_layer() { LOST * (1.0 + rstd) } else { LOST };
            for (column, &actual) in self.row(y, row).iter().enumerate() {
                let bound = bounds[column] + lost;
                within(&format!("{what} y {row} {column}"), actual, expected[column], bound);
            }
        }
    }

    fn check_backward(&self, what: &str, results: &Results<E>) {
        let columns = self.shape.columns();
        let [groups, blocks] = self.partial;
        let rows = self.shape.rows() / groups;
        let each = block_rows(rows, blocks);
        let x = results.sum.as_ref().unwrap_or(&self.x);
        assert_eq!(results.dweight.len(), groups * blocks * columns);
        for index in 0..groups * blocks {
            let (first, block) = (index / blocks * rows, index % blocks);
            let range = first + rows.min(block * each)..first + rows.min((block + 1) * each);
            let [mut dweight, mut dbias] = [(); 2].map(|()| vec![0.0; columns]);
            let mut magnitudes = Magnitudes::zeros(columns);
            let mut lost = LOST;
            for row in range.clone() {
                let (x, dy) = (float64(self.row(x, row)), float64(self.row(&self.dy, row)));
                let dsum = results.sum.as_ref().map(|_| float64(self.row(&self.dsum, row)));
                let weight = self.columns_of(&self.weight, row);
                let [mut dx, mut bounds] = [(); 2].map(|()| vec![f64::NAN; columns]);
                let reference = Row::new(&self.norm, &x, &weight);
                let sums = [&mut dweight[..], &mut dbias];
                reference.backward(&dy, dsum.as_deref(), &mut dx, sums);
                reference.dx_bound(&dy, &dx, &mut bounds, &mut magnitudes);
                lost += LOST;
                for (column, &actual) in self.row(&results.dx, row).iter().enumerate() {
                    let bound = bounds[column] + LOST * (1.0 + reference.rstd);
                    within(&format!("{what} dx {row} {column}"), actual, dx[column], bound);
                }
            }
            let roundings = (range.len() as f64 + self.norm.kind.sum_roundings()) * U;
            for column in 0..columns {
                let at = format!("{index} {column}");
                let bound =
                    roundings * magnitudes.dweight[column] + magnitudes.xhat_errors[column] + lost;
                let actual = self.row(&results.dweight, index)[column];
                within(&format!("{what} dweight {at}"), actual, dweight[column], bound);
                if self.is_layer() {
                    let bound = roundings * magnitudes.dbias[column];
                    let actual = self.row(&results.dbias, index)[column];
                    within(&format!("{what} dbias {at}"), actual, dbias[column], bound);
                }
            }
        }
    }
}

#[test]
fn every_distribution_and_width() {
    fn body<E: Element, W: AsWeight>(kind: Kind) {
        let mut rng = common::fresh_rng("norm");
        for isa in Isa::available() {
            let distributions = Distribution::of(kind);
            for distribution in common::some_where_slow(&mut rng, distributions, 3) {
                // Three of these, one of each kind of row, which the seed chooses.
                for widths in [&[1, 3, 17][..], &[64, 131], &[896, 4099]] {
                    let columns = widths[rng.random_range(0..widths.len())];
                    let rows = if columns > 500 { 3 } else { 5 };
                    let mut case = Case::<E, W>::new(kind, &mut rng, rows, columns, distribution);
                    case.isa = isa;
                    case.skip = rng.random_range(0..5);
                    case.check(&format!("{distribution:?}"));
                }
            }
        }
    }
    for_each_dtype!(body);
}

/// LayerNorm: a mean of a thousand deviations costs the rounding of the mean, and no more. The bounds are
/// not the reason that this passes.
#[test]
fn offset_rows_are_right() {
    let mut rng = common::fresh_rng("norm");
    for isa in Isa::available() {
        for columns in [100, 4096, 65_535] {
            let offset = Distribution::Offset;
            let mut case = Case::<f32, f32>::new(Kind::Layer, &mut rng, 4, columns, offset);
            (case.isa, case.norm.eps, case.bias) = (isa, 0.0, None);
            case.weight.fill(1.0);
            let [results] = &case.run(1)[..] else { panic!("LayerNorm has no residual") };
            for row in 0..4 {
                let (x, weight) = (float64(case.row(&case.x, row)), float64(&case.weight));
                let reference = Row::new(&case.norm, &x, &weight);
                let off = f64::from(results.statistics.rstd[row]) / reference.rstd - 1.0;
                assert!(off.abs() < 2e-6, "{isa} {columns}: rstd is off by {off}");
                for (column, &y) in case.row(&results.y, row).iter().enumerate() {
                    let off = f64::from(y) - reference.xhat(column);
                    assert!(off.abs() < 1e-4, "{isa} {columns}: y is off by {off}");
                }
            }
        }
    }
}

/// The bounds do not depend on D.
#[test]
fn wide_rows() {
    fn body<E: Element>(kind: Kind) {
        let mut rng = common::fresh_rng("norm");
        for isa in Isa::available() {
            // One of these, which the seed chooses.
            let count = if kind == Kind::Layer { 4 } else { 3 };
            let distribution = Distribution::of(kind)[rng.random_range(0..count)];
            let mut case = Case::<E, f32>::new(kind, &mut rng, 1, 65_535, distribution);
            case.isa = isa;
            case.check(&format!("wide {distribution:?}"));
        }
    }
    for kind in [Kind::Rms, Kind::Layer] {
        body::<f32>(kind);
        body::<bf16>(kind);
        body::<f16>(kind);
    }
}

/// Separate weights and biases for groups of rows, and every number of blocks, some of them empty.
#[test]
fn groups_and_blocks() {
    fn body<E: Element, W: AsWeight>(kind: Kind) {
        let mut rng = common::fresh_rng("norm");
        for (weights, biases, partial) in [
            (1, 1, [1, 1]),
            (2, 1, [1, 12]),
            (3, 2, [2, 3]),
            (12, 12, [12, 1]),
            (6, 6, [3, 4]),
            (1, 6, [3, 4]),
            (4, 3, [1, 50]),
        ] {
            for columns in [5, 70] {
                let normal = Distribution::Normal;
                let mut case = Case::<E, W>::new(kind, &mut rng, 12, columns, normal);
                case.weight = Case::<E, W>::columns(&mut rng, weights * columns);
                case.bias =
                    case.is_layer().then(|| Case::<E, W>::columns(&mut rng, biases * columns));
                case.partial = partial;
                case.check(&format!("{weights} weights, {biases} biases, sums {partial:?}"));
            }
        }
    }
    for_each_dtype!(body);
}

#[test]
fn bits_do_not_depend_on_threads() {
    fn body<E: Element, W: AsWeight>(kind: Kind) {
        let mut rng = common::fresh_rng("norm");
        let mut case = Case::<E, W>::new(kind, &mut rng, 400, 1000, Distribution::Normal);
        case.partial = [2, 7];
        for (one, two) in case.run(1).iter().zip(&case.run(2)) {
            same("y", &one.y, &two.y);
            same("sum", one.sum.as_deref().unwrap_or(&[]), two.sum.as_deref().unwrap_or(&[]));
            same("mean", &one.statistics.mean, &two.statistics.mean);
            same("rstd", &one.statistics.rstd, &two.statistics.rstd);
            same("dx", &one.dx, &two.dx);
            same("dweight", &one.dweight, &two.dweight);
            same("dbias", &one.dbias, &two.dbias);
        }
    }
    for_each_dtype!(body);
}

/// RMSNorm's outputs that bypass the caches if they begin on a cache line: they are compared with outputs
/// in place, which do not bypass.
#[test]
fn large() {
    /// Memory for an array that begins on a line, wherever the allocator puts it.
    fn memory<E: Element>(length: usize) -> Vec<E> {
        vec![E::from_f32(POISON); length + 64]
    }
    fn on_a_line<E>(memory: &mut [E], length: usize) -> &mut [E] {
        let start = memory.as_ptr().align_offset(64);
        &mut memory[start..start + length]
    }
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        let columns = 2048;
        let rows = (8 << 20) / (columns * size_of::<E>()) + 3;
        let (pool, n) = (Threads::new(2).unwrap(), rows * columns);
        let mut case = Case::<E, f32>::new(Kind::Rms, rng, rows, columns, Distribution::Normal);
        case.partial = [1, 4];
        let (mut first, mut second) = (memory(n), memory(n));
        let [y, sum] = [&mut first, &mut second].map(|memory| on_a_line::<E>(memory, n));
        for isa in Isa::available() {
            case.isa = isa;
            let kernel = case.kernel(&pool);
            let [mut in_place, mut sum_in_place] = [case.x.clone(), case.residual.clone()];
            let statistics = case.forward(&kernel, InOut::apart(&case.x, y), None);
            let again = case.forward(&kernel, InOut::InPlace(&mut in_place), None);
            same("y", y, &in_place);
            same("rstd", &statistics.rstd, &again.rstd);
            in_place.copy_from_slice(&case.x);
            let apart = InOut::apart(&case.residual, sum);
            let statistics = case.forward(&kernel, InOut::apart(&case.x, y), Some(apart));
            let both = InOut::InPlace(&mut sum_in_place);
            case.forward(&kernel, InOut::InPlace(&mut in_place), Some(both));
            same("y of a sum", y, &in_place);
            same("sum", sum, &sum_in_place);
            for dsum in [None, Some(&case.dsum[..])] {
                in_place.copy_from_slice(&case.dy);
                let apart = Gradient::Apart { x: &case.x, dy: &case.dy, dx: y };
                let [dweight, _] = case.backward(&kernel, apart, &statistics, dsum);
                let gradient = Gradient::InPlaceOfDy { x: &case.x, dy: &mut in_place };
                let [again, _] = case.backward(&kernel, gradient, &statistics, dsum);
                same("dx", y, &in_place);
                same("dweight", &dweight, &again);
            }
        }
    }
    // Non-temporal stores write whole lines, whatever the dtype: the seed chooses one.
    let mut rng = common::fresh_rng("norm");
    [body::<f32>, body::<bf16>, body::<f16>][rng.random_range(0..3)](&mut rng);
}

/// The same of LayerNorm: rows alone are in separate tasks, and their results too small to bypass caches.
#[test]
fn large_layer_norm() {
    let mut rng = common::fresh_rng("norm");
    let (columns, rows) = (2048, 2051);
    let normal = Distribution::Normal;
    let mut case = Case::<bf16, f32>::new(Kind::Layer, &mut rng, rows, columns, normal);
    case.x.reserve(64);
    for isa in Isa::available() {
        case.isa = isa;
        let last = (rows - 1) * columns;
        let alone = Case {
            shape: NormShape::new(1, columns).unwrap(),
            x: case.x[last..].to_vec(),
            dy: case.dy[last..].to_vec(),
            ..case.clone()
        };
        for (all, results) in case.run(2).iter().zip(alone.run(1)) {
            same("y", &all.y[last..], &results.y);
            same("dx", &all.dx[last..], &results.dx);
        }
    }
}

#[test]
fn no_rows() {
    fn body<E: Element, W: AsWeight>(kind: Kind) {
        let mut rng = common::fresh_rng("norm");
        let mut case = Case::<E, W>::new(kind, &mut rng, 0, 7, Distribution::Normal);
        for partial in [[1, 3], [2, 1], [0, 4]] {
            case.partial = partial;
            for results in case.run(2) {
                assert!(results.y.is_empty() && results.dx.is_empty());
                let length = partial[0] * partial[1] * 7;
                assert_eq!(results.dweight.len(), length);
                assert_eq!(results.dbias.len(), if case.is_layer() { length } else { 0 });
                for sums in [results.dweight, results.dbias] {
                    assert!(sums.iter().all(|&sum| sum == 0.0), "sums of nothing: {sums:?}");
                }
            }
        }
    }
    for_each_dtype!(body);
}

/// A poisoned row changes no other row, and dweight only in its block; neither does a row of zeros
/// (RMSNorm) or a constant row (LayerNorm).
#[test]
fn special_rows() {
    fn body<E: Element, W: AsWeight>(kind: Kind) {
        let is_layer = kind == Kind::Layer;
        let mut rng = common::fresh_rng("norm");
        for isa in Isa::available() {
            for columns in if is_layer { [2, 19, 200] } else { [1, 19, 200] } {
                let normal = Distribution::Normal;
                let mut case = Case::<E, W>::new(kind, &mut rng, 4, columns, normal);
                let eps = if is_layer { 1e-5 } else { 1e-6 };
                (case.isa, case.norm.eps) = (isa, eps);
                let right = case.run(1).swap_remove(0);
                let at = columns + rng.random_range(0..columns);
                for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let saved = std::mem::replace(&mut case.x[at], E::from_f32(poison));
                    let results = case.run(1).swap_remove(0);
                    case.x[at] = saved;
                    for row in [0, 2, 3] {
                        same("y", case.row(&results.y, row), case.row(&right.y, row));
                        same("dx", case.row(&results.dx, row), case.row(&right.dx, row));
                        assert_eq!(results.statistics.rstd[row], right.statistics.rstd[row]);
                    }
                    let (y, dx) = (case.row(&results.y, 1), case.row(&results.dx, 1));
                    let nan = |row: &[E]| row.iter().filter(|y| y.to_f32().is_nan()).count();
                    let sums = &results.dweight;
                    let nans = sums.iter().filter(|sum| sum.is_nan()).count();
                    let rstd = results.statistics.rstd[1];
                    if is_layer {
                        assert!(!results.statistics.mean[1].is_finite(), "{isa} {poison}");
                    }
                    if is_layer || poison.is_nan() {
                        assert!(rstd.is_nan(), "{isa} {poison}");
                        assert_eq!([nan(y), nans], [columns; 2], "{isa}");
                    } else {
                        assert_eq!(rstd, 0.0);
                        assert!(nan(y) == 1 && y[at - columns].to_f32().is_nan(), "{isa} {y:?}");
                        assert!(nans == 1 && sums[at - columns].is_nan(), "{isa}");
                    }
                    assert_eq!(nan(dx), columns, "{isa} {poison}");
                    // The second block does not contain the row.
                    same("dweight", &sums[columns..], &right.dweight[columns..]);
                    same("dbias", &results.dbias, &right.dbias);
                }
                for eps in [0.0, eps] {
                    case.norm.eps = eps;
                    let value = E::from_f32(if is_layer { 0.1 } else { 0.0 });
                    case.x[columns..2 * columns].fill(value);
                    case.residual[columns..2 * columns].fill(value);
                    case.check("a row of one value");
                    let results = case.run(1).swap_remove(0);
                    let zeros = vec![W::from_f32(0.0); columns];
                    let bias = case.bias.as_ref().unwrap_or(&zeros);
                    for (&y, bias) in case.row(&results.y, 1).iter().zip(bias) {
                        if !is_layer {
                            assert!(y.to_f32() == 0.0 || eps == 0.0 && y.to_f32().is_nan());
                            continue;
                        }
                        // For a tie either neighbour will do.
                        let expected = if eps == 0.0 { f64::NAN } else { bias.to_f64() };
                        within(&format!("{isa} {columns} the bias"), y, expected, 0.0);
                    }
                    assert_eq!(results.statistics.rstd[1].is_infinite(), eps == 0.0);
                }
            }
        }
    }
    for_each_dtype!(body);
}

/// Rows whose squares leave f32's range in part or in full, at every boundary.
#[test]
fn every_magnitude() {
    let mut rng = common::fresh_rng("norm");
    for (norm, first) in [(Norm::RMS, -37), (Norm::LAYER, -36)] {
        for isa in Isa::available() {
            for exponent in (first..38).step_by(2) {
                for eps in [0.0, norm.eps, 1e-32] {
                    let normal = Distribution::Normal;
                    let mut case = Case::<f32, f32>::new(norm.kind, &mut rng, 2, 37, normal);
                    let size = 10f32.powi(exponent);
                    (case.isa, case.norm) = (isa, Norm { eps, ..norm });
                    case.x.iter_mut().chain(&mut case.residual).for_each(|x| *x *= size);
                    case.check_forward("magnitudes", &case.run(1)[0]);
                }
            }
        }
    }
}

/// Ties of a sum go to even on every instruction set, as in the reference, wherever they are.
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
            let kernel = Kernel::new(Norm::RMS, shape, &weight[..], launch).unwrap();
            let place = Some(InOut::apart(&residual, &mut sum));
            let statistics = Statistics::rms(&mut rstd[..]);
            kernel.forward(InOut::apart(&x, &mut y), place, None, statistics).unwrap();
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
    let weight = [1.0_f32; 3];
    let x = [1.0_f32; 12];
    for norm in [Norm::RMS, Norm::LAYER] {
        let is_layer = norm.kind == Kind::Layer;
        let new = |eps, weight: &[f32]| {
            let kernel = Kernel::new(Norm { eps, ..norm }, shape, weight, launch);
            kernel.map(|_| ()).unwrap_err().to_string()
        };
        assert_eq!(new(-1.0, &[1.0; 3]), "eps is -1; it must be finite and at least 0");
        assert!(new(0.0, &[1.0; 4]).starts_with("weight holds 4 elements;"));

        let kernel = Kernel::new(norm, shape, &weight[..], launch).unwrap();
        let forward = |y: usize, residual: Option<usize>, bias: Option<usize>, rows: [usize; 2]| {
            let [mut mean, mut rstd] = rows.map(|rows| vec![0.0_f32; rows]);
            let (mut y, mut sum, bias_values) = (vec![0.0; y], [0.0; 12], [1.0_f32; 12]);
            let residual = residual.map(|length| InOut::apart(&x[..length], &mut sum));
            let bias = bias.map(|length| Weight::F32(&bias_values[..length]));
            let statistics = Statistics { mean: &mut mean[..], rstd: &mut rstd[..] };
            let into = InOut::apart(&x, &mut y);
            kernel.forward(into, residual, bias, statistics).unwrap_err().to_string()
        };
        let means = if is_layer { 4 } else { 0 };
        assert_eq!(forward(11, None, None, [means, 4]), "y holds 11 elements; [T, D] needs 12");
        assert_eq!(forward(12, None, None, [means, 3]), "rstd holds 3 elements; [T] needs 4");
        assert_eq!(forward(12, None, None, [means, 5]), "rstd holds 5 elements; [T] needs 4");
        let backward = |lengths: [usize; 2], groups, blocks, means: usize, dsum: Option<&[f32]>| {
            let mut dx = [0.0; 12];
            let [mut dweight, mut dbias] = lengths.map(|length| vec![0.0; length]);
            let partial = PartialSums { sums: &mut dweight, groups, blocks };
            let statistics = Statistics { mean: &vec![0.0; means][..], rstd: &[0.0; 4] };
            let gradient = Gradient::Apart { x: &x, dy: &x, dx: &mut dx };
            let found = kernel.backward(gradient, statistics, dsum, partial, &mut dbias);
            found.unwrap_err().to_string()
        };
        let sums = |length| [length, if is_layer { length } else { 0 }];
        assert_eq!(
            backward(sums(12), 2, 3, means, None),
            "dweight holds 12 elements; [G, P, D] needs 18"
        );
        assert_eq!(
            backward(sums(12), 1, 2, means, None),
            "dweight holds 12 elements; [G, P, D] needs 6"
        );
        assert_eq!(backward(sums(0), 1, 0, means, None), "blocks is 0; it must be at least 1");
        assert_eq!(
            backward(sums(9), 3, 1, means, None),
            "groups is 3; it must be a divisor of the number of rows"
        );
        let wrong_kind = |name: &str| {
            format!(
                "{name} is passed; only norms of kind {:?} have one",
                match is_layer {
                    true => Kind::Rms,
                    false => Kind::Layer,
                }
            )
        };
        if is_layer {
            assert!(forward(12, None, Some(2), [4, 4]).starts_with("bias holds 2 elements;"));
            assert_eq!(forward(12, None, Some(3), [3, 4]), "mean holds 3 elements; [T] needs 4");
            assert_eq!(
                backward([6, 3], 1, 2, 4, None),
                "dbias holds 3 elements; [G, P, D] needs 6"
            );
            assert_eq!(backward([6, 6], 1, 2, 3, None), "mean holds 3 elements; [T] needs 4");
            assert!(forward(12, Some(12), None, [4, 4]).contains(&wrong_kind("residual")));
            assert!(backward([3, 3], 1, 1, 4, Some(&x)).contains(&wrong_kind("dsum")));
        } else {
            let message = forward(12, Some(9), None, [0, 4]);
            assert_eq!(message, "residual holds 9 elements; [T, D] needs 12");
            let message = backward([3, 0], 1, 1, 0, Some(&[0.0]));
            assert_eq!(message, "dsum holds 1 elements; [T, D] needs 12");
            assert!(forward(12, None, Some(3), [0, 4]).contains(&wrong_kind("bias")));
            assert!(forward(12, None, None, [4, 4]).contains(&wrong_kind("mean")));
            assert!(backward([3, 3], 1, 1, 0, None).contains(&wrong_kind("dbias")));
        }
    }
}

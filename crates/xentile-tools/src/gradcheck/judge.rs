//! The comparison itself: every entry of every result against the reference.

use std::marker::PhantomData;
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use xentile::Element;
use xentile::fp8::Format;
use xentile::operation::{
    Array, Arrays, Bound, ElementRule, Judged, Pass, Problem, Rows, Visitor, multiple,
};

use super::report::{Index, Metric, Report};
use crate::config::Op;
use crate::progress::Progress;

/// The largest of a metric so far, and where. A NaN is larger than every number.
#[derive(Clone, Copy, Debug, Default)]
struct Worst {
    value: f64,
    index: Option<usize>,
}

impl Worst {
    /// Of equal values that of the first entry is kept, in whichever order rows come.
    fn see(&mut self, value: f64, index: usize) {
        let is_first = self.index.is_some_and(|found| index < found);
        let ties = value == self.value || value.is_nan() && self.value.is_nan();
        if value > self.value || value.is_nan() && !self.value.is_nan() || ties && is_first {
            *self = Self { value, index: Some(index) };
        }
    }

    fn merge(&mut self, other: Self) {
        if let Some(index) = other.index {
            self.see(other.value, index);
        }
    }
}

/// The distance of two numbers; 0 where both are NaN or the same infinity, infinite where only one
/// of them is finite.
fn distance(actual: f64, expected: f64) -> f64 {
    if actual == expected || actual.is_nan() && expected.is_nan() {
        0.0
    } else if actual.is_finite() && expected.is_finite() {
        (actual - expected).abs()
    } else {
        f64::INFINITY
    }
}

/// What a row, or many rows, differ by.
#[derive(Clone, Copy, Debug, Default)]
struct Errors {
    abs: Worst,
    rel: Worst,
    rounded_abs: Worst,
    rounded_ulp: Worst,
    excess: Worst,
    unequal: u64,
    /// Of errors, and of what was expected.
    squares: f64,
    total: f64,
}

impl Errors {
    fn merge(&mut self, other: Self) {
        self.abs.merge(other.abs);
        self.rel.merge(other.rel);
        self.rounded_abs.merge(other.rounded_abs);
        self.rounded_ulp.merge(other.rounded_ulp);
        self.excess.merge(other.excess);
        self.unequal += other.unequal;
        self.squares += other.squares;
        self.total += other.total;
    }
}

/// What elements `T` of an array are.
trait Numbers<T> {
    /// The number, exactly.
    fn wide(&self, element: T) -> f64;

    /// The nearest number that there is, ties to even.
    fn nearest(&self, x: f64) -> f64;

    /// One unit in the last place around `x`.
    fn ulp(&self, x: f64) -> f64;
}

/// Those of a dtype.
struct Of<E>(PhantomData<E>);

impl<E> Of<E> {
    fn new() -> Self {
        Self(PhantomData)
    }
}

impl<E: Element> Numbers<E> for Of<E> {
    fn wide(&self, element: E) -> f64 {
        element.to_f64()
    }

    fn nearest(&self, x: f64) -> f64 {
        E::from_f64(x).to_f64()
    }

    fn ulp(&self, x: f64) -> f64 {
        E::DTYPE.ulp(x)
    }
}

impl Numbers<u8> for Format {
    fn wide(&self, bits: u8) -> f64 {
        self.decode(bits).into()
    }

    fn nearest(&self, x: f64) -> f64 {
        Format::nearest(*self, x)
    }

    fn ulp(&self, x: f64) -> f64 {
        Format::ulp(*self, x)
    }
}

/// Unsigned integers.
struct Integers;

impl Numbers<u8> for Integers {
    fn wide(&self, element: u8) -> f64 {
        element.into()
    }

    fn nearest(&self, x: f64) -> f64 {
        x.round_ties_even()
    }

    fn ulp(&self, _: f64) -> f64 {
        1.0
    }
}

/// One result that is being judged.
struct OfResult<'a> {
    found: &'a Array<'a>,
    judged: Judged,
    errors: Mutex<Errors>,
    progress: Progress,
}

impl OfResult<'_> {
    fn errors<T: Copy>(
        &self,
        numbers: &impl Numbers<T>,
        found: &[T],
        first: usize,
        expected: &[f64],
        bound: Bound<'_>,
    ) -> Errors {
        let mut errors = Errors::default();
        for (offset, (&expected, &actual)) in expected.iter().zip(&found[first..]).enumerate() {
            let (index, bound) = (first + offset, bound.of(offset));
            let actual = numbers.wide(actual);
            let raw = distance(actual, expected);
            errors.abs.see(raw, index);
            match self.judged {
                Judged::Relative { .. } => errors.rel.see(raw / bound, index),
                Judged::Within => errors.excess.see(raw / bound, index),
                Judged::Rounded { ulps, .. } => {
                    // Below the bound an entry has no digits that anyone promised.
                    if expected.abs() > bound {
                        errors.rel.see(raw / expected.abs(), index);
                    }
                    let rounded = numbers.nearest(expected);
                    let error = distance(actual, rounded);
                    if error != 0.0 {
                        let ulp = numbers.ulp(rounded);
                        errors.unequal += 1;
                        errors.rounded_abs.see(error, index);
                        errors.rounded_ulp.see(error / ulp, index);
                        let is_exact = expected == 0.0 && bound == 0.0;
                        let allowed = if is_exact { 0.0 } else { (ulps * ulp).max(bound) };
                        errors.excess.see(error / allowed, index);
                    }
                }
                Judged::Reached => {
                    let is_right = if expected.is_finite() {
                        actual == numbers.nearest(expected)
                    } else {
                        !actual.is_finite()
                    };
                    errors.unequal += u64::from(!is_right);
                }
                Judged::WithinRounding { .. } => {
                    let bound = bound + 0.5 * numbers.ulp(expected.abs() + bound);
                    // What is NaN as it should be is within any bound, though that is NaN too.
                    let excess = if raw == 0.0 { 0.0 } else { raw / bound };
                    errors.excess.see(excess, index);
                    let error = distance(actual, numbers.nearest(expected));
                    errors.unequal += u64::from(error != 0.0);
                    errors.squares += raw * raw;
                    // What should not be finite is no part of what errors are a share of.
                    errors.total += if expected.is_finite() { expected * expected } else { 0.0 };
                }
            }
        }
        errors
    }
}

impl Rows for OfResult<'_> {
    fn row(&self, first: usize, expected: &[f64], bound: Bound<'_>) {
        let errors = match self.found {
            Array::F32(found) => self.errors(&Of::<f32>::new(), found, first, expected, bound),
            Array::Bf16(found) => self.errors(&Of::<bf16>::new(), found, first, expected, bound),
            Array::F16(found) => self.errors(&Of::<f16>::new(), found, first, expected, bound),
            Array::F8(format, found) => self.errors(format, found, first, expected, bound),
            Array::U8(found) => self.errors(&Integers, found, first, expected, bound),
            Array::F64(_) | Array::I64(_) => return,
        };
        self.progress.done(expected.len());
        self.errors.lock().unwrap_or_else(PoisonError::into_inner).merge(errors);
    }
}

/// Judges the results of one pass, and reports.
pub(super) struct Judge<'a> {
    pub(super) report: &'a mut Report,
    pub(super) op: Op,
    pub(super) problem: &'a Problem,
    pub(super) pass: Pass,
    pub(super) found: &'a Arrays<'a>,
    /// Whether times of the reference are reported.
    pub(super) is_timed: bool,
}

impl Judge<'_> {
    /// Where the entry `index` of the result `array` is.
    fn place(&self, array: &str, mut index: usize) -> Index {
        let signature = self.op.signature(self.problem, self.pass);
        let spec = signature.get(array).expect("a result of the pass");
        let mut axes: Vec<_> = spec
            .dims
            .iter()
            .rev()
            .map(|letter| {
                let extent = self.problem.dim(letter).max(1);
                let at = index % extent;
                index /= extent;
                let dim = self.op.dims().iter().find(|dim| dim.letter == multiple(letter).1);
                (dim.map_or(*letter, |dim| dim.index), at)
            })
            .collect();
        // As reports have always had them: tokens, columns, hidden.
        let order = |name: &str| {
            let place = self.op.dims().iter().position(|dim| dim.index == name);
            place.unwrap_or(usize::MAX)
        };
        axes.sort_by_key(|(name, _)| order(name));
        Index(axes)
    }

    /// Judges `found`, which has the extents of the result `array`.
    fn judge_array(
        &mut self,
        array: &str,
        found: &Array<'_>,
        name: &str,
        judged: Judged,
        rows: &(dyn Fn(&dyn Rows) + Sync),
    ) {
        let progress = Progress::new(&format!("comparing {name}"), found.len());
        let result = OfResult { found, judged, errors: Mutex::default(), progress };
        rows(&result);
        let count = found.len().max(1) as f64;
        let errors = result.errors.into_inner().unwrap_or_else(PoisonError::into_inner);
        let worst = |suffix: &str, worst: Worst| {
            let place = worst.index.map(|index| self.place(array, index));
            Metric::plain(format!("{name}{suffix}"), worst.value).at(place)
        };
        let share = |suffix: &str| {
            Metric::plain(format!("{name}{suffix}"), 1.0 - errors.unequal as f64 / count)
        };
        let metrics = match judged {
            Judged::Relative { limit } => {
                vec![worst("_max_abs", errors.abs), worst("_max_rel", errors.rel).at_most(limit)]
            }
            Judged::Within => {
                vec![worst("_max_abs", errors.abs), worst("_excess", errors.excess).at_most(1.0)]
            }
            Judged::Rounded { equal, .. } => vec![
                worst("_max_abs", errors.abs),
                worst("_max_rel", errors.rel),
                worst("_rounded/max_abs", errors.rounded_abs),
                worst("_rounded/max_ulp", errors.rounded_ulp),
                worst("_rounded/excess", errors.excess).at_most(1.0),
                // Of few entries one may lie beside a tie, which is no share to judge by.
                share("_rounded/equal").at_least(equal.min(1.0 - 1.0 / count)),
            ],
            Judged::Reached => {
                let strays = Metric::plain(format!("{name}/strays"), errors.unequal as f64);
                vec![strays.at_most(0.0)]
            }
            Judged::WithinRounding { relative } => {
                // Of nothing at all no share can be off.
                let error = match errors.squares {
                    0.0 => 0.0,
                    squares => (squares / errors.total).sqrt(),
                };
                let error = Metric::plain(format!("{name}/relative"), error);
                vec![
                    worst("_max_abs", errors.abs),
                    worst("/excess", errors.excess).at_most(1.0),
                    if relative.is_finite() { error.at_most(relative) } else { error },
                    share("/equal"),
                ]
            }
        };
        metrics.into_iter().for_each(|metric| self.report.add(metric));
    }
}

impl Visitor for Judge<'_> {
    fn found(&self) -> &Arrays<'_> {
        self.found
    }

    fn scalar(&mut self, name: &str, found: f64, expected: f64, bound: f64) {
        self.report.add(Metric::plain(name, found));
        let error = Metric::plain(format!("abs_diff_{name}"), distance(found, expected));
        self.report.add(error.at_most(bound));
    }

    fn result(
        &mut self,
        array: &'static str,
        name: &str,
        judged: Judged,
        rows: &(dyn Fn(&dyn Rows) + Sync),
    ) {
        if let Some(found) = self.found.get(array) {
            self.judge_array(array, found, name, judged, rows);
        }
    }

    fn made(
        &mut self,
        array: &'static str,
        found: &[f32],
        name: &str,
        judged: Judged,
        rows: &(dyn Fn(&dyn Rows) + Sync),
    ) {
        self.judge_array(array, &Array::F32(found.into()), name, judged, rows);
    }

    fn seconds(&mut self, name: &str, seconds: f64) {
        if self.is_timed {
            self.report.seconds(name, seconds);
        }
    }
}

/// No result looks like it.
const POISON: f32 = 7.25e3;

/// Room for results, which holds nothing that a kernel would give. Scalars are in float64.
pub(super) fn poisoned(op: Op, problem: &Problem, pass: Pass) -> Arrays<'static> {
    let mut results = Arrays::default();
    for spec in op.signature(problem, pass).results {
        // Numbers of 8 bits are so few that results have all of them, but NaN where no input has any.
        let poison = if matches!(spec.element, ElementRule::Fp8(_)) { f32::NAN } else { POISON };
        results.insert(spec.name, spec.room(problem, poison));
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_know_what_is_not_a_number() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert_eq!(distance(nan, nan), 0.0);
        assert_eq!(distance(inf, inf), 0.0);
        assert_eq!(distance(nan, 1.0), inf);
        assert_eq!(distance(1.0, nan), inf);
        assert_eq!(distance(-inf, inf), inf);
        assert_eq!(distance(1.0, 3.0), 2.0);
    }

    #[test]
    fn the_worst_is_kept_with_its_place() {
        let mut worst = Worst::default();
        worst.see(1.0, 42);
        worst.see(0.5, 53);
        worst.see(1.0, 60);
        assert_eq!((worst.value, worst.index), (1.0, Some(42)));
        worst.see(1.0, 7);
        assert_eq!(worst.index, Some(7));
        worst.see(f64::NAN, 60);
        worst.see(f64::INFINITY, 70);
        assert!(worst.value.is_nan());
        let mut merged = Worst::default();
        merged.merge(worst);
        assert_eq!(merged.index, Some(60));
    }
}

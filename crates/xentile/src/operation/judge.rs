//! How results are judged: what they should be, and by how much they may be off.

use std::collections::BTreeMap;

use super::{Arrays, Pass, Problem};
use crate::DType;

/// Something that gradcheck lets pass.
#[derive(Clone, Copy, Debug)]
pub struct ToleranceSpec {
    /// Its name, under `tolerances`.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// What it is where a config has none.
    pub default: fn(&Problem) -> f64,
}

/// Limits by name: [`ToleranceSpec`] with values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tolerances(BTreeMap<&'static str, f64>);

impl Tolerances {
    /// These, by name.
    pub fn new(values: impl IntoIterator<Item = (&'static str, f64)>) -> Self {
        Self(values.into_iter().collect())
    }

    /// The tolerance called `name`.
    ///
    /// # Panics
    /// The operation has none of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> f64 {
        *self.0.get(name).unwrap_or_else(|| panic!("no tolerance {name}"))
    }

    /// What the error of a whole result of `dtype` may be relative to it: what [`WHOLE_RESULTS`] says, and
    /// what its entries may be off by. `bounds` and `total` are the sums of the squares of those, and of
    /// the entries.
    pub(crate) fn bound_whole(&self, dtype: DType, [bounds, total]: [f64; 2]) -> f64 {
        let of_entries = if total == 0.0 { 0.0 } else { (bounds / total).sqrt() };
        self.get(WHOLE_RESULTS.name) * dtype.ulp(1.0) / 2.0 + of_entries
    }

    /// All, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.0.iter().map(|(&name, &value)| (name, value))
    }
}

/// The limit of [`Tolerances::bound_whole`], of operations that call their output y.
pub(crate) const WHOLE_RESULTS: ToleranceSpec = ToleranceSpec {
    name: "gradient_roundings",
    about: "relative error in norm of y and of each gradient, in units of rounding of the dtype, \
            beyond the bounds of entries",
    default: |_| 1.5,
};

/// Which metrics there are of a result, and which of them are limited. `bound` is what comes with each
/// entry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Judged {
    /// `NAME_max_abs`; `NAME_max_rel`, the error over the bound, is at most `limit`.
    Relative {
        /// That limit.
        limit: f64,
    },
    /// `NAME_max_abs`; `NAME_excess`, the error over the bound, is at most 1.
    Within,
    /// Against the expected value as it is rounded: `NAME_max_abs` and `NAME_max_rel` before that,
    /// where more than the bound is expected; `NAME_rounded/max_abs`, `max_ulp`, `excess`, which is the
    /// error over `ulps` units in the last place or the bound and at most 1, and `equal`, at least so much.
    /// Where 0 is expected with a bound of 0, nothing else will do.
    Rounded {
        /// Units in the last place that an entry may be off.
        ulps: f64,
        /// The share of entries that are equal.
        equal: f64,
    },
    /// Entries that are expected not to be finite are not, whichever of these they are, and all others
    /// are equal: `NAME/strays`, how many are neither, is 0.
    Reached,
    /// `NAME_max_abs`; `NAME/excess`, the error over the bound and half a unit in the last place, is at
    /// most 1; `NAME/relative`, the error of all entries by their norm, is at most `relative`;
    /// `NAME/equal`, the share of entries that are the rounded value.
    WithinRounding {
        /// That limit; infinite where there is none.
        relative: f64,
    },
}

/// By how much entries of a row may be off.
#[derive(Clone, Copy, Debug)]
pub enum Bound<'a> {
    /// Each by as much.
    All(f64),
    /// Each by its own.
    Each(&'a [f64]),
}

impl Bound<'_> {
    /// That of the entry `index` of the row.
    #[must_use]
    pub fn of(&self, index: usize) -> f64 {
        match self {
            Self::All(bound) => *bound,
            Self::Each(bounds) => bounds[index],
        }
    }
}

/// Takes rows of one result, on any thread and in any order.
pub trait Rows: Sync {
    /// A row whose first entry is the entry `first` of the result.
    fn row(&self, first: usize, expected: &[f64], bound: Bound<'_>);
}

/// Receives the expected results.
pub trait Visitor {
    /// The results that a kernel gave.
    fn found(&self) -> &Arrays<'_>;

    /// A scalar: what was found, what it should be, and the most that it may differ by.
    fn scalar(&mut self, name: &str, found: f64, expected: f64, bound: f64);

    /// The result `array`, which metrics call `name`, whose rows `rows` hands over.
    fn result(
        &mut self,
        array: &'static str,
        name: &str,
        judged: Judged,
        rows: &(dyn Fn(&dyn Rows) + Sync),
    );

    /// The same of `found`, an array in f32 that was made of results, with the extents of the result
    /// `array`.
    fn made(
        &mut self,
        array: &'static str,
        found: &[f32],
        name: &str,
        judged: Judged,
        rows: &(dyn Fn(&dyn Rows) + Sync),
    );

    /// How long a part of the reference took, as `time/NAME`.
    fn seconds(&mut self, name: &str, seconds: f64);
}

/// An operation's float64 reference on one problem.
pub trait Reference {
    /// Computes what the forward pass gives. Comes before all else.
    fn forward(&mut self);

    /// Hands over what the forward pass gives.
    fn outputs(&self, visitor: &mut dyn Visitor);

    /// Hands over the scalar of `pass`, where there is one.
    fn scalar(&self, pass: Pass, given: &Arrays<'_>, visitor: &mut dyn Visitor) {
        _ = (pass, given, visitor);
    }

    /// Hands over gradients of `pass` for what it is `given`. Names of metrics start with `prefix`. Not
    /// asked for where no pass has any.
    fn gradients(&self, pass: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        _ = (pass, given, prefix, visitor);
    }
}

//! The comparison itself: every output of every token against the reference.

use rayon::prelude::*;
use xentile::Element;
use xentile::cross_entropy::reference::{TokenCotangents, TokenForward, forward, gradient};
use xentile::cross_entropy::{CrossEntropy, Target};
use xentile_cpu::cross_entropy::TokenOutputs;

use super::Limits;
use super::report::{Figure, Place, Report};
use crate::input::Tokens;

/// What outputs hold before a kernel runs: no result looks like it.
const POISON: f32 = 7.25e3;

/// Overwrites `outputs` so that an entry which a kernel forgets is found.
pub(super) fn poison<E: Element>(outputs: &mut [E]) {
    outputs.par_iter_mut().for_each(|output| *output = E::from_f32(POISON));
}

/// The kernel's per-token outputs.
pub(super) struct Outputs {
    pub(super) loss: Vec<f32>,
    pub(super) logps: Vec<f32>,
    pub(super) lse: Vec<f32>,
    pub(super) lse_low: Vec<f32>,
}

impl Outputs {
    pub(super) fn poisoned(tokens: usize) -> Self {
        let poisoned = || vec![POISON; tokens];
        Self { loss: poisoned(), logps: poisoned(), lse: poisoned(), lse_low: poisoned() }
    }

    pub(super) fn borrow(&mut self) -> TokenOutputs<'_> {
        TokenOutputs {
            loss: Some(&mut self.loss),
            logps: Some(&mut self.logps),
            lse: Some(&mut self.lse),
            lse_low: Some(&mut self.lse_low),
            ..TokenOutputs::default()
        }
    }
}

/// What is being compared.
pub(super) struct Problem<'a, E: Clone> {
    pub(super) options: CrossEntropy,
    pub(super) tokens: &'a Tokens<'a, E>,
    pub(super) limits: Limits,
}

/// The largest of a figure so far, and where. A NaN is larger than every number.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Worst {
    pub(super) value: f64,
    pub(super) place: Option<Place>,
}

impl Worst {
    fn see(&mut self, value: f64, token: usize, column: Option<usize>) {
        self.see_at(value, Place { token: Some(token), column, hidden: None });
    }

    pub(super) fn see_at(&mut self, value: f64, place: Place) {
        // Once NaN, no number replaces it.
        if value > self.value || value.is_nan() && !self.value.is_nan() {
            *self = Self { value, place: Some(place) };
        }
    }

    fn merge(mut self, other: Self) -> Self {
        if let Some(place) = other.place {
            self.see_at(other.value, place);
        }
        self
    }
}

/// The distance of two figures; 0 where both are NaN or the same infinity, infinite where only one
/// of them is finite.
pub(super) fn distance(actual: f64, expected: f64) -> f64 {
    if actual == expected || actual.is_nan() && expected.is_nan() {
        0.0
    } else if actual.is_finite() && expected.is_finite() {
        (actual - expected).abs()
    } else {
        f64::INFINITY
    }
}

/// What one row's gradient, or many rows', differ by.
#[derive(Clone, Copy, Default)]
struct GradientErrors {
    raw_abs: Worst,
    raw_rel: Worst,
    rounded_abs: Worst,
    rounded_ulp: Worst,
    excess: Worst,
    unequal: u64,
}

impl GradientErrors {
    fn merge(self, other: Self) -> Self {
        Self {
            raw_abs: self.raw_abs.merge(other.raw_abs),
            raw_rel: self.raw_rel.merge(other.raw_rel),
            rounded_abs: self.rounded_abs.merge(other.rounded_abs),
            rounded_ulp: self.rounded_ulp.merge(other.rounded_ulp),
            excess: self.excess.merge(other.excess),
            unequal: self.unequal + other.unequal,
        }
    }
}

impl<E: Element> Problem<'_, E> {
    fn row(&self, token: usize) -> &[E] {
        &self.tokens.logits[token * self.tokens.vocab..][..self.tokens.vocab]
    }

    fn wide_row(&self, token: usize, wide: &mut Vec<f64>) {
        wide.clear();
        wide.extend(self.row(token).iter().map(|z| z.to_f64()));
    }

    pub(super) fn reference_forward(&self) -> Vec<TokenForward> {
        let labels = self.tokens.labels.par_iter().enumerate();
        let token = |wide: &mut Vec<f64>, (token, &label): (usize, &i64)| {
            self.wide_row(token, wide);
            forward(&self.options, wide, label)
        };
        labels.map_init(Vec::new, token).collect()
    }

    pub(super) fn compare_forward(
        &self,
        report: &mut Report,
        outputs: &Outputs,
        reference: &[TokenForward],
    ) {
        let mut compare = |name: &str, actual: &[f32], expected: fn(&TokenForward) -> f64| {
            let (mut abs, mut rel) = (Worst::default(), Worst::default());
            for (token, reference) in reference.iter().enumerate() {
                let error = distance(f64::from(actual[token]), expected(reference));
                abs.see(error, token, None);
                rel.see(error / self.scale(token, reference), token, None);
            }
            report.add(Figure::plain(format!("fwd/{name}_max_abs"), abs.value).at(abs.place));
            report.add(
                Figure::plain(format!("fwd/{name}_max_rel"), rel.value)
                    .at(rel.place)
                    .at_most(self.limits.forward_rel),
            );
        };
        compare("loss", &outputs.loss, |reference| reference.loss);
        compare("logp", &outputs.logps, |reference| reference.logps);
        compare("lse", &outputs.lse, |reference| reference.lse);
    }

    /// What the forward outputs of a token may be wrong in proportion to: the largest of the terms
    /// that they are sums of.
    fn scale(&self, token: usize, reference: &TokenForward) -> f64 {
        let label = self.options.target(self.tokens.labels[token], self.tokens.vocab);
        let logit = match label {
            Target::Column(y) => self.row(token)[y].to_f64().abs(),
            Target::Ignored | Target::OutOfRange => 0.0,
        };
        let z_loss = self.options.z_loss * reference.lse * reference.lse;
        let terms = [reference.lse.abs(), logit, z_loss];
        terms.into_iter().filter(|term| term.is_finite()).fold(1.0, f64::max)
    }

    pub(super) fn compare_loss(&self, report: &mut Report, actual: f64, expected: f64) {
        report.add(Figure::plain("loss", actual));
        report.add(
            Figure::plain("abs_diff_loss", distance(actual, expected))
                .at_most(self.limits.forward_rel * expected.abs().max(1.0)),
        );
    }

    /// Compares `dlogits` with the gradient for the cotangents of each token; a token that has none
    /// takes no part, and its row must be 0.
    pub(super) fn compare_gradient(
        &self,
        report: &mut Report,
        prefix: &str,
        reference: &[TokenForward],
        cotangents: impl Fn(usize) -> Option<TokenCotangents> + Sync,
        dlogits: &[E],
    ) {
        let vocab = self.tokens.vocab;
        let rows = dlogits.par_chunks(vocab).enumerate();
        let row = |(wide, dz): &mut (Vec<f64>, Vec<f64>), (token, actual): (usize, &[E])| {
            dz.clear();
            dz.resize(vocab, 0.0);
            let lse = reference[token].lse;
            let mut size = 0.0;
            if let Some(cotangents) = cotangents(token) {
                self.wide_row(token, wide);
                let label = self.tokens.labels[token];
                gradient(&self.options, wide, label, lse, cotangents, dz);
                let TokenCotangents { loss: g, logps: h, lse: k } = cotangents;
                size = (g * (1.0 + 2.0 * self.options.z_loss * lse)).abs() + h.abs() + k.abs();
            }
            self.compare_row(token, actual, dz, size)
        };
        let errors = rows
            .map_init(|| (Vec::new(), Vec::new()), row)
            .reduce(GradientErrors::default, GradientErrors::merge);

        let mut add = |name: &str, worst: Worst| {
            let figure = Figure::plain(format!("{prefix}{name}"), worst.value).at(worst.place);
            report.add(if name == "dlogits_rounded/excess" { figure.at_most(1.0) } else { figure });
        };
        add("dlogits_max_abs", errors.raw_abs);
        add("dlogits_max_rel", errors.raw_rel);
        add("dlogits_rounded/max_abs", errors.rounded_abs);
        add("dlogits_rounded/max_ulp", errors.rounded_ulp);
        add("dlogits_rounded/excess", errors.excess);
        let equal = 1.0 - errors.unequal as f64 / dlogits.len().max(1) as f64;
        report.add(
            Figure::plain(format!("{prefix}dlogits_rounded/equal"), equal)
                .at_least(self.limits.dlogits_equal),
        );
    }

    fn compare_row(
        &self,
        token: usize,
        actual: &[E],
        expected: &[f64],
        size: f64,
    ) -> GradientErrors {
        let mut errors = GradientErrors::default();
        let floor = self.limits.dlogits_cotangent * size;
        for (column, (&actual, &expected)) in actual.iter().zip(expected).enumerate() {
            let (rounded, actual) = (E::from_f64(expected).to_f64(), actual.to_f64());
            let raw = distance(actual, expected);
            errors.raw_abs.see(raw, token, Some(column));
            // Below the floor an entry has no digits that anyone promised.
            if expected.abs() > floor {
                errors.raw_rel.see(raw / expected.abs(), token, Some(column));
            }
            let error = distance(actual, rounded);
            if error != 0.0 {
                let ulp = E::DTYPE.ulp(rounded);
                let bound = (self.limits.dlogits_ulp * ulp).max(floor);
                errors.unequal += 1;
                errors.rounded_abs.see(error, token, Some(column));
                errors.rounded_ulp.see(error / ulp, token, Some(column));
                errors.excess.see(error / bound, token, Some(column));
            }
        }
        errors
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

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
        worst.see(1.0, 4, Some(2));
        worst.see(0.5, 5, Some(3));
        let place = |worst: Worst| worst.place.map(|place| (place.token, place.column));
        assert_eq!((worst.value, place(worst)), (1.0, Some((Some(4), Some(2)))));
        worst.see(f64::NAN, 6, None);
        worst.see(f64::INFINITY, 7, None);
        assert!(worst.value.is_nan());
        assert_eq!(place(Worst::default().merge(worst)), Some((Some(6), None)));
    }

    /// One entry two units in the last place off, or forgotten, among correct ones must be found,
    /// judged wrong and named.
    #[test]
    fn one_wrong_gradient_is_found() {
        let (vocab, labels) = (40, vec![3_i64, 39, 0]);
        let logits: Vec<bf16> =
            (0..120_u8).map(|i| bf16::from_f32(f32::from(i % 17) * 0.25)).collect();
        let tokens = Tokens { vocab, logits: logits.into(), labels };
        let limits = Limits {
            forward_rel: 2e-6,
            dlogits_ulp: 1.0,
            dlogits_cotangent: 2f64.powi(-23),
            dlogits_equal: 0.999,
            sum_roundings: 0.0,
            gradient_roundings: 0.0,
        };
        let problem = Problem { options: CrossEntropy::default(), tokens: &tokens, limits };
        let reference = problem.reference_forward();
        let cotangents = |_| Some(TokenCotangents { loss: 1.0, ..Default::default() });
        let mut dlogits = Vec::new();
        for (token, reference) in reference.iter().enumerate() {
            let (mut wide, mut dz) = (Vec::new(), vec![0.0; vocab]);
            problem.wide_row(token, &mut wide);
            let (label, cotangents) = (tokens.labels[token], cotangents(token).unwrap());
            gradient(&problem.options, &wide, label, reference.lse, cotangents, &mut dz);
            dlogits.extend(dz.into_iter().map(<bf16 as Element>::from_f64));
        }
        let errors = |dlogits: &[bf16]| {
            let mut report = Report::empty();
            problem.compare_gradient(&mut report, "", &reference, cotangents, dlogits);
            report
        };
        let right = errors(&dlogits);
        assert!(right.passed());
        assert_eq!(right.figure("dlogits_rounded/equal"), Some(1.0));
        for wrong in [bf16::from_bits(dlogits[57].to_bits() + 2), bf16::from_f32(POISON), bf16::NAN]
        {
            let kept = std::mem::replace(&mut dlogits[57], wrong);
            let report = errors(&dlogits);
            assert!(!report.passed(), "{wrong} for {kept}");
            let json = report.to_json();
            let place = &json["worst"]["dlogits_rounded/excess"];
            assert_eq!((&place["token"], &place["column"]), (&1.into(), &17.into()));
            dlogits[57] = kept;
        }
    }
}

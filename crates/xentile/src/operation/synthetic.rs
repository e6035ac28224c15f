//! Inputs generated from a seed. Every row has a generator of its own, so that rows come out the same
//! whichever others are made and on however many threads.

use std::fmt;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{Array, Operation};
use crate::{DType, Element, Error, Result, by_dtype};

/// How entries are distributed.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Distribution {
    /// Normal around 0.
    #[default]
    Normal,
    /// Uniform around 0.
    Uniform,
    /// Normal, but of a share of tokens one column, not the label, is so many nats above the label.
    Peaked,
    /// Shaped like those of trained language models.
    Trained,
    /// Normal around 10000.
    Offset,
    /// Normal, with one entry in eight -inf, never the label's.
    Masked,
    /// Normal, with one entry in 32 of one row in four NaN, inf or -inf.
    Nonfinite,
}

impl Distribution {
    /// The name that configs have.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Uniform => "uniform",
            Self::Peaked => "peaked",
            Self::Trained => "trained",
            Self::Offset => "offset",
            Self::Masked => "masked",
            Self::Nonfinite => "nonfinite",
        }
    }
}

/// Synthetic inputs.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Synthetic {
    /// How entries are distributed.
    pub distribution: Distribution,
    /// Their standard deviation, 2 where absent. A trained distribution has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<f64>,
    /// Of a peaked distribution: the share of tokens that have a peak, in `[0, 1]`; 1 where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Of a peaked distribution: by how many nats the peak is above the label; 38 where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub height: Option<f64>,
    /// What everything is derived from.
    pub seed: u64,
    /// The share of tokens whose label is `ignore_index`, in `[0, 1]`.
    pub ignored: f64,
}

/// The distribution, and what it has beside its name and seed.
impl fmt::Display for Synthetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.distribution.name())?;
        if self.distribution != Distribution::Trained {
            write!(f, ", std {}", self.std())?;
        }
        if self.distribution == Distribution::Peaked {
            write!(f, ", share {}, height {}", self.share(), self.height())?;
        }
        if self.ignored > 0.0 {
            write!(f, ", ignored {}", self.ignored)?;
        }
        Ok(())
    }
}

/// Generators of one row that must not run into one another.
#[derive(Clone, Copy, Debug)]
pub enum Purpose {
    /// Of the row's entries.
    Entries,
    /// Of what the row is about, such as a label.
    Label,
    /// Of the row's weight.
    Weight,
    /// Of cotangents.
    Cotangents,
}

impl Synthetic {
    /// Checks the range of every field, and that the distribution has it.
    ///
    /// # Errors
    /// The first outside its range, or of another distribution.
    pub fn validate(&self) -> Result<()> {
        let Self { distribution, ignored, .. } = *self;
        let wrong = |text: String| Err(Error::Invalid(text));
        if self.std.is_some() && distribution == Distribution::Trained {
            return wrong(
                "std is set; distribution trained has its own, the others have std".to_owned(),
            );
        }
        for (key, is_set) in [("share", self.share.is_some()), ("height", self.height.is_some())] {
            if is_set && distribution != Distribution::Peaked {
                let name = distribution.name();
                return wrong(format!("{key} is set; distribution {name} has none, peaked has"));
            }
        }
        for (key, value) in [("std", self.std()), ("height", self.height())] {
            if !(value > 0.0 && value.is_finite()) {
                return wrong(format!("{key} is {value}; it must be finite and above 0"));
            }
        }
        for (key, value) in [("share", self.share()), ("ignored", ignored)] {
            if !(0.0..=1.0).contains(&value) {
                return wrong(format!("{key} is {value}; it must be in [0, 1]"));
            }
        }
        Ok(())
    }

    /// The standard deviation.
    #[must_use]
    pub fn std(&self) -> f64 {
        self.std.unwrap_or(2.0)
    }

    pub(crate) fn share(&self) -> f64 {
        self.share.unwrap_or(1.0)
    }

    pub(crate) fn height(&self) -> f64 {
        self.height.unwrap_or(38.0)
    }

    /// The same with another seed, for arrays that must not look alike.
    #[must_use]
    pub fn apart(&self, by: u64) -> Self {
        Self { seed: self.seed ^ by, ..self.clone() }
    }

    /// Standard normal entries from the same seed, as cotangents are.
    pub(crate) fn unit(&self) -> Self {
        Self { std: Some(1.0), seed: self.seed, ..Self::default() }
    }

    /// Checks that what `of` calls `what` is drawn by one of its distributions.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn check_distribution(&self, of: &dyn Operation, what: &str) -> Result<()> {
        let names: Vec<_> = of.facts().distributions.iter().map(|one| one.name()).collect();
        if !of.facts().distributions.contains(&self.distribution) {
            let (last, others) = names.split_last().expect("a distribution");
            return Err(Error::Invalid(format!(
                "distribution is {}; {what} are {} or {last}",
                self.distribution.name(),
                others.join(", ")
            )));
        }
        Ok(())
    }

    /// Checks that what `of` calls `what` can be drawn so: by one of its distributions, and without
    /// labels to ignore.
    ///
    /// # Errors
    /// It cannot.
    pub(crate) fn check_unlabelled(&self, of: &dyn Operation, what: &str) -> Result<()> {
        self.check_distribution(of, what)?;
        if self.ignored != 0.0 {
            return Err(Error::Invalid(format!(
                "ignored is {}; op {} has no labels to ignore",
                self.ignored,
                of.name()
            )));
        }
        Ok(())
    }

    /// Rows of `width` entries of `dtype`, one after another.
    pub(crate) fn draw(&self, dtype: DType, rows: &[u64], width: usize) -> Array<'static> {
        by_dtype!(dtype, E => {
            let mut all = vec![E::from_f32(0.0); rows.len() * width];
            self.fill(rows, width, &mut all);
            Array::of(all)
        })
    }

    /// The generator of a row.
    #[must_use]
    pub fn rng(&self, row: u64, purpose: Purpose) -> ChaCha8Rng {
        self.stream(row * 4 + purpose as u64)
    }

    pub(crate) fn stream(&self, stream: u64) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(stream);
        rng
    }

    /// Fills `out` with `rows`, `width` columns each, of a distribution that knows of no labels.
    ///
    /// # Panics
    /// `out` is not `rows.len() * width` long; the distribution knows of labels.
    pub fn fill<E: Element>(&self, rows: &[u64], width: usize, out: &mut [E]) {
        assert_eq!(out.len(), rows.len() * width);
        out.par_chunks_mut(width.max(1)).zip(rows).for_each(|(out, &row)| self.fill_row(row, out));
    }

    /// A row of [`Self::fill`].
    pub(crate) fn fill_row<E: Element>(&self, row: u64, out: &mut [E]) {
        let mut rng = self.rng(row, Purpose::Entries);
        let std = self.std() as f32;
        let normal = |rng: &mut ChaCha8Rng| std * rng.sample::<f32, _>(StandardNormal);
        let rng = &mut rng;
        match self.distribution {
            Distribution::Normal => out.fill_with(|| E::from_f32(normal(rng))),
            Distribution::Offset => out.fill_with(|| E::from_f32(normal(rng) + 1e4)),
            Distribution::Uniform => {
                // A uniform distribution's standard deviation is its half-width over sqrt(3).
                let end = std * 3_f32.sqrt();
                out.fill_with(|| E::from_f32(end * rng.random_range(-1.0_f32..1.0)));
            }
            Distribution::Nonfinite => {
                const NOT: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
                let has_any = rng.random_range(0..4) == 0;
                out.fill_with(|| {
                    let is_one = has_any && rng.random_range(0..32) == 0;
                    E::from_f32(if is_one { NOT[rng.random_range(0..3)] } else { normal(rng) })
                });
            }
            of_labels => panic!("{} is a distribution of logits", of_labels.name()),
        }
    }
}

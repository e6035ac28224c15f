//! Logits, labels, weights and cotangents made up from a seed. Every row has a generator of its
//! own, so that rows come out the same whichever others are made and on however many threads.

use anyhow::{Result, ensure};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use xentile::Element;

/// How logits are distributed.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Distribution {
    /// Normal with standard deviation `scale`.
    #[default]
    Normal,
    /// Uniform in `[-scale, scale)`.
    Uniform,
    /// As from a trained model: normal noise below a few candidates that stand 8 to 24 above it;
    /// the label is the first of them in three rows out of four.
    Peaked,
    /// Normal around 10000.
    Offset,
    /// Normal, with one entry in eight -inf, never the label's.
    Masked,
}

/// Made-up inputs.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Synthetic {
    /// How logits are distributed.
    pub distribution: Distribution,
    /// The width of that distribution.
    pub scale: f64,
    /// What everything is derived from.
    pub seed: u64,
    /// The share of tokens whose label is `ignore_index`, in `[0, 1]`.
    pub ignored: f64,
}

impl Default for Synthetic {
    fn default() -> Self {
        Self { distribution: Distribution::Normal, scale: 2.0, seed: 0, ignored: 0.0 }
    }
}

/// Generators of one row that must not run into one another.
#[derive(Clone, Copy)]
enum Purpose {
    Logits,
    Label,
    Weight,
    Cotangents,
}

impl Synthetic {
    /// Checks the range of every field.
    ///
    /// # Errors
    /// The first outside its range.
    pub fn validate(&self) -> Result<()> {
        let Self { scale, ignored, .. } = *self;
        ensure!(
            scale > 0.0 && scale.is_finite(),
            "scale is {scale}; it must be finite and above 0"
        );
        ensure!((0.0..=1.0).contains(&ignored), "ignored is {ignored}; it must be in [0, 1]");
        Ok(())
    }

    fn rng(&self, row: u64, purpose: Purpose) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(row * 4 + purpose as u64);
        rng
    }

    /// The label of `row` before any is ignored.
    fn column(&self, row: u64, vocab: usize) -> usize {
        self.rng(row, Purpose::Label).random_range(0..vocab)
    }

    /// Fills `out` with `rows`, `vocab` columns each.
    ///
    /// # Panics
    /// `out` is not `rows.len() * vocab` long.
    pub fn fill_logits<E: Element>(&self, rows: &[u64], vocab: usize, out: &mut [E]) {
        assert_eq!(out.len(), rows.len() * vocab);
        out.par_chunks_mut(vocab.max(1)).zip(rows).for_each(|(out, &row)| self.fill_row(row, out));
    }

    fn fill_row<E: Element>(&self, row: u64, out: &mut [E]) {
        let mut rng = self.rng(row, Purpose::Logits);
        let scale = self.scale as f32;
        let normal = |rng: &mut ChaCha8Rng| scale * rng.sample::<f32, _>(StandardNormal);
        let rng = &mut rng;
        match self.distribution {
            Distribution::Normal => out.fill_with(|| E::from_f32(normal(rng))),
            Distribution::Offset => out.fill_with(|| E::from_f32(normal(rng) + 1e4)),
            Distribution::Uniform => {
                out.fill_with(|| E::from_f32(scale * rng.random_range(-1.0_f32..1.0)));
            }
            Distribution::Masked => {
                out.fill_with(|| {
                    let logit = normal(rng);
                    E::from_f32(if rng.random_range(0..8) == 0 { f32::NEG_INFINITY } else { logit })
                });
                out[self.column(row, out.len())] = E::from_f32(scale);
            }
            Distribution::Peaked => {
                out.fill_with(|| E::from_f32(normal(rng)));
                let (first, top) = self.peak(row, out.len(), rng);
                for rank in (0..8_u8).rev() {
                    let column = if rank == 0 { first } else { rng.random_range(0..out.len()) };
                    out[column] = E::from_f32(top - 1.5 * f32::from(rank));
                }
            }
        }
    }

    /// The first candidate of a peaked `row`, and its logit.
    fn peak(&self, row: u64, vocab: usize, rng: &mut ChaCha8Rng) -> (usize, f32) {
        let label = self.column(row, vocab);
        let first = if rng.random_range(0..4) == 0 { rng.random_range(0..vocab) } else { label };
        (first, rng.random_range(8.0_f32..24.0))
    }

    /// What has to be added to the hidden state of `row` for it to be peaked: a column of the
    /// vocabulary, and by how much its logit rises.
    pub(crate) fn hidden_peak(&self, row: u64, vocab: usize) -> Option<(usize, f32)> {
        let mut rng = self.rng(row, Purpose::Label);
        _ = rng.random::<f64>(); // spent on the label
        (self.distribution == Distribution::Peaked).then(|| self.peak(row, vocab, &mut rng))
    }

    /// The labels of `rows`.
    #[must_use]
    pub fn labels(&self, rows: &[u64], vocab: usize, ignore_index: i64) -> Vec<i64> {
        let label = |&row: &u64| {
            let ignored = self.rng(row, Purpose::Weight).random::<f64>() < self.ignored;
            if ignored { ignore_index } else { self.column(row, vocab) as i64 }
        };
        rows.iter().map(label).collect()
    }

    /// A weight for each of `rows`, uniform in `[0, 1)`.
    #[must_use]
    pub fn weights(&self, rows: &[u64]) -> Vec<f32> {
        let weight = |&row: &u64| {
            let mut rng = self.rng(row, Purpose::Weight);
            _ = rng.random::<f64>(); // spent on `labels`
            rng.random()
        };
        rows.iter().map(weight).collect()
    }

    /// Cotangents of loss, logps and lse for each of `rows`, standard normal.
    #[must_use]
    pub fn cotangents(&self, rows: &[u64]) -> [Vec<f32>; 3] {
        [0, 1, 2].map(|output| {
            let cotangent = |&row: &u64| {
                let mut rng = self.rng(row, Purpose::Cotangents);
                let all: [f32; 3] = std::array::from_fn(|_| rng.sample(StandardNormal));
                all[output]
            };
            rows.iter().map(cotangent).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(synthetic: &Synthetic, rows: &[u64], vocab: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows.len() * vocab];
        synthetic.fill_logits(rows, vocab, &mut out);
        out
    }

    #[test]
    fn a_row_does_not_depend_on_the_others() {
        let synthetic = Synthetic::default();
        let both = logits(&synthetic, &[3, 9], 101);
        assert_eq!(both[101..], logits(&synthetic, &[9], 101));
        assert_ne!(both[..101], both[101..]);
        let other = Synthetic { seed: 1, ..synthetic };
        assert_ne!(both, logits(&other, &[3, 9], 101));
    }

    #[test]
    fn distributions_are_what_they_say() {
        let rows: Vec<u64> = (0..50).collect();
        let of = |distribution| Synthetic { distribution, ..Synthetic::default() };
        let mean = |x: &[f32]| x.iter().sum::<f32>() / x.len() as f32;
        let normal = logits(&of(Distribution::Normal), &rows, 1000);
        let variance = normal.iter().map(|z| z * z).sum::<f32>() / 5e4;
        assert!(mean(&normal).abs() < 0.05 && (variance - 4.0).abs() < 0.15);
        assert!((mean(&logits(&of(Distribution::Offset), &rows, 1000)) - 1e4).abs() < 0.1);
        let uniform = logits(&of(Distribution::Uniform), &rows, 1000);
        assert!(uniform.iter().all(|z| (-2.0..2.0).contains(z)) && mean(&uniform).abs() < 0.05);

        let masked = of(Distribution::Masked);
        let holes = logits(&masked, &rows, 1000);
        let count = holes.iter().filter(|z| **z == f32::NEG_INFINITY).count();
        assert!((5000..7500).contains(&count), "{count}");
        for (row, label) in masked.labels(&rows, 1000, -100).into_iter().enumerate() {
            assert!(holes[row * 1000 + label as usize].is_finite());
        }

        let peaked = of(Distribution::Peaked);
        let peaks = logits(&peaked, &rows, 1000);
        let labels = peaked.labels(&rows, 1000, -100);
        let is_top = |(row, &label): (usize, &i64)| {
            let row = &peaks[row * 1000..(row + 1) * 1000];
            row.iter().all(|&z| z <= row[label as usize])
        };
        let hits = labels.iter().enumerate().filter(|&pair| is_top(pair)).count();
        assert!((25..50).contains(&hits), "{hits} of 50 labels are the top candidate");
    }

    #[test]
    fn ignored_labels_are_about_as_many_as_asked_for() {
        let rows: Vec<u64> = (0..1000).collect();
        let count = |ignored| {
            let labels = Synthetic { ignored, ..Synthetic::default() }.labels(&rows, 50, -100);
            labels.into_iter().filter(|&label| label == -100).count()
        };
        assert_eq!((count(0.0), count(1.0)), (0, 1000));
        assert!((200..300).contains(&count(0.25)));
    }
}

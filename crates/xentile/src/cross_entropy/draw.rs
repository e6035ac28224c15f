//! Logits, labels, weights and cotangents generated from a seed.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;

use super::trained;
use crate::Element;
use crate::operation::{Distribution, Purpose, Synthetic};

/// The stream of what all rows have in common: that of no row.
const OF_COLUMNS: u64 = u64::MAX;

/// Tells the seed of given columns, and of their cotangents, from that of all else.
const OF_GIVEN_COLUMNS: u64 = 0x0063_6f6c_756d_6e73;

/// A column that is not the label, and by how much its logit is above the label's.
pub(crate) struct Peak {
    pub(crate) label: usize,
    pub(crate) column: usize,
    pub(crate) height: f32,
}

impl Synthetic {
    /// The label of `row` before any is ignored.
    fn column(&self, row: u64, vocab: usize) -> usize {
        match self.trained(row, vocab) {
            Some(row) => row.label,
            None => self.rng(row, Purpose::Label).random_range(0..vocab),
        }
    }

    /// What a `row` of a trained distribution says of its next token.
    pub(crate) fn trained(&self, row: u64, vocab: usize) -> Option<trained::Row> {
        let is_trained = self.distribution == Distribution::Trained;
        is_trained.then(|| trained::Row::draw(&mut self.rng(row, Purpose::Label), vocab))
    }

    /// The peak of a `row` of a peaked distribution, where it has one.
    pub(crate) fn peak(&self, row: u64, vocab: usize) -> Option<Peak> {
        let mut rng = self.rng(row, Purpose::Label);
        let label = rng.random_range(0..vocab);
        let is_peaked = self.distribution == Distribution::Peaked && vocab > 1;
        (is_peaked && rng.random::<f64>() < self.share()).then(|| {
            let column = (label + rng.random_range(1..vocab)) % vocab;
            Peak { label, column, height: self.height() as f32 }
        })
    }

    /// Fills `out` with `rows` of logits, `vocab` columns each.
    ///
    /// # Panics
    /// `out` is not `rows.len() * vocab` long.
    pub fn fill_logits<E: Element>(&self, rows: &[u64], vocab: usize, out: &mut [E]) {
        assert_eq!(out.len(), rows.len() * vocab);
        out.par_chunks_mut(vocab.max(1)).zip(rows).for_each(|(out, &row)| {
            self.fill_row_of_logits(row, out);
        });
    }

    fn fill_row_of_logits<E: Element>(&self, row: u64, out: &mut [E]) {
        let mut rng = self.rng(row, Purpose::Entries);
        let std = self.std() as f32;
        let normal = |rng: &mut ChaCha8Rng| std * rng.sample::<f32, _>(StandardNormal);
        let rng = &mut rng;
        match self.distribution {
            Distribution::Normal
            | Distribution::Uniform
            | Distribution::Offset
            | Distribution::Nonfinite => self.fill_row(row, out),
            Distribution::Masked => {
                out.fill_with(|| {
                    let logit = normal(rng);
                    E::from_f32(if rng.random_range(0..8) == 0 { f32::NEG_INFINITY } else { logit })
                });
                out[self.column(row, out.len())] = E::from_f32(std);
            }
            Distribution::Peaked => {
                out.fill_with(|| E::from_f32(normal(rng)));
                if let Some(Peak { label, column, height }) = self.peak(row, out.len()) {
                    out[column] = E::from_f32(out[label].to_f32() + height);
                }
            }
            Distribution::Trained => {
                let row = trained::Row::draw(&mut self.rng(row, Purpose::Label), out.len());
                let mut columns = self.stream(OF_COLUMNS);
                trained::fill_logits(&row, rng, &mut columns, out);
            }
        }
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

    /// `count` columns for each of `rows`: most of them any, some the label before any is ignored, one that the
    /// row has already, or none of the vocabulary.
    #[must_use]
    pub fn columns(&self, rows: &[u64], vocab: usize, count: usize) -> Vec<i64> {
        let from = self.apart(OF_GIVEN_COLUMNS);
        let mut all = Vec::with_capacity(rows.len() * count);
        for &row in rows {
            let (mut rng, first) = (from.rng(row, Purpose::Label), all.len());
            for at in 0..count {
                let column = match rng.random_range(0..8) {
                    0 => {
                        [-1, vocab as i64, i32::MIN.into(), i32::MAX.into()][rng.random_range(0..4)]
                    }
                    1 => self.column(row, vocab) as i64,
                    2 if at > 0 => all[first + rng.random_range(0..at)],
                    _ => rng.random_range(0..vocab) as i64,
                };
                all.push(column);
            }
        }
        all
    }

    /// Cotangents of `count` columns for each of `rows`, standard normal.
    #[must_use]
    pub fn column_cotangents(&self, rows: &[u64], count: usize) -> Vec<f32> {
        let mut all = vec![0.0; rows.len() * count];
        self.apart(OF_GIVEN_COLUMNS).unit().fill(rows, count, &mut all);
        all
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
    fn columns_are_of_every_kind() {
        let (from, rows) = (Synthetic::default(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let (columns, labels) = (from.columns(&rows, 1000, 8), from.labels(&rows, 1000, -100));
        assert_eq!(from.columns(&[9], 1000, 8), columns[72..]);
        let of_rows = columns.chunks(8).zip(&labels);
        let has = |of: fn(&[i64], i64) -> bool| of_rows.clone().any(|(all, &label)| of(all, label));
        assert!(has(|all, label| all.contains(&label)));
        assert!(has(|all, _| all.iter().any(|column| !(0..1000).contains(column))));
        assert!(has(|all, _| (1..8).any(|at| all[..at].contains(&all[at]))));
        assert!(from.column_cotangents(&rows, 8).iter().all(|r| *r != 0.0));
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
        let end = 2.0 * 3_f32.sqrt();
        assert!(uniform.iter().all(|z| (-end..end).contains(z)) && mean(&uniform).abs() < 0.05);
        let variance = uniform.iter().map(|z| z * z).sum::<f32>() / 5e4;
        assert!((variance - 4.0).abs() < 0.15, "{variance}");

        let masked = of(Distribution::Masked);
        let holes = logits(&masked, &rows, 1000);
        let count = holes.iter().filter(|z| **z == f32::NEG_INFINITY).count();
        assert!((5000..7500).contains(&count), "{count}");
        for (row, label) in masked.labels(&rows, 1000, -100).into_iter().enumerate() {
            assert!(holes[row * 1000 + label as usize].is_finite());
        }

        let peaked = Synthetic { share: Some(0.5), height: Some(20.0), ..of(Distribution::Peaked) };
        let peaks = logits(&peaked, &rows, 1000);
        let labels = peaked.labels(&rows, 1000, -100);
        let rises: Vec<_> = labels.iter().zip(peaks.chunks_exact(1000)).map(above).collect();
        let is_peak = |rise: f32| (rise - 20.0).abs() < 1e-5;
        let count = rises.iter().filter(|rise| is_peak(**rise)).count();
        assert!((15..35).contains(&count), "{rises:?}");
        assert!(rises.iter().all(|rise| is_peak(*rise) || *rise < 16.0), "{rises:?}");
    }

    /// By how much the largest logit of a row is above the label's.
    fn above((&label, row): (&i64, &[f32])) -> f32 {
        row.iter().copied().fold(f32::MIN, f32::max) - row[label as usize]
    }

    #[test]
    fn trained_logits_are_shaped_like_those_that_were_measured() {
        let (count, vocab) = (400, 49152);
        let rows: Vec<u64> = (0..count as u64).collect();
        let trained = Synthetic { distribution: Distribution::Trained, ..Synthetic::default() };
        let labels = trained.labels(&rows, vocab, -100);
        let (mut on_top, mut losses, mut spreads) = (0, Vec::new(), Vec::new());
        for (row, label) in rows.iter().zip(&labels) {
            let row = logits(&trained, &[*row], vocab);
            on_top += usize::from(above((label, &row)) == 0.0);
            let f64s = || row.iter().map(|&z| f64::from(z));
            let mean = f64s().sum::<f64>() / vocab as f64;
            spreads.push((f64s().map(|z| (z - mean).powi(2)).sum::<f64>() / vocab as f64).sqrt());
            let lse = f64s().map(|z| (z - mean).exp()).sum::<f64>().ln() + mean;
            losses.push(lse - f64::from(row[*label as usize]));
        }
        let median = |values: &mut Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        assert!((120..200).contains(&on_top), "{on_top} of {count} labels are on top");
        let [spread, loss] = [&mut spreads, &mut losses].map(median);
        assert!((2.9..3.2).contains(&spread), "{spread}");
        assert!((1.5..3.5).contains(&loss), "{loss}");
        let mut distinct = labels.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() < 330, "{} distinct labels of {count}", distinct.len());
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

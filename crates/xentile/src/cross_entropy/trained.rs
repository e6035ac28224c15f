//! Logits, hidden states, weights and labels shaped like those of trained language models.
//!
//! Numbers are of SmolLM2-135M, measured over prose and code; docs/internals/cross-entropy.md gives them beside
//! what is made here, with the literature.

use std::ops::Range;

use rand::{Rng, RngExt};
use rand_distr::StandardNormal;

use crate::Element;

/// Columns that stand above the others: those at the ranks 0, 1, 2, 4, .. 64 of a row, and one that is
/// the label where none of those is.
const CANDIDATES: usize = 9;
/// The share of tokens whose label has another rank than the top one, of those where it isn't that.
const LABEL_BELOW: f32 = 0.63;
/// By how much the last of them is above the row's mean.
const UNRANKED: Range<f32> = 4.0..11.0;
/// Added to a column's rank in its probability (Mandelbrot, 1953).
const ZIPF_SHIFT: f64 = 2.7;

/// The mean of a row of logits, and its deviation from row to row.
const ROW_MEAN: [f32; 2] = [10.8, 5.8];
/// The deviation of columns' means.
const COLUMN_MEANS: f32 = 1.84;
/// The deviation of logits around the sum of both.
const NOISE: f32 = 2.42;

/// Leading dimensions of hidden states, whose other dimensions are about standard normal: their means
/// and deviations.
const LEADING: [[f32; 2]; 4] = [[36.0, 14.0], [11.0, 13.0], [9.0, 10.0], [7.0, 7.0]];
/// The mean of weights in the first of them, which gives rows their mean, and their deviation in all.
const LEADING_WEIGHTS: [f32; 2] = [0.3, 0.05];
/// The median norm of a row of weights in all other dimensions.
const WEIGHT_NORM: f32 = 2.1;
/// The deviation of the logarithm of such norms.
const WEIGHT_NORMS: f32 = 0.18;

fn normal(rng: &mut impl Rng, [mean, deviation]: [f32; 2]) -> f32 {
    mean + deviation * rng.sample::<f32, _>(StandardNormal)
}

/// A column by Zipf's law, with the frequent ones first as in vocabularies of byte pairs.
fn column(rng: &mut impl Rng, vocab: usize) -> usize {
    let ends = (vocab as f64 + ZIPF_SHIFT) / ZIPF_SHIFT;
    let column = ZIPF_SHIFT * (ends.powf(rng.random()) - 1.0);
    (column as usize).min(vocab - 1)
}

/// What a token's row says of its next token.
pub(crate) struct Row {
    pub(crate) label: usize,
    /// Columns, and by how much their logits lie above the row's mean; the top one first.
    candidates: [(usize, f32); CANDIDATES],
}

impl Row {
    pub(crate) fn draw(rng: &mut impl Rng, vocab: usize) -> Self {
        let sharpness = normal(rng, [0.0, 0.7]).exp();
        let top = 13.0 + 3.5 * sharpness;
        let mut candidates = std::array::from_fn(|index| {
            let octave = index as f32 - 1.0;
            let below = if index == 0 { 0.0 } else { 1.5 + 0.87 * octave };
            (column(rng, vocab), (top - sharpness * below).max(8.0))
        });
        candidates[CANDIDATES - 1].1 = rng.random_range(UNRANKED);
        // A sharper row is right more often.
        let label = if rng.random::<f32>() >= (-0.5 * sharpness).exp() {
            candidates[0].0
        } else if rng.random::<f32>() < LABEL_BELOW {
            candidates[rng.random_range(1..CANDIDATES - 1)].0
        } else {
            candidates[CANDIDATES - 1].0
        };
        Self { label, candidates }
    }

    /// The candidates, the top one last.
    pub(crate) fn rising(&self) -> impl Iterator<Item = (usize, f32)> {
        self.candidates.into_iter().rev()
    }
}

/// A row's logits. `columns` is the same for every row.
pub(crate) fn fill_logits<E: Element>(
    row: &Row,
    rng: &mut impl Rng,
    columns: &mut impl Rng,
    out: &mut [E],
) {
    let mean = normal(rng, ROW_MEAN);
    out.fill_with(|| {
        E::from_f32(normal(columns, [mean, COLUMN_MEANS]) + normal(rng, [0.0, NOISE]))
    });
    for (column, height) in row.rising() {
        out[column] = E::from_f32(mean + height);
    }
}

/// Where the leading dimensions of so many are.
pub(crate) fn leading(width: usize) -> impl Iterator<Item = usize> {
    let count = LEADING.len().min(width / 4);
    (0..count).map(move |index| index * width / count)
}

/// A column's row of weights.
pub(crate) fn fill_weight<E: Element>(rng: &mut impl Rng, out: &mut [E]) {
    let norm = WEIGHT_NORM * normal(rng, [0.0, WEIGHT_NORMS]).exp();
    let deviation = norm / (out.len() as f32).sqrt();
    out.fill_with(|| E::from_f32(normal(rng, [0.0, deviation])));
    for (index, at) in leading(out.len()).enumerate() {
        let mean = if index == 0 { LEADING_WEIGHTS[0] } else { 0.0 };
        out[at] = E::from_f32(normal(rng, [mean, LEADING_WEIGHTS[1]]));
    }
}

/// The hidden state of a row's token before it points at its candidates, and the mean of its logits.
pub(crate) fn fill_hidden(row: &Row, rng: &mut impl Rng, out: &mut [f32]) -> f32 {
    // What leading dimensions, and candidates' rows of weights where they meet others, do to logits
    // is not for the other dimensions to do.
    let of_leading: f32 = LEADING.iter().map(|[_, of]| (of * LEADING_WEIGHTS[1]).powi(2)).sum();
    let squares: f32 = row.candidates.iter().map(|(_, height)| height * height).sum();
    let rest = NOISE * NOISE - of_leading - squares / out.len() as f32;
    let deviation = rest.max(0.5).sqrt() / WEIGHT_NORM;
    out.fill_with(|| normal(rng, [0.0, deviation]));
    for (at, of) in leading(out.len()).zip(LEADING) {
        out[at] = normal(rng, of);
    }
    let first = leading(out.len()).next();
    first.map_or(0.0, |at| LEADING_WEIGHTS[0] * out[at])
}

//! Hidden states, an output matrix and labels, generated from a seed.

use rayon::prelude::*;

use super::{LinearShape, VocabAxis};
use crate::cross_entropy::trained;
use crate::operation::{Distribution, Purpose, Synthetic};
use crate::{Element, Error, Result};

/// The distributions that products have.
const CHOICES: &str = "hidden states are normal, uniform, peaked or trained";

/// What keeps the generators of weights and biases apart from those of hidden states.
const SEED_OF_WEIGHT: u64 = 0x9e37_79b9_7f4a_7c15;

/// What a loss of hidden states is of.
#[derive(Clone, Debug)]
pub struct HiddenStates<E> {
    /// `[T, D]`.
    pub hidden: Vec<E>,
    /// `[V, D]` or `[D, V]`.
    pub weight: Vec<E>,
    /// `[V]`.
    pub bias: Option<Vec<E>>,
    /// `[T]`.
    pub labels: Vec<i64>,
}

impl<E: Element> HiddenStates<E> {
    /// Made up: hidden states and biases with a standard deviation of 1 and weights with one of
    /// `std / sqrt(D)`, so that that of logits is about `std`. Where it is peaked, a hidden state
    /// points at a column other than its label as well. Trained ones are all of their own shape,
    /// but for biases.
    ///
    /// # Errors
    /// A distribution that products do not have; more elements than memory can address.
    pub fn synthetic(
        synthetic: &Synthetic,
        rows: &[u64],
        shape: LinearShape,
        has_bias: bool,
        ignore_index: i64,
    ) -> Result<Self> {
        let wrong = |name| Err(Error::Invalid(format!("distribution is {name}; {CHOICES}")));
        let distribution = match synthetic.distribution {
            Distribution::Normal | Distribution::Peaked | Distribution::Trained => {
                Distribution::Normal
            }
            Distribution::Uniform => Distribution::Uniform,
            Distribution::Offset => return wrong("offset"),
            Distribution::Masked => return wrong("masked"),
            Distribution::Nonfinite => return wrong("nonfinite"),
        };
        let (width, vocab) = (shape.width(), shape.vocab());
        let seed = synthetic.seed;
        let of_unit = Synthetic { distribution, std: Some(1.0), seed, ..Synthetic::default() };
        let of_weight = Synthetic {
            std: Some(synthetic.std() / (width as f64).sqrt()),
            seed: seed ^ SEED_OF_WEIGHT,
            ..of_unit.clone()
        };
        let is_trained = synthetic.distribution == Distribution::Trained;
        let columns: Vec<u64> = (0..vocab as u64).collect();
        let zeros = |count: usize| vec![E::from_f32(0.0); count];
        let mut weight = zeros(vocab * width);
        if is_trained {
            weight.par_chunks_mut(width).zip(&columns).for_each(|(out, &column)| {
                trained::fill_weight(&mut of_weight.rng(column, Purpose::Entries), out);
            });
        } else {
            of_weight.fill(&columns, width, &mut weight);
        }
        let of_column = |column: usize| &weight[column * width..][..width];
        let mut hidden = zeros(rows.len() * width);
        hidden.par_chunks_mut(width).zip(rows).for_each(|(out, &row)| {
            let mut state = vec![0_f32; width];
            if let Some(of_row) = synthetic.trained(row, vocab) {
                let rng = &mut synthetic.rng(row, Purpose::Entries);
                let mean = trained::fill_hidden(&of_row, rng, &mut state);
                for (column, height) in of_row.rising() {
                    let weight = floats(of_column(column));
                    // Leading dimensions stay, and so the row's mean.
                    let mut direction = weight.clone();
                    trained::leading(width).for_each(|at| direction[at] = 0.0);
                    point(&mut state, &direction, &weight, mean + height);
                }
            } else {
                of_unit.fill(&[row], width, &mut state);
                if let Some(peak) = synthetic.peak(row, vocab) {
                    let [top, label] = [peak.column, peak.label].map(|at| floats(of_column(at)));
                    let over: Vec<_> = top.iter().zip(label).map(|(w, y)| w - y).collect();
                    point(&mut state, &top, &over, peak.height);
                }
            }
            for (out, x) in out.iter_mut().zip(state) {
                *out = E::from_f32(x);
            }
        });
        let labels = synthetic.labels(rows, vocab, ignore_index);
        Ok(Self::of(shape, hidden, weight, labels, &of_unit, has_bias))
    }

    /// With `weight` `[V, D]` as it comes.
    pub(super) fn of(
        shape: LinearShape,
        hidden: Vec<E>,
        weight: Vec<E>,
        labels: Vec<i64>,
        of_bias: &Synthetic,
        has_bias: bool,
    ) -> Self {
        let (vocab, width) = (shape.vocab(), shape.width());
        let weight = match shape.vocab_axis() {
            VocabAxis::First => weight,
            VocabAxis::Last => {
                let index = |to: usize| to % vocab * width + to / vocab;
                (0..weight.len()).map(|to| weight[index(to)]).collect()
            }
        };
        let bias = has_bias.then(|| {
            let of_bias = Synthetic { seed: of_bias.seed ^ SEED_OF_WEIGHT, ..of_bias.clone() };
            let mut bias = vec![E::from_f32(0.0); vocab];
            // The row after those of the weight.
            of_bias.fill(&[vocab as u64], vocab, &mut bias);
            bias
        });
        Self { hidden, weight, bias, labels }
    }
}

fn floats<E: Element>(values: &[E]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

/// Moves a hidden state along a direction until its product with `factor` is what it should be; not
/// where that takes it the other way.
fn point(state: &mut [f32], direction: &[f32], factor: &[f32], product: f32) {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let slope = dot(direction, factor);
    if slope <= 0.0 {
        return;
    }
    let by = (product - dot(state, factor)) / slope;
    for (x, w) in state.iter_mut().zip(direction) {
        *x += by * w;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(rows: usize, vocab: usize, width: usize, axis: VocabAxis) -> LinearShape {
        LinearShape::new([rows, width], axis.weight(vocab, width), Some(axis)).unwrap()
    }

    fn made(synthetic: &Synthetic, axis: VocabAxis) -> HiddenStates<f32> {
        let rows: Vec<u64> = (0..40).collect();
        HiddenStates::synthetic(synthetic, &rows, shape(40, 500, 64, axis), true, -100).unwrap()
    }

    fn logit(made: &HiddenStates<f32>, row: usize, column: usize) -> f32 {
        let width = made.hidden.len() / 40;
        let weight = &made.weight[column * width..][..width];
        made.hidden[row * width..][..width].iter().zip(weight).map(|(x, w)| x * w).sum()
    }

    #[test]
    fn logits_are_as_wide_as_asked_for() {
        let made = made(&Synthetic::default(), VocabAxis::First);
        let cells = (0..40).flat_map(|row| (0..500).map(move |column| (row, column)));
        let squares: f32 = cells.map(|(row, column)| logit(&made, row, column).powi(2)).sum();
        let deviation = (squares / 2e4).sqrt();
        assert!((1.7..2.3).contains(&deviation), "{deviation}");
        let bias = made.bias.unwrap();
        let deviation = (bias.iter().map(|b| b * b).sum::<f32>() / 500.0).sqrt();
        assert!((0.9..1.1).contains(&deviation), "{deviation}");
    }

    #[test]
    fn a_peaked_row_points_at_a_column_that_is_not_its_label() {
        let peaked = Synthetic { distribution: Distribution::Peaked, ..Synthetic::default() };
        let made = made(&peaked, VocabAxis::First);
        for row in 0..40 {
            let label = logit(&made, row, made.labels[row] as usize);
            let top = (0..500).map(|column| logit(&made, row, column)).fold(f32::MIN, f32::max);
            assert!((top - label - 38.0).abs() < 1e-3, "row {row}: {top} above {label}");
        }
        let masked = Synthetic { distribution: Distribution::Masked, ..Synthetic::default() };
        let refused = HiddenStates::<f32>::synthetic(
            &masked,
            &[0],
            shape(1, 500, 64, VocabAxis::First),
            true,
            -100,
        );
        assert!(refused.unwrap_err().to_string().contains("normal, uniform, peaked or trained"));
    }

    #[test]
    fn a_trained_row_has_outliers_and_often_its_label_on_top() {
        let trained = Synthetic { distribution: Distribution::Trained, ..Synthetic::default() };
        let rows: Vec<u64> = (0..40).collect();
        let shape = shape(40, 4000, 576, VocabAxis::First);
        let made = HiddenStates::<f32>::synthetic(&trained, &rows, shape, true, -100).unwrap();
        let (mut on_top, mut square) = (0, 0.0);
        for row in 0..40 {
            let logits: Vec<_> = (0..4000).map(|column| logit(&made, row, column)).collect();
            let label = logits[made.labels[row] as usize];
            on_top += u32::from(logits.iter().all(|&z| z <= label));
            let mean = logits.iter().sum::<f32>() / 4e3;
            square += logits.iter().map(|z| (z - mean).powi(2)).sum::<f32>() / 1.6e5;
        }
        assert!((8..26).contains(&on_top), "{on_top} of 40 labels are on top");
        let spread = square.sqrt();
        assert!((2.7..3.7).contains(&spread), "{spread}");
        let outliers = made.hidden.iter().filter(|x| x.abs() > 15.0).count();
        assert!((40..160).contains(&outliers), "{outliers} in 40 rows");
    }

    #[test]
    fn both_layouts_of_weight_agree() {
        let first = made(&Synthetic::default(), VocabAxis::First);
        let last = made(&Synthetic::default(), VocabAxis::Last);
        assert_eq!(first.weight[3 * 64 + 7], last.weight[7 * 500 + 3]);
    }
}

//! Hidden states, an output matrix and labels: made up from a seed, or read from a file.

use anyhow::{Result, bail, ensure};
use pjrt_client::Buffer;
use xentile::linear_cross_entropy::{LinearShape, VocabAxis};
use xentile::{Element, LogitsShape};
use xentile_programs::TensorType;
use xentile_programs::exported::Linear;

use super::file::Tensors;
use super::synthetic::{Distribution, Synthetic};
use crate::config::linear_shape;
use crate::xla::Session;

/// The distributions that products have.
const CHOICES: &str = "hidden states are normal, uniform or peaked";

/// What keeps the generators of weights and biases apart from those of hidden states.
const SEED_OF_WEIGHT: u64 = 0x9e37_79b9_7f4a_7c15;

/// What a loss of hidden states is of.
#[derive(Clone, Debug)]
pub struct HiddenStates<E> {
    /// `[T, D]` and `[V, D]` or `[D, V]`.
    pub shape: LinearShape,
    /// `[T, D]`.
    pub hidden: Vec<E>,
    /// As the shape says.
    pub weight: Vec<E>,
    /// `[V]`.
    pub bias: Option<Vec<E>>,
    /// `[T]`.
    pub labels: Vec<i64>,
}

impl<E: Element + pjrt_client::Element> HiddenStates<E> {
    /// All of it on the device, in the order of a program's arguments.
    ///
    /// # Errors
    /// The device has no memory for it, or a label does not fit 32 bits.
    pub(crate) fn upload(&self, session: &Session) -> Result<Vec<Buffer>> {
        let of = |dims: &[usize]| TensorType::new(dims, <E as Element>::DTYPE.into());
        let mut buffers = vec![
            session.upload_matrix(&self.hidden, &of(&self.shape.hidden()))?,
            session.upload_matrix(&self.weight, &of(&self.shape.weight()))?,
        ];
        if let Some(bias) = &self.bias {
            buffers.push(session.upload(bias, &[bias.len()])?);
        }
        buffers.push(session.upload_labels(&self.labels)?);
        Ok(buffers)
    }
}

impl<E: Element> HiddenStates<E> {
    /// Made up: hidden states and biases of width 1 and weights of width `scale / sqrt(D)`, so that
    /// logits are about as wide as `scale` says. Where it is peaked, a hidden state points at one of
    /// the columns as well.
    ///
    /// # Errors
    /// A distribution that products do not have; more elements than memory can address.
    pub fn synthetic(
        synthetic: &Synthetic,
        rows: &[u64],
        vocab: usize,
        linear: Linear,
        ignore_index: i64,
    ) -> Result<Self> {
        let distribution = match synthetic.distribution {
            Distribution::Normal | Distribution::Peaked => Distribution::Normal,
            Distribution::Uniform => Distribution::Uniform,
            Distribution::Offset => bail!("distribution is offset; {CHOICES}"),
            Distribution::Masked => bail!("distribution is masked; {CHOICES}"),
        };
        let shape = linear_shape(LogitsShape::new(rows.len(), vocab)?, linear)?;
        let width = shape.width();
        let of_unit = Synthetic { distribution, scale: 1.0, ..synthetic.clone() };
        let of_weight = Synthetic {
            scale: synthetic.scale / (width as f64).sqrt(),
            seed: synthetic.seed ^ SEED_OF_WEIGHT,
            ..of_unit.clone()
        };
        let columns: Vec<u64> = (0..vocab as u64).collect();
        let zeros = |count: usize| vec![E::from_f32(0.0); count];
        let mut weight = zeros(vocab * width);
        of_weight.fill_logits(&columns, width, &mut weight);
        let mut hidden = zeros(rows.len() * width);
        of_unit.fill_logits(rows, width, &mut hidden);
        for (&row, hidden) in rows.iter().zip(hidden.chunks_exact_mut(width)) {
            let Some((column, top)) = synthetic.hidden_peak(row, vocab) else { continue };
            let weight = &weight[column * width..][..width];
            let square: f32 = weight.iter().map(|w| w.to_f32().powi(2)).sum();
            for (x, w) in hidden.iter_mut().zip(weight) {
                *x = E::from_f32(x.to_f32() + top * w.to_f32() / square.max(f32::MIN_POSITIVE));
            }
        }
        let labels = synthetic.labels(rows, vocab, ignore_index);
        Ok(Self::of(shape, hidden, weight, labels, &of_unit, linear.bias))
    }

    /// Those of a file; a bias, which files do not have, is made up.
    ///
    /// # Errors
    /// The file holds logits, or hidden states of another width than `linear` says.
    pub fn of_file(tensors: &Tensors<'_>, linear: Linear) -> Result<Self> {
        let (hidden, weight, labels) = tensors.hidden()?;
        let found = tensors.width();
        ensure!(
            found == Some(linear.hidden),
            "it has hidden states of {} columns and the config asks for {}; drop `hidden` or mend it",
            found.unwrap_or_default(),
            linear.hidden
        );
        let logits = LogitsShape::new(labels.len(), tensors.shape().vocab)?;
        let shape = linear_shape(logits, linear)?;
        Ok(Self::of(shape, hidden, weight, labels, &Synthetic::default(), linear.bias))
    }

    /// With `weight` `[V, D]` as it comes.
    fn of(
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
            of_bias.fill_logits(&[vocab as u64], vocab, &mut bias);
            bias
        });
        Self { shape, hidden, weight, bias, labels }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINEAR: Linear =
        Linear { hidden: 64, bias: true, vocab_axis: 0, max_scratch_bytes: None };

    fn made(synthetic: &Synthetic, linear: Linear) -> HiddenStates<f32> {
        let rows: Vec<u64> = (0..40).collect();
        HiddenStates::synthetic(synthetic, &rows, 500, linear, -100).unwrap()
    }

    fn logit(made: &HiddenStates<f32>, row: usize, column: usize) -> f32 {
        let weight = &made.weight[column * 64..][..64];
        made.hidden[row * 64..][..64].iter().zip(weight).map(|(x, w)| x * w).sum()
    }

    #[test]
    fn logits_are_as_wide_as_asked_for() {
        let made = made(&Synthetic::default(), LINEAR);
        let cells = (0..40).flat_map(|row| (0..500).map(move |column| (row, column)));
        let squares: f32 = cells.map(|(row, column)| logit(&made, row, column).powi(2)).sum();
        let deviation = (squares / 2e4).sqrt();
        assert!((1.7..2.3).contains(&deviation), "{deviation}");
        let bias = made.bias.unwrap();
        let deviation = (bias.iter().map(|b| b * b).sum::<f32>() / 500.0).sqrt();
        assert!((0.9..1.1).contains(&deviation), "{deviation}");
    }

    #[test]
    fn a_peaked_row_points_at_its_label_more_often_than_not() {
        let peaked = Synthetic { distribution: Distribution::Peaked, ..Synthetic::default() };
        let made = made(&peaked, LINEAR);
        let tops = (0..40).filter(|&row| logit(&made, row, made.labels[row] as usize) > 5.0);
        assert!((20..40).contains(&tops.count()));
        let masked = Synthetic { distribution: Distribution::Masked, ..Synthetic::default() };
        let refused = HiddenStates::<f32>::synthetic(&masked, &[0], 500, LINEAR, -100);
        assert!(refused.unwrap_err().to_string().contains("normal, uniform or peaked"));
    }

    #[test]
    fn either_way_round_it_is_the_same_weight() {
        let first = made(&Synthetic::default(), LINEAR);
        let last = made(&Synthetic::default(), Linear { vocab_axis: 1, ..LINEAR });
        assert_eq!(last.shape.weight(), [64, 500]);
        assert_eq!(first.weight[3 * 64 + 7], last.weight[7 * 500 + 3]);
    }
}

//! Cross-entropy of hidden states against an output matrix: logits are `hidden x weight + bias`.
//!
//! The loss, its options, its reductions and its special tokens are those of
//! [`cross_entropy`](crate::cross_entropy), over logits `z_v = sum_d hidden_d * weight_vd + bias_v`.
//! A kernel sums a logit in f32 at least, with its bias, and never rounds it. With `dz` the gradient of
//! the logits, gradients are
//!
//! - `dhidden = dz x weight`, in the shape of `hidden`;
//! - `dweight = dz^T x hidden`, lying as `weight` lies;
//! - `dbias = sum_t dz_t`;
//!
//! summed in f32 at least and rounded at most once. What is an operand of these products may be rounded
//! once to the dtype of `hidden`: `dz` or the unnormalised softmax that stands for it, and hidden states
//! that the factor of their token, where it comes later, has been multiplied with. The softmax may be
//! normalised by the sum of what was rounded. A label's own `dz` is made in one piece, not as the
//! difference of a rounded probability and 1.

#[cfg(feature = "operation")]
mod draw;
#[cfg(feature = "operation")]
pub mod operation;
pub mod plan;
pub mod reference;

use crate::cross_entropy::CrossEntropy;
use crate::error::check_length;
use crate::{Element, Error, Labels, LogitsShape, Result};

/// Which axis of the weight is the vocabulary's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VocabAxis {
    /// The weight is `[V, D]`.
    First,
    /// The weight is `[D, V]`.
    Last,
}

impl VocabAxis {
    /// The number of the axis.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::First => 0,
            Self::Last => 1,
        }
    }

    /// The extents of a weight of `vocab` x `width`.
    #[must_use]
    pub fn weight(self, vocab: usize, width: usize) -> [usize; 2] {
        match self {
            Self::First => [vocab, width],
            Self::Last => [width, vocab],
        }
    }
}

impl TryFrom<usize> for VocabAxis {
    type Error = Error;

    fn try_from(axis: usize) -> Result<Self> {
        match axis {
            0 => Ok(Self::First),
            1 => Ok(Self::Last),
            _ => Err(Error::Option {
                name: "vocab_axis",
                value: axis as f64,
                requirement: "0 for [V, D] or 1 for [D, V]",
            }),
        }
    }
}

/// The shapes of a problem: `hidden` `[T, D]`, `weight` `[V, D]` or `[D, V]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearShape {
    logits: LogitsShape,
    width: usize,
    vocab_axis: VocabAxis,
}

impl LinearShape {
    /// The shape of `hidden` and `weight` of these extents. Where `vocab_axis` is none it is the axis
    /// of `weight` that `hidden` does not have. No token at all is a valid (empty) problem.
    ///
    /// # Errors
    /// Extents that disagree or leave it open which axis is V; a V or D of 0; more elements than
    /// memory can address.
    pub fn new(
        hidden: [usize; 2],
        weight: [usize; 2],
        vocab_axis: Option<VocabAxis>,
    ) -> Result<Self> {
        let [tokens, width] = hidden;
        if width == 0 {
            return Err(Error::EmptyAxis { name: "hidden", axis: 1 });
        }
        if let Some(axis) = weight.iter().position(|&extent| extent == 0) {
            return Err(Error::EmptyAxis { name: "weight", axis });
        }
        let vocab_axis = match vocab_axis {
            Some(axis) => axis,
            None if weight == [width; 2] => return Err(Error::VocabAxis { extent: width }),
            None if weight[0] == width => VocabAxis::Last,
            None => VocabAxis::First,
        };
        let vocab = weight[vocab_axis.index()];
        let axis = 1 - vocab_axis.index();
        if weight[axis] != width {
            return Err(Error::Axes {
                name: "weight",
                axis,
                actual: weight[axis],
                of: "hidden",
                of_axis: 1,
                expected: width,
            });
        }
        // Either matrix is as bounded as logits are.
        LogitsShape::new(tokens, width)?;
        LogitsShape::new(vocab, width)?;
        Ok(Self { logits: LogitsShape::new(tokens, vocab)?, width, vocab_axis })
    }

    /// T, the number of rows of `hidden`.
    #[must_use]
    pub fn tokens(self) -> usize {
        self.logits.tokens()
    }

    /// D, the number of columns of `hidden`.
    #[must_use]
    pub fn width(self) -> usize {
        self.width
    }

    /// V, the extent of the weight's other axis.
    #[must_use]
    pub fn vocab(self) -> usize {
        self.logits.vocab()
    }

    /// Which axis of the weight is V.
    #[must_use]
    pub fn vocab_axis(self) -> VocabAxis {
        self.vocab_axis
    }

    /// `[T, V]`, the shape of logits that nobody need hold.
    #[must_use]
    pub fn logits(self) -> LogitsShape {
        self.logits
    }

    /// The extents of `hidden`.
    #[must_use]
    pub fn hidden(self) -> [usize; 2] {
        [self.tokens(), self.width]
    }

    /// The extents of `weight`.
    #[must_use]
    pub fn weight(self) -> [usize; 2] {
        self.vocab_axis.weight(self.vocab(), self.width)
    }
}

/// The arrays of a problem, held against its shape.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a, E> {
    shape: LinearShape,
    hidden: &'a [E],
    weight: &'a [E],
    bias: Option<&'a [E]>,
    labels: Labels<'a>,
}

impl<'a, E: Element> Operands<'a, E> {
    /// `hidden` `[T, D]` and `weight`, both row major, `bias` `[V]` if any, and `labels` `[T]`.
    ///
    /// # Errors
    /// A length that is not the shape's; a label that is neither a column nor ignored.
    pub fn new(
        options: &CrossEntropy,
        shape: LinearShape,
        hidden: &'a [E],
        weight: &'a [E],
        bias: Option<&'a [E]>,
        labels: Labels<'a>,
    ) -> Result<Self> {
        let [tokens, width] = shape.hidden();
        check_length("hidden", hidden.len(), "[T, D]", tokens * width)?;
        let axes = match shape.vocab_axis {
            VocabAxis::First => "[V, D]",
            VocabAxis::Last => "[D, V]",
        };
        check_length("weight", weight.len(), axes, shape.vocab() * width)?;
        if let Some(bias) = bias {
            check_length("bias", bias.len(), "[V]", shape.vocab())?;
        }
        options.check_labels(labels, shape.logits)?;
        Ok(Self { shape, hidden, weight, bias, labels })
    }

    /// The shape.
    #[must_use]
    pub fn shape(&self) -> LinearShape {
        self.shape
    }

    /// The labels.
    #[must_use]
    pub fn labels(&self) -> Labels<'a> {
        self.labels
    }

    /// The hidden state of `token`, `[D]`.
    ///
    /// # Panics
    /// `token` is not below T.
    #[must_use]
    pub fn hidden(&self, token: usize) -> &'a [E] {
        &self.hidden[token * self.shape.width..][..self.shape.width]
    }

    /// The weights of `column` of the vocabulary, D of them.
    ///
    /// # Panics
    /// `column` is not below V.
    pub fn weights(&self, column: usize) -> impl Iterator<Item = E> + 'a {
        let Self { shape, weight, .. } = *self;
        assert!(column < shape.vocab(), "column {column} of {}", shape.vocab());
        let (first, step) = match shape.vocab_axis {
            VocabAxis::First => (column * shape.width, 1),
            VocabAxis::Last => (column, shape.vocab()),
        };
        (0..shape.width).map(move |d| weight[first + d * step])
    }

    /// The bias of `column`, 0 where there is none.
    ///
    /// # Panics
    /// There is one, and `column` is not below V.
    #[must_use]
    pub fn bias(&self, column: usize) -> f64 {
        self.bias.map_or(0.0, |bias| bias[column].to_f64())
    }

    /// Whether there is a bias.
    #[must_use]
    pub fn has_bias(&self) -> bool {
        self.bias.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vocabulary_is_the_axis_that_hidden_states_lack() {
        let shape = |weight, axis| LinearShape::new([5, 3], weight, axis);
        assert_eq!(shape([7, 3], None).unwrap().vocab_axis(), VocabAxis::First);
        let last = shape([3, 7], None).unwrap();
        assert_eq!((last.vocab_axis(), last.vocab(), last.width()), (VocabAxis::Last, 7, 3));
        assert_eq!((last.hidden(), last.weight()), ([5, 3], [3, 7]));
        assert_eq!(shape([3, 3], Some(VocabAxis::First)).unwrap().vocab(), 3);
        assert_eq!(LinearShape::new([0, 3], [7, 3], None).unwrap().tokens(), 0);
    }

    #[test]
    fn shapes_that_disagree_name_the_axis() {
        let refuse = |hidden, weight, axis: Option<usize>| {
            let axis = axis.map(|axis| VocabAxis::try_from(axis).unwrap());
            LinearShape::new(hidden, weight, axis).unwrap_err().to_string()
        };
        assert_eq!(
            refuse([5, 3], [7, 4], None),
            "axis 1 of weight is 4; it must be 3, as axis 1 of hidden"
        );
        assert_eq!(
            refuse([5, 3], [7, 3], Some(1)),
            "axis 0 of weight is 7; it must be 3, as axis 1 of hidden"
        );
        assert_eq!(refuse([5, 0], [7, 3], None), "axis 1 of hidden is 0; it must be at least 1");
        assert_eq!(refuse([5, 3], [0, 3], None), "axis 0 of weight is 0; it must be at least 1");
        assert!(refuse([5, 3], [3, 3], None).starts_with("weight is [3, 3], and either axis"));
        assert!(refuse([1 << 61, 3], [7, 3], None).contains("address space"));
        assert_eq!(
            VocabAxis::try_from(2).unwrap_err().to_string(),
            "vocab_axis is 2; it must be 0 for [V, D] or 1 for [D, V]"
        );
    }

    #[test]
    fn lengths_and_labels_are_checked() {
        let shape = LinearShape::new([2, 3], [3, 4], None).unwrap();
        let options = CrossEntropy::default();
        let refuse = |[hidden, weight, bias]: [usize; 3], labels: &[i32]| {
            let [hidden, weight, bias] = [hidden, weight, bias].map(|length| vec![0.0; length]);
            let bias = (!bias.is_empty()).then_some(bias.as_slice());
            Operands::<f32>::new(&options, shape, &hidden, &weight, bias, labels.into())
                .unwrap_err()
                .to_string()
        };
        let good = &[0, -100][..];
        assert_eq!(refuse([5, 12, 4], good), "hidden holds 5 elements; [T, D] needs 6");
        assert_eq!(refuse([6, 9, 0], good), "weight holds 9 elements; [D, V] needs 12");
        assert_eq!(refuse([6, 12, 3], good), "bias holds 3 elements; [V] needs 4");
        assert_eq!(refuse([6, 12, 0], &[0]), "labels holds 1 elements; [T] needs 2");
        assert!(refuse([6, 12, 0], &[0, 4]).starts_with("label 4 of token 1 is outside [0, 4)"));
    }
}

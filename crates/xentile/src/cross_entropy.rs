//! Cross-entropy over logits: the contract that every backend keeps.
//!
//! For one token, `z` is its row of logits in at least f32, `y` its label, `V` the vocabulary:
//!
//! - with softcap, `z <- c * tanh(z / c)` first, and then `z <- z / t` with `t = temperature`, above 0
//!   (Hinton et al., 2015): all that follows is of the distribution at that temperature;
//! - `lse = logsumexp(z)`;
//! - `per_token_logps = z_y - lse`: no smoothing, no z-loss;
//! - `per_token_loss = (1 - e) * (lse - z_y) + e * (lse - mean_v z_v) + w * lse^2`, with
//!   `e = label_smoothing` (Szegedy et al., 2016) and `w = z_loss` (de Brébisson and Vincent, 2016;
//!   Chowdhery et al., 2022);
//! - for cotangents `g` of the loss, `h` of logps and `k` of lse, the gradient is
//!   `dz_v = g * ((1 + 2 * w * lse) * p_v - (1 - e) * [v = y] - e / V) + h * ([v = y] - p_v) + k * p_v`
//!   with `p = softmax(z)`, times `1 / t`, and times `1 - tanh^2` with softcap.
//!
//! Logits scaled by `1 / t` under a cap of `c / t` are the same numbers as those capped by `c` and divided
//! by `t`: `(c / t) * tanh((z / t) / (c / t))`. So kernels have one factor for it.
//!
//! # The distribution
//!
//! Some callers want to know of the predicted distribution itself:
//!
//! - `entropy = -sum_v p_v ln p_v = lse - sum_v p_v z_v`, in nats (Shannon, 1948), where an entry with
//!   `p_v = 0`, masked ones among them, adds 0. Its gradient comes of `dp_v / dz_u = p_v ([u = v] - p_u)`:
//!   `d entropy / dz_u = p_u - p_u - p_u (z_u - sum_v p_v z_v)`, and with `sum_v p_v z_v = lse - entropy`
//!   that is `-p_u * (z_u - lse + entropy)`. A cotangent `q` of it adds `q` times that to `dz_u`, before the
//!   factors of temperature and softcap. It is 0 for ignored tokens and NaN over a row with no finite sum;
//! - `argmax`, the first column with the largest logit as it was given, before softcap and temperature,
//!   which keep the order but may round two to one, and `highest`, that logit. A row with no finite sum
//!   has none. A token is **correct** where its label is the `argmax`. Neither has a derivative;
//! - log-probabilities `z_c - lse` of up to [`MOST_COLUMNS`] given columns `c` of each token, one of which may be
//!   given more than once. A cotangent `r` of one adds `r * ([v = c] - p_v)` to `dz_v`, as `h` does of the label's.
//!   They are 0 for ignored tokens. One that is not in `[0, V)` has NaN, and the gradient of `-lse` alone,
//!   `-r * p_v`.
//!
//! Four kinds of token are special:
//!
//! - **all cotangents 0**: the gradient row is exactly 0, whatever the logits and the label. A token
//!   that a mask took out of the objective costs nothing and leaks no NaN;
//! - **ignored** (`y == ignore_index`): loss 0, logps 0, gradient row exactly 0, not counted in a
//!   mean; its `lse` is still that of its row;
//! - **label out of range**: loss, logps and the gradient row are NaN; `lse` is still that of its
//!   row. Checked entry points refuse such labels instead ([`CrossEntropy::check_labels`]);
//! - **no finite sum** (a NaN or +inf logit, or every logit -inf): loss, logps, lse and gradient
//!   row are NaN. A -inf logit among others is a masked entry, and its gradient is exactly 0.
//!   (With softcap both infinities are capped to finite values before any of this.)
//!
//! # A vocabulary in parts
//!
//! Devices may each have `V / n` columns of every row. A part runs kernels for a vocabulary of its own,
//! with `e' = 1` where `e > 0` (0 elsewhere), `w' = 0`, and for label the column of its own that the label
//! is; where another part has it, any column (the first). It gives `lse_i`, `logps_i = z_y - lse_i` and, with
//! smoothing, `loss_i = lse_i - mean_i z`. With `m = max_i lse_i` and `d_i = lse_i - m`, devices exchange `m`
//! and three sums of a number a token:
//!
//! - `s = sum_i exp(d_i)`, and `lse = m + ln s`;
//! - `a = logps_i + d_i` of the part that has the label, and `per_token_logps = a - ln s`;
//! - `b = sum_i (loss_i - d_i)`, and `lse - mean_v z_v = b / n + ln s`.
//!
//! A part all of whose logits are -inf has `lse_i = -inf`, so that the whole row alone decides whether
//! there is a finite sum, and its gradient is 0. For the cotangents `g`, `h`, `k` of the whole's outputs
//! and its `lse`, the backward pass of a part takes the whole's `lse` and
//!
//! - `g' = g * e / n`;
//! - `h' = h - (1 - e) * g` with the label, 0 without;
//! - `k' = g * (2 * w * lse + e - e / n) + k` with the label,
//!   `g * (1 + 2 * w * lse - e / n) - h + k` without,
//!
//! which gives its columns of the whole's gradient: `g' - h' + k'` is the coefficient of `p_v` above, `h'` that
//! of `[v = y]`, and `-g' / (V / n)` the constant.
//!
//! Of entropies `H_i` of parts, with `w_i = exp(d_i) / s`, the whole's is `ln s - sum_i w_i (d_i - H_i)`, one
//! more sum; and a part's gradient for a cotangent of it is as above, with the whole's lse and entropy. The
//! whole's `argmax` is that of the first part whose `highest` is the largest of all.

#[cfg(feature = "operation")]
mod draw;
#[cfg(feature = "operation")]
pub mod operation;
pub mod reference;
#[cfg(feature = "operation")]
pub(crate) mod trained;

use crate::{Error, Labels, LogitsShape, Result};

/// Columns of a token whose log-probabilities are taken at most.
pub const MOST_COLUMNS: usize = 128;

/// The least temperature; its reciprocal is the largest.
const LEAST_TEMPERATURE: f64 = 1.0 / (1_u64 << 40) as f64;

/// The options of cross-entropy, the same for every backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// Tokens with this label are skipped.
    pub ignore_index: i64,
    /// `e`, the share of the target spread evenly over the vocabulary, in `[0, 1]`.
    pub label_smoothing: f64,
    /// `w`, the weight of `lse^2`, at least 0.
    pub z_loss: f64,
    /// `c`, the bound of `c * tanh(z / c)`, above 0.
    pub softcap: Option<f64>,
    /// `t`, which logits are divided by after softcap, above 0.
    pub temperature: f64,
}

impl Default for CrossEntropy {
    fn default() -> Self {
        Self {
            ignore_index: -100,
            label_smoothing: 0.0,
            z_loss: 0.0,
            softcap: None,
            temperature: 1.0,
        }
    }
}

/// What a label says about its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The column to predict.
    Column(usize),
    /// The token is skipped.
    Ignored,
    /// The label names no column.
    OutOfRange,
}

impl CrossEntropy {
    /// Checks the range of every option.
    ///
    /// # Errors
    /// The first option outside its range.
    pub fn validate(&self) -> Result<()> {
        let wrong = |name, value, requirement| Err(Error::Option { name, value, requirement });
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            return wrong("label_smoothing", self.label_smoothing, "in [0, 1]");
        }
        if !(self.z_loss >= 0.0 && self.z_loss.is_finite()) {
            return wrong("z_loss", self.z_loss, "finite and at least 0");
        }
        if let Some(cap) = self.softcap
            && !(cap > 0.0 && cap.is_finite())
        {
            return wrong("softcap", cap, "finite and above 0, or absent");
        }
        // Kernels take the reciprocal in f32.
        if !(self.temperature >= LEAST_TEMPERATURE && self.temperature <= 1.0 / LEAST_TEMPERATURE) {
            return wrong("temperature", self.temperature, "in [2^-40, 2^40]");
        }
        Ok(())
    }

    /// Whether logits are divided by anything.
    #[must_use]
    pub fn is_tempered(&self) -> bool {
        self.temperature != 1.0
    }

    /// `z`, under the cap where there is one, over the temperature.
    #[must_use]
    pub fn cap(&self, z: f64) -> f64 {
        self.softcap.map_or(z, |c| c * (z / c).tanh()) / self.temperature
    }

    /// The derivative of [`Self::cap`] at `z`.
    #[must_use]
    pub fn slope(&self, z: f64) -> f64 {
        // 1 - tanh^2 = sech^2, which does not cancel near saturation.
        self.softcap.map_or(1.0, |c| (z / c).cosh().powi(-2)) / self.temperature
    }

    /// What `label` means for a token of `vocab` columns.
    #[must_use]
    pub fn target(&self, label: i64, vocab: usize) -> Target {
        if label == self.ignore_index {
            return Target::Ignored;
        }
        match usize::try_from(label) {
            Ok(column) if column < vocab => Target::Column(column),
            _ => Target::OutOfRange,
        }
    }

    /// Checks that every label is a column or ignored.
    ///
    /// # Errors
    /// The number of labels is not T, or a label is out of range; the error names the first.
    pub fn check_labels(&self, labels: Labels<'_>, shape: LogitsShape) -> Result<()> {
        shape.check_tokens("labels", labels.len())?;
        let vocab = shape.vocab();
        match labels.iter().position(|label| self.target(label, vocab) == Target::OutOfRange) {
            None => Ok(()),
            Some(token) => Err(Error::LabelOutOfRange {
                token,
                label: labels.get(token),
                vocab,
                ignore_index: self.ignore_index,
            }),
        }
    }
}

/// How a scalar is made of per-token losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The weighted mean over tokens that are not ignored: `sum(w * loss) / sum(w)`.
    Mean,
    /// The weighted sum over tokens that are not ignored.
    Sum,
}

/// The factor of each token's loss in the reduced loss, which is also the cotangent of that loss
/// when the cotangent of the scalar is 1.
#[derive(Clone, Copy, Debug)]
pub struct TokenFactors<'a> {
    options: CrossEntropy,
    labels: Labels<'a>,
    weights: Option<&'a [f32]>,
    denominator: f64,
}

impl<'a> TokenFactors<'a> {
    /// The factors of `reduction` over tokens with `labels` and, where given, `weights` `[T]`
    /// (every weight is 1 where not).
    ///
    /// # Errors
    /// `weights` and `labels` differ in length.
    pub fn new(
        options: CrossEntropy,
        reduction: Reduction,
        labels: Labels<'a>,
        weights: Option<&'a [f32]>,
    ) -> Result<Self> {
        if let Some(weights) = weights {
            crate::error::check_length("weights", weights.len(), "[T]", labels.len())?;
        }
        let mut factors = Self { options, labels, weights, denominator: 1.0 };
        if reduction == Reduction::Mean {
            factors.denominator = (0..labels.len()).map(|token| factors.weight(token)).sum();
        }
        Ok(factors)
    }

    /// The weight of `token`: 0 when it is ignored.
    fn weight(&self, token: usize) -> f64 {
        if self.labels.get(token) == self.options.ignore_index {
            0.0
        } else {
            self.weights.map_or(1.0, |weights| f64::from(weights[token]))
        }
    }

    /// The factor of `token`. A factor of 0 means that the token takes no part: it adds exactly 0
    /// to the loss and its gradient row is exactly 0, whatever its logits. Over no counted token
    /// (a denominator of 0) every factor is 0.
    #[must_use]
    pub fn of(&self, token: usize) -> f64 {
        let weight = self.weight(token);
        if weight == 0.0 || self.denominator == 0.0 { 0.0 } else { weight / self.denominator }
    }

    /// The reduced loss of `losses` `[T]`, summed in token order.
    #[must_use]
    pub fn reduce(&self, losses: impl IntoIterator<Item = f64>) -> f64 {
        let terms = losses.into_iter().enumerate().map(|(token, loss)| {
            let factor = self.of(token);
            if factor == 0.0 { 0.0 } else { factor * loss }
        });
        terms.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_outside_their_range_are_named() {
        let refuse = |options: CrossEntropy| options.validate().unwrap_err().to_string();
        let base = CrossEntropy::default();
        assert_eq!(base.validate(), Ok(()));
        assert_eq!(
            refuse(CrossEntropy { label_smoothing: 1.5, ..base }),
            "label_smoothing is 1.5; it must be in [0, 1]"
        );
        assert!(refuse(CrossEntropy { label_smoothing: f64::NAN, ..base }).contains("NaN"));
        assert!(refuse(CrossEntropy { z_loss: -1e-4, ..base }).starts_with("z_loss is -0.0001"));
        assert!(refuse(CrossEntropy { softcap: Some(0.0), ..base }).starts_with("softcap is 0;"));
        for temperature in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let message = refuse(CrossEntropy { temperature, ..base });
            assert!(message.starts_with("temperature is ") && message.contains("; it must be in"));
        }
    }

    #[test]
    fn the_first_label_out_of_range_is_named() {
        let shape = LogitsShape::new(4, 10).unwrap();
        let check = |labels: &[i32]| CrossEntropy::default().check_labels(labels.into(), shape);
        assert_eq!(check(&[0, 9, -100, 5]), Ok(()));
        assert_eq!(
            check(&[0, 10, -1, 5]).unwrap_err().to_string(),
            "label 10 of token 1 is outside [0, 10) and is not ignore_index (-100)"
        );
        assert_eq!(check(&[0]).unwrap_err().to_string(), "labels holds 1 elements; [T] needs 4");
    }

    #[test]
    fn a_mean_over_nothing_is_zero() {
        let labels = [-100_i64, -100];
        let options = CrossEntropy::default();
        let factors =
            TokenFactors::new(options, Reduction::Mean, labels.as_slice().into(), None).unwrap();
        assert_eq!(factors.of(0), 0.0);
        assert_eq!(factors.reduce([f64::NAN, 1.0]), 0.0);
    }

    #[test]
    fn a_mean_divides_by_the_weight_of_counted_tokens() {
        let labels = [1_i32, -100, 2];
        let weights = [2.0, 100.0, 6.0];
        let options = CrossEntropy::default();
        let labels = Labels::from(labels.as_slice());
        let factors = TokenFactors::new(options, Reduction::Mean, labels, Some(&weights)).unwrap();
        assert_eq!([factors.of(0), factors.of(1), factors.of(2)], [0.25, 0.0, 0.75]);
        assert_eq!(factors.reduce([4.0, 9.0, 8.0]), 7.0);
    }
}

//! Causal depthwise convolution of sequences: the contract of every backend, and its float64 reference.
//!
//! It is the short convolution of Gu and Dao, "Mamba", 2023, and of gated linear attention. For a sequence x
//! `[T, C]` of dtype E (f32, bf16 or f16), a weight w `[C, W]` of its own dtype with W from 2 to 4, and a bias b
//! `[C]` of the weight's dtype (0 if there is none):
//!
//! - `z[t, c] = sum_j w[c, j] x[t - W + 1 + j, c] + b[c]`, summed in f32;
//! - `y = z`, or `y = z / (1 + exp(-z))` with SiLU; rounded once to E.
//!
//! Rows before the first are those of an initial state `[W - 1, C]` in E, or 0. With segment ids `[T]` the
//! convolution starts anew where the id changes: terms across a change are 0. The state belongs to the first
//! segment.
//!
//! The backward pass recomputes z. With `g = dy act'(z)` in f32:
//!
//! - `dx[s, c] = sum_k w[c, W - 1 - k] g[s + k, c]`, over the tokens of the same segment, rounded once to E; the
//!   gradient of the state is the same sum at `s < 0`;
//! - `dw[c, j] = sum_t g[t, c] x[t - W + 1 + j, c]` and `db[c] = sum_t g[t, c]`, in f32, as partial sums over
//!   blocks of [`BLOCK_TOKENS`] tokens of each sequence. No number depends on how many threads there are.

#[cfg(feature = "operation")]
pub mod operation;

use crate::error::check_length;
use crate::shape::is_addressable;
use crate::{Error, Result};

/// Tokens of a partial sum.
pub const BLOCK_TOKENS: usize = 128;

/// The widths that kernels have.
pub const WIDTHS: std::ops::RangeInclusive<usize> = 2..=4;

/// The options and the shape of B sequences `[B, T, C]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CausalConv1d {
    /// W.
    pub width: usize,
    /// Whether SiLU is applied to the sums.
    pub silu: bool,
    /// B.
    pub batch: usize,
    /// T.
    pub tokens: usize,
    /// C.
    pub channels: usize,
}

impl CausalConv1d {
    /// Checks the width, and that memory can address all arrays.
    ///
    /// # Errors
    /// A width outside [`WIDTHS`], or too many elements.
    pub fn validate(&self) -> Result<()> {
        let Self { width, batch, tokens, channels, .. } = *self;
        if !WIDTHS.contains(&width) {
            let requirement = "from 2 to 4";
            return Err(Error::Option { name: "width", value: width as f64, requirement });
        }
        // The state counts as tokens, and four bytes is the widest element.
        if !is_addressable([batch.max(1), tokens.saturating_add(width), channels.max(1), 4 * width])
        {
            let requirement = "its arrays must fit the address space";
            return Err(Error::Shape { tokens, vocab: channels, requirement });
        }
        Ok(())
    }

    /// The number of partial sums of a sequence.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.tokens.div_ceil(BLOCK_TOKENS)
    }

    /// How many tokens before token `t` the convolution sees there, the state's included: at most W - 1, and
    /// those of its segment.
    #[must_use]
    #[inline]
    pub fn reach(&self, segments: Option<&[i32]>, t: usize) -> usize {
        let most = self.width - 1;
        let Some(segments) = segments else { return most };
        let before = most.min(t);
        (1..=before).find(|k| segments[t - k] != segments[t]).map_or(most, |k| k - 1)
    }

    /// Checks the length of a `[B, T, C]` buffer called `name`.
    ///
    /// # Errors
    /// Another length.
    pub fn check(&self, name: &'static str, length: usize) -> Result<()> {
        check_length(name, length, "[B, T, C]", self.batch * self.tokens * self.channels)
    }

    /// Checks the length of a `[B, W - 1, C]` buffer called `name`.
    ///
    /// # Errors
    /// Another length.
    pub fn check_state(&self, name: &'static str, length: usize) -> Result<()> {
        let expected = self.batch * (self.width - 1) * self.channels;
        check_length(name, length, "[B, W - 1, C]", expected)
    }

    /// Checks the length of a `[B, T]` buffer called `name`.
    ///
    /// # Errors
    /// Another length.
    pub fn check_segments(&self, name: &'static str, length: usize) -> Result<()> {
        check_length(name, length, "[B, T]", self.batch * self.tokens)
    }

    /// The number of arrays of `each` elements in a buffer called `name`, each for an equal number of sequences.
    ///
    /// # Errors
    /// It holds no whole number of them, or one that does not divide B.
    pub fn groups(&self, name: &'static str, length: usize, each: usize) -> Result<usize> {
        let count = length.checked_div(each).unwrap_or(1);
        let divides = if count == 0 { self.batch == 0 } else { self.batch.is_multiple_of(count) };
        let expected = if divides { count * each } else { each };
        check_length(name, length, "C x W or C (or G of them, where G divides B)", expected)?;
        Ok(count)
    }
}

/// One sequence in float64.
#[derive(Clone, Copy, Debug)]
pub struct Reference<'a> {
    /// Options, and the shape; B is not read.
    pub conv: CausalConv1d,
    /// `[T, C]`.
    pub x: &'a [f64],
    /// `[C, W]`.
    pub weight: &'a [f64],
    /// `[C]`.
    pub bias: Option<&'a [f64]>,
    /// `[W - 1, C]`.
    pub state: Option<&'a [f64]>,
    /// `[T]`.
    pub segments: Option<&'a [i32]>,
}

/// Gradients of one sequence in float64.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// `[T, C]`.
    pub x: Vec<f64>,
    /// `[C, W]`.
    pub weight: Vec<f64>,
    /// `[C]`.
    pub bias: Vec<f64>,
    /// `[W - 1, C]`.
    pub state: Vec<f64>,
}

impl Reference<'_> {
    /// Row `t - k` of the input, of the state where that is negative.
    fn input(&self, t: usize, k: usize, channel: usize) -> f64 {
        let channels = self.conv.channels;
        if t >= k {
            return self.x[(t - k) * channels + channel];
        }
        let row = t + self.conv.width - 1 - k;
        self.state.map_or(0.0, |state| state[row * channels + channel])
    }

    fn pre_activation(&self, t: usize, channel: usize) -> f64 {
        let width = self.conv.width;
        let bias = self.bias.map_or(0.0, |bias| bias[channel]);
        (0..=self.conv.reach(self.segments, t)).fold(bias, |sum, k| {
            sum + self.weight[channel * width + width - 1 - k] * self.input(t, k, channel)
        })
    }

    /// y `[T, C]`.
    #[must_use]
    pub fn forward(&self) -> Vec<f64> {
        let CausalConv1d { tokens, channels, silu, .. } = self.conv;
        let cells = (0..tokens).flat_map(|t| (0..channels).map(move |channel| (t, channel)));
        cells
            .map(|(t, channel)| self.pre_activation(t, channel))
            .map(|z| if silu { z / (1.0 + (-z).exp()) } else { z })
            .collect()
    }

    /// The gradients for the cotangent `dy` `[T, C]`.
    #[must_use]
    pub fn backward(&self, dy: &[f64]) -> Gradients {
        let CausalConv1d { width, tokens, channels, silu, .. } = self.conv;
        // The state's rows stand before those of x.
        let mut rows = vec![0.0; (width - 1 + tokens) * channels];
        let mut weight = vec![0.0; channels * width];
        let mut bias = vec![0.0; channels];
        for t in 0..tokens {
            for channel in 0..channels {
                let z = self.pre_activation(t, channel);
                let sigmoid = 1.0 / (1.0 + (-z).exp());
                let slope = if silu { sigmoid * (1.0 + z * (1.0 - sigmoid)) } else { 1.0 };
                let g = dy[t * channels + channel] * slope;
                bias[channel] += g;
                for k in 0..=self.conv.reach(self.segments, t) {
                    let w = channel * width + width - 1 - k;
                    weight[w] += g * self.input(t, k, channel);
                    rows[(t + width - 1 - k) * channels + channel] += g * self.weight[w];
                }
            }
        }
        let x = rows.split_off((width - 1) * channels);
        Gradients { x, weight, bias, state: rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONV: CausalConv1d =
        CausalConv1d { width: 3, silu: false, batch: 1, tokens: 4, channels: 1 };

    fn reference<'a>(x: &'a [f64], weight: &'a [f64]) -> Reference<'a> {
        Reference { conv: CONV, x, weight, bias: None, state: None, segments: None }
    }

    /// Values worked out by hand.
    #[test]
    fn a_sequence_by_hand() {
        let (x, weight) = ([1.0, 2.0, 3.0, 4.0], [100.0, 10.0, 1.0]);
        let plain = reference(&x, &weight);
        assert_eq!(plain.forward(), [1.0, 12.0, 123.0, 234.0]);
        let biased = Reference { bias: Some(&[0.5]), ..plain };
        assert_eq!(biased.forward(), [1.5, 12.5, 123.5, 234.5]);
        let continued = Reference { state: Some(&[8.0, 9.0]), ..plain };
        assert_eq!(continued.forward(), [891.0, 912.0, 123.0, 234.0]);
        // An id that comes again is a segment of its own.
        let packed = Reference { segments: Some(&[7, 7, 2, 7]), ..continued };
        assert_eq!(packed.forward(), [891.0, 912.0, 3.0, 4.0]);
        let gradients = packed.backward(&[1.0, 1.0, 1.0, 1.0]);
        assert_eq!(gradients.x, [11.0, 1.0, 1.0, 1.0]);
        assert_eq!(gradients.state, [100.0, 110.0]);
        assert_eq!(gradients.weight, [17.0, 10.0, 10.0]);
        assert_eq!(gradients.bias, [4.0]);
    }

    #[test]
    fn gradients_are_slopes() {
        let conv = CausalConv1d { width: 4, silu: true, batch: 1, tokens: 6, channels: 2 };
        let wave = |count: usize, phase: f64| -> Vec<f64> {
            (0..count).map(|i| (1.3 * i as f64 + phase).sin()).collect()
        };
        let segments = [0, 0, 0, 1, 1, 1];
        let arrays = [wave(12, 0.1), wave(8, 0.2), wave(2, 0.3), wave(6, 0.4)];
        let dy = wave(12, 0.5);
        let of = |arrays: &[Vec<f64>; 4], dy: &[f64]| {
            let [x, weight, bias, state] = arrays;
            let (bias, state) = (Some(&bias[..]), Some(&state[..]));
            let one = Reference { conv, x, weight, bias, state, segments: Some(&segments) };
            let loss: f64 = one.forward().iter().zip(dy).map(|(y, dy)| y * dy).sum();
            (loss, one.backward(dy))
        };
        let Gradients { x, weight, bias, state } = of(&arrays, &dy).1;
        for (index, gradient) in [x, weight, bias, state].iter().enumerate() {
            for (place, found) in gradient.iter().enumerate() {
                let [above, below] = [1e-5, -1e-5].map(|step| {
                    let mut moved = arrays.clone();
                    moved[index][place] += step;
                    of(&moved, &dy).0
                });
                let slope = (above - below) / 2e-5;
                assert!((slope - found).abs() < 1e-8, "{index} {place}: {found}, {slope}");
            }
        }
    }

    #[test]
    fn shapes_that_no_kernel_takes_are_refused() {
        for width in [0, 1, 5] {
            let message = CausalConv1d { width, ..CONV }.validate().unwrap_err().to_string();
            assert_eq!(message, format!("width is {width}; it must be from 2 to 4"));
        }
        assert!(CausalConv1d { tokens: usize::MAX / 8, ..CONV }.validate().is_err());
        let of_four = CausalConv1d { batch: 4, ..CONV };
        assert_eq!([3, 6, 12].map(|length| of_four.groups("w", length, 3)), [Ok(1), Ok(2), Ok(4)]);
        assert!(of_four.groups("w", 9, 3).is_err() && of_four.groups("w", 4, 3).is_err());
    }
}

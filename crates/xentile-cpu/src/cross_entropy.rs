//! Tiled cross-entropy over logits: forward, backward from saved lse, and both at once.
//!
//! Work is cut into tiles of `time_block` tokens, one task each. A task walks its rows in blocks of
//! `block_size` columns, twice where it needs both passes:
//!
//! 1. `statistics`: the sum of `exp(z - shift)`, and of `z` where smoothing asks for it. Sums run
//!    in f32 lanes over at most 4096 columns, then in float64.
//! 2. `gradient`: `exp` again, the contract's formula, one write. The row is still in the
//!    second-level cache when tiles are a few tokens high, so memory is read once and written once.
//!
//! What falls between the passes is a few float64 operations a token.

mod gradient;
mod matrix;
mod statistics;

use xentile::cross_entropy::{CrossEntropy, Reduction, Target, TokenFactors};
use xentile::{Element, Labels, LogitsShape, Result, Tile};

use crate::math::EXP_SCALE;
use crate::parallel::Shared;
use crate::{Isa, Parallel};
use gradient::{Gradient, RowGradient};
use matrix::Matrix;
use statistics::{Label, RowStatistics, Statistics};

/// The name of this operation's table of tuned tiles.
const TUNED: &str = "cross_entropy.cpu";

/// How a kernel is to run.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    /// The instruction set.
    pub isa: Isa,
    /// The tile; where absent, the one tuned for the dtype and vocabulary.
    pub tile: Option<Tile>,
    /// The threads.
    pub pool: &'a dyn Parallel,
}

/// Outputs that a caller wants for each token, each `[T]` in f32.
#[derive(Debug, Default)]
pub struct TokenOutputs<'a> {
    /// `per_token_loss`.
    pub loss: Option<&'a mut [f32]>,
    /// `per_token_logps`.
    pub logps: Option<&'a mut [f32]>,
    /// `lse`, rounded to f32.
    pub lse: Option<&'a mut [f32]>,
    /// What that rounding lost, `lse - f32(lse)`: with it the backward pass is as exact on logits
    /// around 1e4 as on logits around 0.
    pub lse_low: Option<&'a mut [f32]>,
}

/// What a forward pass leaves for the backward pass, each `[T]` in f32.
#[derive(Clone, Copy, Debug)]
pub struct SavedLse<'a> {
    /// [`TokenOutputs::lse`].
    pub lse: &'a [f32],
    /// [`TokenOutputs::lse_low`]; zeros where absent.
    pub lse_low: Option<&'a [f32]>,
}

/// The cotangents of the per-token outputs, each `[T]` in f32; zeros where absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cotangents<'a> {
    /// Of `per_token_loss`.
    pub loss: Option<&'a [f32]>,
    /// Of `per_token_logps`.
    pub logps: Option<&'a [f32]>,
    /// Of `lse`.
    pub lse: Option<&'a [f32]>,
}

/// The reduction of a fused forward and backward pass.
#[derive(Clone, Copy, Debug)]
pub struct Reduce<'a> {
    /// Mean or sum.
    pub reduction: Reduction,
    /// A weight for each token, `[T]`; ones where absent.
    pub weights: Option<&'a [f32]>,
    /// The cotangent of the scalar loss.
    pub cotangent: f64,
}

/// Cross-entropy over logits `[T, V]` for one set of labels.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    options: CrossEntropy,
    shape: LogitsShape,
    labels: Labels<'a>,
    launch: Launch<'a>,
}

impl<'a> Kernel<'a> {
    /// A kernel for logits of `shape` and `labels` `[T]`.
    ///
    /// # Errors
    /// An option outside its range, labels that are not `[T]`, a label out of range.
    pub fn new(
        options: CrossEntropy,
        shape: LogitsShape,
        labels: Labels<'a>,
        launch: Launch<'a>,
    ) -> Result<Self> {
        options.check_labels(labels, shape)?;
        Self::with_unchecked_labels(options, shape, labels, launch)
    }

    /// As [`Self::new`], but a token whose label is out of range gets NaN for its loss, logps and
    /// gradient row, which is what XLA programs need: they cannot fail half-way.
    ///
    /// # Errors
    /// An option outside its range, labels that are not `[T]`.
    pub fn with_unchecked_labels(
        options: CrossEntropy,
        shape: LogitsShape,
        labels: Labels<'a>,
        launch: Launch<'a>,
    ) -> Result<Self> {
        options.validate()?;
        shape.check_tokens("labels", labels.len())?;
        Ok(Self { options, shape, labels, launch })
    }

    /// The tile that logits of dtype `E` are worked on in.
    #[must_use]
    pub fn tile<E: Element>(&self) -> Tile {
        self.launch.tile.unwrap_or_else(|| default_tile::<E>(self.shape.vocab()))
    }

    /// Fills what `outputs` asks for. Reads logits once, and not at all the rows of ignored tokens
    /// unless their `lse` is wanted.
    ///
    /// # Errors
    /// `logits` is not `[T, V]`, or an output not `[T]`.
    pub fn forward<E: Element>(&self, logits: &[E], outputs: TokenOutputs<'_>) -> Result<()> {
        self.shape.check_matrix("logits", logits.len())?;
        let outputs = Outputs::new(self.shape, outputs)?;
        let matrix = Matrix::read_only(logits, self.shape);
        let tile = self.tile::<E>();
        self.for_each_tile(tile, &|first, count| {
            let want = |token| outputs.want(self, token);
            let rows = self.statistics(&matrix, tile, first, count, want, None);
            for (row, token) in rows.iter().zip(first..) {
                // SAFETY: this task alone has this token.
                unsafe { outputs.write(token, self.token_values(&matrix, token, row)) };
            }
        });
        Ok(())
    }

    /// Writes the gradient for `cotangents` to `dlogits`. Reads logits once and writes once; the
    /// rows of ignored tokens are written without being read.
    ///
    /// # Errors
    /// `logits` or `dlogits` is not `[T, V]`, or another argument not `[T]`.
    pub fn backward<E: Element>(
        &self,
        logits: &[E],
        saved: SavedLse<'_>,
        cotangents: Cotangents<'_>,
        dlogits: &mut [E],
    ) -> Result<()> {
        self.shape.check_matrix("logits", logits.len())?;
        self.shape.check_matrix("dlogits", dlogits.len())?;
        self.backward_over(&Matrix::apart(logits, dlogits, self.shape), saved, cotangents)
    }

    /// As [`Self::backward`], with the gradient in the place of the logits.
    ///
    /// # Errors
    /// As for [`Self::backward`].
    pub fn backward_in_place<E: Element>(
        &self,
        logits: &mut [E],
        saved: SavedLse<'_>,
        cotangents: Cotangents<'_>,
    ) -> Result<()> {
        self.shape.check_matrix("logits", logits.len())?;
        self.backward_over(&Matrix::in_place(logits, self.shape), saved, cotangents)
    }

    /// The reduced loss, with its gradient written to `dlogits` and whatever `outputs` asks for
    /// filled. Logits come from memory once (where a tile's rows stay in the cache) and dlogits go
    /// there once.
    ///
    /// # Errors
    /// `logits` or `dlogits` is not `[T, V]`, or another argument not `[T]`.
    pub fn value_and_grad<E: Element>(
        &self,
        logits: &[E],
        reduce: Reduce<'_>,
        outputs: TokenOutputs<'_>,
        dlogits: &mut [E],
    ) -> Result<f64> {
        self.shape.check_matrix("logits", logits.len())?;
        self.shape.check_matrix("dlogits", dlogits.len())?;
        self.value_and_grad_over(&Matrix::apart(logits, dlogits, self.shape), reduce, outputs)
    }

    /// As [`Self::value_and_grad`], with the gradient in the place of the logits.
    ///
    /// # Errors
    /// As for [`Self::value_and_grad`].
    pub fn value_and_grad_in_place<E: Element>(
        &self,
        logits: &mut [E],
        reduce: Reduce<'_>,
        outputs: TokenOutputs<'_>,
    ) -> Result<f64> {
        self.shape.check_matrix("logits", logits.len())?;
        self.value_and_grad_over(&Matrix::in_place(logits, self.shape), reduce, outputs)
    }

    fn backward_over<E: Element>(
        &self,
        matrix: &Matrix<'_, E>,
        saved: SavedLse<'_>,
        cotangents: Cotangents<'_>,
    ) -> Result<()> {
        self.shape.check_tokens("lse", saved.lse.len())?;
        let optional = [
            ("lse_low", saved.lse_low),
            ("loss cotangents", cotangents.loss),
            ("logps cotangents", cotangents.logps),
            ("lse cotangents", cotangents.lse),
        ];
        for (name, argument) in optional {
            argument.map_or(Ok(()), |argument| self.shape.check_tokens(name, argument.len()))?;
        }
        let at = |values: Option<&[f32]>, token: usize| {
            values.map_or(0.0, |values| f64::from(values[token]))
        };
        let tile = self.tile::<E>();
        self.for_each_tile(tile, &|first, count| {
            let rows: Vec<_> = (first..first + count)
                .map(|token| {
                    let lse = f64::from(saved.lse[token]) + at(saved.lse_low, token);
                    let cotangents = [cotangents.loss, cotangents.logps, cotangents.lse]
                        .map(|cotangent| at(cotangent, token));
                    self.row_gradient(matrix, token, lse, cotangents)
                })
                .collect();
            self.gradient(matrix, tile, first, &rows, None);
        });
        Ok(())
    }

    fn value_and_grad_over<E: Element>(
        &self,
        matrix: &Matrix<'_, E>,
        reduce: Reduce<'_>,
        outputs: TokenOutputs<'_>,
    ) -> Result<f64> {
        let factors =
            TokenFactors::new(self.options, reduce.reduction, self.labels, reduce.weights)?;
        let outputs = Outputs::new(self.shape, outputs)?;
        let mut losses = vec![0.0; self.shape.tokens()];
        let shared_losses = Shared::new(&mut losses);
        let tile = self.tile::<E>();
        let ahead = Some(tile.time_block());
        self.for_each_tile(tile, &|first, count| {
            let want = |token| factors.of(token) != 0.0 || outputs.want(self, token);
            let statistics = self.statistics(matrix, tile, first, count, want, ahead);
            let rows: Vec<_> = statistics
                .iter()
                .zip(first..)
                .map(|(row, token)| {
                    let values = self.token_values(matrix, token, row);
                    // SAFETY: this task alone has this token.
                    unsafe {
                        shared_losses.slice(token, 1)[0] = values.loss;
                        outputs.write(token, values);
                    }
                    match factors.of(token) {
                        0.0 => RowGradient::Fill(0.0),
                        factor => {
                            // As the backward pass would read it, so that both give the same bits.
                            let (high, low) = split(values.lse);
                            let lse = f64::from(high) + f64::from(low);
                            let cotangents = [reduce.cotangent * factor, 0.0, 0.0];
                            self.row_gradient(matrix, token, lse, cotangents)
                        }
                    }
                })
                .collect();
            self.gradient(matrix, tile, first, &rows, ahead);
        });
        Ok(factors.reduce(losses))
    }

    /// Calls `task` with the first token and the number of tokens of every tile.
    fn for_each_tile(&self, tile: Tile, task: &(dyn Fn(usize, usize) + Sync)) {
        let (tokens, step) = (self.shape.tokens(), tile.time_block());
        self.launch.pool.run(tokens.div_ceil(step), &|index| {
            let first = index * step;
            task(first, step.min(tokens - first));
        });
    }

    fn statistics<E: Element>(
        &self,
        matrix: &Matrix<'_, E>,
        tile: Tile,
        first: usize,
        count: usize,
        want: impl Fn(usize) -> bool,
        ahead: Option<usize>,
    ) -> Vec<RowStatistics> {
        let mut rows: Vec<_> = (first..first + count)
            .map(|token| RowStatistics::new(want(token), self.label(matrix, token)))
            .collect();
        self.launch.isa.run(Statistics {
            matrix,
            first,
            rows: &mut rows,
            block_size: tile.block_size(),
            softcap: self.options.softcap,
            mean: self.options.label_smoothing != 0.0,
            ahead,
        });
        rows
    }

    fn gradient<E: Element>(
        &self,
        matrix: &Matrix<'_, E>,
        tile: Tile,
        first: usize,
        rows: &[RowGradient],
        ahead: Option<usize>,
    ) {
        self.launch.isa.run(Gradient {
            matrix,
            first,
            rows,
            block_size: tile.block_size(),
            softcap: self.options.softcap,
            ahead,
        });
    }

    /// The labelled column of `token`; none where the token is ignored or its label out of range.
    fn label<E: Element>(&self, matrix: &Matrix<'_, E>, token: usize) -> Option<Label> {
        match self.options.target(self.labels.get(token), self.shape.vocab()) {
            Target::Ignored | Target::OutOfRange => None,
            Target::Column(column) => {
                // SAFETY: a column of a row that this task alone has.
                let logit = unsafe { *matrix.logits(token).add(column) }.to_f64();
                let logit = self.options.softcap.map_or(logit, |c| c * (logit / c).tanh());
                Some(Label { column, logit })
            }
        }
    }

    /// What stands for loss, logps and gradient of a `token` without a labelled column.
    fn without_label(&self, token: usize) -> f32 {
        if self.labels.get(token) == self.options.ignore_index { 0.0 } else { f32::NAN }
    }

    /// The contract's forward values of `token`, in float64.
    fn token_values<E: Element>(
        &self,
        matrix: &Matrix<'_, E>,
        token: usize,
        row: &RowStatistics,
    ) -> TokenValues {
        let lse = row.lse();
        let Some(label) = self.label(matrix, token) else {
            let value = self.without_label(token);
            return TokenValues { loss: value.into(), logps: value.into(), lse };
        };
        let (e, w) = (self.options.label_smoothing, self.options.z_loss);
        let logps = label.logit - lse;
        let mut loss = (1.0 - e) * -logps + w * lse * lse;
        if e != 0.0 {
            loss += e * (lse - row.mean(self.shape.vocab()));
        }
        TokenValues { loss, logps, lse }
    }

    /// The contract's gradient of `token` for cotangents `g`, `h`, `k`, as coefficients of a row.
    fn row_gradient<E: Element>(
        &self,
        matrix: &Matrix<'_, E>,
        token: usize,
        lse: f64,
        [g, h, k]: [f64; 3],
    ) -> RowGradient {
        let Some(label) = self.label(matrix, token) else {
            return RowGradient::Fill(self.without_label(token));
        };
        if !lse.is_finite() {
            return RowGradient::Fill(f32::NAN);
        }
        let (e, w) = (self.options.label_smoothing, self.options.z_loss);
        let probability = g * (1.0 + 2.0 * w * lse) - h + k;
        let constant = -g * e / self.shape.vocab() as f64;
        // p = exp(z - shift) * exp(shift - lse). The shift has few enough bits for z - shift to be
        // exact; what it leaves of lse is a factor near 1, computed in float64.
        let shift =
            if lse.abs() < EIGHTHS_BELOW { ((lse * 8.0).round() / 8.0) as f32 } else { lse as f32 };
        RowGradient::Formula {
            shift,
            probability: (probability * (f64::from(shift) - lse).exp()) as f32 / EXP_SCALE,
            constant: constant as f32,
            label: label.column,
            at_label: if label.logit == f64::NEG_INFINITY {
                0.0
            } else {
                // a p - b = a (p - 1) + (a - b), which does not cancel as p nears 1.
                let p_less_one = (label.logit - lse).exp_m1();
                let rest = g * (2.0 * w * lse + e) + k + constant;
                let dz = probability * p_less_one + rest;
                let slope = self.options.softcap.map_or(1.0, |c| 1.0 - (label.logit / c).powi(2));
                dz * slope
            },
        }
    }
}

/// Below this every multiple of 1/8 is an f32.
const EIGHTHS_BELOW: f64 = (1 << 20) as f64;

/// The tile used for logits of dtype `E` and `vocab` columns where none is asked for.
#[must_use]
pub fn default_tile<E: Element>(vocab: usize) -> Tile {
    let tuned = xentile::tuned_tile(TUNED, E::DTYPE, vocab).expect("carried tiles are positive");
    tuned.expect("every dtype has a tuned tile")
}

/// `x` as an f32 and the f32 nearest to what that lost.
fn split(x: f64) -> (f32, f32) {
    let high = x as f32;
    let low = (x - f64::from(high)) as f32;
    // An infinite or NaN lse has no remainder.
    (high, if low.is_nan() { 0.0 } else { low })
}

/// The forward values of one token.
#[derive(Clone, Copy)]
struct TokenValues {
    loss: f64,
    logps: f64,
    lse: f64,
}

/// [`TokenOutputs`] checked and shared among tasks.
struct Outputs<'a> {
    loss: Option<Shared<'a, f32>>,
    logps: Option<Shared<'a, f32>>,
    lse: Option<Shared<'a, f32>>,
    lse_low: Option<Shared<'a, f32>>,
}

impl<'a> Outputs<'a> {
    fn new(shape: LogitsShape, outputs: TokenOutputs<'a>) -> Result<Self> {
        let share = |name, output: Option<&'a mut [f32]>| match output {
            None => Ok(None),
            Some(output) => {
                shape.check_tokens(name, output.len())?;
                Ok(Some(Shared::new(output)))
            }
        };
        Ok(Self {
            loss: share("loss", outputs.loss)?,
            logps: share("logps", outputs.logps)?,
            lse: share("lse", outputs.lse)?,
            lse_low: share("lse_low", outputs.lse_low)?,
        })
    }

    /// Whether some output of `token` depends on its logits.
    fn want(&self, kernel: &Kernel<'_>, token: usize) -> bool {
        let target = || kernel.options.target(kernel.labels.get(token), kernel.shape.vocab());
        self.lse.is_some()
            || self.lse_low.is_some()
            || (self.loss.is_some() || self.logps.is_some())
                && matches!(target(), Target::Column(_))
    }

    /// # Safety
    /// No other task writes `token`.
    unsafe fn write(&self, token: usize, values: TokenValues) {
        let (high, low) = split(values.lse);
        let outputs = [
            (&self.loss, values.loss as f32),
            (&self.logps, values.logps as f32),
            (&self.lse, high),
            (&self.lse_low, low),
        ];
        for (output, value) in outputs {
            if let Some(output) = output {
                // SAFETY: the caller alone has this token.
                unsafe { output.slice(token, 1)[0] = value };
            }
        }
    }
}

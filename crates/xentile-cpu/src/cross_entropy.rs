//! Tiled cross-entropy over logits: forward, backward from saved lse, and both at once.
//!
//! A task is a tile of `time_block` tokens. It processes its rows in blocks of `block_size` columns, twice if
//! it needs both passes:
//!
//! 1. `statistics`: the sum of `exp(z - shift)`, and of `z` where smoothing asks for it. Sums run
//!    in f32 lanes over at most 4096 columns, then in float64.
//! 2. `gradient`: `exp` again, the contract's formula, one write. The row is still in the
//!    second-level cache when tiles are a few tokens high, so memory is read once and written once.
//!
//! Between the passes there are a few float64 operations per token.
//!
//! A temperature and auxiliary outputs have passes of their own (`whole`), so that other calls do not pay for
//! them.

mod column_block;
#[cfg(feature = "operation")]
mod dense;
mod gradient;
mod matrix;
#[cfg(feature = "operation")]
pub(crate) mod operation;
mod passes;
mod short;
mod statistics;
mod whole;

use std::ops::Range;

use xentile::cross_entropy::{CrossEntropy, Reduction, Target, TokenFactors};
use xentile::{Element, Labels, LogitsShape, Result, Tile};

use crate::math::EXP_SCALE;
use crate::parallel::Shared;
use crate::{InOut, Isa, Parallel};
pub(crate) use column_block::Scaled;
pub(crate) use gradient::Gradient;
use gradient::RowGradient;
use matrix::Matrix;
use passes::Passes;
use statistics::Label;
pub(crate) use statistics::{RowStatistics, Statistics};

/// Elements of a task of short rows: enough to make the overhead of a task small.
const SHORT_TASK: usize = 1 << 16;

/// The least number of elements for which idle threads should share rows, given the cost of waking threads once
/// more: about 20 us of a thread with AVX-512.
const WORTH_SHARING: usize = 1 << 16;

/// The name of this operation's table of tuned tiles.
const TUNED: &str = "cross_entropy.cpu";

/// Options of a launch.
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
    /// The rounding error `lse - f32(lse)`, with which the backward pass is as exact for logits around 1e4 as
    /// for logits around 0.
    pub lse_low: Option<&'a mut [f32]>,
    /// Whether a masked token (ignored or, in a fused pass, with a cotangent of 0) has outputs of 0, so that its
    /// logits are not read. Otherwise its outputs follow the contract.
    pub zero_masked: bool,
}

/// The residuals of a forward pass for the backward pass, each `[T]` in f32.
#[derive(Clone, Copy, Debug)]
pub struct SavedLse<'a> {
    /// [`TokenOutputs::lse`].
    pub lse: &'a [f32],
    /// [`TokenOutputs::lse_low`]; zeros where absent.
    pub lse_low: Option<&'a [f32]>,
}

impl SavedLse<'_> {
    /// `lse` of `token` with its rounding error added back.
    pub(crate) fn exact(&self, token: usize) -> f64 {
        f64::from(self.lse[token]) + at(self.lse_low, token)
    }

    pub(crate) fn check(&self, shape: LogitsShape) -> Result<()> {
        shape.check_tokens("lse", self.lse.len())?;
        self.lse_low.map_or(Ok(()), |low| shape.check_tokens("lse_low", low.len()))
    }
}

/// Auxiliary outputs for each token, each `[T]`.
#[derive(Debug)]
pub struct DistributionOutputs<'a> {
    /// `entropy`: 0 for ignored tokens.
    pub entropy: &'a mut [f32],
    /// `highest`.
    pub highest: &'a mut [f32],
    /// `argmax`: -1 for a row without a finite sum, and for a row that is not read.
    pub argmax: &'a mut [i32],
}

/// The residuals and cotangents of entropies, each `[T]` in f32.
#[derive(Clone, Copy, Debug)]
pub struct EntropyCotangents<'a> {
    /// [`DistributionOutputs::entropy`].
    pub entropy: &'a [f32],
    /// The cotangents of the entropy.
    pub dentropy: &'a [f32],
}

/// The value of `token`; 0 where there are none.
fn at(values: Option<&[f32]>, token: usize) -> f64 {
    values.map_or(0.0, |values| f64::from(values[token]))
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

impl Cotangents<'_> {
    /// The cotangents of loss, logps and lse of `token`.
    pub(crate) fn of(&self, token: usize) -> [f64; 3] {
        [self.loss, self.logps, self.lse].map(|cotangent| at(cotangent, token))
    }

    pub(crate) fn check(&self, shape: LogitsShape) -> Result<()> {
        let named = [
            ("loss cotangents", self.loss),
            ("logps cotangents", self.logps),
            ("lse cotangents", self.lse),
        ];
        named.into_iter().try_for_each(|(name, cotangent)| {
            cotangent.map_or(Ok(()), |cotangent| shape.check_tokens(name, cotangent.len()))
        })
    }
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

    /// As [`Self::new`], but a token whose label is out of range has a loss, logps and gradient row of NaN, since
    /// XLA programs cannot fail.
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
        // Kernels multiply by the reciprocal, so the label's logit must too.
        let temperature = 1.0 / f64::from((1.0 / options.temperature) as f32);
        let options = CrossEntropy { temperature, ..options };
        Ok(Self { options, shape, labels, launch })
    }

    /// The tile for logits of dtype `E`.
    #[must_use]
    pub fn tile<E: Element>(&self) -> Tile {
        self.launch.tile.unwrap_or_else(|| default_tile::<E>(self.shape.vocab()))
    }

    /// Fills the requested `outputs`. Reads logits once; rows of ignored tokens are read only if their `lse` is
    /// requested without [`TokenOutputs::zero_masked`].
    ///
    /// # Errors
    /// `logits` is not `[T, V]`, or an output not `[T]`.
    pub fn forward<E: Element>(&self, logits: &[E], outputs: TokenOutputs<'_>) -> Result<()> {
        let matrix = Matrix::read_only(logits, self.shape)?;
        let outputs = Outputs::new(self.shape, outputs)?;
        let work = Work { outputs: Some(&outputs), saved: None, cotangents: None };
        self.run(&matrix, &work);
        Ok(())
    }

    /// As [`Self::forward`], and fills `distribution` too.
    ///
    /// # Errors
    /// `logits` is not `[T, V]`, or an output not `[T]`.
    pub fn distribution<E: Element>(
        &self,
        logits: &[E],
        outputs: TokenOutputs<'_>,
        distribution: DistributionOutputs<'_>,
    ) -> Result<()> {
        let matrix = Matrix::read_only(logits, self.shape)?;
        let outputs = Outputs::new(self.shape, outputs)?;
        let shared = SharedDistribution::new(self.shape, distribution)?;
        let work = Work { outputs: Some(&outputs), saved: None, cotangents: None };
        self.whole_rows(&matrix, &work, Some(&shared), None);
        Ok(())
    }

    /// As [`Self::fused`], and fills `distribution` too, `outputs` also of tokens whose cotangent is 0.
    ///
    /// # Errors
    /// Logits or dlogits are not `[T, V]`, or another argument not `[T]`.
    pub fn distribution_fused<E: Element>(
        &self,
        logits: InOut<'_, E>,
        dloss: &[f32],
        outputs: TokenOutputs<'_>,
        distribution: DistributionOutputs<'_>,
    ) -> Result<()> {
        let matrix = Matrix::new(logits, self.shape)?;
        self.shape.check_tokens("dloss", dloss.len())?;
        let outputs = Outputs::new(self.shape, outputs)?;
        let shared = SharedDistribution::new(self.shape, distribution)?;
        let of = |token: usize| {
            let takes_part = dloss[token] != 0.0 && !self.is_ignored(token);
            takes_part.then(|| [dloss[token].into(), 0.0, 0.0])
        };
        let work = Work { outputs: Some(&outputs), saved: None, cotangents: Some(&of) };
        self.whole_rows(&matrix, &work, Some(&shared), None);
        Ok(())
    }

    /// As [`Self::backward`], with the gradient for cotangents of the entropies too.
    ///
    /// # Errors
    /// Logits or dlogits are not `[T, V]`, or another argument not `[T]`.
    pub fn distribution_backward<E: Element>(
        &self,
        logits: InOut<'_, E>,
        saved: SavedLse<'_>,
        cotangents: Cotangents<'_>,
        entropy: EntropyCotangents<'_>,
    ) -> Result<()> {
        let matrix = Matrix::new(logits, self.shape)?;
        saved.check(self.shape)?;
        cotangents.check(self.shape)?;
        self.shape.check_tokens("entropy", entropy.entropy.len())?;
        self.shape.check_tokens("dentropy", entropy.dentropy.len())?;
        let of = |token| Some(cotangents.of(token));
        let work = Work { outputs: None, saved: Some(saved), cotangents: Some(&of) };
        self.whole_rows(&matrix, &work, None, Some(entropy));
        Ok(())
    }

    /// Writes the gradient for `cotangents` to the dlogits in `logits`. Reads logits once and writes once; rows of
    /// tokens that are ignored, or whose cotangents are all 0, are not read.
    ///
    /// # Errors
    /// Logits or dlogits are not `[T, V]`, or another argument not `[T]`.
    pub fn backward<E: Element>(
        &self,
        logits: InOut<'_, E>,
        saved: SavedLse<'_>,
        cotangents: Cotangents<'_>,
    ) -> Result<()> {
        let matrix = Matrix::new(logits, self.shape)?;
        saved.check(self.shape)?;
        cotangents.check(self.shape)?;
        let of = |token| Some(cotangents.of(token));
        self.run(&matrix, &Work { outputs: None, saved: Some(saved), cotangents: Some(&of) });
        Ok(())
    }

    /// Fills the requested `outputs`, and in the same pass writes the gradient for cotangents `dloss` `[T]` of the
    /// losses to the dlogits in `logits`. Logits are read from memory once, if a tile's rows stay in the cache, and
    /// dlogits are written once.
    ///
    /// A token whose cotangent is 0 is masked: its gradient row is exactly 0, whatever its logits.
    ///
    /// # Errors
    /// Logits or dlogits are not `[T, V]`, or another argument not `[T]`.
    pub fn fused<E: Element>(
        &self,
        logits: InOut<'_, E>,
        dloss: &[f32],
        outputs: TokenOutputs<'_>,
    ) -> Result<()> {
        self.shape.check_tokens("dloss", dloss.len())?;
        let outputs = Outputs::new(self.shape, outputs)?;
        let part = |token: usize| match dloss[token] {
            0.0 => None,
            _ if self.is_ignored(token) => None,
            dloss => Some(dloss.into()),
        };
        self.both_passes(logits, part, &outputs)
    }

    /// Returns the reduced loss, and does what [`Self::fused`] does. The bits are those of [`Self::fused`] if the
    /// losses' factors, which are float64 here, are f32 values.
    ///
    /// # Errors
    /// Logits or dlogits are not `[T, V]`, or another argument not `[T]`.
    pub fn value_and_grad<E: Element>(
        &self,
        logits: InOut<'_, E>,
        reduce: Reduce<'_>,
        outputs: TokenOutputs<'_>,
    ) -> Result<f64> {
        let factors =
            TokenFactors::new(self.options, reduce.reduction, self.labels, reduce.weights)?;
        let mut losses = vec![0.0; self.shape.tokens()];
        let outputs = Outputs {
            exact_loss: Some(Shared::new(&mut losses)),
            ..Outputs::new(self.shape, outputs)?
        };
        let part = |token| match factors.of(token) {
            0.0 => None,
            factor => Some(reduce.cotangent * factor),
        };
        self.both_passes(logits, part, &outputs)?;
        Ok(factors.reduce(losses))
    }

    /// Runs both passes over each tile. `part` returns the cotangent of a token's loss; none for a masked token.
    fn both_passes<E: Element>(
        &self,
        logits: InOut<'_, E>,
        part: impl Fn(usize) -> Option<f64> + Sync,
        outputs: &Outputs<'_>,
    ) -> Result<()> {
        let matrix = Matrix::new(logits, self.shape)?;
        let of = |token| part(token).map(|dloss| [dloss, 0.0, 0.0]);
        let work = Work { outputs: Some(outputs), saved: None, cotangents: Some(&of) };
        self.run(&matrix, &work);
        Ok(())
    }

    /// Whether the fastest pass over long rows, for gradients of losses only, applies.
    fn has_long_pass(&self) -> bool {
        !self.options.is_tempered() && self.shape.vocab() > short::LONGEST
    }

    fn run<E: Element>(&self, matrix: &Matrix<'_, E>, work: &Work<'_>) {
        if self.options.is_tempered() {
            self.whole_rows(matrix, work, None, None);
        } else if self.shape.vocab() <= short::LONGEST {
            self.short_rows(matrix, work);
        } else {
            self.long_rows(matrix, work);
        }
    }

    /// Whether statistics of `token` are needed; `cotangents` are none for a masked token.
    fn wants(&self, work: &Work<'_>, token: usize, cotangents: Option<[f64; 3]>) -> bool {
        work.outputs.is_some_and(|outputs| match work.cotangents {
            None => outputs.want(self, token, !self.is_ignored(token)),
            Some(_) => cotangents.is_some() || outputs.want(self, token, false),
        })
    }

    /// Runs rows of at most [`short::LONGEST`] columns.
    fn short_rows<E: Element>(&self, matrix: &Matrix<'_, E>, work: &Work<'_>) {
        let (isa, passes) = (self.launch.isa, Passes::get());
        let (tokens, vocab) = (self.shape.tokens(), self.shape.vocab());
        let together = short::rows_together(vocab);
        let groups = (SHORT_TASK / (together * vocab)).max(1);
        let step = together * groups;
        let (softcap, mean) = (self.options.softcap, self.options.label_smoothing != 0.0);
        let staged = work.cotangents.is_some() && short::streams::<E>(self.shape.elements());
        self.launch.pool.run(tokens.div_ceil(step), &|index| {
            let end = tokens.min((index + 1) * step);
            let mut kept = short::Kept::new(together, vocab, softcap.is_some());
            let mut stage = vec![E::from_f32(0.0); if staged { together * vocab } else { 0 }];
            let (mut cotangents, mut rows, mut gradients) = (vec![], vec![], vec![]);
            for first in (index * step..end).step_by(together) {
                let all = first..end.min(first + together);
                cotangents.clear();
                cotangents.extend(
                    all.clone()
                        .map(|token| work.cotangents.and_then(|cotangents| cotangents(token))),
                );
                rows.clear();
                rows.extend(all.clone().zip(&cotangents).map(|(token, &cotangents)| {
                    let wanted = self.wants(work, token, cotangents);
                    let has_gradient = cotangents.is_some_and(|of| of != [0.0; 3]);
                    // Rows that nothing needs are not read at all.
                    let label =
                        if wanted || has_gradient { self.label(matrix, token) } else { None };
                    short::ShortRow::new(wanted || has_gradient && label.is_some(), label)
                }));
                let rows = rows.as_mut_slice();
                (passes.exponentials)(
                    isa,
                    short::Exponentials { matrix, first, rows, kept: &mut kept, softcap, mean },
                );
                short::sums(isa, short::Sums { first, rows, saved: work.saved });
                if let Some(outputs) = work.outputs {
                    for ((token, row), cotangents) in all.clone().zip(&*rows).zip(&cotangents) {
                        let values = if self.wants(work, token, *cotangents) {
                            self.values(token, row.label, row.lse, row.total / vocab as f64)
                        } else {
                            TokenValues::default()
                        };
                        // SAFETY: the token belongs to this task alone.
                        unsafe { outputs.write(token, values) };
                    }
                }
                if work.cotangents.is_none() {
                    continue;
                }
                gradients.clear();
                gradients.extend(all.zip(&*rows).zip(&cotangents).map(
                    |((token, row), cotangents)| match (cotangents.unwrap_or_default(), row.label) {
                        ([0.0, 0.0, 0.0], _) => RowGradient::Fill(0.0),
                        (_, None) => RowGradient::Fill(self.without_label(token)),
                        (of, Some(label)) => {
                            let near = Near {
                                shift: row.shift,
                                factor: row.factor,
                                p_less_one: row.p_less_one,
                            };
                            self.formula(row.saved, of, label, near)
                        }
                    },
                ));
                let stage = if staged { &mut stage[..gradients.len() * vocab] } else { &mut [] };
                let rows = gradients.as_slice();
                let softcap = softcap.is_some();
                (passes.gradients)(
                    isa,
                    short::Gradients { matrix, first, rows, kept: &mut kept, stage, softcap },
                );
            }
        });
    }

    /// Computes the statistics of rows, then writes each row's outputs and gradient.
    ///
    /// A task does all of this for a tile. If tiles are so few that threads would be idle, a task is a block of a
    /// row, and each pass ends before the next step begins.
    fn long_rows<E: Element>(&self, matrix: &Matrix<'_, E>, work: &Work<'_>) {
        let (reads, writes) = (work.outputs.is_some(), work.cotangents.is_some());
        let cotangents = |token| work.cotangents.and_then(|cotangents| cotangents(token));
        let want = &|token| self.wants(work, token, cotangents(token));
        let finish = |token, row: &RowStatistics| {
            let mut lse = work.saved.map_or(f64::NAN, |saved| saved.exact(token));
            if let Some(outputs) = work.outputs {
                let values = self.token_values(token, row);
                // SAFETY: a token has one task.
                unsafe { outputs.write(token, values) };
                // Rounded as the backward pass reads it, so that both passes have the same bits.
                let (high, low) = split(values.lse);
                lse = f64::from(high) + f64::from(low);
            }
            self.row_gradient(matrix, token, lse, cotangents(token).unwrap_or_default())
        };
        let gradients = |rows: &[RowStatistics], first| -> Vec<_> {
            rows.iter().zip(first..).map(|(row, token)| finish(token, row)).collect()
        };
        let (tile, tokens) = (self.tile::<E>(), self.shape.tokens());
        let (step, block_size) = (tile.time_block(), tile.block_size());
        let (tiles, blocks) = (tokens.div_ceil(step), self.shape.vocab().div_ceil(block_size));
        let ahead = (reads && writes).then_some(step);
        let pool = self.launch.pool;
        let threads = pool.threads();
        // Elements of the last round of tiles, during which some threads are idle.
        let waited =
            (tiles.next_multiple_of(threads) - tiles) * step.min(tokens) * self.shape.vocab()
                / threads;
        if blocks == 1 || waited < WORTH_SHARING {
            pool.run(tiles, &|index| {
                let first = index * step;
                let mut rows = self.rows(matrix, first, step.min(tokens - first), want);
                let at = [first, block_size];
                if reads {
                    self.statistics(matrix, at, &mut rows, 0..blocks, ahead);
                }
                let gradients = gradients(&rows, first);
                if writes {
                    self.gradient(matrix, at, &gradients, 0..blocks, ahead);
                }
            });
            return;
        }
        let mut rows = self.rows(matrix, 0, tokens, want);
        if reads {
            let mut parts: Vec<_> =
                rows.iter().flat_map(|row| std::iter::repeat_n(row.clone(), blocks)).collect();
            let shared = Shared::new(&mut parts);
            pool.run(tokens * blocks, &|index| {
                // SAFETY: the part belongs to this task alone.
                let part = unsafe { shared.slice(index, 1) };
                let (token, block) = (index / blocks, index % blocks);
                self.statistics(matrix, [token, block_size], part, block..block + 1, None);
            });
            for (row, parts) in rows.iter_mut().zip(parts.chunks(blocks)) {
                parts.iter().for_each(|part| row.add(part));
            }
        }
        let gradients = gradients(&rows, 0);
        if writes {
            pool.run(tokens * blocks, &|index| {
                let (token, block) = (index / blocks, index % blocks);
                let row = std::slice::from_ref(&gradients[token]);
                self.gradient(matrix, [token, block_size], row, block..block + 1, None);
            });
        }
    }

    /// Runs rows one by one, with every option.
    fn whole_rows<E: Element>(
        &self,
        matrix: &Matrix<'_, E>,
        work: &Work<'_>,
        distribution: Option<&SharedDistribution<'_>>,
        of_entropy: Option<EntropyCotangents<'_>>,
    ) {
        let (isa, passes, vocab) = (self.launch.isa, Passes::get(), self.shape.vocab());
        let map = whole::Map {
            softcap: self.options.softcap.map(|cap| cap as f32),
            scale: (1.0 / self.options.temperature) as f32,
        };
        let mean = self.options.label_smoothing != 0.0;
        let tokens = self.shape.tokens();
        let block_size = self.tile::<E>().block_size();
        let step = self.tile::<E>().time_block().max(SHORT_TASK / vocab);
        let step = step.min(tokens.div_ceil(self.launch.pool.threads())).max(1);
        self.launch.pool.run(tokens.div_ceil(step), &|index| {
            for token in index * step..tokens.min((index + 1) * step) {
                let cotangents = work.cotangents.and_then(|cotangents| cotangents(token));
                let q = of_entropy.map_or(0.0, |of| f64::from(of.dentropy[token]));
                let entropy = of_entropy.map_or(0.0, |of| f64::from(of.entropy[token]));
                let is_wanted = self.wants(work, token, cotangents)
                    || distribution.is_some() && !self.is_ignored(token);
                let has_gradient = q != 0.0 || cotangents.is_some_and(|of| of != [0.0; 3]);
                let label =
                    if is_wanted || has_gradient { self.label(matrix, token) } else { None };
                let mut lse = work.saved.map_or(f64::NAN, |saved| saved.exact(token));
                if let Some(outputs) = work.outputs {
                    let mut found = whole::Found::NOTHING;
                    let mut values = TokenValues::default();
                    if is_wanted {
                        let found = &mut found;
                        let pass = whole::WholeSums { matrix, token, map, label, mean, found };
                        (passes.whole_sums)(isa, pass);
                        values = self.values(token, label, found.lse(), found.mean(vocab));
                    }
                    // SAFETY: the token belongs to this task alone.
                    unsafe {
                        outputs.write(token, values);
                        if let Some(distribution) = distribution {
                            let is_ignored = self.is_ignored(token);
                            distribution.write(token, is_wanted.then_some(&found), is_ignored);
                        }
                    }
                    // Rounded as the backward pass reads it, so that both passes have the same bits.
                    let (high, low) = split(values.lse);
                    lse = f64::from(high) + f64::from(low);
                }
                if distribution.is_some() && work.cotangents.is_some() && self.has_long_pass() {
                    let of = cotangents.unwrap_or_default();
                    let rows = [self.row_gradient(matrix, token, lse, of)];
                    let blocks = 0..vocab.div_ceil(block_size);
                    self.gradient(matrix, [token, block_size], &rows, blocks, None);
                } else if work.cotangents.is_some() {
                    let row = match label {
                        _ if !has_gradient => whole::WholeRow::Fill(0.0),
                        None => whole::WholeRow::Fill(self.without_label(token)),
                        Some(label) => {
                            let of = cotangents.unwrap_or_default();
                            self.whole_row(lse, of, label, entropy, q)
                        }
                    };
                    (passes.whole_gradient)(isa, whole::WholeGradient { matrix, token, map, row });
                }
            }
        });
    }

    /// The contract's gradient of a token that has a `label`, for cotangents of loss, logps and lse, and
    /// `q` of the entropy.
    fn whole_row(
        &self,
        lse: f64,
        cotangents: [f64; 3],
        label: Label,
        entropy: f64,
        q: f64,
    ) -> whole::WholeRow {
        let near = Near::new(lse, label);
        let Some(of) = self.coefficients(lse, cotangents, label, near.p_less_one) else {
            return whole::WholeRow::Fill(f32::NAN);
        };
        let scale = 1.0 / self.options.temperature;
        // With d = z - shift, z - lse + H is d + (shift - lse + H).
        let offset = f64::from(near.shift) - lse + entropy;
        let mut at_label = of.at_label;
        if q != 0.0 && label.logit != f64::NEG_INFINITY {
            let log_p = label.logit - lse;
            at_label -= q * log_p.exp() * (log_p + entropy) * self.slope_at(label);
        }
        let factor = scale * near.factor;
        whole::WholeRow::Formula {
            shift: near.shift,
            probability: to_f32((of.probability - q * offset) * factor) / EXP_SCALE,
            slope: to_f32(-q * factor) / EXP_SCALE,
            constant: to_f32(of.constant * scale),
            label: label.column,
            at_label,
        }
    }

    /// The rows of `count` tokens, without statistics yet; `want` says which rows to read.
    fn rows<E: Element>(
        &self,
        matrix: &Matrix<'_, E>,
        first: usize,
        count: usize,
        want: impl Fn(usize) -> bool,
    ) -> Vec<RowStatistics> {
        let row = |token| {
            // Rows that nothing needs are not read at all.
            let wanted = want(token);
            let label = if wanted { self.label(matrix, token) } else { None };
            RowStatistics::new(wanted, label)
        };
        (first..first + count).map(row).collect()
    }

    fn statistics<E: Element>(
        &self,
        matrix: &Matrix<'_, E>,
        [first, block_size]: [usize; 2],
        rows: &mut [RowStatistics],
        blocks: Range<usize>,
        ahead: Option<usize>,
    ) {
        let pass = Statistics {
            matrix,
            first,
            first_column: 0,
            rows,
            block_size,
            blocks,
            softcap: self.options.softcap,
            mean: self.options.label_smoothing != 0.0,
            ahead,
        };
        (Passes::get().statistics)(self.launch.isa, pass);
    }

    fn gradient<E: Element>(
        &self,
        matrix: &Matrix<'_, E>,
        [first, block_size]: [usize; 2],
        rows: &[RowGradient],
        blocks: Range<usize>,
        ahead: Option<usize>,
    ) {
        let pass = Gradient {
            matrix,
            first,
            rows,
            block_size,
            blocks,
            softcap: self.options.softcap,
            ahead,
        };
        (Passes::get().gradient)(self.launch.isa, pass);
    }

    pub(crate) fn is_ignored(&self, token: usize) -> bool {
        self.labels.get(token) == self.options.ignore_index
    }

    /// The labelled column of `token`; none where the token is ignored or its label out of range.
    fn label<E: Element>(&self, matrix: &Matrix<'_, E>, token: usize) -> Option<Label> {
        let column = self.column(token)?;
        // SAFETY: the row belongs to this task alone.
        let logit = unsafe { *matrix.logits(token).add(column) };
        Some(self.label_of(column, logit))
    }

    fn column(&self, token: usize) -> Option<usize> {
        match self.options.target(self.labels.get(token), self.shape.vocab()) {
            Target::Ignored | Target::OutOfRange => None,
            Target::Column(column) => Some(column),
        }
    }

    /// The label at `column` with the given logit.
    fn label_of<E: Element>(&self, column: usize, logit: E) -> Label {
        Label { column, logit: self.options.cap(logit.to_f64()) }
    }

    /// The value of loss, logps and gradient for a `token` without a labelled column.
    fn without_label(&self, token: usize) -> f32 {
        if self.is_ignored(token) { 0.0 } else { f32::NAN }
    }

    /// The contract's forward values of `token`, in float64; zeros if they are not needed.
    pub(crate) fn token_values(&self, token: usize, row: &RowStatistics) -> TokenValues {
        if !row.wanted() {
            return TokenValues::default();
        }
        self.values(token, row.label(), row.lse(), row.mean(self.shape.vocab()))
    }

    /// The forward values of a `token` with the given `lse` and mean logit.
    fn values(&self, token: usize, label: Option<Label>, lse: f64, mean: f64) -> TokenValues {
        let Some(label) = label else {
            let value = self.without_label(token);
            return TokenValues { loss: value.into(), logps: value.into(), lse };
        };
        let (e, w) = (self.options.label_smoothing, self.options.z_loss);
        let logps = label.logit - lse;
        let mut loss = (1.0 - e) * -logps + w * lse * lse;
        if e != 0.0 {
            loss += e * (lse - mean);
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
        if [g, h, k] == [0.0; 3] {
            return RowGradient::Fill(0.0);
        }
        match self.label(matrix, token) {
            None => RowGradient::Fill(self.without_label(token)),
            Some(label) => self.formula(lse, [g, h, k], label, Near::new(lse, label)),
        }
    }

    /// [`Self::row_gradient`] of a token that has a `label`.
    fn formula(&self, lse: f64, cotangents: [f64; 3], label: Label, near: Near) -> RowGradient {
        let Some(of) = self.coefficients(lse, cotangents, label, near.p_less_one) else {
            return RowGradient::Fill(f32::NAN);
        };
        RowGradient::Formula {
            shift: near.shift,
            probability: to_f32(of.probability * near.factor) / EXP_SCALE,
            constant: to_f32(of.constant),
            label: label.column,
            at_label: of.at_label,
        }
    }

    /// The coefficients of a row's gradient; none if lse is not finite.
    fn coefficients(
        &self,
        lse: f64,
        [g, h, k]: [f64; 3],
        label: Label,
        p_less_one: f64,
    ) -> Option<Coefficients> {
        if !lse.is_finite() {
            return None;
        }
        let (e, w) = (self.options.label_smoothing, self.options.z_loss);
        let probability = g * (1.0 + 2.0 * w * lse) - h + k;
        let constant = -g * e / self.shape.vocab() as f64;
        Some(Coefficients {
            probability,
            constant,
            at_label: if label.logit == f64::NEG_INFINITY {
                0.0
            } else {
                // a p - b = a (p - 1) + (a - b), which does not cancel as p nears 1.
                let rest = g * (2.0 * w * lse + e) + k + constant;
                let dz = probability * p_less_one + rest;
                dz * self.slope_at(label)
            },
        })
    }
}

impl Kernel<'_> {
    /// The derivative of the label's scaled and capped logit by its logit.
    fn slope_at(&self, label: Label) -> f64 {
        let temperature = self.options.temperature;
        let slope = |c: f64| 1.0 - (label.logit * temperature / c).powi(2);
        self.options.softcap.map_or(1.0, slope) / temperature
    }
}

/// The gradient of a row: `at_label` in the label's column, elsewhere `probability * p + constant`, times the
/// derivative of softcap.
struct Coefficients {
    probability: f64,
    constant: f64,
    at_label: f64,
}

/// Returns a `shift` near `lse`, and `exp(shift - lse)`: `p = exp(z - shift) * exp(shift - lse)`. The shift has so
/// few bits that `z - shift` is exact; the rest is a float64 factor near 1.
fn shift_near(lse: f64) -> (f32, f64) {
    let shift = at_eighths(lse);
    (shift, (f64::from(shift) - lse).exp())
}

/// The nearest multiple of 1/8, or `x` in f32 where f32 has no finer steps.
fn at_eighths(x: f64) -> f32 {
    if x.abs() < EIGHTHS_BELOW { ((x * 8.0).round() / 8.0) as f32 } else { x as f32 }
}

/// The values from which a row's gradient is computed.
#[derive(Clone, Copy)]
struct Near {
    /// A value near lse or the largest logit.
    shift: f32,
    /// `exp(shift - lse)`
    factor: f64,
    /// `p - 1` of the label.
    p_less_one: f64,
}

impl Near {
    fn new(lse: f64, label: Label) -> Self {
        let (shift, factor) = shift_near(lse);
        Self { shift, factor, p_less_one: (label.logit - lse).exp_m1() }
    }
}

/// The requested results of a call.
struct Work<'a> {
    /// Outputs of tokens; none in a backward pass.
    outputs: Option<&'a Outputs<'a>>,
    /// The residuals, in a backward pass.
    saved: Option<SavedLse<'a>>,
    /// If gradients are requested: returns the cotangents of a token; none for a masked token.
    cotangents: Option<&'a (dyn Fn(usize) -> Option<[f64; 3]> + Sync)>,
}

/// Below this every multiple of 1/8 is representable in f32.
const EIGHTHS_BELOW: f64 = (1 << 20) as f64;

/// The default tile for logits of dtype `E` and `vocab` columns.
#[must_use]
pub fn default_tile<E: Element>(vocab: usize) -> Tile {
    let tuned = xentile::tuned_tile(TUNED, E::DTYPE, vocab).expect("carried tiles are positive");
    tuned.expect("every dtype has a tuned tile")
}

/// Returns `x` in f32. NaN becomes the NaN that stays one when an addition rounds it to bf16.
fn to_f32(x: f64) -> f32 {
    if x.is_nan() { f32::NAN } else { x as f32 }
}

/// Returns `x` in f32, and its rounding error in f32.
pub(crate) fn split(x: f64) -> (f32, f32) {
    let high = x as f32;
    let low = (x - f64::from(high)) as f32;
    // An infinite or NaN lse has no remainder.
    (high, if low.is_nan() { 0.0 } else { low })
}

/// The forward values of one token.
#[derive(Clone, Copy, Default)]
pub(crate) struct TokenValues {
    loss: f64,
    logps: f64,
    pub(crate) lse: f64,
}

/// [`DistributionOutputs`] shared among tasks.
struct SharedDistribution<'a> {
    entropy: Shared<'a, f32>,
    highest: Shared<'a, f32>,
    argmax: Shared<'a, i32>,
}

impl<'a> SharedDistribution<'a> {
    fn new(shape: LogitsShape, outputs: DistributionOutputs<'a>) -> Result<Self> {
        let DistributionOutputs { entropy, highest, argmax } = outputs;
        shape.check_tokens("entropy", entropy.len())?;
        shape.check_tokens("highest", highest.len())?;
        shape.check_tokens("argmax", argmax.len())?;
        let (entropy, highest) = (Shared::new(entropy), Shared::new(highest));
        Ok(Self { entropy, highest, argmax: Shared::new(argmax) })
    }

    /// Writes the outputs of `token`, if its logits were read.
    ///
    /// # Safety
    /// No other task writes `token`.
    unsafe fn write(&self, token: usize, found: Option<&whole::Found>, is_ignored: bool) {
        let (entropy, highest, argmax) = match found {
            None => (0.0, 0.0, -1),
            Some(found) if found.lse().is_nan() => (f32::NAN, f32::NAN, -1),
            Some(found) => (found.entropy() as f32, found.highest, found.argmax as i32),
        };
        // SAFETY: the token belongs to the caller alone.
        unsafe {
            self.entropy.slice(token, 1)[0] = if is_ignored { 0.0 } else { entropy };
            self.highest.slice(token, 1)[0] = highest;
            self.argmax.slice(token, 1)[0] = argmax;
        }
    }
}

/// [`TokenOutputs`] checked and shared among tasks.
pub(crate) struct Outputs<'a> {
    loss: Option<Shared<'a, f32>>,
    logps: Option<Shared<'a, f32>>,
    lse: Option<Shared<'a, f32>>,
    lse_low: Option<Shared<'a, f32>>,
    zero_masked: bool,
    /// The loss before it is rounded to f32.
    exact_loss: Option<Shared<'a, f64>>,
}

impl<'a> Outputs<'a> {
    pub(crate) fn new(shape: LogitsShape, outputs: TokenOutputs<'a>) -> Result<Self> {
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
            zero_masked: outputs.zero_masked,
            exact_loss: None,
        })
    }

    /// Whether some output of `token` may differ from 0. `exact_loss` does not count, since only losses of
    /// unmasked tokens are summed.
    pub(crate) fn want(&self, kernel: &Kernel<'_>, token: usize, takes_part: bool) -> bool {
        if self.zero_masked && !takes_part {
            return false;
        }
        self.lse.is_some()
            || self.lse_low.is_some()
            || (self.loss.is_some() || self.logps.is_some()) && !kernel.is_ignored(token)
    }

    /// # Safety
    /// No other task writes `token`.
    pub(crate) unsafe fn write(&self, token: usize, values: TokenValues) {
        if let Some(exact) = &self.exact_loss {
            // SAFETY: the token belongs to the caller alone.
            unsafe { exact.slice(token, 1)[0] = values.loss };
        }
        let (high, low) = split(values.lse);
        let outputs = [
            (&self.loss, values.loss as f32),
            (&self.logps, values.logps as f32),
            (&self.lse, high),
            (&self.lse_low, low),
        ];
        for (output, value) in outputs {
            if let Some(output) = output {
                // SAFETY: the token belongs to the caller alone.
                unsafe { output.slice(token, 1)[0] = value };
            }
        }
    }
}

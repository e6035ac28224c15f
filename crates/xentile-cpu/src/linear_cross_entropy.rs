//! Cross-entropy of hidden states against an output matrix, whose logits are never all in memory.
//!
//! A pass takes the vocabulary a block of columns at a time, first for the sums of every token and then
//! for gradients. A GEMM computes a column block's logits in float32, without rounding; the passes of
//! [`cross_entropy`](crate::cross_entropy) run over them in place, and two more GEMMs compute dhidden and
//! dweight from their gradient. All tokens share one packed copy of a column block's weight, which the
//! float32 sums of its gradient overwrite.
//!
//! Logits of column blocks are saved until their gradient is computed, in the memory of dweight and in
//! the scratch; those without room are recomputed: three GEMMs if all are saved, four if none is. In
//! float32 the logits themselves are saved, in 16 bits their unnormalised softmax (`kept.rs`). With both
//! smoothing and softcap the gradient is no multiple of the softmax, and 16-bit logits are recomputed.
//! Both passes may be one call ([`Linear::fused`]), or the forward pass saves logits for the backward
//! pass of another call ([`Linear::keep`] and [`Linear::resume`]).
//!
//! Threads share tokens, and rows of dweight. One thread computes each sum in a fixed order, so that the
//! number of threads changes no bit.

mod kept;
mod layout;
pub mod plan;

use std::ops::Range;

use half::bf16;
use xentile::cross_entropy::CrossEntropy;
use xentile::linear_cross_entropy::{LinearShape, VocabAxis};
use xentile::{DType, Element, Error, Labels, Result, Tile};

use crate::Isa;
use crate::convert::{as_f32_mut, elements, elements_mut, multiply_by, narrow, narrow_rows, widen};
use crate::cross_entropy::{
    Cotangents, Kernel, Launch, Outputs, RowStatistics, SavedLse, Scaled, TokenOutputs, split,
};
use crate::parallel::Shared;
use crate::product::{Matrix, Panels, multiply};
use layout::{ColumnBlock, Kept, Layout, column_blocks, keeping, keeps, numbers};

/// The name of this operation's table of tuned tiles.
const TUNED: &str = "linear_cross_entropy.cpu";

/// The fewest tokens, or rows of the weight's gradient, of a task, where no `time_block` says how
/// many: a task goes through all of the other factor of its product. Beyond these, threads want tasks.
const FEWEST_ROWS: usize = 32;

/// Rows of a gradient that are transposed at a time: f32 of a cache line.
const TURNED_ROWS: usize = 16;

/// What logits are made of.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a, E> {
    /// `[T, D]`.
    pub hidden: &'a [E],
    /// `[V, D]` or `[D, V]`.
    pub weight: &'a [E],
    /// `[V]`, if any.
    pub bias: Option<&'a [f32]>,
}

/// Where gradients go.
#[derive(Debug)]
pub struct Gradients<'a, E> {
    /// `[T, D]`.
    pub hidden: &'a mut [E],
    /// In the shape of the weight.
    pub weight: &'a mut [E],
    /// `[V]`, if it is wanted.
    pub bias: Option<&'a mut [f32]>,
}

/// Linear cross-entropy for one set of labels.
#[derive(Clone, Copy)]
pub struct Linear<'a> {
    kernel: Kernel<'a>,
    launch: Launch<'a>,
    shape: LinearShape,
    columns: usize,
    /// What logits are multiplied by as they are made: the reciprocal of the temperature, which `kernel`
    /// knows nothing of.
    scale: f32,
}

/// The tile tuned for operands of dtype `E` and `vocab` columns: the most tokens of a task where
/// [`Launch`] names no tile, and the columns of a block that are quickest where memory is no matter.
#[must_use]
pub fn default_tile<E: Element>(vocab: usize) -> Tile {
    let tuned = xentile::tuned_tile(TUNED, E::DTYPE, vocab).expect("carried tiles are positive");
    tuned.expect("every dtype has a tuned tile")
}

/// The bytes of scratch that a pass takes in blocks of `columns` columns.
///
/// A pass that keeps logits takes those of one that makes gradients, and keeps them in what it gets
/// beyond.
#[must_use]
pub fn scratch_bytes(
    shape: LinearShape,
    dtype: DType,
    columns: usize,
    makes_gradients: bool,
) -> usize {
    Layout::new(shape, dtype, columns, makes_gradients).bytes()
}

impl<'a> Linear<'a> {
    /// An operation on arrays of `shape` and `labels` `[T]` in blocks of `columns` columns, whatever
    /// [`Launch`] says of them; its `time_block` is the tokens of a task. A token whose label is out of
    /// range gets NaN for its loss, logps and gradients.
    ///
    /// # Errors
    /// An option outside its range, labels that are not `[T]`, no columns.
    pub fn new(
        options: CrossEntropy,
        shape: LinearShape,
        labels: Labels<'a>,
        launch: Launch<'a>,
        columns: usize,
    ) -> Result<Self> {
        if columns == 0 {
            return Err(Error::Tile { name: "columns" });
        }
        options.validate()?;
        // Logits are divided by the temperature as they are made, under a cap that is divided too.
        let scale = (1.0 / options.temperature) as f32;
        let softcap = options.softcap.map(|cap| cap * f64::from(scale));
        let options = CrossEntropy { softcap, temperature: 1.0, ..options };
        let kernel = Kernel::with_unchecked_labels(options, shape.logits(), labels, launch)?;
        Ok(Self { scale, kernel, launch, shape, columns: columns.min(shape.vocab()) })
    }

    /// Fills what `outputs` asks for.
    ///
    /// # Errors
    /// An array of another length than the shape's, or too little scratch.
    pub fn forward<E: Element>(
        &self,
        operands: Operands<'_, E>,
        outputs: TokenOutputs<'_>,
        scratch: &mut [u8],
    ) -> Result<()> {
        self.check(operands)?;
        let outputs = Outputs::new(self.shape.logits(), outputs)?;
        let layout = Layout::new(self.shape, E::DTYPE, self.columns, false);
        let ([hidden, weight, logits, _, shifts], _) = layout.split(scratch)?;
        let places = [hidden, weight, logits, shifts];
        let work = Work::new(self, operands, places, &mut [], &mut []);
        work.write_sums(&column_blocks(self.shape, self.columns), &outputs);
        Ok(())
    }

    /// Writes the gradients for `cotangents`, from recomputed logits.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn backward<E: Element>(
        &self,
        operands: Operands<'_, E>,
        saved: SavedLse<'_>,
        cotangents: Cotangents<'_>,
        gradients: Gradients<'_, E>,
        scratch: &mut [u8],
    ) -> Result<()> {
        self.check_backward(operands, saved, cotangents, &gradients)?;
        let layout = Layout::new(self.shape, E::DTYPE, self.columns, true);
        let ([hidden, weight, logits, sums, shifts], _) = layout.split(scratch)?;
        let places = [hidden, weight, logits, shifts];
        let work = Work::new(self, operands, places, gradients.weight, &mut []);
        let cotangents = |token| self.scaled(cotangents.of(token));
        let column_blocks = column_blocks(self.shape, self.columns);
        work.gradients(&column_blocks, saved, &cotangents, gradients.hidden, sums, gradients.bias);
        Ok(())
    }

    /// The per-token outputs that are asked for, and the gradients for cotangents `dloss` `[T]` of
    /// the losses. A token whose cotangent is 0 takes no part.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn fused<E: Element>(
        &self,
        operands: Operands<'_, E>,
        dloss: &[f32],
        outputs: TokenOutputs<'_>,
        gradients: Gradients<'_, E>,
        scratch: &mut [u8],
    ) -> Result<()> {
        let tokens = self.shape.tokens();
        self.check(operands)?;
        self.shape.logits().check_tokens("dloss", dloss.len())?;
        self.check_gradients(&gradients)?;
        let outputs = Outputs::new(self.shape.logits(), outputs)?;
        let takes_part = |token| dloss[token] != 0.0 && !self.kernel.is_ignored(token);
        let want = |token| {
            let takes_part = takes_part(token);
            takes_part || outputs.want(&self.kernel, token, takes_part)
        };
        let [mut lse, mut lse_low] = [(); 2].map(|()| vec![0.0; tokens]);
        let (work, column_blocks, sums) = self.keeping(operands, gradients.weight, scratch)?;
        let counts = |token| takes_part(token) && self.kernel.has_label(token);
        for (token, row) in work.sums(&column_blocks, want, counts).iter().enumerate() {
            let values = self.kernel.token_values(token, row);
            // As the backward pass would read it, so that both give the same bits.
            (lse[token], lse_low[token]) = split(values.lse);
            // SAFETY: nobody else writes.
            unsafe { outputs.write(token, values) };
        }
        let saved = SavedLse { lse: &lse, lse_low: Some(&lse_low) };
        let cotangents = |token| match takes_part(token) {
            true => self.scaled([dloss[token].into(), 0.0, 0.0]),
            false => [0.0; 3],
        };
        work.gradients(&column_blocks, saved, &cotangents, gradients.hidden, sums, gradients.bias);
        Ok(())
    }

    /// The first half of [`Self::fused`]: fills what `outputs` asks for, and leaves logits in `kept`,
    /// which is the memory of dweight, and in `scratch`.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn keep<E: Element>(
        &self,
        operands: Operands<'_, E>,
        outputs: TokenOutputs<'_>,
        kept: &mut [E],
        scratch: &mut [u8],
    ) -> Result<()> {
        self.check(operands)?;
        let (actual, expected) = (kept.len(), operands.weight.len());
        if actual != expected {
            return Err(Error::Length { name: "kept", actual, axes: "[V, D]", expected });
        }
        let outputs = Outputs::new(self.shape.logits(), outputs)?;
        let (work, column_blocks, _) = self.keeping(operands, kept, scratch)?;
        work.write_sums(&column_blocks, &outputs);
        Ok(())
    }

    /// The second half, for any `cotangents`: as [`Self::backward`], where dweight holds what
    /// [`Self::keep`] left in its memory, and `scratch` what it left there, of the same length and
    /// aligned alike.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn resume<E: Element>(
        &self,
        operands: Operands<'_, E>,
        saved: SavedLse<'_>,
        cotangents: Cotangents<'_>,
        gradients: Gradients<'_, E>,
        scratch: &mut [u8],
    ) -> Result<()> {
        self.check_backward(operands, saved, cotangents, &gradients)?;
        let (work, column_blocks, sums) = self.keeping(operands, gradients.weight, scratch)?;
        let cotangents = |token| self.scaled(cotangents.of(token));
        work.gradients(&column_blocks, saved, &cotangents, gradients.hidden, sums, gradients.bias);
        Ok(())
    }

    /// Cotangents by which the gradient of divided logits is that of logits.
    fn scaled(&self, cotangents: [f64; 3]) -> [f64; 3] {
        match self.scale {
            1.0 => cotangents,
            scale => cotangents.map(|of| of * f64::from(scale)),
        }
    }

    /// Checks that `bytes` of scratch are enough for a pass over elements `E`.
    ///
    /// # Errors
    /// Too few.
    pub fn check_scratch<E: Element>(&self, bytes: usize, makes_gradients: bool) -> Result<()> {
        Layout::new(self.shape, E::DTYPE, self.columns, makes_gradients).check(bytes)
    }

    /// A pass that keeps logits, its column blocks, and where sums of dhidden go.
    fn keeping<'b, E: Element>(
        &'b self,
        operands: Operands<'b, E>,
        dweight: &'b mut [E],
        scratch: &'b mut [u8],
    ) -> Result<(Work<'b, E>, Vec<ColumnBlock>, &'b mut [f32])> {
        let layout = Layout::new(self.shape, E::DTYPE, self.columns, true);
        let ([hidden, weight, logits, sums, shifts], kept) = layout.split(scratch)?;
        let kept = numbers::<E>(kept);
        let can_keep = E::DTYPE == DType::F32 || self.kernel.scales();
        let column_blocks = match can_keep && keeps(self.shape, E::DTYPE, self.columns) {
            true => keeping(self.shape, self.columns, kept.len()),
            false => column_blocks(self.shape, self.columns),
        };
        let places = [hidden, weight, logits, shifts];
        Ok((Work::new(self, operands, places, dweight, kept), column_blocks, sums))
    }

    fn check_backward<E>(
        &self,
        operands: Operands<'_, E>,
        saved: SavedLse<'_>,
        cotangents: Cotangents<'_>,
        gradients: &Gradients<'_, E>,
    ) -> Result<()> {
        self.check(operands)?;
        saved.check(self.shape.logits())?;
        cotangents.check(self.shape.logits())?;
        self.check_gradients(gradients)
    }

    fn check<E>(&self, operands: Operands<'_, E>) -> Result<()> {
        self.check_lengths(operands.hidden, operands.weight, operands.bias)
    }

    fn check_gradients<E>(&self, gradients: &Gradients<'_, E>) -> Result<()> {
        self.check_lengths(gradients.hidden, gradients.weight, gradients.bias.as_deref())
    }

    fn check_lengths<E>(&self, hidden: &[E], weight: &[E], bias: Option<&[f32]>) -> Result<()> {
        let [tokens, width] = self.shape.hidden();
        let vocab = self.shape.vocab();
        let lengths = [
            ("hidden", hidden.len(), "[T, D]", tokens * width),
            ("weight", weight.len(), "[V, D]", vocab * width),
            ("bias", bias.map_or(vocab, <[f32]>::len), "[V]", vocab),
        ];
        match lengths.into_iter().find(|&(_, actual, _, expected)| actual != expected) {
            None => Ok(()),
            Some((name, actual, axes, expected)) => {
                Err(Error::Length { name, actual, axes, expected })
            }
        }
    }
}

/// The cotangents of loss, logps and lse of a token.
type TokenCotangents<'a> = dyn Fn(usize) -> [f64; 3] + Sync + 'a;

/// A pass at work.
struct Work<'a, E> {
    linear: &'a Linear<'a>,
    operands: Operands<'a, E>,
    /// Panels of hidden states `[T, D]`, where there are gradients.
    hidden: Shared<'a, f32>,
    /// Panels of a column block of the weight; then sums of its gradient.
    weight: Shared<'a, f32>,
    /// A column block's logits, and their gradient.
    logits: Shared<'a, f32>,
    /// In 16 bits, the logit of each token's label, and then the shift of each token in each column
    /// block, block after block, where passes keep something.
    shifts: Shared<'a, f32>,
    dweight: Shared<'a, E>,
    kept: Shared<'a, E>,
}

impl<'a, E: Element> Work<'a, E> {
    fn new(
        linear: &'a Linear<'a>,
        operands: Operands<'a, E>,
        places: [&'a mut [f32]; 4],
        dweight: &'a mut [E],
        kept: &'a mut [E],
    ) -> Self {
        let [hidden, weight, logits, shifts] = places.map(Shared::new);
        let (dweight, kept) = (Shared::new(dweight), Shared::new(kept));
        Self { linear, operands, hidden, weight, logits, shifts, dweight, kept }
    }

    /// Calls `task` with pieces of `rows`, each as its first row and their number.
    fn share(&self, rows: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        let Launch { tile, pool, .. } = self.linear.launch;
        let step = tile.map_or_else(
            || {
                let most = default_tile::<E>(self.linear.shape.vocab()).time_block();
                rows.div_ceil(2 * pool.threads()).max(FEWEST_ROWS).min(most)
            },
            Tile::time_block,
        );
        pool.run(rows.div_ceil(step), &|index| {
            let first = index * step;
            task(first, step.min(rows - first));
        });
    }

    /// Hidden states `[T, D]`.
    fn hidden(&self) -> Matrix<'a, E> {
        Matrix::new(self.operands.hidden, self.linear.shape.width())
    }

    /// A column block of the weight as `[columns, D]`.
    fn weight(&self, columns: &Range<usize>) -> Matrix<'a, E> {
        let Linear { shape, .. } = self.linear;
        let weight = match shape.vocab_axis() {
            VocabAxis::First => Matrix::new(self.operands.weight, shape.width()),
            VocabAxis::Last => Matrix::new(self.operands.weight, shape.vocab()).transposed(),
        };
        weight.rows(columns.clone())
    }

    /// Writes the panels of `matrix` to `to`.
    ///
    /// # Safety
    /// Nobody reads or writes that meanwhile.
    unsafe fn pack(&self, matrix: Matrix<'_, E>, to: &Shared<'_, f32>) {
        let Launch { isa, pool, .. } = self.linear.launch;
        let [count, words] = Panels::extents::<E>(isa, matrix.extents());
        pool.run(count, &|panel| {
            // SAFETY: tasks have panels of their own, and what holds for this function.
            let to = unsafe { to.slice(panel * words, words) };
            Panels::pack(isa, matrix, panel, to);
        });
    }

    /// The panels of a matrix of `extents` `[terms, columns]` that [`Self::pack`] wrote to `from`.
    ///
    /// # Safety
    /// Nobody writes that meanwhile.
    unsafe fn panels<'b>(&self, from: &'b Shared<'_, f32>, extents: [usize; 2]) -> Panels<'b> {
        let isa = self.linear.launch.isa;
        let words = Panels::extents::<E>(isa, extents).iter().product();
        // SAFETY: passed on from this function's contract.
        Panels::new::<E>(isa, unsafe { from.read(0, words) }, extents)
    }

    /// Makes the logits of some tokens of a column block.
    ///
    /// # Safety
    /// The panels of the block's weight as `[D, columns]` are there, and nobody writes them meanwhile.
    unsafe fn make(&self, columns: &Range<usize>, first: usize, count: usize, logits: &mut [f32]) {
        let Linear { launch, shape, .. } = self.linear;
        // SAFETY: passed on from this function's contract.
        let weight = unsafe { self.panels(&self.weight, [shape.width(), columns.len()]) };
        multiply(launch.isa, &self.hidden().rows(first..first + count), weight, false, logits);
        if let Some(bias) = self.operands.bias {
            for row in logits.chunks_exact_mut(columns.len()) {
                for (logit, bias) in row.iter_mut().zip(&bias[columns.clone()]) {
                    *logit += bias;
                }
            }
        }
        let scale = self.linear.scale;
        if scale != 1.0 {
            logits.iter_mut().for_each(|logit| *logit *= scale);
        }
    }

    /// Keeps in 16 bits what stands for the `logits` of some tokens of the block with this `index`, of
    /// those that count.
    ///
    /// # Safety
    /// Nobody else has those tokens.
    unsafe fn keep_softmax(
        &self,
        (index, block): (usize, &ColumnBlock),
        (first, count): (usize, usize),
        counts: impl Fn(usize) -> bool,
        logits: &mut [f32],
    ) {
        let Linear { kernel, launch, shape, .. } = self.linear;
        let (columns, Some(kept)) = (&block.columns, block.kept) else { return };
        let width = columns.len();
        // SAFETY: passed on from this function's contract.
        let (kept, shifts, of_labels) = unsafe {
            (
                self.kept(kept, first * width, count * width),
                self.shifts.slice((index + 1) * shape.tokens() + first, count),
                self.shifts.slice(first, count),
            )
        };
        let rows = logits.chunks_exact(width).zip(of_labels).zip(first..);
        for ((logits, of_label), token) in rows {
            if let Some(column) = kernel.label_within(token, columns) {
                *of_label = logits[column];
            }
        }
        kept::keep(launch.isa, kernel, (first, columns), counts, logits, kept, shifts);
    }

    /// Where the logits of some tokens are kept.
    ///
    /// # Safety
    /// Nobody else has those tokens, and none writes the gradient of weights meanwhile.
    #[allow(clippy::mut_from_ref)] // the contract replaces the borrow
    unsafe fn kept(&self, kept: Kept, first: usize, length: usize) -> &mut [E] {
        // SAFETY: passed on from this function's contract.
        unsafe {
            match kept {
                Kept::InWeight(start) => self.dweight.slice(start + first, length),
                Kept::InScratch(start) => self.kept.slice(start + first, length),
            }
        }
    }

    /// The sums of each token over `column_blocks`, of those that are wanted. What is kept is for
    /// tokens that have a gradient of their own, which `counts` says.
    fn sums(
        &self,
        column_blocks: &[ColumnBlock],
        want: impl Fn(usize) -> bool,
        counts: impl Fn(usize) -> bool + Sync,
    ) -> Vec<RowStatistics> {
        let Linear { kernel, shape, .. } = self.linear;
        let mut rows: Vec<_> =
            (0..shape.tokens()).map(|token| RowStatistics::new(want(token), None)).collect();
        let shared = Shared::new(&mut rows);
        for (index, block) in column_blocks.iter().enumerate() {
            let ColumnBlock { columns, kept } = block;
            // SAFETY: tasks that read the panels of the block before have ended.
            unsafe { self.pack(self.weight(columns).transposed(), &self.weight) };
            self.share(shape.tokens(), &|first, count| {
                let at = first * columns.len();
                let length = count * columns.len();
                // SAFETY: tasks have tokens of their own, and panels stay as they are.
                unsafe {
                    let rows = shared.slice(first, count);
                    let mut add = |logits: &mut [f32]| {
                        self.make(columns, first, count, logits);
                        kernel.add_columns(logits, first, columns, rows).expect("whole rows");
                    };
                    match *kept {
                        // Made where they are kept.
                        Some(kept) if E::DTYPE == DType::F32 => {
                            add(as_f32_mut(self.kept(kept, at, length)).expect("f32"));
                        }
                        _ => {
                            let logits = self.logits.slice(at, length);
                            add(logits);
                            self.keep_softmax((index, block), (first, count), &counts, logits);
                        }
                    }
                }
            });
        }
        rows
    }

    /// Writes what follows from the [`Self::sums`] of the tokens of which `outputs` want something.
    fn write_sums(&self, column_blocks: &[ColumnBlock], outputs: &Outputs<'_>) {
        let kernel = &self.linear.kernel;
        let want = |token| outputs.want(kernel, token, !kernel.is_ignored(token));
        let counts = |token| kernel.has_label(token);
        for (token, row) in self.sums(column_blocks, want, counts).iter().enumerate() {
            // SAFETY: nobody else writes.
            unsafe { outputs.write(token, kernel.token_values(token, row)) };
        }
    }

    /// Gradients over `column_blocks`, in their order.
    fn gradients(
        &self,
        column_blocks: &[ColumnBlock],
        saved: SavedLse<'_>,
        cotangents: &TokenCotangents<'_>,
        dhidden: &mut [E],
        sums: &mut [f32],
        dbias: Option<&mut [f32]>,
    ) {
        let width = self.linear.shape.width();
        if let Some(sums) = as_f32_mut(dhidden) {
            self.summed::<f32>(column_blocks, saved, cotangents, sums, dbias);
        } else {
            match Panels::takes_bf16::<E>(self.linear.launch.isa) {
                true => self.summed::<bf16>(column_blocks, saved, cotangents, sums, dbias),
                false => self.summed::<f32>(column_blocks, saved, cotangents, sums, dbias),
            }
            let dhidden = Shared::new(dhidden);
            self.share(self.linear.shape.tokens(), &|first, count| {
                // SAFETY: tasks have tokens of their own.
                let to = unsafe { dhidden.slice(first * width, count * width) };
                narrow(self.linear.launch.isa, &sums[first * width..][..count * width], to);
            });
        }
        // Products of 0 and a weight that is infinite or NaN are NaN.
        for (token, dhidden) in dhidden.chunks_exact_mut(width).enumerate() {
            if self.is_masked(token, cotangents) {
                dhidden.fill(E::from_f32(0.0));
            }
        }
    }

    /// Whether `token` takes no part in gradients.
    fn is_masked(&self, token: usize, cotangents: &TokenCotangents<'_>) -> bool {
        self.linear.kernel.is_ignored(token) || cotangents(token) == [0.0; 3]
    }

    /// Packs hidden states for the gradient of the weight: 0 for those of masked tokens that are infinite
    /// or NaN, whose product with 0 would be NaN.
    fn pack_hidden(&self, cotangents: &TokenCotangents<'_>) {
        let hidden = self.operands.hidden;
        let width = self.linear.shape.width();
        let spoilt: Vec<_> = hidden
            .chunks_exact(width)
            .enumerate()
            .filter(|&(token, _)| self.is_masked(token, cotangents))
            .filter(|(_, hidden)| hidden.iter().any(|x| !x.to_f32().is_finite()))
            .map(|(token, _)| token)
            .collect();
        // Seldom: there is no room for this in the scratch.
        let mut mended = Vec::new();
        if !spoilt.is_empty() {
            mended.extend_from_slice(hidden);
            for token in spoilt {
                mended[token * width..][..width].fill(E::from_f32(0.0));
            }
        }
        let hidden = if mended.is_empty() { hidden } else { &mended };
        // SAFETY: nobody has the panels yet.
        unsafe { self.pack(Matrix::new(hidden, width), &self.hidden) };
    }

    /// As [`Self::gradients`], those of hidden states in f32. Products take those of logits as `Z`.
    ///
    /// Where `Z` has 16 bits, what was kept is rounded once more to be an operand, but not for hidden
    /// states: of these a row's sums are in units of its own, one in each block, by which the row of
    /// dlogits is what was kept times a power of two. Its label's would not be, and is added in f32.
    fn summed<Z: Element>(
        &self,
        column_blocks: &[ColumnBlock],
        saved: SavedLse<'_>,
        cotangents: &TokenCotangents<'_>,
        dhidden: &mut [f32],
        mut dbias: Option<&mut [f32]>,
    ) {
        let isa = self.linear.launch.isa;
        let [tokens, width] = self.linear.shape.hidden();
        let dhidden = Shared::new(dhidden);
        let mut units = vec![1.0_f32; tokens];
        let units = Shared::new(&mut units);
        self.pack_hidden(cotangents);
        for (index, block) in column_blocks.iter().enumerate() {
            let columns = &block.columns;
            if block.kept.is_none() {
                // SAFETY: tasks that read the panels before have ended.
                unsafe { self.pack(self.weight(columns).transposed(), &self.weight) };
                self.share(tokens, &|first, count| {
                    let at = first * columns.len();
                    // SAFETY: tasks have tokens of their own, and panels stay as they are.
                    unsafe {
                        let logits = self.logits.slice(at, count * columns.len());
                        self.make(columns, first, count, logits);
                    }
                });
            }
            // SAFETY: as before.
            unsafe { self.pack(self.weight(columns), &self.weight) };
            self.share(tokens, &|first, count| {
                // SAFETY: as before.
                unsafe {
                    let of = (saved, cotangents);
                    let (dz, sums, units) = (
                        self.logits.slice(first * columns.len(), count * columns.len()),
                        dhidden.slice(first * width, count * width),
                        units.slice(first, count),
                    );
                    let rounds_kept = block.kept.is_some() && Z::DTYPE != DType::F32;
                    let old = units.to_vec();
                    let mut left_out = Vec::new();
                    match rounds_kept {
                        true => self.expand::<Z>((index, block), first, of, dz, |row, scaled| {
                            let (scaled, by_unit) = scaled.by_unit();
                            units[row] = by_unit.unit;
                            left_out.extend(by_unit.left_out.map(|(label, dz)| (row, label, dz)));
                            scaled
                        }),
                        false => {
                            units.fill(1.0);
                            self.logits_gradient::<Z>((index, block), first, of, dz);
                        }
                    }
                    change_units(isa, &old, units, sums);
                    let weight = self.panels(&self.weight, [columns.len(), width]);
                    multiply(isa, &rows::<Z>(dz, columns.len()), weight, columns.start > 0, sums);
                    for (row, label, dz) in left_out {
                        let sums = &mut sums[row * width..][..width];
                        self.add_weights(columns.start + label, dz, sums);
                    }
                    if rounds_kept {
                        self.logits_gradient::<Z>((index, block), first, of, dz);
                    }
                }
            });
            // SAFETY: what follows writes no logits.
            let dz = unsafe { self.logits.read(0, tokens * columns.len()) };
            let dz = rows::<Z>(dz, columns.len());
            self.weight_gradient(columns, dz);
            if let Some(dbias) = &mut dbias {
                self.bias_gradient(dz, &mut dbias[columns.clone()]);
            }
        }
        self.share(tokens, &|first, count| {
            // SAFETY: tasks have tokens of their own.
            unsafe {
                let sums = dhidden.slice(first * width, count * width);
                change_units(isa, units.read(first, count), &vec![1.0; count], sums);
            }
        });
    }

    /// Writes the gradient of the logits of the tokens from `first` to `dz`, where logits that are not
    /// kept are, as elements at the beginning of each row's memory.
    ///
    /// # Safety
    /// Nobody else has those tokens.
    unsafe fn logits_gradient<Z: Element>(
        &self,
        (index, block): (usize, &ColumnBlock),
        first: usize,
        of: (SavedLse<'_>, &TokenCotangents<'_>),
        dz: &mut [f32],
    ) {
        if let Some(kept) = block.kept {
            let at = first * block.columns.len();
            // SAFETY: passed on from this function's contract.
            let kept = unsafe { self.kept(kept, at, dz.len()) };
            match as_f32_mut(kept) {
                Some(kept) => dz.copy_from_slice(kept),
                // SAFETY: passed on from this function's contract.
                None => unsafe {
                    return self.expand::<Z>((index, block), first, of, dz, |_, scaled| scaled);
                },
            }
        }
        let (saved, cotangents) = of;
        self.linear
            .kernel
            .columns_gradient(dz, first, &block.columns, saved, cotangents)
            .expect("whole rows");
        narrow_rows::<Z>(self.linear.launch.isa, block.columns.len(), dz);
    }

    /// As [`Self::logits_gradient`], what `scale` makes of each row's, of the softmax that is kept.
    ///
    /// # Safety
    /// Nobody else has those tokens.
    unsafe fn expand<Z: Element>(
        &self,
        (index, block): (usize, &ColumnBlock),
        first: usize,
        (saved, cotangents): (SavedLse<'_>, &TokenCotangents<'_>),
        dz: &mut [f32],
        mut scale: impl FnMut(usize, Scaled) -> Scaled,
    ) {
        let Linear { kernel, launch, shape, .. } = self.linear;
        let columns = &block.columns;
        let (width, count) = (columns.len(), dz.len() / columns.len());
        let place = block.kept.expect("the block is kept");
        // SAFETY: passed on from this function's contract; the pass before wrote these.
        let (kept, of_labels, shifts) = unsafe {
            (
                self.kept(place, first * width, dz.len()),
                self.shifts.read(first, count),
                self.shifts.read((index + 1) * shape.tokens() + first, count),
            )
        };
        let rows = kept.chunks_exact(width).zip(dz.chunks_exact_mut(width));
        for (row, (kept, to)) in rows.enumerate() {
            let (token, shift) = (first + row, shifts[row].into());
            let (lse, of) = (saved.exact(token), cotangents(token));
            let scaled = kernel.scaled(token, columns, shift, of_labels[row], lse, of);
            let to = &mut elements_mut::<Z>(to)[..width];
            kept::expand(launch.isa, kept, scale(row, scaled), to);
        }
    }

    /// Adds `dz` times the weights of `column` to `sums` `[D]`.
    fn add_weights(&self, column: usize, dz: f32, sums: &mut [f32]) {
        let Linear { launch, shape, .. } = self.linear;
        let weight = self.operands.weight;
        match shape.vocab_axis() {
            VocabAxis::First => {
                let mut weights = vec![0.0; sums.len()];
                widen(launch.isa, &weight[column * sums.len()..][..sums.len()], &mut weights);
                for (sum, weight) in sums.iter_mut().zip(weights) {
                    *sum += dz * weight;
                }
            }
            VocabAxis::Last => {
                let weights = weight[column..].iter().step_by(shape.vocab());
                for (sum, weight) in sums.iter_mut().zip(weights) {
                    *sum += dz * weight.to_f32();
                }
            }
        }
    }

    /// Writes the gradient of a column block of the weight, of `dz` `[T, columns]`.
    fn weight_gradient<Z: Element>(&self, columns: &Range<usize>, dz: Matrix<'_, Z>) {
        let Linear { launch: Launch { isa, .. }, shape, .. } = *self.linear;
        let [tokens, width] = shape.hidden();
        // SAFETY: hidden states stay as they are.
        let hidden = unsafe { self.panels(&self.hidden, [tokens, width]) };
        let in_order = shape.vocab_axis() == VocabAxis::First;
        self.share(columns.len(), &|first, count| {
            let dz = dz.transposed().rows(first..first + count);
            // SAFETY: tasks have rows of their own; panels of the weight, and what was kept in the
            // place of the gradient, have been read.
            unsafe {
                let place = || self.dweight.slice((columns.start + first) * width, count * width);
                if in_order && let Some(to) = as_f32_mut(place()) {
                    return multiply(isa, &dz, hidden, false, to);
                }
                let sums = self.weight.slice(first * width, count * width);
                multiply(isa, &dz, hidden, false, sums);
                if in_order {
                    narrow(isa, sums, place());
                }
            }
        });
        if !in_order {
            self.turn(columns);
        }
    }

    /// Writes a column block's gradient from its sums `[columns, D]` to the columns of dweight `[D,
    /// V]`.
    fn turn(&self, columns: &Range<usize>) {
        let Linear { launch, shape, .. } = self.linear;
        let width = shape.width();
        launch.pool.run(width.div_ceil(TURNED_ROWS), &|index| {
            let rows = index * TURNED_ROWS..width.min((index + 1) * TURNED_ROWS);
            let mut transposed = vec![0.0; rows.len() * columns.len()];
            // SAFETY: sums are written no more, and tasks have rows of their own.
            unsafe {
                let sums = self.weight.read(0, columns.len() * width);
                for (column, sums) in sums.chunks_exact(width).enumerate() {
                    for (row, &sum) in sums[rows.clone()].iter().enumerate() {
                        transposed[row * columns.len() + column] = sum;
                    }
                }
                for (row, transposed) in rows.zip(transposed.chunks_exact(columns.len())) {
                    let start = row * shape.vocab() + columns.start;
                    narrow(launch.isa, transposed, self.dweight.slice(start, columns.len()));
                }
            }
        });
    }

    /// Sums `dz` `[T, columns]` over tokens.
    fn bias_gradient<Z: Element>(&self, dz: Matrix<'_, Z>, to: &mut [f32]) {
        let (columns, to) = (to.len(), Shared::new(to));
        self.share(columns, &|first, count| {
            // SAFETY: tasks have columns of their own.
            let to = unsafe { to.slice(first, count) };
            to.fill(0.0);
            for token in 0..self.linear.shape.tokens() {
                for (sum, dz) in to.iter_mut().zip(&dz.row(token)[first..]) {
                    *sum += dz.to_f32();
                }
            }
        });
    }
}

/// Puts `sums`, rows that are in `old` units, in `new` ones.
fn change_units(isa: Isa, old: &[f32], new: &[f32], sums: &mut [f32]) {
    let width = sums.len() / old.len().max(1);
    for ((old, new), sums) in old.iter().zip(new).zip(sums.chunks_exact_mut(width)) {
        if old != new {
            multiply_by(isa, old / new, sums);
        }
    }
}

/// The rows of `columns` numbers that [`narrow_rows`] made elements of.
fn rows<Z: Element>(numbers: &[f32], columns: usize) -> Matrix<'_, Z> {
    Matrix::with_row_step(elements(numbers), columns, columns * size_of::<f32>() / size_of::<Z>())
}

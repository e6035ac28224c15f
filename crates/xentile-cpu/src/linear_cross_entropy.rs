//! Cross-entropy of hidden states against an output matrix, whose logits are never all in memory.
//!
//! Columns of the vocabulary are taken a slab at a time, first for the sums of every token and then
//! for gradients. A slab's logits are a product in f32, rounded once to the dtype of operands; the
//! passes of [`cross_entropy`](crate::cross_entropy) run over them where they lie, and two more
//! products take their gradient to hidden states and weight. All tokens of a slab share one copy of
//! its weight in f32, in whose place the sums of its gradient come.
//!
//! A slab's logits wait for their gradient in the memory of dweight, or in what scratch there is, and
//! only what finds no room is made again: three products where there is room for all, four where there
//! is for none. Both passes may be one ([`Linear::fused`]), or the first leaves to the second what it
//! holds ([`Linear::keep`] and [`Linear::resume`]).
//!
//! Threads share out tokens, and rows of the weight's gradient. Each number is summed by one thread
//! in one order, so that their count changes no bit.

mod convert;
mod cut;
mod product;

use std::ops::Range;

use xentile::cross_entropy::CrossEntropy;
use xentile::linear_cross_entropy::{LinearShape, VocabAxis};
use xentile::{DType, Element, Error, Labels, Result, Tile};

use crate::cross_entropy::{
    Cotangents, Kernel, Launch, Outputs, RowStatistics, SavedLse, TokenOutputs, split,
};
use crate::parallel::Shared;
use convert::{as_f32, as_f32_mut, narrow, round, widen};
use cut::{Kept, Layout, Slab, keeping, numbers, slabs, stages_weight};
use product::{Factor, multiply};

/// The fewest and the most tokens, or rows of the weight, of a task, where no `time_block` says how
/// many: each task packs the other factor of its product anew, which takes as long as so many of its
/// own rows, and threads want tasks.
const TASK_ROWS: [usize; 2] = [32, 256];

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
}

/// The bytes of scratch that a pass takes in slabs of `columns` columns.
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
    /// An operation on arrays of `shape` and `labels` `[T]` in slabs of `columns` columns. A token
    /// whose label is out of range gets NaN for its loss, logps and gradients.
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
        let kernel = Kernel::with_unchecked_labels(options, shape.logits(), labels, launch)?;
        Ok(Self { kernel, launch, shape, columns: columns.min(shape.vocab()) })
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
        let ([hidden, weight, logits, _], _) = layout.split(scratch)?;
        let work = Work::new(self, operands, hidden, weight, logits, &mut [], &mut []);
        work.write_sums(&slabs(self.shape, self.columns), &outputs);
        Ok(())
    }

    /// Writes the gradients for `cotangents`, making logits again.
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
        let ([hidden, weight, logits, sums], _) = layout.split(scratch)?;
        let work = Work::new(self, operands, hidden, weight, logits, gradients.weight, &mut []);
        let cotangents = |token| cotangents.of(token);
        let slabs = slabs(self.shape, self.columns);
        work.gradients(&slabs, saved, &cotangents, gradients.hidden, sums, gradients.bias);
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
        let (work, slabs, sums) = self.keeping(operands, gradients.weight, scratch)?;
        for (token, row) in work.sums(&slabs, want).iter().enumerate() {
            let values = self.kernel.token_values(token, row);
            // As the backward pass would read it, so that both give the same bits.
            (lse[token], lse_low[token]) = split(values.lse);
            // SAFETY: nobody else writes.
            unsafe { outputs.write(token, values) };
        }
        let saved = SavedLse { lse: &lse, lse_low: Some(&lse_low) };
        let cotangents = |token| match takes_part(token) {
            true => [dloss[token].into(), 0.0, 0.0],
            false => [0.0; 3],
        };
        work.gradients(&slabs, saved, &cotangents, gradients.hidden, sums, gradients.bias);
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
        let (work, slabs, _) = self.keeping(operands, kept, scratch)?;
        work.write_sums(&slabs, &outputs);
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
        let (work, slabs, sums) = self.keeping(operands, gradients.weight, scratch)?;
        let cotangents = |token| cotangents.of(token);
        work.gradients(&slabs, saved, &cotangents, gradients.hidden, sums, gradients.bias);
        Ok(())
    }

    /// Checks that `bytes` of scratch are enough for a pass over elements `E`.
    ///
    /// # Errors
    /// Too few.
    pub fn check_scratch<E: Element>(&self, bytes: usize, makes_gradients: bool) -> Result<()> {
        Layout::new(self.shape, E::DTYPE, self.columns, makes_gradients).check(bytes)
    }

    /// A pass that keeps logits, its slabs, and where sums of dhidden go.
    fn keeping<'b, E: Element>(
        &'b self,
        operands: Operands<'b, E>,
        dweight: &'b mut [E],
        scratch: &'b mut [u8],
    ) -> Result<(Work<'b, E>, Vec<Slab>, &'b mut [f32])> {
        let layout = Layout::new(self.shape, E::DTYPE, self.columns, true);
        let ([hidden, weight, logits, sums], kept) = layout.split(scratch)?;
        let kept = numbers::<E>(kept);
        let slabs = keeping(self.shape, self.columns, kept.len());
        Ok((Work::new(self, operands, hidden, weight, logits, dweight, kept), slabs, sums))
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

    /// Calls `task` with pieces of `rows`, each as its first row and their number.
    fn share(&self, rows: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        let [fewest, most] = TASK_ROWS;
        let even = rows.div_ceil(2 * self.launch.pool.threads()).clamp(fewest, most);
        let step = self.launch.tile.map_or(even, Tile::time_block);
        self.launch.pool.run(rows.div_ceil(step), &|index| {
            let first = index * step;
            task(first, step.min(rows - first));
        });
    }
}

/// The cotangents of loss, logps and lse of a token.
type TokenCotangents<'a> = dyn Fn(usize) -> [f64; 3] + Sync + 'a;

/// A pass at work.
struct Work<'a, E> {
    linear: &'a Linear<'a>,
    operands: Operands<'a, E>,
    /// Hidden states in f32.
    hidden: &'a [f32],
    /// A slab's weight in f32, where that is not how it lies; then sums of its gradient.
    staged: Shared<'a, f32>,
    /// A slab's logits, and their gradient.
    logits: Shared<'a, f32>,
    dweight: Shared<'a, E>,
    kept: Shared<'a, E>,
}

impl<'a, E: Element> Work<'a, E> {
    fn new(
        linear: &'a Linear<'a>,
        operands: Operands<'a, E>,
        hidden: &'a mut [f32],
        staged: &'a mut [f32],
        logits: &'a mut [f32],
        dweight: &'a mut [E],
        kept: &'a mut [E],
    ) -> Self {
        let hidden = match as_f32(operands.hidden) {
            Some(hidden) => hidden,
            None => {
                let width = linear.shape.width();
                let shared = Shared::new(hidden);
                linear.share(linear.shape.tokens(), &|first, count| {
                    // SAFETY: tasks have rows of their own.
                    let to = unsafe { shared.slice(first * width, count * width) };
                    let from = &operands.hidden[first * width..][..count * width];
                    widen(linear.launch.isa, from, to);
                });
                hidden
            }
        };
        let (staged, logits) = (Shared::new(staged), Shared::new(logits));
        let (dweight, kept) = (Shared::new(dweight), Shared::new(kept));
        Self { linear, operands, hidden, staged, logits, dweight, kept }
    }

    /// The rows of a slab of the weight, or of its gradient, and the elements of a row.
    fn weight_extents(&self, columns: &Range<usize>) -> (usize, usize) {
        let width = self.linear.shape.width();
        match self.linear.shape.vocab_axis() {
            VocabAxis::First => (columns.len(), width),
            VocabAxis::Last => (width, columns.len()),
        }
    }

    /// Where row `row` of a slab of the weight begins.
    fn weight_row(&self, columns: &Range<usize>, row: usize) -> usize {
        match self.linear.shape.vocab_axis() {
            VocabAxis::First => (columns.start + row) * self.linear.shape.width(),
            VocabAxis::Last => row * self.linear.shape.vocab() + columns.start,
        }
    }

    /// Copies a slab of the weight to f32, where that is not how it lies.
    fn stage(&self, columns: &Range<usize>) {
        if !stages_weight(self.linear.shape, E::DTYPE) {
            return;
        }
        let (rows, width) = self.weight_extents(columns);
        self.linear.share(rows, &|first, count| {
            // SAFETY: tasks have rows of their own.
            let to = unsafe { self.staged.slice(first * width, count * width) };
            for (row, to) in (first..).zip(to.chunks_exact_mut(width)) {
                let from = &self.operands.weight[self.weight_row(columns, row)..][..width];
                widen(self.linear.launch.isa, from, to);
            }
        });
    }

    /// A staged slab of the weight as `[D, columns]`.
    ///
    /// # Safety
    /// Nobody writes it meanwhile.
    unsafe fn weight(&self, columns: &Range<usize>) -> Factor<'_> {
        let (rows, width) = self.weight_extents(columns);
        let data = if stages_weight(self.linear.shape, E::DTYPE) {
            // SAFETY: passed on from this function's contract.
            unsafe { self.staged.read(0, rows * width) }
        } else {
            let weight = as_f32(self.operands.weight).expect("what is not f32 is staged");
            &weight[self.weight_row(columns, 0)..][..rows * width]
        };
        let weight = Factor::new(data, width);
        match self.linear.shape.vocab_axis() {
            VocabAxis::First => weight.transposed(),
            VocabAxis::Last => weight,
        }
    }

    fn hidden_rows(&self, first: usize, count: usize) -> Factor<'a> {
        Factor::new(self.hidden, self.linear.shape.width()).rows(first, count)
    }

    /// Makes the logits of some tokens of a staged slab, each rounded once.
    ///
    /// # Safety
    /// The weight is staged, and nobody writes it meanwhile.
    unsafe fn make(&self, columns: &Range<usize>, first: usize, count: usize, logits: &mut [f32]) {
        // SAFETY: passed on from this function's contract.
        let weight = unsafe { self.weight(columns) };
        multiply(self.hidden_rows(first, count), weight, false, logits);
        if let Some(bias) = self.operands.bias {
            for row in logits.chunks_exact_mut(columns.len()) {
                for (logit, bias) in row.iter_mut().zip(&bias[columns.clone()]) {
                    *logit += bias;
                }
            }
        }
        round::<E>(self.linear.launch.isa, logits);
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

    /// The sums of each token over `slabs`, of those that are wanted.
    fn sums(&self, slabs: &[Slab], want: impl Fn(usize) -> bool) -> Vec<RowStatistics> {
        let Linear { kernel, launch, shape, .. } = self.linear;
        let mut rows: Vec<_> =
            (0..shape.tokens()).map(|token| RowStatistics::new(want(token), None)).collect();
        let shared = Shared::new(&mut rows);
        for Slab { columns, kept } in slabs {
            self.stage(columns);
            self.linear.share(shape.tokens(), &|first, count| {
                let at = first * columns.len();
                // SAFETY: tasks have tokens of their own, and the weight stays as it is.
                unsafe {
                    let logits = self.logits.slice(at, count * columns.len());
                    self.make(columns, first, count, logits);
                    if let Some(kept) = *kept {
                        narrow(launch.isa, logits, self.kept(kept, at, logits.len()));
                    }
                    let rows = shared.slice(first, count);
                    kernel.add_columns(logits, first, columns, rows).expect("whole rows");
                }
            });
        }
        rows
    }

    /// Writes what follows from the [`Self::sums`] of the tokens of which `outputs` want something.
    fn write_sums(&self, slabs: &[Slab], outputs: &Outputs<'_>) {
        let kernel = &self.linear.kernel;
        let want = |token| outputs.want(kernel, token, !kernel.is_ignored(token));
        for (token, row) in self.sums(slabs, want).iter().enumerate() {
            // SAFETY: nobody else writes.
            unsafe { outputs.write(token, kernel.token_values(token, row)) };
        }
    }

    /// Gradients over `slabs`, in their order.
    fn gradients(
        &self,
        slabs: &[Slab],
        saved: SavedLse<'_>,
        cotangents: &TokenCotangents<'_>,
        dhidden: &mut [E],
        sums: &mut [f32],
        dbias: Option<&mut [f32]>,
    ) {
        if let Some(sums) = as_f32_mut(dhidden) {
            return self.summed(slabs, saved, cotangents, sums, dbias);
        }
        self.summed(slabs, saved, cotangents, sums, dbias);
        let width = self.linear.shape.width();
        let dhidden = Shared::new(dhidden);
        self.linear.share(self.linear.shape.tokens(), &|first, count| {
            // SAFETY: tasks have tokens of their own.
            let to = unsafe { dhidden.slice(first * width, count * width) };
            narrow(self.linear.launch.isa, &sums[first * width..][..count * width], to);
        });
    }

    /// As [`Self::gradients`], those of hidden states in f32.
    fn summed(
        &self,
        slabs: &[Slab],
        saved: SavedLse<'_>,
        cotangents: &TokenCotangents<'_>,
        dhidden: &mut [f32],
        mut dbias: Option<&mut [f32]>,
    ) {
        let [tokens, width] = self.linear.shape.hidden();
        let dhidden = Shared::new(dhidden);
        for slab in slabs {
            let columns = &slab.columns;
            self.stage(columns);
            self.linear.share(tokens, &|first, count| {
                // SAFETY: tasks have tokens of their own, and the weight stays as it is.
                unsafe {
                    let dz = self.logits_gradient(slab, first, count, saved, cotangents);
                    let sums = dhidden.slice(first * width, count * width);
                    let (dz, weight) = (Factor::new(dz, columns.len()), self.weight(columns));
                    multiply(dz, weight.transposed(), columns.start > 0, sums);
                }
            });
            // SAFETY: what follows writes no logits.
            let dz = unsafe { self.logits.read(0, tokens * columns.len()) };
            let dz = Factor::new(dz, columns.len());
            self.weight_gradient(columns, dz);
            if let Some(dbias) = &mut dbias {
                self.bias_gradient(dz, &mut dbias[columns.clone()]);
            }
        }
    }

    /// The gradient of the logits of some tokens of a staged slab, which lies where logits do.
    ///
    /// # Safety
    /// Nobody else has those tokens, or writes the weight meanwhile.
    unsafe fn logits_gradient(
        &self,
        slab: &Slab,
        first: usize,
        count: usize,
        saved: SavedLse<'_>,
        cotangents: &TokenCotangents<'_>,
    ) -> &[f32] {
        let (at, length) = (first * slab.columns.len(), count * slab.columns.len());
        // SAFETY: passed on from this function's contract.
        let logits = unsafe { self.logits.slice(at, length) };
        match slab.kept {
            // SAFETY: passed on from this function's contract.
            None => unsafe { self.make(&slab.columns, first, count, logits) },
            Some(kept) => {
                // SAFETY: passed on from this function's contract.
                let kept = unsafe { self.kept(kept, at, length) };
                widen(self.linear.launch.isa, kept, logits);
            }
        }
        let kernel = &self.linear.kernel;
        kernel
            .columns_gradient(logits, first, &slab.columns, saved, cotangents)
            .expect("whole rows");
        logits
    }

    /// Writes the gradient of a slab of the weight, of `dz` `[T, columns]`.
    fn weight_gradient(&self, columns: &Range<usize>, dz: Factor) {
        let (rows, width) = self.weight_extents(columns);
        let hidden = self.hidden_rows(0, self.linear.shape.tokens());
        let (across, other) = match self.linear.shape.vocab_axis() {
            VocabAxis::First => (dz.transposed(), hidden),
            VocabAxis::Last => (hidden.transposed(), dz),
        };
        let staged = stages_weight(self.linear.shape, E::DTYPE);
        self.linear.share(rows, &|first, count| {
            let across = across.rows(first, count);
            // SAFETY: tasks have rows of their own, and what was staged or kept there was read.
            unsafe {
                if !staged {
                    let at = self.weight_row(columns, first);
                    let to = self.dweight.slice(at, count * width);
                    multiply(across, other, false, as_f32_mut(to).expect("what is not is staged"));
                    return;
                }
                let sums = self.staged.slice(first * width, count * width);
                multiply(across, other, false, sums);
                for (row, sums) in (first..).zip(sums.chunks_exact(width)) {
                    let to = self.dweight.slice(self.weight_row(columns, row), width);
                    narrow(self.linear.launch.isa, sums, to);
                }
            }
        });
    }

    /// Sums `dz` `[T, columns]` over tokens.
    fn bias_gradient(&self, dz: Factor, to: &mut [f32]) {
        let to = Shared::new(to);
        self.linear.share(dz.columns(), &|first, count| {
            // SAFETY: tasks have columns of their own.
            let to = unsafe { to.slice(first, count) };
            to.fill(0.0);
            for token in 0..self.linear.shape.tokens() {
                for (sum, dz) in to.iter_mut().zip(&dz.row(token)[first..]) {
                    *sum += dz;
                }
            }
        });
    }
}

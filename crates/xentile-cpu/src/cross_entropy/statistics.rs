//! The forward pass over a tile: for each row the sum of exponentials, relative to a shift.
//!
//! Any shift serves that keeps the sum in range, not only the maximum, so a row is read once: the
//! maximum of a block's first columns becomes its shift, and the block is done again, with a new
//! shift, only where its maximum exceeds that by more than [`HEADROOM`]. (The usual online rescaling,
//! Milakov and Gimelshein 2018, rescales whenever the maximum moves.)
//!
//! A block is summed by itself, and a row is its blocks' sums added up in their order. So blocks of a
//! row may be summed at a time by several threads, and no bit depends on who does it.

use std::ops::Range;

use xentile::Element;

use super::matrix::{Ahead, Matrix};
use crate::Job;
use crate::math::{EXP_SCALE, Exponential, Halves, capped_with_derivative, exp};
use crate::simd::{MAX_CHUNK, Simd};

/// How far a logit may exceed the shift: [`PANEL`] terms of `EXP_SCALE * e^32` are far below f32's
/// largest, and the shift of a row stays within reach of its largest logit.
const HEADROOM: f32 = 32.0;

/// Columns summed in f32 lanes before the sum goes to float64.
const PANEL: usize = 4096;

/// The columns of a block whose maximum is the first shift: enough for logits far apart, of standard
/// deviation 45, to exceed it seldom by so much.
const SAMPLE: usize = 1024;

/// What the pass says of one row.
#[derive(Clone, Debug)]
pub(crate) struct RowStatistics {
    wanted: bool,
    /// The shift, once some logit is above -inf.
    shift: Option<f32>,
    /// Sum of `EXP_SCALE * exp(z - shift)`.
    sum: f64,
    /// Sum of `z - shift`.
    total: f64,
    /// Columns summed.
    columns: usize,
    label: Option<Label>,
}

/// The labelled column of a row. Its exponential is added in float64, so that a row that is nearly
/// certain of its label keeps an exact `1 - p`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Label {
    pub(super) column: usize,
    /// Its (capped) logit.
    pub(super) logit: f64,
}

impl Label {
    /// The label counted from `start`, if it is one of the next `columns`.
    fn within(self, start: usize, columns: usize) -> Option<Self> {
        let column = self.column.checked_sub(start)?;
        (column < columns).then_some(Self { column, ..self })
    }
}

impl RowStatistics {
    /// A row before the pass; an unwanted one is left alone by it.
    pub(crate) fn new(wanted: bool, label: Option<Label>) -> Self {
        Self { wanted, shift: None, sum: 0.0, total: 0.0, columns: 0, label }
    }

    /// Says which column is the label's, before the pass over it.
    pub(super) fn set_label(&mut self, label: Label) {
        self.label = Some(label);
    }

    /// Whether the pass looks at the row.
    pub(super) fn wanted(&self) -> bool {
        self.wanted
    }

    /// The row's label; none also for an unwanted row.
    pub(super) fn label(&self) -> Option<Label> {
        self.label
    }

    /// `logsumexp` of the row; NaN for a row without a finite sum, and for an unwanted one.
    pub(super) fn lse(&self) -> f64 {
        self.shift
            .map_or(f64::NAN, |shift| f64::from(shift) + (self.sum / f64::from(EXP_SCALE)).ln())
    }

    /// The mean of the row of `vocab` columns.
    pub(super) fn mean(&self, vocab: usize) -> f64 {
        f64::from(self.shift.unwrap_or(0.0)) + self.total / vocab as f64
    }

    /// Adds what comes after: `next` is of the same row.
    pub(super) fn add(&mut self, next: &Self) {
        if let Some(shift) = next.shift
            && self.shift.is_none_or(|own| shift > own)
        {
            let change = self.above(Some(shift));
            if self.sum != 0.0 {
                self.sum *= change.exp();
            }
            self.total += self.columns as f64 * change;
            self.shift = Some(shift);
        }
        let change = next.above(self.shift);
        self.sum += if next.sum == 0.0 { 0.0 } else { next.sum * change.exp() };
        self.total += next.total + next.columns as f64 * change;
        self.columns += next.columns;
    }

    /// How far the shift lies above another; none stands for 0.
    fn above(&self, shift: Option<f32>) -> f64 {
        f64::from(self.shift.unwrap_or(0.0)) - f64::from(shift.unwrap_or(0.0))
    }
}

/// The pass over the rows of one tile.
pub(crate) struct Statistics<'a, E> {
    pub(super) matrix: &'a Matrix<'a, E>,
    /// The tile's first token.
    pub(super) first: usize,
    /// The vocabulary's column that is the first of the matrix.
    pub(super) first_column: usize,
    /// The tile's rows, updated.
    pub(super) rows: &'a mut [RowStatistics],
    pub(super) block_size: usize,
    /// The blocks to look at, by number.
    pub(super) blocks: Range<usize>,
    pub(super) softcap: Option<f64>,
    /// Whether the mean is wanted.
    pub(super) mean: bool,
    /// Prefetch the logits this many tokens on.
    pub(super) ahead: Option<usize>,
}

impl<E: Element> Job for Statistics<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match (self.softcap, self.mean) {
            (None, false) => self.pass::<S, false, false>(s, 0.0),
            (None, true) => self.pass::<S, false, true>(s, 0.0),
            (Some(cap), false) => self.pass::<S, true, false>(s, cap as f32),
            (Some(cap), true) => self.pass::<S, true, true>(s, cap as f32),
        }
    }
}

impl<E: Element> Statistics<'_, E> {
    #[inline(always)]
    fn pass<S: Simd, const CAP: bool, const MEAN: bool>(self, s: S, cap: f32) {
        let vocab = self.matrix.shape().vocab();
        for block in self.blocks.clone() {
            let column = block * self.block_size;
            let columns = self.block_size.min(vocab - column);
            for (row, token) in self.rows.iter_mut().zip(self.first..) {
                if !row.wanted {
                    continue;
                }
                // SAFETY: the row has V elements, of which the block takes those from `column`.
                let logits = unsafe { self.matrix.logits(token).add(column) };
                let block = Block::<S, E, CAP, MEAN> {
                    simd: s,
                    logits,
                    columns,
                    cap,
                    label: row
                        .label
                        .and_then(|label| label.within(self.first_column + column, columns)),
                    ahead: Ahead::new(self.matrix, token, self.ahead).from(column),
                };
                // SAFETY: as above; nobody writes logits in this pass.
                row.add(&unsafe { block.statistics() });
            }
        }
    }
}

/// Some columns of one row.
struct Block<S, E, const CAP: bool, const MEAN: bool> {
    simd: S,
    logits: *const E,
    columns: usize,
    cap: f32,
    /// The label where it is one of these columns, counted from the first.
    label: Option<Label>,
    ahead: Ahead<E>,
}

/// What one sweep over a block finds.
struct Sums {
    max: f32,
    sum: f64,
    total: f64,
}

/// [`Sums`] in the making, in two sets of lanes.
struct Lanes<V> {
    max: [V; 2],
    sum: [V; 2],
    total: [V; 2],
}

impl<S: Simd, E: Element, const CAP: bool, const MEAN: bool> Block<S, E, CAP, MEAN> {
    /// # Safety
    /// `logits` is valid for reads of `columns` elements.
    #[inline(always)]
    unsafe fn statistics(&self) -> RowStatistics {
        // SAFETY: the same contract.
        let max = unsafe { self.max(SAMPLE.min(self.columns)) };
        // Columns of nothing but -inf (or NaN) sum to 0 (or NaN) under any shift.
        let mut shift = (max > f32::NEG_INFINITY).then_some(max);
        // Written once, as its code is long: a second round has a shift that no logit exceeds.
        loop {
            // SAFETY: the same contract.
            let sums = unsafe { self.sums(shift.unwrap_or(0.0)) };
            if sums.max > shift.map_or(f32::NEG_INFINITY, |shift| shift + HEADROOM) {
                shift = Some(sums.max);
                continue;
            }
            let Sums { sum, total, .. } = sums;
            let columns = self.columns;
            return RowStatistics { wanted: true, shift, sum, total, columns, label: None };
        }
    }

    #[inline(always)]
    fn capped<const N: usize>(&self, mut z: [S::Vector; N]) -> [S::Vector; N] {
        let s = self.simd;
        if CAP {
            let cap = [s.splat(self.cap), s.splat(1.0 / self.cap)];
            [z, _] = capped_with_derivative(s, z, cap);
        }
        z
    }

    /// Adds `N` vectors of logits to `lanes`, even ones to the first of each pair.
    #[inline(always)]
    fn accumulate<const N: usize>(
        &self,
        lanes: &mut Lanes<S::Vector>,
        mut z: [S::Vector; N],
        shift: S::Vector,
    ) {
        let s = self.simd;
        z = self.capped(z);
        let mut distance = z;
        for i in 0..N {
            distance[i] = s.sub(z[i], shift);
            lanes.max[i % 2] = s.max(z[i], lanes.max[i % 2]);
        }
        let exps = exp(s, distance);
        for i in 0..N {
            lanes.sum[i % 2] = s.add(lanes.sum[i % 2], exps[i]);
            if MEAN {
                lanes.total[i % 2] = s.add(lanes.total[i % 2], distance[i]);
            }
        }
    }

    /// The largest (capped) logit of the first `columns`, NaN left aside.
    ///
    /// # Safety
    /// As for [`Self::statistics`]; the block has so many columns.
    #[inline(always)]
    unsafe fn max(&self, columns: usize) -> f32 {
        let s = self.simd;
        let mut max = [s.splat(f32::NEG_INFINITY); 2];
        let whole = columns - columns % S::CHUNK;
        for column in (0..whole).step_by(S::CHUNK) {
            // SAFETY: the chunk ends within the block.
            let z = unsafe { s.load(self.logits.add(column)) };
            max = [s.max(z[0], max[0]), s.max(z[1], max[1])];
        }
        let mut largest = s.largest(s.max(max[0], max[1]));
        for column in whole..columns {
            // SAFETY: a column of the block.
            largest = largest.max(unsafe { *self.logits.add(column) }.to_f32());
        }
        let [largest] = self.capped([s.splat(largest)]);
        s.largest(largest)
    }

    /// Sums the block relative to `shift`.
    ///
    /// # Safety
    /// As for [`Self::statistics`].
    #[inline(always)]
    unsafe fn sums(&self, shift: f32) -> Sums {
        let mut sums = Sums { max: f32::NEG_INFINITY, sum: 0.0, total: 0.0 };
        let whole = self.columns - self.columns % S::CHUNK;
        let mut chunk_of_label = [0, 0];
        if let Some(label) = self.label.filter(|label| label.column < whole) {
            let start = label.column - label.column % S::CHUNK;
            chunk_of_label = [start, start + S::CHUNK];
        }
        let [label, next] = chunk_of_label;
        // Whole chunks up to the label's, and those after it, with what ends them.
        for (start, ragged, end) in [(0, label, next), (next, whole, self.columns)] {
            // SAFETY: the ranges lie in the block.
            unsafe {
                self.add_chunks(&mut sums, start, ragged, shift);
                if ragged < end {
                    self.add_ragged(&mut sums, ragged, end, shift);
                }
            }
        }
        sums
    }

    /// Adds whole chunks of columns.
    ///
    /// # Safety
    /// As for [`Self::statistics`]; the range lies in the block and is whole chunks long.
    #[inline(always)]
    unsafe fn add_chunks(&self, sums: &mut Sums, start: usize, end: usize, shift: f32) {
        let s = self.simd;
        if S::HALVES && !CAP {
            for start in (start..end).step_by(PANEL) {
                let found = s.outline(Panel::<E, MEAN> {
                    logits: self.logits.wrapping_add(start),
                    columns: PANEL.min(end - start),
                    shift,
                });
                sums.max = sums.max.max(found.max);
                sums.sum += found.sum;
                sums.total += found.total;
            }
            return;
        }
        let (zero, shift) = (s.splat(0.0), s.splat(shift));
        let mut lanes =
            Lanes { max: [s.splat(f32::NEG_INFINITY); 2], sum: [zero; 2], total: [zero; 2] };
        let mut column = start;
        while column < end {
            let panel_end = end.min(column + PANEL);
            (lanes.sum, lanes.total) = ([zero; 2], [zero; 2]);
            while S::REGISTERS == 32 && column + 2 * S::CHUNK <= panel_end {
                self.ahead.fetch(s, column);
                // SAFETY: both chunks end within the range.
                let ([a, b], [c, d]) = unsafe {
                    let at = self.logits.add(column);
                    (s.load(at), s.load(at.add(S::CHUNK)))
                };
                self.accumulate(&mut lanes, [a, b, c, d], shift);
                column += 2 * S::CHUNK;
            }
            while column < panel_end {
                // SAFETY: the chunk ends within the range.
                let z = unsafe { s.load(self.logits.add(column)) };
                self.accumulate(&mut lanes, z, shift);
                column += S::CHUNK;
            }
            sums.sum += s.sum(s.add(lanes.sum[0], lanes.sum[1]));
            if MEAN {
                sums.total += s.sum(s.add(lanes.total[0], lanes.total[1]));
            }
        }
        sums.max = sums.max.max(s.largest(s.max(lanes.max[0], lanes.max[1])));
    }

    /// Adds at most a chunk of columns, each exponential to float64 by itself, the label's being
    /// computed there.
    ///
    /// # Safety
    /// As for [`Self::statistics`]; the range lies in the block.
    #[inline(always)]
    unsafe fn add_ragged(&self, sums: &mut Sums, start: usize, end: usize, shift: f32) {
        let s = self.simd;
        // Widened to f32, whose lanes are stored in the order of columns.
        let mut z = [0.0_f32; MAX_CHUNK];
        for (z, column) in z.iter_mut().zip(start..end) {
            // SAFETY: a column of the block.
            *z = unsafe { *self.logits.add(column) }.to_f32();
        }
        let mut exps = [0.0_f32; MAX_CHUNK];
        // SAFETY: the buffers hold the largest chunk there is.
        unsafe {
            let [a, b] = s.load(z.as_ptr());
            let [a, b] = self.capped([a, b]);
            s.store([a, b], z.as_mut_ptr());
            let shift = s.splat(shift);
            s.store(exp(s, [s.sub(a, shift), s.sub(b, shift)]), exps.as_mut_ptr());
        }
        for ((z, e), column) in z.into_iter().zip(exps).zip(start..end) {
            sums.max = sums.max.max(z);
            sums.total += f64::from(z - shift);
            sums.sum += match self.label {
                Some(label) if label.column == column => {
                    (label.logit - f64::from(shift)).exp() * f64::from(EXP_SCALE)
                }
                _ => f64::from(e),
            };
        }
    }
}

/// At most [`PANEL`] columns by [`Halves`]: whole chunks, one at least. Whoever makes one vouches
/// that the logits may be read.
struct Panel<E, const MEAN: bool> {
    logits: *const E,
    columns: usize,
    shift: f32,
}

impl<E: Element, const MEAN: bool> Job for Panel<E, MEAN> {
    type Output = Sums;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Sums {
        let (e, shift) = (Exponential::new(s, 1.0), s.splat(self.shift));
        let mut max = s.splat(f32::NEG_INFINITY);
        let (mut sum, mut total) = ([s.splat(0.0); 2], s.splat(0.0));
        // SAFETY: here and below the chunk lies in the panel.
        let [a, b] = unsafe { s.load(self.logits) };
        max = s.max(b, s.max(a, max));
        let (a, b) = (s.sub(a, shift), s.sub(b, shift));
        if MEAN {
            total = s.add(total, s.add(a, b));
        }
        sum[0] = Halves::new(s, &e, a).add_to(s, &e, sum[0]);
        let mut halves = Halves::new(s, &e, b);
        for column in (S::CHUNK..self.columns).step_by(S::CHUNK) {
            // SAFETY: see above.
            let [a, b] = unsafe { s.load(self.logits.add(column)) };
            max = s.max(b, s.max(a, max));
            let (a, b) = (s.sub(a, shift), s.sub(b, shift));
            if MEAN {
                total = s.add(total, s.add(a, b));
            }
            let first = Halves::new(s, &e, a);
            sum[1] = halves.add_to(s, &e, sum[1]);
            halves = Halves::new(s, &e, b);
            sum[0] = first.add_to(s, &e, sum[0]);
        }
        sum[1] = halves.add_to(s, &e, sum[1]);
        let total = if MEAN { s.sum(total) } else { 0.0 };
        Sums { max: s.largest(max), sum: s.sum(s.add(sum[0], sum[1])), total }
    }
}

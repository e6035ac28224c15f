//! Rows of so few columns that what a row needs beside them would cost more than they do: many rows
//! are a task, and what is done in float64 is done for several rows in one go.
//!
//! A row's exponentials are computed once, relative to its maximum, and kept in the first-level cache
//! until its sum is known, of which the gradient is a factor. The backward pass computes them in the
//! same way, so that both schedules give the same bits.

use xentile::Element;

use super::gradient::RowGradient;
use super::matrix::{Ahead, Matrix};
use super::statistics::Label;
use super::{SavedLse, at_eighths, split};
use crate::math::{EXP_SCALE, capped_with_derivative, exp, exponential, logarithm};
use crate::simd::{LINE_BYTES, STREAM_BYTES, Simd};
use crate::{Isa, Job};

/// The most columns of such a row.
pub(super) const LONGEST: usize = 4096;

/// Rows that are worked on together, if they are short enough.
const MOST_ROWS: usize = 64;

/// Columns that are worked on together.
const COLUMNS: usize = 6144;

/// Rows whose float64 numbers are computed together.
const ABREAST: usize = 8;

/// How many rows of `vocab` columns are worked on together.
pub(super) fn rows_together(vocab: usize) -> usize {
    (COLUMNS / vocab).clamp(2, MOST_ROWS)
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShortRow {
    /// Whether its logits are read.
    pub(super) read: bool,
    pub(super) label: Option<Label>,
    /// Near the largest logit; NaN where none is above -inf.
    pub(super) shift: f32,
    /// Sum of `EXP_SCALE * exp(z - shift)`, without the label's.
    rest: f64,
    /// Sum of `z`.
    pub(super) total: f64,
    pub(super) lse: f64,
    /// `lse` as the backward pass reads it.
    pub(super) saved: f64,
    /// `exp(shift - saved)`
    pub(super) factor: f64,
    /// `p - 1` of the label.
    pub(super) p_less_one: f64,
}

impl ShortRow {
    pub(super) fn new(read: bool, label: Option<Label>) -> Self {
        Self {
            read,
            label,
            shift: f32::NAN,
            rest: f64::NAN,
            total: 0.0,
            lse: f64::NAN,
            saved: f64::NAN,
            factor: f64::NAN,
            p_less_one: f64::NAN,
        }
    }
}

/// What exponentials are kept in: for each row as many numbers as whole chunks have, and behind them
/// all, with softcap, the derivatives of capped logits.
pub(super) struct Kept {
    numbers: Vec<f32>,
    /// Where derivatives begin.
    slopes: usize,
}

/// More than a chunk of any instruction set.
const GRAIN: usize = crate::simd::MAX_CHUNK;

impl Kept {
    pub(super) fn new(rows: usize, vocab: usize, softcap: bool) -> Self {
        let slopes = rows * vocab.next_multiple_of(GRAIN);
        Self { numbers: vec![0.0; slopes * (1 + usize::from(softcap))], slopes }
    }

    /// The exponentials of row `index` of `vocab` columns, and its derivatives, if any.
    #[inline(always)]
    fn row<const CAP: bool>(&mut self, index: usize, vocab: usize) -> [&mut [f32]; 2] {
        let length = vocab.next_multiple_of(GRAIN);
        let (numbers, slopes) = self.numbers.split_at_mut(self.slopes);
        let at = index * length..(index + 1) * length;
        let slopes = if CAP { &mut slopes[at.clone()] } else { &mut [] };
        [&mut numbers[at], slopes]
    }
}

/// Reads rows and keeps their exponentials.
pub(super) struct Exponentials<'a, E> {
    pub(super) matrix: &'a Matrix<'a, E>,
    pub(super) first: usize,
    pub(super) rows: &'a mut [ShortRow],
    pub(super) kept: &'a mut Kept,
    pub(super) softcap: Option<f64>,
    /// Whether the mean is wanted.
    pub(super) mean: bool,
}

impl<E: Element> Job for Exponentials<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.softcap {
            None => self.pass::<S, false>(s, 1.0),
            Some(cap) => self.pass::<S, true>(s, cap as f32),
        }
    }
}

impl<E: Element> Exponentials<'_, E> {
    #[inline(always)]
    fn pass<S: Simd, const CAP: bool>(self, s: S, cap: f32) {
        let vocab = self.matrix.shape().vocab();
        for (index, row) in self.rows.iter_mut().enumerate() {
            if !row.read {
                continue;
            }
            let logits = self.matrix.logits(self.first + index);
            let [kept, slopes] = self.kept.row::<CAP>(index, vocab);
            // SAFETY: the row has V elements, and what is kept of it whole chunks of as many.
            unsafe {
                let max = largest(s, logits, vocab);
                let max =
                    if CAP { (f64::from(cap) * f64::from(max / cap).tanh()) as f32 } else { max };
                if max == f32::NEG_INFINITY {
                    continue;
                }
                row.shift = at_eighths(max.into());
                let ahead = Ahead::new(self.matrix, self.first + index, Some(rows_together(vocab)));
                let numbers = [row.shift, cap];
                keep::<S, E, CAP>(s, logits, vocab, numbers, [&mut *kept, slopes], ahead);
                if self.mean {
                    // Seldom asked for.
                    row.total = total::<S, E, CAP>(s, logits, vocab, cap);
                }
            }
            if let Some(label) = row.label {
                kept[label.column / S::CHUNK * S::CHUNK + S::place::<E>(label.column % S::CHUNK)] =
                    0.0;
            }
            row.rest = sum(s, &kept[..vocab.next_multiple_of(S::CHUNK)]);
        }
    }
}

/// The largest of some logits, NaN left aside.
///
/// # Safety
/// `logits` is valid for reads of `columns` elements.
#[inline(always)]
unsafe fn largest<S: Simd, E: Element>(s: S, logits: *const E, columns: usize) -> f32 {
    let mut max = [s.splat(f32::NEG_INFINITY); 2];
    let whole = columns - columns % S::CHUNK;
    for column in (0..whole).step_by(S::CHUNK) {
        // SAFETY: the chunk is among the columns.
        let z = unsafe { s.load(logits.add(column)) };
        max = [s.max(z[0], max[0]), s.max(z[1], max[1])];
    }
    if whole < columns {
        // SAFETY: so many columns are left.
        let z = unsafe {
            s.load_part(logits.add(whole), columns - whole, E::from_f32(f32::NEG_INFINITY))
        };
        max = [s.max(z[0], max[0]), s.max(z[1], max[1])];
    }
    s.largest(s.max(max[0], max[1]))
}

/// The exponentials of logits, and with softcap its derivatives.
///
/// # Safety
/// As for [`largest`], and what is kept has whole chunks of as many elements.
#[inline(always)]
unsafe fn keep<S: Simd, E: Element, const CAP: bool>(
    s: S,
    logits: *const E,
    columns: usize,
    [shift, cap]: [f32; 2],
    [kept, slopes]: [&mut [f32]; 2],
    ahead: Ahead<E>,
) {
    assert!(columns.next_multiple_of(S::CHUNK) <= kept.len());
    assert!(!CAP || slopes.len() == kept.len());
    let of = [s.splat(shift), s.splat(cap), s.splat(1.0 / cap)];
    let (kept, slopes) = (kept.as_mut_ptr(), slopes.as_mut_ptr());
    let whole = columns - columns % S::CHUNK;
    let mut column = 0;
    // SAFETY: chunks that are read are among the columns, and those that are written as asserted.
    unsafe {
        while S::REGISTERS == 32 && column + 2 * S::CHUNK <= whole {
            ahead.fetch(s, column);
            ahead.fetch(s, column + S::CHUNK);
            let at = logits.add(column);
            let ([a, b], [c, d]) = (s.load(at), s.load(at.add(S::CHUNK)));
            let [[a, b, c, d], slope] = kept_of::<S, CAP, 4>(s, [a, b, c, d], of);
            s.store([a, b], kept.add(column));
            s.store([c, d], kept.add(column + S::CHUNK));
            if CAP {
                s.store([slope[0], slope[1]], slopes.add(column));
                s.store([slope[2], slope[3]], slopes.add(column + S::CHUNK));
            }
            column += 2 * S::CHUNK;
        }
        while column < columns {
            ahead.fetch(s, column);
            let left = columns - column;
            let z = if left < S::CHUNK {
                s.load_part(logits.add(column), left, E::from_f32(f32::NEG_INFINITY))
            } else {
                s.load(logits.add(column))
            };
            let [exps, slope] = kept_of::<S, CAP, 2>(s, z, of);
            s.store(exps, kept.add(column));
            if CAP {
                s.store(slope, slopes.add(column));
            }
            column += S::CHUNK;
        }
    }
    if CAP {
        // What is not there has been capped as well.
        for index in columns..columns.next_multiple_of(S::CHUNK) {
            let place = whole + S::place::<E>(index - whole);
            // SAFETY: in the last chunk of what is kept.
            unsafe { *kept.add(place) = 0.0 };
        }
    }
}

/// Exponentials of logits, with the derivatives of capped ones.
#[inline(always)]
fn kept_of<S: Simd, const CAP: bool, const N: usize>(
    s: S,
    z: [S::Vector; N],
    [shift, cap, inverse_cap]: [S::Vector; 3],
) -> [[S::Vector; N]; 2] {
    let (mut distance, mut slope) = (z, z);
    if CAP {
        [distance, slope] = capped_with_derivative(s, z, [cap, inverse_cap]);
    }
    for distance in &mut distance {
        *distance = s.sub(*distance, shift);
    }
    [exp(s, distance), slope]
}

/// The sum of (capped) logits.
///
/// # Safety
/// As for [`largest`].
#[inline(always)]
unsafe fn total<S: Simd, E: Element, const CAP: bool>(
    s: S,
    logits: *const E,
    columns: usize,
    cap: f32,
) -> f64 {
    let mut total = 0.0;
    for column in (0..columns).step_by(S::CHUNK) {
        let left = S::CHUNK.min(columns - column);
        // SAFETY: so many columns are left.
        let mut z = unsafe { s.load_part(logits.add(column), left, E::from_f32(0.0)) };
        if CAP {
            [z, _] = capped_with_derivative(s, z, [s.splat(cap), s.splat(1.0 / cap)]);
        }
        total += s.sum(z[0]) + s.sum(z[1]);
    }
    total
}

/// Whole chunks added up: in f32 lanes, then in float64.
#[inline(always)]
fn sum<S: Simd>(s: S, numbers: &[f32]) -> f64 {
    let mut sum = [s.splat(0.0); 2];
    for chunk in numbers.chunks_exact(S::CHUNK) {
        // SAFETY: a chunk of f32.
        let [a, b] = unsafe { s.load(chunk.as_ptr()) };
        sum = [s.add(sum[0], a), s.add(sum[1], b)];
    }
    s.sum(s.add(sum[0], sum[1]))
}

/// What a row needs in float64.
pub(super) struct Sums<'a> {
    pub(super) first: usize,
    pub(super) rows: &'a mut [ShortRow],
    /// `lse`, where the forward pass has given it.
    pub(super) saved: Option<SavedLse<'a>>,
}

impl Job for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (block, rows) in self.rows.chunks_mut(ABREAST).enumerate() {
            let first = self.first + block * ABREAST;
            let [mut logit, mut shift, mut rest, mut saved] = [[0.0; ABREAST]; 4];
            for (i, row) in rows.iter().enumerate() {
                logit[i] = row.label.map_or(f64::NEG_INFINITY, |label| label.logit);
                shift[i] = row.shift.into();
                rest[i] = row.rest;
                saved[i] = self.saved.map_or(f64::NAN, |saved| saved.exact(first + i));
            }
            let mut lse = [f64::NAN; ABREAST];
            if self.saved.is_none() {
                for i in 0..ABREAST {
                    let [label, _] = exponential::<S>(logit[i] - shift[i]);
                    let sum = rest[i] * (1.0 / f64::from(EXP_SCALE)) + label;
                    lse[i] = shift[i] + logarithm::<S>(sum);
                }
                for i in 0..ABREAST {
                    let (high, low) = split(lse[i]);
                    saved[i] = f64::from(high) + f64::from(low);
                }
            }
            let [mut factor, mut p_less_one] = [[0.0; ABREAST]; 2];
            for i in 0..ABREAST {
                [factor[i], _] = exponential::<S>(shift[i] - saved[i]);
                [_, p_less_one[i]] = exponential::<S>(logit[i] - saved[i]);
            }
            for (i, row) in rows.iter_mut().enumerate() {
                (row.lse, row.saved) = (lse[i], saved[i]);
                (row.factor, row.p_less_one) = (factor[i], p_less_one[i]);
            }
        }
    }
}

/// Writes the gradients of rows whose exponentials are kept.
pub(super) struct Gradients<'a, E> {
    pub(super) matrix: &'a Matrix<'a, E>,
    pub(super) first: usize,
    pub(super) rows: &'a [RowGradient],
    pub(super) kept: &'a mut Kept,
    /// Gradients on their way past the caches: empty, or as many as the rows have.
    pub(super) stage: &'a mut [E],
    pub(super) softcap: bool,
}

/// Whether gradients of so many elements go past the caches.
pub(super) fn streams<E>(elements: usize) -> bool {
    elements * size_of::<E>() >= STREAM_BYTES
}

impl<E: Element> Job for Gradients<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.softcap { self.pass::<S, true>(s) } else { self.pass::<S, false>(s) }
    }
}

impl<E: Element> Gradients<'_, E> {
    #[inline(always)]
    fn pass<S: Simd, const CAP: bool>(self, s: S) {
        let vocab = self.matrix.shape().vocab();
        let staged = S::STREAMS && !self.stage.is_empty();
        if staged {
            assert_eq!(self.stage.len(), self.rows.len() * vocab);
        }
        for (index, &row) in self.rows.iter().enumerate() {
            let from = self.matrix.logits(self.first + index);
            let to = if staged {
                self.stage[index * vocab..].as_mut_ptr()
            } else {
                self.matrix.dlogits(self.first + index)
            };
            // SAFETY: this task alone has the row, V elements long on both sides.
            unsafe {
                match row {
                    RowGradient::Fill(value) => fill(s, value, to, vocab),
                    RowGradient::Formula { probability, constant, label, at_label, .. } => {
                        let [kept, slopes] = self.kept.row::<CAP>(index, vocab);
                        let of = [probability, constant];
                        if CAP || constant == 0.0 {
                            write::<S, E, CAP, false>(s, of, [kept, slopes], from, to, vocab);
                        } else {
                            write::<S, E, CAP, true>(s, of, [kept, slopes], from, to, vocab);
                        }
                        to.add(label).write(E::from_f64(at_label));
                    }
                }
            }
        }
        if staged {
            // SAFETY: the rows lie together, and this task alone has them.
            unsafe { stream(s, self.stage, self.matrix.dlogits(self.first)) };
        }
    }
}

/// # Safety
/// `to` is valid for writes of `columns` elements.
#[inline(always)]
unsafe fn fill<S: Simd, E: Element>(s: S, value: f32, to: *mut E, columns: usize) {
    let value = [s.splat(value); 2];
    for column in (0..columns).step_by(S::CHUNK) {
        // SAFETY: so many columns are left.
        unsafe { s.store_part(value, to.add(column), S::CHUNK.min(columns - column)) };
    }
}

/// Exponentials times `probability`, plus `constant`, times slopes; with `MASKED` 0 where z is -inf.
///
/// # Safety
/// `from` is valid for reads and `to` for writes of `columns` elements.
#[inline(always)]
unsafe fn write<S: Simd, E: Element, const CAP: bool, const MASKED: bool>(
    s: S,
    [probability, constant]: [f32; 2],
    [kept, slopes]: [&mut [f32]; 2],
    from: *const E,
    to: *mut E,
    columns: usize,
) {
    assert!(columns.next_multiple_of(S::CHUNK) <= kept.len());
    assert!(!CAP || slopes.len() == kept.len());
    let (probability, constant) = (s.splat(probability), s.splat(constant));
    let (kept, slopes) = (kept.as_ptr(), slopes.as_ptr());
    for column in (0..columns).step_by(S::CHUNK) {
        let left = columns - column;
        // SAFETY: so many columns are left, and what is kept is as asserted.
        unsafe {
            let mut dz = s.load(kept.add(column));
            for dz in &mut dz {
                *dz = if CAP || MASKED {
                    s.mul_add(*dz, probability, constant)
                } else {
                    s.mul(*dz, probability)
                };
            }
            if CAP {
                let slope = s.load(slopes.add(column));
                dz = [s.mul(dz[0], slope[0]), s.mul(dz[1], slope[1])];
            }
            if MASKED {
                let z = s.load_part(from.add(column), left.min(S::CHUNK), E::from_f32(0.0));
                let low = s.splat(f32::MIN);
                dz = [s.zero_below(dz[0], z[0], low), s.zero_below(dz[1], z[1], low)];
            }
            if left < S::CHUNK {
                s.store_part(dz, to.add(column), left);
            } else {
                s.store(dz, to.add(column));
            }
        }
    }
}

/// Copies past the caches, whole lines at a time.
///
/// # Safety
/// `to` is valid for writes of as many elements, which nobody else uses.
#[inline(always)]
unsafe fn stream<S: Simd, E: Element>(s: S, from: &[E], to: *mut E) {
    let head = to.align_offset(LINE_BYTES).min(from.len());
    let numbers = (from.len() - head) * size_of::<E>() / size_of::<f32>();
    let lines = numbers - numbers % S::CHUNK;
    let body = lines * size_of::<f32>() / size_of::<E>();
    // SAFETY: all three parts lie in both; bytes are copied as what they are, whatever they stand
    // for; and chunks of f32 start on their own size from a line boundary.
    unsafe {
        from.as_ptr().copy_to_nonoverlapping(to, head);
        let (source, target) = (from.as_ptr().add(head), to.add(head));
        for at in (0..lines).step_by(S::CHUNK) {
            let chunk = s.load(source.cast::<f32>().wrapping_add(at));
            s.stream(chunk, target.cast::<f32>().wrapping_add(at));
        }
        source.add(body).copy_to_nonoverlapping(target.add(body), from.len() - head - body);
    }
    s.fence();
}

/// Runs [`Sums`].
pub(super) fn sums(isa: Isa, of: Sums<'_>) {
    isa.run(of);
}

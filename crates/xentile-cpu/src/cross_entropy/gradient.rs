//! The backward pass over a tile: one exponential, the contract's formula and one write an element.
//!
//! Every element is computed alike wherever a row starts and however it is cut, so rows that do not
//! start on 64 bytes cost two ragged ends and no more: reads may straddle cache lines, writes never.

use std::ops::Range;

use xentile::Element;

use super::matrix::{Ahead, Matrix};
use crate::Job;
use crate::math::{Exponential, Halves, capped_with_derivative, exp};
use crate::simd::{LINE_BYTES, MAX_CHUNK, STREAM_BYTES, Simd};

/// The gradient of one row.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowGradient {
    /// The same value everywhere; logits are not read.
    Fill(f32),
    /// `at_label` in column `label`, elsewhere `probability * EXP_SCALE * exp(z - shift) + constant`,
    /// times the derivative of softcap where there is one, and 0 where z is -inf.
    Formula { shift: f32, probability: f32, constant: f32, label: usize, at_label: f64 },
}

/// The pass over the rows of one tile.
pub(crate) struct Gradient<'a, E> {
    pub(super) matrix: &'a Matrix<'a, E>,
    /// The tile's first token.
    pub(super) first: usize,
    /// The tile's rows.
    pub(super) rows: &'a [RowGradient],
    pub(super) block_size: usize,
    /// The blocks to write, by number.
    pub(super) blocks: Range<usize>,
    pub(super) softcap: Option<f64>,
    /// Prefetch the logits this many tokens on.
    pub(super) ahead: Option<usize>,
}

impl<E: Element> Job for Gradient<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let bytes = self.matrix.shape().elements() * size_of::<E>();
        if S::STREAMS && bytes >= STREAM_BYTES {
            self.choose_cap::<S, true>(s);
            s.fence();
        } else {
            self.choose_cap::<S, false>(s);
        }
    }
}

impl<E: Element> Gradient<'_, E> {
    #[inline(always)]
    fn choose_cap<S: Simd, const STREAM: bool>(self, s: S) {
        let constant = |row: &RowGradient| match row {
            RowGradient::Fill(_) => false,
            RowGradient::Formula { constant, .. } => *constant != 0.0,
        };
        match (self.softcap, self.rows.iter().any(constant)) {
            (None, false) => self.pass::<S, STREAM, false, false>(s, 0.0),
            (None, true) => self.pass::<S, STREAM, false, true>(s, 0.0),
            // One form for both: beside tanh the constant costs nothing.
            (Some(cap), _) => self.pass::<S, STREAM, true, true>(s, cap as f32),
        }
    }

    #[inline(always)]
    fn pass<S: Simd, const STREAM: bool, const CAP: bool, const CONSTANT: bool>(
        self,
        s: S,
        cap: f32,
    ) {
        let shape = self.matrix.shape();
        // Whole chunks, so that only a row's own ends are ragged.
        let step = self.block_size.min(shape.vocab()).div_ceil(S::CHUNK) * S::CHUNK;
        for block in self.blocks.clone() {
            for (&gradient, token) in self.rows.iter().zip(self.first..) {
                let row = Row::<S, E, STREAM, CAP, CONSTANT> {
                    simd: s,
                    from: self.matrix.logits(token),
                    to: self.matrix.dlogits(token),
                    columns: shape.vocab(),
                    cap: s.splat(cap),
                    inverse_cap: s.splat(1.0 / cap),
                    ahead: Ahead::new(self.matrix, token, self.ahead),
                };
                // SAFETY: this task alone has the tile's rows, each V elements long on both sides.
                unsafe { row.write(gradient, block, step) };
            }
        }
    }
}

/// One row to read and to write, which may be the same memory.
struct Row<S: Simd, E, const STREAM: bool, const CAP: bool, const CONSTANT: bool> {
    simd: S,
    from: *const E,
    to: *mut E,
    columns: usize,
    cap: S::Vector,
    inverse_cap: S::Vector,
    ahead: Ahead<E>,
}

/// [`RowGradient::Formula`] in vectors.
#[derive(Clone, Copy)]
struct Formula<V> {
    shift: V,
    probability: V,
    constant: V,
    /// Times the probability; for [`Simd::HALVES`].
    exponential: Exponential<V>,
}

impl<V: Copy> Formula<V> {
    #[inline(always)]
    fn new<S: Simd<Vector = V>>(s: S, [shift, probability, constant]: [f32; 3]) -> Self {
        Self {
            shift: s.splat(shift),
            probability: s.splat(probability),
            constant: s.splat(constant),
            exponential: Exponential::new(s, probability),
        }
    }
}

/// [`Row::chunks_by_halves`] of a row that is made anew, since a job knows no instruction set.
struct Chunks<E, const STREAM: bool, const CONSTANT: bool> {
    from: *const E,
    to: *mut E,
    range: [usize; 2],
    coefficients: [f32; 3],
    ahead: Ahead<E>,
}

impl<E: Element, const STREAM: bool, const CONSTANT: bool> Job for Chunks<E, STREAM, CONSTANT> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { from, to, range: [start, end], ahead, .. } = self;
        let (cap, inverse_cap, columns) = (s.splat(0.0), s.splat(0.0), end);
        let row = Row::<S, E, STREAM, false, CONSTANT> {
            simd: s,
            from,
            to,
            columns,
            cap,
            inverse_cap,
            ahead,
        };
        let formula = Formula::new(s, self.coefficients);
        // SAFETY: whoever made this vouches for the same contract.
        unsafe { row.chunks_by_halves(&formula, start, end) };
    }
}

impl<S: Simd, E: Element, const STREAM: bool, const CAP: bool, const CONSTANT: bool>
    Row<S, E, STREAM, CAP, CONSTANT>
{
    /// Writes block number `block` of the row: `step` columns, counted from where the output first
    /// meets a line boundary. The first block also takes what lies before, the last what is left.
    ///
    /// # Safety
    /// `from` is valid for reads and `to` for writes of `columns` elements, and no other thread
    /// uses either. `step` is a multiple of the chunk.
    #[inline(always)]
    unsafe fn write(&self, gradient: RowGradient, block: usize, step: usize) {
        let s = self.simd;
        let head = self.to.align_offset(LINE_BYTES).min(self.columns);
        let start = (head + block * step).min(self.columns);
        let end = (start + step).min(self.columns);
        let body_end = end - (end - start) % S::CHUNK;
        // SAFETY, for every call below: the ranges [0, head), [start, body_end) and [body_end, end)
        // lie in the row, and `start` is a whole number of chunks past a line boundary.
        match gradient {
            RowGradient::Fill(value) => {
                let chunk = [s.splat(value); 2];
                if block == 0 {
                    // SAFETY: see above.
                    unsafe { self.fill(value, 0, head) };
                }
                for column in (start..body_end).step_by(S::CHUNK) {
                    // SAFETY: see above.
                    unsafe { self.put(chunk, column) };
                }
                // SAFETY: see above.
                unsafe { self.fill(value, body_end, end) };
            }
            RowGradient::Formula { shift, probability, constant, label, at_label } => {
                let coefficients = [shift, probability, constant];
                let formula = &Formula::new(s, coefficients);
                let patch = (label, at_label);
                let head = if block == 0 { head } else { 0 };
                let mut chunk_of_label = [start; 2];
                if (start..body_end).contains(&label) {
                    let at = label - (label - start) % S::CHUNK;
                    chunk_of_label = [at, at + S::CHUNK];
                }
                let [label, next] = chunk_of_label;
                // Whole chunks, and what is ragged after them.
                for (start, ragged, end) in
                    [(0, 0, head), (start, label, next), (next, body_end, end)]
                {
                    // SAFETY: see above.
                    unsafe {
                        self.chunks(formula, coefficients, start, ragged);
                        self.ragged(formula, ragged, end, patch);
                    }
                }
            }
        }
    }

    /// The gradient of `N` vectors of logits, none of them the label's.
    #[inline(always)]
    fn apply<const N: usize>(
        &self,
        formula: &Formula<S::Vector>,
        z: [S::Vector; N],
    ) -> [S::Vector; N] {
        let s = self.simd;
        if S::HALVES && !CAP {
            let mut dz = z;
            for i in 0..N {
                dz[i] = self.second_half(formula, self.first_half(formula, z[i]), z[i]);
            }
            return dz;
        }
        let mut distance = z;
        let mut derivative = z;
        if CAP {
            [distance, derivative] = capped_with_derivative(s, z, [self.cap, self.inverse_cap]);
        }
        for distance in &mut distance {
            *distance = s.sub(*distance, formula.shift);
        }
        let mut dz = exp(s, distance);
        for i in 0..N {
            dz[i] = if CONSTANT {
                s.mul_add(dz[i], formula.probability, formula.constant)
            } else {
                s.mul(dz[i], formula.probability)
            };
            if CAP {
                dz[i] = s.mul(dz[i], derivative[i]);
            } else if CONSTANT {
                // exp is 0 at -inf, but the constant is not.
                dz[i] = s.zero_below(dz[i], z[i], s.splat(f32::MIN));
            }
        }
        dz
    }

    /// The first half of [`Self::apply`] without softcap.
    #[inline(always)]
    fn first_half(&self, formula: &Formula<S::Vector>, z: S::Vector) -> Halves<S::Vector> {
        Halves::new(self.simd, &formula.exponential, self.simd.sub(z, formula.shift))
    }

    /// The second half; `z` only matters beside a constant.
    #[inline(always)]
    fn second_half(
        &self,
        formula: &Formula<S::Vector>,
        halves: Halves<S::Vector>,
        z: S::Vector,
    ) -> S::Vector {
        let s = self.simd;
        if CONSTANT {
            let dz = halves.add_to(s, &formula.exponential, formula.constant);
            // e^z is 0 at -inf, but the constant is not.
            s.zero_below(dz, z, s.splat(f32::MIN))
        } else {
            halves.result(s, &formula.exponential)
        }
    }

    /// Whole chunks of columns that the label is not among.
    ///
    /// # Safety
    /// As for [`Self::write`]; the range lies in the row, starts whole chunks past a line boundary
    /// of the output and is whole chunks long.
    #[inline(always)]
    unsafe fn chunks(
        &self,
        formula: &Formula<S::Vector>,
        coefficients: [f32; 3],
        start: usize,
        end: usize,
    ) {
        let s = self.simd;
        let mut column = start;
        while S::REGISTERS == 32 && column + 2 * S::CHUNK <= end {
            self.ahead.fetch(s, column + S::CHUNK);
            // SAFETY: both chunks lie in the row, and are aligned by this function's contract.
            unsafe {
                let at = self.from.add(column);
                let ([a, b], [c, d]) = (s.load(at), s.load(at.add(S::CHUNK)));
                let [a, b, c, d] = self.apply(formula, [a, b, c, d]);
                self.put([a, b], column);
                self.put([c, d], column + S::CHUNK);
            }
            column += 2 * S::CHUNK;
        }
        if S::HALVES && !CAP && column < end {
            let Self { from, to, ahead, .. } = *self;
            s.outline(Chunks::<E, STREAM, CONSTANT> {
                from,
                to,
                range: [column, end],
                coefficients,
                ahead,
            });
            column = end;
        }
        while column < end {
            self.ahead.fetch(s, column);
            // SAFETY: as above.
            unsafe {
                let z = s.load(self.from.add(column));
                self.put(self.apply(formula, z), column);
            }
            column += S::CHUNK;
        }
    }

    /// [`Self::chunks`] with the first half of a vector's exponentials before the second half of
    /// the vector before it.
    ///
    /// # Safety
    /// As for [`Self::chunks`]; the range is not empty.
    #[inline(always)]
    unsafe fn chunks_by_halves(&self, formula: &Formula<S::Vector>, start: usize, end: usize) {
        let s = self.simd;
        let mut column = start;
        // SAFETY: here and below the chunk lies in the range.
        let [z, mut last] = unsafe { s.load(self.from.add(column)) };
        let first = self.first_half(formula, z);
        let mut halves = self.first_half(formula, last);
        let mut dz = self.second_half(formula, first, z);
        while column + S::CHUNK < end {
            self.ahead.fetch(s, column);
            // SAFETY: see above.
            let [z, next] = unsafe { s.load(self.from.add(column + S::CHUNK)) };
            let first = self.first_half(formula, z);
            // SAFETY: see above.
            unsafe { self.put([dz, self.second_half(formula, halves, last)], column) };
            halves = self.first_half(formula, next);
            dz = self.second_half(formula, first, z);
            last = next;
            column += S::CHUNK;
        }
        // SAFETY: see above.
        unsafe { self.put([dz, self.second_half(formula, halves, last)], column) };
    }

    /// # Safety
    /// The chunk from `column` lies in the row, whole chunks past a line boundary of the output.
    #[inline(always)]
    unsafe fn put(&self, chunk: [S::Vector; 2], column: usize) {
        // SAFETY: the chunk lies in the row; a line boundary plus whole chunks is aligned enough.
        unsafe { self.simd.put::<E, STREAM>(chunk, self.to.add(column)) };
    }

    /// Columns that fill no chunk or have the label among them, by way of a buffer of whole chunks.
    ///
    /// # Safety
    /// As for [`Self::write`]; the range lies in the row.
    #[inline(always)]
    unsafe fn ragged(
        &self,
        formula: &Formula<S::Vector>,
        start: usize,
        end: usize,
        (label, at_label): (usize, f64),
    ) {
        let s = self.simd;
        for start in (start..end).step_by(S::CHUNK) {
            let columns = S::CHUNK.min(end - start);
            let mut buffer = [E::from_f32(0.0); MAX_CHUNK];
            // SAFETY: the columns lie in the row, and the buffer holds the largest chunk there is.
            unsafe {
                self.from.add(start).copy_to_nonoverlapping(buffer.as_mut_ptr(), columns);
                let z = s.load(buffer.as_ptr());
                s.store(self.apply(formula, z), buffer.as_mut_ptr());
            }
            if (start..start + columns).contains(&label) {
                buffer[label - start] = E::from_f64(at_label);
            }
            // SAFETY: as above.
            unsafe {
                buffer.as_ptr().copy_to_nonoverlapping(self.to.add(start), columns);
            }
        }
    }

    /// # Safety
    /// As for [`Self::write`]; the range lies in the row.
    #[inline(always)]
    unsafe fn fill(&self, value: f32, start: usize, end: usize) {
        for column in start..end {
            // SAFETY: a column of the row.
            unsafe { self.to.add(column).write(E::from_f32(value)) };
        }
    }
}

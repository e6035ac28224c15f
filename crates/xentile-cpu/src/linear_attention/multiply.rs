//! Small products in f32 of operands that lie in the caches as they come, without packing.

use crate::simd::{MAX_CHUNK, MAX_LANES};
use crate::{Isa, Job, Simd};

/// Rows of a tile.
const ROWS: usize = 6;

/// Which terms of the left factor `[rows, terms]` are not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Terms {
    All,
    /// Those up to the row's number.
    Lower,
    /// Those from the row's number on.
    Upper,
}

/// The left factor: where it begins, and the steps from row to row and from term to term.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) data: &'a [f32],
    pub(super) row_step: usize,
    pub(super) term_step: usize,
    pub(super) terms: Terms,
}

impl<'a> Left<'a> {
    /// Rows that begin `step` apart.
    pub(super) fn rows(data: &'a [f32], step: usize) -> Self {
        Self { data, row_step: step, term_step: 1, terms: Terms::All }
    }

    /// The transposed of such rows.
    pub(super) fn columns(data: &'a [f32], step: usize) -> Self {
        Self { data, row_step: 1, term_step: step, terms: Terms::All }
    }

    /// Those of its terms alone that are not 0.
    pub(super) fn of(self, terms: Terms) -> Self {
        Self { terms, ..self }
    }
}

/// Sets rows of `to` to their `factor`-fold and the product of `left` and of rows `right`, both of which have
/// `columns`, whole chunks. With a factor of 0 nothing is read of `to`.
pub(super) fn multiply(
    isa: Isa,
    [rows, terms, columns]: [usize; 3],
    left: Left<'_>,
    right: &[f32],
    factor: f32,
    to: &mut [f32],
) {
    if rows == 0 {
        return;
    }
    assert!(columns.is_multiple_of(MAX_CHUNK));
    assert!(right.len() >= terms * columns && to.len() >= rows * columns);
    let last = (rows - 1) * left.row_step + terms.saturating_sub(1) * left.term_step;
    assert!(left.data.len() > last);
    // A function of its own for each instruction set, whoever calls it.
    isa.run(Product { rows, terms, columns, left, right, factor, to });
}

struct Product<'a> {
    rows: usize,
    terms: usize,
    columns: usize,
    left: Left<'a>,
    right: &'a [f32],
    factor: f32,
    to: &'a mut [f32],
}

impl Job for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if S::REGISTERS >= 32 && self.columns.is_multiple_of(2 * S::CHUNK) {
            self.tiles::<S, 2>(s);
        } else {
            self.tiles::<S, 1>(s);
        }
    }
}

impl Product<'_> {
    /// In tiles of `CHUNKS` chunks a row.
    #[inline(always)]
    fn tiles<S: Simd, const CHUNKS: usize>(mut self, s: S) {
        for column in (0..self.columns).step_by(CHUNKS * S::CHUNK) {
            let mut row = 0;
            while row + ROWS <= self.rows {
                self.tile::<S, CHUNKS, ROWS>(s, row, column);
                row += ROWS;
            }
            if row + 4 <= self.rows {
                self.tile::<S, CHUNKS, 4>(s, row, column);
                row += 4;
            }
            if row + 2 <= self.rows {
                self.tile::<S, CHUNKS, 2>(s, row, column);
                row += 2;
            }
            if row < self.rows {
                self.tile::<S, CHUNKS, 1>(s, row, column);
            }
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const CHUNKS: usize, const COUNT: usize>(
        &mut self,
        s: S,
        row: usize,
        column: usize,
    ) {
        let Self { terms, columns, left, right, factor, .. } = *self;
        let terms = match left.terms {
            Terms::All => 0..terms,
            Terms::Lower => 0..terms.min(row + COUNT),
            Terms::Upper => row.min(terms)..terms,
        };
        let mut sums = [[[s.splat(0.0); 2]; CHUNKS]; COUNT];
        // SAFETY: `multiply` checked that all of these lie in their slices.
        unsafe {
            let to = self.to.as_mut_ptr().add(row * columns + column);
            if factor != 0.0 {
                let factor = s.splat(factor);
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (chunk, sums) in sums.iter_mut().enumerate() {
                        let old = s.load(to.add(row * columns + chunk * S::CHUNK).cast_const());
                        *sums = [0, 1].map(|half| s.mul(factor, old[half]));
                    }
                }
            }
            let mut from = right.as_ptr().add(terms.start * columns + column);
            let mut at = left.data.as_ptr().add(row * left.row_step + terms.start * left.term_step);
            for _ in terms {
                let right: [_; CHUNKS] =
                    std::array::from_fn(|chunk| s.load(from.add(chunk * S::CHUNK)));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let left = s.splat(*at.add(row * left.row_step));
                    for (sums, right) in sums.iter_mut().zip(right) {
                        *sums = [0, 1].map(|half| s.mul_add(left, right[half], sums[half]));
                    }
                }
                // The last step may end behind both slices.
                from = from.wrapping_add(columns);
                at = at.wrapping_add(left.term_step);
            }
            for (row, sums) in sums.iter().enumerate() {
                for (chunk, sums) in sums.iter().enumerate() {
                    s.store(*sums, to.add(row * columns + chunk * S::CHUNK));
                }
            }
        }
    }
}

/// The sum of products of the entries of two rows of whole chunks.
#[inline(always)]
pub(super) fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [s.splat(0.0); 2];
    for (a, b) in a.chunks_exact(S::CHUNK).zip(b.chunks_exact(S::CHUNK)) {
        // SAFETY: both are whole chunks.
        let [a, b] = unsafe { [s.load(a.as_ptr()), s.load(b.as_ptr())] };
        sums = [0, 1].map(|half| s.mul_add(a[half], b[half], sums[half]));
    }
    s.sum(s.add(sums[0], sums[1])) as f32
}

/// Writes rows `[rows, columns]` as columns `[columns, rows]`. Both extents are multiples of 16.
pub(super) fn turn(isa: Isa, columns: usize, from: &[f32], to: &mut [f32]) {
    isa.run(Turn { columns, from, to });
}

struct Turn<'a> {
    columns: usize,
    from: &'a [f32],
    to: &'a mut [f32],
}

impl Job for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { columns, from, to } = self;
        let rows = from.len() / columns;
        for row in (0..rows).step_by(MAX_LANES) {
            for column in (0..columns).step_by(MAX_LANES) {
                s.turn(
                    &from[row * columns + column..],
                    columns,
                    &mut to[column * rows + row..],
                    rows,
                );
            }
        }
    }
}

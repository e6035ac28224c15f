//! Products of matrices, summed in f32.
//!
//! The scheme is that of K. Goto and R. van de Geijn, Anatomy of high-performance matrix
//! multiplication (2008): a tile of the result stays in registers while a strip of each factor goes
//! by, from memory in which the strips lie as the tile takes them. Here the right factor is put into
//! that order once, by all threads, and then multiplied by each of them. Every product of a pass has
//! such a factor (the weight, twice, and hidden states), and a product that orders both for itself,
//! as a library's does, spends a good part of its time on that.
//!
//! Each sum is taken in the same order whatever rows and columns are asked for beside it.

use std::ops::Range;

use xentile::Element;

use super::convert::widen;
use crate::simd::MAX_CHUNK;
use crate::{Isa, Job, Simd};

/// Terms of a sum that are taken at a time: strips of so many stay in the caches closest by.
const DEPTH: usize = 256;

/// Strips of the left factor that are multiplied by each panel of the right one while they are near.
const STRIPS: usize = 42;

/// Terms that are transposed at a time.
const TERMS: usize = 64;

/// Rows of a strip, and of a tile. With four vectors of each row, or two where registers are few, all
/// sums of a tile have registers, and a term is read from memory for every other product or less.
const ROWS: usize = 6;

/// Rows of a tile where no more are left.
const FEW_ROWS: usize = 3;

/// The most columns of a tile.
const MOST_COLUMNS: usize = 2 * MAX_CHUNK;

/// Chunks of a tile's row.
const fn chunks<S: Simd>() -> usize {
    S::REGISTERS / 16
}

/// A matrix in memory, with steps from row to row and from column to column. One of them is 1.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a, E> {
    data: &'a [E],
    rows: usize,
    columns: usize,
    row_step: usize,
    column_step: usize,
}

impl<'a, E: Element> Matrix<'a, E> {
    /// A matrix of rows of `columns` elements, one after another.
    pub(super) fn new(data: &'a [E], columns: usize) -> Self {
        let rows = data.len() / columns;
        assert_eq!(data.len(), rows * columns);
        Self { data, rows, columns, row_step: columns, column_step: 1 }
    }

    /// The matrix with rows for columns.
    pub(super) fn transposed(self) -> Self {
        let Self { data, rows, columns, row_step, column_step } = self;
        Self { data, rows: columns, columns: rows, row_step: column_step, column_step: row_step }
    }

    /// Some of the rows.
    pub(super) fn rows(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        let start = (rows.start * self.row_step).min(self.data.len());
        Self { data: &self.data[start..], rows: rows.len(), ..self }
    }

    /// The elements of row `row`, of a matrix that is not transposed.
    pub(super) fn row(&self, row: usize) -> &'a [E] {
        assert_eq!(self.column_step, 1);
        &self.data[row * self.row_step..][..self.columns]
    }

    fn pack_as<const WIDTH: usize>(
        &self,
        isa: Isa,
        rows: Range<usize>,
        term: usize,
        to: &mut [f32],
    ) {
        let count = rows.len();
        let first = rows.start * self.row_step + term * self.column_step;
        if self.row_step == 1 {
            for (k, to) in to.chunks_exact_mut(WIDTH).enumerate() {
                let from = &self.data[first + k * self.column_step..][..count];
                match <&[E; WIDTH]>::try_from(from) {
                    // A known length, so that no call is made for a few numbers.
                    Ok(from) if WIDTH == ROWS => {
                        to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32());
                    }
                    _ => {
                        to[count..].fill(0.0);
                        widen(isa, from, &mut to[..count]);
                    }
                }
            }
            return;
        }
        let mut piece = [[0.0; TERMS]; WIDTH];
        for (start, to) in (0..).step_by(TERMS).zip(to.chunks_mut(WIDTH * TERMS)) {
            let terms = to.len() / WIDTH;
            for (row, piece) in piece.iter_mut().take(count).enumerate() {
                let from = &self.data[first + row * self.row_step + start..][..terms];
                widen(isa, from, &mut piece[..terms]);
            }
            for (k, to) in to.chunks_exact_mut(WIDTH).enumerate() {
                for (to, piece) in to.iter_mut().zip(&piece) {
                    *to = piece[k];
                }
            }
        }
    }
}

/// The left factor of a product, of elements of any type.
pub(super) trait Left {
    /// Rows, and terms of a sum.
    fn extents(&self) -> [usize; 2];

    /// Sets `to[width * k + i]` to element `[rows.start + i, terms.start + k]`, and to 0 where there
    /// is no such row. `width` is that of a strip or of a panel.
    fn pack(&self, isa: Isa, rows: Range<usize>, terms: Range<usize>, width: usize, to: &mut [f32]);
}

impl<E: Element> Left for Matrix<'_, E> {
    fn extents(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    fn pack(
        &self,
        isa: Isa,
        rows: Range<usize>,
        terms: Range<usize>,
        width: usize,
        to: &mut [f32],
    ) {
        assert!(rows.len() <= width && rows.end <= self.rows && terms.end <= self.columns);
        assert_eq!(to.len(), width * terms.len());
        match width {
            ROWS => self.pack_as::<ROWS>(isa, rows, terms.start, to),
            8 => self.pack_as::<8>(isa, rows, terms.start, to),
            16 => self.pack_as::<16>(isa, rows, terms.start, to),
            MOST_COLUMNS => self.pack_as::<MOST_COLUMNS>(isa, rows, terms.start, to),
            _ => unreachable!("no tile is {width} wide"),
        }
    }
}

/// The right factor of a product, as tiles take it: panels of as many columns as a tile has, row
/// after row.
#[derive(Clone, Copy)]
pub(super) struct Panels<'a> {
    data: &'a [f32],
    columns: usize,
    terms: usize,
}

impl<'a> Panels<'a> {
    /// The most elements that panels of a matrix `[terms, columns]` take in any instruction set.
    pub(super) fn elements(terms: usize, columns: usize) -> usize {
        columns.next_multiple_of(MOST_COLUMNS) * terms
    }

    /// The columns of a panel.
    pub(super) fn width(isa: Isa) -> usize {
        isa.run(Width)
    }

    /// Writes panel number `panel` of `matrix` to its place, which begins at `panel` times its length.
    pub(super) fn pack<E: Element>(isa: Isa, matrix: Matrix<'_, E>, panel: usize, to: &mut [f32]) {
        let (matrix, width) = (matrix.transposed(), Self::width(isa));
        let first = panel * width;
        matrix.pack(isa, first..matrix.rows.min(first + width), 0..matrix.columns, width, to);
    }

    /// The matrix `[terms, columns]` whose panels begin `data`.
    pub(super) fn new(data: &'a [f32], terms: usize, columns: usize) -> Self {
        Self { data, columns, terms }
    }
}

struct Width;

impl Job for Width {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        chunks::<S>() * S::CHUNK
    }
}

/// Sets `to`, row after row, to `left x right`, or adds that to it.
pub(super) fn multiply(isa: Isa, left: &dyn Left, right: Panels<'_>, add: bool, to: &mut [f32]) {
    let [rows, terms] = left.extents();
    assert_eq!(terms, right.terms);
    assert_eq!(to.len(), rows * right.columns);
    match terms {
        0 if add => {}
        0 => to.fill(0.0),
        _ => isa.run(Multiply { isa, left, right, add, to }),
    }
}

struct Multiply<'a> {
    isa: Isa,
    left: &'a dyn Left,
    right: Panels<'a>,
    add: bool,
    to: &'a mut [f32],
}

impl Job for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match chunks::<S>() {
            2 => self.blocks::<S, 2>(simd),
            _ => self.blocks::<S, 1>(simd),
        }
    }
}

impl Multiply<'_> {
    /// In tiles of `CHUNKS` chunks a row.
    #[inline(always)]
    fn blocks<S: Simd, const CHUNKS: usize>(self, simd: S) {
        let Self { isa, left, right, add, to } = self;
        let ([rows, terms], columns) = (left.extents(), right.columns);
        let width = CHUNKS * S::CHUNK;
        let mut packed = vec![0.0; STRIPS.min(rows.div_ceil(ROWS)) * ROWS * terms.min(DEPTH)];
        for start in (0..terms).step_by(DEPTH) {
            let count = DEPTH.min(terms - start);
            let add = add || start > 0;
            for first in (0..rows).step_by(STRIPS * ROWS) {
                let end = rows.min(first + STRIPS * ROWS);
                let strips = || (first..end).step_by(ROWS).map(|row| row..end.min(row + ROWS));
                for (rows, to) in strips().zip(packed.chunks_exact_mut(ROWS * count)) {
                    left.pack(isa, rows, start..start + count, ROWS, to);
                }
                for column in (0..columns).step_by(width) {
                    let panel = &right.data[column * terms + start * width..][..count * width];
                    for (rows, left) in strips().zip(packed.chunks_exact(ROWS * count)) {
                        let to = &mut to[rows.start * columns + column..];
                        let extents = [rows.len(), width.min(columns - column)];
                        if extents[0] > FEW_ROWS {
                            let tile = tile::<S, CHUNKS, ROWS>(simd, left, panel);
                            write_part(simd, &tile, extents, columns, add, to);
                        } else {
                            let tile = tile::<S, CHUNKS, FEW_ROWS>(simd, left, panel);
                            write_part(simd, &tile, extents, columns, add, to);
                        }
                    }
                }
            }
        }
    }
}

/// Sums of some rows, and a few chunks of columns.
type Tile<S, const CHUNKS: usize, const COUNT: usize> = [[[<S as Simd>::Vector; 2]; CHUNKS]; COUNT];

/// The first `COUNT` rows of the product of a strip and a panel.
#[inline(always)]
fn tile<S: Simd, const CHUNKS: usize, const COUNT: usize>(
    simd: S,
    left: &[f32],
    right: &[f32],
) -> Tile<S, CHUNKS, COUNT> {
    let mut sums = [[[simd.splat(0.0); 2]; CHUNKS]; COUNT];
    for (left, right) in left.chunks_exact(ROWS).zip(right.chunks_exact(CHUNKS * S::CHUNK)) {
        // SAFETY: as many chunks as `right` has.
        let right: [_; CHUNKS] =
            std::array::from_fn(|chunk| unsafe { simd.load(right.as_ptr().add(chunk * S::CHUNK)) });
        for (sums, &left) in sums.iter_mut().zip(left) {
            let left = simd.splat(left);
            for (sums, right) in sums.iter_mut().zip(right) {
                *sums = [0, 1].map(|i| simd.mul_add(left, right[i], sums[i]));
            }
        }
    }
    sums
}

/// Writes a tile to rows that lie `step` apart, or adds it to what is there.
#[inline(always)]
fn write<S: Simd, const CHUNKS: usize, const COUNT: usize>(
    simd: S,
    tile: &Tile<S, CHUNKS, COUNT>,
    step: usize,
    add: bool,
    to: &mut [f32],
) {
    assert!((COUNT - 1) * step + CHUNKS * S::CHUNK <= to.len());
    for (row, sums) in tile.iter().enumerate() {
        for (chunk, &sums) in sums.iter().enumerate() {
            // SAFETY: the assertion says that the chunk lies in `to`.
            unsafe {
                let to = to.as_mut_ptr().add(row * step + chunk * S::CHUNK);
                let sums = match add {
                    true => {
                        let old = simd.load(to.cast_const());
                        [0, 1].map(|i| simd.add(old[i], sums[i]))
                    }
                    false => sums,
                };
                simd.store(sums, to);
            }
        }
    }
}

/// As [`write`], the first rows and columns of a tile, which may be all.
#[inline(always)]
fn write_part<S: Simd, const CHUNKS: usize, const COUNT: usize>(
    simd: S,
    tile: &Tile<S, CHUNKS, COUNT>,
    [rows, columns]: [usize; 2],
    step: usize,
    add: bool,
    to: &mut [f32],
) {
    let width = CHUNKS * S::CHUNK;
    if [rows, columns] == [COUNT, width] {
        return write(simd, tile, step, add, to);
    }
    let mut whole = [0.0; ROWS * MOST_COLUMNS];
    write(simd, tile, width, false, &mut whole);
    for (row, sums) in whole.chunks_exact(width).take(rows).enumerate() {
        for (to, sum) in to[row * step..][..columns].iter_mut().zip(sums) {
            *to = if add { *to + sum } else { *sum };
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Numbers whose products and sums are whole.
    fn numbers<E: Element>(count: usize, step: usize) -> Vec<E> {
        (0..count).map(|i| E::from_f32((i * step % 17) as f32 - 8.0)).collect()
    }

    fn panels<E: Element>(isa: Isa, matrix: Matrix<'_, E>) -> Vec<f32> {
        let mut to = vec![f32::NAN; Panels::elements(matrix.rows, matrix.columns)];
        let length = Panels::width(isa) * matrix.rows;
        for panel in 0..matrix.columns.div_ceil(Panels::width(isa)) {
            Panels::pack(isa, matrix, panel, &mut to[panel * length..][..length]);
        }
        to
    }

    fn check<E: Element>(isa: Isa, [rows, terms, columns]: [usize; 3], transposed: [bool; 2]) {
        let turned = |data, extents: [usize; 2], transposed: bool| match transposed {
            false => Matrix::new(data, extents[1]),
            true => Matrix::new(data, extents[0]).transposed(),
        };
        let (a, b) = (numbers::<E>(rows * terms, 5), numbers::<E>(terms * columns, 7));
        let left = turned(&a, [rows, terms], transposed[0]);
        let right = turned(&b, [terms, columns], transposed[1]);
        let at = |matrix: Matrix<'_, E>, row: usize, column: usize| {
            E::to_f32(matrix.data[row * matrix.row_step + column * matrix.column_step])
        };
        let data = panels(isa, right);
        let mut to = vec![f32::NAN; rows * columns];
        for add in [false, true] {
            multiply(isa, &left, Panels::new(&data, terms, columns), add, &mut to);
            let times = if add { 2.0 } else { 1.0 };
            for (i, &found) in to.iter().enumerate() {
                let (row, column) = (i / columns, i % columns);
                let sum: f32 = (0..terms).map(|k| at(left, row, k) * at(right, k, column)).sum();
                assert_eq!(found, times * sum, "{isa} {rows} {terms} {columns} {transposed:?} {i}");
            }
        }
    }

    #[test]
    fn products_of_all_extents() {
        for isa in Isa::available() {
            for transposed in [[false, false], [true, false], [false, true], [true, true]] {
                for rows in [1, 3, 4, 6, 7, 29] {
                    check::<f32>(isa, [rows, 5, 1], transposed);
                    check::<bf16>(isa, [rows, 3, 33], transposed);
                    check::<f16>(isa, [rows, 1, 80], transposed);
                }
                check::<f32>(isa, [STRIPS * ROWS + 2, DEPTH + TERMS + 1, 67], transposed);
            }
        }
    }

    #[test]
    fn a_sum_over_nothing() {
        for isa in Isa::available() {
            let mut to = [f32::NAN; 3];
            let left = Matrix::new(&[0.0_f32; 0], 3).transposed();
            multiply(isa, &left, Panels::new(&[], 0, 1), false, &mut to);
            assert_eq!(to, [0.0; 3]);
        }
    }

    #[test]
    fn sums_do_not_depend_on_what_is_asked_for_beside_them() {
        let [rows, terms, columns] = [31, 300, 70];
        let numbers = |count: usize| -> Vec<f32> { (0..count).map(|i| (i as f32).sin()).collect() };
        let (a, b) = (numbers(rows * terms), numbers(terms * columns));
        let (left, right) = (Matrix::new(&a, terms), Matrix::new(&b, columns));
        for isa in Isa::available() {
            let mut whole = vec![0.0; rows * columns];
            multiply(
                isa,
                &left,
                Panels::new(&panels(isa, right), terms, columns),
                false,
                &mut whole,
            );
            for (row, column) in [(0, 0), (13, 69), (30, 31)] {
                let one = right.transposed().rows(column..column + 1).transposed();
                let mut alone = [0.0];
                let data = panels(isa, one);
                multiply(
                    isa,
                    &left.rows(row..row + 1),
                    Panels::new(&data, terms, 1),
                    false,
                    &mut alone,
                );
                assert_eq!(alone[0], whole[row * columns + column], "{isa} {row} {column}");
            }
        }
    }
}

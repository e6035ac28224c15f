//! Factors of a product, and the order in which tiles take them.

use std::ops::Range;

use xentile::{DType, Element};

use super::{MOST_COLUMNS, ROWS, STRIPS, Width};
use crate::convert::{pair, pairs, widen};
use crate::simd::{BLOCK, MAX_LANES, TILE, Tiles};
use crate::{Isa, Job, PairsOfBf16, Simd};

/// Words of a row that are transposed at a time.
const TURNED: usize = 64;

/// The most rows that are packed at a time: strips, or a panel.
const MOST_ROWS: usize = (STRIPS * ROWS).next_multiple_of(MOST_COLUMNS);

/// The same, for tiles.
pub(super) const MOST_TILED_ROWS: usize = 256;

/// Words of so many terms are cut into the same steps, however many of these there are.
pub(crate) const TERMS_STEP: usize = 2 * TILE;

/// What a packed word holds. It has 32 bits, and is kept as the f32 of these bits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Words {
    /// One term of a sum, in f32.
    Terms,
    /// Two terms in bf16, the first of them in the lower half. After an odd number of terms comes 0.
    Pairs(PairsOfBf16),
    /// As `Pairs`, for [`Steps`] of tiles: after the last term come zeros that make a step whole.
    Tiles(Tiles),
}

/// How the words of a sum are cut for tiles: in as few steps as can be, of as few words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps {
    pub(super) count: usize,
    pub(super) words: usize,
}

impl Steps {
    /// Those of a sum of so many terms, at least one.
    pub(super) fn of(terms: usize) -> Self {
        let words = terms.div_ceil(2);
        let count = words.div_ceil(TILE).max(1);
        Self { count, words: words.div_ceil(count) }
    }
}

impl Words {
    /// The words that factors of dtype `E` are multiplied as.
    pub(super) fn of<E: Element>(isa: Isa) -> Self {
        if E::DTYPE != DType::Bf16 {
            return Self::Terms;
        }
        match (isa.tiles(), isa.pairs_of_bf16()) {
            (Some(tiles), _) => Self::Tiles(tiles),
            (_, Some(pairs)) => Self::Pairs(pairs),
            _ => Self::Terms,
        }
    }

    /// The words that a sum of so many terms takes.
    pub(super) fn count(self, terms: usize) -> usize {
        match self {
            Self::Tiles(_) => {
                let Steps { count, words } = Steps::of(terms);
                count * words
            }
            _ => self.filled(terms),
        }
    }

    /// The words that so many terms are in.
    fn filled(self, terms: usize) -> usize {
        terms.div_ceil(self.most_terms())
    }

    /// The terms of some words, of `count` that there are.
    fn terms(self, words: Range<usize>, count: usize) -> Range<usize> {
        let first = |word: usize| count.min(word * self.most_terms());
        first(words.start)..first(words.end)
    }

    fn most_terms(self) -> usize {
        match self {
            Self::Terms => 1,
            Self::Pairs(_) | Self::Tiles(_) => 2,
        }
    }
}

/// A matrix in memory, with steps from row to row and from column to column. One of them is 1.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, E> {
    data: &'a [E],
    rows: usize,
    columns: usize,
    row_step: usize,
    column_step: usize,
}

impl<'a, E: Element> Matrix<'a, E> {
    /// A matrix of rows of `columns` elements, one after another.
    pub(crate) fn new(data: &'a [E], columns: usize) -> Self {
        Self::with_row_step(data, columns, columns)
    }

    /// A matrix of rows of `columns` elements that begin `row_step` apart.
    pub(crate) fn with_row_step(data: &'a [E], columns: usize, row_step: usize) -> Self {
        assert!(columns <= row_step);
        let rows = data.len() / row_step;
        assert_eq!(data.len(), rows * row_step);
        Self { data, rows, columns, row_step, column_step: 1 }
    }

    /// Rows and columns.
    pub(crate) fn extents(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// The matrix with rows for columns.
    pub(crate) fn transposed(self) -> Self {
        let Self { data, rows, columns, row_step, column_step } = self;
        Self { data, rows: columns, columns: rows, row_step: column_step, column_step: row_step }
    }

    /// Some of the rows.
    pub(crate) fn rows(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        let start = (rows.start * self.row_step).min(self.data.len());
        Self { data: &self.data[start..], rows: rows.len(), ..self }
    }

    /// The elements of row `row`, of a matrix that is not transposed.
    pub(crate) fn row(&self, row: usize) -> &'a [E] {
        assert_eq!(self.column_step, 1);
        &self.data[row * self.row_step..][..self.columns]
    }

    /// Element `[row, column]`.
    #[cfg(test)]
    pub(super) fn at(&self, row: usize, column: usize) -> E {
        self.data[row * self.row_step + column * self.column_step]
    }
}

/// The left factor of a product, of elements of any type.
pub(crate) trait Left {
    /// Rows, and terms of a sum.
    fn extents(&self) -> [usize; 2];

    /// Packs a few words of some rows, as [`Matrix::pack`] does, or [`Matrix::pack_tiles`].
    fn pack(&self, form: (Isa, Words), rows: Range<usize>, words: Range<usize>, to: &mut [f32]);
}

impl<E: Element> Left for Matrix<'_, E> {
    fn extents(&self) -> [usize; 2] {
        self.extents()
    }

    fn pack(&self, form: (Isa, Words), rows: Range<usize>, words: Range<usize>, to: &mut [f32]) {
        match form.1 {
            Words::Tiles(_) => self.pack_tiles(form, rows, words, to),
            _ => self.pack::<ROWS>(form, rows, words, to),
        }
    }
}

impl<E: Element> Matrix<'_, E> {
    /// Writes some rows, `WIDTH` at a time, one such group after another: its first word of each row,
    /// then its second, and so on. Rows that the last group lacks are 0.
    fn pack<const WIDTH: usize>(
        &self,
        form: (Isa, Words),
        rows: Range<usize>,
        words: Range<usize>,
        to: &mut [f32],
    ) {
        assert!(rows.len() <= MOST_ROWS && rows.end <= self.rows);
        assert_eq!(to.len(), rows.len().next_multiple_of(WIDTH) * words.len());
        match words.len() {
            0 => {}
            _ if self.row_step == 1 => self.pack_across::<WIDTH>(form, rows, words, to),
            _ => self.pack_along::<WIDTH>(form, rows, words, to),
        }
    }

    /// As [`Self::pack`], where elements of a column lie together.
    fn pack_across<const WIDTH: usize>(
        &self,
        (isa, form): (Isa, Words),
        rows: Range<usize>,
        words: Range<usize>,
        to: &mut [f32],
    ) {
        let length = WIDTH * words.len();
        let column = |term: usize| &self.data[term * self.column_step..][rows.clone()];
        let mut packed = [0.0; MOST_ROWS];
        for (k, word) in words.enumerate() {
            let terms = form.terms(word..word + 1, self.columns);
            let word = &mut packed[..rows.len()];
            match form {
                Words::Terms => widen(isa, column(terms.start), word),
                Words::Pairs(_) | Words::Tiles(_) => {
                    let second = if terms.len() == 2 { column(terms.start + 1) } else { &[] };
                    pair(isa, [column(terms.start), second], word);
                }
            }
            for (to, word) in to.chunks_exact_mut(length).zip(packed.chunks_exact(WIDTH)) {
                to[k * WIDTH..][..WIDTH].copy_from_slice(word);
            }
        }
    }

    /// As [`Self::pack`], where elements of a row lie together.
    fn pack_along<const WIDTH: usize>(
        &self,
        (isa, form): (Isa, Words),
        rows: Range<usize>,
        words: Range<usize>,
        to: &mut [f32],
    ) {
        let length = WIDTH * words.len();
        for (first, to) in rows.clone().step_by(WIDTH).zip(to.chunks_exact_mut(length)) {
            let mut piece = [[0.0; TURNED]; WIDTH];
            for (start, to) in words.clone().step_by(TURNED).zip(to.chunks_mut(WIDTH * TURNED)) {
                let count = to.len() / WIDTH;
                let terms = form.terms(start..start + count, self.columns);
                for (row, piece) in (first..rows.end).zip(&mut piece) {
                    let from = &self.data[row * self.row_step..][terms.clone()];
                    match form {
                        Words::Terms => widen(isa, from, &mut piece[..count]),
                        Words::Pairs(_) | Words::Tiles(_) => {
                            pairs(isa, from, &mut piece[..count]);
                        }
                    }
                }
                isa.run(Turn { from: &piece, to });
            }
        }
    }

    /// Writes some rows for tiles, [`BLOCK`] at a time, one such strip after another: [`TILE`] words of
    /// each row, of which a step has the first, step after step. Rows that the last strip lacks are 0.
    fn pack_tiles(
        &self,
        form: (Isa, Words),
        rows: Range<usize>,
        words: Range<usize>,
        to: &mut [f32],
    ) {
        let step = Steps::of(self.columns).words;
        assert!(words.start.is_multiple_of(step) && words.len().is_multiple_of(step));
        assert!(rows.len() <= MOST_TILED_ROWS && rows.end <= self.rows);
        assert_eq!(to.len(), rows.len().div_ceil(BLOCK) * words.len() / step * BLOCK * TILE);
        match words.len() {
            0 => {}
            _ if self.row_step == 1 => self.pack_tiles_across(form, rows, (words, step), to),
            _ => self.pack_tiles_along(form.1, rows, (words, step), to),
        }
    }

    /// As [`Self::pack_tiles`], where elements of a column lie together.
    fn pack_tiles_across(
        &self,
        (isa, form): (Isa, Words),
        rows: Range<usize>,
        (words, step): (Range<usize>, usize),
        to: &mut [f32],
    ) {
        let length = words.len() / step * BLOCK * TILE;
        let column = |term: usize| &self.data[term * self.column_step..][rows.clone()];
        let mut piece = [[0.0; MOST_TILED_ROWS]; TILE];
        for (k, start) in words.clone().step_by(step).enumerate() {
            for (word, piece) in (start..start + step).zip(&mut piece) {
                let terms = form.terms(word..word + 1, self.columns);
                let word = &mut piece[..rows.len()];
                match terms.len() {
                    0 => word.fill(0.0),
                    1 => pair(isa, [column(terms.start), &[]], word),
                    _ => pair(isa, [column(terms.start), column(terms.start + 1)], word),
                }
            }
            isa.run(TurnToTiles { from: &piece, to: &mut to[k * BLOCK * TILE..], length });
        }
    }

    /// As [`Self::pack_tiles`], where elements of a row lie together.
    fn pack_tiles_along(
        &self,
        form: Words,
        rows: Range<usize>,
        (words, step): (Range<usize>, usize),
        to: &mut [f32],
    ) {
        let length = words.len() / step * BLOCK * TILE;
        for (first, to) in rows.clone().step_by(BLOCK).zip(to.chunks_exact_mut(length)) {
            for row in 0..BLOCK {
                let tiles = to.chunks_exact_mut(BLOCK * TILE);
                for (start, to) in words.clone().step_by(step).zip(tiles) {
                    let to = in_pairs::<E>(&mut to[row * TILE..][..TILE]);
                    if first + row >= rows.end {
                        to.fill(E::from_f32(0.0));
                        continue;
                    }
                    let terms = form.terms(start..start + step, self.columns);
                    let from = &self.data[(first + row) * self.row_step..][terms];
                    match <&[E; 2 * TILE]>::try_from(from) {
                        Ok(from) => to.copy_from_slice(from),
                        Err(_) => {
                            to[..from.len()].copy_from_slice(from);
                            to[from.len()..].fill(E::from_f32(0.0));
                        }
                    }
                }
            }
        }
    }
}

/// Words as the pairs of elements that they are.
fn in_pairs<E: Element>(words: &mut [f32]) -> &mut [E] {
    assert_eq!(E::DTYPE, DType::Bf16);
    // SAFETY: any bits are a bf16, two of which take the room of a word and are aligned to less. On
    // little-endian processors, as those with tiles are, the first is in the lower half.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 2 * words.len()) }
}

/// Writes rows of words as columns: a word of each row, then the next of each.
struct Turn<'a, const WIDTH: usize> {
    from: &'a [[f32; TURNED]; WIDTH],
    to: &'a mut [f32],
}

impl<const WIDTH: usize> Job for Turn<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { from, to } = self;
        let words = to.len() / WIDTH;
        let whole = if WIDTH.is_multiple_of(MAX_LANES) { words / MAX_LANES * MAX_LANES } else { 0 };
        let numbers = from.as_flattened();
        for word in (0..whole).step_by(MAX_LANES) {
            for row in (0..WIDTH).step_by(MAX_LANES) {
                let from = &numbers[row * TURNED + word..];
                simd.turn(from, TURNED, &mut to[word * WIDTH + row..], WIDTH);
            }
        }
        for (word, to) in to.chunks_exact_mut(WIDTH).enumerate().skip(whole) {
            for (to, from) in to.iter_mut().zip(from) {
                *to = from[word];
            }
        }
    }
}

/// Writes words of many rows as two tiles for each [`BLOCK`] of these, `length` apart.
struct TurnToTiles<'a> {
    from: &'a [[f32; MOST_TILED_ROWS]; TILE],
    to: &'a mut [f32],
    length: usize,
}

impl Job for TurnToTiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let from = self.from.as_flattened();
        for (strip, to) in self.to.chunks_mut(self.length).enumerate() {
            for (tile, to) in to[..BLOCK * TILE].chunks_exact_mut(TILE * TILE).enumerate() {
                let from = &from[strip * BLOCK + tile * TILE..];
                simd.turn(from, MOST_TILED_ROWS, to, TILE);
            }
        }
    }
}

/// The right factor of a product, as tiles take it: panels of as many columns as a tile has, word
/// after word.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    pub(super) data: &'a [f32],
    pub(super) words: Words,
    pub(super) columns: usize,
    pub(super) terms: usize,
    /// Words from one column to the next, which are more than those of `terms` where only the first are
    /// taken.
    pub(super) held: usize,
}

impl<'a> Panels<'a> {
    /// The most words that panels of a matrix `[terms, columns]` take in any instruction set.
    pub(crate) fn most_words(terms: usize, columns: usize) -> usize {
        columns.next_multiple_of(MOST_COLUMNS) * terms
    }

    /// Whether factors of dtype `E` are multiplied in pairs of bf16, so that the other factor is of bf16 too.
    pub(crate) fn takes_bf16<E: Element>(isa: Isa) -> bool {
        matches!(Words::of::<E>(isa), Words::Pairs(_) | Words::Tiles(_))
    }

    /// The panels of a matrix `[terms, columns]`, and the words of each, where factors are of dtype `E`.
    pub(crate) fn extents<E: Element>(isa: Isa, [terms, columns]: [usize; 2]) -> [usize; 2] {
        Self::extents_as((isa, Words::of::<E>(isa)), [terms, columns])
    }

    /// As [`Self::extents`], of any words.
    pub(super) fn extents_as(form: (Isa, Words), [terms, columns]: [usize; 2]) -> [usize; 2] {
        let width = Self::width(form);
        [columns.div_ceil(width), width * form.1.count(terms)]
    }

    /// The columns of a panel.
    fn width((isa, words): (Isa, Words)) -> usize {
        match words {
            Words::Tiles(_) => BLOCK,
            _ => isa.run(Width),
        }
    }

    /// Writes panel number `panel` of `matrix` to its place, which begins at `panel` times its length.
    pub(crate) fn pack<E: Element>(isa: Isa, matrix: Matrix<'_, E>, panel: usize, to: &mut [f32]) {
        Self::pack_as((isa, Words::of::<E>(isa)), matrix, panel, to);
    }

    /// As [`Self::pack`], of any words.
    pub(super) fn pack_as<E: Element>(
        form: (Isa, Words),
        matrix: Matrix<'_, E>,
        panel: usize,
        to: &mut [f32],
    ) {
        let (matrix, width) = (matrix.transposed(), Self::width(form));
        let rows = panel * width..matrix.rows.min((panel + 1) * width);
        let words = 0..form.1.filled(matrix.columns);
        let (to, rest) = to.split_at_mut(width * words.len());
        rest.fill(0.0);
        match width {
            8 => matrix.pack::<8>(form, rows, words, to),
            16 => matrix.pack::<16>(form, rows, words, to),
            BLOCK => matrix.pack::<BLOCK>(form, rows, words, to),
            MOST_COLUMNS => matrix.pack::<MOST_COLUMNS>(form, rows, words, to),
            _ => unreachable!("no tile is {width} wide"),
        }
    }

    /// The matrix `[terms, columns]` whose panels, of factors of dtype `E`, begin `data`.
    pub(crate) fn new<E: Element>(isa: Isa, data: &'a [f32], [terms, columns]: [usize; 2]) -> Self {
        Self::new_as(Words::of::<E>(isa), data, [terms, columns])
    }

    /// As [`Self::new`], of any words.
    pub(super) fn new_as(words: Words, data: &'a [f32], [terms, columns]: [usize; 2]) -> Self {
        Self { data, words, columns, terms, held: words.count(terms) }
    }

    /// The first terms alone: all, or a multiple of [`TERMS_STEP`] of as many.
    pub(crate) fn first_terms(self, terms: usize) -> Self {
        let steps = [terms, self.terms].map(|n| n.is_multiple_of(TERMS_STEP));
        assert!(terms == self.terms || (terms < self.terms && steps == [true; 2]));
        Self { terms, ..self }
    }
}

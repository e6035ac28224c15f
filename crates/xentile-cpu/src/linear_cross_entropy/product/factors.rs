//! Factors of a product, and the order in which tiles take them.

use std::ops::Range;

use xentile::{DType, Element};

use super::super::convert::{pair, pairs, widen};
use super::{MOST_COLUMNS, ROWS, STRIPS, Width};
use crate::{Isa, PairsOfBf16};

/// Words of a row that are turned at a time.
const TURNED: usize = 64;

/// The most rows that are packed at a time: strips, or a panel.
const MOST_ROWS: usize = (STRIPS * ROWS).next_multiple_of(MOST_COLUMNS);

/// What a packed word holds. It has 32 bits, and is kept as the f32 of these bits.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Words {
    /// One term of a sum, in f32.
    Terms,
    /// Two terms in bf16, the first of them in the lower half. After an odd number of terms comes 0.
    Pairs(PairsOfBf16),
}

impl Words {
    /// The words that factors of dtype `E` are multiplied as.
    pub(super) fn of<E: Element>(isa: Isa) -> Self {
        match isa.pairs_of_bf16() {
            Some(pairs) if E::DTYPE == DType::Bf16 => Self::Pairs(pairs),
            _ => Self::Terms,
        }
    }

    /// The words of so many terms.
    pub(super) fn count(self, terms: usize) -> usize {
        terms.div_ceil(self.most_terms())
    }

    /// The terms of some words, of `count` that there are.
    fn terms(self, words: Range<usize>, count: usize) -> Range<usize> {
        words.start * self.most_terms()..count.min(words.end * self.most_terms())
    }

    fn most_terms(self) -> usize {
        match self {
            Self::Terms => 1,
            Self::Pairs(_) => 2,
        }
    }
}

/// A matrix in memory, with steps from row to row and from column to column. One of them is 1.
#[derive(Clone, Copy)]
pub(in super::super) struct Matrix<'a, E> {
    data: &'a [E],
    rows: usize,
    columns: usize,
    row_step: usize,
    column_step: usize,
}

impl<'a, E: Element> Matrix<'a, E> {
    /// A matrix of rows of `columns` elements, one after another.
    pub(in super::super) fn new(data: &'a [E], columns: usize) -> Self {
        Self::with_row_step(data, columns, columns)
    }

    /// A matrix of rows of `columns` elements that begin `row_step` apart.
    pub(in super::super) fn with_row_step(data: &'a [E], columns: usize, row_step: usize) -> Self {
        assert!(columns <= row_step);
        let rows = data.len() / row_step;
        assert_eq!(data.len(), rows * row_step);
        Self { data, rows, columns, row_step, column_step: 1 }
    }

    /// Rows and columns.
    pub(in super::super) fn extents(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// The matrix with rows for columns.
    pub(in super::super) fn transposed(self) -> Self {
        let Self { data, rows, columns, row_step, column_step } = self;
        Self { data, rows: columns, columns: rows, row_step: column_step, column_step: row_step }
    }

    /// Some of the rows.
    pub(in super::super) fn rows(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        let start = (rows.start * self.row_step).min(self.data.len());
        Self { data: &self.data[start..], rows: rows.len(), ..self }
    }

    /// The elements of row `row`, of a matrix that is not transposed.
    pub(in super::super) fn row(&self, row: usize) -> &'a [E] {
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
pub(in super::super) trait Left {
    /// Rows, and terms of a sum.
    fn extents(&self) -> [usize; 2];

    /// Packs a few words of some rows, as [`Matrix::pack`] does.
    fn pack(&self, form: (Isa, Words), rows: Range<usize>, words: Range<usize>, to: &mut [f32]);
}

impl<E: Element> Left for Matrix<'_, E> {
    fn extents(&self) -> [usize; 2] {
        self.extents()
    }

    fn pack(&self, form: (Isa, Words), rows: Range<usize>, words: Range<usize>, to: &mut [f32]) {
        self.pack::<ROWS>(form, rows, words, to);
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
                Words::Pairs(_) => {
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
                        Words::Pairs(_) => pairs(isa, from, &mut piece[..count]),
                    }
                }
                for (k, to) in to.chunks_exact_mut(WIDTH).enumerate() {
                    for (to, piece) in to.iter_mut().zip(&piece) {
                        *to = piece[k];
                    }
                }
            }
        }
    }
}

/// The right factor of a product, as tiles take it: panels of as many columns as a tile has, word
/// after word.
#[derive(Clone, Copy)]
pub(in super::super) struct Panels<'a> {
    pub(super) data: &'a [f32],
    pub(super) words: Words,
    pub(super) columns: usize,
    pub(super) terms: usize,
}

impl<'a> Panels<'a> {
    /// The most words that panels of a matrix `[terms, columns]` take in any instruction set.
    pub(in super::super) fn most_words(terms: usize, columns: usize) -> usize {
        columns.next_multiple_of(MOST_COLUMNS) * terms
    }

    /// Whether factors of dtype `E` are multiplied in pairs of bf16, so that the other factor is of bf16 too.
    pub(in super::super) fn takes_bf16<E: Element>(isa: Isa) -> bool {
        matches!(Words::of::<E>(isa), Words::Pairs(_))
    }

    /// The panels of a matrix `[terms, columns]`, and the words of each, where factors are of dtype `E`.
    pub(in super::super) fn extents<E: Element>(
        isa: Isa,
        [terms, columns]: [usize; 2],
    ) -> [usize; 2] {
        let width = isa.run(Width);
        [columns.div_ceil(width), width * Words::of::<E>(isa).count(terms)]
    }

    /// Writes panel number `panel` of `matrix` to its place, which begins at `panel` times its length.
    pub(in super::super) fn pack<E: Element>(
        isa: Isa,
        matrix: Matrix<'_, E>,
        panel: usize,
        to: &mut [f32],
    ) {
        let (matrix, width, form) = (matrix.transposed(), isa.run(Width), Words::of::<E>(isa));
        let rows = panel * width..matrix.rows.min((panel + 1) * width);
        let words = 0..form.count(matrix.columns);
        match width {
            8 => matrix.pack::<8>((isa, form), rows, words, to),
            16 => matrix.pack::<16>((isa, form), rows, words, to),
            MOST_COLUMNS => matrix.pack::<MOST_COLUMNS>((isa, form), rows, words, to),
            _ => unreachable!("no tile is {width} wide"),
        }
    }

    /// The matrix `[terms, columns]` whose panels, of factors of dtype `E`, begin `data`.
    pub(in super::super) fn new<E: Element>(
        isa: Isa,
        data: &'a [f32],
        [terms, columns]: [usize; 2],
    ) -> Self {
        Self { data, words: Words::of::<E>(isa), columns, terms }
    }
}

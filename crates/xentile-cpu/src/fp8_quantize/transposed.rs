//! Values and their transposed copy, from the same read.

use xentile::Element;

use super::entries::{amax, finite_amax, normal, quantize, quotients, store_part};
use super::{Arrays, TILE};
use crate::Job;
use crate::simd::{MAX_CHUNK, Simd};

/// Where the scales of tiles are from.
#[derive(Clone, Copy)]
pub(super) enum Scales {
    /// Of runs of `block` entries of a row, and of a column for the transposed copy; they are there
    /// before, or are made with the tile, whose extents are `block`.
    OfRows { block: usize, are_there: bool },
    /// One of each tile, which is made with it.
    OfSquares,
    /// They are given.
    Given,
}

/// Tiles `first` to `end` of `tile` rows and columns, `tiles` of them down and across a matrix. Whoever makes
/// one vouches that they are the task's alone, and that all pointers lead to as much as they must.
pub(crate) struct Transposed<'a, E> {
    pub(super) arrays: &'a Arrays<E>,
    pub(super) tile: usize,
    pub(super) tiles: [usize; 2],
    pub(super) scales: Scales,
    pub(super) first: usize,
    pub(super) end: usize,
}

/// Scales of columns that are blocks: `strips` of `TILE` columns a matrix, `first` to `end` of all.
pub(crate) struct ColumnScales<'a, E> {
    pub(super) arrays: &'a Arrays<E>,
    pub(super) strips: usize,
    pub(super) first: usize,
    pub(super) end: usize,
}

/// A part of a matrix.
#[derive(Clone, Copy)]
struct Part {
    matrix: usize,
    row: usize,
    column: usize,
    rows: usize,
    columns: usize,
}

impl<E: Element> Job for ColumnScales<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let shape = self.arrays.shape;
        for strip in self.first..self.end {
            let (matrix, column) = (strip / self.strips, strip % self.strips * TILE);
            let columns = TILE.min(shape.columns() - column);
            let part = Part { matrix, row: 0, column, rows: shape.rows(), columns };
            // SAFETY: the strip lies in its matrix, and each column has a scale.
            unsafe { column_scales(s, self.arrays, part, usize::MAX) };
        }
    }
}

impl<E: Element> Transposed<'_, E> {
    #[inline(always)]
    pub(super) fn each<S: Simd, const E5M2: bool>(self, s: S) {
        let shape = self.arrays.shape;
        for index in self.first..self.end {
            let (band, across) = (index / self.tiles[1], index % self.tiles[1]);
            let (matrix, down) = (band / self.tiles[0], band % self.tiles[0]);
            let (row, column) = (down * self.tile, across * self.tile);
            let rows = self.tile.min(shape.rows() - row);
            let columns = self.tile.min(shape.columns() - column);
            let whole = Part { matrix, row, column, rows, columns };
            // SAFETY: the tile lies in its matrix, and its scales in their arrays.
            let one = unsafe { self.scales(s, whole, [down, across]) };
            for row in (0..rows).step_by(TILE) {
                for column in (0..columns).step_by(TILE) {
                    let part = Part {
                        row: whole.row + row,
                        column: whole.column + column,
                        rows: TILE.min(rows - row),
                        columns: TILE.min(columns - column),
                        ..whole
                    };
                    // SAFETY: as above.
                    unsafe { self.part::<S, E5M2>(s, part, one) };
                }
            }
        }
    }

    /// Makes the scales of a tile, if they are not there; returns it if there is only one.
    ///
    /// # Safety
    /// The tile lies in its matrix, and its scales in their arrays.
    #[inline(always)]
    unsafe fn scales<S: Simd>(&self, s: S, tile: Part, at: [usize; 2]) -> Option<f32> {
        let arrays = self.arrays;
        // SAFETY: the caller's.
        unsafe {
            match self.scales {
                Scales::Given => {
                    let row = tile.matrix * arrays.shape.rows();
                    return Some(*arrays.given.add(row / arrays.rows_of_scale));
                }
                Scales::OfSquares => {
                    let x = arrays.x.add(place(arrays, tile, 0));
                    let rows = [tile.rows, arrays.shape.columns()];
                    let most = amax(s, x, rows, tile.columns);
                    let scale = arrays.options.scale(most);
                    let [down, across] = self.tiles;
                    let first = tile.matrix * down * across;
                    *arrays.numbers.add(first + at[0] * across + at[1]) = scale;
                    *arrays.transposed_scales.add(first + at[1] * down + at[0]) = scale;
                    return Some(scale);
                }
                Scales::OfRows { block, are_there: false } => {
                    let across = arrays.shape.columns().div_ceil(block);
                    for row in 0..tile.rows {
                        let most =
                            amax(s, arrays.x.add(place(arrays, tile, row)), [1, 0], tile.columns);
                        let number = (tile.matrix * arrays.shape.rows() + tile.row + row) * across;
                        *arrays.numbers.add(number + at[1]) = arrays.options.scale(most);
                    }
                    column_scales(s, arrays, tile, block);
                }
                Scales::OfRows { are_there: true, .. } => (),
            }
        }
        None
    }

    /// Values and transposed values of at most `TILE` rows and columns; by `scale`, if there is one.
    ///
    /// # Safety
    /// As for [`Self::scales`].
    #[inline(always)]
    unsafe fn part<S: Simd, const E5M2: bool>(&self, s: S, part: Part, scale: Option<f32>) {
        let arrays = self.arrays;
        let [rows, columns] = [arrays.shape.rows(), arrays.shape.columns()];
        // Transposed values, before they are transposed.
        let mut straight = [[0_u8; TILE]; TILE];
        // SAFETY: the caller's; buffers hold a part.
        unsafe {
            // Reciprocals of scales.
            let mut of_columns = [1.0_f32; TILE + MAX_CHUNK];
            let mut across = 0;
            if scale.is_none() {
                let Scales::OfRows { block, .. } = self.scales else { unreachable!() };
                across = columns.div_ceil(block);
                let down = rows.div_ceil(block);
                for column in 0..part.columns {
                    let number = (part.matrix * columns + part.column + column) * down;
                    // Where the chunk has it.
                    let chunk = column / S::CHUNK * S::CHUNK;
                    of_columns[chunk + S::place::<E>(column - chunk)] =
                        1.0 / *arrays.transposed_scales.add(number + part.row / block);
                }
            }
            for (row, straight) in straight.iter_mut().enumerate().take(part.rows) {
                let at = place(arrays, part, row);
                let (x, to) = (arrays.x.add(at), arrays.values.add(at));
                if let Some(scale) = scale {
                    quantize::<S, E, E5M2>(s, x, part.columns, scale, to, false);
                    to.copy_to_nonoverlapping(straight.as_mut_ptr(), part.columns);
                    continue;
                }
                let Scales::OfRows { block, .. } = self.scales else { unreachable!() };
                let number = (part.matrix * rows + part.row + row) * across;
                let of_row = *arrays.numbers.add(number + part.column / block);
                quantize::<S, E, E5M2>(s, x, part.columns, of_row, to, false);
                let mut index = 0;
                while index < part.columns {
                    let count = S::CHUNK.min(part.columns - index);
                    let chunk = if count == S::CHUNK {
                        s.load(x.add(index))
                    } else {
                        s.load_part(x.add(index), count, E::from_f32(0.0))
                    };
                    let by = s.load(of_columns.as_ptr().add(index));
                    let chunk = quotients::<S, true>(s, chunk, by);
                    let to = straight.as_mut_ptr().add(index);
                    if count == S::CHUNK {
                        s.store_fp8::<E, E5M2>(chunk, to);
                    } else {
                        store_part::<S, E, E5M2>(s, chunk, to, count);
                    }
                    index += count;
                }
            }
            let first = (part.matrix * columns + part.column) * rows + part.row;
            turn(&straight, [part.rows, part.columns], arrays.transposed.add(first), rows);
        }
    }
}

/// Where a row of a part begins.
#[inline(always)]
fn place<E>(arrays: &Arrays<E>, part: Part, row: usize) -> usize {
    let row = part.matrix * arrays.shape.rows() + part.row + row;
    row * arrays.shape.columns() + part.column
}

/// Writes the scale of each of a part's columns, of which `block` rows have one.
///
/// # Safety
/// The part lies in its matrix, and the scales in their array.
#[inline(always)]
unsafe fn column_scales<S: Simd, E: Element>(s: S, arrays: &Arrays<E>, part: Part, block: usize) {
    let down = arrays.shape.rows().div_ceil(block);
    let mut index = 0;
    // SAFETY: chunks lie in the part's rows.
    unsafe {
        while index < part.columns {
            let count = S::CHUNK.min(part.columns - index);
            let mut most = [s.splat(0.0); 2];
            for row in 0..part.rows {
                let x = arrays.x.add(place(arrays, part, row) + index);
                let [a, b] = if count == S::CHUNK {
                    s.load(x)
                } else {
                    s.load_part(x, count, E::from_f32(0.0))
                };
                most = [s.max(s.abs(a), most[0]), s.max(s.abs(b), most[1])];
            }
            let most = [s.to_array(most[0]), s.to_array(most[1])];
            for column in 0..count {
                let at = S::place::<E>(column);
                let mut amax = normal(most[at / S::LANES][at % S::LANES]);
                if amax == f32::INFINITY {
                    let of_column = |row| *arrays.x.add(place(arrays, part, row) + index + column);
                    amax = finite_amax((0..part.rows).map(of_column));
                }
                let number =
                    (part.matrix * arrays.shape.columns() + part.column + index + column) * down;
                *arrays.transposed_scales.add(number + part.row / block) =
                    arrays.options.scale(amax);
            }
            index += count;
        }
    }
}

/// Writes the columns of `from`, of so many rows and columns, to rows that begin `step` apart.
///
/// # Safety
/// `to` leads to these rows.
#[inline(always)]
unsafe fn turn(from: &[[u8; TILE]; TILE], extents: [usize; 2], to: *mut u8, step: usize) {
    let [rows, columns] = extents;
    for column in (0..columns).step_by(BLOCK) {
        for row in (0..rows).step_by(BLOCK) {
            let mut block = [[0; BLOCK]; BLOCK];
            for (index, bytes) in block.iter_mut().enumerate() {
                bytes.copy_from_slice(&from[row + index][column..][..BLOCK]);
            }
            turn_block(&mut block);
            let count = BLOCK.min(rows - row);
            for (index, bytes) in block.iter().enumerate().take(columns - column) {
                // SAFETY: the caller's, as no more than its columns and rows are written.
                unsafe {
                    let to = to.add((column + index) * step + row);
                    if count == BLOCK {
                        to.cast::<[u8; BLOCK]>().write_unaligned(*bytes);
                    } else {
                        bytes.as_ptr().copy_to_nonoverlapping(to, count);
                    }
                }
            }
        }
    }
}

/// Rows and columns of a block of bytes that is transposed at once.
const BLOCK: usize = 16;

/// Puts the transposed of a block in its place: by four rounds of interleaving rows that are half of all
/// apart.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn turn_block(rows: &mut [[u8; BLOCK]; BLOCK]) {
    use std::arch::x86_64::{__m128i, _mm_unpackhi_epi8, _mm_unpacklo_epi8};
    // SAFETY: of the same size, and any bits are vectors.
    let mut all: [__m128i; BLOCK] = unsafe { std::mem::transmute(*rows) };
    for _ in 0..4 {
        let before = all;
        for index in 0..BLOCK / 2 {
            let (first, second) = (before[index], before[index + BLOCK / 2]);
            #[allow(unused_unsafe)] // compilers differ on whether baseline intrinsics need it
            // SAFETY: SSE2 is part of every x86-64.
            unsafe {
                all[2 * index] = _mm_unpacklo_epi8(first, second);
                all[2 * index + 1] = _mm_unpackhi_epi8(first, second);
            }
        }
    }
    // SAFETY: as above.
    *rows = unsafe { std::mem::transmute::<[__m128i; BLOCK], [[u8; BLOCK]; BLOCK]>(all) };
}

/// Puts the transposed of a block in its place.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn turn_block(rows: &mut [[u8; BLOCK]; BLOCK]) {
    for row in 1..BLOCK {
        for column in 0..row {
            let byte = rows[row][column];
            rows[row][column] = rows[column][row];
            rows[column][row] = byte;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_transposed() {
        let rows: [[u8; BLOCK]; BLOCK] =
            std::array::from_fn(|row| std::array::from_fn(|column| (row * BLOCK + column) as u8));
        let mut transposed = rows;
        turn_block(&mut transposed);
        for (column, bytes) in transposed.iter().enumerate() {
            for (row, byte) in bytes.iter().enumerate() {
                assert_eq!(*byte, rows[row][column]);
            }
        }
    }
}

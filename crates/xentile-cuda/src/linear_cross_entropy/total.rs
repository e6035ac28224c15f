//! Where a gradient goes, and where its sums in f32 are until it is whole.
//!
//! A gradient in 16 bits has room for half of its sums: their first rows are there, and the rest in
//! the scratch. In the end the first rows are rounded where they lie, which makes room for the others.
//! Sums of a chunk of rows lie there whole while the rows that follow are not written yet.

use std::ffi::c_void;

use xentile::DType;

use super::Scratch;
use super::tiling::{Chunk, own_rows};
use crate::Result;
use crate::blas::Matrix;
use crate::driver::{Driver, RawStream};
use crate::round::round;

/// Rows that rounding in place goes by, so that parts begin at vectors.
const ROWS: usize = 8;
/// Rows that are copied rather than rounded in steps.
const FEW: usize = 16_384;

/// Sums of a gradient in the scratch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    /// Where they are.
    pub(super) at: *mut c_void,
    /// Rows that there is room for: of all of the matrix, or of a chunk.
    pub(super) rows: usize,
    /// Whether they are of one chunk at a time.
    pub(super) is_one_chunk: bool,
    /// Whether the first rows are where the gradient goes, which is without gaps.
    pub(super) shares: bool,
}

/// A gradient, as products for chunks add to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Total {
    pub(super) gradient: Matrix,
    /// None where a gradient is its own sum: it is in f32, or one product gives it.
    pub(super) sums: Option<Sums>,
    /// Whether chunks are columns of the matrix, rather than rows.
    pub(super) by_columns: bool,
}

/// Rows of a chunk's part of a gradient, and the matrix that products for them go to.
pub(super) type Part = (Chunk, Matrix);

impl Total {
    /// A chunk's part of the gradient itself.
    fn target(&self, chunk: Chunk) -> Matrix {
        if self.by_columns {
            self.gradient.columns(chunk.first, chunk.count)
        } else {
            self.gradient.rows(chunk.first, chunk.count)
        }
    }

    /// Whether sums of a chunk are no larger than the place of its gradient and of what follows it,
    /// where chunks are written one after the other.
    fn has_room_after(&self, chunk: Chunk) -> bool {
        self.sums.is_some_and(|sums| sums.is_one_chunk)
            && !self.by_columns
            && chunk.first + 2 * chunk.count <= self.gradient.rows
    }

    /// Where products for a chunk go.
    pub(super) fn parts(&self, chunk: Chunk) -> impl Iterator<Item = Part> {
        let target = self.target(chunk);
        let all = Chunk { first: 0, count: target.rows };
        let [own, rest] = match self.sums {
            None => [Some((all, target)), None],
            Some(sums) => {
                // Of all of the matrix, or of this part of it: rows in its own memory, then others.
                let (whole, begin) =
                    if sums.is_one_chunk { (target, 0) } else { (self.gradient, chunk.first) };
                // What the scratch has no room for is never more than half.
                let own = own_rows(whole.rows).max(whole.rows.saturating_sub(sums.rows));
                let own = if self.has_room_after(chunk) { whole.rows } else { own };
                let own = if sums.shares { own } else { 0 };
                let end = begin + all.count;
                let f32 = |at, rows| Matrix::new(at, DType::F32, rows, whole.columns);
                let part = |matrix: Matrix, first: usize, end: usize, before: usize| {
                    let count = end.saturating_sub(first);
                    (
                        Chunk { first: first.saturating_sub(begin), count },
                        matrix.rows(first - before, count),
                    )
                };
                let first = begin.max(own);
                [
                    (begin < own).then(|| part(f32(whole.at, own), begin, end.min(own), 0)),
                    (first < end).then(|| part(f32(sums.at, sums.rows), first, end, own)),
                ]
            }
        };
        [own, rest].into_iter().flatten().filter(|(rows, _)| rows.count > 0)
    }

    /// Rounds the sums of a chunk to their gradient, by way of `spare`, which has room for 8 rows.
    ///
    /// # Safety
    /// As for [`round`]; nothing that is still wanted is in `spare`.
    pub(super) unsafe fn end(&self, stream: RawStream, chunk: Chunk, spare: Scratch) -> Result<()> {
        if self.sums.is_none() {
            return Ok(());
        }
        let target = self.target(chunk);
        // The gradient's own first: the others go to where they lie.
        for (rows, sums) in self.parts(chunk) {
            let to = target.rows(rows.first, rows.count);
            // SAFETY: passed on from this function's contract.
            unsafe {
                if sums.at == to.at {
                    round_in_place(stream, sums, to, spare)?;
                } else {
                    round(stream, sums, to)?;
                }
            }
        }
        Ok(())
    }
}

/// Rounds `sums` to `to`, which begins where they begin and has no gaps either.
///
/// # Safety
/// As for [`Total::end`].
unsafe fn round_in_place(
    stream: RawStream,
    sums: Matrix,
    to: Matrix,
    spare: Scratch,
) -> Result<()> {
    let row_bytes = to.columns * to.dtype.size_bytes();
    for (index, Chunk { first, count }) in steps(sums.rows, spare.bytes / row_bytes).enumerate() {
        let (from, place) = (sums.rows(first, count), to.rows(first, count));
        // SAFETY: passed on from this function's contract.
        unsafe {
            if index == 0 {
                round(stream, from, Matrix { at: spare.at, ..place })?;
                Driver::get()?.copy(stream, place.at, spare.at, count * row_bytes)?;
            } else {
                round(stream, from, place)?;
            }
        }
    }
    Ok(())
}

/// The steps in which rows shrink to half where they lie, of which the first goes by way of a place
/// with room for `spare` rows: each ends at most twice as far as it begins, so that what it writes
/// was read by those before. Few rows take one step, as launches cost more than a copy of them.
fn steps(rows: usize, spare: usize) -> impl Iterator<Item = Chunk> {
    let wanted = if rows <= FEW { rows } else { rows.div_ceil(16).next_multiple_of(ROWS) };
    let first = wanted.min(spare / ROWS * ROWS).clamp(1, rows.max(1));
    let ends =
        std::iter::successors(Some(first), move |&end| (end < rows).then(|| (2 * end).min(rows)));
    let mut begin = 0;
    ends.take_while(move |_| rows > 0).map(move |end| {
        let step = Chunk { first: begin, count: end - begin };
        begin = end;
        step
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_overwrite_only_memory_already_read() {
        for rows in [0, 1, 7, 8, 64, 1000, 64_128] {
            for spare in [8, 9, 100, 1_000_000] {
                let mut end = 0;
                for (index, Chunk { first, count }) in steps(rows, spare).enumerate() {
                    assert_eq!(first, end);
                    end = first + count;
                    // In bytes of a column: f32 to 16 bits.
                    assert!(if index == 0 { count <= spare } else { 2 * end <= 4 * first });
                }
                assert_eq!(end, rows);
            }
        }
    }

    #[test]
    fn sums_are_half_where_the_gradient_goes_and_half_in_the_scratch() {
        let at = |address: usize| std::ptr::without_provenance_mut::<c_void>(address);
        let gradient = Matrix::new(at(0x10_0000), DType::Bf16, 1000, 16);
        let sums = Sums { at: at(0x1000), rows: 552, is_one_chunk: true, shares: true };
        let total = Total { gradient, sums: Some(sums), by_columns: false };
        let whole = Total { sums: Some(Sums { is_one_chunk: false, ..sums }), ..total };
        let places = |first, count| -> Vec<_> {
            let parts = whole.parts(Chunk { first, count });
            parts.map(|(rows, matrix)| (rows.first, rows.count, matrix.at.addr())).collect()
        };
        // 448 rows of 64 bytes are where the gradient goes.
        assert_eq!(places(0, 1000), [(0, 448, 0x10_0000), (448, 552, 0x1000)]);
        assert_eq!(places(400, 100), [(0, 48, 0x10_0000 + 400 * 64), (48, 52, 0x1000)]);
        assert_eq!(places(448, 10), [(0, 10, 0x1000)]);
        assert_eq!(places(990, 10), [(0, 10, 0x1000 + 542 * 64)]);
        assert_eq!(places(10, 20), [(0, 20, 0x10_0000 + 640)]);
        // What follows is not written yet.
        let parts: Vec<_> = total.parts(Chunk { first: 100, count: 300 }).collect();
        assert_eq!(parts.len(), 1);
        assert_eq!((parts[0].1.at, parts[0].1.rows), (at(0x10_0000 + 100 * 32), 300));
        for (first, count) in [(0, 1000), (0, 600), (700, 300), (990, 10)] {
            let parts: Vec<_> = total.parts(Chunk { first, count }).collect();
            let rows: Vec<_> = parts.iter().map(|(rows, _)| rows.count).collect();
            assert_eq!(rows.iter().sum::<usize>(), count);
            for (rows, matrix) in parts {
                assert_eq!((matrix.rows, matrix.columns, matrix.stride), (rows.count, 16, 16));
                if rows.first > 0 || count == 10 {
                    assert_eq!(matrix.at, at(0x1000));
                    assert!(rows.count <= 552);
                } else {
                    assert_eq!(matrix.at, at(0x10_0000 + first * 32));
                    assert!(2 * rows.count <= count);
                }
            }
        }
    }
}

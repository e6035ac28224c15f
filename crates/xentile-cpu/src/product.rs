//! GEMMs on CPUs, with float32 sums.
//!
//! The scheme is that of K. Goto and R. van de Geijn, Anatomy of high-performance matrix
//! multiplication (2008): a tile of the result stays in registers, while the microkernel reads a strip
//! of each matrix from memory packed in its order. All threads pack the right matrix together, once, and
//! each multiplies it by rows of its own. Every GEMM of a pass has a right matrix that all threads share
//! (the weight, twice, and hidden states); a library's GEMM, which packs both matrices for itself, spends
//! a good part of its time on packing.
//!
//! Packed words have 32 bits: one float32, or two bf16 on processors that multiply bf16 pairs, in half
//! the time. For processors that multiply whole tiles of bf16 (AMX), words have another order (`tiled`).
//!
//! The order of each sum does not depend on which other rows and columns are computed.

mod factors;
mod tiled;

use crate::isa::PairsJob;
use crate::simd::{MAX_CHUNK, MulAdd, Numbers};
use crate::{Isa, Job, Simd};
use factors::Words;
pub(crate) use factors::{Left, Matrix, Panels, TERMS_STEP};
use tiled::Cut;

/// Words of the inner dimension in a block: strips of so many stay in the closest caches.
const DEPTH: usize = 512;

/// The same for words of two bf16, which round the sum twice: with longer blocks the error of logits
/// would exceed that of XLA's programs.
const DEPTH_OF_PAIRS: usize = 128;

/// Strips of the left matrix in a block, which stays in the caches while it is multiplied by each panel
/// of the right matrix.
const STRIPS: usize = 21;

/// Rows of a strip, and of a tile. With four vectors a row, or two on processors with few registers, all
/// sums of a tile are in registers, and at most every other multiplication reads memory.
const ROWS: usize = 6;

/// Rows of a smaller tile, for the last rows.
const FEW_ROWS: usize = 3;

/// The most columns of a tile.
const MOST_COLUMNS: usize = 2 * MAX_CHUNK;

/// SIMD chunks in a row of a tile.
const fn chunks<S: Simd>() -> usize {
    S::REGISTERS / 16
}

/// Computes the columns of a tile.
struct Width;

impl Job for Width {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        chunks::<S>() * S::CHUNK
    }
}

/// Sets `to`, row after row, to `left x right`, or adds that to it.
pub(crate) fn multiply(isa: Isa, left: &dyn Left, right: Panels<'_>, add: bool, to: &mut [f32]) {
    let [rows, terms] = left.extents();
    assert_eq!(terms, right.terms);
    assert_eq!(to.len(), rows * right.columns);
    let job = Multiply { isa, left, right, add, to };
    match (terms, right.words) {
        (0, _) if add => {}
        (0, _) => job.to.fill(0.0),
        (_, Words::Terms) => isa.run(job),
        (_, Words::Pairs(pairs)) => pairs.run(job),
        (_, Words::Tiles(tiles)) => tiled::multiply(tiles, Cut::BEST, job),
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
        PairsJob::run(self, simd, Numbers);
    }
}

impl PairsJob for Multiply<'_> {
    #[inline(always)]
    fn run<S: Simd, M: MulAdd<S>>(self, simd: S, mul_add: M) {
        match chunks::<S>() {
            2 => self.blocks::<S, M, 2>(simd, mul_add),
            _ => self.blocks::<S, M, 1>(simd, mul_add),
        }
    }
}

impl Multiply<'_> {
    /// In tiles of `CHUNKS` chunks a row.
    #[inline(always)]
    fn blocks<S: Simd, M: MulAdd<S>, const CHUNKS: usize>(self, simd: S, mul_add: M) {
        let Self { isa, left, right, add, to } = self;
        let ([rows, terms], columns) = (left.extents(), right.columns);
        let words = right.words.count(terms);
        let width = CHUNKS * S::CHUNK;
        let depth = match right.words {
            Words::Terms => DEPTH,
            Words::Pairs(_) | Words::Tiles(_) => DEPTH_OF_PAIRS,
        };
        let mut packed = vec![0.0; STRIPS.min(rows.div_ceil(ROWS)) * ROWS * words.min(depth)];
        for start in (0..words).step_by(depth) {
            let count = depth.min(words - start);
            let add = add || start > 0;
            for first in (0..rows).step_by(STRIPS * ROWS) {
                let end = rows.min(first + STRIPS * ROWS);
                let packed = &mut packed[..(end - first).next_multiple_of(ROWS) * count];
                left.pack((isa, right.words), first..end, start..start + count, packed);
                let strips = || (first..end).step_by(ROWS).zip(packed.chunks_exact(ROWS * count));
                for column in (0..columns).step_by(width) {
                    let panel = &right.data[column * right.held + start * width..][..count * width];
                    for (row, left) in strips() {
                        let to = &mut to[row * columns + column..];
                        let extents = [ROWS.min(end - row), width.min(columns - column)];
                        if extents[0] > FEW_ROWS {
                            let tile = tile::<S, M, CHUNKS, ROWS>(simd, mul_add, left, panel);
                            write_part(simd, &tile, extents, columns, add, to);
                        } else {
                            let tile = tile::<S, M, CHUNKS, FEW_ROWS>(simd, mul_add, left, panel);
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
fn tile<S: Simd, M: MulAdd<S>, const CHUNKS: usize, const COUNT: usize>(
    simd: S,
    mul_add: M,
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
                *sums = [0, 1].map(|i| mul_add.mul_add(simd, left, right[i], sums[i]));
            }
        }
    }
    sums
}

/// Writes a tile to rows with a stride of `step`, or adds it to them.
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
mod tests;

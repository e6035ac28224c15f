//! Blocks of several rows.

use std::mem::MaybeUninit;

use xentile::Element;

use super::entries::{amax, quantize, streams};
use super::{Arrays, TILE};
use crate::simd::{LINE_BYTES, Simd};

/// Entries of the largest tile that is copied before it is worked on.
const COPIED: usize = TILE * TILE;

/// Tiles `first` to `end`, each a block, of `down` x `across` a matrix. Whoever makes one vouches that they
/// are the task's alone, and that all pointers lead to as much as they must.
pub(crate) struct Tiles<'a, E> {
    pub(super) arrays: &'a Arrays<E>,
    pub(super) down: usize,
    pub(super) across: usize,
    pub(super) first: usize,
    pub(super) end: usize,
}

impl<E: Element> Tiles<'_, E> {
    #[inline(always)]
    pub(super) fn each<S: Simd, const E5M2: bool>(self, s: S) {
        let Arrays { shape, block, .. } = *self.arrays;
        let streams = streams::<S>(shape.elements());
        let mut copy = [MaybeUninit::<E>::uninit(); COPIED];
        for tile in self.first..self.end {
            let (band, across) = (tile / self.across, tile % self.across);
            let (matrix, down) = (band / self.down, band % self.down);
            let (row, column) = (down * block[0], across * block[1]);
            let (rows, count) =
                (block[0].min(shape.rows() - row), block[1].min(shape.columns() - column));
            let first = (matrix * shape.rows() + row) * shape.columns() + column;
            let step = shape.columns();
            // SAFETY: rows of the tile lie in x and values, and its scale in numbers; the copy holds
            // what it is given.
            unsafe {
                let (mut x, mut from_step) = (self.arrays.x.add(first), step);
                if rows * count <= COPIED && count < step {
                    // Rows far apart do not stay in the caches together.
                    for row in 0..rows {
                        let from = x.add(row * step);
                        // The next tile's, for the time when it is copied.
                        for line in (0..count).step_by(LINE_BYTES / size_of::<E>()) {
                            s.prefetch(from.wrapping_add(count + line).cast());
                        }
                        from.copy_to_nonoverlapping(
                            copy.as_mut_ptr().add(row * count).cast(),
                            count,
                        );
                    }
                    (x, from_step) = (copy.as_ptr().cast(), count);
                }
                let scale = self.arrays.options.scale(amax(s, x, [rows, from_step], count));
                *self.arrays.numbers.add(tile) = scale;
                for row in 0..rows {
                    let to = self.arrays.values.add(first + row * step);
                    let from = x.add(row * from_step);
                    quantize::<S, E, E5M2>(s, from, count, scale, to, streams);
                }
            }
        }
        if streams {
            s.fence();
        }
    }
}

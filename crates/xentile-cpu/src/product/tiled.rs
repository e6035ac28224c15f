//! Products in tiles, where processors multiply those.

use super::Multiply;
use super::factors::{MOST_TILED_ROWS, Steps};
use crate::simd::{BLOCK, Factors, LINE_BYTES, Sums, TILE, Tiles};

/// How a product is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Steps of a sum that are taken at a time.
    pub(super) steps: usize,
    /// Rows that are packed at a time, for all panels.
    pub(super) rows: usize,
}

impl Cut {
    /// As measured: docs/internals/linear-cross-entropy-cpu.md has the results.
    pub(super) const BEST: Self = Self { steps: 32, rows: MOST_TILED_ROWS };
}

/// Sets `job.to`, or adds to it.
pub(super) fn multiply(tiles: Tiles, cut: Cut, job: Multiply<'_>) {
    let Multiply { isa, left, right, add, to } = job;
    let ([rows, terms], columns) = (left.extents(), right.columns);
    let steps = Steps::of(terms);
    // SAFETY: nobody else multiplies in this thread before it is dropped.
    let tiles = unsafe { tiles.configure(steps.words) };
    // As many steps each time as the others, or one more.
    let most = steps.count.div_ceil(steps.count.div_ceil(cut.steps));
    let strip = |steps: usize| steps * BLOCK * TILE;
    let line = LINE_BYTES / size_of::<f32>();
    let mut memory = vec![0.0_f32; cut.rows.min(rows).div_ceil(BLOCK) * strip(most) + line];
    // Rows of a tile are lines.
    let memory = {
        let start = memory.as_ptr().align_offset(LINE_BYTES);
        &mut memory[start..]
    };
    for start in (0..steps.count).step_by(most) {
        let end = steps.count.min(start + most);
        let (taken, length) = (start * steps.words..end * steps.words, strip(end - start));
        let add = add || start > 0;
        for first in (0..rows).step_by(cut.rows) {
            let last = rows.min(first + cut.rows);
            let packed = &mut memory[..(last - first).div_ceil(BLOCK) * length];
            left.pack((isa, right.words), first..last, taken.clone(), packed);
            for column in (0..columns).step_by(BLOCK) {
                let panel = &right.data[column * right.held + taken.start * BLOCK..];
                let right = &panel[..taken.len() * BLOCK];
                let width = BLOCK.min(columns - column);
                for (row, left) in (first..last).step_by(BLOCK).zip(packed.chunks_exact(length)) {
                    let below = (row + BLOCK) * columns + column;
                    if below < to.len() {
                        tiles.prefetch(&to[below..], columns);
                    }
                    let to = &mut to[row * columns + column..];
                    let factors = Factors { left, right };
                    match BLOCK.min(last - row) {
                        BLOCK if width == BLOCK => {
                            tiles.multiply(factors, Sums { to, step: columns, add });
                        }
                        height => part([height, width], to, columns, |whole| {
                            tiles.multiply(factors, Sums { to: whole, step: BLOCK, add });
                        }),
                    }
                }
            }
        }
    }
}

/// Has `work` do to a whole block what it is to do to the first rows and columns, of rows that lie
/// `step` apart.
fn part([rows, columns]: [usize; 2], to: &mut [f32], step: usize, work: impl FnOnce(&mut [f32])) {
    let mut whole = [0.0; BLOCK * BLOCK];
    for (row, whole) in whole.chunks_exact_mut(BLOCK).take(rows).enumerate() {
        whole[..columns].copy_from_slice(&to[row * step..][..columns]);
    }
    work(&mut whole);
    for (row, whole) in whole.chunks_exact(BLOCK).take(rows).enumerate() {
        to[row * step..][..columns].copy_from_slice(&whole[..columns]);
    }
}

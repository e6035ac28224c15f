//! The backward pass: of a row the mean of `g xhat` and its part of dweight, then dx.

use xentile::Element;
use xentile::rms_norm::NormShape;

use super::weight::{Arranged, in_columns};
use super::{LANE_TERMS, ahead, ragged, streams};
use crate::Job;
use crate::simd::{MAX_CHUNK, Simd};

/// What all tasks share.
pub(crate) struct Rows<'a, E> {
    pub(super) shape: NormShape,
    pub(super) x: *const E,
    pub(super) dy: *const E,
    pub(super) dsum: Option<*const E>,
    pub(super) dx: *mut E,
    pub(super) rstd: &'a [f32],
    pub(super) weight: &'a Arranged,
    /// Whether dx lies in the place of x or of dy.
    pub(super) in_place: bool,
}

// SAFETY: tasks read and write disjoint ranges of rows.
unsafe impl<E: Element> Sync for Rows<'_, E> {}

/// A block of rows, `first` to `end`, with its sums `[D]` of dweight. Whoever makes one vouches that
/// the rows are the task's alone, and that all pointers lead to as much as the shape says.
pub(crate) struct Backward<'a, E> {
    pub(super) rows: &'a Rows<'a, E>,
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) sums: &'a mut [f32],
}

impl<E: Element> Job for Backward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rows { shape, dx, in_place, dsum, .. } = *self.rows;
        match (dsum.is_some(), !in_place && streams::<S, E>(shape, dx)) {
            (false, false) => self.rows::<S, false, false>(s),
            (false, true) => self.rows::<S, false, true>(s),
            (true, false) => self.rows::<S, true, false>(s),
            (true, true) => self.rows::<S, true, true>(s),
        }
    }
}

impl<E: Element> Backward<'_, E> {
    #[inline(always)]
    fn rows<S: Simd, const ADD: bool, const STREAM: bool>(self, s: S) {
        let shape = self.rows.shape;
        let mut sums = vec![0.0; shape.columns().next_multiple_of(MAX_CHUNK)];
        for index in self.first..self.end {
            let row = Row::<S, E, ADD>::new(s, self.rows, index);
            let ahead = if index + 1 < shape.rows() { shape.columns() } else { 0 };
            // SAFETY: the row is this task's.
            unsafe {
                let mean = row.sum(&mut sums) / shape.columns() as f64;
                row.write::<STREAM>(mean as f32, ahead);
            }
        }
        if STREAM {
            s.fence();
        }
        in_columns::<S, E>(s, &sums, self.sums);
    }
}

/// One row: D elements from each pointer. Without `ADD` dsum is null.
struct Row<'a, S, E, const ADD: bool> {
    simd: S,
    columns: usize,
    x: *const E,
    dy: *const E,
    dsum: *const E,
    dx: *mut E,
    rstd: f32,
    weight: &'a [f32],
}

/// A chunk of a row.
struct Chunk<V> {
    dy: [V; 2],
    g: [V; 2],
    xhat: [V; 2],
}

impl<'a, S: Simd, E: Element, const ADD: bool> Row<'a, S, E, ADD> {
    #[inline(always)]
    fn new(simd: S, rows: &'a Rows<'_, E>, index: usize) -> Self {
        let columns = rows.shape.columns();
        let start = index * columns;
        let dsum = match rows.dsum {
            Some(dsum) if ADD => dsum.wrapping_add(start),
            _ => std::ptr::null(),
        };
        Self {
            simd,
            columns,
            x: rows.x.wrapping_add(start),
            dy: rows.dy.wrapping_add(start),
            dsum,
            dx: rows.dx.wrapping_add(start),
            rstd: rows.rstd[index],
            weight: rows.weight.of(index),
        }
    }

    /// `count` elements from `column`, zeros after them.
    ///
    /// # Safety
    /// The columns lie in the row.
    #[inline(always)]
    unsafe fn chunk<const WHOLE: bool>(&self, column: usize, count: usize) -> Chunk<S::Vector> {
        let (s, rstd) = (self.simd, self.simd.splat(self.rstd));
        let weight = &self.weight[column..column + S::CHUNK];
        // SAFETY: passed on from this function's contract; the slice is a chunk long.
        let (x, dy, weight) = unsafe {
            (
                ragged::load::<S, E, WHOLE>(s, self.x.add(column), count),
                ragged::load::<S, E, WHOLE>(s, self.dy.add(column), count),
                s.load(weight.as_ptr()),
            )
        };
        Chunk {
            dy,
            g: [s.mul(dy[0], weight[0]), s.mul(dy[1], weight[1])],
            xhat: [s.mul(x[0], rstd), s.mul(x[1], rstd)],
        }
    }

    /// Adds `dy xhat` to `sums`.
    #[inline(always)]
    fn add(&self, column: usize, chunk: &Chunk<S::Vector>, sums: &mut [f32]) {
        let s = self.simd;
        let sums = &mut sums[column..column + S::CHUNK];
        // SAFETY: the slice is a chunk long.
        unsafe {
            let [a, b] = s.load(sums.as_ptr());
            let a = s.mul_add(chunk.dy[0], chunk.xhat[0], a);
            let b = s.mul_add(chunk.dy[1], chunk.xhat[1], b);
            s.store([a, b], sums.as_mut_ptr());
        }
    }

    /// dx of a chunk, from `column`.
    ///
    /// # Safety
    /// The columns lie in the row.
    #[inline(always)]
    unsafe fn gradient<const WHOLE: bool>(
        &self,
        column: usize,
        count: usize,
        minus_mean: S::Vector,
    ) -> [S::Vector; 2] {
        let (s, rstd) = (self.simd, self.simd.splat(self.rstd));
        // SAFETY: passed on from this function's contract.
        let Chunk { g, xhat, .. } = unsafe { self.chunk::<WHOLE>(column, count) };
        let across = [s.mul_add(xhat[0], minus_mean, g[0]), s.mul_add(xhat[1], minus_mean, g[1])];
        if !ADD {
            return [s.mul(across[0], rstd), s.mul(across[1], rstd)];
        }
        // SAFETY: as above.
        let dsum = unsafe { ragged::load::<S, E, WHOLE>(s, self.dsum.add(column), count) };
        [s.mul_add(across[0], rstd, dsum[0]), s.mul_add(across[1], rstd, dsum[1])]
    }

    /// The sum of `g xhat`. Adds `dy xhat` to `sums`, in the order of chunks.
    ///
    /// # Safety
    /// The row may be read.
    #[inline(always)]
    unsafe fn sum(&self, sums: &mut [f32]) -> f64 {
        let s = self.simd;
        let mut sum = 0.0;
        let mut column = 0;
        while column < self.columns {
            let end = self.columns.min(column + LANE_TERMS * 2 * S::CHUNK);
            let mut lanes = [s.splat(0.0); 4];
            while column + 2 * S::CHUNK <= end {
                // SAFETY: both chunks end within the row.
                let (first, second) = unsafe {
                    (
                        self.chunk::<true>(column, S::CHUNK),
                        self.chunk::<true>(column + S::CHUNK, S::CHUNK),
                    )
                };
                for i in 0..2 {
                    lanes[i] = s.mul_add(first.g[i], first.xhat[i], lanes[i]);
                    lanes[i + 2] = s.mul_add(second.g[i], second.xhat[i], lanes[i + 2]);
                }
                self.add(column, &first, sums);
                self.add(column + S::CHUNK, &second, sums);
                column += 2 * S::CHUNK;
            }
            while column < end {
                let count = S::CHUNK.min(end - column);
                // SAFETY: the chunk ends within the row.
                let chunk = unsafe { self.chunk::<false>(column, count) };
                lanes[0] = s.mul_add(chunk.g[0], chunk.xhat[0], lanes[0]);
                lanes[1] = s.mul_add(chunk.g[1], chunk.xhat[1], lanes[1]);
                self.add(column, &chunk, sums);
                column += count;
            }
            let pairs = [s.add(lanes[0], lanes[1]), s.add(lanes[2], lanes[3])];
            sum += s.sum(s.add(pairs[0], pairs[1]));
        }
        sum
    }

    /// Writes dx. Asks for what lies `later` elements after.
    ///
    /// # Safety
    /// The row may be read and written, and with `STREAM` dx lies on a line.
    #[inline(always)]
    unsafe fn write<const STREAM: bool>(&self, mean: f32, later: usize) {
        let s = self.simd;
        let minus_mean = s.splat(-mean);
        let whole = self.columns - self.columns % S::CHUNK;
        for column in (0..whole).step_by(S::CHUNK) {
            if later > 0 {
                ahead(s, self.x.wrapping_add(column + later));
                ahead(s, self.dy.wrapping_add(column + later));
            }
            // SAFETY: the chunk ends within the row.
            unsafe {
                let dx = self.gradient::<true>(column, S::CHUNK, minus_mean);
                s.put::<E, STREAM>(dx, self.dx.add(column));
            }
        }
        if whole < self.columns {
            let count = self.columns - whole;
            // SAFETY: the columns lie in the row.
            unsafe {
                let dx = self.gradient::<false>(whole, count, minus_mean);
                ragged::store(s, dx, self.dx.add(whole), count);
            }
        }
    }
}

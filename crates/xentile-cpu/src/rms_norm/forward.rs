//! The forward pass: a row's squares, then its norm.

use xentile::rms_norm::{NormShape, RmsNorm};
use xentile::{DType, Element};

use super::weight::Arranged;
use super::{LANE_TERMS, ahead, ragged, streams};
use crate::Job;
use crate::simd::{MAX_CHUNK, Simd};

/// What all tasks share.
pub(crate) struct Rows<'a, E> {
    pub(super) options: RmsNorm,
    pub(super) shape: NormShape,
    pub(super) x: *const E,
    pub(super) y: *mut E,
    /// The residual, and where its sum with x goes.
    pub(super) add: Option<(*const E, *mut E)>,
    pub(super) rstd: *mut f32,
    pub(super) weight: &'a Arranged,
    /// Whether some output lies in the place of an input.
    pub(super) in_place: bool,
}

// SAFETY: tasks read and write disjoint ranges of rows.
unsafe impl<E: Element> Sync for Rows<'_, E> {}

/// The rows of one task, `first` to `end`. Whoever makes one vouches that they are the task's alone,
/// and that all pointers lead to as much as the shape says.
pub(crate) struct Forward<'a, E> {
    pub(super) rows: &'a Rows<'a, E>,
    pub(super) first: usize,
    pub(super) end: usize,
}

impl<E: Element> Job for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rows { shape, y, in_place, add, .. } = *self.rows;
        let stream = !in_place && streams::<S, E>(shape, y);
        match add {
            None if stream => self.rows::<S, false, true>(s),
            None => self.rows::<S, false, false>(s),
            Some((_, sum)) if stream && streams::<S, E>(shape, sum) => {
                self.rows::<S, true, true>(s);
            }
            Some(_) => self.rows::<S, true, false>(s),
        }
    }
}

impl<E: Element> Forward<'_, E> {
    #[inline(always)]
    fn rows<S: Simd, const ADD: bool, const STREAM: bool>(&self, s: S) {
        let shape = self.rows.shape;
        for index in self.first..self.end {
            let row = Row::<S, E, ADD>::new(s, self.rows, index);
            // SAFETY: the row is this task's.
            unsafe {
                let mean = row.sum_of_squares(self.rows.options.eps) / shape.columns() as f64;
                let rstd = self.rows.options.rstd(mean) as f32;
                self.rows.rstd.add(index).write(rstd);
                let ahead = if index + 1 < shape.rows() { shape.columns() } else { 0 };
                row.write::<STREAM>(rstd, ahead);
            }
        }
        if STREAM {
            s.fence();
        }
    }
}

/// One row: D elements from each pointer. Without `ADD` residual and sum are null.
struct Row<'a, S, E, const ADD: bool> {
    simd: S,
    columns: usize,
    x: *const E,
    residual: *const E,
    y: *mut E,
    sum: *mut E,
    weight: &'a [f32],
}

impl<'a, S: Simd, E: Element, const ADD: bool> Row<'a, S, E, ADD> {
    #[inline(always)]
    fn new(simd: S, rows: &'a Rows<'_, E>, index: usize) -> Self {
        let columns = rows.shape.columns();
        assert!(index < rows.shape.rows());
        let start = index * columns;
        let (residual, sum) = match rows.add {
            Some((residual, sum)) if ADD => (residual.wrapping_add(start), sum.wrapping_add(start)),
            _ => (std::ptr::null(), std::ptr::null_mut()),
        };
        Self {
            simd,
            columns,
            x: rows.x.wrapping_add(start),
            residual,
            y: rows.y.wrapping_add(start),
            sum,
            weight: rows.weight.of(index),
        }
    }

    /// What is normalised, from `column`: `count` elements, zeros after them.
    ///
    /// # Safety
    /// The columns lie in the row.
    #[inline(always)]
    unsafe fn load<const WHOLE: bool>(&self, column: usize, count: usize) -> [S::Vector; 2] {
        let s = self.simd;
        // SAFETY: passed on from this function's contract.
        let x = unsafe { ragged::load::<S, E, WHOLE>(s, self.x.add(column), count) };
        if !ADD {
            return x;
        }
        // SAFETY: as above.
        let residual = unsafe { ragged::load::<S, E, WHOLE>(s, self.residual.add(column), count) };
        rounded::<S, E>(s, [s.add(x[0], residual[0]), s.add(x[1], residual[1])])
    }

    /// The norm of `h`, from `column`.
    #[inline(always)]
    fn norm(&self, column: usize, h: [S::Vector; 2], rstd: S::Vector) -> [S::Vector; 2] {
        let s = self.simd;
        let weight = &self.weight[column..column + S::CHUNK];
        // SAFETY: the slice is a chunk long.
        let weight = unsafe { s.load(weight.as_ptr()) };
        [s.mul(s.mul(h[0], rstd), weight[0]), s.mul(s.mul(h[1], rstd), weight[1])]
    }

    /// # Safety
    /// The row may be read.
    #[inline(always)]
    unsafe fn sum_of_squares(&self, eps: f64) -> f64 {
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
                        self.load::<true>(column, S::CHUNK),
                        self.load::<true>(column + S::CHUNK, S::CHUNK),
                    )
                };
                for i in 0..2 {
                    lanes[i] = s.mul_add(first[i], first[i], lanes[i]);
                    lanes[i + 2] = s.mul_add(second[i], second[i], lanes[i + 2]);
                }
                column += 2 * S::CHUNK;
            }
            while column < end {
                let count = S::CHUNK.min(end - column);
                // SAFETY: the chunk ends within the row.
                let x = unsafe { self.load::<false>(column, count) };
                lanes[0] = s.mul_add(x[0], x[0], lanes[0]);
                lanes[1] = s.mul_add(x[1], x[1], lanes[1]);
                column += count;
            }
            let pairs = [s.add(lanes[0], lanes[1]), s.add(lanes[2], lanes[3])];
            sum += s.sum(s.add(pairs[0], pairs[1]));
        }
        // What squares lose below f32's range is at most 2^-126 each, which is nothing beside a mean or
        // an eps of 2^-100.
        let least = 2f64.powi(-100);
        if sum.is_finite() && (sum >= least * self.columns as f64 || eps >= least) {
            return sum;
        }
        // SAFETY: passed on from this function's contract.
        unsafe { self.exact_sum_of_squares() }
    }

    /// The same where squares leave the range of f32: in f64, whose range holds them.
    ///
    /// # Safety
    /// The row may be read.
    #[inline(never)]
    unsafe fn exact_sum_of_squares(&self) -> f64 {
        let element = |column: usize| {
            // SAFETY: the column lies in the row.
            let x = unsafe { *self.x.add(column) };
            if !ADD {
                return x.to_f64();
            }
            // SAFETY: as above.
            let residual = unsafe { *self.residual.add(column) };
            E::from_f32(x.to_f32() + residual.to_f32()).to_f64()
        };
        (0..self.columns).map(element).map(|x| x * x).sum()
    }

    /// Writes the norm, and the sum where there is one. Asks for what lies `ahead` elements after.
    ///
    /// # Safety
    /// The row may be read and written, and with `STREAM` outputs lie on lines.
    #[inline(always)]
    unsafe fn write<const STREAM: bool>(&self, rstd: f32, later: usize) {
        let s = self.simd;
        let rstd = s.splat(rstd);
        let whole = self.columns - self.columns % S::CHUNK;
        for column in (0..whole).step_by(S::CHUNK) {
            if later > 0 {
                ahead(s, self.x.wrapping_add(column + later));
                if ADD {
                    ahead(s, self.residual.wrapping_add(column + later));
                }
            }
            // SAFETY: the chunk ends within the row.
            unsafe {
                let h = self.load::<true>(column, S::CHUNK);
                if ADD {
                    s.put::<E, STREAM>(h, self.sum.add(column));
                }
                s.put::<E, STREAM>(self.norm(column, h, rstd), self.y.add(column));
            }
        }
        if whole < self.columns {
            let count = self.columns - whole;
            // SAFETY: the columns lie in the row.
            unsafe {
                let h = self.load::<false>(whole, count);
                if ADD {
                    ragged::store(s, h, self.sum.add(whole), count);
                }
                ragged::store(s, self.norm(whole, h, rstd), self.y.add(whole), count);
            }
        }
    }
}

/// The nearest numbers of `E`, a tie going to even.
#[inline(always)]
fn rounded<S: Simd, E: Element>(s: S, chunk: [S::Vector; 2]) -> [S::Vector; 2] {
    match E::DTYPE {
        DType::F32 => chunk,
        DType::Bf16 => [s.to_bf16(chunk[0]), s.to_bf16(chunk[1])],
        DType::F16 => {
            let mut buffer = [E::from_f32(0.0); MAX_CHUNK];
            // SAFETY: the buffer holds the largest chunk there is.
            unsafe {
                s.store(chunk, buffer.as_mut_ptr());
                s.load(buffer.as_ptr())
            }
        }
    }
}

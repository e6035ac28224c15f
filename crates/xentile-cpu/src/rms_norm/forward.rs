//! The forward pass: a row's squares, then its norm.

use xentile::rms_norm::{NormShape, RmsNorm};
use xentile::{DType, Element};

use super::weight::Arranged;
use super::{LANE_TERMS, TOGETHER, elements_ahead, fetch, ragged, streams, together};
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
        let mut index = self.first;
        while index < self.end {
            let end = self.end.min(self.rows.weight.end(index));
            while together::<S>() > 1 && index + TOGETHER <= end {
                // SAFETY: the rows are this task's.
                unsafe { Group::<S, E, ADD, TOGETHER>::new(s, self.rows, index).run::<STREAM>() };
                index += TOGETHER;
            }
            while index < end {
                // SAFETY: as above.
                unsafe { Group::<S, E, ADD, 1>::new(s, self.rows, index).run::<STREAM>() };
                index += 1;
            }
        }
        if STREAM {
            s.fence();
        }
    }
}

/// `R` rows from `first`, which have one weight.
struct Group<'a, S, E, const ADD: bool, const R: usize> {
    simd: S,
    rows: &'a Rows<'a, E>,
    columns: usize,
    first: usize,
    weight: &'a [f32],
    /// Where what is read later lies, counted from what is read now; 0 for none.
    ahead: usize,
}

impl<'a, S: Simd, E: Element, const ADD: bool, const R: usize> Group<'a, S, E, ADD, R> {
    #[inline(always)]
    fn new(simd: S, rows: &'a Rows<'_, E>, first: usize) -> Self {
        let (columns, weight) = (rows.shape.columns(), rows.weight.of(first));
        let ahead = elements_ahead::<E>(R, columns);
        let last = (first + R - 1) * columns;
        let ahead = if last + ahead < rows.shape.elements() { ahead } else { 0 };
        Self { simd, rows, columns, first, weight, ahead }
    }

    /// Where `column` of row `row` of the group lies.
    #[inline(always)]
    fn at(&self, row: usize, column: usize) -> usize {
        (self.first + row) * self.columns + column
    }

    /// What is normalised, from `column`: `count` elements, zeros after them.
    ///
    /// # Safety
    /// The columns lie in the row.
    #[inline(always)]
    unsafe fn load<const WHOLE: bool>(
        &self,
        row: usize,
        column: usize,
        count: usize,
    ) -> [S::Vector; 2] {
        let (s, at) = (self.simd, self.at(row, column));
        // SAFETY: passed on from this function's contract.
        let x = unsafe { ragged::load::<S, E, WHOLE>(s, self.rows.x.add(at), count) };
        match self.rows.add {
            Some((residual, _)) if ADD => {
                // SAFETY: as above.
                let [a, b] = unsafe { ragged::load::<S, E, WHOLE>(s, residual.add(at), count) };
                rounded::<S, E>(s, [s.add(x[0], a), s.add(x[1], b)])
            }
            _ => x,
        }
    }

    /// Asks for what is read later in the place of this chunk.
    #[inline(always)]
    fn fetch(&self, row: usize, column: usize) {
        let at = self.at(row, column) + self.ahead;
        if self.ahead > 0 {
            fetch(self.simd, self.rows.x.wrapping_add(at));
            if let Some((residual, _)) = self.rows.add
                && ADD
            {
                fetch(self.simd, residual.wrapping_add(at));
            }
        }
    }

    /// # Safety
    /// The rows are the task's alone, and with `STREAM` outputs lie on lines.
    #[inline(always)]
    unsafe fn run<const STREAM: bool>(&self) {
        let options = &self.rows.options;
        let mut rstd = [0.0; R];
        for (row, rstd) in rstd.iter_mut().enumerate() {
            // SAFETY: passed on from this function's contract.
            unsafe {
                let mean = self.sum_of_squares(row) / self.columns as f64;
                *rstd = options.rstd(mean) as f32;
                self.rows.rstd.add(self.first + row).write(*rstd);
            }
        }
        // SAFETY: passed on from this function's contract.
        unsafe { self.write::<STREAM>(rstd) };
    }

    /// # Safety
    /// The row may be read.
    #[inline(always)]
    unsafe fn sum_of_squares(&self, row: usize) -> f64 {
        let s = self.simd;
        let mut sum = 0.0;
        let mut column = 0;
        while column < self.columns {
            let end = self.columns.min(column + LANE_TERMS * 2 * S::CHUNK);
            let mut lanes = [s.splat(0.0); 4];
            while column + 2 * S::CHUNK <= end {
                // The other half of what is read later is asked for as this row is written.
                self.fetch(row, column);
                // SAFETY: both chunks end within the row.
                let (first, second) = unsafe {
                    (
                        self.load::<true>(row, column, S::CHUNK),
                        self.load::<true>(row, column + S::CHUNK, S::CHUNK),
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
                let x = unsafe { self.load::<false>(row, column, count) };
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
        if sum.is_finite() && (sum >= least * self.columns as f64 || self.rows.options.eps >= least)
        {
            return sum;
        }
        // SAFETY: passed on from this function's contract.
        unsafe { self.exact_sum_of_squares(row) }
    }

    /// The same where squares leave the range of f32: in f64, whose range holds them.
    ///
    /// # Safety
    /// The row may be read.
    #[inline(never)]
    unsafe fn exact_sum_of_squares(&self, row: usize) -> f64 {
        let mut sum = 0.0;
        for at in self.at(row, 0)..self.at(row, self.columns) {
            // SAFETY: passed on from this function's contract.
            let mut h = unsafe { *self.rows.x.add(at) };
            if let Some((residual, _)) = self.rows.add
                && ADD
            {
                // SAFETY: as above.
                h = E::from_f32(h.to_f32() + unsafe { *residual.add(at) }.to_f32());
            }
            sum += h.to_f64() * h.to_f64();
        }
        sum
    }

    /// Writes norms, and sums where there are any.
    ///
    /// # Safety
    /// As for [`Self::run`].
    #[inline(always)]
    unsafe fn write<const STREAM: bool>(&self, rstd: [f32; R]) {
        let s = self.simd;
        let mut factors = [s.splat(0.0); R];
        for row in 0..R {
            factors[row] = s.splat(rstd[row]);
        }
        let whole = self.columns - self.columns % S::CHUNK;
        for column in (0..whole).step_by(S::CHUNK) {
            let later = column / S::CHUNK % 2 == 1;
            let weight = self.weight(column);
            for row in 0..R {
                if later {
                    self.fetch(row, column);
                }
                let at = self.at(row, column);
                // SAFETY: the chunk ends within the row.
                unsafe {
                    let h = self.load::<true>(row, column, S::CHUNK);
                    if let Some((_, sum)) = self.rows.add
                        && ADD
                    {
                        s.put::<E, STREAM>(h, sum.add(at));
                    }
                    let y = norm(s, h, factors[row], weight);
                    s.put::<E, STREAM>(y, self.rows.y.add(at));
                }
            }
        }
        if whole < self.columns {
            let (count, weight) = (self.columns - whole, self.weight(whole));
            for row in 0..R {
                let at = self.at(row, whole);
                // SAFETY: the columns lie in the row.
                unsafe {
                    let h = self.load::<false>(row, whole, count);
                    if let Some((_, sum)) = self.rows.add
                        && ADD
                    {
                        ragged::store(s, h, sum.add(at), count);
                    }
                    let y = norm(s, h, factors[row], weight);
                    ragged::store(s, y, self.rows.y.add(at), count);
                }
            }
        }
    }

    /// The factors of a chunk.
    #[inline(always)]
    fn weight(&self, column: usize) -> [S::Vector; 2] {
        let weight = &self.weight[column..column + S::CHUNK];
        // SAFETY: the slice is a chunk long.
        unsafe { self.simd.load(weight.as_ptr()) }
    }
}

/// The norm of a chunk.
#[inline(always)]
fn norm<S: Simd>(
    s: S,
    h: [S::Vector; 2],
    rstd: S::Vector,
    weight: [S::Vector; 2],
) -> [S::Vector; 2] {
    [s.mul(s.mul(h[0], rstd), weight[0]), s.mul(s.mul(h[1], rstd), weight[1])]
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

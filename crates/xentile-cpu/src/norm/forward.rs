//! The forward pass: a row's mean where it is centred, its squares, then its norm.

use xentile::norm::{Norm, NormShape};
use xentile::{DType, Element};

use super::weight::Arranged;
use super::{LANE_TERMS, TOGETHER, elements_ahead, fetch, ragged, streams, together};
use crate::Job;
use crate::simd::{MAX_CHUNK, Simd};

/// What all tasks share.
pub(crate) struct Rows<'a, E> {
    pub(super) norm: Norm,
    pub(super) shape: NormShape,
    pub(super) x: *const E,
    pub(super) y: *mut E,
    /// The residual, and where its sum with x goes.
    pub(super) add: Option<(*const E, *mut E)>,
    pub(super) rstd: *mut f32,
    pub(super) weight: &'a Arranged,
    /// The bias, and where means go, of rows that are centred.
    pub(super) centring: Option<(&'a Arranged, *mut f32)>,
    /// Whether some output lies in the place of an input.
    pub(super) in_place: bool,
}

// SAFETY: tasks read and write disjoint ranges of rows.
unsafe impl<E: Element> Sync for Rows<'_, E> {}

/// The rows of one task, `first` to `end`. Whoever makes one vouches that they are the task's alone,
/// and that all pointers lead to as much as the shape says.
pub(crate) struct Forward<'a, E, const CENTRED: bool> {
    pub(super) rows: &'a Rows<'a, E>,
    pub(super) first: usize,
    pub(super) end: usize,
}

impl<E: Element, const CENTRED: bool> Job for Forward<'_, E, CENTRED> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rows { shape, y, in_place, add, .. } = *self.rows;
        let stream = !in_place && streams::<S, E>(shape, y);
        match add {
            None if stream => self.rows::<S, false, true>(s),
            None => self.rows::<S, false, false>(s),
            Some(_) if CENTRED => unreachable!("no pass adds and centres"),
            Some((_, sum)) if stream && streams::<S, E>(shape, sum) => {
                self.rows::<S, true, true>(s);
            }
            Some(_) => self.rows::<S, true, false>(s),
        }
    }
}

impl<E: Element, const CENTRED: bool> Forward<'_, E, CENTRED> {
    #[inline(always)]
    fn rows<S: Simd, const ADD: bool, const STREAM: bool>(&self, s: S) {
        let mut index = self.first;
        while index < self.end {
            let mut end = self.end.min(self.rows.weight.end(index));
            if let Some((bias, _)) = self.rows.centring
                && CENTRED
            {
                end = end.min(bias.end(index));
            }
            while together::<S>() > 1 && index + TOGETHER <= end {
                // SAFETY: the rows are this task's.
                unsafe {
                    let group = Group::<S, E, CENTRED, ADD, TOGETHER>::new(s, self.rows, index);
                    group.run::<STREAM>();
                }
                index += TOGETHER;
            }
            while index < end {
                // SAFETY: as above.
                unsafe {
                    Group::<S, E, CENTRED, ADD, 1>::new(s, self.rows, index).run::<STREAM>();
                }
                index += 1;
            }
        }
        if STREAM {
            s.fence();
        }
    }
}

/// `R` rows from `first`, which have one weight and one bias.
struct Group<'a, S, E, const CENTRED: bool, const ADD: bool, const R: usize> {
    simd: S,
    rows: &'a Rows<'a, E>,
    columns: usize,
    first: usize,
    weight: &'a [f32],
    /// Empty where rows are not centred.
    bias: &'a [f32],
    /// The distance, in elements, from an element to one that it prefetches; 0 for none.
    ahead: usize,
}

impl<'a, S: Simd, E: Element, const CENTRED: bool, const ADD: bool, const R: usize>
    Group<'a, S, E, CENTRED, ADD, R>
{
    #[inline(always)]
    fn new(simd: S, rows: &'a Rows<'_, E>, first: usize) -> Self {
        let (columns, weight) = (rows.shape.columns(), rows.weight.of(first));
        let ahead = elements_ahead::<E>(R, columns);
        let last = (first + R - 1) * columns;
        let ahead = if last + ahead < rows.shape.elements() { ahead } else { 0 };
        let bias = match rows.centring {
            Some((bias, _)) if CENTRED => bias.of(first),
            _ => &[],
        };
        Self { simd, rows, columns, first, weight, bias, ahead }
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
        let mut factors = [Factors { mean: 0.0, rstd: 0.0 }; R];
        for (row, factors) in factors.iter_mut().enumerate() {
            // SAFETY: passed on from this function's contract.
            unsafe {
                let mean_of_squares = match self.rows.centring {
                    Some((_, means)) if CENTRED => {
                        let [mean, variance] = self.moments(row);
                        factors.mean = mean as f32;
                        means.add(self.first + row).write(factors.mean);
                        variance
                    }
                    _ => self.sum_of_squares(row) / self.columns as f64,
                };
                factors.rstd = self.rows.norm.rstd(mean_of_squares) as f32;
                self.rows.rstd.add(self.first + row).write(factors.rstd);
            }
        }
        // SAFETY: passed on from this function's contract.
        unsafe { self.write::<STREAM>(factors) };
    }

    /// The mean of a row and its variance, in two walks: the first finds what to take off, about the mean,
    /// and the second, of what is left, how far that is from it too.
    ///
    /// # Safety
    /// The row may be read.
    #[inline(always)]
    unsafe fn moments(&self, row: usize) -> [f64; 2] {
        let count = self.columns as f64;
        // SAFETY: passed on from this function's contract.
        let about = unsafe { self.sums::<false>(row, 0.0) }[0] / count;
        let about = about as f32;
        // SAFETY: as above.
        let [sum, squares] = unsafe { self.sums::<true>(row, about) };
        let off = sum / count;
        let variance = (squares / count - off * off).max(0.0);
        // Where the first sum was off by more than rows deviate, which takes a mean of a million
        // deviations, little is left of the difference; of a row of one number, noise.
        let is_apart = off * off <= 16.0 * (variance + self.rows.norm.eps);
        if is_apart && self.is_within_f32(squares) {
            return [f64::from(about) + off, variance];
        }
        // SAFETY: as above.
        unsafe { self.exact_moments(row) }
    }

    /// The sum of what is left of a row with `about` taken off, and with `SQUARES` that of its squares.
    ///
    /// # Safety
    /// The row may be read.
    #[inline(always)]
    unsafe fn sums<const SQUARES: bool>(&self, row: usize, about: f32) -> [f64; 2] {
        let (s, off) = (self.simd, self.simd.splat(about));
        let mut sums = [0.0; 2];
        let whole = self.columns - self.columns % S::CHUNK;
        let mut column = 0;
        while column < whole {
            let end = whole.min(column + LANE_TERMS * S::CHUNK);
            let mut lanes = [[s.splat(0.0); 2]; 2];
            while column < end {
                if !SQUARES && column / S::CHUNK % 2 == 0 {
                    // The other half of what is read later is asked for as this row is written.
                    self.fetch(row, column);
                }
                // SAFETY: the chunk ends within the row.
                let x = unsafe { self.load::<true>(row, column, S::CHUNK) };
                for i in 0..2 {
                    let left = if SQUARES { s.sub(x[i], off) } else { x[i] };
                    lanes[0][i] = s.add(left, lanes[0][i]);
                    if SQUARES {
                        lanes[1][i] = s.mul_add(left, left, lanes[1][i]);
                    }
                }
                column += S::CHUNK;
            }
            for (sum, lanes) in sums.iter_mut().zip(lanes) {
                *sum += s.sum(s.add(lanes[0], lanes[1]));
            }
        }
        // A shorter chunk would have zeros that nothing is to be taken off of.
        for column in whole..self.columns {
            // SAFETY: the column lies in the row.
            let left =
                f64::from(unsafe { *self.rows.x.add(self.at(row, column)) }.to_f32() - about);
            sums[0] += left;
            sums[1] += left * left;
        }
        sums
    }

    /// The same as [`moments`](Self::moments) where sums or squares leave the range of f32, or its digits: in
    /// f64, which holds them.
    ///
    /// # Safety
    /// The row may be read.
    #[inline(never)]
    unsafe fn exact_moments(&self, row: usize) -> [f64; 2] {
        let count = self.columns as f64;
        let each = |of: &dyn Fn(f64) -> f64| {
            let range = self.at(row, 0)..self.at(row, self.columns);
            // SAFETY: passed on from this function's contract.
            range.map(|at| of(unsafe { *self.rows.x.add(at) }.to_f64())).sum::<f64>() / count
        };
        let mean = each(&|x| x);
        [mean, each(&|x| (x - mean) * (x - mean))]
    }

    /// Whether a sum of squares in f32 is finite, and has not lost more than the contract grants: what
    /// squares lose below f32's range is at most 2^-126 each, which is nothing beside a mean or an eps of
    /// 2^-100.
    #[inline(always)]
    fn is_within_f32(&self, squares: f64) -> bool {
        let least = 2f64.powi(-100);
        squares.is_finite()
            && (squares >= least * self.columns as f64 || self.rows.norm.eps >= least)
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
        if self.is_within_f32(sum) {
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
    unsafe fn write<const STREAM: bool>(&self, factors: [Factors<f32>; R]) {
        let s = self.simd;
        let mut lanes = [Factors { mean: s.splat(0.0), rstd: s.splat(0.0) }; R];
        for (lane, Factors { mean, rstd }) in lanes.iter_mut().zip(factors) {
            *lane = Factors { mean: s.splat(mean), rstd: s.splat(rstd) };
        }
        let whole = self.columns - self.columns % S::CHUNK;
        for column in (0..whole).step_by(S::CHUNK) {
            let later = column / S::CHUNK % 2 == 1;
            let (weight, bias) = (self.weight(column), self.bias(column));
            for (row, &factors) in lanes.iter().enumerate() {
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
                    let y = norm::<S, CENTRED>(s, h, factors, weight, bias);
                    s.put::<E, STREAM>(y, self.rows.y.add(at));
                }
            }
        }
        if whole < self.columns {
            let (weight, bias) = (self.weight(whole), self.bias(whole));
            let count = self.columns - whole;
            for (row, &factors) in lanes.iter().enumerate() {
                let at = self.at(row, whole);
                // SAFETY: the columns lie in the row.
                unsafe {
                    let h = self.load::<false>(row, whole, count);
                    if let Some((_, sum)) = self.rows.add
                        && ADD
                    {
                        ragged::store(s, h, sum.add(at), count);
                    }
                    let y = norm::<S, CENTRED>(s, h, factors, weight, bias);
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

    /// The bias of a chunk; zeros where rows are not centred.
    #[inline(always)]
    fn bias(&self, column: usize) -> [S::Vector; 2] {
        if !CENTRED {
            return [self.simd.splat(0.0); 2];
        }
        let bias = &self.bias[column..column + S::CHUNK];
        // SAFETY: the slice is a chunk long.
        unsafe { self.simd.load(bias.as_ptr()) }
    }
}

/// What a row is normalised by; the mean is 0 where it is not centred.
#[derive(Clone, Copy)]
struct Factors<T> {
    mean: T,
    rstd: T,
}

/// The norm of a chunk.
#[inline(always)]
fn norm<S: Simd, const CENTRED: bool>(
    s: S,
    h: [S::Vector; 2],
    Factors { mean, rstd }: Factors<S::Vector>,
    weight: [S::Vector; 2],
    bias: [S::Vector; 2],
) -> [S::Vector; 2] {
    if !CENTRED {
        return [s.mul(s.mul(h[0], rstd), weight[0]), s.mul(s.mul(h[1], rstd), weight[1])];
    }
    let xhat = [s.mul(s.sub(h[0], mean), rstd), s.mul(s.sub(h[1], mean), rstd)];
    [s.mul_add(xhat[0], weight[0], bias[0]), s.mul_add(xhat[1], weight[1], bias[1])]
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

//! The backward pass: of a row the mean of `g xhat`, and of `g` where rows are centred, and its part of
//! dweight and dbias, then dx.

use xentile::Element;
use xentile::norm::NormShape;

use super::weight::{Arranged, in_columns};
use super::{LANE_TERMS, TOGETHER, elements_ahead, fetch, ragged, streams, together};
use crate::Job;
use crate::simd::{MAX_CHUNK, Simd};

/// What all tasks share.
pub(crate) struct Rows<'a, E> {
    pub(super) shape: NormShape,
    pub(super) x: *const E,
    pub(super) dy: *const E,
    pub(super) dsum: Option<*const E>,
    pub(super) dx: *mut E,
    /// Of rows that are centred.
    pub(super) mean: Option<&'a [f32]>,
    pub(super) rstd: &'a [f32],
    pub(super) weight: &'a Arranged,
    /// Whether dx lies in the place of x or of dy.
    pub(super) in_place: bool,
}

// SAFETY: tasks read and write disjoint ranges of rows.
unsafe impl<E: Element> Sync for Rows<'_, E> {}

/// A block of rows, `first` to `end`, with its sums `[D]` of dweight and, for centred rows, of dbias. Its
/// maker vouches that no other task has the rows, and that all pointers are valid for the shape.
pub(crate) struct Backward<'a, E, const CENTRED: bool> {
    pub(super) rows: &'a Rows<'a, E>,
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) sums: &'a mut [f32],
    pub(super) dbias: &'a mut [f32],
}

impl<E: Element, const CENTRED: bool> Job for Backward<'_, E, CENTRED> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rows { shape, dx, in_place, dsum, .. } = *self.rows;
        match (dsum.is_some(), !in_place && streams::<S, E>(shape, dx)) {
            (false, false) => self.rows::<S, false, false>(s),
            (false, true) => self.rows::<S, false, true>(s),
            (true, _) if CENTRED => unreachable!("no pass adds and centres"),
            (true, false) => self.rows::<S, true, false>(s),
            (true, true) => self.rows::<S, true, true>(s),
        }
    }
}

impl<E: Element, const CENTRED: bool> Backward<'_, E, CENTRED> {
    #[inline(always)]
    fn rows<S: Simd, const ADD: bool, const STREAM: bool>(self, s: S) {
        let padded = self.rows.shape.columns().next_multiple_of(MAX_CHUNK);
        let mut sums = Sums {
            dweight: vec![0.0; padded],
            dbias: if CENTRED { vec![0.0; padded] } else { Vec::new() },
        };
        let mut index = self.first;
        while index < self.end {
            let end = self.end.min(self.rows.weight.end(index));
            while together::<S>() > 1 && index + TOGETHER <= end {
                let group = Group::<S, E, CENTRED, ADD, TOGETHER>::new(s, self.rows, index);
                // SAFETY: the rows are this task's.
                unsafe { group.run::<STREAM>(&mut sums) };
                index += TOGETHER;
            }
            while index < end {
                let group = Group::<S, E, CENTRED, ADD, 1>::new(s, self.rows, index);
                // SAFETY: as above.
                unsafe { group.run::<STREAM>(&mut sums) };
                index += 1;
            }
        }
        if STREAM {
            s.fence();
        }
        in_columns::<S, E>(s, &sums.dweight, self.sums);
        if CENTRED {
            in_columns::<S, E>(s, &sums.dbias, self.dbias);
        }
    }
}

/// What rows of a block add up to, in the order of chunks.
struct Sums {
    dweight: Vec<f32>,
    /// Empty where rows are not centred.
    dbias: Vec<f32>,
}

/// `R` rows from `first`, which have one weight.
struct Group<'a, S: Simd, E, const CENTRED: bool, const ADD: bool, const R: usize> {
    simd: S,
    rows: &'a Rows<'a, E>,
    columns: usize,
    first: usize,
    weight: &'a [f32],
    mean: [S::Vector; R],
    rstd: [S::Vector; R],
    /// The distance, in elements, from an element to one that it prefetches; 0 for none.
    ahead: usize,
}

/// The sums of `g xhat` over a row, and of `g` where it is centred.
#[derive(Clone, Copy)]
struct Totals {
    along: f64,
    g: f64,
}

/// The same in lanes.
#[derive(Clone, Copy)]
struct Lanes<V> {
    along: [V; 2],
    g: [V; 2],
}

/// What is added, in every lane: the means, negative.
#[derive(Clone, Copy)]
struct MinusMeans<V> {
    along: V,
    g: V,
}

/// A chunk of a row.
struct Chunk<V> {
    dy: [V; 2],
    g: [V; 2],
    xhat: [V; 2],
}

impl<'a, S: Simd, E: Element, const CENTRED: bool, const ADD: bool, const R: usize>
    Group<'a, S, E, CENTRED, ADD, R>
{
    #[inline(always)]
    fn new(simd: S, rows: &'a Rows<'_, E>, first: usize) -> Self {
        let (columns, weight) = (rows.shape.columns(), rows.weight.of(first));
        let [mut mean, mut rstd] = [[simd.splat(0.0); R]; 2];
        for (row, rstd) in rstd.iter_mut().enumerate() {
            *rstd = simd.splat(rows.rstd[first + row]);
        }
        if let Some(means) = rows.mean
            && CENTRED
        {
            for (row, mean) in mean.iter_mut().enumerate() {
                *mean = simd.splat(means[first + row]);
            }
        }
        let ahead = elements_ahead::<E>(R, columns);
        let last = (first + R - 1) * columns;
        let ahead = if last + ahead < rows.shape.elements() { ahead } else { 0 };
        Self { simd, rows, columns, first, weight, mean, rstd, ahead }
    }

    /// Where `column` of row `row` of the group lies.
    #[inline(always)]
    fn at(&self, row: usize, column: usize) -> usize {
        (self.first + row) * self.columns + column
    }

    /// `count` elements from `column`, zeros after them.
    ///
    /// # Safety
    /// The columns lie in the row.
    #[inline(always)]
    unsafe fn chunk<const WHOLE: bool>(
        &self,
        row: usize,
        column: usize,
        count: usize,
        weight: [S::Vector; 2],
    ) -> Chunk<S::Vector> {
        let (s, rstd, at) = (self.simd, self.rstd[row], self.at(row, column));
        // SAFETY: passed on from this function's contract.
        let (x, dy) = unsafe {
            (
                match CENTRED {
                    // What is left of a zero might not be finite.
                    true => ragged::load_repeating::<S, E, WHOLE>(s, self.rows.x.add(at), count),
                    false => ragged::load::<S, E, WHOLE>(s, self.rows.x.add(at), count),
                },
                ragged::load::<S, E, WHOLE>(s, self.rows.dy.add(at), count),
            )
        };
        let x = match CENTRED {
            true => [s.sub(x[0], self.mean[row]), s.sub(x[1], self.mean[row])],
            false => x,
        };
        Chunk {
            dy,
            g: [s.mul(dy[0], weight[0]), s.mul(dy[1], weight[1])],
            xhat: [s.mul(x[0], rstd), s.mul(x[1], rstd)],
        }
    }

    /// Writes dx of the rows, and adds their part to `sums`.
    ///
    /// # Safety
    /// The rows are the task's alone, and with `STREAM` dx lies on lines.
    #[inline(always)]
    unsafe fn run<const STREAM: bool>(&self, sums: &mut Sums) {
        // SAFETY: passed on from this function's contract.
        unsafe {
            let totals = self.sum(sums);
            self.write::<STREAM>(totals);
        }
    }

    /// The sums of `g xhat` and, where rows are centred, of `g` of each row. Adds `dy xhat` and `dy` to
    /// `sums`.
    ///
    /// # Safety
    /// The rows may be read.
    #[inline(always)]
    unsafe fn sum(&self, sums: &mut Sums) -> [Totals; R] {
        let s = self.simd;
        let mut totals = [Totals { along: 0.0, g: 0.0 }; R];
        let mut column = 0;
        while column < self.columns {
            let end = self.columns.min(column + LANE_TERMS * S::CHUNK);
            let mut lanes = [Lanes { along: [s.splat(0.0); 2], g: [s.splat(0.0); 2] }; R];
            while column + S::CHUNK <= end {
                for row in 0..R {
                    let at = self.at(row, column);
                    if self.ahead > 0 {
                        // dy is asked for as rows are written.
                        fetch(s, self.rows.x.wrapping_add(at + self.ahead));
                    }
                    if let Some(dsum) = self.rows.dsum
                        && ADD
                    {
                        fetch(s, dsum.wrapping_add(at));
                    }
                }
                // SAFETY: the chunk ends within the row.
                unsafe { self.add::<true>(column, S::CHUNK, &mut lanes, sums) };
                column += S::CHUNK;
            }
            if column < end {
                // SAFETY: the columns lie in the row.
                unsafe { self.add::<false>(column, end - column, &mut lanes, sums) };
                column = end;
            }
            for row in 0..R {
                let Lanes { along, g } = lanes[row];
                totals[row].along += s.sum(s.add(along[0], along[1]));
                if CENTRED {
                    totals[row].g += s.sum(s.add(g[0], g[1]));
                }
            }
        }
        totals
    }

    /// Adds a chunk of each row to `lanes` and to `sums`.
    ///
    /// # Safety
    /// The columns lie in the row.
    #[inline(always)]
    unsafe fn add<const WHOLE: bool>(
        &self,
        column: usize,
        count: usize,
        lanes: &mut [Lanes<S::Vector>; R],
        sums: &mut Sums,
    ) {
        let (s, weight) = (self.simd, self.weight(column));
        let dweight = &mut sums.dweight[column..column + S::CHUNK];
        // SAFETY: the slice is a chunk long.
        let [mut a, mut b] = unsafe { s.load(dweight.as_ptr()) };
        let mut dbias = [s.splat(0.0); 2];
        for (row, lanes) in lanes.iter_mut().enumerate() {
            // SAFETY: passed on from this function's contract.
            let Chunk { dy, g, xhat } = unsafe { self.chunk::<WHOLE>(row, column, count, weight) };
            lanes.along[0] = s.mul_add(g[0], xhat[0], lanes.along[0]);
            lanes.along[1] = s.mul_add(g[1], xhat[1], lanes.along[1]);
            if CENTRED {
                for i in 0..2 {
                    lanes.g[i] = s.add(g[i], lanes.g[i]);
                    dbias[i] = s.add(dy[i], dbias[i]);
                }
            }
            a = s.mul_add(dy[0], xhat[0], a);
            b = s.mul_add(dy[1], xhat[1], b);
        }
        // SAFETY: as above.
        unsafe { s.store([a, b], dweight.as_mut_ptr()) };
        if CENTRED {
            let sums = &mut sums.dbias[column..column + S::CHUNK];
            // SAFETY: the slice is a chunk long.
            unsafe {
                let [a, b] = s.load(sums.as_ptr());
                s.store([s.add(a, dbias[0]), s.add(b, dbias[1])], sums.as_mut_ptr());
            }
        }
    }

    /// Writes dx, for the sums over rows.
    ///
    /// # Safety
    /// As for [`Self::run`].
    #[inline(always)]
    unsafe fn write<const STREAM: bool>(&self, totals: [Totals; R]) {
        let s = self.simd;
        let mut minus_means = [MinusMeans { along: s.splat(0.0), g: s.splat(0.0) }; R];
        for (minus_mean, Totals { along, g }) in minus_means.iter_mut().zip(totals) {
            minus_mean.along = s.splat(-(along / self.columns as f64) as f32);
            if CENTRED {
                minus_mean.g = s.splat(-(g / self.columns as f64) as f32);
            }
        }
        let whole = self.columns - self.columns % S::CHUNK;
        for column in (0..whole).step_by(S::CHUNK) {
            let weight = self.weight(column);
            for (row, &mean) in minus_means.iter().enumerate() {
                let at = self.at(row, column);
                if self.ahead > 0 {
                    fetch(s, self.rows.dy.wrapping_add(at + self.ahead));
                }
                // SAFETY: the chunk ends within the row.
                unsafe {
                    let dx = self.gradient::<true>(row, column, S::CHUNK, weight, mean);
                    s.put::<E, STREAM>(dx, self.rows.dx.add(at));
                }
            }
        }
        if whole < self.columns {
            let (count, weight) = (self.columns - whole, self.weight(whole));
            for (row, &mean) in minus_means.iter().enumerate() {
                // SAFETY: the columns lie in the row.
                unsafe {
                    let dx = self.gradient::<false>(row, whole, count, weight, mean);
                    ragged::store(s, dx, self.rows.dx.add(self.at(row, whole)), count);
                }
            }
        }
    }

    /// dx of a chunk.
    ///
    /// # Safety
    /// The columns lie in the row.
    #[inline(always)]
    unsafe fn gradient<const WHOLE: bool>(
        &self,
        row: usize,
        column: usize,
        count: usize,
        weight: [S::Vector; 2],
        minus: MinusMeans<S::Vector>,
    ) -> [S::Vector; 2] {
        let (s, rstd) = (self.simd, self.rstd[row]);
        // SAFETY: passed on from this function's contract.
        let Chunk { g, xhat, .. } = unsafe { self.chunk::<WHOLE>(row, column, count, weight) };
        let g = if CENTRED { [s.add(g[0], minus.g), s.add(g[1], minus.g)] } else { g };
        let a = s.mul_add(xhat[0], minus.along, g[0]);
        let b = s.mul_add(xhat[1], minus.along, g[1]);
        match self.rows.dsum {
            Some(dsum) if ADD => {
                let dsum = dsum.wrapping_add(self.at(row, column));
                // SAFETY: as above.
                let dsum = unsafe { ragged::load::<S, E, WHOLE>(s, dsum, count) };
                [s.mul_add(a, rstd, dsum[0]), s.mul_add(b, rstd, dsum[1])]
            }
            _ => [s.mul(a, rstd), s.mul(b, rstd)],
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

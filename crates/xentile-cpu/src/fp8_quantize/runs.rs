//! Blocks that are parts of rows.

use xentile::Element;

use super::Arrays;
use super::entries::{amax, quantize, streams};
use crate::simd::Simd;

/// Entries of runs that are read before any of them is written, so few that they are still in the first
/// cache.
const AT_ONCE: usize = 2048;

/// The most such runs.
const MOST_AT_ONCE: usize = 32;

/// Where a run begins.
struct Place {
    row: usize,
    column: usize,
}

impl Place {
    #[inline(always)]
    fn of(run: usize, across: usize, block: usize) -> Self {
        Self { row: run / across, column: run % across * block }
    }

    /// The first entry and how many there are.
    #[inline(always)]
    fn entries(&self, columns: usize, block: usize) -> (usize, usize) {
        (self.row * columns + self.column, block.min(columns - self.column))
    }

    /// Goes to the next run.
    #[inline(always)]
    fn advance(&mut self, columns: usize, count: usize) {
        self.column += count;
        if self.column == columns {
            (self.row, self.column) = (self.row + 1, 0);
        }
    }
}

/// Runs `first` to `end` of those that rows are cut into, `across` a row. Whoever makes one vouches that
/// they are the task's alone, and that all pointers lead to as much as they must.
pub(crate) struct Runs<'a, E> {
    pub(super) arrays: &'a Arrays<E>,
    pub(super) across: usize,
    pub(super) first: usize,
    pub(super) end: usize,
    /// Whether values are written; by given scales, where there are any.
    pub(super) has_values: bool,
    /// Whether scales are written without values. Elsewhere amax is, unless scales are made for values.
    pub(super) has_scales: bool,
}

impl<E> Clone for Runs<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Runs<'_, E> {}

impl<'a, E> Runs<'a, E> {
    /// What writes amax alone, of no runs yet.
    pub(super) fn amax(arrays: &'a Arrays<E>) -> Self {
        Self { arrays, across: 0, first: 0, end: 0, has_values: false, has_scales: false }
    }
}

impl<E: Element> Runs<'_, E> {
    #[inline(always)]
    pub(super) fn each<S: Simd, const E5M2: bool>(self, s: S) {
        let arrays = self.arrays;
        let columns = arrays.shape.columns();
        let streams = self.has_values && streams::<S>(arrays.shape.elements());
        let at_once = (AT_ONCE / arrays.block[1]).clamp(1, MOST_AT_ONCE);
        let mut scales = [1.0; MOST_AT_ONCE];
        let mut begin = self.first;
        while begin < self.end {
            let end = self.end.min(begin + at_once);
            let mut place = Place::of(begin, self.across, arrays.block[1]);
            // A quotient waits for its scale: those of several runs come first.
            for run in begin..end {
                let (start, count) = place.entries(columns, arrays.block[1]);
                // SAFETY: the run lies in x, and its number in numbers; the rows of a given scale
                // include this one.
                unsafe {
                    let amax = amax(s, arrays.x.add(start), [1, 0], count);
                    let scale = &mut scales[run - begin];
                    let mut number = amax;
                    if !arrays.given.is_null() {
                        *scale = *arrays.given.add(place.row / arrays.rows_of_scale);
                    } else if self.has_values || self.has_scales {
                        *scale = arrays.options.scale(amax);
                        number = *scale;
                    }
                    *arrays.numbers.add(run) = number;
                }
                place.advance(columns, count);
            }
            if self.has_values {
                let mut place = Place::of(begin, self.across, arrays.block[1]);
                for scale in &scales[..end - begin] {
                    let (start, count) = place.entries(columns, arrays.block[1]);
                    // SAFETY: the run lies in x and in values.
                    unsafe {
                        let (x, to) = (arrays.x.add(start), arrays.values.add(start));
                        quantize::<S, E, E5M2>(s, x, count, *scale, to, streams);
                    }
                    place.advance(columns, count);
                }
            }
            begin = end;
        }
        if streams {
            s.fence();
        }
    }
}

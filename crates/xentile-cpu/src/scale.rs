//! `x * factor` with one factor for each run of elements: what is left of a fused backward pass when
//! the cotangent of the loss comes to be known.

use xentile::{Element, Error, Result};

use crate::simd::{LINE_BYTES, MAX_CHUNK, STREAM_BYTES, Simd};
use crate::{InOut, Isa, Job, Parallel};

crate::compiled::passes! {
    /// The pass over elements `E`.
    struct Passes { scale: Scale }
}

/// Bytes of a task: large enough to stream, small enough to share out.
const TASK_BYTES: usize = 1 << 18;

/// Multiplies each run of `x` `[G, N]` by its own of the `factors` `[G]`. Products are made in f32
/// and rounded to `E`, by IEEE's rules for infinities and NaN.
///
/// A factor of exactly 1 copies its run, and in place does not touch it.
///
/// # Errors
/// The input or the output is not `[G, N]`.
pub fn scale<E: Element>(
    isa: Isa,
    pool: &dyn Parallel,
    x: InOut<'_, E>,
    factors: &[f32],
) -> Result<()> {
    let (read, written) = x.lengths();
    let run = read.checked_div(factors.len()).unwrap_or(0);
    for (name, actual) in [("input", read), ("output", written)] {
        let expected = factors.len() * run;
        if actual != expected {
            return Err(Error::Length { name, actual, axes: "[G, N]", expected });
        }
    }
    let in_place = matches!(x, InOut::InPlace(_));
    if in_place && factors.iter().all(|&factor| factor == 1.0) {
        return Ok(());
    }
    let (from, to) = x.into_pointers();
    let runs = Runs { from, to, length: read, run, factors };
    let task = TASK_BYTES / size_of::<E>();
    pool.run(read.div_ceil(task), &|index| {
        let start = index * task;
        let pass = Scale { runs: &runs, start, end: read.min(start + task), in_place };
        (Passes::get().scale)(isa, pass);
    });
    Ok(())
}

/// What all tasks share.
pub(crate) struct Runs<'a, E> {
    from: *const E,
    to: *mut E,
    length: usize,
    /// N, elements of a run.
    run: usize,
    factors: &'a [f32],
}

// SAFETY: tasks read and write disjoint ranges of elements.
unsafe impl<E: Element> Sync for Runs<'_, E> {}

/// The elements of one task, `start` to `end`, which may cut runs.
pub(crate) struct Scale<'a, E> {
    runs: &'a Runs<'a, E>,
    start: usize,
    end: usize,
    in_place: bool,
}

impl<E: Element> Job for Scale<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // In place the line that is written was just read, so there is nothing to go past.
        if !self.in_place && self.runs.length * size_of::<E>() >= STREAM_BYTES {
            self.pieces::<S, true>(s);
            s.fence();
        } else {
            self.pieces::<S, false>(s);
        }
    }
}

impl<E: Element> Scale<'_, E> {
    #[inline(always)]
    fn pieces<S: Simd, const STREAM: bool>(self, s: S) {
        let Self { runs, end, in_place, .. } = self;
        let mut start = self.start;
        while start < end {
            let run = start / runs.run;
            let stop = end.min((run + 1) * runs.run);
            let factor = runs.factors[run];
            // SAFETY: start to stop lies in this task's share of both arrays.
            let piece = unsafe {
                Piece { from: runs.from.add(start), to: runs.to.add(start), length: stop - start }
            };
            // SAFETY: as above.
            unsafe {
                if factor != 1.0 {
                    // The one NaN that rounding to bf16 by an addition leaves a NaN.
                    let factor = if factor.is_nan() { f32::NAN } else { factor };
                    piece.multiply::<S, STREAM, false>(s, factor);
                } else if !in_place {
                    piece.multiply::<S, STREAM, true>(s, 1.0);
                }
            }
            start = stop;
        }
    }
}

/// Elements of one run.
struct Piece<E> {
    from: *const E,
    to: *mut E,
    length: usize,
}

impl<E: Element> Piece<E> {
    /// With `COPY` the factor, which is 1, is not used: where a thread flushes subnormals to 0, as
    /// XLA's do, a product with 1 is not a copy.
    ///
    /// # Safety
    /// `from` is valid for reads and `to` for writes of `length` elements, which no other thread
    /// uses.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const STREAM: bool, const COPY: bool>(self, s: S, factor: f32) {
        let factor = s.splat(factor);
        let head = self.to.align_offset(LINE_BYTES).min(self.length);
        let body_end = self.length - (self.length - head) % S::CHUNK;
        // SAFETY: all columns are below `length`, and the body starts on a line boundary.
        unsafe {
            self.ragged::<S, COPY>(s, factor, 0, head);
            let mut column = head;
            while column < body_end {
                let chunk = product::<S, COPY>(s, s.load(self.from.add(column)), factor);
                s.put::<E, STREAM>(chunk, self.to.add(column));
                column += S::CHUNK;
            }
            self.ragged::<S, COPY>(s, factor, body_end, self.length);
        }
    }

    /// Columns that fill no chunk, by way of a buffer of whole ones.
    ///
    /// # Safety
    /// As for [`Self::multiply`]; the range lies in the piece.
    #[inline(always)]
    unsafe fn ragged<S: Simd, const COPY: bool>(
        &self,
        s: S,
        factor: S::Vector,
        start: usize,
        end: usize,
    ) {
        let mut column = start;
        while column < end {
            let columns = S::CHUNK.min(end - column);
            let mut buffer = [E::from_f32(0.0); MAX_CHUNK];
            // SAFETY: the columns lie in the piece, and the buffer holds the largest chunk there is.
            unsafe {
                self.from.add(column).copy_to_nonoverlapping(buffer.as_mut_ptr(), columns);
                let chunk = product::<S, COPY>(s, s.load(buffer.as_ptr()), factor);
                s.store(chunk, buffer.as_mut_ptr());
                buffer.as_ptr().copy_to_nonoverlapping(self.to.add(column), columns);
            }
            column += columns;
        }
    }
}

#[inline(always)]
fn product<S: Simd, const COPY: bool>(
    s: S,
    [a, b]: [S::Vector; 2],
    factor: S::Vector,
) -> [S::Vector; 2] {
    if COPY { [a, b] } else { [s.mul(a, factor), s.mul(b, factor)] }
}

//! The passes: runs of entries of y, chunk by chunk.

use xentile::Element;
use xentile::activation::{Activation, Layout};

use super::function::{Chunk, Function, GELU_ERF, GELU_TANH, RELU, SILU, SQUARED_RELU, number};
use crate::Job;
use crate::simd::{LINE_BYTES, MAX_CHUNK, STREAM_BYTES, Simd};

crate::compiled::passes! {
    /// Each pass over elements `E`.
    pub(super) struct Passes { forward: Forward, backward: Backward }
}

/// What all tasks share.
pub(crate) struct Arrays<E> {
    pub(super) options: Activation,
    /// F.
    pub(super) columns: usize,
    pub(super) x: *const E,
    /// Null in a forward pass.
    pub(super) dy: *const E,
    /// y, or dx.
    pub(super) result: *mut E,
    /// Bytes of that.
    pub(super) bytes: usize,
}

// SAFETY: tasks read and write disjoint runs of entries.
unsafe impl<E: Element> Sync for Arrays<E> {}

/// Entries of y, `first` to `end`. Whoever makes one vouches that they are the task's alone, and that all
/// pointers lead to as much as they must.
pub(crate) struct Forward<'a, E> {
    pub(super) arrays: &'a Arrays<E>,
    pub(super) first: usize,
    pub(super) end: usize,
}

/// The same, of the backward pass.
pub(crate) struct Backward<'a, E> {
    pub(super) arrays: &'a Arrays<E>,
    pub(super) first: usize,
    pub(super) end: usize,
}

impl<E: Element> Job for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        run_kind::<S, E, false>(s, self.arrays, self.first, self.end);
    }
}

impl<E: Element> Job for Backward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        run_kind::<S, E, true>(s, self.arrays, self.first, self.end);
    }
}

#[inline(always)]
fn run_kind<S: Simd, E: Element, const BACKWARD: bool>(
    s: S,
    arrays: &Arrays<E>,
    first: usize,
    end: usize,
) {
    match number(arrays.options.kind) {
        SILU => runs::<S, E, BACKWARD, SILU>(s, arrays, first, end),
        GELU_TANH => runs::<S, E, BACKWARD, GELU_TANH>(s, arrays, first, end),
        GELU_ERF => runs::<S, E, BACKWARD, GELU_ERF>(s, arrays, first, end),
        RELU => runs::<S, E, BACKWARD, RELU>(s, arrays, first, end),
        _ => runs::<S, E, BACKWARD, SQUARED_RELU>(s, arrays, first, end),
    }
}

#[inline(always)]
fn runs<S: Simd, E: Element, const BACKWARD: bool, const KIND: u8>(
    s: S,
    arrays: &Arrays<E>,
    first: usize,
    end: usize,
) {
    let Arrays { options, columns, x, dy, result, bytes } = *arrays;
    let function = Function::<S, KIND>::new(s, &options);
    let mut start = first;
    while start < end {
        // Of halves a run ends with its row.
        let row = if options.layout == Layout::Halves { start / columns } else { 0 };
        let stop =
            if options.layout == Layout::Halves { end.min((row + 1) * columns) } else { end };
        let (gate, apart) = match options.layout {
            Layout::Single => (start, 0),
            Layout::Halves => (start + row * columns, columns),
            Layout::Interleaved => (2 * start, 1),
        };
        // Where the first of the run's results lies.
        let at = if BACKWARD { gate } else { start };
        // SAFETY: the run lies within the task's share of each array.
        let run = unsafe {
            Run {
                function,
                x: x.add(gate),
                dy: if BACKWARD { dy.add(start) } else { dy },
                result: result.add(at),
                apart,
                count: stop - start,
                streams: S::STREAMS && bytes >= STREAM_BYTES,
            }
        };
        // SAFETY: as above.
        unsafe {
            match options.layout {
                Layout::Single => run.chunks::<BACKWARD, false, 1>(s),
                Layout::Halves => run.chunks::<BACKWARD, true, 1>(s),
                Layout::Interleaved => run.chunks::<BACKWARD, true, 2>(s),
            }
        }
        start = stop;
    }
    s.fence();
}

/// A run of `count` entries of y. Entries of x and dx are `STEP` apart, and up is `apart` from its gate.
struct Run<S: Simd, E, const KIND: u8> {
    function: Function<S, KIND>,
    x: *const E,
    dy: *const E,
    result: *mut E,
    apart: usize,
    count: usize,
    streams: bool,
}

impl<S: Simd, E: Element, const KIND: u8> Run<S, E, KIND> {
    /// # Safety
    /// The pointers lead to as much as `count` says, which is the task's alone.
    #[inline(always)]
    unsafe fn chunks<const BACKWARD: bool, const GATED: bool, const STEP: usize>(self, s: S) {
        let step_out = if BACKWARD { STEP } else { 1 };
        // What is written past the caches begins on a line.
        let on_a_line = |to: *mut E| to.addr().is_multiple_of(LINE_BYTES);
        let head = match self.result.align_offset(LINE_BYTES) {
            offset if step_out == 1 => offset.min(self.count),
            _ => 0,
        };
        let second = self.result.wrapping_add(head + self.apart);
        let streams = self.streams
            && on_a_line(self.result.wrapping_add(head))
            && (!(BACKWARD && GATED) || on_a_line(second));
        // SAFETY: the ranges are those of the run.
        unsafe {
            let mut index = 0;
            while index < head {
                let count = S::CHUNK.min(head - index);
                self.part::<BACKWARD, GATED, STEP>(s, index, count);
                index += count;
            }
            while STEP == 1 && index + S::CHUNK <= self.count {
                self.whole::<BACKWARD, GATED>(s, index, streams);
                index += S::CHUNK;
            }
            while index < self.count {
                let count = S::CHUNK.min(self.count - index);
                self.part::<BACKWARD, GATED, STEP>(s, index, count);
                index += count;
            }
        }
    }

    /// The chunk of entries from `index`, which lie side by side.
    ///
    /// # Safety
    /// It lies in the run; where it is streamed, on a line.
    #[inline(always)]
    unsafe fn whole<const BACKWARD: bool, const GATED: bool>(
        &self,
        s: S,
        index: usize,
        streams: bool,
    ) {
        // SAFETY: passed on from this function's contract.
        unsafe {
            let put = |chunk: Chunk<S>, to: *mut E| match streams {
                true => s.stream(chunk, to),
                false => s.store(chunk, to),
            };
            let (x, to) = (self.x.add(index), self.result.add(index));
            let gate = s.load(x);
            match (BACKWARD, GATED) {
                (false, false) => put(self.function.value(gate), to),
                (false, true) => put(self.function.gated(gate, s.load(x.add(self.apart))), to),
                (true, false) => {
                    put(self.function.gradient(gate, s.load(self.dy.add(index))), to);
                }
                (true, true) => {
                    let (up, dy) = (s.load(x.add(self.apart)), s.load(self.dy.add(index)));
                    let [of_gate, of_up] = self.function.gated_gradient(gate, up, dy);
                    put(of_gate, to);
                    put(of_up, to.add(self.apart));
                }
            }
        }
    }

    /// `count` entries from `index`, at most a chunk, by way of buffers.
    ///
    /// # Safety
    /// They lie in the run.
    #[inline(always)]
    unsafe fn part<const BACKWARD: bool, const GATED: bool, const STEP: usize>(
        &self,
        s: S,
        index: usize,
        count: usize,
    ) {
        let zero = E::from_f32(0.0);
        let [mut gate, mut up, mut dy] = [[zero; MAX_CHUNK]; 3];
        // SAFETY: the entries lie in the run, and buffers hold the largest chunk there is.
        unsafe {
            let x = self.x.add(index * STEP);
            for i in 0..count {
                gate[i] = *x.add(i * STEP);
                if GATED {
                    up[i] = *x.add(i * STEP + self.apart);
                }
                if BACKWARD {
                    dy[i] = *self.dy.add(index + i);
                }
            }
            let (x, of_up) = (s.load(gate.as_ptr()), s.load(up.as_ptr()));
            let of_y = s.load(dy.as_ptr());
            let found = match (BACKWARD, GATED) {
                (false, false) => [self.function.value(x); 2],
                (false, true) => [self.function.gated(x, of_up); 2],
                (true, false) => [self.function.gradient(x, of_y); 2],
                (true, true) => self.function.gated_gradient(x, of_up, of_y),
            };
            s.store(found[0], gate.as_mut_ptr());
            if BACKWARD && GATED {
                s.store(found[1], up.as_mut_ptr());
            }
            let step = if BACKWARD { STEP } else { 1 };
            let to = self.result.add(index * step);
            for i in 0..count {
                *to.add(i * step) = gate[i];
                if BACKWARD && GATED {
                    *to.add(i * step + self.apart) = up[i];
                }
            }
        }
    }
}

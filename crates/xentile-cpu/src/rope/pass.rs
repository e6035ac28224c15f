//! The pass: rows, chunk by chunk, with a row of the tables in the order of a chunk's lanes.

use xentile::rope::{Layout, Rope, RopeShape};
use xentile::{DType, Element};

use crate::Job;
use crate::simd::{LINE_BYTES, STREAM_BYTES, Simd};

crate::compiled::passes! {
    /// The pass over elements `E`.
    pub(super) struct Passes { rotate: Rotate }
}

/// What all tasks share.
pub(crate) struct Arrays<'a, E> {
    pub(super) options: Rope,
    pub(super) shape: RopeShape,
    pub(super) x: *const E,
    pub(super) y: *mut E,
    pub(super) in_place: bool,
    pub(super) indices: &'a [i32],
    /// Cosines and sines.
    pub(super) tables: [&'a [f32]; 2],
}

// SAFETY: tasks read and write disjoint rows of x and y.
unsafe impl<E: Element> Sync for Arrays<'_, E> {}

/// The rows of one task, `first` to `end`. Whoever makes one vouches that they are the task's alone, and
/// that all arrays have as much as the shape says.
pub(crate) struct Rotate<'a, E> {
    pub(super) arrays: &'a Arrays<'a, E>,
    pub(super) first: usize,
    pub(super) end: usize,
}

impl<E: Element> Job for Rotate<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match (self.arrays.options.layout, self.streams::<S>()) {
            (Layout::Halves, false) => self.rows::<S, false, false>(s),
            (Layout::Halves, true) => self.rows::<S, false, true>(s),
            (Layout::Interleaved, false) => self.rows::<S, true, false>(s),
            (Layout::Interleaved, true) => self.rows::<S, true, true>(s),
        }
        s.fence();
    }
}

/// The columns that a chunk covers of a row: those of the table, in one half of a row's pairs.
const fn pairs_of_chunk<S: Simd>(interleaved: bool) -> usize {
    if interleaved { S::LANES } else { S::CHUNK }
}

/// Whether a chunk has the first and the second columns of interleaved pairs in a vector each.
fn is_split<S: Simd, E: Element>() -> bool {
    S::SPLITS_BF16 && E::DTYPE == DType::Bf16
}

impl<E: Element> Rotate<'_, E> {
    /// Whether y goes past the caches: it is too large for them, and every chunk of it begins on a line.
    #[inline(always)]
    fn streams<S: Simd>(&self) -> bool {
        let Arrays { options, shape, y, in_place, .. } = self.arrays;
        let bytes = |count: usize| count * size_of::<E>();
        let second = if options.layout == Layout::Halves { shape.pairs() } else { 0 };
        S::STREAMS
            && !in_place
            && bytes(shape.elements()) >= STREAM_BYTES
            && [y.addr(), bytes(shape.columns()), bytes(second)]
                .iter()
                .all(|offset| offset.is_multiple_of(LINE_BYTES))
    }

    #[inline(always)]
    fn rows<S: Simd, const INTERLEAVED: bool, const STREAM: bool>(self, s: S) {
        let Arrays { options, shape, x, y, in_place, indices, tables } = self.arrays;
        let (columns, pairs) = (shape.columns(), shape.pairs());
        let chunks = pairs.div_ceil(pairs_of_chunk::<S>(INTERLEAVED));
        let mut arranged = Arranged { cos: vec![0.0; chunks * S::CHUNK], sin: Vec::new() };
        arranged.sin.clone_from(&arranged.cos);
        let mut last = None;
        for row in self.first..self.end {
            let index = usize::try_from(indices[row]).ok().filter(|one| *one < shape.positions());
            let group = row / shape.rows_of_group();
            let at = index.map(|index| (group * shape.positions() + index) * pairs);
            if last != Some(at) {
                last = Some(at);
                match at {
                    Some(at) => {
                        let [cos, sin] = tables.map(|table| &table[at..][..pairs]);
                        arranged.fill::<S, E, INTERLEAVED>(cos, sin, options.inverse);
                    }
                    None => {
                        arranged.cos.fill(f32::NAN);
                        arranged.sin.fill(f32::NAN);
                    }
                }
            }
            // SAFETY: the row is the task's, and as long as the shape says.
            unsafe {
                let of_row = Row { x: x.add(row * columns), y: y.add(row * columns), pairs };
                match INTERLEAVED {
                    false => of_row.halves::<S, STREAM>(s, &arranged),
                    true => of_row.interleaved::<S, STREAM>(s, &arranged),
                }
                if !in_place {
                    let rest = 2 * pairs;
                    let from = of_row.x.add(rest);
                    from.copy_to_nonoverlapping(of_row.y.add(rest), columns - rest);
                }
            }
        }
    }
}

/// A row of the tables: a chunk of it for each of x, lane by lane.
struct Arranged {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Arranged {
    /// Of halves both tables are in the order of a chunk of `E`. Of pairs that are interleaved a chunk has
    /// half as many; where their columns come in a vector each, `cos` has cosines and then sines of them,
    /// elsewhere both tables have every number twice, and the first of two sines is negative.
    #[inline(always)]
    fn fill<S: Simd, E: Element, const INTERLEAVED: bool>(
        &mut self,
        cos: &[f32],
        sin: &[f32],
        inverse: bool,
    ) {
        // A NaN that rounding to bf16 by an addition leaves a NaN.
        let number = |x: f32| if x.is_nan() { f32::NAN } else { x };
        let rotated = |x: f32| number(if inverse { -x } else { x });
        let pairs = pairs_of_chunk::<S>(INTERLEAVED);
        let tables = cos.chunks(pairs).zip(sin.chunks(pairs));
        let chunks = self.cos.chunks_exact_mut(S::CHUNK).zip(self.sin.chunks_exact_mut(S::CHUNK));
        for ((cos, sin), (to_cos, to_sin)) in tables.zip(chunks) {
            if INTERLEAVED && is_split::<S, E>() {
                for (lane, (cos, sin)) in cos.iter().zip(sin).enumerate() {
                    to_cos[lane] = number(*cos);
                    to_cos[S::LANES + lane] = rotated(*sin);
                }
            } else if INTERLEAVED {
                for (index, (cos, sin)) in cos.iter().zip(sin).enumerate() {
                    to_cos[2 * index..][..2].fill(number(*cos));
                    let sin = rotated(*sin);
                    to_sin[2 * index..][..2].copy_from_slice(&[-sin, sin]);
                }
            } else if is_split::<S, E>() && cos.len() == S::CHUNK {
                for lane in 0..S::LANES {
                    to_cos[lane] = number(cos[2 * lane]);
                    to_cos[S::LANES + lane] = number(cos[2 * lane + 1]);
                    to_sin[lane] = rotated(sin[2 * lane]);
                    to_sin[S::LANES + lane] = rotated(sin[2 * lane + 1]);
                }
            } else {
                for (index, (cos, sin)) in cos.iter().zip(sin).enumerate() {
                    let place = S::place::<E>(index);
                    to_cos[place] = number(*cos);
                    to_sin[place] = rotated(*sin);
                }
            }
        }
    }
}

/// A row.
#[derive(Clone, Copy)]
struct Row<E> {
    x: *const E,
    y: *mut E,
    pairs: usize,
}

impl<E: Element> Row<E> {
    /// # Safety
    /// Both pointers lead to two halves of so many pairs, and `arranged` has a chunk for each of a half;
    /// where y is streamed, its chunks begin on lines.
    #[inline(always)]
    unsafe fn halves<S: Simd, const STREAM: bool>(self, s: S, arranged: &Arranged) {
        let Self { x, y, pairs } = self;
        let turn = |a: S::Vector, b: S::Vector, cos: S::Vector, sin: S::Vector| {
            let first = s.sub(s.mul(a, cos), s.mul(b, sin));
            (first, s.mul_add(a, sin, s.mul(b, cos)))
        };
        let zero = E::from_f32(0.0);
        let mut column = 0;
        while column < pairs {
            let count = S::CHUNK.min(pairs - column);
            // SAFETY: the columns lie in both halves, and the tables have a whole chunk.
            unsafe {
                let cos = s.load(arranged.cos.as_ptr().add(column));
                let sin = s.load(arranged.sin.as_ptr().add(column));
                let (from, to) = (x.add(column), y.add(column));
                let load = |from: *const E| match count == S::CHUNK {
                    true => s.load(from),
                    false => s.load_part(from, count, zero),
                };
                let (a, b) = (load(from), load(from.add(pairs)));
                let (first_0, second_0) = turn(a[0], b[0], cos[0], sin[0]);
                let (first_1, second_1) = turn(a[1], b[1], cos[1], sin[1]);
                let (first, second) = ([first_0, first_1], [second_0, second_1]);
                if count == S::CHUNK {
                    s.put::<E, STREAM>(first, to);
                    s.put::<E, STREAM>(second, to.add(pairs));
                } else {
                    s.store_part(first, to, count);
                    s.store_part(second, to.add(pairs), count);
                }
            }
            column += count;
        }
    }

    /// # Safety
    /// As for [`Self::halves`], and `arranged` has a chunk for each of all pairs.
    #[inline(always)]
    unsafe fn interleaved<S: Simd, const STREAM: bool>(self, s: S, arranged: &Arranged) {
        let Self { x, y, pairs } = self;
        let mut column = 0;
        while column < 2 * pairs {
            let count = S::CHUNK.min(2 * pairs - column);
            // SAFETY: the columns lie in the row, and the tables have a whole chunk.
            unsafe {
                let [cos_0, cos_1] = s.load(arranged.cos.as_ptr().add(column));
                let from = x.add(column);
                let [a, b] = match count == S::CHUNK {
                    true => s.load(from),
                    false => s.load_part(from, count, E::from_f32(0.0)),
                };
                let rotated = if is_split::<S, E>() {
                    let (cos, sin) = (cos_0, cos_1);
                    let first = s.sub(s.mul(a, cos), s.mul(b, sin));
                    [first, s.mul_add(a, sin, s.mul(b, cos))]
                } else {
                    let [sin_0, sin_1] = s.load(arranged.sin.as_ptr().add(column));
                    let turn = |x, cos, sin| s.mul_add(x, cos, s.mul(s.swap_pairs(x), sin));
                    [turn(a, cos_0, sin_0), turn(b, cos_1, sin_1)]
                };
                let to = y.add(column);
                match count == S::CHUNK {
                    true => s.put::<E, STREAM>(rotated, to),
                    false => s.store_part(rotated, to, count),
                }
            }
            column += count;
        }
    }
}

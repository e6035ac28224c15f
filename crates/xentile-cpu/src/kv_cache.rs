//! A decoder's cache of keys and values on a step: rows that are appended, and attention of one token.
//!
//! Attention is bound by reading the cache, so a task has one head of keys and values of a sequence, for all
//! heads of queries that share it, and at most 512 positions: few sequences keep many threads at work. What
//! the tasks of a head leave is put together as in Flash-Decoding (Dao et al., 2023).

use std::ops::Range;

use xentile::{Element, Error, Result};

use crate::math::exp;
use crate::parallel::Shared;
use crate::simd::{LINE_BYTES, MAX_CHUNK, Simd};
use crate::{Job, Launch};

crate::compiled::passes! {
    /// Each pass over elements `E`.
    struct Passes { attend: Attend, merge: Merge }
}

/// Positions of a task. The same for any number of threads, and so are the bits of a result.
const SPLIT: usize = 512;

/// Positions from a row to one that is asked for.
const AHEAD: usize = 8;

/// The extents of a layer's cache, and of the heads of queries.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    /// N.
    pub sequences: usize,
    /// S, the most positions.
    pub length: usize,
    /// K.
    pub kv_heads: usize,
    /// G, the heads of queries for each of keys.
    pub group: usize,
    /// D.
    pub head_dim: usize,
}

impl Extents {
    /// Elements of a position.
    fn row(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn check<T>(
        name: &'static str,
        array: &[T],
        axes: &'static str,
        expected: usize,
    ) -> Result<()> {
        let actual = array.len();
        let error = Error::Length { name, actual, axes, expected };
        if actual == expected { Ok(()) } else { Err(error) }
    }
}

/// Writes `rows` `[N, T, K, D]` to positions of `cache` `[N, S, K, D]`, of each sequence those from
/// `positions[n]` on. Rows whose position is not in the cache are dropped.
///
/// # Errors
/// An array of another length.
pub fn append<E: Element>(
    extents: Extents,
    rows: &[E],
    positions: &[i32],
    cache: &mut [E],
) -> Result<()> {
    let Extents { sequences, length, .. } = extents;
    let row = extents.row();
    Extents::check("positions", positions, "[N]", sequences)?;
    Extents::check("cache", cache, "[N, S, K, D]", sequences * length * row)?;
    let tokens = rows.len().checked_div(sequences * row).unwrap_or(0);
    Extents::check("rows", rows, "[N, T, K, D]", sequences * tokens * row)?;
    if rows.is_empty() || cache.is_empty() {
        return Ok(());
    }
    let caches = cache.chunks_exact_mut(length * row);
    for ((rows, cache), position) in rows.chunks_exact(tokens * row).zip(caches).zip(positions) {
        // Of tokens before the first position, the rows are dropped.
        let skipped = usize::try_from(position.saturating_neg()).unwrap_or(0).min(tokens);
        let first = usize::try_from(*position).unwrap_or(0).min(length);
        let count = (tokens - skipped).min(length - first);
        cache[first * row..][..count * row].copy_from_slice(&rows[skipped * row..][..count * row]);
    }
    Ok(())
}

/// What attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a, E> {
    /// `[N, K, G, D]`.
    pub q: &'a [E],
    /// `[N, S, K, D]`.
    pub keys: &'a [E],
    /// As `keys`.
    pub values: &'a [E],
    /// How many positions of each sequence are seen, `[N]`.
    pub lengths: &'a [i32],
    /// The most positions that are seen, the last ones.
    pub window: usize,
    /// What products of queries and keys are multiplied by.
    pub scale: f32,
}

/// Writes the attention of one token of each sequence, `o` `[N, K, G, D]`: 0 where a length is not in 1..=S.
///
/// # Errors
/// An array of another length.
pub fn attend<E: Element>(
    launch: Launch<'_>,
    extents: Extents,
    operands: Operands<'_, E>,
    o: &mut [E],
) -> Result<()> {
    let Extents { sequences, length, kv_heads, group, head_dim } = extents;
    let Operands { q, keys, values, lengths, window, .. } = operands;
    Extents::check("q", q, "[N, K, G, D]", sequences * kv_heads * group * head_dim)?;
    Extents::check("o", o, "[N, K, G, D]", sequences * kv_heads * group * head_dim)?;
    Extents::check("keys", keys, "[N, S, K, D]", sequences * length * extents.row())?;
    Extents::check("values", values, "[N, S, K, D]", sequences * length * extents.row())?;
    Extents::check("lengths", lengths, "[N]", sequences)?;
    if o.is_empty() {
        return Ok(());
    }
    let padded = head_dim.next_multiple_of(MAX_CHUNK);
    let seen = |sequence: usize| -> Range<usize> {
        let end = usize::try_from(lengths[sequence]).unwrap_or(0);
        let end = if end <= length { end } else { 0 };
        end.saturating_sub(window)..end
    };
    // Tasks of a sequence and head that have positions, at least one: there the result is written.
    let splits =
        (0..sequences).map(|sequence| seen(sequence).end.div_ceil(SPLIT)).max().unwrap_or(0).max(1);
    // Of each task and head of queries: the sums of values, the largest score, and the sum of powers.
    let each = group * (padded + 2);
    let mut partials = vec![0.0_f32; sequences * kv_heads * splits * each];
    let shared = Shared::new(&mut partials);
    launch.pool.run(sequences * kv_heads * splits, &|index| {
        let (head, split) = (index / splits, index % splits);
        let (sequence, kv_head) = (head / kv_heads, head % kv_heads);
        let seen = seen(sequence);
        let start = seen.start.max(split * SPLIT);
        let range = start..seen.end.min((split + 1) * SPLIT).max(start);
        let from = sequence * length * extents.row() + kv_head * head_dim;
        // SAFETY: tasks have distinct indices.
        let partial = unsafe { shared.slice(index * each, each) };
        let (sums, rest) = partial.split_at_mut(group * padded);
        let (largest, powers) = rest.split_at_mut(group);
        if range.is_empty() {
            largest.fill(f32::NEG_INFINITY);
            return;
        }
        let job = Attend {
            q: &q[head * group * head_dim..][..group * head_dim],
            keys: &keys[from..],
            values: &values[from..],
            step: extents.row(),
            head_dim,
            scale: operands.scale,
            range,
            sums,
            largest,
            powers,
        };
        (Passes::get().attend)(launch.isa, job);
    });
    let o = Shared::new(o);
    launch.pool.run(sequences * kv_heads, &|head| {
        // SAFETY: heads are distinct, and the tasks above have ended.
        let (partials, o) = unsafe {
            let size = splits * each;
            (shared.read(head * size, size), o.slice(head * group * head_dim, group * head_dim))
        };
        (Passes::get().merge)(launch.isa, Merge { partials, each, group, head_dim, o });
    });
    Ok(())
}

/// The heads of queries of one head of keys, over a range of positions.
struct Attend<'a, E> {
    /// `[G, D]`.
    q: &'a [E],
    /// From the head's part of the first position on.
    keys: &'a [E],
    values: &'a [E],
    /// Elements from a position to the next.
    step: usize,
    head_dim: usize,
    scale: f32,
    range: Range<usize>,
    /// `[G, D]`, rows of whole chunks, each chunk in the order of its lanes.
    sums: &'a mut [f32],
    /// `[G]`.
    largest: &'a mut [f32],
    powers: &'a mut [f32],
}

impl<E: Element> Job for Attend<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let group = self.largest.len();
        let count = self.range.len().next_multiple_of(MAX_CHUNK);
        // Beyond the range powers of these are 0.
        let mut scores = vec![f32::NEG_INFINITY; group * count];
        let mut head = 0;
        while head < group {
            let (left, scores) = (group - head, &mut scores[head * count..]);
            head += match left {
                // With few registers the sums of four heads would not stay in them.
                4.. if S::REGISTERS >= 32 => self.heads::<S, 4>(s, head, scores, count),
                2.. => self.heads::<S, 2>(s, head, scores, count),
                _ => self.heads::<S, 1>(s, head, scores, count),
            };
        }
    }
}

impl<E: Element> Attend<'_, E> {
    /// Does all for `COUNT` heads from `head` on, whose `scores` begin `length` apart, and returns `COUNT`.
    #[inline(always)]
    fn heads<S: Simd, const COUNT: usize>(
        &mut self,
        s: S,
        head: usize,
        scores: &mut [f32],
        length: usize,
    ) -> usize {
        let positions = self.range.len();
        for index in 0..positions {
            let dots = self.dots::<S, COUNT>(s, head, self.range.start + index);
            for (row, dot) in dots.into_iter().enumerate() {
                scores[row * length + index] = dot * self.scale;
            }
        }
        for (row, scores) in scores.chunks_exact_mut(length).take(COUNT).enumerate() {
            let largest = scores[..positions].iter().copied().fold(f32::NEG_INFINITY, f32::max);
            self.largest[head + row] = largest;
            self.powers[head + row] = powers_of(s, scores, largest);
        }
        for column in (0..self.head_dim).step_by(S::CHUNK) {
            self.weigh::<S, COUNT>(s, head, column, scores, length);
        }
        COUNT
    }

    /// Reads the chunk of `row` that begins at `column`, with zeros after its last.
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, row: &[E], column: usize) -> [S::Vector; 2] {
        let left = S::CHUNK.min(self.head_dim - column);
        let from = row[column..][..left].as_ptr();
        // SAFETY: the slice has as many elements.
        unsafe {
            if left == S::CHUNK { s.load(from) } else { s.load_part(from, left, E::from_f32(0.0)) }
        }
    }

    /// Products of queries and the key of a position.
    #[inline(always)]
    fn dots<S: Simd, const COUNT: usize>(
        &self,
        s: S,
        head: usize,
        position: usize,
    ) -> [f32; COUNT] {
        let key = &self.keys[position * self.step..];
        let next = key.as_ptr().wrapping_add(AHEAD * self.step).cast::<u8>();
        for line in (0..self.head_dim * size_of::<E>()).step_by(LINE_BYTES) {
            s.prefetch(next.wrapping_add(line));
        }
        let mut sums = [[s.splat(0.0); 2]; COUNT];
        for column in (0..self.head_dim).step_by(S::CHUNK) {
            let key = self.load(s, key, column);
            for (row, sum) in sums.iter_mut().enumerate() {
                let q = self.load(s, &self.q[(head + row) * self.head_dim..], column);
                *sum = [s.mul_add(q[0], key[0], sum[0]), s.mul_add(q[1], key[1], sum[1])];
            }
        }
        sums.map(|sum| s.sum(s.add(sum[0], sum[1])) as f32)
    }

    /// Sums up a chunk of the values' columns, by the powers in `scores`.
    #[inline(always)]
    fn weigh<S: Simd, const COUNT: usize>(
        &mut self,
        s: S,
        head: usize,
        column: usize,
        scores: &[f32],
        length: usize,
    ) {
        let mut sums = [[s.splat(0.0); 2]; COUNT];
        for (index, position) in self.range.clone().enumerate() {
            let value = &self.values[position * self.step..];
            s.prefetch(value.as_ptr().wrapping_add(AHEAD * self.step + column).cast());
            let value = self.load(s, value, column);
            for (row, sum) in sums.iter_mut().enumerate() {
                let power = s.splat(scores[row * length + index]);
                *sum = [s.mul_add(power, value[0], sum[0]), s.mul_add(power, value[1], sum[1])];
            }
        }
        let padded = self.sums.len() / self.largest.len();
        for (row, sum) in sums.into_iter().enumerate() {
            let to = &mut self.sums[(head + row) * padded + column..][..S::CHUNK];
            // SAFETY: the slice is a chunk.
            unsafe { s.store(sum, to.as_mut_ptr()) };
        }
    }
}

/// Puts `EXP_SCALE * e^(score - largest)` into the place of each score, of whole chunks; returns their sum.
#[inline(always)]
fn powers_of<S: Simd>(s: S, scores: &mut [f32], largest: f32) -> f32 {
    let mut sums = [s.splat(0.0); 2];
    for chunk in scores.chunks_exact_mut(S::CHUNK) {
        // SAFETY: the slice is a chunk.
        let x = unsafe { s.load(chunk.as_ptr()) };
        let powers = exp(s, x.map(|x| s.sub(x, s.splat(largest))));
        sums = [s.add(sums[0], powers[0]), s.add(sums[1], powers[1])];
        // SAFETY: as above.
        unsafe { s.store(powers, chunk.as_mut_ptr()) };
    }
    s.sum(s.add(sums[0], sums[1])) as f32
}

/// Puts together what tasks left of one head of keys.
struct Merge<'a, E> {
    partials: &'a [f32],
    /// Of a task.
    each: usize,
    group: usize,
    head_dim: usize,
    /// `[G, D]`.
    o: &'a mut [E],
}

impl<E: Element> Job for Merge<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { partials, each, group, head_dim, o } = self;
        let padded = each / group - 2;
        let tasks = || partials.chunks_exact(each);
        let mut weights = vec![0.0; partials.len() / each];
        for (head, o) in o.chunks_exact_mut(head_dim).enumerate() {
            let largest = |task: &[f32]| task[group * padded + head];
            let top = tasks().map(largest).fold(f32::NEG_INFINITY, f32::max);
            let mut total = 0.0;
            for (weight, task) in weights.iter_mut().zip(tasks()) {
                let difference = largest(task) - top;
                // Where nothing is seen, or scores are -inf alone, all sums are 0.
                let is_empty = difference.is_nan() && top == f32::NEG_INFINITY;
                *weight = if is_empty { 0.0 } else { difference.exp() };
                total += *weight * task[group * (padded + 1) + head];
            }
            let factor = if total == 0.0 { 0.0 } else { total.recip() };
            weights.iter_mut().for_each(|weight| *weight *= factor);
            for (index, to) in o.chunks_mut(S::CHUNK).enumerate() {
                let mut sum = [s.splat(0.0); 2];
                for (weight, task) in weights.iter().zip(tasks()) {
                    let from = &task[head * padded + index * S::CHUNK..][..S::CHUNK];
                    // SAFETY: the slice is a chunk.
                    let values = unsafe { s.load(from.as_ptr()) };
                    sum = [0, 1].map(|half| s.mul_add(values[half], s.splat(*weight), sum[half]));
                }
                // SAFETY: the slice has so many elements, at most a chunk.
                unsafe { s.store_part(sum, to.as_mut_ptr(), to.len()) };
            }
        }
    }
}

//! Causal depthwise convolution: forward, and backward with partial sums of dweight and dbias.
//!
//! A task is a block of tokens of one sequence. It goes through them a tile at a time, and through a tile chunk by
//! chunk of channels: the rows before stay in registers as a chunk walks down a tile, and the rows of a tile in
//! the nearest caches. Weight and bias are converted to f32 once a call, in the order of a chunk's lanes.

#[cfg(feature = "operation")]
pub(crate) mod operation;

use std::marker::PhantomData;

use xentile::causal_conv1d::{BLOCK_TOKENS, CausalConv1d};
use xentile::{Element, Result};

use crate::Job;
pub use crate::Launch;
use crate::math::{EXP_SCALE, exp};
pub use crate::norm::Weight;
use crate::parallel::Shared;
use crate::simd::{MAX_CHUNK, Simd};

/// Tokens of a tile.
const TILE: usize = 16;

crate::compiled::passes! {
    /// Each pass over elements `E`.
    struct Passes { arrange: Arrange, forward: Forward, backward: Backward }
}

/// What both passes read.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a, E> {
    /// `[B, T, C]`.
    pub x: &'a [E],
    /// `[C, W]`, or `[G, C, W]`, each for B / G consecutive sequences.
    pub weight: Weight<'a>,
    /// `[C]`, or `[G, C]` with a G of its own.
    pub bias: Option<Weight<'a>>,
    /// The rows before the first, `[B, W - 1, C]`; zeros if there is none.
    pub state: Option<&'a [E]>,
    /// Segment ids `[B, T]`.
    pub segments: Option<&'a [i32]>,
}

/// What the backward pass writes.
#[derive(Debug)]
pub struct Gradients<'a, E> {
    /// `[B, T, C]`.
    pub x: &'a mut [E],
    /// Partial sums `[B, T / BLOCK_TOKENS, C, W]`.
    pub weight: &'a mut [f32],
    /// Partial sums `[B, T / BLOCK_TOKENS, C]`, where wanted.
    pub bias: Option<&'a mut [f32]>,
    /// `[B, W - 1, C]`, where wanted.
    pub state: Option<&'a mut [E]>,
}

/// A causal convolution of one shape.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    conv: CausalConv1d,
    launch: Launch<'a>,
}

impl<'a> Kernel<'a> {
    /// A kernel for these options and shape.
    ///
    /// # Errors
    /// A width that kernels do not have, or arrays larger than memory.
    pub fn new(conv: CausalConv1d, launch: Launch<'a>) -> Result<Self> {
        conv.validate()?;
        Ok(Self { conv, launch })
    }

    /// Writes `y` `[B, T, C]`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn forward<E: Element>(&self, operands: Operands<'_, E>, y: &mut [E]) -> Result<()> {
        self.conv.check("y", y.len())?;
        let factors = self.factors(&operands)?;
        let arrays = self.arrays(&operands, &factors, y.as_mut_ptr());
        let blocks = self.conv.blocks();
        self.launch.pool.run(self.conv.batch * blocks, &|index| {
            let block = Block { arrays: &arrays, sequence: index / blocks, block: index % blocks };
            (Passes::get().forward)(self.launch.isa, Forward(block));
        });
        Ok(())
    }

    /// Writes all gradients for `dy` `[B, T, C]`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn backward<E: Element>(
        &self,
        operands: Operands<'_, E>,
        dy: &[E],
        gradients: Gradients<'_, E>,
    ) -> Result<()> {
        let CausalConv1d { width, batch, channels, .. } = self.conv;
        let Gradients { x: dx, weight, bias, state } = gradients;
        self.conv.check("dy", dy.len())?;
        self.conv.check("dx", dx.len())?;
        let blocks = self.conv.blocks();
        let check = |name, length, each, axes| {
            let expected = batch * blocks * each;
            let error = xentile::Error::Length { name, actual: length, axes, expected };
            if length == expected { Ok(()) } else { Err(error) }
        };
        check("dweight", weight.len(), channels * width, "[B, blocks, C, W]")?;
        if let Some(bias) = &bias {
            check("dbias", bias.len(), channels, "[B, blocks, C]")?;
        }
        if let Some(state) = &state {
            self.conv.check_state("dstate", state.len())?;
        }
        let factors = self.factors(&operands)?;
        let arrays = Arrays {
            dy: dy.as_ptr(),
            dstate: state.map(<[E]>::as_mut_ptr),
            ..self.arrays(&operands, &factors, dx.as_mut_ptr())
        };
        let weight = Shared::new(weight);
        let bias = bias.map(Shared::new);
        // A sequence without tokens has a block too, where its state has a gradient.
        let tasks = if arrays.dstate.is_some() { blocks.max(1) } else { blocks };
        self.launch.pool.run(batch * tasks, &|index| {
            let (sequence, block) = (index / tasks, index % tasks);
            let place = sequence * blocks + block;
            let has_tokens = usize::from(block < blocks);
            // SAFETY: tasks have distinct indices, so their pieces are disjoint.
            let (weight, bias) = unsafe {
                let each = channels * width;
                (
                    weight.slice(place * each, has_tokens * each),
                    bias.as_ref()
                        .map(|bias| bias.slice(place * channels, has_tokens * channels))
                        .unwrap_or_default(),
                )
            };
            let block = Block { arrays: &arrays, sequence, block };
            (Passes::get().backward)(self.launch.isa, Backward { block, weight, bias });
        });
        Ok(())
    }

    /// Checks what both passes read, and converts weight and bias.
    fn factors<E: Element>(&self, operands: &Operands<'_, E>) -> Result<Factors> {
        let CausalConv1d { width, channels, .. } = self.conv;
        let Operands { x, weight, bias, state, segments } = operands;
        self.conv.check("x", x.len())?;
        if let Some(state) = state {
            self.conv.check_state("initial_state", state.len())?;
        }
        if let Some(segments) = segments {
            self.conv.check_segments("segment_ids", segments.len())?;
        }
        let groups = self.conv.groups("weight", weight.len(), channels * width)?;
        let weight = Factors::arranged::<E>(self, *weight, groups, width);
        let Some(bias) = bias else { return Ok(Factors { weight, bias: None }) };
        let groups = self.conv.groups("bias", bias.len(), channels)?;
        Ok(Factors { weight, bias: Some(Factors::arranged::<E>(self, *bias, groups, 1)) })
    }

    fn arrays<'b, E: Element>(
        &self,
        operands: &Operands<'b, E>,
        factors: &'b Factors,
        result: *mut E,
    ) -> Arrays<'b, E> {
        Arrays {
            conv: self.conv,
            factors,
            x: operands.x.as_ptr(),
            state: operands.state.map(<[E]>::as_ptr),
            segments: operands.segments,
            dy: std::ptr::null(),
            result,
            dstate: None,
        }
    }
}

/// Weight and bias in f32, rows of whole chunks in the order of their lanes.
struct Factors {
    /// `[G, W, C]`.
    weight: Vec<Vec<f32>>,
    /// `[G, 1, C]`.
    bias: Option<Vec<Vec<f32>>>,
}

impl Factors {
    /// `[G, rows, C]` of an array `[G, C, rows]`.
    fn arranged<E: Element>(
        kernel: &Kernel<'_>,
        weight: Weight<'_>,
        groups: usize,
        rows: usize,
    ) -> Vec<Vec<f32>> {
        let channels = kernel.conv.channels;
        let from: Vec<f32> = match weight {
            Weight::F32(weight) => weight.to_vec(),
            Weight::Bf16(weight) => weight.iter().map(|x| x.to_f32()).collect(),
            Weight::F16(weight) => weight.iter().map(|x| x.to_f32()).collect(),
        };
        let each = channels * rows;
        let group = |index: usize| {
            let mut to = vec![0.0; rows * padded(channels)];
            let from = &from[index * each..][..each];
            let job = Arrange::<E> { from, to: &mut to, rows, elements: PhantomData };
            (Passes::get().arrange)(kernel.launch.isa, job);
            to
        };
        (0..groups).map(group).collect()
    }
}

/// Channels of whole chunks.
fn padded(channels: usize) -> usize {
    channels.next_multiple_of(MAX_CHUNK)
}

/// Puts columns `[C, rows]` into rows of chunks.
struct Arrange<'a, E> {
    from: &'a [f32],
    to: &'a mut [f32],
    rows: usize,
    elements: PhantomData<E>,
}

impl<E: Element> Job for Arrange<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let length = self.to.len() / self.rows;
        for (channel, column) in self.from.chunks_exact(self.rows).enumerate() {
            for (row, x) in column.iter().enumerate() {
                self.to[row * length + place::<S, E>(channel)] = *x;
            }
        }
    }
}

/// Where a channel lies in a row of chunks.
#[inline(always)]
fn place<S: Simd, E: Element>(channel: usize) -> usize {
    channel / S::CHUNK * S::CHUNK + S::place::<E>(channel % S::CHUNK)
}

/// What all tasks share.
struct Arrays<'a, E> {
    conv: CausalConv1d,
    factors: &'a Factors,
    x: *const E,
    state: Option<*const E>,
    segments: Option<&'a [i32]>,
    /// Null in a forward pass.
    dy: *const E,
    /// y, or dx.
    result: *mut E,
    dstate: Option<*mut E>,
}

// SAFETY: tasks write disjoint blocks of tokens, and the first of a sequence alone its state.
unsafe impl<E: Element> Sync for Arrays<'_, E> {}

/// A block of tokens. Whoever makes one vouches that its results are the task's alone, and that all pointers lead
/// to as much as the shape says.
struct Block<'a, E> {
    arrays: &'a Arrays<'a, E>,
    sequence: usize,
    block: usize,
}

/// The forward pass of a block.
struct Forward<'a, E>(Block<'a, E>);

/// The backward pass of a block, with its partial sums.
struct Backward<'a, E> {
    block: Block<'a, E>,
    weight: &'a mut [f32],
    bias: &'a mut [f32],
}

/// Two vectors.
type Chunk<S> = [<S as Simd>::Vector; 2];

impl<E: Element> Job for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.0.arrays.conv.width {
            2 => self.0.forward::<S, 2>(s),
            3 => self.0.forward::<S, 3>(s),
            _ => self.0.forward::<S, 4>(s),
        }
    }
}

impl<E: Element> Job for Backward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.block.arrays.conv.width {
            2 => self.walk::<S, 2>(s),
            3 => self.walk::<S, 3>(s),
            _ => self.walk::<S, 4>(s),
        }
    }
}

/// A chunk of channels: the first, and how many.
#[derive(Clone, Copy)]
struct Channels {
    first: usize,
    count: usize,
}

impl Channels {
    #[inline(always)]
    fn chunks<S: Simd>(channels: usize) -> impl Iterator<Item = Self> {
        (0..channels)
            .step_by(S::CHUNK)
            .map(move |first| Self { first, count: S::CHUNK.min(channels - first) })
    }
}

impl<E: Element> Block<'_, E> {
    /// Tokens of the block: the first, and the one behind the last.
    fn tokens(&self) -> [usize; 2] {
        let tokens = self.arrays.conv.tokens;
        [0, 1].map(|next| tokens.min((self.block + next) * BLOCK_TOKENS))
    }

    fn segments(&self) -> Option<&[i32]> {
        let tokens = self.arrays.conv.tokens;
        self.arrays.segments.map(|all| &all[self.sequence * tokens..][..tokens])
    }

    /// The sequence's weight and bias among as many as `groups` of them.
    fn group<'a>(&self, groups: &'a [Vec<f32>]) -> &'a [f32] {
        &groups[self.sequence * groups.len() / self.arrays.conv.batch]
    }

    /// W rows of the weight, of one chunk.
    #[inline(always)]
    fn weight<S: Simd, const W: usize>(&self, s: S, at: Channels) -> [Chunk<S>; W] {
        let weight = self.group(&self.arrays.factors.weight);
        let length = weight.len() / W;
        // SAFETY: rows are whole chunks.
        std::array::from_fn(|row| unsafe {
            s.load(weight[row * length + at.first..][..S::CHUNK].as_ptr())
        })
    }

    #[inline(always)]
    fn bias<S: Simd>(&self, s: S, at: Channels) -> Chunk<S> {
        match &self.arrays.factors.bias {
            // SAFETY: rows are whole chunks.
            Some(bias) => unsafe { s.load(self.group(bias)[at.first..][..S::CHUNK].as_ptr()) },
            None => [s.splat(0.0); 2],
        }
    }

    /// Where row `t` of a `[B, T, C]` has a chunk.
    #[inline(always)]
    fn offset(&self, t: usize, at: Channels) -> usize {
        let CausalConv1d { tokens, channels, .. } = self.arrays.conv;
        (self.sequence * tokens + t) * channels + at.first
    }

    /// Where row `row` of a state `[B, W - 1, C]` has a chunk.
    #[inline(always)]
    fn state_offset(&self, row: usize, at: Channels) -> usize {
        let CausalConv1d { width, channels, .. } = self.arrays.conv;
        (self.sequence * (width - 1) + row) * channels + at.first
    }

    /// The W - 1 rows before token `t`, the nearest first.
    #[inline(always)]
    fn before<S: Simd, const W: usize>(&self, s: S, t: usize, at: Channels) -> [Chunk<S>; W] {
        std::array::from_fn(|index| {
            let k = index + 1;
            if k == W {
                return [s.splat(0.0); 2]; // none
            }
            // SAFETY: the rows are those of the sequence, and of its state.
            unsafe {
                match self.arrays.state {
                    _ if t >= k => load(s, self.arrays.x.add(self.offset(t - k, at)), at),
                    Some(state) => load(s, state.add(self.state_offset(t + W - 1 - k, at)), at),
                    None => [s.splat(0.0); 2],
                }
            }
        })
    }

    #[inline(always)]
    fn forward<S: Simd, const W: usize>(self, s: S) {
        let Arrays { conv, x, result, .. } = *self.arrays;
        let (segments, [first, end]) = (self.segments(), self.tokens());
        for tile in (first..end).step_by(TILE) {
            let stop = end.min(tile + TILE);
            let mut reach = [W - 1; TILE];
            for t in tile..stop {
                reach[t - tile] = conv.reach(segments, t);
            }
            for at in Channels::chunks::<S>(conv.channels) {
                let weight = self.weight::<S, W>(s, at);
                let bias = self.bias(s, at);
                let mut rows = self.before::<S, W>(s, tile, at);
                for t in tile..stop {
                    // SAFETY: the row is in the task's block.
                    rows = pushed(rows, unsafe { load(s, x.add(self.offset(t, at)), at) });
                    let z = sum::<S, W>(s, &weight, &rows, reach[t - tile], bias);
                    let y = if conv.silu { silu(s, z)[0] } else { z };
                    // SAFETY: as above.
                    unsafe { store(s, y, result.add(self.offset(t, at)), at) };
                }
            }
        }
    }
}

impl<E: Element> Backward<'_, E> {
    #[inline(always)]
    fn walk<S: Simd, const W: usize>(self, s: S) {
        let Self { block, weight: dweight, bias: dbias } = self;
        let Arrays { conv, x, dy, result, dstate, .. } = *block.arrays;
        let (segments, [first, end]) = (block.segments(), block.tokens());
        let length = padded(conv.channels);
        // Rows of dweight, then dbias.
        let mut sums = vec![0.0_f32; (W + 1) * length];
        let zero = [s.splat(0.0); 2];
        let mut tile = first;
        loop {
            let stop = end.min(tile + TILE);
            let mut reach = [W - 1; TILE + 3];
            for t in tile..conv.tokens.min(stop + W - 1) {
                reach[t - tile] = conv.reach(segments, t);
            }
            for at in Channels::chunks::<S>(conv.channels) {
                let weight = block.weight::<S, W>(s, at);
                let bias = block.bias(s, at);
                let mut rows = block.before::<S, W>(s, tile, at);
                // Of dx[t - 1], dx[t - 2] and so on: what tokens before t add.
                let mut open = [zero; W];
                // SAFETY: sums has so many whole chunks.
                let sum_of = |sums: &[f32], row: usize| unsafe {
                    s.load(sums[row * length + at.first..][..S::CHUNK].as_ptr())
                };
                let mut of_weight: [Chunk<S>; W] = std::array::from_fn(|row| sum_of(&sums, row));
                let mut of_bias = sum_of(&sums, W);
                for t in tile..stop + W - 1 {
                    let reach = reach[t - tile];
                    let mut g = zero;
                    if t < conv.tokens {
                        let offset = block.offset(t, at);
                        // SAFETY: the row is one of the sequence's.
                        let row = unsafe { load(s, x.add(offset), at) };
                        // SAFETY: as above.
                        g = unsafe { load(s, dy.add(offset), at) };
                        rows = pushed(rows, row);
                        if conv.silu {
                            let z = sum::<S, W>(s, &weight, &rows, reach, bias);
                            g = times(s, g, silu(s, z)[1]);
                        }
                        if t < stop {
                            of_bias = [s.add(of_bias[0], g[0]), s.add(of_bias[1], g[1])];
                            for k in 0..W {
                                if k <= reach {
                                    let to = &mut of_weight[W - 1 - k];
                                    *to = multiplied(s, g, rows[k], *to);
                                }
                            }
                        }
                    }
                    open = pushed(open, zero);
                    if t < conv.tokens {
                        for k in 0..W {
                            if k <= reach {
                                open[k] = multiplied(s, g, weight[W - 1 - k], open[k]);
                            }
                        }
                    }
                    // The last one is complete: dx[t - W + 1].
                    let done = open[W - 1];
                    if t >= tile + W - 1 {
                        let to = block.offset(t + 1 - W, at);
                        // SAFETY: the row is in the task's block.
                        unsafe { store(s, done, result.add(to), at) };
                    } else if let (true, Some(dstate)) = (tile == 0, dstate) {
                        // SAFETY: the first block alone has the state.
                        unsafe { store(s, done, dstate.add(block.state_offset(t, at)), at) };
                    }
                }
                for (row, sum) in of_weight.into_iter().chain([of_bias]).enumerate() {
                    let to = &mut sums[row * length + at.first..][..S::CHUNK];
                    // SAFETY: the slice is a chunk.
                    unsafe { s.store(sum, to.as_mut_ptr()) };
                }
            }
            tile = stop;
            if tile >= end {
                break;
            }
        }
        for (channel, to) in dweight.chunks_exact_mut(W).enumerate() {
            for (row, to) in to.iter_mut().enumerate() {
                *to = sums[row * length + place::<S, E>(channel)];
            }
        }
        for (channel, to) in dbias.iter_mut().enumerate() {
            *to = sums[W * length + place::<S, E>(channel)];
        }
    }
}

/// `rows` moved on by one, with `row` the first.
#[inline(always)]
fn pushed<V: Copy, const W: usize>(mut rows: [V; W], row: V) -> [V; W] {
    for index in (1..W).rev() {
        rows[index] = rows[index - 1];
    }
    rows[0] = row;
    rows
}

/// The sum before the activation; `rows` has the nearest first, `reach` of them beside that.
#[inline(always)]
fn sum<S: Simd, const W: usize>(
    s: S,
    weight: &[Chunk<S>; W],
    rows: &[Chunk<S>; W],
    reach: usize,
    bias: Chunk<S>,
) -> Chunk<S> {
    let mut sum = bias;
    for k in 0..W {
        if k <= reach {
            sum = multiplied(s, weight[W - 1 - k], rows[k], sum);
        }
    }
    sum
}

/// `a * b + c`.
#[inline(always)]
fn multiplied<S: Simd>(s: S, a: Chunk<S>, b: Chunk<S>, c: Chunk<S>) -> Chunk<S> {
    [s.mul_add(a[0], b[0], c[0]), s.mul_add(a[1], b[1], c[1])]
}

#[inline(always)]
fn times<S: Simd>(s: S, a: Chunk<S>, b: Chunk<S>) -> Chunk<S> {
    [s.mul(a[0], b[0]), s.mul(a[1], b[1])]
}

/// SiLU and its slope.
#[inline(always)]
fn silu<S: Simd>(s: S, z: Chunk<S>) -> [Chunk<S>; 2] {
    let (zero, one, scale) = (s.splat(0.0), s.splat(1.0), s.splat(EXP_SCALE));
    // Of -|z|, which cannot overflow.
    let powers = exp(s, z.map(|z| s.sub(zero, s.abs(z))));
    let (mut value, mut slope) = (z, z);
    for i in 0..2 {
        let numerator = s.select(s.less(z[i], zero), powers[i], scale);
        let sigmoid = s.div(numerator, s.add(scale, powers[i]));
        value[i] = s.mul(z[i], sigmoid);
        slope[i] = s.mul(sigmoid, s.mul_add(z[i], s.sub(one, sigmoid), one));
    }
    [value, slope]
}

/// # Safety
/// `from` leads to as many elements as the chunk has.
#[inline(always)]
unsafe fn load<S: Simd, E: Element>(s: S, from: *const E, at: Channels) -> Chunk<S> {
    // SAFETY: the caller's.
    unsafe {
        match at.count == S::CHUNK {
            true => s.load(from),
            false => s.load_part(from, at.count, E::from_f32(0.0)),
        }
    }
}

/// # Safety
/// `to` leads to as many elements as the chunk has.
#[inline(always)]
unsafe fn store<S: Simd, E: Element>(s: S, chunk: Chunk<S>, to: *mut E, at: Channels) {
    // SAFETY: the caller's.
    unsafe {
        match at.count == S::CHUNK {
            true => s.store(chunk, to),
            false => s.store_part(chunk, to, at.count),
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use xentile::causal_conv1d::Reference;

    use super::*;
    use crate::{Isa, Threads};

    /// A number between -1 and 1.
    fn number(seed: usize) -> f64 {
        (1.7 * seed as f64 + (seed * seed % 97) as f64).sin()
    }

    fn close<E: Element>(name: &str, found: &[E], expected: &[f64], roundings: f64) {
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            let error = (found.to_f64() - expected).abs();
            let bound = roundings * E::DTYPE.ulp(1.0) * expected.abs().max(1.0);
            assert!(error <= bound, "{name}[{index}] is {}, not {expected}", found.to_f64());
        }
    }

    /// All results of sequences with everything that there is against the reference, outputs poisoned first.
    fn check<E: Element>(isa: Isa, width: usize, tokens: usize, channels: usize) {
        let conv = CausalConv1d { width, silu: true, batch: 2, tokens, channels };
        let mut seed = 0;
        let mut numbers = |count: usize| -> Vec<E> {
            seed += 1000;
            (0..count).map(|index| E::from_f32(number(seed + index) as f32)).collect()
        };
        let (rows, states) = (2 * tokens * channels, 2 * (width - 1) * channels);
        let [x, dy, state] = [rows, rows, states].map(&mut numbers);
        let weight: Vec<f32> = (0..channels * width).map(|i| number(7 + i) as f32).collect();
        let bias: Vec<f32> = (0..channels).map(|i| number(3 + i) as f32).collect();
        let segments: Vec<i32> = (0..2 * tokens).map(|i| (i * i / 40 % 3) as i32).collect();
        let operands = Operands {
            x: &x,
            weight: Weight::F32(&weight),
            bias: Some(Weight::F32(&bias)),
            state: Some(&state),
            segments: Some(&segments),
        };
        let pool = Threads::new(2).unwrap();
        let kernel = Kernel::new(conv, Launch { isa, pool: &pool }).unwrap();
        let poison = E::from_f32(f32::NAN);
        let [mut y, mut dx] = [rows; 2].map(|count| vec![poison; count]);
        let mut dstate = vec![poison; states];
        let blocks = 2 * conv.blocks() * channels;
        let [mut dweight, mut dbias] = [blocks * width, blocks].map(|count| vec![f32::NAN; count]);
        kernel.forward(operands, &mut y).unwrap();
        let gradients = Gradients {
            x: &mut dx,
            weight: &mut dweight,
            bias: Some(&mut dbias),
            state: Some(&mut dstate),
        };
        kernel.backward(operands, &dy, gradients).unwrap();
        let wide = |all: &[E]| all.iter().map(|x| x.to_f64()).collect::<Vec<f64>>();
        let of_channels = |all: &[f32]| all.iter().map(|&x| x.into()).collect::<Vec<f64>>();
        let (weight, bias) = (of_channels(&weight), of_channels(&bias));
        for sequence in 0..2 {
            let part = |all: &[E]| {
                let each = all.len() / 2;
                wide(&all[sequence * each..][..each])
            };
            let (x, state) = (part(&x), part(&state));
            let reference = Reference {
                conv,
                x: &x,
                weight: &weight,
                bias: Some(&bias),
                state: Some(&state),
                segments: Some(&segments[sequence * tokens..][..tokens]),
            };
            let of = |all: &[E]| all[sequence * all.len() / 2..][..all.len() / 2].to_vec();
            close("y", &of(&y), &reference.forward(), 8.0);
            let expected = reference.backward(&part(&dy));
            close("dx", &of(&dx), &expected.x, 8.0);
            close("dstate", &of(&dstate), &expected.state, 8.0);
            for (name, sums, expected) in
                [("dweight", &dweight, &expected.weight), ("dbias", &dbias, &expected.bias)]
            {
                let each = sums.len() / 2;
                let blocks = sums[sequence * each..][..each].chunks_exact(expected.len());
                let mut total = vec![0.0_f32; expected.len()];
                for block in blocks {
                    total.iter_mut().zip(block).for_each(|(total, sum)| *total += sum);
                }
                close(name, &total, expected, tokens as f64 + 8.0);
            }
        }
    }

    #[test]
    fn every_instruction_set_agrees_with_the_reference() {
        for isa in Isa::available() {
            for width in 2..=4 {
                check::<f32>(isa, width, 150, 37);
                check::<bf16>(isa, width, 18, 70);
                check::<f32>(isa, width, 1, 5);
                check::<f32>(isa, width, 0, 5);
            }
        }
    }
}

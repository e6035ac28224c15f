//! Steps of AdamW and Lion over many arrays, with moments in f32 or in 8 bits, which are written in their place.
//!
//! A task has a tile of one array, and goes through it 256 entries at a time: gradient, parameter and moments are
//! widened to f32 in buffers that stay in the nearest cache, and loops over 64 of these at a time, which the compiler
//! vectorises for each instruction set, do the rest. Blocks of 8-bit moments have 256, 128 or 64 entries and begin
//! at multiples of that, so that none is cut.

#[cfg(feature = "operation")]
pub(crate) mod operation;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use xentile::optimizers::{
    BLOCKS, DECADES, Decade, GROUP, Scalars, decades, least, philox, round_stochastically, table,
    zero_code,
};
use xentile::{Error, Result};

use crate::Job;
pub use crate::Launch;
pub use crate::norm::Weight as Grads;
use crate::parallel::Shared;
use crate::simd::Simd;

/// Entries of a task.
const TILE: usize = 1 << 14;
/// Entries of a piece, the largest block.
const PIECE: usize = 256;
/// Entries of a chunk, the smallest block.
const CHUNK: usize = 64;

/// Entries in f32.
type Chunk = [f32; CHUNK];

/// A parameter in its dtype.
#[derive(Debug)]
pub enum Params<'a> {
    /// In f32.
    F32(&'a mut [f32]),
    /// In bfloat16.
    Bf16(&'a mut [bf16]),
    /// In float16.
    F16(&'a mut [f16]),
}

/// A moment in 8 bits.
#[derive(Debug)]
pub struct Codes<'a> {
    /// Of each entry.
    pub codes: &'a mut [u8],
    /// Of each block.
    pub scales: &'a mut [f32],
}

/// The moments of a parameter, which say whose step it takes.
#[derive(Debug)]
pub enum Moments<'a> {
    /// Both of AdamW in f32.
    F32([&'a mut [f32]; 2]),
    /// Both of AdamW in 8 bits, with so many entries in a block.
    Codes([Codes<'a>; 2], usize),
    /// Lion's in 8 bits, with so many entries in a block.
    Lion(Codes<'a>, usize),
}

/// A parameter with its gradient and state.
#[derive(Debug)]
pub struct Parameter<'a> {
    /// Its number, which random bits depend on.
    pub number: u32,
    /// Whether it decays.
    pub decays: bool,
    /// The gradient.
    pub grads: Grads<'a>,
    /// The parameter, which is overwritten.
    pub params: Params<'a>,
    /// The moments, which are overwritten.
    pub moments: Moments<'a>,
}

/// Makes a step of each parameter.
///
/// # Errors
/// Arrays of a parameter that differ in length, or a block that is none of [`BLOCKS`].
pub fn step(scalars: &Scalars, parameters: Vec<Parameter<'_>>, launch: Launch<'_>) -> Result<()> {
    let mut tiles = Vec::new();
    for parameter in parameters {
        let length = parameter.params.len();
        parameter.check(length)?;
        let mut rest = Tile { scalars: *scalars, first: 0, of: parameter };
        for _ in 1..length.div_ceil(TILE) {
            tiles.push(rest.split_off_first());
        }
        tiles.push(rest);
    }
    let count = tiles.len();
    let tiles = Shared::new(&mut tiles);
    launch.pool.run(count, &|index| {
        // SAFETY: tasks have distinct indices.
        let [tile] = (unsafe { tiles.slice(index, 1) }) else { return };
        launch.isa.run(Step(tile));
    });
    Ok(())
}

impl<'a> Params<'a> {
    fn len(&self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::Bf16(all) => all.len(),
            Self::F16(all) => all.len(),
        }
    }

    fn split_off_first(&mut self, count: usize) -> Self {
        match self {
            Self::F32(all) => Self::F32(cut(all, count)),
            Self::Bf16(all) => Self::Bf16(cut(all, count)),
            Self::F16(all) => Self::F16(cut(all, count)),
        }
    }
}

/// The first `count` of `all`, which keeps the rest.
fn cut<'a, T>(all: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    let (first, rest) = std::mem::take(all).split_at_mut(count);
    *all = rest;
    first
}

impl<'a> Codes<'a> {
    fn split_off_first(&mut self, count: usize, block: usize) -> Self {
        Self { codes: cut(&mut self.codes, count), scales: cut(&mut self.scales, count / block) }
    }

    fn check(
        &self,
        [codes, scales]: [&'static str; 2],
        expected: usize,
        block: usize,
    ) -> Result<()> {
        if !BLOCKS.contains(&block) || !expected.is_multiple_of(block) {
            return Err(Error::Invalid(format!(
                "blocks of {block} of {expected} entries; they must have 256, 128 or 64, all of them full"
            )));
        }
        check_length(codes, self.codes.len(), expected)?;
        check_length(scales, self.scales.len(), expected / block)
    }
}

fn check_length(name: &'static str, actual: usize, expected: usize) -> Result<()> {
    let error = Error::Length { name, actual, axes: "the parameter's", expected };
    if actual == expected { Ok(()) } else { Err(error) }
}

impl Parameter<'_> {
    fn check(&self, expected: usize) -> Result<()> {
        const MU: [&str; 2] = ["mu", "mu_scales"];
        check_length("grads", self.grads.len(), expected)?;
        match &self.moments {
            Moments::F32([mu, nu]) => {
                check_length("mu", mu.len(), expected)?;
                check_length("nu", nu.len(), expected)
            }
            Moments::Codes([mu, nu], block) => {
                mu.check(MU, expected, *block)?;
                nu.check(["nu", "nu_scales"], expected, *block)
            }
            Moments::Lion(mu, block) => mu.check(MU, expected, *block),
        }
    }
}

/// A part of a parameter.
struct Tile<'a> {
    scalars: Scalars,
    /// The place of its first entry in the parameter.
    first: usize,
    of: Parameter<'a>,
}

impl<'a> Tile<'a> {
    /// The first [`TILE`] entries; the rest stay.
    fn split_off_first(&mut self) -> Self {
        let Parameter { number, decays, grads, params, moments } = &mut self.of;
        let moments = match moments {
            Moments::F32(both) => Moments::F32(both.each_mut().map(|one| cut(one, TILE))),
            Moments::Codes(both, block) => {
                let codes = both.each_mut().map(|one| one.split_off_first(TILE, *block));
                Moments::Codes(codes, *block)
            }
            Moments::Lion(one, block) => Moments::Lion(one.split_off_first(TILE, *block), *block),
        };
        let (first, rest) = halves(*grads);
        *grads = rest;
        let (number, decays) = (*number, *decays);
        let params = params.split_off_first(TILE);
        let of = Parameter { number, decays, grads: first, params, moments };
        let tile = Self { scalars: self.scalars, first: self.first, of };
        self.first += TILE;
        tile
    }
}

/// The first [`TILE`] entries, and the rest.
fn halves(grads: Grads<'_>) -> (Grads<'_>, Grads<'_>) {
    fn both<'a, T>(all: &'a [T], make: fn(&'a [T]) -> Grads<'a>) -> (Grads<'a>, Grads<'a>) {
        let (first, rest) = all.split_at(TILE);
        (make(first), make(rest))
    }
    match grads {
        Grads::F32(all) => both(all, Grads::F32),
        Grads::Bf16(all) => both(all, Grads::Bf16),
        Grads::F16(all) => both(all, Grads::F16),
    }
}

/// A step of a tile.
struct Step<'a, 'b>(&'a mut Tile<'b>);

/// Of a piece, in f32.
struct Piece {
    grads: [Chunk; PIECE / CHUNK],
    params: [Chunk; PIECE / CHUNK],
    moments: [[Chunk; PIECE / CHUNK]; 2],
}

impl Job for Step<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Tile { scalars, first, of } = self.0;
        if let (Grads::F32(grads), Params::F32(params), Moments::F32(moments)) =
            (of.grads, &mut of.params, &mut of.moments)
        {
            step_in_f32(scalars, of.decays, grads, params, moments);
            return;
        }
        let mut piece = Piece {
            grads: [[0.0; CHUNK]; PIECE / CHUNK],
            params: [[0.0; CHUNK]; PIECE / CHUNK],
            moments: [[[0.0; CHUNK]; PIECE / CHUNK]; 2],
        };
        let length = of.params.len();
        for start in (0..length).step_by(PIECE) {
            let count = PIECE.min(length - start);
            piece.load(of, start, count);
            let is_lion = matches!(of.moments, Moments::Lion(..));
            for chunk in 0..count.div_ceil(CHUNK) {
                if is_lion {
                    piece.step_of_lion(scalars, of.decays, chunk);
                } else {
                    piece.step(scalars, of.decays, chunk);
                }
            }
            piece.store_moments(&mut of.moments, start, count);
            piece.store_params(scalars, of, *first, start, count);
        }
    }
}

const VALUES: [[f32; 256]; 2] = [table(true), table(false)];

impl Piece {
    #[inline(always)]
    fn load(&mut self, of: &Parameter<'_>, start: usize, count: usize) {
        let Self { grads, params, moments } = self;
        match of.grads {
            Grads::F32(all) => copy(&all[start..][..count], grads),
            Grads::Bf16(all) => widen(&all[start..][..count], grads),
            Grads::F16(all) => {
                all[start..][..count].convert_to_f32_slice(&mut grads.as_flattened_mut()[..count]);
            }
        }
        match &of.params {
            Params::F32(all) => copy(&all[start..][..count], params),
            Params::Bf16(all) => widen(&all[start..][..count], params),
            Params::F16(all) => {
                all[start..][..count].convert_to_f32_slice(&mut params.as_flattened_mut()[..count]);
            }
        }
        match &of.moments {
            Moments::F32(both) => {
                for (from, to) in both.iter().zip(moments) {
                    copy(&from[start..][..count], to);
                }
            }
            Moments::Codes(both, block) => {
                for ((from, to), values) in both.iter().zip(moments).zip(&VALUES) {
                    decode(from, values, *block, start, count, to);
                }
            }
            Moments::Lion(one, block) => {
                decode(one, &VALUES[0], *block, start, count, &mut moments[0]);
            }
        }
    }

    #[inline(always)]
    fn step(&mut self, s: &Scalars, decays: bool, chunk: usize) {
        let decay = if decays { s.weight_decay } else { 0.0 };
        let Self { grads, params, moments: [mu, nu] } = self;
        let (grads, params) = (&grads[chunk], &mut params[chunk]);
        let (mu, nu) = (&mut mu[chunk], &mut nu[chunk]);
        for index in 0..CHUNK {
            let entry = [params[index], mu[index], nu[index]];
            [params[index], mu[index], nu[index]] = stepped(s, decay, grads[index], entry);
        }
    }

    #[inline(always)]
    fn step_of_lion(&mut self, s: &Scalars, decays: bool, chunk: usize) {
        let decay = if decays { s.weight_decay } else { 0.0 };
        let (params, mu) = (&mut self.params[chunk], &mut self.moments[0][chunk]);
        for ((grad, p), mu) in self.grads[chunk].iter().zip(params).zip(mu) {
            [*p, *mu] = stepped_by_lion(s, decay, *grad, [*p, *mu]);
        }
    }

    #[inline(always)]
    fn store_moments(&self, to: &mut Moments<'_>, start: usize, count: usize) {
        match to {
            Moments::F32(both) => {
                for (from, to) in self.moments.iter().zip(both) {
                    to[start..][..count].copy_from_slice(&from.as_flattened()[..count]);
                }
            }
            Moments::Codes([mu, nu], block) => {
                encode::<true>(&self.moments[0], mu, *block, start, count);
                encode::<false>(&self.moments[1], nu, *block, start, count);
            }
            Moments::Lion(mu, block) => {
                encode::<true>(&self.moments[0], mu, *block, start, count);
            }
        }
    }

    #[inline(always)]
    fn store_params(
        &self,
        s: &Scalars,
        of: &mut Parameter<'_>,
        first: usize,
        start: usize,
        count: usize,
    ) {
        let from = &self.params.as_flattened()[..count];
        match &mut of.params {
            Params::F32(all) => all[start..][..count].copy_from_slice(from),
            Params::F16(all) => all[start..][..count].convert_from_f32_slice(from),
            Params::Bf16(all) => {
                let to = &mut all[start..][..count];
                if s.rounds {
                    let bits = random((first + start) / GROUP, of.number, s);
                    for ((to, x), bits) in to.iter_mut().zip(from).zip(&bits) {
                        *to = round_stochastically(*x, *bits);
                    }
                } else {
                    for (to, x) in to.iter_mut().zip(from) {
                        *to = round_to_nearest(*x);
                    }
                }
            }
        }
    }
}

/// The parameter and the moments after a step.
#[inline(always)]
fn stepped(s: &Scalars, decay: f32, grad: f32, [p, mu, nu]: [f32; 3]) -> [f32; 3] {
    let g = grad * s.clip;
    let mu = s.rest1 * g + s.b1 * mu;
    let nu = s.rest2 * (g * g) + s.b2 * nu;
    let below = (nu * s.nu_scale + s.eps_root).sqrt() + s.eps;
    let step = (s.mu_scale * mu + s.grad_scale * g) / below;
    [p - s.learning_rate * (step + decay * p), mu, nu]
}

/// The parameter and the moment after a step of Lion.
#[inline(always)]
fn stepped_by_lion(s: &Scalars, decay: f32, grad: f32, [p, mu]: [f32; 2]) -> [f32; 2] {
    let g = grad * s.clip;
    let along = s.rest1 * g + s.b1 * mu;
    // 0 and NaN stay.
    let step = if along > 0.0 { 1.0 } else { along };
    let step = if along < 0.0 { -1.0 } else { step };
    [p - s.learning_rate * (step + decay * p), s.rest2 * g + s.b2 * mu]
}

/// A step of a tile that is all in f32.
#[inline(always)]
fn step_in_f32(
    s: &Scalars,
    decays: bool,
    grads: &[f32],
    params: &mut [f32],
    [mu, nu]: &mut [&mut [f32]; 2],
) {
    let (s, decay) = (*s, if decays { s.weight_decay } else { 0.0 });
    let moments = mu.iter_mut().zip(nu.iter_mut());
    for ((grad, p), (mu, nu)) in grads.iter().zip(params).zip(moments) {
        [*p, *mu, *nu] = stepped(&s, decay, *grad, [*p, *mu, *nu]);
    }
}

#[inline(always)]
fn copy(from: &[f32], to: &mut [Chunk; PIECE / CHUNK]) {
    to.as_flattened_mut()[..from.len()].copy_from_slice(from);
}

#[inline(always)]
fn widen(from: &[bf16], to: &mut [Chunk; PIECE / CHUNK]) {
    for (from, to) in from.iter().zip(to.as_flattened_mut()) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// `x` in bfloat16, a tie to even.
#[inline(always)]
fn round_to_nearest(x: f32) -> bf16 {
    let bits = x.to_bits();
    let high = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    bf16::from_bits(if x.is_nan() { 0x7fc0 } else { high as u16 })
}

/// Random bits of a piece, 16 of each entry.
#[inline(always)]
fn random(group: usize, number: u32, s: &Scalars) -> [u32; PIECE] {
    const GROUPS: usize = PIECE / GROUP;
    let mut words = [[0; GROUPS]; 4];
    for index in 0..GROUPS {
        let drawn = philox((group + index) as u32, number, s.step, s.seed);
        for (words, drawn) in words.iter_mut().zip(drawn) {
            words[index] = drawn;
        }
    }
    let mut bits = [0; PIECE];
    for (index, bits) in bits.chunks_exact_mut(GROUP).enumerate() {
        for (place, bits) in bits.iter_mut().enumerate() {
            *bits = words[place / 2][index] >> (place % 2 * 16) & 0xffff;
        }
    }
    bits
}

/// The entries of a piece's blocks.
#[inline(always)]
fn decode(
    from: &Codes<'_>,
    values: &[f32; 256],
    block: usize,
    start: usize,
    count: usize,
    to: &mut [Chunk; PIECE / CHUNK],
) {
    let codes = from.codes[start..][..count].chunks_exact(CHUNK);
    for (index, (codes, to)) in codes.zip(to).enumerate() {
        let scale = from.scales[(start + index * CHUNK) / block];
        for (code, to) in codes.iter().zip(to) {
            *to = values[usize::from(*code)] * scale;
        }
    }
}

/// Writes codes and scales of a piece's blocks.
#[inline(always)]
fn encode<const SIGNED: bool>(
    from: &[Chunk; PIECE / CHUNK],
    to: &mut Codes<'_>,
    block: usize,
    start: usize,
    count: usize,
) {
    let scales = &mut to.scales[start / block..][..count / block];
    let codes = &mut to.codes[start..][..count];
    let blocks = from.chunks(block / CHUNK).zip(codes.chunks_exact_mut(block)).zip(scales);
    for ((from, codes), scale) in blocks {
        // Bits of |x| are in the order of |x|, and NaN's are the largest.
        let most =
            |chunk: &Chunk| chunk.iter().fold(0, |most, x| most.max(x.to_bits() & MAGNITUDE));
        *scale = f32::from_bits(from.iter().map(most).fold(0, u32::max));
        let inverse = if *scale >= f32::MIN_POSITIVE { 1.0 / *scale } else { 0.0 };
        for (from, codes) in from.iter().zip(codes.chunks_exact_mut(CHUNK)) {
            for (x, code) in from.iter().zip(codes) {
                *code = nearest::<SIGNED>(x * inverse);
            }
        }
    }
}

const MAGNITUDE: u32 = 0x7fff_ffff;

/// The code nearest to `y` of [-1, 1]; NaN has the code of 1.
#[inline(always)]
fn nearest<const SIGNED: bool>(y: f32) -> u8 {
    const OF: [[Decade; DECADES]; 2] = [decades(false), decades(true)];
    let decades = &OF[usize::from(SIGNED)];
    let magnitude = y.abs();
    let magnitude = if magnitude <= 1.0 { magnitude } else { 1.0 };
    let Decade { mut factor, mut offset, mut parts, .. } = decades[0];
    for index in 1..DECADES {
        let is_above = magnitude >= decades[index - 1].end;
        factor = if is_above { decades[index].factor } else { factor };
        offset = if is_above { decades[index].offset } else { offset };
        parts = if is_above { decades[index].parts } else { parts };
    }
    let lowest = if SIGNED { parts } else { parts - 1.0 };
    let steps = magnitude * factor + offset;
    let steps = if steps >= lowest { steps } else { lowest };
    let highest = lowest + parts - 1.0;
    // SAFETY: at most 256, and at least 0.
    let steps = unsafe { steps.to_int_unchecked::<i32>().min(highest.to_int_unchecked()) };
    let steps = if magnitude >= least(SIGNED) { steps } else { 0 };
    let top = if SIGNED { 128 } else { 255 };
    let steps = if magnitude >= decades[DECADES - 1].end { top } else { steps };
    let zero = i32::from(zero_code(SIGNED));
    // -1 is not in the table.
    let code = if SIGNED && y < 0.0 { zero - steps.min(top - 1) } else { zero + steps };
    code as u8
}

#[cfg(test)]
mod tests {
    use xentile::optimizers::WORDS;

    use super::*;

    #[test]
    fn lion_steps_by_the_sign() {
        let s = Scalars {
            learning_rate: 0.01,
            b1: 0.9,
            rest1: 0.1,
            b2: 0.999,
            rest2: 0.001,
            clip: 1.0,
            ..Scalars::from_words(&[0; WORDS])
        };
        // The sign of 0.1 g + 0.9 mu.
        let step = |grad, mu| stepped_by_lion(&s, 0.0, grad, [1.0, mu]);
        assert_eq!(step(2.0, -1.0), [1.01, 0.001 * 2.0 - 0.999]);
        assert_eq!(step(10.0, -1.0)[0], 0.99);
        assert_eq!(step(0.0, 0.0), [1.0, 0.0]);
        assert!(step(f32::NAN, 0.0).iter().all(|x| x.is_nan()));
        assert_eq!(stepped_by_lion(&s, 0.5, 0.0, [1.0, 0.0]), [0.995, 0.0]);
    }

    /// Codes are those of the nearest values, at the values and beside the midpoints.
    #[test]
    fn codes_are_the_nearest() {
        fn check<const SIGNED: bool>() {
            let values = table(SIGNED);
            for (code, pair) in values.windows(2).enumerate() {
                let middle = f32::midpoint(pair[0], pair[1]);
                let beside = middle.abs() * 2e-6;
                let found = [pair[0], middle - beside, middle + beside].map(nearest::<SIGNED>);
                assert_eq!(found.map(usize::from), [code, code, code + 1], "{middle}");
            }
            assert_eq!([1.0, f32::NAN, f32::INFINITY].map(nearest::<SIGNED>), [255; 3]);
        }
        check::<true>();
        check::<false>();
    }
}

//! Steps of AdamW and Lion, with moments in f32 or in 8 bits: the contract of every backend.
//!
//! Of a gradient g, a parameter p and moments mu and nu of one entry, all in f32, a step with [`Scalars`] is
//!
//! - AdamW (Loshchilov and Hutter, 2019): `g' = clip g`, `mu' = rest1 g' + b1 mu`, `nu' = rest2 g'^2 + b2 nu`,
//!   `s = (mu_scale mu' + grad_scale g') / (sqrt(nu_scale nu' + eps_root) + eps)`;
//! - Lion (Chen et al., 2023): `s = sign(rest1 g' + b1 mu)`, `mu' = rest2 g' + b2 mu`;
//! - both: `p' = p - learning_rate (s + weight_decay p)`, rounded once to the parameter's dtype. bfloat16 may be
//!   rounded [stochastically](round_stochastically), by bits that depend on seed, step, array and index alone.
//!
//! # Moments in 8 bits
//!
//! A moment is cut into [blocks](BLOCKS) of consecutive entries of the last axis, each with a scale in f32, its
//! largest |entry|. An entry over its scale is stored as the index of the nearest value of a [`table`] of 256, the
//! dynamic code of Dettmers et al. (2022): mu by the signed one, nu by the other. Beside a midpoint it may be
//! either neighbour. A block of zeros has the scale 0 and the code of 0. A block with NaN has the scale NaN, and
//! one with infinity the scale infinity; its codes may be any, and none of its entries is finite from then on.

#[cfg(feature = "operation")]
pub mod muon;
#[cfg(feature = "operation")]
pub mod operation;
#[cfg(feature = "operation")]
mod reference;
#[cfg(feature = "operation")]
mod step;

use half::bf16;

/// Extents of blocks, the preferred first.
pub const BLOCKS: [usize; 3] = [256, 128, 64];

/// Words that [`Scalars`] come in.
pub const WORDS: usize = 16;

/// The formula of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// AdamW.
    Adam,
    /// Lion.
    Lion,
}

/// The scalars of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // the formulas above have them
pub struct Scalars {
    pub learning_rate: f32,
    pub b1: f32,
    pub rest1: f32,
    pub b2: f32,
    pub rest2: f32,
    pub eps: f32,
    pub eps_root: f32,
    pub weight_decay: f32,
    pub mu_scale: f32,
    pub grad_scale: f32,
    pub nu_scale: f32,
    pub clip: f32,
    /// Counted from 1.
    pub step: u32,
    pub seed: u32,
    /// Whether bfloat16 parameters are rounded stochastically.
    pub rounds: bool,
}

impl Scalars {
    /// The scalars in words of 32 bits, in the order of the fields.
    #[must_use]
    pub fn from_words(words: &[i32; WORDS]) -> Self {
        let words = words.map(i32::cast_unsigned);
        let at = |index: usize| f32::from_bits(words[index]);
        Self {
            learning_rate: at(0),
            b1: at(1),
            rest1: at(2),
            b2: at(3),
            rest2: at(4),
            eps: at(5),
            eps_root: at(6),
            weight_decay: at(7),
            mu_scale: at(8),
            grad_scale: at(9),
            nu_scale: at(10),
            clip: at(11),
            step: words[12],
            seed: words[13],
            rounds: words[14] != 0,
        }
    }
}

/// Decades of a code: the decade i ends at `10^(i - 6)`.
pub const DECADES: usize = 7;

/// The part of a code between two powers of ten: `parts` centres of equal parts, the values below `end`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decade {
    /// The number of centres, a power of two.
    pub parts: f32,
    /// The midpoint between the last centre and the value above it.
    pub end: f32,
    /// An entry y of the decade has the magnitude `floor(y factor + offset)`, its code's distance from that of 0.
    pub factor: f32,
    /// See `factor`.
    pub offset: f32,
}

const POWERS: [f64; DECADES] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

const fn parts(signed: bool, decade: usize) -> usize {
    1 << (decade + !signed as usize)
}

/// The decades of a code, the lowest first.
#[must_use]
pub const fn decades(signed: bool) -> [Decade; DECADES] {
    let mut found = [Decade { parts: 0.0, end: 0.0, factor: 0.0, offset: 0.0 }; DECADES];
    let mut decade = 0;
    while decade < DECADES {
        let (parts, power) = (parts(signed, decade) as f64, POWERS[decade]);
        let is_last = decade + 1 == DECADES;
        let end = if is_last { 1.0 - 0.225 / parts } else { power * (1.0 + 0.9 / parts) };
        // parts - 1 centres are below the decade's first, or one less of the unsigned code.
        let offset = parts * 8.0 / 9.0 - if signed { 0.0 } else { 1.0 };
        found[decade] = Decade {
            parts: parts as f32,
            end: end as f32,
            factor: (parts / power / 0.9) as f32,
            offset: offset as f32,
        };
        decade += 1;
    }
    found
}

/// The least magnitude that is not stored as 0: half the smallest value.
#[must_use]
pub const fn least(signed: bool) -> f32 {
    (1e-6 * (0.1 + 0.45 / parts(signed, 0) as f64) / 2.0) as f32
}

/// The code of 0.
#[must_use]
pub const fn zero_code(signed: bool) -> u8 {
    if signed { 127 } else { 0 }
}

/// The 256 values of a code, in increasing order.
#[must_use]
pub const fn table(signed: bool) -> [f32; 256] {
    let mut values = [0.0; 256];
    let zero = zero_code(signed) as usize;
    let mut magnitude = 1;
    let mut decade = 0;
    while decade < DECADES {
        let parts = parts(signed, decade);
        let mut k = 0;
        while k < parts {
            let fraction = 0.1 + 0.9 * (k as f64 + 0.5) / parts as f64;
            let value = (POWERS[decade] * fraction) as f32;
            values[zero + magnitude] = value;
            if signed {
                values[zero - magnitude] = -value;
            }
            magnitude += 1;
            k += 1;
        }
        decade += 1;
    }
    values[zero + magnitude] = 1.0;
    values
}

/// Entries that one counter of [`philox`] has bits for.
pub const GROUP: usize = 8;

/// The four words of Philox4x32-10 (Salmon et al., 2011) for the counter (group, array, step, 0) and the key
/// (seed, 0). Entry k of an array, in row-major order, takes half `k % 2` of word `k % 8 / 2` of group `k / 8`.
#[inline(always)]
#[must_use]
pub fn philox(group: u32, array: u32, step: u32, seed: u32) -> [u32; 4] {
    const MULTIPLIERS: [u64; 2] = [0xd251_1f53, 0xcd9e_8d57];
    const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
    let [mut a, mut b, mut c, mut d] = [group, array, step, 0];
    let [mut first, mut second] = [seed, 0_u32];
    for _ in 0..10 {
        let [one, other] = [u64::from(a) * MULTIPLIERS[0], u64::from(c) * MULTIPLIERS[1]];
        let high = [one, other].map(|product| (product >> 32) as u32);
        [a, b, c, d] = [high[1] ^ b ^ first, other as u32, high[0] ^ d ^ second, one as u32];
        first = first.wrapping_add(WEYL[0]);
        second = second.wrapping_add(WEYL[1]);
    }
    [a, b, c, d]
}

/// `x` in bfloat16, rounded away from 0 where 16 random bits reach the rest. NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn round_stochastically(x: f32, random: u32) -> bf16 {
    let high = x.to_bits().wrapping_add(random) >> 16;
    bf16::from_bits(if x.is_nan() { 0x7fc0 } else { high as u16 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_in_order_and_decades_lead_to_the_nearest_value() {
        for signed in [true, false] {
            let values = table(signed);
            assert!(values.windows(2).all(|pair| pair[0] < pair[1]));
            assert_eq!((values[usize::from(zero_code(signed))], values[255]), (0.0, 1.0));
            for (code, value) in values.into_iter().enumerate().skip(1) {
                let of = decades(signed).into_iter().find(|decade| value < decade.end);
                let Some(Decade { factor, offset, .. }) = of else { break };
                let magnitude = code - usize::from(zero_code(signed)).min(code);
                if value > 0.0 {
                    assert_eq!((value * factor + offset) as usize, magnitude, "{value}");
                }
            }
        }
    }

    /// The vector of Random123's `kat_vectors` for philox4x32 with 10 rounds, and its cut into halves.
    #[test]
    fn philox_has_a_known_answer() {
        assert_eq!(philox(0, 0, 0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let x = f32::from_bits(0x3f80_8000);
        assert_eq!(round_stochastically(x, 0x7fff), bf16::from_f32(1.0));
        assert_eq!(round_stochastically(x, 0x8000), bf16::from_bits(0x3f81));
        assert!(round_stochastically(f32::NAN, 0xffff).is_nan());
    }
}

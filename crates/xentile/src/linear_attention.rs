//! Linear attention and the gated delta rule: the contract of every backend, and its float64 reference.
//!
//! For each sequence and head, with q and k `[T, K]` and v `[T, V]` of dtype E (f32, bf16 or f16), the logarithm
//! of the decay g `[T]`, at most 0, and a state S `[K, V]` in f32:
//!
//! - linear attention (Dao and Gu, 2024): `S_t = exp(g_t) S_{t-1} + k_t v_t'`;
//! - the gated delta rule (Yang, Kautz and Hatamizadeh, 2024), with b `[T]`:
//!   `S_t = exp(g_t) (I - b_t k_t k_t') S_{t-1} + b_t k_t v_t'`;
//! - both: `o_t = scale S_t' q_t`, rounded once to E.
//!
//! q and k have H heads, and v, g, b and o H' heads, a multiple of H: head h of v has head h / (H' / H) of q and
//! k. Sums are in f32. The backward pass gives the gradients of all arrays; dq, dk and dv are rounded once to E,
//! dg and db are f32.
//!
//! Backends run up to [`CHUNK`] tokens at a time; the reference is the recurrence, token by token.

#[cfg(feature = "operation")]
pub mod operation;

use crate::error::check_length;
use crate::shape::is_addressable;
use crate::{Error, Result};

/// Tokens of a chunk, at most.
pub const CHUNK: usize = 64;

/// The options and the shape of B sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearAttention {
    /// Whether it is the gated delta rule.
    pub delta: bool,
    /// A factor of o, finite.
    pub scale: f32,
    /// B.
    pub sequences: usize,
    /// T.
    pub tokens: usize,
    /// H, heads of q and k.
    pub key_heads: usize,
    /// H', heads of v.
    pub heads: usize,
    /// K, columns of q and k.
    pub keys: usize,
    /// V, columns of v.
    pub values: usize,
}

impl LinearAttention {
    /// Checks the options, and that memory can address all arrays.
    ///
    /// # Errors
    /// A scale that is not finite, heads that cannot share keys, or too many elements.
    pub fn validate(&self) -> Result<()> {
        let Self { scale, sequences, tokens, key_heads, heads, keys, values, .. } = *self;
        if !scale.is_finite() {
            let requirement = "finite";
            return Err(Error::Option { name: "scale", value: scale.into(), requirement });
        }
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            let requirement = "a multiple of H, which is at least 1";
            return Err(Error::Option { name: "H'", value: heads as f64, requirement });
        }
        let (rows, columns) = (sequences.max(1), keys.max(values).max(1));
        let chunks = tokens.div_ceil(CHUNK).max(1);
        // Four bytes is the widest element. The longest array has states, or a row a token.
        if !is_addressable([4, rows, heads.max(1), tokens.max(1), columns])
            || !is_addressable([4, rows, heads.max(1), chunks, keys.max(1), values.max(1)])
        {
            let requirement = "its arrays must fit the address space";
            return Err(Error::Shape { tokens, vocab: values, requirement });
        }
        Ok(())
    }

    /// Heads of v that share a head of q and k.
    #[must_use]
    pub fn shared(&self) -> usize {
        self.heads / self.key_heads
    }

    /// Elements of a state.
    #[must_use]
    pub fn state(&self) -> usize {
        self.keys * self.values
    }

    /// Checks the length of a buffer called `name` with `axes`, of so many elements for each token of a sequence.
    ///
    /// # Errors
    /// Another length.
    pub fn check(
        &self,
        name: &'static str,
        length: usize,
        axes: &'static str,
        each: usize,
    ) -> Result<()> {
        check_length(name, length, axes, self.sequences * self.tokens * each)
    }

    /// Checks the length of a buffer called `name` of `count` states of each head `[B, H', .., K, V]`.
    ///
    /// # Errors
    /// Another length.
    pub fn check_states(&self, name: &'static str, length: usize, count: usize) -> Result<()> {
        let expected = self.sequences * self.heads * count * self.state();
        check_length(name, length, "[B, H', N, K, V]", expected)
    }
}

/// One head in float64.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// A factor of o.
    pub scale: f64,
    /// K and V.
    pub columns: [usize; 2],
    /// `[T, K]`.
    pub q: &'a [f64],
    /// `[T, K]`.
    pub k: &'a [f64],
    /// `[T, V]`.
    pub v: &'a [f64],
    /// `[T]`.
    pub g: &'a [f64],
    /// `[T]` for the delta rule.
    pub b: Option<&'a [f64]>,
    /// The state before the first token, `[K, V]`.
    pub state: &'a [f64],
}

/// Gradients of one head in float64.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// `[T, K]`.
    pub q: Vec<f64>,
    /// `[T, K]`.
    pub k: Vec<f64>,
    /// `[T, V]`.
    pub v: Vec<f64>,
    /// `[T]`.
    pub g: Vec<f64>,
    /// `[T]`; zeros without the delta rule.
    pub b: Vec<f64>,
    /// `[K, V]`.
    pub state: Vec<f64>,
}

/// A token of a head, with what its step computes on the way.
pub(crate) struct Step<'a> {
    pub(crate) q: &'a [f64],
    pub(crate) k: &'a [f64],
    pub(crate) decay: f64,
    /// The factor of what is written: b, or 1.
    pub(crate) strength: f64,
    /// `v - exp(g) S_{t-1}' k`; v without the delta rule.
    pub(crate) unseen: Vec<f64>,
}

impl<'a> Head<'a> {
    /// T.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.g.len()
    }

    /// The step of token `t` from the state before it.
    pub(crate) fn step(&self, t: usize, state: &[f64]) -> Step<'a> {
        let [keys, values] = self.columns;
        let (q, k) = (&self.q[t * keys..][..keys], &self.k[t * keys..][..keys]);
        let (decay, v) = (self.g[t].exp(), &self.v[t * values..][..values]);
        let mut unseen = v.to_vec();
        if self.b.is_some() {
            for (row, k) in state.chunks_exact(values.max(1)).zip(k) {
                add_row(&mut unseen, row, -decay * k);
            }
        }
        Step { q, k, decay, strength: self.b.map_or(1.0, |b| b[t]), unseen }
    }

    /// Moves `state` over a token.
    pub(crate) fn advance(&self, step: &Step<'_>, state: &mut [f64]) {
        for (row, k) in state.chunks_exact_mut(self.columns[1].max(1)).zip(step.k) {
            row.iter_mut().for_each(|x| *x *= step.decay);
            add_row(row, &step.unseen, step.strength * k);
        }
    }

    /// o `[T, V]`, and the state after the last token.
    #[must_use]
    pub fn forward(&self) -> (Vec<f64>, Vec<f64>) {
        let values = self.columns[1];
        let (mut o, mut state) = (vec![0.0; self.tokens() * values], self.state.to_vec());
        for (t, o) in o.chunks_exact_mut(values.max(1)).enumerate() {
            let step = self.step(t, &state);
            self.advance(&step, &mut state);
            for (row, q) in state.chunks_exact(values.max(1)).zip(step.q) {
                add_row(o, row, self.scale * q);
            }
        }
        (o, state)
    }

    /// The gradients for cotangents of o `[T, V]` and of the last state `[K, V]`.
    #[must_use]
    pub fn backward(&self, cotangent: &[f64], dstate: &[f64]) -> Gradients {
        let (tokens, [keys, values]) = (self.tokens(), self.columns);
        let mut found = Gradients {
            q: vec![0.0; tokens * keys],
            k: vec![0.0; tokens * keys],
            v: vec![0.0; tokens * values],
            g: vec![0.0; tokens],
            b: vec![0.0; tokens],
            state: dstate.to_vec(),
        };
        self.reversed(|t, step, before, after| {
            let (cotangent, dstate) = (&cotangent[t * values..][..values], &mut found.state);
            let mut dnew = vec![0.0; values];
            for (row, ((after, dstate), (q, k))) in (after.chunks_exact(values.max(1)))
                .zip(dstate.chunks_exact_mut(values.max(1)))
                .zip(step.q.iter().zip(step.k))
                .enumerate()
            {
                found.q[t * keys + row] = self.scale * dot(after, cotangent);
                add_row(dstate, cotangent, self.scale * q);
                found.k[t * keys + row] = step.strength * dot(dstate, &step.unseen);
                add_row(&mut dnew, dstate, *k);
            }
            if self.b.is_some() {
                found.b[t] = dot(&dnew, &step.unseen);
                dnew.iter_mut().for_each(|x| *x *= step.strength);
                for (row, (before, dstate)) in before
                    .chunks_exact(values.max(1))
                    .zip(dstate.chunks_exact_mut(values.max(1)))
                    .enumerate()
                {
                    found.k[t * keys + row] -= step.decay * dot(before, &dnew);
                    add_row(dstate, &dnew, -step.k[row]);
                }
            }
            found.g[t] = step.decay * dot(dstate, before);
            dstate.iter_mut().for_each(|x| *x *= step.decay);
            found.v[t * values..][..values].copy_from_slice(&dnew);
        });
        found
    }

    /// Calls `body` with every token from the last to the first: its number, its step, and the states before and
    /// after it.
    pub(crate) fn reversed(&self, mut body: impl FnMut(usize, &Step<'_>, &[f64], &[f64])) {
        let (tokens, mut state, mut saved) = (self.tokens(), self.state.to_vec(), Vec::new());
        for t in 0..tokens {
            if t % CHUNK == 0 {
                saved.push(state.clone());
            }
            self.advance(&self.step(t, &state), &mut state);
        }
        for (chunk, first) in saved.into_iter().enumerate().rev() {
            let (start, end) = (chunk * CHUNK, tokens.min((chunk + 1) * CHUNK));
            let mut states = vec![first];
            let mut steps = Vec::new();
            for t in start..end {
                let mut state = states[t - start].clone();
                let step = self.step(t, &state);
                self.advance(&step, &mut state);
                states.push(state);
                steps.push(step);
            }
            for t in (start..end).rev() {
                let at = t - start;
                body(t, &steps[at], &states[at], &states[at + 1]);
            }
        }
    }
}

/// Adds `factor * row` to `to`.
fn add_row(to: &mut [f64], row: &[f64], factor: f64) {
    to.iter_mut().zip(row).for_each(|(to, x)| *to += factor * x);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values worked out by hand.
    #[test]
    fn a_sequence_by_hand() {
        let (ones, half) = ([1.0; 4], [0.5_f64.ln(); 4]);
        let head = Head {
            scale: 2.0,
            columns: [1, 1],
            q: &ones,
            k: &ones,
            v: &ones,
            g: &half,
            b: None,
            state: &[0.0],
        };
        assert_eq!(head.forward(), (vec![2.0, 3.0, 3.5, 3.75], vec![1.875]));
        let delta = Head { scale: 1.0, g: &[0.0; 4], b: Some(&[0.5; 4]), ..head };
        assert_eq!(delta.forward(), (vec![0.5, 0.75, 0.875, 0.9375], vec![0.9375]));
        assert_eq!(Head { state: &[8.0], ..head }.forward().0, [10.0, 7.0, 5.5, 4.75]);
        // o_t = 2 q_t (v_t + v_{t-1} / 2 + ..)
        assert_eq!(head.backward(&ones, &[0.0]).v, [3.75, 3.5, 3.0, 2.0]);
    }

    #[test]
    fn gradients_are_slopes() {
        let (tokens, columns) = (70, [3, 2]);
        let wave = |count: usize, phase: f64| -> Vec<f64> {
            (0..count).map(|i| (1.3 * i as f64 + phase).sin()).collect()
        };
        let arrays = [
            wave(tokens * 3, 0.1),
            wave(tokens * 3, 0.2),
            wave(tokens * 2, 0.3),
            wave(tokens, 0.4).iter().map(|x| 0.1 * (x - 1.0)).collect(),
            wave(tokens, 0.5).iter().map(|x| 0.4 + 0.2 * x).collect(),
            wave(6, 0.6),
        ];
        let (cotangent, dstate) = (wave(tokens * 2, 0.7), wave(6, 0.8));
        for is_delta in [false, true] {
            let of = |arrays: &[Vec<f64>; 6]| {
                let [q, k, v, g, b, state] = arrays;
                let b = is_delta.then_some(&b[..]);
                let head = Head { scale: 0.7, columns, q, k, v, g, b, state };
                let (o, last) = head.forward();
                let loss = dot(&o, &cotangent) + dot(&last, &dstate);
                (loss, head.backward(&cotangent, &dstate))
            };
            let Gradients { q, k, v, g, b, state } = of(&arrays).1;
            for (index, gradient) in [q, k, v, g, b, state].iter().enumerate() {
                for (place, found) in gradient.iter().enumerate().step_by(5) {
                    let [above, below] = [1e-5, -1e-5].map(|step| {
                        let mut moved = arrays.clone();
                        moved[index][place] += step;
                        of(&moved).0
                    });
                    let slope = (above - below) / 2e-5;
                    let off = (slope - found).abs() / (1.0 + slope.abs());
                    assert!(off < 1e-7, "{is_delta} {index} {place}: {found}, {slope}");
                }
            }
        }
    }

    #[test]
    fn shapes_that_no_kernel_takes_are_refused() {
        let right = LinearAttention {
            delta: true,
            scale: 1.0,
            sequences: 1,
            tokens: 5,
            key_heads: 2,
            heads: 4,
            keys: 3,
            values: 7,
        };
        assert_eq!((right.validate(), right.shared(), right.state()), (Ok(()), 2, 21));
        for (wrong, message) in [
            (LinearAttention { heads: 3, ..right }, "H' is 3; it must be a multiple of H"),
            (LinearAttention { key_heads: 0, ..right }, "H' is 4; it must be a multiple of H"),
            (LinearAttention { scale: f32::NAN, ..right }, "scale is NaN; it must be finite"),
            (LinearAttention { tokens: usize::MAX / 8, ..right }, "must fit the address space"),
        ] {
            let found = wrong.validate().unwrap_err().to_string();
            assert!(found.contains(message), "{found}");
        }
    }
}

//! The formulas of a chunk of tokens of one head, in f32.
//!
//! For a chunk with the state S `[K, V]` before it, and `E_ij` the product of the decays of tokens j + 1 to i where
//! i >= j, else 0:
//!
//! - `A_ij = b_i (k_i . k_j) E_ij` where i > j, else 0; the delta rule alone has it;
//! - `N = (I + A)^-1 b (v - E_i k S)`, the values that enter the state; v without the delta rule;
//! - `o = E_i q S + (q k' * E) N`, with `E_i` the product of the decays up to token i;
//! - `S' = E_C S + sum_j E_Cj k_j N_j'`.
//!
//! A chunk with NaN or inf runs token by token: 0 times these is NaN, so that products with what is masked would spread
//! them to earlier tokens.
//!
//! Products of decays need no exponentials of differences, and none of them is above 1. (Dao and Gu, 2024,
//! section 6; Yang, Kautz and Hatamizadeh, 2024, section 3.3.)

use super::multiply::{Left, Terms, dot, multiply, turn};
use crate::math::{EXP_SCALE, exp};
use crate::{Isa, Job, Simd};

/// Tokens of a chunk, whole chunks of vectors: few, as products within a chunk cost as many more as it has tokens.
pub(super) const TOKENS: usize = 32;

/// Tokens that are solved for at a time.
const SOLVED: usize = 8;

/// A chunk's arrays: rows of tokens have whole chunks of columns, which are 0 behind the last.
pub(super) struct Chunk {
    isa: Isa,
    delta: bool,
    /// K, and the columns of rows.
    keys: usize,
    columns: [usize; 2],
    /// Tokens; the rows behind them are 0.
    pub(super) count: usize,
    /// q, with the scale, and k.
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    /// g, which is replaced by decays.
    pub(super) g: Vec<f32>,
    pub(super) b: Vec<f32>,
    /// The cotangent of o.
    pub(super) cotangent: Vec<f32>,
    /// o, or dv.
    pub(super) o: Vec<f32>,
    pub(super) dq: Vec<f32>,
    pub(super) dk: Vec<f32>,
    pub(super) dg: Vec<f32>,
    pub(super) db: Vec<f32>,
    /// E, `[i, j]`.
    decays: Vec<f32>,
    /// The products of decays from the start, and to the end.
    from_start: Vec<f32>,
    to_end: Vec<f32>,
    /// k as `[K, i]`.
    turned_k: Vec<f32>,
    /// `q k' * E`.
    scores: Vec<f32>,
    /// `k k'`, and A with its sign changed.
    kk: Vec<f32>,
    lower: Vec<f32>,
    /// `v - E_i k S`, and N.
    unseen: Vec<f32>,
    new: Vec<f32>,
    dnew: Vec<f32>,
    /// q or k with a factor a row, v likewise.
    scaled_q: Vec<f32>,
    scaled_k: Vec<f32>,
    scaled_v: Vec<f32>,
    /// N as `[V, j]`, and states as `[V, K]`.
    turned_new: Vec<f32>,
    turned_state: Vec<f32>,
    turned_dstate: Vec<f32>,
    dscores: Vec<f32>,
}

impl Chunk {
    /// Arrays for heads of these columns, K and V, and of as many with those of whole chunks.
    pub(super) fn new(isa: Isa, delta: bool, keys: usize, columns: [usize; 2]) -> Self {
        let [key_width, value_width] = columns;
        let rows = |columns: usize| vec![0.0; TOKENS * columns];
        let state = || vec![0.0; key_width * value_width];
        Self {
            isa,
            delta,
            keys,
            columns,
            count: 0,
            q: rows(key_width),
            k: rows(key_width),
            v: rows(value_width),
            g: rows(1),
            b: rows(1),
            cotangent: rows(value_width),
            o: rows(value_width),
            dq: rows(key_width),
            dk: rows(key_width),
            dg: rows(1),
            db: rows(1),
            decays: rows(TOKENS),
            from_start: rows(1),
            to_end: rows(1),
            turned_k: rows(key_width),
            scores: rows(TOKENS),
            kk: rows(TOKENS),
            lower: rows(TOKENS),
            unseen: rows(value_width),
            new: rows(value_width),
            dnew: rows(value_width),
            scaled_q: rows(key_width),
            scaled_k: rows(key_width),
            scaled_v: rows(value_width),
            turned_new: rows(value_width),
            turned_state: state(),
            turned_dstate: state(),
            dscores: rows(TOKENS),
        }
    }

    /// Moves the state over the chunk, and sets o if `has_outputs`.
    pub(super) fn forward(&mut self, state: &mut [f32], has_outputs: bool) {
        self.isa.run(Forward { chunk: self, state, has_outputs });
    }

    /// Sets the gradients of the chunk, from the state before it, and replaces the gradient of the state after it by
    /// that of the state before it.
    pub(super) fn backward(&mut self, state: &[f32], dstate: &mut [f32]) {
        self.isa.run(Backward { chunk: self, state, dstate });
    }

    /// Sets all that does not depend on the state.
    #[inline(always)]
    fn prepare<S: Simd>(&mut self, s: S, has_scores: bool) {
        let (isa, count, [key_width, _]) = (self.isa, self.count, self.columns);
        for g in self.g.chunks_exact_mut(S::CHUNK) {
            // SAFETY: a whole chunk.
            unsafe {
                let decays = exp(s, s.load(g.as_ptr())).map(|x| s.mul(x, s.splat(1.0 / EXP_SCALE)));
                s.store(decays, g.as_mut_ptr());
            }
        }
        let mut product = 1.0;
        for i in 0..count {
            product *= self.g[i];
            self.from_start[i] = product;
            let (above, row) = self.decays.split_at_mut(i * TOKENS);
            row[..TOKENS].fill(0.0);
            if i > 0 {
                let above = &above[(i - 1) * TOKENS..][..i];
                for (to, from) in row.iter_mut().zip(above) {
                    *to = self.g[i] * from;
                }
            }
            row[i] = 1.0;
        }
        self.to_end.copy_from_slice(&self.decays[(count - 1) * TOKENS..][..TOKENS]);
        scale_rows(key_width, &self.k, &self.to_end[..count], &mut self.scaled_k);
        if !has_scores && !self.delta {
            return;
        }
        turn(isa, key_width, &self.k, &mut self.turned_k);
        let extents = [count, key_width, TOKENS];
        if has_scores {
            scale_rows(key_width, &self.q, &self.from_start[..count], &mut self.scaled_q);
            multiply(
                isa,
                extents,
                Left::rows(&self.q, key_width),
                &self.turned_k,
                0.0,
                &mut self.scores,
            );
            mask(count, 0, &self.decays, &mut self.scores);
        }
        if self.delta {
            multiply(
                isa,
                extents,
                Left::rows(&self.k, key_width),
                &self.turned_k,
                0.0,
                &mut self.kk,
            );
            self.lower.copy_from_slice(&self.kk);
            mask(count, 1, &self.decays, &mut self.lower);
            for (row, b) in self.lower.chunks_exact_mut(TOKENS).zip(&self.b) {
                row.iter_mut().for_each(|x| *x *= -b);
            }
        }
    }

    /// Sets N, and what it is solved from.
    #[inline(always)]
    fn solve(&mut self, state: &[f32]) {
        let (isa, count, [key_width, value_width]) = (self.isa, self.count, self.columns);
        if !self.delta {
            self.new.copy_from_slice(&self.v);
            return;
        }
        let left = Left::rows(&self.k, key_width);
        multiply(isa, [count, key_width, value_width], left, state, 0.0, &mut self.unseen);
        self.new.fill(0.0);
        for i in 0..count {
            let rows = i * value_width..(i + 1) * value_width;
            let entries = self.unseen[rows.clone()].iter_mut().zip(&self.v[rows.clone()]);
            for ((unseen, v), new) in entries.zip(&mut self.new[rows]) {
                *unseen = v - self.from_start[i] * *unseen;
                *new = self.b[i] * *unseen;
            }
        }
        for first in (0..count).step_by(SOLVED) {
            let end = count.min(first + SOLVED);
            let (before, rows) = self.new.split_at_mut(first * value_width);
            let left = Left::rows(&self.lower[first * TOKENS..], TOKENS);
            multiply(isa, [end - first, first, value_width], left, before, 1.0, rows);
            for i in 1..end - first {
                let (before, row) = rows.split_at_mut(i * value_width);
                let left = Left::rows(&self.lower[(first + i) * TOKENS + first..], TOKENS);
                multiply(isa, [1, i, value_width], left, before, 1.0, row);
            }
        }
    }

    /// Replaces the gradient of N by that of what it is solved from.
    #[inline(always)]
    fn solve_transposed(&mut self) {
        let (isa, count, [_, value_width]) = (self.isa, self.count, self.columns);
        for first in (0..count).step_by(SOLVED).rev() {
            let end = count.min(first + SOLVED);
            let (rows, after) = self.dnew.split_at_mut(end * value_width);
            let rows = &mut rows[first * value_width..];
            if end < count {
                let left = Left::columns(&self.lower[end * TOKENS + first..], TOKENS);
                multiply(isa, [end - first, count - end, value_width], left, after, 1.0, rows);
            }
            for i in (0..end - first - 1).rev() {
                let (row, after) = rows[i * value_width..].split_at_mut(value_width);
                let left =
                    Left::columns(&self.lower[(first + i + 1) * TOKENS + first + i..], TOKENS);
                multiply(isa, [1, end - first - i - 1, value_width], left, after, 1.0, row);
            }
        }
    }

    /// The product of all decays.
    fn whole_decay(&self) -> f32 {
        self.from_start[self.count - 1]
    }
}

/// `to = from` with a factor a row.
#[inline(always)]
fn scale_rows(columns: usize, from: &[f32], factors: &[f32], to: &mut [f32]) {
    let rows = from.chunks_exact(columns).zip(to.chunks_exact_mut(columns));
    for ((from, to), factor) in rows.zip(factors) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = factor * from;
        }
    }
}

/// Multiplies entries `[i, j]` by decays where j + `offset` is at most i, and sets others to 0.
#[inline(always)]
fn mask(count: usize, offset: usize, decays: &[f32], entries: &mut [f32]) {
    let rows = entries.chunks_exact_mut(TOKENS).zip(decays.chunks_exact(TOKENS));
    for (i, (row, decays)) in rows.enumerate().take(count) {
        let (seen, others) = row.split_at_mut((i + 1).saturating_sub(offset));
        for (x, decay) in seen.iter_mut().zip(decays) {
            *x *= decay;
        }
        others.fill(0.0);
    }
}

struct Forward<'a> {
    chunk: &'a mut Chunk,
    state: &'a mut [f32],
    has_outputs: bool,
}

impl Job for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { chunk, state, has_outputs } = self;
        if !chunk.is_finite(has_outputs, false) {
            for token in 0..chunk.count {
                chunk.decay_state(token, state);
                chunk.solve_token(token, state);
                chunk.add_token(token, state, has_outputs);
            }
            return;
        }
        chunk.prepare(s, has_outputs);
        chunk.solve(state);
        let (isa, count, [key_width, value_width]) = (chunk.isa, chunk.count, chunk.columns);
        if has_outputs {
            let left = Left::rows(&chunk.scaled_q, key_width);
            multiply(isa, [count, key_width, value_width], left, state, 0.0, &mut chunk.o);
            let left = Left::rows(&chunk.scores, TOKENS).of(Terms::Lower);
            multiply(isa, [count, count, value_width], left, &chunk.new, 1.0, &mut chunk.o);
        }
        let left = Left::columns(&chunk.scaled_k, key_width);
        let extents = [chunk.keys, count, value_width];
        multiply(isa, extents, left, &chunk.new, chunk.whole_decay(), state);
    }
}

struct Backward<'a> {
    chunk: &'a mut Chunk,
    state: &'a [f32],
    dstate: &'a mut [f32],
}

impl Job for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { chunk, state, dstate } = self;
        if !chunk.is_finite(true, true) {
            chunk.backward_by_tokens(s, state, dstate);
            return;
        }
        chunk.prepare(s, true);
        chunk.solve(state);
        let (isa, count, [key_width, value_width]) = (chunk.isa, chunk.count, chunk.columns);
        let to_values = [count, key_width, value_width];
        let to_keys = [count, value_width, key_width];
        let within = |columns| [count, count, columns];
        // The gradient of N.
        let left = Left::columns(&chunk.scores, TOKENS).of(Terms::Upper);
        multiply(isa, within(value_width), left, &chunk.cotangent, 0.0, &mut chunk.dnew);
        let left = Left::rows(&chunk.scaled_k, key_width);
        multiply(isa, to_values, left, dstate, 1.0, &mut chunk.dnew);
        if chunk.delta {
            chunk.solve_transposed();
        }
        turn(isa, value_width, &chunk.new, &mut chunk.turned_new);
        turn(isa, value_width, state, &mut chunk.turned_state);
        turn(isa, value_width, dstate, &mut chunk.turned_dstate);
        // What q has of the state before the chunk, and k in the state after it.
        let left = Left::rows(&chunk.cotangent, value_width);
        multiply(isa, to_keys, left, &chunk.turned_state, 0.0, &mut chunk.dq);
        multiply(
            isa,
            [count, value_width, TOKENS],
            left,
            &chunk.turned_new,
            0.0,
            &mut chunk.dscores,
        );
        let left = Left::rows(&chunk.new, value_width);
        multiply(isa, to_keys, left, &chunk.turned_dstate, 0.0, &mut chunk.dk);
        // Gradients of the exponents of E_i and E_ij are summed up for each token, those of E_Cj for tokens behind.
        let [mut at, mut behind] = [[0.0; TOKENS]; 2];
        for i in 0..count {
            let keys = i * key_width..(i + 1) * key_width;
            chunk.dq[keys.clone()].iter_mut().for_each(|x| *x *= chunk.from_start[i]);
            chunk.dk[keys.clone()].iter_mut().for_each(|x| *x *= chunk.to_end[i]);
            at[i] += dot(s, &chunk.dq[keys.clone()], &chunk.q[keys.clone()]);
            behind[i] = dot(s, &chunk.dk[keys.clone()], &chunk.k[keys]);
            let row = i * TOKENS..(i + 1) * TOKENS;
            let (dscores, scores) = (&mut chunk.dscores[row.clone()], &chunk.scores[row.clone()]);
            dscores[i + 1..].fill(0.0);
            // Without the entry on the diagonal, whose exponent is 0: it may be far above all others.
            let diagonal = std::mem::take(&mut dscores[i]);
            at[i] += dot(s, dscores, scores);
            dscores[i] = diagonal;
            for ((at, dscore), score) in at[..i].iter_mut().zip(dscores.iter()).zip(scores) {
                *at -= dscore * score;
            }
            for (dscore, decay) in dscores.iter_mut().zip(&chunk.decays[row]) {
                *dscore *= decay;
            }
        }
        let left = Left::rows(&chunk.dscores, TOKENS).of(Terms::Lower);
        multiply(isa, within(key_width), left, &chunk.k, 1.0, &mut chunk.dq);
        let left = Left::columns(&chunk.dscores, TOKENS).of(Terms::Upper);
        multiply(isa, within(key_width), left, &chunk.q, 1.0, &mut chunk.dk);
        if chunk.delta {
            chunk.delta_gradients(s, &mut at);
        } else {
            chunk.o.copy_from_slice(&chunk.dnew);
        }
        let mut sum = chunk.whole_decay() * dot(s, state, dstate);
        for (dg, behind) in chunk.dg.iter_mut().zip(&behind).take(count) {
            *dg = sum;
            sum += behind;
        }
        let mut sum = 0.0;
        for i in (0..count).rev() {
            sum += at[i];
            chunk.dg[i] += sum;
        }
        let left = Left::columns(&chunk.scaled_q, key_width);
        let extents = [chunk.keys, count, value_width];
        multiply(isa, extents, left, &chunk.cotangent, chunk.whole_decay(), dstate);
        if chunk.delta {
            let left = Left::columns(&chunk.k, key_width);
            multiply(isa, extents, left, &chunk.scaled_v, 1.0, dstate);
        }
    }
}

impl Chunk {
    /// Sets dv and db of the delta rule, and adds to dk and to the gradients of exponents.
    #[inline(always)]
    fn delta_gradients<S: Simd>(&mut self, s: S, at: &mut [f32; TOKENS]) {
        let (isa, count, [key_width, value_width]) = (self.isa, self.count, self.columns);
        let left = Left::rows(&self.dnew, value_width);
        let extents = [count, value_width, TOKENS];
        multiply(isa, extents, left, &self.turned_new, 0.0, &mut self.dscores);
        mask(count, 1, &self.decays, &mut self.dscores);
        for i in 0..count {
            let (row, values) =
                (i * TOKENS..(i + 1) * TOKENS, i * value_width..(i + 1) * value_width);
            let (b, decay) = (self.b[i], self.from_start[i]);
            let (dlower, kk) = (&mut self.dscores[row.clone()], &self.kk[row]);
            dlower.iter_mut().for_each(|x| *x = -*x);
            // Rows behind the last token are 0, and so are these entries of k k'.
            let lower_dot = dot(s, dlower, kk);
            self.db[i] =
                lower_dot + dot(s, &self.dnew[values.clone()], &self.unseen[values.clone()]);
            at[i] += b * lower_dot;
            for ((at, x), kk) in at[..i].iter_mut().zip(dlower.iter()).zip(kk) {
                *at -= b * x * kk;
            }
            dlower.iter_mut().for_each(|x| *x *= b);
            let entries = self.dnew[values.clone()].iter().zip(&mut self.o[values.clone()]);
            for ((dnew, dv), scaled) in entries.zip(&mut self.scaled_v[values]) {
                *dv = b * dnew;
                *scaled = -decay * *dv;
            }
        }
        let within = [count, count, key_width];
        let left = Left::rows(&self.dscores, TOKENS).of(Terms::Lower);
        multiply(isa, within, left, &self.k, 1.0, &mut self.dk);
        let left = Left::columns(&self.dscores, TOKENS).of(Terms::Upper);
        multiply(isa, within, left, &self.k, 1.0, &mut self.dk);
        // What k has of the state before the chunk.
        let left = Left::rows(&self.scaled_v, value_width);
        let extents = [count, value_width, key_width];
        multiply(isa, extents, left, &self.turned_state, 0.0, &mut self.scaled_k);
        for (i, at) in at.iter_mut().enumerate().take(count) {
            let keys = i * key_width..(i + 1) * key_width;
            *at += dot(s, &self.scaled_k[keys.clone()], &self.k[keys.clone()]);
            let entries = self.dk[keys.clone()].iter_mut().zip(&self.scaled_k[keys]);
            entries.for_each(|(to, x)| *to += x);
        }
    }
}

impl Chunk {
    /// Whether all operands are finite: q if it `has_queries`, and the cotangent if it `has_cotangent`.
    #[inline(always)]
    fn is_finite(&self, has_queries: bool, has_cotangent: bool) -> bool {
        let [key_width, value_width] = self.columns;
        [
            (&self.q, if has_queries { key_width } else { 0 }),
            (&self.k, key_width),
            (&self.v, value_width),
            (&self.cotangent, if has_cotangent { value_width } else { 0 }),
            (&self.g, 1),
            (&self.b, usize::from(self.delta)),
        ]
        .into_iter()
        .all(|(array, width)| {
            // Without branches, so that these are instructions of vectors.
            let array = &array[..self.count * width];
            !array.iter().fold(false, |found, x| found | !x.is_finite())
        })
    }

    /// Multiplies the state by a token's decay.
    #[inline(always)]
    fn decay_state(&self, token: usize, state: &mut [f32]) {
        let decay = self.g[token].exp();
        state[..self.keys * self.columns[1]].iter_mut().for_each(|x| *x *= decay);
    }

    /// Sets a token's row of N, and what it is solved from, from the decayed state.
    #[inline(always)]
    fn solve_token(&mut self, token: usize, state: &[f32]) {
        let [key_width, value_width] = self.columns;
        let values = token * value_width..(token + 1) * value_width;
        let new = &mut self.new[values.clone()];
        new.copy_from_slice(&self.v[values.clone()]);
        if !self.delta {
            return;
        }
        let keys = &self.k[token * key_width..][..self.keys];
        for (key, row) in keys.iter().zip(state.chunks_exact(value_width)) {
            new.iter_mut().zip(row).for_each(|(new, x)| *new -= key * x);
        }
        self.unseen[values].copy_from_slice(new);
        new.iter_mut().for_each(|new| *new *= self.b[token]);
    }

    /// Adds a token to the decayed state, and sets its row of o if it `has_outputs`.
    #[inline(always)]
    fn add_token(&mut self, token: usize, state: &mut [f32], has_outputs: bool) {
        let [key_width, value_width] = self.columns;
        let new = &self.new[token * value_width..][..value_width];
        let o = &mut self.o[token * value_width..][..value_width];
        if has_outputs {
            o.fill(0.0);
        }
        let keys = self.k[token * key_width..][..self.keys].iter();
        let queries = self.q[token * key_width..][..self.keys].iter();
        for ((key, query), row) in keys.zip(queries).zip(state.chunks_exact_mut(value_width)) {
            row.iter_mut().zip(new).for_each(|(x, new)| *x += key * new);
            if has_outputs {
                o.iter_mut().zip(row).for_each(|(o, x)| *o += query * *x);
            }
        }
    }

    /// As `backward`, by the derivative of the recurrence.
    #[inline(always)]
    fn backward_by_tokens<S: Simd>(&mut self, s: S, state: &[f32], dstate: &mut [f32]) {
        let (count, [key_width, value_width]) = (self.count, self.columns);
        // The decayed state of each token.
        let mut states = Vec::with_capacity(count);
        let mut last = state.to_vec();
        for token in 0..count {
            self.decay_state(token, &mut last);
            states.push(last.clone());
            self.solve_token(token, &last);
            self.add_token(token, &mut last, false);
        }
        let mut dnew = vec![0.0; value_width];
        for (token, state) in states.iter().enumerate().rev() {
            let values = token * value_width..(token + 1) * value_width;
            let (new, cotangent) = (&self.new[values.clone()], &self.cotangent[values.clone()]);
            let new_cotangent = dot(s, new, cotangent);
            dnew.fill(0.0);
            let rows = state.chunks_exact(value_width).zip(dstate.chunks_exact_mut(value_width));
            for (at, (row, drow)) in (token * key_width..).zip(rows).take(self.keys) {
                self.dq[at] = dot(s, row, cotangent) + self.k[at] * new_cotangent;
                drow.iter_mut().zip(cotangent).for_each(|(x, do_)| *x += self.q[at] * do_);
                self.dk[at] = dot(s, drow, new);
                dnew.iter_mut().zip(&*drow).for_each(|(sum, x)| *sum += self.k[at] * x);
            }
            if self.delta {
                self.db[token] = dot(s, &dnew, &self.unseen[values.clone()]);
                dnew.iter_mut().for_each(|x| *x *= self.b[token]);
            }
            let (decay, mut dg) = (self.g[token].exp(), 0.0);
            let rows = state.chunks_exact(value_width).zip(dstate.chunks_exact_mut(value_width));
            for (at, (row, drow)) in (token * key_width..).zip(rows).take(self.keys) {
                if self.delta {
                    self.dk[at] -= dot(s, row, &dnew);
                    drow.iter_mut().zip(&dnew).for_each(|(x, dnew)| *x -= self.k[at] * dnew);
                }
                dg += dot(s, row, drow);
                drow.iter_mut().for_each(|x| *x *= decay);
            }
            self.dg[token] = dg;
            self.o[values].copy_from_slice(&dnew);
        }
    }
}

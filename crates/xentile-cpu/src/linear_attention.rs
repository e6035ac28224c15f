//! Linear attention and the gated delta rule: forward, and backward from states that the forward pass saves.
//!
//! A task goes through the tokens of one sequence: forward with one head of values, backward with one of keys and
//! all heads of values that share it. It takes them a chunk at a time (`chunk`), as products of small matrices in
//! f32 whose operands stay in the nearest caches (`multiply`). The backward pass computes the states of a group
//! of chunks again from the saved one.

mod chunk;
mod multiply;
#[cfg(feature = "operation")]
pub(crate) mod operation;

use std::ops::Range;

pub use xentile::linear_attention::LinearAttention;
use xentile::{Element, Error, Result};

use crate::Isa;
pub use crate::Launch;
use crate::convert::{multiply_by, narrow, widen};
use crate::parallel::Shared;
use crate::simd::MAX_CHUNK;
use chunk::{Chunk, TOKENS};

/// What both passes read.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a, E> {
    /// `[B, T, H, K]`.
    pub q: &'a [E],
    /// `[B, T, H, K]`.
    pub k: &'a [E],
    /// `[B, T, H', V]`.
    pub v: &'a [E],
    /// The logarithm of the decay, `[B, T, H']`.
    pub g: &'a [f32],
    /// `[B, T, H']`, of the delta rule alone.
    pub b: Option<&'a [f32]>,
    /// The state before the first token, `[B, H', K, V]`.
    pub state: &'a [f32],
}

/// What the backward pass reads besides.
#[derive(Clone, Copy, Debug)]
pub struct Cotangents<'a, E> {
    /// What the forward pass saved.
    pub states: &'a [f32],
    /// `[B, T, H', V]`.
    pub o: &'a [E],
    /// `[B, H', K, V]`.
    pub state: &'a [f32],
}

/// What the backward pass writes.
#[derive(Debug)]
pub struct Gradients<'a, E> {
    /// `[B, T, H, K]`.
    pub q: &'a mut [E],
    /// `[B, T, H, K]`.
    pub k: &'a mut [E],
    /// `[B, T, H', V]`.
    pub v: &'a mut [E],
    /// `[B, T, H']`.
    pub g: &'a mut [f32],
    /// `[B, T, H']`, of the delta rule alone.
    pub b: Option<&'a mut [f32]>,
    /// `[B, H', K, V]`.
    pub state: &'a mut [f32],
}

/// Linear attention of one shape.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    attention: LinearAttention,
    /// Tokens from one saved state to the next.
    group: usize,
    launch: Launch<'a>,
}

impl<'a> Kernel<'a> {
    /// A kernel for these options and shape, which saves the state after every `group` tokens.
    ///
    /// # Errors
    /// An option outside its range, arrays larger than memory, or an empty group.
    pub fn new(attention: LinearAttention, group: usize, launch: Launch<'a>) -> Result<Self> {
        attention.validate()?;
        if group == 0 {
            return Err(Error::Option { name: "group", value: 0.0, requirement: "at least 1" });
        }
        Ok(Self { attention, group, launch })
    }

    /// The number of states that are saved of each head: the last is that after the last token.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.attention.tokens.div_ceil(self.group)
    }

    /// The tokens of a group.
    fn tokens(&self, number: usize) -> Range<usize> {
        let first = number * self.group;
        first..self.attention.tokens.min(first + self.group)
    }

    /// Writes o `[B, T, H', V]`, and the state after each group, `[B, H', groups, K, V]`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn forward<E: Element>(
        &self,
        operands: Operands<'_, E>,
        o: &mut [E],
        states: &mut [f32],
    ) -> Result<()> {
        let LinearAttention { sequences, heads, keys, values, .. } = self.attention;
        self.check(&operands)?;
        self.attention.check("o", o.len(), "[B, T, H', V]", heads * values)?;
        self.attention.check_states("states", states.len(), self.groups())?;
        let (o, states, each) = (Shared::new(o), Shared::new(states), self.attention.state());
        self.launch.pool.run(sequences * heads, &|index| {
            let head = Head { kernel: self, operands: &operands, index };
            let (mut chunk, mut state) = (self.chunk(), self.state());
            head.load_state(operands.state, index, &mut state);
            for number in 0..self.groups() {
                let tokens = self.tokens(number);
                for first in tokens.clone().step_by(TOKENS) {
                    let range = first..tokens.end.min(first + TOKENS);
                    head.load(range.clone(), true, &mut chunk);
                    chunk.forward(&mut state, true);
                    for (row, token) in chunk.o.chunks_exact(padded(values)).zip(range) {
                        // SAFETY: the row is of the task's head.
                        let to = unsafe { o.slice(head.row(token) * values, values) };
                        narrow(self.launch.isa, &row[..values], to);
                    }
                }
                // SAFETY: the state is of the task's head.
                let to = unsafe { states.slice((index * self.groups() + number) * each, each) };
                copy_rows([keys, values], &state, padded(values), to, values);
            }
        });
        Ok(())
    }

    /// Writes all gradients.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn backward<E: Element>(
        &self,
        operands: Operands<'_, E>,
        cotangents: Cotangents<'_, E>,
        gradients: Gradients<'_, E>,
    ) -> Result<()> {
        let LinearAttention { sequences, key_heads, heads, keys, values, .. } = self.attention;
        let attention = &self.attention;
        self.check(&operands)?;
        attention.check("do", cotangents.o.len(), "[B, T, H', V]", heads * values)?;
        attention.check_states("states", cotangents.states.len(), self.groups())?;
        attention.check_states("dfinal_state", cotangents.state.len(), 1)?;
        let Gradients { q, k, v, g, b, state } = gradients;
        for (name, length) in [("dq", q.len()), ("dk", k.len())] {
            attention.check(name, length, "[B, T, H, K]", key_heads * keys)?;
        }
        attention.check("dv", v.len(), "[B, T, H', V]", heads * values)?;
        attention.check("dg", g.len(), "[B, T, H']", heads)?;
        attention.check_states("dinitial_state", state.len(), 1)?;
        self.check_strengths("db", b.as_ref().map(|b| b.len()))?;
        let to = SharedGradients {
            q: Shared::new(q),
            k: Shared::new(k),
            v: Shared::new(v),
            g: Shared::new(g),
            b: b.map(Shared::new),
            state: Shared::new(state),
        };
        self.launch.pool.run(sequences * key_heads, &|index| {
            Keys { kernel: self, operands: &operands, cotangents: &cotangents, index }
                .backward(&to);
        });
        Ok(())
    }

    fn check<E: Element>(&self, operands: &Operands<'_, E>) -> Result<()> {
        let LinearAttention { key_heads, heads, keys, values, .. } = self.attention;
        let Operands { q, k, v, g, b, state } = operands;
        for (name, length) in [("q", q.len()), ("k", k.len())] {
            self.attention.check(name, length, "[B, T, H, K]", key_heads * keys)?;
        }
        self.attention.check("v", v.len(), "[B, T, H', V]", heads * values)?;
        self.attention.check("g", g.len(), "[B, T, H']", heads)?;
        self.attention.check_states("initial_state", state.len(), 1)?;
        self.check_strengths("b", b.map(<[f32]>::len))
    }

    /// Checks that the delta rule alone has an array called `name`, and its length.
    fn check_strengths(&self, name: &'static str, length: Option<usize>) -> Result<()> {
        if length.is_some() != self.attention.delta {
            let (value, requirement) =
                (length.unwrap_or(0) as f64, "given for the delta rule alone");
            return Err(Error::Option { name, value, requirement });
        }
        let Some(length) = length else { return Ok(()) };
        self.attention.check(name, length, "[B, T, H']", self.attention.heads)
    }

    fn chunk(&self) -> Chunk {
        let LinearAttention { delta, keys, values, .. } = self.attention;
        Chunk::new(self.launch.isa, delta, keys, [padded(keys), padded(values)])
    }

    /// A state of zeros, in rows of whole chunks.
    fn state(&self) -> Vec<f32> {
        vec![0.0; padded(self.attention.keys) * padded(self.attention.values)]
    }
}

/// Columns of whole chunks.
fn padded(columns: usize) -> usize {
    columns.next_multiple_of(MAX_CHUNK)
}

/// Copies rows of `columns` between arrays whose rows begin so far apart.
fn copy_rows(
    [rows, columns]: [usize; 2],
    from: &[f32],
    from_step: usize,
    to: &mut [f32],
    to_step: usize,
) {
    for row in 0..rows {
        to[row * to_step..][..columns].copy_from_slice(&from[row * from_step..][..columns]);
    }
}

/// A head of values of one sequence; both are counted together.
struct Head<'a, E> {
    kernel: &'a Kernel<'a>,
    operands: &'a Operands<'a, E>,
    index: usize,
}

impl<E: Element> Head<'_, E> {
    /// Where `[B, T, H']` has a token.
    fn row(&self, token: usize) -> usize {
        let LinearAttention { tokens, heads, .. } = self.kernel.attention;
        let (sequence, head) = (self.index / heads, self.index % heads);
        (sequence * tokens + token) * heads + head
    }

    /// Where `[B, T, H]` has a token.
    fn key_row(&self, token: usize) -> usize {
        self.row(token) / self.kernel.attention.shared()
    }

    /// Reads state `place` of `[.., K, V]`.
    fn load_state(&self, all: &[f32], place: usize, to: &mut [f32]) {
        let LinearAttention { keys, values, .. } = self.kernel.attention;
        let from = &all[place * keys * values..][..keys * values];
        copy_rows([keys, values], from, values, to, padded(values));
    }

    /// Reads a chunk's operands, q only if it `has_queries`.
    fn load(&self, tokens: Range<usize>, has_queries: bool, to: &mut Chunk) {
        let LinearAttention { keys, values, scale, .. } = self.kernel.attention;
        let isa = self.kernel.launch.isa;
        let Operands { q, k, v, g, b, .. } = *self.operands;
        to.count = tokens.len();
        let key_rows = || tokens.clone().map(|token| self.key_row(token));
        let rows = || tokens.clone().map(|token| self.row(token));
        load_rows(isa, k, keys, key_rows(), &mut to.k);
        load_rows(isa, v, values, rows(), &mut to.v);
        if has_queries {
            load_rows(isa, q, keys, key_rows(), &mut to.q);
            if scale != 1.0 {
                multiply_by(isa, scale, &mut to.q);
            }
        }
        for (at, row) in rows().enumerate() {
            to.g[at] = g[row];
            if let Some(b) = b {
                to.b[at] = b[row];
            }
        }
    }
}

/// Reads rows of `columns`, and sets those behind them to 0.
fn load_rows<E: Element>(
    isa: Isa,
    all: &[E],
    columns: usize,
    rows: impl Iterator<Item = usize>,
    to: &mut [f32],
) {
    let mut to = to.chunks_exact_mut(padded(columns));
    for row in rows {
        let to = to.next().expect("a chunk has as many rows");
        widen(isa, &all[row * columns..][..columns], &mut to[..columns]);
    }
    to.for_each(|rest| rest.fill(0.0));
}

struct SharedGradients<'a, E> {
    q: Shared<'a, E>,
    k: Shared<'a, E>,
    v: Shared<'a, E>,
    g: Shared<'a, f32>,
    b: Option<Shared<'a, f32>>,
    state: Shared<'a, f32>,
}

/// The backward pass of a head of keys of one sequence; both are counted together.
struct Keys<'a, E> {
    kernel: &'a Kernel<'a>,
    operands: &'a Operands<'a, E>,
    cotangents: &'a Cotangents<'a, E>,
    index: usize,
}

impl<E: Element> Keys<'_, E> {
    fn backward(&self, to: &SharedGradients<'_, E>) {
        let Kernel { attention, group, launch } = *self.kernel;
        let LinearAttention { tokens, keys, values, scale, .. } = attention;
        let (columns, shared, each) = (padded(keys), attention.shared(), attention.state());
        let head = |of: usize| Head {
            kernel: self.kernel,
            operands: self.operands,
            index: self.index * shared + of,
        };
        let mut chunk = self.kernel.chunk();
        let mut dstates: Vec<_> = (0..shared)
            .map(|of| {
                let mut state = self.kernel.state();
                head(of).load_state(self.cotangents.state, head(of).index, &mut state);
                state
            })
            .collect();
        let mut states = Vec::new();
        let [mut dq, mut dk] = [0; 2].map(|_| vec![0.0; group.min(tokens) * columns]);
        for number in (0..self.kernel.groups()).rev() {
            let Range { start: first, end } = self.kernel.tokens(number);
            for (of, dstate) in dstates.iter_mut().enumerate() {
                let head = head(of);
                self.states(&head, number, &mut chunk, &mut states);
                for at in (first..end).step_by(TOKENS).rev() {
                    let range = at..end.min(at + TOKENS);
                    head.load(range.clone(), true, &mut chunk);
                    let rows = range.clone().map(|token| head.row(token));
                    load_rows(launch.isa, self.cotangents.o, values, rows, &mut chunk.cotangent);
                    chunk.backward(&states[(at - first) / TOKENS], dstate);
                    let rows = (at - first) * columns..(range.end - first) * columns;
                    for (sums, found) in [(&mut dq, &chunk.dq), (&mut dk, &chunk.dk)] {
                        let sums = sums[rows.clone()].iter_mut().zip(found);
                        sums.for_each(|(sum, x)| *sum = if of == 0 { *x } else { *sum + x });
                    }
                    for (token, at) in range.zip(0..) {
                        let row = head.row(token);
                        // SAFETY: the rows are of one of the task's heads.
                        unsafe {
                            let dv = &chunk.o[at * padded(values)..][..values];
                            narrow(launch.isa, dv, to.v.slice(row * values, values));
                            to.g.slice(row, 1)[0] = chunk.dg[at];
                            if let Some(b) = &to.b {
                                b.slice(row, 1)[0] = chunk.db[at];
                            }
                        }
                    }
                }
            }
            if scale != 1.0 {
                multiply_by(launch.isa, scale, &mut dq);
            }
            for (token, at) in (first..end).zip(0..) {
                let place = head(0).key_row(token) * keys;
                for (sums, to) in [(&dq, &to.q), (&dk, &to.k)] {
                    // SAFETY: the row is of the task's head of keys.
                    let to = unsafe { to.slice(place, keys) };
                    narrow(launch.isa, &sums[at * columns..][..keys], to);
                }
            }
        }
        for (of, dstate) in dstates.iter().enumerate() {
            // SAFETY: the state is of one of the task's heads.
            let to = unsafe { to.state.slice(head(of).index * each, each) };
            copy_rows([keys, values], dstate, padded(values), to, values);
        }
    }

    /// Sets the states before the chunks of a group.
    fn states(
        &self,
        head: &Head<'_, E>,
        number: usize,
        chunk: &mut Chunk,
        states: &mut Vec<Vec<f32>>,
    ) {
        let tokens = self.kernel.tokens(number);
        let count = tokens.len().div_ceil(TOKENS);
        states.resize_with(states.len().max(count), || self.kernel.state());
        let groups = self.kernel.groups();
        match number.checked_sub(1) {
            Some(before) => {
                let place = head.index * groups + before;
                head.load_state(self.cotangents.states, place, &mut states[0]);
            }
            None => head.load_state(self.operands.state, head.index, &mut states[0]),
        }
        for at in 1..count {
            let (before, after) = states.split_at_mut(at);
            after[0].copy_from_slice(&before[at - 1]);
            let token = tokens.start + (at - 1) * TOKENS;
            head.load(token..token + TOKENS, false, chunk);
            chunk.forward(&mut after[0], false);
        }
    }
}

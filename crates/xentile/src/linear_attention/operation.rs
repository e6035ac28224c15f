//! Linear attention and the gated delta rule of one sequence for tools.
//!
//! Entries are judged by error bounds that follow the recurrence. Of each column of a state they have two
//! numbers: a bound of its error, and its size, from the norms of all that was added to it, as the terms of chunked sums may
//! cancel in it. Roundings have either sign, and so have added rows: their squares add up, over tokens and over columns.
//! What bounds allow for instead is that a row and a column may be parallel, where a product has its whole norm.

use std::time::Instant;

use rayon::prelude::*;

use super::{CHUNK, Gradients, Head, LinearAttention, Step};
use crate::operation::{
    Array, ArraySpec, Arrays, Bound, Cost, DimSpec, Facts, Judged, Kind, Operation, OptionSpec,
    Pass, Problem, Reference, Role, Signature, Synthetic, TOKENS, ToleranceSpec, Tolerances, Value,
    Visitor, WHOLE_RESULTS,
};
use crate::{DType, Element, Error, Result, by_dtype};

/// Linear attention of a sequence.
pub const LINEAR_ATTENTION: OfSequence = OfSequence { delta: false };

/// The gated delta rule of a sequence.
pub const GATED_DELTA_RULE: OfSequence = OfSequence { delta: true };

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&LINEAR_ATTENTION, &GATED_DELTA_RULE];

/// One of the operations.
#[derive(Clone, Copy, Debug)]
pub struct OfSequence {
    delta: bool,
}

const fn dim(letter: &'static str, key: &'static str, about: &'static str) -> DimSpec {
    DimSpec { letter, key, index: key, about, default: None, like: None, in_shape: false }
}

const DIMS: [DimSpec; 5] = [
    TOKENS,
    dim("J", "value_heads", "heads of values"),
    dim("D", "head_dim", "columns of queries and keys"),
    DimSpec {
        like: Some("J"),
        ..dim("H", "heads", "heads of queries and keys; they divide the heads of values")
    },
    DimSpec { like: Some("D"), ..dim("E", "value_dim", "columns of values") },
];

const OPTIONS: [OptionSpec; 1] =
    [OptionSpec::new("scale", Kind::Number, Value::Number(1.0), "finite", "factor of the outputs")];

const PRODUCTS: &str = "product_roundings";

const TOLERANCES: [ToleranceSpec; 2] = [
    ToleranceSpec {
        about: "relative error in norm of o and of each gradient, in units of rounding of the dtype, \
                beyond the bounds of entries",
        ..WHOLE_RESULTS
    },
    ToleranceSpec {
        name: PRODUCTS,
        about: "roundings of the dtype in each term of a product: 0 where GEMMs take float32, some 4 where \
                they take 16 bits",
        default: |_| 0.0,
    },
];

/// Seeds of the arrays' generators, and of the cotangent's.
const SEEDS: [u64; 5] = [
    0x9e37_79b9_7f4a_7c15,
    0xbf58_476d_1ce4_e5b9,
    0x94d0_49bb_1331_11eb,
    0xd6e8_feb8_6659_fd93,
    0xa076_1d64_78bd_642f,
];

/// A rounding of f32.
const U: f64 = f32::EPSILON as f64 / 2.0;

/// The loss of a few products that fall below f32's normal range.
const FLUSHED: f64 = 64.0 * f32::MIN_POSITIVE as f64;

impl OfSequence {
    /// The options and the shape: one sequence of all tokens.
    #[must_use]
    pub fn attention(&self, problem: &Problem) -> LinearAttention {
        LinearAttention {
            delta: self.delta,
            scale: problem.number("scale").unwrap_or(1.0) as f32,
            sequences: 1,
            tokens: problem.dim("T"),
            key_heads: problem.dim("H"),
            heads: problem.dim("J"),
            keys: problem.dim("D"),
            values: problem.dim("E"),
        }
    }
}

/// Rows `[T, H, K]` of norm 1, so that the state of the delta rule does not grow.
fn draw_keys(problem: &Problem, from: &Synthetic, rows: &[u64]) -> Array<'static> {
    let [heads, columns] = ["H", "D"].map(|letter| problem.dim(letter));
    by_dtype!(problem.dtype, E => {
        let mut all = vec![0.0_f32; rows.len() * heads * columns];
        from.fill(rows, heads * columns, &mut all);
        for row in all.chunks_exact_mut(columns.max(1)) {
            let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
            row.iter_mut().for_each(|x| *x /= norm);
        }
        Array::of(all.into_iter().map(E::from_f32).collect::<Vec<E>>())
    })
}

/// Numbers `[T, H']` in f32, made of standard normal ones.
fn draw_numbers(
    problem: &Problem,
    from: &Synthetic,
    rows: &[u64],
    of: impl Fn(f32) -> f32,
) -> Array<'static> {
    let heads = problem.dim("J");
    let mut all = vec![0.0_f32; rows.len() * heads];
    from.unit().fill(rows, heads, &mut all);
    Array::of(all.into_iter().map(of).collect::<Vec<f32>>())
}

impl Operation for OfSequence {
    fn facts(&self) -> &'static Facts {
        const LINEAR: Facts = Facts {
            name: "linear_attention",
            about: "linear attention of a sequence, with a decay a head and token",
            dims: &DIMS,
            options: &OPTIONS,
            tolerances: &TOLERANCES,
            ..Facts::BASE
        };
        const DELTA: Facts = Facts {
            name: "gated_delta_rule",
            about: "the gated delta rule of a sequence",
            ..LINEAR
        };
        if self.delta { &DELTA } else { &LINEAR }
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        let [heads, value_heads] = ["H", "J"].map(|letter| problem.dim(letter));
        if heads == 0 || !value_heads.is_multiple_of(heads) {
            return Err(Error::Invalid(format!(
                "heads is {heads}; it must divide value_heads, which is {value_heads}"
            )));
        }
        self.attention(problem).validate().map_err(|error| Error::Invalid(error.to_string()))
    }

    fn signature(&self, _: &Problem, pass: Pass) -> Signature {
        const KEYS: &[&str] = &["T", "H", "D"];
        const VALUES: &[&str] = &["T", "J", "E"];
        const NUMBERS: &[&str] = &["T", "J"];
        let input = Role::Input { differentiable: true };
        let mut operands = vec![
            ArraySpec::input("q", KEYS),
            ArraySpec::input("k", KEYS),
            ArraySpec::input("v", VALUES),
            ArraySpec::number("g", NUMBERS, input),
        ];
        let mut gradients: Vec<_> = [("dq", "q", KEYS), ("dk", "k", KEYS), ("dv", "v", VALUES)]
            .into_iter()
            .map(|(name, of, dims)| ArraySpec {
                role: Role::Gradient(of),
                ..ArraySpec::input(name, dims)
            })
            .collect();
        gradients.push(ArraySpec::number("dg", NUMBERS, Role::Gradient("g")));
        if self.delta {
            operands.push(ArraySpec::number("b", NUMBERS, input));
            gradients.push(ArraySpec::number("db", NUMBERS, Role::Gradient("b")));
        }
        let rows = |name, role| ArraySpec { role, ..ArraySpec::input(name, VALUES) };
        let mut results = Vec::new();
        if pass != Pass::Backward {
            results.push(rows("o", Role::Output));
        }
        if pass.has_gradients() {
            operands.push(rows("do", Role::Cotangent("o")));
            results.extend(gradients);
        }
        Signature { operands, results }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        from.check_unlabelled(self, "rows")?;
        let [heads, columns, value_heads, value_columns] =
            ["H", "D", "J", "E"].map(|letter| problem.dim(letter));
        let [k, v, g, b, _] = SEEDS.map(|seed| from.apart(seed));
        let mut inputs = Arrays::default();
        inputs.insert("q", from.draw(problem.dtype, rows, heads * columns));
        inputs.insert("k", draw_keys(problem, &k, rows));
        inputs.insert("v", v.draw(problem.dtype, rows, value_heads * value_columns));
        inputs.insert("g", draw_numbers(problem, &g, rows, |x| -0.1 * x.abs()));
        if self.delta {
            inputs.insert("b", draw_numbers(problem, &b, rows, |x| 1.0 / (1.0 + (-x).exp())));
        }
        Ok(inputs)
    }

    /// A standard normal cotangent.
    fn given(
        &self,
        problem: &Problem,
        pass: Pass,
        from: &Synthetic,
        rows: &[u64],
    ) -> Arrays<'static> {
        let mut given = Arrays::default();
        if pass.has_gradients() {
            let columns = problem.dim("J") * problem.dim("E");
            given.insert("do", from.unit().apart(SEEDS[4]).draw(problem.dtype, rows, columns));
        }
        given
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        let attention = self.attention(problem);
        let columns =
            |name: &str, of: [usize; 2]| by_heads(&in_float64(inputs, problem.dtype, name), of);
        let numbers = |name: &str| {
            let all = inputs.slice::<f32>(name).unwrap_or_default();
            let all: Vec<_> = all.iter().map(|x| f64::from(*x)).collect();
            by_heads(&all, [attention.heads, 1])
        };
        let key_axes = [attention.key_heads, attention.keys];
        Ok(Box::new(ByRecurrence {
            dtype: problem.dtype,
            attention,
            q: columns("q", key_axes),
            k: columns("k", key_axes),
            v: columns("v", [attention.heads, attention.values]),
            g: numbers("g"),
            b: if self.delta { numbers("b") } else { Vec::new() },
            zeros: vec![0.0; attention.state()],
            tolerances,
        }))
    }

    /// Some four arrays of rows in float64, and of each thread a state a token of a chunk.
    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        let LinearAttention { tokens, heads, keys, values, .. } = self.attention(problem);
        let rows = (tokens * heads) as u64;
        let rows = rows.checked_mul(8 * (keys + values) as u64)?;
        let states = (threads * (2 * CHUNK + tokens.div_ceil(CHUNK))) as u64;
        rows.checked_add(states.checked_mul((keys * values) as u64)?)?.checked_mul(8)
    }

    /// The products of the recurrence.
    fn cost(&self, problem: &Problem) -> Cost {
        let whole = self.signature(problem, self.whole(problem));
        let [bytes_read, bytes_written] = whole.bytes(problem);
        let LinearAttention { tokens, heads, keys, values, .. } = self.attention(problem);
        let each = if self.delta { 9 } else { 6 } * 2 * (keys * values) as u64;
        Cost { bytes_read, bytes_written, flops: (tokens * heads) as u64 * each }
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let LinearAttention { key_heads, heads, keys, values, tokens, .. } =
            self.attention(problem);
        let dtype = problem.dtype;
        let shape = format!("{tokens} tokens, {heads} heads ({key_heads} of keys)");
        ("sequence", format!("{shape}, K {keys}, V {values}, {dtype}"))
    }
}

fn in_float64(arrays: &Arrays<'_>, dtype: DType, name: &str) -> Vec<f64> {
    by_dtype!(dtype, E => arrays.expect::<E>(name).iter().map(|x| x.to_f64()).collect())
}

/// `[T, columns]` of each head, of `[T, H, columns]`.
fn by_heads(all: &[f64], [heads, columns]: [usize; 2]) -> Vec<Vec<f64>> {
    let head_rows = |head: usize| {
        let tokens = all.chunks_exact((heads * columns).max(1));
        tokens.flat_map(|token| &token[head * columns..][..columns]).copied().collect()
    };
    (0..heads).map(head_rows).collect()
}

/// `[T, H, columns]` of `[T, columns]` of each head.
fn by_tokens<'a>(
    each: impl Iterator<Item = &'a [f64]> + Clone,
    tokens: usize,
    columns: usize,
) -> Vec<f64> {
    let token_rows = |t: usize| each.clone().flat_map(move |of| &of[t * columns..][..columns]);
    (0..tokens).flat_map(token_rows).copied().collect()
}

/// The reference, and bounds of errors in f32.
struct ByRecurrence {
    dtype: DType,
    attention: LinearAttention,
    /// Of each head.
    q: Vec<Vec<f64>>,
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    g: Vec<Vec<f64>>,
    b: Vec<Vec<f64>>,
    zeros: Vec<f64>,
    tolerances: Tolerances,
}

/// What bounds have of the columns of a state, or of its gradient.
#[derive(Clone)]
struct Columns {
    /// The root of the sum of the squared norms of all that was added.
    sizes: Vec<f64>,
    errors: Vec<f64>,
}

impl Columns {
    fn new(count: usize) -> Self {
        Self { sizes: vec![0.0; count], errors: vec![0.0; count] }
    }

    fn iter(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.sizes.iter().copied().zip(self.errors.iter().copied())
    }
}

/// Roundings of a term: of a step of the recurrence, and of a product of two rows.
#[derive(Clone, Copy)]
struct Units {
    step: f64,
    product: f64,
}

fn norm(all: &[f64]) -> f64 {
    squares(all).sqrt()
}

fn squares(all: &[f64]) -> f64 {
    all.iter().map(|x| x * x).sum()
}

/// What a step multiplies norms of columns by, at most.
fn growth(head: &Head<'_>, step: &Step<'_>) -> f64 {
    if head.b.is_none() { 1.0 } else { (1.0 - step.strength * squares(step.k)).abs().max(1.0) }
}

impl Units {
    /// Moves the bounds of a state, which is `before` a token, over it.
    fn advance(
        &self,
        head: &Head<'_>,
        step: &Step<'_>,
        (v, before): (&[f64], &[f64]),
        columns: &mut Columns,
    ) {
        let (growth, k, strength) = (growth(head, step), norm(step.k), step.strength.abs());
        // What the delta rule sees of a state is bounded by the norms of its columns.
        let mut norms = vec![0.0; v.len()];
        if head.b.is_some() {
            for row in before.chunks_exact(v.len().max(1)) {
                norms.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
            }
        }
        let entries = columns.sizes.iter_mut().zip(&mut columns.errors);
        for ((value, norm), (size, error)) in v.iter().zip(&norms).zip(entries) {
            let seen = step.decay * k * norm.sqrt();
            let written = strength * k * (value.abs() + seen);
            *size = (step.decay * *size).hypot(written);
            *error =
                (growth * step.decay * *error).hypot(self.step * *size + self.product * written);
        }
    }
}

impl ByRecurrence {
    fn units(&self) -> Units {
        let LinearAttention { keys, values, .. } = self.attention;
        let operand_units = self.tolerances.get(PRODUCTS) * self.dtype.ulp(1.0) / 2.0;
        // Roundings of a sum have either sign.
        let terms = (keys + values + CHUNK) as f64;
        Units { step: 4.0 * U, product: 4.0 * terms.sqrt() * U + operand_units }
    }

    fn head(&self, head: usize) -> Head<'_> {
        let key_head = head / self.attention.shared();
        Head {
            scale: self.attention.scale.into(),
            columns: [self.attention.keys, self.attention.values],
            q: &self.q[key_head],
            k: &self.k[key_head],
            v: &self.v[head],
            g: &self.g[head],
            b: self.b.get(head).map(Vec::as_slice),
            state: &self.zeros,
        }
    }

    /// The bounds of o `[T, V]` of a head, and of the state before each token.
    fn bounds(&self, head: &Head<'_>) -> (Vec<f64>, Vec<Columns>) {
        let (units, values) = (self.units(), self.attention.values);
        let (mut state, mut columns) = (head.state.to_vec(), Columns::new(values));
        let (mut o, mut all) = (Vec::new(), Vec::new());
        for t in 0..head.tokens() {
            let step = head.step(t, &state);
            all.push(columns.clone());
            let v = &head.v[t * values..][..values];
            units.advance(head, &step, (v, &state), &mut columns);
            head.advance(&step, &mut state);
            let q = head.scale.abs() * norm(step.q);
            o.extend(
                columns.iter().map(|(size, error)| FLUSHED + q * (error + units.product * size)),
            );
        }
        (o, all)
    }

    /// The bounds of the gradients of a head.
    fn gradient_bounds(&self, head: &Head<'_>, cotangent: &[f64]) -> Gradients {
        let (Units { step: unit, product: r }, values) = (self.units(), self.attention.values);
        let keys = self.attention.keys;
        let tokens = head.tokens();
        let (_, columns) = self.bounds(head);
        let mut found = Gradients {
            q: vec![0.0; tokens * keys],
            k: vec![0.0; tokens * keys],
            v: vec![0.0; tokens * values],
            g: vec![0.0; tokens],
            b: vec![0.0; tokens],
            state: Vec::new(),
        };
        let mut after = Columns::new(values);
        // Of a token, the squared errors of the sums that dg has in a chunk.
        let mut exponent_errors = vec![0.0; tokens];
        head.reversed(|t, step, state, _| {
            let (before, v) = (&columns[t], &head.v[t * values..][..values]);
            let mut now = before.clone();
            self.units().advance(head, step, (v, state), &mut now);
            let (q, k) = (norm(step.q), norm(step.k));
            let (scale, strength) = (head.scale.abs(), step.strength.abs());
            let (growth, is_delta) = (growth(head, step), head.b.is_some());
            // Squares, one a column.
            let [mut q_error, mut k_error, mut b_error, mut g_error] = [0.0; 4];
            for (column, cotangent) in cotangent[t * values..][..values].iter().enumerate() {
                let (size, error) = (now.sizes[column], now.errors[column]);
                q_error += (scale * cotangent * (error + r * size)).powi(2);
                let (size_before, error_before) = (before.sizes[column], before.errors[column]);
                let old = step.decay * (error_before + r * size_before);
                let error_unseen = U * v[column].abs() + if is_delta { k * old } else { 0.0 };
                let unseen = step.unseen[column].abs();
                let (size, error) = (&mut after.sizes[column], &mut after.errors[column]);
                *size = size.hypot(scale * q * cotangent);
                *error = error.hypot(unit * *size);
                let off = *error + r * *size;
                let mut k_off = unseen * off + *size * error_unseen;
                b_error += (k * (k_off + *size * r * unseen)).powi(2);
                if is_delta {
                    k_off += k * (old * *size + step.decay * size_before * off);
                    *error = (growth * *error).hypot(strength * k * k * r * *size);
                    *size *= growth;
                }
                k_error += (strength * k_off).powi(2);
                found.v[t * values + column] = FLUSHED + strength * k * off;
                g_error += (old * *size + step.decay * size_before * (*error + r * *size)).powi(2);
                *error *= step.decay;
                *size *= step.decay;
            }
            exponent_errors[t] = q * q * q_error + k * k * k_error + strength * strength * b_error;
            let [q, k, g, b] = [q_error, k_error, g_error, b_error].map(|x| FLUSHED + x.sqrt());
            found.q[t * keys..][..keys].fill(q);
            found.k[t * keys..][..keys].fill(k);
            found.g[t] = g;
            found.b[t] = b;
        });
        // In chunks dg is a sum of what the exponents between a token and others have.
        for t in 0..tokens {
            let near = t.saturating_sub(CHUNK)..tokens.min(t + CHUNK);
            found.g[t] += exponent_errors[near].iter().sum::<f64>().sqrt();
        }
        found
    }

    fn hand_over(
        &self,
        name: &'static str,
        prefix: &str,
        dtype: DType,
        [expected, bound]: [&[f64]; 2],
        visitor: &mut dyn Visitor,
    ) {
        let relative = self.tolerances.bound_whole(dtype, [squares(bound), squares(expected)]);
        let judged = Judged::WithinRounding { relative };
        visitor.result(name, &format!("{prefix}{name}"), judged, &|rows| {
            rows.row(0, expected, Bound::Each(bound));
        });
    }
}

/// The gradients of all heads: of q and k summed over the heads that share them.
fn head_gradients(
    attention: &LinearAttention,
    mut each: Vec<Gradients>,
    is_delta: bool,
) -> Vec<Vec<f64>> {
    let (tokens, shared) = (attention.tokens, attention.shared());
    for head in (0..each.len()).filter(|head| head % shared != 0) {
        let (first, rest) = each.split_at_mut(head);
        let first = &mut first[head - head % shared];
        for (to, from) in [(&mut first.q, &rest[0].q), (&mut first.k, &rest[0].k)] {
            to.iter_mut().zip(from).for_each(|(to, x)| *to += x);
        }
    }
    let firsts = each.iter().step_by(shared);
    let numbers = |of: fn(&Gradients) -> &[f64]| by_tokens(each.iter().map(of), tokens, 1);
    let mut found = vec![
        by_tokens(firsts.clone().map(|of| &of.q[..]), tokens, attention.keys),
        by_tokens(firsts.map(|of| &of.k[..]), tokens, attention.keys),
        by_tokens(each.iter().map(|of| &of.v[..]), tokens, attention.values),
        numbers(|of| &of.g),
    ];
    if is_delta {
        found.push(numbers(|of| &of.b));
    }
    found
}

impl Reference for ByRecurrence {
    /// States are cheap to compute again: nothing is saved.
    fn forward(&mut self) {}

    fn outputs(&self, visitor: &mut dyn Visitor) {
        let LinearAttention { heads, tokens, values, .. } = self.attention;
        let each: Vec<_> = (0..heads)
            .into_par_iter()
            .map(|head| {
                let head = self.head(head);
                [head.forward().0, self.bounds(&head).0]
            })
            .collect();
        let [o, bound] =
            [0, 1].map(|of| by_tokens(each.iter().map(|one| &one[of][..]), tokens, values));
        self.hand_over("o", "fwd/", self.dtype, [&o, &bound], visitor);
    }

    fn gradients(&self, _: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        let began = Instant::now();
        let LinearAttention { heads, values, .. } = self.attention;
        let cotangents = by_heads(&in_float64(given, self.dtype, "do"), [heads, values]);
        let is_delta = !self.b.is_empty();
        let of = |body: &(dyn Fn(&Head<'_>, &[f64]) -> Gradients + Sync)| {
            let each = cotangents.par_iter().enumerate();
            let each = each.map(|(head, cotangent)| body(&self.head(head), cotangent)).collect();
            head_gradients(&self.attention, each, is_delta)
        };
        let expected = of(&|head, cotangent| head.backward(cotangent, &self.zeros));
        let bounds = of(&|head, cotangent| self.gradient_bounds(head, cotangent));
        let names = ["dq", "dk", "dv", "dg", "db"];
        for ((name, expected), bound) in names.into_iter().zip(&expected).zip(&bounds) {
            let dtype = if matches!(name, "dg" | "db") { DType::F32 } else { self.dtype };
            self.hand_over(name, prefix, dtype, [expected, bound], visitor);
        }
        visitor.seconds("ref_grad_s", began.elapsed().as_secs_f64());
    }
}

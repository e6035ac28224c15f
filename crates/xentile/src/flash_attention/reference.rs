//! The same mathematics written plainly in float64, a head at a time, with how far kernels may be off.

use super::FlashAttention;
use crate::DType;

/// Half the distance of 1 and the next f32.
const U: f64 = 1.0 / (1 << 24) as f64;

/// A head of queries with its keys and values, each row after row.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    /// The options.
    pub options: FlashAttention,
    /// The dtype of arrays, in which the error bounds are.
    pub dtype: DType,
    /// Columns of queries and keys, and of values.
    pub widths: [usize; 2],
    /// `[S, D]`.
    pub q: &'a [f64],
    /// `[K, D]`.
    pub k: &'a [f64],
    /// `[K, E]`.
    pub v: &'a [f64],
    /// Whether a query sees a key.
    pub sees: &'a (dyn Fn(usize, usize) -> bool + Sync),
    /// The logit of the sink.
    pub sink: Option<f64>,
}

/// A number, and how far one that a kernel gives may be off before it is rounded to its dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Near {
    /// The number.
    pub value: f64,
    /// How far.
    pub bound: f64,
}

impl Near {
    fn add(&mut self, value: f64, bound: f64) {
        self.value += value;
        self.bound += bound;
    }
}

/// What one query sees, and what of that.
#[derive(Clone, Debug)]
struct Row {
    /// Keys, with their logits.
    seen: Vec<(usize, f64)>,
    lse: f64,
    /// How far a logit may be off, the furthest.
    logit: f64,
}

/// Gradients that all queries of a group add to.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[K, D]`.
    pub k: Vec<Near>,
    /// `[K, E]`.
    pub v: Vec<Near>,
}

impl Gradients {
    /// Zeros for keys of these columns and values of those.
    #[must_use]
    pub fn zeros(keys: usize, [width, value_width]: [usize; 2]) -> Self {
        Self {
            k: vec![Near::default(); keys * width],
            v: vec![Near::default(); keys * value_width],
        }
    }
}

impl Head<'_> {
    /// Queries.
    #[must_use]
    pub fn queries(&self) -> usize {
        self.q.len() / self.widths[0]
    }

    /// What probabilities, ds and o may be rounded by, relative to themselves.
    fn rounding(&self) -> f64 {
        self.dtype.ulp(1.0) / 2.0
    }

    /// What probabilities and ds may be off besides, where they are below f16's normal range.
    fn subnormal(&self) -> f64 {
        if self.dtype == DType::F16 { 0.5_f64.powi(25) } else { 0.0 }
    }

    fn keys(&self) -> usize {
        self.v.len() / self.widths[1]
    }

    fn of(all: &[f64], row: usize, width: usize) -> &[f64] {
        &all[row * width..][..width]
    }

    fn row(&self, query: usize) -> Row {
        let [width, _] = self.widths;
        let FlashAttention { scale, softcap } = self.options;
        let q = Self::of(self.q, query, width);
        let mut row = Row { seen: Vec::new(), lse: 0.0, logit: 0.0 };
        let mut largest = self.sink.unwrap_or(f64::NEG_INFINITY);
        for key in (0..self.keys()).filter(|&key| (self.sees)(query, key)) {
            let k = Self::of(self.k, key, width);
            let raw = scale * dot(q, k);
            let size = scale.abs() * dot_of_sizes(q, k);
            let logit = softcap.map_or(raw, |cap| cap * (raw / cap).tanh());
            if logit == f64::NEG_INFINITY {
                continue;
            }
            // A sum of so many terms, times the scale; tanh is off by a few units of its own.
            let of_cap = if softcap.is_some() { 16.0 * logit.abs() } else { 0.0 };
            row.logit = row.logit.max(U * ((width as f64 + 4.0) * size + of_cap));
            largest = largest.max(logit);
            row.seen.push((key, logit));
        }
        let of_sink = self.sink.map_or(0.0, |sink| (sink - largest).exp());
        let sum = row.seen.iter().map(|(_, t)| (t - largest).exp()).sum::<f64>() + of_sink;
        row.lse = if sum == 0.0 { f64::NEG_INFINITY } else { largest + sum.ln() };
        row
    }

    /// Writes o `[E]` of a query, and returns its lse.
    ///
    /// # Panics
    /// `o` has another length.
    pub fn forward(&self, query: usize, o: &mut [Near]) -> Near {
        let width = self.widths[1];
        assert_eq!(o.len(), width);
        o.fill(Near::default());
        let row = self.row(query);
        if row.lse == f64::NEG_INFINITY {
            return Near { value: row.lse, bound: 0.0 };
        }
        let of_sum = (row.seen.len() as f64 + 24.0) * U;
        // A logit and the sum of all are off, exponentials round, and operands of products.
        let relative = 2.0 * row.logit + of_sum + self.rounding();
        for &(key, t) in &row.seen {
            let p = (t - row.lse).exp();
            for (o, v) in o.iter_mut().zip(Self::of(self.v, key, width)) {
                o.add(p * v, relative * (p * v).abs() + self.subnormal() * v.abs());
            }
        }
        Near { value: row.lse, bound: row.logit + of_sum + 2.0 * U * row.lse.abs() }
    }

    /// Writes dq `[D]` of a query for its cotangents, adds its part to `gradients`, and returns what it
    /// adds to dsink.
    ///
    /// # Panics
    /// An array has another length.
    pub fn backward(
        &self,
        query: usize,
        dout: &[f64],
        dlse: f64,
        dq: &mut [Near],
        gradients: &mut Gradients,
    ) -> Near {
        let [width, value_width] = self.widths;
        assert_eq!([dout.len(), dq.len()], [value_width, width]);
        dq.fill(Near::default());
        let row = self.row(query);
        if row.lse == f64::NEG_INFINITY {
            return Near::default();
        }
        let FlashAttention { scale, softcap } = self.options;
        let (mut o, rounding) = (vec![Near::default(); value_width], self.rounding());
        self.forward(query, &mut o);
        let terms = |n: usize| (n as f64 + 8.0) * U;
        let mut delta = Near { value: -dlse, bound: U * dlse.abs() };
        for (o, &dout) in o.iter().zip(dout) {
            let size = (o.value * dout).abs();
            // Of o as it was rounded.
            let bound = o.bound * dout.abs() + (rounding + terms(value_width)) * size;
            delta.add(o.value * dout, bound);
        }
        let relative = 2.0 * row.logit + (2.0 * row.lse.abs() + 24.0) * U;
        let q = Self::of(self.q, query, width);
        // Sums that kernels add parts to are rounded as often.
        let of_keys = terms(row.seen.len() + 32);
        let of_queries = terms(self.queries() + 32);
        for &(key, t) in &row.seen {
            let p = (t - row.lse).exp();
            let (k, v) = (Self::of(self.k, key, width), Self::of(self.v, key, value_width));
            let dp = dot(dout, v);
            let dp_bound = terms(value_width) * dot_of_sizes(dout, v);
            let difference = dp - delta.value;
            let (slope, slope_bound) = match softcap {
                Some(cap) => (1.0 - (t / cap).powi(2), 2.0 * row.logit / cap + 16.0 * U),
                None => (1.0, 0.0),
            };
            let ds = p * difference * slope;
            let sizes = relative * difference.abs() + dp_bound + delta.bound;
            let off = p * (slope * sizes + slope_bound * difference.abs())
                + (rounding + 4.0 * U) * ds.abs()
                + U * p * (dp.abs() + delta.value.abs())
                + self.subnormal();
            for (dq, k) in dq.iter_mut().zip(k) {
                let size = (scale * k).abs();
                dq.add(scale * ds * k, size * (off + of_keys * ds.abs()));
            }
            for (dk, q) in gradients.k[key * width..].iter_mut().zip(q) {
                let size = (scale * q).abs();
                dk.add(scale * ds * q, size * (off + of_queries * ds.abs()));
            }
            for (dv, dout) in gradients.v[key * value_width..].iter_mut().zip(dout) {
                let relative = relative + rounding + of_queries;
                dv.add(p * dout, relative * (p * dout).abs() + self.subnormal() * dout.abs());
            }
        }
        let p = self.sink.map_or(0.0, |sink| (sink - row.lse).exp());
        Near {
            value: -p * delta.value,
            bound: p * (delta.bound + (relative + of_queries) * delta.value.abs()),
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn dot_of_sizes(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTHS: [usize; 2] = [2, 3];

    fn some(count: usize, seed: f64) -> Vec<f64> {
        (0..count).map(|i| 1.3 * (seed + 1.7 * i as f64).sin()).collect()
    }

    struct Problem {
        q: Vec<f64>,
        k: Vec<f64>,
        v: Vec<f64>,
        sink: Option<f64>,
        softcap: Option<f64>,
    }

    impl Problem {
        fn head<'a>(&'a self, sees: &'a (dyn Fn(usize, usize) -> bool + Sync)) -> Head<'a> {
            let Self { q, k, v, sink, softcap } = self;
            let options = FlashAttention { scale: 0.8, softcap: *softcap };
            let (dtype, widths) = (DType::F32, WIDTHS);
            Head { options, dtype, widths, q, k, v, sees, sink: *sink }
        }

        /// The scalar product of o and lse with cotangents.
        fn scalar(&self, sees: &(dyn Fn(usize, usize) -> bool + Sync), given: &[f64]) -> f64 {
            let head = self.head(sees);
            let mut total = 0.0;
            for (query, given) in given.chunks_exact(WIDTHS[1] + 1).enumerate() {
                let mut o = vec![Near::default(); WIDTHS[1]];
                let lse = head.forward(query, &mut o);
                let o = o.iter().map(|o| o.value).collect::<Vec<_>>();
                total += dot(&o, given);
                if lse.value.is_finite() {
                    total += lse.value * given[WIDTHS[1]];
                }
            }
            total
        }
    }

    #[test]
    fn gradients_are_finite_differences() {
        let sees = |query: usize, key: usize| query > 0 && key != query;
        for (sink, softcap) in [(None, None), (Some(0.4), None), (Some(-1.0), Some(1.5))] {
            let (q, k, v) = (some(8, 0.0), some(10, 1.0), some(15, 2.0));
            let problem = Problem { q, k, v, sink, softcap };
            let given = some(16, 3.0);
            let mut sums = Gradients::zeros(5, WIDTHS);
            let (mut dq, mut dsink) = (Vec::new(), 0.0);
            for (query, given) in given.chunks_exact(4).enumerate() {
                let mut of = vec![Near::default(); 2];
                let head = problem.head(&sees);
                dsink += head.backward(query, &given[..3], given[3], &mut of, &mut sums).value;
                dq.extend(of);
            }
            let differs = |change: &dyn Fn(&mut Problem, f64)| {
                let at = |by: f64| {
                    let Problem { q, k, v, .. } = &problem;
                    let (q, k, v) = (q.clone(), k.clone(), v.clone());
                    let mut other = Problem { q, k, v, sink, softcap };
                    change(&mut other, by);
                    other.scalar(&sees, &given)
                };
                (at(1e-5) - at(-1e-5)) / 2e-5
            };
            let close = |name: &str, found: f64, wanted: f64| {
                assert!((found - wanted).abs() < 1e-8, "{name}: {found}, not {wanted}");
            };
            for (i, dq) in dq.iter().enumerate() {
                close("dq", dq.value, differs(&|problem, by| problem.q[i] += by));
            }
            for (i, dk) in sums.k.iter().enumerate() {
                close("dk", dk.value, differs(&|problem, by| problem.k[i] += by));
            }
            for (i, dv) in sums.v.iter().enumerate() {
                close("dv", dv.value, differs(&|problem, by| problem.v[i] += by));
            }
            let of_sink = differs(&|problem, by| problem.sink = problem.sink.map(|sink| sink + by));
            close("dsink", dsink, of_sink);
        }
    }

    #[test]
    fn values_worked_out_by_hand() {
        let sees = |query: usize, _: usize| query == 0;
        let (q, k) = (vec![1.0, 0.0, 1.0, 1.0], vec![1.0, 5.0, 1.0, -5.0]);
        let v = vec![1.0, 2.0, 3.0, 3.0, 2.0, 1.0];
        let problem = Problem { q, k, v, sink: None, softcap: None };
        let head = problem.head(&sees);
        let mut o = [Near::default(); 3];
        let lse = head.forward(0, &mut o);
        assert!((lse.value - (0.8 + 2_f64.ln())).abs() < 1e-15 && lse.bound < 1e-4);
        assert_eq!(o.map(|o| o.value.round()), [2.0; 3]);
        // A query that sees nothing.
        assert_eq!(head.forward(1, &mut o).value, f64::NEG_INFINITY);
        assert_eq!(o, [Near::default(); 3]);
        // A sink takes half of what there is.
        let problem = Problem { sink: Some(0.8 + 2_f64.ln()), ..problem };
        let lse = problem.head(&sees).forward(0, &mut o);
        assert!((lse.value - (0.8 + 4_f64.ln())).abs() < 1e-15);
        assert!(o.iter().all(|o| (o.value - 1.0).abs() < 1e-15));
        assert_eq!(problem.head(&sees).forward(1, &mut o).value, 0.8 + 2_f64.ln());
    }
}

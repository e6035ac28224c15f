//! Cross-entropy in plain operations. XLA fuses them into a few passes over the logits, and keeps
//! what it must in memory.

use super::{Outputs, Problem, ignored, tokens};
use crate::stablehlo::{Builder, Comparison, ElementType, TensorType, Value};

/// The forward pass, and what of it the gradient needs.
pub(super) struct Rows {
    pub(super) outputs: Outputs,
    /// `tanh(logits / c)` `[T, V]`, with softcap.
    tanh: Option<Value>,
    /// Logits in f32, capped, `[T, V]`.
    z: Value,
    /// `z` below the highest of its row, `[T, V]`, and how far lse is above that, `[T]`: their
    /// difference is exact where `z - lse`, of numbers that may be large, would not be.
    below: Value,
    log: Value,
    /// Which column is the label, `[T, V]`.
    at_label: Value,
    ignored: Value,
    /// Labels that name a column or are ignored, `[T]`.
    valid: Value,
}

impl Rows {
    pub(super) fn new(b: &mut Builder, problem: &Problem) -> Self {
        let (options, vocab) = (&problem.options, problem.shape.vocab());
        let tokens = tokens(problem);
        let mut z = b.convert(&b.argument(0), ElementType::F32);
        let matrix = z.ty().clone();
        let tanh = options.softcap.map(|softcap| {
            let c = b.constant(softcap, &matrix);
            let ratio = b.binary("divide", &z, &c);
            let tanh = b.unary("tanh", &ratio);
            z = b.binary("multiply", &tanh, &c);
            tanh
        });
        if options.is_tempered() {
            let temperature = b.constant(options.temperature, &matrix);
            z = b.binary("divide", &z, &temperature);
        }

        let highest = b.reduce("maximum", f64::NEG_INFINITY, &z, 1);
        let spread = b.broadcast(&highest, &[0], &matrix.dims);
        let below = b.binary("subtract", &z, &spread);
        let exp = b.unary("exponential", &below);
        let sum = b.reduce("add", 0.0, &exp, 1);
        let log = b.unary("log", &sum);
        let lse = b.binary("add", &log, &highest);

        let labels = b.argument(1);
        let ignored = ignored(b, problem);
        let (first, end) = (b.integer(0, labels.ty()), b.integer(vocab as i64, labels.ty()));
        let from_first = b.compare(Comparison::GreaterOrEqual, &labels, &first);
        let before_end = b.compare(Comparison::Less, &labels, &end);
        let in_range = b.binary("and", &from_first, &before_end);
        let valid = b.binary("or", &in_range, &ignored);
        let index = TensorType::new(&matrix.dims, problem.labels);
        let columns = b.iota(1, &index);
        let spread = b.broadcast(&labels, &[0], &index.dims);
        let at_label = b.compare(Comparison::Equal, &columns, &spread);
        let nothing = b.constant(0.0, &matrix);
        let picked = b.select(&at_label, &z, &nothing);
        let picked = b.reduce("add", 0.0, &picked, 1);

        let logps = b.binary("subtract", &picked, &highest);
        let logps = b.binary("subtract", &logps, &log);
        let share = b.constant(options.label_smoothing - 1.0, &tokens);
        let mut loss = b.binary("multiply", &share, &logps);
        if options.label_smoothing != 0.0 {
            let sum = b.reduce("add", 0.0, &z, 1);
            let count = b.constant(vocab as f64, &tokens);
            let mean = b.binary("divide", &sum, &count);
            let above = b.binary("subtract", &lse, &mean);
            let share = b.constant(options.label_smoothing, &tokens);
            let term = b.binary("multiply", &share, &above);
            loss = b.binary("add", &loss, &term);
        }
        if options.z_loss != 0.0 {
            let square = b.binary("multiply", &lse, &lse);
            let weight = b.constant(options.z_loss, &tokens);
            let term = b.binary("multiply", &weight, &square);
            loss = b.binary("add", &loss, &term);
        }
        let (zeros, nan) = (b.constant(0.0, &tokens), b.constant(f64::NAN, &tokens));
        let [loss, logps] = [loss, logps].map(|values| {
            let values = b.select(&valid, &values, &nan);
            b.select(&ignored, &zeros, &values)
        });
        let outputs = Outputs { loss, logps, lse };
        Self { outputs, tanh, z, below, log, at_label, ignored, valid }
    }

    /// dlogits for cotangents of loss, logps and lse.
    pub(super) fn gradient(
        &self,
        b: &mut Builder,
        problem: &Problem,
        [g, h, k]: [&Value; 3],
    ) -> Value {
        let (options, vocab) = (&problem.options, problem.shape.vocab());
        let (tokens, matrix) = (tokens(problem), self.z.ty().clone());
        let spread = |b: &mut Builder, x: &Value| b.broadcast(x, &[0], &matrix.dims);

        // a p + at_label * c + rest, with a = g (1 + 2 w lse) - h + k.
        let mut a = g.clone();
        if options.z_loss != 0.0 {
            let weight = b.constant(2.0 * options.z_loss, &tokens);
            let term = b.binary("multiply", &weight, &self.outputs.lse);
            let one = b.constant(1.0, &tokens);
            let term = b.binary("add", &one, &term);
            a = b.binary("multiply", g, &term);
        }
        a = b.binary("subtract", &a, h);
        a = b.binary("add", &a, k);
        let share = b.constant(1.0 - options.label_smoothing, &tokens);
        let taken = b.binary("multiply", g, &share);
        let c = b.binary("subtract", h, &taken);

        let log = spread(b, &self.log);
        let logp = b.binary("subtract", &self.below, &log);
        let p = b.unary("exponential", &logp);
        let a = spread(b, &a);
        let mut dz = b.binary("multiply", &a, &p);
        let (nothing, c) = (b.constant(0.0, &matrix), spread(b, &c));
        let hit = b.select(&self.at_label, &c, &nothing);
        dz = b.binary("add", &dz, &hit);
        if options.label_smoothing != 0.0 {
            let rest = b.constant(-options.label_smoothing / vocab as f64, &tokens);
            let rest = b.binary("multiply", g, &rest);
            let rest = spread(b, &rest);
            dz = b.binary("add", &dz, &rest);
        }
        if let Some(tanh) = &self.tanh {
            let square = b.binary("multiply", tanh, tanh);
            let one = b.constant(1.0, &matrix);
            let slope = b.binary("subtract", &one, &square);
            dz = b.binary("multiply", &dz, &slope);
        }
        if problem.options.is_tempered() {
            let temperature = b.constant(problem.options.temperature, &matrix);
            dz = b.binary("divide", &dz, &temperature);
        }

        // Masked entries have no gradient; a row without a finite sum is NaN throughout.
        let lowest = b.constant(f64::NEG_INFINITY, &matrix);
        let masked = b.compare(Comparison::Equal, &self.z, &lowest);
        dz = b.select(&masked, &nothing, &dz);
        let finite = b.unary_to("is_finite", &self.outputs.lse, ElementType::Pred);
        let sound = b.binary("and", &finite, &self.valid);
        let sound = spread(b, &sound);
        let nan = b.constant(f64::NAN, &matrix);
        dz = b.select(&sound, &dz, &nan);
        // Tokens that take no part: ignored, or with no cotangent but zeros.
        let zeros = b.constant(0.0, &tokens);
        let [g, h, k] = [g, h, k].map(|x| b.compare(Comparison::Equal, x, &zeros));
        let unasked = b.binary("and", &g, &h);
        let unasked = b.binary("and", &unasked, &k);
        let masked = b.binary("or", &self.ignored, &unasked);
        let masked = spread(b, &masked);
        dz = b.select(&masked, &nothing, &dz);
        b.convert(&dz, problem.dtype.into())
    }
}

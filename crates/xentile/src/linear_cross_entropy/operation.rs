//! Linear cross-entropy, as tools see it. Entries are judged by what a program may be off that rounds
//! what the contract lets it round and sums in f32; docs/internals/linear-cross-entropy.md derives it.

use std::time::Instant;

use super::draw::HiddenStates;
use super::reference::{Factors, Gradients, map_rows, pull_back};
use super::{LinearShape, Operands, VocabAxis};
use crate::cross_entropy::operation::{
    Columns, DISTRIBUTION_OUTPUTS, DLOGITS, FORWARD_REL, OPTIONS as LOSS_OPTIONS, OUTPUTS, TILE,
    cotangents, factors, given, has_distribution, measured, options, reduction, signature,
    stored_extents, stored_labels, validate, widened, with_columns, with_made_up_columns,
};
use crate::cross_entropy::reference::{
    TokenCotangents, TokenDistribution, TokenForward, add_gradient_of_columns, column_logp,
    distribution, forward, gradient,
};
use crate::cross_entropy::{CrossEntropy, Target};
use crate::operation::{
    Array, ArrayElement, ArraySpec, Arrays, Bound, Cost, Distribution, Facts, HIDDEN, Judged, Kind,
    Operation, OptionSpec, Pass, Problem, Reference, Signature, Stored, StoredDims, Synthetic,
    TOKENS, ToleranceSpec, Tolerances, VOCAB, Value, Visitor,
};
use crate::{DType, Element, Error, Result, by_dtype};

/// Cross-entropy of hidden states against an output matrix.
pub const OPERATION: Hidden = Hidden;

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&OPERATION];

/// The operation over hidden states.
#[derive(Clone, Copy, Debug)]
pub struct Hidden;

/// Half the distance of 1 and the next f32.
const F32_ROUNDING: f64 = 1.0 / (1 << 24) as f64;

const OPTIONS: [OptionSpec; 12] = [
    OptionSpec::new("bias", Kind::Bool, Value::Bool(false), "true or false", "adds a bias [V]")
        .on_top(),
    OptionSpec::new(
        "vocab_axis",
        Kind::Count,
        Value::Absent,
        "0 for a weight [V, D] or 1 for [D, V]",
        "axis of the weight that is V; by default 0",
    )
    .on_top(),
    OptionSpec::new(
        "max_scratch_bytes",
        Kind::Count,
        Value::Absent,
        "at least 0, or absent",
        "limit of memory beyond operands and results; by default the operation's choice",
    )
    .on_top()
    .swept(),
    LOSS_OPTIONS[0],
    LOSS_OPTIONS[1],
    LOSS_OPTIONS[2],
    LOSS_OPTIONS[3],
    LOSS_OPTIONS[4],
    LOSS_OPTIONS[5],
    LOSS_OPTIONS[6],
    LOSS_OPTIONS[7],
    LOSS_OPTIONS[8],
];

fn vocab_axis(problem: &Problem) -> Result<VocabAxis> {
    let axis = problem.integer("vocab_axis").unwrap_or(0);
    // No count is so large that it would be another after this.
    VocabAxis::try_from(usize::try_from(axis).unwrap_or(usize::MAX))
}

fn shape(problem: &Problem) -> Result<LinearShape> {
    let axis = vocab_axis(problem)?;
    let weight = axis.weight(problem.dim("V"), problem.dim("D"));
    LinearShape::new([problem.dim("T"), problem.dim("D")], weight, Some(axis))
}

fn operands<'a, E: Element + ArrayElement>(
    problem: &Problem,
    inputs: &'a Arrays<'_>,
) -> Result<Operands<'a, E>> {
    Operands::new(
        &options(problem),
        shape(problem)?,
        inputs.expect("hidden"),
        inputs.expect("weight"),
        inputs.slice("bias"),
        inputs.expect::<i64>("labels").into(),
    )
}

fn arrays<E: Element + ArrayElement>(states: HiddenStates<E>) -> Arrays<'static> {
    let HiddenStates { hidden, weight, bias, labels } = states;
    let mut inputs = Arrays::default().with("hidden", hidden).with("weight", weight);
    if let Some(bias) = bias {
        inputs.insert("bias", Array::of(bias));
    }
    inputs.with("labels", labels)
}

impl Operation for Hidden {
    fn facts(&self) -> &'static Facts {
        use Distribution::{Normal, Peaked, Trained, Uniform};
        const FACTS: Facts = Facts {
            name: "linear_cross_entropy",
            about: "cross-entropy of hidden states against an output matrix",
            family: Some("cross_entropy"),
            dims: &[TOKENS, VOCAB, HIDDEN],
            options: &OPTIONS,
            tolerances: &[
                FORWARD_REL,
                DLOGITS[0],
                DLOGITS[1],
                ToleranceSpec {
                    name: "sum_roundings",
                    about: "error of an f32 sum of n products, in sqrt(n) units of rounding of the \
                        sum of their magnitudes",
                    default: |_| 1.0,
                },
                ToleranceSpec {
                    name: "gradient_roundings",
                    about: "relative error in norm of each gradient, in units of rounding of the \
                        dtype, beyond that of a typical logit",
                    default: |problem| if problem.dtype == DType::F32 { 32.0 } else { 1.5 },
                },
            ],
            tile: &TILE,
            distributions: &[Normal, Uniform, Peaked, Trained],
            passes: &[Pass::Fused, Pass::ForwardAndBackward],
            predicts_next: true,
            ..Facts::BASE
        };
        &FACTS
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        validate(problem)?;
        vocab_axis(problem).map(|_| ())
    }

    fn meant(&self, problem: &Problem, option: &str) -> Value {
        match problem.option(option) {
            Value::Absent if option == "vocab_axis" => Value::Integer(0),
            value => value,
        }
    }

    fn is_fused(&self, problem: &Problem) -> bool {
        reduction(problem).is_some()
    }

    fn signature(&self, problem: &Problem, pass: Pass) -> Signature {
        let weight = match vocab_axis(problem) {
            Ok(VocabAxis::Last) => ["D", "V"],
            _ => ["V", "D"],
        };
        let mut inputs =
            vec![ArraySpec::input("hidden", &["T", "D"]), ArraySpec::input("weight", &weight)];
        if problem.flag("bias") {
            inputs.push(ArraySpec::input("bias", &["V"]));
        }
        signature(problem, pass, inputs)
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        let (has_bias, ignore_index) = (problem.flag("bias"), options(problem).ignore_index);
        let shape = shape(problem)?;
        let inputs = by_dtype!(problem.dtype, E => {
            arrays(HiddenStates::<E>::synthetic(from, rows, shape, has_bias, ignore_index)?)
        });
        Ok(with_columns(problem, from, rows, inputs))
    }

    fn given(
        &self,
        problem: &Problem,
        pass: Pass,
        from: &Synthetic,
        rows: &[u64],
    ) -> Arrays<'static> {
        given(problem, pass, from, rows)
    }

    fn measured(
        &self,
        problem: &Problem,
        pass: Pass,
        from: &Synthetic,
        rows: &[u64],
    ) -> Arrays<'static> {
        measured(problem, pass, from, rows)
    }

    fn stored_dims(&self, file: &dyn Stored) -> Result<StoredDims> {
        let (sequences, vocab, width) = stored_extents(file)?;
        let Some(width) = width else {
            return Err(Error::Invalid(format!(
                "it holds `logits`; {} takes `hidden` and `weight`",
                self.name()
            )));
        };
        Ok(StoredDims { sequences, dims: vec![("V", vocab), ("D", width)] })
    }

    /// Hidden states of rows that have a next token, all rounded to the problem's dtype; a bias, which
    /// files do not have, is made up.
    fn stored<'a>(&self, problem: &Problem, file: &'a dyn Stored) -> Result<Arrays<'a>> {
        let StoredDims { sequences: [_, seq_len], dims } = self.stored_dims(file)?;
        let (width, wanted) = (dims[1].1, problem.dim("D"));
        if width != wanted {
            return Err(Error::Invalid(format!(
                "it has hidden states of {width} columns and the config asks for {wanted}; drop \
                 `hidden` or mend it"
            )));
        }
        let used = seq_len.saturating_sub(1) * width;
        let hidden = widened(file, "hidden")?;
        let rows = hidden.chunks((seq_len * width).max(1)).flat_map(|sequence| &sequence[..used]);
        let weight = widened(file, "weight")?;
        let (shape, labels) = (shape(problem)?, stored_labels(file)?);
        let inputs = by_dtype!(problem.dtype, E => {
            let rows = rows.map(|&x| E::from_f32(x)).collect();
            let weight = weight.iter().map(|&x| E::from_f32(x)).collect();
            let (of_bias, has_bias) = (Synthetic::default(), problem.flag("bias"));
            arrays(HiddenStates::<E>::of(shape, rows, weight, labels, &of_bias, has_bias))
        });
        Ok(with_made_up_columns(problem, inputs))
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        Ok(by_dtype!(problem.dtype, E => {
            let columns = Columns::from_inputs(problem, inputs);
            Box::new(OfHidden::<E>::new(problem, operands(problem, inputs)?, columns, tolerances))
        }))
    }

    /// Gradients and their bounds in float64, and the rows of each thread.
    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        let [tokens, vocab, width] = ["T", "V", "D"].map(|letter| problem.dim(letter) as u64);
        let arrays = tokens.checked_add(vocab)?.checked_mul(width)?;
        let rows = vocab.checked_mul(40 * (size_of::<f64>() * threads) as u64)?;
        arrays.checked_mul(3 * size_of::<f64>() as u64)?.checked_add(rows)
    }

    /// Logits and their gradient in f32.
    fn dense_bytes(&self, problem: &Problem) -> Option<u64> {
        problem.elements(&[TOKENS, VOCAB])?.checked_mul(2 * size_of::<f32>() as u64)
    }

    /// Three products of T x D x V.
    fn cost(&self, problem: &Problem) -> Cost {
        let signature = self.signature(problem, self.whole(problem));
        let [bytes_read, bytes_written] = signature.bytes(problem);
        let [tokens, vocab, width] = ["T", "V", "D"].map(|letter| problem.dim(letter) as u64);
        Cost {
            bytes_read,
            bytes_written,
            flops: (3 * 2_u64).saturating_mul(tokens).saturating_mul(vocab).saturating_mul(width),
        }
    }

    fn shape(&self, problem: &Problem, sequences: Option<[usize; 2]>) -> String {
        let [tokens, vocab, width] = ["T", "V", "D"].map(|letter| problem.dim(letter));
        match sequences {
            Some(_) => {
                let signature = self.signature(problem, Pass::ForwardAndBackward);
                let [hidden, weight] = [0, 1].map(|at| signature.operands[at].extents(problem));
                format!("{hidden:?} x {weight:?}")
            }
            None => format!("{tokens} x {width} x {vocab}"),
        }
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let [tokens, vocab, width] = ["T", "V", "D"].map(|letter| problem.dim(letter));
        let line = format!("[{tokens}, {width}] {}, a vocabulary of {vocab}", problem.dtype);
        ("hidden states", line)
    }
}

/// What the reference says of a token, and by how much a program may be off.
struct Token {
    exact: TokenForward,
    bound: TokenForward,
    /// None where nobody asks.
    known: Option<OfDistribution>,
    /// Log-probabilities of its columns.
    column_logps: Vec<f64>,
    /// By how much each of those may be off.
    column_bounds: Vec<f64>,
    /// What logits that are off make of lse.
    lse_shift: f64,
    /// The mean square of logits.
    square: f64,
}

/// What the reference says of a token's distribution.
struct OfDistribution {
    exact: TokenDistribution,
    /// By how much its entropy may be off.
    entropy_bound: f64,
    /// Whether logits that are off leave no doubt of whether its label is the likeliest.
    is_settled: bool,
}

/// The reference, and bounds of what a program's results may be off by.
struct OfHidden<'a, E> {
    problem: &'a Problem,
    options: CrossEntropy,
    tolerances: Tolerances,
    operands: Operands<'a, E>,
    columns: Columns<'a>,
    /// The norm of each column's weights.
    norms: Vec<f64>,
    tokens: Vec<Token>,
}

impl<'a, E: Element + ArrayElement> OfHidden<'a, E> {
    fn new(
        problem: &'a Problem,
        operands: Operands<'a, E>,
        columns: Columns<'a>,
        tolerances: Tolerances,
    ) -> Self {
        let of_column = |column| norm(operands.weights(column).map(E::to_f64));
        let norms = (0..operands.shape().vocab()).map(of_column).collect();
        let options = options(problem);
        Self { problem, options, tolerances, operands, columns, norms, tokens: Vec::new() }
    }

    /// What a sum of `count` terms in f32 is off by, relative to the sum of their magnitudes.
    fn bound_sum(&self, count: usize) -> f64 {
        self.tolerances.get("sum_roundings") * F32_ROUNDING * (count as f64).sqrt()
    }

    /// By how much each of a token's logits may be off, being sums in f32.
    fn shifts(&self, token: usize, logits: &[f64]) -> Vec<f64> {
        let hidden = norm(self.operands.hidden(token).iter().map(|x| x.to_f64()));
        // The sum of magnitudes is at most the product of both norms.
        let gemm_error = self.bound_sum(self.operands.shape().width()) * hidden;
        let columns = logits.iter().zip(&self.norms).enumerate();
        let shift = |(column, (&z, norm)): (usize, (&f64, &f64))| {
            let of_bias = match self.operands.has_bias() {
                true => F32_ROUNDING * (z.abs() + self.operands.bias(column).abs()),
                false => 0.0,
            };
            (gemm_error * norm + of_bias) / self.options.temperature
        };
        columns.map(shift).collect()
    }

    fn label(&self, token: usize) -> i64 {
        self.operands.labels().get(token)
    }

    fn probability(&self, z: f64, lse: f64) -> f64 {
        (self.options.cap(z) - lse).exp()
    }

    /// The derivative of softcap and temperature.
    fn slope(&self, z: f64) -> f64 {
        self.options.slope(z)
    }

    fn token(&self, token: usize, logits: &[f64], shifts: &[f64]) -> Token {
        let label = self.label(token);
        let exact = forward(&self.options, logits, label);
        let lse = exact.lse;
        let grown = logits.iter().zip(shifts);
        let grown = grown.map(|(&z, shift)| self.probability(z, lse) * shift.exp_m1());
        let lse_shift = grown.sum::<f64>().ln_1p();
        let (e, w) = (self.options.label_smoothing, self.options.z_loss);
        let mut bound = TokenForward { loss: 0.0, logps: 0.0, lse: lse_shift };
        let mut scale = lse.abs().max(w * lse * lse).max(1.0);
        if let Target::Column(y) = self.options.target(label, logits.len()) {
            let mean = shifts.iter().sum::<f64>() / shifts.len() as f64;
            bound.logps = shifts[y] + lse_shift;
            bound.loss = (1.0 - e) * bound.logps
                + e * (mean + lse_shift)
                + w * lse_shift * (2.0 * lse.abs() + lse_shift);
            scale = scale.max(logits[y].abs());
        }
        let relative = self.tolerances.get("forward_rel");
        for of_output in [&mut bound.loss, &mut bound.logps, &mut bound.lse] {
            *of_output += relative * scale;
        }
        let square = logits.iter().map(|z| z * z).sum::<f64>() / logits.len() as f64;
        let known = has_distribution(self.problem)
            .then(|| self.distribution(token, logits, shifts, lse, lse_shift, relative * scale));
        let of_column = |&column: &i64| {
            let logp = column_logp(&self.options, logits, label, lse, column);
            let shift = usize::try_from(column).ok().and_then(|column| shifts.get(column));
            let size = if logp.is_finite() { scale.max((logp + lse).abs()) } else { scale };
            (logp, shift.unwrap_or(&0.0) + lse_shift + relative * size)
        };
        let (column_logps, column_bounds) = self.columns.of(token).iter().map(of_column).unzip();
        Token { exact, bound, known, column_logps, column_bounds, lse_shift, square }
    }

    /// The outputs about a token's distribution. The entropy may be off by `rounding` besides the error
    /// that the logits' own error causes.
    fn distribution(
        &self,
        token: usize,
        logits: &[f64],
        shifts: &[f64],
        lse: f64,
        lse_shift: f64,
        rounding: f64,
    ) -> OfDistribution {
        let exact = distribution(&self.options, logits);
        let of_column = |(&z, shift): (&f64, &f64)| {
            let log_p = self.options.cap(z) - lse;
            // The derivative, with how far that moves on the way.
            let moved = (log_p + exact.entropy).abs() + shift + lse_shift;
            let p = log_p.exp();
            if p == 0.0 { 0.0 } else { p * shift.exp_m1() * moved }
        };
        let entropy_bound = logits.iter().zip(shifts).map(of_column).sum::<f64>() + rounding;
        // Shifts are those of logits over the temperature.
        let raw = |column: usize| shifts[column] * self.options.temperature;
        let is_settled = match self.options.target(self.label(token), logits.len()) {
            Target::Column(y) => {
                let over = |v: usize| logits[v] - logits[y];
                let others = (0..logits.len()).filter(|&v| v != y);
                let surely_less = others.clone().all(|v| over(v) < -(raw(v) + raw(y)));
                surely_less || others.clone().any(|v| over(v) > raw(v) + raw(y))
            }
            Target::Ignored | Target::OutOfRange => true,
        };
        OfDistribution { exact, entropy_bound, is_settled }
    }

    /// By how much entries of a row of dlogits may be off as they go into products, with what these
    /// add as they are summed. `dlogits` hold the row on entry. Cotangents of columns are in that of lse, and
    /// by themselves.
    fn row_bounds(
        &self,
        token: usize,
        logits: &[f64],
        of: &Token,
        cotangents: TokenCotangents,
        of_columns: &[f64],
        dlogits: &mut [f64],
    ) {
        let target = self.options.target(self.label(token), logits.len());
        if cotangents.are_zero() || matches!(target, Target::Ignored) {
            return;
        }
        let TokenCotangents { loss: g, logps: h, lse: k, entropy: q } = cotangents;
        let (e, w) = (self.options.label_smoothing, self.options.z_loss);
        let (lse, lse_shift) = (of.exact.lse, of.lse_shift);
        let of_p = (g * (1.0 + 2.0 * w * lse) - h + k).abs();
        let of_lse = (2.0 * g * w * lse_shift).abs();
        let smoothed = (g * e).abs() / logits.len() as f64;
        let mut size = (g * (1.0 + 2.0 * w * lse)).abs() + h.abs() + k.abs();
        // That of the entropy is p (ln p + entropy), of logits and lse that are as large as they are.
        size += q.abs() * lse.abs().max(1.0);
        size += of_columns.iter().map(|r| r.abs()).sum::<f64>();
        let [entropy, entropy_bound] =
            of.known.as_ref().map_or([0.0; 2], |known| [known.exact.entropy, known.entropy_bound]);
        let mut picked = vec![0.0; if of_columns.is_empty() { 0 } else { logits.len() }];
        for (column, r) in self.columns.of(token).iter().zip(of_columns) {
            let at = usize::try_from(*column).ok();
            if let Some(picked) = at.and_then(|at| picked.get_mut(at)) {
                *picked += r.abs();
            }
        }
        let shape = self.operands.shape();
        let sum_error = self.bound_sum(shape.vocab().max(shape.tokens()));
        let of_cap = self.options.softcap.map_or(0.0, |cap| 2.0 / cap);
        // In 16 bits the softmax may be normalised by the sum of rounded exponentials, and hidden
        // states are rounded with the factor of their token.
        let dtype = <E as Element>::DTYPE;
        let rounding = if dtype == DType::F32 { 0.0 } else { dtype.ulp(1.0) / 2.0 };
        // An exponential below the normal range, whose row's largest is near 1.
        let largest = logits.iter().map(|&z| self.probability(z, lse)).fold(0.0, f64::max);
        let subnormal = of_p * largest * dtype.ulp(0.0);
        let shifts = self.shifts(token, logits);
        for (column, (dz, (&z, shift))) in
            dlogits.iter_mut().zip(logits.iter().zip(shifts)).enumerate()
        {
            let (p, slope) = (self.probability(z, lse), self.slope(z));
            let log_p = self.options.cap(z) - lse;
            let of_entropy = if p == 0.0 { 0.0 } else { q.abs() * (log_p + entropy).abs() };
            let of_p_moved = (of_p + of_entropy) * (shift + lse_shift + rounding).exp_m1();
            let of_entropy_moved = q.abs() * (shift + lse_shift + entropy_bound);
            let moved = slope * p * (of_p_moved + of_lse + of_entropy_moved);
            // Terms are rounded before they cancel, but the label's, which is made in one piece.
            let of_terms = match target {
                Target::Column(label) if label == column => dz.abs(),
                _ => slope * ((of_p + of_entropy) * p + smoothed),
            };
            let operand = of_terms + slope * picked.get(column).copied().unwrap_or(0.0);
            let kernel = (self.tolerances.get("dlogits_ulp") * dtype.ulp(operand))
                .max(self.tolerances.get("dlogits_cotangent") * size);
            let relative = operand * (of_cap * shift + rounding) + dz.abs() * sum_error;
            *dz = moved + kernel + subnormal + relative;
        }
    }

    /// What the error of a whole gradient may be, relative to it: roundings of its own and of operands,
    /// and what is usual of logits that are sums in f32.
    fn relative_limit(&self) -> f64 {
        let rounding = <E as Element>::DTYPE.ulp(1.0) / 2.0;
        let square = self.tokens.iter().map(|token| token.square).sum::<f64>();
        let logit = (square / self.tokens.len().max(1) as f64).sqrt();
        let logit_error = self.bound_sum(self.operands.shape().width()) * logit;
        self.tolerances.get("gradient_roundings") * rounding + logit_error
    }
}

impl<E: Element + ArrayElement> Reference for OfHidden<'_, E> {
    fn forward(&mut self) {
        self.tokens = map_rows(&self.operands, |token, logits| {
            self.token(token, logits, &self.shifts(token, logits))
        });
    }

    fn outputs(&self, visitor: &mut dyn Visitor) {
        for (array, name, of) in OUTPUTS {
            visitor.result(array, name, Judged::Within, &|rows| {
                for (token, Token { exact, bound, .. }) in self.tokens.iter().enumerate() {
                    rows.row(token, &[of(exact)], Bound::All(of(bound)));
                }
            });
        }
        for (array, name, of) in DISTRIBUTION_OUTPUTS {
            visitor.result(array, name, Judged::Within, &|rows| {
                for (token, Token { known, .. }) in self.tokens.iter().enumerate() {
                    let Some(known) = known else { continue };
                    let bound = match (array, known.is_settled) {
                        ("correct", true) => f64::MIN_POSITIVE,
                        ("correct", false) => 1.0,
                        _ => known.entropy_bound,
                    };
                    let vocab = self.operands.shape().vocab();
                    let target = self.options.target(self.label(token), vocab);
                    rows.row(token, &[of(&known.exact, target)], Bound::All(bound));
                }
            });
        }
        if self.columns.any() {
            visitor.result("column_logps", "fwd/column_logp", Judged::Within, &|rows| {
                for (token, Token { column_logps, column_bounds, .. }) in
                    self.tokens.iter().enumerate()
                {
                    let first = token * column_logps.len();
                    rows.row(first, column_logps, Bound::Each(column_bounds));
                }
            });
        }
    }

    fn scalar(&self, pass: Pass, given: &Arrays<'_>, visitor: &mut dyn Visitor) {
        let Some(reduction) = reduction(self.problem).filter(|_| pass == Pass::Fused) else {
            return;
        };
        let factors = factors(self.problem, reduction, self.operands.labels(), given);
        let tokens = self.tokens.iter().enumerate();
        let bound: f64 = tokens.map(|(token, of)| factors.of(token).abs() * of.bound.loss).sum();
        let expected = factors.reduce(self.tokens.iter().map(|token| token.exact.loss));
        let found = visitor.found().get("loss").expect("every pass gives the loss").at(0);
        let limit = self.tolerances.get("forward_rel") * expected.abs().max(1.0) + bound;
        visitor.scalar("loss", found, expected, limit);
    }

    fn gradients(&self, pass: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        let labels = self.operands.labels();
        let of_token = cotangents(self.problem, labels, &self.columns, given, pass);
        let cotangents = |token| of_token(token).unwrap_or_default();
        let columns = self.columns.given(given);
        let dlogits = |token: usize, logits: &[f64], out: &mut [f64]| {
            let (label, lse) = (self.label(token), self.tokens[token].exact.lse);
            gradient(&self.options, logits, label, lse, cotangents(token), out);
            let of_columns = columns.cotangents(token);
            add_gradient_of_columns(
                &self.options,
                logits,
                label,
                columns.of(token),
                &of_columns,
                out,
            );
        };
        let began = Instant::now();
        let expected = pull_back(&self.operands, Factors::Signed, dlogits);
        visitor.seconds("ref_grad_s", began.elapsed().as_secs_f64());
        let began = Instant::now();
        let bounds = pull_back(&self.operands, Factors::Magnitudes, |token, logits, out| {
            dlogits(token, logits, out);
            let (of, r) = (&self.tokens[token], columns.cotangents(token));
            self.row_bounds(token, logits, of, cotangents(token), &r, out);
        });
        visitor.seconds("ref_bounds_s", began.elapsed().as_secs_f64());
        let Gradients { hidden, weight, bias } = &expected;
        // Processors may take products below the normal range of f32 for 0.
        let terms = self.operands.shape().vocab().max(self.operands.shape().tokens());
        let flushed = terms as f64 * f64::from(f32::MIN_POSITIVE);
        let judged = Judged::WithinRounding { relative: self.relative_limit() };
        let results = [
            ("dhidden", hidden, &bounds.hidden),
            ("dweight", weight, &bounds.weight),
            ("dbias", bias, &bounds.bias),
        ];
        let has_bias = self.operands.has_bias();
        for (name, expected, bounds) in results.into_iter().take(if has_bias { 3 } else { 2 }) {
            let bounds: Vec<_> = bounds.iter().map(|bound| bound + flushed).collect();
            visitor.result(name, &format!("{prefix}{name}"), judged, &|rows| {
                rows.row(0, expected, Bound::Each(&bounds));
            });
        }
    }
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

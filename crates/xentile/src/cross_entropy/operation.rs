//! Cross-entropy over logits, for tools.

use std::hint::black_box;
use std::time::Instant;

use half::{bf16, f16};
use rayon::prelude::*;

use super::reference::{
    TokenCotangents, TokenDistribution, TokenForward, add_gradient_of_columns, column_logp,
    distribution, forward, gradient,
};
use super::{CrossEntropy, MOST_COLUMNS, Reduction, Target, TokenFactors};
use crate::operation::{
    Array, ArrayElement, ArraySpec, Arrays, Bound, Cost, DimSpec, Distribution, ElementRule, Facts,
    Judged, KernelTraffic, Kind, Operation, OptionSpec, Pass, Problem, Reference, Role, Rows,
    Signature, Stored, StoredDims, Synthetic, TOKENS, ToleranceSpec, Tolerances, VOCAB, Value,
    Visitor,
};
use crate::{DType, Element, Error, Labels, LogitsShape, Result, by_dtype};

/// Cross-entropy over logits.
pub const OPERATION: Logits = Logits;

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&OPERATION];

/// The operation over logits.
#[derive(Clone, Copy, Debug)]
pub struct Logits;

/// The options of a loss over a vocabulary.
pub(crate) const OPTIONS: [OptionSpec; 9] = [
    OptionSpec::new(
        "ignore_index",
        Kind::Integer,
        Value::Integer(-100),
        "any integer",
        "tokens with this label are skipped",
    ),
    OptionSpec::new(
        "label_smoothing",
        Kind::Number,
        Value::Number(0.0),
        "in [0, 1]",
        "share of the target spread evenly over the vocabulary",
    ),
    OptionSpec::new(
        "z_loss",
        Kind::Number,
        Value::Number(0.0),
        "finite and at least 0",
        "the weight of lse^2",
    ),
    OptionSpec::new(
        "softcap",
        Kind::Number,
        Value::Absent,
        "finite and above 0, or absent",
        "the bound c of c tanh(z / c)",
    ),
    OptionSpec::new(
        "temperature",
        Kind::Number,
        Value::Number(1.0),
        "in [2^-40, 2^40]",
        "divisor of the logits, after softcap",
    ),
    OptionSpec::new(
        "reduction",
        Kind::Word(&["none", "mean", "sum"]),
        Value::Word("mean"),
        "none, mean or sum",
        "how token losses become a scalar; with none each has a cotangent",
    ),
    OptionSpec::new(
        "weights",
        Kind::Word(&["none", "random"]),
        Value::Word("none"),
        "none or random",
        "token weights: ones, or uniform in [0, 1) from the input's seed",
    ),
    OptionSpec::new(
        "distribution",
        Kind::Bool,
        Value::Bool(false),
        "true or false; true with reduction none",
        "requests entropy with its gradient, and top-1 match, of each token",
    ),
    OptionSpec::new(
        "columns",
        Kind::Count,
        Value::Absent,
        "in [1, 128] with reduction none, or absent",
        "random columns per token whose log-probabilities are requested; some repeat or do not \
         exist",
    ),
];

/// The options of a loss over logits: those of a loss over a vocabulary, and the factor.
const OF_LOGITS: [OptionSpec; 11] = [
    OPTIONS[0],
    OPTIONS[1],
    OPTIONS[2],
    OPTIONS[3],
    OPTIONS[4],
    OPTIONS[5],
    OPTIONS[6],
    OptionSpec::new(
        "factor",
        Kind::Number,
        Value::Number(1.0),
        "any number, inf and nan too; 1 with reduction none",
        "factor of the reduced loss and its gradient",
    ),
    OptionSpec::new(
        "factor_form",
        Kind::Word(&["constant", "argument"]),
        Value::Word("constant"),
        "constant or argument",
        "the factor is a constant or an argument of the program",
    ),
    OPTIONS[7],
    OPTIONS[8],
];

/// The tile of kernels over a vocabulary.
pub(crate) const TILE: [DimSpec; 2] = [
    DimSpec { key: "time_block", about: "tokens of a tile", default: None, ..TOKENS },
    DimSpec { key: "block_size", about: "vocabulary columns of a tile", default: None, ..VOCAB },
];

/// Tolerances of both losses.
pub(crate) const FORWARD_REL: ToleranceSpec = ToleranceSpec {
    name: "forward_rel",
    about: "loss, logps and lse: error relative to max(|lse|, |z_y|, 1)",
    default: |_| 2e-6,
};

/// Rounding of dlogits.
pub(crate) const DLOGITS: [ToleranceSpec; 2] = [
    ToleranceSpec {
        name: "dlogits_ulp",
        about: "dlogits: units in the last place from the rounded reference",
        // Only f32 is fine enough to show that exp is up to 3 units in the last place off, once in
        // the sum and once in the gradient, and that a capped logit is a few off, which exp turns
        // into a relative error.
        default: |problem| match problem.dtype {
            DType::F32 => 16.0 + 4.0 * problem.number("softcap").unwrap_or(0.0),
            _ => 1.0,
        },
    },
    ToleranceSpec {
        name: "dlogits_cotangent",
        about: "dlogits: or this share of the token's cotangent, if more",
        default: |_| 1.0 / (1 << 23) as f64,
    },
];

/// An output of a token: its name, the name of its metrics, and its value in the reference.
type Output = (&'static str, &'static str, fn(&TokenForward) -> f64);

/// The outputs of the forward pass.
pub(crate) const OUTPUTS: [Output; 3] = [
    ("loss", "fwd/loss", |token| token.loss),
    ("logps", "fwd/logp", |token| token.logps),
    ("lse", "fwd/lse", |token| token.lse),
];

/// An auxiliary output of a token: its name, the name of its metrics, and its value in the reference.
pub(crate) type DistributionOutput =
    (&'static str, &'static str, fn(&TokenDistribution, Target) -> f64);

/// The auxiliary outputs; 0 for ignored tokens.
pub(crate) const DISTRIBUTION_OUTPUTS: [DistributionOutput; 2] = [
    ("entropy", "fwd/entropy", |of, target| match target {
        Target::Ignored => 0.0,
        _ => of.entropy,
    }),
    ("correct", "fwd/correct", |of, target| match (target, of.argmax) {
        (Target::Column(label), Some(likeliest)) if label == likeliest => 1.0,
        _ => 0.0,
    }),
];

/// Whether entropy and top-1 match are requested.
#[must_use]
pub fn has_distribution(problem: &Problem) -> bool {
    problem.flag("distribution")
}

/// The number of columns per token whose log-probabilities are requested.
#[must_use]
pub fn columns(problem: &Problem) -> usize {
    problem.integer("columns").map_or(0, |count| usize::try_from(count).unwrap_or(usize::MAX))
}

/// The requested columns, equally many for each token, and cotangents of their log-probabilities.
pub(crate) struct Columns<'a> {
    count: usize,
    columns: &'a [i64],
    cotangents: &'a [f32],
}

impl<'a> Columns<'a> {
    /// The columns in `inputs`, without cotangents.
    pub(crate) fn from_inputs(problem: &Problem, inputs: &'a Arrays<'_>) -> Self {
        let columns = inputs.slice("columns").unwrap_or(&[]);
        Self { count: columns.len() / problem.dim("T").max(1), columns, cotangents: &[] }
    }

    /// The same columns with the cotangents in `given`.
    pub(crate) fn given(&self, given: &'a Arrays<'_>) -> Self {
        Self { cotangents: given.slice("dcolumn_logps").unwrap_or(&[]), ..*self }
    }

    /// The columns of `token`.
    pub(crate) fn of(&self, token: usize) -> &'a [i64] {
        &self.columns[token * self.count..][..self.count]
    }

    /// The cotangents of the columns of `token`.
    pub(crate) fn cotangents(&self, token: usize) -> Vec<f64> {
        let all = self.cotangents.get(token * self.count..).unwrap_or(&[]);
        all.iter().take(self.count).map(|&r| r.into()).collect()
    }

    /// Whether there are columns.
    pub(crate) fn any(&self) -> bool {
        self.count > 0
    }
}

/// Returns `inputs` with random columns, if they are requested.
pub(crate) fn with_columns(
    problem: &Problem,
    from: &Synthetic,
    rows: &[u64],
    inputs: Arrays<'static>,
) -> Arrays<'static> {
    match columns(problem) {
        0 => inputs,
        count => inputs.with("columns", from.columns(rows, problem.dim("V"), count)),
    }
}

/// Returns inputs of a file with random columns, if they are requested.
pub(crate) fn with_made_up_columns<'a>(problem: &Problem, mut inputs: Arrays<'a>) -> Arrays<'a> {
    if columns(problem) > 0 {
        let rows: Vec<u64> = (0..problem.dim("T") as u64).collect();
        let all = Synthetic::default().columns(&rows, problem.dim("V"), columns(problem));
        inputs.insert("columns", Array::of(all));
    }
    inputs
}

/// The options that kernels take.
#[must_use]
pub fn options(problem: &Problem) -> CrossEntropy {
    let default = CrossEntropy::default();
    let number = |name| problem.number(name);
    CrossEntropy {
        ignore_index: problem.integer("ignore_index").unwrap_or(default.ignore_index),
        label_smoothing: number("label_smoothing").unwrap_or(default.label_smoothing),
        z_loss: number("z_loss").unwrap_or(default.z_loss),
        softcap: number("softcap"),
        temperature: number("temperature").unwrap_or(default.temperature),
    }
}

/// How token losses become a scalar, if they do.
#[must_use]
pub fn reduction(problem: &Problem) -> Option<Reduction> {
    match problem.word("reduction") {
        "mean" => Some(Reduction::Mean),
        "sum" => Some(Reduction::Sum),
        _ => None,
    }
}

/// Whether tokens have weights.
#[must_use]
pub fn has_weights(problem: &Problem) -> bool {
    problem.word("weights") == "random"
}

/// The factor of the reduced loss.
#[must_use]
pub fn factor(problem: &Problem) -> f64 {
    problem.number("factor").unwrap_or(1.0)
}

/// Whether the factor is an argument of programs.
fn takes_factor(problem: &Problem) -> bool {
    problem.word("factor_form") == "argument"
}

/// The shape of logits.
///
/// # Errors
/// More elements than memory can address.
pub fn logits_shape(problem: &Problem) -> Result<LogitsShape> {
    LogitsShape::new(problem.dim("T"), problem.dim("V"))
}

pub(crate) fn validate(problem: &Problem) -> Result<()> {
    options(problem).validate().map_err(|error| Error::Invalid(format!("options: {error}")))?;
    if reduction(problem).is_none() && has_weights(problem) {
        return Err(Error::Invalid(
            "options.weights has no part in reduction none, which takes a cotangent a token; set \
             options.weights to none or options.reduction to mean or sum"
                .to_owned(),
        ));
    }
    let asked = match (has_distribution(problem), problem.integer("columns")) {
        (_, Some(count)) if !(1..=MOST_COLUMNS as i64).contains(&count) => {
            return Err(Error::Invalid(format!(
                "options.columns is {count}; it must be in [1, {MOST_COLUMNS}]"
            )));
        }
        (true, _) => Some("options.distribution is true".to_owned()),
        (false, Some(count)) => Some(format!("options.columns is {count}")),
        (false, None) => None,
    };
    if let Some(asked) = asked.filter(|_| reduction(problem).is_some()) {
        return Err(Error::Invalid(format!(
            "{asked} with reduction {}, whose cotangents are of the loss alone; set options.reduction to none",
            problem.word("reduction")
        )));
    }
    if reduction(problem).is_none() && (factor(problem) != 1.0 || takes_factor(problem)) {
        return Err(Error::Invalid(format!(
            "options.factor is {}, {}; reduction none has no part for it, as each loss has a \
             cotangent: leave it out or set options.reduction to mean or sum",
            factor(problem),
            if takes_factor(problem) { "an argument" } else { "a constant" },
        )));
    }
    Ok(())
}

/// The signature of a pass, for `inputs` with gradients: adds labels, weights, cotangents and outputs.
pub(crate) fn signature(problem: &Problem, pass: Pass, inputs: Vec<ArraySpec>) -> Signature {
    let tokens = |name, role| ArraySpec::number(name, &["T"], role);
    let mut results = match pass {
        Pass::Fused => vec![ArraySpec::number("loss", &[], Role::Output)],
        Pass::Backward => Vec::new(),
        Pass::Forward | Pass::ForwardAndBackward => {
            ["loss", "logps", "lse"].map(|name| tokens(name, Role::Output)).into()
        }
    };
    let of_columns = |name, role| ArraySpec::number(name, &["T", "columns"], role);
    let has_columns = columns(problem) > 0;
    if matches!(pass, Pass::Forward | Pass::ForwardAndBackward) {
        // Differentiable results come first, as their cotangents do.
        if has_distribution(problem) {
            results.push(tokens("entropy", Role::Output));
        }
        if has_columns {
            results.push(of_columns("column_logps", Role::Output));
        }
        if has_distribution(problem) {
            results.push(tokens("correct", Role::Output));
        }
    }
    if pass.has_gradients() {
        let gradient = |spec: &ArraySpec| ArraySpec {
            name: gradient_of(spec.name),
            role: Role::Gradient(spec.name),
            ..spec.clone()
        };
        results.extend(inputs.iter().map(gradient));
    }
    let mut operands = inputs;
    let labels = Role::Input { differentiable: false };
    operands.push(ArraySpec::new("labels", &["T"], ElementRule::Index, labels));
    if has_columns {
        operands.push(ArraySpec::new("columns", &["T", "columns"], ElementRule::Index, labels));
    }
    match pass {
        Pass::Forward => (),
        Pass::Fused => {
            if has_weights(problem) {
                operands.push(tokens("weights", Role::Input { differentiable: false }));
            }
            if takes_factor(problem) {
                let role = Role::Input { differentiable: false };
                operands.push(ArraySpec::number("factor", &[], role));
            }
            if problem.cotangent != 1.0 {
                operands.push(ArraySpec::number("cotangent", &[], Role::Cotangent("loss")));
            }
        }
        Pass::Backward | Pass::ForwardAndBackward => {
            operands.push(tokens("dloss", Role::Cotangent("loss")));
            operands.push(tokens("dlogps", Role::Cotangent("logps")));
            operands.push(tokens("dlse", Role::Cotangent("lse")));
            if has_distribution(problem) {
                operands.push(tokens("dentropy", Role::Cotangent("entropy")));
            }
            if has_columns {
                operands.push(of_columns("dcolumn_logps", Role::Cotangent("column_logps")));
            }
        }
    }
    Signature { operands, results }
}

fn gradient_of(name: &str) -> &'static str {
    match name {
        "logits" => "dlogits",
        "hidden" => "dhidden",
        "weight" => "dweight",
        _ => "dbias",
    }
}

/// Distinguishes the seed of the entropies' cotangents from others.
const OF_ENTROPY: u64 = 0x0065_6e74_726f_7079;

/// Weights or cotangents of tokens.
pub(crate) fn given(
    problem: &Problem,
    pass: Pass,
    from: &Synthetic,
    rows: &[u64],
) -> Arrays<'static> {
    let none = Arrays::default();
    match pass {
        Pass::Forward => none,
        Pass::Fused => {
            let mut given = none;
            if has_weights(problem) {
                given.insert("weights", Array::of(from.weights(rows)));
            }
            if takes_factor(problem) {
                given.insert("factor", Array::of(vec![factor(problem) as f32]));
            }
            if problem.cotangent != 1.0 {
                given.insert("cotangent", Array::of(vec![problem.cotangent as f32]));
            }
            given
        }
        Pass::Backward | Pass::ForwardAndBackward => {
            let [loss, logps, lse] = from.cotangents(rows);
            let mut given = none.with("dloss", loss).with("dlogps", logps).with("dlse", lse);
            if has_distribution(problem) {
                let [entropy, ..] = from.apart(OF_ENTROPY).cotangents(rows);
                given.insert("dentropy", Array::of(entropy));
            }
            if columns(problem) > 0 {
                let of_columns = from.column_cotangents(rows, columns(problem));
                given.insert("dcolumn_logps", Array::of(of_columns));
            }
            given
        }
    }
}

/// Weights or cotangents as in a training step: only losses have cotangents.
pub(crate) fn measured(
    problem: &Problem,
    pass: Pass,
    from: &Synthetic,
    rows: &[u64],
) -> Arrays<'static> {
    let mut given = given(problem, pass, from, rows);
    for name in ["dlogps", "dlse"] {
        if let Some(cotangents) = given.get_mut(name) {
            cotangents.fill(0.0);
        }
    }
    given
}

/// The cotangents of each token's outputs; none for a masked token. The lse in log-probabilities of `columns` adds
/// to the cotangent of lse.
pub(crate) fn cotangents<'a>(
    problem: &Problem,
    labels: Labels<'a>,
    columns: &Columns<'a>,
    given: &'a Arrays<'_>,
    pass: Pass,
) -> Box<dyn Fn(usize) -> Option<TokenCotangents> + Sync + 'a> {
    let Some(reduction) = reduction(problem).filter(|_| pass == Pass::Fused) else {
        let [g, h, k] = ["dloss", "dlogps", "dlse"].map(|name| given.expect::<f32>(name));
        let (q, columns) = (given.slice::<f32>("dentropy"), columns.given(given));
        return Box::new(move |token| {
            let [loss, logps, lse] = [g, h, k].map(|cotangent| f64::from(cotangent[token]));
            let entropy = q.map_or(0.0, |cotangent| f64::from(cotangent[token]));
            let all = TokenCotangents { loss, logps, lse, entropy };
            Some(all.with_columns(&columns.cotangents(token)))
        });
    };
    let factors = factors(problem, reduction, labels, given);
    let cotangent = problem.cotangent * factor(problem);
    Box::new(move |token| match factors.of(token) {
        0.0 => None,
        factor => Some(TokenCotangents { loss: cotangent * factor, ..Default::default() }),
    })
}

/// The factors of losses in their reduction.
pub(crate) fn factors<'a>(
    problem: &Problem,
    reduction: Reduction,
    labels: Labels<'a>,
    given: &'a Arrays<'_>,
) -> TokenFactors<'a> {
    TokenFactors::new(options(problem), reduction, labels, given.slice("weights"))
        .expect("a weight for each label")
}

/// Extents of an array that must have these axes.
pub(crate) fn extents<const N: usize>(
    file: &dyn Stored,
    name: &str,
    axes: &str,
) -> Result<[usize; N]> {
    let needed = "needed are input_ids with logits, or with hidden and weight";
    let extents =
        file.extents(name).map_err(|error| Error::Invalid(format!("{error}; {needed}")))?;
    if extents.contains(&0) {
        return Err(Error::Invalid(format!(
            "`{name}` has shape {extents:?}; every extent must be at least 1"
        )));
    }
    <[usize; N]>::try_from(extents.as_slice())
        .map_err(|_| Error::Invalid(format!("`{name}` has shape {extents:?}; it must be {axes}")))
}

/// The checked extents of a file's arrays: `[B, S]`, V, and D if the file has hidden states and a weight.
pub(crate) fn stored_extents(file: &dyn Stored) -> Result<([usize; 2], usize, Option<usize>)> {
    let ids = extents::<2>(file, "input_ids", "[B, S]")?;
    file.integers("input_ids")?;
    let agree = |name: &str, found: [usize; 2]| {
        if found == ids {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "`{name}` starts with {found:?} and `input_ids` is {ids:?}; they must agree"
        )))
    };
    if file.names().iter().any(|name| name == "logits") {
        let [b, s, vocab] = extents(file, "logits", "[B, S, V]")?;
        agree("logits", [b, s])?;
        file.floats("logits")?;
        return Ok((ids, vocab, None));
    }
    let [b, s, width] = extents(file, "hidden", "[B, S, D]")?;
    let [vocab, weight_width] = extents(file, "weight", "[V, D]")?;
    agree("hidden", [b, s])?;
    if width != weight_width {
        return Err(Error::Invalid(format!(
            "`hidden` has D = {width} and `weight` has D = {weight_width}; they must agree"
        )));
    }
    file.floats("hidden")?;
    file.floats("weight")?;
    Ok((ids, vocab, Some(width)))
}

/// The labels: the next token of each row but the last of a sequence.
pub(crate) fn stored_labels(file: &dyn Stored) -> Result<Vec<i64>> {
    let [_, seq_len] = extents::<2>(file, "input_ids", "[B, S]")?;
    let ids = file.integers("input_ids")?;
    let sequences = ids.chunks(seq_len.max(1));
    Ok(sequences.flat_map(|ids| ids.get(1..).unwrap_or(&[])).copied().collect())
}

/// Returns a stored array in f32.
pub(crate) fn widened(file: &dyn Stored, name: &str) -> Result<Vec<f32>> {
    fn widen<E: Element + ArrayElement>(array: &Array<'_>) -> Vec<f32> {
        E::elements(array).map_or(Vec::new(), |all| all.iter().map(|x| x.to_f32()).collect())
    }
    let array = file.floats(name)?;
    Ok(match &array {
        Array::Bf16(_) => widen::<bf16>(&array),
        Array::F16(_) => widen::<f16>(&array),
        _ => widen::<f32>(&array),
    })
}

/// Returns the logits of a file, without a copy if the wanted rows are contiguous.
fn stored_logits<'a, E: Element + ArrayElement>(
    file: &'a dyn Stored,
    [batch, seq_len]: [usize; 2],
    vocab: usize,
) -> Result<Array<'a>> {
    let array = file.floats("logits")?;
    let used = seq_len.saturating_sub(1) * vocab;
    let found = match &array {
        Array::Bf16(_) => DType::Bf16,
        Array::F16(_) => DType::F16,
        _ => DType::F32,
    };
    if found != E::DTYPE {
        return Err(Error::Invalid(format!(
            "`logits` is {found} and the config asks for {}; set dtype={found}",
            E::DTYPE
        )));
    }
    if batch == 1 {
        return Ok(array.cut(used));
    }
    let all = E::elements(&array).expect("checked");
    let sequences = all.chunks((seq_len * vocab).max(1));
    Ok(Array::of(sequences.flat_map(|all| &all[..used]).copied().collect::<Vec<E>>()))
}

/// Logits as hidden states times a weight.
fn product<E: Element + ArrayElement>(
    file: &dyn Stored,
    [_, seq_len]: [usize; 2],
    [vocab, width]: [usize; 2],
) -> Result<Array<'static>> {
    use ndarray::ArrayView2;
    let wrong = |error: ndarray::ShapeError| Error::Invalid(error.to_string());
    let (hidden, weight) = (widened(file, "hidden")?, widened(file, "weight")?);
    let weight = ArrayView2::from_shape((vocab, width), &weight).map_err(wrong)?;
    let used = seq_len.saturating_sub(1);
    let mut logits: Vec<E> = Vec::new();
    for sequence in hidden.chunks((seq_len * width).max(1)) {
        let rows =
            ArrayView2::from_shape((used, width), &sequence[..used * width]).map_err(wrong)?;
        logits.extend(rows.dot(&weight.t()).iter().map(|&z| E::from_f32(z)));
    }
    Ok(Array::of(logits))
}

impl Operation for Logits {
    fn facts(&self) -> &'static Facts {
        use Distribution::{Masked, Normal, Offset, Peaked, Trained, Uniform};
        const FACTS: Facts = Facts {
            name: "cross_entropy",
            about: "cross-entropy over logits",
            dims: &[TOKENS, VOCAB],
            options: &OF_LOGITS,
            tolerances: &[
                FORWARD_REL,
                DLOGITS[0],
                DLOGITS[1],
                ToleranceSpec {
                    name: "dlogits_equal",
                    about: "dlogits: the least share of entries equal to the rounded reference",
                    default: |problem| {
                        let share = match problem.dtype {
                            DType::F32 => 0.0,
                            // Entropies add a difference, which is less exact near 0 than its terms.
                            _ if has_distribution(problem) => 0.99,
                            _ => 0.999,
                        };
                        // Entries of columns are rounded before and after the addition.
                        f64::max(share - columns(problem) as f64 / problem.dim("V") as f64, 0.0)
                    },
                },
            ],
            tile: &TILE,
            distributions: &[Normal, Uniform, Peaked, Trained, Offset, Masked],
            passes: &[Pass::Forward, Pass::Backward, Pass::Fused, Pass::ForwardAndBackward],
            predicts_next: true,
            has_zeros: true,
            traffic: &[
                KernelTraffic { name: "xentile_cross_entropy_fused", passes: 2.0 },
                KernelTraffic { name: "xentile_cross_entropy_forward", passes: 1.0 },
                KernelTraffic { name: "xentile_cross_entropy_backward", passes: 2.0 },
            ],
            ..Facts::BASE
        };
        &FACTS
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        validate(problem)
    }

    fn is_fused(&self, problem: &Problem) -> bool {
        reduction(problem).is_some()
    }

    /// `pallas_bridge` implements factors, columns, and cotangents of auxiliary outputs.
    fn needs_jax(&self, problem: &Problem) -> bool {
        factor(problem) != 1.0
            || takes_factor(problem)
            || has_distribution(problem)
            || columns(problem) > 0
    }

    fn signature(&self, problem: &Problem, pass: Pass) -> Signature {
        signature(problem, pass, vec![ArraySpec::input("logits", &["T", "V"])])
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        from.check_distribution(self, "logits")?;
        let shape = logits_shape(problem)?;
        let logits = by_dtype!(problem.dtype, E => {
            let mut logits = vec![E::from_f32(0.0); shape.elements()];
            from.fill_logits(rows, shape.vocab(), &mut logits);
            Array::of(logits)
        });
        let labels = from.labels(rows, shape.vocab(), options(problem).ignore_index);
        let mut inputs = Arrays::default();
        inputs.insert("logits", logits);
        Ok(with_columns(problem, from, rows, inputs.with("labels", labels)))
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

    fn zeros(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        let shape = logits_shape(problem)?;
        let mut logits = Array::filled(problem.dtype, shape.elements(), 0.0);
        // Written, since pages that were never written all map to one page of zeros, which stays in the cache.
        logits.fill(black_box(0.0));
        let labels = from.labels(rows, shape.vocab(), options(problem).ignore_index);
        let mut inputs = Arrays::default();
        inputs.insert("logits", logits);
        Ok(with_columns(problem, from, rows, inputs.with("labels", labels)))
    }

    fn stored_dims(&self, file: &dyn Stored) -> Result<StoredDims> {
        let (sequences, vocab, _) = stored_extents(file)?;
        Ok(StoredDims { sequences, dims: vec![("V", vocab)] })
    }

    fn stored<'a>(&self, problem: &Problem, file: &'a dyn Stored) -> Result<Arrays<'a>> {
        let (sequences, vocab, width) = stored_extents(file)?;
        let logits = by_dtype!(problem.dtype, E => match width {
            None => stored_logits::<E>(file, sequences, vocab)?,
            Some(width) => product::<E>(file, sequences, [vocab, width])?,
        });
        let mut inputs = Arrays::default();
        inputs.insert("logits", logits);
        inputs.insert("labels", Array::of(stored_labels(file)?));
        Ok(with_made_up_columns(problem, inputs))
    }

    /// With hidden states and a weight: the logits, those of one sequence in f32, and both factors in f32.
    fn stored_bytes(&self, problem: &Problem, file: &dyn Stored) -> Option<u64> {
        let ([batch, seq_len], vocab, width) = stored_extents(file).ok()?;
        let row = (seq_len as u64).checked_mul(vocab as u64)?;
        let logits =
            row.checked_mul(batch as u64)?.checked_mul(problem.dtype.size_bytes() as u64)?;
        match width {
            None if batch == 1 => Some(0),
            None => Some(logits),
            Some(width) => {
                let rows = (batch as u64).checked_mul(seq_len as u64)?.checked_add(vocab as u64)?;
                let factors = rows.checked_mul(4 * width as u64)?;
                logits.checked_add(row.checked_mul(4)?)?.checked_add(factors)
            }
        }
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        let shape = logits_shape(problem)?;
        let labels = inputs.expect::<i64>("labels");
        let options = options(problem);
        options.check_labels(labels.into(), shape)?;
        Ok(by_dtype!(problem.dtype, E => Box::new(OfLogits {
            problem,
            options,
            vocab: shape.vocab(),
            logits: inputs.expect::<E>("logits"),
            labels,
            columns: Columns::from_inputs(problem, inputs),
            tolerances,
            tokens: Vec::new(),
            distributions: Vec::new(),
        })))
    }

    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        let rows = (problem.dim("V") as u64).checked_mul(32 * threads as u64)?;
        (problem.dim("T") as u64).checked_mul(128)?.checked_add(rows)
    }

    /// Every probability in f32.
    fn dense_bytes(&self, problem: &Problem) -> Option<u64> {
        problem.elements(self.dims())?.checked_mul(size_of::<f32>() as u64)
    }

    fn cost(&self, problem: &Problem) -> Cost {
        let bytes = (problem.dim("T") * problem.dim("V") * problem.dtype.size_bytes()) as u64;
        Cost { bytes_read: bytes, bytes_written: bytes, flops: 0 }
    }

    fn shape(&self, problem: &Problem, sequences: Option<[usize; 2]>) -> String {
        let (tokens, vocab) = (problem.dim("T"), problem.dim("V"));
        match sequences {
            Some([batch, seq_len]) => format!("[{batch}, {seq_len}, {vocab}]"),
            None => format!("logits [{tokens}, {vocab}]"),
        }
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let (tokens, vocab) = (problem.dim("T"), problem.dim("V"));
        ("logits", format!("[{tokens}, {vocab}] {}", problem.dtype))
    }
}

/// The reference on logits of one dtype.
struct OfLogits<'a, E> {
    problem: &'a Problem,
    options: CrossEntropy,
    vocab: usize,
    logits: &'a [E],
    labels: &'a [i64],
    columns: Columns<'a>,
    tolerances: Tolerances,
    tokens: Vec<TokenForward>,
    /// Empty where nobody asks.
    distributions: Vec<TokenDistribution>,
}

impl<E: Element> OfLogits<'_, E> {
    fn row(&self, token: usize) -> &[E] {
        &self.logits[token * self.vocab..][..self.vocab]
    }

    fn wide_row(&self, token: usize, wide: &mut Vec<f64>) {
        wide.clear();
        wide.extend(self.row(token).iter().map(|z| z.to_f64()));
    }

    /// The magnitude that errors of a token's forward outputs are relative to: the largest of their terms.
    fn scale(&self, token: usize, reference: &TokenForward) -> f64 {
        let logit = match self.options.target(self.labels[token], self.vocab) {
            Target::Column(y) => self.row(token)[y].to_f64().abs(),
            Target::Ignored | Target::OutOfRange => 0.0,
        };
        let z_loss = self.options.z_loss * reference.lse * reference.lse;
        let terms = [reference.lse.abs(), logit, z_loss];
        terms.into_iter().filter(|term| term.is_finite()).fold(1.0, f64::max)
    }

    /// The log-probabilities of a token's columns, and the magnitudes that their errors are relative to.
    fn column_logps(&self, token: usize, wide: &mut Vec<f64>) -> (Vec<f64>, Vec<f64>) {
        self.wide_row(token, wide);
        let (label, lse) = (self.labels[token], self.tokens[token].lse);
        let scale = self.scale(token, &self.tokens[token]);
        let of = |&column: &i64| {
            let logp = column_logp(&self.options, wide, label, lse, column);
            (logp, if logp.is_finite() { scale.max((logp + lse).abs()) } else { scale })
        };
        self.columns.of(token).iter().map(of).unzip()
    }

    /// Adds the gradient for cotangents of a token's columns to `dlogits`, and its bounds to `bounds`: each term
    /// and each sum may be rounded.
    fn add_columns(
        &self,
        token: usize,
        wide: &[f64],
        cotangents: &[f64],
        dlogits: &mut [f64],
        bounds: &mut [f64],
    ) {
        let (columns, label) = (self.columns.of(token), self.labels[token]);
        if self.options.target(label, self.vocab) == Target::Ignored {
            return;
        }
        let ulp = |x: f64| E::DTYPE.ulp(x);
        for (at, first) in columns.iter().enumerate() {
            let Some(column) = usize::try_from(*first).ok().filter(|column| *column < self.vocab)
            else {
                continue;
            };
            if columns[..at].contains(first) {
                continue;
            }
            let slope = self.options.slope(wide[column]);
            let same = columns.iter().zip(cotangents).filter(|(column, _)| *column == first);
            let terms = same.map(|(_, r)| (r * slope).abs());
            let whole = dlogits[column].abs() + terms.clone().sum::<f64>();
            // Half a unit for each rounding, twice, as the reference is rounded too.
            bounds[column] += self.tolerances.get("dlogits_ulp") * ulp(dlogits[column])
                + terms.map(|term| ulp(term) + ulp(whole)).sum::<f64>()
                + ulp(whole);
        }
        add_gradient_of_columns(&self.options, wide, label, columns, cotangents, dlogits);
    }
}

impl<E: Element> Reference for OfLogits<'_, E> {
    fn forward(&mut self) {
        let labels = self.labels.par_iter().enumerate();
        let token = |wide: &mut Vec<f64>, (token, &label): (usize, &i64)| {
            self.wide_row(token, wide);
            forward(&self.options, wide, label)
        };
        self.tokens = labels.map_init(Vec::new, token).collect();
        if has_distribution(self.problem) {
            let tokens = (0..self.labels.len()).into_par_iter();
            let of = |wide: &mut Vec<f64>, token: usize| {
                self.wide_row(token, wide);
                distribution(&self.options, wide)
            };
            self.distributions = tokens.map_init(Vec::new, of).collect();
        }
    }

    fn outputs(&self, visitor: &mut dyn Visitor) {
        let judged = Judged::Relative { limit: self.tolerances.get("forward_rel") };
        for (array, name, of) in OUTPUTS {
            visitor.result(array, name, judged, &|rows| {
                for (token, reference) in self.tokens.iter().enumerate() {
                    rows.row(token, &[of(reference)], Bound::All(self.scale(token, reference)));
                }
            });
        }
        for (array, name, of) in DISTRIBUTION_OUTPUTS {
            let judged = if array == "correct" { Judged::Reached } else { judged };
            visitor.result(array, name, judged, &|rows| {
                for (token, reference) in self.distributions.iter().enumerate() {
                    let target = self.options.target(self.labels[token], self.vocab);
                    let scale = self.scale(token, &self.tokens[token]);
                    rows.row(token, &[of(reference, target)], Bound::All(scale));
                }
            });
        }
        if self.columns.any() {
            visitor.result("column_logps", "fwd/column_logp", judged, &|rows| {
                let mut wide = Vec::new();
                for token in 0..self.labels.len() {
                    let (logps, scales) = self.column_logps(token, &mut wide);
                    rows.row(token * logps.len(), &logps, Bound::Each(&scales));
                }
            });
        }
    }

    /// Judges the reduced loss times its factor, or the mean of per-token losses.
    fn scalar(&self, pass: Pass, given: &Arrays<'_>, visitor: &mut dyn Visitor) {
        let losses = self.tokens.iter().map(|token| token.loss);
        let found = visitor.found().get("loss").expect("every pass gives the loss");
        let count = self.tokens.len();
        let (found, expected) = match reduction(self.problem).filter(|_| pass == Pass::Fused) {
            Some(reduction) => {
                let labels = Labels::from(self.labels);
                let reduced = factors(self.problem, reduction, labels, given).reduce(losses);
                (found.at(0), factor(self.problem) * reduced)
            }
            None => {
                let found = (0..count).map(|token| found.at(token)).sum::<f64>();
                (found / count as f64, losses.sum::<f64>() / count as f64)
            }
        };
        let size = expected.abs().max(factor(self.problem).abs().min(1.0));
        // Values that are not finite must be equal.
        let limit = if size.is_finite() { self.tolerances.get("forward_rel") * size } else { 0.0 };
        visitor.scalar("loss", found, expected, limit);
    }

    fn gradients(&self, pass: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        let labels = Labels::from(self.labels);
        let cotangents = cotangents(self.problem, labels, &self.columns, given, pass);
        let columns = self.columns.given(given);
        // Between them 0 x inf depends on where a probability becomes 0.
        let judged = match pass == Pass::Fused && !factor(self.problem).is_finite() {
            true => Judged::Reached,
            false => Judged::Rounded {
                ulps: self.tolerances.get("dlogits_ulp"),
                equal: self.tolerances.get("dlogits_equal"),
            },
        };
        let share = self.tolerances.get("dlogits_cotangent");
        let row = |rows: &dyn Rows, [wide, dz, bounds]: &mut [Vec<f64>; 3], token: usize| {
            dz.clear();
            dz.resize(self.vocab, 0.0);
            let mut size = 0.0;
            let of_columns = columns.cotangents(token);
            if let Some(cotangents) = cotangents(token) {
                self.wide_row(token, wide);
                let (label, lse) = (self.labels[token], self.tokens[token].lse);
                gradient(&self.options, wide, label, lse, cotangents, dz);
                let TokenCotangents { loss: g, logps: h, lse: k, entropy: q } = cotangents;
                size = (g * (1.0 + 2.0 * self.options.z_loss * lse)).abs() + h.abs() + k.abs();
                // That of the entropy is p (ln p + entropy), of logits and lse that are as large as they are.
                size += q.abs() * self.scale(token, &self.tokens[token]);
                size += of_columns.iter().map(|r| r.abs()).sum::<f64>();
            }
            if of_columns.is_empty() {
                return rows.row(token * self.vocab, dz, Bound::All(share * size));
            }
            bounds.clear();
            bounds.resize(self.vocab, share * size);
            self.add_columns(token, wide, &of_columns, dz, bounds);
            rows.row(token * self.vocab, dz, Bound::Each(bounds));
        };
        let began = Instant::now();
        visitor.result("dlogits", &format!("{prefix}dlogits"), judged, &|rows| {
            let tokens = (0..self.labels.len()).into_par_iter();
            tokens.for_each_init(Default::default, |wide, token| row(rows, wide, token));
        });
        visitor.seconds("ref_grad_s", began.elapsed().as_secs_f64());
    }
}

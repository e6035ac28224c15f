//! RMSNorm and LayerNorm for tools. Entries are judged by the contract's error bounds.

use std::time::Instant;

use rayon::prelude::*;

use super::reference::{Magnitudes, RMS_Y_ROUNDINGS, Row, U, add};
use super::{Kind, Norm, NormShape};
use crate::operation::{
    Array, ArrayElement, ArraySpec, Arrays, Bound, Cost, Distribution, ElementRule, Facts, HIDDEN,
    Judged, Kind as OptionKind, Operation, OptionSpec, Pass, Problem, Reference, Role, Signature,
    Synthetic, TOKENS, ToleranceSpec, Tolerances, Value, Visitor, WHOLE_RESULTS,
};
use crate::{DType, Element, Error, Result, by_dtype};

/// RMSNorm of rows, with a residual or without.
pub const RMS_NORM: NormOperation = NormOperation(Kind::Rms);
/// LayerNorm of rows, with a bias or without.
pub const LAYER_NORM: NormOperation = NormOperation(Kind::Layer);

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&RMS_NORM, &LAYER_NORM];

/// One of the two operations.
#[derive(Clone, Copy, Debug)]
pub struct NormOperation(Kind);

const WEIGHT_DTYPE: OptionSpec = OptionSpec::new(
    "weight_dtype",
    OptionKind::Word(&["f32", "bf16", "f16"]),
    Value::Absent,
    "f32, bf16 or f16",
    "dtype of the weight; by default that of rows",
)
.on_top();

const fn flag(name: &'static str, about: &'static str) -> OptionSpec {
    OptionSpec::new(name, OptionKind::Bool, Value::Bool(false), "true or false", about)
}

const fn eps(default: f64, about: &'static str) -> OptionSpec {
    let default = Value::Number(default);
    OptionSpec::new("eps", OptionKind::Number, default, "finite and at least 0", about)
}

pub(crate) const RMS_OPTIONS: [OptionSpec; 4] = [
    eps(Norm::RMS.eps, "added to the mean of squares"),
    flag("zero_centred", "scales rows by 1 + weight"),
    flag("residual", "adds a residual first, and returns the sum").on_top(),
    WEIGHT_DTYPE,
];

const LAYER_OPTIONS: [OptionSpec; 3] = [
    eps(Norm::LAYER.eps, "added to the variance"),
    flag("bias", "adds a bias of the weight's dtype").on_top(),
    WEIGHT_DTYPE,
];

pub(crate) const TOLERANCES: [ToleranceSpec; 2] = [
    ToleranceSpec {
        name: "sum_roundings",
        about: "error of sums over rows and tokens beyond the kernels' bound, in sqrt(n) units \
                of rounding of f32",
        default: |_| 0.0,
    },
    WHOLE_RESULTS,
];

/// Seeds of the weight, of residual or bias, and of the cotangents dy and dsum.
const SEEDS: [u64; 4] =
    [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb, 0xd6e8_feb8_6659_fd93];

/// The loss of a few products that fall below f32's normal range.
const FLUSHED: f64 = 8.0 * f32::MIN_POSITIVE as f64;

/// The dtype of the weight.
fn weight_dtype(problem: &Problem) -> DType {
    problem.word("weight_dtype").parse().unwrap_or(problem.dtype)
}

/// The shape of rows.
///
/// # Errors
/// More elements than memory can address.
pub fn shape(problem: &Problem) -> Result<NormShape> {
    NormShape::new(problem.dim("T"), problem.dim("D"))
}

/// Rows of `[T, D]` from a distribution.
fn draw_rows(problem: &Problem, from: &Synthetic, rows: &[u64]) -> Array<'static> {
    from.draw(problem.dtype, rows, problem.dim("D"))
}

/// Values `[D]` of the weight's dtype, near `centre` as in trained models.
fn draw_columns(problem: &Problem, from: &Synthetic, centre: f32) -> Array<'static> {
    let from = Synthetic { distribution: Distribution::Normal, std: Some(0.25), ..from.clone() };
    let mut columns = vec![0_f32; problem.dim("D")];
    from.fill(&[0], problem.dim("D"), &mut columns);
    by_dtype!(weight_dtype(problem), W => {
        Array::of(columns.iter().map(|x| W::from_f32(centre + x)).collect::<Vec<W>>())
    })
}

/// The inputs: rows, their weight, and the residual or the bias, from any distribution without labels.
///
/// # Errors
/// More elements than memory can address.
pub(crate) fn draw(problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
    shape(problem)?;
    let mut inputs = Arrays::default();
    inputs.insert("x", draw_rows(problem, from, rows));
    // As in training, factors are near 1.
    let [weight, second, ..] = SEEDS.map(|seed| from.apart(seed));
    let centre = if problem.flag("zero_centred") { 0.0 } else { 1.0 };
    inputs.insert("weight", draw_columns(problem, &weight, centre));
    if problem.flag("residual") {
        inputs.insert("residual", draw_rows(problem, &second, rows));
    }
    if problem.flag("bias") {
        inputs.insert("bias", draw_columns(problem, &second, 0.0));
    }
    Ok(inputs)
}

impl NormOperation {
    /// The options that kernels take.
    #[must_use]
    pub fn norm(self, problem: &Problem) -> Norm {
        let default = match self.0 {
            Kind::Rms => Norm::RMS,
            Kind::Layer => Norm::LAYER,
        };
        Norm {
            eps: problem.number("eps").unwrap_or(default.eps),
            zero_centred: problem.flag("zero_centred"),
            ..default
        }
    }

    fn statistics(self) -> &'static [&'static str] {
        match self.0 {
            Kind::Rms => &["rstd"],
            Kind::Layer => &["mean", "rstd"],
        }
    }
}

impl Operation for NormOperation {
    fn facts(&self) -> &'static Facts {
        const RMS: Facts = Facts {
            name: "rms_norm",
            about: "rows over their root mean square, times a weight",
            dims: &[TOKENS, HIDDEN],
            options: &RMS_OPTIONS,
            tolerances: &TOLERANCES,
            distributions: &[Distribution::Normal, Distribution::Uniform, Distribution::Offset],
            ..Facts::BASE
        };
        const LAYER: Facts = Facts {
            name: "layer_norm",
            about: "rows less their mean, over their deviation, times a weight and plus a bias",
            options: &LAYER_OPTIONS,
            ..RMS
        };
        match self.0 {
            Kind::Rms => &RMS,
            Kind::Layer => &LAYER,
        }
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        let valid = self.norm(problem).validate();
        valid.map_err(|error| Error::Invalid(format!("options: {error}")))
    }

    fn meant(&self, problem: &Problem, option: &str) -> Value {
        match option {
            "weight_dtype" => Value::Word(weight_dtype(problem).name()),
            _ => problem.option(option),
        }
    }

    fn signature(&self, problem: &Problem, pass: Pass) -> Signature {
        let (has_residual, has_bias) = (problem.flag("residual"), problem.flag("bias"));
        let weight = match problem.option("weight_dtype") {
            Value::Absent => ElementRule::Compute,
            _ => ElementRule::Is(weight_dtype(problem)),
        };
        let rows = |name, role| ArraySpec::new(name, &["T", "D"], ElementRule::Compute, role);
        let columns = |name, role| ArraySpec::new(name, &["D"], weight, role);
        let input = Role::Input { differentiable: true };
        let mut operands = vec![rows("x", input), columns("weight", input)];
        if has_residual {
            operands.push(rows("residual", input));
        }
        if has_bias {
            operands.push(columns("bias", input));
        }
        let mut results = Vec::new();
        if pass != Pass::Backward {
            results.push(rows("y", Role::Output));
            if has_residual {
                results.push(rows("sum", Role::Output));
            }
            let statistics = self.statistics().iter();
            results.extend(statistics.map(|name| ArraySpec::number(name, &["T"], Role::Output)));
        }
        if pass.has_gradients() {
            operands.push(rows("dy", Role::Cotangent("y")));
            if has_residual {
                operands.push(rows("dsum", Role::Cotangent("sum")));
            }
            // The gradient of the residual, too.
            results.push(rows("dx", Role::Gradient("x")));
            results.push(columns("dweight", Role::Gradient("weight")));
            if has_bias {
                results.push(columns("dbias", Role::Gradient("bias")));
            }
        }
        Signature { operands, results }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        from.check_unlabelled(self, "rows")?;
        draw(problem, from, rows)
    }

    /// Standard normal cotangents.
    fn given(
        &self,
        problem: &Problem,
        pass: Pass,
        from: &Synthetic,
        rows: &[u64],
    ) -> Arrays<'static> {
        let mut cotangents = Arrays::default();
        if !pass.has_gradients() {
            return cotangents;
        }
        let unit = from.unit();
        cotangents.insert("dy", draw_rows(problem, &unit.apart(SEEDS[2]), rows));
        if problem.flag("residual") {
            cotangents.insert("dsum", draw_rows(problem, &unit.apart(SEEDS[3]), rows));
        }
        cotangents
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        Ok(by_dtype!(problem.dtype, E => {
            Box::new(NormReference::<E>::new(*self, problem, inputs, tolerances)?)
        }))
    }

    /// Rows in float64, for each thread.
    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        (problem.dim("D") as u64).checked_mul((10 * size_of::<f64>() * threads) as u64)
    }

    /// Both passes: x is read twice, or with a residual both terms and the sum.
    fn cost(&self, problem: &Problem) -> Cost {
        let signature = self.signature(problem, Pass::ForwardAndBackward);
        let [bytes_read, bytes_written] = signature.bytes(problem);
        let again = signature.operands.iter().filter(|spec| ["x", "weight"].contains(&spec.name));
        let again: u64 = again.filter_map(|spec| spec.bytes(problem)).sum();
        let statistics = (4 * self.statistics().len() * problem.dim("T")) as u64;
        Cost { bytes_read: bytes_read + again + statistics, bytes_written, flops: 0 }
    }

    fn shape(&self, problem: &Problem, _: Option<[usize; 2]>) -> String {
        format!("[{}, {}]", problem.dim("T"), problem.dim("D"))
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let second = ["residual", "bias"].into_iter().find(|name| problem.flag(name));
        let second = second.map_or(String::new(), |name| format!(", with a {name}"));
        ("rows", format!("{} {}{second}", self.shape(problem, None), problem.dtype))
    }
}

/// The reference on rows of one dtype.
pub(crate) struct NormReference<'a, E> {
    problem: &'a Problem,
    norm: Norm,
    shape: NormShape,
    x: &'a [E],
    residual: Option<&'a [E]>,
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    tolerances: Tolerances,
}

fn squares(all: &[f64]) -> f64 {
    all.iter().map(|x| x * x).sum()
}

impl<'a, E: Element + ArrayElement> NormReference<'a, E> {
    /// The reference of one of the operations.
    ///
    /// # Errors
    /// More elements than memory can address.
    pub(crate) fn new(
        operation: NormOperation,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Self> {
        let columns = |name| {
            let array = inputs.get(name)?;
            Some((0..array.len()).map(|column| array.at(column)).collect::<Vec<_>>())
        };
        Ok(Self {
            problem,
            norm: operation.norm(problem),
            shape: shape(problem)?,
            x: inputs.expect::<E>("x"),
            residual: inputs.slice::<E>("residual"),
            weight: columns("weight").expect("a weight is an input"),
            bias: columns("bias"),
            tolerances,
        })
    }

    /// y of a row, and the bound of each entry.
    pub(crate) fn norm(&self, token: usize) -> [Vec<f64>; 2] {
        let (x, columns) = (self.normalised(token), self.shape.columns());
        let (row, bias) = (self.row(&x), self.bias.as_deref());
        let [mut y, mut bound] = [vec![0.0; columns], vec![0.0; columns]];
        row.forward(bias, &mut y);
        row.y_bound(bias, &mut bound);
        bound.iter_mut().for_each(|bound| *bound += FLUSHED);
        [y, bound]
    }

    /// Hands over the sum with the residual, if there is one, which is rounded as the reference rounds it.
    pub(crate) fn hand_sum(&self, judged: Judged, visitor: &mut dyn Visitor) {
        if self.residual.is_none() {
            return;
        }
        visitor.result("sum", "fwd/sum", judged, &|rows| {
            self.tokens().for_each(|token| {
                let sum = self.normalised(token);
                rows.row(token * self.shape.columns(), &sum, Bound::All(0.0));
            });
        });
    }

    fn token_row<'b, T>(&self, matrix: &'b [T], token: usize) -> &'b [T] {
        let columns = self.shape.columns();
        &matrix[token * columns..][..columns]
    }

    fn row_of(&self, matrix: &[E], token: usize) -> Vec<f64> {
        self.token_row(matrix, token).iter().map(|x| x.to_f64()).collect()
    }

    /// The normalised row: x, or its sum with the residual.
    fn normalised(&self, token: usize) -> Vec<f64> {
        let Some(residual) = self.residual else {
            return self.row_of(self.x, token);
        };
        let x = self.token_row(self.x, token);
        let mut sum = x.to_vec();
        add(x, self.token_row(residual, token), &mut sum);
        sum.iter().map(|x| x.to_f64()).collect()
    }

    fn row<'b>(&'b self, x: &'b [f64]) -> Row<'b> {
        let mut row = Row::new(&self.norm, x, &self.weight);
        row.extra_roundings = self.extra_roundings(x.len());
        row
    }

    /// dx of a row, and the bound of each entry; dweight, dbias and their magnitudes are added to.
    fn gradient(
        &self,
        token: usize,
        [dy, dsum]: [Option<&[E]>; 2],
        [dweight, dbias]: [&mut [f64]; 2],
        magnitudes: &mut Magnitudes,
    ) -> [Vec<f64>; 2] {
        let (x, columns) = (self.normalised(token), self.shape.columns());
        let dy = dy.map_or_else(|| vec![0.0; columns], |dy| self.row_of(dy, token));
        let dsum = dsum.map(|dsum| self.row_of(dsum, token));
        let [mut dx, mut bound] = [vec![0.0; columns], vec![0.0; columns]];
        let row = self.row(&x);
        row.backward(&dy, dsum.as_deref(), &mut dx, [dweight, dbias]);
        row.dx_bound(&dy, &dx, &mut bound, magnitudes);
        bound.iter_mut().for_each(|bound| *bound += FLUSHED);
        [dx, bound]
    }

    /// Roundings that the tolerances allow a sum of `count` terms beside the contract's.
    fn extra_roundings(&self, count: usize) -> f64 {
        self.tolerances.get("sum_roundings") * (count as f64).sqrt()
    }

    fn tokens(&self) -> rayon::range::Iter<usize> {
        (0..self.shape.rows()).into_par_iter()
    }

    /// The error of all of y that is allowed, of its magnitude.
    fn relative_of_y(&self) -> f64 {
        match self.norm.kind {
            Kind::Rms => {
                let roundings = RMS_Y_ROUNDINGS + self.extra_roundings(self.shape.columns());
                self.tolerances.bound_whole(E::DTYPE, [0.0; 2]) + roundings * U
            }
            Kind::Layer => {
                let [y, bounds] = self
                    .tokens()
                    .map(|token| self.norm(token).map(|row| squares(&row)))
                    .reduce(|| [0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
                self.tolerances.bound_whole(E::DTYPE, [bounds, y])
            }
        }
    }

    /// Hands over a statistic with its bound.
    fn hand_statistic(
        &self,
        visitor: &mut dyn Visitor,
        name: &'static str,
        statistic: impl Fn(&Row) -> [f64; 2] + Sync,
    ) {
        visitor.result(name, &format!("fwd/{name}"), Judged::Within, &|rows| {
            self.tokens().for_each(|token| {
                let [expected, bound] = statistic(&self.row(&self.normalised(token)));
                rows.row(token, &[expected], Bound::All(bound + f64::from(f32::MIN_POSITIVE)));
            });
        });
    }
}

impl<E: Element + ArrayElement> Reference for NormReference<'_, E> {
    /// Rows are cheap to recompute: nothing is saved.
    fn forward(&mut self) {}

    fn outputs(&self, visitor: &mut dyn Visitor) {
        let within = Judged::WithinRounding { relative: self.relative_of_y() };
        visitor.result("y", "fwd/y", within, &|rows| {
            self.tokens().for_each(|token| {
                let [y, bound] = self.norm(token);
                rows.row(token * self.shape.columns(), &y, Bound::Each(&bound));
            });
        });
        self.hand_sum(within, visitor);
        if self.norm.kind == Kind::Layer {
            self.hand_statistic(visitor, "mean", |row| [row.mean, row.mean_bound()]);
        }
        self.hand_statistic(visitor, "rstd", |row| [row.rstd, row.rstd_bound()]);
    }

    fn gradients(&self, _: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        let began = Instant::now();
        let (count, width) = (self.shape.rows(), self.shape.columns());
        let cotangents = ["dy", "dsum"].map(|name| given.slice::<E>(name));
        let zeros = || ([vec![0.0; width], vec![0.0; width]], Magnitudes::zeros(width));
        let (mut sums, mut magnitudes) = zeros();
        let [mut total, mut bounds] = [0.0; 2];
        for token in 0..count {
            let [dweight, dbias] = &mut sums;
            let [dx, bound] = self.gradient(token, cotangents, [dweight, dbias], &mut magnitudes);
            total += squares(&dx);
            bounds += squares(&bound);
        }
        let relative = self.tolerances.bound_whole(E::DTYPE, [bounds, total]);
        let judged = Judged::WithinRounding { relative };
        visitor.result("dx", &format!("{prefix}dx"), judged, &|rows| {
            self.tokens().for_each_init(zeros, |([dweight, dbias], magnitudes), token| {
                let [dx, bound] = self.gradient(token, cotangents, [dweight, dbias], magnitudes);
                rows.row(token * width, &dx, Bound::Each(&bound));
            });
        });
        // Sums over all rows, in blocks that are added up, and a rounding of the result.
        let extra = self.extra_roundings(width);
        let mut roundings =
            count as f64 + self.norm.kind.sum_roundings() + 1.0 + self.extra_roundings(count);
        if self.norm.kind == Kind::Rms {
            roundings += extra;
        }
        let bounds = |sizes: &[f64]| -> Vec<f64> {
            let bound = |size| FLUSHED * count as f64 + roundings * U * size;
            sizes.iter().map(bound).collect()
        };
        let mut dweight_bound = bounds(&magnitudes.dweight);
        for (bound, error) in dweight_bound.iter_mut().zip(&magnitudes.xhat_errors) {
            *bound += (1.0 + extra) * error;
        }
        let [dweight, dbias] = sums;
        let mut columns = vec![("dweight", dweight, dweight_bound)];
        if self.bias.is_some() {
            columns.push(("dbias", dbias, bounds(&magnitudes.dbias)));
        }
        for (name, expected, bound) in columns {
            let both = [squares(&bound), squares(&expected)];
            let relative = self.tolerances.bound_whole(weight_dtype(self.problem), both);
            let judged = Judged::WithinRounding { relative };
            visitor.result(name, &format!("{prefix}{name}"), judged, &|rows| {
                rows.row(0, &expected, Bound::Each(&bound));
            });
        }
        visitor.seconds("ref_grad_s", began.elapsed().as_secs_f64());
    }
}

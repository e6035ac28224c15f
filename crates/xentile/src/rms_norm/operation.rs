//! RMSNorm, as tools see it. Entries are judged by the contract's error bounds.

use std::time::Instant;

use rayon::prelude::*;

use super::reference::{add, backward, dx_scale, forward};
use super::{DWEIGHT_ROUNDINGS, DX_ROUNDINGS, NormShape, RSTD_ROUNDINGS, RmsNorm, Y_ROUNDINGS};
use crate::norm::operation::{
    F32_ROUNDING, FLUSHED, SEEDS, TOLERANCES, WEIGHT_DTYPE, columns_of, rows_of, weight_rule,
};
pub use crate::norm::operation::{shape, weight_dtype};
use crate::operation::{
    ArrayElement, ArraySpec, Arrays, Bound, Cost, DimSpec, Distribution, ElementRule, HIDDEN,
    Judged, Kind, Operation, OptionSpec, Pass, Problem, Reference, Role, Signature, Synthetic,
    TOKENS, ToleranceSpec, Tolerances, Value, Visitor,
};
use crate::{Element, Error, Result, by_dtype};

/// RMSNorm of rows, with a residual or without.
pub const OPERATION: Norm = Norm;

/// The operation.
#[derive(Clone, Copy, Debug)]
pub struct Norm;

pub(crate) const OPTIONS: [OptionSpec; 4] = [
    OptionSpec::new(
        "eps",
        Kind::Number,
        Value::Number(1e-6),
        "finite and at least 0",
        "what is added to the mean of squares",
    ),
    OptionSpec::new(
        "zero_centred",
        Kind::Bool,
        Value::Bool(false),
        "true or false",
        "whether the weight is what a factor is above 1",
    ),
    OptionSpec::new(
        "residual",
        Kind::Bool,
        Value::Bool(false),
        "true or false",
        "whether a residual is added first, and the sum given",
    )
    .on_top(),
    WEIGHT_DTYPE,
];

/// The options that kernels take.
#[must_use]
pub fn options(problem: &Problem) -> RmsNorm {
    let default = RmsNorm::default();
    RmsNorm {
        eps: problem.number("eps").unwrap_or(default.eps),
        zero_centred: problem.flag("zero_centred"),
    }
}

/// Rows, their weight, and the residual if there is one, of any distribution that knows of no labels.
///
/// # Errors
/// More elements than memory can address.
pub(crate) fn draw(problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
    shape(problem)?;
    let mut inputs = Arrays::default();
    inputs.insert("x", rows_of(problem, from, rows));
    // As in training, weights are near the factor 1.
    let [of_weight, of_residual, ..] = SEEDS.map(|seed| from.apart(seed));
    let centre = if problem.flag("zero_centred") { 0.0 } else { 1.0 };
    inputs.insert("weight", columns_of(problem, &of_weight, centre));
    if problem.flag("residual") {
        inputs.insert("residual", rows_of(problem, &of_residual, rows));
    }
    Ok(inputs)
}

impl Operation for Norm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn about(&self) -> &'static str {
        "rows over their root mean square, times a weight"
    }

    fn dims(&self) -> &'static [DimSpec] {
        &[TOKENS, HIDDEN]
    }

    fn options(&self) -> &'static [OptionSpec] {
        &OPTIONS
    }

    fn tolerances(&self) -> &'static [ToleranceSpec] {
        &TOLERANCES
    }

    fn distributions(&self) -> &'static [Distribution] {
        &[Distribution::Normal, Distribution::Uniform, Distribution::Offset]
    }

    fn passes(&self) -> &'static [Pass] {
        &[Pass::Forward, Pass::Backward, Pass::ForwardAndBackward]
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        options(problem).validate().map_err(|error| Error::Invalid(format!("options: {error}")))
    }

    fn meant(&self, problem: &Problem, option: &str) -> Value {
        match option {
            "weight_dtype" => Value::Word(weight_dtype(problem).name()),
            _ => problem.option(option),
        }
    }

    fn signature(&self, problem: &Problem, pass: Pass) -> Signature {
        let has_residual = problem.flag("residual");
        let weight = weight_rule(problem);
        let rows = |name, role| ArraySpec::new(name, &["T", "D"], ElementRule::Compute, role);
        let mut operands = vec![ArraySpec::input("x", &["T", "D"])];
        operands.push(ArraySpec::new(
            "weight",
            &["D"],
            weight,
            Role::Input { differentiable: true },
        ));
        if has_residual {
            operands.push(ArraySpec::input("residual", &["T", "D"]));
        }
        let mut results = Vec::new();
        if pass != Pass::Backward {
            results.push(rows("y", Role::Output));
            if has_residual {
                results.push(rows("sum", Role::Output));
            }
            results.push(ArraySpec::number("rstd", &["T"], Role::Output));
        }
        if pass.has_gradients() {
            operands.push(rows("dy", Role::Cotangent("y")));
            if has_residual {
                operands.push(rows("dsum", Role::Cotangent("sum")));
            }
            // That of the residual, too.
            results.push(rows("dx", Role::Gradient("x")));
            results.push(ArraySpec::new("dweight", &["D"], weight, Role::Gradient("weight")));
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
        let mut given = Arrays::default();
        if !pass.has_gradients() {
            return given;
        }
        let of_unit = from.unit();
        given.insert("dy", rows_of(problem, &of_unit.apart(SEEDS[2]), rows));
        if problem.flag("residual") {
            given.insert("dsum", rows_of(problem, &of_unit.apart(SEEDS[3]), rows));
        }
        given
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        let shape = shape(problem)?;
        Ok(by_dtype!(problem.dtype, E => {
            Box::new(OfRows::<E>::new(problem, shape, inputs, tolerances))
        }))
    }

    /// Rows in float64, of each thread.
    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        (problem.dim("D") as u64).checked_mul((10 * size_of::<f64>() * threads) as u64)
    }

    /// Both passes: x is read twice, or with a residual what was added up and the sum.
    fn cost(&self, problem: &Problem) -> Cost {
        let whole = self.signature(problem, Pass::ForwardAndBackward);
        let [bytes_read, bytes_written] = whole.bytes(problem);
        let again = whole.operands.iter().filter(|spec| ["x", "weight"].contains(&spec.name));
        let again: u64 = again.filter_map(|spec| spec.bytes(problem)).sum();
        let rstd = 4 * problem.dim("T") as u64;
        Cost { bytes_read: bytes_read + again + rstd, bytes_written, flops: 0 }
    }

    fn shape(&self, problem: &Problem, _: Option<[usize; 2]>) -> String {
        format!("[{}, {}]", problem.dim("T"), problem.dim("D"))
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let residual = if problem.flag("residual") { ", with a residual" } else { "" };
        ("rows", format!("{} {}{residual}", self.shape(problem, None), problem.dtype))
    }
}

/// The reference on rows of one dtype.
pub(crate) struct OfRows<'a, E> {
    problem: &'a Problem,
    options: RmsNorm,
    shape: NormShape,
    x: &'a [E],
    residual: Option<&'a [E]>,
    weight: Vec<f64>,
    tolerances: Tolerances,
}

/// The arrays of one row in float64.
pub(crate) struct Row<E> {
    stored: Vec<E>,
    /// What is normalised.
    x: Vec<f64>,
    dy: Vec<f64>,
    dsum: Option<Vec<f64>>,
    pub(crate) out: Vec<f64>,
    pub(crate) bound: Vec<f64>,
}

impl<E> Default for Row<E> {
    fn default() -> Self {
        let [x, dy, out, bound] = [const { Vec::new() }; 4];
        Self { stored: Vec::new(), x, dy, dsum: None, out, bound }
    }
}

impl<'a, E: Element + ArrayElement> OfRows<'a, E> {
    pub(crate) fn new(
        problem: &'a Problem,
        shape: NormShape,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Self {
        let weight = inputs.get("weight").expect("a weight is an input");
        Self {
            problem,
            options: options(problem),
            shape,
            x: inputs.expect::<E>("x"),
            residual: inputs.slice::<E>("residual"),
            weight: (0..weight.len()).map(|column| weight.at(column)).collect(),
            tolerances,
        }
    }

    /// y of a row in its `out`, with how far each entry may be off.
    pub(crate) fn norm(&self, token: usize, row: &mut Row<E>) {
        self.read(token, row);
        forward(&self.options, &row.x, &self.weight, &mut row.out);
        let roundings = Y_ROUNDINGS + self.of_sum(self.shape.columns());
        for (bound, y) in row.bound.iter_mut().zip(&row.out) {
            *bound = FLUSHED + roundings * F32_ROUNDING * y.abs();
        }
    }

    /// Hands over the sum with the residual, if there is one, which is rounded as the reference has it.
    pub(crate) fn hand_sum(&self, judged: Judged, visitor: &mut dyn Visitor) {
        if self.residual.is_none() {
            return;
        }
        visitor.result("sum", "fwd/sum", judged, &|rows| {
            self.rows().for_each_init(Row::default, |row, token| {
                self.read(token, row);
                rows.row(token * self.shape.columns(), &row.x, Bound::All(0.0));
            });
        });
    }

    fn of<'b>(&self, all: &'b [E], row: usize) -> &'b [E] {
        let width = self.shape.columns();
        &all[row * width..][..width]
    }

    /// What is normalised of a row, as it is stored.
    fn read(&self, row: usize, into: &mut Row<E>) {
        let x = self.of(self.x, row);
        into.stored.clear();
        into.stored.extend(x);
        if let Some(residual) = self.residual {
            add(x, self.of(residual, row), &mut into.stored);
        }
        into.x.clear();
        into.x.extend(into.stored.iter().map(|x| x.to_f64()));
        for all in [&mut into.out, &mut into.bound] {
            all.clear();
            all.resize(self.shape.columns(), 0.0);
        }
    }

    /// The cotangents of a row.
    fn read_given(&self, row: usize, [dy, dsum]: [Option<&[E]>; 2], into: &mut Row<E>) {
        let wide = |all: &[E]| self.of(all, row).iter().map(|x| x.to_f64()).collect::<Vec<_>>();
        into.dy = dy.map_or_else(|| vec![0.0; self.shape.columns()], wide);
        into.dsum = dsum.map(wide);
    }

    /// dx of a row in its `out`, with how far each entry may be off, and dweight added to.
    fn gradient(&self, row: &mut Row<E>, dweight: &mut [f64]) {
        let Row { x, dy, dsum, out, bound, .. } = row;
        backward(&self.options, x, &self.weight, dy, dsum.as_deref(), out, dweight);
        dx_scale(&self.options, x, &self.weight, dy, bound);
        let of_scale = DX_ROUNDINGS + self.of_sum(self.shape.columns());
        for (bound, dx) in bound.iter_mut().zip(out) {
            *bound = FLUSHED + F32_ROUNDING * (of_scale * *bound + dx.abs());
        }
    }

    /// What a sum of `count` terms may be off by beside what kernels may, in units of rounding.
    fn of_sum(&self, count: usize) -> f64 {
        self.tolerances.get("sum_roundings") * (count as f64).sqrt()
    }

    fn rows(&self) -> rayon::range::Iter<usize> {
        (0..self.shape.rows()).into_par_iter()
    }
}

impl<E: Element + ArrayElement> Reference for OfRows<'_, E> {
    /// Rows are quickly made again: nothing is kept.
    fn forward(&mut self) {}

    fn outputs(&self, visitor: &mut dyn Visitor) {
        let width = self.shape.columns();
        let of_sum = self.of_sum(width);
        let relative = self.tolerances.of_whole(E::DTYPE, [0.0; 2]) + Y_ROUNDINGS * F32_ROUNDING;
        let within = Judged::WithinRounding { relative: relative + of_sum * F32_ROUNDING };
        visitor.result("y", "fwd/y", within, &|rows| {
            self.rows().for_each_init(Row::default, |row, token| {
                self.norm(token, row);
                rows.row(token * width, &row.out, Bound::Each(&row.bound));
            });
        });
        self.hand_sum(within, visitor);
        visitor.result("rstd", "fwd/rstd", Judged::Within, &|rows| {
            self.rows().for_each_init(Row::default, |row, token| {
                self.read(token, row);
                let rstd = forward(&self.options, &row.x, &self.weight, &mut row.out);
                let bound = (RSTD_ROUNDINGS + of_sum) * F32_ROUNDING * rstd;
                rows.row(token, &[rstd], Bound::All(bound + f64::from(f32::MIN_POSITIVE)));
            });
        });
    }

    fn gradients(&self, _: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        let began = Instant::now();
        let width = self.shape.columns();
        let cotangents = ["dy", "dsum"].map(|name| given.slice::<E>(name));
        // dweight, the sum of magnitudes of its terms, and squares of dx and of its bounds.
        let mut dweight = vec![0.0; width];
        let mut magnitudes = vec![0.0; width];
        let [mut total, mut bounds] = [0.0; 2];
        let mut row = Row::default();
        for token in 0..self.shape.rows() {
            self.read(token, &mut row);
            self.read_given(token, cotangents, &mut row);
            let mut of_row = vec![0.0; width];
            self.gradient(&mut row, &mut of_row);
            for (column, of_row) in of_row.into_iter().enumerate() {
                dweight[column] += of_row;
                magnitudes[column] += of_row.abs();
            }
            total += row.out.iter().map(|dx| dx * dx).sum::<f64>();
            bounds += row.bound.iter().map(|bound| bound * bound).sum::<f64>();
        }
        let judged = Judged::WithinRounding {
            relative: self.tolerances.of_whole(E::DTYPE, [bounds, total]),
        };
        visitor.result("dx", &format!("{prefix}dx"), judged, &|rows| {
            self.rows().for_each_init(
                || (Row::default(), vec![0.0; width]),
                |(row, unused), token| {
                    self.read(token, row);
                    self.read_given(token, cotangents, row);
                    self.gradient(row, unused);
                    rows.row(token * width, &row.out, Bound::Each(&row.bound));
                },
            );
        });
        // A sum over all rows, in blocks that are added up, and a rounding of xhat's statistics.
        let terms = self.shape.rows() as f64 + DWEIGHT_ROUNDINGS + 1.0;
        let roundings = terms + self.of_sum(self.shape.rows()) + self.of_sum(width);
        for bound in &mut magnitudes {
            *bound = FLUSHED * self.shape.rows() as f64 + roundings * F32_ROUNDING * *bound;
        }
        let squares = |all: &[f64]| all.iter().map(|x| x * x).sum::<f64>();
        let dtype = weight_dtype(self.problem);
        let relative = self.tolerances.of_whole(dtype, [squares(&magnitudes), squares(&dweight)]);
        let judged = Judged::WithinRounding { relative };
        visitor.result("dweight", &format!("{prefix}dweight"), judged, &|rows| {
            rows.row(0, &dweight, Bound::Each(&magnitudes));
        });
        visitor.seconds("ref_grad_s", began.elapsed().as_secs_f64());
    }
}

//! LayerNorm, as tools see it. Entries are judged by the contract's error bounds.

use std::time::Instant;

use rayon::prelude::*;

use super::reference::{Statistics, backward, dx_bound, forward, y_bound};
use super::{LayerNorm, NormShape, SUM_ROUNDINGS};
use crate::norm::operation::{
    F32_ROUNDING, FLUSHED, SEEDS, TOLERANCES, WEIGHT_DTYPE, columns_of, rows_of, weight_rule,
    wide_row,
};
pub use crate::norm::operation::{shape, weight_dtype};
use crate::operation::{
    ArrayElement, ArraySpec, Arrays, Bound, Cost, DimSpec, Distribution, ElementRule, HIDDEN,
    Judged, Kind, Operation, OptionSpec, Pass, Problem, Reference, Role, Signature, Synthetic,
    TOKENS, ToleranceSpec, Tolerances, Value, Visitor,
};
use crate::{Element, Error, Result, by_dtype};

/// LayerNorm of rows, with a bias or without.
pub const OPERATION: Norm = Norm;

/// The operation.
#[derive(Clone, Copy, Debug)]
pub struct Norm;

const OPTIONS: [OptionSpec; 3] = [
    OptionSpec::new(
        "eps",
        Kind::Number,
        Value::Number(1e-5),
        "finite and at least 0",
        "what is added to the variance",
    ),
    OptionSpec::new(
        "bias",
        Kind::Bool,
        Value::Bool(false),
        "true or false",
        "whether a bias is added, of the weight's dtype",
    )
    .on_top(),
    WEIGHT_DTYPE,
];

/// The options that kernels take.
#[must_use]
pub fn options(problem: &Problem) -> LayerNorm {
    LayerNorm { eps: problem.number("eps").unwrap_or(LayerNorm::default().eps) }
}

impl Operation for Norm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn about(&self) -> &'static str {
        "rows less their mean, over their deviation, times a weight and plus a bias"
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
        let (of_columns, has_bias) = (weight_rule(problem), problem.flag("bias"));
        let rows = |name, role| ArraySpec::new(name, &["T", "D"], ElementRule::Compute, role);
        let columns = |name, role| ArraySpec::new(name, &["D"], of_columns, role);
        let input = Role::Input { differentiable: true };
        let mut operands = vec![ArraySpec::input("x", &["T", "D"]), columns("weight", input)];
        if has_bias {
            operands.push(columns("bias", input));
        }
        let mut results = Vec::new();
        if pass != Pass::Backward {
            results.push(rows("y", Role::Output));
            results.push(ArraySpec::number("mean", &["T"], Role::Output));
            results.push(ArraySpec::number("rstd", &["T"], Role::Output));
        }
        if pass.has_gradients() {
            operands.push(rows("dy", Role::Cotangent("y")));
            results.push(rows("dx", Role::Gradient("x")));
            results.push(columns("dweight", Role::Gradient("weight")));
            if has_bias {
                results.push(columns("dbias", Role::Gradient("bias")));
            }
        }
        Signature { operands, results }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        shape(problem)?;
        from.check_unlabelled(self, "rows")?;
        let mut inputs = Arrays::default();
        inputs.insert("x", rows_of(problem, from, rows));
        let [of_weight, of_bias, ..] = SEEDS.map(|seed| from.apart(seed));
        inputs.insert("weight", columns_of(problem, &of_weight, 1.0));
        if problem.flag("bias") {
            inputs.insert("bias", columns_of(problem, &of_bias, 0.0));
        }
        Ok(inputs)
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
        if pass.has_gradients() {
            given.insert("dy", rows_of(problem, &from.unit().apart(SEEDS[2]), rows));
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
        let wide = |name| {
            let columns = inputs.get(name)?;
            Some((0..columns.len()).map(|column| columns.at(column)).collect::<Vec<_>>())
        };
        let (weight, bias) = (wide("weight").expect("a weight is an input"), wide("bias"));
        Ok(by_dtype!(problem.dtype, E => Box::new(OfRows {
            problem,
            options: options(problem),
            shape,
            x: inputs.expect::<E>("x"),
            weight,
            bias,
            tolerances,
        })))
    }

    /// Rows in float64, of each thread.
    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        (problem.dim("D") as u64).checked_mul((10 * size_of::<f64>() * threads) as u64)
    }

    /// Both passes: x is read twice.
    fn cost(&self, problem: &Problem) -> Cost {
        let whole = self.signature(problem, Pass::ForwardAndBackward);
        let [bytes_read, bytes_written] = whole.bytes(problem);
        let again = whole.operands.iter().filter(|spec| ["x", "weight"].contains(&spec.name));
        let again: u64 = again.filter_map(|spec| spec.bytes(problem)).sum();
        let statistics = 8 * problem.dim("T") as u64;
        Cost { bytes_read: bytes_read + again + statistics, bytes_written, flops: 0 }
    }

    fn shape(&self, problem: &Problem, _: Option<[usize; 2]>) -> String {
        format!("[{}, {}]", problem.dim("T"), problem.dim("D"))
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let bias = if problem.flag("bias") { ", with a bias" } else { "" };
        ("rows", format!("{} {}{bias}", self.shape(problem, None), problem.dtype))
    }
}

/// The reference on rows of one dtype.
struct OfRows<'a, E> {
    problem: &'a Problem,
    options: LayerNorm,
    shape: NormShape,
    x: &'a [E],
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    tolerances: Tolerances,
}

/// What rows add to sums over all of them.
struct Sums {
    dweight: Vec<f64>,
    dbias: Vec<f64>,
    /// The sums of magnitudes.
    of_weight: Vec<f64>,
    of_bias: Vec<f64>,
    /// How far errors of rows that are normalised may put dweight off.
    of_xhat: Vec<f64>,
}

impl Sums {
    fn new(columns: usize) -> Self {
        let [dweight, dbias, of_weight, of_bias, of_xhat] =
            [const { Vec::new() }; 5].map(|_: Vec<f64>| vec![0.0; columns]);
        Self { dweight, dbias, of_weight, of_bias, of_xhat }
    }
}

impl<E: Element + ArrayElement> OfRows<'_, E> {
    fn wide(&self, all: &[E], row: usize) -> Vec<f64> {
        wide_row(all, self.shape.columns(), row)
    }

    /// dx of a row, and how far each entry may be off.
    fn gradient(&self, row: usize, dy: &[E], sums: &mut Sums) -> [Vec<f64>; 2] {
        let (x, dy) = (self.wide(self.x, row), self.wide(dy, row));
        let (mut dx, mut bound) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let Sums { dweight, dbias, of_weight, of_bias, of_xhat } = sums;
        backward(&self.options, &x, &self.weight, &dy, &mut dx, [dweight, dbias]);
        let sizes = [&mut of_weight[..], of_bias, of_xhat];
        dx_bound(&self.options, &x, &self.weight, &dy, &mut bound, sizes);
        let of_sums = self.of_sum(x.len());
        bound.iter_mut().for_each(|bound| *bound = FLUSHED + of_sums * *bound);
        [dx, bound]
    }

    /// What bounds of sums over `count` terms are multiplied by.
    fn of_sum(&self, count: usize) -> f64 {
        1.0 + self.tolerances.get("sum_roundings") * (count as f64).sqrt()
    }

    fn rows(&self) -> rayon::range::Iter<usize> {
        (0..self.shape.rows()).into_par_iter()
    }

    /// A number of each row, with how far it may be off.
    fn numbers(
        &self,
        visitor: &mut dyn Visitor,
        array: &'static str,
        number: &(dyn Fn(&Statistics) -> [f64; 2] + Sync),
    ) {
        let of_sums = self.of_sum(self.shape.columns());
        visitor.result(array, &format!("fwd/{array}"), Judged::Within, &|rows| {
            self.rows().for_each(|row| {
                let of_row = Statistics::of(&self.options, &self.wide(self.x, row));
                let [expected, bound] = number(&of_row);
                let bound = of_sums * bound + f64::from(f32::MIN_POSITIVE);
                rows.row(row, &[expected], Bound::All(bound));
            });
        });
    }
}

impl<E: Element + ArrayElement> Reference for OfRows<'_, E> {
    /// Rows are quickly made again: nothing is kept.
    fn forward(&mut self) {}

    fn outputs(&self, visitor: &mut dyn Visitor) {
        let width = self.shape.columns();
        let of_sums = self.of_sum(width);
        let norm = |row: usize| {
            let x = self.wide(self.x, row);
            let (mut y, mut bound) = (vec![0.0; width], vec![0.0; width]);
            let bias = self.bias.as_deref();
            forward(&self.options, &x, &self.weight, bias, &mut y);
            y_bound(&self.options, &x, &self.weight, bias, &mut bound);
            bound.iter_mut().for_each(|bound| *bound = FLUSHED + of_sums * *bound);
            [y, bound]
        };
        let squares = |all: &[f64]| all.iter().map(|x| x * x).sum::<f64>();
        let [total, bounds] = self
            .rows()
            .map(|row| norm(row).map(|all| squares(&all)))
            .reduce(|| [0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
        let relative = self.tolerances.of_whole(E::DTYPE, [bounds, total]);
        visitor.result("y", "fwd/y", Judged::WithinRounding { relative }, &|rows| {
            self.rows().for_each(|row| {
                let [y, bound] = norm(row);
                rows.row(row * width, &y, Bound::Each(&bound));
            });
        });
        self.numbers(visitor, "mean", &|of_row| [of_row.mean, of_row.mean_bound()]);
        self.numbers(visitor, "rstd", &|of_row| [of_row.rstd, of_row.rstd_bound()]);
    }

    fn gradients(&self, _: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        let began = Instant::now();
        let (count, width) = (self.shape.rows(), self.shape.columns());
        let dy = given.expect::<E>("dy");
        let squares = |all: &[f64]| all.iter().map(|x| x * x).sum::<f64>();
        let mut sums = Sums::new(width);
        let [mut total, mut bounds] = [0.0; 2];
        for row in 0..count {
            let [dx, bound] = self.gradient(row, dy, &mut sums);
            total += squares(&dx);
            bounds += squares(&bound);
        }
        let judged = Judged::WithinRounding {
            relative: self.tolerances.of_whole(E::DTYPE, [bounds, total]),
        };
        visitor.result("dx", &format!("{prefix}dx"), judged, &|rows| {
            self.rows().for_each_init(
                || Sums::new(width),
                |unused, row| {
                    let [dx, bound] = self.gradient(row, dy, unused);
                    rows.row(row * width, &dx, Bound::Each(&bound));
                },
            );
        });
        // Sums over all rows, in blocks that are added up.
        let roundings = (count as f64 + SUM_ROUNDINGS + self.of_sum(count)) * F32_ROUNDING;
        let of_sums = self.of_sum(width);
        let off = |(size, of_xhat): (&f64, &f64)| {
            FLUSHED * count as f64 + roundings * size + of_sums * of_xhat
        };
        let of_weight = sums.of_weight.iter().zip(&sums.of_xhat).map(off).collect::<Vec<_>>();
        let of_bias = sums.of_bias.iter().map(|size| off((size, &0.0))).collect::<Vec<_>>();
        let dtype = weight_dtype(self.problem);
        let mut columns = vec![("dweight", sums.dweight, of_weight)];
        if self.bias.is_some() {
            columns.push(("dbias", sums.dbias, of_bias));
        }
        for (name, expected, bound) in columns {
            let both = [squares(&bound), squares(&expected)];
            let relative = self.tolerances.of_whole(dtype, both);
            let judged = Judged::WithinRounding { relative };
            visitor.result(name, &format!("{prefix}{name}"), judged, &|rows| {
                rows.row(0, &expected, Bound::Each(&bound));
            });
        }
        visitor.seconds("ref_grad_s", began.elapsed().as_secs_f64());
    }
}

//! Activations, as tools see them. Entries are judged by the contract's error bounds.

use std::time::Instant;

use rayon::prelude::*;

use super::reference::{self, Bound as Entry};
use super::{Activation, ActivationShape, Kind as Function, Layout};
use crate::operation::{
    ArrayElement, ArraySpec, Arrays, Bound, Cost, DimSpec, ElementRule, Facts, Judged, Kind,
    NamedFunction, Operation, OptionSpec, Pass, Problem, Reference, Role, Signature, Synthetic,
    TOKENS, ToleranceSpec, Tolerances, Value, Visitor, WHOLE_RESULTS,
};
use crate::{Element, Error, Result, by_dtype};

/// Activations of rows, of one array or gated.
pub const OPERATION: OfRows = OfRows;

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&OPERATION];

/// The operation.
#[derive(Clone, Copy, Debug)]
pub struct OfRows;

/// What keeps the generators of x and dy apart.
const SEED: u64 = 0x94d0_49bb_1331_11eb;

/// Columns of y.
pub(crate) const COLUMNS: DimSpec = DimSpec {
    letter: "F",
    key: "mlp",
    index: "column",
    about: "columns of y: the width of an MLP",
    default: None,
    like: None,
    in_shape: false,
};

pub(crate) const ALPHA: OptionSpec = OptionSpec::new(
    "alpha",
    Kind::Number,
    Value::Number(1.0),
    "finite and above 0; 1 but for silu",
    "the slope of the sigmoid's argument",
);

pub(crate) const LIMIT: OptionSpec = OptionSpec::new(
    "limit",
    Kind::Number,
    Value::Absent,
    "finite and above 0, or absent",
    "bound that gate and up are clamped to",
);

pub(crate) const UP_OFFSET: OptionSpec =
    OptionSpec::new("up_offset", Kind::Number, Value::Number(0.0), "finite", "added to up");

pub(crate) const ENTRY_ROUNDINGS: ToleranceSpec = ToleranceSpec {
    name: "entry_roundings",
    about: "error of an entry, in units of the kernels' bound",
    default: |_| 1.0,
};

const OPTIONS: [OptionSpec; 5] = [
    OptionSpec::new(
        "kind",
        Kind::Word(&["silu", "gelu_tanh", "gelu_erf", "relu", "squared_relu"]),
        Value::Word("silu"),
        Function::NAMES,
        "the function; gated, silu is SwiGLU, gelu_tanh and gelu_erf are GEGLU, relu is ReGLU",
    ),
    ALPHA,
    LIMIT,
    UP_OFFSET,
    OptionSpec::new(
        "layout",
        Kind::Word(&["single", "halves", "interleaved"]),
        Value::Word("halves"),
        Layout::NAMES,
        "x is one array, or packs gate and up as halves or interleaved columns",
    )
    .on_top(),
];

const fn function(name: &'static str, options: &'static [(&'static str, Value)]) -> NamedFunction {
    NamedFunction { name, options }
}

const FUNCTIONS: [NamedFunction; 5] = [
    function("swiglu", &[("kind", Value::Word("silu")), ("layout", Value::Word("halves"))]),
    function("geglu", &[("kind", Value::Word("gelu_tanh")), ("layout", Value::Word("halves"))]),
    function("reglu", &[("kind", Value::Word("relu")), ("layout", Value::Word("halves"))]),
    function("gelu", &[("kind", Value::Word("gelu_tanh")), ("layout", Value::Word("single"))]),
    function(
        "squared_relu",
        &[("kind", Value::Word("squared_relu")), ("layout", Value::Word("single"))],
    ),
];

/// The options that kernels take.
///
/// # Errors
/// One outside its range, or without a meaning for the others.
pub fn options(problem: &Problem) -> Result<Activation> {
    with_numbers(problem, problem.word("kind").parse()?, problem.word("layout").parse()?)
}

/// Of this function and layout, with the numbers that options are.
pub(crate) fn with_numbers(
    problem: &Problem,
    kind: Function,
    layout: Layout,
) -> Result<Activation> {
    let of = Activation::new(kind, layout);
    let number = |name, default| problem.number(name).unwrap_or(default);
    let options = Activation {
        alpha: number("alpha", of.alpha),
        limit: problem.number("limit"),
        up_offset: number("up_offset", of.up_offset),
        ..of
    };
    options.validate()?;
    Ok(options)
}

/// The shape of y.
///
/// # Errors
/// More elements than memory can address.
pub fn shape(problem: &Problem) -> Result<ActivationShape> {
    ActivationShape::new(problem.dim("T"), problem.dim("F"))
}

/// The dims of x.
fn packed(problem: &Problem) -> [&'static str; 2] {
    ["T", if problem.word("layout") == "single" { "F" } else { "2F" }]
}

impl Operation for OfRows {
    fn facts(&self) -> &'static Facts {
        const FACTS: Facts = Facts {
            name: "activation",
            about: "SiLU, GELU, ReLU and its square, of one array or gated",
            dims: &[TOKENS, COLUMNS],
            options: &OPTIONS,
            functions: &FUNCTIONS,
            tolerances: &[ENTRY_ROUNDINGS, WHOLE_RESULTS],
            ..Facts::BASE
        };
        &FACTS
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        let options = options(problem);
        options.map(drop).map_err(|error| Error::Invalid(format!("options: {error}")))
    }

    fn signature(&self, problem: &Problem, pass: Pass) -> Signature {
        let compute = |name, dims: &[&'static str], role| {
            ArraySpec::new(name, dims, ElementRule::Compute, role)
        };
        let (packed, of_y) = (packed(problem), ["T", "F"]);
        let mut operands = vec![ArraySpec::input("x", &packed)];
        let mut results = Vec::new();
        if pass != Pass::Backward {
            results.push(compute("y", &of_y, Role::Output));
        }
        if pass.has_gradients() {
            operands.push(compute("dy", &of_y, Role::Cotangent("y")));
            results.push(compute("dx", &packed, Role::Gradient("x")));
        }
        Signature { operands, results }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        shape(problem)?;
        from.check_unlabelled(self, "rows")?;
        let mut inputs = Arrays::default();
        inputs.insert("x", from.draw(problem.dtype, rows, problem.dim(packed(problem)[1])));
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
            let from = from.unit().apart(SEED);
            given.insert("dy", from.draw(problem.dtype, rows, problem.dim("F")));
        }
        given
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        let (shape, options) = (shape(problem)?, options(problem)?);
        Ok(by_dtype!(problem.dtype, E => Box::new(Judge {
            options,
            shape,
            x: inputs.expect::<E>("x"),
            tolerances,
        })))
    }

    /// Rows in float64, of each thread: x, dy, and what is expected with two bounds.
    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        (problem.dim("F") as u64).checked_mul((13 * size_of::<f64>() * threads) as u64)
    }

    /// Both passes: x is read twice.
    fn cost(&self, problem: &Problem) -> Cost {
        let whole = self.signature(problem, Pass::ForwardAndBackward);
        let [bytes_read, bytes_written] = whole.bytes(problem);
        let again = whole.operands[0].bytes(problem).unwrap_or(0);
        Cost { bytes_read: bytes_read + again, bytes_written, flops: 0 }
    }

    fn shape(&self, problem: &Problem, _: Option<[usize; 2]>) -> String {
        format!("[{}, {}]", problem.dim("T"), problem.dim(packed(problem)[1]))
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let (kind, layout) = (problem.word("kind"), problem.word("layout"));
        ("rows", format!("{} {}, {kind}, {layout}", self.shape(problem, None), problem.dtype))
    }
}

/// The reference on rows of one dtype.
pub(crate) struct Judge<'a, E> {
    pub(crate) options: Activation,
    pub(crate) shape: ActivationShape,
    pub(crate) x: &'a [E],
    pub(crate) tolerances: Tolerances,
}

/// The arrays of one row in float64.
#[derive(Default)]
pub(crate) struct Row {
    x: Vec<f64>,
    dy: Vec<f64>,
    found: Vec<Entry>,
    pub(crate) expected: Vec<f64>,
    pub(crate) bounds: Vec<f64>,
}

impl<E: Element + ArrayElement> Judge<'_, E> {
    /// Columns of x.
    fn width(&self) -> usize {
        self.shape.columns() * self.options.layout.packs()
    }

    /// What y of a row should be, or with `dy` its dx.
    pub(crate) fn compute(&self, token: usize, dy: Option<&[E]>, row: &mut Row) {
        let (width, columns) = (self.width(), self.shape.columns());
        let wide = |all: &[E], into: &mut Vec<f64>| {
            into.clear();
            into.extend(all.iter().map(|x| x.to_f64()));
        };
        wide(&self.x[token * width..][..width], &mut row.x);
        row.found.clear();
        match dy {
            None => {
                row.found.resize(columns, Entry::default());
                reference::forward(&self.options, &row.x, &mut row.found);
            }
            Some(dy) => {
                wide(&dy[token * columns..][..columns], &mut row.dy);
                row.found.resize(width, Entry::default());
                reference::backward(&self.options, &row.x, &row.dy, &mut row.found);
            }
        }
        let times = self.tolerances.get("entry_roundings");
        row.expected.clear();
        row.expected.extend(row.found.iter().map(|entry| entry.expected));
        row.bounds.clear();
        row.bounds.extend(row.found.iter().map(|entry| times * entry.rounding + entry.lost));
    }

    /// Hands over a result.
    fn hand(&self, array: &'static str, name: &str, dy: Option<&[E]>, visitor: &mut dyn Visitor) {
        let tokens = || (0..self.shape.rows()).into_par_iter();
        let sum = |all: &[f64]| all.iter().map(|x| x * x).sum::<f64>();
        let of_row = |row: &mut Row, token| {
            self.compute(token, dy, row);
            [sum(&row.bounds), sum(&row.expected)]
        };
        let squares = tokens()
            .map_init(Row::default, of_row)
            .reduce(|| [0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
        let relative = self.tolerances.bound_whole(E::DTYPE, squares);
        let judged = Judged::WithinRounding { relative };
        visitor.result(array, name, judged, &|rows| {
            tokens().for_each_init(Row::default, |row, token| {
                self.compute(token, dy, row);
                let first = token * row.expected.len();
                rows.row(first, &row.expected, Bound::Each(&row.bounds));
            });
        });
    }
}

impl<E: Element + ArrayElement> Reference for Judge<'_, E> {
    /// Saves nothing: rows are cheap to recompute.
    fn forward(&mut self) {}

    fn outputs(&self, visitor: &mut dyn Visitor) {
        self.hand("y", "fwd/y", None, visitor);
    }

    fn gradients(&self, _: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        let began = Instant::now();
        let dy = given.expect::<E>("dy");
        self.hand("dx", &format!("{prefix}dx"), Some(dy), visitor);
        visitor.seconds("ref_grad_s", began.elapsed().as_secs_f64());
    }
}

//! Rotary position embedding, as tools see it: from positions, so that the tables are held to the formula
//! of the angles too. Entries are judged by the contract's error bounds.

use std::time::Instant;

use rand::RngExt;
use rayon::prelude::*;

use super::reference::{frequencies, rotate, table_bound, tables};
use super::{Layout, Rope, RopeShape};
use crate::operation::{
    Array, ArrayElement, ArraySpec, Arrays, Bound, DimSpec, Distribution, ElementRule, Facts,
    Judged, Kind, Operation, OptionSpec, Pass, Problem, Purpose, Reference, Role, Signature,
    Synthetic, TOKENS, ToleranceSpec, Tolerances, Value, Visitor, WHOLE_RESULTS,
};
use crate::{Element, Error, Result, by_dtype};

/// Rotary position embedding of the heads of tokens.
pub const OPERATION: OfHeads = OfHeads;

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&OPERATION];

/// The operation.
#[derive(Clone, Copy, Debug)]
pub struct OfHeads;

/// Positions that are drawn are below this.
const POSITIONS: i64 = 1_000_000;

/// What keeps the generators of arrays apart.
const OF_COTANGENTS: u64 = 0x9e37_79b9_7f4a_7c15;

const DIMS: [DimSpec; 3] = [
    TOKENS,
    DimSpec {
        letter: "H",
        key: "heads",
        index: "head",
        about: "heads of a token",
        default: None,
        like: None,
        in_shape: false,
    },
    DimSpec {
        letter: "D",
        key: "head_dim",
        index: "column",
        about: "columns of a head",
        default: None,
        like: None,
        in_shape: false,
    },
];

const OPTIONS: [OptionSpec; 3] = [
    OptionSpec::new(
        "base",
        Kind::Number,
        Value::Number(10_000.0),
        "finite and above 0",
        "base of the frequencies' powers",
    ),
    OptionSpec::new(
        "interleaved",
        Kind::Bool,
        Value::Bool(false),
        "true or false",
        "pairs are adjacent columns, not halves",
    ),
    OptionSpec::new(
        "rotary_dim",
        Kind::Count,
        Value::Absent,
        "even, and at most head_dim",
        "rotated columns; by default all, or all but one",
    ),
];

/// The options that kernels take.
#[must_use]
pub fn options(problem: &Problem) -> Rope {
    let layout = if problem.flag("interleaved") { Layout::Interleaved } else { Layout::Halves };
    Rope { layout, inverse: false }
}

/// Pairs of a row.
fn pairs(problem: &Problem) -> usize {
    let columns = problem.dim("D");
    problem.integer("rotary_dim").map_or(columns / 2, |rotary| rotary as usize / 2)
}

/// The shapes, with a row of the tables for each token.
///
/// # Errors
/// More elements than memory can address.
pub fn shape(problem: &Problem) -> Result<RopeShape> {
    let (tokens, heads) = (problem.dim("T"), problem.dim("H"));
    let rows = tokens.checked_mul(heads).ok_or(Error::Shape {
        tokens,
        vocab: heads,
        requirement: "tokens x heads must fit the address space",
    })?;
    RopeShape::new(rows, problem.dim("D"), pairs(problem), tokens)
}

/// Cosines and sines `[T, R / 2]`, a row a token.
#[must_use]
pub fn tables_of(problem: &Problem, inputs: &Arrays<'_>) -> [Vec<f64>; 2] {
    let base = problem.number("base").unwrap_or(10_000.0);
    let frequencies = frequencies(base, pairs(problem));
    tables(&frequencies, inputs.expect::<i64>("positions"))
}

/// Rows of `[T, H, D]` from a distribution.
fn rows_of(problem: &Problem, from: &Synthetic, rows: &[u64]) -> Array<'static> {
    from.draw(problem.dtype, rows, problem.dim("H") * problem.dim("D"))
}

impl Operation for OfHeads {
    fn facts(&self) -> &'static Facts {
        const FACTS: Facts = Facts {
            name: "rope",
            about: "rotary position embedding of the heads of tokens",
            dims: &DIMS,
            options: &OPTIONS,
            tolerances: &[
                ToleranceSpec {
                    name: "table_roundings",
                    about: "error of a cosine or sine, in units of 2^-24",
                    default: |_| super::TABLE_ROUNDINGS,
                },
                WHOLE_RESULTS,
            ],
            distributions: &[Distribution::Normal, Distribution::Uniform, Distribution::Offset],
            ..Facts::BASE
        };
        &FACTS
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        let invalid = |text: String| Err(Error::Invalid(text));
        let base = problem.number("base").unwrap_or(10_000.0);
        if !(base > 0.0 && base.is_finite()) {
            return invalid(format!("options: base is {base}; it must be finite and above 0"));
        }
        let head = problem.dim("D");
        match problem.integer("rotary_dim") {
            Some(rotary) if rotary % 2 != 0 || !(0..=head as i64).contains(&rotary) => {
                invalid(format!(
                    "options: rotary_dim is {rotary}; it must be even and at most head_dim, which is {head}"
                ))
            }
            _ => Ok(()),
        }
    }

    fn meant(&self, problem: &Problem, option: &str) -> Value {
        match option {
            "rotary_dim" => Value::Integer(2 * pairs(problem) as i64),
            _ => problem.option(option),
        }
    }

    fn signature(&self, _: &Problem, pass: Pass) -> Signature {
        let rows = |name, role| ArraySpec::new(name, &["T", "H", "D"], ElementRule::Compute, role);
        let fixed = Role::Input { differentiable: false };
        let mut operands = vec![
            ArraySpec::input("x", &["T", "H", "D"]),
            ArraySpec::new("positions", &["T"], ElementRule::Index, fixed),
        ];
        let mut results = Vec::new();
        if pass != Pass::Backward {
            results.push(rows("y", Role::Output));
        }
        if pass.has_gradients() {
            operands.push(rows("dy", Role::Cotangent("y")));
            results.push(rows("dx", Role::Gradient("x")));
        }
        Signature { operands, results }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        shape(problem)?;
        from.check_unlabelled(self, "rows")?;
        let mut inputs = Arrays::default();
        inputs.insert("x", rows_of(problem, from, rows));
        let position = |&row| from.rng(row, Purpose::Label).random_range(0..POSITIONS);
        Ok(inputs.with("positions", rows.iter().map(position).collect::<Vec<i64>>()))
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
            given.insert("dy", rows_of(problem, &from.unit().apart(OF_COTANGENTS), rows));
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
        let tables = tables_of(problem, inputs);
        Ok(by_dtype!(problem.dtype, E => Box::new(OfRows {
            options: options(problem),
            shape,
            heads: problem.dim("H"),
            x: inputs.expect::<E>("x"),
            tables,
            tolerances,
        })))
    }

    /// Tables in float64, and rows of each thread.
    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        let tables = (problem.dim("T") as u64).checked_mul(2 * pairs(problem) as u64)?;
        let rows = (problem.dim("D") as u64).checked_mul(4 * threads as u64)?;
        tables.checked_add(rows)?.checked_mul(size_of::<f64>() as u64)
    }

    fn shape(&self, problem: &Problem, _: Option<[usize; 2]>) -> String {
        format!("[{}, {}, {}]", problem.dim("T"), problem.dim("H"), problem.dim("D"))
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let layout = options(problem).layout;
        ("heads", format!("{} {}, {layout}", self.shape(problem, None), problem.dtype))
    }
}

/// The reference on rows of one dtype.
struct OfRows<'a, E> {
    options: Rope,
    shape: RopeShape,
    heads: usize,
    x: &'a [E],
    tables: [Vec<f64>; 2],
    tolerances: Tolerances,
}

impl<E: Element + ArrayElement> OfRows<'_, E> {
    /// What rows of `x`, which may be cotangents, become, and how far each entry may be off.
    fn row(&self, options: Rope, x: &[E], row: usize, [y, bound]: [&mut Vec<f64>; 2]) {
        let (width, pairs) = (self.shape.columns(), self.shape.pairs());
        let x: Vec<f64> = x[row * width..][..width].iter().map(|x| x.to_f64()).collect();
        let token = row / self.heads;
        let [cos, sin] = [0, 1].map(|one| &self.tables[one][token * pairs..][..pairs]);
        y.resize(width, 0.0);
        bound.resize(width, 0.0);
        rotate(options, &x, [cos, sin], y, bound);
        let roundings = self.tolerances.get("table_roundings");
        table_bound(options, &x, pairs, roundings, bound);
    }

    fn hand_over(
        &self,
        options: Rope,
        x: &[E],
        [array, name]: [&'static str; 2],
        prefix: &str,
        visitor: &mut dyn Visitor,
    ) {
        let width = self.shape.columns();
        let sum = |all: &[f64]| all.iter().map(|x| x * x).sum::<f64>();
        let of_row = |(y, bound): &mut (Vec<f64>, Vec<f64>), row| {
            self.row(options, x, row, [&mut *y, &mut *bound]);
            [sum(bound), sum(y)]
        };
        let rows = || (0..self.shape.rows()).into_par_iter();
        let add = |a: [f64; 2], b: [f64; 2]| [a[0] + b[0], a[1] + b[1]];
        let init = || (Vec::new(), Vec::new());
        let squares = rows().map_init(init, of_row).reduce(|| [0.0; 2], add);
        let relative = self.tolerances.bound_whole(E::DTYPE, squares);
        let judged = Judged::WithinRounding { relative };
        visitor.result(array, &format!("{prefix}{name}"), judged, &|to| {
            rows().for_each_init(init, |(y, bound), row| {
                self.row(options, x, row, [&mut *y, &mut *bound]);
                to.row(row * width, y, Bound::Each(bound));
            });
        });
    }
}

impl<E: Element + ArrayElement> Reference for OfRows<'_, E> {
    /// Saves nothing: rows are cheap to recompute.
    fn forward(&mut self) {}

    fn outputs(&self, visitor: &mut dyn Visitor) {
        self.hand_over(self.options, self.x, ["y", "y"], "fwd/", visitor);
    }

    fn gradients(&self, _: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        let began = Instant::now();
        let options = Rope { inverse: true, ..self.options };
        self.hand_over(options, given.expect::<E>("dy"), ["dx", "dx"], prefix, visitor);
        visitor.seconds("ref_grad_s", began.elapsed().as_secs_f64());
    }
}

//! SwiGLU in FP8, as tools see it.

use crate::activation::operation::{
    ALPHA, COLUMNS, ENTRY_ROUNDINGS, Judge, LIMIT, Row, UP_OFFSET, shape, with_numbers,
};
use crate::activation::{Activation, Kind as Function, Layout};
use crate::fp8_quantize::QuantizeShape;
use crate::fp8_quantize::quantized::{
    self, Letters, OPTIONS as QUANTIZATION, Quantized, TOLERANCES, UNROUNDED,
};
use crate::operation::{
    ArrayElement, ArraySpec, Arrays, Distribution, ElementRule, Facts, Kind, Operation, OptionSpec,
    Pass, Problem, Reference, Role, Signature, Synthetic, TOKENS, ToleranceSpec, Tolerances, Value,
    Visitor,
};
use crate::{Element, Error, Result, by_dtype};

/// SwiGLU of rows, quantised.
pub const OPERATION: OfRows = OfRows;

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&OPERATION];

/// The operation.
#[derive(Clone, Copy, Debug)]
pub struct OfRows;

const INTERLEAVED: OptionSpec = OptionSpec::new(
    "interleaved",
    Kind::Bool,
    Value::Bool(false),
    "true or false",
    "x packs gate and up as interleaved columns, not halves",
);

const OPTIONS: [OptionSpec; 9] = {
    let [granularity, block_size, power_of_two, format, transposed] = QUANTIZATION;
    [
        INTERLEAVED,
        ALPHA,
        LIMIT,
        UP_OFFSET,
        granularity,
        block_size,
        power_of_two,
        format,
        transposed,
    ]
};

/// The options of the activation.
///
/// # Errors
/// One outside its range.
pub fn activation(problem: &Problem) -> Result<Activation> {
    let is_interleaved = problem.flag("interleaved");
    let layout = if is_interleaved { Layout::Interleaved } else { Layout::Halves };
    with_numbers(problem, Function::Silu, layout)
}

/// The shape of what is quantised, one matrix.
///
/// # Errors
/// More elements than memory can address.
pub fn quantized(problem: &Problem) -> Result<QuantizeShape> {
    Letters::MLP.shape(problem)
}

impl Operation for OfRows {
    fn facts(&self) -> &'static Facts {
        const ALL: [ToleranceSpec; 4] = {
            let [scale, quotient] = TOLERANCES;
            [scale, quotient, ENTRY_ROUNDINGS, UNROUNDED]
        };
        const FACTS: Facts = Facts {
            name: "swiglu_fp8",
            about: "SwiGLU, quantised to FP8",
            dims: &[TOKENS, COLUMNS],
            options: &OPTIONS,
            tolerances: &ALL,
            distributions: &[Distribution::Normal, Distribution::Uniform, Distribution::Nonfinite],
            passes: &[Pass::Forward],
            ..Facts::BASE
        };
        &FACTS
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        let options = activation(problem);
        options.map_err(|error| Error::Invalid(format!("options: {error}")))?;
        quantized::validate(problem)
    }

    fn signature(&self, problem: &Problem, _: Pass) -> Signature {
        let x = Role::Input { differentiable: false };
        let operands = vec![ArraySpec::new("x", &["T", "2F"], ElementRule::Compute, x)];
        Signature { operands, results: Letters::MLP.results(problem) }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        shape(problem)?;
        from.check_unlabelled(self, "rows")?;
        let mut inputs = Arrays::default();
        inputs.insert("x", from.draw(problem.dtype, rows, problem.dim("2F")));
        Ok(inputs)
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        let (shape, options) = (shape(problem)?, activation(problem)?);
        Ok(by_dtype!(problem.dtype, E => Box::new(Gated {
            quantized: Quantized::without_input(problem, Letters::MLP, &tolerances)?,
            y: Judge { options, shape, x: inputs.expect::<E>("x"), tolerances },
        })))
    }

    /// Beside that of quantisation, rows of each thread in float64: x, and y with its bounds.
    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        let rows = problem.dim("F").checked_mul(7 * size_of::<f64>() * threads)? as u64;
        let width = size_of::<[f32; 2]>();
        Letters::MLP.reference_bytes(problem, threads, width)?.checked_add(rows)
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        ("rows", format!("{} {}", self.shape(problem, None), quantized::headline(problem)))
    }
}

/// The reference on rows of one dtype.
struct Gated<'a, E> {
    y: Judge<'a, E>,
    quantized: Quantized<Vec<[f32; 2]>>,
}

impl<E: Element + ArrayElement> Reference for Gated<'_, E> {
    fn forward(&mut self) {
        self.quantized.make::<E, Row>(|token, row| {
            self.y.compute(token, None, row);
            [&row.expected, &row.bounds]
        });
    }

    fn outputs(&self, visitor: &mut dyn Visitor) {
        self.quantized.hand_over(visitor);
    }
}

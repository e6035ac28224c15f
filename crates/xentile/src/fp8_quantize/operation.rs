//! FP8 quantisation, as tools see it. It has no derivative, and so the forward pass alone.

use super::QuantizeShape;
use super::quantized::{self, Letters, OPTIONS, Quantized, TOLERANCES};
pub use super::quantized::{blocks, options};
use crate::operation::{
    ArrayElement, ArraySpec, Arrays, Distribution, ElementRule, Facts, HIDDEN, Operation, Pass,
    Problem, Reference, Role, Signature, Synthetic, TOKENS, Tolerances, Visitor,
};
use crate::{Element, Result, by_dtype};

/// FP8 quantisation of rows.
pub const OPERATION: OfRows = OfRows;

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&OPERATION];

/// The operation.
#[derive(Clone, Copy, Debug)]
pub struct OfRows;

/// The shape of x, one matrix.
///
/// # Errors
/// More elements than memory can address.
pub fn shape(problem: &Problem) -> Result<QuantizeShape> {
    Letters::HIDDEN.shape(problem)
}

impl Operation for OfRows {
    fn facts(&self) -> &'static Facts {
        const FACTS: Facts = Facts {
            name: "fp8_quantize",
            about: "quantisation to FP8, with scales by tensor, row or block",
            dims: &[TOKENS, HIDDEN],
            options: &OPTIONS,
            tolerances: &TOLERANCES,
            distributions: &[
                Distribution::Normal,
                Distribution::Uniform,
                Distribution::Offset,
                Distribution::Nonfinite,
            ],
            passes: &[Pass::Forward],
            ..Facts::BASE
        };
        &FACTS
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        quantized::validate(problem)
    }

    fn signature(&self, problem: &Problem, _: Pass) -> Signature {
        let x = Role::Input { differentiable: false };
        let operands = vec![ArraySpec::new("x", &["T", "D"], ElementRule::Compute, x)];
        Signature { operands, results: Letters::HIDDEN.results(problem) }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        shape(problem)?;
        from.check_unlabelled(self, "rows")?;
        let mut inputs = Arrays::default();
        inputs.insert("x", from.draw(problem.dtype, rows, problem.dim("D")));
        Ok(inputs)
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        Ok(by_dtype!(problem.dtype, E => {
            let x = inputs.expect::<E>("x");
            Box::new(Matrix(Quantized::new(problem, Letters::HIDDEN, x, &tolerances)?))
        }))
    }

    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        Letters::HIDDEN.reference_bytes(problem, threads, 0)
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        ("rows", format!("{} {}", self.shape(problem, None), quantized::headline(problem)))
    }
}

/// The reference.
struct Matrix<'a, E>(Quantized<&'a [E]>);

impl<E: Element + ArrayElement> Reference for Matrix<'_, E> {
    fn forward(&mut self) {
        self.0.make_scales();
    }

    fn outputs(&self, visitor: &mut dyn Visitor) {
        self.0.hand_over(visitor);
    }
}

//! FP8 quantisation, as tools see it. It has no derivative, and so the forward pass alone.

use super::QuantizeShape;
use super::quantized::{self, Letters, OPTIONS, Quantized, TOLERANCES};
pub use super::quantized::{blocks, options};
use crate::operation::{
    ArrayElement, ArraySpec, Arrays, DimSpec, Distribution, ElementRule, HIDDEN, Operation,
    OptionSpec, Pass, Problem, Reference, Role, Signature, Synthetic, TOKENS, ToleranceSpec,
    Tolerances, Visitor,
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
    fn name(&self) -> &'static str {
        "fp8_quantize"
    }

    fn about(&self) -> &'static str {
        "quantisation to FP8, with scales by tensor, row or block"
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
        &[
            Distribution::Normal,
            Distribution::Uniform,
            Distribution::Offset,
            Distribution::Nonfinite,
        ]
    }

    fn passes(&self) -> &'static [Pass] {
        &[Pass::Forward]
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

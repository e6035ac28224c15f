//! RMSNorm in FP8, as tools see it.

use crate::fp8_quantize::quantized::{
    self, Letters, OPTIONS as QUANTIZATION, Quantized, TOLERANCES, UNROUNDED,
};
use crate::norm::operation::{
    NormReference, RMS_NORM, RMS_OPTIONS, TOLERANCES as NORM_TOLERANCES, draw,
};
use crate::operation::{
    ArrayElement, ArraySpec, Arrays, Distribution, ElementRule, Facts, HIDDEN, Judged, Operation,
    OptionSpec, Pass, Problem, Reference, Role, Signature, Synthetic, TOKENS, ToleranceSpec,
    Tolerances, Value, Visitor,
};
use crate::{Element, Result, by_dtype};

/// RMSNorm of rows, with a residual or without, quantised.
pub const OPERATION: Norm = Norm;

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&OPERATION];

/// The operation.
#[derive(Clone, Copy, Debug)]
pub struct Norm;

const OPTIONS: [OptionSpec; 9] = {
    let [eps, zero_centred, residual, weight_dtype] = RMS_OPTIONS;
    let [granularity, block_size, power_of_two, format, transposed] = QUANTIZATION;
    [
        eps,
        zero_centred,
        residual,
        weight_dtype,
        granularity,
        block_size,
        power_of_two,
        format,
        transposed,
    ]
};

impl Operation for Norm {
    fn facts(&self) -> &'static Facts {
        const ALL: [ToleranceSpec; 4] = {
            let ([scale, quotient], [sum_roundings, _]) = (TOLERANCES, NORM_TOLERANCES);
            [scale, quotient, sum_roundings, UNROUNDED]
        };
        const FACTS: Facts = Facts {
            name: "rms_norm_fp8",
            about: "RMSNorm, quantised to FP8",
            dims: &[TOKENS, HIDDEN],
            options: &OPTIONS,
            tolerances: &ALL,
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
        RMS_NORM.validate(problem)?;
        quantized::validate(problem)
    }

    fn meant(&self, problem: &Problem, option: &str) -> Value {
        RMS_NORM.meant(problem, option)
    }

    fn signature(&self, problem: &Problem, _: Pass) -> Signature {
        let mut operands = RMS_NORM.signature(problem, Pass::Forward).operands;
        operands.iter_mut().for_each(|spec| spec.role = Role::Input { differentiable: false });
        let mut results = Letters::HIDDEN.results(problem);
        if problem.flag("residual") {
            results.push(ArraySpec::new("sum", &["T", "D"], ElementRule::Compute, Role::Output));
        }
        Signature { operands, results }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        from.check_unlabelled(self, "rows")?;
        draw(problem, from, rows)
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        Ok(by_dtype!(problem.dtype, E => Box::new(Normed {
            quantized: Quantized::without_input(problem, Letters::HIDDEN, &tolerances)?,
            y: NormReference::<E>::new(RMS_NORM, problem, inputs, tolerances)?,
        })))
    }

    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        let width = size_of::<[f32; 2]>();
        let quantized = Letters::HIDDEN.reference_bytes(problem, threads, width)?;
        quantized.checked_add(RMS_NORM.reference_bytes(problem, threads)?)
    }

    fn shape(&self, problem: &Problem, sequences: Option<[usize; 2]>) -> String {
        RMS_NORM.shape(problem, sequences)
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let residual = if problem.flag("residual") { ", with a residual" } else { "" };
        let (shape, quantized) = (self.shape(problem, None), quantized::headline(problem));
        ("rows", format!("{shape} {quantized}{residual}"))
    }
}

/// The reference on rows of one dtype.
struct Normed<'a, E> {
    y: NormReference<'a, E>,
    quantized: Quantized<Vec<[f32; 2]>>,
}

impl<E: Element + ArrayElement> Reference for Normed<'_, E> {
    fn forward(&mut self) {
        self.quantized.make::<E, [Vec<f64>; 2]>(|token, row| {
            *row = self.y.norm(token);
            let [y, bound] = row;
            [y, bound]
        });
    }

    fn outputs(&self, visitor: &mut dyn Visitor) {
        self.quantized.hand_over(visitor);
        self.y.hand_sum(Judged::WithinRounding { relative: f64::INFINITY }, visitor);
    }
}

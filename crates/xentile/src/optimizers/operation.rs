//! Steps of optimizers over one array, as tools see them. They have no derivative, and so the forward pass alone.

use super::reference::{Bounded, Code, Entry, Hyper, U, is_block};
use super::step::{ENTRY_ROUNDINGS, STEP, check_step};
use super::{GROUP, Rule, Scalars, philox, round_stochastically};
use crate::operation::{
    Array, ArraySpec, Arrays, Bound, DimSpec, Distribution, ElementRule, Facts, HIDDEN, Judged,
    Kind, Operation, OptionSpec, Pass, Problem, Reference, Role, Signature, Synthetic, TOKENS,
    Tolerances, Value, Visitor,
};
use crate::{DType, Element, Error, Result, by_dtype};

/// An optimizer.
#[derive(Clone, Copy, Debug)]
pub struct Optimizer {
    facts: &'static Facts,
    /// The formula of its step.
    pub rule: Rule,
    /// Whether moments are in 8 bits.
    pub quantizes: bool,
}

const F32_FACTS: Facts = Facts {
    name: "adamw",
    about: "AdamW",
    dims: &[TOKENS, HIDDEN],
    options: &F32_OPTIONS,
    tolerances: &[ENTRY_ROUNDINGS],
    distributions: &[Distribution::Normal, Distribution::Uniform, Distribution::Nonfinite],
    passes: &[Pass::Forward],
    ..Facts::BASE
};

const CODE_FACTS: Facts = Facts {
    name: "adamw8bit",
    about: "AdamW with 8-bit moments",
    dims: &[TOKENS, BLOCKS],
    options: &CODE_OPTIONS,
    ..F32_FACTS
};

const LION_FACTS: Facts =
    Facts { name: "lion8bit", about: "Lion with 8-bit moments", ..CODE_FACTS };

/// AdamW with moments in f32.
pub const ADAMW: Optimizer = Optimizer { facts: &F32_FACTS, rule: Rule::Adam, quantizes: false };

/// AdamW with moments in 8 bits.
pub const ADAMW_8BIT: Optimizer =
    Optimizer { facts: &CODE_FACTS, rule: Rule::Adam, quantizes: true };

/// Lion with its moment in 8 bits.
pub const LION_8BIT: Optimizer =
    Optimizer { facts: &LION_FACTS, rule: Rule::Lion, quantizes: true };

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&ADAMW, &ADAMW_8BIT, &LION_8BIT, &super::muon::Muon];

const BLOCKS: DimSpec = DimSpec {
    letter: "B",
    key: "blocks",
    index: "block",
    about: "blocks of a row",
    default: None,
    like: None,
    in_shape: false,
};

const MAX_NORM: OptionSpec = OptionSpec::new(
    "max_norm",
    Kind::Number,
    Value::Absent,
    "at least 0",
    "clips gradients, and gives their norm",
);
const ROUNDING_SEED: OptionSpec = OptionSpec::new(
    "rounding_seed",
    Kind::Count,
    Value::Absent,
    "below 2^32",
    "rounds bf16 parameters stochastically",
);
const BLOCK_SIZE: OptionSpec = OptionSpec::new(
    "block_size",
    Kind::Count,
    Value::Integer(256),
    "256, 128 or 64",
    "entries of a block",
);
const F32_OPTIONS: [OptionSpec; 3] = [STEP, MAX_NORM, ROUNDING_SEED];
const CODE_OPTIONS: [OptionSpec; 4] = [STEP, MAX_NORM, ROUNDING_SEED, BLOCK_SIZE];

const LEARNING_RATE: f32 = 1e-2;
const WEIGHT_DECAY: f32 = 0.1;
const EPS: f64 = 1e-8;

/// Seeds of the parameter and of the moments.
const SEEDS: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// Of so many blocks, or entries where there are none, one has been 0 in every step.
const ZERO_ONE_IN: usize = 5;

impl Optimizer {
    /// Entries of a block, 1 where there are none.
    fn block(&self, problem: &Problem) -> usize {
        if self.quantizes { problem.dim("block_size") } else { 1 }
    }

    /// Entries of a row.
    fn columns(&self, problem: &Problem) -> usize {
        let letter = if self.quantizes { BLOCKS.letter } else { HIDDEN.letter };
        problem.dim(letter) * self.block(problem)
    }

    fn moments(&self) -> &'static [&'static str] {
        if self.rule == Rule::Adam { &["mu", "nu"] } else { &["mu"] }
    }

    /// The scalars in float64.
    fn hyper(&self, problem: &Problem, norm: Option<f64>) -> Hyper {
        let b = if self.rule == Rule::Adam { [0.9, 0.999] } else { [0.9, 0.99] };
        let decays = b.map(|b: f64| [f64::from(b as f32), f64::from((1.0 - b) as f32)]);
        let step = problem.integer(STEP.name).unwrap_or(1) as i32;
        let [mu_scale, nu_scale] = decays.map(|[b, _]| 1.0 / (1.0 - b.powi(step)));
        let max_norm = problem.number(MAX_NORM.name).unwrap_or(f64::INFINITY);
        let clip = match norm {
            Some(norm) if max_norm.is_finite() && norm >= max_norm => max_norm / norm,
            _ => 1.0,
        };
        Hyper {
            rule: self.rule,
            learning_rate: LEARNING_RATE.into(),
            decays,
            eps: EPS,
            weight_decay: WEIGHT_DECAY.into(),
            scales: [mu_scale, 0.0, nu_scale],
            // The power of a decay, and the difference from 1.
            scale_error: 4.0 * U * mu_scale.max(nu_scale),
            clip,
        }
    }

    /// The scalars that kernels take; `norm` is the gradients', where there is a largest.
    #[must_use]
    pub fn scalars(&self, problem: &Problem, norm: Option<f64>) -> Scalars {
        let of = self.hyper(problem, norm);
        let [[b1, rest1], [b2, rest2]] = of.decays.map(|each| each.map(|x| x as f32));
        let [mu_scale, grad_scale, nu_scale] = of.scales.map(|x| x as f32);
        Scalars {
            learning_rate: of.learning_rate as f32,
            b1,
            rest1,
            b2,
            rest2,
            eps: of.eps as f32,
            eps_root: 0.0,
            weight_decay: of.weight_decay as f32,
            mu_scale,
            grad_scale,
            nu_scale,
            clip: of.clip as f32,
            step: problem.dim(STEP.name) as u32,
            seed: problem.integer(ROUNDING_SEED.name).unwrap_or(0) as u32,
            rounds: problem.integer(ROUNDING_SEED.name).is_some(),
        }
    }

    /// The norm of gradients, where there is a largest.
    #[must_use]
    pub fn norm(&self, problem: &Problem, grads: &Array<'_>) -> Option<f64> {
        problem.number(MAX_NORM.name)?;
        let squares = (0..grads.len()).map(|index| grads.at(index) * grads.at(index));
        Some(squares.sum::<f64>().sqrt())
    }
}

/// The scales of a moment, and the moment and its scales after a step.
fn names(moment: &str) -> [&'static str; 3] {
    match moment {
        "mu" => ["mu_scales", "new_mu", "new_mu_scales"],
        _ => ["nu_scales", "new_nu", "new_nu_scales"],
    }
}

impl Operation for Optimizer {
    fn facts(&self) -> &'static Facts {
        self.facts
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        let wrong = |name, value, requirement| Err(Error::Option { name, value, requirement });
        let max_norm = problem.number(MAX_NORM.name).unwrap_or(0.0);
        if max_norm.is_nan() || max_norm < 0.0 {
            return wrong(MAX_NORM.name, max_norm, MAX_NORM.range);
        }
        check_step(problem)?;
        let seed = problem.integer(ROUNDING_SEED.name).unwrap_or(0);
        if u32::try_from(seed).is_err() {
            return wrong(ROUNDING_SEED.name, seed as f64, ROUNDING_SEED.range);
        }
        let block = self.block(problem);
        if self.quantizes && !is_block(block) {
            return wrong(BLOCK_SIZE.name, block as f64, BLOCK_SIZE.range);
        }
        Ok(())
    }

    fn signature(&self, problem: &Problem, _: Pass) -> Signature {
        let dims: &[&str] = if self.quantizes { &["T", "B", "block_size"] } else { &["T", "D"] };
        let input = Role::Input { differentiable: false };
        let element = if self.quantizes { ElementRule::Byte } else { ElementRule::Is(DType::F32) };
        let full = |name, element, role| ArraySpec::new(name, dims, element, role);
        let mut operands = vec![
            full("params", ElementRule::Compute, input),
            full("grads", ElementRule::Compute, input),
        ];
        let mut results = vec![full("new_params", ElementRule::Compute, Role::Output)];
        for moment in self.moments() {
            let [scales, new, new_scales] = names(moment);
            operands.push(full(moment, element, input));
            results.push(full(new, element, Role::Output));
            if self.quantizes {
                operands.push(ArraySpec::number(scales, &["T", "B"], input));
                results.push(ArraySpec::number(new_scales, &["T", "B"], Role::Output));
            }
        }
        if problem.number(MAX_NORM.name).is_some() {
            results.push(ArraySpec::number("norm", &[], Role::Output));
        }
        Signature { operands, results }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        from.check_unlabelled(self, "gradients")?;
        let (columns, block) = (self.columns(problem), self.block(problem));
        let [of_params, of_mu, of_nu] =
            SEEDS.map(|seed| Synthetic { distribution: Distribution::Normal, ..from.apart(seed) });
        let is_zero = |index: usize| index / block % ZERO_ONE_IN == ZERO_ONE_IN - 1;
        let mut inputs = Arrays::default();
        inputs.insert("params", of_params.draw(problem.dtype, rows, columns));
        by_dtype!(problem.dtype, E => {
            let mut grads = vec![E::from_f32(0.0); rows.len() * columns];
            from.fill(rows, columns, &mut grads);
            let all = grads.iter_mut().enumerate();
            all.filter(|(index, _)| is_zero(*index)).for_each(|(_, x)| *x = E::from_f32(0.0));
            inputs.insert("grads", Array::of(grads));
        });
        for (moment, from) in self.moments().iter().zip([of_mu, of_nu]) {
            let is_mu = *moment == "mu";
            let mut values = vec![0_f32; rows.len() * columns];
            from.fill(rows, columns, &mut values);
            for (index, x) in values.iter_mut().enumerate() {
                *x = if is_zero(index) { 0.0 } else { 0.25 * *x };
                *x = if is_mu { *x } else { *x * *x };
            }
            if !self.quantizes {
                inputs.insert(moment, Array::of(values));
                continue;
            }
            let code = Code::new(is_mu);
            let (scales, codes): (Vec<_>, Vec<_>) =
                values.chunks(block).map(|block| code.encode(block)).unzip();
            inputs.insert(moment, Array::of(codes.concat()));
            inputs.insert(names(moment)[0], Array::of(scales));
        }
        Ok(inputs)
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        let block = self.block(problem);
        let moments = self.moments().iter().map(|moment| -> Vec<f64> {
            if !self.quantizes {
                return inputs.expect::<f32>(moment).iter().map(|&x| x.into()).collect();
            }
            let (code, scales) =
                (Code::new(*moment == "mu"), inputs.expect::<f32>(names(moment)[0]));
            let codes = inputs.expect::<u8>(moment).iter().enumerate();
            codes.map(|(at, &one)| code.value(one) * f64::from(scales[at / block])).collect()
        });
        let [params, grads] = ["params", "grads"].map(|name| {
            let all = inputs.get(name).expect("an operand");
            (0..all.len()).map(|index| all.at(index)).collect::<Vec<_>>()
        });
        Ok(Box::new(Steps {
            of: *self,
            problem,
            params,
            moments: moments.collect(),
            norm: self.norm(problem, inputs.get("grads").expect("an operand")),
            grads,
            roundings: tolerances.get("entry_roundings"),
            entries: Vec::new(),
        }))
    }

    /// Some 12 arrays in float64.
    fn reference_bytes(&self, problem: &Problem, _: usize) -> Option<u64> {
        let entries = (problem.dim("T") as u64).checked_mul(self.columns(problem) as u64)?;
        entries.checked_mul(12 * size_of::<f64>() as u64)
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let shape = format!("[{}, {}]", problem.dim("T"), self.columns(problem));
        ("parameter", format!("{shape} {}", problem.dtype))
    }
}

/// The reference.
struct Steps<'a> {
    of: Optimizer,
    problem: &'a Problem,
    params: Vec<f64>,
    grads: Vec<f64>,
    /// Decoded.
    moments: Vec<Vec<f64>>,
    norm: Option<f64>,
    roundings: f64,
    entries: Vec<Entry>,
}

impl Steps<'_> {
    /// Hands over parameters: rounded to nearest, or each of two neighbours that its random bits lead to.
    fn hand_over_params(&self, visitor: &mut dyn Visitor) {
        const NAME: &str = "new_params";
        let seed = self.problem.integer(ROUNDING_SEED.name);
        let Some(seed) = seed.filter(|_| self.problem.dtype == DType::Bf16) else {
            let all = self.entries.iter().map(|entry| (entry.param.value, entry.param.error));
            let (expected, bounds): (Vec<_>, Vec<_>) = all.unzip();
            let judged = Judged::WithinRounding { relative: f64::INFINITY };
            visitor.result(NAME, NAME, judged, &|rows| {
                rows.row(0, &expected, Bound::Each(&bounds));
            });
            return;
        };
        let step = self.problem.dim(STEP.name) as u32;
        let rounded = |(index, entry): (usize, &Entry)| {
            let Bounded { value, error } = entry.param;
            let words = philox((index / GROUP) as u32, 0, step, seed as u32);
            let random = words[index % GROUP / 2] >> (index % 2 * 16) & 0xffff;
            let ends = [value - error, value + error];
            within(ends.map(|x| round_stochastically(x as f32, random).to_f64()))
        };
        let (expected, bounds): (Vec<_>, Vec<_>) =
            self.entries.iter().enumerate().map(rounded).unzip();
        visitor.result(NAME, NAME, Judged::Within, &|rows| {
            rows.row(0, &expected, Bound::Each(&bounds));
        });
    }

    fn hand_over_moment(&self, moment: &'static str, visitor: &mut dyn Visitor) {
        let is_mu = moment == "mu";
        let [_, new, new_scales] = names(moment);
        let all = self.entries.iter().map(|entry| if is_mu { entry.mu } else { entry.nu });
        let judged = Judged::WithinRounding { relative: f64::INFINITY };
        if !self.of.quantizes {
            let (expected, bounds): (Vec<_>, Vec<_>) = all.map(|x| (x.value, x.error)).unzip();
            visitor.result(new, new, judged, &|rows| {
                rows.row(0, &expected, Bound::Each(&bounds));
            });
            return;
        }
        let (all, code) = (all.collect::<Vec<_>>(), Code::new(is_mu));
        let blocks = all.chunks(self.of.block(self.problem));
        let (scales, codes): (Vec<_>, Vec<_>) =
            blocks.map(|block| code.interval(block, self.roundings)).unzip();
        let (expected, bounds): (Vec<_>, Vec<_>) =
            scales.iter().map(|x| (x.value, x.error)).unzip();
        visitor.result(new_scales, new_scales, judged, &|rows| {
            rows.row(0, &expected, Bound::Each(&bounds));
        });
        let codes = codes.concat();
        let (expected, bounds): (Vec<_>, Vec<_>) =
            codes.iter().map(|ends| within(ends.map(f64::from))).unzip();
        visitor.result(new, new, Judged::Within, &|rows| {
            rows.row(0, &expected, Bound::Each(&bounds));
        });
    }
}

/// The middle between two numbers, and a bound that both are within, and above 0.
fn within([from, to]: [f64; 2]) -> (f64, f64) {
    if from == to || !from.is_finite() || !to.is_finite() {
        return (from, f64::MIN_POSITIVE);
    }
    (0.5 * (from + to), 0.5 * (to - from).abs())
}

impl Reference for Steps<'_> {
    fn forward(&mut self) {
        let hyper = self.of.hyper(self.problem, self.norm);
        let step = |(index, (&p, &grad)): (usize, (&f64, &f64))| {
            let [mu, nu] = [0, 1].map(|at| self.moments.get(at).map_or(0.0, |all| all[index]));
            hyper.step([grad, p, mu, nu], self.roundings)
        };
        self.entries = self.params.iter().zip(&self.grads).enumerate().map(step).collect();
    }

    fn outputs(&self, visitor: &mut dyn Visitor) {
        self.hand_over_params(visitor);
        self.of.moments().iter().for_each(|moment| self.hand_over_moment(moment, visitor));
        let found = visitor.found().get("norm").map(|found| found.at(0));
        if let Some((found, norm)) = found.zip(self.norm) {
            let error = norm * U * self.grads.len() as f64;
            let error = if error.is_finite() { error } else { 0.0 };
            visitor.scalar("norm", found, norm, error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_at_a_tie_are_within_and_others_are_not() {
        let (middle, bound) = within([3.0, 4.0]);
        assert!([3.0, 4.0].iter().all(|x| (x - middle).abs() <= bound));
        let (middle, bound) = within([4.0, 4.0]);
        assert!(middle == 4.0 && bound > 0.0 && bound < 1e-300);
    }
}

//! The kernels of cross-entropy, as tools run them.

use xentile::cross_entropy::operation::{
    OPERATION, columns, factor, has_distribution, logits_shape, options, reduction,
};
use xentile::cross_entropy::reference::{TokenCotangents, TokenForward};
use xentile::cross_entropy::{CrossEntropy, TokenFactors};
use xentile::operation::{ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::{Element, Error, LogitsShape, Result, Tile, by_dtype};

use super::dense::Dense;
use super::{
    Cotangents, DistributionOutputs, EntropyCotangents, Kernel, Launch, Reduce, SavedLse,
    TokenOutputs, default_tile,
};
use crate::operation::{Kernels, Run};
use crate::{InOut, Parallel, operation};

/// The kernels of cross-entropy.
pub(crate) const KERNELS: OfLogits = OfLogits;

/// The kernels of this module.
pub(crate) const ALL: &[&dyn Kernels] = &[&KERNELS];

/// The kernels of cross-entropy.
pub(crate) struct OfLogits;

impl Kernels for OfLogits {
    fn name(&self) -> &'static str {
        OPERATION.name()
    }

    fn tile(&self, problem: &Problem) -> Result<Option<Tile>> {
        let default = by_dtype!(problem.dtype, E => default_tile::<E>(problem.dim("V")));
        problem.tile.resolve(default).map(Some)
    }

    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: operation::Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>> {
        if columns(problem) > 0 {
            return Err(Error::Invalid(format!(
                "options.columns is {}; columns are picked beside kernels, by programs from JAX: set backend to \
                 xla:cpu",
                columns(problem)
            )));
        }
        let shape = logits_shape(problem)?;
        let operation::Launch { isa, pool } = launch;
        let launch = Launch { isa, tile: self.tile(problem)?, pool };
        let labels = inputs.expect::<i64>("labels").into();
        let kernel = Kernel::new(options(problem), shape, labels, launch)?;
        let logits = Shape { problem, shape };
        Ok(by_dtype!(problem.dtype, E => Box::new(Tiled {
            of: logits,
            logits: inputs.expect::<E>("logits"),
            labels: inputs.expect::<i64>("labels"),
            kernel,
            saved: Default::default(),
            entropy: Vec::new(),
        })))
    }

    fn dense<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        pool: &'a dyn Parallel,
    ) -> Option<Box<dyn Run + 'a>> {
        if has_distribution(problem) || columns(problem) > 0 {
            return None;
        }
        let shape = logits_shape(problem).ok()?;
        let (options, labels) = (options(problem), inputs.expect::<i64>("labels"));
        Some(by_dtype!(problem.dtype, E => Box::new(NotTiled {
            of: Shape { problem, shape },
            dense: Dense {
                options,
                vocab: shape.vocab(),
                logits: inputs.expect::<E>("logits"),
                labels,
                pool,
            },
            probabilities: Vec::new(),
            forward: Vec::new(),
        })))
    }
}

struct Shape<'a> {
    problem: &'a Problem,
    shape: LogitsShape,
}

impl Shape<'_> {
    /// What the loss is multiplied by: what is given, else what is asked for.
    fn factor(&self, given: &Arrays<'_>) -> f64 {
        let given = given.slice::<f32>("factor").map(|factor| f64::from(factor[0]));
        given.unwrap_or_else(|| factor(self.problem))
    }
}

struct Tiled<'a, E> {
    of: Shape<'a>,
    logits: &'a [E],
    labels: &'a [i64],
    kernel: Kernel<'a>,
    /// lse and what rounding it lost.
    saved: [Vec<f32>; 2],
    /// Empty where no distribution is asked for.
    entropy: Vec<f32>,
}

impl<E: Element + ArrayElement> Tiled<'_, E> {
    fn forward(&mut self, results: &mut Arrays<'_>) -> Result<()> {
        let [lse, lse_low] = &mut self.saved;
        lse.resize(self.of.shape.tokens(), 0.0);
        lse_low.resize(self.of.shape.tokens(), 0.0);
        let [loss, logps] = results.slices_mut(["loss", "logps"]);
        let (lse, lse_low) = (Some(lse.as_mut_slice()), Some(lse_low.as_mut_slice()));
        let outputs = TokenOutputs { loss, logps, lse, lse_low, zero_masked: false };
        if has_distribution(self.of.problem) {
            self.entropy.resize(self.of.shape.tokens(), 0.0);
            let mut highest = vec![0.0; self.of.shape.tokens()];
            let mut argmax = vec![0; self.of.shape.tokens()];
            let distribution = DistributionOutputs {
                entropy: &mut self.entropy,
                highest: &mut highest,
                argmax: &mut argmax,
            };
            self.kernel.distribution(self.logits, outputs, distribution)?;
            let [entropy, correct] = results.slices_mut(["entropy", "correct"]);
            if let Some(entropy) = entropy {
                entropy.copy_from_slice(&self.entropy);
            }
            let ignored = options(self.of.problem).ignore_index;
            let tokens = correct.into_iter().flatten().zip(self.labels.iter().zip(&argmax));
            for (correct, (&label, &argmax)) in tokens {
                let is_correct = label == i64::from(argmax) && label != ignored;
                *correct = f32::from(u8::from(is_correct));
            }
        } else {
            self.kernel.forward(self.logits, outputs)?;
        }
        if let [Some(lse)] = results.slices_mut(["lse"]) {
            lse.copy_from_slice(&self.saved[0]);
        }
        Ok(())
    }

    fn backward(&self, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        let [loss, logps, lse] = ["dloss", "dlogps", "dlse"].map(|name| given.slice(name));
        let saved = SavedLse { lse: &self.saved[0], lse_low: Some(&self.saved[1]) };
        let [dlogits] = results.slices_mut(["dlogits"]);
        let logits = InOut::apart(self.logits, dlogits.expect("a gradient to fill"));
        let cotangents = Cotangents { loss, logps, lse };
        let Some(dentropy) = given.slice("dentropy") else {
            return self.kernel.backward(logits, saved, cotangents);
        };
        let entropy = EntropyCotangents { entropy: &self.entropy, dentropy };
        self.kernel.distribution_backward(logits, saved, cotangents, entropy)
    }
}

impl<E: Element + ArrayElement> Run for Tiled<'_, E> {
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        match pass {
            Pass::Forward => self.forward(results),
            Pass::Backward => self.backward(given, results),
            Pass::ForwardAndBackward => {
                self.forward(results)?;
                self.backward(given, results)
            }
            Pass::Fused => {
                let factor = self.of.factor(given);
                let reduce = Reduce {
                    reduction: reduction(self.of.problem).expect("a fused pass reduces"),
                    weights: given.slice("weights"),
                    cotangent: factor * self.of.problem.cotangent,
                };
                let [dlogits] = results.slices_mut(["dlogits"]);
                let logits = InOut::apart(self.logits, dlogits.expect("a gradient to fill"));
                let loss = self.kernel.value_and_grad(logits, reduce, TokenOutputs::default())?;
                set_loss(results, factor * loss);
                Ok(())
            }
        }
    }
}

fn set_loss(results: &mut Arrays<'_>, loss: f64) {
    if let [Some(out)] = results.slices_mut::<f64, 1>(["loss"]) {
        out[0] = loss;
    }
}

/// The dense program of plain Rust.
struct NotTiled<'a, E> {
    of: Shape<'a>,
    dense: Dense<'a, E>,
    /// `[T, V]`, empty until the first pass, which makes their memory its own.
    probabilities: Vec<f32>,
    /// Of the last forward pass.
    forward: Vec<TokenForward>,
}

impl<E: Element + ArrayElement> NotTiled<'_, E> {
    fn forward(&mut self) {
        self.probabilities.resize(self.of.shape.elements(), 0.0);
        self.forward = self.dense.forward(&mut self.probabilities);
    }

    fn outputs(&self, results: &mut Arrays<'_>) {
        let [loss, logps, lse] = results.slices_mut(["loss", "logps", "lse"]);
        let fill = |out: Option<&mut [f32]>, of: fn(&TokenForward) -> f64| {
            for (out, token) in out.into_iter().flatten().zip(&self.forward) {
                *out = of(token) as f32;
            }
        };
        fill(loss, |token| token.loss);
        fill(logps, |token| token.logps);
        fill(lse, |token| token.lse);
    }

    fn backward(&self, cotangents: &[TokenCotangents], results: &mut Arrays<'_>) {
        let [dlogits] = results.slices_mut(["dlogits"]);
        let dlogits = dlogits.expect("a gradient to fill");
        self.dense.backward(&self.probabilities, &self.forward, cotangents, dlogits);
    }

    fn cotangents(&self, given: &Arrays<'_>) -> Vec<TokenCotangents> {
        let all = ["dloss", "dlogps", "dlse"].map(|name| given.slice::<f32>(name));
        let of_token = |token: usize| {
            let [loss, logps, lse] = all.map(|all| all.map_or(0.0, |all| f64::from(all[token])));
            TokenCotangents { loss, logps, lse, ..TokenCotangents::default() }
        };
        (0..self.of.shape.tokens()).map(of_token).collect()
    }
}

impl<E: Element + ArrayElement> Run for NotTiled<'_, E> {
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        if pass != Pass::Backward {
            self.forward();
        }
        if pass != Pass::Fused {
            self.outputs(results);
            if pass.has_gradients() {
                self.backward(&self.cotangents(given), results);
            }
            return Ok(());
        }
        let options: CrossEntropy = self.dense.options;
        let reduction = reduction(self.of.problem).expect("a fused pass reduces");
        let labels = self.dense.labels.into();
        let factors = TokenFactors::new(options, reduction, labels, given.slice("weights"))?;
        let factor = self.of.factor(given);
        let of = |token| match factors.of(token) {
            0.0 => 0.0,
            share => self.of.problem.cotangent * factor * share,
        };
        let cotangents: Vec<_> = (0..self.of.shape.tokens())
            .map(|token| TokenCotangents { loss: of(token), ..TokenCotangents::default() })
            .collect();
        self.backward(&cotangents, results);
        set_loss(results, factor * factors.reduce(self.forward.iter().map(|token| token.loss)));
        Ok(())
    }
}

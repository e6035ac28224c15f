//! Backend `cpu`.

use std::hint::black_box;

use anyhow::{Context, Result};
use bytemuck::{Pod, pod_align_to, pod_align_to_mut};
use half::{bf16, f16};
use xentile::cross_entropy::reference::TokenCotangents;
use xentile::cross_entropy::{CrossEntropy, Reduction, TokenFactors};
use xentile::{DType, Element, LogitsShape, Tile};
use xentile_cpu::cross_entropy::{
    Cotangents, Kernel, Launch, Reduce, SavedLse, TokenOutputs, default_tile,
};
use xentile_cpu::{InOut, Isa, Threads, copy};

use super::{Config, Implementation, Logits, Setup, Subject};
use crate::config::Weights;
use crate::dense::{self, Dense};
use crate::timing::timed;

/// Cross-entropy with the inputs that `config` describes.
pub(super) fn cross_entropy(config: &Config) -> Result<Box<dyn Subject>> {
    Ok(match config.dtype {
        DType::F32 => Box::new(OnCpu::<f32>::new(config)?),
        DType::Bf16 => Box::new(OnCpu::<bf16>::new(config)?),
        DType::F16 => Box::new(OnCpu::<f16>::new(config)?),
    })
}

/// Where the gradient of each token comes from.
enum Schedule {
    /// A reduction and its weights.
    Fused(Reduction, Option<Vec<f32>>),
    /// A cotangent for each token's loss.
    Recompute(Vec<f32>),
}

struct OnCpu<E> {
    implementation: Implementation,
    options: CrossEntropy,
    shape: LogitsShape,
    schedule: Schedule,
    tile: Tile,
    isa: Isa,
    pool: Threads,
    logits: Vec<E>,
    labels: Vec<i64>,
    /// Outputs and temporaries, empty until the first step, which makes their memory its own.
    dlogits: Vec<E>,
    probabilities: Vec<f32>,
    tokens: [Vec<f32>; 3],
    loss: f64,
}

impl<E: Element + Pod> OnCpu<E> {
    fn new(config: &Config) -> Result<Self> {
        let shape = config.shape()?;
        let tile = config.tile.resolve(default_tile::<E>(shape.vocab()))?;
        let isa = config.isa()?;
        let pool = Threads::new(config.threads)
            .with_context(|| format!("cannot start {} threads; lower threads", config.threads))?;
        let rows: Vec<u64> = (0..shape.tokens() as u64).collect();
        let input = &config.input;
        let mut logits = vec![E::from_f32(0.0); shape.elements()];
        match config.logits {
            Logits::Random => input.fill_logits(&rows, shape.vocab(), &mut logits),
            // Memory that was never written is one page of zeros, read from the cache for ever.
            Logits::Zeros => logits.fill(black_box(E::from_f32(0.0))),
        }
        let schedule = match config.options.reduction.reduction() {
            None => {
                let [loss, ..] = input.cotangents(&rows);
                Schedule::Recompute(loss)
            }
            Some(reduction) => {
                let weigh = config.options.weights == Weights::Random;
                Schedule::Fused(reduction, weigh.then(|| input.weights(&rows)))
            }
        };
        Ok(Self {
            implementation: config.implementation,
            options: config.options.cross_entropy()?,
            shape,
            schedule,
            tile,
            isa,
            pool,
            logits,
            labels: input.labels(&rows, shape.vocab(), config.options.ignore_index),
            dlogits: Vec::new(),
            probabilities: Vec::new(),
            tokens: Default::default(),
            loss: f64::NAN,
        })
    }

    fn kernel_step(&mut self) -> Result<f64> {
        let launch = Launch { isa: self.isa, tile: Some(self.tile), pool: &self.pool };
        let kernel = Kernel::new(self.options, self.shape, self.labels.as_slice().into(), launch)?;
        match &self.schedule {
            &Schedule::Fused(reduction, ref weights) => {
                let reduce = Reduce { reduction, weights: weights.as_deref(), cotangent: 1.0 };
                let logits = InOut::apart(&self.logits, &mut self.dlogits);
                Ok(kernel.value_and_grad(logits, reduce, TokenOutputs::default())?)
            }
            Schedule::Recompute(cotangents) => {
                let [loss, lse, lse_low] = &mut self.tokens;
                for output in [&mut *loss, lse, lse_low] {
                    output.resize(self.shape.tokens(), 0.0);
                }
                let outputs = TokenOutputs {
                    loss: Some(loss),
                    lse: Some(lse),
                    lse_low: Some(lse_low),
                    ..TokenOutputs::default()
                };
                kernel.forward(&self.logits, outputs)?;
                let saved = SavedLse { lse, lse_low: Some(lse_low) };
                let all = Cotangents { loss: Some(cotangents), ..Cotangents::default() };
                kernel.backward(InOut::apart(&self.logits, &mut self.dlogits), saved, all)?;
                Ok(dot(cotangents, loss.iter().map(|&loss| loss.into())))
            }
        }
    }

    fn reference_step(&mut self) -> Result<f64> {
        self.probabilities.resize(self.shape.elements(), 0.0);
        let dense = Dense {
            options: self.options,
            vocab: self.shape.vocab(),
            logits: &self.logits,
            labels: &self.labels,
            pool: &self.pool,
        };
        let forward = dense.forward(&mut self.probabilities);
        let losses = forward.iter().map(|token| token.loss);
        let of_loss = |loss| TokenCotangents { loss, ..TokenCotangents::default() };
        let (loss, cotangents): (_, Vec<_>) = match &self.schedule {
            &Schedule::Fused(reduction, ref weights) => {
                let labels = self.labels.as_slice().into();
                let factors =
                    TokenFactors::new(self.options, reduction, labels, weights.as_deref())?;
                let cotangents = (0..self.labels.len()).map(|token| of_loss(factors.of(token)));
                (factors.reduce(losses), cotangents.collect())
            }
            Schedule::Recompute(cotangents) => {
                let loss = dot(cotangents, losses);
                (loss, cotangents.iter().map(|&cotangent| of_loss(cotangent.into())).collect())
            }
        };
        dense.backward(&self.probabilities, &forward, &cotangents, &mut self.dlogits);
        Ok(loss)
    }
}

impl<E: Element + Pod> Subject for OnCpu<E> {
    fn start(&mut self) -> Result<()> {
        self.dlogits.resize(self.shape.elements(), E::from_f32(0.0));
        self.loss = match self.implementation {
            Implementation::Kernel => self.kernel_step(),
            Implementation::Reference => self.reference_step(),
        }?;
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        Ok(())
    }

    fn loss(&self) -> Result<f64> {
        Ok(self.loss)
    }

    /// Streaming past the caches, and the C library's copy in one piece a thread. Logits go where
    /// their gradient was, so that copy and kernel work on the very same pages and the peak of
    /// memory is the kernel's.
    fn time_copies(&mut self, _: usize) -> Vec<f64> {
        let piece = self.logits.len().div_ceil(self.pool.count());
        let (plain, ()) = timed(|| {
            let pieces = self.dlogits.chunks_mut(piece).zip(self.logits.chunks(piece));
            dense::for_each(&self.pool, pieces, |_, (to, from)| to.copy_from_slice(from));
        });
        // Less the few bytes at an end that may not fill an f32.
        let (_, from, _) = pod_align_to(&self.logits);
        let (_, to, _) = pod_align_to_mut(&mut self.dlogits);
        let length = from.len().min(to.len());
        let (from, to) = (&from[..length], &mut to[..length]);
        let (streaming, ()) = timed(|| copy::copy(&self.pool, self.isa, from, to));
        vec![plain, streaming]
    }

    fn setup(&self) -> Setup {
        let tile = (self.implementation == Implementation::Kernel).then_some(self.tile.into());
        Setup {
            tile,
            threads: Some(self.pool.count()),
            isa: Some(self.isa.name()),
            plugin: None,
            exported: None,
        }
    }
}

fn dot(cotangents: &[f32], losses: impl Iterator<Item = f64>) -> f64 {
    cotangents.iter().zip(losses).map(|(&cotangent, loss)| f64::from(cotangent) * loss).sum()
}

//! What is held against the reference: a backend's kernels or dense program, behind one trait.

use anyhow::{Context, Result};
use bytemuck::Pod;
use pjrt_client::Buffer;
use xentile::cross_entropy::reference::{TokenCotangents, TokenForward};
use xentile::cross_entropy::{CrossEntropy, TokenFactors};
use xentile::{Element, Labels, LogitsShape, Tile};
use xentile_cpu::cross_entropy::{
    Cotangents, Kernel, Launch, Reduce, SavedLse, TokenOutputs, default_tile,
};
use xentile_cpu::{InOut, Isa, Threads};
use xentile_programs::cross_entropy::{self as programs, Reduced};
use xentile_programs::{ElementType, Program, TensorType};

use super::Config;
use super::compare::Outputs;
use crate::config::TileConfig;
use crate::dense::Dense;
use crate::input::Tokens;
use crate::microbench::{ExportedBy, Implementation};
use crate::xla::Session;

/// A backend's kernels, or its dense program, on one problem.
pub(super) trait Kernels<E> {
    /// Fills every per-token output.
    fn forward(&mut self, outputs: &mut Outputs) -> Result<()>;

    /// The reduced loss, and its gradient in `dlogits`.
    fn value_and_grad(&mut self, reduce: Reduce<'_>, dlogits: &mut [E]) -> Result<f64>;

    /// The gradient for cotangents of loss, logps and lse, in `dlogits`. `saved` is what
    /// [`Self::forward`] gave.
    fn backward(
        &mut self,
        saved: &Outputs,
        cotangents: &[Vec<f32>; 3],
        dlogits: &mut [E],
    ) -> Result<()>;

    /// How they run.
    fn setup(&self) -> Setup;
}

/// What a backend settled on where the config left a choice.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    /// None where the program has no tiles; an extent of none where the kernel chose it.
    pub(super) tile: Option<TileConfig>,
    /// The instruction set; none where XLA chose.
    pub(super) isa: Option<&'static str>,
    /// Threads; none where XLA chose.
    pub(super) threads: Option<usize>,
    /// The PJRT plug-in: file, version, platform.
    pub(super) plugin: Option<String>,
    /// The program from JAX; none where it is this build's own.
    pub(super) exported: Option<ExportedBy>,
}

/// Logits and labels on the device.
pub(super) fn upload<E: Element + pjrt_client::Element>(
    session: &Session,
    tokens: &Tokens<'_, E>,
) -> Result<Vec<Buffer>> {
    let ty = TensorType::new(&[tokens.labels.len(), tokens.vocab], <E as Element>::DTYPE.into());
    Ok(vec![session.upload_matrix(&tokens.logits, &ty)?, session.upload_labels(&tokens.labels)?])
}

/// The kernels that `config` asks for, on `tokens`.
pub(super) fn open<'a, E: Element + Pod + pjrt_client::Element>(
    config: &Config,
    options: CrossEntropy,
    tokens: &'a Tokens<'a, E>,
) -> Result<Box<dyn Kernels<E> + 'a>> {
    let shape = LogitsShape::new(tokens.labels.len(), tokens.vocab)?;
    let default = default_tile::<E>(tokens.vocab);
    let (plugin, isa) = (config.plugin.as_deref(), config.isa.as_deref());
    match config.backend.platform() {
        None => {
            let isa = isa.map_or_else(|| Ok(Isa::detect()), str::parse)?;
            let pool = Threads::new(config.threads).context("cannot start threads")?;
            Ok(match config.implementation {
                Implementation::Kernel => {
                    let tile = config.tile.resolve(default)?;
                    Box::new(Native { options, shape, tokens, tile, isa, pool })
                }
                Implementation::Reference => Box::new(NativeDense {
                    options,
                    tokens,
                    pool,
                    probabilities: vec![0.0; shape.elements()],
                    forward: Vec::new(),
                }),
            })
        }
        Some(platform) => {
            let session = Session::open(platform, plugin, config.cache.as_deref())?;
            let implementation = config.implementation.program();
            let is_kernel = implementation == programs::Implementation::Kernel;
            if is_kernel {
                session.register_kernels()?;
            }
            let tile = config.tile.of_program(config.backend, default)?;
            let tile = is_kernel.then_some(tile);
            let inputs = upload(&session, tokens)?;
            let problem = programs::Problem {
                shape,
                dtype: config.dtype,
                labels: ElementType::S32,
                options,
                time_block: tile.and_then(|tile| tile.time_block),
                block_size: tile.and_then(|tile| tile.block_size),
            };
            Ok(Box::new(OnXla { session, problem, implementation, tile, inputs }))
        }
    }
}

/// Called directly.
struct Native<'a, E: Clone> {
    options: CrossEntropy,
    shape: LogitsShape,
    tokens: &'a Tokens<'a, E>,
    tile: Tile,
    isa: Isa,
    pool: Threads,
}

impl<E: Element> Native<'_, E> {
    fn kernel(&self) -> Result<Kernel<'_>> {
        let launch = Launch { isa: self.isa, tile: Some(self.tile), pool: &self.pool };
        let labels = Labels::from(self.tokens.labels.as_slice());
        // Checked when this was made.
        Ok(Kernel::with_unchecked_labels(self.options, self.shape, labels, launch)?)
    }
}

impl<E: Element> Kernels<E> for Native<'_, E> {
    fn forward(&mut self, outputs: &mut Outputs) -> Result<()> {
        Ok(self.kernel()?.forward(&self.tokens.logits, outputs.borrow())?)
    }

    fn value_and_grad(&mut self, reduce: Reduce<'_>, dlogits: &mut [E]) -> Result<f64> {
        let logits = InOut::apart(&self.tokens.logits, dlogits);
        Ok(self.kernel()?.value_and_grad(logits, reduce, TokenOutputs::default())?)
    }

    fn backward(
        &mut self,
        saved: &Outputs,
        [g, h, k]: &[Vec<f32>; 3],
        dlogits: &mut [E],
    ) -> Result<()> {
        let saved = SavedLse { lse: &saved.lse, lse_low: Some(&saved.lse_low) };
        let given = Cotangents { loss: Some(g), logps: Some(h), lse: Some(k) };
        let logits = InOut::apart(&self.tokens.logits, dlogits);
        Ok(self.kernel()?.backward(logits, saved, given)?)
    }

    fn setup(&self) -> Setup {
        Setup {
            tile: Some(self.tile.into()),
            isa: Some(self.isa.name()),
            threads: Some(self.pool.count()),
            plugin: None,
            exported: None,
        }
    }
}

/// The dense program of plain Rust.
struct NativeDense<'a, E: Clone> {
    options: CrossEntropy,
    tokens: &'a Tokens<'a, E>,
    pool: Threads,
    /// `[T, V]`.
    probabilities: Vec<f32>,
    /// Of the last forward pass.
    forward: Vec<TokenForward>,
}

impl<E: Element> NativeDense<'_, E> {
    fn dense(&self) -> Dense<'_, E> {
        Dense {
            options: self.options,
            vocab: self.tokens.vocab,
            logits: &self.tokens.logits,
            labels: &self.tokens.labels,
            pool: &self.pool,
        }
    }

    fn run_forward(&mut self) {
        let mut probabilities = std::mem::take(&mut self.probabilities);
        self.forward = self.dense().forward(&mut probabilities);
        self.probabilities = probabilities;
    }

    fn gradient(&self, cotangents: &[TokenCotangents], dlogits: &mut [E]) {
        self.dense().backward(&self.probabilities, &self.forward, cotangents, dlogits);
    }
}

impl<E: Element> Kernels<E> for NativeDense<'_, E> {
    fn forward(&mut self, outputs: &mut Outputs) -> Result<()> {
        self.run_forward();
        for (token, forward) in self.forward.iter().enumerate() {
            outputs.loss[token] = forward.loss as f32;
            outputs.logps[token] = forward.logps as f32;
            outputs.lse[token] = forward.lse as f32;
        }
        Ok(())
    }

    fn value_and_grad(&mut self, reduce: Reduce<'_>, dlogits: &mut [E]) -> Result<f64> {
        let labels = self.tokens.labels.as_slice();
        let factors =
            TokenFactors::new(self.options, reduce.reduction, labels.into(), reduce.weights)?;
        let of = |token| reduce.cotangent * factors.of(token);
        let cotangents: Vec<_> = (0..labels.len())
            .map(|token| TokenCotangents { loss: of(token), ..TokenCotangents::default() })
            .collect();
        self.run_forward();
        self.gradient(&cotangents, dlogits);
        Ok(factors.reduce(self.forward.iter().map(|token| token.loss)))
    }

    fn backward(
        &mut self,
        _: &Outputs,
        [g, h, k]: &[Vec<f32>; 3],
        dlogits: &mut [E],
    ) -> Result<()> {
        let cotangents: Vec<_> = g
            .iter()
            .zip(h)
            .zip(k)
            .map(|((&loss, &logps), &lse)| TokenCotangents {
                loss: loss.into(),
                logps: logps.into(),
                lse: lse.into(),
            })
            .collect();
        self.gradient(&cotangents, dlogits);
        Ok(())
    }

    fn setup(&self) -> Setup {
        Setup {
            tile: None,
            isa: None,
            threads: Some(self.pool.count()),
            plugin: None,
            exported: None,
        }
    }
}

/// Programs that XLA compiles.
struct OnXla {
    session: Session,
    problem: programs::Problem,
    implementation: programs::Implementation,
    /// None where the program has no tiles.
    tile: Option<TileConfig>,
    /// Logits and labels.
    inputs: Vec<Buffer>,
}

impl OnXla {
    fn run(&self, program: &Program, more: &[Buffer]) -> Result<Vec<Buffer>> {
        let arguments: Vec<_> = self.inputs.iter().chain(more).collect();
        Ok(self.session.compile(program)?.executable.execute(&arguments)?)
    }

    fn tokenwise(&self, values: &[f32]) -> Result<Buffer> {
        self.session.upload(values, &[values.len()])
    }
}

impl<E: Element + pjrt_client::Element> Kernels<E> for OnXla {
    fn forward(&mut self, outputs: &mut Outputs) -> Result<()> {
        let results = self.run(&programs::forward(&self.problem, self.implementation), &[])?;
        let Outputs { loss, logps, lse, .. } = outputs;
        for (result, output) in results.iter().zip([loss, logps, lse]) {
            result.copy_to(output)?;
        }
        Ok(())
    }

    fn value_and_grad(&mut self, reduce: Reduce<'_>, dlogits: &mut [E]) -> Result<f64> {
        let mut more = Vec::new();
        if let Some(weights) = reduce.weights {
            more.push(self.tokenwise(weights)?);
        }
        let cotangent = reduce.cotangent != 1.0;
        if cotangent {
            more.push(self.session.upload(&[reduce.cotangent as f32], &[])?);
        }
        let reduced =
            Reduced { reduction: reduce.reduction, weights: reduce.weights.is_some(), cotangent };
        let program = programs::value_and_grad(&self.problem, reduced, self.implementation);
        let results = self.run(&program, &more)?;
        results[1].copy_to(dlogits)?;
        Ok(f64::from(results[0].to_vec::<f32>()?[0]))
    }

    fn backward(
        &mut self,
        _: &Outputs,
        cotangents: &[Vec<f32>; 3],
        dlogits: &mut [E],
    ) -> Result<()> {
        let more = cotangents.iter().map(|values| self.tokenwise(values));
        let more = more.collect::<Result<Vec<_>>>()?;
        let program = programs::forward_and_backward(&self.problem, self.implementation);
        let results = self.run(&program, &more)?;
        Ok(results[3].copy_to(dlogits)?)
    }

    fn setup(&self) -> Setup {
        Setup {
            tile: self.tile,
            isa: None,
            threads: None,
            plugin: self.session.describe().ok(),
            exported: None,
        }
    }
}

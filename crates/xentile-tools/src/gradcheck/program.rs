//! A program from JAX in the place of the kernels: the one schedule that it has, and no other.

use anyhow::{Context, Result, ensure};
use pjrt_client::{Buffer, Platform, Plugin};
use xentile::{Element, LogitsShape};
use xentile_cpu::cross_entropy::default_tile;
use xentile_programs::Exported;
use xentile_programs::exported::Linear;

use super::Config;
use super::compare::Outputs;
use super::kernels::{Setup, upload};
use crate::config::{Backend, TileConfig};
use crate::exported::{self, Asked, Signature};
use crate::input::Tokens;
use crate::microbench::Implementation;
use crate::tpu;
use crate::xla::Session;

/// Refuses what asks for no program that could run, before anything is made for it.
///
/// # Errors
/// A program where there can be none, or no TPU to run on.
pub(super) fn check_choices(config: &Config) -> Result<()> {
    let program = config.program.as_deref();
    exported::check_choice(program, config.backend, config.implementation)?;
    if config.backend == Backend::XlaTpu {
        tpu::require()?;
        // A plug-in that is missing is said before anything is exported.
        Plugin::find(Platform::Tpu, config.plugin.as_deref())?;
    }
    Ok(())
}

/// What `config` asks of a program from JAX for logits of this `shape`, made of `linear` if any.
pub(super) fn asked(config: &Config, shape: LogitsShape, linear: Option<Linear>) -> Asked<'_> {
    Asked {
        op: config.op,
        backend: config.backend,
        implementation: config.implementation,
        topology: None,
        shape,
        linear,
        dtype: config.dtype,
        tile: config.tile,
        options: &config.options,
        program: config.program.as_deref(),
        cache: config.cache.as_deref(),
    }
}

/// A program on one problem.
pub(super) struct Program {
    session: Session,
    exported: Exported,
    signature: Signature,
    /// None where the program has no tiles.
    tile: Option<TileConfig>,
    /// What it takes before weights or cotangents.
    inputs: Vec<Buffer>,
}

impl Program {
    /// The program of logits that the config names, else on TPUs the kernel that is exported for it;
    /// none where kernels are ours to run.
    pub(super) fn of_logits<E: Element + pjrt_client::Element>(
        config: &Config,
        tokens: &Tokens<'_, E>,
    ) -> Result<Option<Self>> {
        let shape = LogitsShape::new(tokens.labels.len(), tokens.vocab)?;
        let asked = asked(config, shape, None);
        if asked.program.is_none() && !asked.needs_export() {
            return Ok(None);
        }
        let signature = asked.own(default_tile::<E>(shape.vocab()))?.signature;
        Self::open(config, &asked, signature, |session| upload(session, tokens)).map(Some)
    }

    /// The program that is named, else exported, with the inputs that `upload` puts on the device.
    ///
    /// # Errors
    /// A cotangent other than 1; no program, or no device for it.
    pub(super) fn open(
        config: &Config,
        asked: &Asked<'_>,
        signature: Signature,
        upload: impl FnOnce(&Session) -> Result<Vec<Buffer>>,
    ) -> Result<Self> {
        ensure!(
            config.cotangent == 1.0 || config.options.reduction.reduction().is_none(),
            "cotangent is {}; a program from JAX takes none, which is 1: set cotangent to 1",
            config.cotangent
        );
        let platform = config.backend.platform().context("the backend has a platform")?;
        let named = asked.named(&signature)?;
        let session = Session::open(platform, config.plugin.as_deref(), config.cache.as_deref())?;
        // Takes seconds, which are in vain where the device gives no client.
        let exported = named.map_or_else(|| asked.export(&signature), Ok)?;
        if asked.calls_kernels() {
            session.register_kernels()?;
        }
        let inputs = upload(&session)?;
        let is_kernel = config.implementation == Implementation::Kernel;
        let tile = is_kernel.then(|| exported::tile(&exported));
        Ok(Self { session, exported, signature, tile, inputs })
    }

    fn run(&self, more: &[Buffer]) -> Result<Vec<Buffer>> {
        let arguments: Vec<_> = self.inputs.iter().chain(more).collect();
        let compiled = self.session.compile_code(&self.exported.bytecode)?;
        let results = compiled.executable.execute(&arguments)?;
        let (found, wanted) = (results.len(), self.signature.results.len());
        // What a manifest says of the results is known to be true only once there are any.
        ensure!(found == wanted, "the program gives {found} results; its manifest says {wanted}");
        Ok(results)
    }

    /// The reduced loss, and its gradients.
    pub(super) fn value_and_grad(&self, weights: Option<&[f32]>) -> Result<(f64, Vec<Buffer>)> {
        let weights = weights.map(|weights| self.session.upload(weights, &[weights.len()]));
        let mut results = self.run(weights.transpose()?.as_slice())?;
        let gradients = results.split_off(self.signature.gradients);
        let loss = results[0].to_vec::<f32>()?;
        Ok((f64::from(*loss.first().context("the loss is a scalar")?), gradients))
    }

    /// Loss, logps and lse of each token in `outputs`, and the gradients for cotangents of these.
    pub(super) fn forward_and_backward(
        &self,
        outputs: &mut Outputs,
        cotangents: &[Vec<f32>; 3],
    ) -> Result<Vec<Buffer>> {
        let more = cotangents.iter().map(|values| self.session.upload(values, &[values.len()]));
        let mut results = self.run(&more.collect::<Result<Vec<_>>>()?)?;
        let gradients = results.split_off(self.signature.gradients);
        let Outputs { loss, logps, lse, .. } = outputs;
        for (result, output) in results.iter().zip([loss, logps, lse]) {
            result.copy_to(output)?;
        }
        Ok(gradients)
    }

    pub(super) fn setup(&self) -> Setup {
        Setup {
            tile: self.tile,
            isa: None,
            threads: None,
            plugin: self.session.describe().ok(),
            exported: Some((&self.exported).into()),
        }
    }
}

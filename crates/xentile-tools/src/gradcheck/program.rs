//! A program from JAX in the place of the kernels: the one schedule that it has, and no other.

use anyhow::{Context, Result, ensure};
use pjrt_client::{Buffer, Platform, Plugin};
use xentile::{Element, LogitsShape};
use xentile_cpu::cross_entropy::{Reduce, default_tile};
use xentile_programs::Exported;

use super::Config;
use super::compare::Outputs;
use super::kernels::{Setup, upload};
use crate::config::Backend;
use crate::exported::{self, Asked, Own};
use crate::input::Tokens;
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

/// What `config` asks of a program from JAX for logits of this `shape`.
fn asked(config: &Config, shape: LogitsShape) -> Asked<'_> {
    Asked {
        op: config.op,
        backend: config.backend,
        implementation: config.implementation,
        topology: None,
        shape,
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
    own: Own,
    /// Logits and labels.
    inputs: Vec<Buffer>,
}

impl Program {
    /// The program that the config names, else on TPUs the kernel that is exported for it; none where
    /// kernels are ours to run.
    pub(super) fn open<E: Element + pjrt_client::Element>(
        config: &Config,
        tokens: &Tokens<'_, E>,
    ) -> Result<Option<Self>> {
        let shape = LogitsShape::new(tokens.labels.len(), tokens.vocab)?;
        let asked = asked(config, shape);
        let Some(platform) = config.backend.platform() else { return Ok(None) };
        if asked.program.is_none() && !asked.needs_export() {
            return Ok(None);
        }
        ensure!(
            config.cotangent == 1.0 || config.options.reduction.reduction().is_none(),
            "cotangent is {}; a program from JAX takes none, which is 1: set cotangent to 1",
            config.cotangent
        );
        let own = asked.own(default_tile::<E>(shape.vocab()))?;
        let named = asked.named(&own)?;
        let session = Session::open(platform, config.plugin.as_deref(), config.cache.as_deref())?;
        // Takes seconds, which are in vain where the device gives no client.
        let exported = named.map_or_else(|| asked.export(&own), Ok)?;
        let inputs = upload(&session, tokens)?;
        Ok(Some(Self { session, exported, own, inputs }))
    }

    fn run(&self, more: &[Buffer]) -> Result<Vec<Buffer>> {
        let arguments: Vec<_> = self.inputs.iter().chain(more).collect();
        let compiled = self.session.compile_code(&self.exported.bytecode)?;
        let results = compiled.executable.execute(&arguments)?;
        let (found, wanted) = (results.len(), self.own.program.results.len());
        // What a manifest says of the results is known to be true only once there are any.
        ensure!(found == wanted, "the program gives {found} results; its manifest says {wanted}");
        Ok(results)
    }

    /// The reduced loss, and its gradient in `dlogits`.
    pub(super) fn value_and_grad<E: pjrt_client::Element>(
        &self,
        reduce: Reduce<'_>,
        dlogits: &mut [E],
    ) -> Result<f64> {
        let weights = reduce.weights.map(|weights| self.session.upload(weights, &[weights.len()]));
        let results = self.run(weights.transpose()?.as_slice())?;
        results[self.own.gradient].copy_to(dlogits)?;
        let loss = results[0].to_vec::<f32>()?;
        Ok(f64::from(*loss.first().context("the loss is a scalar")?))
    }

    /// Loss, logps and lse of each token, and the gradient for cotangents of these in `dlogits`.
    pub(super) fn forward_and_backward<E: pjrt_client::Element>(
        &self,
        outputs: &mut Outputs,
        cotangents: &[Vec<f32>; 3],
        dlogits: &mut [E],
    ) -> Result<()> {
        let more = cotangents.iter().map(|values| self.session.upload(values, &[values.len()]));
        let results = self.run(&more.collect::<Result<Vec<_>>>()?)?;
        let Outputs { loss, logps, lse, .. } = outputs;
        for (result, output) in results.iter().zip([loss, logps, lse]) {
            result.copy_to(output)?;
        }
        Ok(results[self.own.gradient].copy_to(dlogits)?)
    }

    pub(super) fn setup(&self) -> Setup {
        Setup {
            tile: Some(exported::tile(&self.exported)),
            isa: None,
            threads: None,
            plugin: self.session.describe().ok(),
            exported: Some((&self.exported).into()),
        }
    }
}

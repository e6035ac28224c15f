//! Backends `xla:cpu`, `xla:cuda` and `xla:tpu`: a compiled program, on inputs that lie on the device.
//!
//! The gradient of a step takes the memory of the gradient before it, as a training loop's would.

use anyhow::{Context, Result};
use half::{bf16, f16};
use pjrt_client::{Buffer, CompiledMemoryStats, LoadedExecutable};
use xentile::{DType, Element, LogitsShape};
use xentile_cpu::cross_entropy::default_tile;
use xentile_programs::cross_entropy::{self, Problem, Reduced};
use xentile_programs::stablehlo::Builder;
use xentile_programs::{ElementType, Program, TensorType};

use super::{CompiledMemory, Config, DeviceMemory, Implementation, Logits, Setup, Subject};
use crate::config::{Backend, Weights};
use crate::timing::timed;
use crate::xla::Session;

/// Cross-entropy with the inputs that `config` describes.
pub(super) fn cross_entropy(config: &Config) -> Result<Box<dyn Subject>> {
    Ok(match config.dtype {
        DType::F32 => Box::new(OnXla::new::<f32>(config)?),
        DType::Bf16 => Box::new(OnXla::new::<bf16>(config)?),
        DType::F16 => Box::new(OnXla::new::<f16>(config)?),
    })
}

struct OnXla {
    session: Session,
    setup: Setup,
    program: Program,
    /// Where dlogits are among the results.
    gradient: usize,
    /// Logits first.
    inputs: Vec<Buffer>,
    /// Of each token's loss, where nothing reduces it.
    cotangents: Option<Vec<f32>>,
    compiled: Option<LoadedExecutable>,
    copy: LoadedExecutable,
    /// The last gradient, for the next to take its place.
    recycled: Option<Buffer>,
    /// The last loss, a scalar or one a token.
    loss: Option<Buffer>,
}

impl OnXla {
    fn new<E: Element + pjrt_client::Element>(config: &Config) -> Result<Self> {
        let shape = config.shape()?;
        let platform = config.backend.platform().context("the backend has a platform")?;
        let session = Session::open(platform, config.plugin.as_deref())?;
        let (is_kernel, implementation) = match config.implementation {
            Implementation::Kernel => (true, cross_entropy::Implementation::Kernel),
            Implementation::Reference => (false, cross_entropy::Implementation::Dense),
        };
        if is_kernel {
            session.register_kernels()?;
        }
        let tile = config.tile.resolve(default_tile::<E>(shape.vocab()))?;
        let problem = Problem {
            shape,
            dtype: config.dtype,
            labels: ElementType::S32,
            options: config.options.cross_entropy()?,
            time_block: Some(tile.time_block()),
            block_size: Some(tile.block_size()),
        };

        let rows: Vec<u64> = (0..shape.tokens() as u64).collect();
        let input = &config.input;
        let mut logits = vec![E::from_f32(0.0); shape.elements()];
        if config.logits == Logits::Random {
            input.fill_logits(&rows, shape.vocab(), &mut logits);
        }
        let labels = input.labels(&rows, shape.vocab(), config.options.ignore_index);
        let tokens = [shape.tokens()];
        let mut inputs = vec![
            session.upload(&logits, &[shape.tokens(), shape.vocab()])?,
            session.upload_labels(&labels)?,
        ];
        drop(logits);
        let (program, gradient, cotangents) = match config.options.reduction.reduction() {
            Some(reduction) => {
                let weights = config.options.weights == Weights::Random;
                if weights {
                    inputs.push(session.upload(&input.weights(&rows), &tokens)?);
                }
                let reduced = Reduced { reduction, weights, cotangent: false };
                (cross_entropy::value_and_grad(&problem, reduced, implementation), 1, None)
            }
            None => {
                let [loss, ..] = input.cotangents(&rows);
                let zeros = vec![0.0_f32; shape.tokens()];
                for cotangents in [&loss, &zeros, &zeros] {
                    inputs.push(session.upload(cotangents, &tokens)?);
                }
                (cross_entropy::forward_and_backward(&problem, implementation), 3, Some(loss))
            }
        };
        let setup = Setup {
            tile: is_kernel.then_some(tile),
            threads: None,
            isa: (is_kernel && config.backend == Backend::XlaCpu)
                .then(|| xentile_cpu::Isa::detect().name()),
            plugin: Some(session.describe()?),
        };
        let copy = session.compile(&negation(shape, config.dtype))?;
        let program = program.recycling(gradient);
        let compiled = None;
        let recycled = None;
        let loss = None;
        Ok(Self {
            session,
            setup,
            program,
            gradient,
            inputs,
            cotangents,
            compiled,
            copy,
            recycled,
            loss,
        })
    }

    /// Memory for a gradient: that of the last, else new.
    fn take_recycled(&mut self) -> Result<Buffer> {
        if let Some(last) = self.recycled.take() {
            return Ok(last);
        }
        let ty = &self.program.results[self.gradient];
        let mut b = Builder::new("zeros", &[]);
        let zero = b.constant(0.0, &TensorType::new(&[], ElementType::F32));
        let zero = b.convert(&zero, ty.element);
        let zeros = b.broadcast(&zero, &[], &ty.dims);
        let zeros = self.session.compile(&b.finish(&[&zeros]))?.execute(&[])?;
        zeros.into_iter().next().context("the program of zeros gives one result")
    }
}

impl Subject for OnXla {
    fn compile(&mut self) -> Result<()> {
        self.compiled = Some(self.session.compile(&self.program)?);
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        let recycled = self.take_recycled()?;
        let compiled = self.compiled.as_ref().context("it is compiled before it runs")?;
        let arguments: Vec<_> = self.inputs.iter().chain([&recycled]).collect();
        let mut results = compiled.execute(&arguments)?;
        let gradient = results.swap_remove(self.gradient);
        gradient.ready()?.wait()?;
        self.recycled = Some(gradient);
        self.loss = Some(results.swap_remove(0));
        Ok(())
    }

    fn loss(&self) -> Result<f64> {
        let loss = self.loss.as_ref().context("a step gives the loss")?.to_vec::<f32>()?;
        let term = |(index, &loss): (usize, &f32)| {
            let cotangent = self.cotangents.as_ref().map_or(1.0, |cotangents| cotangents[index]);
            f64::from(cotangent) * f64::from(loss)
        };
        Ok(loss.iter().enumerate().map(term).sum())
    }

    /// XLA's negation of the logits, into memory that it has.
    fn time_copies(&mut self) -> Vec<f64> {
        let (seconds, outcome) = timed(|| -> Result<()> {
            let recycled = self.take_recycled()?;
            let mut results = self.copy.execute(&[&self.inputs[0], &recycled])?;
            results[0].ready()?.wait()?;
            self.recycled = Some(results.swap_remove(0));
            Ok(())
        });
        // A step would have failed before, and the figure must not be one of a copy that did.
        vec![outcome.map_or(f64::NAN, |()| seconds)]
    }

    fn setup(&self) -> Setup {
        self.setup.clone()
    }

    fn device_memory(&self) -> DeviceMemory {
        let device = self.session.client().addressable_devices().ok();
        let device = device.and_then(|devices| devices.into_iter().next());
        let Some(stats) = device.and_then(|device| device.memory_stats().ok()) else {
            return DeviceMemory::default();
        };
        DeviceMemory {
            bytes_in_use: stats.bytes_in_use,
            peak_bytes_in_use: stats.peak_bytes_in_use,
            bytes_reserved: stats.bytes_reserved,
            pool_bytes: stats.pool_bytes,
            peak_pool_bytes: stats.peak_pool_bytes,
        }
    }

    fn compiled_memory(&self) -> Option<CompiledMemory> {
        let compiled = self.compiled.as_ref()?;
        // A plug-in that does not tell at all tells nothing of each.
        let CompiledMemoryStats { arguments, outputs, temporaries, alias, peak, .. } =
            compiled.executable().memory_stats().unwrap_or_default();
        Some(CompiledMemory {
            argument_bytes: arguments,
            output_bytes: outputs,
            temporary_bytes: temporaries,
            alias_bytes: alias,
            peak_bytes: peak,
        })
    }
}

/// Reads as many bytes as logits have and writes as many.
fn negation(shape: LogitsShape, dtype: DType) -> Program {
    let ty = TensorType::new(&[shape.tokens(), shape.vocab()], dtype.into());
    let mut b = Builder::new("negation", &[ty]);
    let x = b.argument(0);
    let y = b.unary("negate", &x);
    b.finish(&[&y]).recycling(0)
}

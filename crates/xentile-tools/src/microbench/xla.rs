//! Backends `xla:cpu`, `xla:cuda` and `xla:tpu`: a compiled program, on inputs that lie on the device.
//!
//! The gradient of a step takes the memory of the gradient before it, as a training loop's would; a
//! program from JAX has no argument for that memory, and makes new.

use anyhow::{Context, Result};
use half::{bf16, f16};
use pjrt_client::{
    Buffer, CompileOptions, Event, ExecuteOptions, Execution, LoadedExecutable, Platform, Plugin,
    Topology,
};
use xentile::{DType, Element, LogitsShape, Tile};
use xentile_cpu::cross_entropy::default_tile;
use xentile_programs::stablehlo::Builder;
use xentile_programs::{ElementType, Program, TensorType};

use super::{
    CompiledMemory, Config, DeviceMemory, ExportedBy, Found, Implementation, Logits, Setup, Subject,
};
use crate::config::{Backend, TileConfig, Weights};
use crate::estimate::{self, Known};
use crate::exported::{self, Asked, Own, Signature};
use crate::input::linear::HiddenStates;
use crate::schedule::Dump;
use crate::timing::timed;
use crate::tpu;
use crate::xla::{self, Compiled, Session};

/// The operation with the inputs that `config` describes.
pub(super) fn subject(config: &Config) -> Result<Box<dyn Subject>> {
    Ok(match config.dtype {
        DType::F32 => Box::new(OnXla::new::<f32>(config)?),
        DType::Bf16 => Box::new(OnXla::new::<bf16>(config)?),
        DType::F16 => Box::new(OnXla::new::<f16>(config)?),
    })
}

/// Compiles for TPUs that need not be there.
pub(super) fn compile_for(topology: &str, config: &Config) -> Result<Found> {
    let plan = match config.dtype {
        DType::F32 => Plan::new::<f32>(config)?,
        DType::Bf16 => Plan::new::<bf16>(config)?,
        DType::F16 => Plan::new::<f16>(config)?,
    };
    let plugin = Plugin::find(Platform::Tpu, config.plugin.as_deref())?;
    let devices = Topology::new(plugin, topology, &[]).with_context(|| tpu::explain(topology))?;
    let setup = Setup {
        tile: plan.tile,
        threads: None,
        isa: None,
        plugin: Some(xla::describe(
            plugin,
            &devices.platform_name()?,
            &devices.platform_version()?,
        )),
        exported: plan.exported.clone(),
    };
    let shape = config.shape()?;
    let problem = estimate::Problem {
        tokens: shape.tokens(),
        vocab: shape.vocab(),
        hidden: config.hidden,
        width: config.dtype.size_bytes(),
        tile: plan.tile.and_then(|tile| Tile::new(tile.time_block?, tile.block_size?).ok()),
    };
    let dump = Dump::of_environment();
    let program = pjrt_client::Program::mlir(&plan.code);
    let (compile_s, executable) = timed(|| devices.compile(&program, &CompileOptions::new()));
    let executable = executable.with_context(|| format!("it does not compile for {topology}"))?;
    let schedule = dump.map(|dump| dump.read()).transpose()?;
    Ok(Found {
        setup,
        compile_s: Some(compile_s),
        from_cache: None,
        compiled: Some(executable.memory_stats()?.into()),
        estimate: schedule
            .as_ref()
            .and_then(|schedule| estimate::estimate(topology, schedule, problem, &plan.moved)),
        schedule,
        run: None,
    })
}

/// The program to compile.
struct Plan {
    signature: Signature,
    /// What this build writes for the config, with the gradient's memory as another last argument; or
    /// what JAX wrote.
    code: Vec<u8>,
    /// The program from JAX.
    exported: Option<ExportedBy>,
    /// What its kernels move, where that is planned.
    moved: Vec<Known>,
    /// None where the program has no tiles.
    tile: Option<TileConfig>,
    /// Whether it calls our kernels.
    calls_kernels: bool,
}

impl Plan {
    fn new<E: Element>(config: &Config) -> Result<Self> {
        let shape = config.shape()?;
        let linear = config.linear()?;
        let asked = Asked {
            op: config.op,
            backend: config.backend,
            implementation: config.implementation,
            topology: config.topology.as_deref(),
            shape,
            linear,
            dtype: config.dtype,
            tile: config.tile,
            options: &config.options,
            program: config.program.as_deref(),
            cache: config.cache.as_deref(),
        };
        let (signature, own) = match linear {
            Some(linear) => (asked.linear_signature(linear)?, None),
            None => {
                let Own { signature, program, tile } =
                    asked.own(default_tile::<E>(shape.vocab()))?;
                (signature, Some((program, tile)))
            }
        };
        let exported = match asked.needs_export() {
            true => Some(asked.export(&signature)?),
            false => asked.named(&signature)?,
        };
        let is_kernel = config.implementation == Implementation::Kernel;
        if let Some(exported) = exported {
            return Ok(Self {
                tile: is_kernel.then(|| exported::tile(&exported)),
                exported: Some((&exported).into()),
                moved: Known::of_kernels(&exported.moved),
                code: exported.bytecode,
                calls_kernels: asked.calls_kernels(),
                signature,
            });
        }
        let (program, tile) = own.context("a program of hidden states comes from JAX")?;
        let platform = config.backend.platform().context("the backend has a platform")?;
        let program = xla::for_platform(platform, program.recycling(signature.gradients));
        Ok(Self {
            code: program.text.into_bytes(),
            exported: None,
            moved: Vec::new(),
            tile: is_kernel.then_some(tile),
            calls_kernels: is_kernel,
            signature,
        })
    }

    /// The type of the first gradient.
    fn gradient_type(&self) -> &TensorType {
        &self.signature.results[self.signature.gradients]
    }
}

struct OnXla {
    session: Session,
    setup: Setup,
    plan: Plan,
    /// Logits first, or hidden states.
    inputs: Vec<Buffer>,
    /// Of each token's loss, where nothing reduces it.
    cotangents: Option<Vec<f32>>,
    compiled: Option<Compiled>,
    /// None where there are no logits.
    copy: Option<LoadedExecutable>,
    /// The last gradient, for the next to take its place.
    recycled: Option<Buffer>,
    /// The last loss, a scalar or one a token.
    loss: Option<Buffer>,
    /// The end of the last run.
    last: Option<Event>,
}

impl OnXla {
    fn new<E: Element + pjrt_client::Element>(config: &Config) -> Result<Self> {
        let shape = config.shape()?;
        let platform = config.backend.platform().context("the backend has a platform")?;
        if platform == Platform::Tpu {
            // Before a program is made that could not run.
            tpu::require()?;
        }
        let plan = Plan::new::<E>(config)?;
        let session = Session::open(platform, config.plugin.as_deref(), config.cache.as_deref())?;
        if plan.calls_kernels {
            session.register_kernels()?;
        }

        let rows: Vec<u64> = (0..shape.tokens() as u64).collect();
        let input = &config.input;
        let mut inputs = match config.linear()? {
            None => of_logits::<E>(config, &session, plan.gradient_type(), &rows)?,
            Some(linear) => {
                let ignore_index = config.options.ignore_index;
                HiddenStates::<E>::synthetic(input, &rows, shape.vocab(), linear, ignore_index)
                    .context("input")?
                    .upload(&session)?
            }
        };
        let tokens = [shape.tokens()];
        let mut cotangents = None;
        if config.options.reduction.reduction().is_none() {
            let [loss, ..] = input.cotangents(&rows);
            let zeros = vec![0.0_f32; shape.tokens()];
            for cotangents in [&loss, &zeros, &zeros] {
                inputs.push(session.upload(cotangents, &tokens)?);
            }
            cotangents = Some(loss);
        } else if config.options.weights == Weights::Random {
            inputs.push(session.upload(&input.weights(&rows), &tokens)?);
        }
        let setup = Setup {
            tile: plan.tile,
            threads: None,
            isa: (plan.calls_kernels && config.backend == Backend::XlaCpu)
                .then(|| xentile_cpu::Isa::detect().name()),
            plugin: Some(session.describe()?),
            exported: plan.exported.clone(),
        };
        let copy = match config.hidden {
            None => Some(session.compile(&copy_of(shape, config))?.executable),
            Some(_) => None,
        };
        let compiled = None;
        let recycled = None;
        let (loss, last) = (None, None);
        Ok(Self { session, setup, plan, inputs, cotangents, compiled, copy, recycled, loss, last })
    }

    /// Memory for a gradient: that of the last, else new.
    fn take_recycled(&mut self) -> Result<Buffer> {
        if let Some(last) = self.recycled.take() {
            return Ok(last);
        }
        let ty = self.plan.gradient_type();
        let mut b = Builder::new("zeros", &[]);
        let zero = b.constant(0.0, &TensorType::new(&[], ElementType::F32));
        let zero = b.convert(&zero, ty.element);
        let zeros = b.broadcast(&zero, &[], &ty.dims);
        let zeros = self.session.compile(&b.finish(&[&zeros]))?.executable.execute(&[])?;
        zeros.into_iter().next().context("the program of zeros gives one result")
    }
}

/// Logits, whose type is `ty`, and labels on the device.
fn of_logits<E: Element + pjrt_client::Element>(
    config: &Config,
    session: &Session,
    ty: &TensorType,
    rows: &[u64],
) -> Result<Vec<Buffer>> {
    let shape = config.shape()?;
    let mut logits = vec![E::from_f32(0.0); shape.elements()];
    if config.logits == Logits::Random {
        config.input.fill_logits(rows, shape.vocab(), &mut logits);
    }
    let labels = config.input.labels(rows, shape.vocab(), config.options.ignore_index);
    Ok(vec![session.upload_matrix(&logits, ty)?, session.upload_labels(&labels)?])
}

impl Subject for OnXla {
    fn compile(&mut self) -> Result<()> {
        self.compiled = Some(self.session.compile_code(&self.plan.code)?);
        Ok(())
    }

    fn is_cached(&self) -> Option<bool> {
        self.compiled.as_ref()?.from_cache
    }

    fn start(&mut self) -> Result<()> {
        // A program from JAX makes its own, once there is room.
        let recycled = match self.plan.exported {
            None => Some(self.take_recycled()?),
            Some(_) => {
                self.recycled = None;
                None
            }
        };
        let compiled = self.compiled.as_ref().context("it is compiled before it runs")?;
        let arguments: Vec<_> = self.inputs.iter().chain(&recycled).collect();
        let Execution { mut outputs, done } =
            compiled.executable.execute_async(&arguments, &ExecuteOptions::default())?;
        self.recycled = Some(outputs.swap_remove(self.plan.signature.gradients));
        self.loss = Some(outputs.swap_remove(0));
        self.last = Some(done);
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        self.last.take().map_or(Ok(()), |last| Ok(last.wait()?))
    }

    fn loss(&self) -> Result<f64> {
        let loss = self.loss.as_ref().context("a step gives the loss")?.to_vec::<f32>()?;
        let term = |(index, &loss): (usize, &f32)| {
            let cotangent = self.cotangents.as_ref().map_or(1.0, |cotangents| cotangents[index]);
            f64::from(cotangent) * f64::from(loss)
        };
        Ok(loss.iter().enumerate().map(term).sum())
    }

    /// Into memory that is there already.
    fn time_copies(&mut self, count: usize) -> Vec<f64> {
        if self.copy.is_none() {
            return Vec::new();
        }
        let (seconds, outcome) = timed(|| -> Result<()> {
            for _ in 0..count {
                let recycled = self.take_recycled()?;
                let arguments = [&self.inputs[0], &recycled];
                let copy = self.copy.as_ref().context("there are logits")?;
                let Execution { mut outputs, done } =
                    copy.execute_async(&arguments, &ExecuteOptions::default())?;
                self.recycled = Some(outputs.swap_remove(0));
                self.last = Some(done);
            }
            self.wait()
        });
        // A step would have failed before, and the figure must not be one of a copy that did.
        vec![outcome.map_or(f64::NAN, |()| seconds / count as f64)]
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
        Some(compiled.executable.executable().memory_stats().unwrap_or_default().into())
    }
}

/// Reads as many bytes as logits have and writes as many, in the quicker of XLA's ways: on a GPU a
/// copy by the driver, elsewhere a negation, which XLA has threads for.
fn copy_of(shape: LogitsShape, config: &Config) -> Program {
    let ty = TensorType::new(&[shape.tokens(), shape.vocab()], config.dtype.into());
    let mut b = Builder::new("copy", &[ty]);
    let x = b.argument(0);
    let y = if config.backend == Backend::XlaCuda { x } else { b.unary("negate", &x) };
    b.finish(&[&y]).recycling(0)
}

//! Backends `xla:cpu`, `xla:cuda` and `xla:tpu`: a compiled program, on inputs that lie on the device.
//!
//! The gradient of a step takes the memory of the gradient before it, as a training loop's would; a
//! program from JAX has no argument for that memory, and makes new.

use anyhow::{Context, Result};
use pjrt_client::{
    Buffer, CompileOptions, Event, ExecuteOptions, Execution, LoadedExecutable, Platform, Plugin,
    Topology,
};
use xentile::Tile;
use xentile::operation::{Array, ArraySpec, Arrays, Pass, Problem};
use xentile_programs::stablehlo::Builder;
use xentile_programs::{ElementType, Program, TensorType};

use super::benchmark::{Benchmark, Found, first_output};
use super::config::{Config, Logits};
use super::report::{CompiledMemory, DeviceMemory};
use crate::config::{Backend, Implementation, TileConfig};
use crate::estimate::{self, Traffic};
use crate::exported::{self, Asked, Signature};
use crate::schedule::Dump;
use crate::setup::{ExportedBy, Setup};
use crate::timing::timed;
use crate::tpu;
use crate::xla::{self, Compiled, Session, read, upload};

/// The operation with the inputs that `config` describes.
pub(super) fn benchmark(config: &Config) -> Result<Box<dyn Benchmark>> {
    Ok(Box::new(OnXla::new(config)?))
}

/// Compiles for TPUs that need not be there.
pub(super) fn compile_for(topology: &str, config: &Config) -> Result<Found> {
    let problem = config.problem()?;
    let plan = Plan::new(config, &problem)?;
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
    let tile = plan.tile.and_then(|tile| Tile::new(tile.time_block?, tile.block_size?).ok());
    let work = estimate::Work::of(&*config.op, &problem, tile);
    let dump = Dump::from_environment();
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
            .map(|schedule| estimate::estimate(topology, schedule, &work, &plan.moved)),
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
    moved: Vec<Traffic>,
    /// None where the program has no tiles.
    tile: Option<TileConfig>,
    /// Whether it calls our kernels.
    calls_kernels: bool,
}

impl Plan {
    fn new(config: &Config, problem: &Problem) -> Result<Self> {
        let (op, pass) = (config.op, config.op.whole(problem));
        let asked = Asked {
            op,
            backend: config.backend,
            implementation: config.implementation,
            topology: config.topology.as_deref(),
            problem,
            tile: config.tile,
            options: &config.options,
            program: config.program.as_deref(),
            cache: config.cache.as_deref(),
        };
        let signature = Signature::of(op, problem, pass);
        // Reports errors of the config before anything is exported.
        exported::own_tile(op, problem, config.backend)?;
        let exported = match asked.needs_export() {
            true => Some(asked.export(&signature)?),
            false => asked.named(&signature)?,
        };
        let is_kernel = config.implementation == Implementation::Kernel;
        if let Some(exported) = exported {
            return Ok(Self {
                tile: exported::tile(op, &exported).filter(|_| is_kernel),
                exported: Some((&exported).into()),
                moved: Traffic::list_kernels(&exported.moved),
                calls_kernels: exported::calls_kernels(&exported, config.backend),
                code: exported.bytecode,
                signature,
            });
        }
        let (backend, implementation) = (config.backend, config.implementation);
        let own = exported::own_program(op, problem, pass, backend, implementation)?;
        let (program, tile) = own.context("this build writes the program, or JAX does")?;
        let platform = backend.platform().context("the backend has a platform")?;
        let has_gradients = signature.gradients < signature.results.len();
        let program = if has_gradients { program.donating(signature.gradients) } else { program };
        let program = xla::for_platform(platform, program);
        Ok(Self {
            code: program.text.into_bytes(),
            exported: None,
            moved: Vec::new(),
            tile,
            calls_kernels: is_kernel,
            signature,
        })
    }

    /// The type of the first gradient, or without any that of what copies write.
    fn gradient_type(&self) -> &TensorType {
        let Signature { arguments, results, gradients, .. } = &self.signature;
        results.get(*gradients).unwrap_or(&arguments[0])
    }

    /// Whether it takes the memory of the gradient before.
    fn takes_gradient(&self) -> bool {
        self.exported.is_none() && self.has_gradients()
    }

    fn has_gradients(&self) -> bool {
        self.signature.gradients < self.signature.results.len()
    }
}

struct OnXla {
    session: Session,
    setup: Setup,
    plan: Plan,
    /// In the order of the program's arguments.
    inputs: Vec<Buffer>,
    /// The first output as it comes to the host, and the cotangent of it, if any.
    output: Array<'static>,
    cotangent: Option<Array<'static>>,
    compiled: Option<Compiled>,
    /// None where a step is held to products.
    copy: Option<LoadedExecutable>,
    /// The last gradient, for the next to take its place.
    donated: Option<Buffer>,
    /// The last first output.
    loss: Option<Buffer>,
    /// The end of the last run.
    last: Option<Event>,
}

impl OnXla {
    fn new(config: &Config) -> Result<Self> {
        let (op, problem) = (config.op, config.problem()?);
        let platform = config.backend.platform().context("the backend has a platform")?;
        if platform == Platform::Tpu {
            // Before a program is made that could not run.
            tpu::require()?;
        }
        let plan = Plan::new(config, &problem)?;
        let session = Session::open(platform, config.plugin.as_deref(), config.cache.as_deref())?;
        if plan.calls_kernels {
            session.register_kernels()?;
        }

        let pass = op.whole(&problem);
        let rows: Vec<u64> = (0..problem.dim("T") as u64).collect();
        let input = &config.input;
        let mut arrays = match config.logits {
            Logits::Random => op.inputs(&problem, input, &rows).context("input")?,
            Logits::Zeros => op.zeros(&problem, input, &rows)?,
        };
        arrays.extend(op.measured(&problem, pass, input, &rows));
        let inputs = uploaded(config, &session, &problem, pass, &arrays)?;
        let (output, cotangent) = first_output(config, &problem, pass);
        let cotangent = arrays.get(cotangent).cloned();
        let setup = Setup {
            tile: plan.tile,
            threads: None,
            isa: (plan.calls_kernels && config.backend == Backend::XlaCpu)
                .then(|| xentile_cpu::Isa::detect().name()),
            plugin: Some(session.describe()?),
            exported: plan.exported.clone(),
        };
        let copy = match op.cost(&problem).flops {
            0 => {
                let ty = plan.signature.arguments[0].clone();
                Some(session.compile(&copy_of(ty, config.backend))?.executable)
            }
            _ => None,
        };
        let output = room_for(config, &problem, pass, output);
        let compiled = None;
        let donated = None;
        let (loss, last) = (None, None);
        Ok(Self {
            session,
            setup,
            plan,
            inputs,
            output,
            cotangent,
            compiled,
            copy,
            donated,
            loss,
            last,
        })
    }

    /// Memory for a gradient: that of the last, else new.
    fn take_donated(&mut self) -> Result<Buffer> {
        if let Some(last) = self.donated.take() {
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

/// What a pass takes, on the device.
fn uploaded(
    config: &Config,
    session: &Session,
    problem: &Problem,
    pass: Pass,
    arrays: &Arrays<'_>,
) -> Result<Vec<Buffer>> {
    let operand = |spec: &ArraySpec| {
        let array = arrays.get(spec.name).with_context(|| format!("{} is drawn", spec.name))?;
        upload(session, spec, problem, array)
    };
    config.op.signature(problem, pass).operands.iter().map(operand).collect()
}

/// Room on the host for the result `name`.
fn room_for(config: &Config, problem: &Problem, pass: Pass, name: &str) -> Array<'static> {
    let signature = config.op.signature(problem, pass);
    let spec = signature.get(name);
    spec.map_or_else(|| Array::of(Vec::<f32>::new()), |spec| spec.room(problem, 0.0))
}

impl Benchmark for OnXla {
    fn compile(&mut self) -> Result<()> {
        self.compiled = Some(self.session.compile_code(&self.plan.code)?);
        Ok(())
    }

    fn is_cached(&self) -> Option<bool> {
        self.compiled.as_ref()?.from_cache
    }

    fn start(&mut self) -> Result<()> {
        // A program from JAX makes its own, once there is room.
        let donated = match self.plan.takes_gradient() {
            true => Some(self.take_donated()?),
            false => {
                self.donated = None;
                None
            }
        };
        let compiled = self.compiled.as_ref().context("it is compiled before it runs")?;
        let arguments: Vec<_> = self.inputs.iter().chain(&donated).collect();
        let Execution { mut outputs, done } =
            compiled.executable.execute_async(&arguments, &ExecuteOptions::default())?;
        if self.plan.has_gradients() {
            self.donated = Some(outputs.swap_remove(self.plan.signature.gradients));
        }
        self.loss = Some(outputs.swap_remove(0));
        self.last = Some(done);
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        self.last.take().map_or(Ok(()), |last| Ok(last.wait()?))
    }

    fn loss(&self) -> Result<f64> {
        let mut output = self.output.clone();
        read(self.loss.as_ref().context("a step gives its first output")?, &mut output)?;
        let of = |index| self.cotangent.as_ref().map_or(1.0, |cotangent| cotangent.at(index));
        Ok((0..output.len()).map(|index| of(index) * output.at(index)).sum())
    }

    /// Into memory that is there already.
    fn time_copies(&mut self, count: usize) -> Vec<f64> {
        if self.copy.is_none() {
            return Vec::new();
        }
        let (seconds, outcome) = timed(|| -> Result<()> {
            for _ in 0..count {
                let donated = self.take_donated()?;
                let arguments = [&self.inputs[0], &donated];
                let copy = self.copy.as_ref().context("a step is held to copies")?;
                let Execution { mut outputs, done } =
                    copy.execute_async(&arguments, &ExecuteOptions::default())?;
                self.donated = Some(outputs.swap_remove(0));
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

/// Reads as many bytes as an array of this type has and writes as many, in the quicker of XLA's ways: on
/// a GPU a copy by the driver, elsewhere a negation, which XLA has threads for.
fn copy_of(ty: TensorType, backend: Backend) -> Program {
    let mut b = Builder::new("copy", &[ty]);
    let x = b.argument(0);
    let y = if backend == Backend::XlaCuda { x } else { b.unary("negate", &x) };
    b.finish(&[&y]).donating(0)
}

//! What is compared with the reference: kernels called directly, programs that this build writes, or one
//! from JAX, behind one trait.

use anyhow::{Context, Result, ensure};
use pjrt_client::{Buffer, Platform, Plugin};
use xentile::operation::{ArraySpec, Arrays, Pass, Problem};
use xentile_cpu::operation::{Launch, Run};
use xentile_cpu::{Isa, Threads, kernels};
use xentile_programs::Exported;

use super::config::Config;
use crate::config::{Backend, Implementation, Op, TileConfig, check_program};
use crate::exported::{self, Asked, Signature};
use crate::setup::Setup;
use crate::tpu;
use crate::xla::{Session, read, upload};

/// An operation on one problem, ready to run.
pub(super) trait Runner {
    /// Whether each pass can be run by itself; else the one that gives everything.
    fn is_split(&self) -> bool;

    /// Runs `pass` for what it is `given`, and fills those of its results that are in `results`.
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()>;

    /// How it runs.
    fn setup(&self) -> Setup;
}

/// Refuses a config of which nothing can run, before inputs are drawn.
///
/// # Errors
/// A program where there can be none, no TPU to run on, or an operation without kernels to call.
pub(super) fn check_choices(config: &Config) -> Result<()> {
    check_program(config.program.as_deref(), config.backend, config.implementation)?;
    if config.backend == Backend::XlaTpu {
        tpu::require()?;
        // Reports a missing plug-in before anything is exported.
        Plugin::find(Platform::Tpu, config.plugin.as_deref())?;
    }
    config.backend.check_kernels(config.op)
}

/// Threads for kernels that are called directly.
pub(super) fn threads(config: &Config) -> Result<Option<Threads>> {
    let is_native = config.backend.platform().is_none();
    is_native.then(|| Threads::new(config.threads).context("cannot start threads")).transpose()
}

/// What `config` asks for, on `inputs`; `pool` is what [`threads`] gave.
pub(super) fn open<'a>(
    config: &'a Config,
    problem: &'a Problem,
    inputs: &'a Arrays<'a>,
    pool: Option<&'a Threads>,
) -> Result<Box<dyn Runner + 'a>> {
    let (op, backend) = (config.op, config.backend);
    let Some(platform) = backend.platform() else {
        let pool = pool.context("backend cpu has threads")?;
        return Ok(Box::new(Native::new(config, problem, inputs, pool)?));
    };
    let asked = Asked {
        op,
        backend,
        implementation: config.implementation,
        topology: None,
        problem,
        tile: config.tile,
        options: &config.options,
        program: config.program.as_deref(),
        cache: config.cache.as_deref(),
    };
    let (plugin, cache) = (config.plugin.as_deref(), config.cache.as_deref());
    let is_kernel = config.implementation == Implementation::Kernel;
    let whole = op.signature(problem, op.whole(problem));
    if asked.program.is_none() && !asked.needs_export() {
        let session = Session::open(platform, plugin, cache)?;
        if is_kernel {
            session.register_kernels()?;
        }
        let tile = exported::own_tile(op, problem, backend)?.filter(|_| is_kernel);
        let inputs = uploaded(&session, &whole.operands, problem, inputs)?;
        return Ok(Box::new(OnXla { session, config, problem, tile, inputs, program: None }));
    }
    ensure!(
        config.cotangent == 1.0 || !op.is_fused(problem),
        "cotangent is {}; a program from JAX takes none, which is 1: set cotangent to 1",
        config.cotangent
    );
    let signature = Signature::of(op, problem, op.whole(problem));
    let named = asked.named(&signature)?;
    let session = Session::open(platform, plugin, cache)?;
    // Takes seconds, which are in vain where the device gives no client.
    let program = named.map_or_else(|| asked.export(&signature), Ok)?;
    if exported::calls_kernels(&program, backend) {
        session.register_kernels()?;
    }
    let inputs = uploaded(&session, &whole.operands, problem, inputs)?;
    let tile = exported::tile(op, &program).filter(|_| is_kernel);
    Ok(Box::new(OnXla { session, config, problem, tile, inputs, program: Some(program) }))
}

/// Those of `arrays` that are among `specs`, on the device, in the order of these.
fn uploaded(
    session: &Session,
    specs: &[ArraySpec],
    problem: &Problem,
    arrays: &Arrays<'_>,
) -> Result<Vec<Buffer>> {
    let found = specs.iter().filter_map(|spec| Some((spec, arrays.get(spec.name)?)));
    found.map(|(spec, array)| upload(session, spec, problem, array)).collect()
}

/// Kernels called directly, or what is written plainly beside them.
struct Native<'a> {
    run: Box<dyn Run + 'a>,
    setup: Setup,
}

impl<'a> Native<'a> {
    fn new(
        config: &Config,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        pool: &'a Threads,
    ) -> Result<Self> {
        let isa = config.isa.as_deref().map_or_else(|| Ok(Isa::detect()), str::parse)?;
        let op = config.op;
        let kernels = kernels(op.name()).context("there are kernels, which was checked")?;
        let threads = Some(pool.count());
        match config.implementation {
            Implementation::Kernel => {
                let tile = kernels.tile(problem)?.map(TileConfig::from);
                let run = kernels.open(problem, inputs, Launch { isa, pool })?;
                let setup = Setup { tile, isa: Some(isa.name()), threads, ..Setup::default() };
                Ok(Self { run, setup })
            }
            Implementation::Reference => {
                let run = kernels.dense(problem, inputs, pool).with_context(|| {
                    format!("impl is reference; op {op} has no dense program on backend cpu")
                })?;
                Ok(Self { run, setup: Setup { threads, ..Setup::default() } })
            }
        }
    }
}

impl Runner for Native<'_> {
    fn is_split(&self) -> bool {
        true
    }

    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        Ok(self.run.run(pass, given, results)?)
    }

    fn setup(&self) -> Setup {
        self.setup.clone()
    }
}

/// Programs that XLA compiles.
struct OnXla<'a> {
    session: Session,
    config: &'a Config,
    problem: &'a Problem,
    /// None where the program has no tiles.
    tile: Option<TileConfig>,
    /// What every pass takes.
    inputs: Vec<Buffer>,
    /// The program from JAX, of one pass; this build's own where absent.
    program: Option<Exported>,
}

impl OnXla<'_> {
    fn op(&self) -> Op {
        self.config.op
    }
}

impl Runner for OnXla<'_> {
    fn is_split(&self) -> bool {
        self.program.is_none()
    }

    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        // A program keeps nothing for another one.
        let pass = if pass == Pass::Backward { Pass::ForwardAndBackward } else { pass };
        let signature = self.op().signature(self.problem, pass);
        let given = uploaded(&self.session, &signature.operands, self.problem, given)?;
        let arguments: Vec<_> = self.inputs.iter().chain(&given).collect();
        let found = match &self.program {
            Some(program) => {
                let compiled = self.session.compile_code(&program.bytecode)?;
                compiled.executable.execute(&arguments)?
            }
            None => {
                let Config { backend, implementation, .. } = *self.config;
                let own =
                    exported::own_program(self.op(), self.problem, pass, backend, implementation)?;
                let (program, _) = own.context("this build writes the program")?;
                self.session.compile(&program)?.executable.execute(&arguments)?
            }
        };
        let (count, wanted) = (found.len(), signature.results.len());
        // What a manifest says of the results is known to be true only once there are any.
        ensure!(count == wanted, "the program gives {count} results; its manifest says {wanted}");
        for (spec, buffer) in signature.results.iter().zip(&found) {
            if let Some(array) = results.get_mut(spec.name) {
                read(buffer, array)?;
            }
        }
        Ok(())
    }

    fn setup(&self) -> Setup {
        Setup {
            tile: self.tile,
            isa: None,
            threads: None,
            plugin: self.session.describe().ok(),
            exported: self.program.as_ref().map(Into::into),
        }
    }
}

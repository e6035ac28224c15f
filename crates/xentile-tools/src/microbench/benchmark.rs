//! What is timed, and what is found of it.

use anyhow::Result;
use xentile::operation::{Pass, Problem, Role};

use super::config::Config;
use super::report::{AfterAlloc, AfterRun, CompiledMemory, DeviceMemory};
use crate::estimate::Estimate;
use crate::schedule::Schedule;
use crate::setup::Setup;

/// An operation on a backend, with its inputs made.
pub(super) trait Benchmark {
    /// Makes the program, where it has to be compiled.
    fn compile(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether [`Self::compile`] found the program in the cache; none where there is no cache.
    fn is_cached(&self) -> Option<bool> {
        None
    }

    /// Starts a step, after those that were started before.
    fn start(&mut self) -> Result<()>;

    /// Waits for all that were started.
    fn wait(&mut self) -> Result<()>;

    /// So many of them, complete on return.
    fn steps(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            self.start()?;
        }
        self.wait()
    }

    /// The scalar of the last step, or the first output x its cotangent.
    fn loss(&self) -> Result<f64>;

    /// Copies as many bytes as the first input has in each way that the backend knows, `count` times
    /// where it takes work ahead, and gives the seconds that one copy took in each; nothing where a step
    /// is held to products.
    fn time_copies(&mut self, count: usize) -> Vec<f64>;

    /// How it runs.
    fn setup(&self) -> Setup;

    /// What the device's allocator counts.
    fn device_memory(&self) -> DeviceMemory {
        DeviceMemory::default()
    }

    /// What the compiler says that the program takes.
    fn compiled_memory(&self) -> Option<CompiledMemory> {
        None
    }
}

/// The first output of a pass, and the cotangent of it that the pass is given, if any.
pub(super) fn first_output(
    config: &Config,
    problem: &Problem,
    pass: Pass,
) -> (&'static str, &'static str) {
    let signature = config.op.signature(problem, pass);
    let output = signature.results.first().map_or("", |spec| spec.name);
    let cotangent = signature.operands.iter().find(|spec| spec.role == Role::Cotangent(output));
    (output, cotangent.map_or("", |spec| spec.name))
}

/// What was found of a program.
pub(super) struct Found {
    pub(super) setup: Setup,
    pub(super) compile_s: Option<f64>,
    pub(super) from_cache: Option<bool>,
    pub(super) compiled: Option<CompiledMemory>,
    pub(super) schedule: Option<Schedule>,
    /// Or why there is none; none where nothing was compiled for a topology.
    pub(super) estimate: Option<Result<Estimate>>,
    pub(super) run: Option<Run>,
}

/// What a run tells.
pub(super) struct Run {
    pub(super) first_run_s: f64,
    pub(super) loss: f64,
    pub(super) steps: Statistics,
    /// None where there is nothing to compare with.
    pub(super) copy_s: Option<f64>,
    pub(super) mem_after_alloc: AfterAlloc,
    pub(super) mem_after_run: AfterRun,
}

pub(super) struct Statistics {
    pub(super) mean: f64,
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) deviation: f64,
}

impl Statistics {
    /// Of at least one value.
    pub(super) fn new(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<_> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        Self {
            mean,
            median: f64::midpoint(values[(count - 1) / 2], values[count / 2]),
            min: values[0],
            deviation: (squares / (count.max(2) - 1) as f64).sqrt(),
        }
    }
}

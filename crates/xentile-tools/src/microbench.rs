//! Times `value_and_grad` of the scalar loss: one implementation, one shape, one process.
//!
//! An operation on a backend is a `Subject`; `prepare` is the one place that knows them all. With a
//! topology the program is only compiled, and what a run would tell is none.

mod cpu;
mod xla;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use pjrt_client::CompiledMemoryStats;
use serde::{Deserialize, Serialize};
use xentile::{DType, LogitsShape};
use xentile_cpu::Isa;
use xentile_programs::Exported;
use xentile_programs::exported::Linear;

use crate::config::{Backend, Op, Options, ReductionConfig, TileConfig};
use crate::estimate::{Estimate, KernelEstimate};
use crate::input::synthetic::Synthetic;
use crate::machine::Machine;
use crate::schedule::Schedule;
use crate::timing::timed;
use crate::{exported, memory};

/// Which program computes it.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Implementation {
    /// The dense program: plain f32 code that keeps every probability in memory.
    Reference,
    /// The tiled kernel.
    #[default]
    Kernel,
}

impl Implementation {
    /// The program for XLA.
    pub(crate) fn program(self) -> xentile_programs::cross_entropy::Implementation {
        match self {
            Self::Reference => xentile_programs::cross_entropy::Implementation::Dense,
            Self::Kernel => xentile_programs::cross_entropy::Implementation::Kernel,
        }
    }
}

/// What logits hold.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Logits {
    /// What `input` describes.
    #[default]
    Random,
    /// Zeros, which are made in no time.
    Zeros,
}

/// One measurement.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// What is computed.
    pub op: Op,
    /// Where.
    pub backend: Backend,
    /// By which program.
    #[serde(rename = "impl")]
    pub implementation: Implementation,
    /// T, tokens.
    pub time: usize,
    /// V, vocabulary columns.
    pub vocab: usize,
    /// D, columns of hidden states: of linear cross-entropy, as are the next three.
    pub hidden: Option<usize>,
    /// Whether there is a bias.
    pub bias: bool,
    /// Which axis of the weight is V: 0, the default, or 1.
    pub vocab_axis: Option<usize>,
    /// What may be held beyond operands and results; the operation's own choice where absent.
    pub max_scratch_bytes: Option<u64>,
    /// The dtype of logits, or of hidden states and weight, and of their gradients.
    #[serde(
        deserialize_with = "crate::config::dtype",
        serialize_with = "crate::config::dtype_name"
    )]
    pub dtype: DType,
    /// The kernel's tile; tuned where left open.
    pub tile: TileConfig,
    /// Timed steps.
    pub iters: usize,
    /// Steps between the first call and the timed ones.
    pub warmup: usize,
    /// Steps that are started before the last of them is waited for, of which each then counts for
    /// its share. Where absent 1 on processors; 10 on a device that takes work ahead, as a training
    /// loop gives it.
    pub in_flight: Option<usize>,
    /// Threads; 0 is one a core.
    pub threads: usize,
    /// Instruction set; the best of this processor where absent.
    pub isa: Option<String>,
    /// The PJRT plug-in's file, for `xla:` backends; looked for where absent.
    pub plugin: Option<PathBuf>,
    /// TPUs to compile for, none of which need be there, such as `v6e:2x2`; nothing runs.
    pub topology: Option<String>,
    /// The manifest of a program that JAX exported, as the kernel. `{time_block}` and `{block_size}`
    /// in its name stand for the tile.
    pub program: Option<PathBuf>,
    /// Where compiled programs are kept, for `xla:` backends. Only these tools may write there, as
    /// what lies there is run. Where absent it is what the variable `XENTILE_CACHE` names, and
    /// programs are compiled each time where nothing does.
    pub cache: Option<PathBuf>,
    /// The operation's options.
    pub options: Options,
    /// Random logits or zeros.
    pub logits: Logits,
    /// What random logits, labels, weights and cotangents are derived from.
    pub input: Synthetic,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            op: Op::default(),
            backend: Backend::default(),
            implementation: Implementation::default(),
            time: 512,
            vocab: 151_643,
            hidden: None,
            bias: false,
            vocab_axis: None,
            max_scratch_bytes: None,
            dtype: DType::Bf16,
            tile: TileConfig::default(),
            iters: 20,
            warmup: 3,
            in_flight: None,
            threads: 0,
            isa: None,
            plugin: None,
            topology: None,
            program: None,
            cache: None,
            options: Options::default(),
            logits: Logits::default(),
            input: Synthetic::default(),
        }
    }
}

/// More threads than any machine has cores; past this the system may die before it refuses.
const MAX_THREADS: usize = 4096;

impl Config {
    /// Checks everything but the tile, and that the measurement fits in memory.
    ///
    /// # Errors
    /// The first value that cannot be measured.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [("time", self.time), ("vocab", self.vocab), ("iters", self.iters)] {
            ensure!(value > 0, "{name} is 0; it must be at least 1");
        }
        if let Some(steps) = self.in_flight {
            let most = if self.in_order() { 1 } else { self.iters };
            ensure!(
                (1..=most).contains(&steps),
                "in_flight is {steps}; here it must be 1 to {most}: the most is iters, and 1 on \
                 processors, where a step is complete when its call is"
            );
        }
        ensure!(
            self.threads <= MAX_THREADS,
            "threads is {}; the most is {MAX_THREADS}, and 0 is one a core",
            self.threads
        );
        self.input.validate().context("input")?;
        self.options.cross_entropy()?;
        self.isa()?;
        let (plugin, isa) = (self.plugin.as_deref(), self.isa.as_deref());
        self.backend.check_choices(plugin, self.cache.as_deref(), isa, self.threads)?;
        exported::check_choice(self.program.as_deref(), self.backend, self.implementation)?;
        let linear = self.linear()?;
        self.op.check_backend(self.backend)?;
        ensure!(
            linear.is_none() || self.logits == Logits::Random,
            "logits is {}; op {} makes random ones",
            name(&self.logits),
            name(&self.op)
        );
        if let Some(topology) = &self.topology {
            ensure!(
                self.backend == Backend::XlaTpu,
                "topology is {topology}; only backend xla:tpu compiles for one, and backend is {}",
                name(&self.backend)
            );
            // Nothing is put in memory.
            self.shape()?;
            return Ok(());
        }
        let elements = self.shape()?.elements() as u64;
        if let Some(Linear { hidden, .. }) = linear {
            // Both arrays and their gradients, here and on the device; logits where they are held.
            let rows = (self.time as u64).checked_add(self.vocab as u64);
            let arrays = rows.and_then(|rows| rows.checked_mul(hidden as u64));
            let arrays = arrays.and_then(|n| n.checked_mul(4 * self.dtype.size_bytes() as u64));
            let is_dense = self.implementation == Implementation::Reference;
            let logits = if is_dense { elements.checked_mul(8) } else { Some(0) };
            let needed = arrays.zip(logits).and_then(|(a, b)| a.checked_add(b));
            return memory::require(needed, "lower time, vocab or hidden");
        }
        let width = match self.implementation {
            Implementation::Kernel => 2 * self.dtype.size_bytes(),
            Implementation::Reference => 2 * self.dtype.size_bytes() + size_of::<f32>(),
        };
        memory::require(elements.checked_mul(width as u64), "lower time or vocab")
    }

    /// The manifest of the program, with the tile in its name; none where there is no program.
    ///
    /// # Errors
    /// The name has a place for an extent of the tile that is left open.
    pub fn manifest(&self) -> Result<Option<PathBuf>> {
        let manifest = |program: &PathBuf| exported::manifest(program, self.tile);
        self.program.as_ref().map(manifest).transpose()
    }

    /// What a config with a program leaves out, as the program has it.
    ///
    /// # Errors
    /// The program's first argument is no matrix of logits or hidden states.
    pub fn base(exported: &Exported) -> Result<serde_yaml::Value> {
        let first = exported.arguments.first().context("the program takes no arguments")?;
        let second = exported.arguments.get(1);
        let (what, vocab) = match exported.linear {
            None => ("logits [T, V]", first.dims.get(1)),
            Some(Linear { vocab_axis, .. }) => {
                let weight =
                    second.context("the program takes one argument; it must take weight")?;
                ("hidden [T, D]", weight.dims.get(vocab_axis))
            }
        };
        let ([time, _], Some(vocab)) = (&first.dims[..], vocab) else {
            bail!("the program's first argument is {first}; it must be {what}");
        };
        let mut base = serde_json::json!({
            "op": exported.op,
            "backend": format!("xla:{}", exported.platform),
            "time": time,
            "vocab": vocab,
            "dtype": first.element.to_string(),
            "options": exported.options,
        });
        if let (Some(linear), Some(base)) = (exported.linear, base.as_object_mut()) {
            let linear = serde_json::to_value(linear)?;
            base.extend(linear.as_object().cloned().unwrap_or_default());
        }
        Ok(serde_yaml::to_value(base)?)
    }

    /// Whether the backend completes a step before it takes another.
    fn in_order(&self) -> bool {
        matches!(self.backend, Backend::Cpu | Backend::XlaCpu)
    }

    /// Steps under way at a time.
    fn steps_in_flight(&self) -> usize {
        const ON_DEVICES: usize = 10;
        let usual = if self.in_order() { 1 } else { ON_DEVICES.min(self.iters) };
        self.in_flight.unwrap_or(usual)
    }

    fn shape(&self) -> Result<LogitsShape> {
        Ok(LogitsShape::new(self.time, self.vocab)?)
    }

    /// What is asked of linear cross-entropy; none for an operation over logits.
    ///
    /// # Errors
    /// A key that the operation does not have, or a value out of range.
    fn linear(&self) -> Result<Option<Linear>> {
        let Self { op, hidden, bias, vocab_axis, max_scratch_bytes, .. } = *self;
        crate::config::linear(op, hidden, bias, vocab_axis, max_scratch_bytes)
    }

    fn isa(&self) -> Result<Isa> {
        self.isa.as_deref().map_or_else(|| Ok(Isa::detect()), |name| Ok(name.parse()?))
    }
}

/// An operation on a backend, with its inputs made.
trait Subject {
    /// Makes the program, where it has to be compiled.
    fn compile(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether [`Self::compile`] found the program in the cache; none where there is no cache.
    fn is_cached(&self) -> Option<bool> {
        None
    }

    /// Starts one `value_and_grad`, after those that were started before.
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

    /// The scalar loss of the last step.
    fn loss(&self) -> Result<f64>;

    /// Copies as many bytes as logits have in each way that the backend knows, `count` times where
    /// it takes work ahead, and gives the seconds that one copy took in each; nothing where there are
    /// no logits.
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

/// What a [`Subject`] settled on where the config left a choice.
#[derive(Clone)]
struct Setup {
    tile: Option<TileConfig>,
    threads: Option<usize>,
    isa: Option<&'static str>,
    plugin: Option<String>,
    exported: Option<ExportedBy>,
}

/// Which program ran, of those that JAX exported.
#[derive(Clone, Debug, Serialize)]
pub struct ExportedBy {
    /// The SHA-256 of the program.
    pub sha256: String,
    /// The version of JAX that exported it.
    pub jax_version: String,
    /// How it is cut, in words, where that is planned.
    pub plan: Option<String>,
}

impl From<&Exported> for ExportedBy {
    fn from(exported: &Exported) -> Self {
        Self {
            sha256: exported.sha256.clone(),
            jax_version: exported.jax_version.clone(),
            plan: exported.plan.clone(),
        }
    }
}

fn prepare(config: &Config) -> Result<Box<dyn Subject>> {
    match config.backend {
        Backend::Cpu => cpu::cross_entropy(config),
        Backend::XlaCpu | Backend::XlaCuda | Backend::XlaTpu => xla::subject(config),
    }
}

/// What one measurement found; none of what takes a run where the program was only compiled.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What was computed.
    pub op: Op,
    /// Where.
    pub backend: Backend,
    /// By which program.
    #[serde(rename = "impl")]
    pub implementation: Implementation,
    /// T.
    pub time: usize,
    /// V.
    pub vocab: usize,
    /// D, where logits are made of hidden states.
    pub hidden: Option<usize>,
    /// Of logits, or of hidden states and weight, and of their gradients.
    pub dtype: &'static str,
    /// Tokens a tile; none where the program has no tiles, or where its kernel chose.
    pub time_block: Option<usize>,
    /// Columns a tile; none where the program has no tiles, or where its kernel chose.
    pub block_size: Option<usize>,
    /// Mean and sum are the fused schedule; none is a forward pass, then a backward pass.
    pub reduction: ReductionConfig,
    /// Threads that ran; none where XLA chose.
    pub threads: Option<usize>,
    /// Instruction set of the kernel and of the copy; none where XLA chose.
    pub isa: Option<&'static str>,
    /// The PJRT plug-in: file, version, platform.
    pub plugin: Option<String>,
    /// The TPUs compiled for; none where the program ran.
    pub topology: Option<String>,
    /// The program from JAX; none where it is this build's own.
    pub exported: Option<ExportedBy>,
    /// Timed steps.
    pub iters: usize,
    /// Untimed steps after the first.
    pub warmup: usize,
    /// Steps that were started before the last of them was waited for.
    pub in_flight: usize,
    /// The first call: compiling, and a run that allocates what it needs.
    pub first_call_s: Option<f64>,
    /// Compiling alone, with the writing of `schedule` where there is one; none where nothing is
    /// compiled.
    pub compile_s: Option<f64>,
    /// Whether the program was loaded from the cache, which `compile_s` is the time of then; none
    /// where there is no cache.
    pub from_cache: Option<bool>,
    /// The first run alone.
    pub first_run_s: Option<f64>,
    /// Mean over the timed steps.
    pub avg_step_ms: Option<f64>,
    /// Median.
    pub median_step_ms: Option<f64>,
    /// Quickest.
    pub min_step_ms: Option<f64>,
    /// Standard deviation of a step.
    pub std_step_ms: Option<f64>,
    /// Reading as many bytes as logits have and writing them elsewhere: the median of copies made
    /// before and after the timed steps, in the quickest way. None, as are the next three, where
    /// logits are made of hidden states.
    pub copy_ms: Option<f64>,
    /// `median_step_ms / copy_ms`.
    pub ratio_to_copy: Option<f64>,
    /// Bytes of logits and of their gradient over `median_step_ms`, in 1e9 a second.
    pub gb_per_s: Option<f64>,
    /// The same bytes over `copy_ms`.
    pub copy_gb_per_s: Option<f64>,
    /// Operations of three products of T x D x V, the fewest there can be, over `median_step_ms`, in
    /// 1e9 a second; none where there are no hidden states.
    pub gflop_per_s: Option<f64>,
    /// The scalar loss: reduced, or where nothing reduces it the sum over tokens of cotangent x loss.
    pub loss: Option<f64>,
    /// When the inputs were made and nothing had run.
    pub mem_after_alloc: AfterAlloc,
    /// When everything had run.
    pub mem_after_run: AfterRun,
    /// What running added to the inputs at its peak: gradient, temporaries, threads.
    pub mem_peak_over_alloc_bytes: Option<u64>,
    /// What the compiler says that the program takes; none where nothing is compiled.
    pub compiled: Option<CompiledMemory>,
    /// The compiler's schedule; none where it tells of none.
    pub schedule: Option<Schedule>,
    /// What a step would take by that schedule; an estimate, none where there is too little to go by.
    pub estimate: Option<Estimate>,
    /// Hardware, versions and commit.
    pub machine: Machine,
    /// The full configuration.
    pub config: Config,
}

/// What a device's allocator counts; none where it does not tell.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct DeviceMemory {
    /// In use.
    pub bytes_in_use: Option<u64>,
    /// The most that was in use at once in the process's life.
    pub peak_bytes_in_use: Option<u64>,
    /// Reserved.
    pub bytes_reserved: Option<u64>,
    /// Held by the allocator, in use or not.
    pub pool_bytes: Option<u64>,
    /// The most that it held at once.
    pub peak_pool_bytes: Option<u64>,
}

/// What a compiled program takes, in bytes; none where the plug-in does not tell.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CompiledMemory {
    /// Arguments.
    pub argument_bytes: Option<u64>,
    /// Results.
    pub output_bytes: Option<u64>,
    /// What lives while it runs.
    pub temporary_bytes: Option<u64>,
    /// The part of the results that lies in arguments.
    pub alias_bytes: Option<u64>,
    /// The most that lives at once.
    pub peak_bytes: Option<u64>,
    /// Machine code.
    pub code_bytes: Option<u64>,
}

impl From<CompiledMemoryStats> for CompiledMemory {
    fn from(stats: CompiledMemoryStats) -> Self {
        Self {
            argument_bytes: stats.arguments,
            output_bytes: stats.outputs,
            temporary_bytes: stats.temporaries,
            alias_bytes: stats.alias,
            peak_bytes: stats.peak,
            code_bytes: stats.generated_code,
        }
    }
}

/// Memory once inputs are made; none where the system does not tell.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct AfterAlloc {
    /// Held by the process.
    pub resident_bytes: Option<u64>,
    /// In use on the device.
    pub bytes_in_use: Option<u64>,
}

/// Memory after the run; none where the system does not tell.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct AfterRun {
    /// Held by the process.
    pub resident_bytes: Option<u64>,
    /// The most that the process ever held.
    pub peak_resident_bytes: Option<u64>,
    /// On the device.
    #[serde(flatten)]
    pub device: DeviceMemory,
}

/// What was found of a program.
struct Found {
    setup: Setup,
    compile_s: Option<f64>,
    from_cache: Option<bool>,
    compiled: Option<CompiledMemory>,
    schedule: Option<Schedule>,
    estimate: Option<Estimate>,
    run: Option<Run>,
}

/// What a run tells.
struct Run {
    first_run_s: f64,
    loss: f64,
    steps: Statistics,
    /// None where there is nothing to compare with.
    copy_s: Option<f64>,
    mem_after_alloc: AfterAlloc,
    mem_after_run: AfterRun,
}

/// Measures what `config` describes, or compiles it where that names a topology.
///
/// # Errors
/// A value that cannot be measured; the program does not compile; the step itself fails.
pub fn run(config: &Config) -> Result<Report> {
    config.validate()?;
    let machine = Machine::current();
    let found = match &config.topology {
        None => measure(config)?,
        Some(topology) => xla::compile_for(topology, config)?,
    };
    let Found { setup, compile_s, from_cache, compiled, schedule, estimate, run } = found;
    let Setup { tile, threads, isa, plugin, exported } = setup;
    let run = run.as_ref();
    let milliseconds = |seconds: fn(&Run) -> f64| run.map(|run| seconds(run) * 1e3);
    let elements = config.shape()?.elements();
    let bytes = (2 * elements * config.dtype.size_bytes()) as f64;
    // Logits that nobody holds are not moved.
    let over_logits = run.filter(|_| config.hidden.is_none());
    let flop = config.hidden.map(|hidden| 6.0 * elements as f64 * hidden as f64);
    let mem_after_alloc = run.map(|run| run.mem_after_alloc).unwrap_or_default();
    let mem_after_run = run.map(|run| run.mem_after_run).unwrap_or_default();
    Ok(Report {
        op: config.op,
        backend: config.backend,
        implementation: config.implementation,
        time: config.time,
        vocab: config.vocab,
        hidden: config.hidden,
        dtype: config.dtype.name(),
        time_block: tile.and_then(|tile| tile.time_block),
        block_size: tile.and_then(|tile| tile.block_size),
        reduction: config.options.reduction,
        threads,
        isa,
        plugin,
        topology: config.topology.clone(),
        exported,
        iters: if run.is_some() { config.iters } else { 0 },
        warmup: if run.is_some() { config.warmup } else { 0 },
        in_flight: if run.is_some() { config.steps_in_flight() } else { 0 },
        first_call_s: run.map(|run| compile_s.unwrap_or(0.0) + run.first_run_s),
        compile_s,
        from_cache,
        first_run_s: run.map(|run| run.first_run_s),
        avg_step_ms: milliseconds(|run| run.steps.mean),
        median_step_ms: milliseconds(|run| run.steps.median),
        min_step_ms: milliseconds(|run| run.steps.min),
        std_step_ms: milliseconds(|run| run.steps.deviation),
        copy_ms: run.and_then(|run| Some(run.copy_s? * 1e3)),
        ratio_to_copy: run.and_then(|run| Some(run.steps.median / run.copy_s?)),
        gb_per_s: over_logits.map(|run| bytes / run.steps.median / 1e9),
        copy_gb_per_s: run.and_then(|run| Some(bytes / run.copy_s? / 1e9)),
        gflop_per_s: run.and_then(|run| Some(flop? / run.steps.median / 1e9)),
        loss: run.map(|run| run.loss),
        mem_after_alloc,
        mem_after_run,
        mem_peak_over_alloc_bytes: mem_after_run
            .peak_resident_bytes
            .zip(mem_after_alloc.resident_bytes)
            .map(|(peak, inputs)| peak.saturating_sub(inputs)),
        compiled,
        schedule,
        estimate,
        machine,
        config: config.clone(),
    })
}

fn measure(config: &Config) -> Result<Found> {
    let mut subject = prepare(config)?;
    let mem_after_alloc = AfterAlloc {
        resident_bytes: memory::resident_bytes(),
        bytes_in_use: subject.device_memory().bytes_in_use,
    };

    let (compile_s, compiled) = timed(|| subject.compile());
    compiled?;
    let (first_run_s, done) = timed(|| subject.steps(1));
    done?;
    let loss = subject.loss()?;
    subject.steps(config.warmup)?;
    // Half of the copies before the steps and half after, so that a processor that slows down or
    // speeds up does so for both.
    let half = config.iters.clamp(3, 10);
    let count = config.steps_in_flight();
    let mut copies: Vec<_> = (0..half).map(|_| subject.time_copies(count)).collect();
    let mut steps = Vec::with_capacity(config.iters);
    while steps.len() < config.iters {
        let count = count.min(config.iters - steps.len());
        let (seconds, done) = timed(|| subject.steps(count));
        done?;
        steps.resize(steps.len() + count, seconds / count as f64);
    }
    copies.extend((0..half).map(|_| subject.time_copies(count)));

    let mem_after_run = AfterRun {
        resident_bytes: memory::resident_bytes(),
        peak_resident_bytes: memory::peak_resident_bytes(),
        device: subject.device_memory(),
    };
    let compiled = subject.compiled_memory();
    let ways = 0..copies[0].len();
    let medians = ways.map(|way| Statistics::new(copies.iter().map(|copy| copy[way])).median);
    let copy_s = medians.reduce(f64::min);
    let steps = Statistics::new(steps);
    Ok(Found {
        setup: subject.setup(),
        compile_s: compiled.is_some().then_some(compile_s),
        from_cache: subject.is_cached(),
        compiled,
        schedule: None,
        estimate: None,
        run: Some(Run { first_run_s, loss, steps, copy_s, mem_after_alloc, mem_after_run }),
    })
}

struct Statistics {
    mean: f64,
    median: f64,
    min: f64,
    deviation: f64,
}

impl Statistics {
    /// Of at least one value.
    fn new(values: impl IntoIterator<Item = f64>) -> Self {
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

/// The name that flags, configs and reports use.
pub(crate) fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The table for people.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = format!("{} on {}", name(&self.op), name(&self.backend));
        let program = match self.implementation {
            Implementation::Kernel => "tiled kernel",
            Implementation::Reference if self.plugin.is_some() => "dense program",
            Implementation::Reference => "dense program (plain f32 code, probabilities in memory)",
        };
        let schedule = match self.reduction {
            ReductionConfig::Mean => "mean, fused",
            ReductionConfig::Sum => "sum, fused",
            ReductionConfig::None => "none, forward then backward",
        };
        let bytes = |bytes: Option<u64>| bytes.map_or("not told".to_owned(), memory::human);
        let mut line = |name: &str, value: String| writeln!(f, "{name:<15} {value}");
        line("operation", what)?;
        line("implementation", program.to_owned())?;
        match self.config.hidden {
            None => line("logits", format!("[{}, {}] {}", self.time, self.vocab, self.dtype))?,
            Some(hidden) => line(
                "hidden states",
                format!("[{}, {hidden}] {}, a vocabulary of {}", self.time, self.dtype, self.vocab),
            )?,
        }
        if self.implementation == Implementation::Kernel {
            let tile = TileConfig { time_block: self.time_block, block_size: self.block_size };
            line("tile", tile.to_string())?;
        }
        line("reduction", schedule.to_owned())?;
        let runs_on: Vec<_> = [
            self.threads.map(|threads| format!("{threads} threads")),
            self.isa.map(str::to_owned),
            self.plugin.clone(),
        ]
        .into_iter()
        .flatten()
        .collect();
        if let Some(exported) = &self.exported {
            line(
                "program",
                format!("exported by jax {}, sha256 {}", exported.jax_version, exported.sha256),
            )?;
            if let Some(plan) = &exported.plan {
                line("plan", plan.clone())?;
            }
        }
        match &self.topology {
            None => line("runs on", runs_on.join(", "))?,
            Some(topology) => line("compiled for", format!("{topology}: {}", runs_on.join(", ")))?,
        }
        line("machine", self.machine.processor.clone())?;
        line("build", format!("xentile {} at {}", self.machine.xentile, self.machine.commit))?;
        match (self.loss, self.compile_s) {
            (Some(loss), _) => {
                line("loss", format!("{loss:.6}"))?;
                self.fmt_run(&mut line)?;
            }
            (None, Some(seconds)) => line("compiling", format!("{seconds:.3} s; nothing ran"))?,
            (None, None) => (),
        }
        if let Some(compiled) = &self.compiled {
            line(
                "compiled",
                format!(
                    "arguments {}, results {} ({} of them in arguments), temporaries {}, peak {}, \
                     code {}",
                    bytes(compiled.argument_bytes),
                    bytes(compiled.output_bytes),
                    bytes(compiled.alias_bytes),
                    bytes(compiled.temporary_bytes),
                    bytes(compiled.peak_bytes),
                    bytes(compiled.code_bytes)
                ),
            )?;
        }
        if let Some(schedule) = &self.schedule {
            let slots = |computation: &BTreeMap<String, u64>| {
                let used = computation.iter().filter(|&(_, &used)| used > 0);
                used.map(|(unit, used)| format!("{unit} {used}")).collect::<Vec<_>>().join(", ")
            };
            let mut row = |name: &str, bundles: u64, empty: u64, used: &BTreeMap<String, u64>| {
                let used = slots(used);
                line(name, format!("{bundles} bundles, {empty} empty; slots used: {used}"))
            };
            row("schedule", schedule.bundles, schedule.empty_bundles, &schedule.slots_used)?;
            for part in &schedule.computations {
                let name = format!("  {}", part.name);
                row(&name, part.bundles, part.empty_bundles, &part.slots_used)?;
            }
        }
        if let Some(estimate) = &self.estimate {
            let of_tile = |kernel: &KernelEstimate| {
                let [dma, schedule] = [kernel.tile_dma_us, kernel.tile_schedule_us];
                dma.zip(schedule).map_or(String::new(), |(dma, schedule)| {
                    format!("a tile's DMA {dma:.2} us, its schedule {schedule:.2} us; ")
                })
            };
            for kernel in &estimate.kernels {
                line(
                    "estimate",
                    format!(
                        "{}: {}DMA {:.3} ms, schedule {:.3} ms: {} binds",
                        kernel.name,
                        of_tile(kernel),
                        kernel.dma_ms,
                        kernel.schedule_ms,
                        kernel.binds.name()
                    ),
                )?;
            }
            line(
                "estimate",
                format!(
                    "a step takes {:.3} ms, {:.2} of the {:.3} that {} take; not measured: a bundle \
                     a cycle of {:.2} GHz, {:.0} GB/s",
                    estimate.step_ms,
                    estimate.ratio_to_floor,
                    estimate.floor_ms,
                    estimate.floor.name(),
                    estimate.clock_ghz,
                    estimate.hbm_gb_per_s
                ),
            )?;
        }
        if self.compiled.is_some() && self.loss.is_some() {
            let device = &self.mem_after_run.device;
            line(
                "device",
                format!(
                    "in use {}, peak {}, reserved {}, pool {}, peak of the pool {}",
                    bytes(device.bytes_in_use),
                    bytes(device.peak_bytes_in_use),
                    bytes(device.bytes_reserved),
                    bytes(device.pool_bytes),
                    bytes(device.peak_pool_bytes)
                ),
            )?;
        }
        Ok(())
    }
}

impl Report {
    /// What a run told.
    fn fmt_run(&self, line: &mut impl FnMut(&str, String) -> fmt::Result) -> fmt::Result {
        let bytes = |bytes: Option<u64>| bytes.map_or("not told".to_owned(), memory::human);
        let figure = |figure: Option<f64>, digits: usize| {
            figure.map_or("not told".to_owned(), |figure| format!("{figure:.digits$}"))
        };
        let is_loaded = self.from_cache == Some(true);
        let made = if is_loaded { "loading from the cache" } else { "compiling" };
        let compiling = self
            .compile_s
            .map_or(String::new(), |seconds| format!(", {seconds:.3} s of it {made}"));
        line("first call", format!("{} s{compiling}", figure(self.first_call_s, 3)))?;
        line(
            "step",
            format!(
                "median {} ms, mean {}, min {}, std {} over {}{}",
                figure(self.median_step_ms, 3),
                figure(self.avg_step_ms, 3),
                figure(self.min_step_ms, 3),
                figure(self.std_step_ms, 3),
                self.iters,
                if self.in_flight > 1 {
                    format!(", {} in flight", self.in_flight)
                } else {
                    String::new()
                }
            ),
        )?;
        if self.gflop_per_s.is_some() {
            let figure = figure(self.gflop_per_s, 1);
            line("throughput", format!("{figure} GFLOP/s of the three products that it takes"))?;
        } else {
            line(
                "copy",
                format!(
                    "{} ms; a step is {} copies",
                    figure(self.copy_ms, 3),
                    figure(self.ratio_to_copy, 2)
                ),
            )?;
            line(
                "throughput",
                format!(
                    "{} GB/s; the copy {} GB/s",
                    figure(self.gb_per_s, 2),
                    figure(self.copy_gb_per_s, 2)
                ),
            )?;
        }
        line(
            "memory",
            format!(
                "{} with inputs made, peak {}, {} more",
                bytes(self.mem_after_alloc.resident_bytes),
                bytes(self.mem_after_run.peak_resident_bytes),
                bytes(self.mem_peak_over_alloc_bytes)
            ),
        )
    }
}

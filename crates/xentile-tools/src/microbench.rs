//! Times `value_and_grad` of the scalar loss: one implementation, one shape, one process.
//!
//! An operation on a backend is a `Subject`; `prepare` is the one place that knows them all.

mod cpu;
mod dense;
mod xla;

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use xentile::{DType, LogitsShape, Tile};
use xentile_cpu::Isa;

use crate::config::{Backend, Op, Options, ReductionConfig, TileConfig};
use crate::input::synthetic::Synthetic;
use crate::machine::Machine;
use crate::memory;
use crate::timing::timed;

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
    /// The dtype of logits and of their gradient.
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
    /// Threads; 0 is one a core.
    pub threads: usize,
    /// Instruction set; the best of this processor where absent.
    pub isa: Option<String>,
    /// The PJRT plug-in's file, for `xla:` backends; looked for where absent.
    pub plugin: Option<PathBuf>,
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
            dtype: DType::Bf16,
            tile: TileConfig::default(),
            iters: 20,
            warmup: 3,
            threads: 0,
            isa: None,
            plugin: None,
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
        ensure!(
            self.threads <= MAX_THREADS,
            "threads is {}; the most is {MAX_THREADS}, and 0 is one a core",
            self.threads
        );
        self.input.validate().context("input")?;
        self.options.cross_entropy()?;
        self.isa()?;
        let (plugin, isa) = (self.plugin.as_deref(), self.isa.as_deref());
        self.backend.check_choices(plugin, isa, self.threads)?;
        let elements = self.shape()?.elements() as u64;
        let width = match self.implementation {
            Implementation::Kernel => 2 * self.dtype.size_bytes(),
            Implementation::Reference => 2 * self.dtype.size_bytes() + size_of::<f32>(),
        };
        memory::require(elements.checked_mul(width as u64), "lower time or vocab")
    }

    fn shape(&self) -> Result<LogitsShape> {
        Ok(LogitsShape::new(self.time, self.vocab)?)
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

    /// One `value_and_grad`, complete on return.
    fn step(&mut self) -> Result<()>;

    /// The scalar loss of the last step.
    fn loss(&self) -> Result<f64>;

    /// Copies as many bytes as logits have, once in each way that the backend knows, and gives the
    /// seconds that each took.
    fn time_copies(&mut self) -> Vec<f64>;

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
    tile: Option<Tile>,
    threads: Option<usize>,
    isa: Option<&'static str>,
    plugin: Option<String>,
}

fn prepare(config: &Config) -> Result<Box<dyn Subject>> {
    match (config.op, config.backend) {
        (Op::CrossEntropy, Backend::Cpu) => cpu::cross_entropy(config),
        (Op::CrossEntropy, Backend::XlaCpu | Backend::XlaCuda | Backend::XlaTpu) => {
            xla::cross_entropy(config)
        }
    }
}

/// What one measurement found.
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
    /// Of logits and their gradient.
    pub dtype: &'static str,
    /// Tokens a tile; none where the program has no tiles.
    pub time_block: Option<usize>,
    /// Columns a tile; none where the program has no tiles.
    pub block_size: Option<usize>,
    /// Mean and sum are the fused schedule; none is a forward pass, then a backward pass.
    pub reduction: ReductionConfig,
    /// Threads that ran; none where XLA chose.
    pub threads: Option<usize>,
    /// Instruction set of the kernel and of the copy; none where XLA chose.
    pub isa: Option<&'static str>,
    /// The PJRT plug-in: file, version, platform.
    pub plugin: Option<String>,
    /// Timed steps.
    pub iters: usize,
    /// Untimed steps after the first.
    pub warmup: usize,
    /// The first call: compiling, and a run that allocates what it needs.
    pub first_call_s: f64,
    /// Compiling alone; none where nothing is compiled.
    pub compile_s: Option<f64>,
    /// The first run alone.
    pub first_run_s: f64,
    /// Mean over the timed steps.
    pub avg_step_ms: f64,
    /// Median.
    pub median_step_ms: f64,
    /// Quickest.
    pub min_step_ms: f64,
    /// Standard deviation of a step.
    pub std_step_ms: f64,
    /// Reading as many bytes as logits have and writing them elsewhere: the median of copies made
    /// before and after the timed steps, in the quickest way.
    pub copy_ms: f64,
    /// `median_step_ms / copy_ms`.
    pub ratio_to_copy: f64,
    /// Bytes of logits and of their gradient over `median_step_ms`, in 1e9 a second.
    pub gb_per_s: f64,
    /// The same bytes over `copy_ms`.
    pub copy_gb_per_s: f64,
    /// The scalar loss: reduced, or where nothing reduces it the sum over tokens of cotangent x loss.
    pub loss: f64,
    /// When the inputs were made and nothing had run.
    pub mem_after_alloc: AfterAlloc,
    /// When everything had run.
    pub mem_after_run: AfterRun,
    /// What running added to the inputs at its peak: gradient, temporaries, threads.
    pub mem_peak_over_alloc_bytes: Option<u64>,
    /// What the compiler says that the program takes; none where nothing is compiled.
    pub compiled: Option<CompiledMemory>,
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
}

/// Memory once inputs are made; none where the system does not tell.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct AfterAlloc {
    /// Held by the process.
    pub resident_bytes: Option<u64>,
    /// In use on the device.
    pub bytes_in_use: Option<u64>,
}

/// Memory after the run; none where the system does not tell.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct AfterRun {
    /// Held by the process.
    pub resident_bytes: Option<u64>,
    /// The most that the process ever held.
    pub peak_resident_bytes: Option<u64>,
    /// On the device.
    #[serde(flatten)]
    pub device: DeviceMemory,
}

/// Measures what `config` describes.
///
/// # Errors
/// A value that cannot be measured; the step itself fails.
pub fn run(config: &Config) -> Result<Report> {
    config.validate()?;
    let machine = Machine::current();
    let mut subject = prepare(config)?;
    let mem_after_alloc = AfterAlloc {
        resident_bytes: memory::resident_bytes(),
        bytes_in_use: subject.device_memory().bytes_in_use,
    };

    let (compile_s, compiled) = timed(|| subject.compile());
    compiled?;
    let (first_run_s, done) = timed(|| subject.step());
    done?;
    let loss = subject.loss()?;
    for _ in 0..config.warmup {
        subject.step()?;
    }
    // Half of the copies before the steps and half after, so that a processor that slows down or
    // speeds up does so for both.
    let half = config.iters.clamp(3, 10);
    let mut copies: Vec<_> = (0..half).map(|_| subject.time_copies()).collect();
    let mut steps = Vec::with_capacity(config.iters);
    for _ in 0..config.iters {
        let (seconds, done) = timed(|| subject.step());
        done?;
        steps.push(seconds);
    }
    copies.extend((0..half).map(|_| subject.time_copies()));

    let mem_after_run = AfterRun {
        resident_bytes: memory::resident_bytes(),
        peak_resident_bytes: memory::peak_resident_bytes(),
        device: subject.device_memory(),
    };
    let compiled = subject.compiled_memory();
    let steps = Statistics::new(steps);
    let ways = 0..copies[0].len();
    let medians = ways.map(|way| Statistics::new(copies.iter().map(|copy| copy[way])).median);
    let copy_s = medians.fold(f64::INFINITY, f64::min);
    let bytes = (2 * config.shape()?.elements() * config.dtype.size_bytes()) as f64;
    let Setup { tile, threads, isa, plugin } = subject.setup();
    Ok(Report {
        op: config.op,
        backend: config.backend,
        implementation: config.implementation,
        time: config.time,
        vocab: config.vocab,
        dtype: config.dtype.name(),
        time_block: tile.map(Tile::time_block),
        block_size: tile.map(Tile::block_size),
        reduction: config.options.reduction,
        threads,
        isa,
        plugin,
        iters: config.iters,
        warmup: config.warmup,
        first_call_s: compile_s + first_run_s,
        compile_s: compiled.is_some().then_some(compile_s),
        first_run_s,
        avg_step_ms: steps.mean * 1e3,
        median_step_ms: steps.median * 1e3,
        min_step_ms: steps.min * 1e3,
        std_step_ms: steps.deviation * 1e3,
        copy_ms: copy_s * 1e3,
        ratio_to_copy: steps.median / copy_s,
        gb_per_s: bytes / steps.median / 1e9,
        copy_gb_per_s: bytes / copy_s / 1e9,
        loss,
        mem_after_alloc,
        mem_after_run,
        mem_peak_over_alloc_bytes: mem_after_run
            .peak_resident_bytes
            .zip(mem_after_alloc.resident_bytes)
            .map(|(peak, inputs)| peak.saturating_sub(inputs)),
        compiled,
        machine,
        config: config.clone(),
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
        let mut line = |name: &str, value: String| writeln!(f, "{name:<16}{value}");
        line("operation", what)?;
        line("implementation", program.to_owned())?;
        line("logits", format!("[{}, {}] {}", self.time, self.vocab, self.dtype))?;
        if let Some((time_block, block_size)) = self.time_block.zip(self.block_size) {
            line("tile", format!("time_block {time_block}, block_size {block_size}"))?;
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
        line("runs on", runs_on.join(", "))?;
        line("machine", self.machine.processor.clone())?;
        line("build", format!("xentile {} at {}", self.machine.xentile, self.machine.commit))?;
        line("loss", format!("{:.6}", self.loss))?;
        let compiling = self
            .compile_s
            .map_or(String::new(), |seconds| format!(", {seconds:.3} s of it compiling"));
        line("first call", format!("{:.3} s{compiling}", self.first_call_s))?;
        line(
            "step",
            format!(
                "median {:.3} ms, mean {:.3}, min {:.3}, std {:.3} over {}",
                self.median_step_ms,
                self.avg_step_ms,
                self.min_step_ms,
                self.std_step_ms,
                self.iters
            ),
        )?;
        line(
            "copy",
            format!("{:.3} ms; a step is {:.2} copies", self.copy_ms, self.ratio_to_copy),
        )?;
        line(
            "throughput",
            format!("{:.2} GB/s; the copy {:.2} GB/s", self.gb_per_s, self.copy_gb_per_s),
        )?;
        line(
            "memory",
            format!(
                "{} with inputs made, peak {}, {} more",
                bytes(self.mem_after_alloc.resident_bytes),
                bytes(self.mem_after_run.peak_resident_bytes),
                bytes(self.mem_peak_over_alloc_bytes)
            ),
        )?;
        if let Some(compiled) = &self.compiled {
            line(
                "compiled",
                format!(
                    "arguments {}, results {}, temporaries {}",
                    bytes(compiled.argument_bytes),
                    bytes(compiled.output_bytes),
                    bytes(compiled.temporary_bytes)
                ),
            )?;
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

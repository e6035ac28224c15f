//! What one measurement found, as JSON and for people.

use std::collections::BTreeMap;
use std::fmt;

use pjrt_client::CompiledMemoryStats;
use serde::Serialize;
use serde_json::{Map, Value};
use xentile::operation::Problem;
use xentile::operations;

use super::config::Config;
use crate::config::{Backend, Implementation, Op, TileConfig, name};
use crate::estimate::{Estimate, KernelEstimate};
use crate::machine::Machine;
use crate::memory;
use crate::schedule::Schedule;
use crate::setup::ExportedBy;

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
    /// Extents of all dims that the operation's family has; null for those that it has not itself.
    #[serde(flatten)]
    pub extents: Map<String, Value>,
    /// Of arrays that have no other.
    pub dtype: &'static str,
    /// What the inputs are drawn from, with what it has beside its name.
    pub distribution: String,
    /// Tokens a tile; none where the program has no tiles, or where its kernel chose.
    pub time_block: Option<usize>,
    /// Columns a tile; none where the program has no tiles, or where its kernel chose.
    pub block_size: Option<usize>,
    /// Mean and sum are the fused schedule; none is a forward pass, then a backward pass. Null where
    /// nothing is reduced.
    pub reduction: Option<&'static str>,
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
    /// Reading half of the bytes that must move and writing them elsewhere: the median of copies made
    /// before and after the timed steps, in the quickest way. None, as are the next three, where a step
    /// is held to products.
    pub copy_ms: Option<f64>,
    /// `median_step_ms / copy_ms`.
    pub ratio_to_copy: Option<f64>,
    /// Bytes that must move over `median_step_ms`, in 1e9 a second.
    pub gb_per_s: Option<f64>,
    /// The same bytes over `copy_ms`.
    pub copy_gb_per_s: Option<f64>,
    /// Operations of products, the fewest there can be, over `median_step_ms`, in 1e9 a second; none
    /// where there are no products.
    pub gflop_per_s: Option<f64>,
    /// The scalar loss, or where nothing is reduced the sum of the first output x its cotangent.
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
    /// Why there is a schedule and no estimate.
    pub no_estimate: Option<String>,
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

/// The table for people.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = format!("{} on {}", self.op, name(&self.backend));
        let program = match self.implementation {
            Implementation::Kernel if self.op.facts().tile.is_empty() => "kernel",
            Implementation::Kernel => "tiled kernel",
            Implementation::Reference if self.plugin.is_some() => "dense program",
            Implementation::Reference => "dense program (plain f32 code, probabilities in memory)",
        };
        let (schedule, how) = match self.reduction {
            Some("none") => ("reduction", "none, forward then backward".to_owned()),
            Some(reduction) => ("reduction", format!("{reduction}, fused")),
            None if !self.op.has_derivative() => ("schedule", "forward".to_owned()),
            None => ("schedule", "forward then backward".to_owned()),
        };
        let bytes = |bytes: Option<u64>| bytes.map_or("not reported".to_owned(), memory::human);
        let mut line = |name: &str, value: String| writeln!(f, "{name:<15} {value}");
        line("operation", what)?;
        line("implementation", program.to_owned())?;
        if let Ok(problem) = self.config.problem() {
            let (what, line_of) = self.op.headline(&problem);
            line(what, line_of)?;
        }
        line("distribution", self.distribution.clone())?;
        if self.implementation == Implementation::Kernel && !self.op.facts().tile.is_empty() {
            let tile = TileConfig { time_block: self.time_block, block_size: self.block_size };
            line("tile", tile.to_string())?;
        }
        line(schedule, how)?;
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
        if let Some(reason) = &self.no_estimate {
            line("estimate", format!("none: {reason}"))?;
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
    /// The extents of all dims that the operation's family has, by key.
    pub(super) fn extents(op: Op, problem: &Problem) -> Map<String, Value> {
        let mut extents = Map::new();
        let family = operations().iter().filter(|of| of.family() == op.family());
        for dim in family.flat_map(|operation| operation.dims()) {
            let extent = op.dim(dim.key).map(|dim| problem.dim(dim.letter));
            extents.insert(dim.key.into(), extent.into());
        }
        extents
    }

    /// Results of a run.
    fn fmt_run(&self, line: &mut impl FnMut(&str, String) -> fmt::Result) -> fmt::Result {
        let bytes = |bytes: Option<u64>| bytes.map_or("not reported".to_owned(), memory::human);
        let figure = |figure: Option<f64>, digits: usize| {
            figure.map_or("not reported".to_owned(), |figure| format!("{figure:.digits$}"))
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
            line("throughput", format!("{figure} GFLOP/s of the products that it takes"))?;
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

//! Times everything that an operation gives, as a training step asks for it: one implementation, one
//! shape, one process.
//!
//! An operation on a backend is a `Benchmark`. With a topology the program is only compiled, and what a
//! run would tell is none.

#[cfg(feature = "sweep")]
pub(crate) mod apart;
mod benchmark;
mod config;
mod cpu;
mod report;
mod xla;

use anyhow::Result;

pub use config::{Config, Logits};
pub use report::{AfterAlloc, AfterRun, CompiledMemory, DeviceMemory, Report};

use crate::config::Backend;
use crate::machine::Machine;
use crate::memory;
use crate::progress::Progress;
use crate::setup::Setup;
use crate::timing::timed;
use benchmark::{Benchmark, Found, Run, Statistics};

fn prepare(config: &Config) -> Result<Box<dyn Benchmark>> {
    match config.backend {
        Backend::Cpu => cpu::benchmark(config),
        Backend::XlaCpu | Backend::XlaCuda | Backend::XlaTpu => xla::benchmark(config),
    }
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
    let (estimate, no_estimate) = match estimate {
        Some(Ok(estimate)) => (Some(estimate), None),
        Some(Err(reason)) => (None, Some(format!("{reason:#}"))),
        None => (None, None),
    };
    let Setup { tile, threads, isa, plugin, exported } = setup;
    let run = run.as_ref();
    let milliseconds = |seconds: fn(&Run) -> f64| run.map(|run| seconds(run) * 1e3);
    let problem = config.problem()?;
    let cost = config.op.cost(&problem);
    let bytes = (cost.bytes_read + cost.bytes_written) as f64;
    let flop = (cost.flops > 0).then_some(cost.flops as f64);
    // What products are made of is read as often as their tiles ask for.
    let moves = run.filter(|_| flop.is_none());
    let mem_after_alloc = run.map(|run| run.mem_after_alloc).unwrap_or_default();
    let mem_after_run = run.map(|run| run.mem_after_run).unwrap_or_default();
    Ok(Report {
        op: config.op,
        backend: config.backend,
        implementation: config.implementation,
        extents: Report::extents(config.op, &problem),
        dtype: config.dtype.name(),
        distribution: config.distribution(),
        time_block: tile.and_then(|tile| tile.time_block),
        block_size: tile.and_then(|tile| tile.block_size),
        reduction: config.op.option("reduction").map(|_| problem.word("reduction")),
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
        gb_per_s: moves.map(|run| bytes / run.steps.median / 1e9),
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
        no_estimate,
        machine,
        config: config.clone(),
    })
}

fn measure(config: &Config) -> Result<Found> {
    let mut benchmark = prepare(config)?;
    let mem_after_alloc = AfterAlloc {
        resident_bytes: memory::resident_bytes(),
        bytes_in_use: benchmark.device_memory().bytes_in_use,
    };

    let progress = Progress::new("compiling", 0);
    let (compile_s, compiled) = timed(|| benchmark.compile());
    compiled?;
    drop(progress);
    // It draws between steps that are timed, and never in one.
    let progress = Progress::new("timing steps", config.warmup + config.iters);
    let (first_run_s, done) = timed(|| benchmark.steps(1));
    done?;
    let loss = benchmark.loss()?;
    benchmark.steps(config.warmup)?;
    progress.done(config.warmup);
    // Half of the copies before the steps and half after, so that a processor that slows down or
    // speeds up does so for both.
    let half = config.iters.clamp(3, 10);
    let count = config.steps_in_flight();
    let mut copies: Vec<_> = (0..half).map(|_| benchmark.time_copies(count)).collect();
    let mut steps = Vec::with_capacity(config.iters);
    while steps.len() < config.iters {
        let count = count.min(config.iters - steps.len());
        let (seconds, done) = timed(|| benchmark.steps(count));
        done?;
        steps.resize(steps.len() + count, seconds / count as f64);
        progress.done(count);
    }
    copies.extend((0..half).map(|_| benchmark.time_copies(count)));

    let mem_after_run = AfterRun {
        resident_bytes: memory::resident_bytes(),
        peak_resident_bytes: memory::peak_resident_bytes(),
        device: benchmark.device_memory(),
    };
    let compiled = benchmark.compiled_memory();
    let ways = 0..copies[0].len();
    let medians = ways.map(|way| Statistics::new(copies.iter().map(|copy| copy[way])).median);
    let copy_s = medians.reduce(f64::min).map(|seconds| seconds * copies_of_first_input(config));
    let steps = Statistics::new(steps);
    Ok(Found {
        setup: benchmark.setup(),
        compile_s: compiled.is_some().then_some(compile_s),
        from_cache: benchmark.is_cached(),
        compiled,
        schedule: None,
        estimate: None,
        run: Some(Run { first_run_s, loss, steps, copy_s, mem_after_alloc, mem_after_run }),
    })
}

/// How often the first input is copied, where half of what must be read and written is.
fn copies_of_first_input(config: &Config) -> f64 {
    let Ok(problem) = config.problem() else { return 1.0 };
    let cost = config.op.cost(&problem);
    let signature = config.op.signature(&problem, config.op.whole(&problem));
    let input = signature.operands.first().and_then(|spec| spec.bytes(&problem)).unwrap_or(1);
    (cost.bytes_read + cost.bytes_written) as f64 / (2 * input) as f64
}

//! Backend `cpu`: kernels called directly.

use anyhow::{Context, Result};
use bytemuck::{Pod, pod_align_to, pod_align_to_mut};
use xentile::operation::{Array, ArrayElement, Arrays, Pass, Problem};
use xentile_cpu::operation::{Launch, Run, for_each};
use xentile_cpu::{Isa, Threads, copy, kernels};

use super::benchmark::{Benchmark, first_output};
use super::config::{Config, Logits};
use crate::config::{Implementation, TileConfig};
use crate::setup::Setup;
use crate::timing::timed;

/// The operation with the inputs that `config` describes.
pub(super) fn benchmark(config: &Config) -> Result<Box<dyn Benchmark>> {
    Ok(Box::new(OnCpu::new(config)?))
}

struct OnCpu {
    problem: &'static Problem,
    pass: Pass,
    run: Box<dyn Run>,
    inputs: &'static Arrays<'static>,
    given: Arrays<'static>,
    /// Empty until the first step, which makes their memory its own.
    results: Arrays<'static>,
    /// For a copy of the first input, where there is no gradient; empty until the first copy.
    room: Arrays<'static>,
    config: Config,
    /// The first output, and the cotangent of it.
    output: (&'static str, &'static str),
    is_memory_bound: bool,
    isa: Isa,
    pool: &'static Threads,
    tile: Option<TileConfig>,
}

/// What lasts as long as the process, as a measurement does.
fn kept<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

impl OnCpu {
    fn new(config: &Config) -> Result<Self> {
        let op = config.op;
        let problem = kept(config.problem()?);
        let kernels = kernels(op.name()).context("there are kernels, which was checked")?;
        let tile = kernels.tile(problem)?.map(TileConfig::from);
        let isa = config.isa()?;
        let pool = Threads::new(config.threads)
            .with_context(|| format!("cannot start {} threads; lower threads", config.threads))?;
        let pool = kept(pool);
        let rows: Vec<u64> = (0..problem.dim("T") as u64).collect();
        let inputs = kept(match config.logits {
            Logits::Random => op.inputs(problem, &config.input, &rows).context("input")?,
            Logits::Zeros => op.zeros(problem, &config.input, &rows)?,
        });
        let pass = op.whole(problem);
        let given = op.measured(problem, pass, &config.input, &rows);
        let run = match config.implementation {
            Implementation::Kernel => kernels.open(problem, inputs, Launch { isa, pool })?,
            Implementation::Reference => {
                kernels.dense(problem, inputs, pool).with_context(|| {
                    format!("impl is reference; op {op} has no dense program on backend cpu")
                })?
            }
        };
        Ok(Self {
            problem,
            pass,
            run,
            inputs,
            given,
            results: Arrays::default(),
            room: Arrays::default(),
            output: first_output(config, problem, pass),
            is_memory_bound: op.cost(problem).flops == 0,
            config: config.clone(),
            isa,
            pool,
            tile: tile.filter(|_| config.implementation == Implementation::Kernel),
        })
    }

    /// Makes room for results.
    fn allocate(&mut self) {
        for spec in self.config.op.signature(self.problem, self.pass).results {
            self.results.insert(spec.name, spec.room(self.problem, 0.0));
        }
    }

    /// Seconds of each way to copy `from`: streaming past the caches, and the C library's copy in one
    /// piece a thread.
    fn copies<E: ArrayElement + Pod + Send + Sync>(&self, from: &[E], to: &mut [E]) -> Vec<f64> {
        let piece = from.len().div_ceil(self.pool.count()).max(1);
        let (plain, ()) = timed(|| {
            let pieces = to.chunks_mut(piece).zip(from.chunks(piece));
            for_each(self.pool, pieces, |_, (to, from)| to.copy_from_slice(from));
        });
        // Less the few bytes at an end that may not fill an f32.
        let (_, from, _) = pod_align_to(from);
        let (_, to, _) = pod_align_to_mut(to);
        let length = from.len().min(to.len());
        let (from, to) = (&from[..length], &mut to[..length]);
        let (streaming, ()) = timed(|| copy::copy(self.pool, self.isa, from, to));
        vec![plain, streaming]
    }
}

impl Benchmark for OnCpu {
    fn start(&mut self) -> Result<()> {
        if self.results.iter().next().is_none() {
            self.allocate();
        }
        Ok(self.run.run(self.pass, &self.given, &mut self.results)?)
    }

    fn wait(&mut self) -> Result<()> {
        Ok(())
    }

    fn loss(&self) -> Result<f64> {
        let (output, cotangent) = self.output;
        let output = self.results.get(output).context("a step gives its first output")?;
        let of = |index| self.given.get(cotangent).map_or(1.0, |cotangent| cotangent.at(index));
        Ok((0..output.len()).map(|index| of(index) * output.at(index)).sum())
    }

    /// The first input goes where its gradient was, if it has any, so that copy and kernel work on the very
    /// same pages and the peak of memory is the kernel's.
    fn time_copies(&mut self, _: usize) -> Vec<f64> {
        if !self.is_memory_bound {
            return Vec::new();
        }
        let signature = self.config.op.signature(self.problem, self.pass);
        let Some(first) = signature.operands.first() else { return Vec::new() };
        let [mut results, mut room] = [&mut self.results, &mut self.room].map(std::mem::take);
        let to = match signature.results.get(signature.gradients()) {
            Some(gradient) => results.get_mut(gradient.name),
            None => {
                if room.get(first.name).is_none() {
                    room.insert(first.name, first.room(self.problem, 0.0));
                }
                room.get_mut(first.name)
            }
        };
        let copied = match (self.inputs.get(first.name), to) {
            (Some(Array::F32(from)), Some(Array::F32(to))) => self.copies(from, to.to_mut()),
            (Some(Array::Bf16(from)), Some(Array::Bf16(to))) => self.copies(from, to.to_mut()),
            (Some(Array::F16(from)), Some(Array::F16(to))) => self.copies(from, to.to_mut()),
            _ => Vec::new(),
        };
        self.room = room;
        self.results = results;
        copied
    }

    fn setup(&self) -> Setup {
        Setup {
            tile: self.tile,
            threads: Some(self.pool.count()),
            isa: Some(self.isa.name()),
            plugin: None,
            exported: None,
        }
    }
}

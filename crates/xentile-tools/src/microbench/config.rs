//! What microbench is asked for.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_yaml::Mapping;
use xentile::DType;
use xentile::operation::{self, DimSpec, Problem, Synthetic};
use xentile_cpu::Isa;
use xentile_programs::Exported;

use crate::config::{
    self, Backend, Implementation, Op, Schema, Scope, Settings, Taken, TileConfig, name,
};
use crate::{exported, memory};

/// What the first input holds.
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
    /// The operation.
    pub op: Op,
    /// The backend.
    pub backend: Backend,
    /// The implementation.
    #[serde(rename = "impl")]
    pub implementation: Implementation,
    /// Extents of dims, and options of the operation that are keys of their own.
    #[serde(flatten, skip_deserializing)]
    pub top: Settings,
    /// The dtype of arrays without a dtype of their own.
    #[serde(
        deserialize_with = "crate::config::dtype",
        serialize_with = "crate::config::dtype_name"
    )]
    pub dtype: DType,
    /// The tile; tuned by default.
    pub tile: TileConfig,
    /// Timed steps.
    pub iters: usize,
    /// Steps between the first call and the timed ones.
    pub warmup: usize,
    /// Steps that are started before the last of them is waited for; a step's time is its share. By
    /// default 1 on CPUs, and 10 on devices that queue work, as in a training loop.
    pub in_flight: Option<usize>,
    /// Threads; 0 is one per core.
    pub threads: usize,
    /// The instruction set; this processor's best by default.
    pub isa: Option<String>,
    /// The PJRT plug-in's file, for `xla:` backends; searched for by default.
    pub plugin: Option<PathBuf>,
    /// TPUs to compile for, such as `v6e:2x2`; none need be present, and nothing runs.
    pub topology: Option<String>,
    /// The manifest of a program that JAX exported, to run as the kernel. `{time_block}` and
    /// `{block_size}` in its name stand for the tile.
    pub program: Option<PathBuf>,
    /// The folder of compiled programs, for `xla:` backends; only these tools may write there.
    /// Default: `XENTILE_CACHE`, if set.
    pub cache: Option<PathBuf>,
    /// The operation's options.
    #[serde(skip_deserializing)]
    pub options: Settings,
    /// The values of the first input.
    pub logits: Logits,
    /// The distribution and seed of inputs, weights and cotangents.
    pub input: Synthetic,
    /// Several of `input`, each measured in its own process.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<Synthetic>,
    /// Several shapes, extents by their keys, each measured with every input.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shapes: Vec<BTreeMap<String, usize>>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            op: Op::default(),
            backend: Backend::default(),
            implementation: Implementation::default(),
            top: Settings::of(Scope::Measured),
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
            options: Settings::of(Scope::Options),
            logits: Logits::default(),
            input: Synthetic::default(),
            inputs: Vec::new(),
            shapes: Vec::new(),
        }
    }
}

/// More threads than any machine has cores; past this the system may die before it refuses.
const MAX_THREADS: usize = 4096;

impl Schema for Config {
    fn take(tree: &mut Mapping) -> Result<Taken> {
        Taken::out_of(tree, Scope::Measured, "")
    }

    fn put(&mut self, taken: Taken) {
        (self.top, self.options) = (taken.top, taken.options);
        self.set_op(self.op);
    }
}

impl Config {
    /// With another operation.
    pub fn set_op(&mut self, op: Op) {
        self.op = op;
        self.top.set_op(op);
        self.options.set_op(op);
    }

    /// Whether it is of several measurements.
    #[must_use]
    pub fn is_list(&self) -> bool {
        !self.inputs.is_empty() || !self.shapes.is_empty()
    }

    /// Each measurement of a list: every shape with every input.
    ///
    /// # Errors
    /// A shape has what is no extent of the operation; a measurement that cannot be.
    pub fn each(&self) -> Result<Vec<Self>> {
        let one = Self { inputs: Vec::new(), shapes: Vec::new(), ..self.clone() };
        let mut all = Vec::new();
        for index in 0..self.shapes.len().max(1) {
            let mut shaped = one.clone();
            for (key, &extent) in self.shapes.get(index).into_iter().flatten() {
                let Some(dim) = self.op.dim(key) else {
                    let known: Vec<_> = self.op.dims().iter().map(|dim| dim.key).collect();
                    bail!(
                        "unknown key `shapes[{index}].{key}`; the extents of op {} are {}",
                        self.op,
                        known.join(", ")
                    );
                };
                shaped.top.set(dim.key, operation::Value::Integer(i64::try_from(extent)?));
            }
            let inputs =
                if self.inputs.is_empty() { &[self.input.clone()][..] } else { &self.inputs };
            all.extend(inputs.iter().map(|input| Self { input: input.clone(), ..shaped.clone() }));
        }
        for (index, one) in all.iter().enumerate() {
            one.validate().with_context(|| format!("measurement {}", index + 1))?;
        }
        Ok(all)
    }

    /// What the inputs are drawn from.
    #[must_use]
    pub fn distribution(&self) -> String {
        match self.logits {
            Logits::Random => self.input.to_string(),
            Logits::Zeros => name(&self.logits),
        }
    }

    /// Checks everything but the tile, and that the measurement fits in memory.
    ///
    /// # Errors
    /// The first value that cannot be measured.
    pub fn validate(&self) -> Result<()> {
        ensure!(
            !self.is_list(),
            "inputs or shapes is a list; one measurement has one of each: set input, and extents by \
             their keys"
        );
        for dim in self.op.dims() {
            let is_empty = self.top.extent(dim) == Some(0);
            ensure!(!is_empty, "{} is 0; it must be at least 1", dim.key);
        }
        ensure!(self.iters > 0, "iters is 0; it must be at least 1");
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
        self.isa()?;
        let (plugin, isa) = (self.plugin.as_deref(), self.isa.as_deref());
        self.backend.check_choices(plugin, self.cache.as_deref(), isa, self.threads)?;
        config::check_program(self.program.as_deref(), self.backend, self.implementation)?;
        let problem = self.problem()?;
        self.backend.check_kernels(self.op)?;
        ensure!(
            self.logits == Logits::Random || self.op.facts().has_zeros,
            "logits is {}; op {} makes random ones",
            name(&self.logits),
            self.op
        );
        if let Some(topology) = &self.topology {
            // Nothing is put in memory.
            ensure!(
                self.backend == Backend::XlaTpu,
                "topology is {topology}; only backend xla:tpu compiles for one, and backend is {}",
                name(&self.backend)
            );
            return Ok(());
        }
        let keys: Vec<_> = self.op.dims().iter().map(|dim| dim.key.to_owned()).collect();
        memory::require(self.needed_bytes(&problem), &config::remedy(&keys))
    }

    /// Bytes of what is larger than a number a token, and of what a program that is not tiled holds.
    fn needed_bytes(&self, problem: &Problem) -> Option<u64> {
        let signature = self.op.signature(problem, self.op.whole(problem));
        let matrices = signature.operands.iter().chain(&signature.results);
        let matrices = matrices.filter(|spec| spec.dims.len() > 1);
        let dense = match self.implementation {
            Implementation::Kernel => 0,
            Implementation::Reference => self.op.dense_bytes(problem)?,
        };
        let mut all = matrices.map(|spec| spec.bytes(problem));
        all.try_fold(dense, |sum, bytes| sum.checked_add(bytes?))
    }

    /// What is asked of the operation.
    ///
    /// # Errors
    /// A key that the operation does not have, an extent that it needs, or a value out of range.
    pub(crate) fn problem(&self) -> Result<Problem> {
        let extent = |dim: &DimSpec| self.top.extent(dim);
        let settings = [&self.top, &self.options];
        let problem = config::problem(self.op, extent, self.dtype, self.tile, settings, 1.0)?;
        self.op.validate(&problem)?;
        Ok(problem)
    }

    /// The manifest of the program, with the tile in its name; none where there is no program.
    ///
    /// # Errors
    /// The name has a place for an extent of the tile that is left open.
    pub fn manifest(&self) -> Result<Option<PathBuf>> {
        let manifest = |program: &PathBuf| config::manifest(program, self.tile);
        self.program.as_ref().map(manifest).transpose()
    }

    /// What a config with a program leaves out, as the program has it.
    ///
    /// # Errors
    /// The program's arguments are not those of its operation.
    pub fn base(exported: &Exported) -> Result<serde_yaml::Value> {
        Ok(serde_yaml::to_value(exported::base(exported)?)?)
    }

    /// Whether the backend completes a step before it takes another.
    fn in_order(&self) -> bool {
        matches!(self.backend, Backend::Cpu | Backend::XlaCpu)
    }

    /// Steps under way at a time.
    pub(super) fn steps_in_flight(&self) -> usize {
        const ON_DEVICES: usize = 10;
        let usual = if self.in_order() { 1 } else { ON_DEVICES.min(self.iters) };
        self.in_flight.unwrap_or(usual)
    }

    pub(super) fn isa(&self) -> Result<Isa> {
        self.isa.as_deref().map_or_else(|| Ok(Isa::detect()), |name| Ok(name.parse()?))
    }
}

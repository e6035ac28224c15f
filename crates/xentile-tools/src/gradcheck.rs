//! Holds a kernel, or the dense program, against the float64 reference and says whether it may be trusted.
//!
//! Where passes can be run one by one, both schedules are run: the one that the operation asks for, whose
//! metrics have plain names, and beside a scalar and its gradient the recomputing pair with random
//! cotangents of every output, whose metrics start with `recompute/`. A program from JAX has one of the
//! schedules, and metrics of what it does not give are left out.

mod judge;
mod report;
mod runner;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_yaml::Mapping;
use xentile::DType;
use xentile::operation::{
    ArraySpec, Arrays, DimSpec, Pass, Problem, Reference, Stored, Synthetic, TOKENS,
};
use xentile_programs::Exported;

use crate::config::{
    self, Backend, Implementation, Op, Schema, Scope, Settings, Shape, Taken, TileConfig,
};
use crate::input::file::Mapped;
use crate::input::rows;
use crate::machine::Machine;
use crate::timing::timed;
use crate::{exported, memory};
use judge::{Judge, poisoned};
pub use report::{Index, Metric, Report};
use runner::Runner;

/// What gradcheck is asked to do.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The operation.
    pub op: Op,
    /// The backend.
    pub backend: Backend,
    /// By which program; the kernel where absent.
    #[serde(rename = "impl", default)]
    pub implementation: Implementation,
    /// Sequences, tokens of each, and extents beside; may be absent where a file tells.
    pub shape: Option<Shape>,
    /// Other extents, and options of the operation that are keys of their own.
    #[serde(flatten, skip_deserializing)]
    pub top: Settings,
    /// The dtype of arrays that have no other.
    #[serde(deserialize_with = "config::dtype", serialize_with = "config::dtype_name")]
    pub dtype: DType,
    /// The tile; the tuned one where absent.
    #[serde(default)]
    pub tile: TileConfig,
    /// Threads; 0 is one a core.
    #[serde(default)]
    pub threads: usize,
    /// The instruction set; the best where absent.
    #[serde(default)]
    pub isa: Option<String>,
    /// The PJRT plug-in's file, for `xla:` backends; looked for where absent.
    #[serde(default)]
    pub plugin: Option<PathBuf>,
    /// The manifest of a program that JAX exported, as the kernel. `{time_block}` and `{block_size}`
    /// in its name stand for the tile.
    #[serde(default)]
    pub program: Option<PathBuf>,
    /// Where compiled programs are kept, for `xla:` backends; only these tools may write there.
    #[serde(default)]
    pub cache: Option<PathBuf>,
    /// The operation's options.
    #[serde(skip_deserializing)]
    pub options: Settings,
    /// The cotangent of the scalar.
    #[serde(default = "one")]
    pub cotangent: f64,
    /// What the kernel is run on.
    #[serde(default, with = "serde_yaml::with::singleton_map")]
    pub input: Input,
    /// What is still right; by the operation's defaults where absent.
    #[serde(skip_deserializing)]
    pub tolerances: Settings,
}

fn one() -> f64 {
    1.0
}

impl Schema for Config {
    fn take(tree: &mut Mapping) -> Result<Taken> {
        Taken::out_of(tree, Scope::Checked, "")
    }

    fn put(&mut self, taken: Taken) {
        let Taken { top, options, tolerances, .. } = taken;
        (self.top, self.options, self.tolerances) = (top, options, tolerances);
        for settings in [&mut self.top, &mut self.options, &mut self.tolerances] {
            settings.of_op(self.op);
        }
    }
}

/// What the kernel is run on.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Input {
    /// Made up from a seed.
    Synthetic(Synthetic),
    /// A `.safetensors` file; a path is relative to the current directory.
    File(PathBuf),
}

impl Default for Input {
    fn default() -> Self {
        Self::Synthetic(Synthetic::default())
    }
}

impl Config {
    /// The extents of `sequences`, with those that `of` has.
    fn problem(
        &self,
        [batch, seq_len]: [usize; 2],
        of: impl Fn(&DimSpec) -> Option<usize>,
    ) -> Result<Problem> {
        let used = seq_len.saturating_sub(usize::from(self.op.predicts_next()));
        // What is too much is said where memory is asked for.
        let tokens = batch.saturating_mul(used);
        let extent = |dim: &DimSpec| match dim.letter == TOKENS.letter {
            true => Some(tokens),
            false => of(dim),
        };
        let settings = [&self.top, &self.options];
        let problem =
            config::problem(self.op, extent, self.dtype, self.tile, settings, self.cotangent)?;
        self.op.validate(&problem)?;
        Ok(problem)
    }

    /// The shape of made-up input.
    fn synthetic_shape(&self) -> Result<&Shape> {
        let dims = || self.op.dims().iter().filter(|dim| dim.in_shape).map(|dim| dim.key);
        let Some(shape) = &self.shape else {
            let keys = ["batch", "seq_len"].into_iter().chain(dims());
            let keys: Vec<_> = keys.map(|key| format!("{key}: ..")).collect();
            bail!("synthetic input needs shape: {{{}}}", keys.join(", "));
        };
        if let Some(key) = shape.dims.keys().find(|key| dims().all(|dim| dim != **key)) {
            bail!("shape.{key} is set; op {} has no such extent", self.op);
        }
        self.check_shape(shape)?;
        Ok(shape)
    }

    /// The shape `found` in a file, held against what the config says.
    fn agree(&self, found: Shape) -> Result<Shape> {
        if let Some(expected) = &self.shape {
            ensure!(
                *expected == found,
                "it holds {found} and the config asks for {expected}; drop `shape` or mend it"
            );
        }
        self.check_shape(&found)?;
        Ok(found)
    }

    fn check_shape(&self, shape: &Shape) -> Result<()> {
        let Shape { batch, seq_len, dims } = shape;
        ensure!(*batch >= 1, "shape.batch is 0; it must be at least 1");
        let (least, why) =
            if self.op.predicts_next() { (2, ", a token and its next") } else { (1, "") };
        ensure!(*seq_len >= least, "shape.seq_len is {seq_len}; it must be at least {least}{why}");
        for (key, extent) in dims {
            ensure!(*extent >= 1, "shape.{key} is 0; it must be at least 1");
        }
        Ok(())
    }

    /// What to lower where memory is short.
    fn remedy(&self) -> String {
        let beside = self.op.dims().iter().filter(|dim| dim.letter != TOKENS.letter);
        let beside = beside.map(|dim| match dim.in_shape {
            true => format!("shape.{}", dim.key),
            false => dim.key.to_owned(),
        });
        let keys = ["shape.batch".to_owned(), "shape.seq_len".to_owned()].into_iter();
        config::remedy(&keys.chain(beside).collect::<Vec<_>>())
    }

    /// Bytes for what is compared, on the host and where the device's memory is the host's there too,
    /// and for the reference; without inputs where a file has them.
    fn needed_bytes(&self, problem: &Problem, inputs: bool) -> Option<u64> {
        let signature = self.op.signature(problem, self.op.whole(problem));
        let sum = |specs: &[ArraySpec]| {
            specs.iter().try_fold(0_u64, |sum, spec| sum.checked_add(spec.bytes(problem)?))
        };
        let (operands, results) = (sum(&signature.operands)?, sum(&signature.results)?);
        let on_device =
            if self.backend == Backend::XlaCpu { operands.checked_add(results)? } else { 0 };
        let dense = match self.implementation {
            Implementation::Reference => self.op.dense_bytes(problem)?,
            Implementation::Kernel => 0,
        };
        let reference = self.op.reference_bytes(problem, rayon::current_num_threads())?;
        let inputs = if inputs { operands } else { 0 };
        [inputs, results, on_device, dense].iter().try_fold(reference, |sum, n| sum.checked_add(*n))
    }
}

/// Reads the config at `path` and applies `sets`. `program`, which a flag named, goes before the
/// config's; what the config leaves out is as the program has it.
///
/// # Errors
/// As for [`config::load`]; a program that cannot be loaded.
pub fn load(path: &Path, sets: &[String], program: Option<&Path>) -> Result<Config> {
    /// What tells which program it is.
    #[derive(Deserialize)]
    struct Names {
        program: Option<PathBuf>,
        #[serde(default)]
        tile: TileConfig,
    }

    impl Schema for Names {}

    let text = config::read(path)?;
    let in_config = || format!("config {}", path.display());
    let names: Names = config::parse(&text, sets).with_context(in_config)?;
    let program = program.map(Path::to_path_buf).or(names.program);
    let base = match &program {
        None => serde_yaml::Value::Null,
        Some(program) => base(&Exported::load(&config::manifest(program, names.tile)?)?)?,
    };
    let mut config: Config = config::parse_over(base, &text, sets).with_context(in_config)?;
    config.program = program;
    Ok(config)
}

/// What of a config a program tells: all but the shape, as it knows tokens and not how many a
/// sequence has.
fn base(exported: &Exported) -> Result<serde_yaml::Value> {
    let mut base = exported::base(exported)?;
    if let Some(op) = Op::named(&exported.op) {
        let of_shape = |dim: &&DimSpec| dim.in_shape || dim.letter == TOKENS.letter;
        for dim in op.dims().iter().filter(of_shape) {
            base.shift_remove(dim.key);
        }
    }
    Ok(serde_yaml::to_value(base)?)
}

/// Runs what `config` asks for.
///
/// # Errors
/// Bad input: a value out of range, a file that does not fit, too little memory.
pub fn run(config: &Config) -> Result<Report> {
    config.tolerances.check_owners()?;
    for tolerance in config.op.tolerances() {
        let name = tolerance.name;
        let value = config.tolerances.number(name).unwrap_or(0.0);
        ensure!(value >= 0.0, "tolerances.{name} is {value}; it must be at least 0");
    }
    ensure!(config.cotangent.is_finite(), "cotangent is {}; it must be finite", config.cotangent);
    let (plugin, isa) = (config.plugin.as_deref(), config.isa.as_deref());
    config.backend.check_choices(plugin, config.cache.as_deref(), isa, config.threads)?;
    runner::check_choices(config)?;
    match &config.input {
        Input::Synthetic(synthetic) => {
            let shape = config.synthetic_shape()?;
            let sequences = [shape.batch, shape.seq_len];
            let problem = config.problem(sequences, |dim| match dim.in_shape {
                true => shape.dims.get(dim.key).copied(),
                false => config.top.extent(dim),
            })?;
            synthetic.validate().context("input.synthetic")?;
            memory::require(config.needed_bytes(&problem, true), &config.remedy())?;
            let rows = rows(shape.batch, shape.seq_len, config.op.predicts_next());
            let inputs = config.op.inputs(&problem, synthetic, &rows).context("input.synthetic")?;
            check(config, &problem, sequences, synthetic, &inputs)
        }
        Input::File(path) => {
            let in_file = || format!("input file {}", path.display());
            let mapped = Mapped::open(path)?;
            let tensors = mapped.tensors().with_context(in_file)?;
            check_file(config, &tensors).with_context(in_file)
        }
    }
}

fn check_file(config: &Config, file: &dyn Stored) -> Result<Report> {
    let found = config.op.stored_dims(file)?;
    let [batch, seq_len] = found.sequences;
    let of_file = |dim: &DimSpec| {
        found.dims.iter().find(|(letter, _)| *letter == dim.letter).map(|(_, extent)| *extent)
    };
    let in_shape = config.op.dims().iter().filter(|dim| dim.in_shape);
    let dims = in_shape.filter_map(|dim| Some((dim.key, of_file(dim)?))).collect();
    config.agree(Shape { batch, seq_len, dims })?;
    let problem = config.problem(found.sequences, |dim| match dim.in_shape {
        true => of_file(dim),
        false => config.top.extent(dim).or_else(|| of_file(dim)),
    })?;
    let own = config.op.stored_bytes(&problem, file);
    let needed = own.zip(config.needed_bytes(&problem, false));
    let needed = needed.and_then(|(own, needed)| own.checked_add(needed));
    memory::require(needed, "make a smaller file")?;
    let inputs = config.op.stored(&problem, file)?;
    // Weights and cotangents are not in files.
    check(config, &problem, found.sequences, &Synthetic::default(), &inputs)
}

fn check(
    config: &Config,
    problem: &Problem,
    sequences: [usize; 2],
    seeded: &Synthetic,
    inputs: &Arrays<'_>,
) -> Result<Report> {
    let began = Instant::now();
    let op = config.op;
    let tolerances = op.tolerance_values(problem, |name| config.tolerances.number(name));
    let mut reference = op.reference(problem, inputs, tolerances)?;
    let pool = runner::threads(config)?;
    let mut runner = runner::open(config, problem, inputs, pool.as_ref())?;
    let shape = op.shape(problem, Some(sequences));
    let config_json = serde_json::to_value(config).context("a config is plain data")?;
    let report = Report::new(config_json, config.implementation, &shape, &runner.setup());
    let rows = rows(sequences[0], sequences[1], op.predicts_next());
    let given = |pass| op.given(problem, pass, seeded, &rows);
    let mut run = Run { op, problem, report };
    match runner.is_split() {
        true => run.each_pass(&mut *runner, &mut *reference, given)?,
        false => run.whole(&mut *runner, &mut *reference, given)?,
    }
    let mut report = run.report;
    report.seconds("total_s", began.elapsed().as_secs_f64());
    report.finish(&Machine::current(), memory::peak_resident_bytes());
    Ok(report)
}

/// A problem, and what is found of it.
struct Run<'a> {
    op: Op,
    problem: &'a Problem,
    report: Report,
}

impl Run<'_> {
    fn judge<'b>(&'b mut self, pass: Pass, found: &'b Arrays<'b>) -> Judge<'b> {
        Judge {
            report: &mut self.report,
            op: self.op,
            problem: self.problem,
            pass,
            found,
            is_timed: true,
        }
    }

    /// Runs `pass` on memory that holds no result.
    fn run(
        &self,
        runner: &mut dyn Runner,
        pass: Pass,
        given: &Arrays<'_>,
    ) -> Result<(f64, Arrays<'static>)> {
        let mut found = poisoned(self.op, self.problem, pass);
        let (elapsed, result) = timed(|| runner.run(pass, given, &mut found));
        result?;
        Ok((elapsed, found))
    }

    fn reference_forward(&mut self, reference: &mut dyn Reference) {
        let (elapsed, ()) = timed(|| reference.forward());
        self.report.seconds("ref_forward_s", elapsed);
    }

    /// A scalar and its gradients.
    fn fused(
        &mut self,
        runner: &mut dyn Runner,
        reference: &mut dyn Reference,
        given: &Arrays<'_>,
        has_forward: bool,
    ) -> Result<()> {
        let (elapsed, found) = self.run(runner, Pass::Fused, given)?;
        self.report.seconds("kernel_grad_s", elapsed);
        if !has_forward {
            self.reference_forward(reference);
        }
        let mut judge = self.judge(Pass::Fused, &found);
        reference.scalar(Pass::Fused, given, &mut judge);
        reference.gradients(Pass::Fused, given, "", &mut judge);
        Ok(())
    }

    /// Each pass by itself.
    fn each_pass(
        &mut self,
        runner: &mut dyn Runner,
        reference: &mut dyn Reference,
        given: impl Fn(Pass) -> Arrays<'static>,
    ) -> Result<()> {
        let (elapsed, mut found) = self.run(runner, Pass::Forward, &Arrays::default())?;
        self.report.seconds("forward_s", elapsed);
        self.reference_forward(reference);
        reference.outputs(&mut self.judge(Pass::Forward, &found));
        let cotangents = given(Pass::Backward);
        let is_fused = self.op.is_fused(self.problem);
        let prefix = if is_fused {
            self.fused(runner, reference, &given(Pass::Fused), true)?;
            "recompute/"
        } else {
            reference.scalar(Pass::Backward, &cotangents, &mut self.judge(Pass::Forward, &found));
            ""
        };
        let (elapsed, gradients) = self.run(runner, Pass::Backward, &cotangents)?;
        found.extend(gradients);
        let mut judge = self.judge(Pass::ForwardAndBackward, &found);
        judge.is_timed = !is_fused;
        reference.gradients(Pass::Backward, &cotangents, prefix, &mut judge);
        let name = if is_fused { "recompute_backward_s" } else { "kernel_grad_s" };
        self.report.seconds(name, elapsed);
        Ok(())
    }

    /// The one pass that a program from JAX has.
    fn whole(
        &mut self,
        runner: &mut dyn Runner,
        reference: &mut dyn Reference,
        given: impl Fn(Pass) -> Arrays<'static>,
    ) -> Result<()> {
        let pass = self.op.whole(self.problem);
        let given = given(pass);
        if pass == Pass::Fused {
            self.fused(runner, reference, &given, false)?;
            let has_backward = self.op.passes().contains(&Pass::Backward);
            let left_out = if has_backward { &["fwd/", "recompute/"][..] } else { &["fwd/"] };
            self.report.leave_out(left_out, "a program of value_and_grad");
            return Ok(());
        }
        let (elapsed, found) = self.run(runner, pass, &given)?;
        self.report.seconds("kernel_grad_s", elapsed);
        self.reference_forward(reference);
        let mut judge = self.judge(pass, &found);
        reference.outputs(&mut judge);
        reference.scalar(pass, &given, &mut judge);
        reference.gradients(pass, &given, "", &mut judge);
        Ok(())
    }
}

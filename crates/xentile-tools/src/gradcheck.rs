//! Holds a kernel, or the dense program, against the float64 reference and says whether it may be trusted.
//!
//! Both schedules are run: the one that the reduction asks for, whose figures have plain names, and
//! beside a reduction the recomputing pair with random cotangents of loss, logps and lse, whose
//! figures start with `recompute/`. The reference is evaluated a token at a time. A program from JAX
//! is run in the place of a kernel; it has one of the schedules, and figures of what it does not give
//! are left out.

mod compare;
mod kernels;
mod linear;
mod program;
mod report;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use bytemuck::Pod;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use xentile::cross_entropy::reference::{TokenCotangents, TokenForward};
use xentile::cross_entropy::{CrossEntropy, Reduction, TokenFactors};
use xentile::{DType, Element, Labels, LogitsShape};
use xentile_cpu::cross_entropy::Reduce;
use xentile_programs::Exported;
use xentile_programs::exported::Linear;

use crate::config::{self, Backend, Op, Options, Shape, TileConfig, Weights};
use crate::input::file::Mapped;
use crate::input::synthetic::Synthetic;
use crate::input::{Tokens, predicting_rows};
use crate::machine::Machine;
use crate::microbench::{self, Implementation};
use crate::timing::timed;
use crate::{exported, memory};
use compare::{Outputs, Problem};
use kernels::Kernels;
use program::Program;
pub use report::{Figure, Place, Report};

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
    /// `[batch, seq_len, vocab]`; may be absent where a file tells.
    pub shape: Option<Shape>,
    /// D, columns of hidden states: of linear cross-entropy, as are the next three. May be absent
    /// where a file tells.
    #[serde(default)]
    pub hidden: Option<usize>,
    /// Whether there is a bias.
    #[serde(default)]
    pub bias: bool,
    /// Which axis of the weight is V: 0, the default, or 1.
    #[serde(default)]
    pub vocab_axis: Option<usize>,
    /// What may be held beyond operands and results; the operation's own choice where absent.
    #[serde(default)]
    pub max_scratch_bytes: Option<u64>,
    /// The dtype of logits, or of hidden states and weight, and of their gradients.
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
    /// The manifest of a program that JAX exported, as the kernel: see
    /// [`microbench::Config::program`].
    ///
    /// [`microbench::Config::program`]: crate::microbench::Config::program
    #[serde(default)]
    pub program: Option<PathBuf>,
    /// Where compiled programs are kept, for `xla:` backends: see [`microbench::Config::cache`].
    ///
    /// [`microbench::Config::cache`]: crate::microbench::Config::cache
    #[serde(default)]
    pub cache: Option<PathBuf>,
    /// The operation's options.
    #[serde(default)]
    pub options: Options,
    /// The cotangent of the reduced loss.
    #[serde(default = "one")]
    pub cotangent: f64,
    /// What the kernel is run on.
    #[serde(default, with = "serde_yaml::with::singleton_map")]
    pub input: Input,
    /// What is still right; by dtype where absent.
    #[serde(default)]
    pub tolerances: Tolerances,
}

fn one() -> f64 {
    1.0
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

/// What is still right. Every absent limit has a default for the dtype.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tolerances {
    /// Loss, logps and lse: error relative to `max(|lse|, |z_y|, 1)`. Default 2e-6.
    pub forward_rel: Option<f64>,
    /// dlogits: units in the last place from the rounded reference. Default 1, for f32 16.
    pub dlogits_ulp: Option<f64>,
    /// dlogits: or this share of the token's cotangent, where that is more. Default 2^-23.
    pub dlogits_cotangent: Option<f64>,
    /// dlogits: the least share of entries equal to the rounded reference. Default 0.999, for f32 0.
    pub dlogits_equal: Option<f64>,
    /// Linear cross-entropy: what a sum of n products in f32 may be off by, in sqrt(n) units of
    /// rounding of the sum of their magnitudes. Default 1.
    pub sum_roundings: Option<f64>,
    /// Linear cross-entropy: error of a whole gradient relative to it, in units of rounding of the
    /// dtype and norms of all entries, beside what a typical logit is off by. Default 1.5, for f32 32.
    pub gradient_roundings: Option<f64>,
}

/// [`Tolerances`] with every default filled in.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Limits {
    /// See [`Tolerances::forward_rel`].
    pub forward_rel: f64,
    /// See [`Tolerances::dlogits_ulp`].
    pub dlogits_ulp: f64,
    /// See [`Tolerances::dlogits_cotangent`].
    pub dlogits_cotangent: f64,
    /// See [`Tolerances::dlogits_equal`].
    pub dlogits_equal: f64,
    /// See [`Tolerances::sum_roundings`].
    pub sum_roundings: f64,
    /// See [`Tolerances::gradient_roundings`].
    pub gradient_roundings: f64,
}

impl Tolerances {
    fn resolve(self, op: Op, dtype: DType, softcap: Option<f64>) -> Result<Limits> {
        for (name, of, is_set) in [
            ("dlogits_equal", Op::CrossEntropy, self.dlogits_equal.is_some()),
            ("sum_roundings", Op::LinearCrossEntropy, self.sum_roundings.is_some()),
            ("gradient_roundings", Op::LinearCrossEntropy, self.gradient_roundings.is_some()),
        ] {
            let (of, name_of_op) = (microbench::name(&of), microbench::name(&op));
            ensure!(
                !is_set || of == name_of_op,
                "tolerances.{name} is set; op {name_of_op} has none, {of} has"
            );
        }
        let is_f32 = dtype == DType::F32;
        // Only f32 is fine enough to show that exp is up to 3 units in the last place off, once in
        // the sum and once in the gradient, and that a capped logit is a few off, which exp turns
        // into a relative error.
        let f32_ulps = 16.0 + 4.0 * softcap.unwrap_or(0.0);
        let limits = Limits {
            forward_rel: self.forward_rel.unwrap_or(2e-6),
            dlogits_ulp: self.dlogits_ulp.unwrap_or(if is_f32 { f32_ulps } else { 1.0 }),
            dlogits_cotangent: self.dlogits_cotangent.unwrap_or(2f64.powi(-23)),
            dlogits_equal: self.dlogits_equal.unwrap_or(if is_f32 { 0.0 } else { 0.999 }),
            sum_roundings: self.sum_roundings.unwrap_or(1.0),
            gradient_roundings: self.gradient_roundings.unwrap_or(if is_f32 { 32.0 } else { 1.5 }),
        };
        let all = [
            ("forward_rel", limits.forward_rel),
            ("dlogits_ulp", limits.dlogits_ulp),
            ("dlogits_cotangent", limits.dlogits_cotangent),
            ("dlogits_equal", limits.dlogits_equal),
            ("sum_roundings", limits.sum_roundings),
            ("gradient_roundings", limits.gradient_roundings),
        ];
        for (name, value) in all {
            ensure!(value >= 0.0, "tolerances.{name} is {value}; it must be at least 0");
        }
        Ok(limits)
    }
}

impl Config {
    /// What is asked of linear cross-entropy; none for an operation over logits.
    fn linear(&self) -> Result<Option<Linear>> {
        let Self { op, hidden, bias, vocab_axis, max_scratch_bytes, .. } = *self;
        config::linear(op, hidden, bias, vocab_axis, max_scratch_bytes)
    }

    /// The shape of made-up input.
    fn synthetic_shape(&self) -> Result<Shape> {
        let Some(shape) = self.shape else {
            bail!("synthetic input needs shape: {{batch: .., seq_len: .., vocab: ..}}");
        };
        check_shape(shape)?;
        Ok(shape)
    }

    /// The shape `found` in a file, held against what the config says.
    fn agree(&self, found: Shape) -> Result<Shape> {
        if let Some(expected) = self.shape {
            ensure!(
                expected == found,
                "it holds {} and the config asks for {}; drop `shape` or mend it",
                describe(found),
                describe(expected)
            );
        }
        check_shape(found)?;
        Ok(found)
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
    let text = config::read(path)?;
    let in_config = || format!("config {}", path.display());
    let names: Names = config::parse(&text, sets).with_context(in_config)?;
    let program = program.map(Path::to_path_buf).or(names.program);
    let base = match &program {
        None => serde_yaml::Value::Null,
        Some(program) => base(&Exported::load(&exported::manifest(program, names.tile)?)?)?,
    };
    let mut config: Config = config::parse_over(base, &text, sets).with_context(in_config)?;
    config.program = program;
    Ok(config)
}

/// What of a config a program tells: all but the shape, as it knows tokens and not how many a
/// sequence has.
fn base(exported: &Exported) -> Result<serde_yaml::Value> {
    let mut base = microbench::Config::base(exported)?;
    if let Some(base) = base.as_mapping_mut() {
        base.retain(|key, _| key != "time" && key != "vocab");
    }
    Ok(base)
}

/// Runs what `config` asks for.
///
/// # Errors
/// Bad input: a value out of range, a file that does not fit, too little memory.
pub fn run(config: &Config) -> Result<Report> {
    match config.dtype {
        DType::F32 => run_as::<f32>(config),
        DType::Bf16 => run_as::<bf16>(config),
        DType::F16 => run_as::<f16>(config),
    }
}

fn run_as<E: Element + Pod + pjrt_client::Element>(config: &Config) -> Result<Report> {
    let options = config.options.cross_entropy()?;
    let limits = config.tolerances.resolve(config.op, config.dtype, options.softcap)?;
    ensure!(config.cotangent.is_finite(), "cotangent is {}; it must be finite", config.cotangent);
    let (plugin, isa) = (config.plugin.as_deref(), config.isa.as_deref());
    config.backend.check_choices(plugin, config.cache.as_deref(), isa, config.threads)?;
    program::check_choices(config)?;
    match config.op {
        Op::CrossEntropy => of_logits::<E>(config, options, limits),
        Op::LinearCrossEntropy => linear::run::<E>(config, options, limits),
    }
}

fn of_logits<E: Element + Pod + pjrt_client::Element>(
    config: &Config,
    options: CrossEntropy,
    limits: Limits,
) -> Result<Report> {
    // For what it refuses.
    _ = config.linear()?;
    match &config.input {
        Input::Synthetic(synthetic) => {
            let shape = config.synthetic_shape()?;
            synthetic.validate().context("input.synthetic")?;
            memory::require(needed_bytes(shape, config, true), REMEDY)?;
            let rows = predicting_rows(shape.batch, shape.seq_len);
            let mut logits = vec![E::from_f32(0.0); rows.len() * shape.vocab];
            synthetic.fill_logits(&rows, shape.vocab, &mut logits);
            let labels = synthetic.labels(&rows, shape.vocab, options.ignore_index);
            let tokens = Tokens { vocab: shape.vocab, logits: logits.into(), labels };
            check(config, options, limits, shape, synthetic, &tokens)
        }
        Input::File(path) => {
            let in_file = || format!("input file {}", path.display());
            let mapped = Mapped::open(path)?;
            let tensors = mapped.tensors().with_context(in_file)?;
            let shape = config.agree(tensors.shape()).with_context(in_file)?;
            let own = tensors.needed_bytes(config.dtype);
            let outputs = needed_bytes(shape, config, false);
            let needed = own.zip(outputs).and_then(|(a, b)| a.checked_add(b));
            memory::require(needed, "make a smaller file").with_context(in_file)?;
            let tokens = tensors.tokens::<E>().with_context(in_file)?;
            // Weights and cotangents are not in files.
            let seeded = Synthetic::default();
            check(config, options, limits, shape, &seeded, &tokens).with_context(in_file)
        }
    }
}

/// What to do where memory is short.
const REMEDY: &str = "lower shape.batch, shape.seq_len or shape.vocab";

fn describe(shape: Shape) -> String {
    format!("[{}, {}, {}]", shape.batch, shape.seq_len, shape.vocab)
}

fn check_shape(shape: Shape) -> Result<()> {
    let Shape { batch, seq_len, vocab } = shape;
    ensure!(batch >= 1, "shape.batch is 0; it must be at least 1");
    ensure!(
        seq_len >= 2,
        "shape.seq_len is {seq_len}; it must be at least 2, a token and its next"
    );
    ensure!(vocab >= 1, "shape.vocab is 0; it must be at least 1");
    Ok(())
}

/// Bytes for dlogits, for logits where they are made, for both once more where the device's memory
/// is the host's, for the dense program's probabilities, and for the rows in float64.
fn needed_bytes(shape: Shape, config: &Config, logits: bool) -> Option<u64> {
    let tokens = (shape.batch as u64).checked_mul(shape.seq_len as u64)?;
    let copies = if logits { 2 } else { 1 } + if config.backend == Backend::XlaCpu { 2 } else { 0 };
    let is_dense = config.implementation == Implementation::Reference;
    let matrices = copies * config.dtype.size_bytes() + if is_dense { size_of::<f32>() } else { 0 };
    let rows = 32 * rayon::current_num_threads() as u64;
    let columns = tokens.checked_mul(matrices as u64)?.checked_add(rows)?;
    columns.checked_mul(shape.vocab as u64)?.checked_add(tokens.checked_mul(128)?)
}

fn check<E: Element + Pod + pjrt_client::Element>(
    config: &Config,
    options: CrossEntropy,
    limits: Limits,
    shape: Shape,
    seeded: &Synthetic,
    tokens: &Tokens<'_, E>,
) -> Result<Report> {
    let began = Instant::now();
    let problem_shape = LogitsShape::new(tokens.labels.len(), tokens.vocab)?;
    let labels = Labels::from(tokens.labels.as_slice());
    options.check_labels(labels, problem_shape)?;
    let subject = match Program::of_logits(config, tokens)? {
        Some(program) => Subject::Program(Box::new(program)),
        None => Subject::Kernels(kernels::open(config, options, tokens)?),
    };

    let rows = predicting_rows(shape.batch, shape.seq_len);
    let weights = match config.options.weights {
        Weights::None => None,
        Weights::Random => Some(seeded.weights(&rows)),
    };
    let cotangents = seeded.cotangents(&rows);
    drop(rows);

    let mut run = Run {
        config,
        problem: Problem { options, tokens, limits },
        weights,
        cotangents,
        outputs: Outputs::poisoned(problem_shape.tokens()),
        dlogits: vec![E::from_f32(0.0); problem_shape.elements()],
        report: Report::new(config, describe(shape), &subject.setup()),
    };
    match subject {
        Subject::Kernels(mut kernels) => run.kernels(&mut *kernels)?,
        Subject::Program(program) => run.program(&program)?,
    }
    let mut report = run.report;
    report.seconds("time/total_s", began.elapsed().as_secs_f64());
    report.finish(&Machine::current(), memory::peak_resident_bytes());
    Ok(report)
}

/// What is held against the reference.
enum Subject<'a, E> {
    Kernels(Box<dyn Kernels<E> + 'a>),
    Program(Box<Program>),
}

impl<E> Subject<'_, E> {
    fn setup(&self) -> kernels::Setup {
        match self {
            Self::Kernels(kernels) => kernels.setup(),
            Self::Program(program) => program.setup(),
        }
    }
}

/// A problem, what it is run with, and what is found.
struct Run<'a, E: Clone> {
    config: &'a Config,
    problem: Problem<'a, E>,
    weights: Option<Vec<f32>>,
    /// Of loss, logps and lse.
    cotangents: [Vec<f32>; 3],
    outputs: Outputs,
    dlogits: Vec<E>,
    report: Report,
}

impl<E: Element + pjrt_client::Element> Run<'_, E> {
    /// Both schedules of kernels.
    fn kernels(&mut self, kernels: &mut dyn Kernels<E>) -> Result<()> {
        let (elapsed, result) = timed(|| kernels.forward(&mut self.outputs));
        result?;
        self.report.seconds("time/forward_s", elapsed);
        let reference = self.reference();
        self.problem.compare_forward(&mut self.report, &self.outputs, &reference);
        let reduction = self.config.options.reduction.reduction();
        match reduction {
            Some(reduction) => self.reduced(reduction, &reference, &mut |reduce, dlogits| {
                kernels.value_and_grad(reduce, dlogits)
            })?,
            None => self.compare_mean(&reference),
        }
        compare::poison(&mut self.dlogits);
        let backward = || kernels.backward(&self.outputs, &self.cotangents, &mut self.dlogits);
        let (elapsed, result) = timed(backward);
        result?;
        if reduction.is_none() {
            self.recomputed("", elapsed, &reference);
        } else {
            self.recomputed("recompute/", elapsed, &reference);
        }
        Ok(())
    }

    /// The one schedule that a program from JAX has.
    fn program(&mut self, program: &Program) -> Result<()> {
        if let Some(reduction) = self.config.options.reduction.reduction() {
            let reference = self.reference();
            self.reduced(reduction, &reference, &mut |reduce, dlogits| {
                let (loss, gradients) = program.value_and_grad(reduce.weights)?;
                gradients[0].copy_to(dlogits)?;
                Ok(loss)
            })?;
            self.report.leave_out(&["fwd/", "recompute/"], "a program of value_and_grad");
            return Ok(());
        }
        compare::poison(&mut self.dlogits);
        let (elapsed, result) = timed(|| {
            let gradients = program.forward_and_backward(&mut self.outputs, &self.cotangents)?;
            Ok::<_, anyhow::Error>(gradients[0].copy_to(&mut self.dlogits)?)
        });
        result?;
        let reference = self.reference();
        self.problem.compare_forward(&mut self.report, &self.outputs, &reference);
        self.compare_mean(&reference);
        self.recomputed("", elapsed, &reference);
        Ok(())
    }

    fn reference(&mut self) -> Vec<TokenForward> {
        let (elapsed, reference) = timed(|| self.problem.reference_forward());
        self.report.seconds("time/ref_forward_s", elapsed);
        reference
    }

    /// The mean of the losses, where nothing reduces them.
    fn compare_mean(&mut self, reference: &[TokenForward]) {
        let mean =
            |losses: &mut dyn Iterator<Item = f64>| losses.sum::<f64>() / reference.len() as f64;
        let actual = mean(&mut self.outputs.loss.iter().map(|&loss| f64::from(loss)));
        let expected = mean(&mut reference.iter().map(|reference| reference.loss));
        self.problem.compare_loss(&mut self.report, actual, expected);
    }

    /// The reduced loss and its gradient, as `value_and_grad` gives them.
    fn reduced(
        &mut self,
        reduction: Reduction,
        reference: &[TokenForward],
        value_and_grad: &mut dyn FnMut(Reduce<'_>, &mut [E]) -> Result<f64>,
    ) -> Result<()> {
        let weights = self.weights.as_deref();
        let labels = Labels::from(self.problem.tokens.labels.as_slice());
        let factors = TokenFactors::new(self.problem.options, reduction, labels, weights)?;
        let cotangent = self.config.cotangent;
        let reduce = Reduce { reduction, weights, cotangent };
        compare::poison(&mut self.dlogits);
        let (elapsed, loss) = timed(|| value_and_grad(reduce, &mut self.dlogits));
        self.report.seconds("time/kernel_grad_s", elapsed);
        let expected = factors.reduce(reference.iter().map(|r| r.loss));
        self.problem.compare_loss(&mut self.report, loss?, expected);
        let of_token = |token: usize| match factors.of(token) {
            0.0 => None,
            factor => Some(TokenCotangents { loss: cotangent * factor, ..Default::default() }),
        };
        let (elapsed, ()) = timed(|| {
            let report = &mut self.report;
            self.problem.compare_gradient(report, "", reference, of_token, &self.dlogits);
        });
        self.report.seconds("time/ref_grad_s", elapsed);
        Ok(())
    }

    /// The gradient for the cotangents of every token, which took `elapsed` seconds to make.
    fn recomputed(&mut self, prefix: &str, elapsed: f64, reference: &[TokenForward]) {
        let [g, h, k] = &self.cotangents;
        let of_token = |token: usize| {
            let [loss, logps, lse] = [g, h, k].map(|cotangent| f64::from(cotangent[token]));
            Some(TokenCotangents { loss, logps, lse })
        };
        let (reference_elapsed, ()) = timed(|| {
            let report = &mut self.report;
            self.problem.compare_gradient(report, prefix, reference, of_token, &self.dlogits);
        });
        if prefix.is_empty() {
            self.report.seconds("time/kernel_grad_s", elapsed);
            self.report.seconds("time/ref_grad_s", reference_elapsed);
        } else {
            self.report.seconds("time/recompute_backward_s", elapsed);
        }
    }
}

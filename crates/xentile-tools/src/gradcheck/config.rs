//! What gradcheck is asked to do.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_yaml::Mapping;
use xentile::DType;
use xentile::operation::{ArraySpec, DimSpec, Problem, Synthetic, TOKENS};
use xentile_programs::Exported;

use crate::config::{
    self, Backend, Implementation, Op, Schema, Scope, Settings, Shape, Taken, TileConfig,
};
use crate::exported;

/// What gradcheck is asked to do.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The operation.
    pub op: Op,
    /// The backend.
    pub backend: Backend,
    /// The implementation; the kernel by default.
    #[serde(rename = "impl", default)]
    pub implementation: Implementation,
    /// Sequences, tokens of each, and other extents; optional where the input is a file.
    pub shape: Option<Shape>,
    /// Other extents, and options of the operation that are keys of their own.
    #[serde(flatten, skip_deserializing)]
    pub top: Settings,
    /// The dtype of arrays without a dtype of their own.
    #[serde(deserialize_with = "config::dtype", serialize_with = "config::dtype_name")]
    pub dtype: DType,
    /// The tile; tuned by default.
    #[serde(default)]
    pub tile: TileConfig,
    /// Threads; 0 is one per core.
    #[serde(default)]
    pub threads: usize,
    /// The instruction set; this processor's best by default.
    #[serde(default)]
    pub isa: Option<String>,
    /// The PJRT plug-in's file, for `xla:` backends; searched for by default.
    #[serde(default)]
    pub plugin: Option<PathBuf>,
    /// The manifest of a program that JAX exported, to run as the kernel. `{time_block}` and
    /// `{block_size}` in its name stand for the tile.
    #[serde(default)]
    pub program: Option<PathBuf>,
    /// The folder of compiled programs, for `xla:` backends; only these tools may write there.
    /// Default: `XENTILE_CACHE`, if set.
    #[serde(default)]
    pub cache: Option<PathBuf>,
    /// The operation's options.
    #[serde(skip_deserializing)]
    pub options: Settings,
    /// The cotangent of the scalar loss.
    #[serde(default = "one")]
    pub cotangent: f64,
    /// The input: synthetic or a file.
    #[serde(default, with = "serde_yaml::with::singleton_map")]
    pub input: Input,
    /// Error bounds; the operation's by default.
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
            settings.set_op(self.op);
        }
    }
}

/// What the kernel is run on.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Input {
    /// Generated from a seed.
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
    pub(super) fn problem(
        &self,
        [batch, seq_len]: [usize; 2],
        of: impl Fn(&DimSpec) -> Option<usize>,
    ) -> Result<Problem> {
        let used = seq_len.saturating_sub(usize::from(self.op.facts().predicts_next));
        // An allocation reports sizes that are too large.
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

    /// The shape of synthetic input.
    pub(super) fn synthetic_shape(&self) -> Result<&Shape> {
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
    pub(super) fn agree(&self, found: Shape) -> Result<Shape> {
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
            if self.op.facts().predicts_next { (2, ", a token and its next") } else { (1, "") };
        ensure!(*seq_len >= least, "shape.seq_len is {seq_len}; it must be at least {least}{why}");
        for (key, extent) in dims {
            ensure!(*extent >= 1, "shape.{key} is 0; it must be at least 1");
        }
        Ok(())
    }

    /// What to lower where memory is short.
    pub(super) fn remedy(&self) -> String {
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
    pub(super) fn needed_bytes(&self, problem: &Problem, inputs: bool) -> Option<u64> {
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

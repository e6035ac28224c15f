//! Programs that JAX exported: the one that a config names or, for kernels on TPUs and for linear
//! cross-entropy, the one that the Python package `pallas_bridge` makes of it; and whether a program is
//! for the config.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use pjrt_client::Platform;
use serde_json::json;
use xentile::{DType, LogitsShape, Tile};
use xentile_programs::cross_entropy::{self, Problem, Reduced};
use xentile_programs::exported::Linear;
use xentile_programs::{ElementType, Exported, Program, TensorType};

use crate::config::{self, Backend, Op, Options, ReductionConfig, TileConfig, Weights};
use crate::microbench::{Implementation, name};

/// Names the Python that has `pallas_bridge`.
const PYTHON: &str = "XENTILE_PYTHON";

/// Refuses a program from JAX where it could not run, or would not be what is asked for.
///
/// # Errors
/// Another backend than one of XLA's, or the dense program.
pub(crate) fn check_choice(
    program: Option<&Path>,
    backend: Backend,
    implementation: Implementation,
) -> Result<()> {
    if program.is_some() {
        ensure!(
            backend != Backend::Cpu,
            "program is set; backend cpu runs no programs, those named xla: do"
        );
        ensure!(
            implementation == Implementation::Kernel,
            "program is set, which is the kernel; set impl to kernel or leave program out"
        );
    }
    Ok(())
}

/// The manifest that `program` names, with the tile in the place of `{time_block}` and
/// `{block_size}`.
///
/// # Errors
/// The name has a place for an extent of the tile that is left open.
pub(crate) fn manifest(program: &Path, tile: TileConfig) -> Result<PathBuf> {
    let Some(text) = program.to_str() else { return Ok(program.into()) };
    let mut text = text.to_owned();
    for (key, extent) in [("time_block", tile.time_block), ("block_size", tile.block_size)] {
        let place = format!("{{{key}}}");
        if !text.contains(&place) {
            continue;
        }
        let Some(extent) = extent else {
            bail!("program {text} has a place for {key}, which is left open; set tile.{key}");
        };
        text = text.replace(&place, &extent.to_string());
    }
    Ok(text.into())
}

/// What a config asks of a program that gives the loss and its gradient.
pub(crate) struct Asked<'a> {
    pub(crate) op: Op,
    pub(crate) backend: Backend,
    pub(crate) implementation: Implementation,
    /// TPUs to compile for; none to run on what is there.
    pub(crate) topology: Option<&'a str>,
    pub(crate) shape: LogitsShape,
    /// None for an operation over logits.
    pub(crate) linear: Option<Linear>,
    pub(crate) dtype: DType,
    pub(crate) tile: TileConfig,
    pub(crate) options: &'a Options,
    /// As the config names it.
    pub(crate) program: Option<&'a Path>,
    /// Where programs are kept that are exported here.
    pub(crate) cache: Option<&'a Path>,
}

/// What a program takes and gives.
pub(crate) struct Signature {
    /// The name of the function that made it.
    pub(crate) called: &'static str,
    pub(crate) arguments: Vec<TensorType>,
    pub(crate) results: Vec<TensorType>,
    /// Where gradients begin among the results, which they end.
    pub(crate) gradients: usize,
}

/// What this build writes for a config over logits. A program from JAX has the same signature.
pub(crate) struct Own {
    pub(crate) signature: Signature,
    pub(crate) program: Program,
    pub(crate) tile: TileConfig,
}

impl Asked<'_> {
    /// What this build writes; `default` is the tile for what the config leaves open.
    pub(crate) fn own(&self, default: Tile) -> Result<Own> {
        let tile = self.tile.of_program(self.backend, default)?;
        let problem = Problem {
            shape: self.shape,
            dtype: self.dtype,
            labels: ElementType::S32,
            options: self.options.cross_entropy()?,
            time_block: tile.time_block,
            block_size: tile.block_size,
        };
        let by = self.implementation.program();
        let (called, program) = match self.options.reduction.reduction() {
            Some(reduction) => {
                let weights = self.options.weights == Weights::Random;
                let reduced = Reduced { reduction, weights, cotangent: false };
                ("value_and_grad", cross_entropy::value_and_grad(&problem, reduced, by))
            }
            None => ("forward_and_backward", cross_entropy::forward_and_backward(&problem, by)),
        };
        let signature = Signature {
            called,
            arguments: program.arguments.clone(),
            results: program.results.clone(),
            gradients: program.results.len() - 1,
        };
        Ok(Own { signature, program, tile })
    }

    /// The signature of a program of hidden states: of hidden, weight, bias if any, and labels.
    ///
    /// # Errors
    /// Shapes that disagree.
    pub(crate) fn linear_signature(&self, linear: Linear) -> Result<Signature> {
        let shape = config::linear_shape(self.shape, linear)?;
        let of = |dims: &[usize]| TensorType::new(dims, self.dtype.into());
        let mut gradients = vec![of(&shape.hidden()), of(&shape.weight())];
        if linear.bias {
            gradients.push(of(&[shape.vocab()]));
        }
        let labels = TensorType::new(&[shape.tokens()], ElementType::S32);
        let numbers = TensorType::new(&[shape.tokens()], ElementType::F32);
        let mut arguments = gradients.clone();
        arguments.push(labels);
        let (called, mut results) = match self.options.reduction {
            ReductionConfig::None => {
                arguments.extend(vec![numbers.clone(); 3]);
                ("forward_and_backward", vec![numbers; 3])
            }
            ReductionConfig::Mean | ReductionConfig::Sum => {
                if self.options.weights == Weights::Random {
                    arguments.push(numbers);
                }
                ("value_and_grad", vec![TensorType::new(&[], ElementType::F32)])
            }
        };
        let first = results.len();
        results.extend(gradients);
        Ok(Signature { called, arguments, results, gradients: first })
    }

    /// Whether the program has to be exported.
    pub(crate) fn needs_export(&self) -> bool {
        let is_kernel = self.implementation == Implementation::Kernel;
        self.program.is_none()
            && (self.op == Op::LinearCrossEntropy || self.backend == Backend::XlaTpu && is_kernel)
    }

    /// Whether the program, of hidden states, calls kernels that have to be registered.
    pub(crate) fn calls_kernels(&self) -> bool {
        self.op == Op::LinearCrossEntropy
            && self.implementation == Implementation::Kernel
            && self.backend != Backend::XlaTpu
    }

    /// The program that the config names, if any.
    ///
    /// # Errors
    /// It cannot be loaded, or is for something else.
    pub(crate) fn named(&self, wanted: &Signature) -> Result<Option<Exported>> {
        self.program.map(|program| self.load(&manifest(program, self.tile)?, wanted)).transpose()
    }

    /// The program, exported unless it is kept already.
    ///
    /// # Errors
    /// There is no Python with `pallas_bridge`, or it refuses the config: what it says.
    pub(crate) fn export(&self, wanted: &Signature) -> Result<Exported> {
        let mut cell = json!({
            "op": self.op,
            "backend": self.backend,
            "impl": self.implementation,
            "topology": self.topology,
            "time": self.shape.tokens(),
            "vocab": self.shape.vocab(),
            "dtype": self.dtype.name(),
            "tile": self.tile,
            "options": self.options,
        });
        if let (Some(linear), Some(cell)) = (self.linear, cell.as_object_mut()) {
            let linear = serde_json::to_value(linear)?;
            cell.extend(linear.as_object().cloned().unwrap_or_default());
        }
        let mut hasher = DefaultHasher::new();
        cell.to_string().hash(&mut hasher);
        let folder = folder(self.cache)?;
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {} for exported programs", folder.display()))?;
        let stem = format!("{}_{:016x}", name(&self.op), hasher.finish());
        let path = folder.join(format!("{stem}.json"));
        cell["program"] = json!(path);
        // Configs have the endings of programs' other files, so that nothing else is named like them.
        let config_path = folder.join(format!("{stem}.config"));
        std::fs::write(&config_path, cell.to_string())
            .with_context(|| format!("cannot write {}", config_path.display()))?;
        export(&config_path, self)?;
        self.load(&path, wanted)
    }

    fn load(&self, path: &Path, wanted: &Signature) -> Result<Exported> {
        let exported = Exported::load(path)?;
        self.check(&exported, wanted).with_context(|| format!("program {}", path.display()))?;
        Ok(exported)
    }

    /// Refuses a program from JAX that is for something else.
    fn check(&self, exported: &Exported, signature: &Signature) -> Result<()> {
        let agree = |what: &str, found: &str, wanted: &str| {
            ensure!(found == wanted, "its {what} is {found}; the config's is {wanted}");
            Ok(())
        };
        agree("op", &exported.op, &name(&self.op))?;
        agree("program", &exported.program, signature.called)?;
        agree("platform", &exported.platform, self.backend.platform().map_or("", Platform::name))?;
        for (what, found, wanted) in [
            ("arguments", &exported.arguments, &signature.arguments),
            ("results", &exported.results, &signature.results),
        ] {
            let list = |types: &[TensorType]| {
                types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            };
            ensure!(
                found == wanted,
                "its {what} are {}; the config's are {}",
                list(found),
                list(wanted)
            );
        }
        for (what, found, wanted) in [
            ("time_block", exported.tile.time_block, self.tile.time_block),
            ("block_size", exported.tile.block_size, self.tile.block_size),
        ] {
            let (Some(wanted), false) = (wanted, wanted == found) else { continue };
            let found = found.map_or("the kernel's choice".to_owned(), |found| found.to_string());
            bail!("its tile.{what} is {found}; the config's is {wanted}");
        }
        ensure!(
            exported.linear == self.linear,
            "it is of {}; the config's is of {}",
            serde_json::to_string(&exported.linear)?,
            serde_json::to_string(&self.linear)?
        );
        let options: Options = config::from_json("options", exported.options.clone().into())?;
        ensure!(
            options == *self.options,
            "its options are {}; the config's are {}",
            serde_json::to_string(&options)?,
            serde_json::to_string(self.options)?
        );
        Ok(())
    }
}

/// The tile that a program was made with.
pub(crate) fn tile(exported: &Exported) -> TileConfig {
    let xentile_programs::exported::Tile { time_block, block_size } = exported.tile;
    TileConfig { time_block, block_size }
}

/// Where programs are kept: the cache of the config or the environment, else the user's.
fn folder(cache: Option<&Path>) -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(cache) = cache.map(Path::to_path_buf).or(set("XENTILE_CACHE").map(PathBuf::from)) {
        return Ok(cache);
    }
    let user = set("XDG_CACHE_HOME").map(PathBuf::from);
    let user = user.or(set("HOME").map(|home| Path::new(&home).join(".cache")));
    let user = user.context("no folder for exported programs: name one with --cache")?;
    Ok(user.join("xentile"))
}

fn export(config: &Path, asked: &Asked<'_>) -> Result<()> {
    let python = std::env::var_os(PYTHON).map(PathBuf::from).unwrap_or_else(|| {
        match std::env::var_os("VIRTUAL_ENV") {
            Some(environment) => Path::new(&environment).join("bin/python"),
            None => "python3".into(),
        }
    });
    let output = Command::new(&python)
        .args(["-m", "pallas_bridge.export", "--config"])
        .arg(config)
        // It only traces: devices are of no use to it, and may be in use.
        .env("JAX_PLATFORMS", "cpu")
        .stdin(Stdio::null())
        .output();
    let (what_for, dense) = match asked.op {
        Op::CrossEntropy => (name(&asked.backend), ", or take the dense one with --impl reference"),
        Op::LinearCrossEntropy => (name(&asked.op), ""),
    };
    let missing = |what: &str| {
        format!(
            "{what}; kernels for {what_for} come from pallas_bridge: run `pip install \
             ./pallas_bridge` in a checkout of xentile, or name a Python that has it in {PYTHON}, or \
             a program that was exported with --program FILE.json{dense}"
        )
    };
    let output = match output {
        Ok(output) => output,
        Err(error) => bail!(missing(&format!("cannot run {}: {error}", python.display()))),
    };
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    match last.strip_prefix("error: ") {
        Some(reason) => bail!("{reason}"),
        None => bail!(missing(&format!("{} does not export: {last}", python.display()))),
    }
}

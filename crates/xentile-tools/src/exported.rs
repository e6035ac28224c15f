//! Programs that JAX exported: the one that a config names or, where this build writes none, the one
//! that the Python package `pallas_bridge` makes of it; and whether a program is for the config.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use pjrt_client::Platform;
use serde_json::{Map, Value, json};
use xentile::operation::{ArraySpec, ElementRule, Pass, Problem, TileExtents, multiple};
use xentile_programs::{ElementType, Exported, Program, TensorType, programs};

use crate::config::{Backend, Implementation, Op, Scope, Settings, TileConfig, manifest, name};

/// Names the Python that has `pallas_bridge`.
const PYTHON: &str = "XENTILE_PYTHON";

/// What the names of our custom calls begin with.
const CALLS: &[u8] = b"xentile_";

/// What a config asks of a program that gives all that the operation has.
pub(crate) struct Asked<'a> {
    pub(crate) op: Op,
    pub(crate) backend: Backend,
    pub(crate) implementation: Implementation,
    /// TPUs to compile for; none to run on what is there.
    pub(crate) topology: Option<&'a str>,
    pub(crate) problem: &'a Problem,
    /// As the config has it.
    pub(crate) tile: TileConfig,
    pub(crate) options: &'a Settings,
    /// As the config names it.
    pub(crate) program: Option<&'a Path>,
    /// Where programs are kept that are exported here.
    pub(crate) cache: Option<&'a Path>,
}

/// The type of an array on a device.
pub(crate) fn tensor_type(spec: &ArraySpec, problem: &Problem) -> TensorType {
    let element = match spec.element {
        ElementRule::Compute => problem.dtype.into(),
        ElementRule::Is(dtype) => dtype.into(),
        ElementRule::Fp8(format) => format.into(),
        ElementRule::Byte => ElementType::U8,
        ElementRule::Index => ElementType::S32,
    };
    TensorType::new(&spec.extents(problem), element)
}

/// What a program takes and gives.
pub(crate) struct Signature {
    /// The name of the pass.
    pub(crate) called: &'static str,
    pub(crate) arguments: Vec<TensorType>,
    pub(crate) results: Vec<TensorType>,
    /// Where gradients begin among the results, which they end.
    pub(crate) gradients: usize,
}

impl Signature {
    /// That of `pass`.
    pub(crate) fn of(op: Op, problem: &Problem, pass: Pass) -> Self {
        let signature = op.signature(problem, pass);
        let types = |specs: &[ArraySpec]| {
            specs.iter().map(|spec| tensor_type(spec, problem)).collect::<Vec<_>>()
        };
        Self {
            called: pass.name(),
            arguments: types(&signature.operands),
            results: types(&signature.results),
            gradients: signature.gradients(),
        }
    }
}

/// The tile that a program of this build names: with the tuned one for what is left open, but on a GPU,
/// where kernels choose for the device that they find themselves on. None where there are no tiles.
pub(crate) fn own_tile(op: Op, problem: &Problem, backend: Backend) -> Result<Option<TileConfig>> {
    let TileExtents { time_block, block_size } = problem.tile;
    let Some(kernels) = xentile_cpu::kernels(op.name()) else { return Ok(None) };
    let resolved = kernels.tile(problem)?.map(TileConfig::from);
    let asked = TileConfig { time_block, block_size };
    Ok(resolved.map(|resolved| if backend == Backend::XlaCuda { asked } else { resolved }))
}

/// The program of `pass` that this build writes, with the tile that it names; none where it writes none.
pub(crate) fn own_program(
    op: Op,
    problem: &Problem,
    pass: Pass,
    backend: Backend,
    implementation: Implementation,
) -> Result<Option<(Program, Option<TileConfig>)>> {
    let Some(write) = programs(op.name()) else { return Ok(None) };
    let tile = own_tile(op, problem, backend)?;
    let tile = tile.filter(|_| implementation == Implementation::Kernel);
    let tiled = Problem { tile: tile.unwrap_or_default().into(), ..problem.clone() };
    Ok(Some((write(&tiled, pass, implementation.program())?, tile)))
}

/// Whether a program calls kernels that have to be registered.
pub(crate) fn calls_kernels(exported: &Exported, backend: Backend) -> bool {
    backend != Backend::XlaTpu && exported.bytecode.windows(CALLS.len()).any(|part| part == CALLS)
}

/// What of a config a program tells: all but what a file or `shape` says.
///
/// # Errors
/// Its arguments are not those of its operation.
pub(crate) fn base(exported: &Exported) -> Result<Map<String, Value>> {
    let first = exported.arguments.first().context("the program takes no arguments")?;
    let mut base = Map::new();
    base.insert("op".into(), json!(exported.op));
    base.insert("backend".into(), json!(format!("xla:{}", exported.platform)));
    base.insert("dtype".into(), json!(first.element.to_string()));
    base.insert("options".into(), exported.options.clone().into());
    base.extend(exported.settings.clone().unwrap_or_default());
    // What follows says that there is no such operation.
    let Some(op) = Op::named(&exported.op) else { return Ok(base) };
    let options = Settings::from_json(Scope::Options, "options", op, &exported.options)?;
    let top: Map<_, _> = exported.settings.clone().unwrap_or_default();
    let top = Settings::from_json(Scope::Measured, "settings", op, &top)?;
    let value = |name| top.get(name).or(options.get(name));
    let options = op.options().iter();
    let problem = Problem {
        dims: Vec::new(),
        dtype: xentile::DType::F32,
        options: options
            .map(|option| (option.name, value(option.name).unwrap_or(option.default)))
            .collect(),
        tile: TileExtents::default(),
        cotangent: 1.0,
    };
    for (spec, found) in
        op.signature(&problem, op.whole(&problem)).operands.iter().zip(&exported.arguments)
    {
        ensure!(
            spec.dims.len() == found.dims.len(),
            "the program's argument {} is {found}; it must be [{}]",
            spec.name,
            spec.dims.join(", ")
        );
        for (letter, extent) in spec.dims.iter().zip(&found.dims) {
            let (times, letter) = multiple(letter);
            if let Some(dim) = op.dims().iter().find(|dim| dim.letter == letter) {
                base.entry(dim.key).or_insert(json!(extent / times));
            }
        }
    }
    Ok(base)
}

impl Asked<'_> {
    /// Whether the program has to be exported.
    pub(crate) fn needs_export(&self) -> bool {
        let is_kernel = self.implementation == Implementation::Kernel;
        self.program.is_none()
            && (programs(self.op.name()).is_none()
                || self.backend == Backend::XlaTpu && is_kernel
                || self.op.needs_jax(self.problem))
    }

    /// The program that the config names, if any.
    ///
    /// # Errors
    /// It cannot be loaded, or is for something else.
    pub(crate) fn named(&self, wanted: &Signature) -> Result<Option<Exported>> {
        self.program.map(|program| self.load(&manifest(program, self.tile)?, wanted)).transpose()
    }

    /// Extents and options that are keys of their own, but for those that every operation has.
    fn settings(&self) -> Map<String, Value> {
        let mut settings = Map::new();
        for dim in Scope::Checked.dims(self.op) {
            settings.insert(dim.key.into(), json!(self.problem.dim(dim.letter)));
        }
        for option in self.op.options().iter().filter(|option| Scope::Checked.has(option)) {
            let value = self.op.meant(self.problem, option.name);
            settings.insert(option.name.into(), json!(value));
        }
        settings
    }

    /// The program, exported unless it is kept already.
    ///
    /// # Errors
    /// There is no Python with `pallas_bridge`, or it refuses the config: what it says.
    pub(crate) fn export(&self, wanted: &Signature) -> Result<Exported> {
        let mut cell = Map::new();
        cell.insert("op".into(), json!(self.op));
        cell.insert("backend".into(), json!(self.backend));
        cell.insert("impl".into(), json!(self.implementation));
        cell.insert("topology".into(), json!(self.topology));
        for dim in self.op.dims() {
            cell.insert(dim.key.into(), json!(self.problem.dim(dim.letter)));
        }
        // Beside options that are keys of their own.
        let more = self.settings();
        cell.retain(|key, _| !more.contains_key(key));
        cell.insert("dtype".into(), json!(self.problem.dtype.name()));
        cell.insert("tile".into(), json!(self.tile));
        cell.insert("options".into(), json!(self.options));
        cell.extend(more);
        let (what_for, dense) = match programs(self.op.name()) {
            Some(_) => (name(&self.backend), ", or take the dense one with --impl reference"),
            None => (self.op.to_string(), ""),
        };
        let otherwise = format!(", or a program that was exported with --program FILE.json{dense}");
        let path = export(self.op.name(), cell, self.cache, &what_for, &otherwise)?;
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
        agree("op", &exported.op, self.op.name())?;
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
        if let Some(found) = &exported.settings {
            let wanted = self.settings();
            let mut options = found.clone();
            // Programs from before an operation had such a dim tell it by their arguments alone.
            for dim in self.op.dims().iter().filter(|dim| dim.like.is_some()) {
                options.entry(dim.key).or_insert_with(|| wanted[dim.key].clone());
            }
            ensure!(
                is_set(&options) == is_set(&wanted),
                "it is of {}; the config's is of {}",
                serde_json::to_string(found)?,
                serde_json::to_string(&wanted)?
            );
        }
        let options = Settings::from_json(Scope::Options, "options", self.op, &exported.options)?;
        let [found, wanted] = [&options, self.options].map(serde_json::to_string);
        let (found, wanted) = (found?, wanted?);
        ensure!(found == wanted, "its options are {found}; the config's are {wanted}");
        Ok(())
    }
}

/// What is neither absent nor nothing.
fn is_set(settings: &Map<String, Value>) -> Map<String, Value> {
    let mut set = settings.clone();
    set.retain(|_, value| !value.is_null() && *value != json!(0) && *value != json!(false));
    set.sort_keys();
    set
}

/// The tile that a program was made with; none where kernels of the operation have none.
pub(crate) fn tile(op: Op, exported: &Exported) -> Option<TileConfig> {
    let xentile_programs::exported::Tile { time_block, block_size } = exported.tile;
    (!op.facts().tile.is_empty()).then_some(TileConfig { time_block, block_size })
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

/// Exports the program of a config, unless it is kept already, and gives the path of its manifest. An error names what the
/// program is for, and what else there is.
///
/// # Errors
/// There is no Python with `pallas_bridge`, or it refuses the config: what it says.
pub(crate) fn export(
    op: &str,
    cell: Map<String, Value>,
    cache: Option<&Path>,
    what_for: &str,
    otherwise: &str,
) -> Result<PathBuf> {
    let mut cell = Value::Object(cell);
    let mut hasher = DefaultHasher::new();
    cell.to_string().hash(&mut hasher);
    let folder = folder(cache)?;
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make {} for exported programs", folder.display()))?;
    let stem = format!("{op}_{:016x}", hasher.finish());
    let path = folder.join(format!("{stem}.json"));
    cell["program"] = json!(path);
    // Configs have the endings of programs' other files, so that nothing else is named like them.
    let config = folder.join(format!("{stem}.config"));
    std::fs::write(&config, cell.to_string())
        .with_context(|| format!("cannot write {}", config.display()))?;
    let python = std::env::var_os(PYTHON).map(PathBuf::from).unwrap_or_else(|| {
        match std::env::var_os("VIRTUAL_ENV") {
            Some(environment) => Path::new(&environment).join("bin/python"),
            None => "python3".into(),
        }
    });
    let output = Command::new(&python)
        .args(["-m", "pallas_bridge.export", "--config"])
        .arg(&config)
        // It only traces: devices are of no use to it, and may be in use.
        .env("JAX_PLATFORMS", "cpu")
        .stdin(Stdio::null())
        .output();
    let missing = |what: &str| {
        format!(
            "{what}; kernels for {what_for} come from pallas_bridge: run `pip install \
             ./pallas_bridge` in a checkout of xentile, or name a Python that has it in \
             {PYTHON}{otherwise}"
        )
    };
    let output = match output {
        Ok(output) => output,
        Err(error) => bail!(missing(&format!("cannot run {}: {error}", python.display()))),
    };
    if output.status.success() {
        return Ok(path);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    match last.strip_prefix("error: ") {
        Some(reason) => bail!("{reason}"),
        None => bail!(missing(&format!("{} does not export: {last}", python.display()))),
    }
}

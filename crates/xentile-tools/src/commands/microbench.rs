//! `microbench`: times one implementation of an operation, or sweeps its tile or its budget.

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgMatches, Args, FromArgMatches, Parser, Subcommand};
use serde_yaml::Value;
use xentile::operation::{self, DimSpec, Section};
use xentile::{DType, operations};
use xentile_programs::Exported;

use crate::config::{self, Backend, Implementation, Op};
use crate::microbench::{Config, Logits, apart};
use crate::{cli, decode, microbench, presets, suite, sweep, tpu};

/// Times value_and_grad of the scalar loss against a copy measured in the same process.
///
/// Each measurement runs in its own process, so that its peak of memory is its own; a config with
/// several inputs or shapes prints a row for each. A flag overrides --set, which overrides the
/// config.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    measure: Measure,
}

#[derive(Subcommand)]
enum Command {
    /// Measures a grid of tiles, or a list of memory limits; writes a table and a plot, and keeps
    /// the best.
    Sweep(Sweep),
    /// Measures operations over lists of shapes, beside XLA's program; writes a table and a plot.
    Suite(Suite),
    /// Measures steps of a decoder: tokens and bytes a second, beside reading as many bytes.
    Decode(Decode),
}

/// Measures a grid of tiles, or a list of memory limits; writes a table and a plot, and keeps the
/// best.
#[derive(clap::Args)]
pub struct Sweep {
    /// YAML config of the sweep.
    #[arg(long, value_name = "FILE", required_unless_present = "preset")]
    config: Option<PathBuf>,
    /// A shipped config, instead of --config.
    #[arg(long, value_name = "NAME", conflicts_with = "config", value_parser = presets::parser("sweep"))]
    preset: Option<String>,
    /// Overrides a key of the config; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1..)]
    set: Vec<String>,
}

impl Sweep {
    /// Runs the sweep; returns its exit code.
    ///
    /// # Errors
    /// Bad input.
    pub fn run(&self) -> Result<u8> {
        let path = presets::choose("sweep", self.config.as_deref(), self.preset.as_deref())
            .context("no config: name one by --config or --preset")?;
        sweep::run(&path, &self.set)
    }
}

/// Measures operations over lists of shapes, beside XLA's program; writes a table and a plot.
#[derive(clap::Args)]
pub struct Suite {
    /// YAML config of the suite.
    #[arg(long, value_name = "FILE", required_unless_present = "preset")]
    config: Option<PathBuf>,
    /// A shipped config, instead of --config.
    #[arg(long, value_name = "NAME", conflicts_with = "config", value_parser = presets::parser("suite"))]
    preset: Option<String>,
    /// Overrides a key of the config, such as cell.backend=xla:cpu; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1..)]
    set: Vec<String>,
}

impl Suite {
    /// Runs the suite; returns its exit code.
    ///
    /// # Errors
    /// Bad input.
    pub fn run(&self) -> Result<u8> {
        let path = presets::choose("suite", self.config.as_deref(), self.preset.as_deref())
            .context("no config: name one by --config or --preset")?;
        suite::run(&path, &self.set)
    }
}

/// Measures steps of a decoder with random weights: tokens and bytes a second, beside reading as many
/// bytes.
#[derive(clap::Args)]
pub struct Decode {
    #[command(flatten)]
    config: decode::Config,
    /// Appends the result to FILE as one line of JSON; `-` prints that line and nothing else.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Decode {
    /// Measures, and prints what it finds; returns the exit code.
    ///
    /// # Errors
    /// Bad input.
    pub fn run(&self) -> Result<u8> {
        if let Some(path) = file_of(self.json.as_deref()) {
            check_json_file(path)?;
        }
        write_report(&decode::run(&self.config)?, self.json.as_deref())
    }
}

#[derive(clap::Args)]
struct Measure {
    /// YAML config of the measurement.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A shipped config, instead of --config.
    #[arg(long, value_name = "NAME", conflicts_with = "config", value_parser = presets::parser("microbench"))]
    preset: Option<String>,
    /// Overrides a key of the config, such as options.z_loss=1e-4; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1..)]
    set: Vec<String>,
    /// An operation, or a function that sets options of an operation, such as swiglu.
    #[arg(long, value_parser = op())]
    op: Option<Chosen>,
    /// The backend.
    #[arg(long)]
    backend: Option<Backend>,
    /// The implementation.
    #[arg(long = "impl")]
    implementation: Option<Implementation>,
    #[command(flatten)]
    extents: Extents,
    /// Dtype of arrays without a dtype of their own.
    #[arg(long, value_parser = dtype())]
    dtype: Option<DType>,
    /// Tokens per tile.
    #[arg(long)]
    time_block: Option<usize>,
    /// Vocabulary columns per tile.
    #[arg(long)]
    block_size: Option<usize>,
    /// Timed steps.
    #[arg(long)]
    iters: Option<usize>,
    /// Steps between the first call and the timed ones.
    #[arg(long)]
    warmup: Option<usize>,
    /// Steps that are started before the last of them is waited for; by default 1 on CPUs, else 10.
    #[arg(long, value_name = "STEPS")]
    in_flight: Option<usize>,
    /// Threads; 0 is one per core.
    #[arg(long)]
    threads: Option<usize>,
    /// Instruction set: amx_bf16, avx512_bf16, avx512, avx2, neon or portable; by default this
    /// processor's best.
    #[arg(long)]
    isa: Option<String>,
    /// The PJRT plug-in's file, for xla: backends; searched for by default.
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// TPUs to compile for, such as v6e:2x2; none need be present, and nothing runs.
    #[arg(long, value_name = "NAME")]
    topology: Option<String>,
    /// Manifest of a program that JAX exported, to run as the kernel; `{time_block}` and
    /// `{block_size}` in its name stand for the tile.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// The folder of compiled programs, for xla: backends; only these tools may write there.
    /// Default: XENTILE_CACHE, if set.
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// mean and sum run the fused schedule; none runs forward, then backward.
    #[arg(long, value_parser = reduction())]
    reduction: Option<&'static str>,
    /// The values of the first input.
    #[arg(long)]
    logits: Option<Logits>,
    /// Appends the result to FILE as one line of JSON; `-` prints that line and nothing else.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn dtype() -> impl TypedValueParser<Value = DType> {
    PossibleValuesParser::new(DType::ALL.map(DType::name)).try_map(|name| name.parse::<DType>())
}

/// What `--op` names: an operation, with the options that a function sets.
type Chosen = (Op, &'static [(&'static str, operation::Value)]);

fn op() -> impl TypedValueParser<Value = Chosen> {
    let functions = operations().iter().flat_map(|of| of.facts().functions).map(|of| of.name);
    let names: Vec<_> = Op::names().iter().copied().chain(functions).collect();
    PossibleValuesParser::new(names).map(|name| match Op::find_function(&name) {
        Some((op, function)) => (op, function.options),
        None => (Op::named(&name).unwrap_or_default(), &[][..]),
    })
}

/// Extents of dims, by their keys: a flag for each dim that some operation has.
#[derive(Clone, Debug, Default)]
struct Extents(Vec<(&'static str, usize)>);

impl Extents {
    /// The dims of all operations, each key once.
    fn dims() -> Vec<&'static DimSpec> {
        let mut dims: Vec<&DimSpec> = Vec::new();
        for dim in operations().iter().flat_map(|of| of.dims()) {
            if dims.iter().all(|known| known.key != dim.key) {
                dims.push(dim);
            }
        }
        dims
    }

    fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(known, _)| *known == key)
    }

    /// Sets the extents of a measurement.
    ///
    /// # Errors
    /// A dim that its operation has not.
    fn set(&self, config: &mut Config) -> Result<()> {
        for &(key, extent) in &self.0 {
            let known = config.op.dims();
            ensure!(
                known.iter().any(|dim| dim.key == key),
                "--{} is set, and op {} has no such dim: its dims are {}",
                flag(key),
                config.op,
                known.iter().map(|dim| dim.key).collect::<Vec<_>>().join(", ")
            );
            config.top.set(key, operation::Value::Integer(i64::try_from(extent)?));
        }
        Ok(())
    }
}

fn flag(key: &str) -> String {
    key.replace('_', "-")
}

impl Args for Extents {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.args(Self::dims().into_iter().map(|dim| {
            Arg::new(dim.key)
                .long(flag(dim.key))
                .value_name(dim.key.to_uppercase())
                .value_parser(clap::value_parser!(usize))
                .help(format!("{}, {}", dim.letter, dim.about))
        }))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Extents {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let extent = |dim: &DimSpec| Some((dim.key, *matches.get_one::<usize>(dim.key)?));
        Ok(Self(Self::dims().into_iter().filter_map(extent).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn reduction() -> impl TypedValueParser<Value = &'static str> {
    const WORDS: [&str; 3] = ["mean", "sum", "none"];
    PossibleValuesParser::new(WORDS)
        .map(|name| WORDS.into_iter().find(|word| *word == name).unwrap_or_default())
}

impl Measure {
    fn config(&self) -> Result<Config> {
        let config = self.over(Value::Null)?;
        match config.manifest()? {
            None => Ok(config),
            Some(path) => self.over(Config::base(&Exported::load(&path)?)?),
        }
    }

    /// The config on top of `base`: the file, then --set, then flags.
    fn over(&self, base: Value) -> Result<Config> {
        let path = presets::choose("microbench", self.config.as_deref(), self.preset.as_deref());
        let mut config: Config = match &path {
            Some(path) => config::parse_over(base, &config::read(path)?, &self.set)
                .with_context(|| format!("config {}", path.display()))?,
            None => config::parse_over(base, "{}", &self.set)?,
        };
        fn set<T: Clone>(key: &mut T, flag: &Option<T>) {
            if let Some(value) = flag {
                key.clone_from(value);
            }
        }
        if let Some((op, options)) = self.op {
            config.set_op(op);
            for &(name, value) in options {
                let is_on_top = op.option(name).is_some_and(|spec| spec.section == Section::Top);
                let settings = if is_on_top { &mut config.top } else { &mut config.options };
                settings.set(name, value);
            }
        }
        set(&mut config.backend, &self.backend);
        set(&mut config.implementation, &self.implementation);
        self.extents.set(&mut config)?;
        set(&mut config.dtype, &self.dtype);
        config.tile.time_block = self.time_block.or(config.tile.time_block);
        config.tile.block_size = self.block_size.or(config.tile.block_size);
        set(&mut config.iters, &self.iters);
        set(&mut config.warmup, &self.warmup);
        config.in_flight = self.in_flight.or(config.in_flight);
        set(&mut config.threads, &self.threads);
        config.isa = self.isa.clone().or(config.isa);
        config.plugin = self.plugin.clone().or(config.plugin);
        config.topology = self.topology.clone().or(config.topology);
        config.program = self.program.clone().or(config.program);
        config.cache = self.cache.clone().or(config.cache);
        if let Some(reduction) = self.reduction {
            config.options.set("reduction", operation::Value::Word(reduction));
        }
        set(&mut config.logits, &self.logits);
        Ok(config)
    }

    fn run(&self) -> Result<u8> {
        let config = self.config()?;
        if let Some(path) = file_of(self.json.as_deref()) {
            check_json_file(path)?;
        }
        if config.is_list() {
            return self.run_each(&config);
        }
        if let Some(topology) = &config.topology {
            config.validate()?;
            if let Some(code) = tpu::compile_apart(topology)? {
                return Ok(code);
            }
        }
        write_report(&microbench::run(&config)?, self.json.as_deref())
    }

    /// Every measurement of a list, a row each.
    fn run_each(&self, config: &Config) -> Result<u8> {
        for shape in &config.shapes {
            if let Some(key) = shape.keys().find(|key| self.extents.has(key)) {
                bail!("--{} is set, and shapes have {key} too; leave one out", flag(key));
            }
        }
        let all = config.each()?;
        let json = file_of(self.json.as_deref());
        let is_quiet = self.json.is_some() && json.is_none();
        let table = Table::new(config, &all);
        if !is_quiet {
            println!("{}", table.head());
        }
        for (index, one) in all.iter().enumerate() {
            let report =
                apart::measured(one).with_context(|| format!("measurement {}", index + 1))?;
            let line = json_line(&report)?;
            match json {
                None if is_quiet => std::io::stdout().write_all(&line)?,
                None => println!("{}", table.row(&report)),
                Some(path) => {
                    append(path, &line)
                        .with_context(|| format!("cannot write --json {}", path.display()))?;
                    println!("{}", table.row(&report));
                }
            }
        }
        Ok(cli::PASSED)
    }
}

/// The file that --json names, unless that is `-`.
fn file_of(json: Option<&Path>) -> Option<&Path> {
    json.filter(|path| *path != Path::new("-"))
}

/// Prints a report, as a line of JSON where --json is `-`, and appends that line to the file that --json names.
fn write_report(report: &(impl serde::Serialize + Display), json: Option<&Path>) -> Result<u8> {
    let mut stdout = std::io::stdout().lock();
    match file_of(json) {
        None if json.is_some() => stdout.write_all(&json_line(report)?),
        None => write!(stdout, "{report}"),
        Some(path) => {
            append(path, &json_line(report)?)
                .with_context(|| format!("cannot write --json {}", path.display()))?;
            write!(stdout, "{report}")
        }
    }
    .context("cannot write to standard output")?;
    Ok(cli::PASSED)
}

/// Checks the path of --json before the measurement.
fn check_json_file(path: &Path) -> Result<()> {
    let shown = path.display();
    ensure!(!path.is_dir(), "--json {shown} is a directory; name a file in it");
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = parent.unwrap_or(Path::new("."));
    ensure!(folder.is_dir(), "--json {shown}: {} is not a directory; make it", folder.display());
    Ok(())
}

/// The table of a list: what differs, and what was found.
struct Table {
    /// Extents, then the distribution, as wide as the widest.
    columns: Vec<(&'static str, usize)>,
}

/// The columns of results: key in the report, head, and digits.
const FIGURES: [(&str, &str, usize); 5] = [
    ("median_step_ms", "step ms", 4),
    ("copy_ms", "copy ms", 4),
    ("ratio_to_copy", "copies", 3),
    ("gflop_per_s", "GFLOP/s", 1),
    ("loss", "loss", 4),
];

impl Table {
    fn new(config: &Config, all: &[Config]) -> Self {
        let mut columns: Vec<_> = config.op.dims().iter().map(|dim| (dim.key, 8)).collect();
        let widest = all.iter().map(|one| one.distribution().len()).max().unwrap_or(0);
        columns.push(("distribution", widest.max(12)));
        Self { columns }
    }

    fn head(&self) -> String {
        let named = self.columns.iter().map(|(name, width)| format!("{name:width$}"));
        let figures = FIGURES.iter().map(|(_, head, _)| format!("{head:>9}"));
        named.chain(figures).collect::<Vec<_>>().join("  ")
    }

    fn row(&self, report: &serde_json::Value) -> String {
        let named = self.columns.iter().map(|(name, width)| {
            let value = match &report[*name] {
                serde_json::Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            format!("{value:width$}")
        });
        let figures = FIGURES.iter().map(|(key, _, digits)| match report[*key].as_f64() {
            Some(figure) => format!("{figure:>9.digits$}"),
            None => format!("{:>9}", "-"),
        });
        named.chain(figures).collect::<Vec<_>>().join("  ")
    }
}

fn json_line(report: &impl serde::Serialize) -> Result<Vec<u8>> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    Ok(line)
}

/// One write, so that lines of processes that share a file do not mix.
fn append(path: &Path, line: &[u8]) -> std::io::Result<()> {
    std::fs::OpenOptions::new().append(true).create(true).open(path)?.write_all(line)
}

/// Runs the command; returns its exit code.
///
/// # Errors
/// Bad input.
pub fn run(arguments: &Arguments) -> Result<u8> {
    match &arguments.command {
        Some(Command::Sweep(sweep)) => sweep.run(),
        Some(Command::Suite(suite)) => suite.run(),
        Some(Command::Decode(decode)) => decode.run(),
        None => arguments.measure.run(),
    }
}

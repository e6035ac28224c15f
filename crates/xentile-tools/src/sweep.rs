//! Measures a grid of tiles, or of budgets, one process a cell, and keeps what was found.

mod tables;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use pjrt_client::Platform;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use serde_yaml::Mapping;
use xentile::TunedTile;
use xentile::operation::{ArraySpec, Cost, Problem};
use xentile_programs::programs;

use crate::cli;
use crate::config::{self, Backend, Implementation, Schema, Scope, Taken, TileConfig, name};
use crate::draft::{Draft, write_whole};
use crate::estimate::{Binds, Floor};
use crate::machine::Machine;
use crate::memory;
use crate::microbench;
use crate::plot::{Figure, Panel, Series};

/// A grid to measure: of tiles or, where an operation plans what it holds, of budgets.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Tokens a tile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub time_blocks: Vec<usize>,
    /// Vocabulary columns a tile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub block_sizes: Vec<usize>,
    /// What may be held beyond operands and results; none is the operation's own choice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub max_scratch_bytes: Vec<Option<usize>>,
    /// How often the grid is gone through. Of each cell the round of the median step time is kept, so
    /// that what else a machine does for a while is not taken for a tile's.
    #[serde(default = "once")]
    pub rounds: usize,
    /// Where results go; `benches/results/<processor>/<name of the config>` where absent.
    #[serde(default)]
    pub out: Option<PathBuf>,
    /// Whether the best tile becomes the default for this dtype and vocabulary.
    #[serde(default)]
    pub update_tuned: bool,
    /// Where the default tiles are.
    #[serde(default = "default_tuned_dir")]
    pub tuned_dir: PathBuf,
    /// What is measured in every cell.
    #[serde(default)]
    pub cell: microbench::Config,
}

fn default_tuned_dir() -> PathBuf {
    "configs/tuned".into()
}

fn once() -> usize {
    1
}

/// What a sweep varies, beside others perhaps.
struct Axis {
    /// The key of its values in the sweep's config.
    list: &'static str,
    /// The name of one value.
    name: &'static str,
    /// The key of one value in a cell's config.
    key: &'static str,
    /// None is the operation's own choice.
    values: Vec<Option<usize>>,
}

/// A cell's value on every axis.
type Index = Vec<Option<usize>>;

/// A value as configs have it.
fn shown(value: Option<usize>) -> String {
    value.map_or_else(|| "null".to_owned(), |value| value.to_string())
}

/// The names and values of a place.
fn told(axes: &[Axis], place: &Index) -> String {
    let values = axes.iter().zip(place);
    values
        .map(|(axis, &value)| format!("{} {}", axis.name, shown(value)))
        .collect::<Vec<_>>()
        .join(" ")
}

impl Config {
    /// Whether the operation has a budget to vary.
    fn has_budgets(&self) -> bool {
        self.cell.op.option("max_scratch_bytes").is_some_and(|option| option.is_swept)
    }

    /// Whether it is of budgets, and of tiles if not.
    fn is_of_budgets(&self) -> bool {
        let has_tiles = !(self.time_blocks.is_empty() && self.block_sizes.is_empty());
        self.has_budgets() && !has_tiles
    }

    /// Whether programs of the operation come from JAX.
    fn is_exported(&self) -> bool {
        programs(self.cell.op.name()).is_none()
    }

    /// What the sweep varies: what goes across the plot first.
    fn axes(&self) -> Vec<Axis> {
        if self.is_of_budgets() {
            return vec![Axis {
                list: "max_scratch_bytes",
                name: "max_scratch_bytes",
                key: "max_scratch_bytes",
                values: self.max_scratch_bytes.clone(),
            }];
        }
        let extents = |list: &[usize]| list.iter().copied().map(Some).collect();
        vec![
            Axis {
                list: "time_blocks",
                name: "time_block",
                key: "tile.time_block",
                values: extents(&self.time_blocks),
            },
            Axis {
                list: "block_sizes",
                name: "block_size",
                key: "tile.block_size",
                values: extents(&self.block_sizes),
            },
        ]
    }

    fn validate(&self) -> Result<()> {
        let (axes, is_of_budgets) = (self.axes(), self.is_of_budgets());
        ensure!(
            is_of_budgets || self.max_scratch_bytes.is_empty(),
            "max_scratch_bytes is set; a sweep of {} varies time_blocks and block_sizes{}",
            self.cell.op,
            if self.has_budgets() { ", or max_scratch_bytes alone" } else { "" }
        );
        ensure!(
            is_of_budgets || !self.cell.op.tile().is_empty(),
            "op {} has no tile to vary; measure it without a sweep",
            self.cell.op
        );
        ensure!(self.rounds >= 1, "rounds is 0; it must be at least 1");
        for Axis { list, values, .. } in &axes {
            ensure!(!values.is_empty(), "{list} is empty; list at least one value");
            for (index, &value) in values.iter().enumerate() {
                ensure!(
                    !values[..index].contains(&value),
                    "{list} lists {} twice; remove one",
                    shown(value)
                );
            }
        }
        let (varied, is_set) = match is_of_budgets {
            false => ("tile", self.cell.tile != TileConfig::default()),
            true => ("max_scratch_bytes", self.cell.top.get("max_scratch_bytes").is_some()),
        };
        ensure!(!is_set, "cell.{varied} is what the sweep varies; remove it");
        ensure!(
            self.cell.implementation == Implementation::Kernel,
            "cell.impl is {}, which has no {varied}; set it to kernel",
            name(&self.cell.implementation)
        );
        ensure!(
            !self.is_exported() || self.cell.program.is_none(),
            "cell.program is set, which is of one {}; remove it, and each cell exports its own",
            if is_of_budgets { "budget" } else { "tile" }
        );
        self.cell.validate().context("cell")?;
        if self.update_tuned {
            ensure!(
                !is_of_budgets,
                "update_tuned is true; a sweep of max_scratch_bytes has no tile to tune: set \
                 update_tuned to false"
            );
            // Elsewhere nothing reads one.
            ensure!(
                !self.is_exported() || self.cell.backend == Backend::XlaCpu,
                "update_tuned is true, and cell.backend is {}; {} has tuned tiles on xla:cpu alone: \
                 set update_tuned to false",
                name(&self.cell.backend),
                self.cell.op
            );
            ensure!(
                self.cell.topology.is_none(),
                "update_tuned is true, and cell.topology is set: without step times no tile is the \
                 best; set update_tuned to false"
            );
            ensure!(
                self.tuned_dir.is_dir(),
                "tuned_dir {} is not a directory; start from the repository root, or name one, or \
                 set update_tuned to false",
                self.tuned_dir.display()
            );
            read_tuned(&self.tuned_file())?;
        }
        Ok(())
    }

    fn tuned_file(&self) -> PathBuf {
        // The kernels of `xla:cpu` are those of `cpu`, and so is their tile.
        let kernels = self.cell.backend.platform().map_or("cpu", Platform::name);
        let table = format!("{}.{kernels}.yaml", self.cell.op);
        self.tuned_dir.join(table)
    }
}

impl Schema for Config {
    fn take(tree: &mut Mapping) -> Result<Taken> {
        match tree.get_mut("cell") {
            Some(serde_yaml::Value::Mapping(cell)) => Taken::out_of(cell, Scope::Measured, "cell."),
            _ => Ok(Taken::default()),
        }
    }

    fn put(&mut self, taken: Taken) {
        self.cell.put(taken);
    }
}

/// What a cell's process reports, of which the tables use some.
#[derive(Clone, Debug, Deserialize)]
struct Measured {
    first_call_s: Option<f64>,
    compile_s: Option<f64>,
    avg_step_ms: Option<f64>,
    median_step_ms: Option<f64>,
    min_step_ms: Option<f64>,
    std_step_ms: Option<f64>,
    copy_ms: Option<f64>,
    ratio_to_copy: Option<f64>,
    gb_per_s: Option<f64>,
    copy_gb_per_s: Option<f64>,
    gflop_per_s: Option<f64>,
    exported: Option<Exported>,
    mem_after_run: RunMemory,
    compiled: Option<ProgramMemory>,
    schedule: Option<Bundles>,
    estimate: Option<Estimated>,
}

#[derive(Clone, Debug, Deserialize)]
struct Exported {
    plan: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Bundles {
    bundles: u64,
    slots_used: BTreeMap<String, u64>,
    computations: Vec<Part>,
}

#[derive(Clone, Debug, Deserialize)]
struct Part {
    vmem_bytes: Option<u64>,
}

/// What is estimated of a cell that was compiled and not run.
#[derive(Clone, Debug, Deserialize)]
struct Estimated {
    kernels: Vec<EstimatedKernel>,
    step_ms: f64,
    floor: Floor,
    floor_ms: f64,
    ratio_to_floor: f64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct EstimatedKernel {
    tile_dma_us: Option<f64>,
    tile_schedule_us: Option<f64>,
    dma_ms: f64,
    schedule_ms: f64,
    binds: Binds,
}

impl Estimated {
    fn sum(&self, of: impl Fn(&EstimatedKernel) -> f64) -> f64 {
        self.kernels.iter().map(of).sum()
    }

    /// What the kernels wait for, of each that differs.
    fn binds(&self) -> String {
        let mut names: Vec<_> = self.kernels.iter().map(|kernel| kernel.binds.name()).collect();
        names.dedup();
        names.join(" and ")
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct RunMemory {
    peak_resident_bytes: Option<u64>,
    bytes_in_use: Option<u64>,
    peak_bytes_in_use: Option<u64>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct ProgramMemory {
    peak_bytes: Option<u64>,
    argument_bytes: Option<u64>,
    output_bytes: Option<u64>,
    temporary_bytes: Option<u64>,
    alias_bytes: Option<u64>,
    code_bytes: Option<u64>,
}

impl Measured {
    /// The most that a part of the program holds of VMEM; none where that is not told.
    fn vmem_bytes(&self) -> Option<u64> {
        self.schedule.as_ref()?.computations.iter().filter_map(|part| part.vmem_bytes).max()
    }
}

impl ProgramMemory {
    /// All that the program holds at once; none where any part is not told.
    fn bytes(self) -> Option<u64> {
        let all = self.argument_bytes? + self.output_bytes? + self.temporary_bytes?;
        Some(all.saturating_sub(self.alias_bytes.unwrap_or(0)))
    }
}

/// A figure of a cell's memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Memory {
    /// The most that was in use on the device.
    DevicePeak,
    /// What was in use on the device at the end.
    DeviceInUse,
    /// What the compiler says that the program holds.
    Program,
    /// The part of that which is neither argument nor result.
    Temporaries,
    /// The most that the process held.
    Process,
}

impl Memory {
    /// All that is held, from what says most of the program to what says least.
    const WHOLE: [Self; 4] = [Self::DevicePeak, Self::DeviceInUse, Self::Program, Self::Process];

    /// As the plot has it.
    fn label(self) -> &'static str {
        match self {
            Self::DevicePeak => "device memory, peak in use",
            Self::DeviceInUse => "device memory, in use after the run",
            Self::Program => "arguments, results, temporaries",
            Self::Temporaries => "temporaries",
            Self::Process => "process's memory, peak",
        }
    }

    fn of(self, cell: &Measured) -> Option<u64> {
        match self {
            Self::DevicePeak => cell.mem_after_run.peak_bytes_in_use,
            Self::DeviceInUse => cell.mem_after_run.bytes_in_use,
            Self::Program => cell.compiled.and_then(ProgramMemory::bytes),
            Self::Temporaries => cell.compiled?.temporary_bytes,
            Self::Process => cell.mem_after_run.peak_resident_bytes,
        }
    }
}

/// One cell: what its process said, or why it said nothing.
struct Row {
    place: Index,
    outcome: Result<(Measured, Value), String>,
}

impl Row {
    fn measured(&self) -> Option<&Measured> {
        self.outcome.as_ref().ok().map(|(measured, _)| measured)
    }
}

/// Runs the sweep of the config at `path`, overridden by `sets`. The code is that of the process:
/// [`cli::PASSED`], or [`cli::FAILED`] where a cell failed.
///
/// # Errors
/// The config is bad, or the results cannot be written.
pub fn run(path: &Path, sets: &[String]) -> Result<u8> {
    let config: Config = config::load(path, sets)?;
    config.validate().with_context(|| format!("config {}", path.display()))?;
    let machine = Machine::current();
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let out = config
        .out
        .clone()
        .unwrap_or_else(|| Path::new("benches/results").join(slug(&machine.processor)).join(&stem));
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;

    let axes = config.axes();
    let rows = measure(&config, &axes, &out)?;
    let sweep = Sweep { config: &config, axes: &axes, machine: &machine, rows: &rows };
    sweep.write(&out)?;
    println!("wrote {}/sweep.{{csv,json,md,svg,png}}", out.display());
    if let Some((row, best)) = sweep.best() {
        println!("{}", sweep.best_told(row, best));
        if config.update_tuned {
            let file = config.tuned_file();
            sweep.update_tuned(&file, row)?;
            println!("wrote {}; the next build takes its default tile from it", file.display());
        }
    }
    let failed = rows.iter().filter(|row| row.outcome.is_err()).count();
    if failed > 0 {
        eprintln!("{failed} of {} cells failed", rows.len());
        return Ok(cli::FAILED);
    }
    Ok(cli::PASSED)
}

/// `name` in lower case with `-` for whatever does not belong in a file name.
fn slug(name: &str) -> String {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
}

/// A number for people.
fn figure(number: Option<f64>, digits: usize) -> String {
    number.map_or("not told".to_owned(), |number| format!("{number:.digits$}"))
}

fn measure(config: &Config, axes: &[Axis], out: &Path) -> Result<Vec<Row>> {
    // Never finished: it is there for the cells alone.
    let cell = Draft::new(&out.join("cell.yaml")).context("cannot write the cell's config")?;
    let text = serde_yaml::to_string(&config.cell).context("cannot write the cell's config")?;
    fs::write(cell.path(), text)
        .with_context(|| format!("cannot write {}", cell.path().display()))?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;

    let grid = axes.iter().fold(vec![Index::new()], |places, axis| {
        let beside = |place: &Index| {
            let all = axis.values.iter().map(|&value| [&place[..], &[value]].concat());
            all.collect::<Vec<_>>()
        };
        places.iter().flat_map(beside).collect()
    });
    let mut progress = Progress::new(grid.len() * config.rounds);
    let mut found: Vec<_> = grid.iter().map(|_| Vec::with_capacity(config.rounds)).collect();
    for _ in 0..config.rounds {
        for (place, rounds) in grid.iter().zip(&mut found) {
            let named = told(axes, place);
            progress.begin(&named);
            let set = |(axis, &value): (&Axis, _)| format!("{}={}", axis.key, shown(value));
            let sets: Vec<_> = axes.iter().zip(place).map(set).collect();
            let outcome = run_cell(&program, cell.path(), &sets);
            let row = Row {
                place: place.clone(),
                outcome: outcome.map_err(|error| format!("{error:#}")),
            };
            progress.end(&named, &row);
            rounds.push(row);
        }
    }
    progress.finish();
    Ok(found.into_iter().filter_map(of_rounds).collect())
}

/// The round of a cell to keep: one that failed, else that of the median step time.
fn of_rounds(mut rounds: Vec<Row>) -> Option<Row> {
    let median = |row: &Row| row.measured().map(|measured| measured.median_step_ms);
    // Failures first, as nothing is less than something.
    rounds.sort_by(|a, b| median(a).partial_cmp(&median(b)).unwrap_or(Ordering::Equal));
    let has_failed = rounds.first().is_some_and(|row| row.outcome.is_err());
    let kept = if has_failed { 0 } else { rounds.len() / 2 };
    rounds.into_iter().nth(kept)
}

fn run_cell(program: &Path, cell: &Path, sets: &[String]) -> Result<(Measured, Value)> {
    let output = Command::new(program)
        .arg("--config")
        .arg(cell)
        .arg("--set")
        .args(sets)
        .args(["--json", "-"])
        .stdin(Stdio::null())
        .output()
        .context("cannot start the cell's process")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        match stderr.lines().rfind(|line| !line.trim().is_empty()) {
            Some(line) if output.status.code().is_some() => {
                bail!("{}", line.strip_prefix("error: ").unwrap_or(line))
            }
            _ => bail!("the cell's process ended with {}", output.status),
        }
    }
    for warning in stderr.lines().filter(|line| line.starts_with("warning: ")) {
        eprintln!("{warning}");
    }
    let mut value: Value =
        serde_json::from_slice(&output.stdout).context("the cell's report is not JSON")?;
    let measured = Measured::deserialize(&value).context("the cell's report is incomplete")?;
    if let Some(report) = value.as_object_mut() {
        // Both are the sweep's own, told once for all rows.
        report.shift_remove("machine");
        report.shift_remove("config");
    }
    Ok((measured, value))
}

/// Where the sweep stands: a bar on a terminal, a line a cell elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
    cells: usize,
    done: usize,
    start: Instant,
}

impl Progress {
    fn new(cells: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(cells as u64);
            let template = "{bar:30} {pos}/{len} cells, about {eta} left, {msg}";
            bar.set_style(
                ProgressStyle::with_template(template)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        Self { bar, cells, done: 0, start: Instant::now() }
    }

    fn begin(&self, place: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(place.to_owned());
        }
    }

    fn end(&mut self, place: &str, row: &Row) {
        self.done += 1;
        let told = match &row.outcome {
            Ok((measured, _)) => match measured.median_step_ms {
                Some(ms) => format!("{ms:.3} ms"),
                None => {
                    let estimate = measured.estimate.as_ref().map(|estimate| estimate.step_ms);
                    let estimate = estimate
                        .map_or(String::new(), |ms| format!(", a step estimated at {ms:.3} ms"));
                    format!("compiled in {} s{estimate}", figure(measured.compile_s, 3))
                }
            },
            Err(reason) => format!("failed: {reason}"),
        };
        let (done, cells) = (self.done, self.cells);
        let cell = format!("{place}: {told}");
        if let Some(bar) = &self.bar {
            if row.outcome.is_err() {
                bar.println(cell);
            }
            bar.inc(1);
        } else {
            let each = self.start.elapsed().as_secs_f64() / done as f64;
            let left = each * (cells - done) as f64;
            eprintln!("[{done}/{cells}] {cell}; about {left:.0} s left");
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A sweep that has been run.
struct Sweep<'a> {
    config: &'a Config,
    axes: &'a [Axis],
    machine: &'a Machine,
    rows: &'a [Row],
}

impl Sweep<'_> {
    /// The smallest tile or budget among those within a hundredth of the quickest: nearer than that,
    /// noise decides.
    fn best(&self) -> Option<(&Row, &Measured)> {
        let cells = || {
            let cells = self.rows.iter().filter_map(|row| Some((row, row.measured()?)));
            cells.filter_map(|(row, measured)| Some((row, measured, measured.median_step_ms?)))
        };
        let quickest = cells().map(|(.., ms)| ms).min_by(f64::total_cmp)?;
        cells()
            .filter(|(.., ms)| *ms <= 1.01 * quickest)
            // What is set says more than what is not.
            .min_by_key(|(row, ..)| {
                row.place.iter().map(|value| value.unwrap_or(usize::MAX) as u128).product::<u128>()
            })
            .map(|(row, measured, _)| (row, measured))
    }

    /// A line for people.
    fn best_told(&self, row: &Row, best: &Measured) -> String {
        let copies =
            best.ratio_to_copy.map_or(String::new(), |ratio| format!(", {ratio:.2} copies"));
        let place = told(self.axes, &row.place);
        format!("best: {place}: {} ms{copies}", figure(best.median_step_ms, 3))
    }

    /// The cells' common ceiling: the median of their copies.
    fn copy_ms(&self) -> Option<f64> {
        let mut copies: Vec<_> =
            self.rows.iter().filter_map(|row| row.measured()?.copy_ms).collect();
        copies.sort_by(f64::total_cmp);
        copies.get(copies.len() / 2).copied()
    }

    /// Whether the programs were compiled and none ran.
    fn is_compiled(&self) -> bool {
        self.config.cell.topology.is_some()
    }

    /// What every cell is asked for, and what a step of it cannot take less than.
    fn problem(&self) -> Option<(Problem, Cost)> {
        let problem = self.config.cell.problem().ok()?;
        let cost = self.config.cell.op.cost(&problem);
        Some((problem, cost))
    }

    fn kind(&self) -> tables::Kind {
        tables::Kind {
            of_products: self.problem().is_some_and(|(_, cost)| cost.flops > 0),
            is_compiled: self.is_compiled(),
        }
    }

    /// The first operand, and its bytes.
    fn first_operand(&self) -> Option<(&'static str, u64)> {
        let (problem, _) = self.problem()?;
        let op = self.config.cell.op;
        let operands = op.signature(&problem, op.whole(&problem)).operands;
        let first: &ArraySpec = operands.first()?;
        Some((first.name, first.bytes(&problem)?))
    }

    /// Operation, shape and dtype.
    fn title(&self) -> String {
        let cell = &self.config.cell;
        let topology = cell.topology.as_ref();
        let topology = topology.map_or(String::new(), |name| format!(", compiled for {name}"));
        let operands =
            self.problem().map_or(String::new(), |(problem, _)| cell.op.shape(&problem, None));
        let (op, backend) = (cell.op, name(&cell.backend));
        format!("{op} on {backend}{topology}, {operands} {}", cell.dtype)
    }

    /// Writes every file under another name first, so that none is ever half there, and a sweep
    /// that cannot be drawn replaces nothing.
    fn write(&self, out: &Path) -> Result<()> {
        let figure = self.figure();
        let texts = [
            ("sweep.csv", self.csv()),
            ("sweep.json", self.json()?),
            ("sweep.md", self.markdown()),
            ("sweep.svg", figure.svg()?),
        ];
        let cannot = |name: &str| format!("cannot write {}", out.join(name).display());
        let draft = |name: &str| Draft::new(&out.join(name)).with_context(|| cannot(name));
        let mut drafts = Vec::new();
        for (name, text) in texts {
            let draft = draft(name)?;
            fs::write(draft.path(), text).with_context(|| cannot(name))?;
            drafts.push((name, draft));
        }
        let picture = draft("sweep.png")?;
        figure.write_png(picture.path()).with_context(|| cannot("sweep.png"))?;
        drafts.push(("sweep.png", picture));
        for (name, draft) in drafts {
            draft.finish().with_context(|| cannot(name))?;
        }
        Ok(())
    }

    fn csv(&self) -> String {
        let columns = tables::csv(self.kind());
        let heads = columns.iter().map(|column| column.0);
        let axes = self.axes.iter().map(|axis| axis.name);
        let heads: Vec<_> = axes.chain(["status"]).chain(heads).chain(["error"]).collect();
        let mut csv = heads.join(",") + "\n";
        for row in self.rows {
            let (status, error) = match &row.outcome {
                Ok(_) => ("ok", String::new()),
                Err(reason) => ("failed", tables::quoted(reason)),
            };
            let says = |(_, of): &tables::Column| row.measured().map_or(String::new(), of);
            let mut cells: Vec<_> = row.place.iter().copied().map(shown).collect();
            cells.push(status.to_owned());
            cells.extend(columns.iter().map(says));
            cells.push(error);
            csv += &(cells.join(",") + "\n");
        }
        csv
    }

    fn json(&self) -> Result<String> {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                let (report, error) = match &row.outcome {
                    Ok((_, report)) => (Some(report), None),
                    Err(reason) => (None, Some(reason)),
                };
                self.at(row, json!({"error": error, "report": report}))
            })
            .collect();
        let best = self
            .best()
            .map(|(row, best)| self.at(row, json!({"median_step_ms": best.median_step_ms})));
        let all =
            json!({"machine": self.machine, "config": self.config, "best": best, "rows": rows});
        Ok(serde_json::to_string_pretty(&all)? + "\n")
    }

    /// `said` of a row, behind its place.
    fn at(&self, row: &Row, said: Value) -> Value {
        let place = self.axes.iter().zip(&row.place);
        let mut all: Map<_, _> =
            place.map(|(axis, value)| (axis.name.to_owned(), json!(value))).collect();
        all.extend(said.as_object().cloned().unwrap_or_default());
        all.into()
    }

    fn markdown(&self) -> String {
        let machine = self.machine;
        let mut table = format!(
            "# {}\n\n{}, {} cores, {}; xentile {} at {}, {}.\n\n",
            self.title(),
            machine.processor,
            machine.cores,
            machine.platform,
            machine.xentile,
            machine.commit,
            machine.rustc
        );
        if self.is_compiled() {
            table += tables::NOTHING_RAN;
        }
        let columns = tables::markdown(self.kind());
        let heads = columns.iter().map(|column| column.0);
        let heads: Vec<_> = self.axes.iter().map(|axis| axis.name).chain(heads).collect();
        _ = writeln!(table, "| {} |", heads.join(" | "));
        // The last column has the errors, too.
        _ = writeln!(table, "|{} --- |", " ---: |".repeat(heads.len() - 1));
        let best = self.best().map(|(row, _)| &row.place);
        for row in self.rows {
            let mut cells: Vec<_> = match &row.outcome {
                Ok((measured, _)) => columns.iter().map(|(_, of)| of(measured)).collect(),
                Err(reason) => {
                    let mut cells = vec![String::new(); columns.len()];
                    cells[columns.len() - 1] = reason.replace('|', "\\|");
                    cells[0] = "failed".to_owned();
                    cells
                }
            };
            if best == Some(&row.place) {
                cells[0] = format!("**{}**", cells[0]);
            }
            let cells = row.place.iter().copied().map(shown).chain(cells);
            // An empty cell is a space wide.
            let cells = cells.map(|cell| if cell.is_empty() { cell } else { format!(" {cell}") });
            _ = writeln!(table, "|{} |", cells.collect::<Vec<_>>().join(" |"));
        }
        table
    }

    fn figure(&self) -> Figure {
        let compiled = self.is_compiled();
        let is_budget = self.config.is_of_budgets();
        // Where nothing ran, there is an estimate at most.
        let height = |m: &Measured| match compiled {
            false => m.median_step_ms,
            true => Some(m.estimate.as_ref()?.step_ms),
        };
        let best = self.best();
        let device = format!("{}, {} cores", self.machine.processor, self.machine.cores);
        let found = best.map(|(row, best)| self.best_told(row, best));
        let time =
            Panel {
                y_label: match compiled {
                    true => "step time, estimated and not measured (ms)".to_owned(),
                    false => "step time, median (ms)".to_owned(),
                },
                series: self.lines(height),
                level: match compiled {
                    true => self.rows.iter().find_map(|row| row.measured()?.estimate.as_ref()).map(
                        |of| (of.floor_ms, format!("{}: {:.2} ms", of.floor.name(), of.floor_ms)),
                    ),
                    false if is_budget => self.without_budget(height, "ms"),
                    false => self
                        .copy_ms()
                        .zip(self.first_operand())
                        .map(|(ms, (name, _))| (ms, format!("copy of the {name}: {ms:.2} ms"))),
                },
                mark: best.and_then(|(row, best)| Some((row.place[0]?, best.median_step_ms?))),
            };
        let memory = self.memory_panel(&Memory::WHOLE);
        let panels = match self.kind().of_products {
            false => vec![time, memory],
            true => vec![time, self.memory_panel(&[Memory::Temporaries]), memory],
        };
        Figure {
            title: self.title(),
            subtitles: [Some(device), found].into_iter().flatten().collect(),
            x_label: match is_budget {
                false => "time_block (tokens a tile)".to_owned(),
                true => "max_scratch_bytes".to_owned(),
            },
            x_text: match is_budget {
                false => |x| x.to_string(),
                true => |x| memory::human(x as u64),
            },
            legend: self.axes.get(1).map_or("", |axis| axis.name).to_owned(),
            panels,
        }
    }

    /// A figure of every cell over the first axis, a line a value of the second where there is one.
    fn lines(&self, figure: impl Fn(&Measured) -> Option<f64>) -> Vec<Series> {
        let line = |place: Option<Option<usize>>| {
            let rows = self.rows.iter().filter(|row| row.place.get(1).copied() == place);
            // Budgets below the least lie far below, where the axis would show little else.
            let rows = rows.filter(|row| place.is_some() || row.measured().is_some());
            let mut points: Vec<_> = rows
                .filter_map(|row| Some((row.place[0]?, row.measured().and_then(&figure))))
                // A logarithmic axis has no 0.
                .filter(|&(across, _)| across > 0)
                .collect();
            points.sort_by_key(|point| point.0);
            Series { name: place.map_or(String::new(), shown), points }
        };
        match self.axes.get(1) {
            None => vec![line(None)],
            Some(axis) => axis.values.iter().map(|&value| line(Some(value))).collect(),
        }
    }

    /// A figure of the cell whose budget is the operation's own choice, to hold the others against.
    fn without_budget(
        &self,
        figure: impl Fn(&Measured) -> Option<f64>,
        unit: &str,
    ) -> Option<(f64, String)> {
        let row = self.rows.iter().find(|row| row.place == [None])?;
        let value = figure(row.measured()?)?;
        Some((value, format!("without a budget: {value:.2} {unit}")))
    }

    /// The first of `figures` that any cell tells, beside what logits and gradient alone take or the
    /// cell without a budget.
    fn memory_panel(&self, figures: &[Memory]) -> Panel {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let told = |figure: &Memory| {
            self.rows.iter().any(|row| row.measured().is_some_and(|m| figure.of(m).is_some()))
        };
        let Some(figure) = figures.iter().copied().find(told) else {
            let y_label = "memory: not told".to_owned();
            return Panel { y_label, series: self.lines(|_| None), level: None, mark: None };
        };
        let has_gaps = self.rows.iter().filter_map(Row::measured).any(|m| figure.of(m).is_none());
        let gaps = if has_gaps { "; gaps: not told" } else { "" };
        let height = |m: &Measured| figure.of(m).map(mib);
        let level = match self.kind().of_products {
            false => self.first_operand().map(|(name, bytes)| {
                let least = mib(2 * bytes);
                (least, format!("{name} and gradient: {least:.1} MiB"))
            }),
            true => self.without_budget(height, "MiB"),
        };
        Panel {
            y_label: format!("{} (MiB{gaps})", figure.label()),
            series: self.lines(height),
            level,
            mark: None,
        }
    }

    /// The extent that the last extent of a tile cuts, which tuned tiles are found by.
    fn columns(&self) -> Option<usize> {
        let (problem, _) = self.problem()?;
        Some(problem.dim(self.config.cell.op.tile().last()?.letter))
    }

    /// Puts the tile of `best` into `file` in the place of the one for the same dtype and vocabulary.
    fn update_tuned(&self, file: &Path, best: &Row) -> Result<()> {
        let cell = &self.config.cell;
        let [Some(time_block), Some(block_size)] = best.place[..] else {
            bail!("the best cell names no tile");
        };
        let tile = TunedTile {
            dtype: cell.dtype.name().to_owned(),
            vocab: self.columns().context("the cell names no extent that tiles cut")?,
            time_block,
            block_size,
            device: self.machine.processor.clone(),
            pass: None,
            warps: None,
            cluster: None,
        };
        let mut tiles = read_tuned(file)?;
        let same = |old: &&mut TunedTile| {
            (&old.dtype, old.vocab, &old.pass) == (&tile.dtype, tile.vocab, &tile.pass)
        };
        match tiles.iter_mut().find(same) {
            Some(old) => *old = tile,
            None => tiles.push(tile),
        }
        let mut text = String::new();
        for TunedTile { dtype, vocab, time_block, block_size, device, pass, warps, cluster } in
            tiles
        {
            // A JSON string is a YAML one, whatever the processor is called.
            let device = Value::from(device);
            let gpu: String = [
                pass.map(|pass| format!(", pass: {pass}")),
                warps.map(|warps| format!(", warps: {warps}")),
                cluster.map(|cluster| format!(", cluster: {cluster}")),
            ]
            .into_iter()
            .flatten()
            .collect();
            _ = writeln!(
                text,
                "- {{dtype: {dtype}, vocab: {vocab}, time_block: {time_block}, \
                 block_size: {block_size}, device: {device}{gpu}}}"
            );
        }
        write_whole(file, text.as_bytes())
            .with_context(|| format!("cannot write {}", file.display()))
    }
}

/// The tiles in `file`; none where there is no such file.
fn read_tuned(file: &Path) -> Result<Vec<TunedTile>> {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| format!("cannot read {}", file.display()))?,
    };
    serde_yaml::from_str(&text)
        .with_context(|| format!("{} is not a table of tuned tiles", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A panel of two cells, whose reports have these peaks of the device and this program.
    fn panel(device_peaks: [Option<u64>; 2], program: Option<u64>, process: Option<u64>) -> Panel {
        let config: Config = config::parse(
            "{time_blocks: [1, 2], block_sizes: [8], cell: {time: 4, vocab: 9}}",
            &[],
        )
        .unwrap();
        let row = |index: usize| {
            let report = json!({
                "first_call_s": 0.0, "avg_step_ms": 1.0, "median_step_ms": 1.0, "min_step_ms": 1.0,
                "std_step_ms": 0.0, "copy_ms": 1.0, "ratio_to_copy": 1.0, "gb_per_s": 1.0,
                "copy_gb_per_s": 1.0,
                "mem_after_run": {
                    "peak_resident_bytes": process,
                    "bytes_in_use": null,
                    "peak_bytes_in_use": device_peaks[index],
                },
                "compiled": program.map(|bytes| json!({
                    "argument_bytes": bytes, "output_bytes": bytes, "temporary_bytes": 0,
                    "alias_bytes": bytes,
                })),
            });
            let measured = Measured::deserialize(&report).unwrap();
            Row { place: vec![Some(index + 1), Some(8)], outcome: Ok((measured, report)) }
        };
        let (axes, machine, rows) = (config.axes(), Machine::current(), [row(0), row(1)]);
        Sweep { config: &config, axes: &axes, machine: &machine, rows: &rows }
            .memory_panel(&Memory::WHOLE)
    }

    #[test]
    fn the_memory_panel_shows_what_says_most_and_what_is_not_told() {
        const MIB: u64 = 1 << 20;
        let [none, some] = [[None; 2], [Some(7 * MIB), None]];
        let points = |panel: &Panel| panel.series[0].points.iter().map(|p| p.1).collect::<Vec<_>>();
        let told = panel(some, Some(MIB), Some(MIB));
        assert_eq!(told.y_label, "device memory, peak in use (MiB; gaps: not told)");
        assert_eq!(points(&told), [Some(7.0), None]);
        let program = panel(none, Some(3 * MIB), Some(MIB));
        assert_eq!(program.y_label, "arguments, results, temporaries (MiB)");
        assert_eq!(points(&program), [Some(3.0); 2], "results lie in arguments");
        let process = panel(none, None, Some(2 * MIB));
        assert_eq!(process.y_label, "process's memory, peak (MiB)");
        assert_eq!(points(&process), [Some(2.0); 2]);
        let nothing = panel(none, None, None);
        assert_eq!(nothing.y_label, "memory: not told");
        assert_eq!(points(&nothing), [None; 2]);
    }

    #[test]
    fn a_cell_is_its_median_round_or_its_failure() {
        let row = |ms: Option<f64>| {
            let report = json!({"median_step_ms": ms, "mem_after_run": {}});
            let outcome = match ms {
                Some(_) => Ok((Measured::deserialize(&report).unwrap(), report)),
                None => Err("no".to_owned()),
            };
            Row { place: vec![], outcome }
        };
        let kept = |rounds: &[Option<f64>]| {
            let kept = of_rounds(rounds.iter().copied().map(row).collect()).unwrap();
            kept.measured().and_then(|measured| measured.median_step_ms)
        };
        assert_eq!(kept(&[Some(7.0)]), Some(7.0));
        assert_eq!(kept(&[Some(9.0), Some(2.0), Some(3.0)]), Some(3.0));
        assert_eq!(kept(&[Some(9.0), None, Some(3.0)]), None);
    }

    #[test]
    fn a_processor_becomes_a_folder() {
        assert_eq!(
            slug("Some(R) CPU @ 2.1GHz (family 6, model 1)"),
            "some-r-cpu-2-1ghz-family-6-model-1"
        );
    }
}

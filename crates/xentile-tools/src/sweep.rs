//! Measures a grid of tiles, one process a cell, and keeps what was found.

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
use serde_json::{Value, json};
use xentile::TunedTile;

use crate::cli;
use crate::config::{self, Op, TileConfig};
use crate::draft::{Draft, write_whole};
use crate::estimate::Binds;
use crate::machine::Machine;
use crate::memory;
use crate::microbench::{self, Implementation, name};
use crate::plot::{Figure, Panel, Series};

/// A grid of tiles to measure.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Tokens a tile.
    pub time_blocks: Vec<usize>,
    /// Vocabulary columns a tile.
    pub block_sizes: Vec<usize>,
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

impl Config {
    fn validate(&self) -> Result<()> {
        for (name, list) in [("time_blocks", &self.time_blocks), ("block_sizes", &self.block_sizes)]
        {
            ensure!(!list.is_empty(), "{name} is empty; list at least one value");
            for (index, value) in list.iter().enumerate() {
                ensure!(!list[..index].contains(value), "{name} lists {value} twice; remove one");
            }
        }
        ensure!(
            self.cell.tile == TileConfig::default(),
            "cell.tile is what the sweep varies; remove it"
        );
        ensure!(
            self.cell.implementation == Implementation::Kernel,
            "cell.impl is {}, which has no tile; set it to kernel",
            name(&self.cell.implementation)
        );
        ensure!(
            self.cell.op == Op::CrossEntropy,
            "cell.op is {}; a sweep is of the tile of cross_entropy",
            name(&self.cell.op)
        );
        self.cell.validate().context("cell")?;
        if self.update_tuned {
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
        let table = format!("{}.{kernels}.yaml", name(&self.cell.op));
        self.tuned_dir.join(table)
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
    mem_after_run: RunMemory,
    compiled: Option<ProgramMemory>,
    schedule: Option<Bundles>,
    estimate: Option<Estimated>,
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
    floor_ms: f64,
    ratio_to_floor: f64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct EstimatedKernel {
    tile_dma_us: f64,
    tile_schedule_us: f64,
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
    /// The most that the process held.
    Process,
}

impl Memory {
    /// From what says most of the program to what says least.
    const ALL: [Self; 4] = [Self::DevicePeak, Self::DeviceInUse, Self::Program, Self::Process];

    /// As the plot has it.
    fn label(self) -> &'static str {
        match self {
            Self::DevicePeak => "device memory, peak in use",
            Self::DeviceInUse => "device memory, in use after the run",
            Self::Program => "arguments, results, temporaries",
            Self::Process => "process's memory, peak",
        }
    }

    fn of(self, cell: &Measured) -> Option<u64> {
        match self {
            Self::DevicePeak => cell.mem_after_run.peak_bytes_in_use,
            Self::DeviceInUse => cell.mem_after_run.bytes_in_use,
            Self::Program => cell.compiled.and_then(ProgramMemory::bytes),
            Self::Process => cell.mem_after_run.peak_resident_bytes,
        }
    }
}

/// One cell: what its process said, or why it said nothing.
struct Row {
    time_block: usize,
    block_size: usize,
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

    let rows = measure(&config, &out)?;
    let sweep = Sweep { config: &config, machine: &machine, rows: &rows };
    sweep.write(&out)?;
    println!("wrote {}/sweep.{{csv,json,md,svg,png}}", out.display());
    if let Some((row, best)) = sweep.best() {
        println!(
            "best: time_block {} block_size {}: {} ms, {} copies",
            row.time_block,
            row.block_size,
            figure(best.median_step_ms, 3),
            figure(best.ratio_to_copy, 2)
        );
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

fn measure(config: &Config, out: &Path) -> Result<Vec<Row>> {
    // Never finished: it is there for the cells alone.
    let cell = Draft::new(&out.join("cell.yaml")).context("cannot write the cell's config")?;
    let text = serde_yaml::to_string(&config.cell).context("cannot write the cell's config")?;
    fs::write(cell.path(), text)
        .with_context(|| format!("cannot write {}", cell.path().display()))?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;

    let grid: Vec<_> = config
        .time_blocks
        .iter()
        .flat_map(|&time_block| config.block_sizes.iter().map(move |&size| (time_block, size)))
        .collect();
    let progress = Progress::new(grid.len());
    let mut rows = Vec::with_capacity(grid.len());
    for (time_block, block_size) in grid {
        progress.begin(time_block, block_size);
        let outcome = run_cell(&program, cell.path(), time_block, block_size);
        let outcome = outcome.map_err(|error| format!("{error:#}"));
        rows.push(Row { time_block, block_size, outcome });
        progress.end(&rows);
    }
    progress.finish();
    Ok(rows)
}

fn run_cell(
    program: &Path,
    cell: &Path,
    time_block: usize,
    block_size: usize,
) -> Result<(Measured, Value)> {
    let output = Command::new(program)
        .arg("--config")
        .arg(cell)
        .args(["--time-block", &time_block.to_string(), "--block-size", &block_size.to_string()])
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
        Self { bar, cells, start: Instant::now() }
    }

    fn begin(&self, time_block: usize, block_size: usize) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("time_block {time_block} block_size {block_size}"));
        }
    }

    fn end(&self, rows: &[Row]) {
        let Some(row) = rows.last() else { return };
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
        let (done, cells) = (rows.len(), self.cells);
        let cell = format!("time_block {} block_size {}: {told}", row.time_block, row.block_size);
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
    machine: &'a Machine,
    rows: &'a [Row],
}

impl Sweep<'_> {
    /// The smallest tile among those within a hundredth of the quickest: nearer than that, noise
    /// decides.
    fn best(&self) -> Option<(&Row, &Measured)> {
        let cells = || {
            let cells = self.rows.iter().filter_map(|row| Some((row, row.measured()?)));
            cells.filter_map(|(row, measured)| Some((row, measured, measured.median_step_ms?)))
        };
        let quickest = cells().map(|(.., ms)| ms).min_by(f64::total_cmp)?;
        cells()
            .filter(|(.., ms)| *ms <= 1.01 * quickest)
            .min_by_key(|(row, ..)| row.time_block as u128 * row.block_size as u128)
            .map(|(row, measured, _)| (row, measured))
    }

    /// The cells' common ceiling: the median of their copies.
    fn copy_ms(&self) -> Option<f64> {
        let mut copies: Vec<_> =
            self.rows.iter().filter_map(|row| row.measured()?.copy_ms).collect();
        copies.sort_by(f64::total_cmp);
        copies.get(copies.len() / 2).copied()
    }

    /// Operation, shape and dtype.
    fn subject(&self) -> String {
        let cell = &self.config.cell;
        let topology = cell.topology.as_ref();
        let topology = topology.map_or(String::new(), |name| format!(", compiled for {name}"));
        format!(
            "{} on {}{topology}, logits [{}, {}] {}",
            name(&cell.op),
            name(&cell.backend),
            cell.time,
            cell.vocab,
            cell.dtype
        )
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
        figure.write_png(picture.path())?;
        drafts.push(("sweep.png", picture));
        for (name, draft) in drafts {
            draft.finish().with_context(|| cannot(name))?;
        }
        Ok(())
    }

    /// The table of a sweep that only compiles. Milliseconds and microseconds are estimates.
    fn compiled_csv(&self) -> String {
        let mut text = String::from(
            "time_block,block_size,status,compile_s,code_bytes,argument_bytes,output_bytes,\
             temporary_bytes,peak_bytes,vmem_bytes,bundles,spills,fills,estimated_tile_dma_us,\
             estimated_tile_schedule_us,estimated_dma_ms,estimated_schedule_ms,binds,\
             estimated_step_ms,error\n",
        );
        for Row { time_block, block_size, outcome } in self.rows {
            let rest = match outcome {
                Ok((m, _)) => {
                    let part = |part: fn(&ProgramMemory) -> Option<u64>| {
                        m.compiled.as_ref().and_then(part)
                    };
                    let slots = |unit| Some(*m.schedule.as_ref()?.slots_used.get(unit)?);
                    let counts = [
                        part(|program| program.code_bytes),
                        part(|program| program.argument_bytes),
                        part(|program| program.output_bytes),
                        part(|program| program.temporary_bytes),
                        part(|program| program.peak_bytes),
                        m.vmem_bytes(),
                        m.schedule.as_ref().map(|schedule| schedule.bundles),
                        slots("vstore_spill"),
                        slots("vload_fill"),
                    ];
                    let estimated = |of: fn(&Estimated) -> f64| {
                        let estimate = m.estimate.as_ref().map(of);
                        estimate.map_or(String::new(), |number| number.to_string())
                    };
                    let cells = [
                        m.compile_s.map_or(String::new(), |seconds| seconds.to_string()),
                        counts
                            .map(|count| count.map_or(String::new(), |count| count.to_string()))
                            .join(","),
                        estimated(|estimate| estimate.sum(|kernel| kernel.tile_dma_us)),
                        estimated(|estimate| estimate.sum(|kernel| kernel.tile_schedule_us)),
                        estimated(|estimate| estimate.sum(|kernel| kernel.dma_ms)),
                        estimated(|estimate| estimate.sum(|kernel| kernel.schedule_ms)),
                        m.estimate.as_ref().map_or(String::new(), Estimated::binds),
                        estimated(|estimate| estimate.step_ms),
                    ];
                    format!("ok,{},", cells.join(","))
                }
                Err(reason) => {
                    format!("failed{}\"{}\"", ",".repeat(17), reason.replace('"', "\"\""))
                }
            };
            _ = writeln!(text, "{time_block},{block_size},{rest}");
        }
        text
    }

    /// The same for people.
    fn compiled_markdown(&self, text: &mut String) {
        *text += "Times are estimates from the compiler's schedule and what is published of the \
                  chip; nothing ran.\n\n";
        *text += "| time_block | block_size | compile s | code | temporaries | peak | VMEM | bundles \
                  | spills | tile: DMA us | tile: schedule us | DMA ms | schedule ms | binds | \
                  estimated step ms | x floor |\n";
        text.push('|');
        *text += &" ---: |".repeat(16);
        text.push('\n');
        let bytes = |bytes: Option<u64>| bytes.map_or("not told".to_owned(), memory::human);
        for Row { time_block, block_size, outcome } in self.rows {
            _ = match outcome {
                Ok((m, _)) => {
                    let compiled = m.compiled.as_ref();
                    let schedule = m.schedule.as_ref();
                    let count = |count: Option<u64>| {
                        count.map_or("not told".to_owned(), |count| count.to_string())
                    };
                    let estimated = |digits: usize, of: fn(&Estimated) -> f64| {
                        figure(m.estimate.as_ref().map(of), digits)
                    };
                    let cells = [
                        figure(m.compile_s, 1),
                        bytes(compiled.and_then(|compiled| compiled.code_bytes)),
                        bytes(compiled.and_then(|compiled| compiled.temporary_bytes)),
                        bytes(compiled.and_then(|compiled| compiled.peak_bytes)),
                        bytes(m.vmem_bytes()),
                        count(schedule.map(|schedule| schedule.bundles)),
                        count(schedule.and_then(|s| s.slots_used.get("vstore_spill").copied())),
                        estimated(2, |estimate| estimate.sum(|kernel| kernel.tile_dma_us)),
                        estimated(2, |estimate| estimate.sum(|kernel| kernel.tile_schedule_us)),
                        estimated(3, |estimate| estimate.sum(|kernel| kernel.dma_ms)),
                        estimated(3, |estimate| estimate.sum(|kernel| kernel.schedule_ms)),
                        m.estimate.as_ref().map_or("not told".to_owned(), Estimated::binds),
                        estimated(3, |estimate| estimate.step_ms),
                        estimated(2, |estimate| estimate.ratio_to_floor),
                    ];
                    writeln!(text, "| {time_block} | {block_size} | {} |", cells.join(" | "))
                }
                Err(reason) => writeln!(
                    text,
                    "| {time_block} | {block_size} | failed | {}{} |",
                    "| ".repeat(12),
                    reason.replace('|', "\\|")
                ),
            };
        }
    }

    fn csv(&self) -> String {
        if self.config.cell.topology.is_some() {
            return self.compiled_csv();
        }
        let mut text = String::from(
            "time_block,block_size,status,median_step_ms,avg_step_ms,min_step_ms,std_step_ms,\
             copy_ms,ratio_to_copy,gb_per_s,copy_gb_per_s,first_call_s,peak_resident_bytes,device_peak_bytes_in_use,\
             device_bytes_in_use,compiled_argument_bytes,compiled_output_bytes,\
             compiled_temporary_bytes,compiled_alias_bytes,error\n",
        );
        for Row { time_block, block_size, outcome } in self.rows {
            let rest = match outcome {
                Ok((m, _)) => {
                    let numbers = [
                        m.median_step_ms,
                        m.avg_step_ms,
                        m.min_step_ms,
                        m.std_step_ms,
                        m.copy_ms,
                        m.ratio_to_copy,
                        m.gb_per_s,
                        m.copy_gb_per_s,
                        m.first_call_s,
                    ];
                    let numbers = numbers
                        .map(|number| number.map_or(String::new(), |number| number.to_string()));
                    let numbers = numbers.join(",");
                    let compiled = |part: fn(&ProgramMemory) -> Option<u64>| {
                        m.compiled.as_ref().and_then(part)
                    };
                    let memory = [
                        m.mem_after_run.peak_resident_bytes,
                        m.mem_after_run.peak_bytes_in_use,
                        m.mem_after_run.bytes_in_use,
                        compiled(|program| program.argument_bytes),
                        compiled(|program| program.output_bytes),
                        compiled(|program| program.temporary_bytes),
                        compiled(|program| program.alias_bytes),
                    ];
                    let told = |bytes: Option<u64>| bytes.map_or(String::new(), |b| b.to_string());
                    format!("ok,{numbers},{},", memory.map(told).join(","))
                }
                Err(reason) => {
                    format!("failed{}\"{}\"", ",".repeat(17), reason.replace('"', "\"\""))
                }
            };
            _ = writeln!(text, "{time_block},{block_size},{rest}");
        }
        text
    }

    fn json(&self) -> Result<String> {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|Row { time_block, block_size, outcome }| {
                let (report, error) = match outcome {
                    Ok((_, report)) => (Some(report), None),
                    Err(reason) => (None, Some(reason)),
                };
                json!({
                    "time_block": time_block,
                    "block_size": block_size,
                    "error": error,
                    "report": report,
                })
            })
            .collect();
        let best = self.best().map(|(row, best)| {
            json!({
                "time_block": row.time_block,
                "block_size": row.block_size,
                "median_step_ms": best.median_step_ms,
            })
        });
        let all =
            json!({"machine": self.machine, "config": self.config, "best": best, "rows": rows});
        Ok(serde_json::to_string_pretty(&all)? + "\n")
    }

    fn markdown(&self) -> String {
        let machine = self.machine;
        let mut text = format!(
            "# {}\n\n{}, {} cores, {}; xentile {} at {}, {}.\n\n",
            self.subject(),
            machine.processor,
            machine.cores,
            machine.platform,
            machine.xentile,
            machine.commit,
            machine.rustc
        );
        if self.config.cell.topology.is_some() {
            self.compiled_markdown(&mut text);
            return text;
        }
        text += "| time_block | block_size | median ms | min ms | std ms | x copy | GB/s | process peak \
             | device peak | program |\n";
        text += "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n";
        let best = self.best().map(|(row, _)| (row.time_block, row.block_size));
        for row in self.rows {
            let Row { time_block, block_size, outcome } = row;
            _ = match outcome {
                Ok((m, _)) => {
                    let bold = if best == Some((*time_block, *block_size)) { "**" } else { "" };
                    let memory = [Memory::Process, Memory::DevicePeak, Memory::Program];
                    let memory = memory
                        .map(|figure| figure.of(m).map_or("not told".to_owned(), memory::human));
                    writeln!(
                        text,
                        "| {time_block} | {block_size} | {bold}{}{bold} | {} | {} | {} | {} | {} |",
                        figure(m.median_step_ms, 3),
                        figure(m.min_step_ms, 3),
                        figure(m.std_step_ms, 3),
                        figure(m.ratio_to_copy, 3),
                        figure(m.gb_per_s, 2),
                        memory.join(" | ")
                    )
                }
                Err(reason) => writeln!(
                    text,
                    "| {time_block} | {block_size} | failed | | | | | | | {} |",
                    reason.replace('|', "\\|")
                ),
            };
        }
        text
    }

    fn figure(&self) -> Figure {
        // Where nothing ran, there is an estimate at most.
        let compiled = self.config.cell.topology.is_some();
        let height = |m: &Measured| match compiled {
            false => m.median_step_ms,
            true => Some(m.estimate.as_ref()?.step_ms),
        };
        let best = self.best().and_then(|(row, best)| {
            let found = format!(
                "best: time_block {}, block_size {}: {} ms, {} copies",
                row.time_block,
                row.block_size,
                figure(best.median_step_ms, 2),
                figure(best.ratio_to_copy, 2)
            );
            Some((found, (row.time_block, best.median_step_ms?)))
        });
        let device = format!("{}, {} cores", self.machine.processor, self.machine.cores);
        let time = Panel {
            y_label: match compiled {
                true => "step time, estimated and not measured (ms)".to_owned(),
                false => "step time, median (ms)".to_owned(),
            },
            series: self.lines(height),
            level: match compiled {
                true => self
                    .rows
                    .iter()
                    .find_map(|row| Some(row.measured()?.estimate.as_ref()?.floor_ms))
                    .map(|ms| (ms, format!("two passes over HBM: {ms:.2} ms"))),
                false => self.copy_ms().map(|ms| (ms, format!("copy of the logits: {ms:.2} ms"))),
            },
            mark: best.as_ref().map(|(_, point)| *point),
        };
        Figure {
            title: self.subject(),
            subtitles: [Some(device), best.map(|(found, _)| found)].into_iter().flatten().collect(),
            x_label: "time_block (tokens a tile)".to_owned(),
            legend: "block_size".to_owned(),
            panels: vec![time, self.memory_panel()],
        }
    }

    /// A figure of every cell over time_block, a line a block_size.
    fn lines(&self, figure: impl Fn(&Measured) -> Option<f64>) -> Vec<Series> {
        let line = |&block_size: &usize| {
            let rows = self.rows.iter().filter(|row| row.block_size == block_size);
            let mut points: Vec<_> = rows
                .map(|row| (row.time_block, row.measured().and_then(&figure)))
                // A logarithmic axis has no 0.
                .filter(|&(time_block, _)| time_block > 0)
                .collect();
            points.sort_by_key(|point| point.0);
            Series { name: block_size.to_string(), points }
        };
        self.config.block_sizes.iter().map(line).collect()
    }

    /// The first figure that any cell tells, beside what logits and gradient alone take.
    fn memory_panel(&self) -> Panel {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let told = |figure: &Memory| {
            self.rows.iter().any(|row| row.measured().is_some_and(|m| figure.of(m).is_some()))
        };
        let Some(figure) = Memory::ALL.into_iter().find(told) else {
            let y_label = "memory: not told".to_owned();
            return Panel { y_label, series: self.lines(|_| None), level: None, mark: None };
        };
        let has_gaps = self.rows.iter().filter_map(Row::measured).any(|m| figure.of(m).is_none());
        let gaps = if has_gaps { "; gaps: not told" } else { "" };
        let cell = &self.config.cell;
        let least = mib(2 * (cell.time * cell.vocab * cell.dtype.size_bytes()) as u64);
        Panel {
            y_label: format!("{} (MiB{gaps})", figure.label()),
            series: self.lines(|m| figure.of(m).map(mib)),
            level: Some((least, format!("logits and gradient: {least:.1} MiB"))),
            mark: None,
        }
    }

    /// Puts the tile of `best` into `file` in the place of the one for the same dtype and vocabulary.
    fn update_tuned(&self, file: &Path, best: &Row) -> Result<()> {
        let cell = &self.config.cell;
        let tile = TunedTile {
            dtype: cell.dtype.name().to_owned(),
            vocab: cell.vocab,
            time_block: best.time_block,
            block_size: best.block_size,
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
            Row { time_block: index + 1, block_size: 8, outcome: Ok((measured, report)) }
        };
        let rows = [row(0), row(1)];
        Sweep { config: &config, machine: &Machine::current(), rows: &rows }.memory_panel()
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
    fn a_processor_becomes_a_folder() {
        assert_eq!(
            slug("Some(R) CPU @ 2.1GHz (family 6, model 1)"),
            "some-r-cpu-2-1ghz-family-6-model-1"
        );
    }
}

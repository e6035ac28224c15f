//! Measures a grid of tiles, one process a cell, and keeps what was found.

use std::fmt::Write as _;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use xentile::TunedTile;

use crate::cli;
use crate::config::{self, TileConfig};
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
        self.cell.validate().context("cell")?;
        if self.update_tuned {
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
        let table = format!("{}.{}.yaml", name(&self.cell.op), name(&self.cell.backend));
        self.tuned_dir.join(table)
    }
}

/// What a cell's process reports, of which the tables use some.
#[derive(Clone, Debug, Deserialize)]
struct Measured {
    first_call_s: f64,
    avg_step_ms: f64,
    median_step_ms: f64,
    min_step_ms: f64,
    std_step_ms: f64,
    copy_ms: f64,
    ratio_to_copy: f64,
    gb_per_s: f64,
    copy_gb_per_s: f64,
    mem_after_run: PeakMemory,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct PeakMemory {
    peak_resident_bytes: Option<u64>,
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
            "best: time_block {} block_size {}: {:.3} ms, {:.2} copies",
            row.time_block, row.block_size, best.median_step_ms, best.ratio_to_copy
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

/// A file that goes when this does.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // It may never have been made, and there is nobody left to tell.
        _ = fs::remove_file(&self.0);
    }
}

/// `name` in `folder`, but this process's own until it is renamed.
fn scratch(folder: &Path, name: &str) -> Scratch {
    Scratch(folder.join(format!(".{}.{name}", std::process::id())))
}

fn measure(config: &Config, out: &Path) -> Result<Vec<Row>> {
    let cell = scratch(out, "cell.yaml");
    let text = serde_yaml::to_string(&config.cell).context("cannot write the cell's config")?;
    fs::write(&cell.0, text).with_context(|| format!("cannot write {}", cell.0.display()))?;
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
        let outcome = run_cell(&program, &cell.0, time_block, block_size);
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
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        match stderr.lines().rfind(|line| !line.trim().is_empty()) {
            Some(line) if output.status.code().is_some() => {
                bail!("{}", line.strip_prefix("error: ").unwrap_or(line))
            }
            _ => bail!("the cell's process ended with {}", output.status),
        }
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
            Ok((measured, _)) => format!("{:.3} ms", measured.median_step_ms),
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
        let cells = || self.rows.iter().filter_map(|row| Some((row, row.measured()?)));
        let quickest = cells().map(|(_, m)| m.median_step_ms).min_by(f64::total_cmp)?;
        cells()
            .filter(|(_, m)| m.median_step_ms <= 1.01 * quickest)
            .min_by_key(|(row, _)| row.time_block as u128 * row.block_size as u128)
    }

    /// The cells' common ceiling: the median of their copies.
    fn copy_ms(&self) -> Option<f64> {
        let mut copies: Vec<_> =
            self.rows.iter().filter_map(|row| Some(row.measured()?.copy_ms)).collect();
        copies.sort_by(f64::total_cmp);
        copies.get(copies.len() / 2).copied()
    }

    /// Operation, shape and dtype.
    fn subject(&self) -> String {
        let cell = &self.config.cell;
        format!(
            "{} on {}, logits [{}, {}] {}",
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
        let mut written = Vec::new();
        for (name, text) in texts {
            let file = scratch(out, name);
            fs::write(&file.0, text)
                .with_context(|| format!("cannot write {}", file.0.display()))?;
            written.push((name, file));
        }
        let file = scratch(out, "sweep.png");
        figure.write_png(&file.0)?;
        written.push(("sweep.png", file));
        for (name, file) in written {
            rename(&file, &out.join(name))?;
        }
        Ok(())
    }

    fn csv(&self) -> String {
        let mut text = String::from(
            "time_block,block_size,status,median_step_ms,avg_step_ms,min_step_ms,std_step_ms,\
             copy_ms,ratio_to_copy,gb_per_s,copy_gb_per_s,first_call_s,peak_resident_bytes,error\n",
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
                    let numbers = numbers.map(|number| number.to_string()).join(",");
                    let peak = m.mem_after_run.peak_resident_bytes;
                    let peak = peak.map_or(String::new(), |peak| peak.to_string());
                    format!("ok,{numbers},{peak},")
                }
                Err(reason) => format!("failed,,,,,,,,,,,\"{}\"", reason.replace('"', "\"\"")),
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
        text +=
            "| time_block | block_size | median ms | min ms | std ms | x copy | GB/s | peak |\n";
        text += "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n";
        let best = self.best().map(|(row, _)| (row.time_block, row.block_size));
        for row in self.rows {
            let Row { time_block, block_size, outcome } = row;
            _ = match outcome {
                Ok((m, _)) => {
                    let bold = if best == Some((*time_block, *block_size)) { "**" } else { "" };
                    let peak = m.mem_after_run.peak_resident_bytes;
                    writeln!(
                        text,
                        "| {time_block} | {block_size} | {bold}{:.3}{bold} | {:.3} | {:.3} | {:.3} \
                         | {:.2} | {} |",
                        m.median_step_ms,
                        m.min_step_ms,
                        m.std_step_ms,
                        m.ratio_to_copy,
                        m.gb_per_s,
                        peak.map_or("not told".to_owned(), memory::human)
                    )
                }
                Err(reason) => writeln!(
                    text,
                    "| {time_block} | {block_size} | failed | | | | | {} |",
                    reason.replace('|', "\\|")
                ),
            };
        }
        text
    }

    fn figure(&self) -> Figure {
        let line = |&block_size: &usize| {
            let rows = self.rows.iter().filter(|row| row.block_size == block_size);
            let mut points: Vec<_> = rows
                .map(|row| (row.time_block, row.measured().map(|m| m.median_step_ms)))
                // A logarithmic axis has no 0.
                .filter(|&(time_block, _)| time_block > 0)
                .collect();
            points.sort_by_key(|point| point.0);
            Series { name: block_size.to_string(), points }
        };
        let best = self.best().map(|(row, best)| {
            let found = format!(
                "best: time_block {}, block_size {}: {:.2} ms, {:.2} copies",
                row.time_block, row.block_size, best.median_step_ms, best.ratio_to_copy
            );
            (found, (row.time_block, best.median_step_ms))
        });
        let device = format!("{}, {} cores", self.machine.processor, self.machine.cores);
        let panel = Panel {
            y_label: "step time, median (ms)".to_owned(),
            series: self.config.block_sizes.iter().map(line).collect(),
            level: self.copy_ms().map(|ms| (ms, format!("copy of the logits: {ms:.2} ms"))),
            mark: best.as_ref().map(|(_, point)| *point),
        };
        Figure {
            title: self.subject(),
            subtitles: [Some(device), best.map(|(found, _)| found)].into_iter().flatten().collect(),
            x_label: "time_block (tokens a tile)".to_owned(),
            legend: "block_size".to_owned(),
            panels: vec![panel],
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
        let folder = file.parent().ok_or_else(|| anyhow!("{} has no folder", file.display()))?;
        let new = scratch(folder, "tuned.yaml");
        fs::write(&new.0, text).with_context(|| format!("cannot write {}", new.0.display()))?;
        rename(&new, file)
    }
}

fn rename(from: &Scratch, to: &Path) -> Result<()> {
    fs::rename(&from.0, to).with_context(|| format!("cannot write {}", to.display()))
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

    #[test]
    fn a_processor_becomes_a_folder() {
        assert_eq!(
            slug("Some(R) CPU @ 2.1GHz (family 6, model 1)"),
            "some-r-cpu-2-1ghz-family-6-model-1"
        );
    }
}

//! Measures a grid of tiles, or of budgets, one process a cell, and keeps what was found.

mod cell;
mod grid;
mod plot;
mod tables;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use xentile::TunedTile;
use xentile::operation::{Cost, Problem};

pub use grid::Config;

use crate::cli;
use crate::config::{self, name};
use crate::draft::{Draft, write_whole};
use crate::machine::Machine;
use cell::{Measured, Row, figure, measure};
use grid::{Axis, describe, read_tuned, shown};

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
        let place = describe(self.axes, &row.place);
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
        let first = operands.first()?;
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

    /// The extent that the last extent of a tile cuts, which tuned tiles are found by.
    fn columns(&self) -> Option<usize> {
        let (problem, _) = self.problem()?;
        Some(problem.dim(self.config.cell.op.facts().tile.last()?.letter))
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

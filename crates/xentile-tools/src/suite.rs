//! Measures operations over lists of shapes, each beside the plain program, and keeps one table of all.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use xentile::operation::Pass;

use crate::cli;
use crate::config::{self, Implementation, Schema};
use crate::decode;
use crate::draft::write_whole;
use crate::machine::Machine;
use crate::memory;
use crate::microbench::{self, apart};
use crate::plot::{Figure, Panel, Series};
use crate::progress::Cells;

/// What is measured, and where the results go.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Default keys of every measurement in `cells`.
    #[serde(default)]
    pub cell: serde_yaml::Value,
    /// Measurements, each a config of microbench; one with lists is several.
    #[serde(default)]
    pub cells: Vec<serde_yaml::Mapping>,
    /// Measurements of decoders, each with flags of microbench decode as its keys.
    #[serde(default)]
    pub decode: Vec<serde_yaml::Mapping>,
    /// Keys that replace the cell's when XLA's program is measured, such as its backend.
    #[serde(default)]
    pub reference: serde_yaml::Mapping,
    /// The folder of the results; `target/suite/NAME` by default.
    pub out: Option<PathBuf>,
}

impl Schema for Config {}

impl Config {
    /// Every measurement, by the kernel and by the plain program.
    ///
    /// # Errors
    /// There is none, or one cannot be.
    fn measurements(&self) -> Result<Vec<[microbench::Config; 2]>> {
        ensure!(
            !(self.cells.is_empty() && self.decode.is_empty()),
            "cells is empty, and decode too; name at least one measurement"
        );
        let mut all = Vec::new();
        for (index, cell) in self.cells.iter().enumerate() {
            let at = || format!("cells[{index}]");
            for key in ["impl", "topology"] {
                let is_set = cell.contains_key(key) || self.cell.get(key).is_some();
                ensure!(!is_set, "{}.{key} is set; a suite runs kernel and reference", at());
            }
            let each = |implementation, over: &serde_yaml::Mapping| {
                let mut keys = cell.clone();
                keys.extend(over.clone());
                let text = serde_yaml::to_string(&keys)?;
                let config: microbench::Config = config::parse_over(self.cell.clone(), &text, &[])?;
                microbench::Config { implementation, ..config }.each()
            };
            let ours =
                each(Implementation::Kernel, &serde_yaml::Mapping::new()).with_context(at)?;
            let plain = each(Implementation::Reference, &self.reference)
                .with_context(|| format!("reference of {}", at()))?;
            all.extend(ours.into_iter().zip(plain).map(|(ours, plain)| [ours, plain]));
        }
        Ok(all)
    }

    /// Every measurement of a decoder, as flags without the implementation.
    ///
    /// # Errors
    /// One cannot be.
    fn decoders(&self) -> Result<Vec<(decode::Config, Vec<String>)>> {
        let flag = |(key, value): (&serde_yaml::Value, &serde_yaml::Value)| {
            let key = key.as_str().unwrap_or_default();
            ensure!(key != "impl", "impl is set; a suite runs kernel and reference");
            let value = serde_yaml::to_string(value)?;
            Ok(format!("--{}={}", key.replace('_', "-"), value.trim()))
        };
        let read = |(index, keys): (usize, &serde_yaml::Mapping)| {
            let flags: Result<Vec<_>> = keys.iter().map(flag).collect();
            let read = flags.and_then(|flags| Ok((decode::Config::from_flags(&flags)?, flags)));
            read.with_context(|| format!("decode[{index}]"))
        };
        self.decode.iter().enumerate().map(read).collect()
    }

    /// A row of each measurement, not run yet, and what measures it by kernel and reference.
    ///
    /// # Errors
    /// There is none, or one cannot be.
    fn rows(&self) -> Result<Vec<(Row, [Job; 2])>> {
        let mut all = Vec::new();
        for pair in self.measurements()? {
            all.push((Row::new(&pair[0])?, pair.map(|one| Job::Operation(Box::new(one)))));
        }
        for (decoder, flags) in self.decoders()? {
            let jobs = IMPLEMENTATIONS.map(|name| {
                let flags = flags.iter().cloned().chain([format!("--impl={name}")]);
                Job::Decoder([String::from("decode")].into_iter().chain(flags).collect())
            });
            all.push((Row::of_decoder(&decoder), jobs));
        }
        Ok(all)
    }
}

/// The implementations that a row has.
const IMPLEMENTATIONS: [&str; 2] = ["kernel", "reference"];

/// One measurement.
enum Job {
    Operation(Box<microbench::Config>),
    /// Arguments of microbench.
    Decoder(Vec<String>),
}

/// Runs the suite of the config at `path`, overridden by `sets`. The code is that of the process:
/// [`cli::PASSED`], or [`cli::FAILED`] where a measurement failed.
///
/// # Errors
/// The config is bad, or the results cannot be written.
pub fn run(path: &Path, sets: &[String]) -> Result<u8> {
    let config: Config = config::load(path, sets)?;
    let rows = config.rows().with_context(|| format!("config {}", path.display()))?;
    let stem = path.file_stem().unwrap_or_default();
    let out = config.out.clone().unwrap_or_else(|| Path::new("target/suite").join(stem));
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;

    let mut suite = Suite { machine: Machine::current(), rows: Vec::new() };
    let mut progress = Cells::new(2 * rows.len());
    for (mut row, jobs) in rows {
        let found = [0, 1].map(|at| {
            let named = format!("{} by {}", row.title(), IMPLEMENTATIONS[at]);
            progress.begin(&named);
            let found = measured(&jobs[at]);
            let outcome = match &found {
                Ok(report) => format!("{} ms", figure(report[row.time_key].as_f64(), 3)),
                Err(reason) => format!("failed: {reason}"),
            };
            progress.end(&named, outcome, found.is_err());
            found
        });
        [row.ours, row.baseline] = found;
        if let (0, Ok(report)) = (row.bytes, &row.ours) {
            row.bytes = report["bytes"].as_u64().unwrap_or_default() as usize;
        }
        suite.rows.push(row);
        // What is there is there, should the next one end it all.
        suite.write(&out)?;
    }
    drop(progress);
    print!("{}", suite.table());
    println!("\nwrote {}/suite.{{json,md,svg}}", out.display());
    let failed = suite.rows.iter().flat_map(Row::failures).count();
    if failed > 0 {
        eprintln!("{failed} of {} measurements failed", 2 * suite.rows.len());
        return Ok(cli::FAILED);
    }
    Ok(cli::PASSED)
}

/// The report of one measurement, of a process of its own.
fn measured(job: &Job) -> Result<Value, String> {
    let report = match job {
        Job::Operation(config) => apart::measured(config),
        Job::Decoder(arguments) => apart::report_of(arguments),
    };
    let mut report = report.map_err(|error| format!("{error:#}"))?;
    if let Some(report) = report.as_object_mut() {
        // Told once for all.
        report.shift_remove("machine");
    }
    Ok(report)
}

/// One problem, by the kernel and by the plain program.
struct Row {
    operation: &'static str,
    shape: String,
    dtype: String,
    distribution: String,
    /// Bytes of all inputs of the forward pass; of a decoder what a step reads, known once it has run.
    bytes: usize,
    /// The key of the time in reports.
    time_key: &'static str,
    ours: Result<Value, String>,
    baseline: Result<Value, String>,
}

impl Row {
    fn new(config: &microbench::Config) -> Result<Self> {
        let (problem, op) = (config.problem()?, config.op);
        let inputs = op.signature(&problem, Pass::Forward).operands;
        let bytes: u64 = inputs.iter().filter_map(|spec| spec.bytes(&problem)).sum();
        Ok(Self {
            operation: op.name(),
            shape: op.shape(&problem, None),
            dtype: config.dtype.name().to_owned(),
            distribution: config.distribution(),
            bytes: usize::try_from(bytes)?,
            time_key: "median_step_ms",
            ours: not_run(),
            baseline: not_run(),
        })
    }

    fn of_decoder(config: &decode::Config) -> Self {
        let [shape, dtype, distribution] = config.described();
        Self {
            operation: "decode",
            shape,
            dtype,
            distribution,
            bytes: 0,
            time_key: "step_ms",
            ours: not_run(),
            baseline: not_run(),
        }
    }

    fn title(&self) -> String {
        format!("{} {} {}, {}", self.operation, self.shape, self.dtype, self.distribution)
    }

    /// Both, ours first, with their names.
    fn both(&self) -> [(&'static str, &Result<Value, String>); 2] {
        [(IMPLEMENTATIONS[0], &self.ours), (IMPLEMENTATIONS[1], &self.baseline)]
    }

    fn failures(&self) -> impl Iterator<Item = (&'static str, &String)> {
        self.both().into_iter().filter_map(|(name, found)| Some((name, found.as_ref().err()?)))
    }

    /// A figure of ours and of the baseline.
    fn figures(&self, key: &str) -> [Option<f64>; 2] {
        self.both().map(|(_, found)| found.as_ref().ok()?.get(key)?.as_f64())
    }

    /// Time of the baseline over ours.
    fn speedup(&self) -> Option<f64> {
        let [ours, baseline] = self.figures(self.time_key);
        Some(baseline? / ours?)
    }

    /// The unit of throughput, of ours and of the baseline: that of GEMMs where there are some.
    fn throughput(&self) -> (&'static str, [Option<f64>; 2]) {
        let products = self.figures("gflop_per_s");
        if products.iter().any(Option::is_some) {
            return ("GFLOP/s", products);
        }
        ("GB/s", self.figures("gb_per_s"))
    }
}

fn not_run() -> Result<Value, String> {
    Err("was not run".to_owned())
}

/// A number for people; nothing where it is not there.
fn figure(number: Option<f64>, digits: usize) -> String {
    number.map_or("-".to_owned(), |number| format!("{number:.digits$}"))
}

/// What has been measured.
struct Suite {
    machine: Machine,
    rows: Vec<Row>,
}

/// Heads of the table.
const HEADS: [&str; 13] = [
    "operation",
    "shape",
    "dtype",
    "inputs",
    "ours, ms",
    "reference, ms",
    "speed-up",
    "metric",
    "ours",
    "reference",
    "ours, copies",
    "ours, memory",
    "reference, memory",
];

impl Suite {
    fn about(&self) -> String {
        let machine = &self.machine;
        format!(
            "{}, {} cores, {}; xentile {} at {}",
            machine.processor, machine.cores, machine.platform, machine.xentile, machine.commit
        )
    }

    /// Lines that are a table in Markdown, and one for people as well.
    fn table(&self) -> String {
        let cells = |row: &Row| {
            let [ours, baseline] = row.figures(row.time_key);
            let (metric, rates) = row.throughput();
            let [copies, _] = row.figures("ratio_to_copy");
            let peaks = row.figures("mem_peak_over_alloc_bytes");
            let peak = |peak: Option<f64>| {
                peak.map_or("-".to_owned(), |bytes| memory::human(bytes as u64))
            };
            [
                row.operation.to_owned(),
                row.shape.clone(),
                row.dtype.clone(),
                row.distribution.clone(),
                figure(ours, 3),
                figure(baseline, 3),
                figure(row.speedup(), 2),
                metric.to_owned(),
                figure(rates[0], 1),
                figure(rates[1], 1),
                figure(copies, 2),
                peak(peaks[0]),
                peak(peaks[1]),
            ]
        };
        let rows: Vec<_> = self.rows.iter().map(cells).collect();
        let widths: Vec<_> = HEADS
            .iter()
            .enumerate()
            .map(|(at, head)| {
                rows.iter().map(|row| row[at].chars().count()).fold(head.len(), usize::max)
            })
            .collect();
        // Names to the left, numbers to the right.
        let is_name = |at: usize| at < 4 || at == 7;
        let line = |cells: &[String]| {
            let padded = cells.iter().zip(&widths).enumerate().map(|(at, (cell, &width))| {
                if is_name(at) { format!("{cell:width$}") } else { format!("{cell:>width$}") }
            });
            format!("| {} |\n", padded.collect::<Vec<_>>().join(" | "))
        };
        let rule = widths
            .iter()
            .enumerate()
            .map(|(at, width)| "-".repeat(width - 1) + if is_name(at) { "-" } else { ":" });
        let mut table = line(&HEADS.map(str::to_owned));
        _ = writeln!(table, "| {} |", rule.collect::<Vec<_>>().join(" | "));
        for row in &rows {
            table += &line(row);
        }
        for row in &self.rows {
            for (name, reason) in row.failures() {
                _ = write!(table, "\n{} by {name} failed: {reason}\n", row.title());
            }
        }
        table
    }

    fn markdown(&self) -> String {
        format!(
            "# Operations\n\n{}. A step is the forward and the backward pass; *reference* is the plain \
             program, *speed-up* its time over ours; a copy reads and writes as many \
             bytes as a step must move; memory is what a step adds to its inputs at the peak.\n\n{}",
            self.about(),
            self.table()
        )
    }

    fn json(&self) -> Result<String> {
        let row = |row: &Row| {
            let part = |found: &Result<Value, String>| match found {
                Ok(report) => json!({"error": null, "report": report}),
                Err(reason) => json!({"error": reason, "report": null}),
            };
            json!({
                "op": row.operation,
                "shape": row.shape,
                "dtype": row.dtype,
                "distribution": row.distribution,
                "speedup": row.speedup(),
                "kernel": part(&row.ours),
                "reference": part(&row.baseline),
            })
        };
        let rows: Vec<_> = self.rows.iter().map(row).collect();
        Ok(serde_json::to_string_pretty(&json!({"machine": self.machine, "rows": rows}))? + "\n")
    }

    /// Speed-ups over the size of the inputs, a line an operation.
    fn figure(&self) -> Figure {
        let mut series: Vec<Series> = Vec::new();
        for row in &self.rows {
            let name = format!("{} {}", row.operation, row.dtype);
            let point = (row.bytes.max(1), row.speedup());
            match series.iter_mut().find(|line| line.name == name) {
                Some(line) => line.points.push(point),
                None => series.push(Series { name, points: vec![point] }),
            }
        }
        for line in &mut series {
            line.points.sort_by_key(|point| point.0);
        }
        Figure {
            title: "Time of the reference over ours".to_owned(),
            subtitles: vec![self.about()],
            x_label: "inputs".to_owned(),
            x_text: |bytes| memory::human(bytes as u64),
            legend: "operation".to_owned(),
            panels: vec![Panel {
                y_label: "speed-up".to_owned(),
                series,
                level: Some((1.0, "reference".to_owned())),
                mark: None,
            }],
        }
    }

    fn write(&self, out: &Path) -> Result<()> {
        let texts = [
            ("suite.json", self.json()?),
            ("suite.md", self.markdown()),
            ("suite.svg", self.figure().svg()?),
        ];
        for (name, text) in texts {
            let file = out.join(name);
            write_whole(&file, text.as_bytes())
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite(text: &str) -> Result<Vec<[microbench::Config; 2]>> {
        config::parse::<Config>(text, &[])?.measurements()
    }

    #[test]
    fn cells_take_what_they_leave_open_from_what_all_have() {
        let all = suite(
            "cell: {dtype: f32, iters: 7}\ncells:\n- {op: rms_norm, shapes: [{time: 3, hidden: 8}, \
             {time: 5, hidden: 16}]}\n- {op: cross_entropy, dtype: f16, time: 4, vocab: 9}",
        )
        .unwrap();
        let outcome: Vec<_> =
            all.iter().map(|[one, _]| (one.op.name(), one.dtype.name(), one.iters)).collect();
        assert_eq!(
            outcome,
            [("rms_norm", "f32", 7), ("rms_norm", "f32", 7), ("cross_entropy", "f16", 7)]
        );
        let other = suite(
            "cell: {backend: cpu}\ncells: [{op: cross_entropy, time: 4, vocab: 9}]\n\
             reference: {backend: xla:cpu}",
        );
        let [ours, plain] = other.unwrap().remove(0);
        let names = [&ours, &plain].map(|one| config::name(&one.backend));
        assert_eq!(names, ["cpu", "xla:cpu"]);
        assert_eq!(plain.implementation, Implementation::Reference);
    }

    #[test]
    fn bad_cells_are_named() {
        let error = |text: &str| format!("{:#}", suite(text).unwrap_err());
        assert!(error("cells: []").contains("cells is empty"));
        assert!(error("cells: [{op: rms_norm, widht: 3}]").contains("cells[0]"));
        assert!(error("cells: [{impl: kernel}]").contains("cells[0].impl is set"));
        assert!(error("cells: [{op: cross_entropy, time: 0}]").contains("cells[0]"));
        assert!(error("cels: []").contains("cels"));
    }

    #[test]
    fn decoders_are_flags_of_their_command() {
        let read = |text: &str| config::parse::<Config>(text, &[]).unwrap().rows();
        let found =
            "decode: [{preset: qwen3-0.6b, backend: xla:cuda, top_p: 0.9, temperature: 0.8}]";
        let (row, jobs) = read(found).unwrap().remove(0);
        assert_eq!(row.title(), "decode qwen3-0.6b, [1] at 1000 bf16, temperature 0.8, top_p 0.9");
        let [_, Job::Decoder(arguments)] = jobs else { panic!("a decoder's job") };
        assert_eq!(
            arguments.join(" "),
            "decode --preset=qwen3-0.6b --backend=xla:cuda --top-p=0.9 --temperature=0.8 --impl=reference"
        );
        let error = |text| format!("{:#}", read(text).map(|_| ()).unwrap_err());
        for (text, message) in [
            (
                "decode: [{preset: qwen3-0.6b, batches: 3}]",
                "decode[0]: unexpected argument '--batches'",
            ),
            ("decode: [{preset: qwen3-0.6b, impl: kernel}]", "decode[0]: impl is set"),
            ("decode: [{preset: qwen3-0.6b, top_p: 0.9}]", "decode[0]: the following required"),
            ("decode: [{batch: 1}]", "decode[0]: the following required arguments"),
        ] {
            assert!(error(text).contains(message), "{}", error(text));
        }
    }

    #[test]
    fn a_failed_measurement_leaves_the_others() {
        let report = |ms: f64| Ok(json!({"median_step_ms": ms, "gb_per_s": 3.0}));
        let row = |ours, baseline| Row {
            operation: "rms_norm",
            shape: "[2, 4]".to_owned(),
            dtype: "f32".to_owned(),
            distribution: "normal".to_owned(),
            bytes: 32,
            time_key: "median_step_ms",
            ours,
            baseline,
        };
        let rows =
            vec![row(report(2.0), report(3.0)), row(report(2.0), Err("no memory".to_owned()))];
        let suite = Suite { machine: Machine::current(), rows };
        assert_eq!(suite.rows[0].speedup(), Some(1.5));
        assert_eq!(suite.rows[1].speedup(), None);
        let table = suite.table();
        assert!(
            table.contains("1.50") && table.contains("by reference failed: no memory"),
            "{table}"
        );
        assert_eq!(table.lines().filter(|line| line.starts_with("| rms_norm")).count(), 2);
        suite.figure().svg().unwrap();
        suite.json().unwrap();
    }
}

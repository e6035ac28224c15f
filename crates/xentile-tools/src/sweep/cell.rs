//! The cells of a sweep: a process each, and what it said.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

use super::grid::{Axis, Config, Index, describe, shown};
use crate::draft::Draft;
use crate::estimate::{Bottleneck, Floor};
use crate::microbench::apart;
use crate::progress::Cells;

/// What a cell's process reports, of which the tables use some.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Measured {
    pub(super) first_call_s: Option<f64>,
    pub(super) compile_s: Option<f64>,
    pub(super) avg_step_ms: Option<f64>,
    pub(super) median_step_ms: Option<f64>,
    pub(super) min_step_ms: Option<f64>,
    pub(super) std_step_ms: Option<f64>,
    pub(super) copy_ms: Option<f64>,
    pub(super) ratio_to_copy: Option<f64>,
    pub(super) gb_per_s: Option<f64>,
    pub(super) copy_gb_per_s: Option<f64>,
    pub(super) gflop_per_s: Option<f64>,
    pub(super) exported: Option<Exported>,
    pub(super) mem_after_run: RunMemory,
    pub(super) compiled: Option<ProgramMemory>,
    pub(super) schedule: Option<Bundles>,
    pub(super) estimate: Option<Estimated>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Exported {
    pub(super) plan: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Bundles {
    pub(super) bundles: u64,
    pub(super) slots_used: BTreeMap<String, u64>,
    pub(super) computations: Vec<Part>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Part {
    pub(super) vmem_bytes: Option<u64>,
}

/// What is estimated of a cell that was compiled and not run.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Estimated {
    pub(super) kernels: Vec<EstimatedKernel>,
    pub(super) step_ms: f64,
    pub(super) floor: Floor,
    pub(super) floor_ms: f64,
    pub(super) ratio_to_floor: f64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct EstimatedKernel {
    pub(super) tile_dma_us: Option<f64>,
    pub(super) tile_schedule_us: Option<f64>,
    pub(super) dma_ms: f64,
    pub(super) schedule_ms: f64,
    pub(super) binds: Bottleneck,
}

impl Estimated {
    pub(super) fn sum(&self, of: impl Fn(&EstimatedKernel) -> f64) -> f64 {
        self.kernels.iter().map(of).sum()
    }

    /// What the kernels wait for, of each that differs.
    pub(super) fn binds(&self) -> String {
        let mut names: Vec<_> = self.kernels.iter().map(|kernel| kernel.binds.name()).collect();
        names.dedup();
        names.join(" and ")
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct RunMemory {
    pub(super) peak_resident_bytes: Option<u64>,
    pub(super) bytes_in_use: Option<u64>,
    pub(super) peak_bytes_in_use: Option<u64>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct ProgramMemory {
    pub(super) peak_bytes: Option<u64>,
    pub(super) argument_bytes: Option<u64>,
    pub(super) output_bytes: Option<u64>,
    pub(super) temporary_bytes: Option<u64>,
    pub(super) alias_bytes: Option<u64>,
    pub(super) code_bytes: Option<u64>,
}

impl Measured {
    /// The most that a part of the program holds of VMEM; none where that is not reported.
    pub(super) fn vmem_bytes(&self) -> Option<u64> {
        self.schedule.as_ref()?.computations.iter().filter_map(|part| part.vmem_bytes).max()
    }
}

impl ProgramMemory {
    /// All that the program holds at once; none where any part is not reported.
    pub(super) fn bytes(self) -> Option<u64> {
        let all = self.argument_bytes? + self.output_bytes? + self.temporary_bytes?;
        Some(all.saturating_sub(self.alias_bytes.unwrap_or(0)))
    }
}

/// A figure of a cell's memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Memory {
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
    pub(super) const WHOLE: [Self; 4] =
        [Self::DevicePeak, Self::DeviceInUse, Self::Program, Self::Process];

    /// As the plot has it.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::DevicePeak => "device memory, peak in use",
            Self::DeviceInUse => "device memory, in use after the run",
            Self::Program => "arguments, results, temporaries",
            Self::Temporaries => "temporaries",
            Self::Process => "process's memory, peak",
        }
    }

    pub(super) fn of(self, cell: &Measured) -> Option<u64> {
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
pub(super) struct Row {
    pub(super) place: Index,
    pub(super) outcome: Result<(Measured, Value), String>,
}

impl Row {
    pub(super) fn measured(&self) -> Option<&Measured> {
        self.outcome.as_ref().ok().map(|(measured, _)| measured)
    }

    /// What was found, in a few words.
    fn summary(&self) -> String {
        match &self.outcome {
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
        }
    }
}

/// A number for people.
pub(super) fn figure(number: Option<f64>, digits: usize) -> String {
    number.map_or("not reported".to_owned(), |number| format!("{number:.digits$}"))
}

pub(super) fn measure(config: &Config, axes: &[Axis], out: &Path) -> Result<Vec<Row>> {
    // Never finished: it is there for the cells alone.
    let cell = Draft::new(&out.join("cell.yaml")).context("cannot write the cell's config")?;
    let text = serde_yaml::to_string(&config.cell).context("cannot write the cell's config")?;
    fs::write(cell.path(), text)
        .with_context(|| format!("cannot write {}", cell.path().display()))?;

    let grid = axes.iter().fold(vec![Index::new()], |places, axis| {
        let beside = |place: &Index| {
            let all = axis.values.iter().map(|&value| [&place[..], &[value]].concat());
            all.collect::<Vec<_>>()
        };
        places.iter().flat_map(beside).collect()
    });
    let mut progress = Cells::new(grid.len() * config.rounds);
    let mut found: Vec<_> = grid.iter().map(|_| Vec::with_capacity(config.rounds)).collect();
    for _ in 0..config.rounds {
        for (place, rounds) in grid.iter().zip(&mut found) {
            let named = describe(axes, place);
            progress.begin(&named);
            let set = |(axis, &value): (&Axis, _)| format!("{}={}", axis.key, shown(value));
            let sets: Vec<_> = axes.iter().zip(place).map(set).collect();
            let outcome = run_cell(cell.path(), &sets);
            let row = Row {
                place: place.clone(),
                outcome: outcome.map_err(|error| format!("{error:#}")),
            };
            progress.end(&named, row.summary(), row.outcome.is_err());
            rounds.push(row);
        }
    }
    drop(progress);
    Ok(found.into_iter().filter_map(pick_round).collect())
}

/// The round of a cell to keep: one that failed, else that of the median step time.
pub(super) fn pick_round(mut rounds: Vec<Row>) -> Option<Row> {
    let median = |row: &Row| row.measured().map(|measured| measured.median_step_ms);
    // Failures first, as nothing is less than something.
    rounds.sort_by(|a, b| median(a).partial_cmp(&median(b)).unwrap_or(Ordering::Equal));
    let has_failed = rounds.first().is_some_and(|row| row.outcome.is_err());
    let kept = if has_failed { 0 } else { rounds.len() / 2 };
    rounds.into_iter().nth(kept)
}

fn run_cell(cell: &Path, sets: &[String]) -> Result<(Measured, Value)> {
    let mut value = apart::report(cell, sets)?;
    let measured = Measured::deserialize(&value).context("the cell's report is incomplete")?;
    if let Some(report) = value.as_object_mut() {
        // Both are the sweep's own, printed once for all rows.
        report.shift_remove("machine");
        report.shift_remove("config");
    }
    Ok((measured, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_its_median_round_or_its_failure() {
        let row = |ms: Option<f64>| {
            let report = serde_json::json!({"median_step_ms": ms, "mem_after_run": {}});
            let outcome = match ms {
                Some(_) => Ok((Measured::deserialize(&report).unwrap(), report)),
                None => Err("no".to_owned()),
            };
            Row { place: vec![], outcome }
        };
        let kept = |rounds: &[Option<f64>]| {
            let kept = pick_round(rounds.iter().copied().map(row).collect()).unwrap();
            kept.measured().and_then(|measured| measured.median_step_ms)
        };
        assert_eq!(kept(&[Some(7.0)]), Some(7.0));
        assert_eq!(kept(&[Some(9.0), Some(2.0), Some(3.0)]), Some(3.0));
        assert_eq!(kept(&[Some(9.0), None, Some(3.0)]), None);
    }
}

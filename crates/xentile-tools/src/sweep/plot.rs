//! What a sweep's plot shows.

use super::Sweep;
use super::cell::{Measured, Memory, Row};
use super::grid::shown;
use crate::memory;
use crate::plot::{Figure, Panel, Series};

impl Sweep<'_> {
    pub(super) fn figure(&self) -> Figure {
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

    /// The first of `figures` that any cell tells, beside what the first operand and its gradient alone take
    /// or the cell without a budget.
    pub(super) fn memory_panel(&self, figures: &[Memory]) -> Panel {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let is_reported = |figure: &Memory| {
            self.rows.iter().any(|row| row.measured().is_some_and(|m| figure.of(m).is_some()))
        };
        let Some(figure) = figures.iter().copied().find(is_reported) else {
            let y_label = "memory: not reported".to_owned();
            return Panel { y_label, series: self.lines(|_| None), level: None, mark: None };
        };
        let has_gaps = self.rows.iter().filter_map(Row::measured).any(|m| figure.of(m).is_none());
        let gaps = if has_gaps { "; gaps: not reported" } else { "" };
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
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;
    use crate::config;
    use crate::machine::Machine;
    use crate::sweep::Config;

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
    fn the_memory_panel_shows_the_most_exact_figure_reported() {
        const MIB: u64 = 1 << 20;
        let [none, some] = [[None; 2], [Some(7 * MIB), None]];
        let points = |panel: &Panel| panel.series[0].points.iter().map(|p| p.1).collect::<Vec<_>>();
        let reported = panel(some, Some(MIB), Some(MIB));
        assert_eq!(reported.y_label, "device memory, peak in use (MiB; gaps: not reported)");
        assert_eq!(points(&reported), [Some(7.0), None]);
        let program = panel(none, Some(3 * MIB), Some(MIB));
        assert_eq!(program.y_label, "arguments, results, temporaries (MiB)");
        assert_eq!(points(&program), [Some(3.0); 2], "results lie in arguments");
        let process = panel(none, None, Some(2 * MIB));
        assert_eq!(process.y_label, "process's memory, peak (MiB)");
        assert_eq!(points(&process), [Some(2.0); 2]);
        let nothing = panel(none, None, None);
        assert_eq!(nothing.y_label, "memory: not reported");
        assert_eq!(points(&nothing), [None; 2]);
    }
}

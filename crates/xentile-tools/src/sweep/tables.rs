//! What a sweep's tables say of a cell.

use std::fmt::Display;

use super::cell::{Estimated, Measured, Memory, ProgramMemory, figure};
use crate::memory;

/// A column: its head, and what it says of a cell.
pub(super) type Column = (&'static str, fn(&Measured) -> String);

/// What stands above the table of a sweep that only compiles.
pub(super) const NOTHING_RAN: &str = "Times are estimates from the compiler's schedule and what is \
    published of the chip; nothing ran.\n\n";

/// What decides which columns there are.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    /// Whether a step is held to products, and their plan printed; else to copies.
    pub(super) of_products: bool,
    /// Whether programs are compiled and none run.
    pub(super) is_compiled: bool,
}

/// The columns of `sweep.csv`, between the status and the error.
pub(super) fn csv(kind: Kind) -> Vec<Column> {
    match (kind.of_products, kind.is_compiled) {
        (false, false) => [CSV_STEP, CSV_COPY, CSV_RUN].concat(),
        (true, false) => [CSV_STEP, CSV_PRODUCTS, CSV_RUN, CSV_PLAN].concat(),
        (false, true) => [CSV_PROGRAM, CSV_TILE, CSV_ESTIMATE].concat(),
        (true, true) => [CSV_PROGRAM, CSV_ESTIMATE, CSV_PLAN].concat(),
    }
}

/// The columns of `sweep.md`.
pub(super) fn markdown(kind: Kind) -> Vec<Column> {
    match (kind.of_products, kind.is_compiled) {
        (false, false) => [STEP, COPY, RUN].concat(),
        (true, false) => [STEP, PRODUCTS, RUN, PLAN].concat(),
        (false, true) => [PROGRAM, TILE, ESTIMATE].concat(),
        (true, true) => [PROGRAM, ESTIMATE, PLAN].concat(),
    }
}

const CSV_STEP: &[Column] = &[
    ("median_step_ms", |m| plain(m.median_step_ms)),
    ("avg_step_ms", |m| plain(m.avg_step_ms)),
    ("min_step_ms", |m| plain(m.min_step_ms)),
    ("std_step_ms", |m| plain(m.std_step_ms)),
];

const CSV_COPY: &[Column] = &[
    ("copy_ms", |m| plain(m.copy_ms)),
    ("ratio_to_copy", |m| plain(m.ratio_to_copy)),
    ("gb_per_s", |m| plain(m.gb_per_s)),
    ("copy_gb_per_s", |m| plain(m.copy_gb_per_s)),
];

const CSV_PRODUCTS: &[Column] = &[("gflop_per_s", |m| plain(m.gflop_per_s))];

const CSV_RUN: &[Column] = &[
    ("first_call_s", |m| plain(m.first_call_s)),
    ("peak_resident_bytes", |m| plain(m.mem_after_run.peak_resident_bytes)),
    ("device_peak_bytes_in_use", |m| plain(m.mem_after_run.peak_bytes_in_use)),
    ("device_bytes_in_use", |m| plain(m.mem_after_run.bytes_in_use)),
    ("compiled_argument_bytes", |m| plain(part(m, |program| program.argument_bytes))),
    ("compiled_output_bytes", |m| plain(part(m, |program| program.output_bytes))),
    ("compiled_temporary_bytes", |m| plain(part(m, |program| program.temporary_bytes))),
    ("compiled_alias_bytes", |m| plain(part(m, |program| program.alias_bytes))),
];

const CSV_PLAN: &[Column] = &[("plan", |m| plan(m).map_or(String::new(), quoted))];

const CSV_PROGRAM: &[Column] = &[
    ("compile_s", |m| plain(m.compile_s)),
    ("code_bytes", |m| plain(part(m, |program| program.code_bytes))),
    ("argument_bytes", |m| plain(part(m, |program| program.argument_bytes))),
    ("output_bytes", |m| plain(part(m, |program| program.output_bytes))),
    ("temporary_bytes", |m| plain(part(m, |program| program.temporary_bytes))),
    ("peak_bytes", |m| plain(part(m, |program| program.peak_bytes))),
    ("vmem_bytes", |m| plain(m.vmem_bytes())),
    ("bundles", |m| plain(bundles(m))),
    ("spills", |m| plain(slots(m, "vstore_spill"))),
    ("fills", |m| plain(slots(m, "vload_fill"))),
];

const CSV_TILE: &[Column] = &[
    ("estimated_tile_dma_us", |m| plain(m.estimated(TILE_DMA_US))),
    ("estimated_tile_schedule_us", |m| plain(m.estimated(TILE_SCHEDULE_US))),
];

const CSV_ESTIMATE: &[Column] = &[
    ("estimated_dma_ms", |m| plain(m.estimated(DMA_MS))),
    ("estimated_schedule_ms", |m| plain(m.estimated(SCHEDULE_MS))),
    ("binds", |m| plain(m.estimate.as_ref().map(Estimated::binds))),
    ("estimated_step_ms", |m| plain(m.estimated(|estimate| estimate.step_ms))),
];

const STEP: &[Column] = &[
    ("median ms", |m| figure(m.median_step_ms, 3)),
    ("min ms", |m| figure(m.min_step_ms, 3)),
    ("std ms", |m| figure(m.std_step_ms, 3)),
];

const COPY: &[Column] =
    &[("x copy", |m| figure(m.ratio_to_copy, 3)), ("GB/s", |m| figure(m.gb_per_s, 2))];

const PRODUCTS: &[Column] = &[
    ("GFLOP/s", |m| figure(m.gflop_per_s, 1)),
    ("temporaries", |m| bytes(Memory::Temporaries.of(m))),
];

const RUN: &[Column] = &[
    ("process peak", |m| bytes(Memory::Process.of(m))),
    ("device peak", |m| bytes(Memory::DevicePeak.of(m))),
    ("program", |m| bytes(Memory::Program.of(m))),
];

const PLAN: &[Column] = &[("plan", |m| or_not_reported(plan(m)))];

const PROGRAM: &[Column] = &[
    ("compile s", |m| figure(m.compile_s, 1)),
    ("code", |m| bytes(part(m, |program| program.code_bytes))),
    ("temporaries", |m| bytes(Memory::Temporaries.of(m))),
    ("peak", |m| bytes(part(m, |program| program.peak_bytes))),
    ("VMEM", |m| bytes(m.vmem_bytes())),
    ("bundles", |m| or_not_reported(bundles(m))),
    ("spills", |m| or_not_reported(slots(m, "vstore_spill"))),
];

const TILE: &[Column] = &[
    ("tile: DMA us", |m| figure(m.estimated(TILE_DMA_US), 2)),
    ("tile: schedule us", |m| figure(m.estimated(TILE_SCHEDULE_US), 2)),
];

const ESTIMATE: &[Column] = &[
    ("DMA ms", |m| figure(m.estimated(DMA_MS), 3)),
    ("schedule ms", |m| figure(m.estimated(SCHEDULE_MS), 3)),
    ("binds", |m| or_not_reported(m.estimate.as_ref().map(Estimated::binds))),
    ("estimated step ms", |m| figure(m.estimated(|estimate| estimate.step_ms), 3)),
    ("x floor", |m| figure(m.estimated(|estimate| estimate.ratio_to_floor), 2)),
];

const TILE_DMA_US: fn(&Estimated) -> f64 =
    |estimate| estimate.sum(|kernel| kernel.tile_dma_us.unwrap_or(0.0));
const TILE_SCHEDULE_US: fn(&Estimated) -> f64 =
    |estimate| estimate.sum(|kernel| kernel.tile_schedule_us.unwrap_or(0.0));
const DMA_MS: fn(&Estimated) -> f64 = |estimate| estimate.sum(|kernel| kernel.dma_ms);
const SCHEDULE_MS: fn(&Estimated) -> f64 = |estimate| estimate.sum(|kernel| kernel.schedule_ms);

impl Measured {
    fn estimated(&self, of: fn(&Estimated) -> f64) -> Option<f64> {
        self.estimate.as_ref().map(of)
    }
}

fn part(cell: &Measured, of: fn(ProgramMemory) -> Option<u64>) -> Option<u64> {
    cell.compiled.and_then(of)
}

fn bundles(cell: &Measured) -> Option<u64> {
    cell.schedule.as_ref().map(|schedule| schedule.bundles)
}

fn slots(cell: &Measured, unit: &str) -> Option<u64> {
    cell.schedule.as_ref()?.slots_used.get(unit).copied()
}

fn plan(cell: &Measured) -> Option<&str> {
    cell.exported.as_ref()?.plan.as_deref()
}

/// For programs: nothing where it is not reported.
fn plain(value: Option<impl Display>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}

/// For people.
fn or_not_reported(value: Option<impl Display>) -> String {
    value.map_or("not reported".to_owned(), |value| value.to_string())
}

fn bytes(bytes: Option<u64>) -> String {
    or_not_reported(bytes.map(memory::human))
}

/// Text that may have commas, as a cell of CSV.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

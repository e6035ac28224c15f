//! Which kernels a pass launches, one after the other, and how many CTAs of each.

use std::ptr::{null, null_mut};

use xentile::DType;
use xentile::fp8_quantize::{Blocks, Format, QuantizeShape};

use super::arguments::{
    Arguments, BLOCK_HELD, BLOCK_THREADS, COLUMN_ROWS, COLUMN_THREADS, FINISH_THREADS, GATED_BATCH,
    NORM_CTAS, RUN_BATCH, RUN_THREADS, STATISTICS_ROWS, TILE,
};
use crate::driver::Extent;

/// The lanes of a warp.
const WARP: usize = 32;

/// The bytes of a vector.
pub(super) const VECTOR: usize = 16;

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pass {
    Scales { blocks: Blocks, is_transposed: bool },
    Given { scales: usize, is_transposed: bool },
    Amax,
}

/// How many numbers are 0 before a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Zeros {
    pub(super) numbers: usize,
    pub(super) transposed_scales: usize,
}

/// What scales are made of, once all has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finish {
    /// Of amax in the place of numbers.
    Numbers,
    /// Of amax in their own place.
    TurnedScales,
    /// Those of the transposed copy, of those of squares.
    Squares,
}

/// A kernel; names are without what is said of all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Parts of rows, each by some lanes of a warp.
    Runs { name: &'static str, lanes: usize },
    /// Blocks, a CTA each.
    Blocks,
    /// Tiles with their transposed copy.
    Transposed(&'static str),
    /// amax of parts of columns.
    Columns,
    /// Scales of what is there.
    Finish(Finish),
}

/// A launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    what: What,
    /// Whether rows do not consist of vectors.
    is_ragged: bool,
    pub(super) zeros: Zeros,
    ctas: usize,
    threads: usize,
    /// Matrices, rows and columns, as the kernel takes them.
    shape: [usize; 3],
    block: [usize; 2],
    rows_of_scale: usize,
}

impl Arguments {
    /// No arrays, and nothing in them.
    pub(super) const NONE: Self = Self {
        x: null(),
        given: null(),
        values: null_mut(),
        numbers: null_mut(),
        transposed: null_mut(),
        transposed_scales: null_mut(),
        matrices: 0,
        rows: 0,
        columns: 0,
        block_rows: 1,
        block_columns: 1,
        rows_of_scale: 1,
        lanes: 1,
        e5m2: 0,
        power_of_two: 0,
    };
}

impl Step {
    pub(super) fn name(&self, format: Format, dtype: DType) -> String {
        let ragged = if self.is_ragged { "_ragged" } else { "" };
        match self.what {
            What::Runs { name: name @ ("runs_amax" | "runs_amax_parts"), .. } => {
                format!("fp8_quantize_{name}{ragged}_{dtype}")
            }
            What::Runs { name, .. } => format!("fp8_quantize_{name}{ragged}_{format}_{dtype}"),
            What::Blocks => format!("fp8_quantize_blocks{ragged}_{format}_{dtype}"),
            What::Transposed("amax") => format!("fp8_quantize_transposed_amax{ragged}_{dtype}"),
            What::Transposed(name) => {
                format!("fp8_quantize_transposed_{name}{ragged}_{format}_{dtype}")
            }
            What::Columns => format!("fp8_quantize_columns{ragged}_{dtype}"),
            What::Finish(_) => "fp8_quantize_finish".into(),
        }
    }

    /// None where there are more CTAs than a grid has.
    pub(super) fn extent(&self) -> Option<Extent> {
        let ctas = i32::try_from(self.ctas).ok()?.cast_unsigned();
        let threads = self.threads as u32;
        Some(Extent { ctas, rows: 1, threads, shared_bytes: 0, cluster: None })
    }

    /// What the kernel takes, of all arrays of the pass.
    pub(super) fn arguments(&self, arrays: Arguments) -> Arguments {
        let [matrices, rows, columns] = self.shape.map(|extent| extent as i64);
        let [block_rows, block_columns] = self.block.map(|extent| extent as i64);
        let Arguments { numbers, transposed_scales, .. } = arrays;
        let (numbers, transposed_scales) = match self.what {
            What::Finish(Finish::Numbers) => (null_mut(), numbers),
            What::Finish(Finish::TurnedScales) => (null_mut(), transposed_scales),
            _ => (numbers, transposed_scales),
        };
        let lanes = if let What::Runs { lanes, .. } = self.what { lanes as u32 } else { 1 };
        Arguments {
            numbers,
            transposed_scales,
            matrices,
            rows,
            columns,
            block_rows,
            block_columns,
            rows_of_scale: self.rows_of_scale as i64,
            lanes,
            ..arrays
        }
    }
}

/// The launches of a pass over elements that there are.
pub(super) fn steps(pass: Pass, shape: QuantizeShape, dtype: DType) -> Vec<Step> {
    let rows = shape.matrices() * shape.rows();
    match pass {
        _ if shape.elements() == 0 => Vec::new(),
        Pass::Amax => vec![plan_blocks(shape, dtype, Blocks::ROW, "runs_amax", 1)],
        Pass::Given { scales, is_transposed: false } => {
            vec![plan_blocks(shape, dtype, Blocks::ROW, "runs_given", rows / scales)]
        }
        Pass::Given { scales, is_transposed: true } => {
            let zeros = Zeros { numbers: rows, transposed_scales: 0 };
            vec![Step { zeros, ..transposed(shape, dtype, "given", rows / scales, [1, 1]) }]
        }
        Pass::Scales { blocks, is_transposed: false } => {
            vec![plan_blocks(shape, dtype, blocks, "runs", 1)]
        }
        Pass::Scales { blocks, is_transposed: true } => with_transposed(shape, dtype, blocks),
    }
}

fn with_transposed(shape: QuantizeShape, dtype: DType, blocks: Blocks) -> Vec<Step> {
    let tile = TILE as usize;
    let [rows, columns] = [shape.rows(), shape.columns()];
    if blocks == (Blocks { rows: 1, columns: Some(tile) }) {
        return vec![transposed(shape, dtype, "runs", 1, [1, tile])];
    }
    if blocks == (Blocks { rows: tile, columns: Some(tile) }) {
        return vec![transposed(shape, dtype, "squares", 1, [tile, tile])];
    }
    if blocks == Blocks::ROW {
        let [of_rows, of_columns] = [rows, columns].map(|extent| shape.matrices() * extent);
        let zeros = Zeros { numbers: of_rows, transposed_scales: of_columns };
        return vec![
            Step { zeros, ..transposed(shape, dtype, "amax", 1, [1, 1]) },
            finish(Finish::Numbers, of_rows),
            finish(Finish::TurnedScales, of_columns),
            transposed(shape, dtype, "both", 1, [rows, 1]),
        ];
    }
    let straight = plan_blocks(shape, dtype, blocks, "runs", 1);
    // Rows and columns of x that a scale of the transposed copy is of.
    let block = match blocks.rows {
        1 => [blocks.columns.unwrap_or(rows).min(rows), 1],
        side => [side.min(rows), side.min(columns)],
    };
    let there = transposed(shape, dtype, "there", 1, block);
    let count = shape.matrices() * rows.div_ceil(block[0]) * columns.div_ceil(block[1]);
    if blocks.rows > 1 {
        let squares = finish(Finish::Squares, count);
        let squares = Step { shape: there.shape, block: there.block, ..squares };
        return vec![straight, squares, there];
    }
    let strips = columns.div_ceil(WARP * per_vector(dtype));
    let parts = rows.div_ceil(block[0]) * block[0].div_ceil(COLUMN_ROWS as usize);
    let of_columns = Step {
        what: What::Columns,
        zeros: Zeros { numbers: 0, transposed_scales: count },
        ctas: shape.matrices() * parts * strips,
        threads: COLUMN_THREADS as usize,
        ..there
    };
    vec![straight, of_columns, finish(Finish::TurnedScales, count), there]
}

/// The launch of values, with the transposed copy or without, of what is made of two arrays, in blocks of one
/// row and the columns of a tile, of which rows are a whole number.
pub(super) fn gated(shape: QuantizeShape, dtype: DType, is_transposed: bool) -> Step {
    let tile = TILE as usize;
    if is_transposed {
        return transposed(shape, dtype, "gated", 1, [1, tile]);
    }
    let blocks = Blocks { rows: 1, columns: Some(tile) };
    let step = plan_blocks(shape, dtype, blocks, "gated", 1);
    // Two vectors in the place of one are half as many runs.
    Step { ctas: step.ctas * (RUN_BATCH / GATED_BATCH) as usize, ..step }
}

/// The launch of values with their transposed copy, in such blocks, of rows that are normalised as they are read.
pub(super) fn normed(shape: QuantizeShape, dtype: DType) -> Step {
    transposed(shape, dtype, "norm", 1, [1, TILE as usize])
}

/// Bands of tiles that statistics are ahead of tiles by, beside those that run at a time.
const BANDS_AHEAD: usize = 6;
/// Columns below which two launches take less time.
const COLUMNS_IN_ONE: usize = 2048;

/// The same with the statistics of rows, in one launch: bands of tiles, and ahead of each the statistics of
/// rows of later ones. None where rows are short, where a band would have rows of two matrices, or where there are
/// more CTAs than a grid has.
pub(super) fn norm_in_one(
    shape: QuantizeShape,
    dtype: DType,
    multiprocessors: u32,
) -> Option<Step> {
    let tile = TILE as usize;
    let is_mixed = shape.matrices() > 1 && !shape.rows().is_multiple_of(tile);
    if is_mixed || shape.columns() < COLUMNS_IN_ONE {
        return None;
    }
    let step = normed(shape, dtype);
    let (across, parts) = (shape.columns().div_ceil(tile), tile / STATISTICS_ROWS as usize);
    let bands = step.ctas / across;
    let at_a_time = ((NORM_CTAS * multiprocessors) as usize).div_ceil(across + parts);
    let ahead = (at_a_time + BANDS_AHEAD).min(bands);
    Some(Step { ctas: bands * (across + parts) + ahead * parts, ..step })
        .filter(|step| i32::try_from(step.ctas).is_ok())
}

/// What makes scales of so many amax in the place of numbers.
pub(super) fn scales_of_amax(count: usize) -> Step {
    finish(Finish::Numbers, count)
}

/// Scales of so many numbers.
fn finish(of: Finish, count: usize) -> Step {
    Step {
        what: What::Finish(of),
        is_ragged: false,
        zeros: Zeros::default(),
        ctas: count.div_ceil(FINISH_THREADS as usize),
        threads: FINISH_THREADS as usize,
        shape: [1, count, 1],
        block: [1, 1],
        rows_of_scale: 1,
    }
}

/// Elements of a vector.
fn per_vector(dtype: DType) -> usize {
    VECTOR / dtype.size_bytes()
}

/// A pass over blocks, by lanes of a warp where those are enough.
fn plan_blocks(
    shape: QuantizeShape,
    dtype: DType,
    blocks: Blocks,
    name: &'static str,
    rows_of_scale: usize,
) -> Step {
    let per = per_vector(dtype);
    let mut extents = [shape.matrices(), shape.rows(), shape.columns()];
    let block = [blocks.rows.min(shape.rows()), blocks.columns_of(shape.columns())];
    let mut rows_of_scale = rows_of_scale;
    if block[0] == 1 && extents[2].is_multiple_of(block[1]) {
        // Each block a row.
        let across = extents[2] / block[1];
        rows_of_scale *= across;
        extents = [1, extents[0] * extents[1] * across, block[1]];
    }
    let [matrices, rows, columns] = extents;
    let across = columns.div_ceil(block[1]);
    let count = matrices * rows.div_ceil(block[0]) * across;
    let is_ragged = !(columns.is_multiple_of(per) && block[1].is_multiple_of(per));
    let units = block[1].div_ceil(per);
    let step = Step {
        what: What::Blocks,
        is_ragged,
        zeros: Zeros::default(),
        ctas: count,
        threads: (block[0] * units)
            .div_ceil(BLOCK_HELD as usize)
            .next_multiple_of(WARP)
            .min(BLOCK_THREADS as usize),
        shape: extents,
        block,
        rows_of_scale,
    };
    // Places of a team's runs are counted in 32 bits.
    let is_near = columns < (i32::MAX / 64) as usize / (RUN_BATCH as usize);
    if block[0] > 1 || units > WARP || !is_near {
        return step;
    }
    let lanes = units.next_power_of_two();
    let is_of_parts = across > 1 && !is_ragged;
    let name = match (name, is_of_parts) {
        ("runs", true) => "runs_parts",
        ("runs_given", true) => "runs_given_parts",
        ("runs_amax", true) => "runs_amax_parts",
        _ => name,
    };
    let of_cta = RUN_THREADS as usize / lanes * RUN_BATCH as usize;
    let what = What::Runs { name, lanes };
    Step { what, ctas: count.div_ceil(of_cta), threads: RUN_THREADS as usize, ..step }
}

/// A pass over tiles, with scales of `block` rows and columns of x.
fn transposed(
    shape: QuantizeShape,
    dtype: DType,
    name: &'static str,
    rows_of_scale: usize,
    block: [usize; 2],
) -> Step {
    let [rows, columns] = [shape.rows(), shape.columns()];
    let (tile, per) = (TILE as usize, per_vector(dtype));
    Step {
        what: What::Transposed(name),
        is_ragged: !columns.is_multiple_of(per),
        zeros: Zeros::default(),
        ctas: shape.matrices() * rows.div_ceil(tile) * columns.div_ceil(tile),
        threads: tile / per * 16,
        shape: [shape.matrices(), rows, columns],
        block,
        rows_of_scale,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BY_128: Blocks = Blocks { rows: 1, columns: Some(128) };

    #[test]
    fn statistics_are_ready_before_tiles_that_need_them() {
        for extents in [[1, 1, 2048], [1, 300, 4096], [1, 8192, 14336], [3, 256, 2176]] {
            let [matrices, rows, columns] = extents;
            let shape = QuantizeShape::new(matrices, rows, columns).unwrap();
            let ctas = norm_in_one(shape, DType::Bf16, 132).unwrap().ctas;
            let (across, bands) = (columns / 128, matrices * rows.div_ceil(128));
            let ahead = ctas - bands * (across + 16);
            // Of the first band at the least, and no more than there are.
            assert!(ahead >= 16 && ahead <= 16 * bands, "{extents:?} {ahead}");
        }
        // A tile that had rows of two matrices would wait for rows of the second.
        let shape = QuantizeShape::new(2, 67, 4096).unwrap();
        assert!(norm_in_one(shape, DType::Bf16, 132).is_none());
    }

    /// What is launched: names, CTAs and threads.
    fn of(pass: Pass, extents: [usize; 3], dtype: DType) -> Vec<(String, usize, usize)> {
        let [matrices, rows, columns] = extents;
        let shape = QuantizeShape::new(matrices, rows, columns).unwrap();
        let name = |step: &Step| {
            let name = step.name(Format::E4M3Fn, dtype);
            name.trim_start_matches("fp8_quantize_").to_owned()
        };
        let steps = steps(pass, shape, dtype);
        steps.iter().map(|step| (name(step), step.ctas, step.threads)).collect()
    }

    #[test]
    fn blocks_are_shared_out() {
        let straight = |blocks, extents, dtype| {
            let found = of(Pass::Scales { blocks, is_transposed: false }, extents, dtype);
            assert_eq!(found.len(), 1);
            found[0].clone()
        };
        let bf16 = DType::Bf16;
        let case = |name: &str, ctas, threads| (name.to_owned(), ctas, threads);
        // 64 runs of 128 a CTA, 8 to each half of a warp.
        assert_eq!(straight(BY_128, [1, 8192, 4096], bf16), case("runs_f8e4m3fn_bf16", 4096, 128));
        assert_eq!(straight(BY_128, [1, 7, 320], bf16), case("runs_parts_f8e4m3fn_bf16", 1, 128));
        assert_eq!(straight(BY_128, [1, 7, 300], bf16), case("runs_ragged_f8e4m3fn_bf16", 1, 128));
        let row = Blocks::ROW;
        assert_eq!(straight(row, [2, 8, 14336], bf16), case("blocks_f8e4m3fn_bf16", 16, 224));
        assert_eq!(straight(row, [1, 8, 4097], bf16), case("blocks_ragged_f8e4m3fn_bf16", 8, 96));
        let square = Blocks { rows: 128, columns: Some(128) };
        assert_eq!(
            straight(square, [1, 8192, 4096], bf16),
            case("blocks_f8e4m3fn_bf16", 2048, 256)
        );
        assert_eq!(
            straight(square, [1, 130, 256], DType::F32),
            case("blocks_f8e4m3fn_f32", 4, 512)
        );
    }

    #[test]
    fn transposed_copies_take_one_step_where_a_tile_has_its_scales() {
        let names = |blocks, extents, dtype| {
            let found = of(Pass::Scales { blocks, is_transposed: true }, extents, dtype);
            found.into_iter().map(|(name, ..)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(BY_128, [1, 256, 256], DType::Bf16), ["transposed_runs_f8e4m3fn_bf16"]);
        let square = |side| Blocks { rows: side, columns: Some(side) };
        assert_eq!(
            names(square(128), [1, 256, 100], DType::F16),
            ["transposed_squares_ragged_f8e4m3fn_f16"]
        );
        assert_eq!(
            names(square(64), [1, 256, 256], DType::F32),
            ["blocks_f8e4m3fn_f32", "finish", "transposed_there_f8e4m3fn_f32"]
        );
        assert_eq!(
            names(Blocks { rows: 1, columns: Some(64) }, [1, 256, 4096], DType::Bf16),
            ["runs_f8e4m3fn_bf16", "columns_bf16", "finish", "transposed_there_f8e4m3fn_bf16"]
        );
        assert_eq!(
            names(Blocks::ROW, [1, 256, 4096], DType::Bf16),
            ["transposed_amax_bf16", "finish", "finish", "transposed_both_f8e4m3fn_bf16"]
        );
        let given = Pass::Given { scales: 1, is_transposed: true };
        let shape = QuantizeShape::new(1, 130, 256).unwrap();
        let found = steps(given, shape, DType::Bf16);
        assert_eq!(found[0].zeros, Zeros { numbers: 130, transposed_scales: 0 });
        assert_eq!((found[0].ctas, found[0].threads, found[0].rows_of_scale), (4, 256, 130));
    }

    #[test]
    fn fused_forms_are_shared_out_as_others_are() {
        let shape = QuantizeShape::new(2, 100, 640).unwrap();
        let of = |step: Step| (step.name(Format::E5M2, DType::Bf16), step.ctas, step.threads);
        let case =
            |name: &str, ctas, threads| (format!("fp8_quantize_{name}_f8e5m2_bf16"), ctas, threads);
        // 1000 runs, 32 a CTA.
        assert_eq!(of(gated(shape, DType::Bf16, false)), case("gated", 32, 128));
        assert_eq!(of(gated(shape, DType::Bf16, true)), case("transposed_gated", 10, 256));
        assert_eq!(of(normed(shape, DType::Bf16)), case("transposed_norm", 10, 256));
    }

    #[test]
    fn rows_are_folded_with_the_scales_they_have() {
        let shape = QuantizeShape::new(6, 5, 40).unwrap();
        let given = steps(Pass::Given { scales: 3, is_transposed: false }, shape, DType::F32);
        assert_eq!((given[0].shape, given[0].rows_of_scale), ([1, 30, 40], 10));
        let of_parts =
            plan_blocks(shape, DType::F32, Blocks { rows: 1, columns: Some(8) }, "runs", 1);
        assert_eq!((of_parts.shape, of_parts.block), ([1, 150, 8], [1, 8]));
    }
}

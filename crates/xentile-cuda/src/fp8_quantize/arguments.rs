//! What kernels of FP8 quantisation take.

use std::ffi::c_void;

mirror! {
    /// See kernels/fp8_quantize.cuh.
    pub(crate) struct Arguments = Fp8QuantizeArguments {
        x: *const c_void,
        given: *const f32,
        values: *mut u8,
        numbers: *mut f32,
        transposed: *mut u8,
        transposed_scales: *mut f32,
        matrices: i64,
        rows: i64,
        columns: i64,
        block_rows: i64,
        block_columns: i64,
        rows_of_scale: i64,
        lanes: u32,
        e5m2: u32,
        power_of_two: u32,
    }
}

mirror! {
    /// See kernels/fp8_gated.cu.
    pub(crate) struct GatedArguments = Fp8GatedArguments {
        to: Arguments,
        up: *const c_void,
        columns: i64,
        alpha: f32,
        limit: f32,
        up_offset: f32,
        packing: u32,
    }
}

mirror! {
    /// See kernels/fp8_norm.cu.
    pub(crate) struct NormedArguments = Fp8NormArguments {
        norm: crate::norm::Arguments,
        to: Arguments,
    }
}

numbers! {
    RUN_THREADS: u32 = kFp8RunThreads, 128;
    RUN_BATCH: u32 = kFp8RunBatch, 8;
    BLOCK_THREADS: u32 = kFp8BlockThreads, 512;
    BLOCK_HELD: u32 = kFp8BlockHeld, 8;
    TILE: u32 = kFp8Tile, 128;
    COLUMN_THREADS: u32 = kFp8ColumnThreads, 256;
    COLUMN_ROWS: u32 = kFp8ColumnRows, 128;
    FINISH_THREADS: u32 = kFp8FinishThreads, 256;
    APART: u32 = kFp8Apart, 0;
    HALVES: u32 = kFp8Halves, 1;
    INTERLEAVED: u32 = kFp8Interleaved, 2;
    GATED_BATCH: u32 = kFp8GatedBatch, 4;
    STATISTICS_ROWS: u32 = kFp8StatisticsRows, 8;
    NORM_CTAS: u32 = kFp8NormCtas, 4;
    AWAITED: u32 = kFp8Awaited, 0xffff_ffff;
}

//! What products with cross-entropy in their epilogue take, and what planning knows of them.

use std::ffi::c_void;

use crate::driver::TensorMap;

mirror! {
    /// See kernels/fused_product.cuh.
    #[repr(align(128))]
    pub(crate) struct Arguments = FusedProductArguments {
        hidden: TensorMap,
        weight: TensorMap,
        dlogits: TensorMap,
        row: crate::cross_entropy::Arguments,
        sums: *mut c_void,
        values: *mut f32,
        rounded: *mut f32,
        label_logits: *mut f32,
        gradients: *mut c_void,
        bias: *const f32,
        gate: *const u32,
        rescales: *mut u16,
        rescaled: *mut u32,
        labelled: *mut u32,
        hidden_rows: *const c_void,
        weight_rows: *const c_void,
        scaled_rows: *mut c_void,
        dbias: *mut f32,
        width: i64,
        vocab_step: i64,
        width_step: i64,
        written: i64,
        part: *mut c_void,
        part_first: i64,
        part_count: i64,
        part_stride: i64,
        blocks: u32,
        tiles: u32,
        parts: u32,
        token_blocks: u32,
        group: u32,
        adds: u32,
        weighted: *mut f32,
        largest: *mut c_void,
    }
}

numbers! {
    BLOCK: u32 = kBlock, 64;
    TILE_COLUMNS: u32 = kTileColumns, 256;
    CLUSTER_CTAS: u32 = kClusterCtas, 2;
    CLUSTER_TOKENS: u32 = kClusterTokens, 256;
    ROWS_OF_A: u32 = kRowsOfA, 128;
    ROWS_OF_B: u32 = kRowsOfB, 128;
    ROWS_OF_STORE: u32 = kRowsOfStore, 16;
    COLUMNS_OF_SUM: u32 = kColumnsOfSum, 32;
    THREADS: u32 = kFusedProductThreads, 384;
    SHARED_BYTES: u32 = kFusedProductBytes, 230_464;
    TOKEN_THREADS: u32 = kTokenThreads, 128;
    COLUMNS_OF_WARP: u32 = kOfWarp, 256;
    ROWS_OF_PLACE: u32 = kRowsOfPlace, 8;
    COLUMNS_OF_PLACE: u32 = kColumnsOfPlace, 2048;
}

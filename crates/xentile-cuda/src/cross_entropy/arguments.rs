//! What kernels of cross-entropy take, and what planning knows of them.

use std::ffi::c_void;

mirror! {
    /// See kernels/cross_entropy.cuh.
    pub(crate) struct Arguments = CrossEntropyArguments {
        logits: *const c_void,
        dlogits: *mut c_void,
        labels: *const c_void,
        dloss: *const f32,
        dlogps: *const f32,
        dlse: *const f32,
        saved_lse: *const f32,
        saved_lse_low: *const f32,
        loss: *mut f32,
        logps: *mut f32,
        lse: *mut f32,
        lse_low: *mut f32,
        carried: *mut c_void,
        tokens: i64,
        vocab: i64,
        columns: i64,
        stride: i64,
        first_column: i64,
        ignore_index: i64,
        label_smoothing: f64,
        z_loss: f64,
        softcap: f64,
        labels_are_64_bit: u32,
        every_token: u32,
        time_block: u32,
        chunk_vectors: u32,
        chunks: u32,
        slots: u32,
        columns_of_pieces: u32,
        pieces_of_a_column: u32,
        lanes: u32,
        whole_vectors: u32,
        per_element: f64,
        scale: f32,
        entropy: *mut f32,
        highest: *mut f32,
        argmax: *mut i32,
        saved_entropy: *const f32,
        dentropy: *const f32,
    }
}

// See kernels/ring.cuh, row.cuh, packed.cuh, flat.cuh, plain.cuh, whole.cuh and distribution.cuh.
numbers! {
    TABLES: u32 = kTables, 4;
    MAX_ROWS: u32 = kRows, 8;
    LINE: u32 = kLine, 8;
    FLAT_THREADS: u32 = kFlatThreads, 64;
    FLAT_BATCH: u32 = kFlatBatch, 16;
    PACKED_THREADS: u32 = kPackedThreads, 256;
    PLAIN_THREADS: u32 = kPlainThreads, 512;
    WHOLE_THREADS: u32 = kWholeThreads, 256;
    DISTRIBUTION_BYTES: u32 = kDistributionBytes, 32;
    PACKED_ROW_BYTES: u32 = kPackedRowBytes, 40;
    PACKED_DISTRIBUTION_ROW_BYTES: u32 = kPackedDistributionRowBytes, 56;
}

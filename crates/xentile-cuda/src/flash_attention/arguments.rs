//! What kernels of attention take.

use std::ffi::c_void;

use crate::driver::TensorMap;

mirror! {
    /// See kernels/flash_attention.cuh.
    pub(crate) struct Arguments = FlashAttentionArguments {
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        ranges: *const i32,
        q_segments: *const i32,
        kv_segments: *const i32,
        sinks: *const f32,
        o: *mut c_void,
        lse: *mut f32,
        dout: *const c_void,
        dlse: *const f32,
        dq: *mut c_void,
        dk: *mut c_void,
        dv: *mut c_void,
        dsinks: *mut f32,
        heads: i64,
        group: i32,
        queries: i32,
        keys: i32,
        width: i32,
        value_width: i32,
        scale: f32,
        softcap: f32,
        inner: i32,
        q_row: i32,
        k_row: i32,
        q_group: i64,
        q_head: i64,
        k_head: i64,
    }
}

mirror! {
    /// See kernels/flash_attention_forward_hopper.cuh.
    #[repr(align(128))]
    pub(crate) struct ForwardArguments = FlashAttentionForwardArguments {
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        of: Arguments,
        walk: u32,
    }
}

mirror! {
    /// See kernels/flash_attention_backward_hopper.cuh.
    #[repr(align(128))]
    pub(crate) struct BackwardArguments = FlashAttentionBackwardArguments {
        q: TensorMap,
        dout: TensorMap,
        k: TensorMap,
        v: TensorMap,
        of: Arguments,
    }
}

mirror! {
    /// See kernels/flash_attention_decode.cuh.
    pub(crate) struct DecodeArguments = FlashAttentionDecodeArguments {
        of: Arguments,
        block_tables: *const i32,
        partials: *mut f32,
        partial_lse: *mut f32,
        pages: i32,
        page_size: i32,
        chunk_log2: i32,
        chunks: i32,
        first_entry: i32,
        entries: i32,
    }
}

mirror! {
    /// See kernels/flash_attention_gradients_hopper.cuh.
    #[repr(align(128))]
    pub(crate) struct GradientArguments = FlashAttentionGradientArguments {
        q: TensorMap,
        dout: TensorMap,
        k: TensorMap,
        v: TensorMap,
        of: Arguments,
        rows: *mut c_void,
        ranges: *mut c_void,
        segments: *mut i32,
        notes: *mut c_void,
        sums: *mut f32,
        terms: *mut u32,
        tickets: *mut u32,
        heads_at_a_time: i32,
        has_order: i32,
    }
}

numbers! {
    THREADS: u32 = kAttentionThreads, 128;
    NARROW_THREADS: u32 = kAttentionNarrowThreads, 64;
    SINK_THREADS: u32 = kAttentionSinkThreads, 256;
    BLOCK: usize = kAttentionBlock, 64;
    DECODE_THREADS: u32 = kAttentionDecodeThreads, 128;
    DECODE_BYTES: u32 = kAttentionDecodeBytes, 98304;
    DECODE_WIDE_BYTES: u32 = kAttentionDecodeWideBytes, 196608;
    FORWARD_THREADS: u32 = kAttentionForwardThreads, 384;
    FORWARD_QUERIES: usize = kAttentionForwardQueries, 128;
    FORWARD_KEYS: usize = kAttentionForwardKeys, 128;
    FORWARD_WIDE_KEYS: usize = kAttentionForwardWideKeys, 64;
    BACKWARD_THREADS: u32 = kAttentionBackwardThreads, 384;
    BACKWARD_ROWS: usize = kAttentionBackwardRows, 128;
    GRADIENTS_BYTES_64: u32 = kAttentionGradientsBytes64, 212992;
    GRADIENTS_BYTES_128: u32 = kAttentionGradientsBytes128, 212992;
    KEYS_BYTES_64: u32 = kAttentionKeysBytes64, 163840;
    KEYS_BYTES_128: u32 = kAttentionKeysBytes128, 196608;
    KEYS_BYTES_192: u32 = kAttentionKeysBytes192, 212992;
    KEYS_BYTES_256: u32 = kAttentionKeysBytes256, 229376;
    VALUES_BYTES_192: u32 = kAttentionValuesBytes192, 212992;
    VALUES_BYTES_256: u32 = kAttentionValuesBytes256, 196608;
    QUERIES_BYTES_64: u32 = kAttentionQueriesBytes64, 163840;
    QUERIES_BYTES_128: u32 = kAttentionQueriesBytes128, 196608;
    QUERIES_BYTES_192: u32 = kAttentionQueriesBytes192, 204800;
    QUERIES_BYTES_256: u32 = kAttentionQueriesBytes256, 229376;
}

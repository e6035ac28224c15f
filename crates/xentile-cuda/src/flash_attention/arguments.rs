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
        span: u32,
        q_map: TensorMap,
        k_map: TensorMap,
        v_map: TensorMap,
    }
}

numbers! {
    THREADS: u32 = kAttentionThreads, 128;
    SINK_THREADS: u32 = kAttentionSinkThreads, 256;
    BLOCK: usize = kAttentionBlock, 64;
    HOPPER_THREADS: u32 = kAttentionHopperThreads, 384;
    HOPPER_QUERIES: usize = kAttentionHopperQueries, 128;
    HOPPER_KEYS: usize = kAttentionHopperKeys, 128;
    HOPPER_WIDE_KEYS: usize = kAttentionHopperWideKeys, 64;
}

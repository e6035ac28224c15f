//! What kernels of norms take, and what planning knows of them.

use std::ffi::c_void;

mirror! {
    /// See kernels/norm.cuh.
    pub(crate) struct Arguments = NormArguments {
        x: *const c_void,
        added: *const c_void,
        dy: *const c_void,
        weight: *const c_void,
        bias: *const c_void,
        mean: *mut f32,
        rstd: *mut f32,
        to: *mut c_void,
        sum: *mut c_void,
        dweight: *mut f32,
        dbias: *mut f32,
        rows: i64,
        columns: i64,
        weight_rows: i64,
        bias_rows: i64,
        group_rows: i64,
        blocks: i64,
        eps: f64,
        weight_dtype: u32,
        zero_centred: u32,
        lanes: u32,
        teams: u32,
        adjacent: u32,
        ahead: u32,
    }
}

numbers! {
    WEIGHT_F32: u32 = kWeightF32, 0;
    WEIGHT_BF16: u32 = kWeightBf16, 1;
    WEIGHT_F16: u32 = kWeightF16, 2;
    WARPS: u32 = kNormWarps, 32;
    RING1_THREADS: u32 = kRing1Threads, 1024;
    RING2_THREADS: u32 = kRing2Threads, 640;
    RING4_THREADS: u32 = kRing4Threads, 512;
    PLACES: u32 = kPlaces, 96;
    ANY_THREADS: u32 = kAnyThreads, 512;
}

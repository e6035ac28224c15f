//! What kernels of rotary position embedding take.

use std::ffi::c_void;

mirror! {
    /// See kernels/rope.cu.
    pub(crate) struct Arguments = RopeArguments {
        x: *const c_void,
        indices: *const i32,
        cos: *const f32,
        sin: *const f32,
        y: *mut c_void,
        rows: i64,
        rows_of_group: i64,
        positions: i64,
        columns: i64,
        pairs: i64,
        units: i64,
        sign: f32,
        in_place: u32,
    }
}

numbers! {
    THREADS: u32 = kRopeThreads, 128;
    BATCH: u32 = kRopeBatch, 4;
}

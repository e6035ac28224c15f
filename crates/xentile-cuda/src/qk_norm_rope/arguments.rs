//! What kernels of normalised and rotated heads take.

use std::ffi::c_void;

mirror! {
    /// See kernels/qk_norm_rope.cuh.
    pub(crate) struct Arguments = QkNormRopeArguments {
        x: [*const c_void; 2],
        dy: [*const c_void; 2],
        weight: [*const c_void; 2],
        to: [*mut c_void; 2],
        rstd: [*mut f32; 2],
        dweight: [*mut f32; 2],
        indices: *const i32,
        cos: *const f32,
        sin: *const f32,
        tokens: i64,
        columns: i64,
        pairs: i64,
        positions: i64,
        eps: f64,
        heads: [i32; 2],
        groups: [i32; 2],
        weight_dtype: [u32; 2],
        zero_centred: u32,
        units: u32,
        lanes: u32,
    }
}

numbers! {
    FORWARD_THREADS: u32 = kQkForwardThreads, 128;
    BACKWARD_THREADS: u32 = kQkBackwardThreads, 512;
    FORWARD_HEADS: u32 = kQkForwardHeads, 4;
    BACKWARD_HEADS: u32 = kQkBackwardHeads, 2;
}

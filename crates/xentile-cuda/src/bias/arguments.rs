//! What kernels of a bias' gradient take.

use std::ffi::c_void;

mirror! {
    /// See kernels/bias.cu.
    pub(crate) struct Arguments = BiasArguments {
        from: *const c_void,
        factors: *const c_void,
        to: *mut f32,
        rows: i64,
        columns: i64,
        stride: i64,
        to_stride: i64,
        adds: u32,
    }
}

numbers! {
    WARPS: u32 = kBiasWarps, 8;
}

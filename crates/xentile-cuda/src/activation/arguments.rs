//! What kernels of activations take.

use std::ffi::c_void;

mirror! {
    /// See kernels/activation.cuh.
    pub(crate) struct Arguments = ActivationArguments {
        x: *const c_void,
        dy: *const c_void,
        result: *mut c_void,
        y: *mut c_void,
        rows: i64,
        columns: i64,
        alpha: f32,
        limit: f32,
        up_offset: f32,
        kind: u32,
    }
}

numbers! {
    THREADS: u32 = kActivationThreads, 128;
    BATCH: u32 = kActivationBatch, 4;
    SILU: u32 = kActivationSilu, 0;
    GELU_TANH: u32 = kActivationGeluTanh, 1;
    GELU_ERF: u32 = kActivationGeluErf, 2;
    RELU: u32 = kActivationRelu, 3;
    SQUARED_RELU: u32 = kActivationSquaredRelu, 4;
}

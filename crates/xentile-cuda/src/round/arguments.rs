//! What kernels of rounding take.

use std::ffi::c_void;

mirror! {
    /// See kernels/round.cu.
    pub(crate) struct Arguments = RoundArguments {
        from: *const f32,
        to: *mut c_void,
        rows: i64,
        columns: i64,
        stride: i64,
    }
}

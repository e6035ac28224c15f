//! What kernels of scaling take.

use std::ffi::c_void;

mirror! {
    /// See kernels/scale.cu.
    pub(crate) struct Arguments = ScaleArguments {
        x: *const c_void,
        factors: *const f32,
        scaled: *mut c_void,
        rows: i64,
        columns: i64,
    }
}

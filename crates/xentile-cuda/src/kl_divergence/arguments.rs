//! What the kernel of the divergence takes.

use std::ffi::c_void;

mirror! {
    /// See kernels/kl_divergence.cuh.
    pub(crate) struct Arguments = KlDivergenceArguments {
        student: *const f32,
        teacher: *const f32,
        factors: *const f32,
        first: *const i32,
        losses: *mut f32,
        dlogits: *mut c_void,
        last: i64,
        rows: i32,
        vocab: i32,
        inverse_temperature: f32,
    }
}

numbers! {
    THREADS: u32 = kKlThreads, 512;
    MAX_CTAS: u32 = kKlMaxCtas, 16;
    FEW_THREAD_COLUMNS: usize = kKlFewThreadColumns, 32;
    THREAD_COLUMNS: usize = kKlThreadColumns, 40;
    LINE_COLUMNS: usize = kKlLineColumns, 64;
    SHARED_BYTES: usize = kKlSharedBytes, 12432;
}

//! What the kernel that draws tokens takes.

mirror! {
    /// See kernels/sample.cuh.
    pub(crate) struct Arguments = SampleArguments {
        logits: *const f32,
        keys: *const u32,
        steps: *const i32,
        starts: *const i32,
        options: *const f32,
        tokens: *mut i32,
        logps: *mut f32,
        bounds: *mut f32,
        rows: i32,
        vocab: i32,
    }
}

numbers! {
    THREADS: u32 = kSampleThreads, 1024;
    NOISE_CTAS: u32 = kSampleNoiseCtas, 64;
    MOST_COLUMNS: usize = kSampleMostColumns, 32768;
    MAX_CTAS: u32 = kSampleMaxCtas, 16;
    SHARED_BYTES: usize = kSampleSharedBytes, 95120;
}

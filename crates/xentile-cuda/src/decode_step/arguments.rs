//! What the kernel that decodes a token takes.

use std::ffi::c_void;

use crate::driver::TensorMap;

mirror! {
    /// See kernels/decode_step.cuh.
    #[repr(align(128))]
    pub(crate) struct Arguments = DecodeStepArguments {
        key_boxes: TensorMap,
        value_boxes: TensorMap,
        packed: *const c_void,
        embedding: *const c_void,
        attention_norm: *const c_void,
        q_norm: *const c_void,
        k_norm: *const c_void,
        mlp_norm: *const c_void,
        norm: *const c_void,
        cosines: *const f32,
        sines: *const f32,
        keys: *mut c_void,
        values: *mut c_void,
        state: *mut c_void,
        token: *const i32,
        position: *const i32,
        logits: *mut f32,
        best: *mut i32,
        best_logp: *mut f32,
        layers: i32,
        vocab: i32,
        length: i32,
        eps: f32,
        in_flight: i32,
        pace: i32,
    }
}

numbers! {
    CTAS: usize = kDecodeStepCtas, 128;
    THREADS: u32 = kDecodeStepThreads, 640;
    SHARED_BYTES: u32 = kDecodeStepSharedBytes, 221152;
    STAGE_BYTES: usize = kDecodeStepStageBytes, 16384;
    STAGE_KEYS: u32 = kDecodeStepStageKeys, 32;
    COLUMNS: usize = kDecodeStepColumns, 128;
    HIDDEN: usize = kDecodeStepHidden, 1024;
    KV_HEADS: usize = kDecodeStepKvHeads, 8;
    LAYER_STAGES: usize = kDecodeStepLayerStages, 15;
    STATE_WORDS: usize = kDecodeStepStateWords, 56336;
}

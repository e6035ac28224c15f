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
    CTAS: usize = xentile::decode_step::kCtas, 128;
    THREADS: u32 = xentile::decode_step::kThreads, 640;
    SHARED_BYTES: u32 = xentile::decode_step::kSharedBytes, 221152;
    STAGE_BYTES: usize = xentile::decode_step::kStageBytes, 16384;
    STAGE_KEYS: u32 = xentile::decode_step::kStageKeys, 32;
    COLUMNS: usize = xentile::decode_step::kColumns, 128;
    HIDDEN: usize = xentile::decode_step::Qwen3Small::kHidden, 1024;
    KV_HEADS: usize = xentile::decode_step::Qwen3Small::kKvHeads, 8;
    LAYER_STAGES: usize = xentile::decode_step::QwenLayout::kLayerStages, 15;
    STATE_WORDS: usize = xentile::decode_step::QwenLayout::kStateWords, 56336;
}

//! What the kernels that decode a token take.

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
        qkv_bias: *const c_void,
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
        batch: i32,
    }
}

numbers! {
    CTAS: usize = kDecodeStepCtas, 128;
    THREADS: u32 = kDecodeStepThreads, 640;
    SHARED_BYTES: u32 = kDecodeStepSharedBytes, 221152;
    STAGE_BYTES: usize = kDecodeStepStageBytes, 16384;
    KV_HEADS: usize = kDecodeStepKvHeads, 8;
    STATE_WORDS: usize = kDecodeStepStateWords, 56336;
    QWEN3_SMALL_LAYER_STAGES: usize = kDecodeStepQwen3SmallLayerStages, 15;
    QWEN3_SMALL_SHARED_BYTES_4: u32 = kDecodeStepQwen3SmallSharedBytes4, 223184;
    QWEN3_SMALL_SHARED_BYTES_8: u32 = kDecodeStepQwen3SmallSharedBytes8, 227728;
    QWEN3_SMALL_STATE_WORDS_4: usize = kDecodeStepQwen3SmallStateWords4, 208912;
    QWEN3_SMALL_STATE_WORDS_8: usize = kDecodeStepQwen3SmallStateWords8, 331792;
    QWEN3_MEDIUM_LAYER_STAGES: usize = kDecodeStepQwen3MediumLayerStages, 48;
    QWEN3_MEDIUM_SHARED_BYTES_4: u32 = kDecodeStepQwen3MediumSharedBytes4, 223184;
    QWEN3_MEDIUM_SHARED_BYTES_8: u32 = kDecodeStepQwen3MediumSharedBytes8, 227728;
    QWEN3_MEDIUM_STATE_WORDS_4: usize = kDecodeStepQwen3MediumStateWords4, 249872;
    QWEN3_MEDIUM_STATE_WORDS_8: usize = kDecodeStepQwen3MediumStateWords8, 352272;
    LLAMA_SMALL_LAYER_STAGES: usize = kDecodeStepLlamaSmallLayerStages, 58;
    LLAMA_SMALL_SHARED_BYTES_4: u32 = kDecodeStepLlamaSmallSharedBytes4, 222448;
    LLAMA_SMALL_SHARED_BYTES_8: u32 = kDecodeStepLlamaSmallSharedBytes8, 226000;
    LLAMA_SMALL_STATE_WORDS_4: usize = kDecodeStepLlamaSmallStateWords4, 264208;
    LLAMA_SMALL_STATE_WORDS_8: usize = kDecodeStepLlamaSmallStateWords8, 356368;
    QWEN3_LARGE_LAYER_STAGES: usize = kDecodeStepQwen3LargeLayerStages, 184;
    QWEN3_LARGE_SHARED_BYTES_4: u32 = kDecodeStepQwen3LargeSharedBytes4, 225520;
    QWEN3_LARGE_SHARED_BYTES_8: u32 = kDecodeStepQwen3LargeSharedBytes8, 232144;
    QWEN3_LARGE_STATE_WORDS_4: usize = kDecodeStepQwen3LargeStateWords4, 489488;
    QWEN3_LARGE_STATE_WORDS_8: usize = kDecodeStepQwen3LargeStateWords8, 684048;
    LLAMA_LARGE_LAYER_STAGES: usize = kDecodeStepLlamaLargeLayerStages, 208;
    LLAMA_LARGE_SHARED_BYTES_4: u32 = kDecodeStepLlamaLargeSharedBytes4, 225520;
    LLAMA_LARGE_SHARED_BYTES_8: u32 = kDecodeStepLlamaLargeSharedBytes8, 232144;
    LLAMA_LARGE_STATE_WORDS_4: usize = kDecodeStepLlamaLargeStateWords4, 505872;
    LLAMA_LARGE_STATE_WORDS_8: usize = kDecodeStepLlamaLargeStateWords8, 692240;
    QWEN2_SMALL_LAYER_STAGES: usize = kDecodeStepQwen2SmallLayerStages, 18;
    QWEN2_SMALL_SHARED_BYTES_4: u32 = kDecodeStepQwen2SmallSharedBytes4, 229328;
    QWEN2_SMALL_SHARED_BYTES_8: u32 = kDecodeStepQwen2SmallSharedBytes8, 231824;
    QWEN2_SMALL_STATE_WORDS_4: usize = kDecodeStepQwen2SmallStateWords4, 143376;
    QWEN2_SMALL_STATE_WORDS_8: usize = kDecodeStepQwen2SmallStateWords8, 188432;
}

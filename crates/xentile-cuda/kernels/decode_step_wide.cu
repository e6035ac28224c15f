// A token of each of up to 4 or 8 sequences in one launch (decode_step_wide.cuh), for Hopper.
#include "decode_step_wide.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define DECODE_STEP_WIDE(name, dims, quads)                                                     \
  extern "C" __global__ void __launch_bounds__(xentile::decode_step::kThreads, 1)               \
      decode_step_##name(const __grid_constant__ DecodeStepArguments a) {                       \
    extern __shared__ __align__(1024) uint8_t shared[];                                         \
    namespace wide = xentile::decode_step::wide;                                                \
    wide::decode<wide::Plan<wide::dims, quads>>(a, shared);                                     \
  }

#define DECODE_STEP_WIDE_OF(name, dims)  \
  DECODE_STEP_WIDE(name##_4, dims, 1)    \
  DECODE_STEP_WIDE(name##_8, dims, 2)

DECODE_STEP_WIDE_OF(qwen3_small, Qwen3Small)
DECODE_STEP_WIDE_OF(qwen3_medium, Qwen3Medium)
DECODE_STEP_WIDE_OF(llama_small, LlamaSmall)
DECODE_STEP_WIDE_OF(qwen3_large, Qwen3Large)
DECODE_STEP_WIDE_OF(llama_large, LlamaLarge)
DECODE_STEP_WIDE_OF(qwen2_small, Qwen2Small)

#endif

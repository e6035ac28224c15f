// The kernels of attention; see flash_attention.cuh. Of heads of up to 64, 128 and 256 columns.
#include "flash_attention.cuh"
#include "flash_attention_forward_hopper.cuh"

using namespace xentile;

#define FLASH_ATTENTION(name, kMinimum, ...)                                  \
  extern "C" __global__ void __launch_bounds__(kAttentionThreads, kMinimum)  \
      flash_attention_##name(const __grid_constant__ FlashAttentionArguments a) { \
    __VA_ARGS__;                                                              \
  }

#define FLASH_ATTENTION_OF(dtype, E)                                                              \
  FLASH_ATTENTION(queries_64_##dtype, 2, attention::QueryGradients<E, 64>::run(a))                \
  FLASH_ATTENTION(queries_128_##dtype, 2, attention::QueryGradients<E, 128>::run(a))              \
  FLASH_ATTENTION(queries_256_##dtype, 2, attention::QueryGradients<E, 256>::run(a))              \
  FLASH_ATTENTION(keys_64_##dtype, 2, attention::KeyGradients<E, 64, true, true>::run(a, blockIdx.x)) \
  FLASH_ATTENTION(keys_128_##dtype, 2, attention::KeyGradients<E, 128, true, true>::run(a, blockIdx.x)) \
  FLASH_ATTENTION(keys_256_##dtype, 2, attention::KeyGradients<E, 256, true, false>::run(a, blockIdx.x)) \
  FLASH_ATTENTION(values_256_##dtype, 2, attention::KeyGradients<E, 256, false, true>::run(a, blockIdx.x)) \
  FLASH_ATTENTION(notes_##dtype, 1, attention::write_notes<E>(a))                                 \
  extern "C" __global__ void __launch_bounds__(kAttentionSinkThreads)                             \
      flash_attention_sinks_##dtype(const __grid_constant__ FlashAttentionArguments a) {          \
    attention::sum_sinks<E>(a);                                                                   \
  }

FLASH_ATTENTION_OF(bf16, __nv_bfloat16)
FLASH_ATTENTION_OF(f16, __half)

// Of the forward pass an architecture has either kind.
#define FLASH_ATTENTION_FORWARD(columns, dtype, E) \
  FLASH_ATTENTION(forward_##columns##_##dtype, 2, attention::Forward<E, columns>::run(a))
#define FLASH_ATTENTION_ON_HOPPER(columns, dtype, E)                                               \
  extern "C" __global__ void __launch_bounds__(kAttentionHopperThreads, 1) \
      flash_attention_forward_hopper_##columns##_##dtype(                                          \
          const __grid_constant__ FlashAttentionArguments a) {                                     \
    attention::hopper::Forward<E, columns>::run(a);                                                \
  }
#define FLASH_ATTENTION_OF_COLUMNS(columns, kind) \
  kind(columns, bf16, __nv_bfloat16) kind(columns, f16, __half)

#if !defined(__CUDA_ARCH__) || !defined(__CUDA_ARCH_FEAT_SM90_ALL)
FLASH_ATTENTION_OF_COLUMNS(64, FLASH_ATTENTION_FORWARD)
FLASH_ATTENTION_OF_COLUMNS(128, FLASH_ATTENTION_FORWARD)
FLASH_ATTENTION_OF_COLUMNS(256, FLASH_ATTENTION_FORWARD)
#endif
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
FLASH_ATTENTION_OF_COLUMNS(64, FLASH_ATTENTION_ON_HOPPER)
FLASH_ATTENTION_OF_COLUMNS(128, FLASH_ATTENTION_ON_HOPPER)
FLASH_ATTENTION_OF_COLUMNS(256, FLASH_ATTENTION_ON_HOPPER)
#endif

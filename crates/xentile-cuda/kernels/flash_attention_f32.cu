// The kernels of attention in f32; see flash_attention.cuh. Of heads of up to 64, 128 and 256 columns.
#include "flash_attention.cuh"

using namespace xentile;

#define FLASH_ATTENTION_F32(name, kThreads, ...)                                            \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                             \
      flash_attention_##name##_f32(const __grid_constant__ FlashAttentionArguments a) { \
    __VA_ARGS__;                                                                        \
  }

FLASH_ATTENTION_F32(notes, kAttentionThreads, attention::write_notes<float>(a))
FLASH_ATTENTION_F32(sinks, kAttentionSinkThreads, attention::sum_sinks<float>(a))
FLASH_ATTENTION_F32(forward_64, kAttentionThreads, attention::Forward<float, 64>::run(a))
FLASH_ATTENTION_F32(forward_128, kAttentionThreads, attention::Forward<float, 128>::run(a))
FLASH_ATTENTION_F32(forward_256, kAttentionThreads, attention::Forward<float, 256>::run(a))
FLASH_ATTENTION_F32(queries_64, kAttentionThreads, attention::QueryGradients<float, 64>::run(a))
FLASH_ATTENTION_F32(queries_128, kAttentionThreads, attention::QueryGradients<float, 128>::run(a))
FLASH_ATTENTION_F32(queries_256, kAttentionNarrowThreads, attention::QueryGradients<float, 256>::run(a))
FLASH_ATTENTION_F32(keys_64, kAttentionThreads, attention::KeyGradients<float, 64, true, true>::run(a, blockIdx.x))
FLASH_ATTENTION_F32(keys_128, kAttentionThreads, attention::KeyGradients<float, 128, true, true>::run(a, blockIdx.x))
FLASH_ATTENTION_F32(keys_256, kAttentionNarrowThreads, attention::KeyGradients<float, 256, true, false>::run(a, blockIdx.x))
FLASH_ATTENTION_F32(values_256, kAttentionNarrowThreads, attention::KeyGradients<float, 256, false, true>::run(a, blockIdx.x))

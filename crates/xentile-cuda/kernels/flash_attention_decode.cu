// The kernels of attention of few queries; see flash_attention_decode.cuh. Of heads of up to 64, 128 and 256 columns, and
// of up to 16 rows of a head of keys or more.
#include "flash_attention_decode.cuh"

using namespace xentile;

#define FLASH_ATTENTION_DECODE(name, kMinimum, ...)                                       \
  extern "C" __global__ void __launch_bounds__(kAttentionDecodeThreads, kMinimum)         \
      flash_attention_##name(const __grid_constant__ FlashAttentionDecodeArguments all) { \
    attention::decode::__VA_ARGS__(all);                                                  \
  }

#define FLASH_ATTENTION_DECODE_OF(dtype, E)                                  \
  FLASH_ATTENTION_DECODE(decode_64_16_##dtype, 2, Forward<E, 64, 1>::run)    \
  FLASH_ATTENTION_DECODE(decode_64_64_##dtype, 2, Forward<E, 64, 4>::run)    \
  FLASH_ATTENTION_DECODE(decode_128_16_##dtype, 2, Forward<E, 128, 1>::run)  \
  FLASH_ATTENTION_DECODE(decode_128_64_##dtype, 2, Forward<E, 128, 4>::run)  \
  FLASH_ATTENTION_DECODE(decode_256_16_##dtype, 1, Forward<E, 256, 1>::run)  \
  FLASH_ATTENTION_DECODE(decode_256_64_##dtype, 1, Forward<E, 256, 4>::run)  \
  FLASH_ATTENTION_DECODE(decode_merge_##dtype, 4, merge<E>)

FLASH_ATTENTION_DECODE_OF(bf16, __nv_bfloat16)
FLASH_ATTENTION_DECODE_OF(f16, __half)

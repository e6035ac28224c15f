// The kernels of attention in 16 bits; see flash_attention.cuh. Of heads of up to 64, 128 and 256 columns, and on Hopper
// of up to 192 with values of up to 128.
#include "flash_attention.cuh"
#include "flash_attention_backward_hopper.cuh"
#include "flash_attention_forward_hopper.cuh"
#include "flash_attention_gradients_hopper.cuh"

using namespace xentile;

#define FLASH_ATTENTION(name, kMinimum, ...)                                  \
  extern "C" __global__ void __launch_bounds__(kAttentionThreads, kMinimum)  \
      flash_attention_##name(const __grid_constant__ FlashAttentionArguments a) { \
    __VA_ARGS__;                                                              \
  }

#define FLASH_ATTENTION_OF(dtype, E)                                                              \
  FLASH_ATTENTION(notes_##dtype, 1, attention::write_notes<E>(a))                                 \
  extern "C" __global__ void __launch_bounds__(kAttentionSinkThreads)                             \
      flash_attention_sinks_##dtype(const __grid_constant__ FlashAttentionArguments a) {          \
    attention::sum_sinks<E>(a);                                                                   \
  }

FLASH_ATTENTION_OF(bf16, __nv_bfloat16)
FLASH_ATTENTION_OF(f16, __half)

// Of all else an architecture has either kind.
#if !defined(__CUDA_ARCH__) || !defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define FLASH_ATTENTION_ANYWHERE(dtype, E)                                                        \
  FLASH_ATTENTION(forward_64_##dtype, 2, attention::Forward<E, 64>::run(a))                       \
  FLASH_ATTENTION(forward_128_##dtype, 2, attention::Forward<E, 128>::run(a))                     \
  FLASH_ATTENTION(forward_256_##dtype, 2, attention::Forward<E, 256>::run(a))                     \
  FLASH_ATTENTION(queries_64_##dtype, 2, attention::QueryGradients<E, 64>::run(a))                \
  FLASH_ATTENTION(queries_128_##dtype, 2, attention::QueryGradients<E, 128>::run(a))              \
  FLASH_ATTENTION(queries_256_##dtype, 2, attention::QueryGradients<E, 256>::run(a))              \
  FLASH_ATTENTION(keys_64_##dtype, 2, attention::KeyGradients<E, 64, true, true>::run(a, blockIdx.x)) \
  FLASH_ATTENTION(keys_128_##dtype, 2, attention::KeyGradients<E, 128, true, true>::run(a, blockIdx.x)) \
  FLASH_ATTENTION(keys_256_##dtype, 2, attention::KeyGradients<E, 256, true, false>::run(a, blockIdx.x)) \
  FLASH_ATTENTION(values_256_##dtype, 2, attention::KeyGradients<E, 256, false, true>::run(a, blockIdx.x))

FLASH_ATTENTION_ANYWHERE(bf16, __nv_bfloat16)
FLASH_ATTENTION_ANYWHERE(f16, __half)

#endif

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define FLASH_ATTENTION_FORWARD(name, ...)                                                     \
  extern "C" __global__ void __launch_bounds__(kAttentionForwardThreads, 1)                      \
      flash_attention_forward_##name(const __grid_constant__ FlashAttentionForwardArguments all) { \
    attention::hopper::Forward<__VA_ARGS__>::run(all);                                          \
  }

#define FLASH_ATTENTION_FORWARD_OF(dtype, E, logits)                                       \
  FLASH_ATTENTION_FORWARD(64_##dtype, E, 64, 64, attention::hopper::Logits::logits)       \
  FLASH_ATTENTION_FORWARD(128_##dtype, E, 128, 128, attention::hopper::Logits::logits)    \
  FLASH_ATTENTION_FORWARD(192_##dtype, E, 192, 128, attention::hopper::Logits::logits)    \
  FLASH_ATTENTION_FORWARD(256_##dtype, E, 256, 256, attention::hopper::Logits::logits)

FLASH_ATTENTION_FORWARD_OF(hopper_bf16, __nv_bfloat16, kScaled)
FLASH_ATTENTION_FORWARD_OF(hopper_bent_bf16, __nv_bfloat16, kAny)
FLASH_ATTENTION_FORWARD_OF(hopper_capped_bf16, __nv_bfloat16, kCapped)
FLASH_ATTENTION_FORWARD_OF(hopper_f16, __half, kScaled)
FLASH_ATTENTION_FORWARD_OF(hopper_bent_f16, __half, kAny)

#define FLASH_ATTENTION_BACKWARD(name, Bytes, ...)                                          \
  extern "C" __global__ void __launch_bounds__(kAttentionBackwardThreads, 1)                \
      flash_attention_##name(const __grid_constant__ FlashAttentionBackwardArguments all) { \
    using Gradients = attention::hopper::__VA_ARGS__;                                       \
    static_assert(Gradients::kSharedBytes == kAttention##Bytes);                            \
    Gradients::run(all);                                                                    \
  }

#define FLASH_ATTENTION_BACKWARD_OF(dtype, E, is_bent)                                                                \
  FLASH_ATTENTION_BACKWARD(keys_64_##dtype, KeysBytes64, KeyGradients<E, 64, 64, true, true, 8, 8, is_bent>)          \
  FLASH_ATTENTION_BACKWARD(keys_128_##dtype, KeysBytes128, KeyGradients<E, 128, 128, true, true, 4, 4, is_bent>)      \
  FLASH_ATTENTION_BACKWARD(keys_192_##dtype, KeysBytes192, KeyGradients<E, 192, 128, true, false, 4, 2, is_bent>)     \
  FLASH_ATTENTION_BACKWARD(values_192_##dtype, ValuesBytes192, KeyGradients<E, 192, 128, false, true, 4, 4, is_bent>) \
  FLASH_ATTENTION_BACKWARD(keys_256_##dtype, KeysBytes256, KeyGradients<E, 256, 256, true, false, 2, 1, is_bent>)     \
  FLASH_ATTENTION_BACKWARD(values_256_##dtype, ValuesBytes256, KeyGradients<E, 256, 256, false, true, 2, 2, is_bent>) \
  FLASH_ATTENTION_BACKWARD(queries_64_##dtype, QueriesBytes64, QueryGradients<E, 64, 64, 128, 4, 4, is_bent>)         \
  FLASH_ATTENTION_BACKWARD(queries_128_##dtype, QueriesBytes128, QueryGradients<E, 128, 128, 128, 2, 2, is_bent>)     \
  FLASH_ATTENTION_BACKWARD(queries_192_##dtype, QueriesBytes192, QueryGradients<E, 192, 128, 64, 3, 3, is_bent>)      \
  FLASH_ATTENTION_BACKWARD(queries_256_##dtype, QueriesBytes256, QueryGradients<E, 256, 256, 64, 2, 1, is_bent>)

FLASH_ATTENTION_BACKWARD_OF(hopper_bf16, __nv_bfloat16, false)
FLASH_ATTENTION_BACKWARD_OF(hopper_bent_bf16, __nv_bfloat16, true)
FLASH_ATTENTION_BACKWARD_OF(hopper_f16, __half, false)
FLASH_ATTENTION_BACKWARD_OF(hopper_bent_f16, __half, true)

#define FLASH_ATTENTION_GRADIENTS(name, kThreads, kMinimum, ...)                            \
  extern "C" __global__ void __launch_bounds__(kThreads, kMinimum)                          \
      flash_attention_##name(const __grid_constant__ FlashAttentionGradientArguments all) { \
    __VA_ARGS__;                                                                            \
  }

#define FLASH_ATTENTION_GRADIENTS_OF(columns, rows, bent, is_bent, dtype, E)                                  \
  using Gradients##columns##bent##dtype = attention::hopper::AllGradients<E, columns, rows, is_bent>;        \
  static_assert(Gradients##columns##bent##dtype::kSharedBytes == kAttentionGradientsBytes##columns);         \
  FLASH_ATTENTION_GRADIENTS(gradients_##columns##_hopper##bent##_##dtype, kAttentionBackwardThreads, 1,      \
                            Gradients##columns##bent##dtype::run(all))

#define FLASH_ATTENTION_GRADIENTS_IN(dtype, E)                                                                \
  FLASH_ATTENTION_GRADIENTS(rows_##dtype, kAttentionThreads, 1, attention::hopper::write_rows<E>(all))       \
  FLASH_ATTENTION_GRADIENTS_OF(64, 128, , false, dtype, E)                                                   \
  FLASH_ATTENTION_GRADIENTS_OF(64, 128, _bent, true, dtype, E)                                               \
  FLASH_ATTENTION_GRADIENTS_OF(128, 64, , false, dtype, E)                                                   \
  FLASH_ATTENTION_GRADIENTS_OF(128, 64, _bent, true, dtype, E)                                               \
  FLASH_ATTENTION_GRADIENTS(round_64_##dtype, kAttentionThreads, 1,                                          \
                            attention::hopper::round_queries<E, 64, 128>(all))                               \
  FLASH_ATTENTION_GRADIENTS(round_128_##dtype, kAttentionThreads, 1,                                         \
                            attention::hopper::round_queries<E, 128, 64>(all))

FLASH_ATTENTION_GRADIENTS_IN(bf16, __nv_bfloat16)
FLASH_ATTENTION_GRADIENTS_IN(f16, __half)

#endif

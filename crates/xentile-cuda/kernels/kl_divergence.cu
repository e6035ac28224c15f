// KL divergence of rows of logits from a teacher's (kl_divergence.cuh), on GPUs that have clusters.
#include "kl_divergence.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

#define KL_DIVERGENCE_OF(dtype, E, name, columns)                                     \
  extern "C" __global__ void __launch_bounds__(kKlThreads, 1)                         \
      kl_divergence_##dtype##name(const __grid_constant__ KlDivergenceArguments a) {  \
    extern __shared__ __align__(16) uint8_t memory[];                                 \
    xentile::kl::run<E, columns / 4>(a, memory);                                      \
  }
#define KL_DIVERGENCE(dtype, E)                              \
  KL_DIVERGENCE_OF(dtype, E, _few, kKlFewThreadColumns)      \
  KL_DIVERGENCE_OF(dtype, E, , kKlThreadColumns)

KL_DIVERGENCE(bf16, __nv_bfloat16)
KL_DIVERGENCE(f16, __half)
KL_DIVERGENCE(f32, float)

#endif

// A kernel for each pass, layout of pairs and dtype.
#include "qk_norm_rope.cuh"

using namespace xentile;

#define QK_NORM_ROPE(layout, interleaved, dtype, E)                            \
  extern "C" __global__ void __launch_bounds__(kQkForwardThreads)              \
      qk_norm_rope_forward_##layout##_##dtype(                                 \
          const __grid_constant__ QkNormRopeArguments a) {                     \
    qk::Pass<E, interleaved>(a).template forward<kQkForwardHeads>();           \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(kQkBackwardThreads)             \
      qk_norm_rope_backward_##layout##_##dtype(                                \
          const __grid_constant__ QkNormRopeArguments a) {                     \
    extern __shared__ float4 qk_sums[];                                        \
    qk::Pass<E, interleaved>(a).template backward<kQkBackwardHeads>(           \
        reinterpret_cast<float*>(qk_sums));                                    \
  }

#define QK_NORM_ROPE_OF(dtype, E)              \
  QK_NORM_ROPE(halves, false, dtype, E)        \
  QK_NORM_ROPE(interleaved, true, dtype, E)

QK_NORM_ROPE_OF(bf16, __nv_bfloat16)
QK_NORM_ROPE_OF(f16, __half)
QK_NORM_ROPE_OF(f32, float)

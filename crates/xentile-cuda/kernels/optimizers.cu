// A kernel for each dtype of parameters, and of gradients.
#include "optimizers.cuh"

using namespace xentile;

#define ADAMW_8BIT(name, P, G)                                                \
  extern "C" __global__ void __launch_bounds__(kOptimizerThreads, 1)          \
      adamw_8bit_##name(const __grid_constant__ OptimizerArguments a) {       \
    optimizers::adamw<P, G>(a);                                               \
  }

ADAMW_8BIT(f32_f32, float, float)
ADAMW_8BIT(f32_bf16, float, __nv_bfloat16)
ADAMW_8BIT(bf16_f32, __nv_bfloat16, float)
ADAMW_8BIT(bf16_bf16, __nv_bfloat16, __nv_bfloat16)

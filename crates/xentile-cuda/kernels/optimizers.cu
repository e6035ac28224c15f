// A kernel for each dtype of parameters, of gradients, and kind of state.
#include "optimizers.cuh"

using namespace xentile;

#define ADAMW(name, state, kQuantized, P, G)                                  \
  extern "C" __global__ void __launch_bounds__(kOptimizerThreads)             \
      adamw_##state##_##name(const __grid_constant__ OptimizerArguments a) {  \
    optimizers::adamw<P, G, kQuantized>(a);                                   \
  }

#define ADAMW_OF(name, P, G)         \
  ADAMW(name, f32, false, P, G)      \
  ADAMW(name, 8bit, true, P, G)

ADAMW_OF(f32_f32, float, float)
ADAMW_OF(f32_bf16, float, __nv_bfloat16)
ADAMW_OF(bf16_f32, __nv_bfloat16, float)
ADAMW_OF(bf16_bf16, __nv_bfloat16, __nv_bfloat16)

#define SUM_SQUARES(name, E)                                                     \
  extern "C" __global__ void __launch_bounds__(kOptimizerThreads)                \
      sum_squares_##name(const __grid_constant__ SumSquaresArguments a) {        \
    optimizers::sum_squares<E>(a);                                               \
  }

SUM_SQUARES(f32, float)
SUM_SQUARES(bf16, __nv_bfloat16)

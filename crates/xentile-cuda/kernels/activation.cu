// A kernel for each pass, packing and dtype; the function is chosen within.
#include "activation.cuh"

using namespace xentile;

#define ACTIVATION(pass, writes, packing, Packed, dtype, E)                    \
  extern "C" __global__ void __launch_bounds__(kActivationThreads)             \
      activation_##pass##_##packing##_##dtype(                                 \
          const __grid_constant__ ActivationArguments a) {                     \
    activation::run<E, Packing::Packed, activation::Writes::writes>(a);        \
  }

#define ACTIVATION_IN(packing, Packed, dtype, E)                               \
  ACTIVATION(forward, kY, packing, Packed, dtype, E)                           \
  ACTIVATION(backward, kDx, packing, Packed, dtype, E)                         \
  ACTIVATION(backward_with_y, kDxAndY, packing, Packed, dtype, E)

#define ACTIVATION_OF(dtype, E)                                                \
  ACTIVATION_IN(single, kSingle, dtype, E)                                     \
  ACTIVATION_IN(halves, kHalves, dtype, E)                                     \
  ACTIVATION_IN(interleaved, kInterleaved, dtype, E)

ACTIVATION_OF(bf16, __nv_bfloat16)
ACTIVATION_OF(f16, __half)
ACTIVATION_OF(f32, float)

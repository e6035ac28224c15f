// A kernel for each pass, packing and dtype; the function is chosen within.
#include "activation.cuh"

using namespace xentile;

#define ACTIVATION(pass, backward, packing, Packed, dtype, E)                  \
  extern "C" __global__ void __launch_bounds__(kActivationThreads)             \
      activation_##pass##_##packing##_##dtype(                                 \
          const __grid_constant__ ActivationArguments a) {                     \
    activation::run<E, Packing::Packed, backward>(a);                          \
  }

#define ACTIVATION_OF(dtype, E)                                                \
  ACTIVATION(forward, false, single, kSingle, dtype, E)                        \
  ACTIVATION(forward, false, halves, kHalves, dtype, E)                        \
  ACTIVATION(forward, false, interleaved, kInterleaved, dtype, E)              \
  ACTIVATION(backward, true, single, kSingle, dtype, E)                        \
  ACTIVATION(backward, true, halves, kHalves, dtype, E)                        \
  ACTIVATION(backward, true, interleaved, kInterleaved, dtype, E)

ACTIVATION_OF(bf16, __nv_bfloat16)
ACTIVATION_OF(f16, __half)
ACTIVATION_OF(f32, float)

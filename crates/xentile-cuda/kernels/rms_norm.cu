// The kernels of RMSNorm, of rows and of sums with a residual.
#include "norm_kernels.cuh"

using namespace xentile;

NORM_OF_EVERY_DTYPE(rms_norm_, false, false)
NORM_OF_EVERY_DTYPE(rms_norm_add_, false, true)

#define NORM_IN_TURNS(dtype, E) \
  NORM(rms_norm_forward_turns4_##dtype, 1024, 1, (norm_in_turns<E, 4>))

NORM_IN_TURNS(bf16, __nv_bfloat16)
NORM_IN_TURNS(f16, __half)
NORM_IN_TURNS(f32, float)

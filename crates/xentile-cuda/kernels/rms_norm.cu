// The kernels of RMSNorm, of rows and of sums with a residual.
#include "norm_kernels.cuh"

using namespace xentile;

NORM_OF_EVERY_DTYPE(rms_norm_, false, false)
NORM_OF_EVERY_DTYPE(rms_norm_add_, false, true)

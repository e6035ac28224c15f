// The kernels of LayerNorm, whose rows are centred.
#include "norm_kernels.cuh"

using namespace xentile;

NORM_OF_EVERY_DTYPE(layer_norm_, true, false)

// What the lanes of a warp make together, the same in all of them.
#pragma once

namespace xentile {

// The largest of a warp's; which, of NaNs, is open.
__device__ inline float max_of_warp(float x) {
  const auto ordered = [](int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); };
  return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
}

__device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

}  // namespace xentile

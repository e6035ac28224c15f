// Sums in f32 to the 16-bit dtype that they are for, each rounded once.
#include "element.cuh"

using namespace xentile;

// Mirrored by `Arguments` in src/round.rs.
struct RoundArguments {
  const float* from;  // [rows, columns]
  void* to;           // [rows, columns], `stride` elements from row to row
  int64_t rows;
  int64_t columns;
  int64_t stride;
};

template <class E>
__device__ inline void round_all(const RoundArguments& a) {
  constexpr int64_t per = kPerVector<E>;
  const bool placed =
      (reinterpret_cast<uintptr_t>(a.from) | reinterpret_cast<uintptr_t>(a.to)) % 16 == 0;
  const bool whole = placed && a.columns % per == 0 && a.stride % per == 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * per;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const float* from = a.from + row * a.columns;
    E* to = static_cast<E*>(a.to) + row * a.stride;
    int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * per;
    for (; i < a.columns; i += step) {
      if (whole) {
        float x[per];
#pragma unroll
        for (int64_t k = 0; k < per; k += 4) {
          const float4 four = __ldcs(reinterpret_cast<const float4*>(from + i + k));
          x[k] = four.x, x[k + 1] = four.y, x[k + 2] = four.z, x[k + 3] = four.w;
        }
        *reinterpret_cast<uint4*>(to + i) = pack<E>(x);
      } else {
        for (int64_t k = i; k < min(i + per, a.columns); ++k) to[k] = from_float<E>(from[k]);
      }
    }
  }
}

#define ROUND(dtype, E)                                         \
  extern "C" __global__ void __launch_bounds__(256)             \
      round_##dtype(const __grid_constant__ RoundArguments a) { \
    round_all<E>(a);                                            \
  }

ROUND(bf16, __nv_bfloat16)
ROUND(f16, __half)

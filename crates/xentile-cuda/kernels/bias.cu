// A bias: its gradient, what dlogits of all tokens add up to; and rows of it that products add to.
//
// Of the gradient a CTA has a strip of columns, a vector for each lane, and its warps take turns at
// rows; then their sums are added up in order. Where strips are few, rows are cut into parts, each
// with sums of its own, over which another launch goes: the order is always the same.
#include "element.cuh"

using namespace xentile;

// Mirrored by `Arguments` in src/bias/arguments.rs.
struct BiasArguments {
  const void* from;  // [rows, columns], `stride` elements from row to row
  // The factor of each row, as the second of four numbers; null for none.
  const float4* factors;
  float* to;         // [parts, columns], `to_stride` elements from part to part
  int64_t rows;
  int64_t columns;
  int64_t stride;
  int64_t to_stride;
  uint32_t adds;  // whether to what is there
};

inline constexpr uint32_t kBiasWarps = 8;
// Rows that a warp has on their way.
inline constexpr int kBiasRows = 8;

template <class E>
__device__ inline void sum_columns(const BiasArguments& a) {
  constexpr int per = kPerVector<E>;
  constexpr int strip = 32 * per;
  __shared__ float sums[kBiasWarps][strip];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * strip, own = first + lane * per;
  const int64_t begin = a.rows * blockIdx.y / gridDim.y,
                end = a.rows * (blockIdx.y + 1) / gridDim.y;
  const E* from = static_cast<const E*>(a.from) + own;
  float total[per] = {};
  if (own + per <= a.columns) {
#pragma unroll kBiasRows
    for (int64_t row = begin + warp; row < end; row += kBiasWarps) {
      float x[per];
      unpack<E>(*reinterpret_cast<const uint4*>(from + row * a.stride), x);
      const float factor = a.factors == nullptr ? 1.0f : a.factors[row].y;
#pragma unroll
      for (int i = 0; i < per; ++i) total[i] = fmaf(x[i], factor, total[i]);
    }
  } else {
    // Nobody may have written what follows the last column.
    for (int64_t row = begin + warp; row < end; row += kBiasWarps) {
      const float factor = a.factors == nullptr ? 1.0f : a.factors[row].y;
#pragma unroll
      for (int i = 0; i < per; ++i) {
        if (own + i < a.columns) {
          total[i] = fmaf(to_float(from[row * a.stride + i]), factor, total[i]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < per; ++i) sums[warp][lane * per + i] = total[i];
  __syncthreads();
  const int64_t column = first + threadIdx.x;
  if (threadIdx.x >= strip || column >= a.columns) return;
  float* to = a.to + blockIdx.y * a.to_stride + column;
  float sum = 0.0f;
#pragma unroll
  for (uint32_t i = 0; i < kBiasWarps; ++i) sum += sums[i][threadIdx.x];
  *to = a.adds ? *to + sum : sum;
}

#define BIAS(dtype, E)                                             \
  extern "C" __global__ void __launch_bounds__(kBiasWarps * 32)    \
      bias_sums_##dtype(const __grid_constant__ BiasArguments a) { \
    sum_columns<E>(a);                                             \
  }

BIAS(bf16, __nv_bfloat16)
BIAS(f16, __half)
BIAS(f32, float)

// Writes `from` [columns] to every row.
extern "C" __global__ void __launch_bounds__(kBiasWarps * 32)
    bias_rows(const __grid_constant__ BiasArguments a) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= a.columns) return;
  const float bias = static_cast<const float*>(a.from)[column];
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    a.to[row * a.to_stride + column] = bias;
  }
}

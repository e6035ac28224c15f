// x times a factor a row. A program cannot know that its cotangent will be 1, and it mostly is:
// where the product would lie over x, rows of factor 1 are not touched.
#include <cstdint>

#include "element.cuh"

using namespace xentile;

// Mirrored by `Arguments` in src/scale.rs.
struct ScaleArguments {
  const void* x;         // [rows, columns]
  const float* factors;  // [rows]
  void* scaled;          // [rows, columns]; may be x
  int64_t rows;
  int64_t columns;
};

// The part of a row that a CTA takes at a time, in elements.
inline constexpr int64_t kPiece = 8192;

template <class E>
__device__ inline void scale(const ScaleArguments& a) {
  constexpr int64_t per = kPerVector<E>;
  const bool in_place = a.x == a.scaled;
  const int64_t pieces = (a.columns + kPiece - 1) / kPiece;
  const int64_t share = (a.rows * pieces + gridDim.x - 1) / gridDim.x;
  const int64_t begin = blockIdx.x * share;
  const int64_t stop = min(begin + share, a.rows * pieces);
  if (begin >= stop) return;
  // One look at all factors of the share: a look a piece would be a trip to memory a piece.
  bool touched = !in_place;
  for (int64_t row = begin / pieces + threadIdx.x; row <= (stop - 1) / pieces; row += blockDim.x)
    touched |= a.factors[row] != 1.0f;
  if (!__syncthreads_or(touched)) return;
  for (int64_t piece = begin; piece < stop; ++piece) {
    const int64_t row = piece / pieces;
    const float factor = a.factors[row];
    if (in_place && factor == 1.0f) continue;
    const int64_t first = row * a.columns + piece % pieces * kPiece;
    const int64_t end = min(first + kPiece, (row + 1) * a.columns);
    const E* x = static_cast<const E*>(a.x);
    E* scaled = static_cast<E*>(a.scaled);
    // Vectors that are the piece's alone, then what it shares with its neighbours.
    const int64_t whole = min((first + per - 1) / per * per, end);
    const int64_t whole_end = max(end / per * per, whole);
    for (int64_t i = whole + threadIdx.x * per; i < whole_end; i += blockDim.x * per) {
      float values[per];
      unpack<E>(*reinterpret_cast<const uint4*>(x + i), values);
#pragma unroll
      for (int k = 0; k < per; ++k) values[k] *= factor;
      *reinterpret_cast<uint4*>(scaled + i) = pack<E>(values);
    }
    const int64_t ragged = (whole - first) + (end - whole_end);
    if (threadIdx.x < ragged) {
      const int64_t i = threadIdx.x < whole - first ? first + threadIdx.x
                                                    : whole_end + threadIdx.x - (whole - first);
      scaled[i] = from_float<E>(to_float(x[i]) * factor);
    }
  }
}

#define SCALE(dtype, E)                                         \
  extern "C" __global__ void __launch_bounds__(256)             \
      scale_##dtype(const __grid_constant__ ScaleArguments a) { \
    scale<E>(a);                                                \
  }

SCALE(bf16, __nv_bfloat16)
SCALE(f16, __half)
SCALE(f32, float)

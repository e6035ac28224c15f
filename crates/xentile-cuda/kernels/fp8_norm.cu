// RMSNorm quantised to FP8 in parts of 128 columns. Without the transposed copy a row is read once: y is made of
// the registers that hold it, rounded as it would be in memory, and 16 lanes have a part. With it rstd comes
// first, and the sum with a residual, and then tiles of 128 rows, of a second read. In one launch, where bands
// of tiles have rows of one matrix, CTAs of statistics run a little ahead of those of tiles, so that the
// second read is of the L2.
#include "fp8_quantize_transposed.cuh"
#include "norm_forward.cuh"

using namespace xentile;

namespace xentile {

// Mirrored by `NormedArguments` in src/fp8_quantize/arguments.rs. Without values in `to`, the norm writes
// statistics, and the sum, alone.
struct Fp8NormArguments {
  NormArguments norm;
  Fp8QuantizeArguments to;
};

// Mirrored by `NUMBERS` in src/fp8_quantize/arguments.rs. What rstd is until it is there: bytes of 0xff, a NaN
// that no instruction makes.
inline constexpr uint32_t kFp8Awaited = 0xffffffffu;
// Rows of a CTA of statistics, a warp's each at the end.
inline constexpr uint32_t kFp8StatisticsRows = 8;
// CTAs of a multiprocessor, of statistics and of tiles.
inline constexpr uint32_t kFp8NormCtas = 4;

namespace fp8 {

// Takes y in the place of an array, all that a thread has of a row, so that its maxima go over lanes side by
// side. Warps are whole; of what is not there units are zeros.
struct StoreValues {
  static constexpr bool kTogether = true;
  const Fp8QuantizeArguments& a;

  template <class E, int kVectors, class Has>
  __device__ void store(int64_t first, uint32_t step, uint4 (&units)[kVectors],
                        const Has& has) const {
    static_assert(kPerVector<E> == 8 && kVectors % 2 == 0, "16 lanes have a part");
    if (a.values == nullptr) return;
    // Two units' maxima share a word.
    float scales[kVectors];
    uint32_t most[kVectors / 2];
#pragma unroll
    for (int i = 0; i < kVectors; i += 2) {
      const uint32_t one = most_of<E>(0, units[i]), other = most_of<E>(0, units[i + 1]);
      most[i / 2] = larger<E>(__byte_perm(one, other, 0x5410), __byte_perm(one, other, 0x7632));
    }
#pragma unroll
    for (uint32_t by = 8; by > 0; by /= 2) {
#pragma unroll
      for (int i = 0; i < kVectors / 2; ++i) {
        most[i] = larger<E>(most[i], __shfl_xor_sync(kWarp, most[i], by));
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; i += 2) {
      const float2 pair = unpacked<E>(most[i / 2]);
      scales[i] = pair.x, scales[i + 1] = pair.y;
    }
    to_scales(a, scales);
    forget(units);
    if (a.e5m2) {
      store_by<E, true>(first, step, units, scales, has);
    } else {
      store_by<E, false>(first, step, units, scales, has);
    }
  }

  template <class E, bool kE5M2, int kVectors, class Has>
  __device__ void store_by(int64_t first, uint32_t step, const uint4 (&units)[kVectors],
                           const float (&scales)[kVectors], const Has& has) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!has(i)) continue;
      const int64_t vector = first + i * step;
      fp8::store<E, kE5M2, true>(a.values + vector * 8, units[i], reciprocal(scales[i]), 8);
      if (threadIdx.x % 16 == 0) a.numbers[vector / 16] = scales[i];
    }
  }
};

// Rows, normalised by the rstd that is there.
template <class E>
struct Normed {
  static constexpr int kPer = kPerVector<E>;
  using Raw = uint4;

  const NormArguments& a;
  const E* x;

  __device__ explicit Normed(const Fp8NormArguments& arguments)
      : a(arguments.norm), x(static_cast<const E*>(arguments.to.x)) {}

  template <bool kAligned, bool kStreams>
  __device__ Raw load(int64_t at, int count) const {
    return fp8::load<E, true, kStreams>(x + at, count);
  }

  struct Columns {
    float weight[kPer];
  };

  __device__ Columns of_columns(int64_t column, int count) const {
    Columns found;
    if (count > 0) {
      with_dtype(a.weight_dtype, a.weight, column,
                 [&](auto* weight) { scales<kPer>(a, weight, found.weight); });
    }
    return found;
  }

  __device__ uint4 unit_of(const Raw& raw, const Columns& of, int64_t row, int count) const {
    return unit_by(count > 0 ? __ldg(a.rstd + row) : 0.0f, raw, of, count);
  }

  __device__ static uint4 unit_by(float rstd, const Raw& raw, const Columns& of, int count) {
    if (count <= 0) return make_uint4(0, 0, 0, 0);
    float y[kPer];
    unpack<E>(raw, y);
#pragma unroll
    for (int i = 0; i < kPer; ++i) y[i] = y[i] * rstd * of.weight[i];
    return pack<E>(y);
  }
};

// rstd of rows from `first` on and, with `kAdd`, sums: bit by bit what `norm_held_to` makes with four vectors a
// thread. Threads of the CTA take the place of a team's, warp by warp.
template <class E, bool kAdd>
__device__ inline void statistics(const NormArguments& a, int64_t first, float* parts) {
  constexpr int kPer = kPerVector<E>, kVectors = 4, kTogether = kAdd ? 1 : 2;
  const uint32_t lane = threadIdx.x % 32, own = threadIdx.x / 32;
  const uint32_t vectors = static_cast<uint32_t>(a.columns) / kPer, warps = a.lanes / 32;
  const auto vector_of = [&](uint32_t warp, int i) { return warp * 32 + lane + i * a.lanes; };
  const uint32_t all = kFp8StatisticsRows * warps, step = blockDim.x / 32;
  for (uint32_t unit = own; unit < all; unit += kTogether * step) {
    uint4 held[kTogether][kVectors], other[kTogether][kVectors];
    const auto place = [&](int u, int i, int64_t& at) {
      const uint32_t of = unit + u * step, row = of / warps, vector = vector_of(of - row * warps, i);
      at = (first + row) * vectors + vector;
      return of < all && first + row < a.rows && vector < vectors;
    };
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        int64_t at;
        held[u][i] = other[u][i] = make_uint4(0, 0, 0, 0);
        if (!place(u, i, at)) continue;
        // Tiles read it once more, unless it is the sum that they read.
        held[u][i] = load_once(static_cast<const uint4*>(a.x) + at);
        if constexpr (kAdd) other[u][i] = load_once(static_cast<const uint4*>(a.added) + at);
      }
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      float sums[1] = {0.0f};
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float x[kPer];
        unpack<E>(held[u][i], x);
        if constexpr (kAdd) {
          float y[kPer];
          unpack<E>(other[u][i], y);
#pragma unroll
          for (int k = 0; k < kPer; ++k) x[k] += y[k];
          const uint4 sum = pack<E>(x);
          int64_t at;
          if (place(u, i, at)) static_cast<uint4*>(a.sum)[at] = sum;
          unpack<E>(sum, x);
        }
        sums[0] += squares(x);
      }
      add_up_lanes(sums, 32);
      if (lane == 0 && unit + u * step < all) parts[unit + u * step] = sums[0];
    }
  }
  __syncthreads();
  const int64_t row = first + own;
  if (row >= a.rows) return;
  // As teams add up warps.
  const auto over_warps = [&](auto mine, auto part_of) {
    auto total = mine;
    if (warps <= 8) {
      total = part_of(0);
      for (uint32_t warp = 1; warp < warps; ++warp) total += part_of(warp);
    } else {
      total = lane < warps ? mine : decltype(mine)(0);
#pragma unroll
      for (uint32_t apart = 16; apart > 0; apart /= 2) total += __shfl_xor_sync(~0u, total, apart);
    }
    return total;
  };
  const float share = 1.0f / static_cast<float>(a.columns), eps = static_cast<float>(a.eps);
  const float* of_row = parts + own * warps;
  const float sum =
      over_warps(lane < warps ? of_row[lane] : 0.0f, [&](uint32_t warp) { return of_row[warp]; });
  const float mean = fmaf(sum, share, eps);
  float rstd = rsqrtf(mean);
  if (is_beyond_f32(mean)) {
    const E* x = static_cast<const E*>(kAdd ? a.sum : a.x) + row * a.columns;
    double mine = 0.0;
#pragma unroll 1
    for (uint32_t warp = 0; warp < warps; ++warp) {
      double wide[1] = {0.0};
#pragma unroll 1
      for (int i = 0; i < kVectors; ++i) {
        const uint32_t vector = vector_of(warp, i);
        if (vector >= vectors) continue;
        float of[kPer];
        read<E>(x, int64_t{vector} * kPer, of);
        wide[0] += wide_squares(of);
      }
      add_up_lanes(wide, 32);
      if (lane == warp) mine = wide[0];
    }
    rstd = rstd_of(
        over_warps(mine, [&](uint32_t warp) { return __shfl_sync(~0u, mine, warp); }), a);
  }
  if (lane != 0) return;
  uint32_t bits = __float_as_uint(rstd);
  if (bits == kFp8Awaited) bits = 0x7fffffffu;
  // What the CTA wrote of the row comes before.
  ptx::store_release(reinterpret_cast<uint32_t*>(a.rstd + row), bits);
}

// Rows, normalised by the rstd that shared memory holds of a tile's.
template <class E>
struct Awaited : Normed<E> {
  const float* rstd;
  int64_t first;

  __device__ Awaited(const Fp8NormArguments& arguments, const float* rstd, int64_t first)
      : Normed<E>(arguments), rstd(rstd), first(first) {}

  __device__ uint4 unit_of(const uint4& raw, const typename Normed<E>::Columns& of, int64_t row,
                           int count) const {
    return Normed<E>::unit_by(rstd[row - first], raw, of, count);
  }
};

// Bands of tiles, and ahead of them the statistics of their rows and of some more. CTAs begin in the order of
// their numbers, and those of statistics wait for nobody, so that all that tiles wait for comes.
template <class E, bool kAdd, bool kE5M2>
__device__ inline void norm_transposed(const Fp8NormArguments& a) {
  using Tile = Transposed<E, Scales::kOfRuns, kE5M2, true, Awaited<E>>;
  __shared__ TurnedShared shared;
  __shared__ float rstd[kFp8Tile];
  constexpr uint32_t kParts = kFp8Tile / kFp8StatisticsRows;
  const uint32_t across = static_cast<uint32_t>(ceil_div(a.to.columns, kFp8Tile));
  const uint32_t bands = static_cast<uint32_t>(ceil_div(a.norm.rows, kFp8Tile));
  const uint32_t turn = across + kParts, ahead = gridDim.x - bands * turn;
  uint32_t part = blockIdx.x, tile = 0;
  bool is_tile = false;
  if (blockIdx.x >= ahead) {
    const uint32_t at = blockIdx.x - ahead, band = at / turn, of = at - band * turn;
    is_tile = of < across;
    part = ahead + band * kParts + of - across;
    tile = band * across + of;
  }
  if (!is_tile) {
    const int64_t first = int64_t{part} * kFp8StatisticsRows;
    if (first < a.norm.rows) {
      statistics<E, kAdd>(a.norm, first, reinterpret_cast<float*>(shared.storage));
    }
    return;
  }
  const int64_t first = int64_t{tile / across} * kFp8Tile;
  if (threadIdx.x < kFp8Tile && first + threadIdx.x < a.norm.rows) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(a.norm.rstd + first + threadIdx.x);
    uint32_t bits;
    while ((bits = ptx::load_acquire(from)) == kFp8Awaited) __nanosleep(64);
    rstd[threadIdx.x] = __uint_as_float(bits);
  }
  __syncthreads();
  Tile(a.to, Awaited<E>(a, rstd, first), static_cast<int>(tile)).run(shared);
}

}  // namespace fp8
}  // namespace xentile

#define FP8_NORM(add, adds, dtype, E)                                                  \
  extern "C" __global__ void __launch_bounds__(1024, 1)                                \
      fp8_quantize_norm##add##_forward_held4_##dtype(                                  \
          const __grid_constant__ Fp8NormArguments a) {                                \
    norm_held_to<E, false, adds, 4, 1>(a.norm, fp8::StoreValues{a.to});                \
  }

#define FP8_NORM_TURNED(format, dtype, E, kE5M2)                                       \
  extern "C" __global__ void __launch_bounds__(fp8::kTurnedThreads<E>, 3)              \
      fp8_quantize_transposed_norm_##format##_##dtype(                                     \
          const __grid_constant__ Fp8NormArguments a) {                                \
    __shared__ fp8::TurnedShared shared;                                               \
    fp8::Transposed<E, fp8::Scales::kOfRuns, kE5M2, true, fp8::Normed<E>>(                 \
        a.to, fp8::Normed<E>(a))                                                       \
        .run(shared);                                                                  \
  }

#define FP8_NORM_IN_ONE(add, adds, format, dtype, E, kE5M2)                            \
  extern "C" __global__ void __launch_bounds__(fp8::kTurnedThreads<E>, kFp8NormCtas)   \
      fp8_quantize_norm##add##_transposed_##format##_##dtype(                              \
          const __grid_constant__ Fp8NormArguments a) {                                \
    fp8::norm_transposed<E, adds, kE5M2>(a);                                               \
  }

// Of the dtype that activations have where FP8 is trained with.
FP8_NORM(, false, bf16, __nv_bfloat16)
FP8_NORM(_add, true, bf16, __nv_bfloat16)
FP8_NORM_TURNED(f8e4m3fn, bf16, __nv_bfloat16, false)
FP8_NORM_TURNED(f8e5m2, bf16, __nv_bfloat16, true)
FP8_NORM_IN_ONE(, false, f8e4m3fn, bf16, __nv_bfloat16, false)
FP8_NORM_IN_ONE(, false, f8e5m2, bf16, __nv_bfloat16, true)
FP8_NORM_IN_ONE(_add, true, f8e4m3fn, bf16, __nv_bfloat16, false)
FP8_NORM_IN_ONE(_add, true, f8e5m2, bf16, __nv_bfloat16, true)

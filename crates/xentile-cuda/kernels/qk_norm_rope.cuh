// RMSNorm of every head of q and of k, and its rotation: what rms_norm and rope do one after the other, of one
// read. What is normalised is rounded to the dtype of q before it is rotated, as it would be between the two.
//
// A *team* of lanes of a warp has a head, a lane the columns of a unit (rope.cuh), so that pairs and their
// rotation are in one thread. A team takes a few heads of one token together: their row of the tables and the
// weight are read once for them. Sums go over lanes in an order that follows from the shape alone, so that
// a head has the same bits wherever it is.
#pragma once

#include <cstdint>

#include "norm.cuh"
#include "rope.cuh"

namespace xentile {

// Mirrored by `Arguments` in src/qk_norm_rope/arguments.rs. Of two, the first is of q and the second of k.
struct QkNormRopeArguments {
  const void* x[2];       // [tokens, heads, columns]
  const void* dy[2];      // as x; backward alone reads it
  const void* weight[2];  // [columns]
  void* to[2];            // y, or dx
  float* rstd[2];         // [tokens, heads]
  float* dweight[2];      // [blocks, columns]
  const int32_t* indices;  // [tokens]
  const float* cos;        // [positions, pairs]
  const float* sin;
  int64_t tokens;
  int64_t columns;
  int64_t pairs;
  int64_t positions;
  double eps;
  int32_t heads[2];
  int32_t groups[2];  // that the heads of a token are taken in
  uint32_t weight_dtype[2];  // of kWeightF32 and so on
  uint32_t zero_centred;
  uint32_t units;  // of a head
  uint32_t lanes;  // the power of two from there on
};

// Mirrored by `NUMBERS` in src/qk_norm_rope/arguments.rs.
inline constexpr uint32_t kQkForwardThreads = 128;
inline constexpr uint32_t kQkBackwardThreads = 512;
// Heads of a group, at most: as many as registers hold without CTAs having to wait for each other.
inline constexpr int kQkForwardHeads = 4, kQkBackwardHeads = 2;

namespace qk {

using Arguments = QkNormRopeArguments;

template <class E, bool kInterleaved>
struct Pass {
  static constexpr int kPer = kPerVector<E>;
  static constexpr int kParts = kInterleaved ? 1 : 2;  // vectors of a unit
  static constexpr int kPairs = kInterleaved ? kPer / 2 : kPer;

  const Arguments& a;
  uint32_t lane;
  bool turns;
  bool has[kParts];
  int column[kParts];

  __device__ explicit Pass(const Arguments& arguments) : a(arguments) {
    lane = threadIdx.x % a.lanes;
    const int pairs = static_cast<int>(a.pairs), turning = pairs / kPairs;
    const int unit = static_cast<int>(lane);
    turns = unit < turning;
    has[0] = lane < a.units;
    column[0] = turns ? unit * kPer : 2 * pairs + (unit - turning) * kPer;
    if constexpr (!kInterleaved) {
      has[1] = turns;
      column[1] = pairs + unit * kPer;
    }
  }

  // Heads of a token that a team takes together.
  struct Group {
    int64_t token;
    int64_t row;  // of all heads, the first
    int count;
  };

  // The group `index` of an array, none from `end` on.
  template <int kHeads>
  __device__ Group group(int which, int64_t token, int index) const {
    const int first = index * kHeads, heads = a.heads[which];
    return {token, token * heads + first, min(heads - first, kHeads)};
  }

  __device__ static int64_t quotient(int64_t index, int32_t by) {
    if (index >> 32 == 0) return static_cast<uint32_t>(index) / static_cast<uint32_t>(by);
    return index / by;
  }

  template <int kHeads>
  __device__ void load(const void* matrix, const Group& of, uint4 (&held)[kHeads][kParts]) const {
    const E* from = static_cast<const E*>(matrix) + of.row * a.columns;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        held[h][part] = make_uint4(0, 0, 0, 0);
        if (h < of.count && has[part]) {
          held[h][part] =
              load_once(reinterpret_cast<const uint4*>(from + h * a.columns + column[part]));
        }
      }
    }
  }

  __device__ void load_angles(int64_t index, rope::Angles<kPairs>& angles) const {
    if (!turns) return;
    if (index < 0 || index >= a.positions) return angles.forget();
    const int64_t at = index * a.pairs + lane * kPairs;
    angles.load(a.cos + at, a.sin + at);
  }

  __device__ void load_weight(int which, float (&w)[kParts][kPer]) const {
    with_dtype(a.weight_dtype[which], a.weight[which], 0, [&](auto* weight) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (has[part]) scales<kPer>(a, weight + column[part], w[part]);
      }
    });
  }

  // Turns what a lane holds of a head, if it turns.
  __device__ void turn(const rope::Angles<kPairs>& angles, float sign,
                       float (&x)[kParts][kPer]) const {
    if (!turns) return;
    if constexpr (kInterleaved) {
      angles.turn_interleaved(sign, x[0]);
    } else {
      angles.turn_halves(sign, x[0], x[1]);
    }
  }

  __device__ void store(void* matrix, int64_t row, const float (&x)[kParts][kPer]) const {
    E* to = static_cast<E*>(matrix) + row * a.columns;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (has[part]) __stcs(reinterpret_cast<uint4*>(to + column[part]), pack<E>(x[part]));
    }
  }

  template <int kHeads>
  __device__ void forward() const {
    const uint32_t teams = kQkForwardThreads / a.lanes;
    const int64_t item = static_cast<int64_t>(blockIdx.x) * teams + threadIdx.x / a.lanes;
    const int of_q = a.groups[0], all = of_q + a.groups[1];
    const int64_t token = quotient(item, all);
    const int index = static_cast<int>(item - token * all), which = index >= of_q;
    Group of = group<kHeads>(which, token, index - (which ? of_q : 0));
    if (token >= a.tokens) of.count = 0;
    const int64_t position = of.count > 0 ? a.indices[token] : 0;
    uint4 held[kHeads][kParts];
    load(a.x[which], of, held);
    rope::Angles<kPairs> angles;
    load_angles(position, angles);

    float rstd[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      rstd[h] = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float x[kPer];
        unpack<E>(held[h][part], x);
        rstd[h] += squares(x);
      }
    }
    add_up_lanes(rstd, a.lanes);
    const float share = 1.0f / static_cast<float>(a.columns), eps = static_cast<float>(a.eps);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float mean = fmaf(rstd[h], share, eps);
      rstd[h] = rsqrtf(mean);
      const bool beyond = is_beyond_f32(mean);
      if (__any_sync(~0u, beyond)) {
        double wide[1] = {0.0};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          float x[kPer];
          unpack<E>(held[h][part], x);
          wide[0] += wide_squares(x);
        }
        add_up_lanes(wide, a.lanes);
        if (beyond) rstd[h] = rstd_of(wide[0], a);
      }
      if (lane == 0 && h < of.count) a.rstd[which][of.row + h] = rstd[h];
    }

    float w[kParts][kPer];
    load_weight(which, w);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float x[kParts][kPer];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        unpack<E>(held[h][part], x[part]);
#pragma unroll
        for (int k = 0; k < kPer; ++k) x[part][k] = x[part][k] * rstd[h] * w[part][k];
        // Rounded, as it would be in memory.
        if constexpr (sizeof(E) == 2) unpack<E>(pack<E>(x[part]), x[part]);
      }
      turn(angles, 1.0f, x);
      if (h < of.count) store(a.to[which], of.row + h, x);
    }
  }

  // dx, and what the heads of each block, a CTA, add to dweight: those of q first, then those of k. Groups of
  // heads go to blocks by turns, so that blocks read and write memory side by side.
  template <int kHeads>
  __device__ void backward(float* shared) const {
    constexpr uint32_t kWarps = kQkBackwardThreads / 32;
    const uint32_t teams = kQkBackwardThreads / a.lanes, warp = threadIdx.x / 32;
    const uint32_t columns = static_cast<uint32_t>(a.columns);
    const float share = 1.0f / static_cast<float>(a.columns);
    // The warp's first team; all of its teams take as many turns.
    const int64_t first = static_cast<int64_t>(blockIdx.x) * teams + warp * (32 / a.lanes);
    const int64_t step = static_cast<int64_t>(gridDim.x) * teams;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      float w[kParts][kPer], sums[kParts][kPer] = {};
      load_weight(which, w);
      const int groups = a.groups[which];
      const int64_t end = a.tokens * groups;
#pragma unroll 1
      for (int64_t begin = first; begin < end; begin += step) {
        const int64_t item = begin + threadIdx.x % 32 / a.lanes;
        const int64_t token = quotient(item, groups);
        Group of = group<kHeads>(which, token, static_cast<int>(item - token * groups));
        if (item >= end) of.count = 0;
        const int64_t position = of.count > 0 ? a.indices[token] : 0;
        uint4 x_held[kHeads][kParts], dy_held[kHeads][kParts];
        load(a.x[which], of, x_held);
        load(a.dy[which], of, dy_held);
        float rstd[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          rstd[h] = h < of.count ? __ldg(a.rstd[which] + of.row + h) : 0.0f;
        }
        rope::Angles<kPairs> angles;
        load_angles(position, angles);

        float dots[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          float g[kParts][kPer];
          cotangents(dy_held[h], angles, g);
          dots[h] = 0.0f;
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (!has[part] || h >= of.count) continue;
            float x[kPer];
            unpack<E>(x_held[h][part], x);
#pragma unroll
            for (int k = 0; k < kPer; ++k) {
              const float normalised = x[k] * rstd[h];
              sums[part][k] = fmaf(g[part][k], normalised, sums[part][k]);
              dots[h] = fmaf(g[part][k] * w[part][k], normalised, dots[h]);
            }
          }
        }
        add_up_lanes(dots, a.lanes);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float mean = dots[h] * share;
          float g[kParts][kPer];
          cotangents(dy_held[h], angles, g);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            float x[kPer];
            unpack<E>(x_held[h][part], x);
#pragma unroll
            for (int k = 0; k < kPer; ++k) {
              g[part][k] = rstd[h] * fmaf(-(x[k] * rstd[h]), mean, g[part][k] * w[part][k]);
            }
          }
          if (h < of.count) store(a.to[which], of.row + h, g);
        }
      }
      // Teams of the warp are added up, and a row of columns a warp is kept.
      float* to = shared + (which * kWarps + warp) * columns;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (uint32_t apart = 16; apart > 0; apart /= 2) {
          if (apart < a.lanes) continue;
#pragma unroll
          for (int k = 0; k < kPer; ++k) {
            sums[part][k] += __shfl_xor_sync(~0u, sums[part][k], apart);
          }
        }
        if (threadIdx.x % 32 >= a.lanes || !has[part]) continue;
#pragma unroll
        for (int k = 0; k < kPer; k += 4) {
          *reinterpret_cast<float4*>(to + column[part] + k) = make_float4(
              sums[part][k], sums[part][k + 1], sums[part][k + 2], sums[part][k + 3]);
        }
      }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 2 * columns; i += kQkBackwardThreads) {
      const uint32_t which = i / columns, at = i - which * columns;
      const float* from = shared + which * kWarps * columns + at;
      float total = from[0];
      for (uint32_t other = 1; other < kWarps; ++other) total += from[other * columns];
      a.dweight[which][static_cast<int64_t>(blockIdx.x) * columns + at] = total;
    }
  }

  // The cotangents of what was normalised: dy, rotated back.
  __device__ void cotangents(const uint4 (&dy)[kParts], const rope::Angles<kPairs>& angles,
                             float (&g)[kParts][kPer]) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) unpack<E>(dy[part], g[part]);
    turn(angles, -1.0f, g);
  }
};

}  // namespace qk
}  // namespace xentile

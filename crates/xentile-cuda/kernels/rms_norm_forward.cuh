// The forward pass of RMSNorm.
//
// A row that registers hold is read once: its vectors are asked for together, and nothing is computed
// before. Many CTAs to a multiprocessor keep memory busy while some of them add up and write. A longer
// row, or one that begins inside a vector, is read twice, the second time from the caches.
#pragma once

#include "rms_norm.cuh"

namespace xentile {

// `kVectors` vectors a thread of each of `kRows` rows. Where there is more than one row, a team is a
// warp or a part of one.
template <class E, bool kAdd, int kVectors, int kRows>
__device__ inline void norm_held(const RmsNormArguments& a) {
  constexpr int kPer = kPerVector<E>;
  __shared__ float parts[kRows][kNormWarps];
  __shared__ double wide_parts[kNormWarps];
  const Team<true> team(a.lanes);
  const uint32_t vectors = static_cast<uint32_t>(a.columns) / kPer;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows * a.teams + team.index;
  const auto row_of = [&](int r) { return first + static_cast<int64_t>(r) * a.teams; };
  const auto has = [&](int r, int i) {
    return row_of(r) < a.rows && team.lane + i * team.lanes < vectors;
  };
  const auto place = [&](int r, int i) {
    return row_of(r) * vectors + (team.lane + i * team.lanes);
  };

  uint4 held[kRows][kVectors];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      held[r][i] = make_uint4(0, 0, 0, 0);
      if (has(r, i)) held[r][i] = load_once(static_cast<const uint4*>(a.x) + place(r, i));
    }
  }
  if constexpr (kAdd) {
    uint4 other[kRows][kVectors];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        other[r][i] = make_uint4(0, 0, 0, 0);
        if (has(r, i)) other[r][i] = load_once(static_cast<const uint4*>(a.added) + place(r, i));
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float x[kPer], y[kPer];
        unpack<E>(held[r][i], x);
        unpack<E>(other[r][i], y);
#pragma unroll
        for (int k = 0; k < kPer; ++k) x[k] += y[k];
        held[r][i] = pack<E>(x);
        if (has(r, i)) store_once(a.sum, place(r, i), held[r][i]);
      }
    }
  }

  float rstd[kRows];
  const float share = 1.0f / static_cast<float>(a.columns), eps = static_cast<float>(a.eps);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[kPer];
      unpack<E>(held[r][i], x);
      rstd[r] += squares(x);
    }
  }
  team.add_up(rstd, parts);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float mean = fmaf(rstd[r], share, eps);
    rstd[r] = rsqrtf(mean);
    // What adds up together goes the same way.
    const bool beyond = is_beyond_f32(mean);
    if (team.any(beyond, a.teams)) {
      double wide = 0.0;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float x[kPer];
        unpack<E>(held[r][i], x);
        wide += wide_squares(x);
      }
      wide = team.sum(wide, wide_parts);
      if (beyond) rstd[r] = rstd_of(wide, a);
    }
    if (team.lane == 0 && row_of(r) < a.rows) a.rstd[row_of(r)] = rstd[r];
  }

  const bool one_weight = a.weight_rows >= a.rows;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r > 0 && one_weight) break;
    with_weight(a, min(row_of(r), a.rows - 1), [&](auto* weight) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint32_t vector = team.lane + i * team.lanes;
        if (vector >= vectors) continue;
        float w[kPer];
        scales<kPer>(a, weight + vector * kPer, w);
#pragma unroll
        for (int of = 0; of < kRows; ++of) {
          if (of != r && !one_weight) continue;
          float x[kPer];
          unpack<E>(held[of][i], x);
#pragma unroll
          for (int k = 0; k < kPer; ++k) x[k] = x[k] * rstd[of] * w[k];
          if (has(of, i)) store_once(a.to, place(of, i), pack<E>(x));
        }
      }
    });
  }
}

// Of any length, `kPer` elements at a time.
template <class E, bool kAdd, int kPer>
__device__ inline void norm_any(const RmsNormArguments& a) {
  __shared__ double parts[2][kNormWarps];
  const Team<true> team(a.lanes);
  const int64_t pieces = a.columns / kPer;
  uint32_t turn = 0;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * a.teams + team.index; row < a.rows;
       row += static_cast<int64_t>(gridDim.x) * a.teams) {
    const int64_t begin = row * a.columns;
    const void* normalised = kAdd ? a.sum : a.x;
    double sum = 0.0;
#pragma unroll 8
    for (int64_t piece = team.lane; piece < pieces; piece += team.lanes) {
      const int64_t at = begin + piece * kPer;
      float x[kPer];
      read<E>(a.x, at, x);
      if constexpr (kAdd) {
        float y[kPer];
        read<E>(a.added, at, y);
#pragma unroll
        for (int k = 0; k < kPer; ++k) x[k] = to_float(from_float<E>(x[k] + y[k]));
        write<E>(a.sum, at, x);
      }
      sum += squares(x);
    }
    sum = team.sum(sum, parts[turn ^= 1]);
    if (is_beyond_f32(static_cast<float>(sum / static_cast<double>(a.columns) + a.eps))) {
      sum = 0.0;
      for (int64_t piece = team.lane; piece < pieces; piece += team.lanes) {
        float x[kPer];
        read<E>(normalised, begin + piece * kPer, x);
        sum += wide_squares(x);
      }
      sum = team.sum(sum, parts[turn ^= 1]);
    }
    const float rstd = rstd_of(sum, a);
    if (team.lane == 0) a.rstd[row] = rstd;
    with_weight(a, row, [&](auto* weight) {
#pragma unroll 8
      for (int64_t piece = team.lane; piece < pieces; piece += team.lanes) {
        float x[kPer], w[kPer];
        read<E>(normalised, begin + piece * kPer, x);
        scales<kPer>(a, weight + piece * kPer, w);
#pragma unroll
        for (int k = 0; k < kPer; ++k) x[k] = x[k] * rstd * w[k];
        write<E>(a.to, begin + piece * kPer, x);
      }
    });
  }
}

}  // namespace xentile

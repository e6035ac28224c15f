// The forward pass of norms.
//
// A row that registers hold is read once: its vectors are asked for together, and nothing is computed
// before. Many CTAs to a multiprocessor keep memory busy while some of them add up and write. A longer
// row, or one that begins inside a vector, is read twice, the second time from the caches.
#pragma once

#include "norm.cuh"

namespace xentile {

// The means of rows that registers hold, from `first` on, and one over their deviations. The first sum finds what to take
// off, about the mean; of what is left, which is held once more, the sum says how far that is from it.
template <class E, int kVectors, int kRows>
__device__ inline void held_moments(const NormArguments& a, const Team<true>& team,
                                    int64_t first, const uint4 (&held)[kRows][kVectors],
                                    float (&means)[kRows], float (&rstd)[kRows]) {
  constexpr int kPer = kPerVector<E>;
  __shared__ float first_parts[kRows][kNormWarps], parts[2 * kRows][kNormWarps];
  __shared__ double wide_parts[2][kNormWarps];
  const uint32_t vectors = static_cast<uint32_t>(a.columns) / kPer;
  const float share = 1.0f / static_cast<float>(a.columns), eps = static_cast<float>(a.eps);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    means[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[kPer];
      unpack<E>(held[r][i], x);
      means[r] += sum_of(x);
    }
  }
  team.add_up(means, first_parts);
  // Of each row, what is left and its squares.
  float sums[2 * kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    means[r] *= share;
    sums[r] = sums[kRows + r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      // There is nothing to take off of what is not there.
      if (team.lane + i * team.lanes >= vectors) continue;
      float x[kPer];
      unpack<E>(held[r][i], x);
#pragma unroll
      for (int k = 0; k < kPer; ++k) x[k] -= means[r];
      sums[r] += sum_of(x);
      sums[kRows + r] += squares(x);
    }
  }
  team.add_up(sums, parts);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float off = sums[r] * share;
    const Moments found = moments(means[r], off, sums[kRows + r] * share);
    const float variance = found.variance + eps;
    means[r] = found.mean;
    rstd[r] = rsqrtf(variance);
    // What adds up together goes the same way.
    const bool beyond = is_beyond_f32(variance) || is_far(off, variance);
    if (!team.any(beyond, a.teams)) continue;
    // Rare, and so from the caches: what it would keep in registers the others need.
    const int64_t begin = (first + static_cast<int64_t>(r) * a.teams) * a.columns;
    const bool has = begin < a.rows * a.columns;
    double mean = 0.0, wide = 0.0;
#pragma unroll 1
    for (uint32_t vector = team.lane; has && vector < vectors; vector += team.lanes) {
      float x[kPer];
      read<E>(a.x, begin + vector * kPer, x);
#pragma unroll
      for (int k = 0; k < kPer; ++k) mean += x[k];
    }
    mean = team.sum(mean, wide_parts[0]) / static_cast<double>(a.columns);
#pragma unroll 1
    for (uint32_t vector = team.lane; has && vector < vectors; vector += team.lanes) {
      float x[kPer];
      read<E>(a.x, begin + vector * kPer, x);
      wide += wide_squares(x, mean);
    }
    wide = team.sum(wide, wide_parts[1]);
    if (beyond) {
      means[r] = static_cast<float>(mean);
      rstd[r] = rstd_of(wide, a);
    }
  }
}

// The mean of a row of any length whose elements add up to `sum`, in which squares about it are left.
template <class E, int kPer>
__device__ inline float any_moments(const NormArguments& a, const Team<true>& team, int64_t begin,
                                    double& sum, double (&parts)[2][kNormWarps], uint32_t& turn) {
  const int64_t pieces = a.columns / kPer;
  const double columns = static_cast<double>(a.columns);
  const float about = static_cast<float>(sum / columns);
  double left = 0.0, all = 0.0;
#pragma unroll 8
  for (int64_t piece = team.lane; piece < pieces; piece += team.lanes) {
    float x[kPer];
    read<E>(a.x, begin + piece * kPer, x);
#pragma unroll
    for (int k = 0; k < kPer; ++k) x[k] -= about;
    left += sum_of(x);
    all += squares(x);
  }
  const double off = team.sum(left, parts[turn ^= 1]) / columns;
  all = team.sum(all, parts[turn ^= 1]);
  double mean = about + off;
  sum = fmax(all - off * off * columns, 0.0);
  const float variance = static_cast<float>(sum / columns + a.eps);
  if (is_beyond_f32(variance) || is_far(static_cast<float>(off), variance)) {
    double wide = 0.0;
    for (int64_t piece = team.lane; piece < pieces; piece += team.lanes) {
      float x[kPer];
      read<E>(a.x, begin + piece * kPer, x);
#pragma unroll
      for (int k = 0; k < kPer; ++k) wide += x[k];
    }
    mean = team.sum(wide, parts[turn ^= 1]) / columns;
    wide = 0.0;
    for (int64_t piece = team.lane; piece < pieces; piece += team.lanes) {
      float x[kPer];
      read<E>(a.x, begin + piece * kPer, x);
      wide += wide_squares(x, mean);
    }
    sum = team.sum(wide, parts[turn ^= 1]);
  }
  return static_cast<float>(mean);
}

// The bias of `kPer` columns of a row, whose weight has the dtype `W`.
template <int kPer, class W>
__device__ inline void biases(const NormArguments& a, const W*, int64_t row, int64_t column,
                              float (&to)[kPer]) {
  widen<kPer>(bias_of<W>(a, row) + column, to);
}

// Puts vectors of y where they belong.
struct StoreNorm {
  const NormArguments& a;

  template <class E>
  __device__ void store(int64_t vector, const float (&y)[kPerVector<E>]) const {
    store_once(a.to, vector, pack<E>(y));
  }
};

// `kVectors` vectors a thread of each of `kRows` rows. Where there is more than one row, a team is a
// warp or a part of one. `to` takes y, by vectors of all rows.
template <class E, bool kCentred, bool kAdd, int kVectors, int kRows, class To>
__device__ inline void norm_held_to(const NormArguments& a, const To& to) {
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

  float rstd[kRows], means[kRows];
  const float share = 1.0f / static_cast<float>(a.columns), eps = static_cast<float>(a.eps);
  if constexpr (kCentred) {
    held_moments<E>(a, team, first, held, means, rstd);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kCentred) {
      if (team.lane == 0 && row_of(r) < a.rows) {
        a.mean[row_of(r)] = means[r];
        a.rstd[row_of(r)] = rstd[r];
      }
      continue;
    }
    rstd[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[kPer];
      unpack<E>(held[r][i], x);
      rstd[r] += squares(x);
    }
  }
  if constexpr (!kCentred) team.add_up(rstd, parts);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kCentred) continue;
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

  const bool one_weight = have_one_weight<kCentred>(a);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r > 0 && one_weight) break;
    with_weight(a, min(row_of(r), a.rows - 1), [&](auto* weight) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint32_t vector = team.lane + i * team.lanes;
        if (vector >= vectors) continue;
        float w[kPer], b[kPer];
        scales<kPer>(a, weight + vector * kPer, w);
        if constexpr (kCentred) biases(a, weight, min(row_of(r), a.rows - 1), vector * kPer, b);
#pragma unroll
        for (int of = 0; of < kRows; ++of) {
          if (of != r && !one_weight) continue;
          float x[kPer];
          unpack<E>(held[of][i], x);
#pragma unroll
          for (int k = 0; k < kPer; ++k) {
            if constexpr (kCentred) {
              x[k] = fmaf((x[k] - means[of]) * rstd[of], w[k], b[k]);
            } else {
              x[k] = x[k] * rstd[of] * w[k];
            }
          }
          if (has(of, i)) to.template store<E>(place(of, i), x);
        }
      }
    });
  }
}

template <class E, bool kCentred, bool kAdd, int kVectors, int kRows>
__device__ inline void norm_held(const NormArguments& a) {
  norm_held_to<E, kCentred, kAdd, kVectors, kRows>(a, StoreNorm{a});
}

// Of any length, `kPer` elements at a time.
template <class E, bool kCentred, bool kAdd, int kPer>
__device__ inline void norm_any(const NormArguments& a) {
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
      sum += kCentred ? sum_of(x) : squares(x);
    }
    sum = team.sum(sum, parts[turn ^= 1]);
    float mean = 0.0f;
    if constexpr (kCentred) {
      mean = any_moments<E, kPer>(a, team, begin, sum, parts, turn);
    } else if (is_beyond_f32(
                   static_cast<float>(sum / static_cast<double>(a.columns) + a.eps))) {
      sum = 0.0;
      for (int64_t piece = team.lane; piece < pieces; piece += team.lanes) {
        float x[kPer];
        read<E>(normalised, begin + piece * kPer, x);
        sum += wide_squares(x);
      }
      sum = team.sum(sum, parts[turn ^= 1]);
    }
    const float rstd = rstd_of(sum, a);
    if (team.lane == 0) {
      if constexpr (kCentred) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    with_weight(a, row, [&](auto* weight) {
#pragma unroll 8
      for (int64_t piece = team.lane; piece < pieces; piece += team.lanes) {
        float x[kPer], w[kPer], b[kPer];
        read<E>(normalised, begin + piece * kPer, x);
        scales<kPer>(a, weight + piece * kPer, w);
        if constexpr (kCentred) biases(a, weight, row, piece * kPer, b);
#pragma unroll
        for (int k = 0; k < kPer; ++k) {
          x[k] = kCentred ? fmaf((x[k] - mean) * rstd, w[k], b[k]) : x[k] * rstd * w[k];
        }
        write<E>(a.to, begin + piece * kPer, x);
      }
    });
  }
}

}  // namespace xentile

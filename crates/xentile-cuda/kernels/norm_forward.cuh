// The forward pass of norms.
//
// A row that registers hold is read once: its vectors are asked for together, and nothing is computed
// before. Many CTAs to a multiprocessor keep memory busy while some of them add up and write; where there
// are few, the weight is asked for with the rows, as nothing else hides how long it takes. A longer row,
// or one that begins inside a vector, is read twice, the second time from the caches.
#pragma once

#include "norm.cuh"

namespace xentile {

// Numbers of a row, or of the part of it that a warp has.
struct Part {
  float mean;
  float squares;  // about that
  float count;
  float off;  // the square of how far the mean is from what was taken off
};

// What all warps of a team have, of their parts, the same in all of its threads. The means differ by little
// from the first, so that no difference of large numbers is left but one that is exact.
__device__ inline Part whole_of(const Team<true>& team, const Part* parts, float share) {
  const uint32_t warps = team.lanes / 32;
  const Part* first = parts + team.index * warps;
  const float about = first->mean;
  Part all = {0.0f, 0.0f, 0.0f, 0.0f};
  if (warps <= 8) {
#pragma unroll 4
    for (uint32_t warp = 0; warp < warps; ++warp) {
      const Part one = first[warp];
      all.mean = fmaf(one.count, one.mean - about, all.mean);
      all.off = fmaxf(all.off, one.off);
    }
    const float off = all.mean * share;
#pragma unroll 4
    for (uint32_t warp = 0; warp < warps; ++warp) {
      const Part one = first[warp];
      const float apart = (one.mean - about) - off;
      all.squares += fmaf(one.count * apart, apart, one.squares);
    }
    all.mean = about + off;
    return all;
  }
  const uint32_t warp = threadIdx.x % 32;
  const Part one = warp < warps ? first[warp] : Part{about, 0.0f, 0.0f, 0.0f};
  float sums[1] = {one.count * (one.mean - about)};
  add_up_lanes(sums, 32);
  const float off = sums[0] * share, apart = (one.mean - about) - off;
  float squares[1] = {fmaf(one.count * apart, apart, one.squares)};
  add_up_lanes(squares, 32);
  all.off = one.off;
#pragma unroll
  for (uint32_t by = 16; by > 0; by /= 2) {
    all.off = fmaxf(all.off, __shfl_xor_sync(~0u, all.off, by));
  }
  return {about + off, squares[0], 0.0f, all.off};
}

// The means of rows that registers hold, from `first` on, and one over their deviations. Each warp takes a
// number of its part off that is near the mean, most often: the middle one of three. Parts are put
// together as parts of a sample are, so that threads meet once.
template <class E, int kVectors, int kRows>
__device__ inline void held_moments(const NormArguments& a, const Team<true>& team,
                                    int64_t first, uint4 (&held)[kRows][kVectors],
                                    float (&means)[kRows], float (&rstd)[kRows]) {
  constexpr int kPer = kPerVector<E>;
  __shared__ Part parts[kNormWarps];
  __shared__ double wide_parts[2][kNormWarps];
  const uint32_t vectors = static_cast<uint32_t>(a.columns) / kPer;
  const float share = 1.0f / static_cast<float>(a.columns), eps = static_cast<float>(a.eps);
  // The team's lanes of this warp, and the vectors that are theirs.
  const uint32_t lanes = min(team.lanes, 32), begin = threadIdx.x % 32 / lanes * lanes;
  const uint32_t ahead = team.lane / 32 * 32;
  uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t from = ahead + i * team.lanes;
    mine += from < vectors ? min(vectors - from, lanes) : 0;
  }
  const uint32_t some = min(lanes, vectors);
  const float count = static_cast<float>(mine * kPer), by_count = ptx::rcp(count);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float x[kPer];
    unpack<E>(held[r][0], x);
    const float of[3] = {__shfl_sync(~0u, x[0], begin), __shfl_sync(~0u, x[0], begin + some / 3),
                         __shfl_sync(~0u, x[0], begin + some * 2 / 3)};
    const float about = fmaxf(fminf(of[0], of[1]), fminf(fmaxf(of[0], of[1]), of[2]));
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      // There is nothing to take off of what is not there.
      const float off = team.lane + i * team.lanes < vectors ? about : 0.0f;
      unpack<E>(held[r][i], x);
#pragma unroll
      for (int k = 0; k < kPer; ++k) x[k] -= off;
      sums[0] += sum_of(x);
      sums[1] += squares(x);
    }
    add_up_lanes(sums, lanes);
    const float off = sums[0] * by_count;
    Part all = {about + off, fmaxf(fmaf(-off, sums[0], sums[1]), 0.0f), count, off * off};
    if (kRows == 1 && team.lanes > 32) {
      if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = all;
      team.sync();
      all = whole_of(team, parts, share);
    }
    const float variance = fmaf(all.squares, share, eps);
    means[r] = all.mean;
    rstd[r] = rsqrtf(variance);
    forget(held[r]);
    // What adds up together goes the same way.
    const bool beyond = is_beyond_f32(variance) || !(all.off <= 16.0f * variance);
    if (!team.any(beyond, a.teams)) continue;
    // Rare, and so from the caches: what it would keep in registers the others need.
    const int64_t from = (first + static_cast<int64_t>(r) * a.teams) * a.columns;
    const bool has = from < a.rows * a.columns;
    double mean = 0.0, wide = 0.0;
#pragma unroll 1
    for (uint32_t vector = team.lane; has && vector < vectors; vector += team.lanes) {
      float x[kPer];
      read<E>(a.x, from + vector * kPer, x);
#pragma unroll
      for (int k = 0; k < kPer; ++k) mean += x[k];
    }
    mean = team.sum(mean, wide_parts[0]) / static_cast<double>(a.columns);
#pragma unroll 1
    for (uint32_t vector = team.lane; has && vector < vectors; vector += team.lanes) {
      float x[kPer];
      read<E>(a.x, from + vector * kPer, x);
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

// The bias of a row whose weight has the dtype `W`.
template <class W>
__device__ inline const W* bias_like(const NormArguments& a, const W*, int64_t row) {
  return bias_of<W>(a, row);
}

// Has the weight, and the bias of centred rows, come to shared memory while rows do.
template <bool kCentred>
__device__ inline void ask_ahead(const NormArguments& a, uint4* shared) {
  const auto ask = [&](const void* from, uint4* to) {
    for (uint32_t i = threadIdx.x; i < a.ahead / sizeof(uint4); i += blockDim.x) {
      ptx::copy_common_async(ptx::shared_address(to + i), static_cast<const uint4*>(from) + i);
    }
  };
  ask(a.weight, shared);
  if (kCentred) ask(a.bias, shared + a.ahead / sizeof(uint4));
  ptx::commit_copies();
}

// Calls `body` with arguments that lead to the weight: to what was asked for, if anything was, which all threads
// of the CTA wait for. They are two calls so that the compiler knows which memory each reads.
template <class Body>
__device__ inline void with_arrived(const NormArguments& a, const uint4* shared, const Body& body) {
  if (a.ahead == 0) return body(a);
  ptx::wait_for_copies(0);
  __syncthreads();
  NormArguments of = a;
  of.weight = shared;
  of.bias = shared + a.ahead / sizeof(uint4);
  body(of);
}

// Puts vectors of y where they belong.
struct StoreNorm {
  static constexpr bool kTogether = false;
  const NormArguments& a;

  template <class E>
  __device__ void store(int64_t vector, const float (&y)[kPerVector<E>]) const {
    store_once(a.to, vector, pack<E>(y));
  }
};

// rstd of a row for `mean`, that of its squares and eps; in f64 where f32 cannot hold that.
template <class E, int kVectors>
__device__ inline float rstd_of_held(const NormArguments& a, const Team<true>& team, float mean,
                                     const uint4 (&held)[kVectors], double (&parts)[kNormWarps]) {
  float rstd = rsqrtf(mean);
  // What adds up together goes the same way.
  const bool beyond = is_beyond_f32(mean);
  if (team.any(beyond, a.teams)) {
    double wide = 0.0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[kPerVector<E>];
      unpack<E>(held[i], x);
      wide += wide_squares(x);
    }
    wide = team.sum(wide, parts);
    if (beyond) rstd = rstd_of(wide, a);
  }
  return rstd;
}

// `kVectors` vectors a thread of each of `kRows` rows. Where there is more than one row, a team is a
// warp or a part of one. `to` takes y, by vectors of all rows, or what a thread has of a row `kTogether`.
template <class E, bool kCentred, bool kAdd, int kVectors, int kRows, class To>
__device__ inline void norm_held_to(const NormArguments& a, const To& to) {
  constexpr int kPer = kPerVector<E>;
  __shared__ float parts[kRows][kNormWarps];
  __shared__ double wide_parts[kNormWarps];
  extern __shared__ uint4 ahead[];
  if (a.ahead > 0) ask_ahead<kCentred>(a, ahead);
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
    rstd[r] = rstd_of_held<E>(a, team, fmaf(rstd[r], share, eps), held[r], wide_parts);
    if (team.lane == 0 && row_of(r) < a.rows) a.rstd[row_of(r)] = rstd[r];
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) forget(held[r]);

  if constexpr (To::kTogether) {
    static_assert(kRows == 1 && !kCentred);
    with_arrived(a, ahead, [&](const NormArguments& of) {
      with_weight(of, min(first, a.rows - 1), [&](auto* weight) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const uint32_t vector = team.lane + i * team.lanes;
          if (vector >= vectors) continue;
          float w[kPer], x[kPer];
          scales<kPer>(a, weight + vector * kPer, w);
          unpack<E>(held[0][i], x);
#pragma unroll
          for (int k = 0; k < kPer; ++k) x[k] = x[k] * rstd[0] * w[k];
          held[0][i] = pack<E>(x);
        }
      });
    });
    to.template store<E>(place(0, 0), team.lanes, held[0], [&](int i) { return has(0, i); });
  } else {
    const bool one_weight = have_one_weight<kCentred>(a);
    with_arrived(a, ahead, [&](const NormArguments& of_weight) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r > 0 && one_weight) break;
        const int64_t row = min(row_of(r), a.rows - 1);
        with_weight(of_weight, row, [&](auto* weight) {
          const auto* bias = weight;
          if constexpr (kCentred) bias = bias_like(of_weight, weight, row);
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            const uint32_t vector = team.lane + i * team.lanes;
            if (vector >= vectors) continue;
            float w[kPer], b[kPer];
            scales<kPer>(a, weight + vector * kPer, w);
            if constexpr (kCentred) widen<kPer>(bias + vector * kPer, b);
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
    });
  }
}

template <class E, bool kCentred, bool kAdd, int kVectors, int kRows>
__device__ inline void norm_held(const NormArguments& a) {
  norm_held_to<E, kCentred, kAdd, kVectors, kRows>(a, StoreNorm{a});
}

// RMSNorm of few rows, which have one weight, by CTAs that stay: a row's vectors are asked for before the row
// before it is added up. So CTAs wait for the weight once, and end together.
template <class E, int kVectors>
__device__ inline void norm_in_turns(const NormArguments& a) {
  constexpr int kPer = kPerVector<E>;
  // Those of a turn and of the next, so that threads meet once a turn.
  __shared__ float parts[2][1][kNormWarps];
  __shared__ double wide_parts[2][kNormWarps];
  const Team<true> team(a.lanes);
  const uint32_t vectors = static_cast<uint32_t>(a.columns) / kPer;
  const uint32_t rows = static_cast<uint32_t>(a.rows), step = gridDim.x * a.teams;
  const float share = 1.0f / static_cast<float>(a.columns), eps = static_cast<float>(a.eps);
  uint4 next[kVectors];
  const auto ask = [&](uint32_t row) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t vector = team.lane + i * team.lanes;
      next[i] = make_uint4(0, 0, 0, 0);
      if (row < rows && vector < vectors) {
        next[i] = load_once(static_cast<const uint4*>(a.x) + (row * vectors + vector));
      }
    }
  };
  ask(blockIdx.x * a.teams + team.index);
  // The teams of a CTA take as many turns.
  uint32_t turn = 0;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * a.teams; first < rows; first += step, turn ^= 1) {
    const uint32_t row = first + team.index;
    uint4 held[kVectors];
    float rstd[1] = {0.0f};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) held[i] = next[i];
    ask(row + step);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[kPer];
      unpack<E>(held[i], x);
      rstd[0] += squares(x);
    }
    team.add_up(rstd, parts[turn]);
    rstd[0] = rstd_of_held<E>(a, team, fmaf(rstd[0], share, eps), held, wide_parts[turn]);
    forget(held);
    if (row >= rows) continue;
    if (team.lane == 0) a.rstd[row] = rstd[0];
    with_dtype(a.weight_dtype, a.weight, 0, [&](auto* weight) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint32_t vector = team.lane + i * team.lanes;
        if (vector >= vectors) continue;
        float w[kPer], x[kPer];
        scales<kPer>(a, weight + vector * kPer, w);
        unpack<E>(held[i], x);
#pragma unroll
        for (int k = 0; k < kPer; ++k) x[k] = x[k] * rstd[0] * w[k];
        store_once(a.to, row * vectors + vector, pack<E>(x));
      }
    });
  }
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
      const auto* bias = weight;
      if constexpr (kCentred) bias = bias_like(a, weight, row);
#pragma unroll 8
      for (int64_t piece = team.lane; piece < pieces; piece += team.lanes) {
        float x[kPer], w[kPer], b[kPer];
        read<E>(normalised, begin + piece * kPer, x);
        scales<kPer>(a, weight + piece * kPer, w);
        if constexpr (kCentred) widen<kPer>(bias + piece * kPer, b);
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

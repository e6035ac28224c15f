// The backward pass of norms: dx, and for each block of rows what they add to dweight and, where they are
// centred, to dbias.
//
// A CTA has a block, whose sums it keeps in registers, a column's in the thread that has the column in
// every row of the team. Blocks take turns at rows, so that CTAs which run beside each other read and
// write memory side by side: with rows that follow one another, as many streams far apart met in the same
// banks. The teams of a CTA are added up at the end, those of a warp first and then in order. So the order is
// that of the shape and of the launch. Rows come through shared memory, the next ones on their way while one
// is computed: every thread copies what it will read itself, so that nobody waits for it but that thread, and
// in a row whole warps meet once, to add up.
#pragma once

#include "norm.cuh"

namespace xentile {

// Takes a row's mean off of a few of its numbers. Of zeros in the place of what is not there nothing is
// left, since what would be might not be finite once it is divided.
template <int kCount>
__device__ inline void centre(float (&x)[kCount], float mean, bool is_there) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) x[k] -= is_there ? mean : 0.0f;
}

// What warps of teams add up: a team's places begin at a multiple of 16 bytes, and those of no warp hold 0.
inline constexpr uint32_t kPlaces = 96;

__device__ inline uint32_t places_of(uint32_t warps) { return (warps + 3) / 4 * 4; }

__device__ inline float sum_of_places(const float* from, uint32_t places) {
  float total = 0.0f;
  for (uint32_t at = 0; at < places; at += 4) {
    const float4 of = *reinterpret_cast<const float4*>(from + at);
    total += (of.x + of.y) + (of.z + of.w);
  }
  return total;
}

// `kVectors` vectors a thread of each row, and places in shared memory for two rows a team: the one at hand,
// and the next, which is on its way meanwhile.
template <class E, bool kCentred, bool kAdd, int kVectors>
__device__ inline void gradients_ring(const NormArguments& a) {
  constexpr int kPer = kPerVector<E>;
  constexpr uint32_t kArrays = kAdd ? 3 : 2;
  // Teams of rows of one vector a thread are a warp at most, and others whole warps.
  constexpr bool kWarps = kVectors > 1;
  extern __shared__ uint4 ring[];
  // Of `g xhat`, and of `g`.
  constexpr int kSums = kCentred ? 2 : 1;
  __shared__ __align__(16) float parts[2][kSums][kWarps ? kPlaces : 1];
  const Team<false> team(a.lanes);
  const uint32_t vectors = static_cast<uint32_t>(a.columns) / kPer;
  const uint32_t warps = a.lanes / 32, places = places_of(warps);
  const int64_t group = blockIdx.x / a.blocks, block = blockIdx.x % a.blocks;
  // Teams take as many turns as the first, which may be the only one with a row: parts of a warp have to,
  // and racecheck reports what follows the loop where teams leave it one after another.
  const int32_t step = static_cast<int32_t>(a.blocks * a.teams);
  const int32_t ahead = static_cast<int32_t>(team.index * (a.adjacent ? 1 : a.blocks));
  const int64_t first = block * (a.adjacent ? a.teams : 1) + ahead;
  // Rows of the group from the team's next on.
  int64_t left = a.group_rows - first;

  // A place has the vectors of all threads and then, of rows that are not centred, each thread's rstd.
  const uint32_t apart = blockDim.x * 16;
  uint32_t here = ptx::shared_address(ring + threadIdx.x);
  uint32_t next_place = here + apart * (kArrays * kVectors) + (kCentred ? 0 : blockDim.x * 4);
  const uint32_t to_rstd = apart * (kArrays * kVectors) - threadIdx.x * 12;
  const auto slot = [&](uint32_t begin, uint32_t array, int i) {
    return begin + (array * kVectors + i) * apart;
  };
  const auto has = [&](int i) { return team.lane + i * team.lanes < vectors; };
  // The next row, and bytes from an array's beginning to the thread's first vector of it. An array's
  // address is a constant, so that one number in registers serves all of them.
  int64_t row = group * a.group_rows + first;
  int64_t at = (row * vectors + team.lane) * 16;
  const int64_t rise = int64_t{step} * vectors * 16;
  const uint32_t lane_bytes = team.lanes * 16;
  const void* const arrays[3] = {a.x, a.dy, a.added};
  const auto fetch = [&](uint32_t begin) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const bool there = has(i) && left > 0;
      // An address outside of the array is not read, and yet no address to give.
      const int64_t place = there ? at + i * lane_bytes : 0;
#pragma unroll
      for (uint32_t array = 0; array < kArrays; ++array) {
        ptx::copy_async(slot(begin, array, i), static_cast<const char*>(arrays[array]) + place,
                        there ? 16 : 0);
      }
    }
    // Of loads into registers one may be waited for where another is used, as soon as it has begun.
    if constexpr (!kCentred) {
      ptx::copy_number_async(begin + to_rstd, a.rstd + (left > 0 ? row : 0), left > 0 ? 4 : 0);
    }
    ptx::commit_copies();
  };
  // Of centred rows, where copies take longer, the next row's.
  float next_rstd = 0.0f, next_mean = 0.0f;
  const auto load_statistics = [&] {
    if constexpr (kCentred) {
      next_rstd = left > 0 ? a.rstd[row] : 0.0f;
      next_mean = left > 0 ? a.mean[row] : 0.0f;
    }
  };

  float w[kVectors][kPer], sums[kVectors][kPer], of_bias[kVectors][kPer];
  const auto take_weight = [&](int64_t row) {
    with_weight(a, row, [&](auto* weight) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint32_t vector = team.lane + i * team.lanes;
        if (vector < vectors) scales<kPer>(a, weight + vector * kPer, w[i]);
      }
    });
  };
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) w[i][k] = sums[i][k] = of_bias[i][k] = 0.0f;
  }
  if constexpr (kWarps) {
    float* all = &parts[0][0][0];
    for (uint32_t place = threadIdx.x; place < sizeof(parts) / sizeof(float); place += blockDim.x) {
      all[place] = 0.0f;
    }
    __syncthreads();
  }

  fetch(here);
  const bool one_weight = a.weight_rows >= a.rows;
  if (one_weight && a.rows > 0) take_weight(0);
  const float share = 1.0f / static_cast<float>(a.columns);
  load_statistics();
  uint32_t turn = 0;
  while (left + ahead > 0) {
    ptx::wait_for_copies(0);
    const float rstd = kCentred ? next_rstd : ptx::load_shared_number(here + to_rstd);
    const float row_mean = next_mean;
    if (!one_weight) take_weight(min(row, a.rows - 1));
    at += rise, row += step, left -= step;
    fetch(next_place);
    load_statistics();

    float dots[4] = {}, gs[4] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[kPer], dy[kPer];
      unpack<E>(ptx::load_shared(slot(here, 0, i)), x);
      unpack<E>(ptx::load_shared(slot(here, 1, i)), dy);
      if constexpr (kCentred) centre(x, row_mean, has(i));
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        const float normalised = x[k] * rstd;
        sums[i][k] = fmaf(dy[k], normalised, sums[i][k]);
        dots[k % 4] = fmaf(dy[k] * w[i][k], normalised, dots[k % 4]);
        if constexpr (kCentred) {
          of_bias[i][k] += dy[k];
          gs[k % 4] = fmaf(dy[k], w[i][k], gs[k % 4]);
        }
      }
    }
    float over_row[kSums] = {(dots[0] + dots[1]) + (dots[2] + dots[3])};
    if constexpr (kCentred) over_row[1] = (gs[0] + gs[1]) + (gs[2] + gs[3]);
    add_up_lanes(over_row, kWarps ? 32 : team.lanes);
    if (kWarps && warps > 1) {
      turn ^= 1;
      const uint32_t from = team.index * places;
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int s = 0; s < kSums; ++s) parts[turn][s][from + team.lane / 32] = over_row[s];
      }
      team.sync();
#pragma unroll
      for (int s = 0; s < kSums; ++s) over_row[s] = sum_of_places(&parts[turn][s][from], places);
    }
    const float by = over_row[0] * share * rstd;
    float g_mean = 0.0f;
    if constexpr (kCentred) g_mean = over_row[1] * share;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[kPer], dy[kPer];
      unpack<E>(ptx::load_shared(slot(here, 0, i)), x);
      unpack<E>(ptx::load_shared(slot(here, 1, i)), dy);
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if constexpr (kCentred) {
          x[k] = rstd * fmaf(row_mean - x[k], by, fmaf(dy[k], w[i][k], -g_mean));
        } else {
          x[k] = rstd * fmaf(-x[k], by, dy[k] * w[i][k]);
        }
      }
      if constexpr (kAdd) {
        float dsum[kPer];
        unpack<E>(ptx::load_shared(slot(here, 2, i)), dsum);
#pragma unroll
        for (int k = 0; k < kPer; ++k) x[k] += dsum[k];
      }
      if (has(i) && left + step > 0) {
        char* to = static_cast<char*>(a.to) + (at - rise) + i * lane_bytes;
        __stcs(reinterpret_cast<uint4*>(to), pack<E>(x));
      }
    }
    const uint32_t last = here;
    here = next_place, next_place = last;
  }

  // Sums, [teams or warps, columns], lie where the ring was.
  ptx::wait_for_copies(0);
  const uint32_t sharers = kWarps ? a.teams : min(a.teams, blockDim.x / 32);
  const auto give = [&](float (&sums)[kVectors][kPer], float* all) {
    __syncthreads();
    float* shared = reinterpret_cast<float*>(ring);
    float* to = all + static_cast<int64_t>(blockIdx.x) * a.columns;
    if (sharers == 1) shared = to;
    if constexpr (!kWarps) {
      for (uint32_t apart = 16; apart >= team.lanes; apart /= 2) {
#pragma unroll
        for (int k = 0; k < kPer; ++k) sums[0][k] += __shfl_xor_sync(~0u, sums[0][k], apart);
      }
    }
    const uint32_t sharer = kWarps ? team.index : threadIdx.x / 32;
    const bool gives = kWarps || threadIdx.x % 32 < team.lanes;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t vector = team.lane + i * team.lanes;
      if (vector >= vectors || !gives) continue;
      float4* place = reinterpret_cast<float4*>(shared + sharer * a.columns + vector * kPer);
#pragma unroll
      for (int k = 0; k < kPer; k += 4) {
        place[k / 4] =
            make_float4(sums[i][k], sums[i][k + 1], sums[i][k + 2], sums[i][k + 3]);
      }
    }
    if (sharers == 1) return;
    __syncthreads();
    for (uint32_t column = threadIdx.x; column < a.columns; column += blockDim.x) {
      float total = shared[column];
      for (uint32_t other = 1; other < sharers; ++other) {
        total += shared[other * a.columns + column];
      }
      to[column] = total;
    }
  };
  give(sums, a.dweight);
  if constexpr (kCentred) give(of_bias, a.dbias);
}

// Of any length, `kPer` elements at a time. A CTA takes a few rows together, so that what they add to
// dweight, which lies in memory, is read and written once for all of them; the second time, they come
// from the caches.
template <class E, bool kCentred, bool kAdd, int kPer>
__device__ inline void gradients_any(const NormArguments& a) {
  // Of `g xhat` of each row, and of `g`.
  constexpr int kSums = (kCentred ? 2 : 1) * kNormTogether;
  __shared__ double parts[2][kSums][kNormWarps];
  const Team<true> team(blockDim.x);
  const int64_t pieces = a.columns / kPer;
  const int64_t group = blockIdx.x / a.blocks, block = blockIdx.x % a.blocks;
  const int64_t stop = (group + 1) * a.group_rows;
  float* sums = a.dweight + static_cast<int64_t>(blockIdx.x) * a.columns;
  float* of_bias = kCentred ? a.dbias + static_cast<int64_t>(blockIdx.x) * a.columns : nullptr;
  uint32_t turn = 0;
  bool is_first = true;
  int64_t end;
  for (int64_t first = group * a.group_rows + block * kNormTogether; first < stop; first = end) {
    // Rows of one weight, of those that the block takes at this turn.
    const int64_t within = (first - group * a.group_rows) % kNormTogether;
    end = min(first - within + kNormTogether, stop);
    if (a.weight_rows < a.rows) end = min(end, (first / a.weight_rows + 1) * a.weight_rows);
    with_weight(a, first, [&](auto* weight) {
      float rstd[kNormTogether], means[kNormTogether];
      float row_means[kNormTogether], g_means[kNormTogether];
      double dots[kSums] = {};
#pragma unroll
      for (int r = 0; r < kNormTogether; ++r) {
        rstd[r] = first + r < end ? a.rstd[first + r] : 0.0f;
        if constexpr (kCentred) row_means[r] = first + r < end ? a.mean[first + r] : 0.0f;
      }
      for (int64_t piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
        float w[kPer];
        scales<kPer>(a, weight + piece * kPer, w);
#pragma unroll
        for (int r = 0; r < kNormTogether; ++r) {
          if (first + r >= end) continue;
          const int64_t at = (first + r) * a.columns + piece * kPer;
          float x[kPer], dy[kPer], dot = 0.0f, g = 0.0f;
          read<E>(a.x, at, x);
          read<E>(a.dy, at, dy);
          if constexpr (kCentred) centre(x, row_means[r], true);
#pragma unroll
          for (int k = 0; k < kPer; ++k) {
            dot = fmaf(dy[k] * w[k], x[k] * rstd[r], dot);
            if constexpr (kCentred) g = fmaf(dy[k], w[k], g);
          }
          dots[r] += dot;
          if constexpr (kCentred) dots[kNormTogether + r] += g;
        }
      }
      turn ^= 1;
      team.add_up(dots, parts[turn]);
#pragma unroll
      for (int r = 0; r < kNormTogether; ++r) {
        means[r] = static_cast<float>(dots[r] / static_cast<double>(a.columns));
        if constexpr (kCentred) {
          g_means[r] =
              static_cast<float>(dots[kNormTogether + r] / static_cast<double>(a.columns));
        }
      }
      for (int64_t piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
        float w[kPer], of_weight[kPer], bias[kPer];
        scales<kPer>(a, weight + piece * kPer, w);
#pragma unroll
        for (int k = 0; k < kPer; ++k) {
          of_weight[k] = is_first ? 0.0f : sums[piece * kPer + k];
          if constexpr (kCentred) bias[k] = is_first ? 0.0f : of_bias[piece * kPer + k];
        }
#pragma unroll
        for (int r = 0; r < kNormTogether; ++r) {
          if (first + r >= end) continue;
          const int64_t at = (first + r) * a.columns + piece * kPer;
          float x[kPer], dy[kPer];
          read<E>(a.x, at, x);
          read<E>(a.dy, at, dy);
          if constexpr (kCentred) centre(x, row_means[r], true);
#pragma unroll
          for (int k = 0; k < kPer; ++k) {
            const float normalised = x[k] * rstd[r];
            of_weight[k] = fmaf(dy[k], normalised, of_weight[k]);
            if constexpr (kCentred) {
              bias[k] += dy[k];
              x[k] = rstd[r] * fmaf(-normalised, means[r], fmaf(dy[k], w[k], -g_means[r]));
            } else {
              x[k] = rstd[r] * fmaf(-normalised, means[r], dy[k] * w[k]);
            }
          }
          if constexpr (kAdd) {
            float dsum[kPer];
            read<E>(a.added, at, dsum);
#pragma unroll
            for (int k = 0; k < kPer; ++k) x[k] += dsum[k];
          }
          write<E>(a.to, at, x);
        }
#pragma unroll
        for (int k = 0; k < kPer; ++k) {
          sums[piece * kPer + k] = of_weight[k];
          if constexpr (kCentred) of_bias[piece * kPer + k] = bias[k];
        }
      }
    });
    is_first = false;
    // What is left of the turn, or the next one.
    if ((end - group * a.group_rows) % kNormTogether == 0) end += (a.blocks - 1) * kNormTogether;
  }
  if (is_first) {
    for (int64_t column = threadIdx.x; column < a.columns; column += blockDim.x) {
      sums[column] = 0.0f;
      if constexpr (kCentred) of_bias[column] = 0.0f;
    }
  }
}

}  // namespace xentile

// A token of each row of logits: what temperature, top-k, top-p and min-p leave, and of it the
// largest z + noise (the Gumbel-max trick).
//
// A cluster has a row, and each of its CTAs a share of the columns, in shared memory:
//
//   largest       of the row                                       an exchange between the CTAs
//   z             (logit - largest) / temperature, at most 0
//   top-k, top-p  the least z that stays, found 7 bits at a time   four exchanges each
//   noise         of columns that stay; the largest sum            an exchange
//
// Each of the four passes over z adds up weights of columns by the next 7 bits of z. Weights are
// integers, so that a row's token depends neither on the order of additions nor on the number of
// CTAs. Each lane adds to sums of its own, so lanes of a warp do not wait for each other.
#pragma once

#include <cstdint>

#include "ptx.cuh"

// Mirrored by `Arguments` in src/sample/arguments.rs.
struct SampleArguments {
  const float* logits;    // [rows, vocab]
  const uint32_t* keys;   // [rows, 2]: of threefry2x32
  const int32_t* steps;   // [rows]: each gives a key its own noise
  const float* options;   // temperature, top_k, top_p, min_p
  int32_t* tokens;        // [rows]
  float* logps;           // [rows]
  int32_t vocab;
};

inline constexpr int kSampleThreads = 1024;
// The most columns of a CTA: sums of halves of their weights fit into 32 bits.
inline constexpr int kSampleMostColumns = 32768;

namespace xentile::sample {

inline constexpr int kWarps = kSampleThreads / 32;
inline constexpr int kDigitBits = 7, kBins = 1 << kDigitBits;
// The bits of 2^-25, and the number of floats from there to 2^7, of 32 exponents.
inline constexpr uint32_t kLeastBits = 0x33000000, kOrders = 1u << 28;
inline constexpr int kMaxCtas = 16;
// Bits of each of the two halves of a weight.
inline constexpr int kHalfBits = 17;
inline constexpr uint64_t kMostWeight = (uint64_t{1} << 2 * kHalfBits) - 1;
static_assert(kOrders == 1u << 4 * kDigitBits && kBins * 8 % kSampleThreads == 0);

struct Shared {
  // Sums of halves of weights: [half, bin, lane].
  uint32_t sums[2][kBins * 32];
  // Sums of this CTA, which the others read, of two passes by turns; and those of the row.
  uint64_t bins[2][kBins];
  uint64_t row_bins[kBins];
  // Of this CTA, which the others read: the largest logit, the best column, and its z and the sum
  // of exp(z).
  uint64_t largest, best, rest;
  uint64_t of_warps[kWarps];
  float sum_of_warps[kWarps];
  // Of the last pass: all weights above the chosen bin, the weight that is wanted, and the bin.
  uint64_t above, wanted;
  uint32_t digit;
};

// Floats in their order, as integers above 0; NaN is the largest.
__device__ inline uint32_t to_ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ inline float from_ordered(uint32_t ordered) {
  return __uint_as_float(ordered >> 31 ? ordered ^ 0x80000000u : ~ordered);
}

// The order of z, which is at most 0, in 28 bits, all of them set for 0. Above -2^-25 exp(z) is 1, and
// from -128 down it is 0: these have the same order.
__device__ inline uint32_t order_of(float z) {
  const uint32_t bits = max(__float_as_uint(z) & 0x7fffffffu, kLeastBits) - kLeastBits;
  return kOrders - 1 - min(bits, kOrders - 1);
}

__device__ inline uint64_t max_of_warp(uint64_t x) {
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, x, step);
    x = other > x ? other : x;
  }
  return x;
}

__device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// A hash of 64 bits by a key (Salmon et al., 2011), as `jax.random` has it.
__device__ inline uint2 threefry2x32(uint2 key, uint2 x) {
  const uint32_t keys[3] = {key.x, key.y, key.x ^ key.y ^ 0x1bd11bdau};
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  x.x += keys[0];
  x.y += keys[1];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x.x += x.y;
      x.y = __funnelshift_l(x.y, x.y, kRotations[i % 2][j]) ^ x.x;
    }
    x.x += keys[(i + 1) % 3];
    x.y += keys[(i + 2) % 3] + i + 1;
  }
  return x;
}

// A multiple of 2^-23 in [0, 1).
__device__ inline float uniform(uint2 key, uint32_t index) {
  const uint2 bits = threefry2x32(key, make_uint2(0, index));
  return __uint_as_float((bits.x ^ bits.y) >> 9 | 0x3f800000u) - 1.0f;
}

// Gumbel noise of two uniform numbers, as `jax.random.gumbel` has it in the mode "high".
__device__ inline float gumbel(float high, float low) {
  constexpr float kTiny = 1.17549435e-38f;
  const float x = high >= 0.5f ? high : high + 0x1p-23f * low + kTiny;
  return -logf(-log1pf(-x));
}

// A CTA's share of a row.
struct Share {
  Shared& shared;
  float* z;
  int count;
  uint32_t ctas;
  // Which of the bins the next pass has.
  int turn = 0;

  // What CTA `cta` of the cluster has at `place` of this CTA's shared memory.
  __device__ uint64_t read(const uint64_t& place, uint32_t cta) const {
    return ptx::load_in_cluster(ptx::in_cta(ptx::shared_address(&place), cta));
  }

  // The largest over the cluster, by `slot` of each CTA; every thread gets it.
  __device__ uint64_t largest_of_row(uint64_t x, uint64_t& slot) {
    const int lane = threadIdx.x % 32;
    x = max_of_warp(x);
    if (lane == 0) shared.of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
      x = max_of_warp(shared.of_warps[lane]);
      if (lane == 0) slot = x;
    }
    ptx::cluster_sync();
    return max_of_warp(lane < ctas ? read(slot, lane) : 0);
  }

  // The order of the least z of the fewest columns with the largest z, of those of at least `least`,
  // whose weights sum to at least `wanted` columns, or, of kMass, to this part of all exp(z).
  template <bool kMass>
  __device__ uint32_t least_kept(uint32_t least, float wanted) {
    uint32_t found = 0;
#pragma unroll 1
    for (int shift = 3 * kDigitBits; shift >= 0; shift -= kDigitBits) {
      add_up<kMass>(least, found, shift);
      choose_bin<kMass>(wanted, shift == 3 * kDigitBits);
      found |= shared.digit << shift;
    }
    return found;
  }

 private:
  // Adds up the weights of columns whose order is at least `least` and has the bits of `found` above
  // those of this pass.
  template <bool kMass>
  __device__ void add_up(uint32_t least, uint32_t found, int shift) {
    const int lane = threadIdx.x % 32;
    uint4* const all = reinterpret_cast<uint4*>(shared.sums);
#pragma unroll
    for (int i = 0; i < (kMass ? 2 : 1) * kBins * 32 / 4 / kSampleThreads; ++i)
      all[i * kSampleThreads + threadIdx.x] = make_uint4(0, 0, 0, 0);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kSampleThreads) {
      const uint32_t order = order_of(z[i]);
      if (order < least || (order ^ found) >> (shift + kDigitBits)) continue;
      const uint32_t at = (order >> shift) % kBins * 32 + lane;
      if constexpr (kMass) {
        uint64_t weight = __float2ull_rn(expf(z[i]) * static_cast<float>(kMostWeight));
        if (weight > kMostWeight) weight = kMostWeight;
        atomicAdd(&shared.sums[0][at], static_cast<uint32_t>(weight) & ((1u << kHalfBits) - 1));
        const auto upper = static_cast<uint32_t>(weight >> kHalfBits);
        if (upper) atomicAdd(&shared.sums[1][at], upper);
      } else {
        atomicAdd(&shared.sums[0][at], 1u);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBins / kWarps; ++i) {
      const int bin = i * kWarps + threadIdx.x / 32;
      uint64_t sum = __reduce_add_sync(~0u, shared.sums[0][bin * 32 + lane]);
      if constexpr (kMass)
        sum += static_cast<uint64_t>(__reduce_add_sync(~0u, shared.sums[1][bin * 32 + lane]))
               << kHalfBits;
      if (lane == 0) shared.bins[turn][bin] = sum;
    }
  }

  // Adds up the bins of all CTAs, and chooses the first, from the last one on, with which sums reach
  // what is wanted.
  template <bool kMass>
  __device__ void choose_bin(float wanted, bool is_first) {
    ptx::cluster_sync();
    constexpr int kReaders = kSampleThreads / kBins;
    const int reader = threadIdx.x % kReaders;
    const uint64_t& place = shared.bins[turn][threadIdx.x / kReaders];
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kMaxCtas / kReaders; ++i)
      if (const uint32_t cta = i * kReaders + reader; cta < ctas) sum += read(place, cta);
#pragma unroll
    for (int step = 1; step < kReaders; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (reader == 0) shared.row_bins[threadIdx.x / kReaders] = sum;
    turn ^= 1;
    __syncthreads();
    if (threadIdx.x < 32) {
      // This lane's bins, from the last one on, and the sum of those that are before them.
      constexpr int kOwn = kBins / 32;
      const int lane = threadIdx.x;
      uint64_t own[kOwn], all = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) all += own[i] = shared.row_bins[kBins - 1 - lane * kOwn - i];
      uint64_t before = all;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint64_t other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
      }
      const uint64_t total = __shfl_sync(~0u, before, 31);
      before -= all;
      uint64_t goal, above = 0;
      if (is_first) {
        goal = kMass ? static_cast<uint64_t>(ceil(static_cast<double>(wanted) * total))
                     : static_cast<uint64_t>(wanted);
        goal = goal < 1 ? 1 : goal > total ? total : goal;
      } else {
        goal = shared.wanted;
        above = shared.above;
      }
      before += above;
      __syncwarp();
      if (before < goal && goal <= before + all) {
        int i = 0;
#pragma unroll
        for (int k = 0; k < kOwn - 1; ++k)
          if (i == k && before + own[k] < goal) {
            before += own[k];
            ++i;
          }
        shared.above = before;
        shared.wanted = goal;
        shared.digit = kBins - 1 - lane * kOwn - i;
      }
    }
    __syncthreads();
  }
};

// The kernel: a cluster a row.
__device__ inline void draw(const SampleArguments& a, uint8_t* memory) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const uint32_t ctas = ptx::cluster_ctas(), rank = ptx::cluster_rank();
  const auto row = static_cast<int64_t>(blockIdx.x / ctas);
  const int columns = (a.vocab + ctas - 1) / ctas;
  const int first = rank * columns, count = max(0, min(columns, a.vocab - first));
  float* const z = reinterpret_cast<float*>(memory + sizeof(Shared));
  const float* const logits = a.logits + row * a.vocab + first;
  Share share{shared, z, count, ctas};

  uint32_t highest = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kSampleThreads) {
    const float x = logits[i];
    z[i] = x;
    highest = max(highest, to_ordered(x));
  }
  const auto largest = static_cast<uint32_t>(share.largest_of_row(highest, shared.largest));
  if (largest >= to_ordered(INFINITY) || largest <= to_ordered(-INFINITY)) {
    if (rank == 0 && threadIdx.x == 0) {
      a.tokens[row] = -1;
      a.logps[row] = __uint_as_float(0x7fc00000u);
    }
    ptx::cluster_sync();
    return;
  }
  const float temperature = fmaxf(a.options[0], 1e-30f), top_k = a.options[1];
  const float top_p = a.options[2], min_p = a.options[3];
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kSampleThreads) {
    const float x = (z[i] - from_ordered(largest)) / temperature;
    z[i] = x;
    sum += expf(x);
  }
  uint32_t least = 0;
  if (top_k < static_cast<float>(a.vocab)) least = share.least_kept<false>(least, top_k);
  if (top_p < 1.0f) least = share.least_kept<true>(least, top_p);

  const uint2 key = threefry2x32(make_uint2(a.keys[2 * row], a.keys[2 * row + 1]),
                                 make_uint2(0, static_cast<uint32_t>(a.steps[row])));
  // Of this lane: the best value, and below it the complement of its column; and of its warp, the
  // best value.
  uint64_t best = 0;
  float bound = -INFINITY;
#pragma unroll 1
  for (int start = 0; start < count; start += kSampleThreads) {
    const int i = start + threadIdx.x;
    float x = -INFINITY, high = 0.0f;
    bool is_candidate = false;
    if (i < count) {
      x = z[i];
      is_candidate = order_of(x) >= least && expf(x) >= min_p;
    }
    if (is_candidate) {
      high = uniform(key, first + i);
      // At least its noise, as -log1p(-x) >= x, with the errors of logarithms.
      is_candidate = !(x + (1e-4f - __logf(high)) < bound);
    }
    if (!__any_sync(~0u, is_candidate)) continue;
    uint32_t value = 0;
    if (is_candidate) {
      const float low = high < 0.5f ? uniform(key, a.vocab + first + i) : 0.0f;
      value = to_ordered(x + gumbel(high, low));
      const uint64_t packed = static_cast<uint64_t>(value) << 32 | ~static_cast<uint32_t>(first + i);
      best = packed > best ? packed : best;
    }
    const uint32_t of_warp = __reduce_max_sync(~0u, value);
    if (of_warp) bound = fmaxf(bound, from_ordered(of_warp));
  }
  // Before the barriers of the next line; read after them.
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) shared.sum_of_warps[threadIdx.x / 32] = sum;
  best = share.largest_of_row(best, shared.best);
  const auto token = static_cast<int>(~static_cast<uint32_t>(best));
  if (threadIdx.x < 32) {
    sum = sum_of_warp(shared.sum_of_warps[threadIdx.x]);
    const bool has_token = token >= first && token < first + count;
    const float chosen = has_token ? z[token - first] : 0.0f;
    if (threadIdx.x == 0)
      shared.rest = static_cast<uint64_t>(__float_as_uint(chosen)) << 32 | __float_as_uint(sum);
  }
  ptx::cluster_sync();
  if (rank == 0 && threadIdx.x < 32) {
    const uint64_t rest = threadIdx.x < ctas ? share.read(shared.rest, threadIdx.x) : 0;
    sum = sum_of_warp(__uint_as_float(static_cast<uint32_t>(rest)));
    // Zero but of the CTA that has the token.
    const float chosen = sum_of_warp(__uint_as_float(static_cast<uint32_t>(rest >> 32)));
    if (threadIdx.x == 0) {
      a.tokens[row] = token;
      a.logps[row] = chosen - logf(sum);
    }
  }
  // CTAs whose shared memory is read are still there.
  ptx::cluster_sync();
}

}  // namespace xentile::sample

// For src/sample/arguments.rs.
inline constexpr int kSampleSharedBytes = sizeof(xentile::sample::Shared);
inline constexpr int kSampleMaxCtas = xentile::sample::kMaxCtas;

// A token of each row of logits: what temperature, top-k, top-p and min-p leave, and of it the
// largest z + noise (the Gumbel-max trick).
//
// A cluster has a row, and each of its CTAs a share of the columns, in shared memory:
//
//   largest       of the row                                       each CTA sends its own to all
//   z             (logit - largest) / temperature, at most 0
//   top-k, top-p  the least z that stays, found 7 bits at a time   four times, all send to all
//   noise         of columns that stay; the largest sum            all send to the first CTA
//
// Messages are stores into the others' shared memory that a barrier there counts: no CTA waits for
// more than what it reads.
//
// Each of the four passes over z adds up weights of columns by the next 7 bits of z. Weights are
// integers, so that a row's token depends neither on the order of additions nor on the number of
// CTAs. The first pass, whose columns share few bins, is part of the computation of z, and each lane
// adds to sums of its own, so lanes of a warp do not wait for each other; in later passes, for fewer
// columns in more bins, 8 lanes do.
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
static_assert(kOrders == 1u << 4 * kDigitBits && kBins * 8 == kSampleThreads);

struct Shared {
  // Sums of halves of weights: [half, bin, lane], or lane % 8.
  uint32_t sums[2][kBins * 32];
  // Messages of the CTAs: sums of bins, of two passes by turns; the largest logit; and at the end the
  // best column with its z and the sum of exp(z). A row of bins is 4 banks longer.
  uint64_t bins_of[2][kMaxCtas][kBins + 2];
  float4 largest_of[kMaxCtas], last_of[kMaxCtas];
  // Count messages: of bins by turns, of the largest logits, and of the last ones.
  uint64_t bins_barriers[2], largest_barrier, last_barrier;
  // Sums of this CTA and of the row.
  alignas(16) uint64_t bins[kBins];
  uint64_t row_bins[kBins];
  uint64_t of_warps[kWarps];
  float sum_of_warps[kWarps], z_of_warps[kWarps];
  // Of the last pass: all weights above the chosen bin, the weight that is wanted, the bin, and
  // whether all of its columns are.
  uint64_t above, wanted;
  uint32_t digit;
  bool is_found;
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
  // Passes so far.
  uint32_t passes = 0;

  __device__ void init_barriers() const {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(ptx::shared_address(&shared.bins_barriers[0]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.bins_barriers[1]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.largest_barrier), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.last_barrier), 1);
      ptx::fence_mbarrier_init();
    }
  }

  // Sends a message to `place` of CTA `cta`, whose `barrier` counts it.
  template <class T>
  __device__ void send(T& place, uint32_t cta, float4 message, uint64_t& barrier) const {
    ptx::send(ptx::in_cta(ptx::shared_address(&place), cta), message,
              ptx::in_cta(ptx::shared_address(&barrier), cta));
  }

  // Tells a barrier of this CTA how many bytes it waits for, by one thread.
  __device__ void expect(uint64_t& barrier, uint32_t bytes) const {
    if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&barrier), bytes);
  }

  __device__ void wait(uint64_t& barrier, uint32_t parity) const {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
  }

  // The largest of all threads of the CTA, in its first warp.
  __device__ uint64_t largest_of_cta(uint64_t x) const {
    x = max_of_warp(x);
    if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    return threadIdx.x < 32 ? max_of_warp(shared.of_warps[threadIdx.x]) : 0;
  }

  // The largest logit over the cluster, in order; every thread gets it. Barriers are initialised
  // by then, and after it those of all CTAs are.
  __device__ uint32_t largest_of_row(uint32_t x) const {
    const auto own = static_cast<uint32_t>(largest_of_cta(x));
    expect(shared.largest_barrier, ctas * sizeof(float4));
    ptx::cluster_wait();
    if (threadIdx.x < ctas)
      send(shared.largest_of[ptx::cluster_rank()], threadIdx.x,
           make_float4(__uint_as_float(own), 0.0f, 0.0f, 0.0f), shared.largest_barrier);
    wait(shared.largest_barrier, 0);
    const uint32_t lane = threadIdx.x % 32;
    return __reduce_max_sync(~0u, lane < ctas ? __float_as_uint(shared.largest_of[lane].x) : 0);
  }

  // The order of the least z of the fewest columns with the largest z, of those of at least `least`,
  // whose weights sum to at least `wanted` columns, or, of kMass, to this part of all exp(z). With
  // `has_first` the sums of the first pass are there.
  template <bool kMass>
  __device__ uint32_t least_kept(uint32_t least, float wanted, bool has_first) {
    uint32_t found = 0;
#pragma unroll 1
    for (int shift = kFirstShift; shift >= 0; shift -= kDigitBits) {
      if (shift < kFirstShift) {
        add_up<kMass>(least, found, shift);
      } else {
        if (!has_first) {
          clear<kMass>();
          for (int i = threadIdx.x; i < count; i += kSampleThreads) {
            const uint32_t order = order_of(z[i]);
            if (order >= least) add_first<kMass>(order, expf(z[i]));
          }
        }
        add_lanes<kMass>();
      }
      choose_bin<kMass>(wanted, found, shift);
      found |= shared.digit << shift;
      if (shared.is_found) break;
    }
    return found;
  }

  // Before the first `add_first`: sums of all lanes are zeros.
  template <bool kMass>
  __device__ void clear() const {
    uint4* const all = reinterpret_cast<uint4*>(shared.sums);
#pragma unroll
    for (int i = 0; i < (kMass ? 2 : 1) * kBins * 32 / 4 / kSampleThreads; ++i)
      all[i * kSampleThreads + threadIdx.x] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }

  // Adds the weight of a column, by its first bits, to this lane's sums.
  template <bool kMass>
  __device__ void add_first(uint32_t order, float exp_z) const {
    add<kMass>((order >> kFirstShift) * 32 + threadIdx.x % 32, exp_z);
  }

 private:
  static constexpr int kFirstShift = 3 * kDigitBits;
  // Sums of a bin after the first pass.
  static constexpr int kSums = kSampleThreads / kBins;

  // Adds the weight of a column whose exp(z) is given.
  template <bool kMass>
  __device__ void add(uint32_t at, float exp_z) const {
    if constexpr (kMass) {
      uint64_t weight = __float2ull_rn(exp_z * static_cast<float>(kMostWeight));
      if (weight > kMostWeight) weight = kMostWeight;
      const auto lower = static_cast<uint32_t>(weight) & ((1u << kHalfBits) - 1);
      const auto upper = static_cast<uint32_t>(weight >> kHalfBits);
      if (lower) atomicAdd(&shared.sums[0][at], lower);
      if (upper) atomicAdd(&shared.sums[1][at], upper);
    } else {
      atomicAdd(&shared.sums[0][at], 1u);
    }
  }

  // Adds up the sums of the first pass over lanes.
  template <bool kMass>
  __device__ void add_lanes() const {
    const int lane = threadIdx.x % 32;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBins / kWarps; ++i) {
      const int bin = i * kWarps + threadIdx.x / 32;
      uint64_t sum = __reduce_add_sync(~0u, shared.sums[0][bin * 32 + lane]);
      if constexpr (kMass)
        sum += static_cast<uint64_t>(__reduce_add_sync(~0u, shared.sums[1][bin * 32 + lane]))
               << kHalfBits;
      if (lane == 0) shared.bins[bin] = sum;
    }
  }

  // Adds up the weights of columns whose order is at least `least` and has the bits of `found` above
  // those of this pass.
  template <bool kMass>
  __device__ void add_up(uint32_t least, uint32_t found, int shift) const {
    shared.sums[0][threadIdx.x] = 0;
    if constexpr (kMass) shared.sums[1][threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kSampleThreads) {
      const float x = z[i];
      const uint32_t order = order_of(x);
      if (order < least || (order ^ found) >> (shift + kDigitBits)) continue;
      add<kMass>((order >> shift) % kBins * kSums + threadIdx.x % kSums, kMass ? expf(x) : 0.0f);
    }
    __syncthreads();
    uint64_t sum = shared.sums[0][threadIdx.x];
    if constexpr (kMass) sum += static_cast<uint64_t>(shared.sums[1][threadIdx.x]) << kHalfBits;
#pragma unroll
    for (int step = 1; step < kSums; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % kSums == 0) shared.bins[threadIdx.x / kSums] = sum;
  }

  // Less than the weight of any column of this order or a larger one; 0 where that may be none.
  __device__ static uint64_t weight_at(uint32_t order) {
    const float z = -__uint_as_float(kOrders - 1 - order + kLeastBits);
    return __float2ull_rd(expf(z) * (1.0f - 0x1p-16f) * static_cast<float>(kMostWeight));
  }

  // Adds up the bins of all CTAs, and chooses the first, from the last one on, with which sums reach
  // what is wanted. All columns of the bin are wanted if it has only one, or if sums do not reach
  // that without the least of them: then no pass follows.
  template <bool kMass>
  __device__ void choose_bin(float wanted, uint32_t found, int shift) {
    const bool is_first = shift == kFirstShift;
    const uint32_t turn = passes % 2, parity = passes / 2 % 2;
    ++passes;
    // A CTA has the bins of all before it sends those of the next pass, so that those of the last
    // but one are free.
    expect(shared.bins_barriers[turn], ctas * kBins * sizeof(uint64_t));
    __syncthreads();
    // Two bins a message, 64 messages for each CTA.
    constexpr int kMessages = kBins / 2;
    static_assert(kMessages * kMaxCtas == kSampleThreads);
    const uint32_t to = threadIdx.x / kMessages, bin = threadIdx.x % kMessages * 2;
    if (to < ctas)
      send(shared.bins_of[turn][ptx::cluster_rank()][bin], to,
           *reinterpret_cast<const float4*>(&shared.bins[bin]), shared.bins_barriers[turn]);
    wait(shared.bins_barriers[turn], parity);
    constexpr int kReaders = kSampleThreads / kBins;
    const int reader = threadIdx.x % kReaders;
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kMaxCtas / kReaders; ++i)
      if (const uint32_t cta = i * kReaders + reader; cta < ctas)
        sum += shared.bins_of[turn][cta][threadIdx.x / kReaders];
#pragma unroll
    for (int step = 1; step < kReaders; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (reader == 0) shared.row_bins[threadIdx.x / kReaders] = sum;
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
        uint64_t chosen = own[0];
#pragma unroll
        for (int k = 0; k < kOwn - 1; ++k)
          if (i == k && before + own[k] < goal) {
            before += own[k];
            chosen = own[k + 1];
            ++i;
          }
        shared.above = before;
        shared.wanted = goal;
        const uint32_t digit = kBins - 1 - lane * kOwn - i;
        shared.digit = digit;
        const uint64_t least_weight = kMass ? weight_at(found | digit << shift) : 1;
        shared.is_found = least_weight > 0 && (chosen < 2 * least_weight ||
                                               before + chosen - least_weight < goal);
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
  share.init_barriers();
  ptx::cluster_arrive();

  uint32_t highest = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kSampleThreads) {
    const float x = logits[i];
    z[i] = x;
    highest = max(highest, to_ordered(x));
  }
  const uint32_t largest = share.largest_of_row(highest);
  if (largest >= to_ordered(INFINITY) || largest <= to_ordered(-INFINITY)) {
    if (rank == 0 && threadIdx.x == 0) {
      a.tokens[row] = -1;
      a.logps[row] = __uint_as_float(0x7fc00000u);
    }
    return;
  }
  const float temperature = fmaxf(a.options[0], 1e-30f), top_k = a.options[1];
  const float top_p = a.options[2], min_p = a.options[3];
  const bool has_top_k = top_k < static_cast<float>(a.vocab), has_top_p = top_p < 1.0f;
  const auto to_z = [=](float logit) { return (logit - from_ordered(largest)) / temperature; };
  float sum = 0.0f;
  // Computes z, and what `use` makes of it.
  const auto compute_z = [&](auto use) {
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kSampleThreads) {
      const float x = to_z(z[i]);
      const float exp_x = expf(x);
      z[i] = x;
      sum += exp_x;
      use(x, exp_x);
    }
  };
  uint32_t least = 0;
  if (has_top_k) {
    share.clear<false>();
    compute_z([&](float x, float exp_x) { share.add_first<false>(order_of(x), exp_x); });
    least = share.least_kept<false>(0, top_k, true);
    if (has_top_p) least = share.least_kept<true>(least, top_p, false);
  } else if (has_top_p) {
    share.clear<true>();
    compute_z([&](float x, float exp_x) { share.add_first<true>(order_of(x), exp_x); });
    least = share.least_kept<true>(0, top_p, true);
  } else {
    compute_z([](float, float) {});
  }

  const uint2 key = threefry2x32(make_uint2(a.keys[2 * row], a.keys[2 * row + 1]),
                                 make_uint2(0, static_cast<uint32_t>(a.steps[row])));
  // z becomes a bound that z + noise does not exceed; `bound` is one that the best of them reaches.
  // The slack of 1e-4 has the errors of logarithms.
  float bound = -INFINITY;
#pragma unroll 2
  for (int start = 0; start < count; start += kSampleThreads) {
    const int i = start + threadIdx.x;
    float x = -INFINITY;
    bool is_candidate = false;
    if (i < count) {
      x = z[i];
      is_candidate = order_of(x) >= least && (min_p <= 0.0f || expf(x) >= min_p);
    }
    float most = -INFINITY;
    if (is_candidate) {
      const float high = uniform(key, first + i), next = high + 0x1p-23f;
      // With u in [high, next]: u <= -log1p(-u) <= u / (1 - u) <= u (1 + 2 u), for u <= 1 / 2.
      most = x + (1e-4f - __logf(high));
      if (next <= 0.5f) bound = fmaxf(bound, x - (1e-4f + __logf(next * (1.0f + 2.0f * next))));
    }
    if (i < count) z[i] = is_candidate ? most : -INFINITY;
  }
  uint32_t least_value = __reduce_max_sync(~0u, to_ordered(bound));
  if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = least_value;
  __syncthreads();
  least_value =
      __reduce_max_sync(~0u, static_cast<uint32_t>(shared.of_warps[threadIdx.x % 32]));
  bound = from_ordered(least_value);
  // Of this lane: the best value, and below it the complement of its column; and its z.
  uint64_t best = 0;
  float best_z = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kSampleThreads) {
    if (z[i] < bound || z[i] == -INFINITY) continue;
    const float x = to_z(logits[i]), high = uniform(key, first + i);
    const float low = high < 0.5f ? uniform(key, a.vocab + first + i) : 0.0f;
    const uint32_t value = to_ordered(x + gumbel(high, low));
    const uint64_t packed = static_cast<uint64_t>(value) << 32 | ~static_cast<uint32_t>(first + i);
    if (packed > best) {
      best = packed;
      best_z = x;
    }
  }
  // Warps have read the bounds.
  __syncthreads();
  sum = sum_of_warp(sum);
  const uint64_t best_of_warp = max_of_warp(best);
  if (best == best_of_warp && (best != 0 || threadIdx.x % 32 == 0))
    shared.z_of_warps[threadIdx.x / 32] = best_z;
  if (threadIdx.x % 32 == 0) {
    shared.of_warps[threadIdx.x / 32] = best_of_warp;
    shared.sum_of_warps[threadIdx.x / 32] = sum;
  }
  if (rank == 0) share.expect(shared.last_barrier, ctas * sizeof(float4));
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  sum = sum_of_warp(shared.sum_of_warps[lane]);
  // The best of lanes' values, and the z of the lane that has it.
  const auto choose = [&](uint64_t& value, float& own_z) {
    const uint64_t most = max_of_warp(value);
    own_z = __shfl_sync(~0u, own_z, __ffs(__ballot_sync(~0u, value == most)) - 1);
    value = most;
  };
  best = shared.of_warps[lane];
  best_z = shared.z_of_warps[lane];
  choose(best, best_z);
  if (lane == 0)
    share.send(shared.last_of[rank], 0,
               make_float4(__uint_as_float(static_cast<uint32_t>(best)),
                           __uint_as_float(static_cast<uint32_t>(best >> 32)), best_z, sum),
               shared.last_barrier);
  if (rank != 0) return;
  share.wait(shared.last_barrier, 0);
  const float4 last = lane < ctas ? shared.last_of[lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  best = static_cast<uint64_t>(__float_as_uint(last.y)) << 32 | __float_as_uint(last.x);
  best_z = last.z;
  choose(best, best_z);
  sum = sum_of_warp(last.w);
  if (lane == 0) {
    a.tokens[row] = static_cast<int>(~static_cast<uint32_t>(best));
    a.logps[row] = best_z - logf(sum);
  }
}

}  // namespace xentile::sample

// For src/sample/arguments.rs.
inline constexpr int kSampleSharedBytes = sizeof(xentile::sample::Shared);
inline constexpr int kSampleMaxCtas = xentile::sample::kMaxCtas;

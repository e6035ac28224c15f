// A token of each row of logits: what temperature, top-k, top-p and min-p leave, and of it the
// largest z + noise (the Gumbel-max trick).
//
// A cluster has a row, and each of its CTAs a share of the columns, in shared memory:
//
//   largest       of the row                                       each CTA sends its own to all
//   z             (logit - largest) / temperature, at most 0
//   top-k, top-p  the least z that stays                           three times, all send to all
//   noise         of columns that stay; the largest sum            all send to the first CTA
//
// Messages are stores into the others' shared memory that a barrier there counts: no CTA waits for
// more than what it reads.
//
// The least z that stays is found by sums of weights of columns. Weights are integers, so that a row's token depends
// neither on the order of additions nor on the number of CTAs. z is linear in bins, 32 coarse ones of 64 fine ones each,
// which the computation of z fills. CTAs add up coarse ones, then the fine ones of the coarse one where sums reach what is
// wanted, and then send each other the columns of that fine bin, of which each finds the least one that stays. Where these
// are too many, four passes over z find it 7 bits at a time.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "warp.cuh"

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
// Coarse bins, fine ones of each, and the most columns of a fine bin that a CTA sends.
inline constexpr int kCoarse = 32, kFine = 64, kMostOrders = 64;
// An order that is there, and one in the place of all where there are more than kMostOrders.
inline constexpr uint32_t kIsThere = 1u << 31, kTooMany = ~0u;
static_assert(kMaxCtas * kMostOrders <= kSampleThreads);
// Bits of each of the two halves of a weight.
inline constexpr int kHalfBits = 17;
inline constexpr uint64_t kMostWeight = (uint64_t{1} << 2 * kHalfBits) - 1;
static_assert(kOrders == 1u << 4 * kDigitBits && kBins * 8 == kSampleThreads);

struct Shared {
  // Sums of halves of weights: [half, bin, lane], or lane % 8.
  uint32_t sums[2][kBins * 32];
  // Messages of the CTAs: sums of coarse bins, of fine ones, and orders of columns of a fine bin.
  uint64_t coarse_of[kMaxCtas][kCoarse];
  alignas(16) uint64_t fine_of[kMaxCtas][kFine];
  alignas(16) uint32_t orders_of[kMaxCtas][kMostOrders];
  // Of this CTA.
  alignas(16) uint32_t orders[kMostOrders];
  uint32_t last_orders[32];
  uint32_t order_count, last_count, found;
  int coarse, fine, last;
  uint64_t coarse_barrier, fine_barrier, orders_barrier;
  // Messages of the CTAs in passes: sums of bins, of two passes by turns; the largest logit; and at the end the
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
  // Bins of a unit of z, a power of 2.
  float scale = 0.0f;
  // Of the barriers of coarse bins, and of the other two of bins.
  uint32_t coarse_parity = 0, fine_parity = 0;

  __device__ void init_barriers() const {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(ptx::shared_address(&shared.bins_barriers[0]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.bins_barriers[1]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.coarse_barrier), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.fine_barrier), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.orders_barrier), 1);
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

  // The largest and the least logit over the cluster, in order; every thread gets them. Barriers are initialised
  // by then, and after it those of all CTAs are.
  __device__ uint2 extremes_of_row(uint32_t highest, uint32_t lowest) const {
    const uint32_t lane = threadIdx.x % 32;
    highest = __reduce_max_sync(~0u, highest);
    lowest = __reduce_min_sync(~0u, lowest);
    if (lane == 0)
      shared.of_warps[threadIdx.x / 32] = highest | static_cast<uint64_t>(lowest) << 32;
    expect(shared.largest_barrier, ctas * sizeof(float4));
    __syncthreads();
    ptx::cluster_wait();
    if (threadIdx.x < 32) {
      const uint64_t both = shared.of_warps[lane];
      highest = __reduce_max_sync(~0u, static_cast<uint32_t>(both));
      lowest = __reduce_min_sync(~0u, static_cast<uint32_t>(both >> 32));
      if (lane < ctas)
        send(shared.largest_of[ptx::cluster_rank()], lane,
             make_float4(__uint_as_float(highest), __uint_as_float(lowest), 0.0f, 0.0f),
             shared.largest_barrier);
    }
    wait(shared.largest_barrier, 0);
    const float4 of_lane = shared.largest_of[min(lane, ctas - 1)];
    return make_uint2(__reduce_max_sync(~0u, __float_as_uint(of_lane.x)),
                      __reduce_min_sync(~0u, __float_as_uint(of_lane.y)));
  }

  // The order of the least z of the fewest columns with the largest z that are at least `wanted`, of which
  // `add_first` has all.
  __device__ uint32_t least_of_top_k(float wanted) { return find_by_bits<false>(0, wanted, true); }

  // The order of the least z of the fewest columns with the largest z, of those of at least `least`, whose exp(z) sum to
  // at least this part of all. With `has_bins` fine bins are filled.
  __device__ uint32_t least_of_top_p(uint32_t least, float wanted, bool has_bins) {
    if (!has_bins) {
      clear_bins();
      for (int i = threadIdx.x; i < count; i += kSampleThreads) {
        const float x = z[i];
        if (order_of(x) >= least) add_to_bin(x, expf(x));
      }
    }
    if (find_by_bins(least, wanted)) return shared.found;
    return find_by_bits<true>(least, wanted, false);
  }

  // Chooses bins for z down to `lowest`, or down to -32 where that is lower than -16.
  __device__ void set_scale(float lowest) {
    const float range = fminf(fmaxf(-lowest, 0x1p-20f), 16.0f);
    scale = __uint_as_float(((127u + 10 + 127) << 23) - (__float_as_uint(range) & 0x7f800000u));
  }

  // Before the first `add_to_bin`: sums of all bins are zeros, and there are no orders.
  __device__ void clear_bins() const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kCoarse * kFine / kSampleThreads; ++i)
        shared.sums[half][i * kSampleThreads + threadIdx.x] = 0;
    if (threadIdx.x < kMostOrders) shared.orders[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.order_count = shared.last_count = 0;
    __syncthreads();
  }

  // Adds the weight of a column to its fine bin. Below the last one weights are 0.
  __device__ void add_to_bin(float x, float exp_x) const {
    if (const uint32_t bin = bin_of(x); bin < kCoarse * kFine) add<true>(bin, exp_x);
  }

  // Before the first `add_first`: sums of all lanes are zeros.
  template <bool kMass>
  __device__ void clear_lanes() const {
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
      const uint64_t weight = weight_of(exp_z);
      const auto lower = static_cast<uint32_t>(weight) & ((1u << kHalfBits) - 1);
      const auto upper = static_cast<uint32_t>(weight >> kHalfBits);
      if (lower) atomicAdd(&shared.sums[0][at], lower);
      if (upper) atomicAdd(&shared.sums[1][at], upper);
    } else {
      atomicAdd(&shared.sums[0][at], 1u);
    }
  }

  __device__ uint32_t bin_of(float x) const { return __float2uint_rz(-x * scale); }

  // The weight of a column, of its exp(z).
  __device__ static uint64_t weight_of(float exp_z) {
    const uint64_t weight = __float2ull_rn(exp_z * static_cast<float>(kMostWeight));
    return weight > kMostWeight ? kMostWeight : weight;
  }

  // z of an order; those that have the same order as others have the same exp(z) too.
  __device__ static float z_of(uint32_t order) {
    return -__uint_as_float(kOrders - 1 - order + kLeastBits);
  }

  // The sum of a bin of this CTA.
  __device__ uint64_t sum_of(int bin) const {
    return shared.sums[0][bin] + (static_cast<uint64_t>(shared.sums[1][bin]) << kHalfBits);
  }

  // The first of kOwn bins of each lane of the first warp with which sums, from `above` on, reach `goal`, and the sum of
  // those before it; -1 for none.
  template <int kOwn>
  __device__ static int choose_of_warp(const uint64_t (&own)[kOwn], uint64_t goal, uint64_t& above) {
    uint64_t all = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) all += own[i];
    const int lane = threadIdx.x;
    uint64_t before = all;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint64_t other = __shfl_up_sync(~0u, before, step);
      if (lane >= step) before += other;
    }
    before += above - all;
    const bool is_chosen = before < goal && goal <= before + all;
    int bin = lane * kOwn;
    bool goes_on = true;
#pragma unroll
    for (int i = 0; i < kOwn - 1; ++i)
      if (goes_on && before + own[i] < goal) {
        before += own[i];
        ++bin;
      } else {
        goes_on = false;
      }
    const uint32_t chosen = __ballot_sync(~0u, is_chosen);
    if (chosen == 0) return -1;
    const int from = __ffs(chosen) - 1;
    above = __shfl_sync(~0u, before, from);
    return __shfl_sync(~0u, bin, from);
  }

  // Finds `least_of_top_p` from filled bins, and whether it could.
  __device__ bool find_by_bins(uint32_t least, float wanted) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto rank = ptx::cluster_rank();
    expect(shared.coarse_barrier, ctas * sizeof(shared.coarse_of[0]));
    __syncthreads();
    {  // Each warp has a coarse bin.
      static_assert(kCoarse == kWarps && kFine == 64);
      const int bin = warp * kFine + lane;
      const uint32_t lower =
          __reduce_add_sync(~0u, shared.sums[0][bin] + shared.sums[0][bin + 32]);
      const uint32_t upper =
          __reduce_add_sync(~0u, shared.sums[1][bin] + shared.sums[1][bin + 32]);
      const uint64_t sum = lower + (static_cast<uint64_t>(upper) << kHalfBits);
      if (lane < ctas)
        ptx::send(ptx::in_cta(ptx::shared_address(&shared.coarse_of[rank][warp]), lane), sum,
                  ptx::in_cta(ptx::shared_address(&shared.coarse_barrier), lane));
    }
    if (warp == 0) {
      wait(shared.coarse_barrier, coarse_parity);
      uint64_t own[1] = {};
      for (uint32_t cta = 0; cta < ctas; ++cta) own[0] += shared.coarse_of[cta][lane];
      uint64_t total = own[0];
#pragma unroll
      for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
      const uint64_t goal = goal_of(wanted, total);
      uint64_t above = 0;
      const int chosen = choose_of_warp(own, goal, above);
      if (lane == 0) {
        shared.coarse = chosen;
        shared.above = above;
        shared.wanted = goal;
      }
    }
    coarse_parity ^= 1;
    __syncthreads();
    const int coarse = shared.coarse;
    if (coarse < 0) return false;
    expect(shared.fine_barrier, ctas * sizeof(shared.fine_of[0]));
    expect(shared.orders_barrier, ctas * sizeof(shared.orders_of[0]));
    if (warp < ctas) {  // Two fine bins a lane, for a CTA each warp.
      const int bin = coarse * kFine + 2 * lane;
      const ulonglong2 two = make_ulonglong2(sum_of(bin), sum_of(bin + 1));
      send(shared.fine_of[rank][2 * lane], warp, reinterpret_cast<const float4&>(two),
           shared.fine_barrier);
    }
    if (warp == 0) {
      wait(shared.fine_barrier, fine_parity);
      uint64_t own[2] = {}, above = shared.above;
      for (uint32_t cta = 0; cta < ctas; ++cta) {
        own[0] += shared.fine_of[cta][2 * lane];
        own[1] += shared.fine_of[cta][2 * lane + 1];
      }
      const int chosen = choose_of_warp(own, shared.wanted, above);
      if (lane == 0) {
        shared.fine = coarse * kFine + chosen;
        shared.above = above;
      }
    }
    __syncthreads();
    // Orders of columns of the bin.
    const uint32_t bin = shared.fine;
    constexpr int kLastBins = 128;
    if (threadIdx.x < kLastBins) shared.sums[0][threadIdx.x] = shared.sums[1][threadIdx.x] = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kSampleThreads) {
      const float x = z[i];
      if (bin_of(x) != bin) continue;
      const uint32_t order = order_of(x);
      if (order < least) continue;
      const uint32_t place = atomicAdd(&shared.order_count, 1u);
      if (place < kMostOrders) shared.orders[place] = order | kIsThere;
    }
    __syncthreads();
    if (warp < ctas && lane < kMostOrders / 4) {
      float4 four = *reinterpret_cast<const float4*>(&shared.orders[4 * lane]);
      if (shared.order_count > kMostOrders) four.x = __uint_as_float(kTooMany);
      send(shared.orders_of[rank][4 * lane], warp, four, shared.orders_barrier);
    }
    wait(shared.orders_barrier, fine_parity);
    fine_parity ^= 1;
    const uint32_t entry = threadIdx.x < ctas * kMostOrders
                               ? shared.orders_of[threadIdx.x / kMostOrders][threadIdx.x % kMostOrders]
                               : 0;
    // A bin of the bin, of all of them 128.
    const uint32_t order = entry & ~kIsThere;
    const float within = (-z_of(order) * scale - static_cast<float>(bin)) * kLastBins;
    const int last = static_cast<int>(fminf(fmaxf(within, 0.0f), kLastBins - 1.0f));
    if (entry != 0 && entry != kTooMany) add<true>(last, expf(z_of(order)));
    if (__syncthreads_or(entry == kTooMany)) return false;
    if (warp == 0) {
      uint64_t own[kLastBins / 32], above = shared.above;
#pragma unroll
      for (int i = 0; i < kLastBins / 32; ++i)
        own[i] = sum_of(lane * (kLastBins / 32) + i);
      const int chosen = choose_of_warp(own, shared.wanted, above);
      if (lane == 0) {
        shared.last = chosen;
        shared.above = above;
      }
    }
    __syncthreads();
    if (entry != 0 && last == shared.last) {
      const uint32_t place = atomicAdd(&shared.last_count, 1u);
      if (place < 32) shared.last_orders[place] = order;
    }
    __syncthreads();
    const uint32_t last_count = shared.last_count;
    if (last_count > 32) return false;
    if (warp == 0) {
      const bool is_there = lane < last_count;
      const uint32_t own = is_there ? shared.last_orders[lane] : 0;
      const uint64_t weight = is_there ? weight_of(expf(z_of(own))) : 0;
      uint64_t sum = shared.above;
#pragma unroll 8
      for (int i = 0; i < 32; ++i) {
        const uint32_t other = __shfl_sync(~0u, own, i);
        const uint64_t added = __shfl_sync(~0u, weight, i);
        if (other >= own) sum += added;
      }
      const uint32_t found =
          __reduce_max_sync(~0u, is_there && sum >= shared.wanted ? own : 0);
      if (lane == 0) shared.found = found;
    }
    __syncthreads();
    return true;
  }

  // The weight that is wanted of a total: a part of it, 1 at least.
  __device__ static uint64_t goal_of(float part, uint64_t total) {
    const auto goal = static_cast<uint64_t>(ceil(static_cast<double>(part) * total));
    return goal < 1 ? 1 : goal > total ? total : goal;
  }

  // The same, or `least_of_top_k`, by four passes over z, the first of them with `has_first` by `add_first`.
  template <bool kMass>
  __device__ uint32_t find_by_bits(uint32_t least, float wanted, bool has_first) {
    uint32_t found = 0;
#pragma unroll 1
    for (int shift = kFirstShift; shift >= 0; shift -= kDigitBits) {
      if (shift < kFirstShift) {
        add_up<kMass>(least, found, shift);
      } else {
        if (!has_first) {
          __syncthreads();
          clear_lanes<kMass>();
          for (int i = threadIdx.x; i < count; i += kSampleThreads) {
            const float x = z[i];
            const uint32_t order = order_of(x);
            if (order >= least) add_first<kMass>(order, kMass ? expf(x) : 0.0f);
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
    return __float2ull_rd(expf(z_of(order)) * (1.0f - 0x1p-16f) * static_cast<float>(kMostWeight));
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
        goal = kMass ? goal_of(wanted, total)
                     : max(uint64_t{1}, min(static_cast<uint64_t>(wanted), total));
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

  const float temperature = fmaxf(a.options[0], 1e-30f), top_k = a.options[1];
  const float top_p = a.options[2], min_p = a.options[3];
  const bool has_top_k = top_k < static_cast<float>(a.vocab), has_top_p = top_p < 1.0f;
  uint32_t highest = 0, lowest = ~0u;
  // So many loads at once: a loop of few turns would wait for each of its last.
  constexpr int kLoads = 10;
#pragma unroll 1
  for (int start = threadIdx.x; start < count; start += kLoads * kSampleThreads) {
    float x[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int i = start + k * kSampleThreads;
      x[k] = i < count ? logits[i] : -INFINITY;
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int i = start + k * kSampleThreads;
      if (i >= count) break;
      z[i] = x[k];
      highest = max(highest, to_ordered(x[k]));
      if (has_top_p) lowest = min(lowest, to_ordered(x[k]));
    }
  }
  const uint2 extremes = share.extremes_of_row(highest, lowest);
  const uint32_t largest = extremes.x;
  if (largest >= to_ordered(INFINITY) || largest <= to_ordered(-INFINITY)) {
    if (rank == 0 && threadIdx.x == 0) {
      a.tokens[row] = -1;
      a.logps[row] = __uint_as_float(0x7fc00000u);
    }
    return;
  }
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
  if (has_top_p) share.set_scale(to_z(from_ordered(extremes.y)));
  if (has_top_k) {
    share.clear_lanes<false>();
    compute_z([&](float x, float exp_x) { share.add_first<false>(order_of(x), exp_x); });
    least = share.least_of_top_k(top_k);
    if (has_top_p) least = share.least_of_top_p(least, top_p, false);
  } else if (has_top_p) {
    share.clear_bins();
    compute_z([&](float x, float exp_x) { share.add_to_bin(x, exp_x); });
    least = share.least_of_top_p(0, top_p, true);
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

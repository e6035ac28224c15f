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
//
// A small top-k alone takes one exchange: CTAs send each other their largest columns, of which the first CTA draws. Noise of
// few rows comes from `draw_bounds`, a kernel of more CTAs.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "warp.cuh"

// Mirrored by `Arguments` in src/sample/arguments.rs.
struct SampleArguments {
  const float* logits;    // [rows, vocab]
  const uint32_t* keys;   // [rows, 2]: of threefry2x32
  const int32_t* steps;   // [rows]
  const int32_t* starts;  // [rows]: a step and its start, added up, give a key its own noise
  const float* options;   // temperature, top_k, top_p, min_p
  int32_t* tokens;        // [rows]
  float* logps;           // [rows]
  float* bounds;          // [rows, vocab]: scratch of `sample_noise`, or null without it
  int32_t rows;
  int32_t vocab;
};

inline constexpr int kSampleThreads = 1024;
// Of `sample_noise`: fewer than there are multiprocessors, in clusters, so that a cluster of `sample` runs beside.
inline constexpr int kSampleNoiseCtas = 64;
// The most columns of a CTA: sums of halves of their weights fit into 32 bits.
inline constexpr int kSampleMostColumns = 32768;

namespace xentile::sample {

inline constexpr int kWarps = kSampleThreads / 32;
inline constexpr int kDigitBits = 7, kBins = 1 << kDigitBits;
// The bits of 2^-25, and the number of floats from there to 2^7, of 32 exponents.
inline constexpr uint32_t kLeastBits = 0x33000000, kOrders = 1u << 28;
inline constexpr int kMaxCtas = 16;
// Coarse bins, fine ones of each, and the most columns of a fine bin that a CTA sends.
inline constexpr int kCoarse = 32, kFine = 64, kBinCount = kCoarse * kFine, kMostOrders = 64;
// An order that is there, and one in the place of all where there are more than kMostOrders.
inline constexpr uint32_t kIsThere = 1u << 31, kTooMany = ~0u;
static_assert(kMaxCtas * kMostOrders <= kSampleThreads);
// Bins of such columns; and the largest top_k for which CTAs send as many.
inline constexpr int kLastBins = 128;
inline constexpr float kMostTop = 512.0f;
// A weight is exp(z) times this, `upper` 2^kLowerBits + `lower`, rounded twice to the nearest: `lower` may be negative.
inline constexpr int kLowerBits = 16, kMostUpper = (1 << 17) - 1;
inline constexpr uint64_t kMostWeight = uint64_t{kMostUpper} << kLowerBits;
static_assert(kOrders == 1u << 4 * kDigitBits && kBins * 8 == kSampleThreads);

struct Shared {
  // Sums of `lower` and of `upper` of weights: [half, bin, lane], or lane % 8.
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
  // Messages of the CTAs for top-k: logits and columns of their largest logits; and the largest, the sum of
  // exp((logit - largest) / temperature), the largest that is not sent, and how many are.
  alignas(16) uint2 columns_of[kMaxCtas][kMostOrders];
  float4 others_of[kMaxCtas];
  uint64_t columns_barrier;
  // Of this CTA.
  alignas(16) uint2 columns[kMostOrders];
  uint32_t coarse_counts[kCoarse], largest_unsent;
  // Messages of the CTAs in passes: sums of bins, of two passes by turns; the largest logit; and at the end the
  // best column with its z and the sum of exp(z). A row of bins is 4 banks longer.
  alignas(16) uint64_t bins_of[2][kMaxCtas][kBins + 2];
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
  const auto upper = static_cast<uint32_t>(x >> 32);
  const uint32_t most = __reduce_max_sync(~0u, upper);
  const uint32_t lower = upper == most ? static_cast<uint32_t>(x) : 0;
  return static_cast<uint64_t>(most) << 32 | __reduce_max_sync(~0u, lower);
}

// The larger one, or NaN.
__device__ inline float max_or_nan(float x, float y) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
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

// The key of a row's noise.
__device__ inline uint2 key_of(const SampleArguments& a, int64_t row) {
  return threefry2x32(make_uint2(a.keys[2 * row], a.keys[2 * row + 1]),
                      make_uint2(0, static_cast<uint32_t>(a.steps[row]) + static_cast<uint32_t>(a.starts[row])));
}

// What the noise of a column does not exceed, by its first uniform number. With the second one u is in [high, high + 2^-23],
// and u <= -log1p(-u). The slack has the errors of logarithms.
inline constexpr float kSlack = 1e-4f;

__device__ inline float noise_bound(float high) { return kSlack - __logf(high); }

// Draws bounds of noise of all rows by many multiprocessors, as a row's cluster takes longer for them than for all else.
// `draw` starts meanwhile.
__device__ inline void draw_bounds(const SampleArguments& a) {
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();
  for (int row = 0; row < a.rows; ++row) {
    const uint2 key = key_of(a, row);
#pragma unroll 4
    for (int i = blockIdx.x * kSampleThreads + threadIdx.x; i < a.vocab;
         i += kSampleNoiseCtas * kSampleThreads)
      a.bounds[int64_t{row} * a.vocab + i] = noise_bound(uniform(key, i));
  }
}

// Gumbel noise of two uniform numbers, as `jax.random.gumbel` has it in the mode "high".
__device__ inline float gumbel(float high, float low) {
  constexpr float kTiny = 1.17549435e-38f;
  const float x = high >= 0.5f ? high : high + 0x1p-23f * low + kTiny;
  return -logf(-log1pf(-x));
}

// Whether a row's largest logit, in order, is finite.
__device__ inline bool is_finite_largest(uint32_t largest) {
  return largest > to_ordered(-INFINITY) && largest < to_ordered(INFINITY);
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
      ptx::mbarrier_init(ptx::shared_address(&shared.columns_barrier), 1);
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

  // The largest and the least logit over the cluster, in order; every thread gets them.
  __device__ uint2 extremes_of_row(uint32_t highest, uint32_t lowest) const {
    const uint32_t lane = threadIdx.x % 32;
    highest = __reduce_max_sync(~0u, highest);
    lowest = __reduce_min_sync(~0u, lowest);
    if (lane == 0)
      shared.of_warps[threadIdx.x / 32] = highest | static_cast<uint64_t>(lowest) << 32;
    expect(shared.largest_barrier, ctas * sizeof(float4));
    __syncthreads();
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

  // A column of this thread, of those that top-k leaves, and what there is of the row.
  struct Few {
    bool is_there;
    float z;
    uint32_t column;
    float sum;
  };

  // Finds columns that top-k leaves, and whether it could, from extremes of this thread's logits, which z still has: CTAs
  // send each other their largest ones. z stays as it is.
  __device__ bool find_few(uint32_t highest, uint32_t lowest, float inverse, float top_k, int first,
                           Few& found) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    highest = __reduce_max_sync(~0u, highest);
    lowest = __reduce_min_sync(~0u, lowest);
    if (lane == 0) shared.of_warps[warp] = highest | static_cast<uint64_t>(lowest) << 32;
    expect(shared.columns_barrier, ctas * (sizeof(shared.columns_of[0]) + sizeof(float4)));
    clear_bins();
    const uint64_t both = shared.of_warps[lane];
    highest = __reduce_max_sync(~0u, static_cast<uint32_t>(both));
    lowest = __reduce_min_sync(~0u, static_cast<uint32_t>(both >> 32));
    const bool is_finite = is_finite_largest(highest);
    const float top = from_ordered(highest);
    const auto to_own_z = [=](float logit) { return (logit - top) * inverse; };
    set_scale(to_own_z(from_ordered(lowest)));
    const int own_count = is_finite ? count : 0;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < own_count; i += kSampleThreads) {
      const float x = to_own_z(z[i]);
      sum += expf(x);
      if (const uint32_t bin = bin_of(x); bin < kBinCount) add<false>(bin, 0.0f);
    }
    sum = sum_of_warp(sum);
    if (lane == 0) shared.sum_of_warps[warp] = sum;
    __syncthreads();
    const uint32_t coarse =
        __reduce_add_sync(~0u, shared.sums[0][warp * kFine + lane] + shared.sums[0][warp * kFine + lane + 32]);
    if (lane == 0) shared.coarse_counts[warp] = coarse;
    __syncthreads();
    // Columns of the bins before `stop` are sent.
    uint32_t stop = kBinCount;
    const uint32_t of_lane = shared.coarse_counts[lane];
    uint32_t up_to = sum_up_to(of_lane);
    if (const uint32_t over = __ballot_sync(~0u, up_to > kMostOrders); over != 0) {
      const int bin = __ffs(over) - 1;
      const uint32_t before = __shfl_sync(~0u, up_to - of_lane, bin);
      const uint32_t* const fine = &shared.sums[0][bin * kFine + 2 * lane];
      up_to = before + sum_up_to(fine[0] + fine[1]);
      stop = bin * kFine + __popc(__ballot_sync(~0u, up_to - fine[1] <= kMostOrders)) +
             __popc(__ballot_sync(~0u, up_to <= kMostOrders));
    }
    float rest = -INFINITY;
#pragma unroll 4
    for (int i = threadIdx.x; i < own_count; i += kSampleThreads) {
      const float logit = z[i];
      if (bin_of(to_own_z(logit)) < stop)
        shared.columns[atomicAdd(&shared.order_count, 1u)] =
            make_uint2(__float_as_uint(logit), first + i);
      else
        rest = fmaxf(rest, logit);
    }
    uint32_t unsent = __reduce_max_sync(~0u, to_ordered(rest));
    if (lane == 0) atomicMax(&shared.largest_unsent, unsent);
    __syncthreads();
    if (threadIdx.x < kLastBins) shared.sums[0][threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      shared.above = 0;
      shared.wanted = static_cast<uint64_t>(top_k);
    }
    sum = sum_of_warp(shared.sum_of_warps[lane]);
    const auto rank = ptx::cluster_rank();
    if (warp < ctas) {
      send(shared.columns_of[rank][2 * lane], warp, *reinterpret_cast<const float4*>(&shared.columns[2 * lane]),
           shared.columns_barrier);
      if (lane == 0)
        send(shared.others_of[rank], warp,
             make_float4(__uint_as_float(highest), sum, __uint_as_float(shared.largest_unsent),
                         __uint_as_float(shared.order_count)),
             shared.columns_barrier);
    }
    wait(shared.columns_barrier, 0);
    const float4 others = shared.others_of[min(lane, ctas - 1)];
    const uint32_t largest = __reduce_max_sync(~0u, __float_as_uint(others.x));
    unsent = __reduce_max_sync(~0u, __float_as_uint(others.z));
    // Sums are zeros.
    __syncthreads();
    if (!is_finite_largest(largest)) return false;
    const float row_top = from_ordered(largest);
    const uint32_t cta = threadIdx.x / kMostOrders, at = threadIdx.x % kMostOrders;
    found.is_there = cta < ctas && at < __float_as_uint(shared.others_of[min(cta, ctas - 1)].w);
    const uint2 column = found.is_there ? shared.columns_of[cta][at] : make_uint2(0, 0);
    found.z = (__uint_as_float(column.x) - row_top) * inverse;
    found.column = column.y;
    found.sum = sum_of_warp(lane < ctas && others.y > 0.0f
                                ? others.y * expf((from_ordered(__float_as_uint(others.x)) - row_top) * inverse)
                                : 0.0f);
    const uint32_t order = order_of(found.z);
    const float least_z = (from_ordered(unsent) - row_top) * inverse;
    const float range = fminf(fmaxf(-least_z, 0x1p-20f), 128.0f);
    const float bin = fminf(-found.z * ((kLastBins - 1) / range), kLastBins - 1.0f);
    if (!find_in_last<false>(found.is_there, order, static_cast<int>(bin))) return false;
    found.is_there = found.is_there && order >= shared.found;
    return order_of(least_z) < shared.found;
  }

  // The least z whose order is at least this one.
  __device__ static float least_z_of(uint32_t order) { return order ? z_of(order) : -INFINITY; }

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
      for (int i = 0; i < kBinCount / kSampleThreads; ++i)
        shared.sums[half][i * kSampleThreads + threadIdx.x] = 0;
    if (threadIdx.x < kMostOrders) shared.orders[threadIdx.x] = 0;
    if (threadIdx.x == 0)
      shared.order_count = shared.last_count = shared.largest_unsent = 0;
    __syncthreads();
  }

  // Adds the weight of a column to its fine bin. Below the last one weights are 0.
  __device__ void add_to_bin(float x, float exp_x) const {
    if (const uint32_t bin = bin_of(x); bin < kBinCount) add<true>(bin, exp_x);
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
      const Weight weight = weight_of(exp_z);
      atomicAdd(&shared.sums[0][at], weight.lower);
      if (weight.upper) atomicAdd(&shared.sums[1][at], weight.upper);
    } else {
      atomicAdd(&shared.sums[0][at], 1u);
    }
  }

  // The sum of the lanes up to this one.
  __device__ static uint32_t sum_up_to(uint32_t x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, x, step);
      if (threadIdx.x % 32 >= step) x += other;
    }
    return x;
  }

  // The bin of z, above kBinCount where it is beyond all bins. An addition rounds faster than a conversion does.
  __device__ uint32_t bin_of(float x) const {
    const uint32_t bin = __float_as_uint(fminf(-x * scale, 4.0f * kBinCount) + 0x1p23f) - 0x4b000000u;
    return bin == kBinCount ? kBinCount - 1 : bin;
  }

  struct Weight {
    uint32_t upper, lower;
    __device__ uint64_t whole() const { return whole_of(lower, upper); }
  };

  __device__ static uint64_t whole_of(uint32_t lower, uint32_t upper) {
    return static_cast<int64_t>(static_cast<int32_t>(lower)) +
           (static_cast<int64_t>(upper) << kLowerBits);
  }

  // The weight of a column, of its exp(z).
  __device__ static Weight weight_of(float exp_z) {
    const float upper = fmaf(exp_z, kMostUpper, 0x1p23f);
    const float rest = fmaf(exp_z, kMostUpper, 0x1p23f - upper);
    const float lower = fmaf(rest, 1 << kLowerBits, 0x1.8p23f);
    return {__float_as_uint(upper) - 0x4b000000u, __float_as_uint(lower) - 0x4b400000u};
  }

  // z of an order; those that have the same order as others have the same exp(z) too.
  __device__ static float z_of(uint32_t order) {
    return -__uint_as_float(kOrders - 1 - order + kLeastBits);
  }

  // The sum of a bin of this CTA.
  __device__ uint64_t sum_of(int bin) const {
    return whole_of(shared.sums[0][bin], shared.sums[1][bin]);
  }

  // The first of kOwn bins of each lane of the first warp with which sums, from `above` on, reach what `make_goal` makes of
  // the total, and the sum of those before it; -1 for none.
  template <int kOwn, class MakeGoal>
  __device__ static int choose_of_warp(const uint64_t (&own)[kOwn], MakeGoal make_goal, uint64_t& above) {
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
    const uint64_t goal = make_goal(__shfl_sync(~0u, before, 31));
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
      const uint64_t sum = whole_of(lower, upper);
      if (lane < ctas)
        ptx::send(ptx::in_cta(ptx::shared_address(&shared.coarse_of[rank][warp]), lane), sum,
                  ptx::in_cta(ptx::shared_address(&shared.coarse_barrier), lane));
    }
    if (warp == 0) {
      wait(shared.coarse_barrier, coarse_parity);
      uint64_t own[1] = {};
#pragma unroll
      for (uint32_t cta = 0; cta < kMaxCtas; ++cta)
        if (cta < ctas) own[0] += shared.coarse_of[cta][lane];
      uint64_t goal, above = 0;
      const auto make_goal = [&](uint64_t total) { return goal = goal_of(wanted, total); };
      const int chosen = choose_of_warp(own, make_goal, above);
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
#pragma unroll
      for (uint32_t cta = 0; cta < kMaxCtas; ++cta)
        if (cta < ctas) {
          const auto two = *reinterpret_cast<const ulonglong2*>(&shared.fine_of[cta][2 * lane]);
          own[0] += two.x;
          own[1] += two.y;
        }
      const int chosen = choose_of_warp(own, [this](uint64_t) { return shared.wanted; }, above);
      if (lane == 0) {
        shared.fine = coarse * kFine + chosen;
        shared.above = above;
      }
    }
    __syncthreads();
    // Orders of columns of the bin.
    const uint32_t bin = shared.fine;
    if (threadIdx.x < kLastBins) shared.sums[0][threadIdx.x] = shared.sums[1][threadIdx.x] = 0;
    // Wider than the bin by a little, and cheaper to tell.
    const float width = __fdividef(1.0f, scale), middle = -static_cast<float>(bin) * width;
    const float half = (bin == kBinCount - 1 ? 1.6f : 0.6f) * width;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kSampleThreads) {
      const float x = z[i];
      if (fabsf(x - middle) > half || bin_of(x) != bin) continue;
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
    const float within = (-z_of(order) * scale - (static_cast<float>(bin) - 0.5f)) * kLastBins;
    const int last = static_cast<int>(fminf(fmaxf(within, 0.0f), kLastBins - 1.0f));
    const bool is_there = entry != 0 && entry != kTooMany;
    if (__syncthreads_or(entry == kTooMany)) return false;
    return find_in_last<true>(is_there, order, last);
  }

  // Finds the least order of a column, of one a thread, from the largest on, with which sums from `shared.above` on reach
  // what is wanted, and whether it could. `last` is one of kLastBins bins of orders, from the largest on, whose sums are
  // zeros.
  template <bool kMass>
  __device__ bool find_in_last(bool is_there, uint32_t order, int last) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (is_there) add<kMass>(last, kMass ? expf(z_of(order)) : 0.0f);
    __syncthreads();
    if (warp == 0) {
      uint64_t own[kLastBins / 32], above = shared.above;
#pragma unroll
      for (int i = 0; i < kLastBins / 32; ++i)
        own[i] = sum_of(lane * (kLastBins / 32) + i);
      const int chosen = choose_of_warp(own, [this](uint64_t) { return shared.wanted; }, above);
      if (lane == 0) {
        shared.last = chosen;
        shared.above = above;
      }
    }
    __syncthreads();
    if (is_there && last == shared.last) {
      const uint32_t place = atomicAdd(&shared.last_count, 1u);
      if (place < 32) shared.last_orders[place] = order;
    }
    __syncthreads();
    const uint32_t last_count = shared.last_count;
    if (last_count == 0 || last_count > 32) return false;
    if (warp == 0) {
      const bool is_listed = lane < last_count;
      const uint32_t own = is_listed ? shared.last_orders[lane] : 0;
      const uint64_t weight = !is_listed ? 0 : kMass ? weight_of(expf(z_of(own))).whole() : 1;
      uint64_t sum = shared.above;
      for (int i = 0; i < last_count; ++i) {
        const uint32_t other = __shfl_sync(~0u, own, i);
        const uint64_t added = __shfl_sync(~0u, weight, i);
        if (other >= own) sum += added;
      }
      const uint32_t found =
          __reduce_max_sync(~0u, is_listed && sum >= shared.wanted ? own : 0);
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
      const uint32_t lower = __reduce_add_sync(~0u, shared.sums[0][bin * 32 + lane]);
      uint32_t upper = 0;
      if constexpr (kMass) upper = __reduce_add_sync(~0u, shared.sums[1][bin * 32 + lane]);
      const uint64_t sum = whole_of(lower, upper);
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
    uint64_t sum = whole_of(shared.sums[0][threadIdx.x], kMass ? shared.sums[1][threadIdx.x] : 0);
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

// Calls `use` with each column of this thread, and its word of `from`, read from the L2: this kernel may begin before the one
// before it ends.
template <class Use>
__device__ inline void load_columns(const float* from, int count, Use use) {
  // So many loads at once: a loop of few turns would wait for each of its last.
  constexpr int kLoads = 10;
#pragma unroll 1
  for (int start = threadIdx.x; start < count; start += kLoads * kSampleThreads) {
    float x[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int i = start + k * kSampleThreads;
      x[k] = i < count ? __ldcg(from + i) : -INFINITY;
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int i = start + k * kSampleThreads;
      if (i >= count) break;
      use(i, x[k]);
    }
  }
}

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
  // All CTAs of `draw_bounds` have waited for the kernel that writes logits before this one starts. Its own bounds are waited
  // for later.
  if (a.bounds == nullptr) ptx::wait_for_previous_kernel();

  // At a temperature of 0 the first of the largest logits is drawn: no option leaves it out, and there is no noise.
  const bool is_greedy = a.options[0] <= 0.0f;
  const float inverse = is_greedy ? 1.0f : 1.0f / fmaxf(a.options[0], 1e-30f);
  const float top_k = is_greedy ? INFINITY : a.options[1];
  const float top_p = is_greedy ? 1.0f : a.options[2], min_p = is_greedy ? 0.0f : a.options[3];
  const bool has_top_k = top_k < static_cast<float>(a.vocab), has_top_p = top_p < 1.0f;
  float high = -INFINITY, low = INFINITY;
  load_columns(logits, count, [&](int i, float x) {
    z[i] = x;
    high = max_or_nan(high, x);
    low = fminf(low, x);
  });
  const uint32_t highest = to_ordered(high), lowest = to_ordered(low);
  ptx::cluster_wait();
  const uint2 key = key_of(a, row);
  // Of this lane: the best value, and below it the complement of its column; and its z.
  uint64_t best = 0;
  float best_z = 0.0f, sum = 0.0f;
  const auto use_column = [&](float x, uint32_t column) {
    const float high = uniform(key, column), low = uniform(key, a.vocab + column);
    const uint64_t value = to_ordered(x + (is_greedy ? 0.0f : gumbel(high, low)));
    if (const uint64_t packed = value << 32 | ~column; packed > best) {
      best = packed;
      best_z = x;
    }
  };
  // Whether other CTAs than the first have columns which stay.
  bool has_others = true;
  Share::Few few;
  if (has_top_k && !has_top_p && top_k <= kMostTop &&
      share.find_few(highest, lowest, inverse, top_k, first, few)) {
    ptx::wait_for_previous_kernel();
    if (rank != 0) return;
    has_others = false;
    if (few.is_there && (min_p <= 0.0f || expf(few.z) >= min_p)) use_column(few.z, few.column);
    if (threadIdx.x == 0) sum = few.sum;
  } else {
    const uint2 extremes = share.extremes_of_row(highest, lowest);
    const uint32_t largest = extremes.x;
    if (!is_finite_largest(largest)) {
      ptx::wait_for_previous_kernel();
      if (rank == 0 && threadIdx.x == 0) {
        a.tokens[row] = -1;
        a.logps[row] = __uint_as_float(0x7fc00000u);
      }
      return;
    }
    const auto to_z = [=](float logit) { return (logit - from_ordered(largest)) * inverse; };
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

    ptx::wait_for_previous_kernel();
    // z becomes a bound that z + noise does not exceed; `most` is the largest one of this thread.
    const float least_z = share.least_z_of(least);
    float most = -INFINITY, most_z = 0.0f, most_bound = 0.0f;
    const auto bound_column = [&](int i, auto make_bound) {
      const float x = z[i];
      float value = -INFINITY;
      if (x >= least_z && (min_p <= 0.0f || expf(x) >= min_p)) {
        const float noise = is_greedy ? 0.0f : make_bound();
        value = x + noise;
        if (value > most) {
          most = value;
          most_z = x;
          most_bound = noise;
        }
      }
      z[i] = value;
    };
    if (a.bounds) {
      const float* const bounds = a.bounds + row * a.vocab + first;
      load_columns(bounds, count, [&](int i, float y) { bound_column(i, [=] { return y; }); });
    } else {
#pragma unroll 2
      for (int i = threadIdx.x; i < count; i += kSampleThreads)
        bound_column(i, [=] { return noise_bound(uniform(key, first + i)); });
    }
    // One that the best z + noise reaches: -log1p(-u) <= u / (1 - u) <= u (1 + 2 u), for u <= 1 / 2. `next` is at least
    // high + 2^-23.
    const float next = __expf(2.0f * kSlack - most_bound) + 0x1p-23f;
    const float bound_of_thread = most > -INFINITY && next <= 0.5f
                                      ? most_z - (kSlack + __logf(next * (1.0f + 2.0f * next)))
                                      : -INFINITY;
    uint32_t least_value = __reduce_max_sync(~0u, to_ordered(bound_of_thread));
    if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = least_value;
    __syncthreads();
    least_value =
        __reduce_max_sync(~0u, static_cast<uint32_t>(shared.of_warps[threadIdx.x % 32]));
    const float bound = is_greedy ? 0.0f : from_ordered(least_value);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kSampleThreads)
      if (z[i] >= bound && z[i] != -INFINITY) use_column(to_z(__ldcg(logits + i)), first + i);
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
  // The best of lanes' values, and the z of the lane that has it.
  const auto choose = [&](uint64_t value, float own_z) {
    best = max_of_warp(value);
    best_z = __shfl_sync(~0u, own_z, __ffs(__ballot_sync(~0u, value == best)) - 1);
  };
  sum = sum_of_warp(shared.sum_of_warps[lane]);
  choose(shared.of_warps[lane], shared.z_of_warps[lane]);
  if (has_others) {
    if (lane == 0)
      share.send(shared.last_of[rank], 0,
                 make_float4(__uint_as_float(static_cast<uint32_t>(best)),
                             __uint_as_float(static_cast<uint32_t>(best >> 32)), best_z, sum),
                 shared.last_barrier);
    if (rank != 0) return;
    share.wait(shared.last_barrier, 0);
    const float4 last = lane < ctas ? shared.last_of[lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    sum = sum_of_warp(last.w);
    choose(static_cast<uint64_t>(__float_as_uint(last.y)) << 32 | __float_as_uint(last.x), last.z);
  }
  if (lane == 0) {
    a.tokens[row] = static_cast<int>(~static_cast<uint32_t>(best));
    a.logps[row] = best_z - logf(sum);
  }
}

}  // namespace xentile::sample

// For src/sample/arguments.rs.
inline constexpr int kSampleSharedBytes = sizeof(xentile::sample::Shared);
inline constexpr int kSampleMaxCtas = xentile::sample::kMaxCtas;

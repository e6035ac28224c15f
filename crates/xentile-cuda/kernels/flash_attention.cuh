// Attention by tiles; docs/internals/flash-attention.md draws the schedules and explains them.
//
// A CTA has four warps. They share a strip, the 64 rows of a GEMM's result, and keep its accumulators in
// registers. Rows are queries in the kernels of o and dq, and keys in that of dk and dv. The CTA loads one tile
// at a time by asynchronous copies, usually into one of two buffers while it computes on the other. Computed left
// operands go from accumulators to operands within a thread, since both lie in the same lanes. Logits are in units
// of ln(2), so that an exponential is one instruction.
//
// There are no atomics. A row's sums add tiles in order. Tiles begin at multiples of their length, and a tile that
// the row does not see adds zeros.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "flash_attention_hopper.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace xentile {

// Mirrored by `Arguments` in src/flash_attention/arguments.rs.
struct FlashAttentionArguments {
  const void* q;                // [heads, group, queries, width]
  const void* k;                // [heads, keys, width]
  const void* v;                // [heads, keys, value_width]
  const int32_t* ranges;        // [heads, queries, 2]
  const int32_t* q_segments;    // [heads, queries], or null
  const int32_t* kv_segments;   // [heads, keys], or null
  const float* sinks;           // [heads, group], or null
  void* o;                      // [heads, group, queries, value_width]
  float* lse;                   // [heads, group, queries]
  const void* dout;             // as o
  const float* dlse;            // as lse
  void* dq;                     // as q; before it is made, its rows hold a `Note` each
  void* dk;                     // as k
  void* dv;                     // as v
  float* dsinks;                // as sinks
  int64_t heads;
  int32_t group;
  int32_t queries;
  int32_t keys;
  int32_t width;
  int32_t value_width;
  float scale;
  float softcap;  // 0 for none
  // Strides in rows. Of q, o and their gradients: from one query to the next (`q_row`), from one query head to the
  // next (`q_group`), and from one KV head to the next (`q_head`) within a block of `inner` KV heads; blocks follow
  // one another without gaps. Of k, v and their gradients likewise.
  int32_t inner;
  int32_t q_row;
  int32_t k_row;
  int64_t q_group;
  int64_t q_head;
  int64_t k_head;

  // The first row in q of a KV head, which is that of its first query head.
  __device__ int64_t first_query(int64_t of_keys) const {
    const uint32_t outer = static_cast<uint32_t>(of_keys) / inner;
    const uint32_t rest = static_cast<uint32_t>(of_keys) % inner;
    return static_cast<int64_t>(outer) * inner * group * queries + rest * q_head;
  }

  // The first row in q of query head `head` of a KV head's group.
  __device__ int64_t first_query(int64_t of_keys, int64_t head) const {
    return first_query(of_keys) + head * q_group;
  }

  __device__ int64_t first_key(int64_t of_keys) const {
    const uint32_t outer = static_cast<uint32_t>(of_keys) / inner;
    const uint32_t rest = static_cast<uint32_t>(of_keys) % inner;
    return static_cast<int64_t>(outer) * inner * keys + rest * k_head;
  }
};

// Mirrored by `NUMBERS` in src/flash_attention/arguments.rs.
inline constexpr uint32_t kAttentionThreads = 128;
inline constexpr uint32_t kAttentionSinkThreads = 256;
// Queries of a block with one hull (see `Note`), and keys of a CTA for dk and dv.
inline constexpr int32_t kAttentionBlock = 64;
// Threads of a gradient CTA for 256 columns in float32: two warps, with 32 rows.
inline constexpr uint32_t kAttentionNarrowThreads = 64;

namespace attention {

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
inline constexpr int kWarps = kAttentionThreads / 32;

// Whether operands are float32, which GEMMs split into two TF32 parts.
template <class E>
inline constexpr bool kIsWide = sizeof(E) == 4;

// Threads of a gradient CTA.
template <class E, int kColumns>
inline constexpr int kGradientThreads =
    kIsWide<E> && kColumns == 256 ? kAttentionNarrowThreads : kAttentionThreads;

// A computed left operand of 16 rows and kCount columns: packed for `mma`, or in float32 the accumulators.
template <class E, int kCount>
using Computed = std::conditional_t<kIsWide<E>, float[kCount / 8][4], uint32_t[kCount / 16][4]>;

// Rows of the four warps' strip.
inline constexpr int kStrip = 64;

// Whether GEMMs use `wgmma`.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <class E>
inline constexpr bool kHasWarpgroups = sizeof(E) == 2;
#else
template <class E>
inline constexpr bool kHasWarpgroups = false;
#endif

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// A distance that excludes every tile, for blocks with a row that sees no key.
inline constexpr uint32_t kNever = 0x7fffu;

// The first bytes of a row of dq, until dq is written: delta of the row and, in the first row of a block, the hull
// [low, high) of the block's ranges. Keys from low + 64 inner_low on and before high - 64 inner_high are in the range
// of every query of the block. `inner` packs both numbers, of 15 bits each, and whether all queries of the block are
// of segment 0.
struct __align__(16) Note {
  float delta;
  int32_t low;
  int32_t high;
  uint32_t inner;

  __device__ uint32_t inner_low() const { return inner & kNever; }
  __device__ uint32_t inner_high() const { return inner >> 15 & kNever; }
  __device__ bool is_segment_0() const { return inner >> 30 != 0; }
  __device__ bool has_blanks() const { return inner_low() == kNever || inner_high() == kNever; }

  static __device__ Note of(const struct Hull& hull, bool is_segment_0);

  // Whether all queries have all of `count` keys from `first` on in their ranges.
  __device__ bool has_all(int first, int count) const {
    return !has_blanks() && low + static_cast<int64_t>(inner_low()) * 64 <= first &&
           first + count <= high - static_cast<int64_t>(inner_high()) * 64;
  }
};

using mma::load_matrices;
using mma::load_matrices_transposed;
using mma::multiply;

// A float32 as the sum of two TF32 values of 11 bits: the nearest one, and the rest, whose low bits `mma` ignores. One
// of them is NaN for a NaN.
struct Halves {
  uint32_t upper, lower;

  __device__ explicit Halves(uint32_t x) {
    upper = (x + 0x1000u) & 0xffffe000u;
    lower = __float_as_uint(__uint_as_float(x) - __uint_as_float(upper));
  }
};

// sum += left right, of TF32 operands of 16 x 8 and 8 x 8.
__device__ inline void multiply_halves(float (&sum)[4], const uint32_t (&left)[4], uint32_t right_0,
                                       uint32_t right_1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
}

// A float32 left operand of 16 rows and 16 columns: two steps of 8 columns.
struct WideLeft {
  uint32_t upper[2][4], lower[2][4];

  __device__ void set(int step, const uint32_t (&of)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Halves halves(of[i]);
      upper[step][i] = halves.upper, lower[step][i] = halves.lower;
    }
  }

  // sum += this @ right, with 16 rows and 8 columns of right; `right` has the operands of the two steps. Each product
  // is three TF32 products, small terms first (3xTF32; Ootomo and Yokota, 2022). Tensor cores truncate sums, so only
  // these few products share an accumulator, which is then added to `sum` in float32.
  __device__ void multiply(float (&sum)[4], const uint32_t (&right)[4]) const {
    const Halves of[4] = {Halves(right[0]), Halves(right[1]), Halves(right[2]), Halves(right[3])};
    float part[4] = {0, 0, 0, 0};
    multiply_halves(part, lower[0], of[0].upper, of[1].upper);
    multiply_halves(part, lower[1], of[2].upper, of[3].upper);
    multiply_halves(part, upper[0], of[0].lower, of[1].lower);
    multiply_halves(part, upper[1], of[2].lower, of[3].lower);
    multiply_halves(part, upper[0], of[0].upper, of[1].upper);
    multiply_halves(part, upper[1], of[2].upper, of[3].upper);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += part[i];
  }
};

// Asynchronous copies of one or two values; zeros unless `is_there`.
template <int kBytes>
__device__ inline void copy_small(uint32_t to, const void* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "n"(kBytes), "r"(is_there ? kBytes : 0)
               : "memory");
}

// kCount rows of kColumns elements in shared memory, in panels of 128 bytes of columns. Vectors within a row's 128
// bytes are swizzled by the row's index, so that eight rows of a matrix lie in different banks, as `wgmma` takes them.
template <class E, int kColumns, int kCount, int kThreads = kAttentionThreads>
struct Rows {
  static constexpr int kLength = kPerVector<E>;
  static constexpr int kVectors = kColumns / kLength;
  static constexpr int kPanelBytes = kCount * 128;
  static constexpr int kBytes = kCount * kColumns * static_cast<int>(sizeof(E));
  // Rows that the CTA's threads copy at a time.
  static constexpr int kStep = kThreads / kVectors;

  uint32_t base;

  __device__ uint32_t at(int row, int vector) const {
    return base + vector / 8 * kPanelBytes + row * 128 + ((vector % 8 ^ (row & 7)) << 4);
  }

  // Copies rows of `columns` elements with a stride of `apart` elements; zeros for rows without `is_there(row)`.
  template <class IsThere>
  __device__ void load(const E* from, int columns, int apart, const IsThere& is_there) const {
    const int vector = threadIdx.x % kVectors, first = threadIdx.x / kVectors;
    const bool has_vector = vector * kLength < columns;
#pragma unroll
    for (int i = 0; i < kCount; i += kStep) {
      const int row = first + i;
      const bool reads = has_vector && is_there(row);
      // The host checks that offsets fit 32 bits.
      const E* source = from + (reads ? row * apart + vector * kLength : 0);
      ptx::copy_async(at(row, vector), source, reads ? 16 : 0);
    }
  }

  // Loads the left operand: 16 rows from `row`, and two vectors of columns from vector 2 `step`.
  __device__ void left(uint32_t (&to)[4], int row, int step) const {
    const int lane = threadIdx.x % 32;
    load_matrices(to, at(row + lane % 16, 2 * step + lane / 16));
  }

  // Loads the right operands of two products: 16 rows as their columns, and two vectors of columns.
  __device__ void right_of_rows(uint32_t (&to)[4], int row, int step) const {
    const int lane = threadIdx.x % 32;
    load_matrices(to, at(row + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
  }

  // Loads the right operands of two products: 16 rows to sum over, and 16 columns.
  __device__ void right(uint32_t (&to)[4], int row, int step) const {
    const int lane = threadIdx.x % 32;
    load_matrices_transposed(to, at(row + lane % 16, 2 * step + lane / 16));
  }

  // Loads a float32 right operand: 16 rows to sum over, and 8 columns. Rows come in the order of a computed left
  // operand's columns in its lanes, even ones first. All lanes read different banks.
  __device__ void right_of_computed(uint32_t (&to)[4], int row, int eighth) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t from = at(row + i / 2 * 8 + lane % 4 * 2 + i % 2, 2 * eighth + lane / 16);
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[i]) : "r"(from + lane / 4 % 4 * 4) : "memory");
    }
  }

  // Writes the warp's 16 rows of a strip's sums, times a factor for each half, to shared memory and from there to
  // `to`, with a stride of `apart`; only `count` rows exist. No other warp reads these rows. `release` runs once they
  // have left shared memory, before the last are stored.
  template <class Release>
  __device__ void store(const float (&sums)[kColumns / 8][4], float factor_0, float factor_1, int row, E* to,
                        int columns, int apart, int64_t count, const Release& release) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if constexpr (kIsWide<E>) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float factor = half == 0 ? factor_0 : factor_1;
          const uint32_t place = at(row + lane / 4 + 8 * half, 2 * j + lane % 4 / 2) + lane % 2 * 8;
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(place), "f"(sums[j][2 * half] * factor),
                       "f"(sums[j][2 * half + 1] * factor)
                       : "memory");
        }
        continue;
      }
      const uint32_t upper = packed<E>(sums[j][0] * factor_0, sums[j][1] * factor_0);
      const uint32_t lower = packed<E>(sums[j][2] * factor_1, sums[j][3] * factor_1);
      const uint32_t within = lane % 4 * 4;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(at(row + lane / 4, j) + within), "r"(upper)
                   : "memory");
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(at(row + lane / 4 + 8, j) + within), "r"(lower)
                   : "memory");
    }
    __syncwarp();
    // Of as many vectors at a time as leave registers for sums.
    constexpr int kOwn = 16 * kVectors / 32, kAtOnce = kOwn <= 8 ? kOwn : kOwn % 8 == 0 ? 8 : kOwn / 2;
    static_assert(kOwn % kAtOnce == 0, "a warp must not store the rows of the next one");
#pragma unroll
    for (int first = 0; first < kOwn; first += kAtOnce) {
      uint4 values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int own = lane + 32 * (first + i);
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(values[i].x), "=r"(values[i].y), "=r"(values[i].z), "=r"(values[i].w)
                     : "r"(at(row + own / kVectors, own % kVectors))
                     : "memory");
      }
      if (first + kAtOnce == kOwn) release();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int own = lane + 32 * (first + i), vector = own % kVectors, of = own / kVectors;
        if (vector * kLength >= columns || of >= count) continue;
        ptx::store_vector(to + static_cast<int64_t>(of) * apart + vector * kLength, values[i]);
      }
    }
  }

  __device__ void store(const float (&sums)[kColumns / 8][4], float factor_0, float factor_1, int row, E* to,
                        int columns, int apart, int64_t count) const {
    store(sums, factor_0, factor_1, row, to, columns, apart, count, [] {});
  }
};

// The first of the calling warp's 16 rows of a strip.
__device__ inline int own_row(int strip) { return strip * kStrip + threadIdx.x / 32 * 16; }

// sums = a strip of `left` times the transpose of `right`: logits, or do v^T. With `wgmma` the sums are complete
// after `wait`.
template <int kCount, class E, int kColumns, int kLeftRows, int kThreads>
__device__ inline void multiply_rows(float (&sums)[kCount / 8][4],
                                     const Rows<E, kColumns, kLeftRows, kThreads>& left, int strip,
                                     const Rows<E, kColumns, kCount, kThreads>& right) {
  if constexpr (kHasWarpgroups<E>) {
    const uint64_t of_left = ptx::matrix_of(left.base), of_right = ptx::matrix_of(right.base);
    hopper::fence();
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      const int within = step % 4 * 32, panel = step / 4;
      hopper::multiply<E>(
          sums, of_left + (panel * left.kPanelBytes + strip * (kStrip * 128) + within) / 16,
          of_right + (panel * right.kPanelBytes + within) / 16, step > 0);
    }
    ptx::wgmma_commit();
  } else {
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0;
#pragma unroll(kIsWide<E> ? 1 : kColumns / 16)
    for (int step = 0; step < kColumns / 16; ++step) {
      if constexpr (kIsWide<E>) {
        WideLeft factor;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t of_left[4];
          left.left(of_left, own_row(strip), 2 * step + i);
          factor.set(i, of_left);
        }
#pragma unroll
        for (int j = 0; j < kCount / 16; ++j) {
          uint32_t first[4], second[4];
          right.right_of_rows(first, 16 * j, 2 * step);
          right.right_of_rows(second, 16 * j, 2 * step + 1);
          factor.multiply(sums[2 * j], {first[0], first[1], second[0], second[1]});
          factor.multiply(sums[2 * j + 1], {first[2], first[3], second[2], second[3]});
        }
        continue;
      }
      uint32_t of_left[4];
      left.left(of_left, own_row(strip), step);
#pragma unroll
      for (int j = 0; j < kCount / 16; ++j) {
        uint32_t of_right[4];
        right.right_of_rows(of_right, 16 * j, step);
        multiply<E>(sums[2 * j], of_left, of_right[0], of_right[1]);
        multiply<E>(sums[2 * j + 1], of_left, of_right[2], of_right[3]);
      }
    }
  }
}

// sums += left times `right`, summed over rows of `right`. With `wgmma` the sums are complete after `wait`.
template <int kCount, class E, int kColumns, int kThreads>
__device__ inline void multiply_along(float (&sums)[kColumns / 8][4], Computed<E, kCount>& left,
                                      const Rows<E, kColumns, kCount, kThreads>& right) {
  if constexpr (kHasWarpgroups<E>) {
    const uint64_t of_right = ptx::transposed_of(right.base, right.kPanelBytes);
    hopper::fence();
#pragma unroll
    for (int step = 0; step < kCount / 16; ++step) {
      hopper::multiply<E>(sums, left[step], of_right + step * (16 * 128 / 16));
    }
    ptx::wgmma_commit();
  } else if constexpr (kIsWide<E>) {
#pragma unroll
    for (int step = 0; step < kCount / 16; ++step) {
      WideLeft factor;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float(&of)[4] = left[2 * step + i];
        // Even columns are the step's first four, and odd ones its last.
        factor.set(i, {__float_as_uint(of[0]), __float_as_uint(of[2]), __float_as_uint(of[1]), __float_as_uint(of[3])});
      }
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        uint32_t of_right[4];
        right.right_of_computed(of_right, 16 * step, j);
        factor.multiply(sums[j], of_right);
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < kCount / 16; ++step) {
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) {
        uint32_t of_right[4];
        right.right(of_right, 16 * step, j);
        multiply<E>(sums[2 * j], left[step], of_right[0], of_right[1]);
        multiply<E>(sums[2 * j + 1], left[step], of_right[2], of_right[3]);
      }
    }
  }
}

// Waits for all but the last kPending GEMMs; until then nothing may touch their sums and operands.
template <class E, int kPending>
__device__ inline void wait() {
  if constexpr (kHasWarpgroups<E>) ptx::wgmma_wait<kPending>();
}

// Keeps the compiler from moving uses of `sums` before a wait.
template <class E, int kCount>
__device__ inline void settle(float (&sums)[kCount][4]) {
  if constexpr (kHasWarpgroups<E>) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[j][i])::"memory");
    }
  }
}

// Stores four sums, of columns from 8 `eighth` on, in a computed left operand.
template <class E, int kCount>
__device__ inline void compute(Computed<E, kCount>& factor, int eighth, const float (&of)[4]) {
  if constexpr (kIsWide<E>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) factor[eighth][i] = of[i];
  } else {
    factor[eighth / 2][eighth % 2 * 2] = packed<E>(of[0], of[1]);
    factor[eighth / 2][eighth % 2 * 2 + 1] = packed<E>(of[2], of[3]);
  }
}

// Waits for the CTA's asynchronous copies, and makes them visible to all threads.
__device__ inline void meet_copies() {
  ptx::wait_for_copies(0);
  __syncthreads();
}

// Whether none of `count` values is within [low, high]; computed by the 32 lanes of a warp.
__device__ inline bool are_apart(const int32_t* all, int count, int low, int high) {
  bool is_within = false;
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const int32_t one = all[i];
    is_within |= low <= one && one <= high;
  }
  return !__any_sync(0xffffffffu, is_within);
}

// The range of keys that a query sees; empty for rows beyond the queries.
__device__ inline int2 range_of(const FlashAttentionArguments& a, int64_t head, int64_t query) {
  if (query >= a.queries) return make_int2(0, 0);
  const int2 range = reinterpret_cast<const int2*>(a.ranges)[head * a.queries + query];
  const int2 within = make_int2(max(range.x, 0), min(range.y, a.keys));
  return within.x < within.y ? within : make_int2(0, 0);
}

// The union and the intersection of the ranges of a block.
struct Hull {
  int low, high;              // the hull of all ranges
  int inner_low, inner_high;  // the keys in all ranges

  __device__ static Hull none() { return {INT32_MAX, 0, 0, INT32_MAX}; }

  __device__ void add(int2 range) {
    if (range.x < range.y) {
      low = min(low, range.x);
      high = max(high, range.y);
      inner_low = max(inner_low, range.x);
      inner_high = min(inner_high, range.y);
    } else {
      inner_low = INT32_MAX;
    }
  }

  __device__ void reduce_warp() {
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
    inner_low = __reduce_max_sync(0xffffffffu, inner_low);
    inner_high = __reduce_min_sync(0xffffffffu, inner_high);
  }
};

__device__ inline Note Note::of(const Hull& hull, bool is_segment_0) {
  const bool has_inner = hull.inner_low != INT32_MAX && hull.low < hull.high;
  // Distances of the inner range from the hull's ends, in units of 64 keys, rounded up.
  const auto steps = [&](int64_t apart) {
    const int64_t all = (apart + 63) / 64;
    return has_inner && all < kNever ? static_cast<uint32_t>(all) : kNever;
  };
  const uint32_t inner = steps(static_cast<int64_t>(hull.inner_low) - hull.low) |
                         steps(static_cast<int64_t>(hull.high) - hull.inner_high) << 15 |
                         static_cast<uint32_t>(is_segment_0) << 30;
  return {0, hull.low, hull.high, inner};
}

// tanh as a quotient of two polynomials (minimax fit), with a relative error of at most 8e-7. Only `above` is NaN for
// a NaN, so that two quotients may share a reciprocal.
struct Quotient {
  float above, below;

  __device__ static Quotient of_tanh(float x) {
    constexpr float kMost = 7.6f;
    const float z = ptx::clamp(x, -kMost, kMost), y = fminf(z * z, kMost * kMost);
    float above = fmaf(y, -6.51403192826921e-9f, 7.354449390053975e-6f);
    above = fmaf(y, above, 2.720403533497395e-3f);
    above = fmaf(y, above, 0.12735098822346047f);
    above = fmaf(y, above, 0.9999993916720492f);
    float below = fmaf(y, 1.999183132011743e-4f, 2.2950272398093125e-2f);
    below = fmaf(y, below, 0.46068203365235333f);
    return {z * above, fmaf(y, below, 1.0f)};
  }
};

// tanh near 0, of a product times a factor, as a polynomial of so many terms with a relative error of at most 8e-7.
template <int kTerms>
struct NearZero {
  static_assert(kTerms == 3 || kTerms == 5);
  static constexpr float kMost = kTerms == 3 ? 0.28f : 0.75f;
  float terms[kTerms];

  __device__ explicit NearZero(float factor) {
    constexpr float kFew[3] = {0.9999992268341992f, -0.3331552301749503f, 0.12720917021217956f};
    constexpr float kMany[5] = {1.0f, -0.3332966765238683f, 0.13268237053307083f, -0.05027795412854776f,
                                0.013105836540408575f};
    float power = factor;
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
      terms[i] = (kTerms == 3 ? kFew[i % 3] : kMany[i]) * power;
      power *= factor * factor;
    }
  }

  // The polynomial, divided by the product.
  __device__ float ratio_at(float product) const {
    const float y = product * product;
    float sum = terms[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(y, sum, terms[i]);
    return sum;
  }

  __device__ float operator()(float product) const { return product * ratio_at(product); }

  // Has the polynomial be this times as large.
  __device__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) terms[i] *= factor;
  }

  __device__ float operator()(float product, float& slope) const {
    const float bent = (*this)(product);
    slope = fmaf(-bent, bent, 1.0f);
    return bent;
  }

  __device__ void bend(float& x, float& y) const { x = (*this)(x), y = (*this)(y); }
};

// Turns a product q k into a logit in units of ln(2): softcapped if `is_bent`, then times `factor`.
struct Bend {
  // With a softcap the argument of tanh is the product times `inner`; without one, that is the logit.
  float inner, factor;
  bool is_bent, has_cap;

  __device__ explicit Bend(const FlashAttentionArguments& a) {
    has_cap = a.softcap > 0;
    is_bent = has_cap || !(a.scale > 0);
    inner = has_cap ? a.scale / a.softcap : a.scale * kLog2E;
    factor = has_cap ? a.softcap * kLog2E : is_bent ? 1.0f : inner;
  }

  // Softcaps a product, and returns the logit's derivative in units of scale.
  __device__ float operator()(float product, float& slope) const {
    slope = 1;
    if (!has_cap) return product * inner;
    const Quotient of = Quotient::of_tanh(product * inner);
    const float bent = of.above * ptx::rcp(of.below);
    slope = fmaf(-bent, bent, 1.0f);
    return bent;
  }

  // Likewise; exact to float32 for float32 E. It also accepts products without a softcap, so that kernels which compile
  // slowly need one instance.
  template <class E>
  __device__ float bend_as(float product, float& slope) const {
    if constexpr (!kIsWide<E>) return (*this)(product, slope);
    slope = 1;
    if (!has_cap) return is_bent ? product * inner : product;
    const float bent = tanhf(product * inner);
    slope = fmaf(-bent, bent, 1.0f);
    return bent;
  }

  // Softcaps two products with one reciprocal.
  __device__ void bend(float& x, float& y) const {
    if (!has_cap) {
      x *= inner, y *= inner;
      return;
    }
    const Quotient of_x = Quotient::of_tanh(x * inner), of_y = Quotient::of_tanh(y * inner);
    const float inverse = ptx::rcp(of_x.below * of_y.below);
    x = of_x.above * (inverse * of_y.below), y = of_y.above * (inverse * of_x.below);
  }
};

// Sets products to -inf for keys outside a query's range. The query is the lane's row lane / 4 + 8 `half`; the tile's
// first key is `key`.
template <int kEights>
__device__ inline void mask_range(float (&products)[kEights][4], int half, int2 range, int key) {
  const int lane = threadIdx.x % 32;
  const int low = range.x - key - lane % 4 * 2, high = range.y - key - lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool is_seen = low <= 8 * j + i && 8 * j + i < high;
      if (!is_seen) products[j][2 * half + i] = -infinity();
    }
  }
}

// Sets products to -inf for keys of another segment.
template <int kEights>
__device__ inline void mask_segment(float (&products)[kEights][4], int half, int32_t segment, const int32_t* of_keys) {
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const int2 pair = *reinterpret_cast<const int2*>(&of_keys[8 * j + threadIdx.x % 4 * 2]);
    if (pair.x != segment) products[j][2 * half] = -infinity();
    if (pair.y != segment) products[j][2 * half + 1] = -infinity();
  }
}

// Calls `with` the shortest `NearZero` of kLeast or more terms that covers all products of a warp, as is usual for logits
// well below the cap, or else `bend`.
template <int kLeast, int kEights, class With>
__device__ inline void bend_by_size(const Bend& bend, const float (&products)[kEights][4], const With& with) {
  float most = 0;
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(products[j][i]));
  }
  most *= fabsf(bend.inner);
  if (kLeast == 3 && bend.has_cap && __all_sync(~0u, most <= NearZero<3>::kMost)) {
    with(NearZero<3>(bend.inner));
  } else if (bend.has_cap && __all_sync(~0u, most <= NearZero<5>::kMost)) {
    with(NearZero<5>(bend.inner));
  } else {
    with(bend);
  }
}

// Softcaps all products of a lane.
template <class E, int kEights>
__device__ inline void bend_all(const Bend& bend, float (&products)[kEights][4]) {
  if constexpr (kIsWide<E>) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float slope;
        products[j][i] = bend.template bend_as<E>(products[j][i], slope);
      }
    }
    return;
  }
  bend_by_size<3>(bend, products, [&](const auto& by) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      by.bend(products[j][0], products[j][1]);
      by.bend(products[j][2], products[j][3]);
    }
  });
}

// A block of queries, whose rows the four warps share, and the tiles of keys that it iterates over.
template <class E, int kColumns, int kStrips, int kKeys, int kThreads = kAttentionThreads>
struct QueryBlock {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kRows = kStrips * kWarps * 16;
  using Tile = Rows<E, kColumns, kKeys, kThreads>;

  struct Shared {
    int2 ranges[kRows];
    int32_t segments[kRows];
    int32_t of_keys[2][kKeys];
    int hulls[kWarps][6];
  };

  const FlashAttentionArguments& a;
  Shared& shared;
  int64_t head, of_keys;  // query head, and KV head
  int64_t first;          // query
  // Rows of the first query and of the first key.
  int64_t of_queries, of_rows;
  Hull hull;
  int least_segment, most_segment;

  // Blocks with the most work come first.
  __device__ QueryBlock(const FlashAttentionArguments& a, Shared& shared) : a(a), shared(shared) {
    const int64_t blocks = (static_cast<int64_t>(a.queries) + kRows - 1) / kRows;
    head = blockIdx.x / blocks;
    of_keys = head / a.group;
    first = (blocks - 1 - blockIdx.x % blocks) * kRows;
    of_queries = a.first_query(of_keys, head % a.group) + first * a.q_row;
    of_rows = a.first_key(of_keys);
    hull = Hull::none();
    least_segment = INT32_MAX, most_segment = INT32_MIN;
    for (int row = threadIdx.x; row < kRows; row += kThreads) {
      const int2 range = range_of(a, of_keys, first + row);
      shared.ranges[row] = range;
      if (first + row >= a.queries) continue;
      hull.add(range);
      if (a.q_segments != nullptr) {
        const int32_t segment = a.q_segments[of_keys * a.queries + first + row];
        shared.segments[row] = segment;
        if (range.x < range.y) {
          least_segment = min(least_segment, segment);
          most_segment = max(most_segment, segment);
        }
      }
    }
    hull.reduce_warp();
    least_segment = __reduce_min_sync(0xffffffffu, least_segment);
    most_segment = __reduce_max_sync(0xffffffffu, most_segment);
    int(&own)[6] = shared.hulls[threadIdx.x / 32];
    if (threadIdx.x % 32 == 0) {
      own[0] = hull.low, own[1] = hull.high, own[2] = hull.inner_low, own[3] = hull.inner_high;
      own[4] = least_segment, own[5] = most_segment;
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const int(&other)[6] = shared.hulls[warp];
      hull.low = min(hull.low, other[0]), hull.high = max(hull.high, other[1]);
      hull.inner_low = max(hull.inner_low, other[2]);
      hull.inner_high = min(hull.inner_high, other[3]);
      least_segment = min(least_segment, other[4]), most_segment = max(most_segment, other[5]);
    }
  }

  // The number of rows from `row` on.
  __device__ int64_t left_from(int row) const { return a.queries - first - row; }

  __device__ int64_t row(int row) const { return head * a.queries + first + row; }

  // The index of a row in q, o and their gradients.
  __device__ int64_t at(int row) const { return of_queries + static_cast<int64_t>(row) * a.q_row; }

  // The first key of the next tile, from `key` on, that some query may see; `hull.high` or more if there is none.
  __device__ int next(int64_t key) const {
    while (key < hull.high && a.kv_segments != nullptr &&
           are_apart(a.kv_segments + of_keys * a.keys + key,
                     min(kKeys, static_cast<int>(a.keys - key)), least_segment, most_segment)) {
      key += kKeys;
    }
    return static_cast<int>(min(key, static_cast<int64_t>(INT32_MAX)));
  }

  // Starts the copies of a tile of keys and values; nothing outside the hull is read.
  __device__ void load(int key, const Tile& k, const Tile& v, int stage) const {
    const int low = hull.low - key, high = hull.high - key;
    const auto is_there = [&](int row) { return low <= row && row < high; };
    const int64_t from = of_keys * a.keys + key, at = of_rows + static_cast<int64_t>(key) * a.k_row;
    k.load(static_cast<const E*>(a.k) + at * a.width, a.width, a.k_row * a.width, is_there);
    v.load(static_cast<const E*>(a.v) + at * a.value_width, a.value_width, a.k_row * a.value_width, is_there);
    if (a.kv_segments != nullptr && threadIdx.x < kKeys) {
      const int row = threadIdx.x;
      const bool reads = key + static_cast<int64_t>(row) < a.keys;
      copy_small<4>(ptx::shared_address(&shared.of_keys[stage][row]),
                    a.kv_segments + (reads ? from + row : 0), reads);
    }
  }

  __device__ bool is_whole(int key) const {
    return hull.inner_low <= key && kKeys <= hull.inner_high - key && a.kv_segments == nullptr;
  }

  // Sets masked products to -inf; `row` is the strip's first.
  __device__ void mask(float (&products)[kKeys / 8][4], int row, int key, int stage) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + threadIdx.x % 32 / 4 + 8 * half;
      mask_range(products, half, shared.ranges[own], key);
      if (a.kv_segments == nullptr) continue;
      mask_segment(products, half, shared.segments[own], shared.of_keys[stage]);
    }
  }
};

// The sum of what the four lanes of a row have.
__device__ inline float add_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Returns what sums of a row are to be multiplied by, and its lse. Exponentials are those of logits less `at`, and add
// up to `total`.
__device__ inline float finish_sum(float total, float at, float sink, float& lse) {
  // A NaN sink makes the row NaN.
  const float most = sink > at || sink != sink ? sink : at;
  const float shift = most == -infinity() ? 0 : most;
  // The sums have another shift, or none if all products are NaN.
  const float kept = at == -infinity() ? 1 : ptx::ex2(at - shift);
  total = total * kept + ptx::ex2(sink - shift);
  lse = total == 0 ? -infinity() : (shift + log2f(total)) * kLn2;
  return total == 0 ? 0 : kept / total;
}

// The factor of a row's sums, and its lse: from the four lanes' parts of the denominator, the largest product, and the
// sink's logit in units of ln(2), or -inf.
__device__ inline float finish_row(const Bend& bend, float total, float largest, float sink, float& lse) {
  const float at = largest == -infinity() ? -infinity() : largest * bend.factor;
  return finish_sum(add_quad(total), at, sink, lse);
}

// Keys of a tile: as many as keep a CTA within 96 KiB of shared memory.
template <class E, int kColumns>
inline constexpr int kKeysOfTile = kIsWide<E> ? (kColumns == 256 ? 16 : kColumns == 128 ? 32 : 64)
                                              : (kColumns == 256 ? 32 : 64);

// The forward pass: o and lse.
template <class E, int kColumns>
struct Forward {
  static constexpr int kStrips = kIsWide<E> || kColumns == 256 ? 1 : 2;
  static constexpr int kKeys = kKeysOfTile<E, kColumns>;
  static constexpr int kStages = kIsWide<E> && kColumns == 256 ? 1 : 2;
  using Block = QueryBlock<E, kColumns, kStrips, kKeys>;
  using Tile = typename Block::Tile;
  using Queries = Rows<E, kColumns, Block::kRows>;
  static constexpr int kSharedBytes = Queries::kBytes + 2 * kStages * Tile::kBytes;

  float sums[kStrips][kColumns / 8][4];
  // Of rows lane / 4 and lane / 4 + 8: the largest product, and the thread's part of the sum.
  float largest[kStrips][2], total[kStrips][2];

  __device__ void add(const Block& block, const Bend& bend, const Queries& q, const Tile& k,
                      const Tile& v, int key, int stage) {
    const bool is_whole = block.is_whole(key);
    float products[kStrips][kKeys / 8][4];
    Computed<E, kKeys> p[kStrips];
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      multiply_rows<kKeys>(products[strip], q, strip, k);
    }
    // One strip's exponentials overlap with another's GEMMs.
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      wait<E, kStrips - 1>();
      settle<E>(products[strip]);
      weigh(block, bend, products[strip], p[strip], strip, key, stage, is_whole);
      multiply_along<kKeys>(sums[strip], p[strip], v);
    }
    wait<E, 0>();
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) settle<E>(sums[strip]);
  }

  // Turns a strip's products into unnormalised probabilities.
  __device__ void weigh(const Block& block, const Bend& bend, float (&products)[kKeys / 8][4],
                        Computed<E, kKeys>& p, int strip, int key, int stage, bool is_whole) {
    if (bend.is_bent) bend_all<E>(bend, products);
    if (!is_whole) block.mask(products, own_row(strip), key, stage);
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = largest[strip][half];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        most = fmaxf(most, fmaxf(products[j][2 * half], products[j][2 * half + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      shift[half] = most == -infinity() ? 0 : most * bend.factor;
      const float kept = ptx::ex2(largest[strip][half] * bend.factor - shift[half]);
      largest[strip][half] = most;
      total[strip][half] *= kept;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        sums[strip][j][2 * half] *= kept;
        sums[strip][j][2 * half + 1] *= kept;
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      float(&of)[4] = products[j];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of[i] = ptx::ex2(fmaf(of[i], bend.factor, -shift[i / 2]));
        total[strip][i / 2] += of[i];
      }
      compute<E, kKeys>(p, j, of);
    }
  }

  __device__ static void run(const FlashAttentionArguments& a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    static_assert(kSharedBytes <= 96 << 10);
    __shared__ typename Block::Shared shared;
    const Block block(a, shared);
    const uint32_t base = ptx::shared_address(memory);
    const Queries q{base};
    q.load(static_cast<const E*>(a.q) + block.at(0) * a.width, a.width, a.q_row * a.width,
           [&](int row) { return row < block.left_from(0); });
    Forward of;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        of.sums[strip][j][0] = of.sums[strip][j][1] = of.sums[strip][j][2] = of.sums[strip][j][3] = 0;
      }
      of.largest[strip][0] = of.largest[strip][1] = -infinity();
      of.total[strip][0] = of.total[strip][1] = 0;
    }
    const Bend bend(a);
    const auto k = [&](int stage) { return Tile{base + Queries::kBytes + 2 * stage * Tile::kBytes}; };
    const auto v = [&](int stage) {
      return Tile{base + Queries::kBytes + (2 * stage + 1) * Tile::kBytes};
    };
    int key = block.next(block.hull.low / kKeys * kKeys), stage = 0;
    if (key < block.hull.high) block.load(key, k(0), v(0), 0);
    ptx::commit_copies();
    while (key < block.hull.high) {
      const int next = block.next(static_cast<int64_t>(key) + kKeys);
      meet_copies();
      const int other = stage ^ (kStages - 1);
      if (kStages == 2 && next < block.hull.high) block.load(next, k(other), v(other), other);
      ptx::commit_copies();
      of.add(block, bend, q, k(stage), v(stage), key, stage);
      if (kStages == 1) {
        __syncthreads();
        if (next < block.hull.high) block.load(next, k(0), v(0), 0);
        ptx::commit_copies();
      }
      key = next, stage = other;
    }
    ptx::wait_for_copies(0);
    __syncthreads();
    of.finish(block, bend, q);
  }

  __device__ void finish(const Block& block, const Bend& bend, const Queries& q) {
    const FlashAttentionArguments& a = block.a;
    const int lane = threadIdx.x % 32;
    const float sink =
        a.sinks == nullptr ? -infinity() : a.sinks[block.head] * kLog2E;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = own_row(strip) + lane / 4 + 8 * half;
        const int2 range = block.shared.ranges[own];
        const bool is_empty = range.x >= range.y;
        float lse;
        const float factor = finish_row(bend, total[strip][half], largest[strip][half], sink, lse);
        inverse[half] = is_empty ? 0 : factor;
        if (lane % 4 == 0 && own < block.left_from(0)) a.lse[block.row(own)] = lse;
        if (!is_empty) continue;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          sums[strip][j][2 * half] = sums[strip][j][2 * half + 1] = 0;
        }
      }
      const int own = own_row(strip);
      q.store(sums[strip], inverse[0], inverse[1], own,
              static_cast<E*>(a.o) + block.at(own) * a.value_width, a.value_width,
              a.q_row * a.value_width, block.left_from(own));
    }
  }
};

// A row's lse in units of ln(2); for a row without keys a value that makes all probabilities 0.
__device__ inline float lse_of(float lse) {
  return lse == -infinity() ? infinity() : lse * kLog2E;
}

// The probability of a product, or with a softcap of a logit; lse is that of `lse_of`.
__device__ inline float probability(const Bend& bend, float product, float lse) {
  return ptx::ex2(fmaf(product, bend.factor, -lse));
}

// ds as a GEMM operand: the probabilities p, which ds replaces, times (do v - delta).
template <class E, int kEighths>
__device__ inline void cotangents(float (&p)[kEighths][4], const float (&of_values)[kEighths][4],
                                  Computed<E, 8 * kEighths>& ds) {
#pragma unroll
  for (int j = 0; j < kEighths; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The gradient of a masked pair may be NaN.
      p[j][i] = p[j][i] == 0 ? 0 : p[j][i] * of_values[j][i];
    }
    compute<E, 8 * kEighths>(ds, j, p[j]);
  }
}

// Buffers of tiles in the gradient kernels.
template <class E, int kColumns>
inline constexpr int kGradientStages = kColumns == 256 ? 1 : 2;

// Rows of these tiles. In float32 the compiler defers additions to sums, so that more rows would need too many
// registers.
template <class E, int kColumns>
inline constexpr int kGradientTile =
    kIsWide<E> ? (kColumns == 64 ? 32 : 16) : kKeysOfTile<E, kColumns>;

// dq, which overwrites the notes and so runs after the kernels that read them.
template <class E, int kColumns>
struct QueryGradients {
  static constexpr int kKeys = kGradientTile<E, kColumns>;
  static constexpr int kStages = kGradientStages<E, kColumns>;
  static constexpr int kThreads = kGradientThreads<E, kColumns>;
  using Block = QueryBlock<E, kColumns, 1, kKeys, kThreads>;
  using Tile = typename Block::Tile;
  using Queries = Rows<E, kColumns, Block::kRows, kThreads>;
  static constexpr int kSharedBytes = 2 * Queries::kBytes + 2 * kStages * Tile::kBytes;

  float sums[kColumns / 8][4];
  float lse[2], delta[2];

  template <bool kIsBent>
  __device__ void add(const Block& block, const Bend& bend, const Queries& q, const Queries& dout,
                      const Tile& k, const Tile& v, int key, int stage) {
    float p[kKeys / 8][4], of_values[kKeys / 8][4];
    multiply_rows<kKeys>(p, q, 0, k);
    multiply_rows<kKeys>(of_values, dout, 0, v);
    const auto differences = [&](auto slope_of) {
      settle<E>(of_values);
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of_values[j][i] = (of_values[j][i] - delta[i / 2]) * slope_of(j, i);
        }
      }
    };
    if constexpr (kIsBent) {
      wait<E, 0>();
      settle<E>(p);
      differences([&](int j, int i) {
        float slope;
        p[j][i] = bend.template bend_as<E>(p[j][i], slope);
        return slope;
      });
    } else {
      wait<E, 1>();
      settle<E>(p);
    }
    if (!block.is_whole(key)) block.mask(p, own_row(0), key, stage);
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[j][i] = probability(bend, p[j][i], lse[i / 2]);
    }
    if constexpr (!kIsBent) {
      wait<E, 0>();
      differences([](int, int) { return 1.0f; });
    }
    Computed<E, kKeys> ds;
    cotangents<E>(p, of_values, ds);
    multiply_along<kKeys>(sums, ds, k);
    wait<E, 0>();
    settle<E>(sums);
  }

  __device__ static void run(const FlashAttentionArguments& a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    static_assert(kSharedBytes <= 96 << 10);
    __shared__ typename Block::Shared shared;
    const Block block(a, shared);
    const uint32_t base = ptx::shared_address(memory);
    const Queries q{base}, dout{base + Queries::kBytes};
    const auto is_there = [&](int row) { return row < block.left_from(0); };
    q.load(static_cast<const E*>(a.q) + block.at(0) * a.width, a.width, a.q_row * a.width, is_there);
    dout.load(static_cast<const E*>(a.dout) + block.at(0) * a.value_width, a.value_width,
              a.q_row * a.value_width, is_there);
    const int row = own_row(0), lane = threadIdx.x % 32;
    E* dq = static_cast<E*>(a.dq);
    QueryGradients of;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      of.sums[j][0] = of.sums[j][1] = of.sums[j][2] = of.sums[j][3] = 0;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + lane / 4 + 8 * half;
      const bool reads = own < block.left_from(0);
      of.lse[half] = reads ? lse_of(a.lse[block.row(own)]) : 0;
      of.delta[half] =
          reads ? reinterpret_cast<const Note*>(dq + block.at(own) * a.width)->delta : 0;
    }
    const Bend bend(a);
    const auto k = [&](int stage) {
      return Tile{base + 2 * Queries::kBytes + 2 * stage * Tile::kBytes};
    };
    const auto v = [&](int stage) {
      return Tile{base + 2 * Queries::kBytes + (2 * stage + 1) * Tile::kBytes};
    };
    int key = block.next(block.hull.low / kKeys * kKeys), stage = 0;
    if (key < block.hull.high) block.load(key, k(0), v(0), 0);
    ptx::commit_copies();
    while (key < block.hull.high) {
      const int next = block.next(static_cast<int64_t>(key) + kKeys);
      meet_copies();
      const int other = stage ^ (kStages - 1);
      if (kStages == 2 && next < block.hull.high) block.load(next, k(other), v(other), other);
      ptx::commit_copies();
      if (kIsWide<E> || bend.is_bent) {
        of.template add<true>(block, bend, q, dout, k(stage), v(stage), key, stage);
      } else if constexpr (!kIsWide<E>) {
        of.template add<false>(block, bend, q, dout, k(stage), v(stage), key, stage);
      }
      if (kStages == 1) {
        __syncthreads();
        if (next < block.hull.high) block.load(next, k(0), v(0), 0);
        ptx::commit_copies();
      }
      key = next, stage = other;
    }
    ptx::wait_for_copies(0);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int2 range = shared.ranges[row + lane / 4 + 8 * half];
      if (range.x < range.y) continue;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) of.sums[j][2 * half] = of.sums[j][2 * half + 1] = 0;
    }
    q.store(of.sums, a.scale, a.scale, row, dq + block.at(row) * a.width, a.width, a.q_row * a.width,
            block.left_from(row));
  }
};

// dk and dv of 64 keys, or 32 for 256 columns in float32, 16 per warp, over the blocks of queries that see them. Keys
// are the rows of GEMMs. If the sums of both do not fit the registers, dk and dv have a CTA each.
template <class E, int kColumns, bool kMakesKeys, bool kMakesValues>
struct KeyGradients {
  static constexpr int kThreads = kGradientThreads<E, kColumns>;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kKeys = kWarps * 16;
  // Queries of a tile, and the number of its buffers.
  static constexpr int kRows = kGradientTile<E, kColumns>;
  static constexpr int kStages = kGradientStages<E, kColumns>;
  using Tile = Rows<E, kColumns, kRows, kThreads>;
  using Keys = Rows<E, kColumns, kKeys, kThreads>;
  static constexpr int kSharedBytes = 2 * Keys::kBytes + 2 * kStages * Tile::kBytes;

  // A warp's position in the search for blocks. All warps search alike; in shared memory, to save registers.
  struct Search {
    // The head of the group, and the first block of the next 32 notes. Of the last 32 blocks, as bits: those to
    // process, those that see all keys, and those with queries that see no key.
    int head, base;
    uint32_t seen, whole, blank;
    // The block of the last tile, its index among 32, and the tile within the block.
    int block, bit, within;
    int least_segment, most_segment;  // of keys
  };

  struct Shared {
    alignas(16) int2 ranges[2][kRows];
    float lse[2][kRows];
    float delta[2][kRows];
    int32_t segments[2][kRows];
    int32_t of_keys[kKeys];
    Search searches[kWarps];
  };

  // A tile of queries: its head of the group and first query; whether all see all keys, and some see none.
  struct Place {
    int64_t head, first;
    bool is_there, is_whole, has_blanks;
  };

  const FlashAttentionArguments& a;
  Shared& shared;
  int64_t of_keys;
  int first_key, end_key;

  float keys[kMakesKeys ? kColumns / 8 : 1][4], values[kMakesValues ? kColumns / 8 : 1][4];

  __device__ KeyGradients(const FlashAttentionArguments& a, Shared& shared, int64_t index)
      : a(a), shared(shared) {
    const int64_t tiles = (static_cast<int64_t>(a.keys) + kKeys - 1) / kKeys;
    of_keys = index / tiles;
    first_key = static_cast<int>(index % tiles * kKeys);
    end_key = static_cast<int>(min(static_cast<int64_t>(first_key) + kKeys,
                                   static_cast<int64_t>(a.keys)));
    int least = INT32_MAX, most = INT32_MIN;
    if (a.kv_segments != nullptr) {
      for (int i = threadIdx.x % 32; i < end_key - first_key; i += 32) {
        const int32_t segment = a.kv_segments[of_keys * a.keys + first_key + i];
        if (threadIdx.x < 32) shared.of_keys[i] = segment;
        least = min(least, segment);
        most = max(most, segment);
      }
      least = __reduce_min_sync(0xffffffffu, least);
      most = __reduce_max_sync(0xffffffffu, most);
    }
    if (threadIdx.x % 32 == 0) {
      shared.searches[threadIdx.x / 32] = {0, 0, 0, 0, 0, -1, 0, 0, least, most};
    }
    __syncwarp();
  }

  // The row of a query of a head of the group.
  __device__ int64_t at(int64_t head, int64_t query) const {
    return a.first_query(of_keys, head) + query * a.q_row;
  }

  __device__ const Note& note_of(int64_t row) const {
    return *reinterpret_cast<const Note*>(static_cast<const E*>(a.dq) + row * a.width);
  }

  // The next tile with a query that may see a key.
  __device__ Place next() {
    const int lane = threadIdx.x % 32;
    Search search = shared.searches[threadIdx.x / 32];
    const bool is_there = advance(search);
    __syncwarp();
    if (lane == 0) shared.searches[threadIdx.x / 32] = search;
    __syncwarp();
    return {search.head, static_cast<int64_t>(search.block) * kAttentionBlock + search.within, is_there,
            (search.whole >> search.bit & 1) != 0, (search.blank >> search.bit & 1) != 0};
  }

  __device__ bool advance(Search& search) const {
    const int64_t after =
        static_cast<int64_t>(search.block) * kAttentionBlock + search.within + kRows;
    if (search.block >= 0 && search.within + kRows < kAttentionBlock && after < a.queries) {
      search.within += kRows;
      return true;
    }
    search.within = 0;
    const int blocks = static_cast<int>(
        (static_cast<int64_t>(a.queries) + kAttentionBlock - 1) / kAttentionBlock);
    while (true) {
      while (search.seen == 0) {
        if (search.base >= blocks) {
          if (search.head + 1 >= a.group) return false;
          search.head += 1, search.base = 0;
        }
        const int block = search.base + threadIdx.x % 32;
        bool sees = false, is_whole = false, has_blanks = false;
        if (block < blocks) {
          const int64_t first = static_cast<int64_t>(block) * kAttentionBlock;
          const Note note = note_of(at(search.head, first));
          sees = note.low < end_key && note.high > first_key;
          has_blanks = note.has_blanks();
          is_whole = a.q_segments == nullptr && note.has_all(first_key, kKeys);
        }
        search.seen = __ballot_sync(0xffffffffu, sees);
        search.whole = __ballot_sync(0xffffffffu, is_whole);
        search.blank = __ballot_sync(0xffffffffu, has_blanks);
        search.base += 32;
      }
      search.bit = __ffs(search.seen) - 1;
      search.seen &= search.seen - 1;
      search.block = search.base - 32 + search.bit;
      const int64_t first = static_cast<int64_t>(search.block) * kAttentionBlock;
      const int count =
          static_cast<int>(min(static_cast<int64_t>(kAttentionBlock), a.queries - first));
      if (a.q_segments == nullptr ||
          !are_apart(a.q_segments + of_keys * a.queries + first, count, search.least_segment,
                     search.most_segment)) {
        return true;
      }
    }
  }

  __device__ void load(const Place& at, const Tile& q, const Tile& dout, int stage) const {
    const int64_t left = a.queries - at.first, row = (of_keys * a.group + at.head) * a.queries + at.first;
    const int64_t of_ranges = of_keys * a.queries + at.first, lies = this->at(at.head, at.first);
    const int2* ranges = reinterpret_cast<const int2*>(a.ranges) + of_ranges;
    // Queries that see no key may hold NaN.
    const auto is_there = [&](int own) {
      if (own >= left) return false;
      if (!at.has_blanks) return true;
      const int2 range = ranges[own];
      return range.x < range.y;
    };
    q.load(static_cast<const E*>(a.q) + lies * a.width, a.width, a.q_row * a.width, is_there);
    dout.load(static_cast<const E*>(a.dout) + lies * a.value_width, a.value_width, a.q_row * a.value_width,
              is_there);
#pragma unroll
    for (int part = 0; part < 128 / kThreads; ++part) {
      const int i = threadIdx.x + part * kThreads, own = i % 64;
      if (own >= kRows) continue;
      const bool reads = own < left;
      const int64_t from = reads ? own : 0;
      if (i < 64) {
        copy_small<8>(ptx::shared_address(&shared.ranges[stage][own]), ranges + from, reads);
        copy_small<4>(ptx::shared_address(&shared.lse[stage][own]), a.lse + row + from, reads);
      } else {
        copy_small<4>(ptx::shared_address(&shared.delta[stage][own]), &note_of(lies + from * a.q_row).delta,
                      reads);
        if (a.q_segments != nullptr) {
          copy_small<4>(ptx::shared_address(&shared.segments[stage][own]),
                        a.q_segments + of_ranges + from, reads);
        }
      }
    }
  }

  __device__ void mask(float (&products)[kRows / 8][4], int stage) const {
    const int lane = threadIdx.x % 32, row = own_row(0) + lane / 4;
    const int key = first_key + row;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const int column = 8 * j + lane % 4 * 2;
      const int4 ranges = *reinterpret_cast<const int4*>(&shared.ranges[stage][column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = key + 8 * half;
        if (!(ranges.x <= own && own < ranges.y)) products[j][2 * half] = -infinity();
        if (!(ranges.z <= own && own < ranges.w)) products[j][2 * half + 1] = -infinity();
      }
      if (a.q_segments == nullptr) continue;
      const int2 pair = *reinterpret_cast<const int2*>(&shared.segments[stage][column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t segment = shared.of_keys[row + 8 * half];
        if (pair.x != segment) products[j][2 * half] = -infinity();
        if (pair.y != segment) products[j][2 * half + 1] = -infinity();
      }
    }
  }

  template <bool kIsBent>
  __device__ void add(const Bend& bend, const Keys& k, const Keys& v, const Tile& q,
                      const Tile& dout, const Place& at, int stage) {
    const int lane = threadIdx.x % 32;
    float p[kRows / 8][4], of_values[kMakesKeys ? kRows / 8 : 1][4];
    multiply_rows<kRows>(p, k, 0, q);
    if constexpr (kMakesKeys) multiply_rows<kRows>(of_values, v, 0, dout);
    // The factors of p in ds: computed once a softcap's slope is known, otherwise when needed.
    const auto differences = [&](auto slope_of) {
      settle<E>(of_values);
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const float2 delta =
            *reinterpret_cast<const float2*>(&shared.delta[stage][8 * j + lane % 4 * 2]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of_values[j][i] = (of_values[j][i] - (i % 2 == 0 ? delta.x : delta.y)) * slope_of(j, i);
        }
      }
    };
    if constexpr (kIsBent) {
      wait<E, 0>();
      settle<E>(p);
      const auto bent = [&](int j, int i) {
        float slope;
        p[j][i] = bend.template bend_as<E>(p[j][i], slope);
        return slope;
      };
      if constexpr (kMakesKeys) {
        differences(bent);
      } else {
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) bent(j, i);
        }
      }
    } else {
      wait<E, kMakesKeys ? 1 : 0>();
      settle<E>(p);
    }
    if (!at.is_whole) mask(p, stage);
    Computed<E, kRows> of;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 raw =
          *reinterpret_cast<const float2*>(&shared.lse[stage][8 * j + lane % 4 * 2]);
      const float lse[2] = {lse_of(raw.x), lse_of(raw.y)};
#pragma unroll
      for (int i = 0; i < 4; ++i) p[j][i] = probability(bend, p[j][i], lse[i % 2]);
      compute<E, kRows>(of, j, p[j]);
    }
    if constexpr (kMakesValues) multiply_along<kRows>(values, of, dout);
    if constexpr (kMakesKeys) {
      if constexpr (!kIsBent) {
        wait<E, kMakesValues ? 1 : 0>();
        differences([](int, int) { return 1.0f; });
      }
      Computed<E, kRows> ds;
      cotangents<E>(p, of_values, ds);
      multiply_along<kRows>(keys, ds, q);
      wait<E, 0>();
    }
    wait<E, 0>();
    if constexpr (kMakesKeys) settle<E>(keys);
    if constexpr (kMakesValues) settle<E>(values);
  }

  __device__ static void run(const FlashAttentionArguments& a, int64_t index) {
    extern __shared__ __align__(1024) uint8_t memory[];
    static_assert(kSharedBytes <= 96 << 10);
    __shared__ Shared shared;
    KeyGradients of(a, shared, index);
    const uint32_t base = ptx::shared_address(memory);
    const Keys k{base}, v{base + Keys::kBytes};
    const int count = of.end_key - of.first_key;
    const int64_t first = a.first_key(of.of_keys) + static_cast<int64_t>(of.first_key) * a.k_row;
    const auto is_there = [&](int row) { return row < count; };
    k.load(static_cast<const E*>(a.k) + first * a.width, a.width, a.k_row * a.width, is_there);
    if constexpr (kMakesKeys) {
      v.load(static_cast<const E*>(a.v) + first * a.value_width, a.value_width, a.k_row * a.value_width,
             is_there);
    }
    if constexpr (kMakesKeys) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        of.keys[j][0] = of.keys[j][1] = of.keys[j][2] = of.keys[j][3] = 0;
      }
    }
    if constexpr (kMakesValues) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        of.values[j][0] = of.values[j][1] = of.values[j][2] = of.values[j][3] = 0;
      }
    }
    const Bend bend(a);
    const auto q = [&](int stage) {
      return Tile{base + 2 * Keys::kBytes + 2 * stage * Tile::kBytes};
    };
    const auto dout = [&](int stage) {
      return Tile{base + 2 * Keys::kBytes + (2 * stage + 1) * Tile::kBytes};
    };
    Place at = of.next();
    int stage = 0;
    if (at.is_there) of.load(at, q(0), dout(0), 0);
    ptx::commit_copies();
    while (at.is_there) {
      const Place next = of.next();
      meet_copies();
      const int other = stage ^ (kStages - 1);
      if (kStages == 2 && next.is_there) of.load(next, q(other), dout(other), other);
      ptx::commit_copies();
      if (kIsWide<E> || bend.is_bent) {
        of.template add<true>(bend, k, v, q(stage), dout(stage), at, stage);
      } else if constexpr (!kIsWide<E>) {
        of.template add<false>(bend, k, v, q(stage), dout(stage), at, stage);
      }
      if (kStages == 1) {
        __syncthreads();
        if (next.is_there) of.load(next, q(0), dout(0), 0);
        ptx::commit_copies();
      }
      at = next, stage = other;
    }
    ptx::wait_for_copies(0);
    __syncthreads();
    const int row = own_row(0);
    const int64_t to = first + static_cast<int64_t>(row) * a.k_row;
    if constexpr (kMakesKeys) {
      k.store(of.keys, a.scale, a.scale, row, static_cast<E*>(a.dk) + to * a.width, a.width,
              a.k_row * a.width, count - row);
    }
    if constexpr (kMakesValues) {
      v.store(of.values, 1, 1, row, static_cast<E*>(a.dv) + to * a.value_width, a.value_width,
              a.k_row * a.value_width, count - row);
    }
  }
};

// Writes the notes of a block of a query head.
template <class E>
__device__ inline void write_notes(const FlashAttentionArguments& a) {
  const int64_t blocks = (static_cast<int64_t>(a.queries) + kAttentionBlock - 1) / kAttentionBlock;
  const int64_t head = blockIdx.x / blocks, first = blockIdx.x % blocks * kAttentionBlock;
  const int64_t of_keys = head / a.group, row = head * a.queries + first;
  const int count =
      static_cast<int>(min(static_cast<int64_t>(kAttentionBlock), a.queries - first));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // The row of a query of the block.
  const int64_t begins = a.first_query(of_keys, head % a.group) + first * a.q_row;
  const auto lies = [&](int own) { return begins + static_cast<int64_t>(own) * a.q_row; };
  const auto note_of = [&](int own) {
    return reinterpret_cast<Note*>(static_cast<E*>(a.dq) + lies(own) * a.width);
  };
  // Lanes that share a row, 8 columns each.
  const int lanes = a.value_width <= 64 ? 8 : a.value_width <= 128 ? 16 : 32;
  const int vector = lane % lanes;
  for (int begin = warp * (32 / lanes); begin < kAttentionBlock; begin += kWarps * (32 / lanes)) {
    const int own = begin + lane / lanes;
    float sum = 0;
    const int2 range = own < count ? range_of(a, of_keys, first + own) : make_int2(0, 0);
    if (range.x < range.y && vector * 8 < a.value_width) {
      const int64_t at = lies(own) * a.value_width + vector * 8;
      constexpr int kLength = kPerVector<E>;
#pragma unroll
      for (int part = 0; part < 8; part += kLength) {
        float x[kLength], y[kLength];
        unpack<E>(*reinterpret_cast<const uint4*>(static_cast<const E*>(a.o) + at + part), x);
        unpack<E>(*reinterpret_cast<const uint4*>(static_cast<const E*>(a.dout) + at + part), y);
#pragma unroll
        for (int i = 0; i < kLength; ++i) sum = fmaf(x[i], y[i], sum);
      }
    }
    for (int apart = lanes / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    }
    if (own < count && vector == 0) {
      const bool sees_any = a.lse[row + own] != -infinity();
      note_of(own)->delta = sees_any ? sum - a.dlse[row + own] : 0;
    }
  }
  if (warp != 0) return;
  Hull hull = Hull::none();
  bool is_segment_0 = a.q_segments != nullptr;
  for (int own = lane; own < count; own += 32) {
    hull.add(range_of(a, of_keys, first + own));
    if (a.q_segments != nullptr) is_segment_0 &= a.q_segments[of_keys * a.queries + first + own] == 0;
  }
  hull.reduce_warp();
  is_segment_0 = __all_sync(0xffffffffu, is_segment_0);
  if (lane != 0) return;
  // delta is already written.
  Note& note = *note_of(0);
  const Note own = Note::of(hull, is_segment_0);
  note.low = own.low, note.high = own.high, note.inner = own.inner;
}

// dsinks of a query head, from the notes.
template <class E>
__device__ inline void sum_sinks(const FlashAttentionArguments& a) {
  __shared__ double parts[kAttentionSinkThreads];
  const int64_t head = blockIdx.x;
  const int64_t begins = a.first_query(head / a.group, head % a.group);
  const float sink = a.sinks[head];
  double sum = 0;
  for (int64_t query = threadIdx.x; query < a.queries; query += kAttentionSinkThreads) {
    const float lse = a.lse[head * a.queries + query];
    if (lse == -infinity()) continue;
    const Note& note =
        *reinterpret_cast<const Note*>(static_cast<const E*>(a.dq) + (begins + query * a.q_row) * a.width);
    sum -= static_cast<double>(exp2f((sink - lse) * kLog2E)) * note.delta;
  }
  parts[threadIdx.x] = sum;
  for (int apart = kAttentionSinkThreads / 2; apart > 0; apart /= 2) {
    __syncthreads();
    if (threadIdx.x < apart) parts[threadIdx.x] += parts[threadIdx.x + apart];
  }
  if (threadIdx.x == 0) a.dsinks[head] = static_cast<float>(parts[0]);
}

}  // namespace attention
}  // namespace xentile

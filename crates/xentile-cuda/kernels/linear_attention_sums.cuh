// Linear attention without b, whose results are all sums over the tokens before or after one:
//
//   o_i  = scale sum over j <= i of D_ij (q_i . k_j) v_j       dv_j = scale sum over i >= j of D_ij (k_j . q_i) do_i
//   dq_i = scale sum over j <= i of D_ij (do_i . v_j) k_j      dk_j = scale sum over i >= j of D_ij (v_j . do_i) q_i
//
// A `CausalSum` has one of them, of a head, of a group of chunks and of 64 columns; it walks from chunk to chunk with a
// state [columns, width], f32 in registers. One warpgroup has the rows of a chunk, the other the state after it. States
// between groups come from the same walk without rows, from states of 0, and are then combined. Backward walks have the
// tokens of a chunk in reverse, so that a masked pair is above the diagonal in both.
//
// With x_t = q_t . dq_t - k_t . dk_t in f32, dg_t is the sum of x from t on to the end of a group and of S . dS there, or what
// the same at the beginning of the group leaves, of which the nearer has less of rounding, and what is not finite in one
// may not be in the other.
#pragma once

#include "flash_attention.cuh"
#include "linear_attention.cuh"

namespace xentile::linear_attention {

namespace hopper = attention::hopper;

enum class Result { kO, kDq, kDk, kDv };
enum class Part { kStates, kRows };

using Bf16 = __nv_bfloat16;
template <int kColumns>
using Tile = attention::Rows<Bf16, kColumns, kChunk, kThreads>;

inline constexpr bool kHasWarpgroups = attention::kHasWarpgroups<Bf16>;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;
#else
inline constexpr bool kHasClusters = true;
#endif
inline constexpr int kWarpgroup = 128;
// Columns of a result that a CTA has.
inline constexpr int kSumColumns = kLinearSumColumns;
// Rows of `Arguments::exponents` of a chunk: of up to two slices of q . dq, and of k . dk.
inline constexpr int kExponents = 4;

// sums = left right^T, or with `adds` sums += left right^T, of tiles of 64 rows. Complete after `wait`.
template <int kWidth>
__device__ inline void multiply_rows(Sums<8>& sums, Tile<kWidth> left, Tile<kWidth> right, bool adds) {
  if constexpr (kHasWarpgroups) {
    const uint64_t of_left = ptx::matrix_of(left.base), of_right = ptx::matrix_of(right.base);
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      const int at = (step / 4 * Tile<kWidth>::kPanelBytes + step % 4 * 32) / 16;
      hopper::multiply<Bf16>(sums, of_left + at, of_right + at, adds || step > 0);
    }
  } else {
    if (!adds) clear(sums);
#pragma unroll 2
    for (int step = 0; step < kWidth / 16; ++step) {
      uint32_t x[4];
      left.left(x, threadIdx.x % kWarpgroup / 32 * 16, step);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t y[4];
        right.right_of_rows(y, n * 8, step);
        mma::multiply(sums[n], x, y[0], y[1]);
        mma::multiply(sums[n + 1], x, y[2], y[3]);
      }
    }
  }
}

// The left operand of a GEMM over 64 indices, in two parts.
struct SplitOperand {
  uint32_t high[4][4], low[4][4];

  __device__ void set(int step, int i, float x, float y) {
    const Split split(x, y);
    high[step][i] = split.high, low[step][i] = split.low;
  }
};

// sums += left right. Complete after `wait`.
template <int kWidth, int kParts = 2>
__device__ inline void multiply_along(Sums<kWidth / 8>& sums, SplitOperand& left, Tile<kWidth> right) {
  const uint64_t of_right = kHasWarpgroups ? ptx::transposed_of(right.base, Tile<kWidth>::kPanelBytes) : 0;
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    if constexpr (kHasWarpgroups) {
      hopper::multiply<Bf16>(sums, left.high[step], of_right + step * (16 * 128 / 16));
      if constexpr (kParts == 2) hopper::multiply<Bf16>(sums, left.low[step], of_right + step * (16 * 128 / 16));
    } else {
#pragma unroll
      for (int n = 0; n < kWidth / 8; n += 2) {
        uint32_t y[4];
        right.right(y, step * 16, n / 2);
        mma::multiply(sums[n], left.high[step], y[0], y[1]);
        mma::multiply(sums[n + 1], left.high[step], y[2], y[3]);
        if constexpr (kParts == 2) {
          mma::multiply(sums[n], left.low[step], y[0], y[1]);
          mma::multiply(sums[n + 1], left.low[step], y[2], y[3]);
        }
      }
    }
  }
}

__device__ inline void begin_products() {
  if constexpr (kHasWarpgroups) ptx::wgmma_fence();
}
__device__ inline void end_products() {
  if constexpr (kHasWarpgroups) ptx::wgmma_commit();
}
template <int kPending, int kTiles>
__device__ inline void wait_for(Sums<kTiles>& sums) {
  if constexpr (kHasWarpgroups) {
    ptx::wgmma_wait<kPending>();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[n][i])::"memory");
    }
  }
}

// e^x, 0 where it is less than the least normal number.
__device__ inline float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}

// The decays of a chunk whose rows are tokens, or tokens in reverse.
template <bool kReversed>
struct RowDecays {
  const float* sums;

  __device__ static int token(int row) { return kReversed ? kChunk - 1 - row : row; }
  __device__ float from_start(int row) const {
    const int t = token(row), last = kChunk - 1;
    return power(kReversed ? (sums[last] - sums[t]) + (sums[kChunk + last] - sums[kChunk + t])
                           : sums[t] + sums[kChunk + t]);
  }
  // Those of an even row and the row after it.
  __device__ float2 to_end(int row) const {
    const int t = kReversed ? kChunk - 2 - row : row, last = kChunk - 1;
    const float2 high = *reinterpret_cast<const float2*>(sums + t);
    const float2 low = *reinterpret_cast<const float2*>(sums + kChunk + t);
    if (kReversed) return make_float2(power(high.y + low.y), power(high.x + low.x));
    return make_float2(power((sums[last] - high.x) + (sums[kChunk + last] - low.x)),
                       power((sums[last] - high.y) + (sums[kChunk + last] - low.y)));
  }
  __device__ float total() const { return power(sums[kChunk - 1] + sums[2 * kChunk - 1]); }

  // Multiplies scores of a warp's 16 rows by `scale` and decays, and those after the diagonal by 0. A decay from before the
  // 16 rows is a product of two, from its column to the first row, and from there on.
  __device__ void mask(Sums<8>& scores, int row, float scale) const {
    const int lane = threadIdx.x % 32;
    const auto at = [&](int r) { return make_float2(sums[token(r)], sums[kChunk + token(r)]); };
    const auto between = [&](float2 row, float2 column) {
      const float exponent = (row.x - column.x) + (row.y - column.y);
      return power(kReversed ? -exponent : exponent);
    };
    const float2 own[2] = {at(row + row_of(0)), at(row + row_of(2))}, start = at(row);
    const float from_start[2] = {scale * between(own[0], start), scale * between(own[1], start)};
    // Of columns `lane` and `lane` + 32.
    float to_start[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = half * 32 + lane;
      to_start[half] = column < row ? between(start, at(column)) : 0.0f;
    }
    // Of the columns of the 16 rows.
    Sums<2> own_decays;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 columns[2] = {at(row + n * 8 + column_of(0)), at(row + n * 8 + column_of(1))};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own_decays[n][i] = row_of(i) >= n * 8 + column_of(i) ? scale * between(own[i / 2], columns[i % 2]) : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const bool is_own = n / 2 == row / 16;
      float columns[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) columns[i] = __shfl_sync(~0u, to_start[n / 4], n % 4 * 8 + column_of(i));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] *= is_own ? own_decays[n % 2][i] : columns[i % 2] * from_start[i / 2];
      }
    }
  }
};

// Has few CTAs run what `is_flagged`: a thread looks at one after another, the CTAs of a cluster at the same.
template <class IsFlagged, class Each>
__device__ inline void for_each_flagged(const Arguments& a, int slices, const IsFlagged& is_flagged, const Each& each) {
  const uint32_t count = a.sequences * a.heads * a.groups * slices;
  bool found = false;
  for (uint32_t cta = blockIdx.x + threadIdx.x * gridDim.x; cta < count; cta += kThreads * gridDim.x) {
    found = found || is_flagged(cta);
  }
  if (!__syncthreads_or(found)) return;
  for (uint32_t cta = blockIdx.x; cta < count; cta += gridDim.x) {
    if (is_flagged(cta)) each(cta);
  }
}

template <int K, int V, Result kResult, Part kPart>
struct CausalSum {
  static constexpr bool kReversed = kResult == Result::kDk || kResult == Result::kDv;
  // Whether x is a sum over its columns.
  static constexpr bool kIsOfKeys = kResult == Result::kDq || kResult == Result::kDk;
  static constexpr int kWidth = kIsOfKeys ? V : K, kAll = kIsOfKeys ? K : V;
  static constexpr int kSlices = kAll / kSumColumns;
  // Parts of the state that rows read, and of scores. Those of o and dv have a rounding to bf16.
  static constexpr int kParts = kResult == Result::kO ? 1 : 2;
  static constexpr int kScoreParts = kResult == Result::kDv ? 1 : 2;
  static constexpr int kTiles = kWidth / 8;
  // States [K, V] are transposed where columns are those of values.
  static constexpr int kRowStride = kIsOfKeys ? V : 1, kColumnStride = kIsOfKeys ? 1 : V;
  using Wide = Tile<kWidth>;
  using Narrow = Tile<kSumColumns>;
  static constexpr bool kHasRows = kPart == Part::kRows;
  // Slices of a CTA. Without rows both warpgroups compute states.
  static constexpr int kCtaSlices = kHasRows ? 1 : kSlices;
  static constexpr int kStageBytes = (kHasRows ? 2 : 1) * Wide::kBytes + kCtaSlices * Narrow::kBytes;
  static constexpr int kStages = kHasRows ? 2 : kStageBytes > 24 * 1024 ? 3 : 4;
  static constexpr int kSumsBytes = 2 * kChunk * 4;
  static constexpr int kStateBytes = kStages * (kStageBytes + kSumsBytes) + (kHasRows ? kParts * Wide::kBytes : 0);
  // Whether there is room for rows that leave, for two CTAs of a multiprocessor; else these take the place of left operands.
  static constexpr bool kHasRoom = kHasRows && kStateBytes <= 104 * 1024;
  static constexpr int kBytes = kStateBytes + (kHasRoom ? Narrow::kBytes : 0);
  // Whether CTAs of heads that share keys may add up dq and dk, whose rows each CTA of a cluster has a quarter of. After all
  // else two chunks' rows, of which neighbours are in different banks, and two barriers.
  static constexpr bool kAddsHeads = kHasClusters && kHasRows && kIsOfKeys && kWidth == 64;
  static constexpr int kCluster = kLinearCluster, kOwnRows = kChunk / kCluster;
  static constexpr int kRowBytes = kSumColumns * 4 + 32, kInboxBytes = kChunk * kRowBytes;
  static constexpr int kBytesOfCluster = kBytes + (kAddsHeads ? 2 * kInboxBytes + 16 : 0);
  using RowDecays = linear_attention::RowDecays<kReversed>;

  uint32_t base;

  __device__ Wide right(int c) const { return {base + c % kStages * kStageBytes}; }
  __device__ Narrow value(int c, int slice = 0) const {
    return {base + c % kStages * kStageBytes + Wide::kBytes + slice * Narrow::kBytes};
  }
  __device__ Wide left(int c) const { return {base + c % kStages * kStageBytes + Wide::kBytes + Narrow::kBytes}; }
  __device__ Wide state(int part) const { return {base + kStages * kStageBytes + part * Wide::kBytes}; }
  __device__ static float* sums(int c) {
    return reinterpret_cast<float*>(mma::shared_memory() + kStateBytes - (kStages - c % kStages) * kSumsBytes);
  }

  // Where a lane has two elements of tile n and of row `row` + lane / 4 in shared memory; eight rows on are 1024 bytes.
  template <class Rows>
  __device__ static uint32_t pair_at(const Rows& rows, int row, int n) {
    const int lane = threadIdx.x % 32;
    // Rows begin at multiples of 128 bytes, so that the swizzle is one operation.
    const uint32_t first = rows.base + (row + lane / 4) * 128 + (lane / 4 << 4 | lane % 4 << 2);
    return (first ^ n % 8 << 4) + n / 8 * Rows::kPanelBytes;
  }

  // An array's rows of a head, from the first token of the sequence on.
  struct Array {
    const Bits* first;
    int64_t stride;
  };

  __device__ static Array of_keys(const Arguments& a, const ChunkIndex& index, const void* from) {
    return {static_cast<const Bits*>(from) + (index.sequence * a.tokens * a.key_heads + index.key_head) * K,
            int64_t{a.key_heads} * K};
  }
  __device__ static Array of_values(const Arguments& a, const ChunkIndex& index, const void* from) {
    return {static_cast<const Bits*>(from) + (index.sequence * a.tokens * a.heads + index.head) * V,
            int64_t{a.heads} * V};
  }

  // Has kCopyThreads threads copy the rows of a chunk; zeros for tokens after the last.
  template <int kCopyThreads, int kColumns>
  __device__ static void copy(Tile<kColumns> to, const Array& from, int64_t token, int count, int column) {
    constexpr int kVectors = kColumns / 8, kStep = kCopyThreads / kVectors;
    static_assert(kStep % 8 == 0);
    const int vector = threadIdx.x % kVectors, row = threadIdx.x % kCopyThreads / kVectors;
    const uint32_t at = to.at(row, vector);
    const int t = RowDecays::token(row);
    const Bits* source = from.first + (token + t) * from.stride + column + vector * 8;
    const int64_t next = (kReversed ? -kStep : kStep) * from.stride;
    if (count == kChunk) {
#pragma unroll
      for (int i = 0; i < kChunk / kStep; ++i) {
        ptx::copy_async(at + i * kStep * 128, source, 16);
        source += next;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kChunk / kStep; ++i) {
        const bool is_there = RowDecays::token(row + i * kStep) < count;
        ptx::copy_async(at + i * kStep * 128, is_there ? source : from.first, is_there ? 16 : 0);
        source += next;
      }
    }
  }

  // A CTA's head, group and slice.
  struct Place {
    ChunkIndex index;
    int group, groups, slice;

    __device__ Place(const Arguments& a, int64_t head_group, int slice)
        : index(a, head_group / a.groups, 0), group(static_cast<int>(a.first / a.chunks + head_group % a.groups)),
          groups(static_cast<int>((a.all_chunks + a.chunks - 1) / a.chunks)), slice(slice) {}

    // Whether the CTA has to run again: in the place of b, which is 0.
    __device__ float* flag(const Arguments& a) const {
      return a.decays + (index.sequence_head * a.all_chunks + group * a.chunks) * kDecays + 2 * kChunk +
             static_cast<int>(kResult) * 2 + slice;
    }
  };

  __device__ static void run(const Arguments& a, int64_t head_group, int slice) {
    const Place place(a, head_group, slice);
    // What is not finite in what makes the state stays in it.
    if (!compute<false>(a, place) && kHasRows && threadIdx.x == 0) *place.flag(a) = 1.0f;
  }

  // With sums of a cluster, all of its CTAs run again.
  __device__ static bool is_flagged(const Arguments& a, int64_t head_group, int slice) {
    const Place place(a, head_group, slice);
    const float* flag = place.flag(a);
    if (!kAddsHeads || a.cluster == 1) return *flag != 0.0f;
    const int64_t next = int64_t{a.all_chunks} * kDecays;
    flag -= place.index.sequence_head % kCluster * next;
    float found = 0.0f;
#pragma unroll
    for (int i = 0; i < kCluster; ++i) found += flag[i * next];
    return found != 0.0f;
  }

  __device__ static void run(const Arguments& a) {
    if constexpr (kHasRows) {
      run(a, blockIdx.x / kSlices, blockIdx.x % kSlices);
    } else {
      // Of all groups but the last of the walk, whose state the walk with rows writes.
      const uint32_t head = blockIdx.x / (a.groups - 1), group = blockIdx.x % (a.groups - 1) + (kReversed ? 1 : 0);
      run(a, head * a.groups + group, kCtaSlices == 2 ? threadIdx.x / kWarpgroup : 0);
    }
  }
  __device__ static void run_exactly(const Arguments& a) {
    for_each_flagged(
        a, kSlices, [&](uint32_t cta) { return is_flagged(a, cta / kSlices, cta % kSlices); },
        [&](uint32_t cta) { compute<true>(a, Place(a, cta / kSlices, cta % kSlices)); });
  }

  // Returns whether the last state and the first column are finite, which a score that is not, masked or not, reaches.
  template <bool kExact>
  __device__ static bool compute(const Arguments& a, const Place& place) {
    const CausalSum s{ptx::shared_address(mma::shared_memory())};
    const ChunkIndex& index = place.index;
    if constexpr (kAddsHeads) {
      if (a.cluster > 1) s.meet_cluster();
    }
    const int column = place.slice * kSumColumns, first = place.group * static_cast<int>(a.chunks);
    const int rest = static_cast<int>(a.all_chunks) - first;
    const int chunks = kResult == Result::kO && a.groups == 1 ? rest : min(static_cast<int>(a.chunks), rest);
    const auto array = [&](const void* from, bool is_of_keys) {
      return is_of_keys ? of_keys(a, index, from) : of_values(a, index, from);
    };
    // dq and dk have columns of keys, from rows of values.
    const Array left = array(kResult == Result::kO    ? a.q
                             : kResult == Result::kDq ? a.dout
                             : kResult == Result::kDk ? a.v
                                                      : a.k,
                             !kIsOfKeys);
    const Array right = array(kResult == Result::kO    ? a.k
                              : kResult == Result::kDq ? a.v
                              : kResult == Result::kDk ? a.dout
                                                       : a.q,
                              !kIsOfKeys);
    const Array value = array(kResult == Result::kO    ? a.v
                              : kResult == Result::kDq ? a.k
                              : kResult == Result::kDk ? a.q
                                                       : a.dout,
                              kIsOfKeys);
    const auto chunk_of = [&](int c) { return kReversed ? first + chunks - 1 - c : first + c; };
    const auto count_of = [&](int chunk) {
      return static_cast<int>(min(int64_t{kChunk}, a.tokens - int64_t{chunk} * kChunk));
    };
    // Begins to load a chunk. The warpgroup of rows alone reads `left`, and writes its rows there.
    constexpr int kCopyThreads = kHasRows ? kWarpgroup : kThreads;
    const bool has_rows = threadIdx.x < kWarpgroup;
    const auto load = [&](int c) {
      if (c < chunks) {
        const int chunk = chunk_of(c), count = count_of(chunk);
        const int64_t token = int64_t{chunk} * kChunk;
        if (kHasRows && has_rows) {
          copy<kCopyThreads>(s.left(c), left, token, count, 0);
        } else {
          copy<kCopyThreads>(s.right(c), right, token, count, 0);
          if constexpr (kCtaSlices == 2) {
#pragma unroll
            for (int i = 0; i < 2; ++i) copy<kCopyThreads>(s.value(c, i), value, token, count, i * kSumColumns);
          } else {
            copy<kCopyThreads>(s.value(c), value, token, count, column);
          }
          if (const int i = threadIdx.x % kCopyThreads; i < 2 * kChunk / 4) {
            mma::copy(sums(c) + i * 4,
                      a.decays + (index.sequence_head * a.all_chunks + chunk) * kDecays + i * 4, true);
          }
        }
      }
      mma::commit();
    };
    const auto load_next = [&](int c) { load(c + kStages - 1); };
    for (int c = 0; c + 1 < kStages; ++c) load(c);
    publish();
    float found = 0.0f;
    if (!has_rows || kCtaSlices == 2) {
      // Of a cluster, also adds up the rows of a chunk that the CTAs send as they begin the next chunk: they have then read
      // the rows of the chunk two before, whose place these take.
      const auto receive = [&](int c) {
        if constexpr (kAddsHeads) {
          if (a.cluster > 1 && c >= 0) s.receive(a, place, c, chunk_of(c), count_of(chunk_of(c)));
        }
      };
      found = s.template walk<kExact>(a, place, chunks, load_next, receive);
      if constexpr (kAddsHeads) {
        if (a.cluster > 1) __syncthreads();
      }
      receive(chunks - 1);
    } else if constexpr (kHasRows) {
      found = s.template write_chunks<kExact>(a, place, chunks, chunk_of, count_of, load_next);
    } else {
      for (int c = 0; c < chunks; ++c) {
        __syncthreads();
        load_next(c);
        publish();
      }
    }
    const bool is_whole = !__syncthreads_or(!is_finite(found));
    if constexpr (kAddsHeads) {
      if (a.cluster > 1 && threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) ptx::mbarrier_invalidate(s.barrier(i));
      }
    }
    return is_whole;
  }

  // Waits for a thread's copies of the next chunk, and has GEMMs find what it wrote. The fence waits for all of the thread's
  // stores, so that those to global memory come after it.
  __device__ static void publish() {
    mma::wait<kStages - 2>();
    if constexpr (kHasWarpgroups) ptx::fence_async_shared();
  }

  // The state before the group, in the order of the walk, and where that after it goes.
  __device__ static const float* before(const Arguments& a, const Place& place) {
    const bool is_first = kReversed ? place.group + 1 == place.groups : place.group == 0;
    if (is_first) {
      return kReversed ? a.dafter + place.index.sequence_head * a.dafter_stride
                       : a.before + place.index.sequence_head * a.before_stride;
    }
    if (!kHasRows) return nullptr;
    return after(a, place.index.sequence_head, place.groups, place.group + (kReversed ? 1 : -1));
  }
  __device__ static float* after(const Arguments& a, int64_t sequence_head, int groups, int group) {
    return (kReversed ? a.group_dstates : a.after) + (sequence_head * groups + group) * (K * V);
  }

  // Has a warpgroup compute the state after each chunk. Returns NaN if the last is not finite, else 0.
  template <bool kExact, class Load, class Receive>
  __device__ float walk(const Arguments& a, const Place& place, int chunks, const Load& load_next,
                        const Receive& receive) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32, row = warp * 16;
    const int64_t own = int64_t{place.slice * kSumColumns + row} * kRowStride;
    Sums<kTiles> x;
    const float* from = before(a, place);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[n][i] = from == nullptr ? 0.0f
                                  : from[own + row_of(i) * kRowStride + (n * 8 + column_of(i)) * kColumnStride];
      }
    }
    if constexpr (kHasRows) {
      share(x, row);
      publish();
    }
    for (int c = 0; c < chunks; ++c) {
      __syncthreads();
      load_next(c);
      const RowDecays decays{sums(c)};
      // Of rows 2 `lane` and after it.
      float2 to_end = decays.to_end(lane * 2);
      if (kReversed) to_end.x *= a.scale, to_end.y *= a.scale;
      SplitOperand operand;
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        uint32_t v[4];
        // The transpose of 16 rows and the warp's 16 columns.
        const Narrow values = value(c, kCtaSlices == 2 ? place.slice : 0);
        mma::load_matrices_transposed(v, values.at(k * 16 + lane / 16 * 8 + lane % 8, row / 8 + lane / 8 % 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int from = k * 8 + half * 4 + lane % 4;
          const float2 by = make_float2(__shfl_sync(~0u, to_end.x, from), __shfl_sync(~0u, to_end.y, from));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t pair = v[half * 2 + i];
            operand.set(k, half * 2 + i, by.x * low_float(pair), by.y * high_float(pair));
          }
        }
      }
      const float total = decays.total();
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] *= total;
      }
      begin_products();
      multiply_along<kWidth>(x, operand, right(c));
      end_products();
      wait_for<0>(x);
      receive(c - 1);
      if (kHasRows && c + 1 < chunks) {
        hopper::meet<kThreads>(1);
        share(x, row);
      }
      publish();
      // Of one launch for all groups, and of one for each, which begins where that of the group after it ended.
      const int done = c + 1;
      if (kResult == Result::kO && a.groups == 1 && (done == chunks || done % static_cast<int>(a.chunks) == 0)) {
        write(x, after(a, place.index.sequence_head, place.groups, c / static_cast<int>(a.chunks)) + own);
      }
    }
    const bool is_last = kReversed ? place.group == 0 : place.group + 1 == place.groups;
    if (!kHasRows || (kResult == Result::kDk && a.groups == 1) ||
        (is_last && (kResult == Result::kDk || (kResult == Result::kO && a.groups > 1)))) {
      write(x, after(a, place.index.sequence_head, place.groups, place.group) + own);
    }
    if (kHasRows && kResult == Result::kDk && is_last) {
      write(x, a.dbefore + place.index.sequence_head * a.dbefore_stride + own);
    }
    return nan_unless_finite<false>(x);
  }

  __device__ static void write(const Sums<kTiles>& x, float* to) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[row_of(i) * kRowStride + (n * 8 + column_of(i)) * kColumnStride] = x[n][i];
    }
  }

  // Writes a warp's rows of the state to shared memory.
  __device__ void share(const Sums<kTiles>& x, int row) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t at = pair_at(state(0), row, n) + i / 2 * 1024;
        const Split split(x[n][i], x[n][i + 1]);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(split.high) : "memory");
        if constexpr (kParts == 2) {
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + Wide::kBytes), "r"(split.low) : "memory");
        }
      }
    }
  }

  // Has a warpgroup write the rows of all chunks. Those of a chunk leave while the next chunk's scores are computed. Returns
  // NaN if the first column is not finite, else 0.
  template <bool kExact, class ChunkOf, class CountOf, class Load>
  __device__ float write_chunks(const Arguments& a, const Place& place, int chunks, const ChunkOf& chunk_of,
                               const CountOf& count_of, const Load& load_next) const {
    const int row = threadIdx.x / 32 * 16;
    Sums<8> scores, y;
    uint32_t gate[2][8];
    float found = 0.0f;
    // Writes the rows of chunk c - 1, or sends them.
    const auto write_before = [&](int c) {
      if (c == 0) return;
      write_rows(a, place, y, gate, c - 1, chunk_of(c - 1), count_of(chunk_of(c - 1)));
      if constexpr (kAddsHeads) {
        if (a.cluster > 1) send(y, c - 1);
      }
    };
    for (int c = 0; c < chunks; ++c) {
      __syncthreads();
      begin_products();
      multiply_rows<kWidth>(scores, left(c), right(c), false);
      end_products();
      if constexpr (kHasRoom) load_next(c);
      write_before(c);
      if constexpr (!kHasRoom) {
        hopper::meet<kWarpgroup>(2);
        load_next(c);
      }
      begin_products();
      multiply_rows<kWidth>(y, left(c), state(0), false);
      if constexpr (kParts == 2) multiply_rows<kWidth>(y, left(c), state(1), true);
      end_products();
      const RowDecays decays{sums(c)};
      wait_for<1>(scores);
      // A branch, so that the wait for y comes after it.
      if (a.scale != 0.0f) {
        decays.mask(scores, row, a.scale);
      } else {
        clear(scores);
      }
      wait_for<0>(y);
      if (c + 1 < chunks) hopper::arrive<kThreads>(1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float factor = decays.from_start(row + row_of(2 * i)) * (kReversed ? 1.0f : a.scale);
#pragma unroll
        for (int n = 0; n < 8; ++n) y[n][2 * i] *= factor, y[n][2 * i + 1] *= factor;
      }
      if constexpr (kExact) {
        add_exactly(y, scores, value(c), row);
      } else {
        SplitOperand operand;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            operand.set(k, i, scores[2 * k + i / 2][i % 2 * 2], scores[2 * k + i / 2][i % 2 * 2 + 1]);
          }
        }
        begin_products();
        multiply_along<kSumColumns, kScoreParts>(y, operand, value(c));
        end_products();
      }
      if constexpr (kIsOfKeys) load_gate(gate, a, place, chunk_of(c), count_of(chunk_of(c)), row);
      if constexpr (!kExact) wait_for<0>(y);
      found = fmaf(y[0][0], 0.0f, fmaf(y[0][2], 0.0f, found));
      publish();
    }
    if constexpr (kAddsHeads) {
      if (a.cluster > 1) __syncthreads();
    }
    write_before(chunks);
    return found;
  }

  // The rows of chunk c that CTAs of a cluster sent, [rank, own rows], and the barrier that counts their bytes.
  __device__ uint32_t inbox(int c) const { return base + kBytes + c % 2 * kInboxBytes; }
  __device__ uint32_t barrier(int c) const { return base + kBytes + 2 * kInboxBytes + c % 2 * 8; }
  __device__ void expect_rows(int c) const {
    ptx::mbarrier_arrive_expect_tx(barrier(c), kChunk * kSumColumns * 4);
  }

  // Has the CTAs of a cluster begin.
  __device__ void meet_cluster() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) ptx::mbarrier_init(barrier(i), 1);
      ptx::fence_mbarrier_init();
      for (int i = 0; i < 2; ++i) expect_rows(i);
    }
    ptx::cluster_sync();
  }

  // Sends each CTA of the cluster its rows of chunk c: a warp has those of one.
  __device__ void send(const Sums<8>& y, int c) const {
    static_assert(kOwnRows == 16);
    const uint32_t cta = threadIdx.x / 32;
    const uint32_t first = inbox(c) + (ptx::cluster_rank() * kOwnRows + row_of(0)) * kRowBytes + column_of(0) * 4;
    const uint32_t to = ptx::in_cta(first, cta), at = ptx::in_cta(barrier(c), cta);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint64_t pair = uint64_t{__float_as_uint(y[n][i + 1])} << 32 | __float_as_uint(y[n][i]);
        ptx::send(to + i / 2 * 8 * kRowBytes + n * 32, pair, at);
      }
    }
  }

  // Has a warpgroup add up the CTA's rows of chunk c in the order of heads, and write them.
  __device__ void receive(const Arguments& a, const Place& place, int c, int chunk, int count) const {
    const int thread = threadIdx.x % kWarpgroup, column = thread % 16 * 4, at = place.slice * kSumColumns + column;
    const int rank = ptx::cluster_rank();
    ptx::mbarrier_wait(barrier(c), c / 2 % 2);
    if (thread == 0) expect_rows(c);
#pragma unroll
    for (int first = 0; first < kOwnRows; first += kWarpgroup / 16) {
      const int r = first + thread / 16, t = RowDecays::token(rank * kOwnRows + r);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kCluster; ++i) {
        const uint4 bits = ptx::load_shared(inbox(c) + (i * kOwnRows + r) * kRowBytes + column * 4);
        sum.x += __uint_as_float(bits.x), sum.y += __uint_as_float(bits.y);
        sum.z += __uint_as_float(bits.z), sum.w += __uint_as_float(bits.w);
      }
      if (t >= count) continue;
      if (float* parts = parts_of(a, place, chunk); parts != nullptr) {
        *reinterpret_cast<float4*>(parts + t * K + at) = sum;
      } else {
        const Array array = of_keys(a, place.index, kResult == Result::kDq ? a.dq : a.dk);
        *reinterpret_cast<uint2*>(const_cast<Bits*>(array.first) + (int64_t{chunk} * kChunk + t) * array.stride + at) =
            make_uint2(mma::pack(sum.x, sum.y), mma::pack(sum.z, sum.w));
      }
    }
  }

  // A chunk's parts of dq or dk, or null.
  __device__ static float* parts_of(const Arguments& a, const Place& place, int chunk) {
    float* parts = kResult == Result::kDq ? a.dq_parts : kResult == Result::kDk ? a.dk_parts : nullptr;
    if (parts == nullptr) return nullptr;
    const int64_t chunks = int64_t{a.groups} * a.chunks;
    return parts + (place.index.sequence_head / a.cluster * chunks + chunk - a.first) * (kChunk * K);
  }

  // Writes the rows of a chunk.
  __device__ void write_rows(const Arguments& a, const Place& place, const Sums<8>& y, const uint32_t (&gate)[2][8], int c,
                             int chunk, int count) const {
    const int row = threadIdx.x / 32 * 16, column = place.slice * kSumColumns;
    if constexpr (kIsOfKeys) write_exponents(a, place, y, gate, chunk, row);
    if (kAddsHeads && a.cluster > 1) return;
    if (float* parts = kIsOfKeys ? parts_of(a, place, chunk) : nullptr; parts != nullptr) {
      parts += column;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int t = RowDecays::token(row + row_of(i));
        if (t >= count) continue;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          *reinterpret_cast<float2*>(parts + t * K + n * 8 + column_of(i)) = make_float2(y[n][i], y[n][i + 1]);
        }
      }
      return;
    }
    // Through the warp's rows of shared memory. GEMMs of all four warps have read the left operand.
    const Narrow rows{kHasRoom ? base + kStateBytes : left(c).base};
    if (kHasRoom) __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(pair_at(rows, row, n) + i / 2 * 1024),
                     "r"(mma::pack(y[n][i], y[n][i + 1]))
                     : "memory");
      }
    }
    __syncwarp();
    Bits* to = static_cast<Bits*>(kResult == Result::kO    ? a.out
                                  : kResult == Result::kDq ? a.dq
                                  : kResult == Result::kDk ? a.dk
                                                           : a.dv);
    const Array array = kIsOfKeys ? of_keys(a, place.index, to) : of_values(a, place.index, to);
    Bits* first = const_cast<Bits*>(array.first) + int64_t{chunk} * kChunk * array.stride + column;
    const int lane = threadIdx.x % 32, own = row + lane / 8;
    first += RowDecays::token(own) * array.stride + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = own + 4 * i;
      if (RowDecays::token(r) < count) ptx::store_vector(first, ptx::load_shared(rows.at(r, lane % 8)));
      first += (kReversed ? -4 : 4) * array.stride;
    }
  }

  // Loads a lane's elements of q or k; zeros for tokens after the last.
  __device__ static void load_gate(uint32_t (&gate)[2][8], const Arguments& a, const Place& place, int chunk, int count,
                                   int row) {
    const Array array = of_keys(a, place.index, kResult == Result::kDq ? a.q : a.k);
    const Bits* from = array.first + int64_t{chunk} * kChunk * array.stride + place.slice * kSumColumns + column_of(0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = RowDecays::token(row + row_of(2 * i));
      const Bits* own = from + t * array.stride;
      const bool is_there = t < count;
#pragma unroll
      for (int n = 0; n < 8; ++n) gate[i][n] = is_there ? *reinterpret_cast<const uint32_t*>(own + n * 8) : 0u;
    }
  }

  // Writes sums over the slice of q . dq or k . dk.
  __device__ static void write_exponents(const Arguments& a, const Place& place, const Sums<8>& y,
                                         const uint32_t (&gate)[2][8], int chunk, int row) {
    float* to = a.exponents + ((place.index.sequence_head * a.all_chunks + chunk) * kExponents +
                               (kResult == Result::kDk ? 2 : 0) + place.slice) *
                                  kChunk;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        sum = fmaf(y[n][2 * i], low_float(gate[i][n]), fmaf(y[n][2 * i + 1], high_float(gate[i][n]), sum));
      }
      sum = sum_row(sum);
      if (threadIdx.x % 4 == 0) to[RowDecays::token(row + row_of(2 * i))] = sum;
    }
  }

  // Adds scores times values, a row of values after another: a row changes those alone where scores are not masked.
  __device__ static void add_exactly(Sums<8>& y, const Sums<8>& scores, Narrow values, int row) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int tile = 0; tile < 8; ++tile) {
#pragma unroll 2
      for (int rest = 0; rest < 8; ++rest) {
        const int j = tile * 8 + rest;
        float score[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) score[i] = __shfl_sync(~0u, scores[tile][2 * i + rest % 2], lane / 4 * 4 + rest / 2);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          uint32_t pair;
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(values.at(j, n) + lane % 4 * 4) : "memory");
          const float x[2] = {low_float(pair), high_float(pair)};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (row + row_of(i) >= j) y[n][i] = fmaf(score[i / 2], x[i % 2], y[n][i]);
          }
        }
      }
    }
  }
};

// The gradients of q, k and v: a CTA has a head, a group and a slice of one of them. CTAs of a multiprocessor have the same
// one, as instructions of two do not fit its cache: that takes 1.5 times as long.
template <int K, int V>
struct AllGradients {
  static constexpr uint32_t kOfKeys = K / kSumColumns, kOfValues = V / kSumColumns;
  template <Result kResult>
  using Sum = CausalSum<K, V, kResult, Part::kRows>;

  __device__ static void run(const Arguments& a) {
    const auto run = [&](auto sum, uint32_t head_group, int slice) { sum.run(a, head_group, slice); };
    of_cta(a, run, blockIdx.x);
  }
  __device__ static void run_exactly(const Arguments& a) {
    const auto is_flagged = [&](auto sum, uint32_t head_group, int slice) { return sum.is_flagged(a, head_group, slice); };
    const auto run = [&](auto sum, uint32_t head_group, int slice) {
      sum.template compute<true>(a, typename decltype(sum)::Place(a, head_group, slice));
    };
    for_each_flagged(
        a, 2 * kOfKeys + kOfValues, [&](uint32_t cta) { return of_cta(a, is_flagged, cta); },
        [&](uint32_t cta) { of_cta(a, run, cta); });
  }

  template <class Of>
  __device__ static auto of_cta(const Arguments& a, const Of& of, uint32_t cta) {
    const uint32_t of_keys = a.sequences * a.heads * a.groups * kOfKeys;
    if (cta >= 2 * of_keys) {
      cta -= 2 * of_keys;
      return of(Sum<Result::kDv>{}, cta / kOfValues, cta % kOfValues);
    }
    // Consecutive CTAs have the heads of a cluster.
    const uint32_t at = cta % of_keys, all = at / a.cluster, slice = all % kOfKeys, group = all / kOfKeys % a.groups;
    const uint32_t head = all / kOfKeys / a.groups * a.cluster + at % a.cluster;
    const uint32_t head_group = head * a.groups + group;
    if (cta < of_keys) return of(Sum<Result::kDq>{}, head_group, slice);
    return of(Sum<Result::kDk>{}, head_group, slice);
  }
};

// Adds to the states after groups, or their gradients before groups, those of the groups before them in the order of the
// walk, but for the last: a thread has four elements of a head's state.
template <bool kReversed>
__device__ inline void combine(const Arguments& a, int elements) {
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * 4, sequence_head = at / elements;
  if (sequence_head >= int64_t{a.sequences} * a.heads) return;
  const int groups = static_cast<int>((a.all_chunks + a.chunks - 1) / a.chunks);
  float* all = (kReversed ? a.group_dstates : a.after) + sequence_head * groups * elements + at % elements;
  const float* last = a.decays + sequence_head * a.all_chunks * kDecays + kChunk - 1;
  float4 state;
  for (int i = 0; i + 1 < groups; ++i) {
    const int group = kReversed ? groups - 1 - i : i;
    const uint32_t chunk = group * a.chunks;
    float4* here = reinterpret_cast<float4*>(all + int64_t{group} * elements);
    const float4 own = *here;
    if (i == 0) {
      state = own;
      continue;
    }
    // A lane adds up every 32nd exponent of the group.
    float high = 0.0f, low = 0.0f;
    for (uint32_t c = chunk + threadIdx.x % 32; c < min(chunk + a.chunks, a.all_chunks); c += 32) {
      high += last[c * kDecays], low += last[c * kDecays + kChunk];
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) high += mma::xor_lane(high, mask), low += mma::xor_lane(low, mask);
    const float decay = power(high + low);
    state = make_float4(fmaf(decay, state.x, own.x), fmaf(decay, state.y, own.y), fmaf(decay, state.z, own.z),
                        fmaf(decay, state.w, own.w));
    *here = state;
  }
}

// dg of a head and group.
template <int K, int V>
struct DecayGradients {
  __device__ static void run(const Arguments& a) {
    __shared__ float totals[2][kThreads / 32];
    const int groups = static_cast<int>((a.all_chunks + a.chunks - 1) / a.chunks);
    const int64_t sequence_head = blockIdx.x / groups;
    const int group = static_cast<int>(blockIdx.x % groups), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const ChunkIndex index(a, sequence_head, 0);
    constexpr int kElements = K * V;
    const float* states = a.after + (sequence_head * groups + group) * kElements;
    const float* dstates = a.group_dstates + (sequence_head * groups + group) * kElements;
    // At the beginning and at the end.
    const float* x[2] = {group == 0 ? a.before + sequence_head * a.before_stride : states - kElements, states};
    const float* dx[2] = {dstates, group + 1 == groups ? a.dafter + sequence_head * a.dafter_stride : dstates + kElements};
    float ends[2];
#pragma unroll
    for (int end = 0; end < 2; ++end) {
      float sum = 0.0f;
#pragma unroll 4
      for (int at = threadIdx.x * 4; at < kElements; at += kThreads * 4) {
        const float4 y = *reinterpret_cast<const float4*>(x[end] + at), z = *reinterpret_cast<const float4*>(dx[end] + at);
        sum += fmaf(y.x, z.x, y.y * z.y) + fmaf(y.z, z.z, y.w * z.w);
      }
      sum = sum_column(sum_row(sum));
      if (lane == 0) totals[end][warp] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int end = 0; end < 2; ++end) {
      ends[end] = 0.0f;
#pragma unroll
      for (int i = 0; i < kThreads / 32; ++i) ends[end] += totals[end][i];
    }
    // A chunk's x, token by token, and its sums before and from a token on.
    const int64_t first = int64_t{group} * a.chunks;
    const int chunks = static_cast<int>(min(int64_t{a.chunks}, int64_t{a.all_chunks} - first));
    const auto load = [&](int chunk, float (&pair)[2]) {
      const float* from = a.exponents + (sequence_head * a.all_chunks + first + chunk) * (kExponents * kChunk) + lane * 2;
      pair[0] = pair[1] = 0.0f;
#pragma unroll
      for (int i = 0; i < kExponents; ++i) {
        if (i % 2 >= K / kSumColumns) continue;
        const float2 y = *reinterpret_cast<const float2*>(from + i * kChunk);
        pair[0] += i < 2 ? y.x : -y.x, pair[1] += i < 2 ? y.y : -y.y;
      }
    };
    float* chunk_sums = reinterpret_cast<float*>(mma::shared_memory());
    for (int chunk = warp; chunk < chunks; chunk += kThreads / 32) {
      float pair[2];
      load(chunk, pair);
      const float sum = sum_column(sum_row(pair[0] + pair[1]));
      if (lane == 0) chunk_sums[chunk] = sum;
    }
    __syncthreads();
    for (int chunk = warp; chunk < chunks; chunk += kThreads / 32) {
      float pair[2], before = 0.0f, after = 0.0f;
      load(chunk, pair);
      for (int c = lane; c < chunks; c += 32) {
        if (c < chunk) before += chunk_sums[c];
        if (c > chunk) after += chunk_sums[c];
      }
      before = sum_column(sum_row(before)), after = sum_column(sum_row(after));
      float until = pair[0] + pair[1], from = until;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float earlier = mma::lane_before(until, distance), later = __shfl_down_sync(~0u, from, distance);
        if (lane >= distance) until += earlier;
        if (lane + distance < 32) from += later;
      }
      const float earlier = mma::lane_before(until, 1), later = __shfl_down_sync(~0u, from, 1);
      before += lane > 0 ? earlier : 0.0f, after += lane < 31 ? later : 0.0f;
      const float at_end[2] = {ends[1] + (after + (pair[0] + pair[1])), ends[1] + (after + pair[1])};
      const float at_start[2] = {ends[0] - before, ends[0] - (before + pair[0])};
      const bool is_late = 2 * chunk >= chunks;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t token = (first + chunk) * kChunk + lane * 2 + i;
        const bool takes_end = is_late ? is_finite(at_end[i]) : !is_finite(at_start[i]);
        if (token < a.tokens) {
          a.dg[(index.sequence * a.tokens + token) * a.heads + index.head] = takes_end ? at_end[i] : at_start[i];
        }
      }
    }
  }
};

}  // namespace xentile::linear_attention

namespace xentile {

// As in linear_attention.cuh; that of a cluster at K = V = 64.
inline constexpr uint32_t kLinearSumShared =
    linear_attention::CausalSum<128, 128, linear_attention::Result::kDk, linear_attention::Part::kRows>::kBytes;
inline constexpr uint32_t kLinearForwardShared =
    linear_attention::CausalSum<128, 128, linear_attention::Result::kO, linear_attention::Part::kRows>::kBytes;
inline constexpr uint32_t kLinearClusterSumShared =
    linear_attention::CausalSum<64, 64, linear_attention::Result::kDk, linear_attention::Part::kRows>::kBytesOfCluster;
inline constexpr uint32_t kLinearStatesShared =
    linear_attention::CausalSum<128, 128, linear_attention::Result::kDq, linear_attention::Part::kStates>::kBytes;

}  // namespace xentile

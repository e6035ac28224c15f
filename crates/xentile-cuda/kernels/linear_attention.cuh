// Linear attention and the gated delta rule in chunks of kLinearChunk tokens. Names are those of the formulas in program.py
// of the package pallas_bridge.
//
// The forward pass of one token is `Step`; without b, linear_attention_sums.cuh has all others. With b, they run in groups of
// chunks, so that arrays between kernels stay small. In a group, kernels with a CTA for each chunk and head compute everything
// that does not depend on states; a chain, with a CTA for each head and kLinearSlice columns of values, computes the rest:
//
//   forward:  decays, prepare, chain, outputs
//   backward: decays, prepare, chain, local gradients, reverse, gradients, and sums of heads that share keys
//
// States are f32 in the registers of a chain. In chains and gradients, computed matrices are the sums of two in bf16, so that
// no error grows from chunk to chunk, and dg and db, sums whose terms cancel, have none of bf16's. o reads states in bf16.
//
// A masked entry of a matrix is 0, and 0 times NaN or inf is NaN. What is not finite must reach no token that the recurrence
// keeps it from. Kernels look at results that it always reaches, such as the last state, and then run again with products of
// triangles that leave out what is masked (kExact), in functions that are not inlined, so that registers are those of the
// usual run.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mma.cuh"

namespace xentile {

// Mirrored by `Arguments` in src/linear_attention.rs. B sequences of T tokens, with H heads of q and k and H' of v; M is
// a sequence and head, N chunks are in the group.
struct LinearAttentionArguments {
  const void* q;  // [B, T, H, K]
  const void* k;
  const void* v;    // [B, T, H', V]
  const float* g;   // [B, T, H']
  const float* b;   // [B, T, H']; null without
  const void* dout;  // [B, T, H', V]
  const float* before;  // [M, .., K, V], the states before the group
  float* after;
  const float* dafter;  // their gradients, after and before the group
  float* dbefore;
  float* decays;   // [M, all chunks, 3, 64]: the sums of g in two parts, and b
  void* inverse;   // [M, N, 2, 64, 64]
  // Of these the backward pass has a high and a low part, in arrays [.., 2, .., V].
  void* states;    // [M, N, K, V], before each chunk
  void* values;    // [M, N, 64, V], those that enter the states
  float* dvalues_local;  // [M, N, 64, V], their gradients from outputs of the same chunk
  void* dstates;   // [M, N, K, V], after each chunk
  void* dsolved;   // [M, N, 64, V]
  void* out;       // [B, T, H', V]
  void* dq;
  void* dk;
  void* dv;
  float* dg;
  float* db;
  float* dq_parts;  // [M / cluster, N of all groups of a launch, 64, K]; null where a cluster has all heads that share keys
  float* dk_parts;
  // Without b.
  float* group_dstates;  // [M, groups, K, V], before each group
  float* exponents;      // [M, all chunks, 4, 64]: x in up to two slices each of dq and dk
  int64_t tokens;
  int64_t before_stride;  // elements from one M to the next
  int64_t after_stride;
  int64_t dafter_stride;
  int64_t dbefore_stride;
  uint32_t key_heads;
  uint32_t heads;
  uint32_t all_chunks;
  uint32_t first;   // chunk of the group
  uint32_t chunks;  // of the group
  uint32_t sequences;
  float scale;
  uint32_t groups;  // that a launch has, from `first` on; with b one
  // Heads whose dq and dk are added up within a cluster of CTAs, kLinearCluster or 1.
  uint32_t cluster;
};

// Mirrored by `NUMBERS` in src/linear_attention.rs.
inline constexpr uint32_t kLinearChunk = 64;
inline constexpr uint32_t kLinearSlice = 32;
inline constexpr uint32_t kLinearSumColumns = 64;
inline constexpr uint32_t kLinearThreads = 256;
inline constexpr uint32_t kLinearCluster = 4;
// CTAs that add up a chunk of heads that share keys.
inline constexpr uint32_t kLinearParts = 8;
// Of a CTA of `Step`: a warp has kLinearSlice columns of a head.
inline constexpr uint32_t kLinearStepThreads = 128;

namespace linear_attention {

using mma::Bits;
using Arguments = LinearAttentionArguments;

inline constexpr int kChunk = kLinearChunk;
inline constexpr int kSlice = kLinearSlice;
inline constexpr int kThreads = kLinearThreads;
inline constexpr int kStepThreads = kLinearStepThreads;
// Rows in shared memory have eight elements more than columns, so that those of a fragment are in different banks.
inline constexpr int kGap = 8;
inline constexpr int kSlicePitch = kSlice + kGap;
inline constexpr int kChunkPitch = kChunk + kGap;
inline constexpr int kDecays = 3 * kChunk;

using mma::high_float;
using mma::low_float;

__device__ inline float bits_to_float(Bits x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }

// A matrix in shared memory, of one part or two, and whether its rows are stored as columns.
template <bool kTransposed, bool kSplit = false>
struct Matrix {
  const Bits* high;
  int pitch;
  const Bits* low = nullptr;
};

// Loads 16 rows and 16 columns of the left operand of a GEMM.
template <bool kTransposed>
__device__ inline void load_left(uint32_t (&x)[4], const Bits* from, int pitch, int row, int k) {
  const int lane = threadIdx.x % 32;
  if constexpr (kTransposed) {
    mma::load_transposed(x, from + (k + lane / 16 * 8 + lane % 8) * pitch + row + lane / 8 % 2 * 8);
  } else {
    mma::load(x, from + (row + lane % 16) * pitch + k + lane / 16 * 8);
  }
}

// Loads 16 rows and 16 columns of the right operand, whose rows are stored as columns with `kTransposed`.
template <bool kTransposed>
__device__ inline void load_right(uint32_t (&x)[4], const Bits* from, int pitch, int k, int column) {
  const int lane = threadIdx.x % 32;
  if constexpr (kTransposed) {
    mma::load(x, from + (column + lane / 16 * 8 + lane % 8) * pitch + k + lane / 8 % 2 * 8);
  } else {
    mma::load_transposed(x, from + (k + lane % 16) * pitch + column + lane / 16 * 8);
  }
}

// Row and column of a lane's value `i` of a tile of 16 x 8.
__device__ inline int row_of(int i) { return threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ inline int column_of(int i) { return threadIdx.x % 4 * 2 + i % 2; }

template <int kTiles>
using Sums = float[kTiles][4];

template <int kTiles>
__device__ inline void clear(Sums<kTiles>& sums) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
  }
}

// Adds a warp's 16 rows and 8 kTiles columns of a GEMM over the indices from `begin` to `end`.
template <int kTiles, bool kLeftTransposed, bool kLeftSplit, bool kRightTransposed, bool kRightSplit>
__device__ inline void add_product(Sums<kTiles>& sums, Matrix<kLeftTransposed, kLeftSplit> left, int row,
                                   Matrix<kRightTransposed, kRightSplit> right, int column, int begin,
                                   int end) {
  static_assert(kTiles % 2 == 0);
#pragma unroll 4
  for (int k = begin; k < end; k += 16) {
    uint32_t a[4], low[4];
    load_left<kLeftTransposed>(a, left.high, left.pitch, row, k);
    if constexpr (kLeftSplit) load_left<kLeftTransposed>(low, left.low, left.pitch, row, k);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint32_t b[4];
      load_right<kRightTransposed>(b, right.high, right.pitch, k, column + n * 8);
      mma::multiply(sums[n], a, b[0], b[1]);
      mma::multiply(sums[n + 1], a, b[2], b[3]);
      if constexpr (kLeftSplit) {
        mma::multiply(sums[n], low, b[0], b[1]);
        mma::multiply(sums[n + 1], low, b[2], b[3]);
      }
      if constexpr (kRightSplit) {
        load_right<kRightTransposed>(b, right.low, right.pitch, k, column + n * 8);
        mma::multiply(sums[n], a, b[0], b[1]);
        mma::multiply(sums[n + 1], a, b[2], b[3]);
      }
    }
  }
}

// Whether a number is neither NaN nor inf.
__device__ inline bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// NaN if any of a lane's sums is not finite, else 0; of the upper 8 of 16 rows with `kUpperRows`.
template <bool kUpperRows, int kTiles>
__device__ inline float nan_unless_finite(const Sums<kTiles>& sums) {
  float found[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < (kUpperRows ? 2 : 4); ++i) found[i % 2] = fmaf(sums[n][i], 0.0f, found[i % 2]);
  }
  return found[0] + found[1];
}

// Adds the product of a tile on the diagonal, from fragments of a triangle, and 16 rows of `right` from `k` on, one after
// another: a row of `right` changes the rows of sums alone where the triangle is not masked.
template <bool kUpper, int kTiles, bool kRightTransposed, bool kRightSplit>
__device__ inline void add_diagonal(Sums<kTiles>& sums, const uint32_t (&high)[4], const uint32_t (&low)[4],
                                    Matrix<kRightTransposed, kRightSplit> right, int k, int column) {
#pragma unroll 1
  for (int only = 0; only < 16; ++only) {
    // A lane has two neighbouring rows of the upper 8, and of the lower 8.
    const uint32_t half = static_cast<int>(threadIdx.x) % 4 == only % 8 / 2 ? 0xffffu << only % 2 * 16 : 0;
    const uint32_t keep[2] = {only < 8 ? half : 0, only < 8 ? 0 : half};
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      Sums<2> found;
      clear(found);
      uint32_t b[4];
      load_right<kRightTransposed>(b, right.high, right.pitch, k, column + n * 8);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        mma::multiply(found[t], high, b[2 * t] & keep[0], b[2 * t + 1] & keep[1]);
        mma::multiply(found[t], low, b[2 * t] & keep[0], b[2 * t + 1] & keep[1]);
      }
      if constexpr (kRightSplit) {
        load_right<kRightTransposed>(b, right.low, right.pitch, k, column + n * 8);
#pragma unroll
        for (int t = 0; t < 2; ++t) mma::multiply(found[t], high, b[2 * t] & keep[0], b[2 * t + 1] & keep[1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_seen = kUpper ? row_of(i) <= only : row_of(i) >= only;
        sums[n][i] += is_seen ? found[0][i] : 0.0f;
        sums[n + 1][i] += is_seen ? found[1][i] : 0.0f;
      }
    }
  }
}

// Adds a warp's 16 rows of the product of a triangle [64, 64] in two parts, 0 above the diagonal, or below it with `kUpper`.
template <bool kUpper, bool kExact, int kTiles, bool kLeftTransposed, bool kRightTransposed, bool kRightSplit>
__device__ inline void add_triangle(Sums<kTiles>& sums, Matrix<kLeftTransposed, true> left, int row,
                                    Matrix<kRightTransposed, kRightSplit> right, int column) {
  const int end = kExact ? row : row + 16, begin = kExact ? row + 16 : row;
  add_product(sums, left, row, right, column, kUpper ? begin : 0, kUpper ? kChunk : end);
  if constexpr (kExact) {
    uint32_t high[4], low[4];
    load_left<kLeftTransposed>(high, left.high, left.pitch, row, row);
    load_left<kLeftTransposed>(low, left.low, left.pitch, row, row);
    add_diagonal<kUpper>(sums, high, low, right, row, column);
  }
}

// Two numbers, in a high part and a low part.
struct Split {
  uint32_t high, low;
  __device__ Split(float x, float y)
      : high(mma::pack(x, y)), low(mma::pack(x - low_float(high), y - high_float(high))) {}
};

__device__ inline void store_split(Bits* high, Bits* low, int at, float x, float y) {
  const Split split(x, y);
  *reinterpret_cast<uint32_t*>(high + at) = split.high;
  *reinterpret_cast<uint32_t*>(low + at) = split.low;
}

// Stores a warp's tiles in two parts.
template <int kTiles>
__device__ inline void store_tiles(Bits* high, Bits* low, int pitch, int row, int column,
                                 const Sums<kTiles>& sums) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int at = (row + row_of(i)) * pitch + column + n * 8 + column_of(i);
      store_split(high, low, at, sums[n][i], sums[n][i + 1]);
    }
  }
}

// Where a chunk's rows of a head begin in an array, the distance of rows, and how many exist.
struct RowBlock {
  int64_t first, stride;
  int count;
};

// The head, chunk and tokens of a CTA.
struct ChunkIndex {
  int64_t sequence_head;  // the index of M
  int64_t sequence;
  int head, key_head;
  int chunk;  // of the group

  __device__ ChunkIndex(const Arguments& a, int64_t sequence_head, int chunk)
      : sequence_head(sequence_head), sequence(static_cast<uint32_t>(sequence_head) / a.heads),
        head(static_cast<int>(static_cast<uint32_t>(sequence_head) % a.heads)),
        key_head(head / (a.heads / a.key_heads)), chunk(chunk) {}

  // That of a CTA of a kernel with one for each chunk and head.
  __device__ static ChunkIndex of_cta(const Arguments& a) {
    return ChunkIndex(a, blockIdx.x / a.chunks, blockIdx.x % a.chunks);
  }

  __device__ int64_t slot(const Arguments& a) const { return sequence_head * a.chunks + chunk; }
  __device__ int64_t token(const Arguments& a) const {
    return (static_cast<int64_t>(a.first) + chunk) * kChunk;
  }
  // Tokens of the chunk.
  __device__ int count(const Arguments& a) const {
    return static_cast<int>(min(int64_t{kChunk}, a.tokens - token(a)));
  }
  // Where row 0 of the chunk begins in [B, T, heads, columns], and the distance of rows.
  __device__ int64_t row(const Arguments& a, int64_t heads, int64_t head, int64_t columns) const {
    return ((sequence * a.tokens + token(a)) * heads + head) * columns;
  }
  // Rows of q and k [B, T, H, K].
  __device__ RowBlock key_rows(const Arguments& a, int64_t columns) const {
    return {row(a, a.key_heads, key_head, columns), int64_t{a.key_heads} * columns, count(a)};
  }
  __device__ const float* decays(const Arguments& a) const {
    return a.decays + (sequence_head * a.all_chunks + a.first + chunk) * kDecays;
  }
};

// Copies rows of kColumns elements, and zeros for those from `count` on.
template <int kColumns, int kRows, int kCopyThreads>
__device__ inline void copy_rows(Bits* to, int pitch, const Bits* from, int64_t stride, int count) {
  constexpr int kVectors = kColumns / 8;
#pragma unroll
  for (int first = 0; first < kRows * kVectors; first += kCopyThreads) {
    const int at = first + static_cast<int>(threadIdx.x);
    if (kRows * kVectors % kCopyThreads != 0 && at >= kRows * kVectors) break;
    const int row = at / kVectors, column = at % kVectors * 8;
    const bool is_there = row < count;
    mma::copy(to + row * pitch + column, is_there ? from + row * stride + column : from, is_there);
  }
}

// Copies a chunk of rows, which have kColumns + kGap elements in shared memory.
template <int kColumns, int kCopyThreads>
__device__ inline void copy_chunk(Bits* to, const void* from, const RowBlock& rows) {
  copy_rows<kColumns, kChunk, kCopyThreads>(to, kColumns + kGap, static_cast<const Bits*>(from) + rows.first,
                                            rows.stride, rows.count);
}

__device__ inline void copy_decays(float* to, const float* from) {
  if (threadIdx.x < kDecays / 4) {
    mma::copy(to + threadIdx.x * 4, from + threadIdx.x * 4, true);
  }
}

// Decays of a chunk from its sums of g.
struct Decays {
  const float* sums;
  __device__ float between(int i, int j) const {
    return mma::exponential((sums[i] - sums[j]) + (sums[kChunk + i] - sums[kChunk + j]));
  }
  __device__ float from_start(int i) const { return mma::exponential(sums[i] + sums[kChunk + i]); }
  __device__ float to_end(int i) const { return between(kChunk - 1, i); }
  __device__ float total() const { return from_start(kChunk - 1); }
  __device__ float b(int i) const { return sums[2 * kChunk + i]; }
};

// The sums of g of each chunk, a warp a chunk. Multiples of 1 / 1024 have exact sums. A g that is not finite adds kNotFinite:
// decays over its token are inf, as exponents are above -128 a token, and others do not change.
inline constexpr float kNotFinite = 16384.0f;

__device__ inline void decays(const Arguments& a) {
  // Warps of a CTA have neighbouring heads, which share sectors of g.
  const uint32_t warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, row = warp / a.heads, head = warp % a.heads;
  const int lane = threadIdx.x % 32;
  const int64_t sequence = row / a.all_chunks;
  if (sequence >= a.sequences) return;
  const int64_t chunk = (sequence * a.heads + head) * a.all_chunks + row % a.all_chunks;
  float high[2], low[2], b[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t token = chunk % a.all_chunks * kChunk + lane * 2 + i;
    const int64_t at = (sequence * a.tokens + token) * a.heads + head;
    const bool is_there = token < a.tokens;
    const float given = is_there ? a.g[at] : 0.0f, g = is_finite(given) ? given : 0.0f;
    b[i] = is_there && a.b != nullptr ? a.b[at] : 0.0f;
    high[i] = rintf(g * 1024.0f) / 1024.0f;
    low[i] = is_finite(given) ? g - high[i] : kNotFinite;
  }
  high[1] += high[0], low[1] += low[0];
  float before_high = high[1], before_low = low[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float earlier_high = mma::lane_before(before_high, distance);
    const float earlier_low = mma::lane_before(before_low, distance);
    if (lane >= distance) before_high += earlier_high, before_low += earlier_low;
  }
  before_high -= high[1], before_low -= low[1];
  float* to = a.decays + chunk * kDecays;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to[lane * 2 + i] = before_high + high[i];
    to[kChunk + lane * 2 + i] = before_low + low[i];
    to[2 * kChunk + lane * 2 + i] = b[i];
  }
}

// (I + A)^-1 of a chunk.
template <int K>
struct Prepare {
  static constexpr int kThreads = 128;
  static constexpr int kPitch = kChunk + 4;
  static constexpr int kBlock = 16, kBlockPitch = 20;

  Bits k[kChunk * (K + kGap)];
  float lower[kChunk * kPitch];
  float inverse[kChunk * kPitch];
  float product[3 * kBlock * kBlockPitch];
  float decays[kDecays];

  __device__ static void run(const Arguments& a) {
    Prepare& s = *reinterpret_cast<Prepare*>(mma::shared_memory());
    const ChunkIndex index = ChunkIndex::of_cta(a);
    copy_rows<K, kChunk, kThreads>(
        s.k, K + kGap, static_cast<const Bits*>(a.k) + index.row(a, a.key_heads, index.key_head, K),
        int64_t{a.key_heads} * K, index.count(a));
    copy_decays(s.decays, index.decays(a));
    mma::commit();
    mma::wait<0>();
    __syncthreads();
    const Decays decays{s.decays};
    const int row = threadIdx.x / 32 * 16;
    Sums<8> kk;
    clear(kk);
    add_product(kk, Matrix<false>{s.k, K + kGap}, row, Matrix<true>{s.k, K + kGap}, 0, 0, K);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + row_of(i), c = n * 8 + column_of(i);
        // The diagonal is looked at by `invert` alone.
        s.lower[r * kPitch + c] = r >= c ? decays.b(r) * kk[n][i] * decays.between(r, c) : 0.0f;
        s.inverse[r * kPitch + c] = 0.0f;
      }
    }
    __syncthreads();
    s.invert();
    Bits* to = static_cast<Bits*>(a.inverse) + index.slot(a) * 2 * kChunk * kChunk;
    for (int at = threadIdx.x; at < kChunk * kChunk / 2; at += kThreads) {
      const int r = at / (kChunk / 2), c = at % (kChunk / 2) * 2;
      const Split split(s.inverse[r * kPitch + c], s.inverse[r * kPitch + c + 1]);
      reinterpret_cast<uint32_t*>(to)[at] = split.high;
      reinterpret_cast<uint32_t*>(to + kChunk * kChunk)[at] = split.low;
    }
  }

  // Inverts blocks on the diagonal by forward substitution, and then what is below them, a diagonal after the other. Entries
  // depend on those of A alone that are between their row and their column.
  __device__ void invert() {
    bool bad = false;
    if (threadIdx.x < kChunk) {
      // b |k|^2 of a token, and an entry with all decays but the first.
      bad = !is_finite(lower[threadIdx.x * (kPitch + 1)]) || !is_finite(lower[(kChunk - 1) * kPitch]);
      const int first = threadIdx.x / kBlock * kBlock, column = threadIdx.x % kBlock;
      float x[kBlock];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int l = 0; l < i; ++l) x[i] = fmaf(-lower[(first + i) * kPitch + first + l], x[l], x[i]);
        inverse[(first + i) * kPitch + first + column] = x[i];
      }
    }
    if (__syncthreads_or(bad)) {
      substitute();
      return;
    }
    for (int distance = 1; distance < 4; ++distance) {
      const int strips = (4 - distance) * 64;
      for (int at = threadIdx.x; at < strips; at += kThreads) {
        const int block = at / 64, r = at / 4 % 16, c = at % 4 * 4;
        const int left = block * kBlock, below = (block + distance) * kBlock;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int l = left; l < below; ++l) {
          const float factor = lower[(below + r) * kPitch + l];
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] = fmaf(factor, inverse[l * kPitch + left + c + i], sum[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) product[(block * kBlock + r) * kBlockPitch + c + i] = sum[i];
      }
      __syncthreads();
      for (int at = threadIdx.x; at < strips; at += kThreads) {
        const int block = at / 64, r = at / 4 % 16, c = at % 4 * 4;
        const int left = block * kBlock, below = (block + distance) * kBlock;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int l = 0; l < kBlock; ++l) {
          const float factor = inverse[(below + r) * kPitch + below + l];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[i] = fmaf(-factor, product[(block * kBlock + l) * kBlockPitch + c + i], sum[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) inverse[(below + r) * kPitch + left + c + i] = sum[i];
      }
      __syncthreads();
    }
  }

  // Inverts a matrix that is not finite: a thread has a column.
  __noinline__ __device__ void substitute() {
    const int column = threadIdx.x;
    if (column < kChunk) {
#pragma unroll 1
      for (int i = 0; i < kChunk; ++i) {
        float x = i == column ? 1.0f : 0.0f;
#pragma unroll 1
        for (int l = column; l < i; ++l) x = fmaf(-lower[i * kPitch + l], inverse[l * kPitch + column], x);
        inverse[i * kPitch + column] = x;
      }
    }
    __syncthreads();
  }
};

// A warp's part of a slice of the state, in f32, and the state in shared memory in two parts.
template <int K>
struct State {
  static constexpr int kTiles = K == 128 ? 4 : 2;

  int row, column;
  Sums<kTiles> x;

  __device__ State() {
    const int warp = threadIdx.x / 32;
    row = warp % (K / 16) * 16;
    column = warp / (K / 16) * 16;
  }

  template <class Each>
  __device__ void for_pairs(Each each) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        each(row + row_of(i), column + n * 8 + column_of(i), x[n][i], x[n][i + 1]);
      }
    }
  }

  // From and to [K, V], of which the slice begins at the pointer.
  __device__ void read(const float* from, int columns) {
    for_pairs([&](int r, int c, float& left, float& right) {
      const float2 both = *reinterpret_cast<const float2*>(from + int64_t{r} * columns + c);
      left = both.x, right = both.y;
    });
  }
  __device__ void write(float* to, int columns) {
    for_pairs([&](int r, int c, float left, float right) {
      *reinterpret_cast<float2*>(to + int64_t{r} * columns + c) = make_float2(left, right);
    });
  }
  __device__ void share(Bits* high, Bits* low) {
    for_pairs([&](int r, int c, float left, float right) {
      store_split(high, low, r * kSlicePitch + c, left, right);
    });
  }
  __device__ bool is_finite() const { return linear_attention::is_finite(nan_unless_finite<false>(x)); }
  __device__ void scale(float factor) {
    for_pairs([&](int, int, float& left, float& right) { left *= factor, right *= factor; });
  }
  // Adds the product of the transposed `left` [64, K] and `right` [64, slice].
  __device__ void add(const Bits* left, const Bits* high, const Bits* low) {
    add_product(x, Matrix<true>{left, K + kGap}, row, Matrix<false, true>{high, kSlicePitch, low},
                column, 0, kChunk);
  }
};

// Writes a slice of a state in shared memory to [K, V], or with `both` to [2, K, V].
template <int K, int V>
__device__ inline void write_state(Bits* to, const Bits (&from)[2][K * kSlicePitch], bool both) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (part == 1 && !both) return;
#pragma unroll
    for (int at = threadIdx.x; at < K * (kSlice / 8); at += kThreads) {
      const int row = at / (kSlice / 8), column = at % (kSlice / 8) * 8;
      *reinterpret_cast<uint4*>(to + (part * K + row) * V + column) =
          *reinterpret_cast<const uint4*>(from[part] + row * kSlicePitch + column);
    }
  }
}

// Scales rows [64, slice] by a factor a row, in two parts.
template <class Factor>
__device__ inline void scale_rows(Bits* high, Bits* low, const Bits* from, Factor factor) {
  const int row = threadIdx.x / 4, first = row * kSlicePitch + threadIdx.x % 4 * 8;
  const float by = factor(row);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(from + first + i);
    store_split(high, low, first + i, by * low_float(pair), by * high_float(pair));
  }
}

__device__ inline void copy_inverse(Bits* to, const Arguments& a, const ChunkIndex& index) {
  const Bits* from = static_cast<const Bits*>(a.inverse) + index.slot(a) * 2 * kChunk * kChunk;
  copy_rows<kChunk, 2 * kChunk, kThreads>(to, kChunkPitch, from, kChunk, 2 * kChunk);
}

// States from chunk to chunk, and the values that enter them.
template <int K, int V>
struct Chain {
  static constexpr int kStages = 2;

  struct Stage {
    Bits k[kChunk * (K + kGap)];
    Bits v[kChunk * kSlicePitch];
    float decays[kDecays];
    Bits inverse[2 * kChunk * kChunkPitch];
  };

  Stage stages[kStages];
  Bits state[2][K * kSlicePitch];
  Bits unseen[2][kChunk * kSlicePitch];
  Bits values[2][kChunk * kSlicePitch];

  __device__ void load(const Arguments& a, const ChunkIndex& index, int column) {
    Stage& stage = stages[index.chunk % kStages];
    const int count = index.count(a);
    copy_rows<K, kChunk, kThreads>(
        stage.k, K + kGap,
        static_cast<const Bits*>(a.k) + index.row(a, a.key_heads, index.key_head, K),
        int64_t{a.key_heads} * K, count);
    copy_rows<kSlice, kChunk, kThreads>(
        stage.v, kSlicePitch,
        static_cast<const Bits*>(a.v) + index.row(a, a.heads, index.head, V) + column,
        int64_t{a.heads} * V, count);
    copy_decays(stage.decays, index.decays(a));
    copy_inverse(stage.inverse, a, index);
  }

  __device__ static void run(const Arguments& a) {
    Chain& s = *reinterpret_cast<Chain*>(mma::shared_memory());
    constexpr int kSlices = V / kSlice;
    const int64_t sequence_head = blockIdx.x / kSlices;
    const int column = static_cast<int>(blockIdx.x % kSlices) * kSlice;
    if (!s.template compute<false>(a, sequence_head, column)) s.compute_exactly(a, sequence_head, column);
  }

  __noinline__ __device__ void compute_exactly(const Arguments& a, int64_t sequence_head, int column) {
    compute<true>(a, sequence_head, column);
  }

  // Returns false if it has to run again.
  template <bool kExact>
  __device__ bool compute(const Arguments& a, int64_t sequence_head, int column) {
    Chain& s = *this;
    const int chunks = static_cast<int>(a.chunks), parts = a.dout == nullptr ? 1 : 2;
    State<K> state;
    state.read(a.before + sequence_head * a.before_stride + column, V);
    for (int c = 0; c < kStages - 1; ++c) {
      if (c < chunks) s.load(a, ChunkIndex(a, sequence_head, c), column);
      mma::commit();
    }
    state.share(s.state[0], s.state[1]);
    const int warp = threadIdx.x / 32, row = warp % 4 * 16, part = warp / 4 * 16;
    for (int c = 0; c < chunks; ++c) {
      const ChunkIndex index(a, sequence_head, c);
      mma::wait<kStages - 2>();
      __syncthreads();
      if (c + kStages - 1 < chunks) s.load(a, ChunkIndex(a, sequence_head, c + kStages - 1), column);
      mma::commit();
      const Stage& stage = s.stages[c % kStages];
      const Decays decays{stage.decays};
      write_state<K, V>(static_cast<Bits*>(a.states) + index.slot(a) * parts * K * V + column, s.state, parts > 1);
      Sums<2> seen, values;
      clear(seen);
      clear(values);
      add_product(seen, Matrix<false>{stage.k, K + kGap}, row,
                  Matrix<false, true>{s.state[0], kSlicePitch, s.state[1]}, part, 0, K);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + row_of(i);
        const float from_start = decays.from_start(r), b = decays.b(r);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float v = bits_to_float(stage.v[r * kSlicePitch + part + n * 8 + column_of(i)]);
          seen[n][i] = b * (v - from_start * seen[n][i]);
        }
      }
      store_tiles(s.unseen[0], s.unseen[1], kSlicePitch, row, part, seen);
      __syncthreads();
      add_triangle<false, kExact>(
          values, Matrix<false, true>{stage.inverse, kChunkPitch, stage.inverse + kChunk * kChunkPitch}, row,
          Matrix<false, true>{s.unseen[0], kSlicePitch, s.unseen[1]}, part);
      Bits* to = static_cast<Bits*>(a.values) + index.slot(a) * parts * kChunk * V + column + part;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int r = row + row_of(i);
        const float to_end = decays.to_end(r);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int at = n * 8 + column_of(i);
          const Split split(values[n][i], values[n][i + 1]);
          *reinterpret_cast<uint32_t*>(to + r * V + at) = split.high;
          if (parts > 1) *reinterpret_cast<uint32_t*>(to + (kChunk + r) * V + at) = split.low;
          store_split(s.values[0], s.values[1], r * kSlicePitch + part + at, to_end * values[n][i],
              to_end * values[n][i + 1]);
        }
      }
      __syncthreads();
      state.scale(decays.total());
      state.add(stage.k, s.values[0], s.values[1]);
      state.share(s.state[0], s.state[1]);
    }
    mma::wait<0>();
    if (!kExact && __syncthreads_or(!state.is_finite())) return false;
    if (a.after != nullptr) state.write(a.after + sequence_head * a.after_stride + column, V);
    return true;
  }
};

// The gradients of states from chunk to chunk, backwards, and those of the values before the inverse.
template <int K, int V>
struct Reverse {
  static constexpr int kStages = 2;
  static constexpr int kLocalPitch = kSlice + 4;

  struct Stage {
    Bits q[kChunk * (K + kGap)];
    Bits dout[kChunk * kSlicePitch];
    float decays[kDecays];
    Bits k[kChunk * (K + kGap)];
    Bits inverse[2 * kChunk * kChunkPitch];
    float dvalues_local[kChunk * kLocalPitch];
  };

  Stage stages[kStages];
  Bits dstate[2][K * kSlicePitch];
  Bits dseen[2][kChunk * kSlicePitch];
  Bits dvalues[2][kChunk * kSlicePitch];
  Bits dsolved[2][kChunk * kSlicePitch];

  __device__ void load(const Arguments& a, const ChunkIndex& index, int column) {
    Stage& stage = stages[index.chunk % kStages];
    const int count = index.count(a);
    const int64_t keys = index.row(a, a.key_heads, index.key_head, K), stride = int64_t{a.key_heads} * K;
    copy_rows<K, kChunk, kThreads>(stage.q, K + kGap, static_cast<const Bits*>(a.q) + keys, stride, count);
    copy_rows<kSlice, kChunk, kThreads>(
        stage.dout, kSlicePitch,
        static_cast<const Bits*>(a.dout) + index.row(a, a.heads, index.head, V) + column,
        int64_t{a.heads} * V, count);
    copy_decays(stage.decays, index.decays(a));
    copy_rows<K, kChunk, kThreads>(stage.k, K + kGap, static_cast<const Bits*>(a.k) + keys, stride, count);
    copy_inverse(stage.inverse, a, index);
    const float* from = a.dvalues_local + index.slot(a) * kChunk * V + column;
    for (int at = threadIdx.x; at < kChunk * (kSlice / 4); at += kThreads) {
      const int row = at / (kSlice / 4), c = at % (kSlice / 4) * 4;
      mma::copy(stage.dvalues_local + row * kLocalPitch + c, from + row * V + c, true);
    }
  }

  __device__ static void run(const Arguments& a) {
    Reverse& s = *reinterpret_cast<Reverse*>(mma::shared_memory());
    constexpr int kSlices = V / kSlice;
    const int64_t sequence_head = blockIdx.x / kSlices;
    const int column = static_cast<int>(blockIdx.x % kSlices) * kSlice;
    if (!s.template compute<false>(a, sequence_head, column)) s.compute_exactly(a, sequence_head, column);
  }

  __noinline__ __device__ void compute_exactly(const Arguments& a, int64_t sequence_head, int column) {
    compute<true>(a, sequence_head, column);
  }

  // Returns false if it has to run again; dbefore, which may be dafter, is not written then.
  template <bool kExact>
  __device__ bool compute(const Arguments& a, int64_t sequence_head, int column) {
    Reverse& s = *this;
    State<K> dstate;
    dstate.read(a.dafter + sequence_head * a.dafter_stride + column, V);
    int next_chunk = static_cast<int>(a.chunks) - 1;
    const auto load_next = [&] {
      if (next_chunk >= 0) s.load(a, ChunkIndex(a, sequence_head, next_chunk), column);
      --next_chunk;
      mma::commit();
    };
    for (int i = 0; i < kStages - 1; ++i) load_next();
    dstate.share(s.dstate[0], s.dstate[1]);
    const int warp = threadIdx.x / 32, row = warp % 4 * 16, part = warp / 4 * 16;
    for (int c = static_cast<int>(a.chunks) - 1; c >= 0; --c) {
      const ChunkIndex index(a, sequence_head, c);
      mma::wait<kStages - 2>();
      __syncthreads();
      load_next();
      const Stage& stage = s.stages[c % kStages];
      const Decays decays{stage.decays};
      write_state<K, V>(static_cast<Bits*>(a.dstates) + index.slot(a) * 2 * K * V + column, s.dstate, true);
      scale_rows(s.dseen[0], s.dseen[1], stage.dout,
                 [&](int r) { return a.scale * decays.from_start(r); });
      Sums<2> dvalues, dsolved;
      clear(dvalues);
      clear(dsolved);
      add_product(dvalues, Matrix<false>{stage.k, K + kGap}, row,
                  Matrix<false, true>{s.dstate[0], kSlicePitch, s.dstate[1]}, part, 0, K);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + row_of(i);
        const float to_end = decays.to_end(r);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float dvalues_local = stage.dvalues_local[r * kLocalPitch + part + n * 8 + column_of(i)];
          dvalues[n][i] = dvalues_local + to_end * dvalues[n][i];
        }
      }
      store_tiles(s.dvalues[0], s.dvalues[1], kSlicePitch, row, part, dvalues);
      __syncthreads();
      add_triangle<true, kExact>(
          dsolved, Matrix<true, true>{stage.inverse, kChunkPitch, stage.inverse + kChunk * kChunkPitch}, row,
          Matrix<false, true>{s.dvalues[0], kSlicePitch, s.dvalues[1]}, part);
      Bits* to = static_cast<Bits*>(a.dsolved) + index.slot(a) * 2 * kChunk * V + column + part;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int r = row + row_of(i);
        const float factor = -decays.from_start(r) * decays.b(r);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int at = n * 8 + column_of(i);
          store_split(to, to + kChunk * V, r * V + at, dsolved[n][i], dsolved[n][i + 1]);
          store_split(s.dsolved[0], s.dsolved[1], r * kSlicePitch + part + at, factor * dsolved[n][i],
              factor * dsolved[n][i + 1]);
        }
      }
      __syncthreads();
      dstate.scale(decays.total());
      dstate.add(stage.q, s.dseen[0], s.dseen[1]);
      dstate.add(stage.k, s.dsolved[0], s.dsolved[1]);
      dstate.share(s.dstate[0], s.dstate[1]);
    }
    mma::wait<0>();
    if (!kExact && __syncthreads_or(!dstate.is_finite())) return false;
    dstate.write(a.dbefore + sequence_head * a.dbefore_stride + column, V);
    return true;
  }
};

// Multiplies the scores of a warp's 16 rows by `scale` and their decays, and masks those after the diagonal.
template <int kTiles>
__device__ inline void decay_scores(Sums<kTiles>& scores, int row, int column, float scale, const Decays& decays) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row + row_of(i), c = column + n * 8 + column_of(i);
      // Computed for all, as branches would have each exponential wait for the one before.
      const float score = scale * scores[n][i] * decays.between(r, c);
      scores[n][i] = r >= c ? score : 0.0f;
    }
  }
}

// Adds the product of a warp's 16 rows of scores [64, 64] from `row` on, in two parts, and `values` to sums. Scores after
// the 16 columns from `last` are 0.
template <bool kExact, int kTiles>
__device__ inline void add_scores(Sums<kTiles>& sums, const Sums<8>& scores, int row, int last, const Bits* values,
                                  int pitch) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k * 16 <= (kExact ? row : last)) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &scores[2 * k + i / 2][i % 2 * 2];
        const Split split(pair[0], pair[1]);
        high[i] = split.high, low[i] = split.low;
      }
      if (kExact && k * 16 == row) {
        add_diagonal<false>(sums, high, low, Matrix<false>{values, pitch}, row, 0);
        continue;
      }
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        uint32_t b[4];
        load_right<false>(b, values, pitch, k * 16, n * 8);
        mma::multiply(sums[n], high, b[0], b[1]);
        mma::multiply(sums[n + 1], high, b[2], b[3]);
        mma::multiply(sums[n], low, b[0], b[1]);
        mma::multiply(sums[n + 1], low, b[2], b[3]);
      }
    }
  }
}

// Writes a warp's 16 rows in bf16 to shared memory.
template <int kTiles>
__device__ inline void store_rounded(Bits* to, int pitch, const Sums<kTiles>& sums) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      *reinterpret_cast<uint32_t*>(to + row_of(i) * pitch + n * 8 + column_of(i)) = mma::pack(sums[n][i], sums[n][i + 1]);
    }
  }
}

// o of a chunk, of the delta rule.
template <int K, int V>
struct Outputs {
  static constexpr int kThreads = 128;

  Bits q[kChunk * (K + kGap)];
  Bits k[kChunk * (K + kGap)];
  Bits values[kChunk * (V + kGap)];
  Bits state[K * (V + kGap)];
  float decays[kDecays];

  __device__ static void run(const Arguments& a) {
    Outputs& s = *reinterpret_cast<Outputs*>(mma::shared_memory());
    const ChunkIndex index = ChunkIndex::of_cta(a);
    const RowBlock keys = index.key_rows(a, K);
    copy_chunk<K, kThreads>(s.q, a.q, keys);
    copy_chunk<K, kThreads>(s.k, a.k, keys);
    copy_decays(s.decays, index.decays(a));
    mma::commit();
    copy_rows<V, K, kThreads>(s.state, V + kGap, static_cast<const Bits*>(a.states) + index.slot(a) * K * V, V, K);
    copy_rows<V, kChunk, kThreads>(s.values, V + kGap, static_cast<const Bits*>(a.values) + index.slot(a) * kChunk * V, V,
                                   kChunk);
    mma::commit();
    mma::wait<1>();
    __syncthreads();
    if (!s.template compute<false>(a, index)) s.compute_exactly(a);
  }

  __noinline__ __device__ void compute_exactly(const Arguments& a) { compute<true>(a, ChunkIndex::of_cta(a)); }

  // Returns false if it has to run again.
  template <bool kExact>
  __device__ bool compute(const Arguments& a, const ChunkIndex& index) {
    Outputs& s = *this;
    const Decays decays{s.decays};
    const int row = threadIdx.x / 32 * 16;
    Sums<8> scores;
    clear(scores);
    // Columns after the last row of the warp are masked.
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      if (n * 8 <= row) {
        add_product(*reinterpret_cast<Sums<2>*>(scores[n]), Matrix<false>{s.q, K + kGap}, row,
                    Matrix<true>{s.k, K + kGap}, n * 8, 0, K);
      }
    }
    decay_scores(scores, row, 0, a.scale, decays);
    mma::wait<0>();
    __syncthreads();
    const float factors[2] = {a.scale * decays.from_start(row + row_of(0)),
                              a.scale * decays.from_start(row + row_of(2))};
    Sums<V / 8> o;
    clear(o);
    add_product(o, Matrix<false>{s.q, K + kGap}, row, Matrix<false>{s.state, V + kGap}, 0, 0, K);
#pragma unroll
    for (int n = 0; n < V / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] *= factors[i / 2];
    }
    add_scores<kExact>(o, scores, row, row, s.values, V + kGap);
    // A masked value that is not finite has spoiled a whole column. Afterwards o goes through shared memory, so that rows are
    // written whole.
    if (__syncthreads_or(!kExact && !is_finite(nan_unless_finite<true>(o)))) return false;
    store_rounded(s.values + row * (V + kGap), V + kGap, o);
    __syncthreads();
    Bits* to = static_cast<Bits*>(a.out) + index.row(a, a.heads, index.head, V);
    for (int at = threadIdx.x; at < index.count(a) * (V / 8); at += kThreads) {
      const int r = at / (V / 8), c = at % (V / 8) * 8;
      *reinterpret_cast<uint4*>(to + r * (int64_t{a.heads} * V) + c) =
          *reinterpret_cast<const uint4*>(s.values + r * (V + kGap) + c);
    }
    return true;
  }
};

// The gradients of a chunk's values from outputs of the same chunk.
template <int K, int V>
struct LocalGradients {
  static constexpr int kThreads = 128;

  Bits q[kChunk * (K + kGap)];
  Bits k[kChunk * (K + kGap)];
  Bits dout[kChunk * (V + kGap)];
  Bits scores[2][kChunk * kChunkPitch];
  float decays[kDecays];

  __device__ static void run(const Arguments& a) {
    LocalGradients& s = *reinterpret_cast<LocalGradients*>(mma::shared_memory());
    const ChunkIndex index = ChunkIndex::of_cta(a);
    const RowBlock keys = index.key_rows(a, K);
    copy_chunk<K, kThreads>(s.q, a.q, keys);
    copy_chunk<K, kThreads>(s.k, a.k, keys);
    copy_chunk<V, kThreads>(s.dout, a.dout, {index.row(a, a.heads, index.head, V), int64_t{a.heads} * V, keys.count});
    copy_decays(s.decays, index.decays(a));
    mma::commit();
    mma::wait<0>();
    __syncthreads();
    const Decays decays{s.decays};
    const int row = threadIdx.x / 32 * 16;
    Sums<8> scores;
    clear(scores);
    add_product(scores, Matrix<false>{s.q, K + kGap}, row, Matrix<true>{s.k, K + kGap}, 0, 0, K);
    decay_scores(scores, row, 0, a.scale, decays);
    store_tiles(s.scores[0], s.scores[1], kChunkPitch, row, 0, scores);
    __syncthreads();
    if (!s.template compute<false>(a, index, row)) s.compute_exactly(a, row);
  }

  __noinline__ __device__ void compute_exactly(const Arguments& a, int row) {
    compute<true>(a, ChunkIndex::of_cta(a), row);
  }

  // Has a warp write 16 rows from the scores. Returns false if it has to run again, as in `Outputs`.
  template <bool kExact>
  __device__ bool compute(const Arguments& a, const ChunkIndex& index, int row) {
    LocalGradients& s = *this;
    Sums<V / 8> dvalues_local;
    clear(dvalues_local);
    add_triangle<true, kExact>(dvalues_local, Matrix<true, true>{s.scores[0], kChunkPitch, s.scores[1]}, row,
                               Matrix<false>{s.dout, V + kGap}, 0);
    if (!kExact && __any_sync(~0u, !is_finite(nan_unless_finite<true>(dvalues_local)))) return false;
    float* to = a.dvalues_local + index.slot(a) * kChunk * V;
#pragma unroll
    for (int n = 0; n < V / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        *reinterpret_cast<float2*>(to + (row + row_of(i)) * V + n * 8 + column_of(i)) =
            make_float2(dvalues_local[n][i], dvalues_local[n][i + 1]);
      }
    }
    return true;
  }
};

// Adds up the values of the four lanes of a row.
__device__ inline float sum_row(float x) {
  x += mma::xor_lane(x, 1);
  return x + mma::xor_lane(x, 2);
}

// Adds up the values of the eight lanes of a column.
__device__ inline float sum_column(float x) {
  x += mma::xor_lane(x, 4);
  x += mma::xor_lane(x, 8);
  return x + mma::xor_lane(x, 16);
}

// The gradients of a chunk's arguments. Columns of values pass through shared memory a slice at a time. States, their
// gradients and solved values are in two parts each.
template <int K, int V>
struct Gradients {
  static constexpr int kRow = kChunk * kSlicePitch, kTiles = K / 16;

  // A slice of each array.
  struct Stage {
    Bits state[2][K * kSlicePitch];
    Bits dstate[2][K * kSlicePitch];
    Bits dout[kRow];
    Bits values[2][kRow];
    Bits dsolved[2][kRow];
  };

  Stage stages[2];
  Bits q[kChunk * (K + kGap)];
  Bits k[kChunk * (K + kGap)];
  // The gradients of q k', and those of k k'.
  Bits dqk[2][kChunk * kChunkPitch];
  Bits other[2][kChunk * kChunkPitch];
  float decays[kDecays];
  // Gradients of exponents: sums over rows and over columns of the warps, and over the decays from the start and to the end.
  float rows[2][kChunk];
  float columns[4][kChunk];
  float start[2][kChunk];
  float end[2][kChunk];
  float b_sums[5][kChunk];
  float states_sums[8];

  __device__ static void run(const Arguments& a) {
    Gradients& s = *reinterpret_cast<Gradients*>(mma::shared_memory());
    if (!s.template compute<false>(a)) s.compute_exactly(a);
  }

  __noinline__ __device__ void compute_exactly(const Arguments& a) { compute<true>(a); }

  // Returns false if it has to run again. A warp has 16 rows, and half of the columns.
  template <bool kExact>
  __device__ bool compute(const Arguments& a) {
    const ChunkIndex index = ChunkIndex::of_cta(a);
    const int warp = threadIdx.x / 32, half = warp / 4, row = warp % 4 * 16;
    const RowBlock keys = index.key_rows(a, K);
    copy_chunk<K, kThreads>(q, a.q, keys);
    copy_chunk<K, kThreads>(k, a.k, keys);
    copy_decays(this->decays, index.decays(a));
    load(a, index, 0);
    load(a, index, 1);
    const Decays decays{this->decays};
    // Sums over columns of values.
    Sums<kTiles> dq, dk, seen;
    Sums<4> qk, dscores, dlower;
    clear(dq), clear(dk), clear(dscores);
    clear(seen), clear(dlower);
    float state_sum = 0.0f, b_sum = 0.0f;
    for (int slice = 0; slice < V / kSlice; ++slice) {
      mma::wait<1>();
      __syncthreads();
      const Stage& stage = stages[slice % 2];
      add_slice(stage, row, half, dq, dk, seen, dscores, dlower);
      b_sum += write_dv_slice(a, index, decays, stage, slice * kSlice);
      state_sum += multiply_states(stage);
      __syncthreads();
      load(a, index, slice + 2);
    }
    // Four lanes have a row of dv.
    b_sum = sum_row(b_sum);
    if (threadIdx.x % 4 == 0) b_sums[2][threadIdx.x / 4] = b_sum;
    scores(qk, q, row, half);
    state_sum = sum_column(sum_row(state_sum));
    if (threadIdx.x % 32 == 0) states_sums[warp] = state_sum;
    exponents(a, decays, row, half, qk, dscores, dlower);
    __syncthreads();
    const bool is_finite = this->template keys<kExact>(a, index, decays, row, half, dq, dk, seen);
    const bool found = __syncthreads_or(!is_finite);
    if constexpr (kExact) {
      write_dg_exactly(a, index, decays);
    } else if (!found) {
      write_dg(a, index, decays);
    }
    return !found;
  }

  // Loads a slice, if there is one.
  __device__ void load(const Arguments& a, const ChunkIndex& index, int slice) {
    if (slice < V / kSlice) {
      Stage& stage = stages[slice % 2];
      const int column = slice * kSlice, count = index.count(a);
      const int64_t values = index.row(a, a.heads, index.head, V) + column, stride = int64_t{a.heads} * V;
      const auto copy = [&](auto rows, Bits* to, const void* from, int64_t first, int64_t stride, int count) {
        copy_rows<kSlice, rows.value, kThreads>(to, kSlicePitch, static_cast<const Bits*>(from) + first, stride, count);
      };
      constexpr std::integral_constant<int, K> all_keys;
      constexpr std::integral_constant<int, kChunk> all_tokens;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int64_t state = (index.slot(a) * 2 + part) * K * V + column;
        copy(all_keys, stage.state[part], a.states, state, V, K);
        copy(all_keys, stage.dstate[part], a.dstates, state, V, K);
        const int64_t solved = (index.slot(a) * 2 + part) * kChunk * V + column;
        copy(all_tokens, stage.values[part], a.values, solved, V, kChunk);
        copy(all_tokens, stage.dsolved[part], a.dsolved, solved, V, kChunk);
      }
      copy(all_tokens, stage.dout, a.dout, values, stride, count);
    }
    mma::commit();
  }

  // x k' of a warp's rows of x, of which it has half of the columns.
  __device__ void scores(Sums<4>& sums, const Bits* x, int row, int half) const {
    clear(sums);
    add_product(sums, Matrix<false>{x, K + kGap}, row, Matrix<true>{k, K + kGap}, half * 32, 0, K);
  }

  // Adds what columns of values give: to dq, to dk of values and of dsolved, and to the gradients of scores.
  __device__ static void add_slice(const Stage& stage, int row, int half, Sums<kTiles>& dq, Sums<kTiles>& dk,
                                   Sums<kTiles>& seen, Sums<4>& dscores, Sums<4>& dlower) {
    const int key = half * (K / 2), token = half * 32;
    const Matrix<false> dout{stage.dout, kSlicePitch};
    const Matrix<true, true> state{stage.state[0], kSlicePitch, stage.state[1]};
    const Matrix<true, true> dstate{stage.dstate[0], kSlicePitch, stage.dstate[1]};
    const Matrix<false, true> values{stage.values[0], kSlicePitch, stage.values[1]};
    const Matrix<true, true> values_transposed{stage.values[0], kSlicePitch, stage.values[1]};
    add_product(dscores, dout, row, values_transposed, token, 0, kSlice);
    add_product(dq, dout, row, state, key, 0, kSlice);
    add_product(dk, values, row, dstate, key, 0, kSlice);
    const Matrix<false, true> dsolved{stage.dsolved[0], kSlicePitch, stage.dsolved[1]};
    add_product(dlower, dsolved, row, values_transposed, token, 0, kSlice);
    add_product(seen, dsolved, row, state, key, 0, kSlice);
  }

  // A thread's part of the sum of the products of a state and its gradient.
  __device__ static float multiply_states(const Stage& stage) {
    float sum = 0.0f;
#pragma unroll
    for (int at = threadIdx.x; at < K * kSlice / 8; at += kThreads) {
      const int from = at / (kSlice / 8) * kSlicePitch + at % (kSlice / 8) * 8;
      const auto eight = [&](const Bits (&x)[2][K * kSlicePitch], float (&to)[8]) {
        const uint4 high_row = *reinterpret_cast<const uint4*>(x[0] + from);
        const uint4 low_row = *reinterpret_cast<const uint4*>(x[1] + from);
        const uint32_t high[4] = {high_row.x, high_row.y, high_row.z, high_row.w};
        const uint32_t low[4] = {low_row.x, low_row.y, low_row.z, low_row.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[2 * i] = low_float(high[i]) + low_float(low[i]);
          to[2 * i + 1] = high_float(high[i]) + high_float(low[i]);
        }
      };
      float x[8], dx[8];
      eight(stage.state, x);
      eight(stage.dstate, dx);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(x[i], dx[i], sum);
    }
    return sum;
  }

  // Gradients of exponents, and the matrices [64, 64] that multiply keys and queries.
  __device__ void exponents(const Arguments& a, const Decays& decays, int row, int half, Sums<4>& qk, Sums<4>& dscores,
                            Sums<4>& dlower) {
    const int column = half * 32;
    Sums<4> kk;
    scores(kk, k, row, half);
    float row_sums[2] = {0.0f, 0.0f}, b_rows[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float column_sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + row_of(i), c = column + n * 8 + column_of(i);
        const float decay = decays.between(r, c);
        float exponent = r > c ? dscores[n][i] * (a.scale * qk[n][i] * decay) : 0.0f;
        dscores[n][i] = r >= c ? dscores[n][i] * (a.scale * decay) : 0.0f;
        const float dkk = r > c ? -dlower[n][i] * decay : 0.0f;
        b_rows[i / 2] = fmaf(dkk, kk[n][i], b_rows[i / 2]);
        dlower[n][i] = decays.b(r) * dkk;
        exponent = fmaf(dlower[n][i], kk[n][i], exponent);
        row_sums[i / 2] += exponent;
        column_sums[i % 2] += exponent;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = sum_column(column_sums[i]);
        if (threadIdx.x % 32 < 4) columns[row / 16][column + n * 8 + column_of(i)] = sum;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sum_row(row_sums[i]), b_sum = sum_row(b_rows[i]);
      if (threadIdx.x % 4 == 0) {
        rows[half][row + row_of(2 * i)] = sum;
        b_sums[half][row + row_of(2 * i)] = b_sum;
      }
    }
    store_tiles(dqk[0], dqk[1], kChunkPitch, row, column, dscores);
    store_tiles(other[0], other[1], kChunkPitch, row, column, dlower);
  }

  // Writes dq and dk from their sums over values. Returns whether sums over every operand are finite.
  template <bool kExact>
  __device__ bool keys(const Arguments& a, const ChunkIndex& index, const Decays& decays, int row, int half,
                       Sums<kTiles>& dq, Sums<kTiles>& dk, Sums<kTiles>& seen) {
    const int column = half * (K / 2);
    const Matrix<false> right_q{q, K + kGap}, right_k{k, K + kGap};
    const float from_start[2] = {decays.from_start(row + row_of(0)), decays.from_start(row + row_of(2))};
    const float to_end[2] = {decays.to_end(row + row_of(0)), decays.to_end(row + row_of(2))};
    float start_sum[2] = {0.0f, 0.0f}, end_sum[2] = {0.0f, 0.0f}, b_sum[2] = {0.0f, 0.0f};
    for_each(dq, row, column, [&](int r, int c, int i, float& x) {
      x *= a.scale * from_start[i];
      start_sum[i] = fmaf(x, bits_to_float(q[r * (K + kGap) + c]), start_sum[i]);
    });
    add_triangle<false, kExact>(dq, Matrix<false, true>{dqk[0], kChunkPitch, dqk[1]}, row, right_k, column);
    write(a, index, static_cast<Bits*>(a.dq), a.dq_parts, dq, row, column);
    for_each(dk, row, column, [&](int r, int c, int i, float& x) {
      x *= to_end[i];
      end_sum[i] = fmaf(x, bits_to_float(k[r * (K + kGap) + c]), end_sum[i]);
    });
    for_each(seen, row, column, [&](int r, int c, int i, float& x) {
      x *= -from_start[i];
      b_sum[i] = fmaf(x, bits_to_float(k[r * (K + kGap) + c]), b_sum[i]);
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) start_sum[i] = fmaf(decays.b(row + row_of(2 * i)), b_sum[i], start_sum[i]);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[n][i] = fmaf(decays.b(row + row_of(i)), seen[n][i], dk[n][i]);
    }
    add_product(dk, Matrix<false, true>{other[0], kChunkPitch, other[1]}, row, right_k, column, 0, row + 16);
    add_product(dk, Matrix<true, true>{other[0], kChunkPitch, other[1]}, row, right_k, column, row, kChunk);
    add_triangle<true, kExact>(dk, Matrix<true, true>{dqk[0], kChunkPitch, dqk[1]}, row, right_q, column);
    write(a, index, static_cast<Bits*>(a.dk), a.dk_parts, dk, row, column);
    float found = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float at_start = sum_row(start_sum[i]), at_end = sum_row(end_sum[i]), b = sum_row(b_sum[i]);
      found = fmaf(at_start, 0.0f, fmaf(at_end, 0.0f, found));
      if (threadIdx.x % 4 == 0) {
        start[half][row + row_of(2 * i)] = at_start;
        end[half][row + row_of(2 * i)] = at_end;
        b_sums[3 + half][row + row_of(2 * i)] = b;
      }
    }
    return is_finite(found);
  }

  template <class Each>
  __device__ static void for_each(Sums<kTiles>& sums, int row, int column, Each body) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) body(row + row_of(i), column + n * 8 + column_of(i), i / 2, sums[n][i]);
    }
  }

  // Writes rows of dq or dk, or of the partial sums of heads that share keys.
  template <int kTiles>
  __device__ static void write(const Arguments& a, const ChunkIndex& index, Bits* to, float* parts,
                               const Sums<kTiles>& sums, int row, int column) {
    const int count = index.count(a);
    Bits* rows = to + index.row(a, a.key_heads, index.key_head, K);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int r = row + row_of(i);
      if (r >= count) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int c = column + n * 8 + column_of(i);
        if (parts != nullptr) {
          *reinterpret_cast<float2*>(parts + (index.slot(a) * kChunk + r) * K + c) =
              make_float2(sums[n][i], sums[n][i + 1]);
        } else {
          *reinterpret_cast<uint32_t*>(rows + r * (int64_t{a.key_heads} * K) + c) =
              mma::pack(sums[n][i], sums[n][i + 1]);
        }
      }
    }
  }

  // Writes columns of dv of the delta rule, four lanes a row. Returns a lane's part of the products of dsolved and v.
  __device__ static float write_dv_slice(const Arguments& a, const ChunkIndex& index, const Decays& decays,
                                         const Stage& stage, int column) {
    const int r = threadIdx.x / 4, c = threadIdx.x % 4 * 8;
    if (r >= index.count(a)) return 0.0f;
    const int64_t at = index.row(a, a.heads, index.head, V) + r * (int64_t{a.heads} * V) + column + c;
    const uint4 v_row = *reinterpret_cast<const uint4*>(static_cast<const Bits*>(a.v) + at);
    const uint4 high_row = *reinterpret_cast<const uint4*>(stage.dsolved[0] + r * kSlicePitch + c);
    const uint4 low_row = *reinterpret_cast<const uint4*>(stage.dsolved[1] + r * kSlicePitch + c);
    const uint32_t v[4] = {v_row.x, v_row.y, v_row.z, v_row.w};
    const uint32_t high[4] = {high_row.x, high_row.y, high_row.z, high_row.w};
    const uint32_t low[4] = {low_row.x, low_row.y, low_row.z, low_row.w};
    const float b = decays.b(r);
    float sum = 0.0f;
    uint32_t rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = low_float(high[i]) + low_float(low[i]), y = high_float(high[i]) + high_float(low[i]);
      sum = fmaf(x, low_float(v[i]), fmaf(y, high_float(v[i]), sum));
      rounded[i] = mma::pack(b * x, b * y);
    }
    *reinterpret_cast<uint4*>(static_cast<Bits*>(a.dv) + at) = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
    return sum;
  }

  // The gradient of a chunk's whole decay.
  __device__ float sum_states(const Decays& decays) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += states_sums[i];
    return decays.total() * sum;
  }

  // dg and db: g_t is a term of G_i for t <= i, and of G_C - G_j for t > j. Two warps add up along the chunk.
  __device__ void write_dg(const Arguments& a, const ChunkIndex& index, const Decays& decays) {
    const int t = threadIdx.x, lane = t % 32;
    if (t >= kChunk) return;
    const auto exponent = [&](int i) { return sum_of(start, i) + sum_of(rows, i) - sum_of(columns, i); };
    // Of the tokens of the other warp, from t on, and up to t.
    float apart = t < 32 ? exponent(t + 32) : sum_of(end, t - 32), from = exponent(t), until = sum_of(end, t);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      apart += mma::xor_lane(apart, distance);
      const float later = __shfl_down_sync(~0u, from, distance), earlier = mma::lane_before(until, distance);
      if (lane + distance < 32) from += later;
      if (lane >= distance) until += earlier;
    }
    const float before = mma::lane_before(until, 1);
    if (t >= index.count(a)) return;
    write_sums(a, index, t, sum_states(decays) + from + (lane > 0 ? before : 0.0f) + apart);
  }

  template <int kCount>
  __device__ static float sum_of(const float (&x)[kCount][kChunk], int t) {
    float sum = x[0][t];
#pragma unroll
    for (int i = 1; i < kCount; ++i) sum += x[i][t];
    return sum;
  }

  // As `write_dg`, from pairs of tokens around t: what is not finite does not cancel in sums over rows and over columns.
  __device__ void write_dg_exactly(const Arguments& a, const ChunkIndex& index, const Decays& decays) {
    const int t = threadIdx.x;
    float sum = sum_states(decays);
    // Else all sums are not finite.
    if (is_finite(sum)) {
      const float* exponents = write_exponents();
      for (int i = 0; t < kChunk && i < kChunk; ++i) {
        sum += sum_of(i >= t ? start : end, i);
        for (int j = 0; i >= t && j < t; ++j) sum += exponents[i * kChunk + j];
      }
    }
    if (t < index.count(a)) write_sums(a, index, t, sum);
  }

  __device__ void write_sums(const Arguments& a, const ChunkIndex& index, int t, float sum) {
    const int64_t at = index.row(a, a.heads, index.head, 1) + int64_t{t} * a.heads;
    a.dg[at] = sum;
    a.db[at] = sum_of(b_sums, t);
  }

  // Returns the gradients of exponents of each pair of tokens, which take the memory of slices. Of sums over them, that over
  // rows and that over columns have terms that cancel, but for those that are not finite.
  __device__ const float* write_exponents() {
    static_assert(sizeof(stages) >= kChunk * kChunk * sizeof(float));
    float* to = reinterpret_cast<float*>(stages);
#pragma unroll 1
    for (int at = threadIdx.x; at < kChunk * kChunk; at += kThreads) {
      const int i = at / kChunk, j = at % kChunk;
      if (i <= j) continue;
      const auto of = [&](const Bits (&x)[2][kChunk * kChunkPitch]) {
        return bits_to_float(x[0][i * kChunkPitch + j]) + bits_to_float(x[1][i * kChunkPitch + j]);
      };
      float qk = 0.0f, kk = 0.0f;
#pragma unroll 4
      for (int c = 0; c < K; ++c) {
        const float key = bits_to_float(k[j * (K + kGap) + c]);
        qk = fmaf(bits_to_float(q[i * (K + kGap) + c]), key, qk);
        kk = fmaf(bits_to_float(k[i * (K + kGap) + c]), key, kk);
      }
      to[at] = of(dqk) * qk;
      to[at] = fmaf(of(other), kk, to[at]);
    }
    __syncthreads();
    return to;
  }
};

// One token in f32, whose state is read once and written once: a warp has a head and kSlice columns of values, a lane four
// columns and K / 4 rows. Every load is in flight before the first is used. `after` may be `before`.
template <int K, int V>
struct Step {
  static constexpr int kRows = K / 4;

  __device__ static void run(const Arguments& a) {
    constexpr int kSlices = V / kSlice;
    const int64_t warp = int64_t{blockIdx.x} * (kStepThreads / 32) + threadIdx.x / 32;
    if (warp >= int64_t{a.sequences} * a.heads * kSlices) return;
    const int lane = threadIdx.x % 32, row = lane / 8 * kRows;
    const int column = static_cast<int>(warp % kSlices) * kSlice + lane % 8 * 4;
    const ChunkIndex index(a, warp / kSlices, 0);
    const float* before = a.before + index.sequence_head * a.before_stride + row * V + column;
    float4 state[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) state[i] = *reinterpret_cast<const float4*>(before + i * V);
    const int64_t keys = index.row(a, a.key_heads, index.key_head, K) + row;
    const int64_t values = index.row(a, a.heads, index.head, V) + column;
    uint4 q_rows[kRows / 8], k_rows[kRows / 8];
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      q_rows[i] = reinterpret_cast<const uint4*>(static_cast<const Bits*>(a.q) + keys)[i];
      k_rows[i] = reinterpret_cast<const uint4*>(static_cast<const Bits*>(a.k) + keys)[i];
    }
    const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const Bits*>(a.v) + values);
    const float decay = mma::exponential(a.g[index.sequence_head]);
    // The state times q and k, and q times k.
    float4 seen_q = {}, seen_k = {};
    float qk = 0.0f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float q = element(q_rows[i / 8], i % 8), k = element(k_rows[i / 8], i % 8);
      add(seen_q, q, state[i]);
      add(seen_k, k, state[i]);
      qk = fmaf(q, k, qk);
    }
    float4 added = {low_float(v.x), high_float(v.x), low_float(v.y), high_float(v.y)};
    qk = sum_rows(qk);
    seen_q = sum_rows(seen_q), seen_k = sum_rows(seen_k);
    if (a.b != nullptr) {
      const float b = a.b[index.sequence_head];
      add(added, -decay, seen_k);
      added = {b * added.x, b * added.y, b * added.z, b * added.w};
    }
    float* after = a.after + index.sequence_head * a.after_stride + row * V + column;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float4 x = {decay * state[i].x, decay * state[i].y, decay * state[i].z, decay * state[i].w};
      add(x, element(k_rows[i / 8], i % 8), added);
      *reinterpret_cast<float4*>(after + i * V) = x;
    }
    if (lane < 8) {
      float4 o = {decay * seen_q.x, decay * seen_q.y, decay * seen_q.z, decay * seen_q.w};
      add(o, qk, added);
      *reinterpret_cast<uint2*>(static_cast<Bits*>(a.out) + values) =
          make_uint2(mma::pack(a.scale * o.x, a.scale * o.y), mma::pack(a.scale * o.z, a.scale * o.w));
    }
  }

  // Element `i` of eight in bf16.
  __device__ static float element(const uint4& x, int i) {
    const uint32_t pair = i < 4 ? (i < 2 ? x.x : x.y) : (i < 6 ? x.z : x.w);
    return i % 2 == 0 ? low_float(pair) : high_float(pair);
  }
  __device__ static void add(float4& sum, float factor, const float4& x) {
    sum = {fmaf(factor, x.x, sum.x), fmaf(factor, x.y, sum.y), fmaf(factor, x.z, sum.z), fmaf(factor, x.w, sum.w)};
  }
  // Adds up the values of the four lanes of a column.
  __device__ static float sum_rows(float x) {
    x += mma::xor_lane(x, 8);
    return x + mma::xor_lane(x, 16);
  }
  __device__ static float4 sum_rows(const float4& x) {
    return {sum_rows(x.x), sum_rows(x.y), sum_rows(x.z), sum_rows(x.w)};
  }
};

// Adds up dq and dk of heads that share keys: a CTA has eight tokens of a head of keys.
template <int K>
__device__ inline void add_heads(const Arguments& a) {
  constexpr int kRows = kChunk / kLinearParts;
  const int shared = static_cast<int>(a.heads / a.key_heads / a.cluster);
  const int64_t key_chunk = blockIdx.x / kLinearParts;
  const int first_row = static_cast<int>(blockIdx.x % kLinearParts) * kRows;
  const int64_t chunks = int64_t{a.groups} * a.chunks, key_head = key_chunk / chunks, chunk = key_chunk % chunks;
  const int64_t first = key_head * shared;
  const ChunkIndex index(a, first * a.cluster, static_cast<int>(chunk));
  const int count = index.count(a);
  const int64_t next = chunks * kChunk * K;
  for (int at = threadIdx.x; at < 2 * kRows * (K / 2); at += kThreads) {
    const bool is_k = at >= kRows * (K / 2);
    const int r = first_row + at / (K / 2) % kRows, c = at % (K / 2) * 2;
    if (r >= count) continue;
    const float* from = (is_k ? a.dk_parts : a.dq_parts) + ((first * chunks + chunk) * kChunk + r) * K + c;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 8
    for (int head = 0; head < shared; ++head) {
      const float2 x = *reinterpret_cast<const float2*>(from + head * next);
      sum.x += x.x, sum.y += x.y;
    }
    Bits* to = static_cast<Bits*>(is_k ? a.dk : a.dq) +
               index.row(a, a.key_heads, index.key_head, K) + r * (int64_t{a.key_heads} * K) + c;
    *reinterpret_cast<uint32_t*>(to) = mma::pack(sum.x, sum.y);
  }
}

}  // namespace linear_attention

// Mirrored by `NUMBERS` in src/linear_attention.rs: bytes of shared memory at K = V = 128, by which tests hold the crate's
// formulas.
inline constexpr uint32_t kLinearPrepareShared = sizeof(linear_attention::Prepare<128>);
inline constexpr uint32_t kLinearOutputsShared = sizeof(linear_attention::Outputs<128, 128>);
inline constexpr uint32_t kLinearPullShared = sizeof(linear_attention::LocalGradients<128, 128>);
inline constexpr uint32_t kDeltaChainShared = sizeof(linear_attention::Chain<128, 128>);
inline constexpr uint32_t kDeltaReverseShared = sizeof(linear_attention::Reverse<128, 128>);
inline constexpr uint32_t kDeltaGradientsShared = sizeof(linear_attention::Gradients<128, 128>);

}  // namespace xentile

// Symmetric products of Newton-Schulz steps (Muon), for Hopper: A = X X' and c0 I + c1 A + c2 A A.
//
// One triangle is computed, and written to both: a CTA has a tile of 128 rows and 256 columns, on
// the diagonal or below it, as two warpgroups of 64 rows each and a thread that loads. The two CTAs
// of a cluster have tiles of common columns, or, in the last row of an odd number of rows, of common
// rows, and each loads half of what is common for both. Tiles leave through boxes of 64 x 64 in
// shared memory, while the next tile is computed.
//
// X is [side, K], or [K, side] ("tall"). Where there are fewer tiles than clusters, K is split, and
// sums of each split go to `partial`, in f32 and in the order of registers; `muon_sum` adds them.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "hopper.cuh"

namespace xentile {

inline constexpr uint32_t kMuonThreads = 384;
inline constexpr uint32_t kMuonSumThreads = 256;
// Rows and columns of a tile, and of a box.
inline constexpr uint32_t kMuonTileRows = 128;
inline constexpr uint32_t kMuonTileColumns = 256;
inline constexpr uint32_t kMuonBox = 64;
inline constexpr uint32_t kMuonStages = 4;
// Shared memory: stages, two boxes of each warpgroup, and what aligns these.
inline constexpr uint32_t kMuonSumBytes = 4 * 8192 + 1024;
inline constexpr uint32_t kMuonBytes = kMuonStages * 49152 + kMuonSumBytes;

// Mirrored by `Arguments` in src/muon.rs.
struct MuonArguments {
  CUtensorMap x;    // X, or A for its square
  CUtensorMap out;  // [batch, side, side]
  const void* gram;
  float* partial;
  uint32_t side;
  uint32_t blocks;  // of 64 of K
  uint32_t splits;
  uint32_t pairs;  // of tiles that have columns in common, of a matrix
  uint32_t items;  // all pairs of tiles of a matrix
  uint32_t all;    // of all matrices and splits
  float c0, c1, c2;
};

namespace muon {

using namespace ptx;

inline constexpr uint32_t kBoxBytes = 8192;
inline constexpr uint32_t kABytes = 2 * kBoxBytes;
inline constexpr uint32_t kStageBytes = 6 * kBoxBytes;

enum class Result { kGram, kPartial, kSquare };

// A CTA's tile.
struct Tile {
  int32_t matrix, row, column;
  uint32_t split;
  bool shares_rows;

  __device__ Tile(const MuonArguments& a, uint32_t index, uint32_t rank) {
    uint32_t item = index % a.items;
    const uint32_t rest = index / a.items;
    split = rest % a.splits;
    matrix = static_cast<int32_t>(rest / a.splits);
    shares_rows = item >= a.pairs;
    uint32_t row_tile, column_tile;
    if (shares_rows) {
      row_tile = (a.side - 1) / kMuonTileRows;
      column_tile = 2 * (item - a.pairs) + rank;
    } else {
      uint32_t pair = static_cast<uint32_t>((sqrtf(8.0f * item + 1) - 1) / 2);
      while (pair * (pair + 1) / 2 > item) --pair;
      while ((pair + 1) * (pair + 2) / 2 <= item) ++pair;
      row_tile = 2 * pair + rank;
      column_tile = item - pair * (pair + 1) / 2;
    }
    row = static_cast<int32_t>(row_tile * kMuonTileRows);
    column = static_cast<int32_t>(column_tile * kMuonTileColumns);
  }

  // Whether its transpose is another tile's place.
  __device__ bool mirrors() const { return column + static_cast<int32_t>(kMuonTileColumns) <= row; }
};

__device__ inline uint32_t packed(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ inline void sync_warpgroup(uint32_t group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// Writes a warpgroup's half of a tile, and where it mirrors, the transpose, through its two boxes at
// `boxes`. `thread` is that of the warpgroup.
template <bool kSquare>
__device__ inline void write(const MuonArguments& a, const Tile& tile, uint32_t group,
                             uint32_t thread, uint32_t boxes, const float (&d)[128]) {
  const uint32_t lane = thread % 32, warp = thread / 32;
  const int32_t first_row = tile.row + static_cast<int32_t>(64 * group);
  const int32_t side = static_cast<int32_t>(a.side);
  uint32_t words[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    float x = d[2 * i], y = d[2 * i + 1];
    if constexpr (kSquare) {
      const int32_t row =
          first_row + static_cast<int32_t>(16 * warp + lane / 4) + 8 * (i % 2);
      const int32_t column = tile.column + 8 * (i / 2) + static_cast<int32_t>(2 * (lane % 4));
      float2 g = make_float2(0, 0);
      if (row < side && column < side) {
        const __nv_bfloat16* from = static_cast<const __nv_bfloat16*>(a.gram) +
                                    (int64_t{1} * tile.matrix * side + row) * side + column;
        g = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from));
      }
      x = a.c2 * x + a.c1 * g.x + (row == column ? a.c0 : 0.0f);
      y = a.c2 * y + a.c1 * g.y + (row == column + 1 ? a.c0 : 0.0f);
    }
    words[i] = packed(x, y);
  }
  const uint32_t matrix = lane / 8, r = lane % 8;
#pragma unroll
  for (int box = 0; box < 8; ++box) {
    const bool is_mirror = box >= 4;
    const int quarter = box % 4;
    if (is_mirror && !tile.mirrors()) break;
    const uint32_t to = boxes + box % 2 * kBoxBytes;
    if (thread == 0) bulk_wait_read<1>();
    sync_warpgroup(group);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint32_t(&x)[4] =
          *reinterpret_cast<const uint32_t(*)[4]>(words + 16 * quarter + 4 * pair);
      if (is_mirror) {
        const uint32_t row = 8 * (2 * pair + matrix / 2) + r, vector = 2 * warp + matrix % 2;
        stmatrix_transposed(to + 128 * row + ((vector ^ r) * 16), x);
      } else {
        const uint32_t row = 16 * warp + 8 * (matrix % 2) + r, vector = 2 * pair + matrix / 2;
        stmatrix(to + 128 * row + ((vector ^ r) * 16), x);
      }
    }
    fence_async_shared();
    sync_warpgroup(group);
    if (thread == 0) {
      const int32_t column = tile.column + 64 * quarter;
      if (is_mirror) {
        tensor_store(a.out, first_row, column, tile.matrix, to);
      } else {
        tensor_store(a.out, column, first_row, tile.matrix, to);
      }
      bulk_commit();
    }
  }
}

// The sums of a tile: 256 threads have four of them after each other, and 32 times.
__device__ inline float4* sums_of(const MuonArguments& a, uint32_t index, uint32_t rank) {
  return reinterpret_cast<float4*>(a.partial) + (size_t{2} * index + rank) * 8192;
}

template <bool kTall, Result kResult>
__device__ inline void multiply(const MuonArguments& a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ alignas(8) uint64_t barriers[2 * kMuonStages];
  const uint32_t base = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kMuonStages;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < kMuonStages; ++stage) {
      mbarrier_init(full + 8 * stage, 1);
      mbarrier_init(empty + 8 * stage, 16);  // warps of both CTAs
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  const uint32_t cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
  const uint32_t group = uniform(threadIdx.x / 128);
  uint32_t stage = 0;
  if (group == 0) {
    fewer_registers<40>();
    if (threadIdx.x == 0) {
      uint32_t phase = 1;
      for (uint32_t index = cluster; index < a.all; index += clusters) {
        const Tile tile(a, index, rank);
        const int32_t begin = static_cast<int32_t>(a.blocks * tile.split / a.splits);
        const int32_t end = static_cast<int32_t>(a.blocks * (tile.split + 1) / a.splits);
        for (int32_t block = begin; block < end; ++block) {
          mbarrier_wait(empty + 8 * stage, phase);
          const uint32_t barrier = full + 8 * stage, to = base + stage * kStageBytes;
          mbarrier_arrive_expect_tx(barrier, kStageBytes);
          const auto load = [&](uint32_t box, int32_t row, bool for_both) {
            const int32_t k = 64 * block;
            const int32_t first = kTall ? row : k, second = kTall ? k : row;
            if (for_both) {
              tensor_load_to(to + box * kBoxBytes, a.x, first, second, tile.matrix, barrier, 3);
            } else {
              tensor_load(to + box * kBoxBytes, a.x, first, second, tile.matrix, barrier);
            }
          };
          const int32_t half = static_cast<int32_t>(rank);
          if (tile.shares_rows) {
            load(rank, tile.row + 64 * half, true);
#pragma unroll
            for (int i = 0; i < 4; ++i) load(2 + i, tile.column + 64 * i, false);
          } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              load(i, tile.row + 64 * i, false);
              load(2 + 2 * rank + i, tile.column + 128 * half + 64 * i, true);
            }
          }
          if (++stage == kMuonStages) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    more_registers<232>();
    const uint32_t consumer = group - 1, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const uint32_t boxes = base + kMuonStages * kStageBytes + consumer * 2 * kBoxBytes;
    uint32_t phase = 0;
    const auto release = [&](uint32_t of) {
      if (lane < 2) mbarrier_arrive_in_cluster(in_cta(empty + 8 * of, lane));
    };
    float d[128];
    for (uint32_t index = cluster; index < a.all; index += clusters) {
      const Tile tile(a, index, rank);
      const uint32_t begin = a.blocks * tile.split / a.splits;
      const uint32_t end = a.blocks * (tile.split + 1) / a.splits;
      uint32_t before = 0;
      for (uint32_t block = begin; block < end; ++block) {
        mbarrier_wait(full + 8 * stage, phase);
        const uint32_t at = base + stage * kStageBytes;
        const uint32_t next_columns = kTall ? kBoxBytes : 16;
        const uint64_t left = matrix_of(at + consumer * kBoxBytes, next_columns);
        const uint64_t right = matrix_of(at + kABytes, next_columns);
        // 16 rows of 128 bytes, or 16 columns, in units of 16 bytes.
        constexpr uint32_t kStep = kTall ? 128 : 2;
        settle(d);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          wgmma<__nv_bfloat16, kTall, kTall>(d, left + kStep * i, right + kStep * i,
                                             block != begin || i != 0);
        wgmma_commit();
        if (block > begin) {
          wgmma_wait<1>();
          release(before);
        }
        before = stage;
        if (++stage == kMuonStages) stage = 0, phase ^= 1;
      }
      wgmma_wait<0>();
      settle(d);
      release(before);
      if constexpr (kResult == Result::kPartial) {
        float4* to = sums_of(a, index, rank) + (threadIdx.x - 128);
#pragma unroll
        for (int i = 0; i < 32; ++i)
          to[i * kMuonSumThreads] = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
      } else {
        write<kResult == Result::kSquare>(a, tile, consumer, thread, boxes, d);
      }
    }
    if (thread == 0) bulk_wait_read<0>();
  }
  cluster_sync();
}

// Adds the splits' sums of a tile.
__device__ inline void sum(const MuonArguments& a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t rank = blockIdx.x % 2, item = blockIdx.x / 2 % a.items;
  const uint32_t first = blockIdx.x / 2 / a.items * a.items * a.splits + item;
  float d[128] = {};
  for (uint32_t split = 0; split < a.splits; ++split) {
    const float4* from = sums_of(a, first + split * a.items, rank) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float4 x = from[i * kMuonSumThreads];
      d[4 * i] += x.x, d[4 * i + 1] += x.y, d[4 * i + 2] += x.z, d[4 * i + 3] += x.w;
    }
  }
  const uint32_t group = uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
  write<false>(a, Tile(a, first, rank), group, thread, base + group * 2 * kBoxBytes, d);
  if (thread == 0) bulk_wait_read<0>();
}

}  // namespace muon
}  // namespace xentile

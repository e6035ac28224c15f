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

#include "element.cuh"
#include "hopper.cuh"
#include "mma.cuh"

namespace xentile {

inline constexpr uint32_t kMuonThreads = 384;
inline constexpr uint32_t kMuonSumThreads = 256;
// Rows and columns of a tile, and of a box.
inline constexpr uint32_t kMuonTileRows = 128;
inline constexpr uint32_t kMuonTileColumns = 256;
inline constexpr uint32_t kMuonBox = 64;
// Shared memory: four stages and two boxes of each warpgroup, or three and four, and what aligns
// these.
inline constexpr uint32_t kMuonSumBytes = 4 * 8192 + 1024;
inline constexpr uint32_t kMuonBytes = 4 * 49152 + kMuonSumBytes;

// Mirrored by `Arguments` in src/muon.rs.
struct MuonArguments {
  CUtensorMap x;    // X, or A for its square
  CUtensorMap out;  // [batch, side, side]
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

__device__ inline void sync_warpgroup(uint32_t group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// Where lane's row of 16 bytes is of the matrices of a pair of 8 columns, in a box of a warpgroup's
// 64 rows: four matrices of 8 x 8, those of the first 8 columns before the others'.
__device__ inline uint32_t row_of(uint32_t warp, uint32_t lane, uint32_t pair) {
  const uint32_t matrix = lane / 8, r = lane % 8;
  return 128 * (16 * warp + 8 * (matrix % 2) + r) + (((2 * pair + matrix / 2) ^ r) * 16);
}

// The same of their transposes, in a box of 64 columns as rows.
__device__ inline uint32_t transposed_row_of(uint32_t warp, uint32_t lane, uint32_t pair) {
  const uint32_t matrix = lane / 8, r = lane % 8;
  return 128 * (8 * (2 * pair + matrix / 2) + r) + (((2 * warp + matrix % 2) ^ r) * 16);
}

// Writes a warpgroup's half of a tile, and where it mirrors, the transpose, through its boxes at
// `boxes`, `kBoxes` of them. `thread` is that of the warpgroup. For a square the boxes have A's part
// of the tile before, once the phase of `loaded` is complete.
template <bool kSquare, int kBoxes>
__device__ inline void write(const MuonArguments& a, const Tile& tile, uint32_t group,
                             uint32_t thread, uint32_t boxes, uint32_t loaded, uint32_t phase,
                             const float (&d)[128]) {
  const uint32_t lane = thread % 32, warp = thread / 32;
  const int32_t first_row = tile.row + static_cast<int32_t>(64 * group);
  const bool mirrors = tile.mirrors();
  uint32_t words[64];
  if constexpr (kSquare) {
    mbarrier_wait(loaded, phase);
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) words[i] = mma::pack(d[2 * i], d[2 * i + 1]);
  }
#pragma unroll
  for (int box = 0; box < 8; ++box) {
    const bool is_mirror = box >= 4;
    const int quarter = box % 4;
    if (is_mirror && !mirrors) break;
    const uint32_t to = boxes + box % kBoxes * kBoxBytes;
    // A square's boxes are there for its first four.
    if (!kSquare || is_mirror) {
      if (thread == 0) bulk_wait_read<kBoxes - 1>();
      sync_warpgroup(group);
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t(&x)[4] = *reinterpret_cast<uint32_t(*)[4]>(words + 16 * quarter + 4 * pair);
      if (is_mirror) {
        stmatrix_transposed(to + transposed_row_of(warp, lane, pair), x);
        continue;
      }
      const uint32_t at = to + row_of(warp, lane, pair);
      if constexpr (kSquare) {
        uint32_t gram[4];
        mma::load_matrices(gram, at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int word = 16 * quarter + 4 * pair + i;
          const float2 g = unpacked<__nv_bfloat16>(gram[i]);
          float2 y = make_float2(a.c2 * d[2 * word] + a.c1 * g.x, a.c2 * d[2 * word + 1] + a.c1 * g.y);
          if (!mirrors) {
            const int32_t row = first_row + static_cast<int32_t>(16 * warp + lane / 4) + 8 * (i % 2);
            const int32_t column = tile.column + 8 * (word / 2) + static_cast<int32_t>(2 * (lane % 4));
            y.x += row == column ? a.c0 : 0.0f;
            y.y += row == column + 1 ? a.c0 : 0.0f;
          }
          x[i] = mma::pack(y.x, y.y);
        }
      }
      stmatrix(at, x);
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
  constexpr bool kSquare = kResult == Result::kSquare;
  constexpr uint32_t kStages = kSquare ? 3 : 4, kBoxes = kSquare ? 4 : 2;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ alignas(8) uint64_t barriers[2 * kStages + 2];
  const uint32_t base = (shared_address(memory) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kStages;
  const uint32_t of_boxes = empty + 8 * kStages;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + 8 * stage, 1);
      mbarrier_init(empty + 8 * stage, 16);  // warps of both CTAs
    }
    mbarrier_init(of_boxes, 1);
    mbarrier_init(of_boxes + 8, 1);
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
          if (++stage == kStages) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    more_registers<232>();
    const uint32_t consumer = group - 1, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const uint32_t boxes = base + kStages * kStageBytes + consumer * kBoxes * kBoxBytes;
    const uint32_t loaded = of_boxes + 8 * consumer;
    uint32_t phase = 0, boxes_phase = 0;
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
        if (kSquare && block == begin && thread == 0) {
          bulk_wait_read<0>();
          mbarrier_arrive_expect_tx(loaded, kBoxes * kBoxBytes);
#pragma unroll
          for (uint32_t i = 0; i < kBoxes; ++i)
            tensor_load(boxes + i * kBoxBytes, a.x, tile.column + static_cast<int32_t>(64 * i),
                        tile.row + static_cast<int32_t>(64 * consumer), tile.matrix, loaded);
        }
        if (block > begin) {
          wgmma_wait<1>();
          release(before);
        }
        before = stage;
        if (++stage == kStages) stage = 0, phase ^= 1;
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
        write<kSquare, kBoxes>(a, tile, consumer, thread, boxes, loaded, boxes_phase, d);
        boxes_phase ^= 1;
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
  write<false, 2>(a, Tile(a, first, rank), group, thread, base + group * 2 * kBoxBytes, 0, 0, d);
  if (thread == 0) bulk_wait_read<0>();
}

}  // namespace muon
}  // namespace xentile

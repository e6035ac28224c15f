// Values and the transposed copy, from one read of x.
//
// A CTA takes a tile of 128 x 128. A thread keeps 8 rows of a unit's columns: 8 values of a column are 8 bytes
// of the transposed copy. These pass through shared memory, a row of 128 bytes a column, whose parts of 8
// bytes lie in an order that the column says, so that neither a warp that writes one part of 16 units'
// columns nor one that reads whole rows has two words in a bank. The transposed copy is written in lines.
#pragma once

#include "fp8_quantize.cuh"

namespace xentile::fp8 {

// Where the scales of the two copies are from.
enum class Scales {
  kOfRuns,     // made here, of rows and columns of a tile
  kOfSquares,  // made here, of a tile
  kGiven,      // given; amax of rows are added to numbers, which are zeros before
  kNone,       // amax of rows and columns are added to numbers and transposed_scales, which are zeros before
  kBoth,       // numbers and transposed_scales, of whole rows and columns
  kThere,      // transposed_scales, of blocks of any rows; and there are no values
};

template <class E>
inline constexpr uint32_t kTurnedLanes = kFp8Tile / kPerVector<E>;
template <class E>
inline constexpr uint32_t kTurnedThreads = kTurnedLanes<E> * 16;

struct TurnedShared {
  uint4 storage[kFp8Tile * kFp8Tile / 16];  // largest magnitudes of columns by warp, and later the tile
  float reciprocals[kFp8Tile];
};

template <class E, Scales kScales, bool kE5M2, bool kAligned, class Source = Plain<E>>
struct Transposed {
  static constexpr int kPer = kPerVector<E>;
  static constexpr int kRows = 8;  // of a thread
  static constexpr uint32_t kTile = kFp8Tile;
  static constexpr uint32_t kLanes = kTurnedLanes<E>;
  static constexpr uint32_t kThreads = kTurnedThreads<E>;
  static constexpr uint32_t kWarps = kThreads / 32;
  static constexpr bool kFindsColumns = kScales == Scales::kOfRuns || kScales == Scales::kNone;
  static constexpr bool kFindsRows = kFindsColumns || kScales == Scales::kGiven;
  static constexpr bool kColumnsThere = kScales == Scales::kBoth || kScales == Scales::kThere;

  const Arguments& a;
  const Source source;
  int64_t matrix;
  int row, column;   // of the tile
  int down, across;  // tiles
  int tile_down, tile_across;
  uint32_t lane, group;  // units of a tile's row, and rows
  int rows, columns;     // from the thread's first ones to the matrix's end

  __device__ Transposed(const Arguments& arguments, const Source& of)
      : Transposed(arguments, of,
               static_cast<int>(place_in_grid(kScales == Scales::kGiven ||
                                              kScales == Scales::kBoth))) {}

  // Of the tile with a number, row by row.
  __device__ Transposed(const Arguments& arguments, const Source& of, int tile)
      : a(arguments), source(of) {
    down = static_cast<int>(ceil_div(a.rows, kTile));
    across = static_cast<int>(ceil_div(a.columns, kTile));
    const int band = tile / across;
    tile_across = tile - band * across;
    tile_down = band % down;
    matrix = band / down;
    row = tile_down * kTile;
    column = tile_across * kTile;
    lane = threadIdx.x % kLanes;
    group = threadIdx.x / kLanes;
    rows = static_cast<int>(a.rows - row) - static_cast<int>(group * kRows);
    columns = static_cast<int>(a.columns - column) - static_cast<int>(lane * kPer);
  }

  // The first element of a thread's row.
  __device__ int64_t at(int i) const {
    return (matrix * a.rows + row + group * kRows + i) * a.columns + column + lane * kPer;
  }

  __device__ int count(int i) const { return i < rows ? columns : 0; }

  // Where scales of a column of the thread begin, of those that are there.
  __device__ const float* scales_there(int j, int64_t blocks_down) const {
    const int64_t of = min(int64_t{column} + lane * kPer + j, a.columns - 1);
    const int64_t blocks_across = ceil_div(a.columns, a.block_columns);
    const int64_t block = a.block_columns == 1 ? of : quotient_of(of, a.block_columns);
    return a.transposed_scales + (matrix * blocks_across + block) * blocks_down;
  }

  // Writes columns of the tile, rows of the transposed copy.
  __device__ void store_transposed(const uint2* tile) const {
    const int left = static_cast<int>(min(a.columns - column, int64_t{kTile}));
    const int rows_here = static_cast<int>(min(a.rows - row, int64_t{kTile}));
    uint8_t* to = a.transposed + (matrix * a.columns + column) * a.rows + row;
    if (a.rows % 16 == 0) {
      const uint4* vectors = reinterpret_cast<const uint4*>(tile);
#pragma unroll
      for (uint32_t i = threadIdx.x; i < kTile * 8; i += kThreads) {
        const uint32_t of = i / 8, part = i % 8, order = of / kPer % 16;
        if (of >= left || part * 16 >= rows_here) continue;
        uint4 found = vectors[of * 8 + (part ^ order / 2)];
        if (order % 2) found = make_uint4(found.z, found.w, found.x, found.y);
        *reinterpret_cast<uint4*>(to + of * a.rows + part * 16) = found;
      }
    } else {
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(tile);
      for (uint32_t i = threadIdx.x; i < kTile * kTile; i += kThreads) {
        const uint32_t of = i / kTile, of_row = i % kTile, order = of / kPer % 16;
        if (of >= left || of_row >= rows_here) continue;
        to[of * a.rows + of_row] = bytes[of * kTile + ((of_row / 8) ^ order) * 8 + of_row % 8];
      }
    }
  }

  __device__ void run(TurnedShared& shared) const {
    uint4* storage = shared.storage;
    float* reciprocals = shared.reciprocals;

    typename Source::Raw raw[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      raw[i] = source.template load<kAligned, kScales != Scales::kNone>(at(i), count(i));
    }
    const auto of_source = source.of_columns(column + lane * kPer, columns);
    uint4 held[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      held[i] = source.unit_of(raw[i], of_source, matrix * a.rows + row + group * kRows + i, count(i));
    }

    float by_row[kRows];
    float by_all = 1.0f;
    if constexpr (kScales == Scales::kGiven) by_all = given_reciprocal(a, matrix * a.rows);
    if constexpr (kFindsRows) {
      uint4 most = make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint4 found = make_uint4(magnitudes<E>(held[i].x), magnitudes<E>(held[i].y),
                                       magnitudes<E>(held[i].z), magnitudes<E>(held[i].w));
        uint32_t of_row = larger<E>(larger<E>(0, found.x), found.y);
        of_row = larger<E>(larger<E>(of_row, found.z), found.w);
        by_row[i] = largest<E>(of_row);
        most = make_uint4(larger<E>(most.x, found.x), larger<E>(most.y, found.y),
                          larger<E>(most.z, found.z), larger<E>(most.w, found.w));
      }
      if constexpr (kFindsColumns) {
        if constexpr (kLanes == 16) {
          most.x = larger<E>(most.x, __shfl_xor_sync(kWarp, most.x, 16));
          most.y = larger<E>(most.y, __shfl_xor_sync(kWarp, most.y, 16));
          most.z = larger<E>(most.z, __shfl_xor_sync(kWarp, most.z, 16));
          most.w = larger<E>(most.w, __shfl_xor_sync(kWarp, most.w, 16));
        }
        if (threadIdx.x % 32 < kLanes) storage[threadIdx.x / 32 * kLanes + lane] = most;
        __syncthreads();
        if (threadIdx.x < kTile) of_columns(reinterpret_cast<const E*>(storage), reciprocals);
      }
#pragma unroll
      for (uint32_t by = kLanes / 2; by > 0; by /= 2) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          by_row[i] = fmaxf(by_row[i], __shfl_xor_sync(kWarp, by_row[i], by));
        }
      }
      float* numbers = a.numbers + (matrix * a.rows + row + group * kRows) *
                                       (kScales == Scales::kOfRuns ? across : 1);
      if constexpr (kScales == Scales::kOfRuns) {
        to_scales(a, by_row);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (lane == 0 && i < rows) numbers[i * across + tile_across] = by_row[i];
          by_row[i] = reciprocal(by_row[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (lane == 0 && i < rows) add_amax(numbers + i, by_row[i]);
          by_row[i] = by_all;
        }
        if constexpr (kScales == Scales::kNone) return;
      }
    } else if constexpr (kScales == Scales::kOfSquares) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) most = most_of<E>(most, held[i]);
      const float scale = scale_of(a, largest_of_cta(largest<E>(most), reciprocals));
      if (threadIdx.x == 0) {
        const int64_t first = matrix * down * across;
        a.numbers[first + tile_down * across + tile_across] = scale;
        a.transposed_scales[first + tile_across * down + tile_down] = scale;
      }
      by_all = reciprocal(scale);
#pragma unroll
      for (int i = 0; i < kRows; ++i) by_row[i] = by_all;
    } else if constexpr (kScales == Scales::kBoth) {
      const float* numbers = a.numbers + matrix * a.rows + row + group * kRows;
#pragma unroll
      for (int i = 0; i < kRows; ++i) by_row[i] = i < rows ? reciprocal(__ldg(numbers + i)) : 1.0f;
    }
    if constexpr (kScales != Scales::kThere) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // A branch, so that what a row needs is forgotten with it.
        if (count(i) > 0) {
          store<E, kE5M2, kAligned>(a.values + at(i), held[i], by_row[i], count(i));
        }
      }
    }
    // The columns' reciprocals are there, and what they were made of is read.
    if constexpr (kScales == Scales::kOfRuns) __syncthreads();
    // Quotients by one scale are computed again: there are no registers to keep them in.
    asm volatile("" : "+f"(by_all));
    uint2* tile = reinterpret_cast<uint2*>(storage);
    // The blocks of the thread's rows, which are most often one.
    int block[kRows];
    const int64_t blocks_down = ceil_div(a.rows, a.block_rows);
    const bool is_one = a.block_rows % kRows == 0 || a.block_rows >= a.rows;
    if constexpr (kColumnsThere) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t of = min(int64_t{row} + group * kRows + i, a.rows - 1);
        block[i] = i > 0 && is_one ? block[0] : static_cast<int>(quotient_of(of, a.block_rows));
      }
    }
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      float by = by_all;
      if constexpr (kScales == Scales::kOfRuns) by = reciprocals[lane * kPer + j];
      const float* there = nullptr;
      if constexpr (kColumnsThere) {
        there = scales_there(j, blocks_down);
        by = reciprocal(__ldg(there + block[0]));
      }
      float found[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if constexpr (kScales == Scales::kThere) {
          if (i > 0 && !is_one && block[i] != block[i - 1]) by = reciprocal(__ldg(there + block[i]));
        }
        found[i] = quotient(one(held[i], j), by);
      }
      tile[(lane * kPer + j) * 16 + (group ^ lane % 16)] =
          make_uint2(four_values<kE5M2>(found[0], found[1], found[2], found[3]),
                     four_values<kE5M2>(found[4], found[5], found[6], found[7]));
    }
    __syncthreads();
    store_transposed(tile);
  }

  // Scales of columns, or their amax, a thread each, of the largest magnitudes of each warp.
  __device__ void of_columns(const E* of_warps, float* reciprocals) const {
    float amax = 0.0f;
#pragma unroll
    for (uint32_t warp = 0; warp < kWarps; ++warp) {
      amax = fmaxf(amax, to_float(of_warps[warp * kTile + threadIdx.x]));
    }
    const int64_t of = column + threadIdx.x;
    if constexpr (kScales == Scales::kNone) {
      if (of < a.columns) add_amax(a.transposed_scales + matrix * a.columns + of, amax);
      return;
    }
    const float scale = scale_of(a, amax);
    if (of < a.columns) a.transposed_scales[(matrix * a.columns + of) * down + tile_down] = scale;
    reciprocals[threadIdx.x] = reciprocal(scale);
  }

  // An element of a unit, whose place is known as this is compiled.
  __device__ static float one(const uint4& unit, int j) {
    float x[kPer];
    unpack<E>(unit, x);
    return x[j];
  }
};

}  // namespace xentile::fp8

// Blocks of rows and of parts of rows: their scales and values, read once. All of a block stays in registers
// between the two, unless it is larger than those of a CTA.
#pragma once

#include "fp8_quantize.cuh"

namespace xentile::fp8 {

// Which runs there are: rows of whole vectors, parts of such rows, which are vectors too, or any.
enum class Parts { kRows, kVectors, kRagged };

// What a pass over runs writes beside a number of each.
enum class Values { kNone, kByGiven, kByOwn };

// Blocks that are rows or parts of rows, of 32 units at most: a team of lanes of a warp takes `kBatch` of
// them, which are all asked for before anything is computed. Those of a warp follow one another.
template <class E, bool kE5M2, Parts kParts, Values kValues, int kBatch = kFp8RunBatch,
          class Source = Plain<E>>
__device__ inline void runs(const Arguments& a, const Source& source) {
  constexpr int kPer = kPerVector<E>;
  const uint32_t lane = threadIdx.x % 32, place = lane % a.lanes;
  const int teams = 32 / static_cast<int>(a.lanes);
  const int length = static_cast<int>(a.block_columns), columns = static_cast<int>(a.columns);
  constexpr bool kAligned = kParts != Parts::kRagged;
  const int across = kParts == Parts::kRows ? 1 : (columns + length - 1) / length;
  const int64_t all = a.matrices * a.rows * across;
  const int64_t cta = place_in_grid(kValues == Values::kByGiven);
  const int64_t warp = cta * (kFp8RunThreads / 32) + threadIdx.x / 32;
  const int64_t first = warp * (teams * kBatch) + lane / a.lanes;
  const int64_t row = across == 1 ? first : quotient_of(first, across);
  // The lane's first element; those of its other runs are not far.
  const int of_row = static_cast<int>(first - row * across);
  const int64_t begin = row * a.columns + of_row * length + place * kPer;
  const Source from = source.from(begin);
  const int left = static_cast<int>(min(max(all - first, int64_t{0}), int64_t{kBatch} * teams));

  // Where a run lies, and how many of its elements are the lane's or after it.
  int at[kBatch], count[kBatch];
  if constexpr (kParts == Parts::kRows) {
    const int own = length - static_cast<int>(place) * kPer;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      at[i] = i * teams * length;
      count[i] = i * teams < left ? own : 0;
    }
  } else {
    const int by_rows = teams / across, by_runs = teams - by_rows * across;
    int run = of_row, offset = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      at[i] = offset;
      const int own = min(length, columns - run * length) - static_cast<int>(place) * kPer;
      count[i] = i * teams < left ? own : 0;
      run += by_runs;
      offset += by_rows * columns + by_runs * length;
      if (run >= across) {
        run -= across;
        offset += columns - across * length;
      }
    }
  }
  typename Source::Raw raw[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    raw[i] = from.template load<kAligned, kValues != Values::kNone>(at[i], count[i]);
  }
  uint4 held[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) held[i] = from.unit(raw[i]);
  float numbers[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) numbers[i] = largest<E>(most_of<E>(0, held[i]));
  for (uint32_t by = a.lanes / 2; by > 0; by /= 2) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      numbers[i] = fmaxf(numbers[i], __shfl_xor_sync(kWarp, numbers[i], by));
    }
  }
  if constexpr (kValues == Values::kByOwn) {
    to_scales(a, numbers);
  } else {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) numbers[i] = normal(numbers[i]);
  }
  float* to = a.numbers + first;
  if (a.lanes >= kBatch) {
    // A number a lane, so that those of a warp are written at once.
    float mine = numbers[0];
#pragma unroll
    for (int i = 1; i < kBatch; ++i) mine = place == i ? numbers[i] : mine;
    if (place < kBatch && static_cast<int>(place) * teams < left) to[place * teams] = mine;
  } else if (place == 0) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i * teams < left) to[i * teams] = numbers[i];
    }
  }
  if constexpr (kValues != Values::kNone) {
    const bool has_one = kValues == Values::kByGiven && a.rows_of_scale >= a.matrices * a.rows;
    const float by_all = has_one ? given_reciprocal(a, 0) : 1.0f;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float by = by_all;
      if constexpr (kValues == Values::kByOwn) {
        by = reciprocal(numbers[i]);
      } else if (!has_one && i * teams < left) {
        by = given_reciprocal(a, quotient_of(first + i * teams, across));
      }
      store<E, kE5M2, kAligned>(a.values + begin + at[i], held[i], by, count[i]);
    }
  }
}

// A block of any rows and columns, by a CTA, whose threads take its units in turns, row by row.
template <class E, bool kE5M2, bool kAligned>
struct Block {
  static constexpr int kPer = kPerVector<E>;
  static constexpr int kHeld = kFp8BlockHeld;

  const Arguments& a;
  int64_t index;  // of all blocks
  int64_t row;    // the first, of all matrices
  int64_t first;  // element
  int rows, columns, units;

  __device__ explicit Block(const Arguments& arguments) : a(arguments), index(blockIdx.x) {
    const int64_t down = ceil_div(a.rows, a.block_rows);
    const int64_t across = ceil_div(a.columns, a.block_columns);
    const int64_t band = quotient_of(index, across), matrix = quotient_of(band, down);
    const int64_t from = (band - matrix * down) * a.block_rows;
    const int64_t column = (index - band * across) * a.block_columns;
    row = matrix * a.rows + from;
    first = row * a.columns + column;
    rows = static_cast<int>(min(a.block_rows, a.rows - from));
    columns = static_cast<int>(min(a.block_columns, a.columns - column));
    units = (columns + kPer - 1) / kPer;
  }

  // The unit that a thread has come to.
  struct Walk {
    int row, unit, by_rows, by_units;

    __device__ explicit Walk(const Block& block) {
      const uint32_t units = block.units;
      row = threadIdx.x / units;
      unit = threadIdx.x - row * units;
      by_rows = blockDim.x / units;
      by_units = blockDim.x - by_rows * units;
    }

    __device__ void advance(const Block& block) {
      row += by_rows;
      unit += by_units;
      if (unit >= block.units) {
        unit -= block.units;
        ++row;
      }
    }
  };

  __device__ bool has(const Walk& walk) const { return walk.row < rows; }
  __device__ int64_t at(const Walk& walk) const {
    return first + walk.row * a.columns + walk.unit * kPer;
  }
  __device__ int count(const Walk& walk) const { return has(walk) ? columns - walk.unit * kPer : 0; }

  // `parts` has room for the warps.
  __device__ void run(float* parts) const {
    const E* x = static_cast<const E*>(a.x);
    const Walk begin(*this);
    Walk walk = begin;
    uint4 held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      held[i] = load<E, kAligned, false>(x + at(walk), count(walk));
      walk.advance(*this);
    }
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) most = most_of<E>(most, held[i]);
    const Walk after = walk;
#pragma unroll 4
    for (; has(walk); walk.advance(*this)) {
      most = most_of<E>(most, load<E, kAligned, false>(x + at(walk), count(walk)));
    }
    const float amax = normal(largest_of_cta(largest<E>(most), parts));
    const bool makes_scales = a.values != nullptr && a.given == nullptr;
    const float number = makes_scales ? scale_of(a, amax) : amax;
    if (threadIdx.x == 0) a.numbers[index] = number;
    if (a.values == nullptr) return;
    const float by = makes_scales ? reciprocal(number) : given_reciprocal(a, row);
    walk = begin;
    // Places are computed again: there are no registers to keep them in.
    asm volatile("" : "+r"(walk.row), "+r"(walk.unit));
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      store<E, kE5M2, kAligned>(a.values + at(walk), held[i], by, count(walk));
      walk.advance(*this);
    }
#pragma unroll 4
    for (walk = after; has(walk); walk.advance(*this)) {
      const uint4 unit = load<E, kAligned, false>(x + at(walk), count(walk));
      store<E, kE5M2, kAligned>(a.values + at(walk), unit, by, count(walk));
    }
  }
};

// amax of blocks of `block_rows` rows of each column, into transposed_scales [matrices, columns, blocks], which
// are zeros before: a CTA takes a part of a block, of kFp8ColumnRows rows and 32 units, a warp every eighth
// row.
template <class E, bool kAligned>
__device__ inline void columns(const Arguments& a) {
  constexpr int kPer = kPerVector<E>;
  constexpr uint32_t kWarps = kFp8ColumnThreads / 32;
  __shared__ uint4 parts[kWarps][32];
  const E* x = static_cast<const E*>(a.x);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t strips = ceil_div(a.columns, 32 * kPer);
  const int64_t down = ceil_div(a.rows, a.block_rows);
  const int64_t per_block = ceil_div(a.block_rows, kFp8ColumnRows);
  const int64_t band = quotient_of(blockIdx.x, strips);
  const int64_t column = (blockIdx.x - band * strips) * 32 * kPer;
  const int64_t block = quotient_of(band, per_block), matrix = quotient_of(block, down);
  const int64_t of_matrix = block - matrix * down;
  const int64_t begin = of_matrix * a.block_rows + (band - block * per_block) * kFp8ColumnRows;
  const int64_t end = min(min(begin + kFp8ColumnRows, (of_matrix + 1) * a.block_rows), a.rows);

  uint4 most = make_uint4(0, 0, 0, 0);
  const int count = static_cast<int>(a.columns - column) - static_cast<int>(lane * kPer);
#pragma unroll 8
  for (int64_t row = begin + warp; row < end; row += kWarps) {
    const int64_t at = (matrix * a.rows + row) * a.columns + column + lane * kPer;
    const uint4 unit = load<E, kAligned, false>(x + at, count);
    most.x = larger<E>(most.x, magnitudes<E>(unit.x));
    most.y = larger<E>(most.y, magnitudes<E>(unit.y));
    most.z = larger<E>(most.z, magnitudes<E>(unit.z));
    most.w = larger<E>(most.w, magnitudes<E>(unit.w));
  }
  parts[warp][lane] = most;
  __syncthreads();
  const E* of_warps = reinterpret_cast<const E*>(parts);
  for (int i = threadIdx.x; i < 32 * kPer && i < a.columns - column; i += kFp8ColumnThreads) {
    float amax = 0.0f;
    for (uint32_t w = 0; w < kWarps; ++w) amax = fmaxf(amax, to_float(of_warps[w * 32 * kPer + i]));
    float* to = a.transposed_scales + (matrix * a.columns + column + i) * down + of_matrix;
    if (begin < end) add_amax(to, amax);
  }
}

// What is left to do of transposed_scales: scales of the amax that are there; or, of square blocks, their
// numbers [matrices, down, across] in the order of the transposed copy.
__device__ inline void finish(const Arguments& a) {
  const int64_t down = ceil_div(a.rows, a.block_rows), across = ceil_div(a.columns, a.block_columns);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kFp8FinishThreads + threadIdx.x;
  if (at >= a.matrices * down * across) return;
  if (a.numbers == nullptr) {
    a.transposed_scales[at] = scale_of(a, a.transposed_scales[at]);
    return;
  }
  const int64_t line = quotient_of(at, down), matrix = quotient_of(line, across);
  const int64_t from = (matrix * down + at - line * down) * across + line - matrix * across;
  a.transposed_scales[at] = a.numbers[from];
}

}  // namespace xentile::fp8

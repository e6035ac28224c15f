// Attention of few queries over many keys: the forward pass of decoding, which is bound by reading keys and values.
//
// The rows of a KV head are the queries of its group, [group, queries], in blocks of 16 or 64. Keys are split into
// chunks, which begin at multiples of their length. A unit of work is a chunk of keys for a block of rows. CTAs count
// the units that the ranges leave, and take turns at them. A CTA has four warps: with blocks of 16 rows each warp has
// its own tiles of keys, with 64 rows all four share a tile. Asynchronous copies load tiles into a ring of stages,
// which continues from one unit into the next.
//
// A second kernel adds the chunks of each row in order. The keys that a warp and a chunk sum depend only on positions,
// and masked keys add zeros, so no other row changes a bit.
#pragma once

#include <cstdint>

#include "flash_attention.cuh"

namespace xentile {

// Mirrored by `DecodeArguments` in src/flash_attention/arguments.rs.
struct FlashAttentionDecodeArguments {
  FlashAttentionArguments of;
  // [heads / inner, pages], or null. With it k and v are [.., page_size, inner, width], the ranges [heads / inner,
  // queries, 2] and the sinks [inner, group].
  const int32_t* block_tables;
  float* partials;              // [heads, chunks, group, queries, value_width]: o of each chunk
  float* partial_lse;           // [heads, chunks, group, queries], in units of ln(2)
  int32_t pages;
  int32_t page_size;
  int32_t chunk_log2;  // log2 of the keys of a chunk, at least 6
  int32_t chunks;      // the number of chunks; 1 for results without a second kernel
  // The leading entries of this launch, with `inner` KV heads each.
  int32_t first_entry;
  int32_t entries;

  // A KV head of this launch.
  __device__ int64_t head(int entry, int of_entry) const {
    return static_cast<int64_t>(first_entry + entry) * of.inner + of_entry;
  }

  // The index of its row in q and o. Often there is one query, which needs no slow division.
  __device__ int64_t query_at(int entry, int of_entry, int row) const {
    const uint32_t head = of.queries == 1 ? row : static_cast<uint32_t>(row) / of.queries;
    const int query = row - head * of.queries;
    const int64_t before = static_cast<int64_t>(first_entry + entry) * of.inner * of.group * of.queries;
    return before + of_entry * of.q_head + head * of.q_group + static_cast<int64_t>(query) * of.q_row;
  }

  __device__ int query_of(int row) const {
    return of.queries == 1 ? 0 : static_cast<uint32_t>(row) % of.queries;
  }

  // The ranges of a head's queries, and the number of heads of an entry with ranges of their own.
  __device__ const int2* ranges_of(int entry, int of_entry) const {
    const int64_t first = block_tables == nullptr ? head(entry, of_entry) : first_entry + entry;
    return reinterpret_cast<const int2*>(of.ranges) + first * of.queries;
  }

  __device__ int range_heads() const { return block_tables == nullptr ? of.inner : 1; }

  __device__ float sink_of(int entry, int of_entry, int row) const {
    if (of.sinks == nullptr) return __int_as_float(0xff800000);
    const int64_t first = block_tables == nullptr ? head(entry, of_entry) : of_entry;
    return of.sinks[first * of.group + static_cast<uint32_t>(row) / of.queries];
  }
};

// Mirrored by `NUMBERS` in src/flash_attention/arguments.rs.
inline constexpr uint32_t kAttentionDecodeThreads = 128;
// Bytes of keys and values in a CTA's ring; two CTAs share a multiprocessor, except for heads of 256 columns.
inline constexpr uint32_t kAttentionDecodeBytes = 96 << 10;
inline constexpr uint32_t kAttentionDecodeWideBytes = 192 << 10;

namespace attention::decode {

inline constexpr int kWarps = kAttentionDecodeThreads / 32;

// The hull of the keys that an entry's rows see, the number of units of earlier entries, and whether the entry's heads
// see different keys.
struct __align__(16) Entry {
  int32_t low, high, before, is_mixed;
};

// The hull of two ranges.
__device__ inline int2 hull(int2 x, int2 y) {
  if (y.x >= y.y) return x;
  return x.x >= x.y ? y : make_int2(min(x.x, y.x), max(x.y, y.y));
}

template <int kPending>
__device__ inline void wait_for_stages() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The sum of `count` over earlier threads; `total` is that over all threads.
__device__ inline int sum_before(int count, int (&warps)[kWarps], int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += warps[i];
    total += warps[i];
  }
  __syncthreads();
  return before + sum - count;
}

// kRowTiles warps, of 16 rows each, share a tile of keys.
template <class E, int kColumns, int kRowTiles>
struct Forward {
  static constexpr int kGroups = kWarps / kRowTiles;
  static constexpr int kBlock = 16 * kRowTiles;
  static constexpr int kKeys = kRowTiles == 1 ? (kColumns == 64 ? 32 : 16) : (kColumns == 256 ? 32 : 64);
  static constexpr int kVectors = kColumns / 8;
  static constexpr int kTileBytes = kKeys * kColumns * 2;
  static constexpr int kStagesBytes = kColumns == 256 ? kAttentionDecodeWideBytes : kAttentionDecodeBytes;
  static constexpr int kStages = kStagesBytes / (kGroups * 2 * kTileBytes);
  // Rows that a warp copies, and rows that its lanes copy at once.
  static constexpr int kOwnKeys = kKeys / kRowTiles;
  static constexpr int kStep = 32 / kVectors;
  struct Shared {
    float largest[kGroups][kBlock];
    float total[kGroups][kBlock];
    int warps[kWarps];
  };

  // A unit of work: a chunk of keys for a block of rows.
  struct Unit {
    int entry, head, chunk, block;
    int low, high;  // keys that any row sees
  };

  const FlashAttentionDecodeArguments& all;
  const FlashAttentionArguments& a;
  Shared& shared;
  const Entry* entries;
  uint32_t stages;
  int rows, blocks, units;
  // Columns of sums that the groups exchange at once.
  int slice;

  __device__ static void run(const FlashAttentionDecodeArguments& all) {
    extern __shared__ __align__(1024) uint8_t dynamic[];
    __shared__ Shared shared;
    ptx::launch_dependents();
    Forward of{all, all.of, shared, reinterpret_cast<Entry*>(dynamic + kStagesBytes), 0, 0, 0, 0, 0};
    of.stages = ptx::shared_address(dynamic);
    of.rows = of.a.group * of.a.queries;
    of.blocks = (of.rows + kBlock - 1) / kBlock;
    of.slice = kColumns / (of.rows <= 4 ? 1 : of.rows <= 8 ? 2 : 4);
    of.units = of.count_units(reinterpret_cast<Entry*>(dynamic + kStagesBytes));
    float* sums = reinterpret_cast<float*>(dynamic + kStagesBytes + sizeof(Entry) * all.entries);
    of.work(sums);
  }

  // Writes the description of each entry, and returns the number of all units.
  __device__ int count_units(Entry* to) const {
    // Threads of an entry, a power of two.
    int threads = 32;
    while (threads > 1 && all.entries * threads > static_cast<int>(kAttentionDecodeThreads)) threads /= 2;
    const int own = threadIdx.x % threads, step = kAttentionDecodeThreads / threads;
    int counted = 0;
    for (int base = 0; base < all.entries; base += step) {
      const int entry = base + threadIdx.x / threads;
      int2 seen = make_int2(0, 0);
      int is_mixed = 0;
      if (entry < all.entries) {
        const int2* ranges = all.ranges_of(entry, 0);
#pragma unroll 4
        for (int i = own; i < all.range_heads() * a.queries; i += threads) {
          const int2 range = ranges[i], of_first = ranges[all.query_of(i)];
          is_mixed |= range.x != of_first.x || range.y != of_first.y;
          seen = hull(seen, range);
        }
      }
      for (int i = 1; i < threads; i *= 2) {
        is_mixed |= __shfl_xor_sync(~0u, is_mixed, i);
        seen = hull(seen, make_int2(__shfl_xor_sync(~0u, seen.x, i), __shfl_xor_sync(~0u, seen.y, i)));
      }
      int count = 0;
      if (entry < all.entries && own == 0) {
        if (seen.x < seen.y) count = (seen.y - 1 >> all.chunk_log2) - (seen.x >> all.chunk_log2) + 1;
        // Without a second kernel, this kernel also writes rows that see no key.
        if (all.chunks == 1) count = 1;
      }
      int total;
      const int before = counted + sum_before(count * a.inner * blocks, shared.warps, total);
      if (entry < all.entries && own == 0) to[entry] = {seen.x, seen.y, before, is_mixed};
      counted += total;
    }
    __syncthreads();
    return counted;
  }

  // The unit with a given number; its entry is `from` or later.
  __device__ Unit unit_of(int number, int from) const {
    int first = from, last = all.entries - 1;
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (entries[middle].before <= number) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    const Entry of = entries[first];
    uint32_t rest = number - of.before, block = 0;
    if (blocks > 1) block = rest % blocks, rest /= blocks;
    const uint32_t chunks = rest / a.inner;
    const int head = rest - chunks * a.inner, chunk = (of.low >> all.chunk_log2) + chunks;
    const int low = max(of.low, chunk << all.chunk_log2);
    const int high = min(of.high, chunk + 1 << all.chunk_log2);
    const Unit unit = {first, head, chunk, static_cast<int>(block), low, high};
    return of.is_mixed == 0 ? unit : of_head(unit);
  }

  // The unit, restricted to keys that rows of its head see, since other keys may be NaN.
  __device__ Unit of_head(Unit unit) const {
    const int2* ranges = all.ranges_of(unit.entry, unit.head);
    int2 seen = make_int2(0, 0);
    for (int i = 0; i < a.queries; ++i) seen = hull(seen, ranges[i]);
    unit.low = max(unit.low, seen.x), unit.high = max(unit.low, min(unit.high, seen.y));
    return unit;
  }

  // The first tile of this group in a unit. The position of a tile determines its group.
  __device__ static int first_tile(const Unit& unit, int group) {
    const uint32_t tile = static_cast<uint32_t>(unit.low) / kKeys;
    return tile + (group - tile) % kGroups;
  }

  // Iterates over the tiles of a group in all units of the CTA, and copies them.
  struct Loader {
    const Forward& of;
    Unit unit;
    int number, tile, group, stage;
    const E *k, *v;
    const int32_t* table;

    __device__ Loader(const Forward& forward, int own) : of(forward), group(own), stage(0) {
      number = blockIdx.x;
      unit.entry = 0;
      enter();
    }

    // Finds the first tile of the unit, or of a later unit.
    __device__ void enter() {
      for (; number < of.units; number += gridDim.x) {
        unit = of.unit_of(number, unit.entry);
        tile = first_tile(unit, group);
        if (tile * kKeys >= unit.high) continue;
        const int64_t entry = of.all.first_entry + unit.entry;
        int64_t first = unit.head * of.a.k_head;
        if (of.all.block_tables == nullptr) first += entry * of.a.inner * of.a.keys;
        k = static_cast<const E*>(of.a.k) + first * of.a.width;
        v = static_cast<const E*>(of.a.v) + first * of.a.value_width;
        table = of.all.block_tables + entry * of.all.pages;
        return;
      }
    }

    // Copies the next tile, if there is one.
    __device__ void load() {
      if (number < of.units) {
        const int lane = threadIdx.x % 32, vector = lane % kVectors;
        const int own = kGroups == kWarps ? 0 : threadIdx.x / 32 * kOwnKeys;
        const int first = tile * kKeys + own;
        const uint32_t to = of.tile_at(group, stage);
        int row = first + lane;
        const bool is_paged = of.all.block_tables != nullptr;
        if (is_paged && lane < kOwnKeys && unit.low <= row && row < unit.high) {
          const int page = static_cast<uint32_t>(row) / of.all.page_size;
          row += (table[page] - page) * of.all.page_size;
        }
        const bool has_k = vector * 8 < of.a.width, has_v = vector * 8 < of.a.value_width;
#pragma unroll
        for (int i = 0; i < kOwnKeys; i += kStep) {
          const int at = i + lane / kVectors, key = first + at;
          const int from = is_paged ? __shfl_sync(~0u, row, at) : key;
          const bool is_there = unit.low <= key && key < unit.high;
          const int64_t apart = is_there ? static_cast<int64_t>(from) * of.a.k_row : 0;
          const uint32_t place = to + offset(own + at, vector);
          ptx::copy_async(place, k + apart * of.a.width + (has_k ? vector * 8 : 0), is_there && has_k ? 16 : 0);
          ptx::copy_async(place + kTileBytes, v + apart * of.a.value_width + (has_v ? vector * 8 : 0),
                          is_there && has_v ? 16 : 0);
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
        tile += kGroups;
        if (tile * kKeys >= unit.high) {
          number += gridDim.x;
          enter();
        }
      }
      ptx::commit_copies();
    }
  };

  __device__ uint32_t tile_at(int group, int stage) const {
    return stages + (group * kStages + stage) * 2 * kTileBytes;
  }

  __device__ static uint32_t offset(int row, int vector) {
    return row * kColumns * 2 + ((vector ^ (row & 7)) << 4);
  }

  // Synchronises the warps of a group.
  __device__ static void meet() {
    if constexpr (kRowTiles == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ void work(float* sums) {
    const int warp = threadIdx.x / 32;
    const int group = warp / kRowTiles, row_tile = warp % kRowTiles;
    const Bend bend(a);
    Loader loader(*this, group);
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) loader.load();
    int stage = 0;
    if (static_cast<int>(blockIdx.x) >= units) return;
    Unit unit = unit_of(blockIdx.x, 0);
    uint32_t q[kColumns / 16][4];
    int2 range[2];
    load_queries(q, range, unit, row_tile);
    for (int number = blockIdx.x; number < units; number += gridDim.x) {
      const bool is_idle = unit.block * kBlock + row_tile * 16 >= rows;
      float o[kColumns / 8][4] = {};
      float largest[2] = {-infinity(), -infinity()}, total[2] = {0, 0};
      for (int tile = first_tile(unit, group); tile * kKeys < unit.high; tile += kGroups) {
        wait_for_stages<kStages - 2>();
        meet();
        // All warps of the group are done with the tile that this overwrites.
        loader.load();
        if (!is_idle) add_tile(tile_at(group, stage), tile * kKeys, q, range, bend, largest, total, o);
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
      }
      // The copies of the next unit's queries overlap with the end of this unit.
      const Unit done = unit;
      const bool has_next = number + static_cast<int>(gridDim.x) < units;
      if (has_next) unit = unit_of(number + gridDim.x, unit.entry);
      if constexpr (kGroups == 1) {
        if (has_next) load_queries(q, range, unit, row_tile);
        write_rows(done, row_tile, largest, total, o);
      } else {
        for (int first = 0; first < kColumns; first += slice) {
          share(done, group, first, sums, largest, total, o);
          if (first + slice == kColumns && has_next) load_queries(q, range, unit, row_tile);
          __syncthreads();
          write_slice(done, first, sums);
          // The next step overwrites data that other warps read.
          __syncthreads();
        }
      }
    }
    wait_for_stages<0>();
  }

  __device__ void load_queries(uint32_t (&q)[kColumns / 16][4], int2 (&range)[2], const Unit& unit,
                               int row_tile) const {
    const int lane = threadIdx.x % 32, first_row = unit.block * kBlock + row_tile * 16 + lane / 4;
    const int2* ranges = all.ranges_of(unit.entry, unit.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half;
      const bool is_there = row < rows;
      range[half] = is_there ? ranges[all.query_of(row)] : make_int2(0, INT32_MAX);
      const E* from = static_cast<const E*>(a.q);
      if (is_there) from += all.query_at(unit.entry, unit.head, row) * a.width;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const int column = 8 * j + lane % 4 * 2;
        q[j / 2][half + j % 2 * 2] =
            is_there && column < a.width ? *reinterpret_cast<const uint32_t*>(from + column) : 0;
      }
    }
  }

  __device__ static void add_tile(uint32_t k, int first, const uint32_t (&q)[kColumns / 16][4], const int2 (&range)[2],
                                  const Bend& bend, float (&largest)[2], float (&total)[2],
                                  float (&o)[kColumns / 8][4]) {
    const int lane = threadIdx.x % 32;
    float t[kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t right[4];
        load_matrices(right, k + offset(16 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
        multiply<E>(t[2 * j], q[step], right[0], right[1]);
        multiply<E>(t[2 * j + 1], q[step], right[2], right[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (bend.is_bent) {
          float slope;
          t[j][i] = bend(t[j][i], slope);
        }
        t[j][i] *= bend.factor;
      }
    }
    const bool is_cut = first < max(range[0].x, range[1].x) || first + kKeys > min(range[0].y, range[1].y);
    if (__any_sync(~0u, is_cut)) {
      mask_range(t, 0, range[0], first);
      mask_range(t, 1, range[1], first);
    }
    float kept[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = largest[half];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) most = fmaxf(most, fmaxf(t[j][2 * half], t[j][2 * half + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float shift = most == -infinity() ? 0 : most;
      kept[half] = ptx::ex2(largest[half] - shift);
      largest[half] = most;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          t[j][i] = ptx::ex2(t[j][i] - shift);
          sum += t[j][i];
        }
      }
      total[half] = total[half] * kept[half] + sum;
    }
    if (__any_sync(~0u, kept[0] != 1 || kept[1] != 1)) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        o[j][0] *= kept[0], o[j][1] *= kept[0], o[j][2] *= kept[1], o[j][3] *= kept[1];
      }
    }
    const uint32_t v = k + kTileBytes;
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      const uint32_t p[4] = {packed<E>(t[2 * j][0], t[2 * j][1]), packed<E>(t[2 * j][2], t[2 * j][3]),
                             packed<E>(t[2 * j + 1][0], t[2 * j + 1][1]),
                             packed<E>(t[2 * j + 1][2], t[2 * j + 1][3])};
#pragma unroll
      for (int column = 0; column < kColumns / 16; ++column) {
        uint32_t right[4];
        load_matrices_transposed(right, v + offset(16 * j + lane % 16, 2 * column + lane / 16));
        multiply<E>(o[2 * column], p, right[0], right[1]);
        multiply<E>(o[2 * column + 1], p, right[2], right[3]);
      }
    }
  }

  // Writes one group's rows of a unit.
  __device__ void write_rows(const Unit& unit, int row_tile, const float (&largest)[2], const float (&total)[2],
                             const float (&o)[kColumns / 8][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = unit.block * kBlock + row_tile * 16 + lane / 4 + 8 * half;
      if (row >= rows) continue;
      const Row to(all, all.chunks == 1, unit.entry, unit.head, unit.chunk, row, largest[half]);
      const float kept = ptx::ex2(largest[half] - to.shift), sum = fmaf(total[half], kept, to.of_sink());
      const float factor = sum == 0 ? 0 : kept / sum;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const int column = 8 * j + lane % 4 * 2;
        if (column < a.value_width) to.store(column, o[j][2 * half] * factor, o[j][2 * half + 1] * factor);
      }
      if (lane % 4 == 0) to.store_lse(sum);
    }
  }

  // Writes a group's sums of columns from `first` on to shared memory.
  __device__ void share(const Unit& unit, int group, int first, float* sums, const float (&largest)[2],
                        const float (&total)[2], const float (&o)[kColumns / 8][4]) const {
    const int lane = threadIdx.x % 32, block_rows = min(kBlock, rows - unit.block * kBlock);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (lane % 4 == 0) shared.largest[group][row] = largest[half], shared.total[group][row] = total[half];
      if (row >= block_rows) continue;
      // Swizzled, so that eight rows of a matrix lie in different banks.
      float* to = sums + (group * block_rows + row) * (slice + 8) + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        if (8 * j < first || 8 * j >= first + slice) continue;
        *reinterpret_cast<float2*>(to + 8 * j - first) = make_float2(o[j][2 * half], o[j][2 * half + 1]);
      }
    }
  }

  // Adds the groups' sums in order, and writes columns from `first` on.
  __device__ void write_slice(const Unit& unit, int first, const float* sums) const {
    const int block_rows = min(kBlock, rows - unit.block * kBlock), pairs = slice / 2;
    for (int i = threadIdx.x; i < block_rows * pairs; i += kAttentionDecodeThreads) {
      const int row = i / pairs, column = i % pairs * 2;
      if (first + column >= a.value_width) continue;
      float most = -infinity();
#pragma unroll
      for (int one = 0; one < kGroups; ++one) most = fmaxf(most, shared.largest[one][row]);
      const Row to(all, all.chunks == 1, unit.entry, unit.head, unit.chunk, unit.block * kBlock + row, most);
      float sum = 0, x = 0, y = 0;
#pragma unroll
      for (int one = 0; one < kGroups; ++one) {
        const float kept = ptx::ex2(shared.largest[one][row] - to.shift);
        const float2 part =
            *reinterpret_cast<const float2*>(sums + (one * block_rows + row) * (slice + 8) + column);
        sum = fmaf(shared.total[one][row], kept, sum);
        x = fmaf(part.x, kept, x), y = fmaf(part.y, kept, y);
      }
      sum += to.of_sink();
      const float factor = sum == 0 ? 0 : 1 / sum;
      to.store(first + column, x * factor, y * factor);
      if (first + column == 0) to.store_lse(sum);
    }
  }

  // The destination of a row's o and lse: the results, which include the sink, or the partial results of a chunk.
  struct Row {
    const FlashAttentionDecodeArguments& all;
    int64_t at, of_lse;
    float sink, shift;
    bool is_last;

    __device__ Row(const FlashAttentionDecodeArguments& arguments, bool last, int entry, int of_entry, int chunk,
                   int row, float most)
        : all(arguments), sink(-infinity()), is_last(last) {
      const int rows = all.of.group * all.of.queries;
      const int64_t head = all.head(entry, of_entry);
      if (is_last) {
        of_lse = head * rows + row;
        at = all.query_at(entry, of_entry, row);
        sink = all.sink_of(entry, of_entry, row) * kLog2E;
      } else {
        at = of_lse = (head * all.chunks + chunk) * rows + row;
      }
      // A NaN sink makes the row NaN.
      if (sink > most || sink != sink) most = sink;
      shift = most == -infinity() ? 0 : most;
    }

    __device__ float of_sink() const { return ptx::ex2(sink - shift); }

    __device__ void store(int column, float x, float y) const {
      const int64_t place = at * all.of.value_width + column;
      if (is_last) {
        *reinterpret_cast<uint32_t*>(static_cast<E*>(all.of.o) + place) = packed<E>(x, y);
      } else {
        *reinterpret_cast<float2*>(all.partials + place) = make_float2(x, y);
      }
    }

    __device__ void store_lse(float sum) const {
      const float lse = sum == 0 ? -infinity() : shift + log2f(sum);
      if (is_last) {
        all.of.lse[of_lse] = lse * kLn2;
      } else {
        all.partial_lse[of_lse] = lse;
      }
    }
  };
};

// Adds a row's chunks. A CTA per row.
template <class E>
__device__ inline void merge(const FlashAttentionDecodeArguments& all) {
  // Chunks that a thread reads at once.
  constexpr int kAtOnce = 8;
  __shared__ float4 values[kAttentionDecodeThreads];
  __shared__ float largest[kAttentionDecodeThreads], totals[kAttentionDecodeThreads];
  const FlashAttentionArguments& a = all.of;
  const int rows = a.group * a.queries, of_entries = blockIdx.x / rows, row = blockIdx.x % rows;
  const int entry = of_entries / a.inner, of_entry = of_entries % a.inner;
  const int64_t head = all.head(entry, of_entry);
  const int2 range = all.ranges_of(entry, of_entry)[all.query_of(row)];
  const int first = range.x < range.y ? range.x >> all.chunk_log2 : 0;
  const int end = range.x < range.y ? (range.y - 1 >> all.chunk_log2) + 1 : 0;
  // Lanes of a row, with four columns each, and the chunks that all threads read at once.
  const int lanes = a.value_width > 128 ? 64 : 32, step = kAttentionDecodeThreads / lanes;
  const int column = threadIdx.x % lanes * 4, own = threadIdx.x / lanes;
  const bool has_column = column < a.value_width;
  const float* of_lse = all.partial_lse + head * all.chunks * rows + row;
  const float* of_o = all.partials + (head * all.chunks * rows + row) * a.value_width + column;
  ptx::wait_for_previous_kernel();
  float most = -infinity(), total = 0;
  float4 value = make_float4(0, 0, 0, 0);
  // Each chunk is read by the same threads in every pass.
  for (int base = first + (own - first % step + step) % step; base < end; base += kAtOnce * step) {
    float lse[kAtOnce];
    float4 part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = base + i * step;
      const int64_t at = static_cast<int64_t>(chunk) * rows;
      const bool is_there = chunk < end;
      lse[i] = is_there ? of_lse[at] : -infinity();
      part[i] = is_there && has_column ? *reinterpret_cast<const float4*>(of_o + at * a.value_width)
                                       : make_float4(0, 0, 0, 0);
    }
    const float before = most;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, lse[i]);
    const float shift = most == -infinity() ? 0 : most, kept = ptx::ex2(before - shift);
    total *= kept, value.x *= kept, value.y *= kept, value.z *= kept, value.w *= kept;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight = ptx::ex2(lse[i] - shift);
      total += weight;
      value.x = fmaf(part[i].x, weight, value.x), value.y = fmaf(part[i].y, weight, value.y);
      value.z = fmaf(part[i].z, weight, value.z), value.w = fmaf(part[i].w, weight, value.w);
    }
  }
  values[threadIdx.x] = value, largest[threadIdx.x] = most, totals[threadIdx.x] = total;
  __syncthreads();
  if (own != 0 || !has_column) return;
  for (int i = 1; i < step; ++i) most = fmaxf(most, largest[i * lanes + threadIdx.x]);
  const typename Forward<E, 64, 1>::Row to(all, true, entry, of_entry, 0, row, most);
  float sum = to.of_sink();
  value = make_float4(0, 0, 0, 0);
  for (int i = 0; i < step; ++i) {
    const int thread = i * lanes + threadIdx.x;
    const float kept = ptx::ex2(largest[thread] - to.shift);
    const float4 part = values[thread];
    sum = fmaf(totals[thread], kept, sum);
    value.x = fmaf(part.x, kept, value.x), value.y = fmaf(part.y, kept, value.y);
    value.z = fmaf(part.z, kept, value.z), value.w = fmaf(part.w, kept, value.w);
  }
  const float factor = sum == 0 ? 0 : 1 / sum;
  to.store(column, value.x * factor, value.y * factor);
  to.store(column + 2, value.z * factor, value.w * factor);
  if (column == 0) to.store_lse(sum);
}

}  // namespace attention::decode
}  // namespace xentile

// The backward pass of attention on Hopper with seven GEMMs: one kernel for dk and dv, one for dq. A CTA has a
// producer warpgroup, which loads tiles into a ring of stages by TMA, and two consumer warpgroups with 64 rows each;
// the exponentials of one overlap with the GEMMs of the other. Roles, ring and registers are as in FlashAttention 3
// (Shah et al., 2024). Each sum belongs to one CTA and has one order of terms, so both kernels recompute the logits.
// docs/internals/flash-attention.md draws the schedule.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "flash_attention.cuh"

namespace xentile {

// Mirrored by `BackwardArguments` in src/flash_attention/arguments.rs. Boxes are of 64 columns and rows;
// axes from the last on, q and do [outer, inner, group, queries, width], k and v [outer, inner, keys, width].
struct alignas(128) FlashAttentionBackwardArguments {
  CUtensorMap q;
  CUtensorMap dout;
  CUtensorMap k;
  CUtensorMap v;
  FlashAttentionArguments of;
};

// Mirrored by `NUMBERS` there.
inline constexpr uint32_t kAttentionBackwardThreads = 384;
// Rows of a CTA: keys, or queries.
inline constexpr int32_t kAttentionBackwardRows = 128;
// Dynamic shared memory of a launch.
inline constexpr uint32_t kAttentionKeysBytes64 = 160 << 10;
inline constexpr uint32_t kAttentionKeysBytes128 = 192 << 10;
inline constexpr uint32_t kAttentionKeysBytes192 = 208 << 10;
inline constexpr uint32_t kAttentionKeysBytes256 = 224 << 10;
inline constexpr uint32_t kAttentionValuesBytes192 = 208 << 10;
inline constexpr uint32_t kAttentionValuesBytes256 = 192 << 10;
inline constexpr uint32_t kAttentionQueriesBytes64 = 160 << 10;
inline constexpr uint32_t kAttentionQueriesBytes128 = 192 << 10;
inline constexpr uint32_t kAttentionQueriesBytes192 = 200 << 10;
inline constexpr uint32_t kAttentionQueriesBytes256 = 224 << 10;

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace attention::hopper {

inline constexpr int kGroups = 2;
inline constexpr int kBox = 64;
inline constexpr int kBoxBytes = kBox * 128;
// Warps that load tiles, in turns.
inline constexpr int kBringing = 2;

// Loads kRows rows from `row` on, in the layout of `Rows`. Called by one thread.
template <class Tile, int kRows, int kColumns, class... At>
__device__ inline void load_rows(const Tile& to, const CUtensorMap& map, uint32_t barrier, int row, At... at) {
#pragma unroll
  for (int panel = 0; panel < kColumns / kBox; ++panel) {
#pragma unroll
    for (int part = 0; part < kRows / kBox; ++part) {
      ptx::tensor_load(to.base + panel * Tile::kPanelBytes + part * kBoxBytes, map, panel * kBox, row + part * kBox,
                       at..., barrier);
    }
  }
}

// sums = a strip of `left` times the transpose of `right`, as one `wgmma` group. The sums need no initial value, so
// the compiler does not write them while other groups run.
template <int kCount, class E, int kColumns, int kLeftRows>
__device__ inline void multiply_anew(float (&sums)[kCount / 8][4], const Rows<E, kColumns, kLeftRows>& left, int strip,
                                     const Rows<E, kColumns, kCount>& right) {
  const uint64_t of_left = ptx::matrix_of(left.base + strip * (kStrip * 128)), of_right = ptx::matrix_of(right.base);
  fence();
  multiply<E>(sums, of_left, of_right);
#pragma unroll
  for (int step = 1; step < kColumns / 16; ++step) {
    const int within = step % 4 * 32, panel = step / 4;
    multiply<E>(sums, of_left + (panel * left.kPanelBytes + within) / 16,
                of_right + (panel * right.kPanelBytes + within) / 16, 1);
  }
  ptx::wgmma_commit();
}

// Warpgroups issue GEMMs in turns, so that one's GEMMs overlap with the other's exponentials.
__device__ inline void begin_turn(int group) { meet<2 * kWarpgroup>(3 + group); }

__device__ inline void end_turn(int group) { arrive<2 * kWarpgroup>(3 + (group ^ 1)); }

template <int kCount>
__device__ inline void clear(float (&sums)[kCount][4]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0;
}

// Sets a row to zeros.
template <class Tile>
__device__ inline void clear_row(const Tile& tile, int row) {
#pragma unroll 1
  for (int vector = 0; vector < Tile::kVectors; ++vector) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile.at(row, vector)), "r"(0) : "memory");
  }
}

// Calls `with` what softcaps products: the shortest `NearZero` that covers all products of a warp, as is usual for
// logits well below the cap, or else `bend`. Masked products, which are -inf, stay so with a `NearZero`.
template <int kEights, class With>
__device__ inline void bend_by_squares(const Bend& bend, const float (&products)[kEights][4], const With& with) {
  // Roots of sums of eight squares are no less than the largest product, and take fewer cycles than maxima. A sum that
  // is NaN, by a key that is not seen, says nothing of the other seven.
  float most = 0;
#pragma unroll
  for (int j = 0; j < kEights; j += 2) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(products[j + i / 4][i % 4], products[j + i / 4][i % 4], sum);
    most = ptx::max_or_nan(most, sum);
  }
  most *= bend.inner * bend.inner;
  // Masked products stay -inf if no power of `inner` is negative or 0.
  const bool is_monotonic = bend.has_cap && bend.inner >= 1e-4f;
  const auto is_within = [&](float limit) { return is_monotonic && __all_sync(~0u, most <= limit * limit); };
  // So that the compiler does not keep the terms in registers all along.
  float factor = bend.inner;
  asm volatile("" : "+f"(factor));
  if (is_within(NearZero<3>::kMost)) {
    with(NearZero<3>(factor));
  } else if (is_within(NearZero<5>::kMost)) {
    with(NearZero<5>(factor));
  } else {
    with(bend);
  }
}

// From products of keys and queries, the left factors of dv and dk: probabilities, and cotangents of logits, or either.
// `notes` have lse and delta of pairs of queries. `mask` has products that are not seen be -inf.
template <class E, bool kIsBent, bool kIsWhole, bool kMakesKeys, bool kMakesValues, int kEights, int kOfValues,
          int kLeft, int kDs, class Mask>
__device__ inline void make_factors(const Bend& bend, float (&p)[kEights][4], float (&of_values)[kOfValues][4],
                                    const float4* notes, const Mask& mask, uint32_t (&left)[kLeft][4],
                                    uint32_t (&ds)[kDs][4]) {
  // `soften` softcaps a product, and multiplies its cotangent by the slope.
  const auto make = [&](const auto& soften) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float4 pair = notes[4 * j + threadIdx.x % 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float difference = 0;
        if constexpr (kMakesKeys) difference = of_values[j][i] - (i % 2 == 0 ? pair.y : pair.w);
        soften(p[j][i], difference);
        p[j][i] = probability(bend, p[j][i], i % 2 == 0 ? pair.x : pair.z);
        if constexpr (kMakesKeys) of_values[j][i] = difference;
      }
      if constexpr (kMakesValues) {
        left[j / 2][j % 2 * 2] = packed<E>(p[j][0], p[j][1]);
        left[j / 2][j % 2 * 2 + 1] = packed<E>(p[j][2], p[j][3]);
      }
      if constexpr (kMakesKeys) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // The gradient of a masked pair may be NaN.
          p[j][i] = !kIsWhole && p[j][i] == 0 ? 0 : p[j][i] * of_values[j][i];
        }
        ds[j / 2][j % 2 * 2] = packed<E>(p[j][0], p[j][1]);
        ds[j / 2][j % 2 * 2 + 1] = packed<E>(p[j][2], p[j][3]);
      }
    }
  };
  if constexpr (!kIsBent) {
    mask();
    make([](float, float) {});
  } else {
    bend_by_squares(bend, p, [&](const auto& by) {
      // Polynomials of -inf are -inf, but tanh is not.
      constexpr bool kIsPolynomial = !std::is_same_v<std::decay_t<decltype(by)>, Bend>;
      if constexpr (!kIsPolynomial) {
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float slope;
            p[j][i] = by(p[j][i], slope);
          }
        }
      }
      mask();
      make([&](float& product, float& difference) {
        if constexpr (kIsPolynomial) {
          float slope;
          product = by(product, slope);
          difference *= slope;
        } else if (bend.has_cap) {
          difference *= fmaf(-product, product, 1.0f);
        }
      });
    });
  }
}

// dk and dv of 128 keys, 64 per warpgroup, over tiles of 64 queries of the whole group. Keys are the rows of GEMMs.
// The ring of queries has kStages tiles, that of cotangents kOfValues.
template <class E, int kColumns, int kValueColumns, bool kMakesKeys, bool kMakesValues, int kStages, int kOfValues,
          bool kIsBent>
struct KeyGradients {
  static constexpr int kKeys = kAttentionBackwardRows, kRows = kAttentionBlock;
  static constexpr int kOwn = kKeys / kGroups;
  using Tile = Rows<E, kColumns, kRows>;
  using ValueTile = Rows<E, kValueColumns, kRows>;
  using Keys = Rows<E, kColumns, kKeys>;
  using Values = Rows<E, kValueColumns, kKeys>;
  static constexpr int kKeptBytes = Keys::kBytes + (kMakesKeys ? Values::kBytes : 0);
  static constexpr int kSharedBytes = kKeptBytes + kStages * Tile::kBytes + kOfValues * ValueTile::kBytes;

  // Of a warpgroup's keys.
  enum Sees : uint32_t { kNone = 0, kSome = 1, kAll = 2 };
  static constexpr uint32_t kOfGroup = 2, kHasBlanks = 1 << 4, kIsEnd = 1 << 5;
  // Whether all segments are 0, so that ranges alone are the mask.
  static constexpr uint32_t kIsSegment0 = 1 << 6;

  struct About {
    alignas(16) int2 ranges[kRows];
    float4 notes[kRows / 2];  // lse and delta of two rows
    int32_t segments[kRows];
    uint32_t flags;
  };

  struct Shared {
    About about[kStages];
    alignas(8) uint64_t full[kStages], empty[kStages], full_of_values[kOfValues], empty_of_values[kOfValues], kept;
  };

  const FlashAttentionBackwardArguments& all;
  const FlashAttentionArguments& a;
  Shared& shared;
  uint32_t base;
  int of_keys, first_key;

  __device__ Keys k() const { return {base}; }
  __device__ Values v() const { return {base + Keys::kBytes}; }
  __device__ Tile q(uint32_t stage) const { return {base + kKeptBytes + stage * Tile::kBytes}; }
  __device__ ValueTile dout(uint32_t stage) const { return {q(kStages).base + stage * ValueTile::kBytes}; }
  __device__ uint32_t full(uint32_t stage) const { return ptx::shared_address(&shared.full[stage]); }
  __device__ uint32_t empty(uint32_t stage) const { return ptx::shared_address(&shared.empty[stage]); }
  __device__ uint32_t full_of_values(uint32_t stage) const {
    return ptx::shared_address(&shared.full_of_values[stage]);
  }
  __device__ uint32_t empty_of_values(uint32_t stage) const {
    return ptx::shared_address(&shared.empty_of_values[stage]);
  }

  // Loads every `kBringing`th tile that has a query which sees a key.
  __device__ void bring() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int inner = of_keys % a.inner, outer = of_keys / a.inner;
    if (warp == 0 && lane == 0) {
      const uint32_t barrier = ptx::shared_address(&shared.kept);
      ptx::mbarrier_arrive_expect_tx(barrier, kKeptBytes);
      load_rows<Keys, kKeys, kColumns>(k(), all.k, barrier, first_key, inner, outer);
      if (kMakesKeys) load_rows<Values, kKeys, kValueColumns>(v(), all.v, barrier, first_key, inner, outer);
    }
    int least[kGroups], most[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      least[group] = INT32_MAX, most[group] = INT32_MIN;
      if (a.kv_segments == nullptr) continue;
      for (int i = lane; i < kOwn; i += 32) {
        const int key = group * kOwn + i;
        if (key >= a.keys - first_key) continue;
        const int32_t segment = a.kv_segments[static_cast<int64_t>(of_keys) * a.keys + first_key + key];
        least[group] = min(least[group], segment), most[group] = max(most[group], segment);
      }
      least[group] = __reduce_min_sync(~0u, least[group]);
      most[group] = __reduce_max_sync(~0u, most[group]);
    }
    bool is_segment_0 = true;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) is_segment_0 &= least[group] >= 0 && most[group] <= 0;
    Turn<kStages> turn;
    Turn<kOfValues> of_values;
    int turns = 0;
    const int blocks = (a.queries + kRows - 1) / kRows;
    // Of 32 blocks, those whose queries see a key, as bits; the same for all heads of the group.
    int from = 0, end = blocks, first_seen = blocks, end_seen = 0;
    const E* notes = static_cast<const E*>(a.dq) + a.first_query(of_keys) * a.width;
    for (int head = 0; head < a.group; ++head, notes += a.q_group * a.width) {
      if (head == 1) from = first_seen, end = end_seen;
      for (int begin = from; begin < end; begin += 32) {
        uint32_t own = 0;
        if (begin + lane < blocks) {
          const Note note = *reinterpret_cast<const Note*>(
              notes + static_cast<int64_t>(begin + lane) * kRows * a.q_row * a.width);
          if (note.has_blanks()) own |= kHasBlanks;
          const bool are_segments_0 = is_segment_0 && note.is_segment_0();
          if (are_segments_0) own |= kIsSegment0;
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const int first = first_key + group * kOwn, end = min(first + kOwn, a.keys);
            if (!(note.low < end && note.high > first)) continue;
            const bool is_whole = (are_segments_0 || a.q_segments == nullptr) && note.has_all(first, kOwn);
            own |= (is_whole ? kAll : kSome) << group * kOfGroup;
          }
        }
        uint32_t seen = __ballot_sync(~0u, (own & 15) != 0);
        if (seen != 0) first_seen = min(first_seen, begin), end_seen = min(begin + 32, blocks);
        while (seen != 0) {
          const int bit = __ffs(seen) - 1;
          seen &= seen - 1;
          uint32_t flags = __shfl_sync(~0u, own, bit);
          const int first = (begin + bit) * kRows;
          if (a.q_segments != nullptr && (flags & kIsSegment0) == 0) {
            const int32_t* segments = a.q_segments + static_cast<int64_t>(of_keys) * a.queries + first;
            const int count = min(kRows, a.queries - first);
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
              if (are_apart(segments, count, least[group], most[group])) flags &= ~(3u << group * kOfGroup);
            }
            if ((flags & 15) == 0) continue;
          }
          if (turns++ % kBringing == warp) bring_tile(turn, of_values, notes, head, first, inner, outer, flags);
          turn.next(), of_values.next();
        }
      }
    }
    if (turns % kBringing != warp) return;
    ptx::mbarrier_wait(empty(turn.stage), turn.parity ^ 1);
    if (lane == 0) shared.about[turn.stage].flags = kIsEnd;
    ptx::mbarrier_arrive(full(turn.stage));
  }

  __device__ void bring_tile(const Turn<kStages>& turn, const Turn<kOfValues>& of_values, const E* notes, int head,
                             int first, int inner, int outer, uint32_t flags) const {
    const int lane = threadIdx.x % 32;
    About& about = shared.about[turn.stage];
    int2 ranges[2];
    float lse[2], delta[2];
    int32_t segments[2];
    const int64_t of_ranges = static_cast<int64_t>(of_keys) * a.queries + first;
    const int64_t row = (static_cast<int64_t>(of_keys) * a.group + head) * a.queries + first;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = lane + 32 * i;
      const bool reads = first + own < a.queries;
      ranges[i] = make_int2(0, 0), lse[i] = -infinity(), delta[i] = 0, segments[i] = 0;
      if (!reads) continue;
      ranges[i] = reinterpret_cast<const int2*>(a.ranges)[of_ranges + own];
      lse[i] = a.lse[row + own];
      delta[i] = reinterpret_cast<const Note*>(notes + static_cast<int64_t>(first + own) * a.q_row * a.width)->delta;
      if (a.q_segments != nullptr) segments[i] = a.q_segments[of_ranges + own];
    }
    ptx::mbarrier_wait(empty(turn.stage), turn.parity ^ 1);
    const uint32_t barrier = full(turn.stage);
    // Each lane arrives after its writes; the first lane's arrival also expects the bytes of the copies.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = lane + 32 * i;
      about.ranges[own] = ranges[i];
      reinterpret_cast<float2*>(about.notes)[own] = make_float2(lse_of(lse[i]), delta[i]);
      if (a.q_segments != nullptr) about.segments[own] = segments[i];
    }
    if (lane != 0) {
      ptx::mbarrier_arrive(barrier);
      return;
    }
    about.flags = flags;
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
    load_rows<Tile, kRows, kColumns>(q(turn.stage), all.q, barrier, first, head, inner, outer);
    ptx::mbarrier_wait(empty_of_values(of_values.stage), of_values.parity ^ 1);
    const uint32_t other = full_of_values(of_values.stage);
    ptx::mbarrier_arrive_expect_tx(other, ValueTile::kBytes);
    load_rows<ValueTile, kRows, kValueColumns>(dout(of_values.stage), all.dout, other, first, head, inner, outer);
  }

  // The state of a consumer warpgroup.
  struct Own {
    float keys[kMakesKeys ? kColumns / 8 : 1][4], values[kMakesValues ? kValueColumns / 8 : 1][4];
    int group, row, lane;  // of the CTA's keys, the first of the warp
  };

  __device__ void mask(float (&products)[kRows / 8][4], const About& about, const Own& of) const {
    const int row = of.row + of.lane / 4, key = first_key + row;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const int column = 8 * j + of.lane % 4 * 2;
      const int4 ranges = *reinterpret_cast<const int4*>(&about.ranges[column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = key + 8 * half;
        if (!(ranges.x <= own && own < ranges.y)) products[j][2 * half] = -infinity();
        if (!(ranges.z <= own && own < ranges.w)) products[j][2 * half + 1] = -infinity();
      }
      if (a.q_segments == nullptr || (about.flags & kIsSegment0) != 0) continue;
      const int2 pair = *reinterpret_cast<const int2*>(&about.segments[column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool is_there = key + 8 * half < a.keys;
        const int32_t segment =
            is_there ? a.kv_segments[static_cast<int64_t>(of_keys) * a.keys + key + 8 * half] : 0;
        if (pair.x != segment) products[j][2 * half] = -infinity();
        if (pair.y != segment) products[j][2 * half + 1] = -infinity();
      }
    }
  }

  // Positions in the two rings.
  struct At {
    Turn<kStages> q;
    Turn<kOfValues> dout;
  };

  __device__ void await_of_values(const At& at) const {
    ptx::mbarrier_wait(full_of_values(at.dout.stage), at.dout.parity);
  }

  // Queries that see no key may hold NaN. Each warpgroup clears them.
  __device__ void clear_blanks(const At& at, const Own& of) const {
    await_of_values(at);
    const int row = threadIdx.x % 64;
    const int2 range = shared.about[at.q.stage].ranges[row];
    const bool is_of_queries = threadIdx.x / 64 % 2 == 0;
    if (range.x >= range.y && is_of_queries) clear_row(q(at.q.stage), row);
    if (range.x >= range.y && !is_of_queries) clear_row(dout(at.dout.stage), row);
    ptx::fence_async_shared();
    meet<128>(1 + of.group);
  }

  __device__ void release(uint32_t barrier, const Own& of) const {
    __syncwarp();
    if (of.lane == 0) ptx::mbarrier_arrive(barrier);
  }

  // Likewise where lanes read what another thread stored: every lane arrives, since racecheck ignores __syncwarp.
  __device__ void leave(uint32_t barrier) const { ptx::mbarrier_arrive(barrier); }

  // Advances to the next tile for this warpgroup, and returns what it sees of the tile; kNone after the last. It passes
  // its turn for other tiles.
  template <class LetGoBy>
  __device__ uint32_t next(At& at, const Own& of, const LetGoBy& let_go_by) const {
    while (true) {
      ptx::mbarrier_wait(full(at.q.stage), at.q.parity);
      const uint32_t flags = ptx::uniform(shared.about[at.q.stage].flags);
      if ((flags & kIsEnd) != 0) return kNone;
      const uint32_t sees = flags >> of.group * kOfGroup & 3;
      if (sees != kNone) {
        if ((flags & kHasBlanks) != 0) clear_blanks(at, of);
        return sees;
      }
      // Only once the tile is there, as the barrier counts phases, and before the other turn, which may need the slot.
      await_of_values(at);
      leave(empty(at.q.stage));
      release(empty_of_values(at.dout.stage), of);
      let_go_by();
      at.q.next(), at.dout.next();
    }
  }

  __device__ void walk(const Bend& bend, Own& of) const {
    At at;
    float p[kRows / 8][4], of_values[kMakesKeys ? kRows / 8 : 1][4];
    uint32_t sees = next(at, of, [&] { begin_turn(of.group), end_turn(of.group); });
    if (sees == kNone) return;
    multiply_anew<kRows>(p, k(), of.group, q(at.q.stage));
    if constexpr (kMakesKeys) {
      await_of_values(at);
      multiply_anew<kRows>(of_values, v(), of.group, dout(at.dout.stage));
    }
    while (true) {
      const At last = at;
      const About& about = shared.about[last.q.stage];
      const auto release_last = [&] {
        leave(empty(last.q.stage));
        if (kMakesValues) release(empty_of_values(last.dout.stage), of);
      };
      wait<E, 0>();
      settle<E>(p);
      if constexpr (kMakesKeys) {
        settle<E>(of_values);
        if (!kMakesValues) release(empty_of_values(last.dout.stage), of);
      }
      uint32_t left[kMakesValues ? kRows / 16 : 1][4], ds[kMakesKeys ? kRows / 16 : 1][4];
      const auto mask_seen = [&] {
        if (sees != kAll) mask(p, about, of);
      };
      make_factors<E, kIsBent, false, kMakesKeys, kMakesValues>(bend, p, of_values, about.notes, mask_seen, left, ds);
      begin_turn(of.group);
      if constexpr (kMakesValues) {
        if (!kMakesKeys) await_of_values(last);
        multiply_along<kRows>(of.values, left, dout(last.dout.stage));
      }
      if constexpr (kMakesKeys) multiply_along<kRows>(of.keys, ds, q(last.q.stage));
      at.q.next(), at.dout.next();
      bool is_done = false;
      sees = next(at, of, [&] {
        // The next tile may need the slot of the last one.
        wait<E, 0>();
        if (!is_done) release_last();
        is_done = true;
        end_turn(of.group), begin_turn(of.group);
      });
      if (sees == kNone) break;
      if constexpr (kMakesKeys && kMakesValues) wait<E, 1>();
      multiply_anew<kRows>(p, k(), of.group, q(at.q.stage));
      wait<E, 1>();
      if (!is_done) release_last();
      if constexpr (kMakesKeys) {
        await_of_values(at);
        multiply_anew<kRows>(of_values, v(), of.group, dout(at.dout.stage));
      }
      end_turn(of.group);
    }
    wait<E, 0>();
    if constexpr (kMakesKeys) settle<E>(of.keys);
    if constexpr (kMakesValues) settle<E>(of.values);
    end_turn(of.group);
  }

  __device__ void multiply() const {
    Own of;
    of.group = threadIdx.x / 128 - 1;
    of.lane = threadIdx.x % 32;
    of.row = threadIdx.x % 128 / 32 * 16 + of.group * kOwn;
    clear(of.keys);
    clear(of.values);
    ptx::mbarrier_wait(ptx::shared_address(&shared.kept), 0);
    const Bend bend(a);
    if (of.group == 1) end_turn(1);
    walk(bend, of);
    if (of.group == 0) begin_turn(0);
    const int64_t count = a.keys - first_key - of.row;
    const int64_t row = a.first_key(of_keys) + static_cast<int64_t>(first_key + of.row) * a.k_row;
    // Only the warpgroup's own GEMMs read its rows.
    meet<128>(1 + of.group);
    if constexpr (kMakesKeys) {
      k().store(of.keys, a.scale, a.scale, of.row, static_cast<E*>(a.dk) + row * a.width, a.width, a.k_row * a.width,
                count);
    }
    if constexpr (kMakesValues) {
      Values{kMakesKeys ? v().base : base}
          .store(of.values, 1, 1, of.row, static_cast<E*>(a.dv) + row * a.value_width, a.value_width,
                 a.k_row * a.value_width, count);
    }
  }

  __device__ static void run(const FlashAttentionBackwardArguments& all) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ Shared shared;
    const FlashAttentionArguments& a = all.of;
    const uint32_t tiles = (static_cast<uint32_t>(a.keys) + kKeys - 1) / kKeys;
    const KeyGradients of{all,
                          a,
                          shared,
                          ptx::shared_address(memory),
                          static_cast<int>(blockIdx.x / tiles),
                          static_cast<int>(blockIdx.x % tiles) * kKeys};
    if (threadIdx.x == 0) {
      for (uint32_t stage = 0; stage < kStages; ++stage) {
        ptx::mbarrier_init(of.full(stage), 32);
        ptx::mbarrier_init(of.empty(stage), kGroups * kWarpgroup);
      }
      for (uint32_t stage = 0; stage < kOfValues; ++stage) {
        ptx::mbarrier_init(of.full_of_values(stage), 1);
        ptx::mbarrier_init(of.empty_of_values(stage), kGroups * 4);
      }
      ptx::mbarrier_init(ptx::shared_address(&shared.kept), 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      ptx::fewer_registers<40>();
      if (threadIdx.x < 32 * kBringing) of.bring();
    } else {
      ptx::more_registers<232>();
      of.multiply();
    }
  }
};

// dq of 128 queries, 64 per warpgroup, over tiles of kKeys keys.
// The ring of keys has kStages tiles, that of values kOfValues.
template <class E, int kColumns, int kValueColumns, int kKeys, int kStages, int kOfValues, bool kIsBent>
struct QueryGradients {
  static constexpr int kRows = kAttentionBackwardRows;
  static constexpr int kOwn = kRows / kGroups;
  using Tile = Rows<E, kColumns, kKeys>;
  using ValueTile = Rows<E, kValueColumns, kKeys>;
  using Queries = Rows<E, kColumns, kRows>;
  using Cotangents = Rows<E, kValueColumns, kRows>;
  static constexpr int kKeptBytes = Queries::kBytes + Cotangents::kBytes;
  static constexpr int kSharedBytes = kKeptBytes + kStages * Tile::kBytes + kOfValues * ValueTile::kBytes;
  static constexpr int kEnd = INT32_MAX;

  struct Shared {
    int2 ranges[kRows];
    int32_t of_keys[kStages][kKeys];
    int keys[kStages];
    // Whether all queries of the block and all keys of the tile are of one segment.
    bool are_one_segment[kStages];
    // Of 32 rows: the hull, and the least and the largest segment.
    int hulls[kRows / 32][6];
    alignas(8) uint64_t full[kStages], empty[kStages], full_of_values[kOfValues], empty_of_values[kOfValues], kept;
  };

  const FlashAttentionBackwardArguments& all;
  const FlashAttentionArguments& a;
  Shared& shared;
  uint32_t base;
  int head, of_keys, first;  // head of the group, and of keys; query

  __device__ Queries q() const { return {base}; }
  __device__ Cotangents dout() const { return {base + Queries::kBytes}; }
  __device__ Tile k(uint32_t stage) const { return {base + kKeptBytes + stage * Tile::kBytes}; }
  __device__ ValueTile v(uint32_t stage) const { return {k(kStages).base + stage * ValueTile::kBytes}; }
  __device__ uint32_t full(uint32_t stage) const { return ptx::shared_address(&shared.full[stage]); }
  __device__ uint32_t empty(uint32_t stage) const { return ptx::shared_address(&shared.empty[stage]); }
  __device__ uint32_t full_of_values(uint32_t stage) const {
    return ptx::shared_address(&shared.full_of_values[stage]);
  }
  __device__ uint32_t empty_of_values(uint32_t stage) const {
    return ptx::shared_address(&shared.empty_of_values[stage]);
  }

  // Of rows from 32 `from` to 32 `end`.
  __device__ Hull hull_of(int from, int end) const {
    Hull hull = Hull::none();
    for (int i = from; i < end; ++i) {
      const int(&other)[6] = shared.hulls[i];
      hull.low = min(hull.low, other[0]), hull.high = max(hull.high, other[1]);
      hull.inner_low = max(hull.inner_low, other[2]), hull.inner_high = min(hull.inner_high, other[3]);
    }
    return hull;
  }

  // By the first kRows threads.
  __device__ void look() const {
    const int row = threadIdx.x, query = first + row;
    const int2 range = range_of(a, of_keys, query);
    shared.ranges[row] = range;
    Hull hull = Hull::none();
    int least = INT32_MAX, most = INT32_MIN;
    if (query < a.queries) {
      hull.add(range);
      if (a.q_segments != nullptr) {
        const int32_t segment = a.q_segments[static_cast<int64_t>(of_keys) * a.queries + query];
        if (range.x < range.y) least = most = segment;
      }
    }
    hull.reduce_warp();
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
    if (row % 32 == 0) {
      int(&own)[6] = shared.hulls[row / 32];
      own[0] = hull.low, own[1] = hull.high, own[2] = hull.inner_low, own[3] = hull.inner_high;
      own[4] = least, own[5] = most;
    }
  }

  __device__ void bring() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int inner = of_keys % a.inner, outer = of_keys / a.inner;
    if (warp == 0 && lane == 0) {
      const uint32_t barrier = ptx::shared_address(&shared.kept);
      ptx::mbarrier_arrive_expect_tx(barrier, kKeptBytes);
      load_rows<Queries, kRows, kColumns>(q(), all.q, barrier, first, head, inner, outer);
      load_rows<Cotangents, kRows, kValueColumns>(dout(), all.dout, barrier, first, head, inner, outer);
    }
    int low = INT32_MAX, high = 0, least = INT32_MAX, most = INT32_MIN;
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) {
      low = min(low, shared.hulls[i][0]), high = max(high, shared.hulls[i][1]);
      least = min(least, shared.hulls[i][4]), most = max(most, shared.hulls[i][5]);
    }
    Turn<kStages> turn;
    Turn<kOfValues> of_values;
    int turns = 0;
    const int32_t* segments = a.kv_segments + static_cast<int64_t>(of_keys) * a.keys;
    // Unsigned, since the end of the last tile may be 2^31.
    for (uint32_t next = low / kKeys * kKeys; low < high && next < static_cast<uint32_t>(high); next += kKeys) {
      const int key = static_cast<int>(next), count = min(kKeys, a.keys - key);
      bool is_seen = a.kv_segments == nullptr, is_one = is_seen || least == most;
      if (a.kv_segments != nullptr) {
#pragma unroll
        for (int i = lane; i < kKeys; i += 32) {
          if (i >= count) continue;
          const int32_t segment = segments[key + i];
          is_seen |= least <= segment && segment <= most;
          is_one &= segment == least;
        }
        is_seen = __any_sync(~0u, is_seen);
        is_one = __all_sync(~0u, is_one);
      }
      if (!is_seen) continue;
      if (turns++ % kBringing == warp) {
        ptx::mbarrier_wait(empty(turn.stage), turn.parity ^ 1);
        const uint32_t barrier = full(turn.stage);
        // Each lane arrives after its writes.
        if (!is_one) {
          for (int i = lane; i < count; i += 32) shared.of_keys[turn.stage][i] = segments[key + i];
        }
        if (lane != 0) {
          ptx::mbarrier_arrive(barrier);
        } else {
          shared.keys[turn.stage] = key;
          shared.are_one_segment[turn.stage] = is_one;
          ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
          load_rows<Tile, kKeys, kColumns>(k(turn.stage), all.k, barrier, key, inner, outer);
          ptx::mbarrier_wait(empty_of_values(of_values.stage), of_values.parity ^ 1);
          const uint32_t other = full_of_values(of_values.stage);
          ptx::mbarrier_arrive_expect_tx(other, ValueTile::kBytes);
          load_rows<ValueTile, kKeys, kValueColumns>(v(of_values.stage), all.v, other, key, inner, outer);
        }
      }
      turn.next(), of_values.next();
    }
    if (turns % kBringing != warp) return;
    ptx::mbarrier_wait(empty(turn.stage), turn.parity ^ 1);
    if (lane == 0) shared.keys[turn.stage] = kEnd;
    ptx::mbarrier_arrive(full(turn.stage));
  }

  struct Own {
    float sums[kColumns / 8][4];
    float lse[2], delta[2];
    int group, row, lane;
  };

  __device__ void mask(float (&products)[kKeys / 8][4], int key, uint32_t stage, const Own& of) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = of.row + of.lane / 4 + 8 * half;
      const int2 range = shared.ranges[own];
      const int low = range.x - key - of.lane % 4 * 2, high = range.y - key - of.lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!(low <= 8 * j + i && 8 * j + i < high)) products[j][2 * half + i] = -infinity();
        }
      }
      if (shared.are_one_segment[stage]) continue;
      const bool is_there = own < a.queries - first;
      const int32_t segment =
          is_there ? a.q_segments[static_cast<int64_t>(of_keys) * a.queries + first + own] : 0;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        const int2 pair = *reinterpret_cast<const int2*>(&shared.of_keys[stage][8 * j + of.lane % 4 * 2]);
        if (pair.x != segment) products[j][2 * half] = -infinity();
        if (pair.y != segment) products[j][2 * half + 1] = -infinity();
      }
    }
  }

  // Positions in the two rings.
  struct At {
    Turn<kStages> k;
    Turn<kOfValues> v;
  };

  __device__ void await_of_values(const At& at) const {
    ptx::mbarrier_wait(full_of_values(at.v.stage), at.v.parity);
  }

  __device__ void release(uint32_t barrier, const Own& of) const {
    __syncwarp();
    if (of.lane == 0) ptx::mbarrier_arrive(barrier);
  }

  // Likewise where lanes read what another thread stored: every lane arrives, since racecheck ignores __syncwarp.
  __device__ void leave(uint32_t barrier) const { ptx::mbarrier_arrive(barrier); }

  // Advances to the next tile for this warpgroup, and returns its first key; kEnd after the last. It passes its turn
  // for other tiles.
  template <class LetGoBy>
  __device__ int next(At& at, const Hull& hull, const Hull& own, const Own& of,
                      const LetGoBy& let_go_by) const {
    while (true) {
      ptx::mbarrier_wait(full(at.k.stage), at.k.parity);
      const int key = static_cast<int>(ptx::uniform(shared.keys[at.k.stage]));
      if (key == kEnd) return kEnd;
      if (own.high > key && own.low - key < kKeys) {
        if (hull.low > key || (hull.high - key < kKeys && hull.high < a.keys)) {
          // Keys that no query sees may hold NaN. Each warpgroup clears them.
          const Tile k = this->k(at.k.stage);
          const int row = threadIdx.x % 128;
          if (row < kKeys && (row < hull.low - key || row >= hull.high - key)) clear_row(k, row);
          ptx::fence_async_shared();
          meet<128>(1 + of.group);
        }
        return key;
      }
      // Only once the tile is there, as the barrier counts phases, and before the other turn, which may need the slot.
      await_of_values(at);
      leave(empty(at.k.stage));
      release(empty_of_values(at.v.stage), of);
      let_go_by();
      at.k.next(), at.v.next();
    }
  }

  __device__ void walk(const Bend& bend, Own& of) const {
    const Hull hull = hull_of(0, kRows / 32);
    const Hull own = hull_of(of.group * (kOwn / 32), (of.group + 1) * (kOwn / 32));
    At at;
    float p[kKeys / 8][4], of_values[kKeys / 8][4];
    int key = next(at, hull, own, of, [&] { begin_turn(of.group), end_turn(of.group); });
    if (key == kEnd) return;
    multiply_anew<kKeys>(p, q(), of.group, k(at.k.stage));
    await_of_values(at);
    multiply_anew<kKeys>(of_values, dout(), of.group, v(at.v.stage));
    while (true) {
      const uint32_t last = at.k.stage;
      wait<E, 0>();
      settle<E>(p);
      settle<E>(of_values);
      release(empty_of_values(at.v.stage), of);
      if constexpr (kIsBent) {
        bend_by_squares(bend, p, [&](const auto& bend) {
#pragma unroll
          for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float slope;
              p[j][i] = bend(p[j][i], slope);
              of_values[j][i] = (of_values[j][i] - of.delta[i / 2]) * slope;
            }
          }
        });
      }
      const bool is_whole =
          own.inner_low <= key && kKeys <= own.inner_high - key && shared.are_one_segment[last];
      if (!is_whole) mask(p, key, last, of);
      uint32_t ds[kKeys / 16][4];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          p[j][i] = probability(bend, p[j][i], of.lse[i / 2]);
          if constexpr (!kIsBent) of_values[j][i] -= of.delta[i / 2];
          // The gradient of a masked pair may be NaN.
          p[j][i] = p[j][i] == 0 ? 0 : p[j][i] * of_values[j][i];
        }
        ds[j / 2][j % 2 * 2] = packed<E>(p[j][0], p[j][1]);
        ds[j / 2][j % 2 * 2 + 1] = packed<E>(p[j][2], p[j][3]);
      }
      begin_turn(of.group);
      multiply_along<kKeys>(of.sums, ds, k(last));
      at.k.next(), at.v.next();
      bool is_done = false;
      key = next(at, hull, own, of, [&] {
        // The next tile may need the slot of the last one.
        wait<E, 0>();
        if (!is_done) leave(empty(last));
        is_done = true;
        end_turn(of.group), begin_turn(of.group);
      });
      if (key == kEnd) break;
      multiply_anew<kKeys>(p, q(), of.group, k(at.k.stage));
      wait<E, 1>();
      if (!is_done) leave(empty(last));
      await_of_values(at);
      multiply_anew<kKeys>(of_values, dout(), of.group, v(at.v.stage));
      end_turn(of.group);
    }
    wait<E, 0>();
    settle<E>(of.sums);
    end_turn(of.group);
  }

  __device__ void multiply() const {
    Own of;
    of.group = threadIdx.x / 128 - 1;
    of.lane = threadIdx.x % 32;
    of.row = threadIdx.x % 128 / 32 * 16 + of.group * kOwn;
    clear(of.sums);
    E* dq = static_cast<E*>(a.dq) + (a.first_query(of_keys, head) + static_cast<int64_t>(first) * a.q_row) * a.width;
    const int64_t row = (static_cast<int64_t>(of_keys) * a.group + head) * a.queries + first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = of.row + of.lane / 4 + 8 * half;
      const bool reads = own < a.queries - first;
      of.lse[half] = reads ? lse_of(a.lse[row + own]) : 0;
      of.delta[half] =
          reads ? reinterpret_cast<const Note*>(dq + static_cast<int64_t>(own) * a.q_row * a.width)->delta : 0;
    }
    ptx::mbarrier_wait(ptx::shared_address(&shared.kept), 0);
    const Bend bend(a);
    if (of.group == 1) end_turn(1);
    walk(bend, of);
    if (of.group == 0) begin_turn(0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int2 range = shared.ranges[of.row + of.lane / 4 + 8 * half];
      if (range.x < range.y) continue;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) of.sums[j][2 * half] = of.sums[j][2 * half + 1] = 0;
    }
    // Only the warpgroup's own GEMMs read its rows and its notes.
    meet<128>(1 + of.group);
    q().store(of.sums, a.scale, a.scale, of.row, dq + static_cast<int64_t>(of.row) * a.q_row * a.width, a.width,
              a.q_row * a.width, a.queries - first - of.row);
  }

  __device__ static void run(const FlashAttentionBackwardArguments& all) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ Shared shared;
    const FlashAttentionArguments& a = all.of;
    const uint32_t blocks = (static_cast<uint32_t>(a.queries) + kRows - 1) / kRows;
    const uint32_t heads = blockIdx.x / blocks;
    // Blocks with the most work come first.
    const QueryGradients of{all,
                            a,
                            shared,
                            ptx::shared_address(memory),
                            static_cast<int>(heads % a.group),
                            static_cast<int>(heads / a.group),
                            static_cast<int>(blocks - 1 - blockIdx.x % blocks) * kRows};
    if (threadIdx.x == 0) {
      for (uint32_t stage = 0; stage < kStages; ++stage) {
        ptx::mbarrier_init(of.full(stage), 32);
        ptx::mbarrier_init(of.empty(stage), kGroups * kWarpgroup);
      }
      for (uint32_t stage = 0; stage < kOfValues; ++stage) {
        ptx::mbarrier_init(of.full_of_values(stage), 1);
        ptx::mbarrier_init(of.empty_of_values(stage), kGroups * 4);
      }
      ptx::mbarrier_init(ptx::shared_address(&shared.kept), 1);
      ptx::fence_mbarrier_init();
    }
    if (threadIdx.x < kRows) of.look();
    __syncthreads();
    if (threadIdx.x < 128) {
      ptx::fewer_registers<40>();
      if (threadIdx.x < 32 * kBringing) of.bring();
    } else {
      ptx::more_registers<232>();
      of.multiply();
    }
  }
};

}  // namespace attention::hopper

#endif

}  // namespace xentile

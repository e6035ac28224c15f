// The backward pass of attention on Hopper in five GEMMs: dk, dv and dq of one kernel, which makes logits once. A CTA
// has 128 keys and walks over tiles of the queries of their group. dk and dv stay in registers; dq, of which every
// block of keys has a term, is added up in float32 in memory, by the copy engine.
//
// Sums have one order: a counter for each piece of dq says how many blocks of keys have added their term, and a CTA
// adds its own when it is its turn. CTAs take one block of keys after another by ticket, so that whoever has the turn
// runs already; which order seldom waits is said at `reversed_blocks`.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "flash_attention.cuh"
#include "flash_attention_backward_hopper.cuh"

namespace xentile {

// Mirrored by `GradientArguments` in src/flash_attention/arguments.rs. Tensors are those of
// `FlashAttentionBackwardArguments`.
struct alignas(128) FlashAttentionGradientArguments {
  CUtensorMap q;
  CUtensorMap dout;
  CUtensorMap k;
  CUtensorMap v;
  FlashAttentionArguments of;
  // Of all queries, whose heads are padded to multiples of 128 here: [heads, group, queries], lse in units of ln(2) and
  // delta; [heads, queries], ranges and, where there are any, segments; [heads, queries / 64].
  float2* rows;
  int2* ranges;
  int32_t* segments;
  attention::Note* notes;
  float* sums;              // of dq before it is scaled and rounded, two pieces for each tile of queries
  uint32_t* terms;          // of each piece, how many terms are added so far
  uint32_t* tickets;        // how many blocks of keys CTAs have taken
  int32_t heads_at_a_time;  // heads whose blocks of keys are all begun before those of the next heads
  int32_t has_order;        // whether terms are added in one order; else sums begin as 0
};

inline constexpr uint32_t kAttentionGradientsBytes64 = 208 << 10;
inline constexpr uint32_t kAttentionGradientsBytes128 = 208 << 10;

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace attention::hopper {

// Sums of a warpgroup's product of 64 x 64, as they lie in memory: four of a thread after those of the thread before.
struct Piece {
  static constexpr int kNumbers = 64 * 64, kBytes = kNumbers * 4;

  static __device__ uint32_t offset(int eighth) { return (eighth * kWarpgroup + threadIdx.x % kWarpgroup) * 16; }
};

// Adds to memory what the shared memory holds, in a bulk group of the calling thread.
__device__ inline void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(from), "r"(bytes)
               : "memory");
}

// Orders what the copy engine and what threads do to global memory.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ inline void add_release(uint32_t* to, uint32_t number) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(number) : "memory");
}

// Over tiles of kRows queries.
template <class E, int kColumns, int kRows, bool kIsBent>
struct AllGradients {
  static constexpr int kKeys = kAttentionBackwardRows, kOwn = kKeys / kGroups;
  // The two warpgroups share a product for dq, of kRows x kColumns.
  static_assert(kRows * kColumns == kGroups * Piece::kNumbers);
  using Tile = Rows<E, kColumns, kRows>;
  using Keys = Rows<E, kColumns, kKeys>;
  // Cotangents of logits: rows are keys.
  using Products = Rows<E, kRows, kKeys>;
  // Tiles in the rings of queries and of cotangents.
  static constexpr int kStages = 3, kOfValues = 2;
  static constexpr int kSharedBytes =
      2 * Keys::kBytes + (kStages + kOfValues) * Tile::kBytes + 2 * Products::kBytes + kGroups * Piece::kBytes;

  static constexpr uint32_t kAll0 = 1, kAll1 = 2, kHasBlanks = 4, kIsSegment0 = 8, kIsEnd = 16;

  struct About {
    alignas(16) int2 ranges[kRows];
    float4 notes[kRows / 2];  // of a pair of rows, lse and delta
    int32_t segments[kRows];
    uint32_t flags;
    int tile, order;
  };

  // A term of a piece of dq, and how many come before it.
  struct Term {
    int piece, order;
  };
  static constexpr int kNone = -1;

  // A block of keys, and of each warpgroup's keys bits of those that some tile's queries may see.
  struct Work {
    uint64_t seen[kGroups];
    int of_keys, first_key, reversed;
  };

  struct Shared {
    About about[kStages];
    Term terms[kGroups];
    Work works[2];
    alignas(8) uint64_t full[kStages], empty[kStages], full_of_values[kOfValues], empty_of_values[kOfValues];
    uint64_t work_full[2], work_empty[2], kept_full, kept_empty;
    // Of a warpgroup's cotangents of logits in either place, and of its terms.
    uint64_t ds_full[kGroups][2], term_full[kGroups], term_empty[kGroups];
  };

  const FlashAttentionGradientArguments& all;
  const FlashAttentionArguments& a;
  Shared& shared;
  uint32_t base;
  int of_keys, first_key, reversed;

  __device__ Keys k() const { return {base}; }
  __device__ Keys v() const { return {base + Keys::kBytes}; }
  __device__ Tile q(uint32_t stage) const { return {base + 2 * Keys::kBytes + stage * Tile::kBytes}; }
  __device__ Tile dout(uint32_t stage) const { return {q(kStages + stage).base}; }
  __device__ Products ds(uint32_t turn) const { return {q(kStages + kOfValues).base + (turn & 1) * Products::kBytes}; }
  __device__ uint32_t piece(int group) const { return ds(0).base + 2 * Products::kBytes + group * Piece::kBytes; }
  __device__ uint32_t full(uint32_t stage) const { return ptx::shared_address(&shared.full[stage]); }
  __device__ uint32_t empty(uint32_t stage) const { return ptx::shared_address(&shared.empty[stage]); }
  __device__ uint32_t full_of_values(uint32_t stage) const {
    return ptx::shared_address(&shared.full_of_values[stage]);
  }
  __device__ uint32_t empty_of_values(uint32_t stage) const {
    return ptx::shared_address(&shared.empty_of_values[stage]);
  }
  __device__ uint32_t ds_full(int group, uint32_t turn) const {
    return ptx::shared_address(&shared.ds_full[group][turn & 1]);
  }
  __device__ uint32_t term_full(int group) const { return ptx::shared_address(&shared.term_full[group]); }
  __device__ uint32_t term_empty(int group) const { return ptx::shared_address(&shared.term_empty[group]); }

  // Queries of a head with padding.
  __device__ int padded_queries() const { return (a.queries + 127) & ~127; }

  // Blocks of keys of which CTAs take the last first; they take the others in their order, which is that of terms,
  // too. Under a causal mask CTAs of the first half, which are longer, begin together, each at its diagonal: a later
  // block is at a tile of queries before an earlier one, and none waits. They end one after another, the last first,
  // where those of the other half begin, and these end together. Where no queries see more than half of the blocks, as
  // of packed texts, the last of all blocks come first. The order follows from the ranges of the head alone. By a warp.
  static __device__ int reversed_blocks(const FlashAttentionGradientArguments& all, int of_keys) {
    const int blocks = (all.of.keys + kKeys - 1) / kKeys;
    const int count = (all.of.queries + kAttentionBlock - 1) / kAttentionBlock;
    const Note* notes = all.notes + static_cast<int64_t>(of_keys) * ((all.of.queries + 127) / 128 * 2);
    int most = 0;
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const int4 note = *reinterpret_cast<const int4*>(&notes[i]);
      if (note.y < note.z) most = max(most, (note.z - 1) / kKeys - note.y / kKeys + 1);
    }
    return __any_sync(~0u, 2 * most > blocks) ? blocks - blocks / 2 : blocks;
  }

  // How many blocks of keys add to a tile of queries before this one, of those from `low` to before `high`.
  __device__ int order_of(int low, int high) const {
    const int own = first_key / kKeys, least = low / kKeys, most = (high - 1) / kKeys;
    return own < reversed ? min(reversed - 1, most) - own : own - least;
  }

  // Brings tiles of queries that some query sees some key of, or with `kBringsValues` of their cotangents. By a warp.
  template <bool kBringsValues>
  __device__ void bring(Turn<kBringsValues ? kOfValues : kStages>& turn, uint32_t parity) const {
    const int lane = threadIdx.x % 32;
    const int inner = of_keys % a.inner, outer = of_keys / a.inner;
    bool brings_keys = !kBringsValues;
    const auto bring_keys = [&] {
      const uint32_t barrier = ptx::shared_address(&shared.kept_full);
      ptx::mbarrier_wait(ptx::shared_address(&shared.kept_empty), parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(barrier, 2 * Keys::kBytes);
      load_rows<Keys, kKeys, kColumns>(k(), all.k, barrier, first_key, inner, outer);
      load_rows<Keys, kKeys, kColumns>(v(), all.v, barrier, first_key, inner, outer);
      brings_keys = false;
    };
    const bool is_segment_0 = !kBringsValues && a.kv_segments != nullptr && are_keys_of_segment_0();
    const int tiles = (a.queries + kRows - 1) / kRows;
    for (int head = 0; head < a.group; ++head) {
      for (int begin = 0; begin < tiles; begin += 32) {
        uint32_t own = 0;
        int order = kNone;
        if (begin + lane < tiles) own = look(begin + lane, is_segment_0, order);
        for (uint32_t seen = __ballot_sync(~0u, order != kNone); seen != 0; seen &= seen - 1) {
          const int bit = __ffs(seen) - 1;
          const uint32_t flags = __shfl_sync(~0u, own, bit);
          const int order_of_bit = __shfl_sync(~0u, order, bit);
          const int first = (begin + bit) * kRows;
          if (lane == 0) {
            if constexpr (kBringsValues) {
              ptx::mbarrier_wait(empty_of_values(turn.stage), turn.parity ^ 1);
              const uint32_t barrier = full_of_values(turn.stage);
              ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
              load_rows<Tile, kRows, kColumns>(dout(turn.stage), all.dout, barrier, first, head, inner, outer);
            } else {
              if (brings_keys) bring_keys();
              ptx::mbarrier_wait(empty(turn.stage), turn.parity ^ 1);
              About& about = shared.about[turn.stage];
              about.flags = flags;
              about.tile = (of_keys * a.group + head) * tiles + begin + bit;
              about.order = order_of_bit;
              bring_about(about, full(turn.stage), head, first);
              load_rows<Tile, kRows, kColumns>(q(turn.stage), all.q, full(turn.stage), first, head, inner, outer);
            }
          }
          turn.next();
        }
      }
    }
    if (kBringsValues) return;
    if (lane == 0) {
      if (brings_keys) bring_keys();
      ptx::mbarrier_wait(empty(turn.stage), turn.parity ^ 1);
      shared.about[turn.stage].flags = kIsEnd;
      ptx::mbarrier_arrive(full(turn.stage));
    }
    turn.next();
  }

  __device__ bool are_keys_of_segment_0() const {
    bool are = true;
    for (int i = threadIdx.x % 32; i < min(kKeys, a.keys - first_key); i += 32) {
      are &= a.kv_segments[static_cast<int64_t>(of_keys) * a.keys + first_key + i] == 0;
    }
    return __all_sync(~0u, are);
  }

  // What is to be known of a tile of queries, from the notes of its blocks; `order` stays where it sees no key.
  __device__ uint32_t look(int tile, bool is_segment_0, int& order) const {
    int low = INT32_MAX, high = 0;
    uint32_t flags = kAll0 | kAll1 | (is_segment_0 ? kIsSegment0 : 0u);
    constexpr int kBlocks = kRows / kAttentionBlock;
    const int64_t blocks = padded_queries() / kAttentionBlock;
#pragma unroll
    for (int block = tile * kBlocks; block < (tile + 1) * kBlocks; ++block) {
      if (block * kAttentionBlock >= a.queries) continue;
      const Note note = all.notes[of_keys * blocks + block];
      low = min(low, note.low), high = max(high, note.high);
      if (note.has_blanks()) flags |= kHasBlanks;
      if (!note.is_segment_0()) flags &= ~kIsSegment0;
      if (!note.has_all(first_key, kOwn)) flags &= ~kAll0;
      if (!note.has_all(first_key + kOwn, kOwn)) flags &= ~kAll1;
    }
    if (a.q_segments != nullptr && (flags & kIsSegment0) == 0) flags &= ~(kAll0 | kAll1);
    if (low < min(first_key + kKeys, a.keys) && high > first_key) order = order_of(low, high);
    return flags;
  }

  // Brings what a tile's queries have beside their columns, and arrives for these too.
  __device__ void bring_about(About& about, uint32_t barrier, int head, int first) const {
    const int64_t padded = padded_queries();
    const auto bring = [&](const void* to, const auto* from, int64_t head) {
      ptx::bulk_load(ptx::shared_address(to), from + head * padded + first, kRows * sizeof(*from), barrier);
    };
    const bool has_segments = a.q_segments != nullptr;
    const uint32_t bytes = kRows * (sizeof(float2) + sizeof(int2) + (has_segments ? sizeof(int32_t) : 0));
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes + bytes);
    bring(about.notes, all.rows, static_cast<int64_t>(of_keys) * a.group + head);
    bring(about.ranges, all.ranges, of_keys);
    if (has_segments) bring(about.segments, all.segments, of_keys);
  }

  // Adds the terms of a warpgroup to dq, each in its turn. By one thread.
  __device__ void add_terms(int group) const {
    for (uint32_t parity = 0;; parity ^= 1) {
      ptx::mbarrier_wait(term_full(group), parity);
      const Term term = shared.terms[group];
      if (term.piece == kNone) break;
      uint32_t* terms = all.terms + term.piece;
      float* to = all.sums + static_cast<int64_t>(term.piece) * Piece::kNumbers;
      if (all.has_order) {
        while (ptx::load_acquire(terms) != static_cast<uint32_t>(term.order)) {
        }
        fence_async_global();
      }
      if (all.has_order && term.order == 0) {
        ptx::bulk_store(to, piece(group), Piece::kBytes);
      } else {
        bulk_add(to, piece(group), Piece::kBytes);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
      ptx::mbarrier_arrive(term_empty(group));
      if (all.has_order) {
        ptx::bulk_wait<0>();
        fence_async_global();
        add_release(terms, 1);
      }
    }
    ptx::bulk_wait<0>();
  }

  // What a warpgroup keeps.
  struct Own {
    float keys[kColumns / 8][4], values[kColumns / 8][4];
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

  // Places in the two rings.
  struct At {
    Turn<kStages> q;
    Turn<kOfValues> dout;
  };

  __device__ void await_of_values(const At& at) const {
    ptx::mbarrier_wait(full_of_values(at.dout.stage), at.dout.parity);
  }

  // Queries that see nothing may hold anything. Each warpgroup clears them for itself.
  __device__ void clear_blanks(const At& at, const Own& of) const {
    await_of_values(at);
#pragma unroll 1
    for (int i = threadIdx.x % kWarpgroup; i < 2 * kRows; i += kWarpgroup) {
      const int row = i % kRows;
      const int2 range = shared.about[at.q.stage].ranges[row];
      if (range.x >= range.y) clear_row(i < kRows ? q(at.q.stage) : dout(at.dout.stage), row);
    }
    ptx::fence_async_shared();
    meet<kWarpgroup>(1 + of.group);
  }

  // Of a warpgroup's keys, bits of those that some tile's queries may see. By a warp.
  __device__ uint64_t seen_keys(int group) const {
    const int first = first_key + group * kOwn, blocks = (a.queries + kAttentionBlock - 1) / kAttentionBlock;
    const int lane = threadIdx.x % 32;
    const Note* notes = all.notes + static_cast<int64_t>(of_keys) * (padded_queries() / kAttentionBlock);
    const auto below = [](int end) { return end <= 0 ? 0 : ~uint64_t{0} >> (kOwn - min(end, kOwn)); };
    uint64_t seen = 0;
    // From the last queries on, which see all keys where masks are causal.
    for (int begin = (blocks - 1) / 32 * 32; begin >= 0 && ~seen != 0; begin -= 32) {
      uint64_t own = 0;
      if (begin + lane < blocks) {
        const Note note = notes[begin + lane];
        if (note.low < note.high) own = below(note.high - first) & ~below(note.low - first);
      }
      seen |= uint64_t{__reduce_or_sync(~0u, static_cast<uint32_t>(own >> 32))} << 32 |
              __reduce_or_sync(~0u, static_cast<uint32_t>(own));
    }
    return seen;
  }

  // Keys that no query sees may hold anything, and products for dq have all keys. Each warpgroup clears its own.
  __device__ void clear_keys(uint64_t seen, const Own& of) const {
    const int row = threadIdx.x % kWarpgroup;
    if (row < kOwn && (seen >> row & 1) == 0) clear_row(k(), of.group * kOwn + row);
    ptx::fence_async_shared();
    meet<kWarpgroup>(1 + of.group);
  }

  __device__ void release(uint32_t barrier, const Own& of) const {
    __syncwarp();
    if (of.lane == 0) ptx::mbarrier_arrive(barrier);
  }

  // The same where lanes have read what another thread stored: each arrives, since racecheck follows no __syncwarp.
  __device__ void leave(uint32_t barrier) const { ptx::mbarrier_arrive(barrier); }

  // Whether there is a tile at this place, which is then to be computed with.
  __device__ bool begins(const At& at, const Own& of, uint32_t& flags) const {
    ptx::mbarrier_wait(full(at.q.stage), at.q.parity);
    flags = ptx::uniform(shared.about[at.q.stage].flags);
    if ((flags & kIsEnd) != 0) return false;
    if ((flags & kHasBlanks) != 0) clear_blanks(at, of);
    return true;
  }

  // Puts a warp's 16 keys of cotangents of logits into shared memory, as the other warpgroup wants them too.
  __device__ void put(const uint32_t (&ds)[kRows / 16][4], uint32_t turn, const Own& of) const {
    const Products to = this->ds(turn);
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      ptx::stmatrix(to.at(of.row + of.lane % 16, 2 * step + of.lane / 16), ds[step]);
    }
    ptx::fence_async_shared();
    ptx::mbarrier_arrive(ds_full(of.group, turn));
  }

  // A group of products: the warpgroup's piece of dq. That is half of the columns, or of the queries.
  __device__ void multiply_piece(float (&dq)[8][4], const Products& ds, const Own& of) const {
    const uint32_t left = ds.base + (kRows == 128 ? of.group * Products::kPanelBytes : 0);
    const uint32_t right = k().base + (kColumns == 128 ? of.group * Keys::kPanelBytes : 0);
    const uint64_t of_left = ptx::transposed_of(left, 16), of_right = ptx::transposed_of(right, 16);
    fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      hopper::multiply_transposed<E>(dq, of_left + step * (16 * 128 / 16), of_right + step * (16 * 128 / 16), step > 0);
    }
    ptx::wgmma_commit();
  }

  // Hands a piece to the thread that adds it.
  __device__ void hand_over(const float (&dq)[8][4], const Term& term, uint32_t turn, const Own& of) const {
    ptx::mbarrier_wait(term_empty(of.group), (turn & 1) ^ 1);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(piece(of.group) + Piece::offset(j)), "f"(dq[j][0]),
                   "f"(dq[j][1]), "f"(dq[j][2]), "f"(dq[j][3])
                   : "memory");
    }
    if (threadIdx.x % kWarpgroup == 0) shared.terms[of.group] = term;
    ptx::fence_async_shared();
    ptx::mbarrier_arrive(term_full(of.group));
  }

  __device__ void hand_over_end(uint32_t turn, const Own& of) const {
    // Each thread waits, so that it arrives at no phase twice.
    ptx::mbarrier_wait(term_empty(of.group), (turn & 1) ^ 1);
    if (threadIdx.x % kWarpgroup == 0) shared.terms[of.group] = {kNone, 0};
    ptx::mbarrier_arrive(term_full(of.group));
  }

  // Waits until both warpgroups have put their factors.
  __device__ void await_ds(uint32_t turn) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) ptx::mbarrier_wait(ds_full(group, turn), turn >> 1 & 1);
  }

  // Of each tile a warpgroup makes factors and its piece of dq, while products of the other run, and then in its turn
  // asks for dv and dk, and for the products of the next tile. A piece needs the factors of both: the first
  // warpgroup, which is ahead by half a tile, makes that of the tile before.
  __device__ void walk(const Bend& bend, Own& of, At& at, uint32_t& turn) const {
    float p[kRows / 8][4], of_values[kRows / 8][4];
    uint32_t flags;
    if (!begins(at, of, flags)) {
      leave(empty(at.q.stage));
      at.q.next();
      return;
    }
    multiply_anew<kRows>(p, k(), of.group, q(at.q.stage));
    await_of_values(at);
    multiply_anew<kRows>(of_values, v(), of.group, dout(at.dout.stage));
    Term before = {kNone, 0};
    const uint32_t behind = of.group == 0 ? 1 : 0;
    bool has_piece = behind == 0;
    while (true) {
      const At last = at;
      const About& about = shared.about[last.q.stage];
      wait<E, 0>();
      settle<E>(p);
      settle<E>(of_values);
      uint32_t left[kRows / 16][4], ds[kRows / 16][4];
      if ((flags & (of.group == 0 ? kAll0 : kAll1)) != 0) {
        make_factors<E, kIsBent, true, true, true>(bend, p, of_values, about.notes, [] {}, left, ds);
      } else {
        const auto mask_seen = [&] { mask(p, about, of); };
        make_factors<E, kIsBent, false, true, true>(bend, p, of_values, about.notes, mask_seen, left, ds);
      }
      const Term own = {2 * about.tile + of.group, about.order};
      put(ds, turn, of);
      float dq[8][4];
      // Before the first tile there is nothing, and the piece is of what lies there.
      if (has_piece) await_ds(turn - behind);
      multiply_piece(dq, this->ds(turn - behind), of);
      begin_turn(of.group);
      multiply_along<kRows>(of.values, left, dout(last.dout.stage));
      multiply_along<kRows>(of.keys, ds, q(last.q.stage));
      wait<E, 2>();
      settle<E>(dq);
      const Term term = {behind != 0 ? before.piece : own.piece, behind != 0 ? before.order : own.order};
      if (has_piece) hand_over(dq, term, turn - behind, of);
      has_piece = true;
      before = own;
      ++turn;
      at.q.next(), at.dout.next();
      if (!begins(at, of, flags)) {
        wait<E, 0>();
        release(empty_of_values(last.dout.stage), of);
        leave(empty(last.q.stage));
        break;
      }
      wait<E, 1>();
      release(empty_of_values(last.dout.stage), of);
      multiply_anew<kRows>(p, k(), of.group, q(at.q.stage));
      wait<E, 1>();
      leave(empty(last.q.stage));
      await_of_values(at);
      multiply_anew<kRows>(of_values, v(), of.group, dout(at.dout.stage));
      end_turn(of.group);
    }
    settle<E>(of.keys);
    settle<E>(of.values);
    end_turn(of.group);
    leave(empty(at.q.stage));
    at.q.next();
    if (of.group == 0) {
      float dq[8][4];
      await_ds(turn - 1);
      multiply_piece(dq, this->ds(turn - 1), of);
      wait<E, 0>();
      settle<E>(dq);
      hand_over(dq, before, turn - 1, of);
    }
  }

  // Walks over a block of keys, and writes dk and dv.
  __device__ void multiply(const Bend& bend, Own& of, uint64_t seen, uint32_t parity, At& at, uint32_t& turn) const {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of.keys[j][i] = of.values[j][i] = 0;
    }
    ptx::mbarrier_wait(ptx::shared_address(&shared.kept_full), parity);
    if (~seen != 0) clear_keys(seen, of);
    walk(bend, of, at, turn);
    const int64_t count = a.keys - first_key - of.row;
    const int64_t row = a.first_key(of_keys) + static_cast<int64_t>(first_key + of.row) * a.k_row;
    // Rows of values are read by their own warpgroup's products alone.
    meet<128>(1 + of.group);
    v().store(of.keys, a.scale, a.scale, of.row, static_cast<E*>(a.dk) + row * a.width, a.width, a.k_row * a.width,
              count);
    v().store(of.values, 1, 1, of.row, static_cast<E*>(a.dv) + row * a.value_width, a.value_width,
              a.k_row * a.value_width, count, [&] {
                // Before global stores, which the fence would wait for.
                ptx::fence_async_shared();
                ptx::mbarrier_arrive(ptx::shared_address(&shared.kept_empty));
              });
  }

  // Takes blocks of keys by ticket, and brings tiles of queries for each.
  static __device__ void take(const FlashAttentionGradientArguments& all, Shared& shared, uint32_t base) {
    const FlashAttentionArguments& a = all.of;
    const uint32_t heads = static_cast<uint32_t>(a.heads);
    const uint32_t blocks = (static_cast<uint32_t>(a.keys) + kKeys - 1) / kKeys;
    Turn<kStages> turn;
    for (uint32_t own = 0;; ++own) {
      uint32_t ticket = 0;
      if (threadIdx.x == 0) ticket = atomicAdd(all.tickets, 1);
      ticket = __shfl_sync(~0u, ticket, 0);
      const bool is_end = ticket >= heads * blocks;
      AllGradients of{all, a, shared, base, kNone, 0, 0};
      uint64_t seen[kGroups] = {};
      if (!is_end) {
        // Some heads after others, of each block of keys all of these.
        const uint32_t first_head = ticket / (blocks * all.heads_at_a_time) * all.heads_at_a_time;
        const uint32_t count = min(heads - first_head, static_cast<uint32_t>(all.heads_at_a_time));
        const uint32_t within = ticket - first_head * blocks;
        const int position = static_cast<int>(within / count);
        of.of_keys = static_cast<int>(first_head + within % count);
        of.reversed = reversed_blocks(all, of.of_keys);
        of.first_key = (position < of.reversed ? of.reversed - 1 - position : position) * kKeys;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) seen[group] = of.seen_keys(group);
      }
      if (threadIdx.x == 0) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.work_empty[own & 1]), (own >> 1 & 1) ^ 1);
        shared.works[own & 1] = {{seen[0], seen[1]}, of.of_keys, of.first_key, of.reversed};
        ptx::mbarrier_arrive(ptx::shared_address(&shared.work_full[own & 1]));
      }
      if (is_end) return;
      of.template bring<false>(turn, own & 1);
    }
  }

  // Calls `with` for each block of keys that the CTA takes, bits of the thread's keys that are seen, and a parity.
  template <class With>
  static __device__ void follow(const FlashAttentionGradientArguments& all, Shared& shared, uint32_t base,
                                const With& with) {
    for (uint32_t own = 0;; ++own) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.work_full[own & 1]), own >> 1 & 1);
      const Work& work = shared.works[own & 1];
      const AllGradients of{all,
                            all.of,
                            shared,
                            base,
                            static_cast<int>(ptx::uniform(work.of_keys)),
                            static_cast<int>(ptx::uniform(work.first_key)),
                            static_cast<int>(ptx::uniform(work.reversed))};
      const uint64_t seen = work.seen[threadIdx.x < 2 * kWarpgroup ? 0 : 1];
      ptx::mbarrier_arrive(ptx::shared_address(&shared.work_empty[own & 1]));
      if (of.of_keys == kNone) return;
      with(of, seen, own & 1);
    }
  }

  static __device__ void multiply_all(const FlashAttentionGradientArguments& all, Shared& shared, uint32_t base) {
    Own of;
    of.group = threadIdx.x / 128 - 1;
    of.lane = threadIdx.x % 32;
    of.row = threadIdx.x % 128 / 32 * 16 + of.group * kOwn;
    const Bend bend(all.of);
    if (of.group == 1) end_turn(1);
    At at;
    uint32_t turn = 0;
    follow(all, shared, base, [&](const AllGradients& block, uint64_t seen, uint32_t parity) {
      block.multiply(bend, of, seen, parity, at, turn);
    });
    // So that nobody's turn is left over.
    if (of.group == 0) begin_turn(0);
    AllGradients{all, all.of, shared, base, kNone, 0, 0}.hand_over_end(turn, of);
  }

  __device__ static void run(const FlashAttentionGradientArguments& all) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ Shared shared;
    const uint32_t base = ptx::shared_address(memory);
    if (threadIdx.x == 0) {
      const auto address = [](uint64_t& barrier) { return ptx::shared_address(&barrier); };
      for (uint32_t stage = 0; stage < kStages; ++stage) {
        ptx::mbarrier_init(address(shared.full[stage]), 1);
        ptx::mbarrier_init(address(shared.empty[stage]), kGroups * kWarpgroup);
      }
      for (uint32_t stage = 0; stage < kOfValues; ++stage) {
        ptx::mbarrier_init(address(shared.full_of_values[stage]), 1);
        ptx::mbarrier_init(address(shared.empty_of_values[stage]), kGroups * 4);
      }
      for (int group = 0; group < kGroups; ++group) {
        for (uint64_t& barrier : shared.ds_full[group]) ptx::mbarrier_init(address(barrier), kWarpgroup);
        ptx::mbarrier_init(address(shared.term_full[group]), kWarpgroup);
        ptx::mbarrier_init(address(shared.term_empty[group]), 1);
      }
      for (int own = 0; own < 2; ++own) {
        ptx::mbarrier_init(address(shared.work_full[own]), 1);
        ptx::mbarrier_init(address(shared.work_empty[own]), 32 + kGroups * kWarpgroup);
      }
      ptx::mbarrier_init(address(shared.kept_full), 1);
      ptx::mbarrier_init(address(shared.kept_empty), kGroups * kWarpgroup);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      ptx::fewer_registers<24>();
      const int warp = threadIdx.x / 32;
      if (warp == 0) take(all, shared, base);
      if (warp == 1) {
        Turn<kOfValues> turn;
        follow(all, shared, base,
               [&](const AllGradients& block, uint64_t, uint32_t) { block.template bring<true>(turn, 0); });
      }
      if (warp >= 2 && threadIdx.x % 32 == 0) {
        AllGradients{all, all.of, shared, base, kNone, 0, 0}.add_terms(warp - 2);
      }
    } else {
      ptx::more_registers<240>();
      multiply_all(all, shared, base);
    }
  }
};

// Writes what is to be known of a block of 64 queries of a head, and zeros to counters.
template <class E>
__device__ inline void write_rows(const FlashAttentionGradientArguments& all) {
  const FlashAttentionArguments& a = all.of;
  const uint32_t blocks = (static_cast<uint32_t>(a.queries) + 127) / 128 * 2;
  const uint32_t head = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const int64_t of_keys = head / a.group, padded = blocks * kAttentionBlock;
  const int first = block * kAttentionBlock, count = max(0, min(kAttentionBlock, a.queries - first));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Pieces are no more than blocks times half of the panels of 64 columns.
  if (threadIdx.x < 2) all.terms[2 * static_cast<int64_t>(blockIdx.x) + threadIdx.x] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *all.tickets = 0;
  if (!all.has_order) {
    const int vectors = (max(a.width, a.value_width) <= 64 ? 1 : 2) * (Piece::kNumbers / 4);
    float4* sums = reinterpret_cast<float4*>(all.sums) + static_cast<int64_t>(blockIdx.x) * vectors;
    for (int i = threadIdx.x; i < vectors; i += kAttentionThreads) sums[i] = make_float4(0, 0, 0, 0);
  }
  const int64_t begins = a.first_query(of_keys, head % a.group) + static_cast<int64_t>(first) * a.q_row;
  // Lanes that share a row, 8 columns each.
  const int lanes = a.value_width <= 64 ? 8 : 16;
  const int vector = lane % lanes;
#pragma unroll 4
  for (int begin = warp * (32 / lanes); begin < kAttentionBlock; begin += kWarps * (32 / lanes)) {
    const int own = begin + lane / lanes;
    float sum = 0;
    const int2 range = own < count ? range_of(a, of_keys, first + own) : make_int2(0, 0);
    if (range.x < range.y && vector * 8 < a.value_width) {
      const int64_t at = (begins + static_cast<int64_t>(own) * a.q_row) * a.value_width + vector * 8;
      float x[8], y[8];
      unpack<E>(*reinterpret_cast<const uint4*>(static_cast<const E*>(a.o) + at), x);
      unpack<E>(*reinterpret_cast<const uint4*>(static_cast<const E*>(a.dout) + at), y);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(x[i], y[i], sum);
    }
    for (int apart = lanes / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (vector != 0) continue;
    const int64_t row = static_cast<int64_t>(head) * a.queries + first + own;
    const float lse = own < count ? a.lse[row] : -infinity();
    const float delta = lse != -infinity() ? sum - a.dlse[row] : 0;
    all.rows[head * padded + first + own] = make_float2(lse_of(lse), delta);
    if (a.sinks != nullptr && own < count) {
      E* dq = static_cast<E*>(a.dq) + (begins + static_cast<int64_t>(own) * a.q_row) * a.width;
      reinterpret_cast<Note*>(dq)->delta = delta;
    }
  }
  if (head % a.group != 0 || warp != 0) return;
  Hull hull = Hull::none();
  bool is_segment_0 = a.q_segments != nullptr;
  for (int own = lane; own < kAttentionBlock; own += 32) {
    const int2 range = own < count ? range_of(a, of_keys, first + own) : make_int2(0, 0);
    const int64_t to = of_keys * padded + first + own;
    all.ranges[to] = range;
    if (own < count) hull.add(range);
    if (a.q_segments == nullptr) continue;
    const int32_t segment = own < count ? a.q_segments[of_keys * a.queries + first + own] : 0;
    all.segments[to] = segment;
    is_segment_0 &= segment == 0;
  }
  hull.reduce_warp();
  is_segment_0 = __all_sync(~0u, is_segment_0);
  if (lane == 0) all.notes[of_keys * blocks + block] = Note::of(hull, is_segment_0);
}

// Rounds dq of a block of 64 queries, of tiles of kRows.
template <class E, int kColumns, int kRows>
__device__ inline void round_queries(const FlashAttentionGradientArguments& all) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const FlashAttentionArguments& a = all.of;
  const uint32_t queries = static_cast<uint32_t>(a.queries);
  const uint32_t blocks = (queries + kAttentionBlock - 1) / kAttentionBlock, tiles = (queries + kRows - 1) / kRows;
  const uint32_t head = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const int64_t of_keys = head / a.group, first = block * kAttentionBlock;
  const int64_t piece = 2 * (static_cast<int64_t>(head) * tiles + first / kRows) + first % kRows / kAttentionBlock;
  const float4* from = reinterpret_cast<const float4*>(all.sums + piece * Piece::kNumbers);
  float sums[kColumns / 8][4];
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float4 four = from[j * kWarpgroup + threadIdx.x];
    sums[j][0] = four.x, sums[j][1] = four.y, sums[j][2] = four.z, sums[j][3] = four.w;
  }
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int2 range = range_of(a, of_keys, first + row + lane / 4 + 8 * half);
    if (range.x < range.y) continue;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) sums[j][2 * half] = sums[j][2 * half + 1] = 0;
  }
  E* dq = static_cast<E*>(a.dq) + (a.first_query(of_keys, head % a.group) + (first + row) * a.q_row) * a.width;
  const Rows<E, kColumns, kAttentionBlock> rows{ptx::shared_address(memory)};
  rows.store(sums, a.scale, a.scale, row, dq, a.width, a.q_row * a.width, a.queries - first - row);
}

}  // namespace attention::hopper

#endif

}  // namespace xentile

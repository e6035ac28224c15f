// The forward pass of attention on Hopper: a warp finds tiles, another has the copy engine bring them, and
// warpgroups in turns make products of them, in the manner of FlashAttention 3 (Shah et al., 2024).
//
// A warpgroup has 64 queries of a block. It asks for the products of the next tile's logits and for this tile's
// products with values, and makes exponentials of the former while the latter run. Warpgroups take turns in
// asking, so that the exponentials of one run beside products of the other. A CTA takes one block after another, and
// asks for the first products of a block with the last ones of the block before.
#pragma once

#include "flash_attention.cuh"

namespace xentile {

// Mirrored by `ForwardArguments` in src/flash_attention/arguments.rs. Boxes are of 64 columns and of a block's or a
// tile's rows; axes as those of `FlashAttentionBackwardArguments`.
struct alignas(128) FlashAttentionForwardArguments {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  FlashAttentionArguments of;
  uint32_t walk;  // the most blocks that a CTA has, all of one head of queries
};

// Mirrored by `NUMBERS` there: threads and queries of a CTA, and keys of a tile, of heads of up to 128 columns and of
// up to 256.
inline constexpr uint32_t kAttentionForwardThreads = 384;
inline constexpr int32_t kAttentionForwardQueries = 128;
inline constexpr int32_t kAttentionForwardKeys = 128;
inline constexpr int32_t kAttentionForwardWideKeys = 64;

namespace attention {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace hopper {

static_assert(kAttentionForwardThreads == (kAttentionForwardQueries / kStrip + 1) * kWarpgroup);

// What logits are: products times a factor above 0; any; or softcapped by so little that sums of their exponentials
// neither overflow nor vanish in float32 and bfloat16, whatever the largest is.
enum class Logits { kScaled, kAny, kCapped };

// Of q and k with kColumns columns, and v with kValueColumns.
template <class E, int kColumns, int kValueColumns, Logits kLogits>
struct Forward {
  static constexpr bool kIsCapped = kLogits == Logits::kCapped;
  static_assert(!kIsCapped || std::is_same_v<E, __nv_bfloat16>);
  static constexpr bool kIsWide = kColumns == 256;
  static constexpr int kRows = kAttentionForwardQueries, kConsumers = kRows / kStrip;
  static constexpr int kKeys = kIsWide ? kAttentionForwardWideKeys : kAttentionForwardKeys;
  static constexpr int kPanels = kColumns / 64, kValuePanels = kValueColumns / 64;
  // Tiles of keys and of values.
  static constexpr int kStages = kColumns == 64 ? 4 : 2;
  using Queries = Rows<E, kColumns, kRows>;
  using Keys = Rows<E, kColumns, kKeys>;
  using Values = Rows<E, kValueColumns, kKeys>;
  // Places for blocks of queries, so that the next comes while one is computed with. There is no room for wide ones.
  static constexpr int kBlocks = kColumns > 128 ? 1 : 2;
  static constexpr int kSharedBytes = kBlocks * Queries::kBytes + kStages * (Keys::kBytes + Values::kBytes);
  // Of the register file, a step of 8 a thread.
  static constexpr uint32_t kProducerRegisters = kBlocks > 1 ? 56 : 40;
  static constexpr uint32_t kConsumerRegisters = kBlocks > 1 ? 224 : 232;
  // Named barriers: turns of the warpgroups, and one of each for itself.
  static constexpr int kTurns = 1, kAlone = kTurns + kConsumers;

  // Blocks of queries and batches of tiles that are found ahead, and tiles that are searched for segments at a time.
  static constexpr int kFound = kBlocks > 1 ? 4 : 1, kBatches = 4, kSearched = kIsWide ? 1 : kBlocks > 1 ? 4 : 2;

  // A tile of keys, and what of it somebody in the block may see: rows from `low` to `high`.
  struct Note {
    int32_t key, low, high;
    // Whether all of the block's queries and of the tile's keys are of one segment; whether the tile is the block's
    // last, and the CTA's.
    bool is_one_segment, is_last, is_final;
  };

  // A block of queries.
  struct Block {
    int64_t of_keys;   // its head of keys
    int64_t lse, o;    // its first row in lse and, as a row of q, in o
    int32_t first, of_group, inner, outer;
    int32_t low, high;  // the hull of its ranges
    float sink;         // in units of ln(2)
    bool is_final;      // whether it is the CTA's last
    int2 ranges[kRows];
    int32_t segments[kRows];
  };

  // Tiles that the block's queries may see, of those from key `base` on: a bit each, and a bit for those of the
  // queries' one segment. A block that sees no key has one batch without tiles.
  struct Batch {
    int32_t base;
    uint32_t tiles, of_one;
    bool is_end;
  };

  struct Shared {
    uint64_t q_full[kBlocks], q_empty[kBlocks];
    uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    uint64_t found_full[kFound], found_empty[kFound], batch_full[kBatches], batch_empty[kBatches];
    Note notes[kStages];
    Batch batches[kBatches];
    Block found[kFound];
    int32_t segments[kStages][kKeys];
  };

  // A block of queries of a head.
  struct Work {
    int64_t head, of_keys, first;

    // Every CTA has an item for each step, of which the last may be behind all blocks. It goes over a head to and
    // fro, so that CTAs have as much work each where that grows with the block.
    __device__ Work(const FlashAttentionForwardArguments& all, uint32_t item) {
      const FlashAttentionArguments& a = all.of;
      const uint32_t blocks = (static_cast<uint32_t>(a.queries) + kRows - 1) / kRows;
      const uint32_t heads = static_cast<uint32_t>(a.heads) * a.group;
      const uint32_t ctas = (blocks + all.walk - 1) / all.walk, step = item / (heads * ctas), own = item % ctas;
      head = item / ctas % heads;
      of_keys = static_cast<uint32_t>(head) / a.group;
      first = static_cast<int64_t>(step * ctas + (step % 2 == 0 ? ctas - 1 - own : own)) * kRows;
    }
  };

  const FlashAttentionForwardArguments& all;
  const FlashAttentionArguments& a;
  Shared& shared;
  const uint32_t base, items;

  __device__ Queries queries(uint32_t stage) const { return {base + stage * Queries::kBytes}; }

  __device__ Keys keys(uint32_t stage) const {
    return {base + kBlocks * Queries::kBytes + stage * Keys::kBytes};
  }

  __device__ Values values(uint32_t stage) const {
    return {keys(kStages).base + stage * Values::kBytes};
  }

  __device__ static uint32_t at(const uint64_t& barrier) { return ptx::shared_address(&barrier); }

  // ---- The warp that finds blocks and tiles, ahead of the others, since it waits for what it reads.

  // The tiles from `base` on that queries with segments from `least` to `most` may see.
  __device__ Batch search(const int32_t* segments, uint32_t base, uint32_t high, int32_t least, int32_t most) const {
    Batch batch{static_cast<int32_t>(base), 0, 0, false};
#pragma unroll
    for (int tile = 0; tile < kSearched; ++tile) {
      bool is_seen = false, is_one = least == most;
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        const uint32_t key = base + tile * kKeys + i * 32 + threadIdx.x % 32;
        if (key >= static_cast<uint32_t>(a.keys)) continue;
        const int32_t segment = segments[key];
        is_seen |= least <= segment && segment <= most;
        is_one &= segment == least;
      }
      is_seen = __any_sync(0xffffffffu, is_seen);
      is_one = __all_sync(0xffffffffu, is_one);
      batch.of_one |= static_cast<uint32_t>(is_one) << tile;
      batch.tiles |= static_cast<uint32_t>(is_seen && base + tile * kKeys < high) << tile;
    }
    return batch;
  }

  __device__ void give(Turn<kBatches>& turn) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(at(shared.batch_full[turn.stage]));
    turn.next();
  }

  // Writes what a block is, but its ranges, and returns its head of keys.
  __device__ uint32_t write_block(Block& block, uint32_t item) const {
    const Work work(all, item);
    if (threadIdx.x % 32 == 0) {
      block.of_keys = work.of_keys;
      block.first = static_cast<int32_t>(work.first);
      block.of_group = static_cast<uint32_t>(work.head) % a.group;
      block.outer = static_cast<uint32_t>(work.of_keys) / a.inner;
      block.inner = static_cast<uint32_t>(work.of_keys) % a.inner;
      block.lse = work.head * a.queries + work.first;
      block.o = a.first_query(work.of_keys, block.of_group) + work.first * a.q_row;
      block.sink = a.sinks == nullptr ? -infinity() : a.sinks[work.head] * kLog2E;
      // The first step of a CTA always has a block, and no step behind one without has.
      block.is_final = item + gridDim.x >= items || Work(all, item + gridDim.x).first >= a.queries;
    }
    __syncwarp();
    return static_cast<uint32_t>(work.of_keys);
  }

  __device__ void find() const {
    const int lane = threadIdx.x % 32;
    Turn<kFound> turn;
    Turn<kBatches> of_batches;
    bool is_final = false;
    for (uint32_t item = blockIdx.x; !is_final; item += gridDim.x) {
      ptx::mbarrier_wait(at(shared.found_empty[turn.stage]), turn.parity ^ 1);
      Block& block = shared.found[turn.stage];
      const uint32_t of_keys = write_block(block, item);
      is_final = block.is_final;
      // All are in 32 bits and few, for the registers that there are.
      const int32_t first = block.first;
      Hull hull = Hull::none();
      int least = INT32_MAX, most = INT32_MIN;
#pragma unroll(kBlocks > 1 ? kRows / 32 : 1)
      for (int row = lane; row < kRows; row += 32) {
        const int2 range = range_of(a, of_keys, static_cast<int64_t>(first) + row);
        int32_t segment = 0;
        if (a.q_segments != nullptr && row < a.queries - first) {
          segment = a.q_segments[static_cast<int64_t>(of_keys) * a.queries + first + row];
        }
        block.ranges[row] = range;
        block.segments[row] = segment;
        hull.add(range);
        if (range.x < range.y) least = min(least, segment), most = max(most, segment);
      }
      hull.reduce_warp();
      least = __reduce_min_sync(0xffffffffu, least);
      most = __reduce_max_sync(0xffffffffu, most);
      if (lane == 0) block.low = hull.low, block.high = hull.high;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(at(shared.found_full[turn.stage]));
      turn.next();

      const int32_t* segments =
          a.kv_segments == nullptr ? nullptr : a.kv_segments + static_cast<int64_t>(of_keys) * a.keys;
      const uint32_t high = hull.low < hull.high ? hull.high : 0;
      bool has_tiles = false;
      ptx::mbarrier_wait(at(shared.batch_empty[of_batches.stage]), of_batches.parity ^ 1);
      for (uint32_t base = hull.low / kKeys * kKeys; base < high;) {
        Batch batch;
        if (segments == nullptr) {
          const uint32_t left = (high - base + kKeys - 1) / kKeys;
          batch = {static_cast<int32_t>(base), left < 32 ? (1u << left) - 1 : ~0u, ~0u, false};
          base += 32 * kKeys;
        } else {
          batch = search(segments, base, high, least, most);
          base += kSearched * kKeys;
        }
        if (batch.tiles == 0) continue;
        // It waits for the next, so that the last is known.
        if (has_tiles) {
          give(of_batches);
          ptx::mbarrier_wait(at(shared.batch_empty[of_batches.stage]), of_batches.parity ^ 1);
        }
        has_tiles = true;
        if (lane == 0) shared.batches[of_batches.stage] = batch;
      }
      if (lane == 0) {
        Batch& last = shared.batches[of_batches.stage];
        if (!has_tiles) last.tiles = 0;
        last.is_end = true;
      }
      give(of_batches);
    }
  }

  // ---- The warp that brings tiles.

  __device__ void bring() const {
    const int lane = threadIdx.x % 32;
    Turn<kStages> turn;
    Turn<kBlocks> of_queries;
    Turn<kFound> of_found;
    Turn<kBatches> of_batches;
    bool is_final;
    do {
      ptx::mbarrier_wait(at(shared.found_full[of_found.stage]), of_found.parity);
      const Block& block = shared.found[of_found.stage];
      of_found.next();
      is_final = block.is_final;
      const int32_t inner = block.inner, outer = block.outer;
      const uint32_t full = at(shared.q_full[of_queries.stage]);
      const Queries q = queries(of_queries.stage);
      ptx::mbarrier_wait(at(shared.q_empty[of_queries.stage]), of_queries.parity ^ 1);
      of_queries.next();
      if (lane == 0) {
        ptx::mbarrier_arrive_expect_tx(full, Queries::kBytes);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          ptx::tensor_load(q.base + panel * Queries::kPanelBytes, all.q, panel * 64, block.first, block.of_group,
                           inner, outer, full);
        }
      }
      bool is_end;
      do {
        ptx::mbarrier_wait(at(shared.batch_full[of_batches.stage]), of_batches.parity);
        const Batch batch = shared.batches[of_batches.stage];
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(at(shared.batch_empty[of_batches.stage]));
        of_batches.next();
        is_end = batch.is_end;
        uint32_t tiles = batch.tiles;
        const bool is_empty = tiles == 0;
        do {
          const int tile = is_empty ? 0 : __ffs(tiles) - 1;
          tiles &= tiles - 1;
          const int32_t key = batch.base + tile * kKeys;
          const bool is_one = is_empty || (batch.of_one >> tile & 1) != 0;
          ptx::mbarrier_wait(at(shared.k_empty[turn.stage]), turn.parity ^ 1);
          if (!is_one) {
            const int32_t* segments = a.kv_segments + block.of_keys * a.keys;
#pragma unroll
            for (int row = lane; row < kKeys; row += 32) {
              const int64_t own = static_cast<int64_t>(key) + row;
              shared.segments[turn.stage][row] = own < a.keys ? segments[own] : 0;
            }
            __syncwarp();
          }
          if (lane == 0) {
            Note& note = shared.notes[turn.stage];
            note.is_last = is_end && tiles == 0;
            note.is_final = note.is_last && is_final;
            note.is_one_segment = is_one;
            if (is_empty) {
              // Nothing is read, and what is there is zeroed or masked, since no range goes so far.
              note.key = INT32_MAX - kKeys;
              note.low = note.high = 0;
              ptx::mbarrier_arrive(at(shared.k_full[turn.stage]));
            } else {
              note.key = key;
              note.low = max(block.low - key, 0);
              note.high = min(block.high - key, kKeys);
              ptx::mbarrier_arrive_expect_tx(at(shared.k_full[turn.stage]), Keys::kBytes);
#pragma unroll
              for (int panel = 0; panel < kPanels; ++panel) {
                ptx::tensor_load(keys(turn.stage).base + panel * Keys::kPanelBytes, all.k, panel * 64, key, inner,
                                 outer, at(shared.k_full[turn.stage]));
              }
            }
          }
          ptx::mbarrier_wait(at(shared.v_empty[turn.stage]), turn.parity ^ 1);
          if (lane == 0) {
            if (is_empty) {
              ptx::mbarrier_arrive(at(shared.v_full[turn.stage]));
            } else {
              ptx::mbarrier_arrive_expect_tx(at(shared.v_full[turn.stage]), Values::kBytes);
#pragma unroll
              for (int panel = 0; panel < kValuePanels; ++panel) {
                ptx::tensor_load(values(turn.stage).base + panel * Values::kPanelBytes, all.v, panel * 64, key, inner,
                                 outer, at(shared.v_full[turn.stage]));
              }
            }
          }
          __syncwarp();
          turn.next();
        } while (tiles != 0);
      } while (!is_end);
    } while (!is_final);
  }

  // ---- The warpgroups that compute.

  struct Consumer {
    const Forward& of;
    const FlashAttentionArguments& a;
    Shared& shared;
    const Bend bend;
    const int strip;

    float sums[kValueColumns / 8][4];
    float products[kKeys / 8][4];
    uint32_t p[kKeys / 16][4];
    // Of rows lane / 4 and 8 behind it: the largest product, and the thread's part of the sum.
    float largest[2], total[2];
    // Of the block of queries.
    Turn<kFound> of_found;
    // What all of the warp's queries see.
    int inner_low, inner_high;

    __device__ explicit Consumer(const Forward& of)
        : of(of), a(of.a), shared(of.shared), bend(of.a), strip(ptx::uniform(threadIdx.x / kWarpgroup - 1)) {}

    __device__ int own_row(int half) const {
      return strip * kStrip + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
    }

    __device__ const Block& block() const { return shared.found[of_found.stage]; }

    __device__ void begin() {
      ptx::mbarrier_wait(at(shared.found_full[of_found.stage]), of_found.parity);
      inner_low = 0, inner_high = INT32_MAX;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = -infinity(), total[half] = 0;
        const int2 range = block().ranges[own_row(half)];
        inner_low = max(inner_low, range.x), inner_high = min(inner_high, range.y);
      }
      inner_low = __reduce_max_sync(0xffffffffu, inner_low);
      inner_high = __reduce_min_sync(0xffffffffu, inner_high);
    }

    __device__ void clear() {
#pragma unroll
      for (int j = 0; j < kValueColumns / 8; ++j) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0;
    }

    // Asks for a tile's products. As `multiply_rows`, but all addresses are in uniform registers.
    __device__ void multiply_queries(const Queries& q, const Keys& k) {
      const uint64_t of_q = ptx::matrix_of(q.base + strip * (kStrip * 128)), of_k = ptx::matrix_of(k.base);
      fence();
#pragma unroll
      for (int step = 0; step < kColumns / 16; ++step) {
        const int within = step % 4 * 32, panel = step / 4;
        multiply<E>(products, of_q + (panel * Queries::kPanelBytes + within) / 16,
                    of_k + (panel * Keys::kPanelBytes + within) / 16, step > 0);
      }
      ptx::wgmma_commit();
    }

    __device__ bool is_within(const Note& note) const {
      return inner_low <= note.key && note.key + kKeys <= inner_high;
    }

    // Has products that are not seen be -inf.
    __device__ void mask(const Note& note, uint32_t stage) {
      if (!is_within(note)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) mask_range(products, half, block().ranges[own_row(half)], note.key);
      }
      if (note.is_one_segment) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mask_segment(products, half, block().segments[own_row(half)], shared.segments[stage]);
      }
    }

    // Makes probabilities of products, without what they are divided by, and `kept`, which sums that were
    // made before are to be multiplied by.
    __device__ void weigh(float (&kept)[2]) {
      float shift[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = largest[half];
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
          most = fmaxf(most, fmaxf(products[j][2 * half], products[j][2 * half + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        shift[half] = most == -infinity() ? 0 : most * bend.factor;
        kept[half] = ptx::ex2(largest[half] * bend.factor - shift[half]);
        largest[half] = most;
        total[half] *= kept[half];
      }
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          products[j][i] = ptx::ex2(fmaf(products[j][i], bend.factor, -shift[i / 2]));
          total[i / 2] += products[j][i];
        }
      }
    }

    // What is taken from capped logits in units of ln(2), whose exponentials are then at most 2^50. Sums of as many as
    // there are keys do not overflow, and those of the smallest logits are above 2^-110.
    __device__ static float cap_shift(const Bend& bend) { return fmaxf(bend.factor - 50, 0); }

    // Has two products be exponents.
    template <int kTerms>
    __device__ static void raise(const NearZero<kTerms>& by, float shift, float& x, float& y) {
      x = fmaf(x, by.ratio_at(x), -shift), y = fmaf(y, by.ratio_at(y), -shift);
    }

    __device__ static void raise(const Bend& by, float shift, float& x, float& y) {
      by.bend(x, y);
      x = fmaf(x, by.factor, -shift), y = fmaf(y, by.factor, -shift);
    }

    // Makes probabilities of exponents.
    __device__ void add_powers(float (&exponents)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        exponents[i] = ptx::ex2(exponents[i]);
        total[i / 2] += exponents[i];
      }
    }

    // As `weigh_tile`. No running maximum is kept, so that exponentials begin with the first product.
    __device__ void weigh_capped(const Note& note, Turn<kStages>& of_keys) {
      if (is_within(note) && note.is_one_segment) {
        release(shared.k_empty[of_keys.stage]);
        raise_all([&](int j) { add_powers(products[j]); });
      } else {
        // Products are masked once they are exponents, since a scale may be negative.
        raise_all([](int) {});
        mask(note, of_keys.stage);
        release(shared.k_empty[of_keys.stage]);
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) add_powers(products[j]);
      }
      of_keys.next();
    }

    // Has products be exponents, and calls `with` each eighth column.
    template <class With>
    __device__ void raise_all(const With& with) {
      // Terms of polynomials are made anew for every tile, as there are no registers to keep them in.
      Bend own = bend;
      asm volatile("" : "+f"(own.inner), "+f"(own.factor));
      const float shift = cap_shift(own);
      bend_by_size<3>(own, products, [&](auto by) {
        if constexpr (!std::is_same_v<decltype(by), Bend>) by.scale(own.factor);
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
          raise(by, shift, products[j][0], products[j][1]);
          raise(by, shift, products[j][2], products[j][3]);
          with(j);
        }
      });
    }

    // Makes probabilities of a tile's products, and leaves its keys.
    __device__ void weigh_tile(float (&kept)[2], const Note& note, Turn<kStages>& of_keys) {
      settle<E>(products);
      if constexpr (kIsCapped) {
        weigh_capped(note, of_keys);
        return;
      }
      // `is_bent` always holds here; without the branch, kernels for 256 columns spill.
      if (kLogits == Logits::kAny && bend.is_bent) bend_all<E>(bend, products);
      mask(note, of_keys.stage);
      release(shared.k_empty[of_keys.stage]);
      of_keys.next();
      weigh(kept);
    }

    __device__ void pack() {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        p[j / 2][j % 2 * 2] = packed<E>(products[j][0], products[j][1]);
        p[j / 2][j % 2 * 2 + 1] = packed<E>(products[j][2], products[j][3]);
      }
    }

    // Zeros where no query of the block sees a value, which may be NaN there. Each warpgroup does it for itself.
    __device__ void blank(const Values& v, int low, int high) const {
      if (low == 0 && high == kKeys) return;
      for (int i = threadIdx.x % kWarpgroup; i < kKeys * Values::kVectors; i += kWarpgroup) {
        const int row = i / Values::kVectors;
        if (low <= row && row < high) continue;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v.at(row, i % Values::kVectors)), "r"(0)
                     : "memory");
      }
      ptx::fence_async_shared();
      meet<kWarpgroup>(kAlone + strip);
    }

    __device__ void take_turn() const {
      meet<2 * kWarpgroup>(kTurns + strip);
    }

    __device__ void end_turn() const {
      arrive<2 * kWarpgroup>(kTurns + (strip + 1) % kConsumers);
    }

    __device__ static void release(uint64_t& barrier) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(at(barrier));
    }

    __device__ void run() {
      Turn<kStages> of_keys, of_values;
      Turn<kBlocks> of_queries;
      if (strip == kConsumers - 1) end_turn();
      begin();
      clear();
      ptx::mbarrier_wait(at(shared.q_full[0]), 0);
      ptx::mbarrier_wait(at(shared.k_full[0]), 0);
      Note note = shared.notes[0];
      take_turn();
      multiply_queries(of.queries(0), of.keys(0));
      end_turn();
      wait<E, 0>();
      float kept[2];
      weigh_tile(kept, note, of_keys);
      pack();
      while (!note.is_final) {
        const Values v = of.values(of_values.stage);
        ptx::mbarrier_wait(at(shared.k_full[of_keys.stage]), of_keys.parity);
        const Note next = shared.notes[of_keys.stage];
        // Whether the next tile is that of another block, which begins beside this one's last products with values.
        const bool is_other = kBlocks > 1 && note.is_last;
        const uint32_t own_queries = of_queries.stage;
        if (is_other) {
          of_queries.next();
          ptx::mbarrier_wait(at(shared.q_full[of_queries.stage]), of_queries.parity);
        }
        take_turn();
        multiply_queries(of.queries(of_queries.stage), of.keys(of_keys.stage));
        ptx::mbarrier_wait(at(shared.v_full[of_values.stage]), of_values.parity);
        blank(v, note.low, note.high);
        multiply_along<kKeys>(sums, p, v);
        end_turn();
        wait<E, 1>();
        const uint32_t own = of_found.stage;
        const float own_largest[2] = {largest[0], largest[1]}, own_total[2] = {total[0], total[1]};
        if (is_other) {
          of_found.next();
          begin();
        }
        weigh_tile(kept, next, of_keys);
        wait<E, 0>();
        settle<E>(sums);
        release(shared.v_empty[of_values.stage]);
        of_values.next();
        if (is_other) {
          // All of the warpgroup's warps have read the block's queries, since they have met for the turn.
          finish(own, own_largest, own_total, own_queries);
          clear();
        } else if constexpr (!kIsCapped) {
#pragma unroll
          for (int j = 0; j < kValueColumns / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[j][i] *= kept[i / 2];
          }
        }
        pack();
        note = next;
      }
      const Values v = of.values(of_values.stage);
      ptx::mbarrier_wait(at(shared.v_full[of_values.stage]), of_values.parity);
      blank(v, note.low, note.high);
      multiply_along<kKeys>(sums, p, v);
      wait<E, 0>();
      settle<E>(sums);
      // Other warps may still be reading queries, in whose place sums go.
      meet<kWarpgroup>(kAlone + strip);
      finish(of_found.stage, largest, total, of_queries.stage);
      // So that nobody's turn is left over.
      if (strip == 0) take_turn();
    }

    // Writes o and lse of a block, and releases it and its queries.
    __device__ void finish(uint32_t own_block, const float (&of_largest)[2], const float (&of_total)[2],
                           uint32_t own_queries) {
      const Block& block = shared.found[own_block];
      const int lane = threadIdx.x % 32;
      const int32_t left = a.queries - block.first;
      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = own_row(half);
        const int2 range = block.ranges[own];
        float lse;
        if constexpr (kIsCapped) {
          const float sum = add_quad(of_total[half]);
          inverse[half] = finish_sum(sum, sum == 0 ? -infinity() : cap_shift(bend), block.sink, lse);
        } else {
          inverse[half] = finish_row(bend, of_total[half], of_largest[half], block.sink, lse);
        }
        if (lane % 4 == 0 && own < left) a.lse[block.lse + own] = lse;
        if (range.x < range.y) continue;
        inverse[half] = 0;
#pragma unroll
        for (int j = 0; j < kValueColumns / 8; ++j) sums[j][2 * half] = sums[j][2 * half + 1] = 0;
      }
      const int row = own_row(0) - lane / 4;
      const int64_t to = block.o + row * static_cast<int64_t>(a.q_row);
      Rows<E, kValueColumns, kRows>{of.queries(own_queries).base}.store(
          sums, inverse[0], inverse[1], row, static_cast<E*>(a.o) + to * a.value_width, a.value_width,
          a.q_row * a.value_width, left - row, [&] {
            // Before global stores, which the fence would wait for.
            ptx::fence_async_shared();
            release(shared.q_empty[own_queries]);
            release(shared.found_empty[own_block]);
          });
    }
  };

  __device__ static void run(const FlashAttentionForwardArguments& all) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ Shared shared;
    const Forward of{all, all.of, shared, ptx::shared_address(memory), gridDim.x * (kBlocks > 1 ? all.walk : 1)};
    if (threadIdx.x == 0) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        ptx::mbarrier_init(at(shared.q_full[block]), 1);
        ptx::mbarrier_init(at(shared.q_empty[block]), kConsumers * 4);
      }
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        ptx::mbarrier_init(at(shared.k_full[stage]), 1);
        ptx::mbarrier_init(at(shared.v_full[stage]), 1);
        ptx::mbarrier_init(at(shared.k_empty[stage]), kConsumers * 4);
        ptx::mbarrier_init(at(shared.v_empty[stage]), kConsumers * 4);
      }
#pragma unroll
      for (int i = 0; i < kFound; ++i) {
        ptx::mbarrier_init(at(shared.found_full[i]), 1);
        ptx::mbarrier_init(at(shared.found_empty[i]), kConsumers * 4);
      }
#pragma unroll
      for (int i = 0; i < kBatches; ++i) {
        ptx::mbarrier_init(at(shared.batch_full[i]), 1);
        ptx::mbarrier_init(at(shared.batch_empty[i]), 1);
      }
      ptx::fence_mbarrier_init();
      ptx::prefetch_tensor_map(all.q);
      ptx::prefetch_tensor_map(all.k);
      ptx::prefetch_tensor_map(all.v);
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
      ptx::fewer_registers<kProducerRegisters>();
      if (threadIdx.x < 32) {
        of.bring();
      } else if (threadIdx.x < 64) {
        of.find();
      }
    } else {
      ptx::more_registers<kConsumerRegisters>();
      Consumer consumer(of);
      consumer.run();
    }
  }
};

}  // namespace hopper
#endif

}  // namespace attention
}  // namespace xentile

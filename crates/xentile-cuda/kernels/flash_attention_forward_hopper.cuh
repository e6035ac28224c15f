// The forward pass of attention on Hopper: one warp has the copy engine bring tiles, and warpgroups in turns
// make products of them, in the manner of FlashAttention 3 (Shah et al., 2024).
//
// A warpgroup has 64 queries of a block. It asks for the products of the next tile's logits and for this tile's
// products with values, and makes exponentials of the former while the latter run. Warpgroups take turns in
// asking, so that the exponentials of one run beside products of the other.
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

// Of q and k with kColumns columns, and v with kValueColumns. Unless kIsBent, logits are products times a factor above 0.
template <class E, int kColumns, int kValueColumns, bool kIsBent>
struct Forward {
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
  static constexpr uint32_t kProducerRegisters = kIsWide ? 24 : 40;
  static constexpr uint32_t kConsumerRegisters = kIsWide ? 240 : 232;
  // Named barriers: turns of the warpgroups, and one of each for itself.
  static constexpr int kTurns = 1, kAlone = kTurns + kConsumers;

  // A tile of keys, and what of it somebody in the block may see: rows from `low` to `high`.
  struct Note {
    int32_t key, low, high;
    // Whether all of the block's queries and of the tile's keys are of one segment.
    bool is_one_segment, is_last;
  };

  struct Shared {
    uint64_t q_full[kBlocks], q_empty[kBlocks];
    uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    Note notes[kStages];
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

  // ---- The warp that brings tiles.

  // Finds tiles of keys that some query may see, several at a time where segments have to be read.
  struct Search {
    static constexpr int kAhead = kIsWide ? 1 : 4;

    const int32_t* segments;  // or null
    int32_t keys, high, least, most;
    int64_t base;
    // Tiles from `base` on that were found, of those that were looked at, and those of the queries' one segment.
    uint32_t found = 0, of_one = 0;
    bool is_begun = false;

    // The first key of the next tile, or -1; and whether all keys are of the segment that all queries are of.
    __device__ int64_t next(bool& is_one_segment) {
      while (found == 0) {
        if (is_begun) base += kAhead * kKeys;
        is_begun = true;
        if (base >= high) return -1;
        of_one = 0;
#pragma unroll
        for (int tile = 0; tile < kAhead; ++tile) {
          bool is_seen = segments == nullptr, is_one = least == most || segments == nullptr;
          if (segments != nullptr) {
#pragma unroll
            for (int i = 0; i < kKeys / 32; ++i) {
              const int64_t key = base + tile * kKeys + i * 32 + threadIdx.x % 32;
              if (key >= keys) continue;
              const int32_t segment = segments[key];
              is_seen |= least <= segment && segment <= most;
              is_one &= segment == least;
            }
            is_seen = __any_sync(0xffffffffu, is_seen);
            is_one = __all_sync(0xffffffffu, is_one);
          }
          of_one |= static_cast<uint32_t>(is_one) << tile;
          found |= static_cast<uint32_t>(is_seen && base + tile * kKeys < high) << tile;
        }
      }
      const int tile = __ffs(found) - 1;
      found &= found - 1;
      is_one_segment = (of_one >> tile & 1) != 0;
      return base + tile * kKeys;
    }
  };

  __device__ void produce() const {
    const int lane = threadIdx.x % 32;
    Turn<kStages> turn;
    Turn<kBlocks> of_queries;
    for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
      const Work work(all, item);
      if (work.first >= a.queries) continue;
      Hull hull = Hull::none();
      int least = INT32_MAX, most = INT32_MIN;
#pragma unroll
      for (int row = lane; row < kRows; row += 32) {
        const int2 range = range_of(a, work.of_keys, work.first + row);
        hull.add(range);
        if (a.q_segments != nullptr && range.x < range.y) {
          const int32_t segment = a.q_segments[work.of_keys * a.queries + work.first + row];
          least = min(least, segment), most = max(most, segment);
        }
      }
      hull.reduce_warp();
      least = __reduce_min_sync(0xffffffffu, least);
      most = __reduce_max_sync(0xffffffffu, most);
      const int32_t outer = static_cast<uint32_t>(work.of_keys) / a.inner;
      const int32_t inner = static_cast<uint32_t>(work.of_keys) % a.inner;

      const uint32_t full = at(shared.q_full[of_queries.stage]);
      const Queries q = queries(of_queries.stage);
      ptx::mbarrier_wait(at(shared.q_empty[of_queries.stage]), of_queries.parity ^ 1);
      of_queries.next();
      if (lane == 0) {
        ptx::mbarrier_arrive_expect_tx(full, Queries::kBytes);
        const int32_t of_group = static_cast<uint32_t>(work.head) % a.group;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          ptx::tensor_load(q.base + panel * Queries::kPanelBytes, all.q, panel * 64,
                           static_cast<int32_t>(work.first), of_group, inner, outer, full);
        }
      }
      const int32_t* segments = a.kv_segments == nullptr ? nullptr : a.kv_segments + work.of_keys * a.keys;
      Search search{segments, a.keys, hull.low < hull.high ? hull.high : 0, least, most, hull.low / kKeys * kKeys};
      bool is_one = true, is_after_one = true;
      int64_t key = search.next(is_one);
      const bool is_empty = key < 0;
      do {
        const int64_t after = is_empty ? -1 : search.next(is_after_one);
        ptx::mbarrier_wait(at(shared.k_empty[turn.stage]), turn.parity ^ 1);
        if (!is_one) {
#pragma unroll
          for (int row = lane; row < kKeys; row += 32) {
            shared.segments[turn.stage][row] = key + row < a.keys ? segments[key + row] : 0;
          }
          __syncwarp();
        }
        if (lane == 0) {
          Note& note = shared.notes[turn.stage];
          note.is_last = after < 0;
          note.is_one_segment = is_one;
          if (is_empty) {
            // Nothing is read, and what is there is zeroed or masked, since no range goes so far.
            note.key = INT32_MAX - kKeys;
            note.low = note.high = 0;
            ptx::mbarrier_arrive(at(shared.k_full[turn.stage]));
          } else {
            note.key = static_cast<int32_t>(key);
            note.low = max(hull.low - note.key, 0);
            note.high = min(hull.high - note.key, kKeys);
            ptx::mbarrier_arrive_expect_tx(at(shared.k_full[turn.stage]), Keys::kBytes);
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
              ptx::tensor_load(keys(turn.stage).base + panel * Keys::kPanelBytes, all.k, panel * 64,
                               note.key, inner, outer, at(shared.k_full[turn.stage]));
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
              ptx::tensor_load(values(turn.stage).base + panel * Values::kPanelBytes, all.v, panel * 64,
                               static_cast<int32_t>(key), inner, outer, at(shared.v_full[turn.stage]));
            }
          }
        }
        __syncwarp();
        turn.next();
        key = after, is_one = is_after_one;
      } while (key >= 0);
    }
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
    // Of rows lane / 4 and 8 behind it: the largest product, the thread's part of the sum, the keys that the
    // query sees, and its segment.
    float largest[2], total[2];
    int2 ranges[2];
    int32_t segments[2];
    // What all of the warp's queries see.
    int inner_low, inner_high;

    __device__ explicit Consumer(const Forward& of)
        : of(of), a(of.a), shared(of.shared), bend(of.a), strip(threadIdx.x / kWarpgroup - 1) {}

    __device__ int own_row(int half) const {
      return strip * kStrip + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
    }

    __device__ void begin(const Work& work) {
#pragma unroll
      for (int j = 0; j < kValueColumns / 8; ++j) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0;
      inner_low = 0, inner_high = INT32_MAX;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = -infinity(), total[half] = 0;
        const int64_t query = work.first + own_row(half);
        ranges[half] = range_of(a, work.of_keys, query);
        inner_low = max(inner_low, ranges[half].x), inner_high = min(inner_high, ranges[half].y);
        segments[half] = a.q_segments != nullptr && query < a.queries
                             ? a.q_segments[work.of_keys * a.queries + query]
                             : 0;
      }
      inner_low = __reduce_max_sync(0xffffffffu, inner_low);
      inner_high = __reduce_min_sync(0xffffffffu, inner_high);
    }

    // Has products that are not seen be -inf.
    __device__ void mask(const Note& note, uint32_t stage) {
      if (!(inner_low <= note.key && note.key + kKeys <= inner_high)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) mask_range(products, half, ranges[half], note.key);
      }
      if (note.is_one_segment) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) mask_segment(products, half, segments[half], shared.segments[stage]);
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

    // Makes probabilities of a tile's products, and leaves its keys.
    __device__ void weigh_tile(float (&kept)[2], const Note& note, Turn<kStages>& of_keys) {
      settle<E>(products);
      // `is_bent` always holds here; without the branch, kernels for 256 columns spill.
      if (kIsBent && bend.is_bent) bend_all<E>(bend, products);
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
      for (uint32_t item = blockIdx.x; item < of.items; item += gridDim.x) {
        const Work work(of.all, item);
        if (work.first >= a.queries) continue;
        begin(work);
        const Queries q = of.queries(of_queries.stage);
        ptx::mbarrier_wait(at(shared.q_full[of_queries.stage]), of_queries.parity);
        ptx::mbarrier_wait(at(shared.k_full[of_keys.stage]), of_keys.parity);
        Note note = shared.notes[of_keys.stage];
        take_turn();
        multiply_rows<kKeys>(products, q, strip, of.keys(of_keys.stage));
        end_turn();
        wait<E, 0>();
        float kept[2];
        weigh_tile(kept, note, of_keys);
        pack();
        while (!note.is_last) {
          const Values v = of.values(of_values.stage);
          ptx::mbarrier_wait(at(shared.k_full[of_keys.stage]), of_keys.parity);
          const Note next = shared.notes[of_keys.stage];
          take_turn();
          multiply_rows<kKeys>(products, q, strip, of.keys(of_keys.stage));
          ptx::mbarrier_wait(at(shared.v_full[of_values.stage]), of_values.parity);
          blank(v, note.low, note.high);
          multiply_along<kKeys>(sums, p, v);
          end_turn();
          wait<E, 1>();
          weigh_tile(kept, next, of_keys);
          wait<E, 0>();
          settle<E>(sums);
          release(shared.v_empty[of_values.stage]);
          of_values.next();
          pack();
#pragma unroll
          for (int j = 0; j < kValueColumns / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[j][i] *= kept[i / 2];
          }
          note = next;
        }
        const Values v = of.values(of_values.stage);
        ptx::mbarrier_wait(at(shared.v_full[of_values.stage]), of_values.parity);
        blank(v, note.low, note.high);
        multiply_along<kKeys>(sums, p, v);
        wait<E, 0>();
        settle<E>(sums);
        release(shared.v_empty[of_values.stage]);
        of_values.next();
        finish(work, q, shared.q_empty[of_queries.stage]);
        of_queries.next();
      }
      // So that nobody's turn is left over.
      if (strip == 0) take_turn();
    }

    __device__ void finish(const Work& work, const Queries& q, uint64_t& q_empty) {
      const int lane = threadIdx.x % 32;
      const float sink = a.sinks == nullptr ? -infinity() : a.sinks[work.head] * kLog2E;
      const int64_t left = a.queries - work.first;
      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool is_empty = ranges[half].x >= ranges[half].y;
        const int own = own_row(half);
        float lse;
        inverse[half] = finish_row(bend, total[half], largest[half], sink, lse);
        if (lane % 4 == 0 && own < left) a.lse[work.head * a.queries + work.first + own] = lse;
        if (!is_empty) continue;
        inverse[half] = 0;
#pragma unroll
        for (int j = 0; j < kValueColumns / 8; ++j) sums[j][2 * half] = sums[j][2 * half + 1] = 0;
      }
      // Other warps may still be reading queries, in whose place sums go.
      meet<kWarpgroup>(kAlone + strip);
      const int row = own_row(0) - lane / 4;
      const int64_t to = a.first_query(work.of_keys) + work.head % a.group * a.q_group +
                         (work.first + row) * static_cast<int64_t>(a.q_row);
      Rows<E, kValueColumns, kRows>{q.base}.store(sums, inverse[0], inverse[1], row,
                                                  static_cast<E*>(a.o) + to * a.value_width, a.value_width,
                                                  a.q_row * a.value_width, left - row, [&] {
                                                    // Before global stores, which the fence would wait for.
                                                    ptx::fence_async_shared();
                                                    release(q_empty);
                                                  });
    }
  };

  __device__ static void run(const FlashAttentionForwardArguments& all) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ Shared shared;
    const Forward of{all, all.of, shared, ptx::shared_address(memory), gridDim.x * all.walk};
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
      ptx::fence_mbarrier_init();
      ptx::prefetch_tensor_map(all.q);
      ptx::prefetch_tensor_map(all.k);
      ptx::prefetch_tensor_map(all.v);
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
      ptx::fewer_registers<kProducerRegisters>();
      if (threadIdx.x < 32) of.produce();
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

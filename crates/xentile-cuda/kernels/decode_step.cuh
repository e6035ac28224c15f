// A token of a decoder at batch 1 in one persistent kernel, for Hopper.
//
// Each of 128 CTAs, one a multiprocessor, has rows of its own of every matrix. Its producer warp
// streams them, of all phases in their order, through a ring of stages of 16 KB in shared memory,
// and does not wait for activations. 16 consumer warps share the columns of a matrix: each loads
// its weights into registers, waits for its slice of the activation, and multiplies by m16n8k16 with
// weights as A and the activation in the columns of B.
//
// Activations go from CTA to CTA without a grid barrier: each word travels as a packet {word, tag} of
// 8 bytes, written and read as one, which readers poll until it has the tag of their layer. A packet
// is written again only after all who read it have written what its writer waits for. Tags go on from
// call to call: the state holds the packets, and the last tag.
//
// Phases of a layer: QKV; attention over 16 splits of the cache for each KV head; their combination;
// out; gate and up; down. Residuals stay in float32. RMSNorm's factor of a row is applied after its
// GEMM.
#pragma once

#include "decode_step_common.cuh"

namespace xentile::decode_step {

inline constexpr int kColumns = 128;
inline constexpr int kStages = kMaxStages;
inline constexpr int kStageKeys = 32;
inline constexpr Polling kPolling = Polling::kPaused;

// The dimensions of Qwen3-0.6B. The code below takes its widths from here, but is written for a row
// of 1024 columns as one stage of 8 rows, and for two query heads of a KV head.
struct Qwen3Small {
  static constexpr int kHidden = 1024;
  static constexpr int kHeads = 16;
  static constexpr int kKvHeads = 8;
  static constexpr int kMlp = 3072;
};

template <class Shape>
struct Layout {
  static constexpr int kHidden = Shape::kHidden, kQuery = Shape::kHeads * kColumns;
  static constexpr int kKv = Shape::kKvHeads * kColumns, kMlp = Shape::kMlp;
  static_assert(kHidden == 1024 && kQuery == 2048 && kMlp == 3072, "slices of warps");
  static_assert(Shape::kHeads == 2 * Shape::kKvHeads && Shape::kKvHeads * kSplits == kCtas);
  // Stages of a CTA in a layer.
  static constexpr int kQkvStages = (kQuery + 2 * kKv) / kCtas / 8;
  static constexpr int kOutStages = kQuery / 1024;
  static constexpr int kGateStages = kMlp / kCtas / 8;
  static constexpr int kDownStages = kMlp / 1024;
  static constexpr int kLayerStages = kQkvStages + kOutStages + 2 * kGateStages + kDownStages;
  // Packets in the state, behind its first 16 words of 8 bytes.
  static constexpr int kIn = 16;
  static constexpr int kMiddle = kIn + kCopies * kHidden;
  static constexpr int kQkv = kMiddle + kCopies * kHidden;
  static constexpr int kPartial = kQkv + kQuery + 2 * kKv;
  static constexpr int kPartialSums = kPartial + kSplits * kQuery;
  static constexpr int kAttention = kPartialSums + 2 * kSplits * Shape::kHeads;
  static constexpr int kInner = kAttention + kCopies * kQuery / 2;
  static constexpr int kBest = kInner + kCopies * kMlp / 2;
  static constexpr int kStateWords = kBest + 4 * kCtas;
};

// A row of the heads' buffer of partial sums, in floats.
inline constexpr int kHeadRow = 264;

// Shared memory of a CTA, in bytes.
inline constexpr int kBarriers = kStages * kStageBytes;
inline constexpr int kHeadSums = kBarriers + 256;
inline constexpr int kRowSums = kHeadSums + 9 * kHeadRow * 4;
inline constexpr int kOutSums = kRowSums + 48 * kSumRow * 4;
inline constexpr int kSquares = kOutSums + 8 * kSumRow * 4;
inline constexpr int kMaxima = kSquares + 64;
inline constexpr int kQueries = kMaxima + 256;
inline constexpr int kNewKey = kQueries + 1024;
inline constexpr int kNewValue = kNewKey + 256;
inline constexpr int kSlices = kNewValue + 256;
inline constexpr int kSliceBytes = 384;
inline constexpr int kLast = kSlices + kWarps * kSliceBytes;
inline constexpr int kBestOfWarps = kLast + 2048;
inline constexpr int kSharedBytes = kBestOfWarps + 256;
static_assert(kSharedBytes <= kMaxSharedBytes);

}  // namespace xentile::decode_step

// For src/decode_step/arguments.rs.
inline constexpr int kDecodeStepSharedBytes = xentile::decode_step::kSharedBytes;
inline constexpr int kDecodeStepKvHeads = xentile::decode_step::Qwen3Small::kKvHeads;
inline constexpr int kDecodeStepStateWords =
    xentile::decode_step::Layout<xentile::decode_step::Qwen3Small>::kStateWords;

namespace xentile::decode_step {

__device__ inline int head_stages(int vocab) {
  return ((vocab + 7) / 8 - static_cast<int>(blockIdx.x) + kCtas - 1) / kCtas;
}

// The producer: one thread copies all stages of its CTA.
template <class Shape>
__device__ inline void produce(const DecodeStepArguments& a, uint32_t ring, int position) {
  using Sizes = Layout<Shape>;
  const uint32_t full = ring + kBarriers, empty = full + kStages * 8;
  const uint64_t policy = ptx::evict_first();
  const int kv_head = blockIdx.x / kSplits;
  const Split cached = cache_split<kStageKeys>(position, blockIdx.x % kSplits);
  const uint8_t* from = static_cast<const uint8_t*>(a.packed) + blockIdx.x * size_t{kStageBytes};
  RingSlot<kStages> next{0, 1}, landed;
  int in_flight = 0, max_in_flight = a.in_flight;
  long long last = clock64();
  // Fills a stage by `copy`, and waits until fewer than `max_in_flight` copies have not landed.
  auto fill = [&](auto copy) {
    const uint32_t barrier = full + 8 * next.slot;
    ptx::mbarrier_wait(empty + 8 * next.slot, next.parity);
    ptx::mbarrier_arrive_expect_tx(barrier, kStageBytes);
    copy(ring + next.slot * kStageBytes, barrier);
    next.advance();
    for (++in_flight; in_flight >= max_in_flight; --in_flight) {
      ptx::mbarrier_wait(full + 8 * landed.slot, landed.parity);
      landed.advance();
    }
  };
  auto copy_weights = [&](int count, int pace) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      fill([&](uint32_t to, uint32_t barrier) {
        while (clock64() - last < pace) {
        }
        last = clock64();
        ptx::bulk_load(to, from, kStageBytes, barrier, policy);
      });
      from += size_t{kCtas} * kStageBytes;
    }
  };
#pragma unroll 1
  for (int layer = 0; layer < a.layers; ++layer) {
    copy_weights(Sizes::kQkvStages, a.pace);
#pragma unroll 1
    for (int stage = 0; stage < cached.stages; ++stage) {
      fill([&](uint32_t to, uint32_t barrier) {
        const int row = layer * a.length + cached.start + stage * kStageKeys;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = kv_head * kColumns + half * 64;
          ptx::tensor_load(to + half * 4096, a.key_boxes, column, row, barrier);
          ptx::tensor_load(to + 8192 + half * 4096, a.value_boxes, column, row, barrier);
        }
      });
    }
    copy_weights(Sizes::kLayerStages - Sizes::kQkvStages, a.pace);
  }
  // A sampler may be launched; it waits for the end of this kernel.
  ptx::launch_dependents();
  // The head waits for nothing: full depth.
  max_in_flight = kStages;
  copy_weights(head_stages(a.vocab), 0);
}

// A consumer warp of a CTA.
struct Warp : RingReader<kStages> {
  using RingReader::RingReader;

  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(shared + offset);
  }

  // Frees a slot for the copy engine, as so many of its warps.
  __device__ void free_slot(int slot, int warps = 1) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty(slot), warps);
  }

  __device__ void release() {
    free_slot(place.slot);
    place.advance();
  }

  // Loads this warp's 64 columns of 8 rows.
  __device__ void load(uint4& first, uint4& second) {
    load_stage(first, second);
    release_after(first.x | second.x);
  }

  // This warp's slice of the activation.
  __device__ uint32_t* slice() const { return at<uint32_t>(kSlices + warp * kSliceBytes); }
  __device__ uint32_t slice_address() const {
    return ring + kSlices + warp * kSliceBytes + t * 16;
  }
};

// RMSNorm without its factor, and the GEMM of 8 kRows rows, each of 1024 columns: leaves sums of each
// warp and of squares. x has this lane's two elements.
template <int kRows>
__device__ inline void multiply_rows(const Warp& w, float2 x, uint32_t norm,
                                     const uint4 (&first)[kRows], const uint4 (&second)[kRows]) {
  static_assert(kRows % 2 == 0);
  w.slice()[w.lane] = pack(x.x * low_float(norm), x.y * high_float(norm));
  __syncwarp();
  const uint32_t from = w.slice_address();
  const uint4 x_first = ptx::load_shared(from), x_second = ptx::load_shared(from + 64);
  float sums[kRows / 2][4] = {};
#pragma unroll
  for (int r = 0; r < kRows / 2; ++r) multiply(sums[r], first[2 * r], first[2 * r + 1], x_first);
#pragma unroll
  for (int r = 0; r < kRows / 2; ++r) multiply(sums[r], second[2 * r], second[2 * r + 1], x_second);
  const float squares = sum_of_warp(x.x * x.x + x.y * x.y);
  float* rows = w.at<float>(kRowSums);
  if (w.t == 0) {
#pragma unroll
    for (int r = 0; r < kRows / 2; ++r) {
      rows[(16 * r + w.g) * kSumRow + w.warp] = sums[r][0];
      rows[(16 * r + 8 + w.g) * kSumRow + w.warp] = sums[r][2];
    }
  }
  if (w.lane == 0) w.at<float>(kSquares)[w.warp] = squares;
}

// The factor of RMSNorm, of squares that all warps left.
template <int kHidden>
__device__ inline float norm_factor(const Warp& w, float eps) {
  return rsqrtf(sum_partials(w.at<float>(kSquares) + 4 * w.t) * (1.0f / kHidden) + eps);
}

// The GEMM of 8 rows of 1024 kParts columns: leaves sums of each warp. Rows 0 to 7 of A are even
// tiles of 32 columns, which meet even columns of B, and rows 8 to 15 odd ones.
template <int kParts>
__device__ inline void multiply_eight(const Warp& w, const uint4 (&weights)[2 * kParts]) {
  float sum = 0.0f;
  float sums[kParts][4] = {};
  const uint32_t from = w.slice_address() + 64 * (w.g & 1);
#pragma unroll
  for (int i = 0; i < kParts; ++i)
    multiply(sums[i], weights[2 * i], weights[2 * i + 1], ptx::load_shared(from + 128 * i));
#pragma unroll
  for (int i = 0; i < kParts; ++i) sum += sums[i][0] + sums[i][3];
  if (w.t == 0) w.at<float>(kOutSums)[w.g * kSumRow + w.warp] = sum;
}

// Attention of two query heads over 16 positions at a time.
struct Attention : OnlineSoftmax<kColumns, 2, 4096> {
  // Loads 16 keys; lanes have the same columns of keys as of queries.
  __device__ static void load_keys(uint32_t rows, const Warp& w, uint4 (&upper)[4],
                                   uint4 (&lower)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t from =
          rows + (k >> 1) * 4096 + w.g * 128 + (((2 * w.t + (k & 1)) ^ w.g) << 4);
      upper[k] = ptx::load_shared(from);
      lower[k] = ptx::load_shared(from + 1024);
    }
  }

  // Adds 16 positions, of which the first `count` exist. Their values are at `rows`.
  __device__ void add(const Warp& w, const uint4 (&upper)[4], const uint4 (&lower)[4],
                      uint32_t rows, int count) {
    float scores[2][4] = {};
    const uint32_t queries = w.ring + kQueries + (w.g & 1) * 256;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t chunk = 8 * (k >> 1) + 2 * w.t + (k & 1);
      multiply(scores[k & 1], upper[k], lower[k], ptx::load_shared(queries + (chunk << 4)));
    }
    // Column n of scores is of head n & 1; this lane keeps head t & 1 of positions g and g + 8.
    const int head = w.t & 1;
    const float first = head ? scores[0][1] + scores[1][1] : scores[0][0] + scores[1][0];
    const float second = head ? scores[0][3] + scores[1][3] : scores[0][2] + scores[1][2];
    OnlineSoftmax::add(w, first, second, rows, count);
  }
};

// Layer by layer, the consumers' part of a token.
template <class Shape>
__device__ inline void consume(const DecodeStepArguments& a, uint8_t* shared, int warp, int token,
                               int position, uint32_t base) {
  using Sizes = Layout<Shape>;
  constexpr int kHidden = Sizes::kHidden;
  Warp w(shared, warp);
  const int cta = blockIdx.x, lane = w.lane, g = w.g, t = w.t;
  const int kv_head = cta / kSplits, split = cta % kSplits;
  const bool has_new = split == kSplits - 1;
  const Split cached = cache_split<kStageKeys>(position, split);
  uint64_t* const packets = a.state;
  // This CTA's copy of a vector of so many words.
  const auto copy_of = [=](int vector, int size) {
    return static_cast<const uint64_t*>(packets) + vector + cta % kCopies * size;
  };
  float* const head_sums = w.at<float>(kHeadSums);
  float* const row_sums = w.at<float>(kRowSums);
  float* const out_sums = w.at<float>(kOutSums);
  float2* const maxima = w.at<float2>(kMaxima);
  __nv_bfloat16* const queries = w.at<__nv_bfloat16>(kQueries);
  __nv_bfloat16* const new_key = w.at<__nv_bfloat16>(kNewKey);
  __nv_bfloat16* const new_value = w.at<__nv_bfloat16>(kNewValue);
  const auto words = [](const void* array, size_t row, int columns) {
    return static_cast<const uint32_t*>(array) + row * (columns / 2);
  };
  const uint32_t* const embedding = words(a.embedding, token, kHidden);
  // Warp 0 keeps the residual of the CTA's 8 columns.
  const uint32_t own = embedding[4 * cta + g / 2];
  float residual = g & 1 ? high_float(own) : low_float(own);

#pragma unroll 1
  for (int layer = 0; layer < a.layers; ++layer) {
    const uint32_t tag = base + layer + 1;
    {  // QKV: 32 rows.
      constexpr int kRows = Sizes::kQkvStages;
      const uint32_t norm = words(a.attention_norm, layer, kHidden)[warp * 32 + lane];
      uint4 first[kRows], second[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) w.load(first[r], second[r]);
      float2 x;
      if (layer == 0) {
        const uint32_t pair = embedding[32 * warp + lane];
        x = make_float2(low_float(pair), high_float(pair));
      } else {
        x = poll_pair<kPolling>(copy_of(Sizes::kIn, kHidden) + 64 * warp + 2 * lane, tag - 1);
      }
      multiply_rows(w, x, norm, first, second);
      if (warp < kRows) {
        sync_consumers<1>();
        const int row = 8 * warp + g;
        const float sum = sum_partials(row_sums + row * kSumRow + 4 * t);
        const float factor = norm_factor<kHidden>(w, a.eps);
        if (t == 0) write_packet(packets + Sizes::kQkv + 8 * kRows * cta + row, sum * factor, tag);
      } else {
        arrive_consumers<1>();
      }
    }
    {  // Attention: warps 0 to 7 have 16 positions of every 128 of the split each.
      uint4 upper[4], lower[4];
      int kept = -1;
      const int mine = warp >> 1;
      const uint32_t tile = (warp & 1) * 2048;
      // The first keys are in registers before queries are known.
      const int early = min(cached.stages, 4);
#pragma unroll 1
      for (int stage = 0; stage < early; ++stage) {
        w.wait();
        if (stage == mine) {
          Attention::load_keys(w.stage() + tile, w, upper, lower);
          kept = w.place.slot;
          w.place.advance();
        } else {
          w.release();
        }
      }
      if (warp == 8 || warp == 9 || (warp == 10 && has_new)) {  // Two query heads, and the key.
        const bool is_query = warp < 10;
        const uint32_t* norm = words(is_query ? a.q_norm : a.k_norm, layer, kColumns);
        const uint32_t norm_first = norm[lane], norm_second = norm[32 + lane];
        const float2 cosine = reinterpret_cast<const float2*>(a.cosines)[position * 32 + lane];
        const float2 sine = reinterpret_cast<const float2*>(a.sines)[position * 32 + lane];
        const int row = is_query ? (2 * kv_head + warp - 8) * kColumns
                                 : Sizes::kQuery + kv_head * kColumns;
        const uint64_t* const from = packets + Sizes::kQkv + row + 2 * lane;
        const uint64_t* const pairs[2] = {from, from + 64};
        uint32_t found[4];
        poll_words<kPolling>(pairs, tag, found);
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(found[i]);
        float factor = rsqrtf(
            sum_of_warp(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]) * (1.0f / kColumns) +
            a.eps);
        // Queries take 1 / sqrt(128), and log2(e), as scores are exponents of 2.
        if (is_query) factor *= 0.08838834764f * kLog2E;
        const float y0 = x[0] * factor * low_float(norm_first), y1 = x[1] * factor * high_float(norm_first);
        const float z0 = x[2] * factor * low_float(norm_second), z1 = x[3] * factor * high_float(norm_second);
        auto* to = reinterpret_cast<uint32_t*>(is_query ? queries + (warp - 8) * kColumns : new_key);
        to[lane] = pack(y0 * cosine.x - z0 * sine.x, y1 * cosine.y - z1 * sine.y);
        to[32 + lane] = pack(z0 * cosine.x + y0 * sine.x, z1 * cosine.y + y1 * sine.y);
      } else if (warp == 11 && has_new) {  // The value, of both heads.
        const uint64_t* const from =
            packets + Sizes::kQkv + Sizes::kQuery + Sizes::kKv + kv_head * kColumns + 4 * lane;
        const uint64_t* const pairs[2] = {from, from + 2};
        uint32_t v[4];
        poll_words<kPolling>(pairs, tag, v);
        const uint2 rounded = make_uint2(pack(__uint_as_float(v[0]), __uint_as_float(v[1])),
                                         pack(__uint_as_float(v[2]), __uint_as_float(v[3])));
        reinterpret_cast<uint2*>(new_value)[lane] = rounded;
        auto* to = reinterpret_cast<float4*>(head_sums + 8 * kHeadRow + 8 * lane);
        to[0] = make_float4(low_float(rounded.x), low_float(rounded.x), high_float(rounded.x), high_float(rounded.x));
        to[1] = make_float4(low_float(rounded.y), low_float(rounded.y), high_float(rounded.y), high_float(rounded.y));
      }
      sync_consumers<2>();
      if (warp < 8) {
        Attention head;
        if (kept >= 0) {
          const int count = cached.count - 16 * warp;
          if (count > 0)
            head.add(w, upper, lower, w.ring + kept * kStageBytes + 8192 + tile, count);
          w.free_slot(kept);
        }
#pragma unroll 1
        for (int stage = early; stage < cached.stages; ++stage) {
          w.wait();
          const int count = cached.count - stage * kStageKeys - 16 * (warp & 1);
          if ((stage & 3) == mine && count > 0) {
            Attention::load_keys(w.stage() + tile, w, upper, lower);
            head.add(w, upper, lower, w.stage() + 8192 + tile, count);
          }
          w.release();
        }
        head.sum_lanes();
        if (lane < 2) maxima[2 * warp + lane] = make_float2(head.max, head.sum);
        if (t == 0) {
          float* to = head_sums + warp * kHeadRow + 2 * g;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            *reinterpret_cast<float2*>(to + 32 * i) = make_float2(head.out[i][0], head.out[i][1]);
            *reinterpret_cast<float2*>(to + 32 * i + 16) =
                make_float2(head.out[i][2], head.out[i][3]);
          }
        }
        sync_consumers<3>();
        // Merges the warps: this thread has head `of` of a column.
        const int i = warp * 32 + lane, of = lane & 1;
        const float2 one = maxima[lane & 15], added = maxima[16 + of];
        float most = one.x;
#pragma unroll
        for (int step = 2; step < 16; step *= 2)
          most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        most = fmaxf(most, added.x);
        const float weight = ptx::ex2(one.x - most), new_weight = ptx::ex2(added.x - most);
        float out = new_weight * head_sums[8 * kHeadRow + i];
#pragma unroll
        for (int q = 0; q < 4; ++q)
          out += __shfl_sync(~0u, weight, 2 * q + of) * head_sums[q * kHeadRow + i];
        if (cached.count > 64) {
#pragma unroll
          for (int q = 4; q < 8; ++q)
            out += __shfl_sync(~0u, weight, 2 * q + of) * head_sums[q * kHeadRow + i];
        }
        const int part = (2 * kv_head + of) * kSplits + split;
        write_packet(packets + Sizes::kPartial + part * kColumns + (i >> 1), out, tag);
        if (warp == 0) {
          float sum = weight * one.y;
#pragma unroll
          for (int step = 2; step < 16; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
          sum += new_weight * added.y;
          if (lane < 4)
            write_packet(packets + Sizes::kPartialSums + 2 * part + (lane >> 1), lane < 2 ? most : sum, tag);
        }
      } else {
        if (warp == 12 && has_new) {  // Scores of the new key.
          const uint2 k = reinterpret_cast<uint2*>(new_key)[lane];
          float scores[2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint2 q = reinterpret_cast<uint2*>(queries + h * kColumns)[lane];
            scores[h] = sum_of_warp(low_float(k.x) * low_float(q.x) + high_float(k.x) * high_float(q.x) +
                                    low_float(k.y) * low_float(q.y) + high_float(k.y) * high_float(q.y));
          }
          if (lane < 2) maxima[16 + lane] = make_float2(lane ? scores[1] : scores[0], 1.0f);
        }
        arrive_consumers<3>();
#pragma unroll 1
        for (int stage = early; stage < cached.stages; ++stage) {
          w.wait();
          w.release();
        }
        if (warp == 13 && has_new) {  // The new key and value, into the cache.
          const int column = 8 * (lane & 15);
          const __nv_bfloat16* from = (lane < 16 ? new_key : new_value) + column;
          auto* to = static_cast<__nv_bfloat16*>(lane < 16 ? a.keys : a.values) +
                     (static_cast<size_t>(layer) * a.length + position) * Sizes::kKv +
                     kv_head * kColumns + column;
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        }
      }
    }
    {  // Out: 8 rows.
      constexpr int kParts = Sizes::kOutStages;
      uint4 weights[2 * kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) w.load(weights[2 * i], weights[2 * i + 1]);
      if (warp == 0) {  // Merges the splits of 16 columns of a head.
        const int column = lane & 7;
        const float3 merged =
            merge_splits<kPolling, 4, kColumns, Sizes::kPartial, Sizes::kPartialSums>(
                packets, (cta >> 3) * kSplits, kSplits, (cta & 7) * 16, lane, column, tag);
        static_assert(kCopies == 4);
        write_packet(packets + Sizes::kAttention + (lane >> 3) * (Sizes::kQuery / 2) + 8 * cta + column,
                     pack(merged.x * merged.z, merged.y * merged.z), tag);
      }
      const uint64_t* const pairs[1] = {copy_of(Sizes::kAttention, Sizes::kQuery / 2) + 64 * warp +
                                        2 * lane};
      uint32_t x[2];
      poll_words<kPolling>(pairs, tag, x);
      reinterpret_cast<uint2*>(w.slice())[lane] = make_uint2(x[0], x[1]);
      __syncwarp();
      multiply_eight<kParts>(w, weights);
      if (warp == 0) {
        sync_consumers<4>();
        residual += sum_partials(out_sums + g * kSumRow + 4 * t);
        write_packet(packets + Sizes::kMiddle + t * kHidden + 8 * cta + g, residual, tag);
      } else {
        arrive_consumers<4>();
      }
    }
    {  // Gate and up: 24 rows each.
      constexpr int kRows = Sizes::kGateStages;
      const uint32_t norm = words(a.mlp_norm, layer, kHidden)[warp * 32 + lane];
      uint4 first[2 * kRows], second[2 * kRows];
#pragma unroll
      for (int r = 0; r < 2 * kRows; ++r) {  // Rows of gate and up by turns.
        const int at = r / 2 + r % 2 * kRows;
        w.load(first[at], second[at]);
      }
      const float2 x = poll_pair<kPolling>(copy_of(Sizes::kMiddle, kHidden) + 64 * warp + 2 * lane, tag);
      multiply_rows(w, x, norm, first, second);
      if (warp < kRows) {
        sync_consumers<5>();
        const int row = 8 * warp + g;
        float gate = sum_partials(row_sums + row * kSumRow + 4 * t);
        float up = sum_partials(row_sums + (8 * kRows + row) * kSumRow + 4 * t);
        const float factor = norm_factor<kHidden>(w, a.eps);
        gate *= factor;
        up *= factor;
        const float inner = __fdividef(up * gate, 1.0f + ptx::ex2(-kLog2E * gate));
        const float next = __shfl_xor_sync(~0u, inner, 4);
        if (!(g & 1))
          write_packet(packets + Sizes::kInner + t * (Sizes::kMlp / 2) + 4 * kRows * cta + (row >> 1),
              pack(inner, next), tag);
      } else {
        arrive_consumers<5>();
      }
    }
    {  // Down: 8 rows.
      constexpr int kParts = Sizes::kDownStages;
      uint4 weights[2 * kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) w.load(weights[2 * i], weights[2 * i + 1]);
      const uint64_t* const from =
          copy_of(Sizes::kInner, Sizes::kMlp / 2) + 96 * warp + 2 * lane;
      const uint64_t* const pairs[2] = {from, lane < 16 ? from + 64 : from};
      uint32_t x[4];
      poll_words<kPolling>(pairs, tag, x);
      auto* to = reinterpret_cast<uint2*>(w.slice());
      to[lane] = make_uint2(x[0], x[1]);
      if (lane < 16) to[32 + lane] = make_uint2(x[2], x[3]);
      __syncwarp();
      multiply_eight<kParts>(w, weights);
      if (warp == 0) {
        sync_consumers<6>();
        residual += sum_partials(out_sums + g * kSumRow + 4 * t);
        write_packet(packets + Sizes::kIn + t * kHidden + 8 * cta + g, residual, tag);
      } else {
        arrive_consumers<6>();
      }
    }
  }

  // The head: tiles of 8 rows, of which a warp has those in the slot of its number.
  const float2 x = poll_pair<kPolling>(copy_of(Sizes::kIn, kHidden) + 64 * warp + 2 * lane, base + a.layers);
  const uint32_t norm = words(a.norm, 0, kHidden)[warp * 32 + lane];
  w.at<uint32_t>(kLast)[warp * 32 + lane] = pack(x.x * low_float(norm), x.y * high_float(norm));
  const float squares = sum_of_warp(x.x * x.x + x.y * x.y);
  if (lane == 0) w.at<float>(kSquares)[warp] = squares;
  sync_consumers<1>();
  const float factor = norm_factor<kHidden>(w, a.eps);
  const uint32_t last = w.ring + kLast + 64 * (g & 1) + t * 16;
  const int stages = head_stages(a.vocab);
  Argmax best;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    if (w.place.slot == warp) {
      w.wait();
      float sums[4][4] = {};
      const uint32_t from = w.stage() + lane * 16;
#pragma unroll 4
      for (int k = 0; k < kHidden / 64; ++k)
        multiply(sums[k & 3], ptx::load_shared(from + 1024 * k), ptx::load_shared(from + 1024 * k + 512),
            ptx::load_shared(last + 128 * k));
      w.free_slot(w.place.slot, kWarps);
      const float sum = ((sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0])) +
                        ((sums[0][3] + sums[1][3]) + (sums[2][3] + sums[3][3]));
      const int row = (stage * kCtas + cta) * 8 + g;
      if (row < a.vocab) {
        const float logit = sum * factor;
        if (t == 0) a.logits[row] = logit;
        best.merge(logit, row, 1.0f);
      }
    }
    w.place.advance();
  }
  best.merge_lanes<4, 32>();
  float4* const warp_bests = w.at<float4>(kBestOfWarps);
  if (lane == 0) warp_bests[warp] = best.to_float4();
  sync_consumers<2>();
  if (warp != 0) return;
  best.load(warp_bests[lane & 15]);
  best.merge_lanes<1, 16>();
  const uint32_t tag = base + a.layers + 1;
  if (lane < 4) {
    const uint32_t found[4] = {__float_as_uint(best.logit), static_cast<uint32_t>(best.row),
                               __float_as_uint(best.sum), 0};
    uint32_t word = found[0];
#pragma unroll
    for (int i = 1; i < 4; ++i)
      if (lane == i) word = found[i];
    write_packet(packets + Sizes::kBest + 4 * cta + lane, word, tag);
  }
  if (cta != 0) return;
  const uint64_t* pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) pairs[i] = packets + Sizes::kBest + 16 * lane + 2 * i;
  best.poll(pairs, tag);
  if (lane == 0) {
    const float rest = logf(best.sum);
    const bool is_good = isfinite(best.logit) && isfinite(rest);
    *a.best = is_good ? best.row : -1;
    *a.best_logp = is_good ? -rest : __int_as_float(0x7fffffff);
    // All CTAs have read the old one: their packets are here.
    a.state[0] = tag;
  }
}

template <class Shape>
__device__ inline void decode(const DecodeStepArguments& a, uint8_t* shared) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int token = *a.token, position = *a.position;
  const float nan = __int_as_float(0x7fffffff);
  if (token < 0 || token >= a.vocab || position < 0 || position >= a.length) {
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < a.vocab; i += kCtas * kThreads)
      a.logits[i] = nan;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      *a.best = -1;
      *a.best_logp = nan;
    }
    return;
  }
  const uint32_t ring = ptx::shared_address(shared);
  // Zeros, for warps and splits without positions.
  auto* sums = reinterpret_cast<float*>(shared + kHeadSums);
  for (int i = threadIdx.x; i < 9 * kHeadRow; i += kThreads) sums[i] = 0.0f;
  if (threadIdx.x < 18)
    reinterpret_cast<float2*>(shared + kMaxima)[threadIdx.x] = make_float2(-1e30f, 0.0f);
  if (threadIdx.x == 0) {
    init_ring<kStages>(ring);
  }
  __syncthreads();
  if (warp >= kWarps) {
    ptx::fewer_registers<24>();
    if (threadIdx.x == kConsumers) produce<Shape>(a, ring, position);
  } else {
    ptx::more_registers<112>();
    const auto base = static_cast<uint32_t>(*reinterpret_cast<volatile const uint64_t*>(a.state));
    consume<Shape>(a, shared, warp, token, position, base);
  }
}

}  // namespace xentile::decode_step

// What the kernels of decode_step.cuh and decode_step_wide.cuh share: packets between CTAs, the ring of weight stages, the
// online softmax of a warp, and the merge of partial results.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#ifdef XENTILE_DECODE_STEP_TRAP
#include <cstdio>
#endif

#include "hopper.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "warp.cuh"

namespace xentile::decode_step {

using mma::high_float;
using mma::low_float;
using mma::pack;

inline constexpr int kCtas = 128;
inline constexpr int kWarps = 16;
inline constexpr int kConsumers = 32 * kWarps;
inline constexpr int kThreads = kConsumers + 128;
inline constexpr int kStageBytes = 16384;
inline constexpr int kMaxStages = 12;
inline constexpr int kMaxSharedBytes = 232448;
inline constexpr int kSplits = 16;
// Copies of each vector that all CTAs read, so that they poll different slices of the L2.
inline constexpr int kCopies = 4;
// Row pitch of the buffers of partial sums, in floats.
inline constexpr int kSumRow = 20;
inline constexpr float kLog2E = 1.4426950409f;
// Below all logits, and finite, as differences of it are taken.
inline constexpr float kLowest = -3e38f;
// 1 / sqrt(128), times log2(e) as scores are exponents of 2.
inline constexpr float kQueryScale128 = 0.08838834764f * kLog2E;

}  // namespace xentile::decode_step

// For src/decode_step/arguments.rs.
inline constexpr int kDecodeStepCtas = xentile::decode_step::kCtas;
inline constexpr int kDecodeStepThreads = xentile::decode_step::kThreads;
inline constexpr int kDecodeStepStageBytes = xentile::decode_step::kStageBytes;

// Mirrored by `Arguments` in src/decode_step/arguments.rs. Arrays are bf16 unless a type says more.
struct alignas(128) DecodeStepArguments {
  // The cache as [layers * length, KV heads * 128].
  CUtensorMap key_boxes;
  CUtensorMap value_boxes;
  const void* packed;          // stages of all layers, then of the head, each of all CTAs
  const void* embedding;       // [vocab, hidden]
  const void* attention_norm;  // [layers, hidden]
  const void* qkv_bias;        // [layers, (query heads + 2 KV heads) * head], where there are biases
  const void* q_norm;          // [layers, 128]
  const void* k_norm;          // [layers, 128]
  const void* mlp_norm;        // [layers, hidden]
  const void* norm;            // [hidden]
  const float* cosines;        // [length, 64]
  const float* sines;          // [length, 64]
  void* keys;                  // [layers, length, KV heads, 128]
  void* values;                // [layers, length, KV heads, 128]
  uint64_t* state;             // [kStateWords]
  const int32_t* token;        // [1]
  const int32_t* position;     // [1]
  float* logits;               // [vocab]
  int32_t* best;               // [1]
  float* best_logp;            // [1]
  int32_t layers;
  int32_t vocab;
  int32_t length;
  float eps;
  // Copies in flight of a CTA in layers, and the least clocks between two: deeper queues of copies
  // delay the packets.
  int32_t in_flight;
  int32_t pace;
  // Sequences: 1 in decode_step.cuh. In decode_step_wide.cuh arrays have them as the first extent,
  // and the cache as the second.
  int32_t batch;
};

namespace xentile::decode_step {

// The sum of 16 partial sums, of which each of 4 neighbouring lanes loads 4.
__device__ inline float sum_partials(const float* partials) {
  const float4 four = *reinterpret_cast<const float4*>(partials);
  float sum = (four.x + four.y) + (four.z + four.w);
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

// A barrier of all consumers, and the arrival of a warp that need not wait at it.
template <int kBarrier>
__device__ inline void sync_consumers() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kConsumers) : "memory");
}

template <int kBarrier>
__device__ inline void arrive_consumers() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "n"(kConsumers) : "memory");
}

__device__ inline void write_packet(uint64_t* packet, uint32_t word, uint32_t tag) {
  const uint64_t value = word | static_cast<uint64_t>(tag) << 32;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(packet), "l"(value) : "memory");
}

__device__ inline void write_packet(uint64_t* packet, float x, uint32_t tag) {
  write_packet(packet, __float_as_uint(x), tag);
}

// How a warp waits for packets. Its reads delay those of others: with a pause for one sequence, where
// copies of weights are close to all that is read, kernels take 3 % less. For more than 4 sequences
// packets are half of what is read, and a warp reads all of its own once the last pair is there.
enum class Polling { kAll, kPaused, kLastFirst };

// Waits until the pairs of packets from kFirst on have the tag, and gives their words. Pairs that
// are not `wrong` are there, and are not read again.
template <Polling kPolling, int kFirst, int kPairs>
__device__ inline void wait_for_pairs(const uint64_t* const (&pairs)[kPairs], uint32_t tag,
                                      uint32_t (&words)[2 * kPairs], uint32_t (&wrong)[kPairs]) {
#ifdef XENTILE_DECODE_STEP_TRAP
  int polls = 0;
#endif
  while (true) {
    uint32_t any = 0, tags[2 * kPairs];
#pragma unroll
    for (int i = kFirst; i < kPairs; ++i)
      asm volatile(
          "{\n"
          ".reg .b64 a, b;\n"
          ".reg .pred is_wrong;\n"
          "setp.ne.b32 is_wrong, %5, 0;\n"
          "mov.b64 a, {%0, %6};\n"
          "mov.b64 b, {%2, %6};\n"
          "@is_wrong ld.relaxed.gpu.global.v2.b64 {a, b}, [%4];\n"
          "mov.b64 {%0, %1}, a;\n"
          "mov.b64 {%2, %3}, b;\n"
          "}\n"
          : "+r"(words[2 * i]), "=&r"(tags[2 * i]), "+r"(words[2 * i + 1]), "=&r"(tags[2 * i + 1])
          : "l"(pairs[i]), "r"(wrong[i]), "r"(tag)
          : "memory");
#pragma unroll
    for (int i = kFirst; i < kPairs; ++i)
      any |= wrong[i] = (tags[2 * i] ^ tag) | (tags[2 * i + 1] ^ tag);
    if (__all_sync(~0u, any == 0)) return;
    if constexpr (kPolling == Polling::kPaused) __nanosleep(150);
#ifdef XENTILE_DECODE_STEP_TRAP
    if (++polls > 2000000) {
      printf("stuck: cta %d thread %d tag %u\n", blockIdx.x, threadIdx.x, tag);
      __trap();
    }
#endif
  }
}

// Waits until kPairs pairs of packets of each lane have the tag, and gives their words.
template <Polling kPolling, int kPairs>
__device__ inline void poll_words(const uint64_t* const (&pairs)[kPairs], uint32_t tag,
                                  uint32_t (&words)[2 * kPairs]) {
  uint32_t wrong[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    wrong[i] = 1;
    words[2 * i] = words[2 * i + 1] = 0;
  }
  if constexpr (kPolling == Polling::kLastFirst && kPairs > 2)
    wait_for_pairs<kPolling, kPairs - 1>(pairs, tag, words, wrong);
  wait_for_pairs<kPolling, 0>(pairs, tag, words, wrong);
}

// The same of one pair, as floats.
template <Polling kPolling>
__device__ inline float2 poll_pair(const uint64_t* pair, uint32_t tag) {
  const uint64_t* const pairs[1] = {pair};
  uint32_t words[2];
  poll_words<kPolling>(pairs, tag, words);
  return make_float2(__uint_as_float(words[0]), __uint_as_float(words[1]));
}

// A word of a vector without tags: 0 is one that is not there yet, so both of its elements may not be
// +0. The first becomes -0 then.
__device__ inline void write_word(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(word ? word : 0x8000u)
               : "memory");
}

// Waits until the fours of words from kFirst on are there. Those that are not `missing` are not read
// again.
template <int kFirst, int kFours>
__device__ inline void wait_for_fours(const uint32_t* const (&fours)[kFours],
                                      uint32_t (&words)[4 * kFours], uint32_t (&missing)[kFours]) {
  while (true) {
    uint32_t any = 0;
#pragma unroll
    for (int i = kFirst; i < kFours; ++i)
      asm volatile(
          "{\n"
          ".reg .pred is_missing;\n"
          "setp.ne.b32 is_missing, %5, 0;\n"
          "@is_missing ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
          "}\n"
          : "+r"(words[4 * i]), "+r"(words[4 * i + 1]), "+r"(words[4 * i + 2]),
            "+r"(words[4 * i + 3])
          : "l"(fours[i]), "r"(missing[i])
          : "memory");
#pragma unroll
    for (int i = kFirst; i < kFours; ++i)
      any |= missing[i] = min(min(words[4 * i], words[4 * i + 1]),
                              min(words[4 * i + 2], words[4 * i + 3])) == 0;
    if (__all_sync(~0u, any == 0)) return;
  }
}

// Waits until kFours fours of words of each lane are there.
template <Polling kPolling, int kFours>
__device__ inline void poll_fours(const uint32_t* const (&fours)[kFours],
                                  uint32_t (&words)[4 * kFours]) {
  uint32_t missing[kFours];
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    missing[i] = 1;
    words[4 * i] = words[4 * i + 1] = words[4 * i + 2] = words[4 * i + 3] = 0;
  }
  if constexpr (kPolling == Polling::kLastFirst && kFours > 1)
    wait_for_fours<kFours - 1>(fours, words, missing);
  wait_for_fours<0>(fours, words, missing);
}

// sums += a b for 32 columns, of which a lane has 8 that follow each other: rows g of A are `upper`,
// and rows g + 8 are `lower`.
__device__ inline void multiply(float (&sums)[4], const uint4& upper, const uint4& lower,
                                const uint4& x) {
  mma::multiply(sums, upper.x, lower.x, upper.y, lower.y, x.x, x.y);
  mma::multiply(sums, upper.z, lower.z, upper.w, lower.w, x.z, x.w);
}

// The cached positions of a CTA's split.
struct Split {
  int start;
  int count;
  int stages;
};

// `kKeys` positions are a stage: keys in its first half, values in the other.
template <int kKeys>
__device__ inline Split cache_split(int position, int split, int splits = kSplits) {
  const int size = (position + splits - 1) / splits;
  const int start = split * size;
  const int count = max(0, min(size, position - start));
  return {start, count, (count + kKeys - 1) / kKeys};
}

// The largest logit, the first row that has it, and the sum of exp(logit - largest).
struct Argmax {
  float logit = kLowest;
  int row = 0;
  float sum = 0.0f;

  __device__ void merge(float other, int other_row, float other_sum) {
    const float larger = fmaxf(logit, other);
    sum = sum * ptx::ex2((logit - larger) * kLog2E) + other_sum * ptx::ex2((other - larger) * kLog2E);
    if (other > logit || (other == logit && other_row < row)) row = other_row;
    logit = larger;
  }

  // Merges those of lanes whose number differs in the bits from `kFirst` on, below `kStop`.
  template <int kFirst, int kStop>
  __device__ void merge_lanes() {
#pragma unroll
    for (int step = kFirst; step < kStop; step *= 2) {
      const float other = __shfl_xor_sync(~0u, logit, step);
      const int other_row = __shfl_xor_sync(~0u, row, step);
      const float other_sum = __shfl_xor_sync(~0u, sum, step);
      merge(other, other_row, other_sum);
    }
  }

  __device__ void load(float4 from) {
    logit = from.x;
    row = __float_as_int(from.y);
    sum = from.z;
  }
  __device__ float4 to_float4() const {
    return make_float4(logit, __int_as_float(row), sum, 0.0f);
  }

  // Replaces it by that of four CTAs for each lane, two pairs of packets a CTA, and merges lanes.
  __device__ void poll(const uint64_t* const (&pairs)[8], uint32_t tag) {
    uint32_t found[16];
    poll_words<Polling::kAll>(pairs, tag, found);
    *this = Argmax();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      merge(__uint_as_float(found[4 * i]), static_cast<int>(found[4 * i + 1]),
            __uint_as_float(found[4 * i + 2]));
    merge_lanes<1, 32>();
  }
};

// A slot of a ring of kSlots stages, and the parity of its barrier's phase. Behind the stages are
// the barriers of full slots, and then those of empty ones.
template <int kSlots>
struct RingSlot {
  int slot = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }

  __device__ void advance(int count) {
    for (slot += count; slot >= kSlots; slot -= kSlots) parity ^= 1;
  }
};

template <int kSlots>
__device__ inline void init_ring(uint32_t ring) {
  const uint32_t barriers = ring + kSlots * kStageBytes;
  for (int i = 0; i < kSlots; ++i) {
    ptx::mbarrier_init(barriers + 8 * i, 1);
    ptx::mbarrier_init(barriers + 8 * (kSlots + i), kWarps);
  }
  ptx::fence_mbarrier_init();
}

// Zero, once `x` is there. The compiler does not know that kThreads shifts all of it out.
__device__ inline uint32_t zero_after(uint32_t x) {
  uint32_t zero;
  asm volatile("shr.u32 %0, %1, %2;" : "=r"(zero) : "r"(x), "r"(blockDim.x));
  return zero;
}

// A consumer warp of a CTA, and its slot of the ring.
template <int kSlots>
struct RingReader {
  uint8_t* shared;
  uint32_t ring;
  int warp, lane;
  // Rows of A, and columns of it and of sums, of this lane.
  int g, t;
  RingSlot<kSlots> place;

  __device__ RingReader(uint8_t* shared, int warp)
      : shared(shared),
        ring(ptx::shared_address(shared)),
        warp(warp),
        lane(threadIdx.x % 32),
        g(lane / 4),
        t(lane % 4) {}

  __device__ uint32_t stage() const { return ring + place.slot * kStageBytes; }
  __device__ uint32_t full(int slot) const { return ring + kSlots * kStageBytes + 8 * slot; }
  __device__ uint32_t empty(int slot) const { return full(kSlots + slot); }
  __device__ void wait() const { ptx::mbarrier_wait(full(place.slot), place.parity); }

  // Waits for a stage, and loads this warp's 64 columns of 8 rows.
  __device__ void load_stage(uint4& first, uint4& second) const {
    wait();
    const uint32_t from = stage() + warp * 1024 + lane * 16;
    first = ptx::load_shared(from);
    second = ptx::load_shared(from + 512);
  }

  // Gives a stage back once `last`, of what this warp loaded from it, is there. A load that is only
  // issued may wait behind other warps' polls until the next copy, which does not pass through
  // their queue, has replaced what it reads.
  __device__ void release_after(uint32_t last, int warps = 1) {
    const uint32_t barrier = empty(place.slot);
    __syncwarp();
    const uint32_t zero = zero_after(last);
    if (lane == 0) ptx::mbarrier_arrive(barrier + zero, warps);
    place.advance();
  }
};

// Attention of a warp for the kGroup query heads of a KV head, 16 positions at a time, with values
// in halves of 64 columns.
template <int kHead, int kGroup, int kHalfBytes>
struct OnlineSoftmax {
  // Of head t % kGroup: the running maximum, in base 2, and this lane's sum of exponentials.
  float max = -1e30f;
  float sum = 0.0f;
  // Of 16 columns each: rows g and g + 8, heads 2 t and 2 t + 1, of which there are kGroup.
  float out[kHead / 16][4] = {};

  // Adds 16 positions, of which the first `count` exist, from this lane's scores of positions g and
  // g + 8 and head t % kGroup; `values` has theirs. Returns a word that is there once all loads are.
  template <class Reader>
  __device__ uint32_t add(const Reader& w, float first, float second, uint32_t values, int count) {
    const int g = w.g, t = w.t, lane = w.lane;
    if (g >= count) first = kLowest;
    if (8 + g >= count) second = kLowest;
    float now = fmaxf(max, fmaxf(first, second));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, step));
    const float factor = ptx::ex2(max - now);
    max = now;
    first = ptx::ex2(first - now);
    second = ptx::ex2(second - now);
    sum = sum * factor + (first + second);
    const float factors[2] = {__shfl_sync(~0u, factor, 2 * t % kGroup),
                              __shfl_sync(~0u, factor, (2 * t + 1) % kGroup)};
    // Probabilities as B: rows are positions, column n is head n % kGroup.
    const uint32_t p = pack(first, second);
    const uint32_t even = __shfl_sync(~0u, p, 8 * t + g % kGroup);
    const uint32_t odd = __shfl_sync(~0u, p, 8 * t + 4 + g % kGroup);
    const uint32_t b0 = __byte_perm(even, odd, 0x5410), b1 = __byte_perm(even, odd, 0x7632);
    // Values of positions that do not exist may be NaN.
    const uint32_t mask = position_mask(2 * t, count), next_mask = position_mask(2 * t + 8, count);
    const uint32_t row = (lane & 7) + 8 * (lane >> 4), chunk = (lane >> 3) & 1;
    // p depends on the loads of all keys.
    uint32_t last = p;
#pragma unroll
    for (int i = 0; i < kHead / 16; ++i) {
      uint32_t v[4];
      mma::load_matrices_transposed(v, values + (i >> 2) * kHalfBytes + row * 128 +
                                           (((2 * (i & 3) + chunk) ^ (lane & 7)) << 4));
#pragma unroll
      for (int k = 0; k < 4; ++k) out[i][k] *= factors[k & 1];
      mma::multiply(out[i], v[0] & mask, v[1] & mask, v[2] & next_mask, v[3] & next_mask, b0, b1);
      last |= v[0];
    }
    return last;
  }

  // Adds up `sum` over the lanes of a head.
  __device__ void sum_lanes() {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  }

  // A mask of positions `first` and the next, of `count`.
  __device__ static uint32_t position_mask(int first, int count) {
    return (first < count ? 0x0000ffffu : 0u) | (first + 1 < count ? 0xffff0000u : 0u);
  }
};

// Merges the splits of two columns of a query head from first_column + 2 column on, of packets [part, kHead] at
// kPartials and [part, maximum and sum] at kSums. The head has `splits` parts from `part` on, of which this lane loads
// kParts. Returns both sums of exponentials times values, and 1 / the sum of exponentials.
template <Polling kPolling, int kParts, int kHead, int kPartials, int kSums>
__device__ inline float3 merge_splits(const uint64_t* packets, int part, int splits, int first_column,
                                      int lane, int column, uint32_t tag) {
  const int first_part = (lane >> 3) * kParts;
  const uint64_t* pairs[2 * kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int at = part + min(first_part + i, splits - 1);
    pairs[i] = packets + kPartials + at * kHead + first_column + 2 * column;
    pairs[kParts + i] = packets + kSums + 2 * at;
  }
  uint32_t words[4 * kParts];
  poll_words<kPolling>(pairs, tag, words);
  float x[4 * kParts];
#pragma unroll
  for (int i = 0; i < 4 * kParts; ++i) x[i] = __uint_as_float(words[i]);
  float max = x[2 * kParts];
#pragma unroll
  for (int i = 1; i < kParts; ++i) max = fmaxf(max, x[2 * kParts + 2 * i]);
  max = fmaxf(max, __shfl_xor_sync(~0u, max, 8));
  max = fmaxf(max, __shfl_xor_sync(~0u, max, 16));
  float first = 0.0f, second = 0.0f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const float weight =
        first_part + i < splits ? ptx::ex2(x[2 * kParts + 2 * i] - max) : 0.0f;
    first += weight * x[2 * i];
    second += weight * x[2 * i + 1];
    sum += weight * x[2 * kParts + 1 + 2 * i];
  }
#pragma unroll
  for (int step = 8; step < 32; step *= 2) {
    first += __shfl_xor_sync(~0u, first, step);
    second += __shfl_xor_sync(~0u, second, step);
    sum += __shfl_xor_sync(~0u, sum, step);
  }
  return make_float3(first, second, 1.0f / sum);
}

}  // namespace xentile::decode_step

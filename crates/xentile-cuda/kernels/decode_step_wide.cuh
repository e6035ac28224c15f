// A token of each of up to 8 sequences in one persistent kernel, for decoders of several sizes.
//
// As decode_step.cuh has it: 128 CTAs, each with rows of its own of every matrix, a ring of stages
// of 8 rows of 1024 columns, and activations that go from CTA to CTA without a grid barrier. What
// differs:
//
// - Vectors that all CTAs read are words of two bf16 without tags, as with 8 sequences they are much
//   of what is read: a word is 0 until it is there, and +0 travels as -0. Layers use two buffers by
//   turns. A warp of each CTA clears its words of the last layer's once all CTAs have read them.
// - Sequences are columns of B. Rows 0 to 7 of A are 32 columns of a warp's 64, and rows 8 to 15
//   the other 32; columns 2 s and 2 s + 1 of B are these columns of sequence s. So one mma has four
//   sequences, and lane (g, t) the sum of row g and sequence t. There are one or two such quads.
// - Of few sequences weights are in registers before activations are there.
// - A lane polls the activations that it multiplies, with no copy in shared memory. Columns of B
//   without a sequence read the last sequence's, and their results are not written.
// - A warp's sums go to shared memory a block of 4 / kQuads groups of rows at a time. All warps
//   meet, and four lanes add up one row of a sequence. Two buffers take turns, so a block is one
//   barrier.
// - Rows of gate and up follow each other, so that what is inside the MLP is sent block by block.
// - Attention: 2, 4 or 8 sequences share the 16 CTAs of a KV head, so that a CTA has a part of one
//   of them; 3, 5, 6, 7, and long ones of 8, have a part in all 16 CTAs, and a team of warps each.
//
// Dimensions that are no multiples of these are filled up: packed matrices have zeros behind the
// columns and rows of the model. A model with fewer than 8 KV heads has each of them several times,
// with a part of its query heads each, and heads of zeros; the cache has every KV head once.
#pragma once

#include "decode_step_common.cuh"

namespace xentile::decode_step::wide {

// Hidden columns, query heads, columns of a head, columns inside the MLP, and whether queries and
// keys have norms. There are 8 KV heads, one for each 16 CTAs. Of the model itself: hidden columns,
// KV heads, and query heads of each where they have biases, or 0.
template <int kHiddenSize, int kQueryHeads, int kHeadSize, int kMlpSize, bool kHasNorms,
          int kModelColumns = kHiddenSize, int kModelKvHeads = kCtas / kSplits, int kModelGroup = 0>
struct Dims {
  static constexpr int kColumns = kModelColumns, kCacheHeads = kModelKvHeads;
  static constexpr int kBiasGroup = kModelGroup;
  static constexpr int kHidden = kHiddenSize, kHeads = kQueryHeads, kHead = kHeadSize;
  static constexpr int kMlp = kMlpSize, kKvHeads = kCtas / kSplits;
  static constexpr bool kHeadNorms = kHasNorms;
  static_assert(kHidden % 1024 == 0 && kHidden <= 4096 && kMlp % 1024 == 0);
  static_assert(kHead == 128 || (kHead == 64 && !kHeadNorms));
  static_assert(kHeads == 2 * kKvHeads || kHeads == 4 * kKvHeads);
  static_assert(kColumns % 8 == 0 && kColumns <= kHidden && kKvHeads % kCacheHeads == 0);
};

using Qwen3Small = Dims<1024, 16, 128, 3072, true>;
using Qwen3Medium = Dims<2048, 16, 128, 6144, true>;
using LlamaSmall = Dims<2048, 32, 64, 8192, false>;
using Qwen3Large = Dims<4096, 32, 128, 12288, true>;
using LlamaLarge = Dims<4096, 32, 128, 14336, false>;
// Of 896 columns, 14 query heads, 2 KV heads, and 4864 columns inside the MLP.
using Qwen2Small = Dims<1024, 16, 64, 5120, false, 896, 2, 7>;

// The most positions of a sequence of 8 that has 2 parts; others have 16, which share the work of one long sequence.
inline constexpr int kMostOfTwo = 2048;

// Outputs of a block of rows, each of which four lanes add up.
inline constexpr int kOutputs = kConsumers / 4;

template <class Of, int kNumQuads>
struct Plan : Of {
  static constexpr int kQuads = kNumQuads, kSequences = 4 * kQuads;
  static constexpr Polling kPolling = kQuads == 2 ? Polling::kLastFirst : Polling::kAll;
  static constexpr int kGroup = Of::kHeads / Of::kKvHeads;
  static constexpr int kQuery = Of::kHeads * Of::kHead, kKv = Of::kKvHeads * Of::kHead;
  static constexpr int kQkv = kQuery + 2 * kKv;
  // KV heads of a kernel that are one of the cache, and columns of a position of the cache.
  static constexpr int kShare = Of::kKvHeads / Of::kCacheHeads;
  static constexpr int kCacheRow = Of::kCacheHeads * Of::kHead;
  // Groups of 8 rows of a CTA, and parts of 1024 columns.
  static constexpr int kQkvGroups = kQkv / kCtas / 8, kOutGroups = Of::kHidden / kCtas / 8;
  static constexpr int kMlpGroups = Of::kMlp / kCtas / 8;
  static constexpr int kHiddenParts = Of::kHidden / 1024, kQueryParts = kQuery / 1024;
  static constexpr int kMlpParts = Of::kMlp / 1024;
  static_assert(kQkv % (8 * kCtas) == 0 && kQuery % 1024 == 0);
  static constexpr int kLayerStages = kQkvGroups * kHiddenParts + kOutGroups * kQueryParts +
                                      2 * kMlpGroups * kHiddenParts + kOutGroups * kMlpParts;
  // Bytes of a stage of a matrix of hidden columns: without the last warps', if these are zeros.
  static constexpr int kHiddenBytes =
      kHiddenParts == 1 ? (Of::kColumns + 63) / 64 * 1024 : kStageBytes;
  // Groups of rows of a block.
  static constexpr int kBlock = 4 / kQuads;
  static constexpr int kOutBlocks = (kOutGroups + kBlock - 1) / kBlock;
  // Positions of a stage of the cache, bytes of 64 columns of them, and tiles of 16.
  static constexpr int kKeys = 4096 / Of::kHead, kHalfBytes = 128 * kKeys, kTiles = kKeys / 16;
  // Copies of each vector that all CTAs read. With few sequences they poll different slices of the L2; with many,
  // writing several takes longer.
  static constexpr int kCopies = kQuads == 1 ? 4 : 1;
  // In the state, behind its first 16 words of 8 bytes: vectors [parity of the tag, copy, sequence, ..] of words
  // of 4 bytes, and packets [sequence, ..].
  static constexpr int kIn = 16;
  static constexpr int kMiddle = kIn + kCopies * kSequences * Of::kHidden / 2;
  static constexpr int kQkvAt = kMiddle + kCopies * kSequences * Of::kHidden / 2;
  static constexpr int kPartial = kQkvAt + kSequences * kQkv;
  static constexpr int kPartialSums = kPartial + kSequences * kSplits * kQuery;
  static constexpr int kAttention = kPartialSums + 2 * kSequences * kSplits * Of::kHeads;
  static constexpr int kInner = kAttention + kCopies * kSequences * kQuery / 2;
  static constexpr int kBest = kInner + kCopies * kSequences * Of::kMlp / 2;
  static constexpr int kStateWords = kBest + 4 * kSequences * kCtas;
  // Shared memory of a CTA, in bytes, behind the ring.
  static constexpr int kHeadRow = Of::kHead * kGroup + 8;
  static constexpr int kRowsAt = 256;
  static constexpr int kPartsAt = kRowsAt + 16 * kSequences;
  static constexpr int kSquaresAt = kPartsAt + 16 + 24 * kSequences;
  static constexpr int kSumsAt = kSquaresAt + kSequences * kWarps * 4;
  static constexpr int kHeadSumsAt = kSumsAt + 2 * kOutputs * kSumRow * 4;
  static constexpr int kMaximaAt = kHeadSumsAt + kWarps * kHeadRow * 4;
  static constexpr int kScoresAt = kMaximaAt + kWarps * kGroup * 8;
  static constexpr int kQueriesAt = kScoresAt + kSequences * kGroup * 4;
  static constexpr int kNewAt = kQueriesAt + kSequences * kGroup * Of::kHead * 2;
  static constexpr int kBestsAt = kNewAt + kSequences * 2 * Of::kHead * 2;
  static constexpr int kRestBytes = kBestsAt + 2 * kWarps * 16;
  static constexpr int kFittingStages = (kMaxSharedBytes - kRestBytes) / kStageBytes;
  static constexpr int kRing = kFittingStages < kMaxStages ? kFittingStages : kMaxStages;
  static constexpr int kBytes = kRing * kStageBytes + kRestBytes;
  static_assert(kRing >= 8 && kNewAt % 16 == 0 && kQueriesAt % 16 == 0 && kBestsAt % 16 == 0);
};

// A sequence's token, and its position; the first token at position 0 where they are not valid.
struct Row {
  int token, position;
  int is_valid;
  // Parts of its positions, each of which a CTA of a KV head has.
  int splits;
};

// A CTA's part of a sequence: cached positions, and the new one where it is the last part.
struct alignas(8) Part {
  int sequence, index;
  Split cached;
  int has_new;
};

// A CTA's parts, of each sequence at most one. All warps have the first `alone`, of a sequence that shares the CTAs of a
// KV head with others; then each of the others has a team.
struct alignas(16) Parts {
  int count, alone;
};

// Splits of the positions of a sequence. They depend on its own position and the number of sequences, so that other
// rows change no bits.
__device__ inline int splits_of(int batch, int position) {
  if (batch == 8) return position <= kMostOfTwo ? 2 : kSplits;
  return batch & (batch - 1) ? kSplits : kSplits / batch;
}

// Makes the list of a CTA's parts, by one thread. Parts of all sequences are dealt out to CTAs by turns, those of 16 to
// all of them.
template <class P>
__device__ inline void list_parts(const Row* rows, int batch, int cta, Parts& all, Part* parts) {
  int count = 0, alone = 0;
  for (int is_alone = 1; is_alone >= 0; --is_alone) {
    int first = 0;
    for (int s = 0; s < batch; ++s) {
      const int splits = rows[s].splits, index = (cta - first) & (kSplits - 1);
      first += splits;
      if (index >= splits || (splits < kSplits || batch == 1) != is_alone) continue;
      parts[count++] = {s, index, cache_split<P::kKeys>(rows[s].position, index, splits),
                        index == splits - 1};
    }
    if (is_alone) alone = count;
  }
  all = {count, alone};
}

// The producer: one thread copies all stages of its CTA.
template <class P>
__device__ inline void produce(const DecodeStepArguments& a, uint32_t ring, const Parts& all,
                               const Part* parts) {
  const uint32_t full = ring + P::kRing * kStageBytes, empty = full + P::kRing * 8;
  const uint64_t policy = ptx::evict_first();
  const int kv_head = blockIdx.x / kSplits;
  const auto* const packed = static_cast<const uint8_t*>(a.packed);
  const uint8_t* from = packed + blockIdx.x * size_t{kStageBytes};
  RingSlot<P::kRing> next{0, 1}, landed;
  int in_flight = 0, max_in_flight = a.in_flight;
  long long last = clock64();
  // Fills a stage by `copy`, and waits until fewer than `max_in_flight` copies have not landed.
  auto fill = [&](uint32_t bytes, auto copy) {
    const uint32_t barrier = full + 8 * next.slot;
    ptx::mbarrier_wait(empty + 8 * next.slot, next.parity);
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    copy(ring + next.slot * kStageBytes, barrier);
    next.advance();
    for (++in_flight; in_flight >= max_in_flight; --in_flight) {
      ptx::mbarrier_wait(full + 8 * landed.slot, landed.parity);
      landed.advance();
    }
  };
  auto copy_weights = [&](int count, uint32_t bytes) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      fill(bytes, [&](uint32_t to, uint32_t barrier) {
        while (clock64() - last < a.pace) {
        }
        last = clock64();
        ptx::bulk_load(to, from, bytes, barrier, policy);
      });
      from += size_t{kCtas} * kStageBytes;
    }
  };
#pragma unroll 1
  for (int layer = 0; layer < a.layers; ++layer) {
    copy_weights(P::kQkvGroups * P::kHiddenParts, P::kHiddenBytes);
#pragma unroll 1
    for (int i = 0; i < all.count; ++i) {
      const Split cached = parts[i].cached;
      const int first = (layer * a.batch + parts[i].sequence) * a.length + cached.start;
#pragma unroll 1
      for (int stage = 0; stage < cached.stages; ++stage) {
        fill(kStageBytes, [&](uint32_t to, uint32_t barrier) {
          const int row = first + stage * P::kKeys;
#pragma unroll
          for (int half = 0; half < P::kHead / 64; ++half) {
            const int column = kv_head / P::kShare * P::kHead + half * 64;
            const uint32_t at = to + half * P::kHalfBytes;
            ptx::tensor_load(at, a.key_boxes, column, row, barrier);
            ptx::tensor_load(at + kStageBytes / 2, a.value_boxes, column, row, barrier);
          }
        });
      }
    }
    copy_weights(P::kOutGroups * P::kQueryParts, kStageBytes);
    copy_weights(2 * P::kMlpGroups * P::kHiddenParts, P::kHiddenBytes);
    copy_weights(P::kOutGroups * P::kMlpParts, kStageBytes);
  }
  // A sampler may be launched; it waits for the end of this kernel.
  ptx::launch_dependents();
  // The head waits for nothing: full depth. A tile of 8 rows has its parts side by side.
  max_in_flight = P::kRing;
  const int tiles = (a.vocab + 7) / 8;
  from = packed + static_cast<size_t>(a.layers) * P::kLayerStages * kCtas * kStageBytes;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += kCtas) {
#pragma unroll 1
    for (int part = 0; part < P::kHiddenParts; ++part)
      fill(P::kHiddenBytes, [&](uint32_t to, uint32_t barrier) {
        const size_t stage = static_cast<size_t>(tile) * P::kHiddenParts + part;
        ptx::bulk_load(to, from + stage * kStageBytes, P::kHiddenBytes, barrier, policy);
      });
  }
}

// A consumer warp's part of its CTA.
template <class P>
struct Consumer : RingReader<P::kRing> {
  using Base = RingReader<P::kRing>;
  using Base::g;
  using Base::lane;
  using Base::place;
  using Base::t;
  using Base::warp;

  // Parity chooses the buffer of the next block of rows.
  uint32_t block = 0;

  using Base::Base;

  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(this->shared + P::kRing * kStageBytes + offset);
  }

  // Gives a stage back that this warp does not read.
  __device__ void skip() {
    this->wait();
    if (lane == 0) ptx::mbarrier_arrive(this->empty(place.slot));
    place.advance();
  }

  // Loads this warp's 64 columns of 8 rows.
  __device__ void load(uint4& first, uint4& second) {
    this->load_stage(first, second);
    this->release_after(first.x | second.x);
  }

  // The first of this lane's 8 columns of a part of its warp.
  template <int kParts>
  __device__ int column(int part) const {
    return (warp * kParts + part) * 64 + (g & 1) * 32 + t * 8;
  }

  // The sequence of this lane's column of B.
  __device__ int sequence(int quad, int batch) const {
    return min((g >> 1) + 4 * quad, batch - 1);
  }

  __device__ float* sums() const {
    return at<float>(P::kSumsAt) + (block & 1) * (kOutputs * kSumRow);
  }

  // Writes this warp's sums of a group of rows of a block to shared memory.
  __device__ void leave(int group, const float (&sum)[P::kQuads][4], int batch) const {
#pragma unroll
    for (int q = 0; q < P::kQuads; ++q) {
      const int s = t + 4 * q;
      const int pair = ((group >> 1) * 4 + (g >> 1)) * P::kSequences + s;
      const int output = (pair * 2 + (g & 1)) * 2 + (group & 1);
      if (s < batch) sums()[output * kSumRow + warp] = sum[q][0] + sum[q][3];
    }
  }

  // The sum of all warps, of this lane's output; four neighbouring lanes have the same.
  __device__ float total() const {
    return sum_partials(sums() + (warp * 8 + lane / 4) * kSumRow + 4 * t);
  }
};

// An output of a block that four lanes add up: group `group` of the block, row `row` of the group.
struct Output {
  int sequence, group, row;
};

template <class P>
__device__ inline Output output_of(int warp, int lane) {
  const int output = warp * 8 + lane / 4, rest = output / 4 / P::kSequences;
  return {output / 4 % P::kSequences, (rest >> 2) * 2 + (output & 1),
          (rest & 3) * 2 + ((output >> 1) & 1)};
}

// Eight elements of bf16 of a row of the model's columns; zeros behind these.
template <class P>
__device__ inline uint4 load_columns(const void* row, int column) {
  if (P::kColumns < P::kHidden && column >= P::kColumns) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(row) + column);
}

// The bias of a row of queries, keys and values of a layer; 0 of heads of zeros.
template <class P>
__device__ inline float qkv_bias(const void* biases, int layer, int row) {
  constexpr int kGroup = P::kBiasGroup, kQueryHeads = kGroup * P::kCacheHeads;
  int head = row / P::kHead;
  if (head < P::kHeads) {
    // Query head i of a KV head is the (i / kShare)th of its (i % kShare)th copy.
    const int kv_head = head / P::kGroup;
    const int i = kv_head % P::kShare + P::kShare * (head % P::kGroup);
    if (i >= kGroup) return 0.0f;
    head = kv_head / P::kShare * kGroup + i;
  } else {
    // The copies of keys' heads are all before those of values.
    head = kQueryHeads + (head - P::kHeads) / P::kShare;
  }
  constexpr int kRows = (kQueryHeads + 2 * P::kCacheHeads) * P::kHead;
  return __bfloat162float(static_cast<const __nv_bfloat16*>(
      biases)[layer * kRows + head * P::kHead + row % P::kHead]);
}

// Two elements of bf16, times weights of a norm. Adds their squares to `squares`.
__device__ inline uint32_t scaled(uint32_t x, uint32_t norm, float& squares) {
  const float first = low_float(x), second = high_float(x);
  squares += first * first + second * second;
  return pack(first * low_float(norm), second * high_float(norm));
}

// Residuals of this lane's columns of B after a norm without its factor. Leaves sums of squares.
template <class P>
struct Normed {
  uint4 x[P::kHiddenParts][P::kQuads];

  // From packets of `vector`, or from the embedding where it is null.
  __device__ void read(const Consumer<P>& w, const DecodeStepArguments& a, const void* norm,
                       const uint32_t* vector) {
    constexpr int kCount = P::kHiddenParts * P::kQuads, kAtOnce = kCount < 4 ? kCount : 4;
    // Before the packets, for which the warp waits.
    uint4 norms[P::kHiddenParts];
#pragma unroll
    for (int part = 0; part < P::kHiddenParts; ++part)
      norms[part] = load_columns<P>(norm, w.template column<P::kHiddenParts>(part));
    float squares[P::kQuads] = {};
#pragma unroll
    for (int i = 0; i < kCount; i += kAtOnce) {
      uint32_t found[4 * kAtOnce];
      if (vector) {
        const uint32_t* fours[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int part = (i + j) / P::kQuads, quad = (i + j) % P::kQuads;
          fours[j] = vector + w.sequence(quad, a.batch) * (P::kHidden / 2) +
                     w.template column<P::kHiddenParts>(part) / 2;
        }
        poll_fours<P::kPolling>(fours, found);
      } else {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int part = (i + j) / P::kQuads, quad = (i + j) % P::kQuads;
          const int token = w.template at<Row>(P::kRowsAt)[w.sequence(quad, a.batch)].token;
          const uint4 four = load_columns<P>(static_cast<const __nv_bfloat16*>(a.embedding) +
                                                 static_cast<size_t>(token) * P::kColumns,
                                             w.template column<P::kHiddenParts>(part));
          found[4 * j] = four.x;
          found[4 * j + 1] = four.y;
          found[4 * j + 2] = four.z;
          found[4 * j + 3] = four.w;
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int part = (i + j) / P::kQuads, quad = (i + j) % P::kQuads;
        x[part][quad] = make_uint4(scaled(found[4 * j], norms[part].x, squares[quad]),
                                   scaled(found[4 * j + 1], norms[part].y, squares[quad]),
                                   scaled(found[4 * j + 2], norms[part].z, squares[quad]),
                                   scaled(found[4 * j + 3], norms[part].w, squares[quad]));
      }
    }
#pragma unroll
    for (int q = 0; q < P::kQuads; ++q) {
      float sum = squares[q];
#pragma unroll
      for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (w.lane % 8 == 0)
        w.template at<float>(P::kSquaresAt)[(w.lane / 8 + 4 * q) * kWarps + w.warp] = sum;
    }
  }
};

// The factor of RMSNorm of a sequence, of squares that all warps left.
template <class P>
__device__ inline float norm_factor(const Consumer<P>& w, int sequence, float eps) {
  const float* squares = w.template at<float>(P::kSquaresAt) + sequence * kWarps + 4 * w.t;
  return rsqrtf(sum_partials(squares) * (1.0f / P::kColumns) + eps);
}

// Weights of this warp of kGroups groups of 8 rows of the hidden columns, loaded before the activations are there.
template <class P, int kGroups>
struct Weights {
  static constexpr int kParts = P::kHiddenParts;
  uint4 first[kGroups ? kGroups : 1][kParts], second[kGroups ? kGroups : 1][kParts];

  __device__ void load(Consumer<P>& w) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (P::kHiddenBytes < kStageBytes && w.warp * 1024 >= P::kHiddenBytes) {
          first[i][part] = second[i][part] = make_uint4(0, 0, 0, 0);
          w.skip();
        } else {
          w.load(first[i][part], second[i][part]);
        }
      }
  }

  __device__ void multiply_by(const Normed<P>& x, int group, float (&sums)[P::kQuads][4]) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int q = 0; q < P::kQuads; ++q)
        multiply(sums[q], first[group][part], second[group][part], x.x[part][q]);
  }
};

// Groups whose weights are loaded before the activations are there, of so many: whole blocks. Each is code of its own,
// and with 8 sequences that takes longer to fetch than it saves.
template <class P, int kGroups>
inline constexpr int kEarly = P::kHiddenParts > 1 || P::kQuads == 2 ? 0
                              : kGroups <= 6                        ? kGroups
                                                                    : 4;

// The GEMM of groups of 8 rows, of which those of `early` are loaded: `finish(block)` runs once all warps have left a
// block's sums.
template <class P, int kCount, class Finish>
__device__ inline void multiply_rows(Consumer<P>& w, const Weights<P, kCount>& early,
                                     const Normed<P>& x, int groups, int batch, Finish finish) {
  const auto leave = [&](int group, const float (&sums)[P::kQuads][4]) {
    w.leave(group % P::kBlock, sums, batch);
    if (group % P::kBlock == P::kBlock - 1 || group == groups - 1) {
      sync_consumers<1>();
      finish(group / P::kBlock);
      ++w.block;
    }
  };
#pragma unroll
  for (int group = 0; group < kCount; ++group) {
    float sums[P::kQuads][4] = {};
    early.multiply_by(x, group, sums);
    leave(group, sums);
  }
#pragma unroll 1
  for (int group = kCount; group < groups; ++group) {
    Weights<P, 1> weights;
    weights.load(w);
    float sums[P::kQuads][4] = {};
    weights.multiply_by(x, 0, sums);
    leave(group, sums);
  }
}

// A copy [sequence, words] of a vector of so many words.
template <class P>
__device__ inline uint32_t* vector_of(const DecodeStepArguments& a, int vector, int words, int copy,
                                      uint32_t tag) {
  return reinterpret_cast<uint32_t*>(a.state + vector) +
         ((tag & 1) * P::kCopies + copy) * (P::kSequences * words);
}

// The copy that this CTA reads.
template <class P>
__device__ inline int own_copy() {
  return blockIdx.x % P::kCopies;
}

// The GEMM of kOutGroups groups of 8 rows of 1024 kParts columns, of a copy [sequence, words] of a vector.
template <class P, int kParts, class Finish>
__device__ inline void multiply_columns(Consumer<P>& w, const uint32_t* vector, int batch,
                                        Finish finish) {
  // Parts whose activations are polled at once.
  constexpr int kMost = P::kQuads == 1 ? 4 : 2;
  constexpr int kAtOnce = kParts % kMost == 0   ? kMost
                          : kParts % 3 == 0     ? 3
                          : kParts % 2 == 0     ? 2
                          : kParts <= kMost + 1 ? kParts
                                                : 1;
  static_assert(kParts % kAtOnce == 0);
  float sums[P::kOutGroups][P::kQuads][4] = {};
#pragma unroll 1
  for (int start = 0; start < kParts; start += kAtOnce) {
    const uint32_t* fours[kAtOnce * P::kQuads];
    uint32_t x[4 * kAtOnce * P::kQuads];
#pragma unroll
    for (int i = 0; i < kAtOnce * P::kQuads; ++i)
      fours[i] = vector + w.sequence(i % P::kQuads, batch) * (kParts * 512) +
                 w.template column<kParts>(start + i / P::kQuads) / 2;
    // Few weights are loaded before the activations are there.
    constexpr int kTotal = kAtOnce * P::kOutGroups, kFirst = kTotal <= 5 ? kTotal : 0;
    uint4 first[kTotal], second[kTotal];
#pragma unroll
    for (int i = 0; i < kFirst; ++i) w.load(first[i], second[i]);
    poll_fours<P::kPolling>(fours, x);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
      for (int i = kFirst ? P::kOutGroups : 0; i < P::kOutGroups; ++i)
        w.load(first[j * P::kOutGroups + i], second[j * P::kOutGroups + i]);
#pragma unroll
      for (int i = 0; i < P::kOutGroups; ++i)
#pragma unroll
        for (int q = 0; q < P::kQuads; ++q) {
          const uint32_t* const of = x + 4 * (j * P::kQuads + q);
          multiply(sums[i][q], first[j * P::kOutGroups + i], second[j * P::kOutGroups + i],
                   make_uint4(of[0], of[1], of[2], of[3]));
        }
    }
  }
#pragma unroll
  for (int block = 0; block < P::kOutBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < P::kBlock; ++i)
      if (block * P::kBlock + i < P::kOutGroups)
        w.leave(i, sums[block * P::kBlock + i < P::kOutGroups ? block * P::kBlock + i : 0], batch);
    sync_consumers<1>();
    finish(block);
    ++w.block;
  }
}

// Attention of the query heads of a KV head over 16 positions at a time.
template <class P>
struct Attention : OnlineSoftmax<P::kHead, P::kGroup, P::kHalfBytes> {
  // Adds 16 positions at `keys`, of which the first `count` exist; their values at `values`.
  // Returns a word that is there once all loads are.
  __device__ uint32_t add(const Consumer<P>& w, uint32_t queries, uint32_t keys, uint32_t values,
                          int count) {
    float scores[2][4] = {};
    // Columns 2 t and 2 t + 1 of scores are of head t % kGroup.
    const uint32_t query = queries + (w.g >> 1) % P::kGroup * (P::kHead * 2);
#pragma unroll
    for (int k = 0; k < P::kHead / 32; ++k) {
      const uint32_t chunk = 2 * w.t + (k & 1);
      const uint32_t from = keys + (k >> 1) * P::kHalfBytes + w.g * 128 + ((chunk ^ w.g) << 4);
      multiply(scores[k & 1], ptx::load_shared(from), ptx::load_shared(from + 1024),
               ptx::load_shared(query + ((8 * (k >> 1) + chunk) << 4)));
    }
    return Attention::OnlineSoftmax::add(w, scores[0][0] + scores[1][0],
                                         scores[0][2] + scores[1][2], values, count);
  }
};

// The warps of a team meet.
__device__ inline void meet_team(int team, int warps) {
  asm volatile("bar.sync %0, %1;" ::"r"(3 + team), "r"(32 * warps) : "memory");
}

// A head of a sequence that a warp prepares: queries of this CTA's KV head after their norm and RoPE,
// or the new key or value. For 64 columns two lanes have the same.
template <class P>
struct HeadJob {
  static constexpr int kQuarter = P::kHead / 4, kKinds = P::kGroup + 2;
  int slot, sequence, kind, l;
  float2 cosine, sine;
  uint32_t norm_first = 0, norm_second = 0;

  // Reads all but the packets, for which the warp waits.
  __device__ HeadJob(const Consumer<P>& w, const DecodeStepArguments& a, int layer, int job)
      : slot(job / kKinds),
        sequence(w.template at<Part>(P::kPartsAt + 16)[slot].sequence),
        kind(job % kKinds),
        l(w.lane % kQuarter) {
    const int at = w.template at<Row>(P::kRowsAt)[sequence].position * kQuarter + l;
    cosine = reinterpret_cast<const float2*>(a.cosines)[at];
    sine = reinterpret_cast<const float2*>(a.sines)[at];
    if constexpr (P::kHeadNorms) {
      const void* const norms = kind < P::kGroup ? a.q_norm : a.k_norm;
      const auto* const norm = static_cast<const uint32_t*>(norms) + layer * (P::kHead / 2);
      norm_first = norm[l];
      norm_second = norm[kQuarter + l];
    }
  }

  // The first of this lane's two pairs of packets; the other is half a head on.
  __device__ const uint64_t* packets(const uint64_t* state, int kv_head) const {
    const int first = kind < P::kGroup    ? (P::kGroup * kv_head + kind) * P::kHead
                      : kind == P::kGroup ? P::kQuery + kv_head * P::kHead
                                          : P::kQuery + P::kKv + kv_head * P::kHead;
    return state + P::kQkvAt + sequence * P::kQkv + first + 2 * l;
  }

  __device__ void finish(const Consumer<P>& w, float eps, const uint32_t (&found)[4]) const {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(found[i]);
    if (kind <= P::kGroup) {
      if constexpr (P::kHeadNorms) {
        const float squares =
            sum_of_warp(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
        const float factor = rsqrtf(squares * (1.0f / P::kHead) + eps);
        x[0] *= factor * low_float(norm_first);
        x[1] *= factor * high_float(norm_first);
        x[2] *= factor * low_float(norm_second);
        x[3] *= factor * high_float(norm_second);
      }
      const float y[4] = {x[0] * cosine.x - x[2] * sine.x, x[1] * cosine.y - x[3] * sine.y,
                          x[2] * cosine.x + x[0] * sine.x, x[3] * cosine.y + x[1] * sine.y};
      // Queries take 1 / sqrt(kHead), and log2(e), as scores are exponents of 2.
      constexpr float kScale = (P::kHead == 128 ? 0.08838834764f : 0.125f) * kLog2E;
      const float scale = kind < P::kGroup ? kScale : 1.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = y[i] * scale;
    }
    __nv_bfloat16* to;
    if (kind < P::kGroup)
      to = w.template at<__nv_bfloat16>(P::kQueriesAt) + (slot * P::kGroup + kind) * P::kHead;
    else
      to = w.template at<__nv_bfloat16>(P::kNewAt) + (2 * slot + kind - P::kGroup) * P::kHead;
    reinterpret_cast<uint32_t*>(to)[l] = pack(x[0], x[1]);
    reinterpret_cast<uint32_t*>(to)[kQuarter + l] = pack(x[2], x[3]);
  }
};

// Queries of this CTA's KV head for each of its parts, and the new key and value: a warp waits for two at once. Parts
// without the new position have these too, and do not use them.
template <class P>
__device__ inline void prepare_heads(const Consumer<P>& w, const DecodeStepArguments& a, int layer,
                                     int kv_head, int count, uint32_t tag) {
  const int jobs = count * HeadJob<P>::kKinds;
#pragma unroll 1
  for (int job = w.warp; job < jobs; job += 2 * kWarps) {
    const HeadJob<P> first(w, a, layer, job);
    const HeadJob<P> second(w, a, layer, job + kWarps < jobs ? job + kWarps : job);
    const uint64_t* const from[2] = {first.packets(a.state, kv_head),
                                     second.packets(a.state, kv_head)};
    const uint64_t* const pairs[4] = {from[0], from[0] + P::kHead / 2, from[1],
                                      from[1] + P::kHead / 2};
    uint32_t found[8];
    poll_words<P::kPolling>(pairs, tag, found);
    first.finish(w, a.eps, {found[0], found[1], found[2], found[3]});
    if (job + kWarps < jobs) second.finish(w, a.eps, {found[4], found[5], found[6], found[7]});
  }
}

// Scores of the new key of a part of sequence s, by one warp, which writes key and value into the cache too.
template <class P>
__device__ inline void add_new(const Consumer<P>& w, const DecodeStepArguments& a, int layer, int slot,
                               int s, int kv_head) {
  const int lane = w.lane;
  const auto* const of = w.template at<__nv_bfloat16>(P::kNewAt) + 2 * slot * P::kHead;
  const auto* const queries =
      w.template at<__nv_bfloat16>(P::kQueriesAt) + slot * P::kGroup * P::kHead;
#pragma unroll
  for (int h = 0; h < P::kGroup; ++h) {
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < P::kHead / 64; ++i) {
      const uint32_t k = reinterpret_cast<const uint32_t*>(of)[32 * i + lane];
      const uint32_t q = reinterpret_cast<const uint32_t*>(queries + h * P::kHead)[32 * i + lane];
      score += low_float(k) * low_float(q) + high_float(k) * high_float(q);
    }
    score = sum_of_warp(score);
    if (lane == 0) w.template at<float>(P::kScoresAt)[slot * P::kGroup + h] = score;
  }
  const Row row = w.template at<Row>(P::kRowsAt)[s];
  constexpr int kChunks = P::kHead / 8;
  if (!row.is_valid || lane >= 2 * kChunks || kv_head % P::kShare != 0) return;
  const bool is_value = lane >= kChunks;
  auto* const to = static_cast<__nv_bfloat16*>(is_value ? a.values : a.keys) +
                   ((static_cast<size_t>(layer) * a.batch + s) * a.length + row.position) *
                       P::kCacheRow +
                   kv_head / P::kShare * P::kHead + 8 * (lane % kChunks);
  *reinterpret_cast<uint4*>(to) =
      *reinterpret_cast<const uint4*>(of + is_value * P::kHead + 8 * (lane % kChunks));
}

// Attention over parts of sequences from `first` up to `stop`, as packets of partial results. Each has a team of warps.
template <class P>
__device__ inline void attend_by_teams(Consumer<P>& w, const DecodeStepArguments& a, int layer,
                                       int first, int stop, int teams, uint32_t tag) {
  const int kv_head = blockIdx.x / kSplits, lane = w.lane;
  const int warps = kWarps / teams, team = w.warp / warps, member = w.warp % warps;
  float* const head_sums = w.template at<float>(P::kHeadSumsAt) + team * warps * P::kHeadRow;
  float2* const maxima = w.template at<float2>(P::kMaximaAt) + team * warps * P::kGroup;
#pragma unroll 1
  for (int slot = first; slot < stop; ++slot) {
    const Part of_slot = w.template at<Part>(P::kPartsAt + 16)[slot];
    const Split cached = of_slot.cached;
    const int s = of_slot.sequence;
    const bool has_new = of_slot.has_new;
    if (slot - first != team) {
#pragma unroll 1
      for (int stage = 0; stage < cached.stages; ++stage) w.skip();
      continue;
    }
    if (has_new && member == warps - 1) add_new(w, a, layer, slot, s, kv_head);
    Attention<P> one;
    const uint32_t queries = ptx::shared_address(w.template at<__nv_bfloat16>(P::kQueriesAt) +
                                                 slot * P::kGroup * P::kHead);
    // Where there is one part, a stage is given back by the warps that have tiles of it, as all, and others do not wait
    // for it: each has a stage of every kWarps / kTiles, which are fewer than those of the ring.
    static_assert(kWarps / P::kTiles <= P::kRing);
    const bool is_alone = teams == 1;
#pragma unroll 1
    for (int stage = 0; stage < cached.stages; ++stage) {
      int tile = (member - stage * P::kTiles) & (warps - 1);
      if (is_alone && tile >= P::kTiles) {
        w.place.advance();
        continue;
      }
      w.wait();
      uint32_t last = 0;
#pragma unroll 1
      for (; tile < P::kTiles; tile += warps) {
        const int count = cached.count - stage * P::kKeys - 16 * tile;
        const uint32_t from = w.stage() + tile * 2048;
        if (count > 0) last |= one.add(w, queries, from, from + kStageBytes / 2, count);
      }
      w.release_after(last, is_alone ? kWarps / P::kTiles : 1);
    }
    // Warps with positions.
    const int used = min(warps, (cached.count + 15) / 16);
    one.sum_lanes();
    if (member < used) {
      if (lane < P::kGroup) maxima[member * P::kGroup + lane] = make_float2(one.max, one.sum);
      if (w.t < P::kGroup / 2) {
        float* const to = head_sums + member * P::kHeadRow + w.g * P::kGroup + 2 * w.t;
#pragma unroll
        for (int i = 0; i < P::kHead / 16; ++i) {
          *reinterpret_cast<float2*>(to + 16 * i * P::kGroup) =
              make_float2(one.out[i][0], one.out[i][1]);
          *reinterpret_cast<float2*>(to + (16 * i + 8) * P::kGroup) =
              make_float2(one.out[i][2], one.out[i][3]);
        }
      }
    }
    meet_team(team, warps);
    // Merges the warps: this thread has one head of some columns.
    const int of = lane % P::kGroup, threads = 32 * warps, thread = member * 32 + lane;
    const float score = has_new ? w.template at<float>(P::kScoresAt)[slot * P::kGroup + of] : -1e30f;
    // Each lane has the weights of one or two warps.
    constexpr int kEntries = kWarps * P::kGroup / 32;
    float2 entries[kEntries];
    float most = score;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int at = lane + 32 * i;
      entries[i] = at < used * P::kGroup ? maxima[at] : make_float2(-1e30f, 0.0f);
      most = fmaxf(most, entries[i].x);
    }
#pragma unroll
    for (int step = P::kGroup; step < 32; step *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float new_weight = has_new ? ptx::ex2(score - most) : 0.0f;
    constexpr int kElements = P::kHead * P::kGroup, kMostElements = kElements / 64;
    float out[kMostElements] = {}, sum = 0.0f, weights[kEntries];
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      weights[i] = ptx::ex2(entries[i].x - most);
      sum += weights[i] * entries[i].y;
    }
#pragma unroll
    for (int step = P::kGroup; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    sum += new_weight;
    if (has_new) {
      const auto* const values =
          w.template at<__nv_bfloat16>(P::kNewAt) + (2 * slot + 1) * P::kHead;
#pragma unroll
      for (int r = 0; r < kMostElements; ++r)
        if (const int i = thread + r * threads; i < kElements)
          out[r] = new_weight * __bfloat162float(values[i / P::kGroup]);
    }
#pragma unroll 2
    for (int q = 0; q < used; ++q) {
      const float own = kEntries > 1 && q * P::kGroup >= 32 ? weights[kEntries - 1] : weights[0];
      const float weight = __shfl_sync(~0u, own, q * P::kGroup % 32 + of);
#pragma unroll
      for (int r = 0; r < kMostElements; ++r)
        if (const int i = thread + r * threads; i < kElements)
          out[r] += weight * head_sums[q * P::kHeadRow + i];
    }
    const int part = (s * P::kHeads + P::kGroup * kv_head + of) * kSplits + of_slot.index;
#pragma unroll
    for (int r = 0; r < kMostElements; ++r)
      if (const int i = thread + r * threads; i < kElements)
        write_packet(a.state + P::kPartial + part * P::kHead + i / P::kGroup, out[r], tag);
    if (member == 0 && lane < P::kGroup) {
      write_packet(a.state + P::kPartialSums + 2 * part, most, tag);
      write_packet(a.state + P::kPartialSums + 2 * part + 1, sum, tag);
    }
  }
}

// Attention over this CTA's parts of sequences. How many warps a part has depends on the number of sequences and its
// own position alone.
template <class P>
__device__ inline void attend(Consumer<P>& w, const DecodeStepArguments& a, int layer,
                              uint32_t tag) {
  const Parts& parts = *w.template at<Parts>(P::kPartsAt);
  const int count = parts.count, alone = parts.alone;
  prepare_heads(w, a, layer, blockIdx.x / kSplits, count, tag);
  sync_consumers<2>();
#pragma unroll 1
  for (int first = 0; first < count; first = first < alone ? alone : count) {
    // Before sums of all warps are written again.
    if (first != 0) sync_consumers<2>();
    const bool is_alone = first < alone;
    attend_by_teams(w, a, layer, first, is_alone ? alone : count, is_alone ? 1 : 4 * P::kQuads, tag);
  }
}

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Clears this CTA's words of all vectors of the last layer, by one warp, once all CTAs have read them, and before this
// CTA sends its next residual: so a CTA that has that one sees no word of two layers ago.
template <class P>
__device__ inline void clear_vectors(const DecodeStepArguments& a, uint32_t base) {
  const int lane = threadIdx.x % 32, cta = blockIdx.x;
#pragma unroll 1
  for (int layer = 0; layer < a.layers; ++layer) {
    asm volatile("bar.sync 11, %0;" ::"n"(kConsumers + 32) : "memory");
    const auto clear = [&](int vector, int words) {
      const int own = words / kCtas, fours = own / 4;
      uint32_t* const to = vector_of<P>(a, vector, words, 0, base + layer) + cta * own;
      for (int i = lane; i < P::kCopies * P::kSequences * fours; i += 32)
        asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %1, %1, %1};" ::"l"(
                         to + i / fours * words + i % fours * 4),
                     "r"(0)
                     : "memory");
    };
    clear(P::kIn, P::kHidden / 2);
    clear(P::kMiddle, P::kHidden / 2);
    clear(P::kAttention, P::kQuery / 2);
    clear(P::kInner, P::kMlp / 2);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("bar.arrive 12, %0;" ::"n"(kConsumers + 32) : "memory");
  }
}

// Merges the splits of up to 16 columns of a head of a sequence, by one warp.
template <class P>
__device__ inline void combine(const Consumer<P>& w, const DecodeStepArguments& a, uint32_t tag) {
  // Columns of this CTA, and blocks of up to 16 of them.
  constexpr int kOwn = P::kQuery / kCtas, kBlocks = (kOwn + 15) / 16;
  const int s = w.warp / kBlocks, lane = w.lane;
  if (s >= a.batch) return;
  const int first_column = blockIdx.x * kOwn + w.warp % kBlocks * 16;
  const int column = (lane & 7) % (kOwn / 2);
  const int part = (s * P::kHeads + first_column / P::kHead) * kSplits;
  const int splits = w.template at<Row>(P::kRowsAt)[s].splits;
  const auto merge = [&](auto parts) {
    return merge_splits<P::kPolling, decltype(parts)::value, P::kHead, P::kPartial,
                        P::kPartialSums>(a.state, part, splits, first_column % P::kHead, lane,
                                         column, tag);
  };
  const float3 merged = splits > 4 ? merge(Constant<4>()) : merge(Constant<1>());
  if (column == (lane & 7) && (lane >> 3) < P::kCopies)
    write_word(vector_of<P>(a, P::kAttention, P::kQuery / 2, lane >> 3, tag) +
                   s * (P::kQuery / 2) + first_column / 2 + column,
               pack(merged.x * merged.z, merged.y * merged.z));
}

// The largest logit of each sequence over all CTAs, and the last tag.
template <class P>
__device__ inline void choose(const Consumer<P>& w, const DecodeStepArguments& a, Argmax best,
                              uint32_t tag) {
  const int lane = w.lane, cta = blockIdx.x;
  // Of a warp, lanes that differ in bits 2 and 3 have the same sequence.
  best.merge_lanes<4, 16>();
  float4* const bests = w.template at<float4>(P::kBestsAt);
  if (lane % 16 == 0)
    bests[2 * w.warp + lane / 16] = best.to_float4();
  sync_consumers<2>();
  if (w.warp == 0) {
    best.load(bests[lane]);
    best.merge_lanes<P::kSequences, 32>();
    if (lane < a.batch) {
      uint64_t* const to = a.state + P::kBest + (cta * P::kSequences + lane) * 4;
      write_packet(to, best.logit, tag);
      write_packet(to + 1, static_cast<uint32_t>(best.row), tag);
      write_packet(to + 2, best.sum, tag);
      write_packet(to + 3, 0u, tag);
    }
  }
  if (cta != 0) return;
  if (const int s = w.warp; s < a.batch) {
    const uint64_t* pairs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      pairs[i] = a.state + P::kBest + ((lane * 4 + i / 2) * P::kSequences + s) * 4 + i % 2 * 2;
    best.poll(pairs, tag);
    if (lane == 0) {
      const float rest = logf(best.sum);
      const bool is_good =
          isfinite(best.logit) && isfinite(rest) && w.template at<Row>(P::kRowsAt)[s].is_valid;
      a.best[s] = is_good ? best.row : -1;
      a.best_logp[s] = is_good ? -rest : __int_as_float(0x7fffffff);
    }
  }
  sync_consumers<2>();
  // All CTAs have read the old one: their packets are here.
  if (threadIdx.x == 0) a.state[0] = tag - 1;
}

// Layer by layer, the consumers' part of a token.
template <class P>
__device__ inline void consume(const DecodeStepArguments& a, uint8_t* shared, int warp,
                               uint32_t base) {
  constexpr int kHidden = P::kHidden;
  Consumer<P> w(shared, warp);
  const int cta = blockIdx.x, lane = w.lane;
  uint64_t* const packets = a.state;
  const Output own = output_of<P>(warp, lane);
  const Row* const rows = w.template at<Row>(P::kRowsAt);
  const bool is_there = own.sequence < a.batch;
  const auto* const norms = static_cast<const __nv_bfloat16*>(a.attention_norm);
  const auto* const mlp_norms = static_cast<const __nv_bfloat16*>(a.mlp_norm);
  // Residuals of this CTA's columns.
  float residual[P::kOutBlocks] = {};
#pragma unroll
  for (int block = 0; block < P::kOutBlocks; ++block) {
    const int group = block * P::kBlock + own.group;
    const int column = (cta * P::kOutGroups + group) * 8 + own.row;
    if (is_there && group < P::kOutGroups && (P::kColumns == kHidden || column < P::kColumns))
      residual[block] = __bfloat162float(
          static_cast<const __nv_bfloat16*>(
              a.embedding)[static_cast<size_t>(rows[own.sequence].token) * P::kColumns + column]);
  }
  // Adds a block of a matrix's rows to residuals, and sends them.
  const auto add_residuals = [&](int block, int vector, uint32_t tag) {
    const int group = block * P::kBlock + own.group;
    const float total = w.total();
    float next = 0.0f;
#pragma unroll
    for (int i = 0; i < P::kOutBlocks; ++i)
      if (i == block) next = residual[i] += total;
    // The next row's.
    const float other = __shfl_xor_sync(~0u, next, 8);
    if (is_there && w.t < P::kCopies && group < P::kOutGroups && own.row % 2 == 0)
      write_word(vector_of<P>(a, vector, kHidden / 2, w.t, tag) + own.sequence * (kHidden / 2) +
                     (cta * P::kOutGroups + group) * 4 + own.row / 2,
                 pack(next, other));
  };

#pragma unroll 1
  for (int layer = 0; layer < a.layers; ++layer) {
    const uint32_t tag = base + layer + 1;
    {
      constexpr int kGroups = P::kQkvGroups;
      Weights<P, kEarly<P, kGroups>> early;
      early.load(w);
      Normed<P> x;
      x.read(w, a, norms + static_cast<size_t>(layer) * P::kColumns,
             layer == 0 ? nullptr : vector_of<P>(a, P::kIn, kHidden / 2, own_copy<P>(), tag - 1));
      float factor = 0.0f;
      multiply_rows(w, early, x, kGroups, a.batch, [&](int block) {
        if (block == 0) factor = norm_factor(w, own.sequence, a.eps);
        const int group = block * P::kBlock + own.group;
        const float total = w.total();
        if (is_there && group < P::kQkvGroups && w.t == 0) {
          const int row = (cta * P::kQkvGroups + group) * 8 + own.row;
          float x = total * factor;
          if constexpr (P::kBiasGroup != 0) x += qkv_bias<P>(a.qkv_bias, layer, row);
          write_packet(packets + P::kQkvAt + own.sequence * P::kQkv + row, x, tag);
        }
      });
    }
    attend(w, a, layer, tag);
    combine(w, a, tag);
    multiply_columns<P, P::kQueryParts>(
        w, vector_of<P>(a, P::kAttention, P::kQuery / 2, own_copy<P>(), tag), a.batch,
        [&](int block) { add_residuals(block, P::kMiddle, tag); });
    {
      constexpr int kGroups = 2 * P::kMlpGroups;
      Weights<P, kEarly<P, kGroups>> early;
      early.load(w);
      Normed<P> x;
      x.read(w, a, mlp_norms + static_cast<size_t>(layer) * P::kColumns,
             vector_of<P>(a, P::kMiddle, kHidden / 2, own_copy<P>(), tag));
      asm volatile("bar.arrive 11, %0;" ::"n"(kConsumers + 32) : "memory");
      float factor = 0.0f;
      // Groups of gate and up by turns.
      multiply_rows(w, early, x, kGroups, a.batch, [&](int block) {
        if (block == 0) factor = norm_factor(w, own.sequence, a.eps);
        const int pair = (block * P::kBlock + own.group) / 2;
        const float gate = w.total() * factor;
        const float up = __shfl_xor_sync(~0u, gate, 4);
        const float inner = __fdividef(up * gate, 1.0f + ptx::ex2(-kLog2E * gate));
        const float next = __shfl_xor_sync(~0u, inner, 8);
        if (is_there && w.t < P::kCopies && pair < P::kMlpGroups && own.group % 2 == 0 &&
            own.row % 2 == 0)
          write_word(vector_of<P>(a, P::kInner, P::kMlp / 2, w.t, tag) +
                         own.sequence * (P::kMlp / 2) + (cta * P::kMlpGroups + pair) * 4 +
                         own.row / 2,
                     pack(inner, next));
      });
    }
    multiply_columns<P, P::kMlpParts>(
        w, vector_of<P>(a, P::kInner, P::kMlp / 2, own_copy<P>(), tag), a.batch, [&](int block) {
          if (block == 0) asm volatile("bar.sync 12, %0;" ::"n"(kConsumers + 32) : "memory");
          add_residuals(block, P::kIn, tag);
        });
  }

  Normed<P> x;
  x.read(w, a, a.norm, vector_of<P>(a, P::kIn, kHidden / 2, own_copy<P>(), base + a.layers));
  float factor = 0.0f;
  Argmax best;
  const bool is_valid = rows[own.sequence].is_valid;
  const int groups = ((a.vocab + 7) / 8 - cta + kCtas - 1) / kCtas;
  multiply_rows(w, Weights<P, 0>(), x, groups, a.batch, [&](int block) {
    if (block == 0) factor = norm_factor(w, own.sequence, a.eps);
    const int group = block * P::kBlock + own.group;
    const int row = (group * kCtas + cta) * 8 + own.row;
    const float logit = w.total() * factor;
    if (is_there && group < groups && row < a.vocab) {
      if (w.t == 0)
        a.logits[static_cast<size_t>(own.sequence) * a.vocab + row] =
            is_valid ? logit : __int_as_float(0x7fffffff);
      best.merge(logit, row, 1.0f);
    }
  });
  choose(w, a, best, base + a.layers + 1);
}

template <class P>
__device__ inline void decode(const DecodeStepArguments& a, uint8_t* shared) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const uint32_t ring = ptx::shared_address(shared);
  uint8_t* const rest = shared + P::kRing * kStageBytes;
  auto* const rows = reinterpret_cast<Row*>(rest + P::kRowsAt);
  auto* const parts = reinterpret_cast<Parts*>(rest + P::kPartsAt);
  auto* const list = reinterpret_cast<Part*>(rest + P::kPartsAt + 16);
  bool has_valid = false;
  for (int s = 0; s < P::kSequences; ++s) {
    const int token = s < a.batch ? a.token[s] : -1, position = s < a.batch ? a.position[s] : -1;
    const bool is_valid = token >= 0 && token < a.vocab && position >= 0 && position < a.length;
    has_valid |= is_valid;
    if (threadIdx.x == 0)
      rows[s] = {is_valid ? token : 0, is_valid ? position : 0, is_valid,
                 splits_of(a.batch, is_valid ? position : 0)};
  }
  if (!has_valid) {
    const float nan = __int_as_float(0x7fffffff);
    const size_t count = static_cast<size_t>(a.batch) * a.vocab;
    for (size_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += kCtas * kThreads)
      a.logits[i] = nan;
    if (blockIdx.x == 0 && threadIdx.x < a.batch) {
      a.best[threadIdx.x] = -1;
      a.best_logp[threadIdx.x] = nan;
    }
    return;
  }
  if (threadIdx.x == 0) {
    init_ring<P::kRing>(ring);
    list_parts<P>(rows, a.batch, blockIdx.x % kSplits, *parts, list);
  }
  __syncthreads();
  const auto base = static_cast<uint32_t>(*reinterpret_cast<volatile const uint64_t*>(a.state));
  if (warp >= kWarps) {
    ptx::fewer_registers<24>();
    if (threadIdx.x == kConsumers) produce<P>(a, ring, *parts, list);
    if (warp == kWarps + 1) clear_vectors<P>(a, base);
  } else {
    ptx::more_registers<112>();
    consume<P>(a, shared, warp, base);
  }
}

}  // namespace xentile::decode_step::wide

// For src/decode_step/arguments.rs.
#define XENTILE_DECODE_STEP_NUMBERS(name)                                                       \
  inline constexpr int kDecodeStep##name##LayerStages =                                         \
      xentile::decode_step::wide::Plan<xentile::decode_step::wide::name, 1>::kLayerStages;      \
  inline constexpr int kDecodeStep##name##SharedBytes4 =                                        \
      xentile::decode_step::wide::Plan<xentile::decode_step::wide::name, 1>::kBytes;            \
  inline constexpr int kDecodeStep##name##SharedBytes8 =                                        \
      xentile::decode_step::wide::Plan<xentile::decode_step::wide::name, 2>::kBytes;            \
  inline constexpr int kDecodeStep##name##StateWords4 =                                         \
      xentile::decode_step::wide::Plan<xentile::decode_step::wide::name, 1>::kStateWords;       \
  inline constexpr int kDecodeStep##name##StateWords8 =                                         \
      xentile::decode_step::wide::Plan<xentile::decode_step::wide::name, 2>::kStateWords;

XENTILE_DECODE_STEP_NUMBERS(Qwen3Small)
XENTILE_DECODE_STEP_NUMBERS(Qwen3Medium)
XENTILE_DECODE_STEP_NUMBERS(LlamaSmall)
XENTILE_DECODE_STEP_NUMBERS(Qwen3Large)
XENTILE_DECODE_STEP_NUMBERS(LlamaLarge)
XENTILE_DECODE_STEP_NUMBERS(Qwen2Small)

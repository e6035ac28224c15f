// The product that makes logits, with cross-entropy in its epilogue: logits are in registers alone.
//
// C = A B^T of 16-bit A [tokens, width] and B [vocab, width], summed in f32. A cluster of two CTAs
// takes 256 tokens by 256 columns at a time, half of the tokens each: both need the same rows of B,
// of which each fetches half for both. A warp fetches, into a ring of stages of 64 columns of A and
// B (copies of tensors, 128-byte swizzle); two warpgroups multiply, 64 tokens each, and keep their
// sums in registers, where the epilogue finds them. While it runs, the ring fills for the next
// tile: so far can one warpgroup be ahead of the others, all of which a stage goes back to. Where
// that is too little, most of what a tile writes, rounded, or half of its sums stay in registers for
// some of the next one's products to run beside the writing.
//
// Ring, warps with roles and their registers are as in CUTLASS' warp-specialised kernels for Hopper
// (Thakkar et al., 2023). A cluster keeps to its tokens for some consecutive tiles of columns, a
// part of the vocabulary; a thread keeps sums over all of these. `group` blocks of tokens go
// through the vocabulary side by side, so that the L2 has the columns that the others need next.
//
// Logits are sums in f32, with a bias too, and are never rounded: what is made of them is. The
// epilogue of the forward pass writes a sum for each token and part, and a kernel merges a token's,
// in order. That of the backward pass writes dlogits, from what a kernel before it makes of the
// cotangents; at labels, where p - 1 must be exact, a thread writes after the copy engine. The
// others, of passes that have no lse yet, are in unnormalised.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cross_entropy.cuh"
#include "element.cuh"
#include "hopper.cuh"
#include "ptx.cuh"

namespace xentile {

// What is made of the product.
enum class Epilogue {
  kForward,     // sums of exponentials
  kBackward,    // dlogits
  kUnnormalised,  // exponentials, beside their sums
  kDistribution,  // the same, and what is said of the distribution
  kScaled,      // the product itself, with a factor a row
  kAdded,       // the product itself, added to what is there in f32 and rounded
  kAddedLater,  // the same, of short sums: what is there is read late, to be written beside products
  kSum,         // the product itself, in f32, which may be added to what is there
};

// What a token's dlogits are made of, or exponentials, or rows that are scaled.
struct alignas(16) GradientOfToken {
  float c, factor, offset;
  int32_t target;
};

// What a part of a row adds up to.
struct alignas(8) PartSum {
  float c, exponentials;
};

// Softmax rescaling (unnormalised softmax): a row's shift is raised in steps of kRescaleBits bits, at
// most kMostRescales times.
inline constexpr float kRescaleBits = 8.0f;
inline constexpr uint32_t kMostRescales = 65535;

// `x` times the square of `half`: what is far above 1 may come down by more than the least number of
// f32, which as a factor would be 0.
__device__ inline float in_halves(float x, float half) { return x * half * half; }

// Mirrored by `Arguments` in src/fused_product/arguments.rs. Aligned as a CUtensorMap of CUDA 13,
// which those of 12 are less.
struct alignas(128) FusedProductArguments {
  CUtensorMap hidden;  // [tokens, width], in boxes of kRowsOfA rows
  CUtensorMap
      weight;  // [vocab, width], in boxes of kRowsOfB rows; or its transpose, of kBlock rows
  CUtensorMap dlogits;  // [tokens, columns], in boxes of kRowsOfStore rows
  // Logits and the plan in it are not used.
  CrossEntropyArguments row;
  PartSum* sums;               // [parts, tokens]
  float* values;               // [parts, tokens], with smoothing
  float* rounded;              // [parts, tokens], of the unnormalised softmax: sums of what is written
  float* label_logits;         // [tokens]
  GradientOfToken* gradients;  // [tokens]
  const float* bias;           // [columns], added to logits in f32; or null
  // Where it is null or leads to a number that is not 0 the kernel runs.
  const uint32_t* gate;
  // Unnormalised softmax: the steps by which the shift of a tile's row was raised, [tiles, tokens],
  // all 0 before the launch; and a word that becomes 1 where any was.
  uint16_t* rescales;
  uint32_t* rescaled;
  // Of the unnormalised softmax: a bit for each of the vocabulary's columns that is a token's
  // label. Where it is not null, rows of the weight's gradient that are no label's have nothing
  // yet.
  uint32_t* labelled;
  // Of the unnormalised softmax: hidden states and weight once more, and where scaled hidden states
  // go.
  const void* hidden_rows;
  const void* weight_rows;
  void* scaled_rows;
  float* dbias;  // [vocab], where the kernel adds to it; or null
  int64_t width;
  // From one column of the vocabulary to the next in the weight, and from one of D.
  int64_t vocab_step;
  int64_t width_step;
  // Columns, the vocabulary's first, that have an unnormalised softmax.
  int64_t written;
  // Of some rows of the weight's gradient, or of its transpose: where they are, the first of them,
  // how many, and elements from row to row. Or of some columns of the vocabulary.
  void* part;
  int64_t part_first;
  int64_t part_count;
  int64_t part_stride;
  uint32_t blocks;        // of kBlock columns of A and B
  uint32_t tiles;         // of kTileColumns columns
  uint32_t parts;         // of the tiles; 0 where clusters take equal shares, wherever these end
  uint32_t token_blocks;  // of kClusterTokens tokens
  uint32_t group;         // blocks of tokens that go side by side
  uint32_t adds;          // whether a sum is added to what is there
  // Of the unnormalised softmax, where something is said of the distribution, each [parts, tokens]:
  // sums of each exponential times its logit; and, unless it is null, the largest logit of the
  // columns before the label's, and of all others.
  float* weighted;
  float2* largest;
};

inline constexpr uint32_t kBlock = 64;
inline constexpr uint32_t kStages = 4;
inline constexpr uint32_t kTileColumns = 256;
inline constexpr uint32_t kClusterCtas = 2;
inline constexpr uint32_t kTileTokens = 128;
inline constexpr uint32_t kClusterTokens = kClusterCtas * kTileTokens;
inline constexpr uint32_t kRowsOfA = kTileTokens;
inline constexpr uint32_t kRowsOfB = kTileColumns / kClusterCtas;
inline constexpr uint32_t kRowsOfStore = 16;
inline constexpr uint32_t kColumnsOfSum = 32;
inline constexpr uint32_t kWarpgroup = 128;
inline constexpr uint32_t kFusedProductThreads = 3 * kWarpgroup;
inline constexpr uint32_t kTokenThreads = 128;

inline constexpr uint32_t kRowBytes = kBlock * 2;
inline constexpr uint32_t kABytes = kTileTokens * kRowBytes;
inline constexpr uint32_t kBBytes = kTileColumns * kRowBytes;
// Of B, where it is transposed: kBlock columns.
inline constexpr uint32_t kColumnsBytes = kBlock * kRowBytes;
inline constexpr uint32_t kStageBytes = kABytes + kBBytes;
inline constexpr uint32_t kStoreBytes = kRowsOfStore * kRowBytes;
inline constexpr uint32_t kStoresOfWarp = 2;
inline constexpr uint32_t kMultiplyingWarps = 8;
inline constexpr uint32_t kStoresBytes = kMultiplyingWarps * kStoresOfWarp * kStoreBytes;
inline constexpr uint32_t kBarrierBytes = 2 * kStages * 8;
// Of which up to kAlignment go before the first stage.
inline constexpr uint32_t kAlignment = 1024;
inline constexpr uint32_t kFusedProductBytes =
    kAlignment + kStages * kStageBytes + kStoresBytes + kBarrierBytes;

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Which tiles a cluster takes, one item after the other: a block of tokens and a part of the tiles,
// or, where there are no parts, what a block of tokens has of the cluster's share of all tiles.
// Then an item is a tile, and a step as many as the block has.
struct Schedule {
  const FusedProductArguments& a;
  uint32_t item, step, items;
  uint32_t token_block, part, tile, end;

  __device__ explicit Schedule(const FusedProductArguments& arguments)
      : a(arguments),
        item(blockIdx.x / kClusterCtas),
        step(gridDim.x / kClusterCtas),
        items(arguments.token_blocks * arguments.parts) {
    if (a.parts == 0) {
      const uint64_t all = static_cast<uint64_t>(a.token_blocks) * a.tiles;
      items = static_cast<uint32_t>(all * (item + 1) / step);
      item = static_cast<uint32_t>(all * item / step);
    }
    decode();
  }

  __device__ bool more() const { return item < items; }

  __device__ void next() {
    item += step;
    decode();
  }

  __device__ void decode() {
    if (a.parts == 0) {
      token_block = item / a.tiles, tile = item % a.tiles, part = 0;
      step = min(a.tiles - tile, items - min(item, items));
      end = tile + step;
      return;
    }
    const uint32_t of_group = a.group * a.parts;
    const uint32_t before = item / of_group * a.group;
    const uint32_t side_by_side = min(a.group, a.token_blocks - min(before, a.token_blocks - 1));
    const uint32_t rest = item % of_group;
    token_block = before + rest % side_by_side;
    part = rest / side_by_side;
    tile = static_cast<uint32_t>(static_cast<uint64_t>(a.tiles) * part / a.parts);
    end = static_cast<uint32_t>(static_cast<uint64_t>(a.tiles) * (part + 1) / a.parts);
  }
};

// A place in the ring, and the parity of its turn.
struct Stage {
  uint32_t index = 0, parity = 0;

  __device__ void next() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

// A warp's part of shared memory for what it writes, in two halves that take turns.
struct Stores {
  uint32_t first;
  // Where a half has the lane's first words.
  uint32_t of_lane;
  uint32_t turn = 0;
};

// How the factors lie: A [tokens, width] and B [vocab, width], or B, or both, the other way round.
enum class Factors { kVd, kDv, kTransposed };

template <class E, Epilogue kEpilogue, bool kSmooth, bool kCap, Factors kFactors>
struct FusedProduct {
  static constexpr bool kTransposedA = kFactors == Factors::kTransposed;
  static constexpr bool kTransposedB = kFactors != Factors::kVd;
  static constexpr bool kIsDistribution = kEpilogue == Epilogue::kDistribution;
  static constexpr bool kIsUnnormalised = kEpilogue == Epilogue::kUnnormalised || kIsDistribution;
  static constexpr bool kSums = kEpilogue == Epilogue::kForward || kIsUnnormalised;
  static constexpr bool kWrites = kEpilogue != Epilogue::kForward;
  static constexpr bool kIsAdded =
      kEpilogue == Epilogue::kAdded || kEpilogue == Epilogue::kAddedLater;
  static constexpr bool kOfLogits = kEpilogue != Epilogue::kScaled &&
                                    !kIsAdded && kEpilogue != Epilogue::kSum;
  // Whether what is written depends on the token.
  static constexpr bool kOfTokens = kEpilogue == Epilogue::kBackward || kIsUnnormalised ||
                                    kEpilogue == Epilogue::kScaled;
  // A tile is written in pieces of 64 columns, or 32 of sums in f32. A thread has so many words of
  // them: two numbers for every 8 columns in either row.
  static constexpr bool kIsSum = kEpilogue == Epilogue::kSum;
  static constexpr uint32_t kPieceColumns = kIsSum ? kColumnsOfSum : kBlock;
  static constexpr uint32_t kPieces = kTileColumns / kPieceColumns, kWords = 16;
  // Pieces that are left for between the products of the next tile, by measurement.
  static constexpr uint32_t kPutOff =
      kIsSum ? 4 : kEpilogue == Epilogue::kAddedLater || (kOfLogits && kWrites) ? 3 : 0;
  // Blocks of a tile that come apart, before the others: the first, and those beside which a piece
  // that was deferred is finished.
  static constexpr uint32_t kApart = kPutOff > 0 ? kPutOff : 1;

  struct Rows;

  const FusedProductArguments& a;
  uint32_t stages, stores, full, empty;
  // Columns, the first, that have a place; of the unnormalised softmax.
  uint32_t placed = 0;
  const uint32_t rank = ptx::cluster_rank();
  const TemperedCap cap;

  __device__ FusedProduct(const FusedProductArguments& arguments, uint8_t* shared)
      : a(arguments), cap(kCap ? arguments.row.softcap : 1.0, arguments.row.scale) {
    stages = (ptx::shared_address(shared) + kAlignment - 1) / kAlignment * kAlignment;
    stores = stages + kStages * kStageBytes;
    full = stores + kStoresBytes;
    empty = full + kStages * 8;
    if constexpr (kIsUnnormalised) {
      const int64_t written = max(a.written - a.row.first_column, int64_t{0});
      placed = ptx::uniform(static_cast<uint32_t>(min(written, a.row.columns)));
    }
  }

  __device__ void run() {
    if (threadIdx.x == 0) {
      for (uint32_t stage = 0; stage < kStages; ++stage) {
        ptx::mbarrier_init(full + stage * 8, 1);
        ptx::mbarrier_init(empty + stage * 8, kClusterCtas * kMultiplyingWarps);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    // The first warpgroup fetches. 168 registers a thread are there at the start.
    const uint32_t warpgroup = ptx::uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == 0) {
      ptx::fewer_registers<24>();
      if (threadIdx.x == 0) fetch();
      __syncwarp();
    } else {
      ptx::more_registers<240>();
      multiply(warpgroup - 1);
    }
    // A CTA must not be gone while another still sends to it.
    ptx::cluster_sync();
  }

  __device__ void fetch() const {
    ptx::prefetch_tensor_map(a.hidden);
    ptx::prefetch_tensor_map(a.weight);
    constexpr uint16_t kAll = (1 << kClusterCtas) - 1;
    Stage stage;
    for (Schedule at(a); at.more(); at.next()) {
      const int32_t token = at.token_block * kClusterTokens + rank * kTileTokens;
      for (; at.tile < at.end; ++at.tile) {
        const int32_t column = static_cast<int32_t>(a.row.first_column) +
                               static_cast<int32_t>(at.tile * kTileColumns + rank * kRowsOfB);
        for (uint32_t block = 0; block < a.blocks; ++block) {
          const uint32_t to = stages + stage.index * kStageBytes;
          const uint32_t barrier = full + stage.index * 8;
          // Free in all CTAs.
          ptx::mbarrier_wait(empty + stage.index * 8, stage.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(barrier, kStageBytes);
          const int32_t k = block * kBlock;
          if constexpr (kTransposedA) {
#pragma unroll
            for (uint32_t i = 0; i < kTileTokens / kBlock; ++i) {
              ptx::tensor_load(to + i * kColumnsBytes, a.hidden, token + i * kBlock, k, barrier);
            }
          } else {
            ptx::tensor_load(to, a.hidden, k, token, barrier);
          }
          const uint32_t own = to + kABytes + rank * (kBBytes / kClusterCtas);
          if constexpr (kTransposedB) {
#pragma unroll
            for (uint32_t i = 0; i < kRowsOfB / kBlock; ++i) {
              ptx::tensor_load_to(own + i * kColumnsBytes, a.weight, column + i * kBlock, k,
                                  barrier, kAll);
            }
          } else {
            ptx::tensor_load_to(own, a.weight, k, column, barrier, kAll);
          }
          stage.next();
        }
      }
    }
  }

  // Lets a stage go, in all CTAs.
  __device__ static void release(uint32_t remote, uint32_t stage) {
    if (threadIdx.x % 32 < kClusterCtas) ptx::mbarrier_arrive_in_cluster(remote + stage * 8);
  }

  __device__ void multiply(uint32_t half) const {
    const uint32_t warp = ptx::uniform(threadIdx.x % kWarpgroup / 32), lane = threadIdx.x % 32;
    // A thread has two rows of a warp's 16, and of every 8 columns two.
    const uint32_t first = half * 64 + warp * 16;
    // Of the first stage; of a transpose 64 rows are as many bytes.
    const uint32_t own = stages + half * (kABytes / 2), all = stages + kABytes;
    const uint64_t left =
        kTransposedA ? ptx::transposed_of(own, kColumnsBytes) : ptx::matrix_of(own);
    const uint64_t right =
        kTransposedB ? ptx::transposed_of(all, kColumnsBytes) : ptx::matrix_of(all);
    const uint32_t ready = ptx::uniform(full), remote = ptx::in_cta(empty, lane % kClusterCtas);
    Stage stage;
    Stores stored = stores_of(half * (kMultiplyingWarps / 2) + warp, lane);
    float x[128];
    // What is deferred; whether there is any, and where sums go.
    uint32_t later[kApart][kWords];
    bool is_behind = false;
    int32_t row_behind = 0;
    uint32_t column_behind = 0, tile_behind = 0;
    // What a tile is added to.
    uint32_t there[kEpilogue == Epilogue::kAdded ? 64 : 1];
    for (Schedule at(a); at.more(); at.next()) {
      const int32_t row =
          static_cast<int32_t>(at.token_block * kClusterTokens + rank * kTileTokens + first);
      Rows rows(a, row + lane / 4);
      for (; at.tile < at.end; ++at.tile) {
        uint32_t previous = 0;
        if constexpr (kEpilogue == Epilogue::kAdded) rows.read(a, there, at.tile * kTileColumns);
        // Whose first values count for nothing: a compiler that sees where they come from moves
        // them about, and has every product wait for that.
        ptx::settle(x);
        // The products of a block are under way when this returns.
        const auto begin = [&](bool adds) {
          ptx::mbarrier_wait(ready + stage.index * 8, stage.parity);
          const uint32_t from = stage.index * (kStageBytes / 16);
          ptx::wgmma_fence();
#pragma unroll
          for (uint32_t k = 0; k < kBlock / 16; ++k) {
            // 16 columns are 32 bytes, or 16 rows, which addresses count by 16.
            constexpr uint32_t kStepA = kTransposedA ? kRowBytes : 2;
            constexpr uint32_t kStepB = kTransposedB ? kRowBytes : 2;
            ptx::wgmma<E, kTransposedA, kTransposedB>(x, left + from + kStepA * k,
                                                      right + from + kStepB * k, adds || k > 0);
          }
          ptx::wgmma_commit();
        };
        // Those of the block before have ended then.
        const auto end = [&](bool is_first) {
          ptx::wgmma_wait<1>();
          if (!is_first) release(remote, previous);
          previous = stage.index;
          stage.next();
        };
        // The first blocks, beside which the tile before is finished. They are apart for the sake of
        // the others, where each instruction counts.
#pragma unroll
        for (uint32_t i = 0; i < kApart; ++i) {
          if (i < a.blocks) begin(i > 0);
          if constexpr (kPutOff > 0) {
            constexpr uint32_t kFirst = kPieces - kPutOff;
            if (!is_behind) {
            } else if constexpr (kIsSum) {
              write_sums(later[i], row_behind, column_behind + i * kPieceColumns, stored);
            } else {
              finish(kFirst + i, later[i], rows, row_behind, tile_behind, stored);
            }
          }
          if (i < a.blocks) end(i == 0);
        }
        for (uint32_t block = kApart; block < a.blocks; ++block) {
          begin(true);
          end(false);
        }
        ptx::wgmma_wait<0>();
        ptx::settle(x);
        release(remote, previous);
        if constexpr (kOfLogits || kEpilogue == Epilogue::kAddedLater) {
          const uint32_t column = at.tile * kTileColumns;
          if constexpr (kOfLogits) {
            if (a.bias != nullptr) add_bias(x, column);
            rows.find_labels(a, x, column);
          }
          if constexpr (kWrites) {
            uint32_t words[kPieces * kWords];
            if constexpr (kIsUnnormalised) {
              rows.exponentiate(a, x, words, at.tile, placed, cap);
            } else if constexpr (kEpilogue == Epilogue::kAddedLater) {
              rows.add_what_is_there(a, x, words, column);
            } else {
              rows.differentiate(x, words, cap);
            }
#pragma unroll
            for (uint32_t piece = 0; piece < kPieces; ++piece) {
              uint32_t own[kWords];
#pragma unroll
              for (uint32_t i = 0; i < kWords; ++i) {
                own[i] = words[kWords * piece + i];
                if (piece + kPutOff >= kPieces) later[piece + kPutOff - kPieces][i] = own[i];
              }
              if (piece + kPutOff < kPieces) finish(piece, own, rows, row, at.tile, stored);
            }
            is_behind = kPutOff > 0, row_behind = row, tile_behind = at.tile;
          } else {
            rows.add(a, x, at.tile, cap);
          }
        } else if constexpr (kIsSum) {
          const uint32_t column = at.tile * kTileColumns;
#pragma unroll
          for (uint32_t piece = 0; piece < kPieces; ++piece) {
            uint32_t words[kWords];
#pragma unroll
            for (uint32_t i = 0; i < kWords; ++i) {
              words[i] = __float_as_uint(x[kWords * piece + i]);
              if (piece >= kPieces - kPutOff) later[piece + kPutOff - kPieces][i] = words[i];
            }
            if (piece < kPieces - kPutOff) {
              write_sums(words, row, column + piece * kPieceColumns, stored);
            }
          }
          row_behind = row, column_behind = column + (kPieces - kPutOff) * kPieceColumns;
          is_behind = true;
        } else {
          if constexpr (kEpilogue == Epilogue::kAdded) {
#pragma unroll
            for (int i = 0; i < 64; ++i) {
              const float2 pair = unpacked<E>(there[i]);
              x[2 * i] += pair.x, x[2 * i + 1] += pair.y;
            }
          }
          write_product(x, rows, row, at.tile * kTileColumns, stored);
        }
      }
      if constexpr (kPutOff > 0 && kOfLogits) {
#pragma unroll
        for (uint32_t i = 0; i < kPutOff; ++i) {
          if (is_behind) {
            finish(kPieces - kPutOff + i, later[i], rows, row_behind, tile_behind, stored);
          }
        }
        is_behind = false;
      }
      if constexpr (kSums) rows.write(a, at.part);
    }
    if constexpr (kIsSum) {
#pragma unroll
      for (uint32_t i = 0; i < kPutOff; ++i) {
        const uint32_t column = column_behind + i * kPieceColumns;
        if (is_behind) write_sums(later[i], row_behind, column, stored);
      }
    }
    if constexpr (kEpilogue == Epilogue::kAddedLater) {
      const Rows none(a, a.row.tokens);
#pragma unroll
      for (uint32_t i = 0; i < kPutOff; ++i) {
        if (is_behind) {
          finish(kPieces - kPutOff + i, later[i], none, row_behind, tile_behind, stored);
        }
      }
    }
    if constexpr (kWrites) {
      if (lane == 0) ptx::bulk_wait_read<0>();
    }
  }

  // Writes a piece of a tile.
  __device__ void finish(uint32_t piece, const uint32_t (&words)[kWords], const Rows& rows,
                         int32_t row, uint32_t tile, Stores& stored) const {
    const uint32_t first = tile * kTileColumns + piece * kBlock;
    const bool has_place = !kIsUnnormalised || first < placed;
    if (has_place && first < static_cast<uint32_t>(a.row.columns)) {
      write_words(rows, row, first, stored, words);
    }
    if constexpr (kEpilogue == Epilogue::kBackward) {
      if (piece == kPieces - 1 && __any_sync(~0u, rows.labels != 0)) {
        // The copy engine's entries come first.
        if (threadIdx.x % 32 == 0) ptx::bulk_wait<0>();
        __syncwarp();
        rows.write_at_labels(a);
      }
    }
  }

  // Adds the bias of the columns from `first` on.
  __device__ void add_bias(float (&x)[128], uint32_t first) const {
    const uint32_t own = first + threadIdx.x % 4 * 2;
    const uint32_t columns = static_cast<uint32_t>(a.row.columns);
#pragma unroll
    for (uint32_t i = 0; i < 32; ++i) {
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        const uint32_t column = own + i * 8 + k;
        const float bias = column < columns ? __ldg(a.bias + column) : 0.0f;
        x[4 * i + k] += bias, x[4 * i + 2 + k] += bias;
      }
    }
  }

  // What a thread knows of its two rows.
  struct Rows {
    int64_t token;
    int32_t target[2];
    // Sums over the columns that this thread has.
    float c[2], exponentials[2], values[2];
    // Unnormalised softmax: how often c was raised, and sums of the rounded values of the row, equal
    // in four lanes.
    uint32_t rescales[2];
    float rounded[4];
    // Of the distribution: see `weighted` and `largest` of the arguments.
    float weighted[2], before[2], others[2];
    // Of passes that write.
    RowGradient gradient[2];
    // Whether there are tokens in the warp that take no part.
    bool has_masked;
    // A tile's labels: the bits of rows that have theirs in this thread's columns, and its logit.
    // Of what is added to, those of rows that have something.
    uint32_t labels;
    float at_label[2];

    __device__ Rows(const FusedProductArguments& a, int64_t first)
        : token(first), has_masked(false), labels(0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t index = first + 8 * r;
        const bool here = index < a.row.tokens;
        if constexpr (kOfTokens) {
          const GradientOfToken of = here ? a.gradients[index] : GradientOfToken{0, 0, 0, kIgnored};
          gradient[r] = {of.c, of.factor, of.offset, 0.0f};
          target[r] = of.target < 0 || !kOfLogits ? of.target : target_here(a.row, of.target);
          if constexpr (kIsDistribution) {
            // Of all columns here it has to be known on which side of the label they are.
            if (of.target >= a.row.first_column + a.row.columns) target[r] = kAfter;
            weighted[r] = 0.0f;
            before[r] = others[r] = -INFINITY;
          }
          c[r] = of.c;
        } else if constexpr (kEpilogue == Epilogue::kForward) {
          target[r] = here ? target_of(a.row, label_at(a.row, index)) : kIgnored;
          c[r] = kUnset;
        } else if constexpr (kIsAdded) {
          const int64_t column = a.part_first + index;
          if (here &&
              (a.labelled == nullptr || (a.labelled[column / 32] >> column % 32 & 1) != 0)) {
            labels |= 1u << r;
          }
        }
        if constexpr (kSums) exponentials[r] = values[r] = 0.0f;
        rescales[r] = 0, rounded[2 * r] = rounded[2 * r + 1] = 0.0f;
      }
      if constexpr (kOfTokens) has_masked = __any_sync(~0u, is_masked(0) || is_masked(1));
    }

    // Reads what 256 columns from `first` on have, while they are multiplied, of rows that have
    // something: pairs, whole for rows are whole vectors.
    __device__ void read(const FusedProductArguments& a, uint32_t (&there)[64],
                         uint32_t first) const {
      const uint32_t own = first + threadIdx.x % 4 * 2;
#pragma unroll
      for (uint32_t i = 0; i < 64; ++i) {
        const int64_t index = token + 8 * (i % 2), column = own + i / 2 * 8;
        const bool is_here = (labels >> i % 2 & 1) != 0 && column < a.row.columns;
        const auto* rows = static_cast<const E*>(a.row.dlogits);
        there[i] =
            is_here ? *reinterpret_cast<const uint32_t*>(rows + index * a.row.stride + column) : 0;
      }
    }

    // Adds what is there to a tile of the columns from `first` on, and rounds it.
    __device__ void add_what_is_there(const FusedProductArguments& a, float (&x)[128],
                                      uint32_t (&words)[kPieces * kWords], uint32_t first) const {
      if (__any_sync(~0u, labels != 0)) {
        const uint32_t own = first + threadIdx.x % 4 * 2;
#pragma unroll
        for (uint32_t i = 0; i < 64; ++i) {
          const int64_t index = token + 8 * (i % 2), column = own + i / 2 * 8;
          if ((labels >> i % 2 & 1) == 0 || column >= a.row.columns) continue;
          const auto* rows = static_cast<const E*>(a.row.dlogits);
          const auto* at = reinterpret_cast<const uint32_t*>(rows + index * a.row.stride + column);
          const float2 pair = unpacked<E>(*at);
          x[2 * i] += pair.x, x[2 * i + 1] += pair.y;
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < kPieces * kWords; ++i) words[i] = packed<E>(x[2 * i], x[2 * i + 1]);
    }

    // Keeps the logits of labels among the columns of the tile from `first` on.
    __device__ void find_labels(const FusedProductArguments& a, const float (&x)[128],
                                uint32_t first) {
      labels = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t column = static_cast<uint32_t>(target[r]) - first;
        const bool is_here = target[r] >= 0 && column < kTileColumns;
        if (!is_here || column / 2 % 4 != threadIdx.x % 4) continue;
        float found = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < kTileColumns / 8; ++i) {
          const float2 pair = pair_of(x, 2 * i + r);
          if (column / 8 == i) found = column % 2 == 0 ? pair.x : pair.y;
        }
        labels |= 1u << r;
        at_label[r] = found;
        if constexpr (kSums) a.label_logits[token + 8 * r] = at_label[r];
      }
      __syncwarp();
    }

    __device__ static float2 pair_of(const float (&x)[128], uint32_t i) {
      return make_float2(x[2 * i], x[2 * i + 1]);
    }

    // Writes dlogits at labels, once those around them are there.
    __device__ void write_at_labels(const FusedProductArguments& a) const {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if ((labels >> r & 1) == 0) continue;
        const int64_t index = token + 8 * r;
        const Token token_here = describe_saved(a.row, index);
        const RowGradient row = RowGradient::of<true>(a.row, token_here);
        const float dz = row.at_the_label<kCap>(
            a.row, token_here, at_label[r], Cap(kCap ? a.row.softcap : 1.0), token_here.saved());
        static_cast<E*>(a.row.dlogits)[index * a.row.stride + target[r]] = from_float<E>(dz);
      }
    }

    // Makes a tile's dlogits of its logits, rounded.
    __device__ void differentiate(const float (&x)[128], uint32_t (&words)[kPieces * kWords],
                                  const TemperedCap& cap) const {
#pragma unroll
      for (uint32_t i = 0; i < kPieces * kWords; ++i) {
        const float2 z = pair_of(x, i);
        words[i] = packed<E>(gradient[i % 2].template at<kSmooth, kCap>(z.x, cap),
                             gradient[i % 2].template at<kSmooth, kCap>(z.y, cap));
      }
    }

    // Of a label in columns after these.
    static constexpr int32_t kAfter = INT32_MAX;

    // What stands for a logit of -inf; where it is multiplied by its exponential, which is 0, it is
    // none that would make a NaN.
    static constexpr float kNoLogit = kIsDistribution ? -3e38f : -INFINITY;

    // Has it stand there, where a bias or columns that end may have made some.
    __device__ void bound(const FusedProductArguments& a, float (&x)[128], uint32_t tile) const {
      const bool ends = (tile + 1) * kTileColumns > static_cast<uint32_t>(a.row.columns);
      if (!ends && a.bias == nullptr) return;
#pragma unroll
      // A NaN stays one.
      for (float& one : x) one = one < kNoLogit ? kNoLogit : one;
    }

    // Keeps the largest logits of a tile, softcap or none.
    __device__ void note_largest(const FusedProductArguments& a, const float (&x)[128],
                                 uint32_t tile) {
      const uint32_t first = tile * kTileColumns, columns = static_cast<uint32_t>(a.row.columns);
      const bool ends = first + kTileColumns > columns;
      float most[2] = {-INFINITY, -INFINITY};
      bool is_apart = ends;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t at = static_cast<uint32_t>(target[r]) - first;
        is_apart |= target[r] >= 0 && at < kTileColumns;
#pragma unroll
        for (int i = 2 * r; i < 128; i += 4) most[r] = fmaxf(most[r], fmaxf(x[i], x[i + 1]));
      }
      if (!is_apart) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const bool is_before = static_cast<int32_t>(first) < target[r];
          before[r] = fmaxf(before[r], is_before ? most[r] : -INFINITY);
          others[r] = fmaxf(others[r], is_before ? -INFINITY : most[r]);
        }
        return;
      }
      const uint32_t own = first + threadIdx.x % 4 * 2;
#pragma unroll
      for (uint32_t i = 0; i < 128; ++i) {
        const uint32_t column = own + i / 4 * 8 + i % 2, r = i / 2 % 2;
        const bool is_before = static_cast<int32_t>(column) < target[r];
        const float one = column < columns ? x[i] : -INFINITY;
        before[r] = fmaxf(before[r], is_before ? one : -INFINITY);
        others[r] = fmaxf(others[r], is_before ? -INFINITY : one);
      }
    }

    // Computes a tile's unnormalised softmax and its sums, before and after rounding. Where a row's
    // exponentials are too large, its shift is raised and they are computed again.
    __device__ void exponentiate(const FusedProductArguments& a, float (&x)[128],
                                 uint32_t (&words)[kPieces * kWords], uint32_t tile,
                                 uint32_t placed, const TemperedCap& cap) {
      if constexpr (!kCap) cap_and_end(a, x, tile, cap);
      const bool is_ragged = kCap && (tile + 1) * kTileColumns > static_cast<uint32_t>(a.row.columns);
      if constexpr (kIsDistribution) {
        if (a.largest != nullptr) note_largest(a, x, tile);
        bound(a, x, tile);
      }
      float total[4], of_logits[4];
      do {
        of_logits[0] = of_logits[1] = of_logits[2] = of_logits[3] = 0.0f;
        total[0] = total[1] = total[2] = total[3] = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < kPieces * kWords; ++i) {
          float2 z = pair_of(x, i);
          const uint32_t r = i % 2;
          if constexpr (kCap) {
            // One after the other, as there are no registers for more.
            z = make_float2(cap.apply(z.x), cap.apply(z.y));
            if (is_ragged) {
              const uint32_t column = tile * kTileColumns + i / 2 * 8 + threadIdx.x % 4 * 2;
              if (column >= a.row.columns) z.x = kNoLogit;
              if (column + 1 >= a.row.columns) z.y = kNoLogit;
            }
          }
          float2 e = make_float2(ptx::ex2(fmaf(z.x, cap.scale, c[r])),
                                 ptx::ex2(fmaf(z.y, cap.scale, c[r])));
          total[r] += e.x, total[r + 2] += e.y;
          if constexpr (kIsDistribution) {
            of_logits[r] = fmaf(e.x, z.x, of_logits[r]);
            of_logits[r + 2] = fmaf(e.y, z.y, of_logits[r + 2]);
            // One pair after the other, as there are no registers for more.
            asm volatile("" : "+f"(e.x), "+f"(e.y), "+f"(of_logits[r]), "+f"(of_logits[r + 2]));
          }
          if constexpr (kCap) {
            e.x *= cap.derivative_at(z.x), e.y *= cap.derivative_at(z.y);
            asm volatile("" : "+f"(e.x), "+f"(e.y));
          }
          // Finite logits are distinguished from -inf by what the uniform target takes off.
          if constexpr (kSmooth) {
            if (z.x != kNoLogit) e.x = fmaxf(e.x, kLeastNormal);
            if (z.y != kNoLogit) e.y = fmaxf(e.y, kLeastNormal);
          }
          words[i] = packed<E>(e.x, e.y);
        }
        total[0] += total[2], total[1] += total[3];
        // With a cap all fit, as `unnormalised_support` sees to.
        if constexpr (kCap) break;
        // That of a NaN is not.
        const bool fits = total[0] <= kMostOfTile && total[1] <= kMostOfTile;
        if (__all_sync(~0u, fits)) break;
      } while (rescale(x, cap.scale));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        exponentials[r] += total[r];
        if constexpr (kIsDistribution) weighted[r] += of_logits[r] + of_logits[r + 2];
      }
      // With a cap what is written has its derivative, and tells nothing of the sum.
#pragma unroll
      for (uint32_t i = 0; i < (kCap ? 0 : kPieces * kWords); i += 4) {
        ptx::add_rows<E>(rounded, words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
      if (threadIdx.x % 4 != 0 || (rescales[0] | rescales[1]) == 0) return;
      // A row that is rescaled in columns beyond `placed` is rescaled in those before, too.
      *a.rescaled = 1;
      if (tile * kTileColumns >= placed) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t index = token + 8 * r;
        if (rescales[r] == 0 || index >= a.row.tokens) continue;
        a.rescales[tile * a.row.tokens + index] = static_cast<uint16_t>(rescales[r]);
      }
    }

    // A sum of a thread's part of a tile asks for a higher shift beyond this; a single exponential
    // may be as large as 2^kMostBits then. After that the largest is near 2^kLeastBits.
    static constexpr bool kIsBf16 = std::is_same_v<E, __nv_bfloat16>;
    static constexpr float kMostOfTile = kIsBf16 ? 0x1p80f : 0x1p15f;
    static constexpr float kMostBits = kIsBf16 ? 74.0f : 9.0f;
    static constexpr float kLeastBits = kIsBf16 ? -58.0f : 0.0f;
    static constexpr float kLeastNormal = kIsBf16 ? 0x1p-126f : 0x1p-14f;

    // Raises the shift of rows whose largest exponential needs it. Returns whether there are any.
    __device__ bool rescale(const float (&x)[128], float scale) {
      bool any = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float most = -INFINITY;
#pragma unroll
        for (int i = 2 * r; i < 128; i += 4) most = fmaxf(most, fmaxf(x[i], x[i + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float bits = fmaf(most, scale, c[r]);
        if (!(bits >= kMostBits)) continue;
        const float left = static_cast<float>(kMostRescales - rescales[r]);
        const float steps = fminf(ceilf((bits - kLeastBits) / kRescaleBits), left);
        const float half = ptx::ex2(-kRescaleBits / 2 * steps);
        c[r] -= kRescaleBits * steps;
        rescales[r] += static_cast<uint32_t>(steps);
        exponentials[r] = in_halves(exponentials[r], half);
        if constexpr (kIsDistribution) weighted[r] = in_halves(weighted[r], half);
        rounded[2 * r] = in_halves(rounded[2 * r], half);
        rounded[2 * r + 1] = in_halves(rounded[2 * r + 1], half);
        any |= steps > 0.0f;
      }
      return __any_sync(~0u, any);
    }

    // Caps a tile's logits, adds them up where that is asked for, and has those beyond the last column
    // be -inf.
    __device__ void cap_and_end(const FusedProductArguments& a, float (&x)[128], uint32_t tile,
                                const TemperedCap& cap) {
      if constexpr (kCap) {
#pragma unroll
        for (float& one : x) one = cap.apply(one);
      }
      const uint32_t own = tile * kTileColumns + threadIdx.x % 4 * 2;
      const uint32_t columns = static_cast<uint32_t>(a.row.columns);
      const bool ends = (tile + 1) * kTileColumns > columns;
      const auto beyond = [&](uint32_t i) { return own + i / 4 * 8 + i % 2 >= columns; };
      if constexpr (kSmooth) {
        if (ends) {
#pragma unroll
          for (uint32_t i = 0; i < 128; ++i) x[i] = beyond(i) ? 0.0f : x[i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float total[2] = {values[r], 0.0f};
#pragma unroll
          for (int i = 2 * r; i < 128; i += 4) total[0] += x[i], total[1] += x[i + 1];
          values[r] = total[0] + total[1];
        }
      }
      if (ends) {
#pragma unroll
        for (uint32_t i = 0; i < 128; ++i) x[i] = beyond(i) ? -INFINITY : x[i];
      }
    }

    // Adds a tile.
    __device__ void add(const FusedProductArguments& a, float (&x)[128], uint32_t tile,
                        const TemperedCap& cap) {
      cap_and_end(a, x, tile, cap);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (c[r] == kUnset) c[r] = shift_of(x, r, cap.scale);
        const float sum = sum_of(x, r, c[r], exponentials[r], cap.scale);
        if (sum <= kLargeSum) {
          exponentials[r] = sum;
          continue;
        }
        // Not what is far below the maximum of a row decides what its exponentials are multiples
        // of.
        const float fitting = fminf(c[r], shift_of(x, r, cap.scale));
        exponentials[r] = sum_of(x, r, fitting, exponentials[r] * ptx::ex2(fitting - c[r]), cap.scale);
        c[r] = fitting;
      }
    }

    // What is written of row `r` in `column` where the product is `x`.
    __device__ float written(const FusedProductArguments& a, int r, uint32_t column,
                             float x) const {
      if constexpr (kEpilogue == Epilogue::kScaled) {
        // What its label's entry lacks: see unnormalised.cuh.
        float label_term = 0.0f;
        if (gradient[r].offset != 0.0f && column < static_cast<uint32_t>(a.row.columns)) {
          const int64_t at = target[r] * a.vocab_step + column * a.width_step;
          label_term = gradient[r].offset * to_float(static_cast<const E*>(a.weight_rows)[at]);
        }
        return fmaf(x, gradient[r].factor, label_term);
      } else {
        return x;
      }
    }

    // Whether the token of row `r` is masked: its row is written as zeros.
    __device__ bool is_masked(int r) const {
      return gradient[r].factor == 0.0f && gradient[r].offset == 0.0f;
    }

    // The constant that makes the greatest of row `r` 1.
    __device__ static float shift_of(const float (&x)[128], int r, float scale) {
      float most[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i] = x[2 * r + i % 2 + i / 2 * 4];
#pragma unroll
      for (int i = 2 * r + 8; i < 128; i += 8) {
        most[0] = fmaxf(most[0], x[i]), most[1] = fmaxf(most[1], x[i + 1]);
        most[2] = fmaxf(most[2], x[i + 4]), most[3] = fmaxf(most[3], x[i + 5]);
      }
      return fminf(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])) * -scale, kUnset);
    }

    __device__ static float sum_of(const float (&x)[128], int r, float c, float before,
                                   float scale) {
      float partial[4] = {before, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 2 * r; i < 128; i += 8) {
        partial[0] += ptx::ex2(fmaf(x[i], scale, c));
        partial[1] += ptx::ex2(fmaf(x[i + 1], scale, c));
        partial[2] += ptx::ex2(fmaf(x[i + 4], scale, c));
        partial[3] += ptx::ex2(fmaf(x[i + 5], scale, c));
      }
      return (partial[0] + partial[1]) + (partial[2] + partial[3]);
    }

    // What four lanes have together of a row's distribution.
    __device__ void across_four(int r) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        weighted[r] += __shfl_xor_sync(~0u, weighted[r], offset);
        before[r] = fmaxf(before[r], __shfl_xor_sync(~0u, before[r], offset));
        others[r] = fmaxf(others[r], __shfl_xor_sync(~0u, others[r], offset));
      }
    }

    // Writes the sums of a part, which four lanes have together.
    __device__ void write(const FusedProductArguments& a, uint32_t part) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float common = c[r];
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) {
          common = fminf(common, __shfl_xor_sync(~0u, common, offset));
        }
        const float lower = ptx::ex2(common - c[r]);
        float sum = exponentials[r] * lower;
        float total = values[r];
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) {
          sum += __shfl_xor_sync(~0u, sum, offset);
          if constexpr (kSmooth) total += __shfl_xor_sync(~0u, total, offset);
        }
        if constexpr (kIsDistribution) weighted[r] *= lower, across_four(r);
        const int64_t index = token + 8 * r;
        if (threadIdx.x % 4 == 0 && index < a.row.tokens) {
          const int64_t place = static_cast<int64_t>(part) * a.row.tokens + index;
          a.sums[place] = {common, sum};
          if constexpr (kSmooth) {
            if (a.values != nullptr) a.values[place] = total * static_cast<float>(a.row.per_element);
          }
          if constexpr (kIsUnnormalised) {
            a.rounded[place] = kCap ? sum : rounded[2 * r];
          }
          if constexpr (kIsDistribution) {
            a.weighted[place] = weighted[r];
            if (a.largest != nullptr) a.largest[place] = make_float2(before[r], others[r]);
          }
        }
      }
    }
  };

  // Writes what is made of a warp's 16 rows from `row` on of a product, 64 columns at a time.
  __device__ void write_product(const float (&x)[128], Rows& rows, int32_t row, uint32_t first,
                                Stores& stored) const {
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      const uint32_t column = first + piece * kBlock;
      if (column >= static_cast<uint32_t>(a.row.columns)) break;
      uint32_t words[kWords];
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) {
        const float2 pair = Rows::pair_of(x, kWords * piece + i);
        const uint32_t at_column = column + i / 2 * 8 + threadIdx.x % 4 * 2;
        words[i] = packed<E>(rows.written(a, i % 2, at_column, pair.x),
                             rows.written(a, i % 2, at_column + 1, pair.y));
      }
      write_words(rows, row, column, stored, words);
    }
  }

  // Writes 64 columns, of which a word has two numbers for every 8 in either row.
  __device__ void write_words(const Rows& rows, int32_t row, uint32_t column, Stores& stored,
                              const uint32_t (&words)[kWords]) const {
    const uint32_t to = free_store(stored);
#pragma unroll
    for (uint32_t pair = 0; pair < 4; ++pair) {
      const uint32_t four[4] = {words[4 * pair], words[4 * pair + 1], words[4 * pair + 2],
                                words[4 * pair + 3]};
      ptx::stmatrix((to + stored.of_lane) ^ 32 * pair, four);
    }
    if (rows.has_masked) erase_idle(rows, to);
    send([&] {
      ptx::tensor_store(a.dlogits, static_cast<int32_t>(column), row, to, ptx::evict_first());
    });
  }

  // Sets rows of a piece in shared memory to 0 whose token takes no part, whatever its logits.
  __device__ static void erase_idle(const Rows& rows, uint32_t piece) {
    const uint32_t lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      if (!rows.is_masked(r)) continue;
      // Four lanes have a row.
      const uint32_t to = piece + (lane / 4 + 8 * r) * kRowBytes + lane % 4 * (kRowBytes / 4);
#pragma unroll
      for (uint32_t i = 0; i < kRowBytes / 4; i += 8) ptx::store_shared(to + i, 0, 0);
    }
  }

  // That of a warp. Of each row of 128 bytes, vectors are swizzled: what comes 32 bytes on, or 64, has
  // these bits the other way round. Words in f32 a lane writes itself, two of its first row; of those
  // in 16 bits it points at a row of a matrix, the first of two side by side or the second.
  __device__ Stores stores_of(uint32_t warp, uint32_t lane) const {
    const uint32_t row = kIsSum ? lane / 4 : lane % 16, half = kIsSum ? lane / 2 % 2 : lane / 16;
    const uint32_t of_lane = row * kRowBytes + (half ^ row % 8) * 16 + (kIsSum ? lane % 2 * 8 : 0);
    const uint32_t first = stores + warp * kStoresOfWarp * kStoreBytes;
    return {ptx::uniform(first), ptx::kept(of_lane)};
  }

  // The half that was sent before the last, and is free again.
  __device__ static uint32_t free_store(Stores& stored) {
    const uint32_t to = stored.first + stored.turn * kStoreBytes;
    stored.turn ^= 1;
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<kStoresOfWarp - 1>();
    __syncwarp();
    return to;
  }

  // Has one thread send what the warp wrote there.
  template <class Copy>
  __device__ static void send(const Copy& copy) {
    ptx::fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      copy();
      ptx::bulk_commit();
    }
  }

  // Writes sums of a warp's 16 rows from `row` on as they are, or adds them: 32 columns.
  __device__ void write_sums(const uint32_t (&x)[kWords], int32_t row, uint32_t column,
                             Stores& stored) const {
    if (column >= static_cast<uint32_t>(a.row.columns)) return;
    const uint32_t to = free_store(stored);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t own = (to + stored.of_lane) ^ 32 * i;
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r) {
        ptx::store_shared(own + r * 8 * kRowBytes, x[4 * i + 2 * r], x[4 * i + 2 * r + 1]);
      }
    }
    send([&] {
      const int32_t at = static_cast<int32_t>(column);
      if (a.adds != 0) {
        ptx::tensor_add(a.dlogits, at, row, to);
      } else {
        ptx::tensor_store(a.dlogits, at, row, to, ptx::evict_first());
      }
    });
  }
};

// Whether a kernel that may be held back runs.
__device__ inline bool is_open(const FusedProductArguments& a) {
  return a.gate == nullptr || *a.gate != 0;
}

// The kernel. There are whole clusters, at most as many as run at a time.
template <class E, Epilogue kEpilogue, bool kSmooth, bool kCap, Factors kFactors>
__device__ inline void fused_product(const FusedProductArguments& a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  if (!is_open(a)) return;
  FusedProduct<E, kEpilogue, kSmooth, kCap, kFactors>(a, memory).run();
}

// The sums of a token's parts, merged in order, with its label's logit.
__device__ inline RowSum merged(const FusedProductArguments& a, int64_t index, const Token& token) {
  RowSum all = RowSum::none();
  for (uint32_t part = 0; part < a.parts; ++part) {
    const int64_t place = static_cast<int64_t>(part) * a.row.tokens + index;
    const PartSum sum = a.sums[place];
    all.merge({sum.c, sum.exponentials, a.values != nullptr ? a.values[place] : 0.0f, 0.0f});
  }
  if (token.target >= 0) {
    const float x = a.label_logits[index];
    all.label = a.row.softcap > 0.0 ? Cap(a.row.softcap).apply(x) : x;
  }
  return all;
}

// After the forward pass: a thread merges the sums of a token.
__device__ inline void merge_parts(const FusedProductArguments& a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x;
  if (index >= a.row.tokens) return;
  const Token token = describe<Pass::kForward>(a.row, label_at(a.row, index), 0.0f);
  RowSum all = merged(a, index, token);
  add_carried(a.row, index, all);
  end_row<true>(a.row, index, token, all);
}

// Before the backward pass: what a token's dlogits are made of, in any columns.
__device__ inline void prepare_gradients(const FusedProductArguments& a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x;
  if (index >= a.row.tokens) return;
  const Token token = describe_saved(a.row, index);
  GradientOfToken of{0.0f, 0.0f, 0.0f, kIgnored};
  if (!token.is_masked) {
    const RowGradient row = RowGradient::of<true>(a.row, token);
    of = {row.c, row.factor, row.offset, token.target};
  }
  a.gradients[index] = of;
}

#endif

}  // namespace xentile

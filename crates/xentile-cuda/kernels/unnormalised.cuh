// Gradients of logits whose lse is not known yet, with no pass over logits: for bf16.
//
// p is an exponential over its row's sum, and the sum is known only when the row is. So the product
// writes e = exp(z - r), rounded, with a shift r near the row's largest logits, beside the row's
// sum, and what e lacks, f = g/sum, multiplies what is small: rows of the hidden states where
// e^T f h gives the weight's gradient, and rows of the product where f (e W) gives the hidden
// states'. The sum that f has is that of the rounded e, so that what they are off by together is
// gone. Factors that come later are what QuACK's linear cross-entropy has too (Guo et al., 2025: a
// scale a row and tile).
//
// r is the label's logit, which a product of two vectors gives, and 58 powers of two more. Sums
// hold what is 138 powers above it, 95 nats. Where a tile has more, the product rescales the row's
// shift from there on, by whole steps of eight powers of two, and keeps by how many (`rescales`). When
// a row's parts have ended in different shifts, or where one has changed within a part, a kernel
// brings all of the row to the highest: an exact multiplication. A row that needs none of that is
// not read.
//
// With smoothing, that kernel goes over all rows and takes the share of the uniform target off,
// which is one number for all of a row's columns.
//
// Where p is small that is most of a gradient, and as dlogits it would be a power of two, or
// nearly, which no rounding changes. So what it lacks when it is rounded, and what its hidden state
// lacks, is added in f32: to the product that the hidden states' gradient is of, and to one row of
// the weight's for a token.
#pragma once

#include "fused_product.cuh"

namespace xentile {

// Columns of a hidden state that a lane has, and a warp.
inline constexpr int kOfLane = 8, kOfWarp = 32 * kOfLane;

// Rows and columns of a weight's gradient [D, V] that a CTA writes.
inline constexpr int kRowsOfPlace = kOfLane, kColumnsOfPlace = 2048;

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

inline constexpr uint32_t kTokenWarps = kTokenThreads / 32;

__device__ inline int64_t token_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kTokenWarps + threadIdx.x / 32;
}

__device__ inline const __nv_bfloat16* rows_of(const void* at, int64_t elements) {
  return static_cast<const __nv_bfloat16*>(at) + elements;
}

// Of tokens with one label, all but the first have the flag, and each the number of the next; the
// last has 0, which is no token's next.
inline constexpr uint32_t kIsLater = 1u << 31;

// What the tokens of a CTA's warps have of these, of which each thread gets its warp's. All
// threads look at all labels together.
__device__ inline uint32_t sharing(const FusedProductArguments& a) {
  __shared__ uint32_t is_later[kTokenWarps], next[kTokenWarps];
  const uint32_t first = blockIdx.x * kTokenWarps, warp = threadIdx.x / 32;
  const uint32_t tokens = static_cast<uint32_t>(a.row.tokens);
  if (threadIdx.x < kTokenWarps) is_later[threadIdx.x] = 0, next[threadIdx.x] = tokens;
  __syncthreads();
  int64_t own[kTokenWarps];
#pragma unroll
  for (uint32_t w = 0; w < kTokenWarps; ++w) own[w] = label_at(a.row, min(first + w, tokens - 1));
#pragma unroll 4
  for (uint32_t other = threadIdx.x; other < tokens; other += kTokenThreads) {
    const int64_t label = label_at(a.row, other);
#pragma unroll
    for (uint32_t w = 0; w < kTokenWarps; ++w) {
      if (label != own[w]) continue;
      if (other < first + w) atomicOr(&is_later[w], kIsLater);
      if (other > first + w) atomicMin(&next[w], other);
    }
  }
  __syncthreads();
  return is_later[warp] | (next[warp] < tokens ? next[warp] : 0);
}

// Where that is until the token's hidden state, scaled, takes its place.
__device__ inline uint32_t& shared_of(const FusedProductArguments& a, int64_t index) {
  return *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(a.scaled_rows) + index * a.width);
}

// Of a row of the weight, the columns of D from `d` on.
__device__ inline void weight_at(const FusedProductArguments& a, const __nv_bfloat16* weight,
                                 int64_t d, float (&w)[kOfLane]) {
  if (a.width_step == 1) {
    unpack<__nv_bfloat16>(*reinterpret_cast<const uint4*>(weight + d), w);
    return;
  }
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) w[i] = to_float(weight[(d + i) * a.width_step]);
}

// How many powers of two the shift is above the logit that it is of, and for how many columns a
// finite logit is looked for.
inline constexpr float kAboveLabel = 58.0f;
inline constexpr int kTries = 8;

// A warp's logit of a token and a column, after softcap.
__device__ inline float logit_of(const FusedProductArguments& a, int64_t index, int64_t column) {
  const auto* hidden = rows_of(a.hidden_rows, index * a.width);
  const auto* weight = rows_of(a.weight_rows, column * a.vocab_step);
  float sum = 0.0f;
  for (int64_t d = threadIdx.x % 32 * kOfLane; d < a.width; d += kOfWarp) {
    float h[kOfLane], w[kOfLane];
    unpack<__nv_bfloat16>(*reinterpret_cast<const uint4*>(hidden + d), h);
    weight_at(a, weight, d, w);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) sum = fmaf(h[i], w[i], sum);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (a.bias != nullptr) sum += a.bias[column];
  return a.row.softcap > 0.0 ? Cap(a.row.softcap).apply(sum) : sum;
}

// Finds r, as a constant c, what takes part, which columns are labels, and who shares one. Where a
// label is no column's, its logit is not finite or the weight is [D, V], r is that of another
// column.
__device__ inline void begin_unnormalised(const FusedProductArguments& a) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.rescaled = 0;
  const uint32_t shared = sharing(a);
  const int64_t index = token_of_warp();
  if (index >= a.row.tokens) return;
  const Token token = describe<Pass::kFused>(a.row, label_at(a.row, index), a.row.dloss[index]);
  // A column of a weight [D, V] is read a number at a time: one that all tokens read is there already.
  const bool is_row = a.width_step == 1;
  float logit = logit_of(a, index, is_row ? max(token.target, 0) : 0);
  for (int i = 1; i < kTries && !isfinite(logit); ++i) {
    logit = logit_of(a, index, a.row.vocab * i / kTries);
  }
  if (threadIdx.x % 32 == 0) {
    if (token.target >= 0) atomicOr(a.labelled + token.target / 32, 1u << token.target % 32);
    // A whole number, so that a rescale is exact.
    const float c = isfinite(logit) ? rintf(logit * -a.row.scale) - kAboveLabel : -kAboveLabel;
    a.gradients[index] = {c, token.is_masked ? 0.0f : 1.0f, 0.0f, token.target};
    shared_of(a, index) = shared;
  }
}

// Writes a label's entry, if it is of this part of the columns.
__device__ inline void write_label(const FusedProductArguments& a, int64_t index, int64_t target,
                                   float entry) {
  if (target < a.part_first || target >= a.part_first + a.part_count) return;
  auto* row = static_cast<__nv_bfloat16*>(a.row.dlogits) + index * a.row.stride;
  row[target] = from_float<__nv_bfloat16>(entry);
}

// A row of the unnormalised softmax: what it adds up to, and what it does once rounded, both
// from the highest of its parts' shifts.
struct UnnormalisedRow {
  RowSum sum;
  float rounded;
};

// That of a token, of whose parts a warp's lanes take some each, in an order of their own.
__device__ inline UnnormalisedRow merged_by_warp(const FusedProductArguments& a, int64_t index,
                                                 const Token& token) {
  const uint32_t lane = threadIdx.x % 32;
  const auto place = [&](uint32_t part) { return static_cast<int64_t>(part) * a.row.tokens + index; };
  float c = kUnset;
  for (uint32_t part = lane; part < a.parts; part += 32) c = fminf(c, a.sums[place(part)].c);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) c = fminf(c, __shfl_xor_sync(~0u, c, offset));
  UnnormalisedRow all{{c, 0.0f, 0.0f, 0.0f}, 0.0f};
  for (uint32_t part = lane; part < a.parts; part += 32) {
    const PartSum sum = a.sums[place(part)];
    const float half = ptx::ex2((c - sum.c) * 0.5f);
    all.sum.exponentials += in_halves(sum.exponentials, half);
    all.rounded += in_halves(a.rounded[place(part)], half);
    if (a.values != nullptr) all.sum.values += a.values[place(part)];
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    all.sum.exponentials += __shfl_xor_sync(~0u, all.sum.exponentials, offset);
    all.rounded += __shfl_xor_sync(~0u, all.rounded, offset);
    all.sum.values += __shfl_xor_sync(~0u, all.sum.values, offset);
  }
  if (token.target >= 0) {
    const float x = a.label_logits[index];
    all.sum.label = a.row.softcap > 0.0 ? Cap(a.row.softcap).apply(x) : x;
  }
  return all;
}

// After the product that says more, before labels' logits are needed no more: a token's entropy, and
// of its likeliest column whether that is its label; -1 where it is not.
__device__ inline void write_distribution(const FusedProductArguments& a) {
  const int64_t index = token_of_warp();
  if (index >= a.row.tokens) return;
  const Token token = describe<Pass::kForward>(a.row, label_at(a.row, index), 0.0f);
  const UnnormalisedRow all = merged_by_warp(a, index, token);
  float weighted = 0.0f, before = -INFINITY, others = -INFINITY;
  for (uint32_t part = threadIdx.x % 32; part < a.parts; part += 32) {
    const int64_t place = static_cast<int64_t>(part) * a.row.tokens + index;
    weighted += in_halves(a.weighted[place], ptx::ex2((all.sum.c - a.sums[place].c) * 0.5f));
    if (a.largest == nullptr) continue;
    const float2 largest = a.largest[place];
    before = fmaxf(before, largest.x), others = fmaxf(others, largest.y);
  }
  weighted = sum_of_warp(weighted);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    before = fmaxf(before, __shfl_xor_sync(~0u, before, offset));
    others = fmaxf(others, __shfl_xor_sync(~0u, others, offset));
  }
  if (threadIdx.x % 32 != 0) return;
  const bool finite = all.sum.exponentials > 0.0f && all.sum.exponentials < INFINITY;
  const double mean = static_cast<double>(weighted) / all.sum.exponentials;
  const double entropy = finite ? fmax(all.sum.lse() - mean * a.row.per_element, 0.0) : NAN;
  const float x = token.target >= 0 ? a.label_logits[index] : NAN;
  a.row.entropy[index] = token.target == kIgnored ? 0.0f : static_cast<float>(entropy);
  if (a.largest == nullptr) return;
  a.row.argmax[index] = finite && before < x && others <= x ? token.target : -1;
}

// What the uniform target takes off each entry of a row.
__device__ inline float uniform_share(const FusedProductArguments& a, const Token& token,
                                      const UnnormalisedRow& all) {
  if (a.row.label_smoothing == 0.0) return 0.0f;
  const RowGradient row = RowGradient::of<true>(a.row, token, all.sum);
  return all.rounded *
         static_cast<float>(-static_cast<double>(row.offset) / (row.at_p * a.row.per_element));
}

// After the unnormalised softmax: brings all of a row, of the columns that have a place here, to
// one shift.
template <class E>
__device__ inline void align_unnormalised(const FusedProductArguments& a) {
  constexpr int kPer = kPerVector<E>;
  if (!is_open(a)) return;
  for (int64_t index = blockIdx.x; index < a.row.tokens; index += gridDim.x) {
    const Token token = describe<Pass::kFused>(a.row, label_at(a.row, index), a.row.dloss[index]);
    const UnnormalisedRow all = merged_by_warp(a, index, token);
    const float share = uniform_share(a, token, all);
    const float own = a.gradients[index].c;
    // A row of 0s stays one.
    if (token.is_masked || (all.sum.c == own && share == 0.0f)) continue;
    auto* row = static_cast<E*>(a.row.dlogits) + index * a.row.stride;
    const int64_t vectors = (a.part_count + kPer - 1) / kPer;
#pragma unroll 4
    for (int64_t v = threadIdx.x; v < vectors; v += kTokenThreads) {
      const int64_t tile = v * kPer / kTileColumns;
      const float rescale = a.rescales[tile * a.row.tokens + index] * kRescaleBits;
      const float half = ptx::ex2((all.sum.c - own + rescale) * 0.5f);
      if (half == 1.0f && share == 0.0f) continue;
      auto* at = reinterpret_cast<uint4*>(row) + v;
      float x[kPer];
      unpack<E>(*at, x);
#pragma unroll
      // A logit of -inf has no gradient.
      for (float& one : x) one = one == 0.0f ? 0.0f : in_halves(one, half) - share;
      *at = pack<E>(x);
    }
  }
}

// After the unnormalised softmax: a token's outputs, its factor, its label's entry, if that is of
// this part of the columns, and who shares the label, in the place of c. And its hidden state,
// times the factor.
__device__ inline void end_unnormalised(const FusedProductArguments& a) {
  using E = __nv_bfloat16;
  const int64_t index = token_of_warp();
  if (index >= a.row.tokens) return;
  const int64_t lane = threadIdx.x % 32;
  const Token token = describe<Pass::kFused>(a.row, label_at(a.row, index), a.row.dloss[index]);
  const UnnormalisedRow all = merged_by_warp(a, index, token);
  const float c = __uint_as_float(shared_of(a, index));
  float factor = 0.0f, label_term = 0.0f, at_label = 0.0f;
  if (!token.is_masked) {
    const RowGradient row = RowGradient::of<true>(a.row, token, all.sum);
    factor = all.rounded > 0.0f ? __fdividef(row.at_p, all.rounded) *
                                      static_cast<float>(a.row.per_element)
                                : NAN;
    // What other columns have to do with gradients is known by others.
    if (token.target >= 0 && token.target < a.written) {
      const double lse = all.sum.lse();
      const float x = a.label_logits[index];
      const float dz = a.row.softcap > 0.0
                           ? row.at_the_label<true>(a.row, token, x, Cap(a.row.softcap), lse)
                           : row.at_the_label<false>(a.row, token, x, Cap(1.0), lse);
      // A factor that underflows to 0 leaves all of it to what is added.
      at_label = to_float(from_float<E>(factor == 0.0f ? 0.0f : dz / factor));
      label_term = fmaf(-factor, at_label, dz);
    }
  }
  __syncwarp();
  if (lane == 0) {
    if (index == 0) *a.rescaled = 0;
    write_token<true>(a.row, index, token, all.sum);
    a.gradients[index] = {c, factor, label_term, token.target};
    // Its logit is not needed any more.
    a.label_logits[index] = at_label;
  }
  if (lane == 0 && !token.is_masked) write_label(a, index, token.target, at_label);
  // Rows begin at vectors: see `check` in src/fused_product.rs.
  const auto* from = reinterpret_cast<const uint4*>(rows_of(a.hidden_rows, index * a.width));
  auto* to = reinterpret_cast<uint4*>(static_cast<E*>(a.scaled_rows) + index * a.width);
  for (int64_t v = lane; v < a.width / kPerVector<E>; v += 32) {
    float x[kPerVector<E>];
    unpack<E>(from[v], x);
#pragma unroll
    // Of a token that takes no part exactly 0, whatever its hidden state.
    for (float& one : x) one = factor == 0.0f ? 0.0f : one * factor;
    to[v] = pack<E>(x);
  }
}

// After that: labels' entries of another part of the columns.
__device__ inline void write_labels(const FusedProductArguments& a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x;
  if (index >= a.row.tokens) return;
  const GradientOfToken of = a.gradients[index];
  if (of.factor == 0.0f && of.offset == 0.0f) return;
  write_label(a, index, of.target, a.label_logits[index]);
}

// Rows of sums in f32, each times its factor, and what its label's entry lacks. Where they go
// to f32, that may be their place.
template <class To>
__device__ inline void scale_sums(const FusedProductArguments& a) {
  const int64_t index = token_of_warp();
  if (index >= a.row.tokens) return;
  const GradientOfToken of = a.gradients[index];
  const bool is_masked = of.factor == 0.0f && of.offset == 0.0f;
  const bool lacks = of.offset != 0.0f && of.target >= 0;
  const auto* weight = rows_of(a.weight_rows, max(of.target, 0) * a.vocab_step);
  const auto* from = static_cast<const float*>(a.hidden_rows) + index * a.width;
  auto* to = static_cast<To*>(a.scaled_rows) + index * a.width;
  for (int64_t d = threadIdx.x % 32 * kOfLane; d < a.width; d += kOfWarp) {
    float x[kOfLane], w[kOfLane] = {};
#pragma unroll
    for (int v = 0; v < kOfLane / kPerVector<float>; ++v) {
      float some[kPerVector<float>];
      unpack<float>(reinterpret_cast<const uint4*>(from + d)[v], some);
#pragma unroll
      for (int i = 0; i < kPerVector<float>; ++i) x[v * kPerVector<float> + i] = some[i];
    }
    if (lacks) weight_at(a, weight, d, w);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) x[i] = is_masked ? 0.0f : fmaf(x[i], of.factor, of.offset * w[i]);
#pragma unroll
    for (int v = 0; v < kOfLane / kPerVector<To>; ++v) {
      float some[kPerVector<To>];
#pragma unroll
      for (int i = 0; i < kPerVector<To>; ++i) some[i] = x[v * kPerVector<To> + i];
      reinterpret_cast<uint4*>(to + d)[v] = pack<To>(some);
    }
  }
}

// Adds to `x` what one token lacks.
__device__ inline void add_token(const FusedProductArguments& a, int64_t token, int64_t d,
                                 float (&x)[kOfLane]) {
  const GradientOfToken of = a.gradients[token];
  if (of.factor == 0.0f && of.offset == 0.0f) return;
  const float e = to_float(*rows_of(a.row.dlogits, token * a.row.stride + of.target));
  const float dz = fmaf(of.factor, e, of.offset);
  float hidden[kOfLane];
  unpack<__nv_bfloat16>(
      *reinterpret_cast<const uint4*>(rows_of(a.hidden_rows, token * a.width + d)), hidden);
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const float scaled = to_float(from_float<__nv_bfloat16>(hidden[i] * of.factor));
    x[i] += fmaf(dz, hidden[i], -e * scaled);
  }
}

// Adds to `x` what all tokens lack that have the label of the first of them, in their order. What they
// lack of the bias' gradient.
__device__ inline float add_tokens(const FusedProductArguments& a, int64_t first, int64_t d,
                                   float (&x)[kOfLane]) {
  float of_bias = 0.0f;
  for (int64_t index = first;;) {
    // A row is whole vectors.
    if (d < a.width) add_token(a, index, d, x);
    const GradientOfToken own = a.gradients[index];
    of_bias += own.offset;
    index = __float_as_uint(own.c) & ~kIsLater;
    if (index == 0) return of_bias;
  }
}

// Whether a token is the first of those with its label.
__device__ inline bool is_first(const GradientOfToken& token) {
  return token.target >= 0 && (__float_as_uint(token.c) & kIsLater) == 0;
}

// Tokens whose labels it looks at before it writes for those that are its own.
inline constexpr int kLookedAt = 4096;

// Writes what tokens' labels' entries and hidden states lack of the weight's gradient [D, V], and 0
// to the columns of no label: each row whole, by way of shared memory. Alone, a label's columns are
// as many places far from one another.
__device__ inline void write_label_term(const FusedProductArguments& a) {
  using E = __nv_bfloat16;
  __shared__ alignas(16) E place[kRowsOfPlace][kColumnsOfPlace];
  constexpr int kVectors = kColumnsOfPlace / kPerVector<E>;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kColumnsOfPlace;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kRowsOfPlace, d = a.part_first + row;
  for (int i = threadIdx.x; i < kRowsOfPlace * kVectors; i += kTokenThreads) {
    reinterpret_cast<uint4*>(place)[i] = make_uint4(0, 0, 0, 0);
  }
  __shared__ uint16_t own[kLookedAt];
  __shared__ uint32_t count;
  for (int64_t begin = 0; begin < a.row.tokens; begin += kLookedAt) {
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const int tokens = static_cast<int>(min(static_cast<int64_t>(kLookedAt), a.row.tokens - begin));
#pragma unroll 8
    for (int i = threadIdx.x; i < tokens; i += kTokenThreads) {
      const int64_t column = label_at(a.row, begin + i) - first;
      if (static_cast<uint64_t>(column) < kColumnsOfPlace) own[atomicAdd(&count, 1)] = i;
    }
    __syncthreads();
    // In any order: a label's first token has its columns to itself.
    for (uint32_t i = threadIdx.x; i < count; i += kTokenThreads) {
      const int64_t index = begin + own[i];
      if (!is_first(a.gradients[index])) continue;
      const int64_t column = a.gradients[index].target - first;
      float x[kOfLane] = {};
      const float of_bias = add_tokens(a, index, d, x);
      if (d == 0 && a.dbias != nullptr) a.dbias[first + column] += of_bias;
#pragma unroll
      for (int row = 0; row < kRowsOfPlace; ++row) place[row][column] = from_float<E>(x[row]);
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kRowsOfPlace * kVectors; i += kTokenThreads) {
    const int64_t column = first + i % kVectors * kPerVector<E>;
    if (row + i / kVectors >= a.part_count || column >= a.row.vocab) continue;
    auto* to = static_cast<E*>(a.part) + (row + i / kVectors) * a.part_stride + column;
    *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4*>(place)[i];
  }
}

// Adds what tokens' labels' entries and hidden states lack to rows of the weight's gradient, or
// of its transpose with kVocabIsLast, a warp for a token and kOfWarp columns; or writes it, where
// rows have nothing yet. The first token of those with the same label takes them all.
template <class To, bool kVocabIsLast>
__device__ inline void add_label_term(const FusedProductArguments& a) {
  const int64_t index = token_of_warp();
  if (index >= a.row.tokens) return;
  const int64_t lane = threadIdx.x % 32,
                d = static_cast<int64_t>(blockIdx.y) * kOfWarp + lane * kOfLane;
  const GradientOfToken own = a.gradients[index];
  const int64_t row = own.target - a.part_first;
  const bool elsewhere = !kVocabIsLast && (row < 0 || row >= a.part_count);
  if (!is_first(own) || elsewhere) return;
  float x[kOfLane] = {};
  const float of_bias = add_tokens(a, index, d, x);
  if (d == 0 && a.dbias != nullptr) a.dbias[own.target] += of_bias;
  const auto place = [&](int i) -> To* {
    const int64_t of_part = kVocabIsLast ? d + i - a.part_first : row;
    if (d >= a.width || of_part < 0 || of_part >= a.part_count) return nullptr;
    return static_cast<To*>(a.part) + of_part * a.part_stride + (kVocabIsLast ? own.target : d + i);
  };
  // All are read before the first is written, which would have the others wait.
  if (a.labelled == nullptr) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) x[i] += place(i) == nullptr ? 0.0f : to_float(*place(i));
  }
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    if (place(i) != nullptr) *place(i) = from_float<To>(x[i]);
  }
}

#endif

}  // namespace xentile

// Cross-entropy over logits: what a token's numbers are, whichever way its row travels.
//
// Exponentials are 2^(x*kLog2E + c) with one f32 constant c a row, so that an element costs one
// fused multiply-add and one ex2. Rounding c shifts every exponential of the row alike, and
// cancels: what a row adds up to is (log2(sum) - c) / kLog2E, exactly as far as c is concerned.
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "ptx.cuh"

namespace xentile {

enum class Pass { kForward, kBackward, kFused };

struct RowSum;

// Mirrored by `Arguments` in src/cross_entropy.rs. Logits are all columns of the vocabulary or
// some: `columns` of them from `first_column` on.
struct CrossEntropyArguments {
  const void* logits;  // [tokens, columns], `stride` elements from row to row
  void* dlogits;       // as the logits, whose memory it may be
  const void* labels;  // [tokens]
  // Everything else is f32 [tokens]; outputs may be null, and in the backward pass cotangents that
  // are 0.
  const float* dloss;
  const float* dlogps;
  const float* dlse;
  const float* saved_lse;
  const float* saved_lse_low;
  float* loss;
  float* logps;
  float* lse;
  float* lse_low;
  // What the rows added up to in the columns before these, and where their sum goes instead of the
  // outputs while there are more to come; null for rows that are whole.
  RowSum* carried;
  int64_t tokens;
  int64_t vocab;
  int64_t columns;
  int64_t stride;
  int64_t first_column;
  int64_t ignore_index;
  double label_smoothing;
  double z_loss;
  double softcap;
  uint32_t labels_are_64_bit;
  uint32_t every_token;
  // The plan: see src/cross_entropy/plan.rs.
  uint32_t time_block;
  uint32_t chunk_vectors;
  uint32_t chunks;
  uint32_t slots;
};

inline constexpr float kLog2E = 1.44269504f;
inline constexpr double kPerLog2E = 1.0 / static_cast<double>(kLog2E);

// As the constant c of a row: no element was seen that could set it.
inline constexpr float kUnset = 1e30f;

// A sum above this asks for a new c, long before f32 overflows.
inline constexpr float kLargeSum = 0x1p64f;

inline constexpr int kIgnored = -1;
inline constexpr int kOutOfRange = -2;
inline constexpr int kElsewhere = -3;  // in columns that are not here

// Where a column of the vocabulary is among these.
__device__ inline int target_here(const CrossEntropyArguments& a, int64_t column) {
  const int64_t here = column - a.first_column;
  return static_cast<uint64_t>(here) < static_cast<uint64_t>(a.columns) ? static_cast<int>(here)
                                                                        : kElsewhere;
}

// The column of a label, or what else it is.
__device__ inline int target_of(const CrossEntropyArguments& a, int64_t label) {
  if (label == a.ignore_index) return kIgnored;
  if (static_cast<uint64_t>(label) >= static_cast<uint64_t>(a.vocab)) return kOutOfRange;
  return target_here(a, label);
}

__device__ inline int64_t label_at(const CrossEntropyArguments& a, int64_t index) {
  return a.labels_are_64_bit ? static_cast<const int64_t*>(a.labels)[index]
                             : static_cast<const int32_t*>(a.labels)[index];
}

// What is known of a token before its row is read.
struct Token {
  int target;  // a column of these, kIgnored, kOutOfRange or kElsewhere
  bool idle;   // takes no part in the gradient
  bool read;   // its row is needed
  float dloss, dlogps, dlse;
  float lse, lse_low;

  // The lse that the forward pass saved.
  __device__ double saved() const {
    return static_cast<double>(lse) + static_cast<double>(lse_low);
  }
};

// What the passes that read whole rows know of a token: of cotangents only the loss's, if any.
template <Pass kPass>
__device__ inline Token describe(const CrossEntropyArguments& a, int64_t label, float dloss) {
  Token token{};
  token.target = target_of(a, label);
  token.dloss = dloss;
  token.idle = token.target == kIgnored || (kPass == Pass::kFused && dloss == 0.0f);
  token.read = !token.idle || a.every_token != 0;
  return token;
}

// What the backward pass from saved lse knows of a token.
__device__ inline Token describe_saved(const CrossEntropyArguments& a, int64_t index) {
  Token token{};
  token.target = target_of(a, label_at(a, index));
  token.dloss = a.dloss == nullptr ? 0.0f : a.dloss[index];
  token.dlogps = a.dlogps == nullptr ? 0.0f : a.dlogps[index];
  token.dlse = a.dlse == nullptr ? 0.0f : a.dlse[index];
  token.lse = a.saved_lse[index];
  token.lse_low = a.saved_lse_low[index];
  token.idle = token.target == kIgnored ||
               (token.dloss == 0.0f && token.dlogps == 0.0f && token.dlse == 0.0f);
  return token;
}

// c*tanh(x/c) and its derivative. Writes tanh(u) as 1 - 2/(1 + e^2u), and near 0, where that
// cancels, as its Taylor polynomial.
struct Cap {
  float cap, inverse;

  __device__ explicit Cap(double softcap)
      : cap(static_cast<float>(softcap)), inverse(static_cast<float>(1.0 / softcap)) {}

  __device__ float exponential(float u) const { return ptx::ex2(u * (2.0f * kLog2E)); }

  __device__ float apply(float x) const {
    const float u = x * inverse;
    const float far = 1.0f - 2.0f * ptx::rcp(1.0f + exponential(u));
    const float square = u * u;
    float near = fmaf(square, 62.0f / 2835.0f, -17.0f / 315.0f);
    near = fmaf(square, near, 2.0f / 15.0f);
    near = fmaf(square, near, -1.0f / 3.0f);
    near = fmaf(square * u, near, u);
    return cap * (fabsf(u) < 0.25f ? near : far);
  }

  // The derivative where `apply` gave `z`.
  __device__ float derivative_at(float z) const {
    const float t = z * inverse;
    return fmaxf(fmaf(-t, t, 1.0f), 0.0f);
  }

  __device__ float derivative(float x) const {
    const float e = fminf(exponential(x * inverse), 1e38f);
    const float r = ptx::rcp(1.0f + e);
    return 4.0f * (e * r) * r;
  }
};

// The sum of 2^(z*kLog2E + c) over what one lane has seen, and where asked for the sum of z.
template <class E, bool kSum, bool kCap>
struct LaneSum {
  float c = kUnset;
  float exponentials = 0.0f;
  float values = 0.0f;

  __device__ static float shift(float max) { return fminf(max * -kLog2E, kUnset); }

  // Adds every `kStride`th of the vectors from `first` on, below `end`.
  template <uint32_t kStride = 32>
  __device__ void add(const uint4* vectors, uint32_t first, uint32_t end, const Cap& cap) {
    if (first >= end) return;
    if (c == kUnset) c = shift(max_of(vectors[first], cap));
    const float before = exponentials;
    float partial[4] = {exponentials, 0.0f, 0.0f, 0.0f};
    float total[2] = {values, 0.0f};
    constexpr uint32_t kBatch = 2;
    uint32_t v = first;
    for (; v + kStride * (kBatch - 1) < end; v += kStride * kBatch) {
      uint4 batch[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) batch[i] = vectors[v + kStride * i];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) add(batch[i], cap, partial, total);
    }
    for (; v < end; v += kStride) add(vectors[v], cap, partial, total);
    exponentials = (partial[0] + partial[1]) + (partial[2] + partial[3]);
    if constexpr (kSum) values = total[0] + total[1];
    if (!(exponentials <= kLargeSum)) {
      const float2 anew = add_anew<kStride>(vectors, first, end, cap, c, before);
      c = anew.x;
      exponentials = anew.y;
    }
  }

  __device__ void add(const uint4& vector, const Cap& cap, float (&partial)[4],
                      float (&total)[2]) const {
    float x[kPerVector<E>];
    unpack<E>(vector, x);
#pragma unroll
    for (int i = 0; i < kPerVector<E>; ++i) {
      const float z = kCap ? cap.apply(x[i]) : x[i];
      partial[i % 4] += ptx::ex2(fmaf(z, kLog2E, c));
      if constexpr (kSum) total[i % 2] += z;
    }
  }

  // c and the sum, with a c that fits these vectors too: for a row that starts far below its
  // maximum.
  template <uint32_t kStride>
  __device__ __noinline__ static float2 add_anew(const uint4* vectors, uint32_t first, uint32_t end,
                                                 Cap cap, float c, float before) {
    float max = -INFINITY;
    for (uint32_t v = first; v < end; v += kStride) max = fmaxf(max, max_of(vectors[v], cap));
    const float fitting = fminf(shift(max), c);
    float sum = before * ptx::ex2(fitting - c);
    for (uint32_t v = first; v < end; v += kStride) {
      float x[kPerVector<E>];
      unpack<E>(vectors[v], x);
#pragma unroll
      for (int i = 0; i < kPerVector<E>; ++i) {
        const float z = kCap ? cap.apply(x[i]) : x[i];
        sum += ptx::ex2(fmaf(z, kLog2E, fitting));
      }
    }
    return make_float2(fitting, sum);
  }

  // Adds one element.
  __device__ void add(float x, const Cap& cap) {
    const float z = kCap ? cap.apply(x) : x;
    const float own = shift(z);
    const float fitting = fminf(own, c);
    exponentials = exponentials * ptx::ex2(fitting - c) + ptx::ex2(fmaf(z, kLog2E, fitting));
    c = fitting;
    if constexpr (kSum) values += z;
  }

  __device__ static float max_of(const uint4& vector, const Cap& cap) {
    float x[kPerVector<E>];
    unpack<E>(vector, x);
    float max = x[0];
#pragma unroll
    for (int i = 1; i < kPerVector<E>; ++i) max = fmaxf(max, x[i]);
    return kCap ? cap.apply(max) : max;
  }
};

// A part of a row, or all of it: sums, and the label's logit (0 in parts without it).
struct RowSum {
  float c, exponentials, values, label;

  __device__ static RowSum none() { return {kUnset, 0.0f, 0.0f, 0.0f}; }

  __device__ void merge(const RowSum& other) {
    const float common = fminf(c, other.c);
    exponentials =
        exponentials * ptx::ex2(common - c) + other.exponentials * ptx::ex2(common - other.c);
    c = common;
    values += other.values;
    label += other.label;
  }

  // Merges those of the lanes of a warp, in an order that is always the same; not `label`.
  template <bool kSum>
  __device__ RowSum across_lanes() const {
    RowSum all = *this;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      all.c = fminf(all.c, __shfl_xor_sync(~0u, all.c, offset));
    }
    all.exponentials *= ptx::ex2(all.c - c);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      all.exponentials += __shfl_xor_sync(~0u, all.exponentials, offset);
      if constexpr (kSum) all.values += __shfl_xor_sync(~0u, all.values, offset);
    }
    return all;
  }

  // NaN over a row with no finite sum.
  __device__ double lse() const {
    return exponentials > 0.0f && exponentials < INFINITY
               ? (log2(static_cast<double>(exponentials)) - c) * kPerLog2E
               : NAN;
  }
};

// Writes a token's outputs, given the sums of its row (of none, if that was not read).
template <bool kSum>
__device__ inline void write_token(const CrossEntropyArguments& a, int64_t row, const Token& token,
                                   const RowSum& sum) {
  double loss = 0.0, logps = 0.0, lse = 0.0;
  if (token.read) {
    lse = sum.lse();
    if (token.target == kOutOfRange) {
      loss = logps = NAN;
    } else if (token.target != kIgnored) {
      logps = static_cast<double>(sum.label) - lse;
      loss = (1.0 - a.label_smoothing) * -logps + a.z_loss * lse * lse;
      if (kSum && a.label_smoothing != 0.0) {
        loss += a.label_smoothing *
                (lse - static_cast<double>(sum.values) / static_cast<double>(a.vocab));
      }
    }
  }
  if (a.loss != nullptr) a.loss[row] = static_cast<float>(loss);
  if (a.logps != nullptr) a.logps[row] = static_cast<float>(logps);
  const float high = static_cast<float>(lse);
  if (a.lse != nullptr) a.lse[row] = high;
  if (a.lse_low != nullptr) a.lse_low[row] = static_cast<float>(lse - static_cast<double>(high));
}

// Adds what a row added up to in the columns before these.
__device__ inline void add_carried(const CrossEntropyArguments& a, int64_t row, RowSum& sum) {
  if (a.carried != nullptr && a.first_column > 0) sum.merge(a.carried[row]);
}

// Writes a token's outputs; or, while more of its columns are to come, its sums so far.
template <bool kSum>
__device__ inline void end_row(const CrossEntropyArguments& a, int64_t row, const Token& token,
                               const RowSum& sum) {
  if (a.carried != nullptr && a.first_column + a.columns < a.vocab) {
    a.carried[row] = sum;
  } else {
    write_token<kSum>(a, row, token, sum);
  }
}

// The gradient of a row: factor * 2^(z*kLog2E + c) + offset away from the label.
struct RowGradient {
  float c, factor, offset;
  float at_p;  // what multiplies p: g*(1 + 2*w*lse) - h + k

  // From the sums of the row.
  template <bool kSmooth>
  __device__ static RowGradient of(const CrossEntropyArguments& a, const Token& token,
                                   const RowSum& sum) {
    RowGradient row = coefficients<kSmooth>(a, token);
    if (a.z_loss != 0.0) row.at_p = with_z_loss(a, token, sum.lse());
    row.c = sum.c;
    row.factor = sum.exponentials > 0.0f ? __fdividef(row.at_p, sum.exponentials) : NAN;
    return row;
  }

  // From the lse that the forward pass saved.
  template <bool kSmooth>
  __device__ static RowGradient of(const CrossEntropyArguments& a, const Token& token) {
    const double lse = token.saved();
    RowGradient row = coefficients<kSmooth>(a, token);
    if (a.z_loss != 0.0) row.at_p = with_z_loss(a, token, lse);
    const double exact = -lse * static_cast<double>(kLog2E);
    row.c = static_cast<float>(exact);
    row.factor = row.at_p * exp2f(static_cast<float>(exact - static_cast<double>(row.c)));
    return row;
  }

  template <bool kSmooth>
  __device__ static RowGradient coefficients(const CrossEntropyArguments& a, const Token& token) {
    RowGradient row{};
    row.at_p = token.dloss - token.dlogps + token.dlse;
    if (token.target == kOutOfRange) row.at_p = NAN;
    if constexpr (kSmooth) {
      row.offset = static_cast<float>(-token.dloss * a.label_smoothing / a.vocab);
    }
    return row;
  }

  __device__ static float with_z_loss(const CrossEntropyArguments& a, const Token& token,
                                      double lse) {
    if (token.target == kOutOfRange) return NAN;
    return static_cast<float>(token.dloss * (1.0 + 2.0 * a.z_loss * lse) - token.dlogps +
                              token.dlse);
  }

  template <bool kSmooth, bool kCap>
  __device__ float at(float x, const Cap& cap) const {
    const float z = kCap ? cap.apply(x) : x;
    const float exponential = ptx::ex2(fmaf(z, kLog2E, c));
    float dz = exponential * factor;
    if constexpr (kSmooth) dz += x == -INFINITY && !kCap ? 0.0f : offset;
    if constexpr (kCap) dz *= cap.derivative(x);
    return dz;
  }

  template <class E, bool kSmooth, bool kCap>
  __device__ uint4 of_vector(const uint4& vector, const Cap& cap) const {
    float x[kPerVector<E>];
    unpack<E>(vector, x);
#pragma unroll
    for (int i = 0; i < kPerVector<E>; ++i) x[i] = at<kSmooth, kCap>(x[i], cap);
    return pack<E>(x);
  }

  // At the label, whose logit is `x`: p - 1 in one piece, since p may be close to 1.
  template <bool kCap>
  __device__ float at_the_label(const CrossEntropyArguments& a, const Token& token, float x,
                                const Cap& cap, double row_lse) const {
    if (!kCap && x == -INFINITY && row_lse == row_lse) return 0.0f;
    const float z = kCap ? cap.apply(x) : x;
    const double g = token.dloss, k = token.dlse;
    const double rest = g * (2.0 * a.z_loss * row_lse + a.label_smoothing) + k;
    double dz = (g * (1.0 + 2.0 * a.z_loss * row_lse) - token.dlogps + k) *
                    expm1(static_cast<double>(z) - row_lse) +
                rest + static_cast<double>(offset);
    if constexpr (kCap) dz *= static_cast<double>(cap.derivative(x));
    return static_cast<float>(dz);
  }
};

}  // namespace xentile

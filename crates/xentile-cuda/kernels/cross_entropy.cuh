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
#include "warp.cuh"

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
  // Where a row has more warps than its sum has columns of pieces: see ring.cuh.
  uint32_t columns_of_pieces;
  uint32_t pieces_of_a_column;
  // The packed schedule's: lanes of a row, and whether rows are whole vectors.
  uint32_t lanes;
  uint32_t whole_vectors;
  // A temperature: what an element, capped if it is, is multiplied by in a base-2 exponent, and
  // the same without kLog2E.
  double per_element;
  float scale;
  // What is said of the distribution: outputs and what they are made from may be null.
  float* entropy;
  float* highest;
  int32_t* argmax;
  const float* saved_entropy;
  const float* dentropy;
};

inline constexpr float kLog2E = 1.44269504f;
inline constexpr double kPerLog2E = 1.0 / static_cast<double>(kLog2E);
static_assert(kLog2E * static_cast<float>(kPerLog2E) == 1.0f, "no temperature changes a bit");

// As the constant c of a row: no element was seen that could set it.
inline constexpr float kUnset = 1e30f;

// A sum above this asks for a new c, long before f32 overflows.
inline constexpr float kLargeSum = 0x1p64f;

// Of an exponential below this nothing is left, and its product with an exponent that is no less is none.
inline constexpr float kLeastExponent = -160.0f;

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
  bool is_masked;  // takes no part in the gradient
  bool read;   // its row is needed
  float dloss, dlogps, dlse;
  float lse, lse_low;

  // The lse that the forward pass saved.
  __device__ double saved() const {
    return static_cast<double>(lse) + static_cast<double>(lse_low);
  }
};

// What the passes that read whole rows know of a token: of cotangents only the loss's, if any. With
// `kSaysMore` a token whose loss has none has outputs nevertheless.
template <Pass kPass, bool kSaysMore = false>
__device__ inline Token describe(const CrossEntropyArguments& a, int64_t label, float dloss) {
  Token token{};
  token.target = target_of(a, label);
  token.dloss = dloss;
  token.is_masked = token.target == kIgnored || (kPass == Pass::kFused && dloss == 0.0f);
  const bool unread = kSaysMore ? token.target == kIgnored : token.is_masked;
  token.read = !unread || a.every_token != 0;
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
  token.is_masked = token.target == kIgnored ||
               (token.dloss == 0.0f && token.dlogps == 0.0f && token.dlse == 0.0f);
  return token;
}

// How far logits are from 0, beside a cap c: it decides how their tanh is computed.
enum class Reach {
  kClose,    // none beyond c/4
  kNear,     // none beyond c
  kFar,
  kUnknown,  // to be found out
};

// c*tanh(x/c) and its derivative.
struct Capped {
  double z, slope;
};

struct NoTemperature {
  static constexpr float scale = kLog2E;

  __device__ explicit NoTemperature(float) {}
};

struct AnyTemperature {
  float scale;

  __device__ explicit AnyTemperature(float its) : scale(its) {}
};

// Makes them for one element or several.
//
// One element: tanh(u) as 1 - 2/(1 + e^2u), and near 0, where that cancels, as its Taylor polynomial.
// Several: while none is beyond c, a polynomial in x^2, on the units for multiply-adds alone. Else
// with e = e^(-2|u|): q = e/(1 + e), tanh|u| = 1 - 2q and its derivative 4q(1 - q), which keep their
// digits where the tanh nears 1; four reciprocals are made of one.
//
// `scale` is what their result is multiplied by in an exponent: kLog2E over the temperature.
template <class Scale>
struct CapOf : Scale {
  using Scale::scale;

  float cap, inverse;
  // tanh(sqrt(s))/sqrt(s) = 1 + a[0]*s + .. + a[6]*s^7 for s in [0, 1], to 2e-8 (Chebyshev); here
  // with s = x^2 and times `scale`.
  float series[7];
  float taylor[4];  // the first terms of its own series, alike
  float near;       // up to where |x| has the polynomial
  float per_unit;   // 1/(c*scale)

  __device__ explicit CapOf(double softcap, float exponent_scale = kLog2E)
      : Scale(exponent_scale),
        cap(static_cast<float>(softcap)),
        inverse(static_cast<float>(1.0 / softcap)) {
    constexpr float a[7] = {-0.3333333f,    0.13333128f,  -0.05393479f,  0.021660116f,
                            -0.008218922f, 0.0025104594f, -0.0004206955f};
    constexpr float b[4] = {-1.0f / 3.0f, 2.0f / 15.0f, -17.0f / 315.0f, 62.0f / 2835.0f};
    const float square = inverse * inverse;
    float power = scale;
#pragma unroll
    for (int i = 0; i < 7; ++i) {
      power *= square;
      series[i] = a[i] * power;
      if (i < 4) taylor[i] = b[i] * power;
    }
    // Powers of an extreme cap leave f32.
    near = cap > 0x1p-8f && cap < 0x1p60f ? cap : -1.0f;
    if constexpr (!std::is_same_v<Scale, NoTemperature>) near = power < INFINITY ? near : -1.0f;
    per_unit = inverse * (1.0f / scale);
  }

  // What a sum of elements as they are in an exponent, or of capped ones, is multiplied by.
  __device__ float per_element() const { return scale * static_cast<float>(kPerLog2E); }

  __device__ float exponential(float u) const { return ptx::ex2(u * (2.0f * kLog2E)); }

  __device__ float apply(float x) const {
    const float u = x * inverse;
    const float far = 1.0f - 2.0f * ptx::rcp(1.0f + exponential(u));
    const float square = u * u;
    float close = fmaf(square, 62.0f / 2835.0f, -17.0f / 315.0f);
    close = fmaf(square, close, 2.0f / 15.0f);
    close = fmaf(square, close, -1.0f / 3.0f);
    close = fmaf(square * u, close, u);
    return cap * (fabsf(u) < 0.25f ? close : far);
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

  // What the largest |x| says of all.
  __device__ Reach reach(float most) const {
    return most <= 0.25f * near ? Reach::kClose : most <= near ? Reach::kNear : Reach::kFar;
  }

  // c*tanh(x/c)*scale of an element within `near`.
  template <int kTerms>
  __device__ float polynomial(float x, const float (&terms)[kTerms]) const {
    const float square = x * x;
    float y = terms[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) y = fmaf(square, y, terms[i]);
    return x * fmaf(square, y, scale);
  }

  __device__ float slope_at(float y) const {
    const float t = y * per_unit;
    return fmaf(-t, t, 1.0f);
  }

  // c*tanh(x/c)*scale of each, and if asked for c's derivatives. Of far ones, elements close to 0
  // beside ones that are not have an error of c*2^-22, unless exact.
  template <Reach kReach, bool kExact, bool kSlope, int kCount>
  __device__ void scaled(const float (&x)[kCount], float (&y)[kCount],
                         float (&slope)[kCount]) const {
    if constexpr (kReach == Reach::kUnknown) {
      float most = fabsf(x[0]);
#pragma unroll
      for (int i = 1; i < kCount; ++i) most = fmaxf(most, fabsf(x[i]));
      if (most <= near) {
        scaled<Reach::kNear, kExact, kSlope>(x, y, slope);
      } else {
        scaled<Reach::kFar, kExact, kSlope>(x, y, slope);
      }
      return;
    }
    if constexpr (kReach == Reach::kClose || kReach == Reach::kNear) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        y[i] = kReach == Reach::kClose ? polynomial(x[i], taylor) : polynomial(x[i], series);
        if constexpr (kSlope) slope[i] = slope_at(y[i]);
      }
      return;
    }
    const float all = cap * scale;
    constexpr int kShared = kCount % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int first = 0; first < kCount; first += kShared) {
      float e[kShared], r[kShared];
#pragma unroll
      for (int i = 0; i < kShared; ++i) {
        e[i] = ptx::ex2(fabsf(x[first + i]) * (inverse * (-2.0f * kLog2E)));
        r[i] = 1.0f + e[i];
      }
      reciprocals(r);
#pragma unroll
      for (int i = 0; i < kShared; ++i) {
        const float q = e[i] * r[i];
        y[first + i] = copysignf(fmaf(q, -2.0f * all, all), x[first + i]);
        if constexpr (kSlope) slope[first + i] = 4.0f * (q * r[i]);
        if constexpr (kExact) {
          if (fabsf(x[first + i]) <= near) {
            y[first + i] = polynomial(x[first + i], series);
            if constexpr (kSlope) slope[first + i] = slope_at(y[first + i]);
          }
        }
      }
    }
  }

  // One element of a vector, with the bits that `scaled` gives it among the others: where a label has
  // nearly all of its row's sum, p - 1 is right only if both have the same z.
  template <Reach kReach, bool kExact, class E>
  __device__ Capped one_of(const uint4& vector, uint32_t place) const {
    float x[kPerVector<E>], y[kPerVector<E>], slope[kPerVector<E>];
    unpack<E>(vector, x);
    scaled<kReach, kExact, true>(x, y, slope);
    Capped found{};
#pragma unroll
    for (uint32_t i = 0; i < kPerVector<E>; ++i) {
      if (i == place) found = {y[i] * kPerLog2E, slope[i]};
    }
    return found;
  }

  // Of numbers from 1 to 2.
  template <int kCount>
  __device__ static void reciprocals(float (&x)[kCount]) {
    if constexpr (kCount == 4) {
      const float low = x[0] * x[1], high = x[2] * x[3];
      const float r = ptx::rcp(low * high);
      const float of_low = r * high, of_high = r * low;
      const float first = of_low * x[1], third = of_high * x[3];
      x[1] = of_low * x[0];
      x[3] = of_high * x[2];
      x[0] = first;
      x[2] = third;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = ptx::rcp(x[i]);
    }
  }
};

using Cap = CapOf<NoTemperature>;
using TemperedCap = CapOf<AnyTemperature>;

// What a kernel has: a softcap whose kernels have no temperature has constants for it.
template <bool kCap, bool kTempered>
using CapFor = std::conditional_t<kCap && !kTempered, Cap, TemperedCap>;

// A part of a row, or all of it: sums, and the label's logit (0 in parts without it). That has no
// temperature yet; `values` has.
struct RowSum {
  static constexpr bool kWeighted = false;  // distribution.cuh has more of them

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

// The c that makes the exponential of `max` 1.
__device__ inline float shift_of(float max, float scale = kLog2E) {
  return fminf(max * -scale, kUnset);
}

// How sums of e*y are made, where they are asked for.
enum class Weigh {
  kNot,
  kFinite,  // of finite exponents: an infinite one makes them NaN
  kAny,
};

// What a warp makes of a piece of a row: sums whose order the piece alone decides. Every lane has
// them. c comes from the largest of the piece: what counts in the sum so has a small exponent, whose
// rounding is small too.
template <class E, bool kSum, bool kCap, class Sum = RowSum, class AnyCap = TemperedCap>
struct Piece {
  // Whether tanh needs all its digits: not of 16-bit elements, where many average its errors out.
  static constexpr bool kExact = sizeof(E) == 4;

  // Of every 32nd of the vectors in shared memory from `first` on, below `end`, for each lane. Products
  // are summed if `weighs`.
  __device__ static Sum sum(const uint4* vectors, uint32_t first, uint32_t end, const AnyCap& cap,
                            Reach& reach, bool weighs) {
    Extremes<E, kCap> extremes;
#pragma unroll 2
    for (uint32_t v = first; v < end; v += 32) extremes.add(vectors[v]);
    const float max = max_of_warp(extremes.max());
    Sum all;
    if constexpr (!kCap) {
      all = weighed<Reach::kUnknown>(vectors, first, end, cap, shift_of(max, cap.scale), weighs);
    } else {
      reach = cap.reach(max_of_warp(extremes.max_abs()));
      const float c = shift_of(cap.apply(max), cap.scale);
      switch (reach) {
        case Reach::kClose: all = weighed<Reach::kClose>(vectors, first, end, cap, c, weighs); break;
        case Reach::kNear: all = weighed<Reach::kNear>(vectors, first, end, cap, c, weighs); break;
        default: all = weighed<Reach::kFar>(vectors, first, end, cap, c, weighs);
      }
    }
    if constexpr (Sum::kWeighted) all.highest = max;
    return all;
  }

  // A cap leaves exponents finite. Elsewhere -inf is rare, and a piece that has one is summed again.
  template <Reach kReach>
  __device__ static Sum weighed(const uint4* vectors, uint32_t first, uint32_t end,
                                const AnyCap& cap, float c, bool weighs) {
    if constexpr (Sum::kWeighted) {
      if (weighs && kCap) return sum<kReach, Weigh::kAny>(vectors, first, end, cap, c);
      if (weighs) {
        const Sum finite = sum<kReach, Weigh::kFinite>(vectors, first, end, cap, c);
        return finite.weighted == finite.weighted
                   ? finite
                   : sum<kReach, Weigh::kAny>(vectors, first, end, cap, c);
      }
    }
    return sum<kReach, Weigh::kNot>(vectors, first, end, cap, c);
  }

  template <Reach kReach, Weigh kWeigh>
  __device__ static Sum sum(const uint4* vectors, uint32_t first, uint32_t end, const AnyCap& cap,
                            float c) {
    float partial[4] = {}, total[2] = {}, weighted[2] = {};
    constexpr uint32_t kBatch = 2;
    uint32_t v = first;
    for (; v + 32 * (kBatch - 1) < end; v += 32 * kBatch) {
      uint4 batch[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) batch[i] = vectors[v + 32 * i];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        add<kReach, kExact, kWeigh>(batch[i], cap, c, partial, total, weighted);
      }
    }
    for (; v < end; v += 32) {
      add<kReach, kExact, kWeigh>(vectors[v], cap, c, partial, total, weighted);
    }
    Sum all = Sum::none();
    all.c = c;
    all.exponentials = sum_of_warp((partial[0] + partial[1]) + (partial[2] + partial[3]));
    if constexpr (kSum) all.values = sum_of_warp(total[0] + total[1]) * per_value(cap);
    if constexpr (kWeigh != Weigh::kNot) all.weighted = sum_of_warp(weighted[0] + weighted[1]);
    return all;
  }

  // Of every `kStride`th of the vectors in memory, which are read once: each has a c of its own.
  template <uint32_t kStride>
  __device__ static RowSum sum_once(const uint4* vectors, uint32_t first, uint32_t end,
                                    const AnyCap& cap) {
    RowSum all = RowSum::none();
    for (uint32_t v = first; v < end; v += kStride) {
      const uint4 vector = vectors[v];
      Extremes<E, false> extremes;
      extremes.add(vector);
      const float max = extremes.max();
      RowSum one = RowSum::none();
      one.c = shift_of(kCap ? cap.apply(max) : max, cap.scale);
      float partial[4] = {}, total[2] = {};
      add<Reach::kUnknown>(vector, cap, one.c, partial, total);
      one.exponentials = (partial[0] + partial[1]) + (partial[2] + partial[3]);
      if constexpr (kSum) one.values = (total[0] + total[1]) * per_value(cap);
      all.merge(one);
    }
    return all.template across_lanes<kSum>();
  }

  // What `total` holds is as in an exponent under a cap, and as it was given without.
  __device__ static float per_value(const AnyCap& cap) {
    return kCap ? static_cast<float>(kPerLog2E) : cap.per_element();
  }

  template <Reach kReach, bool kDigits = kExact>
  __device__ static void add(const uint4& vector, const AnyCap& cap, float c, float (&partial)[4],
                             float (&total)[2]) {
    static_assert(!Sum::kWeighted);
    float none[2];
    add<kReach, kDigits, Weigh::kNot>(vector, cap, c, partial, total, none);
  }

  template <Reach kReach, bool kDigits, Weigh kWeigh>
  __device__ static void add(const uint4& vector, const AnyCap& cap, float c, float (&partial)[4],
                             float (&total)[2], float (&weighted)[2]) {
    const auto exponentiate = [&](float exponent, int i) {
      const float exponential = ptx::ex2(exponent);
      partial[i % 4] += exponential;
      if constexpr (kWeigh == Weigh::kAny) exponent = fmaxf(exponent, kLeastExponent);
      if constexpr (kWeigh != Weigh::kNot) {
        weighted[i % 2] = fmaf(exponential, exponent, weighted[i % 2]);
      }
    };
    float x[kPerVector<E>];
    unpack<E>(vector, x);
    if constexpr (kCap) {
      float y[kPerVector<E>], none[kPerVector<E>];
      cap.template scaled<kReach, kDigits, false>(x, y, none);
#pragma unroll
      for (int i = 0; i < kPerVector<E>; ++i) {
        exponentiate(y[i] + c, i);
        if constexpr (kSum) total[i % 2] += y[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPerVector<E>; ++i) {
        exponentiate(fmaf(x[i], cap.scale, c), i);
        if constexpr (kSum) total[i % 2] += x[i];
      }
    }
  }

  // Of at most one element a lane; -inf for none.
  __device__ static Sum of_elements(float x, bool has, const AnyCap& cap) {
    const float z = kCap && has ? cap.apply(x) : x;
    Sum all = Sum::none();
    all.c = shift_of(max_of_warp(z), cap.scale);
    const float exponent = fmaf(z, cap.scale, all.c), exponential = ptx::ex2(exponent);
    all.exponentials = sum_of_warp(exponential);
    if constexpr (Sum::kWeighted) {
      all.weighted = sum_of_warp(exponential * fmaxf(exponent, kLeastExponent));
      all.highest = max_of_warp(x);
    }
    if constexpr (kSum) all.values = sum_of_warp(has ? z : 0.0f) * cap.per_element();
    return all;
  }
};

// What a capped element is multiplied by outside exponents.
template <bool kTempered>
__device__ inline double per_element(const CrossEntropyArguments& a) {
  return kTempered ? a.per_element : 1.0;
}

// Writes a token's outputs, given the sums of its row (of none, if that was not read).
template <bool kSum, bool kTempered = true>
__device__ inline void write_token(const CrossEntropyArguments& a, int64_t row, const Token& token,
                                   const RowSum& sum) {
  double loss = 0.0, logps = 0.0, lse = 0.0;
  if (token.read) {
    lse = sum.lse();
    if (token.target == kOutOfRange) {
      loss = logps = NAN;
    } else if (token.target != kIgnored) {
      logps = static_cast<double>(sum.label) * per_element<kTempered>(a) - lse;
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
template <bool kSum, bool kTempered = true>
__device__ inline void end_row(const CrossEntropyArguments& a, int64_t row, const Token& token,
                               const RowSum& sum) {
  if (a.carried != nullptr && a.first_column + a.columns < a.vocab) {
    a.carried[row] = sum;
  } else {
    write_token<kSum, kTempered>(a, row, token, sum);
  }
}

// The gradient of a row: factor * 2^(z*scale + c) + offset away from the label.
struct RowGradient {
  float c, factor, offset;
  float at_p;  // what multiplies p: g*(1 + 2*w*lse) - h + k

  // For flat.cuh, which other gradients go by as well: what is known of a row.
  __device__ static Token describe(const CrossEntropyArguments& a, int64_t index) {
    return describe_saved(a, index);
  }

  template <bool kSmooth, class Row>
  __device__ static RowGradient of_row(const CrossEntropyArguments& a, const Row& row) {
    return of<kSmooth>(a, row.token);
  }

  // From the sums of the row.
  template <bool kSmooth, bool kTempered = true>
  __device__ static RowGradient of(const CrossEntropyArguments& a, const Token& token,
                                   const RowSum& sum) {
    RowGradient row = coefficients<kSmooth, kTempered>(a, token);
    if (a.z_loss != 0.0) row.at_p = with_z_loss(a, token, sum.lse());
    row.c = sum.c;
    row.factor = sum.exponentials > 0.0f
                     ? __fdividef(row.at_p, sum.exponentials) *
                           static_cast<float>(per_element<kTempered>(a))
                     : NAN;
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
    row.factor = row.at_p * exp2f(static_cast<float>(exact - static_cast<double>(row.c))) *
                 static_cast<float>(a.per_element);
    return row;
  }

  template <bool kSmooth, bool kTempered = true>
  __device__ static RowGradient coefficients(const CrossEntropyArguments& a, const Token& token) {
    RowGradient row{};
    row.at_p = token.dloss - token.dlogps + token.dlse;
    if (token.target == kOutOfRange) row.at_p = NAN;
    if constexpr (kSmooth) {
      row.offset = static_cast<float>(-token.dloss * a.label_smoothing / a.vocab *
                                      per_element<kTempered>(a));
    }
    return row;
  }

  __device__ static float with_z_loss(const CrossEntropyArguments& a, const Token& token,
                                      double lse) {
    if (token.target == kOutOfRange) return NAN;
    return static_cast<float>(token.dloss * (1.0 + 2.0 * a.z_loss * lse) - token.dlogps +
                              token.dlse);
  }

  template <bool kSmooth, bool kCap, class AnyCap>
  __device__ float at(float x, const AnyCap& cap) const {
    const float z = kCap ? cap.apply(x) : x;
    const float exponential = ptx::ex2(fmaf(z, cap.scale, c));
    float dz = exponential * factor;
    if constexpr (kSmooth) dz += x == -INFINITY && !kCap ? 0.0f : offset;
    if constexpr (kCap) dz *= cap.derivative(x);
    return dz;
  }

  // `kReach` and `kExact` as Cap has them.
  template <class E, bool kSmooth, bool kCap, Reach kReach = Reach::kUnknown,
            bool kExact = sizeof(E) == 4, class AnyCap>
  __device__ uint4 of_vector(const uint4& vector, const AnyCap& cap) const {
    float x[kPerVector<E>];
    unpack<E>(vector, x);
    if constexpr (kCap) {
      float y[kPerVector<E>], slope[kPerVector<E>];
      cap.template scaled<kReach, kExact, true>(x, y, slope);
#pragma unroll
      for (int i = 0; i < kPerVector<E>; ++i) {
        const float p = ptx::ex2(y[i] + c);
        x[i] = (kSmooth ? fmaf(p, factor, offset) : p * factor) * slope[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPerVector<E>; ++i) x[i] = at<kSmooth, false>(x[i], cap);
    }
    return pack<E>(x);
  }

  // At the label, whose logit is `x`: p - 1 in one piece, since p may be close to 1.
  template <bool kCap, bool kTempered = true, class AnyCap>
  __device__ float at_the_label(const CrossEntropyArguments& a, const Token& token, float x,
                                const AnyCap& cap, double row_lse) const {
    const double per = per_element<kTempered>(a);
    Capped capped{x * per, 1.0};
    if constexpr (kCap) capped = {cap.apply(x) * per, cap.derivative(x)};
    return at_the_label<kCap, kTempered>(a, token, capped, row_lse);
  }

  template <bool kCap, bool kTempered = true>
  __device__ float at_the_label(const CrossEntropyArguments& a, const Token& token,
                                const Capped& label, double row_lse) const {
    if (!kCap && label.z == -INFINITY && row_lse == row_lse) return 0.0f;
    const double g = token.dloss, k = token.dlse;
    const double rest = g * (2.0 * a.z_loss * row_lse + a.label_smoothing) + k;
    double dz = (g * (1.0 + 2.0 * a.z_loss * row_lse) - token.dlogps + k) *
                    expm1(label.z - row_lse) +
                rest;
    dz = dz * per_element<kTempered>(a) + static_cast<double>(offset);
    if constexpr (kCap) dz *= label.slope;
    return static_cast<float>(dz);
  }
};

}  // namespace xentile

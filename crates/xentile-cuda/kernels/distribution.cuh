// What is said of a token's distribution: its entropy, and the first of its largest logits. What sums a
// row is the schedules' own; here are the sums that they make for it, and the gradient of entropies.
#pragma once

#include "cross_entropy.cuh"

namespace xentile {

// A part of a row, or all of it. Where RowSum sums e = 2^y, `weighted` sums e*y.
struct alignas(16) DistributionSum : RowSum {
  static constexpr bool kWeighted = true;

  float weighted;
  // The largest logit as it was given, and its first column; where that is known to lie elsewhere,
  // -inf and ~0.
  float highest;
  uint32_t at;

  __device__ static DistributionSum none() { return {RowSum::none(), 0.0f, -INFINITY, ~0u}; }

  // Puts sums in terms of another c, no larger.
  __device__ void lower(float other) {
    if (other == c) return;
    // Sums of nothing have no c.
    const float change = exponentials > 0.0f ? other - c : 0.0f;
    const float factor = ptx::ex2(change);
    weighted = factor > 0.0f ? fmaf(exponentials, change, weighted) * factor : 0.0f;
    exponentials *= factor;
    c = other;
  }

  __device__ void merge(DistributionSum other) {
    const float common = fminf(c, other.c);
    lower(common);
    other.lower(common);
    exponentials += other.exponentials;
    weighted += other.weighted;
    values += other.values;
    label += other.label;
    if (other.highest > highest || (other.highest == highest && other.at < at)) {
      highest = other.highest;
      at = other.at;
    }
  }

  // As RowSum's.
  template <bool kSum>
  __device__ DistributionSum across_lanes() const {
    DistributionSum all = *this;
    float common = c;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      common = fminf(common, __shfl_xor_sync(~0u, common, offset));
    }
    all.lower(common);
    all.exponentials = sum_of_warp(all.exponentials);
    all.weighted = sum_of_warp(all.weighted);
    if constexpr (kSum) all.values = sum_of_warp(all.values);
    all.highest = max_of_warp(highest);
    all.at = __reduce_min_sync(~0u, highest == all.highest ? at : ~0u);
    return all;
  }

  // Whether a row, of which this is the sum, has a distribution.
  __device__ bool is_known(const Token& token) const {
    return token.read && exponentials > 0.0f && exponentials < INFINITY;
  }

  // Its likeliest column; ~0 without a distribution.
  __device__ uint32_t argmax(const Token& token) const { return is_known(token) ? at : ~0u; }

  // What is not RowSum's, as a message takes it.
  __device__ float4 rest() const {
    return make_float4(weighted, highest, __uint_as_float(at), 0.0f);
  }
};

inline constexpr uint32_t kDistributionBytes = sizeof(DistributionSum);

// Writes a token's outputs, those of its distribution among them, but for the likeliest column.
template <bool kSum>
__device__ inline void write_token(const CrossEntropyArguments& a, int64_t row, const Token& token,
                                   const DistributionSum& sum) {
  write_token<kSum>(a, row, token, static_cast<const RowSum&>(sum));
  double entropy = 0.0;
  const bool known = sum.is_known(token);
  if (token.read && token.target != kIgnored) {
    const double all = static_cast<double>(sum.exponentials);
    const double mean = static_cast<double>(sum.weighted) / all;
    entropy = known ? fmax((log2(all) - mean) * kPerLog2E, 0.0) : NAN;
  }
  if (a.entropy != nullptr) a.entropy[row] = static_cast<float>(entropy);
  if (a.highest != nullptr) a.highest[row] = known ? sum.highest : token.read ? NAN : 0.0f;
}

// Writes a token's likeliest column; ~0 is none.
__device__ inline void write_argmax(const CrossEntropyArguments& a, int64_t row, uint32_t column) {
  if (a.argmax != nullptr) a.argmax[row] = static_cast<int32_t>(column);
}

// The gradient of a row with cotangents of its entropy too: with y = z*scale + c,
// 2^y * (factor + tilt*y) + offset away from the label, times the derivative of the cap.
struct EntropyGradient : RowGradient {
  float tilt;
  float entropy, dentropy;

  __device__ static Token describe(const CrossEntropyArguments& a, int64_t index) {
    Token token = describe_saved(a, index);
    if (a.dentropy[index] != 0.0f) token.is_masked = token.target == kIgnored;
    return token;
  }

  template <bool kSmooth, class Row>
  __device__ static EntropyGradient of_row(const CrossEntropyArguments& a, const Row& row) {
    const Token& token = row.token;
    EntropyGradient of{RowGradient::of<kSmooth>(a, token)};
    const float saved = a.saved_entropy[row.index];
    of.dentropy = a.dentropy[row.index];
    of.entropy = of.dentropy != 0.0f ? saved : 0.0f;
    // z - lse is (y + rest) / kLog2E.
    const float rest = static_cast<float>(-token.saved() * static_cast<double>(kLog2E) -
                                          static_cast<double>(of.c));
    const float all = exp2f(rest) * static_cast<float>(a.per_element);
    constexpr float kPer = static_cast<float>(kPerLog2E);
    of.factor -= of.dentropy * fmaf(rest, kPer, of.entropy) * all;
    of.tilt = -of.dentropy * kPer * all;
    return of;
  }

  // Without the offset.
  __device__ float at_exponent(float y) const {
    return ptx::ex2(y) * fmaf(tilt, fmaxf(y, kLeastExponent), factor);
  }

  template <bool kSmooth, bool kCap>
  __device__ float at(float x, const TemperedCap& cap) const {
    float dz = at_exponent(fmaf(kCap ? cap.apply(x) : x, cap.scale, c));
    if constexpr (kSmooth) dz += x == -INFINITY && !kCap ? 0.0f : offset;
    if constexpr (kCap) dz *= cap.derivative(x);
    return dz;
  }

  template <class E, bool kSmooth, bool kCap>
  __device__ uint4 of_vector(const uint4& vector, const TemperedCap& cap) const {
    float x[kPerVector<E>];
    unpack<E>(vector, x);
    if constexpr (kCap) {
      float y[kPerVector<E>], slope[kPerVector<E>];
      cap.template scaled<Reach::kUnknown, sizeof(E) == 4, true>(x, y, slope);
#pragma unroll
      for (int i = 0; i < kPerVector<E>; ++i) {
        x[i] = (at_exponent(y[i] + c) + (kSmooth ? offset : 0.0f)) * slope[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPerVector<E>; ++i) x[i] = at<kSmooth, false>(x[i], cap);
    }
    return pack<E>(x);
  }

  template <bool kCap>
  __device__ float at_the_label(const CrossEntropyArguments& a, const Token& token, float x,
                                const TemperedCap& cap, double row_lse) const {
    const double rest = RowGradient::at_the_label<kCap>(a, token, x, cap, row_lse);
    if (dentropy == 0.0f || (!kCap && x == -INFINITY)) return static_cast<float>(rest);
    const double log_p = (kCap ? cap.apply(x) : x) * a.per_element - row_lse;
    const double slope = kCap ? cap.derivative(x) * a.per_element : a.per_element;
    return static_cast<float>(rest - dentropy * exp(log_p) * (log_p + entropy) * slope);
  }
};

}  // namespace xentile

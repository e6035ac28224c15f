// Cross-entropy with every option, a temperature among them, and what is said of the distribution: kernels
// of their own, a dtype each, so that nobody pays for them who has not asked. Options are looked at as they
// run: memory takes longer than that.
//
// The forward pass has a CTA a row, which it reads once. A thread's exponentials are relative to the largest
// it has met, and where it meets a larger one its sums are put in terms of that (Milakov and Gimelshein,
// 2018). CTAs are small, so that the loads of some overlap the arithmetic of others. The backward pass is
// that of flat.cuh.
#pragma once

#include "cross_entropy.cuh"
#include "flat.cuh"
#include "row.cuh"

namespace xentile {

inline constexpr uint32_t kWholeThreads = 256;
// Vectors of a thread that are under way at once.
inline constexpr uint32_t kWholeBatch = 4;

// Nothing is left of an exponential below this, whose product with -inf would be NaN.
inline constexpr float kLeastExponent = -160.0f;

// Of a logit x, `scale * cap(x)` is z * kLog2E, where z goes into the softmax.
struct Map {
  Cap cap;
  bool capped;
  float scale;
  double per_scale;  // of z, exactly as it is scaled

  __device__ explicit Map(const CrossEntropyArguments& a)
      : cap(a.softcap > 0.0 ? a.softcap : 1.0),
        capped(a.softcap > 0.0),
        scale(a.scale),
        per_scale(a.per_element) {}

  __device__ float apply(float x) const { return capped ? cap.apply(x) : x; }
  __device__ double z(float x) const { return static_cast<double>(apply(x)) * per_scale; }
};

// What is found of a part of a row. Exponentials are 2^(scale*x + c).
struct WholeSum {
  float c, exponentials, weighted, values;
  // The largest logit as it was given, and a column: its first one, or where that is looked for.
  float highest;
  uint32_t at;

  __device__ static WholeSum none() { return {kUnset, 0.0f, 0.0f, 0.0f, -INFINITY, ~0u}; }

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

  __device__ void merge(WholeSum other) {
    const float common = fminf(c, other.c);
    lower(common);
    other.lower(common);
    exponentials += other.exponentials;
    weighted += other.weighted;
    values += other.values;
    if (other.highest > highest || (other.highest == highest && other.at < at)) {
      highest = other.highest;
      at = other.at;
    }
  }

  __device__ void add(float mapped, float scale) {
    const float y = fmaf(mapped, scale, c);
    const float exponential = ptx::ex2(y);
    exponentials += exponential;
    weighted = fmaf(exponential, fmaxf(y, kLeastExponent), weighted);
    values += mapped;
  }
};

__device__ inline WholeSum shuffled(const WholeSum& sum, int offset) {
  WholeSum other;
  other.c = __shfl_xor_sync(~0u, sum.c, offset);
  other.exponentials = __shfl_xor_sync(~0u, sum.exponentials, offset);
  other.weighted = __shfl_xor_sync(~0u, sum.weighted, offset);
  other.values = __shfl_xor_sync(~0u, sum.values, offset);
  other.highest = __shfl_xor_sync(~0u, sum.highest, offset);
  other.at = __shfl_xor_sync(~0u, sum.at, offset);
  return other;
}

template <class E>
struct WholeForward {
  static constexpr uint32_t kPer = kPerVector<E>;

  const CrossEntropyArguments& a;
  const Map map;

  __device__ explicit WholeForward(const CrossEntropyArguments& arguments)
      : a(arguments), map(arguments) {}

  // The sums of this thread's vectors. `at` is the first vector of the batch with its largest logit.
  __device__ WholeSum sums(const uint4* vectors, uint32_t first, uint32_t end) const {
    WholeSum all = WholeSum::none();
    for (uint32_t start = first; start < end; start += kWholeBatch * kWholeThreads) {
      uint4 batch[kWholeBatch];
      uint32_t count = 0;
#pragma unroll
      for (uint32_t i = 0; i < kWholeBatch; ++i) {
        const uint32_t v = start + i * kWholeThreads;
        if (v < end) {
          batch[i] = __ldcs(vectors + v);
          count = i + 1;
        }
      }
      Extremes<E, false> extremes;
#pragma unroll
      for (uint32_t i = 0; i < kWholeBatch; ++i) {
        if (i < count) extremes.add(batch[i]);
      }
      const float highest = extremes.max();
      if (highest > all.highest) {
        all.highest = highest;
        all.at = start;
        all.lower(fminf(map.apply(highest) * -map.scale, kUnset));
      }
      // Two of each, as a sum waits for the one before it.
      float exponentials[2] = {}, weighted[2] = {};
#pragma unroll
      for (uint32_t i = 0; i < kWholeBatch; ++i) {
        if (i >= count) break;
        float x[kPer];
        unpack<E>(batch[i], x);
        if (map.capped) {
#pragma unroll
          for (uint32_t j = 0; j < kPer; ++j) x[j] = map.cap.apply(x[j]);
        }
#pragma unroll
        for (uint32_t j = 0; j < kPer; ++j) {
          const float y = fmaf(x[j], map.scale, all.c);
          const float exponential = ptx::ex2(y);
          exponentials[j % 2] += exponential;
          weighted[j % 2] = fmaf(exponential, fmaxf(y, kLeastExponent), weighted[j % 2]);
        }
        if (a.label_smoothing != 0.0) {
#pragma unroll
          for (uint32_t j = 0; j < kPer; ++j) all.values += x[j];
        }
      }
      all.exponentials += exponentials[0] + exponentials[1];
      all.weighted += weighted[0] + weighted[1];
    }
    return all;
  }

  // The first element of this thread's batch from vector `start` on that is `highest`, counted from the
  // line that the vectors begin in.
  __device__ uint32_t find(const uint4* vectors, uint32_t start, uint32_t end,
                           float highest) const {
    uint32_t found = ~0u;
    for (uint32_t i = kWholeBatch; i-- > 0;) {
      const uint32_t v = start + i * kWholeThreads;
      if (v >= end) continue;
      float x[kPer];
      unpack<E>(vectors[v], x);
      for (uint32_t j = kPer; j-- > 0;) {
        if (x[j] == highest) found = v * kPer + j;
      }
    }
    return found;
  }

  // Has every thread know the sums of all.
  __device__ static WholeSum merged(WholeSum sum, WholeSum* parts) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum.merge(shuffled(sum, offset));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = parts[threadIdx.x % (kWholeThreads / 32)];
#pragma unroll
    for (int offset = kWholeThreads / 64; offset > 0; offset /= 2) {
      sum.merge(shuffled(sum, offset));
    }
    __syncthreads();
    return sum;
  }

  __device__ void write(int64_t index, const Token& token, const WholeSum& sum,
                        float label) const {
    double loss = 0.0, logps = 0.0, lse = 0.0, entropy = 0.0;
    float highest = 0.0f;
    int32_t argmax = -1;
    if (token.read) {
      const bool finite = sum.exponentials > 0.0f && sum.exponentials < INFINITY;
      const double log = log2(static_cast<double>(sum.exponentials));
      lse = finite ? (log - sum.c) * kPerLog2E : NAN;
      highest = finite ? sum.highest : NAN;
      argmax = finite ? static_cast<int32_t>(sum.at) : -1;
      if (token.target == kOutOfRange) {
        loss = logps = NAN;
      } else if (token.target != kIgnored) {
        logps = map.z(label) - lse;
        loss = (1.0 - a.label_smoothing) * -logps + a.z_loss * lse * lse;
        if (a.label_smoothing != 0.0) {
          const double mean = static_cast<double>(sum.values) * map.per_scale;
          loss += a.label_smoothing * (lse - mean / static_cast<double>(a.vocab));
        }
      }
      if (token.target != kIgnored) {
        const double mean =
            static_cast<double>(sum.weighted) / static_cast<double>(sum.exponentials);
        entropy = finite ? fmax((log - mean) * kPerLog2E, 0.0) : NAN;
      }
    }
    if (a.loss != nullptr) a.loss[index] = static_cast<float>(loss);
    if (a.logps != nullptr) a.logps[index] = static_cast<float>(logps);
    const float high = static_cast<float>(lse);
    if (a.lse != nullptr) a.lse[index] = high;
    if (a.lse_low != nullptr) a.lse_low[index] = static_cast<float>(lse - static_cast<double>(high));
    if (a.entropy != nullptr) a.entropy[index] = static_cast<float>(entropy);
    if (a.highest != nullptr) a.highest[index] = highest;
    if (a.argmax != nullptr) a.argmax[index] = argmax;
  }

  __device__ void run() const {
    __shared__ WholeSum parts[kWholeThreads / 32];
    const uint32_t thread = threadIdx.x;
    for (int64_t index = blockIdx.x; index < a.tokens; index += gridDim.x) {
      Token token = describe<Pass::kForward>(a, label_at(a, index), 0.0f);
      if (!token.read) {
        if (thread == 0) write(index, token, WholeSum::none(), 0.0f);
        continue;
      }
      const Row<E> row = Row<E>::of(a, index, token);
      const E* elements = static_cast<const E*>(a.logits) + row.begin();
      const uint4* vectors =
          reinterpret_cast<const uint4*>(static_cast<const E*>(a.logits) + row.first);
      const uint32_t first = thread < row.skip ? thread + kWholeThreads : thread;
      WholeSum all = sums(vectors, first, row.vectors);
      const uint32_t start = all.at;
      // Elements of the row before its whole vectors' first line: columns count from there.
      const uint32_t before = row.skip * kPer - row.head;
      all.at = all.highest > -INFINITY ? find(vectors, start, row.vectors, all.highest) - before : ~0u;
      const int ragged = row.ragged(thread);
      if (ragged >= 0) {
        const float x = to_float(elements[ragged]);
        WholeSum one = WholeSum::none();
        const float mapped = map.apply(x);
        one.c = fminf(mapped * -map.scale, kUnset);
        one.add(mapped, map.scale);
        one.highest = x;
        one.at = static_cast<uint32_t>(ragged);
        all.merge(one);
      }
      all = merged(all, parts);
      if (thread == 0) {
        write(index, token, all, token.target >= 0 ? to_float(elements[token.target]) : 0.0f);
      }
    }
  }
};

// The gradient of a row: with y = scale*cap(x) + c, 2^y * (factor + slope*y) + offset away from the label,
// times the derivative of the cap.
struct WholeGradient {
  float c, factor, slope, offset;
  double at_p;  // what multiplies p, but for the entropy's part
  float entropy, dentropy;

  using Common = Map;

  template <bool>
  __device__ static Map common(const CrossEntropyArguments& a) {
    return Map(a);
  }

  __device__ static Token describe(const CrossEntropyArguments& a, int64_t index) {
    Token token = describe_saved(a, index);
    if (a.dentropy != nullptr && a.dentropy[index] != 0.0f) token.idle = token.target == kIgnored;
    return token;
  }

  template <bool, class Row>
  __device__ static WholeGradient of_row(const CrossEntropyArguments& a, const Row& row,
                                         const Map& map) {
    const Token& token = row.token;
    const double lse = token.saved();
    WholeGradient of{};
    of.dentropy = a.dentropy == nullptr ? 0.0f : a.dentropy[row.index];
    of.entropy = of.dentropy != 0.0f ? a.saved_entropy[row.index] : 0.0f;
    of.at_p = token.dloss * (1.0 + 2.0 * a.z_loss * lse) - token.dlogps + token.dlse;
    if (token.target == kOutOfRange) of.at_p = NAN;
    of.offset =
        static_cast<float>(-token.dloss * a.label_smoothing / a.vocab * map.per_scale);
    const double exact = -lse * static_cast<double>(kLog2E);
    of.c = static_cast<float>(exact);
    // z - lse is (y + rest) / kLog2E.
    const double rest = exact - static_cast<double>(of.c);
    const double all = map.per_scale * exp2f(static_cast<float>(rest));
    of.factor =
        static_cast<float>((of.at_p - of.dentropy * (rest * kPerLog2E + of.entropy)) * all);
    of.slope = static_cast<float>(-of.dentropy * kPerLog2E * all);
    return of;
  }

  __device__ float at_mapped(float mapped, float scale) const {
    const float y = fmaf(mapped, scale, c);
    return ptx::ex2(y) * fmaf(slope, fmaxf(y, kLeastExponent), factor);
  }

  template <bool, bool>
  __device__ float at(float x, const Map& map) const {
    if (map.capped) {
      return (at_mapped(map.cap.apply(x), map.scale) + offset) * map.cap.derivative(x);
    }
    return at_mapped(x, map.scale) + (x == -INFINITY ? 0.0f : offset);
  }

  template <class E, bool kSmooth, bool kCap>
  __device__ uint4 of_vector(const uint4& vector, const Map& map) const {
    float x[kPerVector<E>];
    unpack<E>(vector, x);
    if (map.capped) {
#pragma unroll
      for (int i = 0; i < kPerVector<E>; ++i) {
        const float derivative = map.cap.derivative(x[i]);
        x[i] = (at_mapped(map.cap.apply(x[i]), map.scale) + offset) * derivative;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPerVector<E>; ++i) {
        x[i] = at_mapped(x[i], map.scale) + (x[i] == -INFINITY ? 0.0f : offset);
      }
    }
    return pack<E>(x);
  }

  template <bool>
  __device__ float at_the_label(const CrossEntropyArguments& a, const Token& token, float x,
                                const Map& map, double lse) const {
    if (!map.capped && x == -INFINITY && lse == lse) return 0.0f;
    const double g = token.dloss, log_p = map.z(x) - lse;
    double dz = at_p * expm1(log_p) + g * (2.0 * a.z_loss * lse + a.label_smoothing) + token.dlse;
    if (dentropy != 0.0f) dz -= dentropy * exp(log_p) * (log_p + entropy);
    dz = dz * map.per_scale + static_cast<double>(offset);
    return static_cast<float>(map.capped ? dz * map.cap.derivative(x) : dz);
  }
};

}  // namespace xentile

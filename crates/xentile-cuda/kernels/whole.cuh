// The forward pass with what is said of the distribution, where no cluster takes rows (ring.cuh): on GPUs
// before Hopper. A kernel a dtype, which looks at options as it runs.
//
// A CTA takes a row, which it reads once. A thread's exponentials are relative to the largest it has met,
// and where it meets a larger one its sums are put in terms of that (Milakov and Gimelshein, 2018). CTAs
// are small, so that the loads of some overlap the arithmetic of others.
#pragma once

#include "cross_entropy.cuh"
#include "distribution.cuh"
#include "row.cuh"

namespace xentile {

inline constexpr uint32_t kWholeThreads = 256;
// Vectors of a thread that are under way at once.
inline constexpr uint32_t kWholeBatch = 4;

template <class E>
struct WholeForward {
  static constexpr uint32_t kPer = kPerVector<E>;

  const CrossEntropyArguments& a;
  const bool capped;
  const TemperedCap cap;

  __device__ explicit WholeForward(const CrossEntropyArguments& arguments)
      : a(arguments),
        capped(arguments.softcap > 0.0),
        cap(arguments.softcap > 0.0 ? arguments.softcap : 1.0, arguments.scale) {}

  __device__ float apply(float x) const { return capped ? cap.apply(x) : x; }

  // The sums of this thread's vectors. `at` is the first vector of the batch with its largest logit.
  __device__ DistributionSum sums(const uint4* vectors, uint32_t first, uint32_t end) const {
    DistributionSum all = DistributionSum::none();
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
      if (highest > all.highest || (capped && all.at == ~0u)) {
        all.highest = highest;
        all.at = start;
        all.lower(shift_of(apply(highest), cap.scale));
      }
      // Two of each, as a sum waits for the one before it.
      float exponentials[2] = {}, weighted[2] = {};
#pragma unroll
      for (uint32_t i = 0; i < kWholeBatch; ++i) {
        if (i >= count) break;
        float x[kPer];
        unpack<E>(batch[i], x);
        if (capped) {
#pragma unroll
          for (uint32_t j = 0; j < kPer; ++j) x[j] = cap.apply(x[j]);
        }
#pragma unroll
        for (uint32_t j = 0; j < kPer; ++j) {
          const float y = fmaf(x[j], cap.scale, all.c);
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
    all.values *= cap.per_element();
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

  // An element outside whole vectors.
  __device__ DistributionSum of_element(float x, uint32_t column) const {
    const float z = apply(x), c = shift_of(z, cap.scale), y = fmaf(z, cap.scale, c);
    const float exponential = ptx::ex2(y);
    const RowSum sum{c, exponential, z * cap.per_element(), 0.0f};
    return {sum, exponential * fmaxf(y, kLeastExponent), x, column};
  }

  // Has every thread know the sums of all.
  __device__ static DistributionSum merged(const DistributionSum& sum, DistributionSum* parts) {
    const DistributionSum of_warp = sum.across_lanes<true>();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = of_warp;
    __syncthreads();
    DistributionSum all = DistributionSum::none();
    for (uint32_t i = 0; i < kWholeThreads / 32; ++i) all.merge(parts[i]);
    __syncthreads();
    return all;
  }

  __device__ void run() const {
    __shared__ DistributionSum parts[kWholeThreads / 32];
    const uint32_t thread = threadIdx.x;
    for (int64_t index = blockIdx.x; index < a.tokens; index += gridDim.x) {
      const Token token = describe<Pass::kForward>(a, label_at(a, index), 0.0f);
      if (!token.read) {
        if (thread == 0) {
          write_token<true>(a, index, token, DistributionSum::none());
          write_argmax(a, index, ~0u);
        }
        continue;
      }
      const Row<E> row = Row<E>::of(a, index, token);
      const E* elements = static_cast<const E*>(a.logits) + row.begin();
      const uint4* vectors =
          reinterpret_cast<const uint4*>(static_cast<const E*>(a.logits) + row.first);
      const uint32_t first = thread < row.skip ? thread + kWholeThreads : thread;
      DistributionSum all = sums(vectors, first, row.vectors);
      // Elements of the row before its whole vectors' first line: columns count from there.
      const uint32_t before = row.skip * kPer - row.head;
      if (all.at != ~0u) all.at = find(vectors, all.at, row.vectors, all.highest) - before;
      const int ragged = row.ragged(thread);
      if (ragged >= 0) all.merge(of_element(to_float(elements[ragged]), ragged));
      all = merged(all, parts);
      if (thread == 0) {
        if (token.target >= 0) all.label = apply(to_float(elements[token.target]));
        write_token<true>(a, index, token, all);
        write_argmax(a, index, all.argmax(token));
      }
    }
  }
};

}  // namespace xentile

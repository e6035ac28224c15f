// Cross-entropy with a CTA a row and no shared memory to speak of: for GPUs before Hopper, and for
// rows that no cluster holds. The fused pass reads its row twice, the second time from the L2 where
// that still has it.
#pragma once

#include "cross_entropy.cuh"
#include "row.cuh"

namespace xentile {

inline constexpr uint32_t kPlainThreads = 512;

template <class E, Pass kPass, bool kSmooth, bool kCap>
__device__ inline void plain(const CrossEntropyArguments& a) {
  static_assert(kPass != Pass::kBackward, "flat.cuh has that one");
  constexpr bool kApplies = kPass == Pass::kFused;
  constexpr uint32_t kPer = kPerVector<E>;
  constexpr uint32_t kWarps = kPlainThreads / 32;
  __shared__ RowSum parts[kWarps + 1];  // and that of what lies outside whole vectors
  const uint32_t thread = threadIdx.x;
  const TemperedCap cap(kCap ? a.softcap : 1.0, a.scale);

  for (int64_t index = blockIdx.x; index < a.tokens; index += gridDim.x) {
    const Token token = describe<kPass>(a, label_at(a, index), kApplies ? a.dloss[index] : 0.0f);
    const Row<E> row = Row<E>::of(a, index, token);
    const E* elements = static_cast<const E*>(a.logits) + row.begin();
    const uint4* vectors =
        reinterpret_cast<const uint4*>(static_cast<const E*>(a.logits) + row.first);
    const uint32_t first = thread < row.skip ? thread + kPlainThreads : thread;
    const int ragged = row.ragged(thread);

    RowSum all = RowSum::none();
    if (token.read) {
      using Pieces = Piece<E, kSmooth, kCap>;
      const RowSum part = Pieces::template sum_once<kPlainThreads>(vectors, first, row.vectors, cap);
      if (thread % 32 == 0) parts[thread / 32] = part;
      if (thread < 32) {
        const float x = ragged >= 0 ? to_float(elements[ragged]) : -INFINITY;
        const RowSum edges = Pieces::of_elements(x, ragged >= 0, cap);
        if (thread == 0) parts[kWarps] = edges;
      }
      if (thread == 0 && token.target >= 0) {
        const float x = to_float(elements[token.target]);
        all.label = kCap ? cap.apply(x) : x;
      }
      __syncthreads();
      for (const RowSum& part : parts) all.merge(part);
      __syncthreads();
    }
    // Gradients come with the last of a row's columns, where nobody writes what was carried.
    if (kApplies || thread == 0) add_carried(a, index, all);
    if (thread == 0) end_row<kSmooth>(a, index, token, all);
    if constexpr (kApplies) {
      E* gradients = static_cast<E*>(a.dlogits) + row.begin();
      uint4* to = reinterpret_cast<uint4*>(static_cast<E*>(a.dlogits) + row.first);
      if (token.is_masked) {
        for (uint32_t v = first; v < row.vectors; v += kPlainThreads) {
          to[v] = make_uint4(0, 0, 0, 0);
        }
        if (ragged >= 0) gradients[ragged] = from_float<E>(0.0f);
        continue;
      }
      const RowGradient gradient = RowGradient::of<kSmooth>(a, token, all);
      const auto at_the_label = [&](float x) {
        return from_float<E>(gradient.template at_the_label<kCap>(a, token, x, cap, all.lse()));
      };
      const uint32_t label_at = row.place(row.token.target);
      for (uint32_t v = first; v < row.vectors; v += kPlainThreads) {
        const uint4 vector = vectors[v];
        to[v] = gradient.template of_vector<E, kSmooth, kCap>(vector, cap);
        if (v == label_at / kPer) {
          Capped label{element<E>(vector, label_at % kPer) * a.per_element, 1.0};
          if constexpr (kCap) {
            constexpr bool kExact = Piece<E, kSmooth, kCap>::kExact;
            label = cap.template one_of<Reach::kUnknown, kExact, E>(vector, label_at % kPer);
          }
          gradients[token.target] =
              from_float<E>(gradient.template at_the_label<kCap>(a, token, label, all.lse()));
        }
      }
      if (ragged >= 0) {
        const float x = to_float(elements[ragged]);
        gradients[ragged] = ragged == token.target
                                ? at_the_label(x)
                                : from_float<E>(gradient.template at<kSmooth, kCap>(x, cap));
      }
    }
  }
}

}  // namespace xentile

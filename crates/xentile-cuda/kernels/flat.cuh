// The backward pass of cross-entropy, on every GPU: given lse, an element's gradient depends on
// nothing else of its row, so that rows are cut into tiles which know nothing of each other.
//
// A CTA takes a tile of `chunk_vectors` vectors of `time_block` consecutive tokens. There is no
// shared memory and nothing to wait for. A thread asks for kBatch vectors at once and then writes
// as many: the more of one kind comes before the other, the less often memory turns from reads to
// writes. What a row shares with its neighbours (row.cuh), its first tile takes one by one.
#pragma once

#include "cross_entropy.cuh"
#include "row.cuh"

namespace xentile {

inline constexpr uint32_t kFlatThreads = 64;
// Vectors of a thread that are under way at once.
inline constexpr uint32_t kFlatBatch = 16;

template <class E, bool kSmooth, bool kCap, class Gradient, bool kTempered>
struct Flat {
  static constexpr uint32_t kPer = kPerVector<E>;

  const CrossEntropyArguments& a;
  const CapFor<kCap, kTempered> cap;

  __device__ explicit Flat(const CrossEntropyArguments& arguments)
      : a(arguments), cap(kCap ? arguments.softcap : 1.0, arguments.scale) {}

  __device__ static void load(uint4 (&batch)[kFlatBatch], const Row<E>& row, const uint4* from,
                              uint32_t start, uint32_t end) {
#pragma unroll
    for (uint32_t i = 0; i < kFlatBatch; ++i) {
      const uint32_t v = start + i * kFlatThreads;
      if (v < end && v >= row.skip) batch[i] = from[v];
    }
  }

  // Vectors `begin` to `end` of a row, and its edges where those are of its first tile.
  __device__ void tile(const Row<E>& row, uint32_t begin, uint32_t end) const {
    const int ragged = begin == 0 ? row.ragged(threadIdx.x) : -1;
    E* gradients = static_cast<E*>(a.dlogits) + row.begin();
    uint4* to = reinterpret_cast<uint4*>(static_cast<E*>(a.dlogits) + row.first);
    const uint32_t first = begin + threadIdx.x;
    end = min(end, row.vectors);
    if (row.token.is_masked) {
      for (uint32_t v = first; v < end; v += kFlatThreads) {
        if (v >= row.skip) __stcs(to + v, make_uint4(0, 0, 0, 0));
      }
      if (ragged >= 0) gradients[ragged] = from_float<E>(0.0f);
      return;
    }
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const E*>(a.logits) + row.first);
    // Before anything is computed that the loads could wait for.
    uint4 batch[kFlatBatch];
    load(batch, row, from, first, end);
    const Gradient gradient = Gradient::template of_row<kSmooth>(a, row);
    const uint32_t label_at = row.place(row.token.target);
    for (uint32_t start = first; start < end;) {
#pragma unroll
      for (uint32_t i = 0; i < kFlatBatch; ++i) {
        const uint32_t v = start + i * kFlatThreads;
        if (v >= end || v < row.skip) continue;
        __stcs(to + v, gradient.template of_vector<E, kSmooth, kCap>(batch[i], cap));
        // By the thread that wrote the vector, so that this comes second.
        if (v == label_at / kPer) {
          const float x = element<E>(batch[i], label_at % kPer);
          gradients[row.token.target] = at_the_label(row.token, gradient, x);
        }
      }
      start += kFlatBatch * kFlatThreads;
      load(batch, row, from, start, end);
    }
    if (ragged >= 0) {
      const float x = to_float(static_cast<const E*>(a.logits)[row.begin() + ragged]);
      gradients[ragged] = ragged == row.token.target
                              ? at_the_label(row.token, gradient, x)
                              : from_float<E>(gradient.template at<kSmooth, kCap>(x, cap));
    }
  }

  __device__ __noinline__ E at_the_label(const Token& token, const Gradient& gradient,
                                         float x) const {
    return from_float<E>(gradient.template at_the_label<kCap>(a, token, x, cap, token.saved()));
  }

  __device__ void run() const {
    const uint32_t begin = blockIdx.x * a.chunk_vectors;
    const int64_t step = static_cast<int64_t>(gridDim.y) * a.time_block;
    for (int64_t first = static_cast<int64_t>(blockIdx.y) * a.time_block; first < a.tokens;
         first += step) {
      const int64_t end = min(first + a.time_block, a.tokens);
      for (int64_t index = first; index < end; ++index) {
        tile(Row<E>::of(a, index, Gradient::describe(a, index)), begin, begin + a.chunk_vectors);
      }
    }
  }
};

// The kernel. CTAs are tiles by blocks of tokens, of which those that are too many for a grid are
// taken in turns.
template <class E, bool kSmooth, bool kCap, class Gradient = RowGradient, bool kTempered = true>
__device__ inline void flat(const CrossEntropyArguments& a) {
  Flat<E, kSmooth, kCap, Gradient, kTempered>(a).run();
}

}  // namespace xentile

// Gradients of logits whose lse is not known yet, with no pass over logits: for bf16.
//
// p is an exponential over its row's sum, and the sum is known only when the row is. So the product
// writes e = exp(z - r), with any r near the row's largest logits, beside the row's sum, and what e
// lacks, f = g/sum, multiplies what is small: rows of the hidden states where e^T f h gives the
// weight's gradient, and rows of the product where f (e W) gives the hidden states'. Factors that
// come later are what QuACK's linear cross-entropy has too (Guo et al., 2025: a scale a row and
// tile); here one is a row's, so that cuBLAS takes it.
//
// r is the label's logit, which a product of two vectors gives. Where the label is so unlikely that
// a sum comes near the end of f32's range (2^64), a flag opens three kernels that are shut
// otherwise: the forward pass, which finds lse whatever the logits are, and numerators once more,
// with r = lse. At the label e becomes (p - 1)/f.
#pragma once

#include "fused_product.cuh"

namespace xentile {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

inline constexpr uint32_t kTokenWarps = kTokenThreads / 32;

__device__ inline int64_t token_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kTokenWarps + threadIdx.x / 32;
}

// Finds r, as a constant c, and what takes part. Labels that are no column's have the first one's.
template <bool kVocabIsLast>
__device__ inline void begin_numerators(const FusedProductArguments& a) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.overflow = 0;
  const int64_t index = token_of_warp();
  if (index >= a.row.tokens) return;
  const Token token = describe<Pass::kFused>(a.row, label_at(a.row, index), a.row.dloss[index]);
  const int64_t column = max(token.target, 0);
  const auto* hidden = static_cast<const __nv_bfloat16*>(a.hidden_rows) + index * a.width;
  const auto* weight =
      static_cast<const __nv_bfloat16*>(a.weight_rows) + (kVocabIsLast ? column : column * a.width);
  const int64_t step = kVocabIsLast ? a.row.vocab : 1;
  float sum = 0.0f;
  for (int64_t d = threadIdx.x % 32; d < a.width; d += 32) {
    sum = fmaf(to_float(hidden[d]), to_float(weight[d * step]), sum);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) {
    a.gradients[index] = {sum * -kLog2E, token.idle ? 0.0f : 1.0f, 0.0f, token.target};
  }
}

// After the forward pass, where a sum was too large: r is lse.
__device__ inline void refer_to_lse(const FusedProductArguments& a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x;
  if (!is_open(a) || index >= a.row.tokens) return;
  Token none{};
  none.target = kIgnored;
  const double lse = merged(a, index, none).lse();
  a.gradients[index].c = static_cast<float>(-lse * static_cast<double>(kLog2E));
}

// After numerators: a token's outputs, its factor, and its label's entry.
__device__ inline void end_numerators(const FusedProductArguments& a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x;
  if (index >= a.row.tokens) return;
  if (index == 0) *a.overflow = 0;
  const Token token = describe<Pass::kFused>(a.row, label_at(a.row, index), a.row.dloss[index]);
  const RowSum all = merged(a, index, token);
  write_token<false>(a.row, index, token, all);
  float factor = 0.0f;
  if (!token.idle) {
    const RowGradient row = RowGradient::of<false>(a.row, token, all);
    factor = row.factor;
    if (token.target >= 0) {
      const float dz =
          row.at_the_label<false>(a.row, token, a.label_logits[index], Cap(1.0), all.lse());
      static_cast<__nv_bfloat16*>(a.row.dlogits)[index * a.row.stride + token.target] =
          from_float<__nv_bfloat16>(dz / factor);
    }
  }
  a.gradients[index].factor = factor;
}

// Rows of the hidden states, or of sums in f32, each times its factor.
template <class From>
__device__ inline void scale_rows(const FusedProductArguments& a) {
  using E = __nv_bfloat16;
  const int64_t index = token_of_warp();
  if (index >= a.row.tokens) return;
  const float factor = a.gradients[index].factor;
  // Rows begin at vectors: see `check` in src/fused_product.rs.
  constexpr int kVectors = kPerVector<E> / kPerVector<From>;
  const auto* from =
      reinterpret_cast<const uint4*>(static_cast<const From*>(a.hidden_rows) + index * a.width);
  auto* to = reinterpret_cast<uint4*>(static_cast<E*>(a.scaled_rows) + index * a.width);
  for (int64_t v = threadIdx.x % 32; v < a.width / kPerVector<E>; v += 32) {
    float x[kPerVector<E>];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float part[kPerVector<From>];
      unpack<From>(from[v * kVectors + i], part);
#pragma unroll
      for (int k = 0; k < kPerVector<From>; ++k) x[i * kPerVector<From> + k] = part[k];
    }
#pragma unroll
    // Of a token that takes no part exactly 0, whatever its hidden state.
    for (float& one : x) one = factor == 0.0f ? 0.0f : one * factor;
    to[v] = pack<E>(x);
  }
}

#endif

}  // namespace xentile

// The kernels of products with cross-entropy in their epilogue, by the names that
// src/fused_product.rs makes: epilogue, dtype and variant, as those of cross-entropy have them, and
// the weight's layout, `vd` or `dv`. They are for Hopper alone.
#include "fused_product.cuh"
#include "unnormalised.cuh"

using namespace xentile;

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define FUSED_PRODUCT(name, Name, dtype, E, variant, smooth, capped, layout, factors) \
  extern "C" __global__ void __launch_bounds__(kFusedProductThreads, 1)               \
      fused_product_##name##_##dtype##_##variant##_##layout(                          \
          const __grid_constant__ FusedProductArguments a) {                          \
    fused_product<E, Epilogue::k##Name, smooth, capped, Factors::k##factors>(a);      \
  }

#define FOR_BOTH_LAYOUTS(name, Name, dtype, E, variant, smooth, capped) \
  FUSED_PRODUCT(name, Name, dtype, E, variant, smooth, capped, vd, Vd)  \
  FUSED_PRODUCT(name, Name, dtype, E, variant, smooth, capped, dv, Dv)

#define FOR_BOTH_DTYPES(name, Name, variant, smooth, capped)                 \
  FOR_BOTH_LAYOUTS(name, Name, bf16, __nv_bfloat16, variant, smooth, capped) \
  FOR_BOTH_LAYOUTS(name, Name, f16, __half, variant, smooth, capped)

#define FUSED_PRODUCTS(variant, smooth, capped)              \
  FOR_BOTH_DTYPES(forward, Forward, variant, smooth, capped) \
  FOR_BOTH_DTYPES(backward, Backward, variant, smooth, capped)

FUSED_PRODUCTS(basic, false, false)
FUSED_PRODUCTS(smooth, true, false)
FUSED_PRODUCTS(capped, true, true)
FOR_BOTH_LAYOUTS(unnormalised, Unnormalised, bf16, __nv_bfloat16, basic, false, false)
FOR_BOTH_LAYOUTS(unnormalised, Unnormalised, bf16, __nv_bfloat16, smooth, true, false)
FOR_BOTH_LAYOUTS(unnormalised, Unnormalised, bf16, __nv_bfloat16, capped, false, true)
FOR_BOTH_LAYOUTS(distribution, Distribution, bf16, __nv_bfloat16, basic, false, false)
FOR_BOTH_LAYOUTS(distribution, Distribution, bf16, __nv_bfloat16, smooth, true, false)
FOR_BOTH_LAYOUTS(distribution, Distribution, bf16, __nv_bfloat16, capped, false, true)
FOR_BOTH_LAYOUTS(scaled, Scaled, bf16, __nv_bfloat16, basic, false, false)
FUSED_PRODUCT(added, Added, bf16, __nv_bfloat16, basic, false, false, transposed, Transposed)
FUSED_PRODUCT(added_later, AddedLater, bf16, __nv_bfloat16, basic, false, false, transposed, Transposed)
FOR_BOTH_DTYPES(sum, Sum, basic, false, false)
FUSED_PRODUCT(sum, Sum, bf16, __nv_bfloat16, basic, false, false, transposed, Transposed)
FUSED_PRODUCT(sum, Sum, f16, __half, basic, false, false, transposed, Transposed)

// A thread takes a token.
#define OF_TOKENS(name, ...)                                  \
  extern "C" __global__ void __launch_bounds__(kTokenThreads) \
      name(const __grid_constant__ FusedProductArguments a) { \
    __VA_ARGS__(a);                                           \
  }

OF_TOKENS(fused_product_merge, merge_parts)
OF_TOKENS(fused_product_prepare, prepare_gradients)
OF_TOKENS(unnormalised_labels, write_labels)

// CTAs take turns at tokens.
OF_TOKENS(unnormalised_align, align_unnormalised<__nv_bfloat16>)

// A warp does.
OF_TOKENS(unnormalised_begin, begin_unnormalised)
OF_TOKENS(unnormalised_distribution, write_distribution)
OF_TOKENS(unnormalised_end, end_unnormalised)
OF_TOKENS(unnormalised_round, scale_sums<__nv_bfloat16>)
OF_TOKENS(unnormalised_scale, scale_sums<float>)
OF_TOKENS(unnormalised_label_term_bf16_vd, add_label_term<__nv_bfloat16, false>)
OF_TOKENS(unnormalised_label_term_f32_vd, add_label_term<float, false>)
OF_TOKENS(unnormalised_label_term_f32_dv, add_label_term<float, true>)

// CTAs take rows and columns.
OF_TOKENS(unnormalised_label_term_bf16_dv, write_label_term)

#endif

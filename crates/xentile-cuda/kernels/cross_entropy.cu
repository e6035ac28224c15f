// The kernels of cross-entropy, by the names that src/cross_entropy.rs makes: schedule, pass, dtype
// and variant. `basic` has neither smoothing nor softcap, `smooth` no softcap, `capped` has all: but in ring and flat
// no temperature, which `tempered` has there. The passes `distribution`, `distribution_fused` and
// `distribution_backward` have what is said of the distribution too.
#include "cross_entropy.cuh"
#include "distribution.cuh"
#include "flat.cuh"
#include "plain.cuh"
#include "whole.cuh"
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "packed.cuh"
#include "ring.cuh"
#endif

using namespace xentile;

// Whether a variant takes any temperature.
constexpr bool kTempered_basic = true, kTempered_smooth = true;
constexpr bool kTempered_capped = false, kTempered_tempered = true;

#define PLAIN(name, Name, dtype, E, variant, smooth, capped)  \
  extern "C" __global__ void __launch_bounds__(kPlainThreads) \
      cross_entropy_plain_##name##_##dtype##_##variant(       \
          const __grid_constant__ CrossEntropyArguments a) {  \
    plain<E, Pass::k##Name, smooth, capped>(a);               \
  }

// Warps of a CTA, at most: what a thread needs of registers allows no more.
#define RING(name, Name, dtype, E, variant, smooth, capped)  \
  extern "C" __global__ void __launch_bounds__(512, 1)       \
      cross_entropy_ring_##name##_##dtype##_##variant(       \
          const __grid_constant__ CrossEntropyArguments a) { \
    using Sum = RowSum;                                      \
    ring<E, Pass::k##Name, smooth, capped, Sum, kTempered_##variant>(a); \
  }

// Rows of some CTAs arrive while those of others are worked on.
#define PACKED(name, Name, dtype, E, variant, smooth, capped)      \
  extern "C" __global__ void __launch_bounds__(kPackedThreads, 4)  \
      cross_entropy_packed_##name##_##dtype##_##variant(           \
          const __grid_constant__ CrossEntropyArguments a) {       \
    packed_rows<E, Pass::k##Name, smooth, capped>(a);              \
  }

// Eight CTAs to a multiprocessor leave a thread the 128 registers that its batch needs.
#define FLAT(name, Name, dtype, E, variant, smooth, capped)     \
  extern "C" __global__ void __launch_bounds__(kFlatThreads, 8) \
      cross_entropy_flat_##name##_##dtype##_##variant(          \
          const __grid_constant__ CrossEntropyArguments a) {    \
    flat<E, smooth, capped, RowGradient, kTempered_##variant>(a); \
  }

// With what is said of the distribution.
#define WHOLE(name, Name, dtype, E, variant, smooth, capped)     \
  extern "C" __global__ void __launch_bounds__(kWholeThreads, 4) \
      cross_entropy_whole_##name##_##dtype##_##variant(          \
          const __grid_constant__ CrossEntropyArguments a) {     \
    WholeForward<E>(a).run();                                    \
  }

// Bounds that leave a thread 96 registers, as many as the forward pass has: so as many CTAs share a
// multiprocessor.
#define RING_OF_DISTRIBUTION(name, Name, dtype, E, variant, smooth, capped) \
  extern "C" __global__ void __launch_bounds__(640, 1)                      \
      cross_entropy_ring_##name##_##dtype##_##variant(                      \
          const __grid_constant__ CrossEntropyArguments a) {                \
    ring<E, Pass::k##Name, smooth, capped, DistributionSum>(a);             \
  }

// As the fused pass without has.
#define RING_OF_BOTH(name, Name, dtype, E, variant, smooth, capped) \
  extern "C" __global__ void __launch_bounds__(512, 1)              \
      cross_entropy_ring_##name##_##dtype##_##variant(              \
          const __grid_constant__ CrossEntropyArguments a) {        \
    ring<E, Pass::k##Name, smooth, capped, DistributionSum>(a);     \
  }

#define PACKED_OF_DISTRIBUTION(name, Name, dtype, E, variant, smooth, capped) \
  extern "C" __global__ void __launch_bounds__(kPackedThreads, 4)             \
      cross_entropy_packed_##name##_##dtype##_##variant(                      \
          const __grid_constant__ CrossEntropyArguments a) {                  \
    packed_rows<E, Pass::k##Name, smooth, capped, DistributionSum>(a);        \
  }

#define FLAT_OF_ENTROPY(name, Name, dtype, E, variant, smooth, capped) \
  extern "C" __global__ void __launch_bounds__(kFlatThreads, 8)        \
      cross_entropy_flat_##name##_##dtype##_##variant(                 \
          const __grid_constant__ CrossEntropyArguments a) {           \
    flat<E, smooth, capped, EntropyGradient>(a);                       \
  }

#define FOR_EACH_DTYPE(KERNEL, name, Name, variant, smooth, capped) \
  KERNEL(name, Name, bf16, __nv_bfloat16, variant, smooth, capped)  \
  KERNEL(name, Name, f16, __half, variant, smooth, capped)          \
  KERNEL(name, Name, f32, float, variant, smooth, capped)

// What reads whole rows.
#define FOR_EACH_PASS(KERNEL, variant, smooth, capped)              \
  FOR_EACH_DTYPE(KERNEL, forward, Forward, variant, smooth, capped) \
  FOR_EACH_DTYPE(KERNEL, fused, Fused, variant, smooth, capped)

FOR_EACH_DTYPE(FLAT, backward, Backward, basic, false, false)
FOR_EACH_DTYPE(FLAT, backward, Backward, smooth, true, false)
FOR_EACH_DTYPE(FLAT, backward, Backward, capped, true, true)
FOR_EACH_DTYPE(FLAT, backward, Backward, tempered, true, true)
FOR_EACH_DTYPE(FLAT_OF_ENTROPY, distribution_backward, Backward, basic, false, false)
FOR_EACH_DTYPE(FLAT_OF_ENTROPY, distribution_backward, Backward, smooth, true, false)
FOR_EACH_DTYPE(FLAT_OF_ENTROPY, distribution_backward, Backward, capped, true, true)
FOR_EACH_DTYPE(WHOLE, distribution, Forward, capped, true, true)
FOR_EACH_PASS(PLAIN, smooth, true, false)
FOR_EACH_PASS(PLAIN, capped, true, true)
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
FOR_EACH_PASS(RING, basic, false, false)
FOR_EACH_PASS(RING, smooth, true, false)
FOR_EACH_PASS(RING, capped, true, true)
FOR_EACH_PASS(RING, tempered, true, true)
FOR_EACH_DTYPE(RING_OF_DISTRIBUTION, distribution, Forward, basic, false, false)
FOR_EACH_DTYPE(RING_OF_DISTRIBUTION, distribution, Forward, smooth, true, false)
FOR_EACH_DTYPE(RING_OF_DISTRIBUTION, distribution, Forward, capped, true, true)
FOR_EACH_DTYPE(RING_OF_BOTH, distribution_fused, Fused, basic, false, false)
FOR_EACH_DTYPE(RING_OF_BOTH, distribution_fused, Fused, smooth, true, false)
FOR_EACH_DTYPE(RING_OF_BOTH, distribution_fused, Fused, capped, true, true)
FOR_EACH_PASS(PACKED, basic, false, false)
FOR_EACH_PASS(PACKED, smooth, true, false)
FOR_EACH_PASS(PACKED, capped, true, true)
FOR_EACH_DTYPE(PACKED, backward, Backward, basic, false, false)
FOR_EACH_DTYPE(PACKED, backward, Backward, smooth, true, false)
FOR_EACH_DTYPE(PACKED, backward, Backward, capped, true, true)
FOR_EACH_DTYPE(PACKED_OF_DISTRIBUTION, distribution, Forward, basic, false, false)
FOR_EACH_DTYPE(PACKED_OF_DISTRIBUTION, distribution, Forward, smooth, true, false)
FOR_EACH_DTYPE(PACKED_OF_DISTRIBUTION, distribution, Forward, capped, true, true)
FOR_EACH_DTYPE(PACKED_OF_DISTRIBUTION, distribution_fused, Fused, basic, false, false)
FOR_EACH_DTYPE(PACKED_OF_DISTRIBUTION, distribution_fused, Fused, smooth, true, false)
FOR_EACH_DTYPE(PACKED_OF_DISTRIBUTION, distribution_fused, Fused, capped, true, true)
#endif

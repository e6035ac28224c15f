// The kernels of RMSNorm, by the names that src/rms_norm.rs makes: pass, how rows are taken, and dtype.
// `held` and `ring` have so many vectors of a row in a thread; `vectors` and `elements` take rows of any
// length, whole vectors or one element at a time.
#include "rms_norm_backward.cuh"
#include "rms_norm_forward.cuh"

using namespace xentile;

#define RMS_NORM(name, threads, ctas, body)                      \
  extern "C" __global__ void __launch_bounds__(threads, ctas)    \
      rms_norm_##name(const __grid_constant__ RmsNormArguments a) { \
    body(a);                                                     \
  }

#define FORWARD(prefix, add, dtype, E)                                                     \
  RMS_NORM(prefix##forward_held1_##dtype, 128, 8, (norm_held<E, add, 1, 4>))               \
  RMS_NORM(prefix##forward_held2_##dtype, 128, 8, (norm_held<E, add, 2, 2>))               \
  RMS_NORM(prefix##forward_held4_##dtype, 1024, 1, (norm_held<E, add, 4, 1>))              \
  RMS_NORM(prefix##forward_held8_##dtype, 1024, 1, (norm_held<E, add, 8, 1>))              \
  RMS_NORM(prefix##forward_vectors_##dtype, 1024, 1, (norm_any<E, add, kPerVector<E>>))    \
  RMS_NORM(prefix##forward_elements_##dtype, 1024, 1, (norm_any<E, add, 1>))

#define BACKWARD(prefix, add, dtype, E)                                                         \
  RMS_NORM(prefix##backward_ring1_##dtype, kRing1Threads, 1, (gradients_ring<E, add, 1>))        \
  RMS_NORM(prefix##backward_ring2_##dtype, kRing2Threads, 1, (gradients_ring<E, add, 2>))        \
  RMS_NORM(prefix##backward_ring4_##dtype, kRing4Threads, 1, (gradients_ring<E, add, 4>))        \
  RMS_NORM(prefix##backward_vectors_##dtype, kAnyThreads, 1,                                   \
           (gradients_any<E, add, kPerVector<E>>))                                              \
  RMS_NORM(prefix##backward_elements_##dtype, kAnyThreads, 1, (gradients_any<E, add, 1>))

#define PASSES(dtype, E)       \
  FORWARD(, false, dtype, E)     \
  FORWARD(add_, true, dtype, E)  \
  BACKWARD(, false, dtype, E)    \
  BACKWARD(add_, true, dtype, E)

PASSES(bf16, __nv_bfloat16)
PASSES(f16, __half)
PASSES(f32, float)

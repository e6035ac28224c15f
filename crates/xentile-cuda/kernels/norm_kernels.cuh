// Which kernels a norm has, by the names that src/norm.rs makes: operation, pass, how rows are taken, and
// dtype. `held`, `turns` and `ring` have so many vectors of a row in a thread; `vectors` and `elements` take rows of
// any length, whole vectors or one element at a time.
#pragma once

#include "norm_backward.cuh"
#include "norm_forward.cuh"

#define NORM(name, threads, ctas, body)                                                       \
  extern "C" __global__ void __launch_bounds__(threads, ctas)                                 \
      name(const __grid_constant__ NormArguments a) {                                \
    body(a);                                                                                  \
  }

#define NORM_FORWARD(prefix, centred, add, dtype, E)                                                \
  NORM(prefix##forward_held1_##dtype, 128, 8, (norm_held<E, centred, add, 1, 4>))                   \
  NORM(prefix##forward_held2_##dtype, 128, 8, (norm_held<E, centred, add, 2, 2>))                   \
  NORM(prefix##forward_held4_##dtype, 1024, 1, (norm_held<E, centred, add, 4, 1>))                  \
  NORM(prefix##forward_held8_##dtype, 1024, 1, (norm_held<E, centred, add, 8, 1>))                  \
  NORM(prefix##forward_vectors_##dtype, 1024, 1, (norm_any<E, centred, add, kPerVector<E>>))        \
  NORM(prefix##forward_elements_##dtype, 1024, 1, (norm_any<E, centred, add, 1>))

#define NORM_BACKWARD(prefix, centred, add, dtype, E)                                               \
  NORM(prefix##backward_ring1_##dtype, kRing1Threads, 1, (gradients_ring<E, centred, add, 1>))      \
  NORM(prefix##backward_ring2_##dtype, kRing2Threads, 1, (gradients_ring<E, centred, add, 2>))      \
  NORM(prefix##backward_ring4_##dtype, kRing4Threads, 1, (gradients_ring<E, centred, add, 4>))      \
  NORM(prefix##backward_vectors_##dtype, kAnyThreads, 1,                                            \
       (gradients_any<E, centred, add, kPerVector<E>>))                                             \
  NORM(prefix##backward_elements_##dtype, kAnyThreads, 1, (gradients_any<E, centred, add, 1>))

#define NORM_PASSES(prefix, centred, add, dtype, E) \
  NORM_FORWARD(prefix, centred, add, dtype, E)      \
  NORM_BACKWARD(prefix, centred, add, dtype, E)

#define NORM_OF_EVERY_DTYPE(prefix, centred, add)          \
  NORM_PASSES(prefix, centred, add, bf16, __nv_bfloat16)   \
  NORM_PASSES(prefix, centred, add, f16, __half)           \
  NORM_PASSES(prefix, centred, add, f32, float)

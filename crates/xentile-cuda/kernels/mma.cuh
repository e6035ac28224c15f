// GEMMs of bf16 matrices in shared memory by warps, with sums in f32: `mma.sync`, which every GPU from Ampere on has. A
// matrix that needs more precision than bf16 is the sum of two in bf16, its high and its low part.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "ptx.cuh"

namespace xentile::mma {

// An element in bf16.
using Bits = uint16_t;

// Two elements in bf16, rounded, the first in the lower half.
__device__ inline uint32_t pack(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The lower and the upper element of a pair in bf16.
__device__ inline float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_float(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char mma_shared_memory[];
  return mma_shared_memory;
}

// Copies 16 bytes to shared memory, or zeros.
__device__ inline void copy(void* to, const void* from, bool is_there) {
  ptx::copy_async(ptx::shared_address(to), from, is_there ? 16 : 0);
}

__device__ inline void commit() { ptx::commit_copies(); }

template <uint32_t kLeft>
__device__ inline void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements; each lane gives the address of a row.
__device__ inline void load_matrices(uint32_t (&x)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

__device__ inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

__device__ inline void load(uint32_t (&x)[4], const Bits* from) {
  load_matrices(x, ptx::shared_address(from));
}

__device__ inline void load_transposed(uint32_t (&x)[4], const Bits* from) {
  load_matrices_transposed(x, ptx::shared_address(from));
}

// d += a b, of 16-bit operands of 16 x 16 and 16 x 8, and float32 sums.
template <class E = __nv_bfloat16>
__device__ inline void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1) {
#define XENTILE_MMA(dtype)                                                                   \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." dtype "." dtype                      \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"        \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                              \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<E, __nv_bfloat16>) {
    XENTILE_MMA("bf16");
  } else {
    XENTILE_MMA("f16");
  }
#undef XENTILE_MMA
}

template <class E = __nv_bfloat16>
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<E>(d, a[0], a[1], a[2], a[3], b0, b1);
}

__device__ inline float xor_lane(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

__device__ inline float lane_before(float x, int distance) {
  return __shfl_up_sync(~0u, x, distance);
}

__device__ inline float exponential(float x) { return __expf(x); }

}  // namespace xentile::mma

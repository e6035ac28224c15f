// What Hopper alone has: products of a warpgroup, and copies of tensors in boxes. Names follow the
// PTX ISA, 9.0.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx.cuh"

namespace xentile::ptx {

// Arrives at a barrier of the cluster, an address of `in_cta`. What this thread wrote is not to be
// seen there: a release for the whole cluster waits for all of its memory.
__device__ inline void mbarrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// `x` of all lanes, as what the compiler knows to be the same in all, and keeps once for a warp.
__device__ inline uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

// `x`, which the compiler keeps rather than computes again where it is wanted.
__device__ inline uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ inline void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box at (column, row), as large as the map has it; what is beyond the tensor is 0.
__device__ inline void tensor_load(uint32_t to, const CUtensorMap& map, int32_t column, int32_t row,
                                   uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same of tensors of three, four and five extents.
__device__ inline void tensor_load(uint32_t to, const CUtensorMap& map, int32_t column, int32_t row,
                                   int32_t third, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(third), "r"(barrier)
      : "memory");
}

__device__ inline void tensor_load(uint32_t to, const CUtensorMap& map, int32_t column, int32_t row,
                                   int32_t third, int32_t fourth, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(third), "r"(fourth), "r"(barrier)
      : "memory");
}

__device__ inline void tensor_load(uint32_t to, const CUtensorMap& map, int32_t column, int32_t row,
                                   int32_t third, int32_t fourth, int32_t fifth, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(third), "r"(fourth), "r"(fifth), "r"(barrier)
      : "memory");
}

// The same, to this place and with a barrier in every CTA that `ctas` has the bit of.
__device__ inline void tensor_load_to(uint32_t to, const CUtensorMap& map, int32_t column,
                                      int32_t row, uint32_t barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ctas)
      : "memory");
}

__device__ inline void tensor_load_to(uint32_t to, const CUtensorMap& map, int32_t column,
                                      int32_t row, int32_t third, uint32_t barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(third), "r"(barrier), "h"(ctas)
      : "memory");
}

// Writes the box at (column, row); what is beyond the tensor stays as it is.
__device__ inline void tensor_store(const CUtensorMap& map, int32_t column, int32_t row,
                                    uint32_t from, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint "
      "[%0, {%1, %2}], [%3], %4;" ::"l"(&map),
      "r"(column), "r"(row), "r"(from), "l"(policy)
      : "memory");
}

// The same of a tensor of three extents.
__device__ inline void tensor_store(const CUtensorMap& map, int32_t column, int32_t row,
                                    int32_t third, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
          &map),
      "r"(column), "r"(row), "r"(third), "r"(from)
      : "memory");
}

// Adds the box to what is at (column, row), as one operation of memory's.
__device__ inline void tensor_add(const CUtensorMap& map, int32_t column, int32_t row,
                                  uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the last `kPending` groups of this thread's stores have read their memory.
template <int kPending>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until they have written theirs too.
template <int kPending>
__device__ inline void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Makes what this thread wrote to shared memory known to the copy engine.
__device__ inline void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Writes four 8 x 8 matrices of 16-bit elements; lanes 8i to 8i + 7 have the rows of the i-th.
__device__ inline void stmatrix(uint32_t row, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// The same of the matrices' transposes.
__device__ inline void stmatrix_transposed(uint32_t row, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Writes two words.
__device__ inline void store_shared(uint32_t to, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}

template <uint32_t kRegisters>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Describes rows of 64 elements, 128 bytes each, whose vectors are swizzled as the copy engine does
// it: 8 rows take 1024 bytes, and `address`, the same in all lanes, is at a multiple of these, or less
// than 128 bytes on. What is so many bytes on is described by a 16th of them more.
__device__ inline uint64_t matrix_of(uint32_t address, uint32_t columns_bytes = 16) {
  constexpr uint64_t kSwizzled = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  // Addresses have the CTA's rank in their upper bits.
  const uint32_t lower = columns_bytes / 16 << 16 | (address & 0x3ffff) / 16;
  return kSwizzled | kEightRows | uniform(lower);
}

// Describes the transpose of such a matrix, where 64 columns take 64 rows of 128 bytes, and come
// `columns_bytes` after the 64 before.
__device__ inline uint64_t transposed_of(uint32_t address, uint32_t columns_bytes) {
  return matrix_of(address, columns_bytes);
}

// d = a b^T, or with `adds` 1 d += a b^T, for 64 rows of a, 256 of b, and 16 columns of both; of
// those whose flag is set the transpose is described.
template <class E, bool kTransposedA, bool kTransposedB>
__device__ inline void wgmma(float (&d)[128], uint64_t a, uint64_t b, uint32_t adds) {
  // clang-format off
#define XENTILE_WGMMA(dtype)                                                      \
  asm volatile(                                                                   \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"                         \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." dtype "." dtype " {"         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, " \
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
      "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, " \
      "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
      "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, " \
      "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
      "%120, %121, %122, %123, %124, %125, %126, %127" \
      "}, %128, %129, adds, 1, 1, %131, %132;\n}\n"                                  \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), \
        "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), \
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), \
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), \
        "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), \
        "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), \
        "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), \
        "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), \
        "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), \
        "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), \
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), \
        "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127]) \
      : "l"(a), "l"(b), "r"(adds), "n"(kTransposedA ? 1 : 0), "n"(kTransposedB ? 1 : 0))
  // clang-format on
  if constexpr (std::is_same_v<E, __nv_bfloat16>) {
    XENTILE_WGMMA("bf16");
  } else {
    XENTILE_WGMMA("f16");
  }
#undef XENTILE_WGMMA
}

// Adds to `sums` what 16 rows of 16 columns of a 16-bit dtype add up to, in f32: a lane has two
// numbers of its first row, two of its second, and as many 8 columns on. To the first two sums that
// of the lane's first row, to the others that of its second.
template <class E>
__device__ inline void add_rows(float (&sums)[4], uint32_t x0, uint32_t x1, uint32_t x2,
                                uint32_t x3) {
  constexpr bool kIsBf16 = std::is_same_v<E, __nv_bfloat16>;
  constexpr uint32_t kOnes = kIsBf16 ? 0x3f803f80u : 0x3c003c00u;
#define XENTILE_ADD_ROWS(dtype)                                                                \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." dtype "." dtype                                \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %8}, {%0, %1, %2, %3};"                   \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                             \
      : "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(kOnes))
  if constexpr (kIsBf16) {
    XENTILE_ADD_ROWS("bf16");
  } else {
    XENTILE_ADD_ROWS("f16");
  }
#undef XENTILE_ADD_ROWS
}

// Keeps the compiler from moving what reads `d` to before this point.
__device__ inline void settle(float (&d)[128]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

}  // namespace xentile::ptx

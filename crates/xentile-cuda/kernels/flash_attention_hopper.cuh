// Products of a warpgroup for attention: of 64 rows and as many columns as sums have, whose left factor is
// in shared memory or, computed, in registers. A lane has the sums of it that mma.sync gives it, too.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper.cuh"

namespace xentile::attention::hopper {

inline constexpr int kWarpgroup = 128;

// Puts what registers hold before products that read or add to them.
__device__ inline void fence() { ptx::wgmma_fence(); }

// A place in a ring, and the parity of its turn.
template <int kStages>
struct Turn {
  uint32_t stage = 0, parity = 0;

  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// So many threads meet at a named barrier, which some of them only arrive at.
template <int kThreads>
__device__ inline void meet(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

template <int kThreads>
__device__ inline void arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// clang-format off
#define XENTILE_SUMS_2(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]), \
    "+f"(d[i + 1][0]), "+f"(d[i + 1][1]), "+f"(d[i + 1][2]), "+f"(d[i + 1][3])
#define XENTILE_SUMS_4(i) XENTILE_SUMS_2(i), XENTILE_SUMS_2(i + 2)
#define XENTILE_SUMS_8(i) XENTILE_SUMS_4(i), XENTILE_SUMS_4(i + 4)
#define XENTILE_SUMS_16(i) XENTILE_SUMS_8(i), XENTILE_SUMS_8(i + 8)
#define XENTILE_SUMS_24(i) XENTILE_SUMS_16(i), XENTILE_SUMS_8(i + 16)
#define XENTILE_SUMS_32(i) XENTILE_SUMS_16(i), XENTILE_SUMS_16(i + 16)
#define XENTILE_NEW_SUMS_2(i) "=f"(d[i][0]), "=f"(d[i][1]), "=f"(d[i][2]), "=f"(d[i][3]), \
    "=f"(d[i + 1][0]), "=f"(d[i + 1][1]), "=f"(d[i + 1][2]), "=f"(d[i + 1][3])
#define XENTILE_NEW_SUMS_4(i) XENTILE_NEW_SUMS_2(i), XENTILE_NEW_SUMS_2(i + 2)
#define XENTILE_NEW_SUMS_8(i) XENTILE_NEW_SUMS_4(i), XENTILE_NEW_SUMS_4(i + 4)
#define XENTILE_NEW_SUMS_16(i) XENTILE_NEW_SUMS_8(i), XENTILE_NEW_SUMS_8(i + 8)
#define XENTILE_PLACES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define XENTILE_PLACES_16 XENTILE_PLACES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define XENTILE_PLACES_32 XENTILE_PLACES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define XENTILE_PLACES_64 XENTILE_PLACES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define XENTILE_PLACES_96 XENTILE_PLACES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define XENTILE_PLACES_128 XENTILE_PLACES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The left factor is described by %a, and sums are begun anew unless %adds; b is as it lies.
#define XENTILE_OF_SHARED(columns, sums, places, a_, b_, adds_, dtype)                         \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_ ", 0;\n"                         \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." dtype "." dtype " {" places "}, "  \
      a_ ", " b_ ", adds, 1, 1, 0, 0;\n}\n" : sums : "l"(a), "l"(b), "r"(adds))
// Sums are begun anew, so that nothing is to be kept of what is there.
#define XENTILE_OF_SHARED_ANEW(columns, sums, places, a_, b_, dtype)                            \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, 0, 0;\n"                                \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." dtype "." dtype " {" places "}, "  \
      a_ ", " b_ ", adds, 1, 1, 0, 0;\n}\n" : sums : "l"(a), "l"(b))
// It is in registers, sums go on, and b is transposed.
#define XENTILE_OF_REGISTERS(columns, sums, places, a_, b_, dtype)                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." dtype "." dtype " {"      \
      places "}, " a_ ", " b_ ", 1, 1, 1, 1;\n"                                                \
      : sums : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// Both are in shared memory and transposed.
#define XENTILE_OF_TRANSPOSED(columns, sums, places, a_, b_, adds_, dtype)                     \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_ ", 0;\n"                         \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." dtype "." dtype " {" places "}, "  \
      a_ ", " b_ ", adds, 1, 1, 1, 1;\n}\n" : sums : "l"(a), "l"(b), "r"(adds))

// d = a b^T.
template <class E, int kEights>
__device__ inline void multiply(float (&d)[kEights][4], uint64_t a, uint64_t b) {
#define XENTILE_OF(eights, columns, n, a_, b_)                                                             \
  if constexpr (kEights == eights) {                                                                     \
    if constexpr (std::is_same_v<E, __nv_bfloat16>) {                                                    \
      XENTILE_OF_SHARED_ANEW(columns, XENTILE_NEW_SUMS_##eights(0), XENTILE_PLACES_##n, a_, b_, "bf16");  \
    } else {                                                                                             \
      XENTILE_OF_SHARED_ANEW(columns, XENTILE_NEW_SUMS_##eights(0), XENTILE_PLACES_##n, a_, b_, "f16");   \
    }                                                                                                    \
  }
  static_assert(kEights == 8 || kEights == 16);
  XENTILE_OF(8, "64", 32, "%32", "%33")
  XENTILE_OF(16, "128", 64, "%64", "%65")
#undef XENTILE_OF
}

// d = a b^T, or with `adds` d += a b^T.
template <class E, int kEights>
__device__ inline void multiply(float (&d)[kEights][4], uint64_t a, uint64_t b, int adds) {
#define XENTILE_OF(eights, columns, n, a_, b_, adds_)                                                    \
  if constexpr (kEights == eights) {                                                                     \
    if constexpr (std::is_same_v<E, __nv_bfloat16>) {                                                    \
      XENTILE_OF_SHARED(columns, XENTILE_SUMS_##eights(0), XENTILE_PLACES_##n, a_, b_, adds_, "bf16");    \
    } else {                                                                                             \
      XENTILE_OF_SHARED(columns, XENTILE_SUMS_##eights(0), XENTILE_PLACES_##n, a_, b_, adds_, "f16");     \
    }                                                                                                    \
  }
  static_assert(kEights == 2 || kEights == 4 || kEights == 8 || kEights == 16);
  XENTILE_OF(2, "16", 8, "%8", "%9", "%10")
  XENTILE_OF(4, "32", 16, "%16", "%17", "%18")
  XENTILE_OF(8, "64", 32, "%32", "%33", "%34")
  XENTILE_OF(16, "128", 64, "%64", "%65", "%66")
#undef XENTILE_OF
}

// d = a^T b, or with `adds` d += a^T b, for 64 columns of a and of b.
template <class E>
__device__ inline void multiply_transposed(float (&d)[8][4], uint64_t a, uint64_t b, int adds) {
  if constexpr (std::is_same_v<E, __nv_bfloat16>) {
    XENTILE_OF_TRANSPOSED("64", XENTILE_SUMS_8(0), XENTILE_PLACES_32, "%32", "%33", "%34", "bf16");
  } else {
    XENTILE_OF_TRANSPOSED("64", XENTILE_SUMS_8(0), XENTILE_PLACES_32, "%32", "%33", "%34", "f16");
  }
}

// d += a b, of the 16 x 16 elements of each warp that `a` holds as mma.sync takes them.
template <class E, int kEights>
__device__ inline void multiply(float (&d)[kEights][4], const uint32_t (&a)[4], uint64_t b) {
#define XENTILE_OF(eights, columns, n, a_, b_)                                                           \
  if constexpr (kEights == eights) {                                                                     \
    if constexpr (std::is_same_v<E, __nv_bfloat16>) {                                                    \
      XENTILE_OF_REGISTERS(columns, XENTILE_SUMS_##eights(0), XENTILE_PLACES_##n, a_, b_, "bf16");        \
    } else {                                                                                             \
      XENTILE_OF_REGISTERS(columns, XENTILE_SUMS_##eights(0), XENTILE_PLACES_##n, a_, b_, "f16");         \
    }                                                                                                    \
  }
  static_assert(kEights == 8 || kEights == 16 || kEights == 24 || kEights == 32);
  XENTILE_OF(8, "64", 32, "{%32, %33, %34, %35}", "%36")
  XENTILE_OF(16, "128", 64, "{%64, %65, %66, %67}", "%68")
  XENTILE_OF(24, "192", 96, "{%96, %97, %98, %99}", "%100")
  XENTILE_OF(32, "256", 128, "{%128, %129, %130, %131}", "%132")
#undef XENTILE_OF
}
// clang-format on

}  // namespace xentile::attention::hopper

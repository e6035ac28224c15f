// Norms of rows, RMSNorm and LayerNorm: what their passes share. crates/xentile/src/rms_norm.rs and
// layer_norm.rs there have the formulas. The rows of the latter are *centred*: their mean is taken off, and
// a bias is added.
//
// A *team* of `lanes` threads has a row. Which of them has a column follows from the shape alone and
// not from where the row lies, so that a row's bits are the same wherever it is.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "ptx.cuh"

namespace xentile {

// Mirrored by `Arguments` in src/norm/arguments.rs. Matrices are [rows, columns].
struct NormArguments {
  const void* x;
  const void* added;   // the residual, or the cotangent of the sum; null for none
  const void* dy;      // backward alone
  const void* weight;  // [rows / weight_rows, columns]
  const void* bias;    // [rows / bias_rows, columns], of the weight's dtype; of centred rows
  float* mean;         // [rows], of centred rows
  float* rstd;         // [rows]
  void* to;            // y, or dx
  void* sum;           // x + residual; null for none
  float* dweight;      // [groups, blocks, columns]
  float* dbias;        // the same, of centred rows
  int64_t rows;
  int64_t columns;
  int64_t weight_rows;  // that follow one another and have one weight
  int64_t bias_rows;    // and one bias
  int64_t group_rows;   // rows of a group
  int64_t blocks;       // of a group
  double eps;
  uint32_t weight_dtype;  // of kWeightF32 and so on
  uint32_t zero_centred;
  uint32_t lanes;
  uint32_t teams;     // of a CTA
  uint32_t adjacent;  // whether the teams of a CTA take rows that follow one another
  uint32_t ahead;     // bytes of the weight, where it is to be in shared memory before rows are; or 0
};

inline constexpr uint32_t kWeightF32 = 0, kWeightBf16 = 1, kWeightF16 = 2;
// Warps of a CTA, at most.
inline constexpr uint32_t kNormWarps = 32;
// Threads of a CTA of the backward pass, at most, by how many vectors of a row a thread has.
inline constexpr uint32_t kRing1Threads = 1024, kRing2Threads = 640, kRing4Threads = 512;
inline constexpr uint32_t kAnyThreads = 512;
// Rows that a CTA takes together where they are too long for that.
inline constexpr int kNormTogether = 4;

// Sixteen bytes that nobody reads again: what is shared, the weight, stays in the L1.
__device__ inline uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(from)));
  return v;
}

// Sixteen bytes that are not read again before much else is: first to leave the L2.
__device__ inline void store_once(void* matrix, int64_t vector, const uint4& value) {
  __stcs(static_cast<uint4*>(matrix) + vector, value);
}

// `kCount` elements, whose address is a multiple of what they take, in f32.
template <int kCount, class W>
__device__ inline void widen(const W* from, float (&to)[kCount]) {
  constexpr int kBytes = kCount * sizeof(W);
  if constexpr (kBytes >= 16) {
    constexpr int per = kPerVector<W>;
#pragma unroll
    for (int i = 0; i < kCount / per; ++i) {
      float x[per];
      unpack<W>(reinterpret_cast<const uint4*>(from)[i], x);
#pragma unroll
      for (int k = 0; k < per; ++k) to[i * per + k] = x[k];
    }
  } else if constexpr (kBytes == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    const float2 low = unpacked<W>(words.x), high = unpacked<W>(words.y);
    to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
  } else {
    static_assert(kCount == 1);
    to[0] = to_float(*from);
  }
}

// Calls `body` with the weight from its element `at` on, a pointer to its dtype.
template <class Body>
__device__ inline void with_dtype(uint32_t dtype, const void* weight, int64_t at,
                                  const Body& body) {
  if (dtype == kWeightBf16) {
    body(static_cast<const __nv_bfloat16*>(weight) + at);
  } else if (dtype == kWeightF16) {
    body(static_cast<const __half*>(weight) + at);
  } else {
    body(static_cast<const float*>(weight) + at);
  }
}

// Calls `body` with the weight of `row`.
template <class Body>
__device__ inline void with_weight(const NormArguments& a, int64_t row, const Body& body) {
  const int64_t at = a.weight_rows < a.rows ? row / a.weight_rows * a.columns : 0;
  with_dtype(a.weight_dtype, a.weight, at, body);
}

// The bias of `row`, in the weight's dtype.
template <class W>
__device__ inline const W* bias_of(const NormArguments& a, int64_t row) {
  return static_cast<const W*>(a.bias) + (a.bias_rows < a.rows ? row / a.bias_rows * a.columns : 0);
}

// Whether all rows have the same weight and, where they are centred, the same bias.
template <bool kCentred>
__device__ inline bool have_one_weight(const NormArguments& a) {
  return a.weight_rows >= a.rows && (!kCentred || a.bias_rows >= a.rows);
}

// What `kCount` columns are multiplied by. Arguments say whether weights are `zero_centred`.
template <int kCount, class Arguments, class W>
__device__ inline void scales(const Arguments& a, const W* from, float (&to)[kCount]) {
  widen<kCount>(from, to);
  // Of what is added to no number changes anything, -0 its sign.
  const float more = a.zero_centred ? 1.0f : -0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] += more;
}

// The sums of a few numbers over `lanes` of a warp, a power of two, the same in all of them.
template <int kCount, class T>
__device__ inline void add_up_lanes(T (&sums)[kCount], uint32_t lanes) {
#pragma unroll
  for (uint32_t apart = 16; apart > 0; apart /= 2) {
    if (apart >= lanes) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], apart);
  }
}

// Threads of a team. With `kAlike` all teams of a CTA add up at the same places of the program, and meet
// as one: a multiprocessor has 64 barriers, and 16 go to a CTA that might use any, which leaves room for
// four CTAs.
template <bool kAlike>
struct Team {
  uint32_t index;
  uint32_t lane;
  uint32_t lanes;

  __device__ explicit Team(uint32_t lanes)
      : index(threadIdx.x / lanes), lane(threadIdx.x % lanes), lanes(lanes) {}

  __device__ void sync() const {
    if constexpr (kAlike) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "r"(lanes) : "memory");
    }
  }

  // Whether `here` holds for some thread that adds up with this one.
  __device__ bool any(bool here, uint32_t teams) const {
    if (lanes <= 32) return __any_sync(~0u, here);
    return teams == 1 ? here : __syncthreads_or(here);
  }

  // The sums over the team of a few numbers, the same in all of its threads. Whole warps of it meet
  // once; `parts` has places for each warp of the CTA, which nobody may write before all have read sums.
  template <int kCount, class T>
  __device__ void add_up(T (&sums)[kCount], T (*parts)[kNormWarps]) const {
    add_up_lanes(sums, lanes);
    if (lanes <= 32) return;
    const uint32_t warps = lanes / 32, first = index * warps;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (threadIdx.x % 32 == 0) parts[i][threadIdx.x / 32] = sums[i];
    }
    sync();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (warps <= 8) {
        T total = parts[i][first];
        for (uint32_t warp = 1; warp < warps; ++warp) total += parts[i][first + warp];
        sums[i] = total;
      } else {
        T total = threadIdx.x % 32 < warps ? parts[i][first + threadIdx.x % 32] : T(0);
#pragma unroll
        for (uint32_t apart = 16; apart > 0; apart /= 2) {
          total += __shfl_xor_sync(~0u, total, apart);
        }
        sums[i] = total;
      }
    }
  }

  template <class T>
  __device__ T sum(T part, T (&parts)[kNormWarps]) const {
    T sums[1] = {part};
    add_up(sums, &parts);
    return sums[0];
  }
};

// Whether f32 may have lost squares, or cannot hold their mean and its root.
__device__ inline bool is_beyond_f32(float mean_and_eps) {
  return !(mean_and_eps >= 0x1p-100f && mean_and_eps < 0x1p126f);
}

// As `xentile::norm::rstd` has it. Arguments say how many `columns` there are, and `eps`.
template <class Arguments>
__device__ inline float rstd_of(double squares, const Arguments& a) {
  const double rstd = 1.0 / sqrt(squares / static_cast<double>(a.columns) + a.eps);
  return rstd > 3.4028234663852886e38 ? __int_as_float(0x7f800000) : static_cast<float>(rstd);
}

// Has the compiler take what registers hold for new, so that what it made of them before is made again, and
// does not stay in registers beside them.
template <int kVectors>
__device__ inline void forget(uint4 (&held)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    asm volatile("" : "+r"(held[i].x), "+r"(held[i].y), "+r"(held[i].z), "+r"(held[i].w));
  }
}

// Whether a first sum was off by more than rows deviate, which takes a mean of a million deviations: then
// little is left of the difference of squares, and of a row of one number noise.
__device__ inline bool is_far(float off, float variance_and_eps) {
  return !(off * off <= 16.0f * variance_and_eps);
}

// The sum of a few numbers, as a tree.
template <int kCount>
__device__ inline float sum_of(const float (&x)[kCount]) {
  float s[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = x[i];
#pragma unroll
  for (int step = kCount / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) s[i] += s[i + step];
  }
  return s[0];
}

// The sum of squares of a few numbers, as a tree.
template <int kCount>
__device__ inline float squares(const float (&x)[kCount]) {
  float s[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = x[i] * x[i];
#pragma unroll
  for (int step = kCount / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) s[i] += s[i + step];
  }
  return s[0];
}

template <int kCount>
__device__ inline double wide_squares(const float (&x)[kCount], double about = 0.0) {
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const double wide = x[i] - about;
    sum = fma(wide, wide, sum);
  }
  return sum;
}

// `kPer` elements at `at`: a vector, or one alone.
template <class E, int kPer>
__device__ inline void read(const void* matrix, int64_t at, float (&x)[kPer]) {
  const E* from = static_cast<const E*>(matrix) + at;
  if constexpr (kPer == 1) {
    x[0] = to_float(*from);
  } else {
    unpack<E>(*reinterpret_cast<const uint4*>(from), x);
  }
}

template <class E, int kPer>
__device__ inline void write(void* matrix, int64_t at, const float (&x)[kPer]) {
  E* to = static_cast<E*>(matrix) + at;
  if constexpr (kPer == 1) {
    *to = from_float<E>(x[0]);
  } else {
    *reinterpret_cast<uint4*>(to) = pack<E>(x);
  }
}

}  // namespace xentile

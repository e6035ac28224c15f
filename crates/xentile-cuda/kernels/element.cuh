// Elements of logits: bf16, f16 and f32, sixteen bytes at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace xentile {

template <class E>
inline constexpr int kPerVector = 16 / static_cast<int>(sizeof(E));

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class E>
__device__ inline E from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Two elements of a 16-bit dtype, rounded, the first in the lower half; and back.
template <class E>
__device__ inline uint32_t packed(float x, float y) {
  if constexpr (std::is_same_v<E, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <class E>
__device__ inline float2 unpacked(uint32_t word) {
  if constexpr (std::is_same_v<E, __nv_bfloat16>) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
}

// The elements of a vector, lowest address first.
template <class E>
__device__ inline void unpack(const uint4& vector, float (&x)[kPerVector<E>]) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(E) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = unpacked<E>(words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}

// The larger ones of two pairs of 16-bit elements; a NaN gives way to what is none.
template <class E>
__device__ inline uint32_t packed_max(uint32_t x, uint32_t y) {
  using Pair = std::conditional_t<std::is_same_v<E, __nv_bfloat16>, __nv_bfloat162, __half2>;
  const Pair pair =
      __hmax2(*reinterpret_cast<const Pair*>(&x), *reinterpret_cast<const Pair*>(&y));
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The largest element of vectors, and the largest |element|.
template <class E, bool kMost>
struct Extremes {
  // 16-bit elements in pairs.
  static constexpr bool kPairs = sizeof(E) == 2;
  static constexpr uint32_t kNone = !kPairs ? 0xff800000u
                                    : std::is_same_v<E, __half> ? 0xfc00fc00u : 0xff80ff80u;

  uint32_t largest = kNone, most = 0;

  __device__ void add(const uint4& vector) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      largest = larger(largest, words[i]);
      if constexpr (kMost) most = larger(most, words[i] & (kPairs ? 0x7fff7fffu : 0x7fffffffu));
    }
  }

  __device__ float max() const { return of(largest); }
  __device__ float max_abs() const { return of(most); }

 private:
  __device__ static uint32_t larger(uint32_t x, uint32_t y) {
    if constexpr (kPairs) {
      return packed_max<E>(x, y);
    } else {
      return __float_as_uint(fmaxf(__uint_as_float(x), __uint_as_float(y)));
    }
  }

  __device__ static float of(uint32_t word) {
    if constexpr (kPairs) {
      const float2 pair = unpacked<E>(word);
      return fmaxf(pair.x, pair.y);
    } else {
      return __uint_as_float(word);
    }
  }
};

// One element of a vector, without a detour through memory.
template <class E>
__device__ inline float element(const uint4& vector, uint32_t place) {
  float x[kPerVector<E>];
  unpack<E>(vector, x);
  float found = x[0];
#pragma unroll
  for (uint32_t i = 1; i < kPerVector<E>; ++i) found = i == place ? x[i] : found;
  return found;
}

template <class E>
__device__ inline uint4 pack(const float (&x)[kPerVector<E>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(E) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else {
      words[i] = packed<E>(x[2 * i], x[2 * i + 1]);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace xentile

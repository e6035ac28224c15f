// What kernels of FP8 quantisation share; src/fp8_quantize.rs of the crate xentile says what it is, bit by
// bit. Here every NaN becomes the positive one, whatever its sign, as the instruction has it.
//
// A *unit* is the elements of a vector of 16 bytes of a row. Rows that do not consist of vectors have units
// too, which are read and written element by element.
#pragma once

#include <cfloat>
#include <cstdint>

#include "element.cuh"
#include "ptx.cuh"

namespace xentile {

// Mirrored by `Arguments` in src/fp8_quantize/arguments.rs.
struct Fp8QuantizeArguments {
  const void* x;       // [matrices, rows, columns]
  const float* given;  // a scale for so many rows; null where scales are made
  uint8_t* values;     // as x; null where there are none
  float* numbers;      // a scale of each block, or its amax where scales are given or there are no values
  uint8_t* transposed;     // [matrices, columns, rows]
  float* transposed_scales;
  int64_t matrices;
  int64_t rows;
  int64_t columns;
  int64_t block_rows;  // of x, also where scales are those of the transposed copy
  int64_t block_columns;
  int64_t rows_of_scale;
  uint32_t lanes;  // of a team
  uint32_t e5m2;
  uint32_t power_of_two;
};

// Mirrored by `NUMBERS` in src/fp8_quantize/arguments.rs.
inline constexpr uint32_t kFp8RunThreads = 128;
inline constexpr uint32_t kFp8RunBatch = 8;       // runs of a team
inline constexpr uint32_t kFp8BlockThreads = 512;  // at most
inline constexpr uint32_t kFp8BlockHeld = 8;       // units that a thread keeps
inline constexpr uint32_t kFp8Tile = 128;
inline constexpr uint32_t kFp8ColumnThreads = 256;
inline constexpr uint32_t kFp8ColumnRows = 128;
inline constexpr uint32_t kFp8FinishThreads = 256;

namespace fp8 {

using Arguments = Fp8QuantizeArguments;

inline constexpr uint32_t kWarp = 0xffffffffu;

__device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A division of 64 bits takes as long as many elements.
__device__ inline int64_t quotient_of(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// The magnitudes in a word, with NaN for those that are not finite: x * 0 + x leaves the others alone, and a
// NaN gives way in a maximum.
template <class E>
__device__ inline uint32_t magnitudes(uint32_t word) {
  if constexpr (sizeof(E) == 4) {
    const float x = fabsf(__uint_as_float(word));
    return __float_as_uint(fmaf(x, 0.0f, x));
  } else {
    using Pair = std::conditional_t<std::is_same_v<E, __nv_bfloat16>, __nv_bfloat162, __half2>;
    const uint32_t bits = word & 0x7fff7fffu, zeros = 0;
    const Pair x = *reinterpret_cast<const Pair*>(&bits);
    const Pair found = __hfma2(x, *reinterpret_cast<const Pair*>(&zeros), x);
    return *reinterpret_cast<const uint32_t*>(&found);
  }
}

// Maxima of what two words hold, one of which has no NaN.
template <class E>
__device__ inline uint32_t larger(uint32_t x, uint32_t y) {
  if constexpr (sizeof(E) == 4) {
    return __float_as_uint(fmaxf(__uint_as_float(x), __uint_as_float(y)));
  } else {
    return packed_max<E>(x, y);
  }
}

// The largest of what a word holds.
template <class E>
__device__ inline float largest(uint32_t word) {
  if constexpr (sizeof(E) == 4) {
    return __uint_as_float(word);
  } else {
    const float2 pair = unpacked<E>(word);
    return fmaxf(pair.x, pair.y);
  }
}

// `most` or a larger finite magnitude of a unit.
template <class E>
__device__ inline uint32_t most_of(uint32_t most, const uint4& unit) {
  most = larger<E>(most, magnitudes<E>(unit.x));
  most = larger<E>(most, magnitudes<E>(unit.y));
  most = larger<E>(most, magnitudes<E>(unit.z));
  return larger<E>(most, magnitudes<E>(unit.w));
}

__device__ inline float normal(float amax) { return amax < FLT_MIN ? 0.0f : amax; }

// The CTA's place in its grid; from the end where amax of all of x came before, so that what was read last is
// read first, and may still be in the L2.
__device__ inline int64_t place_in_grid(bool from_end) {
  return from_end ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}

// Adds to amax of what others have too. Magnitudes rise with their bits.
__device__ inline void add_amax(float* to, float amax) {
  if (amax >= FLT_MIN) atomicMax(reinterpret_cast<int*>(to), __float_as_int(amax));
}

// Makes scales of amax.
template <int kCount>
__device__ inline void to_scales(const Arguments& a, float (&numbers)[kCount]) {
  if (a.power_of_two) {
    // The largest number is 1.75 times 2^8 or 2^15: a mantissa above that takes the next exponent.
    const uint32_t exponent = (a.e5m2 ? 15u : 8u) << 23;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t rounded = (__float_as_uint(numbers[i]) + 0x001fffffu) & 0x7f800000u;
      const float scale = __uint_as_float(max(rounded, exponent + (1u << 23)) - exponent);
      numbers[i] = numbers[i] < FLT_MIN ? 1.0f : scale;
    }
  } else {
    const float by = a.e5m2 ? 1.0f / 57344.0f : 1.0f / 448.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float scale = fmaxf(numbers[i] * by, FLT_MIN);
      numbers[i] = numbers[i] < FLT_MIN ? 1.0f : scale;
    }
  }
}

__device__ inline float scale_of(const Arguments& a, float amax) {
  float numbers[1] = {amax};
  to_scales(a, numbers);
  return numbers[0];
}

// The reciprocal, rounded to nearest: what the compiler makes of one, without the case of numbers that scales
// made here never are, above 2^125 or below 2^-126.
__device__ inline float reciprocal(float scale) {
  const float near = ptx::rcp(scale);
  return fmaf(near, -fmaf(scale, near, -1.0f), near);
}

// x times the reciprocal of its scale, x below the normal range taken for 0 of its sign. Quotients below it
// are 0 in either format.
__device__ inline float quotient(float x, float by) {
  float found;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(found) : "f"(x), "f"(by));
  return found;
}

// Rounds to nearest even, for GPUs before Ada: magnitudes of the normal range where the mantissa is cut, and
// smaller ones by adding the power of two whose last place is theirs.
template <bool kE5M2>
__device__ inline uint32_t rounded(float x) {
  constexpr uint32_t kMantissa = kE5M2 ? 2 : 3, kCut = 23 - kMantissa;
  constexpr int kLeast = kE5M2 ? -14 : -6;
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 23 + kLeast - int{kMantissa}) << 23;
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80u;
  if (x != x) return 0x7fu;
  const float magnitude = fminf(fabsf(x), kE5M2 ? 57344.0f : 448.0f);
  const uint32_t bits = __float_as_uint(magnitude);
  if (bits < static_cast<uint32_t>(127 + kLeast) << 23) {
    return sign | (__float_as_uint(magnitude + __uint_as_float(kMagic)) - kMagic);
  }
  const uint32_t even = bits + ((1u << (kCut - 1)) - 1) + (bits >> kCut & 1);
  return sign | ((even >> kCut) - (static_cast<uint32_t>(126 + kLeast) << kMantissa));
}

// Four values, the first in the lowest byte.
template <bool kE5M2>
__device__ inline uint32_t four_values(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint32_t found;
  if constexpr (kE5M2) {
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(found)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  } else {
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(found)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return found;
#else
  return rounded<kE5M2>(a) | rounded<kE5M2>(b) << 8 | rounded<kE5M2>(c) << 16 |
         rounded<kE5M2>(d) << 24;
#endif
}

// Reads a unit of which `count` elements are there, and zeros for the others. One that is whole wherever it
// is not empty, if rows are aligned.
template <class E, bool kAligned, bool kStreams>
__device__ inline uint4 load(const E* from, int count) {
  uint32_t words[4] = {0, 0, 0, 0};
  if constexpr (kAligned) {
    if (count <= 0) return make_uint4(0, 0, 0, 0);
    const uint4* vector = reinterpret_cast<const uint4*>(from);
    return kStreams ? __ldcs(vector) : __ldg(vector);
  } else if constexpr (sizeof(E) == 4) {
    const uint32_t* bits = reinterpret_cast<const uint32_t*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) words[i] = __ldg(bits + i);
    }
  } else {
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) words[i / 2] |= static_cast<uint32_t>(__ldg(bits + i)) << (i % 2 * 16);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// What is quantised, unit by unit: here an array as it is. A source that makes units of more than one vector
// has another `Raw`, so that all vectors are asked for before units are made of them. In tiles it gets the
// rows and, by `of_columns`, the columns of a thread's units.
template <class E>
struct Plain {
  using Raw = uint4;

  const E* x;

  __device__ explicit Plain(const Arguments& a) : x(static_cast<const E*>(a.x)) {}

  // The same from an element on.
  __device__ Plain from(int64_t begin) const {
    Plain other = *this;
    other.x += begin;
    return other;
  }

  // Asks for the unit that begins at an element, of which `count` are there.
  template <bool kAligned, bool kStreams>
  __device__ Raw load(int64_t at, int count) const {
    return fp8::load<E, kAligned, kStreams>(x + at, count);
  }

  __device__ uint4 unit(const Raw& raw) const { return raw; }

  struct Columns {};
  __device__ Columns of_columns(int64_t, int) const { return {}; }
  __device__ uint4 unit_of(const Raw& raw, const Columns&, int64_t, int) const { return raw; }
};

// Writes the values of a unit, by the reciprocal of their scale.
template <class E, bool kE5M2, bool kAligned>
__device__ inline void store(uint8_t* to, const uint4& unit, float by, int count) {
  constexpr int kPer = kPerVector<E>;
  float x[kPer];
  unpack<E>(unit, x);
#pragma unroll
  for (int i = 0; i < kPer; ++i) x[i] = quotient(x[i], by);
  uint32_t words[kPer / 4];
#pragma unroll
  for (int i = 0; i < kPer / 4; ++i) {
    words[i] = four_values<kE5M2>(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
  if constexpr (!kAligned) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (i < count) to[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
    }
  } else if constexpr (kPer == 8) {
    if (count > 0) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    if (count > 0) *reinterpret_cast<uint32_t*>(to) = words[0];
  }
}

// The reciprocal of the given scale of a row of all matrices.
__device__ inline float given_reciprocal(const Arguments& a, int64_t row) {
  const int64_t at =
      a.rows_of_scale >= a.matrices * a.rows ? 0 : quotient_of(row, a.rows_of_scale);
  return __frcp_rn(__ldg(a.given + at));
}

// The largest of all lanes of a team, in each of them.
__device__ inline float largest_of_lanes(float most, uint32_t lanes) {
  for (uint32_t by = lanes / 2; by > 0; by /= 2) {
    most = fmaxf(most, __shfl_xor_sync(kWarp, most, by));
  }
  return most;
}

// The largest of all threads of a CTA, in each of them. `parts` has room for its warps.
__device__ inline float largest_of_cta(float most, float* parts) {
  most = largest_of_lanes(most, 32);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = most;
  __syncthreads();
  for (uint32_t warp = 0; warp < blockDim.x / 32; ++warp) most = fmaxf(most, parts[warp]);
  return most;
}

}  // namespace fp8
}  // namespace xentile

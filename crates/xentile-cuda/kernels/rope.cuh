// What kernels that rotate pairs of columns share; src/rope.rs of the crate xentile says what is rotated.
//
// A *unit* is what one or two vectors of 16 bytes of a row hold: columns that turn together, a vector of
// each half or one of interleaved pairs, or a vector of columns that are copied.
#pragma once

#include <cstdint>

#include "element.cuh"

namespace xentile::rope {

// Rows of the tables, for so many pairs of a unit.
template <int kPairs>
struct Angles {
  float cos[kPairs], sin[kPairs];

  // From where the unit's pairs begin in either table.
  __device__ void load(const float* of_cos, const float* of_sin) {
    if constexpr (kPairs % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kPairs; i += 4) {
        const float4 c = __ldg(reinterpret_cast<const float4*>(of_cos + i));
        const float4 s = __ldg(reinterpret_cast<const float4*>(of_sin + i));
        cos[i] = c.x, cos[i + 1] = c.y, cos[i + 2] = c.z, cos[i + 3] = c.w;
        sin[i] = s.x, sin[i + 1] = s.y, sin[i + 2] = s.z, sin[i + 3] = s.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        cos[i] = __ldg(of_cos + i);
        sin[i] = __ldg(of_sin + i);
      }
    }
  }

  // Of an index that is no row.
  __device__ void forget() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) cos[i] = sin[i] = __int_as_float(0x7fc00000);
  }

  // `sign` is -1 for the transposed map.
  __device__ void turn(int pair, float sign, float& first, float& second) const {
    const float c = cos[pair], s = sign * sin[pair];
    const float a = first, b = second;
    first = a * c - b * s;
    second = b * c + a * s;
  }

  // Those of a vector of interleaved pairs.
  __device__ void turn_interleaved(float sign, float (&x)[2 * kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) turn(i, sign, x[2 * i], x[2 * i + 1]);
  }

  // Those of a vector of each half.
  __device__ void turn_halves(float sign, float (&first)[kPairs], float (&second)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) turn(i, sign, first[i], second[i]);
  }
};

}  // namespace xentile::rope

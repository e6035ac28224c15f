// Steps of AdamW with moments in 8 bits, over many arrays in one launch: parameters and state are
// written in their place.
//
// A CTA has a tile of one array, found by a binary search of the table in the kernel's parameters.
// A warp has 256 consecutive entries at a time, a lane 8 of these: 8 in a row of parameters of 16
// bits, and 4 in a row of both halves of the 256 where they are f32, so that every access is of
// vectors without gaps. Blocks of 8-bit state have 256, 128 or 64 entries and begin at multiples of
// that, so that a block is a warp's or less, and its largest |entry| a reduction within the warp.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "element.cuh"

namespace xentile {

// Arrays of a launch, threads of a CTA, and entries of a CTA's tile.
inline constexpr uint32_t kOptimizerArrays = 256;
inline constexpr uint32_t kOptimizerThreads = 256;
inline constexpr uint32_t kOptimizerTile = 8192;

// Mirrored by `Array` in src/optimizers.rs.
struct OptimizerArray {
  const void* grads;
  void* params;
  void* mu;
  void* nu;
  float* mu_scales;
  float* nu_scales;
  int64_t size;
  uint32_t first_tile;
  uint32_t block_log2;  // of 8-bit state
};

// Mirrored by `Arguments` in src/optimizers.rs.
struct OptimizerArguments {
  const int32_t* scalars;
  const int32_t* leaves;  // of each array: twice its number in the tree, and whether it decays
  uint32_t arrays;
  uint32_t unused;
  OptimizerArray array[256];
};

// The order of `scalars`, which are f32 but for the last three.
struct OptimizerScalars {
  float learning_rate, b1, rest1, b2, rest2, eps, eps_root, weight_decay;
  float mu_scale, grad_scale, nu_scale, clip;
  uint32_t step, seed;
  int32_t rounds;
  int32_t unused;
};
static_assert(sizeof(OptimizerScalars) == 64);

namespace optimizers {

inline constexpr int kDecades = 7;
inline constexpr double kPowers[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};

// Computes the code nearest to y of [0, 1]. The decade that ends at the power of ten P has n codes,
// floor(s) with s = y n / (0.9 P) + 8 n / 9, from n on (signed; unsigned, all are one less). Lines
// of neighbouring decades meet at P, where s = 2 n. Between P and the midpoint to the next centre,
// P (1 + 0.9 / n), the code is still 2 n - 1, while s of the next decade is in [2 n, 2 n + 0.2): a
// half is subtracted from it. That holds a little below P too, so that an approximate logarithm
// finds the decade.
//
// Lines and midpoints are of kScale y + kShift. This is 1 at the midpoint between the code of 1 and
// the one below, where the last decade ends, and the logarithm of 0's is in the first decade.
struct alignas(16) Line {
  float factor, offset, midpoint, unused;
};
inline constexpr int kLines = kDecades + 1;
inline constexpr double kShift = 1.02e-7;
template <bool kSigned>
inline constexpr double kScale = (1 - kShift) / (1 - 0.225 / (kSigned ? 64 : 128));
// Each lane of 8 that are served at a time has a copy, so that no two of a bank are read.
inline constexpr int kCopies = 8;

struct alignas(1024) Table {
  // The values of the signed code, then those of the unsigned one.
  float values[512];
  // 256 bytes for each decade: the signed code's copies, then the unsigned one's.
  Line lines[kLines][2][kCopies];
};
static_assert(sizeof(Line[2][kCopies]) == 256);

constexpr Line make_line(double scale, double factor, double offset, double midpoint) {
  return {static_cast<float>(factor / scale), static_cast<float>(offset - factor / scale * kShift),
          static_cast<float>(midpoint * scale + kShift), 0.0f};
}

constexpr Table make_table() {
  Table table{};
  for (int i = 0; i < 2; ++i) {
    const bool is_signed = i == 0;
    const int zero = is_signed ? 127 : 256;
    const int less = is_signed ? 0 : 1;
    const double scale = is_signed ? kScale<true> : kScale<false>;
    table.values[zero] = 0;
    int magnitude = 1;
    Line lines[kLines] = {};
    for (int decade = 0; decade < kDecades; ++decade) {
      const int parts = 1 << (decade + less);
      const double power = kPowers[decade];
      for (int k = 0; k < parts; ++k) {
        const double fraction = 0.1 + 0.9 * (k + 0.5) / parts;
        const float value = static_cast<float>(power * fraction);
        table.values[zero + magnitude] = value;
        if (is_signed) table.values[zero - magnitude] = -value;
        ++magnitude;
      }
      // Half the smallest value, then the midpoints above the decades before.
      const double above = kPowers[decade == 0 ? 0 : decade - 1] * (1 + 1.8 / parts);
      const double midpoint = decade == 0 ? power * (0.1 + 0.45 / parts) / 2 : above;
      lines[decade] = make_line(scale, parts / power / 0.9, parts * 8.0 / 9 - less, midpoint);
    }
    table.values[zero + magnitude] = 1;
    lines[kDecades] = make_line(scale, 0, magnitude + 0.5, 0);
    for (int line = 0; line < kLines; ++line)
      for (int copy = 0; copy < kCopies; ++copy) table.lines[line][i][copy] = lines[line];
  }
  return table;
}

static __device__ const Table kTable = make_table();

// A table in shared memory, by the 32-bit addresses of a lane.
struct Lookup {
  uint32_t values, lines;

  __device__ explicit Lookup(const Table& table)
      : values(static_cast<uint32_t>(__cvta_generic_to_shared(table.values))),
        lines(static_cast<uint32_t>(__cvta_generic_to_shared(table.lines)) +
              threadIdx.x % kCopies * static_cast<uint32_t>(sizeof(Line))) {
    // Loads, which are of these addresses, stay below the barrier above this.
    asm volatile("" : "+r"(values), "+r"(lines) : : "memory");
  }

  // The value of byte k of a word of codes.
  template <bool kSigned>
  __device__ float value(uint32_t word, int k) const {
    const uint32_t at = (k == 0 ? word << 2 : word >> (8 * k - 2)) & 1020;
    float found;
    asm("ld.shared.f32 %0, [%1 + %2];" : "=f"(found) : "r"(values | at), "n"(kSigned ? 0 : 1024));
    return found;
  }

  // The magnitude of the code nearest to y, in the lowest byte; `inverse` has kScale in it.
  template <bool kSigned>
  __device__ uint32_t magnitude(float x, float inverse) const {
    const float y = fmaf(fabsf(x), inverse, static_cast<float>(kShift));
    float log2;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(y));
    // With 2^23 added, rounded down, the lowest bits are those of the integer. NaN leads to the 256
    // bytes before the lines.
    const float decade = __fmaf_rd(log2, 0.30103f, 8388615.0f);
    const uint32_t at = lines + (__float_as_uint(decade) << 8);
    Line line;
    asm("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
        : "=f"(line.factor), "=f"(line.offset), "=f"(line.midpoint), "=f"(line.unused)
        : "r"(at), "n"(kSigned ? 0 : 128));
    float steps = fmaf(y, line.factor, line.offset);
    if (y < line.midpoint) steps -= 0.5f;
    return __float_as_uint(__fadd_rd(steps, 8388608.0f));
  }
};

// The lowest bytes of four words, the first in the lowest.
__device__ inline uint32_t joined(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Bytes of `low` and `high`, or, where a byte of the selector is above 7, that byte's sign.
template <uint32_t kSelector>
__device__ inline uint32_t permuted(uint32_t low, uint32_t high) {
  uint32_t found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "n"(kSelector));
  return found;
}

// Signed codes of four magnitudes, a byte each: 127 + magnitude, or 127 - magnitude where `x` is
// negative, at least 0 since -1 is not in the table.
__device__ inline uint32_t with_signs(uint32_t magnitudes, const float* x) {
  const uint32_t low = permuted<0x00fb>(__float_as_uint(x[0]), __float_as_uint(x[1]));
  const uint32_t high = permuted<0x00fb>(__float_as_uint(x[2]), __float_as_uint(x[3]));
  const uint32_t is_negative = permuted<0x5410>(low, high);
  const uint32_t is_one = permuted<0xba98>(magnitudes, magnitudes);
  const uint32_t below = (magnitudes ^ 0x7f7f7f7fu) & ~is_one;
  return (is_negative & below) | (~is_negative & (magnitudes + 0x7f7f7f7fu));
}

// Philox4x32-10 of the counter (group, array, step, 0) and the key (seed, 0).
__device__ inline uint4 philox(uint32_t group, uint32_t array, uint32_t step, uint32_t seed) {
  uint4 c = make_uint4(group, array, step, 0);
  uint32_t first = seed, second = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high = __umulhi(c.x, 0xd2511f53u), low = c.x * 0xd2511f53u;
    const uint32_t other_high = __umulhi(c.z, 0xcd9e8d57u), other_low = c.z * 0xcd9e8d57u;
    c = make_uint4(other_high ^ c.y ^ first, other_low, high ^ c.w ^ second, low);
    first += 0x9e3779b9u;
    second += 0xbb67ae85u;
  }
  return c;
}

// bf16 bits of x, rounded away from 0 where `random`, of 16 bits, reaches the rest.
__device__ inline uint32_t rounded(float x, uint32_t random) {
  const uint32_t high = (__float_as_uint(x) + random) >> 16;
  return isnan(x) ? 0x7fc0u : high;
}

// Vectors are loaded and stored by intrinsics: the compiler splits plain accesses here into words.

// Where a lane's 8 entries are: [first, first + 4) and [second, second + 4). `kWhole` says that all
// of the warp's are within the array: without branches all loads begin before the first is waited for.
template <bool kWhole>
struct Place {
  int64_t first, second, size;

  __device__ int64_t begin(int half) const { return half == 0 ? first : second; }
  __device__ bool has(int64_t begin, int count) const { return kWhole || begin + count <= size; }
};

template <class E>
__device__ inline void load4(const E* from, float (&x)[8], int at) {
  if constexpr (sizeof(E) == 4) {
    const float4 vector = __ldcs(reinterpret_cast<const float4*>(from));
    x[at] = vector.x, x[at + 1] = vector.y, x[at + 2] = vector.z, x[at + 3] = vector.w;
  } else {
    const uint2 vector = __ldcs(reinterpret_cast<const uint2*>(from));
    const float2 low = unpacked<E>(vector.x), high = unpacked<E>(vector.y);
    x[at] = low.x, x[at + 1] = low.y, x[at + 2] = high.x, x[at + 3] = high.y;
  }
}

// The lane's entries, 0 beyond the end. `kInRow` says that they are 8 in a row.
template <bool kInRow, class E, bool kWhole>
__device__ inline void load(const void* array, const Place<kWhole>& place, float (&x)[8]) {
  const E* from = static_cast<const E*>(array);
  if constexpr (kInRow && sizeof(E) == 2) {
    if (place.has(place.first, 8)) {
      unpack<E>(__ldcs(reinterpret_cast<const uint4*>(from + place.first)), x);
      return;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t begin = place.begin(half);
    if (place.has(begin, 4)) {
      load4<E>(from + begin, x, 4 * half);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        x[4 * half + k] = begin + k < place.size ? to_float(from[begin + k]) : 0.0f;
    }
  }
}

template <bool kWhole>
__device__ inline void store_floats(void* array, const Place<kWhole>& place, const float (&x)[8]) {
  float* to = static_cast<float*>(array);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t begin = place.begin(half);
    if (place.has(begin, 4)) {
      __stcs(reinterpret_cast<float4*>(to + begin),
             make_float4(x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]));
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (begin + k < place.size) to[begin + k] = x[4 * half + k];
    }
  }
}

// 8 bf16 in a row, from their bits.
template <bool kWhole>
__device__ inline void store_halves(void* array, const Place<kWhole>& place,
                                    const uint32_t (&bits)[8]) {
  uint16_t* to = static_cast<uint16_t*>(array) + place.first;
  if (place.has(place.first, 8)) {
    __stcs(reinterpret_cast<uint4*>(to),
           make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                      bits[6] | bits[7] << 16));
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (place.first + k < place.size) to[k] = static_cast<uint16_t>(bits[k]);
  }
}

// The larger, NaN if one is.
__device__ inline float larger(float x, float y) {
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(x), "f"(y));
  return found;
}

// A lane's codes, and the scales of both halves.
struct Codes {
  uint32_t words[2];
  float scales[2];
};

// A moment in 8 bits. Sizes are multiples of 64, so that vectors are within the array or beyond it.
template <bool kInRow, bool kSigned>
struct Moment {
  uint8_t* codes;
  float* scales;
  uint32_t block_log2;
  const Lookup& lookup;

  template <bool kWhole>
  __device__ Codes fetch(const Place<kWhole>& place) const {
    Codes of{};
    if constexpr (kInRow) {
      if (place.has(place.first, 1)) {
        const uint2 vector = __ldcs(reinterpret_cast<const uint2*>(codes + place.first));
        of.words[0] = vector.x, of.words[1] = vector.y;
        of.scales[0] = of.scales[1] = scales[place.first >> block_log2];
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t begin = place.begin(half);
        if (place.has(begin, 1)) {
          of.words[half] = __ldcs(reinterpret_cast<const uint32_t*>(codes + begin));
          of.scales[half] = scales[begin >> block_log2];
        }
      }
    }
    return of;
  }

  // The moment times `factor`.
  __device__ void decode(const Codes& of, float factor, float (&x)[8]) const {
    const float scales[2] = {of.scales[0] * factor, of.scales[1] * factor};
#pragma unroll
    for (int k = 0; k < 8; ++k)
      x[k] = lookup.value<kSigned>(of.words[k / 4], k % 4) * scales[k / 4];
  }

  // What entries of a block are multiplied by before they are looked up: kScale / scale.
  __device__ static float inverse_of(float scale) {
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
    return scale >= 1.17549435e-38f ? inverse * static_cast<float>(kScale<kSigned>) : 0.0f;
  }

  template <bool kWhole>
  __device__ void store(const Place<kWhole>& place, const float (&x)[8]) const {
    const uint32_t lane = threadIdx.x % 32;
    // Bits of |x| are in the order of |x|, and NaN's are the largest.
    uint32_t most[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* of = x + 4 * half;
      most[half] = __float_as_uint(
          larger(larger(fabsf(of[0]), fabsf(of[1])), larger(fabsf(of[2]), fabsf(of[3]))));
    }
    if (!place.has(place.first, 1)) most[0] = 0;
    if (!place.has(place.second, 1)) most[1] = 0;
    if constexpr (kInRow) {
      // Lanes of a block: 32, 16 or 8.
      const uint32_t lanes = 1u << (block_log2 - 3);
      const uint32_t members =
          lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1) << (lane & ~(lanes - 1));
      most[0] = most[1] = __reduce_max_sync(members, max(most[0], most[1]));
    } else if (block_log2 == 8) {
      most[0] = most[1] = __reduce_max_sync(0xffffffffu, max(most[0], most[1]));
    } else {
      const uint32_t members = block_log2 == 7 ? 0xffffffffu : lane < 16 ? 0xffffu : 0xffff0000u;
      most[0] = __reduce_max_sync(members, most[0]);
      most[1] = __reduce_max_sync(members, most[1]);
    }
    uint32_t words[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = inverse_of(__uint_as_float(most[half]));
      uint32_t four[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) four[k] = lookup.magnitude<kSigned>(x[4 * half + k], inverse);
      words[half] = joined(four[0], four[1], four[2], four[3]);
      if constexpr (kSigned) words[half] = with_signs(words[half], x + 4 * half);
    }
    const int64_t last = (int64_t{1} << block_log2) - 1;
    if constexpr (kInRow) {
      if (place.has(place.first, 1)) {
        __stcs(reinterpret_cast<uint2*>(codes + place.first), make_uint2(words[0], words[1]));
        if ((place.first & last) == 0)
          scales[place.first >> block_log2] = __uint_as_float(most[0]);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t begin = place.begin(half);
        if (place.has(begin, 1)) {
          __stcs(reinterpret_cast<uint32_t*>(codes + begin), words[half]);
          if ((begin & last) == 0) scales[begin >> block_log2] = __uint_as_float(most[half]);
        }
      }
    }
  }
};

// Subnormal x counts as 0.
__device__ inline float root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A step of a lane's entries.
template <class P, class G, bool kWhole>
__device__ inline void step(const OptimizerArray& array, const OptimizerScalars& s, uint32_t leaf,
                            const Lookup& lookup, const Place<kWhole>& place) {
  constexpr bool kInRow = sizeof(P) == 2;
  const float decay = leaf % 2 != 0 ? s.weight_decay : 0.0f;
  const Moment<kInRow, true> mu{static_cast<uint8_t*>(array.mu), array.mu_scales,
                                array.block_log2, lookup};
  const Moment<kInRow, false> nu{static_cast<uint8_t*>(array.nu), array.nu_scales,
                                 array.block_log2, lookup};
  float g[8], p[8], m[8], v[8];
  load<kInRow, G>(array.grads, place, g);
  load<kInRow, P>(array.params, place, p);
  const Codes of_mu = mu.fetch(place), of_nu = nu.fetch(place);
  mu.decode(of_mu, s.b1, m);
  nu.decode(of_nu, s.b2, v);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    g[k] *= s.clip;
    m[k] = s.rest1 * g[k] + m[k];
    v[k] = s.rest2 * (g[k] * g[k]) + v[k];
    const float below = root(v[k] * s.nu_scale + s.eps_root) + s.eps;
    const float step = (s.mu_scale * m[k] + s.grad_scale * g[k]) * reciprocal(below);
    p[k] -= s.learning_rate * (step + decay * p[k]);
  }
  mu.store(place, m);
  nu.store(place, v);
  if constexpr (std::is_same_v<P, float>) {
    store_floats(array.params, place, p);
  } else {
    uint32_t bits[8];
    if (s.rounds != 0) {
      const uint4 drawn = philox(static_cast<uint32_t>(place.first / 8), leaf / 2, s.step, s.seed);
      const uint32_t words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
      for (int k = 0; k < 8; ++k)
        bits[k] = rounded(p[k], k % 2 == 0 ? words[k / 2] & 0xffffu : words[k / 2] >> 16);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) bits[k] = __bfloat16_as_ushort(__float2bfloat16_rn(p[k]));
    }
    store_halves(array.params, place, bits);
  }
}

// The last array whose first tile is not after this CTA's.
__device__ inline uint32_t array_of_tile(const OptimizerArguments& a) {
  uint32_t low = 0, high = a.arrays;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (a.array[middle].first_tile <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class P, class G>
__device__ inline void adamw(const OptimizerArguments& a) {
  constexpr bool kInRow = sizeof(P) == 2;
  __shared__ Table table;
  constexpr uint32_t words = sizeof(Table) / sizeof(uint4);
  const uint4* from = reinterpret_cast<const uint4*>(&kTable);
  uint4* to = reinterpret_cast<uint4*>(&table);
  for (uint32_t i = threadIdx.x; i < words; i += kOptimizerThreads) to[i] = from[i];
  __syncthreads();
  const Lookup lookup(table);
  const uint32_t index = array_of_tile(a);
  const OptimizerArray& array = a.array[index];
  const OptimizerScalars s = *reinterpret_cast<const OptimizerScalars*>(a.scalars);
  const uint32_t leaf = static_cast<uint32_t>(a.leaves[index]);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t tile = static_cast<int64_t>(blockIdx.x - array.first_tile) * kOptimizerTile;
  const int64_t size = array.size, end = min(tile + int64_t{kOptimizerTile}, size);
  for (int64_t begin = tile + warp * 256; begin < end; begin += kOptimizerThreads * 8) {
    const int64_t first = begin + (kInRow ? 8 : 4) * lane;
    const int64_t second = first + (kInRow ? 4 : 128);
    if (begin + 256 <= size) {
      step<P, G>(array, s, leaf, lookup, Place<true>{first, second, size});
    } else {
      step<P, G>(array, s, leaf, lookup, Place<false>{first, second, size});
    }
  }
}

}  // namespace optimizers
}  // namespace xentile

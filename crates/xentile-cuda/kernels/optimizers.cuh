// Steps of AdamW with moments in 8 bits, over many arrays in one launch: parameters and state are
// written in their place.
//
// A multiprocessor has one CTA, whose tables a launch then makes once. Its warps take chunks of 256
// consecutive entries of an array, all warps of the grid in turns, a lane 8 entries of each: 8 in a
// row of parameters of 16 bits, and 4 in a row of both halves of the 256 where they are f32, so that
// every access is of vectors without gaps. A warp loads its next chunk before it encodes the moments
// of this one. Blocks of 8-bit state have 256, 128 or 64 entries and begin at multiples of that, so
// that a block is a chunk or less, its largest |entry| a reduction within the warp, and a vector
// within the array or beyond its end.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "element.cuh"

namespace xentile {

// Arrays of a launch, threads of a CTA, and entries of a warp's chunk.
inline constexpr uint32_t kOptimizerArrays = 256;
inline constexpr uint32_t kOptimizerThreads = 896;
inline constexpr uint32_t kOptimizerChunk = 256;
inline constexpr uint32_t kOptimizerSharedBytes = 98560;

// Mirrored by `Array` in src/optimizers.rs.
struct OptimizerArray {
  const void* grads;
  void* params;
  void* mu;
  void* nu;
  float* mu_scales;
  float* nu_scales;
  int64_t size;
  uint32_t first_chunk;
  uint32_t block_log2;  // of 8-bit state
};

// Mirrored by `Arguments` in src/optimizers.rs.
struct OptimizerArguments {
  const int32_t* scalars;
  const int32_t* leaves;  // of each array: twice its number in the tree, and whether it decays
  uint32_t arrays;
  uint32_t chunks;
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

// The values of the signed code, then those of the unsigned one.
struct Values {
  float of[2][256];
};

constexpr Values make_values() {
  Values values{};
  for (int i = 0; i < 2; ++i) {
    const bool is_signed = i == 0;
    const int zero = is_signed ? 127 : 0;
    values.of[i][zero] = 0;
    int magnitude = 1;
    for (int decade = 0; decade < kDecades; ++decade) {
      const int parts = 1 << (decade + (is_signed ? 0 : 1));
      for (int k = 0; k < parts; ++k) {
        const double fraction = 0.1 + 0.9 * (k + 0.5) / parts;
        const float value = static_cast<float>(kPowers[decade] * fraction);
        values.of[i][zero + magnitude] = value;
        if (is_signed) values.of[i][zero - magnitude] = -value;
        ++magnitude;
      }
    }
    values.of[i][zero + magnitude] = 1;
  }
  return values;
}

static __device__ const Values kValues = make_values();

// Bins of y = |x| / scale + 2^-23, which is in the octaves from 2^-23 to 2^-1, or 1: the 7 highest bits
// of its mantissa below 5 of its exponent. No bin of these octaves has more than one midpoint between
// values. A bin's entry added to y's bits has the code's distance from that of 0 in byte 2: it takes
// away the bin's first bits, and carries from the midpoint on. y of NaN is 0, whose bin is its own.
inline constexpr float kShift = 1.1920929e-7f;
inline constexpr int kBinBits = 16;
inline constexpr uint32_t kFirstBin = 8 << 7, kLastBin = 31 << 7;
inline constexpr uint32_t kFirstBits = 96u << 23;  // of bin 0, if it were an octave's

// Addresses in shared memory, so that a look-up adds none: bins, and for each code 256 bytes of copies
// of its values, one for each lane of both codes.
inline constexpr uint32_t kSignedBinsAt = 1024;
inline constexpr uint32_t kUnsignedBinsAt = kSignedBinsAt + 4 * (kLastBin + 2);
inline constexpr uint32_t kValuesAt = (kUnsignedBinsAt + 4 * (kLastBin + 1) + 255) / 256 * 256;
static_assert(kOptimizerSharedBytes == kValuesAt + 256 * 256);
// The least that these GPUs give a CTA.
static_assert(kOptimizerSharedBytes <= 99 * 1024);

// Writes a code's bins; `ends` has room for 255 words.
template <bool kSigned>
__device__ inline void make_bins(uint32_t* bins, uint32_t* ends) {
  constexpr uint32_t kTop = kSigned ? 128 : 255;
  const float* values = kValues.of[kSigned ? 0 : 1] + (kSigned ? 127 : 0);
  for (uint32_t k = threadIdx.x; k < kTop; k += blockDim.x)
    ends[k] = __float_as_uint(0.5f * values[k] + 0.5f * values[k + 1] + kShift);
  __syncthreads();
  for (uint32_t bin = kFirstBin + threadIdx.x; bin <= kLastBin; bin += blockDim.x) {
    const uint32_t begin = kFirstBits + (bin << kBinBits);
    // ends[code - 1] <= begin < ends[code]
    uint32_t code = 0, above = kTop;
    while (code < above) {
      const uint32_t middle = (code + above) / 2;
      if (ends[middle] <= begin) {
        code = middle + 1;
      } else {
        above = middle;
      }
    }
    const uint32_t rest = code < kTop ? ends[code] - begin : 1 << kBinBits;
    bins[bin] = (code << kBinBits) - begin + ((1u << kBinBits) - min(rest, 1u << kBinBits));
  }
  if (threadIdx.x == 0) bins[0] = kTop << kBinBits;
  __syncthreads();
}

// The tables in shared memory.
struct Lookup {
  uint32_t lane;

  __device__ explicit Lookup(unsigned char* shared) {
    const uint32_t begin = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    if (begin > kSignedBinsAt) __trap();
    shared -= begin;
    uint32_t* copies = reinterpret_cast<uint32_t*>(shared + kValuesAt);
    make_bins<true>(reinterpret_cast<uint32_t*>(shared + kSignedBinsAt), copies);
    make_bins<false>(reinterpret_cast<uint32_t*>(shared + kUnsignedBinsAt), copies);
    for (uint32_t i = threadIdx.x; i < 256 * 2 * 32; i += blockDim.x)
      copies[i] = __float_as_uint(kValues.of[i / 32 % 2][i / 64]);
    __syncthreads();
    lane = threadIdx.x % 32 * 4;
    // Loads, which are of these addresses, stay below the barrier above this.
    asm volatile("" : "+r"(lane) : : "memory");
  }

  // The value of byte k of a word of codes.
  template <bool kSigned>
  __device__ float value(uint32_t word, int k) const {
    const uint32_t at = __byte_perm(word, lane, 0x7604 | k << 4);
    float found;
    asm("ld.shared.f32 %0, [%1 + %2];"
        : "=f"(found)
        : "r"(at), "n"(kValuesAt + (kSigned ? 0 : 128)));
    return found;
  }

  // The distance from the code of 0 of the code nearest to x times `inverse`, in byte 2.
  template <bool kSigned>
  __device__ uint32_t magnitude(float x, float inverse) const {
    uint32_t y, entry;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=r"(y) : "f"(fabsf(x)), "f"(inverse), "f"(kShift));
    asm("ld.shared.u32 %0, [%1 + %2];"
        : "=r"(entry)
        : "r"(y >> (kBinBits - 2) & 4095 << 2), "n"(kSigned ? kSignedBinsAt : kUnsignedBinsAt));
    return y + entry;
  }
};

// Bytes 2 of four words, the first in the lowest.
__device__ inline uint32_t joined(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410);
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

// Both halves of a product, by one instruction.
__device__ inline uint2 product(uint32_t x, uint32_t y) {
  uint64_t both;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(both) : "r"(x), "r"(y));
  return make_uint2(static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32));
}

// Philox4x32-10 of the counter (group, array, step, 0) and the key (seed, 0).
__device__ inline uint4 philox(uint32_t group, uint32_t array, uint32_t step, uint32_t seed) {
  uint4 c = make_uint4(group, array, step, 0);
  uint32_t first = seed, second = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint2 one = product(c.x, 0xd2511f53u), other = product(c.z, 0xcd9e8d57u);
    c = make_uint4(other.y ^ c.y ^ first, other.x, one.y ^ c.w ^ second, one.x);
    first += 0x9e3779b9u;
    second += 0xbb67ae85u;
  }
  return c;
}

// Where a lane's entries of a chunk are, in groups of 8 in a row, or 4; beyond the array's end the
// chunk's first, which are loaded and not stored.
template <bool kInRow>
struct Place {
  static constexpr int kParts = kInRow ? 1 : 2;
  static constexpr uint32_t kGroup = kInRow ? 8 : 4;
  uint32_t group[kParts], scale[kParts];
  // Whether the part is within the array, and whether it begins a block.
  bool is_within[kParts], is_first[kParts];

  __device__ Place(const OptimizerArray& array, uint32_t chunk) {
    const uint32_t log2 = array.block_log2;
    const int64_t rest = array.size - int64_t{chunk} * kOptimizerChunk;
    const uint32_t count = static_cast<uint32_t>(min(rest, int64_t{kOptimizerChunk}));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t at = threadIdx.x % 32 * kGroup + 128 * part;
      is_within[part] = at < count;
      is_first[part] = is_within[part] && (at & ((1u << log2) - 1)) == 0;
      at = is_within[part] ? at : 0;
      group[part] = chunk * (kOptimizerChunk / kGroup) + at / kGroup;
      scale[part] = (chunk << (8 - log2)) + (at >> log2);
      // Kept rather than computed again by each access.
      asm volatile("" : "+r"(group[part]), "+r"(scale[part]));
    }
  }
};

// Vectors are loaded and stored by intrinsics: the compiler splits plain accesses here into words.

// A lane's 8 entries as they are in memory.
template <class E, bool kInRow>
struct Vectors {
  static constexpr int kCount = kInRow && sizeof(E) == 2 ? 1 : 2;
  using Vector = std::conditional_t<(sizeof(E) * 8 / kCount == 16), uint4, uint2>;
  Vector of[kCount];

  __device__ void load(const void* array, const Place<kInRow>& place) {
    const Vector* from = static_cast<const Vector*>(array);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      of[i] = __ldcs(from + (kInRow ? size_t{place.group[0]} * kCount + i : place.group[i]));
  }

  __device__ void widen(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(E) == 4) {
        x[4 * i] = __uint_as_float(of[i].x), x[4 * i + 1] = __uint_as_float(of[i].y);
        x[4 * i + 2] = __uint_as_float(of[i].z), x[4 * i + 3] = __uint_as_float(of[i].w);
      } else if constexpr (kInRow) {
        unpack<E>(of[i], x);
      } else {
        const float2 low = unpacked<E>(of[i].x), high = unpacked<E>(of[i].y);
        x[4 * i] = low.x, x[4 * i + 1] = low.y, x[4 * i + 2] = high.x, x[4 * i + 3] = high.y;
      }
    }
  }
};

// The larger, NaN if one is.
__device__ inline float larger(float x, float y) {
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(x), "f"(y));
  return found;
}

// The inverse of a scale; 0 of one below normal numbers, whose block is of zeros then.
__device__ inline float inverse_of(uint32_t scale) {
  float inverse;
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(__uint_as_float(scale)));
  return __uint_as_float(scale) >= 1.17549435e-38f ? inverse : 0.0f;
}

// A moment of a lane's entries in 8 bits.
template <bool kInRow, bool kSigned>
struct Moment {
  uint32_t words[2];
  float scales[Place<kInRow>::kParts];

  __device__ void load(const void* codes, const float* all, const Place<kInRow>& place) {
    if constexpr (kInRow) {
      const uint2 both = __ldcs(static_cast<const uint2*>(codes) + place.group[0]);
      words[0] = both.x, words[1] = both.y;
      scales[0] = all[place.scale[0]];
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        words[half] = __ldcs(static_cast<const uint32_t*>(codes) + place.group[half]);
        scales[half] = all[place.scale[half]];
      }
    }
  }

  // Entry k over its scale, and that.
  __device__ float code(const Lookup& lookup, int k) const {
    return lookup.template value<kSigned>(words[k / 4], k % 4);
  }
  __device__ float scale(int k) const { return scales[kInRow ? 0 : k / 4]; }

  __device__ static void store(void* codes, float* all, uint32_t block_log2,
                               const Place<kInRow>& place, const float (&x)[8],
                               const Lookup& lookup) {
    const uint32_t lane = threadIdx.x % 32;
    // Bits of |x| are in the order of |x|, and NaN's are the largest.
    uint32_t most[2];
    float inverses[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* of = x + 4 * half;
      const float all_of = larger(larger(fabsf(of[0]), fabsf(of[1])),
                                  larger(fabsf(of[2]), fabsf(of[3])));
      most[half] = place.is_within[kInRow ? 0 : half] ? __float_as_uint(all_of) : 0;
    }
    if (kInRow || block_log2 == 8) {
      // Lanes of a block.
      const uint32_t lanes = 1u << (block_log2 - 3);
      const uint32_t members =
          lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1) << (lane & ~(lanes - 1));
      most[0] = most[1] = __reduce_max_sync(members, max(most[0], most[1]));
      inverses[0] = inverses[1] = inverse_of(most[0]);
    } else {
      const uint32_t members = block_log2 == 7 ? 0xffffffffu : lane < 16 ? 0xffffu : 0xffff0000u;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        most[half] = __reduce_max_sync(members, most[half]);
        inverses[half] = inverse_of(most[half]);
      }
    }
    uint32_t words[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t four[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        four[k] = lookup.template magnitude<kSigned>(x[4 * half + k], inverses[half]);
      words[half] = joined(four[0], four[1], four[2], four[3]);
      if constexpr (kSigned) words[half] = with_signs(words[half], x + 4 * half);
    }
    if constexpr (kInRow) {
      if (place.is_within[0])
        __stcs(static_cast<uint2*>(codes) + place.group[0], make_uint2(words[0], words[1]));
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (place.is_within[half])
          __stcs(static_cast<uint32_t*>(codes) + place.group[half], words[half]);
    }
#pragma unroll
    for (int part = 0; part < Place<kInRow>::kParts; ++part)
      if (place.is_first[part]) all[place.scale[part]] = __uint_as_float(most[part]);
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

// Words of 8 bf16, each rounded away from 0 where 16 random bits reach the rest.
__device__ inline void round_stochastically(float (&x)[8], uint4 drawn, uint32_t (&words)[4]) {
  // Random bits would carry out of NaN's.
  const float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
  if (isnan(sum)) {
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = isnan(x[k]) ? __uint_as_float(0x7fc00000u) : x[k];
  }
  const uint32_t random[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
  for (int k = 0; k < 4; ++k)
    words[k] = __byte_perm(__float_as_uint(x[2 * k]) + (random[k] & 0xffffu),
                           __float_as_uint(x[2 * k + 1]) + (random[k] >> 16), 0x7632);
}

template <class P>
__device__ inline void store_params(void* array, const Place<sizeof(P) == 2>& place, float (&p)[8],
                                    const OptimizerScalars& s, uint32_t leaf) {
  if constexpr (std::is_same_v<P, float>) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (place.is_within[half])
        __stcs(static_cast<float4*>(array) + place.group[half],
               make_float4(p[4 * half], p[4 * half + 1], p[4 * half + 2], p[4 * half + 3]));
  } else {
    uint32_t words[4];
    if (s.rounds != 0) {
      round_stochastically(p, philox(place.group[0], leaf / 2, s.step, s.seed), words);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) words[k] = packed<P>(p[2 * k], p[2 * k + 1]);
    }
    if (place.is_within[0])
      __stcs(static_cast<uint4*>(array) + place.group[0],
             make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// The last array whose first chunk is not after this one.
__device__ inline uint32_t array_of(const OptimizerArguments& a, uint32_t chunk) {
  uint32_t low = 0, high = a.arrays;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (a.array[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class P, class G>
__device__ inline void adamw(const OptimizerArguments& a) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr bool kInRow = sizeof(P) == 2;
  const OptimizerScalars s = *reinterpret_cast<const OptimizerScalars*>(a.scalars);
  const float rest1 = s.rest1 * s.clip, root_rest2 = sqrtf(s.rest2) * s.clip;
  const float along_mu = s.learning_rate * s.mu_scale;
  const float along_grad = s.learning_rate * s.grad_scale * s.clip;
  const float along_param = s.learning_rate * s.weight_decay;

  Vectors<G, kInRow> grads;
  Vectors<P, kInRow> params;
  Moment<kInRow, true> mu;
  Moment<kInRow, false> nu;
  constexpr uint32_t kWarps = kOptimizerThreads / 32;
  // The same for all lanes, as the compiler sees by the shuffle.
  uint32_t chunk = __shfl_sync(0xffffffffu, blockIdx.x * kWarps + threadIdx.x / 32, 0);
  uint32_t index = array_of(a, chunk);
  const auto load = [&] {
    while (index + 1 < a.arrays && a.array[index + 1].first_chunk <= chunk) ++index;
    const OptimizerArray& array = a.array[index];
    const Place<kInRow> place(array, chunk - array.first_chunk);
    grads.load(array.grads, place);
    params.load(array.params, place);
    mu.load(array.mu, array.mu_scales, place);
    nu.load(array.nu, array.nu_scales, place);
  };
  if (chunk < a.chunks) load();
  const Lookup lookup(shared);
  while (chunk < a.chunks) {
    const OptimizerArray& array = a.array[index];
    const uint32_t leaf = static_cast<uint32_t>(__ldg(a.leaves + index));
    const Place<kInRow> place(array, chunk - array.first_chunk);
    float g[8], p[8], m[8], v[8];
    grads.widen(g);
    params.widen(p);
    const float decay = leaf % 2 != 0 ? along_param : 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      m[k] = fmaf(mu.code(lookup, k), mu.scale(k) * s.b1, rest1 * g[k]);
      const float part = root_rest2 * g[k];
      v[k] = fmaf(part, part, nu.code(lookup, k) * (nu.scale(k) * s.b2));
      const float below = root(fmaf(v[k], s.nu_scale, s.eps_root)) + s.eps;
      const float step = fmaf(along_mu, m[k], along_grad * g[k]);
      // p is rounded once: 1 less the decay would be a multiple of 2^-24, as large as usual decays.
      p[k] -= fmaf(step, reciprocal(below), decay * p[k]);
    }
    store_params<P>(array.params, place, p, s, leaf);
    chunk += gridDim.x * kWarps;
    if (chunk < a.chunks) load();
    mu.store(array.mu, array.mu_scales, array.block_log2, place, m, lookup);
    nu.store(array.nu, array.nu_scales, array.block_log2, place, v, lookup);
  }
}

}  // namespace optimizers
}  // namespace xentile

// RMSNorm quantised to FP8 in parts of 128 columns. Without the transposed copy a row is read once: y is made of
// the registers that hold it, rounded as it would be in memory, and 16 lanes have a part. With it rstd comes
// first, and the sum with a residual, and then tiles of 128 rows, of a second read.
#include "fp8_quantize_turned.cuh"
#include "norm_forward.cuh"

using namespace xentile;

namespace xentile {

// Mirrored by `NormedArguments` in src/fp8_quantize/arguments.rs. Without values in `to`, the norm writes
// statistics, and the sum, alone.
struct Fp8NormArguments {
  NormArguments norm;
  Fp8QuantizeArguments to;
};

namespace fp8 {

// Takes y in the place of an array, all that a thread has of a row, so that its maxima go over lanes side by
// side. Warps are whole; of what is not there units are zeros.
struct StoreValues {
  static constexpr bool kTogether = true;
  const Fp8QuantizeArguments& a;

  template <class E, int kVectors, class Has>
  __device__ void store(int64_t first, uint32_t step, uint4 (&units)[kVectors],
                        const Has& has) const {
    static_assert(kPerVector<E> == 8 && kVectors % 2 == 0, "16 lanes have a part");
    if (a.values == nullptr) return;
    // Two units' maxima share a word.
    float scales[kVectors];
    uint32_t most[kVectors / 2];
#pragma unroll
    for (int i = 0; i < kVectors; i += 2) {
      const uint32_t one = most_of<E>(0, units[i]), other = most_of<E>(0, units[i + 1]);
      most[i / 2] = larger<E>(__byte_perm(one, other, 0x5410), __byte_perm(one, other, 0x7632));
    }
#pragma unroll
    for (uint32_t by = 8; by > 0; by /= 2) {
#pragma unroll
      for (int i = 0; i < kVectors / 2; ++i) {
        most[i] = larger<E>(most[i], __shfl_xor_sync(kWarp, most[i], by));
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; i += 2) {
      const float2 pair = unpacked<E>(most[i / 2]);
      scales[i] = pair.x, scales[i + 1] = pair.y;
    }
    to_scales(a, scales);
    forget(units);
    if (a.e5m2) {
      store_by<E, true>(first, step, units, scales, has);
    } else {
      store_by<E, false>(first, step, units, scales, has);
    }
  }

  template <class E, bool kE5M2, int kVectors, class Has>
  __device__ void store_by(int64_t first, uint32_t step, const uint4 (&units)[kVectors],
                           const float (&scales)[kVectors], const Has& has) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!has(i)) continue;
      const int64_t vector = first + i * step;
      fp8::store<E, kE5M2, true>(a.values + vector * 8, units[i], reciprocal(scales[i]), 8);
      if (threadIdx.x % 16 == 0) a.numbers[vector / 16] = scales[i];
    }
  }
};

// Rows, normalised by the rstd that is there.
template <class E>
struct Normed {
  static constexpr int kPer = kPerVector<E>;
  using Raw = uint4;

  const NormArguments& a;
  const E* x;

  __device__ explicit Normed(const Fp8NormArguments& arguments)
      : a(arguments.norm), x(static_cast<const E*>(arguments.to.x)) {}

  template <bool kAligned, bool kStreams>
  __device__ Raw load(int64_t at, int count) const {
    return fp8::load<E, true, kStreams>(x + at, count);
  }

  struct Columns {
    float weight[kPer];
  };

  __device__ Columns of_columns(int64_t column, int count) const {
    Columns found;
    if (count > 0) {
      with_dtype(a.weight_dtype, a.weight, column,
                 [&](auto* weight) { scales<kPer>(a, weight, found.weight); });
    }
    return found;
  }

  __device__ uint4 unit_of(const Raw& raw, const Columns& of, int64_t row, int count) const {
    if (count <= 0) return make_uint4(0, 0, 0, 0);
    const float rstd = __ldg(a.rstd + row);
    float y[kPer];
    unpack<E>(raw, y);
#pragma unroll
    for (int i = 0; i < kPer; ++i) y[i] = y[i] * rstd * of.weight[i];
    return pack<E>(y);
  }
};

}  // namespace fp8
}  // namespace xentile

#define FP8_NORM(add, adds, dtype, E)                                                  \
  extern "C" __global__ void __launch_bounds__(1024, 1)                                \
      fp8_quantize_norm##add##_forward_held4_##dtype(                                  \
          const __grid_constant__ Fp8NormArguments a) {                                \
    norm_held_to<E, false, adds, 4, 1>(a.norm, fp8::StoreValues{a.to});                \
  }

#define FP8_NORM_TURNED(format, dtype, E, kE5M2)                                       \
  extern "C" __global__ void __launch_bounds__(fp8::kTurnedThreads<E>, 3)              \
      fp8_quantize_turned_norm_##format##_##dtype(                                     \
          const __grid_constant__ Fp8NormArguments a) {                                \
    __shared__ fp8::TurnedShared shared;                                               \
    fp8::Turned<E, fp8::Scales::kOfRuns, kE5M2, true, fp8::Normed<E>>(                 \
        a.to, fp8::Normed<E>(a))                                                       \
        .run(shared);                                                                  \
  }

// Of the dtype that activations have where FP8 is trained with.
FP8_NORM(, false, bf16, __nv_bfloat16)
FP8_NORM(_add, true, bf16, __nv_bfloat16)
FP8_NORM_TURNED(f8e4m3fn, bf16, __nv_bfloat16, false)
FP8_NORM_TURNED(f8e5m2, bf16, __nv_bfloat16, true)

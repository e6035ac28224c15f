// SwiGLU quantised to FP8 in parts of 128 columns: a unit of y is made of what the registers hold of gate and up,
// rounded as it would be in memory, and goes where fp8_quantize takes its own. Rows are whole parts.
#include "activation.cuh"
#include "fp8_quantize_blocks.cuh"
#include "fp8_quantize_transposed.cuh"

using namespace xentile;

namespace xentile {

// Mirrored by `GatedArguments` in src/fp8_quantize/arguments.rs. `to` is of y; its x is the gate, or what packs
// both.
struct Fp8GatedArguments {
  Fp8QuantizeArguments to;
  const void* up;   // from where its first vector is
  int64_t columns;  // of y, whatever `to` takes for a row
  float alpha;
  float limit;  // infinite for none
  float up_offset;
  uint32_t packing;  // of kFp8Apart and so on
};

// Mirrored by `NUMBERS` in src/fp8_quantize/arguments.rs.
inline constexpr uint32_t kFp8Apart = 0, kFp8Halves = 1, kFp8Interleaved = 2;
inline constexpr uint32_t kFp8GatedBatch = 4;  // runs of a team

namespace fp8 {

template <class E>
struct Gated {
  static constexpr int kPer = kPerVector<E>;

  struct Raw {
    uint4 gate, up;  // or two vectors of both in turn
  };

  const Fp8GatedArguments& a;
  int64_t begin;

  __device__ explicit Gated(const Fp8GatedArguments& arguments) : a(arguments), begin(0) {}

  __device__ Gated from(int64_t element) const {
    Gated other(a);
    other.begin = begin + element;
    return other;
  }

  template <bool kAligned, bool kStreams>
  __device__ Raw load(int64_t at, int count) const {
    int64_t place = begin + at;
    if (a.packing == kFp8Interleaved) {
      place *= 2;
    } else if (a.packing == kFp8Halves && count > 0) {
      place += quotient_of(place, a.columns) * a.columns;
    }
    return {fp8::load<E, true, kStreams>(static_cast<const E*>(a.to.x) + place, count),
            fp8::load<E, true, kStreams>(static_cast<const E*>(a.up) + place, count)};
  }

  __device__ uint4 unit(const Raw& raw) const {
    float gate[kPer], up[kPer];
    unpack<E>(raw.gate, gate);
    unpack<E>(raw.up, up);
    if (a.packing == kFp8Interleaved) {
      float even[kPer], odd[kPer];
      activation::in_turn<kPer>(gate, up, even, odd);
#pragma unroll
      for (int i = 0; i < kPer; ++i) gate[i] = even[i], up[i] = odd[i];
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      gate[i] = activation::gated<kActivationSilu>(a, gate[i], up[i]);
    }
    return pack<E>(gate);
  }

  struct Columns {};
  __device__ Columns of_columns(int64_t, int) const { return {}; }
  __device__ uint4 unit_of(const Raw& raw, const Columns&, int64_t, int) const { return unit(raw); }
};

}  // namespace fp8
}  // namespace xentile

#define FP8_GATED(format, dtype, E, kE5M2)                                            \
  extern "C" __global__ void __launch_bounds__(kFp8RunThreads, 6)                     \
      fp8_quantize_gated_##format##_##dtype(const __grid_constant__ Fp8GatedArguments a) { \
    fp8::runs<E, kE5M2, fp8::Parts::kRows, fp8::Values::kByOwn, kFp8GatedBatch>(      \
        a.to, fp8::Gated<E>(a));                                                      \
  }                                                                                   \
  extern "C" __global__ void __launch_bounds__(fp8::kTurnedThreads<E>, 2)             \
      fp8_quantize_transposed_gated_##format##_##dtype(                                            \
          const __grid_constant__ Fp8GatedArguments a) {                              \
    __shared__ fp8::TurnedShared shared;                                              \
    fp8::Transposed<E, fp8::Scales::kOfRuns, kE5M2, true, fp8::Gated<E>>(                 \
        a.to, fp8::Gated<E>(a))                                                       \
        .run(shared);                                                                 \
  }

// Of the dtype that activations have where FP8 is trained with.
FP8_GATED(f8e4m3fn, bf16, __nv_bfloat16, false)
FP8_GATED(f8e5m2, bf16, __nv_bfloat16, true)

// Activations of one array and gated, and their gradients; src/activation.rs of the crate xentile says
// what they are. Entries know nothing of each other, so that all is flat: a *unit* is a vector of 16
// bytes of y, and what makes it. A CTA takes kActivationThreads x kActivationBatch units that follow one
// another. A thread asks for all that its units read before it computes, so that enough is under way.
//
// A sigmoid is rcp(1 + ex2(z)), each within 2 units in the last place: GELU by tanh is one too, since
// (1 + tanh(z / 2)) / 2 is the sigmoid of z.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "ptx.cuh"

namespace xentile {

// Mirrored by `Arguments` in src/activation/arguments.rs.
struct ActivationArguments {
  const void* x;   // [rows, columns], or twice as many columns where two arrays are packed
  const void* dy;  // [rows, columns]; backward alone reads it
  void* result;    // y [rows, columns], or dx in the shape of x
  void* y;         // [rows, columns]; a backward pass that recomputes y alone writes it
  int64_t rows;
  int64_t columns;
  float alpha;
  float limit;  // infinite for none
  float up_offset;
  uint32_t kind;
};

inline constexpr uint32_t kActivationThreads = 128;
// Units of a thread.
inline constexpr uint32_t kActivationBatch = 4;

// Mirrored by `NUMBERS` in src/activation/arguments.rs.
inline constexpr uint32_t kActivationSilu = 0;
inline constexpr uint32_t kActivationGeluTanh = 1;
inline constexpr uint32_t kActivationGeluErf = 2;
inline constexpr uint32_t kActivationRelu = 3;
inline constexpr uint32_t kActivationSquaredRelu = 4;

enum class Packing { kSingle, kHalves, kInterleaved };

namespace activation {

inline constexpr float kLog2E = 1.44269504f;

struct At {
  float value;
  float slope;
};

// e^(-x^2 / 2) times this, at w = 1 / (1 + kErfcScale |x|), is erfc(|x| / sqrt(2)) / 2: this project's own
// minimax fit of the relative error, 2^-24.7.
inline constexpr float kErfcScale = 0.296225684f;

__device__ inline float half_erfc_polynomial(float w) {
  float p = 0.0393590671f;
  p = fmaf(p, w, -0.180690724f);
  p = fmaf(p, w, 0.261786183f);
  p = fmaf(p, w, -0.108041973f);
  p = fmaf(p, w, 0.160919802f);
  p = fmaf(p, w, 0.0870508764f);
  p = fmaf(p, w, 0.121775747f);
  p = fmaf(p, w, 0.117826395f);
  return fmaf(p, w, 1.4644544e-5f);
}

// f at x; its slope too, which costs nothing where it is not used.
template <uint32_t kKind>
__device__ inline At at(float x, float alpha) {
  if constexpr (kKind == kActivationSilu) {
    const float s = ptx::rcp(1.0f + ptx::ex2(x * (-kLog2E * alpha)));
    const float value = x * s;
    return {value, fmaf(alpha * value, 1.0f - s, s)};
  } else if constexpr (kKind == kActivationGeluTanh) {
    constexpr float kFirst = 1.59576912f;                 // 2 sqrt(2 / pi)
    constexpr float kThird = kFirst * 0.044715f;
    // Beyond, the sigmoid is 0 or 1, and its slope would be infinity times 0.
    const float square = fminf(x * x, 400.0f);
    const float z = x * fmaf(square, -kLog2E * kThird, -kLog2E * kFirst);
    const float s = ptx::rcp(1.0f + ptx::ex2(z));
    const float value = x * s;
    const float dz = fmaf(square, 3.0f * kThird, kFirst);
    return {value, fmaf(value * dz, 1.0f - s, s)};
  } else if constexpr (kKind == kActivationGeluErf) {
    const float e = ptx::ex2(x * x * (-0.5f * kLog2E));
    const float w = ptx::rcp(fmaf(fabsf(x), kErfcScale, 1.0f));
    const float tail = half_erfc_polynomial(w) * e;
    const float below = x > 0.0f ? 1.0f - tail : tail;
    return {x * below, fmaf(x, 0.398942280f * e, below)};
  } else {
    const float above = x < 0.0f ? 0.0f : x;
    if constexpr (kKind == kActivationSquaredRelu) return {above * above, 2.0f * above};
    // NaN stays what it is.
    return {above, x > 0.0f ? 1.0f : (x <= 0.0f ? 0.0f : x)};
  }
}

// Gate and up within their limit, and whether they were.
struct Gated {
  float gate;
  float up;
  bool gate_is_within;
  bool up_is_within;

  // Arguments say `limit` and `up_offset`.
  template <class Arguments>
  __device__ Gated(const Arguments& a, float gate_given, float up_given)
      : gate_is_within(!(gate_given > a.limit)), up_is_within(!(fabsf(up_given) > a.limit)) {
    gate = gate_is_within ? gate_given : a.limit;
    up = (up_is_within ? up_given : copysignf(a.limit, up_given)) + a.up_offset;
  }
};

// Which arrays a pass writes: y, dx, or both.
enum class Writes { kY, kDx, kDxAndY };

template <uint32_t kKind, class Arguments>
__device__ inline float gated(const Arguments& a, float gate, float up) {
  const Gated both(a, gate, up);
  return at<kKind>(both.gate, a.alpha).value * both.up;
}

struct GatedGradient {
  float gate;
  float up;
  float y;  // that of the forward pass, bit by bit
};

template <uint32_t kKind>
__device__ inline GatedGradient gated_gradient(const ActivationArguments& a, float gate, float up,
                                               float dy) {
  const Gated both(a, gate, up);
  const At f = at<kKind>(both.gate, a.alpha);
  return {both.gate_is_within ? dy * both.up * f.slope : 0.0f,
          both.up_is_within ? dy * f.value : 0.0f, f.value * both.up};
}

// The numbers of two vectors in turn, as they lie in memory; and back.
template <int kPer>
__device__ inline void in_turn(const float (&first)[kPer], const float (&second)[kPer],
                               float (&even)[kPer], float (&odd)[kPer]) {
#pragma unroll
  for (int i = 0; i < kPer / 2; ++i) {
    even[i] = first[2 * i];
    odd[i] = first[2 * i + 1];
    even[kPer / 2 + i] = second[2 * i];
    odd[kPer / 2 + i] = second[2 * i + 1];
  }
}

template <int kPer>
__device__ inline void to_turns(const float (&even)[kPer], const float (&odd)[kPer],
                                float (&first)[kPer], float (&second)[kPer]) {
#pragma unroll
  for (int i = 0; i < kPer / 2; ++i) {
    first[2 * i] = even[i];
    first[2 * i + 1] = odd[i];
    second[2 * i] = even[kPer / 2 + i];
    second[2 * i + 1] = odd[kPer / 2 + i];
  }
}

template <class E, Packing kPacking, Writes kWrites, uint32_t kKind>
struct Pass {
  static constexpr bool kBackward = kWrites != Writes::kY;
  static constexpr bool kWithY = kWrites == Writes::kDxAndY;
  static constexpr int kPer = kPerVector<E>;
  static constexpr bool kPairs = kPacking != Packing::kSingle;

  const ActivationArguments& a;

  // What a unit reads.
  struct Unit {
    uint4 x[kPairs ? 2 : 1];
    uint4 dy;
  };

  // Where the vectors of a unit's x lie, the second of them `apart` further.
  struct Place {
    int64_t x;
    int64_t y;
  };

  __device__ int64_t apart() const { return kPacking == Packing::kHalves ? a.columns / kPer : 1; }

  __device__ void load(Unit& unit, Place place) const {
    const uint4* x = static_cast<const uint4*>(a.x) + place.x;
    unit.x[0] = __ldcs(x);
    if constexpr (kPairs) unit.x[1] = __ldcs(x + apart());
    if constexpr (kBackward) unit.dy = __ldcs(static_cast<const uint4*>(a.dy) + place.y);
  }

  __device__ void store(const Unit& unit, Place place) const {
    float x[kPer], dy[kPer], out[kPer];
    unpack<E>(unit.x[0], x);
    if constexpr (kBackward) unpack<E>(unit.dy, dy);
    uint4* result = static_cast<uint4*>(a.result);
    uint4* y_again = static_cast<uint4*>(a.y);
    if constexpr (!kPairs) {
      float value[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const At f = at<kKind>(x[i], a.alpha);
        value[i] = f.value;
        out[i] = kBackward ? dy[i] * f.slope : f.value;
      }
      __stcs(result + place.y, pack<E>(out));
      if constexpr (kWithY) __stcs(y_again + place.y, pack<E>(value));
    } else {
      float gate[kPer], up[kPer], second[kPer];
      unpack<E>(unit.x[1], second);
      if constexpr (kPacking == Packing::kInterleaved) {
        in_turn<kPer>(x, second, gate, up);
      } else {
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          gate[i] = x[i];
          up[i] = second[i];
        }
      }
      if constexpr (!kBackward) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) out[i] = gated<kKind>(a, gate[i], up[i]);
        __stcs(result + place.y, pack<E>(out));
      } else {
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          const GatedGradient both = gated_gradient<kKind>(a, gate[i], up[i], dy[i]);
          gate[i] = both.gate;
          up[i] = both.up;
          dy[i] = both.y;
        }
        if constexpr (kWithY) __stcs(y_again + place.y, pack<E>(dy));
        if constexpr (kPacking == Packing::kInterleaved) {
          to_turns<kPer>(gate, up, out, second);
          __stcs(result + place.x, pack<E>(out));
          __stcs(result + place.x + 1, pack<E>(second));
        } else {
          __stcs(result + place.x, pack<E>(gate));
          __stcs(result + place.x + apart(), pack<E>(up));
        }
      }
    }
  }

  // The entry of y at `index`, whose gate lies at `start` in x.
  __device__ void one(int64_t index, int64_t start, int64_t apart) const {
    const E* x = static_cast<const E*>(a.x);
    E* result = static_cast<E*>(a.result);
    const float dy = kBackward ? to_float(static_cast<const E*>(a.dy)[index]) : 0.0f;
    const float gate = to_float(x[start]);
    E* y_again = static_cast<E*>(a.y);
    if constexpr (!kPairs) {
      const At f = at<kKind>(gate, a.alpha);
      result[index] = from_float<E>(kBackward ? dy * f.slope : f.value);
      if constexpr (kWithY) y_again[index] = from_float<E>(f.value);
    } else if constexpr (!kBackward) {
      result[index] = from_float<E>(gated<kKind>(a, gate, to_float(x[start + apart])));
    } else {
      const GatedGradient both = gated_gradient<kKind>(a, gate, to_float(x[start + apart]), dy);
      result[start] = from_float<E>(both.gate);
      result[start + apart] = from_float<E>(both.up);
      if constexpr (kWithY) y_again[index] = from_float<E>(both.y);
    }
  }

  // The row of the piece `index` of rows of `per_row` pieces, `end` in all.
  __device__ static int64_t row_of(int64_t index, int64_t end, int64_t per_row) {
    // A division of 64 bits takes as long as many entries.
    return end <= UINT32_MAX ? static_cast<uint32_t>(index) / static_cast<uint32_t>(per_row)
                             : index / per_row;
  }

  // Halves of rows that begin at no vector, entry by entry.
  __device__ void ragged(int64_t entries) const {
    constexpr int64_t kEntries = kActivationThreads * kActivationBatch * kPer;
    const int64_t stop = min((blockIdx.x + 1) * kEntries, entries);
#pragma unroll 1
    for (int64_t i = blockIdx.x * kEntries + threadIdx.x; i < stop; i += kActivationThreads) {
      one(i, i + row_of(i, entries, a.columns) * a.columns, a.columns);
    }
  }

  __device__ void run() const {
    const int64_t entries = a.rows * a.columns;
    constexpr int64_t kUnits = kActivationThreads * kActivationBatch;
    const int64_t first = blockIdx.x * kUnits + threadIdx.x;
    Unit units[kActivationBatch];
    if constexpr (kPacking == Packing::kHalves) {
      if (a.columns % kPer != 0) return ragged(entries);
      const int64_t per_row = a.columns / kPer;
      const int64_t end = entries / kPer;
      // Where the row of each unit begins in y; in x it is twice as far.
      int64_t starts[kActivationBatch];
      int64_t start = row_of(first, end, per_row) * per_row;
#pragma unroll
      for (uint32_t i = 0; i < kActivationBatch; ++i) {
        const int64_t index = first + i * kActivationThreads;
        if (index >= start + per_row) start = row_of(index, end, per_row) * per_row;
        starts[i] = start;
        if (index < end) load(units[i], {index + start, index});
      }
#pragma unroll
      for (uint32_t i = 0; i < kActivationBatch; ++i) {
        const int64_t index = first + i * kActivationThreads;
        if (index < end) store(units[i], {index + starts[i], index});
      }
    } else {
      const int64_t end = entries / kPer;
#pragma unroll
      for (uint32_t i = 0; i < kActivationBatch; ++i) {
        const int64_t index = first + i * kActivationThreads;
        if (index < end) load(units[i], {kPairs ? 2 * index : index, index});
      }
#pragma unroll
      for (uint32_t i = 0; i < kActivationBatch; ++i) {
        const int64_t index = first + i * kActivationThreads;
        if (index < end) store(units[i], {kPairs ? 2 * index : index, index});
      }
      // What fills no vector.
      const int64_t rest = end * kPer + threadIdx.x;
      if (blockIdx.x + 1 == gridDim.x && rest < entries) one(rest, kPairs ? 2 * rest : rest, 1);
    }
  }
};

template <class E, Packing kPacking, Writes kWrites>
__device__ inline void run(const ActivationArguments& a) {
  switch (a.kind) {
    case kActivationSilu:
      return Pass<E, kPacking, kWrites, kActivationSilu>{a}.run();
    case kActivationGeluTanh:
      return Pass<E, kPacking, kWrites, kActivationGeluTanh>{a}.run();
    case kActivationGeluErf:
      return Pass<E, kPacking, kWrites, kActivationGeluErf>{a}.run();
    case kActivationRelu:
      return Pass<E, kPacking, kWrites, kActivationRelu>{a}.run();
    default:
      return Pass<E, kPacking, kWrites, kActivationSquaredRelu>{a}.run();
  }
}

}  // namespace activation
}  // namespace xentile

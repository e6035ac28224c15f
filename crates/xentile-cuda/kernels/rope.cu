// Rotary position embedding; src/rope.rs of the crate xentile says what it is. All is flat: units (rope.cuh)
// know nothing of each other, and each reads all of its own before it writes, so that y may be x.
// A thread asks for all that its units read before it computes, so that enough is under way. Heads of a
// token find their row of the tables in the nearest cache.
#include <cstdint>

#include "rope.cuh"

using namespace xentile;

namespace xentile {

// Mirrored by `Arguments` in src/rope/arguments.rs.
struct RopeArguments {
  const void* x;           // [rows, columns]
  const int32_t* indices;  // [rows]
  const float* cos;        // [groups, positions, pairs]
  const float* sin;
  void* y;  // as x; may be x
  int64_t rows;
  int64_t rows_of_group;
  int64_t positions;
  int64_t columns;
  int64_t pairs;
  int64_t units;  // of a row
  float sign;     // of sines
  uint32_t in_place;
};

// Mirrored by `NUMBERS` in src/rope/arguments.rs.
inline constexpr uint32_t kRopeThreads = 128;
inline constexpr uint32_t kRopeBatch = 4;  // units of a thread

namespace rope {

// kSingle units are a pair, or a column that is copied: for rows that do not consist of vectors.
enum class Units { kHalves, kInterleaved, kSingleHalves, kSingleInterleaved };

template <class E, Units kUnits>
struct Pass {
  static constexpr bool kVectors = kUnits == Units::kHalves || kUnits == Units::kInterleaved;
  static constexpr bool kInterleaved =
      kUnits == Units::kInterleaved || kUnits == Units::kSingleInterleaved;
  static constexpr int kPer = kPerVector<E>;
  // Pairs of a unit that turns.
  static constexpr int kPairs = !kVectors ? 1 : kInterleaved ? kPer / 2 : kPer;

  const RopeArguments& a;

  // Where a unit lies, and whether it turns.
  struct Place {
    int64_t row;
    int64_t unit;
    bool turns;
  };

  struct Unit {
    Place place;
    uint4 first, second;
    Angles<kPairs> angles;
  };

  __device__ Place place(int64_t index) const {
    Place at;
    // Most grids have fewer than 2^32 units, whose division is the short one.
    if (index >> 32 == 0 && a.units >> 32 == 0) {
      at.row = static_cast<uint32_t>(index) / static_cast<uint32_t>(a.units);
    } else {
      at.row = index / a.units;
    }
    at.unit = index - at.row * a.units;
    at.turns = at.unit < a.pairs / kPairs;
    return at;
  }

  // The first column of a unit that is copied, after all that turn.
  __device__ int64_t copied(int64_t unit) const {
    return 2 * a.pairs + (unit - a.pairs / kPairs) * (kVectors ? kPer : 1);
  }

  __device__ void load_tables(Unit& unit) const {
    const int64_t index = a.indices[unit.place.row];
    if (index < 0 || index >= a.positions) return unit.angles.forget();
    const int64_t group = a.rows_of_group == a.rows ? 0 : unit.place.row / a.rows_of_group;
    const int64_t at = (group * a.positions + index) * a.pairs + unit.place.unit * kPairs;
    unit.angles.load(a.cos + at, a.sin + at);
  }

  // Where the unit's first and second columns begin, in elements.
  __device__ int64_t begin(const Place& at) const {
    const int64_t row = at.row * a.columns;
    if (!at.turns) return row + copied(at.unit);
    return row + at.unit * (kInterleaved ? 2 * kPairs : kPairs);
  }

  __device__ int64_t apart() const { return kInterleaved ? 1 : a.pairs; }

  __device__ void load(Unit& unit) const {
    const E* x = static_cast<const E*>(a.x) + begin(unit.place);
    if (unit.place.turns) load_tables(unit);
    if constexpr (kVectors) {
      unit.first = __ldcs(reinterpret_cast<const uint4*>(x));
      if (!kInterleaved && unit.place.turns) {
        unit.second = __ldcs(reinterpret_cast<const uint4*>(x + a.pairs));
      }
    } else if (unit.place.turns) {
      unit.first.x = __float_as_uint(to_float(x[0]));
      unit.second.x = __float_as_uint(to_float(x[apart()]));
    }
  }

  __device__ void store(const Unit& unit) const {
    const int64_t at = begin(unit.place);
    E* y = static_cast<E*>(a.y) + at;
    if (!unit.place.turns) {
      if (a.in_place) return;
      if constexpr (kVectors) {
        __stcs(reinterpret_cast<uint4*>(y), unit.first);
      } else {
        *y = static_cast<const E*>(a.x)[at];
      }
    } else if constexpr (!kVectors) {
      float first = __uint_as_float(unit.first.x), second = __uint_as_float(unit.second.x);
      unit.angles.turn(0, a.sign, first, second);
      y[0] = from_float<E>(first);
      y[apart()] = from_float<E>(second);
    } else if constexpr (kInterleaved) {
      float x[kPer];
      unpack<E>(unit.first, x);
      unit.angles.turn_interleaved(a.sign, x);
      __stcs(reinterpret_cast<uint4*>(y), pack<E>(x));
    } else {
      float first[kPer], second[kPer];
      unpack<E>(unit.first, first);
      unpack<E>(unit.second, second);
      unit.angles.turn_halves(a.sign, first, second);
      __stcs(reinterpret_cast<uint4*>(y), pack<E>(first));
      __stcs(reinterpret_cast<uint4*>(y + a.pairs), pack<E>(second));
    }
  }

  __device__ void run() const {
    const int64_t all = a.rows * a.units;
    const int64_t first =
        static_cast<int64_t>(blockIdx.x) * (kRopeThreads * kRopeBatch) + threadIdx.x;
    Unit units[kRopeBatch];
#pragma unroll
    for (uint32_t i = 0; i < kRopeBatch; ++i) {
      const int64_t index = first + i * kRopeThreads;
      if (index >= all) continue;
      units[i].place = place(index);
      load(units[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kRopeBatch; ++i) {
      if (first + i * kRopeThreads < all) store(units[i]);
    }
  }
};

}  // namespace rope
}  // namespace xentile

#define ROPE(name, kUnits, dtype, E)                              \
  extern "C" __global__ void __launch_bounds__(kRopeThreads)      \
      rope_##name##_##dtype(const __grid_constant__ RopeArguments a) { \
    rope::Pass<E, rope::Units::kUnits>{a}.run();                  \
  }

#define ROPE_OF(dtype, E)                                     \
  ROPE(halves, kHalves, dtype, E)                             \
  ROPE(interleaved, kInterleaved, dtype, E)                   \
  ROPE(single_halves, kSingleHalves, dtype, E)                \
  ROPE(single_interleaved, kSingleInterleaved, dtype, E)

ROPE_OF(bf16, __nv_bfloat16)
ROPE_OF(f16, __half)
ROPE_OF(f32, float)

// The kernels by name: those of rows that do not consist of vectors with "ragged".
#include "fp8_quantize_blocks.cuh"
#include "fp8_quantize_transposed.cuh"

using namespace xentile;

// With bodies of two formats in one kernel, registers would not do for either.
#define FP8(name, dtype, threads, least)                       \
  extern "C" __global__ void __launch_bounds__(threads, least) \
      fp8_quantize_##name##_##dtype(const __grid_constant__ Fp8QuantizeArguments a)

#define FP8_RUNS(name, dtype, least, E, kE5M2, kParts)                               \
  FP8(runs_##name, dtype, kFp8RunThreads, least) {                                   \
    fp8::runs<E, kE5M2, fp8::Parts::kParts, fp8::Values::kByOwn>(a, fp8::Plain<E>(a));                 \
  }                                                                                  \
  FP8(runs_given_##name, dtype, kFp8RunThreads, least) {                             \
    fp8::runs<E, kE5M2, fp8::Parts::kParts, fp8::Values::kByGiven>(a, fp8::Plain<E>(a));               \
  }

#define FP8_AMAX(name, dtype, least, E, kParts)                                      \
  FP8(runs_amax##name, dtype, kFp8RunThreads, least) {                               \
    fp8::runs<E, false, fp8::Parts::kParts, fp8::Values::kNone>(a, fp8::Plain<E>(a));                  \
  }

#define FP8_BLOCKS(name, dtype, least, E, kE5M2, kAligned)                           \
  FP8(blocks_##name, dtype, kFp8BlockThreads, least) {                               \
    __shared__ float parts[kFp8BlockThreads / 32];                                   \
    fp8::Block<E, kE5M2, kAligned>(a).run(parts);                                    \
  }

#define FP8_TURNED(name, dtype, least, E, kScales, kE5M2, kAligned)                  \
  FP8(transposed_##name, dtype, fp8::kTurnedThreads<E>, least) {                         \
    __shared__ fp8::TurnedShared shared;                                             \
    fp8::Transposed<E, fp8::Scales::kScales, kE5M2, kAligned>(a, fp8::Plain<E>(a))       \
        .run(shared);                                                                \
  }

// Those of one format; `whole` CTAs a multiprocessor leave 64 registers a thread of a transposed tile.
#define FP8_FORMAT(format, dtype, E, kE5M2, whole)                                   \
  FP8_RUNS(format, dtype, 8, E, kE5M2, kRows)                                        \
  FP8_RUNS(parts_##format, dtype, 6, E, kE5M2, kVectors)                             \
  FP8_RUNS(ragged_##format, dtype, 4, E, kE5M2, kRagged)                             \
  FP8_BLOCKS(format, dtype, 2, E, kE5M2, true)                                       \
  FP8_BLOCKS(ragged_##format, dtype, 1, E, kE5M2, false)                             \
  FP8_TURNED(runs_##format, dtype, whole, E, kOfRuns, kE5M2, true)                   \
  FP8_TURNED(runs_ragged_##format, dtype, 1, E, kOfRuns, kE5M2, false)               \
  FP8_TURNED(squares_##format, dtype, whole, E, kOfSquares, kE5M2, true)             \
  FP8_TURNED(squares_ragged_##format, dtype, 1, E, kOfSquares, kE5M2, false)         \
  FP8_TURNED(given_##format, dtype, whole, E, kGiven, kE5M2, true)                   \
  FP8_TURNED(given_ragged_##format, dtype, 1, E, kGiven, kE5M2, false)               \
  FP8_TURNED(both_##format, dtype, whole, E, kBoth, kE5M2, true)                     \
  FP8_TURNED(both_ragged_##format, dtype, 1, E, kBoth, kE5M2, false)                 \
  FP8_TURNED(there_##format, dtype, whole / 2, E, kThere, kE5M2, true)               \
  FP8_TURNED(there_ragged_##format, dtype, 1, E, kThere, kE5M2, false)

#define FP8_OF(dtype, E, whole)                                                      \
  FP8_AMAX(, dtype, 8, E, kRows)                                                     \
  FP8_AMAX(_parts, dtype, 6, E, kVectors)                                            \
  FP8_AMAX(_ragged, dtype, 4, E, kRagged)                                            \
  FP8_TURNED(amax, dtype, whole, E, kNone, false, true)                              \
  FP8_TURNED(amax_ragged, dtype, 1, E, kNone, false, false)                          \
  FP8(columns, dtype, kFp8ColumnThreads, 2) { fp8::columns<E, true>(a); }            \
  FP8(columns_ragged, dtype, kFp8ColumnThreads, 2) { fp8::columns<E, false>(a); }    \
  FP8_FORMAT(f8e4m3fn, dtype, E, false, whole)                                       \
  FP8_FORMAT(f8e5m2, dtype, E, true, whole)

FP8_OF(bf16, __nv_bfloat16, 4)
FP8_OF(f16, __half, 4)
FP8_OF(f32, float, 2)

extern "C" __global__ void __launch_bounds__(kFp8FinishThreads)
    fp8_quantize_finish(const __grid_constant__ Fp8QuantizeArguments a) {
  fp8::finish(a);
}

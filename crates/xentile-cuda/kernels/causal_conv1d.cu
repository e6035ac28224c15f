// Causal depthwise convolution; src/causal_conv1d.rs of the crate xentile has the formulas. Memory-bound: x and y,
// or x, dy and dx, once each, and the rows beside each walk once more from the caches.
//
// A CTA has a block of kConvBlock tokens of one sequence and 32 units of channels; a *unit* is a vector of kConvUnit
// channels, or one channel where rows do not consist of vectors. A warp walks down kWalk tokens, a unit a lane, with
// the rows that the filter reaches in registers. The next rows are on their way meanwhile. Units of 16 bytes took 8 %
// longer in 16-bit dtypes: with half the warps on a multiprocessor, instructions and not memory set the time. Sums over
// a block are those of the warps in order, so that bits depend on the shape alone.
#include <cstdint>

#include "activation.cuh"
#include "element.cuh"
#include "norm.cuh"

using namespace xentile;

namespace xentile {

// Mirrored by `Arguments` in src/causal_conv1d.rs.
struct CausalConv1dArguments {
  const void* x;         // [batch, tokens, channels]
  const void* weight;    // [groups, channels, width], each for batch / groups sequences
  const void* bias;      // [groups, channels] of the weight's dtype, with groups of its own; null for none
  const void* state;     // [batch, width - 1, channels]; null for zeros
  const int32_t* segments;  // [batch, tokens]; null for one segment
  const void* dy;        // [batch, tokens, channels]; backward alone
  void* to;              // y or dx [batch, tokens, channels]
  void* dstate;          // [batch, width - 1, channels]; null for none
  float* dweight;        // [batch, blocks, channels, width]
  float* dbias;          // [batch, blocks, channels]; null for none
  int64_t tokens;
  int64_t channels;
  int64_t weight_sequences;  // sequences of a group
  int64_t bias_sequences;
  int64_t blocks;  // of a sequence
  int64_t tasks;   // of a sequence: its blocks, or 1 for a state alone
  uint32_t unit_ctas;  // CTAs of a row
  uint32_t weight_dtype;  // of kWeightF32 and so on
};

// Mirrored by `NUMBERS` in src/causal_conv1d.rs.
inline constexpr uint32_t kConvThreads = 128;
inline constexpr uint32_t kConvBlock = 128;  // tokens
inline constexpr uint32_t kConvUnit = 4;     // channels

namespace causal_conv1d {

inline constexpr int kWarps = kConvThreads / 32;
inline constexpr int kWalk = kConvBlock / kWarps;

// `kCount` elements of a row, which are one vector.
template <class E, int kCount>
struct Row {
  static_assert(kCount == 4 || kCount == 1);
  using Vector = std::conditional_t<sizeof(E) == 2, uint2, uint4>;
  using Raw = std::conditional_t<kCount == 1, E, Vector>;

  __device__ static Raw load(const E* from) { return __ldg(reinterpret_cast<const Raw*>(from)); }

  __device__ static void widen(const Raw& raw, float (&to)[kCount]) {
    if constexpr (kCount == 1) {
      to[0] = to_float(raw);
    } else if constexpr (sizeof(E) == 2) {
      const float2 low = unpacked<E>(raw.x), high = unpacked<E>(raw.y);
      to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
    } else {
      unpack<E>(raw, to);
    }
  }

  __device__ static void store(E* to, const float (&x)[kCount]) {
    if constexpr (kCount == 1) {
      *to = from_float<E>(x[0]);
    } else if constexpr (sizeof(E) == 2) {
      __stcs(reinterpret_cast<uint2*>(to), make_uint2(packed<E>(x[0], x[1]), packed<E>(x[2], x[3])));
    } else {
      __stcs(reinterpret_cast<uint4*>(to), pack<E>(x));
    }
  }
};

// One lane's walk down a sequence.
template <class E, int kWidth, int kCount, bool kSegments>
struct Walk {
  using R = Row<E, kCount>;
  using Raw = typename R::Raw;
  static constexpr int kBefore = kWidth - 1;

  const CausalConv1dArguments& a;
  int64_t sequence;
  int64_t block;  // of the sequence
  int64_t channel;
  int64_t first;  // token
  int count;      // tokens
  const E* x;     // at the first token
  const int32_t* segments;  // the sequence's
  float w[kWidth][kCount], bias[kCount];
  // rows[k] is x[t - k], or 0 where that is of another segment than t.
  float rows[kWidth][kCount];
  int32_t segment = 0;  // that of the token before

  __device__ explicit Walk(const CausalConv1dArguments& arguments) : a(arguments) {
    const int64_t cta = blockIdx.x / a.unit_ctas;
    sequence = cta / a.tasks;
    block = cta - sequence * a.tasks;
    channel = ((blockIdx.x - cta * a.unit_ctas) * 32 + threadIdx.x % 32) * kCount;
    first = block * kConvBlock + threadIdx.x / 32 * kWalk;
    count = static_cast<int>(max(int64_t{0}, min(int64_t{kWalk}, a.tokens - first)));
    x = static_cast<const E*>(a.x) + row(first);
    segments = a.segments + sequence * a.tokens;
  }

  __device__ bool has_segments() const { return kSegments && a.segments != nullptr; }
  __device__ bool has_channel() const { return channel < a.channels; }

  // Where token t's row begins in a matrix, and row `row` of a state.
  __device__ int64_t row(int64_t t) const {
    return (sequence * a.tokens + t) * a.channels + channel;
  }
  __device__ int64_t state_row(int64_t row) const {
    return (sequence * kBefore + row) * a.channels + channel;
  }

  // Loads weight, bias, and the rows before the first.
  __device__ void begin() {
    const int64_t group = sequence / a.weight_sequences;
    with_dtype(a.weight_dtype, a.weight, (group * a.channels + channel) * kWidth, [&](auto* from) {
#pragma unroll
      for (int part = 0; part < kWidth; ++part) {
        float values[kCount];
        xentile::widen<kCount>(from + part * kCount, values);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const int place = part * kCount + i;
          w[place % kWidth][place / kWidth] = values[i];
        }
      }
    });
#pragma unroll
    for (int i = 0; i < kCount; ++i) bias[i] = 0.0f;
    if (a.bias != nullptr) {
      const int64_t place = sequence / a.bias_sequences * a.channels + channel;
      with_dtype(a.weight_dtype, a.bias, place,
                 [&](auto* from) { xentile::widen<kCount>(from, bias); });
    }
    if (has_segments() && a.tokens > 0) segment = segments[max(first - 1, int64_t{0})];
    // The first step moves rows[k] to rows[k + 1].
    bool is_same = true;
#pragma unroll
    for (int k = 0; k < kBefore; ++k) {
      const int64_t t = first - 1 - k;
#pragma unroll
      for (int i = 0; i < kCount; ++i) rows[k][i] = 0.0f;
      if (t >= 0) {
        if (has_segments()) is_same = is_same && segments[t] == segment;
        if (is_same) R::widen(R::load(x - (k + 1) * a.channels), rows[k]);
      } else if (is_same && a.state != nullptr) {
        R::widen(R::load(static_cast<const E*>(a.state) + state_row(t + kBefore)), rows[k]);
      }
    }
  }

  // Moves the rows on by one.
  __device__ void advance(const Raw& raw) {
#pragma unroll
    for (int k = kBefore; k > 0; --k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) rows[k][i] = rows[k - 1][i];
    }
    R::widen(raw, rows[0]);
  }

  // Whether a segment begins at token t; then nothing is left of the rows before.
  __device__ bool cut(int64_t t) {
    if (!has_segments()) return false;
    const int32_t before = segment;
    segment = segments[t];
    if (segment == before) return false;
#pragma unroll
    for (int k = 1; k < kWidth; ++k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) rows[k][i] = 0.0f;
    }
    return true;
  }

  // Sums over the filter.
  __device__ void sum(float (&z)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = bias[i];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) z[i] = fmaf(w[kBefore - k][i], rows[k][i], z[i]);
    }
  }

  static __device__ activation::At silu(float z) {
    return activation::at<kActivationSilu>(z, 1.0f);
  }
};

// Rows on their way to a lane: each slot is loaded again as soon as it is used.
inline constexpr int kSlots = 8;

template <class E, int kWidth, int kCount, bool kSilu, bool kSegments>
__device__ inline void forward(const CausalConv1dArguments& a) {
  using R = Row<E, kCount>;
  Walk<E, kWidth, kCount, kSegments> walk(a);
  if (!walk.has_channel() || walk.count == 0) return;
  const E* from = walk.x;
  E* to = static_cast<E*>(a.to) + walk.row(walk.first);
  typename R::Raw slots[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (i < walk.count) slots[i] = R::load(from);
    from += a.channels;
  }
  walk.begin();
  const auto step = [&](int token, const typename R::Raw& raw) {
    walk.advance(raw);
    walk.cut(walk.first + token);
    float y[kCount];
    walk.sum(y);
    if (kSilu) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) y[c] = walk.silu(y[c]).value;
    }
    R::store(to, y);
    to += a.channels;
  };
  int token = 0;
  for (; token + kSlots <= walk.count; token += kSlots) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const typename R::Raw raw = slots[i];
      if (token + kSlots + i < walk.count) slots[i] = R::load(from);
      from += a.channels;
      step(token + i, raw);
    }
  }
  // The end of a sequence: rows are loaded again, so that there is less code.
#pragma unroll 1
  for (; token < walk.count; ++token) step(token, R::load(walk.x + token * a.channels));
}

template <class E, int kWidth, int kCount, bool kSilu, bool kSegments>
struct Backward {
  using R = Row<E, kCount>;
  using Raw = typename R::Raw;
  static constexpr int kBefore = kWidth - 1;
  static_assert(kSlots >= kBefore && kWalk % kSlots == 0);

  const CausalConv1dArguments& a;
  Walk<E, kWidth, kCount, kSegments> walk;
  float of_weight[kWidth][kCount], of_bias[kCount];
  // open[k] is what dx[t - k] has so far.
  float open[kWidth][kCount];
  E* to;  // dx at the row that is complete next
  // The first row of the walk that is not written yet.
  int unwritten = 0;
  bool has_state;

  __device__ explicit Backward(const CausalConv1dArguments& arguments)
      : a(arguments), walk(arguments) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      of_bias[c] = 0.0f;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) of_weight[k][c] = open[k][c] = 0.0f;
    }
    has_state = a.dstate != nullptr && walk.block == 0 && threadIdx.x < 32;
    to = static_cast<E*>(a.to) + walk.row(walk.first - kBefore);
  }

  // Stores `dx`, that of the walk's row `row`, at `place`; rows before the sequence are the state's.
  __device__ void write(int row, E* place, const float (&dx)[kCount]) {
    if (row >= unwritten) {
      R::store(place, dx);
    } else if (has_state && row < 0 && unwritten == 0) {
      R::store(static_cast<E*>(a.dstate) + walk.state_row(row + kBefore), dx);
    }
  }

  // Token `token` of the walk, or one after it, whose g adds to dx alone. Without `kHasRow` there is none: rows
  // of the end are complete.
  template <bool kIsOwn, bool kHasRow>
  __device__ void step(int token, const Raw& of_x, const Raw& of_dy) {
#pragma unroll
    for (int k = kBefore; k > 0; --k) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) open[k][c] = open[k - 1][c];
    }
    if constexpr (kHasRow) {
      walk.advance(of_x);
      if (walk.cut(walk.first + token)) finish(token);
      float g[kCount];
      R::widen(of_dy, g);
      if (kSilu) {
        float z[kCount];
        walk.sum(z);
#pragma unroll
        for (int c = 0; c < kCount; ++c) g[c] *= walk.silu(z[c]).slope;
      }
#pragma unroll
      for (int c = 0; c < kCount; ++c) open[0][c] = g[c] * walk.w[kBefore][c];
#pragma unroll
      for (int k = 1; k < kWidth; ++k) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          open[k][c] = fmaf(g[c], walk.w[kBefore - k][c], open[k][c]);
        }
      }
      if constexpr (kIsOwn) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) of_bias[c] += g[c];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
#pragma unroll
          for (int c = 0; c < kCount; ++c) {
            float& sum = of_weight[kBefore - k][c];
            sum = fmaf(g[c], walk.rows[k][c], sum);
          }
        }
      }
    }
    write(token - kBefore, to, open[kBefore]);
    to += a.channels;
  }

  // Writes the rows before `token`, to which no other segment adds.
  __device__ void finish(int token) {
    E* place = to + kBefore * a.channels;
#pragma unroll
    for (int k = kBefore; k > 0; --k) {
      const int row = token - k;
      if (row < walk.count) write(row, place - k * a.channels, open[k]);
    }
    unwritten = token;
    if (token == 0) has_state = false;
  }

  __device__ void run() {
    const E* from_x = walk.x;
    const E* const first_dy = static_cast<const E*>(a.dy) + walk.row(walk.first);
    const E* from_dy = first_dy;
    // Rows from the first on, those after the walk that add to it too.
    const int rows =
        static_cast<int>(max(int64_t{0}, min(int64_t{kWalk + kBefore}, a.tokens - walk.first)));
    Raw x[kSlots], dy[kSlots];
    const auto load = [&](int i, int row) {
      if (row < rows) {
        x[i] = R::load(from_x);
        dy[i] = R::load(from_dy);
      }
      from_x += a.channels;
      from_dy += a.channels;
    };
#pragma unroll
    for (int i = 0; i < kSlots; ++i) load(i, i);
    walk.begin();
    int token = 0;
    for (; token + kSlots <= walk.count; token += kSlots) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        const Raw of_x = x[i], of_dy = dy[i];
        load(i, token + kSlots + i);
        step<true, true>(token + i, of_x, of_dy);
      }
    }
    // A walk that ends within the slots ends the sequence: rows are loaded again, so that there is less code.
#pragma unroll 1
    for (; token < walk.count; ++token) {
      const int64_t at = token * a.channels;
      step<true, true>(token, R::load(walk.x + at), R::load(first_dy + at));
    }
#pragma unroll
    for (int i = 0; i < kBefore; ++i) {
      if (token < rows) {
        step<false, true>(token, x[i], dy[i]);
        ++token;
      }
    }
#pragma unroll 1
    for (; token < walk.count + kBefore; ++token) step<false, false>(token, x[0], dy[0]);
  }
};

template <class E, int kWidth, int kCount, bool kSilu, bool kSegments>
__device__ inline void backward(const CausalConv1dArguments& a) {
  // Sums of a lane: kWidth of the weight and one of the bias for each channel.
  constexpr int kSums = (kWidth + 1) * kCount, kPitch = 33;
  __shared__ float sums[kWarps][kSums * kPitch];
  Backward<E, kWidth, kCount, kSilu, kSegments> pass(a);
  const auto& walk = pass.walk;
  // A sequence without tokens has the gradient of its state.
  if (walk.has_channel() && (walk.count > 0 || pass.has_state)) pass.run();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      sums[warp][(c * kWidth + k) * kPitch + lane] = pass.of_weight[k][c];
    }
    sums[warp][(kCount * kWidth + c) * kPitch + lane] = pass.of_bias[c];
  }
  __syncthreads();
  if (walk.block >= a.blocks) return;
  const auto total = [&](uint32_t index) {
    float sum = sums[0][index];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) sum += sums[other][index];
    return sum;
  };
  // The CTA's channels follow one another, and their sums.
  const int64_t begin = walk.channel - lane * kCount;
  const int64_t of_block = (walk.sequence * a.blocks + walk.block) * a.channels + begin;
  const uint32_t count = static_cast<uint32_t>(min(int64_t{32 * kCount}, a.channels - begin));
  for (uint32_t at = threadIdx.x; at < count * kWidth; at += kConvThreads) {
    const uint32_t of_lane = at % (kCount * kWidth);
    a.dweight[of_block * kWidth + at] = total(of_lane * kPitch + at / (kCount * kWidth));
  }
  if (a.dbias == nullptr) return;
  for (uint32_t at = threadIdx.x; at < count; at += kConvThreads) {
    a.dbias[of_block + at] = total((kCount * kWidth + at % kCount) * kPitch + at / kCount);
  }
}

}  // namespace causal_conv1d
}  // namespace xentile

#define CAUSAL_CONV1D(pass, width, name, kCount, kSilu, kSegments, dtype, E)  \
  extern "C" __global__ void __launch_bounds__(kConvThreads)                  \
      causal_conv1d_##pass##_##width##_##name##_##dtype(                      \
          const __grid_constant__ CausalConv1dArguments a) {                  \
    causal_conv1d::pass<E, width, kCount, kSilu, kSegments>(a);               \
  }

// Rows that do not consist of vectors have one kernel with segments and without.
#define CAUSAL_CONV1D_OF_PASS(pass, width, dtype, E)                             \
  CAUSAL_CONV1D(pass, width, linear, kConvUnit, false, false, dtype, E)          \
  CAUSAL_CONV1D(pass, width, silu, kConvUnit, true, false, dtype, E)             \
  CAUSAL_CONV1D(pass, width, linear_segments, kConvUnit, false, true, dtype, E)  \
  CAUSAL_CONV1D(pass, width, silu_segments, kConvUnit, true, true, dtype, E)     \
  CAUSAL_CONV1D(pass, width, linear_single, 1, false, true, dtype, E)            \
  CAUSAL_CONV1D(pass, width, silu_single, 1, true, true, dtype, E)

#define CAUSAL_CONV1D_OF(dtype, E)               \
  CAUSAL_CONV1D_OF_PASS(forward, 2, dtype, E)    \
  CAUSAL_CONV1D_OF_PASS(forward, 3, dtype, E)    \
  CAUSAL_CONV1D_OF_PASS(forward, 4, dtype, E)    \
  CAUSAL_CONV1D_OF_PASS(backward, 2, dtype, E)   \
  CAUSAL_CONV1D_OF_PASS(backward, 3, dtype, E)   \
  CAUSAL_CONV1D_OF_PASS(backward, 4, dtype, E)

CAUSAL_CONV1D_OF(bf16, __nv_bfloat16)
CAUSAL_CONV1D_OF(f16, __half)
CAUSAL_CONV1D_OF(f32, float)

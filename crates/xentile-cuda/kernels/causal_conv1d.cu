// Causal depthwise convolution; src/causal_conv1d.rs of the crate xentile has the formulas. Memory-bound: x and y,
// or x, dy and dx, once each, and the rows beside each walk once more from the caches.
//
// A CTA has a block of kConvBlock tokens of one sequence and 32 units of channels; a *unit* is a vector of 16
// bytes, or one channel where rows do not consist of vectors. A warp walks down kConvWalk tokens, a unit a lane,
// with the rows that the convolution reaches in registers. The next rows are on their way while one batch of rows
// is computed. Sums over a block are those of the warps in order, so that bits depend on the shape alone.
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
  uint32_t silu;
};

// Mirrored by `NUMBERS` in src/causal_conv1d.rs.
inline constexpr uint32_t kConvThreads = 128;
inline constexpr uint32_t kConvBlock = 128;  // tokens
#ifndef CONV_FB
#define CONV_FB 8
#endif
#ifndef CONV_BB
#define CONV_BB 2
#endif
#ifndef CONV_FU
#define CONV_FU 0
#endif
#ifndef CONV_BU
#define CONV_BU 0
#endif


namespace causal_conv1d {

inline constexpr int kWarps = kConvThreads / 32;
inline constexpr int kWalk = kConvBlock / kWarps;

// `kCount` elements of a row: a vector of 16 bytes, half of one, or one element.
template <class E, int kCount>
struct Row {
  static constexpr bool kHalf = kCount == 4 && sizeof(E) == 2;
  static_assert(kCount == kPerVector<E> || kHalf || kCount == 1);
  using Raw = std::conditional_t<kCount == 1, E, std::conditional_t<kHalf, uint2, uint4>>;

  __device__ static Raw load(const E* from) { return __ldg(reinterpret_cast<const Raw*>(from)); }

  __device__ static void widen(const Raw& raw, float (&to)[kCount]) {
    if constexpr (kCount == 1) {
      to[0] = to_float(raw);
    } else if constexpr (kHalf) {
      const float2 low = unpacked<E>(raw.x), high = unpacked<E>(raw.y);
      to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
    } else {
      unpack<E>(raw, to);
    }
  }

  __device__ static void store(E* to, const float (&x)[kCount]) {
    if constexpr (kCount == 1) {
      *to = from_float<E>(x[0]);
    } else if constexpr (kHalf) {
      __stcs(reinterpret_cast<uint2*>(to), make_uint2(packed<E>(x[0], x[1]), packed<E>(x[2], x[3])));
    } else {
      __stcs(reinterpret_cast<uint4*>(to), pack<E>(x));
    }
  }
};

// One lane's walk down a sequence.
template <class E, int kWidth, int kCount>
struct Walk {
  using R = Row<E, kCount>;
  static constexpr int kBefore = kWidth - 1;

  const CausalConv1dArguments& a;
  int64_t sequence;
  int64_t block;  // of the sequence
  int64_t unit;   // of the row
  int64_t first, stop;  // tokens
  int64_t channel;
  const E* x;  // the sequence's, at the channel
  const int32_t* segments;
  float w[kWidth][kCount], bias[kCount];
  // rows[k] is x[t - k].
  float rows[kWidth][kCount];
  // How many rows before t belong to its segment, kBefore at most.
  int reach = kBefore;

  __device__ explicit Walk(const CausalConv1dArguments& arguments) : a(arguments) {
    const int64_t cta = blockIdx.x / a.unit_ctas;
    sequence = cta / a.tasks;
    block = cta - sequence * a.tasks;
    unit = (blockIdx.x - cta * a.unit_ctas) * 32 + threadIdx.x % 32;
    channel = unit * kCount;
    first = block * kConvBlock + threadIdx.x / 32 * kWalk;
    stop = min(first + kWalk, a.tokens);
    x = static_cast<const E*>(a.x) + sequence * a.tokens * a.channels + channel;
    segments = a.segments == nullptr ? nullptr : a.segments + sequence * a.tokens;
  }

  __device__ bool has_channel() const { return channel < a.channels; }

  __device__ E* at(void* matrix, int64_t t) const {
    return static_cast<E*>(matrix) + (sequence * a.tokens + t) * a.channels + channel;
  }

  __device__ int64_t of_state(int64_t row) const {
    return (sequence * kBefore + row) * a.channels + channel;
  }

  // Weight, bias, and the rows before the first.
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
    // The first step moves rows[k] to rows[k + 1].
#pragma unroll
    for (int k = 0; k < kBefore; ++k) {
      const int64_t t = first - 1 - k;
#pragma unroll
      for (int i = 0; i < kCount; ++i) rows[k][i] = 0.0f;
      if (t >= 0) {
        R::widen(R::load(x + t * a.channels), rows[k]);
      } else if (a.state != nullptr) {
        R::widen(R::load(static_cast<const E*>(a.state) + of_state(t + kBefore)), rows[k]);
      }
    }
    if (segments != nullptr && first > 0) {
      // As far as the token before the first reaches.
      int64_t t = first - 1;
      for (reach = 0; reach < kBefore; ++reach, --t) {
        // The state is of the first segment.
        if (t == 0) reach = kBefore;
        if (t == 0 || segments[t] != segments[t - 1]) break;
      }
    }
  }

  // Token t follows, whose row is `raw`. Returns false where t is beyond the sequence.
  __device__ void advance(int64_t t, const typename R::Raw& raw) {
#pragma unroll
    for (int k = kBefore; k > 0; --k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) rows[k][i] = rows[k - 1][i];
    }
    R::widen(raw, rows[0]);
    if (segments != nullptr && t > 0) {
      reach = segments[t] == segments[t - 1] ? min(reach + 1, kBefore) : 0;
    }
  }

  // z at token t.
  __device__ void sum(float (&z)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] = bias[i];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (k > reach) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) z[i] = fmaf(w[kBefore - k][i], rows[k][i], z[i]);
    }
  }

  static __device__ activation::At silu(float z) {
    return activation::at<kActivationSilu>(z, 1.0f);
  }
};

template <class E, int kWidth, int kCount>
__device__ inline void forward(const CausalConv1dArguments& a) {
  using R = Row<E, kCount>;
  constexpr int kBatch = CONV_FB;
  Walk<E, kWidth, kCount> walk(a);
  if (!walk.has_channel() || walk.first >= walk.stop) return;
  typename R::Raw next[kBatch];
  const auto fetch = [&](int64_t from) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (from + i < walk.stop) next[i] = R::load(walk.x + (from + i) * a.channels);
    }
  };
  fetch(walk.first);
  walk.begin();
  for (int64_t from = walk.first; from < walk.stop; from += kBatch) {
    typename R::Raw batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch[i] = next[i];
    fetch(from + kBatch);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (from + i >= walk.stop) break;
      walk.advance(from + i, batch[i]);
      float y[kCount];
      walk.sum(y);
      if (a.silu) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) y[k] = walk.silu(y[k]).value;
      }
      R::store(walk.at(a.to, from + i), y);
    }
  }
}

template <class E, int kWidth, int kCount>
__device__ inline void backward(const CausalConv1dArguments& a) {
  using R = Row<E, kCount>;
  constexpr int kBatch = CONV_BB, kBefore = kWidth - 1;
  // Sums of a warp, an array of a lane each: kWidth of the weight and one of the bias for each channel.
  constexpr int kSums = (kWidth + 1) * kCount, kPitch = 33;
  __shared__ float sums[kWarps][kSums * kPitch];
  Walk<E, kWidth, kCount> walk(a);
  float of_weight[kWidth][kCount], of_bias[kCount];
  // open[k] is what dx[t - k] has so far.
  float open[kWidth][kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    of_bias[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) of_weight[k][i] = open[k][i] = 0.0f;
  }
  // A sequence without tokens has the gradient of its state.
  const bool is_first = walk.block == 0 && threadIdx.x < 32;
  const bool has_rows =
      walk.has_channel() &&
      (walk.first < walk.stop || (is_first && a.dstate != nullptr));
  if (has_rows) {
    const E* dy = static_cast<const E*>(a.dy) + walk.sequence * a.tokens * a.channels + walk.channel;
    const int64_t end = walk.stop + kBefore;
    typename R::Raw next_x[kBatch], next_dy[kBatch];
    const auto fetch = [&](int64_t from) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (from + i < min(end, a.tokens)) {
          next_x[i] = R::load(walk.x + (from + i) * a.channels);
          next_dy[i] = R::load(dy + (from + i) * a.channels);
        }
      }
    };
    fetch(walk.first);
    walk.begin();
    for (int64_t from = walk.first; from < end; from += kBatch) {
      typename R::Raw batch_x[kBatch], batch_dy[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) batch_x[i] = next_x[i], batch_dy[i] = next_dy[i];
      fetch(from + kBatch);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t t = from + i;
        if (t >= end) break;
#pragma unroll
        for (int k = kBefore; k > 0; --k) {
#pragma unroll
          for (int c = 0; c < kCount; ++c) open[k][c] = open[k - 1][c];
        }
#pragma unroll
        for (int c = 0; c < kCount; ++c) open[0][c] = 0.0f;
        if (t < a.tokens) {
          walk.advance(t, batch_x[i]);
          float g[kCount];
          R::widen(batch_dy[i], g);
          if (a.silu) {
            float z[kCount];
            walk.sum(z);
#pragma unroll
            for (int c = 0; c < kCount; ++c) g[c] *= walk.silu(z[c]).slope;
          }
          if (t < walk.stop) {
#pragma unroll
            for (int c = 0; c < kCount; ++c) of_bias[c] += g[c];
          }
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            if (k > walk.reach) continue;
#pragma unroll
            for (int c = 0; c < kCount; ++c) {
              float& to = of_weight[kBefore - k][c];
              if (t < walk.stop) to = fmaf(g[c], walk.rows[k][c], to);
              open[k][c] = fmaf(g[c], walk.w[kBefore - k][c], open[k][c]);
            }
          }
        }
        // Nothing more is added to dx[t - kBefore].
        if (t - kBefore >= walk.first) {
          R::store(walk.at(a.to, t - kBefore), open[kBefore]);
        } else if (is_first && a.dstate != nullptr) {
          R::store(static_cast<E*>(a.dstate) + walk.of_state(t), open[kBefore]);
        }
      }
    }
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[warp][(c * kWidth + k) * kPitch + lane] = of_weight[k][c];
    sums[warp][(kCount * kWidth + c) * kPitch + lane] = of_bias[c];
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

#define CAUSAL_CONV1D(pass, width, rows, kCount, dtype, E)                            \
  extern "C" __global__ void __launch_bounds__(kConvThreads)                          \
      causal_conv1d_##pass##_##width##_##rows##dtype(                                 \
          const __grid_constant__ CausalConv1dArguments a) {                          \
    causal_conv1d::pass<E, width, kCount>(a);                                         \
  }

#define CAUSAL_CONV1D_OF_WIDTH(width, dtype, E)                          \
  CAUSAL_CONV1D(forward, width, , (CONV_FU ? CONV_FU : kPerVector<E>), dtype, E)               \
  CAUSAL_CONV1D(forward, width, single_, 1, dtype, E)                    \
  CAUSAL_CONV1D(backward, width, , (CONV_BU ? CONV_BU : kPerVector<E>), dtype, E)              \
  CAUSAL_CONV1D(backward, width, single_, 1, dtype, E)

#define CAUSAL_CONV1D_OF(dtype, E)     \
  CAUSAL_CONV1D_OF_WIDTH(2, dtype, E)  \
  CAUSAL_CONV1D_OF_WIDTH(3, dtype, E)  \
  CAUSAL_CONV1D_OF_WIDTH(4, dtype, E)

CAUSAL_CONV1D_OF(bf16, __nv_bfloat16)
CAUSAL_CONV1D_OF(f16, __half)
CAUSAL_CONV1D_OF(f32, float)

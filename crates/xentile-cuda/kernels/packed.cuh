// Cross-entropy over small vocabularies, for Hopper and later: a CTA takes `time_block` whole rows.
//
// They are one span of memory, which begins and ends (but for the last rows of all) at multiples of
// 16 bytes however odd the vocabulary. The copy engine brings it to shared memory and takes the
// gradient, which lies in its place, back from there: memory is read and written once, in whole lines.
//
//   reduce   `lanes` lanes a row: the sum of exponentials, and what is said of the distribution
//   tokens   a thread a row: what is said of its token, and what its gradient is made of
//   apply    as reduce: the gradient
//
// Lanes take vectors of 16 bytes where all rows begin at one, else elements. A row's sum so depends
// on nothing but the row: equal rows have equal sums wherever they are.
#pragma once

#include "cross_entropy.cuh"
#include "distribution.cuh"
#include "hopper.cuh"

namespace xentile {

inline constexpr uint32_t kPackedThreads = 256;  // at most

// What is kept of a row beside its logits.
struct PackedRow {
  float c, exponentials, values;  // of its sum
  RowGradient gradient;
  float at_label;
  int target;  // a column, or below 0
  uint32_t is_masked;
};

// And of its distribution, if that is asked for.
struct PackedDistributionRow : PackedRow {
  float weighted, highest;
  uint32_t at;
  uint32_t none;  // so that the barrier behind the rows lies at a multiple of 8
};

inline constexpr uint32_t kPackedRowBytes = sizeof(PackedRow);
inline constexpr uint32_t kPackedDistributionRowBytes = sizeof(PackedDistributionRow);
static_assert(kPackedRowBytes % 8 == 0 && kPackedDistributionRowBytes % 8 == 0);

template <class E, Pass kPass, bool kSmooth, bool kCap, class Sum>
struct Packed {
  static constexpr bool kReduces = kPass != Pass::kBackward;
  static constexpr bool kApplies = kPass != Pass::kForward;
  static constexpr uint32_t kPer = kPerVector<E>;
  using Kept = std::conditional_t<Sum::kWeighted, PackedDistributionRow, PackedRow>;

  const CrossEntropyArguments& a;
  const TemperedCap cap;
  const uint32_t columns;
  int64_t first;  // token
  uint32_t held;  // rows
  E* tile;
  Kept* rows;
  uint32_t barrier;

  __device__ Packed(const CrossEntropyArguments& arguments, uint8_t* shared)
      : a(arguments),
        cap(kCap ? arguments.softcap : 1.0, arguments.scale),
        columns(static_cast<uint32_t>(arguments.columns)) {
    first = static_cast<int64_t>(blockIdx.x) * a.time_block;
    held = static_cast<uint32_t>(min(static_cast<int64_t>(a.time_block), a.tokens - first));
    tile = reinterpret_cast<E*>(shared);
    rows = reinterpret_cast<Kept*>(shared + tile_bytes(a));
    barrier = ptx::shared_address(rows + a.time_block);
  }

  // The plan computes the same.
  __device__ static uint32_t tile_bytes(const CrossEntropyArguments& a) {
    const uint32_t bytes = a.time_block * static_cast<uint32_t>(a.columns * sizeof(E));
    return (bytes + 15) / 16 * 16;
  }

  // Elements of the span, and those of them in whole vectors.
  __device__ uint32_t elements() const { return held * columns; }
  __device__ uint32_t whole() const { return elements() / kPer * kPer; }

  __device__ void start_load() const {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    const uint32_t bytes = whole() * static_cast<uint32_t>(sizeof(E));
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    if (bytes > 0) {
      ptx::bulk_load(ptx::shared_address(tile), static_cast<const E*>(a.logits) + first * columns,
                     bytes, barrier, ptx::evict_first());
    }
  }

  __device__ Token token_of(int64_t index) const {
    if constexpr (kReduces) {
      return describe<kPass, Sum::kWeighted>(a, label_at(a, index), kApplies ? a.dloss[index] : 0.0f);
    } else {
      return describe_saved(a, index);
    }
  }

  // Calls `work(row, lane of the row, whether there is such a row)`, all lanes of a warp together.
  template <class Work>
  __device__ void for_rows(Work work) const {
    const uint32_t lanes = a.lanes, at_once = blockDim.x / lanes;
    const uint32_t of_warp = threadIdx.x / 32 * (32 / lanes);
    const uint32_t own = threadIdx.x % 32 / lanes, lane = threadIdx.x % lanes;
    for (uint32_t start = of_warp; start < held; start += at_once) {
      const uint32_t row = start + own;
      work(min(row, held - 1), lane, row < held);
    }
  }

  __device__ float max_of_lanes(float x) const {
    for (uint32_t offset = a.lanes / 2; offset > 0; offset /= 2) {
      x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
    }
    return x;
  }
  __device__ float sum_of_lanes(float x) const {
    for (uint32_t offset = a.lanes / 2; offset > 0; offset /= 2) {
      x += __shfl_xor_sync(~0u, x, offset);
    }
    return x;
  }

  using Pieces = Piece<E, kSmooth, kCap, Sum>;
  static constexpr Weigh kWeigh = Sum::kWeighted ? Weigh::kAny : Weigh::kNot;

  // An element as it is in an exponent.
  __device__ float scaled(float x) const {
    float in[1] = {x}, y[1], none[1];
    if constexpr (!kCap) return x * cap.scale;
    cap.scaled<Reach::kUnknown, true, false>(in, y, none);
    return y[0];
  }

  // Adds to `sum`, `values` and `weighted` what a lane has of a row.
  template <bool kVectors>
  __device__ void add(const E* x, uint32_t lane, float c, float& sum, float& values,
                      float& weighted) const {
    float partial[4] = {}, total[2] = {}, products[2] = {};
    if constexpr (kVectors) {
      const uint4* vectors = reinterpret_cast<const uint4*>(x);
#pragma unroll 2
      for (uint32_t v = lane; v < columns / kPer; v += a.lanes) {
        Pieces::template add<Reach::kUnknown, true, kWeigh>(vectors[v], cap, c, partial, total,
                                                            products);
      }
    } else {
      const auto one = [&](uint32_t at, int place) {
        const float value = to_float(x[at]);
        const float y = scaled(value);
        const float exponent = kCap ? y + c : fmaf(value, cap.scale, c);
        const float exponential = ptx::ex2(exponent);
        partial[place] += exponential;
        if constexpr (Sum::kWeighted) {
          const float least = fmaxf(exponent, kLeastExponent);
          products[place % 2] = fmaf(exponential, least, products[place % 2]);
        }
        if constexpr (kSmooth) total[place % 2] += kCap ? y : value;
      };
      uint32_t at = lane;
      for (; at + 3 * a.lanes < columns; at += 4 * a.lanes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) one(at + i * a.lanes, i);
      }
      for (; at < columns; at += a.lanes) one(at, 0);
    }
    sum = (partial[0] + partial[1]) + (partial[2] + partial[3]);
    if constexpr (kSmooth) values = (total[0] + total[1]) * Pieces::per_value(cap);
    if constexpr (Sum::kWeighted) weighted = products[0] + products[1];
  }

  // The largest logit that a lane has of a row.
  template <bool kVectors>
  __device__ float max_of(const E* x, uint32_t lane) const {
    float max = -INFINITY;
    if constexpr (kVectors) {
      Extremes<E, false> extremes;
#pragma unroll 2
      for (uint32_t v = lane; v < columns / kPer; v += a.lanes) {
        extremes.add(reinterpret_cast<const uint4*>(x)[v]);
      }
      max = extremes.max();
    } else {
#pragma unroll 4
      for (uint32_t at = lane; at < columns; at += a.lanes) max = fmaxf(max, to_float(x[at]));
    }
    return max;
  }

  // The first column of a row whose logit is `highest`, which `has_it` says a lane has; ~0 if none is.
  template <bool kVectors>
  __device__ uint32_t find(const E* x, uint32_t lane, float highest, bool has_it) const {
    uint32_t found = ~0u;
    if constexpr (kVectors) {
      const uint4* vectors = reinterpret_cast<const uint4*>(x);
      for (uint32_t v = lane; has_it && v < columns / kPer && found == ~0u; v += a.lanes) {
        float of[kPer];
        unpack<E>(vectors[v], of);
#pragma unroll
        for (uint32_t i = kPer; i-- > 0;) {
          if (of[i] == highest) found = v * kPer + i;
        }
      }
    } else {
      for (uint32_t at = lane; has_it && at < columns && found == ~0u; at += a.lanes) {
        if (to_float(x[at]) == highest) found = at;
      }
    }
    for (uint32_t offset = a.lanes / 2; offset > 0; offset /= 2) {
      found = min(found, __shfl_xor_sync(~0u, found, offset));
    }
    return found;
  }

  template <bool kVectors>
  __device__ void reduce() const {
    for_rows([&](uint32_t row, uint32_t lane, bool is_there) {
      const E* x = tile + row * columns;
      const float own = max_of<kVectors>(x, lane), highest = max_of_lanes(own);
      const float c = shift_of(kCap ? cap.apply(highest) : highest, cap.scale);
      float sum = 0.0f, values = 0.0f, weighted = 0.0f;
      add<kVectors>(x, lane, c, sum, values, weighted);
      sum = sum_of_lanes(sum);
      if constexpr (kSmooth) values = sum_of_lanes(values);
      uint32_t at = ~0u;
      if constexpr (Sum::kWeighted) {
        weighted = sum_of_lanes(weighted);
        at = find<kVectors>(x, lane, highest, own == highest);
      }
      if (is_there && lane == 0) {
        rows[row].c = c;
        rows[row].exponentials = sum;
        rows[row].values = values;
        if constexpr (Sum::kWeighted) {
          rows[row].weighted = weighted;
          rows[row].highest = highest;
          rows[row].at = at;
        }
      }
    });
  }

  // A label's logit as the sum has it.
  __device__ Capped capped(uint32_t row, uint32_t column, float x) const {
    if constexpr (!kCap) return {x * a.per_element, 1.0};
    const uint32_t at = row * columns + column;
    if (a.whole_vectors != 0) {
      const uint4 vector = reinterpret_cast<const uint4*>(tile)[at / kPer];
      return cap.template one_of<Reach::kUnknown, true, E>(vector, at % kPer);
    }
    float in[1] = {x}, y[1], slope[1];
    cap.scaled<Reach::kUnknown, true, true>(in, y, slope);
    return {y[0] * kPerLog2E, slope[0]};
  }

  // Writes the outputs of a token, and what its gradient is made of.
  __device__ void end(uint32_t index, const Token& token) const {
    Kept& row = rows[index];
    const float x = token.target >= 0 ? to_float(tile[index * columns + token.target]) : 0.0f;
    RowSum all = RowSum::none();
    RowGradient gradient{};
    double lse = 0.0;
    if constexpr (kReduces) {
      const float label = token.target >= 0 ? (kCap ? cap.apply(x) : x) : 0.0f;
      all = RowSum{row.c, row.exponentials, row.values, label};
      if constexpr (Sum::kWeighted) {
        const DistributionSum more{all, row.weighted, row.highest, row.at};
        write_token<kSmooth>(a, first + index, token, more);
        write_argmax(a, first + index, more.argmax(token));
      } else {
        write_token<kSmooth>(a, first + index, token, all);
      }
      if constexpr (kApplies) {
        gradient = RowGradient::of<kSmooth>(a, token, all);
        lse = all.lse();
      }
    } else {
      gradient = RowGradient::of<kSmooth>(a, token);
      lse = token.saved();
    }
    if constexpr (kApplies) {
      row.gradient = gradient;
      row.target = token.target;
      row.is_masked = token.is_masked;
      if (token.target >= 0 && !token.is_masked) {
        row.at_label = gradient.at_the_label<kCap>(a, token, capped(index, token.target, x), lse);
      }
    }
  }

  template <bool kVectors>
  __device__ void apply() const {
    for_rows([&](uint32_t index, uint32_t lane, bool is_there) {
      if (!is_there) return;
      const PackedRow row = rows[index];
      E* x = tile + index * columns;
      constexpr uint32_t width = kVectors ? kPer : 1;
      if constexpr (kVectors) {
        uint4* vectors = reinterpret_cast<uint4*>(x);
#pragma unroll 2
        for (uint32_t v = lane; v < columns / kPer; v += a.lanes) {
          vectors[v] = row.is_masked ? make_uint4(0, 0, 0, 0)
                                : row.gradient.template of_vector<E, kSmooth, kCap, Reach::kUnknown, true>(
                                      vectors[v], cap);
        }
      } else if (row.is_masked) {
        for (uint32_t at = lane; at < columns; at += a.lanes) x[at] = from_float<E>(0.0f);
      } else {
        uint32_t at = lane;
        for (; at + 3 * a.lanes < columns; at += 4 * a.lanes) {
          float four[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) four[i] = to_float(x[at + i * a.lanes]);
#pragma unroll
          for (int i = 0; i < 4; ++i) x[at + i * a.lanes] = from_float<E>(of(row, four[i]));
        }
        for (; at < columns; at += a.lanes) x[at] = from_float<E>(of(row, to_float(x[at])));
      }
      // By the lane that wrote its place, so that this comes second.
      if (!row.is_masked && row.target >= 0 && row.target / width % a.lanes == lane) {
        x[row.target] = from_float<E>(row.at_label);
      }
    });
  }

  __device__ float of(const PackedRow& row, float x) const {
    if constexpr (!kCap) return row.gradient.template at<kSmooth, false>(x, cap);
    float in[1] = {x}, y[1], slope[1];
    cap.scaled<Reach::kUnknown, true, true>(in, y, slope);
    const float p = ptx::ex2(y[0] + row.gradient.c);
    return fmaf(p, row.gradient.factor, row.gradient.offset) * slope[0];
  }

  __device__ void run() const {
    if (threadIdx.x == 0) start_load();
    // The last rows' elements outside whole vectors.
    const uint32_t loose = whole() + threadIdx.x;
    const E* from = static_cast<const E*>(a.logits) + first * columns;
    if (loose < elements()) tile[loose] = from[loose];
    Token token{};
    if (threadIdx.x < held) token = token_of(first + threadIdx.x);
    __syncthreads();
    ptx::mbarrier_wait(barrier, 0);
    const bool vectors = a.whole_vectors != 0;
    if constexpr (kReduces) {
      vectors ? reduce<true>() : reduce<false>();
      __syncthreads();
    }
    if (threadIdx.x < held) end(threadIdx.x, token);
    if constexpr (kApplies) {
      __syncthreads();
      vectors ? apply<true>() : apply<false>();
      ptx::fence_async_shared();
      __syncthreads();
      E* to = static_cast<E*>(a.dlogits) + first * columns;
      if (loose < elements()) to[loose] = tile[loose];
      if (threadIdx.x == 0 && whole() > 0) {
        ptx::bulk_store(to, ptx::shared_address(tile), whole() * static_cast<uint32_t>(sizeof(E)));
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
    }
  }
};

// The kernel. Shared memory is as the plan has it.
template <class E, Pass kPass, bool kSmooth, bool kCap, class Sum = RowSum>
__device__ inline void packed_rows(const CrossEntropyArguments& a) {
  extern __shared__ __align__(128) uint8_t shared[];
  Packed<E, kPass, kSmooth, kCap, Sum>(a, shared).run();
}

}  // namespace xentile

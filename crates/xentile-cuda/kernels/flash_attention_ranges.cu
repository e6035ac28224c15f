// Ranges of keys that end where a query's segment does, so that kernels of attention skip tiles out of range.
//
// A CTA has a batch entry. Ids share buckets by their lowest bits, of which each has the hull of its keys: it may be
// too wide, and the ids decide then. Only ends of runs of an id are counted in, which are few.
#include <cstdint>

#include "ptx.cuh"

using namespace xentile;

// Mirrored by `RangesArguments` in src/flash_attention/arguments.rs.
struct FlashAttentionRangesArguments {
  const int32_t* ranges;       // [entries, queries, 2]
  const int32_t* q_segments;   // [entries, queries]
  const int32_t* kv_segments;  // [entries, keys]; `q_segments` where queries and keys have the same
  int32_t* narrowed;           // as ranges
  int32_t* of_queries;         // as q_segments
  int32_t* of_keys;            // as kv_segments
  int32_t queries;
  int32_t keys;
  int32_t buckets;  // a power of two
};

// Mirrored by `NUMBERS` there.
inline constexpr uint32_t kAttentionRangesThreads = 1024;

extern "C" __global__ void __launch_bounds__(kAttentionRangesThreads)
    flash_attention_ranges(const __grid_constant__ FlashAttentionRangesArguments a) {
  extern __shared__ int2 hulls[];
  const int32_t first = threadIdx.x, step = kAttentionRangesThreads, last = a.buckets - 1;
  const int64_t entry = blockIdx.x, of_queries = entry * a.queries, of_keys = entry * a.keys;
  const int32_t *q_segments = a.q_segments + of_queries, *kv_segments = a.kv_segments + of_keys;
  for (int32_t i = first; i < a.buckets; i += step) hulls[i] = make_int2(a.keys, 0);
  __syncthreads();
  // Whether an id has several runs, or its bucket several ids.
  bool is_shared = false;
#pragma unroll 4
  for (int32_t key = first; key < a.keys; key += step) {
    const int32_t own = kv_segments[key];
    int2& hull = hulls[own & last];
    if (key == 0 || kv_segments[key - 1] != own) is_shared |= atomicMin(&hull.x, key) != a.keys;
    if (key == a.keys - 1 || kv_segments[key + 1] != own) atomicMax(&hull.y, key + 1);
  }
  is_shared = __syncthreads_or(is_shared) != 0;
  const int2* ranges = reinterpret_cast<const int2*>(a.ranges) + of_queries;
  int2* narrowed = reinterpret_cast<int2*>(a.narrowed) + of_queries;
  const bool is_own = a.q_segments == a.kv_segments;
#pragma unroll 4
  for (int32_t query = first; query < a.queries; query += step) {
    const int32_t own = q_segments[query];
    const int2 range = ranges[query], hull = hulls[own & last];
    const int32_t low = max(range.x, hull.x), high = max(min(range.y, hull.y), low);
    narrowed[query] = make_int2(low, high);
    // The bucket may be of another id, which no query of this one sees.
    if (!is_own && low < high) is_shared |= kv_segments[hull.x] != own;
  }
  is_shared = __syncthreads_or(is_shared) != 0;
#pragma unroll 4
  for (int32_t query = first; query < a.queries; query += step) {
    a.of_queries[of_queries + query] = is_shared ? q_segments[query] : 0;
  }
#pragma unroll 4
  for (int32_t key = first; key < a.keys; key += step) a.of_keys[of_keys + key] = is_shared ? kv_segments[key] : 0;
}

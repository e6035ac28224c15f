// Cross-entropy for Hopper and later: rows stream through shared memory, once in and once out.
//
// A cluster of CTAs takes a row at a time. Its whole vectors (16 bytes, at addresses that are
// multiples of 16) are cut into chunks that the cluster's warps hold in turns: chunk j of warp g of
// G holds the vectors from (j*G + g) * chunk_vectors on. Every warp has a ring of slots of its own
// and runs alone, a pipeline of three stages a chunk:
//
//   load     a bulk copy into a slot that has come free
//   reduce   the sum of exponentials; after a row's last chunk the warp sends its part to all CTAs
//   apply    the gradient, written straight to memory, a full line at a time
//
// `apply` follows `reduce` a row behind, so that all parts of a row's sum have arrived when it
// comes to the row: no warp waits for another, and memory is read and written all the time. That
// rows stay on the chip between reduction and gradient is QuACK's idea (Guo et al., 2025); the
// decoupled warps are what it takes to overlap the three.
//
// What a row shares with its neighbours (row.cuh), one warp takes from memory, a different one for
// every row. Its sum is a part of its own.
//
// The order of a row's sum is that of its chunks, whoever holds them: a column of pieces is what one
// warp holds where many rows are under way, and pieces of a column are added one by one, then columns.
// Where rows are few and clusters wide, a column is spread over several warps, and every chunk's sum
// is a message; else a warp adds up its column and sends one.
#pragma once

#include "cross_entropy.cuh"
#include "distribution.cuh"
#include "row.cuh"

namespace xentile {

// Tables of parts in turn. A warp sends row x+2 after it has read row x, which all warps had sent,
// and so had read row x-2: four never meet.
inline constexpr uint32_t kTables = 4;
// Rows between load and apply, at most; a power of two.
inline constexpr uint32_t kRows = 8;

// Where things lie in shared memory; `bytes` is what a launch asks for. The plan computes the same.
struct RingLayout {
  static constexpr uint32_t kRowBytes = 64;

  uint32_t slot, tables, rows, full, sent, bytes;

  __host__ __device__ RingLayout(const CrossEntropyArguments& a, uint32_t warps, uint32_t ctas,
                                 uint32_t part_bytes) {
    slot = a.chunk_vectors * 16;
    tables = warps * a.slots * slot;
    rows = tables + kTables * parts(a, ctas * warps) * part_bytes;
    full = rows + warps * kRows * kRowBytes;
    sent = full + warps * a.slots * 8;
    bytes = sent + kTables * 8;
  }

  // Whether a column of pieces is spread over several warps.
  __host__ __device__ static bool is_spread(const CrossEntropyArguments& a, uint32_t workers) {
    return workers != a.columns_of_pieces;
  }

  // Sums that a row is made of: the last is that of what lies outside whole vectors.
  __host__ __device__ static uint32_t parts(const CrossEntropyArguments& a, uint32_t workers) {
    return (is_spread(a, workers) ? workers * a.chunks : workers) + 1;
  }
};

template <class E, Pass kPass, bool kSmooth, bool kCap, class Sum, bool kTempered>
struct Ring {
  static_assert(kPass != Pass::kBackward, "flat.cuh has that one");
  static constexpr bool kApplies = kPass == Pass::kFused;
  static constexpr uint32_t kPer = kPerVector<E>;
  static_assert(sizeof(Row<E>) == RingLayout::kRowBytes);
  static constexpr uint32_t kPartBytes = sizeof(Sum);
  // Where a row is still here once its sum is known, its likeliest column is looked for then, and parts
  // say no more than which piece has it.
  static constexpr bool kLocatesLate = Sum::kWeighted && kApplies;
  // Whether rows have a temperature's factor.
  static constexpr bool kFactor = kTempered || !kCap;

  const CrossEntropyArguments& a;
  const uint32_t lane, ctas;
  uint32_t worker, workers;  // this warp among those of the cluster
  uint32_t clusters;
  const uint64_t policy;
  const CapFor<kCap, kTempered> cap;
  uint8_t* slots;
  Sum* tables;
  Row<E>* rows;
  uint32_t full, sent;
  uint32_t slot_bytes;
  uint32_t parts;  // places of a table
  bool ragged;     // whether rows may lie outside whole vectors
  bool spread;     // whether every chunk's sum is sent
  bool weighs;     // whether entropy is asked for
  bool arms;       // whether this warp announces what its CTA is to be sent

  // What is fetched of a token a row ahead of its row.
  struct Early {
    int64_t label;
    float dloss;
  };

  // The next chunk to load.
  struct Loading {
    int64_t index;
    uint32_t in_block, chunk, slot, row;
    Early early;
  };

  __device__ Ring(const CrossEntropyArguments& arguments, uint8_t* shared)
      : a(arguments),
        lane(threadIdx.x % 32),
        ctas(ptx::cluster_ctas()),
        policy(ptx::evict_first()),
        cap(kCap ? arguments.softcap : 1.0, arguments.scale) {
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warps = blockDim.x / 32;
    const RingLayout layout(a, warps, ctas, kPartBytes);
    worker = ptx::cluster_rank() * warps + warp;
    workers = ctas * warps;
    clusters = gridDim.x / ctas;
    slot_bytes = layout.slot;
    parts = RingLayout::parts(a, workers);
    ragged = a.columns % kPer != 0 || a.stride % kPer != 0;
    spread = RingLayout::is_spread(a, workers);
    slots = shared + warp * a.slots * slot_bytes;
    tables = reinterpret_cast<Sum*>(shared + layout.tables);
    rows = reinterpret_cast<Row<E>*>(shared + layout.rows) + warp * kRows;
    full = ptx::shared_address(shared + layout.full) + warp * a.slots * 8;
    sent = ptx::shared_address(shared + layout.sent);
    weighs = Sum::kWeighted && a.entropy != nullptr;
    arms = warp == 0 && lane == 0;
  }

  __device__ uint4* at_slot(uint32_t slot) const {
    return reinterpret_cast<uint4*>(slots + slot * slot_bytes);
  }

  // The vectors of a row before this warp's chunk `chunk`, and how many that holds.
  __device__ uint32_t before(uint32_t chunk) const {
    return (chunk * workers + worker) * a.chunk_vectors;
  }
  __device__ uint32_t count(const Row<E>& row, uint32_t before) const {
    return before >= row.vectors ? 0 : min(a.chunk_vectors, row.vectors - before);
  }

  // The first of these that is the row's.
  __device__ uint32_t own(const Row<E>& row, uint32_t before) const {
    return before == 0 ? row.skip : 0;
  }

  // The first of these for this lane, which takes every 32nd.
  __device__ uint32_t first_of(const Row<E>& row, uint32_t before) const {
    return lane < own(row, before) ? lane + 32 : lane;
  }

  // The place of a column's element in a chunk of `held` vectors; `held` * kPer or more elsewhere.
  __device__ uint32_t place(const Row<E>& row, int column, uint32_t before) const {
    return row.place(column) - before * kPer;
  }

  __device__ void next(int64_t& index, uint32_t& in_block) const {
    if (++in_block == a.time_block) {
      in_block = 0;
      index += static_cast<int64_t>(clusters - 1) * a.time_block;
    }
    ++index;
  }

  __device__ Early fetch(int64_t index) const {
    Early early{};
    if (index >= a.tokens) return early;
    early.label = label_at(a, index);
    if constexpr (kApplies) early.dloss = a.dloss[index];
    return early;
  }

  __device__ void load(Loading& next_one) const {
    if (next_one.index >= a.tokens) return;
    Row<E>& row = rows[next_one.row % kRows];
    if (next_one.chunk == 0) {
      const Early& early = next_one.early;
      const Token token = describe<kPass, Sum::kWeighted>(a, early.label, early.dloss);
      if (lane == 0) row = Row<E>::of(a, next_one.index, token);
      __syncwarp();
    }
    if (lane == 0) {
      const uint32_t skipped = before(next_one.chunk);
      const uint32_t begin = own(row, skipped), end = count(row, skipped);
      const uint32_t barrier = full + next_one.slot * 8;
      if (row.token.read && end > 0) {
        const E* from = static_cast<const E*>(a.logits) + row.first + (skipped + begin) * kPer;
        const uint32_t bytes = (end - begin) * 16;
        ptx::mbarrier_arrive_expect_tx(barrier, bytes);
        ptx::bulk_load(ptx::shared_address(at_slot(next_one.slot) + begin), from, bytes, barrier,
                       policy);
      } else {
        ptx::mbarrier_arrive(barrier);
      }
    }
    if (++next_one.slot == a.slots) next_one.slot = 0;
    if (++next_one.chunk == a.chunks) {
      next_one.chunk = 0;
      ++next_one.row;
      next(next_one.index, next_one.in_block);
      next_one.early = fetch(next_one.index);
    }
  }

  using Pieces = Piece<E, kSmooth, kCap, Sum, CapFor<kCap, kTempered>>;

  // The sum of what the warp holds of chunk `chunk`, with the label's logit if it is there.
  __device__ Sum reduce(const Row<E>& row, uint32_t chunk, uint32_t slot, Reach& reach) const {
    const uint32_t skipped = before(chunk);
    const uint32_t held = count(row, skipped);
    const uint4* vectors = at_slot(slot);
    Sum piece =
        Pieces::sum(vectors, first_of(row, skipped), held, cap, reach, weighs);
    const uint32_t label_at = place(row, row.token.target, skipped);
    if (label_at < held * kPer) {
      const float x = to_float(reinterpret_cast<const E*>(vectors)[label_at]);
      piece.label = kCap ? cap.apply(x) : x;
    }
    return piece;
  }

  // The first element of a chunk that is `highest`, for all lanes; ~0 if none is.
  __device__ uint32_t find(const Row<E>& row, uint32_t skipped, uint32_t slot, float highest) const {
    const uint32_t held = count(row, skipped);
    const uint4* vectors = at_slot(slot);
    uint32_t found = ~0u;
    for (uint32_t v = first_of(row, skipped); v < held && found == ~0u; v += 32) {
      float x[kPer];
      unpack<E>(vectors[v], x);
#pragma unroll
      for (uint32_t i = kPer; i-- > 0;) {
        if (x[i] == highest) found = v * kPer + i;
      }
    }
    return __reduce_min_sync(~0u, found);
  }

  // Says where a piece's largest logit is, if that is larger than those of the row's pieces before:
  // its column, or the piece's first, if columns are looked for late.
  __device__ void locate(const Row<E>& row, uint32_t chunk, uint32_t slot, const Sum& before_it,
                         Sum& piece) const {
    // Under a cap -inf is as good a logit as any.
    const bool is_new =
        chunk == 0 ? kCap || piece.highest > -INFINITY : piece.highest > before_it.highest;
    if (!is_new) {
      piece.highest = -INFINITY;
      return;
    }
    const uint32_t skipped = before(chunk);
    if constexpr (kLocatesLate) {
      const uint32_t first = own(row, skipped);
      if (first < count(row, skipped)) piece.at = row.column((skipped + first) * kPer);
    } else {
      const uint32_t found = find(row, skipped, slot, piece.highest);
      if (found != ~0u) piece.at = row.column(skipped * kPer + found);
    }
  }

  // Writes a row's likeliest column where it is in this chunk, which `all` says.
  __device__ void locate_late(const Row<E>& row, uint32_t chunk, uint32_t slot, const Sum& all) const {
    const uint32_t skipped = before(chunk);
    const uint32_t piece = place(row, static_cast<int>(all.at), skipped);
    if (a.argmax == nullptr || piece >= count(row, skipped) * kPer) return;
    const uint32_t column = row.column(skipped * kPer + find(row, skipped, slot, all.highest));
    if (lane == 0) write_argmax(a, row.index, column);
  }

  // The sum of what lies outside whole vectors.
  __device__ Sum reduce_ragged(const Row<E>& row) const {
    const int column = row.ragged(lane);
    const bool has = column >= 0;
    const float x =
        has ? to_float(static_cast<const E*>(a.logits)[row.begin() + column]) : -INFINITY;
    Sum piece = Pieces::of_elements(x, has, cap);
    if constexpr (Sum::kWeighted) {
      const bool is_highest = has && x == piece.highest;
      piece.at = __reduce_min_sync(~0u, is_highest ? static_cast<uint32_t>(column) : ~0u);
    }
    const bool found = has && column == row.token.target;
    piece.label = sum_of_warp(found ? (kCap ? cap.apply(x) : x) : 0.0f);
    return piece;
  }

  // Has every CTA of the cluster expect the parts of a row.
  __device__ void expect(uint32_t table) const {
    const uint32_t sent_parts = parts - (ragged ? 0 : 1);
    if (arms && ctas > 1) {
      ptx::mbarrier_arrive_expect_tx(sent + table * 8,
                                     sent_parts * kPartBytes);
    }
  }

  // Sends a part of a row to every CTA of the cluster.
  __device__ void send(const Sum& part, uint32_t index, uint32_t table) const {
    Sum* const to = tables + table * parts + index;
    if (ctas == 1) {  // messages are for clusters of two and more
      if (lane == 0) {
        *to = part;
        ptx::mbarrier_arrive(sent + table * 8);
      }
    } else if (lane < ctas) {
      const uint32_t there = ptx::in_cta(ptx::shared_address(to), lane);
      const uint32_t barrier = ptx::in_cta(sent + table * 8, lane);
      ptx::send(there, make_float4(part.c, part.exponentials, part.values, part.label), barrier);
      if constexpr (Sum::kWeighted) ptx::send(there + sizeof(RowSum), part.rest(), barrier);
    }
  }

  // The sums of a whole row, when all parts have arrived.
  __device__ Sum gather(uint32_t table, uint32_t phase, bool with_label) const {
    ptx::mbarrier_wait(sent + table * 8, phase);
    const Sum* const from = tables + table * parts;
    const uint32_t columns = a.columns_of_pieces;
    const uint32_t pieces = spread ? a.pieces_of_a_column : 1;
    Sum all = Sum::none();
    for (uint32_t column = lane; column < columns; column += 32) {
      Sum sum = from[column];
      for (uint32_t i = 1; i < pieces; ++i) sum.merge(from[i * columns + column]);
      all.merge(sum);
    }
    Sum row = all.template across_lanes<kSmooth>();
    if (with_label) row.label = sum_of_warp(row.label);
    if (ragged) row.merge(from[parts - 1]);
    return row;
  }

  __device__ void apply(const Row<E>& row, uint32_t chunk, uint32_t slot,
                        const RowGradient& gradient, const RowSum& sum, Reach reach) const {
    const uint32_t skipped = before(chunk);
    const uint32_t held = count(row, skipped);
    const uint4* vectors = at_slot(slot);
    E* elements = static_cast<E*>(a.dlogits) + row.first + skipped * kPer;
    uint4* to = reinterpret_cast<uint4*>(elements);
    uint32_t v = first_of(row, skipped);
    if (row.token.is_masked) {
      for (; v < held; v += 32) __stcs(to + v, make_uint4(0, 0, 0, 0));
      return;
    }
    const uint32_t label_at = place(row, row.token.target, skipped);
    const bool found = label_at < held * kPer;
    float at_label = 0.0f;
    if (found) {
      at_label = at_the_label(row, gradient, sum, vectors[label_at / kPer], label_at % kPer, reach);
    }
    if constexpr (!kCap) {
      apply<Reach::kUnknown>(vectors, to, v, held, gradient);
    } else if (reach == Reach::kClose) {
      apply<Reach::kClose>(vectors, to, v, held, gradient);
    } else if (reach == Reach::kNear) {
      apply<Reach::kNear>(vectors, to, v, held, gradient);
    } else {
      apply<Reach::kFar>(vectors, to, v, held, gradient);
    }
    // By the lane that wrote the vector, so that this comes second.
    if (found && label_at / kPer % 32 == lane) elements[label_at] = from_float<E>(at_label);
  }

  template <Reach kReach>
  __device__ void apply(const uint4* vectors, uint4* to, uint32_t v, uint32_t held,
                        const RowGradient& gradient) const {
    constexpr uint32_t kBatch = 2;
    for (; v + 32 * (kBatch - 1) < held; v += 32 * kBatch) {
      uint4 batch[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) batch[i] = vectors[v + 32 * i];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        __stcs(to + v + 32 * i, gradient.template of_vector<E, kSmooth, kCap, kReach>(batch[i], cap));
      }
    }
    for (; v < held; v += 32) {
      __stcs(to + v, gradient.template of_vector<E, kSmooth, kCap, kReach>(vectors[v], cap));
    }
  }

  __device__ void apply_ragged(const Row<E>& row, const RowGradient& gradient,
                               const RowSum& sum) const {
    const int column = row.ragged(lane);
    if (column < 0) return;
    float dz = 0.0f;
    if (!row.token.is_masked) {
      const float x = to_float(static_cast<const E*>(a.logits)[row.begin() + column]);
      dz = column == row.token.target ? at_the_label(row, gradient, sum, x)
                                      : gradient.template at<kSmooth, kCap>(x, cap);
    }
    static_cast<E*>(a.dlogits)[row.begin() + column] = from_float<E>(dz);
  }

  __device__ __noinline__ float at_the_label(const Row<E>& row, const RowGradient& gradient,
                                             const RowSum& sum, float x) const {
    return gradient.template at_the_label<kCap, kFactor>(a, row.token, x, cap, sum.lse());
  }

  // Of an element of a vector.
  __device__ __noinline__ float at_the_label(const Row<E>& row, const RowGradient& gradient,
                                             const RowSum& sum, const uint4& vector, uint32_t place,
                                             Reach reach) const {
    if constexpr (!kCap) return at_the_label(row, gradient, sum, element<E>(vector, place));
    constexpr bool kExact = Pieces::kExact;
    const Capped label =
        reach == Reach::kClose  ? cap.template one_of<Reach::kClose, kExact, E>(vector, place)
        : reach == Reach::kNear ? cap.template one_of<Reach::kNear, kExact, E>(vector, place)
                                : cap.template one_of<Reach::kFar, kExact, E>(vector, place);
    return gradient.template at_the_label<kCap, kFactor>(a, row.token, label, sum.lse());
  }

  __device__ void run() {
    if (lane < a.slots) ptx::mbarrier_init(full + lane * 8, 1);
    // All warps arrive, or one that announces how many bytes will.
    const uint32_t arrivals = ctas == 1 ? workers + ragged : 1;
    if (threadIdx.x < kTables) ptx::mbarrier_init(sent + threadIdx.x * 8, arrivals);
    ptx::fence_mbarrier_init();
    ptx::cluster_sync();

    Loading loading{};
    loading.index = static_cast<int64_t>(blockIdx.x / ctas) * a.time_block;
    int64_t index = loading.index;
    uint32_t in_block = 0;
    loading.early = fetch(index);
    for (uint32_t slot = 0; slot < a.slots; ++slot) load(loading);

    uint32_t reduced_slot = 0, reduced_phase = 0, applied_slot = 0, applied_phase = 0;
    uint32_t sums_sent = 0, sums_read = 0;  // rows so far
    uint32_t turn = 0, previous_turn = 0;   // the worker for what only one does for a row
    Sum sum = Sum::none();
    // Of every chunk of the current row and the previous, two bits each.
    uint64_t reaches = 0, previous_reaches = 0;
    Sum all = Sum::none();
    RowGradient gradient{};
    Row<E> current, previous;
    bool have_previous = false;
    for (uint32_t number = 0;; ++number) {
      const bool have_current = index < a.tokens;
      if (!have_current && !have_previous) break;
      if (have_current) current = rows[number % kRows];
      for (uint32_t chunk = 0; chunk < a.chunks; ++chunk) {
        if (have_current) {
          ptx::mbarrier_wait(full + reduced_slot * 8, reduced_phase);
          if (current.token.read) {
            Reach reach{};
            Sum piece = reduce(current, chunk, reduced_slot, reach);
            if constexpr (Sum::kWeighted) locate(current, chunk, reduced_slot, sum, piece);
            if constexpr (kCap && kApplies) reaches |= static_cast<uint64_t>(reach) << (2 * chunk);
            const uint32_t table = sums_sent % kTables;
            if (chunk == 0) {
              sum = piece;
              expect(table);
            } else {
              sum.merge(piece);
            }
            if (spread) send(piece, chunk * workers + worker, table);
            if (chunk + 1 == a.chunks) {
              if (!spread) send(sum, worker, table);
              if (ragged && worker == turn) send(reduce_ragged(current), parts - 1, table);
              ++sums_sent;
            }
          }
          if (++reduced_slot == a.slots) {
            reduced_slot = 0;
            reduced_phase ^= 1;
          }
          if constexpr (!kApplies) {
            __syncwarp();
            load(loading);
          }
        }
        if (!have_previous) continue;
        if (chunk == 0) {
          const bool mine = worker == previous_turn;
          all = Sum::none();
          if (previous.token.read) {
            all = gather(sums_read % kTables, sums_read / kTables % 2, mine);
            ++sums_read;
          }
          // Gradients come with the last of a row's columns, where nobody writes what was carried.
          if constexpr (Sum::kWeighted) {
            all.at = all.argmax(previous.token);
            if (mine && lane == 0) {
              write_token<kSmooth>(a, previous.index, previous.token, all);
              if (!kLocatesLate || !previous.is_whole(all.at)) write_argmax(a, previous.index, all.at);
            }
          } else {
            if (kApplies || (mine && lane == 0)) add_carried(a, previous.index, all);
            if (mine && lane == 0) {
              end_row<kSmooth, kFactor>(a, previous.index, previous.token, all);
            }
          }
          if constexpr (kApplies) {
            gradient = RowGradient::of<kSmooth, kFactor>(a, previous.token, all);
            if (mine) apply_ragged(previous, gradient, all);
          }
        }
        if constexpr (kLocatesLate) locate_late(previous, chunk, applied_slot, all);
        if constexpr (kApplies) {
          const auto reach = static_cast<Reach>(previous_reaches >> (2 * chunk) & 3);
          apply(previous, chunk, applied_slot, gradient, all, reach);
          if (++applied_slot == a.slots) {
            applied_slot = 0;
            applied_phase ^= 1;
          }
          __syncwarp();
          load(loading);
        }
      }
      previous = current;
      previous_reaches = reaches;
      reaches = 0;
      have_previous = have_current;
      previous_turn = turn;
      if (++turn == workers) turn = 0;
      next(index, in_block);
    }
    // A CTA must not be gone while others still send to it.
    ptx::cluster_sync();
  }
};

// The kernel. Cluster, CTA and shared memory are as the plan has them.
template <class E, Pass kPass, bool kSmooth, bool kCap, class Sum = RowSum, bool kTempered = true>
__device__ inline void ring(const CrossEntropyArguments& a) {
  extern __shared__ __align__(128) uint8_t shared[];
  Ring<E, kPass, kSmooth, kCap, Sum, kTempered>(a, shared).run();
}

}  // namespace xentile

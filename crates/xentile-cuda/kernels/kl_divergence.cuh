// KL divergence of each row of logits from a teacher's, and the gradient of the student's logits, in one
// pass over both. A cluster has a row: each warp loads the next row's share by bulk copies while the
// exponentials of this one wait in registers for the sums of the others.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "ptx.cuh"
#include "warp.cuh"

// Mirrored by `Arguments` in src/kl_divergence/arguments.rs.
struct KlDivergenceArguments {
  const float* student;  // [rows, vocab]
  const float* teacher;  // [rows, vocab]
  const float* factors;  // [rows]
  const int32_t* first;  // the row of dlogits that the first row has
  float* losses;         // [rows]
  void* dlogits;         // [last + rows, vocab]
  int64_t last;          // the largest `first`
  int32_t rows;
  int32_t vocab;  // a multiple of 4
  float inverse_temperature;
};

inline constexpr uint32_t kKlThreads = 512;
inline constexpr uint32_t kKlMaxCtas = 16;
// The most columns of a thread, which waits with them in registers, by two kernels: columns that are
// not there take as long as others.
inline constexpr uint32_t kKlFewThreadColumns = 32;
inline constexpr uint32_t kKlThreadColumns = 40;
// Shares of warps are multiples of so many columns.
inline constexpr uint32_t kKlLineColumns = 64;

namespace xentile::kl {

using namespace ptx;

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;
// The shift of a share without a finite logit: no other one is lower.
inline constexpr float kLowest = -3e38f;

// Sums of 2^(z c - shift), of the student and the teacher, and of the teacher's times t - s. Sent in pairs.
struct Sums {
  float student_shift, student, teacher_shift, teacher, difference, unused;
};

inline constexpr int32_t kLine = kKlLineColumns / 4;
inline constexpr int32_t kWarps = kKlThreads / 32;
inline constexpr int32_t kMaxWarps = kKlMaxCtas * kWarps;
// A barrier for each warp's logits, and two for sums.
inline constexpr uint32_t kBarrierBytes = 8 * (kWarps + 2);

}  // namespace xentile::kl

// Barriers, and the sums of all warps of two rows; behind them each warp's logits.
inline constexpr uint32_t kKlSharedBytes =
    xentile::kl::kBarrierBytes + 2 * xentile::kl::kMaxWarps * sizeof(xentile::kl::Sums);

namespace xentile::kl {

__device__ inline void send(uint32_t to, float x, float y, uint32_t barrier) {
  ptx::send(to, uint64_t{__float_as_uint(y)} << 32 | __float_as_uint(x), barrier);
}

// Replaces a lane's logits by 2^(z c - shift); returns the shift.
template <int kVectors>
__device__ inline float exponentiate(float4 (&z)[kVectors], float largest, float c) {
  const float shift = largest == -INFINITY ? 0.0f : largest * c;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    z[i].x = ex2(fmaf(z[i].x, c, -shift));
    z[i].y = ex2(fmaf(z[i].y, c, -shift));
    z[i].z = ex2(fmaf(z[i].z, c, -shift));
    z[i].w = ex2(fmaf(z[i].w, c, -shift));
  }
  return largest == -INFINITY ? kLowest : shift;
}

template <int kVectors>
__device__ inline float largest_of(const float4 (&z)[kVectors]) {
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    largest = fmaxf(largest, fmaxf(fmaxf(z[i].x, z[i].y), fmaxf(z[i].z, z[i].w)));
  return max_of_warp(largest);
}

// In one order for both models, so that equal ones have equal sums.
template <int kVectors>
__device__ inline float sum_of(const float4 (&z)[kVectors]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sum += (z[i].x + z[i].y) + (z[i].z + z[i].w);
  return sum_of_warp(sum);
}

// Both products are rounded, so that equal distributions have no gradient.
__device__ inline float gradient(float s, float student, float t, float teacher) {
  return __fsub_rn(__fmul_rn(s, student), __fmul_rn(t, teacher));
}

template <class E>
__device__ inline void store(E* to, float x, float y, float z, float w) {
  if constexpr (sizeof(E) == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(x, y, z, w);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(packed<E>(x, y), packed<E>(z, w));
  }
}

template <class E, int kVectors>
__device__ inline void run(const KlDivergenceArguments& a, uint8_t* memory) {
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t ctas = cluster_ctas(), rank = cluster_rank();
  const int32_t warps = ctas * kWarps, vectors = a.vocab / 4;
  // Whole lines of 128 bytes, of dlogits in 16 bits too.
  const int32_t share = ((vectors + warps - 1) / warps + kLine - 1) / kLine * kLine;
  const int32_t first = min((rank * kWarps + warp) * share, vectors);
  const int32_t count = min(share, vectors - first);
  const int32_t clusters = gridDim.x / ctas;
  const float c = a.inverse_temperature * kLog2E;

  const uint32_t barrier = shared_address(memory) + 8 * warp;
  Sums* const sums = reinterpret_cast<Sums*>(memory + kBarrierBytes);
  float4* const student = reinterpret_cast<float4*>(memory + kKlSharedBytes) + 2 * share * warp;
  float4* const teacher = student + share;
  const uint64_t policy = evict_first();
  const int64_t offset = max(min(static_cast<int64_t>(*a.first), a.last), int64_t{0});

  const auto load = [&](int32_t row) {
    const int64_t from = static_cast<int64_t>(row) * a.vocab + 4 * first;
    mbarrier_arrive_expect_tx(barrier, 32 * count);
    bulk_load(shared_address(student), a.student + from, 16 * count, barrier, policy);
    bulk_load(shared_address(teacher), a.teacher + from, 16 * count, barrier, policy);
  };

  int32_t row = blockIdx.x / ctas;
  const uint32_t sums_barriers = shared_address(memory) + 8 * kWarps;
  if (lane == 0) {
    mbarrier_init(barrier, 1);
    if (warp < 2) mbarrier_init(sums_barriers + 8 * warp, 1);
    fence_mbarrier_init();
    if (row < a.rows && count > 0) load(row);
  }
  cluster_sync();
  const float4 none = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
  // A warp sends a row's sums when it has those of the row before, which every warp sent when it had read those
  // of the row before that: two places do.
  for (uint32_t turn = 0; row < a.rows; row += clusters, ++turn) {
    const uint32_t sums_barrier = sums_barriers + 8 * (turn % 2);
    if (threadIdx.x == 0 && ctas > 1) mbarrier_arrive_expect_tx(sums_barrier, warps * sizeof(Sums));
    const float factor = a.factors[row];
    if (count > 0) mbarrier_wait(barrier, turn % 2);
    __syncwarp();
    float4 s[kVectors], t[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t j = lane + 32 * i;
      s[i] = j < count ? student[j] : none;
      t[i] = j < count ? teacher[j] : none;
    }
    __syncwarp();
    if (lane == 0 && count > 0 && row + clusters < a.rows) load(row + clusters);

    // The teacher's exponentials, times the differences before the student's replace its logits.
    Sums own{};
    float difference = 0.0f;
    const float largest = largest_of(t);
    const float shift = largest == -INFINITY ? 0.0f : largest * c;
    const float student_largest = largest_of(s);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const auto one = [&](float& z, float other) {
        const float e = ex2(fmaf(z, c, -shift));
        // A column that the teacher excludes adds 0, whatever the student's logit.
        difference = fmaf(e, fmaxf(z - other, kLowest), difference);
        z = e;
      };
      one(t[i].x, s[i].x);
      one(t[i].y, s[i].y);
      one(t[i].z, s[i].z);
      one(t[i].w, s[i].w);
    }
    own.teacher_shift = largest == -INFINITY ? kLowest : shift;
    own.teacher = sum_of(t);
    own.difference = sum_of_warp(difference);
    own.student_shift = exponentiate(s, student_largest, c);
    own.student = sum_of(s);

    Sums* const all = sums + turn % 2 * kMaxWarps;
    if (ctas > 1) {
      if (lane < ctas) {
        const uint32_t to = in_cta(shared_address(all + rank * kWarps + warp), lane);
        const uint32_t at = in_cta(sums_barrier, lane);
        send(to, own.student_shift, own.student, at);
        send(to + 8, own.teacher_shift, own.teacher, at);
        send(to + 16, own.difference, 0.0f, at);
      }
      mbarrier_wait(sums_barrier, turn / 2 % 2);
    } else {  // Messages need two CTAs.
      if (lane == 0) all[warp] = own;
      __syncthreads();
    }

    float student_shift = kLowest, teacher_shift = kLowest;
    // Of more at once the numbers would drive exponentials out of registers.
#pragma unroll 2
    for (int32_t i = lane; i < warps; i += 32) {
      student_shift = fmaxf(student_shift, all[i].student_shift);
      teacher_shift = fmaxf(teacher_shift, all[i].teacher_shift);
    }
    student_shift = max_of_warp(student_shift);
    teacher_shift = max_of_warp(teacher_shift);
    float student_sum = 0.0f, teacher_sum = 0.0f, differences = 0.0f;
#pragma unroll 2
    for (int32_t i = lane; i < warps; i += 32) {
      const float rescale = ex2(all[i].teacher_shift - teacher_shift);
      student_sum += all[i].student * ex2(all[i].student_shift - student_shift);
      teacher_sum += all[i].teacher * rescale;
      differences += rescale == 0.0f ? 0.0f : all[i].difference * rescale;
    }
    student_sum = sum_of_warp(student_sum);
    teacher_sum = sum_of_warp(teacher_sum);
    differences = sum_of_warp(differences);

    if (rank == 0 && threadIdx.x == 0) {
      // lse of the student less that of the teacher.
      const float lse = kLn2 * (student_shift - teacher_shift) + logf(student_sum) - logf(teacher_sum);
      a.losses[row] = differences / teacher_sum * a.inverse_temperature + lse;
    }
    const float scale = factor * a.inverse_temperature;
    const float of_student = ex2(own.student_shift - student_shift) / student_sum * scale;
    const float of_teacher = ex2(own.teacher_shift - teacher_shift) / teacher_sum * scale;
    E* const to = static_cast<E*>(a.dlogits) + (offset + row) * a.vocab + 4 * first;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t j = lane + 32 * i;
      if (j >= count) continue;
      if (factor == 0.0f) {
        store(to + 4 * j, 0.0f, 0.0f, 0.0f, 0.0f);
      } else {
        store(to + 4 * j, gradient(s[i].x, of_student, t[i].x, of_teacher),
              gradient(s[i].y, of_student, t[i].y, of_teacher),
              gradient(s[i].z, of_student, t[i].z, of_teacher),
              gradient(s[i].w, of_student, t[i].w, of_teacher));
      }
    }
  }
  // No CTA leaves while another one may write to it.
  cluster_sync();
}

}  // namespace xentile::kl

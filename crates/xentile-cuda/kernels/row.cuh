// Where a row of logits lies in memory that is read and written 16 bytes at a time.
//
// With an odd vocabulary most rows begin and end inside a vector (16 bytes at a multiple of 16).
// What is whole of a row is handled in vectors; up to 7 elements a side lie in vectors that it
// shares with its neighbours, and are handled one by one.
#pragma once

#include <cstdint>

#include "cross_entropy.cuh"

namespace xentile {

// Vectors in a line of memory. Stores that begin at lines fill them.
inline constexpr uint32_t kLine = 8;

// A row: where it lies, and what is known of its token.
template <class E>
struct alignas(16) Row {
  static constexpr uint32_t kPer = kPerVector<E>;

  int64_t index;
  int64_t first;       // element of the logits at the line that its whole vectors begin in
  uint32_t vectors;    // from there to the end of its whole vectors
  uint8_t skip;        // of these, vectors before its own: below kLine
  uint8_t head, tail;  // elements before and after its whole vectors
  Token token;

  __device__ static Row of(const CrossEntropyArguments& a, int64_t index, const Token& token) {
    const int64_t begin = index * a.stride;
    const uint32_t misplaced = static_cast<uint32_t>(begin) % kPer;
    const uint32_t columns = static_cast<uint32_t>(a.columns);
    const uint32_t head = min((kPer - misplaced) % kPer, columns);
    const uint32_t whole = (columns - head) / kPer;
    Row row;
    row.index = index;
    row.skip = whole == 0 ? 0 : static_cast<uint64_t>(begin + head) / kPer % kLine;
    row.first = begin + head - row.skip * kPer;
    row.vectors = row.skip + whole;
    row.head = head;
    row.tail = (columns - head) % kPer;
    row.token = token;
    return row;
  }

  // The column that `lane` takes of those outside whole vectors; -1 for none.
  __device__ int ragged(uint32_t lane) const {
    if (lane < head) return static_cast<int>(lane);
    return lane < head + tail ? static_cast<int>((vectors - skip) * kPer + lane) : -1;
  }

  // A column's element, counted from `first`; ~0 or beyond the row where it lies in no whole vector.
  __device__ uint32_t place(int column) const {
    return column < head ? ~0u : column - head + skip * kPer;
  }

  __device__ bool is_whole(int column) const { return place(column) < vectors * kPer; }

  // The column of such an element.
  __device__ uint32_t column(uint32_t place) const { return place + head - skip * kPer; }

  __device__ int64_t begin() const { return first + skip * kPer - head; }
};

}  // namespace xentile

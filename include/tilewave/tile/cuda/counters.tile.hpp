#pragma once

#include "tilewave/tile/cuda/threads.tile.hpp"

// Searching a Histogram, and sorting a List.

namespace tw::cuda {

/// The sum of x in this lane and the lanes before it.
TW_INLINE int sum_of_lanes_until(int lane, int x) {
  TW_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = ptx::shuffle(x, lane - distance);
    if (lane >= distance) x += before;
  }
  return x;
}

/// The sum of what warps before `warp` have stored in sums[0] to sums[kWarps - 1].
template <int kWarps>
TW_INLINE int sum_of_warps_before(const int* sums, int lane, int warp) {
  static_assert(kWarps <= 32, "each lane reads the sum of a warp");
  return ptx::sum_of_lanes(lane < warp ? sums[lane] : 0);
}

/// Waits until all threads have counted, then finds the n-th item; 0 < n <= the number of items counted. Each thread holds neighbouring
/// counters, the first thread the last ones. A scan of the threads' sums, first within warps and then over them, finds the thread with the
/// counter. The counters are 0 afterwards.
template <int kWarps, int N>
TW_INLINE Located locate(const Threads<kWarps>& block, const Histogram<N>& histogram, int n) {
  constexpr int threads = kWarps * 32;
  const Position& at = block.at;
  static_assert(N % threads == 0, "the counters of a histogram are dealt evenly to the block's threads");
  constexpr int share = N / threads;
  block.sync();
  const int first = N - (block.thread() + 1) * share;
  int counts[share], own = 0;
  TW_UNROLL
  for (int i = 0; i < share; ++i) {
    own += counts[i] = static_cast<int>(histogram.counts()[first + i]);
    histogram.counts()[first + i] = 0;
  }
  int until = sum_of_lanes_until(at.lane, own);
  if (at.lane == 31) histogram.warp_sums()[at.block_warp()] = until;
  block.sync();
  until += sum_of_warps_before<kWarps>(histogram.warp_sums(), at.lane, at.block_warp());
  int above = until - own;
  if (above < n && n <= until) {
    TW_UNROLL
    for (int i = share - 1; i >= 0; --i) {
      if (above < n && n <= above + counts[i]) *histogram.located() = {first + i, above, counts[i]};
      above += counts[i];
    }
  }
  block.sync();
  return *histogram.located();
}

/// Where a thread's chosen columns go in a list: those of its piece i are next to each other, from first[i] on.
template <class F>
struct PlacesInOrder {
  static constexpr int pieces = F::pieces, width = F::size / pieces;
  u32 chosen = 0;  ///< a bit for each element
  int first[pieces];
  TW_INLINE u32 of_piece(int i) const { return chosen >> (i * width) & (0xffffffffu >> (32 - width)); }
};

/// Finds the places of the elements of a row for which chosen(column, x) holds, in the order of their columns, and adds their number to the
/// list's size. A place is the number of elements chosen before: in pieces before, and in the same piece by warps and lanes before. The
/// pieces' numbers are summed two in a word.
template <int kWarps, class T, int N, class F, class Chosen>
TW_INLINE PlacesInOrder<F> places_in_order(const Threads<kWarps>& block, const List<T, N>& list, const F& row, Chosen chosen) {
  constexpr int width = PlacesInOrder<F>::width, words = ceil_div(F::pieces, 2);
  static_assert(F::rows == 1 && F::warps == kWarps && F::size <= 32, "columns of one row are appended in order, up to 32 of a thread");
  static_assert(words * kWarps <= List<T, N>::most_sums && kWarps * 32 * width < 1 << 16, "a piece's columns are counted in half a word");
  const Position& at = block.at;
  PlacesInOrder<F> places;
  TW_UNROLL
  for (int e = 0; e < F::size; ++e) places.chosen |= static_cast<u32>(chosen(F::col(at, e), row.x[e])) << e;
  int before[words], all[words];
  TW_UNROLL
  for (int w = 0; w < words; ++w) {
    int own = ptx::count_ones(places.of_piece(2 * w));
    if (2 * w + 1 < F::pieces) own += ptx::count_ones(places.of_piece(2 * w + 1)) << 16;
    const int until = sum_of_lanes_until(at.lane, own);
    if (at.lane == 31) list.warp_sums()[w * kWarps + at.block_warp()] = until;
    before[w] = until - own;
  }
  block.sync();
  int size = static_cast<int>(*list.size());
  TW_UNROLL
  for (int w = 0; w < words; ++w) {
    const int* const sums = list.warp_sums() + w * kWarps;
    before[w] += sum_of_warps_before<kWarps>(sums, at.lane, at.block_warp());
    all[w] = sum_of_warps_before<kWarps>(sums, at.lane, kWarps);
  }
  block.sync();
  TW_UNROLL
  for (int i = 0; i < F::pieces; ++i) {
    const int half = i % 2 * 16;
    places.first[i] = size + (before[i / 2] >> half & 0xffff);
    size += all[i / 2] >> half & 0xffff;
  }
  if (block.thread() == 0) *list.size() = static_cast<u32>(size);
  return places;
}

/// Appends the elements x of a row for which chosen(column, x) holds, in the order of their columns. All threads see them when they have
/// waited for each other again.
template <int kWarps, class T, int N, class F, class Chosen>
TW_INLINE void append_in_order(const Threads<kWarps>& block, const List<T, N>& list, const F& row, Chosen chosen) {
  const PlacesInOrder<F> places = places_in_order(block, list, row, chosen);
  TW_UNROLL
  for (int i = 0; i < F::pieces; ++i) {
    int place = places.first[i];
    TW_UNROLL
    for (int e = i * places.width; e < (i + 1) * places.width; ++e) {
      if ((places.chosen >> e & 1) == 0) continue;
      if (place < N) list[place] = row.x[e];
      ++place;
    }
  }
}

/// One of x[0] to x[width - 1], which are in registers and so have no addresses.
template <int width, class T>
TW_INLINE T pick(const T* x, int i) {
  if constexpr (width == 1) {
    return x[0];
  } else {
    const T low = pick<width / 2>(x, i), high = pick<width / 2>(x + width / 2, i);
    return i & (width / 2) ? high : low;
  }
}

/// Appends value_of(column, x) for them. Where few are chosen this is faster: a thread goes through those, not through its elements.
template <int kWarps, class T, int N, class F, class Chosen, class ValueOf>
TW_INLINE void append_few(const Threads<kWarps>& block, const List<T, N>& list, const F& row, Chosen chosen, ValueOf value_of) {
  const PlacesInOrder<F> places = places_in_order(block, list, row, chosen);
  T* const values = &list[0];
  TW_UNROLL
  for (int i = 0; i < F::pieces; ++i) {
    int place = places.first[i];
    TW_NO_UNROLL
    for (u32 left = places.of_piece(i); left != 0; left &= left - 1, ++place) {
      const int in_piece = ptx::lowest_one(left);
      const auto x = pick<places.width>(row.x + i * places.width, in_piece);
      if (place < N) values[place] = value_of(F::col(block.at, i * places.width) + in_piece, x);
    }
  }
}

/// Sorts the first `used` values, largest first; all threads see the result. A bitonic sort, with the number of values padded to a power of
/// two with zeros.
template <int kWarps, int N>
TW_INLINE void sort(const Threads<kWarps>& block, const List<u64, N>& list, int used) {
  static_assert((N & (N - 1)) == 0, "a list that is sorted has room for a power of two of values");
  int padded = 2;
  while (padded < used) padded *= 2;
  block.parallel(padded - used, [&](int i) { list[used + i] = 0; });
  block.sync();
  TW_NO_UNROLL
  for (int run = 2; run <= padded; run *= 2) {
    TW_NO_UNROLL
    for (int stride = run / 2; stride > 0; stride /= 2) {
      block.parallel(padded / 2, [&](int i) {
        const int low = 2 * i - (i & (stride - 1));
        const u64 a = list[low], b = list[low + stride];
        const bool descending = (low & run) == 0;
        if ((a < b) == descending) {
          list[low] = b;
          list[low + stride] = a;
        }
      });
      block.sync();
    }
  }
}

}  // namespace tw::cuda

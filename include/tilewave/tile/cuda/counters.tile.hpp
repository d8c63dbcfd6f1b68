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

/// Waits until all threads have counted, then finds the n-th item; 0 < n <= the number of items counted. Each thread holds neighbouring
/// counters, the first thread the last ones. A scan of the threads' sums, first within warps and then over them, finds the thread with the
/// counter.
template <int kWarps, int N>
TW_INLINE Located locate(const Threads<kWarps>& block, const Histogram<N>& histogram, int n) {
  constexpr int threads = kWarps * 32;
  const Position& at = block.at;
  static_assert(N % threads == 0, "the counters of a histogram are dealt evenly to the block's threads");
  constexpr int share = N / threads;
  block.sync();
  const u32* const last = histogram.counts() + (N - 1 - block.thread() * share);
  int own = 0;
  TW_UNROLL
  for (int i = 0; i < share; ++i) own += static_cast<int>(last[-i]);
  int until = sum_of_lanes_until(at.lane, own);
  if (at.lane == 31) histogram.warp_sums()[at.block_warp()] = until;
  block.sync();
  for (int warp = 0; warp < at.block_warp(); ++warp) until += histogram.warp_sums()[warp];
  int above = until - own;
  if (above < n && n <= until) {
    int i = 0;
    while (above + static_cast<int>(last[-i]) < n) above += static_cast<int>(last[-i++]);
    *histogram.located() = {N - 1 - block.thread() * share - i, above, static_cast<int>(last[-i])};
  }
  block.sync();
  return *histogram.located();
}

/// Appends value_of(column) for the elements x of a row for which chosen(column, x) holds, in the order of their columns. Each thread holds
/// neighbouring ones. All threads see the values when they have waited for each other again.
template <int kWarps, class T, int N, class F, class Chosen, class ValueOf>
TW_INLINE void append_in_order(const Threads<kWarps>& block, const List<T, N>& list, const F& row, Chosen chosen, ValueOf value_of) {
  static_assert(F::rows == 1 && F::warps == kWarps && F::pieces == 1,
                "a row is appended in order, of whose columns a thread has one piece");
  const Position& at = block.at;
  u32 mask = 0;
  TW_UNROLL
  for (int e = 0; e < F::size; ++e) mask |= static_cast<u32>(chosen(F::col(at, e), row.x[e])) << e;
  const int own = ptx::count_ones(mask), until = sum_of_lanes_until(at.lane, own);
  if (at.lane == 31) list.warp_sums()[at.block_warp()] = until;
  block.sync();
  const int size = static_cast<int>(*list.size()), sum = at.lane < kWarps ? list.warp_sums()[at.lane] : 0;
  const int sums = sum_of_lanes_until(at.lane, sum);  // in lane n of the warps up to number n
  block.sync();
  if (block.thread() == 31) *list.size() = static_cast<u32>(size + sums);
  int place = size + ptx::shuffle(sums - sum, at.block_warp()) + until - own;
  TW_NO_UNROLL
  for (; mask != 0; mask &= mask - 1, ++place) {
    if (place < N) list[place] = value_of(F::col(at, 0) + ptx::lowest_one(mask));
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

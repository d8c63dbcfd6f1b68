#pragma once

#include "tilewave/tile/cuda/fragment.tile.hpp"

// Cumulative sums: by shuffles over the lanes that share a row or a column, through shared memory over warps.

namespace tw::cuda {

/// The sum of the values of the lanes before this one, and of all lanes. Lane number `rank` of `Lanes` lanes, which are `Stride` apart,
/// passes `value`.
template <class T>
struct LaneSums {
  T before, all;
};
template <int Lanes, int Stride, bool kForward, class T>
TW_INLINE LaneSums<T> sums_of_lanes(int lane, int rank, T value) {
  T until = value;
  const int sign = kForward ? -Stride : Stride;
  const int from_start = kForward ? rank : Lanes - 1 - rank;
  TW_UNROLL
  for (int distance = 1; distance < Lanes; distance *= 2) {
    const T other = ptx::shuffle(until, lane + sign * distance);
    if (from_start >= distance) until = until + other;
  }
  const T previous = ptx::shuffle(until, lane + sign);
  const int last = lane + (kForward ? Lanes - 1 - rank : -rank) * Stride;
  return {from_start == 0 ? T{} : previous, ptx::shuffle(until, last)};
}

/// Replaces each row by its cumulative sums.
template <bool kForward, class F>
TW_INLINE void row_cumsum(const Position& at, F& tile) {
  static_assert(F::row_threads <= 32 && !splits_rows<F>, "row_cumsum() is for tiles whose rows lie in one warpgroup, of Rows in one warp");
  using T = typename F::Element;
  constexpr int lanes = F::row_threads, width = F::width, pieces = F::pieces;
  TW_UNROLL
  for (int r = 0; r < F::row_count; ++r) {
    T carry{};
    TW_UNROLL
    for (int n = 0; n < pieces; ++n) {
      const int piece = kForward ? n : pieces - 1 - n;
      T sum{};
      TW_UNROLL
      for (int k = 0; k < width; ++k) sum = sum + tile.x[F::in_row(r, piece * width + k)];
      const LaneSums<T> sums = sums_of_lanes<lanes, 1, kForward>(at.lane, at.lane % lanes, sum);
      T until = carry + sums.before;
      TW_UNROLL
      for (int k = 0; k < width; ++k) {
        T& x = tile.x[F::in_row(r, piece * width + (kForward ? k : width - 1 - k))];
        until = until + x;
        x = until;
      }
      carry = carry + sums.all;
    }
  }
}

/// Replaces each column by its cumulative sums. sync() waits for all threads.
template <bool kForward, class T, int R, int C, class Sync>
TW_INLINE void column_cumsum(const Position& at, Fragment<T, R, C>& fragment, const Scratch<T, R, C>& scratch, Sync sync) {
  using F = Fragment<T, R, C>;
  constexpr int warps = R / 16;
  T* const partial = reinterpret_cast<T*>(shared_memory() + scratch.offset);
  const int rank = at.lane / 4;
  TW_UNROLL
  for (int c = 0; c < F::column_count; ++c) {
    // The element in the upper 8 of the warp's 16 rows, and the one in the lower 8.
    const int upper = F::in_row(0, c), lower = F::in_row(1, c);
    T& first = fragment.x[kForward ? upper : lower];
    T& second = fragment.x[kForward ? lower : upper];
    const LaneSums<T> firsts = sums_of_lanes<8, 4, kForward>(at.lane, rank, first);
    const LaneSums<T> seconds = sums_of_lanes<8, 4, kForward>(at.lane, rank, second);
    first = firsts.before + first;
    second = firsts.all + (seconds.before + second);
    if (rank == 0) partial[at.block_warp() * C + F::col(at, upper)] = firsts.all + seconds.all;
  }
  sync();
  TW_UNROLL
  for (int c = 0; c < F::column_count; ++c) {
    const int upper = F::in_row(0, c);
    T before{};
    TW_NO_UNROLL
    for (int warp = kForward ? 0 : warps - 1; warp != at.block_warp(); warp += kForward ? 1 : -1)
      before = before + partial[warp * C + F::col(at, upper)];
    fragment.x[upper] = before + fragment.x[upper];
    fragment.x[F::in_row(1, c)] = before + fragment.x[F::in_row(1, c)];
  }
  sync();  // the next use of the scratch space writes to the same memory
}

/// to[n] = the sum of from[0] to from[n], or from from[n] to the end. Called by one warp.
template <bool kForward, class V, class To>
TW_INLINE void vector_cumsum(int lane, const V& from, const To& to) {
  using T = typename To::Element;
  constexpr int share = (To::size + 31) / 32;
  T x[share];
  T sum{};
  TW_UNROLL
  for (int k = 0; k < share; ++k) {
    const int n = lane * share + k;
    x[k] = n < To::size ? from[kForward ? n : To::size - 1 - n] : T{};
    sum = sum + x[k];
  }
  T until = sums_of_lanes<32, 1, true>(lane, lane, sum).before;
  TW_UNROLL
  for (int k = 0; k < share; ++k) {
    const int n = lane * share + k;
    until = until + x[k];
    if (n < To::size) to[kForward ? n : To::size - 1 - n] = until;
  }
}

}  // namespace tw::cuda

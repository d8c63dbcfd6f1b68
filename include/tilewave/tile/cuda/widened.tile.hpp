#pragma once

#include "tilewave/tile/cuda/code_pairs.tile.hpp"
#include "tilewave/tile/cuda/memory.tile.hpp"

// How Widened tiles become f16.

namespace tw::cuda {

/// How `Threads` threads share N rows to be widened: four neighbours have a row, and a thread's rows are `step` apart. A value for each of
/// its rows.
template <int N, int Threads, class Value>
struct QuadRows {
  static constexpr int lanes = 4, step = Threads / lanes, count = (N + step - 1) / step;
  int first;
  Value x[count];

  /// Four threads load pieces 0 to 3 or 4 to 7 of a line, and store the even or the odd ones. So the two rows that eight threads have are
  /// numbers that differ in bits 0 and 2: then neither loads nor stores meet in a bank.
  ///
  /// The number is opaque: otherwise the compiler keeps all addresses that depend on it from one block of keys to the next.
  TW_INLINE explicit QuadRows(int thread) : first(ptx::opaque(thread / 32 * 8 + (thread / 8 % 4 ^ thread / 4 % 2 * 5))) {}
  TW_INLINE int row(int n) const { return first + n * step; }
  TW_INLINE bool exists(int n) const { return N % step == 0 || row(n) < N; }
};

/// tile(r, c) = code(r, c) * factor(x, c), where x is the value of row r, rounded once; zeros from row `end` on. `thread`: the number of
/// the caller among the `Threads` that widen the tile.
template <class Codes, int R, int C, int Threads, class Value, class Fn>
TW_INLINE void widen(int thread, Widened<Codes, R, C>& tile, const QuadRows<R, Threads, Value>& rows, int end, Fn factor) {
  using Rows = QuadRows<R, Threads, Value>;
  using S = typename Widened<Codes, R, C>::Codes;
  using F = Shared<f16, R, C, Contract::columns>;
  constexpr int pieces = C / (16 * Rows::lanes);
  const int lane = thread % Rows::lanes;
  const u32 from = ptx::address(tile.codes().bytes), to = ptx::address(tile.bytes);
  // Row by row: beside accumulators, there are registers for no more.
  TW_UNROLL
  for (int n = 0; n < Rows::count; ++n) {
    const int row = rows.row(n);
    u32 codes[pieces][4] = {};
    TW_UNROLL
    for (int k = 0; k < pieces; ++k) {
      if (row < end && rows.exists(n))
        ptx::load_shared_16(from + static_cast<u32>(S::offset(row, (k * Rows::lanes + lane) * 16)), codes[k]);
    }
    ptx::warp_sync();
    TW_UNROLL
    for (int k = 0; k < pieces; ++k) {
      const u32 by = row < end ? twice(factor(rows.x[n], k * 16 * Rows::lanes)) : 0;
      TW_UNROLL
      for (int half = 0; half < 2; ++half) {
        u32 pairs[4];
        TW_UNROLL
        for (int i = 0; i < 4; ++i) {
          const u32 two = codes[k][half * 2 + i / 2] >> i % 2 * 16;
          pairs[i] = multiply_add_pairs<f16>(ptx::widen_pair<Codes>(static_cast<u16>(two)), by, kMinusZeros);
        }
        const int col = (k * Rows::lanes + lane) * 16 + half * 8;
        if (rows.exists(n)) ptx::store_shared_16(to + static_cast<u32>(F::offset(row, col)), pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
}

}  // namespace tw::cuda

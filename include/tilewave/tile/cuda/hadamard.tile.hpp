#pragma once

#include "tilewave/tile/cuda/threads.tile.hpp"

namespace tw::cuda {

/// Replaces every run of kSpan columns by its Walsh-Hadamard transform: in a thread's registers, and by shuffles between a row's lanes.
template <int kSpan, int R, int C, int Warps, int Width>
TW_INLINE void row_hadamard(const Position& at, Rows<float, R, C, Warps, Width>& tile) {
  using F = Rows<float, R, C, Warps, Width>;
  constexpr int width = F::width, warp_columns = width * F::row_lanes;
  static_assert(is_run<kSpan, C>, TW_RUN);
  static_assert((width & (width - 1)) == 0, "row_hadamard() is for Rows whose pieces have a power of two of columns");
  static_assert(kSpan <= warp_columns || F::row_warps == 1, "row_hadamard() is for runs of columns that lie in one warp");
  float* const x = tile.x;
  // The two numbers of a pair are `apart` registers apart.
  const auto in_registers = [x](int apart) {
    TW_UNROLL
    for (int n = 0; n < F::size; ++n) {
      if ((n & apart) != 0) continue;
      const float low = x[n], high = x[n + apart];
      x[n] = low + high;
      x[n + apart] = low - high;
    }
  };
  TW_UNROLL
  for (int step = 1; step < min(kSpan, width); step *= 2) in_registers(step);
  TW_UNROLL
  for (int step = width; step < min(kSpan, warp_columns); step *= 2) {
    const int distance = step / width;
    const float sign = (at.lane & distance) != 0 ? -1.0f : 1.0f;
    TW_UNROLL
    for (int n = 0; n < F::size; ++n) x[n] = ptx::shuffle_xor(x[n], distance) + sign * x[n];
  }
  TW_UNROLL
  for (int step = warp_columns; step < kSpan; step *= 2) in_registers(step / warp_columns * width);
}

}  // namespace tw::cuda

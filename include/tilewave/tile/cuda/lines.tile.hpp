#pragma once

#include "tilewave/tile/cuda/memory.tile.hpp"

namespace tw::cuda {

/// The addresses that a lane passes to ldmatrix for 16 rows or columns of an operand and 32 bytes of the contracted dimension. The swizzle
/// puts any eight lines of 16 bytes in different banks.
/// `kWidth`: rows or columns of each warp.
template <class S, bool kLeft, int kWidth>
struct Lines {
  static constexpr bool transposed = S::contract == Contract::rows;
  /// Whether blocks of 16 of a warp's columns never cross panels in the middle of a block: then only the warp's first address depends on
  /// the thread.
  static constexpr bool fixed = !transposed || kWidth == 16 || kWidth == 32 || kWidth % 64 == 0;
  u32 base;
  int first_byte = 0;
  /// `tile`: its address, a multiple of kPanelAlignment. `first`: the warp's first row, or column where rows are contracted.
  TW_INLINE Lines(u32 tile, int lane, int first) {
    // ldmatrix takes the addresses of matrix i from lanes 8 i to 8 i + 7. The left operand's matrices go down its rows, then along the
    // sum; the right one's along the sum, then down.
    const int in_matrix = lane % 8, second = lane / 8 % 2, third = lane / 16;
    const int down = kLeft ? second : third, along = kLeft ? third : second;
    const int line = transposed ? in_matrix + along * 8 : in_matrix + down * 8 + first;
    base = tile + static_cast<u32>(line * kPanelBytes + ((transposed ? down : along) * 16 ^ in_matrix * 16));
    if constexpr (transposed && fixed) base = at(first * 2, 0);
    first_byte = first * 2;
  }
  /// The address `along` bytes further along the line and `down` lines further down.
  TW_INLINE u32 at(int along, int down) const {
    return (base ^ static_cast<u32>(along % kPanelBytes)) + static_cast<u32>(along / kPanelBytes * S::panel_bytes + down * kPanelBytes);
  }
  /// The address for step `k` of the contracted dimension and the warp's block `n` of 16 rows or columns.
  TW_INLINE u32 address(int k, int n) const {
    if constexpr (!transposed)
      return at(k * 32, n * 16);
    else
      return at((fixed ? 0 : first_byte) + n * 32, k * 16);
  }
  TW_INLINE void load(int k, int n, u32* to) const {
    if constexpr (transposed)
      ptx::load_matrix_x4_transposed(address(k, n), to);
    else
      ptx::load_matrix_x4(address(k, n), to);
  }
  /// The same for only eight rows or columns.
  TW_INLINE void load_half(int k, int n, u32* to) const {
    if constexpr (transposed)
      ptx::load_matrix_x2_transposed(address(k, n), to);
    else
      ptx::load_matrix_x2(address(k, n), to);
  }
};

}  // namespace tw::cuda

#pragma once

#include "tilewave/tile/cuda/divided_digits.tile.hpp"

// The right operand of products with one column. As a DividedOperand only four lanes of a warp would have elements of it, so that loading,
// scaling and rounding it would take eight times as many instructions.

namespace tw::cuda {

/// One row of C columns: each warp holds its own columns, a lane 8 neighbours of them.
template <class T, int C, int Warps>
struct DividedRow {
  static constexpr int cols = C;
  static constexpr int warps = Warps;
  static constexpr int width = 8;
  static constexpr int share = C / Warps;  ///< columns of a warp
  static_assert(sizeof(T) == 2 && C % (32 * Warps) == 0 && share <= 256, TW_DIVIDED_ROW);
  using Element = T;
  u32 x[4];

  TW_INLINE static bool has(const Position& p) { return share == 256 || p.lane * width < share; }
  TW_INLINE static constexpr int col(const Position& p) { return p.block_warp() * share + p.lane * width; }
};

/// Row `row` of a tensor, whose rows are whole pieces, from column col0 on; zeros outside the tensor.
template <class T, int C, int Warps, class G>
TW_INLINE void load_divided(const Position& at, DividedRow<T, C, Warps>& to, const G& from, int row, int col0, int i, int j) {
  const int col = col0 + to.col(at);
  const T* const first = from.template piece_at<const T>(row, col, i, j);
  const bool inside = to.has(at) && from.inside(row, col);
  TW_UNROLL
  for (u32& word : to.x) word = 0;
  if constexpr (is_polled<G>) {
    ptx::load_relaxed_16_if(inside, first, to.x);
    from.see(to.x);
  } else {
    ptx::load_16_if(inside, first, to.x);
  }
}

/// row(c) *= factors(c), rounded to T.
template <class T, int C, int Warps>
TW_INLINE void scale_divided(DividedRow<T, C, Warps>& row, const DividedRow<T, C, Warps>& factors) {
  TW_UNROLL
  for (int k = 0; k < 4; ++k) row.x[k] = multiply_add_pairs<T>(row.x[k], factors.x[k], 0x80008000u);  // -0, which changes no product
}
/// squares(n) += the sum over the warp's columns of row(c)^2, for all n alike.
template <class T, int N, int C, int Warps>
TW_INLINE void add_squares_divided(DividedSquares<N, Warps>& squares, const DividedRow<T, C, Warps>& row) {
  float sum = 0;
  TW_UNROLL
  for (int k = 0; k < 8; ++k) {
    const float x = half_of<T>(row.x[k / 2], k % 2);
    sum += x * x;
  }
  TW_UNROLL
  for (int lanes = 4; lanes < 32; lanes *= 2) sum += ptx::shuffle_xor(sum, lanes);
  TW_UNROLL
  for (float& x : squares.x) x += sum;
}

/// Makes digits of the row's elements, as of an operand's.
template <class T, int N, int C, int Warps>
TW_INLINE void make_digits(const Position&, DividedRow<T, C, Warps>& row, DigitScales<N, Warps>& scales) {
  u32 largest = largest_of<T>(row.x);
  TW_UNROLL
  for (int lanes = 1; lanes < 32; lanes *= 2) largest = ptx::max_of_pairs(largest, ptx::shuffle_xor(largest, lanes));
  const float peak = half_of<T>(max(largest & 0xffffu, largest >> 16), 0);
  words_to_digits<T>(row.x, fixed_point_power(peak));
  TW_UNROLL
  for (auto& rows : scales.x) rows[0] = rows[1] = fixed_point_scale(peak);
}

/// operand(n, c) = row(c) for all n.
template <class T, int N, int C, int Warps>
TW_INLINE void spread_divided(const Position& at, DividedOperand<T, N, C, Warps>& operand, const DividedRow<T, C, Warps>& row) {
  TW_UNROLL
  for (int n = 0; n < row.share / operand.run; ++n) {
    TW_UNROLL
    for (int k = 0; k < 4; ++k) {
      const u32 word = ptx::shuffle(row.x[k], n * 4 + at.lane % 4);
      TW_UNROLL
      for (int r = 0; r < N / 8; ++r) operand.x[n][r][k] = word;
    }
  }
}

}  // namespace tw::cuda

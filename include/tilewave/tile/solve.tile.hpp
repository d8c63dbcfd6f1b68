#pragma once

#include "tilewave/tile/language.tile.hpp"

// Small solves and transpositions over Buffers, written once for all targets.

namespace tw {

/// to(col, row) = from(row, col), for Fragments, through `buffer`, which has the shape of `to`. The buffer may be stored to again after a
/// barrier.
TW_INLINE void transpose(auto& block, auto& from, auto& to, const auto& buffer) {
  block.store_transposed(from, buffer);
  block.sync();
  block.load(to, buffer);
}

namespace detail {
/// Merges neighbouring inverses of `size` rows each until there is one. A thread computes two rows and four columns of a product at a time.
template <int size>
TW_INLINE void merge_inverses(auto& block, const auto& matrix) {
  constexpr int n = remove_const_reference<decltype(matrix)>::rows;
  if constexpr (size < n) {
    const int work = n / (2 * size) * (size / 2) * (size / 4);
    const auto product = [&](int w, auto left, auto right, auto result) {
      const int columns = size / 4, in_pair = w % (size / 2 * columns);
      const int first = w / (size / 2 * columns) * 2 * size, row = in_pair / columns * 2, col = in_pair % columns;
      decltype(matrix.at(0, 0) + 0.0f) sum[2][4] = {};
      TW_NO_UNROLL
      for (int k0 = 0; k0 < size; k0 += 8) {
        TW_UNROLL
        for (int k = k0; k < k0 + 8; ++k) {
          TW_UNROLL
          for (int c = 0; c < 4; ++c) {
            const auto r = right(first, k, col + c * columns);
            sum[0][c] += left(first, row, k) * r;
            sum[1][c] += left(first, row + 1, k) * r;
          }
        }
      }
      TW_UNROLL
      for (int c = 0; c < 4; ++c) {
        result(first, row, col + c * columns, sum[0][c]);
        result(first, row + 1, col + c * columns, sum[1][c]);
      }
    };
    // L inv(B1), to the upper right. inv(B1) is lower triangular; the memory above its diagonal holds other values.
    block.update(matrix, work, [&](int w) {
      product(
          w, [&](int first, int i, int k) { return matrix.at(first + size + i, first + k) + 0.0f; },
          [&](int first, int k, int j) { return k < j ? 0.0f : matrix.at(first + k, first + j) + 0.0f; },
          [&](int first, int i, int j, auto x) { matrix.at(first + i, first + size + j) = x; });
    });
    block.update(matrix, work, [&](int w) {
      product(
          w, [&](int first, int i, int k) { return k > i ? 0.0f : matrix.at(first + size + i, first + size + k) + 0.0f; },
          [&](int first, int k, int j) { return matrix.at(first + k, first + size + j) + 0.0f; },
          [&](int first, int i, int j, auto x) { matrix.at(first + size + i, first + j) = -x; });
    });
    merge_inverses<2 * size>(block, matrix);
  }
}
}  // namespace detail

/// Inverts a square f32 Buffer of 2^n x 16 rows in place. Only the part below the diagonal is read: the matrix has ones on the diagonal and
/// zeros above it. All threads call it, after a barrier that makes the elements visible; all see the result.
///
/// Blocks of 16 on the diagonal are inverted by substitution, one thread for each column. Then neighbouring blocks are merged, which
/// doubles their size: the inverse of {B1, 0; L, B2} has -inv(B2) L inv(B1) below the diagonal. Intermediate results are stored above the
/// diagonal.
TW_INLINE void invert_unit_lower(auto& block, const auto& matrix) {
  using Matrix = remove_const_reference<decltype(matrix)>;
  constexpr int n = Matrix::rows, base = 16;
  static_assert(is_same<typename Matrix::Element, float> && Matrix::cols == n && n % base == 0 && (n / base & (n / base - 1)) == 0,
                "invert_unit_lower() is for square f32 Buffers of 16, 32, 64, ... rows");
  // Column j of a block's inverse goes into its row j, above the diagonal, because other threads still read the part below.
  block.update(matrix, n, [&](int j) {
    const int first = j / base * base, column = j - first;
    decltype(matrix.at(0, 0) + 0.0f) x[base];
    TW_UNROLL
    for (int i = 0; i < base; ++i) {
      x[i] = i == column ? 1.0f : 0.0f;
      TW_UNROLL
      for (int k = 0; k < i; ++k) x[i] -= matrix.at(first + i, first + k) * x[k];
    }
    TW_UNROLL
    for (int i = 0; i < base; ++i)
      if (i > column) matrix.at(j, first + i) = x[i];
  });
  block.update(matrix, n, [&](int j) {
    const int first = j / base * base, column = j - first;
    TW_UNROLL
    for (int i = 0; i < base; ++i) {
      if (i > column) matrix.at(first + i, j) = matrix.at(j, first + i);
      if (i == column) matrix.at(j, j) = 1.0f;
    }
  });
  detail::merge_inverses<base>(block, matrix);
  block.update(matrix, n * n, [&](int e) {
    if (e % n > e / n) matrix.at(e / n, e % n) = 0.0f;
  });
}

}  // namespace tw

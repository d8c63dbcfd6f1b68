#pragma once

#include "tilewave/tile/cuda/fragment.tile.hpp"

// Stores rows of a tile in registers to any rows of a tensor, in pieces of 16 bytes where the tensor allows it.

namespace tw::cuda {

/// How elements are stored: `count` words of neighbours at once, or one element.
struct Replace {
  template <class T, int count>
  static TW_INLINE void words(T* to, const u32* w) {
    Words<T, count * 4 / static_cast<int>(sizeof(T))> all;
    TW_UNROLL
    for (int n = 0; n < count; ++n) all.w[n] = w[n];
    all.store(to);
  }
  template <class T>
  static TW_INLINE void element(T* to, T x) {
    *to = x;
  }
};
struct Add {
  template <class T, int count>
  static TW_INLINE void words(T* to, const u32* w) {
    ptx::add_words<T, count>(to, w);
  }
  template <class T>
  static TW_INLINE void element(T* to, T x) {
    if constexpr (is_same<T, float>)
      ptx::atomic_add(to, x);
    else
      ptx::add_one(to, bit_cast<u16>(x));
  }
};

/// Transposes a 4 x 4 matrix of words. Row l is in w[0] to w[3] of the quad's lane l. Two exchanges: with the neighbouring lane, then with
/// the other pair of lanes.
TW_INLINE void transpose_quad(int lane, u32* w) {
  const bool odd = lane % 2 != 0, upper = lane % 4 >= 2;
  TW_UNROLL
  for (int n = 0; n < 4; n += 2) {
    const u32 received = ptx::shuffle_xor(odd ? w[n] : w[n + 1], 1);
    (odd ? w[n] : w[n + 1]) = received;
  }
  TW_UNROLL
  for (int n = 0; n < 2; ++n) {
    const u32 received = ptx::shuffle_xor(upper ? w[n] : w[n + 2], 2);
    (upper ? w[n] : w[n + 2]) = received;
  }
}

/// Lets two neighbouring quads store 32 columns of two rows of f32 in lines of 128 bytes. Before, each quad holds one row: `x` has 2 of
/// every 8 columns of it. Afterwards each lane holds 4 neighbours of the lower quad's row in w[0], and 4 of the upper quad's in w[1], both
/// at column 16 q + 8 (l % 2) + 4 (l / 2), where q is 0 in the lower quad and 1 in the upper one, and l is the lane's number in its quad.
TW_INLINE void exchange_pieces(int lane, const u32 (&x)[8], u32 (&w)[2][4]) {
  const bool odd = lane % 2 != 0, upper = lane / 4 % 2 != 0;
  TW_UNROLL
  for (int half = 0; half < 2; ++half) {
    TW_UNROLL
    for (int n = 0; n < 2; ++n) {
      const u32 left = x[4 * half + n], right = x[4 * half + 2 + n], received = ptx::shuffle_xor(odd ? left : right, 1);
      w[half][n] = odd ? received : left;
      w[half][n + 2] = odd ? right : received;
    }
  }
  TW_UNROLL
  for (int n = 0; n < 4; ++n) {
    const u32 received = ptx::shuffle_xor(upper ? w[0][n] : w[1][n], 4);
    (upper ? w[0][n] : w[1][n]) = received;
  }
}

/// Whether F is a Fragment and a warp holds a multiple of `columns` columns of it.
template <class F>
constexpr bool has_pieces(int columns) {
  if constexpr (F::kind == TileKind::fragment)
    return F::warp_cols % columns == 0;
  else
    return false;
}

/// Stores row r of the tile to row row_of(r) of the tensor, from column `col0` on. Elements outside the tensor are dropped.
template <class How, class F, class G, class RowOf>
TW_INLINE void scatter_rows(const Position& at, const F& from, const G& to, RowOf row_of, int col0, int i, int j) {
  using T = typename G::Element;
  constexpr int piece = 16 / static_cast<int>(sizeof(T));
  static_assert(is_same<T, float> || is_same<T, bf16> || is_same<T, f16>, "tiles are scattered to f32, f16 and bf16 tensors");
  const auto inside = [&](int row) { return static_cast<u32>(row) < static_cast<u32>(to.rows); };
  if constexpr (is_same<How, Add> && sizeof(T) == 4 && has_pieces<F>(32)) {
    if (to.template whole_pieces<T, piece>() && col0 % piece == 0) {
      // Atomic additions to whole lines of 128 bytes are 1.6 times as fast as to 32 bytes of each row.
      const int upper = at.lane / 4 % 2, col = col0 + F::warp_col(at) + 16 * upper + at.lane % 2 * 8 + at.lane % 4 / 2 * 4;
      TW_UNROLL
      for (int r = 0; r < F::row_count; ++r) {
        const int lower_row = F::row(at, F::in_row(r, 0)) - upper, row[2] = {row_of(lower_row), row_of(lower_row + 1)};
        T* first[2];
        TW_UNROLL
        for (int n = 0; n < 2; ++n) first[n] = to.template piece_at<T>(inside(row[n]) ? row[n] : 0, col, i, j);
        TW_UNROLL
        for (int c = 0; c < F::warp_cols; c += 32) {
          u32 x[8], w[2][4];
          TW_UNROLL
          for (int n = 0; n < 8; ++n) x[n] = bit_cast<u32>(tw::to<float>(from.x[F::in_row(r, c / 4 + n)]));
          exchange_pieces(at.lane, x, w);
          TW_UNROLL
          for (int n = 0; n < 2; ++n) {
            if (to.inside(row[n], col + c)) How::template words<T, 4>(first[n] + c, w[n]);
          }
        }
      }
      return;
    }
  } else if constexpr (has_pieces<F>(2 * piece)) {
    if (to.template whole_pieces<T, piece>() && col0 % piece == 0) {
      // The lanes of a quad hold 2 of every 8 columns of rows r and r + 8. They exchange elements so that each lane stores 16 bytes of one
      // row: 4 of 8 columns of f32, 8 of 16 columns of 16-bit types.
      constexpr int columns = 2 * piece;
      const int half = at.lane % 2, quarter = at.lane % 4 / 2;
      TW_UNROLL
      for (int tile = 0; tile < F::row_count / 2; ++tile) {
        const int row = row_of(F::row(at, F::in_row(2 * tile, 0)) + 8 * half);
        const int col = col0 + F::warp_col(at) + quarter * piece;
        T* const first = to.template piece_at<T>(inside(row) ? row : 0, col, i, j);
        TW_UNROLL
        for (int c = 0; c < F::warp_cols; c += columns) {
          const auto* const x = from.x + F::in_row(2 * tile, c / 4);
          u32 w[4];
          if constexpr (sizeof(T) == 4) {
            u32 x32[4];
            TW_UNROLL
            for (int n = 0; n < 4; ++n) x32[n] = bit_cast<u32>(tw::to<float>(x[n]));
            TW_UNROLL
            for (int n = 0; n < 2; ++n) {
              const u32 received = ptx::shuffle_xor(half ? x32[n] : x32[n + 2], 1);
              w[n] = half ? received : x32[n];
              w[n + 2] = half ? x32[n + 2] : received;
            }
          } else {
            TW_UNROLL
            for (int n = 0; n < 4; ++n) w[n] = ptx::pack<T>(static_cast<float>(x[2 * n]), static_cast<float>(x[2 * n + 1]));
            transpose_quad(at.lane, w);
          }
          if (to.inside(row, col + c)) How::template words<T, 4>(first + c, w);
        }
      }
      return;
    }
  } else if constexpr (F::kind == TileKind::rows && F::width * sizeof(T) % 4 == 0) {
    if (to.template whole_pieces<T, F::width>() && col0 % F::width == 0) {
      using Piece = Words<T, F::width>;
      constexpr int at_once = min(Piece::count, 4);
      TW_UNROLL
      for (int r = 0; r < F::row_count; ++r) {
        const int row = row_of(F::row(at, F::in_row(r, 0))), col = col0 + F::col(at, 0);
        T* const first = to.template piece_at<T>(inside(row) ? row : 0, col, i, j);
        TW_UNROLL
        for (int n = 0; n < F::pieces; ++n) {
          Piece words;
          words.pack(from.x + F::in_row(r, n * F::width));
          if (!to.inside(row, col + n * F::piece_step)) continue;
          TW_UNROLL
          for (int k = 0; k < Piece::count; k += at_once)
            How::template words<T, at_once>(first + n * F::piece_step + k * 4 / static_cast<int>(sizeof(T)), words.w + k);
        }
      }
      return;
    }
  }
  TW_UNROLL
  for (int r = 0; r < F::row_count; ++r) {
    const int row = row_of(F::row(at, F::in_row(r, 0)));
    if (!inside(row)) continue;
    TW_UNROLL
    for (int n = 0; n < F::size / F::row_count; ++n) {
      const int e = F::in_row(r, n), col = col0 + F::col(at, e);
      if (static_cast<u32>(col) < static_cast<u32>(to.cols)) How::element(to.template at<T>(row, col, i, j), tw::to<T>(from.x[e]));
    }
  }
}

}  // namespace tw::cuda

#pragma once

#include "tilewave/tile/cuda/threads.tile.hpp"

// Operations in which a block's threads exchange elements of a tile: column reductions, transpositions, pairs of columns.

namespace tw::cuda {

/// vector[col] = op(op(a, b), c)... over all of the block's rows. `scratch` is an offset in shared memory.
template <int kWarps, class T, class F, class Op>
TW_INLINE void column_reduce(const Threads<kWarps>& block, const F& fragment, ColumnVector<T, F>& vector, int scratch, Op op) {
  const Position& at = block.at;
  T* const partial = reinterpret_cast<T*>(shared_memory() + scratch);
  TW_UNROLL
  for (int i = 0; i < F::column_count; ++i) {
    const int e = F::in_row(0, i);
    T value = op(fragment.x[e], fragment.x[e + 2]);
    TW_UNROLL
    for (int r = 2; r < F::row_count; ++r) value = op(value, fragment.x[F::in_row(r, i)]);
    TW_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) value = op(value, ptx::shuffle_xor(value, mask));
    if (at.lane < 4) partial[F::warp_row(at) / F::warp_rows * F::cols + vector.col(at, i)] = value;
  }
  block.sync();
  TW_UNROLL
  for (int i = 0; i < F::column_count; ++i) {
    T value = partial[vector.col(at, i)];
    for (int warp = 1; warp < F::row_warps; ++warp) value = op(value, partial[warp * F::cols + vector.col(at, i)]);
    vector.x[i] = value;
  }
  block.sync();
}

/// vectors[t][col] = f(f(a, b), c)... over the elements of that column of tiles[t], in an order that is the same in every run. f must be
/// associative and commutative.
template <int kWarps, int kCount, int R, int C, int Warps, int Width, class Fn>
TW_INLINE void fold_columns([[maybe_unused]] const Threads<kWarps>& block, const Rows<float, R, C, Warps, Width>* tiles,
                            ColumnVector<float, Rows<float, R, C, Warps, Width>>* vectors, Fn f) {
  using F = Rows<float, R, C, Warps, Width>;
  constexpr int warps = Warps / F::row_warps;  // the warps that hold the same column
  constexpr int size = F::column_count;
  TW_UNROLL
  for (int e = 0; e < kCount * size; ++e) {
    const int t = e / size, n = e % size;
    float& x = vectors[t].x[n] = tiles[t].x[n];
    TW_UNROLL
    for (int r = 1; r < F::row_count; ++r) x = f(x, tiles[t].x[F::in_row(r, n)]);
    TW_UNROLL
    for (int mask = F::row_lanes; mask < 32; mask *= 2) x = f(x, ptx::shuffle_xor(x, mask));
  }
  if constexpr (warps > 1) {
#if TW_ON_GPU
    // Pieces of up to 16 bytes; neighbouring lanes write neighbouring pieces.
    const Position& at = block.at;
    constexpr int piece = F::width % 4 == 0 ? 4 : F::width;
    __shared__ Piece<float, piece> partial[warps][kCount][C / piece];
    const int warp = at.block_warp() / F::row_warps;
    TW_UNROLL
    for (int e = 0; e < kCount * size; e += piece) {
      const int t = e / size, n = e % size;
      Piece<float, piece> mine;
      TW_UNROLL
      for (int k = 0; k < piece; ++k) mine.x[k] = vectors[t].x[n + k];
      partial[warp][t][F::col(at, n) / piece] = mine;
    }
    block.sync();
    TW_UNROLL
    for (int e = 0; e < kCount * size; e += piece) {
      const int t = e / size, n = e % size;
      TW_UNROLL
      for (int w = 0; w < warps; ++w) {
        const Piece<float, piece> other = partial[w][t][F::col(at, n) / piece];
        TW_UNROLL
        for (int k = 0; k < piece; ++k) vectors[t].x[n + k] = w == 0 ? other.x[k] : f(vectors[t].x[n + k], other.x[k]);
      }
    }
    block.sync();  // the next fold writes to the same memory
#endif
  }
}

/// to(n, col) = the fold of column `col` of tiles[n]: several of the above with one exchange. The rows of `to` from kCount on become 0.
template <int kWarps, int kCount, int R, int C, int Warps, int Width, class To, class Fn>
TW_INLINE void column_fold([[maybe_unused]] const Threads<kWarps>& block,
                           [[maybe_unused]] const Rows<float, R, C, Warps, Width> (&tiles)[kCount], [[maybe_unused]] To& to,
                           [[maybe_unused]] Fn f) {
  static_assert(To::kind == TileKind::rows && To::cols == C && To::rows >= kCount, "column_fold() of several tiles makes a row of each");
#if TW_ON_GPU
  using F = Rows<float, R, C, Warps, Width>;
  constexpr int warps = Warps / F::row_warps, at_once = min(kCount, 4);
  constexpr int piece = F::width % 4 == 0 ? 4 : F::width;
  __shared__ Piece<float, piece> partial[warps][at_once][C / piece];
  const Position& at = block.at;
  TW_UNROLL
  for (int first = 0; first < kCount; first += at_once) {
    TW_UNROLL
    for (int t = first; t < min(first + at_once, kCount); ++t) {
      TW_UNROLL
      for (int n = 0; n < F::share; n += piece) {
        Piece<float, piece> mine;
        TW_UNROLL
        for (int k = 0; k < piece; ++k) {
          float& x = mine.x[k] = tiles[t].x[n + k];
          TW_UNROLL
          for (int r = 1; r < F::row_count; ++r) x = f(x, tiles[t].x[F::in_row(r, n + k)]);
          TW_UNROLL
          for (int mask = F::row_lanes; mask < 32; mask *= 2) x = f(x, ptx::shuffle_xor(x, mask));
        }
        partial[at.block_warp() / F::row_warps][t - first][F::col(at, n) / piece] = mine;
      }
    }
    block.sync();
    TW_UNROLL
    for (int e = 0; e < To::size; ++e) {
      const int row = To::row(at, e), col = To::col(at, e);
      if (first == 0) to.x[e] = 0.0f;
      if (row < first || row >= min(first + at_once, kCount)) continue;
      TW_UNROLL
      for (int w = 0; w < warps; ++w) {
        const float other = partial[w][row - first][col / piece].x[col % piece];
        to.x[e] = w == 0 ? other : f(to.x[e], other);
      }
    }
    block.sync();  // the next fold writes to the same memory
  }
#endif
}

/// to(col, row) = from(row, col), through shared memory. Rows of both tiles must be multiples of 128 bytes.
template <int kWarps, class T, int R, int C, int Warps, int Width>
TW_INLINE void transpose([[maybe_unused]] const Threads<kWarps>& block, [[maybe_unused]] const Rows<T, R, C, Warps, Width>& from,
                         [[maybe_unused]] Rows<T, C, R, Warps, Width>& to) {
#if TW_ON_GPU
  const Position& at = block.at;
  using From = Rows<T, R, C, Warps, Width>;
  using To = Rows<T, C, R, Warps, Width>;
  constexpr int pieces = R / Width;  // pieces in a row of `to`
  constexpr int line_pieces = 128 / (Width * static_cast<int>(sizeof(T)));
  static_assert(From::width == Width && pieces % line_pieces == 0, "a transposition needs Rows of stated widths and whole lines");
  // Shared memory holds the rows of `to`. Lanes that write the same element number of a piece write to every Width-th row. Pieces are
  // swizzled within lines so that these rows use different banks.
  __shared__ Piece<T, Width> shared[C * pieces];
  const auto place = [](u32 row, u32 piece) { return row * pieces + (piece ^ row / Width % line_pieces); };
  TW_UNROLL
  for (int e = 0; e < From::size; e += Width) {
    const u32 row = static_cast<u32>(From::col(at, e)), col = static_cast<u32>(From::row(at, e));
    Piece<T, Width>* const first = shared + place(row, col / Width);
    TW_UNROLL
    for (int k = 0; k < Width; ++k) first[k * pieces].x[col % Width] = from.x[e + k];
  }
  block.sync();
  TW_UNROLL
  for (int e = 0; e < To::size; e += Width) {
    const Piece<T, Width> piece = shared[place(static_cast<u32>(To::row(at, e)), static_cast<u32>(To::col(at, e)) / Width)];
    TW_UNROLL
    for (int k = 0; k < Width; ++k) to.x[e + k] = piece.x[k];
  }
  block.sync();  // the next transposition writes to the same memory
#endif
}

/// to(row, n) = f(from(row, 2 n), from(row, 2 n + 1)).
template <int kWarps, class T, int R, int C, int WarpRows, int ColumnWarps, class Fn>
TW_INLINE void pairs(const Threads<kWarps>& block, Fragment<T, R, C / 2, WarpRows, ColumnWarps>& to,
                     const Fragment<T, R, C, WarpRows, ColumnWarps>& from, Fn f) {
  const Position& at = block.at;
  using From = Fragment<T, R, C, WarpRows, ColumnWarps>;
  static_assert(From::warp_cols % 16 == 0, "pairs() halves the columns, which stay a multiple of 8");
  // A thread holds a pair of neighbours in every eight columns, and needs two neighbouring results in every eight. These come from two
  // neighbouring lanes of its quad.
  const int quad = at.lane & ~3;
  const int low = quad + at.lane % 2 * 2;
  const bool second = at.lane % 4 >= 2;
  TW_UNROLL
  for (int group = 0; group < From::size / 8; ++group) {
    TW_UNROLL
    for (int r = 0; r < 2; ++r) {
      const T* x = from.x + group * 8 + r * 2;
      const T first = f(x[0], x[1]), last = f(x[4], x[5]);
      TW_UNROLL
      for (int n = 0; n < 2; ++n) {
        const T of_first = ptx::shuffle(first, low + n), of_last = ptx::shuffle(last, low + n);
        to.x[group * 4 + r * 2 + n] = second ? of_last : of_first;
      }
    }
  }
}
/// The same for Rows: a thread holds whole pairs.
template <int kWarps, class T, int R, int C, int Warps, int Width, class Fn>
TW_INLINE void pairs(const Threads<kWarps>&, Rows<T, R, C / 2, Warps, Width / 2>& to, const Rows<T, R, C, Warps, Width>& from, Fn f) {
  static_assert(Width % 2 == 0, "pairs() of Rows takes neighbours that one thread holds");
  TW_UNROLL
  for (int n = 0; n < to.size; ++n) to.x[n] = f(from.x[2 * n], from.x[2 * n + 1]);
}

/// x(2 n, col) and x(2 n + 1, col) both become f(x(2 n, col), x(2 n + 1, col)).
template <class T, int R, int C, int WarpRows, int ColumnWarps, class Fn>
TW_INLINE void map_row_pairs(const Position& at, Fragment<T, R, C, WarpRows, ColumnWarps>& tile, Fn f) {
  // The lanes of neighbouring rows hold two pairs, 8 rows apart. Each lane computes one of them.
  constexpr int next_row = 4;  // lanes
  const bool odd = at.lane / next_row % 2 != 0;
  TW_UNROLL
  for (int group = 0; group < tile.size / 4; ++group) {
    T* const upper = tile.x + group * 4;
    T* const lower = upper + 2;
    TW_UNROLL
    for (int n = 0; n < 2; ++n) {
      const T own = odd ? lower[n] : upper[n], other = ptx::shuffle_xor(odd ? upper[n] : lower[n], next_row);
      const T mine = odd ? f(other, own) : f(own, other), others = ptx::shuffle_xor(mine, next_row);
      upper[n] = odd ? others : mine;
      lower[n] = odd ? mine : others;
    }
  }
}

}  // namespace tw::cuda

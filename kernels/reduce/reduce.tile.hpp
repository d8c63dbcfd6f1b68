#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::reduce {

// The reduction operators, associative and commutative. NaN propagates; the element functions max and min would drop it.

struct Sum {
  static constexpr float neutral = 0;
  template <class X>
  TW_INLINE static X combine(X a, X b) {
    return a + b;
  }
};
struct Max {
  static constexpr float neutral = -kInfinity;
  template <class X>
  TW_INLINE static X combine(X a, X b) {
    return max_or_nan(a, b);
  }
};
struct Min {
  static constexpr float neutral = kInfinity;
  template <class X>
  TW_INLINE static X combine(X a, X b) {
    return min_or_nan(a, b);
  }
};
/// The largest magnitude.
struct AbsMax {
  static constexpr float neutral = 0;
  template <class X>
  TW_INLINE static X combine(X a, X b) {
    return Max::combine(a, abs(b));
  }
};

/// Reduces every row of x, or every split of a row, to a number, divided by `divisor`. A tile has R rows and processes them C columns at a
/// time: each position of the tile accumulates its own elements; finally the positions of each row are reduced.
template <class Op, class T, class Out, int R, int C>
struct ReduceRows {
  static constexpr const char* source = "kernels/reduce/reduce.tile.hpp";

  template <class Target>
  struct On {
    using X = Rows<Target, float, R, C, 4, 16 / static_cast<int>(sizeof(T))>;
    struct Params {
      Global<Target, const T, X> x;  ///< [j, i, row, col]
      Pointer<Target, Out> y;        ///< [j, i, row, split]
      int splits;                    ///< grid.n
      int length;                    ///< columns of a split, a multiple of C
      float divisor;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i;
      const int row0 = t.m * R, begin = t.n * p.length;
      const int end = p.x.cols - begin < p.length ? p.x.cols : begin + p.length;
      X sum, x;
      block.fill(sum, Op::neutral);
      TW_NO_UNROLL
      for (int col = begin; col < end; col += C) {
        block.load(x, p.x, row0, col, i, j, Fill{Op::neutral});
        block.map(sum, x, [](auto a, auto b) { return Op::combine(a, b); });
      }
      RowVector<Target, float, X> result;
      block.rows(sum, [&](int n, auto row) { result[n] = row.fold([](auto a, auto b) { return Op::combine(a, b); }); });
      block.for_rows(result, [&](int row, int, auto& value) {
        if (row0 + row >= p.x.rows || !block.owns_rows(result)) return;
        const i64 at = static_cast<i64>(t.batch) * p.x.rows + row0 + row;
        p.y[at * p.splits + t.n] = tw::to<Out>(value / p.divisor);
      });
    }
  };
};

/// The same for every column of x: a split is a range of rows.
template <class Op, class T, class Out>
struct ReduceColumns {
  static constexpr const char* source = "kernels/reduce/reduce.tile.hpp";
  static constexpr int width = 16 / static_cast<int>(sizeof(T));
  static constexpr int tile_rows = 16;
  static constexpr int tile_cols = 32 * width;

  template <class Target>
  struct On {
    using X = Rows<Target, float, tile_rows, tile_cols, 4, width>;
    struct Params {
      Global<Target, const T, X> x;  ///< [j, i, row, col]
      Global<Target, Out, X> y;      ///< [j, i, 1, col]; with more than one split [(j, i), split, 1, col]
      int splits;                    ///< grid.n
      int length;                    ///< rows of a split, a multiple of tile_rows
      float divisor;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i;
      const int col = t.m * tile_cols, begin = t.n * p.length;
      const int end = p.x.rows - begin < p.length ? p.x.rows : begin + p.length;
      X sum, x;
      block.fill(sum, Op::neutral);
      TW_NO_UNROLL
      for (int row = begin; row < end; row += tile_rows) {
        block.load(x, p.x, row, col, i, j, Fill{Op::neutral});
        block.map(sum, x, [](auto a, auto b) { return Op::combine(a, b); });
      }
      ColumnVector<Target, float, X> result;
      block.column_fold(sum, result, [](auto a, auto b) { return Op::combine(a, b); });
      block.map(sum, result, p.divisor, [](auto, auto value, float divisor) { return value / divisor; });
      // y has one row: the tile's first.
      if (p.splits > 1)
        block.store(sum, p.y, 0, col, t.n, t.batch);
      else
        block.store(sum, p.y, 0, col, i, j);
    }
  };
};

}  // namespace tw::kernels::reduce

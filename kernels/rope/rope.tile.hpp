#pragma once

#include "tilewave/tile/language.tile.hpp"

// Rotary position embedding. A tile's rows are the heads of one token, so that one row of the table serves all of them. With too few heads
// to fill the tile, they are the heads of several tokens.

namespace tw::kernels::rope {

/// cos and sin of position * theta^(-k / half).
template <class T, int R, int C>
struct Table {
  static constexpr const char* source = "kernels/rope/rope.tile.hpp";

  template <class Target>
  struct On {
    struct Params {
      Global<Target, T> cos, sin;
      const i32* positions;  ///< null: offset, offset + 1, ...
      i64 position_stride, offset;
      double step;  ///< log2(theta) / half
    };
    static void compute(auto& block, const Params& p, Tile t) {
      constexpr double kTurn = 6.283185307179586476925;
      const int row0 = t.m * R, col0 = t.n * C;
      Rows<Target, float, R, C> cosines, sines;
      block.fill(cosines, 0.0f);
      block.fill(sines, 0.0f);
      block.for_each(cosines, sines, [&](int row, int col, float& c, float& s) {
        const i64 n = row0 + row;
        if (n >= p.cos.rows || col0 + col >= p.cos.cols) return;
        const double position = static_cast<double>(p.positions ? p.positions[n * p.position_stride] : p.offset + n);
        const double turns = position * TW_LIBM(exp2)(-p.step * (col0 + col)) / kTurn;
        // Reduced in f64: the f32 functions then see at most half a turn.
        const float angle = static_cast<float>((turns - TW_LIBM(floor)(turns + 0.5)) * kTurn);
        c = cos(angle);
        s = sin(angle);
      });
      block.store(cosines, p.cos, row0, col0);
      block.store(sines, p.sin, row0, col0);
    }
  };
};

/// Parameters of both pairings. Tensors are [batch, 1, seqlen * heads, ...] if a tile's rows are heads of several tokens, else [batch,
/// seqlen, heads, ...].
template <class Target, class X, class T, class Values, class Rest>
struct Common {
  Global<Target, const T, Values> cos, sin;
  Global<Target, const X, Rest> rest_in;  ///< the dimensions that pass through; none when y is x
  Global<Target, X, Rest> rest_out;
  const i32* positions;  ///< null: offset + i
  i64 position_stride_j, position_stride_i;
  const i32* offsets;  ///< [batch], or null
  i64 offset_stride;
  i64 offset;
  int seqlen;  ///< of the tensors: 1 if rows are the heads of all tokens
  u32 heads;   ///< rows per token
  int rows;

  /// The position of row `row` of [j, i]. Rows after the last one, in an incomplete tile, get the last one's.
  TW_INLINE int position(int row, int i, int j) const {
    i += static_cast<int>(static_cast<u32>(min(row, rows - 1)) / heads);
    i64 at = offset + i;
    if (positions) at = positions[j * position_stride_j + i * position_stride_i];
    if (offsets) at = i64{offsets[j * offset_stride]} + i;
    const i64 last = cos.rows - 1;
    return static_cast<int>(at < 0 ? 0 : at < last ? at : last);
  }
};

template <class Tile>
TW_INLINE void pass_through(auto& block, const auto& p, int row0, int i, int j) {
  for (int col = 0; col < p.rest_in.cols; col += Tile::cols) {
    Tile rest;
    block.load(rest, p.rest_in, row0, col, i, j);
    block.store(rest, p.rest_out, row0, col, i, j);
  }
}

/// Cosines or sines of the tile's rows, from row0 on, in a vector or a tile.
template <class Target, class Values>
TW_INLINE void load_table(auto& block, const auto& p, ColumnVector<Target, float, Values>& to, const auto& table, int, int col, int i,
                          int j) {
  block.load(to, table, p.position(0, i, j), col);
}
template <class Target, class Values>
TW_INLINE void load_table(auto& block, const auto& p, Values& to, const auto& table, int row0, int col, int i, int j) {
  block.gather(
      to, table, [&](int row) { return p.position(row0 + row, i, j); }, col);
}

/// Pairs as two tensors, [batch, seqlen, heads, half] each: the two halves of the rotary dimensions, or every second one.
template <class X, class T, int R, int C, int Width, bool kOneToken>
struct TwoParts {
  static constexpr const char* source = "kernels/rope/rope.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C, 4, Width>;
    struct Params : Common<Target, X, T, Values, Values> {
      Global<Target, const X, Values> first_in, second_in;
      Global<Target, X, Values> first_out, second_out;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C, j = t.batch / p.seqlen, i = t.batch - j * p.seqlen;
      Values first, second;
      conditional<kOneToken, ColumnVector<Target, float, Values>, Values> cosines, sines;
      block.load(first, p.first_in, row0, col0, i, j);
      block.load(second, p.second_in, row0, col0, i, j);
      load_table<Target, Values>(block, p, cosines, p.cos, row0, col0, i, j);
      load_table<Target, Values>(block, p, sines, p.sin, row0, col0, i, j);
      const Values old = first;
      block.map(first, second, cosines, sines, [](float a, float b, float c, float s) { return a * c - b * s; });
      block.map(second, old, cosines, sines, [](float b, float a, float c, float s) { return b * c + a * s; });
      block.store(first, p.first_out, row0, col0, i, j);
      block.store(second, p.second_out, row0, col0, i, j);
      if (t.n == 0) pass_through<Values>(block, p, row0, i, j);
    }
  };
};

/// Interleaved pairs as words of two elements, [batch, seqlen, heads, half]: a lane loads both at once.
template <class X, class T, int R, int C, int Width, bool kOneToken>
struct Pairs {
  static constexpr const char* source = "kernels/rope/rope.tile.hpp";
  using Word = conditional<sizeof(X) == 2, i32, i64>;
  struct Pair {
    X first, second;
  };

  template <class Target>
  struct On {
    static constexpr int words = Width * static_cast<int>(sizeof(Word)) > 16 ? 16 / static_cast<int>(sizeof(Word)) : Width;
    using Values = Rows<Target, Word, R, C, 4, words>;
    using Turns = Rows<Target, float, R, C, 4, words>;
    using Rest = Rows<Target, float, R, C, 4, Width>;
    struct Params : Common<Target, X, T, Values, Rest> {
      Global<Target, const Word, Values> in;
      Global<Target, Word, Values> out;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C, j = t.batch / p.seqlen, i = t.batch - j * p.seqlen;
      Values pairs;
      conditional<kOneToken, ColumnVector<Target, float, Turns>, Turns> cosines, sines;
      block.load(pairs, p.in, row0, col0, i, j);
      load_table<Target, Turns>(block, p, cosines, p.cos, row0, col0, i, j);
      load_table<Target, Turns>(block, p, sines, p.sin, row0, col0, i, j);
      block.map(pairs, cosines, sines, [](Word word, float c, float s) {
        const Pair pair = bit_cast<Pair>(word);
        const float a = static_cast<float>(pair.first), b = static_cast<float>(pair.second);
        return bit_cast<Word>(Pair{to<X>(a * c - b * s), to<X>(b * c + a * s)});
      });
      block.store(pairs, p.out, row0, col0, i, j);
      if (t.n == 0) pass_through<Rest>(block, p, row0, i, j);
    }
  };
};

}  // namespace tw::kernels::rope

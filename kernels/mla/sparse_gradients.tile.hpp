#pragma once

#include "tilewave/tile/gemm.tile.hpp"

// What surrounds the products of the gradients of attention over listed keys: see sparse_backward.cpp.

namespace tw::kernels::mla {

/// The rows of kv that tokens' lists name.
template <class Target>
struct ListedRows {
  Pointer<Target, const i32> indices;  ///< [tokens, topk]
  i64 stride;
  Pointer<Target, const i32> lengths;  ///< [tokens]: entries that count; null: topk
  int topk, kv_tokens;
  int first;  ///< token of the launch

  TW_INLINE int length(int token) const { return lengths ? max(min(static_cast<int>(lengths[first + token]), topk), 0) : topk; }
  /// The row that entry n names; -1 for none.
  TW_INLINE int at(int token, int n, int length) const {
    const int row = n < length ? static_cast<int>(indices[(first + token) * stride + n]) : -1;
    return row >= 0 && row < kv_tokens ? row : -1;
  }
};

/// Copies the rows that lists name side by side, 0 where there is none. A tile is R entries of one token.
template <class T>
struct CopyListed {
  static constexpr const char* source = "kernels/mla/sparse_gradients.tile.hpp";
  static constexpr int R = 16;

  template <class Target>
  struct On {
    using Row = Rows<Target, T, R, 64, 4, 8>;
    struct Params {
      Global<Target, const T, Row> in;  ///< [kv_tokens, 576]
      Global<Target, T, Row> out;       ///< [tokens, entries, 576]
      ListedRows<Target> rows;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int first = t.m * R, token = t.batch, length = p.rows.length(token);
      TW_NO_UNROLL
      for (int col = 0; col < p.in.cols; col += Row::cols) {
        Row x;
        block.gather(
            x, p.in, [&](int row) { return p.rows.at(token, first + row, length); }, col);
        block.store(x, p.out, first, col, token);
      }
    }
  };
};

/// Puts the gradients of a token's outputs, with columns of 0, after its queries. A tile is R rows of one token.
template <class T>
struct StackRows {
  static constexpr const char* source = "kernels/mla/sparse_gradients.tile.hpp";
  static constexpr int R = 16;

  template <class Target>
  struct On {
    using Row = Rows<Target, T, R, 64, 4, 8>;
    struct Params {
      Global<Target, const T, Row> q;     ///< [tokens, heads, 576]
      Global<Target, const T, Row> d_o;   ///< [tokens, heads, 512]
      Global<Target, T, Row> of_q, of_o;  ///< [tokens, heads, 576]: where they go
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int first = t.m * R, token = t.batch;
      TW_NO_UNROLL
      for (int col = 0; col < p.q.cols; col += Row::cols) {
        Row x;
        block.load(x, p.q, first, col, token);
        block.store(x, p.of_q, first, col, token);
        block.load(x, p.d_o, first, col, token);  // 0 after the last column
        block.store(x, p.of_o, first, col, token);
      }
    }
  };
};

/// Adds rows to those that lists name. A tile is kCols columns of `count` entries, of one token after the other, which it adds in order.
template <class T>
struct AddListed {
  static constexpr const char* source = "kernels/mla/sparse_gradients.tile.hpp";
  static constexpr int kCols = 256, kTogether = 16;  ///< entries that are in flight together: a divisor of `entries` and `count`

  template <class Target>
  struct On {
    using Row = Rows<Target, float, 1, kCols, 4, 2>;  // a thread adds to the same columns of all rows
    struct Params {
      Global<Target, const T, Row> in;  ///< [tokens, entries, 576]
      Global<Target, float, Row> out;   ///< [kv_tokens, 576]
      ListedRows<Target> rows;
      int tokens, entries, count;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int col = t.m * kCols, end = min((t.n + 1) * p.count, p.tokens * p.entries);
      TW_NO_UNROLL
      for (int first = t.n * p.count; first < end; first += kTogether) {
        const int token = first / p.entries, entry = first - token * p.entries, length = p.rows.length(token);
        if (entry >= length) continue;
        Row rows[kTogether];
        TW_UNROLL
        for (int n = 0; n < kTogether; ++n) block.load(rows[n], p.in, entry + n, col, token);
        TW_UNROLL
        for (int n = 0; n < kTogether; ++n) {
          block.scatter_add(
              rows[n], p.out, [&](int) { return p.rows.at(token, entry + n, length); }, col);
        }
      }
    }
  };
};

/// The weights of keys: exp(scale q k - LSE), at most 1 (keys that no entry names are 0, and have products of 0).
template <class T>
struct ListedWeights {
  static constexpr const char* source = "kernels/mla/sparse_gradients.tile.hpp";

  template <class Target, class Acc>
  struct On {
    using Out = Staging<Target, T, Acc::rows, Acc::cols>;
    struct Params {
      Global<Target, T, Out> weights;         ///< [tokens, heads, entries]
      Pointer<Target, const float> lse_log2;  ///< [tokens, heads]: +infinity without keys
      int heads;
      float scale_log2;
    };
    struct Memory {
      Out out;
      explicit constexpr Memory(auto& block) : out(block) {}
    };
    TW_INLINE static void apply(auto& block, Acc& acc, const Params& p, Memory& memory, const Place& at) {
      RowVector<Target, float, Acc> lse;
      block.for_rows(lse, [&](int row, int, auto& x) {
        x = at.row + row < p.heads ? p.lse_log2[static_cast<i64>(at.batch) * p.heads + at.row + row] : kInfinity;
      });
      block.map(acc, lse, [&](auto x, auto l) { return min(exp2(x * p.scale_log2 - l), decltype(x)(1.0f)); });
      block.store(acc, memory.out, p.weights, at.row, at.col, at.batch);
    }
  };
};

/// The gradients of scores: scale P (dP - delta), of products dP.
template <class T>
struct ListedScoreGradients {
  static constexpr const char* source = "kernels/mla/sparse_gradients.tile.hpp";

  template <class Target, class Acc>
  struct On {
    using Out = Staging<Target, T, Acc::rows, Acc::cols>;
    struct Params {
      Global<Target, const T> weights;     ///< P, [tokens, heads, entries]
      Global<Target, T, Out> ds;           ///< the same
      Pointer<Target, const float> delta;  ///< [tokens, heads]
      int heads;
      float scale;
    };
    struct Memory {
      Out out;
      explicit constexpr Memory(auto& block) : out(block) {}
    };
    TW_INLINE static void apply(auto& block, Acc& acc, const Params& p, Memory& memory, const Place& at) {
      RowVector<Target, float, Acc> delta;
      block.for_rows(delta, [&](int row, int, auto& x) {
        x = at.row + row < p.heads ? p.delta[static_cast<i64>(at.batch) * p.heads + at.row + row] : 0.0f;
      });
      block.map(acc, delta, [&](auto x, auto d) { return (x - d) * p.scale; });
      block.for_each_with(acc, p.weights, at.row, at.col, at.batch, 0, [](int, int, auto& x, auto weight) { x *= weight; });
      block.store(acc, memory.out, p.ds, at.row, at.col, at.batch);
    }
  };
};

}  // namespace tw::kernels::mla

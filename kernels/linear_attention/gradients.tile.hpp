#pragma once

#include "kernels/linear_attention/chunks.tile.hpp"

// What surrounds the products of the backward pass.

namespace tw::kernels::linear_attention {

/// q dq - k dk of each step and head: the gradient with respect to the sum of all gates up to the step. A tile is R steps of one head.
template <class T, int R, int C>
struct GateProducts {
  static constexpr const char* source = "kernels/linear_attention/gradients.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C>;
    struct Params {
      Global<Target, const T, Values> q, k;    ///< [batch, head, time, dim]
      Global<Target, const T, Values> dq, dk;  ///< the same, of each head of v
      Pointer<Target, float> out;              ///< [batch, head of v, time]
      int heads;                               ///< of v
      int shared;                              ///< heads of v for each head of q and k
      int length;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.n / p.heads, head = t.n - batch * p.heads, row0 = t.m * R;
      Values x, y, sum;
      block.load(sum, p.q, row0, 0, head / p.shared, batch);
      block.load(x, p.dq, row0, 0, head, batch);
      block.map(sum, x, [](auto a, auto b) { return a * b; });
      block.load(x, p.k, row0, 0, head / p.shared, batch);
      block.load(y, p.dk, row0, 0, head, batch);
      block.map(sum, x, y, [](auto s, auto a, auto b) { return s - a * b; });
      RowVector<Target, float, Values> result;
      block.rows(sum, [&](int i, auto row) { result[i] = row.sum(); });
      block.for_rows(result, [&](int row, int, auto& value) {
        if (row0 + row < p.length && block.owns_rows(result)) p.out[static_cast<i64>(t.n) * p.length + row0 + row] = value;
      });
    }
  };
};

/// The same for f32, as two numbers, from dq and dk that lack what each step gives itself. That is added here,
///
///   dq_t += scale (v_t d_o_t) k_t,   dk_t += scale (v_t d_o_t) q_t,
///
/// and left out of the numbers, where it would cancel: with strong decay it is all of dq and dk but for a small rest, and its rounding
/// would be larger than the result. A tile is R steps of one head.
template <int R, int C>
struct OwnSteps {
  static constexpr const char* source = "kernels/linear_attention/gradients.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C>;
    struct Params {
      Global<Target, const float, Values> q, k;                ///< [batch, head, time, dim]
      Global<Target, const float, Values> v, d_o;              ///< [batch, head of v, time, columns]
      Global<Target, const float, Values> other_dq, other_dk;  ///< [batch, head of v, time, dim]: what other steps give
      Global<Target, float, Values> dq, dk;                    ///< the same memory
      Pointer<Target, float> from_before, to_later;            ///< [batch, head of v, time]: q dq and k dk
      Chunks<Target> chunks;
      float scale;
      int heads;   ///< of v
      int shared;  ///< heads of v for each head of q and k
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      // Gradients of steps that belong to no sequence are left as they are.
      const auto last = p.chunks.sequence(p.chunks.sequences - 1);
      const int batch = t.n / p.heads, head = t.n - batch * p.heads, row0 = p.chunks.sequence(0).begin + t.m * R;
      auto to_dq = p.dq;
      auto to_dk = p.dk;
      to_dq.rows = to_dk.rows = last.begin + last.size;
      const auto store = [&](auto& products, auto to) {
        RowVector<Target, float, Values> sums;
        block.rows(products, [&](int i, auto row) { sums[i] = row.sum(); });
        block.for_rows(sums, [&](int row, int, auto& value) {
          if (row0 + row < to_dq.rows && block.owns_rows(sums)) to[static_cast<i64>(t.n) * p.chunks.length + row0 + row] = value;
        });
      };
      Values q, k, x, products;
      RowVector<Target, float, Values> own;
      block.load(q, p.v, row0, 0, head, batch);
      block.load(k, p.d_o, row0, 0, head, batch);
      block.map(q, k, p.scale, [](auto a, auto b, auto scale) { return a * b * scale; });
      block.rows(q, [&](int i, auto row) { own[i] = row.sum(); });

      block.load(q, p.q, row0, 0, head / p.shared, batch);
      block.load(k, p.k, row0, 0, head / p.shared, batch);
      block.load(x, p.other_dq, row0, 0, head, batch);
      products = q;
      block.map(products, x, [](auto a, auto d) { return a * d; });
      store(products, p.from_before);
      block.map(x, k, own, [](auto d, auto a, auto factor) { return d + a * factor; });
      block.store(x, to_dq, row0, 0, head, batch);
      block.load(x, p.other_dk, row0, 0, head, batch);
      block.map(k, x, [](auto a, auto d) { return a * d; });
      store(k, p.to_later);
      block.map(x, q, own, [](auto d, auto a, auto factor) { return d + a * factor; });
      block.store(x, to_dk, row0, 0, head, batch);
    }
  };
};

/// The gates' gradients: sums of GateProducts' numbers from each step to the sequence's end, plus the product of the final state and its
/// gradient. Of OwnSteps' numbers the last k dk is what the last step gives the final state. Neither has it then. A tile is one sequence of
/// R heads, C steps at a time.
template <int R, int C>
struct GateGradients {
  static constexpr const char* source = "kernels/linear_attention/gradients.tile.hpp";

  template <class Target>
  struct On {
    using Steps = Rows<Target, float, R, C, 4, C / 32>;
    struct Params {
      Global<Target, const float> products;       ///< [batch, head, time]: GateProducts', or OwnSteps' q dq
      Global<Target, const float> to_later;       ///< OwnSteps' k dk, or without elements
      Global<Target, float> dg;                   ///< the same
      Global<Target, const float> state_product;  ///< [sequence, head, 1], or without elements
      Chunks<Target> chunks;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const auto sequence = p.chunks.sequence(t.m);
      const int head0 = t.n * R;
      Steps x, y;
      RowVector<Target, float, Steps> later, sum;
      block.load(later, p.state_product, head0, 0, t.m);
      auto dg = p.dg;
      dg.cols = sequence.begin + sequence.size;
      TW_NO_UNROLL
      for (int n = ceil_div(sequence.size, C) - 1; n >= 0; --n) {
        const int first = sequence.begin + n * C;
        block.load(x, p.products, head0, first, sequence.batch);
        block.load(y, p.to_later, head0, first, sequence.batch);
        block.for_each(x, y, [&](int, int col, auto& value, auto& given) {
          if (first + col >= dg.cols) value = 0.0f;
          if (first + col + 1 < dg.cols) value = value - given;
        });
        block.rows(x, [&](int i, auto row) { sum[i] = row.sum(); });
        block.row_cumsum(x, Backward{});
        block.map(x, later, [](auto value, auto more) { return value + more; });
        block.for_rows(later, [&](int, int i, auto& value) { value += sum[i]; });
        block.store(x, dg, head0, first, sequence.batch);
      }
    }
  };
};

/// The sum of the products of the elements of two matrices, such as a state and its gradient. A tile is one matrix, R x C at a time, in an
/// order that is always the same.
template <int R, int C>
struct MatrixProduct {
  static constexpr const char* source = "kernels/linear_attention/gradients.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C, 4, C / 32>;
    struct Params {
      Global<Target, const float, Values> a, b;  ///< [j, i, rows, columns]
      Global<Target, float> out;                 ///< [j, i, 1]
      int size_i;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int j = t.m / p.size_i, i = t.m - j * p.size_i;
      Values x, y, sum;
      block.fill(sum, 0.0f);
      TW_NO_UNROLL
      for (int row = 0; row < p.a.rows; row += R) {
        TW_NO_UNROLL
        for (int col = 0; col < p.a.cols; col += C) {
          block.load(x, p.a, row, col, i, j);
          block.load(y, p.b, row, col, i, j);
          block.map(sum, x, y, [](auto s, auto a, auto b) { return s + a * b; });
        }
      }
      ColumnVector<Target, float, Values> columns;
      block.column_fold(sum, columns, [](auto a, auto b) { return a + b; });
      block.map(sum, columns, [](auto, auto c) { return c; });
      RowVector<Target, float, Values> all;
      block.rows(sum, [&](int n, auto row) { all[n] = row.sum(); });
      auto out = p.out;
      out.rows = i + 1;  // the tile's first row
      block.store(all, out, i, 0, j);
    }
  };
};

/// Sums of neighbouring heads: the gradients of heads of q and k that several heads of v share. A tile is R steps of one head.
template <class T, int R, int C>
struct SumOfHeads {
  static constexpr const char* source = "kernels/linear_attention/gradients.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C>;
    struct Params {
      Global<Target, const T, Values> x;  ///< [batch, head of v, time, dim]
      Global<Target, T, Values> y;        ///< [batch, head, time, dim]
      Chunks<Target> chunks;
      int heads;  ///< of y
      int shared;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      // Gradients of steps that belong to no sequence are left as they are.
      const auto last = p.chunks.sequence(p.chunks.sequences - 1);
      const int batch = t.n / p.heads, head = t.n - batch * p.heads, row0 = p.chunks.sequence(0).begin + t.m * R;
      Values x, sum;
      block.load(sum, p.x, row0, 0, head * p.shared, batch);
      TW_NO_UNROLL
      for (int n = 1; n < p.shared; ++n) {
        block.load(x, p.x, row0, 0, head * p.shared + n, batch);
        block.map(sum, x, [](auto a, auto b) { return a + b; });
      }
      auto y = p.y;
      y.rows = last.begin + last.size;
      block.store(sum, y, row0, 0, head, batch);
    }
  };
};

}  // namespace tw::kernels::linear_attention

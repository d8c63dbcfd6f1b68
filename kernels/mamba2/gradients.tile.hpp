#pragma once

#include "kernels/mamba2/step_size.tile.hpp"

// What surrounds the gradients of the recurrence: those of the gate, the inputs, the step sizes, and of what all steps share.

namespace tw::kernels::mamba2 {

/// Through y = (o + D x) silu(z): the gradients of o + D x and of z. A tile is R steps of one head.
template <class T, int R, int C>
struct OutputGradients {
  static constexpr const char* source = "kernels/mamba2/gradients.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C>;
    struct Params {
      Global<Target, const T, Values> dy, o, x, z;  ///< [batch, head, time, dim]
      Global<Target, const float> skip;             ///< [head, dim], or without elements
      Global<Target, T, Values> du, dz;             ///< as dy
      Steps<Target> steps;
      int heads;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.n / p.heads, head = t.n - batch * p.heads, row0 = p.steps.begin() + t.m * R;
      Values u, x, dy;
      block.load(u, p.o, row0, 0, head, batch);
      if (p.skip.cols > 0) {
        ColumnVector<Target, float, Values> skip;
        block.load(x, p.x, row0, 0, head, batch);
        block.load(skip, p.skip, head, 0);
        block.map(u, x, skip, [](auto o, auto value, auto d) { return o + value * d; });
      }
      block.load(x, p.z, row0, 0, head, batch);
      block.load(dy, p.dy, row0, 0, head, batch);
      block.map(u, dy, x, [](auto value, auto d, auto z) {
        const auto s = sigmoid(z);
        return d * value * s * (1.0f + z * (1.0f - s));
      });
      block.map(dy, x, [](auto d, auto z) { return d * z * sigmoid(z); });
      auto dz = p.dz;
      auto du = p.du;
      dz.rows = du.rows = p.steps.end();
      block.store(u, dz, row0, 0, head, batch);
      block.store(dy, du, row0, 0, head, batch);
    }
  };
};

/// Through x dt and D x: x's gradient, the sums of x and the scaled input's gradient for the step sizes, and the sums of D's gradient over
/// a run of steps. A tile is a run of one head, R steps at a time.
template <class T, int R, int C>
struct InputGradients {
  static constexpr const char* source = "kernels/mamba2/gradients.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C>;
    struct Params {
      Global<Target, const T, Values> x, dv, du;  ///< [batch, head, time, dim]; dv: of x dt
      Global<Target, const float> sizes, skip;    ///< [batch, head, time, 1]; [head, dim], or without elements
      Global<Target, T, Values> dx;               ///< as x
      Global<Target, float> products;             ///< as sizes
      Global<Target, float> skip_sums;            ///< [head, batch * run, dim], or [head, batch * run, 1], or without elements
      Steps<Target> steps;
      int heads, run, runs;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.n / p.heads, head = t.n - batch * p.heads;
      const int first = p.steps.begin() + t.m * p.run, end = p.steps.end();
      auto x_steps = p.x;
      auto dv_steps = p.dv;
      auto du_steps = p.du;
      auto dx_steps = p.dx;
      auto products = p.products;
      // Steps that belong to no sequence are zeros.
      x_steps.rows = dv_steps.rows = du_steps.rows = dx_steps.rows = products.rows = end;
      ColumnVector<Target, float, Values> skip, columns;
      block.load(skip, p.skip, head, 0);
      Values x, dv, du, sum;
      RowVector<Target, float, Values> sizes, of_steps;
      block.fill(sum, 0.0f);
      TW_NO_UNROLL
      for (int row = first; row < min(first + p.run, end); row += R) {
        block.load(x, x_steps, row, 0, head, batch);
        block.load(dv, dv_steps, row, 0, head, batch);
        block.load(du, du_steps, row, 0, head, batch);
        block.load(sizes, p.sizes, row, 0, head, batch);
        block.map(sum, du, x, [](auto s, auto d, auto value) { return s + d * value; });
        block.map(x, dv, [](auto value, auto d) { return value * d; });
        block.rows(x, [&](int i, auto of_row) { of_steps[i] = of_row.sum(); });
        block.store(of_steps, products, row, 0, head, batch);
        block.map(dv, sizes, [](auto d, auto size) { return d * size; });
        block.map(dv, du, skip, [](auto d, auto of_output, auto factor) { return d + of_output * factor; });
        block.store(dv, dx_steps, row, 0, head, batch);
      }
      if (p.skip_sums.cols == 0) return;
      block.column_fold(sum, columns, [](auto a, auto b) { return a + b; });
      block.map(sum, columns, [](auto, auto total) { return total; });
      const int at = batch * p.runs + t.m;
      auto to = p.skip_sums;
      to.rows = at + 1;  // the tile's first row
      if (to.cols == 1 && p.x.cols > 1) {
        block.rows(sum, [&](int i, auto of_row) { of_steps[i] = of_row.sum(); });
        block.store(of_steps, to, at, 0, head);
      } else {
        block.store(sum, to, at, 0, head);
      }
    }
  };
};

/// The step sizes' gradients, and the sums of those of A and dt_bias over R steps. A tile is R steps of C heads.
template <class T, int R, int C>
struct SizeGradients {
  static constexpr const char* source = "kernels/mamba2/gradients.tile.hpp";
  /// exp of less is 0: the step forgets the state, so its decay has no gradient.
  static constexpr float kForgets = -87.3f;

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C, 4, 4>;
    struct Params {
      Global<Target, const T, Values> dt;                   ///< [batch, time, head]
      Global<Target, const float> rate, bias;               ///< [1, head]; bias may have no elements
      Global<Target, const float, Values> g, dg, products;  ///< [batch, time, head]
      Global<Target, T> d_dt;                               ///< as dt
      Global<Target, float> rate_sums, bias_sums;           ///< [batch * tile, head]
      Steps<Target> steps;
      StepSize size;
      int tiles;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = p.steps.begin() + t.m * R, col0 = t.n * C, batch = t.batch, left = p.steps.end() - row0;
      Values x, g, dg, d_size;
      ColumnVector<Target, float, Values> rate, bias, sums;
      block.load(x, p.dt, row0, col0, batch);
      block.load(g, p.g, row0, col0, batch);
      block.load(dg, p.dg, row0, col0, batch);
      block.load(d_size, p.products, row0, col0, batch);
      block.load(rate, p.rate, 0, col0);
      block.load(bias, p.bias, 0, col0);
      const StepSize size = p.size;
      block.map(x, bias, [](auto dt, auto b) { return dt + b; });
      block.map(dg, g, [](auto d, auto log) { return log < kForgets ? decltype(d)(0.0f) : d; });
      // A rate of -infinity times a gradient of 0 would be NaN.
      block.map(d_size, dg, rate, [](auto sum, auto d, auto r) { return d == 0.0f ? sum : sum + d * r; });
      block.map(d_size, x, [=](auto d, auto dt) {
        const auto slope = size.derivative(dt);
        return slope == 0.0f ? decltype(d)(0.0f) : d * slope;
      });
      block.map(dg, x, [=](auto d, auto dt) { return d * size.of(dt); });
      block.for_each(d_size, dg, [&](int row, int, auto& of_size, auto& of_rate) {
        if (row >= left) of_size = of_rate = 0.0f;
      });
      auto to = p.d_dt;
      to.rows = p.steps.end();
      block.store(d_size, to, row0, col0, batch);
      store_sums(block, dg, sums, p.rate_sums, batch * p.tiles + t.m, col0);
      store_sums(block, d_size, sums, p.bias_sums, batch * p.tiles + t.m, col0);
    }

   private:
    TW_INLINE static void store_sums(auto& block, Values& values, auto& sums, auto to, int at, int col0) {
      block.column_fold(values, sums, [](auto a, auto b) { return a + b; });
      block.map(values, sums, [](auto, auto total) { return total; });
      to.rows = at + 1;  // the tile's first row
      block.store(values, to, at, col0);
    }
  };
};

/// Sums over runs, in the same order every time.
struct SumOfRuns {
  static constexpr const char* source = "kernels/mamba2/gradients.tile.hpp";
  static constexpr int tile_rows = 32, tile_cols = 128;

  template <class Target>
  struct On {
    using Values = Rows<Target, float, tile_rows, tile_cols, 4, 4>;
    struct Params {
      Global<Target, const float, Values> sums;  ///< [head, run, column]
      Global<Target, float> total;               ///< [head, 1, column]
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int col = t.n * tile_cols;
      Values sum, part;
      block.fill(sum, 0.0f);
      TW_NO_UNROLL
      for (int row = 0; row < p.sums.rows; row += tile_rows) {
        block.load(part, p.sums, row, col, t.batch);
        block.map(sum, part, [](auto a, auto b) { return a + b; });
      }
      ColumnVector<Target, float, Values> total;
      block.column_fold(sum, total, [](auto a, auto b) { return a + b; });
      block.map(sum, total, [](auto, auto value) { return value; });
      block.store(sum, p.total, 0, col, t.batch);  // it has one row: the tile's first
    }
  };
};

}  // namespace tw::kernels::mamba2

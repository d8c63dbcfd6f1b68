#pragma once

#include "tilewave/tile/language.tile.hpp"

// Layer norm and RMS norm of the rows of x, or of h = x + residual. On the GPU a row that fits is held in registers: one read, one write.
// Longer rows are read again for each statistic.

namespace tw::kernels::norm {

enum class Kind { layer, rms };

/// Element types of x, y, and of weight and bias.
template <class X, class Y, class W>
struct Types {
  template <class Target, class Values>
  struct Params {
    Global<Target, const X, Values> x, residual;
    Global<Target, X, Values> h;
    Global<Target, Y, Values> y;
    Global<Target, const W, Values> weight, bias;  ///< [1, N] each
    float per_column;                              ///< 1 / N
    float epsilon;
    bool has_residual, stores_h;
  };
};

/// h = x + residual, rounded to X, from column `col` on; 0 outside the row. Stores h if the call asks for it.
template <class X, class Values>
TW_INLINE void load_h(auto& block, const auto& p, Values& h, int row0, int col, int i, int j) {
  block.load(h, p.x, row0, col, i, j);
  if (!p.has_residual) return;
  Values residual;
  block.load(residual, p.residual, row0, col, i, j);
  block.map(h, residual, [](float a, float b) { return static_cast<float>(to<X>(a + b)); });
  if (p.stores_h) block.store(h, p.h, row0, col, i, j);
}

/// h - mean; 0 outside the row, where h is 0.
template <class Values>
TW_INLINE void centre(auto& block, Values& h, const auto& mean, int col0, int cols) {
  block.map(h, mean, [](float v, float m) { return v - m; });
  if (cols - col0 >= Values::cols) return;
  block.for_each(h, [&](int, int col, float& v) {
    if (col0 + col >= cols) v = 0;
  });
}

/// y = h * scale, then weight and bias; `h` is centred. A missing weight is a tensor without columns, so that the fill value is used.
template <Kind kind, class X, class W, class Target, class Values>
TW_INLINE void finish(auto& block, const auto& p, Values& h, const auto& scale, int row0, int col, int i, int j) {
  ColumnVector<Target, W, Values> vector;  // in the stored type, which takes half the registers; used for weight, then for bias
  block.load(vector, p.weight, 0, col, 0, 0, Fill{1});
  if constexpr (kind == Kind::layer) {
    block.map(h, scale, vector, [](float v, float s, W w) { return v * s * static_cast<float>(w); });
    if (p.bias.cols > 0) {
      block.load(vector, p.bias, 0, col);
      block.map(h, vector, [](float v, W b) { return v + static_cast<float>(b); });
    }
  } else {
    block.map(h, scale, vector, [](float v, float s, W w) { return static_cast<float>(to<X>(v * s)) * static_cast<float>(w); });
  }
  block.store(h, p.y, row0, col, i, j);
}

/// Rows of up to C columns.
template <Kind kind, class X, class Y, class W, int R, int C, int Warps, int Width>
struct HeldRows {
  static constexpr const char* source = "kernels/norm/norm.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    /// The number of elements per thread limits the threads that fit an SM's registers. Some should load while others compute.
    static constexpr int elements = R * C / (32 * Warps);
    static constexpr int min_blocks = max((elements <= 16 || Warps == 16 ? 32 : 24) / Warps, 1);
    using Values = Rows<Target, float, R, C, Warps, Width>;
    using Params = typename Types<X, Y, W>::template Params<Target, Values>;

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i;
      Values h;
      load_h<X>(block, p, h, row0, 0, i, j);
      RowVector<Target, float, Values> scale;
      if constexpr (kind == Kind::layer) {
        RowVector<Target, float, Values> mean;
        block.rows(h, [&](int r, auto row) { mean[r] = row.sum() * p.per_column; });
        centre(block, h, mean, 0, p.x.cols);
      }
      block.rows(h, [&](int r, auto row) { scale[r] = rsqrt(row.sum([](float v) { return v * v; }) * p.per_column + p.epsilon); });
      finish<kind, X, W, Target>(block, p, h, scale, row0, 0, i, j);
    }
  };
};

/// Rows of up to C columns on the CPU, in the L1 cache, with as few passes as possible.
template <Kind kind, class X, class Y, class W, int R, int C>
struct CachedRows {
  static constexpr const char* source = "kernels/norm/norm.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int vector_bytes = 64;
    using Values = Rows<Target, float, R, C, 4, 0>;
    using Params = typename Types<X, Y, W>::template Params<Target, Values>;

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i, cols = p.x.cols;
      const float per_column = p.per_column, epsilon = p.epsilon;
      Values h;
      load_h<X>(block, p, h, row0, 0, i, j);
      RowVector<Target, float, Values> mean, scale;
      if constexpr (kind == Kind::layer) {
        block.rows(h, [&](int r, auto row) { mean[r] = row.sum() * per_column; });
        if (cols < C) {
          block.for_each(h, [&](int r, int col, float& v) {
            if (col >= cols) v = mean[r];  // distance 0
          });
        }
      }
      block.rows(h, [&](int r, auto row) {
        const float m = kind == Kind::layer ? mean[r] : 0.0f;
        scale[r] = rsqrt(row.sum([&](float v) { return (v - m) * (v - m); }) * per_column + epsilon);
      });
      ColumnVector<Target, W, Values> weight;
      block.load(weight, p.weight, 0, 0, 0, 0, Fill{1});
      if constexpr (kind == Kind::layer) {
        ColumnVector<Target, W, Values> bias;
        block.load(bias, p.bias, 0, 0);
        block.map_store(
            h, p.y, row0, 0, i, j,
            [](float v, float m, float s, W w, W b) { return (v - m) * s * static_cast<float>(w) + static_cast<float>(b); }, mean, scale,
            weight, bias);
      } else {
        block.map_store(
            h, p.y, row0, 0, i, j, [](float v, float s, W w) { return rounded_to<X>(v * s) * static_cast<float>(w); }, scale, weight);
      }
    }
  };
};

/// Rows of any length in chunks of C columns. Sums stay elementwise until the last chunk.
template <Kind kind, class X, class Y, class W, int R, int C, int Warps, int Width>
struct ChunkedRows {
  static constexpr const char* source = "kernels/norm/norm.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using Values = Rows<Target, float, R, C, Warps, Width>;
    using Params = typename Types<X, Y, W>::template Params<Target, Values>;

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i, cols = p.x.cols;
      const float per_column = p.per_column, epsilon = p.epsilon;
      Values h, sum;
      RowVector<Target, float, Values> mean, scale;
      // h from the tensor it was stored in: each thread reads only its own elements.
      const auto reload = [&](int col) {
        if (p.stores_h)
          block.load(h, p.h, row0, col, i, j);
        else
          load_h<X>(block, p, h, row0, col, i, j);
      };
      block.fill(sum, 0.0f);
      for (int col = 0; col < cols; col += C) {
        load_h<X>(block, p, h, row0, col, i, j);
        if constexpr (kind == Kind::layer)
          block.map(sum, h, [](float s, float v) { return s + v; });
        else
          block.map(sum, h, [](float s, float v) { return s + v * v; });
      }
      if constexpr (kind == Kind::layer) {
        block.rows(sum, [&](int r, auto row) { mean[r] = row.sum() * per_column; });
        block.fill(sum, 0.0f);
        for (int col = 0; col < cols; col += C) {
          reload(col);
          centre(block, h, mean, col, cols);
          block.map(sum, h, [](float s, float v) { return s + v * v; });
        }
      }
      block.rows(sum, [&](int r, auto row) { scale[r] = rsqrt(row.sum() * per_column + epsilon); });
      for (int col = 0; col < cols; col += C) {
        reload(col);
        if constexpr (kind == Kind::layer) block.map(h, mean, [](float v, float m) { return v - m; });
        finish<kind, X, W, Target>(block, p, h, scale, row0, col, i, j);
      }
    }
  };
};

}  // namespace tw::kernels::norm

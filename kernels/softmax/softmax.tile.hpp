#pragma once

#include "tilewave/tile/language.tile.hpp"

// softmax(scale x) of rows. On the GPU a row that fits is held in registers: one read, one write. Longer rows, and rows on the CPU, are
// read twice, in chunks; the second read hits the CPU's cache.
//
// Infinities and NaN follow from the arithmetic: a NaN or +infinity makes the row's sum NaN, and so does a row with only -infinity.

namespace tw::kernels::softmax {

template <class In, class Out>
struct Types {
  template <class Target, class Values>
  struct Params {
    Global<Target, const In, Values> x;
    Global<Target, Out, Values> y;
    float scale_log2;  ///< scale * log2(e), positive
  };
};

/// Rows of up to C columns.
template <class In, class Out, int R, int C, int Warps, int Width>
struct HeldRows {
  static constexpr const char* source = "kernels/softmax/softmax.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int vector_bytes = 64;
    static constexpr int warps = Warps;
    /// 1024 threads per SM, so that some load while others compute. Their 64 registers suffice.
    static constexpr int min_blocks = 32 / Warps;
    using Values = Rows<Target, float, R, C, Warps, Width>;
    using Params = typename Types<In, Out>::template Params<Target, Values>;

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i;
      const float scale = p.scale_log2;
      Values x;
      block.load(x, p.x, row0, 0, i, j, Fill{-kInfinity});
      RowVector<Target, float, Values> factor;
      block.rows(x, [&](int r, auto row) {
        const auto largest = row.max();
        factor[r] = 1.0f / row.map_sum([&](auto v) { return exp2((v - largest) * scale); });
      });
      block.map_store(
          x, p.y, row0, 0, i, j, [](auto v, auto f) { return v * f; }, factor);
    }
  };
};

/// Rows of any length in chunks of C columns. Every element of the tile keeps the maximum of its own columns and the sum relative to it
/// (the online softmax of Milakov and Gimelshein, arXiv 1805.02867); they are combined after the last chunk.
template <class In, class Out, int R, int C, int Warps, int Width>
struct ChunkedRows {
  static constexpr const char* source = "kernels/softmax/softmax.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using Values = Rows<Target, float, R, C, Warps, Width>;
    using Params = typename Types<In, Out>::template Params<Target, Values>;

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i;
      const float scale = p.scale_log2;
      // Finite, so that -infinity minus the maximum is not NaN.
      constexpr float kLowest = -3.402823466e38f;
      Values x, largest, sum;
      block.fill(largest, kLowest);
      block.fill(sum, 0.0f);
      for (int col = 0; col < p.x.cols; col += C) {
        block.load(x, p.x, row0, col, i, j, Fill{-kInfinity});
        // The new maximum is the old one or x, and e the weight of the other. As arithmetic, because compilers do not vectorise selects
        // here.
        block.map(sum, x, largest, [&](auto s, auto v, auto m) {
          const auto e = exp2(-abs(v - m) * scale);
          const decltype(v) larger = v > m ? 1.0f : 0.0f;
          return s * (larger * e + (1.0f - larger)) + (larger + (1.0f - larger) * e);
        });
        block.map(largest, x, [](auto m, auto v) { return max(m, v); });
      }
      RowVector<Target, float, Values> row_largest, factor;
      block.rows(largest, [&](int r, auto row) { row_largest[r] = row.max(); });
      block.map(sum, largest, row_largest, [&](auto s, auto m, auto all) { return s * exp2((m - all) * scale); });
      block.rows(sum, [&](int r, auto row) { factor[r] = 1.0f / row.sum(); });
      for (int col = 0; col < p.x.cols; col += C) {
        block.load(x, p.x, row0, col, i, j);
        block.map(x, row_largest, factor, [&](auto v, auto m, auto f) { return exp2((v - m) * scale) * f; });
        block.store(x, p.y, row0, col, i, j);
      }
    }
  };
};

}  // namespace tw::kernels::softmax

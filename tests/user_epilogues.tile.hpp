#pragma once

#include "tilewave/tile/gemm.tile.hpp"

// Epilogues of products as a user writes them, for kernels/gemm/gemm_with_test.cpp.

namespace tw::test {

/// The largest of each row's columns in a tile of D, and the first column that has it. D itself is not stored.
struct RowArgmax {
  static constexpr const char* source = "tests/user_epilogues.tile.hpp";

  template <class Target, class Acc>
  struct On {
    struct Params {
      Global<Target, float> largest;  ///< [batch, M, tiles of N]
      Global<Target, i32> column;     ///< the same
      int columns;                    ///< N
    };
    using Memory = NoMemory;

    TW_INLINE static void apply(auto& block, Acc& acc, const Params& p, Memory&, const Place& at) {
      block.for_each(acc, [&](int, int col, auto& x) {
        if (at.col + col >= p.columns) x = -kInfinity;
      });
      RowVector<Target, float, Acc> largest;
      block.rows(acc, [&](int i, auto row) { largest[i] = row.max(); });
      // What has the largest becomes its distance from the tile's last column, the rest 0: the largest of these is the first column's.
      block.map(acc, largest, [](auto x, auto most) { return x == most ? 1.0f : 0.0f; });
      block.for_each(acc, [](int, int col, auto& x) { x *= static_cast<float>(Acc::cols - col); });
      RowVector<Target, i32, Acc> column;
      block.rows(acc, [&](int i, auto row) { column[i] = at.col + Acc::cols - static_cast<int>(row.max()); });
      block.store(largest, p.largest, at.row, at.col / Acc::cols, at.batch);
      block.store(column, p.column, at.row, at.col / Acc::cols, at.batch);
    }
  };
};

/// D = e4m3(A B / scale), with a scale for each row of a tile that makes its largest magnitude the type's largest number.
struct CastFp8 {
  static constexpr const char* source = "tests/user_epilogues.tile.hpp";

  template <class Target, class Acc>
  struct On {
    struct Params {
      Global<Target, fp8_e4m3> d;   ///< [batch, M, N]
      Global<Target, float> scale;  ///< [batch, M, tiles of N]
    };
    using Memory = NoMemory;

    TW_INLINE static void apply(auto& block, Acc& acc, const Params& p, Memory&, const Place& at) {
      constexpr float kLargest = 448;
      RowVector<Target, float, Acc> scale, inverse;
      block.rows(acc, [&](int i, auto row) {
        const float largest = row.max([](auto x) { return abs(x); });
        scale[i] = largest > 0.0f ? largest / kLargest : 1.0f;
        inverse[i] = 1.0f / scale[i];
      });
      block.map(acc, inverse, [](auto x, auto factor) { return x * factor; });
      block.store(acc, p.d, at.row, at.col, at.batch);
      block.store(scale, p.scale, at.row, at.col / Acc::cols, at.batch);
    }
  };
};

}  // namespace tw::test

#pragma once

#include "tilewave/tile/gemm.tile.hpp"

/// The largest of each row's columns in a tile of a product, and the first column that has it. The product itself is never stored.
struct RowArgmax {
  static constexpr const char* source = "row_argmax.tile.hpp";

  template <class Target, class Acc>
  struct On {
    struct Params {
      tw::Global<Target, float> largest;  ///< [M, tiles of N]
      tw::Global<Target, tw::i32> column;
      int columns;  ///< N
    };
    using Memory = tw::NoMemory;

    static void apply(auto& block, Acc& acc, const Params& p, Memory&, const tw::Place& at) {
      block.for_each(acc, [&](int, int col, auto& x) {
        if (at.col + col >= p.columns) x = -tw::kInfinity;
      });
      tw::RowVector<Target, float, Acc> largest;
      block.rows(acc, [&](int i, auto row) { largest[i] = row.max(); });
      // What has the largest becomes its distance from the tile's end, the rest 0: the largest of these is the first column's.
      block.map(acc, largest, [](auto x, auto most) { return x == most ? 1.0f : 0.0f; });
      block.for_each(acc, [](int, int col, auto& x) { x *= static_cast<float>(Acc::cols - col); });
      tw::RowVector<Target, tw::i32, Acc> column;
      block.rows(acc, [&](int i, auto row) { column[i] = at.col + Acc::cols - static_cast<int>(row.max()); });
      block.store(largest, p.largest, at.row, at.col / Acc::cols);
      block.store(column, p.column, at.row, at.col / Acc::cols);
    }
  };
};

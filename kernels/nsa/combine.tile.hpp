#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::nsa {

/// Heads and columns of a tile: 2048 elements.
inline constexpr int kCombinedHeads = 16, kCombinedColumns = 128;

/// o = the sum over branches of gate * output, for R heads of one token.
template <class T, class Gate, int R, int C>
struct Combine {
  static constexpr const char* source = "kernels/nsa/combine.tile.hpp";
  static constexpr int branches = 3;

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C>;
    using PerHead = RowVector<Target, float, Values>;
    struct Branch {
      Global<Target, const T, Values> output;  ///< [batch, seqlen, heads, dim], or without elements
      Global<Target, const Gate> gate;         ///< [batch, seqlen, heads, 1]
    };
    struct Params {
      Global<Target, T, Values> o;
      Branch first, second, third;
    };

    TW_INLINE static void add(auto& block, const Branch& branch, int row0, int i, int j, Values& sum) {
      if (branch.output.data == nullptr) return;
      Values x;
      PerHead gate;
      block.load(x, branch.output, row0, 0, i, j);
      block.for_rows(gate, [&](int row, int, auto& g) {
        g = row0 + row < branch.gate.rows ? to<float>(*branch.gate.template at<const Gate>(row0 + row, 0, i, j)) : 0.0f;
      });
      block.map(sum, x, gate, [](auto all, auto value, auto g) { return all + g * value; });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, j = t.batch / p.o.size_i, i = t.batch - j * p.o.size_i;
      Values sum;
      block.fill(sum, 0.0f);
      add(block, p.first, row0, i, j, sum);
      add(block, p.second, row0, i, j, sum);
      add(block, p.third, row0, i, j, sum);
      block.store(sum, p.o, row0, 0, i, j);
    }
  };
};

}  // namespace tw::kernels::nsa

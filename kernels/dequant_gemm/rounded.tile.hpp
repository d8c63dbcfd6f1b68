#pragma once

#include "tilewave/tile/epilogue.tile.hpp"

namespace tw::kernels::dequant_gemm {

/// D = activation(x_scales(m) scales(n) acc + bias) + beta C: the end of a product of 8-bit integers whose operands have a scale for each
/// row. The rest of it is `Linear`'s.
template <class Linear>
struct Scaled {
  static constexpr bool addends = Linear::addends, elementwise = true;
  template <class Target, class Acc>
  struct On {
    using Result = Fragment<Target, float, Acc::rows, Acc::cols>;
    using End = typename Linear::template On<Target, Result>;
    using Memory = typename End::Memory;

    struct Params {
      Global<Target, const float> x_scales;  ///< [M, 1]
      Global<Target, const float> scales;    ///< [1, N]
      typename End::Params linear;
    };

    TW_INLINE static void apply(auto& block, Acc& acc, const Params& p, Memory& memory, const Place& at) {
      Result result;
      RowVector<Target, float, Result> x_scales;
      ColumnVector<Target, float, Result> scales;
      block.load(x_scales, p.x_scales, at.row, 0);
      block.load(scales, p.scales, 0, at.col);
      block.for_each(result, acc, [](int, int, auto& x, auto& sum) { x = static_cast<float>(sum); });
      block.map(result, x_scales, scales, [](auto x, auto of_row, auto of_column) { return x * of_row * of_column; });
      End::apply(block, result, p.linear, memory, at);
    }
  };
};

}  // namespace tw::kernels::dequant_gemm

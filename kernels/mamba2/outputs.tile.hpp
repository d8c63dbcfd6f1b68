#pragma once

#include "kernels/mamba2/step_size.tile.hpp"

namespace tw::kernels::mamba2 {

/// y = (y + D x) silu(z), in place. A tile is R steps of one head.
template <class T, int R, int C>
struct SkipAndGate {
  static constexpr const char* source = "kernels/mamba2/outputs.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C>;
    struct Params {
      Global<Target, T, Values> y;           ///< [batch, head, time, dim]
      Global<Target, const T, Values> x, z;  ///< the same; z may have no elements
      Global<Target, const float> skip;      ///< [1, head, dim], or without elements
      Steps<Target> steps;
      int heads;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.n / p.heads, head = t.n - batch * p.heads, row0 = p.steps.begin() + t.m * R;
      Values y, x;
      ColumnVector<Target, float, Values> skip;
      block.load(y, p.y, row0, 0, head, batch);
      if (p.skip.cols > 0) {
        block.load(x, p.x, row0, 0, head, batch);
        block.load(skip, p.skip, head, 0);
        block.map(y, x, skip, [](auto o, auto value, auto d) { return o + value * d; });
      }
      if (p.z.cols > 0) {
        block.load(x, p.z, row0, 0, head, batch);
        block.map(y, x, [](auto o, auto gate) { return o * gate * sigmoid(gate); });
      }
      auto to = p.y;
      to.rows = p.steps.end();
      block.store(y, to, row0, 0, head, batch);
    }
  };
};

}  // namespace tw::kernels::mamba2

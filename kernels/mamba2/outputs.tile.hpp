#pragma once

#include "kernels/mamba2/step_size.tile.hpp"

namespace tw::kernels::mamba2 {

/// out + D x.
TW_INLINE void add_skip(auto& block, auto& out, const auto& x, const auto& skip) {
  block.map(out, x, skip, [](auto o, auto value, auto d) { return o + value * d; });
}
/// out silu(z).
TW_INLINE void apply_gate(auto& block, auto& out, const auto& z) {
  block.map(out, z, [](auto o, auto gate) { return o * gate * sigmoid(gate); });
}

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
        add_skip(block, y, x, skip);
      }
      if (p.z.cols > 0) {
        block.load(x, p.z, row0, 0, head, batch);
        apply_gate(block, y, x);
      }
      auto to = p.y;
      to.rows = p.steps.end();
      block.store(y, to, row0, 0, head, batch);
    }
  };
};

}  // namespace tw::kernels::mamba2

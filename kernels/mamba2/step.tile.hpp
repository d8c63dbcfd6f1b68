#pragma once

#include "kernels/mamba2/step_size.tile.hpp"
#include "tilewave/tile/compensated_exp.tile.hpp"

namespace tw::kernels::mamba2 {

/// Mamba-2 step by step, in f32: decoding, where a step reads and writes the state. A tile is R rows of the state of one head of one
/// sequence, all of its columns, in registers: the state is read once and written once, for any number of steps.
template <class T, class DT, class S, int R, int C>
struct Update {
  static constexpr const char* source = "kernels/mamba2/step.tile.hpp";

  template <class Target>
  struct On {
    /// 72 or 80 registers: 32 of the state, 8 each of x, z and the outputs. Element by element, 128.
    static constexpr int min_blocks = !Target::whole_pieces ? 4 : sizeof(S) == 2 ? 7 : 6;
    using Held = Rows<Target, float, R, C, 4, 16 / static_cast<int>(sizeof(S))>;
    using Inputs = Rows<Target, float, 4, 128, 4, 4>;
    struct Params {
      Global<Target, const T, Inputs> x, z;  ///< [batch, head, time, dim]; z may have no elements
      Global<Target, const DT> dt;           ///< [batch, time, head]
      Global<Target, const T, Held> b, c;    ///< [batch, group, time, state]
      Global<Target, const float> skip;      ///< [head, dim], or without elements
      Pointer<Target, const float> rate, bias;
      i64 rate_stride, bias_stride;        ///< of heads; bias may be null
      Global<Target, const S, Held> from;  ///< [slot, head, dim, state]
      Global<Target, S, Held> to;          ///< the same
      Global<Target, T, Inputs> y;         ///< as x
      Pointer<Target, const i32> slots;    ///< [batch], or null
      int count;                           ///< of slots
      int heads, shared;                   ///< shared: heads for each group
      int length;
      StepSize size;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.m / p.heads, head = t.m - batch * p.heads, row0 = t.n * R, group = head / p.shared;
      int slot = batch;
      if (p.slots) slot = p.slots[batch];
      if (slot < 0 || slot >= p.count) return;
      Held state, products;
      RowVector<Target, float, Held> x, z, skip, sums;
      using Number = remove_const_reference<decltype(sums[0])>;
      const Number rate = p.rate[head * p.rate_stride];
      Number bias = 0.0f;
      if (p.bias) bias = p.bias[head * p.bias_stride];
      ColumnVector<Target, float, Held> b, c;
      block.load(state, p.from, row0, 0, head, slot);
      block.load_from_row(skip, p.skip, head, row0);
      const bool gated = p.z.cols > 0;
      TW_NO_UNROLL
      for (int time = 0; time < p.length; ++time) {
        block.load(b, p.b, time, 0, group, batch);
        block.load(c, p.c, time, 0, group, batch);
        block.load_from_row(x, p.x, time, row0, head, batch);
        if (gated) block.load_from_row(z, p.z, time, row0, head, batch);
        const Number size = p.size.of(Number(block.value(p.dt, time, head, batch)) + bias);
        const auto decay = compensated_exp(log_decay(size, rate));
        block.map(state, x, b, [=](auto h, auto value, auto key) { return h * decay.high + (h * decay.low + value * size * key); });
        block.for_each(products, state, [](int, int, auto& to, auto& h) { to = h; });
        block.map(products, c, [](auto h, auto query) { return h * query; });
        block.rows(products, [&](int i, auto row) { sums[i] = row.sum(); });
        block.for_rows(sums, [&](int, int i, auto& sum) {
          sum = sum + skip[i] * x[i];
          if (gated) sum = sum * z[i] * sigmoid(z[i]);
        });
        block.store_to_row(sums, p.y, time, row0, head, batch);
      }
      block.store(state, p.to, row0, 0, head, slot);
    }
  };
};

}  // namespace tw::kernels::mamba2

#pragma once

#include "kernels/mamba2/step_size.tile.hpp"

// From the continuous system to a recurrence: step sizes, their decays, and the inputs that are added to the state.

namespace tw::kernels::mamba2 {

/// Step sizes and logarithms of decays. A tile is R steps of C heads.
template <class T, int R, int C>
struct StepSizes {
  static constexpr const char* source = "kernels/mamba2/discretize.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C, 4, 4>;
    struct Params {
      Global<Target, const T, Values> dt;      ///< [batch, time, head]
      Global<Target, const float> rate, bias;  ///< [1, head]; bias may have no elements
      Global<Target, float, Values> sizes, g;  ///< [batch, time, head]
      Pointer<Target, const i32> seq_idx;      ///< [batch, time], or null
      i64 seq_batch, seq_time;                 ///< strides
      StepSize size;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C, batch = t.batch;
      Values x;
      ColumnVector<Target, float, Values> rate, bias;
      block.load(x, p.dt, row0, col0, batch);
      block.load(rate, p.rate, 0, col0);
      block.load(bias, p.bias, 0, col0);
      const StepSize size = p.size;
      block.map(x, bias, [=](auto dt, auto b) { return size.of(dt + b); });
      block.store(x, p.sizes, row0, col0, batch);
      block.map(x, rate, [](auto dt, auto r) { return log_decay(dt, r); });
      if (p.seq_idx) {
        const auto begins = [&](int time) {
          const i64 at = batch * p.seq_batch + time * p.seq_time;
          return time > 0 && time < p.dt.rows && p.seq_idx[at] != p.seq_idx[at - p.seq_time];
        };
        RowVector<Target, float, Values> forgets;
        block.for_rows(forgets, [&](int row, int, auto& f) { f = begins(row0 + row) ? 1.0f : 0.0f; });
        block.map(x, forgets, [](auto g, auto f) { return f > 0.0f ? decltype(g)(-kInfinity) : g; });
      }
      block.store(x, p.g, row0, col0, batch);
    }
  };
};

/// x dt. A tile is R steps of one head.
template <class T, int R, int C>
struct ScaleInputs {
  static constexpr const char* source = "kernels/mamba2/discretize.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C>;
    struct Params {
      Global<Target, const T, Values> x;  ///< [batch, head, time, dim]
      Global<Target, const float> sizes;  ///< [batch, head, time, 1]
      Global<Target, T, Values> scaled;   ///< as x
      int heads;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.n / p.heads, head = t.n - batch * p.heads, row0 = t.m * R;
      Values x;
      RowVector<Target, float, Values> sizes;
      block.load(x, p.x, row0, 0, head, batch);
      block.load(sizes, p.sizes, row0, 0, head, batch);
      block.map(x, sizes, [](auto value, auto size) { return value * size; });
      block.store(x, p.scaled, row0, 0, head, batch);
    }
  };
};

}  // namespace tw::kernels::mamba2

#pragma once

#include "kernels/linear_attention/chunks.tile.hpp"
#include "tilewave/tile/compensated_exp.tile.hpp"

namespace tw::kernels::linear_attention {

/// Linear attention step by step, in f32 throughout: for decoding, where a step reads and writes the state, and for tensors of f32. A tile
/// is C columns of the state of one head of one sequence, in registers.
///
/// Backwards, a step's state decays by the gate of the step after it: a step is seen by itself and those before it, with the gates between.
///
/// Without `kOwnStep` an output lacks what its own step adds to the state, and the final state what the last step adds.
template <class T, int R, int C, int kWarps, bool kOwnStep = true>
struct Recurrence {
  static constexpr const char* source = "kernels/linear_attention/recurrence.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = kWarps;
    /// 80 registers: 32 of the state, 16 of q and k. An SM has 96 KB of states in flight. Without a step's own part k and v are kept
    /// longer.
    static constexpr int min_blocks = (kOwnStep ? 24 : 20) / warps;
    using Held = Rows<Target, float, R, C, warps, 4>;
    using OutputRow = Rows<Target, float, warps * 128 / C, C, warps, 4>;  ///< a piece for each thread; only the first row is stored
    struct Params {
      Global<Target, const T> q, k;               ///< [batch, head, dim, time]
      Global<Target, const T> v;                  ///< [batch, head, time, columns]
      Pointer<Target, const float> g;             ///< [batch, head, time], or null
      i64 g_batch, g_head, g_time;                ///< strides
      Global<Target, const float, Held> initial;  ///< [sequence, head, dim, columns], or without elements: 0
      Global<Target, float, Held> final;          ///< as initial, or the same; without elements it is not stored
      Global<Target, T> out;                      ///< [batch, head, time, columns]
      Chunks<Target> chunks;
      float scale, added_scale;  ///< of the outputs; of what is added to the state
      int heads;
      int q_shared, k_shared, v_shared;  ///< heads of the state for each head of q, k and v
      bool backwards;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int sequence = t.m / p.heads, head = t.m - sequence * p.heads, col0 = t.n * C;
      const auto steps = p.chunks.sequence(sequence);
      const auto gate = [&](int time) { return compensated_exp(p.g[steps.batch * p.g_batch + head * p.g_head + time * p.g_time]); };
      using Decay = decltype(gate(0));
      Held state, products;
      OutputRow out;
      block.fill(out, 0.0f);
      RowVector<Target, float, Held> q, k;
      ColumnVector<Target, float, Held> v, sums;
      block.load(state, p.initial, 0, col0, head, sequence);
      TW_NO_UNROLL
      for (int step = 0; step < steps.size; ++step) {
        const int time = steps.begin + (p.backwards ? steps.size - 1 - step : step);
        block.load(k, p.k, 0, time, head / p.k_shared, steps.batch);
        block.load(q, p.q, 0, time, head / p.q_shared, steps.batch);
        block.load(v, p.v, time, col0, head / p.v_shared, steps.batch);
        // The gate is the last load: its branch waits for it.
        Decay decay{1.0f, 0.0f};
        if (p.g && (!p.backwards || step > 0)) decay = gate(p.backwards ? time + 1 : time);
        const float added = p.added_scale;
        const auto multiply = [&] {
          block.for_each(products, state, [](int, int, auto& x, auto& s) { x = s; });
          block.map(products, q, [](auto s, auto x) { return s * x; });
          block.column_fold(products, sums, [](auto a, auto b) { return a + b; });
        };
        if constexpr (kOwnStep) {
          block.map(state, k, v, [=](auto s, auto x, auto y) { return s * decay.high + (s * decay.low + x * added * y); });
          multiply();
        } else {
          block.for_each(state, [=](int, int, auto& s) { s = s * decay.high + s * decay.low; });
          multiply();
          if (step + 1 < steps.size) block.map(state, k, v, [=](auto s, auto x, auto y) { return s + x * added * y; });
        }
        block.map(out, sums, p.scale, [](auto, auto sum, auto scale) { return sum * scale; });
        block.scatter(
            out, p.out, [time](int row) { return row == 0 ? time : -1; }, col0, head, steps.batch);
      }
      if (p.g && p.backwards && steps.size > 0) {
        const auto decay = gate(steps.begin);
        block.for_each(state, [&](int, int, auto& x) { x = x * decay.high + x * decay.low; });
      }
      block.store(state, p.final, 0, col0, head, sequence);
    }
  };
};

}  // namespace tw::kernels::linear_attention

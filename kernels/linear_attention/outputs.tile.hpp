#pragma once

#include "kernels/linear_attention/chunks.tile.hpp"

namespace tw::kernels::linear_attention {

/// Blocks stay, and load their next chunk while they store the last one.
struct InOrder {
  static constexpr Dispatch dispatch = Dispatch::persistent;
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) { return RowMajor::at(grid, i); }
};

/// How the state of a chunk is stored: [Dk, Dv], or as what its transpose is multiplied from.
enum class StateForm { as_stored, transposed };

/// The outputs of a chunk from the state before it. A tile is N columns of one chunk of one head.
template <class T, int D, int N, StateForm kForm>
struct Outputs {
  static constexpr const char* source = "kernels/linear_attention/outputs.tile.hpp";
  static constexpr bool transposed = kForm == StateForm::transposed;

  template <class Target>
  struct On {
    using Q = Shared<Target, T, kChunk, D>;
    using V = Shared<Target, T, kChunk, N, Contract::rows>;
    using S = conditional<transposed, Shared<Target, T, N, D>, Shared<Target, T, D, N, Contract::rows>>;
    using Exponents = SharedVector<Target, float, kChunk>;
    using Scores = Fragment<Target, float, kChunk, kChunk>;
    using Weights = Operand<Target, T, kChunk, kChunk>;
    using Out = Staging<Target, T, kChunk, N>;
    using Schedule = InOrder;
    static constexpr int rows = kChunk;
    static constexpr int min_blocks = D <= 128 ? 2 : 1;  ///< as many as fit the shared memory
    static constexpr int vector_bytes = 64;              // on a CPU the exponentials take long

    struct Params {
      Global<Target, const T, Q> q, k;                   ///< [batch, head, time, D]
      Global<Target, const T, V> v;                      ///< [batch, head, time, columns]
      Global<Target, const T, S> states;                 ///< [chunk, head, D, columns]; transposed: [..., columns, D]
      Global<Target, const float, Exponents> exponents;  ///< [head, chunk, step]
      Global<Target, T, Out> out;                        ///< [batch, head, time, columns]
      Chunks<Target> chunks;
      float scale, state_scale;          ///< of products of q and k; of the state's part
      int q_shared, k_shared, v_shared;  ///< heads of `out` for each head of q, k and v
      bool backwards;                    ///< steps see themselves and those after them
    };
    struct Keys {
      Q q, k;
      Exponents exponents;
    };
    struct ValuesAndState {
      V v;
      S s;
    };
    struct Memory {
      Ring<Target, Keys, 1> keys;
      Ring<Target, ValuesAndState, 1> values;
      Out out;
      explicit constexpr Memory(auto& block) : keys(block), values(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, kChunk, N> out;
    };
    struct Locals {
      Scores scores;
      Weights weights;
    };
    struct Work {
      int number, head, col0;
      int batch, first, end;
      bool empty;
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      const auto chunk = p.chunks.chunk(t.m);
      return {t.m, t.n, t.batch * N, chunk.batch, chunk.first, chunk.end, chunk.empty};
    }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.empty ? 0 : 1; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int, Memory& memory) {
      producer.put(memory.keys, [&](auto copy, Keys& slot) {
        copy.tile(p.q, slot.q, w.first, 0, w.head / p.q_shared, w.batch);
        copy.tile(p.k, slot.k, w.first, 0, w.head / p.k_shared, w.batch);
        copy.vector(p.exponents, slot.exponents, w.head, w.number * kChunk);
      });
      producer.put(memory.values, [&](auto copy, ValuesAndState& slot) {
        copy.tile(p.v, slot.v, w.first, w.col0, w.head / p.v_shared, w.batch);
        copy.tile(p.states, slot.s, transposed ? w.col0 : 0, transposed ? 0 : w.col0, w.head, w.number);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.empty) return;
      const Keys& keys = block.take(memory.keys);
      ValuesAndState& values = block.take(memory.values);
      // Rows after a packed sequence's end are another's. Their scores are replaced; their values may be NaN, which weights of 0 do not
      // hide.
      if (w.end - w.first < kChunk) block.zero_rows(values.v, w.end - w.first);
      Scores scores;
      Weights weights;
      RowVector<Target, float, Scores> exponents, factors;
      ColumnVector<Target, float, Scores> exponents_of_columns;
      block.mma(scores, keys.q, keys.k, true);
      block.mma(state.out, keys.q, values.s, true);
      block.load(exponents, keys.exponents);
      block.load(exponents_of_columns, keys.exponents);
      block.for_rows(exponents, [&](int, int i, auto& x) { factors[i] = exp2(x) * p.state_scale; });
      block.wait(leave<in_flight<Target>>, scores);
      block.map(scores, exponents, exponents_of_columns, p.scale,
                [](auto x, auto to, auto from, auto scale) { return x * scale * exp2(to - from); });
      const int sign = p.backwards ? -1 : 1, steps = w.end - w.first;
      block.for_each(scores, [&](int row, int col, auto& x) {
        if (sign * (row - col) < 0 || col >= steps) x = 0.0f;
      });
      block.convert(weights, scores);
      block.wait(leave<0>, state.out);
      block.release(memory.keys);
      block.map(state.out, factors, [](auto x, auto factor) { return x * factor; });
      block.mma(state.out, weights, values.v, false);
      block.wait(leave<0>, state.out);
      block.release(memory.values);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (!w.empty) block.store(state.out, memory.out, p.out, w.first, w.col0, w.head, w.batch, w.end);
    }
  };
};

}  // namespace tw::kernels::linear_attention

#pragma once

#include "kernels/linear_attention/chunks.tile.hpp"
#include "tilewave/tile/compensated_exp.tile.hpp"

namespace tw::kernels::linear_attention {

/// States and outputs in one walk: the state of a head never leaves its block, so the bytes are those of q, k, v and the outputs. A tile is
/// N columns of the state of one head of one sequence. It pays if there are as many tiles as SMs.
///
/// Of 128 columns two warpgroups divide the columns of scores and outputs, and the state: its rows where it has 128, otherwise its columns.
/// Of 64 columns one warpgroup has all, and two blocks share an SM.
template <class T, int D, int N, int kStages>
struct Walk {
  static constexpr const char* source = "kernels/linear_attention/walk.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int rows = N;
    static constexpr int warpgroups = rows / 64;
    static constexpr int min_blocks = Target::whole_pieces ? 2 / warpgroups : 1;
    static constexpr bool moves_registers = true;
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take long
    using Q = Shared<Target, T, kChunk, D>;
    using V = Shared<Target, T, kChunk, N, Contract::rows>;
    using Exponents = SharedVector<Target, float, kChunk>;
    using Scores = Fragment<Target, float, kChunk, kChunk, warpgroups>;
    using Values = Fragment<Target, float, kChunk, N, warpgroups>;

    struct Params {
      Global<Target, const T, Q> q, k;                      ///< [batch, head, time, D]
      Global<Target, const T, V> v;                         ///< [batch, head, time, columns]
      Global<Target, const float, Exponents> until, after;  ///< [head, chunk, step]: sums of gates on the way to a step, and after it
      Global<Target, const float> initial;                  ///< [sequence, head, D, columns], or without elements: 0
      Global<Target, float> final;                          ///< as initial; without elements it is not stored
      Global<Target, T> out;                                ///< [batch, head, time, columns]
      Chunks<Target> chunks;
      float scale, added_scale;  ///< of the outputs; of what is added to the state
      int heads;
      int q_shared, k_shared, v_shared;  ///< heads of the state for each head of q, k and v
      bool backwards;
    };
    struct Slot {
      Q q, k;
      V v;
      Exponents until, after;
    };
    struct Memory {
      Ring<Target, Slot, kStages> ring;
      Buffer<Target, T, D, N, Contract::rows> state;
      Buffer<Target, T, kChunk, N, Contract::rows> added;
      Buffer<Target, T, kChunk, kChunk> weights;
      explicit constexpr Memory(auto& block) : ring(block), state(block), added(block), weights(block) {}
    };
    struct State {
      Fragment<Target, float, D, N, warpgroups> sum;
    };
    struct Locals {
      Scores scores;
      Values added;
    };
    struct Work {
      int sequence, head, col0;
      int batch, begin, size, first_chunk;
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      const int sequence = t.m / p.heads;
      const auto found = p.chunks.sequence(sequence);
      return {sequence, t.m - sequence * p.heads, t.n * N, found.batch, found.begin, found.size, found.first_chunk};
    }
    TW_INLINE static int steps(const Params&, const Work& w) { return ceil_div(w.size, kChunk); }
    TW_INLINE static int chunk_of(const Params& p, const Work& w, int step) {
      return p.backwards ? ceil_div(w.size, kChunk) - 1 - step : step;
    }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int chunk = chunk_of(p, w, step), row = w.begin + chunk * kChunk, sums = (w.first_chunk + chunk) * kChunk;
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.q, slot.q, row, 0, w.head / p.q_shared, w.batch);
        copy.tile(p.k, slot.k, row, 0, w.head / p.k_shared, w.batch);
        copy.tile(p.v, slot.v, row, w.col0, w.head / p.v_shared, w.batch);
        copy.vector(p.until, slot.until, w.head, sums);
        copy.vector(p.after, slot.after, w.head, sums);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.load(state.sum, p.initial, 0, w.col0, w.head, w.sequence);
      const int n = steps(p, w);
      if (n == 0) return;
      Scores scores;
      Values added;
      Slot* slot = &take(block, memory, w, chunk_of(p, w, 0));
      block.fence();
      block.sync();
      block.mma(scores, slot->q, slot->k, true);
      prepare(block, p, *slot, w, chunk_of(p, w, 0), leave<0>, scores, added);
      int chunk = chunk_of(p, w, 0);
      for (int later = n - 1; later >= 0; --later) {  // chunks after this one
        const int next_chunk = later == 0 ? chunk : p.backwards ? chunk - 1 : chunk + 1;
        block.store(state.sum, memory.state);
        block.store(added, memory.added);
        block.store(scores, memory.weights);
        // After the last chunk this one is prepared again, for nothing: a product under a condition would not be asynchronous.
        Slot* const next = later > 0 ? &take(block, memory, w, next_chunk) : slot;
        block.fence();
        block.sync();
        const auto decay = decay_of((p.backwards ? slot->after : slot->until)[kChunk - 1]);  // the chunk's sum from its start
        Values out;
        block.mma(out, slot->q, memory.state, true);
        block.mma(scores, next->q, next->k, true);
        block.for_each(state.sum, [&](int, int, auto& x) {
          if constexpr (is_same<T, float>)
            x = x * decay.high + x * decay.low;
          else
            x = x * decay;
        });
        block.mma(state.sum, view<Contract::rows>(slot->k), memory.added, false);
        RowVector<Target, float, Values> until;
        block.load(until, slot->until);
        block.for_rows(until, [](int, int, auto& x) { x = exp2(x); });
        block.wait(leave<2>, out);
        block.map(out, until, [](auto x, auto factor) { return x * factor; });
        block.mma(out, memory.weights, slot->v, false);

        prepare(block, p, *next, w, next_chunk, leave<2>, scores, added);
        block.wait(leave<0>, state.sum, out);
        block.map(out, p.scale, [](auto x, auto scale) { return x * scale; });
        const int first = w.begin + chunk * kChunk, end = w.begin + w.size;
        block.scatter(
            out, p.out, [&](int row) { return first + row < end ? first + row : -1; }, w.col0, w.head, w.batch);
        block.sync();
        block.release(memory.ring);
        slot = next;
        chunk = next_chunk;
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      block.store(state.sum, p.final, 0, w.col0, w.head, w.sequence);
    }

   private:
    /// A chunk's factor of the state. With f32 its rounding would add up over all chunks that a state remembers.
    TW_INLINE static auto decay_of(auto exponent) {
      if constexpr (is_same<T, float>)
        return compensated_exp(exponent * kLn2);
      else
        return exp2(exponent);
    }
    TW_INLINE static Slot& take(auto& block, Memory& memory, const Work& w, int chunk) {
      Slot& slot = block.take(memory.ring);
      // The rows after a packed sequence's end are another's, and may be NaN.
      const int left = w.size - chunk * kChunk;
      if (left < kChunk) {
        block.zero_rows(slot.k, left);
        block.zero_rows(slot.v, left);
      }
      return slot;
    }
    /// What a chunk needs apart from the state before it: turns its scores into weights of v, and v into what k adds to the state. Factors
    /// of the dimension that the state's product sums over must be in an operand.
    TW_INLINE static void prepare(auto& block, const Params& p, Slot& slot, const Work& w, int chunk, auto others, Scores& scores,
                                  Values& added) {
      const int left = w.size - chunk * kChunk, sign = p.backwards ? -1 : 1;
      RowVector<Target, float, Values> after;
      RowVector<Target, float, Scores> until;
      ColumnVector<Target, float, Scores> until_of_columns;
      block.load(added, slot.v);
      block.load(after, slot.after);
      block.for_rows(after, [&](int, int, auto& x) { x = exp2(x) * p.added_scale; });
      block.map(added, after, [](auto x, auto factor) { return x * factor; });
      if (left < kChunk) {
        block.for_each(added, [&](int row, int, auto& x) {
          if (row >= left) x = 0.0f;
        });
      }
      block.load(until, slot.until);
      block.load(until_of_columns, slot.until);
      block.wait(others, scores);
      block.map(scores, until, until_of_columns, [](auto x, auto to, auto from) { return x * exp2(to - from); });
      block.for_each(scores, [&](int row, int col, auto& x) {
        if (sign * (row - col) < 0 || col >= left) x = 0.0f;
      });
      // What is added to the state is scaled; the scores must be scaled the same.
      block.map(scores, p.added_scale, [](auto x, auto scale) { return x * scale; });
    }
  };
};

}  // namespace tw::kernels::linear_attention

#pragma once

#include "kernels/linear_attention/chunks.tile.hpp"

namespace tw::kernels::linear_attention {

/// The state before each chunk, and after the last one. A tile is a part of the state of one head of one sequence, kChunk x N, and walks
/// the chunks: from the first to the last, or backwards.
///
/// The rows of v are scaled on their way through registers, because factors of the dimension that a product sums over must be in an
/// operand.
template <class T, int N, int kStages>
struct States {
  static constexpr const char* source = "kernels/linear_attention/states.tile.hpp";
  static constexpr int M = 64;

  template <class Target>
  struct On {
    using K = Shared<Target, T, kChunk, M, Contract::rows>;
    using V = Shared<Target, T, kChunk, N>;
    using Exponents = SharedVector<Target, float, kChunk>;
    using Values = Fragment<Target, float, kChunk, N>;
    using Out = Staging<Target, T, M, N>;
    static constexpr int rows = M;
    static constexpr int min_blocks = 2;  ///< one waits for a product while the other scales

    struct Params {
      Global<Target, const T, K> k;                      ///< [batch, head, time, Dk]
      Global<Target, const T, V> v;                      ///< [batch, head, time, Dv]
      Global<Target, const float, Exponents> exponents;  ///< [head, chunk, step]: of the factors of a chunk's products
      Pointer<Target, const float> from_start;           ///< [head, chunk, step]: the last step's is the chunk's decay
      Global<Target, const float> initial;               ///< [sequence, head, Dk, Dv], or without elements: 0
      Global<Target, T, Out> states;                     ///< [chunk, head, Dk, Dv]
      Global<Target, float> final;                       ///< as initial; without elements it is not stored
      Chunks<Target> chunks;
      float scale;             ///< of what is added
      int heads;               ///< of states
      int k_shared, v_shared;  ///< heads of states for each head of k and v
      int columns;             ///< tiles of N columns
      bool backwards;
    };
    struct Slot {
      K k;
      V v;
      Exponents exponents;
    };
    struct Memory {
      Ring<Target, Slot, kStages> ring;
      Buffer<Target, T, kChunk, N, Contract::rows> scaled;
      Out out;
      explicit constexpr Memory(auto& block) : ring(block), scaled(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, M, N> sum;
    };
    struct Locals {
      Values values;
    };
    struct Work {
      int sequence, head, row0, col0;
      int batch, begin, size, first_chunk;
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      const int sequence = t.m / p.heads, row = t.n / p.columns;
      const auto found = p.chunks.sequence(sequence);
      return {sequence,   t.m - sequence * p.heads, row * M, (t.n - row * p.columns) * N, found.batch, found.begin,
              found.size, found.first_chunk};
    }
    TW_INLINE static int steps(const Params&, const Work& w) { return ceil_div(w.size, kChunk); }
    TW_INLINE static int chunk_of(const Params& p, const Work& w, int step) {
      return p.backwards ? ceil_div(w.size, kChunk) - 1 - step : step;
    }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int chunk = chunk_of(p, w, step), row = w.begin + chunk * kChunk;
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.k, slot.k, row, w.row0, w.head / p.k_shared, w.batch);
        copy.tile(p.v, slot.v, row, w.col0, w.head / p.v_shared, w.batch);
        copy.vector(p.exponents, slot.exponents, w.head, (w.first_chunk + chunk) * kChunk);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.load(state.sum, p.initial, w.row0, w.col0, w.head, w.sequence);
      const int n = steps(p, w);
      for (int step = 0; step < n; ++step) {
        const int chunk = chunk_of(p, w, step), number = w.first_chunk + chunk, left = w.size - chunk * kChunk;
        const auto decay = exp2(p.from_start[static_cast<i64>(w.head) * p.exponents.cols + number * kChunk + kChunk - 1]);
        block.store(state.sum, memory.out, p.states, w.row0, w.col0, w.head, number);
        Slot& slot = block.take(memory.ring);
        // The rows after a packed sequence's end are another's, and may be NaN.
        if (left < kChunk) block.zero_rows(slot.k, left);
        Values values;
        RowVector<Target, float, Values> factors;
        block.load(values, slot.v);
        block.load(factors, slot.exponents);
        block.for_rows(factors, [&](int, int, auto& x) { x = exp2(x) * p.scale; });
        block.map(values, factors, [](auto x, auto factor) { return x * factor; });
        block.for_each(values, [&](int row, int, auto& x) {
          if (row >= left) x = 0.0f;
        });
        block.store(values, memory.scaled);
        block.fence();
        block.for_each(state.sum, [&](int, int, auto& x) { x = x * decay; });
        block.sync();
        block.mma(state.sum, slot.k, memory.scaled, false);
        block.wait(leave<0>, state.sum);
        block.release(memory.ring);
        block.sync();
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      block.store(state.sum, p.final, w.row0, w.col0, w.head, w.sequence);
    }
  };
};

}  // namespace tw::kernels::linear_attention

#pragma once

#include "kernels/mamba2/chunk_work.tile.hpp"
#include "kernels/mamba2/exponents.tile.hpp"
#include "kernels/mamba2/outputs.tile.hpp"

// The last two of the scan's five steps (chunk_states.tile.hpp has the others): products of C and B inside each chunk, and the outputs.
// With G = dA_cumsum and h the state before the chunk:
//
//   CB(i, j) = C_i B_j
//   y_i = (exp(G_i) h C_i + sum over j <= i of CB(i, j) exp(G_i - G_j) dt_j x_j + D x_i) silu(z_i)

namespace tw::kernels::mamba2 {

/// Products of the rows of two matrices inside each chunk. A tile is M x N of them.
template <class T>
struct ChunkProducts {
  static constexpr const char* source = "kernels/mamba2/chunk_outputs.tile.hpp";
  static constexpr int M = 64, N = 64, K = 64;

  template <class Target>
  struct On {
    using A = Shared<Target, T, M, K>;
    using B = Shared<Target, T, N, K>;
    static constexpr int rows = M;
    static constexpr int min_blocks = 2;

    struct Params {
      Global<Target, const T, A> a;  ///< [batch, group, time, state]
      Global<Target, const T, B> b;
      Global<Target, float> out;  ///< [batch * chunk, group, chunk_size, chunk_size]
      int groups, chunks;
      int columns;  ///< tiles of N columns
      bool causal;  ///< products with later rows are 0
    };
    struct Slot {
      A a;
      B b;
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Fragment<Target, float, M, N> sum;
    };
    struct Work {
      int batch, chunk, group, row0, col0;
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      const int number = t.m / p.groups, batch = number / p.chunks, row = t.n / p.columns;
      return {batch, number - batch * p.chunks, t.m - number * p.groups, row * M, (t.n - row * p.columns) * N};
    }
    TW_INLINE static int steps(const Params& p, const Work& w) { return p.causal && w.col0 > w.row0 ? 0 : ceil_div(p.a.cols, K); }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int first = w.chunk * p.out.rows;
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.a, slot.a, first + w.row0, step * K, w.group, w.batch);
        copy.tile(p.b, slot.b, first + w.col0, step * K, w.group, w.batch);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.fill(state.sum, 0.0f);
      const int n = steps(p, w);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.ring);
        block.mma(state.sum, slot.a, slot.b, false);
        block.wait(leave<0>, state.sum);
        block.release(memory.ring);
      }
      block.for_each(state.sum, [&](int row, int col, auto& x) {
        if (p.causal && w.col0 + col > w.row0 + row) x = 0.0f;
      });
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      block.store(state.sum, p.out, w.row0, w.col0, w.group, w.batch * p.chunks + w.chunk);
    }
  };
};

/// The outputs. A tile is M steps of one chunk and N columns of one head. First C is multiplied by the state, K of its columns in a step;
/// then come the steps of the chunk up to the tile's last one, K at a time.
template <class T>
struct ChunkScan {
  static constexpr const char* source = "kernels/mamba2/chunk_outputs.tile.hpp";
  static constexpr int M = 64, N = 64, K = 64;

  template <class Target>
  struct On {
    using C = Shared<Target, T, M, K>;
    using S = Shared<Target, T, N, K>;
    using Products = Shared<Target, float, M, K>;
    using X = Shared<Target, T, K, N, Contract::rows>;
    using Vector = SharedVector<Target, float, K>;
    using Scores = Fragment<Target, float, M, K>;
    using Weights = Operand<Target, T, M, K>;
    using Values = Fragment<Target, float, M, N>;
    using Out = Staging<Target, T, M, N>;
    static constexpr int rows = M;
    static constexpr int min_blocks = 2;     ///< one waits for a product while the other decays scores
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take long
    static constexpr bool moves_registers = true;

    struct Params {
      Global<Target, const T, C> c;                   ///< [batch, group, time, state]
      Global<Target, const T, S> states;              ///< [batch * chunk, head, dim, state]
      Global<Target, const float, Products> cb;       ///< [batch * chunk, group, chunk_size, chunk_size]
      Global<Target, const T, X> x;                   ///< [batch, head, time, dim]
      Global<Target, const float, Vector> sizes, g;   ///< [batch * head, chunk * chunk_size + step]
      Global<Target, const T> z;                      ///< as x, or without elements
      Global<Target, const float> skip;               ///< [head, dim], or without elements
      Global<Target, T> ungated;                      ///< as x; without elements it is not stored
      Global<Target, T, Out> y;                       ///< as x
      int heads, shared, chunks, chunk_size, length;  ///< shared: heads for each group
      int columns;                                    ///< tiles of N columns
    };
    struct StateSlot {
      C c;
      S states;
      Vector g;  ///< of the tile's steps
    };
    struct InputSlot {
      Products cb;
      X x;
      Vector sizes, g;
    };
    struct Memory {
      Ring<Target, StateSlot, 2> states;
      Ring<Target, InputSlot, 2> inputs;
      Out out;
      explicit constexpr Memory(auto& block) : states(block), inputs(block), out(block) {}
    };
    struct State {
      Values out;
    };
    struct Locals {
      Scores scores;
      Weights weights;
    };
    using Work = ChunkWork;

    TW_INLINE static Work work(const Params& p, Tile t) { return chunk_work<M, N>(p, p.heads, t); }
    TW_INLINE static int state_steps(const Params& p) { return ceil_div(p.c.cols, K); }
    TW_INLINE static int steps(const Params& p, const Work& w) { return w.row0 < w.count ? state_steps(p) + w.row0 / K + 1 : 0; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int before = state_steps(p), row = w.batch * p.heads + w.head, number = w.batch * p.chunks + w.chunk;
      if (step < before) {
        producer.put(memory.states, [&](auto copy, StateSlot& slot) {
          copy.tile(p.c, slot.c, w.first + w.row0, step * K, w.head / p.shared, w.batch);
          copy.tile(p.states, slot.states, w.col0, step * K, w.head, number);
          copy.vector(p.g, slot.g, row, w.first + w.row0);
        });
      } else {
        const int at = (step - before) * K;
        producer.put(memory.inputs, [&](auto copy, InputSlot& slot) {
          copy.tile(p.cb, slot.cb, w.row0, at, w.head / p.shared, number);
          copy.tile(p.x, slot.x, w.first + at, w.col0, w.head, w.batch);
          copy.vector(p.sizes, slot.sizes, row, w.first + at);
          copy.vector(p.g, slot.g, row, w.first + at);
        });
      }
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const int before = state_steps(p), n = steps(p, w);
      RowVector<Target, float, Scores> until;
      RowVector<Target, float, Values> decay;
      for (int step = 0; step < min(before, n); ++step) {
        const StateSlot& slot = block.take(memory.states);
        block.mma(state.out, slot.c, slot.states, step == 0);
        block.load(until, slot.g);
        block.load(decay, slot.g);
        block.wait(leave<0>, state.out);
        block.release(memory.states);
      }
      if (n > 0) {
        block.for_rows(decay, [](int, int, auto& g) { g = exp(g); });
        block.map(state.out, decay, [](auto x, auto factor) { return x * factor; });
      }
      for (int step = before; step < n; ++step) {
        InputSlot& slot = block.take(memory.inputs);
        const int at = (step - before) * K, left = w.count - at;
        // The rows after the chunk's end are another's, and may be NaN.
        if (left < K) block.zero_rows(slot.x, left);
        Scores scores;
        Weights weights;
        ColumnVector<Target, float, Scores> since, sizes;
        block.load(scores, slot.cb);
        block.load(since, slot.g);
        block.load(sizes, slot.sizes);
        block.map(scores, sizes, [](auto x, auto size) { return x * size; });
        decay_scores(block, scores, until, since, kLog2E, w.row0 - at, left);
        block.convert(weights, scores);
        block.mma(state.out, weights, slot.x, false);
        block.wait(leave<0>, state.out);
        if (p.skip.cols > 0 && at == w.row0) {
          Values x;
          ColumnVector<Target, float, Values> skip;
          block.load(x, slot.x);
          block.load(skip, p.skip, w.head, w.col0);
          add_skip(block, state.out, x, skip);
        }
        block.release(memory.inputs);
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const int row = w.first + w.row0, end = w.first + w.count;
      if (row >= end) return;
      if (p.ungated.cols > 0) {
        auto to = p.ungated;
        to.rows = end;
        block.store(state.out, to, row, w.col0, w.head, w.batch);
      }
      if (p.z.cols > 0) {
        Values z;
        block.load(z, p.z, row, w.col0, w.head, w.batch);
        apply_gate(block, state.out, z);
      }
      block.store(state.out, memory.out, p.y, row, w.col0, w.head, w.batch, end);
    }
  };
};

}  // namespace tw::kernels::mamba2

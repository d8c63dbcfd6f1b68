#pragma once

#include "kernels/mamba2/chunk_work.tile.hpp"
#include "kernels/mamba2/exponents.tile.hpp"

// The scan in five steps, of which three are here: the cumulative sums of dt A inside chunks of L steps, what each chunk adds to the
// state, and the state before each chunk. With G = dA_cumsum and h the state before a chunk:
//
//   dt_i = clamp(softplus(dt_i + dt_bias))     G_i = sum over j <= i of dt_j A
//   added = sum over i of exp(G_L - G_i) dt_i x_i B_i^T
//   h' = exp(G_L) h + added
//
// Steps beyond the sequence's end have dt = 0: they neither decay nor add.

namespace tw::kernels::mamba2 {

/// dt as the scan uses it, and its cumulative sums times A. A tile is one chunk, of at most L steps, of R heads.
template <class T, int R, int L>
struct ChunkCumsum {
  static constexpr const char* source = "kernels/mamba2/chunk_states.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, L, 4, 4>;
    struct Params {
      Global<Target, const T> dt;                 ///< [batch, head, time]
      Global<Target, const float> rate, bias;     ///< [head, 1]; bias may have no elements
      Global<Target, float, Values> sizes, sums;  ///< [batch, chunk, head, step]
      Pointer<Target, const i32> seq_idx;         ///< [batch, time], or null
      i64 seq_batch, seq_time;                    ///< strides
      StepSize size;
      int chunks, length;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.m / p.chunks, chunk = t.m - batch * p.chunks, head0 = t.n * R;
      const int first = chunk * p.sums.cols, end = min(first + p.sums.cols, p.length);
      RowVector<Target, float, Values> rate, bias;
      block.load(rate, p.rate, head0, 0);
      block.load(bias, p.bias, head0, 0);
      Values sizes, sums;
      load_sizes(block, p, sizes, bias, head0, batch, first);
      block.for_each(sizes, [&](int, int col, auto& x) {
        if (first + col >= end) x = 0.0f;
      });
      block.store(sizes, p.sizes, head0, 0, chunk, batch);
      step_exponents(block, p, sizes, sums, rate, batch, first, end);
      block.row_cumsum(sums);
      block.map(sums, [](auto sum) { return sum * kLn2; });
      block.store(sums, p.sums, head0, 0, chunk, batch);
    }
  };
};

/// The factor of a step in what a chunk adds to the state: it decays until the chunk's end.
struct UntilEnd {
  template <class X>
  TW_INLINE static X of(X sum, X last, X size) {
    return exp(last - sum) * size;
  }
};
/// The factor of the state before a chunk in a step's output.
struct FromStart {
  template <class X>
  TW_INLINE static X of(X sum, X, X) {
    return exp(sum);
  }
};

/// What a chunk adds to the state: the sum of factor x_i B_i^T. With the outputs' gradients as x and C as B it is the gradient of the state
/// before the chunk. A tile is M x N elements of the state of one chunk of one head.
///
/// x is scaled on its way through registers: a factor of the dimension that a product sums over must be in an operand.
template <class T, class Factor = UntilEnd>
struct ChunkState {
  static constexpr const char* source = "kernels/mamba2/chunk_states.tile.hpp";
  static constexpr int M = 64, N = 128, K = 64;

  template <class Target>
  struct On {
    using X = Shared<Target, T, K, M>;
    using B = Shared<Target, T, K, N, Contract::rows>;
    using Vector = SharedVector<Target, float, K>;
    using Values = Fragment<Target, float, K, M>;
    static constexpr int rows = M;
    static constexpr int min_blocks = 2;  ///< one waits for a product while the other scales
    static constexpr bool moves_registers = true;

    struct Params {
      Global<Target, const T, X> x;                   ///< [batch, head, time, dim]
      Global<Target, const T, B> b;                   ///< [batch, group, time, state]
      Global<Target, const float, Vector> sizes, g;   ///< [batch * head, chunk * chunk_size + step]
      Pointer<Target, const float> sums;              ///< g's elements
      Global<Target, float> states;                   ///< [batch * chunk, head, dim, state]
      int heads, shared, chunks, chunk_size, length;  ///< shared: heads for each group
      int columns;                                    ///< tiles of N columns
    };
    struct Slot {
      X x;
      B b;
      Vector sizes, g;
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      Buffer<Target, T, K, M, Contract::rows> scaled;
      explicit constexpr Memory(auto& block) : ring(block), scaled(block) {}
    };
    struct State {
      Fragment<Target, float, M, N> sum;
    };
    struct Locals {
      Values values;
    };
    using Work = ChunkWork;

    TW_INLINE static Work work(const Params& p, Tile t) { return chunk_work<M, N>(p, p.heads, t); }
    TW_INLINE static int steps(const Params&, const Work& w) { return ceil_div(w.count, K); }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int row = w.first + step * K;
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.x, slot.x, row, w.row0, w.head, w.batch);
        copy.tile(p.b, slot.b, row, w.col0, w.head / p.shared, w.batch);
        copy.vector(p.sizes, slot.sizes, w.batch * p.heads + w.head, row);
        copy.vector(p.g, slot.g, w.batch * p.heads + w.head, row);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const auto last = p.sums[static_cast<i64>(w.batch * p.heads + w.head) * p.g.cols + w.first + p.chunk_size - 1];
      const int n = steps(p, w);
      for (int step = 0; step < n; ++step) {
        Slot& slot = block.take(memory.ring);
        const int left = w.count - step * K;
        // The rows after the chunk's end are another's, and may be NaN.
        if (left < K) block.zero_rows(slot.b, left);
        Values values;
        RowVector<Target, float, Values> factors, sizes;
        block.load(values, slot.x);
        block.load(factors, slot.g);
        block.load(sizes, slot.sizes);
        block.for_rows(factors, [&](int, int i, auto& g) { g = Factor::of(g, last, sizes[i]); });
        block.map(values, factors, [](auto x, auto factor) { return x * factor; });
        block.for_each(values, [&](int row, int, auto& x) {
          if (row >= left) x = 0.0f;
        });
        block.store(values, memory.scaled);
        block.fence();
        block.sync();
        block.mma(state.sum, memory.scaled, slot.b, step == 0);
        block.wait(leave<0>, state.sum);
        block.release(memory.ring);
        block.sync();
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      block.store(state.sum, p.states, w.row0, w.col0, w.head, w.batch * p.chunks + w.chunk);
    }
  };
};

/// The state before each chunk, and after the last one. A tile is C elements of the state of one head, and walks the chunks.
template <class T, int C>
struct StatePassing {
  static constexpr const char* source = "kernels/mamba2/chunk_states.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, 1, C, 4, 4>;
    struct Params {
      Global<Target, const float, Values> states;   ///< what chunks add: [batch, head, chunk, element]
      Global<Target, T, Values> passed;             ///< the same
      Global<Target, const float, Values> initial;  ///< [batch, head, element], or without elements: 0
      Global<Target, float, Values> final;          ///< as initial; without elements it is not stored
      Pointer<Target, const float> sums;            ///< [batch, head, chunk]: logarithms of the chunks' decays
      i64 sum_batch, sum_head, sum_chunk;           ///< strides
      int heads;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.m / p.heads, head = t.m - batch * p.heads, col0 = t.n * C;
      const i64 sums = batch * p.sum_batch + head * p.sum_head;
      Values state, added, next;
      block.load(state, p.initial, head, col0, batch);
      block.load(added, p.states, 0, col0, head, batch);
      TW_NO_UNROLL
      for (int chunk = 0; chunk < p.states.rows; ++chunk) {
        const auto decay = exp(p.sums[sums + chunk * p.sum_chunk]);
        block.load(next, p.states, chunk + 1, col0, head, batch);  // zeros after the last one
        block.store(state, p.passed, chunk, col0, head, batch);
        block.map(state, added, [=](auto s, auto a) { return s * decay + a; });
        added = next;
      }
      block.store(state, p.final, head, col0, batch);
    }
  };
};

}  // namespace tw::kernels::mamba2

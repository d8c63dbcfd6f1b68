#pragma once

#include "kernels/mamba2/chunk_outputs.tile.hpp"
#include "kernels/mamba2/chunk_state_gradients.tile.hpp"

// Gradients of the last two of the scan's five steps (chunk_outputs.tile.hpp). With du the gradient of the outputs before the gate, h the
// state before the chunk, and E(i, j) = exp(G_i - G_j) (du_i . x_j) for j <= i:
//
//   bmm_chunk    dC_i = sum over j of dCB(i, j) B_j, dB_j = sum over i of dCB(i, j) C_i
//   chunk_scan   dCB(i, j) = sum over heads of E(i, j) dt_j, d(dt_j) = sum over i of CB(i, j) E(i, j)
//                dG_i = exp(G_i) (C_i . h^T du_i) + sum over j of CB(i, j) E(i, j) dt_j - dt_i d(dt_i)
//                dx_j = dt_j sum over i >= j of CB(i, j) exp(G_i - G_j) du_i + D du_j
//                dC_i = sum over heads of exp(G_i) h^T du_i, dh = sum over i of exp(G_i) du_i C_i^T
//
// dG's sums are over the products that d(dt) has, so that those which cancel in a step's decay do so in f32.

namespace tw::kernels::mamba2 {

/// One gradient of bmm_chunk: of C, whose values are B; or OfB, whose values are C and whose weights are transposed. A sum begins with
/// the addend. A tile is M steps of one chunk and N columns of one group.
template <class T, bool OfB>
struct ProductGradients {
  static constexpr const char* source = "kernels/mamba2/chunk_output_gradients.tile.hpp";
  static constexpr int M = 64, N = 64, K = 64;

  template <class Target>
  struct On {
    using Products = Shared<Target, float, M, M>;
    using V = Shared<Target, T, K, N, Contract::rows>;
    using Out = Staging<Target, T, M, N>;
    static_assert(M == K);
    static constexpr int rows = M;
    static constexpr int min_blocks = 2;

    struct Params {
      Global<Target, const float, Products> d_cb;  ///< [batch * chunk, group, chunk_size, chunk_size]
      Global<Target, const T, V> values;           ///< [batch, group, time, state]
      Global<Target, const float> addend;          ///< as values, or without elements: 0
      Global<Target, T, Out> out;                  ///< as values
      int groups, chunks, chunk_size, length;
      int columns;  ///< tiles of N columns
      bool causal;  ///< products with later rows have no gradient
    };
    struct Slot {
      Products d_cb;
      V values;
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      Buffer<Target, T, M, M> weights;
      Out out;
      explicit constexpr Memory(auto& block) : ring(block), weights(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, M, N> sum;
    };
    using Work = ChunkWork;  ///< head: the group

    TW_INLINE static Work work(const Params& p, Tile t) { return chunk_work<M, N>(p, p.groups, t); }
    /// The steps that are summed over.
    TW_INLINE static int begin(const Params& p, const Work& w) { return OfB && p.causal ? w.row0 : 0; }
    TW_INLINE static int end(const Params& p, const Work& w) { return !OfB && p.causal ? min(w.row0 + M, w.count) : w.count; }
    TW_INLINE static int steps(const Params& p, const Work& w) { return w.row0 < w.count ? ceil_div(end(p, w) - begin(p, w), K) : 0; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int at = begin(p, w) + step * K;
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.d_cb, slot.d_cb, OfB ? at : w.row0, OfB ? w.row0 : at, w.head, w.batch * p.chunks + w.chunk);
        copy.tile(p.values, slot.values, w.first + at, w.col0, w.head, w.batch);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const int n = steps(p, w);
      block.load(state.sum, p.addend, w.first + w.row0, w.col0, w.head, w.batch);
      for (int step = 0; step < n; ++step) {
        Slot& slot = block.take(memory.ring);
        const int at = begin(p, w) + step * K, left = w.count - at, i0 = OfB ? at : w.row0, j0 = OfB ? w.row0 : at;
        // The rows after the chunk's end are another's, and may be NaN.
        if (left < K) block.zero_rows(slot.values, left);
        Fragment<Target, float, M, M> weights;
        block.load(weights, slot.d_cb);
        block.for_each(weights, [&](int row, int col, auto& x) {
          if (max(i0 + row, j0 + col) >= w.count || (p.causal && j0 + col > i0 + row)) x = 0.0f;
        });
        block.store(weights, memory.weights);
        block.fence();
        block.sync();
        if constexpr (OfB)
          block.mma(state.sum, view<Contract::rows>(memory.weights), slot.values, false);
        else
          block.mma(state.sum, memory.weights, slot.values, false);
        block.wait(leave<0>, state.sum);
        block.release(memory.ring);
        block.sync();
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.row0 >= w.count) return;
      block.store(state.sum, memory.out, p.out, w.first + w.row0, w.col0, w.head, w.batch, w.first + w.count);
    }
  };
};

/// dCB, and the sums of CB E over rows and columns of the tile. A tile is M x N products of one chunk of one group.
template <class T>
struct ScoreGradients {
  static constexpr const char* source = "kernels/mamba2/chunk_output_gradients.tile.hpp";
  static constexpr int M = 64, N = 64, K = 64;

  template <class Target>
  struct On {
    using DU = Shared<Target, T, M, K>;
    using X = Shared<Target, T, N, K>;
    using Vector = SharedVector<Target, float, M>;
    using Scores = Fragment<Target, float, M, N>;
    static_assert(M == N);
    static constexpr int rows = M;
    static constexpr int min_blocks = 2;
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take long
    static constexpr bool moves_registers = true;

    struct Params {
      Global<Target, const T, DU> du;                ///< [batch, head, time, dim]
      Global<Target, const T, X> x;                  ///< the same
      Global<Target, const float> cb;                ///< [batch * chunk, group, chunk_size, chunk_size]
      Global<Target, const float, Vector> sizes, g;  ///< [batch * head, chunk * chunk_size + step]
      Global<Target, float> d_cb;                    ///< as cb
      Global<Target, float> row_sums;     ///< of CB E dt: [tile of columns * batch, head, chunk * chunk_size + step, 1], below the diagonal
      Global<Target, float> column_sums;  ///< of CB E: [(tile of rows * batch + batch) * head, chunk * chunk_size + step], the same
      int batches, heads, shared, chunks, chunk_size, length;  ///< shared: heads for each group
      int columns;                                             ///< tiles of N columns
    };
    struct Slot {
      DU du;
      X x;
      Vector until, since, sizes;
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      Scratch<Target, float, M, N> scratch;
      explicit constexpr Memory(auto& block) : ring(block), scratch(block) {}
    };
    struct State {
      Scores sum;
    };
    struct Locals {
      Scores cb, part;
    };
    using Work = ChunkWork;  ///< head: the group

    TW_INLINE static Work work(const Params& p, Tile t) { return chunk_work<M, N>(p, p.heads / p.shared, t); }
    TW_INLINE static int steps_of_head(const Params& p) { return ceil_div(p.x.cols, K); }
    TW_INLINE static bool empty(const Work& w) { return w.row0 >= w.count || w.col0 > w.row0; }
    TW_INLINE static int steps(const Params& p, const Work& w) { return empty(w) ? 0 : p.shared * steps_of_head(p); }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int n = steps_of_head(p), of_group = step / n, head = w.head * p.shared + of_group, k = (step - of_group * n) * K;
      const int row = w.batch * p.heads + head;
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.du, slot.du, w.first + w.row0, k, head, w.batch);
        copy.tile(p.x, slot.x, w.first + w.col0, k, head, w.batch);
        copy.vector(p.g, slot.until, row, w.first + w.row0);
        copy.vector(p.g, slot.since, row, w.first + w.col0);
        copy.vector(p.sizes, slot.sizes, row, w.first + w.col0);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.fill(state.sum, 0.0f);
      if (empty(w)) return;
      const int n = steps_of_head(p), left = w.count - w.row0;
      Scores cb, part;
      block.load(cb, p.cb, w.row0, w.col0, w.head, w.batch * p.chunks + w.chunk);
      // Products above the diagonal may be NaN, and what they are multiplied by as well, where it is of steps after the chunk's end.
      const auto keep = [&](Scores& scores) {
        block.for_each(scores, [&](int row, int col, auto& x) {
          if (w.col0 + col > w.row0 + row || row >= left) x = 0.0f;
        });
      };
      keep(cb);
      auto row_sums = p.row_sums;
      row_sums.rows = w.first + p.chunk_size;
      for (int head = w.head * p.shared; head < (w.head + 1) * p.shared; ++head) {
        RowVector<Target, float, Scores> until;
        ColumnVector<Target, float, Scores> since, sizes, totals;
        for (int step = 0; step < n; ++step) {
          const Slot& slot = block.take(memory.ring);
          block.mma(part, slot.du, slot.x, step == 0);
          block.load(until, slot.until);
          block.load(since, slot.since);
          block.load(sizes, slot.sizes);
          block.wait(leave<0>, part);
          block.release(memory.ring);
        }
        block.map(part, until, since, [](auto x, auto to, auto from) { return x * exp(to - from); });
        keep(part);
        block.map(state.sum, part, sizes, [](auto sum, auto x, auto size) { return sum + x * size; });
        block.map(part, cb, [](auto x, auto product) { return x * product; });
        block.column_sum(part, totals, memory.scratch);
        block.map(part, sizes, [](auto x, auto size) { return x * size; });
        block.rows(part, [&](int i, auto row) { until[i] = row.sum(); });
        block.store(until, row_sums, w.first + w.row0, 0, head, w.col0 / N * p.batches + w.batch);
        block.map(part, totals, [](auto, auto total) { return total; });
        auto column_sums = p.column_sums;
        const int at = (w.row0 / M * p.batches + w.batch) * p.heads + head;
        column_sums.rows = at + 1;  // the tile's first row
        column_sums.cols = w.first + p.chunk_size;
        block.store(part, column_sums, at, w.first + w.col0);
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      block.store(state.sum, p.d_cb, w.row0, w.col0, w.head, w.batch * p.chunks + w.chunk);
    }
  };
};

/// dx of chunk_scan, and with B and the gradient d of the state after each chunk also that of chunk_state: their sum in f32. A tile is M
/// steps of one chunk and N columns of one head. First B is multiplied by d, K of its columns in a step; then the tile walks the outputs
/// from the chunk's last steps to its own, K at a time.
template <class T>
struct ScanInputGradients {
  static constexpr const char* source = "kernels/mamba2/chunk_output_gradients.tile.hpp";
  static constexpr int M = 64, N = 64, K = 64;

  template <class Target>
  struct On {
    using B = Shared<Target, T, M, K>;
    using D = Shared<Target, T, N, K>;
    using Products = Shared<Target, float, K, M>;
    using DU = Shared<Target, T, K, N, Contract::rows>;
    using Vector = SharedVector<Target, float, K>;
    using Scores = Fragment<Target, float, K, M>;
    using Values = Fragment<Target, float, M, N>;
    using Out = Staging<Target, T, M, N>;
    static_assert(M == K);
    static constexpr int rows = M;
    static constexpr int min_blocks = 2;
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take long
    static constexpr bool moves_registers = true;

    struct Params {
      Global<Target, const T, B> b;                   ///< [batch, group, time, state], or without elements: of chunk_scan alone
      Global<Target, const T, D> d_states;            ///< [batch * chunk, head, dim, state], with b
      Global<Target, const float, Products> cb;       ///< [batch * chunk, group, chunk_size, chunk_size]
      Global<Target, const T, DU> du;                 ///< [batch, head, time, dim]
      Global<Target, const float, Vector> g;          ///< [batch * head, chunk * chunk_size + step]
      Global<Target, const float> row_g, row_sizes;   ///< [batch * head, chunk * chunk_size + step, 1]
      Pointer<Target, const float> sums;              ///< g's elements
      Global<Target, const float> skip;               ///< [head, dim], or without elements
      Global<Target, T, Out> dx;                      ///< as du
      int heads, shared, chunks, chunk_size, length;  ///< shared: heads for each group
      int columns;                                    ///< tiles of N columns
    };
    struct StateSlot {
      B b;
      D d_states;
    };
    struct OutputSlot {
      Products cb;
      DU du;
      Vector until;
    };
    struct Memory {
      Ring<Target, StateSlot, 2> states;
      Ring<Target, OutputSlot, 2> outputs;
      Buffer<Target, T, K, M, Contract::rows> weights;
      Out out;
      explicit constexpr Memory(auto& block) : states(block), outputs(block), weights(block), out(block) {}
    };
    struct State {
      Values sum;
    };
    struct Locals {
      Scores scores;
    };
    using Work = ChunkWork;

    TW_INLINE static Work work(const Params& p, Tile t) { return chunk_work<M, N>(p, p.heads, t); }
    TW_INLINE static int state_steps(const Params& p) { return ceil_div(p.b.cols, K); }
    TW_INLINE static int steps(const Params& p, const Work& w) {
      return w.row0 < w.count ? state_steps(p) + ceil_div(w.count - w.row0, K) : 0;
    }
    /// The first of the outputs of a step.
    TW_INLINE static int outputs_of(const Params& p, const Work& w, int step) { return w.row0 + (steps(p, w) - 1 - step) * K; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int row = w.batch * p.heads + w.head, group = w.head / p.shared, number = w.batch * p.chunks + w.chunk;
      if (step < state_steps(p)) {
        producer.put(memory.states, [&](auto copy, StateSlot& slot) {
          copy.tile(p.b, slot.b, w.first + w.row0, step * K, group, w.batch);
          copy.tile(p.d_states, slot.d_states, w.col0, step * K, w.head, number);
        });
      } else {
        const int at = outputs_of(p, w, step);
        producer.put(memory.outputs, [&](auto copy, OutputSlot& slot) {
          copy.tile(p.cb, slot.cb, at, w.row0, group, number);
          copy.tile(p.du, slot.du, w.first + at, w.col0, w.head, w.batch);
          copy.vector(p.g, slot.until, row, w.first + at);
        });
      }
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const int before = state_steps(p), n = steps(p, w), number = w.batch * p.heads + w.head, first = w.first + w.row0;
      RowVector<Target, float, Values> factors, sizes;
      ColumnVector<Target, float, Scores> since;
      block.load(factors, p.row_g, first, 0, number);
      block.load(sizes, p.row_sizes, first, 0, number);
      block.load(since, p.g, number, first);
      block.fill(state.sum, 0.0f);
      for (int step = 0; step < min(before, n); ++step) {
        const StateSlot& slot = block.take(memory.states);
        block.mma(state.sum, slot.b, slot.d_states, false);
        block.wait(leave<0>, state.sum);
        block.release(memory.states);
      }
      if (before > 0 && n > 0) {
        // The step's size is a factor of both summands, and comes at the end.
        const auto last = p.sums[static_cast<i64>(number) * p.g.cols + w.first + p.chunk_size - 1];
        block.for_rows(factors, [&](int, int, auto& g) { g = exp(last - g); });
        block.map(state.sum, factors, [](auto x, auto factor) { return x * factor; });
      }
      for (int step = before; step < n; ++step) {
        OutputSlot& slot = block.take(memory.outputs);
        const int at = outputs_of(p, w, step), left = w.count - at;
        // The rows after the chunk's end are another's, and may be NaN.
        if (left < K) block.zero_rows(slot.du, left);
        Scores scores;
        RowVector<Target, float, Scores> until;
        block.load(scores, slot.cb);
        block.load(until, slot.until);
        decay_scores(block, scores, until, since, kLog2E, at - w.row0, w.count - w.row0);
        block.for_each(scores, [&](int row, int, auto& x) {
          if (row >= left) x = 0.0f;
        });
        block.store(scores, memory.weights);
        block.fence();
        block.sync();
        block.mma(state.sum, memory.weights, slot.du, false);
        block.wait(leave<0>, state.sum);
        if (at == w.row0) {
          block.map(state.sum, sizes, [](auto x, auto size) { return x * size; });
          if (p.skip.cols > 0) {
            Values du;
            ColumnVector<Target, float, Values> skip;
            block.load(du, slot.du);
            block.load(skip, p.skip, w.head, w.col0);
            add_skip(block, state.sum, du, skip);
          }
        }
        block.release(memory.outputs);
        block.sync();
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.row0 >= w.count) return;
      block.store(state.sum, memory.out, p.dx, w.first + w.row0, w.col0, w.head, w.batch, w.first + w.count);
    }
  };
};

/// The gradients of dt and dA_cumsum of chunk_scan, from ScoreGradients' sums and KeyGradients' products. A tile is one chunk, of at most L
/// steps, of R heads.
template <int R, int L>
struct ScanStepGradients {
  static constexpr const char* source = "kernels/mamba2/chunk_output_gradients.tile.hpp";
  static constexpr int kTile = 64;  ///< steps of a tile of ScoreGradients

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, L, 4, 4>;
    struct Params {
      Global<Target, const float, Values> dots, row_sums, column_sums;  ///< [part * batch, chunk, head, step]
      Global<Target, const float, Values> sizes, sums;                  ///< [batch, chunk, head, step]
      Global<Target, float, Values> d_sizes, d_sums;                    ///< the same
      int parts, batches, chunks, length;                               ///< parts: of dots
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.m / p.chunks, chunk = t.m - batch * p.chunks, head0 = t.n * R, size = p.sums.cols;
      const int count = min(size, p.length - chunk * size);
      Values d, d_size, other;
      block.load(other, p.sums, head0, 0, chunk, batch);
      sum_parts(block, d, p.dots, p.parts, p.batches, head0, chunk, batch, count);
      block.map(d, other, [](auto x, auto sum) { return x * exp(sum); });
      block.fill(d_size, 0.0f);
      TW_NO_UNROLL
      for (int tile = 0; tile < ceil_div(count, kTile); ++tile) {
        block.load(other, p.row_sums, head0, 0, chunk, tile * p.batches + batch);
        block.for_each(d, other, [&](int, int col, auto& sum, auto& x) {
          if (col / kTile >= tile && col < count) sum += x;
        });
        block.load(other, p.column_sums, head0, 0, chunk, tile * p.batches + batch);
        block.for_each(d_size, other, [&](int, int col, auto& sum, auto& x) {
          if (col / kTile <= tile && col < count) sum += x;
        });
      }
      block.store(d_size, p.d_sizes, head0, 0, chunk, batch);
      block.load(other, p.sizes, head0, 0, chunk, batch);
      block.map(d, d_size, other, [](auto x, auto own, auto of_step) { return x - own * of_step; });
      block.store(d, p.d_sums, head0, 0, chunk, batch);
    }
  };
};

}  // namespace tw::kernels::mamba2

#pragma once

#include "kernels/mamba2/chunk_states.tile.hpp"

// Gradients of the first three of the scan's five steps (chunk_states.tile.hpp). With G = dA_cumsum, L a chunk's last step, h the state
// before a chunk, and d the gradient of the state after it:
//
//   chunk_cumsum    dg_j = sum over i >= j of dG_i, d(dt_j) += A dg_j, dA = sum of dt_j dg_j, then through the clamp and softplus
//   chunk_state     f_i = exp(G_L - G_i) dt_i: dx_i = f_i d B_i, dB_i = sum over heads of f_i d^T x_i,
//                   d(dt_i) = exp(G_L - G_i) x_i d B_i, dG_i = -dt_i d(dt_i), dG_L = sum over i < L of dt_i d(dt_i)
//   state_passing   d(added) = d, dG_L = exp(G_L) (h . d), d' = exp(G_L) d + dh: the gradient of the state after the chunk before

namespace tw::kernels::mamba2 {

/// Through the cumulative sums and the step sizes. A tile is one chunk, of at most L steps, of R heads.
template <class T, int R, int L>
struct ChunkCumsumGradients {
  static constexpr const char* source = "kernels/mamba2/chunk_state_gradients.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, L, 4, 4>;
    struct Params {
      Global<Target, const T> dt;                           ///< [batch, head, time]
      Global<Target, const float> rate, bias;               ///< [head, 1]; bias may have no elements
      Global<Target, const float, Values> d_sums, d_sizes;  ///< [batch, chunk, head, step]
      Global<Target, T> d_dt;                               ///< as dt
      Global<Target, float> rate_sums, bias_sums;           ///< [batch * chunk, head, 1]: of the gradients of A and dt_bias
      Pointer<Target, const i32> seq_idx;                   ///< [batch, time], or null
      i64 seq_batch, seq_time;                              ///< strides
      StepSize size;
      int chunks, length;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.m / p.chunks, chunk = t.m - batch * p.chunks, head0 = t.n * R;
      const int first = chunk * p.d_sums.cols, end = min(first + p.d_sums.cols, p.length);
      RowVector<Target, float, Values> rate, bias;
      Values x, sizes, exponents, dg, d_size;
      block.load(rate, p.rate, head0, 0);
      block.load(bias, p.bias, head0, 0);
      block.load(x, p.dt, head0, first, batch);
      block.load(dg, p.d_sums, head0, 0, chunk, batch);
      block.load(d_size, p.d_sizes, head0, 0, chunk, batch);
      block.row_cumsum(dg, Backward{});
      const StepSize size = p.size;
      block.map(x, bias, [](auto dt, auto b) { return dt + b; });
      sizes = x;
      block.map(sizes, [=](auto dt) { return size.of(dt); });
      step_exponents(block, p, sizes, exponents, rate, batch, first, end);
      // A decay that was raised to the least one depends on nothing. A rate of -infinity times a gradient of 0 would be NaN.
      block.map(dg, exponents, [](auto d, auto exponent) { return exponent <= kLowestExponent ? decltype(d)(0.0f) : d; });
      block.map(d_size, dg, rate, [](auto sum, auto d, auto r) { return d == 0.0f || r == -kInfinity ? sum : sum + d * r; });
      block.map(d_size, x, [=](auto d, auto dt) {
        const auto slope = size.derivative(dt);
        return slope == 0.0f ? decltype(d)(0.0f) : d * slope;
      });
      block.map(dg, sizes, [](auto d, auto of_step) { return d * of_step; });
      block.for_each(d_size, dg, [&](int, int col, auto& of_size, auto& of_rate) {
        if (first + col >= end) of_size = of_rate = 0.0f;
      });
      auto to = p.d_dt;
      to.cols = end;
      block.store(d_size, to, head0, first, batch);
      block.rows(dg, [&](int i, auto row) { rate[i] = row.sum(); });
      block.rows(d_size, [&](int i, auto row) { bias[i] = row.sum(); });
      block.store(rate, p.rate_sums, head0, 0, t.m);
      block.store(bias, p.bias_sums, head0, 0, t.m);
    }
  };
};

/// Through the states' decays, from the last chunk to the first. A tile is C elements of the state of one head.
template <class T, int C>
struct StatePassingGradients {
  static constexpr const char* source = "kernels/mamba2/chunk_state_gradients.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, 1, C, 4, 4>;
    struct Params {
      Global<Target, const T, Values> passed;        ///< the state before each chunk: [batch, head, chunk, element]
      Global<Target, const float, Values> d_passed;  ///< the same
      Global<Target, float, Values> d_states;        ///< the same: of what each chunk adds; without elements it is not stored
      Global<Target, T, Values> rounded;             ///< d_states in passed's dtype; without elements it is not stored
      Global<Target, const float, Values> d_final;   ///< [batch, head, element], or without elements: 0
      Global<Target, float, Values> d_initial;       ///< as d_final; without elements it is not stored
      Global<Target, float> decay_sums;              ///< [tile, batch * head, chunk, 1]: of the gradients of the decays' logarithms
      Pointer<Target, const float> sums;             ///< [batch, head, chunk]: logarithms of the chunks' decays
      i64 sum_batch, sum_head, sum_chunk;            ///< strides
      int heads;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.m / p.heads, head = t.m - batch * p.heads, col0 = t.n * C;
      const i64 sums = batch * p.sum_batch + head * p.sum_head;
      Values d, before, d_before;
      RowVector<Target, float, Values> of_decay;
      block.load(d, p.d_final, head, col0, batch);
      TW_NO_UNROLL
      for (int chunk = p.passed.rows - 1; chunk >= 0; --chunk) {
        const auto decay = exp(p.sums[sums + chunk * p.sum_chunk]);
        block.load(before, p.passed, chunk, col0, head, batch);
        block.load(d_before, p.d_passed, chunk, col0, head, batch);
        block.store(d, p.d_states, chunk, col0, head, batch);
        block.store(d, p.rounded, chunk, col0, head, batch);
        block.map(d, [=](auto x) { return x * decay; });
        block.map(before, d, [](auto h, auto x) { return h * x; });
        block.rows(before, [&](int i, auto row) { of_decay[i] = row.sum(); });
        block.store(of_decay, p.decay_sums, chunk, 0, t.m, t.n);
        block.map(d, d_before, [](auto x, auto own) { return x + own; });
      }
      block.store(d, p.d_initial, head, col0, batch);
    }
  };
};

/// dx of chunk_state. A tile is M steps of one chunk and N columns of one head.
template <class T>
struct AddedInputGradients {
  static constexpr const char* source = "kernels/mamba2/chunk_state_gradients.tile.hpp";
  static constexpr int M = 64, N = 64, K = 64;

  template <class Target>
  struct On {
    using B = Shared<Target, T, M, K>;
    using D = Shared<Target, T, N, K>;
    using Vector = SharedVector<Target, float, M>;
    using Values = Fragment<Target, float, M, N>;
    using Out = Staging<Target, T, M, N>;
    static constexpr int rows = M;
    static constexpr int min_blocks = 2;

    struct Params {
      Global<Target, const T, B> b;                   ///< [batch, group, time, state]
      Global<Target, const T, D> d_states;            ///< [batch * chunk, head, dim, state]
      Global<Target, const float, Vector> sizes, g;   ///< [batch * head, chunk * chunk_size + step]
      Pointer<Target, const float> sums;              ///< g's elements
      Global<Target, T, Out> dx;                      ///< [batch, head, time, dim]
      int heads, shared, chunks, chunk_size, length;  ///< shared: heads for each group
      int columns;                                    ///< tiles of N columns
    };
    struct Slot {
      B b;
      D d_states;
      Vector sizes, g;
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      Out out;
      explicit constexpr Memory(auto& block) : ring(block), out(block) {}
    };
    struct State {
      Values sum;
    };
    using Work = ChunkWork;

    TW_INLINE static Work work(const Params& p, Tile t) { return chunk_work<M, N>(p, p.heads, t); }
    TW_INLINE static int steps(const Params& p, const Work& w) { return w.row0 < w.count ? ceil_div(p.b.cols, K) : 0; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int row = w.first + w.row0;
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.b, slot.b, row, step * K, w.head / p.shared, w.batch);
        copy.tile(p.d_states, slot.d_states, w.col0, step * K, w.head, w.batch * p.chunks + w.chunk);
        copy.vector(p.sizes, slot.sizes, w.batch * p.heads + w.head, row);
        copy.vector(p.g, slot.g, w.batch * p.heads + w.head, row);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const auto last = p.sums[static_cast<i64>(w.batch * p.heads + w.head) * p.g.cols + w.first + p.chunk_size - 1];
      RowVector<Target, float, Values> factors, sizes;
      const int n = steps(p, w);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.ring);
        block.mma(state.sum, slot.b, slot.d_states, step == 0);
        block.load(factors, slot.g);
        block.load(sizes, slot.sizes);
        block.wait(leave<0>, state.sum);
        block.release(memory.ring);
      }
      if (n == 0) return;
      block.for_rows(factors, [&](int, int i, auto& g) { g = UntilEnd::of(g, last, sizes[i]); });
      block.map(state.sum, factors, [](auto x, auto factor) { return x * factor; });
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.row0 >= w.count) return;
      block.store(state.sum, memory.out, p.dx, w.first + w.row0, w.col0, w.head, w.batch, w.first + w.count);
    }
  };
};

/// The gradients of a group's keys, the sum of factor_i d^T x_i over its heads, and for the factors' gradients the products of keys with
/// d^T x_i of each head:
///
///   of chunk_state   keys B, factors UntilEnd, x, and d the gradient of what the chunk adds
///   of chunk_scan    keys C, factors FromStart, the outputs' gradients as x, and the state before the chunk as d
///
/// A tile is M steps of one chunk and N columns of one group.
template <class T, class Factor>
struct KeyGradients {
  static constexpr const char* source = "kernels/mamba2/chunk_state_gradients.tile.hpp";
  static constexpr int M = 64, N = 64, K = 64;

  template <class Target>
  struct On {
    using X = Shared<Target, T, M, K>;
    using D = Shared<Target, T, K, N, Contract::rows>;
    using Vector = SharedVector<Target, float, M>;
    using Values = Fragment<Target, float, M, N>;
    using Out = Staging<Target, T, M, N>;
    static constexpr int rows = M;
    static constexpr int min_blocks = 2;
    static constexpr bool moves_registers = true;

    struct Params {
      Global<Target, const T, X> x;                            ///< [batch, head, time, dim]
      Global<Target, const T, D> states;                       ///< d: [batch * chunk, head, dim, state]
      Global<Target, const T> keys;                            ///< [batch, group, time, state]
      Global<Target, const float, Vector> sizes, g;            ///< [batch * head, chunk * chunk_size + step]
      Pointer<Target, const float> sums;                       ///< g's elements
      Global<Target, T, Out> d_keys;                           ///< as keys
      Global<Target, float> unrounded;                         ///< d_keys in f32 in its place, or without elements
      Global<Target, float> dots;                              ///< [tile of columns * batch, head, chunk * chunk_size + step, 1]
      int batches, heads, shared, chunks, chunk_size, length;  ///< shared: heads for each group
      int columns;                                             ///< tiles of N columns
    };
    struct Slot {
      X x;
      D states;
      Vector sizes, g;
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      Out out;
      explicit constexpr Memory(auto& block) : ring(block), out(block) {}
    };
    struct State {
      Values sum;
    };
    struct Locals {
      Values keys, part;
    };
    using Work = ChunkWork;  ///< head: the group

    TW_INLINE static Work work(const Params& p, Tile t) { return chunk_work<M, N>(p, p.heads / p.shared, t); }
    TW_INLINE static int steps_of_head(const Params& p) { return ceil_div(p.x.cols, K); }
    TW_INLINE static int steps(const Params& p, const Work& w) { return w.row0 < w.count ? p.shared * steps_of_head(p) : 0; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int n = steps_of_head(p), of_group = step / n, head = w.head * p.shared + of_group, k = (step - of_group * n) * K;
      const int row = w.first + w.row0;
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.x, slot.x, row, k, head, w.batch);
        copy.tile(p.states, slot.states, k, w.col0, head, w.batch * p.chunks + w.chunk);
        copy.vector(p.sizes, slot.sizes, w.batch * p.heads + head, row);
        copy.vector(p.g, slot.g, w.batch * p.heads + head, row);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.row0 >= w.count) return;
      const int n = steps_of_head(p), row0 = w.first + w.row0;
      Values keys, part;
      RowVector<Target, float, Values> factors, sizes;
      block.load(keys, p.keys, row0, w.col0, w.head, w.batch);
      block.fill(state.sum, 0.0f);
      auto dots = p.dots;
      dots.rows = w.first + p.chunk_size;
      for (int head = w.head * p.shared; head < (w.head + 1) * p.shared; ++head) {
        const auto last = p.sums[static_cast<i64>(w.batch * p.heads + head) * p.g.cols + w.first + p.chunk_size - 1];
        for (int step = 0; step < n; ++step) {
          const Slot& slot = block.take(memory.ring);
          block.mma(part, slot.x, slot.states, step == 0);
          block.load(factors, slot.g);
          block.load(sizes, slot.sizes);
          block.wait(leave<0>, part);
          block.release(memory.ring);
        }
        block.for_rows(factors, [&](int, int i, auto& g) { g = Factor::of(g, last, sizes[i]); });
        block.map(state.sum, part, factors, [](auto sum, auto x, auto factor) { return sum + x * factor; });
        block.map(part, keys, [](auto x, auto key) { return x * key; });
        block.rows(part, [&](int i, auto row) { sizes[i] = row.sum(); });
        block.store(sizes, dots, row0, 0, head, w.col0 / N * p.batches + w.batch);
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const int row = w.first + w.row0, end = w.first + w.count;
      if (row >= end) return;
      if (p.unrounded.cols == 0) return block.store(state.sum, memory.out, p.d_keys, row, w.col0, w.head, w.batch, end);
      auto to = p.unrounded;
      to.rows = end;
      block.store(state.sum, to, row, w.col0, w.head, w.batch);
    }
  };
};

/// values(head, i) = the sum of `parts` [part * batch, chunk, head, step] over the parts, for steps before `count`, else 0.
template <class Values>
TW_INLINE void sum_parts(auto& block, Values& values, const auto& from, int parts, int batches, int head0, int chunk, int batch,
                         int count) {
  Values part;
  block.fill(values, 0.0f);
  TW_NO_UNROLL
  for (int i = 0; i < parts; ++i) {
    block.load(part, from, head0, 0, chunk, i * batches + batch);
    block.map(values, part, [](auto sum, auto x) { return sum + x; });
  }
  block.for_each(values, [&](int, int col, auto& x) {
    if (col >= count) x = 0.0f;
  });
}

/// The gradients of dt and dA_cumsum of chunk_state, from the products of B with d^T x. Those of other steps may be added. A tile is one
/// chunk, of at most L steps, of R heads.
template <int R, int L>
struct AddedStepGradients {
  static constexpr const char* source = "kernels/mamba2/chunk_state_gradients.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, L, 4, 4>;
    struct Params {
      Global<Target, const float, Values> dots;         ///< [part * batch, chunk, head, step]
      Global<Target, const float, Values> sizes, sums;  ///< [batch, chunk, head, step]
      Global<Target, const float> last;                 ///< [batch, chunk, head, 1]: of sums
      Global<Target, const float, Values> more_sizes;   ///< as sums, of other steps, or without elements; may be d_sizes
      Global<Target, const float, Values> more_sums;    ///< the same; may be d_sums
      Global<Target, const float> more_last;            ///< [batch, chunk, head, 1]: of the last sum, or without elements
      Global<Target, float, Values> d_sizes, d_sums;    ///< as sums
      int parts, batches, chunks, length;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.m / p.chunks, chunk = t.m - batch * p.chunks, head0 = t.n * R, size = p.sums.cols;
      Values d, sums, sizes, more;
      RowVector<Target, float, Values> last, total, more_last;
      block.load(sums, p.sums, head0, 0, chunk, batch);
      block.load(sizes, p.sizes, head0, 0, chunk, batch);
      block.load(last, p.last, head0, 0, chunk, batch);
      sum_parts(block, d, p.dots, p.parts, p.batches, head0, chunk, batch, min(size, p.length - chunk * size));
      block.map(d, sums, last, [](auto x, auto sum, auto of_last) { return x * exp(of_last - sum); });
      block.load(more, p.more_sizes, head0, 0, chunk, batch);
      block.map(more, d, [](auto x, auto own) { return x + own; });
      block.store(more, p.d_sizes, head0, 0, chunk, batch);
      block.map(d, sizes, [](auto x, auto of_step) { return x * of_step; });
      // The last step does not decay.
      block.for_each(d, [&](int, int col, auto& x) {
        if (col >= size - 1) x = 0.0f;
      });
      block.load(more, p.more_sums, head0, 0, chunk, batch);
      block.load(more_last, p.more_last, head0, 0, chunk, batch);
      block.rows(d, [&](int i, auto row) { total[i] = row.sum() + more_last[i]; });
      block.map(sums, total, [](auto, auto x) { return x; });
      block.for_each(d, sums, [&](int, int col, auto& x, auto& of_last) { x = col == size - 1 ? of_last : -x; });
      block.map(d, more, [](auto x, auto other) { return x + other; });
      block.store(d, p.d_sums, head0, 0, chunk, batch);
    }
  };
};

}  // namespace tw::kernels::mamba2

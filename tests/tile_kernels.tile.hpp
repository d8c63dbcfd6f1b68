#pragma once

#include "tilewave/tile/solve.tile.hpp"

// Kernels whose compute role writes shared memory and multiplies it, holds accumulators of several shapes, and scans. tile_test.cpp runs
// them.

namespace tw::test {

inline constexpr const char* kTileKernels = "tests/tile_kernels.tile.hpp";

/// The products of attention's backward pass, with a simple function in the place of the softmax's: for blocks of N keys,
///   S = Q K^T, dS = (S - lse) delta by rows, dQ += dS K (blocks add to one tensor), dK = dS^T Q.
/// dS lies in a Buffer, which one product reads as it is and the next one transposed. Queries come 64 or so at a time, fewer than the
/// kernel's rows: S and dQ are split over warpgroups by columns.
template <class T, int M, int N, int D>
struct BackwardProducts {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = N;
    static constexpr int warpgroups = N / 64;
    using Schedule = Banded<4>;
    using Q = Shared<Target, T, M, D>;
    using K = Shared<Target, T, N, D>;
    using OfQueries = SharedVector<Target, float, M>;
    using QueryGradient = Outbox<Target, M, D>;
    struct Params {
      Global<Target, const T, Q> q;
      Global<Target, const T, K> k;
      Global<Target, const float, OfQueries> lse, delta;  ///< [batch, queries]
      Global<Target, float, QueryGradient> dq;            ///< of every 8 columns the even ones first
      Global<Target, float> dk;
    };
    struct Slot {
      Q q;
      OfQueries lse, delta;
    };
    struct Memory {
      Ring<Target, K, 1> k;
      Ring<Target, Slot, 2> queries;
      Buffer<Target, T, M, N> ds;
      QueryGradient dq;
      explicit constexpr Memory(auto& block) : k(block), queries(block), ds(block), dq(block) {}
    };
    struct State {
      Fragment<Target, float, N, D> dk;
    };
    TW_INLINE static QueryGradient& outbox(Memory& memory) { return memory.dq; }
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.q.rows, M); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      if (step == 0) producer.put(memory.k, [&](auto copy, K& k) { copy.tile(p.k, k, t.m * N, 0, t.batch); });
      producer.put(memory.queries, [&](auto copy, Slot& slot) {
        copy.tile(p.q, slot.q, step * M, 0, t.batch);
        copy.vector(p.lse, slot.lse, t.batch, step * M);
        copy.vector(p.delta, slot.delta, t.batch, step * M);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      using Scores = Fragment<Target, float, M, N, warpgroups>;
      const K& k = block.take(memory.k);
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.queries);
        Scores ds;
        Fragment<Target, float, M, D, warpgroups> dq;
        RowVector<Target, float, Scores> lse, delta;
        block.mma(ds, slot.q, k, true);
        block.load(lse, slot.lse);
        block.load(delta, slot.delta);
        block.wait(leave<0>, ds);
        block.map(ds, lse, delta, [](auto s, auto l, auto d) { return (s - l) * d; });
        block.store(ds, memory.ds);
        block.fence();
        block.sync();
        block.mma(dq, memory.ds, view<Contract::rows>(k), true);
        block.mma(state.dk, view<Contract::rows>(memory.ds), view<Contract::rows>(slot.q), step == 0);
        block.wait(leave<0>, dq, state.dk);
        block.release(memory.queries);
        block.reduce_add(dq, memory.dq, p.dq, step * M, 0, t.batch);
        block.sync();  // all have read dS
      }
      block.release(memory.k);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.dk, p.dk, t.m * N, 0, t.batch);
    }
  };
};

/// Attention with latent keys: O = softmax(scale Q K^T) V, where V is the first `Dv` columns of K. A block has 64 queries or so on twice as
/// many rows: two warpgroups split S and O by columns, and tell each other what they have of a row.
template <class T, int M, int N, int D, int Dv>
struct LatentAttention {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = 2 * M;
    static constexpr int warpgroups = rows / 64;
    using Q = Shared<Target, T, M, D>;
    using K = Shared<Target, T, N, D>;
    using Scores = Fragment<Target, float, M, N, warpgroups>;
    struct Params {
      Global<Target, const T, Q> q;
      Global<Target, const T, K> k;
      Global<Target, float> out;
      float scale_log2;
    };
    struct Memory {
      Ring<Target, Q, 1> q;
      Ring<Target, K, 2> k;
      Buffer<Target, T, M, N> weights;
      RowExchange<Target, float, Scores> exchange;
      explicit constexpr Memory(auto& block) : q(block), k(block), weights(block), exchange(block) {}
    };
    struct State {
      Fragment<Target, float, M, Dv, warpgroups> out;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.k.rows, N); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, t.m * M, 0, t.batch); });
      producer.put(memory.k, [&](auto copy, K& k) { copy.tile(p.k, k, step * N, 0, t.batch); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      RowVector<Target, float, Scores> largest, largest_here, growth, sums;
      block.fill(largest, -kInfinity);
      block.fill(sums, 0.0f);
      block.fill(state.out, 0.0f);
      const Q& q = block.take(memory.q);
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        const K& k = block.take(memory.k);
        Scores scores;
        block.mma(scores, q, k, true);
        block.wait(leave<0>, scores);
        const int keys = p.k.rows - step * N;
        block.for_each(scores, [&](int, int col, auto& x) {
          x *= p.scale_log2;
          if (col >= keys) x = -kInfinity;
        });
        block.row_max(scores, largest_here, memory.exchange);
        block.for_rows(largest, [&](int, int i, auto& m) {
          const auto grown = max(m, largest_here[i]);
          growth[i] = exp2(m - grown);
          m = grown;
        });
        block.rows(scores, [&](int i, auto row) {
          const auto m = largest[i];
          sums[i] = sums[i] * growth[i] + row.map_partial_sum([m](auto x) { return exp2(x - m); });
        });
        block.map(state.out, growth, [](auto x, auto g) { return x * g; });
        block.store(scores, memory.weights);
        block.fence();
        block.sync();
        block.mma(state.out, memory.weights, view_columns<0, Dv>(view<Contract::rows>(k)), false);
        block.wait(leave<0>, state.out);
        block.release(memory.k);
      }
      block.release(memory.q);
      block.complete(sums, memory.exchange);
      block.map(state.out, sums, [](auto x, auto sum) { return x * reciprocal(sum); });
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.out, p.out, t.m * M, 0, t.batch);
    }
  };
};

/// A recurrence over a sequence, in chunks of C: the gated delta rule. Of each token t, with its query, key and value, a gate g (a power of
/// two) and a factor beta,
///   S = 2^g S, u = beta (v - S^T k), S = S + k u^T, out = S^T q.
/// Within a chunk, with G the cumulative sums of g and S that at its start, (I + A) U = R, where
///   A(i, j) = beta_i 2^(G_i - G_j) k_i k_j for j < i, and R = beta (V - 2^G K S).
template <class T, int C, int D>
struct GatedDeltaRule {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = C;
    static_assert(C == D, "the state has as many rows as a chunk");
    using Tokens = Shared<Target, T, C, D>;
    using OfTokens = SharedVector<Target, float, C>;
    struct Params {
      Global<Target, const T, Tokens> q, k, v;             ///< [batch, tokens, D]
      Global<Target, const float, OfTokens> gates, betas;  ///< [batch, tokens]
      Global<Target, float> out;
      Global<Target, float> last;  ///< [batch, D, D]: the state after the last token
    };
    struct Slot {
      Tokens q, k, v;
      OfTokens gates, betas;
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      VectorBuffer<Target, float, C> decay;
      InversionMemory<Target, C> inversion;
      Buffer<Target, T, D, D, Contract::rows> state;
      Buffer<Target, T, C, D, Contract::rows> updates;
      explicit constexpr Memory(auto& block) : ring(block), decay(block), inversion(block), state(block), updates(block) {}
    };
    struct State {
      Fragment<Target, float, D, D> s;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.q.rows, C); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.q, slot.q, step * C, 0, t.batch);
        copy.tile(p.k, slot.k, step * C, 0, t.batch);
        copy.tile(p.v, slot.v, step * C, 0, t.batch);
        copy.vector(p.gates, slot.gates, t.batch, step * C);
        copy.vector(p.betas, slot.betas, t.batch, step * C);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      using Square = Fragment<Target, float, C, C>;
      using Values = Fragment<Target, float, C, D>;
      block.fill(state.s, 0.0f);
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        Slot& slot = block.take(memory.ring);
        RowVector<Target, float, Square> decay, beta;
        ColumnVector<Target, float, Square> decay_of_columns;
        block.cumsum(slot.gates, memory.decay);
        block.load(decay, memory.decay);
        block.load(decay_of_columns, memory.decay);
        block.load(beta, slot.betas);
        const auto whole = memory.decay[C - 1];

        // (I + A)^-1
        Square x;
        block.mma(x, slot.k, slot.k, true);
        block.wait(leave<0>, x);
        block.map(x, decay, decay_of_columns, beta, [](auto kk, auto row, auto col, auto b) { return kk * b * exp2(row - col); });
        invert_unit_lower(block, x, memory.inversion);
        Operand<Target, T, C, C> factors;
        block.convert(factors, x);

        // U, with the state as an operand
        share(block, state.s, memory.state);
        Values old, updates;
        block.mma(old, slot.k, memory.state, true);
        block.wait(leave<0>, old);
        block.load(updates, slot.v);
        block.map(updates, old, decay, beta, [](auto v, auto o, auto d, auto b) { return b * (v - exp2(d) * o); });
        share(block, updates, memory.updates);
        block.mma(updates, factors, memory.updates, true);
        block.wait(leave<0>, updates);

        // The output: of the state before the chunk, and of the chunk's tokens up to each.
        block.sync();
        share(block, updates, memory.updates);
        Values out;
        block.mma(x, slot.q, slot.k, true);
        block.mma(out, slot.q, memory.state, true);
        block.wait(leave<0>, x, out);
        block.load(decay_of_columns, memory.decay);  // again, instead of being held in registers all the time
        block.map(x, decay, decay_of_columns, [](auto qk, auto row, auto col) { return qk * exp2(row - col); });
        block.for_each(x, [](int row, int col, auto& weight) {
          if (col > row) weight = 0.0f;
        });
        block.convert(factors, x);
        block.map(out, decay, [](auto o, auto d) { return o * exp2(d); });
        block.mma(out, factors, memory.updates, false);
        block.wait(leave<0>, out);
        block.store(out, p.out, step * C, 0, t.batch);

        // The state after the chunk.
        block.map(updates, decay, [whole](auto u, auto d) { return u * exp2(whole - d); });
        block.map(state.s, [whole](auto value) { return value * exp2(whole); });
        block.sync();
        share(block, updates, memory.updates);
        block.mma(state.s, view<Contract::rows>(slot.k), memory.updates, false);
        block.wait(leave<0>, state.s);
        block.sync();
        block.release(memory.ring);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.s, p.last, 0, 0, t.batch);
    }

    /// Stores a Fragment so that products may read it.
    TW_INLINE static void share(auto& block, const auto& fragment, const auto& buffer) {
      block.store(fragment, buffer);
      block.fence();
      block.sync();
    }
  };
};

/// Cumulative sums of an R x C tile along its rows and its columns, both ways, as a Fragment; and along its rows as Rows.
template <int R, int C>
struct CumulativeSums {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = R;
    struct Params {
      Global<Target, const float> in;
      Global<Target, float> by_row, by_row_backward, by_column, by_column_backward, of_rows, of_rows_backward;
    };
    struct Memory {
      Scratch<Target, float, R, C> scratch;
      explicit constexpr Memory(auto& block) : scratch(block) {}
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      const int row0 = t.m * R, col0 = t.n * C;
      const auto sums = [&]<class X>(const X& tile, const auto& to, auto f) {
        X x = tile;
        block.load(x, p.in, row0, col0);
        f(x);
        block.store(x, to, row0, col0);
      };
      const Fragment<Target, float, R, C> fragment{};
      sums(fragment, p.by_row, [&](auto& x) { block.row_cumsum(x); });
      sums(fragment, p.by_row_backward, [&](auto& x) { block.row_cumsum(x, Backward{}); });
      sums(fragment, p.by_column, [&](auto& x) { block.column_cumsum(x, memory.scratch); });
      sums(fragment, p.by_column_backward, [&](auto& x) { block.column_cumsum(x, memory.scratch, Backward{}); });
      const Rows<Target, float, R, C, R / 16> in_rows{};
      sums(in_rows, p.of_rows, [&](auto& x) { block.row_cumsum(x); });
      sums(in_rows, p.of_rows_backward, [&](auto& x) { block.row_cumsum(x, Backward{}); });
    }
  };
};

/// forwards and backwards = the cumulative sums of each tile's N elements of a vector, by way of a slot; `spread` = those forwards as
/// values of rows, times 2, minus those backwards as values of columns. `kGathers`: the ring is one into which all threads may copy.
template <int N, bool kGathers = false>
struct ThroughVectors {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = N;
    using Vector = SharedVector<Target, float, N>;
    struct Params {
      Global<Target, const float, Vector> in;  ///< [batch, length]
      Global<Target, float> spread;            ///< [tiles, N, N]
    };
    struct Memory {
      conditional<kGathers, GatherRing<Target, Vector, 2>, Ring<Target, Vector, 2>> ring;
      VectorBuffer<Target, float, N> sums, twice;
      explicit constexpr Memory(auto& block) : ring(block), sums(block), twice(block) {}
    };
    struct State {};
    TW_INLINE static int steps(const Params&, Tile) { return 1; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Vector& v) { copy.vector(p.in, v, t.batch, t.m * N - N / 2); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State&) {
      using X = Fragment<Target, float, N, N>;
      X x;
      RowVector<Target, float, X> by_row;
      ColumnVector<Target, float, X> by_column;
      const Vector& v = block.take(memory.ring);
      block.cumsum(v, memory.sums);
      block.load(by_row, memory.sums);
      block.for_rows(by_row, [](int, int, auto& value) { value *= 2.0f; });
      block.store(by_row, memory.twice);
      block.load(by_row, memory.twice);
      block.cumsum(v, memory.sums, Backward{});
      block.release(memory.ring);
      block.load(by_column, memory.sums);
      block.fill(x, 0.0f);
      block.map(x, by_row, by_column, [](auto, auto r, auto c) { return r - c; });
      block.store(x, p.spread, t.m * N, 0, t.batch);
    }
    TW_INLINE static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};

/// out = in^T, tile by tile: Fragments transposed through a Buffer of T.
template <class T, int R, int C>
struct TransposedFragments {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = R;
    static constexpr int warpgroups = R / 64;
    struct Params {
      Global<Target, const T> in;
      Global<Target, T> out;
    };
    struct Memory {
      Buffer<Target, T, C, R> buffer;
      explicit constexpr Memory(auto& block) : buffer(block) {}
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      Fragment<Target, float, R, C> x;
      Fragment<Target, float, C, R, warpgroups> y;
      block.load(x, p.in, t.m * R, t.n * C);
      transpose(block, x, y, memory.buffer);
      block.store(y, p.out, t.n * C, t.m * R);
    }
  };
};

/// out = A B^T with M rows on one warpgroup for each 64 `Rows`: accumulators of more rows than the kernel. B's elements are those of T, in
/// a tensor of another type of 16 bits.
template <class T, class Other, int M, int N, int K, int kRows>
struct TallProduct {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = kRows;
    using A = Shared<Target, T, M, K>;
    using B = Shared<Target, Other, N, K>;
    struct Slot {
      A a;
      B b;
    };
    struct Params {
      Global<Target, const T, A> a;
      Global<Target, const Other, B> b;
      Global<Target, float> out;
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Fragment<Target, float, M, N, kRows / 64> acc;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.a.cols, K); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.a, slot.a, t.m * M, step * K);
        copy.tile(p.b, slot.b, t.n * N, step * K);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.ring);
        block.mma(state.acc, slot.a, view_as<T>(slot.b), step == 0);
        block.wait(leave<0>, state.acc);
        block.release(memory.ring);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.acc, p.out, t.m * M, t.n * N);
    }
  };
};

/// Of X = [X0, X1], 64 columns each: by_columns = X1 X1^T and by_rows = X1^T X0. X lies in a slot, or, if `kFromBuffer`, in a Buffer.
template <class T, bool kFromBuffer>
struct ViewedProducts {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = 64;
    using X = Shared<Target, T, 64, 128>;
    struct Params {
      Global<Target, const T, X> x;
      Global<Target, float> by_columns, by_rows;
    };
    struct Memory {
      Ring<Target, X, 2> ring;
      Buffer<Target, T, 64, 128> buffer;
      explicit constexpr Memory(auto& block) : ring(block), buffer(block) {}
    };
    struct State {
      Fragment<Target, float, 64, 64> by_columns, by_rows;
    };
    TW_INLINE static int steps(const Params&, Tile) { return 1; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, X& x) { copy.tile(p.x, x, t.m * 64, 0); });
    }
    TW_INLINE static void compute(auto& block, const Params&, Tile, Memory& memory, State& state) {
      X& x = block.take(memory.ring);
      if constexpr (kFromBuffer) {
        Fragment<Target, float, 64, 128> values;
        block.load(values, x);
        block.store(values, memory.buffer);
        block.fence();
        block.sync();
        multiply(block, memory.buffer, state);
      } else {
        multiply(block, x, state);
      }
      block.release(memory.ring);
    }
    TW_INLINE static void multiply(auto& block, const auto& x, State& state) {
      const auto x0 = view_columns<0, 64>(x), x1 = view_columns<64, 64>(x);
      block.mma(state.by_columns, x1, x1, true);
      block.mma(state.by_rows, view<Contract::rows>(x1), view<Contract::rows>(x0), true);
      block.wait(leave<0>, state.by_columns, state.by_rows);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.by_columns, p.by_columns, t.m * 64, 0);
      block.store(state.by_rows, p.by_rows, t.m * 64, 0);
    }
  };
};

/// The inverses of square matrices with ones on the diagonal, of which the part below the diagonal is given.
template <int N>
struct UnitLowerInverses {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = N;
    struct Params {
      Global<Target, const float> in;
      Global<Target, float> out;
    };
    struct Memory {
      InversionMemory<Target, N> inversion;
      explicit constexpr Memory(auto& block) : inversion(block) {}
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      Fragment<Target, float, N, N> x;
      block.load(x, p.in, t.m * N, 0);
      invert_unit_lower(block, x, memory.inversion);
      block.store(x, p.out, t.m * N, 0);
    }
  };
};

/// out(row, col) = 3 (64 row + col), the sum of two Buffers that one pass wrote.
struct BuffersUpdatedTogether {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = 64;
    struct Params {
      Global<Target, float> out;
    };
    struct Memory {
      Buffer<Target, float, 64, 64> once, twice;
      explicit constexpr Memory(auto& block) : once(block), twice(block) {}
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      block.update(
          64 * 64,
          [&](int n) {
            memory.once.at(n / 64, n % 64) = static_cast<float>(n);
            memory.twice.at(n / 64, n % 64) = static_cast<float>(2 * n);
          },
          memory.once, memory.twice);
      Fragment<Target, float, 64, 64> x, y;
      block.load(x, memory.once);
      block.load(y, memory.twice);
      block.map(x, y, [](auto a, auto b) { return a + b; });
      block.store(x, p.out, t.m * 64, 0);
    }
  };
};

/// What a kernel with Buffers does wrong, or need not do.
enum class Slip {
  none,
  no_fence,
  no_barrier,
  fence_after_barrier,
  no_wait,
  no_barrier_before_store,
  no_barrier_before_load,
  no_barrier_after_load,
  nothing_stored,
  two_stores,
  no_last_barrier,
  warpgroup_barrier,  ///< enough for rows that a warpgroup writes and reads by itself
  warpgroup_barrier_for_all_rows
};

/// Twice: x = A by way of a Buffer, y = x B^T or A x^T by way of another one, and sum += y.
template <Slip slip>
struct Careless {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = 128;
    using Schedule = Banded<1>;
    using Operand = Shared<Target, bf16, 128, 64>;
    struct Params {
      Global<Target, const bf16, Operand> a, b;
      Global<Target, float> sum;
    };
    struct Slot {
      Operand a, b;
    };
    struct Memory {
      Ring<Target, Slot, 1> ring;
      Buffer<Target, bf16, 128, 64> x;
      Buffer<Target, float, 128, 128> y;
      explicit constexpr Memory(auto& block) : ring(block), x(block), y(block) {}
    };
    struct State {};
    TW_INLINE static int steps(const Params&, Tile) { return 1; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.a, slot.a, 0, 0);
        copy.tile(p.b, slot.b, 0, 0);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile, Memory& memory, State&) {
      constexpr auto is = [](Slip what) { return slip == what; };
      constexpr bool of_warpgroup = is(Slip::warpgroup_barrier) || is(Slip::warpgroup_barrier_for_all_rows);
      const auto barrier = [&] {
        if (of_warpgroup)
          block.sync_warpgroup();
        else
          block.sync();
      };
      Slot& slot = block.take(memory.ring);
      Fragment<Target, float, 128, 64> x;
      Fragment<Target, float, 128, 128> y;
      for (int round = 0; round < 2; ++round) {
        block.load(x, slot.a);
        if (!is(Slip::nothing_stored)) block.store(x, memory.x);
        if (is(Slip::two_stores)) block.store_transposed(Fragment<Target, float, 64, 128, 2>{}, memory.x);
        if (is(Slip::fence_after_barrier)) block.sync();
        if (!is(Slip::no_fence)) block.fence();
        if (!is(Slip::no_barrier) && !is(Slip::fence_after_barrier)) barrier();
        if (is(Slip::warpgroup_barrier_for_all_rows))
          block.mma(y, slot.b, memory.x, true);
        else
          block.mma(y, memory.x, slot.b, true);
        if (is(Slip::no_wait)) block.store(x, memory.x);
        block.wait(leave<0>, y);
        if (!is(Slip::no_barrier_before_store)) barrier();
        if (is(Slip::no_barrier_before_store)) block.store(x, memory.x);
        block.store(y, memory.y);
        if (!is(Slip::no_barrier_before_load)) barrier();
        block.load(y, memory.y);
        if (is(Slip::no_last_barrier) && round == 1) break;
        if (!is(Slip::no_barrier_after_load)) barrier();
        block.store(y, memory.y);
        block.atomic_add(y, p.sum, 0, 0);
      }
      block.release(memory.ring);
    }
    TW_INLINE static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};

enum class SoloSlip {
  none,
  unjoined,        ///< a solo begins before the last one was joined
  same_warpgroup,  ///< one warpgroup plays twice
  unplayed,        ///< nobody has played what is joined
  read_by_both     ///< both warpgroups multiply what the first of them stores next
};

/// O = sum over blocks n of 64 keys of relu(Q K_n^T) V_n, and the sums of relu(Q K_n^T) over all keys. Two warpgroups play solos: each
/// makes the weights of every second block, and both multiply all weights with their half of V's columns.
template <SoloSlip slip>
struct Solos {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = 128, warpgroups = 2;
    using Schedule = Banded<1>;
    using Q = Shared<Target, bf16, 64, 64>;
    using V = Shared<Target, bf16, 64, 128, Contract::rows>;
    using Weights = SoloFragment<Target, float, 64, 64, warpgroups>;
    struct Params {
      Global<Target, const bf16, Q> q, k;
      Global<Target, const bf16, V> v;
      Global<Target, float> o;
      Pointer<Target, float> sums;  ///< [batch, 64]
    };
    struct Slot {
      Q k;
      V v;
    };
    struct Memory {
      Ring<Target, Q, 1> q;
      Ring<Target, Slot, 2> keys;
      Buffer<Target, bf16, 64, 64> weights;
      RowExchange<Target, float, Weights> exchange;
      explicit constexpr Memory(auto& block) : q(block), keys(block), weights(block), exchange(block) {}
    };
    struct State {
      Fragment<Target, float, 64, 128, warpgroups> o;
      RowVector<Target, float, Weights> sums;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return p.k.rows / 64; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, 0, 0, t.batch); });
      producer.put(memory.keys, [&](auto copy, Slot& slot) {
        copy.tile(p.k, slot.k, step * 64, 0, t.batch);
        copy.tile(p.v, slot.v, step * 64, 0, t.batch);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      constexpr bool from_memory = products_are_synchronous<Target> || slip == SoloSlip::read_by_both;
      block.fill(state.sums, 0.0f);
      const Q& q = block.take(memory.q);
      for (int step = 0; step < steps(p, t); ++step) {
        const Slot& slot = block.take(memory.keys);
        Operand<Target, bf16, 64, 64> weights;
        const int number = slip == SoloSlip::same_warpgroup ? 0 : step;
        if (slip != SoloSlip::unplayed) {
          block.solo(number, [&](auto& one) {
            Weights x;
            one.mma(x, q, slot.k, true);
            one.wait(leave<0>, x);
            one.rows(x, [&](int i, auto row) {
              state.sums[i] += row.map_partial_sum([](auto score) { return max(score, decltype(score)(0.0f)); });
            });
            if constexpr (products_are_synchronous<Target>) one.sync();  // all warps have multiplied the weights before
            if constexpr (!from_memory) one.convert(weights, x);
            one.store(x, memory.weights);
            if (slip == SoloSlip::read_by_both) one.fence();
          });
        }
        if (slip != SoloSlip::unjoined) {
          block.join(number, [&](auto& one) {
            if constexpr (!from_memory) one.load(weights, memory.weights);
          });
        }
        if constexpr (from_memory)
          block.mma(state.o, memory.weights, slot.v, step == 0);
        else
          block.mma(state.o, weights, slot.v, step == 0);
        block.wait(leave<0>, state.o);
        block.release(memory.keys);
      }
      block.release(memory.q);
      block.complete(state.sums, memory.exchange);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.o, p.o, 0, 0, t.batch);
      block.for_rows(state.sums, [&](int row, int, auto& sum) {
        if (block.owns_rows(state.sums)) p.sums[t.batch * 64 + row] = sum;
      });
    }
  };
};

/// O = sum over blocks n of 64 keys of relu(Q K_n^T) K_n, where row r of K is a row of codes, each times the row's scale for its half of
/// the columns. One warpgroup widens the next block's codes while the other one plays its solo. `Gathers`: rows come from `rows`, where
/// they are -1 they are zeros.
template <bool kGathersRows>
struct WidenedSolos {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = 128, warpgroups = 2;
    static constexpr int blocks = products_are_synchronous<Target> ? 1 : 2;
    using Q = Shared<Target, f16, 64, 128>;
    using K = Widened<Target, fp8_e4m3, 64, 128>;
    using Weights = SoloFragment<Target, float, 64, 64, warpgroups>;
    using Keys = conditional<kGathersRows, GatherRing<Target, K, blocks>, Ring<Target, K, blocks>>;
    struct Params {
      Global<Target, const f16, Q> q;
      Global<Target, const fp8_e4m3, Shared<Target, fp8_e4m3, 64, 128>> codes;
      Global<Target, const float, typename K::Scales> scales;  ///< of two columns, and two more that nobody uses
      Global<Target, float> o;
      Pointer<Target, const i32> rows;  ///< of `keys` keys
      int keys;
    };
    struct Memory {
      Ring<Target, Q, 1> q;
      Keys keys;
      Buffer<Target, f16, 64, 64> weights;
      explicit constexpr Memory(auto& block) : q(block), keys(block), weights(block) {}
    };
    struct State {
      Fragment<Target, float, 64, 128, warpgroups> o;
    };
    struct Halves {
      f16 low, high;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.keys, 64); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, 0, 0, t.batch); });
      producer.put(memory.keys, [&](auto copy, K& k) {
        if constexpr (kGathersRows) {
          const auto row_of = [&](int row) { return step * 64 + row < p.keys ? static_cast<int>(p.rows[step * 64 + row]) : -1; };
          copy.gather(p.scales, k.scales(), row_of, 0, t.batch);
          copy.gather(p.codes, k.codes(), row_of, 0, t.batch);
        } else {
          copy.tile(p.scales, k.scales(), step * 64, 0, t.batch);
          copy.tile(p.codes, k.codes(), step * 64, 0, t.batch);
        }
      });
    }
    TW_INLINE static void widen(auto& one, const Params& p, int step, K& k) {
      const auto scales = one.template values_of_rows<64>([&](auto row) {
        return Halves{f16(k.scales().get(row, 0)), f16(k.scales().get(row, 1))};
      });
      one.sync();
      one.widen(k, scales, p.keys - step * 64, [](const auto& row, int col) { return col < 64 ? row.low : row.high; });
      one.fence();
      one.sync();
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      constexpr bool together = products_are_synchronous<Target>;
      const Q& q = block.take(memory.q);
      if constexpr (!together) block.solo(0, [&](auto& one) { widen(one, p, 0, block.peek(memory.keys, 0)); });
      for (int step = 0; step < steps(p, t); ++step) {
        K& k = block.take(memory.keys);
        Operand<Target, f16, 64, 64> weights;
        if constexpr (together) widen(block, p, step, k);
        block.solo(step, [&](auto& one) {
          Weights x;
          one.mma(x, q, k, true);
          one.wait(leave<0>, x);
          one.map(x, [](auto score) { return max(score, decltype(score)(0.0f)); });
          if constexpr (together) one.sync();  // all warps have multiplied the weights before
          if constexpr (!together) one.convert(weights, x);
          one.store(x, memory.weights);
        });
        if constexpr (!together) {
          if (step + 1 < steps(p, t)) block.meanwhile(step, [&](auto& one) { widen(one, p, step + 1, block.peek(memory.keys, 0)); });
        }
        block.join(step, [&](auto& one) {
          if constexpr (!together) one.load(weights, memory.weights);
        });
        const auto values = view<Contract::rows>(k);
        if constexpr (together)
          block.mma(state.o, memory.weights, values, step == 0);
        else
          block.mma(state.o, weights, values, step == 0);
        block.wait(leave<0>, state.o);
        block.release(memory.keys);
      }
      block.release(memory.q);
      block.sync();
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) { block.store(state.o, p.o, 0, 0, t.batch); }
  };
};

/// sum += x of each tile in turn, from the first to the last. The turns of tiles are `Step` apart: if that is not 1, the second never
/// comes.
template <int Step>
struct ThroughTurns {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = 64;
    using Schedule = Banded<1>;
    using In = Shared<Target, bf16, 64, 64>;
    using Sum = Outbox<Target, 64, 64>;
    struct Params {
      Global<Target, const bf16, In> x;
      Global<Target, float, Sum> sum;  ///< of every 8 columns the even ones first
      Pointer<Target, u32> turns;
    };
    struct Memory {
      Ring<Target, In, 2> ring;
      Sum sum;
      explicit constexpr Memory(auto& block) : ring(block), sum(block) {}
    };
    struct State {};
    TW_INLINE static Sum& outbox(Memory& memory) { return memory.sum; }
    TW_INLINE static int steps(const Params&, Tile) { return 1; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, In& x) { copy.tile(p.x, x, t.m * 64, 0); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State&) {
      Fragment<Target, float, 64, 64> x;
      block.load(x, block.take(memory.ring));
      block.release(memory.ring);
      block.reduce_add_in_turn(x, memory.sum, p.sum, 0, 0, 0, 0, p.turns, 0, t.m * Step);
    }
    TW_INLINE static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};

/// Tiles in order, each to the next block: a tile waits only for tiles before it.
struct InOrderOfTiles {
  static constexpr Dispatch dispatch = Dispatch::persistent;
  TW_INLINE static constexpr Tile at(const TileGrid&, int i) { return {i, 0, 0}; }
};

/// The sum of all tiles of x: the last one waits for the others, and adds what they saved.
template <int R, int C>
struct SavedSums {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = R;
    static constexpr bool waits = true;
    using Sum = Fragment<Target, float, R, C>;
    using Schedule = InOrderOfTiles;
    struct Params {
      Global<Target, const float> x;
      Global<Target, float> saved;  ///< [tiles, R, C]
      Global<Target, float> sum;    ///< [R, C]
      Pointer<Target, u32> counter;
      int tiles;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Sum sum;
      block.load(sum, p.x, t.m * R, 0);
      if (t.m + 1 < p.tiles) {
        block.save(sum, p.saved, t.m);
        block.announce(p.counter, 0);
        return;
      }
      block.wait_for(p.counter, 0, p.tiles - 1);
      TW_NO_UNROLL
      for (int i = 0; i + 1 < p.tiles; ++i) block.add_saved(sum, p.saved, i);
      block.store(sum, p.sum, 0, 0);
    }
  };
};

/// Row n of each part is the sums of the columns of a tile of x: of `Count` tiles for each tile of the grid. The last one waits for all
/// parts, and adds them up.
template <int Count, int R, int C>
struct SumsByTheLast {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int warps = 8;
    static constexpr bool waits = true;
    using X = Rows<Target, float, R, C, warps, 8>;
    using Sums = Rows<Target, float, warps, C, warps>;
    using Schedule = InOrderOfTiles;
    struct Params {
      Global<Target, const float, X> x;
      Awaited<Target, float, Sums> parts;  ///< [tiles, 8, C]
      Global<Target, float, Sums> sum;     ///< [8, C]
      int tiles;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      X x[Count];
      TW_UNROLL
      for (int n = 0; n < Count; ++n) block.load(x[n], p.x, (t.m * Count + n) * R, 0);
      Sums sums, part;
      block.column_fold(x, sums, [](auto a, auto b) { return a + b; });
      block.store(sums, p.parts, 0, 0, t.m);
      if (t.m + 1 < p.tiles) return;
      block.fill(sums, 0.0f);
      TW_NO_UNROLL
      for (int i = 0; i < p.tiles; ++i) {
        block.await([&](auto& loads) { loads.load(part, p.parts, 0, 0, i); });
        block.map(sums, part, [](auto a, auto b) { return a + b; });
      }
      block.store(sums, p.sum, 0, 0);
    }
  };
};

/// y(t) = the products of x's rows with the rows of tile t of integers. `One`: x has one row, which is spread over all rows.
template <class T, int N, int C, bool One>
struct DigitProducts {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int warps = 8;
    using Codes = Shared<Target, i8, 16, C>;
    using Operand = DividedOperand<Target, T, N, C, warps>;
    using Out = Rows<Target, float, 2 * warps, 16, warps, 1>;
    struct Params {
      Global<Target, const T, Rows<Target, float, warps, C, warps, 8>> x;  ///< [N or 1, C]
      Global<Target, const i8, Codes> codes;                               ///< [16 tiles, C]
      Global<Target, float, Out> y;                                        ///< [tiles, N, 16]
    };
    struct Memory {
      Ring<Target, Codes, 2> codes;
      Scratch<Target, float, 16 * warps, 16 * N> sums;
      explicit constexpr Memory(auto& block) : codes(block), sums(block) {}
    };
    struct State {};
    TW_INLINE static int steps(const Params&, Tile) { return 1; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int, Memory& memory) {
      producer.put(memory.codes, [&](auto copy, Codes& codes) { copy.tile(p.codes, codes, t.m * 16, 0); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State&) {
      Operand operand;
      DigitScales<Target, N, warps> scales;
      if constexpr (One) {
        DividedRow<Target, T, C, warps> row;
        block.load(row, p.x, 0, 0);
        block.make_digits(row, scales);
        block.spread(operand, row);
      } else {
        block.load(operand, p.x, 0, 0);
        block.make_digits(operand, scales);
      }
      DividedSums<Target, 16, N, warps> sums;
      block.fill(sums, 0.0f);
      block.add_products(sums, block.take(memory.codes), operand, scales);
      block.release(memory.codes);
      Out out;
      block.complete(sums, out, memory.sums);
      block.store(out, p.y, 0, 0, t.m);
    }
    TW_INLINE static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};

/// Integers of 4 bits, less 8, times a scale for each `Group` of them.
template <int Group>
struct GroupsOfCodes {
  using Codes = u4x2;
  using Scale = f16;
  template <class T>
  using Decode = FromZero;
  static constexpr int group = Group;
  static constexpr bool zeros = false;
  static constexpr float middle = 8;
};
/// y(t) = the products of x's only row with the rows of tile t of codes. x and the scales arrive in the same slots.
template <class T, int Group>
struct ProductsFromSlots {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int warps = 8, height = 32, depth = 1024, width = 8;
    using Codes = Shared<Target, u4x2, height, depth / 2>;
    using Scales = SharedStrip<Target, f16, height>;
    using PartOfX = SharedVector<Target, T, 256>;
    using Out = Rows<Target, float, width, height, warps, 1>;
    struct Params {
      Global<Target, const T, PartOfX> x;        ///< [1, columns]
      Global<Target, const u4x2, Codes> codes;   ///< [height tiles, columns / 2]
      Global<Target, const f16, Scales> scales;  ///< [height tiles, columns / Group]
      Global<Target, const u8> zeros;            ///< without elements
      Global<Target, float> y;                   ///< [1, height tiles]
      int steps;
    };
    struct Slot {
      Codes codes;
      Scales scales[depth / Group / Scales::cols];
      PartOfX x[depth / PartOfX::size];
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      Scratch<Target, float, 16 * warps, height * width> sums;
      explicit constexpr Memory(auto& block) : ring(block), sums(block) {}
    };
    struct State {};
    TW_INLINE static int steps(const Params& p, Tile) { return p.steps; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.codes, slot.codes, t.m * height, step * Codes::cols);
        int col = step * depth / Group;
        for (Scales& part : slot.scales) {
          copy.tile(p.scales, part, t.m * height, col);
          col += Scales::cols;
        }
        col = step * depth;
        for (PartOfX& part : slot.x) {
          copy.vector(p.x, part, 0, col);
          col += PartOfX::size;
        }
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State&) {
      DividedSums<Target, height, width, warps> sums;
      block.fill(sums, 0.0f);
      for (int step = 0; step < p.steps; ++step) {
        const Slot& slot = block.take(memory.ring);
        DividedOperand<Target, T, width, depth, warps> x;
        DividedScales<Target, height, depth, GroupsOfCodes<Group>, warps> scales;
        block.load(x, slot.x);
        block.load(scales, slot.scales, p.zeros, t.m * height, step * depth);
        block.add_products(sums, slot.codes, x, scales);
        block.release(memory.ring);
      }
      Out out;
      block.complete(sums, out, memory.sums);
      block.store(out, p.y, 0, t.m * height);
    }
    TW_INLINE static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};

enum class RelaySlip { none, stores_twice, waits_for_itself };
/// y(t) = y(t - 1) + x(t), tile after tile: each waits for the one before. What a tile loads of y(t - 1) with its rows in reverse order,
/// and of its row 3 alone, is stored, too.
template <class T, RelaySlip slip = RelaySlip::none>
struct Relay {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int warps = 8, height = 8, width = 256;
    static constexpr bool waits = true;
    using X = Rows<Target, float, height, width, warps, 8>;
    using Schedule = InOrderOfTiles;
    struct Params {
      Global<Target, const float, X> x;  ///< [tiles, height, width], as the others
      Awaited<Target, T, X> y;
      Global<Target, float, X> copies, reversed, third;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      X x, before, reversed, third;
      ColumnVector<Target, float, X> row;
      block.load(x, p.x, 0, 0, t.m);
      const int from = slip == RelaySlip::waits_for_itself ? t.m : t.m - 1;
      if (from >= 0) {
        const auto load = [&](auto& loads) {
          loads.load(before, p.y, 0, 0, from);
          loads.gather(
              reversed, p.y, [](int r) { return height - 1 - r; }, 0, from);
          loads.load(row, p.y, 3, 0, from);
        };
        if (t.m % 2 == 0)
          block.await(load);
        else
          block.await(block.attempt(load), load);
        block.map(x, before, [](auto a, auto b) { return a + b; });
        block.fill(third, 0.0f);
        block.map(third, row, [](auto, auto y) { return y; });
        block.store(reversed, p.reversed, 0, 0, t.m);
        block.store(third, p.third, 0, 0, t.m);
      }
      block.store(x, p.y, 0, 0, t.m);
      if (slip == RelaySlip::stores_twice) block.store(x, p.y, 0, 0, t.m);
      block.store(x, p.copies, 0, 0, t.m);
    }
  };
};

/// Columns in order again, of tensors to which Fragments were added.
template <int Rows, int Cols>
struct Interleaves {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    using Values = tw::Rows<Target, float, Rows, Cols, 4, 8>;
    struct Params {
      Global<Target, const float, Values> from;
      Global<Target, float, Values> to;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Values x;
      block.load(x, p.from, t.m * Rows, 0);
      block.interleave(x);
      block.store(x, p.to, t.m * Rows, 0);
    }
  };
};

/// An Outbox that run() would not know.
template <bool Named>
struct ForgetsOutbox {
  static constexpr const char* source = kTileKernels;
  template <class Target>
  struct On {
    static constexpr int rows = 64;
    using In = Shared<Target, bf16, 64, 64>;
    using Sum = Outbox<Target, 64, 64>;
    struct Params {
      Global<Target, const bf16, In> x;
      Global<Target, float, Sum> sum;
    };
    struct Memory {
      Ring<Target, In, 2> ring;
      Sum other, sum;
      explicit constexpr Memory(auto& block) : ring(block), other(block), sum(block) {}
    };
    struct State {};
    TW_INLINE static Sum& outbox(Memory& memory) requires Named { return memory.other; }
    TW_INLINE static int steps(const Params&, Tile) { return 1; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, In& x) { copy.tile(p.x, x, t.m * 64, 0); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile, Memory& memory, State&) {
      Fragment<Target, float, 64, 64> x;
      block.load(x, block.take(memory.ring));
      block.release(memory.ring);
      block.reduce_add(x, memory.sum, p.sum, 0, 0);
    }
    TW_INLINE static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};

}  // namespace tw::test

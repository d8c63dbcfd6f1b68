#pragma once

#include "tilewave/tile/language.tile.hpp"

// Kernels that load tiles through rings, and multiply them. language_products_test.cpp runs them on both targets.

namespace tw::test {

inline constexpr const char* kProductKernels = "tests/product_kernels.tile.hpp";

/// out = in through a ring of `Stages` slots, of which the kernel holds up to `Hold` before it gives the oldest back.
template <class T, int R, int C, Contract contract, int Stages, int Hold>
struct ThroughRing {
  static_assert(Hold <= Stages);
  static constexpr const char* source = kProductKernels;
  template <class Target>
  struct On {
    using Piece = Shared<Target, T, R, C, contract>;
    static constexpr int rows = R;
    struct Params {
      Global<Target, const T, Piece> in;
      Global<Target, T> out;
      int steps;
    };
    struct Memory {
      Ring<Target, Piece, Stages> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    TW_INLINE static int steps(const Params& p, Tile) { return p.steps; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Piece& piece) { copy.tile(p.in, piece, t.m * R, step * C, t.batch); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, auto&) {
      Piece* held[Hold];
      for (int step = 0; step < p.steps + Hold - 1; ++step) {
        if (step < p.steps) held[step % Hold] = &block.take(memory.ring);
        const int oldest = step - (Hold - 1);
        if (oldest < 0) continue;
        Fragment<Target, float, R, C> x;
        block.load(x, *held[oldest % Hold]);
        block.store(x, p.out, t.m * R, oldest * C, t.batch);
        block.sync();  // every thread has read the slot
        block.release(memory.ring);
      }
    }
    TW_INLINE static void finish(auto&, const Params&, Tile, Memory&, auto&) {}
  };
};

/// out[n, h, w, c] = in[n, h * step - 1, w * step - 2, c], 0 outside, one window of R pixels for each tile; the steps are those of the
/// window that `in` is bound with.
template <class T, int R, int C>
struct ThroughWindows {
  static constexpr const char* source = kProductKernels;
  template <class Target>
  struct On {
    using Piece = Shared<Target, T, R, C>;
    using Out = Staging<Target, T, R, C>;
    static constexpr int rows = R;
    struct Params {
      Windowed<Target, const T, Piece> in;
      Windowed<Target, T, Out> out;
    };
    struct Memory {
      Ring<Target, Piece, 2> ring;
      Out out;
      explicit constexpr Memory(auto& block) : ring(block), out(block) {}
    };
    TW_INLINE static int steps(const Params&, Tile) { return 1; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int, Memory& memory) {
      const Window& w = p.in.window;
      producer.put(memory.ring, [&](auto copy, Piece& piece) {
        copy.window(p.in, piece, t.n * w.width() * w.row_step - 2, 0, t.m * w.height() * w.i_step - 1,
                    t.batch * (R / (w.width() * w.height())));
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, auto&) {
      const Window& w = p.out.window;
      Fragment<Target, float, R, C> x;
      block.load(x, block.take(memory.ring));
      block.store_window(x, memory.out, p.out, t.n * w.width(), 0, t.m * w.height(), t.batch * (R / (w.width() * w.height())));
      block.sync();  // every thread has read the slot
      block.release(memory.ring);
    }
    TW_INLINE static void finish(auto&, const Params&, Tile, Memory&, auto&) {}
  };
};

/// out = sum over blocks of N keys of T(Q K^T) V, T() rounding: attention without its softmax. Three rings, each with its own pace; a
/// product whose left operand is in registers, from where it is also stored, as `scores`; both contractions.
template <class T, int M, int N, int D>
struct Chain {
  static constexpr const char* source = kProductKernels;
  template <class Target>
  struct On {
    using Q = Shared<Target, T, M, D>;
    using K = Shared<Target, T, N, D>;
    using V = Shared<Target, T, N, D, Contract::rows>;
    static constexpr int rows = M;
    struct Params {
      Global<Target, const T, Q> q;
      Global<Target, const T, K> k;
      Global<Target, const T, V> v;
      Global<Target, float> scores, out;
    };
    struct Memory {
      Ring<Target, Q, 1> q;
      Ring<Target, K, 2> k;
      Ring<Target, V, 3> v;
      explicit constexpr Memory(auto& block) : q(block), k(block), v(block) {}
    };
    struct State {
      Fragment<Target, float, M, D> out;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.k.rows, N); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, t.m * M, 0); });
      producer.put(memory.k, [&](auto copy, K& k) { copy.tile(p.k, k, step * N, 0); });
      producer.put(memory.v, [&](auto copy, V& v) { copy.tile(p.v, v, step * N, 0); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      const Q& q = block.take(memory.q);
      Operand<Target, T, M, N> weights;
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        Fragment<Target, float, M, N> scores;
        block.mma(scores, q, block.take(memory.k), true);
        block.wait(leave<0>, scores);
        block.release(memory.k);
        if (step > 0) {  // the product before reads `weights`
          block.wait(leave<0>, state.out);
          block.release(memory.v);
        }
        block.convert(weights, scores);
        block.mma(state.out, weights, block.take(memory.v), step == 0);
        block.convert(scores, weights);  // while the product reads them
        block.store(scores, p.scores, t.m * M, step * N);
      }
      block.wait(leave<0>, state.out);
      block.release(memory.v);
      block.release(memory.q);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) { block.store(state.out, p.out, t.m * M, 0); }
  };
};

/// out = A B of a B [N, D] whose rows come in parts from pages [page, row, D] of 2 `part` rows, and of which `rows_used` count; or A B^T,
/// where a product sums over columns. Only rows of `out` before `rows_end` are written.
template <class T, int M, int N, int D, Contract contract>
struct PagedProduct {
  static constexpr const char* source = kProductKernels;
  template <class Target>
  struct On {
    static constexpr bool over_rows = contract == Contract::rows;
    static constexpr int cols = over_rows ? D : N;
    using A = Shared<Target, T, M, over_rows ? N : D>;
    using B = Shared<Target, T, N, D, contract>;
    using Out = Staging<Target, T, M, cols>;
    static constexpr int rows = M;
    struct Params {
      Global<Target, const T, A> a;
      Global<Target, const T, B> b;
      Global<Target, T, Out> out;
      Pointer<Target, const i32> pages;
      int part, rows_used, rows_end;
    };
    struct Memory {
      Ring<Target, A, 1> a;
      Ring<Target, B, 1> b;
      Out out;
      explicit constexpr Memory(auto& block) : a(block), b(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, M, cols> acc;
    };
    TW_INLINE static int steps(const Params&, Tile) { return 1; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int, Memory& memory) {
      producer.put(memory.a, [&](auto copy, A& a) { copy.tile(p.a, a, t.m * M, 0); });
      producer.put(memory.b, [&](auto copy, B& b) {
        for (int row = 0; row < N; row += p.part) copy.part(p.b, b, row, p.part, row % (2 * p.part), 0, p.pages[row / (2 * p.part)]);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile, Memory& memory, State& state) {
      const A& a = block.take(memory.a);
      B& b = block.take(memory.b);
      block.zero_rows(b, p.rows_used);
      block.mma(state.acc, a, b, true);
      block.wait(leave<0>, state.acc);
      block.release(memory.a);
      block.release(memory.b);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      block.store(state.acc, memory.out, p.out, t.m * M, 0, 0, 0, p.rows_end);
    }
  };
};

/// out = (2 A) B^T: A is doubled where it lies, in shared memory, before the product reads it.
template <class T, int M, int N, int K>
struct DoubledProduct {
  static constexpr const char* source = kProductKernels;
  template <class Target>
  struct On {
    static constexpr int rows = M;
    struct Slot {
      Shared<Target, T, M, K> a;
      Shared<Target, T, N, K> b;
    };
    struct Params {
      Global<Target, const T, Shared<Target, T, M, K>> a;
      Global<Target, const T, Shared<Target, T, N, K>> b;
      Global<Target, float> out;
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Fragment<Target, float, M, N> acc;
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
        Slot& slot = block.take(memory.ring);
        Fragment<Target, float, M, K> a;
        block.load(a, slot.a);
        block.for_each(a, [](int, int, float& x) { x *= 2; });
        block.store(a, slot.a);
        block.mma(state.acc, slot.a, slot.b, step == 0);
        block.wait(leave<0>, state.acc);
        block.release(memory.ring);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.acc, p.out, t.m * M, t.n * N);
    }
  };
};

/// out = start - A B^T + 1000 row + col, row and col counting from the tile's first element; `rounded` is the same as i8. A is negated
/// where it lies, in shared memory. A is [M, K] or, if a product sums over its rows, [K, M]; B accordingly.
template <class T, class Sum, int M, int N, int K, Contract a_contract, Contract b_contract>
struct NegatedProduct {
  static constexpr const char* source = kProductKernels;
  template <class Target>
  struct On {
    using A = conditional<a_contract == Contract::columns, Shared<Target, T, M, K>, Shared<Target, T, K, M, Contract::rows>>;
    using B = conditional<b_contract == Contract::columns, Shared<Target, T, N, K>, Shared<Target, T, K, N, Contract::rows>>;
    static constexpr int rows = M;
    struct Slot {
      A a;
      B b;
    };
    struct Params {
      Global<Target, const T, A> a;
      Global<Target, const T, B> b;
      Global<Target, Sum> out;
      Global<Target, i8> rounded;
      Sum start;
      int depth;
    };
    struct Memory {
      Ring<Target, Slot, 2> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Fragment<Target, Sum, M, N> acc;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.depth, K); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        if constexpr (a_contract == Contract::columns)
          copy.tile(p.a, slot.a, t.m * M, step * K);
        else
          copy.tile(p.a, slot.a, step * K, t.m * M);
        if constexpr (b_contract == Contract::columns)
          copy.tile(p.b, slot.b, t.n * N, step * K);
        else
          copy.tile(p.b, slot.b, step * K, t.n * N);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      block.fill(state.acc, p.start);
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        Slot& slot = block.take(memory.ring);
        Rows<Target, Sum, A::rows, A::cols> a;
        block.load(a, slot.a);
        block.for_each(a, [](int, int, Sum& x) { x = -x; });
        block.store(a, slot.a);
        block.mma(state.acc, slot.a, slot.b, false);
        block.wait(leave<0>, state.acc);
        block.release(memory.ring);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.for_each(state.acc, [](int row, int col, Sum& x) { x += static_cast<Sum>(1000 * row + col); });
      block.store(state.acc, p.out, t.m * M, t.n * N);
      block.store(state.acc, p.rounded, t.m * M, t.n * N);
    }
  };
};

/// out = sum over steps of (A B^T) V, plus 1000 for each step with an element of A B^T above `limit`. A B^T replaces B in shared memory,
/// and two warpgroups share its rows.
template <class T>
struct InTheSlotOfB {
  static constexpr const char* source = kProductKernels;
  template <class Target>
  struct On {
    using A = Shared<Target, T, 64, 64>;
    using B = Shared<Target, T, 128, 64>;
    using V = Shared<Target, T, 128, 128>;
    using Product = Fragment<Target, float, 64, 128, 2>;
    using Middle = Buffer<Target, T, 64, 128>;
    static constexpr int rows = 128;
    struct Params {
      Global<Target, const T, A> a;  ///< [64, 64]
      Global<Target, const T, B> b;  ///< [128 * steps, 64]
      Global<Target, const T, V> v;  ///< [128 * steps, 128]
      Global<Target, float> out;     ///< [64, 128]
      int steps;
      float limit;
    };
    struct Memory {
      Ring<Target, A, 1> a;
      Ring<Target, B, 1> b;
      Ring<Target, V, 1> v;
      Middle middle;
      explicit constexpr Memory(auto& block) : a(block), b(block), v(block), middle(b) {}
    };
    struct State {
      Product out;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return p.steps; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile, int step, Memory& memory) {
      if (step == 0) producer.put(memory.a, [&](auto copy, A& a) { copy.tile(p.a, a, 0, 0); });
      producer.put(memory.b, [&](auto copy, B& b) { copy.tile(p.b, b, step * 128, 0); });
      producer.put(memory.v, [&](auto copy, V& v) { copy.tile(p.v, v, step * 128, 0); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile, Memory& memory, State& state) {
      const A& a = block.take(memory.a);
      block.fill(state.out, 0.0f);
      for (int step = 0; step < p.steps; ++step) {
        Product product;
        block.mma(product, a, block.take(memory.b), true);
        block.wait(leave<0>, product);
        block.sync();  // every warp has read B
        block.store(product, memory.middle);
        block.fence();
        RowVector<Target, float, Product> above;
        block.rows(product, [&](int i, auto row) { above[i] = row.map_partial_sum([&](auto x) { return x > p.limit ? 1.0f : 0.0f; }); });
        if (block.sync_any(above, [](auto x) { return x > 0.0f; })) block.map(state.out, [](auto x) { return x + 1000.0f; });
        const V& v = block.take(memory.v);
        if constexpr (products_are_synchronous<Target>) {
          block.mma(state.out, memory.middle, view<Contract::rows>(v), false);
          block.release(memory.b);
        } else {
          Operand<Target, T, 64, 128> left;
          block.load(left, memory.middle);
          block.release(memory.b);
          block.mma(state.out, left, view<Contract::rows>(v), false);
        }
        block.wait(leave<0>, state.out);
        block.release(memory.v);
      }
      block.release(memory.a);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile, Memory&, State& state) {
      block.scatter(
          state.out, p.out, [](int row) { return row; }, 0);
    }
  };
};

}  // namespace tw::test

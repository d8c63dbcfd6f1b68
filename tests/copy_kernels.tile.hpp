#pragma once

#include "tilewave/tile/language.tile.hpp"

// Kernels with operands that are decoded, converted to 8 bits, gathered, scattered or grouped. copy_test.cpp runs them.

namespace tw::test {

inline constexpr const char* kCopyKernels = "tests/copy_kernels.tile.hpp";

/// Where the scales of a PackedProduct come from. `Order`: a tile of them is [rows, groups] or, with Contract::rows, [groups, rows].
template <class Element, int Group, Contract Order>
struct ByGroup {
  using Scale = Element;
  static constexpr int group = Group;
  static constexpr Contract order = Order;
};
struct ByRow {};
struct WithoutScales {};

/// number * scale, or with a zero point (number - kZero) * scale.
template <int kZero>
struct Affine {
  TW_INLINE auto operator()(auto number, auto scale) const { return (number - static_cast<float>(kZero)) * scale; }
};

/// out[m, n] = sum over k of W[m, k] X[n, k], with W in codes of 4 or 2 bits: weights times activations. The codes are decoded into the
/// left operand, 64 columns at a time, while the tensor cores multiply the 64 columns before.
template <class T, class Sum, class Codes, class Scaling, class Decode, int BM, int BN>
struct PackedProduct {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    static constexpr int BK = 128, half = BK / 2;
    static constexpr bool by_group = requires { Scaling::group; };
    using W = Shared<Target, Codes, BM, BK / codes_in<Codes>>;
    using X = Shared<Target, T, BN, half>;
    using Acc = Fragment<Target, Sum, BM, BN>;
    template <class S, bool>
    struct GroupTile {
      static constexpr int least = 32 / static_cast<int>(sizeof(typename S::Scale));
      using Type =
          conditional<S::order == Contract::rows, Shared<Target, typename S::Scale, 8, BM>, Shared<Target, typename S::Scale, BM, least>>;
    };
    template <class S>
    struct GroupTile<S, false> {
      using Type = X;  // not used
    };
    using Scales = typename GroupTile<Scaling, by_group>::Type;
    using Schedule = Banded<4>;
    static constexpr int rows = BM;
    struct WithScales {
      W w;
      X x[2];
      Scales scales;
    };
    struct NoScales {
      W w;
      X x[2];
    };
    using Slot = conditional<by_group, WithScales, NoScales>;
    struct Params {
      Global<Target, const Codes, W> w;
      Global<Target, const T, X> x;
      Global<Target, const typename Scales::Element, Scales> scales;
      Global<Target, const float> row_scales;
      Global<Target, Sum> out;
      int depth;
    };
    struct Memory {
      Ring<Target, Slot, 3> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Acc acc;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.depth, BK); }
    /// How many scales of a row lie before this one in its 16 bytes: a copy begins with the first of them.
    TW_INLINE static int in_piece(int group) {
      if constexpr (by_group && Scaling::order == Contract::columns)
        return group % (16 / static_cast<int>(sizeof(typename Scales::Element)));
      else
        return 0;
    }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.w, slot.w, t.m * BM, step * (BK / codes_in<Codes>));
        for (int n = 0; n < 2; ++n) copy.tile(p.x, slot.x[n], t.n * BN, step * BK + n * half);
        if constexpr (by_group) {
          const int group = step * (BK / Scaling::group);
          if constexpr (Scaling::order == Contract::rows)
            copy.tile(p.scales, slot.scales, group, t.m * BM);
          else
            copy.tile(p.scales, slot.scales, t.m * BM, group - in_piece(group));
        }
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      RowVector<Target, float, Acc> row_scales;
      if constexpr (is_same<Scaling, ByRow>) block.load(row_scales, p.row_scales, t.m * BM, 0);
      const auto decode = [&](auto& to, const Slot& slot, int step, int first) {
        if constexpr (by_group)
          block.load(to, slot.w, group_scales<Scaling::group, Scaling::order>(slot.scales, in_piece(step * (BK / Scaling::group))), Decode{},
                     first);
        else if constexpr (is_same<Scaling, ByRow>)
          block.load(to, slot.w, row_scales, Decode{}, first);
        else
          block.load(to, slot.w, Unscaled{}, Decode{}, first);
      };
      Operand<Target, T, BM, half> low, high;
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.ring);
        decode(low, slot, step, 0);  // while the product of the step before may go on
        block.mma(state.acc, low, slot.x[0], step == 0);
        if (step > 0) {
          block.wait(leave<1>, state.acc);
          block.release(memory.ring);
        }
        decode(high, slot, step, half);
        block.mma(state.acc, high, slot.x[1], false);
        block.wait(leave<1>, state.acc);
      }
      block.wait(leave<0>, state.acc);
      block.release(memory.ring);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.acc, p.out, t.m * BM, t.n * BN);
    }
  };
};

/// Q = A B^T, halved `p.shift` times and rounded to T, 8 bits; out = Q C^T. A goes through registers, and so does Q: 8-bit left operands
/// from shared memory and from accumulators.
template <class T, class Sum, int M, int N, int D>
struct NarrowChain {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    using A = Shared<Target, T, M, D>;
    using B = Shared<Target, T, N, D>;
    using C = Shared<Target, T, D, N>;
    using Schedule = Banded<4>;
    static constexpr int rows = M;
    struct Params {
      Global<Target, const T, A> a;
      Global<Target, const T, B> b;
      Global<Target, const T, C> c;
      Global<Target, Sum> out;
      float factor;
    };
    struct Slot {
      B b;
      C c;
    };
    struct Memory {
      Ring<Target, A, 1> a;
      Ring<Target, Slot, 2> bc;
      explicit constexpr Memory(auto& block) : a(block), bc(block) {}
    };
    struct State {
      Fragment<Target, Sum, M, D> out;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.b.rows, N); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      if (step == 0) producer.put(memory.a, [&](auto copy, A& a) { copy.tile(p.a, a, t.m * M, 0); });
      producer.put(memory.bc, [&](auto copy, Slot& slot) {
        copy.tile(p.b, slot.b, step * N, 0);
        copy.tile(p.c, slot.c, 0, step * N);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      Operand<Target, T, M, D> a;
      Operand<Target, T, M, N> q;
      block.load(a, block.take(memory.a));
      block.release(memory.a);
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.bc);
        Fragment<Target, Sum, M, N> scores;
        block.mma(scores, a, slot.b, true);
        block.wait(leave<0>, scores, state.out);
        block.for_each(scores, [&](int, int, auto& x) { x = to<Sum>(static_cast<float>(x) * p.factor); });
        block.convert(q, scores);
        block.mma(state.out, q, slot.c, step == 0);
        block.wait(leave<0>, state.out);
        block.release(memory.bc);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) { block.store(state.out, p.out, t.m * M, 0); }
  };
};

/// The product of a mixture of experts. List entry n is token ids[n] / top_k's choice number ids[n], or -1: none. Blocks of BM entries
/// belong to one expert each. out[...] = weights[id] * X[token] W[expert]^T, where `Reduce` adds a token's choices up, in row token, and
/// else each has a row of its own, id.
template <class T, class Out, bool Reduce, int BM, int BN>
struct ExpertProduct {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    static constexpr int BK = 64;
    using X = Shared<Target, T, BM, BK>;
    using W = Shared<Target, T, BN, BK>;
    using Acc = Fragment<Target, float, BM, BN>;
    using Schedule = Banded<4>;
    static constexpr int rows = BM;
    struct Slot {
      X x;
      W w;
    };
    struct Params {
      Global<Target, const T, X> x;
      Global<Target, const T, W> w;  ///< [experts, N, K]
      Global<Target, Out> out;
      Pointer<Target, const i32> ids;      ///< p.count of them
      Pointer<Target, const i32> experts;  ///< of each block of BM entries
      Pointer<Target, const float> weights;
      int count, top_k;
    };
    struct Memory {
      GatherRing<Target, Slot, 4> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Acc acc;
    };
    TW_INLINE static int id_of(const Params& p, int entry) { return entry < p.count ? static_cast<int>(p.ids[entry]) : -1; }
    TW_INLINE static int token_of(const Params& p, int entry) {
      const int id = id_of(p, entry);
      return id < 0 ? -1 : static_cast<int>(static_cast<u32>(id) / static_cast<u32>(p.top_k));
    }
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.x.cols, BK); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.w, slot.w, t.n * BN, step * BK, p.experts[t.m]);
        copy.gather(
            p.x, slot.x, [&](int row) { return token_of(p, t.m * BM + row); }, step * BK);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.ring);
        block.mma(state.acc, slot.x, slot.w, step == 0);
        if (step > 0) {
          block.wait(leave<1>, state.acc);
          block.release(memory.ring);
        }
      }
      block.wait(leave<0>, state.acc);
      block.release(memory.ring);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      RowVector<Target, float, Acc> weights;
      block.for_rows(weights, [&](int row, int, auto& x) {
        const int id = id_of(p, t.m * BM + row);
        x = id < 0 ? 0.0f : static_cast<float>(p.weights[id]);
      });
      block.map(state.acc, weights, [](auto x, auto w) { return x * w; });
      if constexpr (Reduce)
        block.scatter_add(
            state.acc, p.out, [&](int row) { return token_of(p, t.m * BM + row); }, t.n * BN);
      else
        block.scatter(
            state.acc, p.out, [&](int row) { return id_of(p, t.m * BM + row); }, t.n * BN);
    }
  };
};

/// Row n of out = row ids[n] of `in`, zeros outside it, through a tile in shared memory.
template <class T, int R, int C>
struct ThroughGather {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    using Piece = Shared<Target, T, R, C>;
    using X = Fragment<Target, float, R, C>;
    using Schedule = Banded<2>;
    static constexpr int rows = R;
    struct Params {
      Global<Target, const T, Piece> in;
      Global<Target, float> out;
      Pointer<Target, const i32> ids;
    };
    struct Memory {
      GatherRing<Target, Piece, 2> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      X x;
    };
    TW_INLINE static int steps(const Params&, Tile) { return 1; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Piece& piece) {
        copy.gather(
            p.in, piece, [&](int row) { return t.m * R + row < p.out.rows ? static_cast<int>(p.ids[t.m * R + row]) : -1; }, t.n * C,
            t.batch);
      });
    }
    TW_INLINE static void compute(auto& block, const Params&, Tile, Memory& memory, State& state) {
      block.load(state.x, block.take(memory.ring));
      block.release(memory.ring);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.x, p.out, t.m * R, t.n * C, t.batch);
    }
  };
};

/// out = Y^T X over the rows that ids names: rows are gathered into tiles whose rows are summed over.
template <class T, int M, int N>
struct GatheredDepth {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    static constexpr int BK = 64;
    using Y = Shared<Target, T, BK, M, Contract::rows>;
    using X = Shared<Target, T, BK, N, Contract::rows>;
    static constexpr int rows = M;
    struct Params {
      Global<Target, const T, Y> y;
      Global<Target, const T, X> x;
      Global<Target, float> out;
      Pointer<Target, const i32> ids;
      int count;
    };
    struct Memory {
      Ring<Target, Y, 2> y;  ///< by TMA, at the pace of `x`
      GatherRing<Target, X, 2> x;
      explicit constexpr Memory(auto& block) : y(block), x(block) {}
    };
    struct State {
      Fragment<Target, float, M, N> acc;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.count, BK); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.put(memory.y, [&](auto copy, Y& y) { copy.tile(p.y, y, step * BK, t.m * M); });
      producer.put(memory.x, [&](auto copy, X& x) {
        copy.gather(
            p.x, x,
            [&](int row) {
              const int entry = step * BK + row;
              return entry < p.count ? static_cast<int>(p.ids[entry]) : -1;
            },
            t.n * N);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        block.mma(state.acc, block.take(memory.y), block.take(memory.x), step == 0);
        block.wait(leave<0>, state.acc);
        block.release(memory.y);
        block.release(memory.x);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.acc, p.out, t.m * M, t.n * N);
    }
  };
};

/// Row n of `in` to row ids[n] of `out`, or added to it, through Rows.
template <class T, bool Add, int R, int C>
struct ScatterRows {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    struct Params {
      Global<Target, const float> in;
      Global<Target, T> out;
      Pointer<Target, const i32> ids;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Rows<Target, float, R, C> x;
      block.load(x, p.in, t.m * R, t.n * C);
      const auto row_of = [&](int row) { return t.m * R + row < p.in.rows ? static_cast<int>(p.ids[t.m * R + row]) : -1; };
      if constexpr (Add)
        block.scatter_add(x, p.out, row_of, t.n * C);
      else
        block.scatter(x, p.out, row_of, t.n * C);
    }
  };
};

/// out[rows of segment g] = X[rows of segment g] W[g]^T. Blocks of a cluster share the tiles of W. `kAsked`: the cluster that the tiles are
/// looked up for.
template <class T, int BM, int BN, int kCluster, int kAsked = kCluster>
struct GroupedProduct {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    static constexpr int BK = 64;
    using X = Shared<Target, T, BM, BK>;
    using W = Shared<Target, T, BN, BK>;
    using Out = Staging<Target, T, BM, BN>;
    using Schedule = Banded<2>;
    static constexpr int rows = BM, cluster = kCluster;
    struct Slot {
      X x;
      W w;
    };
    struct Params {
      Global<Target, const T, X> x;
      Global<Target, const T, W, kCluster> w;  ///< [segments, N, K]
      Global<Target, T, Out> out;
      Segments<Target> segments;
    };
    struct Work {
      typename Segments<Target>::Part part;
      int n;
    };
    TW_INLINE static Work work(const Params& p, Tile t) { return {p.segments.find(t.m, BM, kAsked), t.n}; }
    struct Memory {
      Ring<Target, Slot, 4> ring;
      Out out;
      explicit constexpr Memory(auto& block) : ring(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, BM, BN> acc;
    };
    TW_INLINE static int steps(const Params& p, const Work& w) { return w.part.empty ? 0 : ceil_div(p.x.cols, BK); }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.x, slot.x, w.part.first, step * BK);
        copy.tile_for_cluster(p.w, slot.w, w.n * BN, step * BK, w.part.segment);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      const int n = steps(p, w);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.ring);
        block.mma(state.acc, slot.x, slot.w, step == 0);
        if (step > 0) {
          block.wait(leave<1>, state.acc);
          block.release(memory.ring);
        }
      }
      block.wait(leave<0>, state.acc);
      if (n > 0) block.release(memory.ring);
    }
    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (!w.part.empty) block.store(state.acc, memory.out, p.out, w.part.first, w.n * BN, 0, 0, w.part.end);
    }
  };
};

/// out[g] = Y[rows of segment g]^T X[rows of segment g]: each tile sums over rows of its own number.
template <class T, int M, int N>
struct RaggedDepth {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    static constexpr int BK = 64;
    using Y = Shared<Target, T, BK, M, Contract::rows>;
    using X = Shared<Target, T, BK, N, Contract::rows>;
    using Schedule = Banded<4>;
    static constexpr int rows = M;
    struct Slot {
      Y y;
      X x;
    };
    struct Params {
      Global<Target, const T, Y> y;
      Global<Target, const T, X> x;
      Global<Target, float> out;  ///< [segments, columns of Y, columns of X]
      Segments<Target> segments;
    };
    struct Work {
      typename Segments<Target>::Segment segment;
      Tile tile;
    };
    TW_INLINE static Work work(const Params& p, Tile t) { return {p.segments.at(t.batch), t}; }
    struct Memory {
      Ring<Target, Slot, 3> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Fragment<Target, float, M, N> acc;
    };
    TW_INLINE static int steps(const Params&, const Work& w) { return ceil_div(w.segment.size, BK); }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.y, slot.y, w.segment.begin + step * BK, w.tile.m * M);
        copy.tile(p.x, slot.x, w.segment.begin + step * BK, w.tile.n * N);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.fill(state.acc, 0.0f);
      const int n = steps(p, w);
      for (int step = 0; step < n; ++step) {
        Slot& slot = block.take(memory.ring);
        const int left = w.segment.size - step * BK;
        if (left < BK) {  // rows of the next segment, which may be NaN
          block.zero_rows(slot.y, left);
          block.zero_rows(slot.x, left);
        }
        block.mma(state.acc, slot.y, slot.x, false);
        block.wait(leave<0>, state.acc);
        block.release(memory.ring);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      block.store(state.acc, p.out, w.tile.m * M, w.tile.n * N, w.tile.batch);
    }
  };
};

/// out = A B, where A is a matrix of blocks of BM x BK of which most are zero: those that are not lie one after the other, row by row.
template <class T, int BM, int BN>
struct BlockSparseProduct {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    static constexpr int BK = 64;
    using A = Shared<Target, T, BM, BK>;
    using B = Shared<Target, T, BK, BN, Contract::rows>;
    static constexpr int rows = BM;
    struct Slot {
      A a;
      B b;
    };
    struct Params {
      Global<Target, const T, A> a;  ///< [blocks, BM, BK]
      Global<Target, const T, B> b;
      Global<Target, float> out;
      BlockLists<Target> lists;
    };
    struct Work {
      typename BlockLists<Target>::List list;
      int m, n;
    };
    TW_INLINE static Work work(const Params& p, Tile t) { return {p.lists.at(t.m), t.m, t.n}; }
    struct Memory {
      Ring<Target, Slot, 3> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Fragment<Target, float, BM, BN> acc;
    };
    TW_INLINE static int steps(const Params&, const Work& w) { return w.list.size; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.a, slot.a, 0, 0, w.list.begin + step);
        copy.tile(p.b, slot.b, p.lists.block(w.list, step) * BK, w.n * BN);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.fill(state.acc, 0.0f);
      const int n = steps(p, w);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.ring);
        block.mma(state.acc, slot.a, slot.b, false);
        block.wait(leave<0>, state.acc);
        block.release(memory.ring);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      block.store(state.acc, p.out, w.m * BM, w.n * BN);
    }
  };
};

}  // namespace tw::test

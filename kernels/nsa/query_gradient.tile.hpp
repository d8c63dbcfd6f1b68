#pragma once

#include "kernels/nsa/work.tile.hpp"

namespace tw::kernels::nsa {

/// What the gradients need of each query: for each head of keys and token, the LSE times log2(e) of the group's heads, +infinity for a
/// query that sees no key, and then their deltas, rowsum(dO O). Heads that do not exist have +infinity and 0.
template <class T, int Group, int C>
struct QuerySums {
  static constexpr const char* source = "kernels/nsa/query_gradient.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, Group, C>;
    struct Params {
      Global<Target, const T, Values> o, d_o;  ///< [tokens, heads of keys, heads of a group, C]
      Pointer<Target, const float> lse;        ///< [tokens, heads]
      Pointer<Target, float> sums;             ///< [heads of keys, tokens, 2, Group]
      int tokens, group, heads;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Values o, d_o;
      RowVector<Target, float, Values> delta;
      block.load(o, p.o, 0, 0, t.n, t.m);
      block.load(d_o, p.d_o, 0, 0, t.n, t.m);
      block.map(o, d_o, [](auto x, auto y) { return x * y; });
      block.rows(o, [&](int i, auto row) { delta[i] = row.sum(); });
      const auto to = p.sums + (static_cast<i64>(t.n) * p.tokens + t.m) * 2 * Group;
      block.for_rows(delta, [&](int row, int, auto& x) {
        if (!block.owns_rows(delta)) return;
        if (row < p.group) {
          const auto lse = p.lse[static_cast<i64>(t.m) * p.heads + t.n * p.group + row];
          to[row] = lse == -kInfinity ? kInfinity : lse * kLog2E;
          to[Group + row] = x;
        } else {
          to[row] = kInfinity;
          to[Group + row] = 0.0f;
        }
      });
    }
  };
};

/// Gradient of the queries of attention over blocks: P = exp(S - lse), dS = P (dO V^T - delta), dQ = scale dS K. Tiles, steps and what a
/// warpgroup leaves out are those of Selected.
template <class T, int D, int DV, int Group, int Rows, int N, int Stages>
struct QueryGradient {
  static constexpr const char* source = "kernels/nsa/query_gradient.tile.hpp";
  static constexpr int tokens = Rows / Group;

  template <class Target>
  struct On {
    static constexpr int rows = Rows;
    static constexpr int vector_bytes = 64;
    using Q = Shared<Target, T, Rows, D>;
    using OutputGradient = Shared<Target, T, Rows, DV>;
    using K = Shared<Target, T, N, D>;
    using V = Shared<Target, T, N, DV>;
    using Scores = Fragment<Target, float, Rows, N>;
    using Weights = Operand<Target, T, Rows, N>;
    using PerRow = RowVector<Target, float, Scores>;
    using Schedule = HeadByHead;
    using Work = ListWork;

    struct Params {
      Global<Target, const T, Q> q;                 ///< [tokens, heads of keys, heads of a group, D]
      Global<Target, const T, OutputGradient> d_o;  ///< the same, DV
      Global<Target, const T, K> k;                 ///< [batch, heads of keys, keys, D]
      Global<Target, const T, V> v;
      Global<Target, T> dq;               ///< [tokens * heads, D]
      Pointer<Target, const float> sums;  ///< as QuerySums
      Sequences<Target> sequences;
      TileLists<Target> lists;
      int token_count;
      int group, heads;
      float scale, scale_log2;

      TW_INLINE int row_of(const ListWork& w, int row) const {
        const int token = row / Group, head = row % Group;
        return token < w.count && head < group ? (w.row + token) * heads + w.head * group + head : -1;
      }
    };
    struct Queries {
      Q q;
      OutputGradient d_o;
    };
    struct Slot {
      K k;
      V v;
    };
    struct Memory {
      Ring<Target, Queries, 1> queries;
      Ring<Target, Slot, Stages> keys;
      explicit constexpr Memory(auto& block) : queries(block), keys(block) {}
    };
    struct State {
      Fragment<Target, float, Rows, D> dq;
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return Work::of(p, t, tokens, N); }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.steps; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      if (step == 0) {
        producer.put(memory.queries, [&](auto copy, Queries& queries) {
          TW_NO_UNROLL
          for (int n = 0; n < tokens; ++n) {
            copy.part(p.q, queries.q, n * Group, Group, 0, 0, w.head, w.row + min(n, w.count - 1));
            copy.part(p.d_o, queries.d_o, n * Group, Group, 0, 0, w.head, w.row + min(n, w.count - 1));
          }
        });
      }
      const int key0 = w.k_row + Step::of(p, w, step, N).key;
      producer.put(memory.keys, [&](auto copy, Slot& slot) {
        copy.tile(p.k, slot.k, key0, 0, w.head, w.k_batch);
        copy.tile(p.v, slot.v, key0, 0, w.head, w.k_batch);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.fill(state.dq, 0.0f);
      if (w.steps == 0) return;
      const TokenRange mine = TokenRange::of<Scores>(block, Group);
      PerRow lse, delta;
      const auto sums = p.sums + (static_cast<i64>(w.head) * p.token_count + w.row) * 2 * Group;
      const auto read = [&](PerRow& to, int first) {
        block.for_rows(to, [&](int row, int, auto& x) { x = sums[min(row / Group, w.count - 1) * 2 * Group + first + row % Group]; });
      };
      read(lse, 0);
      read(delta, Group);
      const Queries& queries = block.take(memory.queries);
      Step next = Step::of(p, w, 0, N);
      TW_NO_UNROLL
      for (int n = 0; n < w.steps; ++n) {
        const Step step = next;
        if (n + 1 < w.steps) next = Step::of(p, w, n + 1, N);
        Slot& slot = block.take(memory.keys);
        // Keys of another sequence follow the last one. They may be NaN, which weights of 0 would not hide.
        if (step.key + N > w.keys) {
          block.zero_rows(slot.k, max(w.keys - step.key, 0));
          block.zero_rows(slot.v, max(w.keys - step.key, 0));
        }
        if (any_sees(w, step, mine)) {
          Scores scores, ds;
          Weights weights;
          block.mma(scores, queries.q, slot.k, true);
          block.mma(ds, queries.d_o, slot.v, true);
          block.wait(leave<in_flight<Target>>, scores);
          if (!all_see(w, step, mine, N)) hide<Group>(block, w, step, scores);
          block.map(scores, lse, [&](auto x, auto l) { return exp2(x * p.scale_log2 - l); });
          block.wait(leave<0>, ds);
          block.map(ds, scores, delta, [](auto dp, auto weight, auto d) { return weight * (dp - d); });
          block.convert(weights, ds);
          block.mma(state.dq, weights, view<Contract::rows>(slot.k), false);
          block.wait(leave<0>, state.dq);
        }
        block.release(memory.keys);
      }
      block.release(memory.queries);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      if (w.count == 0) return;
      block.map(state.dq, p.scale, [](auto x, auto scale) { return x * scale; });
      block.scatter(
          state.dq, p.dq, [&](int row) { return p.row_of(w, row); }, 0);
    }
  };
};

}  // namespace tw::kernels::nsa

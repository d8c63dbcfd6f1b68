#pragma once

#include "kernels/mla/decode_work.tile.hpp"
#include "kernels/mla/sparse_gradients.tile.hpp"

namespace tw::kernels::mla {

/// Gradients of attention over listed keys, all from one gathered copy of each key:
///
///   P = exp(scale q k - LSE)    dP = dO v    dS = scale P (dP - delta)    dq = dS K    dkv += [dS; P]^T [q; dO]
///
/// where v is the first 512 columns of k, and delta = rowsum(dO o). One tile is 64 heads of a token. The rows of kv that its list names
/// pass by, N at a time; q and dO stay in shared memory. Both warpgroups have half of the keys in scores, and half of the columns
/// afterwards. What a block of keys adds to dkv is added in global memory, to rows that many tiles share.
template <class T, int N>
struct ListedGradients {
  static constexpr const char* source = "kernels/mla/listed_gradients.tile.hpp";
  static constexpr int kGroup = 256, kGroups = kLatent / kGroup;  ///< columns of keys that arrive, and make room, together
  static constexpr int kPart = 128;                               ///< columns of dkv that are added together

  template <class Target>
  struct On {
    static constexpr int rows = 2 * kRows, warpgroups = rows / 64;  // two warpgroups for each 64 rows
    static constexpr int vector_bytes = 64;
    using Q = Shared<Target, T, kRows, kKey>;
    using OutputGradient = Shared<Target, T, kRows, kLatent>;
    using K = Shared<Target, T, N, kGroup>;
    using Rotary = Shared<Target, T, N, kRotary>;
    using Scores = Fragment<Target, float, kRows, N, warpgroups>;
    using PerRow = RowVector<Target, float, Scores>;
    using Weights = Buffer<Target, T, kRows, N>;
    using Latent = Fragment<Target, float, kRows, kGroup, warpgroups>;
    using LatentPart = Fragment<Target, float, N, kPart, warpgroups>;
    using Numbers = RowVector<Target, i32, LatentPart>;
    using RotaryPart = Fragment<Target, float, N, kRotary, warpgroups>;
    using Schedule = InTurn;

    struct Params {
      Global<Target, const T, Q> q;                 ///< [tokens, heads, 576]
      Global<Target, const T, OutputGradient> d_o;  ///< [tokens, heads, 512]
      Global<Target, const T, K> kv;                ///< [kv_tokens, 576]
      Global<Target, T> dq;                         ///< [tokens, heads, 576]
      Global<Target, float> dkv;                    ///< [kv_tokens, 576]: is added to
      ListedRows<Target> listed;
      Pointer<Target, const float> lse_log2, delta;  ///< [tokens, heads]: LSE times log2(e), +infinity without keys
      int heads;
      float scale, scale_log2;
    };
    struct Work {
      int token, first_head, length, blocks;
    };
    struct Queries {
      Q q;
      OutputGradient d_o;
    };
    struct Memory {
      Ring<Target, Queries, 1> queries;
      GatherRing<Target, K, kGroups> keys;
      GatherRing<Target, Rotary, 1> rotary;
      Weights weights, ds;
      VectorBuffer<Target, i32, N> numbers;  ///< of the rows of kv that a block of keys is
      explicit constexpr Memory(auto& block) : queries(block), keys(block), rotary(block), weights(block), ds(block), numbers(block) {}
    };
    struct State {
      Latent dq[kGroups];
      Fragment<Target, float, kRows, kRotary, warpgroups> dq_rotary;
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      const int length = p.listed.length(t.batch);
      return {t.batch, t.m * kRows, length, ceil_div(length, N)};
    }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.blocks; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const auto row_of = row_numbers<N>(producer, [&p, &w, step](int row) { return p.listed.at(w.token, step * N + row, w.length); });
      if (step == 0) {
        producer.put(memory.queries, [&](auto copy, Queries& slot) {
          copy.tile(p.q, slot.q, w.first_head, 0, w.token);
          copy.tile(p.d_o, slot.d_o, w.first_head, 0, w.token);
        });
      }
      producer.put(memory.rotary, [&](auto copy, Rotary& k) { copy.gather(p.kv, k, row_of, kLatent); });
      TW_NO_UNROLL
      for (int g = 0; g < kGroups; ++g) producer.put(memory.keys, [&](auto copy, K& k) { copy.gather(p.kv, k, row_of, g * kGroup); });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.blocks == 0) return clear(block, state);
      const Queries& queries = block.take(memory.queries);
      const auto of_rows = [&](auto& x, const auto& from, float otherwise) {
        block.for_rows(x, [&](int row, int, auto& value) {
          const int head = w.first_head + row;
          value = head < p.heads ? from[static_cast<i64>(w.token) * p.heads + head] : otherwise;
        });
      };
      PerRow lse, delta;
      of_rows(lse, p.lse_log2, kInfinity);
      of_rows(delta, p.delta, 0.0f);
      for (int step = 0; step < w.blocks; ++step) {
        K* keys[kGroups];
        Scores scores, ds;
        const Rotary& rotary = block.take(memory.rotary);
        block.mma(scores, view_columns<kLatent, kRotary>(queries.q), rotary, true);
        for_groups([&](auto g) {
          constexpr int group = decltype(g)::value;
          const K& k = *(keys[group] = &block.take(memory.keys));
          block.mma(scores, view_columns<group * kGroup, kGroup>(queries.q), k, false);
        });
        for_groups([&](auto g) {
          constexpr int group = decltype(g)::value;
          block.mma(ds, view_columns<group * kGroup, kGroup>(queries.d_o), *keys[group], group == 0);
        });
        Numbers numbers;
        block.for_rows(numbers, [&](int row, int, auto& x) { x = p.listed.at(w.token, step * N + row, w.length); });
        block.wait(leave<kGroups>, scores);
        // At most 1: keys that no entry names are 0, and so are their products.
        block.map(scores, lse, [&](auto x, auto l) { return min(exp2(x * p.scale_log2 - l), decltype(x)(1.0f)); });
        block.wait(leave<0>, ds);
        block.map(ds, scores, delta, [&](auto dp, auto weight, auto d) { return weight * (dp - d) * p.scale; });
        block.sync();  // all warps have multiplied the last block's
        block.store(scores, memory.weights);
        block.store(ds, memory.ds);
        block.for_rows(numbers, [&](int row, int, auto& x) {
          if (block.owns_rows(numbers)) memory.numbers[row] = x;
        });
        block.fence();
        block.sync();
        block.mma(state.dq_rotary, memory.ds, view<Contract::rows>(rotary), step == 0);
        for_groups([&](auto g) { block.mma(state.dq[g.value], memory.ds, view<Contract::rows>(*keys[g.value]), step == 0); });
        block.wait(leave<kGroups>, state.dq_rotary);
        block.release(memory.rotary);
        for_groups([&](auto g) {
          block.wait(leave<kGroups - 1 - g.value>, state.dq[g.value]);
          block.release(memory.keys);
        });
        add_to_keys(block, p, memory, queries);
      }
      block.release(memory.queries);
      block.sync();  // the next tile writes the buffers
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      const auto row_of = [&](int row) { return w.first_head + row; };
      for_groups([&](auto g) { block.scatter(state.dq[g.value], p.dq, row_of, g.value * kGroup, w.token); });
      block.scatter(state.dq_rotary, p.dq, row_of, kLatent, w.token);
    }

   private:
    TW_INLINE static void add_to_keys(auto& block, const Params& p, Memory& memory, const Queries& queries) {
      const auto row_of = [&](int row) { return memory.numbers[row]; };
      const auto weights = view<Contract::rows>(memory.weights), ds = view<Contract::rows>(memory.ds);
      for_parts([&](auto part) {
        constexpr int col = decltype(part)::value * kPart;
        LatentPart sum;
        block.mma(sum, ds, view<Contract::rows>(view_columns<col, kPart>(queries.q)), true);
        block.mma(sum, weights, view<Contract::rows>(view_columns<col, kPart>(queries.d_o)), false);
        block.wait(leave<0>, sum);
        block.scatter_add(sum, p.dkv, row_of, col);
      });
      RotaryPart sum;
      block.mma(sum, ds, view<Contract::rows>(view_columns<kLatent, kRotary>(queries.q)), true);
      block.wait(leave<0>, sum);
      block.scatter_add(sum, p.dkv, row_of, kLatent);
    }
    TW_INLINE static void clear(auto& block, State& state) {
      for_groups([&](auto g) { block.fill(state.dq[g.value], 0.0f); });
      block.fill(state.dq_rotary, 0.0f);
    }
    TW_INLINE static void for_groups(auto f) { f(Constant<0>{}), f(Constant<1>{}); }
    TW_INLINE static void for_parts(auto f) { f(Constant<0>{}), f(Constant<1>{}), f(Constant<2>{}), f(Constant<3>{}); }
  };
};

}  // namespace tw::kernels::mla

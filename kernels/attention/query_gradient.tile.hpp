#pragma once

#include "kernels/attention/packed_rows.tile.hpp"
#include "tilewave/tile/attention_work.tile.hpp"
#include "tilewave/tile/dropout.tile.hpp"

namespace tw::kernels::attention {

/// Gradient of attention's queries, dQ = scale dS K: see KeyGradients.
///
/// One tile is BM queries of one head. Blocks of BN keys and values pass by, in the order of the forward pass.
template <class T, AttentionConfig kConfig, class Rules>
struct QueryGradient {
  static constexpr const char* source = "kernels/attention/query_gradient.tile.hpp";
  static constexpr int D = kConfig.head_dim, DV = kConfig.value_dim, BM = kConfig.rows, BN = kConfig.keys;

  template <class Target>
  struct On {
    using Q = Shared<Target, T, BM, D>;
    using OutputGradient = Shared<Target, T, BM, DV>;
    using K = Shared<Target, T, BN, D>;
    using V = Shared<Target, T, BN, DV>;
    using OfQueries = SharedVector<Target, float, BM>;
    using Out = Staging<Target, T, BM, D>;
    using Scores = Fragment<Target, float, BM, BN>;
    using Weights = Operand<Target, T, BM, BN>;
    using PerQuery = RowVector<Target, float, Scores>;
    using Integers = Pointer<Target, const i32>;
    using Schedule = LongestFirst;
    using Work = AttentionWork<kConfig, Rules>;
    static constexpr int rows = BM;
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take long

    struct Params {
      Global<Target, const T, Q> q;                  ///< [batch, head, query, dim]
      Global<Target, const T, OutputGradient> d_o;   ///< the same
      Global<Target, const T, K> k;                  ///< [batch, kv head, key, dim]
      Global<Target, const T, V> v;                  ///< the same
      Global<Target, const float, OfQueries> lse;    ///< [batch, head, query]: times log2(e), +infinity if a query sees no key
      Global<Target, const float, OfQueries> delta;  ///< [batch, head, query]
      Global<Target, T, Out> dq;                     ///< [batch, head, query, dim]
      float scale, scale_log2;                       ///< of products of q and k; of scores after the rules, times log2(e)
      int keys;                                      ///< of a sequence
      int heads_per_kv;
      bool has_diagonal;  ///< if false, the diagonal is seqlen_k - seqlen_q
      int diagonal;
      typename Rules::template Params<Target> rules;
      DropoutParams<Target> dropout;

      // ragged: packed sequences, of which batch is 1 in the tensors
      int batch;
      Integers cu_q, cu_k, used_q, used_k;  ///< as CheckedSequences writes them
      Integers tiles;                       ///< the list of tiles; null: each tile searches cu_q
      // listed, as in Attention
      Integers lists;
      int list_tiles;
      i64 list_numbers;
      int lists_of_batch, heads_per_list;
      int first_head, first_list;
    };
    struct QuerySlot {
      Q q;
      OutputGradient d_o;
      OfQueries lse, delta;
    };
    struct Memory {
      Ring<Target, QuerySlot, 1> queries;
      Ring<Target, K, kConfig.stages> k;
      Ring<Target, V, kConfig.stages> v;
      Out out;
      explicit constexpr Memory(auto& block) : queries(block), k(block), v(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, BM, D> dq;
    };
    struct Locals {
      Scores scores;
      Weights weights;
    };

    /// Where V has one slot, only dP reads it: then dP comes before the scores, and the next V arrives long before the next K.
    static constexpr bool values_first = kConfig.stages == 1;

    TW_INLINE static Work work(const Params& p, Tile t) { return Work::of(p, t); }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.blocks; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      if (step == 0) {
        producer.put(memory.queries, [&](auto copy, QuerySlot& slot) {
          const int row0 = w.q_row + w.first_row, sums0 = sums_row(p, w) + w.first_row;
          copy.tile(p.q, slot.q, row0, 0, w.head, w.q_batch);
          copy.tile(p.d_o, slot.d_o, row0, 0, w.head, w.q_batch);
          copy.vector(p.lse, slot.lse, w.head, sums0, w.q_batch);
          copy.vector(p.delta, slot.delta, w.head, sums0, w.q_batch);
        });
      }
      const int kv_head = w.head / p.heads_per_kv, key0 = w.first_key(p, step);
      const auto put_keys = [&] {
        producer.put(memory.k, [&](auto copy, K& k) { copy.tile(p.k, k, w.k_row + key0, 0, kv_head, w.k_batch); });
      };
      if constexpr (!values_first) put_keys();
      producer.put(memory.v, [&](auto copy, V& v) { copy.tile(p.v, v, w.k_row + key0, 0, kv_head, w.k_batch); });
      if constexpr (values_first) put_keys();
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.blocks == 0) return block.fill(state.dq, 0.0f);
      const QuerySlot& queries = block.take(memory.queries);
      PerQuery lse, delta;
      block.load(lse, queries.lse);
      block.load(delta, queries.delta);
      Dropout dropout;
      if constexpr (kConfig.dropout != Use::never) dropout = Dropout::of(p.dropout, w.batch * p.q.size_i + w.head);
      const int whole_end = w.blocks - w.cut_first;
      for (int step = 0; step < w.blocks; ++step) {
        const int key0 = w.first_key(p, step);
        Scores scores, slopes, ds;
        Weights weights;
        K* k;
        V* v;
        const auto take_keys = [&] {
          k = &block.take(memory.k);
          keep_keys(block, w, key0, *k);
        };
        const auto take_values = [&] {
          v = &block.take(memory.v);
          keep_keys(block, w, key0, *v);
        };
        if constexpr (values_first) {
          take_values();
          block.mma(ds, queries.d_o, *v, true);
          take_keys();
          block.mma(scores, queries.q, *k, true);
          block.wait(leave<0>, scores, ds);
          block.release(memory.v);
        } else {
          take_keys();
          if constexpr (Work::ragged) take_values();  // before the products, which ptxas would serialise around the loop that sets rows
          block.mma(scores, queries.q, *k, true);
          if constexpr (!Work::ragged) take_values();
          block.mma(ds, queries.d_o, *v, true);
          block.wait(leave<1>, scores);
        }
        if (step < w.cut || step >= whole_end)
          apply_rules<true>(block, p, w, key0, scores, slopes);
        else
          apply_rules<false>(block, p, w, key0, scores, slopes);
        block.map(scores, lse, [&](auto x, auto l) { return exp2(x * p.scale_log2 - l); });
        if constexpr (!values_first) {
          block.wait(leave<0>, ds);
          block.release(memory.v);
        }
        if constexpr (kConfig.dropout != Use::never) {
          if (drops(kConfig, p)) mark_dropped(block, dropout, scores, w.first_row, key0);
          block.map(ds, scores, delta, [&](auto dp, auto weight, auto d) { return score_derivative(weight, dp, d, p.dropout.scale); });
        } else {
          block.map(ds, scores, delta, [](auto dp, auto weight, auto d) { return weight * (dp - d); });
        }
        if constexpr (Rules::bending) block.map(ds, slopes, [](auto x, auto slope) { return x * slope; });
        block.convert(weights, ds);
        block.mma(state.dq, weights, view<Contract::rows>(*k), step == 0);
        block.wait(leave<0>, state.dq);
        block.release(memory.k);
      }
      block.release(memory.queries);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (Work::ragged && w.first_row >= w.rows) return;  // the tile is empty, which the host could not know
      block.map(state.dq, p.scale, [](auto x, auto scale) { return x * scale; });
      if constexpr (Work::ragged)
        block.store(state.dq, memory.out, p.dq, w.q_row + w.first_row, 0, w.head, w.q_batch, w.q_row + w.rows);
      else
        block.store(state.dq, memory.out, p.dq, w.first_row, 0, w.head, w.q_batch);
    }

   private:
    /// The row of lse and delta at which the sequence begins.
    TW_INLINE static int sums_row(const Params& p, const Work& w) {
      if constexpr (Work::ragged) return p.cu_q ? padded_begin(w.q_row, w.batch) : 0;
      return 0;
    }
    /// The rows after the sequence's end belong to another sequence and may be NaN, which weights of 0 would not hide.
    TW_INLINE static void keep_keys(auto& block, const Work& w, int key0, auto& tile) {
      if constexpr (Work::ragged) {
        const int left = w.seqlen_k - key0;
        if (left < BN) block.zero_rows(tile, left);
      }
    }
    template <bool kCut>
    TW_INLINE static void apply_rules(auto& block, const Params& p, const Work& w, int key0, Scores& scores, Scores& slopes) {
      const auto at = [&](int row, auto col) {
        const int query = w.first_row + row;
        return Score{w.batch, w.head, query, key0 + col, w.rows, w.seqlen_k, w.diagonal, difference(query + w.diagonal - key0, col)};
      };
      if constexpr (Rules::bending) {
        block.fill(slopes, 1.0f);
        Rules::template apply<kCut, 0, BN>(block, p.rules, scores, at, slopes);
      } else {
        Rules::template apply<kCut, 0, BN>(block, p.rules, scores, at);
      }
      if (kCut && key0 + BN > w.seqlen_k) {
        block.for_each(scores, [&](int, int col, auto& x) {
          if (key0 + col >= w.seqlen_k) x = -kInfinity;
        });
      }
    }
  };
};

}  // namespace tw::kernels::attention

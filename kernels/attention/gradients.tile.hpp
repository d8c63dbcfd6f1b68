#pragma once

#include "kernels/attention/key_gradients_work.tile.hpp"

namespace tw::kernels::attention {

/// The order in which tiles of keys add their parts of dQ: any, or for each block of queries from the last keys to the first, which gives
/// the same bits in every run.
enum class Additions { in_any_order, in_turn };

/// All gradients of attention in one pass over the scores:
///   P = exp(S - lse), dV = P^T dO, dP = dO V^T, dS = P (dP - delta) with delta = rowsum(dO O), dK = scale dS^T Q, dQ = scale dS K.
///
/// One tile is BN keys of one head. Blocks of BM queries pass by, of all query heads that share the keys. Scores are computed transposed,
/// [keys, queries], so that weights are a left operand in registers. dQ is a sum over the tiles of keys: every tile adds its part to a
/// tensor in f32. Under the arithmetic between the products, others run: dP under the weights, dV under dS, the next block's scores while
/// dQ leaves.
///
/// In turn, tiles that begin together hardly wait: under a causal mask a tile's first queries see no later keys, and the tile of the keys
/// before them follows a step behind.
template <class T, AttentionConfig kConfig, class Rules, Additions kAdditions>
struct AllGradients {
  static constexpr const char* source = "kernels/attention/gradients.tile.hpp";
  static constexpr int D = kConfig.head_dim, BM = kConfig.rows, BN = kConfig.keys;
  static constexpr bool dropping = kConfig.dropout != Use::never;
  static constexpr bool in_turn = kAdditions == Additions::in_turn;
  static_assert(kConfig.value_dim == D, "dK and dV leave through one staging buffer");
  static_assert(!in_turn || (kConfig.form & kListed) == 0, "tiles do not know their turn in another tile's list");
  static_assert(kConfig.stages >= 2, "the next block's queries arrive before this block's are released");

  template <class Target>
  struct On {
    using Keys = Shared<Target, T, BN, D>;
    using Queries = Shared<Target, T, BM, D>;
    using OfQueries = SharedVector<Target, float, BM>;
    using Out = Staging<Target, T, BN, D>;
    using Scores = Fragment<Target, float, BN, BM>;
    using Weights = Operand<Target, T, BN, BM>;
    using QueryPart = Fragment<Target, float, BM, D, BN / 64>;  // 64 queries: the warpgroups split the columns
    using QuerySum = Outbox<Target, BM, D>;
    using Integers = Pointer<Target, const i32>;
    using Schedule = conditional<in_turn, LongestFirst, FirstKeysFirst>;  // waits only for tiles before it
    using Work = KeyGradientsWork<kConfig, Rules>;
    static constexpr int rows = BN;
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take long

    struct Params {
      Global<Target, const T, Queries> q, d_o;       ///< [batch, head, query, dim]
      Global<Target, const T, Keys> k, v;            ///< [batch, kv head, key, dim]
      Global<Target, const float, OfQueries> lse;    ///< [batch, head, query]: times log2(e), +infinity if a query sees no key
      Global<Target, const float, OfQueries> delta;  ///< [batch, head, query]
      Global<Target, T, Out> dk, dv;                 ///< [batch, kv head, key, dim]
      Global<Target, float, QuerySum> dq;            ///< [batch, head, query, dim, the even ones first]: dQ / scale is added
      Pointer<Target, u32> turns;                    ///< [batch, head, block of BM queries]: parts that were added, in turn
      float scale, scale_log2;                       ///< of products of q and k; of scores after the rules, times log2(e)
      int queries, keys;                             ///< of a sequence
      int kv_heads, heads_per_kv;
      bool has_diagonal;  ///< if false, the diagonal is seqlen_k - seqlen_q
      int diagonal;
      typename Rules::template Params<Target> rules;
      DropoutParams<Target> dropout;

      // ragged: packed sequences, of which batch is 1 in the tensors
      int batch;
      Integers cu_q, cu_k, used_q, used_k;  ///< as CheckedSequences writes them
      Integers tiles;                       ///< the list of tiles, of keys; null: each tile searches cu_k
      // listed
      Integers lists;    ///< [list, tile, list_numbers]: see QueryList
      int list_tiles;    ///< of the grid
      i64 list_numbers;  ///< of each list
      int list_bits;     ///< of an entry for the block of queries
      int first_head;    ///< of the launch, of batch * kv_heads
    };
    struct QuerySlot {
      Queries q;
      OfQueries lse;
    };
    struct OutputSlot {
      Queries d_o;
      OfQueries delta;
    };
    struct Memory {
      Ring<Target, Keys, 1> k, v;
      Ring<Target, QuerySlot, kConfig.stages> queries;
      Ring<Target, OutputSlot, kConfig.stages> outputs;
      Buffer<Target, T, BM, BN> ds;
      QuerySum dq;
      Out out;
      explicit constexpr Memory(auto& block) : k(block), v(block), queries(block), outputs(block), ds(block), dq(block), out(block) {}
    };
    struct State {
      Fragment<Target, float, BN, D> dk, dv;
    };
    struct Locals {
      Scores scores;
      Weights weights;
    };

    TW_INLINE static QuerySum& outbox(Memory& memory) { return memory.dq; }
    TW_INLINE static Work work(const Params& p, Tile t) { return Work::of(p, t); }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.steps; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int entry = w.entry(p, step), head = w.head(p, entry), query0 = w.first_query(p, entry);
      if (step == 0)
        producer.put(memory.k, [&](auto copy, Keys& k) { copy.tile(p.k, k, w.k_row + w.first_key, 0, w.kv_head, w.tensor_batch); });
      producer.put(memory.queries, [&](auto copy, QuerySlot& slot) {
        copy.tile(p.q, slot.q, w.q_row + query0, 0, head, w.tensor_batch);
        copy.vector(p.lse, slot.lse, head, w.sums_row + query0, w.tensor_batch);
      });
      if (step == 0)
        producer.put(memory.v, [&](auto copy, Keys& v) { copy.tile(p.v, v, w.k_row + w.first_key, 0, w.kv_head, w.tensor_batch); });
      producer.put(memory.outputs, [&](auto copy, OutputSlot& slot) {
        copy.tile(p.d_o, slot.d_o, w.q_row + query0, 0, head, w.tensor_batch);
        copy.vector(p.delta, slot.delta, head, w.sums_row + query0, w.tensor_batch);
      });
    }

    TW_INLINE static void add_to_dq(auto& block, const Params& p, const Work& w, int entry, const QueryPart& dq, Memory& memory) {
      const int query0 = w.first_query(p, entry), head = w.head(p, entry);
      if constexpr (in_turn) {
        const ScoreRows rows{w.batch, head, query0, min(query0 + BM, w.seqlen_q) - 1, w.seqlen_q, w.seqlen_k, w.diagonal};
        const int last_tile = (Rules::keys(p.rules, rows, {0, w.seqlen_k}).end - 1) / BN;
        block.reduce_add_in_turn(dq, memory.dq, p.dq, w.sums_row + query0, 0, head, w.tensor_batch, p.turns, counter(p, w, entry),
                                 last_tile - w.first_key / BN);
      } else {
        block.reduce_add(dq, memory.dq, p.dq, w.sums_row + query0, 0, head, w.tensor_batch);
      }
    }
    TW_INLINE static i64 counter(const Params& p, const Work& w, int entry) {
      const i64 head = static_cast<i64>(w.tensor_batch) * p.kv_heads * p.heads_per_kv + w.head(p, entry);
      return (head * p.lse.cols + w.sums_row + w.first_query(p, entry)) / BM;
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      static_assert(!Rules::bending, "the registers hold no derivatives of scores");
      if (w.steps == 0) {
        block.fill(state.dk, 0.0f);
        block.fill(state.dv, 0.0f);
        return;
      }
      Keys& k = block.take(memory.k);
      w.keep_keys(block, k);
      QuerySlot* queries = &block.take(memory.queries);
      w.keep_queries(block, p, queries->q, w.entry(p, 0));
      Scores scores;
      block.mma(scores, k, queries->q, true);
      Keys& v = block.take(memory.v);
      block.wait(leave<0>, scores);
      w.keep_keys(block, v);
      for (int step = 0; step < w.steps; ++step) {
        OutputSlot& outputs = block.take(memory.outputs);
        // An entry of a list is read where it is used: the registers do not hold it through the step.
        w.keep_queries(block, p, outputs.d_o, w.entry(p, step));
        Scores ds;
        Weights weights;
        block.mma(ds, v, outputs.d_o, true);
        apply_rules_to_keys<Rules>(block, p, w, w.entry(p, step), scores, ds);
        // Read where they are used: as vectors they would take the registers of half a tile.
        block.for_each(scores, [&](int, int query, auto& x) { x = exp2(x * p.scale_log2 - queries->lse[query]); });
        if constexpr (dropping) {
          // dS needs the weights before dropout, dV those after it. The registers do not hold both, so dV comes second.
          const int entry = w.entry(p, step);
          mark_dropped_transposed(block, w.dropout(p, entry), scores, w.first_query(p, entry), w.first_key);
          block.convert(weights, scores);
          block.wait(leave<0>, ds);
          block.convert(scores, weights);
          block.for_each(ds, scores, [&](int, int query, auto& x, auto& weight) {
            x = score_derivative(weight, x, outputs.delta[query], p.dropout.scale);
          });
          drop_marked(block, weights, scores);
          block.mma(state.dv, weights, view<Contract::rows>(outputs.d_o), step == 0);
        } else {
          block.convert(weights, scores);
          block.mma(state.dv, weights, view<Contract::rows>(outputs.d_o), step == 0);
          block.wait(leave<1>, ds);
          block.convert(scores, weights);  // rounded: the registers do not hold the f32 weights beside dP
          block.for_each(ds, scores, [&](int, int query, auto& x, auto& weight) { x = weight * (x - outputs.delta[query]); });
        }
        block.store_transposed(ds, memory.ds);
        block.fence();
        block.sync();
        // From shared memory: in registers, dS would leave no room for the next scores.
        block.mma(state.dk, view<Contract::rows>(memory.ds), view<Contract::rows>(queries->q), step == 0);
        QueryPart dq;
        block.mma(dq, memory.ds, view<Contract::rows>(k), true);
        QuerySlot* next = queries;
        const bool more = step + 1 < w.steps;
        if (more) {
          next = &block.take(memory.queries);
          w.keep_queries(block, p, next->q, w.entry(p, step + 1));
        }
        block.wait(leave<2>, state.dv);       // the weights' registers are free
        block.mma(scores, k, next->q, true);  // unused after the last step: ptxas serialises conditional products
        block.wait(leave<1>, dq, state.dk);
        block.release(memory.outputs);
        if (more) block.release(memory.queries);
        add_to_dq(block, p, w, w.entry(p, step), dq, memory);
        block.sync();  // both warpgroups have read dS
        block.wait(leave<0>, scores);
        queries = next;
      }
      block.release(memory.queries);
      block.release(memory.k);
      block.release(memory.v);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.is_empty()) return;
      if constexpr (dropping) block.map(state.dv, p.dropout.scale, [](auto x, auto scale) { return x * scale; });
      store_keys(block, w, state.dv, memory.out, p.dv);
      block.map(state.dk, p.scale, [](auto x, auto scale) { return x * scale; });
      store_keys(block, w, state.dk, memory.out, p.dk);
    }
  };
};

}  // namespace tw::kernels::attention

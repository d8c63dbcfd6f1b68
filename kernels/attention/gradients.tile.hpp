#pragma once

#include "kernels/attention/key_gradients_work.tile.hpp"

namespace tw::kernels::attention {

/// All gradients of attention in one pass over the scores:
///   P = exp(S - lse), dV = P^T dO, dP = dO V^T, dS = P (dP - delta) with delta = rowsum(dO O), dK = scale dS^T Q, dQ = scale dS K.
///
/// One tile is BN keys of one head. Blocks of BM queries pass by, of all query heads that share the keys. Scores are computed transposed,
/// [keys, queries], so that weights and dS are left operands in registers. dQ is a sum over the tiles of keys: every tile adds its part to
/// a tensor in f32, in an order that is not defined. Under the arithmetic between the products, others run: dP under the weights, dV under
/// dS, the next block's scores while dQ is stored.
template <class T, AttentionConfig kConfig, class Rules>
struct AllGradients {
  static constexpr const char* source = "kernels/attention/gradients.tile.hpp";
  static constexpr int D = kConfig.head_dim, BM = kConfig.rows, BN = kConfig.keys;
  static_assert(kConfig.value_dim == D, "dK and dV leave through one staging buffer");
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
    using QuerySum = Buffer<Target, float, BM, D>;
    using Schedule = FirstKeysFirst;
    using Work = KeyGradientsWork<kConfig, Rules>;
    static constexpr int rows = BN;
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take long

    struct Params {
      Global<Target, const T, Queries> q, d_o;       ///< [batch, head, query, dim]
      Global<Target, const T, Keys> k, v;            ///< [batch, kv head, key, dim]
      Global<Target, const float, OfQueries> lse;    ///< [batch, head, query]: times log2(e), +infinity if a query sees no key
      Global<Target, const float, OfQueries> delta;  ///< [batch, head, query]
      Global<Target, T, Out> dk, dv;                 ///< [batch, kv head, key, dim]
      Global<Target, float, QuerySum> dq;            ///< [batch, head, query, dim]: dQ / scale is added
      float scale, scale_log2;                       ///< of products of q and k; of scores after the rules, times log2(e)
      int queries, keys;                             ///< of a sequence
      int kv_heads, heads_per_kv;
      bool has_diagonal;  ///< if false, the diagonal is seqlen_k - seqlen_q
      int diagonal;
      typename Rules::template Params<Target> rules;
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

    TW_INLINE static Work work(const Params& p, Tile t) { return Work::of(p, t); }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.steps; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int head = w.head(p, step), query0 = w.first_query(step);
      if (step == 0) producer.put(memory.k, [&](auto copy, Keys& k) { copy.tile(p.k, k, w.first_key, 0, w.kv_head, w.batch); });
      producer.put(memory.queries, [&](auto copy, QuerySlot& slot) {
        copy.tile(p.q, slot.q, query0, 0, head, w.batch);
        copy.vector(p.lse, slot.lse, head, query0, w.batch);
      });
      if (step == 0) producer.put(memory.v, [&](auto copy, Keys& v) { copy.tile(p.v, v, w.first_key, 0, w.kv_head, w.batch); });
      producer.put(memory.outputs, [&](auto copy, OutputSlot& slot) {
        copy.tile(p.d_o, slot.d_o, query0, 0, head, w.batch);
        copy.vector(p.delta, slot.delta, head, query0, w.batch);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      static_assert(!Rules::bending, "the registers hold no derivatives of scores");
      if (w.steps == 0) {
        block.fill(state.dk, 0.0f);
        block.fill(state.dv, 0.0f);
        return;
      }
      const Keys& k = block.take(memory.k);
      const QuerySlot* queries = &block.take(memory.queries);
      Scores scores;
      block.mma(scores, k, queries->q, true);
      const Keys& v = block.take(memory.v);
      block.wait(leave<0>, scores);
      for (int step = 0; step < w.steps; ++step) {
        const OutputSlot& outputs = block.take(memory.outputs);
        Scores ds;
        Weights weights, ds_weights;
        block.mma(ds, v, outputs.d_o, true);
        apply_rules_to_keys<Rules>(block, p, w, step, scores, ds);
        // Read where they are used: as vectors they would take the registers of half a tile.
        block.for_each(scores, [&](int, int query, auto& x) { x = exp2(x * p.scale_log2 - queries->lse[query]); });
        block.convert(weights, scores);
        block.mma(state.dv, weights, view<Contract::rows>(outputs.d_o), step == 0);
        block.wait(leave<1>, ds);
        block.convert(scores, weights);  // rounded: the registers do not hold the f32 weights beside dP
        block.for_each(ds, scores, [&](int, int query, auto& x, auto& weight) { x = weight * (x - outputs.delta[query]); });
        block.store_transposed(ds, memory.ds);
        block.wait_stores(leave<0>);  // of dQ of the step before
        block.fence();
        block.convert(ds_weights, ds);
        block.mma(state.dk, ds_weights, view<Contract::rows>(queries->q), step == 0);
        block.sync();
        QueryPart dq;
        block.mma(dq, memory.ds, view<Contract::rows>(k), true);
        const QuerySlot* next = queries;
        if (step + 1 < w.steps) next = &block.take(memory.queries);
        block.wait(leave<0>, dq, state.dk, state.dv);
        block.mma(scores, k, next->q, true);  // unused after the last step: ptxas serialises conditional products
        block.store(dq, memory.dq);
        block.fence();
        block.sync();
        block.reduce_add(memory.dq, p.dq, w.first_query(step), 0, w.head(p, step), w.batch);
        block.wait(leave<0>, scores);
        block.release(memory.outputs);
        block.release(memory.queries);
        queries = next;
      }
      block.wait_stores(leave<0>);
      block.sync();
      block.release(memory.k);
      block.release(memory.v);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.store(state.dv, memory.out, p.dv, w.first_key, 0, w.kv_head, w.batch);
      block.map(state.dk, p.scale, [](auto x, auto scale) { return x * scale; });
      block.store(state.dk, memory.out, p.dk, w.first_key, 0, w.kv_head, w.batch);
    }
  };
};

}  // namespace tw::kernels::attention

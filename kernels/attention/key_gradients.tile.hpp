#pragma once

#include "kernels/attention/key_gradients_work.tile.hpp"

namespace tw::kernels::attention {

/// The gradients that a kernel computes. Where the accumulators of both do not fit the registers, each has a kernel of its own.
enum class Gradients { keys_and_values, keys, values };

/// Gradients of attention's keys and values:
///   P = exp(S - lse), dV = P^T dO, dP = dO V^T, dS = P (dP - delta) with delta = rowsum(dO O), dK = scale dS^T Q.
///
/// One tile is BN keys of one head. Blocks of BM queries pass by, of all query heads that share the keys. Scores are computed transposed,
/// [keys, queries], so that weights and dS are left operands in registers.
template <class T, AttentionConfig kConfig, class Rules, Gradients kGradients>
struct KeyGradients {
  static constexpr const char* source = "kernels/attention/key_gradients.tile.hpp";
  static constexpr int D = kConfig.head_dim, BM = kConfig.rows, BN = kConfig.keys;
  static_assert(kConfig.value_dim == D, "dK and dV leave through one staging buffer");
  static constexpr bool dropping = kConfig.dropout != Use::never;
  static constexpr bool for_keys = kGradients != Gradients::values, for_values = kGradients != Gradients::keys;

  template <class Target>
  struct On {
    using Keys = Shared<Target, T, BN, D>;
    using Queries = Shared<Target, T, BM, D>;
    using OfQueries = SharedVector<Target, float, BM>;
    using Out = Staging<Target, T, BN, D>;
    using Scores = Fragment<Target, float, BN, BM>;
    using Weights = Operand<Target, T, BN, BM>;
    using Integers = Pointer<Target, const i32>;
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
    struct QueriesForValues {
      Queries q;
      OfQueries lse;
    };
    struct QueriesForKeys : QueriesForValues {
      OfQueries delta;
    };
    using QuerySlot = conditional<for_keys, QueriesForKeys, QueriesForValues>;
    struct MemoryForValues {
      Ring<Target, Keys, 1> k;
      Ring<Target, QuerySlot, kConfig.stages> queries;
      Ring<Target, Queries, kConfig.stages> outputs;  ///< dO
      Out out;
      explicit constexpr MemoryForValues(auto& block) : k(block), queries(block), outputs(block), out(block) {}
    };
    struct MemoryForKeys {
      Ring<Target, Keys, 1> k, v;
      Ring<Target, QuerySlot, kConfig.stages> queries;
      Ring<Target, Queries, kConfig.stages> outputs;
      Out out;
      explicit constexpr MemoryForKeys(auto& block) : k(block), v(block), queries(block), outputs(block), out(block) {}
    };
    using Memory = conditional<for_keys, MemoryForKeys, MemoryForValues>;
    /// Where dO has one slot, only dP reads it: then dP comes before the scores, and the next dO arrives long before the next queries.
    static constexpr bool outputs_first = kGradients == Gradients::keys && kConfig.stages == 1;
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
      if (step == 0) {
        producer.put(memory.k, [&](auto copy, Keys& k) { copy.tile(p.k, k, w.k_row + w.first_key, 0, w.kv_head, w.tensor_batch); });
        if constexpr (for_keys)
          producer.put(memory.v, [&](auto copy, Keys& v) { copy.tile(p.v, v, w.k_row + w.first_key, 0, w.kv_head, w.tensor_batch); });
      }
      const int entry = w.entry(p, step), head = w.head(p, entry), query0 = w.first_query(p, entry);
      const auto put_queries = [&] {
        producer.put(memory.queries, [&](auto copy, QuerySlot& slot) {
          copy.tile(p.q, slot.q, w.q_row + query0, 0, head, w.tensor_batch);
          copy.vector(p.lse, slot.lse, head, w.sums_row + query0, w.tensor_batch);
          if constexpr (for_keys) copy.vector(p.delta, slot.delta, head, w.sums_row + query0, w.tensor_batch);
        });
      };
      if constexpr (!outputs_first) put_queries();
      producer.put(memory.outputs, [&](auto copy, Queries& d_o) { copy.tile(p.d_o, d_o, w.q_row + query0, 0, head, w.tensor_batch); });
      if constexpr (outputs_first) put_queries();
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.steps == 0) {
        block.fill(state.dk, 0.0f);
        block.fill(state.dv, 0.0f);
        return;
      }
      if constexpr (for_keys)
        compute_keys(block, p, w, memory, state);
      else
        compute_values(block, p, w, memory, state);
    }

    /// P of a step, from the scores; dropped weights with a minus sign. `slopes`: see Rules::bending.
    TW_INLINE static void weigh(auto& block, const Params& p, const Work& w, int step, const QuerySlot& queries, Scores& scores,
                                Scores& slopes) {
      const int entry = w.entry(p, step);
      apply_rules_to_keys<Rules>(block, p, w, entry, scores, slopes);
      // Read where they are used: as vectors they would take the registers of half a tile.
      block.for_each(scores, [&](int, int query, auto& x) { x = exp2(x * p.scale_log2 - queries.lse[query]); });
      if constexpr (dropping) {
        if (drops(kConfig, p)) mark_dropped_transposed(block, w.dropout(p, entry), scores, w.first_query(p, entry), w.first_key);
      }
    }

    /// The next scores and dV are in flight together, and the next weights are computed under dV. With dropout, whose numbers take too many
    /// registers, and where products are synchronous, one comes after the other.
    TW_INLINE static void compute_values(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      constexpr bool kAhead = !dropping && !products_are_synchronous<Target>;
      Keys& k = block.take(memory.k);
      w.keep_keys(block, k);
      Scores scores, slopes;
      Weights weights;
      QuerySlot* queries = nullptr;
      const auto take_queries = [&](int step) {
        queries = &block.take(memory.queries);
        w.keep_queries(block, p, queries->q, w.entry(p, step));
      };
      const auto round = [&] {
        if constexpr (dropping)
          convert_kept(block, weights, scores);
        else
          block.convert(weights, scores);
      };
      const auto first_weights = [&](int step) {
        take_queries(step);
        block.mma(scores, k, queries->q, true);
        block.wait(leave<0>, scores);
        weigh(block, p, w, step, *queries, scores, slopes);
        round();
      };
      if constexpr (kAhead) first_weights(0);
      for (int step = 0; step < w.steps; ++step) {
        if constexpr (!kAhead) first_weights(step);
        Queries& d_o = block.take(memory.outputs);
        w.keep_queries(block, p, d_o, w.entry(p, step));
        const int next = min(step + 1, w.steps - 1);
        if constexpr (kAhead) {
          if (next > step) {
            release(block, memory.queries);
            take_queries(next);
          }
          block.mma(scores, k, queries->q, true);  // unused after the last step: ptxas serialises conditional products
        }
        block.mma(state.dv, weights, view<Contract::rows>(d_o), step == 0);
        if constexpr (kAhead) {
          block.wait(leave<1>, scores);
          weigh(block, p, w, next, *queries, scores, slopes);
        }
        block.wait(leave<0>, state.dv);
        if constexpr (kAhead) round();
        release(block, memory.outputs);
        if constexpr (!kAhead) release(block, memory.queries);
      }
      if constexpr (kAhead) block.release(memory.queries);
      block.release(memory.k);
    }

    TW_INLINE static void compute_keys(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      Keys& k = block.take(memory.k);
      w.keep_keys(block, k);
      Keys& v = block.take(memory.v);
      w.keep_keys(block, v);
      for (int step = 0; step < w.steps; ++step) {
        Scores scores, slopes, ds;
        Weights weights, ds_weights;
        QuerySlot* queries;
        Queries* d_o;
        const auto take_queries = [&] {
          queries = &block.take(memory.queries);
          w.keep_queries(block, p, queries->q, w.entry(p, step));
        };
        const auto take_outputs = [&] {
          d_o = &block.take(memory.outputs);
          w.keep_queries(block, p, *d_o, w.entry(p, step));
        };
        if constexpr (outputs_first) {
          take_outputs();
          if constexpr (Work::ragged) take_queries();  // before the products, which ptxas would serialise around the loop that sets rows
          block.mma(ds, v, *d_o, true);
          if constexpr (!Work::ragged) take_queries();
          block.mma(scores, k, queries->q, true);
          block.wait(leave<0>, scores, ds);
          release(block, memory.outputs);
        } else {
          take_queries();
          take_outputs();
          block.mma(scores, k, queries->q, true);
          block.mma(ds, v, *d_o, true);
          block.wait(leave<1>, scores);
        }
        weigh(block, p, w, step, *queries, scores, slopes);
        // dV needs the weights after dropout, dS those before it. The registers do not hold both: then dV comes second.
        constexpr bool kValuesFirst = for_values && !dropping, kValuesSecond = for_values && dropping;
        if constexpr (for_values) block.convert(weights, scores);
        if constexpr (kValuesFirst) block.mma(state.dv, weights, view<Contract::rows>(*d_o), step == 0);
        block.wait(leave<(kValuesFirst ? 1 : 0)>, ds);
        if constexpr (for_values) block.convert(scores, weights);  // the registers do not hold the f32 weights beside dP
        block.for_each(ds, scores, [&](int, int query, auto& x, auto& weight) {
          if constexpr (dropping)
            x = score_derivative(weight, x, queries->delta[query], p.dropout.scale);
          else
            x = weight * (x - queries->delta[query]);
        });
        if constexpr (kValuesSecond) {
          drop_marked(block, weights, scores);
          block.mma(state.dv, weights, view<Contract::rows>(*d_o), step == 0);
        }
        if constexpr (Rules::bending) block.map(ds, slopes, [](auto x, auto slope) { return x * slope; });
        block.convert(ds_weights, ds);
        block.mma(state.dk, ds_weights, view<Contract::rows>(queries->q), step == 0);
        block.wait(leave<0>, state.dk, state.dv);
        if constexpr (!outputs_first) release(block, memory.outputs);
        release(block, memory.queries);
      }
      block.release(memory.k);
      block.release(memory.v);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      if (w.is_empty()) return;
      if constexpr (for_values && dropping) block.map(state.dv, p.dropout.scale, [](auto x, auto scale) { return x * scale; });
      if constexpr (for_values) store_keys(block, w, state.dv, memory.out, p.dv);
      if constexpr (for_keys) {
        block.map(state.dk, p.scale, [](auto x, auto scale) { return x * scale; });
        store_keys(block, w, state.dk, memory.out, p.dk);
      }
    }

   private:
    /// All threads of the warpgroup have read the slot's vectors.
    TW_INLINE static void release(auto& block, auto& ring) {
      block.fence();
      block.sync_warpgroup();
      block.release(ring);
    }
  };
};

}  // namespace tw::kernels::attention

#pragma once

#include "kernels/mla/decode_work.tile.hpp"

namespace tw::kernels::mla {

/// Absorbed multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) of few queries against a long cache. All heads share one key of 576
/// columns for each token, whose first 512 columns are the value as well:
///
///   o = softmax(scale q K^T) V,  V = K(:, 0:512)
///
/// A tile is 64 rows, row r of a sequence being head r % heads of token r / heads, and a range of the sequence's keys. Keys arrive N at a
/// time, and are both operands of products from one copy in shared memory. 64 x 512 accumulators are too many for one warpgroup, so two
/// hold 256 columns each. Each computes half of the scores' columns; both read all weights from shared memory.
template <class T, int N, int Stages, Cache kCache>
struct Decode {
  static constexpr const char* source = "kernels/mla/decode.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int rows = 2 * kRows, warpgroups = rows / 64;  // two warpgroups for each 64 rows
    static constexpr int vector_bytes = 64;
    using Q = Shared<Target, T, kRows, kKey>;
    using K = Shared<Target, T, N, kKey>;
    using Scores = Fragment<Target, float, kRows, N, warpgroups>;
    using Output = Fragment<Target, float, kRows, kLatent, warpgroups>;
    using Softmax = SharedSoftmax<Target, Scores, kCache>;
    using Keys = conditional<kGathers<kCache>, GatherRing<Target, K, Stages>, Ring<Target, K, Stages>>;
    using Work = DecodeWork;
    using Schedule = conditional<kCache == Cache::selected, InTurn, RowMajor>;

    struct Params : DecodeParams<Target> {
      Global<Target, const T, Q> q;  ///< [batch, seqlen_q * heads, 576]
      /// [batch, capacity, 576], [pages, page_size, 576] or, gathered, [1, tokens, 576]
      Global<Target, const T, K> kv;
      Global<Target, T> o;  ///< [batch, seqlen_q * heads, 512]
    };
    struct Memory {
      Ring<Target, Q, 1> q;
      Keys keys;
      Buffer<Target, T, kRows, N> weights;
      RowExchange<Target, float, Scores> exchange;
      explicit constexpr Memory(auto& block) : q(block), keys(block), weights(block), exchange(block) {}
    };
    struct State {
      Output out;
      Softmax softmax;
    };
    struct Locals {
      Scores scores;
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return Work::of(p, t, N); }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.blocks; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int key0 = (w.begin + step) * N;
      const auto rows = rows_of_keys<kCache, N>(producer, p, w, key0);
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, w.first_row, 0, w.batch); });
      producer.put(memory.keys, [&](auto copy, K& k) { load_keys<kCache>(copy, p, w, key0, rows, p.kv, k, 0); });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      state.softmax.begin(block);
      block.fill(state.out, 0.0f);
      if (w.blocks == 0) return;
      const Q& q = block.take(memory.q);
      if constexpr (scores_follow) {
        K* k = &block.take(memory.keys);
        Scores scores;
        block.mma(scores, q, *k, true);
        for (int step = 0; step < w.blocks - 1; ++step) {
          make_weights<false>(block, p, w, step, memory, *k, scores, state);
          add_output(block, memory, *k, state);
          k = &block.take(memory.keys);
          block.mma(scores, q, *k, true);
          block.wait(leave<1>, state.out);
          block.release(memory.keys);
        }
        make_weights<true>(block, p, w, w.blocks - 1, memory, *k, scores, state);
        add_output(block, memory, *k, state);
        block.wait(leave<0>, state.out);
        block.release(memory.keys);
      } else {
        for (int step = 0; step < w.blocks; ++step) {
          K& k = block.take(memory.keys);
          Scores scores;
          block.mma(scores, q, k, true);
          make_weights<true>(block, p, w, step, memory, k, scores, state);
          add_output(block, memory, k, state);
          block.wait(leave<0>, state.out);
          block.release(memory.keys);
        }
      }
      block.release(memory.q);
      block.complete(state.softmax.sum, memory.exchange);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      state.softmax.store_lse(block, p, w);
      if (p.partial.data != nullptr && w.blocks == 0) return;  // an lse of -infinity says so
      typename Softmax::PerRow factor;
      state.softmax.factors(block, p, w, factor);
      block.map(state.out, factor, [](auto x, auto f) { return x * f; });
      store_output(block, p, w, state.out, 0);
    }

   private:
    /// Only a target that can load either way says whether it loads by TMA.
    static constexpr bool loads_by_tma() {
      if constexpr (requires { Target::tma_load; }) return Target::tma_load;
      return !products_are_synchronous<Target>;
    }
    /// The next block's scores are started right after this block's output, so that the tensor cores go on while this one's end is awaited.
    /// That takes two blocks in shared memory, and registers that a producer without TMA does not leave.
    static constexpr bool scores_follow = loads_by_tma() && !kGathers<kCache>;

    /// Waits for a block's scores and stores its weights, which all warps can then multiply. Only the split's last block can reach past the
    /// sequence's end.
    template <bool kLast>
    TW_INLINE static void make_weights(auto& block, const Params& p, const Work& w, int step, Memory& memory, K& k, Scores& scores,
                                       State& state) {
      const int key0 = (w.begin + step) * N;
      Entries<Target, Scores, kCache> entries;
      entries.read(block, p, w, key0);
      block.wait(leave<0>, scores);
      entries.hide_missing(block, p, scores);
      // Other tokens follow the sequence's last one. They may be NaN, which weights of 0 would not hide.
      if (kLast && !kGathers<kCache> && key0 + N > w.seqlen) block.zero_rows(k, w.seqlen - key0);
      if (key0 + N > w.whole) hide_keys(block, p, w, key0, scores);
      state.softmax.add(block, p.scale_log2, memory.exchange, scores,
                        [&](const auto& decay) { block.map(state.out, decay, [](auto x, auto d) { return x * d; }); });
      block.store(scores, memory.weights);
      block.fence();
      block.sync();
    }
    TW_INLINE static void add_output(auto& block, Memory& memory, const K& k, State& state) {
      block.mma(state.out, memory.weights, view_columns<0, kLatent>(view<Contract::rows>(k)), false);
    }
  };
};

}  // namespace tw::kernels::mla

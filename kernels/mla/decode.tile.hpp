#pragma once

#include "kernels/mla/decode_work.tile.hpp"

namespace tw::kernels::mla {

/// Absorbed multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) of few queries against a long cache. All heads share one key of 576
/// columns for each token, whose first 512 columns are the value as well:
///
///   o = softmax(scale q K^T) V,  V = K(:, 0:512)
///
/// A tile is 64 rows, row r of a sequence being head r % heads of token r / heads, and a range of the sequence's keys. Keys arrive N at a
/// time, and are both operands of products from one copy in shared memory. Two warpgroups each compute the scores of half of the keys, and
/// half of the output's columns from all weights.
///
/// Only one block of keys fits into shared memory. So its columns arrive in groups: while the output's products still read the last ones,
/// the next keys replace the first. The weights take the place of the rotary columns, which no product needs any more by then.
template <class T, int N, Cache kCache>
struct Decode {
  static constexpr const char* source = "kernels/mla/decode.tile.hpp";
  static constexpr int kGroup = 128, kGroups = kLatent / kGroup;  ///< columns that arrive together

  template <class Target>
  struct On {
    static constexpr int rows = 2 * kRows, warpgroups = rows / 64;  // two warpgroups for each 64 rows
    static constexpr int vector_bytes = 64;
    using Q = Shared<Target, T, kRows, kKey>;
    using K = Shared<Target, T, N, kGroup>;
    using Rotary = Shared<Target, T, N, kRotary>;
    using Weights = Buffer<Target, T, kRows, N>;
    using Scores = Fragment<Target, float, kRows, N, warpgroups>;
    using Output = Fragment<Target, float, kRows, kGroup, warpgroups>;
    using Softmax = SharedSoftmax<Target, Scores, kCache>;
    template <class Slot, int Stages>
    using Keys = conditional<kGathers<kCache>, GatherRing<Target, Slot, Stages>, Ring<Target, Slot, Stages>>;
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
      Keys<K, kGroups> keys;
      Keys<Rotary, 1> rotary;
      Weights weights;
      RowExchange<Target, float, Scores> exchange;
      explicit constexpr Memory(auto& block)
          : q(block), keys(block), rotary(block), weights(place_of_weights(block, rotary)), exchange(block) {}
    };
    struct State {
      Output out[kGroups];
      Softmax softmax;
    };
    struct Locals {
      Scores scores;
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return Work::of(p, t, N); }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.blocks; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int key0 = (w.begin + step) * N;
      const auto places = places_of_keys<kCache, N>(producer, p, w, key0);
      if (step == 0) producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, w.first_row, 0, w.batch); });
      producer.put(memory.rotary, [&](auto copy, Rotary& k) { load_keys<kCache>(copy, w, key0, places, p.kv, k, kLatent); });
      TW_NO_UNROLL
      for (int g = 0; g < kGroups; ++g)
        producer.put(memory.keys, [&](auto copy, K& k) { load_keys<kCache>(copy, w, key0, places, p.kv, k, g * kGroup); });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      state.softmax.begin(block);
      for_groups([&](auto g) { block.fill(state.out[g.value], 0.0f); });
      if (w.blocks == 0) return;
      const Q& q = block.take(memory.q);
      K* keys[kGroups];
      Scores scores;
      for (int step = 0; step < w.blocks; ++step) {
        block.mma(scores, view_columns<kLatent, kRotary>(q), block.take(memory.rotary), true);
        for_groups([&](auto g) {
          keys[g.value] = &block.take(memory.keys);
          block.mma(scores, view_columns<g.value * kGroup, kGroup>(q), *keys[g.value], false);
        });
        make_weights(block, p, w, step, memory, keys, scores, state);
        add_output(block, memory, keys, state);
      }
      block.release(memory.q);
      block.complete(state.softmax.sum, memory.exchange);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      state.softmax.store_lse(block, p, w);
      if (p.partial.data != nullptr && w.blocks == 0) return;  // an lse of -infinity says so
      typename Softmax::PerRow factor;
      state.softmax.factors(block, p, w, factor);
      for_groups([&](auto g) {
        block.map(state.out[g.value], factor, [](auto x, auto f) { return x * f; });
        store_output(block, p, w, state.out[g.value], g.value * kGroup);
      });
    }

   private:
    /// Blocks of few keys have rotary columns of fewer bytes than weights.
    static constexpr auto& place_of_weights(auto& block, auto& rotary) {
      if constexpr (N < kRows)
        return block;
      else
        return rotary;
    }
    /// Waits for a block's scores and stores its weights, which all warps can then multiply.
    TW_INLINE static void make_weights(auto& block, const Params& p, const Work& w, int step, Memory& memory, K* (&keys)[kGroups],
                                       Scores& scores, State& state) {
      const int key0 = (w.begin + step) * N;
      Entries<Target, Scores, kCache> entries;
      entries.read(block, p, w, key0);
      block.wait(leave<0>, scores);
      // The weights replace rotary columns that other warps may still read, unless each warpgroup replaces those of its own keys.
      static_assert(products_are_synchronous<Target> || N == rows);
      if constexpr (products_are_synchronous<Target>) block.sync();
      entries.hide_missing(block, p, scores);
      // Other tokens follow the sequence's last one. They may be NaN, which weights of 0 would not hide.
      if (!kGathers<kCache> && key0 + N > w.seqlen) for_groups([&](auto g) { block.zero_rows(*keys[g.value], w.seqlen - key0); });
      if (key0 + N > w.whole) hide_keys(block, p, w, key0, scores);
      state.softmax.add(block, p, memory.exchange, scores, memory.weights, [&](const auto& decay) {
        for_groups([&](auto g) { block.map(state.out[g.value], decay, [](auto x, auto d) { return x * d; }); });
      });
    }
    /// Multiplies the weights and each group of the keys' columns, which is released as soon as it has been read.
    TW_INLINE static void add_output(auto& block, Memory& memory, K* (&keys)[kGroups], State& state) {
      const auto add = [&](const auto& weights) {
        for_groups([&](auto g) { block.mma(state.out[g.value], weights, view<Contract::rows>(*keys[g.value]), false); });
        for_groups([&](auto g) {
          block.wait(leave<kGroups - 1 - g.value>, state.out[g.value]);
          block.release(memory.keys);
        });
      };
      if constexpr (products_are_synchronous<Target>) {
        add(memory.weights);
        block.release(memory.rotary);
      } else {
        // From registers tensor cores need not read the weights once for each group, and the next rotary columns can arrive.
        Operand<Target, T, kRows, N> weights;
        block.load(weights, memory.weights);
        block.release(memory.rotary);
        add(weights);
      }
    }
    TW_INLINE static void for_groups(auto f) {
      static_assert(kGroups == 4);
      f(Constant<0>{}), f(Constant<1>{}), f(Constant<2>{}), f(Constant<3>{});
    }
  };
};

}  // namespace tw::kernels::mla

#pragma once

#include "kernels/mla/decode_work.tile.hpp"

namespace tw::kernels::mla {

/// Absorbed multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) of few queries against a long cache. All heads share one key of 576
/// columns for each token, whose first 512 columns are the value as well:
///
///   o = softmax(scale q K^T) V,  V = K(:, 0:512)
///
/// A tile is 64 rows, row r of a sequence being head r % heads of token r / heads, and a range of the sequence's keys. Keys arrive N at a
/// time, and are both operands of products from one copy in shared memory. Each of two warpgroups has half of the output's columns, and
/// computes the weights of every second block of keys: so one multiplies while the other exponentiates, and keys are released, and the next
/// ones requested, all the time.
template <class T, int N, Cache kCache>
struct Decode {
  static constexpr const char* source = "kernels/mla/decode.tile.hpp";
  /// Columns that arrive together: the fewer, the sooner they make room for the next keys. But where all threads gather, each arrival
  /// costs.
  static constexpr int kGroup = kGathers<kCache> ? 256 : 128, kGroups = kLatent / kGroup;

  template <class Target>
  struct On {
    static constexpr int rows = 2 * kRows, warpgroups = rows / 64;  // two warpgroups for each 64 rows
    static constexpr int vector_bytes = 64;
    /// Blocks of keys that are in shared memory at once. GPUs of the generic target may have no room for two.
    static constexpr int blocks = products_are_synchronous<Target> ? 1 : 2;
    using Q = Shared<Target, T, kRows, kKey>;
    using K = Shared<Target, T, N, kGroup>;
    using Rotary = Shared<Target, T, N, kRotary>;
    using Weights = Buffer<Target, T, kRows, N>;
    using WeightOperand = Operand<Target, T, kRows, N>;
    using Scores = SoloFragment<Target, float, kRows, N, warpgroups>;
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
      Keys<K, blocks * kGroups> keys;
      Keys<Rotary, blocks> rotary;
      Weights weights;
      VectorBuffer<Target, float, kRows> base;
      RowExchange<Target, float, Scores> exchange;
      explicit constexpr Memory(auto& block) : q(block), keys(block), rotary(block), weights(block), base(block), exchange(block) {}
    };
    struct State {
      Output out[kGroups];
      Softmax softmax;
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
      for_groups<kGroups>([&](auto g) { block.fill(state.out[g.value], 0.0f); });
      if (w.blocks == 0) return;
      const Q& q = block.take(memory.q);
      for (int step = 0; step < w.blocks; ++step) {
        K* keys[kGroups];
        WeightOperand weights;
        Scores scores;
        const Rotary& rotary = block.take(memory.rotary);
        block.solo(step, [&](auto& one) { one.mma(scores, view_columns<kLatent, kRotary>(q), rotary, true); });
        for_groups<kGroups>([&](auto g) {
          constexpr int group = decltype(g)::value;
          const K& k = *(keys[group] = &block.take(memory.keys));
          block.solo(step, [&](auto& one) { one.mma(scores, view_columns<group * kGroup, kGroup>(q), k, false); });
        });
        const auto rescale = [&](const auto& decay) {
          for_groups<kGroups>([&](auto g) { block.map(state.out[g.value], decay, [](auto x, auto d) { return x * d; }); });
        };
        block.solo(step, [&](auto& one) { make_weights(one, p, w, step, memory, scores, state.softmax, weights, rescale); });
        block.join(step, [&](auto& one) {
          state.softmax.follow(one, memory.base, rescale);
          one.load(weights, memory.weights);
        });
        block.release(memory.rotary);
        // Other tokens follow the sequence's last one. They may be NaN, which weights of 0 would not hide.
        const int key0 = (w.begin + step) * N;
        if (!kGathers<kCache> && key0 + N > w.seqlen)
          for_groups<kGroups>([&](auto g) { block.zero_rows(*keys[g.value], w.seqlen - key0); });
        add_output<Target>(block, memory, weights, keys, state.out);
      }
      block.release(memory.q);
      state.softmax.complete(block, memory.exchange);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      state.softmax.store_lse(block, p, w);
      if (p.partial.data != nullptr && w.blocks == 0) return;  // an lse of -infinity says so
      typename Softmax::PerRow factor;
      state.softmax.factors(block, p, w, factor);
      for_groups<kGroups>([&](auto g) {
        block.map(state.out[g.value], factor, [](auto x, auto f) { return x * f; });
        store_output(block, p, w, state.out[g.value], g.value * kGroup);
      });
    }

   private:
    /// Waits for a block's scores and makes its weights.
    TW_INLINE static void make_weights(auto& one, const Params& p, const Work& w, int step, Memory& memory, Scores& scores,
                                       Softmax& softmax, auto& weights, auto rescale) {
      const int key0 = (w.begin + step) * N;
      Entries<Target, Scores, kCache> entries;
      entries.read(one, p, w, key0);
      one.wait(leave<0>, scores);
      entries.hide_missing(one, p, scores);
      if (key0 + N > w.whole) hide_keys(one, p, w, key0, scores);
      softmax.add(one, p, memory.exchange, scores, rescale);
      softmax.publish(one, memory.base);
      if constexpr (products_are_synchronous<Target>)
        one.sync();  // all warps have multiplied the weights before
      else
        one.convert(weights, scores);
      one.store(scores, memory.weights);
    }
  };
};

}  // namespace tw::kernels::mla

#pragma once

#include "kernels/mla/decode_work.tile.hpp"

namespace tw::kernels::mla {

/// Decode for a cache whose latent columns are e4m3 with a scale for each token and 128 columns. A token's row has 656 bytes: 512 of e4m3,
/// four scales in f32, and 64 rotary columns in T.
///
/// Keys arrive N at a time as they are stored. The computing threads widen the latent columns once, to buffers of T that both products
/// read; the rotary columns are multiplied where they arrived.
template <class T, int N, Cache kCache>
struct DecodeFp8 {
  static constexpr const char* source = "kernels/mla/decode_fp8.tile.hpp";
  static constexpr int kGroup = 128, kGroups = kLatent / kGroup;  ///< columns that share a scale

  template <class Target>
  struct On {
    static constexpr int rows = 2 * kRows, warpgroups = rows / 64;
    static constexpr int vector_bytes = 64;
    using Q = Shared<Target, T, kRows, kKey>;
    using Codes = Shared<Target, fp8_e4m3, N, kGroup>;
    using Scales = Shared<Target, float, N, 8>;  ///< of which four columns exist
    using Rotary = Shared<Target, T, N, kRotary>;
    using Widened = Buffer<Target, T, N, kGroup>;
    using Group = Fragment<Target, float, N, kGroup, warpgroups>;
    using Scores = Fragment<Target, float, kRows, N, warpgroups>;
    using Output = Fragment<Target, float, kRows, kGroup, warpgroups>;
    using Softmax = SharedSoftmax<Target, Scores, kCache>;
    using Work = DecodeWork;
    using Schedule = conditional<kCache == Cache::selected, InTurn, RowMajor>;
    static_assert(N % 64 == 0, "keys are widened in Fragments");

    struct Params : DecodeParams<Target> {
      Global<Target, const T, Q> q;                 ///< [batch, seqlen_q * heads, 576]
      Global<Target, const fp8_e4m3, Codes> codes;  ///< as Decode's kv, of 512 columns
      Global<Target, const float, Scales> scales;   ///< of four
      Global<Target, const T, Rotary> rotary;       ///< of 64
      Global<Target, T> o;                          ///< [batch, seqlen_q * heads, 512]
    };
    struct Slot {
      Codes codes[kGroups];
      Scales scales;
      Rotary rotary;
    };
    using Keys = conditional<kGathers<kCache>, GatherRing<Target, Slot, 1>, Ring<Target, Slot, 1>>;
    struct Memory {
      Ring<Target, Q, 1> q;
      Keys keys;
      Widened k0, k1, k2, k3;
      Buffer<Target, T, kRows, N> weights;
      RowExchange<Target, float, Scores> exchange;
      explicit constexpr Memory(auto& block)
          : q(block), keys(block), k0(block), k1(block), k2(block), k3(block), weights(block), exchange(block) {}
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
      producer.put(memory.keys, [&](auto copy, Slot& slot) {
        TW_UNROLL
        for (int g = 0; g < kGroups; ++g) load_keys<kCache>(copy, w, key0, places, p.codes, slot.codes[g], g * kGroup);
        load_keys<kCache>(copy, w, key0, places, p.scales, slot.scales, 0);
        load_keys<kCache>(copy, w, key0, places, p.rotary, slot.rotary, 0);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      state.softmax.begin(block);
      TW_UNROLL
      for (int g = 0; g < kGroups; ++g) block.fill(state.out[g], 0.0f);
      if (w.blocks == 0) return;
      const Q& q = block.take(memory.q);
      for (int step = 0; step < w.blocks; ++step) {
        const int key0 = (w.begin + step) * N, keys = w.seqlen - key0;
        Slot& slot = block.take(memory.keys);
        // Products of the block before have read the buffers, as each warpgroup knows of its own.
        block.sync();
        for_groups(memory, [&](auto g, Widened& k) { widen<decltype(g)::value>(block, slot, keys, k); });
        block.fence();
        block.sync();
        Scores scores;
        for_groups(memory, [&](auto g, Widened& k) {
          constexpr int kFirst = decltype(g)::value * kGroup;
          block.mma(scores, view_columns<kFirst, kGroup>(q), k, kFirst == 0);
        });
        block.mma(scores, view_columns<kLatent, kRotary>(q), slot.rotary, false);
        Entries<Target, Scores, kCache> entries;
        entries.read(block, p, w, key0);
        block.wait(leave<0>, scores);
        block.release(memory.keys);
        entries.hide_missing(block, p, scores);
        if (key0 + N > w.whole) hide_keys(block, p, w, key0, scores);
        state.softmax.add_shared(block, p, memory.exchange, scores, memory.weights, [&](const auto& decay) {
          TW_UNROLL
          for (int g = 0; g < kGroups; ++g) block.map(state.out[g], decay, [](auto x, auto d) { return x * d; });
        });
        for_groups(memory,
                   [&](auto g, Widened& k) { block.mma(state.out[decltype(g)::value], memory.weights, view<Contract::rows>(k), false); });
        block.wait(leave<0>, state.out[0], state.out[1], state.out[2], state.out[3]);
      }
      block.release(memory.q);
      state.softmax.complete(block, memory.exchange);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      state.softmax.store_lse(block, p, w);
      if (p.partial.data != nullptr && w.blocks == 0) return;  // an lse of -infinity says so
      typename Softmax::PerRow factor;
      state.softmax.factors(block, p, w, factor);
      TW_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        block.map(state.out[g], factor, [](auto x, auto f) { return x * f; });
        store_output(block, p, w, state.out[g], g * kGroup);
      }
    }

   private:
    TW_INLINE static void for_groups(Memory& memory, auto f) {
      f(Constant<0>{}, memory.k0);
      f(Constant<1>{}, memory.k1);
      f(Constant<2>{}, memory.k2);
      f(Constant<3>{}, memory.k3);
    }
    /// Writes group g's columns of the block's keys to a buffer. Rows after the sequence's end may be NaN and become 0.
    template <int g>
    TW_INLINE static void widen(auto& block, Slot& slot, int keys, Widened& to) {
      Group x;
      RowVector<Target, float, Group> scale;
      block.load(x, slot.codes[g]);
      block.fill(scale, 0.0f);
      block.for_rows(scale, [&](int row, int, auto& s) {
        if (row < keys) s = slot.scales.get(row, g);
      });
      block.map(x, scale, [](auto code, auto s) { return s == 0.0f ? s : code * s; });
      block.store(x, to);
    }
  };
};

}  // namespace tw::kernels::mla

#pragma once

#include "kernels/mla/decode_work.tile.hpp"

namespace tw::kernels::mla {

/// Decode for a cache whose latent columns are e4m3 with a scale for each token and 128 columns. A token's row has 656 bytes: 512 of e4m3,
/// four scales in f32, and 64 rotary columns in T.
///
/// Keys become f16 in shared memory, where every code is exact: those of the next block in one warpgroup, while the other one computes the
/// weights of this block. A key is relative to its largest scale s there. That enters the scores when they are complete, and the weights
/// with which values are added:
///
///   o = sum_n (e_n s_n) (v_n / s_n) / sum_n e_n
///
/// Queries become f16, too, each row times a power of two.
template <class T, int N, Cache kCache>
struct DecodeFp8 {
  static constexpr const char* source = "kernels/mla/decode_fp8.tile.hpp";
  static constexpr int kGroup = 128, kGroups = kLatent / kGroup;  ///< columns that share a scale, and arrive together

  template <class Target>
  struct On {
    static constexpr int rows = 2 * kRows, warpgroups = rows / 64;
    static constexpr int vector_bytes = 64;
    static constexpr int blocks = products_are_synchronous<Target> ? 1 : 2;
    using Codes = Shared<Target, fp8_e4m3, N, kGroup>;
    using K = Widened<Target, fp8_e4m3, N, kGroup>;
    using Rotary = Shared<Target, T, N, kRotary>;
    using Queries = Buffer<Target, f16, kRows, kGroup>;
    using RotaryQueries = Buffer<Target, T, kRows, kRotary>;
    using Weights = Buffer<Target, f16, kRows, N>;
    using WeightOperand = Operand<Target, f16, kRows, N>;
    using Scores = SoloFragment<Target, float, kRows, N, warpgroups>;
    using PerKey = ColumnVector<Target, float, Scores>;
    using Output = Fragment<Target, float, kRows, kGroup, warpgroups>;
    using RotaryPart = Fragment<Target, float, kRows, kRotary, warpgroups>;
    using Softmax = SharedSoftmax<Target, Scores, kCache>;
    using PerRow = typename Softmax::PerRow;
    template <class Slot, int Stages>
    using Keys = conditional<kGathers<kCache>, GatherRing<Target, Slot, Stages>, Ring<Target, Slot, Stages>>;
    using Work = DecodeWork;
    using Schedule = conditional<kCache == Cache::selected, InTurn, RowMajor>;

    struct Params : DecodeParams<Target> {
      Global<Target, const T> q;                               ///< [batch, seqlen_q * heads, 576]
      Global<Target, const fp8_e4m3, Codes> codes;             ///< as Decode's kv, of 512 columns
      Global<Target, const float, typename K::Scales> scales;  ///< of four
      Global<Target, const T, Rotary> rotary;                  ///< of 64
      Global<Target, T> o;                                     ///< [batch, seqlen_q * heads, 512]
    };
    struct Memory {
      Queries q0, q1, q2, q3;
      RotaryQueries rotary_q;
      Keys<K, blocks * kGroups> keys;
      Keys<Rotary, blocks> rotary;
      Weights weights;
      VectorBuffer<Target, float, 4 * N> key_scales;  ///< of even and of odd blocks: each key's s, then log2 s
      VectorBuffer<Target, float, kRows> base;
      RowExchange<Target, float, Scores> exchange;
      explicit constexpr Memory(auto& block)
          : q0(block),
            q1(block),
            q2(block),
            q3(block),
            rotary_q(block),
            keys(block),
            rotary(block),
            weights(block),
            key_scales(block),
            base(block),
            exchange(block) {}
    };
    struct State {
      Output out[kGroups];
      Softmax softmax;
      PerRow factor;  ///< a row's products with keys, times this, are exponents
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return Work::of(p, t, N); }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.blocks; }
    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const int key0 = (w.begin + step) * N;
      const auto places = places_of_keys<kCache, N>(producer, p, w, key0);
      TW_NO_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        producer.put(memory.keys, [&](auto copy, K& k) {
          if (g == 0) load_keys<kCache>(copy, w, key0, places, p.scales, k.scales(), 0);
          load_keys<kCache>(copy, w, key0, places, p.codes, k.codes(), g * kGroup);
        });
      }
      producer.put(memory.rotary, [&](auto copy, Rotary& k) { load_keys<kCache>(copy, w, key0, places, p.rotary, k, 0); });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      state.softmax.begin(block);
      if (w.blocks > 0) load_queries(block, p, w, memory, state);
      for_groups<kGroups>([&](auto g) { block.fill(state.out[g.value], 0.0f); });
      if (w.blocks == 0) return;
      if constexpr (!products_are_synchronous<Target>) {
        block.solo(0, [&](auto& one) { widen(one, w, 0, memory, [&](int g) -> K& { return block.peek(memory.keys, g); }); });
      }
      for (int step = 0; step < w.blocks; ++step) {
        K* keys[kGroups];
        WeightOperand weights;
        Scores scores;
        for_groups<kGroups>([&](auto g) { keys[g.value] = &block.take(memory.keys); });
        if constexpr (products_are_synchronous<Target>) widen(block, w, step, memory, [&](int g) -> K& { return *keys[g]; });
        block.solo(step, [&](auto& one) {
          for_groups<kGroups>([&](auto g) {
            constexpr int group = decltype(g)::value;
            one.mma(scores, queries<group>(memory), *keys[group], group == 0);
          });
        });
        const Rotary& rotary = block.take(memory.rotary);
        const auto rescale = [&](const auto& decay) {
          for_groups<kGroups>([&](auto g) { block.map(state.out[g.value], decay, [](auto x, auto d) { return x * d; }); });
        };
        block.solo(step, [&](auto& one) {
          PerKey scale;
          one.load(scale, memory.key_scales, step % 2 * 2 * N);
          one.wait(leave<0>, scores);
          one.map(scores, scale, [](auto x, auto s) { return x * s; });
          one.mma(scores, memory.rotary_q, rotary, false);
        });
        block.solo(step, [&](auto& one) { make_weights(one, p, w, step, memory, scores, state, weights, rescale); });
        if constexpr (!products_are_synchronous<Target>) {
          if (step + 1 < w.blocks) {
            block.meanwhile(step,
                            [&](auto& one) { widen(one, w, step + 1, memory, [&](int g) -> K& { return block.peek(memory.keys, g); }); });
          }
        }
        block.join(step, [&](auto& one) {
          state.softmax.follow(one, memory.base, rescale);
          one.load(weights, memory.weights);
        });
        block.release(memory.rotary);
        add_output<Target>(block, memory, weights, keys, state.out);
      }
      state.softmax.complete(block, memory.exchange);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      state.softmax.store_lse(block, p, w);
      if (p.partial.data != nullptr && w.blocks == 0) return;  // an lse of -infinity says so
      PerRow factor;
      state.softmax.factors(block, p, w, factor);
      for_groups<kGroups>([&](auto g) {
        block.map(state.out[g.value], factor, [](auto x, auto f) { return x * f; });
        store_output(block, p, w, state.out[g.value], g.value * kGroup);
      });
    }

   private:
    /// A token's scales, relative to the largest.
    struct Ratios {
      f16 x[kGroups];
    };

    template <int n>
    TW_INLINE static const Queries& queries(const Memory& m) {
      if constexpr (n < 2)
        return n == 0 ? m.q0 : m.q1;
      else
        return n == 2 ? m.q2 : m.q3;
    }
    /// Writes the tile's queries to shared memory, each row times a power of two that makes its largest element 2^13 to 2^14.
    TW_INLINE static void load_queries(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      PerRow power;
      block.fill(power, 0.0f);
      const auto measure = [&](auto& x, int col) {
        block.load(x, p.q, w.first_row, col, w.batch);
        auto size = x;
        block.map(size, [](auto y) { return abs(y); });
        block.rows(size, [&](int i, auto row) { power[i] = max(power[i], row.partial_max()); });
      };
      const auto store = [&](auto& x, auto& to) {
        block.map(x, power, [](auto y, auto f) { return y * f; });
        block.store(x, to);
      };
      TW_NO_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        Output x;
        measure(x, g * kGroup);
      }
      RotaryPart rotary;
      measure(rotary, kLatent);
      block.combine_rows(power, memory.exchange, [](auto a, auto b) { return max(a, b); });
      block.for_rows(power, [&](int, int i, auto& x) {
        x = scaling_power(x, 13);
        state.factor[i] = p.scale_log2 / x;
      });
      store(rotary, memory.rotary_q);
      for_groups<kGroups>([&](auto g) {
        Output x;
        block.load(x, p.q, w.first_row, g.value * kGroup, w.batch);
        store(x, queries<decltype(g)::value>(memory));
      });
      block.fence();
      block.sync();
    }
    /// Makes a block's keys f16. keys(g) is a group of their columns.
    TW_INLINE static void widen(auto& one, const Work& w, int step, Memory& memory, auto keys) {
      const int key0 = (w.begin + step) * N;
      const auto& to = memory.key_scales;
      const auto& scales = keys(0).scales();
      const auto ratios = one.template values_of_rows<N>([&](auto row) {
        const float s[] = {scales.get(row, 0), scales.get(row, 1), scales.get(row, 2), scales.get(row, 3)};
        // Any scale will do for a key that is zero or does not exist, if its logarithm is finite.
        const float largest = key0 + row < w.seqlen ? max(max(max(s[0], s[1]), max(s[2], s[3])), 0x1p-60f) : 1.0f;
        const float inverse = reciprocal(largest);
        to[step % 2 * 2 * N + row] = largest;
        to[step % 2 * 2 * N + N + row] = log2(largest);
        return Ratios{f16(s[0] * inverse), f16(s[1] * inverse), f16(s[2] * inverse), f16(s[3] * inverse)};
      });
      one.sync();  // keys will be where scales were
      for_groups<kGroups>([&](auto g) {
        constexpr int group = decltype(g)::value;
        one.widen(keys(group), ratios, w.seqlen - key0, [](const auto& r, int) { return r.x[group]; });
      });
      one.fence();
      one.sync();
    }
    TW_INLINE static void make_weights(auto& one, const Params& p, const Work& w, int step, Memory& memory, Scores& scores, State& state,
                                       auto& weights, auto rescale) {
      const int key0 = (w.begin + step) * N;
      Entries<Target, Scores, kCache> entries;
      entries.read(one, p, w, key0);
      one.wait(leave<0>, scores);
      entries.hide_missing(one, p, scores);
      if (key0 + N > w.whole) hide_keys(one, p, w, key0, scores);
      PerKey scale;
      one.load(scale, memory.key_scales, step % 2 * 2 * N + N);
      state.softmax.add_scaled(one, p, memory.exchange, scores, state.factor, scale, rescale);
      one.load(scale, memory.key_scales, step % 2 * 2 * N);
      one.map(scores, scale, [](auto e, auto s) { return e * s; });
      state.softmax.publish(one, memory.base);
      if constexpr (products_are_synchronous<Target>)
        one.sync();  // all warps have multiplied the weights before
      else
        one.convert(weights, scores);
      one.store(scores, memory.weights);
    }
  };
};

}  // namespace tw::kernels::mla

#pragma once

#include "tilewave/tile/language.tile.hpp"

/// S = softmax(scale Q K^T), each row over all keys: Q [queries, D], K [keys, D] of T, S [queries, keys] of f32. At most `Keys` keys: a
/// tile holds whole rows.
template <class T, int D, int BM, int Keys>
struct AttentionScores {
  static constexpr const char* source = "step4_attention_scores.tile.hpp";

  template <class Target>
  struct On {
    using Q = tw::Shared<Target, T, BM, D>;
    using K = tw::Shared<Target, T, Keys, D>;  // stored [keys, D], like Q: Q K^T sums over the columns of both
    using State = tw::Fragment<Target, float, BM, Keys>;
    static constexpr int rows = BM;

    struct Params {
      tw::Global<Target, const T, Q> q;
      tw::Global<Target, const T, K> k;
      tw::Global<Target, float> s;
      float scale;
    };
    struct Memory {
      tw::Ring<Target, Q, 1> q;
      tw::Ring<Target, K, 1> k;
      explicit constexpr Memory(auto& block) : q(block), k(block) {}
    };

    static int steps(const Params&, tw::Tile) { return 1; }

    static void load(auto& producer, const Params& p, tw::Tile t, int, Memory& memory) {
      producer.put(memory.q, [&](auto copy, Q& q) { copy.tile(p.q, q, t.m * BM, 0); });
      producer.put(memory.k, [&](auto copy, K& k) { copy.tile(p.k, k, 0, 0); });
    }

    static void compute(auto& block, const Params& p, tw::Tile, Memory& memory, State& scores) {
      block.mma(scores, block.take(memory.q), block.take(memory.k), true);
      block.wait(tw::leave<0>, scores);
      block.release(memory.q);
      block.release(memory.k);

      block.for_each(scores, [&](int, int col, float& x) {
        if (col >= p.k.rows) x = -tw::kInfinity;  // no such key
      });
      const float scale = p.scale * tw::kLog2E;  // exp(x) is exp2(x log2 e)
      block.rows(scores, [&](int, auto row) {
        const float largest = row.max();
        row.map([&](float x) { return tw::exp2((x - largest) * scale); });
        const float inverse = tw::reciprocal(row.sum());
        row.map([&](float x) { return x * inverse; });
      });
    }

    static void finish(auto& block, const Params& p, tw::Tile t, Memory&, State& scores) { block.store(scores, p.s, t.m * BM, 0); }
  };
};

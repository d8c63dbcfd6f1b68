#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::moe {

inline constexpr int kMostChosen = 16;
inline constexpr int kMostGroups = 64;

/// Maps x, which must not be NaN, to an unsigned integer with the same order; -0 equals +0.
TW_INLINE u32 sortable(float x) {
  const u32 bits = bit_cast<u32>(x + 0.0f);  // -0 + 0 is +0
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

/// The k experts of each token, and their weights. A warp holds a token's logits, and finds the experts one after another as the largest
/// key below the previous one: a key is what experts are chosen by, then the column, so that no two are equal. C: at least the number of
/// experts, a multiple of 128.
template <class T, int C>
struct Route {
  static constexpr const char* source = "kernels/moe/route.tile.hpp";
  static constexpr int rows = 4;

  template <class Target>
  struct On {
    using Logits = Rows<Target, float, rows, C, 4, 4>;
    using Keys = Rows<Target, u64, rows, C, 4, 4>;
    /// Column n is the token's n-th expert.
    template <class E>
    using Chosen = Rows<Target, E, rows, 32, 4, 1>;
    static_assert(kMostChosen <= Chosen<float>::cols);

    struct Params {
      Global<Target, const T, Logits> logits;  ///< [tokens, experts]
      Global<Target, const float> bias;        ///< [1, experts], or absent
      Global<Target, float> weights;           ///< [tokens, k]
      Global<Target, i32> experts;             ///< [tokens, k]
      int k;
      int groups, taken_groups, group_size;
      u32 group_factor;  ///< 2^20 / group_size + 1: col * group_factor / 2^20 is col's group, for all columns below 1024
      bool sigmoid;      ///< otherwise softmax
      bool by_score;     ///< experts are chosen by score + bias, otherwise by logits, whose order is that of the exact scores
      bool sum_of_two;   ///< a group counts as much as its two best experts together, otherwise as its best one
      bool renormalise;
      float scale;
    };
    struct Memory {
      VectorBuffer<Target, float, rows * C> scores, choices;
      VectorBuffer<Target, float, rows * kMostGroups> groups, taken;  ///< taken: 1 or 0
      explicit constexpr Memory(auto& block) : scores(block), choices(block), groups(block), taken(block) {}
    };

    /// x becomes what experts are chosen by; a logit that is NaN or -infinity is -infinity. Leaves the scores in `memory`.
    TW_INLINE static void choose_by(auto& block, const Params& p, Logits& x, Memory& memory) {
      constexpr float largest_finite = bit_cast<float>(0x7f7fffffu);
      block.for_each(x, [](int, int, auto& logit) {
        if (!(logit > -kInfinity)) logit = -kInfinity;
        if (logit > largest_finite) logit = largest_finite;  // infinity - infinity would be NaN
      });
      Logits scores = x;
      if (p.sigmoid) {
        block.for_each(scores, [](int, int, auto& s) { s = sigmoid(s); });
      } else {
        block.rows(scores, [](int, auto row) {
          const auto largest = max(row.max(), -largest_finite);
          const auto sum = row.map_sum([largest](auto s) { return exp(s - largest); });
          const auto factor = 1.0f / max(sum, 1.0f);  // the largest logit's term is 1; the sum is 0 if all logits are -infinity
          row.map([factor](auto s) { return s * factor; });
        });
      }
      block.for_each(scores, [&](int row, int col, auto& s) { memory.scores[row * C + col] = s; });
      if (!p.by_score) return;
      ColumnVector<Target, float, Logits> bias;
      block.load(bias, p.bias, 0, 0);
      block.map(x, scores, bias, [](auto logit, auto score, auto b) {
        auto choice = score + b;
        if (!(logit > -kInfinity) || !(choice > -kInfinity)) choice = -kInfinity;
        return choice;
      });
    }

    /// memory.taken[token, group] = whether the group's experts may be chosen.
    TW_INLINE static void take_groups(auto& block, const Params& p, Logits& x, Memory& memory) {
      block.for_each(x, [&](int row, int col, auto& choice) { memory.choices[row * C + col] = choice; });
      block.sync();
      block.parallel(rows * p.groups, [&](int i) {
        const int row = i / p.groups, group = i - row * p.groups, begin = row * C + group * p.group_size;
        remove_const_reference<decltype(memory.choices[0])> best = -kInfinity, second = -kInfinity;
        int n = i % p.group_size;  // neighbouring threads begin in different banks
        for (int left = p.group_size; left > 0; --left) {
          const auto choice = memory.choices[begin + n];
          second = max(second, min(best, choice));
          best = max(best, choice);
          n = n + 1 == p.group_size ? 0 : n + 1;
        }
        if (p.sum_of_two) best = best + second;
        memory.groups[row * kMostGroups + group] = best;
      });
      block.sync();
      block.parallel(rows * p.groups, [&](int i) {
        const int row = i / p.groups, group = i - row * p.groups, begin = row * kMostGroups;
        const auto own = memory.groups[begin + group];
        int better = 0;
        for (int other = 0; other < p.groups; ++other) {
          const auto score = memory.groups[begin + other];
          if (score > own || (score == own && other < group)) ++better;
        }
        memory.taken[begin + group] = better < p.taken_groups ? 1.0f : 0.0f;
      });
    }

    TW_INLINE static int group_of(const Params& p, int col) { return static_cast<int>(static_cast<u32>(col) * p.group_factor >> 20); }

    static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      const int row0 = t.m * rows;
      Logits x;
      block.load(x, p.logits, row0, 0, Fill{-kInfinity});
      choose_by(block, p, x, memory);
      if (p.groups > 1) take_groups(block, p, x, memory);
      block.sync();

      Keys keys;
      block.for_each(x, keys, [&](int row, int col, auto& choice, u64& key) {
        const bool open = col < p.logits.cols && (p.groups <= 1 || memory.taken[row * kMostGroups + group_of(p, col)] > 0.0f);
        key = open ? static_cast<u64>(sortable(to<float>(choice))) << 32 | static_cast<u32>(C - col) : 0;
      });
      Chosen<u64> chosen;
      Chosen<i32> slots;
      block.fill(chosen, 0);
      block.for_each(slots, [](int, int col, i32& slot) { slot = col; });
      RowVector<Target, u64, Keys> next{};
      block.for_rows(next, [](int, int, u64& key) { key = ~u64{0}; });
      for (int n = 0; n < p.k; ++n) {
        block.rows(keys, [&](int i, auto row) {
          const u64 previous = next[i];
          next[i] = row.max([previous](u64 key) { return key < previous ? key : u64{0}; });
        });
        block.map(chosen, slots, next, [n](u64 key, i32 slot, u64 found) { return slot == n ? found : key; });
      }

      Chosen<float> weights;
      Chosen<i32> experts;
      const auto expert_of = [](u64 key) { return C - static_cast<int>(static_cast<u32>(key)); };
      block.for_each(chosen, experts, [&](int, int, u64& key, i32& expert) { expert = expert_of(key); });
      block.fill(weights, 0.0f);
      block.for_each(chosen, weights, [&](int row, int col, u64& key, auto& weight) {
        if (col < p.k) weight = memory.scores[row * C + expert_of(key)];
      });
      block.rows(weights, [&](int, auto row) {
        if (p.renormalise) {
          const auto factor = p.scale / max(row.sum(), 1e-20f);
          row.map([factor](auto w) { return w * factor; });
        } else {
          const float factor = p.scale;
          row.map([factor](auto w) { return w * factor; });
        }
      });
      block.store(weights, p.weights, row0, 0);
      block.store(experts, p.experts, row0, 0);
    }
  };
};

}  // namespace tw::kernels::moe

#pragma once

#include "kernels/nsa/work.tile.hpp"
#include "tilewave/tile/online_softmax.tile.hpp"

namespace tw::kernels::nsa {

/// Attention of tokens over the blocks of keys that each selects (native sparse attention, arXiv 2502.11089), or over all that precede it:
///
///   o = softmax(scale q K^T) V,  K and V the rows of the token's blocks, up to the token itself
///
/// Row r of a tile is head r % Group of token r / Group; the heads share their keys. The tile's tokens are neighbours, and the blocks that
/// one of them selects pass by: what several select is loaded once. Each warpgroup has `64 / Group` tokens, and leaves out blocks that none
/// of these selects. Groups with fewer heads than Group have rows of zeros.
template <class T, int D, int DV, int Group, int Rows, int N, int Stages>
struct Selected {
  static constexpr const char* source = "kernels/nsa/selected.tile.hpp";
  static constexpr int tokens = Rows / Group;
  static_assert(tokens >= 1 && tokens <= kMostTokens && tokens * Group == Rows);

  template <class Target>
  struct On {
    static constexpr int rows = Rows;
    static constexpr int min_blocks = Rows == 64 ? 2 : 1;  // one warpgroup alone does not keep an SM busy
    static constexpr bool moves_registers = true;
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take as long as the products
    using Q = Shared<Target, T, Rows, D>;
    using K = Shared<Target, T, N, D>;
    using V = Shared<Target, T, N, DV, Contract::rows>;
    using Scores = Fragment<Target, float, Rows, N>;
    using Output = Fragment<Target, float, Rows, DV>;
    using Weights = Operand<Target, T, Rows, N>;
    using Softmax = OnlineSoftmax<Target, Scores, true, T>;  // a row may see its first key in any block
    using PerRow = typename Softmax::PerRow;
    using Schedule = HeadByHead;
    using Work = ListWork;

    struct Params {
      Global<Target, const T, Q> q;  ///< [tokens, heads of keys, heads of a group, D]
      Global<Target, const T, K> k;  ///< [batch, heads of keys, keys, D]
      Global<Target, const T, V> v;
      Global<Target, T> o;         ///< [tokens * heads, DV]
      Pointer<Target, float> lse;  ///< [tokens * heads], or null
      Sequences<Target> sequences;
      TileLists<Target> lists;
      int group;         ///< query heads that share a head of keys
      int heads;         ///< of queries
      float scale_log2;  ///< scale * log2(e)

      /// The row of o, or -1.
      TW_INLINE int row_of(const ListWork& w, int row) const {
        const int token = row / Group, head = row % Group;
        return token < w.count && head < group ? (w.row + token) * heads + w.head * group + head : -1;
      }
    };
    struct Slot {
      K k;
      V v;
    };
    struct Memory {
      Ring<Target, Q, 1> q;
      Ring<Target, Slot, Stages> keys;
      explicit constexpr Memory(auto& block) : q(block), keys(block) {}
    };
    struct State {
      Output out;
      Softmax softmax;
    };
    struct Locals {
      Scores scores;
      Weights weights;
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return Work::of(p, t, tokens, N); }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.steps; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      if (step == 0) {
        producer.put(memory.q, [&](auto copy, Q& q) {
          TW_NO_UNROLL
          for (int n = 0; n < tokens; ++n)  // after the last token it is repeated, and its results are dropped
            copy.part(p.q, q, n * Group, Group, 0, 0, w.head, w.row + min(n, w.count - 1));
        });
      }
      const int key0 = w.k_row + Step::of(p, w, step, N).key;
      producer.put(memory.keys, [&](auto copy, Slot& slot) {
        copy.tile(p.k, slot.k, key0, 0, w.head, w.k_batch);
        copy.tile(p.v, slot.v, key0, 0, w.head, w.k_batch);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      state.softmax.begin(block);
      block.fill(state.out, 0.0f);
      if (w.steps == 0) return;
      const TokenRange mine = TokenRange::of<Scores>(block, Group);
      const Q& q = block.take(memory.q);
      Step next = Step::of(p, w, 0, N);
      TW_NO_UNROLL
      for (int n = 0; n < w.steps; ++n) {
        const Step step = next;
        if (n + 1 < w.steps) next = Step::of(p, w, n + 1, N);  // before it is needed: it comes from memory
        Slot& slot = block.take(memory.keys);
        // Keys of another sequence follow the last one. Their values may be NaN, which weights of 0 would not hide.
        if (step.key + N > w.keys) block.zero_rows(slot.v, max(w.keys - step.key, 0));
        if (any_sees(w, step, mine)) {
          Scores scores;
          Weights weights;
          PerRow decay;
          block.mma(scores, q, slot.k, true);
          block.wait(leave<0>, scores);
          if (!all_see(w, step, mine, N)) hide<Group>(block, w, step, scores);
          if (state.softmax.add(block, p.scale_log2, scores, decay, [](auto, auto) {}))
            block.map(state.out, decay, [](auto x, auto d) { return x * d; });
          block.convert(weights, scores);
          block.mma(state.out, weights, slot.v, false);
          block.wait(leave<0>, state.out);
        }
        block.release(memory.keys);
      }
      block.release(memory.q);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      if (w.count == 0) return;
      Softmax& softmax = state.softmax;
      block.complete(softmax.sum);
      if (p.lse) {
        block.for_rows(softmax.sum, [&](int row, int i, auto&) {
          const auto lse = softmax.lse(i);
          const int to = p.row_of(w, row);
          if (to >= 0 && block.owns_rows(softmax.sum)) p.lse[to] = lse;
        });
      }
      PerRow factor;
      block.for_rows(factor, [&](int, int i, auto& x) { x = softmax.sum[i] == 0.0f ? 0.0f : reciprocal(softmax.sum[i]); });
      block.map(state.out, factor, [](auto x, auto f) { return x * f; });
      block.scatter(
          state.out, p.o, [&](int row) { return p.row_of(w, row); }, 0);
    }
  };
};

}  // namespace tw::kernels::nsa

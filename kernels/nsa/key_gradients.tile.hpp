#pragma once

#include "kernels/nsa/transposed.tile.hpp"

namespace tw::kernels::nsa {

/// Keys of a tile: the rows of its products. A block of fewer keys has empty rows.
inline constexpr int kGradientKeys = 64;

/// The gradients that a kernel computes. On the generic target, the registers do not hold the accumulators of both above 64 columns.
enum class Gradient { keys_and_values, keys, values };

/// Tokens of a block's list that a tile adds up: a part of it.
struct TokenPart {
  int m;             ///< the tile
  int head;          ///< of keys
  int first, count;  ///< in the list of tokens
  int k_batch, row;  ///< where the block's keys begin
  int key, keys;     ///< the block's first key in its sequence, and how many there are
  int q_row;         ///< the row of q of the sequence's token at position 0; it may be negative
};

/// Gradients of keys and values of attention over blocks: dV = P^T dO, dK = scale dS^T Q, see QueryGradient. A tile is a block of keys of
/// one head and up to p.part of the tokens that see it, whose heads pass by 64 at a time: none of these rows is empty where groups are of
/// Group heads. Scores are computed transposed, [keys, heads of tokens], so that weights are left operands in registers. The sums of a
/// tile are stored in f32; SumParts adds those of a block.
template <class T, int D, int DV, int Group, int Stages, Gradient kGradient>
struct KeyGradients {
  static constexpr const char* source = "kernels/nsa/key_gradients.tile.hpp";
  static constexpr int columns = 64, tokens = columns / Group;  ///< of a step
  static constexpr bool for_keys = kGradient != Gradient::values, for_values = kGradient != Gradient::keys;

  template <class Target>
  struct On {
    static constexpr int rows = kGradientKeys;
    static constexpr int min_blocks = 2;  // one warpgroup alone does not keep an SM busy
    static constexpr bool moves_registers = true;
    static constexpr int vector_bytes = 64;
    using K = Shared<Target, T, kGradientKeys, D>;
    using V = Shared<Target, T, kGradientKeys, DV>;
    using Q = Shared<Target, T, columns, D>;
    using OutputGradient = Shared<Target, T, columns, DV>;
    using OfToken = SharedVector<Target, float, 2 * Group>;
    using Scores = Fragment<Target, float, kGradientKeys, columns>;
    using Weights = Operand<Target, T, kGradientKeys, columns>;
    using Work = TokenPart;

    struct Params {
      Global<Target, const T, Q> q;                 ///< [tokens, heads of keys, heads of a group, D]
      Global<Target, const T, OutputGradient> d_o;  ///< the same, DV
      Global<Target, const T, K> k;                 ///< [batch, heads of keys, keys, D]
      Global<Target, const T, V> v;
      Global<Target, const float, OfToken> sums;  ///< [heads of keys, tokens * 2 * Group]: as QuerySums
      Global<Target, float> dk, dv;               ///< [tiles, kGradientKeys, D or DV]
      KeyBlocks<Target> blocks;
      Segments<Target> lists;             ///< of tokens, for each head and block
      Pointer<Target, const i32> listed;  ///< tokens
      int part;
      float scale_log2;
    };
    struct Keys {
      K k;
      V v;
    };
    struct Slot {
      Q q;
      OutputGradient d_o;
      OfToken sums[tokens];
    };
    struct Memory {
      Ring<Target, Keys, 1> keys;
      Ring<Target, Slot, Stages> queries;
      explicit constexpr Memory(auto& block) : keys(block), queries(block) {}
    };
    struct State {
      Fragment<Target, float, kGradientKeys, D> dk;
      Fragment<Target, float, kGradientKeys, DV> dv;
    };

    TW_INLINE static Work work(const Params& p, Tile t) {
      Work w;
      w.m = t.m;
      const auto part = p.lists.find(t.m, p.part);
      w.head = part.segment / p.blocks.count;
      w.first = part.first;
      w.count = part.empty ? 0 : min(part.end - part.first, p.part);
      const auto at = p.blocks.find(part.segment - w.head * p.blocks.count);
      w.k_batch = at.k_batch;
      w.row = at.row;
      w.key = at.key;
      w.keys = at.keys;
      const auto& sequences = p.blocks.sequences;
      w.q_row = sequences.cu_q ? max(min(static_cast<int>(sequences.cu_q[at.sequence]), sequences.queries), 0)
                               : at.sequence * sequences.queries - (sequences.length - sequences.queries);
      return w;
    }
    TW_INLINE static int steps(const Params&, const Work& w) { return ceil_div(w.count, tokens); }
    /// Token n of a step: after the last one it is repeated.
    TW_INLINE static int token(const Params& p, const Work& w, int step, int n) {
      return p.listed[w.first + min(step * tokens + n, w.count - 1)];
    }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      if (step == 0) {
        producer.put(memory.keys, [&](auto copy, Keys& keys) {
          copy.tile(p.k, keys.k, w.row, 0, w.head, w.k_batch);
          copy.tile(p.v, keys.v, w.row, 0, w.head, w.k_batch);
        });
      }
      int of[tokens];
      TW_UNROLL
      for (int n = 0; n < tokens; ++n) of[n] = token(p, w, step, n);
      producer.put(memory.queries, [&](auto copy, Slot& slot) {
        TW_UNROLL
        for (int n = 0; n < tokens; ++n) {
          copy.part(p.q, slot.q, n * Group, Group, 0, 0, w.head, of[n]);
          copy.part(p.d_o, slot.d_o, n * Group, Group, 0, 0, w.head, of[n]);
          copy.vector(p.sums, slot.sums[n], w.head, of[n] * 2 * Group);
        }
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.fill(state.dk, 0.0f);
      block.fill(state.dv, 0.0f);
      if (w.count == 0) return;
      const Keys& keys = block.take(memory.keys);
      const int steps = ceil_div(w.count, tokens);
      int next[tokens];
      TW_UNROLL
      for (int n = 0; n < tokens; ++n) next[n] = token(p, w, 0, n);
      TW_NO_UNROLL
      for (int step = 0; step < steps; ++step) {
        int visible[tokens];  // keys of the block that each token sees
        bool whole = true;
        TW_UNROLL
        for (int n = 0; n < tokens; ++n) {
          const int seen = next[n] - w.q_row + 1, span = p.blocks.sequences.span;
          visible[n] = min((span == 1 ? seen : static_cast<int>(static_cast<u32>(seen) / static_cast<u32>(span))) - w.key, w.keys);
          if (step * tokens + n >= w.count) visible[n] = 0;
          whole = whole && visible[n] >= kGradientKeys;
        }
        TW_UNROLL
        for (int n = 0; n < tokens; ++n) next[n] = token(p, w, step + 1, n);  // before they are needed: they come from memory
        const Slot& slot = block.take(memory.queries);
        Scores scores, ds;
        Weights weights, ds_weights;
        // The product of dO and V begins when the scores have become weights of 16 bits: the registers do not hold more beside the sums.
        block.mma(scores, keys.k, slot.q, true);
        block.wait(leave<0>, scores);
        weigh<0>(block, p, slot, visible, whole, scores);
        block.convert(weights, scores);
        if constexpr (for_keys) block.mma(ds, keys.v, slot.d_o, true);
        if constexpr (for_values) block.mma(state.dv, weights, view<Contract::rows>(slot.d_o), false);
        if constexpr (for_keys) {
          block.wait(leave<(for_values ? in_flight<Target> : 0)>, ds);
          block.convert(scores, weights);
          subtract_deltas<0>(block, slot, ds);
          block.map(ds, scores, [](auto x, auto weight) { return weight * x; });
          block.convert(ds_weights, ds);
          block.mma(state.dk, ds_weights, view<Contract::rows>(slot.q), false);
        }
        block.wait(leave<0>, state.dk, state.dv);
        block.fence();
        block.sync_warpgroup();
        block.release(memory.queries);
      }
      block.release(memory.keys);
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory&, State& state) {
      if (w.count == 0) return;
      if constexpr (for_keys) block.store(state.dk, p.dk, 0, 0, w.m);
      if constexpr (for_values) block.store(state.dv, p.dv, 0, 0, w.m);
    }

   private:
    /// Turns the scores of token n, and of those after it, into weights.
    template <int n>
    TW_INLINE static void weigh(auto& block, const Params& p, const Slot& slot, const int (&visible)[tokens], bool whole, Scores& scores) {
      if (!whole) {
        block.template for_columns<n * Group, Group>(scores, [&](int row, auto, auto& x) {
          if (row >= visible[n]) x = -kInfinity;
        });
      }
      block.template for_columns<n * Group, Group>(
          scores, [&](int, auto col, auto& x) { x = exp2(x * p.scale_log2 - slot.sums[n][static_cast<int>(col) - n * Group]); });
      if constexpr (n + 1 < tokens) weigh<n + 1>(block, p, slot, visible, whole, scores);
    }
    template <int n>
    TW_INLINE static void subtract_deltas(auto& block, const Slot& slot, Scores& ds) {
      block.template for_columns<n * Group, Group>(
          ds, [&](int, auto col, auto& x) { x -= slot.sums[n][Group + static_cast<int>(col) - n * Group]; });
      if constexpr (n + 1 < tokens) subtract_deltas<n + 1>(block, slot, ds);
    }
  };
};

/// Adds up the tiles of each block, in order. A tile is R keys of a block, of dK or of dV.
template <class T, int R, int C>
struct SumParts {
  static constexpr const char* source = "kernels/nsa/key_gradients.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C>;
    struct Params {
      Global<Target, const float, Values> parts;  ///< [tiles, kGradientKeys, C]
      Global<Target, T, Values> to;               ///< [batch, heads of keys, keys, C]
      KeyBlocks<Target> blocks;
      Segments<Target> lists;
      int part;
      float scale;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int head = t.m / p.blocks.count, row0 = t.n * R;
      const auto at = p.blocks.find(t.m - head * p.blocks.count);
      if (row0 >= at.keys) return;
      const auto list = p.lists.at(t.m);
      // As Segments::find() numbers them.
      const int first = list.begin / p.part + t.m, count = ceil_div(list.size, p.part);
      Values sum, part;
      block.fill(sum, 0.0f);
      TW_NO_UNROLL
      for (int n = 0; n < count; ++n) {
        block.load(part, p.parts, row0, 0, first + n);
        block.map(sum, part, [](auto all, auto x) { return all + x; });
      }
      block.map(sum, p.scale, [](auto x, auto scale) { return x * scale; });
      block.scatter(
          sum, p.to, [&](int row) { return row0 + row < at.keys ? at.row + row0 + row : -1; }, 0, head, at.k_batch);
    }
  };
};

}  // namespace tw::kernels::nsa

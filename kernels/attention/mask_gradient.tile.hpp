#pragma once

#include "kernels/attention/packed_rows.tile.hpp"
#include "tilewave/tile/attention_work.tile.hpp"
#include "tilewave/tile/dropout.tile.hpp"

namespace tw::kernels::attention {

/// The scores to which one tile of a mask is added. Where the mask has an extent of 1, they are those of all sequences, heads, queries or
/// keys. They are computed in blocks of BM queries and BN keys: sequence by sequence, then head by head.
template <AttentionConfig kConfig, class Rules>
struct MaskedScores {
  static constexpr int BM = kConfig.rows, BN = kConfig.keys;
  static constexpr bool ragged = (kConfig.form & kRagged) != 0;

  int first_row, first_col;  ///< of the tile in the mask
  int first_batch, batches;
  int first_head, heads;
  int steps;  ///< blocks of scores

  /// The rows of a sequence in the tensors, and its lengths.
  struct Sequence {
    int tensor_batch;            ///< batch index in the tensors
    int q_row, k_row, sums_row;  ///< rows at which it begins: of q and d_o; of k and v; of lse and delta
    int seqlen_q, seqlen_k, diagonal;
  };
  /// The blocks of one sequence and head: `rows` times `cols` of them, from query first_query and key first_key on.
  struct Blocks {
    int first_query, rows, first_key, cols;
    TW_INLINE int count() const { return rows * cols; }
  };
  /// One block.
  struct Block : Sequence {
    int batch, head;
    int first_query, first_key;
  };

  TW_INLINE static MaskedScores of(const auto& p, Tile t) {
    MaskedScores w;
    w.first_row = t.m * BM;
    w.first_col = t.n * BN;
    w.first_batch = t.batch / p.d_mask.size_i;
    w.first_head = t.batch - w.first_batch * p.d_mask.size_i;
    w.batches = p.d_mask.size_j == 1 ? p.batch : 1;
    w.heads = p.d_mask.size_i == 1 ? p.q.size_i : 1;
    if (is_packed(p)) {
      w.steps = 0;
      for (int n = 0; n < w.batches; ++n) w.steps += w.count_of(p, w.first_batch + n);
    } else {
      w.steps = w.batches * w.count_of(p, w.first_batch);
    }
    return w;
  }

  TW_INLINE Block block(const auto& p, int step) const {
    int batch = first_batch;
    if (is_packed(p)) {
      for (int count = count_of(p, batch); step >= count; count = count_of(p, ++batch)) step -= count;
    } else {
      const int count = steps / batches;
      batch += step / count;
      step %= count;
    }
    const Sequence s = sequence(p, batch);
    const Blocks in_head = blocks(p, s);
    const int head = step / in_head.count(), in_rows = step - head * in_head.count();
    return {s, batch, first_head + head, in_head.first_query + in_rows / in_head.cols * BM,
            in_head.first_key + in_rows % in_head.cols * BN};
  }

 private:
  /// A kernel of the CPU serves both forms.
  TW_INLINE static bool is_packed(const auto& p) {
    if constexpr (ragged) return TW_ON_GPU || p.cu_q;
    return false;
  }
  TW_INLINE static Sequence sequence(const auto& p, int batch) {
    Sequence s{batch, 0, 0, 0, p.queries, p.keys, 0};
    if (is_packed(p)) {
      s.tensor_batch = 0;
      s.q_row = p.cu_q[batch], s.k_row = p.cu_k[batch];
      s.seqlen_q = p.used_q[batch], s.seqlen_k = p.used_k[batch];
      s.sums_row = padded_begin(s.q_row, batch);
    }
    s.diagonal = p.has_diagonal ? p.diagonal : s.seqlen_k - s.seqlen_q;
    return s;
  }
  /// The blocks of a sequence in all heads.
  TW_INLINE int count_of(const auto& p, int batch) const { return heads * blocks(p, sequence(p, batch)).count(); }
  /// The blocks of the tile in which the rules leave scores visible.
  TW_INLINE Blocks blocks(const auto& p, const Sequence& s) const {
    constexpr Blocks kNone{};
    QueryRange queries{0, s.seqlen_q};
    tw::KeyRange keys{0, s.seqlen_k};
    if (p.d_mask.rows > 1) queries = queries & QueryRange{first_row, first_row + BM};
    if (p.d_mask.cols > 1) keys = keys & tw::KeyRange{first_col, first_col + BN};
    if (queries.begin >= queries.end || keys.begin >= keys.end) return kNone;
    keys = Rules::keys(p.rules, ScoreRows{0, 0, queries.begin, queries.end - 1, s.seqlen_q, s.seqlen_k, s.diagonal}, keys);
    if (keys.begin >= keys.end) return kNone;
    queries = Rules::queries(p.rules, ScoreKeys{keys.begin, keys.end - 1, s.seqlen_q, s.seqlen_k, s.diagonal}, queries);
    if (queries.begin >= queries.end) return kNone;
    const int row = queries.begin / BM, col = keys.begin / BN;
    return {row * BM, ceil_div(queries.end, BM) - row, col * BN, ceil_div(keys.end, BN) - col};
  }
};

/// Gradient of the mask that attention adds to its scores: the sum of dS = P (dP - delta) over all scores to which an element is added. The
/// mask comes last, so the derivatives of other rules do not matter. P, dP and delta: see KeyGradients.
///
/// One tile is BM queries and BN keys of the mask. The scores to which it is added pass by in blocks of its size, and one sum in registers
/// takes them all in, in the same order in every run. If the mask has one query or one key, the sum's rows or columns are added up at the
/// end.
template <class T, class Out, AttentionConfig kConfig, class Rules>
struct MaskGradient {
  static constexpr const char* source = "kernels/attention/mask_gradient.tile.hpp";
  static constexpr int D = kConfig.head_dim, DV = kConfig.value_dim, BM = kConfig.rows, BN = kConfig.keys;

  template <class Target>
  struct On {
    using Q = Shared<Target, T, BM, D>;
    using OutputGradient = Shared<Target, T, BM, DV>;
    using K = Shared<Target, T, BN, D>;
    using V = Shared<Target, T, BN, DV>;
    using OfQueries = SharedVector<Target, float, BM>;
    using Scores = Fragment<Target, float, BM, BN>;
    using PerQuery = RowVector<Target, float, Scores>;
    using PerKey = ColumnVector<Target, float, Scores>;
    using Integers = Pointer<Target, const i32>;
    /// A tile may have only one block of scores, so the next tile's arrives while this one is computed. A queue of tiles would take
    /// registers that the role that loads does not have.
    struct Schedule : RowMajor {
      static constexpr Dispatch dispatch = Dispatch::persistent;
    };
    using Work = MaskedScores<kConfig, Rules>;
    using Block = typename Work::Block;
    static constexpr int rows = BM;
    static constexpr int vector_bytes = 64;  // on a CPU the exponentials take long

    struct Params {
      Global<Target, const T, Q> q;                  ///< [batch, head, query, dim]
      Global<Target, const T, OutputGradient> d_o;   ///< the same
      Global<Target, const T, K> k;                  ///< [batch, kv head, key, dim]
      Global<Target, const T, V> v;                  ///< the same
      Global<Target, const float, OfQueries> lse;    ///< [batch, head, query]: times log2(e), +infinity if a query sees no key
      Global<Target, const float, OfQueries> delta;  ///< [batch, head, query]
      Global<Target, Out> d_mask;                    ///< [batch, head, query, key], where each extent may be 1
      float scale_log2;                              ///< of scores after the rules, times log2(e)
      int batch, queries, keys;                      ///< sequences; of a sequence
      int heads_per_kv;
      bool has_diagonal;  ///< if false, the diagonal is seqlen_k - seqlen_q
      int diagonal;
      typename Rules::template Params<Target> rules;
      DropoutParams<Target> dropout;
      Integers cu_q, cu_k, used_q, used_k;  ///< ragged: as CheckedSequences writes them
    };
    struct ScoreSlot {
      Q q;
      K k;
      OfQueries lse;
    };
    struct OutputSlot {
      OutputGradient d_o;
      V v;
      OfQueries delta;
    };
    struct Memory {
      Ring<Target, ScoreSlot, kConfig.stages> scores;
      Ring<Target, OutputSlot, kConfig.stages> outputs;
      Scratch<Target, float, BM, BN> scratch;
      explicit constexpr Memory(auto& block) : scores(block), outputs(block), scratch(block) {}
    };
    struct State {
      Scores d_mask;
    };

    TW_INLINE static Work work(const Params& p, Tile t) { return Work::of(p, t); }
    TW_INLINE static int steps(const Params&, const Work& w) { return w.steps; }

    TW_INLINE static void load(auto& producer, const Params& p, const Work& w, int step, Memory& memory) {
      const Block at = w.block(p, step);
      const int kv_head = at.head / p.heads_per_kv, query = at.q_row + at.first_query, key = at.k_row + at.first_key;
      producer.put(memory.scores, [&](auto copy, ScoreSlot& slot) {
        copy.tile(p.q, slot.q, query, 0, at.head, at.tensor_batch);
        copy.tile(p.k, slot.k, key, 0, kv_head, at.tensor_batch);
        copy.vector(p.lse, slot.lse, at.head, at.sums_row + at.first_query, at.tensor_batch);
      });
      producer.put(memory.outputs, [&](auto copy, OutputSlot& slot) {
        copy.tile(p.d_o, slot.d_o, query, 0, at.head, at.tensor_batch);
        copy.tile(p.v, slot.v, key, 0, kv_head, at.tensor_batch);
        copy.vector(p.delta, slot.delta, at.head, at.sums_row + at.first_query, at.tensor_batch);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      block.fill(state.d_mask, 0.0f);
      for (int step = 0; step < w.steps; ++step) {
        const Block at = w.block(p, step);
        ScoreSlot& of_scores = block.take(memory.scores);
        OutputSlot& of_outputs = block.take(memory.outputs);
        keep_rows(block, at.seqlen_q - at.first_query, of_scores.q, of_outputs.d_o);
        keep_rows(block, at.seqlen_k - at.first_key, of_scores.k, of_outputs.v);
        Scores weights, dp;
        PerQuery lse, delta;
        block.load(lse, of_scores.lse);
        block.load(delta, of_outputs.delta);
        block.mma(weights, of_scores.q, of_scores.k, true);
        block.mma(dp, of_outputs.d_o, of_outputs.v, true);
        block.wait(leave<1>, weights);
        block.release(memory.scores);
        apply_rules(block, p, at, weights);
        block.map(weights, lse, [&](auto x, auto l) { return exp2(x * p.scale_log2 - l); });
        block.wait(leave<0>, dp);
        block.release(memory.outputs);
        if constexpr (kConfig.dropout != Use::never) {
          if (drops(kConfig, p))
            mark_dropped(block, Dropout::of(p.dropout, at.batch * p.q.size_i + at.head), weights, at.first_query, at.first_key);
          block.map(state.d_mask, weights, dp, delta, [&](auto sum, auto weight, auto d_weight, auto d) {
            return sum + score_derivative(weight, d_weight, d, p.dropout.scale);
          });
        } else {
          block.map(state.d_mask, weights, dp, delta,
                    [](auto sum, auto weight, auto d_weight, auto d) { return sum + weight * (d_weight - d); });
        }
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, const Work& w, Memory& memory, State& state) {
      Scores& d_mask = state.d_mask;
      // Elements outside the mask are not stored, so the sums may stand in every row and column.
      if (p.d_mask.cols == 1) {
        PerQuery sums;
        block.rows(d_mask, [&](int i, auto row) { sums[i] = row.sum(); });
        block.map(d_mask, sums, [](auto, auto sum) { return sum; });
      }
      if (p.d_mask.rows == 1) {
        PerKey sums;
        block.column_sum(d_mask, sums, memory.scratch);
        block.map(d_mask, sums, [](auto, auto sum) { return sum; });
      }
      block.store(d_mask, p.d_mask, w.first_row, w.first_col, w.first_head, w.first_batch);
    }

   private:
    /// The rows after the sequence's end belong to another sequence and may be NaN, which weights of 0 would not hide.
    TW_INLINE static void keep_rows(auto& block, int left, auto&... tiles) {
      if constexpr (Work::ragged) (keep_rows_of(block, left, tiles), ...);
    }
    template <class S>
    TW_INLINE static void keep_rows_of(auto& block, int left, S& tile) {
      if (left < S::rows) block.zero_rows(tile, left);
    }
    TW_INLINE static void apply_rules(auto& block, const Params& p, const Block& w, Scores& scores) {
      const auto at = [&](int row, auto col) {
        const int query = w.first_query + row;
        return Score{w.batch,    w.head,     query,      w.first_key + col,
                     w.seqlen_q, w.seqlen_k, w.diagonal, difference(query + w.diagonal - w.first_key, col)};
      };
      const ScoreRows rows{w.batch, w.head, w.first_query, min(w.first_query + BM, w.seqlen_q) - 1, w.seqlen_q, w.seqlen_k, w.diagonal};
      const tw::KeyRange whole = Rules::untouched(p.rules, rows, {0, w.seqlen_k});
      if (whole.begin <= w.first_key && whole.end >= w.first_key + BN)
        return Rules::template apply<false, 0, BN>(block, p.rules, scores, at);
      Rules::template apply<true, 0, BN>(block, p.rules, scores, at);
      if (w.first_key + BN > w.seqlen_k) {
        block.for_each(scores, [&](int, int col, auto& x) {
          if (w.first_key + col >= w.seqlen_k) x = -kInfinity;
        });
      }
    }
  };
};

}  // namespace tw::kernels::attention

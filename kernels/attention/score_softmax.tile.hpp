#pragma once

#include "tilewave/tile/attention_rules.tile.hpp"
#include "tilewave/tile/dropout.tile.hpp"

namespace tw::kernels::attention {

/// Softmax of rows of scores in memory, in place, under the library's rules: for attention in f32 on a GPU. A block has one row, and reads
/// it C columns at a time.
template <int C>
struct ScoreSoftmax {
  static constexpr const char* source = "kernels/attention/score_softmax.tile.hpp";
  using Changes =
      Rules<Optional<Softcap, Use::runtime>, Optional<Alibi, Use::runtime>, Optional<MaskTensor, Use::runtime>, Band<true, true, true>>;

  template <class Target>
  struct On {
    using Row = Rows<Target, float, 1, C, 4, 4>;
    struct Params {
      Global<Target, const float, Row> scores;  ///< [heads, rows, keys]: products of q and k
      Global<Target, float, Row> weights;       ///< the same memory
      typename Changes::template Params<Target> rules;
      Pointer<Target, const float> sink;  ///< [heads], or null
      Pointer<Target, float> lse;         ///< of the sequence, or null
      i64 lse_stride_head;
      float scale_log2;  ///< the unit of scores times log2(e)
      int batch, heads, first_row, seqlen_q, diagonal;
      DropoutParams<Target> dropout;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int head = t.batch, query = p.first_row + t.m, keys = p.scores.cols;
      const auto& softcap = p.rules.first;
      const auto& alibi = p.rules.rest.first;
      const auto& mask = p.rules.rest.rest.first;
      const auto& band = p.rules.rest.rest.rest.first;
      Row x;
      RowVector<Target, float, Row> largest, sum;
      block.fill(largest, -3.402823466e38f);  // finite, so that a difference to -infinity is not NaN
      TW_NO_UNROLL
      for (int col0 = 0; col0 < keys; col0 += C) {
        block.load(x, p.scores, t.m, col0, head, 0, Fill{-kInfinity});
        block.for_each(x, [&](int, int col, auto& score) {
          const int key = col0 + col;
          const Score at{p.batch, head, query, key, p.seqlen_q, keys, p.diagonal, difference(query + p.diagonal, key)};
          if (softcap.used) score = tanh(score * softcap.factor);
          if (alibi.used) score = Alibi::score(alibi, at, score);
          if (mask.used) score = MaskTensor::score(mask, at, score);
          if (key >= keys || !Band<true, true, true>::visible(band, at)) score = -kInfinity;
        });
        block.rows(x, [&](int i, auto row) { largest[i] = max(largest[i], row.max()); });
        block.store(x, p.weights, t.m, col0, head);
      }
      block.fill(sum, 0.0f);
      if (p.sink) {
        const auto sink = p.sink[head] * kLog2E;
        largest[0] = max(largest[0], sink / p.scale_log2);
        sum[0] = exp2(sink - largest[0] * p.scale_log2);
      }
      TW_NO_UNROLL
      for (int col0 = 0; col0 < keys; col0 += C) {
        block.load(x, p.scores, t.m, col0, head, 0, Fill{-kInfinity});
        block.rows(x,
                   [&](int i, auto row) { sum[i] += row.map_sum([&](auto score) { return exp2((score - largest[i]) * p.scale_log2); }); });
        block.store(x, p.weights, t.m, col0, head);
      }
      const Dropout dropout = Dropout::of(p.dropout, p.batch * p.heads + head);
      RowVector<Target, float, Row> factor;
      factor[0] = sum[0] == 0.0f ? sum[0] : 1.0f / sum[0];
      TW_NO_UNROLL
      for (int col0 = 0; col0 < keys; col0 += C) {
        block.load(x, p.scores, t.m, col0, head);
        block.map(x, factor, [](auto weight, auto by) { return weight * by; });
        if (p.dropout.kept < 256) {
          block.for_each(
              x, [&](int, int col, auto& weight) { weight = dropout.dropped(query, col0 + col) ? 0.0f : weight * p.dropout.scale; });
        }
        block.store(x, p.weights, t.m, col0, head);
      }
      if (p.lse) {
        block.for_rows(sum, [&](int, int, auto& all) {
          if (block.owns_rows(sum))
            p.lse[head * p.lse_stride_head + query] = all == 0.0f ? all - kInfinity : (largest[0] * p.scale_log2 + log2(all)) * kLn2;
        });
      }
    }
  };
};

}  // namespace tw::kernels::attention

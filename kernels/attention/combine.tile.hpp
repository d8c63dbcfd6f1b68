#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::attention {

/// Combines the results of attention over splits s of a sequence's keys:
///   lse = log(sum over s of exp(lse_s)), where a sink adds exp(sink) to the sum;  o = sum over s of exp(lse_s - lse) o_s.
/// The lse that is stored may leave the sink out.
/// A tile is one row of o with up to C columns, one or a few per thread, so that the loads of all splits of a row are in flight at once.
/// `Ahead` splits are loaded together. If there are more, weights are relative to the largest lse so far.
template <class T, int C, int Ahead>
struct Combine {
  static constexpr const char* source = "kernels/attention/combine.tile.hpp";

  template <class Target>
  struct On {
    using Row = Rows<Target, float, 1, C, 4, 1>;
    struct Params {
      Global<Target, const float, Row> parts;  ///< [batch * heads * seqlen_q, splits, value_dim]
      Pointer<Target, const float>
          part_lse;                       ///< [splits, batch * heads * seqlen_q]: -infinity for a split without keys, whose o is undefined
      Global<Target, T, Row> o;           ///< [batch, seqlen_q, heads, value_dim]
      Pointer<Target, float> lse;         ///< [batch, heads, seqlen_q], or null
      Pointer<Target, const float> sink;  ///< [heads], or null
      bool sink_in_lse;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int head = t.m, query = t.n, heads = p.o.rows, seqlen_q = p.o.size_i, rows = p.parts.size_i;
      const int row = (t.batch * heads + head) * seqlen_q + query;
      Row total;
      RowVector<Target, float, Row> largest, sum;
      block.fill(total, 0.0f);
      constexpr float kLargest = 3.402823466e38f;
      block.fill(largest, -kLargest);  // finite, so that a difference to -infinity is not NaN
      block.fill(sum, 0.0f);
      TW_NO_UNROLL
      for (int first = 0; first < p.parts.rows; first += Ahead) {
        const auto part_lse = p.part_lse + (static_cast<i64>(first) * rows + row);
        Row part[Ahead];
        RowVector<Target, float, Row> weight[Ahead];
        TW_UNROLL
        for (int n = 0; n < Ahead; ++n) {
          block.fill(weight[n], -kInfinity);
          if (first + n < p.parts.rows) weight[n][0] = part_lse[n * rows];
          block.load(part[n], p.parts, first + n, 0, row);
        }
        const auto before = largest[0];
        TW_UNROLL
        for (int n = 0; n < Ahead; ++n) largest[0] = max(largest[0], weight[n][0]);
        const auto kept = exp(before - largest[0]);
        sum[0] *= kept;
        block.for_each(total, [&](int, int, auto& x) { x *= kept; });
        TW_UNROLL
        for (int n = 0; n < Ahead; ++n) {
          weight[n][0] = exp(weight[n][0] - largest[0]);
          sum[0] += weight[n][0];
          block.map(total, part[n], weight[n], [](auto x, auto y, auto w) { return w == 0.0f ? x : x + w * y; });
        }
      }
      const auto of_splits = largest[0] + log2(sum[0]) * kLn2;
      if (p.sink) {
        const auto sink = min(p.sink[head], kLargest), top = max(largest[0], sink);
        const auto kept = exp(largest[0] - top);
        block.for_each(total, [&](int, int, auto& x) { x *= kept; });
        sum[0] = sum[0] * kept + exp(sink - top);
        largest[0] = top;
      }
      block.map(total, sum, [](auto x, auto all) { return all == 0.0f ? all : x / all; });
      block.store(total, p.o, head, 0, query, t.batch);
      if (p.lse) {
        block.for_rows(sum, [&](int, int, auto& all) {
          if (block.owns_rows(sum)) p.lse[row] = p.sink_in_lse ? largest[0] + log2(all) * kLn2 : of_splits;
        });
      }
    }
  };
};

}  // namespace tw::kernels::attention

#pragma once

#include "kernels/attention/packed_rows.tile.hpp"

// What surrounds the products of attention's backward pass.

namespace tw::kernels::attention {

/// delta = rowsum(dO O), and the LSE as the kernels of the backward pass read it. If dQ is a sum over tiles of keys, it is set to 0, and so
/// are the counters of the tiles' turns. A tile is R rows of one head.
template <class T, int R, int C>
struct Delta {
  static constexpr const char* source = "kernels/attention/delta.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C>;
    struct Params {
      Global<Target, const T, Values> o, d_o;  ///< [batch, head, query, value_dim]
      Pointer<Target, const float> lse;        ///< [batch, head, query]: natural logarithms, -infinity if a query sees no key
      Pointer<Target, float> lse_log2, delta;  ///< [batch, head, padded queries]
      Global<Target, float, Values> dq_sum;    ///< [batch, head, query, dim], or without elements
      Pointer<Target, u32> turns;              ///< [batch, head, padded queries / turn_queries], or null
      int turn_queries;
      int heads, queries;
      int padded;  ///< queries after the last one get +infinity and 0, so that their weights are 0
      PaddedQueries<Target> packed;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.n / p.heads, head = t.n - batch * p.heads, row0 = t.m * R;
      int begin = 0, first = row0, size = p.queries;
      if (p.packed.sequences) {
        const auto place = p.packed.at(row0);
        begin = place.begin, first = place.first, size = place.size;
      }
      Values o, d_o;
      RowVector<Target, float, Values> sum;
      block.load(o, p.o, begin + first, 0, head, batch);
      block.load(d_o, p.d_o, begin + first, 0, head, batch);
      block.map(o, d_o, [](auto x, auto y) { return x * y; });
      block.rows(o, [&](int i, auto row) { sum[i] = row.sum(); });
      block.fill(o, 0.0f);
      block.store(o, p.dq_sum, row0, 0, head, batch);
      block.for_rows(sum, [&](int row, int, auto& x) {
        const int query = row0 + row;
        if (query >= p.padded || !block.owns_rows(sum)) return;
        const i64 to = static_cast<i64>(t.n) * p.padded + query;
        if (p.turns && query % p.turn_queries == 0) p.turns[to / p.turn_queries] = 0;
        if (first + row >= 0 && first + row < size) {
          const auto lse = p.lse[static_cast<i64>(t.n) * p.queries + begin + first + row];
          p.lse_log2[to] = lse == -kInfinity ? kInfinity : lse * kLog2E;
          p.delta[to] = x;
        } else {
          p.lse_log2[to] = kInfinity;
          p.delta[to] = 0.0f;
        }
      });
    }
  };
};

/// dQ = scale * sum, rounded, its columns in order again. A tile is R rows of the sum, of one head.
template <class T, int R, int C>
struct ScaledSum {
  static constexpr const char* source = "kernels/attention/delta.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C, 4, 8>;
    struct Params {
      Global<Target, const float, Values> sum;  ///< [batch, head, query, dim, of every 8 the even ones first]
      Global<Target, T, Values> dq;             ///< the same
      float scale;
      int heads;
      PaddedQueries<Target> packed;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int batch = t.n / p.heads, head = t.n - batch * p.heads;
      auto dq = p.dq;
      int row0 = t.m * R;
      if (p.packed.sequences) {
        const auto place = p.packed.at(row0);
        if (place.first < 0 || place.first >= place.size) return;
        row0 = place.begin + place.first;
        dq.rows = place.begin + place.size;
      }
      Values x;
      block.load(x, p.sum, t.m * R, 0, head, batch);
      block.interleave(x);
      block.map_store(
          x, dq, row0, 0, head, batch, [](auto sum, auto scale) { return sum * scale; }, p.scale);
    }
  };
};

/// Gradient of a head's sink: minus the sum over batch and queries of the sink's weight, exp(sink - lse), times delta. A tile is one head,
/// C queries at a time, so the order of the sum is always the same.
template <int C>
struct SinkGradient {
  static constexpr const char* source = "kernels/attention/delta.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, 1, C, 4, 4>;
    struct Params {
      Global<Target, const float, Values> lse_log2, delta;  ///< [batch, head, padded queries]
      Pointer<Target, const float> sink;                    ///< [head]
      Pointer<Target, float> d_sink;                        ///< [head]
      int batches;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const auto sink = p.sink[t.m] * kLog2E;
      Values total, lse, delta;
      block.fill(total, 0.0f);
      for (int batch = 0; batch < p.batches; ++batch) {
        TW_NO_UNROLL
        for (int query0 = 0; query0 < p.delta.cols; query0 += C) {
          block.load(lse, p.lse_log2, t.m, query0, batch, 0, Fill{kInfinity});
          block.load(delta, p.delta, t.m, query0, batch);
          block.map(total, lse, delta, [&](auto sum, auto l, auto d) { return sum - exp2(sink - l) * d; });
        }
      }
      RowVector<Target, float, Values> sum;
      block.rows(total, [&](int i, auto row) { sum[i] = row.sum(); });
      block.for_rows(sum, [&](int, int, auto& x) {
        if (block.owns_rows(sum)) p.d_sink[t.m] = x;
      });
    }
  };
};

}  // namespace tw::kernels::attention

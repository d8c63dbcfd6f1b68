#pragma once

#include "kernels/topk/row.tile.hpp"

namespace tw::kernels::topk {

/// The largest element of each row: every thread finds the largest key of its columns, and the block the largest of these.
template <class T, class Index, Stage stage, int Warps>
struct Argmax {
  static constexpr const char* source = "kernels/topk/argmax.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    static constexpr int C = Warps * 32 * 8;
    using ThisRow = Row<Target, T, Index, stage>;
    using In = typename ThisRow::In;
    using Params = typename ThisRow::Params;

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const ThisRow row(p, t);
      const auto columns = row.columns();
      Rows<Target, In, 1, C, Warps> x;
      Rows<Target, u64, 1, C, Warps> best;
      block.fill(best, 0);
      for (int col = columns.begin; col < columns.end; col += C) {
        row.load(block, x, col);
        block.for_each(x, best, [&](int, int c, auto& value, u64& b) {
          if (col + c < columns.end) b = max(b, row.key(to<In>(value), col + c));
        });
      }
      block.rows(best, [&](int, auto keys) {
        const u64 key = keys.max();
        block.parallel(1, [&](int) {
          if constexpr (stage == Stage::part)
            row.put_candidate(t.n, 0, key);
          else
            row.put(0, key);
        });
      });
    }
  };
};

}  // namespace tw::kernels::topk

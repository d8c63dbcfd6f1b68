#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::test {

/// counts[row] += the number of columns in which a and b differ, bit by bit.
struct Differences {
  static constexpr const char* source = "tests/differences.tile.hpp";
  template <class Target>
  struct On {
    using Words = Rows<Target, i32, 4, 256>;
    struct Params {
      Global<Target, const i32> a, b;
      Global<Target, float> counts;  ///< [rows, 1]
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Words a, b;
      RowVector<Target, float, Words> counts;
      block.load(a, p.a, t.m * 4, 0);
      block.load(b, p.b, t.m * 4, 0);
      block.load(counts, p.counts, t.m * 4, 0);
      block.for_each(a, b, [](int, int, auto& x, auto& y) { x = x != y; });
      block.rows(a, [&](int i, auto row) { counts[i] = counts[i] + static_cast<float>(row.sum()); });
      block.store(counts, p.counts, t.m * 4, 0);
    }
  };
};

}  // namespace tw::test

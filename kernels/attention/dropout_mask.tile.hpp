#pragma once

#include "tilewave/tile/dropout.tile.hpp"

namespace tw::kernels::attention {

/// mask = 1 for each weight that is kept, 0 for each that is dropped. A tile is C keys of one query.
template <int C>
struct DropoutMask {
  static constexpr const char* source = "kernels/attention/dropout_mask.tile.hpp";

  template <class Target>
  struct On {
    using Keys = Rows<Target, float, 1, C>;
    struct Params {
      DropoutParams<Target> dropout;
      Pointer<Target, u8> mask;  ///< [batch * head, query, key]
      int queries, keys;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const Dropout dropout = Dropout::of(p.dropout, t.batch);
      const i64 row = static_cast<i64>(t.batch) * p.queries + t.m;
      Keys none;
      block.for_each(none, [&](int, int col, auto&) {
        const int key = t.n * C + col;
        if (key < p.keys) p.mask[row * p.keys + key] = dropout.dropped(t.m, key) ? 0 : 1;
      });
    }
  };
};

}  // namespace tw::kernels::attention

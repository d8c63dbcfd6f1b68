#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw::kernels::embedding {

/// y[t, :] = scale * table[ids[t], :]. A tile is a piece of one row: a block reads the id, then the piece, with two 16-byte loads per
/// thread.
template <class T, class Out>
struct Embedding {
  static constexpr const char* source = "kernels/embedding/embedding.tile.hpp";
  static constexpr int width = 16 / static_cast<int>(sizeof(T) > sizeof(Out) ? sizeof(T) : sizeof(Out));
  static constexpr int cols = 2 * 128 * width;

  template <class Target>
  struct On {
    using Piece = Rows<Target, float, 1, cols, 4, width>;
    struct Params {
      Global<Target, const T, Piece> table;
      Global<Target, Out, Piece> y;
      Pointer<Target, const i32> ids;  ///< null if they are 64-bit: in long_ids
      Pointer<Target, const i64> long_ids;
      float scale;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const i64 id = p.ids ? i64{p.ids[t.m]} : i64{p.long_ids[t.m]};
      const int row = id < 0 ? 0 : id < p.table.rows ? static_cast<int>(id) : p.table.rows - 1;
      Piece x;
      block.load(x, p.table, row, t.n * cols);
      block.map(x, p.scale, [](auto value, float scale) { return value * scale; });
      block.store(x, p.y, t.m, t.n * cols);
    }
  };
};

}  // namespace tw::kernels::embedding

#pragma once

#include "kernels/cast_fp8/cast_fp8.tile.hpp"

// Casts of queries, keys and values for attention in fp8_e4m3: one scale for each sequence and key head, and, if asked for, a rotation of
// each row before the cast. A row is in the registers of one warp, so that the rotation takes no memory.

namespace tw::kernels::cast_fp8 {

/// x becomes (x * signs) H / sqrt(n): H is the Walsh-Hadamard matrix of order n, the length of a row.
template <class Target>
struct Rotation {
  bool used;
  Global<Target, const float> signs;  ///< [1, n], or absent
  float norm;                         ///< 1 / sqrt(n)

  /// A row of n elements, a power of two, is followed by zeros in a tile of more columns: the first n columns of its product with a larger
  /// Walsh-Hadamard matrix are those of the product with H.
  template <class Values>
  TW_INLINE void apply(auto& block, Values& x) const {
    if (!used) return;
    if (signs.cols > 0) {
      ColumnVector<Target, float, Values> by_column;
      block.load(by_column, signs, 0, 0);
      block.map(x, by_column, [](auto v, auto sign) { return v * sign; });
    }
    block.template row_hadamard<Values::cols>(x);
    block.map(x, norm, [](auto v, auto factor) { return v * factor; });
  }
};
/// For kernels that never rotate.
template <class Target>
struct NoRotation {
  TW_INLINE void apply(auto&, auto&) const {}
};

/// 1024 threads per SM, with 64 registers each, so that some load while others compute. Rows of more than 256 columns need more registers
/// for signs.
constexpr int blocks_of_heads(int cols) { return cols > 1024 ? 2 : cols > 256 ? 4 : 8; }

/// y = e4m3(x / scale). A tile is R rows of one head.
template <class In, bool kRotates, int R, int C, int Warps, int Width>
struct PerHead {
  static constexpr const char* source = "kernels/cast_fp8/heads.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps, min_blocks = blocks_of_heads(C);
    using Values = Rows<Target, float, R, C, Warps, Width>;
    struct Params {
      Global<Target, const In, Values> x;  ///< [batch, head, row, dim]
      Global<Target, fp8_e4m3, Values> y;  ///< the same
      Global<Target, const float> scales;  ///< [batch, key head]
      int heads_per_scale;
      conditional<kRotates, Rotation<Target>, NoRotation<Target>> rotation;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, head = t.n, batch = t.batch;
      Values x;
      block.load(x, p.x, row0, 0, head, batch);
      p.rotation.apply(block, x);
      const float scale = block.value(p.scales, batch, head / p.heads_per_scale);
      const float reciprocal = 1.0f / scale;
      block.map(x, scale, reciprocal, divide);
      block.store(x, p.y, row0, 0, head, batch);
    }
  };
};

/// The largest magnitude of rows: the first kernel of head_scales(). A tile is `kPasses` times R rows of one head, and gives R maxima.
template <class In, bool kRotates, int R, int C, int Warps, int Width>
struct HeadMaxima {
  static constexpr const char* source = "kernels/cast_fp8/heads.tile.hpp";
  static constexpr int kPasses = 8;

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    /// In pieces of four columns a thread has more rows, and with them more maxima.
    static constexpr int min_blocks = blocks_of_heads(C) / (Width == 4 ? 2 : 1);
    using Values = Rows<Target, float, R, C, Warps, Width>;
    struct Params {
      Global<Target, const In, Values> x;  ///< [batch, head, row, dim]
      Global<Target, float> maxima;        ///< [batch, head, tiles * R]
      conditional<kRotates, Rotation<Target>, NoRotation<Target>> rotation;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * kPasses * R, head = t.n, batch = t.batch;
      RowVector<Target, u32, Values> most;
      for (int r = 0; r < most.size; ++r) most[r] = 0;
      TW_NO_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        Values x;
        block.load(x, p.x, row0 + pass * R, 0, head, batch);
        p.rotation.apply(block, x);
        block.rows(x, [&](int r, auto row) { most[r] = max(most[r], row.max(magnitude)); });
      }
      const bool owner = block.owns_rows(most);
      block.for_rows(most, [&](int row, int, u32& value) {
        if (owner) *p.maxima.template at<float>(head, t.m * R + row, batch, 0) = bit_cast<float>(value);
      });
    }
  };
};

/// The second kernel: a head's scale from its maxima, C of them at a time.
template <int C>
struct HeadScales {
  static constexpr const char* source = "kernels/cast_fp8/heads.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, 1, C, 4, 4>;
    struct Params {
      Global<Target, const float, Values> maxima;  ///< [batch, key head, maxima of its heads]
      Global<Target, float> scales;                ///< [batch, key head]
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int head = t.m, batch = t.n;
      u32 most = 0;
      TW_NO_UNROLL
      for (int col0 = 0; col0 < p.maxima.cols; col0 += C) {
        Values x;
        block.load(x, p.maxima, head, col0, batch);
        block.rows(x, [&](int, auto row) { most = max(most, row.max(magnitude)); });
      }
      block.parallel(1, [&](int) { *p.scales.template at<float>(batch, head, 0, 0) = scale_of(most, false); });
    }
  };
};

}  // namespace tw::kernels::cast_fp8

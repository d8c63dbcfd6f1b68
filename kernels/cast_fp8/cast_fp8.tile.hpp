#pragma once

#include "tilewave/tile/language.tile.hpp"

// Casts to fp8_e4m3 with scales. A tile is R rows of one group of 128 columns; a warp has one or two rows, so that the
// maxima need no shared memory.

namespace tw::kernels::cast_fp8 {

inline constexpr int kGroup = 128;
inline constexpr float kLargest = 448;  ///< of e4m3

/// |x| as an integer with the same order, where NaN is greater than all numbers.
TW_INLINE u32 magnitude(float x) { return bit_cast<u32>(x) & 0x7fffffffu; }

/// x / scale, correctly rounded, from 1 / scale: one step of Newton's method on the product (Markstein), at a fifth of a division's cost.
TW_INLINE float divide(float x, float scale, float reciprocal) {
  const float quotient = x * reciprocal;
  return fma(fma(-quotient, scale, x), reciprocal, quotient);
}

/// The scale for the largest magnitude(); NaN if that is infinity or NaN.
TW_INLINE float scale_of(u32 largest, bool power_of_two) {
  if (largest >= 0x7f800000u) return bit_cast<float>(0x7fc00000u);
  const float scale = divide(max(bit_cast<float>(largest), 1e-4f), kLargest, 1.0f / kLargest);
  return power_of_two ? static_cast<float>(e8m0(scale)) : scale;
}

template <class Target, class In, class Values>
struct Tensors {
  Global<Target, const In, Values> x;
  Global<Target, fp8_e4m3, Values> y;
  Global<Target, float> scales;
  bool power_of_two;
};

/// Divides each row of one group by its scale.
template <class Target, class Values>
TW_INLINE void scale_rows(auto& block, Values& x, RowVector<Target, float, Values>& scale, bool power_of_two) {
  RowVector<Target, float, Values> reciprocal;
  block.rows(x, [&](int r, auto row) {
    scale[r] = scale_of(row.max(magnitude), power_of_two);
    reciprocal[r] = 1.0f / scale[r];
  });
  block.map(x, scale, reciprocal, divide);
}

/// Stores what scale_rows() made.
template <class Target, class Values>
TW_INLINE void store_rows(auto& block, const auto& p, Values& x, RowVector<Target, float, Values>& scale, int row0, int group, int i,
                          int j) {
  block.store(x, p.y, row0, group * kGroup, i, j);
  const bool owner = block.owns_rows(scale);
  block.for_rows(scale, [&](int row, int, float& s) {
    if (owner && row0 + row < p.scales.rows) *p.scales.template at<float>(row0 + row, group, i, j) = s;
  });
}

template <class Target, class Values>
TW_INLINE void cast_rows(auto& block, const auto& p, Values& x, int row0, int group, int i, int j) {
  RowVector<Target, float, Values> scale;
  scale_rows<Target>(block, x, scale, p.power_of_two);
  store_rows<Target>(block, p, x, scale, row0, group, i, j);
}

/// A scale for each group of 128 in a row.
template <class In, int R>
struct PerToken {
  static constexpr const char* source = "kernels/cast_fp8/cast_fp8.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, kGroup, 4, 16 / static_cast<int>(sizeof(In))>;
    using Params = Tensors<Target, In, Values>;

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i;
      Values x;
      block.load(x, p.x, row0, t.n * kGroup, i, j);
      cast_rows<Target>(block, p, x, row0, t.n, i, j);
    }
  };
};

/// The same of silu(gate) up.
template <class In, int R>
struct GatedPerToken {
  static constexpr const char* source = "kernels/cast_fp8/cast_fp8.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, kGroup, 4, 16 / static_cast<int>(sizeof(In))>;
    struct Params {
      Global<Target, const In, Values> gate, up;
      Global<Target, fp8_e4m3, Values> y;
      Global<Target, float> scales;
      bool power_of_two;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, j = p.y.size_j == 1 ? 0 : t.batch / p.y.size_i, i = t.batch - j * p.y.size_i;
      Values gate, up;
      block.load(gate, p.gate, row0, t.n * kGroup, i, j);
      block.load(up, p.up, row0, t.n * kGroup, i, j);
      block.map(gate, up, [](auto g, auto u) { return Silu::apply(g) * u; });
      cast_rows<Target>(block, p, gate, row0, t.n, i, j);
    }
  };
};

/// PerToken for groups of rows, concatenated in x and padded in y.
template <class In, int R>
struct Grouped {
  static constexpr const char* source = "kernels/cast_fp8/cast_fp8.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, kGroup, 4, 16 / static_cast<int>(sizeof(In))>;
    struct Params : Tensors<Target, In, Values> {
      const i32* sizes;
      i64 size_stride;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, group = t.batch;
      i64 begin = 0;
      for (int g = 0; g < group; ++g) begin += max(p.sizes[g * p.size_stride], 0);
      const i64 end = begin + max(p.sizes[group * p.size_stride], 0);
      auto x = p.x;  // ends with the group, so that later rows read as 0
      if (end < x.rows) x.rows = static_cast<int>(end);
      const i64 first = begin + row0 < x.rows ? begin + row0 : x.rows;
      Values values;
      block.load(values, x, static_cast<int>(first), t.n * kGroup);
      cast_rows<Target>(block, p, values, row0, t.n, group, 0);
    }
  };
};

/// The largest magnitude of each row's group, amax[group, row]: the first kernel of the cast by blocks.
template <class In, int R>
struct RowMaxima {
  static constexpr const char* source = "kernels/cast_fp8/cast_fp8.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, kGroup, 4, 4>;
    struct Params {
      Global<Target, const In, Values> x;
      Global<Target, float> amax;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R;
      Values x;
      block.load(x, p.x, row0, t.n * kGroup);
      RowVector<Target, u32, Values> amax;
      block.rows(x, [&](int r, auto row) { amax[r] = row.max(magnitude); });
      const bool owner = block.owns_rows(amax);
      block.for_rows(amax, [&](int row, int, u32& value) {
        if (owner && row0 + row < p.amax.cols) *p.amax.template at<float>(t.n, row0 + row, 0, 0) = bit_cast<float>(value);
      });
    }
  };
};

/// The second kernel: every tile computes the maximum over its block's 128 rows.
template <class In, int R>
struct PerBlock {
  static constexpr const char* source = "kernels/cast_fp8/cast_fp8.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, kGroup, 4, 4>;
    using Maxima = Rows<Target, float, 4, kGroup, 4, 4>;
    struct Params : Tensors<Target, In, Values> {
      Global<Target, const float, Maxima> amax;  ///< [group, 4, row] with stride 0 in the middle, so that each warp has its own row
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, block_row = row0 / kGroup;
      Values x;
      Maxima maxima;
      block.load(maxima, p.amax, 0, block_row * kGroup, t.n);
      block.load(x, p.x, row0, t.n * kGroup);
      u32 amax = 0;
      block.rows(maxima, [&](int, auto row) { amax = row.max(magnitude); });
      const float scale = scale_of(amax, p.power_of_two);
      const float reciprocal = 1.0f / scale;
      block.map(x, scale, reciprocal, divide);
      block.store(x, p.y, row0, t.n * kGroup);
      if (row0 % kGroup != 0) return;
      RowVector<Target, float, Maxima> owners;
      const bool owner = block.owns_rows(owners);
      block.for_rows(owners, [&](int row, int, float&) {
        if (owner && row == 0) *p.scales.template at<float>(block_row, t.n, 0, 0) = scale;
      });
    }
  };
};

}  // namespace tw::kernels::cast_fp8

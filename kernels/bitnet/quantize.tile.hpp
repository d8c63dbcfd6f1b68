#pragma once

#include "tilewave/tile/language.tile.hpp"

// BitNet's quantisers, and the conversions around products of integers. tilewave/bitnet.hpp has the formulas.

namespace tw::kernels::bitnet {

/// |x| as an integer with the same order, where NaN is greater than all numbers.
TW_INLINE u32 magnitude(float x) { return bit_cast<u32>(x) & 0x7fffffffu; }

/// Rows of x as 8-bit integers. A row of up to C columns stays in registers. Longer ones are read twice, the second time from their end,
/// which the cache still has.
template <class In, int R, int C, int Warps, int Width>
struct QuantizeActivations {
  static constexpr const char* source = "kernels/bitnet/quantize.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using Values = Rows<Target, float, R, C, Warps, Width>;
    struct Params {
      Global<Target, const In, Values> x;
      Global<Target, i8, Values> values;
      Global<Target, float> scales;  ///< [M, 1]
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, pieces = ceil_div(p.x.cols, C);
      Values x;
      RowVector<Target, u32, Values> largest;
      RowVector<Target, float, Values> factor;
      block.for_rows(largest, [](int, int, u32& value) { value = 0; });
      for (int piece = 0; piece < pieces; ++piece) {
        block.load(x, p.x, row0, piece * C);
        block.rows(x, [&](int r, auto row) { largest[r] = max(largest[r], row.max(magnitude)); });
      }
      const bool owner = block.owns_rows(factor);
      block.for_rows(factor, [&](int row, int r, float& f) {
        const bool finite = largest[r] < 0x7f800000u;
        const float a = max(bit_cast<float>(largest[r]), 1e-5f);
        f = finite ? 127.0f / a : bit_cast<float>(0x7fc00000u);  // of NaN the integers are 0
        if (owner && row0 + row < p.x.rows) *p.scales.template at<float>(row0 + row, 0, 0, 0) = finite ? a / 127.0f : f;
      });
      for (int piece = pieces - 1; piece >= 0; --piece) {
        if (piece < pieces - 1) block.load(x, p.x, row0, piece * C);
        block.map(x, factor, [](auto v, auto f) { return v * f; });
        block.store(x, p.values, row0, piece * C);
      }
    }
  };
};

/// The sum of |w| over C columns of each row: sums [rows, pieces of C columns].
template <class In, int R, int C, int Width>
struct AbsoluteSums {
  static constexpr const char* source = "kernels/bitnet/quantize.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C, 4, Width>;
    struct Params {
      Global<Target, const In, Values> w;
      Global<Target, float> sums;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R;
      Values w;
      block.load(w, p.w, row0, t.n * C);
      RowVector<Target, float, Values> sum;
      block.rows(w, [&](int r, auto row) { sum[r] = row.sum([](auto v) { return v < 0.0f ? -v : v; }); });
      const bool owner = block.owns_rows(sum);
      block.for_rows(sum, [&](int row, int, float& value) {
        if (owner && row0 + row < p.sums.rows) *p.sums.template at<float>(row0 + row, t.n, 0, 0) = value;
      });
    }
  };
};

/// A weight as 2-bit codes, for the sum of its magnitudes. Columns are those of bytes. The first columns' blocks write the rows' scales.
template <class In, int R, int C>
struct QuantizeTernary {
  static constexpr const char* source = "kernels/bitnet/quantize.tile.hpp";

  template <class Target>
  struct On {
    using Bytes = Rows<Target, float, R, C, 4, 4>;
    struct Params {
      Global<Target, const In> w;
      Global<Target, const float> sum;  ///< [1, 1]
      Global<Target, u8, Bytes> values;
      Global<Target, float> scales;  ///< [N, 1]
      float per_element;             ///< 1 / (N K)
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C;
      const auto mean = *p.sum.template at<const float>(0, 0, 0, 0) * p.per_element;
      const auto scale = max(mean, 1e-5f) + mean * 0.0f;  // NaN for what is not finite
      Bytes bytes;
      block.for_each(bytes, [&](int row, int col, auto& byte) {
        byte = 0.0f;
        if (row0 + row >= p.values.rows || col0 + col >= p.values.cols) return;
        int codes = 0;
        TW_UNROLL
        for (int i = 0; i < 4; ++i) {
          const auto w = static_cast<float>(*p.w.template at<const In>(row0 + row, (col0 + col) * 4 + i, 0, 0));
          codes |= (min(max(to<i32>(w / scale), -1), 1) + 2) << 2 * i;
        }
        byte = static_cast<float>(codes);
      });
      block.store(bytes, p.values, row0, col0);
      if (t.n > 0) return;
      RowVector<Target, float, Bytes> owners;
      const bool owner = block.owns_rows(owners);
      block.for_rows(owners, [&](int row, int, float&) {
        if (owner && row0 + row < p.scales.rows) *p.scales.template at<float>(row0 + row, 0, 0, 0) = scale;
      });
    }
  };
};

/// out(n, k) = code(n, k) - 2.
template <int R, int C>
struct UnpackTernary {
  static constexpr const char* source = "kernels/bitnet/quantize.tile.hpp";

  template <class Target>
  struct On {
    using Values = Rows<Target, float, R, C, 4, 8>;
    struct Params {
      Global<Target, const u8> values;
      Global<Target, i8, Values> out;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C;
      Values x;
      block.for_each(x, [&](int row, int col, auto& value) {
        value = 0.0f;
        if (row0 + row >= p.out.rows || col0 + col >= p.out.cols) return;
        value = value_of_code<u2x4>(*p.values.template at<const u8>(row0 + row, (col0 + col) / 4, 0, 0), (col0 + col) % 4) - 2.0f;
      });
      block.store(x, p.out, row0, col0);
    }
  };
};

/// y = sums(m, n) x_scales(m) scales(n) + bias(n), or y += this, for integer sums that f32 holds exactly, or for sums that are scaled
/// already, of f32. An absent scale is 1.
template <class Sum, class T, int R, int C, int Width>
struct ScaleSums {
  static constexpr const char* source = "kernels/bitnet/quantize.tile.hpp";

  template <class Target>
  struct On {
    using X = Rows<Target, float, R, C, 4, Width>;
    struct Params {
      Global<Target, const Sum, X> sums;
      Global<Target, const float> x_scales;   ///< [M, 1], or absent
      Global<Target, const float, X> scales;  ///< [1, N], or absent
      Global<Target, const T, X> bias;        ///< [1, N], or absent
      Global<Target, const T, X> added;       ///< y, or absent
      Global<Target, T, X> y;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, col0 = t.n * C;
      X x;
      RowVector<Target, float, X> x_scales;
      ColumnVector<Target, float, X> scales, bias;
      block.load(x, p.sums, row0, col0);
      block.load(x_scales, p.x_scales, row0, 0, 0, 0, Fill{1});
      block.load(scales, p.scales, 0, col0, 0, 0, Fill{1});
      block.load(bias, p.bias, 0, col0);
      block.map(x, x_scales, scales, bias, [](auto sum, auto of_row, auto of_column, auto b) { return sum * of_row * of_column + b; });
      if (p.added.rows > 0) {
        X added;
        block.load(added, p.added, row0, col0);
        block.map(x, added, [](auto a, auto b) { return a + b; });
      }
      block.store(x, p.y, row0, col0);
    }
  };
};

}  // namespace tw::kernels::bitnet

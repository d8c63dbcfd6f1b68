#pragma once

#include "kernels/cast_fp8/cast_fp8.tile.hpp"
#include "tilewave/tile/language.tile.hpp"

// From tokens to the rows of their experts, and back. A tile is a piece of one token's row: 16 bytes for each of 128 threads.

namespace tw::kernels::moe {

template <class T>
inline constexpr int kPieceWidth = 16 / static_cast<int>(sizeof(T));

/// out(places(t, n)) = x(t). A token is read once, for all its experts.
template <class T>
struct Dispatch {
  static constexpr const char* source = "kernels/moe/move.tile.hpp";
  static constexpr int cols = 128 * kPieceWidth<T>;

  template <class Target>
  struct On {
    using Piece = Rows<Target, float, 1, cols, 4, kPieceWidth<T>>;
    struct Params {
      Global<Target, const T, Piece> x;  ///< [tokens, H]
      Global<Target, T, Piece> out;      ///< [rows, H]
      Global<Target, const i32> places;  ///< [tokens, k]
    };

    static void compute(auto& block, const Params& p, Tile t) {
      Piece x;
      block.load(x, p.x, t.m, t.n * cols);
      for (int n = 0; n < p.places.cols; ++n) {
        const int row = *p.places.template at<const i32>(t.m, n, 0, 0);
        if (row >= 0 && row < p.out.rows) block.store(x, p.out, row, t.n * cols);
      }
    }
  };
};

/// Dispatch of tokens cast to fp8_e4m3, with a scale for each group of 128 elements. The groups of a token are the rows of its tiles.
template <class T>
struct DispatchFp8 {
  static constexpr const char* source = "kernels/moe/move.tile.hpp";
  static constexpr int groups = 8;

  template <class Target>
  struct On {
    using Values = Rows<Target, float, groups, cast_fp8::kGroup, 4, kPieceWidth<T>>;
    struct Params {
      Global<Target, const T, Values> x;   ///< [tokens, H / 128, 128]
      Global<Target, fp8_e4m3, Values> y;  ///< [rows, H / 128, 128]
      Global<Target, float> scales;        ///< [rows, H / 128, 1]
      Global<Target, const i32> places;    ///< [tokens, k]
      bool power_of_two;
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * groups;
      Values x;
      RowVector<Target, float, Values> scale;
      block.load(x, p.x, row0, 0, t.batch);
      cast_fp8::scale_rows<Target>(block, x, scale, p.power_of_two);
      for (int n = 0; n < p.places.cols; ++n) {
        const int row = *p.places.template at<const i32>(t.batch, n, 0, 0);
        if (row >= 0 && row < p.y.size_i) cast_fp8::store_rows<Target>(block, p, x, scale, row0, 0, row, 0);
      }
    }
  };
};

/// out(t) = addend(t) + the sum over n of weights(t, n) y(places(t, n)), in ascending order of n, in f32.
template <class T>
struct Combine {
  static constexpr const char* source = "kernels/moe/move.tile.hpp";
  static constexpr int cols = 128 * kPieceWidth<T>;
  static constexpr int batch = 8;  ///< rows that are loaded before the first is added, so that all are on their way at once

  template <class Target>
  struct On {
    using Piece = Rows<Target, float, 1, cols, 4, kPieceWidth<T>>;
    struct Params {
      Global<Target, const T, Piece> y;       ///< [rows, H]
      Global<Target, const T, Piece> addend;  ///< [tokens, H], or absent
      Global<Target, T, Piece> out;           ///< [tokens, H]
      Global<Target, const i32> places;       ///< [tokens, k]
      Global<Target, const float> weights;    ///< [tokens, k]
    };

    static void compute(auto& block, const Params& p, Tile t) {
      const int col0 = t.n * cols;
      Piece sum;
      block.load(sum, p.addend, t.m, col0);  // zeros if there is none
      for (int first = 0; first < p.places.cols; first += batch) {
        Piece y[batch];
        float weight[batch];
        TW_UNROLL
        for (int n = 0; n < batch; ++n) {
          int row = -1;
          if (first + n < p.places.cols) row = *p.places.template at<const i32>(t.m, first + n, 0, 0);
          const bool inside = row >= 0 && row < p.y.rows;
          block.load(y[n], p.y, inside ? row : -1, col0);  // zeros outside
          weight[n] = inside ? block.value(p.weights, t.m, first + n) : 0.0f;
        }
        TW_UNROLL
        for (int n = 0; n < batch; ++n) block.map(sum, y[n], weight[n], [](auto s, auto v, auto w) { return s + w * v; });
      }
      block.store(sum, p.out, t.m, col0);
    }
  };
};

}  // namespace tw::kernels::moe

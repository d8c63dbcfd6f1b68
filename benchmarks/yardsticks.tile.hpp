#pragma once

#include "tilewave/tile/language.tile.hpp"

// What a device can do at best, as kernels: yardsticks.hpp measures with them.

namespace tw::bench {

inline constexpr const char* kYardstickKernels = "benchmarks/yardsticks.tile.hpp";

/// Tiles such that the loads in flight of the blocks that a multiprocessor has registers for, 48 KB and more, cover the memory's latency.
inline constexpr int kYardstickCols = 512;
inline constexpr int kCopyRows = 8;
inline constexpr int kReadRows = 8;

/// Does nothing: what is left is the launch.
struct Empty {
  static constexpr const char* source = kYardstickKernels;
  template <class Target>
  struct On {
    struct Params {};
    TW_INLINE static void compute(auto&, const Params&, Tile) {}
  };
};

/// to = from, both [rows, C] of f32.
template <int R, int C>
struct Copy {
  static constexpr const char* source = kYardstickKernels;
  template <class Target>
  struct On {
    using X = Rows<Target, float, R, C, 4, 4>;
    struct Params {
      Global<Target, const float, X> from;
      Global<Target, float, X> to;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      X x;
      block.load(x, p.from, t.m * R, 0);
      block.store(x, p.to, t.m * R, 0);
    }
  };
};

/// sums[row] = the sum of a row of `from`, [rows, C] of f32: reads everything and writes next to nothing.
template <int R, int C>
struct Read {
  static constexpr const char* source = kYardstickKernels;
  template <class Target>
  struct On {
    using X = Rows<Target, float, R, C, 4, 4>;
    struct Params {
      Global<Target, const float, X> from;
      float* sums;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      X x;
      RowVector<Target, float, X> sum;
      block.load(x, p.from, t.m * R, 0);
      block.rows(x, [&](int i, auto row) { sum[i] = row.sum(); });
      block.for_rows(sum, [&](int row, int, float& value) {
        if (t.m * R + row < p.from.rows && block.owns_rows(sum)) p.sums[t.m * R + row] = value;
      });
    }
  };
};

}  // namespace tw::bench

#pragma once

#include "kernels/dequant_gemm/formats.tile.hpp"
#include "kernels/dequant_gemm/groups.tile.hpp"
#include "tilewave/tile/gemm.tile.hpp"

// Products of up to 16 rows with a weight in 8, 4 or 2 bits, whose time is that of reading the weight once.

namespace tw::kernels::dequant_gemm {

/// Tiles in order. `Banded` would divide three times before a tile's first load, which such short tiles feel.
struct InOrder {
  static constexpr Dispatch dispatch = Dispatch::persistent;
  TW_INLINE static constexpr Tile at(const TileGrid&, int i) { return {i, 0, 0}; }
};
/// All tiles of W for some rows of x, then those for the next rows.
struct WeightByWeight {
  static constexpr Dispatch dispatch = Dispatch::persistent;
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) { return {i % grid.m, i / grid.m, 0}; }
};

template <class Format>
struct ScaleOfGroups {
  using Type = f16;  ///< of none
};
template <class Format>
requires requires { typename Format::Scale; }
struct ScaleOfGroups<Format> {
  using Type = typename Format::Scale;
};

template <class Format>
inline constexpr int group_of = 0;
template <class Format>
requires requires { Format::group; }
inline constexpr int group_of<Format> = Format::group;

/// y = x W^T for up to N rows of x: tiles of y have R columns, for which R rows of W arrive through a ring as they are stored. The block's
/// warps divide K among them, so that R can be small, and decode the codes on their way to the tensor cores. x and the scales of groups
/// come from the cache, two steps at a time. `Blocks` fit on an SM: while one waits for x or stores its results another computes, and the
/// next launch fills its rings. `Weights` says whether groups of rows have weights of their own. There is no epilogue then.
///
/// N = 1: one row of x and a format with groups. The scales arrive in the ring with W, and x in one of its own, as loads from the cache
/// would take longer than multiplying so few codes.
template <class Format, class T, class Epilogue, int R, int N, int Stages, int Warps, int Blocks, class Weights = OneWeight>
struct SkinnyDequantGemm {
  static constexpr const char* source = "kernels/dequant_gemm/skinny.tile.hpp";
  using Codes = typename Format::Codes;
  static constexpr int depth = 128 * Warps;  ///< columns of a slot; of a warp: four groups of 32, or one of 128
  static constexpr bool by_group = requires { Format::group; };
  static constexpr bool one = N == 1;
  static constexpr int sum_rows = max(N, 8);
  static_assert(!one || (by_group && !Weights::grouped), "one row of x is for formats with groups, and one weight");

  template <class Target>
  struct On : Weights::Kernel {
    using TileWork = typename Weights::Work;
    static constexpr int warps = Warps, min_blocks = Blocks;
    using Schedule = conditional<Weights::grouped, WeightByWeight, InOrder>;
    using GroupScale = typename ScaleOfGroups<Format>::Type;
    using W = Shared<Target, Codes, R, depth / codes_in<Codes>>;
    using Scales = SharedStrip<Target, GroupScale, R>;
    using PartOfX = SharedVector<Target, T, 256>;
    struct WithScales {
      W w;
      Scales scales[depth / max(group_of<Format>, 1) * sizeof(GroupScale) / 16];
    };
    using Slot = conditional<one, WithScales, W>;
    struct Row {
      PartOfX x[depth / PartOfX::size];
    };
    using Sums = DividedSums<Target, R, sum_rows, Warps>;
    using X = DividedOperand<Target, T, sum_rows, depth, Warps>;
    static constexpr int threads = 32 * Warps, least_width = Epilogue::pairs ? 2 : 1;
    static constexpr int out_rows = max(sum_rows, threads* least_width / R);
    using Out = Rows<Target, float, out_rows, R, Warps, out_rows * R / threads>;  // a piece for each thread
    using End = typename Epilogue::template On<Target, Out>;

    /// A tensor that is copied to slots of the ring, or loaded from the cache.
    template <class E, class Part>
    using Source = conditional<one, Global<Target, const E, Part>, Global<Target, const E>>;
    struct Params {
      struct In {
        Source<T, PartOfX> x;                ///< [M, K]
        Global<Target, const Codes, W> w;    ///< [N, K], or [N, K / 2] or [N, K / 4] with two or four codes in a byte
        Global<Target, const float> scales;  ///< of rows: [1, N]
        Source<GroupScale, Scales> group_scales;
        Global<Target, const u8> zeros;
        int depth;  ///< K
        typename Weights::template Params<Target> groups;
      } in;
      typename End::Params epilogue;
      bool constant_weight;  ///< W was complete when the previous launch began
    };
    struct Nothing {
      explicit constexpr Nothing(auto&) {}
    };
    struct Memory {
      Ring<Target, Slot, Stages> w;
      conditional<one, Ring<Target, Row, Stages>, Nothing> x;
      Scratch<Target, float, 16 * Warps, R * sum_rows> sums;
      explicit constexpr Memory(auto& block) : w(block), x(block), sums(block) {}
    };
    struct State {
      Sums sums;
      ColumnVector<Target, float, Out> scales;  ///< of rows
    };

    /// What a step multiplies its slot with.
    template <class F, bool>
    struct Step {
      X x;
      DividedScales<Target, R, depth, F, Warps> scales;
      TW_INLINE void load(auto& block, const typename Params::In& in, const RowsOfTile& w, int step) {
        block.load(x, in.x, w.x_row, step * depth);
        block.load(scales, in.group_scales, in.zeros, w.w_row, step * depth);
      }
      TW_INLINE void add_to(auto& block, Sums& sums, const Slot& slot) const { block.add_products(sums, slot, x, scales); }
    };
    template <class F>
    struct Step<F, false> {
      X x;
      TW_INLINE void load(auto& block, const typename Params::In& in, const RowsOfTile& w, int step) {
        block.load(x, in.x, w.x_row, step * depth);
      }
      TW_INLINE void add_to(auto& block, Sums& sums, const Slot& slot) const { block.add_products(sums, slot, x); }
    };

    TW_INLINE static bool loads_early(const Params& p) { return p.constant_weight; }
    TW_INLINE static TileWork work(const Params& p, Tile t) { return p.in.groups.template at<R, N>(t); }
    TW_INLINE static int steps(const Params& p, const TileWork& t) {
      return Weights::template rows<R, N>(t).group < 0 ? 0 : ceil_div(p.in.depth, depth);
    }
    TW_INLINE static void load(auto& producer, const Params& p, const TileWork& t, int step, Memory& memory) {
      const RowsOfTile w = Weights::template rows<R, N>(t);
      if (step == 0) {  // the threads that compute load them from the cache
        if constexpr (by_group) {
          if constexpr (!one) producer.prefetch(p.in.group_scales, w.w_row, 0, R, p.in.group_scales.cols);
          producer.prefetch(p.in.zeros, w.w_row, 0, R, p.in.zeros.cols);
        } else {
          producer.prefetch(p.in.scales, 0, w.w_row, 1, R);
        }
      }
      producer.put(memory.w, [&](auto copy, Slot& slot) {
        if constexpr (one) {
          copy.tile(p.in.w, slot.w, w.w_row, step * W::cols);
          int col = step * depth / Format::group;
          for (Scales& part : slot.scales) {
            copy.tile(p.in.group_scales, part, w.w_row, col);
            col += Scales::cols;
          }
        } else {
          copy.tile(p.in.w, slot, w.w_row, step * W::cols);
        }
      });
      if constexpr (one) {
        // x is the previous launch's result: its first steps follow when W has filled the ring.
        const int full = min(steps(p, t), Stages) - 1;
        if (step < full) return;
        for (int of = step == full ? 0 : step; of <= step; ++of) load_row(producer, p, of, memory);
      }
    }
    TW_INLINE static void load_row(auto& producer, const Params& p, int step, Memory& memory) {
      producer.wait_for_previous_launch();
      producer.put(memory.x, [&](auto copy, Row& row) {
        int col = step * depth;
        for (PartOfX& part : row.x) {
          copy.vector(p.in.x, part, 0, col);
          col += PartOfX::size;
        }
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const TileWork& t, Memory& memory, State& state) {
      const RowsOfTile w = Weights::template rows<R, N>(t);
      block.fill(state.sums, 0.0f);
      if constexpr (!by_group) block.load(state.scales, p.in.scales, 0, w.w_row);
      const int n = steps(p, t);
      if constexpr (one) {
        for (int step = 0; step < n; ++step) {
          X x;
          DividedScales<Target, R, depth, Format, Warps> scales;
          const Slot& slot = block.take(memory.w);
          block.load(scales, slot.scales, p.in.zeros, w.w_row, step * depth);
          block.load(x, block.take(memory.x).x);
          block.add_products(state.sums, slot.w, x, scales);
          block.release(memory.w);
          block.release(memory.x);
        }
      } else {
        multiply_pairs(block, p, w, n, memory, state);
      }
    }
    TW_INLINE static void multiply_pairs(auto& block, const Params& p, const RowsOfTile& w, int n, Memory& memory, State& state) {
      // Two steps are loaded together: a wait for one load also waits for every later one, so that loading the next step between them
      // would make each step wait for the cache.
      Step<Format, by_group> even, odd;
      const auto multiply = [&](const auto& operands) {
        operands.add_to(block, state.sums, block.take(memory.w));
        block.release(memory.w);
      };
      for (int step = 0; step < n; step += 2) {
        even.load(block, p.in, w, step);
        odd.load(block, p.in, w, step + 1);
        multiply(even);
        if (step + 1 < n) multiply(odd);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, const TileWork& t, Memory& memory, State& state) {
      const RowsOfTile w = Weights::template rows<R, N>(t);
      if (w.group < 0) return;
      Out out;
      block.complete(state.sums, out, memory.sums);
      if constexpr (!by_group) block.map(out, state.scales, [](auto sum, auto scale) { return sum * scale; });
      if constexpr (Weights::grouped) {
        auto y = p.epilogue.d;
        y.rows = min(y.rows, min(w.x_end, w.x_row + N));
        block.store(out, y, w.x_row, w.row);
      } else {
        NoMemory none(block);
        End::apply(block, out, p.epilogue, none, Place{0, w.row, 0});
      }
    }
  };
};

}  // namespace tw::kernels::dequant_gemm

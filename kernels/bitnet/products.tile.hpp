#pragma once

#include "tilewave/tile/epilogue.tile.hpp"
#include "tilewave/tile/gemm.tile.hpp"
#include "tilewave/tile/packed.tile.hpp"

// Products of 8-bit integers with a weight of 2-bit codes. Sums are those of integers, and each fits an f32.

namespace tw::kernels::bitnet {

/// Tiles in order. `Banded` would divide three times before a tile's first load, which such short tiles feel.
struct InOrder {
  static constexpr Dispatch dispatch = Dispatch::persistent;
  TW_INLINE static constexpr Tile at(const TileGrid&, int i) { return {i, 0, 0}; }
};

/// Up to N rows of x, whose time is that of reading the weight once: tiles of y have R columns, for which R rows of W arrive through a ring
/// as they are stored. The block's warps divide K among them, and put codes into bytes on their way to the tensor cores. x comes from the
/// cache, two steps at a time. `Blocks` fit on an SM.
template <class Epilogue, int R, int N, int Stages, int Warps, int Blocks>
struct SkinnyTernaryGemm {
  static constexpr const char* source = "kernels/bitnet/products.tile.hpp";
  static constexpr int depth = 256 * Warps;  ///< columns of a slot

  template <class Target>
  struct On {
    static constexpr int warps = Warps, min_blocks = Blocks;
    using Schedule = InOrder;
    using Slot = Shared<Target, u2x4, R, depth / 4>;
    using Sums = DividedSums<Target, R, N, Warps>;
    using X = DividedOperand<Target, i8, N, depth, Warps>;
    static constexpr int threads = 32 * Warps, out_rows = N * R < threads ? threads / R : N;
    using Out = Rows<Target, float, out_rows, R, Warps, out_rows * R / threads>;  // a piece for each thread
    using End = typename Epilogue::template On<Target, Out>;

    struct Params {
      struct In {
        Global<Target, const i8> x;            ///< [M, K]
        Global<Target, const u2x4, Slot> w;    ///< [N, K / 4]
        Global<Target, const float> x_scales;  ///< [M, 1]
        Global<Target, const float> scales;    ///< [1, N]
        int depth;                             ///< K
      } in;
      typename End::Params epilogue;
      bool constant_weight;  ///< W was complete when the previous launch began
    };
    struct Memory {
      Ring<Target, Slot, Stages> w;
      Scratch<Target, float, 16 * Warps, R * N> sums;
      explicit constexpr Memory(auto& block) : w(block), sums(block) {}
    };
    struct State {
      Sums sums;
      ColumnVector<Target, float, Out> scales;
    };

    TW_INLINE static bool loads_early(const Params& p) { return p.constant_weight; }
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.in.depth, depth); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      if (step == 0) producer.prefetch(p.in.scales, 0, t.m * R, 1, R);  // the threads that compute load them from the cache
      producer.put(memory.w, [&](auto copy, Slot& slot) { copy.tile(p.in.w, slot, t.m * R, step * Slot::cols); });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      block.fill(state.sums, 0.0f);
      block.load(state.scales, p.in.scales, 0, t.m * R);
      const int n = steps(p, t);
      // Two steps are loaded together: a wait for one load also waits for every later one, so that loading the next step between them
      // would make each step wait for the cache.
      X even, odd;
      const auto multiply = [&](const X& x) {
        block.add_products(state.sums, block.take(memory.w), x);
        block.release(memory.w);
      };
      for (int step = 0; step < n; step += 2) {
        block.load(even, p.in.x, 0, step * depth);
        block.load(odd, p.in.x, 0, (step + 1) * depth);
        multiply(even);
        if (step + 1 < n) multiply(odd);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      Out out;
      RowVector<Target, float, Out> x_scales;
      block.complete(state.sums, out, memory.sums);
      block.load(x_scales, p.in.x_scales, 0, 0);
      block.map(out, x_scales, state.scales, [](auto sum, auto of_row, auto of_column) { return sum * of_row * of_column; });
      NoMemory none(block);
      End::apply(block, out, p.epilogue, none, Place{0, t.m * R, t.n});
    }
  };
};

/// BW rows of W times BX rows of x. W arrives in slots of 512 columns, x in slots of 128: 128 bytes of a row each. Tiles are processed in
/// bands of `Band` rows of W.
template <int BW, int BX, int WStages, int XStages, int Band>
struct TernaryTiles {
  static constexpr int bw = BW, bx = BX, w_stages = WStages, x_stages = XStages, band = Band;
};

/// y^T = W x^T: only the left operand of a product may come from registers, so W is the left one. While the tensor cores multiply 128
/// columns, the warps decode the next 128.
template <class T, class Tiles>
struct TernaryGemm {
  static constexpr const char* source = "kernels/bitnet/products.tile.hpp";
  static constexpr int BW = Tiles::bw, BX = Tiles::bx, BK = 128;
  static constexpr int slot_codes = 512, slot_pieces = slot_codes / BK, chunk = 2 * BK, chunks = slot_codes / chunk;
  /// Results of 128 x 128 are transposed in shared memory, and x has two tiles if there are more.
  static constexpr int part_rows = BX > 128 ? 128 : BX, parts = BX / part_rows;
  static constexpr bool staged = BX >= 128 && sizeof(T) == 2;
  static_assert(!staged || (BW == 128 && part_rows == 128), "results are transposed in squares of the kernel's rows");

  template <class Target>
  struct On {
    static constexpr int rows = BW;
    using Schedule = Banded<Tiles::band>;
    using W = Shared<Target, u2x4, BW, slot_codes / 4>;
    using X = Shared<Target, i8, part_rows, BK>;
    using Acc = Fragment<Target, i32, BW, part_rows>;
    using Result = Fragment<Target, float, BW, part_rows>;
    using Out = Staging<Target, T, 128, 128>;
    using Piece = Operand<Target, i8, BW, BK>;

    struct Params {
      Global<Target, const u2x4, W> w;       ///< [N, K / 4]
      Global<Target, const i8, X> x;         ///< [M, K]
      Global<Target, const float> scales;    ///< [N, 1]
      Global<Target, const float> x_scales;  ///< [1, M]
      Global<Target, const T> bias;          ///< [N, 1], or absent
      Global<Target, T, Out> y;              ///< [M, N]
      Global<Target, T> y_transposed;        ///< the same memory, [N, M]: for tiles that are not transposed here
      int depth;                             ///< K
    };

    struct XSlot {
      X part[parts];
    };
    struct Transposed {
      Buffer<Target, T, 128, 128> buffer;
      Out out;
      explicit constexpr Transposed(auto& block) : buffer(block), out(block) {}
    };
    struct Memory {
      Ring<Target, W, Tiles::w_stages> w;
      Ring<Target, XSlot, Tiles::x_stages> x;
      conditional<staged, Transposed, NoMemory> transposed;
      explicit constexpr Memory(auto& block) : w(block), x(block), transposed(block) {}
    };
    struct State {
      Acc acc[parts];
    };

    TW_INLINE static int slots(const Params& p) { return ceil_div(p.depth, slot_codes); }
    /// A step is a piece of x.
    TW_INLINE static int steps(const Params& p, Tile) { return slots(p) * slot_pieces; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      const int slot = step / slot_pieces;
      if (step % slot_pieces == 0) producer.put(memory.w, [&](auto copy, W& w) { copy.tile(p.w, w, t.m * BW, slot * W::cols); });
      producer.put(memory.x, [&](auto copy, XSlot& x) {
        TW_UNROLL
        for (int n = 0; n < parts; ++n) copy.tile(p.x, x.part[n], t.n * BX + n * part_rows, step * BK);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile, Memory& memory, State& state) {
      Piece even, odd;
      const int n = slots(p) * chunks;
      const auto multiply = [&](const Piece& piece, bool overwrite) {
        const XSlot& x = block.take(memory.x);
        TW_UNROLL
        for (int h = 0; h < parts; ++h) block.mma(state.acc[h], piece, x.part[h], overwrite);
      };
      const auto finish_previous = [&] {
        if constexpr (parts == 1)
          block.wait(leave<in_flight<Target> * parts>, state.acc[0]);
        else
          block.wait(leave<in_flight<Target> * parts>, state.acc[0], state.acc[1]);
        block.release(memory.x);
      };
      // Not unrolled over a slot's chunks: the assembler would serialise the products.
      const W* w = nullptr;
      for (int c = 0; c < n; ++c) {
        const int in_slot = c % chunks * chunk;
        if (in_slot == 0) w = &block.take(memory.w);
        block.load(even, *w, Unscaled{}, CentredTimes64{}, in_slot);  // while the product before goes on
        multiply(even, c == 0);
        if (c > 0) finish_previous();
        block.load(odd, *w, Unscaled{}, CentredTimes64{}, in_slot + BK);
        if ((c + 1) % chunks == 0) block.release(memory.w);
        multiply(odd, false);
        finish_previous();
      }
      if constexpr (parts == 1)
        block.wait(leave<0>, state.acc[0]);
      else
        block.wait(leave<0>, state.acc[0], state.acc[1]);
      block.release(memory.x);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      const int row0 = t.m * BW;
      TW_UNROLL
      for (int h = 0; h < parts; ++h) {
        const int col0 = t.n * BX + h * part_rows;
        Result result;
        // A 64th of the sums is exact: their last bits are 0. The scales of columns are loaded one by one: a ColumnVector, and those of
        // rows from before the loop, would spill.
        block.for_each(result, state.acc[h], [](int, int, auto& x, auto& sum) { x = static_cast<float>(sum) * 0x1p-6f; });
        block.for_each(result, [&](int, int col, auto& x) {
          x = x * *p.x_scales.template at<const float>(0, min(col0 + col, p.x_scales.cols - 1), 0, 0);
        });
        RowVector<Target, float, Result> scales, bias;
        block.load(scales, p.scales, row0, 0);
        block.load(bias, p.bias, row0, 0);
        block.map(result, scales, bias, [](auto x, auto of_row, auto b) { return x * of_row + b; });
        if constexpr (staged) {
          auto& through = memory.transposed;
          block.store_transposed(result, through.buffer);
          block.sync();
          block.load(result, through.buffer);
          block.sync();
          block.store(result, through.out, p.y, col0, row0);
        } else {
          block.store(result, p.y_transposed, row0, col0);
        }
      }
    }
  };
};

}  // namespace tw::kernels::bitnet

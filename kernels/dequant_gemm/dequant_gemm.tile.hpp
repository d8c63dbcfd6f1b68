#pragma once

#include "kernels/dequant_gemm/formats.tile.hpp"
#include "kernels/dequant_gemm/groups.tile.hpp"
#include "tilewave/tile/epilogue.tile.hpp"

// Products of many rows with a weight in fewer bits, which is decoded on its way to the tensor cores.

namespace tw::kernels::dequant_gemm {

/// BW rows of W times BX rows of x. W arrives in slots of 128 bytes of each row, x in slots of 64 columns. Tiles are processed in bands of
/// `Band` rows of W.
template <int BW, int BX, int WStages, int XStages, int Band>
struct DequantTiles {
  static constexpr int bw = BW, bx = BX, w_stages = WStages, x_stages = XStages, band = Band;
};

/// to(n, m) = acc(2 n, m), from row `row0` / 2 and column `col0` on: one of each two rows that map_row_pairs() made equal.
template <class T>
TW_INLINE void store_row_pairs(auto& block, auto& acc, const auto& to, int row0, int col0) {
  block.for_each(acc, [&](int row, int col, auto& x) {
    if (row % 2 == 0 && row0 + row < 2 * to.rows && col0 + col < to.cols)
      *to.template at<T>((row0 + row) / 2, col0 + col, 0, 0) = tw::to<T>(x);
  });
}

/// y^T = W x^T: only the left operand of a product may come from registers, so W is the left one. While the tensor cores multiply 64
/// columns, the warps decode the next 64. With `kSplitK` the grid's batch counts splits of K, possibly one, whose sums a second kernel adds
/// up (SumTransposed); it can also add to y. Otherwise bias and `Activation` are applied here. SwiGlu makes a column of y from rows 2 n and
/// 2 n + 1 of W. `Weights` says whether groups of rows have weights of their own. There is no bias then.
template <class Format, class T, class Activation, class Tiles, bool kSplitK, class Weights = OneWeight>
struct DequantGemm {
  static constexpr const char* source = "kernels/dequant_gemm/dequant_gemm.tile.hpp";
  using Codes = typename Format::Codes;
  static constexpr int BW = Tiles::bw, BX = Tiles::bx, BK = 64;
  static constexpr int slot_codes = 128 * codes_in<Codes>;  ///< columns of a slot of W
  static constexpr int slot_pieces = slot_codes / BK;
  /// Two pieces share a load of their groups' scales.
  static constexpr int chunk = 2 * BK, chunks = slot_codes / chunk;
  /// Results of 128 x 128 are transposed in shared memory, and x has two tiles if there are more.
  static constexpr int part_rows = BX > 128 ? 128 : BX, parts = BX / part_rows;
  static constexpr bool staged = !kSplitK && BX >= 128;
  static_assert(!staged || (BW == 128 && part_rows == 128), "results are transposed in squares of the kernel's rows");
  static constexpr bool by_group = requires { Format::group; };
  static constexpr bool pairs = is_same<Activation, SwiGlu>;

  template <class Target>
  struct On : Weights::Kernel {
    using TileWork = typename Weights::Work;
    static constexpr int rows = BW;
    using Schedule = Banded<Tiles::band>;
    using W = Shared<Target, Codes, BW, 128>;
    using X = Shared<Target, T, part_rows, BK>;
    using Acc = Fragment<Target, float, BW, part_rows>;
    using Vector = RowVector<Target, float, Acc>;
    using Out = Staging<Target, T, 128, pairs ? 64 : 128>;
    using Piece = Operand<Target, T, BW, BK>;

    template <class F, bool>
    struct ScaleOf {
      using Type = typename F::Scale;
    };
    template <class F>
    struct ScaleOf<F, false> {
      using Type = float;
    };
    struct Params {
      Global<Target, const Codes, W> w;                                       ///< [N, K], or with two codes in a byte [N, K / 2], and so on
      Global<Target, const T, X> x;                                           ///< [M, K]
      Global<Target, const typename ScaleOf<Format, by_group>::Type> scales;  ///< of groups [N, K / group], of rows [N, 1]
      Global<Target, const u8> zeros;                                         ///< without elements if symmetric
      Global<Target, const T> bias;                                           ///< [N, 1]
      Global<Target, T, Out> y;                                               ///< [M, N], or [M, N / 2] of pairs
      Global<Target, T> y_transposed;                                         ///< the same memory, [N, M]: for tiles with few rows of x
      Global<Target, float> partial;                                          ///< [splits, N, M]
      int depth;                                                              ///< K
      int splits;
      bool has_bias;
      typename Weights::template Params<Target> groups;
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

    /// The scales and zero points of a chunk's groups.
    template <class F, bool>
    struct ChunkScales {
      static constexpr int group = F::group, groups = chunk / group > 0 ? chunk / group : 1;
      Vector scales[groups], zeros[F::zeros ? groups : 1];

      /// `row`, `col`: the chunk's first of W.
      TW_INLINE void load(auto& block, const Params& p, int row, int col) {
        TW_UNROLL
        for (int g = 0; g < groups; ++g) {
          block.load(scales[g], p.scales, row, col / group + g);
          if constexpr (F::zeros) block.load(zeros[g], p.zeros, row, col / group + g);
        }
      }
      TW_INLINE auto in_registers(int i, int g) const {
        const auto scale = scales[g % groups][i];
        if constexpr (is_same<typename F::template Decode<T>, FromZero>) {
          auto zero = scale;
          if constexpr (F::zeros)
            zero = zeros[g % groups][i];
          else
            zero = F::middle;
          return ScaleAndZero<decltype(zero)>{scale, zero};
        } else {
          return scale;
        }
      }
      TW_INLINE void decode(auto& block, Piece& to, const W& w, int first_code) const {
        block.load(to, w, *this, typename F::template Decode<T>{}, first_code);
      }
    };
    template <class F>
    struct ChunkScales<F, false> {
      TW_INLINE void load(auto&, const Params&, int, int) {}
      TW_INLINE void decode(auto& block, Piece& to, const W& w, int first_code) const {
        block.load(to, w, Unscaled{}, AsStored{}, first_code);
      }
    };

    TW_INLINE static int all_slots(const Params& p) { return ceil_div(p.depth, slot_codes); }
    TW_INLINE static int split_slots(const Params& p) { return ceil_div(all_slots(p), p.splits); }
    TW_INLINE static int first_slot(const Params& p, const RowsOfTile& w) { return kSplitK ? w.split * split_slots(p) : 0; }
    /// Slots of W of a split; the last split may have fewer.
    TW_INLINE static int slots(const Params& p, const RowsOfTile& w) {
      return kSplitK ? min(split_slots(p), all_slots(p) - first_slot(p, w)) : all_slots(p);
    }

    TW_INLINE static TileWork work(const Params& p, Tile t) { return p.groups.template at<BW, BX>(t); }
    /// A step is a piece of x.
    TW_INLINE static int steps(const Params& p, const TileWork& t) {
      const RowsOfTile w = Weights::template rows<BW, BX>(t);
      return w.group < 0 ? 0 : slots(p, w) * slot_pieces;
    }
    TW_INLINE static void load(auto& producer, const Params& p, const TileWork& t, int step, Memory& memory) {
      const RowsOfTile w = Weights::template rows<BW, BX>(t);
      const int slot = first_slot(p, w) + step / slot_pieces, piece = step % slot_pieces;
      if (piece == 0) producer.put(memory.w, [&](auto copy, W& codes) { copy.tile(p.w, codes, w.w_row, slot * 128); });
      producer.put(memory.x, [&](auto copy, XSlot& x) {
        TW_UNROLL
        for (int n = 0; n < parts; ++n) copy.tile(p.x, x.part[n], w.x_row + n * part_rows, slot * slot_codes + piece * BK);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, const TileWork& t, Memory& memory, State& state) {
      const RowsOfTile w = Weights::template rows<BW, BX>(t);
      if (w.group < 0) {
        for (Acc& acc : state.acc) block.fill(acc, 0.0f);
        return;
      }
      Piece even, odd;
      ChunkScales<Format, by_group> next;
      const int n = slots(p, w) * chunks, first = first_slot(p, w) * slot_codes;
      next.load(block, p, w.w_row, first);
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
      const W* codes = nullptr;
      for (int c = 0; c < n; ++c) {
        const int in_slot = c % chunks * chunk;
        if (in_slot == 0) codes = &block.take(memory.w);
        const ChunkScales<Format, by_group> scales = next;
        next.load(block, p, w.w_row, first + (c + 1) * chunk);
        scales.decode(block, even, *codes, in_slot);  // while the product before goes on
        multiply(even, c == 0);
        if (c > 0) finish_previous();
        scales.decode(block, odd, *codes, in_slot + BK);
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
    TW_INLINE static void finish(auto& block, const Params& p, const TileWork& t, Memory& memory, State& state) {
      const RowsOfTile w = Weights::template rows<BW, BX>(t);
      if (w.group < 0) return;
      Vector scales, bias;
      block.fill(scales, 1.0f);
      block.fill(bias, 0.0f);
      if constexpr (!by_group) block.load(scales, p.scales, w.w_row, 0);
      if (!kSplitK && p.has_bias) block.load(bias, p.bias, w.row, 0);
      TW_UNROLL
      for (int h = 0; h < parts; ++h) {
        Acc& acc = state.acc[h];
        const int x_row = w.x_row + h * part_rows;
        block.map(acc, scales, bias, [](auto sum, auto scale, auto b) {
          auto x = sum;
          if constexpr (!by_group) x = x * scale;
          if constexpr (kSplitK)
            return x;
          else if constexpr (pairs)
            return x + b;
          else
            return Activation::apply(x + b);
        });
        if constexpr (pairs) block.map_row_pairs(acc, [](auto gate, auto up) { return SwiGlu::apply(gate, up); });
        if constexpr (kSplitK) {
          block.store(acc, p.partial, w.row, x_row, w.split);
        } else if constexpr (staged) {
          auto& through = memory.transposed;
          block.store_transposed(acc, through.buffer);
          block.sync();
          block.load(acc, through.buffer);
          block.sync();
          if constexpr (pairs) {
            Fragment<Target, float, 128, 64> half;
            block.pairs(half, acc, [](auto first, auto) { return first; });
            block.store(half, through.out, p.y, x_row, w.row / 2, 0, 0, w.x_end);
          } else {
            block.store(acc, through.out, p.y, x_row, w.row, 0, 0, w.x_end);
          }
        } else {
          auto y = p.y_transposed;
          if constexpr (Weights::grouped) y.cols = min(y.cols, w.x_end);
          if constexpr (pairs)
            store_row_pairs<T>(block, acc, y, w.row, x_row);
          else
            block.store(acc, y, w.row, x_row);
        }
      }
    }
  };
};

/// Adds up the sums over splits of K, in order, transposes them and applies the epilogue.
template <class Epilogue>
struct SumTransposed {
  static constexpr const char* source = "kernels/dequant_gemm/dequant_gemm.tile.hpp";
  static constexpr int side = 32;  ///< of a tile, which 128 threads transpose

  template <class Target>
  struct On {
    using X = Rows<Target, float, side, side, 4, Epilogue::pairs ? 2 : 1>;
    using End = typename Epilogue::template On<Target, X>;
    struct Params {
      Global<Target, const float, X> partial;  ///< [splits, N, M]
      typename End::Params epilogue;
      int splits;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * side, col0 = t.n * side;
      X sum, x;
      block.load(sum, p.partial, row0, col0);
      for (int split = 1; split < p.splits; ++split) {
        block.load(x, p.partial, row0, col0, split);
        block.map(sum, x, [](auto s, auto y) { return s + y; });
      }
      block.transpose(sum, x);
      NoMemory none(block);
      End::apply(block, x, p.epilogue, none, Place{col0, row0, 0});
    }
  };
};

}  // namespace tw::kernels::dequant_gemm

#pragma once

#include "kernels/dequant_gemm/dequant_gemm.tile.hpp"

// Products of 8-bit integers with a weight in 4-bit integers (W4A8), which is decoded to 8-bit integers on its way to the tensor cores.

namespace tw::kernels::dequant_gemm {

/// y^T = W x^T, as in DequantGemm, where W(n, k) = scales(n, g) (code(n, k) - zero(n, g)) in groups of 128 and rows of x have a scale each.
/// There are two levels of accumulation. The tensor cores multiply integers, whose sums over a group are exact. The warps scale these and
/// add them up in f32 while the tensor cores multiply the next 64 rows of x or the next group. Without `Zeros` zero points are 8.
template <bool Zeros, class T, class Activation, class Tiles, bool kSplitK>
struct W4A8Gemm {
  static constexpr const char* source = "kernels/dequant_gemm/w4a8.tile.hpp";
  static constexpr int BW = Tiles::bw, BX = Tiles::bx, group = 128;
  static constexpr int slot_codes = 256, slot_groups = slot_codes / group;
  static constexpr int part_rows = min(BX, 64), parts = BX / part_rows;
  static_assert(BX % part_rows == 0, "rows of x are multiplied in parts of 64");
  static constexpr bool pairs = is_same<Activation, SwiGlu>;
  /// Results are transposed in shared memory, in squares of 64 x 64.
  static constexpr bool staged = !kSplitK && !pairs && part_rows == 64;

  template <class Target>
  struct On {
    static constexpr int rows = BW;
    using Schedule = Banded<Tiles::band>;
    using W = Shared<Target, u4x2, BW, slot_codes / 2>;
    using X = Shared<Target, i8, part_rows, group>;
    using Products = Fragment<Target, i32, BW, part_rows>;
    using Acc = Fragment<Target, float, BW, part_rows>;
    using Vector = RowVector<Target, float, Acc>;
    using Piece = Operand<Target, i8, BW, group>;
    using Out = Staging<Target, T, BW, 64>;

    struct Params {
      Global<Target, const u4x2, W> w;        ///< [N, K / 2]
      Global<Target, const i8, X> x;          ///< [M, K]
      Global<Target, const f16> scales;       ///< [N, K / 128]
      Global<Target, const u8> zeros;         ///< likewise, or without elements
      Pointer<Target, const float> x_scales;  ///< [M]
      Global<Target, const T> bias;           ///< [N, 1]
      Global<Target, T, Out> y;               ///< [M, N]
      Global<Target, T> y_transposed;         ///< the same memory, [N, M], or of pairs [N / 2, M]: for results that are not transposed here
      Global<Target, float> partial;          ///< [splits, N, M]
      int depth;                              ///< K
      int splits;
      int last_row;  ///< M - 1
      bool has_bias;
    };

    struct XSlot {
      X part[parts];
    };
    struct Transposed {
      Out staging;
      explicit constexpr Transposed(auto& block) : staging(block) {}
    };
    struct Memory {
      Ring<Target, W, Tiles::w_stages> w;
      Ring<Target, XSlot, Tiles::x_stages> x;
      conditional<staged, Transposed, NoMemory> out;
      explicit constexpr Memory(auto& block) : w(block), x(block), out(block) {}
    };
    struct State {
      Acc acc[parts];
    };

    /// Scales of a slot's groups, whose first is `first`. They come from the cache of the SM: a line holds those of many slots.
    TW_INLINE static void load_scales(auto& block, const Params& p, Tile t, int first, Vector* scales) {
      TW_UNROLL
      for (int g = 0; g < slot_groups; ++g) {
        block.load(scales[g], p.scales, t.m * BW, first + g);
        if constexpr (!Zeros) block.for_rows(scales[g], [](int, int, auto& x) { x = x * 0.0625f; });  // codes are decoded times 16
      }
    }
    TW_INLINE static void load_zeros(auto& block, const Params& p, Tile t, int first, Vector* zeros) {
      TW_UNROLL
      for (int g = 0; g < slot_groups; ++g)
        if constexpr (Zeros) block.load(zeros[g], p.zeros, t.m * BW, first + g);
    }
    TW_INLINE static void decode(auto& block, Piece& to, const W& w, const Vector* zeros, int g) {
      if constexpr (Zeros)
        block.load(to, w, zeros[g], LessZero{}, g * group);
      else
        block.load(to, w, Unscaled{}, CentredTimes16{}, g * group);
    }

    TW_INLINE static int all_slots(const Params& p) { return ceil_div(p.depth, slot_codes); }
    TW_INLINE static int split_slots(const Params& p) { return ceil_div(all_slots(p), p.splits); }
    TW_INLINE static int first_slot(const Params& p, Tile t) { return kSplitK ? t.batch * split_slots(p) : 0; }
    /// Slots of W of a split; the last split may have fewer.
    TW_INLINE static int slots(const Params& p, Tile t) {
      return kSplitK ? min(split_slots(p), all_slots(p) - first_slot(p, t)) : all_slots(p);
    }

    /// A step is a group.
    TW_INLINE static int steps(const Params& p, Tile t) { return slots(p, t) * slot_groups; }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      const int slot = first_slot(p, t) + step / slot_groups, g = step % slot_groups;
      if (g == 0) producer.put(memory.w, [&](auto copy, W& w) { copy.tile(p.w, w, t.m * BW, slot * W::cols); });
      producer.put(memory.x, [&](auto copy, XSlot& x) {
        TW_UNROLL
        for (int n = 0; n < parts; ++n) copy.tile(p.x, x.part[n], t.n * BX + n * part_rows, slot * slot_codes + g * group);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      for (Acc& acc : state.acc) block.fill(acc, 0.0f);
      const int n = slots(p, t), first = first_slot(p, t) * slot_groups;
      Vector scales[slot_groups], zeros[slot_groups];
      load_zeros(block, p, t, first, zeros);
      Piece pieces[slot_groups];
      const W* w = &block.take(memory.w);
      decode(block, pieces[0], *w, zeros, 0);
      TW_NO_UNROLL
      for (int slot = 0; slot < n; ++slot) {
        load_scales(block, p, t, first + slot * slot_groups, scales);
        // Products are numbered by group, then by part. While one is in flight, the one before it is scaled.
        Products products[2];
        constexpr int count = slot_groups * parts;
        const auto add = [&](auto left, int i) {
          block.wait(left, products[i % 2]);
          if (i % parts == parts - 1) block.release(memory.x);
          block.map(state.acc[i % parts], products[i % 2], scales[i / parts],
                    [](auto sum, auto x, auto scale) { return sum + static_cast<float>(x) * scale; });
        };
        const XSlot* x = nullptr;
        TW_UNROLL
        for (int i = 0; i < count; ++i) {
          if (i % parts == 0) x = &block.take(memory.x);
          block.mma(products[i % 2], pieces[i / parts], x->part[i % parts], true);
          if (i == 0) {
            decode(block, pieces[1], *w, zeros, 1);
            block.release(memory.w);
            load_zeros(block, p, t, first + (slot + 1) * slot_groups, zeros);
          }
          if (i > 0) add(leave<in_flight<Target>>, i - 1);
          if (i == count - 1 && slot + 1 < n) {
            w = &block.take(memory.w);
            decode(block, pieces[0], *w, zeros, 0);
          }
        }
        add(leave<0>, count - 1);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      const int row0 = t.m * BW;
      Vector bias;
      block.fill(bias, 0.0f);
      if (!kSplitK && p.has_bias) block.load(bias, p.bias, row0, 0);
      TW_UNROLL
      for (int part = 0; part < parts; ++part) {
        Acc& acc = state.acc[part];
        const int col0 = t.n * BX + part * part_rows;
        // Loaded one by one: a ColumnVector would spill.
        block.for_each(acc, [&](int, int col, auto& x) { x = x * p.x_scales[min(col0 + col, p.last_row)]; });
        if constexpr (kSplitK) {
          block.store(acc, p.partial, row0, col0, t.batch);
        } else if constexpr (pairs) {
          block.map(acc, bias, [](auto sum, auto b) { return sum + b; });
          block.map_row_pairs(acc, [](auto gate, auto up) { return SwiGlu::apply(gate, up); });
          store_row_pairs<T>(block, acc, p.y_transposed, row0, col0);
        } else {
          block.map(acc, bias, [](auto sum, auto b) { return Activation::apply(sum + b); });
          if constexpr (staged)
            block.store_transposed(acc, memory.out.staging, p.y, col0, row0);
          else
            block.store(acc, p.y_transposed, row0, col0);
        }
      }
    }
  };
};

}  // namespace tw::kernels::dequant_gemm

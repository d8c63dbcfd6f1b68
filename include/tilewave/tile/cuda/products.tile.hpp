#pragma once

#include "tilewave/tile/cuda/block.tile.hpp"
#include "tilewave/tile/cuda/lines.tile.hpp"
#include "tilewave/tile/cuda/mma.tile.hpp"
#include "tilewave/tile/cuda/target.tile.hpp"

namespace tw::cuda {

/// A block with products of tiles in shared memory, and stores through it.
template <int kWarps, bool kPieceLoads, bool kPieceStores>
struct ProductBlock : BlockBase<kWarps, kPieceLoads, kPieceStores> {
  using Base = BlockBase<kWarps, kPieceLoads, kPieceStores>;
  using Base::at, Base::load, Base::store, Base::store_transposed, Base::for_each, Base::sync;

  // Products: a warp has finished its part of one when mma() returns.

  /// acc(m, n) (+)= sum over k of a(m, k) b(n, k), both from shared memory. `overwrite` starts from zero.
  template <class Acc, class AnyA, class B>
  TW_INLINE void mma(Acc& acc, const AnyA& any_a, const B& b, bool overwrite) const {
    const auto& a = in_shared(any_a);
    using A = remove_const_reference<decltype(a)>;
    static_assert(Acc::rows == (A::contract == Contract::columns ? A::rows : A::cols),
                  "rows of the accumulator and of the left operand differ");
    const Lines<A, true, Acc::warp_rows> lines(ptx::address(a.bytes), at.lane, Acc::warp_row(at));
    multiply<typename A::Element, A::contract == Contract::columns ? A::cols : A::rows>(
        acc, [&](int k, int tile, u32* to) { lines.load(k, tile, to); }, in_shared(b), overwrite);
  }
  /// The same with the left operand in registers.
  template <class Acc, class E, int R, int C, int WarpRows, class B>
  TW_INLINE void mma(Acc& acc, const Operand<E, R, C, WarpRows>& a, const B& b, bool overwrite) const {
    static_assert(Acc::warp_rows == WarpRows && Acc::rows == R, "rows of the accumulator and of the left operand differ");
    multiply<E, C>(
        acc,
        [&](int k, int tile, u32* to) {
          TW_UNROLL
          for (int i = 0; i < 4; ++i) to[i] = a.x[tile * a.tile_size + k * 4 + i];
        },
        in_shared(b), overwrite);
  }
  /// The same with a 2:4 sparse left operand.
  template <class Acc, class Values, class Metadata, class B>
  TW_INLINE void mma(Acc& acc, const Sparse<Values, Metadata>& a, const B& b, bool overwrite) const {
    multiply_sparse(acc, a, in_shared(b), overwrite);
  }
  template <int Left, class... Acc>
  TW_INLINE void wait(Constant<Left>, Acc&...) const {}
  using Base::add_products;
  /// sums(r, n) += the sum over this warp's columns of a(r, c) * operand(n, c), where a is the warp's R rows of the tile, or those of its
  /// codes, times their scales. With DigitScales the operand has digits, and the tile integers.
  template <class E, int R, int N, int C, class S, class Scales = Unscaled>
  TW_INLINE void add_products(DividedSums<R, N, kWarps>& sums, const S& tile, const DividedOperand<E, N, C, kWarps>& operand,
                              const Scales& scales = {}) const {
    if constexpr (is_same<typename S::Element, E>)
      add_divided(at, sums, tile, operand);
    else if constexpr (is_same<Scales, DigitScales<N, kWarps>>)
      add_divided_digits(at, sums, tile, operand, scales);
    else if constexpr (is_same<E, i8>)
      add_divided_integers(at, sums, tile, operand);
    else
      add_divided_codes(at, sums, tile, operand, scales);
  }
  /// The same for a tile whose rows are in groups of 8: the first group of each warp, then the second.
  template <class E, int R, int N, int C, class S, class Scales = Unscaled>
  TW_INLINE void add_products_of_groups(DividedSums<R, N, kWarps>& sums, const S& tile, const DividedOperand<E, N, C, kWarps>& operand,
                                        const Scales& scales = {}) const {
    if constexpr (is_same<typename S::Element, E>)
      add_divided<true>(at, sums, tile, operand);
    else if constexpr (is_same<Scales, DigitScales<N, kWarps>>)
      add_divided_digits<true>(at, sums, tile, operand, scales);
    else
      add_divided_codes<true>(at, sums, tile, operand, scales);
  }

  /// A tile in shared memory as left operand in registers.
  template <class E, int R, int C, int WarpRows>
  TW_INLINE void load(Operand<E, R, C, WarpRows>& to, const Shared<E, R, C, Contract::columns>& from) const {
    using S = Shared<E, R, C, Contract::columns>;
    const Lines<S, true, WarpRows> lines(ptx::address(from.bytes), at.lane, Fragment<float, R, C, WarpRows>::warp_row(at));
    TW_UNROLL
    for (int tile = 0; tile < to.row_tiles; ++tile) {
      TW_UNROLL
      for (int k = 0; k < to.tile_size / 4; ++k) lines.load(k, tile, to.x + tile * to.tile_size + k * 4);
    }
  }

  template <class E, int R, int C, int WarpRows>
  TW_INLINE void load(Operand<E, R, C, WarpRows>& to, const Buffer<E, R, C, Contract::columns>& from) const {
    load(to, from.tile());
  }

  // Through shared memory

  /// Stores a Fragment through shared memory: whole lines are written whatever its layout is. Rows from `rows_end` on are left alone.
  template <class E, int R, int C, int WarpRows, int ColumnWarps, class G>
  TW_INLINE void store(const Fragment<float, R, C, WarpRows, ColumnWarps>& from, const Staging<E, R, C, WarpRows, ColumnWarps>& staging,
                       const G& to, int row0, int col0, int i = 0, int j = 0, int rows_end = Base::kAllRows) const {
    if constexpr (sizeof(E) != 2)
      Base::store_rows(from, to, row0, col0, i, j, rows_end);
    else
      store_lines(from, staging, to, col0, [&](int row) { return Place{row0 + row, i, j, row0 + row < rows_end}; });
  }
  /// to(row0 + col, col0 + row) = from(row, col).
  template <class E, int R, int C, int WarpRows, int ColumnWarps, class G>
  TW_INLINE void store_transposed(const Fragment<float, R, C, WarpRows, ColumnWarps>& from, const Staging<E, R, C, WarpRows, ColumnWarps>&,
                                  const G& to, int row0, int col0, int i = 0, int j = 0) const {
    static_assert(sizeof(E) == 2 && C % 64 == 0, TW_STORED_TRANSPOSED);
    for_each(from, [&](int row, int col, auto x) {
      if (to.inside(row0 + col, col0 + row)) *to.template at<E>(row0 + col, col0 + row, i, j) = tw::to<E>(x);
    });
  }
  /// The same to the window of the tensor that begins at (row0, i0, j0): it may extend past any edge.
  template <class E, int R, int C, int WarpRows, int ColumnWarps, class G>
  TW_INLINE void store_window(const Fragment<float, R, C, WarpRows, ColumnWarps>& from,
                              const Staging<E, R, C, WarpRows, ColumnWarps>& staging, const G& to, int row0, int col0, int i0,
                              int j0) const {
    const Window& w = to.window;
    const auto place_of = [&](int row) {
      const int in_i = i0 + w.i(row), in_j = j0 + w.j(row);
      return Place{row0 + w.row(row), in_i, in_j, to.inside_outer(in_i, in_j)};
    };
    if constexpr (sizeof(E) == 2)
      store_lines(from, staging, to, col0, place_of);
    else
      Base::store_places(from, to, col0, place_of);
  }

  template <class F, class E, int R, int C, Contract contract>
  requires requires { F::kind; }
  TW_INLINE void load(F& to, Shared<E, R, C, contract>& from) const {
    for_each(to, [&](int row, int col, auto& x) { x = static_cast<float>(from.at(row, col)); });
  }
  /// Visible to every thread when it returns.
  template <class F, class E, int R, int C, Contract contract>
  TW_INLINE void store(F& from, Shared<E, R, C, contract>& to) const {
    for_each(from, [&](int row, int col, auto& x) { to.at(row, col) = tw::to<E>(x); });
    sync();
  }
  /// Sets the tile's rows from `first` on to zero, for this warp's next products. Each warp writes all of them.
  template <class E, int R, int C, Contract contract>
  TW_INLINE void zero_rows(Shared<E, R, C, contract>& tile, int first) const {
    using S = Shared<E, R, C, contract>;
    constexpr int pieces = kPanelBytes / 16;
    TW_NO_UNROLL
    for (int n = first * pieces + at.lane; n < R * pieces; n += 32) {
      TW_UNROLL
      for (int panel = 0; panel < S::panels; ++panel)
        ptx::store_shared_16(ptx::address(tile.bytes) + static_cast<u32>(panel * S::panel_bytes + n * 16), 0, 0, 0, 0);
    }
    ptx::warp_sync();
  }

 private:
  /// left(k, tile, registers) reads step k of 16 rows, block `tile`, of the left operand. The operands of a product are read from shared
  /// memory while the previous one runs.
  template <class E, int depth, class Acc, class Left, class B>
  TW_INLINE void multiply(Acc& acc, Left left, const B& b, bool overwrite) const {
    Base::template own<Acc>();
    static_assert(depth == (B::contract == Contract::columns ? B::cols : B::rows), "both operands contract over the same length");
    using F = typename B::Element;
    static_assert(multiplies<E, F>, TW_MULTIPLIES);
    static_assert(Acc::cols == (B::contract == Contract::columns ? B::rows : B::cols),
                  "columns of the accumulator and rows of the right operand differ");
    constexpr int steps_k = depth * static_cast<int>(sizeof(E)) / 32;
    constexpr int blocks = (Acc::warp_cols + 15) / 16;
    if (overwrite) {
      TW_UNROLL
      for (int i = 0; i < Acc::size; ++i) acc.x[i] = 0;
    }
    const Lines<B, false, Acc::warp_cols> lines(ptx::address(b.bytes), at.lane, Acc::warp_col(at));
    u32 left_words[2][Acc::row_tiles][4], right_words[2][4];
    const auto load_left = [&](int k) {
      TW_UNROLL
      for (int tile = 0; tile < Acc::row_tiles; ++tile) left(k, tile, left_words[k % 2][tile]);
    };
    const auto load_right = [&](int n) {
      const int k = n / blocks, block = n % blocks;
      if (block * 16 + 16 <= Acc::warp_cols)
        lines.load(k, block, right_words[n % 2]);
      else
        lines.load_half(k, block, right_words[n % 2]);
    };
    load_left(0);
    load_right(0);
    TW_UNROLL
    for (int n = 0; n < steps_k * blocks; ++n) {
      const int k = n / blocks, block = n % blocks;
      if (n + 1 < steps_k * blocks) load_right(n + 1);
      if (block == blocks - 1 && k + 1 < steps_k) load_left(k + 1);  // not earlier: the operands occupy registers
      TW_UNROLL
      for (int tile = 0; tile < Acc::row_tiles; ++tile) {
        auto* const d = acc.x + tile * Acc::tile_size + block * 8;
        Mma<E, F>::add(d, left_words[k % 2][tile], right_words[n % 2]);
        if (block * 16 + 8 < Acc::warp_cols) Mma<E, F>::add(d + 4, left_words[k % 2][tile], right_words[n % 2] + 2);
      }
    }
  }

  /// Four steps of 32 bytes of values in each row, and 64 bytes of the right operand.
  template <class Acc, class A, class B>
  TW_INLINE void multiply_sparse(Acc& acc, const A& a, const B& b, bool overwrite) const {
    Base::template own<Acc>();
    using E = typename A::Element;
    using Values = decltype(a.values);
    static_assert(A::cols == (B::contract == Contract::columns ? B::cols : B::rows), "both operands contract over the same length");
    static_assert(is_same<E, typename B::Element>, "both operands have one element type");
    static_assert(Acc::rows == A::rows, "rows of the accumulator and of the left operand differ");
    constexpr int blocks = (Acc::warp_cols + 15) / 16, words = metadata_words<E>;
    if (overwrite) {
      TW_UNROLL
      for (int i = 0; i < Acc::size; ++i) acc.x[i] = 0;
    }
    const Lines<Values, true, Acc::warp_rows> left(ptx::address(a.values.bytes), at.lane, Acc::warp_row(at));
    const Lines<B, false, Acc::warp_cols> right(ptx::address(b.bytes), at.lane, Acc::warp_col(at));
    const int first_row = Acc::warp_row(at) / 16 * words;
    const auto multiply_step = [&](auto selector, int step, const u32* metadata) {
      u32 left_words[Acc::row_tiles][4];
      TW_UNROLL
      for (int tile = 0; tile < Acc::row_tiles; ++tile) left.load(step, tile, left_words[tile]);
      TW_UNROLL
      for (int block = 0; block < blocks; ++block) {
        const bool whole = block * 16 + 16 <= Acc::warp_cols;
        u32 low[4], high[4];  // the two steps of 32 bytes of the right operand
        if (whole) {
          right.load(2 * step, block, low);
          right.load(2 * step + 1, block, high);
        } else {
          right.load_half(2 * step, block, low);
          right.load_half(2 * step + 1, block, high);
        }
        const u32 first[4] = {low[0], low[1], high[0], high[1]};
        TW_UNROLL
        for (int tile = 0; tile < Acc::row_tiles; ++tile) {
          auto* const d = acc.x + tile * Acc::tile_size + block * 8;
          SparseMma<E>::template add<decltype(selector)::value>(d, left_words[tile], first, metadata[tile]);
          if (whole) {
            const u32 second[4] = {low[2], low[3], high[2], high[3]};
            SparseMma<E>::template add<decltype(selector)::value>(d + 4, left_words[tile], second, metadata[tile]);
          }
        }
      }
    };
    TW_UNROLL
    for (int w = 0; w < words; ++w) {  // 64 columns: two instructions of 16-bit elements or one of 8-bit ones
      u32 metadata[Acc::row_tiles];
      TW_UNROLL
      for (int tile = 0; tile < Acc::row_tiles; ++tile) metadata[tile] = metadata_word(a.metadata, first_row + tile * words + w, at.lane);
      if constexpr (sizeof(E) == 2) {
        multiply_step(Constant<0>{}, 2 * w, metadata);
        multiply_step(Constant<1>{}, 2 * w + 1, metadata);
      } else {
        multiply_step(Constant<0>{}, w, metadata);
      }
    }
  }

  /// 16 rows of 128 bytes at a time, within a warp.
  template <class E, int R, int C, int WarpRows, int ColumnWarps, class G, class PlaceOf>
  TW_INLINE void store_lines(const Fragment<float, R, C, WarpRows, ColumnWarps>& from,
                             const Staging<E, R, C, WarpRows, ColumnWarps>& staging, const G& to, int col0, PlaceOf place_of) const {
    using F = Fragment<float, R, C, WarpRows, ColumnWarps>;
    using S = Staging<E, R, C, WarpRows, ColumnWarps>;
    Base::template own<F>();
    const Position at = Base::here();
    constexpr int width = 8;  // columns of a piece
    u8* const lines = shared_memory() + staging.offset + at.block_warp() * S::slot_bytes;
    const u32 mine = ptx::address(lines) + static_cast<u32>(at.lane / 4 * kPanelBytes + at.lane % 4 * 4);
    const bool whole = to.template whole_pieces<E, width>() && col0 % width == 0;
    const int row0 = F::warp_row(at), first_col = col0 + F::warp_col(at);
    constexpr int pieces = min(F::warp_cols, S::box_cols) / width;  // of a line; the last panel may have fewer
    TW_UNROLL
    for (int tile = 0; tile < F::row_tiles; ++tile) {
      TW_UNROLL
      for (int col = 0; col < F::warp_cols; col += S::box_cols) {
        ptx::warp_sync();  // the previous lines have been read
        TW_UNROLL
        for (int piece = 0; piece < pieces; ++piece) {
          if (col + piece * width >= F::warp_cols) continue;
          const float* x = from.x + tile * F::tile_size + (col / width + piece) * 4;
          const u32 place = mine + static_cast<u32>((piece ^ at.lane / 4) * 16);
          ptx::store_shared_4(place, ptx::pack<E>(x[0], x[1]));
          ptx::store_shared_4(place + 8 * kPanelBytes, ptx::pack<E>(x[2], x[3]));
        }
        ptx::warp_sync();
        TW_UNROLL
        for (int first = 0; first < S::slot_rows * pieces; first += 32) {
          const int n = first + at.lane, r = n / pieces, c = n % pieces, column = first_col + col + c * width;
          const Place place = place_of(row0 + tile * 16 + r);
          if (n >= S::slot_rows * pieces || col + c * width >= F::warp_cols) continue;
          if (!place.inside || !to.inside(place.row, column)) continue;
          using Piece = typename Base::template Piece<E, width>;
          const Piece& piece = *reinterpret_cast<const Piece*>(lines + r * kPanelBytes + (c ^ (r & 7)) * 16);
          E* const target = to.template at<E>(place.row, column, place.i, place.j);
          if (whole) {
            *reinterpret_cast<Piece*>(target) = piece;
          } else {
            TW_NO_UNROLL
            for (int k = 0; k < width && column + k < to.cols; ++k) target[k * to.stride_col] = piece.x[k];
          }
        }
      }
    }
  }
};

}  // namespace tw::cuda

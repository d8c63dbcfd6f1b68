#pragma once

#include "tilewave/tile/block_model.tile.hpp"
#include "tilewave/tile/cpu/operands.tile.hpp"

#if !TW_ON_GPU

namespace tw::cpu {

/// A block's products. They are computed at once, but remembered until the kernel waits for them. Until then, anything that would race with
/// them on a GPU is an error.
template <int kRows>
class Products : public BlockModel<kRows> {
  using Model = BlockModel<kRows>;

 protected:
  using Model::buffers_, Model::use_of;

 public:
  using Model::Model;

  template <class Acc, class A, class B>
  void mma(Acc& acc, const A& a_tile, const B& b_tile, bool overwrite) {
    Model::template own<Acc>();
    static_assert(A::depth == B::depth, "both operands contract over the same length");
    static_assert(A::outer == Acc::rows && B::outer == Acc::cols, "the accumulator's shape is that of the product");
    constexpr bool own_rows = A::contract == Contract::columns && A::rows == kRows && Model::template is_default<Acc>;
    require(buffers_.product(use_of(a_tile), own_rows ? Reach::warpgroup : Reach::block, use_of(b_tile)));
    const auto& a = packed(a_tile, 0);
    const auto& b = packed(b_tile, 1);
    if (a.valid_outer < 0 || b.valid_outer < 0) schedule_error("a product reads a slot that was released");
    launch(&acc, &source_of(a_tile), &source_of(b_tile));
    multiply(acc, a, b, a.valid_outer, b.valid_outer, min(a.valid_depth, b.valid_depth), overwrite);
  }
  template <class Acc, class Values, class Metadata, class B>
  void mma(Acc& acc, const Sparse<Values, Metadata>& a_tile, const B& b_tile, bool overwrite) {
    using A = Sparse<Values, Metadata>;
    Model::template own<Acc>();
    static_assert(Model::template is_default<Acc> && Acc::rows == A::rows, "a sparse left operand has the kernel's rows");
    static_assert(A::cols == B::depth && B::outer == Acc::cols, "both operands contract over the same length");
    require(buffers_.product(nullptr, Reach::block, use_of(b_tile)));
    const auto& a = packed(a_tile, 0);
    const auto& b = packed(b_tile, 1);
    if (b.valid_outer < 0) schedule_error("a product reads a slot that was released");
    launch(&acc, &a_tile, &source_of(b_tile));
    if (is_finite(b))
      multiply(acc, a, b, a.valid_outer, b.valid_outer, min(a.valid_depth, b.valid_depth), overwrite);
    else
      multiply_kept(acc, a_tile, b, overwrite);
  }
  template <class Acc, class T, int R, int C, class B>
  void mma(Acc& acc, const Operand<T, R, C>& a, const B& b_tile, bool overwrite) {
    Model::template own<Acc>();
    static_assert(Acc::rows == R, TW_OPERAND_ROWS);
    static_assert(C == B::depth, "both operands contract over the same length");
    require(buffers_.product(nullptr, Reach::block, use_of(b_tile)));
    const auto& b = packed(b_tile, 1);
    if (b.valid_outer < 0) schedule_error("a product reads a slot that was released");
    launch(&acc, &a, &source_of(b_tile));
    multiply(acc, a, b, R, b.valid_outer, b.valid_depth, overwrite);
  }
  template <int Left, class... Acc>
  void wait(Constant<Left>, Acc&...) {
    buffers_.wait(Left);
    const int done = in_flight_ > Left ? in_flight_ - Left : 0;
    for (int i = done; i < in_flight_; ++i) products_[i - done] = products_[i];
    in_flight_ -= done;
  }
  template <class T, int R, int C, class F>
  requires(F::rows == R && F::cols == C) void convert(Operand<T, R, C>& to, const F& from) const {
    touch(from);
    overwrite(to);
    cpu::convert(to, from);
  }
  template <class T, class S, int R, int C>
  void convert(Fragment<S, R, C>& to, const Operand<T, R, C>& from) const {
    overwrite(to);
    for (int row = 0; row < R; ++row)
      for (int col = 0; col < C; ++col)
        to.x[row * C + col] = static_cast<S>(from.panels[from.by_rows ? row * C + col : from.offset(row, col)]);
  }

  template <class T, int R, int N, int C, int Warps, class S, class Scales = Unscaled>
  void add_products(DividedSums<R, N, Warps>& sums, const S& tile, const DividedOperand<T, N, C, Warps>& operand,
                    const Scales& scales = {}) const {
    if constexpr (!is_same<typename S::Element, T>)
      add_code_products<false>(sums, tile, operand, scales);
    else
      add_tile_products(sums, tile, operand, [](int warp, int r) { return warp * R + r; });
  }
  template <class T, int R, int N, int C, int Warps, class S, class Scales = Unscaled>
  void add_products_of_groups(DividedSums<R, N, Warps>& sums, const S& tile, const DividedOperand<T, N, C, Warps>& operand,
                              const Scales& scales = {}) const {
    if constexpr (!is_same<typename S::Element, T>)
      add_code_products<true>(sums, tile, operand, scales);
    else
      add_tile_products(sums, tile, operand, [](int warp, int r) { return row_of_group<Warps>(warp, r); });
  }

  /// Copies a tile in a ring into a left operand.
  template <class T, int R, int C>
  void load(Operand<T, R, C>& to, const Shared<T, R, C, Contract::columns>& from) const {
    if (from.valid_outer < 0) schedule_error("a load reads a slot that was released");
    overwrite(to);
    static_cast<Panels<T, R, C>&>(to) = from;
    to.by_rows = false;
  }
  /// Makes a left operand from a tile of codes: decode(number, scale) of each, from column `first` on.
  template <class T, int R, int C, class Codes, int Bytes, class Scales, class Decode = TimesScale>
  requires(is_decoded<Codes, T>) void load(Operand<T, R, C>& to, const Shared<Codes, R, Bytes, Contract::columns>& from,
                                           const Scales& scales, Decode decode = {}, int first = 0) const {
    if (from.valid_outer < 0) schedule_error("a load reads a slot that was released");
    overwrite(to);
    load_codes(to, from, scales, decode, first);
  }
  template <class T, int R, int C>
  void load(Operand<T, R, C>& to, const Buffer<T, R, C, Contract::columns>& from) {
    require(buffers_.load(from.use, R == kRows ? Reach::warpgroup : Reach::block));
    overwrite(to);
    Copy::pack(to.panels, from.elements, C, 1, R, C, Operand<T, R, C>::panel_depth);
    to.by_rows = false;
  }

 protected:
  /// The row of a tile in groups of 8 rows that is row r of a warp.
  template <int Warps>
  static int row_of_group(int warp, int r) {
    return (r / 8 * Warps + warp) * 8 + r % 8;
  }
  /// add_products() of a tile of elements: row r of a warp is row row_of(warp, r) of the tile.
  template <class T, int R, int N, int C, int Warps, class S, class RowOf>
  void add_tile_products(DividedSums<R, N, Warps>& sums, const S& tile, const DividedOperand<T, N, C, Warps>& operand, RowOf row_of) const {
    static_assert(Warps * 16 == kRows, "DividedSums name the kernel's `warps`");
    static_assert(S::rows == R * Warps && S::cols * Warps == C && is_same<typename S::Element, T>, TW_DIVIDED_TILE);
    if (tile.valid_outer < 0) schedule_error("a product reads a slot that was released");
    for (int n = 0; n < N; ++n)
      for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r)
          sums.x[n * R + r] += static_cast<float>(tile.get(row_of(c / S::cols, r), c % S::cols)) * operand.x[n * C + c];
  }
  /// add_products() of codes: of 8 bits, whose rows are scaled later, of fewer with the scale of their group, or of 2 bits minus 2.
  template <bool kGroups, class T, int R, int N, int C, int Warps, class S, class Scales>
  void add_code_products(DividedSums<R, N, Warps>& sums, const S& tile, const DividedOperand<T, N, C, Warps>& operand,
                         const Scales& scales) const {
    using Codes = typename S::Element;
    constexpr int in_byte = codes_in<Codes>, columns = S::cols * in_byte;
    static_assert(Warps * 16 == kRows, "DividedSums name the kernel's `warps`");
    constexpr int parts = kGroups ? Warps : 1;  // of the columns, each in rows of its own
    static_assert(S::rows == R * parts && columns * parts == C, TW_DIVIDED_CODES);
    if (tile.valid_outer < 0) schedule_error("a product reads a slot that was released");
    constexpr bool integers = is_same<T, i8>;
    static_assert(!integers || is_same<Codes, u2x4>, "operands of i8 are multiplied by 2-bit codes");
    constexpr bool digits = is_same<Scales, DigitScales<N, Warps>>;
    static_assert(!digits || is_same<Codes, i8>, TW_DIGITS);
    static_assert((in_byte > 1 && !integers) == !(is_same<Scales, Unscaled> || digits), "codes of 4 and 2 bits have DividedScales");
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        const Codes codes = tile.get(kGroups ? row_of_group<Warps>(c / columns, r) : r, c % columns / in_byte);
        float value;
        if constexpr (integers) {
          value = value_of_code<Codes>(bit_cast<u8>(codes), c % in_byte) - 2;
        } else if constexpr (in_byte > 1) {
          const int group = r * (C / Scales::group) + c / Scales::group;
          const float code = value_of_code<Codes>(bit_cast<u8>(codes), c % in_byte);
          value = number_of_code<typename Scales::Format, T>(code, scales.zero[group]) * scales.scale[group];
        } else {
          value = static_cast<float>(codes);
        }
        for (int n = 0; n < N; ++n) sums.x[n * R + r] += value * operand.x[n * C + c];
      }
    }
  }
  /// Called before elements of a tile in registers are read or written.
  template <class F>
  TW_INLINE void touch(const F& tile) const {
    Model::template own<F>();
    if constexpr (requires { F::kind; }) {
      if constexpr (F::kind == TileKind::fragment) {
        for (int i = 0; i < in_flight_; ++i)
          if (products_[i].acc == &tile) schedule_error("accumulators are read or written while a product adds to them: wait for it first");
      }
    }
  }
  /// Called before an operand of products is written.
  template <class Operand>
  TW_INLINE void overwrite(const Operand& operand) const {
    for (int i = 0; i < in_flight_; ++i)
      if (products_[i].a == &operand || products_[i].b == &operand)
        schedule_error("an operand is written while a product reads it: wait for it first");
  }
  /// Called before a slot is released.
  template <class Slot>
  void require_unread(const Slot& slot) const {
    if (is_read(&slot, sizeof slot)) schedule_error(kReleasedUnderAProduct);
  }
  /// Called before a Buffer is stored to. In the slot of a ring it replaces what has arrived there.
  template <class T, int R, int C, Contract contract>
  void require_writable(const Buffer<T, R, C, contract>& buffer) const {
    if (buffer.ring == nullptr) return;
    if (buffer.ring->taken == 0) schedule_error("a Buffer in the slot of a ring is stored to while the slot is not taken");
    if (is_read(buffer.elements, sizeof(T) * R * C))
      schedule_error("a Buffer in the slot of a ring is stored to while a product reads the slot: wait for it first");
  }

 private:
  struct Product {
    const void* acc;
    const void* a;
    const void* b;
  };
  static constexpr int max_in_flight = 16;
  Product products_[max_in_flight] = {};
  int in_flight_ = 0;

  void launch(const void* acc, const void* a, const void* b) {
    if (in_flight_ == max_in_flight) schedule_error("too many products in flight: wait() for some");
    products_[in_flight_++] = {acc, a, b};
  }
  /// Whether a product in flight reads any of these bytes.
  bool is_read(const void* first, u64 bytes) const {
    const auto inside = [=](const void* operand) {
      return static_cast<u64>(static_cast<const u8*>(operand) - static_cast<const u8*>(first)) < bytes;
    };
    for (int i = 0; i < in_flight_; ++i)
      if (inside(products_[i].a) || inside(products_[i].b)) return true;
    return false;
  }
};

}  // namespace tw::cpu

#endif  // !TW_ON_GPU

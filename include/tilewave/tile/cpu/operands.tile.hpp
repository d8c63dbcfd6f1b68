#pragma once

#include "tilewave/tile/cpu/copy.tile.hpp"

// Products and their operands. Operands are packed into panels, converted from accumulators or decoded from codes.

#if !TW_ON_GPU

namespace tw::cpu {

// The panels that a product reads. A tile in a ring is used as it is; other operands are packed into this thread's operand memory number
// `which`.

template <class T, int R, int C, Contract contract>
const Shared<T, R, C, contract>& packed(const Shared<T, R, C, contract>& tile, int) {
  return tile;
}
/// `elements`: the first of the view's valid elements, which are stored row by row.
template <class V, class T>
auto& pack_view(const V&, const T* elements, long stride, int valid_rows, int valid_cols, int which) {
  using P = PackedView<T, V::outer, V::depth>;
  constexpr bool columns = V::contract == Contract::columns;
  P& packed = *static_cast<P*>(operand_memory(which, sizeof(P)));
  packed.valid_outer = columns ? valid_rows : valid_cols;
  packed.valid_depth = columns ? valid_cols : valid_rows;
  Copy::pack(packed.panels, elements, columns ? stride : 1, columns ? 1 : stride, packed.valid_outer, packed.valid_depth, P::panel_depth);
  return packed;
}
template <class U, int R, int C, Contract c, class T, Contract contract, int kFirst, int Count>
auto& packed(const View<Buffer<U, R, C, c>, T, contract, kFirst, Count>& view, int which) {
  return pack_view(view, reinterpret_cast<const T*>(view.source.elements + kFirst), C, R, Count, which);
}
template <class T, int R, int C, Contract contract>
auto& packed(const Buffer<T, R, C, contract>& buffer, int which) {
  return packed(buffer.template view<T, contract, 0, C>(), which);
}
template <class U, int R, int C, Contract c, class T, Contract contract, int kFirst, int Count>
auto& packed(const View<Shared<U, R, C, c>, T, contract, kFirst, Count>& view, int which) {
  const auto& tile = view.source;
  constexpr bool columns = c == Contract::columns;
  if (tile.valid_outer < 0) schedule_error("a product reads a slot that was released");
  const int rows = columns ? tile.valid_outer : tile.valid_depth;
  const int cols = min(max((columns ? tile.valid_depth : tile.valid_outer) - kFirst, 0), Count);
  U* const elements = static_cast<U*>(operand_memory(2, R * Count * sizeof(U)));
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < cols; ++col) elements[row * Count + col] = tw::to<U>(tile.panels[tile.offset(row, kFirst + col)]);
  return pack_view(view, reinterpret_cast<const T*>(elements), Count, rows, cols, which);
}
/// A sparse tile, with its zeros. What would make a GPU's result undefined is an error.
template <class Values, class Metadata>
auto& packed(const Sparse<Values, Metadata>& tile, int which) {
  using S = Sparse<Values, Metadata>;
  using P = PackedView<typename S::Element, S::rows, S::cols>;
  const Values& values = tile.values;
  if (values.valid_outer < 0) schedule_error("a product reads a slot that was released");
  P& packed = *static_cast<P*>(operand_memory(which, sizeof(P)));
  __builtin_memset(static_cast<void*>(packed.panels), 0, sizeof packed.panels);
  packed.valid_outer = values.valid_outer;
  packed.valid_depth = 2 * values.valid_depth;
  for (int row = 0; row < values.valid_outer; ++row) {
    for (int group = 0; group < values.valid_depth / 2; ++group) {
      const MetadataPlace place = metadata_place(static_cast<int>(sizeof(typename S::Element)), row, group);
      const u32 bits = static_cast<u32>(tile.metadata.get(place.row, place.byte)) >> place.shift & 15u;
      const int first = first_kept(bits), second = second_kept(bits);
      if (first >= second) schedule_error("a sparse product's metadata name no two ascending columns of a group of four");
      packed.panels[P::offset(row, 4 * group + first)] = values.panels[Values::offset(row, 2 * group)];
      packed.panels[P::offset(row, 4 * group + second)] = values.panels[Values::offset(row, 2 * group + 1)];
    }
  }
  return packed;
}
/// The tile or Buffer that holds an operand.
template <class S>
const S& source_of(const S& operand) {
  return operand;
}
template <class S, class T, Contract contract, int kFirst, int Count>
const S& source_of(const View<S, T, contract, kFirst, Count>& view) {
  return view.source;
}

/// Rounds accumulators to an operand's type.
template <class T, class S, int R, int C>
void convert(Operand<T, R, C>& to, const Fragment<S, R, C>& from) {
  constexpr int group = Operand<T, R, C>::group;
  static_assert(C % group == 0, "an operand has whole groups of columns");
  const Library& lib = library();
  to.by_rows = false;
  if constexpr (sizeof(T) == 1) {
    for (int row = 0; row < R; ++row)
      for (int col = 0; col < C; ++col) to.panels[to.offset(row, col)] = to_packed<T>(from.x[row * C + col]);
  } else if constexpr (is_same<T, float>) {
    lib.pack_f32(to.panels, from.x, C, 1, R, C, C);
  } else {
    static_assert(is_same<T, bf16> || is_same<T, f16>, "the cpu target makes operands of f32, bf16, f16, fp8 and i8");
    if constexpr (is_same<T, bf16>) {
      if (lib.mma_bf16_by_rows != nullptr) {
        to.by_rows = true;
        return lib.narrow_bf16(&to.panels->bits, from.x, R * C);
      }
    }
    alignas(64) unsigned short narrow[kPanelRows * C];
    for (int row = 0; row < R; row += kPanelRows) {
      const int rows = min(R - row, kPanelRows);
      if constexpr (is_same<T, bf16>) {
        lib.narrow_bf16(narrow, from.x + row * C, rows * C);
        lib.pack_bf16(&to.panels[row * C].bits, narrow, C, 1, rows, C, C);
      } else {
        lib.narrow_f16(narrow, from.x + row * C, rows * C);
        lib.pack_f16(to.panels + row * C, narrow, C, 1, rows, C, C);
      }
    }
  }
}

/// The number of codes that share a scale.
template <class Scales>
constexpr int group_of() {
  if constexpr (requires { Scales::group; }) return Scales::group;
  return Unscaled::group;
}
template <class Scales>
TW_INLINE auto scale_of(const Scales& scales, int row, int group) {
  if constexpr (requires { scales.in_registers(row, group); })
    return scales.in_registers(row, group);
  else if constexpr (requires { Scales::group; })
    return scales(row, group);
  else
    return scales[row];
}
/// Makes a left operand from a tile of codes: decode(number, scale) of each, from column `first` on.
template <class T, int R, int C, class Codes, int Bytes, class Scales, class Decode>
void load_codes(Operand<T, R, C>& to, const Shared<Codes, R, Bytes, Contract::columns>& from, const Scales& scales, Decode decode,
                int first) {
  constexpr int in_byte = codes_in<Codes>, group = group_of<Scales>();
  static_assert(group % (32 / static_cast<int>(sizeof(T))) == 0,
                "a group of scales is a multiple of 16 codes of a 16-bit operand, of 32 of an 8-bit one");
  if (first < 0 || first % min(group, C) != 0 || first + C > Bytes * in_byte)
    schedule_error("a load of codes begins inside a group of scales, or reaches over its tile");
  to.by_rows = false;
  for (int row = 0; row < R; ++row) {
    for (int begin = 0; begin < C; begin += group) {
      const auto scale = scale_of(scales, row, (first + begin) / group);
      for (int col = begin; col < min(begin + group, C); ++col) {
        const Codes codes = from.get(row, (first + col) / in_byte);
        float number;
        if constexpr (in_byte > 1)
          number = value_of_code<Codes>(bit_cast<u8>(codes), (first + col) % in_byte);
        else
          number = static_cast<float>(codes);
        to.panels[to.offset(row, col)] = to_packed<T>(decode(number, scale));
      }
    }
  }
}

/// Whether no valid element of packed panels is infinite or NaN.
template <class B>
bool is_finite(const B& b) {
  using Element = Packed<typename B::Element>;
  if constexpr (is_same<Element, i8>) {
    return true;
  } else {
    using Bits = conditional<sizeof(Element) == 2, u16, u32>;
    constexpr Bits exponent = static_cast<Bits>(sizeof(Element) == 2 ? 0x7f80u : 0x7f800000u);
    const int count = round_up(b.valid_depth, B::group) * kPanelRows;
    for (int panel = 0; panel < b.valid_outer; panel += kPanelRows) {
      const Element* const x = b.panels + panel * B::panel_depth;
      int found = 0;
      for (int i = 0; i < count; ++i) found |= (bit_cast<Bits>(x[i]) & exponent) == exponent;
      if (found) return false;
    }
    return true;
  }
}
/// acc (+)= a b for a sparse a, without the products of its zeros: on a GPU they do not exist, and 0 times infinity is not 0.
template <class Acc, class Values, class Metadata, class B>
void multiply_kept(Acc& acc, const Sparse<Values, Metadata>& a, const B& b, bool overwrite) {
  if (overwrite) __builtin_memset(acc.x, 0, sizeof acc.x);
  const int columns = min(2 * a.values.valid_depth, b.valid_depth);
  for (int row = 0; row < a.values.valid_outer; ++row) {
    for (int n = 0; n < a.values.valid_depth; ++n) {
      const MetadataPlace place = metadata_place(static_cast<int>(sizeof(typename Values::Element)), row, n / 2);
      const u32 bits = static_cast<u32>(a.metadata.get(place.row, place.byte)) >> place.shift;
      const int k = n / 2 * 4 + (n % 2 == 0 ? first_kept(bits) : second_kept(bits));
      if (k >= columns) continue;
      const auto x = static_cast<typename Acc::Element>(a.values.panels[Values::offset(row, n)]);
      for (int c = 0; c < b.valid_outer; ++c)
        acc.x[row * Acc::cols + c] +=
            x * static_cast<typename Acc::Element>(b.panels[Panels<typename B::Element, B::outer, B::depth>::offset(c, k)]);
    }
  }
}

template <class Acc, class A, class B>
void multiply(Acc& acc, const A& a, const B& b, int rows, int cols, int depth, bool overwrite) {
  using Element = Packed<typename A::Element>;
  static_assert(Acc::rows % 8 == 0 && Acc::cols % kPanelRows == 0,
                "products write whole vectors: accumulators have a multiple of 8 rows and of 16 columns");
  static_assert(is_same<Element, Packed<typename B::Element>>, "bf16 and i8 are multiplied by their own kind");
  static_assert(is_same<typename Acc::Element, conditional<is_same<Element, i8>, i32, float>>,
                "products of i8 are accumulated in i32, all others in float");
  if (overwrite && (rows < Acc::rows || cols < Acc::cols || depth == 0)) {
    __builtin_memset(acc.x, 0, sizeof acc.x);
    if (depth == 0) return;
  }
  const auto multiply = [&](auto mma, const auto* panels_a, const auto* panels_b) {
    mma(acc.x, Acc::cols, panels_a, panels_b, rows, cols, depth, A::panel_depth, overwrite);
  };
  const Library& lib = library();
  if constexpr (is_same<Element, float>) {
    multiply(lib.mma_f32, a.panels, b.panels);
  } else if constexpr (is_same<Element, bf16>) {
    bool by_rows = false;
    if constexpr (requires { a.by_rows; }) by_rows = a.by_rows;
    multiply(by_rows ? lib.mma_bf16_by_rows : lib.mma_bf16, &a.panels->bits, &b.panels->bits);
  } else {
    multiply(lib.mma_i8, a.panels, b.panels);
  }
}

}  // namespace tw::cpu

#endif  // !TW_ON_GPU

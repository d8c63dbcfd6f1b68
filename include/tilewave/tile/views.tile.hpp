#pragma once

#include "tilewave/tile/types.tile.hpp"

// Views: the same bytes of shared memory as a different operand of products. A view of a Shared tile, of a Buffer or of a view costs
// nothing on a GPU. On the CPU a tile's layout depends on its contraction, so the product packs the view again.

namespace tw {

enum class Contract;

/// The tile as an operand that sums over the other dimension: view<Contract::rows>(k) reads K, [keys, D], as V.
template <Contract contract, class S>
TW_INLINE auto view(const S& tile) {
  return tile.template view<typename S::Element, contract, 0, S::cols>();
}
/// `Count` columns of the tile from `First` on, which is a multiple of 128 bytes.
template <int First, int Count, class S>
TW_INLINE auto view_columns(const S& tile) {
  static_assert(First >= 0 && Count > 0 && First + Count <= S::cols, "view_columns() lies inside the tile");
  static_assert(First * static_cast<int>(sizeof(typename S::Element)) % 128 == 0, "view_columns() begins at a multiple of 128 bytes");
  return tile.template view<typename S::Element, S::contract, First, Count>();
}
/// The bits of the tile's elements as another type of the same size.
template <class T, class S>
TW_INLINE auto view_as(const S& tile) {
  static_assert(sizeof(T) == sizeof(typename S::Element), "view_as() takes a type of the same size");
  return tile.template view<T, S::contract, 0, S::cols>();
}

}  // namespace tw

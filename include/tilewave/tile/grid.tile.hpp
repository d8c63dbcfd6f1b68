#pragma once

#include "tilewave/tile/types.tile.hpp"

namespace tw {

/// The tiles of one launch: m x n x batch. `counter` is two zeros in device memory, which a dynamic schedule uses and resets.
struct TileGrid {
  int m = 1;
  int n = 1;
  int batch = 1;
  u32* counter = nullptr;

  TW_INLINE constexpr int count() const { return m * n * batch; }
};

/// The coordinates of a tile, counted in tiles.
struct Tile {
  int m;
  int n;
  int batch;
};

namespace detail {
/// Element types of a TMA tensor map.
enum class MapElement { f32, f16, bf16, u8 };
template <class T>
inline constexpr MapElement map_element = is_same<T, float>  ? MapElement::f32
                                          : is_same<T, f16>  ? MapElement::f16
                                          : is_same<T, bf16> ? MapElement::bf16
                                                             : MapElement::u8;

/// What one TMA copy of a Global moves: the element type, rows of a tile (or as many as its map's boxes have), columns, and the swizzle.
struct MapTile {
  MapElement element;
  int rows, cols;
  int swizzle_bytes;
};
}  // namespace detail

/// A tensor bound to a kernel's Global, on every target.
struct BoundView {
  /// The stride_j of a Global to which nothing was bound, so that a launch can refuse it. No tensor is that large.
  static constexpr i64 kUnbound = -0x756e626f756e6400;

  void* data = nullptr;
  i64 stride_j = kUnbound, stride_i = 0, stride_row = 0, stride_col = 0;  ///< in elements
  int size_j = 0, size_i = 0, rows = 0, cols = 0;

  /// An unbound Global that TMA copies stores its box sizes here: the host reads them from the compiled kernel.
  TW_INLINE constexpr void set_map_tile(const detail::MapTile& tile) {
    size_j = tile.swizzle_bytes;
    size_i = static_cast<int>(tile.element);
    rows = tile.rows;
    cols = tile.cols;
  }
  TW_INLINE constexpr detail::MapTile map_tile() const { return {static_cast<detail::MapElement>(size_i), rows, cols, size_j}; }
};
namespace detail {
/// Global::part(): `count` rows of one matrix of `tensor` as a tensor of their own. `data`: their first element.
template <class G>
TW_INLINE constexpr G part(G tensor, void* data, int count) {
  tensor.data = data;
  tensor.rows = count;
  tensor.size_i = tensor.size_j = 1;
  return tensor;
}
/// What is wrong with a part, or null.
template <class G>
constexpr const char* part_outside(const G& tensor, int first, int count) {
  if (count == 0 || (count > 0 && first >= 0 && first + count <= tensor.rows)) return nullptr;
  return "a part of a tensor has rows outside of it: on a GPU they would be read and written";
}
}  // namespace detail
/// The view for an optional tensor that a call leaves out: no element is inside it.
inline constexpr BoundView kNoTensor{nullptr, 0, 0, 0, 0, 0, 0, 0, 0};

/// Schedules: the order of a grid's tiles. `at(grid, i)` is the i-th tile, a pure function. A kernel names a schedule as its `Schedule`, or
/// defines its own, as attention does. `dispatch` says how blocks take tiles.
enum class Dispatch {
  plain,       ///< one block per tile
  persistent,  ///< as many blocks as fit at once; each takes every n-th tile
  dynamic      ///< as many blocks as fit at once; each takes the next tile when it has finished one
};

/// Row by row: n varies fastest.
struct RowMajor {
  static constexpr Dispatch dispatch = Dispatch::plain;
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) {
    if (grid.n == 1 && grid.batch == 1) return {i, 0, 0};  // a common case; divisions would take longer than the arithmetic of a small tile
    const u32 n = static_cast<u32>(grid.n), row = static_cast<u32>(i) / n;  // unsigned divisions take half as long
    if (grid.batch == 1) return {static_cast<int>(row), i - static_cast<int>(row * n), 0};
    const u32 m = static_cast<u32>(grid.m), batch = row / m;
    return {static_cast<int>(row - batch * m), i - static_cast<int>(row * n), static_cast<int>(batch)};
  }
};

/// Swizzled raster: bands of `Band` tile rows, each walked column by column, so that tiles in flight share rows of A and columns of B in
/// the L2 cache.
template <int Band, Dispatch kDispatch = Dispatch::persistent>
struct Banded {
  static constexpr Dispatch dispatch = kDispatch;
  TW_INLINE static constexpr Tile at(const TileGrid& grid, int i) {
    const int per_batch = grid.m * grid.n;
    const int in_batch = i % per_batch;
    const int band = in_batch / (Band * grid.n);
    const int in_band = in_batch - band * Band * grid.n;
    const int rows = grid.m - band * Band < Band ? grid.m - band * Band : Band;
    return {band * Band + in_band % rows, in_band / rows, i / per_batch};
  }
};

}  // namespace tw

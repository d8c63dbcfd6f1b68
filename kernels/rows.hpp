#pragma once

#include <compare>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/check.hpp"
#include "tilewave/device.hpp"
#include "tilewave/tensor.hpp"
#include "tilewave/tile/grid.tile.hpp"

// Shared by the families that work on rows of tensors: operands as [j, i, row, column], and the shape of a block's tile.

namespace tw::kernels {

/// The largest extent: indices stay ints, even at the end of a last, incomplete tile.
inline constexpr std::int64_t kLargestExtent = std::int64_t{1} << 30;

/// How a GPU block holds rows: `row_warps` warps for each row, and `share` columns for each of their threads.
struct RowConfig {
  int row_warps;
  int share;
  friend auto operator<=>(const RowConfig&, const RowConfig&) = default;
};

/// The tile that follows from a RowConfig.
struct RowTile {
  int rows, cols, warps;
};
constexpr RowTile row_tile(RowConfig config) {
  const int warps = config.row_warps < 4 ? 4 : config.row_warps;
  // Short rows: enough rows per warp to give a thread 32 elements, so that enough loads are in flight.
  const int rows = config.row_warps == 1 ? warps * (config.share < 32 ? 32 / config.share : 1) : warps / config.row_warps;
  return {rows, 32 * config.row_warps * config.share, warps};
}

/// The longest rows that 16 warps hold with `max_share` columns per thread.
constexpr int longest_held_row(int max_share) { return 16 * 32 * max_share; }

/// Chooses the configuration for rows of at most longest_held_row(max_share) columns; max_share is 24, 32 or 40. If there are many rows,
/// each gets the smallest number of warps that can hold it: this needs the fewest reductions across warps and keeps the most bytes in
/// flight. If there are few rows, they are spread over more warps until every SM has some, or a thread has only 8 columns.
RowConfig choose_rows(std::int64_t rows, std::int64_t cols, int units, int max_share = 32);

/// All useful configurations for rows of `cols` columns: for each number of warps the fewest columns per thread. Empty if no block can hold
/// a row.
std::vector<RowConfig> row_configs(std::int64_t cols, int max_share);

/// Calls f(std::type_identity<T>{}) with T the type of f32, f16 or bf16.
template <class F>
void with_float_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f16:
      return f(std::type_identity<f16>{});
    case DType::bf16:
      return f(std::type_identity<bf16>{});
    default:
      return f(std::type_identity<float>{});
  }
}

/// The number of adjacent columns that a lane holds: 16 bytes of the wider type.
template <class... T>
inline constexpr int kPieceColumns = ((sizeof(T) == 2) && ...) ? 8 : 4;
int piece_columns(std::initializer_list<DType> dtypes);

constexpr bool is_8bit_float(DType dtype) { return dtype == DType::fp8_e4m3 || dtype == DType::fp8_e5m2; }
inline bool is_float(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

/// A view of `t` whose last dimension has `size` elements, `step` apart, from `first` on.
Tensor columns_of(const Tensor& t, std::int64_t first, std::int64_t size, std::int64_t step = 1);

/// Throws InvalidArgument for an extent above kLargestExtent.
void check_extents(const char* op, const char* argument, const Tensor& tensor);

/// Operands of 1 to 4 dimensions, equal in all but the last, as views [j, i, row, column]. Outer dimensions are merged if the strides of
/// all operands allow it, so that as many as possible are rows.
class RowViews {
 public:
  explicit RowViews(std::span<const Tensor* const> operands);
  const Tensor& operator[](std::size_t n) const { return views_[n]; }
  std::int64_t rows() const { return views_[0].shape(2); }  ///< for each [j, i]
  std::int64_t outer() const { return views_[0].shape(0) * views_[0].shape(1); }

 private:
  std::vector<Tensor> views_;
};

/// The grid of tiles of `tile_rows` x `tile_cols`. Throws InvalidArgument if there are too many for one launch.
TileGrid row_grid(const char* op, const RowViews& views, std::int64_t cols, int tile_rows, int tile_cols);

}  // namespace tw::kernels

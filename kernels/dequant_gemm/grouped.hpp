#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "kernels/dequant_gemm/kernels.hpp"
#include "kernels/dequant_gemm/skinny.hpp"
#include "kernels/grouped_gemm/group_tiles.hpp"

// Products of groups of rows, each with a weight in fewer bits of its own: the experts of a mixture. Callers have checked the tensors.

namespace tw::kernels::dequant_gemm {

/// The tile of the kernel for few rows, or of the one for many.
using GroupedTile = std::variant<SkinnyTile, WideTile>;

/// The tile with the least predicted time for `rows` rows of x, which random groups divide. Of a SkinnyTile only the rows of x count.
GroupedTile choose_grouped_tile(std::int64_t rows, std::int64_t groups, std::int64_t generic_shared);

/// All tiles that it chooses from on sm_90a.
std::vector<GroupedTile> grouped_tiles();

/// A SkinnyTile for such rows of x, with the rows of W and the slots for weights of `n` rows in `tiles` tiles of x.
SkinnyTile fit_grouped(SkinnyTile tile, WeightFormat format, std::int64_t n, std::int64_t tiles, int units, std::int64_t generic_shared);

/// Rows of x in a tile.
int x_rows(const GroupedTile& tile);
/// For people: "skinny 32 x 8, 6 slots, 8 warps, 2 per SM", "128 x 256".
std::string describe(const GroupedTile& tile);

/// Products with the same groups, which share a list of tiles.
class GroupedProducts {
 public:
  /// `offsets`: i32 [groups + 1], contiguous, on the stream's device, as of grouped_gemm(). `rows`: of x.
  GroupedProducts(const Tensor& offsets, std::int64_t rows, const Stream& stream);
  /// With a tile of the caller's choice, on a GPU.
  GroupedProducts(const Tensor& offsets, std::int64_t rows, const GroupedTile& tile, const Stream& stream);

  /// y(r, :) = x(r, :) W[g]^T for the rows r of each group g; other rows of y are left alone. `x`: [rows, K], `y`: [rows, N], row-major.
  /// `weight`: mxfp4, or int4 without zero points, [groups N, K], those of all groups one below the other; on a GPU of whole 16 bytes.
  void multiply(const Tensor& x, const QuantizedMatrix& weight, const Tensor& y) const;

 private:
  void multiply_on_cpu(const Call& call) const;
  void launch_skinny(const Call& call, const SkinnyTile& tile) const;
  void launch_wide(const Call& call, const WideTile& tile) const;

  Tensor offsets_;
  Stream stream_;
  std::int64_t generic_shared_ = 0;
  GroupedTile tile_ = {};
  Tensor tiles_;  ///< the list
};

inline TileGrid grouped_grid(const Call& call, const SkinnyTile& tile, const Tensor& tiles) {
  return {.m = skinny_grid(call, tile).m, .n = static_cast<int>(tiles.shape(0))};
}
inline TileGrid grouped_grid(const Call& call, const WideTile& tile, const Tensor& tiles) {
  return {.m = wide_grid(call, {tile, 0}).m, .n = static_cast<int>(tiles.shape(0))};
}

/// Fills in the parameters of the kernels. `tiles`: the list.
template <class Groups>
void bind_groups(Groups& groups, const Call& call, const Tensor& tiles) {
  groups.list.tiles = tiles.data<i32>();
  groups.weight_rows = static_cast<int>(call.n());
}
template <class Params>
void bind_grouped(auto& bind, Params& p, const Call& call, const SkinnyTile&, const Tensor& tiles) {
  bind_skinny(bind, p, call);
  bind_groups(p.in.groups, call, tiles);
}
template <class Params>
void bind_grouped(auto& bind, Params& p, const Call& call, const WideTile& tile, const Tensor& tiles) {
  bind_wide(bind, p, call, {tile, 0}, {});
  bind_groups(p.groups, call, tiles);
}

}  // namespace tw::kernels::dequant_gemm

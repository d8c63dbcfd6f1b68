#pragma once

#include <compare>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kernels/gemm/launch.hpp"
#include "kernels/grouped_gemm/call.hpp"
#include "kernels/grouped_gemm/group_tiles.hpp"
#include "kernels/grouped_gemm/grouped_gemm.tile.hpp"
#include "kernels/grouped_gemm/k_grouped_gemm.tile.hpp"
#include "kernels/named.hpp"
#include "kernels/product_tiles.hpp"
#include "kernels/variant.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::grouped_gemm {

/// One of the family's GPU kernels by the values that name it.
struct Kernel {
  enum Form {
    list,         ///< ListGroupTiles
    grouped,      ///< GroupedGemm
    k_grouped,    ///< KGroupedGemm
    block_scaled  ///< BlockScaledGemm of groups
  };
  Form form = grouped;
  DType dtype = DType::bf16, out = DType::bf16;
  bool b_rows = false;  ///< grouped: B is stored [groups, K, N]
  Activation activation = Activation::none;
  bool addends = false;  ///< k_grouped: D is added to
  ProductTile tile = {};
  auto operator<=>(const Kernel&) const = default;
};

/// The type for the run-time compiler, and the file that defines it.
std::string type_of(const Kernel& kernel);
std::string_view source_of(const Kernel& kernel);
const detail::NamedKernel& named(const Kernel& kernel);
/// For people: "grouped_gemm_bf16_nt_128x256_swiglu".
std::string name_of(const Kernel& kernel);

/// The same kernel as a type: for Params, which are those of every tile, layout and activation, and for the CPU and analysis targets.
template <Kernel k, class Act = FunctorOf<k.activation>>
constexpr auto host_kernel() {
  using T = ElementOf<k.dtype>;
  using Out = ElementOf<k.out>;
  using Steps = gemm::Tiles<k.tile.bm, k.tile.bn, kStepBytes / static_cast<int>(sizeof(T)), k.tile.stages, k.tile.cluster, k.tile.band>;
  if constexpr (k.form == Kernel::block_scaled)
    return std::type_identity<gemm::BlockScaledGemm<Out, Steps, ListedGroups>>{};
  else if constexpr (k.form == Kernel::list)
    return std::type_identity<ListGroupTiles<kListed>>{};
  else if constexpr (k.form == Kernel::k_grouped)
    return std::type_identity<KGroupedGemm<T, Linear<Out, Identity, LinearOptions{.addends = k.addends}>, Steps>>{};
  else
    return std::type_identity<
        GroupedGemm<gemm::Operands<T, Contract::columns, k.b_rows ? Contract::rows : Contract::columns>, Out, Act, Steps>>{};
}
template <Kernel k>
using HostKernel = typename decltype(host_kernel<k>())::type;

/// The tiles that the heuristic chooses from; `config` of the options indexes them. `generic_shared`: see kernels/generic_tiles.hpp.
std::vector<CostedTile> configs(std::int64_t generic_shared);
/// Whether a call can have a tile of them.
bool valid(const ProductTile& tile, bool b_rows, bool addends);
/// The valid one with the least predicted time for groups of equal size.
ProductTile choose_tile(const Call& call, bool b_rows, int units, std::int64_t generic_shared);
ProductTile choose_tile(const DepthCall& call, int units, std::int64_t generic_shared);

/// Entries of the list of tiles.
inline int list_size(int m, int groups, const ProductTile& tile) { return list_size(m, groups, tile.bm * tile.cluster); }

inline TileGrid grid_of(const Call& call, const ProductTile& tile) {
  return {list_size(call.m(), call.groups(), tile) * tile.cluster, (call.n() + tile.bn - 1) / tile.bn};
}
inline TileGrid grid_of(const DepthCall& call, const ProductTile& tile) {
  const int tiles = (call.m() + tile.bm - 1) / tile.bm;
  return {(tiles + tile.cluster - 1) / tile.cluster * tile.cluster, (call.n() + tile.bn - 1) / tile.bn, call.groups()};
}

/// Fills in the parameters of a call's kernels. `tiles`: the list, i32.
template <class Params>
void bind_list(auto&, Params& p, const Call& call, const ProductTile& tile, const Tensor& tiles) {
  bind_list(p, call.offsets, call.m(), tile.bm * tile.cluster, tiles);
}
template <class Params>
void bind_grouped(auto& bind, Params& p, const Call& call, bool b_rows, const Tensor& tiles) {
  using Out = typename decltype(p.d)::Element;
  bind(p.in.a, call.k() > 0 ? &call.a : nullptr);
  const Tensor b = b_rows ? call.b.transpose(1, 2) : call.b;
  bind(p.in.b, call.k() > 0 ? &b : nullptr);
  bind(p.d, call.d);
  p.in.depth = call.k();
  p.in.a_batches = 0;
  p.in.b_batches = 1;
  p.bias = call.options.bias ? call.options.bias->data<Out>() : nullptr;
  p.groups.tiles = tiles.data<i32>();
  p.columns = call.n();
}
template <class Params>
void bind_block_scaled(auto& bind, Params& p, const Call& call, const Tensor& tiles) {
  gemm::bind_block_scaled(bind, p, call.a, call.b, call.a_scale, call.b_scale, call.d);
  p.layout.tiles = tiles.data<i32>();
}
template <class Params>
void bind_k_grouped(auto& bind, Params& p, const DepthCall& call) {
  bind(p.a, call.k() > 0 ? &call.a : nullptr);
  bind(p.b, call.k() > 0 ? &call.b : nullptr);
  p.groups.offsets = call.offsets.data<i32>();
  p.groups.count = call.groups();
  p.groups.rows = call.k();
  auto& end = p.epilogue;
  bind(end.d, call.d);
  bind(end.c, call.options.accumulate ? &call.d : nullptr);
  bind(end.residual, nullptr);
  end.bias = nullptr;
  end.a_scale = end.b_scale = nullptr;
  end.alpha = 1;
  end.beta = call.options.accumulate ? 1.0f : 0.0f;
  end.has_bias = end.has_residual = false;
  end.activation = AnyActivation::identity;
}

std::vector<KernelVariant> registered();
inline constexpr ShapeKey kShape[] = {{"M", "rows of A and D"},
                                      {"N", "columns of B and D"},
                                      {"K", "columns of A, rows of B"},
                                      {"groups", "number of groups, of equal size", 8}};

}  // namespace tw::kernels::grouped_gemm

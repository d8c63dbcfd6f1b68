#include "kernels/grouped_gemm/kernels.hpp"

#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"

namespace tw::kernels::grouped_gemm {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// The valid tile with the least time for `groups` products of m x n x k, as if they were a batch.
ProductTile choose(std::int64_t groups, std::int64_t m, std::int64_t n, std::int64_t k, bool b_rows, bool addends, int units,
                   std::int64_t generic_shared) {
  const std::vector<CostedTile> all = configs(generic_shared);
  const double steps = static_cast<double>(k * 2) / kStepBytes;
  const auto tiles = [&](const ProductTile& t) { return groups * ceil_div(ceil_div(m, t.bm), t.cluster) * t.cluster * ceil_div(n, t.bn); };
  return all[static_cast<std::size_t>(fastest_tile(
      all, [&](const CostedTile& t) { return valid(t, b_rows, addends); },
      [&](const CostedTile& t) { return product_time(t, tiles(t), steps, units); }))];
}

}  // namespace

std::vector<CostedTile> configs(std::int64_t generic_shared) {
  if (generic_shared > 0) return generic_tiles(generic_shared);
  return {kProductTiles.begin(), kProductTiles.end()};
}

bool valid(const ProductTile& t, bool b_rows, bool addends) {
  const int most_with_addends = t.bm <= 128 ? 128 : t.bm <= 192 ? 96 : 0;  // gemm's: reading D needs registers
  return (!addends || t.bn <= most_with_addends) && (!b_rows || t.bn % 64 == 0);
}

ProductTile choose_tile(const Call& call, bool b_rows, int units, std::int64_t generic_shared) {
  const std::int64_t groups = std::max(1, std::min(call.groups(), call.m()));
  if (call.block_scaled())
    return gemm::kBlockScaledTiles[static_cast<std::size_t>(
        gemm::choose_block_scaled(groups, ceil_div(call.m(), groups), call.n(), call.k(), units))];
  return choose(groups, ceil_div(call.m(), groups), call.n(), call.k(), b_rows, false, units, generic_shared);
}

ProductTile choose_tile(const DepthCall& call, int units, std::int64_t generic_shared) {
  return choose(call.groups(), call.m(), call.n(), ceil_div(call.k(), call.groups()), true, call.options.accumulate, units, generic_shared);
}

int list_size(int rows, int groups, int tile_rows) {
  // Each group that has rows may have one tile that is not full, in addition to all that are.
  return std::max(1, rows / tile_rows + std::min(groups, rows));
}

std::string type_of(const Kernel& k) {
  if (k.form == Kernel::list) return tw::format("tw::kernels::grouped_gemm::ListGroupTiles<{}>", kListed);
  const ProductTile& c = k.tile;
  const std::string tiles = tw::format("tw::kernels::gemm::Tiles<{}, {}, {}, {}, {}, {}>", c.bm, c.bn, kStepBytes / size_of(k.dtype),
                                       c.stages, c.cluster, c.band);
  if (k.form == Kernel::block_scaled)
    return tw::format("tw::kernels::gemm::BlockScaledGemm<{}, {}, tw::kernels::grouped_gemm::ListedGroups>", element_name(k.out), tiles);
  if (k.form == Kernel::k_grouped)
    return tw::format("tw::kernels::grouped_gemm::KGroupedGemm<{}, {}, {}>", element_name(k.dtype),
                      linear_name(k.out, Activation::none, {.addends = k.addends}), tiles);
  return tw::format(
      "tw::kernels::grouped_gemm::GroupedGemm<tw::kernels::gemm::Operands<{}, tw::Contract::columns, tw::Contract::{}>, {}, {}, {}>",
      element_name(k.dtype), k.b_rows ? "rows" : "columns", element_name(k.out), functor_name(k.activation), tiles);
}

std::string_view source_of(const Kernel& k) {
  return k.form == Kernel::list        ? "kernels/grouped_gemm/group_tiles.tile.hpp"
         : k.form == Kernel::k_grouped ? "kernels/grouped_gemm/k_grouped_gemm.tile.hpp"
                                       : "kernels/grouped_gemm/grouped_gemm.tile.hpp";
}

const detail::NamedKernel& named(const Kernel& kernel) {
  static KernelTable<Kernel> table(type_of, source_of);
  return table[kernel];
}

std::string name_of(const Kernel& k) {
  constexpr const char* kActivations[] = {"", "_relu", "_gelu_erf", "_gelu_tanh", "_silu", "_swiglu"};
  if (k.form == Kernel::list) return "list_group_tiles";
  const std::string tile = tw::format("{}x{}{}", k.tile.bm, k.tile.bn, k.tile.cluster > 1 ? "_cluster" : "");
  if (k.form == Kernel::block_scaled) return tw::format("grouped_gemm_fp8_block_scaled_{}", tile);
  if (k.form == Kernel::k_grouped)
    return tw::format("k_grouped_gemm_{}{}_{}{}", tw::name_of(k.dtype), k.out == k.dtype ? "" : "_f32", tile, k.addends ? "_addends" : "");
  return tw::format("grouped_gemm_{}_{}_{}{}", tw::name_of(k.dtype), k.b_rows ? "nn" : "nt", tile,
                    kActivations[static_cast<std::size_t>(k.activation)]);
}

}  // namespace tw::kernels::grouped_gemm

#include "kernels/sparse_gemm/kernels.hpp"

#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"

namespace tw::kernels::sparse_gemm {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// For the generic target: as gemm's, with 2 KB of staging for each warp.
std::vector<CostedTile> generic_configs(std::int64_t shared, int element_bytes) {
  struct Shape {
    int bm, bn, warps;
    double step;
  };
  constexpr Shape kShapes[] = {{128, 128, 4, 0.6}, {64, 128, 4, 0.35}, {64, 64, 4, 0.2}};
  std::vector<CostedTile> tiles;
  for (const Shape& s : kShapes) {
    ProductTile tile{s.bm, s.bn, 0, 1, 2048 / s.bm};
    const int staging = s.warps * 16 * kStepBytes;
    tile.stages = generic_stages(shared, slot_bytes(tile, element_bytes), staging, 4);
    if (tile.stages >= 2) tiles.push_back({tile, s.step, 3 * s.step});
  }
  return tiles;
}

}  // namespace

std::vector<CostedTile> configs(std::int64_t generic_shared, int element_bytes) {
  if (generic_shared > 0) return generic_configs(generic_shared, element_bytes);
  std::vector<CostedTile> tiles;
  for (const CostedTile& tile : kTiles) {
    const int staging = 2 * tile.bm * kStepBytes, barriers = 1024;
    if (barriers + tile.stages * slot_bytes(tile, element_bytes) + staging <= kSharedBytesPerBlock) tiles.push_back(tile);
  }
  return tiles;
}

bool valid(const Call& call, const ProductTile& tile) {
  const Activation activation = call.options.activation;
  const bool gelu = activation == Activation::gelu_erf || activation == Activation::gelu_tanh;
  if (gelu && call.stores_transposed() && tile.bm == 192) return false;
  return !call.addends() || (tile.bn <= 128 && tile.bm <= 128);
}

ProductTile choose_tile(const Call& call, int units, std::int64_t generic_shared) {
  const std::vector<CostedTile> all = configs(generic_shared, static_cast<int>(size_of(call.dtype())));
  const double steps = static_cast<double>(ceil_div(call.k() * static_cast<std::int64_t>(size_of(call.dtype())), 2 * kStepBytes));
  return all[static_cast<std::size_t>(fastest_tile(
      all, [&](const CostedTile& t) { return valid(call, t); },
      [&](const CostedTile& t) {
        const std::int64_t tiles = ceil_div(ceil_div(call.m(), t.bm), t.cluster) * t.cluster * ceil_div(call.n(), t.bn);
        return product_time(t, tiles, steps, units);
      }))];
}

std::string type_of(const Kernel& k) {
  const ProductTile& c = k.tile;
  const std::string epilogue = k.dtype == DType::i8
                                   ? "tw::StoreSums<tw::i32>"
                                   : linear_name(gemm::result_of(k.dtype), k.activation,
                                                 {.addends = k.addends, .scales = size_of(k.dtype) == 1, .transposed = k.transposed});
  return tw::format(
      "tw::kernels::gemm::Gemm<tw::kernels::gemm::SparseOperands<{}, tw::Contract::{}>, {}, tw::kernels::gemm::Tiles<{}, {}, {}, {}, {}, "
      "{}>, false>",
      element_name(k.dtype), k.b_rows ? "rows" : "columns", epilogue, c.bm, c.bn, 2 * kStepBytes / size_of(k.dtype), c.stages, c.cluster,
      c.band);
}

const detail::NamedKernel& named(const Kernel& kernel) {
  static KernelTable<Kernel> table(type_of, "tilewave/tile/gemm.tile.hpp");
  return table[kernel];
}

std::string name_of(const Kernel& k) {
  constexpr const char* kActivations[] = {"", "_relu", "_gelu_erf", "_gelu_tanh", "_silu", "_swiglu"};
  return tw::format("sparse_gemm_{}_{}_{}x{}{}{}{}{}", k.dtype == DType::fp8_e4m3 ? "fp8" : tw::name_of(k.dtype), k.b_rows ? "nn" : "nt",
                    k.tile.bm, k.tile.bn, k.tile.cluster > 1 ? "_cluster" : "", k.transposed ? "_transposed" : "",
                    k.addends ? "_addends" : "", kActivations[static_cast<std::size_t>(k.activation)]);
}

}  // namespace tw::kernels::sparse_gemm

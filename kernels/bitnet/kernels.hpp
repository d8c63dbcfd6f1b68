#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <string>

#include "kernels/bitnet/call.hpp"
#include "kernels/bitnet/products.tile.hpp"
#include "kernels/bitnet/quantize.tile.hpp"
#include "kernels/named.hpp"
#include "kernels/rows.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::bitnet {

// The kernels of ternary_gemm() by the values that name them: no template is instantiated on the host for tiles.

/// Rows of W in a tile, the most rows of x, slots of the ring, warps of a block that compute, and blocks that an SM can hold.
struct SkinnyTile {
  int rows = 16, x_rows = 8, stages = 8, warps = 8, blocks = 2;
  auto operator<=>(const SkinnyTile&) const = default;
};
struct SkinnyKernel {
  DType dtype = DType::bf16;
  bool addends = false;  ///< y is added to
  SkinnyTile tile = {};
  auto operator<=>(const SkinnyKernel&) const = default;
};

/// Rows of W and of x in a tile, slots of their rings, and rows of tiles in a band.
struct WideTile {
  int w_rows = 128, x_rows = 128, w_stages = 3, x_stages = 6, band = 8;
  auto operator<=>(const WideTile&) const = default;
};
struct WideKernel {
  DType dtype = DType::bf16;
  WideTile tile = {};
  auto operator<=>(const WideKernel&) const = default;
};

/// Tiles for sm_90a. Fewer rows of x: more rows of W, whose warps decode more codes at a time, or few, so that small weights occupy the
/// SMs.
inline constexpr std::array<WideTile, 6> kWideTiles{{
    {64, 32, 12, 16, 8},
    {64, 64, 8, 16, 8},
    {256, 32, 4, 16, 8},
    {192, 64, 5, 10, 8},
    {128, 128, 3, 6, 8},
    {128, 256, 2, 4, 8},
}};

/// Whether a GPU has a kernel for so few rows of x. Copies of W need rows of whole 16 bytes.
bool is_skinny(const Call& call);
/// Whether a GPU has a kernel that decodes W for any number of rows of x. Copies of W and x need rows of whole 16 bytes.
bool is_wide(const Call& call);

/// The kernel for a call on a GPU with so many SMs. `generic_shared`: the shared memory of a block where kernels are compiled for the
/// generic target, else 0.
SkinnyKernel skinny_kernel(const Call& call, int units, std::int64_t generic_shared);
/// The tile with the least predicted time.
WideTile wide_tile(const Call& call, int units);
/// In clock cycles of an H200.
double predicted_cycles(const Call& call, const WideTile& tile, int units);

void run_skinny(const Call& call, const SkinnyKernel& kernel);
void run_wide(const Call& call, const WideTile& tile);

/// For people.
std::string describe(const SkinnyTile& tile);
std::string describe(const WideTile& tile);

/// The types for the run-time compiler.
std::string type_of(const SkinnyKernel& kernel);
std::string type_of(const WideKernel& kernel);

/// The same kernels as types: for Params, which are those of every tile, and for the CPU target.
template <SkinnyKernel k>
using SkinnyHostKernel = SkinnyTernaryGemm<Linear<ElementOf<k.dtype>, Identity, LinearOptions{.addends = k.addends}>, k.tile.rows,
                                           k.tile.x_rows, k.tile.stages, k.tile.warps, k.tile.blocks>;
template <WideKernel k>
using WideHostKernel =
    TernaryGemm<ElementOf<k.dtype>, TernaryTiles<k.tile.w_rows, k.tile.x_rows, k.tile.w_stages, k.tile.x_stages, k.tile.band>>;

inline int tiles_of(std::int64_t n, int tile) { return static_cast<int>((n + tile - 1) / tile); }
inline TileGrid skinny_grid(const Call& call, const SkinnyTile& tile) { return {.m = tiles_of(call.n(), tile.rows), .n = 1}; }
inline TileGrid wide_grid(const Call& call, const WideTile& tile) {
  return {.m = tiles_of(call.n(), tile.w_rows), .n = tiles_of(call.m(), tile.x_rows)};
}

/// Fills in the parameters of any of these kernels.
template <class Params>
void bind_skinny(auto& bind, Params& p, const Call& call) {
  const Tensor x_scales = call.x_scales.reshape({call.m(), 1}), scales = call.weight.scales.reshape({1, call.n()});
  bind(p.in.x, call.x);
  bind(p.in.w, call.weight.values);
  bind(p.in.x_scales, x_scales);
  bind(p.in.scales, scales);
  p.in.depth = static_cast<int>(call.k());
  p.constant_weight = call.options.constant_weight;
  auto& end = p.epilogue;
  bind(end.d, call.y);
  bind(end.c, call.options.accumulate ? &call.y : nullptr);
  bind(end.residual, nullptr);
  bind(end.bias, call.options.bias);
  end.a_scale = end.b_scale = nullptr;
  end.alpha = 1;
  end.beta = call.options.accumulate ? 1.0f : 0.0f;
  end.has_bias = call.options.bias != nullptr;
  end.has_residual = false;
  end.activation = AnyActivation::identity;
}
/// `y`: the call's, or other memory of its shape. `transposed`: the tile transposes its results.
template <class Params>
void bind_wide(auto& bind, Params& p, const Call& call, const Tensor& y, bool with_bias, bool transposed) {
  const Tensor scales = call.weight.scales.reshape({call.n(), 1}), x_scales = call.x_scales.reshape({1, call.m()});
  const Tensor y_transposed = y.transpose(0, 1);
  Tensor bias;
  if (with_bias) bias = call.options.bias->reshape({call.n(), 1});
  bind(p.w, call.weight.values);
  bind(p.x, call.x);
  bind(p.scales, scales);
  bind(p.x_scales, x_scales);
  bind(p.bias, with_bias ? &bias : nullptr);
  bind(p.y, transposed ? &y : nullptr);
  bind(p.y_transposed, transposed ? nullptr : &y_transposed);
  p.depth = static_cast<int>(call.k());
}

}  // namespace tw::kernels::bitnet

#pragma once

#include <compare>
#include <string>
#include <vector>

#include "kernels/activation.hpp"
#include "kernels/dequant_gemm/call.hpp"
#include "kernels/dequant_gemm/formats.hpp"
#include "kernels/dequant_gemm/skinny.tile.hpp"
#include "kernels/named.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::dequant_gemm {

/// Rows of W in a tile, the most rows of x (1 for formats with groups only), slots of the ring, warps of a block that compute, and blocks
/// that an SM can hold.
struct SkinnyTile {
  int rows = 16, x_rows = 8, stages = 6, warps = 8, blocks = 2;
  auto operator<=>(const SkinnyTile&) const = default;
};

/// One of the kernels for few rows of x by the values that name it: no template is instantiated on the host for tiles or activations.
struct SkinnyKernel {
  WeightFormat format = WeightFormat::int8;
  int group = 0;       ///< of codes with scales of groups
  bool zeros = false;  ///< of int4 and int2
  DType dtype = DType::bf16;
  Activation activation = Activation::none;
  bool addends = false;  ///< y is added to
  SkinnyTile tile = {};
  bool grouped = false;  ///< groups of rows have weights of their own; without activation and addends
  auto operator<=>(const SkinnyKernel&) const = default;
};

/// The kernel for a call on a GPU with so many SMs. `generic_shared`: the shared memory of a block where kernels are compiled for the
/// generic target, else 0.
SkinnyKernel skinny_kernel(const Call& call, int units, std::int64_t generic_shared);

/// The tile with as many slots as the rings of an SM's blocks have room for.
SkinnyTile with_slots(SkinnyTile tile, WeightFormat format, std::int64_t generic_shared);

/// The tiles that a call can run with on sm_90a, for measurements.
std::vector<SkinnyTile> skinny_tiles(const Call& call);
std::string describe(const SkinnyTile& tile);

void run_skinny(const Call& call, const SkinnyKernel& kernel);

/// The type for the run-time compiler.
std::string type_of(const SkinnyKernel& kernel);
const detail::NamedKernel& named(const SkinnyKernel& kernel);

/// The same kernel as a type: for Params, which are those of every tile and activation, and for the CPU target.
template <SkinnyKernel k>
constexpr auto skinny_host_kernel() {
  using T = ElementOf<k.dtype>;
  using End = Linear<T, FunctorOf<k.activation>, LinearOptions{.addends = k.addends}>;
  return std::type_identity<SkinnyDequantGemm<FormatOf<k>, T, End, k.tile.rows, k.tile.x_rows, k.tile.stages, k.tile.warps, k.tile.blocks,
                                              conditional<k.grouped, WeightOfGroup, OneWeight>>>{};
}
template <SkinnyKernel k>
using SkinnyHostKernel = typename decltype(skinny_host_kernel<k>())::type;

inline TileGrid skinny_grid(const Call& call, const SkinnyTile& tile) {
  return {.m = static_cast<int>((call.n() + tile.rows - 1) / tile.rows), .n = 1};
}

/// Fills in the parameters of any of these kernels.
template <class Params>
void bind_skinny(auto& bind, Params& p, const Call& call) {
  const QuantizedMatrix& w = call.weight;
  const bool by_group = w.scales.rank() == 2;
  const Tensor row_scales = by_group ? Tensor() : Tensor::borrow(w.scales.data(), {1, w.rows()}, DType::f32, w.device());
  bind(p.in.x, call.x);
  bind(p.in.w, w.values);
  bind(p.in.scales, by_group ? nullptr : &row_scales);
  bind(p.in.group_scales, by_group ? &w.scales : nullptr);
  bind(p.in.zeros, w.zeros.numel() > 0 ? &w.zeros : nullptr);
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
  end.activation = any_activation(call.options.activation);
}

}  // namespace tw::kernels::dequant_gemm

#pragma once

#include <array>
#include <compare>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kernels/activation.hpp"
#include "kernels/dequant_gemm/call.hpp"
#include "kernels/dequant_gemm/dequant_gemm.tile.hpp"
#include "kernels/dequant_gemm/formats.hpp"
#include "kernels/named.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::dequant_gemm {

/// Rows of W and of x in a tile, slots of their rings, and rows of tiles in a band.
struct WideTile {
  int w_rows = 128, x_rows = 128, w_stages = 3, x_stages = 6, band = 8;
  auto operator<=>(const WideTile&) const = default;
};

/// Tiles for sm_90a, which fill its shared memory. Fewer rows of x: more rows of W, whose warps decode more codes at a time.
inline constexpr std::array<WideTile, 4> kWideTiles{{
    {256, 32, 4, 16, 8},
    {192, 64, 5, 10, 8},  // four warpgroups have too few registers for zero points in groups of 32
    {128, 128, 3, 6, 8},
    {128, 256, 2, 4, 8},
}};

/// One of the kernels for many rows of x by the values that name it: no template is instantiated on the host for tiles or activations.
struct WideKernel {
  WeightFormat format = WeightFormat::int8;
  int group = 0;       ///< of formats with groups
  bool zeros = false;  ///< of int4 and int2
  DType dtype = DType::bf16;
  Activation activation = Activation::none;
  bool split = false;  ///< sums over splits of K
  WideTile tile = {};
  bool grouped = false;  ///< groups of rows have weights of their own; not split, without activation
  auto operator<=>(const WideKernel&) const = default;
};
/// The sum of the splits' sums, transposed.
struct WideSum {
  DType dtype = DType::bf16;
  Activation activation = Activation::none;
  bool addends = false;  ///< y is added to
  auto operator<=>(const WideSum&) const = default;
};

/// How a call is computed. `splits` is 0 if the product stores y itself, and otherwise the number of K splits that a second launch adds up.
struct WidePlan {
  WideTile tile;
  int splits = 0;
};

/// Slots of W, 128 bytes of each row, of a split of K.
std::int64_t slots_of_split(const Call& call, int splits);
/// The predicted time of the second launch, which adds up the sums of the splits, in clock cycles of an H200.
double sum_cycles(const Call& call, int splits, int units);
/// The plan of these tiles with the least time.
WidePlan fastest_plan(const Call& call, std::span<const WideTile> tiles, const std::function<double(const WidePlan&)>& time_of);
/// launch(plan, partial), and if there are splits, the second launch: `partial` is f32 [splits, N, M], in memory of the call.
void run_plan(const Call& call, const WidePlan& plan, const std::function<void(const WidePlan&, const Tensor&)>& launch);

/// The tile and splits with the least predicted time on a GPU of so many SMs.
WidePlan plan_wide(const Call& call, int units);
/// In clock cycles of an H200.
double predicted_cycles(const Call& call, const WidePlan& plan, int units);
/// For people: "128 x 256, 2 splits".
std::string describe(const WidePlan& plan);

void run_wide(const Call& call, const WidePlan& plan);

/// The types for the run-time compiler.
std::string type_of(const WideKernel& kernel);
std::string type_of(const WideSum& kernel);
const detail::NamedKernel& named(const WideKernel& kernel);
WideKernel wide_kernel(const Call& call, const WidePlan& plan);
WideSum wide_sum(const Call& call);

/// The same kernels as types: for Params, which are those of every tile and activation, and for the CPU target.
template <WideKernel k>
using WideHostKernel = DequantGemm<FormatOf<k>, ElementOf<k.dtype>, FunctorOf<k.activation>,
                                   DequantTiles<k.tile.w_rows, k.tile.x_rows, k.tile.w_stages, k.tile.x_stages, k.tile.band>, k.split,
                                   conditional<k.grouped, WeightOfGroup, OneWeight>>;
template <WideSum k>
using WideHostSum = SumTransposed<Linear<ElementOf<k.dtype>, FunctorOf<k.activation>, LinearOptions{.addends = k.addends}>>;

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline TileGrid wide_grid(const Call& call, const WidePlan& plan) {
  const auto tiles = [](std::int64_t n, int tile) { return static_cast<int>(ceil_div(n, tile)); };
  return {tiles(call.n(), plan.tile.w_rows), tiles(call.m(), plan.tile.x_rows), std::max(1, plan.splits)};
}
inline TileGrid wide_sum_grid(const Call& call) {
  constexpr int side = 32;  // SumTransposed::side
  return {static_cast<int>((call.n() + side - 1) / side), static_cast<int>((call.m() + side - 1) / side)};
}

/// Fills in the parameters of any of these kernels. `partial`: f32 [splits, N, M], if there are splits.
template <class Params>
void bind_wide(auto& bind, Params& p, const Call& call, const WidePlan& plan, const Tensor& partial) {
  const QuantizedMatrix& w = call.weight;
  const bool by_group = w.scales.rank() == 2, split = plan.splits > 0, transposed = !split && plan.tile.x_rows >= 128;
  const Tensor scales = by_group ? w.scales : w.scales.reshape({w.rows(), 1});
  const Tensor y_transposed = call.y.transpose(0, 1);
  Tensor bias;
  if (call.options.bias != nullptr) bias = call.options.bias->reshape({call.n(), 1});
  const bool has_bias = call.options.bias != nullptr;
  bind(p.w, w.values);
  bind(p.x, call.x);
  bind(p.scales, scales);
  bind(p.zeros, w.zeros.numel() > 0 ? &w.zeros : nullptr);
  bind(p.bias, has_bias ? &bias : nullptr);
  bind(p.y, transposed ? &call.y : nullptr);
  bind(p.y_transposed, !transposed && !split ? &y_transposed : nullptr);
  bind(p.partial, split ? &partial : nullptr);
  p.depth = static_cast<int>(call.k());
  p.splits = std::max(1, plan.splits);
  p.has_bias = has_bias;
}
template <class Params>
void bind_wide_sum(auto& bind, Params& p, const Call& call, const Tensor& partial) {
  bind(p.partial, partial);
  p.splits = static_cast<int>(partial.shape(0));
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

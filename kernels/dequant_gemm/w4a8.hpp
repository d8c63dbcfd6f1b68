#pragma once

#include <array>
#include <compare>
#include <string>

#include "kernels/dequant_gemm/kernels.hpp"
#include "kernels/dequant_gemm/w4a8.tile.hpp"

namespace tw::kernels::dequant_gemm {

/// Tiles for sm_90a, which fill its shared memory: sums of a group, their scaled total and the codes of two groups share the registers.
inline constexpr std::array<WideTile, 4> kW4A8Tiles{{
    {128, 32, 6, 16, 8},
    {128, 64, 5, 12, 8},
    {128, 128, 4, 7, 8},
    {128, 192, 3, 6, 8},
}};

/// One of the kernels for x of i8 by the values that name it: no template is instantiated on the host for tiles or activations.
struct W4A8Kernel {
  bool zeros = false;
  DType dtype = DType::bf16;  ///< of y
  Activation activation = Activation::none;
  bool split = false;  ///< sums over splits of K
  WideTile tile = {};
  auto operator<=>(const W4A8Kernel&) const = default;
};

/// The tile and splits with the least predicted time on a GPU of so many SMs.
WidePlan plan_w4a8(const Call& call, int units);
/// In clock cycles of an H200.
double predicted_w4a8_cycles(const Call& call, const WidePlan& plan, int units);

void run_w4a8(const Call& call, const WidePlan& plan);

/// The type for the run-time compiler.
std::string type_of(const W4A8Kernel& kernel);
W4A8Kernel w4a8_kernel(const Call& call, const WidePlan& plan);

/// The same kernel as a type: for Params, which are those of every tile and activation, and for the CPU target.
template <W4A8Kernel k>
using W4A8HostKernel = W4A8Gemm<k.zeros, ElementOf<k.dtype>, FunctorOf<k.activation>,
                                DequantTiles<k.tile.w_rows, k.tile.x_rows, k.tile.w_stages, k.tile.x_stages, k.tile.band>, k.split>;

/// Fills in the parameters of any of these kernels. `partial`: f32 [splits, N, M], if there are splits.
template <class Params>
void bind_w4a8(auto& bind, Params& p, const Call& call, const WidePlan& plan, const Tensor& partial) {
  const QuantizedMatrix& w = call.weight;
  const bool split = plan.splits > 0, staged = !split && !call.pairs() && plan.tile.x_rows >= 64;
  const Tensor y_transposed = call.y.transpose(0, 1);
  Tensor bias;
  if (call.options.bias != nullptr) bias = call.options.bias->reshape({call.n(), 1});
  const bool has_bias = call.options.bias != nullptr;
  bind(p.w, w.values);
  bind(p.x, call.x);
  bind(p.scales, w.scales);
  bind(p.zeros, w.zeros.numel() > 0 ? &w.zeros : nullptr);
  p.x_scales = call.options.x_scales->data<float>();
  bind(p.bias, has_bias ? &bias : nullptr);
  bind(p.y, staged ? &call.y : nullptr);
  bind(p.y_transposed, !staged && !split ? &y_transposed : nullptr);
  bind(p.partial, split ? &partial : nullptr);
  p.depth = static_cast<int>(call.k());
  p.splits = std::max(1, plan.splits);
  p.last_row = static_cast<int>(call.m()) - 1;
  p.has_bias = has_bias;
}

}  // namespace tw::kernels::dequant_gemm

#include "kernels/dequant_gemm/w4a8.hpp"

#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/workspace.hpp"

namespace tw::kernels::dequant_gemm {

namespace {

/// Up to so many rows of x the kernel for few rows reads W faster, though x is widened first.
constexpr std::int64_t kFewRows = 16;

bool starts_at_16_bytes(const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.data()) % 16 == 0; }

void launch_product(const Call& call, const WidePlan& plan, const Tensor& partial) {
  static KernelTable<W4A8Kernel> table(type_of, "kernels/dequant_gemm/w4a8.tile.hpp");
  const W4A8Kernel kernel = w4a8_kernel(call, plan);
  const auto launch_as = [&]<DType dtype>() {
    if (dtype != kernel.dtype) return;
    using Params = typename W4A8HostKernel<W4A8Kernel{.dtype = dtype}>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(table[kernel], call.stream, wide_grid(call, plan),
                                 [&](auto& bind, auto& p) { bind_w4a8(bind, p, call, plan, partial); });
  };
  launch_as.template operator()<DType::bf16>();
  launch_as.template operator()<DType::f16>();
}

}  // namespace

bool is_w4a8(const Call& call) {
  if (call.m() <= kFewRows || call.k() == 0 || size_of(call.y.dtype()) != 2 || generic_shared_bytes(call.stream) > 0) return false;
  return call.weight.group == 128 && starts_at_16_bytes(call.weight.values) && call.x.stride(0) % 16 == 0 && starts_at_16_bytes(call.x);
}

double predicted_w4a8_cycles(const Call& call, const WidePlan& plan, int units) {
  const WideTile& t = plan.tile;
  const TileGrid grid = wide_grid(call, plan);
  const int splits = std::max(1, plan.splits);
  const auto tiles = static_cast<std::int64_t>(grid.m) * grid.n;
  const auto slots = static_cast<double>(slots_of_split(call, splits));
  // For a slot of 256 columns, which are 128 bytes: products of 64 rows take half a cycle for each 32 codes and row of x. A scheduler
  // issues one of 32 lanes' instructions in a cycle, two of three slots at best: for each code 1.25, or 2.125 with zero points, for each
  // sum of a group 2, and what the loop needs besides (NOTES.md).
  const double products = t.w_rows / 64.0 * t.x_rows / 2.0 * 8;
  const double decoding = t.w_rows * 256.0 * (call.weight.zeros.numel() > 0 ? 2.125 : 1.25), scaling = t.w_rows * t.x_rows * 4.0;
  const double loop = t.w_rows / 64.0 * (150 + 40 * std::max(1, t.x_rows / 64));
  const double issue = ((decoding + scaling) / 128 + loop) * 1.5;
  const double busy = static_cast<double>(std::min<std::int64_t>(tiles * splits, units)) / units;
  const double memory = t.w_rows * 128 / 20.7 * busy;
  const double cache = (t.w_rows * 128 + t.x_rows * 256.0) / 45;
  const double slot = std::max({products * 1.05, issue, memory, cache});
  const double around = 2000 + t.w_rows * t.x_rows / 16.0;
  double time = static_cast<double>(ceil_div(tiles * splits, units)) * (slots * slot + around);
  if (plan.splits > 0) time += sum_cycles(call, splits, units);
  return time;
}

WidePlan plan_w4a8(const Call& call, int units) {
  return fastest_plan(call, kW4A8Tiles, [&](const WidePlan& plan) { return predicted_w4a8_cycles(call, plan, units); });
}

W4A8Kernel w4a8_kernel(const Call& call, const WidePlan& plan) {
  return {.zeros = call.weight.zeros.numel() > 0,
          .dtype = call.y.dtype(),
          .activation = plan.splits > 0 ? Activation::none : call.options.activation,
          .split = plan.splits > 0,
          .tile = plan.tile};
}

std::string type_of(const W4A8Kernel& k) {
  const WideTile& t = k.tile;
  constexpr const char* kSpace = "tw::kernels::dequant_gemm::";
  return tw::format("{0}W4A8Gemm<{1}, {2}, {3}, {0}DequantTiles<{4}, {5}, {6}, {7}, {8}>, {9}>", kSpace, bool_name(k.zeros),
                    element_name(k.dtype), functor_name(k.activation), t.w_rows, t.x_rows, t.w_stages, t.x_stages, t.band,
                    bool_name(k.split));
}

void run_w4a8(const Call& call) { run_w4a8(call, plan_w4a8(call, device_info(call.stream.device()).units)); }

void run_w4a8(const Call& call, const WidePlan& plan) {
  run_plan(call, plan, [&](const WidePlan& used, const Tensor& partial) { launch_product(call, used, partial); });
}

}  // namespace tw::kernels::dequant_gemm

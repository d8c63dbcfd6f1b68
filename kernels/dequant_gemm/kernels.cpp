#include "kernels/dequant_gemm/kernels.hpp"

#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/workspace.hpp"

namespace tw::kernels::dequant_gemm {

namespace {

constexpr const char* kSource = "kernels/dequant_gemm/dequant_gemm.tile.hpp";
constexpr int kSlotBytes = 128;  ///< of each row of W

/// The number of slots of W in K.
std::int64_t slots_of(const Call& call) { return ceil_div(call.weight.values.shape(1), kSlotBytes); }

/// The number of K splits actually used: `splits`, reduced so that no split is empty.
int used_splits(std::int64_t slots, int splits) { return static_cast<int>(ceil_div(slots, ceil_div(slots, splits))); }

bool starts_at_16_bytes(const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.data()) % 16 == 0; }

/// A kernel of each layout of Params, which tiles, groups and activations do not change.
template <WeightFormat format, DType dtype>
constexpr WideKernel with_params() {
  return {.format = format, .group = format == WeightFormat::int4 ? 32 : 0, .dtype = dtype};
}

void launch_product(const Call& call, const WidePlan& plan, const Tensor& partial) {
  const WideKernel kernel = wide_kernel(call, plan);
  const auto launch_as = [&]<WideKernel k>() {
    if (k.format != params_format(kernel.format) || k.dtype != kernel.dtype) return;
    using Params = typename WideHostKernel<k>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(named(kernel), call.stream, wide_grid(call, plan),
                                 [&](auto& bind, auto& p) { bind_wide(bind, p, call, plan, partial); });
  };
  const auto launch_types = [&]<DType dtype>() {
    launch_as.template operator()<with_params<WeightFormat::int8, dtype>()>();
    launch_as.template operator()<with_params<WeightFormat::fp8, dtype>()>();
    launch_as.template operator()<with_params<WeightFormat::int4, dtype>()>();
    launch_as.template operator()<with_params<WeightFormat::nf4, dtype>()>();
    launch_as.template operator()<with_params<WeightFormat::mxfp4, dtype>()>();
  };
  launch_types.template operator()<DType::bf16>();
  launch_types.template operator()<DType::f16>();
}

/// The activation whose Params are those of `activation`: pairs are loaded in wider pieces.
constexpr Activation params_activation(Activation activation) { return activation == Activation::swiglu ? activation : Activation::none; }

void launch_sum(const Call& call, const Tensor& partial) {
  static KernelTable<WideSum> table(type_of, kSource);
  const WideSum kernel = wide_sum(call);
  const auto launch_as = [&]<WideSum k>() {
    if (k.dtype != kernel.dtype || k.addends != kernel.addends || k.activation != params_activation(kernel.activation)) return;
    using Params = typename WideHostSum<k>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(table[kernel], call.stream, wide_sum_grid(call),
                                 [&](auto& bind, auto& p) { bind_wide_sum(bind, p, call, partial); });
  };
  launch_as.template operator()<WideSum{.dtype = DType::bf16}>();
  launch_as.template operator()<WideSum{.dtype = DType::bf16, .addends = true}>();
  launch_as.template operator()<WideSum{.dtype = DType::bf16, .activation = Activation::swiglu}>();
  launch_as.template operator()<WideSum{.dtype = DType::f16}>();
  launch_as.template operator()<WideSum{.dtype = DType::f16, .addends = true}>();
  launch_as.template operator()<WideSum{.dtype = DType::f16, .activation = Activation::swiglu}>();
}

}  // namespace

bool is_wide(const Call& call) {
  if (call.k() == 0 || size_of(call.x.dtype()) != 2 || generic_shared_bytes(call.stream) > 0) return false;
  return call.weight.values.shape(1) % 16 == 0 && starts_at_16_bytes(call.weight.values) && call.x.stride(0) % 8 == 0 &&
         starts_at_16_bytes(call.x);
}

double predicted_cycles(const Call& call, const WidePlan& plan, int units) {
  const WideTile& t = plan.tile;
  const int splits = std::max(1, plan.splits), codes = kSlotBytes * codes_in_byte(call.weight.format);
  const TileGrid grid = wide_grid(call, plan);
  const auto tiles = static_cast<std::int64_t>(grid.m) * grid.n;
  const auto slots = static_cast<double>(slots_of_split(call, splits));
  // For a slot: products of 64 rows take half a cycle for each 16 codes and row of x; a scheduler issues one of 32 lanes' instructions in a
  // cycle, two of three slots at best; an SM's share of the memory's read rate, and what it reads from the L2 cache.
  const double products = t.w_rows / 64.0 * t.x_rows / 2.0 * codes / 16.0;
  const double decoding = t.w_rows * static_cast<double>(codes) * 3.5 / 128 * 1.5;
  const double busy = static_cast<double>(std::min<std::int64_t>(tiles * splits, units)) / units;
  const double memory = t.w_rows * kSlotBytes / 20.7 * busy;
  const double cache = (t.w_rows * kSlotBytes + t.x_rows * codes * 2.0) / 45;
  const double slot = std::max({products * 1.05, decoding, memory, cache});
  // The start fills the ring; the end stores the sums, 16 of them in a cycle.
  const double around = 2000 + t.w_rows * t.x_rows / 16.0;
  const double rounds = static_cast<double>(ceil_div(tiles * splits, units));
  double time = rounds * (slots * slot + around);
  if (plan.splits > 0) time += sum_cycles(call, splits, units);
  return time;
}

std::int64_t slots_of_split(const Call& call, int splits) { return ceil_div(slots_of(call), splits); }

double sum_cycles(const Call& call, int splits, int units) {
  // A launch, and f32 sums that are written and read, from the L2 cache at best.
  return 5000 + static_cast<double>(call.m()) * static_cast<double>(call.n()) * splits * 8 / (units * 20.0);
}

WidePlan fastest_plan(const Call& call, std::span<const WideTile> tiles, const std::function<double(const WidePlan&)>& time_of) {
  constexpr int kMostSplits = 16;
  constexpr std::int64_t kLeastSlots = 2;
  const std::int64_t slots = slots_of(call);
  WidePlan best;
  double best_time = 0;
  for (const WideTile& tile : tiles) {
    for (int splits = call.options.accumulate ? 1 : 0; splits <= kMostSplits; ++splits) {
      if ((splits == 1 && !call.options.accumulate) || (splits > 1 && slots / splits < kLeastSlots)) continue;
      if (splits > 1 && used_splits(slots, splits) != splits) continue;
      const WidePlan plan{tile, splits};
      const double time = time_of(plan);
      if (best_time == 0 || time < best_time) best = plan, best_time = time;
    }
  }
  return best;
}

WidePlan plan_wide(const Call& call, int units) {
  return fastest_plan(call, kWideTiles, [&](const WidePlan& plan) { return predicted_cycles(call, plan, units); });
}

std::string describe(const WidePlan& plan) { return tw::format("{} x {}, {} splits", plan.tile.w_rows, plan.tile.x_rows, plan.splits); }

WideKernel wide_kernel(const Call& call, const WidePlan& plan) {
  const QuantizedMatrix& w = call.weight;
  return {.format = w.format,
          .group = w.group,
          .zeros = w.zeros.numel() > 0,
          .dtype = call.x.dtype(),
          .activation = plan.splits > 0 ? Activation::none : call.options.activation,
          .split = plan.splits > 0,
          .tile = plan.tile};
}
WideSum wide_sum(const Call& call) {
  return {.dtype = call.y.dtype(), .activation = call.options.activation, .addends = call.options.accumulate};
}

std::string type_of(const WideKernel& k) {
  const WideTile& t = k.tile;
  constexpr const char* kSpace = "tw::kernels::dequant_gemm::";
  return tw::format("{0}DequantGemm<{1}, {2}, {3}, {0}DequantTiles<{4}, {5}, {6}, {7}, {8}>, {9}{10}>", kSpace,
                    format_name(k.format, k.group, k.zeros), element_name(k.dtype), functor_name(k.activation), t.w_rows, t.x_rows,
                    t.w_stages, t.x_stages, t.band, bool_name(k.split), weights_name(k.grouped));
}
std::string type_of(const WideSum& k) {
  return tw::format("tw::kernels::dequant_gemm::SumTransposed<{}>", linear_name(k.dtype, k.activation, {.addends = k.addends}));
}

const detail::NamedKernel& named(const WideKernel& kernel) {
  static KernelTable<WideKernel> table(type_of, kSource);
  return table[kernel];
}

void run_wide(const Call& call) { run_wide(call, plan_wide(call, device_info(call.stream.device()).units)); }

void run_wide(const Call& call, const WidePlan& plan) {
  run_plan(call, plan, [&](const WidePlan& used, const Tensor& partial) { launch_product(call, used, partial); });
}

void run_plan(const Call& call, const WidePlan& plan, const std::function<void(const WidePlan&, const Tensor&)>& launch) {
  if (plan.splits == 0) return launch(plan, {});
  const WidePlan used{plan.tile, used_splits(slots_of(call), plan.splits)};
  // Rows of sums start at multiples of 16 bytes.
  const std::int64_t m = call.m(), pitch = ceil_div(m, 4) * 4;
  const Tensor partial = workspace({used.splits, call.n(), pitch}, DType::f32, call.stream).slice(2, 0, m);
  launch(used, partial);
  launch_sum(call, partial);
}

}  // namespace tw::kernels::dequant_gemm

#include "kernels/dequant_gemm/skinny.hpp"

#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"

namespace tw::kernels::dequant_gemm {

namespace {

constexpr int kMostRows = 16;         ///< of x
constexpr int kRingBytes = 96 << 10;  ///< of W in flight in a block: three times what an SM needs to read at its share of the rate
constexpr int kMostStages = 8;
constexpr int kColumns = 128 * kSkinnyWarps;  ///< SkinnyDequantGemm::depth

SkinnyTile tile_for(const Call& call, int units, std::int64_t generic_shared) {
  SkinnyTile tile;
  if (call.m() > 8) tile.x_rows = kMostRows;
  // 16 x 8 sums would be too few for 256 threads.
  if (call.n() <= std::int64_t{16} * units) tile.rows = tile.x_rows = 16;
  const int slot = tile.rows * kColumns / (call.weight.format == WeightFormat::int4 ? 2 : 1);
  tile.stages = std::min(kMostStages, kRingBytes / slot);
  if (generic_shared > 0) tile.stages = generic_stages(generic_shared, slot, kSkinnyWarps * tile.rows * tile.x_rows * 4, tile.stages);
  return tile;
}

/// A kernel of each layout of Params, which tiles, groups and activations do not change. Its results are as wide as any, because y's
/// alignment is checked against them.
template <WeightFormat format, DType dtype, bool addends>
constexpr SkinnyKernel with_params() {
  return {.format = format, .group = format == WeightFormat::int4 ? 32 : 0, .dtype = dtype, .addends = addends, .tile = {32, kMostRows, 3}};
}

}  // namespace

bool is_skinny(const Call& call) {
  const Tensor& values = call.weight.values;
  return call.m() <= kMostRows && call.k() > 0 && size_of(call.x.dtype()) == 2 && values.shape(1) % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(values.data()) % 16 == 0;
}

SkinnyKernel skinny_kernel(const Call& call, int units, std::int64_t generic_shared) {
  const QuantizedMatrix& w = call.weight;
  return {.format = w.format,
          .group = w.group,
          .zeros = w.zeros.numel() > 0,
          .dtype = call.x.dtype(),
          .activation = call.options.activation,
          .addends = call.options.accumulate,
          .tile = tile_for(call, units, generic_shared)};
}

std::string type_of(const SkinnyKernel& k) {
  const std::string format = k.format == WeightFormat::int4
                                 ? tw::format("ScaledGroups<{}, {}>", k.group, bool_name(k.zeros))
                                 : tw::format("ScaledRows<{}>", k.format == WeightFormat::fp8 ? "tw::fp8_e4m3" : "tw::i8");
  return tw::format("tw::kernels::dequant_gemm::SkinnyDequantGemm<tw::kernels::dequant_gemm::{}, {}, {}, {}, {}, {}, {}>", format,
                    element_name(k.dtype), linear_name(k.dtype, k.activation, {.addends = k.addends}), k.tile.rows, k.tile.x_rows,
                    k.tile.stages, kSkinnyWarps);
}

const detail::NamedKernel& named(const SkinnyKernel& kernel) {
  static KernelTable<SkinnyKernel> table(type_of, "kernels/dequant_gemm/skinny.tile.hpp");
  return table[kernel];
}

void run_skinny(const Call& call) {
  const SkinnyKernel kernel = skinny_kernel(call, device_info(call.stream.device()).units, generic_shared_bytes(call.stream));
  const auto launch_as = [&]<SkinnyKernel k>() {
    if (k.format != kernel.format || k.dtype != kernel.dtype || k.addends != kernel.addends) return;
    using Params = typename SkinnyHostKernel<k>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(named(kernel), call.stream, skinny_grid(call, kernel.tile),
                                 [&](auto& bind, auto& p) { bind_skinny(bind, p, call); });
  };
  const auto launch_types = [&]<DType dtype, bool addends>() {
    launch_as.template operator()<with_params<WeightFormat::int8, dtype, addends>()>();
    launch_as.template operator()<with_params<WeightFormat::fp8, dtype, addends>()>();
    launch_as.template operator()<with_params<WeightFormat::int4, dtype, addends>()>();
  };
  launch_types.template operator()<DType::bf16, false>();
  launch_types.template operator()<DType::bf16, true>();
  launch_types.template operator()<DType::f16, false>();
  launch_types.template operator()<DType::f16, true>();
}

}  // namespace tw::kernels::dequant_gemm

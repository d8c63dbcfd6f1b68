#include "kernels/dequant_gemm/skinny.hpp"

#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"

namespace tw::kernels::dequant_gemm {

namespace {

constexpr int kMostRows = 16;          ///< of x
constexpr int kRingBytes = 192 << 10;  ///< of W in flight on an SM, in the rings of all its blocks
constexpr int kMostStages = 8;

/// Two blocks on an SM where registers allow it: with 16 rows of x they do not. 32 rows of W halve the loads of x, but up to 8 rows of x,
/// which are few bytes, only if there are enough tiles for all SMs.
SkinnyTile tile_for(const Call& call, int units, std::int64_t generic_shared) {
  SkinnyTile tile{.rows = 16, .x_rows = 8};
  if (call.m() > tile.x_rows) tile = {.rows = 32, .x_rows = kMostRows, .blocks = 1};
  if (generic_shared > 0) tile.blocks = 1;
  if (call.n() > std::int64_t{16} * units * tile.blocks) tile.rows = 32;
  return with_slots(tile, call.weight.format, generic_shared);
}

/// A kernel of each layout of Params (see params_format()), which tiles, groups and activations do not change. Its results are as wide as
/// any, because y's alignment is checked against them.
template <WeightFormat format, DType dtype, bool addends>
constexpr SkinnyKernel with_params() {
  return {.format = format,
          .group = format == WeightFormat::int4 ? 32 : 0,
          .dtype = dtype,
          .addends = addends,
          .tile = {.rows = 32, .x_rows = kMostRows}};
}

}  // namespace

SkinnyTile with_slots(SkinnyTile tile, WeightFormat format, std::int64_t generic_shared) {
  const int columns = 128 * tile.warps;  // SkinnyDequantGemm::depth
  const int slot = tile.rows * columns / codes_in_byte(format);
  tile.stages = std::min(kMostStages, kRingBytes / std::max(2, tile.blocks) / slot);  // a single block gets no more than one of two does
  if (generic_shared > 0) tile.stages = generic_stages(generic_shared, slot, tile.warps * tile.rows * tile.x_rows * 4, tile.stages);
  return tile;
}

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
  return tw::format("tw::kernels::dequant_gemm::SkinnyDequantGemm<{}, {}, {}, {}, {}, {}, {}, {}{}>",
                    format_name(k.format, k.group, k.zeros), element_name(k.dtype),
                    linear_name(k.dtype, k.activation, {.addends = k.addends}), k.tile.rows, k.tile.x_rows, k.tile.stages, k.tile.warps,
                    k.tile.blocks, weights_name(k.grouped));
}

const detail::NamedKernel& named(const SkinnyKernel& kernel) {
  static KernelTable<SkinnyKernel> table(type_of, "kernels/dequant_gemm/skinny.tile.hpp");
  return table[kernel];
}

std::vector<SkinnyTile> skinny_tiles(const Call& call) {
  std::vector<SkinnyTile> tiles;
  if (call.m() <= 8) tiles = {{.rows = 16}, {.rows = 32}, {.rows = 16, .warps = 4, .blocks = 3}, {.rows = 16, .warps = 16, .blocks = 1}};
  // A third block leaves 64 registers.
  if (call.m() <= 8 && codes_in_byte(call.weight.format) == 1) tiles.push_back({.rows = 16, .blocks = 3});
  if (call.m() > 8) tiles = {{.rows = 16, .x_rows = kMostRows, .blocks = 1}, {.rows = 32, .x_rows = kMostRows, .blocks = 1}};
  for (SkinnyTile& tile : tiles) tile = with_slots(tile, call.weight.format, 0);
  return tiles;
}

std::string describe(const SkinnyTile& tile) {
  return tw::format("{} x {}, {} slots, {} warps, {} per SM", tile.rows, tile.x_rows, tile.stages, tile.warps, tile.blocks);
}

void run_skinny(const Call& call) {
  run_skinny(call, skinny_kernel(call, device_info(call.stream.device()).units, generic_shared_bytes(call.stream)));
}

void run_skinny(const Call& call, const SkinnyKernel& kernel) {
  const auto launch_as = [&]<SkinnyKernel k>() {
    if (k.format != params_format(kernel.format) || k.dtype != kernel.dtype || k.addends != kernel.addends) return;
    using Params = typename SkinnyHostKernel<k>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(named(kernel), call.stream, skinny_grid(call, kernel.tile),
                                 [&](auto& bind, auto& p) { bind_skinny(bind, p, call); });
  };
  const auto launch_types = [&]<DType dtype, bool addends>() {
    launch_as.template operator()<with_params<WeightFormat::int8, dtype, addends>()>();
    launch_as.template operator()<with_params<WeightFormat::fp8, dtype, addends>()>();
    launch_as.template operator()<with_params<WeightFormat::int4, dtype, addends>()>();
    launch_as.template operator()<with_params<WeightFormat::nf4, dtype, addends>()>();
    launch_as.template operator()<with_params<WeightFormat::mxfp4, dtype, addends>()>();
  };
  launch_types.template operator()<DType::bf16, false>();
  launch_types.template operator()<DType::bf16, true>();
  launch_types.template operator()<DType::f16, false>();
  launch_types.template operator()<DType::f16, true>();
}

}  // namespace tw::kernels::dequant_gemm

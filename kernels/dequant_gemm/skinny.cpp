#include "kernels/dequant_gemm/skinny.hpp"

#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"

namespace tw::kernels::dequant_gemm {

namespace {

constexpr int kMostRows = 16;          ///< of x
constexpr int kRingBytes = 192 << 10;  ///< of W in flight on an SM, in the rings of all its blocks
constexpr int kMostStages = 8;
constexpr int kOneRowBytes = 8 << 10;  ///< at most: of a slot, for x and scales

/// Whether the kernel for one row can copy x and the scales: rows of scales are whole pieces.
bool takes_one_row(const Call& call) {
  const Tensor& scales = call.weight.scales;
  const auto whole = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  return call.m() == 1 && scales.rank() == 2 && scales.stride(0) * size_of(scales.dtype()) % 16 == 0 && whole(scales.data()) &&
         call.k() % 8 == 0 && whole(call.x.data());
}

/// Two blocks on an SM where registers allow it: with 16 rows of x they do not. More rows of W are fewer loads of x, but leave SMs without
/// a tile, or with one more than others.
SkinnyTile tile_for(const Call& call, int units, std::int64_t generic_shared) {
  const bool gpu_copies = generic_shared == 0;
  const auto tiles = [&](int rows) { return (call.n() + rows - 1) / rows; };
  SkinnyTile tile{.rows = 16, .x_rows = 8};
  if (call.m() > tile.x_rows) {
    tile = {.rows = 32, .x_rows = kMostRows, .blocks = 1};
    // 32 rows take 0.64 of the time of 64, for whose scales not all formats have registers.
    const QuantizedMatrix& w = call.weight;
    const bool fits = w.group >= 64 || (w.group > 0 && w.zeros.numel() == 0 && w.format != WeightFormat::mxfp4);
    const auto rounds = [&](int rows) { return (tiles(rows) + units - 1) / units; };
    if (fits && gpu_copies && 25 * rounds(64) <= 16 * rounds(32)) tile.rows = 64;
  } else if (gpu_copies && takes_one_row(call)) {
    // Blocks that begin while the launch before ends may share an SM while others have none: a tile for each SM is too few.
    tile.x_rows = 1;
    if (10 * tiles(32) >= 7 * units) tile.rows = 32;
    if (10 * tiles(64) >= 13 * units) tile.rows = 64;
    return with_slots(tile, call.weight.format, generic_shared);
  }
  if (!gpu_copies) tile.blocks = 1;
  if (call.n() > std::int64_t{16} * units * tile.blocks) tile.rows = std::max(tile.rows, 32);
  return with_slots(tile, call.weight.format, generic_shared);
}

/// A kernel of each layout of Params (see params_format()), which tiles, groups and activations do not change. Its results are as wide as
/// any, because y's alignment is checked against them.
template <WeightFormat format, DType dtype, bool addends>
constexpr SkinnyKernel with_params(int x_rows) {
  return {.format = format,
          .group = format == WeightFormat::int4 ? 32 : 0,
          .dtype = dtype,
          .addends = addends,
          .tile = {.rows = 32, .x_rows = x_rows}};
}

}  // namespace

SkinnyTile with_slots(SkinnyTile tile, WeightFormat format, std::int64_t generic_shared) {
  const int columns = 128 * tile.warps;  // SkinnyDequantGemm::depth
  int slot = tile.rows * columns / codes_in_byte(format);
  if (tile.x_rows == 1) slot += kOneRowBytes;
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
  if (call.m() > 8)
    tiles = {{.rows = 16, .x_rows = kMostRows, .blocks = 1},
             {.rows = 32, .x_rows = kMostRows, .blocks = 1},
             {.rows = 64, .x_rows = kMostRows, .blocks = 1}};
  if (takes_one_row(call)) tiles.insert(tiles.end(), {{.rows = 16, .x_rows = 1}, {.rows = 32, .x_rows = 1}, {.rows = 64, .x_rows = 1}});
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
    if ((k.tile.x_rows == 1) != (kernel.tile.x_rows == 1)) return;
    using Params = typename SkinnyHostKernel<k>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(named(kernel), call.stream, skinny_grid(call, kernel.tile),
                                 [&](auto& bind, auto& p) { bind_skinny(bind, p, call); });
  };
  const auto launch_types = [&]<DType dtype, bool addends>() {
    launch_as.template operator()<with_params<WeightFormat::int8, dtype, addends>(kMostRows)>();
    launch_as.template operator()<with_params<WeightFormat::fp8, dtype, addends>(kMostRows)>();
    launch_as.template operator()<with_params<WeightFormat::int4, dtype, addends>(kMostRows)>();
    launch_as.template operator()<with_params<WeightFormat::int4, dtype, addends>(1)>();
    launch_as.template operator()<with_params<WeightFormat::nf4, dtype, addends>(kMostRows)>();
    launch_as.template operator()<with_params<WeightFormat::nf4, dtype, addends>(1)>();
    launch_as.template operator()<with_params<WeightFormat::mxfp4, dtype, addends>(kMostRows)>();
    launch_as.template operator()<with_params<WeightFormat::mxfp4, dtype, addends>(1)>();
  };
  launch_types.template operator()<DType::bf16, false>();
  launch_types.template operator()<DType::bf16, true>();
  launch_types.template operator()<DType::f16, false>();
  launch_types.template operator()<DType::f16, true>();
}

}  // namespace tw::kernels::dequant_gemm

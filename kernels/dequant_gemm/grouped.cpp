#include "kernels/dequant_gemm/grouped.hpp"

#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"

namespace tw::kernels::dequant_gemm {

namespace {

/// A tile and the time that its kernel takes for an element of W, in picoseconds: of mxfp4 in bf16, with enough tiles for all SMs of an
/// H200 (from NOTES.md).
struct CostedGroupedTile {
  GroupedTile tile;
  double time;
};
constexpr SkinnyTile kSkinny8{.rows = 32, .x_rows = 8, .blocks = 2}, kSkinny16{.rows = 32, .x_rows = 16, .blocks = 1};
/// All tiles of a weight for some rows of x come one after the other, so that x is read from memory once.
constexpr WideTile in_wide_bands(WideTile tile) {
  tile.band = 64;
  return tile;
}
const CostedGroupedTile kGroupedTiles[] = {{kSkinny8, 0.28},
                                           {kSkinny16, 0.4},
                                           {in_wide_bands(kWideTiles[0]), 0.57},
                                           {in_wide_bands(kWideTiles[1]), 0.66},
                                           {in_wide_bands(kWideTiles[2]), 0.8},
                                           {in_wide_bands(kWideTiles[3]), 1.05}};

/// Tiles of x of random groups: in half of a group's last tile there are no rows.
double expected_tiles(std::int64_t rows, std::int64_t groups, int x_rows) {
  const auto used = static_cast<double>(std::min(rows, groups));
  return std::max(used, static_cast<double>(rows) / x_rows + used / 2);
}

/// Kernels of both layouts of Params in both types.
template <class Kernel, WeightFormat format, DType dtype>
constexpr Kernel with_params(typename std::remove_const<decltype(Kernel::tile)>::type tile) {
  return {.format = format, .group = 32, .dtype = dtype, .tile = tile, .grouped = true};
}
template <class Kernel>
Kernel kernel_of(const Call& call, const decltype(Kernel::tile)& tile) {
  return {.format = call.weight.format, .group = call.weight.group, .dtype = call.x.dtype(), .tile = tile, .grouped = true};
}

}  // namespace

int x_rows(const GroupedTile& tile) {
  return std::visit([](const auto& t) { return t.x_rows; }, tile);
}

std::string describe(const GroupedTile& tile) {
  if (const auto* wide = std::get_if<WideTile>(&tile)) return tw::format("{} x {}", wide->w_rows, wide->x_rows);
  return "skinny " + describe(std::get<SkinnyTile>(tile));
}

GroupedTile choose_grouped_tile(std::int64_t rows, std::int64_t groups, std::int64_t generic_shared) {
  const auto time = [&](const CostedGroupedTile& t) { return expected_tiles(rows, groups, x_rows(t.tile)) * t.time; };
  const std::size_t count = generic_shared > 0 ? 2 : std::size(kGroupedTiles);  // only the skinny kernel runs on any GPU
  return std::min_element(kGroupedTiles, kGroupedTiles + count, [&](const auto& a, const auto& b) { return time(a) < time(b); })->tile;
}

std::vector<GroupedTile> grouped_tiles() {
  std::vector<GroupedTile> tiles;
  for (const CostedGroupedTile& t : kGroupedTiles) tiles.push_back(t.tile);
  return tiles;
}

SkinnyTile fit_grouped(SkinnyTile tile, WeightFormat format, std::int64_t n, std::int64_t tiles, int units, std::int64_t generic_shared) {
  if (generic_shared > 0) tile.blocks = 1;
  // Tiles of 16 rows load x twice as often, but their last round may be shorter.
  const auto rounds = [&](int rows) { return static_cast<double>(ceil_div(ceil_div(n, rows) * tiles, std::int64_t{units} * tile.blocks)); };
  tile.rows = 2 * rounds(32) > 1.25 * rounds(16) ? 16 : 32;
  return with_slots(tile, format, generic_shared);
}

GroupedProducts::GroupedProducts(const Tensor& offsets, std::int64_t rows, const Stream& stream) : offsets_(offsets), stream_(stream) {
  if (!stream.device().is_cuda()) return;
  const std::int64_t shared = generic_shared_bytes(stream);
  *this = GroupedProducts(offsets, rows, choose_grouped_tile(rows, offsets.shape(0) - 1, shared), stream);
}

GroupedProducts::GroupedProducts(const Tensor& offsets, std::int64_t rows, const GroupedTile& tile, const Stream& stream)
    : offsets_(offsets),
      stream_(stream),
      generic_shared_(generic_shared_bytes(stream)),
      tile_(tile),
      tiles_(grouped_gemm::list_tiles(offsets, static_cast<int>(rows), x_rows(tile), stream)) {}

void GroupedProducts::multiply(const Tensor& x, const QuantizedMatrix& weight, const Tensor& y) const {
  const DequantGemmOptions none;
  const Call call{x, weight, y, none, stream_};
  if (y.numel() == 0) return;
  if (!stream_.device().is_cuda()) return multiply_on_cpu(call);
  if (const auto* wide = std::get_if<WideTile>(&tile_)) return launch_wide(call, *wide);
  launch_skinny(call, fit_grouped(std::get<SkinnyTile>(tile_), weight.format, call.n(), std::min(tiles_.shape(0), offsets_.shape(0) - 1),
                                  device_info(stream_.device()).units, generic_shared_));
}

void GroupedProducts::multiply_on_cpu(const Call& call) const {
  const auto* const offsets = offsets_.data<i32>();
  const auto at = [&](std::int64_t g) { return std::clamp<std::int64_t>(offsets[g], 0, call.m()); };
  for (std::int64_t g = 0; g + 1 < offsets_.shape(0); ++g) {
    const std::int64_t begin = at(g), end = std::max(begin, at(g + 1)), n = call.n();
    if (begin < end)
      tw::dequant_gemm(call.x.slice(0, begin, end), call.weight.slice(g * n, (g + 1) * n), call.y.slice(0, begin, end),
                       {.stream = call.stream});
  }
}

void GroupedProducts::launch_skinny(const Call& call, const SkinnyTile& tile) const {
  const SkinnyKernel kernel = kernel_of<SkinnyKernel>(call, tile);
  const auto launch_as = [&]<SkinnyKernel k>() {
    if (k.format != kernel.format || k.dtype != kernel.dtype) return;
    using Params = typename SkinnyHostKernel<k>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(named(kernel), call.stream, grouped_grid(call, tile, tiles_),
                                 [&](auto& bind, auto& p) { bind_grouped(bind, p, call, tile, tiles_); });
  };
  launch_as.template operator()<with_params<SkinnyKernel, WeightFormat::mxfp4, DType::bf16>(kSkinny16)>();
  launch_as.template operator()<with_params<SkinnyKernel, WeightFormat::mxfp4, DType::f16>(kSkinny16)>();
  launch_as.template operator()<with_params<SkinnyKernel, WeightFormat::int4, DType::bf16>(kSkinny16)>();
  launch_as.template operator()<with_params<SkinnyKernel, WeightFormat::int4, DType::f16>(kSkinny16)>();
}

void GroupedProducts::launch_wide(const Call& call, const WideTile& tile) const {
  const WideKernel kernel = kernel_of<WideKernel>(call, tile);
  const auto launch_as = [&]<WideKernel k>() {
    if (k.format != kernel.format || k.dtype != kernel.dtype) return;
    using Params = typename WideHostKernel<k>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(named(kernel), call.stream, grouped_grid(call, tile, tiles_),
                                 [&](auto& bind, auto& p) { bind_grouped(bind, p, call, tile, tiles_); });
  };
  launch_as.template operator()<with_params<WideKernel, WeightFormat::mxfp4, DType::bf16>({})>();
  launch_as.template operator()<with_params<WideKernel, WeightFormat::mxfp4, DType::f16>({})>();
  launch_as.template operator()<with_params<WideKernel, WeightFormat::int4, DType::bf16>({})>();
  launch_as.template operator()<with_params<WideKernel, WeightFormat::int4, DType::f16>({})>();
}

}  // namespace tw::kernels::dequant_gemm

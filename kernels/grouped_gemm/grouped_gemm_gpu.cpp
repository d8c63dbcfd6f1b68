#include <array>

#include "kernels/check.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/grouped_gemm/kernels.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/device.hpp"

namespace tw::kernels::grouped_gemm {

namespace {

/// A kernel of each layout of Params.
constexpr ProductTile kAnyTile{64, 64, 2};
template <Kernel k>
using Params = typename HostKernel<k>::template On<sm_90a::Target<>>::Params;

/// What the call asks for, or the heuristic's choice.
ProductTile asked_tile(int config, bool b_rows, bool addends, std::int64_t generic_shared, auto choose) {
  if (config < 0) return choose();
  const std::vector<CostedTile> all = configs(generic_shared);
  require(
      config < static_cast<int>(all.size()) && valid(all[static_cast<std::size_t>(config)], b_rows, addends),
      "grouped_gemm: config is {}; it must be below {}, with B stored [K, N] a multiple of 64 columns, and when accumulating at most 128",
      config, all.size());
  return all[static_cast<std::size_t>(config)];
}

Tensor tiles_of(const Call& call, const ProductTile& tile) {
  return list_tiles(call.offsets, call.m(), tile.bm * tile.cluster, call.stream);
}

template <DType dtype>
void launch(const Call& call, bool b_rows, const ProductTile& tile) {
  const Tensor tiles = tiles_of(call, tile);
  const Kernel kernel{.dtype = dtype, .out = dtype, .b_rows = b_rows, .activation = call.options.activation, .tile = tile};
  using P = Params<Kernel{.dtype = dtype, .out = dtype, .tile = kAnyTile}>;
  detail::launch_named<P>(named(kernel), call.stream, grid_of(call, tile),
                          [&](auto& bind, auto& p) { bind_grouped(bind, p, call, b_rows, tiles); });
}

void launch_block_scaled(Call call, const ProductTile& tile) {
  call.a_scale = gemm::tma_rows(call.a_scale.transpose(0, 1), call.stream).transpose(0, 1);
  call.b_scale = gemm::tma_rows(call.b_scale, call.stream);
  const Tensor tiles = tiles_of(call, tile);
  const Kernel kernel{.form = Kernel::block_scaled, .dtype = DType::fp8_e4m3, .tile = tile};
  using P = Params<Kernel{.form = Kernel::block_scaled, .dtype = DType::fp8_e4m3, .tile = kAnyTile}>;
  detail::launch_named<P>(named(kernel), call.stream, grid_of(call, tile),
                          [&](auto& bind, auto& p) { bind_block_scaled(bind, p, call, tiles); });
}

template <DType dtype, DType out>
void launch(const DepthCall& call, const ProductTile& tile) {
  const Kernel kernel{.form = Kernel::k_grouped, .dtype = dtype, .out = out, .addends = call.options.accumulate, .tile = tile};
  using P = Params<Kernel{.form = Kernel::k_grouped, .dtype = dtype, .out = out, .tile = kAnyTile}>;
  detail::launch_named<P>(named(kernel), call.stream, grid_of(call, tile), [&](auto& bind, auto& p) { bind_k_grouped(bind, p, call); });
}

}  // namespace

Tensor list_tiles(const Tensor& offsets, int rows, int tile_rows, const Stream& stream) {
  constexpr Kernel list{.form = Kernel::list};
  const int groups = static_cast<int>(offsets.shape(0)) - 1;
  Tensor tiles = workspace({list_size(rows, groups, tile_rows), ListedGroups::numbers}, DType::i32, stream);
  detail::launch_named<Params<list>>(named(list), stream, {.m = groups},
                                     [&](auto&, auto& p) { bind_list(p, offsets, rows, tile_rows, tiles); });
  return tiles;
}

void run_on_gpu(const Call& call) {
  if (call.block_scaled()) {
    const std::int64_t shared = generic_shared_bytes(call.stream);
    const ProductTile tile = choose_tile(call, false, device_info(call.stream.device()).units, shared);
    return launch_block_scaled(call, shared > 0 ? gemm::fit_generic(tile, shared) : tile);
  }
  const bool b_rows = call.b.stride(2) != 1 && call.b.stride(1) == 1 && call.k() > 1;
  const std::int64_t generic = generic_shared_bytes(call.stream);
  const ProductTile tile = asked_tile(call.options.config, b_rows, false, generic,
                                      [&] { return choose_tile(call, b_rows, device_info(call.stream.device()).units, generic); });
  call.a.dtype() == DType::f16 ? launch<DType::f16>(call, b_rows, tile) : launch<DType::bf16>(call, b_rows, tile);
}

void run_on_gpu(const DepthCall& call) {
  const std::int64_t generic = generic_shared_bytes(call.stream);
  const ProductTile tile = asked_tile(call.options.config, true, call.options.accumulate, generic,
                                      [&] { return choose_tile(call, device_info(call.stream.device()).units, generic); });
  const bool wide = call.d.dtype() == DType::f32;
  if (call.a.dtype() == DType::f16) return wide ? launch<DType::f16, DType::f32>(call, tile) : launch<DType::f16, DType::f16>(call, tile);
  wide ? launch<DType::bf16, DType::f32>(call, tile) : launch<DType::bf16, DType::bf16>(call, tile);
}

}  // namespace tw::kernels::grouped_gemm

#include <array>
#include <cstdlib>
#include <utility>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/sparse_gemm/kernels.hpp"
#include "tilewave/device.hpp"

namespace tw::kernels::sparse_gemm {

namespace {

/// A kernel of each layout of Params: neither tiles nor activations change it.
constexpr std::array kDTypes{DType::f16, DType::bf16, DType::fp8_e4m3, DType::i8};
template <DType dtype>
using Params = typename HostKernel<Kernel{.dtype = dtype, .tile = {64, 64, 2}}>::template On<sm_90a::Target<>>::Params;

ProductTile tile_of(const Call& call, int units, std::int64_t generic_shared) {
  const int config = call.options.config;
  if (config < 0) return choose_tile(call, units, generic_shared);
  const std::vector<CostedTile> all = configs(generic_shared, static_cast<int>(size_of(call.dtype())));
  require(
      config < static_cast<int>(all.size()) && valid(call, all[static_cast<std::size_t>(config)]),
      "sparse_gemm: config is {}; it must be below {}, with beta or a residual have at most 128 rows and columns, and in sparse_linear() "
      "with gelu not have 192 rows",
      config, all.size());
  return all[static_cast<std::size_t>(config)];
}

}  // namespace

void run_on_gpu(const Call& call) {
  const DeviceInfo& device = device_info(call.stream.device());
  const std::int64_t generic_shared = generic_shared_bytes(call.stream);
  // Instructions for 8-bit floats are as old as sm_89.
  require(call.dtype() != DType::fp8_e4m3 || std::atoi(device.isa.c_str() + 3) >= 89,
          "sparse_gemm: values are {}; on a GPU fp8_e4m3 needs compute capability 8.9 or later, and {} is {}", call.a.values, device.name,
          device.isa);
  const bool b_rows = size_of(call.dtype()) == 2 && gemm::stored_layout(call.a.values, call.b).b_rows;
  const Kernel kernel{.dtype = call.dtype(),
                      .b_rows = b_rows,
                      .transposed = call.stores_transposed(),
                      .activation = call.options.activation,
                      .addends = call.addends(),
                      .tile = tile_of(call, device.units, generic_shared)};
  const auto launch_as = [&]<DType dtype>() {
    if (dtype != call.dtype()) return;
    detail::launch_named<Params<dtype>>(named(kernel), call.stream, grid_of(call, kernel.tile),
                                        [&](auto& bind, auto& p) { bind_product(bind, p, call, kernel); });
  };
  [&]<std::size_t... i>(std::index_sequence<i...>) { (launch_as.template operator()<kDTypes[i]>(), ...); }
  (std::make_index_sequence<kDTypes.size()>());
}

}  // namespace tw::kernels::sparse_gemm

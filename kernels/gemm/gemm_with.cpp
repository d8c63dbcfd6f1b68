#include "tilewave/gemm_with.hpp"

#include <array>

#include "kernels/check.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/kernels.hpp"
#include "runtime/target.hpp"

namespace tw::detail {

namespace {

using kernels::gemm::Config;
using kernels::gemm::Kernel;
using kernels::gemm::Layout;

constexpr const char* kOp = "gemm_with";

/// Tiles on a GPU, with less of the ring than gemm() has: the epilogue has memory of its own.
std::array<Config, 2> tiles(std::int64_t generic_shared) {
  constexpr int kEpilogueBytes = 64 << 10;
  std::array<Config, 2> tiles{{{128, kGemmWithColumns, 5, 1, 16}, {64, kGemmWithColumns, 6, 1, 16}}};
  if (generic_shared > 0)
    for (Config& tile : tiles) tile = kernels::gemm::fit_generic(tile, generic_shared, kEpilogueBytes);
  return tiles;
}

}  // namespace

GemmWithCall check_gemm_with(const EpilogueInfo& epilogue, const Tensor& a, const Tensor& b, DType dtype, const GemmWithOptions& options) {
  const Stream stream = options.stream ? *options.stream : Stream::standard(a.device());
  const Device device = stream.device();
  check_operand(kOp, "a", a, dtype, device);
  check_operand(kOp, "b", b, dtype, device);
  const auto [m, n, k, batch] = kernels::gemm::check_extents(kOp, a, b);
  require(k > 0 || dtype != DType::i8, "{}: a is {} and b is {}; for i8 K must be at least 1", kOp, a, b);
  const Tensor columns_b = b.transpose(-2, -1);
  const auto grid = [&, m = m, n = n, batch = batch](int rows) {
    return TileGrid{ceil_div(m, rows), ceil_div(n, kGemmWithColumns), batch};
  };
  if (!device.is_cuda()) return {a, columns_b, k, grid(kGemmWithCpuRows), nullptr, stream};
  require(!epilogue.source.empty() || grid(1).count() == 0,
          "epilogue {} cannot run on a GPU: it has no `source`, the embedded *.tile.hpp file that defines it", epilogue.type);
  const Layout layout = kernel_layout(dtype, kernels::gemm::stored_layout(a, columns_b));
  const kernels::gemm::Problem problem{.m = m,
                                       .n = n,
                                       .k = k,
                                       .batch = batch,
                                       .element_bytes = static_cast<int>(size_of(dtype)),
                                       .addends = false,
                                       .b_rows = layout.b_rows,
                                       .units = device_info(device).units};
  const std::array<Config, 2> choices = tiles(kernels::generic_shared_bytes(stream));
  const auto time = [&](const Config& tile) { return predicted_time(problem, kernels::costed(tile), 1); };
  const Config& tile = time(choices[0]) <= time(choices[1]) ? choices[0] : choices[1];
  const NamedKernel& kernel = named(Kernel{.dtype = dtype, .layout = layout, .tile = tile, .epilogue = &epilogue});
  return {layout.a_rows ? a.transpose(-2, -1) : a, layout.b_rows ? b : columns_b, k, grid(tile.bm), &kernel, stream};
}

std::vector<KernelInfo> gemm_with_kernels(const EpilogueInfo& epilogue, DType dtype, GpuTarget target, std::string_view arch) {
  std::vector<KernelInfo> kernels;
  for (const Config& tile : tiles(target == GpuTarget::cuda ? max_shared_bytes(arch) : 0)) {
    for (const Layout& layout : {Layout{}, Layout{.b_rows = true}, Layout{.a_rows = true, .b_rows = true}}) {
      if (layout.b_rows && size_of(dtype) != 2) continue;
      const NamedKernel& kernel = named(Kernel{.dtype = dtype, .layout = layout, .tile = tile, .epilogue = &epilogue});
      kernels.push_back({type_of(kernel), source_of(kernel), nullptr});
    }
  }
  return kernels;
}

}  // namespace tw::detail

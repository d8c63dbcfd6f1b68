#include "tilewave/gemm_with.hpp"

#include <array>

#include "kernels/check.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/kernels.hpp"

namespace tw::detail {

namespace {

using kernels::gemm::Config;
using kernels::gemm::GemmKernel;

constexpr const char* kOp = "gemm_with";

/// Tiles on a GPU, with less of the ring than gemm() has: the epilogue has memory of its own.
constexpr std::array<Config, 2> kTiles{{{128, kGemmWithColumns, 5, 1, 16}, {64, kGemmWithColumns, 6, 1, 16}}};

GemmKernel values_of(const GemmWithKernel& kernel) {
  const Config& tile = kernel.tile_rows == kTiles[0].bm ? kTiles[0] : kTiles[1];
  return {.dtype = kernel.dtype, .out = {}, .a_rows = kernel.a_rows, .b_rows = kernel.b_rows, .epilogue = kernel.epilogue, .tile = tile};
}

int choose_rows(const kernels::gemm::Problem& problem) {
  return predicted_time(problem, kTiles[0], 1) <= predicted_time(problem, kTiles[1], 1) ? kTiles[0].bm : kTiles[1].bm;
}

}  // namespace

GemmWithCall check_gemm_with(const Tensor& a, const Tensor& b, DType dtype, const GemmWithOptions& options) {
  const Stream stream = options.stream ? *options.stream : Stream::standard(a.device());
  const Device device = stream.device();
  check_operand(kOp, "a", a, dtype, device);
  check_operand(kOp, "b", b, dtype, device);
  const kernels::gemm::Extents x = kernels::gemm::check_extents(kOp, a, b);
  require(x.k > 0 || dtype != DType::i8, "{}: a is {} and b is {}; for i8 K must be at least 1", kOp, a, b);
  GemmWithCall call{a, b.transpose(-2, -1), x.m, x.n, x.k, x.batch, false, false, kGemmWithCpuRows, stream};
  if (!device.is_cuda()) return call;
  const kernels::gemm::Stored stored = kernels::gemm::as_stored(call.a, call.b);
  call.a = stored.a;
  call.b = stored.b;
  call.a_rows = stored.a_rows;
  call.b_rows = stored.b_rows;
  call.tile_rows = choose_rows({.m = x.m,
                                .n = x.n,
                                .k = x.k,
                                .batch = x.batch,
                                .element_bytes = static_cast<int>(size_of(dtype)),
                                .addends = false,
                                .b_rows = stored.b_rows,
                                .units = device_info(device).units});
  return call;
}

const NamedKernel& gemm_with_kernel(const GemmWithKernel& kernel) {
  static kernels::KernelTable<GemmWithKernel> table([](const GemmWithKernel& k) { return type_of(values_of(k)); },
                                                    [](const GemmWithKernel& k) { return k.source; });
  return table[kernel];
}

std::vector<KernelInfo> gemm_with_kernels(std::string_view epilogue, std::string_view source, DType dtype) {
  std::vector<KernelInfo> kernels;
  for (const Config& tile : kTiles) {
    for (const auto& [a_rows, b_rows] : {std::pair{false, false}, std::pair{false, true}, std::pair{true, true}}) {
      if (b_rows && size_of(dtype) != 2) continue;
      const NamedKernel& kernel = gemm_with_kernel({epilogue, source, dtype, a_rows, b_rows, tile.bm});
      kernels.push_back({type_of(kernel), source_of(kernel), nullptr});
    }
  }
  return kernels;
}

}  // namespace tw::detail

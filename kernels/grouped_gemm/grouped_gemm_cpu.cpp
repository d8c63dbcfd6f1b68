#include <algorithm>

#include "kernels/grouped_gemm/kernels.hpp"

namespace tw::kernels::grouped_gemm {

namespace {

struct Range {
  std::int64_t begin, end;
};
/// As Segments::at().
Range group_rows(const Tensor& offsets, int group, std::int64_t rows) {
  const auto at = [&](int i) { return std::clamp<std::int64_t>(offsets.data<i32>()[i], 0, rows); };
  return {at(group), std::max(at(group), at(group + 1))};
}

template <DType dtype, DType out>
void launch(const DepthCall& call) {
  // gemm's large tile; `bk` counts elements in memory of a step, not bytes.
  using T = ElementOf<dtype>;
  using Kernel = KGroupedGemm<T, Linear<ElementOf<out>, Identity, LinearOptions{.addends = true}>, gemm::Tiles<192, 192, 192, 2, 1, 1>>;
  const TileGrid grid = grid_of(call, {.bm = 192, .bn = 192});
  launch_cpu<Kernel>(grid, [&](auto& bind, auto& p) { bind_k_grouped(bind, p, call); });
}

}  // namespace

/// A product of each group: gemm's CPU kernels, which divide each among all threads.
void run_on_cpu(const Call& call) {
  for (int g = 0; g < call.groups(); ++g) {
    const auto [begin, end] = group_rows(call.offsets, g, call.m());
    if (begin == end) continue;
    const Tensor bias = call.options.bias ? call.options.bias->select(0, g) : Tensor();
    const Tensor a = call.a.slice(0, begin, end), b = call.b.select(0, g).transpose(0, 1), d = call.d.slice(0, begin, end);
    if (call.block_scaled()) {
      const Tensor a_scale = call.a_scale.slice(0, begin, end), b_scale = call.b_scale.select(0, g).transpose(0, 1);
      tw::gemm(a, b, d, {.a_scale = &a_scale, .b_scale = &b_scale, .stream = call.stream});
      continue;
    }
    tw::gemm(a, b, d, {.bias = call.options.bias ? &bias : nullptr, .activation = call.options.activation, .stream = call.stream});
  }
}

void run_on_cpu(const DepthCall& call) {
  const bool wide = call.d.dtype() == DType::f32;
  switch (call.b.dtype()) {
    case DType::f16:
      return wide ? launch<DType::f16, DType::f32>(call) : launch<DType::f16, DType::f16>(call);
    case DType::bf16:
      return wide ? launch<DType::bf16, DType::f32>(call) : launch<DType::bf16, DType::bf16>(call);
    default:
      return launch<DType::f32, DType::f32>(call);
  }
}

}  // namespace tw::kernels::grouped_gemm

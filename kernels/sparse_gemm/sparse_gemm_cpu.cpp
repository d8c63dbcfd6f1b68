#include "kernels/sparse_gemm/kernels.hpp"

namespace tw::kernels::sparse_gemm {

namespace {

/// A is expanded for every tile, which takes little beside products with 128 columns.
constexpr ProductTile kCpuTile{128, 128, 2, 1, 8};

template <DType dtype, bool kTransposed>
void launch_stored(const Call& call) {
  constexpr Kernel k{.dtype = dtype, .transposed = kTransposed, .addends = true, .tile = kCpuTile};
  launch_cpu<HostKernel<k, AnyActivation>>(grid_of(call, kCpuTile), [&](auto& bind, auto& p) { bind_product(bind, p, call, k); });
}
template <DType dtype>
void launch_product(const Call& call) {
  call.stores_transposed() ? launch_stored<dtype, true>(call) : launch_stored<dtype, false>(call);
}

}  // namespace

void run_on_cpu(const Call& call) {
  switch (call.dtype()) {
    case DType::f16:
      return launch_product<DType::f16>(call);
    case DType::bf16:
      return launch_product<DType::bf16>(call);
    case DType::fp8_e4m3:
      return launch_product<DType::fp8_e4m3>(call);
    default:
      return launch_stored<DType::i8, false>(call);
  }
}

}  // namespace tw::kernels::sparse_gemm

#include "kernels/check.hpp"
#include "kernels/gemm/block_scaled.tile.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/skinny.tile.hpp"
#include "kernels/gemm/variants.hpp"

namespace tw::kernels::gemm {

namespace {

constexpr Config kLarge = kCpuConfigs[0], kSmall = kCpuConfigs[1];

// Packing takes any strides, so one order of contraction serves all layouts.
template <class T, class Out, class Act, Config c>
using CpuKernel =
    Gemm<Operands<T, Contract::columns, Contract::columns>,
         conditional<is_same<T, i8>, StoreSums<Out>, Linear<Out, Act, LinearOptions{.addends = true, .scales = sizeof(T) == 1}>>,
         Tiles<c.bm, c.bn, 192, c.stages, c.cluster, c.band>>;

template <Config c>
TileGrid grid_of(const Call& call) {
  return {ceil_div(call.m, c.bm), ceil_div(call.n, c.bn), call.batch};
}

template <class T, class Out, class Act, Config c>
void launch_tiles(const Call& call) {
  launch_cpu<CpuKernel<T, Out, Act, c>>(grid_of<c>(call), [&](auto& bind, auto& p) { bind_call(bind, p, call, call.a, call.b); });
}

void launch_block_scaled(const Call& call) {
  using Kernel = BlockScaledGemm<bf16, Tiles<128, 128, 128, 2, 1, 1>>;
  launch_cpu<Kernel>({ceil_div(call.m, 128), ceil_div(call.n, 128)}, [&](auto& bind, auto& p) { bind_block_scaled(bind, p, call); });
}

/// Rows of A for which B is read as it lies in memory: packing it takes longer than a few products.
constexpr int kFewRows = 16;

bool has_few_rows(const Call& call) {
  return call.m <= kFewRows && call.d.rank() == 2 && call.k > 0 && call.b.stride(1) == 1 && call.activation == Activation::none &&
         (call.a.dtype() == DType::f32 || call.a.dtype() == DType::bf16 || call.a.dtype() == DType::f16);
}

/// The rows of A as a batch, so that each one's sums are the same however many there are.
template <class T>
void launch_few_rows(const Call& call) {
  const auto as_batch = [](const Tensor& t) {  // [M, x] as [M, 1, x]
    return Tensor::borrow(t.data(), {t.shape(0), 1, t.shape(1)}, t.dtype(), t.device(), {t.stride(0), t.stride(0), t.stride(1)});
  };
  Call rows = call;
  rows.a = as_batch(call.a);
  rows.d = as_batch(call.d);
  Tensor residual;
  if (call.residual) rows.residual = &(residual = as_batch(*call.residual));
  // Whole rows of B: memory is read in one stream. So few that they stay in the second-level cache from one row of A to the next.
  constexpr int kRows = 16, kPiece = 1 << 15;
  using Kernel = Gemv<T, Linear<T, Identity, LinearOptions{.addends = true}>, kRows, kPiece, 1>;
  launch_cpu<Kernel>({ceil_div(call.n, kRows), call.m}, [&](auto& bind, auto& p) { bind_gemv(bind, p, rows); });
}

}  // namespace

int choose_cpu_config(const Call& call) {
  const long large_tiles = static_cast<long>(ceil_div(call.m, kLarge.bm)) * ceil_div(call.n, kLarge.bn) * call.batch;
  return call.m > kSmall.bm && large_tiles >= cpu_threads() ? 0 : 1;
}

Analysis analyze_cpu_config(const Call& call, int config) {
  return with_types(call.a.dtype(), [&]<class T, class Out>(std::type_identity<T>, std::type_identity<Out>) {
    const auto bind_to = [&](auto& bind, auto& p) { bind_call(bind, p, call, call.a, call.b); };
    return config == 0 ? analyze<CpuKernel<T, Out, AnyActivation, kLarge>>(grid_of<kLarge>(call), bind_to)
                       : analyze<CpuKernel<T, Out, AnyActivation, kSmall>>(grid_of<kSmall>(call), bind_to);
  });
}

void run_on_cpu(const Call& call) {
  if (call.block_scaled()) return launch_block_scaled(call);
  if (call.config < 0 && has_few_rows(call)) {
    if (call.a.dtype() == DType::f32) return launch_few_rows<float>(call);
    return call.a.dtype() == DType::bf16 ? launch_few_rows<bf16>(call) : launch_few_rows<f16>(call);
  }
  require(call.config < static_cast<int>(kCpuConfigs.size()), "gemm: config is {}; on the CPU it must be below {}", call.config,
          kCpuConfigs.size());
  const bool large = (call.config >= 0 ? call.config : choose_cpu_config(call)) == 0;
  with_types(call.a.dtype(), [&]<class T, class Out>(std::type_identity<T>, std::type_identity<Out>) {
    if constexpr (!is_same<T, i8>) {
      if (call.activation == Activation::swiglu)
        return large ? launch_tiles<T, Out, SwiGlu, kLarge>(call) : launch_tiles<T, Out, SwiGlu, kSmall>(call);
    }
    large ? launch_tiles<T, Out, AnyActivation, kLarge>(call) : launch_tiles<T, Out, AnyActivation, kSmall>(call);
  });
}

}  // namespace tw::kernels::gemm

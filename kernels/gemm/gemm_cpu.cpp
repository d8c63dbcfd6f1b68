#include <array>
#include <span>

#include "kernels/check.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/rows.hpp"
#include "tilewave/elementwise.hpp"

namespace tw::kernels::gemm {

namespace {

// Packing takes any strides, so one order of contraction serves all layouts.
template <class T, class Out, class Act, bool kRowScales, Config c>
using CpuKernel =
    Gemm<Operands<T, Contract::columns, Contract::columns>,
         conditional<is_same<T, i8>, StoreSums<Out>, Linear<Out, Act, LinearOptions{.addends = true, .row_scales = kRowScales}>>,
         Tiles<c.bm, c.bn, 192, c.stages, c.cluster, c.band>>;

template <class Kernel>
void launch(const Call& call, const Launch& x) {
  launch_cpu<Kernel>(x.grid, [&](auto& bind, auto& p) { bind_launch(bind, p, call, x); });
}

template <class T, class Out, bool kRowScales, Config c>
void launch_tiles(const Call& call) {
  const Launch x = make_launch(call, {.dtype = dtype_of<T>, .tile = c});
  if constexpr (!is_same<T, i8>) {
    if (call.activation == Activation::swiglu) return launch<CpuKernel<T, Out, SwiGlu, kRowScales, c>>(call, x);
  }
  launch<CpuKernel<T, Out, AnyActivation, kRowScales, c>>(call, x);
}

template <class T, class Out = ElementOf<result_of(dtype_of<T>)>, bool kRowScales = false>
void launch_product(const Call& call) {
  (call.config >= 0 ? call.config : choose_cpu_config(call)) == 0 ? launch_tiles<T, Out, kRowScales, kCpuConfigs[0]>(call)
                                                                  : launch_tiles<T, Out, kRowScales, kCpuConfigs[1]>(call);
}

Tensor in_f32(const Tensor& t, const Stream& stream) {
  const Tensor copy = Tensor::empty(t.shape(), DType::f32, stream);
  tw::cast(t, copy, {.stream = stream});
  return copy;
}

/// As f32, which holds both kinds of fp8 exactly. One kernel serves scales of every form, and none.
void launch_fp8(Call call) {
  call.a = in_f32(call.a, call.stream);
  call.b = in_f32(call.b, call.stream);
  const Tensor one = Tensor::from(std::span<const float>{std::array{1.0f}}, {1});
  if (call.a_scale == nullptr) {
    call.a_scale = &one;
    call.b_scale = one;
  }
  if (call.d.dtype() == DType::bf16) return launch_product<float, bf16, true>(call);
  if (call.d.dtype() == DType::f32) return launch_product<float, float, true>(call);
  const Tensor d = call.d;
  call.d = Tensor::empty(d.shape(), DType::f32, call.stream);
  launch_product<float, float, true>(call);
  tw::cast(call.d, d, {.stream = call.stream});
}

/// Rows of A for which B is read as it lies in memory: packing it takes longer than a few products.
constexpr int kFewRows = 16;

bool has_few_rows(const Call& call) {
  return call.config < 0 && call.m <= kFewRows && call.d.rank() == 2 && call.k > 0 && call.b.stride(1) == 1 &&
         call.activation == Activation::none && is_float(call.a.dtype());
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
  Launch x = make_launch(rows, {.dtype = dtype_of<T>, .form = Kernel::gemv});
  x.grid = {ceil_div(call.n, kRows), call.m};
  launch<Gemv<T, Linear<T, Identity, LinearOptions{.addends = true}>, kRows, kPiece, 1>>(rows, x);
}

}  // namespace

int choose_cpu_config(const Call& call) {
  const auto [large, small] = kCpuConfigs;
  const long large_tiles = static_cast<long>(ceil_div(call.m, large.bm)) * ceil_div(call.n, large.bn) * call.batch;
  return call.m > small.bm && large_tiles >= cpu_threads() ? 0 : 1;
}

void run_on_cpu(const Call& call) {
  constexpr Kernel kBlockScaled{.dtype = DType::fp8_e4m3, .form = Kernel::block_scaled, .tile = {128, 128, 2}};
  if (call.block_scaled()) return launch<HostKernel<kBlockScaled>>(call, make_launch(call, kBlockScaled));
  require(call.config < static_cast<int>(kCpuConfigs.size()), "gemm: config is {}; on the CPU it must be below {}", call.config,
          kCpuConfigs.size());
  const bool few_rows = has_few_rows(call);
  switch (call.a.dtype()) {
    case DType::f16:
      return few_rows ? launch_few_rows<f16>(call) : launch_product<f16>(call);
    case DType::bf16:
      return few_rows ? launch_few_rows<bf16>(call) : launch_product<bf16>(call);
    case DType::fp8_e4m3:
    case DType::fp8_e5m2:
      return launch_fp8(call);
    case DType::i8:
      return launch_product<i8>(call);
    default:
      return few_rows ? launch_few_rows<float>(call) : launch_product<float>(call);
  }
}

}  // namespace tw::kernels::gemm

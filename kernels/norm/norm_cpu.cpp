#include <optional>

#include "kernels/norm/call.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::norm {
namespace {

template <Kind kind, class X>
void run_type(const Call& call) {
  const auto launch = [&]<class Kernel>(std::type_identity<Kernel>, int rows) {
    launch_cpu<Kernel>(row_grid(kOp<kind>, call.views, 1, rows, 1), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
  };
  // A tile of 16 KB stays in the L1 cache.
  if (call.cols <= 256) return launch(std::type_identity<CachedRows<kind, X, cpu::AnyFloat, float, 16, 256>>{}, 16);
  if (call.cols <= 1280) return launch(std::type_identity<CachedRows<kind, X, cpu::AnyFloat, float, 1, 1280>>{}, 1);
  if (call.cols <= 4096) return launch(std::type_identity<CachedRows<kind, X, cpu::AnyFloat, float, 1, 4096>>{}, 1);
  launch(std::type_identity<ChunkedRows<kind, X, cpu::AnyFloat, float, 1, 1024, 4, 0>>{}, 1);
}

}  // namespace

/// Weights are widened to f32 first, which is cheap: they are as long as one row.
template <Kind kind>
void run_on_cpu(const Call& call) {
  Call widened = call;
  std::optional<Tensor> weight, bias;
  const auto widen = [](const Tensor*& given, std::optional<Tensor>& in_f32) {
    if (given != nullptr && given->dtype() != DType::f32) given = &in_f32.emplace(given->to(DType::f32));
  };
  widen(widened.options.weight, weight);
  widen(widened.options.bias, bias);
  with_float_type(call.views[0].dtype(), [&]<class X>(std::type_identity<X>) { run_type<kind, X>(widened); });
}

template void run_on_cpu<Kind::layer>(const Call& call);
template void run_on_cpu<Kind::rms>(const Call& call);

}  // namespace tw::kernels::norm

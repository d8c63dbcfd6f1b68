#include "kernels/causal_conv1d/call.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::causal_conv1d {
namespace {

/// Calls f with the filter's width as a Constant.
template <class F>
void with_taps(const Call& call, F f) {
  switch (call.taps()) {
    case 2:
      return f(Constant<2>{});
    case 3:
      return f(Constant<3>{});
    default:
      return f(Constant<4>{});
  }
}

using Any = cpu::AnyFloat;

}  // namespace

void forward_on_cpu(const Call& call) {
  with_taps(call, [&]<int taps>(Constant<taps>) {
    launch_cpu<Forward<Any, Any, taps, kNarrow, 4>>(grid_of(call, kNarrow), [&](auto& bind, auto& p) { bind_forward(bind, p, call); });
  });
}

void backward_on_cpu(const Call& call) {
  with_taps(call, [&]<int taps>(Constant<taps>) {
    if (call.batches() > 0)
      launch_cpu<Backward<Any, Any, taps, kNarrow, 4>>(grid_of(call, kNarrow), [&](auto& bind, auto& p) { bind_backward(bind, p, call); });
    if (call.d_initial_state)
      launch_cpu<InitialGradient<Any, Any, taps, kNarrow, 4>>(initial_grid(call),
                                                              [&](auto& bind, auto& p) { bind_initial(bind, p, call); });
  });
  if (call.d_weight || call.d_bias) launch_cpu<WeightSums<Any>>(sums_grid(call), [&](auto& bind, auto& p) { bind_sums(bind, p, call); });
}

}  // namespace tw::kernels::causal_conv1d

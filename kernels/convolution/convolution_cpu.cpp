#include "kernels/convolution/call.hpp"
#include "kernels/rows.hpp"

namespace tw::kernels::convolution {

namespace {

constexpr Config kLarge = kCpuConfigs[0], kSmall = kCpuConfigs[1];
constexpr int kStep = 192;  ///< channels

template <class T, Config c>
using CpuKernel = Convolution<T, Contract::columns, Epilogue<T, AnyActivation>, c.bm, c.bn, kStep, c.stages, c.cluster>;

template <class T, Config c>
void launch(const Call& call) {
  const Tiling tiling = choose_window(call.problem(kStep, 1), c.bm);
  const Tensor w = call.w.transpose(0, 2).transpose(0, 1);  // packing takes any strides
  launch_cpu<CpuKernel<T, c>>(grid_of(tiling, call, c.bn),
                              [&](auto& bind, auto& p) { bind_call<T, kStep>(bind, p, call, w, tiling, c.bm); });
}

}  // namespace

int choose_cpu_config(const Call& call) {
  const std::int64_t large = choose_window(call.problem(kStep, 1), kLarge.bm).tiles() * ceil_div(call.out_channels(), kLarge.bn);
  return large >= cpu_threads() ? 0 : 1;
}

void run_on_cpu(const Call& call) {
  const bool large = (call.config >= 0 ? call.config : choose_cpu_config(call)) == 0;
  with_float_type(call.x.dtype(), [&]<class T>(std::type_identity<T>) { large ? launch<T, kLarge>(call) : launch<T, kSmall>(call); });
}

}  // namespace tw::kernels::convolution

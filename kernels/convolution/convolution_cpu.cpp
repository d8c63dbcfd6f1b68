#include "kernels/convolution/call.hpp"

namespace tw::kernels::convolution {

namespace {

constexpr Config kLarge = kCpuConfigs[0], kSmall = kCpuConfigs[1];
constexpr int kStep = 192;  ///< channels

template <class T, Config c>
using CpuKernel = Convolution<T, Contract::columns, Epilogue<T, AnyActivation>, c.bm, c.bn, kStep, c.stages, c.cluster>;

/// f(grid, bind_call) for tiles of a configuration.
template <class T, Config c, class F>
void with_tiles(const Call& call, F f) {
  const Tiling tiling = choose_window(call.problem(kStep, 1), c.bm);
  const Tensor w = call.w.transpose(0, 2).transpose(0, 1);  // packing takes any strides
  f(grid_of(tiling, call, c.bn), [&](auto& bind, auto& p) { bind_call<T, kStep>(bind, p, call, w, tiling, c.bm); });
}

template <class T>
void run(const Call& call) {
  const auto launch = [&]<Config c>() {
    with_tiles<T, c>(call, [](const TileGrid& grid, auto bind) { launch_cpu<CpuKernel<T, c>>(grid, bind); });
  };
  (call.config >= 0 ? call.config : choose_cpu_config(call)) == 0 ? launch.template operator()<kLarge>()
                                                                  : launch.template operator()<kSmall>();
}

template <class T>
Analysis analyze_config(const Call& call, int config) {
  Analysis result;
  const auto count = [&]<Config c>() {
    with_tiles<T, c>(call, [&](const TileGrid& grid, auto bind) { result = analyze<CpuKernel<T, c>>(grid, bind); });
  };
  config == 0 ? count.template operator()<kLarge>() : count.template operator()<kSmall>();
  return result;
}

}  // namespace

int choose_cpu_config(const Call& call) {
  const std::int64_t large = choose_window(call.problem(kStep, 1), kLarge.bm).tiles() * ceil_div(call.out_channels(), kLarge.bn);
  return large >= cpu_threads() ? 0 : 1;
}

Analysis analyze_cpu_config(const Call& call, int config) {
  switch (call.x.dtype()) {
    case DType::f16:
      return analyze_config<f16>(call, config);
    case DType::bf16:
      return analyze_config<bf16>(call, config);
    default:
      return analyze_config<float>(call, config);
  }
}

void run_on_cpu(const Call& call) {
  switch (call.x.dtype()) {
    case DType::f16:
      return run<f16>(call);
    case DType::bf16:
      return run<bf16>(call);
    default:
      return run<float>(call);
  }
}

}  // namespace tw::kernels::convolution

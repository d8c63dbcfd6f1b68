#include <fmt/format.h>

#include <utility>

#include "kernels/convolution/call.hpp"
#include "kernels/convolution/configs.hpp"

namespace tw::kernels::convolution {

namespace {

constexpr Contract kColumns = Contract::columns;
constexpr Contract kRows = Contract::rows;

/// A step is 128 bytes of channels.
template <class T>
constexpr int kStepChannels = 128 / static_cast<int>(sizeof(T));

template <class T, Contract w, class Act, int kConfig>
using Variant = Convolution<T, w, Act, kConfigs[kConfig].bm, kConfigs[kConfig].bn, kStepChannels<T>, kConfigs[kConfig].stages,
                            kConfigs[kConfig].cluster>;

template <class T, Contract w, int kConfig>
const KernelInfo& info_of(Activation activation) {
  return with_activation(activation,
                         []<class Act>(std::type_identity<Act>) -> const KernelInfo& { return kernel_info<Variant<T, w, Act, kConfig>>; });
}

/// `w`: as stored for this contraction.
template <class T, Contract w_contract, int kConfig>
void launch_config(const Call& call, const Problem& problem, const Tensor& w) {
  // Parameters do not depend on the activation, so one binding serves all variants.
  using Kernel = Variant<T, w_contract, Identity, kConfig>;
  constexpr Config config = kConfigs[kConfig];
  const Tiling tiling = choose_window(problem, config.bm);
  typename Kernel::template On<sm_90a::Target<>>::Params params{};
  detail::GpuBinder binder(call.stream.device());
  bind_call<T, kStepChannels<T>>(binder, params, call, w, tiling);
  detail::launch_variant(info_of<T, w_contract, kConfig>(call.activation), binder.tma_load, binder.tma_store, &params,
                         grid_of(tiling, call, config.bn), call.stream);
}

template <class T, Contract w_contract>
void launch(const Call& call, const Tensor& w) {
  const Problem problem = call.problem(kStepChannels<T>, device_info(call.stream.device()).units);
  const int chosen = call.config < 0 ? choose_config(problem) : call.config;
  [&]<int... kConfig>(std::integer_sequence<int, kConfig...>) {
    ((chosen == kConfig ? launch_config<T, w_contract, kConfig>(call, problem, w) : void()), ...);
  }
  (std::make_integer_sequence<int, static_cast<int>(kConfigs.size())>{});
}

template <class T>
void run(const Call& call) {
  const Tensor w = call.w.transpose(0, 2).transpose(0, 1);  // [KH, KW, F, C]
  if constexpr (sizeof(T) == 2) {                           // tf32 products have no transposes
    const bool f_dense = w.stride(3) != 1 && w.stride(2) == 1 && w.shape(3) > 1;
    if (f_dense) return launch<T, kRows>(call, w.transpose(2, 3));
  }
  launch<T, kColumns>(call, w);
}

template <class T, Contract w, int kConfig>
KernelSpec registered_spec(const char* dtype, const char* layout, Activation activation = Activation::none, const char* suffix = "",
                           bool tma_load = true, bool tma_store = true) {
  constexpr Config c = kConfigs[kConfig];
  return make_spec(info_of<T, w, kConfig>(activation), tma_load, tma_store,
                   fmt::format("convolution_{}_{}_{}x{}{}{}", dtype, layout, c.bm, c.bn, c.cluster > 1 ? "_cluster" : "", suffix));
}

}  // namespace

void run_on_gpu(const Call& call) {
  switch (call.x.dtype()) {
    case DType::f16:
      return run<f16>(call);
    case DType::bf16:
      return run<bf16>(call);
    default:
      return run<float>(call);
  }
}

std::vector<KernelSpec> registered() {
  return {
      registered_spec<f16, kColumns, 0>("f16", "fc"),
      registered_spec<f16, kColumns, 1>("f16", "fc"),
      registered_spec<f16, kColumns, 2>("f16", "fc"),
      registered_spec<f16, kColumns, 3>("f16", "fc"),
      registered_spec<f16, kRows, 0>("f16", "cf"),
      registered_spec<f16, kRows, 1>("f16", "cf"),
      registered_spec<f16, kRows, 2>("f16", "cf"),
      registered_spec<bf16, kColumns, 0>("bf16", "fc"),
      registered_spec<bf16, kColumns, 1>("bf16", "fc", Activation::gelu_erf, "_gelu_erf"),
      registered_spec<bf16, kColumns, 2>("bf16", "fc", Activation::gelu_erf, "_gelu_erf"),
      registered_spec<bf16, kColumns, 3>("bf16", "fc"),
      registered_spec<bf16, kRows, 3>("bf16", "cf"),
      registered_spec<float, kColumns, 0>("tf32", "fc"),
      registered_spec<float, kColumns, 3>("tf32", "fc"),
      // Tensors that TMA cannot take.
      registered_spec<f16, kColumns, 1>("f16", "fc", Activation::none, "_strided", false, false),
      registered_spec<bf16, kColumns, 3>("bf16", "fc", Activation::none, "_strided", false, false),
      registered_spec<float, kColumns, 3>("tf32", "fc", Activation::none, "_strided", false, false),
  };
}

}  // namespace tw::kernels::convolution

#include <utility>

#include "kernels/check.hpp"
#include "kernels/convolution/call.hpp"
#include "kernels/convolution/configs.hpp"
#include "runtime/format.hpp"
#include "tilewave/analyze.hpp"

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
  detail::launch_bound<Kernel>(info_of<T, w_contract, kConfig>(call.activation), call.stream, grid_of(tiling, call, config.bn),
                               [&](auto& bind, auto& p) { bind_call<T, kStepChannels<T>>(bind, p, call, w, tiling); });
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
    if (stored_cf(call.w)) return launch<T, kRows>(call, w.transpose(2, 3));
  }
  launch<T, kColumns>(call, w);
}

template <class T, Contract w_contract, class Act, int kConfig>
Analysis analyze_call(const Call& call) {
  constexpr Config config = kConfigs[kConfig];
  const Tiling tiling = choose_window(call.problem(kStepChannels<T>, 1), config.bm);
  const Tensor fc = call.w.transpose(0, 2).transpose(0, 1), w = w_contract == kColumns ? fc : fc.transpose(2, 3);
  return analyze<Variant<T, w_contract, Act, kConfig>>(
      grid_of(tiling, call, config.bn), [&](auto& bind, auto& p) { bind_call<T, kStepChannels<T>>(bind, p, call, w, tiling); });
}

template <class T, Contract w_contract>
Analysis analyze_config(const Call& call, int config) {
  Analysis result;
  [&]<int... kConfig>(std::integer_sequence<int, kConfig...>) {
    ((config == kConfig ? void(result = analyze_call<T, w_contract, Identity, kConfig>(call)) : void()), ...);
  }
  (std::make_integer_sequence<int, static_cast<int>(kConfigs.size())>{});
  return result;
}

template <class T, Contract w_contract, class Act, int kConfig>
Analysis analyze_shape(const ShapeValues& shape) {
  const Axis axis{shape.integer("stride"), shape.integer("padding"), shape.integer("dilation")};
  const std::int64_t taps = shape["K"], reach = axis.dilation * (taps - 1) + 1;
  const std::int64_t height = shape["H"] + 2 * axis.padding, width = shape["W"] + 2 * axis.padding;
  require(axis.stride > 0 && axis.dilation > 0 && taps > 0 && reach <= height && reach <= width,
          "shape: K, stride and dilation must be positive, and the kernel, {} wide and high, fit into the padded image, {} x {}", reach,
          height, width);
  const auto extent = [&](std::int64_t padded) { return (padded - reach) / axis.stride + 1; };
  const DType dtype = dtype_of<T>;
  const Tensor bias = placeholder({shape["F"]}, dtype);
  const Tensor w =
      placeholder(w_contract == kColumns ? Shape{taps, taps, shape["F"], shape["C"]} : Shape{taps, taps, shape["C"], shape["F"]}, dtype);
  const Tensor w_as_given = (w_contract == kColumns ? w : w.transpose(2, 3)).transpose(0, 1).transpose(0, 2);  // [F, KH, KW, C]
  const Call call{placeholder({shape["N"], shape["H"], shape["W"], shape["C"]}, dtype),
                  w_as_given,
                  placeholder({shape["N"], extent(height), extent(width), shape["F"]}, dtype),
                  shape["bias"] ? &bias : nullptr,
                  Activation::none,
                  axis,
                  axis,
                  kConfig,
                  Stream::standard(Device::cpu())};
  return analyze_call<T, w_contract, Act, kConfig>(call);
}

template <class T, Contract w, int kConfig, class Act = Identity>
KernelVariant variant(const char* dtype, const char* layout, const char* suffix = "", bool tma_load = true, bool tma_store = true) {
  constexpr Config c = kConfigs[kConfig];
  return {make_spec(kernel_info<Variant<T, w, Act, kConfig>>, tma_load, tma_store,
                    tw::format("convolution_{}_{}_{}x{}{}{}", dtype, layout, c.bm, c.bn, c.cluster > 1 ? "_cluster" : "", suffix)),
          analyze_shape<T, w, Act, kConfig>};
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

Analysis analyze_gpu_config(const Call& call, int config) {
  const bool cf = stored_cf(call.w);
  switch (call.x.dtype()) {
    case DType::f16:
      return cf ? analyze_config<f16, kRows>(call, config) : analyze_config<f16, kColumns>(call, config);
    case DType::bf16:
      return cf ? analyze_config<bf16, kRows>(call, config) : analyze_config<bf16, kColumns>(call, config);
    default:
      return analyze_config<float, kColumns>(call, config);
  }
}

std::vector<KernelVariant> registered() {
  return {
      variant<f16, kColumns, 0>("f16", "fc"),
      variant<f16, kColumns, 1>("f16", "fc"),
      variant<f16, kColumns, 2>("f16", "fc"),
      variant<f16, kColumns, 3>("f16", "fc"),
      variant<f16, kRows, 1>("f16", "cf"),
      variant<bf16, kColumns, 0>("bf16", "fc"),
      variant<bf16, kColumns, 1, GeluErf>("bf16", "fc", "_gelu_erf"),
      variant<bf16, kColumns, 2, GeluErf>("bf16", "fc", "_gelu_erf"),
      variant<bf16, kColumns, 3>("bf16", "fc"),
      variant<bf16, kRows, 3>("bf16", "cf"),
      variant<float, kColumns, 0>("tf32", "fc"),
      variant<float, kColumns, 3>("tf32", "fc"),
      // Tensors that TMA cannot take.
      variant<f16, kColumns, 1>("f16", "fc", "_strided", false, false),
      variant<bf16, kColumns, 3>("bf16", "fc", "_strided", false, false),
  };
}

}  // namespace tw::kernels::convolution

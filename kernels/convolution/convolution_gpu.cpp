#include <compare>
#include <string>

#include "kernels/check.hpp"
#include "kernels/convolution/call.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/named.hpp"
#include "tilewave/analyze.hpp"

namespace tw::kernels::convolution {

namespace {

constexpr Contract kColumns = Contract::columns;
constexpr const char* kSource = "kernels/convolution/convolution.tile.hpp";

/// A step is 128 bytes of channels.
template <class T>
constexpr int kStepChannels = 128 / static_cast<int>(sizeof(T));

/// Convolution by the values that name it.
struct Kernel {
  DType dtype;
  bool w_rows = false;  ///< weights are stored [.., C, F]
  Activation activation = Activation::none;
  Config tile{};
  auto operator<=>(const Kernel&) const = default;
};

std::string type_of(const Kernel& k) {
  return tw::format("tw::kernels::convolution::Convolution<{}, {}, {}, {}, {}, {}, {}, {}>", element_name(k.dtype),
                    k.w_rows ? "tw::Contract::rows" : "tw::Contract::columns", linear_name(k.dtype, k.activation, {.windowed = true}),
                    k.tile.bm, k.tile.bn, 128 / size_of(k.dtype), k.tile.stages, k.tile.cluster);
}

/// The configuration that the call asks for, or the heuristic's choice.
Config tile_of(const Call& call, const Problem& problem) {
  if (call.tile) return *call.tile;
  const std::vector<CostedTile> all = configs(problem.generic_shared);
  const int chosen = call.config < 0 ? choose_config(problem) : call.config;
  require(chosen < static_cast<int>(all.size()), "conv2d: config is {}; on this target it must be below {}", chosen, all.size());
  return all[static_cast<std::size_t>(chosen)];
}

template <class T>
void launch(const Call& call) {
  static KernelTable<Kernel> table(type_of, kSource);
  const Problem problem = call.problem(kStepChannels<T>, device_info(call.stream.device()).units);
  const Config tile = tile_of(call, problem);
  const Tiling tiling = choose_window(problem, tile.bm);
  const bool w_rows = sizeof(T) == 2 && stored_cf(call.w);  // tf32 products have no transposes
  const Tensor w = call.w.transpose(0, 2).transpose(0, 1);  // [KH, KW, F, C]
  using Params =
      typename Convolution<T, kColumns, Epilogue<T, Identity>, 64, 64, kStepChannels<T>, 2, 1>::template On<sm_90a::Target<>>::Params;
  detail::launch_named<Params>(
      table[{call.x.dtype(), w_rows, call.activation, tile}], call.stream, grid_of(tiling, call, tile.bn),
      [&](auto& bind, auto& p) { bind_call<T, kStepChannels<T>>(bind, p, call, w_rows ? w.transpose(2, 3) : w, tiling, tile.bm); });
}

// --- Compiled ahead of time

template <class T, int kConfig, class Act>
using Instantiated = Convolution<T, kColumns, Epilogue<T, Act>, kConfigs[kConfig].bm, kConfigs[kConfig].bn, kStepChannels<T>,
                                 kConfigs[kConfig].stages, kConfigs[kConfig].cluster>;

template <class T, int kConfig, class Act>
Analysis analyze_shape(const ShapeValues& shape) {
  constexpr Config config = kConfigs[kConfig];
  const Axis axis{shape.integer("stride"), shape.integer("padding"), shape.integer("dilation")};
  const std::int64_t taps = shape["K"], reach = axis.dilation * (taps - 1) + 1;
  const std::int64_t height = shape["H"] + 2 * axis.padding, width = shape["W"] + 2 * axis.padding;
  require(axis.stride > 0 && axis.dilation > 0 && taps > 0 && reach <= height && reach <= width,
          "shape: K, stride and dilation must be positive, and the kernel, {} wide and high, fit into the padded image, {} x {}", reach,
          height, width);
  const auto extent = [&](std::int64_t padded) { return (padded - reach) / axis.stride + 1; };
  const DType dtype = dtype_of<T>;
  const Tensor bias = placeholder({shape["F"]}, dtype), w = placeholder({taps, taps, shape["F"], shape["C"]}, dtype);
  const Call call{placeholder({shape["N"], shape["H"], shape["W"], shape["C"]}, dtype),
                  w.transpose(0, 1).transpose(0, 2),  // [F, KH, KW, C]
                  placeholder({shape["N"], extent(height), extent(width), shape["F"]}, dtype),
                  shape["bias"] ? &bias : nullptr,
                  Activation::none,
                  axis,
                  axis,
                  kConfig,
                  Stream::standard(Device::cpu())};
  const Tiling tiling = choose_window(call.problem(kStepChannels<T>, 1), config.bm);
  return analyze<Instantiated<T, kConfig, Act>>(
      grid_of(tiling, call, config.bn), [&](auto& bind, auto& p) { bind_call<T, kStepChannels<T>>(bind, p, call, w, tiling, config.bm); });
}

/// How the weights are stored changes neither the counts nor the other tiles, so one instantiation serves both.
template <class T, int kConfig, class Act = Identity>
KernelVariant variant(const char* dtype, const char* layout, const char* suffix = "", Activation activation = Activation::none,
                      bool tma = true) {
  constexpr Config c = kConfigs[kConfig];
  const std::string type = type_of({dtype_of<T>, layout == std::string_view("cf"), activation, c});
  return {make_spec({type, kSource, detail::tile_recorder<Instantiated<T, kConfig, Act>>()}, tma, tma,
                    tw::format("convolution_{}_{}_{}x{}{}{}", dtype, layout, c.bm, c.bn, c.cluster > 1 ? "_cluster" : "", suffix)),
          analyze_shape<T, kConfig, Act>};
}

}  // namespace

void run_on_gpu(const Call& call) {
  switch (call.x.dtype()) {
    case DType::f16:
      return launch<f16>(call);
    case DType::bf16:
      return launch<bf16>(call);
    default:
      return launch<float>(call);
  }
}

std::vector<KernelVariant> registered() {
  return {
      variant<f16, 0>("f16", "fc"),
      variant<f16, 1>("f16", "fc"),
      variant<f16, 2>("f16", "fc"),
      variant<f16, 3>("f16", "fc"),
      variant<f16, 1>("f16", "cf"),
      variant<bf16, 0>("bf16", "fc"),
      variant<bf16, 1, GeluErf>("bf16", "fc", "_gelu_erf", Activation::gelu_erf),
      variant<bf16, 2, GeluErf>("bf16", "fc", "_gelu_erf", Activation::gelu_erf),
      variant<bf16, 3>("bf16", "fc"),
      variant<bf16, 3>("bf16", "cf"),
      variant<float, 0>("tf32", "fc"),
      variant<float, 3>("tf32", "fc"),
      // Tensors that TMA cannot take.
      variant<f16, 1>("f16", "fc", "_strided", Activation::none, false),
      variant<bf16, 3>("bf16", "fc", "_strided", Activation::none, false),
  };
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  const auto add = [&](DType dtype, const char* name, bool w_rows, Activation activation = Activation::none, bool pieces = true) {
    for (const Config& tile : configs(shared_bytes)) {
      const std::string type = type_of({dtype, w_rows, activation, tile});
      specs.push_back(for_target(make_spec({type, kSource, nullptr}, pieces, pieces,
                                           tw::format("convolution_{}_{}_{}x{}{}{}", name, w_rows ? "cf" : "fc", tile.bm, tile.bn,
                                                      activation == Activation::none ? "" : "_gelu_erf", pieces ? "" : "_strided")),
                                 GpuTarget::cuda));
    }
  };
  add(DType::f16, "f16", false);
  add(DType::bf16, "bf16", true);
  add(DType::bf16, "bf16", false, Activation::gelu_erf);
  add(DType::f32, "tf32", false);
  add(DType::bf16, "bf16", false, Activation::none, false);
  return specs;
}

}  // namespace tw::kernels::convolution

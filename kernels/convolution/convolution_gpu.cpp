#include <compare>
#include <string>

#include "kernels/check.hpp"
#include "kernels/convolution/call.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/named.hpp"
#include "kernels/rows.hpp"
#include "tilewave/analyze.hpp"

namespace tw::kernels::convolution {

namespace {

constexpr const char* kSource = "kernels/convolution/convolution.tile.hpp";

/// A step is 128 bytes of channels.
template <class T>
constexpr int kStepChannels = kStepBytes / static_cast<int>(sizeof(T));

/// Convolution by the values that name it.
struct Kernel {
  DType dtype = DType::bf16;
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

/// The same kernel as a type: for Params, which are those of every tile, layout and activation, and for the analysis target.
template <Kernel k>
using HostKernel =
    Convolution<ElementOf<k.dtype>, k.w_rows ? Contract::rows : Contract::columns, Epilogue<ElementOf<k.dtype>, FunctorOf<k.activation>>,
                k.tile.bm, k.tile.bn, kStepChannels<ElementOf<k.dtype>>, k.tile.stages, k.tile.cluster>;

/// For people.
std::string name_of(const Kernel& k, bool pieces) {
  return tw::format("convolution_{}_{}_{}x{}{}{}{}", k.dtype == DType::f32 ? "tf32" : tw::name_of(k.dtype), k.w_rows ? "cf" : "fc",
                    k.tile.bm, k.tile.bn, k.tile.cluster > 1 ? "_cluster" : "", k.activation == Activation::none ? "" : "_gelu_erf",
                    pieces ? "" : "_strided");
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
  using Params = typename HostKernel<Kernel{.dtype = dtype_of<T>, .tile = {64, 64, 2}}>::template On<sm_90a::Target<>>::Params;
  detail::launch_named<Params>(
      table[{call.x.dtype(), w_rows, call.activation, tile}], call.stream, grid_of(tiling, call, tile.bn),
      [&](auto& bind, auto& p) { bind_call<T, kStepChannels<T>>(bind, p, call, w_rows ? w.transpose(2, 3) : w, tiling, tile.bm); });
}

// --- Compiled ahead of time

template <Kernel k>
Analysis analyze_shape(const ShapeValues& shape) {
  using T = ElementOf<k.dtype>;
  const Axis axis{shape.integer("stride"), shape.integer("padding"), shape.integer("dilation")};
  const std::int64_t taps = shape["K"], reach = axis.dilation * (taps - 1) + 1;
  const std::int64_t height = shape["H"] + 2 * axis.padding, width = shape["W"] + 2 * axis.padding;
  require(axis.stride > 0 && axis.dilation > 0 && taps > 0 && reach <= height && reach <= width,
          "shape: K, stride and dilation must be positive, and the kernel, {} wide and high, fit into the padded image, {} x {}", reach,
          height, width);
  const auto extent = [&](std::int64_t padded) { return (padded - reach) / axis.stride + 1; };
  const Tensor bias = placeholder({shape["F"]}, k.dtype), w = placeholder({taps, taps, shape["F"], shape["C"]}, k.dtype);
  const Call call{placeholder({shape["N"], shape["H"], shape["W"], shape["C"]}, k.dtype),
                  w.transpose(0, 1).transpose(0, 2),  // [F, KH, KW, C]
                  placeholder({shape["N"], extent(height), extent(width), shape["F"]}, k.dtype),
                  shape["bias"] ? &bias : nullptr,
                  Activation::none,
                  axis,
                  axis,
                  -1,
                  Stream::standard(Device::cpu())};
  const Tiling tiling = choose_window(call.problem(kStepChannels<T>, 1), k.tile.bm);
  return analyze<HostKernel<k>>(grid_of(tiling, call, k.tile.bn),
                                [&](auto& bind, auto& p) { bind_call<T, kStepChannels<T>>(bind, p, call, w, tiling, k.tile.bm); });
}

struct Registered {
  Kernel kernel;
  bool pieces = true;  ///< TMA takes the tensors
};
constexpr std::array kRegistered{Registered{{.dtype = DType::f16, .tile = kConfigs[0]}},
                                 Registered{{.dtype = DType::f16, .tile = kConfigs[1]}},
                                 Registered{{.dtype = DType::f16, .tile = kConfigs[2]}},
                                 Registered{{.dtype = DType::f16, .tile = kConfigs[3]}},
                                 Registered{{.dtype = DType::f16, .w_rows = true, .tile = kConfigs[1]}},
                                 Registered{{.tile = kConfigs[0]}},
                                 Registered{{.activation = Activation::gelu_erf, .tile = kConfigs[1]}},
                                 Registered{{.activation = Activation::gelu_erf, .tile = kConfigs[2]}},
                                 Registered{{.tile = kConfigs[3]}},
                                 Registered{{.w_rows = true, .tile = kConfigs[3]}},
                                 Registered{{.dtype = DType::f32, .tile = kConfigs[0]}},
                                 Registered{{.dtype = DType::f32, .tile = kConfigs[3]}},
                                 Registered{{.dtype = DType::f16, .tile = kConfigs[1]}, false},
                                 Registered{{.tile = kConfigs[3]}, false}};

/// How the weights are stored changes neither the counts nor the other tiles, so one instantiation serves both.
constexpr Kernel without_layout(Kernel k) {
  k.w_rows = false;
  return k;
}

template <std::size_t i>
KernelVariant variant() {
  constexpr auto entry = kRegistered[i];
  constexpr Kernel counted = without_layout(entry.kernel);
  const std::string type = type_of(entry.kernel);
  return {make_spec({type, kSource, detail::tile_recorder<HostKernel<counted>>()}, entry.pieces, entry.pieces,
                    name_of(entry.kernel, entry.pieces)),
          analyze_shape<counted>};
}

}  // namespace

void run_on_gpu(const Call& call) {
  with_float_type(call.x.dtype(), [&]<class T>(std::type_identity<T>) { launch<T>(call); });
}

std::vector<KernelVariant> registered() {
  return []<std::size_t... i>(std::index_sequence<i...>) { return std::vector<KernelVariant>{variant<i>()...}; }
  (std::make_index_sequence<kRegistered.size()>());
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  const auto add = [&](Kernel k, bool pieces = true) {
    for (const Config& tile : configs(shared_bytes)) {
      k.tile = tile;
      const std::string type = type_of(k);
      specs.push_back(for_target(make_spec({type, kSource, nullptr}, pieces, pieces, name_of(k, pieces)), GpuTarget::cuda));
    }
  };
  add({.dtype = DType::f16});
  add({.w_rows = true});
  add({.activation = Activation::gelu_erf});
  add({.dtype = DType::f32});
  add({}, false);
  return specs;
}

}  // namespace tw::kernels::convolution

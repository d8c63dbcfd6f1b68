#include <numeric>
#include <vector>

#include "kernels/check.hpp"
#include "kernels/grouped_gemm/kernels.hpp"
#include "tilewave/analyze.hpp"

// The kernels that are worth compiling ahead of time, and their analysis for groups of equal size.

namespace tw::kernels::grouped_gemm {

namespace {

constexpr const ProductTile& kPair = kProductTiles[0];
constexpr const ProductTile& kSquare = kProductTiles[3];
constexpr const ProductTile& kShort = kProductTiles[4];
static_assert(kPair == ProductTile{128, 256, 4, 2, 8} && kSquare == ProductTile{128, 128, 6, 1, 16} && kShort.bm == 64);

constexpr Kernel kRegistered[] = {{.tile = kPair},
                                  {.b_rows = true, .tile = kPair},
                                  {.activation = Activation::swiglu, .tile = kPair},
                                  {.tile = kShort},
                                  {.activation = Activation::swiglu, .tile = kShort},
                                  {.form = Kernel::k_grouped, .tile = kPair},
                                  {.form = Kernel::k_grouped, .out = DType::f32, .addends = true, .tile = kSquare}};

/// Offsets of `groups` equal parts of `count`.
Tensor equal_parts(std::int64_t count, std::int64_t groups) {
  std::vector<std::int32_t> offsets;
  for (std::int64_t g = 0; g <= groups; ++g) offsets.push_back(static_cast<std::int32_t>(count * g / groups));
  return Tensor::from(std::span<const std::int32_t>(offsets), {groups + 1});
}

template <std::size_t i>
Analysis analyze_shape(const ShapeValues& shape) {
  constexpr Kernel k = kRegistered[i];
  const std::int64_t m = shape["M"], n = shape["N"], depth = shape["K"], groups = shape["groups"];
  require(groups > 0, "shape: groups is 0; it must be at least 1");
  const Stream stream = Stream::standard(Device::cpu());
  if constexpr (k.form == Kernel::k_grouped) {
    const KGroupedGemmOptions options{.accumulate = k.addends};
    const Tensor a = placeholder({depth, m}, k.dtype), b = placeholder({depth, n}, k.dtype), d = placeholder({groups, m, n}, k.out);
    const DepthCall call{a, b, equal_parts(depth, groups), d, options, stream};
    return analyze<HostKernel<k>>(grid_of(call, k.tile), [&](auto& bind, auto& p) { bind_k_grouped(bind, p, call); });
  } else {
    const bool pairs = k.activation == Activation::swiglu;
    const GroupedGemmOptions options{.activation = k.activation};
    const Tensor a = placeholder({m, depth}, k.dtype), d = placeholder({m, pairs ? n / 2 : n}, k.out);
    const Tensor b = k.b_rows ? placeholder({groups, depth, n}, k.dtype).transpose(1, 2) : placeholder({groups, n, depth}, k.dtype);
    const Call call{a, b, equal_parts(m, groups), d, options, stream};
    const Tensor tiles = Tensor::zeros({list_size(call.m(), call.groups(), k.tile), ListedGroups::numbers}, DType::i32, stream);
    launch_cpu<ListGroupTiles<kListed>>({.m = call.groups()}, [&](auto& bind, auto& p) { bind_list(bind, p, call, k.tile, tiles); });
    return analyze<HostKernel<k>>(grid_of(call, k.tile), [&](auto& bind, auto& p) { bind_grouped(bind, p, call, k.b_rows, tiles); });
  }
}

/// Of the list for tiles of 64 x 128.
Analysis analyze_list(const ShapeValues& shape) {
  const std::int64_t groups = shape["groups"];
  require(groups > 0, "shape: groups is 0; it must be at least 1");
  const GroupedGemmOptions options;
  const Tensor a = placeholder({shape["M"], 1}, DType::bf16), b = placeholder({groups, 1, 1}, DType::bf16);
  const Call call{a, b, equal_parts(shape["M"], groups), a, options, Stream::standard(Device::cpu())};
  const Tensor tiles = placeholder({list_size(call.m(), call.groups(), kShort), ListedGroups::numbers}, DType::i32);
  return analyze<ListGroupTiles<kListed>>({.m = call.groups()}, [&](auto& bind, auto& p) { bind_list(bind, p, call, kShort, tiles); });
}

template <std::size_t i>
KernelVariant variant() {
  constexpr Kernel k = kRegistered[i];
  return {make_spec({type_of(k), source_of(k), detail::tile_recorder<HostKernel<k>>()}, true, true, name_of(k)), analyze_shape<i>};
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> all = []<std::size_t... i>(std::index_sequence<i...>) { return std::vector<KernelVariant>{variant<i>()...}; }
  (std::make_index_sequence<std::size(kRegistered)>());
  const Kernel list{.form = Kernel::list};
  all.push_back({make_spec({type_of(list), source_of(list), nullptr}, true, true, name_of(list)), analyze_list});
  return all;
}

}  // namespace tw::kernels::grouped_gemm

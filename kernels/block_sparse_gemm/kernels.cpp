#include "kernels/block_sparse_gemm/kernels.hpp"

#include <iterator>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "tilewave/analyze.hpp"

namespace tw::kernels::block_sparse_gemm {

std::vector<CostedTile> configs(std::int64_t generic_shared) {
  std::vector<CostedTile> tiles;
  if (generic_shared > 0)
    tiles = generic_tiles(generic_shared);
  else
    tiles.assign(kProductTiles.begin(), kProductTiles.end());
  std::erase_if(tiles, [](const CostedTile& t) { return t.cluster > 1; });
  return tiles;
}

bool valid(const Call& call, const ProductTile& tile, bool b_rows) {
  return (!call.by_row() || call.block() % tile.bm == 0) && (!call.by_column() || call.block() % tile.bn == 0) &&
         (!b_rows || tile.bn % 64 == 0);
}

ProductTile choose_tile(const Call& call, bool b_rows, int units, std::int64_t generic_shared) {
  const std::vector<CostedTile> all = configs(generic_shared);
  const double steps = static_cast<double>(call.k()) * 2 / kStepBytes;
  return all[static_cast<std::size_t>(fastest_tile(
      all, [&](const CostedTile& t) { return valid(call, t, b_rows); },
      [&](const CostedTile& t) {
        const TileGrid grid = grid_of(call, t);
        return product_time(t, std::int64_t{grid.m} * grid.n, steps, units);
      }))];
}

std::string type_of(const Kernel& k) {
  if (k.list) return tw::format("tw::kernels::block_sparse_gemm::ListBlocks<{}>", kListed);
  return tw::format(
      "tw::kernels::block_sparse_gemm::BlockSparseGemm<tw::kernels::gemm::Operands<{}, tw::Contract::columns, tw::Contract::{}>, {}, "
      "tw::kernels::gemm::Tiles<{}, {}, {}, {}, 1, {}>>",
      element_name(k.dtype), k.b_rows ? "rows" : "columns", linear_name(k.dtype, k.activation, {}), k.tile.bm, k.tile.bn, kStepBytes / 2,
      k.tile.stages, k.tile.band);
}

const detail::NamedKernel& named(const Kernel& kernel) {
  static KernelTable<Kernel> table(type_of, "kernels/block_sparse_gemm/block_sparse_gemm.tile.hpp");
  return table[kernel];
}

std::string name_of(const Kernel& k) {
  constexpr const char* kActivations[] = {"", "_relu", "_gelu_erf", "_gelu_tanh", "_silu", "_swiglu"};
  if (k.list) return "list_blocks";
  return tw::format("block_sparse_gemm_{}_{}_{}x{}{}", tw::name_of(k.dtype), k.b_rows ? "nn" : "nt", k.tile.bm, k.tile.bn,
                    kActivations[static_cast<std::size_t>(k.activation)]);
}

namespace {

constexpr Kernel kRegistered[] = {{.tile = kProductTiles[1]}, {.tile = kProductTiles[3]}};
static_assert(kProductTiles[1] == ProductTile{128, 256, 4, 1, 8} && kProductTiles[3] == ProductTile{128, 128, 6, 1, 16});

/// f(call) for a shape whose blocks of D all have lists, and are all kept if the mask, of zeros, is not looked at.
template <class F>
Analysis with_call(const ShapeValues& shape, F f) {
  const std::int64_t m = shape["M"], n = shape["N"], k = shape["K"], block = shape["block"];
  require(block == 64 || block == 128 || block == 256, "shape: block is {}; it must be 64, 128 or 256", block);
  const Tensor a = placeholder({m, k}, DType::bf16), d = placeholder({m, n}, DType::bf16);
  const Tensor mask = placeholder({(m + block - 1) / block, (n + block - 1) / block}, DType::u8);
  BlockSparseGemmOptions options;
  options.block = static_cast<int>(block);
  options.d_mask = &mask;
  return f(Call{a, placeholder({n, k}, DType::bf16), d, options, Stream::standard(Device::cpu())});
}

template <std::size_t i>
Analysis analyze_product(const ShapeValues& shape) {
  constexpr Kernel kernel = kRegistered[i];
  return with_call(shape, [&](const Call& call) {
    const Tensor lists = Tensor::zeros(lists_shape(call), DType::i32);
    launch_cpu<ListBlocks<kListed>>(list_grid(call), [&](auto& bind, auto& p) {
      bind_lists(bind, p, call, lists);
      p.d.data = nullptr;
    });
    return analyze<HostKernel<kernel>>(grid_of(call, kernel.tile), [&](auto& bind, auto& p) { bind_product(bind, p, call, false, lists); });
  });
}

Analysis analyze_lists(const ShapeValues& shape) {
  return with_call(shape, [](const Call& call) {
    const Tensor lists = placeholder(lists_shape(call), DType::i32);
    return analyze<ListBlocks<kListed>>(list_grid(call), [&](auto& bind, auto& p) { bind_lists(bind, p, call, lists); });
  });
}

}  // namespace

std::vector<KernelVariant> registered() {
  constexpr Kernel list{.list = true};
  std::vector<KernelVariant> all = []<std::size_t... i>(std::index_sequence<i...>) {
    return std::vector<KernelVariant>{
        {make_spec({type_of(kRegistered[i]), HostKernel<kRegistered[i]>::source, detail::tile_recorder<HostKernel<kRegistered[i]>>()}, true,
                   true, name_of(kRegistered[i])),
         analyze_product<i>}...};
  }
  (std::make_index_sequence<std::size(kRegistered)>());
  all.push_back({make_spec({type_of(list), HostKernel<list>::source, nullptr}, true, true, name_of(list)), analyze_lists});
  return all;
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  const auto add = [&](const Kernel& k) {
    specs.push_back(
        for_target(make_spec({type_of(k), HostKernel<Kernel{.list = true}>::source, nullptr}, true, true, name_of(k)), GpuTarget::cuda));
  };
  for (const CostedTile& tile : configs(shared_bytes)) add({.tile = tile});
  add({.list = true});
  return specs;
}

}  // namespace tw::kernels::block_sparse_gemm

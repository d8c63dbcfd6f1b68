#include <iterator>

#include "kernels/check.hpp"
#include "kernels/sparse_gemm/kernels.hpp"
#include "tilewave/analyze.hpp"

// The kernels that are worth compiling ahead of time, and their analysis.

namespace tw::kernels::sparse_gemm {

namespace {

/// The fastest ones of 16 bits and of 8.
constexpr const ProductTile& kWide = kTiles[3];
constexpr const ProductTile& kSquare = kTiles[4];
static_assert(kWide == ProductTile{192, 128, 3, 1, 8} && kSquare.bm == 128 && kSquare.bn == 128);

constexpr Kernel kRegistered[] = {{.transposed = true, .tile = kWide},
                                  {.transposed = true, .tile = kSquare},
                                  {.tile = kWide},
                                  {.dtype = DType::fp8_e4m3, .transposed = true, .tile = kSquare},
                                  {.dtype = DType::i8, .tile = kSquare}};

void check_depth(std::int64_t k) { require(k > 0 && k % 4 == 0, "shape: K is {}; it must be a multiple of 4 and not 0", k); }

SparseMatrix placeholder_matrix(std::int64_t m, std::int64_t k, DType dtype) {
  return {placeholder({m, k / 2}, dtype), placeholder(SparseMatrix::metadata_shape(m, k, dtype), DType::u8)};
}

template <std::size_t i>
Analysis analyze_shape(const ShapeValues& shape) {
  constexpr Kernel k = kRegistered[i];
  const std::int64_t m = shape["M"], n = shape["N"], depth = shape["K"];
  check_depth(depth);
  const DType out = gemm::result_of(k.dtype);
  const SparseGemmOptions options;
  const Tensor d = k.transposed ? placeholder({n, m}, out).transpose(0, 1) : placeholder({m, n}, out);
  const Call call{placeholder_matrix(m, depth, k.dtype), placeholder({n, depth}, k.dtype), d, {}, k.transposed, options,
                  Stream::standard(Device::cpu())};
  return analyze<HostKernel<k>>(grid_of(call, k.tile), [&](auto& bind, auto& p) { bind_product(bind, p, call, k); });
}

using CompressHalf = Compress<u16, false>;
Analysis analyze_compress(const ShapeValues& shape) {
  const std::int64_t m = shape["M"], k = shape["K"];
  check_depth(k);
  const Tensor dense = placeholder({m, k}, DType::bf16);
  const SparseMatrix sparse = placeholder_matrix(m, k, DType::bf16);
  return analyze<CompressHalf>(groups_grid(m, k, DType::bf16), [&](auto&, auto& p) { bind_compress(p, dense, sparse, nullptr); });
}

template <std::size_t i>
KernelVariant variant() {
  constexpr Kernel k = kRegistered[i];
  return {make_spec({type_of(k), HostKernel<k>::source, detail::tile_recorder<HostKernel<k>>()}, true, true, name_of(k)), analyze_shape<i>};
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> all = []<std::size_t... i>(std::index_sequence<i...>) { return std::vector<KernelVariant>{variant<i>()...}; }
  (std::make_index_sequence<std::size(kRegistered)>());
  all.push_back({make_spec(kernel_info<CompressHalf>, true, true, "compress_2_4_16bit"), analyze_compress});
  return all;
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  const auto add = [&](Kernel k) {
    for (const CostedTile& tile : configs(shared_bytes, static_cast<int>(size_of(k.dtype)))) {
      k.tile = tile;
      specs.push_back(for_target(make_spec({type_of(k), "tilewave/tile/gemm.tile.hpp", nullptr}, true, true, name_of(k)), GpuTarget::cuda));
    }
  };
  add({.transposed = true});
  add({});
  add({.dtype = DType::i8});
  specs.push_back(for_target(make_spec(kernel_info<CompressHalf>, true, true, "compress_2_4_16bit"), GpuTarget::cuda));
  return specs;
}

}  // namespace tw::kernels::sparse_gemm

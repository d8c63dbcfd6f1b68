#pragma once

#include <algorithm>
#include <compare>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/activation.hpp"
#include "kernels/block_sparse_gemm/block_sparse_gemm.tile.hpp"
#include "kernels/named.hpp"
#include "kernels/product_tiles.hpp"
#include "kernels/variant.hpp"
#include "tilewave/block_sparse_gemm.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::block_sparse_gemm {

/// A checked call, whose result has elements.
struct Call {
  const Tensor& a;  ///< [M, K]
  Tensor b;         ///< [N, K]
  const Tensor& d;
  const BlockSparseGemmOptions& options;
  Stream stream;

  int m() const { return static_cast<int>(d.shape(0)); }
  int n() const { return static_cast<int>(d.shape(1)); }
  int k() const { return static_cast<int>(a.shape(1)); }
  int block() const { return options.block; }
  static int ceil_div(int x, int by) { return (x + by - 1) / by; }
  int depth() const { return ceil_div(k(), block()); }
  /// Whether the lists depend on D's row or column of blocks.
  bool by_row() const { return options.a_mask || options.d_mask || options.product_mask; }
  bool by_column() const { return options.b_mask || options.d_mask || options.product_mask; }
  int lists_m() const { return by_row() ? ceil_div(m(), block()) : 1; }
  int lists_n() const { return by_column() ? ceil_div(n(), block()) : 1; }
};

/// Blocks that ListBlocks looks at at a time.
inline constexpr int kListed = 256;

/// One of the family's GPU kernels by the values that name it.
struct Kernel {
  bool list = false;  ///< ListBlocks
  DType dtype = DType::bf16;
  bool b_rows = false;  ///< B is stored [K, N]
  Activation activation = Activation::none;
  ProductTile tile = {};
  auto operator<=>(const Kernel&) const = default;
};

std::string type_of(const Kernel& kernel);
const detail::NamedKernel& named(const Kernel& kernel);
/// For people: "block_sparse_gemm_bf16_nt_128x128".
std::string name_of(const Kernel& kernel);

/// The same kernel as a type: for Params, which are those of every tile and activation, and for the CPU and analysis targets.
template <Kernel k, class Act = FunctorOf<k.activation>>
constexpr auto host_kernel() {
  using T = ElementOf<k.dtype>;
  if constexpr (k.list)
    return std::type_identity<ListBlocks<kListed>>{};
  else
    return std::type_identity<
        BlockSparseGemm<gemm::Operands<T, Contract::columns, k.b_rows ? Contract::rows : Contract::columns>, Linear<T, Act>,
                        gemm::Tiles<k.tile.bm, k.tile.bn, kStepBytes / static_cast<int>(sizeof(T)), k.tile.stages, 1, k.tile.band>>>{};
}
template <Kernel k, class Act = FunctorOf<k.activation>>
using HostKernel = typename decltype(host_kernel<k, Act>())::type;

/// The tiles of a GPU: gemm's that need no cluster. `generic_shared`: see kernels/generic_tiles.hpp.
std::vector<CostedTile> configs(std::int64_t generic_shared);
/// Whether a tile lies in one block in the dimensions that masks have.
bool valid(const Call& call, const ProductTile& tile, bool b_rows);
/// The valid one with the least predicted time without masks.
ProductTile choose_tile(const Call& call, bool b_rows, int units, std::int64_t generic_shared);

inline TileGrid list_grid(const Call& call) { return {Call::ceil_div(call.lists_m() * call.lists_n(), ListBlocks<kListed>::rows)}; }
inline TileGrid grid_of(const Call& call, const ProductTile& t) { return {Call::ceil_div(call.m(), t.bm), Call::ceil_div(call.n(), t.bn)}; }
inline Shape lists_shape(const Call& call) { return {std::int64_t{call.lists_m()} * call.lists_n(), call.depth() + 1}; }

/// Fills in the parameters of a call's kernels. `lists`: i32, of lists_shape().
template <class Params>
void bind_lists(auto&, Params& p, const Call& call, const Tensor& lists) {
  const auto set = [](auto& mask, const Tensor* t, int m, int n, int k) {
    const auto stride = [&](int dim) { return t != nullptr && dim >= 0 ? t->stride(dim) : std::int64_t{0}; };
    mask.data = t != nullptr ? static_cast<const u8*>(t->data()) : nullptr;
    mask.stride_m = stride(m);
    mask.stride_n = stride(n);
    mask.stride_k = stride(k);
  };
  set(p.a, call.options.a_mask, 0, -1, 1);
  set(p.b, call.options.b_mask, -1, 1, 0);
  set(p.d, call.options.d_mask, 0, 1, -1);
  set(p.product, call.options.product_mask, 0, 1, 2);
  p.lists = lists.data<i32>();
  p.lists_m = call.lists_m();
  p.lists_n = call.lists_n();
  p.depth = call.depth();
}
template <class Params>
void bind_product(auto& bind, Params& p, const Call& call, bool b_rows, const Tensor& lists) {
  const Tensor b = b_rows ? call.b.transpose(0, 1) : call.b;
  bind(p.in.a, call.k() > 0 ? &call.a : nullptr);
  bind(p.in.b, call.k() > 0 ? &b : nullptr);
  p.in.depth = call.k();
  p.in.a_batches = p.in.b_batches = 0;
  auto& end = p.epilogue;
  using Out = typename decltype(end.d)::Element;
  bind(end.d, call.d);
  bind(end.c, nullptr);
  bind(end.residual, nullptr);
  end.bias = call.options.bias != nullptr ? call.options.bias->template data<Out>() : nullptr;
  end.a_scale = end.b_scale = nullptr;
  end.alpha = call.options.alpha;
  end.beta = 0;
  end.has_bias = call.options.bias != nullptr;
  end.has_residual = false;
  end.activation = any_activation(call.options.activation);
  constexpr int kAll = 1 << 30;
  p.lists = lists.data<i32>();
  p.list_rows = call.by_row() ? call.block() : kAll;
  p.list_cols = call.by_column() ? call.block() : kAll;
  p.lists_n = call.lists_n();
  p.depth = call.depth();
  p.steps_of_block = call.block() * 2 / kStepBytes;
}

void run_on_cpu(const Call& call);
void run_on_gpu(const Call& call);

std::vector<KernelVariant> registered();
std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes);
inline constexpr ShapeKey kShape[] = {{"M", "rows of A and D"},
                                      {"N", "columns of B and D"},
                                      {"K", "columns of A, rows of B"},
                                      {"block", "rows and columns of a block, all of which are kept", 128}};

}  // namespace tw::kernels::block_sparse_gemm

#pragma once

#include <array>
#include <compare>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kernels/activation.hpp"
#include "kernels/named.hpp"
#include "kernels/product_tiles.hpp"
#include "kernels/sparse_gemm/call.hpp"
#include "kernels/sparse_gemm/groups.tile.hpp"
#include "kernels/variant.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/tile/gemm.tile.hpp"

namespace tw::kernels::sparse_gemm {

/// One of the family's products by the values that name it. A step is one block of columns: 128 bytes of values in each row of A, 256 bytes
/// in each row of B.
struct Kernel {
  DType dtype = DType::bf16;
  bool b_rows = false;      ///< B is stored [K, N]
  bool transposed = false;  ///< D is stored [N, M]
  Activation activation = Activation::none;
  bool addends = false;  ///< D is read as C, or a residual is
  ProductTile tile = {};
  auto operator<=>(const Kernel&) const = default;
};

/// Tiles for sm_90a, in steps of 128 x 256. A sparse product reads twice the bytes of B that a dense one of the same time does, so shared
/// memory holds few slots, and tiles with little reuse cost more than in gemm. Costs are those of 8192 x 8192 x 8192 in bf16 (NOTES.md).
inline constexpr std::array<CostedTile, 7> kTiles{{
    {{128, 256, 2, 2, 8}, 1.73, 5},
    {{128, 256, 2, 1, 8}, 1.57, 4},
    {{192, 192, 2, 1, 8}, 1.98, 4},
    {{192, 128, 3, 1, 8}, 0.9, 4},
    {{128, 128, 3, 1, 16}, 0.7, 4},
    {{64, 128, 4, 1, 16}, 0.42, 4},
    {{64, 64, 6, 1, 16}, 0.26, 4},
}};
/// Bytes of a slot: values, their metadata and B.
constexpr int slot_bytes(const ProductTile& t, int element_bytes) {
  return (t.bm + 2 * t.bn) * kStepBytes + t.bm / 16 * (4 / element_bytes) * 128;
}
/// The tiles of a GPU whose slots fit its shared memory. `generic_shared`: the shared memory of a block, where kernels are compiled for the
/// generic target; 0: sm_90a's.
std::vector<CostedTile> configs(std::int64_t generic_shared, int element_bytes);
/// Whether a call can have the tile: reading addends takes registers that the sums of wide tiles do not leave, as GELU does with three
/// warpgroups whose result leaves transposed.
bool valid(const Call& call, const ProductTile& tile);
/// The valid one with the least predicted time.
ProductTile choose_tile(const Call& call, int units, std::int64_t generic_shared);

/// The type for the run-time compiler.
std::string type_of(const Kernel& kernel);
const detail::NamedKernel& named(const Kernel& kernel);
/// For people: "sparse_gemm_bf16_nt_128x256_cluster_transposed".
std::string name_of(const Kernel& kernel);

/// The same kernel as a type: for Params, which are those of every tile and activation, and for the CPU and analysis targets.
template <Kernel k, class Act = FunctorOf<k.activation>>
constexpr auto host_kernel() {
  using T = ElementOf<k.dtype>;
  using Out = ElementOf<gemm::result_of(k.dtype)>;
  using In = gemm::SparseOperands<T, k.b_rows ? Contract::rows : Contract::columns>;
  using Steps = gemm::Tiles<k.tile.bm, k.tile.bn, sparse_block<T>, k.tile.stages, k.tile.cluster, k.tile.band>;
  using End = Linear<Out, Act, LinearOptions{.addends = k.addends, .scales = sizeof(T) == 1, .transposed = k.transposed}>;
  return std::type_identity<gemm::Gemm<In, conditional<is_same<T, i8>, StoreSums<Out>, End>, Steps>>{};
}
template <Kernel k, class Act = FunctorOf<k.activation>>
using HostKernel = typename decltype(host_kernel<k, Act>())::type;

inline TileGrid grid_of(const Call& call, const ProductTile& t) { return {(call.m() + t.bm - 1) / t.bm, (call.n() + t.bn - 1) / t.bn}; }

/// Fills in the parameters of any of these kernels.
template <class Params>
void bind_product(auto& bind, Params& p, const Call& call, const Kernel& kernel) {
  const SparseGemmOptions& o = call.options;
  const Tensor b = kernel.b_rows ? call.b.transpose(0, 1) : call.b, d = kernel.transposed ? call.d.transpose(0, 1) : call.d;
  bind(p.in.a, call.a.values);
  bind(p.in.a_metadata, call.a.metadata);
  bind(p.in.b, b);
  p.in.depth = call.k();
  p.in.a_batches = p.in.b_batches = 0;
  p.splits = 1;
  auto& end = p.epilogue;
  bind(end.d, d);
  if constexpr (requires { end.c; }) {
    using Out = typename decltype(end.d)::Element;
    bind(end.c, o.beta != 0 ? &call.d : nullptr);
    bind(end.residual, o.residual != nullptr ? &call.residual : nullptr);
    end.bias = o.bias != nullptr ? o.bias->template data<Out>() : nullptr;
    end.a_scale = o.a_scale != nullptr ? o.a_scale->template data<float>() : nullptr;
    end.b_scale = o.b_scale != nullptr ? o.b_scale->template data<float>() : nullptr;
    end.alpha = o.alpha;
    end.beta = o.beta;
    end.has_bias = o.bias != nullptr;
    end.has_residual = o.residual != nullptr;
    end.activation = any_activation(o.activation);
  }
}

/// Of the kernels between a dense and a sparse matrix.
inline TileGrid groups_grid(std::int64_t rows, std::int64_t cols, DType dtype) {
  const std::int64_t block = 256 / static_cast<std::int64_t>(size_of(dtype));
  return {static_cast<int>((rows + 15) / 16), static_cast<int>((cols + block - 1) / block)};
}
void bind_matrix(auto& matrix, const Tensor& t) {
  using Element = typename std::remove_reference_t<decltype(matrix)>::Element;
  matrix.data = static_cast<Element*>(t.data());
  matrix.stride_row = t.stride(0);
  matrix.stride_col = t.stride(1);
}
void bind_compress(auto& p, const Tensor& dense, const SparseMatrix& sparse, const Tensor* refused) {
  bind_matrix(p.dense, dense);
  bind_matrix(p.values, sparse.values);
  p.metadata = sparse.metadata.data<u8>();
  p.refused = refused != nullptr ? refused->data<i32>() : nullptr;
  p.rows = static_cast<int>(dense.shape(0));
  p.cols = static_cast<int>(dense.shape(1));
}

std::vector<KernelVariant> registered();
std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes);
inline constexpr ShapeKey kShape[] = {
    {"M", "rows of the sparse A and of D"}, {"N", "columns of B and D"}, {"K", "columns of A, rows of B"}};

}  // namespace tw::kernels::sparse_gemm

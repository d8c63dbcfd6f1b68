#include "kernels/check.hpp"
#include "kernels/gemm/block_scaled.tile.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/kernels.hpp"
#include "kernels/gemm/skinny.tile.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"

namespace tw::kernels::gemm {

namespace {

constexpr Contract kColumns = Contract::columns;

/// Params as the host fills them in: tile sizes, contractions and epilogues do not change their layout.
template <class Kernel>
using ParamsOf = typename Kernel::template On<sm_90a::Target<>>::Params;
using AnyTiles = Tiles<64, 64, 64, 2, 1, 1>;
template <class T, class Epilogue>
using GemmParams = ParamsOf<Gemm<Operands<T, kColumns, kColumns>, Epilogue, AnyTiles>>;
constexpr const char* kGemmSource = "tilewave/tile/gemm.tile.hpp";
constexpr const char* kSkinnySource = "kernels/gemm/skinny.tile.hpp";

DType result_of(DType operands) { return operands == DType::fp8_e4m3 ? DType::bf16 : operands == DType::i8 ? DType::i32 : operands; }

TileGrid grid_of(const Config& c, std::int64_t m, std::int64_t n, int batch) {
  return {ceil_div(static_cast<int>(m), c.bm), ceil_div(static_cast<int>(n), c.bn), batch};
}

/// The product that the kernel computes: A B, or with swapped operands (B A)^T, so that the rows of a skinny A are the tile's columns.
struct Product {
  Tensor a, b;  ///< as the kernel's contractions want them stored
  GemmKernel kernel;
  bool swapped = false;
};

void launch_whole(const Call& call, const Product& product) {
  static KernelTable<GemmKernel> table(type_of, kGemmSource);
  with_types(call.a.dtype(), [&]<class T, class Out>(std::type_identity<T>, std::type_identity<Out>) {
    using Epilogue = conditional<is_same<T, i8>, StoreSums<Out>, Linear<Out, Identity>>;
    detail::launch_named<GemmParams<T, Epilogue>>(table[product.kernel], call.stream,
                                                  grid_of(product.kernel.tile, call.m, call.n, call.batch),
                                                  [&](auto& bind, auto& p) { bind_call(bind, p, call, product.a, product.b); });
  });
}

/// D from f32 sums over splits of K: [batch, splits, M, N].
void sum_partials(const Call& call, const Tensor& partial) {
  static KernelTable<SumKernel> table(type_of, kSkinnySource);
  const TileGrid grid{ceil_div(call.m, kSum.rows), ceil_div(call.n, kSum.cols), call.batch};
  with_float_type(call.d.dtype(), [&]<class T>(std::type_identity<T>) {
    detail::launch_named<ParamsOf<SumPartials<Linear<T, Identity>, kSum.rows, kSum.cols>>>(
        table[{call.d.dtype(), call.activation, call.addends()}], call.stream, grid,
        [&](auto& bind, auto& p) { bind_sum(bind, p, call, partial); });
  });
}

/// The product as sums over splits of K in a workspace, which a second kernel adds up.
void launch_split(const Call& call, const Product& product, int splits) {
  static KernelTable<GemmKernel> table(type_of, kGemmSource);
  splits = used_splits(call.k, size_of(call.a.dtype()), splits);
  const Shape shape{call.batch, splits, call.m, call.n};
  const Tensor partial = workspace(shape, DType::f32, call.stream);
  const auto [m, n] = product.swapped ? std::pair{call.n, call.m} : std::pair{call.m, call.n};
  with_16bit_type(call.a.dtype(), [&]<class T>(std::type_identity<T>) {
    detail::launch_named<GemmParams<T, StoreSums<float>>>(
        table[product.kernel], call.stream, grid_of(product.kernel.tile, m, n, call.batch * splits),
        [&](auto& bind, auto& p) { bind_split(bind, p, call, product.a, product.b, partial, product.swapped); });
  });
  sum_partials(call, partial);
}

/// One row of A; B stored [N, K].
void launch_gemv(const Call& call) {
  static KernelTable<GemvKernel> table(type_of, kSkinnySource);
  with_16bit_type(call.a.dtype(), [&]<class T>(std::type_identity<T>) {
    detail::launch_named<ParamsOf<Gemv<T, Linear<T, Identity>, kGemv.rows, kGemv.piece, kGemv.warps>>>(
        table[{call.a.dtype(), call.activation, call.addends()}], call.stream, {ceil_div(call.n, kGemv.rows), call.batch},
        [&](auto& bind, auto& p) { bind_gemv(bind, p, call); });
  });
}

void launch_block_scaled(const Call& call) {
  static KernelTable<Config> table(block_scaled_type_of, BlockScaledGemm<bf16, Tiles<64, 64, 128, 2, 1, 1>>::source);
  const int chosen = std::max(call.config, 0);
  require(chosen < static_cast<int>(kBlockScaledConfigs.size()), "gemm: config is {}; with block scales it must be below {}", chosen,
          kBlockScaledConfigs.size());
  Config tile = kBlockScaledConfigs[static_cast<std::size_t>(chosen)];
  if (const std::int64_t shared = generic_shared_bytes(call.stream)) tile = fit_generic(tile, shared);
  detail::launch_named<ParamsOf<BlockScaledGemm<bf16, Tiles<64, 64, 128, 2, 1, 1>>>>(
      table[tile], call.stream, grid_of(tile, call.m, call.n, 1), [&](auto& bind, auto& p) { bind_block_scaled(bind, p, call); });
}

/// The tiles that the call asks for, or the heuristic's choice.
Config tile_of(const Call& call, const Problem& problem) {
  if (call.tile) return *call.tile;
  const int chosen = call.config >= 0 ? call.config : choose_config(problem);
  const std::vector<Config> all = configs(problem.generic_shared);
  require(chosen < static_cast<int>(all.size()) && valid(all[static_cast<std::size_t>(chosen)], problem),
          "gemm: config is {}; it must be below {}, and with beta or a residual have at most 128 columns, with B stored [K, N] a "
          "multiple of 64",
          chosen, all.size());
  return all[static_cast<std::size_t>(chosen)];
}

}  // namespace

void run_on_gpu(const Call& call) {
  if (call.block_scaled()) return launch_block_scaled(call);
  const DType dtype = call.a.dtype();
  if (is_gemv(call)) return launch_gemv(call);
  const Problem problem = problem_of(call);
  if (swaps_operands(call)) {
    const int splits = call.splits > 0 ? call.splits : choose_swapped_splits(problem);
    const Config tile = problem.generic_shared > 0 ? fit_generic(kSwapped, problem.generic_shared) : call.tile.value_or(kSwapped);
    return launch_split(call, {call.b, call.a, {.dtype = dtype, .out = DType::f32, .partial = true, .tile = tile}, true}, splits);
  }
  const Stored stored = as_stored(call.a, call.b);
  Product product{stored.a,
                  stored.b,
                  {.dtype = dtype,
                   .out = result_of(dtype),
                   .a_rows = stored.a_rows,
                   .b_rows = stored.b_rows,
                   .activation = call.activation,
                   .addends = call.addends(),
                   .tile = tile_of(call, problem)}};
  int splits = 1;
  if (splittable(call)) splits = call.splits > 0 ? call.splits : choose_splits(problem, product.kernel.tile);
  if (splits == 1) return launch_whole(call, product);
  product.kernel = {.dtype = dtype, .out = DType::f32, .b_rows = problem.b_rows, .partial = true, .tile = product.kernel.tile};
  launch_split(call, product, splits);
}

}  // namespace tw::kernels::gemm

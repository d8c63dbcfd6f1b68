#include "tilewave/block_sparse_gemm.hpp"

#include <cmath>

#include "kernels/block_sparse_gemm/kernels.hpp"
#include "kernels/check.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/device.hpp"

namespace tw {

namespace {

constexpr const char* kOp = "block_sparse_gemm";

void check_mask(const char* name, const Tensor* mask, const Shape& shape, const Tensor& d, int block) {
  if (mask == nullptr) return;
  require((mask->dtype() == DType::u8 || mask->dtype() == DType::boolean) && mask->shape() == shape,
          "{}: {} is {}; with blocks of {} it must be u8 or bool [{}]", kOp, name, *mask, block, tw::join(shape, ", "));
  check_operand(kOp, name, *mask, mask->dtype(), d.device());
  check_disjoint(kOp, {"d", &d}, {{name, mask}});
}

}  // namespace

namespace kernels::block_sparse_gemm {

namespace {

/// One tile for all block sizes.
constexpr ProductTile kCpuTile{64, 64, 2, 1, 8};

template <DType dtype>
void launch_on_cpu(const Call& call, const Tensor& lists) {
  constexpr Kernel k{.dtype = dtype, .tile = kCpuTile};
  launch_cpu<HostKernel<k, AnyActivation>>(grid_of(call, k.tile), [&](auto& bind, auto& p) { bind_product(bind, p, call, false, lists); });
}

}  // namespace

void run_on_cpu(const Call& call) {
  const Tensor lists = workspace(lists_shape(call), DType::i32, call.stream);
  launch_cpu<ListBlocks<kListed>>(list_grid(call), [&](auto& bind, auto& p) { bind_lists(bind, p, call, lists); });
  call.a.dtype() == DType::f16 ? launch_on_cpu<DType::f16>(call, lists) : launch_on_cpu<DType::bf16>(call, lists);
}

void run_on_gpu(const Call& call) {
  constexpr Kernel list{.list = true};
  const Tensor lists = workspace(lists_shape(call), DType::i32, call.stream);
  using ListParams = typename HostKernel<list>::template On<sm_90a::Target<>>::Params;
  detail::launch_named<ListParams>(named(list), call.stream, list_grid(call),
                                   [&](auto& bind, auto& p) { bind_lists(bind, p, call, lists); });

  const std::int64_t generic_shared = generic_shared_bytes(call.stream);
  const bool b_rows = gemm::stored_layout(call.a, call.b).b_rows;
  ProductTile tile;
  if (call.options.config < 0) {
    tile = choose_tile(call, b_rows, device_info(call.stream.device()).units, generic_shared);
  } else {
    const std::vector<CostedTile> all = configs(generic_shared);
    const auto config = static_cast<std::size_t>(call.options.config);
    require(config < all.size() && valid(call, all[config], b_rows),
            "{}: config is {}; it must be below {}, and its tiles must lie in one block of {} where masks have rows or columns", kOp,
            config, all.size(), call.block());
    tile = all[config];
  }
  const auto launch = [&]<DType dtype>() {
    using Params = typename HostKernel<Kernel{.dtype = dtype, .tile = {64, 64, 2}}>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(named({.dtype = dtype, .b_rows = b_rows, .activation = call.options.activation, .tile = tile}),
                                 call.stream, grid_of(call, tile),
                                 [&](auto& bind, auto& p) { bind_product(bind, p, call, b_rows, lists); });
  };
  call.a.dtype() == DType::f16 ? launch.template operator()<DType::f16>() : launch.template operator()<DType::bf16>();
}

}  // namespace kernels::block_sparse_gemm

void block_sparse_gemm(const Tensor& a, const Tensor& b, const Tensor& d, const BlockSparseGemmOptions& o) {
  const Device device = d.device();
  const DType dtype = a.dtype();
  require(dtype == DType::f16 || dtype == DType::bf16, "{}: a is {}; f16 and bf16 are supported", kOp, a);
  require(a.rank() == 2, "{}: a is {}; it must be [M, K]", kOp, a);
  require(b.rank() == 2 && b.shape(0) == a.shape(1), "{}: b is {}; for a {} it must be [{}, N]", kOp, b, a, a.shape(1));
  const Shape shape{a.shape(0), b.shape(1)};
  require(d.shape() == shape, "{}: d is {}; for a {} and b {} it must be [{}]", kOp, d, a, b, tw::join(shape, ", "));
  check_operand(kOp, "a", a, dtype, device);
  check_operand(kOp, "b", b, dtype, device);
  check_operand(kOp, "d", d, dtype, device);
  kernels::check_extents(kOp, "a", a);
  kernels::check_extents(kOp, "b", b);
  check_output(kOp, "d", d);
  check_disjoint(kOp, {"d", &d}, {{"a", &a}, {"b", &b}, {"bias", o.bias}});
  check_bias(kOp, o.bias, shape[1], dtype, device);
  require(o.block == 64 || o.block == 128 || o.block == 256, "{}: block is {}; 64, 128 and 256 are supported", kOp, o.block);
  require(o.activation != Activation::swiglu, "{}: activation is swiglu; it is not supported", kOp);
  require(std::isfinite(o.alpha), "{}: alpha is {}; it must be finite", kOp, o.alpha);
  const auto blocks = [&](std::int64_t x) { return (x + o.block - 1) / o.block; };
  const std::int64_t m = blocks(shape[0]), n = blocks(shape[1]), k = blocks(a.shape(1));
  check_mask("a_mask", o.a_mask, {m, k}, d, o.block);
  check_mask("b_mask", o.b_mask, {k, n}, d, o.block);
  check_mask("d_mask", o.d_mask, {m, n}, d, o.block);
  check_mask("product_mask", o.product_mask, {m, n, k}, d, o.block);
  constexpr std::int64_t kMostNumbers = std::int64_t{1} << 30;
  require(m <= kMostNumbers / std::max<std::int64_t>(n, 1) / (k + 1),
          "{}: d is {} and K is {}, which are {} x {} x {} blocks; up to {} are supported", kOp, d, a.shape(1), m, n, k, kMostNumbers);
  const kernels::block_sparse_gemm::Call call{a, b.transpose(0, 1), d, o, checked_stream(kOp, o.stream, device)};
  if (d.numel() == 0) return;
  device.is_cuda() ? kernels::block_sparse_gemm::run_on_gpu(call) : kernels::block_sparse_gemm::run_on_cpu(call);
}

}  // namespace tw

#include "tilewave/softmax.hpp"

#include <array>
#include <cmath>

#include "kernels/rows.hpp"
#include "kernels/softmax/softmax.tile.hpp"
#include "kernels/softmax/variants.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels;
using kernels::softmax::ChunkedRows;
using kernels::softmax::HeldRows;

constexpr const char* kOp = "softmax";

template <class In, class Out, int kRowWarps, int kShare>
using Held = HeldRows<In, Out, RowTile<kRowWarps, kShare>::rows, RowTile<kRowWarps, kShare>::cols, RowTile<kRowWarps, kShare>::warps,
                      kPieceColumns<In, Out>>;
/// For rows that no block holds: a block of 512 threads for each, 16 columns a thread at a time.
template <class In, class Out>
using Chunked = ChunkedRows<In, Out, 1, 8192, 16, kPieceColumns<In, Out>>;

struct Call {
  RowViews views;
  int cols;
  float scale;
  Stream stream;
};

void bind_call(auto& bind, auto& p, const Call& call) {
  bind(p.x, call.views[0]);
  bind(p.y, call.views[1]);
  p.scale_log2 = call.scale * kLog2E;
}

template <class In, class Out>
void run_on_gpu(const Call& call) {
  const auto launch = [&]<class Kernel, int kRows>(std::type_identity<Kernel>, std::integral_constant<int, kRows>) {
    launch_gpu<Kernel>(call.stream, row_grid(kOp, call.views, 1, kRows, 1), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
  };
  constexpr int kMaxShare = kPieceColumns<In, Out> == 8 ? 40 : 32;
  if (call.cols > longest_held_row(kMaxShare)) return launch(std::type_identity<Chunked<In, Out>>{}, std::integral_constant<int, 1>{});
  const RowConfig config =
      choose_rows(call.views.rows() * call.views.outer(), call.cols, device_info(call.stream.device()).units, kMaxShare);
  with_row_config(config, [&]<int kRowWarps, int kShare>() {
    launch(std::type_identity<Held<In, Out, kRowWarps, kShare>>{}, std::integral_constant<int, RowTile<kRowWarps, kShare>::rows>{});
  });
}

template <class In, class Out>
void run_on_cpu(const Call& call) {
  const auto launch = [&]<template <class, class, int, int, int, int> class Kernel, int kRows, int kCols>() {
    launch_cpu<Kernel<In, Out, kRows, kCols, 4, 0>>(row_grid(kOp, call.views, 1, kRows, 1),
                                                    [&](auto& bind, auto& p) { bind_call(bind, p, call); });
  };
  // A tile of 16 KB stays in the first-level cache.
  if (call.cols <= 256) return launch.template operator()<HeldRows, 16, 256>();
  if (call.cols <= 1280) return launch.template operator()<HeldRows, 1, 1280>();
  if (call.cols <= 4096) return launch.template operator()<HeldRows, 1, 4096>();
  launch.template operator()<ChunkedRows, 1, 1024>();
}

Call check(const Tensor& x, const Tensor& y, const SoftmaxOptions& options) {
  const Device device = y.device();
  require(is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported", kOp, x.describe());
  require(is_float(y.dtype()), "{}: y is {}; f32, f16 and bf16 are supported", kOp, y.describe());
  check_operand(kOp, "x", x, x.dtype(), device);
  check_operand(kOp, "y", y, y.dtype(), device);
  check_output(kOp, "y", y);
  require(x.rank() >= 1 && x.rank() <= 4, "{}: x is {}; it must have 1 to 4 dimensions", kOp, x.describe());
  require(y.shape() == x.shape(), "{}: y is {}; it must have x's shape, {}", kOp, y.describe(), x.describe());
  check_extents(kOp, "x", x);
  check_in_place(kOp, "y", y, "x", x);
  require(std::isfinite(options.scale) && options.scale > 0, "{}: scale is {}; it must be positive and finite", kOp, options.scale);
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", kOp, stream.device().name(), device.name());
  return {RowViews(std::array{&x, &y}), static_cast<int>(x.shape(-1)), options.scale, stream};
}

}  // namespace

void softmax(const Tensor& x, const Tensor& y, const SoftmaxOptions& options) {
  const Call call = check(x, y, options);
  if (x.numel() == 0) return;
  with_float_type(x.dtype(), [&]<class In>(std::type_identity<In>) {
    with_float_type(y.dtype(), [&]<class Out>(std::type_identity<Out>) {
      call.stream.device().is_cuda() ? run_on_gpu<In, Out>(call) : run_on_cpu<In, Out>(call);
    });
  });
}

namespace kernels::softmax {

namespace {

/// `longest`: columns of a row that the kernel takes.
template <class Kernel, std::int64_t longest>
Analysis analyze_shape(const ShapeValues& shape) {
  using On = typename Kernel::template On<analysis::Target>;
  using Params = typename On::Params;
  const std::int64_t rows = shape["rows"], cols = shape["cols"];
  require(cols <= longest, "shape: cols is {}; the kernel is for rows of up to {}", cols, longest);
  const Tensor x = placeholder({rows, cols}, dtype_of<typename decltype(Params::x)::Element>);
  const Tensor y = placeholder({rows, cols}, dtype_of<typename decltype(Params::y)::Element>);
  const Call call = check(x, y, {});
  return analyze<Kernel>(row_grid(kOp, call.views, 1, On::Values::rows, 1), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto held = [&]<class In, class Out, int kRowWarps, int kShare>(const char* name) {
    using Kernel = Held<In, Out, kRowWarps, kShare>;
    variants.push_back({make_spec(kernel_info<Kernel>, true, true, name), analyze_shape<Kernel, RowTile<kRowWarps, kShare>::cols>});
  };
  const auto chunked = [&]<class In, class Out>(const char* name) {
    using Kernel = Chunked<In, Out>;
    variants.push_back({make_spec(kernel_info<Kernel>, true, true, name), analyze_shape<Kernel, kLargestExtent>});
  };
  held.template operator()<bf16, bf16, 1, 8>("softmax_bf16_1x8");
  held.template operator()<bf16, bf16, 2, 24>("softmax_bf16_2x24");
  held.template operator()<bf16, bf16, 8, 8>("softmax_bf16_8x8");
  held.template operator()<bf16, bf16, 4, 32>("softmax_bf16_4x32");
  held.template operator()<bf16, bf16, 16, 32>("softmax_bf16_16x32");
  held.template operator()<f16, float, 8, 16>("softmax_f16_f32_8x16");
  held.template operator()<float, float, 8, 16>("softmax_f32_8x16");
  held.template operator()<float, float, 16, 24>("softmax_f32_16x24");
  chunked.template operator()<bf16, bf16>("softmax_bf16_chunked");
  chunked.template operator()<float, float>("softmax_f32_chunked");
  return variants;
}

}  // namespace kernels::softmax
}  // namespace tw

#include "tilewave/softmax.hpp"

#include <array>
#include <cmath>
#include <optional>
#include <string>

#include "kernels/named.hpp"
#include "kernels/row_tuning.hpp"
#include "kernels/softmax/softmax.tile.hpp"
#include "kernels/softmax/tuning.hpp"
#include "kernels/softmax/variants.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels;
using kernels::softmax::ChunkedRows;
using kernels::softmax::HeldRows;

constexpr const char* kOp = "softmax";

/// Rows that are too long for a block's registers: one block of 512 threads per row, 16 columns per thread at a time.
constexpr RowTile kChunk{1, 8192, 16};

template <class In, class Out, RowTile tile>
using Held = HeldRows<In, Out, tile.rows, tile.cols, tile.warps, kPieceColumns<In, Out>>;
template <class In, class Out>
using Chunked = ChunkedRows<In, Out, kChunk.rows, kChunk.cols, kChunk.warps, kPieceColumns<In, Out>>;

/// HeldRows on a GPU; without a configuration ChunkedRows.
struct RowKernel {
  DType in, out;
  std::optional<RowConfig> config;
  auto operator<=>(const RowKernel&) const = default;
  RowTile tile() const { return config ? row_tile(*config) : kChunk; }
};

std::string type_of(const RowKernel& k) {
  const RowTile tile = k.tile();
  return tw::format("tw::kernels::softmax::{}<{}, {}, {}, {}, {}, {}>", k.config ? "HeldRows" : "ChunkedRows", element_name(k.in),
                    element_name(k.out), tile.rows, tile.cols, tile.warps, piece_columns({k.in, k.out}));
}

struct Call {
  RowViews views;
  int cols;
  float scale;
  Stream stream;
  std::optional<RowConfig> config = {};  ///< for tuning; GPU only

  std::int64_t rows() const { return views.rows() * views.outer(); }
};

/// The call's key in the tuned choices.
std::string problem_key(const Call& call) {
  const DType in = call.views[0].dtype(), out = call.views[1].dtype();
  return tw::format("{} {}{} rows={},cols={}", kOp, name_of(in), in == out ? "" : tw::format(" to {}", name_of(out)), call.rows(),
                    call.cols);
}

void bind_call(auto& bind, auto& p, const Call& call) {
  bind(p.x, call.views[0]);
  bind(p.y, call.views[1]);
  p.scale_log2 = call.scale * kLog2E;
}

/// The maximum number of columns that fit a thread's registers.
int max_share(DType in, DType out) { return piece_columns({in, out}) == 8 ? 40 : 32; }

void run_on_gpu(const Call& call) {
  static KernelTable<RowKernel> table(type_of, Chunked<float, float>::source);
  const DType in = call.views[0].dtype(), out = call.views[1].dtype();
  const int share = max_share(in, out);
  RowKernel kernel{in, out, call.config};
  if (call.cols > longest_held_row(share))
    kernel.config.reset();
  else if (!call.config)
    kernel.config = tuned_rows(
        call.stream.device(), [&] { return problem_key(call); }, call.rows(), call.cols, share);
  const TileGrid grid = row_grid(kOp, call.views, 1, kernel.tile().rows, 1);
  with_float_type(in, [&]<class In>(std::type_identity<In>) {
    with_float_type(out, [&]<class Out>(std::type_identity<Out>) {
      // The tile changes neither the layout of Params nor the way tensors are bound.
      detail::launch_named<typename Chunked<In, Out>::template On<sm_90a::Target<>>::Params>(
          table[kernel], call.stream, grid, [&](auto& bind, auto& p) { bind_call(bind, p, call); });
    });
  });
}

void run_on_cpu(const Call& call) {
  const auto launch = [&]<template <class, class, int, int, int, int> class Kernel, int kRows, int kCols>() {
    launch_cpu<Kernel<cpu::AnyFloat, cpu::AnyFloat, kRows, kCols, 4, 0>>(row_grid(kOp, call.views, 1, kRows, 1),
                                                                         [&](auto& bind, auto& p) { bind_call(bind, p, call); });
  };
  // A tile of 16 KB stays in the L1 cache.
  if (call.cols <= 256) return launch.template operator()<HeldRows, 16, 256>();
  if (call.cols <= 1280) return launch.template operator()<HeldRows, 1, 1280>();
  if (call.cols <= 4096) return launch.template operator()<HeldRows, 1, 4096>();
  launch.template operator()<ChunkedRows, 1, 1024>();
}

Call check(const Tensor& x, const Tensor& y, const SoftmaxOptions& options) {
  const Device device = y.device();
  require(is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported", kOp, x);
  require(is_float(y.dtype()), "{}: y is {}; f32, f16 and bf16 are supported", kOp, y);
  check_operand(kOp, "x", x, x.dtype(), device);
  check_operand(kOp, "y", y, y.dtype(), device);
  check_output(kOp, "y", y);
  require(x.rank() >= 1 && x.rank() <= 4, "{}: x is {}; it must have 1 to 4 dimensions", kOp, x);
  require(y.shape() == x.shape(), "{}: y is {}; it must have x's shape, {}", kOp, y, x);
  check_extents(kOp, "x", x);
  check_in_place(kOp, {"y", &y}, {"x", &x});
  require(std::isfinite(options.scale) && options.scale > 0, "{}: scale is {}; it must be positive and finite", kOp, options.scale);
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", kOp, stream.device().name(), device.name());
  return {RowViews(std::array{&x, &y}), static_cast<int>(x.shape(-1)), options.scale, stream};
}

void run(const Call& call) { call.stream.device().is_cuda() ? run_on_gpu(call) : run_on_cpu(call); }

}  // namespace

void softmax(const Tensor& x, const Tensor& y, const SoftmaxOptions& options) {
  const Call call = check(x, y, options);
  if (x.numel() > 0) run(call);
}

namespace kernels::softmax {

namespace {

template <class Kernel>
Analysis analyze_call(const Call& call) {
  using Values = typename Kernel::template On<analysis::Target>::Values;
  return analyze<Kernel>(row_grid(kOp, call.views, 1, Values::rows, 1), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
}

/// `longest`: the maximum number of columns that the kernel supports.
template <class Kernel, std::int64_t longest>
Analysis analyze_shape(const ShapeValues& shape) {
  using Params = typename Kernel::template On<analysis::Target>::Params;
  const std::int64_t rows = shape["rows"], cols = shape["cols"];
  require(cols <= longest, "shape: cols is {}; the kernel supports up to {}", cols, longest);
  const Tensor x = placeholder({rows, cols}, dtype_of<typename decltype(Params::x)::Element>);
  const Tensor y = placeholder({rows, cols}, dtype_of<typename decltype(Params::y)::Element>);
  return analyze_call<Kernel>(check(x, y, {}));
}

/// Analysis depends only on T's size: f16 is analysed as bf16.
template <class T>
FamilyProblem problem_of(const Call& call, Device device) {
  constexpr RowTile kCounted = row_tile({16, 40});
  const Tensor x = placeholder({call.rows(), call.cols}, dtype_of<T>);
  const int share = max_share(x.dtype(), x.dtype());
  const RowProblem rows{kOp, problem_key(call), call.rows(), call.cols, share, longest_held_row(share)};
  return row_problem(rows, device, analyze_call<Held<T, T, kCounted>>(check(x, x, {})), kCounted);
}

}  // namespace

FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device) {
  const Shape of_x{shape["rows"], shape["cols"]};
  require(of_x[0] > 0 && of_x[1] > 0, "shape: rows and cols must be positive");
  const Tensor x = placeholder(of_x, dtype);
  FamilyProblem problem = dtype == DType::f32 ? problem_of<float>(check(x, x, {}), device) : problem_of<bf16>(check(x, x, {}), device);
  problem.prepare = [=](const Stream& stream, std::uint64_t seed) {
    const Tensor in = random_operand(of_x, dtype, seed, stream), out = Tensor::empty(of_x, dtype, stream);
    const auto launch = [=](const TunePoint& point) {
      Call call = check(in, out, {.stream = stream});
      call.config = row_config_of(point);
      run(call);
    };
    return TuneOperands{launch, out, bytes_of({&in, &out})};
  };
  return problem;
}

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add = [&]<class In, class Out>(const char* name, std::optional<RowConfig> config, Analysis (*analyze)(const ShapeValues&)) {
    const std::string type = type_of(RowKernel{dtype_of<In>, dtype_of<Out>, config});
    variants.push_back({make_spec({type, Chunked<In, Out>::source, nullptr}, true, true, name), analyze});
  };
  const auto held = [&]<class In, class Out, RowConfig config>(const char* name) {
    constexpr RowTile tile = row_tile(config);
    add.template operator()<In, Out>(name, config, analyze_shape<Held<In, Out, tile>, tile.cols>);
  };
  const auto chunked = [&]<class In, class Out>(const char* name) {
    add.template operator()<In, Out>(name, std::nullopt, analyze_shape<Chunked<In, Out>, kLargestExtent>);
  };
  held.template operator()<bf16, bf16, RowConfig{1, 8}>("softmax_bf16_1x8");
  held.template operator()<bf16, bf16, RowConfig{2, 24}>("softmax_bf16_2x24");
  held.template operator()<bf16, bf16, RowConfig{8, 8}>("softmax_bf16_8x8");
  held.template operator()<bf16, bf16, RowConfig{4, 32}>("softmax_bf16_4x32");
  held.template operator()<bf16, bf16, RowConfig{16, 32}>("softmax_bf16_16x32");
  held.template operator()<f16, float, RowConfig{8, 16}>("softmax_f16_f32_8x16");
  held.template operator()<float, float, RowConfig{8, 16}>("softmax_f32_8x16");
  held.template operator()<float, float, RowConfig{16, 24}>("softmax_f32_16x24");
  chunked.template operator()<bf16, bf16>("softmax_bf16_chunked");
  return variants;
}

}  // namespace kernels::softmax
}  // namespace tw

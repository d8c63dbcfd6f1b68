#include "tilewave/norm.hpp"

#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/norm/norm.tile.hpp"
#include "kernels/norm/tuning.hpp"
#include "kernels/norm/variants.hpp"
#include "kernels/row_tuning.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels;
using kernels::norm::CachedRows;
using kernels::norm::ChunkedRows;
using kernels::norm::HeldRows;
using kernels::norm::Kind;

template <Kind kind, class X, class Y, class W, int kRowWarps, int kShare>
using Held = HeldRows<kind, X, Y, W, RowTile<kRowWarps, kShare>::rows, RowTile<kRowWarps, kShare>::cols, RowTile<kRowWarps, kShare>::warps,
                      kPieceColumns<X, Y, W>>;
/// For rows that no block holds: a block of 512 threads for each, 8 columns a thread at a time.
template <Kind kind, class X, class Y, class W>
using Chunked = ChunkedRows<kind, X, Y, W, 1, 4096, 16, kPieceColumns<X, Y, W>>;

/// A checked call.
struct Call {
  RowViews views;  ///< x, y, and with a residual that and the tensor for h (x again where h is not stored)
  const NormOptions& options;
  int cols;
  Stream stream;
  std::optional<RowConfig> config = {};  ///< for tuning; of the GPU

  std::int64_t rows() const { return views.rows() * views.outer(); }
  /// x's where there are none.
  DType weights_dtype() const {
    const Tensor* const weights = options.weight ? options.weight : options.bias;
    return weights ? weights->dtype() : views[0].dtype();
  }
};

/// What tuned choices know the call by.
template <Kind kind>
std::string problem_key(const Call& call) {
  const DType in = call.views[0].dtype(), out = call.views[1].dtype();
  const NormOptions& o = call.options;
  return fmt::format("norm {} {}{} rows={},cols={}{}{}{}{}", kind == Kind::layer ? "layer" : "rms", name_of(in),
                     in == out ? "" : fmt::format(" to {}", name_of(out)), call.rows(), call.cols, o.residual ? " residual" : "",
                     o.weight ? " weight" : "", o.bias ? " bias" : "", call.weights_dtype() == in ? "" : " in f32");
}

void bind_call(auto& bind, auto& p, const Call& call) {
  const NormOptions& o = call.options;
  bind(p.x, call.views[0]);
  bind(p.y, call.views[1]);
  p.has_residual = o.residual != nullptr;
  p.stores_h = o.sum != nullptr;
  if (o.residual) bind(p.residual, call.views[2]);
  if (o.sum) bind(p.h, call.views[3]);
  if (o.weight) bind(p.weight, *o.weight);
  if (o.bias) bind(p.bias, *o.bias);
  p.per_column = 1.0f / static_cast<float>(call.cols);
  p.epsilon = o.epsilon;
}

template <Kind kind>
constexpr const char* kOp = kind == Kind::layer ? "layer_norm" : "rms_norm";

/// Columns of a thread, for which it has registers.
constexpr int kMaxShare = 32;

template <Kind kind, class X, class Y, class W>
void run_on_gpu(const Call& call) {
  const auto launch = [&]<class Kernel, int kRows>(std::type_identity<Kernel>, std::integral_constant<int, kRows>) {
    launch_gpu<Kernel>(call.stream, row_grid(kOp<kind>, call.views, 1, kRows, 1), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
  };
  if (call.cols > longest_held_row(kMaxShare))
    return launch(std::type_identity<Chunked<kind, X, Y, W>>{}, std::integral_constant<int, 1>{});
  const auto key = [&] { return problem_key<kind>(call); };
  const RowConfig config = call.config ? *call.config : tuned_rows(call.stream.device(), key, call.rows(), call.cols, kMaxShare);
  with_row_config(config, [&]<int kRowWarps, int kShare>() {
    launch(std::type_identity<Held<kind, X, Y, W, kRowWarps, kShare>>{}, std::integral_constant<int, RowTile<kRowWarps, kShare>::rows>{});
  });
}

template <Kind kind, class X, class Y, class W>
void run_on_cpu(const Call& call) {
  const auto launch = [&]<class Kernel>(std::type_identity<Kernel>, int rows) {
    launch_cpu<Kernel>(row_grid(kOp<kind>, call.views, 1, rows, 1), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
  };
  // A tile of 16 KB stays in the first-level cache.
  if (call.cols <= 256) return launch(std::type_identity<CachedRows<kind, X, Y, W, 16, 256>>{}, 16);
  if (call.cols <= 1280) return launch(std::type_identity<CachedRows<kind, X, Y, W, 1, 1280>>{}, 1);
  if (call.cols <= 4096) return launch(std::type_identity<CachedRows<kind, X, Y, W, 1, 4096>>{}, 1);
  launch(std::type_identity<ChunkedRows<kind, X, Y, W, 1, 1024, 4, 0>>{}, 1);
}

void check_weights(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  require(t.dtype() == x.dtype() || t.dtype() == DType::f32, "{}: {} is {}; it must be of x's dtype, {}, or f32", op, name, t.describe(),
          name_of(x.dtype()));
  check_operand(op, name, t, t.dtype(), x.device());
  require(t.shape() == Shape{x.shape(-1)}, "{}: {} is {}; it must be [{}]", op, name, t.describe(), x.shape(-1));
}

template <Kind kind>
Call check(const Tensor& x, const Tensor& y, const NormOptions& options) {
  constexpr const char* op = kOp<kind>;
  const Device device = y.device();
  require(is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported", op, x.describe());
  require(is_float(y.dtype()), "{}: y is {}; f32, f16 and bf16 are supported", op, y.describe());
  check_operand(op, "x", x, x.dtype(), device);
  check_operand(op, "y", y, y.dtype(), device);
  check_output(op, "y", y);
  require(x.rank() >= 1 && x.rank() <= 4, "{}: x is {}; it must have 1 to 4 dimensions", op, x.describe());
  require(y.shape() == x.shape(), "{}: y is {}; it must have x's shape, {}", op, y.describe(), x.describe());
  check_extents(op, "x", x);
  check_in_place(op, "y", y, "x", x);
  std::vector<const Tensor*> operands{&x, &y};
  if (options.residual) {
    const Tensor& residual = *options.residual;
    check_operand(op, "residual", residual, x.dtype(), device);
    require(residual.shape() == x.shape(), "{}: residual is {}; it must have x's shape, {}", op, residual.describe(), x.describe());
    check_in_place(op, "y", y, "residual", residual);
    operands.push_back(&residual);
  }
  if (options.sum) {
    const Tensor& sum = *options.sum;
    require(options.residual != nullptr, "{}: sum is {} without a residual; there is nothing to add", op, sum.describe());
    check_operand(op, "sum", sum, x.dtype(), device);
    check_output(op, "sum", sum);
    require(sum.shape() == x.shape(), "{}: sum is {}; it must have x's shape, {}", op, sum.describe(), x.describe());
    check_in_place(op, "sum", sum, "x", x);
    check_in_place(op, "sum", sum, "residual", *options.residual);
    require(sum.numel() == 0 || sum.data() != y.data(), "{}: sum is y's memory; the two results differ", op);
    operands.push_back(&sum);
  }
  if (options.weight) check_weights(op, "weight", *options.weight, x);
  if (options.bias) {
    require(kind == Kind::layer, "{}: bias is {}; RMS norm has none", op, options.bias->describe());
    check_weights(op, "bias", *options.bias, x);
    require(!options.weight || options.weight->dtype() == options.bias->dtype(),
            "{}: weight is {} and bias is {}; they must be of one dtype", op, options.weight ? options.weight->describe() : "",
            options.bias->describe());
  }
  require(std::isfinite(options.epsilon) && options.epsilon >= 0, "{}: epsilon is {}; it must be finite and not negative", op,
          options.epsilon);
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", op, stream.device().name(), device.name());
  return {RowViews(operands), options, static_cast<int>(x.shape(-1)), stream};
}

template <Kind kind>
void run(const Call& call) {
  with_float_type(call.views[0].dtype(), [&]<class X>(std::type_identity<X>) {
    with_float_type(call.views[1].dtype(), [&]<class Y>(std::type_identity<Y>) {
      const auto run = [&]<class W>(std::type_identity<W>) {
        call.stream.device().is_cuda() ? run_on_gpu<kind, X, Y, W>(call) : run_on_cpu<kind, X, Y, W>(call);
      };
      call.weights_dtype() == DType::f32 ? run(std::type_identity<float>{}) : run(std::type_identity<X>{});
    });
  });
}

template <Kind kind>
void check_and_run(const Tensor& x, const Tensor& y, const NormOptions& options) {
  const Call call = check<kind>(x, y, options);
  if (x.numel() > 0) run<kind>(call);
}

}  // namespace

void layer_norm(const Tensor& x, const Tensor& y, const NormOptions& options) { check_and_run<Kind::layer>(x, y, options); }
void rms_norm(const Tensor& x, const Tensor& y, const NormOptions& options) { check_and_run<Kind::rms>(x, y, options); }

namespace kernels::norm {

namespace {

/// Operands of a shape's call, made by tensor(shape, dtype).
template <Kind kind>
struct Operands {
  template <class MakeTensor>
  Operands(const ShapeValues& shape, DType in, DType out, MakeTensor tensor) {
    const Shape of_x{shape["rows"], shape["cols"]}, of_weight{shape["cols"]};
    x = tensor(of_x, in);
    y = tensor(of_x, out);
    if (shape["weight"] != 0) {
      weight = tensor(of_weight, in);
      options.weight = &weight;
      bias = tensor(of_weight, in);
      if (kind == Kind::layer) options.bias = &bias;
    }
    if (shape["residual"] != 0) {
      residual = tensor(of_x, in);
      options.residual = &residual;
      sum = tensor(of_x, in);
      options.sum = &sum;
    }
  }
  Operands(const Operands&) = delete;  // options point to the tensors

  Tensor x, y, weight, bias, residual, sum;
  NormOptions options;
};

template <Kind kind, class Kernel>
Analysis analyze_call(const Call& call) {
  using Values = typename Kernel::template On<analysis::Target>::Values;
  return analyze<Kernel>(row_grid(kOp<kind>, call.views, 1, Values::rows, 1), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
}

/// `longest`: columns of a row that the kernel takes.
template <Kind kind, class Kernel, std::int64_t longest>
Analysis analyze_shape(const ShapeValues& shape) {
  using Params = typename Kernel::template On<analysis::Target>::Params;
  require(shape["cols"] <= longest, "shape: cols is {}; the kernel is for rows of up to {}", shape["cols"], longest);
  const Operands<kind> of(shape, dtype_of<typename decltype(Params::x)::Element>, dtype_of<typename decltype(Params::y)::Element>,
                          placeholder);
  return analyze_call<kind, Kernel>(check<kind>(of.x, of.y, of.options));
}

template <Kind kind>
TuneProblem tune_problem(const ShapeValues& shape, DType dtype, Device device) {
  const Operands<kind> of(shape, dtype, dtype, placeholder);
  const Call call = check<kind>(of.x, of.y, of.options);
  TuneProblem problem;
  problem.key = problem_key<kind>(call);
  with_float_type(dtype, [&]<class T>(std::type_identity<T>) {
    problem.candidates = row_candidates("norm", device, shape, kMaxShare, [&](RowConfig config) {
      Analysis analysis;
      with_row_config(config,
                      [&]<int kRowWarps, int kShare>() { analysis = analyze_call<kind, Held<kind, T, T, T, kRowWarps, kShare>>(call); });
      return analysis;
    });
  });
  problem.prepare = [=](const Stream& stream, std::uint64_t seed) {
    const auto random = [&](Shape s, DType type) { return random_operand(std::move(s), type, seed, stream); };
    const auto operands = std::make_shared<Operands<kind>>(shape, dtype, dtype, random);
    operands->options.stream = stream;
    return [=](const TuneCandidate& candidate) {
      Call timed = check<kind>(operands->x, operands->y, operands->options);
      timed.config = row_config_of(candidate);
      run<kind>(timed);
    };
  };
  return problem;
}

}  // namespace

TuneProblem tune_problem(const ShapeValues& shape, DType dtype, Device device) {
  return shape["layer"] != 0 ? tune_problem<Kind::layer>(shape, dtype, device) : tune_problem<Kind::rms>(shape, dtype, device);
}

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto held = [&]<Kind kind, class X, class Y, class W, int kRowWarps, int kShare>(const char* name) {
    using Kernel = Held<kind, X, Y, W, kRowWarps, kShare>;
    variants.push_back({make_spec(kernel_info<Kernel>, true, true, name), analyze_shape<kind, Kernel, RowTile<kRowWarps, kShare>::cols>});
  };
  const auto chunked = [&]<Kind kind, class X, class Y, class W>(const char* name) {
    using Kernel = Chunked<kind, X, Y, W>;
    variants.push_back({make_spec(kernel_info<Kernel>, true, true, name), analyze_shape<kind, Kernel, kLargestExtent>});
  };
  constexpr Kind layer = Kind::layer, rms = Kind::rms;
  held.template operator()<layer, bf16, bf16, bf16, 2, 24>("layer_norm_bf16_2x24");
  held.template operator()<layer, bf16, bf16, bf16, 8, 16>("layer_norm_bf16_8x16");
  held.template operator()<layer, bf16, bf16, bf16, 16, 24>("layer_norm_bf16_16x24");
  held.template operator()<layer, float, float, float, 16, 24>("layer_norm_f32_16x24");
  chunked.template operator()<layer, bf16, bf16, bf16>("layer_norm_bf16_chunked");
  held.template operator()<rms, bf16, bf16, bf16, 1, 8>("rms_norm_bf16_1x8");
  held.template operator()<rms, bf16, bf16, bf16, 8, 8>("rms_norm_bf16_8x8");
  held.template operator()<rms, bf16, bf16, bf16, 4, 32>("rms_norm_bf16_4x32");
  held.template operator()<rms, bf16, bf16, bf16, 16, 32>("rms_norm_bf16_16x32");
  chunked.template operator()<rms, bf16, bf16, bf16>("rms_norm_bf16_chunked");
  return variants;
}

}  // namespace kernels::norm
}  // namespace tw

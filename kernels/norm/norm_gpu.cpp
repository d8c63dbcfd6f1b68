#include <memory>
#include <vector>

#include "kernels/norm/call.hpp"
#include "kernels/norm/tuning.hpp"
#include "kernels/norm/variants.hpp"
#include "kernels/row_tuning.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::norm {
namespace {

template <Kind kind, class X, class Y, class W, int kRowWarps, int kShare>
using Held = HeldRows<kind, X, Y, W, RowTile<kRowWarps, kShare>::rows, RowTile<kRowWarps, kShare>::cols, RowTile<kRowWarps, kShare>::warps,
                      kPieceColumns<X, Y, W>>;
/// For rows too long for a block's registers: one block of 512 threads per row, 8 columns per thread at a time.
template <Kind kind, class X, class Y, class W>
using Chunked = ChunkedRows<kind, X, Y, W, 1, 4096, 16, kPieceColumns<X, Y, W>>;

/// Columns per thread: fewer in the largest blocks, because their threads have fewer registers.
constexpr int kMaxShare = 40;
constexpr int kLongestHeld = longest_held_row(32);

template <Kind kind, class X, class Y, class W>
void run_types(const Call& call) {
  using Bound = Chunked<kind, X, Y, W>;
  const auto launch = [&](const detail::NamedKernel& kernel, int rows) {
    detail::launch_named<typename Bound::template On<sm_90a::Target<>>::Params>(
        kernel, call.stream, row_grid(kOp<kind>, call.views, 1, rows, 1), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
  };
  if (call.cols > kLongestHeld) return launch(detail::named<Bound>(), 1);
  const auto key = [&] { return problem_key<kind>(call); };
  const RowConfig config = call.config ? *call.config : tuned_rows(call.stream.device(), key, call.rows(), call.cols, kMaxShare);
  with_row_config(config, [&]<int kRowWarps, int kShare>() {
    launch(detail::named<Held<kind, X, Y, W, kRowWarps, kShare>>(), RowTile<kRowWarps, kShare>::rows);
  });
}

}  // namespace

template <Kind kind>
void run_on_gpu(const Call& call) {
  with_types(call, [&]<class X, class Y>(std::type_identity<X>, std::type_identity<Y>) {
    call.weights_dtype() == DType::f32 ? run_types<kind, X, Y, float>(call) : run_types<kind, X, Y, X>(call);
  });
}

template void run_on_gpu<Kind::layer>(const Call& call);
template void run_on_gpu<Kind::rms>(const Call& call);

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

/// `longest`: the most columns of a row that the kernel supports.
template <Kind kind, class Kernel, std::int64_t longest>
Analysis analyze_shape(const ShapeValues& shape) {
  using Params = typename Kernel::template On<analysis::Target>::Params;
  require(shape["cols"] <= longest, "shape: cols is {}; the kernel is for rows of up to {}", shape["cols"], longest);
  const Operands<kind> of(shape, dtype_of<typename decltype(Params::x)::Element>, dtype_of<typename decltype(Params::y)::Element>,
                          placeholder);
  return analyze_call<kind, Kernel>(check<kind>(of.x, of.y, of.options));
}

/// Analysis depends only on T's size: f16 is analysed as bf16.
template <Kind kind, class T>
FamilyProblem problem_of(const ShapeValues& shape, const RowProblem& rows, Device device) {
  const Operands<kind> of(shape, dtype_of<T>, dtype_of<T>, placeholder);
  const Call call = check<kind>(of.x, of.y, of.options);
  return row_problem(rows, device, [&](RowConfig config) {
    Analysis analysis;
    with_row_config(config,
                    [&]<int kRowWarps, int kShare>() { analysis = analyze_call<kind, Held<kind, T, T, T, kRowWarps, kShare>>(call); });
    return analysis;
  });
}

template <Kind kind>
FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device) {
  const Operands<kind> of(shape, dtype, dtype, placeholder);
  const RowProblem rows{"norm",      problem_key<kind>(check<kind>(of.x, of.y, of.options)), shape["rows"], shape["cols"], kMaxShare,
                        kLongestHeld};
  FamilyProblem problem = dtype == DType::f32 ? problem_of<kind, float>(shape, rows, device) : problem_of<kind, bf16>(shape, rows, device);
  problem.prepare = [=](const Stream& stream, std::uint64_t seed) {
    const auto random = [&](Shape s, DType type) { return random_operand(std::move(s), type, seed, stream); };
    const auto operands = std::make_shared<Operands<kind>>(shape, dtype, dtype, random);
    operands->options.stream = stream;
    const auto launch = [=](const TunePoint& point) {
      Call timed = check<kind>(operands->x, operands->y, operands->options);
      timed.config = row_config_of(point);
      run_on_gpu<kind>(timed);
    };
    return TuneOperands{launch, operands->y, bytes_of({&operands->x, &operands->y, &operands->residual, &operands->sum})};
  };
  return problem;
}

}  // namespace

FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device) {
  require(shape["rows"] > 0 && shape["cols"] > 0, "shape: rows and cols must be positive");
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
  held.template operator()<layer, bf16, bf16, bf16, 1, 40>("layer_norm_bf16_1x40");
  held.template operator()<layer, bf16, bf16, bf16, 8, 16>("layer_norm_bf16_8x16");
  held.template operator()<layer, bf16, bf16, bf16, 16, 32>("layer_norm_bf16_16x32");
  held.template operator()<layer, float, float, float, 16, 32>("layer_norm_f32_16x32");
  chunked.template operator()<layer, bf16, bf16, bf16>("layer_norm_bf16_chunked");
  held.template operator()<rms, bf16, bf16, bf16, 1, 8>("rms_norm_bf16_1x8");
  held.template operator()<rms, bf16, bf16, bf16, 8, 8>("rms_norm_bf16_8x8");
  held.template operator()<rms, bf16, bf16, bf16, 4, 32>("rms_norm_bf16_4x32");
  held.template operator()<rms, bf16, bf16, bf16, 16, 32>("rms_norm_bf16_16x32");
  chunked.template operator()<rms, bf16, bf16, bf16>("rms_norm_bf16_chunked");
  return variants;
}

}  // namespace tw::kernels::norm

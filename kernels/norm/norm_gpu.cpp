#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/named.hpp"
#include "kernels/norm/call.hpp"
#include "kernels/norm/tuning.hpp"
#include "kernels/norm/variants.hpp"
#include "kernels/row_tuning.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::norm {
namespace {

/// Columns per thread: fewer in the largest blocks, because their threads have fewer registers.
constexpr int kMaxShare = 40;
constexpr int kLongestHeld = longest_held_row(32);

/// Rows that are too long for a block's registers: one block of 512 threads per row, 8 columns per thread at a time.
constexpr RowTile kChunk{1, 4096, 16};

template <Kind kind, class X, class Y, class W, RowTile tile>
using Held = HeldRows<kind, X, Y, W, tile.rows, tile.cols, tile.warps, kPieceColumns<X, Y, W>>;
template <Kind kind, class X, class Y, class W>
using Chunked = ChunkedRows<kind, X, Y, W, kChunk.rows, kChunk.cols, kChunk.warps, kPieceColumns<X, Y, W>>;

/// HeldRows; without a configuration ChunkedRows.
struct RowKernel {
  Kind kind;
  DType x, y, weight;
  std::optional<RowConfig> config;
  auto operator<=>(const RowKernel&) const = default;
  RowTile tile() const { return config ? row_tile(*config) : kChunk; }
};

std::string type_of(const RowKernel& k) {
  const RowTile tile = k.tile();
  return tw::format("tw::kernels::norm::{}<tw::kernels::norm::Kind::{}, {}, {}, {}, {}, {}, {}, {}>", k.config ? "HeldRows" : "ChunkedRows",
                    k.kind == Kind::layer ? "layer" : "rms", element_name(k.x), element_name(k.y), element_name(k.weight), tile.rows,
                    tile.cols, tile.warps, piece_columns({k.x, k.y, k.weight}));
}

/// Calls f(std::type_identity<Params>{}). Neither the kind of kernel nor its tile changes the layout of Params or the way tensors are
/// bound.
template <class F>
void with_params(const Call& call, F f) {
  with_types(call, [&]<class X, class Y>(std::type_identity<X>, std::type_identity<Y>) {
    const auto with_weight = [&]<class W>() {
      f(std::type_identity<typename Chunked<Kind::rms, X, Y, W>::template On<sm_90a::Target<>>::Params>{});
    };
    call.weights_dtype() == DType::f32 ? with_weight.template operator()<float>() : with_weight.template operator()<X>();
  });
}

}  // namespace

template <Kind kind>
void run_on_gpu(const Call& call) {
  static KernelTable<RowKernel> table(type_of, Chunked<kind, float, float, float>::source);
  RowKernel kernel{kind, call.views[0].dtype(), call.views[1].dtype(), call.weights_dtype(), call.config};
  if (call.cols > kLongestHeld)
    kernel.config.reset();
  else if (!call.config)
    kernel.config = tuned_rows(
        call.stream.device(), [&] { return problem_key<kind>(call); }, call.rows(), call.cols, kMaxShare);
  const TileGrid grid = row_grid(kOp<kind>, call.views, 1, kernel.tile().rows, 1);
  with_params(call, [&]<class Params>(std::type_identity<Params>) {
    detail::launch_named<Params>(table[kernel], call.stream, grid, [&](auto& bind, auto& p) { bind_call(bind, p, call); });
  });
}

template void run_on_gpu<Kind::layer>(const Call& call);
template void run_on_gpu<Kind::rms>(const Call& call);

namespace {

/// Operands for a shape, made by tensor(shape, dtype).
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

/// `longest`: the maximum number of columns that the kernel supports.
template <Kind kind, class Kernel, std::int64_t longest>
Analysis analyze_shape(const ShapeValues& shape) {
  using Params = typename Kernel::template On<analysis::Target>::Params;
  require(shape["cols"] <= longest, "shape: cols is {}; the kernel supports up to {}", shape["cols"], longest);
  const Operands<kind> of(shape, dtype_of<typename decltype(Params::x)::Element>, dtype_of<typename decltype(Params::y)::Element>,
                          placeholder);
  return analyze_call<kind, Kernel>(check<kind>(of.x, of.y, of.options));
}

/// Analysis depends only on T's size: f16 is analysed as bf16.
template <Kind kind, class T>
FamilyProblem problem_of(const ShapeValues& shape, const RowProblem& rows, Device device) {
  constexpr RowTile kCounted = row_tile({16, 32});
  const Operands<kind> of(shape, dtype_of<T>, dtype_of<T>, placeholder);
  return row_problem(rows, device, analyze_call<kind, Held<kind, T, T, T, kCounted>>(check<kind>(of.x, of.y, of.options)), kCounted);
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
  const auto add = [&]<Kind kind, class T>(const char* name, std::optional<RowConfig> config, Analysis (*analyze)(const ShapeValues&)) {
    const RowKernel kernel{kind, dtype_of<T>, dtype_of<T>, dtype_of<T>, config};
    variants.push_back({make_spec({type_of(kernel), Chunked<kind, T, T, T>::source, nullptr}, true, true, name), analyze});
  };
  const auto held = [&]<Kind kind, class T, RowConfig config>(const char* name) {
    constexpr RowTile tile = row_tile(config);
    add.template operator()<kind, T>(name, config, analyze_shape<kind, Held<kind, T, T, T, tile>, tile.cols>);
  };
  const auto chunked = [&]<Kind kind, class T>(const char* name) {
    add.template operator()<kind, T>(name, std::nullopt, analyze_shape<kind, Chunked<kind, T, T, T>, kLargestExtent>);
  };
  constexpr Kind layer = Kind::layer, rms = Kind::rms;
  held.template operator()<layer, bf16, RowConfig{1, 40}>("layer_norm_bf16_1x40");
  held.template operator()<layer, bf16, RowConfig{8, 16}>("layer_norm_bf16_8x16");
  held.template operator()<layer, bf16, RowConfig{16, 32}>("layer_norm_bf16_16x32");
  held.template operator()<layer, float, RowConfig{16, 32}>("layer_norm_f32_16x32");
  chunked.template operator()<layer, bf16>("layer_norm_bf16_chunked");
  held.template operator()<rms, bf16, RowConfig{1, 8}>("rms_norm_bf16_1x8");
  held.template operator()<rms, bf16, RowConfig{8, 8}>("rms_norm_bf16_8x8");
  held.template operator()<rms, bf16, RowConfig{4, 32}>("rms_norm_bf16_4x32");
  held.template operator()<rms, bf16, RowConfig{16, 32}>("rms_norm_bf16_16x32");
  chunked.template operator()<rms, bf16>("rms_norm_bf16_chunked");
  return variants;
}

}  // namespace tw::kernels::norm

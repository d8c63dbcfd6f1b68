#include "tilewave/swiglu.hpp"

#include <array>
#include <cstdint>

#include "kernels/rows.hpp"
#include "kernels/swiglu/swiglu.tile.hpp"
#include "kernels/swiglu/variants.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels;
using kernels::swiglu::Swiglu;
using kernels::swiglu::SwigluPairs;

constexpr int kElements = 2048;  ///< per tile: 16 for each of 128 threads

/// Calls f<columns>() with a tile as wide as the rows, between 256 and 2048 columns.
template <class F>
void with_columns(std::int64_t cols, F f) {
  if (cols <= 256) return f.template operator()<256>();
  if (cols <= 512) return f.template operator()<512>();
  if (cols <= 1024) return f.template operator()<1024>();
  f.template operator()<2048>();
}

template <template <class, class, int, int, int> class Kernel, class In, class Out, int kWidth, class Bind>
void launch_on_gpu(const char* op, const RowViews& views, const Stream& stream, Bind bind_call) {
  const std::int64_t cols = views[0].shape(3);
  with_columns(cols, [&]<int kCols>() {
    constexpr int kRows = kElements / kCols;
    launch_gpu<Kernel<In, Out, kRows, kCols, kWidth>>(stream, row_grid(op, views, cols, kRows, kCols), bind_call);
  });
}
template <template <class, class, int, int, int> class Kernel, class In, class Bind>
void launch_on_cpu(const char* op, const RowViews& views, Bind bind_call) {
  const std::int64_t cols = views[0].shape(3);
  const auto run = [&]<int kCols>() {
    constexpr int kRows = kElements / kCols;
    launch_cpu<Kernel<In, cpu::AnyFloat, kRows, kCols, 0>>(row_grid(op, views, cols, kRows, kCols), bind_call);
  };
  cols <= 256 ? run.template operator()<256>() : run.template operator()<2048>();
}

void bind_parts(auto& bind, auto& p, const RowViews& views) {
  bind(p.gate, views[1]);
  bind(p.up, views[2]);
  bind(p.y, views[0]);
}
void bind_pairs(auto& bind, auto& p, const RowViews& views) {
  bind(p.pairs, views[1]);
  bind(p.y, views[0]);
}

void check_tensor(const char* op, const char* name, const Tensor& t, const Tensor& y) {
  require(is_float(t.dtype()), "{}: {} is {}; f32, f16 and bf16 are supported", op, name, t);
  check_operand(op, name, t, t.dtype(), y.device());
  require(t.rank() >= 1 && t.rank() <= 4, "{}: {} is {}; it must have 1 to 4 dimensions", op, name, t);
  check_extents(op, name, t);
}

Stream checked_stream(const char* op, const SwigluOptions& options, Device device) {
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", op, stream.device().name(), device.name());
  return stream;
}

void run(const char* op, const Tensor& gate, const Tensor& up, const Tensor& y, const Stream& stream) {
  const RowViews views(std::array{&y, &gate, &up});
  const auto bind_call = [&](auto& bind, auto& p) { bind_parts(bind, p, views); };
  if (!stream.device().is_cuda()) return launch_on_cpu<Swiglu, cpu::AnyFloat>(op, views, bind_call);
  with_float_type(gate.dtype(), [&]<class In>(std::type_identity<In>) {
    with_float_type(y.dtype(), [&]<class Out>(std::type_identity<Out>) {
      launch_on_gpu<Swiglu, In, Out, kPieceColumns<In, Out>>(op, views, stream, bind_call);
    });
  });
}

/// `x` [.., 2 I] as [.., I] words of two elements, if these are adjacent and aligned to the word.
bool pairs_are_words(const Tensor& x) {
  if (x.stride(-1) != 1 || reinterpret_cast<std::uintptr_t>(x.data()) % (2 * size_of(x.dtype())) != 0) return false;
  for (int dim = 0; dim + 1 < x.rank(); ++dim)
    if (x.shape(dim) > 1 && x.stride(dim) % 2 != 0) return false;
  return true;
}
Tensor words_of(const Tensor& x) {
  Shape shape = x.shape();
  std::vector<std::int64_t> strides = x.strides();
  shape.back() /= 2;
  for (std::size_t dim = 0; dim + 1 < shape.size(); ++dim) strides[dim] /= 2;
  return Tensor::borrow(x.data(), std::move(shape), size_of(x.dtype()) == 2 ? DType::i32 : DType::i64, x.device(), std::move(strides));
}

}  // namespace

void swiglu(const Tensor& gate, const Tensor& up, const Tensor& y, const SwigluOptions& options) {
  constexpr const char* op = "swiglu";
  check_tensor(op, "gate", gate, y);
  check_tensor(op, "y", y, y);
  check_output(op, "y", y);
  check_operand(op, "up", up, gate.dtype(), y.device());
  require(up.shape() == gate.shape(), "{}: up is {}; it must have gate's shape, {}", op, up, gate);
  require(y.shape() == gate.shape(), "{}: y is {}; it must have gate's shape, {}", op, y, gate);
  check_in_place(op, {"y", &y}, {"gate", &gate});
  check_in_place(op, {"y", &y}, {"up", &up});
  const Stream stream = checked_stream(op, options, y.device());
  if (y.numel() > 0) run(op, gate, up, y, stream);
}

void swiglu_interleaved(const Tensor& x, const Tensor& y, const SwigluOptions& options) {
  constexpr const char* op = "swiglu_interleaved";
  check_tensor(op, "x", x, y);
  check_tensor(op, "y", y, y);
  check_output(op, "y", y);
  require(x.shape(-1) % 2 == 0, "{}: x is {}; its last dimension must be even: gate and up alternate", op, x);
  Shape expected = x.shape();
  expected.back() /= 2;
  require(y.shape() == expected, "{}: y is {}; for x {} it must be [{}]", op, y, x, tw::join(expected, ", "));
  check_disjoint(op, {"y", &y}, {{"x", &x}});
  const Stream stream = checked_stream(op, options, y.device());
  if (y.numel() == 0) return;
  if (!pairs_are_words(x))
    return run(op, kernels::columns_of(x, 0, x.shape(-1) / 2, 2), kernels::columns_of(x, 1, x.shape(-1) / 2, 2), y, stream);
  const Tensor words = words_of(x);
  const RowViews views(std::array{&y, &words});
  const auto bind_call = [&](auto& bind, auto& p) { bind_pairs(bind, p, views); };
  with_float_type(x.dtype(), [&]<class In>(std::type_identity<In>) {
    if (!stream.device().is_cuda()) return launch_on_cpu<SwigluPairs, In>(op, views, bind_call);
    with_float_type(y.dtype(), [&]<class Out>(std::type_identity<Out>) {
      launch_on_gpu<SwigluPairs, In, Out, 16 / (2 * sizeof(In))>(op, views, stream, bind_call);
    });
  });
}

namespace kernels::swiglu {

namespace {

template <class In, class Out, int kRows, int kCols, int kWidth>
Analysis analyze_parts(const ShapeValues& shape) {
  const Shape of_y{shape["rows"], shape["cols"]};
  const Tensor gate = placeholder(of_y, dtype_of<In>), up = placeholder(of_y, dtype_of<In>), y = placeholder(of_y, dtype_of<Out>);
  const RowViews views(std::array{&y, &gate, &up});
  return analyze<Swiglu<In, Out, kRows, kCols, kWidth>>(row_grid("swiglu", views, of_y[1], kRows, kCols),
                                                        [&](auto& bind, auto& p) { bind_parts(bind, p, views); });
}

template <class In, class Out, int kRows, int kCols, int kWidth>
Analysis analyze_pairs(const ShapeValues& shape) {
  const std::int64_t rows = shape["rows"], cols = shape["cols"];
  const Tensor words = words_of(placeholder({rows, 2 * cols}, dtype_of<In>)), y = placeholder({rows, cols}, dtype_of<Out>);
  const RowViews views(std::array{&y, &words});
  return analyze<SwigluPairs<In, Out, kRows, kCols, kWidth>>(row_grid("swiglu_interleaved", views, cols, kRows, kCols),
                                                             [&](auto& bind, auto& p) { bind_pairs(bind, p, views); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto parts = [&]<class In, class Out, int kRows, int kCols, int kWidth>(const char* name) {
    variants.push_back(
        {make_spec(kernel_info<Swiglu<In, Out, kRows, kCols, kWidth>>, true, true, name), analyze_parts<In, Out, kRows, kCols, kWidth>});
  };
  const auto pairs = [&]<class In, class Out, int kRows, int kCols, int kWidth>(const char* name) {
    variants.push_back({make_spec(kernel_info<SwigluPairs<In, Out, kRows, kCols, kWidth>>, true, true, name),
                        analyze_pairs<In, Out, kRows, kCols, kWidth>});
  };
  parts.template operator()<bf16, bf16, 1, 2048, 8>("swiglu_bf16");
  parts.template operator()<bf16, bf16, 8, 256, 8>("swiglu_bf16_short");
  parts.template operator()<float, float, 1, 2048, 4>("swiglu_f32");
  pairs.template operator()<bf16, bf16, 1, 2048, 4>("swiglu_interleaved_bf16");
  return variants;
}

}  // namespace kernels::swiglu
}  // namespace tw

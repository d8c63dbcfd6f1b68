#include <compare>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/causal_conv1d/call.hpp"
#include "kernels/causal_conv1d/variants.hpp"
#include "kernels/named.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::causal_conv1d {
namespace {

enum class Kind { forward, backward, initial_gradient, weight_sums };

struct ConvolutionKernel {
  Kind kind;
  DType x, weight;
  int taps, cols, width;
  auto operator<=>(const ConvolutionKernel&) const = default;
};

std::string type_of(const ConvolutionKernel& k) {
  if (k.kind == Kind::weight_sums) return tw::format("tw::kernels::causal_conv1d::WeightSums<{}>", element_name(k.weight));
  const char* const name = k.kind == Kind::forward ? "Forward" : k.kind == Kind::backward ? "Backward" : "InitialGradient";
  return tw::format("tw::kernels::causal_conv1d::{}<{}, {}, {}, {}, {}>", name, element_name(k.x), element_name(k.weight), k.taps, k.cols,
                    k.width);
}

/// Calls f(std::type_identity<X>, std::type_identity<W>) with the types of x and the weight.
template <class F>
void with_types(const Call& call, F f) {
  with_float_type(call.x.dtype(), [&]<class X>(std::type_identity<X> x) {
    if (call.weight.dtype() == DType::f32)
      f(x, std::type_identity<float>{});
    else
      f(x, x);
  });
}

KernelTable<ConvolutionKernel>& table() {
  static KernelTable<ConvolutionKernel> kernels(type_of, WeightSums<float>::source);
  return kernels;
}

}  // namespace

void forward_on_gpu(const Call& call) {
  const bool wide = is_wide(call);
  const int cols = wide ? 2 * kNarrow : kNarrow;
  const auto& kernel = table()[{Kind::forward, call.x.dtype(), call.weight.dtype(), call.taps(), cols, wide ? 8 : 4}];
  with_types(call, [&]<class X, class W>(std::type_identity<X>, std::type_identity<W>) {
    const auto with_width = [&]<int width>() {
      using Params = typename Forward<X, W, 4, 128 * width, width>::template On<sm_90a::Target<>>::Params;
      detail::launch_named<Params>(kernel, call.stream, grid_of(call, cols), [&](auto& bind, auto& p) { bind_forward(bind, p, call); });
    };
    wide ? with_width.template operator()<8>() : with_width.template operator()<4>();
  });
}

void backward_on_gpu(const Call& call) {
  const auto kernel = [&](Kind kind, int cols) -> const auto& {
    return table()[{kind, call.x.dtype(), call.weight.dtype(), call.taps(), cols, cols / 128}];
  };
  with_types(call, [&]<class X, class W>(std::type_identity<X>, std::type_identity<W>) {
    using Target = sm_90a::Target<>;
    if (call.batches() > 0)
      detail::launch_named<typename Backward<X, W, 4, kBackwardCols, 2>::template On<Target>::Params>(
          kernel(Kind::backward, kBackwardCols), call.stream, grid_of(call, kBackwardCols),
          [&](auto& bind, auto& p) { bind_backward(bind, p, call); });
    if (call.d_initial_state)
      detail::launch_named<typename InitialGradient<X, W, 4, kNarrow, 4>::template On<Target>::Params>(
          kernel(Kind::initial_gradient, kNarrow), call.stream, initial_grid(call),
          [&](auto& bind, auto& p) { bind_initial(bind, p, call); });
    if (call.d_weight || call.d_bias)
      detail::launch_named<typename WeightSums<W>::template On<Target>::Params>(
          table()[{Kind::weight_sums, DType::f32, call.weight.dtype(), 0, 0, 0}], call.stream, sums_grid(call),
          [&](auto& bind, auto& p) { bind_sums(bind, p, call); });
  });
}

namespace {

/// Tensors for a shape, of T.
template <class T>
struct Placeholders {
  Tensor x, y, dy, weight, bias, d_weight, d_bias;
  explicit Placeholders(const ShapeValues& shape) {
    const Shape of_x{shape["batch"], shape["seqlen"], shape["channels"]}, of_weight{shape["channels"], shape["width"]};
    x = placeholder(of_x, dtype_of<T>);
    y = placeholder(of_x, dtype_of<T>);
    dy = placeholder(of_x, dtype_of<T>);
    weight = placeholder(of_weight, dtype_of<T>);
    bias = placeholder({shape["channels"]}, dtype_of<T>);
    d_weight = placeholder(of_weight, dtype_of<T>);
    d_bias = placeholder({shape["channels"]}, dtype_of<T>);
  }
};

/// `taps` is part of the kernel, so the shape must name the same width.
void require_width(const ShapeValues& shape, int taps) {
  require(shape["width"] == taps, "shape: width is {}; the kernel is for {}", shape["width"], taps);
}

constexpr int kTaps = 4;

template <class T, int width>
Analysis analyze_forward(const ShapeValues& shape) {
  require_width(shape, kTaps);
  const Placeholders<T> of(shape);
  const Call call = check_forward("causal_conv1d", "initial_state", of.x, of.weight, of.y, {.bias = &of.bias, .silu = true});
  return analyze<Forward<T, T, kTaps, 128 * width, width>>(grid_of(call, 128 * width),
                                                           [&](auto& bind, auto& p) { bind_forward(bind, p, call); });
}

template <class T>
Call backward_call(const Placeholders<T>& of, const ShapeValues& shape) {
  require_width(shape, kTaps);
  Call call =
      check_backward(of.dy, of.x, of.weight, of.y, {.bias = &of.bias, .silu = true, .d_weight = &of.d_weight, .d_bias = &of.d_bias});
  call.sums = placeholder({kTaps + 1, std::int64_t{call.batches()} * call.runs(), call.channels()}, DType::f32);
  return call;
}

template <class T>
Analysis analyze_backward(const ShapeValues& shape) {
  const Placeholders<T> of(shape);
  const Call call = backward_call(of, shape);
  return analyze<Backward<T, T, kTaps, kBackwardCols, 2>>(grid_of(call, kBackwardCols),
                                                          [&](auto& bind, auto& p) { bind_backward(bind, p, call); });
}

template <class T>
Analysis analyze_sums(const ShapeValues& shape) {
  const Placeholders<T> of(shape);
  const Call call = backward_call(of, shape);
  return analyze<WeightSums<T>>(sums_grid(call), [&](auto& bind, auto& p) { bind_sums(bind, p, call); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add = [&](const char* name, const ConvolutionKernel& kernel, Analysis (*analyze)(const ShapeValues&)) {
    variants.push_back({make_spec({type_of(kernel), WeightSums<float>::source, nullptr}, true, true, name), analyze});
  };
  add("causal_conv1d_bf16_wide", {Kind::forward, DType::bf16, DType::bf16, kTaps, 2 * kNarrow, 8}, analyze_forward<bf16, 8>);
  add("causal_conv1d_bf16", {Kind::forward, DType::bf16, DType::bf16, kTaps, kNarrow, 4}, analyze_forward<bf16, 4>);
  add("causal_conv1d_f32", {Kind::forward, DType::f32, DType::f32, kTaps, kNarrow, 4}, analyze_forward<float, 4>);
  add("causal_conv1d_backward_bf16", {Kind::backward, DType::bf16, DType::bf16, kTaps, kBackwardCols, 2}, analyze_backward<bf16>);
  add("causal_conv1d_weight_sums_bf16", {Kind::weight_sums, DType::f32, DType::bf16, 0, 0, 0}, analyze_sums<bf16>);
  return variants;
}

std::vector<KernelSpec> all_specs() {
  std::vector<KernelSpec> specs;
  const auto add = [&](const ConvolutionKernel& kernel) {
    for (const auto& [loads, stores] : {std::pair{true, true}, {true, false}, {false, true}, {false, false}})
      specs.push_back(make_spec({type_of(kernel), WeightSums<float>::source, nullptr}, loads, stores));
  };
  for (const DType x : {DType::f16, DType::bf16, DType::f32}) {
    add({Kind::weight_sums, DType::f32, x, 0, 0, 0});
    for (const DType weight : std::set{x, DType::f32})
      for (const int taps : {2, 3, 4}) {
        if (x != DType::f32) add({Kind::forward, x, weight, taps, 2 * kNarrow, 8});
        add({Kind::forward, x, weight, taps, kNarrow, 4});
        add({Kind::initial_gradient, x, weight, taps, kNarrow, 4});
        add({Kind::backward, x, weight, taps, kBackwardCols, 2});
      }
  }
  return specs;
}

}  // namespace tw::kernels::causal_conv1d

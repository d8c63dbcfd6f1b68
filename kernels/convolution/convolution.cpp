#include "tilewave/convolution.hpp"

#include <algorithm>
#include <limits>
#include <span>

#include "kernels/check.hpp"
#include "kernels/convolution/call.hpp"
#include "kernels/convolution/tuning.hpp"
#include "kernels/tf32_parts.hpp"

namespace tw {

namespace {

/// The sum of two of these fits an int, and so does every coordinate that a tile reads.
constexpr std::int64_t kLargestExtent = std::int64_t{1} << 29;
constexpr std::int64_t kLargestStride = 65536;
constexpr std::int64_t kLargestCount = std::numeric_limits<int>::max() - 1023;

/// The arguments of conv1d() or conv2d().
struct Given {
  const char* op;
  std::span<const std::int64_t> stride, padding, dilation;  ///< for each dimension of the image
  const Tensor* bias;
  Activation activation;
  const std::optional<Stream>& stream;
  int config;

  int dimensions() const { return static_cast<int>(stride.size()); }
  const char* x_shape() const { return dimensions() == 1 ? "[N, L, C]" : "[N, H, W, C]"; }
  const char* w_shape() const { return dimensions() == 1 ? "[F, K, C]" : "[F, KH, KW, C]"; }
};

/// Checks one dimension of the image and returns the output's extent.
std::int64_t check_axis(const Given& g, const Tensor& x, const Tensor& w, int axis) {
  const auto at = static_cast<std::size_t>(axis);
  const std::int64_t stride = g.stride[at], padding = g.padding[at], dilation = g.dilation[at];
  const auto all = [](const auto& values) { return tw::join(values, ", "); };
  require(stride >= 1 && stride <= kLargestStride, "{}: stride is {}; it must be 1 to {}", g.op, all(g.stride), kLargestStride);
  require(padding >= 0 && padding <= kLargestExtent, "{}: padding is {}; it must be 0 to {}", g.op, all(g.padding), kLargestExtent);
  require(dilation >= 1 && dilation <= kLargestExtent, "{}: dilation is {}; it must be 1 to {}", g.op, all(g.dilation), kLargestExtent);
  const std::int64_t extent = x.shape(1 + axis), taps = w.shape(1 + axis);
  require(taps >= 1 && taps <= kLargestExtent, "{}: w is {}; its kernel must have 1 to {} taps in every dimension", g.op, w,
          kLargestExtent);
  require(extent <= kLargestExtent - 2 * padding, "{}: x is {} with padding {}; padded extents are limited to {}", g.op, x, all(g.padding),
          kLargestExtent);
  const std::int64_t reach = dilation * (taps - 1) + 1;
  require(reach <= extent + 2 * padding,
          "{}: x is {} with padding {}, w {} with dilation {}; the kernel, {} long in dimension {}, must fit into the padded image, {}",
          g.op, x, all(g.padding), w, all(g.dilation), reach, axis + 1, extent + 2 * padding);
  return (extent + 2 * padding - reach) / stride + 1;
}

/// Views the tensor of a one-dimensional image as one of height 1.
Tensor with_height(const Tensor& t) {
  Shape shape = t.shape();
  std::vector<std::int64_t> strides = t.strides();
  shape.insert(shape.begin() + 1, 1);
  strides.insert(strides.begin() + 1, 0);
  return Tensor::borrow(t.data(), std::move(shape), t.dtype(), t.device(), std::move(strides));
}

/// Checks all arguments and converts them to a Call. Throws InvalidArgument.
kernels::convolution::Call check(const Given& g, const Tensor& x, const Tensor& w, const Tensor& y) {
  require(g.activation != Activation::swiglu, "{}: activation is swiglu, which needs pairs of gemm's columns; allowed: any other", g.op);
  const Device device = y.device();
  const DType dtype = x.dtype();
  require(dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16, "{}: x is {}; f32, f16 and bf16 are supported", g.op, x);
  check_operand(g.op, "x", x, dtype, device);
  check_operand(g.op, "w", w, dtype, device);
  check_operand(g.op, "y", y, dtype, device);
  check_output(g.op, "y", y);
  require(x.rank() == g.dimensions() + 2, "{}: x is {}; it must be {}", g.op, x, g.x_shape());
  require(w.rank() == g.dimensions() + 2, "{}: w is {}; it must be {}", g.op, w, g.w_shape());
  require(x.shape(-1) == w.shape(-1), "{}: x is {} and w is {}; their last dimensions, both C, must be equal", g.op, x, w);
  const std::int64_t images = x.shape(0), channels = w.shape(0);
  Shape expected{images};
  for (int axis = 0; axis < g.dimensions(); ++axis) expected.push_back(check_axis(g, x, w, axis));
  expected.push_back(channels);
  require(y.shape() == expected, "{}: y is {}; for x {} and w {} with stride {}, padding {}, dilation {} it must be [{}]", g.op, y, x, w,
          tw::join(g.stride, ", "), tw::join(g.padding, ", "), tw::join(g.dilation, ", "), tw::join(expected, ", "));

  require(images <= kLargestCount && channels <= kLargestCount && x.shape(-1) <= kLargestCount,
          "{}: x is {} and w is {}; extents are limited to {}", g.op, x, w, kLargestCount);
  // Limits the number of tiles: windows of 32 pixels, the smallest tiles of all devices, are at least an eighth full.
  std::int64_t pixels = images;
  for (int axis = 0; axis < g.dimensions(); ++axis) pixels = std::min(pixels, kLargestCount) * expected[static_cast<std::size_t>(axis) + 1];
  const std::int64_t tiles = (std::min(pixels, kLargestCount) / 4 + 1) * ((channels + 127) / 128);
  require(pixels <= kLargestCount && tiles <= kLargestCount,
          "{}: y is {}; its pixels, and a quarter of them times F / 128, are limited to {}", g.op, y, kLargestCount);
  std::int64_t steps = (x.shape(-1) + 31) / 32;
  for (int axis = 0; axis < g.dimensions(); ++axis) steps = std::min(steps, kLargestCount) * w.shape(1 + axis);
  require(steps <= kLargestCount, "{}: w is {}; its taps times C / 32 are limited to {}", g.op, w, kLargestCount);

  check_disjoint(g.op, {"y", &y}, {{"x", &x}, {"w", &w}, {"bias", g.bias}});
  check_bias(g.op, g.bias, channels, dtype, device);
  const Stream stream = checked_stream(g.op, g.stream, device);
  const int configs = static_cast<int>(kernels::convolution::configs().size());
  require(g.config < configs, "{}: config is {}; it must be below {}", g.op, g.config, configs);
  const int config = device.is_cuda() ? g.config : -1;  // it is an index into the GPU's configurations

  // If the output has one pixel along a dimension, the stride does not matter there.
  const auto axis = [&](int dim) -> kernels::convolution::Axis {
    const auto at = static_cast<std::size_t>(dim);
    return {expected[at + 1] == 1 ? 1 : static_cast<int>(g.stride[at]), static_cast<int>(g.padding[at]), static_cast<int>(g.dilation[at])};
  };
  if (g.dimensions() == 1)
    return {with_height(x), with_height(w), with_height(y), g.bias, g.activation, {1, 0, 1}, axis(0), config, stream};
  return {x, w, y, g.bias, g.activation, axis(0), axis(1), config, stream};
}

void run(const Given& given, const Tensor& x, const Tensor& w, const Tensor& y) {
  kernels::convolution::Call call = check(given, x, w, y);
  if (y.numel() == 0) return;
  if (kernels::wants_tf32_parts(x)) kernels::convolution::use_parts(call);
  kernels::convolution::use_tuned(call);
  kernels::convolution::run(call);
}

Given given(const Conv2dOptions& o) { return {"conv2d", o.stride, o.padding, o.dilation, o.bias, o.activation, o.stream, o.config}; }

}  // namespace

namespace kernels::convolution {

Call check_conv2d(const Tensor& x, const Tensor& w, const Tensor& y, const Conv2dOptions& options) {
  return check(given(options), x, w, y);
}

void use_parts(Call& call) {
  call.x = tf32_parts(call.x, ProductSide::left, call.stream);
  call.w = tf32_parts(call.w, ProductSide::right, call.stream);
}

void run(const Call& call) { call.stream.device().is_cuda() ? run_on_gpu(call) : run_on_cpu(call); }

}  // namespace kernels::convolution

void conv2d(const Tensor& x, const Tensor& w, const Tensor& y, const Conv2dOptions& o) { run(given(o), x, w, y); }

void conv1d(const Tensor& x, const Tensor& w, const Tensor& y, const Conv1dOptions& o) {
  run({"conv1d", {&o.stride, 1}, {&o.padding, 1}, {&o.dilation, 1}, o.bias, o.activation, o.stream, o.config}, x, w, y);
}

}  // namespace tw

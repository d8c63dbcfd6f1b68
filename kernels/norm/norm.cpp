#include "tilewave/norm.hpp"

#include <cmath>
#include <vector>

#include "kernels/norm/call.hpp"

namespace tw {
namespace kernels::norm {
namespace {

void check_weights(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  require(t.dtype() == x.dtype() || t.dtype() == DType::f32, "{}: {} is {}; it must be of x's dtype, {}, or f32", op, name, t,
          name_of(x.dtype()));
  check_operand(op, name, t, t.dtype(), x.device());
  require(t.shape() == Shape{x.shape(-1)}, "{}: {} is {}; it must be [{}]", op, name, t, x.shape(-1));
}

}  // namespace

template <Kind kind>
Call check(const Tensor& x, const Tensor& y, const NormOptions& options) {
  constexpr const char* op = kOp<kind>;
  const Device device = y.device();
  require(is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported", op, x);
  require(is_float(y.dtype()), "{}: y is {}; f32, f16 and bf16 are supported", op, y);
  check_operand(op, "x", x, x.dtype(), device);
  check_operand(op, "y", y, y.dtype(), device);
  check_output(op, "y", y);
  require(x.rank() >= 1 && x.rank() <= 4, "{}: x is {}; it must have 1 to 4 dimensions", op, x);
  require(y.shape() == x.shape(), "{}: y is {}; it must have x's shape, {}", op, y, x);
  check_extents(op, "x", x);
  check_in_place(op, {"y", &y}, {"x", &x});
  check_disjoint(op, {"y", &y}, {{"weight", options.weight}, {"bias", options.bias}});
  std::vector<const Tensor*> operands{&x, &y};
  if (options.residual) {
    const Tensor& residual = *options.residual;
    check_operand(op, "residual", residual, x.dtype(), device);
    require(residual.shape() == x.shape(), "{}: residual is {}; it must have x's shape, {}", op, residual, x);
    check_in_place(op, {"y", &y}, {"residual", &residual});
    operands.push_back(&residual);
  }
  if (options.sum) {
    const Tensor& sum = *options.sum;
    require(options.residual != nullptr, "{}: sum is {} without a residual; there is nothing to add", op, sum);
    check_operand(op, "sum", sum, x.dtype(), device);
    check_output(op, "sum", sum);
    require(sum.shape() == x.shape(), "{}: sum is {}; it must have x's shape, {}", op, sum, x);
    check_in_place(op, {"sum", &sum}, {"x", &x});
    check_in_place(op, {"sum", &sum}, {"residual", options.residual});
    check_disjoint(op, {"sum", &sum}, {{"y", &y}, {"weight", options.weight}, {"bias", options.bias}});
    operands.push_back(&sum);
  }
  if (options.weight) check_weights(op, "weight", *options.weight, x);
  if (options.bias) {
    require(kind == Kind::layer, "{}: bias is {}; RMS norm has none", op, *options.bias);
    check_weights(op, "bias", *options.bias, x);
    if (options.weight)
      require(options.weight->dtype() == options.bias->dtype(), "{}: weight is {} and bias is {}; they must be of one dtype", op,
              *options.weight, *options.bias);
  }
  require(std::isfinite(options.epsilon) && options.epsilon >= 0, "{}: epsilon is {}; it must be finite and not negative", op,
          options.epsilon);
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", op, stream.device().name(), device.name());
  return {RowViews(operands), options, static_cast<int>(x.shape(-1)), stream};
}

template Call check<Kind::layer>(const Tensor& x, const Tensor& y, const NormOptions& options);
template Call check<Kind::rms>(const Tensor& x, const Tensor& y, const NormOptions& options);

namespace {

template <Kind kind>
void check_and_run(const Tensor& x, const Tensor& y, const NormOptions& options) {
  const Call call = check<kind>(x, y, options);
  if (x.numel() == 0) return;
  call.stream.device().is_cuda() ? run_on_gpu<kind>(call) : run_on_cpu<kind>(call);
}

}  // namespace
}  // namespace kernels::norm

void layer_norm(const Tensor& x, const Tensor& y, const NormOptions& options) {
  kernels::norm::check_and_run<kernels::norm::Kind::layer>(x, y, options);
}
void rms_norm(const Tensor& x, const Tensor& y, const NormOptions& options) {
  kernels::norm::check_and_run<kernels::norm::Kind::rms>(x, y, options);
}

}  // namespace tw

#include "tilewave/bitnet.hpp"

#include "kernels/bitnet/call.hpp"
#include "kernels/check.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"

namespace tw {

namespace {

using namespace kernels;

void check_columns(const char* op, const char* name, const Tensor& t) {
  require(t.stride(1) == 1 || t.shape(1) <= 1, "{}: {} is {} with columns {} elements apart; they must be adjacent", op, name, t,
          t.stride(1));
}

/// A matrix of a dtype that may have a distance between its rows.
void check_matrix(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape, Device device) {
  require(t.dtype() == dtype && t.shape() == shape, "{}: {} is {}; it must be {}[{}]", op, name, t, name_of(dtype), tw::join(shape, ", "));
  check_operand(op, name, t, dtype, device);
  check_columns(op, name, t);
}

/// An input of f32, f16 or bf16.
void check_floats(const char* op, const char* name, const Tensor& t, Device device) {
  require(is_float(t.dtype()), "{}: {} is {}; f32, f16 and bf16 are supported", op, name, t);
  require(t.rank() == 2, "{}: {} is {}; it must have 2 dimensions", op, name, t);
  check_operand(op, name, t, t.dtype(), device);
  check_columns(op, name, t);
  check_extents(op, name, t);
}

/// A tensor without gaps.
void check_dense(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape, Device device) {
  require(t.dtype() == dtype && t.shape() == shape && t.is_contiguous(), "{}: {} is {}; it must be {}[{}], row-major", op, name, t,
          name_of(dtype), tw::join(shape, ", "));
  check_operand(op, name, t, dtype, device);
}

void check_weight(const char* op, const TernaryMatrix& weight, Device device) {
  require(!weight.empty(), "{}: the weight is empty; see quantize_ternary()", op);
  check_dense(op, "the weight's values", weight.values, DType::u8, weight.values.shape(), device);
  require(weight.values.rank() == 2, "{}: the weight's values are {}; they must have 2 dimensions", op, weight.values);
  check_dense(op, "the weight's scales", weight.scales, DType::f32, {weight.rows()}, device);
  check_extents(op, "the weight's values", weight.values);
}

/// The checks of a product that do not depend on how its rows of x [M, K] come.
void check_product(const char* op, const char* name, const Tensor& x, const TernaryMatrix& weight, const Tensor& y,
                   const BitLinearOptions& options) {
  const Device device = y.device();
  check_weight(op, weight, device);
  require(x.rank() == 2 && x.shape(1) == weight.columns(), "{}: {} is {}; it must be [M, {}], with as many columns as the weight", op, name,
          x, weight.columns());
  require(x.shape(1) <= kLargestTernaryDepth, "{}: {} is {}; it may have {} columns", op, name, x, kLargestTernaryDepth);
  check_columns(op, name, x);
  check_extents(op, name, x);
  require(is_float(y.dtype()), "{}: y is {}; f32, f16 and bf16 are supported", op, y);
  check_matrix(op, "y", y, y.dtype(), {x.shape(0), weight.rows()}, device);
  check_extents(op, "y", y);
  check_output(op, "y", y);
  check_bias(op, options.bias, weight.rows(), y.dtype(), device);
  check_disjoint(op, {"y", &y},
                 {{name, &x}, {"the weight's values", &weight.values}, {"the weight's scales", &weight.scales}, {"bias", options.bias}});
}

}  // namespace

std::int64_t TernaryMatrix::bytes() const {
  return empty() ? 0 : values.numel() + scales.numel() * static_cast<std::int64_t>(sizeof(float));
}

TernaryMatrix TernaryMatrix::allocate(std::int64_t rows, std::int64_t columns, const Stream& stream) {
  require(rows >= 0 && columns >= 0 && columns % 4 == 0,
          "TernaryMatrix: rows is {} and columns {}; neither may be negative, and columns must be a multiple of 4", rows, columns);
  return {Tensor::empty({rows, columns / 4}, DType::u8, stream), Tensor::empty({rows}, DType::f32, stream)};
}

TernaryMatrix TernaryMatrix::slice(std::int64_t begin, std::int64_t end) const {
  return {values.slice(0, begin, end), scales.slice(0, begin, end)};
}

TernaryMatrix TernaryMatrix::to(Device device) const { return {values.to(device), scales.to(device)}; }

void quantize_ternary(const Tensor& weight, const TernaryMatrix& out, const BitNetOptions& options) {
  constexpr const char* op = "quantize_ternary";
  const Device device = out.values.device();
  check_floats(op, "the weight", weight, device);
  require(weight.shape(1) % 4 == 0, "{}: the weight is {}; its columns must be a multiple of 4", op, weight);
  check_dense(op, "values", out.values, DType::u8, {weight.shape(0), weight.shape(1) / 4}, device);
  check_dense(op, "scales", out.scales, DType::f32, {weight.shape(0)}, device);
  check_disjoint(op, {"values", &out.values}, {{"weight", &weight}, {"scales", &out.scales}});
  check_disjoint(op, {"scales", &out.scales}, {{"weight", &weight}});
  const Stream stream = checked_stream(op, options.stream, device);
  if (weight.shape(0) == 0) return;
  device.is_cuda() ? kernels::bitnet::quantize_ternary_on_gpu(weight, out, stream) : kernels::bitnet::quantize_ternary_on_cpu(weight, out);
}

TernaryMatrix quantize_ternary(const Tensor& weight, const BitNetOptions& options) {
  require(weight.rank() == 2 && weight.shape(1) % 4 == 0,
          "quantize_ternary: the weight is {}; it must have 2 dimensions, and columns that are a multiple of 4", weight);
  const Stream stream = checked_stream("quantize_ternary", options.stream, weight.device());
  TernaryMatrix out = TernaryMatrix::allocate(weight.shape(0), weight.shape(1), stream);
  quantize_ternary(weight, out, {.stream = stream});
  return out;
}

void unpack_ternary(const TernaryMatrix& weight, const Tensor& out, const BitNetOptions& options) {
  constexpr const char* op = "unpack_ternary";
  const Device device = out.device();
  check_weight(op, weight, device);
  check_dense(op, "out", out, DType::i8, {weight.rows(), weight.columns()}, device);
  check_disjoint(op, {"out", &out}, {{"values", &weight.values}, {"scales", &weight.scales}});
  const Stream stream = checked_stream(op, options.stream, device);
  if (out.numel() == 0) return;
  device.is_cuda() ? kernels::bitnet::unpack_on_gpu(weight, out, stream) : kernels::bitnet::unpack_on_cpu(weight, out);
}

void quantize_activations(const Tensor& x, const Tensor& values, const Tensor& scales, const BitNetOptions& options) {
  constexpr const char* op = "quantize_activations";
  const Device device = values.device();
  check_floats(op, "x", x, device);
  check_matrix(op, "values", values, DType::i8, x.shape(), device);
  check_output(op, "values", values);
  check_dense(op, "scales", scales, DType::f32, {x.shape(0)}, device);
  check_disjoint(op, {"values", &values}, {{"x", &x}, {"scales", &scales}});
  check_disjoint(op, {"scales", &scales}, {{"x", &x}});
  const Stream stream = checked_stream(op, options.stream, device);
  if (x.shape(0) == 0) return;
  device.is_cuda() ? kernels::bitnet::quantize_activations_on_gpu(x, values, scales, stream)
                   : kernels::bitnet::quantize_activations_on_cpu(x, values, scales);
}

void ternary_gemm(const Tensor& values, const Tensor& x_scales, const TernaryMatrix& weight, const Tensor& y,
                  const BitLinearOptions& options) {
  constexpr const char* op = "ternary_gemm";
  const Device device = y.device();
  check_product(op, "values", values, weight, y, options);
  check_matrix(op, "values", values, DType::i8, values.shape(), device);
  check_dense(op, "x_scales", x_scales, DType::f32, {values.shape(0)}, device);
  check_disjoint(op, {"y", &y}, {{"x_scales", &x_scales}});
  const kernels::bitnet::Call call{values, x_scales, weight, y, options, checked_stream(op, options.stream, device)};
  if (y.numel() == 0) return;
  device.is_cuda() ? kernels::bitnet::run_on_gpu(call) : kernels::bitnet::run_on_cpu(call);
}

void bit_linear(const Tensor& x, const TernaryMatrix& weight, const Tensor& y, const BitLinearOptions& options) {
  constexpr const char* op = "bit_linear";
  check_floats(op, "x", x, y.device());
  check_product(op, "x", x, weight, y, options);
  require(y.dtype() == x.dtype(), "{}: y is {}; it must be of x's dtype, {}", op, y, name_of(x.dtype()));
  BitLinearOptions rest = options;
  rest.stream = checked_stream(op, options.stream, y.device());
  const Stream& stream = *rest.stream;
  const Tensor values = workspace(x.shape(), DType::i8, stream), scales = workspace({x.shape(0)}, DType::f32, stream);
  quantize_activations(x, values, scales, {.stream = stream});
  ternary_gemm(values, scales, weight, y, rest);
}

}  // namespace tw

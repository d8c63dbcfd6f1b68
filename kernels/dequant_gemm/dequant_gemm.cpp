#include "kernels/check.hpp"
#include "kernels/dequant_gemm/call.hpp"
#include "kernels/rows.hpp"
#include "tilewave/quantized.hpp"

namespace tw {

namespace {

/// The checks of a weight that did not come from quantize(): its tensors agree with its format. Their values are not looked at.
void check_weight(const char* op, const QuantizedMatrix& weight, Device device) {
  require(!weight.empty(), "{}: the weight is empty; it must be in fewer bits: see quantize()", op);
  const WeightFormat format = weight.format;
  const bool by_row = codes_in_byte(format) == 1, integers = format == WeightFormat::int4 || format == WeightFormat::int2;
  const DType dtype = !by_row ? DType::u8 : format == WeightFormat::int8 ? DType::i8 : DType::fp8_e4m3;
  const auto check = [&](const char* name, const Tensor& t, const Shape& shape, DType expected) {
    require(t.dtype() == expected && t.shape() == shape && t.is_contiguous(),
            "{}: the weight's {} are {}; in {} they must be {}[{}], row-major", op, name, t, name_of(weight.format), name_of(expected),
            tw::join(shape, ", "));
    check_operand(op, name, t, expected, device);
  };
  require(weight.values.rank() == 2, "{}: the weight's values are {}; they must have 2 dimensions", op, weight.values);
  const std::int64_t rows = weight.rows(), columns = weight.columns();
  check("values", weight.values, weight.values.shape(), dtype);
  if (by_row) return check("scales", weight.scales, {rows}, DType::f32);
  if (integers)
    require((weight.group == 32 || weight.group == 128) && columns % weight.group == 0,
            "{}: the weight's group is {}, with {} columns; 32 and 128 are supported, of which the columns are a multiple", op,
            weight.group, columns);
  const int group = format == WeightFormat::nf4 ? 64 : 32;
  if (!integers)
    require(weight.group == group && columns % group == 0,
            "{}: the weight's group is {}, with {} columns; in {} it is {}, of which the columns are a multiple", op, weight.group, columns,
            name_of(format), group);
  const DType scale = format == WeightFormat::nf4 ? DType::f32 : format == WeightFormat::mxfp4 ? DType::u8 : DType::f16;
  check("scales", weight.scales, {rows, columns / weight.group}, scale);
  require(integers || weight.zeros.numel() == 0, "{}: the weight has zeros; only int4 and int2 have them", op);
  if (weight.zeros.numel() > 0) check("zeros", weight.zeros, weight.scales.shape(), DType::u8);
}

void check_matrix(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape, Device device) {
  require(t.dtype() == dtype && t.shape() == shape, "{}: {} is {}; it must be {}[{}]", op, name, t, name_of(dtype), tw::join(shape, ", "));
  check_operand(op, name, t, dtype, device);
  require(t.stride(1) == 1 || t.shape(1) <= 1, "{}: {} is {} with columns {} elements apart; they must be adjacent", op, name, t,
          t.stride(1));
}

}  // namespace

void dequantize(const QuantizedMatrix& weight, const Tensor& out, const std::optional<Stream>& stream) {
  constexpr const char* op = "dequantize";
  const Device device = out.device();
  check_weight(op, weight, device);
  require(kernels::is_float(out.dtype()), "{}: out is {}; f32, f16 and bf16 are supported", op, out);
  check_matrix(op, "out", out, out.dtype(), {weight.rows(), weight.columns()}, device);
  require(out.is_contiguous(), "{}: out is {} with strides [{}]; it must be row-major", op, out, tw::join(out.strides(), ", "));
  check_disjoint(op, {"out", &out}, {{"values", &weight.values}, {"scales", &weight.scales}, {"zeros", &weight.zeros}});
  const Stream on = checked_stream(op, stream, device);
  if (out.numel() == 0) return;
  device.is_cuda() ? kernels::dequant_gemm::dequantize_on_gpu(weight, out, on) : kernels::dequant_gemm::dequantize_on_cpu(weight, out);
}

void dequant_gemm(const Tensor& x, const QuantizedMatrix& weight, const Tensor& y, const DequantGemmOptions& options) {
  constexpr const char* op = "dequant_gemm";
  const Device device = y.device();
  check_weight(op, weight, device);
  const bool integers = options.x_scales != nullptr;
  require(integers || kernels::is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported, and i8 with x_scales", op, x);
  require(!integers || x.dtype() == DType::i8, "{}: x_scales are given for x, which is {}; they belong to i8", op, x);
  require(!integers || weight.format == WeightFormat::int4, "{}: the weight is {}; x of i8 is multiplied by int4", op,
          name_of(weight.format));
  require(x.rank() == 2 && x.shape(1) == weight.columns(), "{}: x is {}; it must be [M, {}], with as many columns as the weight", op, x,
          weight.columns());
  check_matrix(op, "x", x, x.dtype(), x.shape(), device);
  const bool swiglu = options.activation == Activation::swiglu;
  require(!swiglu || weight.rows() % 2 == 0, "{}: the weight has {} rows; swiglu takes pairs of rows, so N must be even", op,
          weight.rows());
  const DType dtype = integers ? y.dtype() : x.dtype();
  require(kernels::is_float(dtype), "{}: y is {}; f32, f16 and bf16 are supported", op, y);
  check_matrix(op, "y", y, dtype, {x.shape(0), swiglu ? weight.rows() / 2 : weight.rows()}, device);
  kernels::check_extents(op, "x", x);
  kernels::check_extents(op, "y", y);
  check_output(op, "y", y);
  if (integers) {
    const Tensor& scales = *options.x_scales;
    require(scales.dtype() == DType::f32 && scales.shape() == Shape{x.shape(0)} && scales.is_contiguous(),
            "{}: x_scales are {}; they must be f32[{}], contiguous", op, scales, x.shape(0));
    check_operand(op, "x_scales", scales, DType::f32, device);
  }
  check_bias(op, options.bias, weight.rows(), y.dtype(), device);
  require(!options.accumulate || options.activation == Activation::none, "{}: accumulate is not allowed with an activation", op);
  check_disjoint(op, {"y", &y},
                 {{"x", &x},
                  {"values", &weight.values},
                  {"scales", &weight.scales},
                  {"zeros", &weight.zeros},
                  {"bias", options.bias},
                  {"x_scales", options.x_scales}});
  const kernels::dequant_gemm::Call call{x, weight, y, options, checked_stream(op, options.stream, device)};
  if (y.numel() == 0) return;
  device.is_cuda() ? kernels::dequant_gemm::run_on_gpu(call) : kernels::dequant_gemm::run_on_cpu(call);
}

namespace kernels::dequant_gemm {

void run_widened(const Call& call, const Tensor& x, void (*run)(const Call&)) {
  DequantGemmOptions options = call.options;
  options.x_scales = nullptr;
  run({x, call.weight, call.y, options, call.stream});
}

}  // namespace kernels::dequant_gemm

}  // namespace tw

#include "tilewave/grouped_gemm.hpp"

#include "kernels/check.hpp"
#include "kernels/grouped_gemm/call.hpp"
#include "kernels/rows.hpp"

namespace tw {

namespace {

/// The most groups: each block of the kernel that lists tiles looks at all.
constexpr std::int64_t kMostGroups = 65535;

void check_dtype(const char* op, const Tensor& a, Device device) {
  const DType dtype = a.dtype();
  require(dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32, "{}: a is {}; f16, bf16 and f32 are supported", op, a);
  require(dtype != DType::f32 || !device.is_cuda(), "{}: a is {}; f32 is supported on the CPU only", op, a);
}

void check_offsets(const char* op, const Tensor& offsets, std::int64_t groups, Device device) {
  require(offsets.dtype() == DType::i32 && offsets.shape() == Shape{groups + 1} && offsets.is_contiguous(),
          "{}: offsets is {}; for {} groups it must be i32[{}], contiguous", op, offsets, groups, groups + 1);
  check_operand(op, "offsets", offsets, DType::i32, device);
}

/// The scales of fp8 operands, both of which must be given; a is [M, K], b [groups, K, N].
void check_scales(const char* op, const Tensor& a, const Tensor& b, const GroupedGemmOptions& options, Device device) {
  if (a.dtype() != DType::fp8_e4m3) {
    require(!options.a_scale && !options.b_scale, "{}: a is {}; scales are for operands of fp8_e4m3", op, a);
    return;
  }
  const auto blocks = [](std::int64_t x) { return (x + 127) / 128; };
  const auto check = [&](const char* name, const Tensor* scale, const Shape& shape) {
    require(scale != nullptr, "{}: {} is not given; operands of fp8_e4m3 need it", op, name);
    require(scale->shape() == shape, "{}: {} is {}; for a {} and b {} it must be [{}]", op, name, *scale, a, b, tw::join(shape, ", "));
    check_operand(op, name, *scale, DType::f32, device);
  };
  check("a_scale", options.a_scale, {a.shape(0), blocks(a.shape(1))});
  check("b_scale", options.b_scale, {b.shape(0), blocks(b.shape(1)), blocks(b.shape(2))});
  require(!options.bias && options.activation == Activation::none, "{}: bias or activation is given; operands of fp8_e4m3 allow neither",
          op);
}

}  // namespace

void grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& offsets, const Tensor& d, const GroupedGemmOptions& options) {
  constexpr const char* op = "grouped_gemm";
  const Device device = d.device();
  if (a.dtype() != DType::fp8_e4m3) check_dtype(op, a, device);
  const DType out = a.dtype() == DType::fp8_e4m3 ? DType::bf16 : a.dtype();
  require(a.rank() == 2, "{}: a is {}; it must be [M, K]", op, a);
  require(b.rank() == 3 && b.shape(1) == a.shape(1), "{}: b is {}; for a {} it must be [groups, {}, N]", op, b, a, a.shape(1));
  require(b.shape(0) <= kMostGroups, "{}: b is {}; up to {} groups are supported", op, b, kMostGroups);
  const bool swiglu = options.activation == Activation::swiglu;
  require(!swiglu || b.shape(2) % 2 == 0, "{}: b is {}; swiglu takes pairs of columns, so N must be even", op, b);
  const Shape expected{a.shape(0), swiglu ? b.shape(2) / 2 : b.shape(2)};
  require(d.shape() == expected, "{}: d is {}; for a {} and b {} it must be [{}]", op, d, a, b, tw::join(expected, ", "));
  check_operand(op, "a", a, a.dtype(), device);
  check_operand(op, "b", b, a.dtype(), device);
  check_operand(op, "d", d, out, device);
  kernels::check_extents(op, "a", a);
  kernels::check_extents(op, "b", b);
  check_output(op, "d", d);
  check_offsets(op, offsets, b.shape(0), device);
  check_scales(op, a, b, options, device);
  if (options.bias) {
    require(options.bias->shape() == (Shape{b.shape(0), b.shape(2)}) && options.bias->is_contiguous(),
            "{}: bias is {}; it must be [{}, {}], contiguous", op, *options.bias, b.shape(0), b.shape(2));
    check_operand(op, "bias", *options.bias, a.dtype(), device);
  }
  check_disjoint(
      op, {"d", &d},
      {{"a", &a}, {"b", &b}, {"offsets", &offsets}, {"bias", options.bias}, {"a_scale", options.a_scale}, {"b_scale", options.b_scale}});
  kernels::grouped_gemm::Call call{a, b.transpose(1, 2), offsets, d, options, checked_stream(op, options.stream, device)};
  if (options.a_scale) {
    call.a_scale = *options.a_scale;
    call.b_scale = options.b_scale->transpose(1, 2);
  }
  if (d.numel() == 0 || b.shape(0) == 0) return;
  device.is_cuda() ? kernels::grouped_gemm::run_on_gpu(call) : kernels::grouped_gemm::run_on_cpu(call);
}

void k_grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& offsets, const Tensor& d, const KGroupedGemmOptions& options) {
  constexpr const char* op = "k_grouped_gemm";
  const Device device = d.device();
  check_dtype(op, a, device);
  require(a.rank() == 2, "{}: a is {}; it must be [M, K]", op, a);
  require(b.rank() == 2 && b.shape(0) == a.shape(1), "{}: b is {}; for a {} it must be [{}, N]", op, b, a, a.shape(1));
  require(d.rank() == 3 && d.shape(1) == a.shape(0) && d.shape(2) == b.shape(1),
          "{}: d is {}; for a {} and b {} it must be [groups, {}, {}]", op, d, a, b, a.shape(0), b.shape(1));
  require(d.shape(0) <= kMostGroups, "{}: d is {}; up to {} groups are supported", op, d, kMostGroups);
  require(d.dtype() == a.dtype() || d.dtype() == DType::f32, "{}: d is {}; for operands of {} it must be {} or f32", op, d,
          name_of(a.dtype()), name_of(a.dtype()));
  check_operand(op, "a", a, a.dtype(), device);
  check_operand(op, "b", b, a.dtype(), device);
  check_operand(op, "d", d, d.dtype(), device);
  kernels::check_extents(op, "a", a);
  kernels::check_extents(op, "b", b);
  kernels::check_extents(op, "d", d);
  check_output(op, "d", d);
  check_offsets(op, offsets, d.shape(0), device);
  check_disjoint(op, {"d", &d}, {{"a", &a}, {"b", &b}, {"offsets", &offsets}});
  const kernels::grouped_gemm::DepthCall call{a.transpose(0, 1), b, offsets, d, options, checked_stream(op, options.stream, device)};
  if (d.numel() == 0) return;
  device.is_cuda() ? kernels::grouped_gemm::run_on_gpu(call) : kernels::grouped_gemm::run_on_cpu(call);
}

}  // namespace tw

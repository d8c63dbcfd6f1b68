#include "tilewave/gemm.hpp"

#include <cmath>
#include <limits>

#include "kernels/check.hpp"
#include "kernels/gemm/call.hpp"

namespace tw {

namespace {

constexpr const char* kOp = "gemm";

/// Checks everything and sorts the shapes out. Throws InvalidArgument.
kernels::gemm::Call check(const Tensor& a, const Tensor& b, const Tensor& d, const GemmOptions& options) {
  const Device device = d.device();
  const DType dtype = a.dtype();
  require(dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16, "{}: a is {}; f32, f16 and bf16 are supported", kOp,
          a.describe());
  check_operand(kOp, "a", a, dtype, device);
  check_operand(kOp, "b", b, dtype, device);
  check_operand(kOp, "d", d, dtype, device);
  check_output(kOp, "d", d);
  require(a.rank() == 2 || a.rank() == 3, "{}: a is {}; it must be [M, K] or [batch, M, K]", kOp, a.describe());
  require(b.rank() == 2 || b.rank() == 3, "{}: b is {}; it must be [K, N] or [batch, K, N]", kOp, b.describe());
  const bool batched = a.rank() == 3 || b.rank() == 3;
  const std::int64_t batch = a.rank() == 3 ? a.shape(0) : b.rank() == 3 ? b.shape(0) : 1;
  require(b.rank() == 2 || b.shape(0) == batch, "{}: a is {} and b is {}; their batches must be equal", kOp, a.describe(), b.describe());
  const std::int64_t m = a.shape(-2), k = a.shape(-1), n = b.shape(-1);
  require(b.shape(-2) == k, "{}: a is {} and b is {}; a's last and b's second-to-last dimension, both K, must be equal", kOp, a.describe(),
          b.describe());
  const Shape expected = batched ? Shape{batch, m, n} : Shape{m, n};
  require(d.shape() == expected, "{}: d is {}; for a {} and b {} it must be [{}]", kOp, d.describe(), a.describe(), b.describe(),
          fmt::join(expected, ", "));
  // Less than 2^31, so that the end of a last, incomplete tile is an int too.
  constexpr std::int64_t largest = std::numeric_limits<int>::max() - 1023;
  require(m <= largest && n <= largest && k <= largest && batch <= largest, "{}: a is {} and b is {}; extents are limited to {}", kOp,
          a.describe(), b.describe(), largest);
  // As many as the smallest tiles of all devices would make.
  const std::int64_t tiles = (m + 31) / 32 * ((n + 127) / 128) * batch;
  require(tiles <= largest, "{}: d is {}, which is {} tiles; they are limited to {}", kOp, d.describe(), tiles, largest);
  require(std::isfinite(options.alpha) && std::isfinite(options.beta), "{}: alpha is {} and beta is {}; both must be finite", kOp,
          options.alpha, options.beta);
  if (d.numel() > 0) {
    require(d.data() != a.data() || a.numel() == 0, "{}: d is a's memory; the product cannot be computed in place", kOp);
    require(d.data() != b.data() || b.numel() == 0, "{}: d is b's memory; the product cannot be computed in place", kOp);
  }
  if (options.bias) {
    check_operand(kOp, "bias", *options.bias, dtype, device);
    require(options.bias->shape() == Shape{n} && options.bias->is_contiguous(), "{}: bias is {}; it must be contiguous, [{}]", kOp,
            options.bias->describe(), n);
  }
  if (options.residual) {
    check_operand(kOp, "residual", *options.residual, dtype, device);
    require(options.residual->shape() == expected, "{}: residual is {}; it must have d's shape, [{}]", kOp, options.residual->describe(),
            fmt::join(expected, ", "));
  }
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", kOp, stream.device().name(), device.name());
  return {a,
          b.transpose(-2, -1),
          d,
          options.bias,
          options.residual,
          options.activation,
          options.alpha,
          options.beta,
          static_cast<int>(m),
          static_cast<int>(n),
          static_cast<int>(k),
          static_cast<int>(batch),
          options.config,
          stream};
}

}  // namespace

void gemm(const Tensor& a, const Tensor& b, const Tensor& d, const GemmOptions& options) {
  const kernels::gemm::Call call = check(a, b, d, options);
  if (d.numel() == 0) return;
  if (call.stream.device().is_cuda())
    kernels::gemm::run_on_gpu(call);
  else
    kernels::gemm::run_on_cpu(call);
}

Tensor matmul(const Tensor& a, const Tensor& b, const GemmOptions& options) {
  require(options.beta == 0, "matmul: beta is {}; it must be 0, there is no C to read", options.beta);
  require(a.rank() >= 2 && b.rank() >= 2, "matmul: a is {} and b is {}; both need at least two dimensions", a.describe(), b.describe());
  Shape shape{a.shape(-2), b.shape(-1)};
  if (a.rank() == 3 || b.rank() == 3) shape.insert(shape.begin(), a.rank() == 3 ? a.shape(0) : b.shape(0));
  Tensor d = Tensor::empty(std::move(shape), a.dtype(), options.stream ? *options.stream : Stream::standard(a.device()));
  gemm(a, b, d, options);
  return d;
}

}  // namespace tw

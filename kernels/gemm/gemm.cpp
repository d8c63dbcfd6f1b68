#include "tilewave/gemm.hpp"

#include <cmath>
#include <limits>

#include "kernels/check.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/tuning.hpp"
#include "kernels/tf32_parts.hpp"

namespace tw {

namespace {

constexpr const char* kOp = "gemm";

bool plain(const GemmOptions& o) { return o.alpha == 1 && o.beta == 0 && !o.bias && !o.residual && o.activation == Activation::none; }

/// What the scales of fp8 operands must be. Returns whether rows of A or columns of B have scales of their own.
bool check_scales(const Tensor& a, const Tensor& b, Device device, const GemmOptions& options) {
  if (!options.a_scale && !options.b_scale) return false;
  require(options.a_scale && options.b_scale, "{}: {} is not given, but {} is; both or none are allowed", kOp,
          options.a_scale ? "b_scale" : "a_scale", options.a_scale ? "a_scale" : "b_scale");
  require(kernels::is_8bit_float(a.dtype()), "{}: a is {}; scales are for operands of fp8_e4m3 and fp8_e5m2", kOp, a);
  const Tensor& sa = *options.a_scale;
  const Tensor& sb = *options.b_scale;
  check_operand(kOp, "a_scale", sa, DType::f32, device);
  check_operand(kOp, "b_scale", sb, DType::f32, device);
  const bool one_of_a = sa.shape() == Shape{1}, one_of_b = sb.shape() == Shape{1};
  if (one_of_a && one_of_b) return false;
  const bool of_rows = sa.shape() == Shape{a.shape(-2), 1}, of_columns = sb.shape() == Shape{1, b.shape(-1)};
  if ((one_of_a || of_rows) && (one_of_b || of_columns)) {
    require(a.rank() == 2 && b.rank() == 2, "{}: a is {} and b is {}; scales of rows and columns are for operands without a batch", kOp, a,
            b);
    return true;
  }
  const auto blocks = [](std::int64_t x) { return (x + 127) / 128; };
  require(a.rank() == 2 && b.rank() == 2, "{}: a is {} and b is {}; block scales are for operands without a batch", kOp, a, b);
  require(a.dtype() == DType::fp8_e4m3 && b.dtype() == DType::fp8_e4m3, "{}: a is {} and b is {}; block scales are for fp8_e4m3", kOp, a,
          b);
  const Shape expected_a{a.shape(0), blocks(a.shape(1))}, expected_b{blocks(b.shape(0)), blocks(b.shape(1))};
  require(one_of_a || of_rows || sa.shape() == expected_a, "{}: a_scale is {}; for a {} it must be [1], [{}, 1] or [{}]", kOp, sa, a,
          a.shape(0), tw::join(expected_a, ", "));
  require(sa.shape() == expected_a && sb.shape() == expected_b,
          "{}: a_scale is {} and b_scale is {}; for b {} it must be [1] or [1, {}], or [{}] with block scales of a", kOp, sa, sb, b,
          b.shape(1), tw::join(expected_b, ", "));
  require(plain(options), "{}: block scales are given; alpha, beta, bias, activation and residual are not allowed with them", kOp);
  return false;
}

/// D = 0 of sums of integers without a term, which the products' kernels do not do.
void set_to_zero(const kernels::gemm::Call& call) {
  using namespace kernels::gemm;
  const Launch x = make_launch(call, {.form = Kernel::sum}, Tensor::zeros({call.batch, 1, call.m, call.n}, DType::f32, call.stream));
  launch<SumPartials<StoreSums<i32>, kSum.rows, kSum.cols>>(call.stream, x.grid,
                                                            [&](auto& bind, auto& p) { bind_launch(bind, p, call, x); });
}

}  // namespace

kernels::gemm::Layout kernels::gemm::stored_layout(const Tensor& a, const Tensor& b) {
  const auto dense_along_rows = [](const Tensor& t) { return t.stride(-1) != 1 && t.stride(-2) == 1 && t.shape(-1) > 1; };
  return {dense_along_rows(a), dense_along_rows(b)};
}

kernels::gemm::Layout kernels::gemm::kernel_layout(DType dtype, const Layout& stored) {
  const bool b_rows = size_of(dtype) == 2 && stored.b_rows;
  return {b_rows && stored.a_rows, b_rows};
}

kernels::gemm::Extents kernels::gemm::check_extents(const char* op, const Tensor& a, const Tensor& b) {
  require(a.rank() == 2 || a.rank() == 3, "{}: a is {}; it must be [M, K] or [batch, M, K]", op, a);
  require(b.rank() == 2 || b.rank() == 3, "{}: b is {}; it must be [K, N] or [batch, K, N]", op, b);
  const std::int64_t batch = a.rank() == 3 ? a.shape(0) : b.rank() == 3 ? b.shape(0) : 1;
  require(b.rank() == 2 || b.shape(0) == batch, "{}: a is {} and b is {}; their batches must be equal", op, a, b);
  const std::int64_t m = a.shape(-2), k = a.shape(-1), n = b.shape(-1);
  require(b.shape(-2) == k, "{}: a is {} and b is {}; a's last and b's second-to-last dimension, both K, must be equal", op, a, b);
  // Less than 2^31, so that the end of a last, incomplete tile is an int too.
  constexpr std::int64_t largest = std::numeric_limits<int>::max() - 1023;
  require(m <= largest && n <= largest && k <= largest && batch <= largest, "{}: a is {} and b is {}; extents are limited to {}", op, a, b,
          largest);
  // As many as the smallest tiles of all devices would make.
  const std::int64_t tiles = (m + 31) / 32 * ((n + 127) / 128) * batch;
  require(tiles <= largest, "{}: a is {} and b is {}, whose product is {} tiles; they are limited to {}", op, a, b, tiles, largest);
  return {static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), static_cast<int>(batch)};
}

kernels::gemm::Call kernels::gemm::make_call(const Tensor& a, const Tensor& b, const Tensor& d, const GemmOptions& options) {
  const Device device = d.device();
  const DType dtype = a.dtype();
  const bool fp8 = is_8bit_float(dtype);
  require(fp8 || is_float(dtype) || dtype == DType::i8, "{}: a is {}; f32, f16, bf16, fp8_e4m3, fp8_e5m2 and i8 are supported", kOp, a);
  const DType out = fp8 && (d.dtype() == DType::f32 || is_8bit_float(d.dtype())) ? d.dtype() : result_of(dtype);
  check_operand(kOp, "a", a, dtype, device);
  check_operand(kOp, "b", b, fp8 && is_8bit_float(b.dtype()) ? b.dtype() : dtype, device);
  require(d.dtype() == out, "{}: d is {}; for operands of {} it must be {}{}", kOp, d, name_of(dtype), name_of(out),
          fp8 ? ", f32, fp8_e4m3 or fp8_e5m2" : "");
  require(!is_8bit_float(out) || (options.beta == 0 && !options.bias && !options.residual),
          "{}: d is {}, for which beta, bias and residual are not allowed", kOp, d);
  check_operand(kOp, "d", d, out, device);
  check_output(kOp, "d", d);
  const auto [m, n, k, batch] = check_extents(kOp, a, b);
  const bool batched = a.rank() == 3 || b.rank() == 3;
  const bool swiglu = options.activation == Activation::swiglu;
  require(!swiglu || n % 2 == 0, "{}: b is {}; swiglu takes pairs of columns, so N must be even", kOp, b);
  require(!swiglu || (options.beta == 0 && !options.residual), "{}: swiglu allows neither beta nor a residual", kOp);
  const int columns = swiglu ? n / 2 : n;
  const Shape expected = batched ? Shape{batch, m, columns} : Shape{m, columns};
  require(d.shape() == expected, "{}: d is {}; for a {} and b {} it must be [{}]", kOp, d, a, b, tw::join(expected, ", "));
  require(std::isfinite(options.alpha) && std::isfinite(options.beta), "{}: alpha is {} and beta is {}; both must be finite", kOp,
          options.alpha, options.beta);
  check_disjoint(kOp, {"d", &d},
                 {{"a", &a}, {"b", &b}, {"bias", options.bias}, {"a_scale", options.a_scale}, {"b_scale", options.b_scale}});
  check_bias(kOp, options.bias, n, out, device);
  if (options.residual) {
    check_operand(kOp, "residual", *options.residual, out, device);
    require(options.residual->shape() == expected, "{}: residual is {}; it must have d's shape, [{}]", kOp, *options.residual,
            tw::join(expected, ", "));
    check_in_place(kOp, {"d", &d}, {"residual", options.residual});
  }
  require(dtype != DType::i8 || plain(options), "{}: a is {}; i8 operands allow no alpha, beta, bias, activation or residual", kOp, a);
  const bool row_scales = check_scales(a, b, device, options);
  const bool block_scales = !row_scales && options.a_scale && options.a_scale->rank() == 2;
  require(!block_scales || out == DType::bf16, "{}: d is {}; with block scales it must be bf16", kOp, d);
  require(options.splits >= 0 || options.splits == kStreamK, "{}: splits is {}; {} (stream-K), 0 and more are allowed", kOp, options.splits,
          kStreamK);
  const Tensor columns_b = b.transpose(-2, -1);
  const Layout stored = stored_layout(a, columns_b);
  Call call{a,
            columns_b,
            d,
            options.bias,
            options.residual,
            options.a_scale,
            options.b_scale ? (options.b_scale->rank() == 2 ? options.b_scale->transpose(0, 1) : *options.b_scale) : Tensor(),
            options.activation,
            options.alpha,
            options.beta,
            m,
            n,
            k,
            batch,
            options.config,
            options.splits,
            options.constant_b,
            checked_stream(kOp, options.stream, device),
            stored,
            kernel_layout(dtype, stored)};
  call.row_scales = row_scales;
  return call;
}

void kernels::gemm::run_in_parts(Call call) {
  require(call.k <= std::numeric_limits<int>::max() / 4, "{}: a is {}; K is limited to {} in exact products of f32", kOp, call.a,
          std::numeric_limits<int>::max() / 4);
  call.a = tf32_parts(call.a, ProductSide::left, call.stream);
  call.b = tf32_parts(call.b, ProductSide::right, call.stream);
  call.k *= 3;
  call.stored = stored_layout(call.a, call.b);
  call.layout = kernel_layout(DType::f32, call.stored);
  use_tuned(call);
  call.stream.device().is_cuda() ? run_on_gpu(call) : run_on_cpu(call);
}

void gemm(const Tensor& a, const Tensor& b, const Tensor& d, const GemmOptions& options) {
  kernels::gemm::Call call = kernels::gemm::make_call(a, b, d, options);
  if (d.numel() == 0) return;
  if (call.k == 0 && a.dtype() == DType::i8) return set_to_zero(call);
  if (kernels::wants_tf32_parts(a) && call.k > 0) return kernels::gemm::run_in_parts(call);
  kernels::gemm::use_tuned(call);
  if (call.stream.device().is_cuda())
    kernels::gemm::run_on_gpu(call);
  else
    kernels::gemm::run_on_cpu(call);
}

Tensor matmul(const Tensor& a, const Tensor& b, const GemmOptions& options) {
  require(options.beta == 0, "matmul: beta is {}; it must be 0, there is no C to read", options.beta);
  require(a.rank() >= 2 && b.rank() >= 2, "matmul: a is {} and b is {}; both need at least two dimensions", a, b);
  Shape shape{a.shape(-2), options.activation == Activation::swiglu ? b.shape(-1) / 2 : b.shape(-1)};
  if (a.rank() == 3 || b.rank() == 3) shape.insert(shape.begin(), a.rank() == 3 ? a.shape(0) : b.shape(0));
  Tensor d =
      Tensor::empty(std::move(shape), kernels::gemm::result_of(a.dtype()), options.stream ? *options.stream : Stream::standard(a.device()));
  gemm(a, b, d, options);
  return d;
}

}  // namespace tw

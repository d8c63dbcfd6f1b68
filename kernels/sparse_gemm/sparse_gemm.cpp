#include "tilewave/sparse_gemm.hpp"

#include <cmath>

#include "kernels/check.hpp"
#include "kernels/rows.hpp"
#include "kernels/sparse_gemm/call.hpp"

namespace tw {

namespace {

using kernels::sparse_gemm::Call;

void check_options(const char* op, DType dtype, const SparseGemmOptions& o, Device device) {
  require(o.activation != Activation::swiglu, "{}: activation is swiglu; it is not supported", op);
  require(std::isfinite(o.alpha) && std::isfinite(o.beta), "{}: alpha is {} and beta is {}; both must be finite", op, o.alpha, o.beta);
  const bool plain = o.alpha == 1 && o.beta == 0 && !o.bias && !o.residual && o.activation == Activation::none;
  require(dtype != DType::i8 || plain, "{}: the sparse matrix is i8, which allows no alpha, beta, bias, activation or residual", op);
  if (!o.a_scale && !o.b_scale) return;
  require(o.a_scale && o.b_scale, "{}: {} is not given, but {} is; both or none are allowed", op, o.a_scale ? "b_scale" : "a_scale",
          o.a_scale ? "a_scale" : "b_scale");
  require(dtype == DType::fp8_e4m3, "{}: the sparse matrix is {}; scales are for operands of fp8_e4m3", op, name_of(dtype));
  for (const auto& [name, scale] : {std::pair{"a_scale", o.a_scale}, {"b_scale", o.b_scale}}) {
    require(scale->shape() == Shape{1}, "{}: {} is {}; it must be f32[1]", op, name, *scale);
    check_operand(op, name, *scale, DType::f32, device);
  }
}

/// What both functions check of tensors that are [M, K], [K, N] and [M, N] with the names given.
void check_dense(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape, const SparseMatrix& sparse,
                 Device device) {
  require(t.dtype() == dtype && t.shape() == shape, "{}: {} is {}; for a sparse matrix of {} with shape [{}, {}] it must be {}[{}]", op,
          name, t, name_of(sparse.dtype()), sparse.rows(), sparse.columns(), name_of(dtype), tw::join(shape, ", "));
  check_operand(op, name, t, dtype, device);
  kernels::check_extents(op, name, t);
}

void check_result(const char* op, const char* name, const Tensor& d, std::int64_t bias, const SparseMatrix& a, const char* b_name,
                  const Tensor& b, const SparseGemmOptions& options) {
  check_output(op, name, d);
  check_bias(op, options.bias, bias, d.dtype(), d.device());
  check_disjoint(op, {name, &d},
                 {{b_name, &b},
                  {"values", &a.values},
                  {"metadata", &a.metadata},
                  {"bias", options.bias},
                  {"a_scale", options.a_scale},
                  {"b_scale", options.b_scale}});
  if (!options.residual) return;
  const Tensor& residual = *options.residual;
  require(residual.dtype() == d.dtype() && residual.shape() == d.shape(), "{}: residual is {}; it must be {}[{}] as {} is", op, residual,
          name_of(d.dtype()), tw::join(d.shape(), ", "), name);
  check_operand(op, "residual", residual, d.dtype(), d.device());
  check_in_place(op, {name, &d}, {"residual", &residual});
}

void run(const Call& call) {
  if (call.d.numel() == 0) return;
  call.stream.device().is_cuda() ? kernels::sparse_gemm::run_on_gpu(call) : kernels::sparse_gemm::run_on_cpu(call);
}

/// A product without a term: gemm's, of a dense matrix without columns.
GemmOptions empty_product(const SparseGemmOptions& o) {
  return {.alpha = o.alpha, .beta = o.beta, .bias = o.bias, .activation = o.activation, .residual = o.residual, .stream = o.stream};
}

}  // namespace

bool kernels::sparse_gemm::is_sparse_dtype(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::fp8_e4m3 || dtype == DType::i8;
}

Shape SparseMatrix::metadata_shape(std::int64_t rows, std::int64_t columns, DType dtype) {
  require(kernels::sparse_gemm::is_sparse_dtype(dtype), "metadata_shape: dtype is {}; f16, bf16, fp8_e4m3 and i8 are supported",
          name_of(dtype));
  require(rows >= 0 && columns >= 0 && columns % 4 == 0, "metadata_shape: the shape is [{}, {}]; columns must be a multiple of 4", rows,
          columns);
  const std::int64_t block = 256 / static_cast<std::int64_t>(size_of(dtype));
  return {(columns + block - 1) / block, (rows + 15) / 16 * (block / 64), 128};
}

SparseMatrix SparseMatrix::allocate(std::int64_t rows, std::int64_t columns, DType dtype, const Stream& stream) {
  Shape metadata = metadata_shape(rows, columns, dtype);
  return {Tensor::empty({rows, columns / 2}, dtype, stream), Tensor::empty(std::move(metadata), DType::u8, stream)};
}

void kernels::sparse_gemm::check_sparse(const char* op, const SparseMatrix& sparse, Device device) {
  const Tensor& values = sparse.values;
  require(is_sparse_dtype(values.dtype()) && values.rank() == 2 && values.shape(1) % 2 == 0,
          "{}: values are {}; they must be [M, K / 2] of f16, bf16, fp8_e4m3 or i8, with K a multiple of 4", op, values);
  check_operand(op, "values", values, values.dtype(), device);
  require(values.stride(1) == 1 || values.shape(1) <= 1, "{}: values are {} with columns {} elements apart; they must be adjacent", op,
          values, values.stride(1));
  kernels::check_extents(op, "values", values);
  require(sparse.columns() <= kernels::kLargestExtent, "{}: values are {}; K is limited to {}", op, values, kernels::kLargestExtent);
  const Shape shape = SparseMatrix::metadata_shape(sparse.rows(), sparse.columns(), values.dtype());
  require(sparse.metadata.dtype() == DType::u8 && sparse.metadata.shape() == shape && sparse.metadata.is_contiguous(),
          "{}: metadata are {}; for values {} they must be u8[{}], contiguous", op, sparse.metadata, values, tw::join(shape, ", "));
  check_operand(op, "metadata", sparse.metadata, DType::u8, device);
}

void sparse_gemm(const SparseMatrix& a, const Tensor& b, const Tensor& d, const SparseGemmOptions& options) {
  constexpr const char* op = "sparse_gemm";
  const Device device = d.device();
  kernels::sparse_gemm::check_sparse(op, a, device);
  require(b.rank() == 2, "{}: b is {}; it must be [{}, N]", op, b, a.columns());
  const std::int64_t n = b.shape(1);
  check_dense(op, "b", b, a.dtype(), {a.columns(), n}, a, device);
  check_dense(op, "d", d, kernels::gemm::result_of(a.dtype()), {a.rows(), n}, a, device);
  check_result(op, "d", d, n, a, "b", b, options);
  check_options(op, a.dtype(), options, device);
  const Stream stream = checked_stream(op, options.stream, device);
  if (a.columns() == 0) return gemm(Tensor::empty({a.rows(), 0}, a.dtype(), stream), b, d, empty_product(options));
  run({a, b.transpose(0, 1), d, options.residual ? *options.residual : Tensor(), false, options, stream});
}

void sparse_linear(const Tensor& x, const SparseMatrix& weight, const Tensor& y, const SparseGemmOptions& options) {
  constexpr const char* op = "sparse_linear";
  const Device device = y.device();
  kernels::sparse_gemm::check_sparse(op, weight, device);
  require(x.rank() == 2, "{}: x is {}; it must be [M, {}]", op, x, weight.columns());
  const std::int64_t m = x.shape(0);
  check_dense(op, "x", x, weight.dtype(), {m, weight.columns()}, weight, device);
  check_dense(op, "y", y, kernels::gemm::result_of(weight.dtype()), {m, weight.rows()}, weight, device);
  check_result(op, "y", y, weight.rows(), weight, "x", x, options);
  check_options(op, weight.dtype(), options, device);
  const Stream stream = checked_stream(op, options.stream, device);
  if (weight.columns() == 0) return gemm(x, Tensor::empty({0, weight.rows()}, x.dtype(), stream), y, empty_product(options));
  run({weight, x, y.transpose(0, 1), options.residual ? options.residual->transpose(0, 1) : Tensor(), true, options, stream});
}

}  // namespace tw

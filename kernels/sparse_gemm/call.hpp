#pragma once

#include "kernels/gemm/call.hpp"
#include "kernels/gemm/kernels.hpp"
#include "tilewave/sparse_gemm.hpp"

namespace tw::kernels::sparse_gemm {

/// A checked call of sparse_gemm() or sparse_linear(), whose result has elements and whose K is not 0: D[M, N] = A B.
struct Call {
  SparseMatrix a;  ///< [M, K]
  Tensor b;        ///< [N, K]
  Tensor d;        ///< [M, N]
  Tensor residual;
  bool row_bias;  ///< the bias has a value for each row of D, not for each column: D is a transposed view
  const SparseGemmOptions& options;
  Stream stream;

  DType dtype() const { return a.dtype(); }
  int m() const { return static_cast<int>(d.shape(0)); }
  int n() const { return static_cast<int>(d.shape(1)); }
  int k() const { return static_cast<int>(b.shape(1)); }
  bool addends() const { return options.beta != 0 || options.residual != nullptr; }
  /// Whether the kernel stores D transposed, because its columns are dense. It then takes a bias for each row.
  bool stores_transposed() const {
    if (dtype() == DType::i8 || (options.bias != nullptr && !row_bias)) return false;
    return row_bias || (d.stride(0) == 1 && d.stride(1) != 1);
  }
};

void run_on_cpu(const Call& call);
void run_on_gpu(const Call& call);

/// Throws InvalidArgument unless the matrix's tensors agree with each other and are on the device.
void check_sparse(const char* op, const SparseMatrix& sparse, Device device);
bool is_sparse_dtype(DType dtype);

}  // namespace tw::kernels::sparse_gemm

#pragma once

#include <cstdint>

#include "microkernels/quantized_library.hpp"
#include "tilewave/quantized.hpp"

namespace tw::kernels::dequant_gemm {

/// A checked call of dequant_gemm(), whose result has elements.
struct Call {
  const Tensor& x;  ///< [M, K], of i8 if there are x_scales
  const QuantizedMatrix& weight;
  const Tensor& y;  ///< [M, N], or [M, N / 2] with swiglu
  const DequantGemmOptions& options;
  Stream stream;

  std::int64_t m() const { return x.shape(0); }
  /// Rows of W that a row of x is multiplied with: all, or those of its group.
  std::int64_t n() const { return y.shape(1) * (pairs() ? 2 : 1); }
  std::int64_t k() const { return x.shape(1); }
  /// Whether pairs of rows of W, gate and up, become one column of y.
  bool pairs() const { return options.activation == Activation::swiglu; }
  /// Whether rows of x are 8-bit integers with a scale each.
  bool has_integers() const { return options.x_scales != nullptr; }
};

/// to[i] = from[i] for n elements of f32, f16 or bf16.
void widen(float* to, const void* from, DType dtype, std::int64_t n);

/// The rows of a weight on the CPU, for the library of microkernels.
class QuantizedRows {
 public:
  explicit QuantizedRows(const QuantizedMatrix& w);
  cpu::QuantizedRow operator[](std::int64_t n) const {
    cpu::QuantizedRow row = first_;
    row.values += n * bytes_;
    if (row_scales_ != nullptr) row.scale = row_scales_[n];
    if (row.scales != nullptr) row.scales += n * groups_;
    if (row.f32_scales != nullptr) row.f32_scales += n * groups_;
    if (row.e8m0_scales != nullptr) row.e8m0_scales += n * groups_;
    if (row.zeros != nullptr) row.zeros += n * groups_;
    return row;
  }

 private:
  cpu::QuantizedRow first_{};
  const float* row_scales_ = nullptr;
  std::int64_t bytes_, groups_ = 0;  ///< between rows
};
void run_on_cpu(const Call& call);
void run_on_gpu(const Call& call);
/// run() for a call with x_scales, whose product with x is given in y's dtype.
void run_widened(const Call& call, const Tensor& x, void (*run)(const Call&));

/// Whether the CPU multiplies many rows of x as integers, each rounded with one scale: W is int8, and the processor has AVX512-VNNI or AMX.
bool multiplies_rounded(const Call& call);
void run_rounded(const Call& call);  ///< rounded.tile.hpp

/// Whether a GPU has a kernel for so few rows of x. Copies of W need rows of whole 16 bytes.
bool is_skinny(const Call& call);
void run_skinny(const Call& call);  ///< skinny.tile.hpp

/// Whether a GPU has a kernel that decodes W for any number of rows of x. Copies of W and x need rows of whole 16 bytes.
bool is_wide(const Call& call);
void run_wide(const Call& call);  ///< dequant_gemm.tile.hpp

/// Whether a GPU has a kernel that multiplies x of i8 as it is: many rows, groups of 128. Copies of W and x need rows of whole 16 bytes.
bool is_w4a8(const Call& call);
void run_w4a8(const Call& call);  ///< w4a8.tile.hpp

void dequantize_on_cpu(const QuantizedMatrix& weight, const Tensor& out);
void dequantize_on_gpu(const QuantizedMatrix& weight, const Tensor& out, const Stream& stream);
/// The kernel of dequantize_on_gpu(), run by the CPU target: for tests.
void dequantize_with_tiles(const QuantizedMatrix& weight, const Tensor& out);

}  // namespace tw::kernels::dequant_gemm

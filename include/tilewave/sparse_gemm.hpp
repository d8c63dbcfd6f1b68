#pragma once

#include <optional>

#include "tilewave/gemm.hpp"
#include "tilewave/tensor.hpp"

// Products with a 2:4 sparse matrix: of every four neighbours in a row, columns 4 g to 4 g + 3, at most two are not zero. Tensor cores take
// half the time of a dense product, and the matrix takes 9/16 of the memory in 16 bits, 5/8 in 8 bits.
//
//   tw::prune_2_4(w, w);                                     // keeps the two largest of four, in place
//   const tw::SparseMatrix s = tw::SparseMatrix::allocate(n, k, tw::DType::bf16, stream);
//   tw::compress_2_4(w, s);
//   tw::sparse_linear(x, s, y, {.bias = &bias});             // y = x w^T + bias
//
// K, the number of columns, is a multiple of 4. Elements are f16, bf16, fp8_e4m3 or i8.

namespace tw {

/// A 2:4 sparse matrix [M, K].
struct SparseMatrix {
  /// [M, K / 2], row-major: the two kept elements of each group of four, in order. Rows may have any stride.
  Tensor values;
  /// u8, contiguous, of metadata_shape(): where the kept elements were. The order is that of the tensor cores' registers, so that a warp
  /// loads 128 neighbouring bytes; include/tilewave/tile/sparse.tile.hpp describes it, and export_metadata_2_4() converts it.
  Tensor metadata;

  std::int64_t rows() const { return values.shape(0); }
  std::int64_t columns() const { return 2 * values.shape(1); }
  DType dtype() const { return values.dtype(); }

  /// [ceil(K / block), ceil(M / 16) * block / 64, 128] bytes, where a block is 128 columns of 16-bit or 256 columns of 8-bit elements.
  /// Throws InvalidArgument unless K is a multiple of 4 and the dtype is supported.
  static Shape metadata_shape(std::int64_t rows, std::int64_t columns, DType dtype);
  /// Memory for a matrix, with undefined content.
  static SparseMatrix allocate(std::int64_t rows, std::int64_t columns, DType dtype,
                               const Stream& stream = Stream::standard(Device::cpu()));
};

/// y = x, with zeros instead of all but the two elements of largest magnitude in each group of four. Of equal magnitudes the first are
/// kept; NaN counts as the largest. x and y: [M, K] of one dtype and device, any strides; y may be x itself.
///
/// This and all functions below enqueue on the stream and return (on the CPU: done when they return). They throw InvalidArgument for
/// shapes, dtypes, strides or devices that do not fit, with nothing written; CompileError, DeviceError.
void prune_2_4(const Tensor& x, const Tensor& y, const std::optional<Stream>& stream = {});

struct Compress24Options {
  /// i32 [1], on a GPU: set to 1 if a group has more than two nonzeros, and otherwise left as it is, so that one flag serves many calls.
  /// Without it a GPU keeps the two of largest magnitude, as prune_2_4() does.
  const Tensor* refused = nullptr;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};
/// `dense`, [M, K] with at most two nonzeros in each group of four, as a SparseMatrix of the same shape, dtype and device. Any strides. A
/// group with fewer nonzeros also keeps zeros, the first ones. On the CPU it throws InvalidArgument, which names the row and the column,
/// for a group with three or four nonzeros; on a GPU the host cannot wait for that: see `refused`.
void compress_2_4(const Tensor& dense, const SparseMatrix& sparse, const Compress24Options& options = {});

/// dense = the matrix with its zeros, [M, K] of the same dtype and device; any strides.
void decompress_2_4(const SparseMatrix& sparse, const Tensor& dense, const std::optional<Stream>& stream = {});

struct SparseGemmOptions {
  float alpha = 1;
  float beta = 0;                            ///< if not 0, D's old value is read as C
  const Tensor* bias = nullptr;              ///< [N], of D's dtype and contiguous; added to every row
  Activation activation = Activation::none;  ///< all but swiglu
  const Tensor* residual = nullptr;          ///< D's shape and dtype, any strides; added after the activation. May be D itself
  /// fp8: f32 [1] each, factors of both operands, both or none.
  const Tensor* a_scale = nullptr;
  const Tensor* b_scale = nullptr;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
  int config = -1;                    ///< index of a configuration, for tuning; -1: the heuristic's choice
};

/// D = activation(alpha A B + beta D + bias) + residual, accumulated in f32 (i8: in i32) and rounded once.
///
/// `a`: [M, K]; `b`: [K, N] of A's dtype, any strides; `d`: [M, N], any strides. f16 and bf16 give the same dtype, fp8_e4m3 gives bf16, i8
/// gives i32 and takes no alpha, beta, bias, activation or residual. Sizes may be 0.
///
/// Fast on a GPU: B stored [N, K], or [K, N] in 16 bits, and D row-major, or without a bias also column-major; with 16-byte aligned bases
/// and leading strides. Everything else runs a slower variant. fp8 needs compute capability 8.9 or later.
///
/// Elements of A that are not kept do not exist: what they would have met in B does not matter, even infinity or NaN.
///
/// The metadata of a SparseMatrix that did not come from compress_2_4() must name two ascending columns of each group. The CPU throws Error
/// if they do not; on a GPU the result is then undefined.
void sparse_gemm(const SparseMatrix& a, const Tensor& b, const Tensor& d, const SparseGemmOptions& options = {});

/// y = activation(alpha x W^T + beta y + bias) + residual: a linear layer with a sparse weight. It is computed as W x^T, since tensor cores
/// only take a sparse left operand, and stored transposed.
///
/// `x`: [M, K]; `weight`: [N, K]; `y`: [M, N]; `bias`: [N]. Dtypes and speed as in sparse_gemm(), with b_scale the factor of x and a_scale
/// that of the weight; x and y row-major are fast.
void sparse_linear(const Tensor& x, const SparseMatrix& weight, const Tensor& y, const SparseGemmOptions& options = {});

/// Orders in which other libraries store metadata. All have a row's groups in order of their columns in some unit, the first in the lowest
/// bits, and the same four bits for a group. As tensors they are u8 [M, K / 8], contiguous.
enum class MetadataLayout {
  /// Byte c of row r has groups 2 c and 2 c + 1 of that row.
  rows,
  /// 16-bit units ("e16") of 16 columns, for compute capability 8.x; 16-bit elements, M and K multiples of 32. With row r moved to r' = 32
  /// floor(r / 32) + 4 (r mod 8) + floor((r mod 32) / 8), the upper right and the lower left of each 2 x 2 units are exchanged; unit (r',
  /// c)
  /// is then at 2 M floor(c / 2) + 2 r' + c mod 2.
  e16,
  /// 8-bit units ("e8") of 8 columns, for compute capability 9.0; 16-bit elements, M a multiple of 64, K of block_k. Atoms of 64 rows and
  /// block_k columns, all atoms of a range of columns before those of the next. In an atom, with n = block_k / 32, row i0 + 8 i1 + 16 i2
  /// (i0 < 8, i1 < 2) and unit k0 + 2 k1 + 4 k2 (k0 < 2, k1 < 2) are at k0 + 2 i1 + 4 k2 + 4 n i0 + 32 n k1 + 64 n i2.
  e8
};
/// Converts metadata from and to `layout`; values have the same order everywhere. On the CPU. `block_k` counts for e8: 32, 64 or 128.
/// K is a multiple of 8.
void export_metadata_2_4(const SparseMatrix& sparse, const Tensor& to, MetadataLayout layout, int block_k = 128);
/// The same into `sparse.metadata`. Throws InvalidArgument, which names the row and the column, for bits that name no two ascending
/// columns.
void import_metadata_2_4(const Tensor& from, const SparseMatrix& sparse, MetadataLayout layout, int block_k = 128);

}  // namespace tw

#pragma once

#include <optional>

#include "tilewave/gemm.hpp"
#include "tilewave/tensor.hpp"

namespace tw {

/// Masks are of u8 or bool, any strides, on D's device; an element that is not 0 keeps its block. A null mask keeps all blocks. Blocks are
/// counted from the first row and column, and the last ones may be smaller.
struct BlockSparseGemmOptions {
  int block = 128;                       ///< rows and columns of a block: 64, 128 or 256
  const Tensor* a_mask = nullptr;        ///< [ceil(M / block), ceil(K / block)]: the blocks of A that are not 0
  const Tensor* b_mask = nullptr;        ///< [ceil(K / block), ceil(N / block)]: the blocks of B that are not 0
  const Tensor* d_mask = nullptr;        ///< [ceil(M / block), ceil(N / block)]: the blocks of D that are computed; the others become 0
  const Tensor* product_mask = nullptr;  ///< [ceil(M / block), ceil(N / block), ceil(K / block)]: the products of blocks that are summed
  float alpha = 1;
  const Tensor* bias = nullptr;              ///< [N], of D's dtype and contiguous; added to every row of the blocks that are computed
  Activation activation = Activation::none;  ///< all but swiglu
  std::optional<Stream> stream = {};         ///< default: the device's standard stream
  int config = -1;                           ///< index of a configuration, for tuning; -1: the heuristic's choice
};

/// D = activation(alpha A B + bias) without the blocks that masks hide, accumulated in f32 and rounded once. Hidden blocks of A and B are
/// not read: they may hold anything.
///
/// `a`: [M, K]; `b`: [K, N]; `d`: [M, N]; f16 or bf16, any strides. Sizes may be 0. The masks are in the device's memory and the host does
/// not read them, so a captured graph follows the masks of each replay. Two launches on a GPU: the lists of blocks, and the products.
///
/// Fast on a GPU: A stored [M, K] and B stored [N, K] or [K, N], with 16-byte aligned bases and leading strides. Everything else runs a
/// slower variant.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void block_sparse_gemm(const Tensor& a, const Tensor& b, const Tensor& d, const BlockSparseGemmOptions& options);

}  // namespace tw

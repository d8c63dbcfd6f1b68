#pragma once

#include <optional>

#include "tilewave/gemm.hpp"
#include "tilewave/tensor.hpp"

// Products of groups of rows, each with a matrix of its own: the experts of a mixture. Where a group begins is in device memory, so nothing
// waits for the host, and a captured graph follows the offsets of each replay.

namespace tw {

struct GroupedGemmOptions {
  const Tensor* bias = nullptr;              ///< [groups, N], of D's dtype and contiguous; row g is added to every row of group g
  Activation activation = Activation::none;  ///< with swiglu, D has N / 2 columns
  /// Of fp8 operands: f32, one for each 128 of K, a_scale [M, ceil(K / 128)] and b_scale [groups, ceil(K / 128), ceil(N / 128)], of any
  /// strides. Each sum of 128 products is scaled and then accumulated in f32. Fastest with the rows of a_scale adjacent.
  const Tensor* a_scale = nullptr;
  const Tensor* b_scale = nullptr;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
  int config = -1;                    ///< index of a configuration, for tuning; -1: the heuristic's choice
};

/// D(r, :) = activation(A(r, :) B[g] + bias[g]) for the rows r of each group g, offsets(g) <= r < offsets(g + 1), accumulated in f32 and
/// rounded once. Rows of D before the first group and after the last one are left as they are.
///
/// `a`: [M, K]; `b`: [groups, K, N]; `offsets`: i32 [groups + 1], contiguous; `d`: [M, N], or [M, N / 2] with swiglu. All on one device, of
/// f16 or bf16, on the CPU also f32; any strides: with weights stored [groups, N, K] pass w.transpose(1, 2). Sizes may be 0. Operands of
/// fp8_e4m3 with scales give a bf16 D, without bias and activation. It is also the gradient of A: with D's gradient for A, and
/// b.transpose(1, 2) for B.
///
/// Offsets must not decrease; each is clamped to 0 ... M. A group whose offsets decrease is empty. If later groups then overlap earlier
/// ones, either may have computed the rows that they share. The host never reads offsets that are on a GPU.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Two launches on a GPU: the list of tiles, and the products.
/// Throws InvalidArgument for shapes, dtypes, strides or devices that do not fit, with nothing written; CompileError, DeviceError.
void grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& offsets, const Tensor& d, const GroupedGemmOptions& options = {});

struct KGroupedGemmOptions {
  bool accumulate = false;            ///< D += instead of D =
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
  int config = -1;                    ///< index of a configuration, for tuning; -1: the heuristic's choice
};

/// D[g] = the sum over the k of group g, offsets(g) <= k < offsets(g + 1), of A(:, k) B(k, :), accumulated in f32 and rounded once: the
/// groups divide the summed dimension. An empty group has D[g] = 0. It is the gradient of B in grouped_gemm(), with a.transpose(0, 1) for A
/// and D's gradient for B.
///
/// `a`: [M, K]; `b`: [K, N]; `offsets`: i32 [groups + 1], contiguous, as in grouped_gemm(); `d`: [groups, M, N] of the operands' dtype or
/// f32. f16 or bf16, on the CPU also f32; any strides, fast on a GPU if M and N are the dense dimensions of A and B. Elements of A and B
/// outside the groups are not used, whatever they are.
///
/// Enqueues on the stream and returns, in one launch on a GPU. Throws as grouped_gemm() does.
void k_grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& offsets, const Tensor& d, const KGroupedGemmOptions& options = {});

}  // namespace tw

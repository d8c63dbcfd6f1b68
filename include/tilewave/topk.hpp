#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct ArgmaxOptions {
  const Tensor* values = nullptr;     ///< output, of indices' shape and x's dtype: the largest elements
  const Tensor* workspace = nullptr;  ///< i64, contiguous, at least argmax_workspace(x) elements; default: allocated by the call
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// indices[..] = the column of the largest element of x[.., :]: of equal ones the first. As in PyTorch NaN is larger than all numbers, and
/// -0 equals +0.
///
/// `x`: [.., N] with 1 to 4 dimensions, f32, f16 or bf16, N from 1 to 2^30. `indices`: x's shape without N, i32 or i64. Any strides; on a
/// GPU a contiguous last dimension is fast.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Deterministic. A stream that is being captured into a graph needs
/// a workspace, where argmax_workspace() is not 0. Throws InvalidArgument for shapes, dtypes, strides or devices that do not fit, with
/// nothing written; CompileError, DeviceError.
void argmax(const Tensor& x, const Tensor& indices, const ArgmaxOptions& options = {});

/// Elements of i64 that argmax(x) needs as a workspace; 0 when it needs none.
std::int64_t argmax_workspace(const Tensor& x);

struct TopkOptions {
  bool largest = true;                ///< false: the k smallest, smallest first; NaN, larger than all numbers, comes last
  bool sorted = true;                 ///< false: the same k elements, in the order of their columns
  const Tensor* starts = nullptr;     ///< i32, x's shape without N: only x[.., start:end] counts; default 0
  const Tensor* ends = nullptr;       ///< likewise; default N. Both are clipped to 0 and N.
  const Tensor* workspace = nullptr;  ///< i64, contiguous, at least topk_workspace(x, k) elements; default: allocated by the call
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The k largest elements of each row x[.., :] and their columns: values descending, equal ones in the order of their columns. Of equal
/// elements of which not all are among the k, those with the lowest columns are taken. NaN and -0 as in argmax. Where a row has less than k
/// elements, the remaining indices are -1 and values -infinity (+infinity when !largest).
///
/// `x`: [.., N] with 1 to 4 dimensions, f32, f16 or bf16, N up to 2^30. k: 1 to 2048. `values`: x's shape with k for N, of x's dtype;
/// `indices`: the same shape, i32 or i64. Any strides; on a GPU a contiguous last dimension is fast.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Deterministic. A stream that is being captured into a graph needs
/// a workspace, where topk_workspace() is not 0. Throws InvalidArgument for shapes, dtypes, strides or devices that do not fit, with
/// nothing written; CompileError, DeviceError.
void topk(const Tensor& x, int k, const Tensor& values, const Tensor& indices, const TopkOptions& options = {});

/// Elements of i64 that topk(x, k) needs as a workspace; 0 when it needs none.
std::int64_t topk_workspace(const Tensor& x, int k);

}  // namespace tw

#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct ArgmaxOptions {
  const Tensor* values = nullptr;     ///< output, indices' shape and x's dtype: the largest elements
  const Tensor* workspace = nullptr;  ///< i64, contiguous, at least argmax_workspace(x) elements; default: allocated by the call
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// indices[..] = the column of the largest element of x[.., :], the first of equal ones. As in PyTorch NaN is larger than all numbers, and
/// -0 equals +0.
///
/// `x`: [.., N] with 1 to 4 dimensions, f32, f16 or bf16, N from 1 to 2^30. `indices`: x's shape without N, i32 or i64. Any strides; on a
/// GPU a contiguous last dimension is fast.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Deterministic. Pass a workspace on a stream that is being
/// captured into a graph if argmax_workspace() is not 0. Throws InvalidArgument for shapes, dtypes, strides or devices that do not fit,
/// with nothing written; CompileError, DeviceError.
void argmax(const Tensor& x, const Tensor& indices, const ArgmaxOptions& options = {});

/// The number of i64 elements that argmax(x) needs as a workspace; 0 if it needs none.
std::int64_t argmax_workspace(const Tensor& x);

struct TopkOptions {
  bool largest = true;                ///< false: the k smallest, smallest first; NaN, larger than all numbers, comes last
  bool sorted = true;                 ///< false: the same k elements, in the order of their columns
  const Tensor* starts = nullptr;     ///< i32, x's shape without N: only x[.., start:end] is searched; default 0
  const Tensor* ends = nullptr;       ///< the same; default N. Both are clipped to 0 and N
  const Tensor* workspace = nullptr;  ///< i64, contiguous, at least topk_workspace(x, k) elements; default: allocated by the call
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The k largest elements of each row x[.., :] and their columns. Values are descending; equal ones are in the order of their columns, and
/// the lowest columns are taken if not all of them fit. NaN and -0 as in argmax. If a row has fewer than k elements, the remaining indices
/// are -1 and the values -infinity (+infinity if !largest).
///
/// `x`: [.., N] with 1 to 4 dimensions, f32, f16 or bf16, N up to 2^30. k: 1 to 2048. `values`: x's shape with k for N, of x's dtype;
/// `indices`: the same shape, i32 or i64. Any strides; on a GPU a contiguous last dimension is fast.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Deterministic. Pass a workspace on a stream that is being
/// captured into a graph if topk_workspace() is not 0. Throws InvalidArgument for shapes, dtypes, strides or devices that do not fit, with
/// nothing written; CompileError, DeviceError.
void topk(const Tensor& x, int k, const Tensor& values, const Tensor& indices, const TopkOptions& options = {});

/// The number of i64 elements that topk(x, k) needs as a workspace; 0 if it needs none.
std::int64_t topk_workspace(const Tensor& x, int k);

}  // namespace tw

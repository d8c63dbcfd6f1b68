#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct EmbeddingOptions {
  float scale = 1;                    ///< of every element
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// y[t, :] = scale table[ids[t], :]: gathers the rows of a table.
///
/// `table`: [vocabulary, dim] of f32, f16, bf16, fp8_e4m3 or fp8_e5m2, any strides. `ids`: i32 or i64, of any shape, contiguous. `y`: [t,
/// dim] for t ids, or ids' shape followed by dim, which must be contiguous unless ids have one dimension. y has table's dtype or f32; from
/// fp8 also f16 or bf16. Computed in f32 and rounded once. On a GPU rows of contiguous, 16-byte aligned elements are fast. dim is limited
/// to 2^30 and t to 2^31 - 1.
///
/// Ids out of range: on the CPU InvalidArgument that names the first, with nothing written. On a GPU they are clamped to the table, because
/// checking them would have to wait for the device.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void embedding(const Tensor& table, const Tensor& ids, const Tensor& y, const EmbeddingOptions& options = {});

}  // namespace tw

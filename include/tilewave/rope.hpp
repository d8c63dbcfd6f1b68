#pragma once

#include <cstdint>
#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

struct RopeTableOptions {
  double theta = 10000;               ///< base of the frequencies: positive and finite
  std::int64_t offset = 0;            ///< position of the first row
  const Tensor* positions = nullptr;  ///< i32 [rows]: the position of every row, instead of offset, offset + 1, ...
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// cos[n, k] and sin[n, k] of the angle position(n) * theta^(-k / (rotary_dim / 2)).
///
/// `cos`, `sin`: [rows, rotary_dim / 2] of one dtype, f32, f16 or bf16, any strides. Angles are computed and reduced modulo 2 pi in f64:
/// f32 results are within 3e-7 of the exact ones up to position 10^6, within 1e-6 at any i32. Positions may be negative.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument, with nothing written; CompileError,
/// DeviceError.
void rope_table(const Tensor& cos, const Tensor& sin, const RopeTableOptions& options = {});

/// Which two of a head's rotary dimensions are rotated together.
enum class RopePairing {
  half_split,  ///< k and k + rotary_dim / 2 ("rotate_half": Llama, GLM-ASR)
  interleaved  ///< 2 k and 2 k + 1 (GPT-J, the original paper)
};

struct RopeOptions {
  RopePairing pairing = RopePairing::half_split;
  std::int64_t offset = 0;            ///< position of the first row of every sequence
  const Tensor* offsets = nullptr;    ///< i32 [batch]: position of the first row of each sequence, instead of `offset`
  const Tensor* positions = nullptr;  ///< i32 [batch, seqlen] or [seqlen]: position of each row, instead of `offset`
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// Rotary position embedding (Su et al., arXiv 2104.09864): y[2k'] = x[2k'] cos - x[2k'+1] sin, y[2k'+1] = x[2k'+1] cos + x[2k'] sin for
/// every pair, with row position(b, s) of the table; in f32, rounded once. Dimensions from rotary_dim on pass through.
///
/// `x`, `y`: [batch, seqlen, heads, dim] or [seqlen, heads, dim], one dtype (f32, f16, bf16), any strides; y may be x. `cos`, `sin`:
/// [positions, rotary_dim / 2] of x's dtype or f32, any strides; rotary_dim is 2 to dim. A table that is too short for `offset` is refused.
/// Offsets and positions in tensors are clamped to the table.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& y, const RopeOptions& options = {});

}  // namespace tw

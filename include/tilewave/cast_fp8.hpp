#pragma once

#include <cstdint>
#include <optional>

#include "tilewave/tensor.hpp"

namespace tw {

enum class Fp8Scales {
  exact,         ///< amax / 448
  powers_of_two  ///< amax / 448 rounded up to a power of two, as ue8m0 scales need
};

struct CastFp8Options {
  Fp8Scales kind = Fp8Scales::exact;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

// Casts to fp8_e4m3 with a scale for each group of elements: y = e4m3(x / scale), x ~ y * scale.
//
//   amax = max(largest |x| of the group, 1e-4);  scale = amax / 448, in f32;  y = x / scale, rounded to f32, then to the nearest e4m3
//
// A group with a NaN or an infinity has scale NaN, and all its elements are NaN. `x`: f32, f16 or bf16; `y`: fp8_e4m3; `scales`: f32. Any
// strides.
//
// All enqueue on the stream and return (on the CPU: done when they return). They throw InvalidArgument for shapes, dtypes, strides or
// devices that do not fit, with nothing written; CompileError, DeviceError.

/// Groups of 128 neighbours in a row. `x`, `y`: [.., N], 1 to 4 dimensions; `scales`: [.., ceil(N / 128)]. The last group of a row may be
/// shorter. For products that load scales by TMA, allocate them with column_major_scales().
void cast_fp8(const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8Options& options = {});

/// The same of x = silu(gate) up, which is not rounded before. `gate`, `up`: of y's shape and one dtype.
void cast_fp8_swiglu(const Tensor& gate, const Tensor& up, const Tensor& y, const Tensor& scales, const CastFp8Options& options = {});

/// Blocks of 128 x 128, for weights. `x`, `y`: [N, K]; `scales`: [ceil(N / 128), ceil(K / 128)]. Blocks at the edges may be smaller. Needs
/// memory for N ceil(K / 128) numbers while it runs.
void cast_fp8_blocks(const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8Options& options = {});

/// Groups of rows, padded to one height. Row r < sizes[g] of group g is cast as in cast_fp8(); the groups' rows are concatenated in `x`.
///
/// `x`: [rows, N]; `sizes`: i32 [G], on the device; `y`: [G, M, N]; `scales`: [G, M, ceil(N / 128)]. Rows from sizes[g] on are padding:
/// elements 0, scale 1e-4 / 448 (or the next power of two). Sizes below 0 count as 0. Rows beyond M or beyond x's last are skipped.
void cast_fp8_grouped(const Tensor& x, const Tensor& sizes, const Tensor& y, const Tensor& scales, const CastFp8Options& options = {});

/// Options of cast_fp8_heads() and head_scales().
struct CastFp8HeadsOptions {
  /// Rotates x first: it becomes (x * signs) H / sqrt(head_dim) with hadamard()'s H. A rotation of q and k by the same signs leaves their
  /// products unchanged and spreads outliers over the row, so that e4m3 rounds the other elements less. head_dim is then a power of two.
  bool rotate = false;
  const Tensor* signs = nullptr;      ///< f32 [head_dim]: random signs; default: ones
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// Casts q, k or v for attention() in e4m3: y = e4m3(x / scale), with a scale for each sequence and key head. Quotients beyond 448 become
/// 448.
///
/// `x`: [batch, seqlen, heads, head_dim], head_dim up to 2048; `y`: of its shape; `scales`: f32 [batch, kv_heads], positive, an input here:
/// attention()'s descale. heads is a multiple of kv_heads, and head h has the scale h / (heads / kv_heads).
void cast_fp8_heads(const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8HeadsOptions& options = {});

/// Scales for cast_fp8_heads(): scales = max(amax, 1e-4) / 448, where amax is the largest |x|, after the rotation, of a sequence in all
/// heads that share the scale. NaN if one of them is infinite or NaN.
void head_scales(const Tensor& x, const Tensor& scales, const CastFp8HeadsOptions& options = {});

/// A new f32 tensor [rows, groups], or [batch, rows, groups] if `batch` > 0. Its columns are contiguous and begin at multiples of 16 bytes:
/// the stride along groups is `rows` rounded up to 4. The padding is not initialised.
Tensor column_major_scales(std::int64_t rows, std::int64_t groups, std::int64_t batch = 0,
                           const Stream& stream = Stream::standard(Device::cpu()));

}  // namespace tw

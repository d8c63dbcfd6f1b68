#pragma once

#include <cstdint>
#include <optional>

#include "tilewave/tensor.hpp"

// BitNet b1.58 (Ma et al., arXiv 2402.17764): linear layers whose weights are -1, 0 and 1 times a scale, and whose inputs are rounded to
// 8-bit integers. Products are sums of integers, and therefore exact.

namespace tw {

/// A matrix W [N, K] of -1, 0 and 1 with a scale for each row, the weight of a linear layer (N outputs, K inputs):
///
///   W(n, k) = scales(n) * (code(n, k) - 2)
///
/// where four codes share a byte of values, the first in the lowest bits: code(n, k) is in bits 2 (k % 4) and up of values(n, k / 4), as in
/// the int2 weights of tilewave/quantized.hpp. Code 0, which stands for -2, is multiplied correctly; nothing here makes it.
///
/// Matrices that are stacked by rows (q, k and v of an attention layer) keep their own scales. Both tensors are row-major and on one
/// device. Copies share their memory.
struct TernaryMatrix {
  Tensor values = {};  ///< [N, K / 4] of u8
  Tensor scales = {};  ///< [N] of f32

  std::int64_t rows() const { return values.rank() < 2 ? 0 : values.shape(0); }
  std::int64_t columns() const { return values.rank() < 2 ? 0 : values.shape(1) * 4; }
  Device device() const { return values.device(); }
  bool empty() const { return values.rank() < 2; }
  /// The bytes of both tensors.
  std::int64_t bytes() const;

  /// Uninitialised. Throws InvalidArgument if K is not a multiple of 4.
  static TernaryMatrix allocate(std::int64_t rows, std::int64_t columns, const Stream& stream = Stream::standard(Device::cpu()));
  /// Rows [begin, end): a view.
  TernaryMatrix slice(std::int64_t begin, std::int64_t end) const;
  /// A copy on `device`.
  TernaryMatrix to(Device device) const;
};

struct BitNetOptions {
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// Rounds a weight [N, K] of f32, f16 or bf16 to -1, 0 and 1 times one scale, which every row of `out` gets:
///
///   scale = max(mean |w|, 1e-5),  W(n, k) / scale = clamp(round(w(n, k) / scale), -1, 1)
///
/// in f32, ties to even, on out's device. Devices add the magnitudes in different orders, so that means may differ in the last bits. If an
/// element is not finite, the scale is NaN.
/// Throws InvalidArgument for shapes, dtypes, strides or devices that do not fit; columns of `weight` must be adjacent.
void quantize_ternary(const Tensor& weight, const TernaryMatrix& out, const BitNetOptions& options = {});
/// The same to new memory on the weight's device.
TernaryMatrix quantize_ternary(const Tensor& weight, const BitNetOptions& options = {});

/// Packs [N, K] of i8, each -1, 0 or 1, on the CPU. K must be a multiple of 4. `scales`: [N] of f32, whose memory the result shares. Throws
/// InvalidArgument, which names the first element that is something else.
TernaryMatrix pack_ternary(const Tensor& integers, const Tensor& scales);
/// out(n, k) = code(n, k) - 2. `out`: [N, K] of i8, row-major, on W's device.
void unpack_ternary(const TernaryMatrix& weight, const Tensor& out, const BitNetOptions& options = {});

/// A weight as checkpoints of transformers' BitNet have it: `packed` [N / 4, K] of u8, on the CPU, where bits 2 i and 2 i + 1 of packed(r,
/// k) hold W(i N / 4 + r, k) / scale + 1. `scale` is what -1, 0 and 1 are multiplied with. (Layers of the class BitLinear store its
/// inverse.) Throws InvalidArgument for other shapes and dtypes, if K is not a multiple of 4, and for a code of 3, whose place it names.
TernaryMatrix convert_bitnet(const Tensor& packed, float scale);

/// Rounds each row of x [M, K] of f32, f16 or bf16 to 8-bit integers:
///
///   a = max(largest |x| of the row, 1e-5),  values(m, k) = clamp(round(x(m, k) * (127 / a)), -128, 127),  scales(m) = a / 127
///
/// in f32, ties to even. A row with a NaN or an infinity gets zeros and the scale NaN. `values`: [M, K] of i8; `scales`: [M] of f32.
/// Columns of x and values must be adjacent. One pass over x if K is at most 16384.
void quantize_activations(const Tensor& x, const Tensor& values, const Tensor& scales, const BitNetOptions& options = {});

struct BitLinearOptions {
  bool accumulate = false;            ///< y += instead of y =
  const Tensor* bias = nullptr;       ///< [N], of y's dtype and contiguous; added to every row
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
  bool constant_weight = false;  ///< the weight was complete before the stream's previous launch, as a model's is: it may be read early
};

/// The largest K of a product: its sums of products are below 2^24, which f32 holds exactly.
inline constexpr std::int64_t kLargestTernaryDepth = 65536;

/// y(m, n) = (sum over k of values(m, k) (code(n, k) - 2)) x_scales(m) scales(n) + bias(n), or y += this. `values` [M, K] of i8 and
/// `x_scales` [M] of f32, as quantize_activations() gives them; y [M, N] of f32, f16 or bf16. Columns of values and y must be adjacent. K
/// is at most kLargestTernaryDepth.
///
/// The sum is exact; it is then multiplied in f32, first with x_scales(m), then with scales(n), and y is rounded once. So results do not
/// depend on the device, on M or on the schedule.
///
/// - GPU, M up to 16, rows of W a multiple of 16 bytes (K of 64): reads W once, as it is stored, and allocates nothing.
/// - Hopper GPUs, larger M, rows of W and of `values` a multiple of 16 bytes: W is decoded on its way to the tensor cores. With
/// `accumulate`, the product
///   takes memory of the call.
/// - Otherwise W is unpacked to i8 for gemm(), in memory of the call; on the CPU, panels of it.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void ternary_gemm(const Tensor& values, const Tensor& x_scales, const TernaryMatrix& weight, const Tensor& y,
                  const BitLinearOptions& options = {});

/// A BitNet layer: quantize_activations(x), in memory of the call, then ternary_gemm(). x: [M, K] of f32, f16 or bf16; y: [M, N] of the
/// same dtype.
void bit_linear(const Tensor& x, const TernaryMatrix& weight, const Tensor& y, const BitLinearOptions& options = {});

}  // namespace tw

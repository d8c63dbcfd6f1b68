#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tilewave/gemm.hpp"
#include "tilewave/tensor.hpp"

namespace tw {

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"  // GCC 12 takes the scoped enumerator int8 for a redeclaration of the type tw::int8
#endif
/// How the elements of a weight are stored.
enum class WeightFormat : std::uint8_t {
  plain,  ///< as a tensor of f32, f16 or bf16
  int8,   ///< 8-bit integers, one scale for each row
  fp8,    ///< fp8_e4m3, one scale for each row
  int4    ///< 4-bit integers, one scale, and possibly one zero point, for each group of elements of a row
};
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

/// "plain", "int8", "fp8", "int4".
std::string_view name_of(WeightFormat format);

/// A matrix W [N, K], the weight of a linear layer (N outputs, K inputs), in fewer bits. `format` is not `plain`; a default-constructed one
/// is, and has no elements.
///
///   int8, fp8  W(n, k) = scales(n) * values(n, k)
///   int4       W(n, k) = scales(n, g) * (code(n, k) - zero(n, g)),  g = k / group
///
/// where code(n, k) is from 0 to 15, in the low half of values(n, k / 2) for an even k and in the high half for an odd one (u4x2), and
/// zero(n, g) is zeros(n, g), or 8 if there are no zero points (symmetric).
///
/// All tensors are row-major and on one device. Copies share their memory.
struct QuantizedMatrix {
  WeightFormat format = WeightFormat::plain;
  Tensor values = {};  ///< [N, K] of i8 from -127 to 127 or of fp8_e4m3 without NaN; int4: [N, K / 2] of u8
  Tensor scales = {};  ///< finite; int8, fp8: [N] of f32; int4: [N, K / group] of f16
  Tensor zeros = {};   ///< int4: [N, K / group] of u8 from 0 to 15; without elements if symmetric
  int group = 0;       ///< int4: 32 or 128; K is a multiple of it. Otherwise 0

  std::int64_t rows() const { return values.shape(0); }
  std::int64_t columns() const { return values.rank() < 2 ? 0 : values.shape(1) * (format == WeightFormat::int4 ? 2 : 1); }
  Device device() const { return values.device(); }
  bool empty() const { return format == WeightFormat::plain; }
  /// The bytes of all its tensors.
  std::int64_t bytes() const;

  /// Uninitialised. Throws InvalidArgument for `plain`, and as quantize() does for a K and a group that do not fit.
  struct Layout {
    WeightFormat format = WeightFormat::int8;
    int group = 32;            ///< int4 only: 32 or 128
    bool zero_points = false;  ///< int4 only
    friend bool operator==(const Layout&, const Layout&) = default;
  };
  static QuantizedMatrix allocate(std::int64_t rows, std::int64_t columns, const Layout& layout,
                                  const Stream& stream = Stream::standard(Device::cpu()));
  /// Rows [begin, end): a view.
  QuantizedMatrix slice(std::int64_t begin, std::int64_t end) const;
  /// A copy on `device`.
  QuantizedMatrix to(Device device) const;
};

/// "int8", "fp8", "int4:32", "int4:128:zeros" and so on, or "plain".
std::string text_of(const QuantizedMatrix::Layout& layout);
/// The layout that a text names; "int4" is "int4:32". Throws InvalidArgument for any other text.
QuantizedMatrix::Layout parse_weight_layout(std::string_view text);

/// Rounds `weight` [N, K] of f32, f16 or bf16, on the CPU, to fewer bits. The scale of a row or group follows from its largest magnitude a:
///
///   int8  scale = a / 127,  value = round(w / scale)
///   fp8   scale = a / 448,  value = e4m3(w / scale)
///   int4  scale = f16(a / 7),  code = round(w / scale) + 8, limited to 0 .. 15
///   int4 with zero points  low = min(w, 0), high = max(w, 0) of the group, scale = f16((high - low) / 15), zero = round(-low / scale),
///                          code = round(w / scale) + zero, both limited to 0 .. 15
///
/// in f32, to the nearest, ties to even. Where the scale is 0, values are 0. The error of an element is, for scales that are not subnormal
/// numbers of f32, at most scale / 2 for int8; the larger of |w| / 16 and scale / 1024 for fp8; scale / 2 + 2^-22 for symmetric int4 and
/// 0.51 scale + 2^-21 with zero points. Scales of groups are f16: half a bit for each weight in groups of 32. Values are rounded to the
/// scale as stored, so its own rounding costs next to nothing; f32 would take another half bit, and bf16 would misplace the largest values.
///
/// Throws InvalidArgument if K is not a multiple of the group (a row is not padded, because every kernel reads whole groups), if an
/// element is not finite, or if a group of int4 has a magnitude whose scale exceeds f16's range.
QuantizedMatrix quantize(const Tensor& weight, const QuantizedMatrix::Layout& layout);

/// out = W, rounded to out's dtype once. `out`: [N, K], row-major, f32, f16 or bf16, on W's device.
void dequantize(const QuantizedMatrix& weight, const Tensor& out, const std::optional<Stream>& stream = {});

struct DequantGemmOptions {
  bool accumulate = false;                   ///< y += instead of y =; not allowed with an activation
  const Tensor* bias = nullptr;              ///< [N], of y's dtype and contiguous; added to every row
  Activation activation = Activation::none;  ///< not swiglu
  std::optional<Stream> stream = {};         ///< default: the device's standard stream
  bool constant_weight = false;  ///< the weight was complete before the stream's previous launch, as a model's is: it may be read early
};

/// y = activation(x W^T + bias), or y += x W^T + bias. `x`: [M, K]; `y`: [M, N] of the same dtype, f32, f16 or bf16; columns are adjacent.
///
/// - CPU, M up to 16: reads W once, as it is stored. Sums are in f32. Where the processor has AVX512-VNNI, rows of x are rounded to 8-bit
///   integers for int8 and int4, with a scale for each block of 64 (int8) or 128 (int4) elements: x' = s round(x / s), s = a / 127, a the
///   largest magnitude of the block, so |x' - x| <= a / 254. Products of integers are exact. A row of y does not depend on the other rows.
/// - CPU, larger M: panels of W are rounded to x's dtype for gemm().
/// - GPU, f16 and bf16, M up to 16, rows of W a multiple of 16 bytes: reads W once, as it is stored, and allocates nothing. Codes are exact
///   and sums are in f32.
/// - Hopper GPUs, f16 and bf16, larger M, rows of W and x at multiples of 16 bytes: W is decoded on its way to the tensor cores. Weights in
///   groups are rounded to x's dtype once, those of int8 and fp8 not at all. f32 sums take memory of the call if K is split, for few rows,
///   or `accumulate` is set.
/// - GPU, otherwise: W is rounded to x's dtype, in memory of the call, for gemm().
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void dequant_gemm(const Tensor& x, const QuantizedMatrix& weight, const Tensor& y, const DequantGemmOptions& options = {});

}  // namespace tw

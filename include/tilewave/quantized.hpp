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
  int4,   ///< 4-bit integers, one scale, and possibly one zero point, for each group of elements of a row
  int2,   ///< 2-bit integers, likewise
  nf4,    ///< the 16 quantiles of a normal distribution (QLoRA), one scale for each group of 64
  fp4,    ///< 4-bit floats, e2m1, one scale for each group of 32
  mxfp4   ///< the same with a power of two as scale: OCP Microscaling
};
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

/// "plain", "int8", "fp8", "int4", "int2", "nf4", "fp4", "mxfp4".
std::string_view name_of(WeightFormat format);

/// The number of codes in a byte of a weight's values: 4 of int2, 1 of int8 and fp8, otherwise 2.
constexpr int codes_in_byte(WeightFormat format) {
  return format == WeightFormat::int2 ? 4 : format == WeightFormat::int8 || format == WeightFormat::fp8 ? 1 : 2;
}

/// nf4's numbers, by code (QLoRA, arXiv 2305.14314, appendix E).
inline constexpr float kNormalFloats[16] = {-1.0f,
                                            -0.6961928009986877f,
                                            -0.5250730514526367f,
                                            -0.39491748809814453f,
                                            -0.28444138169288635f,
                                            -0.18477343022823334f,
                                            -0.09105003625154495f,
                                            0.0f,
                                            0.07958029955625534f,
                                            0.16093020141124725f,
                                            0.24611230194568634f,
                                            0.33791524171829224f,
                                            0.44070982933044434f,
                                            0.5626170039176941f,
                                            0.7229568362236023f,
                                            1.0f};

/// A matrix W [N, K], the weight of a linear layer (N outputs, K inputs), in fewer bits. `format` is not `plain`; a default-constructed one
/// is, and has no elements.
///
///   int8, fp8  W(n, k) = scales(n) * values(n, k)
///   int4, int2 W(n, k) = scales(n, g) * (code(n, k) - zero(n, g)),  g = k / group
///   nf4        W(n, k) = scales(n, g) * kNormalFloats[code(n, k)]
///   fp4        W(n, k) = scales(n, g) * e2m1(code(n, k))
///   mxfp4      W(n, k) = 2^(scales(n, g) - 127) * e2m1(code(n, k)); a scale of 255 is NaN
///
/// where two codes of 4 bits or four of 2 bits share a byte of values, the first in the lowest bits: code(n, k) of 4 bits is in the low
/// half of values(n, k / 2) for an even k. zero(n, g) is zeros(n, g), or 8 (int2: 2) if there are no zero points (symmetric).
///
/// All tensors are row-major and on one device. Copies share their memory.
struct QuantizedMatrix {
  WeightFormat format = WeightFormat::plain;
  Tensor values = {};  ///< [N, K] of i8 from -127 to 127 or of fp8_e4m3 without NaN; otherwise [N, K / codes_in_byte()] of u8
  Tensor scales = {};  ///< finite; int8, fp8: [N] of f32; otherwise [N, K / group]: f16, nf4: f32, mxfp4: u8
  Tensor zeros = {};   ///< int4, int2: [N, K / group] of u8 from 0 to 15, or to 3; without elements if symmetric
  int group = 0;       ///< int4, int2: 32 or 128; nf4: 64; fp4, mxfp4: 32; K is a multiple of it. Otherwise 0

  std::int64_t rows() const { return values.shape(0); }
  std::int64_t columns() const { return values.rank() < 2 ? 0 : values.shape(1) * codes_in_byte(format); }
  Device device() const { return values.device(); }
  bool empty() const { return format == WeightFormat::plain; }
  /// The bytes of all its tensors.
  std::int64_t bytes() const;

  /// Uninitialised. Throws InvalidArgument for `plain`, and as quantize() does for a K and a group that do not fit.
  struct Layout {
    WeightFormat format = WeightFormat::int8;
    int group = 32;            ///< int4 and int2 only: 32 or 128
    bool zero_points = false;  ///< int4 and int2 only
    friend bool operator==(const Layout&, const Layout&) = default;
  };
  static QuantizedMatrix allocate(std::int64_t rows, std::int64_t columns, const Layout& layout,
                                  const Stream& stream = Stream::standard(Device::cpu()));
  /// Rows [begin, end): a view.
  QuantizedMatrix slice(std::int64_t begin, std::int64_t end) const;
  /// A copy on `device`.
  QuantizedMatrix to(Device device) const;
};

/// "int8", "fp8", "int4:32", "int4:128:zeros", "int2:32", "nf4" and so on, or "plain".
std::string text_of(const QuantizedMatrix::Layout& layout);
/// The layout that a text names; "int4" is "int4:32", "int2" is "int2:32". Throws InvalidArgument for any other text.
QuantizedMatrix::Layout parse_weight_layout(std::string_view text);

/// Rounds `weight` [N, K] of f32, f16 or bf16, on the CPU, to fewer bits. The scale of a row or group follows from its largest magnitude a:
///
///   int8  scale = a / 127,  value = round(w / scale)
///   fp8   scale = a / 448,  value = e4m3(w / scale)
///   int4  scale = f16(a / 7),  code = round(w / scale) + 8, limited to 0 .. 15
///   int4 with zero points  low = min(w, 0), high = max(w, 0) of the group, scale = f16((high - low) / 15), zero = round(-low / scale),
///                          code = round(w / scale) + zero, both limited to 0 .. 15
///   int2  the same with 1 for 7, 2 for 8 and 3 for 15: symmetric, codes are -1, 0 and 1 times the scale
///   nf4   scale = a,  code = that of the number nearest to w / scale
///   fp4   scale = f16(a / 6),  code = e2m1(w / scale)
///   mxfp4 scale = 2^(floor(log2 a) - 2),  code = e2m1(w / scale), where up to 8 becomes 6, as the specification has it
///
/// in f32, to the nearest, ties to even. Where the scale is 0, values are 0. The error of an element is, for scales that are not subnormal
/// numbers of f32, at most scale / 2 for int8; the larger of |w| / 16 and scale / 1024 for fp8; scale / 2 + 2^-22 for symmetric int4 and
/// 0.51 scale + 2^-21 with zero points. Scales of groups are f16: half a bit for each weight in groups of 32. Values are rounded to the
/// scale as stored, so its own rounding costs next to nothing; f32 would take another half bit, and bf16 would misplace the largest values.
///
/// Throws InvalidArgument if K is not a multiple of the group (a row is not padded, because every kernel reads whole groups), if an
/// element is not finite, or if a group has a magnitude whose scale exceeds f16's range.
QuantizedMatrix quantize(const Tensor& weight, const QuantizedMatrix::Layout& layout);

/// out = W, rounded to out's dtype once. `out`: [N, K], row-major, f32, f16 or bf16, on W's device.
void dequantize(const QuantizedMatrix& weight, const Tensor& out, const std::optional<Stream>& stream = {});

struct DequantGemmOptions {
  bool accumulate = false;                   ///< y += instead of y =; not allowed with an activation
  const Tensor* bias = nullptr;              ///< [N], of y's dtype and contiguous; added to every row
  Activation activation = Activation::none;  ///< with swiglu, y has N / 2 columns: rows 2 n of W are gate, rows 2 n + 1 up
  std::optional<Stream> stream = {};         ///< default: the device's standard stream
  const Tensor* x_scales = nullptr;          ///< [M] of f32, contiguous: x is i8 (W4A8), and row m stands for x_scales(m) x(m, k)
  bool constant_weight = false;  ///< the weight was complete before the stream's previous launch, as a model's is: it may be read early
};

/// y = activation(x W^T + bias), or y += x W^T + bias. `x`: [M, K]; `y`: [M, N] of the same dtype, f32, f16 or bf16; columns are adjacent.
/// With swiglu y is [M, N / 2], N even: y(m, n) = silu(s(m, 2 n)) s(m, 2 n + 1) for s = x W^T + bias, in f32.
///
/// With x_scales x is i8, as quantize_activations() gives it, the weight int4, and y of any of these dtypes:
///
///   s(m, n) = x_scales(m) sum over g of scales(n, g) (sum over k in g of x(m, k) (code(n, k) - zero(n, g))) + bias(n)
///
/// - CPU, M up to 16: reads W once, as it is stored. Sums are in f32. Where the processor has AVX2, rows of x are rounded to 8-bit integers
///   for int8 and int4, with a scale for each block of 64 (int8) or 128 (int4) elements: x' = s round(x / s), s = a / 127, a the largest
///   magnitude of the block, so |x' - x| <= a / 254. Products of integers are exact. A row of y does not depend on the other rows.
/// - CPU with AVX512-VNNI or AMX, larger M, int8, K up to 131072: whole rows of x are rounded so, each with one scale: |x' - x| <= a / 254,
///   a the largest magnitude of the row. Sums of products are exact integers; they are scaled in f32. A row of x that is not finite gives
///   NaN. A row of y does not depend on the other rows.
/// - CPU, larger M, otherwise: panels of W are rounded to x's dtype for gemm().
/// - GPU, f16 and bf16, M up to 16, rows of W a multiple of 16 bytes: reads W once, as it is stored, and allocates nothing. Codes are exact
///   (nf4's numbers are rounded to x's dtype), scales multiply sums of groups, and sums are in f32.
/// - Hopper GPUs, f16 and bf16, larger M, rows of W and x at multiples of 16 bytes: W is decoded on its way to the tensor cores. Weights in
///   groups are rounded to x's dtype once, those of int8 and fp8 not at all. f32 sums take memory of the call if K is split, for few rows,
///   or `accumulate` is set.
/// - GPU, otherwise: W is rounded to x's dtype, in memory of the call, for gemm().
/// - x of i8: sums over a group are exact integers on Hopper GPUs, for y of f16 and bf16, M above 16, groups of 128 and rows of x at
///   multiples of 16 bytes, and on CPUs with AVX2 up to 16 rows. On other CPUs these rows are f32. Otherwise x_scales(m) x(m, k) is
///   rounded to y's dtype, in memory of the call, and multiplied as above.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void dequant_gemm(const Tensor& x, const QuantizedMatrix& weight, const Tensor& y, const DequantGemmOptions& options = {});

}  // namespace tw

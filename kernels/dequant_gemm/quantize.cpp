#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "kernels/check.hpp"
#include "kernels/dequant_gemm/call.hpp"
#include "kernels/rows.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/quantized.hpp"
#include "tilewave/tile/cpu/library.tile.hpp"

namespace tw {

namespace {

constexpr float kLargestInt8 = 127, kLargestFp8 = 448, kLargestFp4 = 6;

/// |x| as an integer of the same order, in which infinity and NaN are the largest.
u32 magnitude(float x) { return bit_cast<u32>(x) & 0x7fffffffu; }

/// The largest |w| of n elements. Throws InvalidArgument if one is not finite.
float largest_magnitude(const float* w, std::int64_t n, std::int64_t row) {
  u32 largest = 0;
  for (std::int64_t k = 0; k < n; ++k) largest = std::max(largest, magnitude(w[k]));
  require(largest < 0x7f800000u, "quantize: row {} of the weight has an element that is not finite; it cannot be scaled", row);
  return bit_cast<float>(largest);
}

float quantize_int8(const float* w, i8* values, std::int64_t n, float largest) {
  const float scale = largest / kLargestInt8;
  for (std::int64_t k = 0; k < n; ++k) values[k] = scale == 0 ? i8{0} : std::max(to<i8>(w[k] / scale), i8{-127});
  return scale;
}

float quantize_fp8(const float* w, fp8_e4m3* values, std::int64_t n, float largest) {
  const float scale = largest / kLargestFp8;
  for (std::int64_t k = 0; k < n; ++k) values[k] = scale == 0 ? fp8_e4m3(0.0f) : fp8_e4m3(w[k] / scale);
  return scale;
}

/// The scale as f16. Throws InvalidArgument if it is beyond f16's range.
f16 half_scale(float scale, float largest, std::int64_t row) {
  const f16 half(scale);
  require(magnitude(static_cast<float>(half)) < 0x7f800000u,
          "quantize: row {} of the weight has a magnitude of {}, whose scale exceeds f16's range", row, largest);
  return half;
}

/// One group of a row in u4x2 or u2x4. `zero` is null if the codes are symmetric.
template <class Codes>
f16 quantize_integers(const float* w, Codes* values, int group, float largest, u8* zero, std::int64_t row) {
  constexpr int count = codes_in<Codes>, most = (1 << 8 / count) - 1, middle = most / 2 + 1;
  float low = 0, high = 0;
  if (zero != nullptr)
    for (int k = 0; k < group; ++k) low = std::min(low, w[k]), high = std::max(high, w[k]);
  const f16 scale = half_scale(zero == nullptr ? largest / static_cast<float>(middle - 1) : (high - low) / most, largest, row);
  const auto factor = static_cast<float>(scale);
  int offset = middle;
  if (zero != nullptr) {
    offset = factor == 0 ? 0 : std::clamp(to<i32>(-low / factor), 0, most);
    *zero = static_cast<u8>(offset);
  }
  for (int k = 0; k < group; ++k) {
    const int code = factor == 0 ? 0 : to<i32>(w[k] / factor);
    values[k / count].set(k % count, std::clamp(code + offset, 0, most));
  }
  return scale;
}

/// The index of the nearest of 16 ascending numbers; of two, the lower.
int nearest_normal(float x) {
  int best = 0;
  for (int n = 1; n < 16; ++n)
    if (std::abs(x - kNormalFloats[n]) < std::abs(x - kNormalFloats[best])) best = n;
  return best;
}

void quantize_nf4(const float* w, u8* values, float* scale, float largest) {
  *scale = largest;
  for (int k = 0; k < 64; ++k) {
    auto& pair = reinterpret_cast<u4x2*>(values)[k / 2];
    pair.set(k % 2, nearest_normal(largest == 0 ? 0 : w[k] / largest));
  }
}

void quantize_fp4(const float* w, u8* values, float scale) {
  for (int k = 0; k < 32; ++k) reinterpret_cast<fp4x2*>(values)[k / 2].set(k % 2, fp4_e2m1(scale == 0 ? 0.0f : w[k] / scale));
}

/// The power of two of OCP Microscaling: 2^(floor(log2 largest) - 2).
u8 microscale(float largest) {
  if (largest == 0) return 0;
  int exponent = 0;
  std::frexp(largest, &exponent);  // largest is in [2^(exponent - 1), 2^exponent)
  return static_cast<u8>(std::clamp(exponent - 1 - 2 + 127, 0, 254));
}

/// f(row, the row as f32) for all rows, in parallel.
template <class F>
void for_rows(const Tensor& weight, F f) {
  const std::int64_t rows = weight.shape(0), columns = weight.shape(1);
  constexpr std::int64_t kTogether = 16;
  detail::parallel_for(static_cast<long>((rows + kTogether - 1) / kTogether), [&](long block) {
    std::vector<float> widened(static_cast<std::size_t>(columns));
    const std::int64_t end = std::min(rows, (block + 1) * kTogether);
    for (std::int64_t row = block * kTogether; row < end; ++row) {
      const void* from =
          static_cast<const std::byte*>(weight.data()) + static_cast<std::size_t>(row * weight.stride(0)) * size_of(weight.dtype());
      kernels::dequant_gemm::widen(widened.data(), from, weight.dtype(), columns);
      f(row, widened.data());
    }
  });
}

}  // namespace

std::string_view name_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::int8:
      return "int8";
    case WeightFormat::fp8:
      return "fp8";
    case WeightFormat::int4:
      return "int4";
    case WeightFormat::int2:
      return "int2";
    case WeightFormat::nf4:
      return "nf4";
    case WeightFormat::fp4:
      return "fp4";
    case WeightFormat::mxfp4:
      return "mxfp4";
    case WeightFormat::plain:
      break;
  }
  return "plain";
}

std::string text_of(const QuantizedMatrix::Layout& layout) {
  if (layout.format != WeightFormat::int4 && layout.format != WeightFormat::int2) return std::string(name_of(layout.format));
  return tw::format("{}:{}{}", name_of(layout.format), layout.group, layout.zero_points ? ":zeros" : "");
}

QuantizedMatrix::Layout parse_weight_layout(std::string_view text) {
  using Layout = QuantizedMatrix::Layout;
  std::vector<Layout> layouts = {{WeightFormat::plain}, {WeightFormat::int8}, {WeightFormat::fp8}};
  for (const WeightFormat format : {WeightFormat::int4, WeightFormat::int2})
    for (const int group : {32, 128})
      for (const bool zero_points : {false, true}) layouts.push_back({format, group, zero_points});
  for (const WeightFormat format : {WeightFormat::nf4, WeightFormat::fp4, WeightFormat::mxfp4}) layouts.push_back({format});
  std::vector<std::string> allowed;
  for (const Layout& layout : layouts) {
    allowed.push_back(text_of(layout));
    if (text == allowed.back()) return layout;
  }
  if (text == "int4") return {WeightFormat::int4};
  if (text == "int2") return {WeightFormat::int2};
  throw InvalidArgument(tw::format("weights are \"{}\"; allowed: {}", text, tw::join(allowed, ", ")));
}

void kernels::dequant_gemm::widen(float* to, const void* from, DType dtype, std::int64_t n) {
  if (dtype == DType::f32)
    std::copy_n(static_cast<const float*>(from), n, to);
  else if (dtype == DType::bf16)
    cpu::library().widen_bf16(to, static_cast<const unsigned short*>(from), n);
  else
    cpu::library().widen_f16(to, static_cast<const unsigned short*>(from), n);
}

std::int64_t QuantizedMatrix::bytes() const {
  std::int64_t sum = 0;
  for (const Tensor* t : {&values, &scales, &zeros}) sum += t->numel() * static_cast<std::int64_t>(size_of(t->dtype()));
  return sum;
}

QuantizedMatrix QuantizedMatrix::allocate(std::int64_t rows, std::int64_t columns, const Layout& layout, const Stream& stream) {
  QuantizedMatrix result;
  result.format = layout.format;
  switch (layout.format) {
    case WeightFormat::int8:
    case WeightFormat::fp8:
      result.values = Tensor::empty({rows, columns}, layout.format == WeightFormat::int8 ? DType::i8 : DType::fp8_e4m3, stream);
      result.scales = Tensor::empty({rows}, DType::f32, stream);
      return result;
    case WeightFormat::int4:
    case WeightFormat::int2:
      require(layout.group == 32 || layout.group == 128, "quantize: group is {}; 32 and 128 are supported", layout.group);
      result.group = layout.group;
      break;
    case WeightFormat::nf4:
      result.group = 64;
      break;
    case WeightFormat::fp4:
    case WeightFormat::mxfp4:
      result.group = 32;
      break;
    case WeightFormat::plain:
      throw InvalidArgument("quantize: format is plain; int8, fp8, int4, int2, nf4, fp4 and mxfp4 are supported");
  }
  require(columns % result.group == 0, "quantize: the weight is [{}, {}]; for {} its columns must be a multiple of the group of {}", rows,
          columns, name_of(layout.format), result.group);
  result.values = Tensor::empty({rows, columns / codes_in_byte(layout.format)}, DType::u8, stream);
  const DType scale = layout.format == WeightFormat::nf4 ? DType::f32 : layout.format == WeightFormat::mxfp4 ? DType::u8 : DType::f16;
  result.scales = Tensor::empty({rows, columns / result.group}, scale, stream);
  const bool integers = layout.format == WeightFormat::int4 || layout.format == WeightFormat::int2;
  if (integers && layout.zero_points) result.zeros = Tensor::empty(result.scales.shape(), DType::u8, stream);
  return result;
}

QuantizedMatrix QuantizedMatrix::slice(std::int64_t begin, std::int64_t end) const {
  QuantizedMatrix part = *this;
  for (Tensor* t : {&part.values, &part.scales, &part.zeros})
    if (t->rank() == 2 || t->numel() > 0) *t = t->slice(0, begin, end);
  return part;
}

QuantizedMatrix QuantizedMatrix::to(Device device) const {
  QuantizedMatrix copy = *this;
  for (Tensor* t : {&copy.values, &copy.scales, &copy.zeros})
    if (t->numel() > 0) *t = t->to(device);
  return copy;
}

QuantizedMatrix quantize(const Tensor& weight, const QuantizedMatrix::Layout& layout) {
  require(weight.rank() == 2, "quantize: the weight is {}; it must be [N, K]", weight);
  require(kernels::is_float(weight.dtype()), "quantize: the weight is {}; f32, f16 and bf16 are supported", weight);
  check_operand("quantize", "weight", weight, weight.dtype(), Device::cpu());
  require(weight.stride(1) == 1 || weight.shape(1) <= 1, "quantize: the weight's columns are {} elements apart; they must be adjacent",
          weight.stride(1));
  const std::int64_t columns = weight.shape(1);
  const QuantizedMatrix result = QuantizedMatrix::allocate(weight.shape(0), columns, layout);
  for_rows(weight, [&](std::int64_t row, const float* w) {
    if (result.group > 0) {
      const std::int64_t groups = columns / result.group, bytes = result.group / codes_in_byte(layout.format);
      for (std::int64_t g = 0; g < groups; ++g, w += result.group) {
        const std::int64_t at = row * groups + g;
        u8* const values = result.values.data<u8>() + at * bytes;
        u8* const zero = result.zeros.numel() > 0 ? result.zeros.data<u8>() + at : nullptr;
        const float largest = largest_magnitude(w, result.group, row);
        if (layout.format == WeightFormat::int4) {
          result.scales.data<f16>()[at] = quantize_integers(w, reinterpret_cast<u4x2*>(values), result.group, largest, zero, row);
        } else if (layout.format == WeightFormat::int2) {
          result.scales.data<f16>()[at] = quantize_integers(w, reinterpret_cast<u2x4*>(values), result.group, largest, zero, row);
        } else if (layout.format == WeightFormat::nf4) {
          quantize_nf4(w, values, result.scales.data<float>() + at, largest);
        } else if (layout.format == WeightFormat::fp4) {
          const f16 scale = half_scale(largest / kLargestFp4, largest, row);
          result.scales.data<f16>()[at] = scale;
          quantize_fp4(w, values, static_cast<float>(scale));
        } else {
          const u8 scale = microscale(largest);
          result.scales.data<u8>()[at] = scale;
          quantize_fp4(w, values, static_cast<float>(bit_cast<e8m0>(scale)));
        }
      }
      return;
    }
    const float largest = largest_magnitude(w, columns, row);
    result.scales.data<float>()[row] = layout.format == WeightFormat::int8
                                           ? quantize_int8(w, result.values.data<i8>() + row * columns, columns, largest)
                                           : quantize_fp8(w, result.values.data<fp8_e4m3>() + row * columns, columns, largest);
  });
  return result;
}

}  // namespace tw

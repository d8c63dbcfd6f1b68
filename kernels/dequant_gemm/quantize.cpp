#include <algorithm>
#include <array>
#include <vector>

#include "kernels/check.hpp"
#include "kernels/dequant_gemm/call.hpp"
#include "kernels/rows.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/quantized.hpp"
#include "tilewave/tile/cpu/library.tile.hpp"

namespace tw {

namespace {

constexpr float kLargestInt8 = 127, kLargestFp8 = 448, kLargestInt4 = 7, kCodes = 15;

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

/// One group of a row. `zero` is null if the codes are symmetric.
f16 quantize_int4(const float* w, u4x2* values, int group, float largest, u8* zero, std::int64_t row) {
  float low = 0, high = 0;
  if (zero != nullptr)
    for (int k = 0; k < group; ++k) low = std::min(low, w[k]), high = std::max(high, w[k]);
  const f16 scale(zero == nullptr ? largest / kLargestInt4 : (high - low) / kCodes);
  const auto factor = static_cast<float>(scale);
  require(magnitude(factor) < 0x7f800000u, "quantize: row {} of the weight has a magnitude of {}, whose scale exceeds f16's range", row,
          largest);
  int offset = 8;
  if (zero != nullptr) {
    offset = factor == 0 ? 0 : std::clamp(to<i32>(-low / factor), 0, 15);
    *zero = static_cast<u8>(offset);
  }
  for (int k = 0; k < group; ++k) {
    const int code = factor == 0 ? 0 : to<i32>(w[k] / factor);
    values[k / 2].set(k % 2, std::clamp(code + offset, 0, 15));
  }
  return scale;
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
    case WeightFormat::plain:
      break;
  }
  return "plain";
}

std::string text_of(const QuantizedMatrix::Layout& layout) {
  if (layout.format != WeightFormat::int4) return std::string(name_of(layout.format));
  return tw::format("int4:{}{}", layout.group, layout.zero_points ? ":zeros" : "");
}

QuantizedMatrix::Layout parse_weight_layout(std::string_view text) {
  using Layout = QuantizedMatrix::Layout;
  std::vector<Layout> layouts = {{WeightFormat::plain}, {WeightFormat::int8}, {WeightFormat::fp8}};
  for (const int group : {32, 128})
    for (const bool zero_points : {false, true}) layouts.push_back({WeightFormat::int4, group, zero_points});
  std::vector<std::string> allowed;
  for (const Layout& layout : layouts) {
    allowed.push_back(text_of(layout));
    if (text == allowed.back()) return layout;
  }
  if (text == "int4") return {WeightFormat::int4};
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
      require(layout.group == 32 || layout.group == 128, "quantize: group is {}; 32 and 128 are supported", layout.group);
      require(columns % layout.group == 0, "quantize: the weight is [{}, {}]; for int4 its columns must be a multiple of the group of {}",
              rows, columns, layout.group);
      result.group = layout.group;
      result.values = Tensor::empty({rows, columns / 2}, DType::u8, stream);
      result.scales = Tensor::empty({rows, columns / layout.group}, DType::f16, stream);
      if (layout.zero_points) result.zeros = Tensor::empty(result.scales.shape(), DType::u8, stream);
      return result;
    case WeightFormat::plain:
      break;
  }
  throw InvalidArgument(tw::format("quantize: format is {}; int8, fp8 and int4 are supported", name_of(layout.format)));
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
    if (layout.format == WeightFormat::int4) {
      const std::int64_t groups = columns / layout.group;
      u8* zeros = layout.zero_points ? result.zeros.data<u8>() + row * groups : nullptr;
      auto* values = reinterpret_cast<u4x2*>(result.values.data<u8>()) + row * columns / 2;
      for (std::int64_t g = 0; g < groups; ++g, w += layout.group, values += layout.group / 2)
        result.scales.data<f16>()[row * groups + g] =
            quantize_int4(w, values, layout.group, largest_magnitude(w, layout.group, row), zeros == nullptr ? nullptr : zeros + g, row);
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

// The weights of a converted checkpoint: a byte that chooses the layout, and a safetensors file from which a small model is loaded. What is
// loaded keeps to quantized.hpp, and products with it are finite.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "models/weights.hpp"
#include "tilewave/error.hpp"
#include "tilewave/quantized.hpp"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check(const tw::models::Linear& linear, std::int64_t out, std::int64_t in, const tw::QuantizedMatrix::Layout& layout) {
  require(linear.out() == out && linear.in() == in);
  if (layout.format == tw::WeightFormat::plain) return;
  require(linear.quantized.format != tw::WeightFormat::plain);
  const tw::Tensor weight = tw::Tensor::empty({out, in}, tw::DType::f32);
  tw::dequantize(linear.quantized, weight);
  for (std::int64_t i = 0; i < weight.numel(); ++i) {
    const float x = weight.data<float>()[i];
    require(!std::isnan(x));  // a finite scale times a code may be infinite
  }
  const tw::Tensor x = tw::Tensor::zeros({3, in}, tw::DType::f32), y = tw::Tensor::empty({3, out}, tw::DType::f32);
  tw::dequant_gemm(x, linear.quantized, y);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using tw::models::Weights;
  if (size == 0) return 0;
  constexpr const char* kLayouts[] = {"plain", "int8", "fp8", "int4:32", "int4:32:zeros"};
  const tw::QuantizedMatrix::Layout layout = tw::parse_weight_layout(kLayouts[data[0] % 5]);
  tw::set_cpu_threads(1);
  try {
    Weights weights("input", tw::models::SafeTensors::parse(std::as_bytes(std::span(data + 1, size - 1)), "input"),
                    [](const std::string& name) { return name; });
    weights.set_layouts(layout, layout);
    tw::models::Linear whole, stacked, head;
    const auto build = [&](Weights& from) {
      whole = from.linear("a", 3, 64, true);
      const Weights::Part parts[] = {{"b.weight", 2}, {"c.weight", 3}};
      stacked = from.linear(parts, 32);
      head = from.linear("head", 5, 32, false, Weights::Role::head);
    };
    weights.check(build);
    weights.load(build, tw::DType::f32, tw::Stream::standard(tw::Device::cpu()), {});
    check(whole, 3, 64, layout);
    check(stacked, 5, 32, layout);
    check(head, 5, 32, layout);
  } catch (const tw::FileError&) {
  }
  return 0;
}

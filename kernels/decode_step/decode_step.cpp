#include "kernels/decode_step/decode_step.hpp"

#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/check.hpp"
#include "kernels/decode_step/launch.hpp"
#include "runtime/format.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/device.hpp"

namespace tw::kernels::decode_step {

namespace {

constexpr const char* kSource = "kernels/decode_step/decode_step.tile.hpp";

std::string type_of(const Kernel& k) {
  const std::string element(element_name(k.dtype));
  const std::string format = k.format == WeightFormat::plain ? tw::format("tw::kernels::decode_step::Plain<{}>", element)
                                                             : dequant_gemm::format_name(k.format, k.code_group, k.zeros);
  return tw::format("tw::kernels::decode_step::DecodeStep<{}, {}, {}, {}, {}, {}>", format, element, k.head_dim, k.group, k.sequences,
                    k.stages);
}

/// The scales of groups have one type in all of a format's kernels, and so have Params.
constexpr int kAnyGroup = 32;

template <WeightFormat format, DType dtype>
void run_as(const Decoder& decoder, const Step& step, const Stream& stream) {
  static KernelTable<Kernel> table(type_of, kSource);
  const Launch launch(decoder, step, device_info(stream.device()).units, stream);
  const Kernel kernel{.format = format,
                      .dtype = dtype,
                      .head_dim = decoder.head_dim,
                      .group = decoder.heads / decoder.kv_heads,
                      .sequences = room_for(launch.sequences),
                      .stages = format == WeightFormat::int4 ? 12 : 6,
                      .code_group = decoder.qkv.quantized.group,
                      .zeros = decoder.qkv.quantized.zeros.numel() > 0};
  // The layout of Params is that of any kernel of the format and the dtype.
  using Params =
      typename HostKernel<Kernel{.format = format, .dtype = dtype, .code_group = kAnyGroup}>::template On<sm_90a::Target<>>::Params;
  detail::launch_named<Params>(table[kernel], stream, launch.grid(), [&](auto& bind, auto& p) { launch.bind_to(bind, p); });
}

}  // namespace

bool supports(const Decoder& d, std::int64_t sequences, const Stream& stream) {
  if (!stream.device().is_cuda() || stream.target() != GpuTarget::sm_90a || sequences > kMostSequences || d.norms.rank() != 2) return false;
  const DType dtype = d.norms.dtype();
  const int group = d.kv_heads > 0 ? d.heads / d.kv_heads : 0;
  const bool known = (dtype == DType::bf16 || dtype == DType::f16) && (d.head_dim == 64 || d.head_dim == 128) &&
                     (group == 1 || group == 2 || group == 4 || group == 8) && group * d.kv_heads == d.heads;
  const WeightFormat format = d.qkv.format();
  const bool quantized = format == WeightFormat::int8 || format == WeightFormat::fp8 || format == WeightFormat::int4;
  const int panel = quantized ? HostKernel<Kernel{.format = WeightFormat::int8}>::panel : HostKernel<Kernel{}>::panel;
  const auto as_qkv = [&](const Weight& weight) {
    const QuantizedMatrix &q = weight.quantized, &first = d.qkv.quantized;
    return weight.format() == format && q.group == first.group && (q.zeros.numel() > 0) == (first.zeros.numel() > 0);
  };
  for (const Weight* weight : {&d.qkv, &d.out, &d.gate_up, &d.down})
    if (!as_qkv(*weight) || weight->values().rank() != 2 || weight->columns() % panel != 0) return false;
  if (d.has_head() && (!as_qkv(d.head) || d.head.rows() % 8 != 0)) return false;
  return known && (quantized || format == WeightFormat::plain);
}

void run(const Decoder& decoder, const Step& step, const Stream& stream) {
  const auto run_format = [&]<WeightFormat format>() {
    if (decoder.norms.dtype() == DType::bf16)
      run_as<format, DType::bf16>(decoder, step, stream);
    else
      run_as<format, DType::f16>(decoder, step, stream);
  };
  switch (decoder.qkv.format()) {
    case WeightFormat::int8:
      return run_format.template operator()<WeightFormat::int8>();
    case WeightFormat::int4:
      return run_format.template operator()<WeightFormat::int4>();
    case WeightFormat::fp8:
      return run_format.template operator()<WeightFormat::fp8>();
    default:
      return run_format.template operator()<WeightFormat::plain>();
  }
}

namespace {

/// What ships compiled: GLM-ASR-Nano's decoder.
constexpr Kernel kRegistered = {};

Analysis analyze_shape(const ShapeValues& shape) {
  const int sequences = shape.integer("sequences"), length = shape.integer("length"), layers = shape.integer("layers");
  const int hidden = shape.integer("hidden"), intermediate = shape.integer("intermediate"), vocabulary = shape.integer("vocabulary");
  const int heads = shape.integer("heads"), kv_heads = heads / kRegistered.group, dim = kRegistered.head_dim;
  require(sequences > 0 && sequences <= kRegistered.sequences, "decode_step: sequences is {}; allowed: 1 to {}", sequences,
          kRegistered.sequences);
  require(layers > 0 && heads > 0 && heads % kRegistered.group == 0,
          "decode_step: layers is {} and heads {}; allowed: 1 or more, and multiples of {}", layers, heads, kRegistered.group);
  require(hidden > 0 && hidden % 128 == 0 && intermediate > 0 && intermediate % 128 == 0 && vocabulary > 0 && vocabulary % 8 == 0,
          "decode_step: hidden is {}, intermediate {} and vocabulary {}; allowed: multiples of 128, 128 and 8", hidden, intermediate,
          vocabulary);
  const auto of = [](Shape extents) { return placeholder(std::move(extents), kRegistered.dtype); };
  const Decoder decoder{.qkv = {.plain = of({layers * (heads + 2 * kv_heads) * dim, hidden})},
                        .out = {.plain = of({layers * hidden, heads * dim})},
                        .gate_up = {.plain = of({layers * 2 * intermediate, hidden})},
                        .down = {.plain = of({layers * hidden, intermediate})},
                        .embedding = of({vocabulary, hidden}),
                        .norms = of({2 * layers + 1, hidden}),
                        .head = {.plain = of({vocabulary, hidden})},
                        .cosines = placeholder({length + 1, dim / 2}, DType::f32),
                        .sines = placeholder({length + 1, dim / 2}, DType::f32),
                        .layers = layers,
                        .heads = heads,
                        .kv_heads = kv_heads,
                        .head_dim = dim,
                        .epsilon = 1e-5f};
  const int pages = length / kPageTokens + 1;
  std::vector<std::int32_t> table(static_cast<std::size_t>(sequences) * static_cast<std::size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  const std::vector<int> lengths(static_cast<std::size_t>(sequences), length), ids(lengths.size());
  const Step step{.ids = Tensor::from(std::span<const int>(ids), {sequences}),
                  .keys = of({layers, sequences * pages, kPageTokens, kv_heads, dim}),
                  .values = of({layers, sequences * pages, kPageTokens, kv_heads, dim}),
                  .lengths = Tensor::from(std::span<const int>(lengths), {sequences}),
                  .pages = Tensor::from(std::span<const int>(table), {sequences, pages}),
                  .scores = of({sequences, vocabulary})};
  constexpr int kUnits = 132;
  const Launch launch(decoder, step, kUnits, Stream::standard(Device::cpu()));
  return analyze<HostKernel<kRegistered>>(launch.grid(), [&](auto& bind, auto& p) { launch.bind_to(bind, p); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  const std::string name = tw::format("decode_step_{}_{}_{}", tw::name_of(kRegistered.dtype), kRegistered.head_dim, kRegistered.group);
  return {{make_spec({type_of(kRegistered), kSource, detail::tile_recorder<HostKernel<kRegistered>>()}, true, true, name), analyze_shape}};
}

}  // namespace tw::kernels::decode_step

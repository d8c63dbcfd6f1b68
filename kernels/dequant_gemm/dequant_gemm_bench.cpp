// `tilewave bench dequant_gemm`: products with weights in fewer bits, against a read of the same bytes.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "benchmarks/memory_bound.hpp"
#include "kernels/dequant_gemm/kernels.hpp"
#include "kernels/dequant_gemm/skinny.hpp"
#include "kernels/dequant_gemm/w4a8.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tilewave/bitnet.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/quantized.hpp"
#include "tilewave/swiglu.hpp"

namespace tw::kernels::dequant_gemm {
namespace {

using namespace tw::bench;

MemoryOp product_op(std::string name, std::int64_t m, const QuantizedMatrix::Layout& layout) {
  const auto prepare = [=](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const std::int64_t whole = std::max<std::int64_t>(128, cols / 128 * 128);  // every group
    const QuantizedMatrix w = quantize(Tensor::random({rows, whole}, DType::f32, 1), layout).to(stream.device());
    const Tensor x = random_normal({m, whole}, dtype, stream.device(), 2), y = Tensor::poisoned({m, rows}, dtype, stream);
    return {static_cast<double>(w.bytes()), [=] { tw::dequant_gemm(x, w, y, {.stream = stream}); }};
  };
  return {.name = std::move(name), .dtypes = {DType::bf16}, .prepare = prepare, .yardstick = Yardstick::read};
}

/// Weights of large language models' layers, and GLM-ASR's: q, k and v, out, gate and up, down.
struct Layer {
  const char* name;
  std::int64_t n, k;
};
constexpr Layer kLayers[] = {{"14336x4096", 14336, 4096}, {"8192x28672", 8192, 28672}, {"qkv", 3072, 2048},
                             {"out", 2048, 2048},         {"gate_up", 12288, 2048},    {"down", 2048, 6144}};

/// A layer with m rows of x. The weight is never in the cache: copies of it, which a graph's 20 launches read in turn, are several times
/// what the cache holds. Small products are launched several at a time.
struct Case {
  double bytes;  ///< of the weight
  std::size_t products;
  std::vector<QuantizedMatrix> weights;
  std::vector<Tensor> plain;  ///< in bf16
  Tensor x;
  std::size_t next = 0, next_plain = 0;

  Case(const Stream& stream, std::int64_t m, const Layer& layer, const QuantizedMatrix::Layout& layout) {
    const Device device = stream.device();
    const QuantizedMatrix one = quantize(Tensor::random({layer.n, layer.k}, DType::f32, 1), layout);
    bytes = static_cast<double>(one.bytes());
    products = static_cast<std::size_t>(std::ceil(12e6 / bytes));
    const auto copies = static_cast<std::size_t>(std::max(2.0, std::ceil(240e6 / bytes)));
    for (std::size_t i = 0; i < copies; ++i) weights.push_back(one.to(device));
    for (std::size_t i = 0; i < std::max<std::size_t>(2, copies / 2); ++i)
      plain.push_back(random_normal({layer.n, layer.k}, DType::bf16, device, 2));
    x = random_normal({m, layer.k}, DType::bf16, device, 3);
  }
  const QuantizedMatrix& weight() { return weights[next++ % weights.size()]; }
  Tensor plain_weight() { return plain[next_plain++ % plain.size()].transpose(0, 1); }
};

/// Measures the first contender against the second, and prints the times of the others. Rates are those of the weight's bytes.
void compare(Run& run, const std::string& name, const Case& of, const std::vector<Contender>& contenders) {
  const Stream& stream = run.stream();
  for (const Contender& c : contenders) c.launch();
  stream.synchronize();
  const std::vector<Timing> times = measure(Mode::graph, contenders, stream, run.effort(Mode::graph));
  Record record;
  record.family = "dequant_gemm";
  record.case_name = name;
  record.dtype = DType::bf16;
  record.mode = Mode::graph;
  record.unit = "GB/s";
  record.work = of.bytes * static_cast<double>(of.products) * 1e-9;
  record.ours = times[0];
  record.peer = contenders[1].name;
  record.peer_time = times[1];
  record.limit = run.read_bandwidth() * 1e-9;
  run.add(record);
  for (std::size_t i = 2; i < contenders.size(); ++i)
    tw::print(run.options().table, "  {:<24} {:<48} {:8.2f} us a product\n", name, contenders[i].name,
              times[i].median * 1e3 / static_cast<double>(of.products));
}

bool compares_tiles(Run& run) { return run.options().all_configs && generic_shared_bytes(run.stream()) == 0; }

/// On a GPU, a product as a step of a model does it. The peer is gemm() with the same weight in bf16, in GB/s of the bytes that the weight
/// has here, so that the ratio is how many times as fast this is. With --all-configs, also every tile.
void run_layer(Run& run, std::int64_t m, const Layer& layer, const char* format, const QuantizedMatrix::Layout& layout) {
  const std::string name = tw::format("{}-m{}-{}", format, m, layer.name);
  if (!run.wants("dequant_gemm", name, DType::bf16)) return;
  const Stream& stream = run.stream();
  const int units = device_info(stream.device()).units;
  Case of(stream, m, layer, layout);
  const Tensor y = Tensor::poisoned({m, layer.n}, DType::bf16, stream);
  const DequantGemmOptions options{.stream = stream, .constant_weight = true};
  const auto times = [&](auto product) {
    return [&of, product] {
      for (std::size_t i = 0; i < of.products; ++i) product();
    };
  };
  std::vector<Contender> contenders = {
      {"tilewave", times([&] { tw::dequant_gemm(of.x, of.weight(), y, options); })},
      {"gemm", times([&] { tw::gemm(of.x, of.plain_weight(), y, {.stream = stream, .constant_b = true}); })}};
  const auto call = [&] { return Call{of.x, of.weight(), y, options, stream}; };
  std::vector<SkinnyTile> tiles;
  if (compares_tiles(run) && is_skinny(call())) tiles = skinny_tiles(call());
  for (const SkinnyTile& tile : tiles) {
    SkinnyKernel kernel = skinny_kernel(call(), units, 0);
    kernel.tile = tile;
    contenders.push_back({describe(tile), times([&, kernel] { run_skinny(call(), kernel); })});
  }
  if (compares_tiles(run) && !is_skinny(call()) && is_wide(call())) {
    const int splits = plan_wide(call(), units).splits;
    for (const WideTile& tile : kWideTiles) {
      for (const int n : {0, 2, 4, std::max(splits, 8)}) {
        const WidePlan plan{tile, n};
        contenders.push_back({describe(plan), times([&, plan] { run_wide(call(), plan); })});
      }
    }
  }
  compare(run, name, of, contenders);
}

/// The same for x in 8-bit integers. The peer's x is in bf16.
void run_integers(Run& run, std::int64_t m, const Layer& layer, const char* format, const QuantizedMatrix::Layout& layout) {
  const std::string name = tw::format("w4a8-{}-m{}-{}", format, m, layer.name);
  if (!run.wants("dequant_gemm", name, DType::bf16)) return;
  const Stream& stream = run.stream();
  Case of(stream, m, layer, layout);
  of.products = 1;
  const Tensor y = Tensor::poisoned({m, layer.n}, DType::bf16, stream);
  const Tensor x = Tensor::empty({m, layer.k}, DType::i8, stream), x_scales = Tensor::empty({m}, DType::f32, stream);
  quantize_activations(of.x, x, x_scales, {.stream = stream});
  const DequantGemmOptions options{.stream = stream, .x_scales = &x_scales, .constant_weight = true};
  std::vector<Contender> contenders = {{"tilewave", [&] { tw::dequant_gemm(x, of.weight(), y, options); }},
                                       {"gemm", [&] { tw::gemm(of.x, of.plain_weight(), y, {.stream = stream, .constant_b = true}); }}};
  const auto call = [&] { return Call{x, of.weight(), y, options, stream}; };
  if (compares_tiles(run) && is_w4a8(call())) {
    for (const WideTile& tile : kW4A8Tiles) {
      for (const int splits : {0, 2, 4}) {
        const WidePlan plan{tile, splits};
        contenders.push_back({describe(plan), [&, plan] { run_w4a8(call(), plan); }});
      }
    }
  }
  compare(run, name, of, contenders);
}

/// SwiGLU in the product. The peer is the product with gate and up, then swiglu_interleaved().
void run_gated(Run& run, std::int64_t m, const Layer& layer, const char* format, const QuantizedMatrix::Layout& layout) {
  const std::string name = tw::format("{}-swiglu-m{}-{}", format, m, layer.name);
  if (!run.wants("dequant_gemm", name, DType::bf16)) return;
  const Stream& stream = run.stream();
  Case of(stream, m, layer, layout);
  of.products = 1;
  const Tensor both = Tensor::poisoned({m, layer.n}, DType::bf16, stream), y = Tensor::poisoned({m, layer.n / 2}, DType::bf16, stream);
  compare(run, name, of,
          {{"tilewave",
            [&] { tw::dequant_gemm(of.x, of.weight(), y, {.activation = Activation::swiglu, .stream = stream, .constant_weight = true}); }},
           {"dequant_gemm, swiglu", [&] {
              tw::dequant_gemm(of.x, of.weight(), both, {.stream = stream, .constant_weight = true});
              swiglu_interleaved(both, y, {.stream = stream});
            }}});
}

struct Format {
  const char* name;
  QuantizedMatrix::Layout layout;
};
const Format kFormats[] = {{"int8", {WeightFormat::int8}},
                           {"fp8", {WeightFormat::fp8}},
                           {"int4-32", {WeightFormat::int4, 32}},
                           {"int4-128", {WeightFormat::int4, 128}}};
/// Measured with fewer layers and numbers of rows.
const Format kOtherFormats[] = {
    {"nf4", {WeightFormat::nf4}}, {"fp4", {WeightFormat::fp4}}, {"mxfp4", {WeightFormat::mxfp4}}, {"int2-32", {WeightFormat::int2, 32}}};
/// Of weights that x in 8-bit integers is multiplied by.
const Format kIntegerFormats[] = {
    {"int4-32", {WeightFormat::int4, 32}}, {"int4-128", {WeightFormat::int4, 128}}, {"int4-128-zeros", {WeightFormat::int4, 128, true}}};

const Family family{"dequant_gemm", "x W^T with W in 8, 4 or 2 bits: a read of W's bytes", [](Run& run) {
                      std::vector<MemoryOp> ops;
                      for (const std::int64_t m : {1, 8})
                        for (const Format& f : kFormats) ops.push_back(product_op(tw::format("{}-m{}", f.name, m), m, f.layout));
                      if (run.options().device == Device::cpu())
                        for (const Format& f : kOtherFormats) ops.push_back(product_op(tw::format("{}-m1", f.name), 1, f.layout));
                      run_memory_ops(run, "dequant_gemm", ops);
                      if (!run.options().device.is_cuda()) return;
                      for (const Layer& layer : kLayers)
                        for (const Format& f : kFormats)
                          for (const std::int64_t m : {1, 16, 32, 64, 256, 4096}) run_layer(run, m, layer, f.name, f.layout);
                      for (const Layer& layer : {kLayers[0], kLayers[1]})
                        for (const Format& f : kOtherFormats)
                          for (const std::int64_t m : {1, 16, 64, 4096}) run_layer(run, m, layer, f.name, f.layout);
                      for (const Layer& layer : {kLayers[0], kLayers[1]})
                        for (const Format& f : kIntegerFormats)
                          for (const std::int64_t m : {1, 16, 64, 256, 4096}) run_integers(run, m, layer, f.name, f.layout);
                      for (const Layer& layer : {kLayers[0], kLayers[4]})
                        for (const Format& f : {kFormats[0], kFormats[3], kOtherFormats[2]})
                          for (const std::int64_t m : {1, 16, 64, 4096}) run_gated(run, m, layer, f.name, f.layout);
                    }};

}  // namespace
}  // namespace tw::kernels::dequant_gemm

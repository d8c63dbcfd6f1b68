// `tilewave bench dequant_gemm`: products with weights in fewer bits, against a read of the same bytes.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "benchmarks/memory_bound.hpp"
#include "kernels/dequant_gemm/kernels.hpp"
#include "kernels/dequant_gemm/skinny.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/quantized.hpp"

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

/// On a GPU, a product as a step of a model does it: the weight is never in the cache. The peer is gemm() with the same
/// weight in bf16, in GB/s of the bytes that the weight has here, so that the ratio is how many times as fast this is. With --all-configs,
/// also every tile.
void run_layer(Run& run, std::int64_t m, const Layer& layer, const char* format, const QuantizedMatrix::Layout& layout) {
  const std::string name = tw::format("{}-m{}-{}", format, m, layer.name);
  const DType dtype = DType::bf16;
  if (!run.wants("dequant_gemm", name, dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const QuantizedMatrix one = quantize(Tensor::random({layer.n, layer.k}, DType::f32, 1), layout);
  // A graph has 20 launches. Each is of so many products that together they read several times what the cache holds.
  const double bytes = static_cast<double>(one.bytes());
  const auto products = static_cast<std::size_t>(std::ceil(12e6 / bytes));
  const auto copies = static_cast<std::size_t>(std::max(2.0, std::ceil(240e6 / bytes)));
  std::vector<QuantizedMatrix> weights;
  std::vector<Tensor> plain;
  for (std::size_t i = 0; i < copies; ++i) weights.push_back(one.to(device));
  for (std::size_t i = 0; i < std::max<std::size_t>(2, copies / 2); ++i)
    plain.push_back(random_normal({layer.n, layer.k}, dtype, device, 2));
  const Tensor x = random_normal({m, layer.k}, dtype, device, 3), y = Tensor::poisoned({m, layer.n}, dtype, stream);
  std::size_t next = 0, next_plain = 0;
  std::vector<Contender> contenders = {
      {"tilewave",
       [&] {
         for (std::size_t i = 0; i < products; ++i)
           tw::dequant_gemm(x, weights[next++ % weights.size()], y, {.stream = stream, .constant_weight = true});
       }},
      {"gemm", [&] {
         for (std::size_t i = 0; i < products; ++i)
           tw::gemm(x, plain[next_plain++ % plain.size()].transpose(0, 1), y, {.stream = stream, .constant_b = true});
       }}};
  const DequantGemmOptions options{.stream = stream, .constant_weight = true};
  const auto call = [&](std::size_t i) { return Call{x, weights[i % weights.size()], y, options, stream}; };
  std::vector<SkinnyTile> tiles;
  const bool all = run.options().all_configs && generic_shared_bytes(stream) == 0;
  if (all && is_skinny(call(0))) tiles = skinny_tiles(call(0));
  for (const SkinnyTile& tile : tiles) {
    SkinnyKernel kernel = skinny_kernel(call(0), device_info(device).units, 0);
    kernel.tile = tile;
    const auto launch = [&, kernel] {
      for (std::size_t i = 0; i < products; ++i) run_skinny(call(next++), kernel);
    };
    contenders.push_back({describe(tile), launch});
  }
  if (all && !is_skinny(call(0)) && is_wide(call(0))) {
    const int splits = plan_wide(call(0), device_info(device).units).splits;
    for (const WideTile& tile : kWideTiles) {
      for (const int n : {0, 2, 4, std::max(splits, 8)}) {
        const WidePlan plan{tile, n};
        contenders.push_back({describe(plan), [&, plan] {
                                for (std::size_t i = 0; i < products; ++i) run_wide(call(next++), plan);
                              }});
      }
    }
  }
  for (const Contender& c : contenders) c.launch();
  stream.synchronize();
  const std::vector<Timing> times = measure(Mode::graph, contenders, stream, run.effort(Mode::graph));
  Record record;
  record.family = "dequant_gemm";
  record.case_name = name;
  record.dtype = dtype;
  record.mode = Mode::graph;
  record.unit = "GB/s";
  record.work = bytes * static_cast<double>(products) * 1e-9;
  record.ours = times[0];
  record.peer = "gemm";
  record.peer_time = times[1];
  record.limit = run.read_bandwidth() * 1e-9;
  run.add(record);
  for (std::size_t i = 2; i < contenders.size(); ++i)
    tw::print(run.options().table, "  {:<24} {:<48} {:8.2f} us a product\n", name, contenders[i].name,
              times[i].median * 1e3 / static_cast<double>(products));
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
                    }};

}  // namespace
}  // namespace tw::kernels::dequant_gemm

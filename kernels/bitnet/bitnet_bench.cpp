// `tilewave bench bitnet`: products with ternary weights, against a read of the same bytes and against products of i8, and quantisers,
// against a copy.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "benchmarks/memory_bound.hpp"
#include "kernels/bitnet/kernels.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tilewave/bitnet.hpp"
#include "tilewave/gemm.hpp"

namespace tw::kernels::bitnet {
namespace {

using namespace tw::bench;

MemoryOp activations_op() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({rows, cols}, dtype, stream.device(), 1), values = Tensor::poisoned({rows, cols}, DType::i8, stream);
    const Tensor scales = Tensor::poisoned({rows}, DType::f32, stream);
    return {bytes_of({x, values, scales}), [=] { tw::quantize_activations(x, values, scales, {.stream = stream}); }};
  };
  return {.name = "quantize_activations", .dtypes = {DType::bf16}, .prepare = prepare};
}

/// Layers: a large one, and those of BitNet b1.58 2B4T.
struct TernaryLayer {
  const char* name;
  std::int64_t n, k;
};
constexpr TernaryLayer kTernaryLayers[] = {{"16384x16384", 16384, 16384},
                                           {"up-6912x2560", 6912, 2560},
                                           {"down-2560x6912", 2560, 6912},
                                           {"q-2560x2560", 2560, 2560},
                                           {"k-640x2560", 640, 2560}};

/// A product as a step of a model does it: the weight is never in the cache. The peer is gemm() in i8 with the same weight unpacked, whose
/// results are i32 without scales. Few rows count the bytes of the weight (64 MiB of 16384 x 16384) against the read rate, many rows
/// operations.
void run_ternary_layer(Run& run, std::int64_t m, const TernaryLayer& layer) {
  const std::string name = tw::format("m{}-{}", m, layer.name);
  const DType dtype = DType::bf16;
  if (!run.wants("bitnet", name, dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const bool few = m <= 16, on_gpu = device.is_cuda();
  const TernaryMatrix one = tw::quantize_ternary(random_normal({layer.n, layer.k}, DType::bf16, device, 1), {.stream = stream});
  // A graph has 20 launches. Each is of so many products that together they read several times what the cache holds.
  const auto bytes = static_cast<double>(one.bytes());
  const auto products = static_cast<std::size_t>(on_gpu && few ? std::ceil(12e6 / bytes) : 1);
  const auto copies = static_cast<std::size_t>(on_gpu && few ? std::max(2.0, std::ceil(240e6 / bytes)) : 1);
  std::vector<TernaryMatrix> weights;
  std::vector<Tensor> plain;
  for (std::size_t i = 0; i < copies; ++i) weights.push_back(one.to(device));
  for (std::size_t i = 0; i < (copies + 3) / 4 + (few ? 1 : 0); ++i) {
    plain.push_back(Tensor::empty({layer.n, layer.k}, DType::i8, stream));
    tw::unpack_ternary(one, plain.back(), {.stream = stream});
  }
  const Tensor x = random_normal({m, layer.k}, dtype, device, 3), values = Tensor::poisoned({m, layer.k}, DType::i8, stream);
  const Tensor scales = Tensor::poisoned({m}, DType::f32, stream), y = Tensor::poisoned({m, layer.n}, dtype, stream);
  const Tensor sums = Tensor::poisoned({m, layer.n}, DType::i32, stream);
  tw::quantize_activations(x, values, scales, {.stream = stream});
  std::size_t next = 0, next_plain = 0;
  const BitLinearOptions options{.stream = stream, .constant_weight = true};
  const auto weight = [&]() -> const TernaryMatrix& { return weights[next++ % weights.size()]; };
  std::vector<Contender> contenders = {{"tilewave",
                                        [&] {
                                          for (std::size_t i = 0; i < products; ++i) tw::ternary_gemm(values, scales, weight(), y, options);
                                        }},
                                       {"gemm",
                                        [&] {
                                          for (std::size_t i = 0; i < products; ++i)
                                            tw::gemm(values, plain[next_plain++ % plain.size()].transpose(0, 1), sums,
                                                     {.stream = stream, .constant_b = true});
                                        }},
                                       {"bit_linear", [&] {
                                          for (std::size_t i = 0; i < products; ++i) tw::bit_linear(x, weight(), y, options);
                                        }}};
  if (on_gpu && run.options().all_configs && generic_shared_bytes(stream) == 0) {
    const auto call = [&] { return Call{values, scales, weight(), y, options, stream}; };
    if (is_skinny(call())) {
      for (const int rows : {16, 32}) {
        SkinnyKernel kernel = skinny_kernel(call(), device_info(device).units, 0);
        kernel.tile.stages = std::min(12, kernel.tile.stages * kernel.tile.rows / rows);
        kernel.tile.rows = rows;
        contenders.push_back({describe(kernel.tile), [=, &products] {
                                for (std::size_t i = 0; i < products; ++i) run_skinny(call(), kernel);
                              }});
      }
    } else if (is_wide(call())) {
      for (const WideTile& tile : kWideTiles)
        contenders.push_back({describe(tile), [=, &products] {
                                for (std::size_t i = 0; i < products; ++i) run_wide(call(), tile);
                              }});
    }
  }
  for (const Contender& c : contenders) c.launch();
  stream.synchronize();
  const Mode mode = on_gpu ? Mode::graph : Mode::hot;
  const std::vector<Timing> times = measure(mode, contenders, stream, run.effort(mode));
  Record record;
  record.family = "bitnet";
  record.case_name = name;
  record.dtype = dtype;
  record.mode = mode;
  record.unit = few ? "GB/s" : "TFLOP/s";
  const double operations = 2.0 * static_cast<double>(m) * static_cast<double>(layer.n) * static_cast<double>(layer.k);
  record.work = few ? bytes * static_cast<double>(products) * 1e-9 : operations * static_cast<double>(products) * 1e-12;
  record.ours = times[0];
  record.peer = "gemm i8";
  record.peer_time = times[1];
  if (few) record.limit = run.read_bandwidth() * 1e-9;
  run.add(record);
  for (std::size_t i = 2; i < contenders.size(); ++i)
    tw::print(run.options().table, "  {:<24} {:<40} {:8.2f} us a product\n", name, contenders[i].name,
              times[i].median * 1e3 / static_cast<double>(products));
}

const Family family{"bitnet", "8-bit integers times ternary weights: a read of W's bytes, and products of i8", [](Run& run) {
                      run_memory_ops(run, "bitnet", {activations_op()});
                      for (const TernaryLayer& layer : kTernaryLayers) {
                        if (!run.options().device.is_cuda() && layer.n > 10000) continue;  // seconds for each product
                        for (const std::int64_t m : {1, 8, 16, 64, 4096})
                          if (run.options().device.is_cuda() || m < 4096) run_ternary_layer(run, m, layer);
                      }
                    }};

}  // namespace
}  // namespace tw::kernels::bitnet

// `tilewave bench moe`: whole layers against their grouped products alone, and the pieces around them.

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/harness.hpp"
#include "benchmarks/memory_bound.hpp"
#include "kernels/dequant_gemm/grouped.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tilewave/cast_fp8.hpp"
#include "tilewave/grouped_gemm.hpp"
#include "tilewave/moe.hpp"
#include "tilewave/quantized.hpp"

namespace tw::kernels::moe {
namespace {

using namespace tw::bench;

struct Model {
  const char* name;
  int experts, k;
  std::int64_t hidden, inner;
  MoeRouteOptions route;
};
const Model kDeepSeek{"deepseek-v3",
                      256,
                      8,
                      7168,
                      2048,
                      {.score = MoeScore::sigmoid,
                       .groups = 8,
                       .groups_taken = 4,
                       .group_score = MoeGroupScore::sum_of_two,
                       .renormalise = true,
                       .scale = 2.5f}};
const Model kGpuModels[] = {
    kDeepSeek, {"mixtral-8x7b", 8, 2, 4096, 14336, {.renormalise = true}}, {"qwen3-30b-a3b", 128, 8, 2048, 768, {.renormalise = true}}};
const Model kGptOss{"gpt-oss-120b", 128, 4, 2880, 2880, {.renormalise = true}};
const Model kCpuModels[] = {{"small", 16, 4, 512, 256, {.renormalise = true}}};

/// [count, rows, cols] of the same random numbers for each of the count.
Tensor repeated(std::int64_t count, std::int64_t rows, std::int64_t cols, const Stream& stream) {
  const Tensor one = random_normal({rows, cols}, DType::bf16, stream.device(), 1);
  const Tensor all = Tensor::empty({count, rows, cols}, DType::bf16, stream);
  for (std::int64_t i = 0; i < count; ++i) all.select(0, i).copy_from(one);
  return all;
}

/// Weights of fp8_e4m3 with scales of blocks, [experts, rows, cols], the same for each expert.
struct Fp8Weights {
  Fp8Weights(std::int64_t experts, std::int64_t rows, std::int64_t cols, const Stream& stream)
      : values(Tensor::empty({experts, rows, cols}, DType::fp8_e4m3, stream)),
        scales(Tensor::empty({experts, rows / 128, cols / 128}, DType::f32, stream)) {
    const Tensor one = random_normal({rows, cols}, DType::bf16, stream.device(), 1);
    for (std::int64_t e = 0; e < experts; ++e) cast_fp8_blocks(one, values.select(0, e), scales.select(0, e), {.stream = stream});
    stream.synchronize();
  }
  Tensor values, scales;
};

/// Weights of mxfp4, [experts, rows, cols], the same for each expert.
struct PackedWeights {
  PackedWeights(std::int64_t experts, std::int64_t rows, std::int64_t cols, const Stream& stream) {
    const QuantizedMatrix one = quantize(random_normal({rows, cols}, DType::f32, Device::cpu(), 1), {WeightFormat::mxfp4});
    all = QuantizedMatrix::allocate(experts * rows, cols, {WeightFormat::mxfp4}, stream);
    for (std::int64_t e = 0; e < experts; ++e) {
      const QuantizedMatrix own = all.slice(e * rows, (e + 1) * rows);
      own.values.copy_from(one.values), own.scales.copy_from(one.scales);
    }
    values = all.values.reshape({experts, rows, cols / 2}), scales = all.scales.reshape({experts, rows, cols / 32});
  }
  QuantizedMatrix all;
  Tensor values, scales;
};

/// Tokens that are routed by random logits.
struct Routing {
  Routing(const Model& model, std::int64_t tokens, const Stream& stream, std::uint64_t seed = 2)
      : logits(random_normal({tokens, model.experts}, DType::f32, stream.device(), seed)),
        weights(Tensor::poisoned({tokens, model.k}, DType::f32, stream)),
        experts(Tensor::poisoned({tokens, model.k}, DType::i32, stream)),
        offsets(Tensor::poisoned({model.experts + 1}, DType::i32, stream)),
        rows(Tensor::poisoned({tokens * model.k}, DType::i32, stream)),
        places(Tensor::poisoned({tokens, model.k}, DType::i32, stream)) {
    MoeRouteOptions route = model.route;
    route.stream = stream;
    moe_route(logits, weights, experts, route);
    moe_permutation(experts, model.experts, offsets, rows, places, {.stream = stream});
    stream.synchronize();
  }
  /// How many experts have tokens.
  std::int64_t touched() const {
    const Tensor host = experts.to(Device::cpu());
    const auto* const first = host.data<std::int32_t>();
    return static_cast<std::int64_t>(std::set<std::int32_t>(first, first + host.numel()).size());
  }
  Tensor logits, weights, experts, offsets, rows, places;
};

/// Measures a layer with `rows` assignments against its products alone. `element`: bytes of an element of a weight.
void add_layer(Run& run, const Model& model, const std::string& name, DType dtype, double element, std::int64_t rows, std::int64_t touched,
               const std::vector<Contender>& contenders) {
  const bool on_gpu = run.stream().device().is_cuda();
  for (const Contender& contender : contenders) contender.launch();
  run.stream().synchronize();
  const double weight = 3.0 * static_cast<double>(model.hidden) * static_cast<double>(model.inner);
  const double flops = 2 * static_cast<double>(rows) * weight;
  const double bytes = element * static_cast<double>(touched) * weight;
  const bool by_bytes = on_gpu && flops < 300 * bytes;  // an H200 computes about 200 FLOP while it reads a byte; of fp8 400
  const Mode mode = on_gpu && flops < 3e11 ? Mode::graph : Mode::hot;
  const std::vector<Timing> times = measure(mode, contenders, run.stream(), run.effort(mode));
  Record record;
  record.family = "moe";
  record.case_name = name;
  record.dtype = dtype;
  record.mode = mode;
  record.unit = by_bytes ? "GB/s" : on_gpu ? "TFLOP/s" : "GFLOP/s";
  record.work = by_bytes ? bytes * 1e-9 : flops * (on_gpu ? 1e-12 : 1e-9);
  record.ours = times[0];
  record.peer = "its products";
  record.peer_time = times[1];
  if (by_bytes) record.limit = run.read_bandwidth() * 1e-9;
  run.add(record);
  for (std::size_t i = 2; i < contenders.size(); ++i) {
    record.ours = times[i];
    record.config = contenders[i].name;
    run.add(record);
  }
}

void run_layers(Run& run, const Model& model, const std::vector<std::int64_t>& sizes) {
  const Stream& stream = run.stream();
  Tensor w_gate_up, w_down;
  for (const std::int64_t tokens : sizes) {
    const std::string name = tw::format("{}-{}", model.name, tokens);
    if (!run.wants("moe", name, DType::bf16)) continue;
    if (w_down.numel() == 0) {
      w_gate_up = repeated(model.experts, 2 * model.inner, model.hidden, stream);
      w_down = repeated(model.experts, model.hidden, model.inner, stream);
    }
    const Routing routing(model, tokens, stream);
    const std::int64_t rows = tokens * model.k;
    const Tensor x = random_normal({tokens, model.hidden}, DType::bf16, stream.device(), 3);
    const Tensor out = Tensor::poisoned({tokens, model.hidden}, DType::bf16, stream);
    const Tensor sorted = random_normal({rows, model.hidden}, DType::bf16, stream.device(), 4);
    const Tensor gated = Tensor::poisoned({rows, model.inner}, DType::bf16, stream);
    const Tensor results = Tensor::poisoned({rows, model.hidden}, DType::bf16, stream);
    add_layer(
        run, model, name, DType::bf16, 2, rows, routing.touched(),
        {{"tilewave", [&] { fused_moe(x, routing.logits, model.k, w_gate_up, w_down, out, {.route = model.route, .stream = stream}); }},
         {"its products", [&] {
            tw::grouped_gemm(sorted, w_gate_up.transpose(1, 2), routing.offsets, gated,
                             {.activation = Activation::swiglu, .stream = stream});
            tw::grouped_gemm(gated, w_down.transpose(1, 2), routing.offsets, results, {.stream = stream});
          }}});
  }
}

/// The same with weights of fp8_e4m3.
void run_fp8_layers(Run& run, const Model& model, const std::vector<std::int64_t>& sizes) {
  const Stream& stream = run.stream();
  std::optional<Fp8Weights> gate_up, down;
  for (const std::int64_t tokens : sizes) {
    const std::string name = tw::format("{}-{}", model.name, tokens);
    if (!run.wants("moe", name, DType::fp8_e4m3)) continue;
    if (!down) {
      gate_up.emplace(model.experts, 2 * model.inner, model.hidden, stream);
      down.emplace(model.experts, model.hidden, model.inner, stream);
    }
    const Routing routing(model, tokens, stream);
    const std::int64_t rows = tokens * model.k;
    const Tensor x = random_normal({tokens, model.hidden}, DType::bf16, stream.device(), 3);
    const Tensor out = Tensor::poisoned({tokens, model.hidden}, DType::bf16, stream);
    const auto cast = [&](std::int64_t cols) {
      const Tensor y = Tensor::empty({rows, cols}, DType::fp8_e4m3, stream), scales = column_major_scales(rows, cols / 128, 0, stream);
      tw::cast_fp8(random_normal({rows, cols}, DType::bf16, stream.device(), 4), y, scales, {.stream = stream});
      stream.synchronize();
      return std::pair{y, scales};
    };
    const auto [sorted, sorted_scales] = cast(model.hidden);
    const auto [gated, gated_scales] = cast(model.inner);
    const Tensor both = Tensor::poisoned({rows, 2 * model.inner}, DType::bf16, stream);
    const Tensor results = Tensor::poisoned({rows, model.hidden}, DType::bf16, stream);
    const Tensor gate_up_scales = gate_up->scales.transpose(1, 2), down_scales = down->scales.transpose(1, 2);
    const MoeExpertsOptions experts{.gate_up_scale = &gate_up->scales, .down_scale = &down->scales};
    const GroupedGemmOptions first{.a_scale = &sorted_scales, .b_scale = &gate_up_scales, .stream = stream};
    const GroupedGemmOptions second{.a_scale = &gated_scales, .b_scale = &down_scales, .stream = stream};
    const Tensor &a = sorted, &b = gated;  // not the structured bindings, which clang does not capture
    add_layer(run, model, name, DType::fp8_e4m3, 1, rows, routing.touched(),
              {{"tilewave",
                [&] {
                  fused_moe(x, routing.logits, model.k, gate_up->values, down->values, out,
                            {.route = model.route, .experts = experts, .stream = stream});
                }},
               {"its products", [&] {
                  tw::grouped_gemm(a, gate_up->values.transpose(1, 2), routing.offsets, both, first);
                  tw::grouped_gemm(b, down->values.transpose(1, 2), routing.offsets, results, second);
                }}});
  }
}

/// The same with weights of mxfp4. With --all-configs, also the products with every tile.
void run_packed_layers(Run& run, const Model& model, const std::vector<std::int64_t>& sizes) {
  const Stream& stream = run.stream();
  std::optional<PackedWeights> gate_up, down;
  for (const std::int64_t tokens : sizes) {
    const std::string name = tw::format("{}-mxfp4-{}", model.name, tokens);
    if (!run.wants("moe", name, DType::bf16)) continue;
    if (!down) {
      gate_up.emplace(model.experts, 2 * model.inner, model.hidden, stream);
      down.emplace(model.experts, model.hidden, model.inner, stream);
    }
    // The experts of one token may fit the cache, so launches take others in turn.
    std::vector<Routing> routings;
    for (std::uint64_t seed = 2; seed < (tokens == 1 ? 7u : 3u); ++seed) routings.emplace_back(model, tokens, stream, seed);
    std::size_t next = 0;
    const auto routing = [&]() -> const Routing& { return routings[next++ % routings.size()]; };
    const std::int64_t rows = tokens * model.k;
    const Tensor x = random_normal({tokens, model.hidden}, DType::bf16, stream.device(), 3);
    const Tensor out = Tensor::poisoned({tokens, model.hidden}, DType::bf16, stream);
    const Tensor sorted = random_normal({rows, model.hidden}, DType::bf16, stream.device(), 4);
    const Tensor gated = random_normal({rows, model.inner}, DType::bf16, stream.device(), 5);
    const Tensor both = Tensor::poisoned({rows, 2 * model.inner}, DType::bf16, stream);
    const Tensor results = Tensor::poisoned({rows, model.hidden}, DType::bf16, stream);
    const MoeExpertsOptions experts{.gate_up_scale = &gate_up->scales, .down_scale = &down->scales};
    const auto multiply = [&](const dequant_gemm::GroupedProducts& products) {
      products.multiply(sorted, gate_up->all, both);
      products.multiply(gated, down->all, results);
    };
    std::vector<Contender> contenders{{"tilewave",
                                       [&] {
                                         fused_moe(x, routing().logits, model.k, gate_up->values, down->values, out,
                                                   {.route = model.route, .experts = experts, .stream = stream});
                                       }},
                                      {"its products", [&] { multiply(dequant_gemm::GroupedProducts(routing().offsets, rows, stream)); }}};
    if (run.options().all_configs && stream.device().is_cuda() && generic_shared_bytes(stream) == 0) {
      for (const dequant_gemm::GroupedTile& tile : dequant_gemm::grouped_tiles())
        contenders.push_back({"products, " + dequant_gemm::describe(tile),
                              [&, tile] { multiply(dequant_gemm::GroupedProducts(routing().offsets, rows, tile, stream)); }});
    }
    add_layer(run, model, name, DType::bf16, 4.25 / 8, rows, routings.front().touched(), contenders);
  }
}

/// The pieces around the products, as run_small() shows them.
void run_pieces(Run& run, const Model& model, std::int64_t tokens) {
  const Stream& stream = run.stream();
  const auto add = [&](const char* what, DType dtype, double bytes, std::function<void()> launch) {
    MemoryCase c;
    c.family = "moe";
    c.case_name = tw::format("{}-{}", what, tokens);
    c.dtype = dtype;
    c.bytes = bytes;
    c.launch = std::move(launch);
    if (run.wants(c.family, c.case_name, dtype)) run_small(run, c);
  };
  const Routing r(model, tokens, stream);
  MoeRouteOptions route = model.route;
  route.stream = stream;
  const Tensor x = random_normal({tokens, model.hidden}, DType::bf16, stream.device(), 3);
  const Tensor out = Tensor::poisoned({tokens, model.hidden}, DType::bf16, stream);
  const Tensor sorted = Tensor::poisoned({tokens * model.k, model.hidden}, DType::bf16, stream);
  add("route", DType::f32, bytes_of({r.logits, r.weights, r.experts}), [=] { moe_route(r.logits, r.weights, r.experts, route); });
  add("permutation", DType::i32, bytes_of({r.experts, r.offsets, r.rows, r.places}),
      [=, n = model.experts] { moe_permutation(r.experts, n, r.offsets, r.rows, r.places, {.stream = stream}); });
  add("dispatch", DType::bf16, bytes_of({x, r.places, sorted}), [=] { moe_dispatch(x, r.places, sorted, {.stream = stream}); });
  const Tensor cast = Tensor::poisoned(sorted.shape(), DType::fp8_e4m3, stream);
  const Tensor scales = column_major_scales(cast.shape(0), model.hidden / 128, 0, stream);
  add("dispatch", DType::fp8_e4m3, bytes_of({x, r.places, cast, scales}),
      [=] { moe_dispatch(x, r.places, cast, {.scales = &scales, .stream = stream}); });
  add("combine", DType::bf16, bytes_of({sorted, r.places, r.weights, out}),
      [=] { moe_combine(sorted, r.places, r.weights, out, {.stream = stream}); });
}

const Family family{"moe", "mixture-of-experts layers against their grouped products, and the pieces around these", [](Run& run) {
                      if (!run.options().device.is_cuda()) {
                        for (const Model& model : kCpuModels) {
                          run_layers(run, model, {1, 64});
                          run_fp8_layers(run, model, {1, 64});
                          run_packed_layers(run, model, {1, 64});
                          run_pieces(run, model, 64);
                        }
                        return;
                      }
                      for (const Model& model : kGpuModels) run_layers(run, model, {1, 16, 128, 4096});
                      run_fp8_layers(run, kDeepSeek, {1, 16, 128, 4096});
                      run_packed_layers(run, kDeepSeek, {1, 2, 16, 128, 4096});
                      run_packed_layers(run, kGptOss, {1, 4, 16, 128, 1024, 4096});
                      for (const std::int64_t tokens : {1, 128, 512, 4096}) run_pieces(run, kDeepSeek, tokens);
                    }};

}  // namespace
}  // namespace tw::kernels::moe

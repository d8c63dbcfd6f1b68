// `tilewave bench moe`: whole layers against their grouped products alone, and the pieces around them.

#include <cstdint>
#include <set>
#include <vector>

#include "benchmarks/harness.hpp"
#include "benchmarks/memory_bound.hpp"
#include "runtime/format.hpp"
#include "tilewave/grouped_gemm.hpp"
#include "tilewave/moe.hpp"

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
const Model kCpuModels[] = {{"small", 16, 4, 512, 256, {.renormalise = true}}};

/// [count, rows, cols] of the same random numbers for each of the count.
Tensor repeated(std::int64_t count, std::int64_t rows, std::int64_t cols, const Stream& stream) {
  const Tensor one = random_normal({rows, cols}, DType::bf16, stream.device(), 1);
  const Tensor all = Tensor::empty({count, rows, cols}, DType::bf16, stream);
  for (std::int64_t i = 0; i < count; ++i) all.select(0, i).copy_from(one);
  return all;
}

/// Tokens that are routed by random logits.
struct Routing {
  Routing(const Model& model, std::int64_t tokens, const Stream& stream)
      : logits(random_normal({tokens, model.experts}, DType::f32, stream.device(), 2)),
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

void run_layers(Run& run, const Model& model, const std::vector<std::int64_t>& sizes) {
  const Stream& stream = run.stream();
  const Device device = stream.device();
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
    const Tensor x = random_normal({tokens, model.hidden}, DType::bf16, device, 3);
    const Tensor out = Tensor::poisoned({tokens, model.hidden}, DType::bf16, stream);
    const Tensor sorted = random_normal({rows, model.hidden}, DType::bf16, device, 4);
    const Tensor gated = Tensor::poisoned({rows, model.inner}, DType::bf16, stream);
    const Tensor results = Tensor::poisoned({rows, model.hidden}, DType::bf16, stream);
    const std::vector<Contender> contenders = {
        {"tilewave", [&] { fused_moe(x, routing.logits, model.k, w_gate_up, w_down, out, {.route = model.route, .stream = stream}); }},
        {"its products", [&] {
           grouped_gemm(sorted, w_gate_up.transpose(1, 2), routing.offsets, gated, {.activation = Activation::swiglu, .stream = stream});
           grouped_gemm(gated, w_down.transpose(1, 2), routing.offsets, results, {.stream = stream});
         }}};
    for (const Contender& contender : contenders) contender.launch();
    stream.synchronize();
    const double weight = 3.0 * static_cast<double>(model.hidden) * static_cast<double>(model.inner);
    const double flops = 2 * static_cast<double>(rows) * weight, bytes = 2 * static_cast<double>(routing.touched()) * weight;
    const bool by_bytes = device.is_cuda() && flops < 300 * bytes;  // an H200 computes about 200 FLOP while it reads a byte
    const Mode mode = device.is_cuda() && flops < 3e11 ? Mode::graph : Mode::hot;
    const std::vector<Timing> times = measure(mode, contenders, stream, run.effort(mode));
    Record record;
    record.family = "moe";
    record.case_name = name;
    record.dtype = DType::bf16;
    record.mode = mode;
    record.unit = by_bytes ? "GB/s" : device.is_cuda() ? "TFLOP/s" : "GFLOP/s";
    record.work = by_bytes ? bytes * 1e-9 : flops * (device.is_cuda() ? 1e-12 : 1e-9);
    record.ours = times[0];
    record.peer = "its products";
    record.peer_time = times[1];
    if (by_bytes) record.limit = run.read_bandwidth() * 1e-9;
    run.add(record);
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
  add("combine", DType::bf16, bytes_of({sorted, r.places, r.weights, out}),
      [=] { moe_combine(sorted, r.places, r.weights, out, {.stream = stream}); });
}

const Family family{"moe", "mixture-of-experts layers against their grouped products, and the pieces around these", [](Run& run) {
                      if (!run.options().device.is_cuda()) {
                        for (const Model& model : kCpuModels) {
                          run_layers(run, model, {1, 64});
                          run_pieces(run, model, 64);
                        }
                        return;
                      }
                      for (const Model& model : kGpuModels) run_layers(run, model, {1, 16, 128, 4096});
                      for (const std::int64_t tokens : {1, 128, 512, 4096}) run_pieces(run, kDeepSeek, tokens);
                    }};

}  // namespace
}  // namespace tw::kernels::moe

// `tilewave bench attention-backward`: the gradients of prefill against what the hardware allows.

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "benchmarks/harness.hpp"
#include "benchmarks/yardsticks.hpp"
#include "kernels/attention/blocks_bench.hpp"
#include "runtime/format.hpp"
#include "tilewave/attention.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::bench;

constexpr const char* kBackward = "attention-backward";

struct BackwardCase {
  std::int64_t head_dim, seqlen, batch, heads;
  bool causal;
  bool deterministic = false;

  std::string name() const {
    return tw::format("d{}-s{}-{}{}", head_dim, seqlen, causal ? "causal" : "full", deterministic ? "-deterministic" : "");
  }
  /// Five products where the forward pass has two, and half of all when causal, as the FlashAttention papers count.
  double flops() const {
    const double forward = 4.0 * static_cast<double>(batch * heads * head_dim) * static_cast<double>(seqlen) * static_cast<double>(seqlen);
    return 2.5 * forward * (causal ? 0.5 : 1.0);
  }
};

/// Measures `launch`, which does `flops`.
void record_backward(Run& run, const std::string& name, double flops, DType dtype, std::initializer_list<Mode> modes,
                     const std::string& unit, double limit, const std::function<void()>& launch) {
  for (const Mode mode : modes) {
    Record record;
    record.family = kBackward;
    record.case_name = name;
    record.dtype = dtype;
    record.mode = mode;
    record.unit = unit;
    record.work = flops * (unit == "TFLOP/s" ? 1e-12 : 1e-9);
    record.ours = measure(mode, {{"tilewave", launch}}, run.stream(), run.effort(mode)).front();
    record.limit = limit;
    run.add(record);
  }
}

void run_backward(Run& run, const BackwardCase& c, DType dtype, std::initializer_list<Mode> modes, const std::string& unit, double limit) {
  if (!run.wants(kBackward, c.name(), dtype)) return;
  const Stream& stream = run.stream();
  const Shape shape = {c.batch, c.seqlen, c.heads, c.head_dim};
  const auto operand = [&](std::uint64_t seed) { return random_normal(shape, dtype, stream.device(), seed); };
  const auto output = [&] { return Tensor::poisoned(shape, dtype, stream); };
  const Tensor q = operand(1), k = operand(2), v = operand(3), d_o = operand(4), o = output(), dq = output(), dk = output(), dv = output();
  const Tensor lse = Tensor::poisoned({c.batch, c.heads, c.seqlen}, DType::f32, stream);
  const AttentionOptions options{.causal = c.causal, .lse = &lse, .stream = stream};
  tw::attention(q, k, v, o, options);
  record_backward(run, c.name(), c.flops(), dtype, modes, unit, limit,
                  [&] { attention_backward(q, k, v, o, lse, d_o, dq, dk, dv, {.forward = options, .deterministic = c.deterministic}); });
}

/// Packed sequences of these lengths, as many queries as keys.
struct PackedCase {
  std::int64_t head_dim, heads;
  std::vector<std::int32_t> lengths;
  bool causal;

  std::string name() const { return tw::format("d{}-varlen-{}", head_dim, causal ? "causal" : "full"); }
  double flops() const {
    double pairs = 0;
    for (const std::int32_t n : lengths) pairs += static_cast<double>(n) * n;
    return 2.5 * 4.0 * static_cast<double>(heads * head_dim) * pairs * (causal ? 0.5 : 1.0);
  }
};

void run_packed(Run& run, const PackedCase& c, DType dtype, std::initializer_list<Mode> modes, const std::string& unit, double limit) {
  if (!run.wants(kBackward, c.name(), dtype)) return;
  const Stream& stream = run.stream();
  std::vector<std::int32_t> offsets(c.lengths.size() + 1);
  std::partial_sum(c.lengths.begin(), c.lengths.end(), offsets.begin() + 1);
  const Tensor host = Tensor::empty({static_cast<std::int64_t>(offsets.size())}, DType::i32);
  std::copy(offsets.begin(), offsets.end(), host.data<std::int32_t>());
  const Tensor cu_seqlens = host.to(stream.device());
  const Shape shape = {offsets.back(), c.heads, c.head_dim};
  const auto operand = [&](std::uint64_t seed) { return random_normal(shape, dtype, stream.device(), seed); };
  const auto output = [&] { return Tensor::poisoned(shape, dtype, stream); };
  const Tensor q = operand(1), k = operand(2), v = operand(3), d_o = operand(4), o = output(), dq = output(), dk = output(), dv = output();
  const Tensor lse = Tensor::poisoned({c.heads, offsets.back()}, DType::f32, stream);
  const AttentionOptions options{.causal = c.causal, .lse = &lse, .stream = stream};
  const PackedSequences sequences{cu_seqlens, cu_seqlens};
  attention_varlen(q, k, v, o, sequences, options);
  record_backward(run, c.name(), c.flops(), dtype, modes, unit, limit,
                  [&] { attention_varlen_backward(q, k, v, o, lse, d_o, dq, dk, dv, sequences, {.forward = options}); });
}

/// With the gradient of a mask in f32, which all heads share or each head has for itself: two more products.
void run_backward_mask(Run& run, const BackwardCase& c, bool shared, DType dtype, std::initializer_list<Mode> modes,
                       const std::string& unit, double limit) {
  const std::string name = tw::format("{}-dmask-{}", c.name(), shared ? "shared" : "by-head");
  if (!run.wants(kBackward, name, dtype)) return;
  const Stream& stream = run.stream();
  const Shape shape = {c.batch, c.seqlen, c.heads, c.head_dim}, of_mask = {1, shared ? 1 : c.heads, c.seqlen, c.seqlen};
  const auto operand = [&](std::uint64_t seed) { return random_normal(shape, dtype, stream.device(), seed); };
  const auto output = [&] { return Tensor::poisoned(shape, dtype, stream); };
  const Tensor q = operand(1), k = operand(2), v = operand(3), d_o = operand(4), o = output(), dq = output(), dk = output(), dv = output();
  const Tensor lse = Tensor::poisoned({c.batch, c.heads, c.seqlen}, DType::f32, stream);
  const Tensor mask = random_normal(of_mask, DType::f32, stream.device(), 5), d_mask = Tensor::poisoned(of_mask, DType::f32, stream);
  const AttentionOptions options{.causal = c.causal, .mask = &mask, .lse = &lse, .stream = stream};
  tw::attention(q, k, v, o, options);
  record_backward(run, name, c.flops() * 3.5 / 2.5, dtype, modes, unit, limit, [&] {
    attention_backward(q, k, v, o, lse, d_o, dq, dk, dv, {.forward = options, .d_mask = &d_mask, .deterministic = c.deterministic});
  });
}

/// A share of all blocks of 128 x 128 keys and queries, against the dense call: the time should fall with the share.
void run_backward_blocks(Run& run, double density, bool causal, bool deterministic) {
  constexpr std::int64_t kSeqlen = 16384, kHeads = 16, kHeadDim = 128, kBlock = 128;
  const std::string name = tw::format("blocks-d{}-s{}-density{:g}-{}{}", kHeadDim, kSeqlen, density, causal ? "causal" : "full",
                                      deterministic ? "-deterministic" : "");
  const DType dtype = DType::bf16;
  if (!run.wants(kBackward, name, dtype)) return;
  const Stream& stream = run.stream();
  const Shape shape = {1, kSeqlen, kHeads, kHeadDim};
  const auto operand = [&](std::uint64_t seed) { return random_normal(shape, dtype, stream.device(), seed); };
  const auto output = [&] { return Tensor::poisoned(shape, dtype, stream); };
  const Tensor q = operand(1), k = operand(2), v = operand(3), d_o = operand(4), o = output(), dq = output(), dk = output(), dv = output();
  const Tensor lse = Tensor::poisoned({1, kHeads, kSeqlen}, DType::f32, stream);
  const std::int64_t count = kSeqlen / kBlock;
  const RandomBlocks chosen = random_blocks(1, kHeads, count, count, density, causal, stream.device(), 5);
  const AttentionBlocks blocks{.mask = &chosen.mask, .query_block = kBlock, .key_block = kBlock};
  const AttentionOptions options{.causal = causal, .blocks = &blocks, .lse = &lse, .stream = stream};
  tw::attention(q, k, v, o, options);
  const Tensor dense_o = output(), dense_lse = Tensor::poisoned(lse.shape(), DType::f32, stream);
  const AttentionOptions dense{.causal = causal, .lse = &dense_lse, .stream = stream};
  tw::attention(q, k, v, dense_o, dense);
  const auto limits = run.options().list ? std::optional<GpuLimits>() : gpu_limits(device_info(run.options().device).name);
  const auto gradients = [&](const Tensor& out, const Tensor& sums, const AttentionOptions& forward) {
    return [&] { attention_backward(q, k, v, out, sums, d_o, dq, dk, dv, {.forward = forward, .deterministic = deterministic}); };
  };
  for (const Mode mode : {Mode::hot, Mode::cool}) {
    Record record;
    record.family = kBackward;
    record.case_name = name;
    record.dtype = dtype;
    record.mode = mode;
    record.unit = "TFLOP/s";
    record.work = chosen.selected * 10e-12 * static_cast<double>(kBlock * kBlock * kHeadDim);
    const auto timings = measure(mode, {{"tilewave", gradients(o, lse, options)}, {"dense", gradients(dense_o, dense_lse, dense)}}, stream,
                                 run.effort(mode));
    record.ours = timings[0];
    record.peer = "dense attention";
    record.peer_time = timings[1];
    record.limit = limits ? limits->bf16_tflops : 0;
    run.add(record);
  }
}

void backward_on_gpu(Run& run) {
  const auto limits = run.options().list ? std::optional<GpuLimits>() : gpu_limits(device_info(run.options().device).name);
  const double limit = limits ? limits->bf16_tflops : 0;
  for (const std::int64_t head_dim : {128, 64, 256}) {
    for (const std::int64_t seqlen : {2048, 4096, 16384}) {
      for (const bool causal : {false, true})
        for (const bool deterministic : {false, true}) {
          if (deterministic && head_dim > 128) continue;  // dQ is never added up there
          run_backward(run, {head_dim, seqlen, 16384 / seqlen, 2048 / head_dim, causal, deterministic}, DType::bf16,
                       {Mode::hot, Mode::cool}, "TFLOP/s", limit);
        }
    }
  }
  // 16384 tokens, as in benchmarks/attention_peer.py.
  const std::vector<std::int32_t> ragged = {985, 3001, 66, 512, 1777, 129, 2050, 333, 1408, 700, 2500, 192, 896, 300, 1023, 512};
  for (const std::int64_t head_dim : {128, 64})
    for (const bool causal : {false, true})
      run_packed(run, {head_dim, 2048 / head_dim, ragged, causal}, DType::bf16, {Mode::hot, Mode::cool}, "TFLOP/s", limit);
  for (const std::int64_t head_dim : {128, 64})
    for (const bool shared : {true, false})
      run_backward_mask(run, {head_dim, 4096, 1, 16, false}, shared, DType::bf16, {Mode::hot, Mode::cool}, "TFLOP/s", limit);
  for (const double density : {1.0, 0.5, 0.25, 0.1})
    for (const bool causal : {false, true})
      for (const bool deterministic : {false, true}) run_backward_blocks(run, density, causal, deterministic);
}

void backward_on_cpu(Run& run) {
  const OneThread one;
  const double peak = run.options().list ? 0 : measure_fma_peak();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t head_dim : {64, 128}) {
      for (const bool causal : {false, true})
        run_backward(run, {head_dim, 1024, 1, 4, causal}, dtype, {Mode::one_thread}, "GFLOP/s", dtype == DType::f32 ? peak : 0);
      run_packed(run, {head_dim, 4, {61, 250, 8, 705}, true}, dtype, {Mode::one_thread}, "GFLOP/s", dtype == DType::f32 ? peak : 0);
      run_backward_mask(run, {head_dim, 1024, 1, 4, false}, true, dtype, {Mode::one_thread}, "GFLOP/s", dtype == DType::f32 ? peak : 0);
    }
  }
}

const Family backward_family{kBackward, "gradients of prefill, of what the hardware allows",
                             [](Run& run) { run.options().device.is_cuda() ? backward_on_gpu(run) : backward_on_cpu(run); }};

}  // namespace
}  // namespace tw::kernels::attention

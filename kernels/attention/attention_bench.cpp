// `tilewave bench attention`: prefill against what the hardware allows; on a GPU also decode against the bandwidth of a large read, and the
// host's time for a call; with --ladder what each idea buys. Against cuDNN, FlashAttention 2 and PyTorch's CPU code:
// benchmarks/attention_peer.py, attention_cpu_peer.py.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>

#include "benchmarks/harness.hpp"
#include "benchmarks/yardsticks.hpp"
#include "kernels/attention/blocks_bench.hpp"
#include "kernels/attention/ladder.hpp"
#include "runtime/format.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/elementwise.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::bench;

/// Of the run's GPU, in TFLOP/s; 0: unknown.
double bf16_limit(Run& run) {
  const auto limits = run.options().list ? std::optional<GpuLimits>() : gpu_limits(device_info(run.options().device).name);
  return limits ? limits->bf16_tflops : 0;
}
/// Products of 8-bit operands have twice the rate.
double fp8_limit(Run& run) { return 2 * bf16_limit(run); }

/// Random numbers of any dtype, e4m3 too.
Tensor random_values(const Shape& shape, DType dtype, const Stream& stream, std::uint64_t seed) {
  if (dtype != DType::fp8_e4m3) return random_normal(shape, dtype, stream.device(), seed);
  const Tensor x = random_normal(shape, DType::bf16, stream.device(), seed), y = Tensor::empty(shape, dtype, stream);
  cast(x, y, {.stream = stream});
  stream.synchronize();
  return y;
}

// --- Prefill

struct PrefillCase {
  std::int64_t head_dim, seqlen, batch, heads;
  bool causal;

  std::string name() const { return tw::format("d{}-s{}-{}", head_dim, seqlen, causal ? "causal" : "full"); }
  /// Half of all when causal, as the FlashAttention papers count.
  double flops() const {
    return (causal ? 2.0 : 4.0) * static_cast<double>(batch * heads * head_dim) * static_cast<double>(seqlen) * static_cast<double>(seqlen);
  }
};

void run_prefill(Run& run, const PrefillCase& c, DType dtype, std::initializer_list<Mode> modes, const std::string& unit, double limit) {
  if (!run.wants("attention", c.name(), dtype)) return;
  const Stream& stream = run.stream();
  const Shape shape = {c.batch, c.seqlen, c.heads, c.head_dim};
  const auto operand = [&](std::uint64_t seed) { return random_values(shape, dtype, stream, seed); };
  const Tensor q = operand(1), k = operand(2), v = operand(3);
  const Tensor o = Tensor::poisoned(shape, dtype == DType::fp8_e4m3 ? DType::bf16 : dtype, stream);
  const AttentionOptions options{.causal = c.causal, .stream = stream};
  for (const Mode mode : modes) {
    Record record;
    record.family = "attention";
    record.case_name = c.name();
    record.dtype = dtype;
    record.mode = mode;
    record.unit = unit;
    record.work = c.flops() * (unit == "TFLOP/s" ? 1e-12 : 1e-9);
    record.ours = measure(mode, {{"tilewave", [&] { tw::attention(q, k, v, o, options); }}}, stream, run.effort(mode)).front();
    record.limit = limit;
    run.add(record);
  }
}

// --- Decode

constexpr std::int64_t kCacheHeads = 32, kCacheKvHeads = 8, kCacheHeadDim = 128, kPage = 64;

/// The pages of `batch` sequences, in random order.
Tensor shuffled_pages(std::int64_t batch, std::int64_t pages_each, Device device) {
  const Tensor table = Tensor::empty({batch, pages_each}, DType::i32);
  auto* const pages = table.data<std::int32_t>();
  std::iota(pages, pages + table.numel(), 0);
  std::shuffle(pages, pages + table.numel(), std::mt19937(1));
  return table.to(device);
}

/// One query a sequence. So many caches take turns that none is in the L2 cache when its turn comes.
void run_decode(Run& run, std::int64_t batch, std::int64_t seqlen, bool paged) {
  const std::string name = tw::format("decode-b{}-{}k{}", batch, seqlen / 1024, paged ? tw::format("-paged{}", kPage) : std::string());
  const DType dtype = DType::bf16;
  if (!run.wants("attention", name, dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const std::int64_t pages_each = seqlen / kPage;
  const Shape cache_shape =
      paged ? Shape{batch * pages_each, kPage, kCacheKvHeads, kCacheHeadDim} : Shape{batch, seqlen, kCacheKvHeads, kCacheHeadDim};
  const double bytes = 2.0 * static_cast<double>(batch * seqlen * kCacheKvHeads * kCacheHeadDim) * static_cast<double>(size_of(dtype));
  struct Caches {
    Tensor k, v;
  };
  std::vector<Caches> caches(static_cast<std::size_t>(std::max(1.0, std::ceil(512e6 / bytes))));
  for (Caches& c : caches) c = {random_normal(cache_shape, dtype, device, 1), random_normal(cache_shape, dtype, device, 2)};
  const Shape shape = {batch, 1, kCacheHeads, kCacheHeadDim};
  const Tensor q = random_normal(shape, dtype, device, 3), o = Tensor::poisoned(shape, dtype, stream);
  const Tensor table = paged ? shuffled_pages(batch, pages_each, device) : Tensor();
  const Tensor host_seqlens = Tensor::empty({batch}, DType::i32);
  std::fill_n(host_seqlens.data<std::int32_t>(), batch, static_cast<std::int32_t>(seqlen));
  const Tensor seqlens = host_seqlens.to(device);
  const CacheOptions cache{.seqlens = &seqlens, .block_table = paged ? &table : nullptr};
  std::size_t next = 0;
  const auto launch = [&] {
    const Caches& c = caches[next++ % caches.size()];
    attention_decode(q, c.k, c.v, o, cache, {.stream = stream});
  };
  for (const Mode mode : {Mode::hot, Mode::graph}) {
    Record record;
    record.family = "attention";
    record.case_name = name;
    record.dtype = dtype;
    record.mode = mode;
    record.unit = "GB/s";
    record.work = bytes * 1e-9;
    record.ours = measure(mode, {{"tilewave", launch}}, stream, run.effort(mode)).front();
    record.limit = run.read_bandwidth() * 1e-9;
    run.add(record);
  }
}

// --- Blocks of keys

/// A share of all blocks of 128 x 128 keys and queries, against the dense call: the time should fall with the share.
void run_blocks(Run& run, double density, bool causal) {
  constexpr std::int64_t kBatch = 1, kSeqlen = 16384, kHeads = 16, kHeadDim = 128, kBlock = 128;
  const std::string name = tw::format("blocks-d{}-s{}-density{:g}-{}", kHeadDim, kSeqlen, density, causal ? "causal" : "full");
  const DType dtype = DType::bf16;
  if (!run.wants("attention", name, dtype)) return;
  const Stream& stream = run.stream();
  const Shape shape = {kBatch, kSeqlen, kHeads, kHeadDim};
  const auto operand = [&](std::uint64_t seed) { return random_normal(shape, dtype, stream.device(), seed); };
  const Tensor q = operand(1), k = operand(2), v = operand(3), o = Tensor::poisoned(shape, dtype, stream);
  const std::int64_t count = kSeqlen / kBlock;
  const RandomBlocks chosen = random_blocks(kBatch, kHeads, count, count, density, causal, stream.device(), 4);
  const AttentionBlocks blocks{.mask = &chosen.mask, .query_block = kBlock, .key_block = kBlock};
  for (const Mode mode : {Mode::hot, Mode::cool}) {
    Record record;
    record.family = "attention";
    record.case_name = name;
    record.dtype = dtype;
    record.mode = mode;
    record.unit = "TFLOP/s";
    record.work = chosen.selected * 4e-12 * static_cast<double>(kBlock * kBlock * kHeadDim);
    const auto timings = measure(mode,
                                 {{"tilewave", [&] { tw::attention(q, k, v, o, {.causal = causal, .blocks = &blocks, .stream = stream}); }},
                                  {"dense", [&] { tw::attention(q, k, v, o, {.causal = causal, .stream = stream}); }}},
                                 stream, run.effort(mode));
    record.ours = timings[0];
    record.peer = "dense attention";
    record.peer_time = timings[1];
    record.limit = bf16_limit(run);
    run.add(record);
  }
}

/// One query a sequence, which reads a tenth of its cache's blocks of 64 keys. Selections take turns, so that what they read is not in the
/// L2 cache.
void run_decode_blocks(Run& run, std::int64_t batch, bool paged, bool indices) {
  constexpr std::int64_t kSeqlen = 65536, kBlock = 64, kSelections = 4;
  constexpr double kDensity = 0.1;
  const std::string name = tw::format("decode-blocks-b{}-64k-density{:g}{}{}", batch, kDensity, paged ? tw::format("-paged{}", kPage) : "",
                                      indices ? "-indices" : "");
  const DType dtype = DType::bf16;
  if (!run.wants("attention", name, dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const std::int64_t pages_each = kSeqlen / kPage, count = kSeqlen / kBlock;
  const Shape cache_shape =
      paged ? Shape{batch * pages_each, kPage, kCacheKvHeads, kCacheHeadDim} : Shape{batch, kSeqlen, kCacheKvHeads, kCacheHeadDim};
  const Tensor k = random_normal(cache_shape, dtype, device, 1), v = random_normal(cache_shape, dtype, device, 2);
  const Shape shape = {batch, 1, kCacheHeads, kCacheHeadDim};
  const Tensor q = random_normal(shape, dtype, device, 3), o = Tensor::poisoned(shape, dtype, stream);
  const Tensor table = paged ? shuffled_pages(batch, pages_each, device) : Tensor();
  std::vector<Tensor> selections;
  double selected = 0;
  for (std::int64_t i = 0; i < kSelections; ++i) {
    const RandomBlocks chosen = random_blocks(batch, kCacheKvHeads, 1, count, kDensity, false, device, 4 + static_cast<std::uint64_t>(i));
    selected = chosen.selected;
    selections.push_back(indices ? indices_of(chosen.mask).to(device) : chosen.mask);
  }
  const CacheOptions cache{.block_table = paged ? &table : nullptr};
  std::size_t next = 0;
  const auto launch = [&] {
    const Tensor& selection = selections[next++ % selections.size()];
    const AttentionBlocks blocks{.mask = indices ? nullptr : &selection, .indices = indices ? &selection : nullptr, .key_block = kBlock};
    attention_decode(q, k, v, o, cache, {.blocks = &blocks, .stream = stream});
  };
  for (const Mode mode : {Mode::hot, Mode::graph}) {
    Record record;
    record.family = "attention";
    record.case_name = name;
    record.dtype = dtype;
    record.mode = mode;
    record.unit = "GB/s";
    record.work = 2e-9 * selected * static_cast<double>(kBlock * kCacheHeadDim) * static_cast<double>(size_of(dtype));
    record.ours = measure(mode, {{"tilewave", launch}}, stream, run.effort(mode)).front();
    record.limit = run.read_bandwidth() * 1e-9;
    run.add(record);
  }
}

// --- The host's time

/// Milliseconds of host time for a call that enqueues a tiny kernel: the mean over as many calls as a stream takes without waiting.
Timing host_time(const std::function<void()>& call, const Stream& stream, int samples) {
  constexpr int kCalls = 200;  // a stream holds about a thousand launches
  std::vector<double> times;
  for (int i = -1; i < samples; ++i) {  // the first one compiles, loads and fills caches
    stream.synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int k = 0; k < kCalls; ++k) call();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    if (i >= 0) times.push_back(time.count() / kCalls);
  }
  stream.synchronize();
  std::sort(times.begin(), times.end());
  const auto at = [&](double fraction) { return times[static_cast<std::size_t>(fraction * static_cast<double>(times.size() - 1))]; };
  return {at(0.5), at(0.1), at(0.9)};
}

/// A call of one small tile against the launch of a kernel that does nothing.
void run_host_time(Run& run, const std::string& name, const std::function<void()>& call) {
  const Stream& stream = run.stream();
  const int samples = run.effort(Mode::hot).samples;
  Record record;
  record.family = "attention";
  record.case_name = name;
  record.dtype = DType::bf16;
  record.mode = Mode::hot;
  record.unit = kMicroseconds;
  record.ours = host_time(call, stream, samples);
  record.peer = "empty kernel";
  record.peer_time = host_time(empty_kernel(stream).launch, stream, samples);
  run.add(record);
}

void run_host_times(Run& run) {
  const Stream& stream = run.stream();
  constexpr std::int64_t kSeqlen = 128;
  const auto small = [&](std::int64_t seqlen, std::uint64_t seed) {
    return random_normal({1, seqlen, 1, 128}, DType::bf16, stream.device(), seed);
  };
  if (run.wants("attention", "host-time-prefill", DType::bf16)) {
    const Tensor q = small(kSeqlen, 1), k = small(kSeqlen, 2), v = small(kSeqlen, 3), o = small(kSeqlen, 4);
    const AttentionOptions options{.causal = true, .stream = stream};
    run_host_time(run, "host-time-prefill", [&] { tw::attention(q, k, v, o, options); });
  }
  if (run.wants("attention", "host-time-decode", DType::bf16)) {
    const Tensor q = small(1, 1), k = small(kSeqlen, 2), v = small(kSeqlen, 3), o = small(1, 4);
    const AttentionOptions options{.stream = stream};
    run_host_time(run, "host-time-decode", [&] { attention_decode(q, k, v, o, {}, options); });
  }
}

// --- The ladder

/// All rungs, which take turns; the peer of each is the one before it.
void run_ladder_case(Run& run, const PrefillCase& c, DType dtype, std::initializer_list<Mode> modes, const std::string& unit,
                     double limit) {
  std::vector<Rung> rungs;
  std::vector<std::string> names;
  for (const Rung& rung : ladder()) {
    names.push_back(tw::format("ladder-{}-{}-{}", &rung - ladder().data() + 1, rung.name, c.causal ? "causal" : "full"));
    if (run.wants("attention", names.back(), dtype))
      rungs.push_back(rung);
    else
      names.pop_back();
  }
  if (rungs.empty()) return;
  const Shape shape = {c.batch, c.heads, c.seqlen, c.head_dim};
  const Stream& stream = run.stream();
  const auto operand = [&](std::uint64_t seed) { return random_normal(shape, dtype, stream.device(), seed); };
  const LadderCall call{.q = operand(1),
                        .k = operand(2),
                        .v = operand(3),
                        .o = Tensor::poisoned(shape, dtype, stream),
                        .scores = Tensor::empty({c.batch * c.heads, c.seqlen, c.seqlen}, dtype, stream),
                        .causal = c.causal,
                        .stream = stream};
  std::vector<Contender> contenders;
  for (const Rung& rung : rungs) contenders.push_back({rung.name, [&call, &rung] { rung.run(call); }});
  for (const Mode mode : modes) {
    const std::vector<Timing> times = measure(mode, contenders, stream, run.effort(mode));
    for (std::size_t i = 0; i < rungs.size(); ++i) {
      Record record;
      record.family = "attention";
      record.group = "ladder";
      record.case_name = names[i];
      record.dtype = dtype;
      record.mode = mode;
      record.unit = unit;
      record.work = c.flops() * (unit == "TFLOP/s" ? 1e-12 : 1e-9);
      record.ours = times[i];
      if (i > 0) {
        record.peer = "rung before";
        record.peer_time = times[i - 1];
        record.peer_config = rungs[i - 1].name;
      }
      record.limit = limit;
      run.add(record);
    }
  }
}

void run_ladder(Run& run) {
  const bool cuda = run.options().device.is_cuda();
  for (const bool causal : {false, true}) {
    if (cuda) {
      const PrefillCase c{.head_dim = kLadderHeadDim, .seqlen = 4096, .batch = 4, .heads = 16, .causal = causal};
      run_ladder_case(run, c, DType::bf16, {Mode::hot, Mode::cool}, "TFLOP/s", bf16_limit(run));
    } else {
      const OneThread one;
      const PrefillCase c{.head_dim = kLadderHeadDim, .seqlen = 1024, .batch = 1, .heads = 2, .causal = causal};
      for (const DType dtype : {DType::f32, DType::bf16}) run_ladder_case(run, c, dtype, {Mode::one_thread}, "GFLOP/s", 0);
    }
  }
}

// --- All of it

void run_on_gpu(Run& run) {
  const double limit = bf16_limit(run);
  for (const std::int64_t head_dim : {128, 64, 256}) {
    for (const std::int64_t seqlen : {1024, 4096, 16384}) {
      for (const bool causal : {false, true})
        run_prefill(run, {head_dim, seqlen, 16384 / seqlen, 2048 / head_dim, causal}, DType::bf16, {Mode::hot, Mode::cool}, "TFLOP/s",
                    limit);
    }
  }
  for (const std::int64_t head_dim : {128, 64, 256}) {
    for (const std::int64_t seqlen : {4096, 16384}) {
      for (const bool causal : {false, true})
        run_prefill(run, {head_dim, seqlen, 16384 / seqlen, 2048 / head_dim, causal}, DType::fp8_e4m3, {Mode::hot, Mode::cool}, "TFLOP/s",
                    fp8_limit(run));
    }
  }
  for (const std::int64_t batch : {1, 16, 64}) {
    for (const std::int64_t seqlen : {8192, 32768}) {
      for (const bool paged : {false, true}) run_decode(run, batch, seqlen, paged);
    }
  }
  for (const double density : {1.0, 0.5, 0.25, 0.1})
    for (const bool causal : {false, true}) run_blocks(run, density, causal);
  for (const std::int64_t batch : {1, 8})
    for (const bool paged : {false, true})
      for (const bool indices : {false, true}) run_decode_blocks(run, batch, paged, indices);
  run_host_times(run);
}

void run_on_cpu(Run& run) {
  const OneThread one;
  const double peak = run.options().list ? 0 : measure_fma_peak();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t head_dim : {64, 128}) {
      for (const std::int64_t seqlen : {1024, 4096}) {
        for (const bool causal : {false, true})
          run_prefill(run, {head_dim, seqlen, 1, 4, causal}, dtype, {Mode::one_thread}, "GFLOP/s", dtype == DType::f32 ? peak : 0);
      }
    }
  }
}

const Family family{"attention", "prefill, on a GPU also decode and the host's time for a call; peers: benchmarks/attention_peer.py",
                    [](Run& run) { run.options().device.is_cuda() ? run_on_gpu(run) : run_on_cpu(run); }, run_ladder};

}  // namespace
}  // namespace tw::kernels::attention

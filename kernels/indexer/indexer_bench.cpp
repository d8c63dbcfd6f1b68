// `tilewave bench indexer`: scores of the lightning indexer, against the device's product rate. Decoding with one token is limited by
// reading the keys and has its own unit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/harness.hpp"
#include "runtime/format.hpp"
#include "tilewave/device.hpp"
#include "tilewave/indexer.hpp"

namespace tw::kernels::indexer {
namespace {

using namespace tw::bench;

/// The data sheet's dense product rate, in TFLOP/s; 0 for a GPU that is not known.
double product_limit(Run& run, DType dtype) {
  if (!run.options().device.is_cuda() || run.options().list) return 0;
  const std::optional<GpuLimits> limits = gpu_limits(device_info(run.options().device).name);
  return limits ? limits->bf16_tflops * (dtype == DType::fp8_e4m3 ? 2 : 1) : 0;
}

void add_products(Run& run, const std::string& name, DType dtype, double flops, const std::function<void()>& launch) {
  const bool on_gpu = run.stream().device().is_cuda();
  std::vector<Mode> modes{Mode::one_thread};
  if (on_gpu) modes = flops < 3e10 ? std::vector{Mode::graph} : std::vector{Mode::hot, Mode::cool};
  for (const Mode mode : modes) {
    Record record;
    record.family = "indexer";
    record.case_name = name;
    record.dtype = dtype;
    record.mode = mode;
    record.unit = on_gpu ? "TFLOP/s" : "GFLOP/s";
    record.work = flops * (on_gpu ? 1e-12 : 1e-9);
    record.limit = product_limit(run, dtype);
    record.ours = measure(mode, {{"tilewave", launch}}, run.stream(), run.effort(mode)).front();
    run.add(record);
  }
}

/// All queries see all keys, or each one more than the one before.
struct PrefillCase {
  std::int64_t queries, keys, heads;
  DType dtype = DType::fp8_e4m3;
  bool causal = false;

  std::string name() const { return tw::format("prefill-{}x{}-h{}{}", queries, keys, heads, causal ? "-causal" : ""); }
  double pairs() const {
    if (!causal) return static_cast<double>(queries) * static_cast<double>(keys);
    return static_cast<double>(queries) * (static_cast<double>(keys) - 0.5 * static_cast<double>(queries - 1));
  }
};

const PrefillCase kPrefillGpuCases[] = {{8192, 32768, 64},
                                        {8192, 32768, 64, DType::fp8_e4m3, true},
                                        {8192, 8192, 64, DType::fp8_e4m3, true},
                                        {4096, 8192, 32},
                                        {128, 32768, 64},
                                        {8192, 32768, 64, DType::bf16}};
const PrefillCase kPrefillCpuCases[] = {{32, 1024, 64}};

void run_prefill(Run& run, const PrefillCase& c) {
  if (!run.wants("indexer", c.name(), c.dtype)) return;
  const Device device = run.stream().device();
  const Tensor q = random_normal({c.queries, c.heads, kIndexerDim}, c.dtype, device, 1),
               k = random_normal({c.keys, kIndexerDim}, c.dtype, device, 2), scale = random_normal({c.keys}, DType::f32, device, 3),
               weights = random_normal({c.queries, c.heads}, DType::f32, device, 4);
  const Tensor scores = Tensor::poisoned({c.queries, c.keys}, DType::f32, run.stream());
  run.stream().synchronize();
  const IndexerOptions options{.k_scale = c.dtype == DType::fp8_e4m3 ? &scale : nullptr, .causal = c.causal, .stream = run.stream()};
  add_products(run, c.name(), c.dtype, 2 * c.pairs() * static_cast<double>(c.heads * kIndexerDim),
               [&] { indexer_scores(q, k, weights, scores, options); });
}

/// Sequences of equal lengths, with pages in random order.
struct DecodeCase {
  std::int64_t batch, seqlen, heads, seqlen_q = 1;

  std::string name() const { return tw::format("decode-b{}-{}k-h{}-q{}", batch, seqlen / 1024, heads, seqlen_q); }
};

const DecodeCase kDecodeGpuCases[] = {{64, 32768, 64}, {64, 32768, 64, 2}, {128, 4096, 64}, {1, 131072, 64}};
const DecodeCase kDecodeCpuCases[] = {{2, 1024, 64}};

void run_decode(Run& run, const DecodeCase& c) {
  const DType dtype = DType::fp8_e4m3;
  if (!run.wants("indexer", c.name(), dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const std::int64_t pages = c.seqlen / kIndexerPage;
  const double bytes = static_cast<double>(c.batch * c.seqlen * kIndexerKeyBytes);
  // So many caches take turns that none is in the L2 cache when its turn comes. Scales are bytes of e4m3 too: any bits will do.
  std::vector<Tensor> caches(static_cast<std::size_t>(device.is_cuda() ? std::max(1.0, std::ceil(512e6 / bytes)) : 1));
  for (Tensor& cache : caches) cache = random_normal({c.batch * pages, kIndexerPage, kIndexerKeyBytes}, dtype, device, 1);
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(c.batch * pages));
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), std::mt19937(1));
  const Tensor table = Tensor::from<std::int32_t>(numbers, {c.batch, pages}).to(device);
  const Tensor q = random_normal({c.batch, c.seqlen_q, c.heads, kIndexerDim}, dtype, device, 2),
               weights = random_normal({c.batch, c.seqlen_q, c.heads}, DType::f32, device, 3);
  const Tensor scores = Tensor::poisoned({c.batch, c.seqlen_q, c.seqlen}, DType::f32, stream);
  stream.synchronize();
  std::size_t next = 0;
  const auto launch = [&] { indexer_scores_paged(q, caches[next++ % caches.size()], weights, table, scores, {.stream = stream}); };
  // What is read and written: keys, and four bytes for each query and key.
  const double traffic = bytes + 4 * static_cast<double>(scores.numel());
  const Mode mode = device.is_cuda() ? Mode::graph : Mode::one_thread;
  Record record;
  record.family = "indexer";
  record.case_name = c.name();
  record.dtype = dtype;
  record.mode = mode;
  record.unit = "GB/s";
  record.work = traffic * 1e-9;
  record.limit = run.read_bandwidth() * 1e-9;
  record.ours = measure(mode, {{"tilewave", launch}}, stream, run.effort(mode)).front();
  run.add(record);
}

const Family indexer_family{"indexer", "scores of the lightning indexer: products in prefilling, a read of the keys in decoding",
                            [](Run& run) {
                              const bool on_gpu = run.options().device.is_cuda();
                              std::optional<OneThread> one;
                              if (!on_gpu) one.emplace();
                              if (on_gpu) {
                                for (const PrefillCase& c : kPrefillGpuCases) run_prefill(run, c);
                                for (const DecodeCase& c : kDecodeGpuCases) run_decode(run, c);
                              } else {
                                for (const PrefillCase& c : kPrefillCpuCases) run_prefill(run, c);
                                for (const DecodeCase& c : kDecodeCpuCases) run_decode(run, c);
                              }
                            }};

}  // namespace
}  // namespace tw::kernels::indexer

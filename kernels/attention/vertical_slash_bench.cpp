// `tilewave bench vertical-slash`: vertical-slash sparse attention, with all that makes its lists, against the dense causal call; and the
// lists of vertical_slash_index() alone.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/harness.hpp"
#include "runtime/format.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/device.hpp"
#include "tilewave/vertical_slash.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::bench;

/// Which distances slashes have.
enum class Distances {
  clustered,  ///< half of them are the first ones, the others are in runs of 64 neighbours
  local,      ///< the first ones: a window
  random      ///< any, so that blocks of keys hold few of them each
};
constexpr const char* kDistances[] = {"clustered", "local", "random"};

struct VerticalSlashCase {
  std::int64_t seqlen;
  Distances distances = Distances::clustered;
  int query_block = 64;
  std::int64_t heads = 8, kv_heads = 8, dim = 128, columns = 1000, slashes = 6096;

  std::string name() const {
    return tw::format("s{}-h{}-kv{}-d{}-v{}-s{}-{}-block{}", seqlen, heads, kv_heads, dim, columns, slashes,
                      kDistances[static_cast<std::size_t>(distances)], query_block);
  }
};

const VerticalSlashCase kGpuCases[] = {{131072, Distances::clustered, 64},
                                       {131072, Distances::clustered, 128},
                                       {131072, Distances::local, 64},
                                       {131072, Distances::local, 128},
                                       {131072, Distances::random, 64},
                                       {131072, Distances::clustered, 128, 32, 8},
                                       {32768, Distances::clustered, 64, 32, 32, 128, 1000, 600},
                                       {32768, Distances::clustered, 128, 32, 32, 128, 1000, 600},
                                       {65536, Distances::clustered, 64, 1, 1, 64, 1000, 600}};
const VerticalSlashCase kCpuCases[] = {{2048, Distances::clustered, 64, 1, 1, 128, 60, 200}};

/// The numbers of each head: the first 30, which MInference always takes, and others below `seqlen`.
struct Lists {
  Tensor vertical, slash;
};
Lists lists_of(const VerticalSlashCase& c, Device device) {
  std::mt19937 random(1);
  const auto pick = [&](std::int64_t below) { return static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(below)); };
  std::vector<std::int32_t> all;
  const auto add_distinct = [&](std::vector<std::int32_t> x, std::int64_t count, std::int64_t run) {
    std::vector<bool> taken(static_cast<std::size_t>(c.seqlen));
    for (const std::int32_t n : x) taken[static_cast<std::size_t>(n)] = true;
    while (std::ssize(x) < count) {
      std::int32_t n = pick(c.seqlen);
      for (std::int64_t i = 0; i < run && n < c.seqlen && std::ssize(x) < count; ++i, ++n) {
        if (taken[static_cast<std::size_t>(n)]) continue;
        taken[static_cast<std::size_t>(n)] = true;
        x.push_back(n);
      }
    }
    all.insert(all.end(), x.begin(), x.end());
  };
  const auto first = [](std::int64_t count) {
    std::vector<std::int32_t> x(static_cast<std::size_t>(count));
    std::iota(x.begin(), x.end(), 0);
    return x;
  };
  for (std::int64_t h = 0; h < c.heads; ++h) add_distinct(first(30), c.columns, 1);
  const Tensor vertical = Tensor::from<std::int32_t>(all, {1, c.heads, c.columns}).to(device);
  all.clear();
  for (std::int64_t h = 0; h < c.heads; ++h) {
    const bool random_distances = c.distances == Distances::random;
    add_distinct(first(c.distances == Distances::local ? c.slashes
                       : random_distances              ? 30
                                                       : c.slashes / 2),
                 c.slashes, random_distances ? 1 : 64);
  }
  return {vertical, Tensor::from<std::int32_t>(all, {1, c.heads, c.slashes}).to(device)};
}

void run_case(Run& run, const VerticalSlashCase& c) {
  if (!run.wants("vertical-slash", c.name(), DType::bf16)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const auto operand = [&](std::int64_t heads, std::uint64_t seed) {
    return random_normal({1, c.seqlen, heads, c.dim}, DType::bf16, device, seed);
  };
  const Tensor q = operand(c.heads, 1), k = operand(c.kv_heads, 2), v = operand(c.kv_heads, 3);
  const Tensor o = Tensor::poisoned(q.shape(), DType::bf16, stream);
  const Lists lists = lists_of(c, device);
  const VerticalSlashOptions options{.query_block = c.query_block, .stream = stream};

  const std::int64_t blocks = (c.seqlen + c.query_block - 1) / c.query_block;
  const Shape counts{1, c.heads, blocks};
  const Tensor block_count = Tensor::poisoned(counts, DType::i32, stream), column_count = Tensor::poisoned(counts, DType::i32, stream),
               block_offset = Tensor::poisoned({1, c.heads, blocks, c.slashes}, DType::i32, stream),
               column_index = Tensor::poisoned({1, c.heads, blocks, c.columns}, DType::i32, stream);
  const auto index = [&] {
    vertical_slash_index(lists.vertical, lists.slash, c.seqlen, {block_count, block_offset, column_count, column_index}, options);
  };
  index();
  stream.synchronize();
  // Pairs of queries and keys in the lists. A list's last block is on the diagonal and counts half.
  const auto sum = [](const Tensor& t) {
    const Tensor host = t.to(Device::cpu());
    return std::accumulate(host.data<std::int32_t>(), host.data<std::int32_t>() + host.numel(), 0.0);
  };
  const auto block = static_cast<double>(c.query_block);
  const double pairs = block * (block * (sum(block_count) - 0.5 * static_cast<double>(c.heads * blocks)) + sum(column_count));

  const bool on_gpu = device.is_cuda();
  double limit = 0;
  if (on_gpu) {
    const std::optional<GpuLimits> limits = gpu_limits(device_info(run.options().device).name);
    if (limits) limit = limits->bf16_tflops;
  }
  for (const Mode mode : on_gpu ? std::vector{Mode::hot, Mode::cool} : std::vector{Mode::one_thread}) {
    Record record;
    record.family = "vertical-slash";
    record.case_name = c.name();
    record.dtype = DType::bf16;
    record.mode = mode;
    record.unit = on_gpu ? "TFLOP/s" : "GFLOP/s";
    record.work = pairs * 4 * static_cast<double>(c.dim) * (on_gpu ? 1e-12 : 1e-9);
    const auto timings = measure(mode,
                                 {{"tilewave", [&] { vertical_slash_attention(q, k, v, lists.vertical, lists.slash, o, options); }},
                                  {"dense", [&] { tw::attention(q, k, v, o, {.causal = true, .stream = stream}); }}},
                                 stream, run.effort(mode));
    record.ours = timings[0];
    record.peer = "dense attention";
    record.peer_time = timings[1];
    record.limit = limit;
    run.add(record);
  }
  Record record;
  record.family = "vertical-slash";
  record.case_name = c.name() + "-index";
  record.dtype = DType::i32;
  record.mode = on_gpu ? Mode::hot : Mode::one_thread;
  record.unit = kMicroseconds;
  record.group = "vertical-slash-index";
  record.ours = measure(record.mode, {{"tilewave", index}}, stream, run.effort(record.mode)).front();
  run.add(record);
}

const Family vertical_slash_family{"vertical-slash", "vertical-slash sparse attention against dense causal attention; its lists",
                                   [](Run& run) {
                                     if (run.options().device.is_cuda()) {
                                       for (const VerticalSlashCase& c : kGpuCases) run_case(run, c);
                                     } else {
                                       const OneThread one;
                                       for (const VerticalSlashCase& c : kCpuCases) run_case(run, c);
                                     }
                                   }};

}  // namespace
}  // namespace tw::kernels::attention

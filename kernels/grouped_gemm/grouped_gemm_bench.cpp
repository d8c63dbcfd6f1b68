// `tilewave bench grouped_gemm`: products of groups of rows, against a loop of gemm() over the groups.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "benchmarks/harness.hpp"
#include "benchmarks/memory_bound.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/grouped_gemm/kernels.hpp"
#include "runtime/format.hpp"

namespace tw::kernels::grouped_gemm {
namespace {

using namespace tw::bench;

struct Case {
  const char* what;
  std::int64_t groups, rows, n, k;  ///< rows: of each group
  bool k_grouped = false;

  std::string name() const { return tw::format("{}-{}x{}x{}x{}", what, groups, rows, n, k); }
  double flops() const { return 2.0 * static_cast<double>(groups * rows) * static_cast<double>(n) * static_cast<double>(k); }
  double bytes() const { return 2.0 * static_cast<double>(groups * n * k + groups * rows * (n + k)); }
};

/// Experts of a large mixture: gate and up, down. Many rows are a matter of arithmetic, few of the weights' bytes.
const Case kGpuCases[] = {{"grouped", 8, 1024, 4096, 7168}, {"grouped", 8, 1024, 7168, 2048},
                          {"grouped", 64, 128, 7168, 2048}, {"k-grouped", 8, 1024, 4096, 7168, true},
                          {"few", 64, 1, 4096, 7168},       {"few", 64, 1, 7168, 2048},
                          {"few", 64, 16, 4096, 7168}};
const Case kCpuCases[] = {{"grouped", 8, 128, 512, 1024}, {"k-grouped", 8, 128, 512, 1024, true}};

/// [count, rows, cols] of the same random numbers for each of the count.
Tensor repeated(std::int64_t count, std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) {
  const Tensor one = random_normal({rows, cols}, dtype, stream.device(), 1), all = Tensor::empty({count, rows, cols}, dtype, stream);
  for (std::int64_t i = 0; i < count; ++i) all.select(0, i).copy_from(one);
  return all;
}

void run_case(Run& run, const Case& c) {
  const DType dtype = DType::bf16;
  if (!run.wants("grouped_gemm", c.name(), dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const std::int64_t rows = c.groups * c.rows;
  std::vector<std::int32_t> numbers;
  for (std::int64_t g = 0; g <= c.groups; ++g) numbers.push_back(static_cast<std::int32_t>(g * c.rows));
  const Tensor offsets = Tensor::from(std::span<const std::int32_t>(numbers), {c.groups + 1}).to(device);
  const Tensor x = random_normal({rows, c.k}, dtype, device, 2);
  const Tensor y = c.k_grouped ? random_normal({rows, c.n}, dtype, device, 3) : Tensor::poisoned({rows, c.n}, dtype, stream);
  const Tensor w = c.k_grouped ? Tensor::poisoned({c.groups, c.n, c.k}, dtype, stream) : repeated(c.groups, c.n, c.k, dtype, stream);
  const auto ours = [&](int config) {
    if (c.k_grouped)
      tw::k_grouped_gemm(y.transpose(0, 1), x, offsets, w, {.stream = stream, .config = config});
    else
      tw::grouped_gemm(x, w.transpose(1, 2), offsets, y, {.stream = stream, .config = config});
  };
  const auto loop = [&] {
    for (std::int64_t g = 0; g < c.groups; ++g) {
      const Tensor part = x.slice(0, g * c.rows, (g + 1) * c.rows), of_y = y.slice(0, g * c.rows, (g + 1) * c.rows), of_w = w.select(0, g);
      c.k_grouped ? tw::gemm(of_y.transpose(0, 1), part, of_w, {.stream = stream})
                  : tw::gemm(part, of_w.transpose(0, 1), of_y, {.stream = stream});
    }
  };
  const int forced = run.options().config;
  std::vector<Contender> contenders = {{"tilewave", [&] { ours(forced); }}, {"gemm-loop", loop}};
  std::vector<CostedTile> tiles;
  if (device.is_cuda() && run.options().all_configs) tiles = configs(generic_shared_bytes(stream));
  for (int i = 0; i < static_cast<int>(tiles.size()); ++i) {
    const CostedTile& t = tiles[static_cast<std::size_t>(i)];
    if (!valid(t, c.k_grouped, false)) continue;
    contenders.push_back({tw::format("{}x{} stages {} cluster {}", t.bm, t.bn, t.stages, t.cluster), [&, i] { ours(i); }});
  }
  for (const Contender& contender : contenders) contender.launch();
  stream.synchronize();
  const Mode mode = device.is_cuda() && c.flops() < 3e10 ? Mode::graph : Mode::hot;
  const std::vector<Timing> times = measure(mode, contenders, stream, run.effort(mode));
  Record record;
  record.family = "grouped_gemm";
  record.case_name = c.name();
  record.dtype = dtype;
  record.mode = mode;
  const bool by_bytes = device.is_cuda() && c.rows <= 16;
  record.unit = by_bytes ? "GB/s" : device.is_cuda() ? "TFLOP/s" : "GFLOP/s";
  record.work = by_bytes ? c.bytes() * 1e-9 : c.flops() * (device.is_cuda() ? 1e-12 : 1e-9);
  record.ours = times[0];
  record.peer = "gemm-loop";
  record.peer_time = times[1];
  if (by_bytes) record.limit = run.read_bandwidth() * 1e-9;
  run.add(record);
  for (std::size_t i = 2; i < contenders.size(); ++i)
    tw::print(run.options().table, "  {:<28} {:<28} {:8.1f} us\n", c.name(), contenders[i].name, times[i].median * 1e3);
}

const Family family{"grouped_gemm", "products of groups of rows, each with a matrix of its own, against a loop of gemm", [](Run& run) {
                      if (run.options().device.is_cuda())
                        for (const Case& c : kGpuCases) run_case(run, c);
                      else
                        for (const Case& c : kCpuCases) run_case(run, c);
                    }};

}  // namespace
}  // namespace tw::kernels::grouped_gemm

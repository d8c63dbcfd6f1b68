// `tilewave bench sparse_gemm`: linear layers with a 2:4 sparse weight, against gemm() with the same weight, dense.

#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/harness.hpp"
#include "benchmarks/memory_bound.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/sparse_gemm/kernels.hpp"
#include "runtime/format.hpp"

namespace tw::kernels::sparse_gemm {
namespace {

using namespace tw::bench;

struct SparseCase {
  DType dtype;
  std::int64_t m, n, k;  ///< x is [m, k], the weight [n, k]

  std::string name() const { return tw::format("{}-{}x{}x{}", name_of(dtype), m, n, k); }
  /// Of the dense product: zeros count.
  double flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
};

const SparseCase kSparseGpuCases[] = {{DType::bf16, 8192, 8192, 8192},     {DType::f16, 8192, 8192, 8192},  {DType::i8, 8192, 8192, 8192},
                                      {DType::fp8_e4m3, 8192, 8192, 8192}, {DType::bf16, 4096, 4096, 4096}, {DType::i8, 4096, 4096, 4096},
                                      {DType::fp8_e4m3, 4096, 4096, 4096}, {DType::bf16, 512, 14336, 4096}, {DType::bf16, 64, 14336, 4096},
                                      {DType::bf16, 16, 14336, 4096}};
const SparseCase kSparseCpuCases[] = {{DType::bf16, 256, 512, 512}};

Tensor random_matrix(std::int64_t rows, std::int64_t cols, DType dtype, Device device, std::uint64_t seed) {
  if (size_of(dtype) == 2) return random_normal({rows, cols}, dtype, device, seed);
  return random_normal({rows, cols}, DType::f32, Device::cpu(), seed).to(dtype).to(device);
}

void run_sparse_case(Run& run, const SparseCase& c) {
  if (!run.wants("sparse_gemm", c.name(), c.dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const Tensor x = random_matrix(c.m, c.k, c.dtype, device, 1), w = random_matrix(c.n, c.k, c.dtype, device, 2);
  prune_2_4(w, w, stream);
  const SparseMatrix sparse = SparseMatrix::allocate(c.n, c.k, c.dtype, stream);
  compress_2_4(w, sparse, {.stream = stream});
  const Tensor y = Tensor::poisoned({c.m, c.n}, gemm::result_of(c.dtype), stream), dense_y = Tensor::poisoned(y.shape(), y.dtype(), stream);
  const auto ours = [&](int config) { sparse_linear(x, sparse, y, {.stream = stream, .config = config}); };
  const int forced = run.options().config;
  std::vector<Contender> contenders = {{"tilewave", [&] { ours(forced); }},
                                       {"dense gemm", [&] { tw::gemm(x, w.transpose(0, 1), dense_y, {.stream = stream}); }}};
  std::vector<CostedTile> tiles;
  if (device.is_cuda() && run.options().all_configs) tiles = configs(generic_shared_bytes(stream), static_cast<int>(size_of(c.dtype)));
  for (int i = 0; i < static_cast<int>(tiles.size()); ++i) {
    const CostedTile& t = tiles[static_cast<std::size_t>(i)];
    contenders.push_back({tw::format("{}x{} stages {} cluster {}", t.bm, t.bn, t.stages, t.cluster), [&, i] { ours(i); }});
  }
  for (const Contender& contender : contenders) contender.launch();
  stream.synchronize();
  const Mode mode = device.is_cuda() && c.flops() < 3e10 ? Mode::graph : Mode::hot;
  const std::vector<Timing> times = measure(mode, contenders, stream, run.effort(mode));
  Record record;
  record.family = "sparse_gemm";
  record.case_name = c.name();
  record.dtype = c.dtype;
  record.mode = mode;
  record.unit = device.is_cuda() ? "TFLOP/s" : "GFLOP/s";
  record.work = c.flops() * (device.is_cuda() ? 1e-12 : 1e-9);
  record.ours = times[0];
  record.peer = "dense gemm";
  record.peer_time = times[1];
  run.add(record);
  for (std::size_t i = 2; i < contenders.size(); ++i)
    tw::print(run.options().table, "  config {} {:<28} {:8.1f} us, {:.3f} of dense gemm's rate\n", i - 2, contenders[i].name,
              times[i].median * 1e3, times[1].median / times[i].median);
}

const Family sparse_family{"sparse_gemm", "products with a 2:4 sparse matrix, against gemm with the same matrix, dense", [](Run& run) {
                             if (run.options().device.is_cuda())
                               for (const SparseCase& c : kSparseGpuCases) run_sparse_case(run, c);
                             else
                               for (const SparseCase& c : kSparseCpuCases) run_sparse_case(run, c);
                           }};

}  // namespace
}  // namespace tw::kernels::sparse_gemm

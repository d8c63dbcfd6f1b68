// `tilewave bench block_sparse_gemm`: products with masks of blocks, against the dense gemm().

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "benchmarks/harness.hpp"
#include "benchmarks/memory_bound.hpp"
#include "kernels/block_sparse_gemm/kernels.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"

namespace tw::kernels::block_sparse_gemm {
namespace {

using namespace tw::bench;

struct BlockCase {
  const char* mask;  ///< "a", "b", "d" or "product"
  std::int64_t size;
  int block, density;  ///< per cent

  std::string name() const { return tw::format("{}-{}-block-{}-density-{}", mask, size, block, density); }
};

const BlockCase kBlockGpuCases[] = {{"a", 8192, 128, 50}, {"a", 8192, 128, 10}, {"a", 8192, 64, 50},       {"b", 8192, 128, 50},
                                    {"d", 8192, 128, 50}, {"d", 8192, 256, 25}, {"product", 8192, 128, 50}};
const BlockCase kBlockCpuCases[] = {{"a", 512, 128, 50}};

void run_block_case(Run& run, const BlockCase& c) {
  const DType dtype = DType::bf16;
  if (!run.wants("block_sparse_gemm", c.name(), dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const std::int64_t blocks = (c.size + c.block - 1) / c.block;
  const bool product = c.mask[0] == 'p';
  std::vector<std::uint8_t> values(static_cast<std::size_t>(product ? blocks * blocks * blocks : blocks * blocks));
  std::mt19937 random(1);
  double kept = 0;
  for (std::uint8_t& x : values) kept += x = random() % 100 < static_cast<unsigned>(c.density);
  const Tensor mask =
      Tensor::from(std::span<const std::uint8_t>(values), product ? Shape{blocks, blocks, blocks} : Shape{blocks, blocks}).to(device);
  const Tensor a = random_normal({c.size, c.size}, dtype, device, 1), b = random_normal({c.size, c.size}, dtype, device, 2).transpose(0, 1);
  const Tensor d = Tensor::poisoned({c.size, c.size}, dtype, stream), dense_d = Tensor::poisoned({c.size, c.size}, dtype, stream);
  BlockSparseGemmOptions options{.block = c.block, .stream = stream, .config = run.options().config};
  (c.mask[0] == 'a'   ? options.a_mask
   : c.mask[0] == 'b' ? options.b_mask
   : c.mask[0] == 'd' ? options.d_mask
                      : options.product_mask) = &mask;
  const std::vector<Contender> contenders = {{"tilewave", [&] { tw::block_sparse_gemm(a, b, d, options); }},
                                             {"dense gemm", [&] { tw::gemm(a, b, dense_d, {.stream = stream}); }}};
  for (const Contender& contender : contenders) contender.launch();
  stream.synchronize();
  const std::vector<Timing> times = measure(Mode::hot, contenders, stream, run.effort(Mode::hot));
  const double size = static_cast<double>(c.size), part = kept / static_cast<double>(values.size());
  Record record;
  record.family = "block_sparse_gemm";
  record.case_name = c.name();
  record.dtype = dtype;
  record.mode = Mode::hot;
  // Of the products that are done.
  record.unit = device.is_cuda() ? "TFLOP/s" : "GFLOP/s";
  record.work = 2 * size * size * size * part * (device.is_cuda() ? 1e-12 : 1e-9);
  record.ours = times[0];
  record.peer = "dense gemm";
  record.peer_time = times[1];
  run.add(record);
}

const Family block_family{"block_sparse_gemm", "products with masks of blocks, against the dense gemm", [](Run& run) {
                            if (run.options().device.is_cuda())
                              for (const BlockCase& c : kBlockGpuCases) run_block_case(run, c);
                            else
                              for (const BlockCase& c : kBlockCpuCases) run_block_case(run, c);
                          }};

}  // namespace
}  // namespace tw::kernels::block_sparse_gemm

// `tilewave bench transpose`: against a copy of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "tilewave/transpose.hpp"

namespace tw::kernels::transpose {
namespace {

using namespace tw::bench;

std::vector<MemoryOp> ops() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({rows, cols}, dtype, stream.device(), 1);
    const Tensor y = Tensor::poisoned({cols, rows}, dtype, stream);
    return {bytes_of({x, y}), [=] { tw::transpose(x, y, {stream}); }};
  };
  return {{.name = "transpose", .prepare = prepare}};
}

const Family family{"transpose", "matrices transposed in memory: a copy of the same bytes",
                    [](Run& run) { run_memory_ops(run, "transpose", ops()); }};

}  // namespace
}  // namespace tw::kernels::transpose

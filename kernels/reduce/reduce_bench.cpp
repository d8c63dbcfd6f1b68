// `tilewave bench reduce`: sums over rows and over columns, which read nearly everything and write next to nothing.

#include "benchmarks/memory_bound.hpp"
#include "tilewave/reduce.hpp"

namespace tw::kernels::reduce {
namespace {

using namespace tw::bench;

MemoryOp reduction(std::string name, Reduction reduction, int dim) {
  const auto prepare = [=](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({rows, cols}, dtype, stream.device(), 1);
    const Tensor y = Tensor::poisoned({dim == 0 ? cols : rows}, dtype, stream);
    return {bytes_of({x, y}), [=] { tw::reduce(reduction, x, y, {.dim = dim, .stream = stream}); }};
  };
  return {.name = std::move(name), .prepare = prepare, .yardstick = Yardstick::read};
}

const Family family{"reduce", "sums and maxima of rows and columns: a kernel that reads the same bytes", [](Run& run) {
                      run_memory_ops(run, "reduce",
                                     {reduction("sum-rows", Reduction::sum, 1), reduction("max-rows", Reduction::max, 1),
                                      reduction("sum-columns", Reduction::sum, 0)});
                    }};

}  // namespace
}  // namespace tw::kernels::reduce

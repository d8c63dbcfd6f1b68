// `tilewave bench softmax`: against a copy of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "tilewave/softmax.hpp"

namespace tw::kernels::softmax {
namespace {

using namespace tw::bench;

std::vector<MemoryOp> ops() {
  return {unary_op("softmax", {DType::bf16, DType::f32},
                   [](const Tensor& x, const Tensor& y, const Stream& stream) { tw::softmax(x, y, {.stream = stream}); })};
}

const Family family{"softmax", "softmax of rows: a copy of the same bytes", [](Run& run) { run_memory_ops(run, "softmax", ops()); }};

}  // namespace
}  // namespace tw::kernels::softmax

// `tilewave bench swiglu`: against a copy of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "tilewave/swiglu.hpp"

namespace tw::kernels::swiglu {
namespace {

using namespace tw::bench;

MemoryOp swiglu_op() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor gate = random_normal({rows, cols}, dtype, stream.device(), 1), up = random_normal({rows, cols}, dtype, stream.device(), 2);
    const Tensor y = Tensor::poisoned({rows, cols}, dtype, stream);
    return {bytes_of({gate, up, y}), [=] { tw::swiglu(gate, up, y, {stream}); }};
  };
  return {.name = "swiglu", .prepare = prepare};
}

MemoryOp interleaved_op() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({rows, 2 * cols}, dtype, stream.device(), 1), y = Tensor::poisoned({rows, cols}, dtype, stream);
    return {bytes_of({x, y}), [=] { swiglu_interleaved(x, y, {stream}); }};
  };
  return {.name = "interleaved", .dtypes = {DType::bf16}, .prepare = prepare};
}

const Family family{"swiglu", "silu(gate) up, from two matrices and from alternating columns: a copy of the same bytes", [](Run& run) {
                      run_memory_ops(run, "swiglu", {swiglu_op(), interleaved_op()});
                    }};

}  // namespace
}  // namespace tw::kernels::swiglu

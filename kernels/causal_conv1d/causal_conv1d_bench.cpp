// `tilewave bench causal-conv1d`: against a copy of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "tilewave/causal_conv1d.hpp"

namespace tw::kernels::causal_conv1d {
namespace {

using namespace tw::bench;

/// A matrix's rows are the time steps of one sequence, its columns channels.
MemoryOp convolution_op() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({1, rows, cols}, dtype, stream.device(), 1), y = Tensor::poisoned({1, rows, cols}, dtype, stream);
    const Tensor weight = random_normal({cols, 4}, dtype, stream.device(), 2), bias = random_normal({cols}, dtype, stream.device(), 3);
    return {bytes_of({x, weight, bias, y}), [=] { tw::causal_conv1d(x, weight, y, {.bias = &bias, .silu = true, .stream = stream}); }};
  };
  return {.name = "forward", .prepare = prepare};
}

MemoryOp convolution_backward_op() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({1, rows, cols}, dtype, stream.device(), 1),
                 dy = random_normal({1, rows, cols}, dtype, stream.device(), 4);
    const Tensor weight = random_normal({cols, 4}, dtype, stream.device(), 2), bias = random_normal({cols}, dtype, stream.device(), 3);
    const Tensor dx = Tensor::poisoned({1, rows, cols}, dtype, stream), d_weight = Tensor::poisoned({cols, 4}, dtype, stream),
                 d_bias = Tensor::poisoned({cols}, dtype, stream);
    return {bytes_of({x, dy, weight, bias, dx, d_weight, d_bias}), [=] {
              tw::causal_conv1d_backward(dy, x, weight, dx,
                                         {.bias = &bias, .silu = true, .d_weight = &d_weight, .d_bias = &d_bias, .stream = stream});
            }};
  };
  return {.name = "backward", .dtypes = {DType::bf16}, .prepare = prepare};
}

const Family family{"causal-conv1d", "depthwise causal convolution of width 4 with SiLU: a copy of the same bytes", [](Run& run) {
                      run_memory_ops(run, "causal-conv1d", {convolution_op(), convolution_backward_op()});
                    }};

}  // namespace
}  // namespace tw::kernels::causal_conv1d

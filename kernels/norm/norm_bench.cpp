// `tilewave bench norm`: against a copy of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "tilewave/norm.hpp"

namespace tw::kernels::norm {
namespace {

using namespace tw::bench;

MemoryOp layer_norm_op() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({rows, cols}, dtype, stream.device(), 1), y = Tensor::poisoned({rows, cols}, dtype, stream);
    const Tensor weight = random_normal({cols}, dtype, stream.device(), 2), bias = random_normal({cols}, dtype, stream.device(), 3);
    return {bytes_of({x, weight, bias, y}), [=] { layer_norm(x, y, {.weight = &weight, .bias = &bias, .stream = stream}); }};
  };
  return {.name = "layer-norm", .prepare = prepare};
}

MemoryOp rms_norm_op() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({rows, cols}, dtype, stream.device(), 1), y = Tensor::poisoned({rows, cols}, dtype, stream);
    const Tensor weight = random_normal({cols}, dtype, stream.device(), 2);
    return {bytes_of({x, weight, y}), [=] { rms_norm(x, y, {.weight = &weight, .stream = stream}); }};
  };
  return {.name = "rms-norm", .prepare = prepare};
}

/// y = rms_norm(x + residual), with the sum stored, as between the layers of a model.
MemoryOp rms_norm_residual_op() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({rows, cols}, dtype, stream.device(), 1), y = Tensor::poisoned({rows, cols}, dtype, stream);
    const Tensor weight = random_normal({cols}, dtype, stream.device(), 2);
    const Tensor residual = random_normal({rows, cols}, dtype, stream.device(), 3), sum = Tensor::poisoned({rows, cols}, dtype, stream);
    return {bytes_of({x, residual, weight, sum, y}),
            [=] { rms_norm(x, y, {.weight = &weight, .residual = &residual, .sum = &sum, .stream = stream}); }};
  };
  return {.name = "rms-norm-residual", .dtypes = {DType::bf16}, .prepare = prepare};
}

const Family family{"norm", "layer norm, RMS norm, with a residual: a copy of the same bytes", [](Run& run) {
                      run_memory_ops(run, "norm", {layer_norm_op(), rms_norm_op(), rms_norm_residual_op()});
                    }};

}  // namespace
}  // namespace tw::kernels::norm

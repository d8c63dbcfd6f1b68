// `tilewave bench elementwise`: against a copy of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "tilewave/elementwise.hpp"

namespace tw::kernels::elementwise {
namespace {

using namespace tw::bench;

/// y = f(a, b).
template <class F>
MemoryOp binary_op(std::string name, std::vector<DType> dtypes, F f) {
  const auto prepare = [f](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor a = random_normal({rows, cols}, dtype, stream.device(), 1);
    const Tensor b = random_normal({rows, cols}, dtype, stream.device(), 2);
    const Tensor y = Tensor::poisoned({rows, cols}, dtype, stream);
    return {bytes_of({a, b, y}), [=] { f(a, b, y, stream); }};
  };
  return {.name = std::move(name), .dtypes = std::move(dtypes), .prepare = prepare};
}

MemoryOp cast_op(std::string name, DType from, DType to) {
  const auto prepare = [to](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({rows, cols}, dtype, stream.device(), 1);
    const Tensor y = Tensor::poisoned({rows, cols}, to, stream);
    return {bytes_of({x, y}), [=] { cast(x, y, {stream}); }};
  };
  return {.name = std::move(name), .dtypes = {from}, .prepare = prepare};
}

std::vector<MemoryOp> ops() {
  const std::vector<DType> both = {DType::bf16, DType::f32}, half = {DType::bf16};
  return {
      binary_op("add", both, [](const Tensor& a, const Tensor& b, const Tensor& y, const Stream& stream) { add(a, b, y, {stream}); }),
      binary_op("silu-mul", half,
                [](const Tensor& gate, const Tensor& up, const Tensor& y, const Stream& stream) {
                  tw::elementwise<Chain<Silu, Mul>>({gate, up}, y, {stream});
                }),
      unary_op("silu", both, [](const Tensor& x, const Tensor& y, const Stream& stream) { silu(x, y, {stream}); }),
      unary_op("gelu-erf", half, [](const Tensor& x, const Tensor& y, const Stream& stream) { gelu_erf(x, y, {stream}); }),
      unary_op("gelu-tanh", half, [](const Tensor& x, const Tensor& y, const Stream& stream) { gelu_tanh(x, y, {stream}); }),
      cast_op("cast-to-f32", DType::bf16, DType::f32),
      cast_op("cast-to-bf16", DType::f32, DType::bf16),
  };
}

const Family family{"elementwise", "sums, activations, casts, a fused chain: a copy of the same bytes",
                    [](Run& run) { run_memory_ops(run, "elementwise", ops()); }};

}  // namespace
}  // namespace tw::kernels::elementwise

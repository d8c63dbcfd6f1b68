// `tilewave bench rope`: against a copy of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "tilewave/rope.hpp"

namespace tw::kernels::rope {
namespace {

using namespace tw::bench;

constexpr std::int64_t kHeadDim = 128;

/// A matrix's row is a token, its columns are heads of 128. All dimensions are rotated.
MemoryOp rope_op(std::string name, std::vector<DType> dtypes, RopePairing pairing) {
  const auto prepare = [=](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Shape shape = {rows, cols / kHeadDim, kHeadDim};
    const Tensor x = random_normal(shape, dtype, stream.device(), 1), y = Tensor::poisoned(shape, dtype, stream);
    const Tensor cos = Tensor::poisoned({rows, kHeadDim / 2}, dtype, stream), sin = Tensor::poisoned({rows, kHeadDim / 2}, dtype, stream);
    rope_table(cos, sin, {.stream = stream});
    return {bytes_of({x, cos, sin, y}), [=] { tw::rope(x, cos, sin, y, {.pairing = pairing, .stream = stream}); }};
  };
  return {.name = std::move(name), .dtypes = std::move(dtypes), .prepare = prepare};
}

const Family family{"rope", "rotary position embedding, heads of 128: a copy of the same bytes", [](Run& run) {
                      run_memory_ops(run, "rope",
                                     {rope_op("half-split", {DType::bf16, DType::f32}, RopePairing::half_split),
                                      rope_op("interleaved", {DType::bf16}, RopePairing::interleaved)});
                    }};

}  // namespace
}  // namespace tw::kernels::rope

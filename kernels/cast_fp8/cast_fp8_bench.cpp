// `tilewave bench cast_fp8`: against a copy of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "tilewave/cast_fp8.hpp"

namespace tw::kernels::cast_fp8 {
namespace {

using namespace tw::bench;

constexpr std::int64_t kGroup = 128;

/// Scales in columns, as the following product needs them.
MemoryOp per_token_op() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({rows, cols}, dtype, stream.device(), 1), y = Tensor::poisoned({rows, cols}, DType::fp8_e4m3, stream);
    const Tensor scales = column_major_scales(rows, cols / kGroup, 0, stream);
    return {bytes_of({x, y, scales}), [=] { tw::cast_fp8(x, y, scales, {.stream = stream}); }};
  };
  return {.name = "per-token", .prepare = prepare};
}

const Family family{"cast_fp8", "casts to fp8 with a scale for 128 columns: a copy of the same bytes",
                    [](Run& run) { run_memory_ops(run, "cast_fp8", {per_token_op()}); }};

}  // namespace
}  // namespace tw::kernels::cast_fp8

// `tilewave bench cast_fp8`: against a copy of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "runtime/format.hpp"
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

/// Casts for attention, with a scale for each head: the rotated one may take 1.1 times as long as the plain one. "scales" computes the
/// scales, which reads x once more and writes next to nothing.
void run_heads(Run& run, std::int64_t head_dim, DType dtype) {
  const Stream& stream = run.stream();
  const std::int64_t bytes = std::int64_t{stream.device().is_cuda() ? 512 : 64} << 20, heads = 16, batch = 2;
  const std::int64_t seqlen = bytes / (batch * heads * head_dim * static_cast<std::int64_t>(size_of(dtype)));
  for (const bool rotate : {false, true}) {
    for (const bool scales_only : {false, true}) {
      MemoryCase c;
      c.family = "cast_fp8";
      c.case_name = tw::format("heads{}{}-{}x{}x{}", scales_only ? "-scales" : "", rotate ? "-rotated" : "", seqlen, heads, head_dim);
      c.dtype = dtype;
      if (scales_only) c.yardstick = Yardstick::read;
      if (!run.wants(c.family, c.case_name, dtype)) continue;
      const Shape shape = {batch, seqlen, heads, head_dim};
      const Tensor x = random_normal(shape, dtype, stream.device(), 1), y = Tensor::poisoned(shape, DType::fp8_e4m3, stream);
      const Tensor scales = Tensor::poisoned({batch, heads}, DType::f32, stream),
                   signs = random_normal({head_dim}, DType::f32, stream.device(), 2);
      const CastFp8HeadsOptions options{.rotate = rotate, .signs = rotate ? &signs : nullptr, .stream = stream};
      head_scales(x, scales, options);
      c.bytes = scales_only ? bytes_of({x}) : bytes_of({x, y});
      c.launch = [=] {
        const CastFp8HeadsOptions given{.rotate = rotate, .signs = rotate ? &signs : nullptr, .stream = stream};
        scales_only ? head_scales(x, scales, given) : cast_fp8_heads(x, y, scales, given);
      };
      run_bandwidth(run, c);
    }
  }
}

void run_all(Run& run) {
  run_memory_ops(run, "cast_fp8", {per_token_op()});
  for (const std::int64_t head_dim : {64, 128, 256}) run_heads(run, head_dim, DType::bf16);
}

const Family family{"cast_fp8", "casts to fp8, with a scale for 128 columns or for a head: a copy of the same bytes", run_all};

}  // namespace
}  // namespace tw::kernels::cast_fp8

#include "kernels/attention/call.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/values.tile.hpp"
#include "kernels/attention/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/elementwise.hpp"

// attention() of e4m3. A Hopper GPU multiplies it as it is; other targets, packed sequences and caches convert it to o's type first, which
// holds it exactly.

namespace tw::kernels::attention {

namespace {

constexpr int kSide = 128;  ///< of the squares of values: a line of 128 bytes

Tensor bits(const Tensor& t) { return Tensor::borrow(t.data(), t.shape(), DType::u8, t.device(), t.strides()); }

Tensor widened(const Tensor& t, DType dtype, const Stream& stream) {
  const Tensor wide = workspace(t.shape(), dtype, stream);
  cast(t, wide, {.stream = stream});
  return wide;
}

}  // namespace

void transpose_values(const Tensor& v, const Tensor& to, const Stream& stream) {
  const auto tiles = [](std::int64_t extent) { return static_cast<int>((extent + kSide - 1) / kSide); };
  launch<TransposeValues<u8, kSide>>(stream, {tiles(to.shape(3)), tiles(v.shape(3)), static_cast<int>(v.shape(0) * v.shape(1))},
                                     [&](auto& bind, auto& p) {
                                       bind(p.x, bits(v));
                                       bind(p.y, bits(to));
                                     });
}

Tensor values_workspace(const Tensor& v, const Stream& stream) {
  const std::int64_t keys = (v.shape(2) + kSide - 1) / kSide * kSide;  // whole squares: all of them is written
  return workspace({v.shape(0), v.shape(1), v.shape(3), keys}, DType::fp8_e4m3, stream);
}

KernelVariant values_variant() {
  using Kernel = TransposeValues<u8, kSide>;
  return {make_spec(kernel_info<Kernel>, true, true, "attention_fp8_values"), [](const ShapeValues& shape) {
            const int kv_heads = shape.integer(shape["kv_heads"] > 0 ? "kv_heads" : "heads"), batch = shape.integer("batch");
            const int keys = ceil_div(shape.integer("seqlen_k"), kSide);
            const Tensor v = placeholder({batch, kv_heads, shape["seqlen_k"], kSide}, DType::u8);
            const Tensor y = placeholder({batch, kv_heads, kSide, std::int64_t{keys} * kSide}, DType::u8);
            return analyze<Kernel>({keys, 1, batch * kv_heads}, [&](auto& bind, auto& p) {
              bind(p.x, v);
              bind(p.y, y);
            });
          }};
}

void run_in_fp8(AttentionCall call) {
  if (call.stream.device().is_cuda() && generic_shared_bytes(call.stream) == 0) {
    const Tensor values = values_workspace(call.v, call.stream);
    if (values.numel() > 0) transpose_values(call.v, values, call.stream);
    call.v = values;
    call.values_transposed = true;
    return run_on_gpu(call);
  }
  widen(call);
  run(call);
}

void widen(AttentionCall& call) {
  const DType wide = call.o.dtype();
  for (Tensor* t : {&call.q, &call.k, &call.v})
    if (t->dtype() != wide) *t = widened(*t, wide, call.stream);
}

}  // namespace tw::kernels::attention

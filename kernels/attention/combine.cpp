#include "kernels/attention/combine.hpp"

#include "kernels/attention/combine.tile.hpp"
#include "kernels/rows.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

namespace {

TileGrid grid_of(const CombineCall& call) {
  return {static_cast<int>(call.o.shape(2)), static_cast<int>(call.o.shape(1)), static_cast<int>(call.o.shape(0))};
}

void bind_call(auto& bind, auto& p, const CombineCall& call) {
  const Shape& shape = call.parts.shape();
  bind(p.parts, call.parts.reshape({shape[0], shape[1] * shape[2] * shape[3], shape[4]}).transpose(0, 1));
  p.part_lse = call.part_lse.data<float>();
  bind(p.o, call.o);
  p.lse = call.lse ? call.lse->data<float>() : nullptr;
  p.sink = call.sink ? call.sink->data<float>() : nullptr;
}

template <class T, int C, int kAhead>
void run(const CombineCall& call, const Stream& stream) {
  launch<Combine<T, C, kAhead>>(stream, grid_of(call), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
}

// On a GPU the parts of a row are on their way at once, or 16 of them: what registers allow. A CPU goes through them.
constexpr int kAheadOnGpu = 16;

Analysis analyze_combine(const ShapeValues& shape) {
  const std::int64_t splits = shape["splits"], batch = shape["batch"], heads = shape["heads"], seqlen_q = shape["seqlen_q"];
  const Tensor parts = placeholder({splits, batch, heads, seqlen_q, 128}, DType::f32);
  const Tensor part_lse = placeholder({splits, batch, heads, seqlen_q}, DType::f32),
               lse = placeholder({batch, heads, seqlen_q}, DType::f32);
  const CombineCall call{parts, part_lse, placeholder({batch, seqlen_q, heads, 128}, DType::bf16), shape["lse"] ? &lse : nullptr};
  return analyze<Combine<bf16, 128, kAheadOnGpu>>(grid_of(call), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
}

}  // namespace

void combine(const CombineCall& call, const Stream& stream) {
  if (call.o.numel() == 0) return;
  with_float_type(call.o.dtype(), [&]<class T>(std::type_identity<T>) {
    if (!stream.device().is_cuda()) return run<T, 256, 1>(call, stream);
    call.o.shape(3) <= 128 ? run<T, 128, kAheadOnGpu>(call, stream) : run<T, 256, kAheadOnGpu>(call, stream);
  });
}

KernelVariant combine_variant() {
  return {make_spec(kernel_info<Combine<bf16, 128, kAheadOnGpu>>, true, true, "attention_combine_bf16"), analyze_combine};
}

}  // namespace tw::kernels::attention

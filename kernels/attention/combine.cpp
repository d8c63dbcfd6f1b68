#include "kernels/attention/combine.hpp"

#include "kernels/attention/combine.tile.hpp"
#include "kernels/rows.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

namespace {

template <class T, int C, int kAhead>
void run(const CombineCall& call, const Stream& stream) {
  const Shape& shape = call.parts.shape();
  const std::int64_t rows = shape[1] * shape[2] * shape[3];
  const TileGrid grid{static_cast<int>(call.o.shape(2)), static_cast<int>(call.o.shape(1)), static_cast<int>(call.o.shape(0))};
  launch<Combine<T, C, kAhead>>(stream, grid, [&](auto& bind, auto& p) {
    bind(p.parts, call.parts.reshape({shape[0], rows, shape[4]}).transpose(0, 1));
    p.part_lse = call.part_lse.template data<float>();
    bind(p.o, call.o);
    p.lse = call.lse ? call.lse->template data<float>() : nullptr;
    p.sink = call.sink ? call.sink->template data<float>() : nullptr;
  });
}

}  // namespace

void combine(const CombineCall& call, const Stream& stream) {
  if (call.o.numel() == 0) return;
  with_float_type(call.o.dtype(), [&]<class T>(std::type_identity<T>) {
    // On a GPU the parts of a row are on their way at once, or 16 of them: what registers allow. A CPU goes through them.
    if (!stream.device().is_cuda()) return run<T, 256, 1>(call, stream);
    call.o.shape(3) <= 128 ? run<T, 128, 16>(call, stream) : run<T, 256, 16>(call, stream);
  });
}

}  // namespace tw::kernels::attention

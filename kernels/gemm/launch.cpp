#include "kernels/gemm/launch.hpp"

namespace tw::kernels::gemm {

namespace {
/// A view of B, [N, K] or [batch, N, K], as [batch, K / panel, N, panel].
Tensor in_panels(const Tensor& b) {
  const bool batched = b.rank() == 3;
  const std::int64_t panels = b.shape(-1) / kSkinnyPanel;
  return Tensor::borrow(b.data(), {batched ? b.shape(0) : 1, panels, b.shape(-2), kSkinnyPanel}, b.dtype(), b.device(),
                        {batched ? b.stride(0) : 0, kSkinnyPanel * b.stride(-1), b.stride(-2), b.stride(-1)});
}
/// A view of B, [N, K], as [1, N / 2, 2, K]: rows n and n + N / 2 together.
Tensor in_pairs(const Tensor& b) {
  const std::int64_t half = b.shape(0) / 2;
  return Tensor::borrow(b.data(), {1, half, 2, b.shape(1)}, b.dtype(), b.device(), {0, b.stride(0), half * b.stride(0), b.stride(1)});
}
}  // namespace

Launch make_launch(const Call& call, const Kernel& k, const Tensor& partial) {
  const auto tiles = [&](int m, int n, int batch) { return TileGrid{ceil_div(m, k.tile.bm), ceil_div(n, k.tile.bn), batch}; };
  const Tensor a = k.layout.a_rows ? call.a.transpose(-2, -1) : call.a, b = k.layout.b_rows ? call.b.transpose(-2, -1) : call.b;
  switch (k.form) {
    case Kernel::sum:
      return {k,       {ceil_div(call.m, kSum.rows), ceil_div(call.n, kSum.cols), call.batch},
              partial, {},
              call.d,  static_cast<int>(partial.shape(1))};
    case Kernel::gemv:
      return {k, {ceil_div(call.n, kGemv.rows), call.batch}, a, b, call.d.transpose(-2, -1)};
    case Kernel::skinny:
      return {k, {ceil_div(call.n, k.tile.bm), call.batch}, a, in_panels(b), call.d};
    case Kernel::partial: {
      const int splits = static_cast<int>(partial.shape(1)), batch = call.batch * splits;
      const Tensor d = partial.reshape({batch, call.m, call.n});
      return {k, tiles(call.m, call.n, batch), a, b, d, splits};
    }
    case Kernel::whole:
    case Kernel::block_scaled:
    case Kernel::stream_k:
      break;
  }
  return {k, tiles(call.m, call.n, call.batch), a, k.interleaved ? in_pairs(b) : b, call.d};
}

Launch make_stream_k_launch(const Call& call, const Kernel& k, const Tensor& sums, u32* complete) {
  Launch x = make_launch(call, k);
  x.sums = sums;
  x.complete = complete;
  x.tiles = x.grid;
  const int steps = ceil_div(call.k, kStepBytes / static_cast<int>(size_of(call.a.dtype())));
  x.shares = Shares::of(x.tiles.count(), steps, static_cast<int>(sums.shape(0)));
  x.grid = {x.tiles.count() > 0 ? x.shares.parts() : 0};
  return x;
}

}  // namespace tw::kernels::gemm

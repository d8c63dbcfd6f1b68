#include "kernels/convolution/call.hpp"

namespace tw::kernels::convolution {

namespace {

/// Tiles of one thread. Large: every pixel is packed once for each tap, so wide tiles share that work. Small: so that small images occupy
/// every thread.
struct Large {
  static constexpr int bm = 256, bn = 384, bk = 192;
};
struct Small {
  static constexpr int bm = 32, bn = 192, bk = 192;
};

template <class T, class Act, class Tiles>
void launch_tiles(const Call& call, const Tiling& tiling) {
  using Kernel = Convolution<T, Contract::columns, Act, Tiles::bm, Tiles::bn, Tiles::bk, 2, 1>;
  const Tensor w = call.w.transpose(0, 2).transpose(0, 1);  // packing takes any strides
  launch_cpu<Kernel>(grid_of(tiling, call, Tiles::bn), [&](auto& bind, auto& p) { bind_call<T, Tiles::bk>(bind, p, call, w, tiling); });
}

template <class T>
void run(const Call& call) {
  const Problem problem = call.problem(Large::bk, 1);
  const Tiling large = choose_window(problem, Large::bm);
  const bool use_large = large.tiles() * ceil_div(call.out_channels(), Large::bn) >= cpu_threads();
  with_activation(call.activation, [&]<class Act>(std::type_identity<Act>) {
    use_large ? launch_tiles<T, Act, Large>(call, large) : launch_tiles<T, Act, Small>(call, choose_window(problem, Small::bm));
  });
}

}  // namespace

void run_on_cpu(const Call& call) {
  switch (call.x.dtype()) {
    case DType::f16:
      return run<f16>(call);
    case DType::bf16:
      return run<bf16>(call);
    default:
      return run<float>(call);
  }
}

}  // namespace tw::kernels::convolution

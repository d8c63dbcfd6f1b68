#include "kernels/gemm/call.hpp"

namespace tw::kernels::gemm {

namespace {

/// Tiles of one thread, measured (README.md). Large: packing costs a twentieth of the time. Small: for few rows, and so that small products
/// occupy every thread.
struct Large {
  static constexpr int bm = 384, bn = 384, bk = 192;
};
struct Small {
  static constexpr int bm = 32, bn = 192, bk = 192;
};

template <class T, class Act, class Tiles>
void launch_tiles(const Call& call) {
  // Packing takes any strides, so one order of contraction serves all layouts.
  using Kernel = Gemm<T, Contract::columns, Contract::columns, Act, true, Tiles::bm, Tiles::bn, Tiles::bk, 2, 1, 1>;
  const TileGrid grid{ceil_div(call.m, Tiles::bm), ceil_div(call.n, Tiles::bn), call.batch};
  launch_cpu<Kernel>(grid, [&](auto& bind, auto& p) { bind_call<T>(bind, p, call, call.a, call.b); });
}

template <class T>
void run(const Call& call) {
  const long large_tiles = static_cast<long>(ceil_div(call.m, Large::bm)) * ceil_div(call.n, Large::bn) * call.batch;
  const bool large = call.m > Small::bm && large_tiles >= cpu_threads();
  with_activation(call.activation, [&]<class Act>(std::type_identity<Act>) {
    large ? launch_tiles<T, Act, Large>(call) : launch_tiles<T, Act, Small>(call);
  });
}

}  // namespace

void run_on_cpu(const Call& call) {
  switch (call.a.dtype()) {
    case DType::f16:
      return run<f16>(call);
    case DType::bf16:
      return run<bf16>(call);
    default:
      return run<float>(call);
  }
}

}  // namespace tw::kernels::gemm

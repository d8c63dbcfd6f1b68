#include "kernels/gemm/block_scaled.tile.hpp"
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

template <class T, class Out, class Act, class Size>
void launch_tiles(const Call& call) {
  // Packing takes any strides, so one order of contraction serves all layouts.
  using Kernel =
      Gemm<Operands<T, Contract::columns, Contract::columns>, Finish<Out, Act, true>, Tiles<Size::bm, Size::bn, Size::bk, 2, 1, 1>>;
  const TileGrid grid{ceil_div(call.m, Size::bm), ceil_div(call.n, Size::bn), call.batch};
  launch_cpu<Kernel>(grid, [&](auto& bind, auto& p) { bind_call(bind, p, call, call.a, call.b); });
}

void launch_block_scaled(const Call& call) {
  using Kernel = BlockScaledGemm<bf16, Tiles<128, 128, 128, 2, 1, 1>>;
  launch_cpu<Kernel>({ceil_div(call.m, 128), ceil_div(call.n, 128)}, [&](auto& bind, auto& p) { bind_block_scaled(bind, p, call); });
}

}  // namespace

void run_on_cpu(const Call& call) {
  if (call.block_scaled()) return launch_block_scaled(call);
  const long large_tiles = static_cast<long>(ceil_div(call.m, Large::bm)) * ceil_div(call.n, Large::bn) * call.batch;
  const bool large = call.m > Small::bm && large_tiles >= cpu_threads();
  with_types(call.a.dtype(), [&]<class T, class Out>(std::type_identity<T>, std::type_identity<Out>) {
    with_epilogue(call.activation, [&]<class Act>(std::type_identity<Act>) {
      if constexpr (!is_same<T, i8> || is_same<Act, Identity>)
        large ? launch_tiles<T, Out, Act, Large>(call) : launch_tiles<T, Out, Act, Small>(call);
    });
  });
}

}  // namespace tw::kernels::gemm

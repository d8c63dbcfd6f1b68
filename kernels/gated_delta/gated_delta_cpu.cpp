#include <tuple>
#include <utility>

#include "kernels/gated_delta/call.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gated_delta {
namespace {

/// Normalised queries or keys.
template <class T>
Tensor normalised(const Tensor& x) {
  const Tensor y = Tensor::empty(x.shape(), x.dtype());
  const RowViews views(std::initializer_list<const Tensor*>{&x, &y});
  launch_cpu<Normalise<T, 128>>(row_grid("gated_delta_rule", views, 1, Normalise<T, 128>::tile_rows, 1), [&](auto& bind, auto& p) {
    bind(p.x, views[0]);
    bind(p.y, views[1]);
  });
  return y;
}

}  // namespace

void chunks_on_cpu(Call call) {
  call.beta = call.beta.to(DType::f32);
  make_workspace(call, padded_dim(call), [](Shape shape, DType dtype) { return Tensor::empty(std::move(shape), dtype); });
  with_float_type(call.q.dtype(), [&]<class T>(std::type_identity<T>) {
    if (call.normalise) {
      call.q = normalised<T>(call.q);
      call.k = normalised<T>(call.k);
    }
    with_dim(call, [&]<int dim>(Constant<dim>) {
      if (call.gates_of_channels()) {
        if (call.chunks() > 0)
          launch_cpu<PrepareChannels<T, float>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_prepare_channels(bind, p, call); });
        launch_cpu<WalkChannels<T, dim, 128, 1>>(walk_grid(call, 128), [&](auto& bind, auto& p) { bind_walk_channels(bind, p, call); });
        return;
      }
      if (call.chunks() > 0)
        launch_cpu<Prepare<T, float, dim>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_prepare(bind, p, call); });
      launch_cpu<Walk<T, dim, 128, 2>>(walk_grid(call, 128), [&](auto& bind, auto& p) { bind_walk(bind, p, call); });
    });
  });
}

void gradients_on_cpu(Call call, Gradient gradient) {
  call.beta = call.beta.to(DType::f32);
  const Tensor q = call.q, k = call.k;
  const auto make = [](Shape shape, DType dtype) { return Tensor::empty(std::move(shape), dtype); };
  make_workspace(call, 128, make);
  make_workspace(call, gradient, make);
  with_float_type(call.q.dtype(), [&]<class T>(std::type_identity<T>) {
    if (call.normalise && q.numel() > 0) {
      call.q = normalised<T>(q);
      call.k = normalised<T>(k);
    }
    if (call.chunks() > 0)
      launch_cpu<Prepare<T, float, 128>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_prepare(bind, p, call); });
    const TileGrid walks = walk_grid(call, 128);
    if (call.chunks() > 0) launch_cpu<States<T, 128, 128, 2>>(walks, [&](auto& bind, auto& p) { bind_states(bind, p, call, gradient); });
    launch_cpu<StateGradients<T, 128, 128, 1>>(walks, [&](auto& bind, auto& p) { bind_state_gradients(bind, p, call, gradient); });
    if (call.chunks() == 0) return;
    const auto run_gradients = [&]<class Beta>() {
      launch_cpu<Gradients<T, Beta, 3, 1>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_gradients(bind, p, call, gradient); });
    };
    gradient.d_beta.dtype() == DType::f32 ? run_gradients.template operator()<float>() : run_gradients.template operator()<T>();
    const auto finish_rows = [&]<bool normalise>() {
      using Kernel = RowGradients<T, normalise>;
      for (const auto& [x, each, dx] : {std::tie(q, gradient.each_dq, gradient.dq), std::tie(k, gradient.each_dk, gradient.dk)})
        launch_cpu<Kernel>(row_gradients_grid(x, Kernel::tile_rows),
                           [&](auto& bind, auto& p) { bind_row_gradients(bind, p, call, x, each, dx); });
    };
    if (call.normalise)
      finish_rows.template operator()<true>();
    else if (call.group() > 1)
      finish_rows.template operator()<false>();
  });
}

void steps_on_cpu(Call call) {
  call.beta = call.beta.to(DType::f32);
  with_float_type(call.q.dtype(), [&]<class T>(std::type_identity<T>) {
    with_dim(call, [&]<int dim>(Constant<dim>) {
      const auto launch = [&]<bool normalise, bool channels>() {
        using Kernel = Step<T, float, dim, normalise, channels>;
        launch_cpu<Kernel>(walk_grid(call, Kernel::cols), [&](auto& bind, auto& p) { bind_step(bind, p, call); });
      };
      if (call.gates_of_channels())
        call.normalise ? launch.template operator()<true, true>() : launch.template operator()<false, true>();
      else
        call.normalise ? launch.template operator()<true, false>() : launch.template operator()<false, false>();
    });
  });
}

}  // namespace tw::kernels::gated_delta

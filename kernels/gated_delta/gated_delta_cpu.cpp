#include <initializer_list>
#include <utility>

#include "kernels/gated_delta/call.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gated_delta {

Tensor normalised_on_cpu(const Tensor& x) {
  const Tensor y = Tensor::empty(x.shape(), x.dtype());
  const RowViews views(std::initializer_list<const Tensor*>{&x, &y});
  with_float_type(x.dtype(), [&]<class T>(std::type_identity<T>) {
    using Kernel = Normalise<T, kMostDims>;
    launch_cpu<Kernel>(row_grid("gated_delta_rule", views, 1, Kernel::tile_rows, 1), [&](auto& bind, auto& p) {
      bind(p.x, views[0]);
      bind(p.y, views[1]);
    });
  });
  return y;
}

void prepare_channels_on_cpu(const Call& call) {
  with_float_type(call.q.dtype(), [&]<class T>(std::type_identity<T>) {
    launch_cpu<PrepareChannels<T, float, 1>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_prepare_channels(bind, p, call); });
    launch_cpu<InvertChannels<T, 1>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_invert_channels(bind, p, call); });
  });
}

void chunks_on_cpu(Call call) {
  call.beta = call.beta.to(DType::f32);
  make_workspace(call, padded_dim(call), [](Shape shape, DType dtype) { return Tensor::empty(std::move(shape), dtype); });
  if (call.normalise) {
    call.q = normalised_on_cpu(call.q);
    call.k = normalised_on_cpu(call.k);
  }
  with_float_type(call.q.dtype(), [&]<class T>(std::type_identity<T>) {
    with_dim(call, [&]<int dim>(Constant<dim>) {
      if constexpr (dim <= kMostChannels) {
        if (call.gates_of_channels()) {
          if (call.chunks() > 0) prepare_channels_on_cpu(call);
          launch_cpu<WalkChannels<T, dim, 128, 1>>(walk_grid(call, 128), [&](auto& bind, auto& p) { bind_walk_channels(bind, p, call); });
          return;
        }
      }
      if (call.chunks() > 0)
        launch_cpu<Prepare<T, float, dim>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_prepare(bind, p, call); });
      const auto fill = [&](auto& bind, auto& p) { bind_walk(bind, p, call); };
      if constexpr (dim <= 128)
        launch_cpu<Walk<T, dim, 128, 2>>(walk_grid(call, 128), fill);
      else
        launch_cpu<WideWalk<T, 2>>(walk_grid(call, WideWalk<T, 2>::Slice), fill);
    });
  });
}

void steps_on_cpu(Call call) {
  call.beta = call.beta.to(DType::f32);
  with_float_type(call.q.dtype(), [&]<class T>(std::type_identity<T>) {
    with_dim(call, [&]<int dim>(Constant<dim>) {
      const auto launch = [&]<bool normalise, bool channels>() {
        using Kernel = Step<T, float, dim, normalise, channels>;
        launch_cpu<Kernel>(step_grid(call, Kernel::cols), [&](auto& bind, auto& p) { bind_step(bind, p, call); });
      };
      if (call.gates_of_channels()) {
        if constexpr (dim <= kMostChannels)
          call.normalise ? launch.template operator()<true, true>() : launch.template operator()<false, true>();
        return;
      }
      call.normalise ? launch.template operator()<true, false>() : launch.template operator()<false, false>();
    });
  });
}

}  // namespace tw::kernels::gated_delta

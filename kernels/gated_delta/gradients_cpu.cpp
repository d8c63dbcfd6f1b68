#include <tuple>
#include <utility>

#include "kernels/gated_delta/call.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gated_delta {
namespace {

/// The gradients' kernels but RowGradients, for gates of channels.
template <class T>
void channel_gradients(const Call& call, const Gradient& gradient) {
  const TileGrid chunks = prepare_grid(call), walks = walk_grid(call, 128);
  if (call.chunks() > 0) {
    prepare_channels_on_cpu(call);
    launch_cpu<StatesChannels<T, 128, 128, 1>>(walks, [&](auto& bind, auto& p) { bind_states_channels(bind, p, call, gradient); });
  }
  launch_cpu<StateGradientsChannels<T, 128, 128, 1>>(walks,
                                                     [&](auto& bind, auto& p) { bind_state_gradients_channels(bind, p, call, gradient); });
  if (call.chunks() == 0) return;
  launch_cpu<ValueGradients<T, 3>>(chunks, [&](auto& bind, auto& p) { bind_value_gradients(bind, p, call, gradient); });
  launch_cpu<ChannelGradients<T, float>>(chunks, [&](auto& bind, auto& p) { bind_channel_gradients(bind, p, call, gradient); });
}

/// The same for gates of heads.
template <class T>
void head_gradients(const Call& call, const Gradient& gradient) {
  const TileGrid chunks = prepare_grid(call), walks = walk_grid(call, 128), wide_walks = walk_grid(call, WideStates<T, 1>::Slice);
  const auto prepare = [&](auto& bind, auto& p) { bind_prepare(bind, p, call); };
  const auto weights = [&](auto& bind, auto& p) { bind_weights(bind, p, call, gradient); };
  const auto states = [&](auto& bind, auto& p) { bind_states(bind, p, call, gradient); };
  const auto state_gradients = [&](auto& bind, auto& p) { bind_state_gradients(bind, p, call, gradient); };
  const auto wide_state_gradients = [&](auto& bind, auto& p) { bind_wide_state_gradients(bind, p, call, gradient); };
  const auto gradients = [&](auto& bind, auto& p) { bind_gradients(bind, p, call, gradient); };
  if (call.chunks() > 0) {
    if (wide_keys(call)) {
      launch_cpu<Prepare<T, float, kMostDims>>(chunks, prepare);
      launch_cpu<Weights<T>>(chunks, weights);
      launch_cpu<WideStates<T, 2>>(wide_walks, states);
    } else {
      launch_cpu<Prepare<T, float, 128>>(chunks, prepare);
      launch_cpu<States<T, 128, 128, 2>>(walks, states);
    }
  }
  if (wide_keys(call))
    launch_cpu<WideStateGradients<T, 1>>(wide_walks, wide_state_gradients);
  else
    launch_cpu<StateGradients<T, 128, 128, 1>>(walks, state_gradients);
  if (call.chunks() == 0) return;
  if (wide_gradients(call))
    launch_cpu<WideGradients<T, float, 2, 1>>(chunks, gradients);
  else
    launch_cpu<Gradients<T, float, 3, 1>>(chunks, gradients);
}

}  // namespace

void gradients_on_cpu(Call call, Gradient gradient) {
  call.beta = call.beta.to(DType::f32);
  const Tensor d_beta = std::exchange(gradient.d_beta, Tensor::zeros(call.beta.shape(), DType::f32));  // 0 for tokens of no sequence
  const Tensor q = call.q, k = call.k;
  const auto make = [](Shape shape, DType dtype) { return Tensor::empty(std::move(shape), dtype); };
  make_workspace(call, kMostChannels, make);
  make_workspace(call, gradient, make);
  if (call.normalise && q.numel() > 0) {
    call.q = normalised_on_cpu(q);
    call.k = normalised_on_cpu(k);
  }
  with_float_type(call.q.dtype(), [&]<class T>(std::type_identity<T>) {
    call.gates_of_channels() ? channel_gradients<T>(call, gradient) : head_gradients<T>(call, gradient);
    if (call.chunks() == 0) return;
    const auto finish_rows = [&]<bool normalise>() {
      using Kernel = RowGradients<T, normalise, kMostDims>;
      for (const auto& [x, each, dx] : {std::tie(q, gradient.each_dq, gradient.dq), std::tie(k, gradient.each_dk, gradient.dk)})
        launch_cpu<Kernel>(row_gradients_grid(x, Kernel::tile_rows),
                           [&](auto& bind, auto& p) { bind_row_gradients(bind, p, call, x, each, dx); });
    };
    if (call.normalise)
      finish_rows.template operator()<true>();
    else if (call.group() > 1)
      finish_rows.template operator()<false>();
  });
  d_beta.copy_from(gradient.d_beta.to(d_beta.dtype()));
}

}  // namespace tw::kernels::gated_delta

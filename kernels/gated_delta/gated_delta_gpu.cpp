#include <compare>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/gated_delta/call.hpp"
#include "kernels/gated_delta/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/named.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gated_delta {
namespace {

enum class Kind {
  prepare,
  walk,
  wide_walk,
  prepare_channels,
  invert_channels,
  walk_channels,
  step,
  normalise,
  states,
  state_gradients,
  gradients,
  row_gradients,
  weights,
  wide_states,
  wide_state_gradients,
  wide_gradients,
  states_channels,
  state_gradients_channels,
  value_gradients,
  channel_gradients
};

struct DeltaKernel {
  Kind kind;
  DType x, beta;
  int dim;
  bool normalise;     ///< step, row_gradients
  int slice, stages;  ///< walks, states and their gradients; of gradients the stages of states and of tokens; blocks of prepare_channels
                      ///< and invert_channels
  bool channels = false;  ///< step: whether gates are of channels
  auto operator<=>(const DeltaKernel&) const = default;
};

std::string type_of(const DeltaKernel& k) {
  const char* const x = element_name(k.x);
  switch (k.kind) {
    case Kind::prepare:
      return tw::format("tw::kernels::gated_delta::Prepare<{}, {}, {}>", x, element_name(k.beta), k.dim);
    case Kind::walk:
      return tw::format("tw::kernels::gated_delta::Walk<{}, {}, {}, {}>", x, k.dim, k.slice, k.stages);
    case Kind::wide_walk:
      return tw::format("tw::kernels::gated_delta::WideWalk<{}, {}>", x, k.stages);
    case Kind::prepare_channels:
      return tw::format("tw::kernels::gated_delta::PrepareChannels<{}, {}, {}>", x, element_name(k.beta), k.stages);
    case Kind::invert_channels:
      return tw::format("tw::kernels::gated_delta::InvertChannels<{}, {}>", x, k.stages);
    case Kind::walk_channels:
      return tw::format("tw::kernels::gated_delta::WalkChannels<{}, {}, {}, {}>", x, k.dim, k.slice, k.stages);
    case Kind::step:
      return tw::format("tw::kernels::gated_delta::Step<{}, {}, {}, {}, {}>", x, element_name(k.beta), k.dim, bool_name(k.normalise),
                        bool_name(k.channels));
    case Kind::states:
      return tw::format("tw::kernels::gated_delta::States<{}, {}, {}, {}>", x, k.dim, k.slice, k.stages);
    case Kind::state_gradients:
      return tw::format("tw::kernels::gated_delta::StateGradients<{}, {}, {}, {}>", x, k.dim, k.slice, k.stages);
    case Kind::gradients:
      return tw::format("tw::kernels::gated_delta::Gradients<{}, {}, {}, {}>", x, element_name(k.beta), k.stages, k.slice);
    case Kind::weights:
      return tw::format("tw::kernels::gated_delta::Weights<{}>", x);
    case Kind::wide_states:
      return tw::format("tw::kernels::gated_delta::WideStates<{}, {}>", x, k.stages);
    case Kind::wide_state_gradients:
      return tw::format("tw::kernels::gated_delta::WideStateGradients<{}, {}>", x, k.stages);
    case Kind::wide_gradients:
      return tw::format("tw::kernels::gated_delta::WideGradients<{}, {}, {}, {}>", x, element_name(k.beta), k.stages, k.slice);
    case Kind::states_channels:
      return tw::format("tw::kernels::gated_delta::StatesChannels<{}, {}, {}, {}>", x, k.dim, k.slice, k.stages);
    case Kind::state_gradients_channels:
      return tw::format("tw::kernels::gated_delta::StateGradientsChannels<{}, {}, {}, {}>", x, k.dim, k.slice, k.stages);
    case Kind::value_gradients:
      return tw::format("tw::kernels::gated_delta::ValueGradients<{}, {}>", x, k.stages);
    case Kind::channel_gradients:
      return tw::format("tw::kernels::gated_delta::ChannelGradients<{}, {}>", x, element_name(k.beta));
    case Kind::row_gradients:
      return tw::format("tw::kernels::gated_delta::RowGradients<{}, {}, {}>", x, bool_name(k.normalise), k.dim);
    default:
      return tw::format("tw::kernels::gated_delta::Normalise<{}, {}>", x, k.dim);
  }
}

/// Two warpgroups and stages take most of a Hopper SM's shared memory. Some GPUs of the generic target have 99 KB for a block.
DeltaKernel walk_kernel(DType x, int dim, bool generic) { return {Kind::walk, x, x, dim, false, generic ? 64 : 128, generic ? 1 : 2}; }
/// The same for keys of more than 128 dimensions.
DeltaKernel wide_walk_kernel(DType x, bool generic) { return {Kind::wide_walk, x, x, kMostDims, false, 64, generic ? 1 : 2}; }

DeltaKernel prepare_channels_kernel(DType x, DType beta, bool generic) {
  return {Kind::prepare_channels, x, beta, 128, false, 0, generic ? 1 : 2};
}
DeltaKernel invert_channels_kernel(DType x, bool generic) { return {Kind::invert_channels, x, x, 0, false, 0, generic ? 2 : 3}; }
DeltaKernel walk_channels_kernel(DType x, int dim, bool generic) {
  return {Kind::walk_channels, x, x, dim, false, generic ? 64 : 128, generic ? 1 : 2};
}

DeltaKernel states_kernel(DType x, bool generic) { return {Kind::states, x, x, 128, false, generic ? 64 : 128, generic ? 1 : 2}; }
DeltaKernel state_gradients_kernel(DType x, bool generic) {
  return {Kind::state_gradients, x, x, 128, false, generic ? 64 : 128, generic ? 1 : 2};
}
DeltaKernel states_channels_kernel(DType x, bool generic) {
  return {Kind::states_channels, x, x, kMostChannels, false, generic ? 64 : 128, generic ? 1 : 2};
}
DeltaKernel state_gradients_channels_kernel(DType x, bool generic) {
  return {Kind::state_gradients_channels, x, x, kMostChannels, false, generic ? 64 : 128, generic ? 1 : 2};
}
DeltaKernel value_gradients_kernel(DType x) { return {Kind::value_gradients, x, x, kMostChannels, false, 0, 3}; }
DeltaKernel channel_gradients_kernel(DType x, DType beta) { return {Kind::channel_gradients, x, beta, kMostChannels, false, 0, 0}; }
/// Seven tiles of tokens and two states are in flight on Hopper, so that the next chunk's arrive under this one's products. The others have
/// room for what a product needs.
DeltaKernel gradients_kernel(DType x, DType beta, bool generic) {
  return {Kind::gradients, x, beta, 128, false, generic ? 1 : 2, generic ? 3 : 7};
}

/// The same for wide keys. A block takes at most 99 KB on the generic target.
DeltaKernel weights_kernel(DType x) { return {Kind::weights, x, x, kMostDims, false, 0, 0}; }
DeltaKernel wide_states_kernel(DType x, bool generic) { return {Kind::wide_states, x, x, kMostDims, false, 64, generic ? 1 : 2}; }
DeltaKernel wide_state_gradients_kernel(DType x, bool generic) {
  return {Kind::wide_state_gradients, x, x, kMostDims, false, 64, generic ? 1 : 2};
}
DeltaKernel wide_gradients_kernel(DType x, DType beta, bool generic) {
  return {Kind::wide_gradients, x, beta, kMostDims, false, generic ? 1 : 2, generic ? 2 : 7};
}

/// The tables of the forward and the backward pass, and of gates of channels: a table's kernels have one source.
KernelTable<DeltaKernel>& backward_table() {
  static KernelTable<DeltaKernel> kernels(type_of, kBackwardSource);
  return kernels;
}
KernelTable<DeltaKernel>& table() {
  static KernelTable<DeltaKernel> kernels(type_of, kSource);
  return kernels;
}
KernelTable<DeltaKernel>& wide_table() {
  static KernelTable<DeltaKernel> kernels(type_of, kWideSource);
  return kernels;
}
KernelTable<DeltaKernel>& wide_backward_table() {
  static KernelTable<DeltaKernel> kernels(type_of, kWideBackwardSource);
  return kernels;
}
KernelTable<DeltaKernel>& channels_backward_table() {
  static KernelTable<DeltaKernel> kernels(type_of, kChannelsBackwardSource);
  return kernels;
}
KernelTable<DeltaKernel>& channels_table() {
  static KernelTable<DeltaKernel> kernels(type_of, kChannelsSource);
  return kernels;
}

/// Calls f(std::type_identity<X>, std::type_identity<Beta>) with the types of q and beta.
template <class F>
void with_types(const Call& call, F f) {
  with_float_type(call.q.dtype(), [&]<class X>(std::type_identity<X> x) {
    if (call.beta.dtype() == DType::f32)
      f(x, std::type_identity<float>{});
    else
      f(x, x);
  });
}

using Target = sm_90a::Target<>;

/// Normalised queries or keys.
template <class X>
Tensor normalised_on_gpu(const Tensor& x, const Stream& stream) {
  const Tensor y = workspace(x.shape(), x.dtype(), stream);
  const RowViews views(std::initializer_list<const Tensor*>{&x, &y});
  using Params = typename Normalise<X, 128>::template On<Target>::Params;
  const int dim = x.shape(3) <= 128 ? 128 : kMostDims;
  detail::launch_named<Params>(table()[{Kind::normalise, x.dtype(), x.dtype(), dim, false, 0, 0}], stream,
                               row_grid("gated_delta_rule", views, 1, Normalise<X, 128>::tile_rows, 1), [&](auto& bind, auto& p) {
                                 bind(p.x, views[0]);
                                 bind(p.y, views[1]);
                               });
  return y;
}

/// The kernels before WalkChannels.
template <class X, class Beta>
void launch_prepare_channels(const Call& call) {
  const bool generic = call.stream.target() == GpuTarget::cuda;
  KernelTable<DeltaKernel>& kernels = channels_table();
  detail::launch_named<typename PrepareChannels<X, Beta, 2>::template On<Target>::Params>(
      kernels[prepare_channels_kernel(call.q.dtype(), call.beta.dtype(), generic)], call.stream, prepare_grid(call),
      [&](auto& bind, auto& p) { bind_prepare_channels(bind, p, call); });
  detail::launch_named<typename InvertChannels<X, 3>::template On<Target>::Params>(
      kernels[invert_channels_kernel(call.q.dtype(), generic)], call.stream, prepare_grid(call),
      [&](auto& bind, auto& p) { bind_invert_channels(bind, p, call); });
}

template <class X, class Beta>
void launch_chunks(Call& call) {
  if (call.normalise && call.q.numel() > 0) {
    call.q = normalised_on_gpu<X>(call.q, call.stream);
    call.k = normalised_on_gpu<X>(call.k, call.stream);
  }
  make_workspace(call, padded_dim(call), [&](Shape shape, DType dtype) { return workspace(std::move(shape), dtype, call.stream); });
  const DType x = call.q.dtype();
  const bool generic = call.stream.target() == GpuTarget::cuda;
  if (call.gates_of_channels()) {
    if (call.chunks() > 0) launch_prepare_channels<X, Beta>(call);
    const DeltaKernel walk = walk_channels_kernel(x, padded_dim(call), generic);
    detail::launch_named<typename WalkChannels<X, 128, 128, 1>::template On<Target>::Params>(
        channels_table()[walk], call.stream, walk_grid(call, walk.slice), [&](auto& bind, auto& p) { bind_walk_channels(bind, p, call); });
    return;
  }
  if (call.chunks() > 0)
    detail::launch_named<typename Prepare<X, Beta, 128>::template On<Target>::Params>(
        table()[{Kind::prepare, x, call.beta.dtype(), padded_dim(call), false, 0, 0}], call.stream, prepare_grid(call),
        [&](auto& bind, auto& p) { bind_prepare(bind, p, call); });
  const bool wide = wide_keys(call);
  const DeltaKernel walk = wide ? wide_walk_kernel(x, generic) : walk_kernel(x, padded_dim(call), generic);
  detail::launch_named<typename Walk<X, 128, 128, 2>::template On<Target>::Params>((wide ? wide_table() : table())[walk], call.stream,
                                                                                   walk_grid(call, walk.slice),
                                                                                   [&](auto& bind, auto& p) { bind_walk(bind, p, call); });
}

}  // namespace

bool chunks_fit(const Call& call) {
  const std::int64_t generic = generic_shared_bytes(call.stream);
  return call.dim() <= 128 || generic == 0 || generic >= 160 * 1024;
}

void chunks_on_gpu(Call call) {
  const auto with_beta = [&]<class X>() { call.beta.dtype() == DType::f32 ? launch_chunks<X, float>(call) : launch_chunks<X, X>(call); };
  call.q.dtype() == DType::f16 ? with_beta.template operator()<f16>() : with_beta.template operator()<bf16>();
}

namespace {

template <class Kernel>
void launch_for_gradients(KernelTable<DeltaKernel>& from, const DeltaKernel& kernel, const Stream& stream, TileGrid grid, auto fill) {
  detail::launch_named<typename Kernel::template On<Target>::Params>(from[kernel], stream, grid, fill);
}

/// The gradients' kernels but RowGradients, for gates of heads.
template <class X, class Beta>
void launch_head_gradients(const Call& call, const Gradient& gradient) {
  const Stream& stream = call.stream;
  const DType x = call.q.dtype(), beta = call.beta.dtype();
  const bool generic = stream.target() == GpuTarget::cuda;
  const bool wide = wide_keys(call);
  KernelTable<DeltaKernel>& walks = wide ? wide_backward_table() : backward_table();
  if (call.chunks() > 0) {
    launch_for_gradients<Prepare<X, Beta, 128>>(table(), {Kind::prepare, x, beta, padded_dim(call), false, 0, 0}, stream,
                                                prepare_grid(call), [&](auto& bind, auto& p) { bind_prepare(bind, p, call); });
    if (wide)
      launch_for_gradients<Weights<X>>(walks, weights_kernel(x), stream, prepare_grid(call),
                                       [&](auto& bind, auto& p) { bind_weights(bind, p, call, gradient); });
    const DeltaKernel states = wide ? wide_states_kernel(x, generic) : states_kernel(x, generic);
    launch_for_gradients<States<X, 128, 128, 2>>(walks, states, stream, walk_grid(call, states.slice),
                                                 [&](auto& bind, auto& p) { bind_states(bind, p, call, gradient); });
  }
  if (wide) {
    const DeltaKernel kernel = wide_state_gradients_kernel(x, generic);
    launch_for_gradients<WideStateGradients<X, 1>>(walks, kernel, stream, walk_grid(call, kernel.slice),
                                                   [&](auto& bind, auto& p) { bind_wide_state_gradients(bind, p, call, gradient); });
  } else {
    const DeltaKernel kernel = state_gradients_kernel(x, generic);
    launch_for_gradients<StateGradients<X, 128, 128, 1>>(walks, kernel, stream, walk_grid(call, kernel.slice),
                                                         [&](auto& bind, auto& p) { bind_state_gradients(bind, p, call, gradient); });
  }
  if (call.chunks() == 0) return;
  const auto fill = [&](auto& bind, auto& p) { bind_gradients(bind, p, call, gradient); };
  if (wide_gradients(call))
    launch_for_gradients<WideGradients<X, Beta, 2, 1>>(wide_backward_table(), wide_gradients_kernel(x, beta, generic), stream,
                                                       prepare_grid(call), fill);
  else
    launch_for_gradients<Gradients<X, Beta, 3, 1>>(backward_table(), gradients_kernel(x, beta, generic), stream, prepare_grid(call), fill);
}

/// The same for gates of channels.
template <class X, class Beta>
void launch_channel_gradients(const Call& call, const Gradient& gradient) {
  const Stream& stream = call.stream;
  const DType x = call.q.dtype(), beta = call.beta.dtype();
  const bool generic = stream.target() == GpuTarget::cuda;
  KernelTable<DeltaKernel>& kernels = channels_backward_table();
  if (call.chunks() > 0) {
    launch_prepare_channels<X, Beta>(call);
    const DeltaKernel states = states_channels_kernel(x, generic);
    launch_for_gradients<StatesChannels<X, 128, 128, 2>>(kernels, states, stream, walk_grid(call, states.slice),
                                                         [&](auto& bind, auto& p) { bind_states_channels(bind, p, call, gradient); });
  }
  const DeltaKernel walk = state_gradients_channels_kernel(x, generic);
  launch_for_gradients<StateGradientsChannels<X, 128, 128, 1>>(
      kernels, walk, stream, walk_grid(call, walk.slice),
      [&](auto& bind, auto& p) { bind_state_gradients_channels(bind, p, call, gradient); });
  if (call.chunks() == 0) return;
  launch_for_gradients<ValueGradients<X, 3>>(kernels, value_gradients_kernel(x), stream, prepare_grid(call),
                                             [&](auto& bind, auto& p) { bind_value_gradients(bind, p, call, gradient); });
  launch_for_gradients<ChannelGradients<X, Beta>>(kernels, channel_gradients_kernel(x, beta), stream, prepare_grid(call),
                                                  [&](auto& bind, auto& p) { bind_channel_gradients(bind, p, call, gradient); });
}

template <class X, class Beta>
void launch_gradients(Call& call, Gradient& gradient) {
  const Tensor q = call.q, k = call.k;
  const Stream& stream = call.stream;
  const DType x = q.dtype();
  const auto make = [&](Shape shape, DType dtype) { return workspace(std::move(shape), dtype, stream); };
  make_workspace(call, kMostChannels, make);
  make_workspace(call, gradient, make);
  if (call.normalise && q.numel() > 0) {
    call.q = normalised_on_gpu<X>(q, stream);
    call.k = normalised_on_gpu<X>(k, stream);
  }
  call.gates_of_channels() ? launch_channel_gradients<X, Beta>(call, gradient) : launch_head_gradients<X, Beta>(call, gradient);
  if (call.chunks() == 0 || (!call.normalise && call.group() == 1)) return;
  using Rows = RowGradients<X, false, 128>;
  for (const auto& [of, each, dx] : {std::tie(q, gradient.each_dq, gradient.dq), std::tie(k, gradient.each_dk, gradient.dk)})
    launch_for_gradients<Rows>(backward_table(), {Kind::row_gradients, x, x, wide_keys(call) ? kMostDims : 128, call.normalise, 0, 0},
                               stream, row_gradients_grid(of, Rows::tile_rows),
                               [&](auto& bind, auto& p) { bind_row_gradients(bind, p, call, of, each, dx); });
}

}  // namespace

void gradients_on_gpu(Call call, Gradient gradient) {
  const auto with_beta = [&]<class X>() {
    call.beta.dtype() == DType::f32 ? launch_gradients<X, float>(call, gradient) : launch_gradients<X, X>(call, gradient);
  };
  call.q.dtype() == DType::f16 ? with_beta.template operator()<f16>() : with_beta.template operator()<bf16>();
}

void steps_on_gpu(const Call& call) {
  with_types(call, [&]<class X, class Beta>(std::type_identity<X>, std::type_identity<Beta>) {
    using Kernel = Step<X, Beta, 128, false>;
    detail::launch_named<typename Kernel::template On<Target>::Params>(
        table()[{Kind::step, call.q.dtype(), call.beta.dtype(), padded_dim(call), call.normalise, 0, 0, call.gates_of_channels()}],
        call.stream, step_grid(call, step_cols(padded_dim(call))), [&](auto& bind, auto& p) { bind_step(bind, p, call); });
  });
}

namespace {

/// A call for a shape, with gates, the final state and no initial one.
template <class T>
struct Placeholders {
  Tensor q, k, v, beta, o, g, g_of_channels, state;
  explicit Placeholders(const ShapeValues& shape) {
    const std::int64_t batch = shape["batch"], seqlen = shape["seqlen"], heads = shape["heads"], dim = shape["dim"];
    q = placeholder({batch, seqlen, heads, dim}, dtype_of<T>);
    k = placeholder(q.shape(), dtype_of<T>);
    v = placeholder(q.shape(), dtype_of<T>);
    o = placeholder(q.shape(), dtype_of<T>);
    beta = placeholder({batch, seqlen, heads}, DType::f32);
    g = placeholder({batch, seqlen, heads}, DType::f32);
    g_of_channels = placeholder(q.shape(), DType::f32);
    state = placeholder({batch, heads, dim, dim}, DType::f32);
  }
  Call call(bool channels = false) const {
    Call result = check("gated_delta_rule", q, k, v, beta, o, {.g = channels ? &g_of_channels : &g, .final_state = &state});
    make_workspace(result, kMostChannels, [](Shape shape, DType dtype) { return placeholder(std::move(shape), dtype); });
    return result;
  }
  Gradient gradient(const Call& of) const {
    const Tensor& dg = of.gates_of_channels() ? g_of_channels : g;
    Gradient result{.d_o = o, .dq = q, .dk = k, .dv = v, .d_beta = beta, .dg = dg, .d_final_state = {}, .d_initial_state = state};
    make_workspace(of, result, [](Shape shape, DType dtype) { return placeholder(std::move(shape), dtype); });
    return result;
  }
};

void require_dim(const ShapeValues& shape, int dim) {
  require(shape["dim"] <= dim, "shape: dim is {}; the kernel supports up to {}", shape["dim"], dim);
}

template <class T, int dim>
Analysis analyze_prepare(const ShapeValues& shape) {
  require_dim(shape, dim);
  const Call call = Placeholders<T>(shape).call();
  return analyze<Prepare<T, float, dim>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_prepare(bind, p, call); });
}
template <class T, int dim>
Analysis analyze_walk(const ShapeValues& shape) {
  require_dim(shape, dim);
  const Call call = Placeholders<T>(shape).call();
  return analyze<Walk<T, dim, 128, 2>>(walk_grid(call, 128), [&](auto& bind, auto& p) { bind_walk(bind, p, call); });
}
Analysis analyze_wide_walk(const ShapeValues& shape) {
  require_dim(shape, kMostDims);
  const Call call = Placeholders<bf16>(shape).call();
  return analyze<WideWalk<bf16, 2>>(walk_grid(call, WideWalk<bf16, 2>::Slice), [&](auto& bind, auto& p) { bind_walk(bind, p, call); });
}
Analysis analyze_prepare_channels(const ShapeValues& shape) {
  require_dim(shape, 128);
  const Call call = Placeholders<bf16>(shape).call(true);
  return analyze<PrepareChannels<bf16, float, 2>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_prepare_channels(bind, p, call); });
}
Analysis analyze_invert_channels(const ShapeValues& shape) {
  require_dim(shape, 128);
  const Call call = Placeholders<bf16>(shape).call(true);
  return analyze<InvertChannels<bf16, 3>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_invert_channels(bind, p, call); });
}
Analysis analyze_walk_channels(const ShapeValues& shape) {
  require_dim(shape, 128);
  const Call call = Placeholders<bf16>(shape).call(true);
  return analyze<WalkChannels<bf16, 128, 128, 2>>(walk_grid(call, 128), [&](auto& bind, auto& p) { bind_walk_channels(bind, p, call); });
}
template <class T, int dim>
Analysis analyze_step(const ShapeValues& shape) {
  require_dim(shape, dim);
  const Call call = Placeholders<T>(shape).call();
  return analyze<Step<T, float, dim, false>>(step_grid(call, step_cols(dim)), [&](auto& bind, auto& p) { bind_step(bind, p, call); });
}

Analysis analyze_states(const ShapeValues& shape) {
  require_dim(shape, 128);
  const Placeholders<bf16> of(shape);
  const Call call = of.call();
  const Gradient gradient = of.gradient(call);
  return analyze<States<bf16, 128, 128, 2>>(walk_grid(call, 128), [&](auto& bind, auto& p) { bind_states(bind, p, call, gradient); });
}
Analysis analyze_state_gradients(const ShapeValues& shape) {
  require_dim(shape, 128);
  const Placeholders<bf16> of(shape);
  const Call call = of.call();
  const Gradient gradient = of.gradient(call);
  return analyze<StateGradients<bf16, 128, 128, 2>>(walk_grid(call, 128),
                                                    [&](auto& bind, auto& p) { bind_state_gradients(bind, p, call, gradient); });
}
Analysis analyze_gradients(const ShapeValues& shape) {
  require_dim(shape, 128);
  const Placeholders<bf16> of(shape);
  const Call call = of.call();
  const Gradient gradient = of.gradient(call);
  return analyze<Gradients<bf16, float, 7, 2>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_gradients(bind, p, call, gradient); });
}

/// The analysis of a kernel of the gradients for gates of channels, of bf16.
template <class Kernel>
Analysis analyze_channels(const ShapeValues& shape, auto grid_of, auto bind_params) {
  require_dim(shape, kMostChannels);
  const Placeholders<bf16> of(shape);
  const Call call = of.call(true);
  const Gradient gradient = of.gradient(call);
  return analyze<Kernel>(grid_of(call), [&](auto& bind, auto& p) { bind_params(bind, p, call, gradient); });
}
Analysis analyze_states_channels(const ShapeValues& shape) {
  return analyze_channels<StatesChannels<bf16, 128, 128, 2>>(
      shape, [](const Call& call) { return walk_grid(call, 128); },
      [](auto& bind, auto& p, const Call& call, const Gradient& gradient) { bind_states_channels(bind, p, call, gradient); });
}
Analysis analyze_state_gradients_channels(const ShapeValues& shape) {
  return analyze_channels<StateGradientsChannels<bf16, 128, 128, 2>>(
      shape, [](const Call& call) { return walk_grid(call, 128); },
      [](auto& bind, auto& p, const Call& call, const Gradient& gradient) { bind_state_gradients_channels(bind, p, call, gradient); });
}
Analysis analyze_value_gradients(const ShapeValues& shape) {
  return analyze_channels<ValueGradients<bf16, 3>>(
      shape, prepare_grid,
      [](auto& bind, auto& p, const Call& call, const Gradient& gradient) { bind_value_gradients(bind, p, call, gradient); });
}
Analysis analyze_channel_gradients(const ShapeValues& shape) {
  return analyze_channels<ChannelGradients<bf16, float>>(
      shape, prepare_grid,
      [](auto& bind, auto& p, const Call& call, const Gradient& gradient) { bind_channel_gradients(bind, p, call, gradient); });
}

Analysis analyze_row_gradients(const ShapeValues& shape) {
  require_dim(shape, 128);
  const Placeholders<bf16> of(shape);
  const Call call = of.call();
  using Kernel = RowGradients<bf16, true, 128>;
  return analyze<Kernel>(row_gradients_grid(of.q, Kernel::tile_rows),
                         [&](auto& bind, auto& p) { bind_row_gradients(bind, p, call, of.q, of.k, of.o); });
}

}  // namespace

namespace {

const DeltaKernel kRowGradients{Kind::row_gradients, DType::bf16, DType::bf16, 128, true, 0, 0};
const DeltaKernel kPrepare{Kind::prepare, DType::bf16, DType::f32, 128, false, 0, 0},
    kStep{Kind::step, DType::bf16, DType::f32, 128, false, 0, 0};

KernelSpec spec_of(const DeltaKernel& kernel, const char* name, const char* source = kSource) {
  return make_spec({type_of(kernel), source, nullptr}, true, true, name);
}
KernelSpec wide_walk_spec() { return spec_of(wide_walk_kernel(DType::bf16, false), "gated_delta_walk_bf16_256", kWideSource); }
KernelSpec prepare_channels_spec(bool generic) {
  return spec_of(prepare_channels_kernel(DType::bf16, DType::f32, generic), "gated_delta_prepare_channels_bf16", kChannelsSource);
}
KernelSpec invert_channels_spec(bool generic) {
  return spec_of(invert_channels_kernel(DType::bf16, generic), "gated_delta_invert_channels_bf16", kChannelsSource);
}
KernelSpec walk_channels_spec(bool generic) {
  return spec_of(walk_channels_kernel(DType::bf16, 128, generic), "gated_delta_walk_channels_bf16_128", kChannelsSource);
}
/// The specs of the gradients for gates of channels, in the order of their launches.
std::vector<KernelSpec> channels_backward_specs(bool generic) {
  const auto spec = [](const DeltaKernel& kernel, const char* name) { return spec_of(kernel, name, kChannelsBackwardSource); };
  return {spec(states_channels_kernel(DType::bf16, generic), "gated_delta_states_channels_bf16"),
          spec(state_gradients_channels_kernel(DType::bf16, generic), "gated_delta_state_gradients_channels_bf16"),
          spec(value_gradients_kernel(DType::bf16), "gated_delta_value_gradients_bf16"),
          spec(channel_gradients_kernel(DType::bf16, DType::f32), "gated_delta_channel_gradients_bf16")};
}
KernelSpec states_spec(bool generic) { return spec_of(states_kernel(DType::bf16, generic), "gated_delta_states_bf16", kBackwardSource); }
KernelSpec state_gradients_spec(bool generic) {
  return spec_of(state_gradients_kernel(DType::bf16, generic), "gated_delta_state_gradients_bf16", kBackwardSource);
}
KernelSpec row_gradients_spec() { return spec_of(kRowGradients, "gated_delta_row_gradients_bf16", kBackwardSource); }
KernelSpec gradients_spec(bool generic) {
  return spec_of(gradients_kernel(DType::bf16, DType::f32, generic), "gated_delta_gradients_bf16", kBackwardSource);
}

}  // namespace

std::vector<KernelVariant> registered() {
  const std::vector<KernelSpec> of_channels = channels_backward_specs(false);
  return {{spec_of(kPrepare, "gated_delta_prepare_bf16_128"), analyze_prepare<bf16, 128>},
          {spec_of(walk_kernel(DType::bf16, 128, false), "gated_delta_walk_bf16_128"), analyze_walk<bf16, 128>},
          {spec_of(walk_kernel(DType::bf16, 64, false), "gated_delta_walk_bf16_64"), analyze_walk<bf16, 64>},
          {wide_walk_spec(), analyze_wide_walk},
          {prepare_channels_spec(false), analyze_prepare_channels},
          {invert_channels_spec(false), analyze_invert_channels},
          {walk_channels_spec(false), analyze_walk_channels},
          {spec_of(kStep, "gated_delta_step_bf16_128"), analyze_step<bf16, 128>},
          {states_spec(false), analyze_states},
          {state_gradients_spec(false), analyze_state_gradients},
          {gradients_spec(false), analyze_gradients},
          {row_gradients_spec(), analyze_row_gradients},
          {of_channels[0], analyze_states_channels},
          {of_channels[1], analyze_state_gradients_channels},
          {of_channels[2], analyze_value_gradients},
          {of_channels[3], analyze_channel_gradients}};
}

std::vector<KernelSpec> registered_generic() {
  std::vector<KernelSpec> specs{spec_of(kPrepare, "gated_delta_prepare_bf16_128"),
                                spec_of(walk_kernel(DType::bf16, 128, true), "gated_delta_walk_bf16_128"),
                                spec_of(walk_kernel(DType::bf16, 64, true), "gated_delta_walk_bf16_64"),
                                prepare_channels_spec(true),
                                invert_channels_spec(true),
                                walk_channels_spec(true),
                                spec_of(kStep, "gated_delta_step_bf16_128"),
                                states_spec(true),
                                state_gradients_spec(true),
                                gradients_spec(true),
                                row_gradients_spec()};
  for (KernelSpec& spec : channels_backward_specs(true)) specs.push_back(std::move(spec));
  for (KernelSpec& spec : specs) spec = for_target(spec, GpuTarget::cuda);
  return specs;
}

}  // namespace tw::kernels::gated_delta

#include <algorithm>
#include <cmath>

#include "kernels/generic_tiles.hpp"
#include "kernels/linear_attention/call.hpp"
#include "kernels/linear_attention/decay.tile.hpp"
#include "kernels/linear_attention/gradients.tile.hpp"
#include "kernels/linear_attention/recurrence.tile.hpp"
#include "kernels/linear_attention/states.tile.hpp"
#include "kernels/linear_attention/walk.tile.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/device.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::linear_attention {

namespace {

/// Tiles of the tensor cores' kernels on a CPU: each size is compiled.
constexpr int kCpuColumns = 128;

template <class T>
void states_on_cpu(const Call& call, const Decay& decay, const StatesPass& pass, const Tensor& states) {
  launch_cpu<States<T, kCpuColumns, kStages>>(states_grid(call, pass, kCpuColumns),
                                              [&](auto& bind, auto& p) { bind_states(bind, p, call, decay, pass, states, kCpuColumns); });
}
template <class T>
void states_on_gpu(const Call& call, const Decay& decay, const StatesPass& pass, const Tensor& states) {
  using Any = States<T, kStatesColumns, kStages>;
  static KernelTable<StatesKernel> table(type_of_states, Any::source);
  detail::launch_named<typename Any::template On<sm_90a::Target<>>::Params>(
      table[{dtype_of<T>, kStatesColumns}], call.stream, states_grid(call, pass, kStatesColumns),
      [&](auto& bind, auto& p) { bind_states(bind, p, call, decay, pass, states, kStatesColumns); });
}

template <class T, int kDim, StateForm kForm>
void outputs_on_cpu(const Call& call, const Decay& decay, const OutputsPass& pass) {
  launch_cpu<Outputs<T, kDim, kCpuColumns, kForm>>(outputs_grid(call, pass, kCpuColumns),
                                                   [&](auto& bind, auto& p) { bind_outputs(bind, p, call, decay, pass); });
}
template <class T, StateForm kForm>
void outputs_on_gpu(const Call& call, const Decay& decay, const OutputsPass& pass) {
  using Any = Outputs<T, 64, 64, kForm>;
  static KernelTable<OutputsKernel> table(type_of_outputs, Any::source);
  const std::int64_t dim = pass.q.shape(3);
  const int columns = outputs_columns(pass.out.shape(3));
  const OutputsKernel kernel{dtype_of<T>, dim > 128 ? 256 : dim > 64 ? 128 : 64, columns, kForm};
  detail::launch_named<typename Any::template On<sm_90a::Target<>>::Params>(
      table[kernel], call.stream, outputs_grid(call, pass, columns),
      [&](auto& bind, auto& p) { bind_outputs(bind, p, call, decay, pass); });
}
template <class T, StateForm kForm>
void outputs(const Call& call, const Decay& decay, const OutputsPass& pass) {
  if (call.stream.device().is_cuda()) return outputs_on_gpu<T, kForm>(call, decay, pass);
  if constexpr (is_same<T, bf16>) {  // f16 is there for completeness: one size for all is quicker to build
    if (pass.q.shape(3) <= 128) return outputs_on_cpu<T, 128, kForm>(call, decay, pass);
  }
  outputs_on_cpu<T, 256, kForm>(call, decay, pass);
}

template <class T>
void walk(const Call& call, const Decay& decay, const RecurrencePass& pass) {
  const auto fill = [&](auto& bind, auto& p) { bind_walk(bind, p, call, decay, pass); };
  using Any = Walk<T, 128, kWalkColumns, kWalkStages>;
  const WalkKernel kernel{dtype_of<T>, pass.q.shape(3) > 64 ? 128 : 64, walk_columns(pass.q.shape(3), pass.v.shape(3))};
  const TileGrid grid = walk_grid(call, pass, kernel.columns);
  if (!call.stream.device().is_cuda()) {
    if (kernel.columns == 64) return launch_cpu<Walk<T, 64, 64, kWalkStages>>(grid, fill);
    return launch_cpu<Any>(grid, fill);
  }
  if constexpr (!is_same<T, float>) {
    static KernelTable<WalkKernel> table(type_of_walk, Any::source);
    detail::launch_named<typename Any::template On<sm_90a::Target<>>::Params>(table[kernel], call.stream, grid, fill);
  }
}

template <class T, int kRows>
void recurrence(const Call& call, const RecurrencePass& pass) {
  constexpr int kColumns = recurrence_columns(kRows), kWarps = recurrence_warps(kRows);
  const auto run = [&]<bool kOwnStep>() {
    launch<Recurrence<T, kRows, kColumns, kWarps, kOwnStep>>(call.stream, recurrence_grid(call, pass, kColumns),
                                                             [&](auto& bind, auto& p) { bind_recurrence(bind, p, call, pass); });
  };
  if constexpr (is_same<T, float>) {
    if (!pass.own_step) return run.template operator()<false>();
  }
  run.template operator()<true>();
}

/// Calls f.operator()<R, C>() with a tile of rows that hold `columns`.
template <class F>
void with_rows(std::int64_t columns, F f) {
  if (columns <= 64) return f.template operator()<32, 64>();
  if (columns <= 128) return f.template operator()<32, 128>();
  f.template operator()<16, 256>();
}

Tensor gate_products(const Call& call, const Tensor& q) {
  return workspace({q.shape(0), call.heads, call.length}, DType::f32, call.stream);
}
/// Tiles of `rows` steps of each head of v.
TileGrid steps_grid(const Call& call, const Tensor& q, int rows) {
  return {tiles(call.length, rows), static_cast<int>(q.shape(0)) * call.heads};
}

}  // namespace

std::string type_of_states(const StatesKernel& k) {
  return tw::format("tw::kernels::linear_attention::States<{}, {}, {}>", element_name(k.dtype), k.columns, kStages);
}
std::string type_of_walk(const WalkKernel& k) {
  return tw::format("tw::kernels::linear_attention::Walk<{}, {}, {}, {}>", element_name(k.dtype), k.dim, k.columns, kWalkStages);
}
std::string type_of_outputs(const OutputsKernel& k) {
  return tw::format("tw::kernels::linear_attention::Outputs<{}, {}, {}, tw::kernels::linear_attention::StateForm::{}>",
                    element_name(k.dtype), k.dim, k.columns, k.form == StateForm::transposed ? "transposed" : "as_stored");
}

Decay run_decay(const Call& call) {
  const Shape shape{call.heads, std::int64_t{call.chunks()} * kChunk};
  const Decay decay{workspace(shape, DType::f32, call.stream), workspace(shape, DType::f32, call.stream)};
  launch<ChunkDecay<kDecayHeads>>(call.stream, decay_grid(call), [&](auto& bind, auto& p) { bind_decay(bind, p, call, decay); });
  return decay;
}

Tensor run_states(const Call& call, const Decay& decay, const StatesPass& pass) {
  const Tensor states = workspace(states_shape(call, pass.k.shape(3), pass.v.shape(3)), pass.k.dtype(), call.stream);
  const bool cuda = call.stream.device().is_cuda();
  if (pass.k.dtype() == DType::f16)
    cuda ? states_on_gpu<f16>(call, decay, pass, states) : states_on_cpu<f16>(call, decay, pass, states);
  else
    cuda ? states_on_gpu<bf16>(call, decay, pass, states) : states_on_cpu<bf16>(call, decay, pass, states);
  return states;
}

void run_outputs(const Call& call, const Decay& decay, const OutputsPass& pass) {
  const auto run = [&]<StateForm kForm>() {
    pass.q.dtype() == DType::f16 ? outputs<f16, kForm>(call, decay, pass) : outputs<bf16, kForm>(call, decay, pass);
  };
  pass.form == StateForm::transposed ? run.template operator()<StateForm::transposed>() : run.template operator()<StateForm::as_stored>();
}

bool walk_fits(const Stream& stream) { return generic_shared_bytes(stream) == 0; }
bool chunks_fit(const Stream& stream, std::int64_t dim) {
  const std::int64_t generic = generic_shared_bytes(stream);
  return dim <= 128 || generic == 0 || generic >= 160 * 1024;
}

bool walk_pays(const Call& call, std::int64_t columns) {
  // States and outputs apart read and write two and a half times the bytes, but the outputs are computed by all SMs. A walk takes longer
  // for each chunk than the states alone; half of the SMs make up for that.
  const Device device = call.stream.device();
  const std::int64_t blocks = std::int64_t{call.sequences} * call.heads * tiles(columns, kWalkColumns);
  return 2 * blocks >= (device.is_cuda() ? device_info(device).units : 1);
}

bool f32_walks(const Call& call, std::int64_t dim) {
  if (call.stream.device().is_cuda() || dim > kWalkedDim || call.length < kChunk) return false;
  if (!call.g.data()) return true;
  const float* const g = call.g.data<float>();
  for (std::int64_t batch = 0; batch < call.g.shape(0); ++batch) {
    for (std::int64_t head = 0; head < call.g.shape(1); ++head) {
      const float* const gates = g + batch * call.g.stride(0) + head * call.g.stride(1);
      for (std::int64_t time = 0; time < call.g.shape(2); ++time)
        if (!(std::abs(gates[time * call.g.stride(2)]) <= kLargestWeakGate)) return false;
    }
  }
  return true;
}

void run_walk(const Call& call, const Decay& decay, const RecurrencePass& pass) {
  if (pass.q.dtype() == DType::f32) return walk<float>(call, decay, pass);
  pass.q.dtype() == DType::f16 ? walk<f16>(call, decay, pass) : walk<bf16>(call, decay, pass);
}

void run_recurrence(const Call& call, const RecurrencePass& pass) {
  with_float_type(pass.q.dtype(), [&]<class T>(std::type_identity<T>) {
    const std::int64_t dim = pass.q.shape(3);
    if (dim <= 64) return recurrence<T, 64>(call, pass);
    if (dim <= 128) return recurrence<T, 128>(call, pass);
    recurrence<T, 256>(call, pass);
  });
}

GateNumbers run_gate_products(const Call& call, const Tensor& q, const Tensor& k, const Tensor& dq, const Tensor& dk) {
  const Tensor products = gate_products(call, q);
  if (products.numel() == 0) return {products, {}};
  with_float_type(q.dtype(), [&]<class T>(std::type_identity<T>) {
    with_rows(q.shape(3), [&]<int R, int C>() {
      launch<GateProducts<T, R, C>>(call.stream, steps_grid(call, q, R), [&](auto& bind, auto& p) {
        bind(p.q, q);
        bind(p.k, k);
        bind(p.dq, dq);
        bind(p.dk, dk);
        p.out = products.data<float>();
        p.heads = call.heads;
        p.shared = call.heads / static_cast<int>(q.shape(1));
        p.length = call.length;
      });
    });
  });
  return {products, {}};
}

GateNumbers run_own_steps(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& d_o, float scale,
                          const Tensor& dq, const Tensor& dk) {
  const GateNumbers numbers{gate_products(call, q), gate_products(call, q)};
  if (numbers.products.numel() == 0) return numbers;
  with_rows(std::max(q.shape(3), v.shape(3)), [&]<int R, int C>() {
    launch<OwnSteps<R, C>>(call.stream, steps_grid(call, q, R), [&](auto& bind, auto& p) {
      bind(p.q, q);
      bind(p.k, k);
      bind(p.v, v);
      bind(p.d_o, d_o);
      bind(p.other_dq, dq);
      bind(p.other_dk, dk);
      bind(p.dq, dq);
      bind(p.dk, dk);
      p.from_before = numbers.products.data<float>();
      p.to_later = numbers.to_later.data<float>();
      fill_chunks(p.chunks, call);
      p.scale = scale;
      p.heads = call.heads;
      p.shared = call.heads / static_cast<int>(q.shape(1));
    });
  });
  return numbers;
}

void run_gate_gradients(const Call& call, const GateNumbers& numbers, const Tensor* state, const Tensor* d_state, const Tensor& dg) {
  Tensor state_product;
  if (d_state != nullptr) {
    state_product = workspace({call.sequences, call.heads, 1}, DType::f32, call.stream);
    launch<MatrixProduct<16, 128>>(call.stream, {call.sequences * call.heads}, [&](auto& bind, auto& p) {
      bind(p.a, *state);
      bind(p.b, *d_state);
      bind(p.out, state_product);
      p.size_i = call.heads;
    });
  }
  constexpr int kHeads = 4, kSteps = 128;
  launch<GateGradients<kHeads, kSteps>>(call.stream, {call.sequences, tiles(call.heads, kHeads)}, [&](auto& bind, auto& p) {
    bind(p.products, numbers.products);
    bind(p.to_later, numbers.to_later.data() != nullptr ? &numbers.to_later : nullptr);
    bind(p.dg, dg);
    bind(p.state_product, d_state != nullptr ? &state_product : nullptr);
    fill_chunks(p.chunks, call);
  });
}

void run_sum_of_heads(const Call& call, const Tensor& x, const Tensor& y) {
  with_float_type(x.dtype(), [&]<class T>(std::type_identity<T>) {
    with_rows(x.shape(3), [&]<int R, int C>() {
      const int heads = static_cast<int>(y.shape(1));
      launch<SumOfHeads<T, R, C>>(call.stream, {tiles(call.length, R), static_cast<int>(y.shape(0)) * heads}, [&](auto& bind, auto& p) {
        bind(p.x, x);
        bind(p.y, y);
        fill_chunks(p.chunks, call);
        p.heads = heads;
        p.shared = call.heads / heads;
      });
    });
  });
}

}  // namespace tw::kernels::linear_attention

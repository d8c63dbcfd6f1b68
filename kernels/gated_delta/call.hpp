#pragma once

#include <algorithm>
#include <optional>

#include "kernels/check.hpp"
#include "kernels/gated_delta/backward.tile.hpp"
#include "kernels/gated_delta/channels.tile.hpp"
#include "kernels/gated_delta/channels_backward.tile.hpp"
#include "kernels/gated_delta/gated_delta.tile.hpp"
#include "kernels/gated_delta/wide.tile.hpp"
#include "kernels/gated_delta/wide_backward.tile.hpp"
#include "kernels/rows.hpp"
#include "tilewave/gated_delta.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

// Shared by the family's files: a checked call and its conversion to the kernels' parameters.

namespace tw::kernels::gated_delta {

/// A checked call. Tensors are as the caller gave them.
struct Call {
  const char* op = nullptr;
  Tensor q, k, v, beta, o;
  std::optional<Tensor> g, initial_state, final_state, cu_seqlens;
  float scale = 1;
  bool normalise = false;
  Stream stream = Stream::standard(Device::cpu());
  // What Prepare leaves for Walk
  Tensor inverses, decay, betas;  ///< [Hv, chunks * 64, 64], [Hv, chunks * 64] twice
  // What PrepareChannels leaves for WalkChannels, beside inverses and betas
  Tensor queries, keys, keys_after;  ///< [Hv, chunks * 64, D], D the kernels' number of dimensions
  Tensor weights, whole;             ///< [Hv, chunks * 64, 64], [Hv, chunks, D]
  Tensor matrices;                   ///< of f32: [Hv, chunks * 64, 64]

  /// Whether each channel of a key has a gate of its own.
  bool gates_of_channels() const { return g && g->rank() == 4; }
  int length() const { return static_cast<int>(q.shape(1)); }
  int heads() const { return static_cast<int>(v.shape(2)); }
  int group() const { return heads() / std::max(static_cast<int>(q.shape(2)), 1); }
  int dim() const { return static_cast<int>(q.shape(3)); }
  int values() const { return static_cast<int>(v.shape(3)); }
  int sequences() const { return static_cast<int>(cu_seqlens ? cu_seqlens->shape(0) - 1 : q.shape(0)); }
  int chunks() const {
    if (cu_seqlens) return Segments<cpu::Target>::tiles(length(), sequences(), kChunk);
    return sequences() * ((length() + kChunk - 1) / kChunk);
  }
};

inline const Tensor* given(const std::optional<Tensor>& t) { return t ? &*t : nullptr; }
/// [B, S, H, D] as [B, H, S, D].
inline Tensor by_heads(const Tensor& t) { return t.transpose(1, 2); }

inline void bind_sequences(auto& p, const Call& call) {
  auto& s = p.sequences;
  s.segments.offsets = call.cu_seqlens ? call.cu_seqlens->data<std::int32_t>() : nullptr;
  s.segments.count = call.cu_seqlens ? call.sequences() : 0;
  s.segments.rows = s.length = call.length();
  p.group = call.group();
}
inline void bind_prepare(auto& bind, auto& p, const Call& call) {
  bind(p.k, by_heads(call.k));
  bind(p.gates, given(call.g));
  bind(p.betas, call.beta);
  bind(p.inverses, call.inverses);
  bind(p.decay, call.decay.transpose(0, 1));
  bind(p.scale, call.betas.transpose(0, 1));
  bind_sequences(p, call);
}
inline void bind_prepare_channels(auto& bind, auto& p, const Call& call) {
  bind(p.q, by_heads(call.q));
  bind(p.k, by_heads(call.k));
  bind(p.gates, by_heads(*call.g));
  bind(p.betas, call.beta);
  bind(p.queries, call.queries);
  bind(p.keys, call.keys);
  bind(p.keys_after, call.keys_after);
  p.whole = call.whole.data<float>();
  p.chunks = call.chunks();
  bind(p.matrices, call.matrices);
  bind(p.weights, call.weights);
  bind(p.scale, call.betas.transpose(0, 1));
  bind_sequences(p, call);
}
inline void bind_invert_channels(auto& bind, auto& p, const Call& call) {
  bind(p.matrices, call.matrices);
  bind(p.inverses, call.inverses);
}
inline void bind_walk_channels(auto& bind, auto& p, const Call& call) {
  bind(p.queries, call.queries);
  bind(p.keys, call.keys);
  bind(p.keys_after, call.keys_after);
  bind(p.v, by_heads(call.v));
  bind(p.inverses, call.inverses);
  bind(p.weights, call.weights);
  bind(p.whole, call.whole);
  bind(p.scale, call.betas);
  bind(p.o, by_heads(call.o));
  bind(p.initial_state, given(call.initial_state));
  bind(p.final_state, given(call.final_state));
  bind_sequences(p, call);
  p.factor = call.scale;
}
inline void bind_walk(auto& bind, auto& p, const Call& call) {
  bind(p.q, by_heads(call.q));
  bind(p.k, by_heads(call.k));
  bind(p.v, by_heads(call.v));
  bind(p.inverses, call.inverses);
  bind(p.decay, call.decay);
  bind(p.scale, call.betas);
  bind(p.o, by_heads(call.o));
  bind(p.initial_state, given(call.initial_state));
  bind(p.final_state, given(call.final_state));
  bind_sequences(p, call);
  p.factor = call.scale;
}
inline void bind_step(auto& bind, auto& p, const Call& call) {
  bind(p.q, by_heads(call.q));
  bind(p.k, by_heads(call.k));
  bind(p.v, by_heads(call.v));
  if (call.gates_of_channels())
    bind(p.gates, by_heads(*call.g).transpose(2, 3));
  else
    bind(p.gates, given(call.g));
  bind(p.betas, call.beta);
  bind(p.o, by_heads(call.o));
  bind(p.initial_state, given(call.initial_state));
  bind(p.final_state, given(call.final_state));
  bind_sequences(p, call);
  p.heads = call.heads();
  p.factor = call.scale;
}

/// What the gradients' kernels read and write beside a Call.
struct Gradient {
  Tensor d_o, dq, dk, dv, d_beta;
  std::optional<Tensor> dg = {}, d_final_state = {}, d_initial_state = {};
  // What States and StateGradients leave for Gradients, in the call's dtype
  Tensor states = {}, d_states = {};  ///< [chunks, Hv, Dk, Dv]
  Tensor updates = {}, y = {};        ///< [Hv, chunks * 64, Dv]
  Tensor weights = {};                ///< [Hv, chunks * 64, 64]: what Weights leaves for WideStateGradients
  // The same for gates of channels
  Tensor d_queries = {}, d_keys = {}, d_keys_after = {};  ///< [Hv, chunks * 64, Dk]
  Tensor w = {}, x = {};                                  ///< [Hv, chunks * 64, 64]
  Tensor values_y = {}, d_whole = {};                     ///< of f32: [Hv, chunks * 64], [Hv, chunks * 128]
  Tensor each_dq = {},
         each_dk = {};  ///< [B, S, Hv, Dk]: dq and dk, or if heads share keys or these are normalised, what they are computed from
};

inline void bind_states(auto& bind, auto& p, const Call& call, const Gradient& gradient) {
  bind(p.k, by_heads(call.k));
  bind(p.v, by_heads(call.v));
  bind(p.inverses, call.inverses);
  bind(p.decay, call.decay);
  bind(p.scale, call.betas);
  bind(p.initial_state, given(call.initial_state));
  bind(p.states, gradient.states);
  bind(p.updates, gradient.updates);
  bind_sequences(p, call);
}
inline void bind_state_gradients(auto& bind, auto& p, const Call& call, const Gradient& gradient) {
  bind(p.q, by_heads(call.q));
  bind(p.k, by_heads(call.k));
  bind(p.d_o, by_heads(gradient.d_o));
  bind(p.inverses, call.inverses);
  bind(p.decay, call.decay);
  bind(p.scale, call.betas);
  bind(p.d_final_state, given(gradient.d_final_state));
  bind(p.d_initial_state, given(gradient.d_initial_state));
  bind(p.d_states, gradient.d_states);
  bind(p.y, gradient.y);
  bind_sequences(p, call);
  p.factor = call.scale;
}
inline void bind_weights(auto& bind, auto& p, const Call& call, const Gradient& gradient) {
  bind(p.q, by_heads(call.q));
  bind(p.k, by_heads(call.k));
  bind(p.decay_of_columns, call.decay);
  bind(p.decay, call.decay.transpose(0, 1));
  bind(p.weights, gradient.weights);
  bind_sequences(p, call);
  p.factor = call.scale;
}
inline void bind_wide_state_gradients(auto& bind, auto& p, const Call& call, const Gradient& gradient) {
  bind_state_gradients(bind, p, call, gradient);
  bind(p.weights, gradient.weights);
}
inline void bind_gradients(auto& bind, auto& p, const Call& call, const Gradient& gradient) {
  bind(p.q, by_heads(call.q));
  bind(p.k, by_heads(call.k));
  bind(p.v, by_heads(call.v));
  bind(p.d_o, by_heads(gradient.d_o));
  bind(p.updates, gradient.updates);
  bind(p.y, gradient.y);
  bind(p.states, gradient.states);
  bind(p.d_states, gradient.d_states);
  bind(p.state, gradient.states);
  bind(p.d_state, gradient.d_states);
  bind(p.decay_of_columns, call.decay);
  bind(p.decay, call.decay.transpose(0, 1));
  bind(p.scale, call.betas.transpose(0, 1));
  bind(p.dq, by_heads(gradient.each_dq));
  bind(p.dk, by_heads(gradient.each_dk));
  bind(p.dv, by_heads(gradient.dv));
  bind(p.d_beta, gradient.d_beta);
  bind(p.dg, given(gradient.dg));
  bind_sequences(p, call);
  p.factor = call.scale;
}
inline void bind_states_channels(auto& bind, auto& p, const Call& call, const Gradient& gradient) {
  bind(p.keys, call.keys);
  bind(p.keys_after, call.keys_after);
  bind(p.v, by_heads(call.v));
  bind(p.inverses, call.inverses);
  bind(p.whole, call.whole);
  bind(p.scale, call.betas);
  bind(p.initial_state, given(call.initial_state));
  bind(p.states, gradient.states);
  bind(p.updates, gradient.updates);
  bind_sequences(p, call);
}
inline void bind_state_gradients_channels(auto& bind, auto& p, const Call& call, const Gradient& gradient) {
  bind(p.queries, call.queries);
  bind(p.keys, call.keys);
  bind(p.keys_after, call.keys_after);
  bind(p.d_o, by_heads(gradient.d_o));
  bind(p.inverses, call.inverses);
  bind(p.weights, call.weights);
  bind(p.whole, call.whole);
  bind(p.scale, call.betas);
  bind(p.d_final_state, given(gradient.d_final_state));
  bind(p.d_initial_state, given(gradient.d_initial_state));
  bind(p.d_states, gradient.d_states);
  bind(p.y, gradient.y);
  bind_sequences(p, call);
  p.factor = call.scale;
}
inline void bind_value_gradients(auto& bind, auto& p, const Call& call, const Gradient& gradient) {
  bind(p.v, by_heads(call.v));
  bind(p.d_o, by_heads(gradient.d_o));
  bind(p.updates, gradient.updates);
  bind(p.y, gradient.y);
  bind(p.states, gradient.states);
  bind(p.d_states, gradient.d_states);
  bind(p.state, gradient.states);
  bind(p.d_state, gradient.d_states);
  bind(p.scale, call.betas.transpose(0, 1));
  bind(p.d_queries, gradient.d_queries);
  bind(p.d_keys, gradient.d_keys);
  bind(p.d_keys_after, gradient.d_keys_after);
  bind(p.w, gradient.w);
  bind(p.x, gradient.x);
  bind(p.dv, by_heads(gradient.dv));
  bind(p.values_y, gradient.values_y.transpose(0, 1));
  bind(p.d_whole, gradient.d_whole.transpose(0, 1));
  bind_sequences(p, call);
  p.factor = call.scale;
}
inline void bind_channel_gradients(auto& bind, auto& p, const Call& call, const Gradient& gradient) {
  bind(p.q, by_heads(call.q));
  bind(p.k, by_heads(call.k));
  bind(p.gates, by_heads(*call.g));
  bind(p.scale, call.betas.transpose(0, 1));
  bind(p.d_queries, gradient.d_queries);
  bind(p.d_keys, gradient.d_keys);
  bind(p.d_keys_after, gradient.d_keys_after);
  bind(p.w, gradient.w);
  bind(p.x, gradient.x);
  bind(p.values_y, gradient.values_y.transpose(0, 1));
  p.whole = call.whole.data<float>();
  p.d_whole = gradient.d_whole.data<float>();
  bind(p.dq, by_heads(gradient.each_dq));
  bind(p.dk, by_heads(gradient.each_dk));
  bind(p.d_beta, gradient.d_beta);
  if (gradient.dg)
    bind(p.dg, by_heads(*gradient.dg));
  else
    bind(p.dg, nullptr);
  bind_sequences(p, call);
  p.chunks = call.chunks();
}
/// x: queries or keys as the caller gave them.
inline void bind_row_gradients(auto& bind, auto& p, const Call& call, const Tensor& x, const Tensor& each, const Tensor& dx) {
  bind(p.x, by_heads(x));
  bind(p.dy, by_heads(each));
  bind(p.dx, by_heads(dx));
  bind_sequences(p, call);
  p.heads = static_cast<int>(x.shape(2));
}

inline TileGrid row_gradients_grid(const Tensor& x, int rows) {
  return {static_cast<int>((x.shape(1) + rows - 1) / rows), 1, static_cast<int>(x.shape(0) * x.shape(2))};
}
inline TileGrid prepare_grid(const Call& call) { return {call.chunks(), 1, call.heads()}; }
inline TileGrid step_grid(const Call& call, int cols) { return {call.sequences() * call.heads(), (call.values() + cols - 1) / cols}; }
inline TileGrid walk_grid(const Call& call, int cols) { return {call.sequences(), (call.values() + cols - 1) / cols, call.heads()}; }

/// Whether keys have more dimensions than a walk's state can have in one piece.
inline bool wide_keys(const Call& call) { return call.dim() > 128; }
/// Whether a chunk's S has more elements than Gradients' tiles.
inline bool wide_gradients(const Call& call) { return wide_keys(call) || call.values() > 128; }
/// The kernels' number of dimensions of a key.
inline int padded_dim(const Call& call) { return call.dim() <= 64 ? 64 : call.dim() <= 128 ? 128 : kMostDims; }
/// Calls f with it as a Constant.
template <class F>
void with_dim(const Call& call, F f) {
  const int dim = padded_dim(call);
  dim == 64 ? f(Constant<64>{}) : dim == 128 ? f(Constant<128>{}) : f(Constant<kMostDims>{});
}
/// Whether a block has the shared memory of the kernels for chunks.
bool chunks_fit(const Call& call);

/// What messages call the states.
struct StateNames {
  const char *initial = "initial_state", *final = "final_state";
};

void check_state(const Call& call, const char* name, const Tensor& state);
/// The inputs; `like_v` is o or its gradient. All throw InvalidArgument.
Call check_inputs(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const NamedTensor& like_v,
                  const GatedDeltaOptions& options);
Call check(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& o,
           const GatedDeltaOptions& options, const StateNames& names = {});

/// Workspace of the two kernels, for tiles of `dim` dimensions of a key; `make(shape, dtype)` gives a tensor. Operands of products are in
/// the call's dtype.
template <class Make>
void make_workspace(Call& call, int dim, Make make) {
  const std::int64_t tokens = std::int64_t{call.chunks()} * kChunk;
  const DType dtype = call.q.dtype();
  call.inverses = make(Shape{call.heads(), tokens, kChunk}, dtype);
  call.betas = make(Shape{call.heads(), tokens}, DType::f32);
  if (call.gates_of_channels()) {
    for (Tensor* const operand : {&call.queries, &call.keys, &call.keys_after}) *operand = make(Shape{call.heads(), tokens, dim}, dtype);
    call.weights = make(call.inverses.shape(), dtype);
    call.whole = make(Shape{call.heads(), call.chunks(), dim}, DType::f32);
    call.matrices = make(call.inverses.shape(), DType::f32);
  } else {
    call.decay = make(Shape{call.heads(), tokens}, DType::f32);
  }
}

/// The same of the kernels after Prepare.
template <class Make>
void make_workspace(const Call& call, Gradient& gradient, Make make) {
  const DType dtype = call.q.dtype();
  const Shape states{call.chunks(), call.heads(), call.dim(), call.values()};
  const Shape of_values{call.heads(), std::int64_t{call.chunks()} * kChunk, call.values()};
  gradient.states = make(states, dtype);
  gradient.d_states = make(states, dtype);
  gradient.updates = make(of_values, dtype);
  gradient.y = make(of_values, dtype);
  if (wide_keys(call)) gradient.weights = make(call.inverses.shape(), dtype);
  if (call.gates_of_channels()) {
    const Shape of_keys{call.heads(), of_values[1], call.dim()};
    for (Tensor* const t : {&gradient.d_queries, &gradient.d_keys, &gradient.d_keys_after}) *t = make(of_keys, dtype);
    gradient.w = make(call.inverses.shape(), dtype);
    gradient.x = make(call.inverses.shape(), dtype);
    gradient.values_y = make(call.betas.shape(), DType::f32);
    gradient.d_whole = make(Shape{call.heads(), std::int64_t{call.chunks()} * kMostChannels}, DType::f32);
  }
  const bool apart = call.normalise || call.group() > 1;
  const Shape each{call.q.shape(0), call.length(), call.heads(), call.dim()};
  gradient.each_dq = apart ? make(each, dtype) : gradient.dq;
  gradient.each_dk = apart ? make(each, dtype) : gradient.dk;
}

/// Normalised queries or keys, of up to 256 dimensions.
Tensor normalised_on_cpu(const Tensor& x);
/// The kernels before WalkChannels. Betas are f32.
void prepare_channels_on_cpu(const Call& call);
void chunks_on_cpu(Call call);
void steps_on_cpu(Call call);
void gradients_on_cpu(Call call, Gradient gradient);
void gradients_on_gpu(Call call, Gradient gradient);
void chunks_on_gpu(Call call);
void steps_on_gpu(const Call& call);

}  // namespace tw::kernels::gated_delta

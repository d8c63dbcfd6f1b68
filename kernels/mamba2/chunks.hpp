#pragma once

#include "kernels/mamba2/call.hpp"
#include "kernels/mamba2/chunk_outputs.tile.hpp"
#include "kernels/mamba2/chunk_states.tile.hpp"

// The scan in five steps (tilewave/mamba2_chunks.hpp): checked calls, and what their kernels are given. Tensors that were not given have no
// memory.

namespace tw::kernels::mamba2 {

inline constexpr int kLargestChunk = 256, kCumsumHeads = 8, kPassedElements = 1024;

/// Contiguous [a, b, ...] as [a * b, ...].
inline Tensor merged(const Tensor& t) {
  Shape shape(t.shape().begin() + 1, t.shape().end());
  shape[0] *= t.shape(0);
  return Tensor::borrow(t.data(), std::move(shape), t.dtype(), t.device());
}

/// What each chunk adds to the state, and the gradient of the state before it.
template <class T>
using AddedStates = ChunkState<T, UntilEnd>;
template <class T>
using StateGradients = ChunkState<T, FromStart>;

/// Launches a kernel with products, of f16 or bf16.
template <template <class> class Kernel>
void launch_products(const Stream& stream, DType dtype, auto grid_of, auto bind) {
  const auto run = [&]<class T>(std::type_identity<T>) {
    using Of = Kernel<T>;
    const auto fill = [&](auto& b, auto& p) { bind(b, p, Of::N); };
    launch<Of>(stream, grid_of(std::type_identity<Of>{}), fill);
  };
  dtype == DType::f16 ? run(std::type_identity<f16>{}) : run(std::type_identity<bf16>{});
}

/// f32 [head] as [head, 1].
inline Tensor as_column(const Tensor& t) { return Tensor::borrow(t.data(), {t.shape(0), 1}, t.dtype(), t.device(), {t.stride(0), 0}); }

struct ChunkCumsumCall {
  Tensor dt;           ///< [batch, time, head]
  Tensor rate, bias;   ///< f32 [head, 1]
  Tensor seq_idx;      ///< i32 [batch, time]
  Tensor sums, sizes;  ///< f32 [batch, head, chunk, step]
  StepSize size;
};
/// A tile is one chunk of kCumsumHeads heads, of `sums` as above.
inline TileGrid steps_grid(const Tensor& sums) {
  return {static_cast<int>(sums.shape(0) * sums.shape(2)), tiles(sums.shape(1), kCumsumHeads)};
}
/// What step sizes and decays follow from.
void bind_step_sizes(auto& bind, auto& p, const ChunkCumsumCall& call) {
  bind(p.dt, call.dt.transpose(1, 2));
  bind(p.rate, call.rate);
  bind(p.bias, or_null(call.bias));
  const bool numbered = given(call.seq_idx);
  p.seq_idx = numbered ? call.seq_idx.template data<std::int32_t>() : nullptr;
  p.seq_batch = numbered ? call.seq_idx.stride(0) : 0;
  p.seq_time = numbered ? call.seq_idx.stride(1) : 0;
  p.size = call.size;
  p.chunks = static_cast<int>(call.sums.shape(2));
  p.length = static_cast<int>(call.dt.shape(1));
}
void bind_cumsum(auto& bind, auto& p, const ChunkCumsumCall& call) {
  bind_step_sizes(bind, p, call);
  bind(p.sizes, call.sizes.transpose(1, 2));
  bind(p.sums, call.sums.transpose(1, 2));
}

/// chunk_state's and chunk_scan's operands, as given to them.
struct ChunkCall {
  Tensor x = {};                        ///< [batch, time, head, dim]
  Tensor keys = {};                     ///< B or C: [batch, time, group, state]
  Tensor sizes = {}, sums = {};         ///< f32 [batch, head, chunk, step]
  Tensor states = {};                   ///< [batch, chunk, head, dim, state]
  Tensor cb = {};                       ///< f32 [batch, chunk, group, step, step]
  Tensor skip = {};                     ///< f32 [head, dim]
  Tensor z = {}, ungated = {}, y = {};  ///< as x
};
/// A tile is so many rows and columns of what each chunk and head has.
inline TileGrid chunk_grid(const ChunkCall& call, int row_tiles, int column_tiles) {
  return {static_cast<int>(call.sums.shape(0) * call.sums.shape(1) * call.sums.shape(2)), row_tiles * column_tiles};
}
/// f32 [batch, head, chunk, step] as [batch * head, chunk * chunk_size + step].
inline Tensor by_step(const Tensor& t) { return t.reshape({t.shape(0) * t.shape(1), t.shape(2) * t.shape(3)}); }
void fill_counts(auto& p, const ChunkCall& call) {
  p.heads = static_cast<int>(call.x.shape(2));
  p.shared = p.heads / static_cast<int>(call.keys.shape(2));
  p.chunks = static_cast<int>(call.sums.shape(2));
  p.chunk_size = static_cast<int>(call.sums.shape(3));
  p.length = static_cast<int>(call.x.shape(1));
}
void bind_steps(auto& bind, auto& p, const ChunkCall& call) {
  bind(p.sizes, by_step(call.sizes));
  bind(p.g, by_step(call.sums));
  fill_counts(p, call);
}
void bind_chunk(auto& bind, auto& p, const ChunkCall& call) {
  bind_steps(bind, p, call);
  bind(p.x, by_head(call.x));
  bind(p.states, merged(call.states));
}
template <class Kernel>
TileGrid chunk_state_grid(const ChunkCall& call) {
  return chunk_grid(call, tiles(call.x.shape(3), Kernel::M), tiles(call.keys.shape(3), Kernel::N));
}
void bind_chunk_state(auto& bind, auto& p, const ChunkCall& call, int tile_columns) {
  bind_chunk(bind, p, call);
  bind(p.b, by_head(call.keys));
  p.sums = call.sums.template data<float>();
  p.columns = tiles(call.keys.shape(3), tile_columns);
}
template <class Kernel>
TileGrid chunk_scan_grid(const ChunkCall& call) {
  return chunk_grid(call, tiles(call.sums.shape(3), Kernel::M), tiles(call.x.shape(3), Kernel::N));
}
void bind_chunk_scan(auto& bind, auto& p, const ChunkCall& call, int tile_columns) {
  const auto bind_by_head = [&](auto& global, const Tensor& t) { given(t) ? bind(global, by_head(t)) : bind(global, nullptr); };
  bind_chunk(bind, p, call);
  bind(p.c, by_head(call.keys));
  bind(p.cb, merged(call.cb));
  bind_by_head(p.z, call.z);
  bind(p.skip, or_null(call.skip));
  bind_by_head(p.ungated, call.ungated);
  bind(p.y, by_head(call.y));
  p.columns = tiles(call.x.shape(3), tile_columns);
}

struct StatePassingCall {
  Tensor states, passed;  ///< [batch, chunk, head, dim, state]
  Tensor sums;            ///< f32 [batch, head, chunk]
  const Tensor* initial;  ///< f32 [batch, head, dim, state], or null
  const Tensor* final;
};
inline std::int64_t elements_of_state(const Tensor& states) { return states.shape(3) * states.shape(4); }
/// `call`: of state_passing or its gradients. A tile is so many elements of the states of one head.
inline TileGrid passing_grid(const auto& call, int elements) {
  return {static_cast<int>(call.sums.shape(0) * call.sums.shape(1)), tiles(elements_of_state(call.passed), elements)};
}
/// States as [batch, head, chunk, element], or as [batch, head, element].
inline Tensor of_chunks(const Tensor& t) {
  return Tensor::borrow(t.data(), {t.shape(0), t.shape(1), t.shape(2), elements_of_state(t)}, t.dtype(), t.device()).transpose(1, 2);
}
void bind_state(auto& bind, auto& global, const Tensor* t) {
  if (t == nullptr) return bind(global, nullptr);
  bind(global, Tensor::borrow(t->data(), {t->shape(0), t->shape(1), t->shape(2) * t->shape(3)}, t->dtype(), t->device()));
}
void fill_decays(auto& p, const Tensor& sums) {
  p.sums = sums.template data<float>();
  p.sum_batch = sums.stride(0);
  p.sum_head = sums.stride(1);
  p.sum_chunk = sums.stride(2);
  p.heads = static_cast<int>(sums.shape(1));
}
void bind_passing(auto& bind, auto& p, const StatePassingCall& call) {
  bind(p.states, of_chunks(call.states));
  bind(p.passed, of_chunks(call.passed));
  bind_state(bind, p.initial, call.initial);
  bind_state(bind, p.final, call.final);
  fill_decays(p, call.sums);
}

struct ChunkProductsCall {
  Tensor a, b;  ///< [batch, time, group, state]
  Tensor out;   ///< f32 [batch, chunk, group, step, step]
  bool causal;
};
template <class Kernel>
TileGrid products_grid(const ChunkProductsCall& call) {
  const Tensor& out = call.out;
  return {static_cast<int>(out.shape(0) * out.shape(1) * out.shape(2)), tiles(out.shape(3), Kernel::M) * tiles(out.shape(4), Kernel::N)};
}
void bind_products(auto& bind, auto& p, const ChunkProductsCall& call, int tile_columns) {
  bind(p.a, by_head(call.a));
  bind(p.b, by_head(call.b));
  bind(p.out, merged(call.out));
  p.groups = static_cast<int>(call.out.shape(2));
  p.chunks = static_cast<int>(call.out.shape(1));
  p.columns = tiles(call.out.shape(4), tile_columns);
  p.causal = call.causal;
}

/// The launches of the five steps.
void run_chunk_cumsum(const Stream& stream, const ChunkCumsumCall& call);
void run_chunk_state(const Stream& stream, const ChunkCall& call);
void run_state_passing(const Stream& stream, const StatePassingCall& call);
void run_chunk_products(const Stream& stream, const ChunkProductsCall& call);
void run_chunk_scan(const Stream& stream, const ChunkCall& call);

}  // namespace tw::kernels::mamba2

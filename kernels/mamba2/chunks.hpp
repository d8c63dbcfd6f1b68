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

struct ChunkCumsumCall {
  Tensor dt;           ///< [batch, time, head]
  Tensor rate, bias;   ///< f32 [head, 1]
  Tensor seq_idx;      ///< i32 [batch, time]
  Tensor sums, sizes;  ///< f32 [batch, head, chunk, step]
  StepSize size;
};
inline TileGrid cumsum_grid(const ChunkCumsumCall& call) {
  return {static_cast<int>(call.sums.shape(0) * call.sums.shape(2)), tiles(call.sums.shape(1), kCumsumHeads)};
}
void bind_cumsum(auto& bind, auto& p, const ChunkCumsumCall& call) {
  bind(p.dt, call.dt.transpose(1, 2));
  bind(p.rate, call.rate);
  bind(p.bias, or_null(call.bias));
  bind(p.sizes, call.sizes.transpose(1, 2));
  bind(p.sums, call.sums.transpose(1, 2));
  const bool numbered = given(call.seq_idx);
  p.seq_idx = numbered ? call.seq_idx.template data<std::int32_t>() : nullptr;
  p.seq_batch = numbered ? call.seq_idx.stride(0) : 0;
  p.seq_time = numbered ? call.seq_idx.stride(1) : 0;
  p.size = call.size;
  p.chunks = static_cast<int>(call.sums.shape(2));
  p.length = static_cast<int>(call.dt.shape(1));
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
void bind_chunk(auto& bind, auto& p, const ChunkCall& call) {
  const auto by_step = [](const Tensor& t) {
    return Tensor::borrow(t.data(), {t.shape(0) * t.shape(1), t.shape(2) * t.shape(3)}, t.dtype(), t.device());
  };
  bind(p.x, by_head(call.x));
  bind(p.sizes, by_step(call.sizes));
  bind(p.g, by_step(call.sums));
  bind(p.states, merged(call.states));
  p.heads = static_cast<int>(call.x.shape(2));
  p.shared = p.heads / static_cast<int>(call.keys.shape(2));
  p.chunks = static_cast<int>(call.sums.shape(2));
  p.chunk_size = static_cast<int>(call.sums.shape(3));
  p.length = static_cast<int>(call.x.shape(1));
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
inline TileGrid passing_grid(const StatePassingCall& call, int elements) {
  return {static_cast<int>(call.sums.shape(0) * call.sums.shape(1)), tiles(elements_of_state(call.states), elements)};
}
void bind_passing(auto& bind, auto& p, const StatePassingCall& call) {
  const std::int64_t elements = elements_of_state(call.states);
  const auto of_chunks = [&](const Tensor& t) {
    return Tensor::borrow(t.data(), {t.shape(0), t.shape(1), t.shape(2), elements}, t.dtype(), t.device()).transpose(1, 2);
  };
  const auto bind_state = [&](auto& global, const Tensor* t) {
    if (t == nullptr) return bind(global, nullptr);
    bind(global, Tensor::borrow(t->data(), {t->shape(0), t->shape(1), elements}, t->dtype(), t->device()));
  };
  bind(p.states, of_chunks(call.states));
  bind(p.passed, of_chunks(call.passed));
  bind_state(p.initial, call.initial);
  bind_state(p.final, call.final);
  p.sums = call.sums.template data<float>();
  p.sum_batch = call.sums.stride(0);
  p.sum_head = call.sums.stride(1);
  p.sum_chunk = call.sums.stride(2);
  p.heads = static_cast<int>(call.sums.shape(1));
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

}  // namespace tw::kernels::mamba2

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/linear_attention/outputs.tile.hpp"
#include "kernels/named.hpp"
#include "kernels/variant.hpp"
#include "tilewave/linear_attention.hpp"

namespace tw::kernels::linear_attention {

/// The sequences of a checked call, their gates, and where it runs.
struct Call {
  Tensor g;  ///< [batch, heads of v, time], or without memory: no decay
  const std::int32_t* cu_seqlens = nullptr;
  int sequences = 0, length = 0;  ///< as in Chunks
  int heads = 0;                  ///< of v
  Stream stream = Stream::standard(Device::cpu());

  int chunks_of_length() const { return (length + kChunk - 1) / kChunk; }
  /// Chunk numbers.
  int chunks() const { return cu_seqlens != nullptr ? length / kChunk + sequences : sequences * chunks_of_length(); }
};

/// Cumulative sums of the gates inside chunks: ChunkDecay's, [heads, chunks * kChunk].
struct Decay {
  Tensor from_start, to_end;
};
Decay run_decay(const Call& call);

/// Tensors are [batch, head, time, dim]; states f32 [sequence, head, Dk, Dv], or null.
struct StatesPass {
  const Tensor& k;
  const Tensor& v;
  const Tensor* initial;
  const Tensor* final;
  float scale = 1;
  bool backwards = false;
};
/// The state before each chunk, of k's dtype: [chunks, heads, Dk, Dv], with Dk and Dv rounded up so that TMA can copy it. The states of
/// chunks without steps are not written.
Tensor run_states(const Call& call, const Decay& decay, const StatesPass& pass);

struct OutputsPass {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& states;
  StateForm form;  ///< transposed: `states` is [chunks, heads, columns of v, columns of q]
  const Tensor& out;
  float scale, state_scale;
  bool backwards = false;
};
void run_outputs(const Call& call, const Decay& decay, const OutputsPass& pass);

/// Step by step. The states' last two dimensions are those of q and v, with any strides.
struct RecurrencePass {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor* initial;
  const Tensor* final;
  const Tensor& out;
  float scale, added_scale = 1;
  bool backwards = false;
  bool own_step = true;  ///< whether a step's output has what the step adds to the state; false for f32 in run_recurrence() only
};
void run_recurrence(const Call& call, const RecurrencePass& pass);

/// The same in chunks, in one walk, of f16, bf16 and, on a CPU, f32. The columns of q are at most kWalkedDim.
void run_walk(const Call& call, const Decay& decay, const RecurrencePass& pass);
inline constexpr std::int64_t kWalkedDim = 128;
/// The largest gate, either way, that counts as weak. A chunk's gates then add up to an exponent of 2 below 16, and the rounding of a sum
/// changes its decay by less than 16 half units in the last place.
inline constexpr float kLargestWeakGate = 0.125f;
/// Whether a forward pass of f32 is as exact in chunks as step by step: on a CPU, whose products of f32 are not rounded, without gates or
/// with weak ones. `dim`: the columns of q.
bool f32_walks(const Call& call, std::int64_t dim);
/// The generic target's registers do not hold a walk's accumulators.
bool walk_fits(const Stream& stream);
/// Whether the shared memory of the device's blocks holds the tiles of chunks with so many columns of q and v.
bool chunks_fit(const Stream& stream, std::int64_t dim);
/// Whether a walk is expected to be faster than run_states() and run_outputs(): `columns` are those of the states.
bool walk_pays(const Call& call, std::int64_t columns);

/// The numbers that dg is a sum of, [batch, head, time] for each head of v: GateProducts' or OwnSteps'.
struct GateNumbers {
  Tensor products, to_later;  ///< to_later: without memory, or those of OwnSteps
};
GateNumbers run_gate_products(const Call& call, const Tensor& q, const Tensor& k, const Tensor& dq, const Tensor& dk);
/// Completes dq and dk, f32, that lack what each step gives itself.
GateNumbers run_own_steps(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& d_o, float scale,
                          const Tensor& dq, const Tensor& dk);
/// dg, [batch, head, time]. `state`, `d_state`: the final state and its gradient, or null. With OwnSteps' numbers the state lacks what the
/// last step adds.
void run_gate_gradients(const Call& call, const GateNumbers& numbers, const Tensor* state, const Tensor* d_state, const Tensor& dg);
/// y = the sums of `shared` neighbouring heads of x each.
void run_sum_of_heads(const Call& call, const Tensor& x, const Tensor& y);

std::vector<KernelVariant> registered();
std::vector<KernelSpec> registered_generic();
inline constexpr ShapeKey kShape[] = {{"batch", "sequences"},       {"seqlen", "steps of a sequence"},
                                      {"heads", "heads of v"},      {"shared", "heads of v for each head of q and k", 1},
                                      {"Dk", "columns of q and k"}, {"Dv", "columns of v"}};

// For passes.cpp and registered.cpp: the kernels by the values that name them, and their parameters.

struct StatesKernel {
  DType dtype;
  int columns;
  auto operator<=>(const StatesKernel&) const = default;
};
struct WalkKernel {
  DType dtype;
  int dim, columns;
  auto operator<=>(const WalkKernel&) const = default;
};
struct OutputsKernel {
  DType dtype;
  int dim, columns;
  StateForm form;
  auto operator<=>(const OutputsKernel&) const = default;
};
/// Slots of the ring between the roles: two blocks fit an SM.
inline constexpr int kStages = 2;
inline constexpr int kDecayHeads = 8;

/// Columns of a walk. On a GPU two blocks fit an SM with 64, if a head of q has no more, either.
inline constexpr int kWalkColumns = 128;
constexpr int walk_columns(std::int64_t dim, std::int64_t columns) { return dim > 64 || columns > 64 ? kWalkColumns : 64; }
/// A walk holds two chunks while a third one arrives.
inline constexpr int kWalkStages = 3;
/// Columns of Outputs.
constexpr int outputs_columns(std::int64_t columns) { return columns > 64 ? 128 : 64; }
/// On a GPU: the registers of two blocks for each SM hold the states and the values of 64 columns.
inline constexpr int kStatesColumns = 64;

std::string type_of_states(const StatesKernel& k);
std::string type_of_walk(const WalkKernel& k);
std::string type_of_outputs(const OutputsKernel& k);

inline int tiles(std::int64_t extent, int tile) { return static_cast<int>((extent + tile - 1) / tile); }

inline void fill_chunks(auto& chunks, const Call& call) {
  chunks.cu_seqlens = call.cu_seqlens;
  chunks.sequences = call.sequences;
  chunks.length = call.length;
  chunks.per_sequence = call.chunks_of_length();
}
inline TileGrid decay_grid(const Call& call) { return {call.chunks(), tiles(call.heads, kDecayHeads)}; }
void bind_decay(auto& bind, auto& p, const Call& call, const Decay& decay) {
  bind(p.g, call.g.data() != nullptr ? &call.g : nullptr);
  bind(p.from_start, decay.from_start);
  bind(p.to_end, decay.to_end);
  fill_chunks(p.chunks, call);
}
inline TileGrid states_grid(const Call& call, const StatesPass& pass, int columns) {
  return {call.sequences * call.heads, tiles(pass.k.shape(3), 64) * tiles(pass.v.shape(3), columns)};
}
void bind_states(auto& bind, auto& p, const Call& call, const Decay& decay, const StatesPass& pass, const Tensor& states, int columns) {
  bind(p.k, pass.k);
  bind(p.v, pass.v);
  bind(p.exponents, pass.backwards ? decay.from_start : decay.to_end);
  p.from_start = decay.from_start.template data<float>();
  bind(p.initial, pass.initial);
  bind(p.states, states);
  bind(p.final, pass.final);
  fill_chunks(p.chunks, call);
  p.scale = pass.scale;
  p.heads = call.heads;
  p.k_shared = call.heads / static_cast<int>(pass.k.shape(1));
  p.v_shared = call.heads / static_cast<int>(pass.v.shape(1));
  p.columns = tiles(pass.v.shape(3), columns);
  p.backwards = pass.backwards;
}
inline TileGrid outputs_grid(const Call& call, const OutputsPass& pass, int columns) {
  return {call.chunks(), call.heads, tiles(pass.out.shape(3), columns)};
}
void bind_outputs(auto& bind, auto& p, const Call& call, const Decay& decay, const OutputsPass& pass) {
  bind(p.q, pass.q);
  bind(p.k, pass.k);
  bind(p.v, pass.v);
  bind(p.states, pass.states);
  bind(p.exponents, pass.backwards ? decay.to_end : decay.from_start);
  bind(p.out, pass.out);
  fill_chunks(p.chunks, call);
  p.scale = pass.scale;
  p.state_scale = pass.state_scale;
  p.q_shared = call.heads / static_cast<int>(pass.q.shape(1));
  p.k_shared = call.heads / static_cast<int>(pass.k.shape(1));
  p.v_shared = call.heads / static_cast<int>(pass.v.shape(1));
  p.backwards = pass.backwards;
}
inline TileGrid walk_grid(const Call& call, const RecurrencePass& pass, int columns) {
  return {call.sequences * call.heads, tiles(pass.v.shape(3), columns)};
}
void bind_walk(auto& bind, auto& p, const Call& call, const Decay& decay, const RecurrencePass& pass) {
  bind(p.q, pass.q);
  bind(p.k, pass.k);
  bind(p.v, pass.v);
  bind(p.until, pass.backwards ? decay.to_end : decay.from_start);
  bind(p.after, pass.backwards ? decay.from_start : decay.to_end);
  bind(p.initial, pass.initial);
  bind(p.final, pass.final);
  bind(p.out, pass.out);
  fill_chunks(p.chunks, call);
  p.scale = pass.scale;
  p.added_scale = pass.added_scale;
  p.heads = call.heads;
  p.q_shared = call.heads / static_cast<int>(pass.q.shape(1));
  p.k_shared = call.heads / static_cast<int>(pass.k.shape(1));
  p.v_shared = call.heads / static_cast<int>(pass.v.shape(1));
  p.backwards = pass.backwards;
}
/// The part of a state of `rows` rows that a block of Recurrence holds: 32 elements for each thread, in runs of 128 bytes and more.
constexpr int recurrence_columns(int rows) { return rows >= 128 ? 32 : 64; }
constexpr int recurrence_warps(int rows) { return rows >= 256 ? 8 : 4; }
inline TileGrid recurrence_grid(const Call& call, const RecurrencePass& pass, int columns) {
  return {call.sequences * call.heads, tiles(pass.v.shape(3), columns)};
}
void bind_recurrence(auto& bind, auto& p, const Call& call, const RecurrencePass& pass) {
  bind(p.q, pass.q.transpose(2, 3));
  bind(p.k, pass.k.transpose(2, 3));
  bind(p.v, pass.v);
  bind(p.initial, pass.initial);
  bind(p.final, pass.final);
  bind(p.out, pass.out);
  const bool decays = call.g.data() != nullptr;
  p.g = decays ? call.g.template data<float>() : nullptr;
  p.g_batch = decays ? call.g.stride(0) : 0;
  p.g_head = decays ? call.g.stride(1) : 0;
  p.g_time = decays ? call.g.stride(2) : 0;
  fill_chunks(p.chunks, call);
  p.scale = pass.scale;
  p.added_scale = pass.added_scale;
  p.heads = call.heads;
  p.q_shared = call.heads / static_cast<int>(pass.q.shape(1));
  p.k_shared = call.heads / static_cast<int>(pass.k.shape(1));
  p.v_shared = call.heads / static_cast<int>(pass.v.shape(1));
  p.backwards = pass.backwards;
}
/// States with room for a chunk each.
inline Shape states_shape(const Call& call, std::int64_t rows, std::int64_t columns) {
  return {call.chunks(), call.heads, tiles(rows, 8) * 8, tiles(columns, 8) * 8};
}

}  // namespace tw::kernels::linear_attention

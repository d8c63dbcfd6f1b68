#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/mamba2/discretize.tile.hpp"
#include "kernels/mamba2/gradients.tile.hpp"
#include "kernels/mamba2/outputs.tile.hpp"
#include "kernels/mamba2/scan.tile.hpp"
#include "kernels/mamba2/step.tile.hpp"
#include "kernels/rows.hpp"
#include "kernels/variant.hpp"
#include "tilewave/device.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/mamba2.hpp"

// Shared by the family's files: a checked call, and what its kernels are given.

namespace tw::kernels::mamba2 {

/// A checked call. Tensors that were not given have no memory.
struct Call {
  const char* op = nullptr;
  Tensor x, z;        ///< [batch, head, time, dim]
  Tensor dt;          ///< [batch, time, head]
  Tensor rate, bias;  ///< f32 [1, head]
  Tensor skip;        ///< f32 [head, dim]; of one number for each head with a stride of 0
  Tensor b, c;        ///< [batch, time, group, state]
  Tensor seq_idx;     ///< i32 [batch, time]
  Tensor cu_seqlens;  ///< i32 [sequences + 1]
  StepSize size = {};
  std::int64_t sequences = 0;
  int config = -1;
  Stream stream = Stream::standard(Device::cpu());

  int batch() const { return static_cast<int>(x.shape(0)); }
  int heads() const { return static_cast<int>(x.shape(1)); }
  int length() const { return static_cast<int>(x.shape(2)); }
  std::int64_t dim() const { return x.shape(3); }
  std::int64_t state() const { return b.shape(3); }
  Shape states() const { return {sequences, heads(), dim(), state()}; }
};

inline bool given(const Tensor& t) { return t.data() != nullptr; }
inline const Tensor* or_null(const Tensor& t) { return given(t) ? &t : nullptr; }
inline Tensor by_head(const Tensor& t) { return t.transpose(1, 2); }
inline int tiles(std::int64_t extent, int tile) { return static_cast<int>((extent + tile - 1) / tile); }

/// Steps and heads of a tile of StepSizes.
inline constexpr int kSizeRows = 16, kSizeHeads = 32;

/// Calls f.operator()<R, C>() with a tile of rows that hold `columns`.
template <class F>
void with_rows(std::int64_t columns, F f) {
  if (columns <= 64) return f.template operator()<32, 64>();
  if (columns <= 128) return f.template operator()<32, 128>();
  f.template operator()<16, 256>();
}

inline TileGrid sizes_grid(const Call& call) { return {tiles(call.length(), kSizeRows), tiles(call.heads(), kSizeHeads), call.batch()}; }
/// A tile of `rows` steps of a head.
inline TileGrid rows_grid(const Call& call, int rows) { return {tiles(call.length(), rows), call.batch() * call.heads()}; }

inline void fill_steps(auto& steps, const Call& call) {
  steps.cu_seqlens = given(call.cu_seqlens) ? call.cu_seqlens.data<std::int32_t>() : nullptr;
  steps.sequences = static_cast<int>(call.sequences);
  steps.length = call.length();
}

/// f32 [batch, time, head] each.
struct Discretized {
  Tensor sizes, g;
};
void bind_sizes(auto& bind, auto& p, const Call& call, const Discretized& to) {
  bind(p.dt, call.dt);
  bind(p.rate, call.rate);
  bind(p.bias, or_null(call.bias));
  bind(p.sizes, to.sizes);
  bind(p.g, to.g);
  const bool numbered = given(call.seq_idx);
  p.seq_idx = numbered ? call.seq_idx.template data<std::int32_t>() : nullptr;
  p.seq_batch = numbered ? call.seq_idx.stride(0) : 0;
  p.seq_time = numbered ? call.seq_idx.stride(1) : 0;
  p.size = call.size;
}

/// [batch, time, head] as [batch, head, time, 1].
inline Tensor of_rows(const Tensor& t) {
  return Tensor::borrow(t.data(), {t.shape(0), t.shape(2), t.shape(1), 1}, t.dtype(), t.device(),
                        {t.stride(0), t.stride(2), t.stride(1), 0});
}
void bind_scale(auto& bind, auto& p, const Call& call, const Discretized& d, const Tensor& scaled) {
  bind(p.x, call.x);
  bind(p.sizes, of_rows(d.sizes));
  bind(p.scaled, scaled);
  p.heads = call.heads();
}
void bind_outputs(auto& bind, auto& p, const Call& call, const Tensor& y) {
  bind(p.y, y);
  bind(p.x, call.x);
  bind(p.z, or_null(call.z));
  bind(p.skip, or_null(call.skip));
  fill_steps(p.steps, call);
  p.heads = call.heads();
}

/// The scan in one walk: exponents of chunks, f32 [heads, chunks * kChunk], and the states as [sequence, head, state, dim], or null.
struct ScanCall {
  Tensor until, from, after;
  const Tensor* initial;
  const Tensor* final;
  Tensor y;  ///< as x
};
inline constexpr std::int64_t kScanState = 128;
inline constexpr int kScanColumns = 64, kExponentHeads = 8;
inline int chunks_of(const Call& call) {
  return given(call.cu_seqlens) ? call.length() / kChunk + static_cast<int>(call.sequences)
                                : static_cast<int>(call.sequences) * tiles(call.length(), kChunk);
}
inline void fill_chunks(auto& chunks, const Call& call) {
  chunks.cu_seqlens = given(call.cu_seqlens) ? call.cu_seqlens.data<std::int32_t>() : nullptr;
  chunks.sequences = static_cast<int>(call.sequences);
  chunks.length = call.length();
  chunks.per_sequence = tiles(call.length(), kChunk);
}
inline TileGrid exponents_grid(const Call& call) { return {chunks_of(call), tiles(call.heads(), kExponentHeads)}; }
void bind_exponents(auto& bind, auto& p, const Call& call, const ScanCall& scan) {
  const auto as_column = [](const Tensor& t) { return t.transpose(0, 1); };
  bind(p.dt, call.dt.transpose(1, 2));
  bind(p.rate, as_column(call.rate));
  if (given(call.bias))
    bind(p.bias, as_column(call.bias));
  else
    bind(p.bias, nullptr);
  bind(p.until, scan.until);
  bind(p.from, scan.from);
  bind(p.after, scan.after);
  const bool numbered = given(call.seq_idx);
  p.seq_idx = numbered ? call.seq_idx.template data<std::int32_t>() : nullptr;
  p.seq_batch = numbered ? call.seq_idx.stride(0) : 0;
  p.seq_time = numbered ? call.seq_idx.stride(1) : 0;
  fill_chunks(p.chunks, call);
  p.size = call.size;
}
inline TileGrid scan_grid(const Call& call) { return {static_cast<int>(call.sequences) * call.heads(), tiles(call.dim(), kScanColumns)}; }
void bind_scan(auto& bind, auto& p, const Call& call, const ScanCall& scan) {
  bind(p.c, by_head(call.c));
  bind(p.b, by_head(call.b));
  bind(p.x, call.x);
  bind(p.z, or_null(call.z));
  bind(p.until, scan.until);
  bind(p.from, scan.from);
  bind(p.after, scan.after);
  bind(p.skip, or_null(call.skip));
  bind(p.initial, scan.initial);
  bind(p.final, scan.final);
  bind(p.y, scan.y);
  fill_chunks(p.chunks, call);
  p.heads = call.heads();
  p.shared = call.heads() / static_cast<int>(call.b.shape(2));
}
struct ScanKernel {
  DType dtype;
  bool gated;
  auto operator<=>(const ScanKernel&) const = default;
};
std::string type_of_scan(const ScanKernel& k);

/// The state of a decoding step, and what it is for.
struct UpdateCall {
  Call call;
  Tensor states, y;      ///< [slot, head, dim, state]; as x
  Tensor state_indices;  ///< i32 [batch]
};
/// Rows of a state of so many columns that a block of Update holds: 32 elements for each thread.
constexpr int update_rows(int columns) { return 4096 / columns; }
inline int update_columns(std::int64_t state) { return state > 128 ? 256 : state > 64 ? 128 : 64; }
inline TileGrid update_grid(const Call& call, int rows) { return {call.batch() * call.heads(), tiles(call.dim(), rows)}; }
void bind_update(auto& bind, auto& p, const UpdateCall& u) {
  const Call& call = u.call;
  bind(p.x, call.x);
  bind(p.z, or_null(call.z));
  bind(p.dt, call.dt);
  bind(p.b, by_head(call.b));
  bind(p.c, by_head(call.c));
  bind(p.skip, or_null(call.skip));
  p.rate = call.rate.template data<float>();
  p.rate_stride = call.rate.stride(1);
  p.bias = given(call.bias) ? call.bias.template data<float>() : nullptr;
  p.bias_stride = given(call.bias) ? call.bias.stride(1) : 0;
  bind(p.from, u.states);
  bind(p.to, u.states);
  bind(p.y, u.y);
  p.slots = given(u.state_indices) ? u.state_indices.template data<std::int32_t>() : nullptr;
  p.count = static_cast<int>(u.states.shape(0));
  p.heads = call.heads();
  p.shared = call.heads() / static_cast<int>(call.b.shape(2));
  p.length = call.length();
  p.size = call.size;
}

struct UpdateKernel {
  DType x, dt, states;
  int columns;
  auto operator<=>(const UpdateKernel&) const = default;
};
std::string type_of_update(const UpdateKernel& k);

/// Calls f.operator()<R, C>() with a tile of rows for gradients, half as large: a thread holds four such tiles.
template <class F>
void with_gradient_rows(std::int64_t columns, F f) {
  if (columns <= 64) return f.template operator()<32, 64>();
  if (columns <= 128) return f.template operator()<16, 128>();
  f.template operator()<8, 256>();
}
/// Steps of a run of InputGradients: its sums are less than 1 % of the bytes it reads.
inline constexpr int kRun = 256;

/// Tensors of the backward pass. [batch, head, time, dim] unless said otherwise.
struct Gradients {
  Tensor dy, du;                           ///< du: of o + D x
  Tensor o, dz;                            ///< with z
  Tensor dv, dx;                           ///< dv: of x dt
  Tensor dg, products, d_dt;               ///< [batch, time, head]; f32, f32, dt's dtype
  Tensor skip_sums, rate_sums, bias_sums;  ///< f32 [batch * runs, head, dim or 1]; [batch * tiles, head]
};
void bind_output_gradients(auto& bind, auto& p, const Call& call, const Gradients& g) {
  bind(p.dy, g.dy);
  bind(p.o, g.o);
  bind(p.x, call.x);
  bind(p.z, call.z);
  bind(p.skip, or_null(call.skip));
  bind(p.du, g.du);
  bind(p.dz, g.dz);
  fill_steps(p.steps, call);
  p.heads = call.heads();
}
void bind_input_gradients(auto& bind, auto& p, const Call& call, const Discretized& d, const Gradients& g) {
  bind(p.x, call.x);
  bind(p.dv, g.dv);
  bind(p.du, g.du);
  bind(p.sizes, of_rows(d.sizes));
  bind(p.skip, or_null(call.skip));
  bind(p.dx, g.dx);
  bind(p.products, of_rows(g.products));
  if (given(g.skip_sums))
    bind(p.skip_sums, g.skip_sums.transpose(0, 1));
  else
    bind(p.skip_sums, nullptr);
  fill_steps(p.steps, call);
  p.heads = call.heads();
  p.run = kRun;
  p.runs = tiles(call.length(), kRun);
}
void bind_size_gradients(auto& bind, auto& p, const Call& call, const Discretized& d, const Gradients& g) {
  bind(p.dt, call.dt);
  bind(p.rate, call.rate);
  bind(p.bias, or_null(call.bias));
  bind(p.g, d.g);
  bind(p.dg, g.dg);
  bind(p.products, g.products);
  bind(p.d_dt, g.d_dt);
  bind(p.rate_sums, g.rate_sums);
  bind(p.bias_sums, g.bias_sums);
  fill_steps(p.steps, call);
  p.size = call.size;
  p.tiles = tiles(call.length(), kSizeRows);
}

/// Step sizes and decays of all steps.
Discretized run_discretize(const Call& call);
/// x dt, [batch, time, head, dim].
Tensor run_scale(const Call& call, const Discretized& d);
/// Adds D x to y [batch, head, time, dim] and gates it.
void run_outputs(const Call& call, const Tensor& y);
void run_update(const UpdateCall& call);
/// The whole scan of f16 and bf16 in one walk. dstate is at most kScanState.
void run_scan(const Call& call, const Tensor* initial, const Tensor* final, const Tensor& y);
/// Whether the device's target has it: on GPUs Hopper's alone.
bool scan_fits(const Stream& stream);
/// Whether it is expected to be faster than linear attention and what surrounds it.
bool scan_pays(const Call& call);
/// du and dz.
void run_output_gradients(const Call& call, const Gradients& g);
/// dx, products and skip_sums.
void run_input_gradients(const Call& call, const Discretized& d, const Gradients& g);
/// d_dt, rate_sums and bias_sums.
void run_size_gradients(const Call& call, const Discretized& d, const Gradients& g);
/// mamba2_backward()'s arguments: the gradient of y, and the gradients that are always computed.
struct GivenGradients {
  const Tensor &dy, &dx, &d_dt, &db, &dc;
};
/// All gradients of mamba2_backward(), by the gradients of the scan's five steps.
void run_backward_in_steps(const Call& call, const GivenGradients& gradients, const Mamba2BackwardOptions& options);
/// Whether it supports the call.
bool steps_fit(const Call& call);
/// total [head, column] = the sums of `sums` [run, head, column] over runs.
void run_sum(const Stream& stream, const Tensor& sums, const Tensor& total);

std::vector<KernelVariant> registered();
std::vector<KernelSpec> registered_generic();
inline constexpr ShapeKey kShape[] = {{"batch", "sequences", 1},   {"seqlen", "steps of a sequence"},
                                      {"heads", "heads of x"},     {"groups", "heads of B and C", 1},
                                      {"dim", "columns of x", 64}, {"state", "columns of B and C", 128}};

}  // namespace tw::kernels::mamba2

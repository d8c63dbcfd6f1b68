#pragma once

#include <algorithm>
#include <optional>

#include "kernels/causal_conv1d/causal_conv1d.tile.hpp"
#include "kernels/rows.hpp"
#include "tilewave/causal_conv1d.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

// Shared by the family's files: a checked call and its conversion to the kernels' parameters.

namespace tw::kernels::causal_conv1d {

/// Columns of a tile on the CPU and of a narrow one on the GPU: 4 for each thread.
inline constexpr int kNarrow = 512;
/// Columns of a tile of the backward pass on the GPU: 2 for each thread.
inline constexpr int kBackwardCols = 256;

/// A checked call. Tensors are as the kernels take them.
struct Call {
  const char* op = nullptr;
  Tensor x, y;                                                         ///< [B, S, C]; y is dx in the backward pass
  Tensor weight;                                                       ///< [width, C]
  std::optional<Tensor> bias, initial_state, final_state, cu_seqlens;  ///< [1, C]; [N, width - 1, C] each; [N + 1]
  // of the backward pass
  Tensor dy, sums;                                                         ///< sums: [width + 1, runs of all batches, C]
  std::optional<Tensor> d_final_state, d_initial_state, d_weight, d_bias;  ///< the weight's: [width, 1, C]
  bool silu = false;
  int run = 1;  ///< steps of a run
  Stream stream = Stream::standard(Device::cpu());

  int taps() const { return static_cast<int>(weight.shape(0)); }
  int channels() const { return static_cast<int>(x.shape(2)); }
  int sequences() const { return static_cast<int>(cu_seqlens ? cu_seqlens->shape(0) - 1 : x.shape(0)); }
  /// Runs of a batch. An empty sequence has one, which copies its state.
  int runs() const {
    const int length = static_cast<int>(x.shape(1));
    if (cu_seqlens) return Segments<cpu::Target>::tiles(length, sequences(), run);
    return std::max((length + run - 1) / run, 1);
  }
  int batches() const { return cu_seqlens ? 1 : static_cast<int>(x.shape(0)); }
};

/// Whether a thread of a GPU has 8 channels of the forward pass, 16 bytes of a 16-bit type. Few channels are better spread over more
/// threads.
inline bool is_wide(const Call& call) {
  const int channels = call.channels();
  return size_of(call.x.dtype()) == 2 && (channels % (2 * kNarrow) == 0 || channels > 8 * kNarrow);
}

/// The tensor, or null if it is absent.
inline const Tensor* given(const std::optional<Tensor>& t) { return t ? &*t : nullptr; }

inline void bind_common(auto& bind, auto& p, const Call& call) {
  bind(p.x, call.x);
  bind(p.initial_state, given(call.initial_state));
  bind(p.weight, call.weight);
  bind(p.bias, given(call.bias));
  auto& s = p.sequences;
  s.segments.offsets = call.cu_seqlens ? call.cu_seqlens->data<std::int32_t>() : nullptr;
  s.segments.count = call.cu_seqlens ? call.sequences() : 0;
  s.segments.rows = s.length = static_cast<int>(call.x.shape(1));
  s.run = call.run;
  p.silu = call.silu;
}
inline void bind_forward(auto& bind, auto& p, const Call& call) {
  bind_common(bind, p, call);
  bind(p.y, call.y);
  bind(p.final_state, given(call.final_state));
}
inline void bind_backward(auto& bind, auto& p, const Call& call) {
  bind_common(bind, p, call);
  bind(p.dy, call.dy);
  bind(p.d_final_state, given(call.d_final_state));
  bind(p.dx, call.y);
  bind(p.sums, call.sums);
  p.runs = call.runs();
}
inline void bind_initial(auto& bind, auto& p, const Call& call) {
  bind_common(bind, p, call);
  bind(p.dy, call.dy);
  bind(p.d_final_state, given(call.d_final_state));
  bind(p.d_initial_state, given(call.d_initial_state));
}
inline void bind_sums(auto& bind, auto& p, const Call& call) {
  bind(p.sums, call.sums);
  bind(p.d_weight, given(call.d_weight));
  bind(p.d_bias, given(call.d_bias));
  p.taps = call.taps();
}

inline int tiles_of(int channels, int cols) { return (channels + cols - 1) / cols; }
inline TileGrid grid_of(const Call& call, int cols) { return {call.runs(), tiles_of(call.channels(), cols), call.batches()}; }
inline TileGrid initial_grid(const Call& call) { return {1, tiles_of(call.channels(), kNarrow), call.sequences()}; }
inline TileGrid sums_grid(const Call& call) { return {1, tiles_of(call.channels(), WeightSums<float>::tile_cols), call.taps() + 1}; }

/// Throw InvalidArgument. `state`: what messages call the initial state.
Call check_forward(const char* op, const char* state, const Tensor& x, const Tensor& weight, const Tensor& y,
                   const CausalConv1dOptions& options);
Call check_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& dx, const CausalConv1dBackwardOptions& options);
/// Steps of a run, a multiple of 8.
int run_length(const Call& call, bool backward);

void forward_on_cpu(const Call& call);
void backward_on_cpu(const Call& call);
void forward_on_gpu(const Call& call);
void backward_on_gpu(const Call& call);

}  // namespace tw::kernels::causal_conv1d

#include <algorithm>

#include "kernels/mamba2/chunk_gradients.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/elementwise.hpp"

// mamba2_backward() by the scan's five steps, computed again, and their gradients in reverse.

namespace tw::kernels::mamba2 {

namespace {

/// The largest chunks, which need the least memory for states, or one that holds a shorter sequence in whole tiles.
int chunk_size_of(const Call& call) { return std::clamp(64 * tiles(call.length(), 64), 64, kLargestChunk); }

/// Contiguous states, as the steps need them: those given, or a copy.
Tensor contiguous(const Tensor* states, const Stream& stream) {
  if (states == nullptr) return {};
  if (states->is_contiguous()) return *states;
  const Tensor copy = workspace(states->shape(), DType::f32, stream);
  cast(*states, copy, {.stream = stream});
  return copy;
}

}  // namespace

bool steps_fit(const Call& call) {
  const std::int64_t chunks = std::int64_t{call.batch()} * call.heads() * tiles(call.length(), chunk_size_of(call));
  return call.x.dtype() != DType::f32 && !given(call.cu_seqlens) && chunks <= kLargestExtent;
}

void run_backward_in_steps(const Call& call, const GivenGradients& g, const Mamba2BackwardOptions& options) {
  const Stream& stream = call.stream;
  const Tensor x = by_head(call.x);
  const DType dtype = x.dtype();
  const int size = chunk_size_of(call), chunks = tiles(call.length(), size), batch = call.batch(), heads = call.heads();
  const Shape of_steps{batch, heads, chunks, size}, of_states{batch, chunks, heads, call.dim(), call.state()};
  const Shape of_products{batch, chunks, call.b.shape(2), size, size};
  const auto room = [&](const Shape& shape, DType of) { return workspace(shape, of, stream); };
  const auto f32 = [&](const Shape& shape) { return workspace(shape, DType::f32, stream); };

  // The scan.
  const Tensor sizes = f32(of_steps), sums = f32(of_steps), decays = sums.select(3, size - 1);
  ChunkCumsumCall cumsum{.dt = call.dt,
                         .rate = call.rate.transpose(0, 1),
                         .bias = given(call.bias) ? call.bias.transpose(0, 1) : Tensor(),
                         .seq_idx = call.seq_idx,
                         .sums = sums,
                         .sizes = sizes,
                         .size = call.size};
  run_chunk_cumsum(stream, cumsum);
  const Tensor added = f32(of_states), passed = room(of_states, dtype), cb = f32(of_products);
  const Tensor initial = contiguous(options.initial_states, stream);
  run_chunk_state(stream, {.x = x, .keys = call.b, .sizes = sizes, .sums = sums, .states = added});
  run_state_passing(stream, {added, passed, decays, or_null(initial), nullptr});
  run_chunk_products(stream, {call.c, call.b, cb, true});
  const ChunkCall scan{.x = x, .keys = call.c, .sizes = sizes, .sums = sums, .states = passed, .cb = cb, .skip = call.skip};

  // The gate, and D.
  Tensor du = g.dy;
  if (given(call.z)) {
    ChunkCall ungated = scan;
    ungated.y = room(x.shape(), dtype);
    run_chunk_scan(stream, ungated);
    du = run_gate_gradients(stream, x, by_head(call.z), ungated.y, g.dy, *options.dz);
  }
  if (options.dd != nullptr) run_skip_gradients(stream, x, du, *options.dd);

  // The states, from the last chunk to the first. What chunks add is no longer needed.
  const Tensor& d_passed = added;
  const Tensor d_states = room(of_states, dtype), d_decays = f32({batch, heads, chunks});
  const Tensor d_final = contiguous(options.d_final_states, stream);
  const Tensor* const to = options.d_initial_states;
  const Tensor d_initial = to == nullptr ? Tensor() : to->is_contiguous() ? *to : f32(call.states());
  run_scan_state_gradients(stream, {.x = du, .keys = call.c, .sizes = sizes, .sums = sums, .states = d_passed});
  run_passing_gradients(stream, {.passed = passed,
                                 .sums = decays,
                                 .d_passed = d_passed,
                                 .rounded = d_states,
                                 .d_decays = d_decays,
                                 .d_final = or_null(d_final),
                                 .d_initial = or_null(d_initial)});
  if (to != nullptr && !to->is_contiguous()) cast(d_initial, *to, {.stream = stream});

  // The gradients inside each chunk. dC and dB are sums of two terms: the first is kept in f32 until the second has been added.
  const Tensor d_cb = f32(of_products), d_keys = f32(call.b.shape());
  const StepGradients d_steps{f32(of_steps), f32(of_steps)};
  ChunkCall inputs = scan;
  inputs.x = du, inputs.keys = call.b, inputs.states = d_states, inputs.y = g.dx;
  run_scan_input_gradients(stream, inputs);
  run_scan_key_gradients(stream, scan, du, d_keys, d_cb, d_steps);
  run_product_gradients_of_c(stream, {d_cb, call.b, g.dc, true, &d_keys});
  run_added_key_gradients(stream, {.x = x, .keys = call.b, .sizes = sizes, .sums = sums, .states = d_states}, d_keys, d_steps, &d_decays);
  run_product_gradients_of_b(stream, {d_cb, call.c, g.db, true, &d_keys});

  cumsum.sums = d_steps.sums, cumsum.sizes = d_steps.sizes;
  run_cumsum_gradients(stream, cumsum, g.d_dt, options.da, options.d_dt_bias);
}

}  // namespace tw::kernels::mamba2

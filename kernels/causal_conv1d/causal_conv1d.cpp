#include "tilewave/causal_conv1d.hpp"

#include <string>
#include <utility>
#include <vector>

#include "kernels/causal_conv1d/call.hpp"
#include "kernels/check.hpp"
#include "kernels/workspace.hpp"

namespace tw {
namespace kernels::causal_conv1d {
namespace {

/// A view of a vector [C] as [1, C].
Tensor as_row(const Tensor& t) { return Tensor::borrow(t.data(), {1, t.shape(0)}, t.dtype(), t.device(), {0, t.stride(0)}); }

void check_state(const char* op, const char* name, const Tensor* state, const Call& call) {
  if (state == nullptr) return;
  check_operand(op, name, *state, call.x.dtype(), call.x.device());
  const Shape shape{call.sequences(), call.channels(), call.taps() - 1};
  require(state->shape() == shape, "{}: {} is {}; it must be [{}, {}, {}]", op, name, *state, shape[0], shape[1], shape[2]);
}

/// Checks what the forward and the backward pass have in common.
Call check_common(const char* op, const Tensor& x, const Tensor& weight, const char* y_name, const Tensor& y, const Tensor* bias,
                  const Tensor* cu_seqlens, const std::optional<Stream>& stream, bool silu) {
  const Device device = y.device();
  require(is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported", op, x);
  check_operand(op, "x", x, x.dtype(), device);
  check_operand(op, y_name, y, x.dtype(), device);
  check_output(op, y_name, y);
  require(x.rank() == 3, "{}: x is {}; it must be [batch, seqlen, channels]", op, x);
  require(y.shape() == x.shape(), "{}: {} is {}; it must have x's shape, {}", op, y_name, y, x);
  check_extents(op, "x", x);
  require(weight.dtype() == x.dtype() || weight.dtype() == DType::f32, "{}: weight is {}; it must be of x's dtype, {}, or f32", op, weight,
          name_of(x.dtype()));
  check_operand(op, "weight", weight, weight.dtype(), device);
  require(weight.rank() == 2 && weight.shape(0) == x.shape(2) && weight.shape(1) >= 2 && weight.shape(1) <= 4,
          "{}: weight is {}; it must be [{}, width] with a width of 2 to 4", op, weight, x.shape(2));
  if (bias != nullptr) {
    check_operand(op, "bias", *bias, weight.dtype(), device);
    require(bias->shape() == Shape{x.shape(2)}, "{}: bias is {}; it must be [{}]", op, *bias, x.shape(2));
  }
  if (cu_seqlens != nullptr) {
    check_operand(op, "cu_seqlens", *cu_seqlens, DType::i32, device);
    require(cu_seqlens->rank() == 1 && cu_seqlens->shape(0) >= 2 && cu_seqlens->is_contiguous(),
            "{}: cu_seqlens is {}; it must be [sequences + 1], contiguous, of at least one sequence", op, *cu_seqlens);
    require(x.shape(0) == 1, "{}: x is {}; with cu_seqlens its batch must be 1", op, x);
  }
  Call call;
  call.op = op;
  call.x = x;
  call.y = y;
  call.weight = weight.transpose(0, 1);
  call.silu = silu;
  call.stream = checked_stream(op, stream, device);
  if (bias != nullptr) call.bias = as_row(*bias);
  if (cu_seqlens != nullptr) call.cu_seqlens = *cu_seqlens;
  return call;
}

/// The grid of a launch is limited.
void check_grid(const Call& call) {
  const std::int64_t tiles = std::int64_t{call.runs()} * tiles_of(call.channels(), kBackwardCols) * std::max(call.batches(), 1);
  require(tiles <= kLargestExtent, "{}: x is {}, which is {} tiles; they are limited to {}", call.op, call.x, tiles, kLargestExtent);
}

}  // namespace

int run_length(const Call& call, bool backward) {
  // The steps before a run are read twice, and those of the backward pass again after it: a run of 16 steps reads a fifth more, mostly
  // from the L2 cache. A run of the backward pass also leaves sums: of 64 steps, 5 % of the bytes, and as much again to read them. All
  // runs take as long, so there are as many as make the device's blocks busy a whole number of times.
  constexpr int shortest = 16, longest = 256, step = 8;
  const bool wide = !backward && is_wide(call), on_gpu = call.stream.device().is_cuda();
  const int cols = wide ? 2 * kNarrow : backward ? kBackwardCols : kNarrow;
  const int bytes = static_cast<int>(size_of(call.x.dtype()));
  constexpr bool pieces = true;  // other tensors are rare, and only lose part of a round
  const int blocks = backward ? backward_blocks(bytes, pieces) : forward_blocks(wide ? 8 : 4, bytes, pieces);
  const std::int64_t at_once = on_gpu ? blocks * std::int64_t{device_info(call.stream.device()).units} : 16;
  const std::int64_t steps = std::int64_t{tiles_of(call.channels(), cols)} * call.x.shape(0) * call.x.shape(1);  // of all tiles
  const std::int64_t rounds = std::max<std::int64_t>(ceil_div(steps, longest * at_once), 2);
  return static_cast<int>(std::clamp<std::int64_t>(ceil_div(ceil_div(steps, rounds * at_once), step) * step, shortest, longest));
}

Call check_forward(const char* op, const char* state, const Tensor& x, const Tensor& weight, const Tensor& y,
                   const CausalConv1dOptions& options) {
  Call call = check_common(op, x, weight, "y", y, options.bias, options.cu_seqlens, options.stream, options.silu);
  check_state(op, state, options.initial_state, call);
  check_state(op, "final_state", options.final_state, call);
  check_disjoint(
      op, {"y", &y},
      {{"x", &x}, {"weight", &weight}, {"bias", options.bias}, {state, options.initial_state}, {"cu_seqlens", options.cu_seqlens}});
  if (options.final_state != nullptr) {
    check_output(op, "final_state", *options.final_state);
    check_disjoint(op, {"final_state", options.final_state},
                   {{"x", &x},
                    {"weight", &weight},
                    {"bias", options.bias},
                    {state, options.initial_state},
                    {"cu_seqlens", options.cu_seqlens},
                    {"y", &y}});
    call.final_state = options.final_state->transpose(1, 2);
  }
  if (options.initial_state != nullptr) call.initial_state = options.initial_state->transpose(1, 2);
  call.run = run_length(call, false);
  check_grid(call);
  return call;
}

Call check_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& dx, const CausalConv1dBackwardOptions& options) {
  constexpr const char* op = "causal_conv1d_backward";
  const CausalConv1dBackwardOptions& o = options;
  Call call = check_common(op, x, weight, "dx", dx, o.bias, o.cu_seqlens, o.stream, o.silu);
  check_operand(op, "dy", dy, x.dtype(), x.device());
  require(dy.shape() == x.shape(), "{}: dy is {}; it must have x's shape, {}", op, dy, x);
  check_state(op, "initial_state", o.initial_state, call);
  check_state(op, "d_final_state", o.d_final_state, call);
  check_state(op, "d_initial_state", o.d_initial_state, call);
  if (o.d_weight != nullptr) {
    check_operand(op, "d_weight", *o.d_weight, weight.dtype(), x.device());
    require(o.d_weight->shape() == weight.shape(), "{}: d_weight is {}; it must have the weight's shape, {}", op, *o.d_weight, weight);
  }
  if (o.d_bias != nullptr) {
    check_operand(op, "d_bias", *o.d_bias, weight.dtype(), x.device());
    require(o.d_bias->shape() == Shape{x.shape(2)}, "{}: d_bias is {}; it must be [{}]", op, *o.d_bias, x.shape(2));
  }
  const NamedTensor outputs[] = {{"dx", &dx}, {"d_weight", o.d_weight}, {"d_bias", o.d_bias}, {"d_initial_state", o.d_initial_state}};
  for (std::size_t n = 0; n < std::size(outputs); ++n) {
    if (outputs[n].tensor == nullptr) continue;
    check_output(op, outputs[n].name, *outputs[n].tensor);
    check_disjoint(op, outputs[n],
                   {{"dy", &dy},
                    {"x", &x},
                    {"weight", &weight},
                    {"bias", o.bias},
                    {"initial_state", o.initial_state},
                    {"cu_seqlens", o.cu_seqlens},
                    {"d_final_state", o.d_final_state}});
    for (std::size_t other = 0; other < n; ++other) check_disjoint(op, outputs[n], {outputs[other]});
  }
  call.dy = dy;
  if (o.initial_state != nullptr) call.initial_state = o.initial_state->transpose(1, 2);
  if (o.d_final_state != nullptr) call.d_final_state = o.d_final_state->transpose(1, 2);
  if (o.d_initial_state != nullptr) call.d_initial_state = o.d_initial_state->transpose(1, 2);
  if (o.d_weight != nullptr) {
    const Tensor& d = *o.d_weight;
    call.d_weight = Tensor::borrow(d.data(), {d.shape(1), 1, d.shape(0)}, d.dtype(), d.device(), {d.stride(1), 0, d.stride(0)});
  }
  if (o.d_bias != nullptr) call.d_bias = as_row(*o.d_bias);
  call.run = run_length(call, true);
  check_grid(call);
  return call;
}

}  // namespace kernels::causal_conv1d

void causal_conv1d(const Tensor& x, const Tensor& weight, const Tensor& y, const CausalConv1dOptions& options) {
  using namespace kernels::causal_conv1d;
  const Call call = check_forward("causal_conv1d", "initial_state", x, weight, y, options);
  if (call.sequences() == 0 || call.channels() == 0 || (x.numel() == 0 && !call.final_state)) return;
  call.stream.device().is_cuda() ? forward_on_gpu(call) : forward_on_cpu(call);
}

void causal_conv1d_update(const Tensor& x, const Tensor& state, const Tensor& weight, const Tensor& y,
                          const CausalConv1dUpdateOptions& options) {
  using namespace kernels;
  using namespace kernels::causal_conv1d;
  constexpr const char* op = "causal_conv1d_update";
  constexpr int kMostTokens = 16;  // of one run, which may write the state in place
  require(x.rank() == 3 && x.shape(1) >= 1 && x.shape(1) <= kMostTokens,
          "{}: x is {}; it must be [batch, seqlen, channels] with 1 to {} tokens", op, x, kMostTokens);
  Call call = check_forward(op, "state", x, weight, y,
                            {.bias = options.bias, .initial_state = &state, .silu = options.silu, .stream = options.stream});
  check_output(op, "state", state);
  check_disjoint(op, {"state", &state}, {{"x", &x}, {"weight", &weight}, {"bias", options.bias}, {"y", &y}});
  if (x.numel() == 0) return;
  call.final_state = call.initial_state;
  call.run = kMostTokens;
  call.stream.device().is_cuda() ? forward_on_gpu(call) : forward_on_cpu(call);
}

void causal_conv1d_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& dx,
                            const CausalConv1dBackwardOptions& options) {
  using namespace kernels;
  using namespace kernels::causal_conv1d;
  Call call = check_backward(dy, x, weight, dx, options);
  if (call.channels() == 0) return;
  call.sums = workspace({call.taps() + 1, std::int64_t{call.batches()} * call.runs(), call.channels()}, DType::f32, call.stream);
  call.stream.device().is_cuda() ? backward_on_gpu(call) : backward_on_cpu(call);
}

}  // namespace tw

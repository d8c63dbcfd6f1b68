#include <cstdint>
#include <limits>

#include "kernels/check.hpp"
#include "kernels/moe/pieces.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/grouped_gemm.hpp"
#include "tilewave/moe.hpp"

namespace tw {

using namespace kernels;

namespace {

/// The sizes of a layer.
struct Sizes {
  std::int64_t tokens, hidden, inner, experts, shared_inner;
};

void check_weight(const char* op, const char* name, const Tensor& w, int rank, const Tensor& x) {
  check_operand(op, name, w, x.dtype(), x.device());
  require(w.rank() == rank, "{}: {} is {}; it must have {} dimensions", op, name, w, rank);
  check_extents(op, name, w);
}

Sizes check_layer(const char* op, const Tensor& x, const Tensor& w_gate_up, const Tensor& w_down, const Tensor& out,
                  const MoeExpertsOptions& options) {
  const Device device = x.device();
  const bool supported = x.dtype() == DType::f16 || x.dtype() == DType::bf16 || (x.dtype() == DType::f32 && !device.is_cuda());
  require(supported, "{}: x is {}; f16 and bf16 are supported, on the CPU also f32", op, x);
  check_operand(op, "x", x, x.dtype(), device);
  require(x.rank() == 2 && x.shape(1) >= 1, "{}: x is {}; it must be [tokens, H] with H at least 1", op, x);
  check_extents(op, "x", x);
  check_weight(op, "w_gate_up", w_gate_up, 3, x);
  check_weight(op, "w_down", w_down, 3, x);
  const std::int64_t hidden = x.shape(1), experts = w_gate_up.shape(0), inner = w_gate_up.shape(1) / 2;
  moe::check_experts(op, "the number of w_gate_up's experts", experts);
  require(w_gate_up.shape(2) == hidden && inner >= 1 && w_gate_up.shape(1) == 2 * inner,
          "{}: w_gate_up is {}; it must be [experts, 2 I, {}] with I at least 1", op, w_gate_up, hidden);
  require(w_down.shape() == Shape{experts, hidden, inner}, "{}: w_down is {}; for w_gate_up {} it must be [{}, {}, {}]", op, w_down,
          w_gate_up, experts, hidden, inner);
  check_operand(op, "out", out, x.dtype(), device);
  require(out.shape() == x.shape(), "{}: out is {}; it must have x's shape, {}", op, out, x);
  require((options.shared_gate_up == nullptr) == (options.shared_down == nullptr), "{}: {} is given without {}", op,
          options.shared_down == nullptr ? "shared_gate_up" : "shared_down",
          options.shared_down == nullptr ? "shared_down" : "shared_gate_up");
  std::int64_t shared = 0;
  if (options.shared_gate_up != nullptr) {
    check_weight(op, "shared_gate_up", *options.shared_gate_up, 2, x);
    check_weight(op, "shared_down", *options.shared_down, 2, x);
    shared = options.shared_gate_up->shape(0) / 2;
    require(options.shared_gate_up->shape(1) == hidden && shared >= 1 && options.shared_gate_up->shape(0) == 2 * shared,
            "{}: shared_gate_up is {}; it must be [2 S, {}] with S at least 1", op, *options.shared_gate_up, hidden);
    require(options.shared_down->shape() == Shape{hidden, shared}, "{}: shared_down is {}; for shared_gate_up {} it must be [{}, {}]", op,
            *options.shared_down, *options.shared_gate_up, hidden, shared);
  }
  if (options.addend != nullptr) {
    check_operand(op, "addend", *options.addend, x.dtype(), device);
    require(options.addend->shape() == out.shape(), "{}: addend is {}; it must have out's shape, {}", op, *options.addend, out);
    check_in_place(op, {"out", &out}, {"addend", options.addend});
  }
  check_output(op, "out", out);
  check_disjoint(op, {"out", &out},
                 {{"x", &x},
                  {"w_gate_up", &w_gate_up},
                  {"w_down", &w_down},
                  {"shared_gate_up", options.shared_gate_up},
                  {"shared_down", options.shared_down}});
  return {x.shape(0), hidden, inner, experts, shared};
}

/// More rows would not fit an int as grouped_gemm() numbers tiles.
void check_rows(const char* op, const Tensor& x, std::int64_t k) {
  require(x.shape(0) * k <= kLargestExtent, "{}: x is {} and k is {}; tokens * k is limited to {}", op, x, k, kLargestExtent);
}

/// The experts' part, after routing.
void run(const Tensor& x, const Tensor& weights, const Tensor& experts, const Tensor& w_gate_up, const Tensor& w_down, const Tensor& out,
         const Sizes& sizes, const MoeExpertsOptions& options, const Stream& stream) {
  const auto work = [&](std::int64_t rows, std::int64_t cols) { return workspace({rows, cols}, x.dtype(), stream); };
  const Tensor* addend = options.addend;
  Tensor shared;
  if (sizes.shared_inner > 0) {
    const Tensor gated = work(sizes.tokens, sizes.shared_inner);
    shared = work(sizes.tokens, sizes.hidden);
    gemm(x, options.shared_gate_up->transpose(0, 1), gated, {.activation = Activation::swiglu, .stream = stream});
    gemm(gated, options.shared_down->transpose(0, 1), shared, {.residual = addend, .stream = stream});
    addend = &shared;
  }
  const std::int64_t rows = experts.numel();
  const Tensor tables = workspace({sizes.experts + 1 + rows}, DType::i32, stream);
  const Tensor offsets = tables.slice(0, 0, sizes.experts + 1);
  const Tensor places = tables.slice(0, sizes.experts + 1, tables.shape(0)).reshape(experts.shape());
  moe::permute(experts, static_cast<int>(sizes.experts), options.first_expert, offsets, nullptr, places, stream);
  const Tensor sorted = work(rows, sizes.hidden), gated = work(rows, sizes.inner), results = work(rows, sizes.hidden);
  moe::dispatch(x, places, sorted, stream);
  grouped_gemm(sorted, w_gate_up.transpose(1, 2), offsets, gated, {.activation = Activation::swiglu, .stream = stream});
  grouped_gemm(gated, w_down.transpose(1, 2), offsets, results, {.stream = stream});
  moe::combine(results, places, weights, addend, out, stream);
}

}  // namespace

void moe_experts(const Tensor& x, const Tensor& weights, const Tensor& experts, const Tensor& w_gate_up, const Tensor& w_down,
                 const Tensor& out, const MoeExpertsOptions& options) {
  constexpr const char* op = "moe_experts";
  const Device device = x.device();
  const Sizes sizes = check_layer(op, x, w_gate_up, w_down, out, options);
  check_operand(op, "weights", weights, DType::f32, device);
  check_operand(op, "experts", experts, DType::i32, device);
  const bool chosen = experts.rank() == 2 && experts.shape(0) == sizes.tokens && experts.shape(1) >= 1 && experts.is_contiguous();
  require(chosen && experts.shape(1) <= moe::kMostChosenExperts, "{}: experts is {}; it must be contiguous, [{}, k] with k from 1 to {}",
          op, experts, sizes.tokens, moe::kMostChosenExperts);
  require(weights.shape() == experts.shape(), "{}: weights is {}; it must have experts' shape, {}", op, weights, experts);
  check_rows(op, x, experts.shape(1));
  check_disjoint(op, {"out", &out}, {{"weights", &weights}, {"experts", &experts}});
  const Stream stream = checked_stream(op, options.stream, device);
  if (sizes.tokens > 0) run(x, weights, experts, w_gate_up, w_down, out, sizes, options, stream);
}

void fused_moe(const Tensor& x, const Tensor& logits, int k, const Tensor& w_gate_up, const Tensor& w_down, const Tensor& out,
               const FusedMoeOptions& options) {
  constexpr const char* op = "fused_moe";
  const Device device = x.device();
  const Sizes sizes = check_layer(op, x, w_gate_up, w_down, out, options.experts);
  moe::check_route(op, logits, k, device, options.route);
  require(logits.shape(0) == sizes.tokens, "{}: logits is {}; it must have a row for each of x's {} tokens", op, logits, sizes.tokens);
  check_rows(op, x, k);
  check_disjoint(op, {"out", &out}, {{"logits", &logits}, {"bias", options.route.bias}});
  const Stream stream = checked_stream(op, options.stream, device);
  if (sizes.tokens == 0) return;
  const Tensor weights = workspace({sizes.tokens, k}, DType::f32, stream), experts = workspace({sizes.tokens, k}, DType::i32, stream);
  moe::route(logits, weights, experts, options.route, stream);
  run(x, weights, experts, w_gate_up, w_down, out, sizes, options.experts, stream);
}

}  // namespace tw

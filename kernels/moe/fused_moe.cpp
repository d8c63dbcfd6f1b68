#include <cstdint>
#include <limits>

#include "kernels/check.hpp"
#include "kernels/dequant_gemm/grouped.hpp"
#include "kernels/moe/pieces.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/cast_fp8.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/grouped_gemm.hpp"
#include "tilewave/moe.hpp"
#include "tilewave/quantized.hpp"
#include "tilewave/swiglu.hpp"

namespace tw {

using namespace kernels;

namespace {

/// The sizes of a layer.
struct Sizes {
  std::int64_t tokens, hidden, inner, experts, shared_inner;
};

constexpr std::int64_t kBlock = 128;  ///< rows and columns of a weight that share a scale

/// Whether a weight has two codes of 4 bits in a byte, with scales of groups.
bool is_packed(const Tensor& w) { return w.dtype() == DType::u8; }
std::int64_t columns(const Tensor& w) { return w.shape(-1) * (is_packed(w) ? 2 : 1); }

/// Weights [.., rows, columns / 2] of u8 one below the other. The scales' dtype tells mxfp4 from int4.
QuantizedMatrix matrix_of(const Tensor& w, const Tensor& scale) {
  const std::int64_t rows = w.numel() / w.shape(-1);
  return {.format = scale.dtype() == DType::f16 ? WeightFormat::int4 : WeightFormat::mxfp4,
          .values = w.reshape({rows, w.shape(-1)}),
          .scales = scale.reshape({rows, scale.shape(-1)}),
          .group = static_cast<int>(columns(w) / scale.shape(-1))};
}

/// The scales of a weight of u8, one for each group of a row, and what both need to be a matrix.
void check_group_scale(const char* op, const char* name, const Tensor& scale, const char* weight_name, const Tensor& w) {
  const bool integers = scale.dtype() == DType::f16;
  require(integers || scale.dtype() == DType::u8, "{}: {} is {}; for {} {} it must be of u8 (mxfp4) or f16 (int4)", op, name, scale,
          weight_name, w);
  check_operand(op, name, scale, scale.dtype(), w.device());
  require(columns(w) % 32 == 0, "{}: {} is {}, with two of {} columns in a byte; columns must be a multiple of 32", op, weight_name, w,
          columns(w));
  const auto grouped = [&](std::int64_t group) {
    Shape shape = w.shape();
    shape.back() = columns(w) / group;
    return shape;
  };
  const bool wide = integers && columns(w) % 128 == 0;
  require(scale.shape() == grouped(32) || (wide && scale.shape() == grouped(128)), "{}: {} is {}; for {} {} it must be [{}]{}", op, name,
          scale, weight_name, w, tw::join(grouped(32), ", "),
          wide ? tw::format(", or [{}] in groups of 128", tw::join(grouped(128), ", ")) : std::string());
  require(w.is_contiguous() && reinterpret_cast<std::uintptr_t>(w.data()) % 16 == 0,
          "{}: {} is {} with strides [{}]; of u8 it must be contiguous and begin at a multiple of 16 bytes", op, weight_name, w,
          tw::join(w.strides(), ", "));
  require(scale.is_contiguous(), "{}: {} is {} with strides [{}]; for a weight of u8 it must be contiguous", op, name, scale,
          tw::join(scale.strides(), ", "));
  require(w.numel() / w.shape(-1) <= kLargestExtent, "{}: {} is {}; the rows of all experts are limited to {}", op, weight_name, w,
          kLargestExtent);
}

/// The scales of a weight [.., rows, cols] of fp8_e4m3 or u8; others have none.
void check_scale(const char* op, const char* name, const Tensor* scale, const char* weight_name, const Tensor& w) {
  if (is_packed(w)) {
    require(scale != nullptr, "{}: {} is not given; {} is {}, which needs it", op, name, weight_name, w);
    return check_group_scale(op, name, *scale, weight_name, w);
  }
  if (w.dtype() != DType::fp8_e4m3) {
    require(scale == nullptr, "{}: {} is given, but {} is {}; scales are for weights of fp8_e4m3 and u8", op, name, weight_name, w);
    return;
  }
  require(w.shape(-2) % kBlock == 0 && w.shape(-1) % kBlock == 0, "{}: {} is {}; of fp8_e4m3 its rows and columns must be multiples of {}",
          op, weight_name, w, kBlock);
  require(scale != nullptr, "{}: {} is not given; {} is {}, which needs it", op, name, weight_name, w);
  check_operand(op, name, *scale, DType::f32, w.device());
  Shape expected = w.shape();
  for (std::size_t dim = expected.size() - 2; dim < expected.size(); ++dim) expected[dim] /= kBlock;
  require(scale->shape() == expected, "{}: {} is {}; for {} {} it must be [{}]", op, name, *scale, weight_name, w,
          tw::join(expected, ", "));
}

void check_weight(const char* op, const char* name, const Tensor& w, int rank, DType dtype, Device device) {
  check_operand(op, name, w, dtype, device);
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
  const bool fp8 = w_gate_up.dtype() == DType::fp8_e4m3, packed = is_packed(w_gate_up);
  const DType dtype = fp8 || packed ? w_gate_up.dtype() : x.dtype();
  const std::int64_t in_byte = packed ? 2 : 1;
  require(!fp8 || x.dtype() == DType::bf16, "{}: x is {}; with weights of fp8_e4m3 it must be bf16", op, x);
  check_weight(op, "w_gate_up", w_gate_up, 3, dtype, device);
  check_weight(op, "w_down", w_down, 3, dtype, device);
  const std::int64_t hidden = x.shape(1), experts = w_gate_up.shape(0), inner = w_gate_up.shape(1) / 2;
  moe::check_experts(op, "the number of w_gate_up's experts", experts);
  require(columns(w_gate_up) == hidden && inner >= 1 && w_gate_up.shape(1) == 2 * inner,
          "{}: w_gate_up is {}; it must be [experts, 2 I, {}] with I at least 1", op, w_gate_up, hidden / in_byte);
  require(w_down.shape(0) == experts && w_down.shape(1) == hidden && columns(w_down) == inner,
          "{}: w_down is {}; for w_gate_up {} it must be [{}, {}, {}]", op, w_down, w_gate_up, experts, hidden, inner / in_byte);
  check_operand(op, "out", out, x.dtype(), device);
  require(out.shape() == x.shape(), "{}: out is {}; it must have x's shape, {}", op, out, x);
  require((options.shared_gate_up == nullptr) == (options.shared_down == nullptr), "{}: {} is given without {}", op,
          options.shared_down == nullptr ? "shared_gate_up" : "shared_down",
          options.shared_down == nullptr ? "shared_down" : "shared_gate_up");
  std::int64_t shared = 0;
  if (options.shared_gate_up != nullptr) {
    check_weight(op, "shared_gate_up", *options.shared_gate_up, 2, dtype, device);
    check_weight(op, "shared_down", *options.shared_down, 2, dtype, device);
    shared = options.shared_gate_up->shape(0) / 2;
    require(columns(*options.shared_gate_up) == hidden && shared >= 1 && options.shared_gate_up->shape(0) == 2 * shared,
            "{}: shared_gate_up is {}; it must be [2 S, {}] with S at least 1", op, *options.shared_gate_up, hidden / in_byte);
    require(options.shared_down->shape(0) == hidden && columns(*options.shared_down) == shared,
            "{}: shared_down is {}; for shared_gate_up {} it must be [{}, {}]", op, *options.shared_down, *options.shared_gate_up, hidden,
            shared / in_byte);
    require(!packed || x.stride(1) == 1, "{}: x is {} with columns {} elements apart; for a shared_gate_up of u8 they must be adjacent", op,
            x, x.stride(1));
    check_scale(op, "shared_gate_up_scale", options.shared_gate_up_scale, "shared_gate_up", *options.shared_gate_up);
    check_scale(op, "shared_down_scale", options.shared_down_scale, "shared_down", *options.shared_down);
  }
  check_scale(op, "gate_up_scale", options.gate_up_scale, "w_gate_up", w_gate_up);
  check_scale(op, "down_scale", options.down_scale, "w_down", w_down);
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
                  {"shared_down", options.shared_down},
                  {"gate_up_scale", options.gate_up_scale},
                  {"down_scale", options.down_scale},
                  {"shared_gate_up_scale", options.shared_gate_up_scale},
                  {"shared_down_scale", options.shared_down_scale}});
  return {x.shape(0), hidden, inner, experts, shared};
}

/// More rows would not fit an int as grouped_gemm() numbers tiles.
void check_rows(const char* op, const Tensor& x, std::int64_t k) {
  require(x.shape(0) * k <= kLargestExtent, "{}: x is {} and k is {}; tokens * k is limited to {}", op, x, k, kLargestExtent);
}

/// Work memory of a call.
struct Work {
  Stream stream;
  Tensor operator()(std::int64_t rows, std::int64_t cols, DType dtype) const { return workspace({rows, cols}, dtype, stream); }
};

/// Rows of fp8_e4m3 with a scale for each 128 of a row, laid out for the products.
struct ScaledRows {
  Tensor values, scales;
  ScaledRows(const Work& work, std::int64_t rows, std::int64_t cols)
      : values(work(rows, cols, DType::fp8_e4m3)),
        scales(work(cols / kBlock, (rows + 3) / 4 * 4, DType::f32).slice(1, 0, rows).transpose(0, 1)) {}
};

/// The two products of all experts, on x's rows sorted by expert. Each gives [rows, hidden].
Tensor multiply(const Tensor& x, const Tensor& places, const Tensor& offsets, const Tensor& w_gate_up, const Tensor& w_down,
                const Sizes& sizes, const Work& work) {
  const std::int64_t rows = places.numel();
  const Tensor sorted = work(rows, sizes.hidden, x.dtype()), gated = work(rows, sizes.inner, x.dtype());
  const Tensor results = work(rows, sizes.hidden, x.dtype());
  moe::dispatch(x, places, sorted, nullptr, work.stream);
  tw::grouped_gemm(sorted, w_gate_up.transpose(1, 2), offsets, gated, {.activation = Activation::swiglu, .stream = work.stream});
  tw::grouped_gemm(gated, w_down.transpose(1, 2), offsets, results, {.stream = work.stream});
  return results;
}
Tensor multiply_fp8(const Tensor& x, const Tensor& places, const Tensor& offsets, const Tensor& w_gate_up, const Tensor& w_down,
                    const Sizes& sizes, const MoeExpertsOptions& options, const Work& work) {
  const std::int64_t rows = places.numel();
  const ScaledRows sorted(work, rows, sizes.hidden), gated(work, rows, sizes.inner);
  const Tensor gate_up = work(rows, 2 * sizes.inner, x.dtype()), results = work(rows, sizes.hidden, x.dtype());
  const Tensor gate_up_scale = options.gate_up_scale->transpose(1, 2), down_scale = options.down_scale->transpose(1, 2);
  moe::dispatch(x, places, sorted.values, &sorted.scales, work.stream);
  tw::grouped_gemm(sorted.values, w_gate_up.transpose(1, 2), offsets, gate_up,
                   {.a_scale = &sorted.scales, .b_scale = &gate_up_scale, .stream = work.stream});
  cast_fp8_swiglu(gate_up.slice(1, 0, sizes.inner), gate_up.slice(1, sizes.inner, 2 * sizes.inner), gated.values, gated.scales,
                  {.stream = work.stream});
  tw::grouped_gemm(gated.values, w_down.transpose(1, 2), offsets, results,
                   {.a_scale = &gated.scales, .b_scale = &down_scale, .stream = work.stream});
  return results;
}

Tensor multiply_packed(const Tensor& x, const Tensor& places, const Tensor& offsets, const Tensor& w_gate_up, const Tensor& w_down,
                       const Sizes& sizes, const MoeExpertsOptions& options, const Work& work) {
  const std::int64_t rows = places.numel();
  const Tensor sorted = work(rows, sizes.hidden, x.dtype()), gate_up = work(rows, 2 * sizes.inner, x.dtype());
  const Tensor gated = work(rows, sizes.inner, x.dtype()), results = work(rows, sizes.hidden, x.dtype());
  const dequant_gemm::GroupedProducts products(offsets, rows, work.stream);
  moe::dispatch(x, places, sorted, nullptr, work.stream);
  products.multiply(sorted, matrix_of(w_gate_up, *options.gate_up_scale), gate_up);
  swiglu_interleaved(gate_up, gated, {.stream = work.stream});
  products.multiply(gated, matrix_of(w_down, *options.down_scale), results);
  return results;
}

/// The same of the shared experts, with the addend, in the order of tokens.
Tensor multiply_shared(const Tensor& x, const Sizes& sizes, const MoeExpertsOptions& options, const Work& work) {
  const Tensor gated = work(sizes.tokens, sizes.shared_inner, x.dtype()), result = work(sizes.tokens, sizes.hidden, x.dtype());
  tw::gemm(x, options.shared_gate_up->transpose(0, 1), gated, {.activation = Activation::swiglu, .stream = work.stream});
  tw::gemm(gated, options.shared_down->transpose(0, 1), result, {.residual = options.addend, .stream = work.stream});
  return result;
}
Tensor multiply_shared_fp8(const Tensor& x, const Sizes& sizes, const MoeExpertsOptions& options, const Work& work) {
  const std::int64_t inner = sizes.shared_inner;
  const ScaledRows tokens(work, sizes.tokens, sizes.hidden), gated(work, sizes.tokens, inner);
  const Tensor gate_up = work(sizes.tokens, 2 * inner, x.dtype()), result = work(sizes.tokens, sizes.hidden, x.dtype());
  const Tensor gate_up_scale = options.shared_gate_up_scale->transpose(0, 1), down_scale = options.shared_down_scale->transpose(0, 1);
  cast_fp8(x, tokens.values, tokens.scales, {.stream = work.stream});
  tw::gemm(tokens.values, options.shared_gate_up->transpose(0, 1), gate_up,
           {.a_scale = &tokens.scales, .b_scale = &gate_up_scale, .stream = work.stream});
  cast_fp8_swiglu(gate_up.slice(1, 0, inner), gate_up.slice(1, inner, 2 * inner), gated.values, gated.scales, {.stream = work.stream});
  tw::gemm(gated.values, options.shared_down->transpose(0, 1), result,
           {.a_scale = &gated.scales, .b_scale = &down_scale, .stream = work.stream});
  if (options.addend != nullptr) add(result, *options.addend, result, {.stream = work.stream});
  return result;
}

Tensor multiply_shared_packed(const Tensor& x, const Sizes& sizes, const MoeExpertsOptions& options, const Work& work) {
  const std::int64_t tokens = sizes.tokens, inner = sizes.shared_inner;
  const Tensor gate_up = work(tokens, 2 * inner, x.dtype()), gated = work(tokens, inner, x.dtype());
  const Tensor result = work(tokens, sizes.hidden, x.dtype());
  tw::dequant_gemm(x, matrix_of(*options.shared_gate_up, *options.shared_gate_up_scale), gate_up, {.stream = work.stream});
  swiglu_interleaved(gate_up, gated, {.stream = work.stream});
  tw::dequant_gemm(gated, matrix_of(*options.shared_down, *options.shared_down_scale), result, {.stream = work.stream});
  if (options.addend != nullptr) add(result, *options.addend, result, {.stream = work.stream});
  return result;
}

/// The experts' part, after routing.
void run(const Tensor& x, const Tensor& weights, const Tensor& experts, const Tensor& w_gate_up, const Tensor& w_down, const Tensor& out,
         const Sizes& sizes, const MoeExpertsOptions& options, const Stream& stream) {
  const Work work{stream};
  const bool fp8 = w_gate_up.dtype() == DType::fp8_e4m3, packed = is_packed(w_gate_up);
  const Tensor* addend = options.addend;
  Tensor shared;
  if (sizes.shared_inner > 0) {
    shared = fp8      ? multiply_shared_fp8(x, sizes, options, work)
             : packed ? multiply_shared_packed(x, sizes, options, work)
                      : multiply_shared(x, sizes, options, work);
    addend = &shared;
  }
  const Tensor tables = workspace({sizes.experts + 1 + experts.numel()}, DType::i32, stream);
  const Tensor offsets = tables.slice(0, 0, sizes.experts + 1);
  const Tensor places = tables.slice(0, sizes.experts + 1, tables.shape(0)).reshape(experts.shape());
  moe::permute(experts, static_cast<int>(sizes.experts), options.first_expert, offsets, nullptr, places, stream);
  const Tensor results = fp8      ? multiply_fp8(x, places, offsets, w_gate_up, w_down, sizes, options, work)
                         : packed ? multiply_packed(x, places, offsets, w_gate_up, w_down, sizes, options, work)
                                  : multiply(x, places, offsets, w_gate_up, w_down, sizes, work);
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

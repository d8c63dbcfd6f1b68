#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>

#include "capi/status.hpp"
#include "kernels/check.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/bitnet.hpp"
#include "tilewave/block_sparse_gemm.hpp"
#include "tilewave/cast_fp8.hpp"
#include "tilewave/causal_conv1d.hpp"
#include "tilewave/convolution.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/embedding.hpp"
#include "tilewave/gated_delta.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/grouped_gemm.hpp"
#include "tilewave/hadamard.hpp"
#include "tilewave/indexer.hpp"
#include "tilewave/linear_attention.hpp"
#include "tilewave/mamba2.hpp"
#include "tilewave/mamba2_chunks.hpp"
#include "tilewave/mla.hpp"
#include "tilewave/moe.hpp"
#include "tilewave/norm.hpp"
#include "tilewave/nsa.hpp"
#include "tilewave/quantized.hpp"
#include "tilewave/quantized_layouts.hpp"
#include "tilewave/reduce.hpp"
#include "tilewave/rope.hpp"
#include "tilewave/softmax.hpp"
#include "tilewave/sparse_gemm.hpp"
#include "tilewave/swiglu.hpp"
#include "tilewave/tilewave.h"
#include "tilewave/topk.hpp"
#include "tilewave/transpose.hpp"
#include "tilewave/vertical_slash.hpp"

namespace tw::c_api {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

}  // namespace tw::c_api

namespace {

using tw::c_api::guard;

/// A C caller may pass any integer as an enum, so check it.
template <class Enum>
std::size_t code_of(const Enum& value) {
  static_assert(sizeof value == sizeof(int));
  int code;
  std::memcpy(&code, &value, sizeof code);
  return static_cast<std::size_t>(code);  // a negative one becomes large
}

template <class Value, class Enum, std::size_t N>
Value value_of(const char* argument, const char* field, const Enum& given, const std::array<Value, N>& values, const char* type) {
  const std::size_t code = code_of(given);
  if (code >= N) throw tw::InvalidArgument(std::string(argument) + field + std::to_string(static_cast<int>(code)) + "; see " + type);
  return values[code];
}

tw::Tensor borrow(const char* argument, const tw_tensor* t) {
  using tw::DType;
  constexpr std::array kDTypes = {DType::f32,      DType::f16,      DType::bf16, DType::i32, DType::boolean,
                                  DType::fp8_e4m3, DType::fp8_e5m2, DType::i8,   DType::i64, DType::u8};
  if (t == nullptr) throw tw::InvalidArgument(std::string(argument) + " is null");
  if (t->rank < 0 || t->rank > 4)
    throw tw::InvalidArgument(std::string(argument) + " has rank " + std::to_string(t->rank) + "; 0 to 4 are allowed");
  const DType dtype = value_of(argument, " has dtype ", t->dtype, kDTypes, "tw_dtype");
  const tw::Device device = t->cuda_device < 0 ? tw::Device::cpu() : tw::Device::cuda(t->cuda_device);
  return tw::Tensor::borrow(t->data, tw::Shape(t->shape, t->shape + t->rank), dtype, device, {t->strides, t->strides + t->rank});
}

tw::Activation activation_of(const char* argument, const tw_activation& given) {
  using tw::Activation;
  constexpr std::array kActivations = {Activation::none,      Activation::relu, Activation::gelu_erf,
                                       Activation::gelu_tanh, Activation::silu, Activation::swiglu};
  return value_of(argument, ".activation is ", given, kActivations, "tw_activation");
}

tw::Stream stream_of(const tw::Tensor& tensor, void* cuda_stream) {
  return tensor.device().is_cuda() ? tw::Stream::borrow(tensor.device(), cuda_stream) : tw::Stream::standard(tensor.device());
}

/// An optional tensor.
class Given {
 public:
  Given(const char* argument, const tw_tensor* tensor) {
    if (tensor != nullptr) tensor_ = borrow(argument, tensor);
    given_ = tensor != nullptr;
  }
  const tw::Tensor* get() const { return given_ ? &tensor_ : nullptr; }

 private:
  tw::Tensor tensor_;
  bool given_ = false;
};

/// The options of the functions of native sparse attention.
class NsaGiven {
 public:
  explicit NsaGiven(const tw_nsa_options* options)
      : given_(tw::c_api::known("options", options)),
        block_counts_("block_counts", given_.block_counts),
        cu_seqlens_("cu_seqlens", given_.cu_seqlens),
        cu_seqlens_k_("cu_seqlens_k", given_.cu_seqlens_k),
        seqlens_("seqlens", given_.seqlens),
        lse_("lse", given_.lse) {}
  tw::NsaOptions options(const tw::Stream& stream) const {
    return {.block_size = given_.block_size == 0 ? 64 : given_.block_size,
            .scale = given_.scale,
            .block_counts = block_counts_.get(),
            .cu_seqlens = cu_seqlens_.get(),
            .cu_seqlens_k = cu_seqlens_k_.get(),
            .seqlens = seqlens_.get(),
            .lse = lse_.get(),
            .stream = stream};
  }

 private:
  tw_nsa_options given_;
  Given block_counts_, cu_seqlens_, cu_seqlens_k_, seqlens_, lse_;
};

/// The options of the functions of vertical-slash sparse attention.
class VerticalSlashGiven {
 public:
  explicit VerticalSlashGiven(const tw_vertical_slash_options* options)
      : given_(tw::c_api::known("options", options)), seqlens_("seqlens", given_.seqlens), lse_("lse", given_.lse) {}
  tw::VerticalSlashOptions options(const tw::Stream& stream) const {
    return {.query_block = given_.query_block == 0 ? 64 : given_.query_block,
            .scale = given_.scale,
            .seqlens = seqlens_.get(),
            .lse = lse_.get(),
            .stream = stream};
  }

 private:
  tw_vertical_slash_options given_;
  Given seqlens_, lse_;
};

/// Functions of one or two tensors with a stream as only option.
template <class Options>
void of_one(void (*f)(const tw::Tensor&, const tw::Tensor&, const Options&), const tw_tensor* x, const tw_tensor* y, void* cuda_stream) {
  const tw::Tensor out = borrow("y", y);
  f(borrow("x", x), out, {.stream = stream_of(out, cuda_stream)});
}
template <class Options>
void of_two(void (*f)(const tw::Tensor&, const tw::Tensor&, const tw::Tensor&, const Options&), const char* name_a, const tw_tensor* a,
            const char* name_b, const tw_tensor* b, const tw_tensor* y, void* cuda_stream) {
  const tw::Tensor out = borrow("y", y);
  f(borrow(name_a, a), borrow(name_b, b), out, {.stream = stream_of(out, cuda_stream)});
}

void norm(void (*f)(const tw::Tensor&, const tw::Tensor&, const tw::NormOptions&), const tw_tensor* x, const tw_tensor* y,
          const tw_norm_options* options, void* cuda_stream) {
  const tw::Tensor out = borrow("y", y);
  const auto given = tw::c_api::known("options", options);
  const Given weight("weight", given.weight), bias("bias", given.bias), residual("residual", given.residual), sum("sum", given.sum);
  f(borrow("x", x), out,
    {.epsilon = given.has_epsilon != 0 ? given.epsilon : tw::NormOptions{}.epsilon,
     .weight = weight.get(),
     .bias = bias.get(),
     .residual = residual.get(),
     .sum = sum.get(),
     .stream = stream_of(out, cuda_stream)});
}

tw::CastFp8Options fp8_options(int32_t powers_of_two, const tw::Tensor& out, void* cuda_stream) {
  return {.kind = powers_of_two != 0 ? tw::Fp8Scales::powers_of_two : tw::Fp8Scales::exact, .stream = stream_of(out, cuda_stream)};
}

std::int64_t one_if_0(std::int64_t x) { return x == 0 ? 1 : x; }

/// Options and the tensors that they point to.
struct AttentionArguments {
  AttentionArguments(const tw_attention_options* options_or_null, const tw::Stream& stream, const char* name = "options")
      : given(tw::c_api::known(name, options_or_null)),
        alibi_slopes("alibi_slopes", given.alibi_slopes),
        sink("sink", given.sink),
        mask("mask", given.mask),
        lse("lse", given.lse),
        q_descale("q_descale", given.q_descale),
        k_descale("k_descale", given.k_descale),
        v_descale("v_descale", given.v_descale),
        dropout_state("dropout_state", given.dropout_state),
        block_mask("block_mask", given.block_mask),
        block_indices("block_indices", given.block_indices),
        block_counts("block_counts", given.block_counts),
        qv("qv", given.qv) {
    options.scale = given.scale;
    options.causal = given.causal != 0;
    if (given.has_causal_offset != 0) options.causal_offset = given.causal_offset;
    if (given.has_window_left != 0) options.window_left = given.window_left;
    if (given.has_window_right != 0) options.window_right = given.window_right;
    options.attention_chunk = given.attention_chunk;
    options.sm_margin = given.sm_margin;
    options.qv = qv.get();
    options.softcap = given.softcap;
    options.alibi_slopes = alibi_slopes.get();
    options.sink = sink.get();
    options.mask = mask.get();
    options.lse = lse.get();
    options.q_descale = q_descale.get();
    options.k_descale = k_descale.get();
    options.v_descale = v_descale.get();
    options.check_contents = given.check_contents != 0;
    options.dropout = given.dropout;
    options.dropout_seed = given.dropout_seed, options.dropout_offset = given.dropout_offset;
    options.dropout_state = dropout_state.get();
    blocks.mask = block_mask.get(), blocks.indices = block_indices.get(), blocks.counts = block_counts.get();
    if (given.query_block != 0) blocks.query_block = given.query_block;
    if (given.key_block != 0) blocks.key_block = given.key_block;
    const bool given_blocks = blocks.mask || blocks.indices || blocks.counts;
    if (given_blocks) options.blocks = &blocks;
    tw::require(given_blocks || (given.query_block == 0 && given.key_block == 0),
                "query_block is {} and key_block {}, without block_mask or block_indices", given.query_block, given.key_block);
    options.stream = stream;
  }
  AttentionArguments(const AttentionArguments&) = delete;
  AttentionArguments& operator=(const AttentionArguments&) = delete;

  const tw_attention_options given;
  const Given alibi_slopes, sink, mask, lse, q_descale, k_descale, v_descale, dropout_state, block_mask, block_indices, block_counts, qv;
  tw::AttentionBlocks blocks;
  tw::AttentionOptions options;
};

/// Options of tw_moe_route and the tensor that they point to.
struct MoeRouteArguments {
  MoeRouteArguments(const tw_moe_route_options* options_or_null, const char* name)
      : given(tw::c_api::known(name, options_or_null)), bias("bias", given.bias) {
    constexpr std::array kScores = {tw::MoeScore::softmax, tw::MoeScore::sigmoid};
    constexpr std::array kGroupScores = {tw::MoeGroupScore::largest, tw::MoeGroupScore::sum_of_two};
    options.score = value_of(name, ".score is ", given.score, kScores, "tw_moe_score");
    options.bias = bias.get();
    options.groups = given.groups == 0 ? 1 : given.groups;
    options.groups_taken = given.groups_taken == 0 ? 1 : given.groups_taken;
    options.group_score = value_of(name, ".group_score is ", given.group_score, kGroupScores, "tw_moe_group_score");
    options.renormalise = given.renormalise != 0;
    if (given.has_scale != 0) options.scale = given.scale;
  }
  MoeRouteArguments(const MoeRouteArguments&) = delete;
  MoeRouteArguments& operator=(const MoeRouteArguments&) = delete;

  const tw_moe_route_options given;
  const Given bias;
  tw::MoeRouteOptions options;
};

/// Options of tw_moe_experts and the tensors that they point to.
struct MoeExpertsArguments {
  explicit MoeExpertsArguments(const tw_moe_experts_options* options_or_null)
      : given(tw::c_api::known("options", options_or_null)),
        shared_gate_up("shared_gate_up", given.shared_gate_up),
        shared_down("shared_down", given.shared_down),
        addend("addend", given.addend),
        gate_up_scale("gate_up_scale", given.gate_up_scale),
        down_scale("down_scale", given.down_scale),
        shared_gate_up_scale("shared_gate_up_scale", given.shared_gate_up_scale),
        shared_down_scale("shared_down_scale", given.shared_down_scale) {
    options.first_expert = given.first_expert;
    options.shared_gate_up = shared_gate_up.get();
    options.shared_down = shared_down.get();
    options.addend = addend.get();
    options.gate_up_scale = gate_up_scale.get();
    options.down_scale = down_scale.get();
    options.shared_gate_up_scale = shared_gate_up_scale.get();
    options.shared_down_scale = shared_down_scale.get();
  }
  MoeExpertsArguments(const MoeExpertsArguments&) = delete;
  MoeExpertsArguments& operator=(const MoeExpertsArguments&) = delete;

  const tw_moe_experts_options given;
  const Given shared_gate_up, shared_down, addend, gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale;
  tw::MoeExpertsOptions options;
};

}  // namespace

const char* tw_last_error(void) { return tw::c_api::last_error().c_str(); }

const char* tw_version(void) { return TILEWAVE_VERSION; }

tw_status tw_set_gpu_target(const char* target) {
  return guard([&] {
    if (target == nullptr) throw tw::InvalidArgument("target is null; allowed: \"auto\", \"sm_90a\", \"cuda\"");
    tw::set_gpu_target(tw::parse_gpu_target(target));
  });
}
tw_status tw_set_cpu_threads(int32_t threads) {
  return guard([&] { tw::set_cpu_threads(threads); });
}
tw_status tw_add(const tw_tensor* a, const tw_tensor* b, const tw_tensor* y, void* cuda_stream) {
  return guard([&] { of_two(tw::add, "a", a, "b", b, y, cuda_stream); });
}
tw_status tw_mul(const tw_tensor* a, const tw_tensor* b, const tw_tensor* y, void* cuda_stream) {
  return guard([&] { of_two(tw::mul, "a", a, "b", b, y, cuda_stream); });
}
tw_status tw_silu(const tw_tensor* x, const tw_tensor* y, void* cuda_stream) {
  return guard([&] { of_one(tw::silu, x, y, cuda_stream); });
}
tw_status tw_gelu_erf(const tw_tensor* x, const tw_tensor* y, void* cuda_stream) {
  return guard([&] { of_one(tw::gelu_erf, x, y, cuda_stream); });
}
tw_status tw_gelu_tanh(const tw_tensor* x, const tw_tensor* y, void* cuda_stream) {
  return guard([&] { of_one(tw::gelu_tanh, x, y, cuda_stream); });
}
tw_status tw_cast(const tw_tensor* x, const tw_tensor* y, void* cuda_stream) {
  return guard([&] { of_one(tw::cast, x, y, cuda_stream); });
}
tw_status tw_swiglu(const tw_tensor* gate, const tw_tensor* up, const tw_tensor* y, void* cuda_stream) {
  return guard([&] { of_two(tw::swiglu, "gate", gate, "up", up, y, cuda_stream); });
}
tw_status tw_swiglu_interleaved(const tw_tensor* x, const tw_tensor* y, void* cuda_stream) {
  return guard([&] { of_one(tw::swiglu_interleaved, x, y, cuda_stream); });
}
tw_status tw_transpose(const tw_tensor* x, const tw_tensor* y, void* cuda_stream) {
  return guard([&] { of_one(tw::transpose, x, y, cuda_stream); });
}

tw_status tw_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* d, const tw_gemm_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("d", d);
    const auto given = tw::c_api::known("options", options);
    const Given bias("bias", given.bias), residual("residual", given.residual), a_scale("a_scale", given.a_scale),
        b_scale("b_scale", given.b_scale);
    tw::gemm(borrow("a", a), borrow("b", b), out,
             {.alpha = given.has_alpha != 0 ? given.alpha : 1,
              .beta = given.beta,
              .bias = bias.get(),
              .activation = activation_of("options", given.activation),
              .residual = residual.get(),
              .a_scale = a_scale.get(),
              .b_scale = b_scale.get(),
              .stream = stream_of(out, cuda_stream),
              .splits = given.num_splits});
  });
}

tw_status tw_grouped_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* offsets, const tw_tensor* d,
                          const tw_grouped_gemm_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("d", d);
    const auto given = tw::c_api::known("options", options);
    const Given bias("bias", given.bias), a_scale("a_scale", given.a_scale), b_scale("b_scale", given.b_scale);
    tw::grouped_gemm(borrow("a", a), borrow("b", b), borrow("offsets", offsets), out,
                     {.bias = bias.get(),
                      .activation = activation_of("options", given.activation),
                      .a_scale = a_scale.get(),
                      .b_scale = b_scale.get(),
                      .stream = stream_of(out, cuda_stream)});
  });
}
tw_status tw_k_grouped_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* offsets, const tw_tensor* d, int32_t accumulate,
                            void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("d", d);
    tw::k_grouped_gemm(borrow("a", a), borrow("b", b), borrow("offsets", offsets), out,
                       {.accumulate = accumulate != 0, .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_prune_2_4(const tw_tensor* x, const tw_tensor* y, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    tw::prune_2_4(borrow("x", x), out, stream_of(out, cuda_stream));
  });
}
tw_status tw_compress_2_4(const tw_tensor* dense, const tw_tensor* values, const tw_tensor* metadata, const tw_tensor* refused,
                          void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("values", values);
    const Given flag("refused", refused);
    tw::compress_2_4(borrow("dense", dense), {out, borrow("metadata", metadata)},
                     {.refused = flag.get(), .stream = stream_of(out, cuda_stream)});
  });
}
tw_status tw_decompress_2_4(const tw_tensor* values, const tw_tensor* metadata, const tw_tensor* dense, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dense", dense);
    tw::decompress_2_4({borrow("values", values), borrow("metadata", metadata)}, out, stream_of(out, cuda_stream));
  });
}

namespace {

/// Calls f(options) with what a C caller gave.
template <class F>
void with_sparse_options(const tw_sparse_gemm_options* options, const tw::Tensor& out, void* cuda_stream, F f) {
  const auto given = tw::c_api::known("options", options);
  const Given bias("bias", given.bias), residual("residual", given.residual), a_scale("a_scale", given.a_scale),
      b_scale("b_scale", given.b_scale);
  f(tw::SparseGemmOptions{.alpha = given.has_alpha != 0 ? given.alpha : 1,
                          .beta = given.beta,
                          .bias = bias.get(),
                          .activation = activation_of("options", given.activation),
                          .residual = residual.get(),
                          .a_scale = a_scale.get(),
                          .b_scale = b_scale.get(),
                          .stream = stream_of(out, cuda_stream)});
}

}  // namespace

tw_status tw_sparse_gemm(const tw_tensor* values, const tw_tensor* metadata, const tw_tensor* b, const tw_tensor* d,
                         const tw_sparse_gemm_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("d", d);
    with_sparse_options(options, out, cuda_stream, [&](const tw::SparseGemmOptions& o) {
      tw::sparse_gemm({borrow("values", values), borrow("metadata", metadata)}, borrow("b", b), out, o);
    });
  });
}
tw_status tw_sparse_linear(const tw_tensor* x, const tw_tensor* values, const tw_tensor* metadata, const tw_tensor* y,
                           const tw_sparse_gemm_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    with_sparse_options(options, out, cuda_stream, [&](const tw::SparseGemmOptions& o) {
      tw::sparse_linear(borrow("x", x), {borrow("values", values), borrow("metadata", metadata)}, out, o);
    });
  });
}

tw_status tw_block_sparse_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* d, const tw_block_sparse_gemm_options* options,
                               void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("d", d);
    const auto given = tw::c_api::known("options", options);
    const Given a_mask("a_mask", given.a_mask), b_mask("b_mask", given.b_mask), d_mask("d_mask", given.d_mask),
        product_mask("product_mask", given.product_mask), bias("bias", given.bias);
    tw::block_sparse_gemm(borrow("a", a), borrow("b", b), out,
                          {.block = given.block != 0 ? given.block : 128,
                           .a_mask = a_mask.get(),
                           .b_mask = b_mask.get(),
                           .d_mask = d_mask.get(),
                           .product_mask = product_mask.get(),
                           .alpha = given.has_alpha != 0 ? given.alpha : 1,
                           .bias = bias.get(),
                           .activation = activation_of("options", given.activation),
                           .stream = stream_of(out, cuda_stream)});
  });
}

namespace {

/// The weight that three tensors are. dequant_gemm() checks that they fit together; the group follows from the number of scales.
tw::QuantizedMatrix quantized(const tw_tensor* values, const tw_tensor* scales, const tw_tensor* zeros, const char* argument,
                              const tw_weight_format& given) {
  using tw::WeightFormat;
  tw::QuantizedMatrix weight{.values = borrow("values", values), .scales = borrow("scales", scales)};
  const tw::DType dtype = weight.values.dtype();
  if (dtype != tw::DType::i8 && dtype != tw::DType::fp8_e4m3 && dtype != tw::DType::u8)
    throw tw::InvalidArgument(tw::format("values are {}; i8, fp8_e4m3 and u8 (bytes of codes) are supported", weight.values));
  constexpr std::array kFormats = {WeightFormat::plain, WeightFormat::int8, WeightFormat::fp8, WeightFormat::int4,
                                   WeightFormat::int2,  WeightFormat::nf4,  WeightFormat::fp4, WeightFormat::mxfp4};
  weight.format = value_of(argument, "format is ", given, kFormats, "tw_weight_format");
  if (weight.format == WeightFormat::plain)
    weight.format = dtype == tw::DType::i8 ? WeightFormat::int8 : dtype == tw::DType::u8 ? WeightFormat::int4 : WeightFormat::fp8;
  if (zeros != nullptr && weight.format != WeightFormat::int4 && weight.format != WeightFormat::int2)
    throw tw::InvalidArgument("zeros are given, but only int4 and int2 weights have zero points");
  if (zeros != nullptr) weight.zeros = borrow("zeros", zeros);
  if (tw::codes_in_byte(weight.format) > 1 && weight.values.rank() == 2 && weight.scales.rank() == 2 && weight.scales.shape(1) > 0)
    weight.group = static_cast<int>(weight.columns() / weight.scales.shape(1));
  return weight;
}

tw_status quantize_to(const tw_tensor* weight, const tw_weight_format& format, const tw_tensor* values, const tw_tensor* scales,
                      const tw_tensor* zeros) {
  return guard([&] {
    const tw::QuantizedMatrix out = quantized(values, scales, zeros, "", format);
    const bool integers = out.format == tw::WeightFormat::int4 || out.format == tw::WeightFormat::int2;
    const tw::QuantizedMatrix::Layout layout{.format = out.format, .group = integers ? out.group : 32, .zero_points = zeros != nullptr};
    const tw::QuantizedMatrix result = tw::quantize(borrow("weight", weight), layout);
    const auto fits = [](const char* name, const tw::Tensor& to, const tw::Tensor& from) {
      if (to.device() != from.device() || to.dtype() != from.dtype() || to.shape() != from.shape())
        throw tw::InvalidArgument(tw::format("quantize: {} are {}; they must be {}, on the CPU", name, to, from));
    };
    fits("values", out.values, result.values);
    fits("scales", out.scales, result.scales);
    if (zeros != nullptr) fits("zeros", out.zeros, result.zeros);
    out.values.copy_from(result.values);
    out.scales.copy_from(result.scales);
    if (zeros != nullptr) out.zeros.copy_from(result.zeros);
  });
}

}  // namespace

tw_status tw_quantize(const tw_tensor* weight, const tw_tensor* values, const tw_tensor* scales, const tw_tensor* zeros, void*) {
  return quantize_to(weight, TW_WEIGHT_BY_DTYPE, values, scales, zeros);
}
tw_status tw_quantize_to(const tw_tensor* weight, tw_weight_format format, const tw_tensor* values, const tw_tensor* scales,
                         const tw_tensor* zeros, void*) {
  return quantize_to(weight, format, values, scales, zeros);
}

tw_status tw_dequantize(const tw_tensor* values, const tw_tensor* scales, const tw_tensor* zeros, tw_weight_format format,
                        const tw_tensor* out, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor to = borrow("out", out);
    tw::dequantize(quantized(values, scales, zeros, "", format), to, stream_of(to, cuda_stream));
  });
}

tw_status tw_dequant_gemm(const tw_tensor* x, const tw_tensor* values, const tw_tensor* scales, const tw_tensor* zeros, const tw_tensor* y,
                          const tw_dequant_gemm_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const auto given = tw::c_api::known("options", options);
    const Given bias("bias", given.bias);
    const Given x_scales("x_scales", given.x_scales);
    tw::dequant_gemm(borrow("x", x), quantized(values, scales, zeros, "options.", given.format), out,
                     {.accumulate = given.accumulate != 0,
                      .bias = bias.get(),
                      .activation = activation_of("options", given.activation),
                      .stream = stream_of(out, cuda_stream),
                      .x_scales = x_scales.get()});
  });
}

namespace {

tw::TernaryMatrix ternary(const tw_tensor* values, const tw_tensor* scales) { return {borrow("values", values), borrow("scales", scales)}; }

}  // namespace

tw_status tw_quantize_ternary(const tw_tensor* weight, const tw_tensor* values, const tw_tensor* scales, void* cuda_stream) {
  return guard([&] {
    const tw::TernaryMatrix out = ternary(values, scales);
    tw::quantize_ternary(borrow("weight", weight), out, {.stream = stream_of(out.values, cuda_stream)});
  });
}
tw_status tw_unpack_ternary(const tw_tensor* values, const tw_tensor* scales, const tw_tensor* out, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor to = borrow("out", out);
    tw::unpack_ternary(ternary(values, scales), to, {.stream = stream_of(to, cuda_stream)});
  });
}
tw_status tw_convert_bitnet(const tw_tensor* packed, float scale, const tw_tensor* values, const tw_tensor* scales, void*) {
  return guard([&] {
    const tw::TernaryMatrix out = ternary(values, scales), result = tw::convert_bitnet(borrow("packed", packed), scale);
    const auto copy = [](const char* name, const tw::Tensor& to, const tw::Tensor& from) {
      if (to.device() != from.device() || to.dtype() != from.dtype() || to.shape() != from.shape())
        throw tw::InvalidArgument(tw::format("convert_bitnet: {} is {}; it must be {}, on the CPU", name, to, from));
      to.copy_from(from);
    };
    copy("values", out.values, result.values);
    copy("scales", out.scales, result.scales);
  });
}
tw_status tw_quantize_activations(const tw_tensor* x, const tw_tensor* values, const tw_tensor* scales, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor to = borrow("values", values);
    tw::quantize_activations(borrow("x", x), to, borrow("scales", scales), {.stream = stream_of(to, cuda_stream)});
  });
}
tw_status tw_ternary_gemm(const tw_tensor* x, const tw_tensor* x_scales, const tw_tensor* values, const tw_tensor* scales,
                          const tw_tensor* y, const tw_bit_linear_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const auto given = tw::c_api::known("options", options);
    const Given bias("bias", given.bias);
    tw::ternary_gemm(borrow("x", x), borrow("x_scales", x_scales), ternary(values, scales), out,
                     {.accumulate = given.accumulate != 0, .bias = bias.get(), .stream = stream_of(out, cuda_stream)});
  });
}
tw_status tw_bit_linear(const tw_tensor* x, const tw_tensor* values, const tw_tensor* scales, const tw_tensor* y,
                        const tw_bit_linear_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const auto given = tw::c_api::known("options", options);
    const Given bias("bias", given.bias);
    tw::bit_linear(borrow("x", x), ternary(values, scales), out,
                   {.accumulate = given.accumulate != 0, .bias = bias.get(), .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_convert_weight(const tw_tensor* qweight, const tw_tensor* qzeros, const tw_tensor* scales, const tw_tensor* g_idx,
                            tw_weight_layout layout, const tw_tensor* values, const tw_tensor* to_scales, const tw_tensor* to_zeros,
                            void*) {
  return guard([&] {
    constexpr std::array kLayouts = {TW_WEIGHT_LAYOUT_AWQ, TW_WEIGHT_LAYOUT_GPTQ, TW_WEIGHT_LAYOUT_GPTQ_V2,
                                     TW_WEIGHT_LAYOUT_COMPRESSED_TENSORS};
    const tw_weight_layout checked = value_of("layout", " is ", layout, kLayouts, "tw_weight_layout");
    const Given groups("g_idx", g_idx), packed_zeros("qzeros", qzeros);
    const tw::Tensor words = borrow("qweight", qweight), published = borrow("scales", scales);
    tw::QuantizedMatrix result;
    if (checked == TW_WEIGHT_LAYOUT_COMPRESSED_TENSORS)
      result = tw::convert_compressed_tensors(words, published, packed_zeros.get());
    else if (checked == TW_WEIGHT_LAYOUT_AWQ)
      result = tw::convert_awq(words, borrow("qzeros", qzeros), published);
    else
      result = tw::convert_gptq(words, borrow("qzeros", qzeros), published,
                                {.g_idx = groups.get(), .zeros_minus_one = checked == TW_WEIGHT_LAYOUT_GPTQ});
    if (result.zeros.numel() == 0 && to_zeros != nullptr) {
      result.zeros = tw::Tensor::empty(result.scales.shape(), tw::DType::u8);
      std::fill_n(result.zeros.data<tw::u8>(), result.zeros.numel(), tw::u8{8});
    }
    if (result.zeros.numel() > 0 && to_zeros == nullptr)
      throw tw::InvalidArgument("to_zeros is null, but the weight has zero points other than 8");
    const auto copy = [](const char* name, const tw_tensor* to, const tw::Tensor& from) {
      const tw::Tensor target = borrow(name, to);
      if (target.device().is_cuda() || target.dtype() != from.dtype() || target.shape() != from.shape())
        throw tw::InvalidArgument(tw::format("convert_weight: {} are {}; they must be {}, on the CPU", name, target, from));
      target.copy_from(from);
    };
    copy("values", values, result.values);
    copy("to_scales", to_scales, result.scales);
    if (to_zeros != nullptr) copy("to_zeros", to_zeros, result.zeros);
  });
}

tw_status tw_conv1d(const tw_tensor* x, const tw_tensor* w, const tw_tensor* y, const tw_conv_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const auto given = tw::c_api::known("options", options);
    const Given bias("bias", given.bias);
    tw::conv1d(borrow("x", x), borrow("w", w), out,
               {.stride = one_if_0(given.stride[0]),
                .padding = given.padding[0],
                .dilation = one_if_0(given.dilation[0]),
                .bias = bias.get(),
                .activation = activation_of("options", given.activation),
                .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_conv2d(const tw_tensor* x, const tw_tensor* w, const tw_tensor* y, const tw_conv_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const auto given = tw::c_api::known("options", options);
    const Given bias("bias", given.bias);
    tw::conv2d(borrow("x", x), borrow("w", w), out,
               {.stride = {one_if_0(given.stride[0]), one_if_0(given.stride[1])},
                .padding = {given.padding[0], given.padding[1]},
                .dilation = {one_if_0(given.dilation[0]), one_if_0(given.dilation[1])},
                .bias = bias.get(),
                .activation = activation_of("options", given.activation),
                .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_layer_norm(const tw_tensor* x, const tw_tensor* y, const tw_norm_options* options, void* cuda_stream) {
  return guard([&] { norm(tw::layer_norm, x, y, options, cuda_stream); });
}
tw_status tw_rms_norm(const tw_tensor* x, const tw_tensor* y, const tw_norm_options* options, void* cuda_stream) {
  return guard([&] { norm(tw::rms_norm, x, y, options, cuda_stream); });
}

tw_status tw_softmax(const tw_tensor* x, const tw_tensor* y, float scale, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    tw::softmax(borrow("x", x), out, {.scale = scale, .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_hadamard(const tw_tensor* x, const tw_tensor* y, const tw_tensor* factors, float scale, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const Given given_factors("factors", factors);
    tw::hadamard(borrow("x", x), out, {.scale = scale, .factors = given_factors.get(), .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_rope_table(const tw_tensor* cos, const tw_tensor* sin, double theta, int64_t offset, const tw_tensor* positions,
                        void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("cos", cos);
    const Given given_positions("positions", positions);
    tw::rope_table(out, borrow("sin", sin),
                   {.theta = theta, .offset = offset, .positions = given_positions.get(), .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_rope(const tw_tensor* x, const tw_tensor* cos, const tw_tensor* sin, const tw_tensor* y, const tw_rope_options* options,
                  void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const auto given = tw::c_api::known("options", options);
    const Given offsets("offsets", given.offsets), positions("positions", given.positions);
    tw::rope(borrow("x", x), borrow("cos", cos), borrow("sin", sin), out,
             {.pairing = given.interleaved != 0 ? tw::RopePairing::interleaved : tw::RopePairing::half_split,
              .offset = given.offset,
              .offsets = offsets.get(),
              .positions = positions.get(),
              .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_causal_conv1d(const tw_tensor* x, const tw_tensor* weight, const tw_tensor* y, const tw_causal_conv1d_options* options,
                           void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const auto given = tw::c_api::known("options", options);
    const Given bias("bias", given.bias), initial_state("initial_state", given.initial_state),
        final_state("final_state", given.final_state), cu_seqlens("cu_seqlens", given.cu_seqlens);
    tw::causal_conv1d(borrow("x", x), borrow("weight", weight), out,
                      {.bias = bias.get(),
                       .initial_state = initial_state.get(),
                       .final_state = final_state.get(),
                       .cu_seqlens = cu_seqlens.get(),
                       .silu = given.silu != 0,
                       .stream = stream_of(out, cuda_stream)});
  });
}
tw_status tw_causal_conv1d_update(const tw_tensor* x, const tw_tensor* state, const tw_tensor* weight, const tw_tensor* bias,
                                  const tw_tensor* y, int32_t silu, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const Given given_bias("bias", bias);
    tw::causal_conv1d_update(borrow("x", x), borrow("state", state), borrow("weight", weight), out,
                             {.bias = given_bias.get(), .silu = silu != 0, .stream = stream_of(out, cuda_stream)});
  });
}
tw_status tw_causal_conv1d_backward(const tw_tensor* dy, const tw_tensor* x, const tw_tensor* weight, const tw_tensor* d_final_state,
                                    const tw_tensor* dx, const tw_tensor* d_weight, const tw_tensor* d_bias,
                                    const tw_tensor* d_initial_state, const tw_causal_conv1d_options* forward, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dx", dx);
    const auto given = tw::c_api::known("forward", forward);
    const Given bias("bias", given.bias), initial_state("initial_state", given.initial_state), cu_seqlens("cu_seqlens", given.cu_seqlens);
    const Given of_final("d_final_state", d_final_state), of_weight("d_weight", d_weight), of_bias("d_bias", d_bias),
        of_initial("d_initial_state", d_initial_state);
    tw::causal_conv1d_backward(borrow("dy", dy), borrow("x", x), borrow("weight", weight), out,
                               {.bias = bias.get(),
                                .initial_state = initial_state.get(),
                                .cu_seqlens = cu_seqlens.get(),
                                .silu = given.silu != 0,
                                .d_final_state = of_final.get(),
                                .d_weight = of_weight.get(),
                                .d_bias = of_bias.get(),
                                .d_initial_state = of_initial.get(),
                                .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_gated_delta_rule(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* beta, const tw_tensor* o,
                              const tw_gated_delta_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const auto given = tw::c_api::known("options", options);
    const Given g("g", given.g), initial_state("initial_state", given.initial_state), final_state("final_state", given.final_state),
        cu_seqlens("cu_seqlens", given.cu_seqlens);
    tw::GatedDeltaOptions chosen{.g = g.get(),
                                 .normalise_qk = given.normalise_qk != 0,
                                 .initial_state = initial_state.get(),
                                 .final_state = final_state.get(),
                                 .cu_seqlens = cu_seqlens.get(),
                                 .stream = stream_of(out, cuda_stream)};
    if (given.has_scale != 0) chosen.scale = given.scale;
    tw::gated_delta_rule(borrow("q", q), borrow("k", k), borrow("v", v), borrow("beta", beta), out, chosen);
  });
}
tw_status tw_gated_delta_rule_step(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* beta,
                                   const tw_tensor* state, const tw_tensor* o, const tw_gated_delta_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const auto given = tw::c_api::known("options", options);
    if (given.initial_state != nullptr || given.final_state != nullptr || given.cu_seqlens != nullptr)
      throw tw::InvalidArgument("gated_delta_rule_step: options have initial_state, final_state or cu_seqlens; they must be null");
    const Given g("g", given.g);
    tw::GatedDeltaStepOptions chosen{
        .g = g.get(), .scale = {}, .normalise_qk = given.normalise_qk != 0, .stream = stream_of(out, cuda_stream)};
    if (given.has_scale != 0) chosen.scale = given.scale;
    tw::gated_delta_rule_step(borrow("q", q), borrow("k", k), borrow("v", v), borrow("beta", beta), borrow("state", state), out, chosen);
  });
}

tw_status tw_gated_delta_rule_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* beta,
                                       const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dk, const tw_tensor* dv,
                                       const tw_tensor* d_beta, const tw_gated_delta_backward_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dq", dq);
    const auto given = tw::c_api::known("options", options);
    const Given g("g", given.g), initial("initial_state", given.initial_state), cu_seqlens("cu_seqlens", given.cu_seqlens),
        d_final("d_final_state", given.d_final_state), dg("dg", given.dg), d_initial("d_initial_state", given.d_initial_state);
    tw::GatedDeltaBackwardOptions chosen{.g = g.get(),
                                         .normalise_qk = given.normalise_qk != 0,
                                         .initial_state = initial.get(),
                                         .cu_seqlens = cu_seqlens.get(),
                                         .d_final_state = d_final.get(),
                                         .dg = dg.get(),
                                         .d_initial_state = d_initial.get(),
                                         .stream = stream_of(out, cuda_stream)};
    if (given.has_scale != 0) chosen.scale = given.scale;
    tw::gated_delta_rule_backward(borrow("q", q), borrow("k", k), borrow("v", v), borrow("beta", beta), borrow("d_o", d_o), out,
                                  borrow("dk", dk), borrow("dv", dv), borrow("d_beta", d_beta), chosen);
  });
}

tw_status tw_reduce(tw_reduction reduction, const tw_tensor* x, const tw_tensor* y, int32_t dim, void* cuda_stream) {
  return guard([&] {
    using tw::Reduction;
    constexpr std::array kReductions = {Reduction::sum, Reduction::mean, Reduction::max, Reduction::min, Reduction::abs_max};
    const tw::Tensor out = borrow("y", y);
    tw::reduce(value_of("reduction", " is ", reduction, kReductions, "tw_reduction"), borrow("x", x), out,
               {.dim = dim, .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_embedding(const tw_tensor* table, const tw_tensor* ids, const tw_tensor* y, float scale, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    tw::embedding(borrow("table", table), borrow("ids", ids), out, {.scale = scale, .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_argmax(const tw_tensor* x, const tw_tensor* indices, const tw_tensor* values, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("indices", indices);
    const Given given_values("values", values);
    tw::argmax(borrow("x", x), out, {.values = given_values.get(), .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_topk(const tw_tensor* x, int32_t k, const tw_tensor* values, const tw_tensor* indices, const tw_topk_options* options,
                  void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("values", values);
    const auto given = tw::c_api::known("options", options);
    const Given starts("starts", given.starts), ends("ends", given.ends);
    tw::topk(borrow("x", x), k, out, borrow("indices", indices),
             {.largest = given.smallest == 0,
              .sorted = given.unsorted == 0,
              .starts = starts.get(),
              .ends = ends.get(),
              .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_moe_route(const tw_tensor* logits, const tw_tensor* weights, const tw_tensor* experts, const tw_moe_route_options* options,
                       void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("weights", weights);
    MoeRouteArguments arguments(options, "options");
    arguments.options.stream = stream_of(out, cuda_stream);
    tw::moe_route(borrow("logits", logits), out, borrow("experts", experts), arguments.options);
  });
}

tw_status tw_moe_permutation(const tw_tensor* experts, int32_t n_experts, int32_t first_expert, const tw_tensor* offsets,
                             const tw_tensor* rows, const tw_tensor* places, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("offsets", offsets);
    tw::moe_permutation(borrow("experts", experts), n_experts, out, borrow("rows", rows), borrow("places", places),
                        {.first_expert = first_expert, .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_moe_dispatch(const tw_tensor* x, const tw_tensor* places, const tw_tensor* y, const tw_tensor* scales, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const Given given_scales("scales", scales);
    tw::moe_dispatch(borrow("x", x), borrow("places", places), out, {.scales = given_scales.get(), .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_moe_combine(const tw_tensor* y, const tw_tensor* places, const tw_tensor* weights, const tw_tensor* addend,
                         const tw_tensor* out, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor result = borrow("out", out);
    const Given given_addend("addend", addend);
    tw::moe_combine(borrow("y", y), borrow("places", places), borrow("weights", weights), result,
                    {.addend = given_addend.get(), .stream = stream_of(result, cuda_stream)});
  });
}

tw_status tw_moe_experts(const tw_tensor* x, const tw_tensor* weights, const tw_tensor* experts, const tw_tensor* w_gate_up,
                         const tw_tensor* w_down, const tw_tensor* out, const tw_moe_experts_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor result = borrow("out", out);
    MoeExpertsArguments arguments(options);
    arguments.options.stream = stream_of(result, cuda_stream);
    tw::moe_experts(borrow("x", x), borrow("weights", weights), borrow("experts", experts), borrow("w_gate_up", w_gate_up),
                    borrow("w_down", w_down), result, arguments.options);
  });
}

tw_status tw_fused_moe(const tw_tensor* x, const tw_tensor* logits, int32_t k, const tw_tensor* w_gate_up, const tw_tensor* w_down,
                       const tw_tensor* out, const tw_moe_route_options* route, const tw_moe_experts_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor result = borrow("out", out);
    const MoeRouteArguments given_route(route, "route");
    const MoeExpertsArguments given(options);
    tw::fused_moe(borrow("x", x), borrow("logits", logits), k, borrow("w_gate_up", w_gate_up), borrow("w_down", w_down), result,
                  {.route = given_route.options, .experts = given.options, .stream = stream_of(result, cuda_stream)});
  });
}

tw_status tw_cast_fp8(const tw_tensor* x, const tw_tensor* y, const tw_tensor* scales, int32_t powers_of_two, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    tw::cast_fp8(borrow("x", x), out, borrow("scales", scales), fp8_options(powers_of_two, out, cuda_stream));
  });
}
tw_status tw_cast_fp8_swiglu(const tw_tensor* gate, const tw_tensor* up, const tw_tensor* y, const tw_tensor* scales, int32_t powers_of_two,
                             void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    tw::cast_fp8_swiglu(borrow("gate", gate), borrow("up", up), out, borrow("scales", scales),
                        fp8_options(powers_of_two, out, cuda_stream));
  });
}
tw_status tw_cast_fp8_blocks(const tw_tensor* x, const tw_tensor* y, const tw_tensor* scales, int32_t powers_of_two, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    tw::cast_fp8_blocks(borrow("x", x), out, borrow("scales", scales), fp8_options(powers_of_two, out, cuda_stream));
  });
}
tw_status tw_cast_fp8_heads(const tw_tensor* x, const tw_tensor* y, const tw_tensor* scales, int32_t rotate, const tw_tensor* signs,
                            void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const Given given_signs("signs", signs);
    tw::cast_fp8_heads(borrow("x", x), out, borrow("scales", scales),
                       {.rotate = rotate != 0, .signs = given_signs.get(), .stream = stream_of(out, cuda_stream)});
  });
}
tw_status tw_head_scales(const tw_tensor* x, const tw_tensor* scales, int32_t rotate, const tw_tensor* signs, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("scales", scales);
    const Given given_signs("signs", signs);
    tw::head_scales(borrow("x", x), out, {.rotate = rotate != 0, .signs = given_signs.get(), .stream = stream_of(out, cuda_stream)});
  });
}
tw_status tw_cast_fp8_grouped(const tw_tensor* x, const tw_tensor* sizes, const tw_tensor* y, const tw_tensor* scales,
                              int32_t powers_of_two, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    tw::cast_fp8_grouped(borrow("x", x), borrow("sizes", sizes), out, borrow("scales", scales),
                         fp8_options(powers_of_two, out, cuda_stream));
  });
}

tw_status tw_attention(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_attention_options* options,
                       void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const AttentionArguments arguments(options, stream_of(out, cuda_stream));
    tw::attention(borrow("q", q), borrow("k", k), borrow("v", v), out, arguments.options);
  });
}

tw_status tw_attention_dropout_mask(const tw_tensor* mask, const tw_attention_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("mask", mask);
    tw::attention_dropout_mask(out, AttentionArguments(options, stream_of(out, cuda_stream)).options);
  });
}
tw_status tw_attention_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* lse,
                                const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dk, const tw_tensor* dv,
                                const tw_attention_backward_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dq", dq);
    const auto given = tw::c_api::known("options", options);
    const AttentionArguments forward(given.forward, stream_of(out, cuda_stream), "options.forward");
    const Given d_sink("d_sink", given.d_sink), d_mask("d_mask", given.d_mask);
    tw::attention_backward(
        borrow("q", q), borrow("k", k), borrow("v", v), borrow("o", o), borrow("lse", lse), borrow("d_o", d_o), out, borrow("dk", dk),
        borrow("dv", dv),
        {.forward = forward.options, .d_sink = d_sink.get(), .d_mask = d_mask.get(), .deterministic = given.deterministic != 0});
  });
}

namespace {

std::optional<float> scale_of(const auto& given) { return given.has_scale != 0 ? std::optional(given.scale) : std::nullopt; }

}  // namespace

tw_status tw_linear_attention(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o,
                              const tw_linear_attention_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const auto given = tw::c_api::known("options", options);
    const Given g("g", given.g), initial("initial_state", given.initial_state), final("final_state", given.final_state),
        cu_seqlens("cu_seqlens", given.cu_seqlens);
    tw::linear_attention(borrow("q", q), borrow("k", k), borrow("v", v), out,
                         {.scale = scale_of(given),
                          .g = g.get(),
                          .initial_state = initial.get(),
                          .final_state = final.get(),
                          .cu_seqlens = cu_seqlens.get(),
                          .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_linear_attention_step(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* state,
                                   const tw_linear_attention_step_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const auto given = tw::c_api::known("options", options);
    const Given g("g", given.g);
    tw::linear_attention_step(borrow("q", q), borrow("k", k), borrow("v", v), out, borrow("state", state),
                              {.scale = scale_of(given), .g = g.get(), .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_linear_attention_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* d_o,
                                       const tw_tensor* dq, const tw_tensor* dk, const tw_tensor* dv,
                                       const tw_linear_attention_backward_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dq", dq);
    const auto given = tw::c_api::known("options", options);
    const Given g("g", given.g), initial("initial_state", given.initial_state), cu_seqlens("cu_seqlens", given.cu_seqlens),
        d_final("d_final_state", given.d_final_state), dg("dg", given.dg), d_initial("d_initial_state", given.d_initial_state);
    tw::linear_attention_backward(borrow("q", q), borrow("k", k), borrow("v", v), borrow("d_o", d_o), out, borrow("dk", dk),
                                  borrow("dv", dv),
                                  {.scale = scale_of(given),
                                   .g = g.get(),
                                   .initial_state = initial.get(),
                                   .cu_seqlens = cu_seqlens.get(),
                                   .d_final_state = d_final.get(),
                                   .dg = dg.get(),
                                   .d_initial_state = d_initial.get(),
                                   .stream = stream_of(out, cuda_stream)});
  });
}

namespace {

/// What the options of all functions of Mamba-2 begin with. Lives until the call ends.
template <class Options>
class Mamba2Arguments {
 public:
  Mamba2Arguments(const auto& given, const tw::Stream& stream) : d_("d", given.d), z_("z", given.z), dt_bias_("dt_bias", given.dt_bias) {
    options.d = d_.get();
    options.z = z_.get();
    options.dt_bias = dt_bias_.get();
    options.dt_softplus = given.dt_softplus != 0;
    if (given.has_dt_limit != 0) options.dt_min = given.dt_min, options.dt_max = given.dt_max;
    options.stream = stream;
  }
  Options options;

 private:
  Given d_, z_, dt_bias_;
};

}  // namespace

tw_status tw_mamba2(const tw_tensor* x, const tw_tensor* dt, const tw_tensor* a, const tw_tensor* b, const tw_tensor* c, const tw_tensor* y,
                    const tw_mamba2_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const auto given = tw::c_api::known("options", options);
    Mamba2Arguments<tw::Mamba2Options> arguments(given, stream_of(out, cuda_stream));
    const Given initial("initial_states", given.initial_states), final("final_states", given.final_states),
        cu_seqlens("cu_seqlens", given.cu_seqlens), seq_idx("seq_idx", given.seq_idx);
    arguments.options.initial_states = initial.get();
    arguments.options.final_states = final.get();
    arguments.options.cu_seqlens = cu_seqlens.get();
    arguments.options.seq_idx = seq_idx.get();
    tw::mamba2(borrow("x", x), borrow("dt", dt), borrow("a", a), borrow("b", b), borrow("c", c), out, arguments.options);
  });
}

tw_status tw_mamba2_step(const tw_tensor* x, const tw_tensor* dt, const tw_tensor* a, const tw_tensor* b, const tw_tensor* c,
                         const tw_tensor* states, const tw_tensor* y, const tw_mamba2_step_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const auto given = tw::c_api::known("options", options);
    Mamba2Arguments<tw::Mamba2StepOptions> arguments(given, stream_of(out, cuda_stream));
    const Given indices("state_indices", given.state_indices);
    arguments.options.state_indices = indices.get();
    tw::mamba2_step(borrow("x", x), borrow("dt", dt), borrow("a", a), borrow("b", b), borrow("c", c), borrow("states", states), out,
                    arguments.options);
  });
}

tw_status tw_mamba2_backward(const tw_tensor* x, const tw_tensor* dt, const tw_tensor* a, const tw_tensor* b, const tw_tensor* c,
                             const tw_tensor* dy, const tw_tensor* dx, const tw_tensor* d_dt, const tw_tensor* db, const tw_tensor* dc,
                             const tw_mamba2_backward_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dx", dx);
    const auto given = tw::c_api::known("options", options);
    Mamba2Arguments<tw::Mamba2BackwardOptions> arguments(given, stream_of(out, cuda_stream));
    const Given initial("initial_states", given.initial_states), cu_seqlens("cu_seqlens", given.cu_seqlens),
        seq_idx("seq_idx", given.seq_idx), d_final("d_final_states", given.d_final_states), da("da", given.da), dd("dd", given.dd),
        dz("dz", given.dz), d_dt_bias("d_dt_bias", given.d_dt_bias), d_initial("d_initial_states", given.d_initial_states);
    tw::Mamba2BackwardOptions& chosen = arguments.options;
    chosen.initial_states = initial.get();
    chosen.cu_seqlens = cu_seqlens.get();
    chosen.seq_idx = seq_idx.get();
    chosen.d_final_states = d_final.get();
    chosen.da = da.get();
    chosen.dd = dd.get();
    chosen.dz = dz.get();
    chosen.d_dt_bias = d_dt_bias.get();
    chosen.d_initial_states = d_initial.get();
    tw::mamba2_backward(borrow("x", x), borrow("dt", dt), borrow("a", a), borrow("b", b), borrow("c", c), borrow("dy", dy), out,
                        borrow("d_dt", d_dt), borrow("db", db), borrow("dc", dc), chosen);
  });
}

namespace {

/// A tensor [batch * chunks, ...] as [batch, chunks, ...]: a tw_tensor has four dimensions.
tw::Tensor by_chunk(const char* argument, const tw_tensor* given, std::int64_t batch, std::int64_t chunks) {
  const tw::Tensor t = borrow(argument, given);
  tw::require(t.rank() == 4 && t.shape(0) == batch * chunks, "{} is {}; it must have 4 dimensions, the first of {} batches times {} chunks",
              argument, t, batch, chunks);
  tw::Shape shape(t.shape()), strides(t.strides());
  shape[0] = chunks;
  shape.insert(shape.begin(), batch);
  strides.insert(strides.begin(), chunks * strides[0]);
  return tw::Tensor::borrow(t.data(), shape, t.dtype(), t.device(), strides);
}
/// An extent, counted from the last one; 0 if there is none.
std::int64_t extent_from_end(const tw::Tensor& t, int n) { return t.rank() > n ? t.shape(t.rank() - 1 - n) : 0; }
/// Products of a chunk's steps, whose chunk size says how many chunks the steps of C are.
tw::Tensor products_by_chunk(const char* argument, const tw_tensor* given, const tw::Tensor& c) {
  const std::int64_t chunk_size = std::max<std::int64_t>(extent_from_end(borrow(argument, given), 0), 1);
  return by_chunk(argument, given, extent_from_end(c, 3), (extent_from_end(c, 2) + chunk_size - 1) / chunk_size);
}

}  // namespace

tw_status tw_mamba2_chunk_cumsum(const tw_tensor* dt, const tw_tensor* a, const tw_tensor* da_cumsum, const tw_tensor* dt_out,
                                 const tw_mamba2_chunk_cumsum_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("da_cumsum", da_cumsum);
    const auto given = tw::c_api::known("options", options);
    const Given bias("dt_bias", given.dt_bias), seq_idx("seq_idx", given.seq_idx);
    tw::Mamba2ChunkCumsumOptions chosen{
        .dt_bias = bias.get(), .dt_softplus = given.dt_softplus != 0, .seq_idx = seq_idx.get(), .stream = stream_of(out, cuda_stream)};
    if (given.has_dt_limit != 0) chosen.dt_min = given.dt_min, chosen.dt_max = given.dt_max;
    tw::mamba2_chunk_cumsum(borrow("dt", dt), borrow("a", a), out, borrow("dt_out", dt_out), chosen);
  });
}

tw_status tw_mamba2_chunk_state(const tw_tensor* b, const tw_tensor* x, const tw_tensor* dt, const tw_tensor* da_cumsum,
                                const tw_tensor* states, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor inputs = borrow("x", x), sums = borrow("da_cumsum", da_cumsum);
    const tw::Tensor out = by_chunk("states", states, extent_from_end(inputs, 3), extent_from_end(sums, 1));
    tw::mamba2_chunk_state(borrow("b", b), inputs, borrow("dt", dt), sums, out, stream_of(out, cuda_stream));
  });
}

tw_status tw_mamba2_state_passing(const tw_tensor* states, const tw_tensor* da_chunk_cumsum, const tw_tensor* passed,
                                  const tw_tensor* initial_states, const tw_tensor* final_states, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor sums = borrow("da_chunk_cumsum", da_chunk_cumsum);
    const auto of_chunks = [&](const char* argument, const tw_tensor* t) {
      return by_chunk(argument, t, extent_from_end(sums, 2), extent_from_end(sums, 0));
    };
    const tw::Tensor out = of_chunks("passed", passed);
    const Given initial("initial_states", initial_states), final("final_states", final_states);
    tw::mamba2_state_passing(of_chunks("states", states), sums, out,
                             {.initial_states = initial.get(), .final_states = final.get(), .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_mamba2_bmm_chunk(const tw_tensor* c, const tw_tensor* b, const tw_tensor* cb, int32_t causal, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor rows = borrow("c", c), out = products_by_chunk("cb", cb, rows);
    tw::mamba2_bmm_chunk(rows, borrow("b", b), out, {.causal = causal != 0, .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_mamba2_chunk_scan(const tw_tensor* cb, const tw_tensor* x, const tw_tensor* dt, const tw_tensor* da_cumsum, const tw_tensor* c,
                               const tw_tensor* states, const tw_tensor* y, const tw_mamba2_chunk_scan_options* options,
                               void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("y", y);
    const auto given = tw::c_api::known("options", options);
    const Given d("d", given.d), z("z", given.z), ungated("ungated", given.ungated);
    const tw::Tensor sums = borrow("da_cumsum", da_cumsum);
    const auto of_chunks = [&](const char* argument, const tw_tensor* t) {
      return by_chunk(argument, t, extent_from_end(out, 3), extent_from_end(sums, 1));
    };
    tw::mamba2_chunk_scan(of_chunks("cb", cb), borrow("x", x), borrow("dt", dt), sums, borrow("c", c), of_chunks("states", states), out,
                          {.d = d.get(), .z = z.get(), .ungated = ungated.get(), .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_mamba2_chunk_cumsum_backward(const tw_tensor* dt, const tw_tensor* a, const tw_tensor* d_da_cumsum, const tw_tensor* d_dt_out,
                                          const tw_tensor* d_dt, const tw_mamba2_chunk_cumsum_backward_options* options,
                                          void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("d_dt", d_dt);
    const auto given = tw::c_api::known("options", options);
    const Given bias("dt_bias", given.dt_bias), seq_idx("seq_idx", given.seq_idx), da("da", given.da), d_bias("d_dt_bias", given.d_dt_bias);
    tw::Mamba2ChunkCumsumBackwardOptions chosen{.dt_bias = bias.get(),
                                                .dt_softplus = given.dt_softplus != 0,
                                                .seq_idx = seq_idx.get(),
                                                .da = da.get(),
                                                .d_dt_bias = d_bias.get(),
                                                .stream = stream_of(out, cuda_stream)};
    if (given.has_dt_limit != 0) chosen.dt_min = given.dt_min, chosen.dt_max = given.dt_max;
    tw::mamba2_chunk_cumsum_backward(borrow("dt", dt), borrow("a", a), borrow("d_da_cumsum", d_da_cumsum), borrow("d_dt_out", d_dt_out),
                                     out, chosen);
  });
}

tw_status tw_mamba2_chunk_state_backward(const tw_tensor* b, const tw_tensor* x, const tw_tensor* dt, const tw_tensor* da_cumsum,
                                         const tw_tensor* d_states, const tw_tensor* db, const tw_tensor* dx, const tw_tensor* d_dt,
                                         const tw_tensor* d_da_cumsum, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dx", dx), sums = borrow("da_cumsum", da_cumsum);
    tw::mamba2_chunk_state_backward(borrow("b", b), borrow("x", x), borrow("dt", dt), sums,
                                    by_chunk("d_states", d_states, extent_from_end(out, 3), extent_from_end(sums, 1)), borrow("db", db),
                                    out, borrow("d_dt", d_dt), borrow("d_da_cumsum", d_da_cumsum), stream_of(out, cuda_stream));
  });
}

tw_status tw_mamba2_state_passing_backward(const tw_tensor* passed, const tw_tensor* da_chunk_cumsum, const tw_tensor* d_passed,
                                           const tw_tensor* d_states, const tw_tensor* d_da_chunk_cumsum, const tw_tensor* d_final_states,
                                           const tw_tensor* d_initial_states, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor sums = borrow("da_chunk_cumsum", da_chunk_cumsum);
    const auto of_chunks = [&](const char* argument, const tw_tensor* t) {
      return by_chunk(argument, t, extent_from_end(sums, 2), extent_from_end(sums, 0));
    };
    const tw::Tensor out = of_chunks("d_states", d_states);
    const Given d_final("d_final_states", d_final_states), d_initial("d_initial_states", d_initial_states);
    tw::mamba2_state_passing_backward(
        of_chunks("passed", passed), sums, of_chunks("d_passed", d_passed), out, borrow("d_da_chunk_cumsum", d_da_chunk_cumsum),
        {.d_final_states = d_final.get(), .d_initial_states = d_initial.get(), .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_mamba2_bmm_chunk_backward(const tw_tensor* c, const tw_tensor* b, const tw_tensor* d_cb, const tw_tensor* dc,
                                       const tw_tensor* db, int32_t causal, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor rows = borrow("c", c), out = borrow("dc", dc);
    tw::mamba2_bmm_chunk_backward(rows, borrow("b", b), products_by_chunk("d_cb", d_cb, rows), out, borrow("db", db),
                                  {.causal = causal != 0, .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_mamba2_chunk_scan_backward(const tw_tensor* cb, const tw_tensor* x, const tw_tensor* dt, const tw_tensor* da_cumsum,
                                        const tw_tensor* c, const tw_tensor* states, const tw_tensor* dy, const tw_tensor* d_cb,
                                        const tw_tensor* dx, const tw_tensor* d_dt, const tw_tensor* d_da_cumsum, const tw_tensor* dc,
                                        const tw_tensor* d_states, const tw_mamba2_chunk_scan_backward_options* options,
                                        void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dx", dx);
    const auto given = tw::c_api::known("options", options);
    const Given d("d", given.d), z("z", given.z), ungated("ungated", given.ungated), dd("dd", given.dd), dz("dz", given.dz);
    const tw::Tensor sums = borrow("da_cumsum", da_cumsum);
    const auto of_chunks = [&](const char* argument, const tw_tensor* t) {
      return by_chunk(argument, t, extent_from_end(out, 3), extent_from_end(sums, 1));
    };
    tw::mamba2_chunk_scan_backward(
        of_chunks("cb", cb), borrow("x", x), borrow("dt", dt), sums, borrow("c", c), of_chunks("states", states), borrow("dy", dy),
        of_chunks("d_cb", d_cb), out, borrow("d_dt", d_dt), borrow("d_da_cumsum", d_da_cumsum), borrow("dc", dc),
        of_chunks("d_states", d_states),
        {.d = d.get(), .z = z.get(), .ungated = ungated.get(), .dd = dd.get(), .dz = dz.get(), .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_attention_varlen(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* cu_seqlens_q,
                              const tw_tensor* cu_seqlens_k, const tw_tensor* seqused_q, const tw_tensor* seqused_k,
                              const tw_attention_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const AttentionArguments arguments(options, stream_of(out, cuda_stream));
    const Given used_q("seqused_q", seqused_q), used_k("seqused_k", seqused_k);
    tw::attention_varlen(borrow("q", q), borrow("k", k), borrow("v", v), out,
                         {borrow("cu_seqlens_q", cu_seqlens_q), borrow("cu_seqlens_k", cu_seqlens_k), used_q.get(), used_k.get()},
                         arguments.options);
  });
}

tw_status tw_attention_varlen_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* lse,
                                       const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dk, const tw_tensor* dv,
                                       const tw_tensor* cu_seqlens_q, const tw_tensor* cu_seqlens_k, const tw_tensor* seqused_q,
                                       const tw_tensor* seqused_k, const tw_attention_backward_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dq", dq);
    const auto given = tw::c_api::known("options", options);
    const AttentionArguments forward(given.forward, stream_of(out, cuda_stream), "options.forward");
    const Given d_sink("d_sink", given.d_sink), d_mask("d_mask", given.d_mask), used_q("seqused_q", seqused_q),
        used_k("seqused_k", seqused_k);
    tw::attention_varlen_backward(
        borrow("q", q), borrow("k", k), borrow("v", v), borrow("o", o), borrow("lse", lse), borrow("d_o", d_o), out, borrow("dk", dk),
        borrow("dv", dv), {borrow("cu_seqlens_q", cu_seqlens_q), borrow("cu_seqlens_k", cu_seqlens_k), used_q.get(), used_k.get()},
        {.forward = forward.options, .d_sink = d_sink.get(), .d_mask = d_mask.get(), .deterministic = given.deterministic != 0});
  });
}

tw_status tw_attention_decode(const tw_tensor* q, const tw_tensor* k_cache, const tw_tensor* v_cache, const tw_tensor* o,
                              const tw_cache_options* cache, const tw_attention_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const AttentionArguments arguments(options, stream_of(out, cuda_stream));
    const auto given = tw::c_api::known("cache", cache);
    const Given seqlens("seqlens", given.seqlens), batch_idx("batch_idx", given.batch_idx), leftpad("leftpad", given.leftpad),
        block_table("block_table", given.block_table), new_k("new_k", given.new_k), new_v("new_v", given.new_v),
        rotary_cos("rotary_cos", given.rotary_cos), rotary_sin("rotary_sin", given.rotary_sin),
        cu_seqlens_q("cu_seqlens_q", given.cu_seqlens_q), cu_seqlens_new("cu_seqlens_new", given.cu_seqlens_new);
    tw::attention_decode(borrow("q", q), borrow("k_cache", k_cache), borrow("v_cache", v_cache), out,
                         {.seqlens = seqlens.get(),
                          .batch_idx = batch_idx.get(),
                          .leftpad = leftpad.get(),
                          .block_table = block_table.get(),
                          .cu_seqlens_q = cu_seqlens_q.get(),
                          .cu_seqlens_new = cu_seqlens_new.get(),
                          .new_k = new_k.get(),
                          .new_v = new_v.get(),
                          .rotary_cos = rotary_cos.get(),
                          .rotary_sin = rotary_sin.get(),
                          .rotary_pairing = given.rotary_interleaved != 0 ? tw::RopePairing::interleaved : tw::RopePairing::half_split,
                          .num_splits = given.num_splits},
                         arguments.options);
  });
}

tw_status tw_decode_plan(const tw_decode_problem* problem, int32_t* num_splits) {
  return guard([&] {
    tw::require(problem != nullptr, "problem is null");
    tw::require(num_splits != nullptr, "num_splits is null");
    const auto given = tw::c_api::known("problem", problem);
    *num_splits = tw::decode_plan({.batch = given.batch,
                                   .seqlen_q = given.seqlen_q,
                                   .heads = given.heads,
                                   .kv_heads = given.kv_heads,
                                   .seqlen_k = given.seqlen_k,
                                   .attention_chunk = given.attention_chunk,
                                   .sm_margin = given.sm_margin},
                                  given.cuda_device < 0 ? tw::Device::cpu() : tw::Device::cuda(given.cuda_device));
  });
}

tw_status tw_mla_decode(const tw_tensor* q, const tw_tensor* kv_cache, const tw_tensor* o, const tw_mla_options* options,
                        void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const auto given = tw::c_api::known("options", options);
    const Given seqlens("seqlens", given.seqlens), block_table("block_table", given.block_table), lse("lse", given.lse);
    tw::mla_decode(borrow("q", q), borrow("kv_cache", kv_cache), out,
                   {.seqlens = seqlens.get(),
                    .block_table = block_table.get(),
                    .scale = given.scale,
                    .causal = given.not_causal == 0,
                    .lse = lse.get(),
                    .max_seqlen = given.max_seqlen,
                    .num_splits = given.num_splits,
                    .check_contents = given.check_contents != 0,
                    .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_mla_sparse(const tw_tensor* q, const tw_tensor* kv, const tw_tensor* indices, const tw_tensor* o,
                        const tw_mla_sparse_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const auto given = tw::c_api::known("options", options);
    const Given topk_length("topk_length", given.topk_length), sink("sink", given.sink), lse("lse", given.lse),
        max_logits("max_logits", given.max_logits);
    tw::mla_sparse(borrow("q", q), borrow("kv", kv), borrow("indices", indices), out,
                   {.topk_length = topk_length.get(),
                    .scale = given.scale,
                    .sink = sink.get(),
                    .lse = lse.get(),
                    .max_logits = max_logits.get(),
                    .num_splits = given.num_splits,
                    .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_mla_sparse_backward(const tw_tensor* q, const tw_tensor* kv, const tw_tensor* indices, const tw_tensor* o,
                                 const tw_tensor* lse, const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dkv,
                                 const tw_mla_sparse_backward_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dq", dq);
    const auto given = tw::c_api::known("options", options);
    const Given topk_length("topk_length", given.topk_length);
    tw::mla_sparse_backward(borrow("q", q), borrow("kv", kv), borrow("indices", indices), borrow("o", o), borrow("lse", lse),
                            borrow("d_o", d_o), out, borrow("dkv", dkv),
                            {.topk_length = topk_length.get(),
                             .scale = given.scale,
                             .deterministic = given.deterministic != 0,
                             .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_indexer_scores(const tw_tensor* q, const tw_tensor* k, const tw_tensor* weights, const tw_tensor* scores,
                            const tw_indexer_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("scores", scores);
    const auto given = tw::c_api::known("options", options);
    const Given k_scale("k_scale", given.k_scale), starts("starts", given.starts), ends("ends", given.ends);
    tw::indexer_scores(borrow("q", q), borrow("k", k), borrow("weights", weights), out,
                       {.k_scale = k_scale.get(),
                        .starts = starts.get(),
                        .ends = ends.get(),
                        .causal = given.causal != 0,
                        .clear = given.no_clear == 0,
                        .num_splits = given.num_splits,
                        .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_indexer_scores_paged(const tw_tensor* q, const tw_tensor* k_cache, const tw_tensor* weights, const tw_tensor* block_table,
                                  const tw_tensor* scores, const tw_indexer_paged_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("scores", scores);
    const auto given = tw::c_api::known("options", options);
    const Given seqlens("seqlens", given.seqlens);
    tw::indexer_scores_paged(borrow("q", q), borrow("k_cache", k_cache), borrow("weights", weights), borrow("block_table", block_table),
                             out,
                             {.seqlens = seqlens.get(),
                              .causal = given.not_causal == 0,
                              .clear = given.no_clear == 0,
                              .num_splits = given.num_splits,
                              .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_nsa_selected(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* block_indices, const tw_tensor* o,
                          const tw_nsa_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const NsaGiven given(options);
    tw::nsa_selected(borrow("q", q), borrow("k", k), borrow("v", v), borrow("block_indices", block_indices), out,
                     given.options(stream_of(out, cuda_stream)));
  });
}

tw_status tw_nsa_compressed(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_nsa_options* options,
                            void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const NsaGiven given(options);
    tw::nsa_compressed(borrow("q", q), borrow("k", k), borrow("v", v), out, given.options(stream_of(out, cuda_stream)));
  });
}

tw_status tw_nsa_selected_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* block_indices,
                                   const tw_tensor* o, const tw_tensor* lse, const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dk,
                                   const tw_tensor* dv, const tw_nsa_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dq", dq);
    const NsaGiven given(options);
    tw::nsa_selected_backward(borrow("q", q), borrow("k", k), borrow("v", v), borrow("block_indices", block_indices), borrow("o", o),
                              borrow("lse", lse), borrow("d_o", d_o), out, borrow("dk", dk), borrow("dv", dv),
                              given.options(stream_of(out, cuda_stream)));
  });
}

tw_status tw_nsa_compressed_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* lse,
                                     const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dk, const tw_tensor* dv,
                                     const tw_nsa_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("dq", dq);
    const NsaGiven given(options);
    tw::nsa_compressed_backward(borrow("q", q), borrow("k", k), borrow("v", v), borrow("o", o), borrow("lse", lse), borrow("d_o", d_o), out,
                                borrow("dk", dk), borrow("dv", dv), given.options(stream_of(out, cuda_stream)));
  });
}

tw_status tw_nsa_select(const tw_tensor* q, const tw_tensor* k, const tw_tensor* lse, const tw_tensor* block_indices,
                        const tw_nsa_select_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("block_indices", block_indices);
    const auto given = tw::c_api::known("options", options);
    const Given cu_seqlens("cu_seqlens", given.cu_seqlens), cu_seqlens_k("cu_seqlens_k", given.cu_seqlens_k),
        seqlens("seqlens", given.seqlens);
    const auto blocks = [](const char* field, std::int32_t count, int standard) {
      if (count < -1)
        throw tw::InvalidArgument(std::string("options.") + field + " is " + std::to_string(count) + "; it must be -1 or more");
      return count == 0 ? standard : std::max(count, 0);
    };
    tw::nsa_select(borrow("q", q), borrow("k", k), borrow("lse", lse), out,
                   {.block_size = given.block_size == 0 ? 64 : given.block_size,
                    .scale = given.scale,
                    .initial_blocks = blocks("initial_blocks", given.initial_blocks, 1),
                    .local_blocks = blocks("local_blocks", given.local_blocks, 2),
                    .cu_seqlens = cu_seqlens.get(),
                    .cu_seqlens_k = cu_seqlens_k.get(),
                    .seqlens = seqlens.get(),
                    .stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_nsa_combine(const tw_tensor* o, const tw_tensor* output0, const tw_tensor* gate0, const tw_tensor* output1,
                         const tw_tensor* gate1, const tw_tensor* output2, const tw_tensor* gate2, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const Given outputs[] = {{"output0", output0}, {"output1", output1}, {"output2", output2}};
    const Given gates[] = {{"gate0", gate0}, {"gate1", gate1}, {"gate2", gate2}};
    tw::nsa_combine(out, {outputs[0].get(), outputs[1].get(), outputs[2].get()}, {gates[0].get(), gates[1].get(), gates[2].get()},
                    stream_of(out, cuda_stream));
  });
}

tw_status tw_vertical_slash_attention(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* vertical,
                                      const tw_tensor* slash, const tw_tensor* o, const tw_vertical_slash_options* options,
                                      void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const VerticalSlashGiven given(options);
    tw::vertical_slash_attention(borrow("q", q), borrow("k", k), borrow("v", v), borrow("vertical", vertical), borrow("slash", slash), out,
                                 given.options(stream_of(out, cuda_stream)));
  });
}

tw_status tw_vertical_slash_index(const tw_tensor* vertical, const tw_tensor* slash, int64_t seqlen, const tw_tensor* block_count,
                                  const tw_tensor* block_offset, const tw_tensor* column_count, const tw_tensor* column_index,
                                  const tw_vertical_slash_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor counts = borrow("block_count", block_count), offsets = borrow("block_offset", block_offset),
                     column_counts = borrow("column_count", column_count), indices = borrow("column_index", column_index);
    const VerticalSlashGiven given(options);
    tw::vertical_slash_index(borrow("vertical", vertical), borrow("slash", slash), seqlen, {counts, offsets, column_counts, indices},
                             given.options(stream_of(counts, cuda_stream)));
  });
}

tw_status tw_mla_append(const tw_tensor* latent, const tw_tensor* rotary, const tw_tensor* kv_cache, const tw_mla_append_options* options,
                        void* cuda_stream) {
  return guard([&] {
    const tw::Tensor cache = borrow("kv_cache", kv_cache);
    const auto given = tw::c_api::known("options", options);
    const Given seqlens("seqlens", given.seqlens), block_table("block_table", given.block_table),
        rotary_cos("rotary_cos", given.rotary_cos), rotary_sin("rotary_sin", given.rotary_sin);
    tw::mla_append(borrow("latent", latent), borrow("rotary", rotary), cache,
                   {.seqlens = seqlens.get(),
                    .block_table = block_table.get(),
                    .rotary_cos = rotary_cos.get(),
                    .rotary_sin = rotary_sin.get(),
                    .rotary_pairing = given.rotary_half_split != 0 ? tw::RopePairing::half_split : tw::RopePairing::interleaved,
                    .check_contents = given.check_contents != 0,
                    .stream = stream_of(cache, cuda_stream)});
  });
}

#include "speech/glm_asr/encoder.hpp"

#include <array>

#include "kernels/gemm/rotary_linear.hpp"
#include "models/observe.hpp"
#include "runtime/format.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/convolution.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/norm.hpp"
#include "tilewave/rope.hpp"

namespace tw::speech {

using models::Linear;
using models::Operators;
using models::Weights;

namespace {

constexpr int kTaps = 3;
constexpr float kNormEpsilon = 1e-5f;  // PyTorch's default; not configurable

/// Reorders a convolution's weights from [out, in, taps] to [out, taps, in], which the kernel reads fastest.
Linear take_convolution(Weights& weights, const std::string& name, int out, int in) {
  Linear convolution{weights.take(name + ".weight", {out, in, kTaps}), weights.take(name + ".bias", {out})};
  if (weights.checking()) return convolution;
  const Tensor stored = convolution.weight.transpose(1, 2);
  convolution.weight = Tensor::empty(stored.shape(), stored.dtype(), weights.stream());
  cast(stored, convolution.weight, {.stream = weights.stream()});
  return convolution;
}

}  // namespace

void Encoder::Norm::operator()(const Tensor& x, const Tensor& y, const Stream& stream) const {
  layer_norm(x, y, {.epsilon = kNormEpsilon, .weight = &weight, .bias = &bias, .stream = stream});
}

Encoder::Norm Encoder::take_norm(Weights& weights, const std::string& name, int hidden) {
  return {weights.take(name + ".weight", {hidden}), weights.take(name + ".bias", {hidden})};
}

Encoder::Encoder(const GlmAsrConfig& config, Weights& weights)
    : config_(config.encoder), projector_activation_(config.projector_activation) {
  const int hidden = config_.hidden, width = config_.heads * config_.head_dim;
  conv1_ = take_convolution(weights, "audio_tower.conv1", hidden, config.mel.mel_bins);
  conv2_ = take_convolution(weights, "audio_tower.conv2", hidden, hidden);
  for (int i = 0; i < config_.layers; ++i) {
    const std::string name = tw::format("audio_tower.layers.{}.", i), attention = name + "self_attn.";
    Layer layer;
    layer.input_norm = take_norm(weights, name + "input_layernorm", hidden);
    layer.qkv = weights.linear(
        std::array<Weights::Part, 3>{
            {{attention + "q_proj.weight", width}, {attention + "k_proj.weight", width}, {attention + "v_proj.weight", width}}},
        hidden);
    layer.qkv.bias = weights.stack(
        std::array<Weights::Part, 3>{{{attention + "q_proj.bias", width}, {"", width}, {attention + "v_proj.bias", width}}}, 0);
    layer.out = weights.linear(attention + "o_proj", hidden, width, true);
    layer.post_attention_norm = take_norm(weights, name + "post_attention_layernorm", hidden);
    layer.up = weights.linear(name + "mlp.fc1", config_.intermediate, hidden, true);
    layer.down = weights.linear(name + "mlp.fc2", hidden, config_.intermediate, true);
    layers_.push_back(std::move(layer));
  }
  norm_ = take_norm(weights, "audio_tower.norm", hidden);
  // The checkpoint determines the width between the projector's layers.
  const Shape between = weights.shape("multi_modal_projector.linear_1.weight", 2);
  const std::int64_t width_between = between.empty() ? 2 * config.decoder.hidden : between[0];
  linear_1_ = weights.linear("multi_modal_projector.linear_1", width_between, GlmAsrConfig::kStack * hidden, true);
  linear_2_ = weights.linear("multi_modal_projector.linear_2", config.decoder.hidden, width_between, true);
  if (weights.checking()) return;
  cos_ = Tensor::empty({config_.positions, config_.rotary_dim / 2}, DType::f32, weights.stream());
  sin_ = Tensor::empty(cos_.shape(), DType::f32, weights.stream());
  rope_table(cos_, sin_, {.theta = config_.rope_theta, .stream = weights.stream()});
}

EncoderSize Encoder::size() const {
  EncoderSize size;
  const auto element = static_cast<std::int64_t>(size_of(norm_.weight.dtype()));
  const auto count = [&](const Linear& linear, double rows) {  // rows: results of the product
    size.weight_bytes += linear.bytes();
    size.flops += 2 * rows * static_cast<double>(linear.elements());
  };
  const double positions = config_.positions;
  count(conv1_, 2 * positions);
  count(conv2_, positions);
  for (const Layer& layer : layers_) {
    for (const Linear* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down}) count(*linear, positions);
    size.weight_bytes += 4 * norm_.weight.numel() * element;                     // of the norms
    size.flops += 4 * positions * positions * config_.heads * config_.head_dim;  // Q K^T and P V
  }
  size.weight_bytes += 2 * norm_.weight.numel() * element;
  count(linear_1_, positions / GlmAsrConfig::kStack);
  count(linear_2_, positions / GlmAsrConfig::kStack);
  return size;
}

Tensor Encoder::convolve(const Tensor& mel, const Stream& stream) const {
  const DType dtype = conv1_.weight.dtype();
  const Operators run(stream);
  const Tensor input = Tensor::empty(mel.shape(), dtype, stream);
  run("cast", input, {.reads = {&mel}}, [&] {
    Tensor here = mel;
    if (mel.device() != stream.device()) {
      here = Tensor::empty(mel.shape(), mel.dtype(), stream);
      here.copy_from(mel, stream);
    }
    cast(here, input, {.stream = stream});
  });
  const Tensor full = Tensor::empty({mel.shape(0), mel.shape(1), config_.hidden}, dtype, stream);
  run("conv1", full, {.reads = {&input}, .linear = &conv1_}, [&] {
    conv1d(input, conv1_.weight, full, {.padding = 1, .bias = &conv1_.bias, .activation = Activation::gelu_erf, .stream = stream});
  });
  const Tensor half = Tensor::empty({mel.shape(0), config_.positions, config_.hidden}, dtype, stream);
  run("conv2", half, {.reads = {&full}, .linear = &conv2_}, [&] {
    conv1d(full, conv2_.weight, half,
           {.stride = 2, .padding = 1, .bias = &conv2_.bias, .activation = Activation::gelu_erf, .stream = stream});
  });
  return half;
}

void Encoder::run_layer(int index, const Tensor& x, const Stream& stream) const {
  const Layer& layer = layers_[static_cast<std::size_t>(index)];
  const Operators run(stream, index);
  const std::int64_t windows = x.shape(0), positions = x.shape(1), rows = windows * positions;
  const int heads = config_.heads, dim = config_.head_dim, width = heads * dim;
  const auto empty = [&](std::int64_t columns) { return Tensor::empty({rows, columns}, x.dtype(), stream); };
  const Tensor flat = x.reshape({rows, config_.hidden});

  const Tensor normed = empty(config_.hidden), qkv = empty(3 * width), attended = empty(width);
  run("input_norm", normed, {.reads = {&flat}}, [&] { layer.input_norm(flat, normed, stream); });
  const Tensor parts = qkv.reshape({windows, positions, 3 * heads, dim});
  if (layer.qkv.weight.numel() > 0 && kernels::gemm::has_rotary_linear(x.dtype(), dim, config_.rotary_dim, stream)) {
    run("qkv_rope", qkv, {.reads = {&normed}, .linear = &layer.qkv}, [&] {
      kernels::gemm::rotary_linear(normed, layer.qkv.weight, qkv,
                                   {.bias = &layer.qkv.bias,
                                    .cos = cos_,
                                    .sin = sin_,
                                    .positions = config_.positions,
                                    .heads = 2 * heads,
                                    .head_dim = dim,
                                    .stream = stream});
    });
  } else {
    run.linear("qkv", layer.qkv, normed, qkv);
    const Tensor turned = parts.slice(2, 0, 2 * heads);  // q and k
    run("rope", turned, {.reads = {&turned}}, [&] { rope(turned, cos_, sin_, turned, {.stream = stream}); });
  }
  run("attention", attended, {.reads = {&parts}, .keys = static_cast<double>(positions)}, [&] {
    attention(parts.slice(2, 0, heads), parts.slice(2, heads, 2 * heads), parts.slice(2, 2 * heads, 3 * heads),
              attended.reshape({windows, positions, heads, dim}), {.stream = stream});
  });
  run.linear("out", layer.out, attended, flat, {.accumulate = true});

  const Tensor wide = empty(config_.intermediate);
  run("mlp_norm", normed, {.reads = {&flat}}, [&] { layer.post_attention_norm(flat, normed, stream); });
  run.linear("up", layer.up, normed, wide, {.activation = config_.activation});
  run.linear("down", layer.down, wide, flat, {.accumulate = true});
}

Tensor Encoder::normalise(const Tensor& x, const Stream& stream) const {
  const Tensor y = Tensor::empty(x.shape(), x.dtype(), stream);
  const Operators run(stream);
  run("norm", y, {.reads = {&x}}, [&] { norm_(x, y, stream); });
  return y;
}

Tensor Encoder::project(const Tensor& x, const Stream& stream) const {
  const Operators run(stream);
  const std::int64_t windows = x.shape(0), stacked = x.shape(1) / GlmAsrConfig::kStack;
  const Tensor wide = Tensor::empty({windows * stacked, linear_1_.out()}, x.dtype(), stream);
  run.linear("projector_1", linear_1_, x.reshape({windows * stacked, GlmAsrConfig::kStack * x.shape(2)}), wide,
             {.activation = projector_activation_});
  const Tensor embeddings = Tensor::empty({windows * stacked, linear_2_.out()}, x.dtype(), stream);
  run.linear("projector_2", linear_2_, wide, embeddings);
  return embeddings.reshape({windows, stacked, embeddings.shape(1)});
}

Tensor Encoder::encode(const Tensor& mel, const Stream& stream) const {
  const models::Stage stage("encoder", stream);
  const Tensor x = convolve(mel, stream);
  for (int i = 0; i < config_.layers; ++i) run_layer(i, x, stream);
  return project(normalise(x, stream), stream);
}

}  // namespace tw::speech

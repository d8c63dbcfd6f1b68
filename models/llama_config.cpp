#include "models/config_reader.hpp"
#include "models/llama.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

namespace {

/// How the weights are stored, and that rows are whole bytes of codes.
void read_bitnet(const ConfigReader& reader, LlamaConfig& config) {
  const ConfigReader quantization = reader.child("quantization_config");
  if (reader.has("quantization_config")) {
    if (quantization.text("quant_method") != "bitnet") quantization.fail("quant_method", "only \"bitnet\" is supported");
    const std::string layers = quantization.text("linear_class", "bitlinear"), mode = quantization.text("quantization_mode", "offline");
    if (layers != "bitlinear" && layers != "autobitlinear")
      quantization.fail("linear_class", "allowed: \"bitlinear\" and \"autobitlinear\"");
    if (mode != "offline" && mode != "online") quantization.fail("quantization_mode", "allowed: \"offline\" and \"online\"");
    if (quantization.flag("use_rms_norm", false)) quantization.fail("use_rms_norm", "norms in layers are not supported");
    if (layers == "bitlinear")
      config.ternary = Weights::Ternary::divided;
    else if (mode == "offline")
      config.ternary = Weights::Ternary::multiplied;
  }
  const auto whole = [&](const char* field, int extent) {
    if (extent % 4 != 0) reader.fail(field, "allowed: a multiple of 4");
  };
  whole("hidden_size", config.hidden);
  whole("intermediate_size", config.intermediate);
  if (config.heads * config.head_dim != config.hidden)
    reader.fail("hidden_size",
                tw::format("allowed: num_attention_heads * head_dim, {}, which attn_sub_norm has", config.heads * config.head_dim));
}

}  // namespace

LlamaConfig LlamaConfig::read(const ConfigReader& reader) {
  constexpr std::int64_t kLargest = 1 << 20;        // products of two extents are far below 2^63
  constexpr std::int64_t kMostPositions = 1 << 18;  // the rotary table then takes 134 MB
  const auto extent = [&](const char* field, std::optional<std::int64_t> missing = {}) {
    return static_cast<int>(reader.integer(field, 1, kLargest, missing));
  };
  LlamaConfig config;
  const std::string type = reader.text("model_type", "llama");
  config.bitnet = type == "bitnet";
  if (type != "llama" && !config.bitnet) reader.fail("model_type", "only \"llama\" and \"bitnet\" decoders are supported");
  config.hidden = extent("hidden_size");
  config.intermediate = extent("intermediate_size");
  config.layers = static_cast<int>(reader.integer("num_hidden_layers", 1, 1000));
  config.heads = extent("num_attention_heads");
  config.kv_heads = extent("num_key_value_heads", config.heads);
  if (!reader.has("head_dim") && config.hidden % config.heads != 0)
    reader.fail("num_attention_heads", tw::format("allowed: a divisor of hidden_size, {}", config.hidden));
  config.head_dim = extent("head_dim", config.hidden / config.heads);
  config.vocabulary = extent("vocab_size");
  config.max_positions = static_cast<int>(reader.integer("max_position_embeddings", 1, kMostPositions));
  config.norm_epsilon = static_cast<float>(reader.number("rms_norm_eps", 0, 1, 1e-5));
  if (config.heads % config.kv_heads != 0)
    reader.fail("num_key_value_heads", tw::format("allowed: a divisor of num_attention_heads, {}", config.heads));
  if (config.head_dim != 64 && config.head_dim != 128)
    throw FileError(tw::format("{}head_dim is {}; 64 and 128 are supported", reader.where(), config.head_dim));
  const char* const activation = config.bitnet ? "relu2" : "silu";
  if (reader.text("hidden_act", activation) != activation) reader.fail("hidden_act", tw::format("only \"{}\" is supported", activation));
  if (config.bitnet) read_bitnet(reader, config);
  for (const char* bias : {"attention_bias", "mlp_bias"})
    if (reader.flag(bias, false)) reader.fail(bias, "decoders with biases are not supported");
  const ConfigReader rope = reader.child("rope_parameters");
  config.rope_theta = rope.number("rope_theta", 1, 1e12, reader.number("rope_theta", 1, 1e12, 10000));
  if (rope.text("rope_type", "default") != "default") rope.fail("rope_type", "only \"default\" is supported");
  if (reader.has("rope_scaling")) reader.fail("rope_scaling", "scaled rotary embeddings are not supported");
  if (rope.number("partial_rotary_factor", 0, 1, reader.number("partial_rotary_factor", 0, 1, 1)) != 1)
    throw FileError(tw::format("{}partial_rotary_factor is not 1, which a decoder must have", reader.where()));
  return config;
}

}  // namespace tw::models

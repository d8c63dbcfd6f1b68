#include "models/config_reader.hpp"
#include "models/llama.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

LlamaConfig LlamaConfig::read(const ConfigReader& reader) {
  constexpr std::int64_t kLargest = 1 << 20;        // products of two extents are far below 2^63
  constexpr std::int64_t kMostPositions = 1 << 18;  // the rotary table then takes 134 MB
  const auto extent = [&](const char* field, std::optional<std::int64_t> missing = {}) {
    return static_cast<int>(reader.integer(field, 1, kLargest, missing));
  };
  LlamaConfig config;
  if (reader.text("model_type", "llama") != "llama") reader.fail("model_type", "only \"llama\" decoders are supported");
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
  if (reader.text("hidden_act", "silu") != "silu") reader.fail("hidden_act", "only \"silu\" is supported");
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

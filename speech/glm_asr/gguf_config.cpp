#include "speech/glm_asr/gguf_config.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>
#include <string_view>

#include "models/one_line.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {

using models::ConfigReader;
using models::Gguf;
using models::GgufTensors;
using models::Tokenizer;
using models::TokenLists;

namespace {

constexpr std::int64_t kLargest = 1 << 20;        // extents: their products are far below 2^63
constexpr std::int64_t kMostPositions = 1 << 18;  // the rotary table then takes 134 MB
constexpr std::uint64_t kMostTokens = kLargest, kMostMerges = 2 * kLargest;
constexpr float kEncoderEpsilon = 1e-5f;  // of its layer norms

/// GLM-4's, as in the checkpoint's tokenizer.json.
constexpr const char* kWords =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct Rename {
  std::string_view stored, canonical;
};

constexpr std::array kNames = {
    Rename{"token_embd", "embed_tokens"},
    Rename{"output_norm", "norm"},
    Rename{"output", "lm_head"},
    Rename{"a.conv1d.1", "audio_tower.conv1"},
    Rename{"a.conv1d.2", "audio_tower.conv2"},
    Rename{"mm.a.norm_pre", "audio_tower.norm"},
    Rename{"mm.a.mlp.1", "multi_modal_projector.linear_1"},
    Rename{"mm.a.mlp.2", "multi_modal_projector.linear_2"},
};
constexpr std::array kDecoderLayerNames = {
    Rename{"attn_norm", "input_layernorm"}, Rename{"attn_q", "self_attn.q_proj"},      Rename{"attn_k", "self_attn.k_proj"},
    Rename{"attn_v", "self_attn.v_proj"},   Rename{"attn_output", "self_attn.o_proj"}, Rename{"ffn_norm", "post_attention_layernorm"},
    Rename{"ffn_gate", "mlp.gate_proj"},    Rename{"ffn_up", "mlp.up_proj"},           Rename{"ffn_down", "mlp.down_proj"},
};
constexpr std::array kEncoderLayerNames = {
    Rename{"ln1", "input_layernorm"},     Rename{"attn_q", "self_attn.q_proj"},   Rename{"attn_k", "self_attn.k_proj"},
    Rename{"attn_v", "self_attn.v_proj"}, Rename{"attn_out", "self_attn.o_proj"}, Rename{"ln2", "post_attention_layernorm"},
    Rename{"ffn_up", "mlp.fc1"},          Rename{"ffn_down", "mlp.fc2"},
};

/// Names with a layer's number: the prefix, the number, a name, the suffix.
struct LayerNames {
  Rename prefix;
  std::span<const Rename> names;
};
constexpr std::array kLayerNames = {
    LayerNames{{"blk.", "layers."}, kDecoderLayerNames},
    LayerNames{{"a.blk.", "audio_tower.layers."}, kEncoderLayerNames},
};

/// A name in the spelling `from` in the spelling `to`; `name` if it is none of the model's.
std::string translate(const std::string& name, std::string_view Rename::*from, std::string_view Rename::*to) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string::npos) return name;
  const std::string_view stem = std::string_view(name).substr(0, dot), suffix = std::string_view(name).substr(dot);
  const auto renamed = [&](std::span<const Rename> names, std::string_view part, const std::string& prefix) {
    const auto found = std::find_if(names.begin(), names.end(), [&](const Rename& each) { return each.*from == part; });
    return found == names.end() ? name : tw::format("{}{}{}", prefix, (*found).*to, suffix);
  };
  for (const auto& [prefix, names] : kLayerNames) {
    if (!stem.starts_with(prefix.*from)) continue;
    const std::string_view rest = stem.substr((prefix.*from).size());
    const std::size_t end = rest.find('.');
    if (end == std::string_view::npos) return name;
    return renamed(names, rest.substr(end + 1), tw::format("{}{}.", prefix.*to, rest.substr(0, end)));
  }
  return renamed(kNames, stem, "");
}

/// The number of tokens in a model's vocabulary.
int vocabulary_of(const ConfigReader& metadata, int tokens) {
  const auto vocabulary = static_cast<int>(metadata.integer("llama.vocab_size", 1, kLargest, tokens));
  if (vocabulary != tokens) metadata.fail("llama.vocab_size", tw::format("tokenizer.ggml.tokens has {}", tokens));
  return vocabulary;
}

models::LlamaConfig read_decoder(const Gguf& model, int tokens) {
  const ConfigReader& metadata = model.metadata();
  const auto extent = [&](const char* key, std::optional<std::int64_t> missing = {}) {
    return static_cast<int>(metadata.integer(key, 1, kLargest, missing));
  };
  models::LlamaConfig config;
  config.hidden = extent("llama.embedding_length");
  config.intermediate = extent("llama.feed_forward_length");
  config.layers = static_cast<int>(metadata.integer("llama.block_count", 1, 1000));
  config.heads = extent("llama.attention.head_count");
  config.kv_heads = extent("llama.attention.head_count_kv", config.heads);
  if (!metadata.has("llama.attention.key_length") && config.hidden % config.heads != 0)
    metadata.fail("llama.attention.head_count", tw::format("allowed: a divisor of llama.embedding_length, {}", config.hidden));
  config.head_dim = extent("llama.attention.key_length", config.hidden / config.heads);
  config.vocabulary = vocabulary_of(metadata, tokens);
  config.max_positions = static_cast<int>(metadata.integer("llama.context_length", 1, kMostPositions));
  config.rope_theta = metadata.number("llama.rope.freq_base", 1, 1e12, 10000);
  config.norm_epsilon = static_cast<float>(metadata.number("llama.attention.layer_norm_rms_epsilon", 0, 1));
  if (config.heads % config.kv_heads != 0)
    metadata.fail("llama.attention.head_count_kv", tw::format("allowed: a divisor of llama.attention.head_count, {}", config.heads));
  if (config.head_dim != 64 && config.head_dim != 128)
    throw FileError(tw::format("{}heads of {} are not supported; 64 and 128 are", metadata.where(), config.head_dim));
  for (const char* key : {"llama.attention.value_length", "llama.rope.dimension_count"})
    if (extent(key, config.head_dim) != config.head_dim)
      metadata.fail(key, tw::format("allowed: {}, as many as a head has", config.head_dim));
  if (metadata.text("llama.rope.scaling.type", "none") != "none")
    metadata.fail("llama.rope.scaling.type", "scaled rotary embeddings are not supported");
  if (metadata.integer("llama.expert_count", 0, kLargest, 0) != 0)
    metadata.fail("llama.expert_count", "mixtures of experts are not supported");
  return config;
}

GlmAsrConfig::Encoder read_encoder(const Gguf& mmproj) {
  const ConfigReader& metadata = mmproj.metadata();
  const auto extent = [&](const char* key) { return static_cast<int>(metadata.integer(key, 1, kLargest)); };
  GlmAsrConfig::Encoder encoder;
  encoder.hidden = extent("clip.audio.embedding_length");
  encoder.intermediate = extent("clip.audio.feed_forward_length");
  encoder.layers = static_cast<int>(metadata.integer("clip.audio.block_count", 1, 1000));
  encoder.heads = extent("clip.audio.attention.head_count");
  if (encoder.hidden % encoder.heads != 0)
    metadata.fail("clip.audio.attention.head_count", tw::format("allowed: a divisor of clip.audio.embedding_length, {}", encoder.hidden));
  encoder.head_dim = encoder.hidden / encoder.heads;
  encoder.rotary_dim = encoder.head_dim / 2;
  if (encoder.head_dim != 64 && encoder.head_dim != 128)
    throw FileError(tw::format("{}heads of {} are not supported; 64 and 128 are", metadata.where(), encoder.head_dim));
  if (encoder.intermediate != GlmAsrConfig::kStack * encoder.hidden)
    metadata.fail("clip.audio.feed_forward_length", tw::format("allowed: {}, {} times clip.audio.embedding_length",
                                                               GlmAsrConfig::kStack * encoder.hidden, GlmAsrConfig::kStack));
  if (metadata.integer("clip.audio.projector.stack_factor", 1, kLargest) != GlmAsrConfig::kStack)
    metadata.fail("clip.audio.projector.stack_factor", tw::format("allowed: {}", GlmAsrConfig::kStack));
  if (static_cast<float>(metadata.number("clip.audio.attention.layer_norm_epsilon", 0, 1, kEncoderEpsilon)) != kEncoderEpsilon)
    metadata.fail("clip.audio.attention.layer_norm_epsilon", tw::format("allowed: {}", kEncoderEpsilon));
  return encoder;
}

/// The tensors that published files have besides the model's, and their shapes. The encoder rotates positions instead of adding
/// embeddings, and the decoder's embedding has those of <|begin_of_audio|> and <|end_of_audio|>.
std::optional<Shape> shape_of_unused(const std::string& name, const GlmAsrConfig& config) {
  if (name == "a.position_embd.weight") return Shape{config.encoder.positions, config.encoder.hidden};
  if (name == "v.boi" || name == "v.eoi") return Shape{config.decoder.hidden};
  return {};
}

}  // namespace

void check_gguf_kinds(const GgufPair& files) {
  const ConfigReader &model = files.model.metadata(), &mmproj = files.mmproj.metadata();
  if (const std::string kind = model.text("general.architecture"); kind != "llama")
    model.fail("general.architecture", kind == "clip" ? "this is the file for mmproj; give the language model's as the model"
                                                      : "only \"llama\" is supported, the decoder of GLM-ASR");
  if (const std::string kind = mmproj.text("general.architecture"); kind != "clip")
    mmproj.fail("general.architecture", "allowed for mmproj: \"clip\", a file with the audio encoder");
  const char* type_key = mmproj.has("clip.projector_type") ? "clip.projector_type" : "clip.audio.projector_type";
  if (mmproj.text(type_key) != "glma") mmproj.fail(type_key, "only \"glma\" is supported, the projector of GLM-ASR");
  if (!mmproj.flag("clip.has_audio_encoder", true)) mmproj.fail("clip.has_audio_encoder", "GLM-ASR needs one");
  for (const ConfigReader* file : {&model, &mmproj})
    if (file->integer("split.count", 0, 65535, 0) > 1) file->fail("split.count", "join the files first: llama-gguf-split --merge");
}

Tokenizer gguf_tokenizer(const Gguf& model) {
  const ConfigReader& metadata = model.metadata();
  if (metadata.text("tokenizer.ggml.model") != "gpt2") metadata.fail("tokenizer.ggml.model", "only \"gpt2\" is supported");
  // llama.cpp knows GLM-4's regular expression under both names.
  if (const std::string words = metadata.text("tokenizer.ggml.pre"); words != "glm4" && words != "chatglm-bpe")
    metadata.fail("tokenizer.ggml.pre", "\"glm4\" and \"chatglm-bpe\" are supported");
  const std::vector<std::int64_t> kinds = model.integers("tokenizer.ggml.token_type", kMostTokens);
  std::vector<std::string> texts = model.strings("tokenizer.ggml.tokens", kMostTokens);
  if (kinds.size() != texts.size())
    throw FileError(tw::format("{}tokenizer.ggml.token_type has {} elements; tokenizer.ggml.tokens has {}", metadata.where(), kinds.size(),
                               texts.size()));
  TokenLists lists{{}, model.strings("tokenizer.ggml.merges", kMostMerges), kWords};
  for (std::size_t id = 0; id < texts.size(); ++id) {
    enum : std::int64_t { normal = 1, unknown, control, user_defined, unused };
    TokenLists::Kind kind{};
    switch (kinds[id]) {
      case normal:
        kind = TokenLists::Kind::normal;
        break;
      case control:
        kind = TokenLists::Kind::special;
        break;
      case user_defined:
        kind = TokenLists::Kind::added;
        break;
      case unused:
        kind = TokenLists::Kind::unused;
        break;
      default:
        throw FileError(tw::format("{}tokenizer.ggml.token_type[{}] is {}; allowed: 1, 3, 4 and 5", metadata.where(), id, kinds[id]));
    }
    lists.tokens.push_back({std::move(texts[id]), kind});
  }
  return Tokenizer::from(lists, model.file());
}

GlmAsrConfig gguf_config(const GgufPair& files, const Tokenizer& tokenizer) {
  const ConfigReader &model = files.model.metadata(), &mmproj = files.mmproj.metadata();
  GlmAsrConfig config;
  config.decoder = read_decoder(files.model, static_cast<int>(files.model.integers("tokenizer.ggml.token_type", kMostTokens).size()));
  config.encoder = read_encoder(files.mmproj);
  if (mmproj.integer("clip.audio.projection_dim", 1, kLargest) != config.decoder.hidden)
    mmproj.fail("clip.audio.projection_dim", tw::format("llama.embedding_length of {} is {}", files.model.file(), config.decoder.hidden));
  config.mel.mel_bins = static_cast<int>(mmproj.integer("clip.audio.num_mel_bins", 1, 1024));
  config.encoder.positions = config.mel.sampling_rate * config.mel.window_seconds / config.mel.hop / 2;
  config.segment_seconds = config.mel.window_seconds;
  config.prompt = "Please transcribe this audio into text";

  const auto id = [&](const char* token) {
    const auto found = tokenizer.token_id(token);
    if (!found) throw FileError(tw::format("{}tokenizer.ggml.tokens has no {}, which GLM-ASR needs", model.where(), token));
    return *found;
  };
  config.audio_token = id("<|pad|>");
  // The metadata has room for fewer end tokens than the model has, so those of the published checkpoint are found by name.
  config.end_tokens = {id("<|endoftext|>"), id("<|user|>"), id("<|observation|>")};
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (!model.has(key)) continue;
    const auto end = static_cast<int>(model.integer(key, 0, config.decoder.vocabulary - 1));
    if (std::find(config.end_tokens.begin(), config.end_tokens.end(), end) == config.end_tokens.end()) config.end_tokens.push_back(end);
  }
  return config;
}

std::shared_ptr<const models::TensorSource> gguf_tensors(const GgufPair& files, const GlmAsrConfig& config) {
  auto tensors = std::make_shared<GgufTensors>();
  // The converter reorders the decoder's rows for a rotation of neighbours; the encoder's were trained with it.
  const GgufTensors::Heads decoder{config.decoder.head_dim, config.decoder.head_dim};
  const GgufTensors::Heads encoder{config.encoder.head_dim, config.encoder.rotary_dim};
  for (const Gguf* file : {&files.model, &files.mmproj}) {
    for (const std::string& name : file->names()) {
      Shape shape = file->shape(name);
      if (const auto wanted = shape_of_unused(name, config); wanted && file == &files.mmproj) {
        if (shape != *wanted)
          throw FileError(
              tw::format("{}: {} is [{}], which must be [{}]", file->file(), name, tw::join(shape, ", "), tw::join(*wanted, ", ")));
        continue;
      }
      // llama.cpp adds a convolution's bias to [channels, time].
      if (name.starts_with("a.conv1d.") && name.ends_with(".bias") && shape.size() == 2 && shape[1] == 1) shape.pop_back();
      const bool is_rotated = name.find(".attn_q.") != std::string::npos || name.find(".attn_k.") != std::string::npos;
      tensors->add(*file, name, shape, !is_rotated ? GgufTensors::Heads{} : file == &files.model ? decoder : encoder);
    }
  }
  return tensors;
}

std::string canonical_gguf_name(const std::string& name) { return translate(name, &Rename::stored, &Rename::canonical); }
std::string stored_gguf_name(const std::string& name) { return translate(name, &Rename::canonical, &Rename::stored); }

}  // namespace tw::speech

#include "speech/glm_asr/config.hpp"

#include <algorithm>
#include <cctype>
#include <optional>

#include "models/config_reader.hpp"
#include "models/json.hpp"
#include "models/regular_file.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {

namespace fs = std::filesystem;
using models::ConfigReader;

namespace {

constexpr std::size_t kLargestFile = 4u << 20;  // published ones have up to 1.2 MB
constexpr std::size_t kLargestTemplate = 1u << 20;
constexpr std::size_t kLongestPrompt = 16u << 10;  // bytes: it is part of the prompt of every recording
constexpr std::int64_t kMostFrames = 1 << 14;      // per window: attention takes time and memory in proportion to the square

ConfigReader open(const fs::path& file) { return {file.string(), models::load_json(file, kLargestFile)}; }

bool is_there(const fs::path& file) {
  std::error_code ignored;
  return fs::exists(file, ignored);
}

/// If `path` is the name of a model on the Hugging Face hub, "organisation/name", or its address there, returns the name.
std::optional<std::string> hub_name(std::string path) {
  for (const std::string_view address : {"https://huggingface.co/", "huggingface.co/", "hf://"}) {
    if (path.starts_with(address)) path.erase(0, address.size());
  }
  while (path.ends_with('/')) path.pop_back();
  const std::size_t slash = path.find('/');
  const auto is_name = [](std::string_view part) {
    return !part.empty() && part[0] != '.' &&
           std::all_of(part.begin(), part.end(), [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; });
  };
  if (slash == std::string::npos || !is_name(path.substr(0, slash)) || !is_name(path.substr(slash + 1))) return {};
  return path;
}

void require_directory(const fs::path& directory) {
  std::error_code error;
  if (fs::is_directory(directory, error)) return;
  const std::string given = directory.string();
  if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory)
    throw FileError(tw::format("{}: {}", given, error.message()));
  if (is_there(directory)) throw FileError(tw::format("{}: is not a directory; a checkpoint is a directory", given));
  if (const auto name = hub_name(given))
    throw FileError(
        tw::format("{}: no such directory; if this is a model's name on the Hugging Face hub, download it first with \"hf download {} "
                   "--local-dir {}\" and give that directory",
                   given, *name, name->substr(name->find('/') + 1)));
  throw FileError(
      tw::format("{}: no such directory; a checkpoint is a directory, for example what \"hf download "
                 "zai-org/GLM-ASR-Nano-2512 --local-dir DIRECTORY\" makes",
                 given));
}

Activation activation(const ConfigReader& reader, const char* field) {
  const std::string name = reader.text(field, "gelu");
  if (name == "gelu") return Activation::gelu_erf;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return Activation::gelu_tanh;
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "relu") return Activation::relu;
  reader.fail(field, "\"gelu\", \"gelu_pytorch_tanh\", \"silu\" and \"relu\" are supported");
}

GlmAsrConfig::Encoder read_encoder(const ConfigReader& reader) {
  constexpr std::int64_t kLargest = 1 << 20;
  const auto extent = [&](const char* field, std::optional<std::int64_t> missing = {}) {
    return static_cast<int>(reader.integer(field, 1, kLargest, missing));
  };
  GlmAsrConfig::Encoder encoder;
  encoder.hidden = extent("hidden_size");
  encoder.intermediate = extent("intermediate_size");
  encoder.layers = static_cast<int>(reader.integer("num_hidden_layers", 1, 1000));
  encoder.heads = extent("num_attention_heads");
  if (!reader.has("head_dim") && encoder.hidden % encoder.heads != 0)
    reader.fail("num_attention_heads", tw::format("allowed: a divisor of hidden_size, {}", encoder.hidden));
  encoder.head_dim = extent("head_dim", encoder.hidden / encoder.heads);
  encoder.positions = extent("max_position_embeddings", 1500);
  encoder.activation = activation(reader, "hidden_act");
  if (extent("num_key_value_heads", encoder.heads) != encoder.heads)
    reader.fail("num_key_value_heads", tw::format("allowed: {}, as many as num_attention_heads", encoder.heads));
  if (encoder.head_dim != 64 && encoder.head_dim != 128)
    throw FileError(tw::format("{}head_dim is {}; 64 and 128 are supported", reader.where(), encoder.head_dim));
  if (encoder.intermediate != GlmAsrConfig::kStack * encoder.hidden)
    reader.fail("intermediate_size", tw::format("allowed: {}, {} times hidden_size, because so many positions make one embedding",
                                                GlmAsrConfig::kStack * encoder.hidden, GlmAsrConfig::kStack));
  const ConfigReader rope = reader.child("rope_parameters");
  encoder.rope_theta = rope.number("rope_theta", 1, 1e12, reader.number("rope_theta", 1, 1e12, 10000));
  const double factor = rope.number("partial_rotary_factor", 0, 1, reader.number("partial_rotary_factor", 0, 1, 0.5));
  encoder.rotary_dim = static_cast<int>(encoder.head_dim * factor) / 2 * 2;
  if (encoder.rotary_dim < 2)
    throw FileError(tw::format("{}partial_rotary_factor is {}; it leaves nothing to turn", reader.where(), factor));
  if (rope.text("rope_type", "default") != "default") rope.fail("rope_type", "only \"default\" is supported");
  return encoder;
}

/// The layout of the weights of a checkpoint that `tilewave convert` wrote.
QuantizedMatrix::Layout read_weights(const ConfigReader& reader) {
  if (!reader.has("quantization_config")) return {.format = WeightFormat::plain};
  const ConfigReader quantization = reader.child("quantization_config");
  if (quantization.text("quant_method") != "tilewave")
    quantization.fail("quant_method", "only \"tilewave\" is supported, which `tilewave convert` writes");
  const std::string format = quantization.text("format");
  if (format == "int8") return {.format = WeightFormat::int8};
  if (format == "fp8") return {.format = WeightFormat::fp8};
  if (format != "int4") quantization.fail("format", "\"int8\", \"fp8\" and \"int4\" are supported");
  const std::int64_t group = quantization.integer("group", 32, 128);
  if (group != 32 && group != 128) quantization.fail("group", "32 and 128 are supported");
  return {WeightFormat::int4, static_cast<int>(group), quantization.flag("zero_points", false)};
}

/// The template cannot be executed here. Its content tells whether it is GLM-ASR's.
void check_template(const fs::path& directory) {
  fs::path file = directory / "chat_template.jinja";
  std::string text;
  if (is_there(file)) {
    text = models::read_text(file, kLargestTemplate);
  } else {
    file = directory / "tokenizer_config.json";
    if (!is_there(file)) return;
    const ConfigReader reader = open(file);
    if (!reader.has("chat_template")) return;  // older checkpoints: the prompt is fixed
    text = reader.text("chat_template");
  }
  for (const char* token : {"<|user|>", "<|begin_of_audio|>", "<|end_of_audio|>", "<|assistant|>"})
    if (text.find(token) == std::string::npos)
      throw FileError(
          tw::format("{}: the chat template does not contain {}: it is not GLM-ASR's, which alone is supported", file.string(), token));
}

}  // namespace

int GlmAsrConfig::embeddings(std::int64_t frames) {
  // The number after two convolutions of 3 taps with padding 1 and strides 1 and 2, and after stacking. Divisions round down: 0 to 6 frames
  // give 0 embeddings.
  const auto floor_div = [](std::int64_t a, std::int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); };
  std::int64_t length = frames + 2 - 2 - 1 + 1;
  length = floor_div(length + 2 - 2 - 1, 2) + 1;
  return static_cast<int>(floor_div(length - kStack, kStack) + 1);
}

GlmAsrConfig GlmAsrConfig::read(const fs::path& directory) {
  require_directory(directory);
  const ConfigReader reader = open(directory / "config.json");
  if (reader.text("model_type") != "glmasr") reader.fail("model_type", "only \"glmasr\" is supported");
  if (!reader.has("audio_config")) reader.fail("audio_config", "allowed: an object");
  if (!reader.has("text_config")) reader.fail("text_config", "allowed: an object");

  GlmAsrConfig config;
  config.encoder = read_encoder(reader.child("audio_config"));
  const ConfigReader text = reader.child("text_config");
  config.decoder = models::LlamaConfig::read(text);
  config.projector_activation = activation(reader, "projector_hidden_act");
  config.weights = read_weights(reader);
  const int last_token = config.decoder.vocabulary - 1;
  config.audio_token = static_cast<int>(reader.integer("audio_token_id", 0, last_token));

  const fs::path generation = directory / "generation_config.json";
  ConfigReader generating(generation.string(), nlohmann::json::object());
  if (is_there(generation)) generating = open(generation);
  config.end_tokens = generating.integers("eos_token_id", 0, last_token);
  if (config.end_tokens.empty()) config.end_tokens = text.integers("eos_token_id", 0, last_token);
  if (config.end_tokens.empty()) config.end_tokens = reader.integers("eos_token_id", 0, last_token);
  if (config.end_tokens.empty()) text.fail("eos_token_id", "without it a text never ends");

  fs::path processor = directory / "processor_config.json";
  config.prompt = "Please transcribe this audio into text";
  ConfigReader features(processor.string(), nlohmann::json::object());
  if (is_there(processor)) {
    const ConfigReader whole = open(processor);
    config.prompt = whole.text("default_transcription_prompt", config.prompt);
    if (config.prompt.size() > kLongestPrompt)
      whole.fail("default_transcription_prompt", tw::format("it has {} bytes; allowed: at most {}", config.prompt.size(), kLongestPrompt));
    features = whole.child("feature_extractor");
  }
  const fs::path preprocessor = directory / "preprocessor_config.json";
  if (!features.has("feature_size") && is_there(preprocessor)) features = open(preprocessor);
  const auto setting = [&](const char* field, int& value, std::int64_t least, std::int64_t most) {
    value = static_cast<int>(features.integer(field, least, most, value));
  };
  setting("sampling_rate", config.mel.sampling_rate, 16000, 16000);
  setting("feature_size", config.mel.mel_bins, 1, 1024);
  setting("n_fft", config.mel.n_fft, 16, 4096);
  setting("hop_length", config.mel.hop, 1, 4096);
  setting("chunk_length", config.mel.window_seconds, 1, 120);
  // Published checkpoints do not have this field; their models can fill a window: see docs/transcribe.md.
  config.segment_seconds = generating.number("segment_seconds", 1, config.mel.window_seconds, config.mel.window_seconds);
  const ConfigReader audio = reader.child("audio_config");
  if (audio.integer("num_mel_bins", 1, 1024, 128) != config.mel.mel_bins)
    audio.fail("num_mel_bins", tw::format("the processor's feature_size is {}", config.mel.mel_bins));
  const std::int64_t frames = std::int64_t{config.mel.sampling_rate} * config.mel.window_seconds / config.mel.hop;
  if (frames > kMostFrames)
    throw FileError(tw::format("{}hop_length is {} and chunk_length {}: a window of {} frames; at most {} are supported", features.where(),
                               config.mel.hop, config.mel.window_seconds, frames, kMostFrames));
  if (frames != 2 * config.encoder.positions || config.encoder.positions % kStack != 0)
    audio.fail("max_position_embeddings", tw::format("allowed: half of a window's {} frames, a multiple of {}", frames, kStack));
  check_template(directory);
  return config;
}

}  // namespace tw::speech

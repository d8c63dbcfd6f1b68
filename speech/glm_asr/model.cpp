#include "speech/glm_asr/model.hpp"

#include <algorithm>
#include <optional>

#include "models/observe.hpp"
#include "models/one_line.hpp"
#include "models/weights.hpp"
#include "runtime/format.hpp"
#include "speech/glm_asr/gguf_config.hpp"
#include "speech/glm_asr/kernels.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {

using models::SafeTensors;
using models::Tokenizer;
using models::Weights;

namespace {

/// The parts of the model that have weights.
struct Parts {
  std::optional<Encoder> encoder;
  std::optional<models::Llama> decoder;

  void build(const GlmAsrConfig& config, Weights& from) {
    encoder.emplace(config, from);
    decoder.emplace(config.decoder, from);
  }
};

void refuse_older_layout(const SafeTensors& files) {
  for (const std::string& name : files.names())
    if (name.starts_with("audio_encoder."))
      throw FileError(
          tw::format("{}: {}: the layout from before the conversion to transformers' GlmAsr is not read; use the converted checkpoint",
                     files.file(name), models::one_line(name)));
}

}  // namespace

DType choose_dtype(const LoadOptions& options, DType stored) {
  const bool gpu = options.device.is_cuda();
  const DType dtype = options.dtype.value_or(!gpu ? DType::f32 : stored == DType::f32 ? DType::bf16 : stored);
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16)
    throw InvalidArgument(tw::format("dtype is {}; f32, bf16 and f16 are supported", name_of(dtype)));
  return dtype;
}

namespace {

/// `configuration`: the file that has the size of the vocabulary.
void check_tokenizer(const Tokenizer& tokenizer, const GlmAsrConfig& config, const std::string& file, const std::string& configuration) {
  for (const char* token : {"<|user|>", "<|begin_of_audio|>", "<|end_of_audio|>", "<|assistant|>"})
    if (!tokenizer.token_id(token)) throw FileError(tw::format("{}: has no token {}, which GLM-ASR's prompt needs", file, token));
  if (tokenizer.vocab_size() > config.decoder.vocabulary)
    throw FileError(tw::format("{}: has tokens up to {}; {} has a vocabulary of {}", file, tokenizer.vocab_size() - 1, configuration,
                               config.decoder.vocabulary));
}

void check_weights(const GlmAsrConfig& config, const QuantizedMatrix::Layout& layout, Weights& weights) {
  weights.set_layouts(config.weights, layout);
  Parts parts;
  weights.check([&](Weights& from) { parts.build(config, from); });
}

GlmAsr load_weights(GlmAsrConfig config, Tokenizer tokenizer, Weights weights, LoadOptions& options, const Stream& stream) {
  options.dtype = choose_dtype(options, weights.main_dtype());
  if (options.weights.format == WeightFormat::plain) options.weights = config.weights;
  check_weights(config, options.weights, weights);
  Parts parts;
  CompileAhead kernels(config, weights, options);
  weights.load([&](Weights& from) { parts.build(config, from); }, *options.dtype, stream, kernels.one_at_a_time(options.progress));
  kernels.wait();
  LogMel mel(config.mel, stream);
  return {std::move(config), std::move(tokenizer), std::move(mel), std::move(*parts.encoder), std::move(*parts.decoder)};
}

Weights weights_in(const std::filesystem::path& directory) {
  SafeTensors files = SafeTensors::open_directory(directory);
  refuse_older_layout(files);
  return {directory.string(), std::move(files), canonical_weight_name};
}

GlmAsr load_directory(const std::filesystem::path& directory, LoadOptions& options, const Stream& stream) {
  GlmAsrConfig config = GlmAsrConfig::read(directory);
  const std::string tokenizer_file = (directory / "tokenizer.json").string();
  Tokenizer tokenizer = Tokenizer::load(tokenizer_file);
  check_tokenizer(tokenizer, config, tokenizer_file, "config.json");
  return load_weights(std::move(config), std::move(tokenizer), weights_in(directory), options, stream);
}

bool is_gguf(const std::filesystem::path& model, const LoadOptions& options) {
  std::error_code ignored;
  if (std::filesystem::is_directory(model, ignored)) {
    if (options.mmproj.empty()) return false;
    throw InvalidArgument(tw::format("mmproj is {}, but {} is a directory; mmproj belongs to a model in a GGUF file",
                                     options.mmproj.string(), model.string()));
  }
  const bool has_suffix = model.extension() == ".gguf" || model.extension() == ".GGUF";
  if (has_suffix && options.mmproj.empty())
    throw InvalidArgument(tw::format("mmproj is missing: {} needs a second GGUF file, with the audio encoder", model.string()));
  return !options.mmproj.empty();
}

GlmAsr load_gguf(const std::filesystem::path& model, LoadOptions& options, const Stream& stream) {
  const GgufPair files{models::Gguf::open(model), models::Gguf::open(options.mmproj)};
  check_gguf_kinds(files);
  Tokenizer tokenizer = gguf_tokenizer(files.model);
  GlmAsrConfig config = gguf_config(files, tokenizer);
  check_tokenizer(tokenizer, config, model.string(), "it");
  Weights weights(files.name(), gguf_tensors(files, config),
                  {.canonical = canonical_gguf_name, .stored = stored_gguf_name, .configuration = "the metadata"});
  return load_weights(std::move(config), std::move(tokenizer), std::move(weights), options, stream);
}

}  // namespace

std::string canonical_weight_name(const std::string& name) {
  std::string_view rest = name;
  const auto drop = [&](std::string_view prefix) {
    const bool there = rest.starts_with(prefix);
    if (there) rest.remove_prefix(prefix.size());
    return there;
  };
  drop("model.");
  if (drop("language_model."))
    while (drop("model.")) {
    }
  return std::string(rest);
}

Weights open_weights(const std::filesystem::path& directory, const GlmAsrConfig& config) {
  Weights weights = weights_in(directory);
  check_weights(config, config.weights, weights);
  return weights;
}

GlmAsr GlmAsr::load(const std::filesystem::path& model, LoadOptions& options, const Stream& stream) {
  return is_gguf(model, options) ? load_gguf(model, options, stream) : load_directory(model, options, stream);
}

ModelSize GlmAsr::size() const {
  const auto each = static_cast<std::int64_t>(size_of(decoder.dtype()));
  const models::LlamaConfig& d = decoder.config();
  const std::int64_t kv = std::int64_t{d.kv_heads} * d.head_dim, decode = decoder.bytes_per_step();
  const std::int64_t embedding = decoder.tied() ? 0 : each * d.vocabulary * d.hidden;
  const EncoderSize encoder_size = encoder.size();
  return {decode + embedding + encoder_size.weight_bytes, decode, each * 2 * kv * d.layers, encoder_size.flops, decoder.flops_per_token()};
}

std::vector<int> GlmAsr::prompt(std::string_view text, int audio_embeddings) const {
  std::vector<int> ids;
  const auto special = [&](const char* token) { ids.push_back(*tokenizer.token_id(token)); };
  const auto plain = [&](std::string_view part) {
    for (const int id : tokenizer.encode(part)) ids.push_back(id);
  };
  special("<|user|>");
  plain("\n");
  special("<|begin_of_audio|>");
  ids.insert(ids.end(), static_cast<std::size_t>(audio_embeddings), config.audio_token);
  special("<|end_of_audio|>");
  special("<|user|>");
  plain(tw::format("\n{}", text));
  special("<|assistant|>");
  plain("\n");
  return ids;
}

Tensor GlmAsr::embed(std::span<const int> prompt, std::span<const Tensor> audio, const Stream& stream) const {
  const models::Stage stage("embed", stream);
  const models::Operators run(stream);
  const Tensor rows = decoder.embed(prompt, stream);
  std::int64_t row = std::find(prompt.begin(), prompt.end(), config.audio_token) - prompt.begin();
  std::int64_t given = 0;
  for (const Tensor& part : audio) given += part.shape(0);
  if (const auto places = std::count(prompt.begin(), prompt.end(), config.audio_token); places != given)
    throw InvalidArgument(tw::format("the prompt has places for {} audio embeddings; there are {}", places, given));
  for (const Tensor& part : audio) {
    if (part.shape(0) == 0) continue;
    const Tensor places = rows.slice(0, row, row + part.shape(0));
    run("audio", places, {.reads = {&part}}, [&] { cast(part, places, {.stream = stream}); });
    row += part.shape(0);
  }
  return rows;
}

}  // namespace tw::speech

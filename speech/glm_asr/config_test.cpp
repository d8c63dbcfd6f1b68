#include "speech/glm_asr/config.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/sha256.hpp"
#include "speech/glm_asr/model.hpp"
#include "tests/expect_error.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech.hpp"

namespace tw::speech {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::expect_error;

const fs::path kOriginal = fs::path(TILEWAVE_SOURCE_DIR) / "tests/data/glm_asr/gqa";

std::string read(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

/// A copy of a small checkpoint, to be changed.
class Checkpoint {
 public:
  Checkpoint() {
    for (const char* name : {"chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "processor_config.json",
                             "tokenizer.json", "tokenizer_config.json"})
      directory_.write(name, read(kOriginal / name));
  }
  fs::path file(const std::string& name) const { return directory_.path() / name; }
  void remove(const std::string& name) const { fs::remove(file(name)); }
  void write(const std::string& name, const std::string& text) const { directory_.write(name, text); }
  /// Sets what a JSON pointer names; null counts as missing.
  void set(const std::string& name, const char* pointer, const json& value) const {
    json document = json::parse(read(file(name)));
    document[json::json_pointer(pointer)] = value;
    write(name, document.dump());
  }
  void set(const char* pointer, const json& value) const { set("config.json", pointer, value); }
  /// Replaces the text `from` with one of the same length.
  void replace(const std::string& name, const std::string& from, const std::string& to) const {
    std::string text = read(file(name));
    ASSERT_EQ(from.size(), to.size());
    ASSERT_NE(text.find(from), std::string::npos) << from;
    write(name, text.replace(text.find(from), from.size(), to));
  }

  GlmAsrConfig config() const { return GlmAsrConfig::read(directory_.path()); }
  GlmAsr load() const {
    LoadOptions options;
    return GlmAsr::load(directory_.path(), options, Stream::standard(Device::cpu()));
  }
  /// Expects an error of one line that begins with the name of a file or the directory.
  void refused(std::initializer_list<std::string_view> parts) const {
    expect_error<FileError>([&] { load(); }, parts);
    try {
      load();
    } catch (const FileError& error) {
      const std::string message = error.what();
      EXPECT_TRUE(message.starts_with(directory_.path().string())) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    }
  }

 private:
  test::TemporaryDirectory directory_;
};

/// Expects that config.json with one value changed is refused.
void refused(const char* pointer, const json& value, std::initializer_list<std::string_view> parts) {
  SCOPED_TRACE(pointer);
  const Checkpoint checkpoint;
  checkpoint.set(pointer, value);
  checkpoint.refused(parts);
}

TEST(GlmAsrConfig, Values) {
  const GlmAsrConfig config = Checkpoint().config();
  EXPECT_EQ(config.encoder.hidden, 64);
  EXPECT_EQ(config.encoder.intermediate, 256);
  EXPECT_EQ(config.encoder.layers, 2);
  EXPECT_EQ(config.encoder.heads, 1);
  EXPECT_EQ(config.encoder.head_dim, 64);
  EXPECT_EQ(config.encoder.positions, 1500);
  EXPECT_EQ(config.encoder.rotary_dim, 32);
  EXPECT_EQ(config.encoder.rope_theta, 10000);
  EXPECT_EQ(config.encoder.activation, Activation::gelu_erf);
  EXPECT_EQ(config.decoder.kv_heads, 1);
  EXPECT_EQ(config.projector_activation, Activation::gelu_erf);
  EXPECT_EQ(config.audio_token, 262);
  EXPECT_EQ(config.end_tokens, std::vector<int>{256});
  EXPECT_EQ(config.mel.mel_bins, 128);
  EXPECT_EQ(config.prompt, "Please transcribe this audio into text");
}

TEST(GlmAsrConfig, FilesThatAreMissing) {
  expect_error<FileError>([] { GlmAsrConfig::read("/nowhere/at/all"); }, {"/nowhere/at/all: no such directory"});
  expect_error<FileError>([] { GlmAsrConfig::read(kOriginal / "config.json"); },
                          {"config.json: is not a directory; a checkpoint is a directory"});
  expect_error<FileError>([] { GlmAsrConfig::read(kOriginal / "config.json" / "x"); }, {"config.json/x: no such directory"});
  for (const char* name : {"config.json", "tokenizer.json"}) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint;
    checkpoint.remove(name);
    checkpoint.refused({name, "No such file"});
  }
  const Checkpoint weightless;
  weightless.remove("model.safetensors");
  weightless.refused({"neither model.safetensors nor model.safetensors.index.json"});
}

TEST(GlmAsrConfig, NamesOnTheHubAreExplained) {
  for (const char* given : {"zai-org/GLM-ASR-Nano-2512", "https://huggingface.co/zai-org/GLM-ASR-Nano-2512", "zai-org/GLM-ASR-Nano-2512/"})
    expect_error<FileError>([&] { GlmAsrConfig::read(given); },
                            {std::string(given) + ": no such directory; if this is a model's name on the Hugging Face hub",
                             "\"hf download zai-org/GLM-ASR-Nano-2512 --local-dir GLM-ASR-Nano-2512\""});
  for (const char* given : {"/zai-org/GLM", "./a/b", "a/b/c", "none", "../a", "a b/c", ""}) {
    SCOPED_TRACE(given);
    expect_error<FileError>(
        [&] { GlmAsrConfig::read(given); },
        {std::string(given) + ": no such directory; a checkpoint is a directory, for example what \"hf download zai-org/"});
  }
}

TEST(GlmAsrConfig, GitLfsPointersAreExplained) {
  for (const char* name : {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"}) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint;
    checkpoint.write(name, "version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, 'a') + "\nsize 4512345678\n");
    checkpoint.refused({std::string(name) + ": a git-LFS pointer", "\"git lfs pull\"", "\"hf download zai-org/GLM-ASR-Nano-2512"});
  }
}

TEST(GlmAsrConfig, FifosAreRefusedInPlaceOfFiles) {
  for (const char* name :
       {"config.json", "generation_config.json", "processor_config.json", "chat_template.jinja", "tokenizer.json", "model.safetensors"}) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint;
    checkpoint.remove(name);
    ASSERT_EQ(mkfifo(checkpoint.file(name).c_str(), 0600), 0);
    alarm(60);  // nobody writes to it: it would be waited for without end
    checkpoint.refused({std::string(name) + ": is a FIFO; allowed: a regular file"});
    alarm(0);
  }
}

TEST(GlmAsrConfig, SizesAreLimited) {
  const Checkpoint checkpoint;
  checkpoint.set("processor_config.json", "/default_transcription_prompt", std::string(16384, 'x'));
  EXPECT_EQ(checkpoint.config().prompt.size(), 16384u);
  checkpoint.set("processor_config.json", "/default_transcription_prompt", std::string(16385, 'x'));
  checkpoint.refused({"processor_config.json: default_transcription_prompt is \"xxx", "it has 16385 bytes; allowed: at most 16384"});
  checkpoint.write("chat_template.jinja", std::string((1 << 20) + 1, ' '));
  checkpoint.remove("processor_config.json");
  checkpoint.refused({"chat_template.jinja: 1048577 bytes; at most 1048576 are read"});
  checkpoint.write("generation_config.json", std::string((4 << 20) + 1, ' '));
  checkpoint.refused({"generation_config.json: 4194305 bytes; at most 4194304 are read"});
}

TEST(GlmAsrConfig, FilesThatMayBeMissing) {
  const Checkpoint checkpoint;
  for (const char* name : {"generation_config.json", "processor_config.json", "chat_template.jinja", "tokenizer_config.json"})
    checkpoint.remove(name);
  const GlmAsrConfig config = checkpoint.config();
  EXPECT_EQ(config.end_tokens, std::vector<int>{256});  // the text_config's
  EXPECT_EQ(config.mel.mel_bins, 128);
  EXPECT_EQ(config.prompt, "Please transcribe this audio into text");
}

TEST(GlmAsrConfig, FilesThatAreNoConfiguration) {
  for (const char* name : {"config.json", "generation_config.json", "processor_config.json"}) {
    for (const char* text : {"", "{", "[]", "3", "\xFF"}) {
      SCOPED_TRACE(std::string(name) + " with " + text);
      const Checkpoint checkpoint;
      checkpoint.write(name, text);
      checkpoint.refused({name});
    }
  }
}

TEST(GlmAsrConfig, AnotherArchitecture) {
  refused("/model_type", "whisper", {"config.json: model_type is \"whisper\"; only \"glmasr\" is supported"});
  refused("/model_type", nullptr, {"config.json: model_type is missing"});
  refused("/audio_config", nullptr, {"config.json: audio_config is missing; allowed: an object"});
  refused("/text_config", nullptr, {"config.json: text_config is missing; allowed: an object"});
  refused("/text_config/model_type", "qwen2", {"config.json: text_config.model_type is \"qwen2\""});
  refused("/audio_config", 5, {"config.json: audio_config is not an object"});
}

TEST(GlmAsrConfig, EncodersThatAreNotSupported) {
  refused("/audio_config/num_attention_heads", 3, {"audio_config.num_attention_heads is 3; allowed: a divisor of hidden_size, 64"});
  refused("/audio_config/head_dim", 48, {"config.json: audio_config.head_dim is 48; 64 and 128 are supported"});
  refused("/text_config/head_dim", 48, {"config.json: text_config.head_dim is 48; 64 and 128 are supported"});
  refused("/audio_config/num_key_value_heads", 2, {"audio_config.num_key_value_heads is 2; allowed: 1, as many as num_attention_heads"});
  refused("/audio_config/intermediate_size", 128,
          {"audio_config.intermediate_size is 128; allowed: 256, 4 times hidden_size, because so many positions make one embedding"});
  refused("/audio_config/hidden_act", "swiglu", {"audio_config.hidden_act is \"swiglu\"; \"gelu\""});
  refused("/projector_hidden_act", 3, {"projector_hidden_act is 3; allowed: a string"});
  refused("/audio_config/rope_parameters/rope_type", "yarn", {"audio_config.rope_parameters.rope_type is \"yarn\""});
  refused("/audio_config/rope_parameters/partial_rotary_factor", 0.01, {"partial_rotary_factor is 0.01; it leaves nothing to turn"});
  refused("/audio_config/max_position_embeddings", 1000,
          {"audio_config.max_position_embeddings is 1000; allowed: half of a window's 3000 frames"});
  refused("/audio_config/hidden_size", 18446744073709551615u,
          {"audio_config.hidden_size is 18446744073709551615; allowed: an integer from 1"});
  refused("/audio_token_id", 263, {"audio_token_id is 263; allowed: an integer from 0 to 262"});
}

TEST(GlmAsrConfig, TheProcessorAgrees) {
  const auto processor_refused = [](const char* pointer, const json& value, std::initializer_list<std::string_view> parts) {
    SCOPED_TRACE(pointer);
    const Checkpoint checkpoint;
    checkpoint.set("processor_config.json", pointer, value);
    checkpoint.refused(parts);
  };
  processor_refused("/feature_extractor/feature_size", 80,
                    {"config.json: audio_config.num_mel_bins is 128; the processor's feature_size is 80"});
  processor_refused("/feature_extractor/sampling_rate", 8000, {"processor_config.json: feature_extractor.sampling_rate is 8000"});
  processor_refused(
      "/feature_extractor/hop_length", 16,
      {"processor_config.json: feature_extractor.hop_length is 16 and chunk_length 30: a window of 30000 frames; at most 16384"});
  processor_refused("/feature_extractor/chunk_length", 20, {"max_position_embeddings is 1500; allowed: half of a window's 2000 frames"});
  processor_refused("/default_transcription_prompt", 3, {"processor_config.json: default_transcription_prompt is 3; allowed: a string"});
  const Checkpoint checkpoint;  // the older file of the same settings
  checkpoint.write("preprocessor_config.json", R"({"feature_size": 80})");
  EXPECT_EQ(checkpoint.config().mel.mel_bins, 128);
  checkpoint.remove("processor_config.json");
  checkpoint.refused({"num_mel_bins is 128; the processor's feature_size is 80"});
  checkpoint.set("/audio_config/num_mel_bins", 80);
  EXPECT_EQ(checkpoint.config().mel.mel_bins, 80);
}

TEST(GlmAsrConfig, EndTokens) {
  const Checkpoint checkpoint;
  const auto ends = [&](const json& generation, const json& text, const json& top) {
    checkpoint.set("generation_config.json", "/eos_token_id", generation);
    checkpoint.set("/text_config/eos_token_id", text);
    checkpoint.set("/eos_token_id", top);
    return checkpoint.config().end_tokens;
  };
  EXPECT_EQ(ends({1, 2}, 3, 4), (std::vector<int>{1, 2}));
  EXPECT_EQ(ends(nullptr, {3, 5}, 4), (std::vector<int>{3, 5}));
  EXPECT_EQ(ends(json::array(), nullptr, 4), std::vector<int>{4});
  expect_error<FileError>([&] { ends(nullptr, nullptr, nullptr); },
                          {"config.json: text_config.eos_token_id is missing; without it a text never ends"});
  expect_error<FileError>([&] { ends(263, 3, 4); }, {"generation_config.json: eos_token_id is 263; allowed: an integer from 0 to 262"});
  expect_error<FileError>([&] { ends(nullptr, json{3, -1}, 4); }, {"text_config.eos_token_id is [3,-1]"});
  checkpoint.remove("generation_config.json");
  checkpoint.set("/text_config/eos_token_id", 7);
  EXPECT_EQ(checkpoint.config().end_tokens, std::vector<int>{7});
}

TEST(GlmAsrConfig, SegmentsAreAsLongAsTheCheckpointSays) {
  const Checkpoint checkpoint;
  EXPECT_EQ(checkpoint.config().segment_seconds, 30);
  checkpoint.set("generation_config.json", "/segment_seconds", 12.5);
  EXPECT_EQ(checkpoint.config().segment_seconds, 12.5);
  for (const double seconds : {0.5, 31.0}) {
    checkpoint.set("generation_config.json", "/segment_seconds", seconds);
    checkpoint.refused({"generation_config.json: segment_seconds is ", "from 1 to 30"});
  }
}

TEST(GlmAsrConfig, RotarySettingsInEitherPlace) {
  const Checkpoint checkpoint;
  checkpoint.set("/audio_config/partial_rotary_factor", 0.25);
  checkpoint.set("/audio_config/rope_theta", 500);
  EXPECT_EQ(checkpoint.config().encoder.rotary_dim, 32);  // what rope_parameters has counts
  EXPECT_EQ(checkpoint.config().encoder.rope_theta, 10000);
  checkpoint.set("/audio_config/rope_parameters", nullptr);
  EXPECT_EQ(checkpoint.config().encoder.rotary_dim, 16);
  EXPECT_EQ(checkpoint.config().encoder.rope_theta, 500);
  checkpoint.set("/audio_config/partial_rotary_factor", nullptr);
  checkpoint.set("/audio_config/rope_theta", nullptr);
  EXPECT_EQ(checkpoint.config().encoder.rotary_dim, 32);
  EXPECT_EQ(checkpoint.config().encoder.rope_theta, 10000);
}

TEST(GlmAsrConfig, NullMeansTheDefault) {
  const Checkpoint checkpoint;
  for (const char* pointer : {"/audio_config/num_key_value_heads", "/audio_config/head_dim", "/audio_config/max_position_embeddings",
                              "/audio_config/hidden_act", "/text_config/num_key_value_heads", "/projector_hidden_act"})
    checkpoint.set(pointer, nullptr);
  const GlmAsrConfig config = checkpoint.config();
  EXPECT_EQ(config.encoder.head_dim, 64);
  EXPECT_EQ(config.encoder.positions, 1500);
  EXPECT_EQ(config.decoder.kv_heads, 2);
}

TEST(GlmAsrConfig, TemplatesOfOtherModels) {
  const char* const chatml =
      "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}";
  const Checkpoint checkpoint;
  checkpoint.write("chat_template.jinja", chatml);
  checkpoint.refused({"chat_template.jinja: the chat template does not contain <|user|>: it is not GLM-ASR's"});
  checkpoint.write("chat_template.jinja", "<|user|>{{ text }}<|assistant|>");
  checkpoint.refused({"does not contain <|begin_of_audio|>"});
  checkpoint.remove("chat_template.jinja");
  EXPECT_NO_THROW(checkpoint.config());
  checkpoint.set("tokenizer_config.json", "/chat_template", chatml);
  checkpoint.refused({"tokenizer_config.json: the chat template does not contain <|user|>"});
  checkpoint.set("tokenizer_config.json", "/chat_template", read(kOriginal / "chat_template.jinja"));
  EXPECT_NO_THROW(checkpoint.config());
}

TEST(GlmAsrLoad, TruncatedWeights) {
  const std::string whole = read(kOriginal / "model.safetensors");
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{100}, whole.size() / 2, whole.size() - 1}) {
    SCOPED_TRACE(size);
    const Checkpoint checkpoint;
    checkpoint.write("model.safetensors", whole.substr(0, size));
    checkpoint.refused({"model.safetensors: "});
  }
}

TEST(GlmAsrLoad, AConfigurationThatTheWeightsContradict) {
  refused("/text_config/num_hidden_layers", 3,
          {"the weights do not fit config.json: ", "layers.2.input_layernorm.weight [64] is missing",
           "layers.2.self_attn.q_proj.weight [128, 64] is missing", "layers.2.mlp.down_proj.weight [64, 96] is missing"});
  refused("/text_config/num_hidden_layers", 1,
          {"model.language_model.layers.1.input_layernorm.weight is not part of this model",
           "model.language_model.layers.1.mlp.up_proj.weight is not part of this model"});
  refused("/text_config/num_key_value_heads", 2,
          {"model.language_model.layers.0.self_attn.k_proj.weight is [64, 64], which must be [128, 64]",
           "model.language_model.layers.1.self_attn.v_proj.weight is [64, 64], which must be [128, 64]"});
  refused("/text_config/vocab_size", 300,
          {"embed_tokens.weight is [263, 64], which must be [300, 64]", "lm_head.weight is [263, 64], which must be [300, 64]"});
  refused("/audio_config/num_hidden_layers", 3, {"audio_tower.layers.2.self_attn.q_proj.bias [64] is missing"});
}

TEST(GlmAsrLoad, TheLayoutFromBeforeTheConversion) {
  const Checkpoint checkpoint;
  checkpoint.replace("model.safetensors", "\"model.audio_tower.norm.bias\"", "\"audio_encoder.whisper.conv1\"");
  checkpoint.refused({"model.safetensors: audio_encoder.whisper.conv1: the layout from before the conversion", "is not read"});
}

TEST(GlmAsrLoad, TokenizersThatDoNotFit) {
  const Checkpoint checkpoint;
  checkpoint.replace("tokenizer.json", "<|user|>", "<|aser|>");
  checkpoint.refused({"tokenizer.json: has no token <|user|>, which GLM-ASR's prompt needs"});
  const Checkpoint larger;
  json tokenizer = json::parse(read(larger.file("tokenizer.json")));
  json token = tokenizer["added_tokens"][0];
  token["id"] = 263;
  token["content"] = "Please";
  tokenizer["added_tokens"].push_back(token);
  larger.write("tokenizer.json", tokenizer.dump());
  larger.refused({"tokenizer.json: has tokens up to 263; config.json has a vocabulary of 263"});
}

const GlmAsr& model() {
  static const GlmAsr loaded = Checkpoint().load();
  return loaded;
}

TEST(ConvertedCheckpoints, LoadWithoutAnOption) {
  for (const char* format : {"int8", "fp8", "int4:32:zeros"}) {
    SCOPED_TRACE(format);
    const test::TemporaryDirectory directory;
    const fs::path converted = directory.path() / "converted";
    const QuantizedMatrix::Layout layout = parse_weight_layout(format);
    convert_checkpoint(kOriginal, converted / "", layout);
    EXPECT_EQ(read(converted / "tokenizer.json"), read(kOriginal / "tokenizer.json"));
    EXPECT_LT(fs::file_size(converted / "model.safetensors"), fs::file_size(kOriginal / "model.safetensors"));
    std::istringstream sums(read(converted / "SHA256SUMS"));
    for (const char* name : {"model.safetensors", "config.json"}) {
      std::string sum, file;
      sums >> sum >> file;
      EXPECT_EQ(file, name);
      EXPECT_EQ(sum, hex(Sha256().add(read(converted / name)).finish()));
    }
    // Nothing else is left behind.
    EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), fs::directory_iterator()), 1);

    const Stream stream = Stream::standard(Device::cpu());
    LoadOptions plain, rounding = {.weights = layout};
    const GlmAsr from_file = GlmAsr::load(converted, plain, stream), in_memory = GlmAsr::load(kOriginal, rounding, stream);
    EXPECT_EQ(plain.weights, layout);
    EXPECT_EQ(plain.dtype, rounding.dtype);
    const std::vector<int> ids = {1, 2, 3};
    models::KvCache a = from_file.decoder.make_cache(8, stream), b = in_memory.decoder.make_cache(8, stream);
    EXPECT_EQ(max_difference(from_file.decoder.prefill(from_file.decoder.embed(ids, stream), a, stream),
                             in_memory.decoder.prefill(in_memory.decoder.embed(ids, stream), b, stream)),
              0);

    LoadOptions other = {.weights = {WeightFormat::int4, 32}};
    expect_error<InvalidArgument>([&] { GlmAsr::load(converted, other, stream); }, {converted.string(), "the weights are in", format});
    expect_error<InvalidArgument>([&] { convert_checkpoint(converted, directory.path() / "twice", layout); }, {"in", format, "already"});
    expect_error<FileError>([&] { convert_checkpoint(kOriginal, converted, layout); }, {converted.string(), "exists"});
    fs::resize_file(converted / "model.safetensors", fs::file_size(converted / "model.safetensors") - 1);
    expect_error<FileError>([&] { GlmAsr::load(converted, plain, stream); }, {"model.safetensors"});
  }
}

TEST(ConvertedCheckpoints, NothingIsLeftAfterAnError) {
  const test::TemporaryDirectory directory;
  expect_error<FileError>([&] { convert_checkpoint("/nonexistent", directory.path() / "a", {}); }, {"/nonexistent"});
  expect_error<InvalidArgument>([&] { convert_checkpoint(kOriginal, directory.path() / "a", {.format = WeightFormat::plain}); }, {"plain"});
  expect_error<InvalidArgument>(
      [&] {
        convert_checkpoint(kOriginal, directory.path() / "a", {WeightFormat::int4, 128});
      },
      {"multiple of 128"});
  expect_error<FileError>([&] { convert_checkpoint(kOriginal, directory.path() / "no" / "a", {}); }, {"a.partial"});
  const Checkpoint truncated;
  truncated.replace("model.safetensors", "\"BF16\"", "\"BF17\"");
  expect_error<FileError>([&] { convert_checkpoint(truncated.file(""), directory.path() / "a", {}); }, {"BF17"});
  EXPECT_TRUE(fs::is_empty(directory.path()));
}

TEST(GlmAsrConfig, WeightsOfConvertedCheckpoints) {
  EXPECT_EQ(Checkpoint().config().weights.format, WeightFormat::plain);
  const json int4 = {{"quant_method", "tilewave"}, {"format", "int4"}, {"group", 128}, {"zero_points", true}};
  const Checkpoint checkpoint;
  checkpoint.set("/quantization_config", int4);
  EXPECT_EQ(checkpoint.config().weights, (QuantizedMatrix::Layout{WeightFormat::int4, 128, true}));
  const auto with = [&](const char* field, const json& value) {
    json changed = int4;
    changed[field] = value;
    return changed;
  };
  refused("/quantization_config", with("quant_method", "awq"), {"quantization_config.quant_method", "awq", "tilewave"});
  refused("/quantization_config", with("format", "int5"), {"quantization_config.format", "int5"});
  refused("/quantization_config", with("group", 64), {"quantization_config.group", "64", "32 and 128"});
  refused("/quantization_config", with("zero_points", "yes"), {"quantization_config.zero_points"});
  // The weights are not what it says.
  refused("/quantization_config", {{"quant_method", "tilewave"}, {"format", "int8"}}, {"BF16; for weights in int8 it must be I8"});
}

TEST(GlmAsrPrompt, IsTheTemplates) {
  const models::Tokenizer& tokenizer = model().tokenizer;
  EXPECT_EQ(model().prompt("Hi there", 2),
            tokenizer.encode("<|user|>\n<|begin_of_audio|><|pad|><|pad|><|end_of_audio|><|user|>\nHi there<|assistant|>\n",
                             {.parse_special_tokens = true}));
}

TEST(GlmAsrPrompt, SpecialTokensOfAUserAreText) {
  for (const char* special : {"<|user|>", "<|assistant|>", "<|pad|>", "<|end_of_audio|>", "<|endoftext|>"}) {
    SCOPED_TRACE(special);
    const std::string text = std::string("a ") + special + " b";
    const std::vector<int> plain = model().prompt("a  b", 3), ids = model().prompt(text, 3);
    for (int id = 256; id < 263; ++id) EXPECT_EQ(std::count(ids.begin(), ids.end(), id), std::count(plain.begin(), plain.end(), id)) << id;
    EXPECT_GT(ids.size(), plain.size());
    EXPECT_NE(model().tokenizer.decode(ids).find(text), std::string::npos);
  }
}

TEST(GlmAsrEmbed, AudioStandsInItsPlaces) {
  const Stream stream = Stream::standard(Device::cpu());
  const std::vector<int> prompt = model().prompt("x", 5);
  const Tensor first = Tensor::random({2, 64}, DType::f32, 1), none = Tensor::empty({0, 64}, DType::f32),
               second = Tensor::random({3, 64}, DType::f32, 2);
  const Tensor rows = model().embed(prompt, std::vector<Tensor>{first, none, second}, stream);
  const Tensor text = model().decoder.embed(prompt, stream);
  ASSERT_EQ(rows.shape(), (Shape{static_cast<std::int64_t>(prompt.size()), 64}));
  const auto begin = std::find(prompt.begin(), prompt.end(), 262) - prompt.begin();
  for (std::int64_t row = 0; row < rows.shape(0); ++row) {
    const std::int64_t place = row - begin;
    const Tensor& expected = place >= 0 && place < 2 ? first : place >= 2 && place < 5 ? second : text;
    const std::int64_t from = &expected == &first ? place : &expected == &second ? place - 2 : row;
    EXPECT_EQ(max_difference(rows.slice(0, row, row + 1), expected.slice(0, from, from + 1)), 0) << row;
  }
}

TEST(GlmAsrEmbed, AsManyEmbeddingsAsPlaces) {
  const Stream stream = Stream::standard(Device::cpu());
  const std::vector<int> prompt = model().prompt("x", 5);
  const auto rows = [](std::int64_t n) { return Tensor::zeros({n, 64}, DType::f32); };
  for (const std::int64_t n : {0, 4, 6})
    expect_error<InvalidArgument>([&] { model().embed(prompt, std::vector<Tensor>{rows(n)}, stream); },
                                  {"the prompt has places for 5 audio embeddings; there are ", std::to_string(n)});
  expect_error<InvalidArgument>([&] { model().embed(prompt, {}, stream); }, {"places for 5 audio embeddings; there are 0"});
  expect_error<InvalidArgument>([&] { model().embed(model().prompt("x", 0), std::vector<Tensor>{rows(1)}, stream); },
                                {"places for 0 audio embeddings; there are 1"});
}

}  // namespace
}  // namespace tw::speech

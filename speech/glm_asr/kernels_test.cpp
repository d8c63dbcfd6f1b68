#include "speech/glm_asr/kernels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/registry.hpp"
#include "runtime/format.hpp"
#include "speech/glm_asr/model.hpp"
#include "tests/support.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/speech.hpp"

namespace tw::speech {
namespace {

using nlohmann::json;
using KernelSet = std::set<std::tuple<std::string, std::string, std::string>>;

KernelSet set_of(const std::vector<KernelSpec>& specs) {
  KernelSet all;
  for (const KernelSpec& spec : specs) all.insert({spec.type, spec.target, spec.source});
  return all;
}

/// A checkpoint with the shapes of GLM-ASR-Nano-2512, written independently of nano_shapes() (tools/random_checkpoint.py has them too). Its
/// weights are a hole in a file. `layers` of the encoder and of the decoder.
class SparseNano {
 public:
  explicit SparseNano(int layers) : layers_(layers) {
    const std::filesystem::path digits = std::filesystem::path(TILEWAVE_SOURCE_DIR) / "assets/digits";
    for (const char* name : {"chat_template.jinja", "generation_config.json", "processor_config.json", "tokenizer.json"})
      std::filesystem::copy(digits / name, directory_.path() / name);
    json config = json::parse(std::ifstream(digits / "config.json"));
    json &audio = config["audio_config"], &text = config["text_config"];
    audio.update({{"hidden_size", 1280},
                  {"intermediate_size", 5120},
                  {"num_hidden_layers", layers},
                  {"num_attention_heads", 20},
                  {"num_key_value_heads", 20},
                  {"partial_rotary_factor", 0.5}});
    text.update({{"hidden_size", 2048},
                 {"intermediate_size", 6144},
                 {"num_hidden_layers", layers},
                 {"num_attention_heads", 16},
                 {"num_key_value_heads", 4},
                 {"head_dim", 128},
                 {"vocab_size", 59264},
                 {"max_position_embeddings", 8192}});
    directory_.write("config.json", config.dump());
    write_weights();
  }
  const std::filesystem::path& path() const { return directory_.path(); }

 private:
  void add(const std::string& name, const std::vector<std::int64_t>& shape) {
    std::int64_t bytes = 2;
    for (const std::int64_t extent : shape) bytes *= extent;
    header_[name] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {end_, end_ + bytes}}};
    end_ += bytes;
  }
  void add_with_bias(const std::string& name, const std::vector<std::int64_t>& shape) {
    add(name + ".weight", shape);
    add(name + ".bias", {shape[0]});
  }

  void write_weights() {
    add_with_bias("audio_tower.conv1", {1280, 128, 3});
    add_with_bias("audio_tower.conv2", {1280, 1280, 3});
    add_with_bias("audio_tower.norm", {1280});
    add_with_bias("multi_modal_projector.linear_1", {4096, 5120});
    add_with_bias("multi_modal_projector.linear_2", {2048, 4096});
    add("language_model.model.embed_tokens.weight", {59264, 2048});
    add("language_model.model.norm.weight", {2048});
    add("language_model.lm_head.weight", {59264, 2048});
    for (int i = 0; i < layers_; ++i) {
      const std::string encoder = tw::format("audio_tower.layers.{}.", i), decoder = tw::format("language_model.model.layers.{}.", i);
      for (const char* name : {"input_layernorm", "post_attention_layernorm"}) {
        add_with_bias(encoder + name, {1280});
        add(decoder + name + ".weight", {2048});
      }
      for (const char* name : {"q_proj", "v_proj", "o_proj"}) add_with_bias(encoder + "self_attn." + name, {1280, 1280});
      add(encoder + "self_attn.k_proj.weight", {1280, 1280});
      add_with_bias(encoder + "mlp.fc1", {5120, 1280});
      add_with_bias(encoder + "mlp.fc2", {1280, 5120});
      for (const char* name : {"q_proj", "o_proj"}) add(decoder + "self_attn." + name + ".weight", {2048, 2048});
      for (const char* name : {"k_proj", "v_proj"}) add(decoder + "self_attn." + name + ".weight", {512, 2048});
      for (const char* name : {"gate_proj", "up_proj"}) add(decoder + "mlp." + name + ".weight", {6144, 2048});
      add(decoder + "mlp.down_proj.weight", {2048, 6144});
    }
    std::string text = header_.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    std::string size;
    for (int i = 0; i < 8; ++i) size += static_cast<char>(text.size() >> (8 * i));
    std::filesystem::resize_file(directory_.write("model.safetensors", size + text), 8 + text.size() + static_cast<std::uintmax_t>(end_));
  }

  int layers_;
  test::TemporaryDirectory directory_;
  json header_;
  std::int64_t end_ = 0;
};

TEST(GlmAsrKernels, ShapesAreNanos) {
  const SparseNano nano(1);
  const GlmAsrConfig read = GlmAsrConfig::read(nano.path()), shapes = nano_shapes();
  const auto encoder = [](const GlmAsrConfig& c) {
    const GlmAsrConfig::Encoder& e = c.encoder;
    return std::tuple(e.hidden, e.intermediate, e.layers, e.heads, e.head_dim, e.positions, e.rotary_dim, e.activation);
  };
  const auto decoder = [](const GlmAsrConfig& c) {
    const models::LlamaConfig& d = c.decoder;
    return std::tuple(d.hidden, d.intermediate, d.layers, d.heads, d.kv_heads, d.head_dim, d.vocabulary, d.max_positions);
  };
  EXPECT_EQ(encoder(shapes), encoder(read));
  EXPECT_EQ(decoder(shapes), decoder(read));
  EXPECT_EQ(shapes.projector_activation, read.projector_activation);
  EXPECT_EQ(shapes.mel, read.mel);
}

TEST(GlmAsrKernels, DoNotDependOnTheNumberOfLayers) {
  const SparseNano nano(3);
  const KernelSet whole = set_of(kernels_of(nano.path(), {}, typical_gpu("sm_90a")));
  EXPECT_EQ(whole, set_of(nano_kernels("sm_90a")));
  EXPECT_GT(whole.size(), 20u);
}

/// Weights in fewer bits are decoded by the kernels that read them as they are stored.
TEST(GlmAsrKernels, ContainThoseOfWeightsInFewerBits) {
  using Layout = QuantizedMatrix::Layout;
  for (const Layout& layout : {Layout{WeightFormat::int8}, Layout{WeightFormat::int4, 32}}) {
    models::Weights weights("GLM-ASR-Nano-2512", {}, canonical_weight_name);
    weights.set_layouts({.format = WeightFormat::plain}, layout);
    const std::vector<KernelSpec> found = kernels_of(nano_shapes(), weights, DType::bf16, typical_gpu("sm_90a"));
    for (const char* tile : {", 32, 8, ", ", 32, 16, ", ", 16, 8, "}) {
      const auto named = [&](const KernelSpec& spec) {
        return spec.type.find("SkinnyDequantGemm") != std::string::npos && spec.type.find(tile) != std::string::npos;
      };
      EXPECT_TRUE(std::any_of(found.begin(), found.end(), named)) << text_of(layout) << tile;
    }
  }
}

/// Transcribes noise of random length in random batches on a dry run, as a user would, and looks for each launched kernel among those that
/// were found in advance.
TEST(GlmAsrKernels, ContainWhatTranscribingLaunches) {
  const SparseNano nano(1);
  const std::vector<KernelSpec> found = nano_kernels("sm_90a");
  const KernelSet advance = set_of(found);
  std::mt19937_64 generator = test::random_engine();
  const auto below = [&](int limit) { return std::uniform_int_distribution(0, limit - 1)(generator); };
  DryRun run(typical_gpu("sm_90a"));
  {
    const Transcriber transcriber(nano.path(), {.device = run.device()});
    const auto transcribe = [&](int files, double seconds, const TranscribeOptions& options) {
      const std::vector<float> samples(static_cast<std::size_t>(seconds * 16000), 0.01f);
      const std::vector<std::span<const float>> all(static_cast<std::size_t>(files), samples);
      const Transcripts result = transcriber.transcribe(all, options);
      for (const Transcript& transcript : result.files)
        EXPECT_EQ(transcript.segments.at(0).tokens.size(), static_cast<std::size_t>(options.max_new_tokens));
    };
    TranscribeOptions options{.segmentation = Segmentation::none, .max_new_tokens = 2, .ignore_end = true};
    for (int i = 0; i < 4; ++i) {
      options.batch = 1 + below(16);
      options.prompt = std::string(static_cast<std::size_t>(below(4000)), 'x');  // a token each
      transcribe(options.batch, 0.1 + 0.001 * below(1000), options);
    }
    options.batch = 1;
    transcribe(1, 30.0 * (1 + below(8)) + 0.5, options);  // several windows in one prompt
  }
  const std::vector<KernelSpec> launched = run.kernels();
  EXPECT_GT(launched.size(), 15u);
  for (const KernelSpec& spec : launched)
    EXPECT_TRUE(advance.contains({spec.type, spec.target, spec.source})) << spec.type << " for " << spec.target;
}

TEST(GlmAsrKernels, CheckpointsThatDoNotFitAreRefused) {
  const SparseNano nano(2);
  json config = json::parse(std::ifstream(nano.path() / "config.json"));
  config["text_config"]["num_hidden_layers"] = 1;
  std::ofstream(nano.path() / "config.json") << config;
  EXPECT_THROW(kernels_of(nano.path(), {}, typical_gpu("sm_90a")), FileError);
}

}  // namespace
}  // namespace tw::speech

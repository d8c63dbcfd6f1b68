#include "models/text_model.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tests/expect_error.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

const std::filesystem::path kBitNet = std::filesystem::path(TILEWAVE_SOURCE_DIR) / "tests/data/bitnet/offline";

/// Writes a Llama checkpoint with one layer, random weights in f32, and BitNet's tokenizer.
void write_llama(const std::filesystem::path& directory) {
  constexpr int kHidden = 128, kIntermediate = 96, kVocabulary = 80, kKv = 64;
  std::ofstream(directory / "config.json") << nlohmann::json{
      {"model_type", "llama"},    {"hidden_size", kHidden},   {"intermediate_size", kIntermediate}, {"num_hidden_layers", 1},
      {"num_attention_heads", 2}, {"num_key_value_heads", 1}, {"vocab_size", kVocabulary},          {"max_position_embeddings", 64}};
  std::filesystem::copy_file(kBitNet / "tokenizer.json", directory / "tokenizer.json");
  nlohmann::ordered_json header;
  std::vector<float> values;
  std::mt19937 random(1);
  const auto add = [&](const std::string& name, const Shape& shape) {
    std::size_t count = 1;
    for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
    const std::size_t begin = values.size() * sizeof(float);
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(shape.back())));
    for (std::size_t i = 0; i < count; ++i) values.push_back(shape.size() == 1 ? 1 : normal(random));
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, values.size() * sizeof(float)}}};
  };
  add("model.embed_tokens.weight", {kVocabulary, kHidden});
  const std::string layer = "model.layers.0.";
  add(layer + "input_layernorm.weight", {kHidden});
  add(layer + "self_attn.q_proj.weight", {kHidden, kHidden});
  add(layer + "self_attn.k_proj.weight", {kKv, kHidden});
  add(layer + "self_attn.v_proj.weight", {kKv, kHidden});
  add(layer + "self_attn.o_proj.weight", {kHidden, kHidden});
  add(layer + "post_attention_layernorm.weight", {kHidden});
  add(layer + "mlp.gate_proj.weight", {kIntermediate, kHidden});
  add(layer + "mlp.up_proj.weight", {kIntermediate, kHidden});
  add(layer + "mlp.down_proj.weight", {kHidden, kIntermediate});
  add("model.norm.weight", {kHidden});
  add("lm_head.weight", {kVocabulary, kHidden});
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t size = text.size();
  std::ofstream file(directory / "model.safetensors", std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof size) << text;
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
}

TEST(TextModel, RoundsWeightsOnRequest) {
  const test::TemporaryDirectory directory;
  write_llama(directory.path());
  const Stream stream = Stream::standard(Device::cpu());
  const std::vector<int> prompt = {5, 17, 60, 8, 33};
  const auto load = [&](const QuantizedMatrix::Layout& weights) { return TextModel::load(directory.path(), Device::cpu(), {}, weights); };
  const auto scores_of = [&](const TextModel& model) {
    KvCache cache = model.decoder().make_cache(64, stream);
    return model.decoder().prefill(model.decoder().embed(prompt, stream), cache, stream);
  };
  const TextModel plain = load({.format = WeightFormat::plain});
  const Tensor expected = scores_of(plain);
  const auto error_of = [&](const TextModel& rounded) {
    const Tensor given = scores_of(rounded);
    double error = 0, norm = 0;
    for (std::int64_t i = 0; i < given.numel(); ++i) {
      const auto exact = static_cast<double>(expected.data<float>()[i]);
      const double distance = static_cast<double>(given.data<float>()[i]) - exact;
      error += distance * distance, norm += exact * exact;
    }
    return std::sqrt(error / norm);
  };
  // A weight's rounding error is 0.29 of a step: of the largest of a row over 127, or of 32 numbers over 8.
  const TextModel int8 = load({.format = WeightFormat::int8}), int4 = load({.format = WeightFormat::int4, .zero_points = true});
  EXPECT_LT(error_of(int8), 0.03);
  EXPECT_LT(error_of(int4), 0.3);
  EXPECT_GT(error_of(int4), error_of(int8));
  EXPECT_LT(int8.decoder().bytes_per_step(), plain.decoder().bytes_per_step() / 3);
  EXPECT_LT(int4.decoder().bytes_per_step(), int8.decoder().bytes_per_step());
}

TEST(TextModel, RefusesToRoundTernaryWeights) {
  test::expect_error<InvalidArgument>([] { TextModel::load(kBitNet, Device::cpu(), {}, {.format = WeightFormat::int8}); },
                                      {"weights are int8", "BitNet"});
}

}  // namespace
}  // namespace tw::models

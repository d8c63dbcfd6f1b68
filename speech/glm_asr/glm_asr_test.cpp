#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "models/safetensors.hpp"
#include "speech/glm_asr/model.hpp"
#include "tests/support.hpp"
#include "tilewave/elementwise.hpp"

namespace tw::speech {
namespace {

constexpr int kTokens = 64;

std::string data(const std::string& name) { return std::string(TILEWAVE_SOURCE_DIR) + "/tests/data/glm_asr/" + name; }

/// The audio that tools/goldens/glm_asr.py gave the reference.
std::vector<float> audio(int windows) {
  const double seconds[] = {5.3, 41.7, 70.1};
  std::vector<float> samples(static_cast<std::size_t>(std::lround(seconds[windows - 1] * 16000)));
  std::int64_t state = 12345, phase = 0;
  for (std::size_t n = 0; n < samples.size(); ++n) {
    const auto i = static_cast<std::int64_t>(n);
    state = (1103515245 * state + 12345) % (std::int64_t{1} << 31);
    phase = (phase + 400 + i / 1600 * 37 % 1500) % 65536;
    const std::int64_t triangle = std::abs(phase - 32768) - 16384, loudness = i / 800 * 29 % 97;
    // Python's // rounds down.
    const std::int64_t product = triangle * loudness;
    const std::int64_t tone = product >= 0 ? product / 128 : -((-product + 127) / 128);
    samples[n] = static_cast<float>(tone + (state >> 16) % 2048 - 1024) / 32768;
  }
  return samples;
}

/// Relative L2 distance of two tensors of one number of elements.
double distance(const Tensor& a, const Tensor& reference) {
  EXPECT_EQ(a.numel(), reference.numel());
  const Tensor x = a.to(DType::f32), y = reference.to(DType::f32);
  double error = 0, norm = 0;
  for (std::int64_t i = 0; i < std::min(x.numel(), y.numel()); ++i) {
    const double d = static_cast<double>(x.data<float>()[i]) - y.data<float>()[i];
    error += d * d;
    norm += static_cast<double>(y.data<float>()[i]) * y.data<float>()[i];
  }
  return std::sqrt(error / norm);
}

/// Every `step`th row of the second dimension of [windows, rows, columns], from `first`.
Tensor every(const Tensor& x, std::int64_t first, std::int64_t step) {
  const std::int64_t rows = (x.shape(1) - first + step - 1) / step;
  const Tensor picked = Tensor::empty({x.shape(0), rows, x.shape(2)}, x.dtype());
  for (std::int64_t i = 0; i < rows; ++i) picked.slice(1, i, i + 1).copy_from(x.slice(1, first + i * step, first + i * step + 1));
  return picked;
}

class GlmAsrParity : public testing::TestWithParam<std::tuple<std::string, int>> {};

// Every stage against transformers' on the same checkpoint, and the tokens that follow.
TEST_P(GlmAsrParity, EveryStageAndSixtyFourTokens) {
  const auto& [name, windows] = GetParam();
  LoadOptions options{.dtype = DType::f32};
  const Stream stream = Stream::standard(Device::cpu());
  const GlmAsr model = GlmAsr::load(data(name), options, stream);
  const models::SafeTensors goldens = models::SafeTensors::open(data(name) + "/golden.safetensors");
  const auto golden = [&](const char* stage) { return goldens.tensor(std::to_string(windows) + "." + stage); };
  constexpr double kLargest = 1e-4;

  const MelFeatures mel = model.mel.extract(audio(windows));
  ASSERT_EQ(mel.features.shape(0), windows);
  EXPECT_LE(distance(every(mel.features, 3, 200), golden("mel")), kLargest);
  const Tensor x = model.encoder.convolve(mel.features, stream);
  EXPECT_LE(distance(every(x, 1, 100), golden("conv")), kLargest);
  model.encoder.run_layer(0, x, stream);
  EXPECT_LE(distance(every(x, 1, 100), golden("layer_1")), kLargest);
  for (int layer = 1; layer < model.config.encoder.layers; ++layer) model.encoder.run_layer(layer, x, stream);
  const Tensor encoded = model.encoder.normalise(x, stream);
  EXPECT_LE(distance(every(encoded, 1, 100), golden("encoder")), kLargest);
  const Tensor embeddings = model.encoder.project(encoded, stream);
  EXPECT_EQ(max_difference(embeddings, model.encoder.encode(mel.features, stream)), 0);

  std::vector<Tensor> audio_rows;
  int places = 0;
  for (std::int64_t w = 0; w < windows; ++w) {
    const int real = GlmAsrConfig::embeddings(mel.real_frames[static_cast<std::size_t>(w)]);
    audio_rows.push_back(embeddings.select(0, w).slice(0, 0, real));
    places += real;
  }
  const Tensor joined = Tensor::empty({1, places, embeddings.shape(2)}, DType::f32);
  std::int64_t row = 0;
  for (const Tensor& rows : audio_rows) {
    joined.select(0, 0).slice(0, row, row + rows.shape(0)).copy_from(rows);
    row += rows.shape(0);
  }
  EXPECT_LE(distance(every(joined, 0, 8), golden("projector")), kLargest);

  const std::vector<int> prompt = model.prompt(model.config.prompt, places);
  const Tensor expected_prompt = golden("prompt");
  EXPECT_EQ(prompt, std::vector<int>(expected_prompt.data<std::int32_t>(), expected_prompt.data<std::int32_t>() + expected_prompt.numel()));

  models::KvCache cache = model.decoder.make_cache(static_cast<int>(prompt.size()) + kTokens, stream);
  Tensor logits = model.decoder.prefill(model.embed(prompt, audio_rows, stream), cache, stream);
  EXPECT_LE(distance(logits, golden("logits")), kLargest);
  std::vector<int> tokens;
  for (int step = 0; step < kTokens; ++step) {
    const float* scores = logits.data<float>();
    const int id = static_cast<int>(std::max_element(scores, scores + logits.numel()) - scores);
    tokens.push_back(id);
    models::KvCache* const caches[] = {&cache};
    const int ids[] = {id};
    if (step + 1 < kTokens) logits = model.decoder.decode(ids, caches, stream);
  }
  const Tensor expected = golden("tokens");
  EXPECT_EQ(tokens, std::vector<int>(expected.data<std::int32_t>(), expected.data<std::int32_t>() + expected.numel()));
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, GlmAsrParity,
                         testing::Combine(testing::Values("gqa", "tied_wide_head", "three_layers"), testing::Values(1, 2, 3)),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" + std::to_string(std::get<1>(test.param)) + "_windows";
                         });

// 0 for what is too short, as floor division gives it.
TEST(GlmAsr, EmbeddingsOfFrames) {
  const auto reference = [](std::int64_t frames) {  // the published formula, with divisions that round down
    const auto div = [](std::int64_t a, std::int64_t b) {
      return static_cast<std::int64_t>(std::floor(static_cast<double>(a) / static_cast<double>(b)));
    };
    std::int64_t length = div(frames + 2 - 2 - 1, 1) + 1;
    length = div(length + 2 - 2 - 1, 2) + 1;
    return div(length - 4, 4) + 1;
  };
  for (std::int64_t frames = 0; frames <= 3000; ++frames) ASSERT_EQ(GlmAsrConfig::embeddings(frames), reference(frames)) << frames;
  EXPECT_EQ(GlmAsrConfig::embeddings(0), 0);
  EXPECT_EQ(GlmAsrConfig::embeddings(6), 0);
  EXPECT_EQ(GlmAsrConfig::embeddings(7), 1);
  EXPECT_EQ(GlmAsrConfig::embeddings(3000), 375);
}

TEST(GlmAsr, BothSpellingsOfWeightsAreOne) {
  for (const char* name : {"language_model.model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight",
                           "language_model.model.model.layers.0.mlp.up_proj.weight"})
    EXPECT_EQ(canonical_weight_name(name), "layers.0.mlp.up_proj.weight");
  for (const char* name : {"lm_head.weight", "language_model.lm_head.weight"}) EXPECT_EQ(canonical_weight_name(name), "lm_head.weight");
  for (const char* name : {"audio_tower.conv1.bias", "model.audio_tower.conv1.bias"})
    EXPECT_EQ(canonical_weight_name(name), "audio_tower.conv1.bias");
}

}  // namespace
}  // namespace tw::speech

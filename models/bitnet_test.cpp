// BitNet decoders against the scores of tools/goldens/bitnet.py, which agree with transformers' BitNetForCausalLM.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "models/config_reader.hpp"
#include "models/json.hpp"
#include "models/llama.hpp"
#include "models/safetensors.hpp"
#include "models/text_model.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

using test::expect_error;

std::filesystem::path directory_of(const std::string& kind) {
  return std::filesystem::path(TILEWAVE_SOURCE_DIR) / "tests/data/bitnet" / kind;
}

std::string bitnet_name(const std::string& name) { return name.starts_with("model.") ? name.substr(6) : name; }

LlamaConfig bitnet_config(nlohmann::json json) { return LlamaConfig::read(ConfigReader("config.json", std::move(json))); }

Llama load_bitnet(const std::string& kind, const LlamaConfig& config, Device device, DType dtype = DType::f32) {
  Weights weights(kind, SafeTensors::open_directory(directory_of(kind)), bitnet_name);
  weights.check([&](Weights& from) { Llama(config, from); });
  std::optional<Llama> llama;
  weights.load([&](Weights& from) { llama.emplace(config, from); }, dtype, Stream::standard(device), {});
  return *std::move(llama);
}

class BitNetDecoder : public testing::TestWithParam<std::tuple<std::string, Device>> {};
INSTANTIATE_TEST_SUITE_P(Checkpoints, BitNetDecoder,
                         testing::Combine(testing::Values("offline", "online", "divided"), testing::ValuesIn(test::kDevices)),
                         [](const auto& test) { return std::get<0>(test.param) + (std::get<1>(test.param).is_cuda() ? "_cuda" : "_cpu"); });

TEST_P(BitNetDecoder, GivesTheScoresOfTheDefinition) {
  const auto& [kind, device] = GetParam();
  if (device.is_cuda()) skip_without_cuda();
  const LlamaConfig config = bitnet_config(load_json(directory_of(kind) / "config.json"));
  EXPECT_TRUE(config.bitnet);
  const Stream stream = Stream::standard(device);
  const Llama llama = load_bitnet(kind, config, device);
  EXPECT_TRUE(llama.tied());
  const SafeTensors golden = SafeTensors::open(directory_of(kind) / "golden.safetensors");
  const Tensor scores = golden.tensor("scores"), numbers = golden.tensor("ids");
  const std::vector<int> ids(numbers.data<std::int32_t>(), numbers.data<std::int32_t>() + numbers.numel());
  KvCache cache = llama.make_cache(static_cast<int>(ids.size()), stream);
  const auto expect_scores = [&](const Tensor& given, std::size_t token) {
    const Tensor host = given.to(Device::cpu()).to(DType::f32);
    const float* const exact = scores.data<float>() + static_cast<std::int64_t>(token) * scores.shape(1);
    ASSERT_EQ(host.numel(), scores.shape(1));
    double error = 0, norm = 0;
    for (std::int64_t i = 0; i < host.numel(); ++i) {
      const double distance = static_cast<double>(host.data<float>()[i]) - static_cast<double>(exact[i]);
      error += distance * distance, norm += static_cast<double>(exact[i]) * static_cast<double>(exact[i]);
    }
    // An input of a layer next to a tie may round to the other integer, which changes what the next layers round: then two results differ
    // as two independent roundings do. An integer's rounding error is 0.29, of two 0.41, where the integers of 100 normal numbers are about
    // 47: 0.9 % for each product, and each adds a part to what passes through.
    EXPECT_LE(std::sqrt(error / norm), 2e-2) << "token " << token;
  };
  constexpr std::size_t kPrompt = 13;
  expect_scores(llama.prefill(llama.embed(std::span(ids).first(kPrompt), stream), cache, stream), kPrompt - 1);
  for (std::size_t token = kPrompt; token < ids.size(); ++token) {
    KvCache* const caches[] = {&cache};
    expect_scores(llama.decode(std::span(ids).subspan(token, 1), caches, stream), token);
  }
}

/// The text of the likeliest tokens, one after another, as the decoder and the tokenizer give it.
std::string continuation(const TextModel& model, const std::string& prompt, int count) {
  const Stream stream = Stream::standard(Device::cpu());
  const std::vector<int> ids = model.tokenizer().encode(prompt, {.add_special_tokens = true});
  KvCache cache = model.decoder().make_cache(static_cast<int>(ids.size()) + count, stream);
  std::vector<int> found;
  Tensor scores = model.decoder().prefill(model.decoder().embed(ids, stream), cache, stream);
  while (true) {
    const float* const all = scores.data<float>();
    found.push_back(static_cast<int>(std::max_element(all, all + scores.numel()) - all));
    if (std::ssize(found) == count) return model.tokenizer().decode(found, {.skip_special_tokens = true});
    KvCache* const caches[] = {&cache};
    scores = model.decoder().decode(std::span(found).last(1), caches, stream);
  }
}

TEST(BitNetText, ContinuesAPrompt) {
  const TextModel model = TextModel::load(directory_of("offline"), Device::cpu());
  std::string text;
  const auto collect = [&](std::string_view piece) { text += piece; };
  const Generated done = model.generate("Hello, world", {.max_tokens = 12}, collect);
  EXPECT_EQ(done.prompt_tokens, 13);  // and <|begin|>
  ASSERT_FALSE(done.ended);
  EXPECT_EQ(done.tokens, 12);
  EXPECT_EQ(text, continuation(model, "Hello, world", 12));

  const auto sampled = [&](std::uint64_t seed) {
    text.clear();
    model.generate("Hello", {.max_tokens = 20, .sampling = {.temperature = 5, .seed = seed}}, collect);
    return text;
  };
  EXPECT_EQ(sampled(1), sampled(1));
  EXPECT_NE(sampled(1), sampled(2));
  // The context is 64 tokens: 64 - 6 after the prompt, and one whose successor is not needed.
  EXPECT_LE(model.generate("Hello", {.max_tokens = 1000, .sampling = {.temperature = 5}}, collect).tokens, 59);
}

TEST(BitNetText, PerplexityIsThatOfTheScores) {
  const TextModel model = TextModel::load(directory_of("offline"), Device::cpu());
  const std::string text = "The quick brown fox, and 47 more.";
  const std::vector<int> ids = model.tokenizer().encode(text);
  const int begin = model.tokenizer().encode("", {.add_special_tokens = true}).at(0);
  constexpr std::size_t kWindow = 14;
  // Every token after those before it in its window, each in a prefill of its own.
  const Stream stream = Stream::standard(Device::cpu());
  double sum = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    std::vector<int> before = {begin};
    for (std::size_t j = i - i % (kWindow - 1); j < i; ++j) before.push_back(ids[j]);
    KvCache cache = model.decoder().make_cache(static_cast<int>(before.size()), stream);
    const Tensor scores = model.decoder().prefill(model.decoder().embed(before, stream), cache, stream);
    double total = 0;
    for (std::int64_t n = 0; n < scores.numel(); ++n) total += std::exp(static_cast<double>(scores.data<float>()[n]));
    sum += std::log(total) - scores.data<float>()[ids[i]];
  }
  ASSERT_GT(ids.size(), 2 * kWindow);
  const double expected = std::exp(sum / static_cast<double>(ids.size()));
  for (const int batch : {1, 2, 8}) {
    const Perplexity got = model.perplexity(text, {.window = kWindow, .batch = batch});
    EXPECT_EQ(got.tokens, std::ssize(ids));
    // A decoding step and a prefill may round an input of a layer to different integers: see GivesTheScoresOfTheDefinition.
    EXPECT_NEAR(got.value, expected, 0.02 * expected) << batch;
  }
}

TEST(BitNetText, RefusesWhatDoesNotFit) {
  const TextModel model = TextModel::load(directory_of("online"), Device::cpu());
  const auto refused = [&](const std::string& prompt, const GenerateOptions& options, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { model.generate(prompt, options, [](std::string_view) {}); }, parts);
  };
  refused("a", {.max_tokens = 0}, {"max_tokens is 0", "at least 1"});
  refused("a", {.sampling = {.temperature = -1}}, {"temperature is -1"});
  refused(std::string(63, 'a'), {}, {"64 tokens", "context of 64"});
  const auto no_perplexity = [&](const std::string& text, const PerplexityOptions& options, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { model.perplexity(text, options); }, parts);
  };
  no_perplexity("abc", {.window = 1}, {"window is 1", "from 2 to 64"});
  no_perplexity("abc", {.window = 65}, {"window is 65", "from 2 to 64"});
  no_perplexity("abc", {.window = 64, .batch = 0}, {"batch is 0"});
  no_perplexity("", {.window = 64}, {"no token to predict"});
  expect_error<FileError>([] { TextModel::load(directory_of("none"), Device::cpu()); }, {"none/config.json"});
}

TEST(BitNetCheckpoint, KeepsWeightsIn2Bits) {
  const LlamaConfig config = bitnet_config(load_json(directory_of("offline") / "config.json"));
  const Llama llama = load_bitnet("offline", config, Device::cpu(), DType::bf16);
  // A layer has four attention matrices, two of them with half as many rows, and three MLP matrices. Each row has a scale. Then come the
  // norms, and the embedding, which is also the head.
  constexpr std::int64_t hidden = 128, kv = 64, inner = 96;
  const std::int64_t codes = (2 * hidden + 2 * kv + 2 * inner) * hidden / 4 + hidden * inner / 4;
  const std::int64_t scales = (2 * hidden + 2 * kv + 2 * inner + hidden) * 4;
  EXPECT_EQ(llama.bytes_per_step(), 2 * (codes + scales) + (2 * (2 * hidden + hidden + inner) + hidden) * 2 + 80 * hidden * 2);
}

TEST(BitNetCheckpoint, RefusesWhatItDoesNotKnow) {
  const nlohmann::json good = load_json(directory_of("offline") / "config.json");
  const auto refused = [&](const char* pointer, const nlohmann::json& value, std::initializer_list<std::string_view> parts) {
    nlohmann::json changed = good;
    changed[nlohmann::json::json_pointer(pointer)] = value;
    expect_error<FileError>([&] { bitnet_config(changed); }, parts);
  };
  refused("/hidden_act", "silu", {"hidden_act is \"silu\"", "relu2"});
  refused("/quantization_config/quant_method", "awq", {"quantization_config.quant_method is \"awq\"", "bitnet"});
  refused("/quantization_config/linear_class", "x", {"linear_class is \"x\"", "autobitlinear"});
  refused("/quantization_config/quantization_mode", "x", {"quantization_mode is \"x\"", "online"});
  refused("/quantization_config/use_rms_norm", true, {"use_rms_norm", "not supported"});
  refused("/intermediate_size", 97, {"intermediate_size is 97", "multiple of 4"});
  refused("/head_dim", 128, {"hidden_size is 128", "attn_sub_norm"});
  // Plain weights where packed ones are expected.
  LlamaConfig config = bitnet_config(good);
  config.layers = 1;
  expect_error<FileError>(
      [&] { load_bitnet("online", config, Device::cpu()); },
      {"layers.0.self_attn.q_proj.weight is [128, 128]", "[32, 128]", "is BF16; it must be U8", "q_proj.weight_scale [1] is missing"});
}

}  // namespace
}  // namespace tw::models

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "models/tokenizer.hpp"
#include "speech/glm_asr/gguf_config.hpp"
#include "speech/glm_asr/model.hpp"
#include "tests/expect_error.hpp"
#include "tests/gguf_digits.hpp"
#include "tests/support.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/speech.hpp"

namespace tw::speech {
namespace {

using models::Gguf;
using test::digits_gguf;
using test::DigitsGguf;
using test::expect_error;
using test::GgufWriter;

const DigitsGguf& exact_digits() {
  static const DigitsGguf files = digits_gguf("F32");
  return files;
}

/// The bundled recordings.
const std::vector<std::vector<float>>& samples() {
  static const std::vector<std::vector<float>> all = [] {
    std::vector<std::vector<float>> read;
    for (int i = 1; i <= 3; ++i) read.push_back(read_audio(tw::format("{}/assets/samples/digits-{}.wav", TILEWAVE_SOURCE_DIR, i)));
    return read;
  }();
  return all;
}
const std::vector<std::string> kTexts = {"six seven nine one", "eight zero seven", "four three seven five seven four"};

std::vector<Transcript> transcribed(const Transcriber& transcriber) {
  const std::vector<std::span<const float>> spans(samples().begin(), samples().end());
  return transcriber.transcribe(spans).files;
}

std::vector<Transcript> transcribed(const DigitsGguf& files, std::optional<DType> dtype = {}) {
  const test::TemporaryDirectory directory;
  const auto paths = files.write(directory.path());
  return transcribed(Transcriber(paths.model, {.dtype = dtype, .mmproj = paths.mmproj}));
}

/// An opened pair of files in memory.
struct Opened {
  explicit Opened(const DigitsGguf& written) : model(written.model.file()), mmproj(written.mmproj.file()) {}
  GgufPair pair() const {
    return {Gguf::parse(std::as_bytes(std::span(model)), "m.gguf"), Gguf::parse(std::as_bytes(std::span(mmproj)), "a.gguf")};
  }
  std::string model, mmproj;
};

std::vector<float> read_all(const models::TensorSource& source, const std::string& name) {
  std::int64_t count = 1;
  for (const std::int64_t extent : source.shape(name)) count *= extent;
  const Tensor raw = Tensor::empty({count}, *source.element_dtype(name));
  source.read_elements(name, 0, raw);
  const Tensor tensor = raw.to(DType::f32);
  return {tensor.data<float>(), tensor.data<float>() + count};
}

TEST(GgufModel, TheConfigurationIsThatOfTheCheckpoint) {
  const Opened opened(exact_digits());
  const GgufPair files = opened.pair();
  const GlmAsrConfig given = gguf_config(files, gguf_tokenizer(files.model)), wanted = GlmAsrConfig::read(test::kDigitsCheckpoint);
  EXPECT_EQ(given.encoder.hidden, wanted.encoder.hidden);
  EXPECT_EQ(given.encoder.intermediate, wanted.encoder.intermediate);
  EXPECT_EQ(given.encoder.layers, wanted.encoder.layers);
  EXPECT_EQ(given.encoder.heads, wanted.encoder.heads);
  EXPECT_EQ(given.encoder.head_dim, wanted.encoder.head_dim);
  EXPECT_EQ(given.encoder.positions, wanted.encoder.positions);
  EXPECT_EQ(given.encoder.rotary_dim, wanted.encoder.rotary_dim);
  EXPECT_EQ(given.encoder.rope_theta, wanted.encoder.rope_theta);
  EXPECT_EQ(given.encoder.activation, wanted.encoder.activation);
  EXPECT_EQ(given.decoder.hidden, wanted.decoder.hidden);
  EXPECT_EQ(given.decoder.intermediate, wanted.decoder.intermediate);
  EXPECT_EQ(given.decoder.layers, wanted.decoder.layers);
  EXPECT_EQ(given.decoder.heads, wanted.decoder.heads);
  EXPECT_EQ(given.decoder.kv_heads, wanted.decoder.kv_heads);
  EXPECT_EQ(given.decoder.head_dim, wanted.decoder.head_dim);
  EXPECT_EQ(given.decoder.vocabulary, wanted.decoder.vocabulary);
  EXPECT_EQ(given.decoder.max_positions, wanted.decoder.max_positions);
  EXPECT_EQ(given.decoder.rope_theta, wanted.decoder.rope_theta);
  EXPECT_EQ(given.decoder.norm_epsilon, wanted.decoder.norm_epsilon);
  EXPECT_EQ(given.projector_activation, wanted.projector_activation);
  EXPECT_EQ(given.audio_token, wanted.audio_token);
  EXPECT_EQ(given.end_tokens, wanted.end_tokens);
  EXPECT_EQ(given.mel.mel_bins, wanted.mel.mel_bins);
  EXPECT_EQ(given.prompt, wanted.prompt);
  EXPECT_EQ(given.segment_seconds, 30);  // the metadata has no other limit
}

TEST(GgufModel, MetadataMayLeaveOutWhatFollows) {
  DigitsGguf files = exact_digits();
  for (const char* key : {"llama.attention.key_length", "llama.attention.value_length", "llama.rope.freq_base",
                          "llama.rope.dimension_count", "llama.vocab_size", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"})
    files.model.erase(key);
  files.mmproj.erase("clip.projector_type").set("clip.audio.projector_type", "glma");
  files.mmproj.erase("clip.has_audio_encoder").erase("clip.audio.attention.layer_norm_epsilon");
  files.model.set<std::uint32_t>("tokenizer.ggml.eom_token_id", 5).change<float>("llama.attention.layer_norm_rms_epsilon", 1e-6f);
  const Opened opened(files);
  const GgufPair pair = opened.pair();
  const GlmAsrConfig config = gguf_config(pair, gguf_tokenizer(pair.model));
  EXPECT_EQ(config.decoder.head_dim, 64);
  EXPECT_EQ(config.decoder.rope_theta, 10000);
  EXPECT_EQ(config.decoder.vocabulary, 384);
  EXPECT_EQ(config.decoder.norm_epsilon, 1e-6f);
  EXPECT_EQ(config.end_tokens, (std::vector<int>{326, 333, 335, 5}));
}

TEST(GgufModel, TheTokenizerIsThatOfTheCheckpoint) {
  const Opened opened(exact_digits());
  const models::Tokenizer given = gguf_tokenizer(opened.pair().model);
  const models::Tokenizer wanted = models::Tokenizer::load(test::kDigitsCheckpoint + "/tokenizer.json");
  EXPECT_EQ(given.vocab_size(), wanted.vocab_size());
  for (int id = -1; id <= wanted.vocab_size(); ++id) EXPECT_EQ(given.token(id), wanted.token(id)) << id;
  const std::string text = "Six seven, I'LL   say 12345 <|user|>[MASK]\n\n h\xC3\xA9 \xF0\x9F\x98\x80 don't\t<|pad|>seven nine one";
  for (const bool parse : {false, true}) {
    const models::EncodeOptions options{.parse_special_tokens = parse};
    EXPECT_EQ(given.encode(text, options), wanted.encode(text, options));
    for (const bool skip : {false, true})
      EXPECT_EQ(given.decode(given.encode(text, options), {.skip_special_tokens = skip}),
                wanted.decode(given.encode(text, options), {.skip_special_tokens = skip}));
  }
}

TEST(GgufModel, ExactFormatsGiveTheSameTokens) {
  const std::vector<Transcript> wanted = transcribed(Transcriber(test::kDigitsCheckpoint));
  for (const char* format : {"F32", "BF16"}) {  // the checkpoint is in bf16
    SCOPED_TRACE(format);
    const std::vector<Transcript> given = transcribed(digits_gguf(format));
    ASSERT_EQ(given.size(), wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_EQ(given[i].text, kTexts[i]);
      ASSERT_EQ(given[i].segments.size(), wanted[i].segments.size());
      for (std::size_t s = 0; s < wanted[i].segments.size(); ++s) EXPECT_EQ(given[i].segments[s].tokens, wanted[i].segments[s].tokens);
    }
  }
}

// The weights that the model gets, bit by bit: text alone would hide small differences.
TEST(GgufModel, F32GivesTheSameWeights) {
  const Opened opened(exact_digits());
  const GgufPair pair = opened.pair();
  const auto source = gguf_tensors(pair, gguf_config(pair, gguf_tokenizer(pair.model)));
  const auto wanted = test::digits_tensors();
  EXPECT_EQ(source->names().size(), wanted.size());
  for (const std::string& name : source->names()) {
    SCOPED_TRACE(name);
    const auto found = wanted.find(canonical_gguf_name(name));
    ASSERT_NE(found, wanted.end());
    EXPECT_EQ(source->shape(name), found->second.shape);
    EXPECT_EQ(read_all(*source, name), found->second.values);
  }
}

class GgufFormats : public testing::TestWithParam<test::GgufFormat> {};
INSTANTIATE_TEST_SUITE_P(All, GgufFormats, testing::ValuesIn(test::kGgufFormats), [](const auto& each) { return each.param.name; });

TEST_P(GgufFormats, WeightsAreWithinTheFormatsError) {
  const DigitsGguf files = digits_gguf(GetParam().name);
  const Opened opened(files);
  int in_format = 0;
  for (const GgufPair pair = opened.pair(); const Gguf* file : {&pair.model, &pair.mmproj}) {
    models::GgufTensors tensors;
    for (const std::string& name : file->names()) {
      const auto found = files.written.find(name);
      if (found == files.written.end() || name.starts_with("v.")) continue;
      SCOPED_TRACE(name);
      tensors.add(*file, name);
      const auto& [values, format] = found->second;
      test::expect_within_format(format, values, read_all(tensors, name));
      in_format += format.id == GetParam().id;
    }
  }
  EXPECT_GE(in_format, 2 + 4 * 7);  // the decoder's matrices
}

TEST(GgufModel, InexactFormatsGiveTheRightText) {
  for (const char* format : {"F16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"}) {
    SCOPED_TRACE(format);
    const std::vector<Transcript> given = transcribed(digits_gguf(format));
    ASSERT_EQ(given.size(), kTexts.size());
    for (std::size_t i = 0; i < kTexts.size(); ++i) EXPECT_EQ(given[i].text, kTexts[i]);
  }
}

TEST(GgufModel, LoadsInBf16) {
  const std::vector<Transcript> given = transcribed(digits_gguf("Q8_0"), DType::bf16);
  for (std::size_t i = 0; i < kTexts.size(); ++i) EXPECT_EQ(given[i].text, kTexts[i]);
}

TEST(GgufModel, TiedHead) {
  DigitsGguf files = exact_digits();
  std::erase_if(files.model.infos, [](const GgufWriter::Info& info) { return info.name == "output.weight"; });
  // Without the tensor its place would be a hole.
  GgufWriter packed = files.model;
  packed.infos.clear();
  packed.data.clear();
  for (const GgufWriter::Info& info : files.model.infos) {
    std::uint64_t count = 4;
    for (const std::uint64_t extent : info.extents) count *= extent;
    packed.tensor(info.name, {info.extents.rbegin(), info.extents.rend()}, info.type, files.model.data.substr(info.offset, count));
  }
  files.model = packed;
  const test::TemporaryDirectory directory;
  const auto paths = files.write(directory.path());
  LoadOptions options{.dtype = DType::f32, .mmproj = paths.mmproj};
  EXPECT_TRUE(GlmAsr::load(paths.model, options, Stream::standard(Device::cpu())).decoder.tied());
}

TEST(GgufModel, BadOptions) {
  const test::TemporaryDirectory directory;
  const auto paths = exact_digits().write(directory.path());
  const auto load = [](const std::filesystem::path& model, const std::filesystem::path& mmproj) { Transcriber(model, {.mmproj = mmproj}); };
  expect_error<InvalidArgument>([&] { load(paths.model, ""); }, {"mmproj is missing: ", "model.gguf needs a second GGUF file"});
  expect_error<InvalidArgument>([&] { load(test::kDigitsCheckpoint, paths.mmproj); }, {"mmproj is ", "assets/digits is a directory"});
  expect_error<FileError>([&] { load(paths.mmproj, paths.model); },
                          {"mmproj.gguf: general.architecture is \"clip\"; this is the file for mmproj; give the language model's"});
  expect_error<FileError>([&] { load(paths.model, paths.model); }, {"model.gguf: general.architecture is \"llama\"; allowed for mmproj"});
  expect_error<FileError>([&] { load(paths.model, directory.path() / "none.gguf"); }, {"none.gguf: No such file or directory"});
  expect_error<FileError>([&] { load(directory.path() / "none.gguf", paths.mmproj); }, {"none.gguf: No such file or directory"});
}

/// Expects one error of all that is read before the weights.
void expect_gguf_refused(const std::function<void(DigitsGguf&)>& change, std::initializer_list<std::string_view> parts) {
  DigitsGguf files = exact_digits();
  change(files);
  const Opened opened(files);
  expect_error<FileError>(
      [&] {
        const GgufPair pair = opened.pair();
        check_gguf_kinds(pair);
        gguf_tensors(pair, gguf_config(pair, gguf_tokenizer(pair.model)));
      },
      parts);
}

TEST(GgufModel, BadMetadata) {
  const auto model = [](const char* key, auto value) { return [=](DigitsGguf& files) { files.model.change(key, value); }; };
  const auto mmproj = [](const char* key, auto value) { return [=](DigitsGguf& files) { files.mmproj.change(key, value); }; };
  using Number = std::uint32_t;
  expect_gguf_refused(model("general.architecture", std::string("qwen2")),
                      {"m.gguf: general.architecture is \"qwen2\"; only \"llama\" is supported"});
  expect_gguf_refused([](DigitsGguf& f) { f.model.erase("llama.block_count"); },
                      {"m.gguf: llama.block_count is missing; allowed: an integer"});
  expect_gguf_refused(model("llama.block_count", Number{0}), {"m.gguf: llama.block_count is 0; allowed: an integer from 1 to 1000"});
  expect_gguf_refused(model("llama.embedding_length", ~0ull), {"m.gguf: llama.embedding_length is 18446744073709551615; allowed"});
  expect_gguf_refused(model("llama.attention.head_count_kv", Number{3}),
                      {"m.gguf: llama.attention.head_count_kv is 3; allowed: a divisor of"});
  expect_gguf_refused(model("llama.attention.key_length", Number{32}), {"m.gguf: heads of 32 are not supported; 64 and 128 are"});
  expect_gguf_refused(model("llama.attention.value_length", Number{128}), {"m.gguf: llama.attention.value_length is 128; allowed: 64"});
  expect_gguf_refused(model("llama.rope.dimension_count", Number{32}), {"m.gguf: llama.rope.dimension_count is 32; allowed: 64"});
  expect_gguf_refused(model("llama.vocab_size", Number{400}), {"m.gguf: llama.vocab_size is 400; tokenizer.ggml.tokens has 384"});
  expect_gguf_refused(model("llama.attention.layer_norm_rms_epsilon", std::nanf("")),
                      {"m.gguf: llama.attention.layer_norm_rms_epsilon is "});
  expect_gguf_refused([](DigitsGguf& f) { f.model.set("llama.rope.scaling.type", "yarn"); },
                      {"scaled rotary embeddings are not supported"});
  expect_gguf_refused([](DigitsGguf& f) { f.model.set<Number>("llama.expert_count", 8); }, {"mixtures of experts are not supported"});
  expect_gguf_refused([](DigitsGguf& f) { f.model.set<std::uint16_t>("split.count", 3); }, {"split.count is 3; join the files first"});
  expect_gguf_refused(mmproj("clip.projector_type", std::string("ultravox")),
                      {"a.gguf: clip.projector_type is \"ultravox\"; only \"glma\""});
  expect_gguf_refused(mmproj("clip.has_audio_encoder", false), {"a.gguf: clip.has_audio_encoder is false"});
  expect_gguf_refused(mmproj("clip.audio.projection_dim", Number{512}),
                      {"a.gguf: clip.audio.projection_dim is 512; llama.embedding_length of m.gguf is 256"});
  expect_gguf_refused(mmproj("clip.audio.projector.stack_factor", Number{2}),
                      {"a.gguf: clip.audio.projector.stack_factor is 2; allowed: 4"});
  expect_gguf_refused(mmproj("clip.audio.attention.layer_norm_epsilon", 1e-6f), {"a.gguf: clip.audio.attention.layer_norm_epsilon is "});
  expect_gguf_refused(mmproj("clip.audio.attention.head_count", Number{5}),
                      {"a.gguf: clip.audio.attention.head_count is 5; allowed: a divisor"});
  expect_gguf_refused(mmproj("clip.audio.attention.head_count", Number{2}), {"a.gguf: heads of 96 are not supported"});
  expect_gguf_refused(mmproj("clip.audio.feed_forward_length", Number{700}),
                      {"a.gguf: clip.audio.feed_forward_length is 700; allowed: 768"});
}

TEST(GgufModel, BadTokenizer) {
  const auto change = [](const char* key, auto value) { return [=](DigitsGguf& files) { files.model.erase(key).set_array(key, value); }; };
  const std::string tokens = "tokenizer.ggml.tokens", types = "tokenizer.ggml.token_type";
  using Strings = std::vector<std::string>;
  using Numbers = std::vector<std::int32_t>;
  expect_gguf_refused([](DigitsGguf& f) { f.model.change<std::string>("tokenizer.ggml.model", "llama"); },
                      {"tokenizer.ggml.model is \"llama\"; only \"gpt2\""});
  expect_gguf_refused([](DigitsGguf& f) { f.model.change<std::string>("tokenizer.ggml.pre", "qwen2"); },
                      {"tokenizer.ggml.pre is \"qwen2\"; \"glm4\" and"});
  expect_gguf_refused([&](DigitsGguf& f) { f.model.erase(tokens); }, {"m.gguf: tokenizer.ggml.tokens is missing; allowed: an array"});
  expect_gguf_refused([](DigitsGguf& f) { f.model.erase("tokenizer.ggml.merges"); }, {"m.gguf: tokenizer.ggml.merges is missing"});
  expect_gguf_refused(change(types.c_str(), Numbers(10, 1)),
                      {"m.gguf: tokenizer.ggml.token_type has 10 elements; tokenizer.ggml.tokens has 384"});
  expect_gguf_refused(change(types.c_str(), Numbers(384, 6)), {"m.gguf: tokenizer.ggml.token_type[0] is 6; allowed: 1, 3, 4 and 5"});
  expect_gguf_refused(change(types.c_str(), Numbers(384, 5)), {"m.gguf: tokenizer.model: merges[0]"});
  expect_gguf_refused(change(tokens.c_str(), Strings(384, "same")), {"m.gguf: \"same\" is both token 0 and token 1"});
  Strings broken(384, "x\xFF");
  expect_gguf_refused(change(tokens.c_str(), broken), {"m.gguf: token 0 is not valid UTF-8"});
  expect_gguf_refused(change("tokenizer.ggml.merges", Strings{"one"}), {"m.gguf: ", "merges[0] is \"one\"; allowed: two tokens"});
  expect_gguf_refused([](DigitsGguf& f) { f.model.change<std::uint32_t>("tokenizer.ggml.eos_token_id", 384); },
                      {"m.gguf: tokenizer.ggml.eos_token_id is 384; allowed: an integer from 0 to 383"});
}

TEST(GgufModel, BadTensors) {
  const test::TemporaryDirectory directory;
  const auto expect_problems = [&](const std::function<void(DigitsGguf&)>& change, std::initializer_list<std::string_view> parts) {
    DigitsGguf files = exact_digits();
    change(files);
    const auto paths = files.write(directory.path());
    expect_error<FileError>([&] { Transcriber(paths.model, {.mmproj = paths.mmproj}); }, parts);
  };
  const auto rename = [](GgufWriter& file, const std::string& from, const std::string& to) {
    for (auto& info : file.infos)
      if (info.name == from) info.name = to;
  };
  expect_problems(
      [&](DigitsGguf& f) {
        rename(f.model, "blk.3.attn_norm.weight", "rope_freqs.weight");
        rename(f.mmproj, "mm.a.norm_pre.bias", "a.post_ln.bias");
      },
      {"model.gguf and ", "mmproj.gguf: the weights do not fit the metadata: ", "mm.a.norm_pre.bias [192] is missing",
       "blk.3.attn_norm.weight [256] is missing", "rope_freqs.weight is not part of this model",
       "a.post_ln.bias is not part of this model"});
  expect_problems([&](DigitsGguf& f) { f.model.change<std::uint32_t>("llama.feed_forward_length", 640); },
                  {"blk.0.ffn_gate.weight is [512, 256], which must be [640, 256]"});
  expect_problems([&](DigitsGguf& f) { f.model.change<std::uint32_t>("llama.block_count", 3); },
                  {"blk.3.attn_q.weight is not part of this model"});
  expect_problems([&](DigitsGguf& f) { rename(f.mmproj, "v.boi", "blk.0.attn_q.weight"); },
                  {"tensor \"blk.0.attn_q.weight\" is in ", "model.gguf, too; allowed: once"});
  expect_problems([&](DigitsGguf& f) { f.mmproj.tensor("mm.a.mlp.1.extra", {1}, 0, "1234"); },
                  {"mm.a.mlp.1.extra is not part of this model"});
  expect_problems(
      [&](DigitsGguf& f) {
        for (auto& info : f.mmproj.infos)
          if (info.name == "a.position_embd.weight") std::swap(info.extents[0], info.extents[1]);
      },
      {"mmproj.gguf: a.position_embd.weight is [192, 1500], which must be [1500, 192]"});
}

}  // namespace
}  // namespace tw::speech

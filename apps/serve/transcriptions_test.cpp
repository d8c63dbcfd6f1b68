// The API with the bundled checkpoint, without sockets.

#include "apps/serve/transcriptions.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "apps/formats/json.hpp"
#include "apps/formats/subtitles.hpp"
#include "apps/serve/fake_responder.hpp"
#include "apps/serve/models.hpp"

namespace tw::serve {
namespace {

using nlohmann::json;
using test::FakeResponder;
using Fields = std::vector<std::pair<std::string, std::string>>;

std::string sample(int number) {
  std::ifstream file(std::string(TILEWAVE_SOURCE_DIR) + "/assets/samples/digits-" + std::to_string(number) + ".wav", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
constexpr int kSample = 2;
const std::string kText = "eight zero seven";

class Transcriptions : public testing::Test {
 protected:
  static constexpr std::size_t kQueue = 4;

  static void SetUpTestSuite() {
    directory() = std::string(TILEWAVE_SOURCE_DIR) + "/assets/digits";
    engine() = std::make_unique<speech::Engine>(directory(), speech::LoadOptions{}, speech::EngineOptions{.queue = kQueue});
  }
  static void TearDownTestSuite() { engine().reset(); }
  static std::string& directory() {
    static std::string name;
    return name;
  }
  static std::unique_ptr<speech::Engine>& engine() {
    static std::unique_ptr<speech::Engine> one;
    return one;
  }

  void SetUp() override {
    service_.model = "digits";
    service_.created = 1700000000;
    service_.loaded = engine().get();
  }

  /// Calls a handler as the server does.
  static std::shared_ptr<FakeResponder> call(const Handler& handler, HttpRequest request,
                                             std::shared_ptr<FakeResponder> responder = std::make_shared<FakeResponder>()) {
    try {
      handler(std::make_shared<const HttpRequest>(std::move(request)), responder);
    } catch (...) {
      send_error(*responder, api_error(std::current_exception()));
    }
    return responder;
  }

  static HttpRequest form(const Fields& fields) {
    HttpRequest request;
    request.method = "POST";
    request.path = "/v1/audio/transcriptions";
    request.headers = {{"content-type", test::kFormType}};
    request.body = test::form_body(fields);
    return request;
  }

  /// Posts a form with a recording, and does not run the engine.
  std::shared_ptr<FakeResponder> submit(Fields fields, std::shared_ptr<FakeResponder> responder = std::make_shared<FakeResponder>()) {
    fields.insert(fields.begin(), {{"file", sample(kSample)}, {"model", "digits"}});
    return call(transcriptions_handler(service_), form(fields), std::move(responder));
  }
  std::shared_ptr<FakeResponder> post(Fields fields) {
    auto responder = submit(std::move(fields));
    run();
    return responder;
  }

  static void run() {
    while (engine()->step()) {
    }
  }

  /// The events of a stream, without the [DONE] at its end.
  static std::vector<json> events(const FakeResponder& answer) {
    std::vector<json> all;
    for (const std::string& chunk : answer.chunks) {
      EXPECT_TRUE(chunk.starts_with("data: ") && chunk.ends_with("\n\n")) << chunk;
      if (chunk != "data: [DONE]\n\n") all.push_back(json::parse(chunk.substr(6)));
    }
    EXPECT_EQ(answer.chunks.back(), "data: [DONE]\n\n");
    return all;
  }

  /// What a transcriber says about the same recording.
  static speech::Transcript expected(const speech::TranscribeOptions& options) {
    static const speech::Transcriber transcriber(directory());
    return transcriber.transcribe(speech::read_audio(sample(kSample), "sample"), options);
  }
  static const speech::Transcript& expected() {
    static const speech::Transcript plain = expected({});
    return plain;
  }

  Service service_;
};

TEST_F(Transcriptions, Json) {
  const auto answer = post({});
  EXPECT_EQ(answer->status, 200);
  EXPECT_EQ(answer->header("Content-Type"), "application/json");
  json body = json::parse(answer->body);
  EXPECT_EQ(body["text"], kText);
  EXPECT_EQ(body["text"], expected().text);
  EXPECT_FALSE(body.contains("logprobs"));
  json usage = body["usage"];
  EXPECT_EQ(usage["type"], "tokens");
  EXPECT_EQ(usage["output_tokens"], expected().segments.at(0).tokens.size());
  EXPECT_EQ(usage["input_token_details"]["audio_tokens"], 48);  // 388 frames, halved by the convolution, 4 stacked
  EXPECT_GT(usage["input_token_details"]["text_tokens"], 0);
  EXPECT_EQ(usage["total_tokens"], usage["input_tokens"].get<int>() + usage["output_tokens"].get<int>());
}

TEST_F(Transcriptions, TextAndSubtitles) {
  const speech::Transcript whole = expected();
  const std::pair<const char*, std::string> cases[] = {{"text", kText + "\n"},
                                                       {"srt", formats::subtitles(whole.segments, formats::SubtitleFormat::srt)},
                                                       {"vtt", formats::subtitles(whole.segments, formats::SubtitleFormat::vtt)}};
  for (const auto& [format, text] : cases) {
    const auto answer = post({{"response_format", format}});
    EXPECT_EQ(answer->status, 200);
    EXPECT_EQ(answer->header("Content-Type"), "text/plain; charset=utf-8");
    EXPECT_EQ(answer->body, text);
    EXPECT_NE(text.find(kText), std::string::npos);
  }
}

// Every field of the type TranscriptionVerbose of OpenAI's client.
TEST_F(Transcriptions, VerboseJson) {
  const auto answer = post({{"response_format", "verbose_json"}, {"timestamp_granularities[]", "segment"}, {"language", "en"}});
  ASSERT_EQ(answer->status, 200) << answer->body;
  const speech::Transcript whole = expected();
  json body = json::parse(answer->body);
  EXPECT_EQ(body["task"], "transcribe");
  EXPECT_EQ(body["language"], "english");
  EXPECT_EQ(body["duration"], whole.duration);
  EXPECT_EQ(body["text"], kText);
  EXPECT_EQ(body["usage"], (json{{"type", "duration"}, {"seconds", whole.duration}}));
  ASSERT_EQ(body["segments"].size(), 1U);
  json segment = body["segments"][0];
  EXPECT_EQ(segment["id"], 0);
  EXPECT_EQ(segment["seek"], static_cast<int>(std::lround(whole.segments[0].begin * 100)));
  EXPECT_EQ(segment["start"], whole.segments[0].begin);
  EXPECT_EQ(segment["end"], whole.segments[0].end);
  EXPECT_EQ(segment["text"], kText);
  EXPECT_EQ(segment["tokens"], whole.segments[0].tokens);
  EXPECT_EQ(segment["temperature"], 0);
  EXPECT_EQ(segment["compression_ratio"], 16.0 / 24);
  EXPECT_EQ(segment["no_speech_prob"], 0);
  EXPECT_LT(segment["avg_logprob"], 0);
  EXPECT_GT(segment["avg_logprob"], -0.5);
  EXPECT_EQ(segment.size(), 10U);
}

TEST_F(Transcriptions, Logprobs) {
  json body = json::parse(post({{"include[]", "logprobs"}})->body);
  std::string text;
  for (json token : body["logprobs"]) {
    const std::string piece = token["token"];
    EXPECT_EQ(token["bytes"], json(std::vector<int>(piece.begin(), piece.end())));
    EXPECT_LE(token["logprob"], 0);
    text += piece;
  }
  EXPECT_EQ(text, kText);
  EXPECT_EQ(body["logprobs"].size(), body["usage"]["output_tokens"]);
  EXPECT_EQ(events(*post({{"include[]", "logprobs"}, {"stream", "true"}})).back()["logprobs"], body["logprobs"]);
}

TEST_F(Transcriptions, Stream) {
  const auto answer = post({{"stream", "true"}});
  EXPECT_EQ(answer->status, 200);
  EXPECT_EQ(answer->header("Content-Type"), "text/event-stream; charset=utf-8");
  EXPECT_TRUE(answer->ended);
  std::vector<json> all = events(*answer);
  ASSERT_GE(all.size(), 3U);
  std::string text;
  for (std::size_t i = 0; i + 1 < all.size(); ++i) {
    EXPECT_EQ(all[i]["type"], "transcript.text.delta");
    text += all[i]["delta"].get<std::string>();
  }
  EXPECT_EQ(text, kText);
  json done = all.back();
  EXPECT_EQ(done["type"], "transcript.text.done");
  EXPECT_EQ(done["text"], kText);
  EXPECT_EQ(done["usage"]["type"], "tokens");
  EXPECT_FALSE(done.contains("segments"));
}

// More than OpenAI has: times for a client that streams.
TEST_F(Transcriptions, StreamOfVerboseJson) {
  json done = events(*post({{"stream", "true"}, {"response_format", "verbose_json"}})).back();
  json whole = json::parse(post({{"response_format", "verbose_json"}})->body);
  EXPECT_EQ(done["type"], "transcript.text.done");
  for (const char* name : {"text", "language", "duration", "segments"}) EXPECT_EQ(done[name], whole[name]) << name;
  EXPECT_EQ(done["usage"]["type"], "tokens");
}

TEST_F(Transcriptions, SilenceIsAnEmptyText) {
  std::string file = sample(kSample);
  std::fill(file.begin() + 44, file.end(), '\0');
  const auto plain = call(transcriptions_handler(service_), form({{"file", file}, {"model", "digits"}}));
  const auto stream = call(transcriptions_handler(service_), form({{"file", file}, {"model", "digits"}, {"stream", "1"}}));
  run();
  EXPECT_EQ(json::parse(plain->body)["text"], "");
  std::vector<json> all = events(*stream);
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(all[0]["text"], "");
}

TEST_F(Transcriptions, PromptOnlyWithATemplate) {
  const std::string misleading = "one two three";
  EXPECT_EQ(json::parse(post({{"prompt", misleading}})->body)["text"], kText);
  EXPECT_EQ(instruction(service_, misleading), "");
  service_.prompt_template = "Transcribe. Context: {prompt}!";
  EXPECT_EQ(instruction(service_, ""), "");
  EXPECT_EQ(instruction(service_, "a {prompt}"), "Transcribe. Context: a {prompt}!");
  service_.prompt_template = "{prompt}";
  const std::string changed = json::parse(post({{"prompt", misleading}})->body)["text"];
  EXPECT_EQ(changed, expected({.prompt = misleading}).text);
  EXPECT_NE(changed, kText);
}

// Noise is no silence, but no speech either.
TEST_F(Transcriptions, VoiceActivityDetection) {
  std::string noise = sample(kSample);
  std::mt19937 engine(1);
  for (std::size_t i = 44; i < noise.size(); ++i) noise[i] = i % 2 == 0 ? static_cast<char>(engine()) : static_cast<char>(engine() % 8);
  const Fields fields = {{"file", noise}, {"model", "digits"}, {"response_format", "verbose_json"}};
  Fields with_vad = fields;
  with_vad.emplace_back("chunking_strategy[type]", "server_vad");
  const auto plain = call(transcriptions_handler(service_), form(fields)),
             by_voice = call(transcriptions_handler(service_), form(with_vad));
  run();
  EXPECT_EQ(json::parse(plain->body)["segments"].size(), 1U);
  EXPECT_EQ(json::parse(by_voice->body)["segments"].size(), 0U) << by_voice->body;
}

TEST_F(Transcriptions, TemperatureSamples) {
  EXPECT_EQ(post({{"temperature", "0.01"}})->status, 200);
  EXPECT_EQ(json::parse(post({{"temperature", "0.5"}, {"response_format", "verbose_json"}})->body)["segments"][0]["temperature"], 0.5);
}

TEST_F(Transcriptions, NamesOfModels) {
  for (const char* name : {"digits", "whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe"})
    EXPECT_NO_THROW(require_model(service_, name)) << name;
  const auto answer = call(transcriptions_handler(service_), form({{"file", sample(kSample)}, {"model", "large\n"}}));
  EXPECT_EQ(answer->status, 404);
  EXPECT_EQ(json::parse(answer->body)["error"], (json{{"message", "the model \"large\\x0A\" does not exist; this server has \"digits\""},
                                                      {"type", "invalid_request_error"},
                                                      {"param", "model"},
                                                      {"code", "model_not_found"}}));
  EXPECT_THROW(require_model(service_, "gpt-4o-transcribe-diarize"), ApiError);
}

TEST_F(Transcriptions, Models) {
  const auto get = [&](const std::string& path) {
    HttpRequest request;
    request.method = "GET";
    request.path = path;
    return call(models_handler(service_), std::move(request));
  };
  service_.model = "zai-org/GLM-ASR";
  service_.loaded = nullptr;  // while the model is being loaded, too
  const json model = {{"id", "zai-org/GLM-ASR"}, {"object", "model"}, {"created", 1700000000}, {"owned_by", "tilewave"}};
  EXPECT_EQ(json::parse(get("/v1/models")->body), (json{{"object", "list"}, {"data", {model}}}));
  EXPECT_EQ(json::parse(get("/v1/models/zai-org/GLM-ASR")->body), model);
  EXPECT_EQ(get("/v1/models/zai-org/GLM-ASR")->header("Content-Type"), "application/json");
  EXPECT_EQ(get("/v1/models/whisper-1")->status, 404);
  EXPECT_EQ(json::parse(get("/v1/models/\xFF")->body)["error"]["code"], "model_not_found");
}

TEST_F(Transcriptions, Errors) {
  const auto error = [&](const HttpRequest& request, int status) {
    const auto answer = call(transcriptions_handler(service_), request);
    EXPECT_EQ(answer->status, status) << answer->body;
    return json::parse(answer->body)["error"];
  };
  // Of the form.
  HttpRequest not_a_form = form({});
  not_a_form.headers = {{"Content-Type", "application/json"}};
  EXPECT_EQ(error(not_a_form, 415)["code"], "unsupported_content_type");
  EXPECT_EQ(error(form({{"model", "digits"}}), 400)["param"], "file");
  EXPECT_EQ(error(form({{"file", sample(kSample)}, {"model", "digits"}, {"temperature", "2"}}), 400)["param"], "temperature");
  // Of the audio.
  for (const std::string& damaged : {std::string(), std::string("no audio"), sample(kSample).substr(0, 1000)}) {
    json answer = error(form({{"file", damaged}, {"model", "digits"}}), 400);
    EXPECT_EQ(answer["param"], "file");
    EXPECT_TRUE(answer["message"].get<std::string>().starts_with("file: ")) << answer;
  }
  service_.limits.audio_seconds = 2;
  json too_long = error(form({{"file", sample(kSample)}, {"model", "digits"}}), 400);
  EXPECT_EQ(too_long["param"], "file");
  EXPECT_EQ(too_long["message"], "file: it holds more than 2 s of audio; that is the limit");
  service_.limits.audio_seconds = 3600;
  // Of the state.
  service_.loaded = nullptr;
  EXPECT_EQ(error(form({{"file", sample(kSample)}, {"model", "digits"}}), 503)["code"], "model_loading");
}

TEST_F(Transcriptions, FullQueue) {
  std::vector<std::shared_ptr<FakeResponder>> waiting;
  for (std::size_t i = 0; i < kQueue; ++i) waiting.push_back(submit({}));
  const auto refused = submit({});
  EXPECT_EQ(refused->status, 429);
  EXPECT_EQ(json::parse(refused->body)["error"]["type"], "rate_limit_error");
  run();
  for (const auto& each : waiting) EXPECT_EQ(json::parse(each->body)["text"], kText);
}

// A client that has gone frees its place at the next step.
TEST_F(Transcriptions, GoneClients) {
  const auto before = submit({}), other = submit({});
  ASSERT_TRUE(before->gone);
  before->gone();
  auto during = std::make_shared<FakeResponder>();
  during->on_write = [&] { during->gone(); };
  submit({{"stream", "true"}}, during);
  run();
  EXPECT_EQ(json::parse(before->body)["error"]["code"], "cancelled");
  EXPECT_EQ(json::parse(other->body)["text"], kText);
  // Its last event is the error, in a form that OpenAI's client raises.
  std::vector<json> all = events(*during);
  EXPECT_LE(all.size(), 3U);  // the step may have written another token
  EXPECT_EQ(all.back()["type"], "error");
  EXPECT_EQ(all.back()["error"]["code"], "cancelled");
  EXPECT_TRUE(during->ended);
  EXPECT_EQ(engine()->status().waiting + engine()->status().running, 0U);
}

TEST(TranscriptJson, LogprobsAndUsage) {
  speech::Transcript transcript;
  transcript.text = "\xC3\xA9 t";
  transcript.duration = 3;
  transcript.prompt_tokens = 50;
  transcript.audio_tokens = 37;
  transcript.segments = {
      {.begin = 0.125, .end = 1, .text = "\xC3\xA9", .tokens = {1, 2}, .logprobs = {-0.5F, -1.5F}, .token_texts = {"", "\xC3\xA9"}},
      {.begin = 1, .end = 2, .text = "t", .tokens = {3}, .logprobs = {-0.25F}, .token_texts = {"t"}}};
  EXPECT_EQ(formats::token_logprobs(transcript).dump(),
            "[{\"token\":\"\",\"bytes\":[],\"logprob\":-0.5},{\"token\":\"\xC3\xA9\",\"bytes\":[195,169],\"logprob\":-1.5},"
            "{\"token\":\"t\",\"bytes\":[116],\"logprob\":-0.25}]");
  EXPECT_EQ(
      formats::token_usage(transcript).dump(),
      R"({"type":"tokens","input_tokens":50,"input_token_details":{"text_tokens":13,"audio_tokens":37},"output_tokens":3,"total_tokens":53})");
  const nlohmann::ordered_json verbose = formats::verbose_json(transcript, {.language = "french", .temperature = 0.5});
  EXPECT_EQ(verbose["segments"][0]["avg_logprob"], -1);
  EXPECT_EQ(verbose["segments"][0]["seek"], 13);
  EXPECT_EQ(verbose["segments"][1]["id"], 1);
  EXPECT_EQ(verbose["segments"][1]["avg_logprob"], -0.25);
}

TEST(TranscriptJson, CompressionRatio) {  // as Python's zlib.compress() has them
  EXPECT_EQ(formats::compression_ratio(""), 0);
  EXPECT_EQ(formats::compression_ratio("six seven nine one"), 18.0 / 26);
  std::string repeated;
  for (int i = 0; i < 100; ++i) repeated += "na ";
  EXPECT_EQ(formats::compression_ratio(repeated), 20);
}

}  // namespace
}  // namespace tw::serve

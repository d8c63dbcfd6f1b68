// Realtime transcription with the bundled checkpoint, without sockets.

#include "apps/serve/realtime.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "apps/serve/base64.hpp"
#include "apps/serve/pcm.hpp"
#include "tests/support.hpp"
#include "tilewave/speech.hpp"

namespace tw::serve {
namespace {

using nlohmann::json;

TEST(Base64, IsDecodedStrictly) {
  // RFC 4648, section 10.
  EXPECT_EQ(decode_base64("", "audio"), "");
  EXPECT_EQ(decode_base64("Zg==", "audio"), "f");
  EXPECT_EQ(decode_base64("Zm8=", "audio"), "fo");
  EXPECT_EQ(decode_base64("Zm9v", "audio"), "foo");
  EXPECT_EQ(decode_base64("Zm9vYmFy", "audio"), "foobar");
  EXPECT_EQ(decode_base64("+/8A", "audio"), std::string("\xFB\xFF\0", 3));
  const auto refused = [](std::string_view text, const std::string& why) {
    try {
      decode_base64(text, "audio");
      ADD_FAILURE() << text;
    } catch (const ApiError& error) {
      EXPECT_EQ(error.what(), "audio is not Base64: " + why);
      EXPECT_EQ(error.param, "audio");
      EXPECT_EQ(error.code, "invalid_base64");
    }
  };
  refused("Zg", "it has 2 characters, which is no multiple of 4");
  refused("Zm9vZ", "it has 5 characters, which is no multiple of 4");
  refused("Z===", "byte 1 is \"=\"");
  refused("====", "byte 0 is \"=\"");
  refused("Zg==Zg==", "byte 2 is \"=\"");
  refused("Zm9\n", "byte 3 is \"\\x0A\"");
  refused("Zm9-", "byte 3 is \"-\"");
  refused("Zh==", "byte 1 has bits that belong to no byte");
  refused("Zm9=", "byte 2 has bits that belong to no byte");
}

TEST(Pcm, IsDecoded) {
  EXPECT_EQ(decode_pcm(std::string("\0\0\xFF\x7F\0\x80\x01\0", 8), PcmFormat::pcm16, "audio"),
            (std::vector<float>{0, 32767.0f / 32768, -1, 1.0f / 32768}));
  EXPECT_THROW(decode_pcm("abc", PcmFormat::pcm16, "audio"), ApiError);
  // ITU-T G.711, tables 1a to 2b: the largest, the smallest, and one between, of each sign; in units of 16 bits.
  const auto units = [](PcmFormat format, std::uint8_t code) {
    return std::lround(decode_pcm(std::string(1, static_cast<char>(code)), format, "audio").at(0) * 32768);
  };
  EXPECT_EQ(units(PcmFormat::g711_ulaw, 0x80), 32124);
  EXPECT_EQ(units(PcmFormat::g711_ulaw, 0x00), -32124);
  EXPECT_EQ(units(PcmFormat::g711_ulaw, 0xFF), 0);
  EXPECT_EQ(units(PcmFormat::g711_ulaw, 0xFE), 8);
  EXPECT_EQ(units(PcmFormat::g711_ulaw, 0xA0), 7932);
  EXPECT_EQ(units(PcmFormat::g711_alaw, 0xAA), 32256);
  EXPECT_EQ(units(PcmFormat::g711_alaw, 0x2A), -32256);
  EXPECT_EQ(units(PcmFormat::g711_alaw, 0xD5), 8);
  EXPECT_EQ(units(PcmFormat::g711_alaw, 0x55), -8);
  EXPECT_EQ(units(PcmFormat::g711_alaw, 0x80), 5504);
}

std::string encode_base64(std::string_view bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    std::uint32_t bits = 0;
    for (std::size_t n = 0; n < 3; ++n) bits = bits << 8 | (at + n < bytes.size() ? static_cast<unsigned char>(bytes[at + n]) : 0);
    for (std::size_t n = 0; n < 4; ++n) text += at + n <= bytes.size() ? kDigits[bits >> (18 - 6 * n) & 63] : '=';
  }
  return text;
}

std::string pcm16(const std::vector<float>& samples) {
  std::string bytes;
  for (const float sample : samples) {
    const auto value = static_cast<std::uint16_t>(std::lround(std::clamp(sample, -1.0f, 1.0f) * 32767));
    bytes += static_cast<char>(value & 0xFF);
    bytes += static_cast<char>(value >> 8);
  }
  return bytes;
}

std::vector<float> recording(int number) {
  return speech::read_audio(std::string(TILEWAVE_SOURCE_DIR) + "/tests/data/digits/digits-" + std::to_string(number) + ".flac");
}

const std::string kTexts[] = {"", "zero one two four eight three three", "six five nine four", "zero four three eight eight eight",
                              "seven"};

/// Records what the server sends.
class FakeWebSocket : public WebSocket {
 public:
  void send(std::string text) override {
    const std::lock_guard lock(mutex_);
    events_.push_back(json::parse(text));
  }
  void close(int code, std::string) override {
    const std::lock_guard lock(mutex_);
    closed_ = code;
  }
  std::vector<json> events() const {
    const std::lock_guard lock(mutex_);
    return events_;
  }
  int closed() const {
    const std::lock_guard lock(mutex_);
    return closed_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<json> events_;
  int closed_ = 0;
};

/// A connection.
struct Client {
  Client(Service& service, Headers headers = {}, const std::string& id = "r1", std::uint64_t number = 1) {
    HttpRequest upgrade;
    upgrade.method = "GET";
    upgrade.path = "/v1/realtime";
    upgrade.query = {{"intent", "transcription"}};
    upgrade.headers = std::move(headers);
    upgrade.id = id;
    upgrade.client = number;
    session = realtime_handler(service)(std::make_shared<const HttpRequest>(std::move(upgrade)), socket);
  }

  void send(const json& event) { session->on_text(event.dump()); }
  void append(std::string_view bytes) { send({{"type", "input_audio_buffer.append"}, {"audio", encode_base64(bytes)}}); }
  void commit() { send({{"type", "input_audio_buffer.commit"}}); }

  /// session.update with the members of audio.input.
  void configure(const json& input) {
    send({{"type", "session.update"}, {"session", {{"type", "transcription"}, {"audio", {{"input", input}}}}}});
  }

  std::vector<json> of_type(const std::string& type) const {
    std::vector<json> found;
    for (json& event : socket->events())
      if (event["type"] == type) found.push_back(std::move(event));
    return found;
  }
  json last() const { return socket->events().back(); }
  std::string deltas(const std::string& item) const {
    std::string text;
    for (const json& event : of_type("conversation.item.input_audio_transcription.delta"))
      if (event["item_id"] == item) text += event["delta"].get<std::string>();
    return text;
  }

  std::shared_ptr<FakeWebSocket> socket = std::make_shared<FakeWebSocket>();
  std::unique_ptr<WebSocketSession> session;
};

const json kCompleted = "conversation.item.input_audio_transcription.completed";
const json kDelta = "conversation.item.input_audio_transcription.delta";
const json kAt16kHz = {{"type", "audio/pcm"}, {"rate", 16000}};

/// The engine runs where a test says so, which makes the order of everything the same in each run.
class Realtime : public testing::Test {
 protected:
  static void SetUpTestSuite() { shared_engine() = std::make_unique<speech::Engine>(std::string(TILEWAVE_SOURCE_DIR) + "/assets/digits"); }
  static void TearDownTestSuite() { shared_engine().reset(); }
  static std::unique_ptr<speech::Engine>& shared_engine() {
    static std::unique_ptr<speech::Engine> engine;
    return engine;
  }

  Realtime() {
    service.model = "digits";
    service.loaded = shared_engine().get();
  }
  ~Realtime() override { run(); }

  static void run() {
    while (shared_engine()->step()) {
    }
  }

  /// In pieces of 0.5 s of 16 kHz; the engine has done its work before the next.
  static void append_and_run(Client& client, const std::vector<float>& samples) {
    const std::string bytes = pcm16(samples);
    for (std::size_t at = 0; at < bytes.size(); at += 16000) {
      client.append(std::string_view(bytes).substr(at, 16000));
      run();
    }
  }

  /// Sends a message, and returns the error that answers it.
  static json error_of(Client& client, const std::string& message) {
    const std::size_t before = client.socket->events().size();
    client.session->on_text(message);
    const std::vector<json> events = client.socket->events();
    EXPECT_EQ(events.size(), before + 1) << message;
    EXPECT_EQ(events.back()["type"], "error") << events.back();
    return events.back()["error"];
  }

  Service service;
};

TEST_F(Realtime, SpeechBecomesItems) {
  Client client(service);
  ASSERT_EQ(client.socket->events().size(), 1u);
  EXPECT_EQ(client.last()["type"], "session.created");
  client.configure({{"format", kAt16kHz}, {"turn_detection", {{"type", "server_vad"}, {"silence_duration_ms", 1200}}}});
  EXPECT_EQ(client.last()["type"], "session.updated");

  std::vector<float> samples(16000);
  for (const int number : {2, 4}) {
    const std::vector<float> speech = recording(number);
    samples.insert(samples.end(), speech.begin(), speech.end());
    samples.resize(samples.size() + 32000);
  }
  append_and_run(client, samples);

  std::vector<std::string> types;
  std::set<std::string> ids;
  for (const json& event : client.socket->events()) {
    EXPECT_TRUE(ids.insert(event["event_id"].get<std::string>()).second) << event;
    if (event["type"] != kDelta) types.push_back(event["type"].get<std::string>());
  }
  const std::vector<std::string> item = {"input_audio_buffer.speech_started",
                                         "input_audio_buffer.speech_stopped",
                                         "input_audio_buffer.committed",
                                         "conversation.item.added",
                                         "conversation.item.done",
                                         kCompleted};
  std::vector<std::string> expected = {"session.created", "session.updated"};
  for (int n = 0; n < 2; ++n) expected.insert(expected.end(), item.begin(), item.end());
  EXPECT_EQ(types, expected);

  const std::vector<json> started = client.of_type("input_audio_buffer.speech_started");
  const std::vector<json> stopped = client.of_type("input_audio_buffer.speech_stopped");
  const std::vector<json> committed = client.of_type("input_audio_buffer.committed");
  const std::vector<json> added = client.of_type("conversation.item.added");
  const std::vector<json> completed = client.of_type(kCompleted);
  ASSERT_EQ(completed.size(), 2u);
  for (std::size_t n = 0; n < 2; ++n) {
    const json& id = completed[n]["item_id"];
    EXPECT_EQ(started[n]["item_id"], id);
    EXPECT_EQ(stopped[n]["item_id"], id);
    EXPECT_EQ(committed[n]["item_id"], id);
    EXPECT_EQ(added[n]["item"]["id"], id);
    EXPECT_EQ(added[n]["item"]["role"], "user");
    EXPECT_EQ(added[n]["item"]["content"][0]["type"], "input_audio");
    EXPECT_EQ(completed[n]["transcript"], kTexts[n == 0 ? 2 : 4]);
    EXPECT_EQ(client.deltas(id), kTexts[n == 0 ? 2 : 4]);
    EXPECT_EQ(completed[n]["content_index"], 0);
    EXPECT_EQ(completed[n]["usage"]["type"], "tokens");
    EXPECT_FALSE(completed[n].contains("logprobs"));
    EXPECT_LT(started[n]["audio_start_ms"], stopped[n]["audio_end_ms"]);
  }
  EXPECT_NE(completed[0]["item_id"], completed[1]["item_id"]);
  EXPECT_EQ(committed[0]["previous_item_id"], nullptr);
  EXPECT_EQ(committed[1]["previous_item_id"], completed[0]["item_id"]);
  EXPECT_NEAR(started[0]["audio_start_ms"].get<double>(), 1000, 500);
  EXPECT_LT(stopped[0]["audio_end_ms"], started[1]["audio_start_ms"]);

  // Text comes before the item ends.
  const std::vector<json> events = client.socket->events();
  const auto first = [&](const json& type) {
    return std::ranges::find_if(events, [&](const json& event) { return event["type"] == type; }) - events.begin();
  };
  EXPECT_LT(first(kDelta), first("input_audio_buffer.speech_stopped"));
}

TEST_F(Realtime, CommitsByHand) {
  Client client(service);
  client.configure({{"turn_detection", nullptr}});  // 24 kHz
  const std::vector<float> samples = recording(2);
  std::vector<float> at_24_khz;
  for (std::size_t n = 0; n + 2 < samples.size(); n += 2)
    for (const float part : {0.0f, 2.0f / 3, 4.0f / 3}) {
      const auto before = n + static_cast<std::size_t>(part);
      const float share = part - std::floor(part);
      at_24_khz.push_back(samples[before] * (1 - share) + samples[before + 1] * share);
    }
  client.append(pcm16(at_24_khz));
  client.commit();
  client.append(pcm16(at_24_khz));
  client.commit();
  run();
  const std::vector<json> completed = client.of_type(kCompleted);
  ASSERT_EQ(completed.size(), 2u);
  for (const json& each : completed) {
    EXPECT_EQ(each["transcript"], kTexts[2]);
    EXPECT_EQ(client.deltas(each["item_id"]), kTexts[2]);
  }
  EXPECT_TRUE(client.of_type("input_audio_buffer.speech_started").empty());
  EXPECT_TRUE(client.of_type("input_audio_buffer.speech_stopped").empty());
  EXPECT_EQ(client.of_type("input_audio_buffer.committed").size(), 2u);

  json error = error_of(client, R"({"type": "input_audio_buffer.commit", "event_id": "mine"})");
  EXPECT_EQ(error["code"], "input_audio_buffer_commit_empty");
  EXPECT_EQ(error["message"], "the buffer has 0 ms of audio; at least 100 ms are needed");
  EXPECT_EQ(error["event_id"], "mine");

  client.append(pcm16(at_24_khz));
  client.send({{"type", "input_audio_buffer.clear"}});
  EXPECT_EQ(client.last()["type"], "input_audio_buffer.cleared");
  EXPECT_EQ(error_of(client, R"({"type": "input_audio_buffer.commit"})")["code"], "input_audio_buffer_commit_empty");
}

TEST_F(Realtime, SpeaksTheBetaDialect) {
  Client client(service, {{"OpenAI-Beta", "realtime=v1"}});
  EXPECT_EQ(client.last()["type"], "transcription_session.created");
  EXPECT_EQ(client.last()["session"]["input_audio_format"], "pcm16");
  client.send({{"type", "transcription_session.update"},
               {"session",
                {{"input_audio_format", "g711_ulaw"},
                 {"input_audio_transcription", {{"model", "whisper-1"}, {"language", "en"}, {"prompt", "digits"}}},
                 {"turn_detection", nullptr},
                 {"input_audio_noise_reduction", {{"type", "near_field"}}},
                 {"include", {"item.input_audio_transcription.logprobs"}}}}});
  json session = client.last()["session"];
  session.erase("id");
  EXPECT_EQ(client.last()["type"], "transcription_session.updated");
  EXPECT_EQ(session, json::parse(R"({"object": "realtime.transcription_session", "input_audio_format": "g711_ulaw",
      "input_audio_transcription": {"model": "whisper-1", "language": "en", "prompt": "digits"}, "turn_detection": null,
      "input_audio_noise_reduction": null, "include": ["item.input_audio_transcription.logprobs"]})"));
  client.append(std::string(1600, '\xFF'));  // 0.2 s of silence
  client.commit();
  run();
  EXPECT_EQ(client.of_type("conversation.item.created").size(), 1u);
  EXPECT_TRUE(client.of_type("conversation.item.added").empty());
  const std::vector<json> completed = client.of_type(kCompleted);
  ASSERT_EQ(completed.size(), 1u);
  EXPECT_EQ(completed[0]["transcript"], "");
  EXPECT_EQ(completed[0]["logprobs"], json::array());

  // A browser cannot set that header.
  Client browser(service, {{"Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key.k, openai-beta.realtime-v1"}});
  EXPECT_EQ(browser.last()["type"], "transcription_session.created");
}

TEST_F(Realtime, SettingsThatAreNotInAnUpdateStay) {
  Client client(service);
  client.configure({{"format", kAt16kHz}, {"turn_detection", {{"type", "server_vad"}, {"threshold", 0.7}, {"prefix_padding_ms", 100}}}});
  client.configure({{"turn_detection", {{"type", "server_vad"}, {"silence_duration_ms", 800}}}, {"transcription", {{"model", "digits"}}}});
  client.send(
      {{"type", "session.update"}, {"session", {{"type", "transcription"}, {"include", {"item.input_audio_transcription.logprobs"}}}}});
  json session = client.last()["session"];
  session.erase("id");
  EXPECT_EQ(session, json::parse(R"({"object": "realtime.transcription_session", "type": "transcription", "audio": {"input": {
      "format": {"type": "audio/pcm", "rate": 16000}, "transcription": {"model": "digits", "language": null, "prompt": ""}, "noise_reduction": null,
      "turn_detection": {"type": "server_vad", "threshold": 0.7, "prefix_padding_ms": 100, "silence_duration_ms": 800}}},
      "include": ["item.input_audio_transcription.logprobs"]})"));
}

TEST_F(Realtime, NamesWhatIsWrong) {
  Client client(service);
  const auto update = [](const std::string& session) {
    return R"({"type": "session.update", "event_id": "e7", "session": )" + session + "}";
  };
  const auto input = [&](const std::string& members) {
    return update(R"({"type": "transcription", "audio": {"input": )" + members + "}}");
  };
  struct Case {
    std::string message, param, code;
  };
  const Case cases[] = {
      {"", "", "invalid_json"},
      {"{", "", "invalid_json"},
      {"\xFF", "", "invalid_json"},
      {std::string(100, '['), "", "invalid_json"},
      {"[]", "event", "invalid_type"},
      {"{}", "type", "missing_required_parameter"},
      {R"({"type": 5})", "type", "invalid_value"},
      {R"({"type": "response.create", "event_id": "e7"})", "type", "invalid_value"},
      {R"({"type": "input_audio_buffer.append", "event_id": 7})", "event_id", "invalid_type"},
      {R"({"type": "input_audio_buffer.append", "event_id": "e7"})", "audio", "missing_required_parameter"},
      {R"({"type": "input_audio_buffer.append", "event_id": "e7", "audio": 1})", "audio", "invalid_type"},
      {R"({"type": "input_audio_buffer.append", "event_id": "e7", "audio": "*"})", "audio", "invalid_base64"},
      {R"({"type": "input_audio_buffer.append", "event_id": "e7", "audio": "AA=="})", "audio", "invalid_value"},
      {R"({"type": "input_audio_buffer.append", "event_id": "e7", "audio": "", "more": 1})", "more", "unknown_parameter"},
      {R"({"type": "input_audio_buffer.commit", "event_id": "e7", "item": 1})", "item", "unknown_parameter"},
      {R"({"type": "input_audio_buffer.commit", "event_id": "e7"})", "", "input_audio_buffer_commit_empty"},
      {R"({"type": "session.update", "event_id": "e7"})", "session", "missing_required_parameter"},
      {update("[]"), "session", "invalid_type"},
      {update(R"({"type": "realtime"})"), "session.type", "invalid_value"},
      {update(R"({"voice": "alloy"})"), "session.voice", "unknown_parameter"},
      {update(R"({"audio": {"output": {}}})"), "session.audio.output", "unknown_parameter"},
      {update(R"({"include": ["words"]})"), "session.include", "invalid_value"},
      {update(R"({"include": 3})"), "session.include", "invalid_type"},
      {update(R"({"input_audio_format": "mp3"})"), "session.input_audio_format", "invalid_value"},
      {update(R"({"input_audio_transcription": {"model": "gpt-9"}})"), "session.input_audio_transcription.model", "model_not_found"},
      {input("1"), "session.audio.input", "invalid_type"},
      {input(R"({"format": {"type": "audio/mp3"}})"), "session.audio.input.format.type", "invalid_value"},
      {input(R"({"format": {"type": "audio/pcm", "rate": 44100}})"), "session.audio.input.format.rate", "invalid_value"},
      {input(R"({"format": {"type": "audio/pcmu", "rate": 16000}})"), "session.audio.input.format.rate", "invalid_value"},
      {input(R"({"noise_reduction": {"type": "strong"}})"), "session.audio.input.noise_reduction.type", "invalid_value"},
      {input(R"({"transcription": {"language": "klingon"}})"), "session.audio.input.transcription.language", "invalid_language_format"},
      {input(R"({"transcription": {"languages": [1]}})"), "session.audio.input.transcription.languages", "invalid_type"},
      {input(R"({"transcription": {"prompt": 1}})"), "session.audio.input.transcription.prompt", "invalid_type"},
      {input(R"({"transcription": {"delay": "low"}})"), "session.audio.input.transcription.delay", "unsupported_parameter"},
      {input(R"({"turn_detection": {"type": "semantic_vad"}})"), "session.audio.input.turn_detection.type", "unsupported_value"},
      {input(R"({"turn_detection": {"type": "server_vad", "threshold": 1.5}})"), "session.audio.input.turn_detection.threshold",
       "invalid_value"},
      {input(R"({"turn_detection": {"threshold": "high"}})"), "session.audio.input.turn_detection.threshold", "invalid_type"},
      {input(R"({"turn_detection": {"silence_duration_ms": 99}})"), "session.audio.input.turn_detection.silence_duration_ms",
       "invalid_value"},
      {input(R"({"turn_detection": {"prefix_padding_ms": 1e300}})"), "session.audio.input.turn_detection.prefix_padding_ms",
       "invalid_value"},
      {input(R"({"turn_detection": {"create_response": 1}})"), "session.audio.input.turn_detection.create_response", "invalid_type"},
  };
  for (const Case& c : cases) {
    const json error = error_of(client, c.message);
    EXPECT_EQ(error["param"], c.param.empty() ? json() : json(c.param)) << c.message << error;
    EXPECT_EQ(error["code"], c.code) << c.message << error;
    EXPECT_EQ(error["type"], "invalid_request_error");
    EXPECT_EQ(error["event_id"], c.message.find("\"e7\"") == std::string::npos ? json() : json("e7")) << c.message;
    if (c.code != "model_not_found") {
      EXPECT_NE(error["message"].get<std::string>().find(c.param), std::string::npos) << error;
    }
  }
  client.session->on_binary("\1\2");
  EXPECT_EQ(client.last()["error"]["code"], "invalid_json");

  // Nothing of it has changed the session, which goes on.
  client.configure(json::object());
  EXPECT_EQ(client.last()["session"], client.socket->events().front()["session"]);
}

TEST_F(Realtime, RefusesOtherUses) {
  const auto refused = [&](std::vector<std::pair<std::string, std::string>> query) {
    HttpRequest upgrade;
    upgrade.query = std::move(query);
    try {
      realtime_handler(service)(std::make_shared<const HttpRequest>(std::move(upgrade)), std::make_shared<FakeWebSocket>());
    } catch (const ApiError& error) {
      return std::pair(error.status, error.param);
    }
    return std::pair(0, std::string());
  };
  EXPECT_EQ(refused({}), std::pair(400, std::string("intent")));
  EXPECT_EQ(refused({{"intent", "conversation"}}), std::pair(400, std::string("intent")));
  EXPECT_EQ(refused({{"intent", "transcription"}, {"model", "gpt-realtime"}}), std::pair(404, std::string("model")));
  EXPECT_EQ(refused({{"intent", "transcription"}, {"model", "digits"}}), std::pair(0, std::string()));
  service.loaded = nullptr;
  EXPECT_EQ(refused({{"intent", "transcription"}}), std::pair(503, std::string()));
}

TEST_F(Realtime, RefusesTooMuchAudio) {
  service.limits.audio_seconds = 60;
  Client client(service);
  client.configure({{"format", kAt16kHz}, {"turn_detection", nullptr}});
  const std::string bytes(50 * 32000, '\0');
  client.append(bytes);
  const json error = error_of(client, json{{"type", "input_audio_buffer.append"}, {"audio", encode_base64(bytes)}}.dump());
  EXPECT_EQ(error["type"], "rate_limit_error");
  EXPECT_EQ(error["param"], "audio");
  client.commit();
  run();
  EXPECT_EQ(client.of_type(kCompleted).size(), 1u) << "the session goes on";
}

TEST_F(Realtime, AClientThatGoesAwayLeavesNoWork) {
  {
    Client client(service);
    client.configure({{"format", kAt16kHz}, {"turn_detection", nullptr}});
    for (const int number : {1, 3}) {
      client.append(pcm16(recording(number)));
      client.commit();
    }
    client.append(pcm16(recording(2)));
  }
  int steps = 0;  // a request that is cancelled takes no step of the model
  while (shared_engine()->step()) ++steps;
  EXPECT_LE(steps, 5);
  EXPECT_EQ(shared_engine()->status().waiting + shared_engine()->status().running, 0u);
}

TEST_F(Realtime, DrainingAnswersWhatWasSaid) {
  Client client(service);
  client.configure({{"format", kAt16kHz}, {"turn_detection", nullptr}});
  client.append(pcm16(recording(4)));
  EXPECT_FALSE(client.session->on_drain());
  const std::string more = json{{"type", "input_audio_buffer.append"}, {"audio", "AAAA"}}.dump();
  const json error = error_of(client, more);
  EXPECT_EQ(error["code"], "server_ending");
  EXPECT_EQ(client.socket->closed(), 0);
  run();
  ASSERT_EQ(client.of_type(kCompleted).size(), 1u);
  EXPECT_EQ(client.last()["transcript"], kTexts[4]);
  EXPECT_EQ(client.socket->closed(), 1001);

  Client idle(service);
  EXPECT_TRUE(idle.session->on_drain());
}

TEST_F(Realtime, ManySessionsAtATime) {
  std::jthread runner([](const std::stop_token& stop) { shared_engine()->run(stop); });
  std::vector<std::jthread> threads;
  for (int number = 1; number <= 4; ++number) {
    threads.emplace_back([this, number] {
      Client client(service, {}, "r" + std::to_string(number), static_cast<std::uint64_t>(number));
      client.configure({{"format", kAt16kHz}, {"turn_detection", nullptr}});
      const std::string bytes = pcm16(recording(number));
      for (std::size_t at = 0; at < bytes.size(); at += 3200) client.append(std::string_view(bytes).substr(at, 3200));
      client.commit();
      while (client.of_type(kCompleted).empty()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      EXPECT_EQ(client.last()["transcript"], kTexts[number]);
      EXPECT_EQ(client.deltas(client.last()["item_id"]), kTexts[number]);
    });
  }
  threads.clear();
}

}  // namespace
}  // namespace tw::serve

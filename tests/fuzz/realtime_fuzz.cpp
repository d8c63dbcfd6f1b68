// A realtime session, on an engine that hears words at random: whatever a client sends, each message is answered in JSON, items are
// completed in order and once, and text that was sent is not taken back.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "apps/serve/realtime.hpp"
#include "apps/serve/transcriptions.hpp"

namespace {

using nlohmann::json;

void require(bool condition) {
  if (!condition) std::abort();
}

constexpr std::size_t kQueue = 8;

}  // namespace

namespace tw::speech {

struct Engine::State {
  std::deque<std::pair<Id, Request>> queue;
  std::set<Id> cancelled;
  Id next = 1;
  std::minstd_rand random;
};

Engine::Engine(const std::filesystem::path&, const LoadOptions&, const EngineOptions&) : state_(std::make_unique<State>()) {}
Engine::~Engine() = default;

Engine::Id Engine::submit(Request request) {
  if (state_->queue.size() >= kQueue) throw QueueFull("full");
  for (const float sample : request.samples) require(std::isfinite(sample));
  require(!request.samples.empty());
  state_->queue.emplace_back(state_->next, std::move(request));
  return state_->next++;
}

void Engine::cancel(Id id) { state_->cancelled.insert(id); }

// Completes one request.
bool Engine::step() {
  if (state_->queue.empty()) return false;
  const auto [id, request] = std::move(state_->queue.front());
  state_->queue.pop_front();
  Completion completion;
  if (state_->cancelled.contains(id)) {
    completion.error = std::make_exception_ptr(Cancelled("cancelled"));
  } else if (state_->random() % 16 == 0) {
    completion.error = std::make_exception_ptr(Error("a failure"));
  } else {
    for (std::uint64_t words = request.samples.size() / 4000 + state_->random() % 2; words > 0; --words)
      completion.transcript.text += (completion.transcript.text.empty() ? "" : " ") + std::string(state_->random() % 8 ? "one" : "二三");
  }
  request.on_done(std::move(completion));
  return true;
}

EngineStatus Engine::status() const { return {.waiting = state_->queue.size()}; }

}  // namespace tw::speech

namespace tw::serve {

struct Metrics::State {};
Metrics::Metrics() = default;
Metrics::~Metrics() = default;
void Metrics::finished(const speech::Completion&) {}

std::string instruction(const Service&, std::string_view prompt) { return std::string(prompt); }

namespace {

class Checker : public WebSocket {
 public:
  void send(std::string text) override {
    require(!ended_);
    const json event = json::parse(text);
    require(events_.insert(event.at("event_id").get<std::string>()).second);
    const std::string type = event.at("type");
    last_type = type;
    if (type == "error") {
      const json& error = event.at("error");
      require(error.at("message").get<std::string>().size() < 4000 && error.contains("param") && error.contains("code") &&
              error.contains("event_id"));
      return;
    }
    if (type == "input_audio_buffer.committed") {
      const std::string id = event.at("item_id");
      require(items_.insert(id).second && event.at("previous_item_id") == previous_);
      previous_ = id;
      waiting_.push_back(id);
    }
    if (!type.starts_with("conversation.item.input_audio_transcription.")) return;
    const std::string id = event.at("item_id");
    if (type.ends_with(".delta")) {
      require(!done_.contains(id) && !event.at("delta").get<std::string>().empty());
      deltas_[id] += event.at("delta").get<std::string>();
      return;
    }
    require(!waiting_.empty() && waiting_.front() == id && done_.insert(id).second);
    waiting_.pop_front();
    if (type.ends_with(".failed")) return;
    require(type.ends_with(".completed"));
    // All text that was sent, or the model changed its mind about some of it.
    const std::string transcript = event.at("transcript"), &deltas = deltas_[id];
    require(transcript == deltas || !transcript.starts_with(deltas));
  }
  void close(int, std::string) override { closed = true; }
  void end() { ended_ = true; }
  bool all_done() const { return waiting_.empty(); }

  std::string last_type;
  bool closed = false;

 private:
  bool ended_ = false;
  std::set<std::string> events_, items_, done_;
  std::map<std::string, std::string> deltas_;
  std::deque<std::string> waiting_;
  json previous_;
};

std::string encode_base64(std::string_view bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t at = 0; at + 3 <= bytes.size(); at += 3) {
    std::uint32_t bits = 0;
    for (std::size_t n = 0; n < 3; ++n) bits = bits << 8 | static_cast<unsigned char>(bytes[at + n]);
    for (int shift = 18; shift >= 0; shift -= 6) text += kDigits[bits >> shift & 63];
  }
  return text;
}

constexpr std::size_t kMostTenths = 8;

// Tenths of a second of a vowel at 24 kHz, or of silence; each is 6400 digits of Base64.
std::string_view sound(std::size_t tenths, bool loud) {
  const auto make = [](double volume) {
    std::string bytes;
    for (std::size_t n = 0; n < kMostTenths * 2400; ++n) {
      double value = 0;
      for (int harmonic = 1; harmonic < 20; ++harmonic)
        value += std::sin(2 * 3.14159265 * 140 * harmonic * static_cast<double>(n) / 24000) / harmonic;
      const auto sample = static_cast<std::int16_t>(volume * value * (0.6 + 0.4 * std::sin(static_cast<double>(n) / 1500)));
      bytes += static_cast<char>(sample & 0xFF);
      bytes += static_cast<char>(sample >> 8);
    }
    return encode_base64(bytes);
  };
  static const std::string vowel = make(6000), silence = make(0);
  return std::string_view(loud ? vowel : silence).substr(0, 6400 * tenths);
}

}  // namespace
}  // namespace tw::serve

/// Lines, each a message; or '+' or '-' and a character, for so many tenths of a second of sound or silence; '!' for the engine to work;
/// '~' for the end of the server; '\x01' for a binary message. The first byte chooses the dialect.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tw::serve;
  static Service service;
  service.model = "digits";
  service.limits.audio_seconds = 60;
  service.limits.websocket_message_bytes = 1 << 20;
  tw::speech::Engine engine("");
  service.loaded = &engine;
  auto request = std::make_shared<HttpRequest>();
  request->query = {{"intent", "transcription"}};
  request->id = "r";
  if (size > 0 && data[0] % 2 == 1) request->headers = {{"OpenAI-Beta", "realtime=v1"}};
  const auto checker = std::make_shared<Checker>();
  std::unique_ptr<WebSocketSession> session = realtime_handler(service)(request, checker);
  require(checker->last_type.ends_with("session.created"));

  std::string_view left(reinterpret_cast<const char*>(data), size);
  left.remove_prefix(left.empty() ? 0 : 1);
  int sounds = 0;
  while (!left.empty()) {
    const std::string_view line = left.substr(0, left.find('\n'));
    left.remove_prefix(std::min(left.size(), line.size() + 1));
    const char kind = line.empty() ? '\0' : line[0];
    if ((kind == '+' || kind == '-') && line.size() == 2) {
      if (++sounds > 8) continue;  // they take the time
      const std::string audio(sound(static_cast<unsigned char>(line[1]) % kMostTenths, kind == '+'));
      session->on_text(json{{"type", "input_audio_buffer.append"}, {"audio", audio}}.dump());
    } else if (kind == '!') {
      engine.step();
    } else if (kind == '~') {
      session->on_drain();
    } else if (kind == '\x01') {
      session->on_binary(std::string(line));
    } else {
      session->on_text(std::string(line));
    }
  }
  if (session->on_drain()) require(checker->all_done());
  if (size % 2 == 0) {
    while (engine.step()) {
    }
    require(checker->all_done());
  }
  session.reset();
  checker->end();
  while (engine.step()) {
  }
  service.loaded = nullptr;
  return 0;
}

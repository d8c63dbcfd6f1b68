#include "apps/serve/realtime.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "apps/formats/json.hpp"
#include "apps/serve/base64.hpp"
#include "apps/serve/json_fields.hpp"
#include "apps/serve/models.hpp"
#include "apps/serve/pcm.hpp"
#include "apps/serve/realtime_config.hpp"
#include "models/one_line.hpp"
#include "runtime/format.hpp"
#include "tilewave/speech_live.hpp"

namespace tw::serve {

namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using speech::LiveEvent;

constexpr std::size_t kMostEventId = 512;  // bytes of a client's event_id

std::int64_t milliseconds(double seconds) { return std::llround(seconds * 1000); }

ordered_json or_null(const std::string& text) { return text.empty() ? ordered_json() : ordered_json(text); }

ordered_json error_object(const ApiError& error) {
  return {{"type", error_type(error.status)}, {"code", or_null(error.code)}, {"message", error.what()}, {"param", or_null(error.param)}};
}

std::string_view query_value(const HttpRequest& request, std::string_view name) {
  const auto found = std::ranges::find(request.query, name, [](const auto& pair) { return pair.first; });
  return found == request.query.end() ? std::string_view() : found->second;
}

RealtimeDialect dialect_of(const HttpRequest& upgrade) {
  const bool beta = upgrade.header("OpenAI-Beta").find("realtime=v1") != std::string_view::npos ||
                    upgrade.header("Sec-WebSocket-Protocol").find("openai-beta.realtime-v1") != std::string_view::npos;
  return beta ? RealtimeDialect::beta : RealtimeDialect::current;
}

class RealtimeSession final : public WebSocketSession {
 public:
  RealtimeSession(Service& service, const HttpRequest& upgrade, std::shared_ptr<WebSocket> socket)
      : service_(service),
        engine_(service.engine()),
        socket_(std::move(socket)),
        id_(upgrade.id),
        client_(upgrade.client),
        dialect_(dialect_of(upgrade)),
        live_(engine_, options(), [this](const LiveEvent& event) { report(event); }) {
    send(dialect_ == RealtimeDialect::beta ? "transcription_session.created" : "session.created", {{"session", session(dialect_)}});
  }

  void on_text(std::string message) override {
    std::string event_id;
    try {
      take(message, event_id);
    } catch (const FileError& error) {
      send_error({400, error.what(), "", "invalid_json"}, event_id);
    } catch (const speech::TooMuchAudio& error) {
      send_error({429, error.what(), "audio", "rate_limit_exceeded"}, event_id);
    } catch (...) {
      send_error(api_error(std::current_exception()), event_id);
    }
  }

  void on_binary(std::string) override {
    send_error({400, "the message is binary; events are text, with audio as Base64 in input_audio_buffer.append", "", "invalid_json"}, "");
  }

  bool on_drain() override {
    live_.commit();
    draining_ = true;
    return unfinished_ == 0;
  }

 private:
  speech::LiveOptions options() const {
    speech::LiveOptions options = live_options(config_, service_);
    options.client = client_;
    options.on_request = [&service = service_](const speech::Completion& completion) { service.metrics.finished(completion); };
    return options;
  }

  ordered_json session(RealtimeDialect dialect) const { return session_object(config_, service_, "sess_" + id_, dialect); }

  std::string item_id(std::uint64_t utterance) const { return tw::format("item_{}_{}", id_, utterance); }

  void send(const char* type, ordered_json members) {
    ordered_json event = {{"type", type}, {"event_id", tw::format("event_{}_{}", id_, ++events_)}};
    event.update(members);
    socket_->send(formats::json_text(event));
  }

  void send_error(const ApiError& error, const std::string& event_id) {
    ordered_json object = error_object(error);
    object["event_id"] = or_null(event_id);
    send("error", {{"error", std::move(object)}});
  }

  // One event of the client. `event_id` is set as soon as it is known.
  void take(const std::string& message, std::string& event_id) {
    const json event = models::parse_json(message, "event", 4 * service_.limits.websocket_message_bytes);
    if (!event.is_object()) refuse_value("event", event, "a JSON object", "invalid_type");
    if (const auto found = event.find("event_id"); found != event.end() && !found->is_null()) {
      if (!found->is_string()) refuse_value("event_id", *found, "a string", "invalid_type");
      const std::string& given = found->get_ref<const std::string&>();
      if (given.size() > kMostEventId)
        refuse_field("event_id", tw::format("event_id has {} bytes; at most {} are allowed", given.size(), kMostEventId));
      event_id = given;
    }
    const auto found = event.find("type");
    if (found == event.end()) refuse_field("type", "type is missing", "missing_required_parameter");
    const std::string type = found->is_string() ? found->get<std::string>() : "";
    if (type == "input_audio_buffer.append") {
      append(JsonFields(event, "", {"type", "event_id", "audio"}));
    } else if (type == "input_audio_buffer.commit") {
      const JsonFields fields(event, "", {"type", "event_id"});
      commit();
    } else if (type == "input_audio_buffer.clear") {
      const JsonFields fields(event, "", {"type", "event_id"});
      live_.clear();
      send("input_audio_buffer.cleared", ordered_json::object());
    } else if (type == "session.update" || type == "transcription_session.update") {
      update(JsonFields(event, "", {"type", "event_id", "session"}), type);
    } else {
      refuse_value("type", *found,
                   "session.update, transcription_session.update, input_audio_buffer.append, input_audio_buffer.commit or "
                   "input_audio_buffer.clear");
    }
  }

  void append(const JsonFields& fields) {
    const json& audio = fields.require("audio");
    if (!audio.is_string()) refuse_value("audio", audio, "a string", "invalid_type");
    if (draining_) throw ApiError(503, "the server is ending", "", "server_ending");
    const std::vector<float> samples = decode_pcm(decode_base64(audio.get_ref<const std::string&>(), "audio"), config_.format, "audio");
    live_.feed(samples);
  }

  void commit() {
    if (live_.commit()) return;
    const std::string message =
        config_.turn_detection ? std::string("the buffer has no speech that is not committed yet")
                               : tw::format("the buffer has {} ms of audio; at least 100 ms are needed", milliseconds(live_.uncommitted()));
    throw ApiError(400, message, "", "input_audio_buffer_commit_empty");
  }

  void update(const JsonFields& fields, const std::string& type) {
    RealtimeConfig config = updated(config_, fields.require("session"), service_);
    std::swap(config_, config);
    try {
      live_.configure(options());
    } catch (...) {
      std::swap(config_, config);
      throw;
    }
    logprobs_ = config_.logprobs;
    if (type == "session.update")
      send("session.updated", {{"session", session(RealtimeDialect::current)}});
    else
      send("transcription_session.updated", {{"session", session(RealtimeDialect::beta)}});
  }

  // What follows runs on the engine's thread, too.

  void report(const LiveEvent& event) {
    const std::string item = item_id(event.utterance);
    switch (event.kind) {
      case LiveEvent::Kind::started:
        detected_ = event.utterance;
        return send("input_audio_buffer.speech_started", {{"audio_start_ms", milliseconds(event.begin)}, {"item_id", item}});
      case LiveEvent::Kind::partial:
        if (!event.text.empty())
          send("conversation.item.input_audio_transcription.delta", {{"item_id", item}, {"content_index", 0}, {"delta", event.text}});
        return;
      case LiveEvent::Kind::ended:
        return ended(event, item);
      case LiveEvent::Kind::completed: {
        ordered_json members = {{"item_id", item}, {"content_index", 0}, {"transcript", event.text}};
        if (logprobs_) members["logprobs"] = formats::token_logprobs(event.transcript);
        members["usage"] = formats::token_usage(event.transcript);
        send("conversation.item.input_audio_transcription.completed", std::move(members));
        return finished();
      }
      case LiveEvent::Kind::failed:
        send("conversation.item.input_audio_transcription.failed",
             {{"item_id", item}, {"content_index", 0}, {"error", error_object(engine_error(event.error))}});
        return finished();
    }
  }

  void ended(const LiveEvent& event, const std::string& item) {
    ++unfinished_;
    if (detected_ == event.utterance)
      send("input_audio_buffer.speech_stopped", {{"audio_end_ms", milliseconds(event.end)}, {"item_id", item}});
    const ordered_json previous = {{"previous_item_id", or_null(previous_item_)}};
    ordered_json members = previous;
    members["item_id"] = item;
    send("input_audio_buffer.committed", members);
    members = previous;
    members["item"] = {{"id", item},        {"object", "realtime.item"},
                       {"type", "message"}, {"status", "completed"},
                       {"role", "user"},    {"content", ordered_json::array({{{"type", "input_audio"}, {"transcript", nullptr}}})}};
    if (dialect_ == RealtimeDialect::beta) {
      send("conversation.item.created", members);
    } else {
      send("conversation.item.added", members);
      send("conversation.item.done", members);
    }
    previous_item_ = item;
  }

  void finished() {
    if (--unfinished_ == 0 && draining_) socket_->close(1001, "the server is ending");
  }

  Service& service_;
  speech::Engine& engine_;
  std::shared_ptr<WebSocket> socket_;
  std::string id_;
  std::uint64_t client_;
  RealtimeDialect dialect_;
  RealtimeConfig config_;
  std::atomic<std::uint64_t> events_ = 0;
  std::atomic<int> unfinished_ = 0;  // items without a transcript
  std::atomic<bool> draining_ = false;
  std::atomic<bool> logprobs_ = false;  // as in config_
  // Of events, which come one at a time:
  std::uint64_t detected_ = 0;  // the newest utterance that voice activity detection found
  std::string previous_item_;
  speech::LiveTranscriber live_;  // the last member: its callbacks use the others
};

}  // namespace

WebSocketHandler realtime_handler(Service& service) {
  return [&service](const std::shared_ptr<const HttpRequest>& upgrade,
                    std::shared_ptr<WebSocket> socket) -> std::unique_ptr<WebSocketSession> {
    const std::string_view intent = query_value(*upgrade, "intent");
    if (intent != "transcription")
      throw ApiError(400, tw::format("intent is {}; it must be \"transcription\": this server does not speak", models::in_quotes(intent)),
                     "intent", "invalid_value");
    if (const std::string_view model = query_value(*upgrade, "model"); !model.empty()) require_model(service, model);
    return std::make_unique<RealtimeSession>(service, *upgrade, std::move(socket));
  };
}

}  // namespace tw::serve

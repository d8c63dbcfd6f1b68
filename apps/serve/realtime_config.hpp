#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "apps/serve/pcm.hpp"
#include "apps/serve/service.hpp"
#include "tilewave/speech_live.hpp"

namespace tw::serve {

/// The two versions of OpenAI's protocol for realtime transcription, which name and nest things differently.
enum class RealtimeDialect {
  current,  ///< session.created, session.update {audio: {input: ...}}
  beta      ///< with the header OpenAI-Beta: realtime=v1; transcription_session.created, ...update {input_audio_format: ...}
};

/// Voice activity detection of a session.
struct ServerVad {
  double threshold = 0.5;
  double prefix_padding_ms = 300;
  double silence_duration_ms = 500;
};

/// What a client can set of its session.
struct RealtimeConfig {
  PcmFormat format = PcmFormat::pcm16;
  int rate = 24000;   ///< of the audio, in Hz
  std::string model;  ///< "": the served one
  std::string language, prompt;
  std::optional<ServerVad> turn_detection = ServerVad{};
  bool logprobs = false;
};

/// `config` with the changes that the field `session` of an event asks for, in either dialect. Throws ApiError, which names the field, for
/// fields that are unknown, of another type or out of range, and for what the server cannot do.
RealtimeConfig updated(RealtimeConfig config, const nlohmann::json& session, const Service& service);

/// The session as the events ...created and ...updated have it.
nlohmann::ordered_json session_object(const RealtimeConfig& config, const Service& service, const std::string& id, RealtimeDialect dialect);

speech::LiveOptions live_options(const RealtimeConfig& config, const Service& service);

}  // namespace tw::serve

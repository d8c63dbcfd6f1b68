#pragma once

// What /metrics shows, in Prometheus' text format.

#include <memory>
#include <string>
#include <string_view>

#include "tilewave/speech_engine.hpp"

namespace tw::serve {

/// Counters, gauges and histograms of a server. Every member may be called from any thread.
class Metrics {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// For Request::on_done: audio seconds, tokens and times of a request of the engine, however it ended.
  void finished(const speech::Completion& completion);
  /// Uploaded audio was decoded, in so many seconds.
  void decoded(double seconds);
  /// For EngineOptions::on_stage.
  void stage(speech::EngineStage stage, double seconds, int count);

  // The server calls these.
  void answered(std::string_view route, int status, double seconds);  ///< `route` is the server's, not what the client sent
  void refused(std::string_view reason);                              ///< before any handler: "connections", "key", "timeout" ...
  void connections(int change);                                       ///< of HTTP and WebSockets
  void websockets(int change);                                        ///< those alone

  /// All of it as text, with the engine's gauges unless it is null.
  std::string text(const speech::Engine* engine);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tw::serve

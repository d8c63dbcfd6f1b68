#pragma once

// What the handlers of the API need of the server.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

#include "apps/serve/error.hpp"
#include "apps/serve/http.hpp"
#include "apps/serve/metrics.hpp"
#include "tilewave/speech_engine.hpp"

namespace tw::serve {

/// What one client may ask for. The server refuses larger bodies and messages by itself; the handlers refuse longer audio.
struct Limits {
  std::size_t upload_bytes = std::size_t{100} << 20;            ///< of a request's body
  std::size_t upload_memory_bytes = std::size_t{1} << 30;       ///< of all bodies that are in memory
  std::size_t websocket_message_bytes = std::size_t{16} << 20;  ///< OpenAI allows 15 MiB of audio in an event
  double audio_seconds = 3600;                                  ///< of a recording
  int connections = 1024;
  double request_seconds = 600;  ///< from a request's first byte to the end of its answer
  double idle_seconds = 60;      ///< of a connection between requests, or of a client that neither sends nor reads
  double header_seconds = 10;    ///< for a request's line and headers
  double grace_seconds = 1;      ///< when the server is to end: for requests that are on the way
};

/// One model that is served. It outlives all requests and sessions.
struct Service {
  std::string model;         ///< its name in /v1/models
  std::int64_t created = 0;  ///< Unix time, for /v1/models
  /// The model's instruction for a request with a prompt, in which {prompt} stands for the prompt. "": a prompt changes nothing
  std::string prompt_template = {};
  int forced_tokens = 0;  ///< that every segment of an upload generates, for benchmarks; 0: the model decides
  Limits limits = {};
  Metrics metrics = {};
  std::atomic<speech::Engine*> loaded = nullptr;  ///< null while the model is being loaded
  std::atomic<bool> draining = false;             ///< the server ends once everything that it accepted is answered

  /// Throws ApiError 503 while the model is being loaded.
  speech::Engine& engine() const;
};

/// What a client is told about an exception: an ApiError as it is; QueueFull as 429; InvalidArgument and FileError as 400; Cancelled as
/// 503; any other as 500 without its message, which may name the server's files.
ApiError api_error(const std::exception_ptr& exception);
/// The same for an exception by which the engine ended a request. It had accepted the request, so this is no fault of the client: not 400.
ApiError engine_error(const std::exception_ptr& exception);

/// Answers with OpenAI's error object. The server does this for exceptions that a handler throws, so that handlers only need it later, in
/// callbacks. 429 and 503 get Retry-After from the server.
void send_error(Responder& responder, const ApiError& error);

}  // namespace tw::serve

#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <stop_token>
#include <vector>

#include "tilewave/speech.hpp"

// Speech to text for many requests at a time, in the library tilewave_speech: what a server runs.

namespace tw::speech {

/// What a step() does to windows of audio, to prompts and to sequences.
enum class EngineStage { features, encoder, prefill, decode };

struct EngineOptions {
  int batch = 0;                  ///< sequences that are decoded together, 1 to 16 on the CPU, to 256 on a GPU; 0: 16, or 64 on a GPU
  std::int64_t cache_tokens = 0;  ///< tokens that the key-value cache holds, of all sequences; 0: 1024 for each of `batch`
  /// Tokens of prompts to process between two decoding steps; longer prompts take several steps. 0: 1024, or 4096 on a GPU.
  int prefill_tokens = 0;
  std::size_t queue = 256;        ///< requests that may wait; submit() refuses more
  /// Called by step() after each stage: how long it took, and of how many windows, tokens of prompts, or sequences.
  std::function<void(EngineStage stage, double seconds, int count)> on_stage = {};
};

/// Seconds that one request spent.
struct RequestTimes {
  double waiting = 0;     ///< from submit() to its first stage
  double first_text = 0;  ///< from submit() to its first token; 0: none
  double total = 0;       ///< from submit() to its end
};

/// How a request ended.
struct Completion {
  Transcript transcript;
  std::exception_ptr error;  ///< null: `transcript` is complete. Cancelled after cancel() or a stop request
  RequestTimes times;
};

struct Request {
  std::vector<float> samples;      ///< mono audio at 16 kHz
  TranscribeOptions options = {};  ///< without `batch`, which EngineOptions has; `file` of on_text is 0
  std::uint64_t client = 0;        ///< clients get equal shares of the work, each its requests in order
  /// Called once. This and the callbacks of `options` are called by step(), without locks: they may submit and cancel, but must not throw.
  std::function<void(Completion completion)> on_done;
};

struct EngineStatus {
  std::size_t waiting = 0;                               ///< requests of which nothing was processed yet
  std::size_t running = 0;                               ///< other requests
  std::size_t sequences = 0;                             ///< segments in the decoding batch
  std::int64_t cache_tokens = 0, cache_tokens_used = 0;  ///< whole pages
};

/// The queue has EngineOptions::queue requests.
class QueueFull : public Error {
 public:
  using Error::Error;
};

/// A loaded model that many requests share by continuous batching (Yu et al., Orca, OSDI 2022): windows of all requests are encoded
/// together, and sequences join and leave the decoding batch at every step. Keys and values are in pages (Kwon et al., vLLM, arXiv
/// 2309.06180), so that memory follows what is used. The text of a request is the same as alone: in f32 on the CPU exactly, else but for
/// ties.
class Engine {
 public:
  using Id = std::uint64_t;

  /// Loads the model as Transcriber does. Throws the same, and InvalidArgument for engine options out of range.
  explicit Engine(const std::filesystem::path& model, const LoadOptions& load = {}, const EngineOptions& options = {});
  /// Requests that have not ended get Cancelled.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Queues a request; any thread. Cuts the audio into segments first, on the caller's time. Throws QueueFull, and InvalidArgument as
  /// Transcriber::transcribe() does.
  Id submit(Request request);

  /// Ends a request at the next step(), which frees its place; any thread. Nothing happens if it has ended already.
  void cancel(Id id);

  /// Does the next piece of work: encodes a batch of windows, processes prompts, and decodes one token of every sequence. Returns whether
  /// there is more to do. One thread at a time.
  bool step();

  /// Calls step() until a stop is requested, and sleeps while there is nothing to do. After a second of that it calls
  /// release_host_memory().
  void run(std::stop_token stop);

  EngineStatus status() const;         ///< any thread
  const LoadOptions& options() const;  ///< device, dtype and weights as chosen
  ModelSize size() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tw::speech

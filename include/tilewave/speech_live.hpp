#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "tilewave/speech_engine.hpp"
#include "tilewave/voice_activity.hpp"

// Live captions, in the library tilewave_speech: text while somebody is speaking.

namespace tw::speech {

struct LiveOptions {
  int sampling_rate = 16000;  ///< of the audio given to feed(), in Hz: 1000 to 768000
  /// Speech is detected, and each stretch of it is an utterance. Without: everything up to commit() is one utterance.
  std::optional<VoiceActivityOptions> voice_activity = VoiceActivityOptions{};
  /// Without `batch`, `on_text`, `on_progress` and `cancel`. `logprobs` is for complete utterances.
  TranscribeOptions transcribe = {};
  /// Seconds of new audio between two hypotheses about an utterance, 0.1 to 10; 0: no partial text.
  double partial_seconds = 0.2;
  /// Longer utterances are transcribed in pieces of at most that many seconds, cut at pauses as Segmentation::automatic does: 5 to 60.
  /// Then the work grows with the length of the speech, and not with its square.
  double piece_seconds = 30;
  /// feed() refuses audio while more than that many seconds of it wait for their text: 60 to 86400.
  double waiting_seconds = 600;
  std::size_t waiting_utterances = 64;  ///< the same for utterances
  std::uint64_t client = 0;             ///< Request::client
  /// Called, by the engine's thread, for each request of the engine that has ended, those for partial text as well: for statistics. Must
  /// not throw.
  std::function<void(const Completion& completion)> on_request = {};
};

struct LiveEvent {
  enum class Kind {
    started,    ///< speech was detected: an utterance begins. Only with LiveOptions::voice_activity
    partial,    ///< text of an utterance that goes on, or the rest of its text
    ended,      ///< the utterance is complete, by detection or by commit(), and its text is on the way
    completed,  ///< the text of the utterance
    failed      ///< the utterance has no text, because of `error`
  };
  Kind kind = Kind::started;
  std::uint64_t utterance = 0;    ///< 1, 2, ... of this object
  double begin = 0;               ///< of the utterance, in seconds of all audio fed so far
  double end = 0;                 ///< ended, completed, failed: of the utterance
  std::string text = {};          ///< partial: what is added to the text so far, maybe nothing; completed: all
  std::string tentative = {};     ///< partial: what may follow the text so far; the next partial event replaces it
  Transcript transcript = {};     ///< completed: with times in seconds of all audio fed so far
  std::exception_ptr error = {};  ///< failed
};

/// feed() refused audio because of LiveOptions::waiting_seconds or ::waiting_utterances.
class TooMuchAudio : public Error {
 public:
  using Error::Error;
};

/// Transcribes one stream of mono audio with a shared Engine, which another thread runs. While an utterance goes on, all of it is
/// transcribed again and again, and words that two successive hypotheses agree on are reported (Macháček et al., arXiv 2307.14743). One of
/// these requests is in the engine at a time, and none once the utterance has ended.
///
/// Text that was reported is never taken back. `text` of the partial events of an utterance, joined, is the text of its completed event,
/// unless the model reads words differently once it has heard all: then the completed event has the better text, and the partial events
/// are a shorter text that ends where the two differ or later.
///
/// Utterances end and are completed in order, and each that ends is completed or fails; text that is left to report comes just before that.
/// Events that a member function causes have been delivered when it returns.
///
///     Engine engine("glm-asr-nano");
///     std::jthread runs([&](std::stop_token stop) { engine.run(stop); });
///     LiveTranscriber live(engine, {}, [](const LiveEvent& event) { std::cout << event.text << std::flush; });
///     while (microphone.read(samples)) live.feed(samples);
///     live.commit();
///     live.wait();
class LiveTranscriber {
 public:
  /// `on_event` is called by the thread that calls a member function, or by the engine's, by one at a time. It must not throw, and may
  /// call no member function but waiting(). `engine` must outlive this object. Throws InvalidArgument for options out of range.
  LiveTranscriber(Engine& engine, LiveOptions options, std::function<void(const LiveEvent& event)> on_event);
  /// Cancels what is in the engine. No event comes once it has returned. Not from a callback.
  ~LiveTranscriber();
  LiveTranscriber(const LiveTranscriber&) = delete;
  LiveTranscriber& operator=(const LiveTranscriber&) = delete;

  /// The next samples, in about [-1, 1]. Throws InvalidArgument if one is not finite, and TooMuchAudio; then none of them is taken.
  void feed(std::span<const float> samples);

  /// Ends the utterance that goes on. Returns whether there was one; without voice activity detection: of at least 0.1 s.
  bool commit();

  /// Forgets the audio of the utterance that goes on. It gets no more events.
  void clear();

  /// Replaces the options. If they change the sampling rate or voice activity detection, it ends the utterance that goes on first. Throws
  /// InvalidArgument, and changes nothing, for options out of range.
  void configure(LiveOptions options);

  /// Waits until each ended utterance is completed or failed. The engine must be running.
  void wait();

  double position() const;      ///< seconds of audio fed
  double uncommitted() const;   ///< seconds of audio that commit() would end an utterance with
  std::size_t waiting() const;  ///< utterances that have ended and are neither completed nor failed

  // One thread at a time may call the members, except for waiting(), which any thread may call.

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tw::speech

// tilewave listen

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "apps/tilewave/audio_source.hpp"
#include "apps/tilewave/terminal.hpp"
#include "apps/tilewave/transcribe.hpp"
#include "command.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech_engine.hpp"
#include "tilewave/speech_live.hpp"

namespace tw::cli {
namespace {

using speech::LiveEvent;

struct ListenArguments {
  ModelArguments model;
  std::string microphone = "default", input;
  int pcm16 = 0;
  bool real_time = false, json = false, quiet = false;
  speech::TranscribeOptions transcribe;
  speech::VoiceActivityOptions voice;
};

std::atomic<bool> stop_asked = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // a signal handler sets it

/// From now on Ctrl-C and SIGTERM ask to stop. The second time they end the program at once.
void stop_on_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { stop_asked = true; };
  action.sa_flags = SA_RESETHAND;  // and not SA_RESTART: a read that waits for audio returns
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

/// The texts on the screen. Events come from two threads.
class Captions {
 public:
  Captions(Screen& screen, bool json) : screen_(screen), json_(json) {}

  /// Of a LiveTranscriber, whose callbacks must not throw.
  void show(const LiveEvent& event) {
    const std::lock_guard lock(mutex_);
    try {
      take(event);
      draw();
    } catch (const std::system_error&) {  // nobody reads any more, or the disk is full
      unwritable_ = std::current_exception();
      stop_asked = true;
    }
  }

  /// Shows, while there is no text, how long the command has been listening.
  void heard(double seconds) {
    const std::lock_guard lock(mutex_);
    heard_ = seconds;
    draw();
  }

  void complain(const std::string& message) {
    const std::lock_guard lock(mutex_);
    screen_.message(tw::format("tilewave: {}", message));
    drawn_.clear();
  }

  /// Whether every utterance got its text. Throws what writing a text threw.
  bool succeeded() {
    const std::lock_guard lock(mutex_);
    if (unwritable_) std::rethrow_exception(unwritable_);
    return !failed_;
  }

 private:
  void take(const LiveEvent& event) {
    if (event.utterance > utterance_) {  // the text of the one before may still be on the way
      utterance_ = event.utterance;
      certain_.clear();
      partial_.clear();
    }
    const bool current = event.utterance == utterance_;
    const bool final = event.kind == LiveEvent::Kind::completed || event.kind == LiveEvent::Kind::failed;
    if (current && event.kind == LiveEvent::Kind::partial) {
      certain_ += event.text;
      partial_ = certain_ + event.tentative;
    }
    if (current && final) partial_.clear();
    if (event.kind == LiveEvent::Kind::completed) end(event);
    if (event.kind == LiveEvent::Kind::failed) fail(event.error);
  }

  void draw() {
    const std::string line = partial_.empty() ? tw::format("(listening: {}; Ctrl-C ends)", duration_text(heard_)) : partial_;
    if (line == drawn_) return;
    if (partial_.empty())
      screen_.progress(line);
    else
      screen_.progress_end(line);
    drawn_ = line;
  }

  void end(const LiveEvent& event) {
    drawn_.clear();
    if (event.text.empty()) return;
    screen_.text(json_ ? json_line({{"begin", event.begin}, {"end", event.end}, {"text", event.text}}) + "\n" : event.text + "\n");
  }

  void fail(const std::exception_ptr& error) {
    drawn_.clear();
    failed_ = true;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& problem) {
      screen_.message(tw::format("tilewave: {}", problem.what()));
    }
  }

  Screen& screen_;
  bool json_;
  std::mutex mutex_;
  std::uint64_t utterance_ = 0;            ///< the newest
  std::string certain_, partial_, drawn_;  ///< its text so far, the same with what may follow, and the line on the screen
  double heard_ = 0;
  bool failed_ = false;
  std::exception_ptr unwritable_;
};

int listen(const ListenArguments& a) {
  using Clock = std::chrono::steady_clock;
  Screen screen(a.quiet ? Screen::Progress::hidden : Screen::Progress::shown);
  const bool microphone = a.input.empty();
  const std::unique_ptr<AudioSource> source = microphone    ? open_microphone(a.microphone)
                                              : a.pcm16 > 0 ? open_pcm16(a.input, a.pcm16)
                                                            : open_recording(a.input);
  const std::string model = a.model.model.empty() ? default_model() : a.model.model;
  speech::LoadOptions load = load_options(a.model);
  if (a.model.model.empty() && !a.quiet) screen.message(kBundledModelNote);
  LoadProgress progress(screen, model, load);
  speech::Engine engine(model, load, {.batch = 4});  // an utterance, and hypotheses about the next
  const std::jthread runs([&](std::stop_token stop) { engine.run(stop); });

  Captions captions(screen, a.json);
  speech::LiveOptions options;
  options.sampling_rate = source->sampling_rate();
  options.voice_activity = a.voice;
  options.transcribe = a.transcribe;
  if (!screen.shows_progress()) options.partial_seconds = 0;
  speech::LiveTranscriber live(engine, options, [&](const LiveEvent& event) { captions.show(event); });

  stop_on_signals();
  const auto begin = Clock::now();
  bool behind = false;
  while (!stop_asked && !source->ended()) {
    const std::vector<float> samples = source->read();
    if (source->lost_audio()) captions.complain("warning: some audio was lost");
    if (a.real_time)
      std::this_thread::sleep_until(begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(live.position())));
    while (!stop_asked) {
      try {
        live.feed(samples);
        behind = false;
        break;
      } catch (const speech::TooMuchAudio&) {
        if (microphone && !std::exchange(behind, true))
          captions.complain("warning: the model is slower than the speech; some audio was lost");
        if (microphone) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    }
    captions.heard(live.position());
  }
  live.commit();
  live.wait();
  return captions.succeeded() ? kOk : kFailure;
}

}  // namespace

void add_listen(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("listen", "Turn what a microphone hears into text while somebody is speaking");
  static ListenArguments a;
  add_model_options(*command, a.model);
  CLI::Option* microphone = command->add_option("--microphone", a.microphone, "ALSA's name of the microphone; `arecord -L` lists them")
                                ->type_name("NAME")
                                ->capture_default_str();
  completes_with(microphone, microphone_names);
  CLI::Option* input = command->add_option("--input", a.input, "An audio file instead of a microphone; - is standard input")
                           ->type_name("FILE")
                           ->excludes(microphone);
  command
      ->add_option("--pcm16", a.pcm16,
                   "--input has raw samples (mono, 16 bits, little-endian) at this rate, which are transcribed as they arrive")
      ->type_name("HZ")
      ->check(CLI::Range(1000, 768000))
      ->needs(input);
  command->add_flag("--real-time", a.real_time, "Take --input at the speed of speech, not at once")->needs(input);
  command->add_option("--silence", a.voice.silence_seconds, "A pause of this many seconds ends a line")
      ->check(CLI::Range(0.2, 10.0))
      ->capture_default_str();
  command->add_option("--threshold", a.voice.threshold, "How likely sound must be speech; higher ones take less noise for speech")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--prompt", a.transcribe.prompt, "The prompt; default: the checkpoint's")->type_name("TEXT");
  command->add_option("--max-new-tokens", a.transcribe.max_new_tokens, "Maximum number of tokens per line")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_flag("--json", a.json, "Print a line of JSON for each line of text: begin, end, text");
  command->add_flag("-q,--quiet", a.quiet, "Print no text before it is final, and only warnings and errors on standard error");
  command->footer(
      "Each stretch of speech becomes a line of text. In a terminal its text is shown, and revised, while it is spoken. Ctrl-C ends the\n"
      "command after the last line.\n"
      "Other sources: parec --rate=16000 --channels=1 | tilewave listen --input - --pcm16 16000");
  command->callback([&exit_code] { exit_code = listen(a); });
}

}  // namespace tw::cli

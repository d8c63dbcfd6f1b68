#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/format.hpp"
#include "speech/audio/audio.hpp"
#include "speech/audio/stream_resampler.hpp"
#include "speech/live/agreement.hpp"
#include "speech/segment/segment.hpp"
#include "tilewave/speech_live.hpp"

namespace tw::speech {

namespace live {

constexpr std::int64_t kShortestUtterance = kSamplingRate / 10;  // without voice activity detection: less holds no word

double seconds_of(std::int64_t samples) { return static_cast<double>(samples) / kSamplingRate; }

std::int64_t samples_in(double seconds) { return std::llround(seconds * kSamplingRate); }

void check(const LiveOptions& options) {
  const auto within = [](const char* name, double value, double lowest, double highest) {
    if (!(value >= lowest && value <= highest))
      throw InvalidArgument(tw::format("live transcription: {} is {}; it must be {} to {}", name, value, lowest, highest));
  };
  if (options.partial_seconds != 0) within("partial_seconds", options.partial_seconds, 0.1, 10);
  within("piece_seconds", options.piece_seconds, 5, 60);
  within("waiting_seconds", options.waiting_seconds, 60, 86400);
  within("waiting_utterances", static_cast<double>(options.waiting_utterances), 1, 1e6);
}

bool same_detection(const std::optional<VoiceActivityOptions>& a, const std::optional<VoiceActivityOptions>& b) {
  if (!a || !b) return a.has_value() == b.has_value();
  return a->threshold == b->threshold && a->prefix_seconds == b->prefix_seconds && a->suffix_seconds == b->suffix_seconds &&
         a->silence_seconds == b->silence_seconds;
}

void append_text(std::string& text, const std::string& next) {
  if (!text.empty() && !next.empty()) text += ' ';
  text += next;
}

// A part of an utterance, which is a request of its own. Long utterances have several.
struct Piece {
  std::int64_t begin = 0;  // in the stream
  Engine::Id id = 0;
  bool done = false;
  Transcript transcript;
  std::exception_ptr error;
};

struct Utterance {
  std::uint64_t number = 0;
  std::int64_t begin = 0, end = 0;
  bool ended = false;
  std::deque<Piece> pieces;
  LocalAgreement agreement;
  std::string tentative;  // in the last partial event

  bool transcribed() const {
    return std::ranges::all_of(pieces, [](const Piece& piece) { return piece.done; });
  }
  std::string text() const {
    std::string all;
    for (const Piece& piece : pieces) append_text(all, piece.transcript.text);
    return all;
  }
};

// What callbacks of the engine use. They may come after the LiveTranscriber has gone.
struct Results {
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void(const LiveEvent&)> on_event;
  std::deque<Utterance> utterances;  // those without an event completed or failed. Only the last one may go on
  std::int64_t waiting_samples = 0;  // of pieces that are not done
  bool partial_running = false;      // in the engine
  bool partial_wanted = false;       // its utterance goes on
  std::deque<LiveEvent> events;      // not yet delivered
  bool delivering = false;
  bool closed = false;

  std::size_t waiting() const {
    return static_cast<std::size_t>(std::ranges::count_if(utterances, [](const Utterance& utterance) { return utterance.ended; }));
  }

  Utterance* find(std::uint64_t number) {
    const auto found = std::ranges::find(utterances, number, &Utterance::number);
    return found == utterances.end() ? nullptr : &*found;
  }

  void emit(LiveEvent::Kind kind, const Utterance& utterance, std::string text = {}, std::string tentative = {}) {
    LiveEvent event;
    event.kind = kind;
    event.utterance = utterance.number;
    event.begin = seconds_of(utterance.begin);
    event.end = seconds_of(utterance.end);
    event.text = std::move(text);
    event.tentative = std::move(tentative);
    events.push_back(std::move(event));
  }

  // Delivers events in order without holding the mutex: if another thread is at it, that one does.
  void deliver(std::unique_lock<std::mutex>& lock) {
    if (delivering) return;
    delivering = true;
    while (!events.empty() && !closed) {
      const LiveEvent event = std::move(events.front());
      events.pop_front();
      lock.unlock();
      on_event(event);
      lock.lock();
    }
    delivering = false;
    changed.notify_all();
  }

  // The same for a member function, which returns when all are delivered.
  void deliver_now(std::unique_lock<std::mutex>& lock) {
    changed.wait(lock, [&] { return !delivering; });
    deliver(lock);
  }

  void take_hypothesis(Utterance& utterance, std::string hypothesis) {
    std::string added = utterance.agreement.add(std::move(hypothesis)), tentative = utterance.agreement.tentative();
    if (added.empty() && tentative == utterance.tentative) return;
    utterance.tentative = tentative;
    emit(LiveEvent::Kind::partial, utterance, std::move(added), std::move(tentative));
  }

  void complete(Utterance& utterance) {
    const auto failed = std::ranges::find_if(utterance.pieces, [](const Piece& piece) { return piece.error != nullptr; });
    if (failed != utterance.pieces.end()) {
      emit(LiveEvent::Kind::failed, utterance);
      events.back().error = failed->error;
      return;
    }
    Transcript all;
    all.text = utterance.text();
    all.duration = seconds_of(utterance.end - utterance.begin);
    for (Piece& piece : utterance.pieces) {
      all.truncated |= piece.transcript.truncated;
      all.prompt_tokens += piece.transcript.prompt_tokens;
      all.audio_tokens += piece.transcript.audio_tokens;
      for (TranscriptSegment& segment : piece.transcript.segments) {
        segment.begin += seconds_of(piece.begin);
        segment.end += seconds_of(piece.begin);
        all.segments.push_back(std::move(segment));
      }
    }
    if (std::string rest = utterance.agreement.rest(all.text); !rest.empty()) emit(LiveEvent::Kind::partial, utterance, std::move(rest));
    emit(LiveEvent::Kind::completed, utterance, all.text);
    events.back().transcript = std::move(all);
  }

  void piece_done(std::uint64_t number, std::size_t index, std::int64_t samples, Transcript transcript, std::exception_ptr error) {
    std::unique_lock lock(mutex);
    waiting_samples -= samples;
    if (Utterance* utterance = find(number)) {  // or it was cleared
      Piece& piece = utterance->pieces[index];
      piece.done = true;
      piece.transcript = std::move(transcript);
      piece.error = std::move(error);
    }
    complete_in_order();
    deliver(lock);
  }

  void complete_in_order() {
    while (!utterances.empty() && utterances.front().ended && utterances.front().transcribed()) {
      complete(utterances.front());
      utterances.pop_front();
    }
  }
};

}  // namespace live

// The members other than `results` belong to the thread that calls.
struct LiveTranscriber::State {
  State(Engine& shared_engine, LiveOptions given) : engine(shared_engine), options(std::move(given)), resampler(options.sampling_rate) {
    live::check(options);
    if (options.voice_activity) detector.emplace(*options.voice_activity);
  }

  std::int64_t audio_begin() const { return fed - std::ssize(audio); }

  void drop_before(std::int64_t sample) {
    const std::int64_t count = std::clamp<std::int64_t>(sample - audio_begin(), 0, std::ssize(audio));
    audio.erase(audio.begin(), audio.begin() + count);
  }

  // The next samples at 16 kHz. Returns whether an utterance ended.
  void take(std::span<const float> samples) {
    if (samples.empty()) return;
    if (!detector && !open) begin_utterance(fed);
    audio.insert(audio.end(), samples.begin(), samples.end());
    fed += std::ssize(samples);
    if (detector) follow(detector->feed(samples));
    if (!open) return;
    cut_pieces();
    hypothesize();
  }

  void follow(const std::vector<VoiceEvent>& events) {
    for (const VoiceEvent& event : events) {
      const std::int64_t sample = std::clamp(detector_begin + event.sample, audio_begin(), fed);
      if (event.kind == VoiceEvent::Kind::started)
        begin_utterance(sample);
      else
        end_utterance(sample);
    }
    if (!open) drop_before(detector_begin + detector->horizon());
  }

  void begin_utterance(std::int64_t sample) {
    drop_before(sample);
    open = true;
    begin = sample;
    // Detected speech has been going on for a while.
    next_partial = detector ? fed : begin + live::samples_in(options.partial_seconds);
    std::unique_lock lock(results->mutex);
    live::Utterance& utterance = results->utterances.emplace_back();
    utterance.number = ++number;
    utterance.begin = begin;
    if (!detector) return;
    results->emit(LiveEvent::Kind::started, utterance);
    results->deliver_now(lock);
  }

  void end_utterance(std::int64_t end) {
    cancel_partial();
    open = false;
    const std::int64_t last_begin = audio_begin();
    std::vector<float> last(audio.begin(), audio.begin() + (end - last_begin));
    drop_before(end);
    std::unique_lock lock(results->mutex);
    live::Utterance& utterance = results->utterances.back();
    utterance.end = end;
    results->emit(LiveEvent::Kind::ended, utterance);
    results->deliver_now(lock);
    if (!last.empty()) {
      lock.unlock();
      submit_piece(last_begin, std::move(last));
      lock.lock();
    }
    utterance.ended = true;
    results->complete_in_order();
    results->deliver_now(lock);
  }

  // Transcribes a part of the newest utterance.
  void submit_piece(std::int64_t piece_begin, std::vector<float> samples) {
    const std::int64_t count = std::ssize(samples);
    std::unique_lock lock(results->mutex);
    live::Utterance& utterance = results->utterances.back();
    const std::size_t index = utterance.pieces.size();
    utterance.pieces.emplace_back().begin = piece_begin;
    results->waiting_samples += count;
    lock.unlock();
    Request request = {.samples = std::move(samples), .options = options.transcribe, .client = options.client, .on_done = {}};
    request.on_done = [results = results, on_request = options.on_request, utterance = number, index, count](Completion completion) {
      if (on_request) on_request(completion);
      results->piece_done(utterance, index, count, std::move(completion.transcript), std::move(completion.error));
    };
    try {
      const Engine::Id id = engine.submit(std::move(request));
      lock.lock();
      if (live::Utterance* found = results->find(number)) found->pieces[index].id = id;
    } catch (const Error&) {
      results->piece_done(number, index, count, {}, std::current_exception());
    }
  }

  // Of an utterance that has become long, all but the last segment is transcribed for good.
  void cut_pieces() {
    const std::int64_t length = std::ssize(audio), keep = live::samples_in(1);
    if (length <= live::samples_in(options.piece_seconds)) return;
    const std::vector<Segment> segments = cut_at_silences(audio, {.longest_seconds = options.piece_seconds});
    if (segments.empty()) return drop_before(fed - keep);
    const bool speaking = segments.back().end > length - keep;
    const std::int64_t cut = speaking ? segments.back().begin : segments.back().end;
    const std::int64_t piece_begin = audio_begin();
    std::vector<float> piece(audio.begin(), audio.begin() + cut);
    drop_before(piece_begin + cut);
    if (speaking && segments.size() == 1) return;  // only silence was cut
    submit_piece(piece_begin, std::move(piece));
  }

  void hypothesize() {
    if (options.partial_seconds == 0 || fed < next_partial) return;
    std::unique_lock lock(results->mutex);
    const live::Utterance& utterance = results->utterances.back();
    if (results->partial_running || !utterance.transcribed()) return;  // the next samples will ask again
    next_partial = fed + live::samples_in(options.partial_seconds);
    results->partial_running = results->partial_wanted = true;
    std::string before = utterance.text();
    lock.unlock();
    Request request = {.samples = audio, .options = options.transcribe, .client = options.client, .on_done = {}};
    request.options.logprobs = false;
    request.on_done = [results = results, on_request = options.on_request, utterance = number,
                       before = std::move(before)](Completion completion) {
      if (on_request) on_request(completion);
      std::unique_lock results_lock(results->mutex);
      results->partial_running = false;
      live::Utterance* found = results->partial_wanted && !completion.error ? results->find(utterance) : nullptr;
      if (!found) return;
      std::string hypothesis = before;
      live::append_text(hypothesis, completion.transcript.text);
      results->take_hypothesis(*found, std::move(hypothesis));
      results->deliver(results_lock);
    };
    try {
      partial = engine.submit(std::move(request));
    } catch (
        const Error&) {  // partial text is the first to go when there is too much to do; whatever else is wrong, the last request will say
      lock.lock();
      results->partial_running = false;
    }
  }

  void cancel_partial() {
    {
      const std::lock_guard lock(results->mutex);
      results->partial_wanted = false;
      if (!results->partial_running) return;
    }
    engine.cancel(partial);
  }

  // Gives the detector everything that was fed. Returns whether an utterance ended meanwhile or goes on.
  bool flush() {
    const std::uint64_t ended_before = number - (open ? 1 : 0);
    take(resampler.finish());
    if (detector) follow(detector->finish());
    return number > ended_before;
  }

  bool commit() {
    const bool any = flush();
    if (!open) return any;
    if (fed - begin < live::kShortestUtterance) return false;
    end_utterance(fed);
    return true;
  }

  void clear() {
    const std::vector<float> rest = resampler.finish();
    fed += std::ssize(rest);
    if (detector) {
      detector->feed(rest);
      detector->finish();
    }
    audio.clear();
    if (!open) return;
    open = false;
    cancel_partial();
    std::vector<Engine::Id> pieces;
    {
      std::unique_lock lock(results->mutex);
      for (const live::Piece& piece : results->utterances.back().pieces) pieces.push_back(piece.id);
      results->utterances.pop_back();
      results->deliver_now(lock);
    }
    for (const Engine::Id id : pieces) engine.cancel(id);
  }

  Engine& engine;
  LiveOptions options;
  StreamResampler resampler;
  std::optional<VoiceActivityDetector> detector;
  std::int64_t detector_begin = 0;  // where in the stream its first sample is
  std::int64_t fed = 0;             // samples at 16 kHz
  std::vector<float> audio;         // the last of them: what is not in a piece, or may still become speech
  bool open = false;                // an utterance goes on
  std::int64_t begin = 0;           // of the newest utterance
  std::uint64_t number = 0;         // of the newest utterance
  std::int64_t next_partial = 0;    // when to try the next hypothesis
  Engine::Id partial = 0;           // the newest request for one
  std::shared_ptr<live::Results> results = std::make_shared<live::Results>();
};

LiveTranscriber::LiveTranscriber(Engine& engine, LiveOptions options, std::function<void(const LiveEvent& event)> on_event)
    : state_(std::make_unique<State>(engine, std::move(options))) {
  state_->results->on_event = std::move(on_event);
}

LiveTranscriber::~LiveTranscriber() {
  live::Results& results = *state_->results;
  std::vector<Engine::Id> ids = {state_->partial};
  {
    std::unique_lock lock(results.mutex);
    results.closed = true;
    results.changed.wait(lock, [&] { return !results.delivering; });
    for (const live::Utterance& utterance : results.utterances)
      for (const live::Piece& piece : utterance.pieces)
        if (!piece.done) ids.push_back(piece.id);
    results.utterances.clear();
    results.partial_wanted = false;
  }
  for (const Engine::Id id : ids) state_->engine.cancel(id);
}

void LiveTranscriber::feed(std::span<const float> samples) {
  for (std::size_t n = 0; n < samples.size(); ++n)
    if (!std::isfinite(samples[n]))
      throw InvalidArgument(tw::format("live transcription: sample {} is {}; samples must be finite", n, samples[n]));
  {
    const std::lock_guard lock(state_->results->mutex);
    const double given = static_cast<double>(samples.size()) / state_->options.sampling_rate;
    const double waiting = live::seconds_of(state_->results->waiting_samples + std::ssize(state_->audio));
    if (waiting + given > state_->options.waiting_seconds)
      throw TooMuchAudio(
          tw::format("live transcription: {:.1f} s of audio wait for their text, and {:.1f} s more were given; {:.1f} s are allowed",
                     waiting, given, state_->options.waiting_seconds));
    if (const std::size_t utterances = state_->results->waiting(); utterances >= state_->options.waiting_utterances)
      throw TooMuchAudio(tw::format("live transcription: {} utterances wait for their text already", utterances));
  }
  const auto step = static_cast<std::size_t>(state_->options.sampling_rate) / 10;
  for (std::size_t at = 0; at < samples.size(); at += step)
    state_->take(state_->resampler.feed(samples.subspan(at, std::min(step, samples.size() - at))));
}

bool LiveTranscriber::commit() { return state_->commit(); }

void LiveTranscriber::clear() { state_->clear(); }

void LiveTranscriber::configure(LiveOptions options) {
  State& state = *state_;
  live::check(options);
  if (options.sampling_rate != state.options.sampling_rate || !live::same_detection(options.voice_activity, state.options.voice_activity)) {
    StreamResampler resampler(options.sampling_rate);
    std::optional<VoiceActivityDetector> detector;
    if (options.voice_activity) detector.emplace(*options.voice_activity);
    if (!state.commit()) state.clear();
    state.resampler = std::move(resampler);
    state.detector = std::move(detector);
    state.detector_begin = state.fed;
    state.audio.clear();
  }
  state.options = std::move(options);
}

void LiveTranscriber::wait() {
  live::Results& results = *state_->results;
  std::unique_lock lock(results.mutex);
  results.changed.wait(lock, [&] { return results.waiting() == 0 && results.events.empty() && !results.delivering; });
}

double LiveTranscriber::position() const { return live::seconds_of(state_->fed); }

double LiveTranscriber::uncommitted() const { return state_->open ? live::seconds_of(state_->fed - state_->begin) : 0; }

std::size_t LiveTranscriber::waiting() const {
  const std::lock_guard lock(state_->results->mutex);
  return state_->results->waiting();
}

}  // namespace tw::speech

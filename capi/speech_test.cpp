#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <fstream>
#include <future>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "tests/gguf_digits.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/tilewave.h"

namespace {

const std::string kSource = TILEWAVE_SOURCE_DIR;

struct Loaded {
  tw_transcriber* transcriber = nullptr;
  Loaded() {
    tw_load_options options = {};
    options.struct_size = sizeof options;
    options.device = "cpu";
    options.weights = "int8";
    EXPECT_EQ(tw_transcriber_load((kSource + "/assets/digits").c_str(), &options, &transcriber), TW_OK) << tw_last_error();
  }
  ~Loaded() { tw_transcriber_free(transcriber); }
};

TEST(SpeechInC, AFileAndItsSegments) {
  const Loaded model;
  tw_transcript* transcript = nullptr;
  ASSERT_EQ(tw_transcribe_file(model.transcriber, (kSource + "/assets/samples/digits-1.wav").c_str(), nullptr, &transcript), TW_OK)
      << tw_last_error();
  EXPECT_STREQ(tw_transcript_text(transcript), "six seven nine one");
  ASSERT_EQ(tw_transcript_segment_count(transcript), 1u);
  tw_transcript_segment segment = {};
  segment.struct_size = sizeof segment;
  ASSERT_EQ(tw_transcript_segment_at(transcript, 0, &segment), TW_OK);
  EXPECT_STREQ(segment.text, "six seven nine one");
  EXPECT_GT(segment.end, segment.begin);
  EXPECT_GE(segment.token_count, 4u);
  EXPECT_EQ(segment.truncated, 0);
  EXPECT_EQ(tw_transcript_segment_at(transcript, 1, &segment), TW_INVALID_ARGUMENT);
  EXPECT_STREQ(tw_last_error(), "index is 1; the transcript has 1 segments");
  tw_transcript_free(transcript);
}

TEST(SpeechInC, OptionsAndCancellation) {
  const Loaded model;
  struct Heard {
    std::string text;
    bool stop = false;
  } heard;
  tw_transcribe_options options = {};
  options.struct_size = sizeof options;
  options.user = &heard;
  options.on_text = [](void* user, const char* text, size_t bytes) -> int32_t {
    static_cast<Heard*>(user)->text.append(text, bytes);
    return static_cast<Heard*>(user)->stop;
  };
  tw_transcript* transcript = nullptr;
  const std::string file = kSource + "/assets/samples/digits-2.wav";
  ASSERT_EQ(tw_transcribe_file(model.transcriber, file.c_str(), &options, &transcript), TW_OK) << tw_last_error();
  EXPECT_EQ(heard.text, tw_transcript_text(transcript));
  EXPECT_EQ(heard.text, "eight zero seven");
  tw_transcript_free(transcript);
  transcript = nullptr;
  heard.stop = true;
  EXPECT_EQ(tw_transcribe_file(model.transcriber, file.c_str(), &options, &transcript), TW_CANCELLED);
  EXPECT_EQ(transcript, nullptr);
  // An older caller's structure: what it does not have is the default.
  options.struct_size = sizeof options.struct_size + sizeof options.segmentation;
  const std::vector<float> silence(16000, 0.0f);
  ASSERT_EQ(tw_transcribe_samples(model.transcriber, silence.data(), silence.size(), &options, &transcript), TW_OK) << tw_last_error();
  EXPECT_STREQ(tw_transcript_text(transcript), "");
  tw_transcript_free(transcript);
}

TEST(SpeechInC, GgufFiles) {
  const tw::test::TemporaryDirectory directory;
  const auto paths = tw::test::digits_gguf("Q8_0").write(directory.path());
  tw_load_options options = {};
  options.struct_size = sizeof options;
  options.device = "cpu";
  tw_transcriber* transcriber = nullptr;
  EXPECT_EQ(tw_transcriber_load(paths.model.c_str(), &options, &transcriber), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("mmproj is missing"), std::string::npos) << tw_last_error();
  options.mmproj = paths.mmproj.c_str();
  ASSERT_EQ(tw_transcriber_load(paths.model.c_str(), &options, &transcriber), TW_OK) << tw_last_error();
  tw_transcript* transcript = nullptr;
  ASSERT_EQ(tw_transcribe_file(transcriber, (kSource + "/assets/samples/digits-2.wav").c_str(), nullptr, &transcript), TW_OK);
  EXPECT_STREQ(tw_transcript_text(transcript), "eight zero seven");
  tw_transcript_free(transcript);
  tw_transcriber_free(transcriber);
  // A caller from before the field.
  options.struct_size = offsetof(tw_load_options, mmproj);
  EXPECT_EQ(tw_transcriber_load((kSource + "/assets/digits").c_str(), &options, &transcriber), TW_OK) << tw_last_error();
  tw_transcriber_free(transcriber);
}

std::string bytes_of(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

struct Audio {
  tw_audio* audio = nullptr;
  explicit Audio(const std::string& sample) {
    EXPECT_EQ(tw_audio_read_file((kSource + "/assets/samples/" + sample).c_str(), &audio), TW_OK) << tw_last_error();
  }
  ~Audio() { tw_audio_free(audio); }
};

TEST(SpeechInC, AudioFromFilesAndBytes) {
  const Audio file("digits-1.wav");
  const std::string bytes = bytes_of(kSource + "/assets/samples/digits-1.wav");
  tw_audio* audio = nullptr;
  ASSERT_EQ(tw_audio_read_bytes(bytes.data(), bytes.size(), "upload", &audio), TW_OK) << tw_last_error();
  const size_t count = tw_audio_sample_count(file.audio);
  ASSERT_EQ(tw_audio_sample_count(audio), count);
  EXPECT_GT(count, 16000u);
  EXPECT_EQ(std::memcmp(tw_audio_samples(audio), tw_audio_samples(file.audio), count * sizeof(float)), 0);
  tw_audio_free(audio);
  audio = nullptr;
  EXPECT_EQ(tw_audio_read_bytes(bytes.data(), bytes.size() - 1000, "upload", &audio), TW_FILE_ERROR);
  EXPECT_EQ(std::string(tw_last_error()).rfind("upload: ", 0), 0u) << tw_last_error();
  EXPECT_EQ(tw_audio_read_bytes(nullptr, 0, "upload", &audio), TW_FILE_ERROR);
  EXPECT_EQ(tw_audio_read_bytes(nullptr, 1, "upload", &audio), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_audio_read_bytes(bytes.data(), bytes.size(), nullptr, &audio), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_audio_read_file("/nonexistent.wav", &audio), TW_FILE_ERROR);
  EXPECT_EQ(audio, nullptr);
  EXPECT_EQ(tw_audio_sample_count(nullptr), 0u);
}

/// What a request's callbacks were called with.
struct Answer {
  int calls = 0;
  tw_status status = TW_FAILURE;
  std::string text, streamed, error;
  double seconds = 0;
  bool stop = false;

  static int32_t on_text(void* user, const char* text, size_t bytes) {
    static_cast<Answer*>(user)->streamed.append(text, bytes);
    return static_cast<Answer*>(user)->stop;
  }
  static void on_done(void* user, const tw_completion* completion) {
    Answer& answer = *static_cast<Answer*>(user);
    ++answer.calls;
    answer.status = completion->status;
    answer.error = completion->error;
    answer.text = tw_transcript_text(completion->transcript);
    tw_transcript_free(completion->transcript);
    answer.seconds = completion->total;
  }
};

struct LoadedEngine {
  tw_engine* engine = nullptr;
  explicit LoadedEngine(size_t queue = 0) {
    tw_load_options load = {};
    load.struct_size = sizeof load;
    load.device = "cpu";
    tw_engine_options options = {};
    options.struct_size = sizeof options;
    options.queue = queue;
    EXPECT_EQ(tw_engine_load((kSource + "/assets/digits").c_str(), &load, &options, &engine), TW_OK) << tw_last_error();
  }
  ~LoadedEngine() { tw_engine_free(engine); }

  tw_status submit(const Audio& audio, Answer& answer, uint64_t* id = nullptr) const {
    tw_transcribe_options options = {};
    options.struct_size = sizeof options;
    options.on_text = Answer::on_text;
    options.user = &answer;
    return tw_engine_submit(engine, tw_audio_samples(audio.audio), tw_audio_sample_count(audio.audio), &options, 1, Answer::on_done,
                            &answer, id);
  }
  void step_to_the_end() const {
    for (int32_t more = 1; more != 0;) ASSERT_EQ(tw_engine_step(engine, &more), TW_OK) << tw_last_error();
  }
};

TEST(SpeechInC, AnEngineForManyRequests) {
  const LoadedEngine loaded;
  const Audio first("digits-1.wav"), second("digits-2.wav");
  Answer a, b, cancelled, stopped;
  stopped.stop = true;
  uint64_t id = 0;
  ASSERT_EQ(loaded.submit(first, a), TW_OK) << tw_last_error();
  ASSERT_EQ(loaded.submit(second, b), TW_OK);
  ASSERT_EQ(loaded.submit(second, cancelled, &id), TW_OK);
  ASSERT_EQ(loaded.submit(second, stopped), TW_OK);
  ASSERT_EQ(tw_engine_cancel(loaded.engine, id), TW_OK);
  tw_engine_counters counters = {};
  counters.struct_size = sizeof counters;
  ASSERT_EQ(tw_engine_read_counters(loaded.engine, &counters), TW_OK);
  EXPECT_EQ(counters.waiting, 4u);
  loaded.step_to_the_end();
  EXPECT_EQ(a.text, "six seven nine one");
  EXPECT_EQ(a.streamed, a.text);
  EXPECT_EQ(b.text, "eight zero seven");
  EXPECT_GT(a.seconds, 0);
  EXPECT_EQ(cancelled.status, TW_CANCELLED);
  EXPECT_NE(cancelled.error, "");
  EXPECT_EQ(cancelled.streamed, "");
  EXPECT_EQ(stopped.status, TW_CANCELLED);
  for (const Answer* answer : {&a, &b, &cancelled, &stopped}) EXPECT_EQ(answer->calls, 1);
  ASSERT_EQ(tw_engine_read_counters(loaded.engine, &counters), TW_OK);
  EXPECT_EQ(counters.waiting + counters.running, 0u);
}

TEST(SpeechInC, AnEngineThatRunsUntilItIsStopped) {
  Answer answer;
  {
    const LoadedEngine loaded;
    std::thread runs([&] { EXPECT_EQ(tw_engine_run(loaded.engine), TW_OK) << tw_last_error(); });
    std::promise<std::string> text;
    const Audio audio("digits-1.wav");
    const auto done = [](void* user, const tw_completion* completion) {
      static_cast<std::promise<std::string>*>(user)->set_value(tw_transcript_text(completion->transcript));
      tw_transcript_free(completion->transcript);
    };
    EXPECT_EQ(tw_engine_submit(loaded.engine, tw_audio_samples(audio.audio), tw_audio_sample_count(audio.audio), nullptr, 0, done, &text,
                               nullptr),
              TW_OK);
    EXPECT_EQ(text.get_future().get(), "six seven nine one");
    EXPECT_EQ(tw_engine_stop(loaded.engine), TW_OK);
    runs.join();
    EXPECT_EQ(loaded.submit(audio, answer), TW_OK);
  }
  EXPECT_EQ(answer.status, TW_CANCELLED);  // the engine has ended
  EXPECT_EQ(answer.calls, 1);
}

TEST(SpeechInC, AnEngineRefuses) {
  const LoadedEngine loaded(1);
  const Audio audio("digits-1.wav");
  Answer answer, refused;
  ASSERT_EQ(loaded.submit(audio, answer), TW_OK);
  EXPECT_EQ(loaded.submit(audio, refused), TW_QUEUE_FULL);
  EXPECT_NE(std::string(tw_last_error()), "");
  EXPECT_EQ(tw_engine_submit(loaded.engine, nullptr, 1, nullptr, 0, Answer::on_done, &refused, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_engine_submit(loaded.engine, nullptr, 0, nullptr, 0, nullptr, &refused, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_STREQ(tw_last_error(), "on_done is null");
  tw_transcribe_options options = {};
  options.struct_size = sizeof options;
  options.batch = 4;
  EXPECT_EQ(tw_engine_submit(loaded.engine, nullptr, 0, &options, 0, Answer::on_done, &refused, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_STREQ(tw_last_error(), "options.batch is 4; an engine has tw_engine_options.batch");
  EXPECT_EQ(tw_engine_step(nullptr, nullptr), TW_INVALID_ARGUMENT);
  tw_engine* engine = nullptr;
  EXPECT_EQ(tw_engine_load("/nonexistent", nullptr, nullptr, &engine), TW_FILE_ERROR);
  EXPECT_EQ(engine, nullptr);
  tw_engine_free(nullptr);
  loaded.step_to_the_end();
  EXPECT_EQ(answer.text, "six seven nine one");
  EXPECT_EQ(refused.calls, 0);
}

TEST(SpeechInC, BadArguments) {
  tw_transcriber* transcriber = nullptr;
  EXPECT_EQ(tw_transcriber_load(nullptr, nullptr, &transcriber), TW_INVALID_ARGUMENT);
  EXPECT_STREQ(tw_last_error(), "model is null");
  EXPECT_EQ(tw_transcriber_load("/nonexistent", nullptr, &transcriber), TW_FILE_ERROR);
  EXPECT_NE(std::string(tw_last_error()).find("/nonexistent"), std::string::npos) << tw_last_error();
  EXPECT_EQ(transcriber, nullptr);
  tw_load_options unset = {};
  EXPECT_EQ(tw_transcriber_load("/nonexistent", &unset, &transcriber), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("options.struct_size is 0"), std::string::npos) << tw_last_error();
  unset.struct_size = sizeof unset;
  unset.weights = "int3";
  EXPECT_EQ(tw_transcriber_load((kSource + "/assets/digits").c_str(), &unset, &transcriber), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find("weights are \"int3\""), std::string::npos) << tw_last_error();
  const Loaded model;
  tw_transcript* transcript = nullptr;
  EXPECT_EQ(tw_transcribe_file(model.transcriber, "/nonexistent.wav", nullptr, &transcript), TW_FILE_ERROR);
  EXPECT_EQ(tw_transcribe_file(model.transcriber, nullptr, nullptr, &transcript), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_transcribe_samples(model.transcriber, nullptr, 3, nullptr, &transcript), TW_INVALID_ARGUMENT);
  EXPECT_STREQ(tw_last_error(), "samples is null");
  const float sample = 0;
  for (const size_t count : {size_t{1} << 62, ~size_t{0}, size_t{10} << 30}) {
    EXPECT_EQ(tw_transcribe_samples(model.transcriber, &sample, count, nullptr, &transcript), TW_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(tw_last_error()), "count is " + std::to_string(count) + "; at most 9676800000 samples, a week, are allowed");
  }
  EXPECT_EQ(transcript, nullptr);
  tw_transcriber_free(nullptr);
  tw_transcript_free(nullptr);
}

}  // namespace

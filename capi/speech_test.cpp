#include <gtest/gtest.h>

#include <cstddef>
#include <string>
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

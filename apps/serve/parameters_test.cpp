#include "apps/serve/parameters.hpp"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "apps/serve/error.hpp"
#include "apps/serve/languages.hpp"

namespace tw::serve {
namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

TranscriptionParameters parse(const Fields& fields) {
  std::vector<FormPart> form;
  for (const auto& [name, value] : fields) form.push_back({name, {}, "", value});
  return parse_parameters(form);
}

/// With the two fields that every request needs.
Fields with(Fields fields) {
  fields.insert(fields.begin(), {{"file", "RIFF"}, {"model", "whisper-1"}});
  return fields;
}

TEST(Parameters, Defaults) {
  const Fields fields = with({});
  const TranscriptionParameters p = parse(fields);
  EXPECT_EQ(p.file, "RIFF");
  EXPECT_EQ(p.model, "whisper-1");
  EXPECT_EQ(p.language, "unknown");
  EXPECT_EQ(p.prompt, "");
  EXPECT_EQ(p.temperature, 0);
  EXPECT_EQ(p.format, ResponseFormat::json);
  EXPECT_FALSE(p.stream);
  EXPECT_FALSE(p.logprobs);
  EXPECT_FALSE(p.vad);
}

TEST(Parameters, All) {
  const TranscriptionParameters p = parse(with({{"language", "DE"},
                                                {"prompt",
                                                 "Gr\xC3\xBC\xC3\x9F"
                                                 "e\n"},
                                                {"temperature", "0.25"},
                                                {"response_format", "verbose_json"},
                                                {"stream", "True"},
                                                {"timestamp_granularities[]", "segment"},
                                                {"timestamp_granularities[]", "segment"},
                                                {"chunking_strategy[type]", "server_vad"},
                                                {"chunking_strategy[threshold]", "0.5"},
                                                {"languages[]", "de"},
                                                {"languages[1]", "en"},
                                                {"keywords[]", "Tilewave"},
                                                {"something_else", "\xFF"}}));
  EXPECT_EQ(p.language, "german");
  EXPECT_EQ(p.prompt,
            "Gr\xC3\xBC\xC3\x9F"
            "e\n");
  EXPECT_EQ(p.temperature, 0.25);
  EXPECT_EQ(p.format, ResponseFormat::verbose_json);
  EXPECT_TRUE(p.stream);
  EXPECT_TRUE(p.vad);
  for (const char* name : {"include[]", "include", "include[0]"}) EXPECT_TRUE(parse(with({{name, "logprobs"}})).logprobs);
  EXPECT_EQ(parse(with({{"response_format", "vtt"}, {"stream", "false"}})).format, ResponseFormat::vtt);
  EXPECT_FALSE(parse(with({{"chunking_strategy", "auto"}})).vad);
  for (const char* strategy :
       {R"({"type":"server_vad"})", R"({"type":"server_vad","threshold":1,"prefix_padding_ms":300,"silence_duration_ms":"200"})"})
    EXPECT_TRUE(parse(with({{"chunking_strategy", strategy}})).vad) << strategy;
  EXPECT_EQ(parse(with({{"prompt", std::string(65536, 'a')}})).prompt.size(), 65536U);
}

// Each malformed field is refused by its name.
TEST(Parameters, Errors) {
  const struct {
    Fields fields;
    const char *param, *message;
  } cases[] = {
      {{{"model", "m"}}, "file", "file is missing; it must be the audio file"},
      {{{"file", "RIFF"}}, "model", "model is missing; it must be the name of a model"},
      {with({{"file", "x"}}), "file", "file is given more than once"},
      {with({{"model", "m"}}), "model", "model is given more than once"},
      {with({{"language", "english"}}), "language", "language is \"english\"; it must be a code of ISO 639-1, such as en"},
      {with({{"language", "en-US"}}), "language", "language is \"en-US\"; it must be a code of ISO 639-1, such as en"},
      {with({{"language", ""}}), "language", "language is \"\"; it must be a code of ISO 639-1, such as en"},
      {with({{"language[]", "en"}}), "language", "language is a single value, not a list"},
      {with({{"languages[]", "xx"}}), "languages", "languages is \"xx\"; it must be a code of ISO 639-1, such as en"},
      {with({{"prompt", "\xFF"}}), "prompt", "prompt is not valid UTF-8"},
      {with({{"prompt", std::string(65537, 'a')}}), "prompt", "prompt has 65537 bytes; at most 65536 are allowed"},
      {with({{"temperature", "hot"}}), "temperature", "temperature is \"hot\"; it must be a number from 0 to 1"},
      {with({{"temperature", "1.01"}}), "temperature", "temperature is \"1.01\"; it must be a number from 0 to 1"},
      {with({{"temperature", "-0.1"}}), "temperature", "temperature is \"-0.1\"; it must be a number from 0 to 1"},
      {with({{"temperature", "nan"}}), "temperature", "temperature is \"nan\"; it must be a number from 0 to 1"},
      {with({{"temperature", "0.5 "}}), "temperature", "temperature is \"0.5 \"; it must be a number from 0 to 1"},
      {with({{"temperature", ""}}), "temperature", "temperature is \"\"; it must be a number from 0 to 1"},
      {with({{"temperature", "1e999"}}), "temperature", "temperature is \"1e999\"; it must be a number from 0 to 1"},
      {with({{"response_format", "xml"}}), "response_format",
       "response_format is \"xml\"; it must be json, text, srt, verbose_json or vtt"},
      {with({{"response_format", "diarized_json"}}), "response_format",
       "response_format is \"diarized_json\"; this server cannot tell speakers apart"},
      {with({{"stream", "yes"}}), "stream", "stream is \"yes\"; it must be true or false"},
      {with({{"stream", "true"}, {"response_format", "srt"}}), "stream",
       "stream is true; this needs response_format json, text or verbose_json"},
      {with({{"include[]", "words"}}), "include", "include is \"words\"; it must be logprobs"},
      {with({{"include[]", "logprobs"}, {"response_format", "verbose_json"}}), "include",
       "include has \"logprobs\"; this needs response_format json"},
      {with({{"include[a]", "logprobs"}}), "include", "include[a] is unknown; include is a list"},
      {with({{"timestamp_granularities[]", "segment"}}), "timestamp_granularities",
       "timestamp_granularities needs response_format verbose_json"},
      {with({{"timestamp_granularities[]", "word"}, {"response_format", "verbose_json"}}), "timestamp_granularities",
       "timestamp_granularities has \"word\"; the model cannot align words with the audio, so only segment is supported"},
      {with({{"timestamp_granularities[]", "line"}}), "timestamp_granularities", "timestamp_granularities is \"line\"; it must be segment"},
      {with({{"known_speaker_names[]", "Ann"}}), "known_speaker_names",
       "known_speaker_names is not supported: this server cannot tell speakers apart"},
      {with({{"chunking_strategy", "manual"}}), "chunking_strategy",
       "chunking_strategy is \"manual\"; it must be auto or a JSON object of type server_vad"},
      {with({{"chunking_strategy", "[1]"}}), "chunking_strategy",
       "chunking_strategy is [1]; it must be auto or an object of type server_vad"},
      {with({{"chunking_strategy", "{}"}}), "chunking_strategy.type", "chunking_strategy.type is missing; it must be server_vad"},
      {with({{"chunking_strategy", "auto"}, {"chunking_strategy[type]", "server_vad"}}), "chunking_strategy",
       "chunking_strategy is given more than once"},
      {with({{"chunking_strategy[type]", "client_vad"}}), "chunking_strategy.type",
       "chunking_strategy.type is \"client_vad\"; it must be \"server_vad\""},
      {with({{"chunking_strategy[type]", "server_vad"}, {"chunking_strategy[type]", "server_vad"}}), "chunking_strategy.type",
       "chunking_strategy.type is given more than once"},
      {with({{"chunking_strategy", R"({"type":"server_vad","threshold":2})"}}), "chunking_strategy.threshold",
       "chunking_strategy.threshold is 2; it must be a number from 0 to 1"},
      {with({{"chunking_strategy", R"({"type":"server_vad","threshold":null})"}}), "chunking_strategy.threshold",
       "chunking_strategy.threshold is null; it must be a number from 0 to 1"},
      {with({{"chunking_strategy[type]", "server_vad"}, {"chunking_strategy[silence_duration_ms]", "-1"}}),
       "chunking_strategy.silence_duration_ms", "chunking_strategy.silence_duration_ms is \"-1\"; it must be a number from 0 to 3600000"},
      {with({{"chunking_strategy[type]", "server_vad"}, {"chunking_strategy[x\n]", "1"}}), "chunking_strategy.x\\x0A",
       "chunking_strategy.x\\x0A is unknown; allowed are type, threshold, prefix_padding_ms and silence_duration_ms"},
  };
  for (const auto& each : cases) {
    try {
      parse(each.fields);
      ADD_FAILURE() << "no error: " << each.message;
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status, 400) << each.message;
      EXPECT_EQ(error.param, each.param);
      EXPECT_STREQ(error.what(), each.message);
      EXPECT_NE(error.code, "") << each.message;
    }
  }
}

TEST(Languages, Names) {
  const std::pair<const char*, const char*> cases[] = {
      {"aa", "afar"},    {"en", "english"}, {"de", "german"},  {"el", "greek"},      {"haw", "hawaiian"},
      {"zh", "chinese"}, {"zu", "zulu"},    {"es", "spanish"}, {"yue", "cantonese"}, {"xx", ""},
      {"english", ""},   {"", ""},          {"e", ""},         {"zz", ""},           {"EN", ""}};
  for (const auto& [code, name] : cases) EXPECT_EQ(language_name(code), name) << code;
  int known = 0;
  for (char a = 'a'; a <= 'z'; ++a)
    for (char b = 'a'; b <= 'z'; ++b) known += language_name(std::string{a, b}).empty() ? 0 : 1;
  EXPECT_EQ(known, 183);  // sorted: each of two letters is found
}

}  // namespace
}  // namespace tw::serve

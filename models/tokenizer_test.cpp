#include "models/tokenizer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <limits>
#include <thread>

#include "models/json.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

using test::expect_error;

const std::filesystem::path kData = std::filesystem::path(TILEWAVE_SOURCE_DIR) / "tests/data/tokenizer";

Tokenizer stored(const std::string& name) { return Tokenizer::load(kData / (name + ".json")); }

/// A byte-level tokenizer with "model" and other members replaced: `members` are those of tokenizer.json but for the model's, each with a
/// comma in front.
std::string with(const std::string& members, const std::string& model = R"("vocab":{"a":0,"b":1,"ab":2},"merges":["a b"])") {
  return tw::format(R"({{"model":{{"type":"BPE",{}}}{}}})", model, members);
}

std::vector<int> ids_of(const std::string& json, std::string_view text, const EncodeOptions& options = {}) {
  return Tokenizer::parse(json, "x.json").encode(text, options);
}

using Ids = std::vector<int>;

// tools/goldens/tokenizer.py made the files with Hugging Face's library.
TEST(Tokenizer, IdsAndTextsAreThoseOfTheGoldens) {
  for (const std::string name : {"glm4", "llama3", "qwen2", "gpt2", "llama2", "splits"}) {
    const Tokenizer tokenizer = stored(name);
    const auto rows = load_json(kData / (name + ".goldens.json"));
    ASSERT_GE(rows.size(), 200u);
    for (const auto& row : rows) {
      const Ids ids = row[2].get<Ids>();
      if (!row[0].is_null()) {
        const int options = row[1].get<int>();
        const EncodeOptions encode{.parse_special_tokens = (options & 1) != 0, .add_special_tokens = (options & 2) != 0};
        EXPECT_EQ(tokenizer.encode(row[0].get<std::string>(), encode), ids) << name << ": " << row[0] << ", options " << options;
      }
      for (const bool skip : {false, true}) {
        const DecodeOptions decode{.skip_special_tokens = skip};
        const std::string want = row[skip ? 4 : 3].get<std::string>();
        EXPECT_EQ(tokenizer.decode(ids, decode), want) << name << ": " << row[2];
        StreamDecoder stream(tokenizer, decode);
        std::string streamed;
        for (const int id : ids) {
          const std::string piece = stream.push(id);
          EXPECT_NO_THROW(nlohmann::json(piece).dump()) << "a character was split";  // it throws for text that is no UTF-8
          streamed += piece;
        }
        EXPECT_EQ(streamed + stream.finish(), want);
      }
    }
  }
}

TEST(Tokenizer, ByteLevelTextComesBackFromItsIds) {
  const Tokenizer tokenizer = stored("glm4");
  const std::string text = "Grüße, 世界! \r\n\t 👩‍👩‍👧 e\xCC\x81 <|user|> \xF0\x9F\x98\x80";
  for (const bool parse : {false, true}) EXPECT_EQ(tokenizer.decode(tokenizer.encode(text, {.parse_special_tokens = parse})), text);
  EXPECT_TRUE(tokenizer.encode("").empty());
  EXPECT_EQ(tokenizer.decode({}), "");
}

TEST(Tokenizer, SpecialTokensInATextAreTextUnlessAskedFor) {
  const Tokenizer tokenizer = stored("glm4");
  const int user = tokenizer.token_id("<|user|>").value();
  const Ids as_text = tokenizer.encode("<|user|>\n");
  EXPECT_EQ(std::find(as_text.begin(), as_text.end(), user), as_text.end());
  EXPECT_EQ(tokenizer.encode("<|user|>\n", {.parse_special_tokens = true}).front(), user);
  EXPECT_EQ(tokenizer.decode(as_text, {.skip_special_tokens = true}), "<|user|>\n");
  EXPECT_EQ(tokenizer.decode(Ids{user}, {.skip_special_tokens = true}), "");
  EXPECT_EQ(tokenizer.encode("", {.add_special_tokens = true}), Ids{tokenizer.token_id("<|endoftext|>").value()});
}

TEST(Tokenizer, TokensAndTheirIds) {
  const Tokenizer tokenizer = Tokenizer::parse(with(R"(,"added_tokens":[{"id":7,"content":"<x>"}])"), "x.json");
  EXPECT_EQ(tokenizer.vocab_size(), 8);
  EXPECT_EQ(tokenizer.token_id("ab"), 2);
  EXPECT_EQ(tokenizer.token_id("<x>"), 7);
  EXPECT_EQ(tokenizer.token_id("c"), std::nullopt);
  EXPECT_EQ(tokenizer.token(2), "ab");
  EXPECT_EQ(tokenizer.token(7), "<x>");
  for (const int id : {-1, 3, 6, 8, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    EXPECT_EQ(tokenizer.token(id), std::nullopt);
    EXPECT_EQ(tokenizer.decode(Ids{id}), "");
  }
  EXPECT_EQ(tokenizer.encode("abcab<x>b"), (Ids{2, 2, 7, 1}));  // nothing stands for c
}

TEST(Tokenizer, WhatIsNoUtf8BecomesReplacementCharacters) {
  const Tokenizer tokenizer = stored("glm4");
  const auto seen = [&](std::string_view bytes) { return tokenizer.decode(tokenizer.encode(bytes)); };
  const std::string r = "\xEF\xBF\xBD";
  // As Python's bytes.decode("utf-8", "replace").
  EXPECT_EQ(seen("a\xFFz"), "a" + r + "z");
  EXPECT_EQ(seen("\xE4\xB8"), r);
  EXPECT_EQ(seen("\xE4\xB8z"), r + "z");
  EXPECT_EQ(seen("\xED\xA0\x80"), r + r + r);
  EXPECT_EQ(seen("\xC0\xAF"), r + r);
  EXPECT_EQ(seen("\xF0\x9F\x98"), r);
  EXPECT_EQ(seen("\xF5\x80\x80\x80"), r + r + r + r);
  EXPECT_EQ(seen("\xF4\x8F\xBF\xBF"), "\xF4\x8F\xBF\xBF");
  EXPECT_EQ(seen("\xF4\x90\x80\x80"), r + r + r + r);
  EXPECT_EQ(seen("\xE0\x80\xE4\xB8\xAD"), r + r + "\xE4\xB8\xAD");
}

TEST(Tokenizer, AStreamNeverSplitsACharacter) {
  const Tokenizer tokenizer = stored("glm4");
  // The bytes of U+1F600, one token each.
  Ids bytes;
  for (const char* token : {"ð", "Ł", "ĺ", "Ģ"}) bytes.push_back(tokenizer.token_id(token).value());
  StreamDecoder stream(tokenizer);
  EXPECT_EQ(stream.push(bytes[0]), "");
  EXPECT_EQ(stream.push(bytes[1]), "");
  EXPECT_EQ(stream.push(bytes[2]), "");
  EXPECT_EQ(stream.push(bytes[3]), "\xF0\x9F\x98\x80");
  EXPECT_EQ(stream.push(bytes[0]), "");
  EXPECT_EQ(stream.push(bytes[0]), "\xEF\xBF\xBD");  // the first can no longer be completed
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Tokenizer, LongWordsAreMergedAsShortOnesAre) {
  std::string vocab = R"("a":0,"b":1)", merges;
  std::string token = "a";
  for (int id = 2; id < 18; ++id) {  // aa, aaaa, ...
    merges += tw::format("{}\"{} {}\"", id == 2 ? "" : ",", token, token);
    token += token;
    vocab += tw::format(",\"{}\":{}", token, id);
  }
  const Tokenizer tokenizer = Tokenizer::parse(with("", tw::format(R"("vocab":{{{}}},"merges":[{}])", vocab, merges)), "x.json");
  const auto expected = [](std::size_t count) {  // the binary digits of the count, the largest first
    Ids ids;
    for (; count >= 65536; count -= 65536) ids.push_back(17);
    for (int bit = 15; bit >= 0; --bit) {
      if ((count >> bit & 1) != 0) ids.push_back(bit == 0 ? 0 : bit + 1);
    }
    return ids;
  };
  for (const std::size_t count : {1u, 2u, 3u, 7u, 47u, 48u, 49u, 50u, 1000u, 200'000u}) {
    EXPECT_EQ(tokenizer.encode(std::string(count, 'a')), expected(count)) << count;
    Ids twice = expected(count);
    twice.push_back(1);
    twice.insert(twice.end(), twice.begin(), twice.end() - 1);
    EXPECT_EQ(tokenizer.encode(std::string(count, 'a') + 'b' + std::string(count, 'a')), twice) << count;
  }
}

TEST(Tokenizer, AMegabyteWithoutSpaces) {
  for (const std::string name : {"glm4", "qwen2", "gpt2"}) {
    const Tokenizer tokenizer = stored(name);
    const std::string prefix = name == "gpt2" ? " " : "";
    for (const std::string piece : {"a", "ab", " ", "\t", "1", "!", "é", "\xE4\xB8\xAD"}) {
      std::string text;
      while (text.size() < 1'000'000) text += piece;
      const std::string decoded = tokenizer.decode(tokenizer.encode(text));
      EXPECT_TRUE(decoded == text || decoded == prefix + text) << name << " " << piece;
    }
  }
  std::string marks = "a";  // whose canonical order is another one
  for (int i = 0; i < 200'000; ++i) marks += i % 2 == 0 ? "\xCC\x81" : "\xCC\xA3";
  EXPECT_FALSE(stored("qwen2").encode(marks).empty());
}

TEST(Tokenizer, ManyThreadsUseOne) {
  const Tokenizer tokenizer = stored("qwen2");
  const std::string text = "Prüfung 世界 12345 it's e\xCC\x81";
  const Ids ids = tokenizer.encode(text);
  std::vector<std::thread> threads;
  std::atomic<int> same = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) same += tokenizer.encode(text) == ids ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(same, 800);
}

TEST(Tokenizer, FilesThatAreNotUnderstoodAreRefused) {
  const auto refused = [](const std::string& json, std::initializer_list<std::string_view> parts) {
    SCOPED_TRACE(json.substr(0, 200));
    expect_error<FileError>([&] { Tokenizer::parse(json, "x.json"); }, parts);
    try {
      Tokenizer::parse(json, "x.json");
    } catch (const FileError& error) {
      const std::string message = error.what();
      EXPECT_EQ(message.rfind("x.json: ", 0), 0u) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    }
  };
  refused("", {"not valid JSON"});
  refused("[]", {"is array; allowed: an object"});
  refused("{}", {"no model"});
  refused(R"({"model":3})", {"tokenizer.model: is number; allowed: an object"});
  refused(R"({"model":{"type":"WordPiece"}})", {"\"WordPiece\" is not supported; allowed: BPE"});
  refused(with("", R"("merges":[])"), {"no vocab"});
  refused(with("", R"("vocab":{})"), {"no merges"});
  refused(with("", R"("vocab":[],"merges":[])"), {"vocab is array"});
  for (const char* id : {"-1", "1.5", "16777216", "\"1\"", "null", "18446744073709551615"})
    refused(with("", tw::format(R"("vocab":{{"a":{}}},"merges":[])", id)),
            {"vocab: the id of \"a\" is not a whole number from 0 to 16777215"});
  refused(with("", R"("vocab":{"a":0,"b":0},"merges":[])"), {"both \"a\" and \"b\" have the id 0"});
  refused(with("", tw::format(R"("vocab":{{"{}":0}},"merges":[])", std::string(65537, 'a'))),
          {"vocab: a token of 65537 bytes, \"aaa", "allowed: at most 65536"});
  const std::string vocab = R"("vocab":{"a":0,"b":1,"ab":2},)";
  refused(with("", vocab + R"("merges":{})"), {"merges is object; allowed: an array"});
  refused(with("", vocab + R"("merges":["a b","ab"])"), {"merges[1] is \"ab\"; allowed: two tokens with a space"});
  refused(with("", vocab + R"("merges":["a b c"])"), {"merges[0] is \"a b c\""});
  refused(with("", vocab + R"("merges":[["a"]])"), {"merges[0] is array"});
  refused(with("", vocab + R"("merges":[["a",1]])"), {"merges[0] is array"});
  refused(with("", vocab + R"("merges":["a c"])"), {"merges[0]: \"c\" is not in vocab"});
  refused(with("", vocab + R"("merges":["b a"])"), {"merges[0]: \"ba\" is not in vocab"});
  const std::string model = vocab + R"("merges":[],)";
  refused(with("", model + R"("dropout":0.1)"), {"dropout is not supported"});
  refused(with("", model + R"("end_of_word_suffix":"</w>")"), {"end_of_word_suffix is \"</w>\", which is not supported"});
  refused(with("", model + R"("continuing_subword_prefix":"##")"), {"continuing_subword_prefix is \"##\""});
  refused(with("", model + R"("unk_token":"<unk>")"), {"unk_token \"<unk>\" is not in vocab"});
  refused(with("", model + R"("byte_fallback":1)"), {"byte_fallback is number; allowed: true or false"});

  refused(with(R"(,"added_tokens":{})"), {"added_tokens is object"});
  refused(with(R"(,"added_tokens":[{"id":-1,"content":"x"}])"), {"added_tokens[0]: id is -1"});
  refused(with(R"(,"added_tokens":[{"id":3}])"), {"added_tokens[0]: no content"});
  refused(with(R"(,"added_tokens":[{"id":3,"content":""}])"), {"content is empty"});
  refused(with(R"(,"added_tokens":[{"id":3,"content":"x","special":"yes"}])"), {"special is string; allowed: true or false"});
  refused(with(R"(,"added_tokens":[{"id":3,"content":"x"},{"id":3,"content":"y"}])"), {"added_tokens[1]: the id 3 is in the list twice"});
  refused(with(R"(,"added_tokens":[{"id":3,"content":"x"},{"id":4,"content":"x"}])"), {"\"x\" is in the list twice"});
  refused(with(R"(,"added_tokens":[{"id":3,"content":"a"}])"), {"\"a\" has the id 3, but in the model's vocab \"a\" has the id 0"});
  refused(with(R"(,"added_tokens":[{"id":0,"content":"x"}])"), {"\"x\" has the id 0, but in the model's vocab \"a\" has the id 0"});

  refused(with(R"(,"normalizer":{"type":"BertNormalizer"})"), {"normalizer: \"BertNormalizer\" is not supported; allowed: Sequence, NFC"});
  refused(with(R"(,"normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Nmt"}]})"),
          {"normalizers[1]: \"Nmt\" is not supported"});
  refused(with(R"(,"normalizer":{"type":"Replace","pattern":{"String":""},"content":""})"), {"pattern: String is empty"});
  refused(with(R"(,"pre_tokenizer":{"type":"Metaspace"})"), {"pre_tokenizer: \"Metaspace\" is not supported; allowed: Sequence, Split"});
  refused(with(R"(,"pre_tokenizer":{"type":"Split","pattern":{"String":"a"},"behavior":"Never"})"), {"\"Never\" is not supported"});
  refused(with(R"(,"pre_tokenizer":{"type":"Split","pattern":"a","behavior":"Removed"})"), {"pattern: is string; allowed: an object"});
  refused(with(R"(,"post_processor":{"type":"BertProcessing"})"), {"post_processor: \"BertProcessing\" is not supported"});
  refused(with(R"(,"post_processor":{"type":"TemplateProcessing","special_tokens":{},"single":[{"SpecialToken":{"id":"x"}}]})"),
          {"\"x\" is not in special_tokens"});
  refused(with(R"(,"post_processor":{"type":"TemplateProcessing","special_tokens":{},"single":[{"Sequence":{"id":"B"}}]})"),
          {"\"B\" is not supported"});
  refused(with(R"(,"post_processor":{"type":"TemplateProcessing","special_tokens":{},"single":[]})"), {"no Sequence"});
  refused(
      with(
          R"(,"post_processor":{"type":"TemplateProcessing","special_tokens":{"x":{"ids":[9]}},"single":[{"SpecialToken":{"id":"x"}},{"Sequence":{"id":"A"}}]})"),
      {"the id 9 belongs to no token"});
  refused(with(R"(,"decoder":{"type":"WordPiece"})"), {"decoder: \"WordPiece\" is not supported; allowed: Sequence, ByteLevel"});
  refused(with(R"(,"decoder":{"type":"Strip","content":"ab","start":1,"stop":0})"), {"content is \"ab\"; allowed: one character"});
  refused(with(R"(,"decoder":{"type":"Strip","content":" ","start":-1,"stop":0})"), {"start is -1"});
  refused(with(R"(,"decoder":{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"ByteFallback"}]})"),
          {"ByteFallback after the tokens are joined"});
}

TEST(Tokenizer, RegularExpressionsThatAreNotUnderstoodAreRefused) {
  const auto json = [](const std::string& pattern) {
    return with(tw::format(R"(,"pre_tokenizer":{{"type":"Split","pattern":{{"Regex":{}}},"behavior":"Isolated"}})",
                           nlohmann::json(pattern).dump()));
  };
  for (const char* pattern : {"^a",   "a$",     "(?i)a",  "(?<x>a)", "(*UTF)a", "(a)\\1", "\\ba",     "\\ha",  "\\p{Nope}",
                              "\\pL", "[a[b]]", "[a&&b]", "[]a]",    "[^]a]",   "\\xFF",  "\\x{}",    "a{2}+", "a{2}?",
                              "(",    ")",      "[a",     "a**",     "\\",      "[\\D]",  "[\\P{L}]", "\\é",   "(?m:a)"})
    expect_error<FileError>([&] { Tokenizer::parse(json(pattern), "x.json"); }, {"x.json: the regular expression \""});
  expect_error<FileError>([&] { Tokenizer::parse(json(std::string(70000, 'a')), "x.json"); }, {"70000 bytes"});
  expect_error<FileError>(
      [&] {
        Tokenizer::parse(
            with(tw::format(R"(,"normalizer":{{"type":"Replace","pattern":{{"String":"{}"}},"content":""}})", std::string(70000, 'a'))),
            "x.json");
      },
      {"70000 bytes"});
  for (const char* pattern :
       {"[\\s\\S]", "a{,2}", "a{x", "{", "\\u0041", "\\x41", "\\x{1F600}", "\\p{^L}", "\\P{Han}", "(?<=a)b", "\\-\\/", "[\\p{L}\\d]++"})
    EXPECT_NO_THROW(Tokenizer::parse(json(pattern), "x.json")) << pattern;
}

TEST(Tokenizer, ARegularExpressionThatTakesTooManyStepsIsAnError) {
  struct Case {
    const char* pattern;
    std::size_t length;
  };
  for (const Case& c : {Case{"(?:(?:a|aa)+)+c|z", 100},      // exponential time
                        Case{"a*a*[bc]", 3000},              // cubic: few steps from each character, too many in all
                        Case{"a*[bc]", 100'000},             // quadratic, in steps of many characters
                        Case{"(?:a*[bc]|a)*[de]", 3000}}) {  // both
    SCOPED_TRACE(c.pattern);
    const std::clock_t begin = std::clock();
    const std::string pattern = tw::format(R"({{"Regex":"{}"}})", c.pattern), text(c.length, 'a');
    for (const std::string& part : {tw::format(R"(,"pre_tokenizer":{{"type":"Split","pattern":{},"behavior":"Isolated"}})", pattern),
                                    tw::format(R"(,"normalizer":{{"type":"Replace","pattern":{},"content":"b"}})", pattern)})
      expect_error<FileError>([&] { ids_of(with(part), text); },
                              {"x.json: the regular expression", "fails at byte 0 of a text of", "it takes too many steps"});
    EXPECT_LT(std::clock() - begin, 20 * CLOCKS_PER_SEC);  // it is half a second
  }
  // All pieces of a text, and all tokens of a sequence, share one budget: here many pieces each take a part of it.
  std::string text;
  for (int i = 0; i < 200; ++i) text += std::string(300, 'a') + " ";
  expect_error<FileError>(
      [&] {
        ids_of(with(R"(,"pre_tokenizer":{"type":"Sequence","pretokenizers":[)"
                    R"({"type":"Split","pattern":{"String":" "},"behavior":"Isolated"},)"
                    R"({"type":"Split","pattern":{"Regex":"a*a*[bc]"},"behavior":"Isolated"}]})"),
               text);
      },
      {"of a text of 300: it takes too many steps"});
  const std::string word(300, 'a');
  const Tokenizer decodes = Tokenizer::parse(with(R"(,"decoder":{"type":"Replace","pattern":{"Regex":"a*a*[bc]"},"content":""})",
                                                  tw::format(R"("vocab":{{"{}":0}},"merges":[])", word)),
                                             "x.json");
  EXPECT_EQ(decodes.decode(Ids{0}), word);
  expect_error<FileError>([&] { decodes.decode(Ids(200, 0)); }, {"of a text of 300: it takes too many steps"});
}

TEST(Tokenizer, TextsThatBecomeTooLongAreErrors) {
  std::string replaces, byte_levels;
  for (int i = 0; i < 30; ++i) {
    replaces += tw::format(R"({}{{"type":"Replace","pattern":{{"String":"a"}},"content":"aa"}})", i == 0 ? "" : ",");
    byte_levels += tw::format(R"({}{{"type":"ByteLevel","use_regex":false,"add_prefix_space":false}})", i == 0 ? "" : ",");
  }
  const auto sequence = [](const char* part, const char* list, const std::string& steps, const char* more = "") {
    return with(tw::format(R"(,"{}":{{"type":"Sequence","{}":[{}]}}{})", part, list, steps, more));
  };
  const auto too_long = [](const auto& f, std::string_view what) {
    expect_error<FileError>(f, {tw::format("x.json: the {} makes a text of ", what), " bytes too long: "});
  };
  too_long([&] { ids_of(sequence("normalizer", "normalizers", replaces), "a"); }, "normalizer");
  too_long([&] { ids_of(sequence("pre_tokenizer", "pretokenizers", byte_levels), "\xC3\xA9"); }, "pre-tokenizer");
  too_long([&] { Tokenizer::parse(sequence("decoder", "decoders", replaces), "x.json").decode(Ids{0}); }, "decoder");
  too_long(  // an added token is normalized when the file is read
      [&] { Tokenizer::parse(sequence("normalizer", "normalizers", replaces, R"(,"added_tokens":[{"id":3,"content":"a!"}])"), "x.json"); },
      "normalizer");
  const std::string long_content(1'000'000, 'x');
  const std::string long_texts = tw::format(R"("pattern":{{"String":"a"}},"content":"{}")", long_content);
  too_long([&] { ids_of(with(tw::format(R"(,"normalizer":{{"type":"Replace",{}}})", long_texts)), "aaaaaaaaaa"); }, "normalizer");
  too_long([&] { Tokenizer::parse(with(tw::format(R"(,"decoder":{{"type":"Replace",{}}})", long_texts)), "x.json").decode(Ids(10, 0)); },
           "decoder");
  too_long(
      [&] {
        const std::string step = tw::format(R"({{"type":"Prepend","prepend":"{}"}})", long_content);
        ids_of(sequence("normalizer", "normalizers", step + "," + step + "," + step + "," + step + "," + step), "b");
      },
      "normalizer");
  // What is in proportion to a text is not too much.
  std::string spaces(3'000'000, ' ');
  EXPECT_NO_THROW(ids_of(with(R"(,"normalizer":{"type":"Replace","pattern":{"String":" "},"content":"\u2581"})"), spaces));
}

TEST(Tokenizer, AFewStepsAreAllowed) {
  const auto refused = [](const char* part, const char* list, const char* step, const char* name) {
    const auto json = [&](int count) {
      std::string steps = step;
      for (int i = 1; i < count; ++i) steps += tw::format(",{}", step);
      return with(tw::format(R"(,"{}":{{"type":"Sequence","{}":[{}]}})", part, list, steps));
    };
    EXPECT_EQ(Tokenizer::parse(json(64), "x.json").decode(ids_of(json(64), "ab")), "ab") << part;
    for (const int count : {65, 50'000})  // so many overflowed the stack
      expect_error<FileError>([&] { Tokenizer::parse(json(count), "x.json"); },
                              {tw::format("x.json: tokenizer.{}.{}[64]: the {} has more than 64 steps", part, list, name)});
  };
  const char* const replace = R"({"type":"Replace","pattern":{"String":"x"},"content":"y"})";
  refused("decoder", "decoders", replace, "decoder");
  refused("normalizer", "normalizers", replace, "normalizer");
  refused("pre_tokenizer", "pretokenizers", R"({"type":"Digits"})", "pre-tokenizer");
}

TEST(Tokenizer, BytesThatWaitGoThroughTheStepsBeforeWhatFollows) {
  const std::string json = with(R"(,"decoder":{"type":"Sequence","decoders":[{"type":"ByteFallback"},)"
                                R"({"type":"Replace","pattern":{"Regex":"[AB]+"},"content":"<0x43>"},{"type":"ByteFallback"},)"
                                R"({"type":"Replace","pattern":{"String":"D"},"content":"d"},{"type":"Fuse"}]})",
                                R"("vocab":{"<0x41>":0,"<0x42>":1,"<0x44>":2,"D":3,"AA":4,"<0xFF>":5},"merges":[])");
  const Tokenizer tokenizer = Tokenizer::parse(json, "x.json");
  EXPECT_EQ(tokenizer.decode(Ids{3, 0, 3}), "dCd");  // 41 waits, is A, then 43 waits, is C
  EXPECT_EQ(tokenizer.decode(Ids{0, 1, 4, 4, 2, 3}), "CCCdd");
  EXPECT_EQ(tokenizer.decode(Ids{0}), "C");
  EXPECT_EQ(tokenizer.decode(Ids{4, 0, 5, 3}),
            "C\xEF\xBF\xBD\xEF\xBF\xBD"
            "d");  // together they are no UTF-8
}

TEST(Tokenizer, OfAddedTokensTheLongestIsTaken) {
  const Tokenizer tokenizer = Tokenizer::parse(
      with(R"(,"added_tokens":[{"id":10,"content":"x"},{"id":11,"content":"xyz"},{"id":12,"content":"xyzzy!"},{"id":13,"content":"xa"},)"
           R"({"id":14,"content":"é"},{"id":15,"content":"éé"},{"id":16,"content":"qq","normalized":false}])"),
      "x.json");
  EXPECT_EQ(tokenizer.encode("xxyxyzxyzzyxyzzy!xab"), (Ids{10, 10, 11, 11, 12, 13, 1}));
  EXPECT_EQ(tokenizer.encode("éééaxyqq"), (Ids{15, 14, 0, 10, 16}));  // before the others those that are not normalized
  for (const auto& [id, content] : {std::pair(12, "xyzzy!"), std::pair(14, "é"), std::pair(10, "x")}) {
    EXPECT_EQ(tokenizer.token_id(content), id);
    EXPECT_EQ(tokenizer.token(id), content);
  }
  EXPECT_EQ(tokenizer.token_id("xy"), std::nullopt);
  EXPECT_EQ(tokenizer.vocab_size(), 17);
  // Of two that the normalizer makes the same the first.
  EXPECT_EQ(ids_of(with(R"(,"normalizer":{"type":"Lowercase"},"added_tokens":[{"id":9,"content":"X"},{"id":8,"content":"x"}])"), "x"),
            Ids{9});
}

TEST(Tokenizer, AddedTokensOfAnyNumberAndLength) {
  const auto json = [](const std::string& content, const std::string& members = "") {
    return with(tw::format(R"(,"added_tokens":[{{"id":3,"content":"{}"{}}}])", content, members));
  };
  const std::string longest(1024, 'x');
  EXPECT_EQ(ids_of(json(longest), longest + longest + "x"), (Ids{3, 3}));
  expect_error<FileError>([&] { Tokenizer::parse(json(longest + "x"), "x.json"); },
                          {"x.json: tokenizer.added_tokens[0]: content has 1025 bytes; allowed: at most 1024"});
  // Each character of this white space is a token that strips everything after it: the text is scanned once.
  const std::clock_t begin = std::clock();
  EXPECT_EQ(ids_of(json(" ", R"(,"rstrip":true)"), std::string(500'000, ' ')).size(), 500'000u);
  EXPECT_LT(std::clock() - begin, 10 * CLOCKS_PER_SEC);
  // Tokens with a long beginning in common, in little memory and time: a tree of their bytes took a gigabyte.
  std::string list = R"(,"added_tokens":[)";
  for (int i = 0; i < 5000; ++i)
    list += tw::format(R"({}{{"id":{},"content":"{}{:05}"}})", i == 0 ? "" : ",", i + 3, std::string(1000, 'x'), i);
  const Tokenizer many = Tokenizer::parse(with(list + "]"), "x.json");
  EXPECT_EQ(many.encode(std::string(1003, 'x') + "01234" + std::string(1000, 'x') + "0400"), Ids{1237});
}

TEST(Tokenizer, SpecialTokensAroundATextAreFew) {
  const auto json = [](int pieces) {
    std::string single = R"({"Sequence":{"id":"A"}})", ids = "0";
    for (int i = 1; i < 32; ++i) ids += ",0";
    for (int i = 0; i < pieces; ++i) single += R"(,{"SpecialToken":{"id":"x"}})";
    return with(tw::format(R"(,"post_processor":{{"type":"TemplateProcessing","special_tokens":{{"x":{{"ids":[{}]}}}},"single":[{}]}})",
                           ids, single));
  };
  EXPECT_EQ(ids_of(json(32), "a", {.add_special_tokens = true}).size(), 1025u);
  expect_error<FileError>([&] { Tokenizer::parse(json(33), "x.json"); }, {"single has more than 1024 special tokens"});
}

TEST(Tokenizer, AFileThatIsNotThereIsNamed) {
  expect_error<FileError>([] { Tokenizer::load("/nonexistent/tokenizer.json"); }, {"/nonexistent/tokenizer.json: No such file"});
}

}  // namespace
}  // namespace tw::models

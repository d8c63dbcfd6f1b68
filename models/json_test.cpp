#include "models/json.hpp"

#include <gtest/gtest.h>

#include <ctime>
#include <fstream>
#include <string>

#include "runtime/format.hpp"

#include "tilewave/error.hpp"

namespace tw::models {
namespace {

TEST(Json, DocumentsOfAFewLevelsAreRead) { EXPECT_EQ(parse_json(R"({"a": [1, {"b": 2}]})", "x.json")["a"][1]["b"], 2); }

TEST(Json, BadTextIsRefusedWithTheFilesName) {
  const auto message = [](const std::string& text) -> std::string {
    try {
      parse_json(text, "x.json");
    } catch (const FileError& error) {
      return error.what();
    }
    return "";
  };
  for (const std::string& text : {std::string(""), std::string("{"), std::string("{\"a\": nul}"), std::string(100000, '[')})
    EXPECT_EQ(message(text).rfind("x.json: ", 0), 0u) << text.substr(0, 20);
  const auto nested = [](int levels, const std::string& open, const std::string& close) {
    std::string text = "0";
    for (int i = 0; i < levels; ++i) text = open + text + close;
    return text;
  };
  for (const auto& [open, close] : {std::pair("[", "]"), std::pair("{\"a\":", "}")}) {
    EXPECT_EQ(message(nested(64, open, close)), "");
    EXPECT_NE(message(nested(65, open, close)).find("more than 64 levels"), std::string::npos);
  }
  EXPECT_EQ(message(R"({"a": 1})" + std::string("\0{}", 3)), "x.json: not valid JSON: byte 8 is zero");
  EXPECT_EQ(message(R"({"a": 1} {})").rfind("x.json: not valid JSON", 0), 0u);
}

TEST(Json, IsWhatTheLibrarysOwnParserGives) {
  for (const char* text : {"null", "true", "false", "-1", "0", "18446744073709551615", "1.5", "-2e300", "\"\"", "\"a\\u00e9\\n\"", "[]",
                           "{}", "[[],{},[1,2]]", R"({"a":{"b":[1,{"c":null}],"d":"x"},"e":false})", R"({"a":1,"a":2})",
                           R"({"a":{"b":1},"a":{"c":2}})", " [ 1 , 2 ] ", "\xEF\xBB\xBF{}"})
    EXPECT_EQ(parse_json(text, "x.json"), nlohmann::json::parse(text)) << text;
  for (const char* name : {"tokenizer/glm4.json", "tokenizer/glm4.goldens.json", "glm_asr/gqa/config.json"}) {
    const std::filesystem::path file = std::filesystem::path(TILEWAVE_SOURCE_DIR) / "tests/data" / name;
    EXPECT_EQ(load_json(file), nlohmann::json::parse(std::ifstream(file))) << name;
  }
}

TEST(Json, TimeIsThatOfTheBytes) {
  const std::clock_t begin = std::clock();
  for (const std::string unit : {"{}", "[]", "{\"a\":{}}", "[[]]", "\"\""}) {
    std::string text = "[" + unit;
    for (int i = 1; i < 150'000; ++i) text += "," + unit;
    EXPECT_EQ(parse_json(text + "]", "x.json").size(), 150'000u);
  }
  EXPECT_LT(std::clock() - begin, 10 * CLOCKS_PER_SEC);  // it is 0.2 s; quadratic time was 20 s for each
}

TEST(Json, MemoryIsLimited) {
  const auto taken = [](const std::string& text) {  // the least limit under which it is read
    for (std::size_t limit = 1;; limit += 8) {
      try {
        parse_json(text, "x.json", limit);
        return limit;
      } catch (const FileError& error) {
        EXPECT_EQ(std::string(error.what()), tw::format("x.json: JSON that takes more than {} bytes of memory", limit));
      }
    }
  };
  EXPECT_GE(taken("[0,0]"), 2 * sizeof(nlohmann::json));
  EXPECT_GE(taken("[{},{}]") - taken("[0,0]"), 2 * sizeof(nlohmann::json::object_t));
  EXPECT_GE(taken("[[],[]]") - taken("[0,0]"), 2 * sizeof(nlohmann::json::array_t));
  EXPECT_GE(taken("\"" + std::string(1000, 'x') + "\""), 1000 + sizeof(std::string));
  EXPECT_GE(taken("{\"" + std::string(1000, 'x') + "\":0}"), 1000 + sizeof(std::string));
}

TEST(Json, ValuesInMessagesAreBrief) {
  const auto brief_of = [](const char* text) { return brief(nlohmann::json::parse(text)); };
  for (const char* text : {"null", "1.5", "\"x\\n\"", "[]", "{}", "[1,[2,\"a\"]]", R"({"a":{"b":[]},"c":1})"})
    EXPECT_EQ(brief_of(text), text);
  EXPECT_EQ(brief(std::string(1'000'000, 'x')), "\"" + std::string(56, 'x') + "...");
  const nlohmann::json many(std::vector<int>(1'000'000, 7));
  EXPECT_EQ(brief(many), brief(nlohmann::json::array({many, many})).substr(1, 56) + ",...");
  EXPECT_EQ(brief(nlohmann::json("\xFF")), "\"\xEF\xBF\xBD\"");
  EXPECT_EQ(brief(std::string(55, 'x') + "\xC3\xA9" + std::string(9, 'x')), "\"" + std::string(55, 'x') + "...");  // no half a character
}

TEST(Json, AFileThatIsNotThereIsNamed) {
  try {
    load_json("/nonexistent/config.json");
    FAIL();
  } catch (const FileError& error) {
    EXPECT_NE(std::string(error.what()).find("/nonexistent/config.json"), std::string::npos);
  }
}

}  // namespace
}  // namespace tw::models

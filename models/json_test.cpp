#include "models/json.hpp"

#include <gtest/gtest.h>

#include <string>

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
  const std::string deep = std::string(65, '[') + std::string(65, ']');
  EXPECT_NE(message(deep).find("more than 64 levels"), std::string::npos);
  EXPECT_EQ(message(std::string(60, '[') + std::string(60, ']')), "");
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

#include "models/config_reader.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "tests/expect_error.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

using nlohmann::json;
using test::expect_error;

ConfigReader reader(const char* text) { return {"config.json", json::parse(text)}; }

/// Expects a FileError of one line.
template <class F>
void refused(F f, std::initializer_list<std::string_view> parts) {
  expect_error<FileError>(f, parts);
  try {
    f();
  } catch (const FileError& error) {
    EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
  }
}

TEST(ConfigReader, OnlyAnObjectIsRead) {
  for (const char* text : {"[]", "3", "\"x\"", "null", "true"})
    refused([&] { reader(text); }, {"config.json: the document is not an object"});
  EXPECT_FALSE(reader("{}").has("a"));
}

TEST(ConfigReader, NullIsMissing) {
  const ConfigReader r = reader(R"({"a": null, "b": 0, "c": false, "d": ""})");
  EXPECT_FALSE(r.has("a"));
  EXPECT_FALSE(r.has("e"));
  for (const char* field : {"b", "c", "d"}) EXPECT_TRUE(r.has(field));
  EXPECT_EQ(r.integer("a", 1, 9, 4), 4);
  EXPECT_EQ(r.number("a", 1, 9, 4.5), 4.5);
  EXPECT_TRUE(r.flag("a", true));
  EXPECT_EQ(r.text("a", "x"), "x");
  EXPECT_TRUE(r.integers("a", 0, 9).empty());
  EXPECT_FALSE(r.child("a").has("b"));
  refused([&] { r.integer("a", 1, 9); }, {"config.json: a is missing; allowed: an integer from 1 to 9"});
}

TEST(ConfigReader, Integers) {
  const ConfigReader r = reader(R"({"a": 7, "b": -3, "c": 7.0, "d": "7", "e": [7], "f": {}, "g": true, "huge": 18446744073709551615,
      "above": 9223372036854775808, "most": 9223372036854775807, "least": -9223372036854775808})");
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min(), kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(r.integer("a", 7, 7), 7);
  EXPECT_EQ(r.integer("a", 1, 9, 4), 7);
  EXPECT_EQ(r.integer("b", -3, 0), -3);
  EXPECT_EQ(r.integer("most", kLeast, kMost), kMost);
  EXPECT_EQ(r.integer("least", kLeast, kMost), kLeast);
  EXPECT_EQ(r.integer("x", 1, 9, 40), 40);  // a default is the caller's matter
  refused([&] { r.integer("a", 1, 6); }, {"config.json: a is 7; allowed: an integer from 1 to 6"});
  refused([&] { r.integer("a", 8, 9); }, {"a is 7"});
  refused([&] { r.integer("b", 0, 9); }, {"b is -3; allowed: an integer from 0 to 9"});
  refused([&] { r.integer("x", 0, 9); }, {"x is missing; allowed: an integer from 0 to 9"});
  refused([&] { r.integer("c", 0, 9); }, {"c is 7.0"});
  refused([&] { r.integer("d", 0, 9); }, {"d is \"7\""});
  refused([&] { r.integer("e", 0, 9); }, {"e is [7]"});
  refused([&] { r.integer("f", 0, 9, 1); }, {"f is {}"});  // what is there is not replaced by the default
  refused([&] { r.integer("g", 0, 9); }, {"g is true"});
  refused([&] { r.integer("huge", kLeast, kMost); }, {"huge is 18446744073709551615"});
  refused([&] { r.integer("above", kLeast, kMost); }, {"above is 9223372036854775808"});
}

TEST(ConfigReader, Numbers) {
  const ConfigReader r = reader(R"({"a": 0.5, "b": 10000, "c": "0.5", "d": [], "e": true, "huge": 18446744073709551615, "tiny": 1e-300})");
  EXPECT_EQ(r.number("a", 0, 1), 0.5);
  EXPECT_EQ(r.number("a", 0.5, 0.5), 0.5);
  EXPECT_EQ(r.number("b", 1, 1e12), 10000);
  EXPECT_EQ(r.number("huge", 0, 1e30), 18446744073709551615.0);
  EXPECT_EQ(r.number("tiny", 0, 1), 1e-300);
  EXPECT_EQ(r.number("x", 0, 1, 0.25), 0.25);
  refused([&] { r.number("a", 0.75, 1); }, {"config.json: a is 0.5; allowed: a number from 0.75 to 1"});
  refused([&] { r.number("b", 0, 1); }, {"b is 10000; allowed: a number from 0 to 1"});
  refused([&] { r.number("x", 0, 1); }, {"x is missing; allowed: a number from 0 to 1"});
  for (const char* field : {"c", "d", "e"}) refused([&] { r.number(field, 0, 1, 0.5); }, {field, "allowed: a number from 0 to 1"});
  const ConfigReader special{"config.json", {{"nan", std::numeric_limits<double>::quiet_NaN()}, {"inf", HUGE_VAL}}};
  refused([&] { special.number("nan", -1e308, 1e308); }, {"nan is "});
  refused([&] { special.number("inf", -1e308, 1e308); }, {"inf is "});
}

TEST(ConfigReader, Flags) {
  const ConfigReader r = reader(R"({"a": true, "b": false, "c": 1, "d": "true"})");
  EXPECT_TRUE(r.flag("a", false));
  EXPECT_FALSE(r.flag("b", true));
  EXPECT_FALSE(r.flag("x", false));
  EXPECT_TRUE(r.flag("x", true));
  refused([&] { r.flag("c", false); }, {"config.json: c is 1; allowed: true or false"});
  refused([&] { r.flag("d", false); }, {"d is \"true\""});
}

TEST(ConfigReader, Texts) {
  const ConfigReader r = reader(R"({"a": "x", "b": "", "c": 1, "d": ["x"]})");
  EXPECT_EQ(r.text("a"), "x");
  EXPECT_EQ(r.text("b", "y"), "");
  EXPECT_EQ(r.text("x", "y"), "y");
  refused([&] { r.text("x"); }, {"config.json: x is missing; allowed: a string"});
  refused([&] { r.text("c", "y"); }, {"c is 1; allowed: a string"});
  refused([&] { r.text("d"); }, {"d is [\"x\"]"});
}

TEST(ConfigReader, ListsOfIntegers) {
  const ConfigReader r = reader(R"({"a": 5, "b": [1, 2, 2], "c": [], "d": [1, null], "e": [1, [2]], "f": 1.5, "g": "1", "h": [0, 10],
      "i": [18446744073709551615], "j": {"a": 1}})");
  EXPECT_EQ(r.integers("a", 0, 9), (std::vector<int>{5}));
  EXPECT_EQ(r.integers("b", 1, 2), (std::vector<int>{1, 2, 2}));
  EXPECT_TRUE(r.integers("c", 0, 9).empty());
  EXPECT_TRUE(r.integers("x", 0, 9).empty());
  for (const char* field : {"d", "e", "f", "g", "h", "i", "j"})
    refused([&] { r.integers(field, 0, 9); },
            {std::string("config.json: ") + field + " is ", "allowed: an integer from 0 to 9, or a list of them"});
  refused([&] { r.integers("a", 6, 9); }, {"a is 5"});
  const ConfigReader lists{"config.json", {{"most", std::vector<int>(1024, 1)}, {"more", std::vector<int>(1025, 1)}}};
  EXPECT_EQ(lists.integers("most", 0, 9).size(), 1024u);
  refused([&] { lists.integers("more", 0, 9); }, {"config.json: more is [1,1,", "a list of 1025; allowed: at most 1024"});
}

TEST(ConfigReader, ChildrenAreNamedWithTheirPath) {
  const ConfigReader r = reader(R"({"text_config": {"rope": {"theta": "x"}, "n": 3}, "number": 3, "list": []})");
  const ConfigReader text = r.child("text_config");
  EXPECT_EQ(r.where(), "config.json: ");
  EXPECT_EQ(text.where(), "config.json: text_config.");
  EXPECT_EQ(text.integer("n", 0, 9), 3);
  refused([&] { text.child("rope").number("theta", 0, 1); }, {"config.json: text_config.rope.theta is \"x\"; allowed: a number"});
  refused([&] { r.child("none").integer("n", 0, 9); }, {"config.json: none.n is missing"});
  refused([&] { r.child("number"); }, {"config.json: number is not an object"});
  refused([&] { text.child("n"); }, {"config.json: text_config.n is not an object"});
  refused([&] { r.child("list"); }, {"config.json: list is not an object"});
}

TEST(ConfigReader, MessagesStayShortAndOnOneLine) {
  const ConfigReader r{"config.json", {{"long", std::string(5000, 'x')}, {"lines", "a\nb"}, {"bytes", "\xFF"}}};
  try {
    r.integer("long", 0, 1);
    FAIL() << "nothing was thrown";
  } catch (const FileError& error) {
    EXPECT_LT(std::string_view(error.what()).size(), 200u) << error.what();
  }
  refused([&] { r.integer("long", 0, 1); }, {"config.json: long is \"xxx", "...; allowed: an integer"});
  refused([&] { r.integer("lines", 0, 1); }, {"lines is \"a\\nb\""});
  refused([&] { r.integer("bytes", 0, 1); }, {"bytes is "});
  refused([&] { r.fail("none", "allowed: something else"); }, {"config.json: none is missing; allowed: something else"});
}

}  // namespace
}  // namespace tw::models

#include "apps/serve/multipart.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "apps/serve/error.hpp"
#include "tests/support.hpp"

namespace tw::serve {
namespace {

using Fields = std::vector<std::tuple<std::string, std::optional<std::string>, std::string, std::string>>;

/// The parts as tuples of name, filename, type, content.
Fields fields(std::string_view type, std::string_view body) {
  Fields all;
  for (const FormPart& part : parse_multipart(type, body)) all.emplace_back(part.name, part.filename, part.content_type, part.content);
  return all;
}

/// The error for a body; "" if there is none.
std::string problem(std::string_view type, std::string_view body, const MultipartLimits& limits = {}) {
  try {
    parse_multipart(type, body, limits);
  } catch (const ApiError& error) {
    return std::to_string(error.status) + " " + error.what();
  }
  return "";
}

TEST(Multipart, FromCurl) {  // 7.88, with -F
  const std::string body =
      "--------------------------075a26c81428e497\r\n"
      "Content-Disposition: form-data; name=\"file\"; filename=\"we%22ird \xC3\xA9.wav\"\r\n"
      "Content-Type: application/octet-stream\r\n"
      "\r\n"
      "RIFFdata\r\n"
      "--------------------------075a26c81428e497\r\n"
      "Content-Disposition: form-data; name=\"timestamp_granularities[]\"\r\n"
      "\r\n"
      "segment\r\n"
      "--------------------------075a26c81428e497\r\n"
      "Content-Disposition: form-data; name=\"prompt\"\r\n"
      "Content-Type: text/plain\r\n"
      "\r\n"
      "\r\n"
      "--------------------------075a26c81428e497--\r\n";
  EXPECT_EQ(fields("multipart/form-data; boundary=------------------------075a26c81428e497", body),
            (Fields{{"file", "we\"ird \xC3\xA9.wav", "application/octet-stream", "RIFFdata"},
                    {"timestamp_granularities[]", std::nullopt, "", "segment"},
                    {"prompt", std::nullopt, "text/plain", ""}}));
}

TEST(Multipart, FromOpenAisPythonClient) {  // 3.54, with file=("n\u00E4me \"q\".wav", ...)
  const std::string body =
      "--496c0486c39245f179a7e07f714ce024\r\n"
      "Content-Disposition: form-data; name=\"model\"\r\n"
      "\r\n"
      "whisper-1\r\n"
      "--496c0486c39245f179a7e07f714ce024\r\n"
      "Content-Disposition: form-data; name=\"chunking_strategy[type]\"\r\n"
      "\r\n"
      "server_vad\r\n"
      "--496c0486c39245f179a7e07f714ce024\r\n"
      "Content-Disposition: form-data; name=\"file\"; filename=\"n\xC3\xA4me %22q%22.wav\"\r\n"
      "Content-Type: audio/x-wav\r\n"
      "\r\n"
      "RIFFdata\r\n"
      "--496c0486c39245f179a7e07f714ce024--\r\n";
  EXPECT_EQ(fields("multipart/form-data; boundary=496c0486c39245f179a7e07f714ce024", body),
            (Fields{{"model", std::nullopt, "", "whisper-1"},
                    {"chunking_strategy[type]", std::nullopt, "", "server_vad"},
                    {"file", "n\xC3\xA4me \"q\".wav", "audio/x-wav", "RIFFdata"}}));
}

TEST(Multipart, NamesOfFiles) {
  const std::pair<const char*, const char*> cases[] = {
      {R"(filename="a.wav")", "a.wav"},
      {R"(filename=a.wav)", "a.wav"},
      {R"(FileName = "a.wav" ;)", "a.wav"},
      {R"(filename="a \"b\" \\.wav")", R"(a "b" \.wav)"},
      {R"(filename="C:\talks\a.wav")", R"(C:\talks\a.wav)"},
      {R"(filename="a;b=c.wav")", "a;b=c.wav"},
      {R"(filename="100%.wav")", "100%.wav"},
      {R"(filename="x.wav"; filename*=UTF-8''na%C3%AFve.wav)", "na\xC3\xAFve.wav"},
      {R"(filename*=utf-8'en'a%20b.wav; filename="x.wav")", "a b.wav"},
      {R"(filename="x.wav"; filename*=broken)", "x.wav"},
      {R"(filename="")", ""},
  };
  for (const auto& [parameter, name] : cases) {
    const std::string body = std::string("--b\r\ncontent-disposition:form-data; name=file; ") + parameter + "\r\n\r\nx\r\n--b--";
    EXPECT_EQ(fields("multipart/form-data; boundary=b", body), (Fields{{"file", name, "", "x"}})) << parameter;
  }
}

TEST(Multipart, Boundaries) {
  const Fields one = {{"a", std::nullopt, "", "1"}};
  const std::string part = "Content-Disposition: form-data; name=\"a\"\r\n\r\n1";
  const std::string plain = "--b\r\n" + part + "\r\n--b--";
  EXPECT_EQ(fields("multipart/form-data; boundary=b", plain), one);
  EXPECT_EQ(fields("Multipart/Form-Data ; charset=utf-8; BOUNDARY=\"b\"", plain), one);
  EXPECT_EQ(fields("multipart/form-data; boundary=b", "Ignore this.\r\n--bc\r\n--b \t\r\n" + part + "\r\n--b--\r\nand --b\r\n this"), one);
  EXPECT_EQ(fields("multipart/form-data; boundary=b", "\r\n" + plain), one);
  EXPECT_EQ(fields("multipart/form-data; boundary=\"a b:'?\"", "--a b:'?\r\n" + part + "\r\n--a b:'?--"), one);
  EXPECT_EQ(fields("multipart/form-data; boundary=b", "--b--"), Fields());
  // What only looks like a boundary belongs to the content, and so do line ends.
  const std::string content = "\r\n\r\n--\r\n--bc\r\n -b--\n--b--\r--b\r\n";
  EXPECT_EQ(fields("multipart/form-data; boundary=b", "--b\r\nContent-Disposition: form-data; name=a\r\n\r\n" + content + "\r\n--b--"),
            (Fields{{"a", std::nullopt, "", content}}));
}

TEST(Multipart, ContentsAreNotCopied) {
  const std::string body = "--b\r\nContent-Disposition: form-data; name=file\r\n\r\nRIFF\r\n--b--";
  EXPECT_EQ(parse_multipart("multipart/form-data; boundary=b", body).at(0).content.data(), body.data() + body.find("RIFF"));
}

TEST(Multipart, Errors) {
  const std::string type = "multipart/form-data; boundary=b";
  const auto of_part = [&](const std::string& text) { return problem(type, "--b\r\n" + text + "\r\n--b--"); };
  EXPECT_EQ(problem("application/json", "{}"), "415 Content-Type is \"application/json\"; it must be multipart/form-data");
  EXPECT_EQ(problem("", ""), "415 Content-Type is \"\"; it must be multipart/form-data");
  EXPECT_EQ(problem("application/x-www-form-urlencoded", "file=x"),
            "415 Content-Type is \"application/x-www-form-urlencoded\"; it must be multipart/form-data");
  EXPECT_EQ(problem("multipart/form-data", "--b--"), "400 multipart/form-data: Content-Type has no boundary");
  for (const std::string bad : {"", "\"b \"", "b\xC3\xA4", "\"b\\\"\""})
    EXPECT_EQ(
        problem("multipart/form-data; boundary=" + bad, "--b--"),
        "400 multipart/form-data: the boundary must have 1 to 70 letters, digits and characters of '()+_,-./:=? and not end with a space")
        << bad;
  EXPECT_EQ(problem("multipart/form-data; boundary=" + std::string(70, 'b'), "--" + std::string(70, 'b') + "--"), "");
  EXPECT_NE(problem("multipart/form-data; boundary=" + std::string(71, 'b'), "--" + std::string(71, 'b') + "--"), "");
  EXPECT_EQ(problem("multipart/form-data; boundary=b; boundary=c", "--b--"), "400 multipart/form-data: Content-Type has no boundary");

  EXPECT_EQ(problem(type, ""), "400 multipart/form-data: the body has no boundary of the Content-Type");
  EXPECT_EQ(problem(type, "--c\r\n"), "400 multipart/form-data: the body has no boundary of the Content-Type");
  EXPECT_EQ(problem(type, "--b\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--"),
            "400 multipart/form-data: the body ends in part 1, without a last boundary");
  EXPECT_EQ(of_part("\r\n1"), "400 multipart/form-data: part 1 has no Content-Disposition with its name");
  EXPECT_EQ(of_part("Content-Disposition: form-data; name=a"), "400 multipart/form-data: part 1 has no empty line after its headers");
  EXPECT_EQ(of_part("Content-Type text/plain\r\n\r\n1"),
            "400 multipart/form-data: part 1 has the header \"Content-Type text/plain\"; it must be a name and a value");
  EXPECT_EQ(of_part("Content-Transfer-Encoding: base64\r\nContent-Disposition: form-data; name=a\r\n\r\n1"),
            "400 multipart/form-data: part 1 is encoded as \"base64\"; it must be sent as it is");
  for (const std::string bad : {"form-data", "attachment; name=a", "form-data; name", "form-data; name=\"a", "form-data; name=\"a\"b",
                                "form-data; name=a; name=b", "form-data; ;name=a", "form-data; \x01=a"})
    EXPECT_TRUE(
        of_part("Content-Disposition: " + bad + "\r\n\r\n1").starts_with("400 multipart/form-data: part 1 has Content-Disposition "))
        << bad;
  EXPECT_EQ(of_part("Content-Disposition: form-data; name=a\r\nContent-Disposition: form-data; name=b\r\n\r\n1"),
            "400 multipart/form-data: part 1 has Content-Disposition \"form-data; name=b\"; it must be form-data with a name, once");
}

TEST(Multipart, Limits) {
  const std::string type = "multipart/form-data; boundary=b", part = "--b\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n";
  EXPECT_EQ(problem(type, part + part + "--b--", {.parts = 2}), "");
  EXPECT_EQ(problem(type, part + part + "--b--", {.parts = 1}), "400 multipart/form-data: there are more than 1 parts");
  EXPECT_EQ(problem(type, part + "--b--", {.header_bytes = 38}), "");
  EXPECT_EQ(problem(type, part + "--b--", {.header_bytes = 37}), "400 multipart/form-data: part 1 has more than 37 bytes of headers");
}

// Whatever is cut off, nothing is read past the end and no part is invented.
TEST(Multipart, EveryPrefixIsRefused) {
  const std::string body =
      "--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n\r\n--b\r\nContent-Disposition: form-data; name=b\r\n\r\n22\r\n--b--";
  EXPECT_EQ(problem("multipart/form-data; boundary=b", body), "");
  for (std::size_t size = 0; size < body.size(); ++size)
    EXPECT_NE(problem("multipart/form-data; boundary=b", std::string(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(size))), "")
        << size;
}

}  // namespace
}  // namespace tw::serve

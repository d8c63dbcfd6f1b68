// The parts of the server that need no sockets.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "apps/serve/cors.hpp"
#include "apps/serve/keys.hpp"
#include "apps/serve/log.hpp"
#include "apps/serve/metrics.hpp"
#include "apps/serve/page.hpp"
#include "apps/serve/service.hpp"
#include "apps/serve/url.hpp"
#include "apps/serve/workers.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/error.hpp"

namespace tw::serve {
namespace {

TEST(ParseTarget, DecodesPathsAndQueries) {
  using Query = std::vector<std::pair<std::string, std::string>>;
  const auto path = [](std::string_view text) { return parse_target(text).value_or(Target{"none", {}}).path; };
  EXPECT_EQ(path("/"), "/");
  EXPECT_EQ(path("/a%2Fb+%c3%a4?x=%"), "none");
  EXPECT_EQ(path("/a%2Fb+%c3%A4"), "/a/b+\xc3\xa4");
  EXPECT_EQ(path("http://host:80/p?q"), "/p");
  EXPECT_EQ(path("https://host"), "none");
  EXPECT_EQ(path("/p#fragment"), "/p");
  for (const char* bad : {"", "p", "?", "*", "/%", "/%4", "/%4g", "/%00", "/?%00", "ftp://host/p"}) EXPECT_EQ(path(bad), "none") << bad;
  EXPECT_EQ(parse_target("/?a=b&c&&=d&e=f=g&h=%26+%3d")->query, (Query{{"a", "b"}, {"c", ""}, {"", "d"}, {"e", "f=g"}, {"h", "& ="}}));
}

TEST(HttpRequest, FindsHeadersInAnyCase) {
  HttpRequest request;
  request.headers = {{"content-type", "a"}, {"Content-Type", "b"}, {"Content", "c"}};
  EXPECT_EQ(request.header("CONTENT-TYPE"), "a");
  EXPECT_EQ(request.header("Content"), "c");
  EXPECT_EQ(request.header("Conten"), "");
}

TEST(ApiKeys, ReadsAFile) {
  const test::TemporaryDirectory folder;
  const auto write = [&](const std::string& text) {
    std::ofstream(folder.path() / "keys") << text;
    return folder.path() / "keys";
  };
  const ApiKeys keys = ApiKeys::read(write("# comment\n\n  first \r\nsecond\n"));
  EXPECT_TRUE(keys.contain("first"));
  EXPECT_TRUE(keys.contain("second"));
  for (const char* other : {"", "firs", "first ", "firstsecond", "# comment", "First"}) EXPECT_FALSE(keys.contain(other)) << other;
  const auto message = [&](const std::string& text) {
    try {
      ApiKeys::read(write(text));
    } catch (const FileError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(message("# none\n").find("has no API key"), std::string::npos);
  EXPECT_NE(message("good\ntwo words\n").find("line 2: a key may only have printable ASCII"), std::string::npos);
  EXPECT_THROW(ApiKeys::read(folder.path() / "missing"), FileError);
  EXPECT_FALSE(ApiKeys().contain(""));
}

TEST(Cors, TakesOriginsAlone) {
  for (const char* good : {"*", "https://a.example", "http://localhost:3000"}) EXPECT_NO_THROW(Cors({good})) << good;
  for (const char* bad : {"", "a.example", "https://", "https://a.example/", "https://a, https://b", "null"})
    EXPECT_THROW(Cors({bad}), InvalidArgument) << bad;
  HttpRequest request;
  request.headers = {{"Origin", "https://any.example"}, {"Host", "here"}};
  EXPECT_EQ(Cors({"*"}).headers(request).at(0).second, "*");
  EXPECT_TRUE(Cors({"*"}).allow_websocket(request));
  EXPECT_FALSE(Cors().allow_websocket(request));
  EXPECT_TRUE(Cors().headers(request).empty());
}

/// What `write` makes of a log.
template <class Function>
std::string logged(LogFormat format, LogLevel level, const Function& write) {
  char* text = nullptr;
  std::size_t size = 0;
  std::FILE* file = open_memstream(&text, &size);
  {
    Log log(format, level, file);
    write(log);
  }
  std::fclose(file);
  std::string result(text, size);
  std::free(text);
  return result;
}

TEST(Log, WritesOneLineForAnything) {
  const std::string nasty = "a \"b\"\n\x1b[31m\xc2\x9b\xff\x7f\xe2\x80\xae";
  const auto write = [&](Log& log) {
    log.write(LogLevel::info, "request", {{"id", "r1"}, {"path", nasty}, {"status", std::int64_t{200}}, {"seconds", 0.5}, {"none", ""}});
    log.write(LogLevel::debug, "unwanted");
  };
  const std::string text = logged(LogFormat::text, LogLevel::info, write);
  EXPECT_EQ(text.substr(text.find('Z')),
            "Z info request id=r1 path=\"a \\\"b\\\"\\n\\u001b[31m\\u009b\\ufffd\\u007f\\u202e\" status=200 seconds=0.5\n");
  const std::string json = logged(LogFormat::json, LogLevel::info, write);
  EXPECT_EQ(std::count(json.begin(), json.end(), '\n'), 1);
  const nlohmann::json line = nlohmann::json::parse(json);
  EXPECT_EQ(line["level"], "info");
  EXPECT_EQ(line["message"], "request");
  EXPECT_EQ(line["id"], "r1");
  EXPECT_EQ(line["status"], 200);
  EXPECT_FALSE(line.contains("none"));
  EXPECT_EQ(logged(LogFormat::text, LogLevel::none, write), "");
}

TEST(Metrics, CountWhatTheEngineReports) {
  Metrics metrics;
  speech::Completion done;
  done.transcript.duration = 2.5;
  done.transcript.segments.resize(2);
  done.transcript.segments[0].tokens = {1, 2};
  done.transcript.segments[1].tokens = {3};
  done.times = {.waiting = 0.004, .first_text = 0.1, .total = 0.2};
  metrics.finished(done);
  metrics.finished({.transcript = {}, .error = std::make_exception_ptr(speech::Cancelled("gone")), .times = {}});
  metrics.finished({.transcript = {}, .error = std::make_exception_ptr(Error("failed")), .times = {}});
  metrics.stage(speech::EngineStage::decode, 0.003, 7);
  metrics.decoded(0.01);
  metrics.answered("/path", 404, 0.2);
  metrics.answered("/path", 404, 0.2);
  metrics.refused("reason");
  metrics.websockets(1);
  const std::string text = metrics.text(nullptr);
  for (const char* line : {
           "tilewave_audio_seconds_total 2.5",
           "tilewave_tokens_total 3",
           R"(tilewave_transcriptions_total{result="completed"} 1)",
           R"(tilewave_transcriptions_total{result="cancelled"} 1)",
           R"(tilewave_transcriptions_total{result="failed"} 1)",
           R"(tilewave_stage_seconds_bucket{stage="decode",le="0.0025"} 0)",
           R"(tilewave_stage_seconds_bucket{stage="decode",le="0.005"} 1)",
           R"(tilewave_batch_size_sum{stage="decode"} 7)",
           R"(tilewave_stage_seconds_count{stage="audio"} 1)",
           "tilewave_first_text_seconds_count 1",
           "tilewave_waiting_seconds_count 3",
           R"(tilewave_requests_total{route="/path",status="404"} 2)",
           R"(tilewave_refused_total{reason="reason"} 1)",
           "tilewave_websockets 1",
       })
    EXPECT_NE(text.find(std::string("\n") + line + "\n"), std::string::npos) << line << "\n" << text;
  EXPECT_EQ(text.find("process_open_fds 0\n"), std::string::npos);
}

TEST(ApiErrorOf, SaysWhatAClientMayKnow) {
  const auto status = [](const auto& exception) { return api_error(std::make_exception_ptr(exception)).status; };
  EXPECT_EQ(status(ApiError(418, "teapot")), 418);
  EXPECT_EQ(status(speech::QueueFull("full")), 429);
  EXPECT_EQ(status(speech::Cancelled("cancelled")), 503);
  EXPECT_EQ(status(InvalidArgument("bad")), 400);
  EXPECT_EQ(status(OutOfMemory("secret")), 500);
  EXPECT_EQ(std::string(api_error(std::make_exception_ptr(Error("secret"))).what()).find("secret"), std::string::npos);
  const auto after_submit = [](const auto& exception) { return engine_error(std::make_exception_ptr(exception)); };
  EXPECT_EQ(after_submit(InvalidArgument("secret")).status, 500);
  EXPECT_EQ(std::string(after_submit(InvalidArgument("secret")).what()).find("secret"), std::string::npos);
  EXPECT_EQ(after_submit(speech::Cancelled("cancelled")).status, 503);
  Service service;
  EXPECT_THROW(service.engine(), ApiError);
}

/// Keeps an answer.
struct KeptAnswer : Responder {
  void send(int its_status, Headers its_headers, std::string its_body) override {
    status = its_status;
    headers = std::move(its_headers);
    body = std::move(its_body);
  }
  void begin(int, Headers) override {}
  void write(std::string) override {}
  void end() override {}
  void on_gone(std::function<void()>) override {}
  std::string header(const std::string& name) const {
    for (const auto& [key, value] : headers)
      if (key == name) return value;
    return "";
  }
  int status = 0;
  Headers headers;
  std::string body;
};

KeptAnswer answer_of(const Handler& handler, HttpRequest request) {
  const auto answer = std::make_shared<KeptAnswer>();
  handler(std::make_shared<HttpRequest>(std::move(request)), answer);
  return *answer;
}

HttpRequest request_for(const std::string& path) {
  HttpRequest request;
  request.path = path;
  return request;
}

TEST(Page, IsServedWithAPolicyForItself) {
  EXPECT_EQ(page_text(), [] {
    std::ifstream file(TILEWAVE_SOURCE_DIR "/apps/serve/page/index.html");
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  }());
  const KeptAnswer page = answer_of(page_handler(), {});
  EXPECT_EQ(page.body, page_text());
  const std::string policy = page.header("Content-Security-Policy");
  EXPECT_NE(policy.find("script-src 'sha256-"), std::string::npos) << policy;
  EXPECT_NE(policy.find("style-src 'sha256-"), std::string::npos) << policy;
  HttpRequest again;
  again.headers = {{"If-None-Match", page.header("ETag")}};
  EXPECT_EQ(answer_of(page_handler(), again).status, 304);
  again.headers = {{"If-None-Match", "\"other\""}};
  EXPECT_EQ(answer_of(page_handler(), again).status, 200);
}

TEST(Samples, AreThoseThatTheListNames) {
  const Handler handler = samples_handler(TILEWAVE_SOURCE_DIR "/assets/samples");
  const auto get = [&](const std::string& path) { return answer_of(handler, request_for(path)); };
  const nlohmann::json list = nlohmann::json::parse(get("/samples").body);
  ASSERT_EQ(list.size(), 3U);
  EXPECT_EQ(list[0]["name"], "digits-1.wav");
  EXPECT_EQ(list[0]["text"], "six seven nine one");
  EXPECT_EQ(get("/samples/digits-1.wav").body.substr(0, 4), "RIFF");
  for (const char* other : {"/samples/transcripts.txt", "/samples/../samples/digits-1.wav", "/samples/README.md", "/samples/x"})
    EXPECT_THROW(get(other), ApiError) << other;
  EXPECT_EQ(answer_of(samples_handler("/nonexistent"), request_for("/samples")).body, "[]");
}

TEST(Workers, RunWhatIsQueuedBeforeTheyEnd) {
  std::atomic<int> done = 0;
  {
    Workers workers(2);
    for (int i = 0; i < 100; ++i) workers.post([&] { ++done; });
  }
  EXPECT_EQ(done, 100);
}

}  // namespace
}  // namespace tw::serve

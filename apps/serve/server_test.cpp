#include "apps/serve/server.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::serve {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// What a client reads back.
struct Answer {
  int status = 0;
  std::string head, body;
  bool complete = false;

  std::string header(const std::string& name) const {
    const std::size_t at = head.find("\r\n" + name + ": ");
    if (at == std::string::npos) return "";
    const std::size_t begin = at + name.size() + 4;
    return head.substr(begin, head.find("\r\n", begin) - begin);
  }
};

/// A client that sends what it is told to.
class Client {
 public:
  explicit Client(int port, int receive_buffer = 0) : descriptor_(socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0) setsockopt(descriptor_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected = connect(descriptor_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  ~Client() { close(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }

  bool send(std::string_view text) {
    while (!text.empty()) {
      const ssize_t sent = ::send(descriptor_, text.data(), text.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      text.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }

  /// Reads more; false: there is no more, or not in time.
  bool read() {
    pollfd poll_for{descriptor_, POLLIN, 0};
    if (poll(&poll_for, 1, 10'000) <= 0) return false;
    char buffer[65536];
    const ssize_t got = recv(descriptor_, buffer, sizeof buffer, 0);
    if (got <= 0) return false;
    pending_.append(buffer, static_cast<std::size_t>(got));
    return true;
  }

  /// Up to the end of the connection.
  std::string rest() {
    while (read()) {
    }
    return std::exchange(pending_, {});
  }

  std::string take(std::size_t bytes) {
    while (pending_.size() < bytes && read()) {
    }
    std::string taken = pending_.substr(0, bytes);
    pending_.erase(0, taken.size());
    return taken;
  }

  std::string take_until(const std::string& end) {
    std::size_t at;
    while ((at = pending_.find(end)) == std::string::npos && read()) {
    }
    return at == std::string::npos ? "" : take(at + end.size());
  }

  Answer answer(bool bodiless = false) {
    Answer answer;
    answer.head = take_until("\r\n\r\n");
    if (answer.head.size() < 12) return answer;
    answer.status = std::atoi(answer.head.c_str() + 9);
    answer.complete = true;
    if (bodiless || answer.status == 204 || answer.status == 304 || answer.status < 200) return answer;
    if (const std::string length = answer.header("Content-Length"); !length.empty()) {
      const auto bytes = static_cast<std::size_t>(std::atoll(length.c_str()));
      answer.body = take(bytes);
      answer.complete = answer.body.size() == bytes;
    } else if (answer.header("Transfer-Encoding") == "chunked") {
      for (;;) {
        const std::string line = take_until("\r\n");
        if (line.empty()) {
          answer.complete = false;
          break;
        }
        const auto size = static_cast<std::size_t>(std::strtoul(line.c_str(), nullptr, 16));
        answer.body += take(size);
        take(2);
        if (size == 0) break;
      }
    } else {
      answer.body = rest();
    }
    return answer;
  }

  Answer request(std::string_view text) {
    send(text);
    return answer(text.starts_with("HEAD"));
  }

  bool connected = false;

 private:
  int descriptor_;
  std::string pending_;
};

std::string get(const std::string& path, const std::string& headers = "") {
  return tw::format("GET {} HTTP/1.1\r\nHost: a\r\n{}\r\n", path, headers);
}
std::string post(const std::string& path, const std::string& body, const std::string& headers = "") {
  return tw::format("POST {} HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n{}\r\n{}", path, body.size(), headers, body);
}

/// A frame of a WebSocket's client: masked, with a mask of zeros.
std::string frame(int opcode, const std::string& text, bool last = true) {
  std::string bytes(1, static_cast<char>(opcode | (last ? 0x80 : 0)));
  if (text.size() < 126) {
    bytes += static_cast<char>(0x80 | text.size());
  } else {
    bytes += static_cast<char>(0x80 | (text.size() < 65536 ? 126 : 127));
    for (int shift = text.size() < 65536 ? 8 : 56; shift >= 0; shift -= 8) bytes += static_cast<char>(text.size() >> shift & 0xFF);
  }
  return bytes + std::string(4, '\0') + text;
}

/// Opcode and payload of the server's next frame; opcode -1: none comes.
std::pair<int, std::string> read_frame(Client& client) {
  const std::string head = client.take(2);
  if (head.size() < 2) return {-1, ""};
  std::size_t size = static_cast<unsigned char>(head[1]) & 0x7F;
  if (size >= 126) {
    const std::string bytes = client.take(size == 126 ? 2 : 8);
    size = 0;
    for (const char byte : bytes) size = size << 8 | static_cast<unsigned char>(byte);
  }
  return {head[0] & 0x0F, client.take(size)};
}

/// The code of a close frame; 0 if it is another, or the connection ended without one.
int close_code(Client& client) {
  const auto [opcode, payload] = read_frame(client);
  if (opcode != 8 || payload.size() < 2) return 0;
  return static_cast<unsigned char>(payload[0]) << 8 | static_cast<unsigned char>(payload[1]);
}

const std::string kUpgrade =
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

/// A value that one thread waits for and another sets.
class Event {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  bool wait(std::chrono::milliseconds time = 10s) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [&] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

struct EchoSession : WebSocketSession {
  explicit EchoSession(std::shared_ptr<WebSocket> its_socket, Event& its_end) : socket(std::move(its_socket)), ended(its_end) {}
  ~EchoSession() override { ended.set(); }
  void on_text(std::string message) override {
    if (message == "throw") throw std::runtime_error("a handler's error");
    if (message == "close") return socket->close(4000, "asked");
    if (message == "flood") {
      for (int i = 0; i < 40; ++i) socket->send(std::string(1 << 20, 'x'));
      return;
    }
    socket->send("text " + message);
  }
  void on_binary(std::string message) override { socket->send(tw::format("binary {}", message.size())); }

  std::shared_ptr<WebSocket> socket;
  Event& ended;
};

class ServerTest : public testing::Test {
 protected:
  using Request = std::shared_ptr<const HttpRequest>;
  using Answering = std::shared_ptr<Responder>;

  ServerTest() : log_file_(open_memstream(&log_text_, &log_size_)) { log_.emplace(LogFormat::text, LogLevel::debug, log_file_); }
  ~ServerTest() override {
    held_.reset();
    server_.reset();
    log_.reset();
    std::fclose(log_file_);
    std::free(log_text_);
  }

  void start(ServerOptions options = {}) {
    options.port = 0;
    std::vector<Route> routes = {
        {.method = "GET",
         .path = "/echo",
         .handler =
             [](const Request& request, const Answering& answer) {
               answer->send(200, {{"Content-Type", "text/plain"}}, request->path);
             },
         .open = true,
         .quick = true},
        {.method = "POST",
         .path = "/echo",
         .handler =
             [](const Request& request, const Answering& answer) {
               std::string text = request->body;
               for (const auto& [name, value] : request->query) text += tw::format(" {}={}", name, value);
               answer->send(200, {}, text);
             }},
        {.method = "GET",
         .path = "/things/{id}",
         .handler = [](const Request& request, const Answering& answer) { answer->send(200, {}, request->path); }},
        {.method = "GET",
         .path = "/stream",
         .handler =
             [](const Request&, const Answering& answer) {
               answer->begin(200, {{"Content-Type", "text/event-stream"}});
               answer->write("one ");
               answer->write("two ");
               answer->write("");
               answer->write("three");
               answer->end();
             }},
        {.method = "GET",
         .path = "/large",
         .handler = [](const Request&, const Answering& answer) { answer->send(200, {}, std::string(64 << 20, 'x')); }},
        {.method = "GET",
         .path = "/flood",
         .handler =
             [this](const Request&, const Answering& answer) {
               answer->on_gone([this] { gone_.set(); });
               answer->begin(200, {});
               for (int i = 0; i < 64; ++i) answer->write(std::string(1 << 20, 'x'));
               answer->end();
             }},
        // Answered by the test.
        {.method = "GET",
         .path = "/held",
         .handler =
             [this](const Request&, const Answering& answer) {
               answer->on_gone([this] { gone_.set(); });
               held_ = answer;
               came_.set();
             }},
        {.method = "GET", .path = "/dropped", .handler = [](const Request&, const Answering&) {}},
        {.method = "GET",
         .path = "/throws",
         .handler = [](const Request& request, const Answering&) -> void {
           if (request->query.empty()) throw std::runtime_error("/secret/path");
           throw speech::QueueFull("full");
         }},
        {.method = "GET",
         .path = "/headers",
         .handler =
             [](const Request& request, const Answering& answer) {
               answer->send(200, {{"X-Back", request->query.at(0).second}}, "");
             }},
        {.method = "GET",
         .path = "/client",
         .handler = [](const Request& request, const Answering& answer) { answer->send(200, {}, std::to_string(request->client)); }},
        {.method = "GET",
         .path = "/socket",
         .websocket = [this](const Request& request, std::shared_ptr<WebSocket> socket) -> std::unique_ptr<WebSocketSession> {
           if (!request->query.empty()) throw ApiError(400, "no such intent", "intent");
           socket->send("hello");
           return std::make_unique<EchoSession>(std::move(socket), ended_);
         }},
    };
    server_.emplace(service_, *log_, std::move(routes), std::move(options));
  }

  Client client() { return Client(server_->port()); }
  Answer request(const std::string& text) { return client().request(text); }
  std::string log() {
    std::fflush(log_file_);
    return {log_text_, log_size_};
  }
  std::string metrics() { return service_.metrics.text(nullptr); }
  /// Waits until the metrics say `line`.
  bool becomes(const std::string& line) {
    for (int i = 0; i < 1000; ++i, std::this_thread::sleep_for(5ms))
      if (metrics().find("\n" + line + "\n") != std::string::npos) return true;
    return false;
  }

  /// A WebSocket after its handshake and "hello".
  void open(Client& socket, const std::string& path = "/socket") {
    ASSERT_EQ(socket.request(get(path, kUpgrade)).status, 101);
    ASSERT_EQ(read_frame(socket), std::pair(1, std::string("hello")));
  }

  Service service_;
  Event gone_, came_, ended_;
  std::shared_ptr<Responder> held_;
  std::optional<Server> server_;

 private:
  char* log_text_ = nullptr;
  std::size_t log_size_ = 0;
  std::FILE* log_file_;
  std::optional<Log> log_;
};

TEST_F(ServerTest, AnswersRequestAfterRequest) {
  start();
  Client client(server_->port());
  for (int i = 0; i < 3; ++i) {
    const Answer answer = client.request(get("/echo"));
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.body, "/echo");
    EXPECT_EQ(answer.header("Content-Type"), "text/plain");
    EXPECT_EQ(answer.header("Connection"), "");
    EXPECT_FALSE(answer.header("Date").empty());
  }
  EXPECT_EQ(client.request(post("/echo?b=%41+c&d", "body")).body, "body b=A c d=");
  EXPECT_EQ(client.request(get("/things/a/b%20c")).body, "/things/a/b c");
  EXPECT_EQ(client.request(get("/echo", "Connection: close\r\n")).header("Connection"), "close");
  EXPECT_EQ(client.rest(), "");
  client.close();
  EXPECT_TRUE(becomes("tilewave_connections 0"));
  EXPECT_NE(metrics().find(R"(tilewave_requests_total{route="/things/{id}",status="200"} 1)"), std::string::npos) << metrics();
}

TEST_F(ServerTest, AnswersPipelinedRequestsInOrder) {
  start();
  Client client(server_->port());
  std::string requests;
  for (int i = 0; i < 300; ++i) requests += i % 3 == 0 ? post("/echo", tw::format("{}", i)) : get(tw::format("/things/{}", i));
  std::thread sender([&] { client.send(requests); });
  for (int i = 0; i < 300; ++i) ASSERT_EQ(client.answer().body, i % 3 == 0 ? tw::format("{}", i) : tw::format("/things/{}", i));
  sender.join();
}

TEST_F(ServerTest, SendsChunks) {
  start();
  Client client(server_->port());
  const Answer answer = client.request(get("/stream"));
  EXPECT_EQ(answer.header("Transfer-Encoding"), "chunked");
  EXPECT_EQ(answer.header("Content-Length"), "");
  EXPECT_EQ(answer.body, "one two three");
  EXPECT_TRUE(answer.complete);
  EXPECT_EQ(client.request(get("/echo")).body, "/echo");  // the connection goes on
  // HTTP/1.0 has no chunks.
  Client old(server_->port());
  const Answer plain = old.request("GET /stream HTTP/1.0\r\n\r\n");
  EXPECT_EQ(plain.header("Transfer-Encoding"), "");
  EXPECT_EQ(plain.header("Connection"), "close");
  EXPECT_EQ(plain.body, "one two three");
}

TEST_F(ServerTest, ReadsChunksAndWaitsToBeAskedForABody) {
  start();
  Client client(server_->port());
  EXPECT_EQ(
      client.request("POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\n\r\n").body,
      "abcdefg");
  EXPECT_EQ(client.request("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n").status, 100);
  EXPECT_EQ(client.request("ab").body, "ab");
  EXPECT_EQ(client.request("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: wonders\r\n\r\n").status, 417);
  // A large body, in pieces.
  Client other(server_->port());
  const std::string body(5'000'000, 'b');
  EXPECT_EQ(other.request(post("/echo", body)).body, body);
  EXPECT_EQ(other.request(post("/echo", "")).body, "");
}

TEST_F(ServerTest, AnswersHeadOptionsAndUnknownPaths) {
  start();
  Client client(server_->port());
  const Answer head = client.request("HEAD /echo HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.header("Content-Length"), "5");
  EXPECT_EQ(client.request("HEAD /stream HTTP/1.1\r\nHost: a\r\n\r\n").status, 200);
  const Answer options = client.request("OPTIONS /echo HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_EQ(options.status, 204);
  EXPECT_EQ(options.header("Allow"), "GET, HEAD, POST, OPTIONS");
  EXPECT_EQ(client.request("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n").status, 204);
  const Answer unknown = client.request(get("/nothing\"here"));
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(unknown.header("Content-Type"), "application/json");
  EXPECT_EQ(unknown.body,
            R"({"error":{"message":"there is no GET /nothing\"here","type":"invalid_request_error","param":null,"code":"not_found"}})");
  const Answer method = client.request("DELETE /echo HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_EQ(method.status, 405);
  EXPECT_EQ(method.header("Allow"), "GET, HEAD, POST, OPTIONS");
  EXPECT_EQ(client.request("BREW /echo HTTP/1.1\r\nHost: a\r\n\r\n").status, 405);
  EXPECT_EQ(client.request(get("/echo")).status, 200);  // none of that ended the connection
  EXPECT_EQ(client.request(get("http://a:80/echo?x")).body, "/echo");
}

TEST_F(ServerTest, RefusesWhatIsNoRequest) {
  start();
  const std::string bad[] = {
      "nonsense\r\n\r\n",
      "GET\r\n\r\n",
      "GET /echo HTTP/9.1\r\nHost: a\r\n\r\n",
      "GET /echo HTTP/1.1\r\nHost a\r\n\r\n",
      "GET /echo HTTP/1.1\r\n\r\n",
      "GET echo HTTP/1.1\r\nHost: a\r\n\r\n",
      "GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n",
      "GET /%00 HTTP/1.1\r\nHost: a\r\n\r\n",
      "GET /echo?a=%4 HTTP/1.1\r\nHost: a\r\n\r\n",
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 15),  // TLS
      "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
      "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
      "POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
  };
  for (const std::string& text : bad) {
    Client client(server_->port());
    const Answer answer = client.request(text);
    EXPECT_EQ(answer.status, 400) << text;
    EXPECT_NE(answer.body.find("invalid_request_error"), std::string::npos) << answer.body;
    EXPECT_EQ(client.rest(), "") << text;
  }
  const Answer long_headers = request(get("/echo", "X: " + std::string(20000, 'x') + "\r\n"));
  EXPECT_EQ(long_headers.status, 431);
  EXPECT_EQ(request("GET /" + std::string(20000, 'x') + " HTTP/1.1\r\nHost: a\r\n\r\n").status, 431);
  EXPECT_EQ(request(get("/echo")).status, 200);
}

TEST_F(ServerTest, RefusesLargeBodies) {
  service_.limits.upload_bytes = 1000;
  start();
  EXPECT_EQ(request(post("/echo", std::string(1000, 'x'))).status, 200);
  // Before it is sent, and although it is sent.
  EXPECT_EQ(request("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n").status, 413);
  const Answer large = request(post("/echo", std::string(3'000'000, 'x')));
  EXPECT_EQ(large.status, 413);
  EXPECT_EQ(large.header("Connection"), "close");
  EXPECT_NE(large.body.find("more than 1000 bytes"), std::string::npos);
  EXPECT_EQ(
      request("POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + std::string(1001, 'x') + "\r\n0\r\n\r\n")
          .status,
      413);
}

TEST_F(ServerTest, BoundsTheMemoryOfAllBodies) {
  service_.limits.upload_memory_bytes = 100'000;
  start();
  int status = 0;
  bool held = false;
  for (int attempt = 0; attempt < 20 && !held; ++attempt) {  // while both bodies arrive, either may be the one that is refused
    Client slow(server_->port());
    slow.send("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 90000\r\n\r\n" + std::string(80'000, 'x'));
    status = 0;
    for (int i = 0; i < 200 && status != 503; ++i, std::this_thread::sleep_for(1ms)) {  // until the first has arrived
      const Answer answer = request(post("/echo", std::string(50'000, 'y')));
      status = answer.status;
      if (status == 503) {
        EXPECT_EQ(answer.header("Retry-After"), "1");
      }
    }
    held = status == 503 && slow.request(std::string(10'000, 'x')).body == std::string(90'000, 'x');
  }
  EXPECT_TRUE(held);
  // All of it is given back.
  for (int i = 0; i < 1000 && status != 200; ++i, std::this_thread::sleep_for(1ms))
    status = request(post("/echo", std::string(90'000, 'y'))).status;
  EXPECT_EQ(status, 200);
}

TEST_F(ServerTest, EndsSlowRequests) {
  service_.limits.header_seconds = 0.15;
  service_.limits.idle_seconds = 0.15;
  start();
  const auto begin = Clock::now();
  // One byte after another does not help.
  Client slow(server_->port()), silent(server_->port()), body(server_->port()), idle(server_->port());
  EXPECT_EQ(idle.request(get("/echo")).status, 200);
  body.send("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc");
  for (const char c : std::string_view("GET /ec")) {
    slow.send(std::string(1, c));
    std::this_thread::sleep_for(20ms);
  }
  EXPECT_EQ(slow.answer().status, 408);
  EXPECT_EQ(body.answer().status, 408);
  EXPECT_EQ(silent.rest(), "");
  EXPECT_EQ(idle.rest(), "");
  EXPECT_GT(seconds_since(begin), 0.14);
  EXPECT_LT(seconds_since(begin), 5);
}

TEST_F(ServerTest, EndsSlowAnswers) {
  service_.limits.request_seconds = 0.2;
  start();
  Client client(server_->port());
  const Answer answer = client.request(get("/held"));
  EXPECT_EQ(answer.status, 503);
  EXPECT_NE(answer.body.find("request_timeout"), std::string::npos);
  EXPECT_TRUE(gone_.wait());
  held_->send(200, {}, "too late");
  EXPECT_EQ(client.rest(), "");
}

TEST_F(ServerTest, EndsSlowReaders) {
  service_.limits.idle_seconds = 0.15;
  start();
  Client client(server_->port(), 4096);
  client.send(get("/large"));
  EXPECT_TRUE(becomes("tilewave_connections 1"));
  EXPECT_TRUE(becomes("tilewave_connections 0"));
  EXPECT_LT(client.rest().size(), std::size_t{64} << 20);
}

TEST_F(ServerTest, BoundsWhatWaitsForItsReader) {
  start();
  Client client(server_->port(), 4096);
  client.send(get("/flood"));
  EXPECT_TRUE(gone_.wait());
  EXPECT_NE(metrics().find(R"(tilewave_refused_total{reason="slow_client"} 1)"), std::string::npos) << metrics();
}

TEST_F(ServerTest, SaysThatAClientIsGone) {
  start();
  Client client(server_->port());
  client.send(get("/held") + get("/echo"));  // also with a request behind
  ASSERT_TRUE(came_.wait());
  EXPECT_FALSE(gone_.wait(20ms));
  client.close();
  EXPECT_TRUE(gone_.wait());
  Event again;
  held_->on_gone([&] { again.set(); });  // it is, already
  EXPECT_TRUE(again.wait());
  held_->begin(200, {});
  held_->write("nobody reads this");
  held_->end();
  held_.reset();
  EXPECT_TRUE(becomes("tilewave_connections 0"));
}

TEST_F(ServerTest, AnswersWhateverAHandlerDoes) {
  start();
  const Answer dropped = request(get("/dropped"));
  EXPECT_EQ(dropped.status, 500);
  const Answer thrown = request(get("/throws"));
  EXPECT_EQ(thrown.status, 500);
  EXPECT_EQ(thrown.body.find("secret"), std::string::npos);
  EXPECT_NE(log().find("what=/secret/path"), std::string::npos);
  const Answer full = request(get("/throws?full"));
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(full.header("Retry-After"), "1");
  // A header that a handler takes from a request stays one header.
  EXPECT_EQ(request(get("/headers?a=b%0d%0aSet-Cookie:%20c")).header("X-Back"), "b  Set-Cookie: c");
  // An answer that was begun, and dropped, is incomplete.
  Client client(server_->port());
  client.send(get("/held"));
  ASSERT_TRUE(came_.wait());
  held_->begin(200, {});
  held_->write("some");
  held_.reset();
  const Answer some = client.answer();
  EXPECT_EQ(some.status, 200);
  EXPECT_FALSE(some.complete);
}

TEST_F(ServerTest, KeepsSaneIdsAndLogsNothingUnescaped) {
  start();
  EXPECT_EQ(request(get("/echo", "X-Request-Id: my-id_1.2\r\n")).header("X-Request-Id"), "my-id_1.2");
  for (const std::string& bad : {std::string("a b"), std::string(200, 'x'), std::string("\"><"), std::string("a\x1b[31m")}) {
    const std::string id = request(get("/echo", "X-Request-Id: " + bad + "\r\n")).header("X-Request-Id");
    EXPECT_EQ(id.rfind("req_", 0), 0U) << bad;
    EXPECT_EQ(id.size(), 28U);
  }
  EXPECT_NE(request(get("/echo")).header("X-Request-Id"), request(get("/echo")).header("X-Request-Id"));
  request(get("/%0Ainfo%20forged%1b[31m\xc2\x9b\xff"));
  EXPECT_TRUE(becomes("tilewave_connections 0"));
  const std::string text = log();
  EXPECT_NE(text.find("id=my-id_1.2 client=127.0.0.1 method=GET path=/echo status=200"), std::string::npos) << text;
  EXPECT_NE(text.find(R"(path="/\ninfo forged\u001b[31m)"), std::string::npos) << text;
  for (const char c : text) EXPECT_TRUE((c >= ' ' && c < 0x7F) || c == '\n') << text;
}

TEST_F(ServerTest, WantsAKey) {
  start({.keys = ApiKeys({"right", "other"})});
  EXPECT_EQ(request(get("/echo")).status, 200);  // an open route
  const Answer without = request(get("/client"));
  EXPECT_EQ(without.status, 401);
  EXPECT_EQ(without.header("WWW-Authenticate"), "Bearer");
  EXPECT_NE(without.body.find(R"("type":"authentication_error")"), std::string::npos);
  EXPECT_NE(without.body.find(R"("code":"invalid_api_key")"), std::string::npos);
  for (const char* bad : {"Bearer wrong", "Bearer", "Bearer righ", "Bearer rightt", "right", "Basic right", "Bearer  "})
    EXPECT_EQ(request(get("/client", tw::format("Authorization: {}\r\n", bad))).status, 401) << bad;
  const std::string right = request(get("/client", "Authorization: Bearer right\r\n")).body;
  EXPECT_EQ(request(get("/client", "authorization: bearer right\r\n")).body, right);
  EXPECT_NE(request(get("/client", "Authorization: Bearer other\r\n")).body, right);  // another client
  EXPECT_EQ(request("OPTIONS /client HTTP/1.1\r\nHost: a\r\n\r\n").status, 204);      // browsers ask without a key
  // The body of a refused request need not be read.
  EXPECT_EQ(request("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n").status, 401);
  Client socket(server_->port());
  EXPECT_EQ(socket.request(get("/socket", kUpgrade)).status, 401);
  const Answer upgraded = socket.request(get("/socket", kUpgrade + "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.right\r\n"));
  EXPECT_EQ(upgraded.status, 101);
  EXPECT_EQ(upgraded.header("Sec-WebSocket-Protocol"), "realtime");
}

TEST_F(ServerTest, NamesTheOriginsThatMayUseIt) {
  start({.cors = Cors({"https://a.example"})});
  const std::string allowed = "Origin: https://a.example\r\n", other = "Origin: https://b.example\r\n";
  const Answer preflight =
      request("OPTIONS /echo HTTP/1.1\r\nHost: a\r\n" + allowed +
              "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,x-stainless-os\r\n\r\n");
  EXPECT_EQ(preflight.status, 204);
  EXPECT_EQ(preflight.header("Access-Control-Allow-Origin"), "https://a.example");
  EXPECT_EQ(preflight.header("Access-Control-Allow-Headers"), "authorization,x-stainless-os");
  EXPECT_EQ(preflight.header("Access-Control-Allow-Methods"), "GET, HEAD, POST, OPTIONS");
  EXPECT_EQ(request("OPTIONS /echo HTTP/1.1\r\nHost: a\r\n" + other + "\r\n").header("Access-Control-Allow-Origin"), "");
  EXPECT_EQ(request(get("/echo", allowed)).header("Access-Control-Allow-Origin"), "https://a.example");
  EXPECT_EQ(request(get("/echo", other)).header("Access-Control-Allow-Origin"), "");
  EXPECT_EQ(request(get("/nothing", allowed)).header("Access-Control-Allow-Origin"), "https://a.example");  // errors, too
  EXPECT_EQ(request(get("/echo")).header("Vary"), "Origin");
  // A WebSocket is not asked for by a preflight.
  EXPECT_EQ(request(get("/socket", kUpgrade + other)).status, 403);
  EXPECT_EQ(request(get("/socket", kUpgrade + "Origin: http://a\r\n")).status, 101);  // the server's own page: Host is a
  EXPECT_EQ(request(get("/socket", kUpgrade + allowed)).status, 101);
}

TEST_F(ServerTest, RefusesMoreConnections) {
  service_.limits.connections = 2;
  start();
  Client first(server_->port()), second(server_->port());
  EXPECT_EQ(first.request(get("/echo")).status, 200);
  EXPECT_EQ(second.request(get("/echo")).status, 200);
  const Answer third = request(get("/echo"));
  EXPECT_EQ(third.status, 503);
  EXPECT_EQ(third.header("Retry-After"), "1");
  first.close();
  int status = 0;
  for (int i = 0; i < 1000 && status != 200; ++i, std::this_thread::sleep_for(1ms)) status = request(get("/echo")).status;
  EXPECT_EQ(status, 200);
}

TEST_F(ServerTest, EndsWhenEverythingIsAnswered) {
  service_.limits.grace_seconds = 0;
  start();
  Client busy(server_->port()), kept(server_->port()), late(server_->port());
  busy.send(get("/held"));
  ASSERT_TRUE(came_.wait());
  for (Client* client : {&kept, &late}) EXPECT_EQ(client->request(get("/echo")).status, 200);
  server_->drain();
  while (!service_.draining) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(1ms);
  EXPECT_EQ(late.request(get("/things/1")).status, 503);
  // Quick routes still answer: a load balancer asks them.
  const Answer quick = kept.request(get("/echo"));
  EXPECT_EQ(quick.status, 200);
  EXPECT_EQ(quick.header("Connection"), "close");
  for (int i = 0; i < 1000 && Client(server_->port()).connected; ++i) std::this_thread::sleep_for(1ms);
  EXPECT_FALSE(Client(server_->port()).connected);
  held_->send(200, {}, "done");
  held_.reset();
  const Answer done = busy.answer();
  EXPECT_EQ(done.body, "done");
  EXPECT_EQ(done.header("Connection"), "close");
  busy.close();
  server_->wait();
  EXPECT_NE(metrics().find("\ntilewave_connections 0\n"), std::string::npos);
}

TEST_F(ServerTest, AnswersWhatIsOnTheWayWhenItEnds) {
  start();
  Client fresh(server_->port()), kept(server_->port()), busy(server_->port());
  EXPECT_EQ(kept.request(get("/echo")).status, 200);
  busy.send(get("/held"));
  ASSERT_TRUE(came_.wait());
  server_->drain();
  while (!service_.draining) std::this_thread::sleep_for(1ms);
  for (Client* client : {&fresh, &kept}) {
    const Answer answer = client->request(post("/echo", "body"));
    EXPECT_EQ(answer.body, "body");
    EXPECT_EQ(answer.header("Connection"), "close");
    client->close();
  }
  held_->send(200, {}, "done");
  held_.reset();
  EXPECT_EQ(busy.answer().body, "done");
  busy.close();
  server_->wait();
}

TEST_F(ServerTest, NamesAnAddressThatCannotBeUsed) {
  start();
  ServerOptions options{.port = server_->port()};
  Log log(LogFormat::text, LogLevel::none);
  const auto message = [&] {
    try {
      const Server second(service_, log, {}, options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(), tw::format("cannot listen on 127.0.0.1:{}: Address already in use", options.port));
  options.host = "host.invalid";
  EXPECT_EQ(message().rfind("cannot listen on host.invalid:", 0), 0U) << message();
}

TEST_F(ServerTest, OpensWebSockets) {
  start();
  Client client(server_->port());
  const Answer answer = client.request(get("/socket", kUpgrade + "X-Request-Id: socket-1\r\n"));
  ASSERT_EQ(answer.status, 101);
  EXPECT_EQ(answer.header("Sec-WebSocket-Accept"), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");  // RFC 6455, 1.3
  EXPECT_EQ(answer.header("X-Request-Id"), "socket-1");
  EXPECT_EQ(read_frame(client).second, "hello");
  client.send(frame(1, "a") + frame(2, "bcd") + frame(9, "ping"));
  EXPECT_EQ(read_frame(client), std::pair(1, std::string("text a")));
  std::pair<int, std::string> next = read_frame(client), pong = read_frame(client);
  if (next.first == 10) std::swap(next, pong);
  EXPECT_EQ(next, std::pair(1, std::string("binary 3")));
  EXPECT_EQ(pong, std::pair(10, std::string("ping")));
  client.send(frame(1, "in ", false) + frame(0, "pieces"));
  EXPECT_EQ(read_frame(client).second, "text in pieces");
  client.send(frame(1, "close"));
  EXPECT_EQ(close_code(client), 4000);
  client.send(frame(8, "\x0f\xa0"));
  EXPECT_EQ(client.rest(), "");
  client.close();
  EXPECT_TRUE(ended_.wait());
  EXPECT_TRUE(becomes("tilewave_websockets 0"));
  EXPECT_TRUE(becomes("tilewave_connections 0"));
}

TEST_F(ServerTest, RefusesUpgrades) {
  start();
  Client client(server_->port());
  const Answer plain = client.request(get("/socket"));
  EXPECT_EQ(plain.status, 426);
  EXPECT_EQ(plain.header("Upgrade"), "websocket");
  const Answer refused = client.request(get("/socket?intent=other", kUpgrade));
  EXPECT_EQ(refused.status, 400);
  EXPECT_NE(refused.body.find(R"("param":"intent")"), std::string::npos);
  EXPECT_EQ(client.request(get("/echo", kUpgrade)).status, 200);  // asks for what the path does not have: the upgrade is ignored
  const std::string upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\n", version = "Sec-WebSocket-Version: 13\r\n";
  const Answer keyless = client.request(get("/socket", upgrade + version));
  EXPECT_EQ(keyless.status, 400);
  EXPECT_NE(keyless.body.find(R"("param":"Sec-WebSocket-Key")"), std::string::npos) << keyless.body;
  const Answer bad_key = client.request(get("/socket", upgrade + version + "Sec-WebSocket-Key: " + std::string(25, 'x') + "\r\n"));
  EXPECT_EQ(bad_key.status, 400);
  EXPECT_NE(bad_key.body.find(R"("param":"Sec-WebSocket-Key")"), std::string::npos) << bad_key.body;
  const Answer old =
      client.request(get("/socket", upgrade + "Sec-WebSocket-Version: 8\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"));
  EXPECT_EQ(old.status, 426);
  EXPECT_EQ(old.header("Sec-WebSocket-Version"), "13");
  EXPECT_NE(old.body.find(R"("param":"Sec-WebSocket-Version")"), std::string::npos) << old.body;
}

TEST_F(ServerTest, EndsWebSocketsThatBreakTheRules) {
  service_.limits.websocket_message_bytes = 1000;
  start();
  const std::pair<std::string, int> cases[] = {
      {frame(1, std::string(1001, 'x')), 1009},
      {frame(1, "\xff"), 1007},
      {std::string("\x81\x01x", 3), 1002},  // not masked
      {frame(1, "throw"), 1011},
  };
  for (const auto& [bytes, code] : cases) {
    Client client(server_->port());
    open(client);
    client.send(bytes);
    EXPECT_EQ(close_code(client), code);
    client.close();
  }
  Client gone(server_->port());
  open(gone);
  gone.send(frame(1, "half of it", false));
  gone.close();
  EXPECT_TRUE(becomes("tilewave_websockets 0"));
  EXPECT_TRUE(becomes("tilewave_connections 0"));
}

TEST_F(ServerTest, EndsWebSocketsThatAreSilentOrDoNotRead) {
  service_.limits.idle_seconds = 0.3;
  start();
  Client silent(server_->port()), slow(server_->port(), 4096);
  open(silent);
  open(slow);
  slow.send(frame(1, "flood"));
  EXPECT_EQ(read_frame(silent).first, 9);  // a ping, which it does not answer
  EXPECT_TRUE(becomes("tilewave_websockets 0"));
}

TEST_F(ServerTest, ClosesWebSocketsWhenItEnds) {
  start();
  Client client(server_->port());
  open(client);
  server_->drain();
  EXPECT_EQ(close_code(client), 1001);
  client.send(frame(8, "\x03\xe9"));
  client.close();
  server_->wait();
  EXPECT_TRUE(ended_.wait(0ms));
}

TEST_F(ServerTest, EndsWithConnectionsOfAnyState) {
  start();
  Client idle(server_->port()), half(server_->port()), body(server_->port()), held(server_->port()), socket(server_->port());
  EXPECT_EQ(idle.request(get("/echo")).status, 200);
  half.send("GET /ec");
  body.send("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc");
  open(socket);
  held.send(get("/held"));
  ASSERT_TRUE(came_.wait());
  held_.reset();
  server_.reset();
  EXPECT_TRUE(ended_.wait(0ms));
}

}  // namespace
}  // namespace tw::serve
